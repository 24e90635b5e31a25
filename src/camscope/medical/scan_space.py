"""Resample a map to the voxels of its scan, and check that both belong together."""

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
    """A map on the scan's voxels: `values` (H,W) or (D,H,W) float32 in score units, 0 where not `covered`; `affine` or None."""

    values: NDArray[np.float32]
    covered: NDArray[np.bool_]
    affine: Affine | None

    @property
    def value_range(self) -> tuple[float, float]:
        """The smallest and largest covered value."""
        covered_values = self.values[self.covered]
        return (float(covered_values.min()), float(covered_values.max())) if covered_values.size else (0.0, 0.0)

    @property
    def slices(self) -> NDArray[np.float32]:
        """(D,H,W). A 2-D image is one slice."""
        return self.values[None] if self.values.ndim == 2 else self.values


def resample_to_scan(explanation: Explanation, scan: Scan | None = None) -> ScanSpaceMap:
    """Resample an explanation's map to the scan's resolution. Raises GeometryError if it belongs to another scan."""
    values = explanation.heatmap("image", scale=None).astype(np.float32)
    if values.ndim not in (2, 3):
        raise GeometryError(
            f"a map of {plural(values.ndim, 'axis')} is neither an image nor a volume; expected 2 or 3 axes"
        )
    affine = explanation.affine
    if scan is not None:
        if values.shape != scan.shape:
            raise GeometryError(
                f"the map belongs to an image of {_format_shape(values.shape)}, "
                f"{scan.name} is {_format_shape(scan.shape)}: pass the scan that "
                f"was explained"
            )
        if affine is not None and scan.affine is not None and not _is_same_affine(affine, scan.affine):
            raise GeometryError(f"the map has another position than {scan.name}: pass the scan that was explained")
        affine = scan.affine if affine is None else affine
    return ScanSpaceMap(values, explanation.coverage_mask("image"), affine)


def _format_shape(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))


def _is_same_affine(first: Any, second: Any) -> bool:
    return bool(np.allclose(first, second, rtol=1e-4, atol=1e-3))
