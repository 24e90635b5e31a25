"""Features: what can be read off them beside the finding, and whether the maps fall into several ways of looking."""

from collections.abc import Iterator

from camscope.audit.enough import FOR_ONE_WAY, RARE
from camscope.audit.schema import Leak, Number, Strategies, Summary, Verdict
from camscope.audit.verdicts.judged import NOTHING, Told, lacks, made
from camscope.wording import plural

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
