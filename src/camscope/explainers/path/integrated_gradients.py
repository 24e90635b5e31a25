"""Integrated gradients: the mean gradient between a baseline and the input."""

import torch
from torch import Tensor

from camscope.errors import InputError
from camscope.explainers.core.base_explainer import register
from camscope.explainers.core.evaluation_context import check_finite
from camscope.explainers.core.perturbed_evaluator import PerturbedEvaluator
from camscope.explainers.core.validated_setting_types import PositiveInteger, PositiveNumber
from camscope.explainers.path.additive_explainer import AdditiveAttribution, BaselinePathExplainer
from camscope.explainers.path.straight_line_integral import compute_step_midpoints, integrate_straight_line
from camscope.hooks.input_gradients import compute_gradient_with_graph, connect_input_leaf
from camscope.targets import Score, full_precision


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
    differentiable = True
    n_steps: PositiveInteger = 50
    tolerance: PositiveNumber | None = None

    def compute_differentiable_map(self, x: Tensor, score: Score) -> Tensor:
        """Compute the map (N,*S) with its graph. One pass of the batch per step and baseline."""
        if self.tolerance is not None:
            raise InputError(
                f"tolerance={self.tolerance:g}: a differentiable map has a fixed number of steps; pass n_steps= and "
                "tolerance=None"
            )
        check_finite("the score", score(x), self.on_nonfinite)  # the clean pass fixes the class
        parts = []
        for baseline in self.build_baselines(x):
            path, shares = x - baseline, compute_step_midpoints(self.n_steps).tolist()
            leaves = [connect_input_leaf(baseline + path * share) for share in shares]
            gradients = [compute_gradient_with_graph(score(leaf.clone()), leaf) for leaf in leaves]
            parts.append(full_precision(path) * torch.stack(gradients).mean(0))
        return self.reduce_channels(torch.stack(parts).mean(0))

    def integrate_path(
        self, evaluator: PerturbedEvaluator, sample: int, baseline: Tensor, score_change: Tensor
    ) -> AdditiveAttribution:
        """Integrate gradients along the straight line from the baseline to the sample."""
        return integrate_straight_line(evaluator, sample, baseline, score_change, self.n_steps, self.tolerance)
