"""Figures: what of the summary is drawn, section by section, each beside the table of the same numbers."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from camscope.audit.core.schema import Answers, Level, Line, Measured, Number, Summary
from camscope.audit.report.charts import Row, forest, randomised, reliability, spectrum, stability
from camscope.audit.report.svg import drawing
from camscope.audit.report.verdict_labels import clean

if TYPE_CHECKING:
    from markupsafe import Markup

WAYS = {"more": "more is better →", "less": "← less is better", "neither": "neither way is better"}


@dataclass(frozen=True)
class Figure:
    """`parts`: its title, each a text of the summary or of this package; `how`: to read it."""

    parts: tuple[str, ...]
    how: str
    svg: "Markup"


class Gathering:
    """Figures of one report, each with a name of its own."""

    def __init__(self) -> None:
        self._count = 0

    def of(self, parts: Sequence[str], how: str, draw: "Callable[[str, str], Markup]") -> Figure:
        """One more."""
        self._count += 1
        return Figure(tuple(parts), how, draw(f"figure-{self._count}", clean(", ".join(parts))))


def figures(summary: Summary) -> dict[str, list[Figure]]:
    """Section -> its figures."""
    all_of = Gathering()
    with drawing():
        return {
            "performance": list(_performance(summary, all_of)),
            "localisation": list(_metrics(summary.localise, all_of)),
            "faithfulness": list(_metrics(summary.faithfulness, all_of)),
            "sanity": list(_sanity(summary, all_of)),
            "robustness": list(_metrics(summary.robustness, all_of)),
            "regions": list(_regions(summary, all_of)),
            "interventions": list(_interventions(summary, all_of)),
            "blanked": list(_blanked(summary, all_of)),
            "leaks": list(_leaks(summary, all_of)),
            "clusters": list(_clusters(summary, all_of)),
        }


DOT = "Dot: value; bar: 95 % interval"


def _performance(summary: Summary, all_of: Gathering) -> Iterator[Figure]:
    for one in summary.predict.findings:
        if one.bins:
            how = (
                "Bars: 95 % intervals; the larger a dot, the more images; broken line: what the model says is the share"
            )
            yield all_of.of(("Reliability", one.finding), how, partial(reliability, one=one))
    for one in summary.predict.findings:
        if one.levels:
            rows = [Row("all images", one.auroc), *_each(one)]
            how = f"{DOT}; each subgroup by itself; upright line: all images; red, broken: what the model has to exceed"
            margin = summary.margins.get("useful")
            draw = partial(forest, rows=rows, axis="AUROC", line=one.auroc.value, margin=margin)
            yield all_of.of(("AUROC by subgroup", one.finding), how, draw)
            yield _differences(all_of, ("AUROC of a subgroup less that of the others", one.finding), one.levels)


def _each(one: Answers) -> Iterator[Row]:
    """Each subgroup's own AUROC; of one that was held against another alone, the other's too."""
    known = {(group.column, group.level): group.auroc for group in one.groups}
    for level in one.levels:
        other = level.value.baseline_name
        name = level.level.removesuffix(f" against {other}")
        own = [(name, level.value)]
        if name != level.level:
            own.append((other, Number(value=level.value.baseline)))
        for name, number in own:
            found = known.get((level.column, name))
            yield Row(f"{level.column}: {name}", number if found is None or found.value is None else found)


def _differences(all_of: Gathering, parts: Sequence[str], levels: Sequence[Level]) -> Figure:
    margin, rows = levels[0].margin, [Row(_level(level), level.difference) for level in levels]
    draw = partial(forest, rows=rows, axis="difference", band=(-margin, margin), line=0.0)
    return all_of.of(parts, f"{DOT}; shaded: differences that were declared not to matter", draw)


def _level(level: Level) -> str:
    return f"{level.column}: {level.level}"


def _metrics(stage: Measured, all_of: Gathering) -> Iterator[Figure]:
    """One for each metric and finding: methods, then maps that know nothing."""
    for finding, metric in dict.fromkeys((one.finding, one.metric) for one in stage.lines):
        own = [one for one in stage.lines if (one.metric, one.finding) == (metric, finding)]
        controls = any(one.control for one in own)
        fills = ", fill by fill" if len({one.fill for one in own}) > 1 else ""
        how = f"{DOT}; grey: maps that know nothing of the model; shaded: the best of them{fills}" if controls else DOT
        draw = partial(forest, rows=list(_of_metric(own)), axis=WAYS[own[0].better])
        yield all_of.of((metric, finding), how, draw)
    for finding in dict.fromkeys(one.finding for one in stage.levels):
        levels = [one for one in stage.levels if one.finding == finding]
        yield _differences(all_of, ("Share inside in a subgroup less that in the others", finding), levels)


def _of_metric(lines: Sequence[Line]) -> Iterator[Row]:
    """Fill by fill: methods, then maps that know nothing, the best of them shaded beside all."""
    for fill in dict.fromkeys(line.fill for line in lines):
        own = [line for line in lines if line.fill == fill]
        for line in sorted(own, key=lambda one: one.control):
            words = line.method if fill is None else f"{line.method}, {fill}"
            yield Row(words, line.value, "control" if line.control else "own", _best(own))


def _best(lines: Sequence[Line]) -> tuple[float, float] | None:
    """The interval of the best map that knows nothing."""
    controls = [one.value for one in lines if one.control and one.value.value is not None]
    if not controls or lines[0].better == "neither":
        return None
    best = (max if lines[0].better == "more" else min)(controls, key=lambda one: one.value or 0.0)
    return None if best.low is None or best.high is None else (best.low, best.high)


def _sanity(summary: Summary, all_of: Gathering) -> Iterator[Figure]:
    how = "Shaded: maps of different images, which a map has to fall to; line in it: their mean"
    for test in summary.sanity.tests:
        for one in test.similarities:
            parts = (test.method, one.name, *(["control"] if test.control else []))
            yield all_of.of(parts, how, partial(randomised, steps=test.steps, one=one, control=test.control))


def _regions(summary: Summary, all_of: Gathering) -> Iterator[Figure]:
    masses, margin = summary.shortcut.masses, summary.margins.get("enrichment")
    how = (
        f"{DOT}; diamond: maps of other patients; line: chance; red, broken: what was declared to count; hollow: finer than "
        "the cells of the map, which can show neither use nor its absence"
    )
    for finding, method in dict.fromkeys((one.finding, one.method) for one in masses):
        own = [one for one in masses if (one.finding, one.method) == (finding, method)]
        rows = [Row(one.region, one.enrichment, "own" if one.resolved else "unresolved") for one in own]
        draw = partial(forest, rows=rows, axis="share of the map over share of the image", line=1.0, margin=margin)
        yield all_of.of(("Enrichment of the maps in regions", finding, method), how, partial(draw, baselines=True))


KINDS = {
    "insert": "What a region of an image with the finding adds, pasted in",
    "remove": "What is lost without a region",
    "keep only": "What is lost where only a region is left",
}


def _interventions(summary: Summary, all_of: Gathering) -> Iterator[Figure]:
    every, margin = summary.shortcut.interventions, summary.margins.get("effect", 0.0)
    how = f"{DOT}; shaded: effects that were declared not to count"
    for finding in dict.fromkeys(one.finding for one in every):
        for kind, words in KINDS.items():
            own = [one for one in every if (one.finding, one.kind) == (finding, kind)]
            rows = [Row(_done("", one.region, one.fill), one.effect) for one in own]
            if rows:
                draw = partial(
                    forest, rows=rows, axis="change of the log odds, in SD", band=(-margin, margin), line=0.0
                )
                yield all_of.of((words, finding), how, draw)


def _blanked(summary: Summary, all_of: Gathering) -> Iterator[Figure]:
    how = f"{DOT}; line: chance; red, broken: above it a model without the organ still answers"
    for one in summary.predict.findings:
        own = [each for each in summary.shortcut.blanked if each.finding == one.finding]
        rows = [
            Row("the whole image", one.auroc),
            *(Row(_done(each.kind, each.region, each.fill), each.auroc) for each in own),
        ]
        if own:
            draw = partial(forest, rows=rows, axis="AUROC", line=0.5, margin=summary.margins.get("blanked"))
            yield all_of.of(("AUROC of what is left of the image", one.finding), how, draw)


def _done(kind: str, region: str, fill: str | None) -> str:
    return f"{kind} {region}".strip() + (f", {fill}" if fill else "")


def _leaks(summary: Summary, all_of: Gathering) -> Iterator[Figure]:
    rows = [Row(one.column, one.auroc) for one in summary.shortcut.leaks]
    if rows:
        draw = partial(forest, rows=rows, axis="AUROC of a linear probe", line=0.5)
        yield all_of.of(("What can be read off the features",), f"{DOT}; line: chance", draw)


def _clusters(summary: Summary, all_of: Gathering) -> Iterator[Figure]:
    hint = "A jump after a number is a hint of that many groups, no more"
    trials = "Round: these maps; diamonds: what one way of looking would give by itself"
    for one in summary.shortcut.strategies:
        if one.eigenvalues:
            yield all_of.of(("Eigenvalues", one.finding, one.method), hint, partial(spectrum, one=one))
        if one.trials:
            yield all_of.of(("Stability of clusters", one.finding, one.method), trials, partial(stability, one=one))
