"""Point: the target for the patch at a place: how similar all other patches are to it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from camscope.errors import TargetError
from camscope.plurals import plural
from camscope.targets.base import ClassNameLookup, ImageContext, Target, parse_finite_numbers
from camscope.targets.find_class_scores import full_precision
from camscope.targets.patch_features_in_outputs import find_patch_features, find_patch_stride


@dataclass(frozen=True, eq=False)
class Point(Target):
    """How similar the other patches are to the patch at a point: the mean of their cosine similarities.

    The features of the patch are read from the unchanged image once. So the score says how much of what is at the point is
    elsewhere in the image. Its gradient, or a perturbation, shows where. The encoder must return the features of its
    patches. `extract_patch_features(...).similarity_to_point` gives the similarity of each patch directly, of any layer.

    Args:
        point: (x, y) in pixels of the image, columns first; for a volume (x, y, z).
        n_prefix_tokens: Number of tokens before those of the patches, such as a class token and registers. None: all tokens
            that the patches leave, up to 9.
        relative_point: The point in array order, as fractions of the model's input, which `prepare_for_image` or
            `resolve_choices` sets.
        patch_stride: Pixels of a patch, which `prepare_for_model` reads.
        input_size: Size of the model's input, which `resolve_choices` sets.
        reference: (N,K) the features at the point, which `resolve_choices` sets.

    Raises:
        TargetError: The point is no list of finite numbers, or `n_prefix_tokens` is negative.

    >>> target = Point((12, 30))
    >>> target.describe(0, str)
    'similarity to the patch at (12, 30)'

    """

    point: Sequence[float]
    n_prefix_tokens: int | None = None
    relative_point: tuple[float, ...] | None = None
    patch_stride: tuple[int, ...] | None = None
    input_size: tuple[int, ...] = ()
    reference: Tensor | None = None

    selects_positions = True

    def __post_init__(self) -> None:
        numbers = parse_finite_numbers(self.point)
        if numbers is None or not numbers:
            raise TargetError(f"Point({self.point!r}): expected finite numbers (x, y)")
        count = self.n_prefix_tokens
        if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 0):
            raise TargetError(f"n_prefix_tokens={count!r} of a Point: expected an integer of 0 or more, or None")
        object.__setattr__(self, "point", tuple(numbers))

    def prepare_for_model(self, model: nn.Module) -> "Point":
        """Return the target with the size of a patch, which is the stride of the first convolution without overlap."""
        return replace(self, patch_stride=find_patch_stride(model))

    def prepare_for_image(self, image_context: ImageContext) -> "Point":
        """Return the target for one image. Its point is converted from the image to the model's input."""
        self._check_number_of_axes(image_context.input_size)
        place = image_context.to_input([self.point[::-1]])[0].tolist()
        return replace(self, relative_point=self._to_fractions(place, image_context.input_size))

    def flipped(self, flips: Sequence[int], size: Sequence[int]) -> "Point":
        """Return the target for an input that is flipped along the axes `flips` and resized. The reference stays the same."""
        if self.relative_point is None:
            return self
        mirrored = tuple(1 - value if axis in flips else value for axis, value in enumerate(self.relative_point))
        return replace(self, relative_point=mirrored, input_size=tuple(size))

    def resolve_choices(self, output: Any, input_size: Sequence[int], class_names: Sequence[str] | None) -> "Point":
        """Return the target with the features at the point as its reference."""
        size = tuple(input_size)
        self._check_number_of_axes(size)
        place = self.relative_point or self._to_fractions(self.point[::-1], size)
        resolved = replace(self, relative_point=place, input_size=size)
        maps = resolved._find_maps(output).detach()
        reference = maps
        for index in resolved._find_cell(maps.shape[2:]):  # along one axis of the grid after the other
            reference = reference[:, :, index]
        if not bool(reference.any(1).all()) or maps.shape[2:].numel() == 1:
            raise TargetError(f"Point({self.point}): the features there are zero, or there is only one patch")
        return replace(resolved, reference=reference)

    def __call__(self, output: Any) -> Tensor:
        """Compute the score of each sample (N,)."""
        if self.reference is None:
            raise TargetError("a Point must be resolved in a first forward pass: use it through a method, or a Score")
        maps = self._find_maps(output)
        products = torch.einsum("nk...,nk->n...", maps, self.reference.to(maps))
        lengths = maps.norm(dim=1) * self.reference.to(maps).norm(dim=1).view(-1, *[1] * (maps.ndim - 2))
        cosines = products / torch.where(lengths > 0, lengths, 1)
        is_other = torch.ones(maps.shape[2:], dtype=maps.dtype, device=maps.device)
        is_other[self._find_cell(maps.shape[2:])] = 0
        return (cosines * is_other).flatten(1).sum(1) / is_other.sum()

    def describe(self, sample: int, class_name: ClassNameLookup) -> str:
        """Return a description of the target, such as `similarity to the patch at (12, 30)`."""
        return f"similarity to the patch at ({', '.join(f'{value:g}' for value in self.point)})"

    def _find_maps(self, output: Any) -> Tensor:
        """Return the features (N,K,*s) of the patches in an output, in at least float32."""
        return full_precision(find_patch_features(output, self.input_size, self.patch_stride, self.n_prefix_tokens))

    def _find_cell(self, grid: Sequence[int]) -> tuple[int, ...]:
        """Return the index of the cell of a grid in which the point lies."""
        fractions = zip(self.relative_point or (), grid, strict=True)
        return tuple(min(int(fraction * cells), cells - 1) for fraction, cells in fractions)

    def _check_number_of_axes(self, input_size: Sequence[int]) -> None:
        if len(self.point) != len(input_size):
            raise TargetError(
                f"the point {self.point} has {plural(len(self.point), 'number')}; expected {len(input_size)}, one per axis"
            )

    def _to_fractions(self, place: Sequence[float], input_size: Sequence[int]) -> tuple[float, ...]:
        """Convert a point of the model's input, in array order, to fractions of its size."""
        if not all(0 <= position < pixels for position, pixels in zip(place, input_size, strict=True)):
            raise TargetError(f"the point {self.point} lies outside of the model's input")
        return tuple(position / pixels for position, pixels in zip(place, input_size, strict=True))
