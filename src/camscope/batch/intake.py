"""Intake: a file's bytes, or an image of a dataset, as the model takes it."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from camscope.batch.memory import give_back
from camscope.errors import ImageError, PreprocessError
from camscope.explainers import Explainer
from camscope.explainers.inputs import Item, item_of, known, picture_of, read_item
from camscope.explanation import Pixels
from camscope.hooks.base import unwrap
from camscope.images.metatensor import MonaiTransforms
from camscope.images.photo import read_photo, read_reduced
from camscope.images.preprocess import Preprocess
from camscope.images.scan_preprocess import ScanPreprocess
from camscope.images.scans import is_scan, read_scan

HERE = (torch.device("cpu"), torch.float32)  # where inputs wait
MARGIN = 4  # twice leaves the maps' ranks correlated at 0.989, four times at 0.994 and more


@dataclass(frozen=True)
class Way:
    """How it is taken in. `reduced`: decoded smaller, see `Worker`; `drawn`: with the picture to draw on.

    `window`, `allow_pixels`: of scans, see `Worker`. `nameless`: a medical image is refused where its file's name does not say
    that it is one, for then its row would name it.
    """

    reduced: bool = False
    drawn: bool = False
    window: Any = None
    allow_pixels: bool = False
    nameless: bool = False


PLAIN = Way()


def taken_in(source: Any, tool: Explainer, way: Way = PLAIN) -> Item:
    """As the model takes it, in memory."""
    if isinstance(source, Tensor) and source.dtype != torch.uint8:
        return tool.read(source)
    if isinstance(source, Path) or isinstance(tool.preprocess, ScanPreprocess) or is_scan(source):
        return _scan(source, tool, way)
    pixels, size = _pixels(source, tool, way.reduced)
    x, place = known(tool.preprocess, "images")(pixels)
    place = place and place.on_image_of(size)
    seen = picture_of(x, tool.preprocess) if way.drawn and not place else None
    return Item(x, place, "", pixels if way.drawn else None, seen)


def _scan(source: Any, tool: Explainer, way: Way) -> Item:
    """A medical image; without a picture where it is not drawn on, or may not be shown."""
    if way.nameless and not isinstance(source, Path) and not isinstance(tool.preprocess, ScanPreprocess):
        raise ImageError("a medical image whose name does not say so: pass profile='research', or 'clinical'")
    if isinstance(tool.preprocess, MonaiTransforms) and isinstance(source, Path):
        item = read_item(source, tool.preprocess, unwrap(tool.model), HERE)
    else:
        scan = read_scan(source, window=way.window)
        shown = replace(scan, burned_in=False) if way.allow_pixels else scan
        return item_of(shown, tool.preprocess, HERE, drawn=way.drawn)
    return item if way.drawn else replace(item, image=None, seen=None)


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
        give_back(pixels.nbytes)
        return pixels, pixels.shape[:2]

    def enough(size: tuple[int, int]) -> tuple[int, int]:
        height, width = preprocess.resized(size)
        return MARGIN * height, MARGIN * width

    return read_reduced(source, enough)
