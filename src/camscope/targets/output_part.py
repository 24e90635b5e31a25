"""OutputPart: the target for a part of a structured output, such as one key of a dict."""

import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from camscope.errors import TargetError
from camscope.pytree import iter_leaves
from camscope.targets.base import ClassNameLookup, ImageContext, Target
from camscope.targets.class_targets import TargetLike
from camscope.targets.score_per_sample import Score


@dataclass(frozen=True, eq=False)
class OutputPart(Target):
    """A target that reads only one part of the model's output, such as one key of a dict.

    Args:
        path: Key, index or attribute of the part. Several are joined by dots, such as "heads.2".
        target: The target within this part, as if the model returned only this part.
        part_score: Score of the part, which `resolve_choices` sets.

    Raises:
        TargetError: `path` is no key, index or attribute.

    >>> part = OutputPart("aux", 1)
    >>> part({"aux": Tensor([[3.0, 5.0]]), "out": None}).tolist()
    [5.0]

    """

    path: str | int
    target: TargetLike = None
    part_score: Score | None = field(default=None, kw_only=True, repr=False)

    def __post_init__(self) -> None:
        if isinstance(self.path, bool) or not isinstance(self.path, str | numbers.Integral):
            raise TargetError(
                f"OutputPart({self.path!r}): expected a key, an index or an attribute, or several joined by dots"
            )
        object.__setattr__(self, "path", self.path if isinstance(self.path, str) else int(self.path))

    @property
    def selects_positions(self) -> bool:
        """Whether the inner target selects some of many positions of the output."""
        return isinstance(self.target, Target) and self.target.selects_positions

    def flipped(self, flips: Sequence[int], size: Sequence[int]) -> "OutputPart":
        """Return a target whose inner target is flipped."""
        return replace(self, part_score=self.part_score and self.part_score.flipped(flips, size))

    def prepare_for_model(self, model: nn.Module) -> "OutputPart":
        """Return a target whose inner target is prepared for the model."""
        return replace(self, target=self.target.prepare_for_model(model)) if isinstance(self.target, Target) else self

    def prepare_for_image(self, image_context: ImageContext) -> "OutputPart":
        """Return a target whose inner target is prepared for the image."""
        return (
            replace(self, target=self.target.prepare_for_image(image_context))
            if isinstance(self.target, Target)
            else self
        )

    def resolve_choices(
        self, output: Any, input_size: Sequence[int], class_names: Sequence[str] | None
    ) -> "OutputPart":
        """Return a target whose inner target has made its choices. The inner target sees only the selected part of the output."""
        score = Score(nn.Identity(), self.target, class_names=class_names, input_size=input_size)
        score.read_score(part := self._select_part(output), _count_samples(part))
        return replace(self, part_score=score)

    def __call__(self, output: Any) -> Tensor:
        """Compute the score of each sample (N,)."""
        part = self._select_part(output)
        return (self.part_score or Score(nn.Identity(), self.target)).read_score(part, _count_samples(part))

    def describe(self, sample: int, class_name: ClassNameLookup) -> str:
        """Return a description of the target, such as `tabby of the output 'aux'`."""
        inner = self.target if self.part_score is None else self.part_score.describe(sample)
        return f"{inner} of the output {self.path!r}"

    def _select_part(self, output: Any) -> Any:
        """Return the part of the output to which `path` leads."""
        part = output
        for key in [self.path] if isinstance(self.path, int) else self.path.split("."):
            part = self._get_part_by_key(part, key)
        return part

    def _get_part_by_key(self, container: Any, key: str | int) -> Any:
        """Return a part of an output by its key, index or attribute. Raise a TargetError if it is missing."""
        keys: list[Any] = list(container) if isinstance(container, Mapping) else []
        if key in keys:
            return container[key]
        if isinstance(container, Sequence) and not isinstance(container, str):
            keys = list(range(len(container)))
            if str(key).lstrip("-").isdigit() and -len(keys) <= int(key) < len(keys):
                return container[int(key)]
        if isinstance(key, str) and not key.startswith("_") and hasattr(container, key):
            return getattr(container, key)
        kind = type(container).__name__
        raise TargetError(f"OutputPart({self.path!r}): a {kind} has no {key!r}; it has {keys or 'no parts'}")


def _count_samples(output_part: Any) -> int:
    return next((len(leaf) for _, leaf in iter_leaves(output_part) if leaf.ndim), 0)
