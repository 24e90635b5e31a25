"""Rectified: what every method shares that lets only positive gradients back through ReLUs."""

from collections import Counter
from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from camscope.errors import ModelError
from camscope.explainers.maps import Maps
from camscope.explainers.pixels import OneGradient
from camscope.hooks.rectifiers import Met, Rule, rectify
from camscope.targets import Score


class Rectified(OneGradient):
    """The gradient at the input, by another `rule` in every ReLU; a ModelError where there is none.

    ReLUs are found in the score's graph, however they were called: modules, functions, in place, ReLU6, a clamp or a
    threshold at 0. Of an activation that is none, such as a GELU, the gradient is its own, and a note says so.
    """

    rule: ClassVar[Rule]

    def of_gradient(self, x: Tensor, gradient: Tensor) -> Tensor:
        """The signal that arrives."""
        return gradient

    def maps(self, x: Tensor, scores: Sequence[Score]) -> list[Maps]:
        """The maps of several scores from one forward pass, one backward pass each."""
        met: list[Met] = []
        signals = self.gradients(x, scores, lambda values: met.append(rectify(values, self.rule)))
        notes = said(met[-1], self.title)  # of the pass whose graph reached the input
        return [self.map_of(x, *one, *notes) for one in zip(scores, signals, strict=True)]


def said(met: Met, title: str) -> list[str]:
    """What a result says of the ReLUs that were reached, and of what was not."""
    if not met.relus:
        found = _listed(met.others + met.hiding) or "no activation at all"
        raise ModelError(
            f"{title} changes the way back through ReLUs, and none can be reached in this model (what was found: {found}); "
            f"the map would be the plain gradient's: pass saliency, or a method that looks at a layer"
        )
    notes = [f"{met.relus.total()} ReLUs were reached: {_listed(met.relus)}"]
    if met.others:
        notes.append(f"activations that are no ReLUs, through which the gradient is their own: {_listed(met.others)}")
    if met.hiding:
        notes.append(f"ReLUs may be hidden, with the plain gradient, in {_listed(met.hiding)}")
    return notes


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{name} x {count}" for name, count in counts.most_common())
