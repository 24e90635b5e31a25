"""compared: methods and layers over many images, by metrics and by what their maps have in common."""

import html
import io
import os
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import nn

from camscope import render
from camscope.batch import Run
from camscope.errors import OutputError
from camscope.evaluation.comparison_data import Findings, named
from camscope.evaluation.comparison_statements import sentences
from camscope.evaluation.ground_truth import Evidence
from camscope.evaluation.map_agreement import KEY, Key, agree, folder_of
from camscope.evaluation.metric_evaluation import STEPS, evidence_for, measure
from camscope.evaluation.metric_plots import FORMATS
from camscope.evaluation.summary import expect_column, expect_some_evidence, summarised
from camscope.explainers import Explainer
from camscope.metrics.imputation import USUAL
from camscope.safe_files import write_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FIRST = (
    "enrichment", "pointing-game", "average-precision", "rank-accuracy", "iou-swept", "peak-distance", "deletion", "insertion",
    "lerf-morf-gap", "average-drop", "sparseness", "effective-area",
)  # fmt: skip


class Compared(Findings):
    """Findings as numbers, sentences and a figure."""

    @cached_property
    def sentences(self) -> tuple[str, ...]:
        """What can be told apart, and what cannot, in words."""
        return tuple(sentences(self.lines, self.agreement, self.names))

    def table(self) -> list[dict[str, Any]]:
        """The numbers, a dict for each metric and method: mean, interval, and the paired differences.

        `to_best`: to the best method, corrected for all pairs of methods and all metrics; `over_control`: to the best control,
        corrected for all methods and metrics; both so that more is better.
        """
        rows = []
        for metric, own in self.lines.items():
            for line in own:
                key = line.method, line.layer, line.parameters
                facts = {"metric": metric, "name": self.name(line), **dict(zip(KEY, key, strict=True))}
                found = {} if line.estimate is None else asdict(line.estimate)
                numbers = {name: found.get(name) for name in ("mean", "low", "high", "n", "groups", "undefined")}
                gaps = {"to_best": line.under_best, "over_control": line.over_control}
                told = {f"{name}{end}": gap and getattr(gap, part) for name, gap in gaps.items() for end, part in ENDS}
                rows.append({**facts, "control": line.control, **numbers, **told, "seconds": self.seconds.get(key)})
        return rows

    def figure(self, *, examples: int | None = None, seed: int = 0) -> "Figure":
        """Intervals of every metric, what the maps have in common, and `examples` drawn by `seed`: a figure of matplotlib.

        `examples`: how many images; None: as many as there is room for.
        """
        from camscope.evaluation.comparison_figure import poster

        made: Figure = poster(self, examples, seed)
        return made

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = True) -> Path:
        """Write the figure (`.png`, `.svg`, `.pdf`)."""
        suffix = Path(path).suffix.lower()
        if suffix not in FORMATS:
            raise OutputError(f"{path}: cannot write {suffix or 'a file without a suffix'}; use {', '.join(FORMATS)}")
        return write_bytes(path, self._drawn(suffix), overwrite=overwrite)

    def _drawn(self, suffix: str) -> bytes:
        stream = io.BytesIO()
        self.figure().savefig(stream, format=suffix[1:], dpi=120)
        return stream.getvalue()

    def _repr_html_(self) -> str:
        from PIL import Image

        picture, words = Image.open(io.BytesIO(self._drawn(".png"))).convert("RGB"), html.escape(self.title)
        said = "".join(f"<li>{html.escape(one)}</li>" for one in self.sentences)
        return render.notebook_figure(np.asarray(picture), words, f"{words}<ul>{said}</ul>")


ENDS = (("", "mean"), ("_low", "low"), ("_high", "high"), ("_p", "p"))


def compared(
    run: Run | str | os.PathLike[str],
    output: str | os.PathLike[str],
    masks: Evidence | str | os.PathLike[str] | None = None,
    metrics: Sequence[str] | None = None,
    *,
    model: nn.Module | None = None,
    preprocess: Any = None,
    tools: Sequence[Explainer] = (),
    fills: Sequence[str] = USUAL,
    steps: int = STEPS,
    categories: Sequence[str] = (),
    group: str | None = None,
    anywhere: bool = False,
    threads: int | None = None,
    overwrite: bool = False,
    told: Callable[[int, int], None] | None = None,
) -> Compared:
    """Compare the methods and layers of `run` over its images: keywords as in `measure`, `metrics` by default the first of them.

    The values of each image stay at `output`, those of the metrics as `measure` writes them, those of the agreement in its
    folder `agreement`. `group`: a column of the manifest, as the patient; intervals draw its groups whole. Started again, it
    goes on where it was. `told`: called with how many steps are done, of how many.
    """
    made = run if isinstance(run, Run) else Run(run)
    known = evidence_for(masks, made, categories, anywhere=anywhere)
    halves = [None if told is None else _half(told, n) for n in range(2)]
    settings: dict[str, Any] = {"threads": threads, "overwrite": overwrite}
    asking: dict[str, Any] = {"model": model, "preprocess": preprocess, "tools": tools, "fills": fills, "steps": steps}
    places: dict[str, Any] = {"categories": categories, "anywhere": anywhere}
    measures = measure(made, output, masks, metrics, told=halves[0], **places, **asking, **settings)
    table = measures.table()
    order = list(FIRST if metrics is None else metrics)
    expect_column(table, group)
    if known is not None:
        expect_some_evidence(table, summarised(table, group, metrics=order, corrected=False))
    agreement = agree(made, folder_of(output), _groups(table, group), told=halves[1], **settings)
    lines = summarised(table, group, metrics=order, same=agreement.groups)
    chosen = dict(sorted(lines.items(), key=lambda item: order.index(item[1][0].metric)))
    names = named(made, agreement.keys, [line for own in lines.values() for line in own])
    rows = table["row"].unique()
    return Compared(made, measures, chosen, agreement, names, _seconds(made), len(rows), known)


def _half(told: Callable[[int, int], None], which: int) -> Callable[[int, int], None]:
    """The metrics are the first half of the work, the agreement the second: both count images."""
    return lambda done, total: told(which * total + done, 2 * total)


def _groups(table: Any, group: str | None) -> Mapping[int, Hashable] | None:
    return None if group is None else dict(zip(table["row"].to_pylist(), table[group].to_pylist(), strict=True))


def _seconds(run: Run) -> dict[Key, float]:
    """Of each method, an image: the median over images, the first of which is slow."""
    rows = run.table(columns=["row", *KEY, "seconds"]).to_pylist()
    each: dict[Key, dict[int, float]] = {}
    for row in rows:
        if row["seconds"] is not None:
            own = each.setdefault((row["method"], row["layer"], row["parameters"]), {})
            own[row["row"]] = own.get(row["row"], 0.0) + row["seconds"]
    return {key: float(np.median(list(own.values()))) for key, own in each.items()}
