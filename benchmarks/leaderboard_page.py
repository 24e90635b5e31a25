"""docs/evidence/leaderboard.md: tables, figures and what they say, of what `benchmarks.leaderboard` measured."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from math import isfinite, isnan
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from benchmarks.leaderboard_words import CONCLUSIONS, PREFACE, SLOW
from benchmarks.machine import machine
from benchmarks.trained import TITLES
from camscope.evaluation.interval_plots import draw_summary_figure
from camscope.evaluation.method_summaries import MethodSummary, summarize_values
from camscope.explainers import METHODS
from camscope.metrics.mean_estimates import estimate_difference

PAGE = Path(__file__).parents[1] / "docs" / "evidence" / "leaderboard.md"
FIGURES = PAGE.parent / "leaderboard"
FIRST = ("enrichment", "pointing-game", "average-precision", "rank-accuracy", "iou-swept")
PAIRED, BESIDE = "average-precision", "gradcam"  # what the slow methods are held against, photograph by photograph
NAMED = re.compile(r"\{(\w+)/([\w-]+)/([^/}]+)/([\w-]+)\}")  # a number of the tables: model, table, method, metric
Lines = Mapping[str, Sequence[MethodSummary]]


@dataclass(frozen=True)
class Results:
    """Of one model: tables of all photographs and of the slow methods' few, which these are, and what each method costs.

    `fewer`: the settings of methods that have fewer passes than they come with.
    """

    tables: Mapping[str, pa.Table]
    samples: Mapping[str, Sequence[int]]
    prices: Mapping[str, tuple[float, str]]
    fewer: Mapping[str, Mapping[str, Any]]

    def parts(self) -> dict[str, pa.Table]:
        """[part of the page]: its table in long form. The controls are those of all photographs, and never a run's own."""
        whole = self.tables["all"]
        known = whole.filter(pc.field("control") | (pc.field("method") == BESIDE))
        few = {
            part: pa.concat_tables([known.filter(pc.field("row").isin(rows)), methods_only(self.tables[part])])
            for part, rows in self.samples.items()
            if self.tables[part].num_rows
        }
        return {"all": whole, "off-center": whole.filter(~pc.field("center_in_box")), **few}


def methods_only(table: pa.Table) -> pa.Table:
    """Without the controls."""
    return table.filter(~pc.field("control"))


def page(results: Mapping[str, Results]) -> str:
    """The document, and its figures beside it."""
    here, parts = machine("cpu"), list[str]()
    numbers = dict[tuple[str, ...], str]()
    FIGURES.mkdir(exist_ok=True)
    for model, found in results.items():
        tables = found.parts()
        every = {part: summarize_values(table, metrics=FIRST) for part, table in tables.items()}
        numbers |= {
            (model, part, line.method, metric): cell(line).strip("*")
            for part, lines in every.items()
            for metric, own in lines.items()
            for line in own
        }
        gaps = {part: beside(table) for part, table in tables.items()}
        numbers |= {(model, part, method, "gap"): text for part, own in gaps.items() for method, text in own.items()}
        parts += [f"## {TITLES[model]}\n", *sections(model, every, found, gaps), left_out(found)]
    preface = PREFACE.format(processor=here["processor"], torch=here["torch"])
    said = NAMED.sub(lambda one: numbers[one.groups()], CONCLUSIONS)
    return "\n".join([preface, said, *parts])


def sections(
    model: str,
    every: Mapping[str, Lines],
    found: Results,
    gaps: Mapping[str, Mapping[str, str]],
) -> Iterator[str]:
    """A heading, a table and a figure for each part."""
    for part, lines in every.items():
        images = max(line.estimate.n_values for line in lines[FIRST[0]] if line.estimate)
        seconds = {name: words for name, (_, words) in found.prices.items()}
        slow = part in found.samples
        more = {f"{PAIRED} less Grad-CAM's": gaps[part], **({"passes": passes(found.fewer)} if slow else {})}
        more |= {"seconds": seconds}
        title = f"{part.capitalize()} methods" if slow else part.capitalize()
        yield f"### {title}: {images} photographs\n\n{SLOW.get(part, '')}{table(lines, more)}\n"
        file = f"{model}-{part}.png"
        (FIGURES / file).write_bytes(draw_summary_figure({one: lines[one] for one in FIRST[:3]}, ".png"))
        yield f"![{TITLES[model]}, {title.lower()}: means and intervals](leaderboard/{file})\n"


def table(lines: Lines, more: Mapping[str, Mapping[str, str]]) -> str:
    """A row a method, the highest enrichment first; `more`: columns behind the metrics, by method."""
    found = {name: {line.method: line for line in own} for name, own in lines.items()}
    head = ["method", *FIRST, *more]
    rows = []
    for one in lines[FIRST[0]]:
        title = f"*{one.method}* (control)" if one.is_control else f"`{one.method}`"
        cells = [cell(found[name].get(one.method)) for name in FIRST]
        rows.append([title, *cells, *("" if one.is_control else own.get(one.method, "") for own in more.values())])
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows])


def cell(line: MethodSummary | None) -> str:
    """0.77 [0.73, 0.81], bold where it beats the controls."""
    if line is None or line.estimate is None:
        return "–"
    text = interval(line.estimate)
    return f"**{text}**" if line.beats_control else text


def interval(one: Any) -> str:
    """0.77 [0.73, 0.81]"""
    if isnan(one.low):
        return f"{one.mean:.2f}".replace("-0.00", "0.00")
    return f"{one.mean:.2f} [{one.low:.2f}, {one.high:.2f}]".replace("-0.00", "0.00")


def beside(table: pa.Table) -> dict[str, str]:
    """[method]: the mean of its paired difference to Grad-CAM, and the interval."""
    own = table.filter((pc.field("metric") == PAIRED) & ~pc.field("control")).to_pylist()
    values: dict[str, dict[int, float]] = {}
    for row in own:
        values.setdefault(row["method"], {})[row["row"]] = float("nan") if row["value"] is None else row["value"]
    theirs = values.pop(BESIDE)
    return {
        name: interval(estimate_difference(list(mine.values()), [theirs[row] for row in mine]))
        for name, mine in values.items()
    }


def passes(fewer: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """[method]: how often it asks the model, forwards and back, with the numbers that its settings have, and the others."""
    found = {}
    for name, tool in METHODS.items():
        settings = fewer.get(name, {})
        forwards, backwards = (
            in_numbers(words, tool, settings) for words in (tool.forward_passes, tool.backward_passes)
        )
        found[name] = forwards if backwards == "0" else f"{forwards}, {backwards} back"
        if settings:
            others = ", ".join(f"`{name}={value!r}`" for name, value in settings.items())
            found[name] += f"; {others}"
    return found


def in_numbers(words: str, tool: type[Any], settings: Mapping[str, Any]) -> str:
    """`1 + samples` -> `1 + 4000`"""
    usual = {name: settings.get(name, one.default) for name, one in signature(tool).parameters.items()}
    known = {name: value for name, value in usual.items() if type(value) is int}
    return re.sub(r"[a-z]\w*", lambda one: str(known.get(one.group(), one.group())), words)


def left_out(found: Results) -> str:
    """The methods that are in no table, and why."""
    there = {name for table in found.tables.values() for name in pc.unique(table["method"]).to_pylist()}
    missing = {name: one for name, one in found.prices.items() if name not in there}
    dear = {name for name, (seconds, words) in missing.items() if isfinite(seconds) or words.startswith("more than")}
    reasons = "".join(f"| `{name}` | {missing[name][1]} |\n" for name in missing if name not in dear)
    names = ", ".join(f"`{name}` ({missing[name][1]} s)" for name in missing if name in dear)
    return f"Methods without a map here:\n\n| method | reason |\n| --- | --- |\n{reasons}" + (
        f"\nNot run because of their cost per photograph (estimated from a part of the passes): {names}.\n"
        if names
        else ""
    )
