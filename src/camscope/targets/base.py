"""Base classes of targets, and the image context that a target may use."""

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
    """What a target may use of the image that is explained.

    `input_size` and `image_size` are the sizes of the model's input and of the original image, None where the latter is unknown.
    `to_input` and `to_image` map points (M,n) in array order between the two. `embed_image` returns the model's embedding of
    another image. `embed_text` returns the embedding of a text, or is missing (None) where the model has no text encoder.
    """

    input_size: tuple[int, ...]
    image_size: tuple[int, ...] | None
    to_input: PointTransform
    to_image: PointTransform
    embed_image: Callable[[Any], Tensor]
    embed_text: Callable[[str], Tensor] | None = None


class Target(ABC):
    """A callable output -> (N,) whose choices are fixed by the first, clean forward pass.

    `bind` converts coordinates of the original image to the model's input. `resolve` fixes every choice that is left open, from
    the first output, and raises TargetError where the output has no such thing.
    """

    @property
    def dense(self) -> bool:
        """Whether the target is one place among many that the output has a score for."""
        return False

    @abstractmethod
    def __call__(self, output: Any) -> Tensor:
        """Compute the score of each sample (N,)."""

    @abstractmethod
    def describe(self, sample: int, class_name: ClassNameLookup) -> str:
        """Describe the target of one sample as text. `class_name` returns the name of a class index."""

    def bind_model(self, model: nn.Module) -> "Target":
        """Return the target with the facts of the model that it needs. This is called once for each score."""
        return self

    def bind(self, image_context: ImageContext) -> "Target":
        """Return the target in coordinates of the model's input."""
        return self

    def resolve(self, output: Any, input_size: Sequence[int], class_names: Sequence[str] | None) -> "Target":
        """Return the target with every open choice fixed. `input_size` is that of the model's input (*S)."""
        return self

    def flipped(self, flips: Sequence[int], size: Sequence[int]) -> "Target":
        """Return the resolved target for an input with these spatial axes flipped and then resized to `size`."""
        if self.dense:
            raise TargetError(
                f"{type(self).__name__} is one place in the image and does not implement flipped(flips, size): implement it, or "
                "explain without flips"
            )
        return self


def parse_finite_numbers(values: Any) -> list[float] | None:
    """Return a sequence of finite numbers as a list of floats or ints, or None for anything else."""
    try:
        numbers = np.asarray([value.tolist() if hasattr(value, "tolist") else value for value in values])
    except (TypeError, ValueError):
        return None
    is_finite_vector = numbers.ndim == 1 and numbers.dtype.kind in "iuf" and bool(np.isfinite(numbers).all())
    return numbers.tolist() if is_finite_vector else None
