"""A map on the voxels of the scan that it explains, and the checks that both belong together."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from camscope.errors import GeometryError
from camscope.explanation import Explanation
from camscope.images.scans.scan import Scan, World
from camscope.plurals import plural


@dataclass(frozen=True, eq=False)
class Native:
    """`values` (H,W) or (D,H,W) float32 in score units, 0 where not `covered`; `world` (4,4) of the voxels, or None."""

    values: NDArray[np.float32]
    covered: NDArray[np.bool_]
    world: World | None

    @property
    def ends(self) -> tuple[float, float]:
        """The least and the largest value of what is covered."""
        known = self.values[self.covered]
        return (float(known.min()), float(known.max())) if known.size else (0.0, 0.0)

    @property
    def slices(self) -> NDArray[np.float32]:
        """(D,H,W): of an image of two axes one slice."""
        return self.values[None] if self.values.ndim == 2 else self.values


def native(explanation: Explanation, scan: Scan | None = None) -> Native:
    """The map of an explanation at the scan's own resolution; GeometryError where it is of another scan or has no place."""
    values = explanation.heatmap("image", scale=None).astype(np.float32)
    if values.ndim not in (2, 3):
        raise GeometryError(f"a map of {plural(values.ndim, 'axis')} is no image and no volume; expected 2 or 3")
    world = explanation.world
    if scan is not None:
        if values.shape != scan.shape:
            raise GeometryError(
                f"the map is of an image of {_size(values.shape)}, {scan.name} is {_size(scan.shape)}: pass the scan that "
                f"was explained"
            )
        if world is not None and scan.world is not None and not _is_same(world, scan.world):
            raise GeometryError(f"the map lies elsewhere than {scan.name}: pass the scan that was explained")
        world = scan.world if world is None else world
    return Native(values, explanation.covered("image"), world)


def _size(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))


def _is_same(one: Any, other: Any) -> bool:
    return bool(np.allclose(one, other, rtol=1e-4, atol=1e-3))
