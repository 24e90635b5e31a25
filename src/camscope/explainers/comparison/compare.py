"""Compare explanations of one image by several methods, layers and targets, as a figure and as records."""

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
from camscope.atomic_writes_and_folder_locks import write_bytes
from camscope.errors import InputError, LayerError, ModelError, OutputError, TargetError, warn_caller
from camscope.explainers.comparison.equal_maps import correlate_maps, describe_equal_maps, find_equal_maps
from camscope.explainers.comparison.explain_by_supported_methods import MethodTimer, explain_supported
from camscope.explainers.comparison.grid_of_targets_and_methods import (
    GridEntry,
    arrange_in_grid,
    create_explainers_at_layers,
    select_explanation_with_commonest_label,
)
from camscope.explainers.core.base_explainer import METHODS, Explainer, get_explainer_class
from camscope.explainers.core.evaluation_context import Precision
from camscope.explainers.core.model_input import NO_EXTRA_INPUTS, ExtraInputs
from camscope.explainers.core.run_methods_in_shared_passes import OnPass, explain_grid
from camscope.explainers.core.translate_keywords_of_other_toolkits import reject_foreign_keywords
from camscope.explanation import (
    AUTO,
    Explanation,
    FloatArray,
    InterpolationOption,
    PixelArray,
    PrintFigure,
    ScaleOption,
    add_own_maximum,
    shared_scales,
)
from camscope.targets import TargetLike

MethodLike = str | type[Explainer] | Explainer
DEFAULT_METHODS = ("gradcam", "gradcam++", "xgradcam", "hirescam", "layercam")


@dataclass(frozen=True, eq=False)
class Comparison:
    """Explanations of one image: a row for each target (and layer), a column for each method.

    Attributes:
        entries: The explanations row by row, with their position and cost; a method without a layer to choose appears
            once per target.
        row_labels: One label per row.
        column_labels: One label per column: the method, with the settings that distinguish it.
        equivalent_maps: Groups of explanations of one target whose displayed maps are equal, to 1e-4 of the maximum.

    >>> from camscope import compare, load_model
    >>> from camscope.phantom import draw_radiograph
    >>> comparison = compare(load_model("phantom"), draw_radiograph(0, "nodule").image, ["gradcam", "layercam"])
    >>> comparison.column_labels, len(comparison.entries)
    (('gradcam', 'layercam'), 2)

    """

    entries: tuple[GridEntry, ...] = field(repr=False)
    row_labels: tuple[str, ...]
    column_labels: tuple[str, ...]
    equivalent_maps: tuple[tuple[Explanation, ...], ...] = field(repr=False)

    @property
    def explanations(self) -> tuple[Explanation, ...]:
        """The explanations, row by row."""
        return tuple(entry.explanation for entry in self.entries)

    @property
    def equivalence_notes(self) -> tuple[str, ...]:
        """One sentence for each group of equal maps. It names the methods of the group and the reason."""
        names = {id(entry.explanation): METHODS.replace_names_by_titles(entry.method_label) for entry in self.entries}
        return describe_equal_maps(self.equivalent_maps, names, self.n_targets)

    @property
    def n_targets(self) -> int:
        """The number of targets."""
        return len({entry.target_index for entry in self.entries})

    def correlate_maps(self, kind: Literal["pearson", "spearman"] = "pearson") -> FloatArray:
        """Return the correlations (M,M) between the M displayed maps. For a constant map they are NaN.

        All maps are resized to the finest grid among them.

        Args:
            kind: "pearson", or "spearman" for ranks.

        Returns:
            (M,M) correlations in -1..1, in the order of `entries`.

        >>> from camscope import load_model
        >>> from camscope.phantom import draw_radiograph
        >>> model, image = load_model("phantom"), draw_radiograph(0, "nodule").image
        >>> compare(model, image, ["gradcam", "layercam"]).correlate_maps().shape
        (2, 2)

        """
        return correlate_maps(self.explanations, kind)

    def to_records(self) -> list[dict[str, Any]]:
        """Return one dict of numbers for each explanation.

        `correlation` is Pearson's correlation with the first explanation of the same target.

        Returns:
            The records, in the order of `entries`.

        >>> from camscope import load_model
        >>> from camscope.phantom import draw_radiograph
        >>> model, image = load_model("phantom"), draw_radiograph(0, "nodule").image
        >>> records = compare(model, image, ["gradcam", "layercam"]).to_records()
        >>> len(records), round(records[0]["correlation"], 6)  # with itself
        (2, 1.0)

        """
        matrix, firsts, rows = self.correlate_maps(), dict[int, int](), []
        facts = ("layer", "target", "label", "score", "probability", "status")
        for n, entry in enumerate(self.entries):
            row = {"method": entry.method_label} | {name: getattr(entry.explanation, name) for name in facts}
            row |= {name: getattr(entry, name) for name in ("forward_passes", "backward_passes", "seconds")}
            first = firsts.setdefault(entry.target_index, n)
            rows.append({**row, "correlation": float(matrix[first, n])})
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
        interpolation: InterpolationOption = AUTO,
    ) -> PixelArray:
        """Draw the figure (H,W,3) uint8. Each row shows the image and then its maps.

        Args:
            scale: As in `Explanation.overlay`; "shared" gives the maps of one method and layer one scale over all
                targets. The numbers of different methods or layers cannot be compared.
            alpha: Opacity of the map.
            colormap: Name of the color map.
            crop: Leave out what the model did not see instead of marking it.
            columns: Images side by side.
            height: Height of an image in pixels; default: 256, or 384 for the planes of a volume.
            interpolation: As in `Explanation.overlay`.

        Returns:
            (H,W,3) uint8.

        >>> from camscope import load_model
        >>> from camscope.phantom import draw_radiograph
        >>> model, image = load_model("phantom"), draw_radiograph(0, "nodule").image
        >>> compare(model, image, ["gradcam", "layercam"]).figure(height=64).shape[2]
        3

        """
        explanations = self.explanations
        if colormap == AUTO:  # one for all, because there is one legend
            signed = any(explanation.colormap == render.DIVERGING for explanation in explanations)
            colormap = render.DIVERGING if signed else "inferno"
        scales = (
            shared_scales(explanations, colormap, interpolation) if scale == "shared" else [scale] * len(explanations)
        )
        region = _find_visible_rows_and_columns(explanations) if crop else None
        is_volume = explanations[0].attribution.ndim == 3
        height = height or (384 if is_volume else 256)
        volume_height = height if is_volume else None  # planes are drawn at this height directly
        images = [
            explanation.overlay(
                scale=own_scale, alpha=alpha, colormap=colormap, height=volume_height, interpolation=interpolation
            )[region or ...]
            for explanation, own_scale in zip(explanations, scales, strict=True)
        ]
        return render.draw_contact_sheet(
            self._build_figure_cells(images, scales, region, volume_height),
            title=f"{self.title} · region seen by the model" if region else self.title,
            legend=_format_lowest_and_highest_label(scale, colormap),
            colormap=colormap,
            columns=columns,
            height=height,
        )

    def print_figure(
        self,
        *,
        scale: ScaleOption | Literal["shared"] = AUTO,
        alpha: float = 0.85,
        colormap: str = AUTO,
        columns: int | None = None,
        interpolation: InterpolationOption = AUTO,
    ) -> PrintFigure:
        """Return the figure for print: the image and its maps, with letters, color bars and a caption.

        Args:
            scale: As in `figure`.
            alpha: Opacity of the map.
            colormap: Name of the color map.
            columns: Images side by side. Default: as many as the width allows.
            interpolation: As in `Explanation.overlay`.

        Returns:
            The figure, with its `caption`. `draw` gives it as a matplotlib figure.

        >>> from camscope import load_model
        >>> from camscope.phantom import draw_radiograph
        >>> model, image = load_model("phantom"), draw_radiograph(0, "nodule").image
        >>> figure = compare(model, image, ["gradcam", "layercam"]).print_figure()
        >>> figure.caption.partition(" at ")[0]
        'a, image; b, Grad-CAM'

        """
        explanations, first = self.explanations, self.explanations[0]
        scales = shared_scales(explanations, colormap, interpolation) if scale == "shared" else None
        titles = []
        for entry in self.entries:
            method = METHODS.replace_names_by_titles(self.column_labels[entry.column])
            layer = f" at {entry.explanation.layer}" if len({item.layer for item in explanations}) > 1 else ""
            titles.append(f"{method}{layer}: {entry.explanation.label}")
        return PrintFigure(
            explanations,
            titles=titles,
            scales=scales,
            photo=first.image if first.attribution.ndim == 2 else None,
            scale=AUTO if scale == "shared" else scale,
            columns=columns,
            alpha=alpha,
            colormap=colormap,
            interpolation=interpolation,
        )

    def _build_figure_cells(
        self,
        images: Sequence[PixelArray],
        scales: Sequence[ScaleOption],
        region: tuple[slice, slice] | None,
        height: int | None = None,
    ) -> list[list[render.CaptionedImage | None]]:
        """Build the captioned images of the figure, row by row."""
        first, cells = self.explanations[0], {}
        photo = first.image if first.image is not None else first.model_input_image
        if photo is not None and first.attribution.ndim != 2:  # a signal or a volume, drawn as an image
            photo = first.overlay(alpha=0, height=height)
        for image, entry, scale in zip(images, self.entries, scales, strict=True):
            explanation, caption = entry.explanation, METHODS.replace_names_by_titles(self.column_labels[entry.column])
            if explanation.label != self._select_explanation_with_commonest_label(entry.target_index).label:
                caption = f"{caption} · {explanation.label_and_score}"
            caption = add_own_maximum(caption, explanation, scale)
            cells[entry.row, entry.column] = render.CaptionedImage(image, caption, explanation.warning_text)
        return [
            [
                *([] if photo is None else [render.CaptionedImage(photo[region or ...], label)]),
                *(cells.get((row, column)) for column in range(len(self.column_labels))),
            ]
            for row, label in enumerate(self.row_labels)
        ]

    def _select_explanation_with_commonest_label(self, target_index: int) -> Explanation:
        """Return an explanation of the target. Its label is the most frequent one for this target."""
        return select_explanation_with_commonest_label(
            [e.explanation for e in self.entries if e.target_index == target_index]
        )

    @property
    def title(self) -> str:
        """The title of the figure: the name of the image. If there is only one target or one layer, it is added."""
        first, layers = self.explanations[0], {explanation.layer for explanation in self.explanations} - {None}
        names_target = self.n_targets == 1 and len(self.row_labels) > 1
        answer = self._select_explanation_with_commonest_label(0).label_and_score if names_target else None
        return " · ".join(filter(None, (first.name, answer, layers.pop() if len(layers) == 1 else None)))

    def save(
        self, path: str | os.PathLike[str], *, width_mm: float = render.TWO_COLUMNS_MM, overwrite: bool = True
    ) -> Path:
        """Write the figure to a `.png`, `.jpg` or `.webp` file, or a figure for print to a `.pdf` or `.svg` file.

        Args:
            path: File to write.
            width_mm: Width of a `.pdf` or `.svg` figure in millimeters.
            overwrite: Whether an existing file is replaced.

        Returns:
            The path of the file.

        Raises:
            OutputError: The suffix is unknown, or the file cannot be written.

        >>> import tempfile
        >>> from camscope import load_model
        >>> from camscope.phantom import draw_radiograph
        >>> model, image = load_model("phantom"), draw_radiograph(0, "nodule").image
        >>> compare(model, image, ["gradcam"]).save(f"{tempfile.mkdtemp()}/figure.png").name
        'figure.png'

        """
        suffix = Path(path).suffix.lower()
        if suffix in render.VECTOR_FORMATS:
            return write_bytes(path, self.print_figure().encode(suffix, width_mm=width_mm), overwrite=overwrite)
        if suffix not in render.IMAGE_FORMATS:
            received = suffix or "a file without a suffix"
            raise OutputError(f"{path}: cannot write {received}; use .png, .jpg, .webp, .pdf or .svg")
        return write_bytes(path, render.encode_image(self.figure(), suffix), overwrite=overwrite)

    def _repr_html_(self) -> str:
        title = html.escape(self.title)
        caption = "<br>".join([title, *map(html.escape, self.equivalence_notes)])
        if self.explanations[0].attribution.ndim > 3:
            return f"<p>{caption}</p>"
        return render.build_figure_html(self.figure(), title, caption)


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
    """Explain one image with several methods, layers and targets. Methods share passes where possible.

    Methods that can share passes need one forward pass, and one backward pass per target.

    Args:
        model: The model to explain.
        image: The image, as `Explainer.explain` takes it.
        methods: Names, classes, or explainers of this model, which keep their settings.
        layers: Names or modules; a method that combines layers, such as RefineCAM, takes all of them. Default: the last
            layer with spatial extent.
        targets: One or several targets. See `Explainer.attribute`.
        preprocess: How the image becomes the model's input.
        class_names: Class names by index.
        precision: "bf16", or None for the model's own.
        args: Extra positional inputs of the model.
        kwargs: Extra keyword inputs of the model.
        skip_unsupported: Leave out a method that cannot explain this model, with a warning, instead of raising its
            error.
        on_pass: Called before each pass with the methods that share it.

    Returns:
        The explanations with their figure, correlations and records.

    Raises:
        CamscopeError: The image, a layer, a target or the model cannot be explained; the subclass and message say why.

    >>> from camscope import load_model
    >>> from camscope.phantom import draw_radiograph
    >>> model, image = load_model("phantom"), draw_radiograph(0, "nodule").image
    >>> compare(model, image, ["gradcam", "hirescam"], targets=["nodule", "effusion"]).row_labels
    ('nodule (p=0.99)', 'effusion (p=0.00)')

    """
    if isinstance(methods, str) or isinstance(layers, str | nn.Module):
        raise InputError(
            "methods and layers must be lists, as in compare(model, image, ['gradcam', 'layercam'], layers=['layer4'])"
        )
    if isinstance(targets, str | int) or callable(targets):
        raise TargetError(f"targets must be a list; for one target, use compare(..., targets=[{targets!r}])")
    if layers is not None and not layers:
        raise LayerError("layers is empty: pass at least one layer, such as layers=['layer4'], or omit layers")
    settings = {"preprocess": preprocess, "class_names": class_names, "precision": precision}
    explainers: list[Explainer] = []
    errors: list[ModelError] = []
    for method in methods:
        if isinstance(method, Explainer):
            explainers.append(method)
        else:
            method_cls = get_explainer_class(method)
            names = signature(method_cls).parameters
            own_settings = {name: value for name, value in settings.items() if name in names}
            try:
                explainers += create_explainers_at_layers(method_cls, model, layers, own_settings)
            except ModelError as error:  # of a model that has only scores
                errors.append(error)
                if not skip_unsupported:
                    raise
                warn_caller(f"{method_cls.title} is left out: {error}")
    if errors and not explainers:
        raise errors[0]
    extra = ExtraInputs(tuple(args), dict(kwargs or {}))
    return compare_explainers(explainers, image, targets, extra, skip_unsupported=skip_unsupported, on_pass=on_pass)


def compare_explainers(
    explainers: Sequence[Explainer],
    image: Any,
    targets: Sequence[TargetLike],
    extra_inputs: ExtraInputs = NO_EXTRA_INPUTS,
    *,
    skip_unsupported: bool = False,
    on_pass: OnPass | None = None,
) -> Comparison:
    """Explain one image with several explainers of the same model, and compare the explanations."""
    timer = MethodTimer(on_pass)
    if skip_unsupported:
        explainers, rows = explain_supported(explainers, image, targets, extra_inputs, on_pass=timer)
    else:
        rows = explain_grid(explainers, image, targets, extra_inputs, on_pass=timer)
    seconds = [timer.get_seconds(explainer) / len(targets) for explainer in explainers]
    entries, row_labels, column_labels = arrange_in_grid(explainers, rows, seconds)
    by_target = [[entry.explanation for entry in entries if entry.target_index == q] for q in range(len(targets))]
    groups = [group for explanations in by_target for group in find_equal_maps(explanations)]
    return Comparison(entries, row_labels, column_labels, tuple(groups))


def _find_visible_rows_and_columns(explanations: Sequence[Explanation]) -> tuple[slice, slice] | None:
    """Return the rows and columns of the image that the model received. Return None for the whole image or an unknown region."""
    regions = set()
    for explanation in explanations:
        if explanation.image is None or explanation.placement is None:
            return None
        pixels = np.nonzero(explanation.coverage_mask())
        regions.add(tuple((int(where.min()), int(where.max()) + 1) for where in pixels if where.size))
    whole = tuple((0, extent) for extent in explanations[0].coverage_mask().shape)
    region = regions.pop()
    if regions or region == whole or len(region) != 2:
        return None
    (top, bottom), (left, right) = region
    return slice(top, bottom), slice(left, right)


def _format_lowest_and_highest_label(scale: ScaleOption | Literal["shared"], colormap: str) -> tuple[str, str]:
    """Return two texts for the legend: the meaning of the lowest color, and the meaning of the highest color."""
    if isinstance(scale, tuple | list):
        return f"{scale[0]:.3g}", f"{scale[1]:.3g}"
    signed = colormap == render.DIVERGING
    strongest = "strongest value" if signed or scale in ("symmetric", "robust") else "maximum"
    whose = f"{strongest} of a method over all classes" if scale == "shared" else f"{strongest} of each map"
    return f"minus the {strongest}" if signed else "0", whose
