"""Verdicts about the model: its performance, the regions it depends on, and its features.

- Answering: whether the model tells a finding, and for whom; and whether any number is the same in every subgroup.
- Regions: whether the answer depends on the finding's pixels, or on others, by interventions; and where the maps lie.
- Features: what can be read off them beside the finding, and whether the maps fall into several ways of looking.
"""

from collections.abc import Iterable, Iterator, Sequence

from camscope.audit.core.schema import Leak, Level, Mass, Number, Strategies, Summary, Verdict
from camscope.audit.core.subgroup_levels import FOR_ONE_WAY, RARE
from camscope.audit.core.summary_values import rounded
from camscope.audit.shortcuts.image_edits import ENOUGH
from camscope.audit.shortcuts.region_samples import FINDING, ORGAN
from camscope.audit.shortcuts.reliance import FILLS, PREVALENCE, deciding, evidence, reliance, too_few_for_absence
from camscope.audit.verdicts.rules import ABOVE, NOTHING, WIDE, Told, beyond, lacks, made, out_of_reach, under_all
from camscope.plurals import plural

EQUAL = (
    "supported where the interval of every level lies within the margin, not supported where one lies wholly beyond it; the "
    "intervals of all levels are corrected so that they hold together"
)
EQUAL_EFFECTS = (
    f"{EQUAL}; supported only where either side of every level has so many patients that a reliance of the declared share of "
    "them would have been met (rule of three)"
)


def answering(summary: Summary) -> Iterator[Verdict]:
    """The AUROC of each finding, and its differences between subgroups."""
    for one in summary.predict.findings:
        margin = summary.margins["useful"]
        claim = f"The model tells images with {one.finding} from those without."
        yield made(
            "performance", claim, one.finding, beyond(one.auroc, margin), one.auroc, "performance", ABOVE,
            good=True, margin=margin,
        )  # fmt: skip
        for (_, _, column), own in together(one.levels).items():
            claim = f"It tells {one.finding} equally well whatever the {column}."
            yield equal("performance by subgroup", claim, one.finding, own, "performance", column)


def together(levels: Iterable[Level]) -> dict[tuple[str, str, str], list[Level]]:
    """[finding, region, column]: its levels."""
    found: dict[tuple[str, str, str], list[Level]] = {}
    for one in levels:
        found.setdefault((one.finding, one.region, one.column), []).append(one)
    return found


def equal(
    question: str,
    claim: str,
    finding: str,
    own: Sequence[Level],
    section: str,
    column: str,
    prevalence: float | None = None,
) -> Verdict:
    """Whether no level differs from the others by more than the margin.

    `prevalence`: of effects that may be rare and large, the share of patients whose effect has to be met in every level before
    levels are called equal.
    """
    testable = [one for one in own if one.difference.value is not None]
    apart = [one for one in testable if one.word == "different" and _is_beyond(one)]
    worst = max(apart or testable, key=lambda one: abs(one.difference.value or 0.0), default=own[0])
    found: Told = "not testable", ""
    if apart:
        found = "not supported", f"{worst.level} differs from the others by more than the margin"
    elif {one.word for one in own} == {"equivalent"}:
        few = too_few_for_absence(min(map(_patients, own)), prevalence) if prevalence else ""
        found = ("not testable", few) if few else ("supported", "")
    else:
        found = "not testable", "; ".join(dict.fromkeys(_why_open(own)))
    rule = EQUAL_EFFECTS if prevalence else EQUAL
    return made(
        question, claim, finding, found, worst.difference, section, rule, good=True, margin=worst.margin, subject=column
    )  # fmt: skip


def _patients(one: Level) -> int:
    """Of the smaller side."""
    return min(one.value.groups, max(0, one.difference.groups - one.value.groups))


def _is_beyond(one: Level) -> bool:
    low, high = one.difference.low, one.difference.high
    return low is not None and high is not None and (low > one.margin or high < -one.margin)


def _why_open(own: Sequence[Level]) -> Iterator[str]:
    """Level by level: what it lacks, or what its interval leaves open."""
    for one in own:
        if one.word == "different":
            yield f"{one.level} differs, but perhaps by less than the margin: more images are needed to tell"
        elif one.word != "equivalent":
            yield one.difference.reason or WIDE


RELIES = (
    "supported where the interval of an insertion (the region from an image that has it, with the finding where "
    f"{ENOUGH} or more have both, less the same pixels of one without) lies wholly beyond the margin, up or down, in standard "
    "deviations of the log odds, or where those of the removal of a marker all do to one side, under "
    f"{FILLS} fills at least; not supported where every interval that counts lies within the margin, in so many patients that a "
    "reliance of the declared share of them would have been met with 95 % certainty (rule of three); the removal of what every "
    "image has decides nothing, for the model knows no image without it"
)
SPEAKS = (
    f"{RELIES}; the finding's own pixels have to move them up: where they move them down, it is not supported, and where "
    "insertion and removal move them to different sides, not testable"
)
ANSWERS = (
    "of AUROC and 1 - AUROC, for an inverted answer is an answer, too: supported where the interval of the larger one lies "
    "wholly above the margin, not supported where those of both lie wholly below it, under every fill"
)
INVERTED = "inverted: the AUROC is below a half, and what is shown is 1 - AUROC"
LIES = (
    f"{ABOVE}; not testable where it does not lie wholly above the mean of maps of other patients, too, where the region is "
    "finer than the cells of the map, or so large that no map could reach the margin; it says where to look: whether the answer "
    "relies on the region, interventions say"
)
PLACES = ("background", "border", "corners", "ink", "padding", "pen", "rim", "shell")  # that need no other word


def evident(summary: Summary) -> Iterator[Verdict]:
    """Whether the answer depends on the finding's own pixels."""
    for finding in summary.resolve.findings:
        claim = f"The answer depends on the pixels of {finding} itself."
        yield _reliance(summary, finding, FINDING, claim, "evidence", good=True)


def relying(summary: Summary) -> Iterator[Verdict]:
    """Whether it relies on other regions, and on these in every subgroup alike."""
    for finding in summary.resolve.findings:
        for region in _regions(summary):
            claim = f"The answer for {finding} relies on {_named(region)}."
            yield _reliance(summary, finding, region, claim, "shortcut", good=False)
    for (finding, region, column), own in together(summary.shortcut.levels).items():
        claim = f"What {_named(region)} adds to the answer for {finding} is the same whatever the {column}."
        prevalence = summary.margins.get("prevalence", PREVALENCE)
        subject = f"{column}, effect of {region}"
        yield equal("shortcut by subgroup", claim, finding, own, "shortcut", subject, prevalence)


def _regions(summary: Summary) -> list[str]:
    return [name for name in summary.shortcut.regions if name not in (FINDING, ORGAN)]


def _named(region: str) -> str:
    """As it stands in a sentence."""
    if region.startswith("outside"):
        return f"what lies {region.replace('outside-', 'outside the ').removesuffix('-ct')}"
    if region == "saturated":
        return "small saturated parts"
    return f"the {region}" if region in PLACES else f"the region {region}"


def _reliance(summary: Summary, finding: str, region: str, claim: str, question: str, *, good: bool) -> Verdict:
    own = [one for one in summary.shortcut.interventions if one.region == region and one.finding == finding]
    margin = summary.margins["effect"]
    insert, remove = ([one for one in own if one.kind == kind] for kind in ("insert", "remove"))
    if all(one.effect.value is None for one in (*insert, *remove)):
        reason = summary.shortcut.reason or next(
            (one.effect.reason for one in own), "no image has such a region, or no mask says so"
        )
        found: Told = "not testable", reason
        effect = NOTHING
    else:
        marker = region in summary.shortcut.markers.get(finding, ())
        judge, ways = evidence if region == FINDING else reliance, (insert, remove if marker else [])
        prevalence = summary.margins.get("prevalence", PREVALENCE)
        found = judge(*ways, margin, prevalence, set_aside=[] if marker else remove)
        shown = deciding(*ways, margin) or deciding([], remove, margin)
        effect = NOTHING if shown is None else shown.effect
    rule = SPEAKS if region == FINDING else RELIES
    return made(
        question, claim, finding, found, effect, "shortcut", rule, good=good, margin=margin, subject=region
    )  # fmt: skip


def blanked(summary: Summary) -> Iterator[Verdict]:
    """Whether the model answers without the organ."""
    margin = summary.margins["blanked"]
    for finding in summary.resolve.findings:
        own = [
            one for one in summary.shortcut.blanked if (one.region, one.kind, one.finding) == (ORGAN, "blank", finding)
        ]
        if own:
            claim = f"The model still answers for {finding} when the organ is blanked."
            word, why = under_all([_told_apart(one.auroc, margin) for one in own])
            most = max((one.auroc for one in own), key=_off_chance)
            reason = "; ".join(filter(None, (why, INVERTED if _is_inverted(most) else "")))
            yield made(
                "blanked organ", claim, finding, (word, reason), _turned(most), "shortcut", ANSWERS, good=False,
                margin=margin, subject=ORGAN,
            )  # fmt: skip


def _told_apart(auroc: Number, margin: float) -> Told:
    """Whether an AUROC is beyond a margin on either side of chance; within it only where both ends are."""
    found, turned = beyond(_turned(auroc), margin), auroc if _is_inverted(auroc) else _inverse(auroc)
    if found[0] == "not supported" and beyond(turned, margin)[0] != "not supported":
        return "not testable", WIDE
    return found


def _turned(auroc: Number) -> Number:
    return _inverse(auroc) if _is_inverted(auroc) else auroc


def _is_inverted(auroc: Number) -> bool:
    return auroc.value is not None and auroc.value < 0.5


def _inverse(auroc: Number) -> Number:
    """1 - AUROC, with the ends of the interval exchanged."""
    value, low, high = (None if one is None else rounded(1 - one) for one in (auroc.value, auroc.high, auroc.low))
    return auroc.model_copy(update={"value": value, "low": low, "high": high})


def _off_chance(auroc: Number) -> float:
    return -1.0 if auroc.value is None else abs(auroc.value - 0.5)


def masses(summary: Summary) -> Iterator[Verdict]:
    """Whether the maps lie on other regions."""
    margin = summary.margins["enrichment"]
    for one in summary.shortcut.masses:
        if one.region not in (FINDING, ORGAN):
            claim = f"The maps of {one.method} for {one.finding} lie on {_named(one.region)}."
            yield made(
                "where the maps lie", claim, one.finding, _lies(one, margin), one.enrichment, "shortcut", LIES, good=None,
                margin=margin, subject=f"{one.region} · {one.method}",
            )  # fmt: skip


def _lies(one: Mass, margin: float) -> Told:
    if not one.resolved:
        return "not testable", f"{one.reason}: what a map does not show says nothing of the region"
    if why := out_of_reach(one.most, margin):
        return "not testable", why
    found, base = beyond(one.enrichment, margin), one.enrichment.baseline
    if found[0] == "supported" and base is not None and (one.enrichment.low or 0.0) <= base:
        return "not testable", "it cannot be told from what maps of other patients have in the same place"
    return found


READ = (
    "supported where the interval lies wholly above a half, and the AUROC above that of labels dealt to patients at random, in "
    "every deal; not supported where it is not supported, and the interval lies wholly below the margin"
)
WAYS = (
    "supported where some number of clusters is more stable and more separate than one way of looking would give by itself; not "
    f"supported where none is, among {FOR_ONE_WAY} patients or more: among fewer two clear ways would often not have been found"
)


def leaking(summary: Summary) -> Iterator[Verdict]:
    """Whether columns can be read off the model's features."""
    margin = summary.margins["leak"]
    for one in summary.shortcut.leaks:
        claim = f"The {one.column} can be read off the model's features."
        yield made(
            "leak", claim, "", _read(one, margin), one.auroc, "shortcut", READ, good=None, margin=margin,
            subject=one.column,
        )  # fmt: skip


def _read(one: Leak, margin: float) -> Told:
    if lacking := lacks(one.auroc):
        return "not testable", lacking
    if one.readable:
        return "supported", "above what any deal of the labels gave; the margin is for saying that it cannot be read"
    if one.auroc.high is not None and one.auroc.high < margin:
        return "not supported", ""
    return "not testable", f"{_chance(one)}, and the interval is not wholly below the margin"


def _chance(one: Leak) -> str:
    """Why a probe's AUROC is not above chance, by the numbers beside it."""
    if one.auroc.low is None or one.auroc.low <= 0.5:
        return "the interval includes 0.5, which is chance"
    if one.null_high is not None and (one.auroc.value or 0.0) <= one.null_high:
        return f"labels dealt at random gave as much, {one.null_high:.2f} at most"
    return "the probe was not judged to be above chance"


def several_ways(summary: Summary) -> Iterator[Verdict]:
    """Whether the maps of a method fall into several ways of looking."""
    for one in summary.shortcut.strategies:
        claim = f"The maps of {one.method} for {one.finding} fall into several ways of looking."
        yield made(
            "strategies", claim, one.finding, _fall(one), _stability(one), "clusters", WAYS, good=None, subject=one.method
        )  # fmt: skip


def _fall(one: Strategies) -> Told:
    if one.reason:
        return "not testable", one.reason
    if one.claimed > 1:
        return "supported", ""
    if one.patients < FOR_ONE_WAY:
        return (
            "not testable",
            f"none was found, but among {plural(one.patients, 'patient')} two ways would often not have been: "
            f"{FOR_ONE_WAY} are needed",
        )
    return "not supported", f"a way that fewer than {100 * RARE:.0f} % of the maps show would often not have been found"


def _stability(one: Strategies) -> Number:
    """Of the number of clusters that is claimed, or of the first that would be."""
    best = next((trial for trial in one.trials if trial.k == max(2, one.claimed)), None)
    why = "adjusted Rand index between draws of the patients: there is one such number, and no interval"
    return NOTHING if best is None else Number(
        value=best.stability, n=one.maps, groups=one.patients, baseline=best.null, baseline_name="one way of looking", reason=why
    )  # fmt: skip
