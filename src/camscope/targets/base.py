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
from camscope.targets.classes import index_of, one_class, pair_of

Points = Callable[[ArrayLike], NDArray[Any]]
Names = Callable[[int], str]


@dataclass(frozen=True)
class Scene:
    """What a question may ask of the image that it is about.

    `input_size`, `image_size`: of the model's input and of the original, None where that is unknown; `to_input`,
    `to_image`: points (M,n) in array order, from the one to the other. `embed`: what the model makes of another image;
    `embed_text`: of a text, None where it knows none.
    """

    input_size: tuple[int, ...]
    image_size: tuple[int, ...] | None
    to_input: Points
    to_image: Points
    embed: Callable[[Any], Tensor]
    embed_text: Callable[[str], Tensor] | None = None


class Target(ABC):
    """A callable output -> (N,) that is asked the same of every pass.

    `in_scene` brings what is said of the original image to the model's input; `settled` fixes, on the first, clean output,
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
    def words(self, sample: int, name: Names) -> str:
        """The question of one sample in words; `name`: of a class."""

    def for_model(self, model: nn.Module) -> "Target":
        """The same question with what it needs to know of the model itself; called once for each score."""
        return self

    def in_scene(self, scene: Scene) -> "Target":
        """The same question of the model's input; the same where it says nothing of the original."""
        return self

    def settled(self, output: Any, size: Sequence[int], categories: Sequence[str] | None) -> "Target":
        """The same question with all that it leaves open fixed; `size`: of the model's input (*S)."""
        return self

    def viewed(self, flips: Sequence[int], size: Sequence[int]) -> "Target":
        """The settled question, of the input with these spatial axes flipped, then brought to `size`."""
        if self.dense:
            raise TargetError(
                f"{type(self).__name__} is of one place: write its viewed(flips, size), or explain one view"
            )
        return self


def numbers_in(values: Any) -> list[float] | None:
    """Several numbers, in whatever kind of row; None for anything else, or where one is not finite."""
    try:
        found = np.asarray([one.tolist() if hasattr(one, "tolist") else one for one in values])
    except (TypeError, ValueError):
        return None
    plain = found.ndim == 1 and found.dtype.kind in "iuf" and bool(np.isfinite(found).all())
    return found.tolist() if plain else None


@dataclass(frozen=True, eq=False)
class OfClass(Target):
    """A question of one class: an index, a name, or None, the one that scores most there. A target writes `scored`."""

    of: int | str | None = None
    classes: Tensor | None = field(default=None, kw_only=True, repr=False)

    def __post_init__(self) -> None:
        wanted = None if self.of is None else one_class(self.of, "of", type(self).__name__)
        object.__setattr__(self, "of", wanted)

    @abstractmethod
    def scored(self, output: Any) -> Tensor:
        """(N,K): what the class is chosen by."""

    def settled(self, output: Any, size: Sequence[int], categories: Sequence[str] | None) -> Self:
        """The class of each sample (N,), fixed."""
        scores = self.scored(output).detach()
        best = scores.argmax(1).tolist()
        found = [pair_of(self.of, top, scores.shape[1], categories)[0] for top in best]
        return replace(self, classes=torch.tensor(found, device=scores.device))

    def indices(self, scores: Tensor) -> Tensor:
        """(N,): the classes, those of this output where none are fixed."""
        if self.classes is not None:
            return self.classes
        if self.of is not None:
            return torch.full((len(scores),), index_of(self.of, scores.shape[1], None), device=scores.device)
        return scores.detach().argmax(1)

    def named(self, sample: int, name: Names) -> str:
        """The class of one sample."""
        return str(self.of) if self.classes is None else name(int(self.classes[sample]))
