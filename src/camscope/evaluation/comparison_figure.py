"""The figure of a comparison: intervals of every metric, what maps have in common, and some of the maps.

Examples: some images of a comparison, with their maps drawn on them, and where the evidence is.
"""

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

IMAGE_HEIGHT_PX = 240  # pixels of a picture's height
MAX_CAPTION_LENGTH = 22  # letters of a caption


@dataclass(frozen=True)
class ExampleImage:
    """`image` and [method]: its map, pictures of an image of `size` (H,W); `mask` (H,W): where the evidence is, if known."""

    caption: str
    image: PixelArray
    overlays: Mapping[str, PixelArray]
    size: tuple[int, int]
    mask: Mask | None


def select_examples(
    comparison: MethodComparisonData, methods: Sequence[str], max_images: int, seed: int
) -> list[ExampleImage]:
    """At most `max_images` images, drawn by `seed` among those of which every method has a map, of the first target of each."""
    keys = {key: name for (key, control), name in comparison.names.items() if not control and name in methods}
    chosen: list[dict[str, dict[str, Any]]] = []
    for row in _iter_shuffled_rows(comparison, seed):
        if len(chosen) == max_images:
            break
        own = {
            name: one
            for one in _read_rows_of_image(comparison, row)
            if (name := keys.get(_get_method_key(one))) is not None and one["attribution"] is not None
        }
        if len(own) == len(keys) and all(
            len(one["grid"]) == 2 and one["placement"] is not None for one in own.values()
        ):
            chosen.append({name: own[name] for name in methods})
    return [_build_example(comparison, one) for one in chosen]


def _iter_shuffled_rows(comparison: MethodComparisonData, seed: int) -> Iterator[int]:
    rows = np.unique(comparison.run.table(columns=["row"])["row"].to_numpy())
    yield from np.random.default_rng(seed).permutation(rows).tolist()


def _read_rows_of_image(comparison: MethodComparisonData, row_number: int) -> list[dict[str, Any]]:
    """Of one image and its first target."""
    every = table_to_dicts(comparison.run.table(filter=import_arrow("dataset").field("row") == row_number))
    return [one for one in every if one["target"] == every[0]["target"]]


def _get_method_key(row: Mapping[str, Any]) -> tuple[str, str | None, str | None]:
    return row["method"], row["layer"], row["parameters_digest"]


def _build_example(comparison: MethodComparisonData, rows: Mapping[str, Mapping[str, Any]]) -> ExampleImage:
    first = next(iter(rows.values()))
    photo, _ = read_original(comparison.run, first)
    size = tuple(first["image_size"])
    maps = {name: comparison.run.explanation(row) for name, row in rows.items()}
    drawn = {name: render_thumbnail(one, photo, IMAGE_HEIGHT_PX) for name, one in maps.items()}
    bare = _draw_image_without_map(next(iter(maps.values())), photo)
    return ExampleImage(_format_caption(first), bare, drawn, (size[0], size[1]), _load_mask(comparison, first, size))


def _draw_image_without_map(explanation: Explanation, image: PixelArray | None) -> PixelArray:
    """The photograph without any map, or the grey that stands for it."""
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


FIGURE_WIDTH_INCHES, FOREST_ROW_INCHES = 13.0, 0.24  # inches: the figure, a row of the forest
CELL_INCHES, INTERVAL_CELL_INCHES, MAX_IMAGE_INCHES = (
    0.42,
    0.72,
    2.2,
)  # a cell of the matrix, one with an interval in it, a picture
MAX_METHODS_WITH_NUMBERS, MAX_METHODS_WITH_INTERVALS = (
    16,
    7,
)  # methods of which a cell still has room for its number, and for its interval
MAX_METHODS_IN_EXAMPLES, MIN_EXAMPLES, MAX_EXAMPLES = 6, 3, 6  # methods in the examples; images
LARGE_MATRIX_INCHES = 4.8  # a matrix larger than this leaves room for fewer methods
COLOR_SCALE_MARGIN = 0.12  # below the least correlation, so that no cell is as white as paper
MAX_COLOR_SCALE = 1.25  # where the colours would end: a correlation of 1 is not as dark as ink


def draw_comparison_figure(comparison: MethodComparisonData, n_examples: int | None, seed: int) -> Any:
    """One figure of matplotlib; see the module."""
    figures = import_matplotlib_figure()
    groups = [[comparison.names[key, False] for key in group] for group in comparison.agreement.equivalent_groups]
    rows = sort_methods(comparison.summaries, comparison.get_name, comparison.method_names, groups)
    order = [name for name, control in rows if not control and name in comparison.method_names]
    doubles = {name for group in groups for name in sorted(group, key=order.index)[1:]}
    side = _compute_matrix_size(len(order))
    shown = [name for name in order if name not in doubles][
        : MAX_METHODS_IN_EXAMPLES if side < LARGE_MATRIX_INCHES else MAX_METHODS_IN_EXAMPLES - 2
    ]
    pictures = select_examples(
        comparison, shown, _choose_example_count(side, len(shown)) if n_examples is None else n_examples, seed
    )
    heights = [
        _compute_forest_height(len(comparison.summaries), len(rows)),
        max(side, _compute_examples_height(pictures, FIGURE_WIDTH_INCHES - side)),
    ]
    if len(order) < 2 and not pictures:
        heights = heights[:1]
    with literal_text_scope():
        figure = figures.Figure(figsize=(FIGURE_WIDTH_INCHES, sum(heights) + 0.5), layout="constrained")
        figure.get_layout_engine().set(w_pad=0.08, h_pad=0.08)
        figure.suptitle(comparison.title, fontsize=13, fontweight="bold", x=0.01, ha="left")
        parts = figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
        draw_forest_plot(parts[0], comparison.summaries, comparison.get_name, rows)
        if len(heights) > 1:
            _draw_lower_half(parts[1], comparison, order, pictures, side)
    return figure


def _compute_forest_height(n_metrics: int, n_rows: int) -> float:
    return compute_panel_grid(n_metrics)[0] * (0.85 + FOREST_ROW_INCHES * n_rows) + 0.3


def _compute_matrix_size(n_methods: int) -> float:
    """Inches of the matrix with its names."""
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
    """As many images as fill the height of the matrix, where they are square."""
    return int(
        np.clip(
            matrix_size // (min(MAX_IMAGE_INCHES, (FIGURE_WIDTH_INCHES - matrix_size) / (1 + n_methods)) + 0.22),
            MIN_EXAMPLES,
            MAX_EXAMPLES,
        )
    )


def _compute_examples_height(example_images: Sequence[ExampleImage], width: float) -> float:
    """Inches of pictures under their captions, side by side in so much room."""
    each = [width / (1 + len(one.overlays)) * one.size[0] / one.size[1] for one in example_images]
    return sum(min(MAX_IMAGE_INCHES, inches) + 0.22 for inches in each) + 0.2


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
    """The mean correlation of each two methods, in the forest's order."""
    panel, places = figure.subplots(), [comparison.method_names.index(name) for name in method_names]
    values = comparison.compute_correlation_matrix()[np.ix_(places, places)]
    below = np.where(np.tri(len(method_names), k=-1), values, np.nan)[1:, :-1]  # each two of them once
    low = np.floor(10 * float(np.nanmin(below, initial=0.0))) / 10
    drawn = panel.imshow(np.ma.masked_invalid(below), cmap="Blues", vmin=low - COLOR_SCALE_MARGIN, vmax=MAX_COLOR_SCALE)
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
        beside = panel.inset_axes((0.62, 0.9, 0.34, 0.022))
        bar = figure.colorbar(
            drawn,
            cax=beside,
            orientation="horizontal",
            boundaries=np.linspace(low, 1, 101),
            ticks=[low, 0.5, 1],
            format="{x:.1f}",
        )
        bar.outline.set_visible(False)
        beside.tick_params(labelsize=8, length=0)
    panel.set_title("what the maps have in common", fontsize=10, loc="left", fontweight="bold", color="#222222", pad=16)
    said = "Spearman, mean over images" + (" [95 %]" if len(method_names) <= MAX_METHODS_WITH_INTERVALS else "")
    panel.annotate(
        said, (0, 1), xytext=(0, 4), xycoords="axes fraction", textcoords="offset points", fontsize=8, color="#8a8f98"
    )


def _format_cell(comparison: MethodComparisonData, i: int, j: int, n_methods: int) -> str:
    one = comparison.agreement.estimates.get((min(i, j), max(i, j)))
    if one is None:
        return "–"
    interval = (
        f"\n[{one.low:.2f}, {one.high:.2f}]" if n_methods <= MAX_METHODS_WITH_INTERVALS and np.isfinite(one.low) else ""
    )
    return f"{one.mean:.2f}{interval}"


def _draw_examples(figure: Any, example_images: Sequence[ExampleImage]) -> None:
    """A row for each image: itself, then the maps."""
    columns = 1 + max(len(one.overlays) for one in example_images)
    panels = figure.subplots(len(example_images), columns, squeeze=False)
    for row, one in zip(panels, example_images, strict=True):
        for panel in row:
            panel.set_axis_off()
        cells = [(one.caption, one.image), *((name, one.overlays[name]) for name in one.overlays)]
        for n, (panel, (title, picture)) in enumerate(zip(row, cells, strict=False)):
            panel.imshow(picture, extent=(0, one.size[1], one.size[0], 0), interpolation="bilinear")
            if one.mask is not None:
                tall, wide = (np.arange(pixels) + 0.5 for pixels in one.mask.shape)
                panel.contour(wide, tall, one.mask, levels=[0.5], colors="#00e5ff", linewidths=1.1)
            if n == 0 or one is example_images[0]:
                panel.set_title(title, fontsize=8.5, color="#222222", pad=3)
