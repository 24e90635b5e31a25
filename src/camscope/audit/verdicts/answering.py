"""Answering: whether the model tells a finding, and for whom; and whether any number is the same in every subgroup."""

from collections.abc import Iterable, Iterator, Sequence

from camscope.audit.schema import Level, Summary, Verdict
from camscope.audit.shortcuts.interventions import too_few_for_absence
from camscope.audit.verdicts.judged import ABOVE, WIDE, Told, beyond, made

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
