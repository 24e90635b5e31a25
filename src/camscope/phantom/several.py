"""One radiograph with several findings, each with a mask of its own."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from camscope.errors import InputError
from camscope.phantom.draw import CATEGORIES, draw


def draw_several(seed: int, findings: Sequence[str | int]) -> tuple[NDArray[np.uint8], dict[str, NDArray[np.bool_]]]:
    """(128,128) uint8, and the mask of each finding by name: a seed draws one anatomy, whatever is found in it.

    Raises InputError for a finding that is named twice, TargetError for one that does not exist.

    >>> image, masks = draw_several(4, ["nodule", "effusion"])
    >>> image.shape, sorted(masks)
    ((128, 128), ['effusion', 'nodule'])
    """
    clear = draw(seed, CATEGORIES[0]).image.astype(np.int64)
    drawn = [draw(seed, finding) for finding in findings]
    masks = {one.name: one.mask for one in drawn}
    if len(masks) != len(drawn):
        raise InputError(f"findings {list(findings)!r}: each one once")
    image = clear + sum((one.image.astype(np.int64) - clear for one in drawn), np.zeros_like(clear))
    return image.clip(0, 255).astype(np.uint8), masks
