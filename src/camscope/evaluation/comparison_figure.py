"""The figure of a comparison: intervals of every metric, what maps have in common, and some of the maps.

Examples: some images of a comparison, with their maps drawn on them, and where the evidence is.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import numpy as np

from camscope.batch.manifest import arrow
from camscope.batch.map_collection import original, thumbnail
from camscope.batch.query import as_dicts
from camscope.errors import UndefinedError
from camscope.evaluation.comparison_data import Findings
from camscope.evaluation.ground_truth import Mask
from camscope.evaluation.metric_plots import arranged, figures_of_matplotlib, forest, grid, literal_text
from camscope.explanation import Explanation, Pixels

ROWS = 240  # pixels of a picture's height
LONGEST = 22  # letters of a caption


@dataclass(frozen=True)
class Example:
    """`photo` and [method]: its map, pictures of an image of `size` (H,W); `mask` (H,W): where the evidence is, if known."""

    caption: str
    photo: Pixels
    maps: Mapping[str, Pixels]
    size: tuple[int, int]
    mask: Mask | None


def examples(found: Findings, methods: Sequence[str], count: int, seed: int) -> list[Example]:
    """At most `count` images, drawn by `seed` among those of which every method has a map, of the first target of each."""
    keys = {key: name for (key, control), name in found.names.items() if not control and name in methods}
    chosen: list[dict[str, dict[str, Any]]] = []
    for row in _drawn(found, seed):
        if len(chosen) == count:
            break
        own = {
            name: one
            for one in _rows(found, row)
            if (name := keys.get(_key(one))) is not None and one["heat"] is not None
        }
        if len(own) == len(keys) and all(
            len(one["grid"]) == 2 and one["placement"] is not None for one in own.values()
        ):
            chosen.append({name: own[name] for name in methods})
    return [_example(found, one) for one in chosen]


def _drawn(found: Findings, seed: int) -> Iterator[int]:
    rows = np.unique(found.run.table(columns=["row"])["row"].to_numpy())
    yield from np.random.default_rng(seed).permutation(rows).tolist()


def _rows(found: Findings, row: int) -> list[dict[str, Any]]:
    """Of one image and its first target."""
    every = as_dicts(found.run.table(filter=arrow("dataset").field("row") == row))
    return [one for one in every if one["target"] == every[0]["target"]]


def _key(row: Mapping[str, Any]) -> tuple[str, str | None, str | None]:
    return row["method"], row["layer"], row["parameters"]


def _example(found: Findings, rows: Mapping[str, Mapping[str, Any]]) -> Example:
    first = next(iter(rows.values()))
    photo, _ = original(found.run, first)
    size = tuple(first["image_size"])
    maps = {name: found.run.explanation(row) for name, row in rows.items()}
    drawn = {name: thumbnail(one, photo, ROWS) for name, one in maps.items()}
    bare = _bare(next(iter(maps.values())), photo)
    return Example(_caption(first), bare, drawn, (size[0], size[1]), _mask(found, first, size))


def _bare(one: Explanation, photo: Pixels | None) -> Pixels:
    """The photograph without any map, or the grey that stands for it."""
    from camscope import render

    if photo is not None:
        return render.fitted(photo, ROWS, 2 * ROWS)
    size = one.placement.image_size if one.placement is not None else one.input_size
    return np.full((*size, 3), 128, np.uint8)


def _caption(row: Mapping[str, Any]) -> str:
    text = str(row["label"] or PurePath(str(row["id"])).stem)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"


def _mask(found: Findings, row: Mapping[str, Any], size: tuple[int, ...]) -> Mask | None:
    if found.evidence is None:
        return None
    try:
        return found.evidence.mask(row, size)
    except UndefinedError:
        return None


WIDE, ROW = 13.0, 0.24  # inches: the figure, a row of the forest
CELL, WIDER, HIGHEST = 0.42, 0.72, 2.2  # a cell of the matrix, one with an interval in it, a picture
NUMBERS, INTERVALS = 16, 7  # methods of which a cell still has room for its number, and for its interval
SHOWN, FEWEST, MOST = 6, 3, 6  # methods in the examples; images
ROOMY = 4.8  # a matrix larger than this leaves room for fewer methods
FAINT = 0.12  # below the least correlation, so that no cell is as white as paper
LIGHT = 1.25  # where the colours would end: a correlation of 1 is not as dark as ink


def poster(found: Findings, count: int | None, seed: int) -> Any:
    """One figure of matplotlib; see the module."""
    figures = figures_of_matplotlib()
    groups = [[found.names[key, False] for key in group] for group in found.agreement.groups]
    rows = arranged(found.lines, found.name, found.methods, groups)
    order = [name for name, control in rows if not control and name in found.methods]
    doubles = {name for group in groups for name in sorted(group, key=order.index)[1:]}
    side = _side(len(order))
    shown = [name for name in order if name not in doubles][: SHOWN if side < ROOMY else SHOWN - 2]
    pictures = examples(found, shown, _count(side, len(shown)) if count is None else count, seed)
    heights = [_forest_height(len(found.lines), len(rows)), max(side, _grid_height(pictures, WIDE - side))]
    if len(order) < 2 and not pictures:
        heights = heights[:1]
    with literal_text():
        figure = figures.Figure(figsize=(WIDE, sum(heights) + 0.5), layout="constrained")
        figure.get_layout_engine().set(w_pad=0.08, h_pad=0.08)
        figure.suptitle(found.title, fontsize=13, fontweight="bold", x=0.01, ha="left")
        parts = figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
        forest(parts[0], found.lines, found.name, rows)
        if len(heights) > 1:
            _below(parts[1], found, order, pictures, side)
    return figure


def _forest_height(metrics: int, rows: int) -> float:
    return grid(metrics)[0] * (0.85 + ROW * rows) + 0.3


def _side(methods: int) -> float:
    """Inches of the matrix with its names."""
    if methods < 2:
        return 0.0
    return float(np.clip(1.7 + (WIDER if methods <= INTERVALS else CELL) * (methods - 1), 3.0, 6.4))


def _count(side: float, methods: int) -> int:
    """As many images as fill the height of the matrix, where they are square."""
    return int(np.clip(side // (min(HIGHEST, (WIDE - side) / (1 + methods)) + 0.22), FEWEST, MOST))


def _grid_height(pictures: Sequence[Example], wide: float) -> float:
    """Inches of pictures under their captions, side by side in so much room."""
    each = [wide / (1 + len(one.maps)) * one.size[0] / one.size[1] for one in pictures]
    return sum(min(HIGHEST, inches) + 0.22 for inches in each) + 0.2


def _below(home: Any, found: Findings, order: Sequence[str], pictures: Sequence[Example], side: float) -> None:
    if len(order) < 2:
        _grid(home, pictures)
    elif not pictures:
        _matrix(home.subfigures(1, 2, width_ratios=[side + 1, WIDE - side - 1])[0], found, order)
    else:
        left, right = home.subfigures(1, 2, width_ratios=[side, WIDE - side], wspace=0.02)
        _matrix(left, found, order)
        height = _grid_height(pictures, WIDE - side)
        _grid(right.subfigures(2, 1, height_ratios=[height, max(1e-3, side - height)])[0], pictures)


def _matrix(home: Any, found: Findings, order: Sequence[str]) -> None:
    """The mean correlation of each two methods, in the forest's order."""
    panel, places = home.subplots(), [found.methods.index(name) for name in order]
    values = found.correlations()[np.ix_(places, places)]
    below = np.where(np.tri(len(order), k=-1), values, np.nan)[1:, :-1]  # each two of them once
    low = np.floor(10 * float(np.nanmin(below, initial=0.0))) / 10
    drawn = panel.imshow(np.ma.masked_invalid(below), cmap="Blues", vmin=low - FAINT, vmax=LIGHT)
    size = 9 if len(order) <= NUMBERS else 7
    panel.set_xticks(range(len(order) - 1), order[:-1], rotation=45, ha="right", rotation_mode="anchor", fontsize=size)
    panel.set_yticks(range(len(order) - 1), order[1:], fontsize=size)
    panel.tick_params(length=0)
    panel.set_anchor("NW")
    for side in panel.spines.values():
        side.set_visible(False)
    for i, j in np.argwhere(np.tri(len(order) - 1)) if len(order) <= NUMBERS else ():
        ink = "white" if below[i, j] > (low - FAINT + LIGHT) / 2 else "#222222"
        text = _cell(found, places[i + 1], places[j], len(order))
        panel.text(j, i, text, ha="center", va="center", fontsize=7.5, color=ink)
    if len(order) > NUMBERS:
        beside = panel.inset_axes((0.62, 0.9, 0.34, 0.022))
        bar = home.colorbar(
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
    said = "Spearman, mean over images" + (" [95 %]" if len(order) <= INTERVALS else "")
    panel.annotate(
        said, (0, 1), xytext=(0, 4), xycoords="axes fraction", textcoords="offset points", fontsize=8, color="#8a8f98"
    )


def _cell(found: Findings, i: int, j: int, count: int) -> str:
    one = found.agreement.estimates.get((min(i, j), max(i, j)))
    if one is None:
        return "–"
    interval = f"\n[{one.low:.2f}, {one.high:.2f}]" if count <= INTERVALS and np.isfinite(one.low) else ""
    return f"{one.mean:.2f}{interval}"


def _grid(home: Any, pictures: Sequence[Example]) -> None:
    """A row for each image: itself, then the maps."""
    columns = 1 + max(len(one.maps) for one in pictures)
    panels = home.subplots(len(pictures), columns, squeeze=False)
    for row, one in zip(panels, pictures, strict=True):
        for panel in row:
            panel.set_axis_off()
        cells = [(one.caption, one.photo), *((name, one.maps[name]) for name in one.maps)]
        for n, (panel, (title, picture)) in enumerate(zip(row, cells, strict=False)):
            panel.imshow(picture, extent=(0, one.size[1], one.size[0], 0), interpolation="bilinear")
            if one.mask is not None:
                tall, wide = (np.arange(pixels) + 0.5 for pixels in one.mask.shape)
                panel.contour(wide, tall, one.mask, levels=[0.5], colors="#00e5ff", linewidths=1.1)
            if n == 0 or one is pictures[0]:
                panel.set_title(title, fontsize=8.5, color="#222222", pad=3)
