"""A map on the voxels of the scan that it explains, and the checks that both belong together."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from camscope.errors import GeometryError
from camscope.explanation import Explanation
from camscope.images.scans.scan import Affine, Scan
from camscope.plurals import plural


@dataclass(frozen=True, eq=False)
class ScanSpaceMap:
    """`values` (H,W) or (D,H,W) float32 in score units, 0 where not `covered`; `affine` (4,4) of the voxels, or None."""

    values: NDArray[np.float32]
    covered: NDArray[np.bool_]
    affine: Affine | None

    @property
    def value_range(self) -> tuple[float, float]:
        """The least and the largest value of what is covered."""
        covered_values = self.values[self.covered]
        return (float(covered_values.min()), float(covered_values.max())) if covered_values.size else (0.0, 0.0)

    @property
    def slices(self) -> NDArray[np.float32]:
        """(D,H,W): of an image of two axes one slice."""
        return self.values[None] if self.values.ndim == 2 else self.values


def resample_to_scan(explanation: Explanation, scan: Scan | None = None) -> ScanSpaceMap:
    """The map of an explanation at the scan's own resolution; GeometryError where it is of another scan or has no place."""
    values = explanation.heatmap("image", scale=None).astype(np.float32)
    if values.ndim not in (2, 3):
        raise GeometryError(f"a map of {plural(values.ndim, 'axis')} is no image and no volume; expected 2 or 3")
    affine = explanation.affine
    if scan is not None:
        if values.shape != scan.shape:
            raise GeometryError(
                f"the map is of an image of {_format_shape(values.shape)}, {scan.name} is {_format_shape(scan.shape)}: pass the scan that "
                f"was explained"
            )
        if affine is not None and scan.affine is not None and not _is_same_affine(affine, scan.affine):
            raise GeometryError(f"the map lies elsewhere than {scan.name}: pass the scan that was explained")
        affine = scan.affine if affine is None else affine
    return ScanSpaceMap(values, explanation.coverage_mask("image"), affine)


def _format_shape(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))


def _is_same_affine(first: Any, second: Any) -> bool:
    return bool(np.allclose(first, second, rtol=1e-4, atol=1e-3))
