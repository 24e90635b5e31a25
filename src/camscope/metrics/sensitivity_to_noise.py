"""Max-sensitivity and average sensitivity: how much a map changes under random noise on the input."""

from functools import partial

import numpy as np
import torch
from torch import Tensor

from camscope.errors import UndefinedError
from camscope.explainers.core.base_explainer import Explainer
from camscope.explainers.core.random_mixin import draw_seeds
from camscope.explainers.core.setting_checks import check_positive_integer, check_positive_number
from camscope.metrics.explain_changed_inputs import ExplainerProbe, require_single_sample
from camscope.metrics.metric_registry import FloatArray, register_metric, to_finite_array
from camscope.targets import TargetLike

_register_change = partial(register_metric, input_kind="explainer", upper_bound=None, higher_is_better=False)


@_register_change(
    "max-sensitivity",
    title="Max-Sensitivity",
    formula="max of |map(x + d) - map(x)| / |map(x)| over draws of d, |d| at most radius in each value; Euclidean norms",
    paper="Yeh et al. 2019, arXiv:1901.09392; here divided by the map's own norm, a Monte Carlo lower bound",
    chance_level="about 1.4 for maps of independent noise with mean zero",
)
def max_sensitivity(
    explainer: Explainer,
    x: Tensor,
    target: TargetLike = None,
    *,
    radius: float = 0.02,
    n_samples: int = 10,
    seed: int = 0,
) -> float:
    """Add random noise to x (1,C,*S). Return the largest relative change of its map, 0 or more.

    Args:
        explainer: The method.
        x: (1,C,*S) the clean input.
        target: What `Score` accepts.
        radius: Largest change of each value, in shares of the input's range.
        n_samples: Number of noisy inputs.
        seed: Seed of the noise.

    Returns:
        A relative change of the Euclidean norm.

    >>> from camscope import GradCAM, load_model
    >>> max_sensitivity(GradCAM(load_model("phantom"), "layer4"), torch.rand(1, 1, 64, 64), 1, n_samples=2) >= 0
    True

    """
    return float(_compute_sensitivities(explainer, x, target, radius, n_samples, seed).max())


@_register_change(
    "average-sensitivity",
    title="Average Sensitivity",
    formula="mean of |map(x + d) - map(x)| / |map(x)| over draws of d",
    paper="Yeh et al. 2019, arXiv:1901.09392, with the mean in place of the maximum",
    chance_level="about 1.4 for maps of independent noise with mean zero",
)
def average_sensitivity(
    explainer: Explainer,
    x: Tensor,
    target: TargetLike = None,
    *,
    radius: float = 0.02,
    n_samples: int = 10,
    seed: int = 0,
) -> float:
    """Add random noise to x (1,C,*S). Return the mean relative change of its map (see `max_sensitivity`).

    Args:
        explainer: The method.
        x: (1,C,*S) the clean input.
        target: What `Score` accepts.
        radius: Largest change of each value, in shares of the input's range.
        n_samples: Number of noisy inputs.
        seed: Seed of the noise.

    Returns:
        A relative change of the Euclidean norm, 0 or more.

    >>> from camscope import GradCAM, load_model
    >>> average_sensitivity(GradCAM(load_model("phantom"), "layer4"), torch.rand(1, 1, 64, 64), 1, n_samples=2) >= 0
    True

    """
    return float(_compute_sensitivities(explainer, x, target, radius, n_samples, seed).mean())


def _compute_sensitivities(
    explainer: Explainer, x: Tensor, target: TargetLike, radius: float, n_samples: int, seed: int
) -> FloatArray:
    """Return the relative change of the map for every noisy input (n_samples,)."""
    check_positive_number(radius=radius)
    check_positive_integer(n_samples=n_samples)
    probe = ExplainerProbe.from_explainer(explainer, require_single_sample(x), target)
    generator = torch.Generator(device="cpu")
    max_change = radius * float(x.max() - x.min())
    draws = [
        torch.rand(x.shape, generator=generator.manual_seed(draw_seed), dtype=torch.float32, device="cpu")
        for draw_seed in draw_seeds(n_samples, torch.Generator(device="cpu").manual_seed(seed))
    ]
    noisy = x + max_change * (2 * torch.cat(draws).to(x) - 1)
    clean_map = to_finite_array(probe.clean_maps).ravel()
    maps = to_finite_array(probe.compute_maps(noisy, [0] * n_samples)).reshape(n_samples, -1)
    norm = np.linalg.norm(clean_map)
    if not norm > 0:
        raise UndefinedError("the map is zero everywhere: its relative change is not defined")
    return np.asarray(np.linalg.norm(maps - clean_map, axis=1) / norm)
