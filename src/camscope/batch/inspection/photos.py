"""The facts of photographs: what the file says, and its pixels as they are seen, or as stored where they are finer."""

import io
from typing import Any

import numpy as np
from torch import Tensor

from camscope.batch.inspection.codes import codes_of
from camscope.batch.inspection.facts import Array, Facts
from camscope.errors import ImageError
from camscope.images.photo import ORIENTATION, read_photo, remarks
from camscope.images.raster import read_raster
from camscope.images.silence import silent

FINE = ("I", "F")  # Pillow's modes of more than 8 bits, and those that begin so
BITS = {"1": "1 bit", "P": "8 bits, of a palette", "I": "32 bits", "F": "32 bits, floating point"}


def read_facts(source: Any, path: str, facts: Facts, key: bytes) -> None:
    """Fill in what a photograph says of itself: a file's bytes, or an image of a dataset as it comes."""
    if not isinstance(source, bytes):
        facts.format, values = "decoded", _values(source)
        facts.stored = str(values.dtype)
        facts.measure(values, colour=values.dtype == np.uint8 and values.ndim == 3 and values.shape[-1] == 3, key=key)
        return
    fine = _header(source, facts)
    values = read_raster(source, frame=0).values if fine else read_photo(source).pixels
    facts.measure(values, colour=values.ndim == 3, key=key)
    facts.flags = remarks(source, path)
    facts.findings += codes_of(facts.flags)


def _header(data: bytes, facts: Facts) -> bool:
    """Whether its pixels are finer than those of a photograph; what is no image is left to the reader to refuse."""
    from PIL import Image

    try:
        with silent(), Image.open(io.BytesIO(data)) as image:
            mode = image.mode
            facts.format = "JPEG" if image.format == "MPO" else image.format
            facts.photometric = mode.partition(";")[0]
            sixteen = mode.startswith("I;16") or (mode == "I" and image.format == "PNG")
            facts.stored = "16 bits" if sixteen else BITS.get(mode, "8 bits")
            facts.exif = int(image.getexif().get(ORIENTATION, 1))
    except Exception:
        return False
    if facts.exif not in (0, 1):
        facts.findings.append("exif")
    fine = mode.startswith(FINE) and facts.format in ("PNG", "TIFF")
    if fine and not sixteen:
        facts.findings.append("no-range")
    return fine


def _values(source: Any) -> Array:
    """(H,W), (H,W,3) or, of a tensor for a model, (C,H,W) as it is."""
    if isinstance(source, Tensor) and source.is_floating_point():
        values = source.detach().cpu().numpy()
        if not values.size:
            raise ImageError(f"a tensor of shape {tuple(values.shape)}")
        return np.asarray(values)
    return read_photo(source).pixels
