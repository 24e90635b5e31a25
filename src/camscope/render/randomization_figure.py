"""Draw the result of a model randomization test: the maps of one image at each step, and similarity curves."""

import textwrap
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from camscope.optional_packages import require
from camscope.render.colors import DIVERGING, colorize, to_display_range
from camscope.render.image_encoding import RGBImage

FloatArray = npt.NDArray[np.floating[Any]]
OUTCOME_COLORS = {True: "#1e783c", False: "#b02a2a", None: "#6e6e6e"}
CURVE_COLOR, NULL_COLOR = "#2654a0", "#f7e0b0"
DPI, CURVE_INCHES, LEFT_INCHES, RIGHT_INCHES = 100, 1.3, 0.9, 2.0
LEGEND = "pale: range of the seeds · orange: maps of different images, 95 % interval of their mean similarity"


class SimilarityCurve(NamedTuple):
    """One similarity measure over the steps of a randomization test. Each array has shape (1 + steps,)."""

    name: str
    mean_values: FloatArray  # over images and seeds; NaN is a gap
    seed_low: FloatArray  # the lowest mean of a seed
    seed_high: FloatArray
    null_interval: tuple[float, float, float]  # low end, mean and high end for maps of different images
    passes: bool | None  # None: no verdict
    outcome: str  # printed next to the curve; "" for none


def draw_randomization_figure(
    title: str, layer_names: Sequence[str], maps: FloatArray, curves: Sequence[SimilarityCurve]
) -> RGBImage:
    """Draw the maps (1 + steps,*S) of an image, with similarity curves below the maps.
    The first map is from the trained model.
    """
    matplotlib, figures, agg = (
        require(f"matplotlib{module}", extra="metrics") for module in ("", ".figure", ".backends.backend_agg")
    )
    step_inches = float(np.clip(14 / (1 + len(layer_names)), 0.64, 1.28))
    names = [textwrap.fill(name, int(15 * step_inches)) for name in ("trained", *map(_shorten_layer_name, layer_names))]
    row_inches = [step_inches, *[CURVE_INCHES] * len(curves)]
    width, height = LEFT_INCHES + RIGHT_INCHES + step_inches * len(names), sum(row_inches) + 1.6
    edges = {
        "left": LEFT_INCHES / width,
        "right": 1 - RIGHT_INCHES / width,
        "bottom": 0.6 / height,
        "top": 1 - 0.8 / height,
    }
    settings = {"text.parse_math": False, "font.size": 9, "axes.grid": True, "axes.grid.axis": "y"}
    with matplotlib.rc_context(settings):
        figure = figures.Figure((width, height), dpi=DPI)
        canvas = agg.FigureCanvasAgg(figure)
        grid = figure.add_gridspec(
            len(row_inches), len(names), height_ratios=row_inches, wspace=0.04, hspace=0.1, **edges
        )
        figure.text(0.1 / width, 1 - 0.1 / height, textwrap.fill(title, int(12 * width)), size=12, va="top")
        figure.text(0.1 / width, 1 - 0.75 / height, LEGEND, color=OUTCOME_COLORS[None])
        for column, attribution in enumerate(maps):
            axes = figure.add_subplot(grid[0, column])
            axes.imshow(_colorize_map(attribution), interpolation="nearest")
            axes.set_axis_off()
        lowest = min(float(np.nanmin(curve.seed_low, initial=0.0)) for curve in curves)
        for row, curve in enumerate(curves, 1):
            axes = figure.add_subplot(
                grid[row, :], xlim=(-0.5, len(names) - 0.5), ylim=(lowest - 0.06, 1.06), xticks=[]
            )
            _draw_curve(axes, curve)
        axes.set_xticks(range(len(names)), names, size=8)
        canvas.draw()
        return np.asarray(canvas.buffer_rgba(), np.uint8)[..., :3].copy()


def _draw_curve(axes: Any, curve: SimilarityCurve) -> None:
    """Draw one similarity curve and its null interval. At the right, state the outcome of the test."""
    steps = np.arange(len(curve.mean_values))
    axes.set_ylabel(curve.name)
    axes.axhspan(curve.null_interval[0], curve.null_interval[2], color=NULL_COLOR, linewidth=0)
    axes.fill_between(steps, curve.seed_low, curve.seed_high, color=CURVE_COLOR, alpha=0.25, linewidth=0)
    axes.plot(steps, curve.mean_values, "-o", color=CURVE_COLOR, linewidth=2, markersize=5)
    axes.spines[:].set_visible(False)
    axes.set_axisbelow(True)
    if curve.outcome:
        color, place = OUTCOME_COLORS[curve.passes], {"xy": (1, 0.5), "xycoords": "axes fraction", "va": "center"}
        axes.annotate(textwrap.fill(curve.outcome, 30), xytext=(8, 0), textcoords="offset points", color=color, **place)


def _shorten_layer_name(layer_name: str) -> str:
    """Shorten a layer name such as `layer4.1.conv2` to its last part. If this is a number, keep the part before as well."""
    parts = layer_name.split(".")
    return ".".join(parts[-2:] if parts[-1].isdigit() else parts[-1:])


def _colorize_map(attribution: FloatArray) -> RGBImage:
    """Convert a map (*S) to colors (h,w,3), scaled by its maximum. Average a volume along its depth first."""
    flat = np.nan_to_num(attribution, nan=0.0, posinf=0.0, neginf=0.0)
    while flat.ndim > 2:
        flat = flat.mean(0)
    flat = np.repeat(flat[None], max(1, len(flat) // 4), 0) if flat.ndim == 1 else flat
    colormap = DIVERGING if (flat < 0).any() else "inferno"
    return colorize(to_display_range(flat, "max", colormap)[0], colormap)
