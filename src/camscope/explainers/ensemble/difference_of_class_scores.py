"""`Contrast`: why one class and not another, by the difference of their scores."""

from collections.abc import Sequence

from torch import Tensor

from camscope.errors import TargetError
from camscope.explainers.core.base_explainer import Explainer
from camscope.explainers.core.maps_with_flags import AttributionMaps
from camscope.explainers.ensemble.wrapper import Wrapper
from camscope.targets import Difference, Score, TargetLike


class Contrast(Wrapper):
    """Explain class `a` rather than `b`: the map of the difference of their scores. No other target is accepted.

    Use it to see why the model decided for `a` and not for `b`. It costs one map of the inner method.

    Args:
        explainer: The method.
        a: Index or name of the class to explain.
        b: Index or name of the class that it is compared with.

    >>> from camscope import GradCAM
    >>> Contrast(GradCAM(model, "layer4"), "nodule", "effusion").explain(image).label
    'log-odds of nodule over effusion'

    """

    name = "contrast"

    def __init__(self, explainer: Explainer, a: int | str, b: int | str) -> None:
        super().__init__(explainer)
        self.explainer, self.a, self.b = explainer, a, b
        self._target = Difference(a, b)

    def resolve_target(self, target: TargetLike) -> TargetLike:
        """Return the difference of the two classes as the target. Raise TargetError if the caller passes a target."""
        if target is not None:
            raise TargetError(
                f"Contrast explains {self.a!r} rather than {self.b!r} and accepts no other target; got {target!r:.80}"
            )
        return self.explainer.resolve_target(self._target)

    def compute_maps(self, x: Tensor, scores: Sequence[Score]) -> list[AttributionMaps]:
        """Compute the maps of the inner explainer for the difference of the two classes."""
        return self.explainer.compute_maps(x, scores)
