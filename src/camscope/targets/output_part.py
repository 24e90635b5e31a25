"""Output: a question of one part of what a model returns."""

import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from camscope.errors import TargetError
from camscope.pytree import leaves
from camscope.targets.base import Names, Scene, Target
from camscope.targets.classes import Question
from camscope.targets.score import Score


@dataclass(frozen=True, eq=False)
class Output(Target):
    """A question of one part of a structured output: `name` is a key, an index or an attribute, several with dots between.

    `target`: what is asked of that part, as of a model that returned it alone. Output("aux", "tabby").
    """

    name: str | int
    target: Question = None
    score: Score | None = field(default=None, kw_only=True, repr=False)

    def __post_init__(self) -> None:
        if isinstance(self.name, bool) or not isinstance(self.name, str | numbers.Integral):
            raise TargetError(
                f"Output({self.name!r}): expected a key, an index or an attribute, several with dots between"
            )
        object.__setattr__(self, "name", self.name if isinstance(self.name, str) else int(self.name))

    @property
    def dense(self) -> bool:
        """Whether the inner question is."""
        return isinstance(self.target, Target) and self.target.dense

    def viewed(self, flips: Sequence[int], size: Sequence[int]) -> "Output":
        """The inner question there."""
        return replace(self, score=self.score and self.score.viewed(flips, size))

    def for_model(self, model: nn.Module) -> "Output":
        """The inner question, for that model."""
        return replace(self, target=self.target.for_model(model)) if isinstance(self.target, Target) else self

    def in_scene(self, scene: Scene) -> "Output":
        """The inner question there."""
        return replace(self, target=self.target.in_scene(scene)) if isinstance(self.target, Target) else self

    def settled(self, output: Any, size: Sequence[int], categories: Sequence[str] | None) -> "Output":
        """The inner question, settled on the part."""
        score = Score(nn.Identity(), self.target, categories=categories, size=size)
        score.read(part := self._part(output), _samples(part))
        return replace(self, score=score)

    def __call__(self, output: Any) -> Tensor:
        """(N,)"""
        part = self._part(output)
        return (self.score or Score(nn.Identity(), self.target)).read(part, _samples(part))

    def words(self, sample: int, name: Names) -> str:
        """`tabby of the output 'aux'`"""
        inner = self.target if self.score is None else self.score.label_of(sample)
        return f"{inner} of the output {self.name!r}"

    def _part(self, output: Any) -> Any:
        part = output
        for step in [self.name] if isinstance(self.name, int) else self.name.split("."):
            part = _step(part, step, self.name)
        return part


def _samples(part: Any) -> int:
    return next((len(leaf) for _, leaf in leaves(part) if leaf.ndim), 0)


def _step(whole: Any, step: str | int, name: str | int) -> Any:
    if isinstance(whole, Mapping) and step in whole:
        return whole[step]
    if isinstance(whole, Sequence) and not isinstance(whole, str) and str(step).lstrip("-").isdigit():
        if -len(whole) <= int(step) < len(whole):
            return whole[int(step)]
    elif isinstance(step, str) and not step.startswith("_") and hasattr(whole, step):
        return getattr(whole, step)
    offered = (
        list(whole) if isinstance(whole, Mapping) else list(range(len(whole))) if isinstance(whole, Sequence) else []
    )
    raise TargetError(f"Output({name!r}): a {type(whole).__name__} has no {step!r}; it has {offered or 'no parts'}")
