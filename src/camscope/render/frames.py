"""Frames: slices of a volume, or moments of a video, each with its part of the map."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from camscope.errors import InputError
from camscope.render.overlay import overlay
from camscope.render.panel import panel
from camscope.render.picture import Picture

MOST = 12


def chosen_frames(values: NDArray[np.floating], most: int = MOST) -> list[int]:
    """(D,H,W) -> which of D frames to show: evenly spread, the one with the largest value among them.

    >>> chosen_frames(np.zeros((3, 1, 1))), len(chosen_frames(np.zeros((100, 1, 1))))
    ([0, 1, 2], 12)
    """
    return evenly(len(values), most, int(values.reshape(len(values), -1).max(1).argmax()))


def evenly(length: int, most: int, peak: int) -> list[int]:
    """Of so many frames at most `most`, evenly spread, one of them put where the peak is."""
    frames = np.unique(np.linspace(0, length - 1, min(most, length)).round().astype(int))
    frames[np.abs(frames - peak).argmin()] = peak
    return [int(frame) for frame in frames]


def frames(
    pictures: NDArray[np.uint8],
    values: NDArray[np.floating],
    *,
    alpha: float = 0.85,
    colormap: str = "inferno",
    covered: NDArray[np.bool_] | None = None,
    which: Sequence[int] | None = None,
    columns: int | None = None,
    height: int = 192,
) -> Picture:
    """(D,H,W,3) and (D,H,W) in 0..1 -> (h,w,3): the overlays of some frames side by side, numbered from 0.

    `which`: default those of `chosen_frames`. The values have one scale, so that frames can be compared.
    """
    if pictures.shape[:3] != values.shape or pictures.ndim != 4:
        raise InputError(f"frames are {pictures.shape} and the map {values.shape}; expected (D,H,W,3) and (D,H,W)")
    numbers = chosen_frames(values) if which is None else list(which)
    made = [
        overlay(
            np.ascontiguousarray(pictures[i]),
            values[i],
            alpha=alpha,
            colormap=colormap,
            covered=None if covered is None else covered[i],
        )
        for i in numbers
    ]
    return panel(made, [f"{i}" for i in numbers], columns=columns, height=height)
