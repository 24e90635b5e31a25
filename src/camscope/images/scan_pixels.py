"""A scan as pixels, for models of pictures and for those who look."""

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from camscope.errors import ImageError
from camscope.images.scan import Scan

Pixels = NDArray[np.uint8]


def pixels_of(scan: Scan, window: Any = None) -> tuple[Pixels, Scan]:
    """A scan of two axes as pixels (H,W,3) uint8 for a model of pictures, and the scan with that step told.

    Grey values go through the window, or without one from the least to the largest value that is there.
    """
    if len(scan.shape) != 2:
        raise ImageError(
            f"{scan.name} is a volume of {' x '.join(map(str, scan.shape))} and the preprocessing is one of pictures: use "
            f"explain_slices (--slices 0), or pass preprocess=ScanPreprocess(...) to a model of volumes"
        )
    if scan.colour:
        return np.ascontiguousarray(scan.values), scan
    shown = scan.windowed(window) if window is not None else ranged(scan)
    grey = np.rint(shown.values * 255).astype(np.uint8)
    return np.repeat(grey[..., None], 3, axis=2), shown


def grey(scan: Scan, window: Any = None) -> Pixels:
    """(H,W,3) or (D,H,W) uint8: a scan as it is looked at, through a window or from its least to its largest value.

    A volume in colour is (D,H,W,3).
    """
    if len(scan.shape) == 2:
        return pixels_of(scan, window)[0]
    if scan.colour:
        return np.asarray(scan.values, np.uint8)
    shown = scan.windowed(window) if window is not None else ranged(scan)
    return np.asarray(np.rint(np.nan_to_num(shown.values, nan=0.0) * 255), np.uint8)


def ranged(scan: Scan) -> Scan:
    """From 0 to 1 between black and white, or where they are unknown the least and the largest value; NaN is black."""
    if scan.limits is not None:
        low, high, steps = *scan.limits, scan.steps
    else:
        known = scan.values[np.isfinite(scan.values)]
        low, high = (float(known.min()), float(known.max())) if known.size else (0.0, 0.0)
        unit = f" {scan.unit}" if scan.unit else ""
        steps = (*scan.steps, f"no window was given: the whole range, {low:g} to {high:g}{unit}")
    values = (np.nan_to_num(scan.values, nan=low, posinf=high, neginf=low) - low) / ((high - low) or 1.0)
    return replace(scan, values=values.astype(np.float32), unit="", limits=(0.0, 1.0), steps=steps)
