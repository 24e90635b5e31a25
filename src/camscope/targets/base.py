"""Base classes of targets, and the image context that a target may use."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn

from camscope.errors import TargetError
from camscope.targets.classes import parse_class_label, resolve_class_index, resolve_class_pair

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


@dataclass(frozen=True, eq=False)
class ClassTarget(Target):
    """Base class of targets of one class: an index, a name, or None for the class with the highest candidate score."""

    label: int | str | None = None
    resolved_classes: Tensor | None = field(default=None, kw_only=True, repr=False)

    def __post_init__(self) -> None:
        label = None if self.label is None else parse_class_label(self.label, "label", type(self).__name__)
        object.__setattr__(self, "label", label)

    @abstractmethod
    def candidate_scores(self, output: Any) -> Tensor:
        """Compute the scores (N,K) by which the class is chosen."""

    def resolve(self, output: Any, input_size: Sequence[int], class_names: Sequence[str] | None) -> Self:
        """Return the target with the class of each sample (N,) fixed."""
        scores = self.candidate_scores(output).detach()
        best = scores.argmax(1).tolist()
        indices = [resolve_class_pair(self.label, top, scores.shape[1], class_names)[0] for top in best]
        return replace(self, resolved_classes=torch.tensor(indices, device=scores.device))

    def class_indices(self, scores: Tensor) -> Tensor:
        """Return the class of each sample (N,): the class fixed before, or else the one that this output gives."""
        if self.resolved_classes is not None:
            return self.resolved_classes
        if self.label is None:
            return scores.detach().argmax(1)
        index = resolve_class_index(self.label, scores.shape[1], None)
        return torch.full((len(scores),), index, device=scores.device)

    def describe_class(self, sample: int, class_name: ClassNameLookup) -> str:
        """Return the name of one sample's class."""
        return str(self.label) if self.resolved_classes is None else class_name(int(self.resolved_classes[sample]))
