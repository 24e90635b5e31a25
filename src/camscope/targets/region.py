"""Region: a question of a part of a map of class scores, as segmentation models return."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import ArrayLike
from torch import Tensor

from camscope.errors import TargetError
from camscope.structure import leaves
from camscope.targets.outputs import full
from camscope.targets.target import Names, OfClass, Scene

POOLS: dict[int, Callable[..., Tensor]] = {1: F.adaptive_avg_pool1d, 2: F.adaptive_avg_pool2d, 3: F.adaptive_avg_pool3d}


@dataclass(frozen=True, eq=False)
class Region(OfClass):
    """The mean score of a class over a region of a segmentation's output (N,K,*s) (Vinogradova et al. 2020).

    `mask`: of the original image's size, or of the model's input's; what is not 0 counts. `point`: (x, y), one pixel
    instead. Neither: wherever the class is the answer. `of`: default the class that scores most there.
    """

    mask: ArrayLike | Tensor | None = None
    point: Sequence[float] | None = None
    weights: Tensor | None = None

    dense: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.mask is not None and self.point is not None:
            raise TargetError("Region: a mask or a point, not both")
        if self.mask is not None and not _array(self.mask).any():
            raise TargetError("Region: the mask is empty: nothing is asked")

    def in_scene(self, scene: Scene) -> "Region":
        """Mask and point as they lie on the model's input."""
        if self.point is not None:
            at = scene.to_input([list(self.point)[::-1]])[0]
            if not all(0 <= place < pixels for place, pixels in zip(at, scene.input_size, strict=True)):
                raise TargetError(f"the point {tuple(self.point)} lies outside of what the model sees")
            return replace(self, point=tuple(at[::-1].tolist()))
        if self.mask is None:
            return self
        mask = _array(self.mask)
        if mask.shape == scene.image_size:
            mask = _on_input(mask, scene)
        if mask.shape != scene.input_size:
            raise TargetError(
                f"the mask is {mask.shape}; expected the image's size {scene.image_size}, or the model's input "
                f"{scene.input_size}"
            )
        if not mask.any():
            raise TargetError("the region lies outside of what the model sees: the crop has cut it away")
        return replace(self, mask=mask)

    def settled(self, output: Any, size: Sequence[int], categories: Sequence[str] | None) -> "Region":
        """The class, and weights (N,*s) of the output's cells."""
        maps = full(class_maps(output)).detach()
        whole = self.mask is None and self.point is None
        weights = torch.ones_like(maps[:, 0]) if whole else self._weights(maps, tuple(size))
        known = OfClass.settled(replace(self, weights=weights), output, size, categories)
        if not whole or known.classes is None:
            return known
        weights = (maps.argmax(1) == known.classes.view(-1, *[1] * (maps.ndim - 2))).to(maps)
        if not bool(weights.flatten(1).any(1).all()):
            raise TargetError(f"Region: class {known.of!r} is the answer nowhere in a sample; pass a mask, or a point")
        return replace(known, weights=weights)

    def scored(self, output: Any) -> Tensor:
        """(N,K)"""
        return _mean(full(class_maps(output)), self.weights)

    def __call__(self, output: Any) -> Tensor:
        """(N,)"""
        scores = self.scored(output)
        return scores.gather(1, self.indices(scores)[:, None])[:, 0]

    def words(self, sample: int, name: Names) -> str:
        """`tabby in a region`, `tabby at (12, 30)`, `tabby where it is the answer`"""
        place = "where it is the answer"
        if self.point is not None:
            place = f"at ({', '.join(f'{value:.4g}' for value in self.point)}) of the input"
        elif self.mask is not None:
            place = "in a region"
        return f"{self.named(sample, name)} {place}"

    def _weights(self, maps: Tensor, size: tuple[int, ...]) -> Tensor:
        """(N,*s): how much of each cell lies in the region; (N,K,*s) is the output, `size` the input's."""
        grid = maps.shape[2:]
        if self.mask is None:
            part = torch.zeros(grid, dtype=maps.dtype, device=maps.device)
            places = zip(list(self.point or ())[::-1], size, grid, strict=True)
            part[tuple(min(int(at * cells / pixels), cells - 1) for at, pixels, cells in places)] = 1
            return part.expand(len(maps), *grid)
        mask = torch.as_tensor(_array(self.mask), dtype=maps.dtype, device=maps.device)
        if mask.ndim != len(grid):
            raise TargetError(f"the mask is {tuple(mask.shape)}; the output has places {tuple(grid)}")
        return POOLS[len(grid)](mask[None, None], grid)[0].expand(len(maps), *grid)


def class_maps(output: Any) -> Tensor:
    """(N,K,*s) scores of every class at every place: a tensor, `out`, `logits`, or the only float tensor of such a shape."""
    named = output if isinstance(output, Tensor) else None
    for name in ("out", "logits"):
        found = output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
        named = found if named is None and isinstance(found, Tensor) else named
    many = (
        [leaf for _, leaf in leaves(output) if leaf.is_floating_point() and leaf.ndim > 2] if named is None else [named]
    )
    if len(many) != 1 or many[0].ndim < 3:
        shapes = ", ".join(str(tuple(leaf.shape)) for _, leaf in leaves(output)) or type(output).__name__
        raise TargetError(f"a Region asks for class scores at every place (N,K,*s); the output is {shapes}")
    return many[0]


def _mean(maps: Tensor, weights: Tensor | None) -> Tensor:
    """(N,K,*s), (N,*s) -> (N,K)"""
    if weights is None:
        return maps.flatten(2).mean(2)
    shares = weights.flatten(1) / weights.flatten(1).sum(1, keepdim=True)
    return (maps.flatten(2) * shares[:, None]).sum(2)


def _array(mask: ArrayLike | Tensor) -> "np.ndarray[Any, np.dtype[np.bool_]]":
    return np.asarray(np.asarray(mask.detach().cpu() if isinstance(mask, Tensor) else mask) != 0)


def _on_input(mask: "np.ndarray[Any, np.dtype[np.bool_]]", scene: Scene) -> "np.ndarray[Any, np.dtype[np.bool_]]":
    """The mask of the original image where the centre of each pixel of the input lies."""
    centres = np.indices(scene.input_size).reshape(len(scene.input_size), -1).T + 0.5
    places = np.floor(scene.to_image(centres)).astype(int)
    inside = ((places >= 0) & (places < mask.shape)).all(1)
    found = np.zeros(len(places), bool)
    found[inside] = mask[tuple(places[inside].T)]
    return np.asarray(found.reshape(scene.input_size))
