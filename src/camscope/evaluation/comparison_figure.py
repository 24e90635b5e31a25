"""The figure of a comparison: intervals of every metric, the agreement of the maps, and example images with their maps."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import numpy as np

from camscope.batch.manifest import import_arrow
from camscope.batch.map_collection import read_original, render_thumbnail
from camscope.batch.query import table_to_dicts
from camscope.errors import UndefinedError
from camscope.evaluation.comparison_data import MethodComparisonData
from camscope.evaluation.ground_truth import Mask
from camscope.evaluation.metric_plots import (
    compute_panel_grid,
    draw_forest_plot,
    import_matplotlib_figure,
    literal_text_scope,
    sort_methods,
)
from camscope.explanation import Explanation, PixelArray

IMAGE_HEIGHT_PX = 240
MAX_CAPTION_LENGTH = 22  # characters


@dataclass(frozen=True)
class ExampleImage:
    """An example image, its overlay for each method, its size (H,W), and its mask (H,W) if there is one."""

    caption: str
    image: PixelArray
    overlays: Mapping[str, PixelArray]
    size: tuple[int, int]
    mask: Mask | None


def select_examples(
    comparison: MethodComparisonData, methods: Sequence[str], max_images: int, seed: int
) -> list[ExampleImage]:
    """Return at most `max_images` random images for which every method has a map, with the first target of each."""
    keys = {key: name for (key, is_control), name in comparison.names.items() if not is_control and name in methods}
    chosen: list[dict[str, dict[str, Any]]] = []
    for row in _iter_shuffled_rows(comparison, seed):
        if len(chosen) == max_images:
            break
        rows_by_method = {
            name: image_row
            for image_row in _read_rows_of_image(comparison, row)
            if (name := keys.get(_get_method_key(image_row))) is not None and image_row["attribution"] is not None
        }
        if len(rows_by_method) == len(keys) and all(
            len(image_row["grid"]) == 2 and image_row["placement"] is not None for image_row in rows_by_method.values()
        ):
            chosen.append({name: rows_by_method[name] for name in methods})
    return [_build_example(comparison, rows) for rows in chosen]


def _iter_shuffled_rows(comparison: MethodComparisonData, seed: int) -> Iterator[int]:
    rows = np.unique(comparison.run.table(columns=["row"])["row"].to_numpy())
    yield from np.random.default_rng(seed).permutation(rows).tolist()


def _read_rows_of_image(comparison: MethodComparisonData, row_number: int) -> list[dict[str, Any]]:
    """Return the rows of one image and its first target."""
    rows = table_to_dicts(comparison.run.table(filter=import_arrow("dataset").field("row") == row_number))
    return [row for row in rows if row["target"] == rows[0]["target"]]


def _get_method_key(row: Mapping[str, Any]) -> tuple[str, str | None, str | None]:
    return row["method"], row["layer"], row["parameters_digest"]


def _build_example(comparison: MethodComparisonData, rows: Mapping[str, Mapping[str, Any]]) -> ExampleImage:
    first = next(iter(rows.values()))
    photo, _ = read_original(comparison.run, first)
    size = tuple(first["image_size"])
    maps = {name: comparison.run.explanation(row) for name, row in rows.items()}
    overlays = {name: render_thumbnail(explanation, photo, IMAGE_HEIGHT_PX) for name, explanation in maps.items()}
    plain_image = _draw_image_without_map(next(iter(maps.values())), photo)
    return ExampleImage(
        _format_caption(first), plain_image, overlays, (size[0], size[1]), _load_mask(comparison, first, size)
    )


def _draw_image_without_map(explanation: Explanation, image: PixelArray | None) -> PixelArray:
    """Draw the image without a map, or a gray image if it is not available."""
    from camscope import render

    if image is not None:
        return render.resize_to_fit(image, IMAGE_HEIGHT_PX, 2 * IMAGE_HEIGHT_PX)
    size = explanation.placement.image_size if explanation.placement is not None else explanation.input_size
    return np.full((*size, 3), 128, np.uint8)


def _format_caption(row: Mapping[str, Any]) -> str:
    text = str(row["label"] or PurePath(str(row["id"])).stem)
    return text if len(text) <= MAX_CAPTION_LENGTH else f"{text[: MAX_CAPTION_LENGTH - 1]}…"


def _load_mask(comparison: MethodComparisonData, row: Mapping[str, Any], size: tuple[int, ...]) -> Mask | None:
    if comparison.ground_truth is None:
        return None
    try:
        return comparison.ground_truth.load_mask(row, size)
    except UndefinedError:
        return None


FIGURE_WIDTH_INCHES, FOREST_ROW_INCHES = 13.0, 0.24  # width of the figure, height of a row of the forest plot
CELL_INCHES, INTERVAL_CELL_INCHES, MAX_IMAGE_INCHES = (
    0.42,
    0.72,
    2.2,
)  # a cell of the matrix, a cell with an interval, an example image
MAX_METHODS_WITH_NUMBERS, MAX_METHODS_WITH_INTERVALS = (
    16,
    7,
)  # more methods leave no room for numbers, or for intervals
MAX_METHODS_IN_EXAMPLES, MIN_EXAMPLES, MAX_EXAMPLES = 6, 3, 6  # methods and images in the examples
LARGE_MATRIX_INCHES = 4.8  # a larger matrix leaves room for fewer methods
COLOR_SCALE_MARGIN = 0.12  # below the smallest correlation, so that no cell is white
MAX_COLOR_SCALE = 1.25  # above 1, so that a correlation of 1 is not black


def draw_comparison_figure(comparison: MethodComparisonData, n_examples: int | None, seed: int) -> Any:
    """Draw the figure of a comparison with matplotlib."""
    figures = import_matplotlib_figure()
    groups = [[comparison.names[key, False] for key in group] for group in comparison.agreement.equivalent_groups]
    rows = sort_methods(comparison.summaries, comparison.get_name, comparison.method_names, groups)
    order = [name for name, is_control in rows if not is_control and name in comparison.method_names]
    duplicates = {name for group in groups for name in sorted(group, key=order.index)[1:]}
    side = _compute_matrix_size(len(order))
    shown_methods = [name for name in order if name not in duplicates][
        : MAX_METHODS_IN_EXAMPLES if side < LARGE_MATRIX_INCHES else MAX_METHODS_IN_EXAMPLES - 2
    ]
    n_images = _choose_example_count(side, len(shown_methods)) if n_examples is None else n_examples
    examples = select_examples(comparison, shown_methods, n_images, seed)
    heights = [
        _compute_forest_height(len(comparison.summaries), len(rows)),
        max(side, _compute_examples_height(examples, FIGURE_WIDTH_INCHES - side)),
    ]
    if len(order) < 2 and not examples:
        heights = heights[:1]
    with literal_text_scope():
        figure = figures.Figure(figsize=(FIGURE_WIDTH_INCHES, sum(heights) + 0.5), layout="constrained")
        figure.get_layout_engine().set(w_pad=0.08, h_pad=0.08)
        figure.suptitle(comparison.title, fontsize=13, fontweight="bold", x=0.01, ha="left")
        parts = figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
        draw_forest_plot(parts[0], comparison.summaries, comparison.get_name, rows)
        if len(heights) > 1:
            _draw_lower_half(parts[1], comparison, order, examples, side)
    return figure


def _compute_forest_height(n_metrics: int, n_rows: int) -> float:
    return compute_panel_grid(n_metrics)[0] * (0.85 + FOREST_ROW_INCHES * n_rows) + 0.3


def _compute_matrix_size(n_methods: int) -> float:
    """Return the size of the agreement matrix with its labels, in inches."""
    if n_methods < 2:
        return 0.0
    return float(
        np.clip(
            1.7 + (INTERVAL_CELL_INCHES if n_methods <= MAX_METHODS_WITH_INTERVALS else CELL_INCHES) * (n_methods - 1),
            3.0,
            6.4,
        )
    )


def _choose_example_count(matrix_size: float, n_methods: int) -> int:
    """Return how many square images fill the height of the matrix."""
    return int(
        np.clip(
            matrix_size // (min(MAX_IMAGE_INCHES, (FIGURE_WIDTH_INCHES - matrix_size) / (1 + n_methods)) + 0.22),
            MIN_EXAMPLES,
            MAX_EXAMPLES,
        )
    )


def _compute_examples_height(example_images: Sequence[ExampleImage], width: float) -> float:
    """Return the height of the captioned examples in inches, for a given width."""
    heights = [width / (1 + len(e.overlays)) * e.size[0] / e.size[1] for e in example_images]
    return sum(min(MAX_IMAGE_INCHES, height) + 0.22 for height in heights) + 0.2


def _draw_lower_half(
    figure: Any,
    comparison: MethodComparisonData,
    method_names: Sequence[str],
    example_images: Sequence[ExampleImage],
    matrix_size: float,
) -> None:
    if len(method_names) < 2:
        _draw_examples(figure, example_images)
    elif not example_images:
        _draw_agreement_matrix(
            figure.subfigures(1, 2, width_ratios=[matrix_size + 1, FIGURE_WIDTH_INCHES - matrix_size - 1])[0],
            comparison,
            method_names,
        )
    else:
        left, right = figure.subfigures(
            1, 2, width_ratios=[matrix_size, FIGURE_WIDTH_INCHES - matrix_size], wspace=0.02
        )
        _draw_agreement_matrix(left, comparison, method_names)
        height = _compute_examples_height(example_images, FIGURE_WIDTH_INCHES - matrix_size)
        _draw_examples(
            right.subfigures(2, 1, height_ratios=[height, max(1e-3, matrix_size - height)])[0], example_images
        )


def _draw_agreement_matrix(figure: Any, comparison: MethodComparisonData, method_names: Sequence[str]) -> None:
    """Draw the mean correlation of each pair of methods, in the order of the forest plot."""
    panel, places = figure.subplots(), [comparison.method_names.index(name) for name in method_names]
    values = comparison.compute_correlation_matrix()[np.ix_(places, places)]
    below = np.where(np.tri(len(method_names), k=-1), values, np.nan)[1:, :-1]  # each pair once
    low = np.floor(10 * float(np.nanmin(below, initial=0.0))) / 10
    matrix_image = panel.imshow(
        np.ma.masked_invalid(below), cmap="Blues", vmin=low - COLOR_SCALE_MARGIN, vmax=MAX_COLOR_SCALE
    )
    size = 9 if len(method_names) <= MAX_METHODS_WITH_NUMBERS else 7
    panel.set_xticks(
        range(len(method_names) - 1), method_names[:-1], rotation=45, ha="right", rotation_mode="anchor", fontsize=size
    )
    panel.set_yticks(range(len(method_names) - 1), method_names[1:], fontsize=size)
    panel.tick_params(length=0)
    panel.set_anchor("NW")
    for side in panel.spines.values():
        side.set_visible(False)
    for i, j in np.argwhere(np.tri(len(method_names) - 1)) if len(method_names) <= MAX_METHODS_WITH_NUMBERS else ():
        ink = "white" if below[i, j] > (low - COLOR_SCALE_MARGIN + MAX_COLOR_SCALE) / 2 else "#222222"
        text = _format_cell(comparison, places[i + 1], places[j], len(method_names))
        panel.text(j, i, text, ha="center", va="center", fontsize=7.5, color=ink)
    if len(method_names) > MAX_METHODS_WITH_NUMBERS:
        bar_axes = panel.inset_axes((0.62, 0.9, 0.34, 0.022))
        bar = figure.colorbar(
            matrix_image,
            cax=bar_axes,
            orientation="horizontal",
            boundaries=np.linspace(low, 1, 101),
            ticks=[low, 0.5, 1],
            format="{x:.1f}",
        )
        bar.outline.set_visible(False)
        bar_axes.tick_params(labelsize=8, length=0)
    panel.set_title("agreement of the maps", fontsize=10, loc="left", fontweight="bold", color="#222222", pad=16)
    subtitle = "Spearman, mean over images" + (" [95 %]" if len(method_names) <= MAX_METHODS_WITH_INTERVALS else "")
    panel.annotate(
        subtitle,
        (0, 1),
        xytext=(0, 4),
        xycoords="axes fraction",
        textcoords="offset points",
        fontsize=8,
        color="#8a8f98",
    )


def _format_cell(comparison: MethodComparisonData, i: int, j: int, n_methods: int) -> str:
    estimate = comparison.agreement.estimates.get((min(i, j), max(i, j)))
    if estimate is None:
        return "–"
    has_interval = n_methods <= MAX_METHODS_WITH_INTERVALS and np.isfinite(estimate.low)
    interval = f"\n[{estimate.low:.2f}, {estimate.high:.2f}]" if has_interval else ""
    return f"{estimate.mean:.2f}{interval}"


def _draw_examples(figure: Any, example_images: Sequence[ExampleImage]) -> None:
    """Draw a row for each image: the image, then the maps."""
    columns = 1 + max(len(example.overlays) for example in example_images)
    panels = figure.subplots(len(example_images), columns, squeeze=False)
    for row, example in zip(panels, example_images, strict=True):
        for panel in row:
            panel.set_axis_off()
        cells = [(example.caption, example.image), *example.overlays.items()]
        for n, (panel, (title, image)) in enumerate(zip(row, cells, strict=False)):
            panel.imshow(image, extent=(0, example.size[1], example.size[0], 0), interpolation="bilinear")
            if example.mask is not None:
                rows_px, columns_px = (np.arange(pixels) + 0.5 for pixels in example.mask.shape)
                panel.contour(columns_px, rows_px, example.mask, levels=[0.5], colors="#00e5ff", linewidths=1.1)
            if n == 0 or example is example_images[0]:
                panel.set_title(title, fontsize=8.5, color="#222222", pad=3)
