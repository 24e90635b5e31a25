"""Target: a question of an output's own kind, which can say itself in words."""

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
    """What a question may ask of the image that it is about.

    `input_size`, `image_size`: of the model's input and of the original, None where that is unknown; `to_input`,
    `to_image`: points (M,n) in array order, from the one to the other. `embed_image`: what the model makes of another image;
    `embed_text`: of a text, None where it knows none.
    """

    input_size: tuple[int, ...]
    image_size: tuple[int, ...] | None
    to_input: PointTransform
    to_image: PointTransform
    embed_image: Callable[[Any], Tensor]
    embed_text: Callable[[str], Tensor] | None = None


class Target(ABC):
    """A callable output -> (N,) that is asked the same of every pass.

    `bind` brings what is said of the original image to the model's input; `resolve` fixes, on the first, clean output,
    what is left open, and raises TargetError where the output has no such thing.
    """

    @property
    def dense(self) -> bool:
        """Whether it is of one place among many that the output has an answer for."""
        return False

    @abstractmethod
    def __call__(self, output: Any) -> Tensor:
        """(N,): the score of each sample."""

    @abstractmethod
    def describe(self, sample: int, class_name: ClassNameLookup) -> str:
        """The question of one sample in words; `class_name`: of a class."""

    def bind_model(self, model: nn.Module) -> "Target":
        """The same question with what it needs to know of the model itself; called once for each score."""
        return self

    def bind(self, image_context: ImageContext) -> "Target":
        """The same question of the model's input; the same where it says nothing of the original."""
        return self

    def resolve(self, output: Any, input_size: Sequence[int], class_names: Sequence[str] | None) -> "Target":
        """The same question with all that it leaves open fixed; `input_size`: of the model's input (*S)."""
        return self

    def flipped(self, flips: Sequence[int], size: Sequence[int]) -> "Target":
        """The settled question, of the input with these spatial axes flipped, then brought to `size`."""
        if self.dense:
            raise TargetError(
                f"{type(self).__name__} is of one place: write its viewed(flips, size), or explain one view"
            )
        return self


def parse_finite_numbers(values: Any) -> list[float] | None:
    """Several numbers, in whatever kind of row; None for anything else, or where one is not finite."""
    try:
        found = np.asarray([one.tolist() if hasattr(one, "tolist") else one for one in values])
    except (TypeError, ValueError):
        return None
    plain = found.ndim == 1 and found.dtype.kind in "iuf" and bool(np.isfinite(found).all())
    return found.tolist() if plain else None


@dataclass(frozen=True, eq=False)
class ClassTarget(Target):
    """A question of one class: an index, a name, or None, the one that scores most there. A target writes `candidate_scores`."""

    label: int | str | None = None
    resolved_classes: Tensor | None = field(default=None, kw_only=True, repr=False)

    def __post_init__(self) -> None:
        wanted = None if self.label is None else parse_class_label(self.label, "label", type(self).__name__)
        object.__setattr__(self, "label", wanted)

    @abstractmethod
    def candidate_scores(self, output: Any) -> Tensor:
        """(N,K): what the class is chosen by."""

    def resolve(self, output: Any, input_size: Sequence[int], class_names: Sequence[str] | None) -> Self:
        """The class of each sample (N,), fixed."""
        scores = self.candidate_scores(output).detach()
        best = scores.argmax(1).tolist()
        found = [resolve_class_pair(self.label, top, scores.shape[1], class_names)[0] for top in best]
        return replace(self, resolved_classes=torch.tensor(found, device=scores.device))

    def class_indices(self, scores: Tensor) -> Tensor:
        """(N,): the classes, those of this output where none are fixed."""
        if self.resolved_classes is not None:
            return self.resolved_classes
        if self.label is not None:
            return torch.full(
                (len(scores),), resolve_class_index(self.label, scores.shape[1], None), device=scores.device
            )
        return scores.detach().argmax(1)

    def describe_class(self, sample: int, class_name: ClassNameLookup) -> str:
        """The class of one sample."""
        return str(self.label) if self.resolved_classes is None else class_name(int(self.resolved_classes[sample]))
