"""Compare ways to draw a map between its cells: ridges, overshoot, and whether the peak stays in its cell.

`python -m benchmarks.interpolation DATA` explains the first ten photographs of DATA/photos with ResNet-18 and DeiT-tiny. DATA
has `models.py` with a function for each model. `cubic B-spline` and `Gaussian` are two common smoothers, for comparison.
"""

import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from camscope import GradCAM
from camscope.geometry import Placement
from camscope.images.preprocess import Preprocess
from camscope.map_interpolation import INTERPOLATIONS, Interpolation

N_PHOTOS, SIDE_PIXELS = 10, 1792  # a multiple of 7 and 14 cells
MODELS = ("resnet18", "deit_tiny")
RESULTS = Path(__file__).parent / "results" / "interpolation.json"
Floats = NDArray[np.float64]


def smooth_by_b_spline(values: Floats, side: int) -> Floats:
    """The uniform cubic B-spline with the cells as its coefficients."""
    for axis in (0, 1):
        n_cells = values.shape[axis]
        position = (np.arange(side) + 0.5) * n_cells / side - 0.5
        low = np.floor(position).astype(int)
        t = position - low
        weights = [(1 - t) ** 3, 3 * t**3 - 6 * t**2 + 4, -3 * t**3 + 3 * t**2 + 3 * t + 1, t**3]
        shape = (-1, 1) if axis == 0 else (1, -1)
        parts = [
            values.take(np.clip(low + n - 1, 0, n_cells - 1), axis) * (weight / 6).reshape(shape)
            for n, weight in enumerate(weights)
        ]
        values = np.sum(parts, axis=0)
    return values


def smooth_by_gaussian(values: Floats, side: int, sigma: float = 0.5) -> Floats:
    """The mean of the cells with Gaussian weights. `sigma` is in cells."""
    matrices = []
    for n_cells in values.shape:
        distance = ((np.arange(side) + 0.5) * n_cells / side - 0.5)[:, None] - np.arange(n_cells)
        weights = np.exp(-0.5 * (distance / sigma) ** 2)
        matrices.append(weights / weights.sum(1, keepdims=True))
    return np.asarray(matrices[0] @ values @ matrices[1].T)


def build_drawings() -> dict[str, Callable[[Floats, int], Floats]]:
    """Return each drawing by its name: a function of the map and the side in pixels."""

    def draw_by_name(name: Interpolation) -> Callable[[Floats, int], Floats]:
        return lambda values, side: Placement.identity((side, side)).project(values, name).values.astype(np.float64)

    drawings = {str(name): draw_by_name(name) for name in INTERPOLATIONS}
    return {**drawings, "cubic B-spline": smooth_by_b_spline, "Gaussian": smooth_by_gaussian}


def measure(draw: Callable[[Floats, int], Floats], maps: list[Floats]) -> dict[str, float]:
    """Measure a drawing on maps in 0..1. A slope jump is in ranges of the map per cell, at the lines of cell centers."""
    jumps, overshoots, peaks, maxima = [], [], [], []
    for values in maps:
        drawn, stride = draw(values, SIDE_PIXELS), SIDE_PIXELS // len(values)
        position = (np.arange(1, SIDE_PIXELS - 1) + 0.5) / stride - 0.5
        at_center = np.abs(position - np.rint(position)) <= 1 / stride
        second = [np.abs(np.diff(drawn, 2, axis=axis)).take(np.flatnonzero(at_center), axis) for axis in (0, 1)]
        jumps.append(np.mean([part.mean() * stride for part in second]))
        overshoots.append(max(drawn.max() - 1, -drawn.min(), 0.0) + 0.0)
        peak, cell = (np.unravel_index(array.argmax(), array.shape) for array in (drawn, values))
        peaks.append(tuple(n // stride for n in peak) == cell)
        maxima.append(drawn.max())
    return {
        "slope_jump": float(np.mean(jumps)),
        "overshoot": float(np.max(overshoots)),
        "peaks_in_their_cell": int(sum(peaks)),
        "mean_maximum": float(np.mean(maxima)),
        "n_maps": len(maps),
    }


def compute_maps(data: Path) -> list[Floats]:
    """Return Grad-CAM maps of the photographs, scaled to 0..1."""
    torch.set_num_threads(1)
    models: dict[str, Any] = runpy.run_path(str(data / "models.py"))
    photos = sorted((data / "photos" / "images").iterdir())[:N_PHOTOS]
    maps = []
    for name in MODELS:
        size, mean, std = models["PREPROCESSING"][name]
        preprocess = Preprocess(resize=256, crop=size, mean=mean, std=std)
        explainer = GradCAM(models[name](), models["TARGET_LAYER"][name], preprocess=preprocess)
        for photo in photos:
            values = np.maximum(explainer.explain(photo).attribution, 0).astype(np.float64)
            maps.append((values - values.min()) / np.ptp(values))
    return maps


if __name__ == "__main__":
    all_maps = compute_maps(Path(sys.argv[1]))
    measured = {name: measure(draw, all_maps) for name, draw in build_drawings().items()}
    RESULTS.write_text(json.dumps(measured, indent=1) + "\n")
    print(RESULTS.read_text())
