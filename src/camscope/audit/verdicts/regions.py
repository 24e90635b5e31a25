"""Regions: whether the answer depends on the finding's pixels, or on others, by interventions; and where the maps lie."""

from collections.abc import Iterator

from camscope.audit.numbers import rounded
from camscope.audit.schema import Mass, Number, Summary, Verdict
from camscope.audit.shortcuts.interventions import deciding, evidence, reliance
from camscope.audit.shortcuts.interventions.changes import ENOUGH
from camscope.audit.shortcuts.interventions.judging import FILLS, PREVALENCE
from camscope.audit.shortcuts.scenes import FINDING, ORGAN
from camscope.audit.verdicts.answering import equal, together
from camscope.audit.verdicts.judged import ABOVE, NOTHING, WIDE, Told, beyond, made, out_of_reach, under_all

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
