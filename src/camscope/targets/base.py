"""`Target`: the base class of targets. `ImageContext`: what a target may use of the explained image."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn

from camscope.errors import TargetError

PointTransform = Callable[[ArrayLike], NDArray[Any]]
ClassNameLookup = Callable[[int], str]


@dataclass(frozen=True)
class ImageContext:
    """Information about the explained image: sizes, coordinate transforms and encoders.

    Args:
        input_size: Size of the model's input.
        image_size: Size of the original image, or None if it is unknown.
        to_input: Function that converts points (M,n) of the image to points of the input. The n coordinates are pixels in
            array order.
        to_image: The inverse of `to_input`.
        embed_image: Function that returns the model's embedding (D,) of another image.
        embed_text: Function that returns the embedding (D,) of a text. None if the model has no text encoder.

    >>> import torch
    >>> context = ImageContext(
    ...     (1, 8, 8), (16, 16), lambda points: points / 2, lambda points: points * 2, lambda image: torch.zeros(4)
    ... )
    >>> context.to_input(np.array([[4.0, 6.0]])).tolist()
    [[2.0, 3.0]]

    """

    input_size: tuple[int, ...]
    image_size: tuple[int, ...] | None
    to_input: PointTransform
    to_image: PointTransform
    embed_image: Callable[[Any], Tensor]
    embed_text: Callable[[str], Tensor] | None = None


class Target(ABC):
    """Base class of targets: a callable that reads one score per sample (N,) from the model's output.

    Before the first score, `prepare_for_model` and `prepare_for_image` read what the target needs of the model and the
    image. The first forward pass has the unchanged input. With its output, `resolve_choices` fixes every open choice, such
    as the class, or raises TargetError if the output does not fit the target.

    >>> import torch
    >>> class LargestScore(Target):
    ...     def __call__(self, output: Tensor) -> Tensor:
    ...         return output.amax(1)
    ...
    ...     def describe(self, sample, class_name):
    ...         return "largest score"
    >>> LargestScore()(torch.tensor([[1.0, 4.0]])).tolist()
    [4.0]
    """

    @property
    def selects_positions(self) -> bool:
        """Whether the target selects some of many positions at which the output has scores."""
        return False

    @abstractmethod
    def __call__(self, output: Any) -> Tensor:
        """Compute the score of each sample (N,)."""

    @abstractmethod
    def describe(self, sample: int, class_name: ClassNameLookup) -> str:
        """Return a text that describes the target of one sample. `class_name` is a function from a class index to its name."""

    def get_class_index(self, sample: int) -> int | None:
        """Return the class of one sample if this class alone would give the same target. Otherwise return None."""
        return None

    def prepare_for_model(self, model: nn.Module) -> "Target":
        """Read what the target needs from the model, and return the resulting target. Each `Score` calls this method once."""
        return self

    def prepare_for_image(self, image_context: ImageContext) -> "Target":
        """Return the target for one image. For example, convert its coordinates from the image to the model's input."""
        return self

    def resolve_choices(self, output: Any, input_size: Sequence[int], class_names: Sequence[str] | None) -> "Target":
        """Return the target with all open choices made, such as the choice of a class.

        `output` is that of the first forward pass, and `input_size` is the size *S of the model's input.
        """
        return self

    def flipped(self, flips: Sequence[int], size: Sequence[int]) -> "Target":
        """Return the target for a changed input, which is flipped along the axes `flips` and then resized to `size`."""
        if self.selects_positions:
            raise TargetError(
                f"{type(self).__name__} is a position in the image, so flips need its method flipped(flips, size): implement the "
                "method, or explain without flips"
            )
        return self


def parse_finite_numbers(values: Any) -> list[float] | None:
    """Convert a sequence of finite numbers to a list. Return None for any other value."""
    try:
        numbers = np.asarray([value.tolist() if hasattr(value, "tolist") else value for value in values])
    except (TypeError, ValueError):
        return None
    is_finite_vector = numbers.ndim == 1 and numbers.dtype.kind in "iuf" and bool(np.isfinite(numbers).all())
    return numbers.tolist() if is_finite_vector else None
