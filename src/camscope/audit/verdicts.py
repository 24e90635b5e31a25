"""Verdicts: what the numbers say of each question, by rules that were declared before. There is no single score.

"supported": the interval lies wholly beyond the margin. "not supported": it lies wholly on the other side. "not testable":
it holds the margin, or there is nothing to test it with; the reason says which.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

from camscope.audit.numbers import rounded
from camscope.audit.schema import Level, Line, Number, Summary, Verdict, Word
from camscope.audit.shortcuts.interventions import deciding, evidence, reliance
from camscope.audit.shortcuts.scenes import FINDING, ORGAN

Speaks = Literal["for", "against", "neither"]
NOTHING = Number(reason="there is nothing to test it with")
ABOVE = "supported where the interval lies wholly above the margin, not supported where it lies wholly below"
EVERY_FILL = f"{ABOVE}, under every fill"
EQUAL = (
    "supported where the interval of every level lies within the margin, not supported where one lies wholly beyond it"
)
RELIES = (
    "supported where inserting the region from an image with the finding, less the same from one without, or removing a marker "
    "under every fill, moves the log odds by more than the margin, in their standard deviations; not supported where neither "
    "does; what is filled where every image has something is no image of the kind the model knows, and decides nothing"
)
SPEAKS = f"{RELIES}; the finding's own pixels have to move them up: where they move them down, it is not supported"
OVER = (
    "supported where the interval lies wholly above the margin, and wholly above the best map that knows nothing of the model; "
    "not supported where it lies wholly below one of them"
)
TURNED = "the better of AUROC and 1 - AUROC, for an inverted answer is an answer, too: "
INVERTED = "inverted: images without the finding are answered higher, and what is shown is 1 - AUROC"
PLACES = ("background", "border", "corners", "ink", "padding", "pen", "rim", "shell")  # that need no other word
WIDE = "the interval holds the margin: more images are needed to tell"


def verdicts(summary: Summary) -> list[Verdict]:
    """Of everything that was found, the questions in the order of the report."""
    return [
        *_answers(summary),
        *_evidence(summary),
        *_shortcuts(summary),
        *_blanked(summary),
        *_localised(summary),
        *_masses(summary),
        *_faithful(summary),
        *_sane(summary),
        *_robust(summary),
        *_leaks(summary),
        *_strategies(summary),
    ]


def beyond(number: Number, margin: float) -> tuple[Word, str]:
    """Whether a number lies above a margin, with the reason where it cannot be told."""
    if number.value is None or number.low is None or number.high is None:
        return "not testable", number.reason or "there are too few patients for an interval"
    if number.low > margin:
        return "supported", ""
    if number.high < margin:
        return "not supported", ""
    return "not testable", WIDE


def _made(
    question: str,
    claim: str,
    finding: str,
    found: tuple[Word, str],
    effect: Number,
    section: str,
    rule: str,
    *,
    good: bool | None,
    margin: float | None = None,
    subject: str = "",
) -> Verdict:
    """`good`: whether "supported" speaks for the model; None: neither does."""
    word, reason = found
    speaks: Speaks = "neither"
    if good is not None and word != "not testable":
        speaks = "for" if (word == "supported") is good else "against"
    return Verdict(
        question=question, claim=claim, finding=finding, subject=subject, word=word, speaks=speaks, effect=effect,
        margin=margin, rule=rule, reason=reason, section=section,
    )  # fmt: skip


def _answers(summary: Summary) -> Iterator[Verdict]:
    for one in summary.predict.findings:
        margin = summary.margins["useful"]
        claim = f"The model tells images with {one.finding} from those without."
        yield _made(
            "performance", claim, one.finding, beyond(one.auroc, margin), one.auroc, "performance", ABOVE,
            good=True, margin=margin,
        )  # fmt: skip
        for (_, _, column), own in _together(one.levels).items():
            claim = f"It tells {one.finding} equally well whatever the {column}."
            yield _equal("performance by subgroup", claim, one.finding, own, "performance", column)


def _together(levels: Iterable[Level]) -> dict[tuple[str, str, str], list[Level]]:
    """[finding, region, column]: its levels."""
    made: dict[tuple[str, str, str], list[Level]] = {}
    for one in levels:
        made.setdefault((one.finding, one.region, one.column), []).append(one)
    return made


def _equal(question: str, claim: str, finding: str, own: Sequence[Level], section: str, column: str) -> Verdict:
    testable = [one for one in own if one.difference.value is not None]
    worst = max(testable, key=lambda one: abs(one.difference.value or 0.0), default=own[0])
    words = {one.word for one in own}
    found: tuple[Word, str]
    if any(one.word == "different" and _is_beyond(one) for one in testable):
        worst = max((one for one in testable if _is_beyond(one)), key=lambda one: abs(one.difference.value or 0.0))
        found = "not supported", f"{worst.level} differs from the others by more than the margin"
    elif words == {"equivalent"}:
        found = "supported", ""
    else:
        reasons = [one.difference.reason for one in own if one.difference.reason]
        found = "not testable", reasons[0] if reasons and not testable else WIDE
    return _made(
        question, claim, finding, found, worst.difference, section, EQUAL, good=True, margin=worst.margin, subject=column
    )  # fmt: skip


def _is_beyond(one: Level) -> bool:
    low, high = one.difference.low, one.difference.high
    return low is not None and high is not None and (low > one.margin or high < -one.margin)


def _evidence(summary: Summary) -> Iterator[Verdict]:
    for finding in summary.resolve.findings:
        claim = f"The answer depends on the pixels of {finding} itself."
        yield _reliance(summary, finding, FINDING, claim, "evidence", good=True)


def _shortcuts(summary: Summary) -> Iterator[Verdict]:
    for finding in summary.resolve.findings:
        for region in _regions(summary):
            claim = f"The answer for {finding} relies on {_named(region)}."
            yield _reliance(summary, finding, region, claim, "shortcut", good=False)
    for (finding, region, column), own in _together(summary.shortcut.levels).items():
        claim = f"What {_named(region)} adds to the answer for {finding} is the same whatever the {column}."
        yield _equal("shortcut by subgroup", claim, finding, own, "shortcut", f"{column}, effect of {region}")


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
        found: tuple[Word, str] = "not testable", reason
        effect = NOTHING
    else:
        marker = region in summary.shortcut.markers
        judge, ways = evidence if region == FINDING else reliance, (insert, remove if marker else [])
        found = judge(*ways, margin)
        shown = deciding(*ways, margin) or deciding([], remove, margin)
        effect = NOTHING if shown is None else shown.effect
    rule = SPEAKS if region == FINDING else RELIES
    return _made(
        question, claim, finding, found, effect, "shortcut", rule, good=good, margin=margin, subject=region
    )  # fmt: skip


def _blanked(summary: Summary) -> Iterator[Verdict]:
    margin = summary.margins["blanked"]
    for finding in summary.resolve.findings:
        own = [
            one for one in summary.shortcut.blanked if (one.region, one.kind, one.finding) == (ORGAN, "blank", finding)
        ]
        if own:
            claim = f"The model still answers for {finding} when the organ is blanked."
            word, why = _under_all([_told_apart(one.auroc, margin) for one in own])
            most = max((one.auroc for one in own), key=_off_chance)
            reason = "; ".join(filter(None, (why, INVERTED if _is_inverted(most) else "")))
            yield _made(
                "blanked organ", claim, finding, (word, reason), _turned(most), "shortcut", f"{TURNED}{EVERY_FILL}", good=False,
                margin=margin, subject=ORGAN,
            )  # fmt: skip


def _told_apart(auroc: Number, margin: float) -> tuple[Word, str]:
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


def _under_all(found: Sequence[tuple[Word, str]]) -> tuple[Word, str]:
    words = {word for word, _ in found}
    if len(words) == 1:
        return found[0]
    return "not testable", next((why for word, why in found if word == "not testable"), "") or "the fills disagree"


def _lines(lines: Iterable[Line], metric: str, finding: str) -> list[Line]:
    return [one for one in lines if (one.metric, one.finding, one.control) == (metric, finding, False)]


def _localised(summary: Summary) -> Iterator[Verdict]:
    margin = summary.margins["enrichment"]
    for finding in summary.resolve.findings:
        own = _lines(summary.localise.lines, "enrichment", finding)
        if not own:
            claim = f"The maps lie on {finding}."
            found: tuple[Word, str] = "not testable", summary.localise.reason
            yield _made("localisation", claim, finding, found, NOTHING, "localisation", OVER, good=True, margin=margin)
        for one in own:
            found = beyond(one.value, margin)
            if found[0] == "supported":
                found = _over_control(one)
            claim = f"The maps of {one.method} lie on {finding}."
            yield _made(
                "localisation", claim, finding, found, one.value, "localisation", OVER, good=True, margin=margin,
                subject=one.method,
            )  # fmt: skip
        for (whose, _, column), levels in _together(summary.localise.levels).items():
            if whose == finding:
                claim = f"Maps lie on {finding} to the same extent whatever the {column}."
                yield _equal("localisation by subgroup", claim, finding, levels, "localisation", column)


def _over_control(one: Line) -> tuple[Word, str]:
    """Whether it does better than the best of the maps that know nothing of the model."""
    name = one.value.baseline_name or "a map"
    if one.over is None or one.over.low is None or one.over.high is None:
        return "not testable", f"it was not held against {name}, which knows nothing of the model"
    if one.over.low > 0:
        return "supported", ""
    if one.over.high <= 0:
        return "not supported", f"{name}, which knows nothing of the model, does as well"
    return "not testable", f"it cannot be told from {name}, which knows nothing of the model: more images would tell"


def _masses(summary: Summary) -> Iterator[Verdict]:
    margin = summary.margins["enrichment"]
    rule = (
        f"{ABOVE}, and above the maps of other patients; not testable where the region is finer than the cells of the map; "
        "it says where to look: whether the answer relies on the region, interventions say"
    )
    for one in summary.shortcut.masses:
        if one.region in (FINDING, ORGAN):
            continue
        found = beyond(one.enrichment, margin)
        base = one.enrichment.baseline
        if not one.resolved:
            found = "not testable", f"{one.reason}: what a map does not show says nothing of the region"
        elif found[0] == "supported" and base is not None and (one.enrichment.low or 0.0) <= base:
            found = "not testable", "maps of other patients lie there as much"
        claim = f"The maps of {one.method} for {one.finding} lie on {_named(one.region)}."
        yield _made(
            "where the maps lie", claim, one.finding, found, one.enrichment, "shortcut", rule, good=None, margin=margin,
            subject=f"{one.region} · {one.method}",
        )  # fmt: skip


def _faithful(summary: Summary) -> Iterator[Verdict]:
    rule = (
        "supported where the gap between removing the least and the most relevant first exceeds that of every map that knows "
        "nothing, under every fill; not supported where it falls short of one under every fill"
    )
    for finding in summary.resolve.findings:
        own = _lines(summary.faithfulness.lines, "lerf-morf-gap", finding)
        if not own:
            claim, why = f"The maps show what the answer for {finding} depends on.", summary.faithfulness.reason
            yield _made("faithfulness", claim, finding, ("not testable", why), NOTHING, "faithfulness", rule, good=True)
        for method in dict.fromkeys(one.method for one in own):
            mine = [one for one in own if one.method == method]
            found = _under_all([beyond(one.over or NOTHING, 0.0) for one in mine])
            weakest = min(mine, key=lambda one: (one.over and one.over.value) or 0.0)
            claim = f"The maps of {method} show what the answer for {finding} depends on."
            yield _made(
                "faithfulness", claim, finding, found, weakest.over or weakest.value, "faithfulness", rule, good=True,
                margin=0.0, subject=method,
            )  # fmt: skip


def _sane(summary: Summary) -> Iterator[Verdict]:
    rule = (
        "supported where maps of the untrained model are no more like the trained model's than maps of different images are; "
        "not testable unless an edge detector fails the same test"
    )
    control = next((one for one in summary.sanity.tests if one.control), None)
    if not summary.sanity.tests:
        claim, why = "The maps depend on what the model has learnt.", summary.sanity.reason
        finding = next(iter(summary.resolve.findings), "")
        yield _made("sanity", claim, finding, ("not testable", why), NOTHING, "sanity", rule, good=True)
    for one in summary.sanity.tests:
        if one.control:
            continue
        found: tuple[Word, str]
        if one.passes is None:
            found = "not testable", one.reason
        elif control is None or control.passes is not False:
            found = (
                "not testable",
                "the edge detector, which knows nothing of the model, did not fail: the test is too weak here",
            )
        else:
            found = ("supported", "") if one.passes else ("not supported", "")
        last = one.similarities[0] if one.similarities else None
        effect = NOTHING if last is None or not last.curve else Number(
            value=last.curve[-1], n=summary.sanity.images, groups=summary.sanity.images, baseline=last.high,
            baseline_name="maps of different images", reason=f"{last.name} after the last step",
        )  # fmt: skip
        claim = f"The maps of {one.method} depend on what the model has learnt."
        yield _made("sanity", claim, one.finding, found, effect, "sanity", rule, good=True, subject=one.method)


def _robust(summary: Summary) -> Iterator[Verdict]:
    margin = summary.margins["robust"]
    for finding in summary.resolve.findings:
        own = _lines(summary.robustness.lines, "stability", finding)
        if not own:
            claim = f"The maps for {finding} stay where they are under changes that do not matter."
            why = summary.robustness.reason
            yield _made("robustness", claim, finding, ("not testable", why), NOTHING, "robustness", ABOVE, good=True)
        for one in own:
            claim = f"The maps of {one.method} for {finding} stay where they are under small shifts, turns and noise."
            yield _made(
                "robustness", claim, finding, beyond(one.value, margin), one.value, "robustness", ABOVE, good=True,
                margin=margin, subject=one.method,
            )  # fmt: skip


def _leaks(summary: Summary) -> Iterator[Verdict]:
    rule = "supported where the interval lies wholly above what permuted labels give"
    finding = next(iter(summary.resolve.findings), "")
    for one in summary.shortcut.leaks:
        margin = max(0.5, one.null_high if one.null_high is not None else 0.5)
        claim = f"The {one.column} can be read off the model's features."
        yield _made(
            "leak", claim, finding, beyond(one.auroc, margin), one.auroc, "shortcut", rule, good=None, margin=margin,
            subject=one.column,
        )  # fmt: skip


def _strategies(summary: Summary) -> Iterator[Verdict]:
    rule = "supported where some number of clusters is more stable and more separate than one way of looking would give by itself"
    for one in summary.shortcut.strategies:
        best = next((trial for trial in one.trials if trial.k == max(2, one.claimed)), None)
        effect = Number(value=best.stability, n=one.maps, groups=one.maps, baseline=best.null, baseline_name="one way of looking",
                        reason="adjusted Rand index between draws") if best else NOTHING  # fmt: skip
        found: tuple[Word, str] = ("supported", "") if one.claimed > 1 else ("not supported", "")
        claim = f"The maps of {one.method} for {one.finding} fall into several ways of looking."
        yield _made(
            "strategies", claim, one.finding, ("not testable", one.reason) if one.reason else found, effect, "clusters", rule,
            good=None, subject=one.method,
        )  # fmt: skip
