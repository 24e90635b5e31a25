"""Intake: a file's bytes, or an image of a dataset, as the model takes it."""

from typing import Any

import torch
from torch import Tensor

from camscope.errors import PreprocessError
from camscope.explainers import Explainer
from camscope.explainers.inputs import Item, known, picture_of
from camscope.explanation import Pixels
from camscope.images.photo import read_photo, read_reduced
from camscope.images.preprocess import Preprocess

MARGIN = 4  # twice leaves the maps' ranks correlated at 0.989, four times at 0.994 and more


def taken_in(source: Any, tool: Explainer, *, reduced: bool = False, drawn: bool = False) -> Item:
    """As the model takes it, in memory. `reduced`: decoded smaller, see `Worker`; `drawn`: with the picture to draw on."""
    if isinstance(source, Tensor) and source.dtype != torch.uint8:
        return tool.read(source)
    pixels, size = _pixels(source, tool, reduced)
    x, place = known(tool.preprocess, "images")(pixels)
    place = place and place.on_image_of(size)
    seen = picture_of(x, tool.preprocess) if drawn and not place else None
    return Item(x, place, "", pixels if drawn else None, seen)


def expect_reducible(tool: Explainer) -> None:
    """PreprocessError where nobody knows how small an image may be decoded."""
    if not isinstance(tool.preprocess, Preprocess):
        raise PreprocessError(
            f"reduced decoding needs to know what an image is resized to, and {tool.preprocess!r} does not say"
        )


def _pixels(source: Any, tool: Explainer, reduced: bool) -> tuple[Pixels, tuple[int, ...]]:
    """(h,w,3) and the image's own (H,W)."""
    preprocess = tool.preprocess
    if not reduced or not isinstance(source, bytes) or not isinstance(preprocess, Preprocess):
        pixels = read_photo(source).pixels
        return pixels, pixels.shape[:2]

    def enough(size: tuple[int, int]) -> tuple[int, int]:
        height, width = preprocess.resized(size)
        return MARGIN * height, MARGIN * width

    return read_reduced(source, enough)
