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
from camscope.explainers.comparison.best_effort import MethodTimer, explain_supported
from camscope.explainers.comparison.equivalence import (
    EquivalentMaps,
    FeatureCapture,
    correlate_maps,
    create_feature_captures,
    describe_equivalent_maps,
    find_equivalent_maps,
)
from camscope.explainers.comparison.grid_layout import (
    GridEntry,
    build_grid_layout,
    create_at_layers,
    select_common_explanation,
)
from camscope.explainers.core.base import Explainer, get_explainer_class
from camscope.explainers.core.dispatch import OnPass, explain_grid
from camscope.explainers.core.evaluation_context import Precision
from camscope.explainers.core.inputs import NO_EXTRA_INPUTS, ExtraInputs
from camscope.explainers.core.keyword_arguments import reject_foreign_keywords
from camscope.explanation import AUTO, Explanation, FloatArray, PixelArray, ScaleOption, shared_scales
from camscope.safe_files import write_bytes
from camscope.targets import TargetLike

MethodLike = str | type[Explainer] | Explainer
DEFAULT_METHODS = ("gradcam", "gradcam++", "xgradcam", "hirescam", "layercam")


@dataclass(frozen=True, eq=False)
class Comparison:
    """What several methods say of one image: a row for each class (and layer), a column for each method.

    `explanations`: row by row; a method that has no layer to choose appears once a class. `entries`: the place and the
    price of each. `equivalent_maps`: groups of one class whose displayed map is the same.
    """

    explanations: tuple[Explanation, ...] = field(repr=False)
    row_labels: tuple[str, ...]
    column_labels: tuple[str, ...]
    entries: tuple[GridEntry, ...] = field(repr=False)
    equivalent_maps: tuple[EquivalentMaps, ...] = field(repr=False)

    @property
    def equivalence_notes(self) -> tuple[str, ...]:
        """The coincidences in words; what holds for several classes is said once."""
        methods = {id(one): entry.method_label for one, entry in zip(self.explanations, self.entries, strict=True)}
        return describe_equivalent_maps(
            self.equivalent_maps, methods, len({entry.target_index for entry in self.entries})
        )

    def correlate_maps(self, kind: Literal["pearson", "spearman"] = "pearson") -> FloatArray:
        """(M,M): correlation of the maps as displayed, in the order of `explanations`; NaN beside a constant map."""
        return correlate_maps(self.explanations, kind)

    def to_records(self) -> list[dict[str, Any]]:
        """The numbers, a dict for each explanation; `correlate`: Pearson's, with the first of the same class."""
        matrix, firsts, rows = self.correlate_maps(), dict[int, int](), []
        for n, (one, entry) in enumerate(zip(self.explanations, self.entries, strict=True)):
            first = firsts.setdefault(entry.target_index, n)
            facts = {key: getattr(one, key) for key in ("layer", "target", "label", "score", "probability", "status")}
            price = {key: getattr(entry, key) for key in ("forward_passes", "backward_passes", "seconds")}
            rows.append({"method": entry.method_label, **facts, **price, "correlation": float(matrix[first, n])})
        return rows

    def figure(
        self,
        *,
        scale: ScaleOption | Literal["shared"] = AUTO,
        alpha: float = 0.85,
        colormap: str = AUTO,
        crop: bool = True,
        columns: int | None = None,
        height: int | None = None,
    ) -> PixelArray:
        """(H,W,3) uint8: for each row the image, then its maps; keywords as `Explanation.overlay`, of every rank.

        `scale="shared"`: the maps of one method and layer have one scale over the classes, so that they can be compared;
        between methods and layers the numbers cannot. `crop`: leave out what the model was not shown, instead of
        marking it. `columns`: pictures side by side; `height`: rows of a picture, 256, and 384 of a volume's planes.
        """
        if colormap == AUTO:  # one for all, as the legend is
            signed = any(one.colormap == render.DIVERGING for one in self.explanations)
            colormap = render.DIVERGING if signed else "inferno"
        scales = shared_scales(self.explanations, colormap) if scale == "shared" else [scale] * len(self.explanations)
        part = _find_visible_region(self.explanations) if crop else None
        solid = self.explanations[0].attribution.ndim == 3
        height = height or (384 if solid else 256)
        rows = height if solid else None  # planes are drawn for the rows that they have
        pictures = [
            one.overlay(scale=own, alpha=alpha, colormap=colormap, height=rows)[part or ...]
            for one, own in zip(self.explanations, scales, strict=True)
        ]
        title = f"{self.title} · as far as the model saw it" if part else self.title
        legend = _format_legend_labels(scale, colormap)
        return render.draw_contact_sheet(
            self._build_figure_cells(pictures, part, rows),
            title=title,
            legend=legend,
            colormap=colormap,
            columns=columns,
            height=height,
        )

    def _build_figure_cells(
        self, images: Sequence[PixelArray], region: tuple[slice, slice] | None, height: int | None = None
    ) -> list[list[render.CaptionedImage | None]]:
        """Row by row the image, then a picture of each explanation, with its own answer where that is not the row's."""
        first, drawn = self.explanations[0], {}
        photo = first.image if first.image is not None else first.model_input_image
        if photo is not None and first.attribution.ndim != 2:  # a signal or a volume, as a picture
            photo = first.overlay(alpha=0, height=height)
        for picture, one, entry in zip(images, self.explanations, self.entries, strict=True):
            own = (
                one.label_and_score if one.label != self._select_target_explanation(entry.target_index).label else None
            )
            caption = " · ".join(filter(None, (self.column_labels[entry.column], own)))
            drawn[entry.row, entry.column] = render.CaptionedImage(picture, caption, one.warning_text)
        return [
            [
                *([] if photo is None else [render.CaptionedImage(photo[region or ...], label)]),
                *(drawn.get((row, column)) for column in range(len(self.column_labels))),
            ]
            for row, label in enumerate(self.row_labels)
        ]

    def _select_target_explanation(self, target_index: int) -> Explanation:
        """The explanation whose answer is that of the question's rows."""
        return select_common_explanation(
            [
                one
                for one, entry in zip(self.explanations, self.entries, strict=True)
                if entry.target_index == target_index
            ]
        )

    @property
    def title(self) -> str:
        """What all have in common: the image's name, the class and the layer where there is one of them."""
        first, layers = self.explanations[0], {one.layer for one in self.explanations} - {None}
        asked = len({entry.target_index for entry in self.entries})
        answer = self._select_target_explanation(0).label_and_score if asked == 1 and len(self.row_labels) > 1 else None
        return " · ".join(filter(None, (first.name, answer, layers.pop() if len(layers) == 1 else None)))

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = True) -> Path:
        """Write the figure (`.png`, `.jpg`, `.webp`)."""
        suffix = Path(path).suffix.lower()
        if suffix not in render.IMAGE_FORMATS:
            raise OutputError(f"{path}: cannot write {suffix or 'a file without a suffix'}; use .png, .jpg or .webp")
        return write_bytes(path, render.encode_image(self.figure(), suffix), overwrite=overwrite)

    def _repr_html_(self) -> str:
        words = html.escape(self.title)
        said = "<br>".join([words, *map(html.escape, self.equivalence_notes)])
        if self.explanations[0].attribution.ndim > 3:
            return f"<p>{said}</p>"
        return render.build_figure_html(self.figure(), words, said)


@reject_foreign_keywords
def compare(
    model: nn.Module,
    image: Any,
    methods: Sequence[MethodLike] = DEFAULT_METHODS,
    *,
    layers: Sequence[str | nn.Module] | None = None,
    targets: Sequence[TargetLike] = (None,),
    preprocess: Any = None,
    class_names: Sequence[str] | None = None,
    precision: Precision | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    skip_unsupported: bool = False,
    on_pass: OnPass | None = None,
) -> Comparison:
    """Several methods, layers and classes on one image: one forward pass and one backward pass a class for all that can share.

    `methods`: names, classes, or explainers of this model, which are taken as they are. `layers`: names or modules, all
    of them at once for a method that makes one map of several, as RefineCAM; None: the last layer with spatial extent.
    `targets`: questions, see Score. `preprocess`, `class_names`, `precision`: see Explainer. `args`, `kwargs`: what the
    model takes beside the image. `skip_unsupported`: a method that has no answer for this model is left out, with a warning;
    else it is an error. `on_pass`: told which methods work next.
    """
    if isinstance(methods, str) or isinstance(layers, str | nn.Module):
        raise InputError(
            "methods and layers are lists: compare(model, image, ['gradcam', 'layercam'], layers=['layer4'])"
        )
    if isinstance(targets, str | int) or callable(targets):
        raise TargetError(f"targets is a list of questions; for one, compare(..., targets=[{targets!r}])")
    if layers is not None and not layers:
        raise LayerError("layers is empty: name one at least, as layers=['layer4'], or leave it out")
    settings = {"preprocess": preprocess, "class_names": class_names, "precision": precision}
    tools: list[Explainer] = []
    for method in methods:
        if isinstance(method, Explainer):
            tools.append(method)
        else:
            kind = get_explainer_class(method)
            given = {name: value for name, value in settings.items() if name in signature(kind).parameters}
            tools += create_at_layers(kind, model, layers, given)
    return compare_explainers(
        tools,
        image,
        targets,
        ExtraInputs(tuple(args), dict(kwargs or {})),
        skip_unsupported=skip_unsupported,
        on_pass=on_pass,
    )


def compare_explainers(
    explainers: Sequence[Explainer],
    image: Any,
    targets: Sequence[TargetLike],
    extra_inputs: ExtraInputs = NO_EXTRA_INPUTS,
    *,
    skip_unsupported: bool = False,
    on_pass: OnPass | None = None,
) -> Comparison:
    """Comparison of explainers of one model; see `compare`."""
    riders, clock = create_feature_captures(explainers), MethodTimer(on_pass)
    if skip_unsupported:
        every, found = explain_supported(
            explainers, image, targets, extra_inputs, optional_methods=riders, on_pass=clock
        )
        explainers, riders = (
            [t for t in every if not isinstance(t, FeatureCapture)],
            [t for t in every if isinstance(t, FeatureCapture)],
        )
    else:
        found = explain_grid([*explainers, *riders], image, targets, extra_inputs, on_pass=clock)
    own, seen = found[: len(explainers)], found[len(explainers) :]
    places = build_grid_layout(explainers, own, [clock.get_seconds(tool) / len(targets) for tool in explainers])
    explanations = [own[t][entry.target_index] for t, entry in zip(places.method_indices, places.entries, strict=True)]
    groups = []
    for q in range(len(targets)):
        asked = [n for n, entry in enumerate(places.entries) if entry.target_index == q]
        made = [explainers[places.method_indices[n]] for n in asked]
        # of a pass that was run again the last facts count
        facts = {
            row[q].layer: rider.conditions_by_score[q - len(targets)] for rider, row in zip(riders, seen, strict=True)
        }
        groups += find_equivalent_maps([explanations[n] for n in asked], made, facts)
    return Comparison(
        tuple(explanations), tuple(places.row_labels), tuple(places.column_labels), tuple(places.entries), tuple(groups)
    )


def _find_visible_region(explanations: Sequence[Explanation]) -> tuple[slice, slice] | None:
    """The rows and columns of the image that the model was shown; None where that is all, unknown, or not one part."""
    parts = set()
    for one in explanations:
        if one.image is None or one.placement is None:
            return None
        pixels = np.nonzero(one.coverage_mask())
        parts.add(tuple((int(where.min()), int(where.max()) + 1) for where in pixels if where.size))
    whole = tuple((0, extent) for extent in explanations[0].coverage_mask().shape)
    found = parts.pop()
    if parts or found == whole or len(found) != 2:
        return None
    (top, bottom), (left, right) = found
    return slice(top, bottom), slice(left, right)


def _format_legend_labels(scale: ScaleOption | Literal["shared"], colormap: str) -> tuple[str, str]:
    """What the bottom and the top colour mean."""
    if isinstance(scale, tuple | list):
        return f"{scale[0]:.3g}", f"{scale[1]:.3g}"
    signed = colormap == render.DIVERGING
    strongest = "strongest value" if signed or scale in ("symmetric", "robust") else "maximum"
    whose = f"{strongest} of a method over the classes" if scale == "shared" else f"{strongest} of each map"
    return f"minus the {strongest}" if signed else "0", whose
