"""The trace: signals as lines over the colours of a map of their one axis."""

import numpy as np
from numpy.typing import NDArray

from camscope.errors import InputError
from camscope.render.colour import colourise
from camscope.render.picture import PAPER, Picture, checked_fraction

INK = (20, 20, 20)
MARGIN = 0.08  # of a lane, above and below its line
FINE = 4  # fractional bits of a line's points


def trace(
    signals: NDArray[np.uint8],
    values: NDArray[np.floating],
    *,
    alpha: float = 0.85,
    colormap: str = "inferno",
    width: int = 960,
    lane: int = 160,
) -> Picture:
    """(C,L) uint8 and (L,) in 0..1 (`colormap="diverging"`: -1..1) -> (C·lane,width,3): a lane for each signal.

    The map colours the background, as strong as its value says; the line lies on it. InputError where lengths differ.
    """
    import cv2

    if signals.ndim != 2 or values.shape != signals.shape[1:] or not signals.size:
        raise InputError(f"signals are {signals.shape} and the map {values.shape}; expected (C,L) and (L,)")
    checked_fraction("alpha", alpha)
    places = (np.arange(width) + 0.5) / width * len(values) - 0.5
    across = np.interp(places, np.arange(len(values)), values)
    strength = alpha * np.minimum(np.abs(across), 1)[:, None]
    band = np.asarray(PAPER) * (1 - strength) + colourise(across[None], colormap)[0] * strength
    out = np.repeat(np.rint(band).astype(np.uint8)[None], lane * len(signals), axis=0)
    columns = (np.arange(len(values)) + 0.5) / len(values) * width
    for i, signal in enumerate(signals):
        rows = lane * (i + 1 - MARGIN - (1 - 2 * MARGIN) * signal / 255)
        points = np.rint(np.column_stack([columns, rows]) * 2**FINE).astype(np.int32)
        cv2.polylines(out, [points[:, None]], isClosed=False, color=INK, thickness=2, lineType=cv2.LINE_AA, shift=FINE)
    return out
