"""Use MONAI's transforms as preprocessing, and read the placement of the input from MONAI's affine matrices.

MONAI itself is never imported: a caller who passes its objects has imported it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from camscope.errors import ImageError
from camscope.geometry import Placement
from camscope.images.files.redacted_errors_and_file_pseudonyms import pseudonymize_source
from camscope.images.scans.scan import Affine

# changes that the affine matrix does not record; nor does it record transforms from outside MONAI
NON_AFFINE_TRANSFORMS = ("Lambda", "Elastic", "Distort", "Transpose", "Patch", "Split", "Warp")
LPS_TO_RAS = np.diag([-1.0, -1.0, 1.0, 1.0])


def is_monai_object(value: object) -> bool:
    """Return whether a value is a MONAI transform or a MONAI tensor with metadata."""
    return type(value).__module__.partition(".")[0] == "monai"


class MonaiInput(NamedTuple):
    """A tensor (C,*S), its placement on the loaded image, and the affine of that image (None if unknown)."""

    tensor: Tensor
    placement: Placement | None
    affine: Affine | None


@dataclass(frozen=True)
class MonaiPreprocess:
    """A preprocessing by MONAI transforms, which take a path, or a dictionary with a path, and return a MONAI tensor."""

    transform: Any

    def __call__(self, path: str | Path) -> MonaiInput:
        """Load the image at `path` and apply the transforms to it."""
        steps = list(_flatten_transforms(self.transform))
        key = next((step.keys[0] for step in steps if getattr(step, "keys", None)), None)
        name = pseudonymize_source(path)
        try:
            result = self.transform(str(path) if key is None else {key: str(path)})
        except Exception as error:  # a transform can raise anything, and its text may name the patient
            raise ImageError(f"{name}: MONAI's transforms raised {type(error).__name__}") from None
        result = result[key] if isinstance(result, dict) and key is not None else result
        if not isinstance(result, Tensor) or result.ndim not in (3, 4):
            received = f"{type(result).__name__} {tuple(getattr(result, 'shape', ()))}"
            expected = "a tensor (C,H,W) or (C,D,H,W): EnsureChannelFirst?"
            raise ImageError(f"{name}: MONAI's transforms returned {received}; expected {expected}")
        is_affine_known = all(
            is_monai_object(step) and not any(word in type(step).__name__ for word in NON_AFFINE_TRANSFORMS)
            for step in steps
        )
        placement, affine = read_placement_and_affine(result) if is_affine_known else (None, None)
        return MonaiInput(strip_metadata(result), placement, affine)

    def __repr__(self) -> str:
        return f"MonaiPreprocess({', '.join(type(step).__name__ for step in _flatten_transforms(self.transform))})"


def read_placement_and_affine(tensor: Any) -> tuple[Placement | None, Affine | None]:
    """Return which part of its original image a MONAI tensor (C,*S) shows. Also return the affine of that image.

    Return (None, None) if MONAI did not record an affine before or after the transforms.
    """
    meta = getattr(tensor, "meta", {})
    if "original_affine" not in meta or "spatial_shape" not in meta:
        return None, None
    before, after = (np.asarray(matrix_like, np.float64) for matrix_like in (meta["original_affine"], tensor.affine))
    axes = tensor.ndim - 1
    shape = tuple(int(side) for side in np.asarray(meta["spatial_shape"]).ravel()[:axes])
    if before.shape != (4, 4) or after.shape != (4, 4) or len(shape) != axes:
        return None, None
    output_to_original = np.linalg.inv(before) @ after
    linear, offset = output_to_original[:axes, :axes], output_to_original[:axes, 3]
    matrix = np.column_stack([linear, offset + 0.5 - linear @ np.full(axes, 0.5)])  # from centers to edges
    affine = before if "LPS" not in str(meta.get("space", "RAS")).upper() else LPS_TO_RAS @ before
    if axes == 2:  # the axes of a 2-D image are the last two of an index
        affine = affine[:, [2, 0, 1, 3]]
    return Placement(np.round(matrix, 9), tuple(tensor.shape[1:]), shape), affine


def strip_metadata(tensor: Tensor) -> Tensor:
    """Convert a MONAI tensor to an ordinary float tensor without metadata."""
    bare: Tensor = tensor.as_tensor() if hasattr(tensor, "as_tensor") else tensor
    return bare if bare.is_floating_point() else bare.to(torch.float32)


def _flatten_transforms(transform: Any) -> Iterator[Any]:
    """Yield the single transforms that a transform consists of. Nested `Compose` containers are unpacked."""
    inner = getattr(transform, "transforms", None)
    if inner is None:
        yield transform
        return
    for step in inner:
        yield from _flatten_transforms(step)
