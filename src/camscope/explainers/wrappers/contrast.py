"""Contrast: why one class rather than another."""

from collections.abc import Sequence

from torch import Tensor

from camscope.errors import TargetError
from camscope.explainers.base import Explainer
from camscope.explainers.maps import Maps
from camscope.explainers.wrappers.base import Wrapper
from camscope.targets import Difference, Question, Score


class Contrast(Wrapper):
    """Why `a` rather than `b`: the map of the difference of their scores. It takes no other target."""

    name = "contrast"

    def __init__(self, explainer: Explainer, a: int | str, b: int | str) -> None:
        super().__init__(explainer)
        self.explainer, self.a, self.b = explainer, a, b
        self._question = Difference(a, b)

    def asked(self, target: Question) -> Question:
        """The difference."""
        if target is not None:
            raise TargetError(
                f"Contrast asks why {self.a!r} rather than {self.b!r} and takes no other target; {target!r:.80} came"
            )
        return self.explainer.asked(self._question)

    def maps(self, x: Tensor, scores: Sequence[Score]) -> list[Maps]:
        """The inner method's."""
        return self.explainer.maps(x, scores)
