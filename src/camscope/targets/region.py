"""Region: a question of a part of a map of class scores, as segmentation models return."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import ArrayLike
from torch import Tensor

from camscope.errors import TargetError
from camscope.mask_labels import listed, several_labels
from camscope.plurals import plural
from camscope.pytree import leaves
from camscope.targets.base import Names, OfClass, Scene, numbers_in
from camscope.targets.outputs import expect_no_detections, full_precision, part_of

POOLS: dict[int, Callable[..., Tensor]] = {1: F.adaptive_avg_pool1d, 2: F.adaptive_avg_pool2d, 3: F.adaptive_avg_pool3d}


@dataclass(frozen=True, eq=False)
class Region(OfClass):
    """The mean score of a class over a region of a segmentation's output (N,K,*s) (Vinogradova et al. 2020).

    `mask`: of the original image's size, or of the model's input's; 0 outside, one value inside. `point`: (x, y), one pixel
    instead. Neither: wherever the class is the answer. `of`: default the class that scores most there.
    """

    mask: ArrayLike | Tensor | None = None
    point: Sequence[float] | None = None
    weights: Tensor | None = None

    dense = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mask is not None and self.point is not None:
            raise TargetError("Region: a mask or a point, not both")
        if self.mask is not None and not _array(self.mask).any():
            raise TargetError("Region: the mask is empty: nothing is asked")
        if self.point is not None:
            found = numbers_in(self.point)
            if found is None:
                raise TargetError(f"point={self.point!r} of a Region: expected finite numbers (x, y)")
            object.__setattr__(self, "point", tuple(found))

    def in_scene(self, scene: Scene) -> "Region":
        """Mask and point as they lie on the model's input."""
        if self.point is not None:
            _expect_axes(self.point, scene.input_size)
            at = scene.to_input([list(self.point)[::-1]])[0][::-1].tolist()
            _expect_inside(at, scene.input_size, self.point)
            return replace(self, point=tuple(at))
        if self.mask is None:
            return self
        mask = _array(self.mask)
        if mask.shape == scene.image_size:
            mask = _on_input(mask, scene)
        if not mask.any():
            raise TargetError("the region lies outside of what the model sees: the crop has cut it away")
        _expect_size(mask, scene.input_size, scene.image_size)
        return replace(self, mask=mask)

    def viewed(self, flips: Sequence[int], size: Sequence[int]) -> "Region":
        """The weights where the view shows them; `scored` brings them to the grid that its output has."""
        weights = None if self.weights is None else self.weights.flip([axis + 1 for axis in flips])
        return replace(self, weights=weights)

    def settled(self, output: Any, size: Sequence[int], categories: Sequence[str] | None) -> "Region":
        """The class, and weights (N,*s) of the output's cells."""
        maps = full_precision(class_maps(output)).detach()
        grid, size = tuple(maps.shape[2:]), tuple(size) or tuple(maps.shape[2:])
        if len(grid) != len(size):
            raise TargetError(f"the output has places {grid}, the input {size}: pass a function output -> (N,)")
        whole = self.mask is None and self.point is None
        weights = torch.ones_like(maps[:, 0]) if whole else self._weights(maps, size)
        known = OfClass.settled(replace(self, weights=weights), output, size, categories)
        if not whole or known.classes is None:
            return known
        weights = (maps.argmax(1) == known.classes.view(-1, *[1] * (maps.ndim - 2))).to(maps)
        if not bool(weights.flatten(1).any(1).all()):
            raise TargetError(f"Region: class {known.of!r} is the answer nowhere in a sample; pass a mask, or a point")
        return replace(known, weights=weights)

    def scored(self, output: Any) -> Tensor:
        """(N,K)"""
        if self.weights is None:
            raise TargetError("a Region must be settled by a first pass: ask it through a method, or a Score")
        return _mean(full_precision(class_maps(output)), self.weights)

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
            point = self.point or ()
            _expect_axes(point, size)
            _expect_inside(point, size, point)
            part = torch.zeros(grid, dtype=maps.dtype, device=maps.device)
            places = zip(list(point)[::-1], size, grid, strict=True)
            part[tuple(min(int(at * cells / pixels), cells - 1) for at, pixels, cells in places)] = 1
            return part.expand(len(maps), *grid)
        mask = torch.as_tensor(_array(self.mask), dtype=maps.dtype, device=maps.device)
        _expect_size(mask, size)
        return POOLS[len(grid)](mask[None, None], grid)[0].expand(len(maps), *grid)


def class_maps(output: Any) -> Tensor:
    """(N,K,*s) scores of every class at every place: a tensor, `out`, `logits`, or the only float tensor of such a shape."""
    expect_no_detections(output)
    named = output if isinstance(output, Tensor) else None
    for name in ("out", "logits"):
        named = part_of(output, name) if named is None else named
    many = (
        [leaf for _, leaf in leaves(output) if leaf.is_floating_point() and leaf.ndim > 2] if named is None else [named]
    )
    if len(many) != 1 or many[0].ndim < 3:
        shapes = ", ".join(str(tuple(leaf.shape)) for _, leaf in leaves(output)) or type(output).__name__
        raise TargetError(f"a Region asks for class scores at every place (N,K,*s); the output is {shapes}")
    return many[0]


def _mean(maps: Tensor, weights: Tensor) -> Tensor:
    """(N,K,*s), (N,*t) -> (N,K); weights of another grid, as where a view has another size, lie where they lay."""
    if maps.shape[2:] != weights.shape[1:]:
        weights = POOLS[weights.ndim - 1](weights[:, None], maps.shape[2:])[:, 0]
    shares = weights.flatten(1) / weights.flatten(1).sum(1, keepdim=True)
    return (maps.flatten(2) * shares[:, None]).sum(2)


def _array(mask: ArrayLike | Tensor) -> "np.ndarray[Any, np.dtype[np.bool_]]":
    """Where a mask is not 0; TargetError for what is none."""
    if isinstance(mask, Tensor):
        return _array(mask.detach().cpu().double().numpy())
    try:
        found = np.asarray(mask)
    except ValueError as error:
        raise TargetError("the mask of a Region has rows of different lengths: expected an array (H,W)") from error
    if found.dtype.kind not in "biuf" or np.isnan(found).any():
        raise TargetError("the mask of a Region is no array of numbers, or holds NaN: expected 0 outside, 1 inside")
    if names := several_labels(found):
        raise TargetError(
            f"the mask of a Region holds {listed(names)}; expected one region: pass mask == {names[0]}, or mask != 0 for all"
        )
    return np.asarray(found != 0)


def _expect_axes(point: Sequence[float], size: Sequence[int]) -> None:
    if len(point) != len(size):
        raise TargetError(
            f"the point {tuple(point)} has {plural(len(point), 'number')}; expected {len(size)}, as the input has axes"
        )


def _expect_inside(point: Sequence[float], size: Sequence[int], said: Sequence[float]) -> None:
    if not all(0 <= at < pixels for at, pixels in zip(list(point)[::-1], size, strict=True)):
        raise TargetError(f"the point {tuple(said)} lies outside of what the model sees")


def _expect_size(
    mask: "Tensor | np.ndarray[Any, np.dtype[np.bool_]]", size: tuple[int, ...], image: tuple[int, ...] | None = None
) -> None:
    if tuple(mask.shape) != size:
        original = "" if image is None else f"the image's size {image}, or "
        raise TargetError(f"the mask is {tuple(mask.shape)}; expected {original}the model's input {size}")


def _on_input(mask: "np.ndarray[Any, np.dtype[np.bool_]]", scene: Scene) -> "np.ndarray[Any, np.dtype[np.bool_]]":
    """The mask of the original image where the centre of each pixel of the input lies."""
    centres = np.indices(scene.input_size).reshape(len(scene.input_size), -1).T + 0.5
    places = np.floor(scene.to_image(centres)).astype(int)
    inside = ((places >= 0) & (places < mask.shape)).all(1)
    found = np.zeros(len(places), bool)
    found[inside] = mask[tuple(places[inside].T)]
    return np.asarray(found.reshape(scene.input_size))
