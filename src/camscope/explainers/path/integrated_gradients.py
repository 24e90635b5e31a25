"""Integrated gradients: the mean gradient between a baseline and the input."""

from torch import Tensor

from camscope.explainers.core.base_explainer import register
from camscope.explainers.core.perturbed_evaluator import PerturbedEvaluator
from camscope.explainers.core.validated_setting_types import PositiveInteger, PositiveNumber
from camscope.explainers.path.additive_explainer import AdditiveAttribution, BaselinePathExplainer
from camscope.explainers.path.straight_line_integral import integrate_straight_line


@register
class IntegratedGradients(BaselinePathExplainer):
    """Mean gradient between a baseline x' and the input x, times x - x' (Sundararajan et al. 2017, eq. 3).

    The map is (x - x') Σ_j ∂f(x' + (j - ½)/m (x - x'))/∂x / m. The authors take gradients at the ends of the steps.
    Midpoints are exact if the score is a polynomial of degree two. Use it if the map must add up to the change of the
    score from a meaningful baseline.

    Args:
        n_steps: Number m of steps.
        tolerance: Triple the steps until the gap between the map's sum and the score's change is at most this share of
            the change. Computed gradients are reused. A note reports if 2^14 steps are not enough. None: no check.

    >>> explanation = IntegratedGradients(model, n_steps=10, baseline="black").explain(image, "nodule")
    >>> sorted(explanation.diagnostics)
    ['completeness_gap', 'gradients', 'score_change']

    """

    name, title, paper = "integratedgradients", "Integrated Gradients", "arXiv:1703.01365"
    forward_passes, backward_passes = "2 + n_steps", "n_steps"
    n_steps: PositiveInteger = 50
    tolerance: PositiveNumber | None = None

    def integrate_path(
        self, evaluator: PerturbedEvaluator, sample: int, baseline: Tensor, score_change: Tensor
    ) -> AdditiveAttribution:
        """Integrate gradients along the straight line from the baseline to the sample."""
        return integrate_straight_line(evaluator, sample, baseline, score_change, self.n_steps, self.tolerance)
