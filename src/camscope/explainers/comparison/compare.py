"""compare: explanations of one image side by side, from as few passes as possible, and where they coincide."""

import html
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from inspect import signature
from pathlib import Path
from typing import Any, Literal

import numpy as np
from torch import nn

from camscope import render
from camscope.errors import InputError, LayerError, OutputError, TargetError
from camscope.explainers.comparison.best_effort import Clock, explain_suited
from camscope.explainers.comparison.equivalence import (
    Coincidence,
    Witness,
    coincidences,
    correlations,
    sentences,
    witnesses,
)
from camscope.explainers.comparison.grid_layout import Entry, arranged, at_layers, common
from camscope.explainers.core.base import Explainer, kind_of
from camscope.explainers.core.dispatch import Watch, explain_each
from camscope.explainers.core.evaluation_context import Precision
from camscope.explainers.core.inputs import ALONE, Companions
from camscope.explainers.core.keyword_arguments import with_our_names
from camscope.explanation import AUTO, Explanation, Floats, Pixels, Scale, shared_scales
from camscope.safe_files import write_bytes
from camscope.targets import Question

AnyMethod = str | type[Explainer] | Explainer
USUAL = ("gradcam", "gradcam++", "xgradcam", "hirescam", "layercam")


@dataclass(frozen=True, eq=False)
class Comparison:
    """What several methods say of one image: a row for each class (and layer), a column for each method.

    `explanations`: row by row; a method that has no layer to choose appears once a class. `entries`: the place and the
    price of each. `coincidences`: groups of one class whose displayed map is the same.
    """

    explanations: tuple[Explanation, ...] = field(repr=False)
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    entries: tuple[Entry, ...] = field(repr=False)
    coincidences: tuple[Coincidence, ...] = field(repr=False)

    @property
    def sentences(self) -> tuple[str, ...]:
        """The coincidences in words; what holds for several classes is said once."""
        methods = {id(one): entry.method for one, entry in zip(self.explanations, self.entries, strict=True)}
        return sentences(self.coincidences, methods, len({entry.question for entry in self.entries}))

    def correlations(self, kind: Literal["pearson", "spearman"] = "pearson") -> Floats:
        """(M,M): correlation of the maps as displayed, in the order of `explanations`; NaN beside a constant map."""
        return correlations(self.explanations, kind)

    def table(self) -> list[dict[str, Any]]:
        """The numbers, a dict for each explanation; `correlation`: Pearson's, with the first of the same class."""
        matrix, firsts, rows = self.correlations(), dict[int, int](), []
        for n, (one, entry) in enumerate(zip(self.explanations, self.entries, strict=True)):
            first = firsts.setdefault(entry.question, n)
            facts = {key: getattr(one, key) for key in ("layer", "target", "label", "score", "probability", "status")}
            price = {key: getattr(entry, key) for key in ("forwards", "backwards", "seconds")}
            rows.append({"method": entry.method, **facts, **price, "correlation": float(matrix[first, n])})
        return rows

    def figure(
        self,
        *,
        scale: Scale | Literal["shared"] = AUTO,
        alpha: float = 0.85,
        colormap: str = AUTO,
        crop: bool = True,
        columns: int | None = None,
        height: int | None = None,
    ) -> Pixels:
        """(H,W,3) uint8: for each row the image, then its maps; keywords as `Explanation.overlay`, of every rank.

        `scale="shared"`: the maps of one method and layer have one scale over the classes, so that they can be compared;
        between methods and layers the numbers cannot. `crop`: leave out what the model was not shown, instead of
        marking it. `columns`: pictures side by side; `height`: rows of a picture, 256, and 384 of a volume's planes.
        """
        if colormap == AUTO:  # one for all, as the legend is
            signed = any(one.colormap == render.DIVERGING for one in self.explanations)
            colormap = render.DIVERGING if signed else "inferno"
        scales = shared_scales(self.explanations, colormap) if scale == "shared" else [scale] * len(self.explanations)
        part = _part_shown(self.explanations) if crop else None
        solid = self.explanations[0].heat.ndim == 3
        height = height or (384 if solid else 256)
        rows = height if solid else None  # planes are drawn for the rows that they have
        pictures = [
            one.overlay(scale=own, alpha=alpha, colormap=colormap, height=rows)[part or ...]
            for one, own in zip(self.explanations, scales, strict=True)
        ]
        title = f"{self.title} · as far as the model saw it" if part else self.title
        legend = _legend(scale, colormap)
        return render.sheet(
            self._cells(pictures, part, rows),
            title=title,
            legend=legend,
            colormap=colormap,
            columns=columns,
            height=height,
        )

    def _cells(
        self, pictures: Sequence[Pixels], part: tuple[slice, slice] | None, rows: int | None = None
    ) -> list[list[render.Cell | None]]:
        """Row by row the image, then a picture of each explanation, with its own answer where that is not the row's."""
        first, drawn = self.explanations[0], {}
        photo = first.image if first.image is not None else first.seen
        if photo is not None and first.heat.ndim != 2:  # a signal or a volume, as a picture
            photo = first.overlay(alpha=0, height=rows)
        for picture, one, entry in zip(pictures, self.explanations, self.entries, strict=True):
            own = one.answer if one.label != self._asked(entry.question).label else None
            caption = " · ".join(filter(None, (self.columns[entry.column], own)))
            drawn[entry.row, entry.column] = render.Cell(picture, caption, one.flag)
        return [
            [
                *([] if photo is None else [render.Cell(photo[part or ...], label)]),
                *(drawn.get((row, column)) for column in range(len(self.columns))),
            ]
            for row, label in enumerate(self.rows)
        ]

    def _asked(self, question: int) -> Explanation:
        """The explanation whose answer is that of the question's rows."""
        return common(
            [one for one, entry in zip(self.explanations, self.entries, strict=True) if entry.question == question]
        )

    @property
    def title(self) -> str:
        """What all have in common: the image's name, the class and the layer where there is one of them."""
        first, layers = self.explanations[0], {one.layer for one in self.explanations} - {None}
        asked = len({entry.question for entry in self.entries})
        answer = self._asked(0).answer if asked == 1 and len(self.rows) > 1 else None
        return " · ".join(filter(None, (first.name, answer, layers.pop() if len(layers) == 1 else None)))

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = True) -> Path:
        """Write the figure (`.png`, `.jpg`, `.webp`)."""
        suffix = Path(path).suffix.lower()
        if suffix not in render.FORMATS:
            raise OutputError(f"{path}: cannot write {suffix or 'a file without a suffix'}; use .png, .jpg or .webp")
        return write_bytes(path, render.encode(self.figure(), suffix), overwrite=overwrite)

    def _repr_html_(self) -> str:
        words = html.escape(self.title)
        said = "<br>".join([words, *map(html.escape, self.sentences)])
        if self.explanations[0].heat.ndim > 3:
            return f"<p>{said}</p>"
        return render.notebook_figure(self.figure(), words, said)


@with_our_names
def compare(
    model: nn.Module,
    image: Any,
    methods: Sequence[AnyMethod] = USUAL,
    *,
    layers: Sequence[str | nn.Module] | None = None,
    targets: Sequence[Question] = (None,),
    preprocess: Any = None,
    categories: Sequence[str] | None = None,
    precision: Precision | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    leave_out: bool = False,
    watch: Watch | None = None,
) -> Comparison:
    """Several methods, layers and classes on one image: one forward pass and one backward pass a class for all that can share.

    `methods`: names, classes, or explainers of this model, which are taken as they are. `layers`: names or modules, all
    of them at once for a method that makes one map of several, as RefineCAM; None: the last layer with spatial extent.
    `targets`: questions, see Score. `preprocess`, `categories`, `precision`: see Explainer. `args`, `kwargs`: what the
    model takes beside the image. `leave_out`: a method that has no answer for this model is left out, with a warning;
    else it is an error. `watch`: told which methods work next.
    """
    if isinstance(methods, str) or isinstance(layers, str | nn.Module):
        raise InputError(
            "methods and layers are lists: compare(model, image, ['gradcam', 'layercam'], layers=['layer4'])"
        )
    if isinstance(targets, str | int) or callable(targets):
        raise TargetError(f"targets is a list of questions; for one, compare(..., targets=[{targets!r}])")
    if layers is not None and not layers:
        raise LayerError("layers is empty: name one at least, as layers=['layer4'], or leave it out")
    settings = {"preprocess": preprocess, "categories": categories, "precision": precision}
    tools: list[Explainer] = []
    for method in methods:
        if isinstance(method, Explainer):
            tools.append(method)
        else:
            kind = kind_of(method)
            given = {name: value for name, value in settings.items() if name in signature(kind).parameters}
            tools += at_layers(kind, model, layers, given)
    return compare_each(
        tools, image, targets, Companions(tuple(args), dict(kwargs or {})), leave_out=leave_out, watch=watch
    )


def compare_each(
    tools: Sequence[Explainer],
    image: Any,
    targets: Sequence[Question],
    companions: Companions = ALONE,
    *,
    leave_out: bool = False,
    watch: Watch | None = None,
) -> Comparison:
    """Comparison of explainers of one model; see `compare`."""
    riders, clock = witnesses(tools), Clock(watch)
    if leave_out:
        every, found = explain_suited(tools, image, targets, companions, riders=riders, watch=clock)
        tools, riders = [t for t in every if not isinstance(t, Witness)], [t for t in every if isinstance(t, Witness)]
    else:
        found = explain_each([*tools, *riders], image, targets, companions, watch=clock)
    own, seen = found[: len(tools)], found[len(tools) :]
    places = arranged(tools, own, [clock.of(tool) / len(targets) for tool in tools])
    explanations = [own[t][entry.question] for t, entry in zip(places.methods, places.entries, strict=True)]
    groups = []
    for q in range(len(targets)):
        asked = [n for n, entry in enumerate(places.entries) if entry.question == q]
        made = [tools[places.methods[n]] for n in asked]
        # of a pass that was run again the last facts count
        facts = {row[q].layer: rider.facts[q - len(targets)] for rider, row in zip(riders, seen, strict=True)}
        groups += coincidences([explanations[n] for n in asked], made, facts)
    return Comparison(
        tuple(explanations), tuple(places.rows), tuple(places.columns), tuple(places.entries), tuple(groups)
    )


def _part_shown(explanations: Sequence[Explanation]) -> tuple[slice, slice] | None:
    """The rows and columns of the image that the model was shown; None where that is all, unknown, or not one part."""
    parts = set()
    for one in explanations:
        if one.image is None or one.placement is None:
            return None
        pixels = np.nonzero(one.covered())
        parts.add(tuple((int(where.min()), int(where.max()) + 1) for where in pixels if where.size))
    whole = tuple((0, extent) for extent in explanations[0].covered().shape)
    found = parts.pop()
    if parts or found == whole or len(found) != 2:
        return None
    (top, bottom), (left, right) = found
    return slice(top, bottom), slice(left, right)


def _legend(scale: Scale | Literal["shared"], colormap: str) -> tuple[str, str]:
    """What the bottom and the top colour mean."""
    if isinstance(scale, tuple | list):
        return f"{scale[0]:.3g}", f"{scale[1]:.3g}"
    signed = colormap == render.DIVERGING
    strongest = "strongest value" if signed or scale in ("symmetric", "robust") else "maximum"
    whose = f"{strongest} of a method over the classes" if scale == "shared" else f"{strongest} of each map"
    return f"minus the {strongest}" if signed else "0", whose
