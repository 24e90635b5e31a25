"""`ComparisonResult`: what a comparison of methods found, as records, sentences and a figure."""

import contextlib
import html
import io
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

import numpy as np

from camscope import render
from camscope.atomic_writes_and_folder_locks import write_bytes
from camscope.batch import BatchRun
from camscope.batch.image_manifest import import_arrow
from camscope.batch.run_reader import read_original_image, render_thumbnail
from camscope.batch.sql_query import table_to_dicts
from camscope.errors import OutputError, UndefinedError
from camscope.evaluation.comparison_statements import iter_statements
from camscope.evaluation.evaluate_run import EvaluationResult
from camscope.evaluation.ground_truth import GroundTruth, Mask
from camscope.evaluation.interval_plots import (
    FIGURE_FORMATS,
    METHOD_ROW_INCHES,
    TEXT_COLOR,
    build_metric_caption,
    compute_panel_rows_and_columns,
    draw_forest_plot,
    draw_title_and_subtitle,
    import_matplotlib_figure,
    literal_text_scope,
    sort_methods,
)
from camscope.evaluation.map_agreement import METHOD_KEY_COLUMNS, MapAgreement, MethodKey
from camscope.evaluation.method_summaries import MethodSummary
from camscope.explanation import PixelArray
from camscope.metrics.metric_registry import FloatArray
from camscope.plurals import plural

if TYPE_CHECKING:
    from matplotlib.figure import Figure

IMAGE_HEIGHT_PX, MAX_CAPTION_LENGTH = 240, 22  # pixels of an example image, characters of its caption
FIGURE_WIDTH_INCHES = 13.0
CELL_INCHES, INTERVAL_CELL_INCHES = 0.42, 0.72  # a cell of the agreement matrix without and with an interval
MAX_IMAGE_INCHES, CAPTION_INCHES = 2.2, 0.22  # an example image
MAX_METHODS_WITH_NUMBERS, MAX_METHODS_WITH_INTERVALS = 16, 7  # more leave no room for numbers, or for intervals
MAX_METHODS_IN_EXAMPLES, MIN_EXAMPLES, MAX_EXAMPLES = 6, 3, 6  # methods and images in the examples
LARGE_MATRIX_INCHES = 4.8  # a larger matrix leaves room for fewer methods
COLOR_SCALE_MARGIN = 0.12  # below the smallest correlation, so that no cell is white
MAX_COLOR_SCALE = 1.25  # above 1, so that a correlation of 1 is not black
ESTIMATE_COLUMNS = ("mean", "low", "high", "n_values", "n_groups", "n_undefined")
DIFFERENCE_COLUMNS = {"": "mean", "_low": "low", "_high": "high", "_p_value": "p_value"}


@dataclass(frozen=True, eq=False)
class ComparisonResult:
    """The result of a comparison of attribution methods over the images of a run.

    Attributes:
        run: The run.
        evaluation: The values.
        summaries: The summaries of each metric, the best first, including controls.
        agreement: The similarity of the maps of each pair of methods.
        names: The display name by method key and whether the method is a control.
        seconds_per_image: The computation time of each method in seconds per image.
        n_images: The number of images.
        ground_truth: The annotations, for the figure.

    >>> import tempfile
    >>> from camscope.evaluation import compare_methods
    >>> comparison = compare_methods(run, tempfile.mkdtemp(), metrics=["sparseness"])  # `run`: of `run_batch`
    >>> comparison.n_images, list(comparison.summaries)
    (4, ['sparseness'])

    """

    run: BatchRun = field(repr=False)
    evaluation: EvaluationResult = field(repr=False)
    summaries: Mapping[str, Sequence[MethodSummary]] = field(repr=False)
    agreement: MapAgreement = field(repr=False)
    names: Mapping[tuple[MethodKey, bool], str]
    seconds_per_image: Mapping[MethodKey, float]
    n_images: int
    ground_truth: GroundTruth | None = field(default=None, repr=False)

    def get_name(self, summary: MethodSummary) -> str:
        """Return the display name of the method that a summary describes.

        Args:
            summary: One of `summaries`.

        Returns:
            The name.

        >>> import tempfile
        >>> from camscope.evaluation import compare_methods
        >>> comparison = compare_methods(run, tempfile.mkdtemp(), metrics=["entropy"])  # `run`: of `run_batch`
        >>> "Grad-CAM" in {comparison.get_name(summary) for summary in comparison.summaries["entropy"]}
        True

        """
        return self.names[summary.key, summary.is_control]

    @property
    def method_names(self) -> list[str]:
        """The display names of the methods. They have the order of the run."""
        return [self.names[key, False] for key in self.agreement.keys]

    @property
    def title(self) -> str:
        """A title for figures: the model and the number of images. If all maps come from one layer, the title names it."""
        layers = {key[1] for key in self.agreement.keys} - {None}
        model, layer = self.run.run_info["run_config"]["model"]["source"], layers.pop() if len(layers) == 1 else None
        return " · ".join(filter(None, (Path(model).name, layer, plural(self.n_images, "image"))))

    def compute_correlation_matrix(self) -> FloatArray:
        """Return the mean Spearman correlation between the maps of each pair of methods (M,M). Undefined values are NaN.

        Returns:
            (M,M) correlations in -1..1.

        >>> import tempfile
        >>> from camscope.evaluation import compare_methods
        >>> comparison = compare_methods(run, tempfile.mkdtemp(), metrics=["entropy"])  # `run`: of `run_batch`, with one method
        >>> comparison.compute_correlation_matrix().shape
        (1, 1)

        """
        matrix = np.full((len(self.agreement.keys),) * 2, np.nan)
        np.fill_diagonal(matrix, 1)
        for (i, j), estimate in self.agreement.estimates.items():
            matrix[i, j] = matrix[j, i] = estimate.mean
        return matrix

    @cached_property
    def statements(self) -> tuple[str, ...]:
        """Sentences that name the methods with a significant difference, and the methods without one."""
        return tuple(iter_statements(self.summaries, self.agreement, self.names))

    def to_records(self) -> list[dict[str, Any]]:
        """Return one dict for each metric and method. It holds the mean, its interval and the paired differences.

        `difference_to_best` is corrected for all pairs of methods and all metrics. `difference_to_control` is the difference
        to the best control, corrected for all methods and metrics. A positive difference is better for every metric.

        Returns:
            The records.

        >>> import tempfile
        >>> from camscope.evaluation import compare_methods
        >>> comparison = compare_methods(run, tempfile.mkdtemp(), metrics=["entropy"])  # `run`: of `run_batch`
        >>> {record["metric"] for record in comparison.to_records()}
        {'entropy'}

        """
        return [self._build_record(metric, summary) for metric, group in self.summaries.items() for summary in group]

    def _build_record(self, metric: str, summary: MethodSummary) -> dict[str, Any]:
        """Build one row of the table: a method, its estimate and its differences to the best and to the control."""
        record: dict[str, Any] = {"metric": metric, "name": self.get_name(summary)}
        record |= dict(zip(METHOD_KEY_COLUMNS, summary.key, strict=True)) | {"is_control": summary.is_control}
        record |= {column: getattr(summary.estimate, column, None) for column in ESTIMATE_COLUMNS}
        for name in ("difference_to_best", "difference_to_control"):
            difference = getattr(summary, name)
            record |= {f"{name}{suffix}": getattr(difference, f, None) for suffix, f in DIFFERENCE_COLUMNS.items()}
        return record | {"seconds_per_image": self.seconds_per_image.get(summary.key)}

    def figure(self, *, n_examples: int | None = None, seed: int = 0) -> "Figure":
        """Draw a matplotlib figure with the intervals of every metric, the agreement between maps, and example images.

        Args:
            n_examples: Number of example images. The default is as many as fit.
            seed: Seed by which the images are chosen.

        Returns:
            The figure.

        >>> import tempfile
        >>> from camscope.evaluation import compare_methods
        >>> comparison = compare_methods(run, tempfile.mkdtemp(), metrics=["entropy"])  # `run`: of `run_batch`
        >>> type(comparison.figure(n_examples=1)).__name__
        'Figure'

        """
        figure: Figure = draw_comparison_figure(self, n_examples, seed)
        return figure

    @property
    def figure_caption(self) -> str:
        """A caption for an article: the methods, the metrics, the digest of the weights and the versions."""
        run_info = self.run.run_info
        model, versions = run_info["run_config"]["model"], run_info["versions"]
        return build_metric_caption(self.title, self.method_names, list(self.summaries), model, versions)

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = True) -> Path:
        """Write the figure to a `.png`, `.svg` or `.pdf` file.

        Args:
            path: File to write.
            overwrite: Whether an existing file is replaced.

        Returns:
            The path of the file.

        Raises:
            OutputError: The suffix is unknown, or the file cannot be written.

        >>> import tempfile
        >>> from camscope.evaluation import compare_methods
        >>> comparison = compare_methods(run, tempfile.mkdtemp(), metrics=["entropy"])  # `run`: of `run_batch`
        >>> comparison.save(f"{tempfile.mkdtemp()}/comparison.png").name
        'comparison.png'

        """
        suffix = Path(path).suffix.lower()
        if suffix not in FIGURE_FORMATS:
            raise OutputError(
                f"{path}: cannot write {suffix or 'a file without a suffix'}; use {', '.join(FIGURE_FORMATS)}"
            )
        return write_bytes(path, self._encode_figure(suffix), overwrite=overwrite)

    def _encode_figure(self, suffix: str) -> bytes:
        return render.encode_figure(self.figure(), suffix, title=self.title, caption=self.figure_caption, dpi=120)

    def _repr_html_(self) -> str:
        from PIL import Image

        image, title = Image.open(io.BytesIO(self._encode_figure(".png"))).convert("RGB"), html.escape(self.title)
        items = "".join(f"<li>{html.escape(statement)}</li>" for statement in self.statements)
        return render.build_figure_html(np.asarray(image), title, f"{title}<ul>{items}</ul>")


@dataclass(frozen=True)
class ExampleImage:
    """An example image of size (H,W) with one overlay for each method, and with a mask (H,W) if ground truth exists."""

    caption: str
    image: PixelArray
    overlays: Mapping[str, PixelArray]
    size: tuple[int, int]
    mask: Mask | None


def draw_comparison_figure(comparison: ComparisonResult, n_examples: int | None, seed: int) -> Any:
    """Draw the matplotlib figure that compares methods."""
    figures = import_matplotlib_figure()
    groups = [[comparison.names[key, False] for key in group] for group in comparison.agreement.equivalent_groups]
    rows = sort_methods(comparison.summaries, comparison.get_name, comparison.method_names, groups)
    order = [name for name, is_control in rows if not is_control and name in comparison.method_names]
    duplicates = {name for group in groups for name in sorted(group, key=order.index)[1:]}
    side = _compute_matrix_size(len(order))
    max_methods = MAX_METHODS_IN_EXAMPLES if side < LARGE_MATRIX_INCHES else MAX_METHODS_IN_EXAMPLES - 2
    shown_methods = [name for name in order if name not in duplicates][:max_methods]
    if n_examples is None:  # as many square images as fill the height of the matrix
        image_inches = min(MAX_IMAGE_INCHES, (FIGURE_WIDTH_INCHES - side) / (1 + len(shown_methods)))
        n_examples = int(np.clip(side // (image_inches + CAPTION_INCHES), MIN_EXAMPLES, MAX_EXAMPLES))
    examples = select_examples(comparison, shown_methods, n_examples, seed)
    n_panel_rows = compute_panel_rows_and_columns(len(comparison.summaries))[0]
    heights = [n_panel_rows * (0.85 + METHOD_ROW_INCHES * len(rows)) + 0.3]
    if len(order) > 1 or examples:
        heights.append(max(side, _compute_examples_height(examples, FIGURE_WIDTH_INCHES - side)))
    with literal_text_scope():
        figure = figures.Figure(figsize=(FIGURE_WIDTH_INCHES, sum(heights) + 0.5), layout="constrained")
        figure.get_layout_engine().set(w_pad=0.08, h_pad=0.08)
        figure.suptitle(comparison.title, fontsize=13, fontweight="bold", x=0.01, ha="left")
        parts = figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
        draw_forest_plot(parts[0], comparison.summaries, comparison.get_name, rows)
        if len(heights) > 1:
            _draw_agreement_and_examples(parts[1], comparison, order, examples, side)
    return figure


def select_examples(
    comparison: ComparisonResult, methods: Sequence[str], max_images: int, seed: int
) -> list[ExampleImage]:
    """Choose at most `max_images` random images. Each chosen image has a map of every method."""
    keys = {key: name for (key, is_control), name in comparison.names.items() if not is_control and name in methods}
    row_numbers = np.unique(comparison.run.table(columns=["row"])["row"].to_numpy())
    examples: list[ExampleImage] = []
    for number in np.random.default_rng(seed).permutation(row_numbers).tolist():
        if len(examples) == max_images:
            break
        rows = table_to_dicts(comparison.run.table(filter=import_arrow("dataset").field("row") == number))
        named = [(keys.get(tuple(row[column] for column in METHOD_KEY_COLUMNS)), row) for row in rows]
        maps = {
            name: row
            for name, row in named
            if name is not None and row["target"] == rows[0]["target"] and row["attribution"] is not None
        }
        has_all = len(maps) == len(keys)
        if has_all and all(len(row["grid"]) == 2 and row["placement"] is not None for row in maps.values()):
            examples.append(_build_example(comparison, {name: maps[name] for name in methods}))
    return examples


def _build_example(comparison: ComparisonResult, rows: Mapping[str, Mapping[str, Any]]) -> ExampleImage:
    """Build an example with the overlay of each method, and the mask if there is one."""
    first = next(iter(rows.values()))
    photo, _ = read_original_image(comparison.run, first)
    size = (first["image_size"][0], first["image_size"][1])
    overlays = {
        name: render_thumbnail(comparison.run.explanation(row), photo, IMAGE_HEIGHT_PX) for name, row in rows.items()
    }
    image = np.full((*size, 3), 128, np.uint8)  # gray, if the image is not available
    if photo is not None:
        image = render.resize_to_fit(photo, IMAGE_HEIGHT_PX, 2 * IMAGE_HEIGHT_PX)
    mask = None
    if comparison.ground_truth is not None:
        with contextlib.suppress(UndefinedError):
            mask = comparison.ground_truth.load_mask(first, size)
    caption = str(first["label"] or PurePath(str(first["id"])).stem)
    caption = caption if len(caption) <= MAX_CAPTION_LENGTH else f"{caption[: MAX_CAPTION_LENGTH - 1]}…"
    return ExampleImage(caption, image, overlays, size, mask)


def _compute_matrix_size(n_methods: int) -> float:
    """Return the side length of the agreement matrix in inches, including its labels."""
    if n_methods < 2:
        return 0.0
    cell = INTERVAL_CELL_INCHES if n_methods <= MAX_METHODS_WITH_INTERVALS else CELL_INCHES
    return float(np.clip(1.7 + cell * (n_methods - 1), 3.0, 6.4))


def _compute_examples_height(examples: Sequence[ExampleImage], width: float) -> float:
    """Return the total height of the example images in inches. Each row of images is `width` inches wide."""
    heights = [width / (1 + len(e.overlays)) * e.size[0] / e.size[1] for e in examples]
    return sum(min(MAX_IMAGE_INCHES, height) + CAPTION_INCHES for height in heights) + 0.2


def _draw_agreement_and_examples(
    figure: Any,
    comparison: ComparisonResult,
    method_names: Sequence[str],
    examples: Sequence[ExampleImage],
    matrix_size: float,
) -> None:
    """Draw the agreement matrix on the left and the examples on the right."""
    if len(method_names) < 2:
        _draw_examples(figure, examples)
        return
    left_width = matrix_size if examples else matrix_size + 1
    width_ratios = [left_width, FIGURE_WIDTH_INCHES - left_width]
    left, right = figure.subfigures(1, 2, width_ratios=width_ratios, wspace=0.02 if examples else 0)
    _draw_agreement_matrix(left, comparison, method_names)
    if examples:
        height = _compute_examples_height(examples, width_ratios[1])
        ratios = [height, max(1e-3, matrix_size - height)]
        _draw_examples(right.subfigures(2, 1, height_ratios=ratios)[0], examples)


def _draw_agreement_matrix(figure: Any, comparison: ComparisonResult, method_names: Sequence[str]) -> None:
    """Draw a matrix with the mean correlation between the maps of each pair of methods."""
    panel, places = figure.subplots(), [comparison.method_names.index(name) for name in method_names]
    n_methods, values = len(method_names), comparison.compute_correlation_matrix()[np.ix_(places, places)]
    below = np.where(np.tri(n_methods, k=-1), values, np.nan)[1:, :-1]  # each pair once
    low = np.floor(10 * float(np.nanmin(below, initial=0.0))) / 10
    limits = {"vmin": low - COLOR_SCALE_MARGIN, "vmax": MAX_COLOR_SCALE}
    matrix_image = panel.imshow(np.ma.masked_invalid(below), cmap="Blues", **limits)
    size, ticks = 9 if n_methods <= MAX_METHODS_WITH_NUMBERS else 7, range(n_methods - 1)
    panel.set_xticks(ticks, method_names[:-1], rotation=45, ha="right", rotation_mode="anchor", fontsize=size)
    panel.set_yticks(ticks, method_names[1:], fontsize=size)
    panel.tick_params(length=0)
    panel.set_anchor("NW")
    panel.spines[:].set_visible(False)
    has_intervals = n_methods <= MAX_METHODS_WITH_INTERVALS
    if n_methods <= MAX_METHODS_WITH_NUMBERS:
        for i, j in np.argwhere(np.tri(n_methods - 1)):
            estimate = comparison.agreement.get_correlation(*(comparison.agreement.keys[places[n]] for n in (i + 1, j)))
            text = "–" if estimate is None else f"{estimate.mean:.2f}"
            if estimate is not None and has_intervals and np.isfinite(estimate.low):
                text += f"\n[{estimate.low:.2f}, {estimate.high:.2f}]"
            color = "white" if below[i, j] > (limits["vmin"] + limits["vmax"]) / 2 else TEXT_COLOR
            panel.text(j, i, text, ha="center", va="center", fontsize=7.5, color=color)
    else:
        bar_axes = panel.inset_axes((0.62, 0.9, 0.34, 0.022))
        scale = {"boundaries": np.linspace(low, 1, 101), "ticks": [low, 0.5, 1], "format": "{x:.1f}"}
        bar = figure.colorbar(matrix_image, cax=bar_axes, orientation="horizontal", **scale)
        bar.outline.set_visible(False)
        bar_axes.tick_params(labelsize=8, length=0)
    draw_title_and_subtitle(
        panel, "agreement of the maps", "Spearman, mean over images" + (" [95 %]" if has_intervals else "")
    )


def _draw_examples(figure: Any, examples: Sequence[ExampleImage]) -> None:
    """Draw one row for each example. It shows the image, then one overlay for each method."""
    columns = 1 + max(len(example.overlays) for example in examples)
    panels = figure.subplots(len(examples), columns, squeeze=False)
    for row, example in zip(panels, examples, strict=True):
        for panel in row:
            panel.set_axis_off()
        cells = [(example.caption, example.image), *example.overlays.items()]
        for n, (panel, (title, image)) in enumerate(zip(row, cells, strict=False)):
            panel.imshow(image, extent=(0, example.size[1], example.size[0], 0), interpolation="bilinear")
            if example.mask is not None:
                rows_px, columns_px = (np.arange(pixels) + 0.5 for pixels in example.mask.shape)
                panel.contour(columns_px, rows_px, example.mask, levels=[0.5], colors="#00e5ff", linewidths=1.1)
            if n == 0 or example is examples[0]:
                panel.set_title(title, fontsize=8.5, color=TEXT_COLOR, pad=3)
