"""How much a map changes when it is computed again, or in a batch with other images."""

import numpy as np
import torch
from torch import Tensor

from camscope.errors import InputError, UndefinedError
from camscope.explainers.core.base_explainer import Explainer
from camscope.explainers.core.setting_checks import check_positive_integer
from camscope.metrics.explain_changed_inputs import ExplainerProbe, require_single_sample
from camscope.metrics.metric_registry import FloatArray, register_metric, to_finite_array
from camscope.targets import TargetLike


@register_metric(
    "determinism",
    formula="largest difference between repeated maps of one input / largest absolute value of the map",
    paper="repeated computation",
    input_kind="explainer",
    upper_bound=None,
    higher_is_better=False,
    chance_level="0 is expected",
)
def determinism(explainer: Explainer, x: Tensor, target: TargetLike = None, *, n_repeats: int = 3) -> float:
    """Compute the map of x (1,C,*S) several times. Return the largest relative difference. It is 0 if all are bit-exact.

    Args:
        explainer: The method.
        x: (1,C,*S) the input.
        target: What `Score` accepts.
        n_repeats: Number of repetitions.

    Returns:
        A relative change of the Euclidean norm, 0 for equal maps.

    >>> from camscope import GradCAM, load_model
    >>> determinism(GradCAM(load_model("phantom"), "layer4"), torch.rand(1, 1, 64, 64), 1) < 0.001
    True

    """
    check_positive_integer(n_repeats=n_repeats)
    probe = ExplainerProbe.from_explainer(explainer, require_single_sample(x), target)
    first, *repeats = map(
        to_finite_array, (probe.clean_maps[0], *(probe.compute_maps(x, [0])[0] for _ in range(n_repeats)))
    )
    return max(_compute_relative_difference(first, repeat) for repeat in repeats)


@register_metric(
    "batch-invariance",
    formula="largest difference between the maps computed alone and in a batch / largest absolute value of the map",
    paper="repeated computation in a batch",
    input_kind="explainer",
    upper_bound=None,
    higher_is_better=False,
    chance_level="rounding: about 1e-6 in float32",
)
def batch_invariance(
    explainer: Explainer, x: Tensor, target: TargetLike = None, *, other_images: Tensor | None = None
) -> float:
    """Compute the map of x (1,C,*S) alone, and again in a batch. Return the largest relative difference between the two.

    By default the batch holds x, x flipped along each axis, and x inverted.

    Args:
        explainer: The method.
        x: (1,C,*S) the input.
        target: What `Score` accepts.
        other_images: (M,C,*S) the other images of the batch. By default they are copies of x, flipped or inverted.

    Returns:
        A relative change of the Euclidean norm, 0 for a method that treats every image alone.

    Raises:
        InputError: The other images do not have the shape of x.

    >>> from camscope import GradCAM, load_model
    >>> batch_invariance(GradCAM(load_model("phantom"), "layer4"), torch.rand(1, 1, 64, 64), 1) < 0.01
    True

    """
    probe = ExplainerProbe.from_explainer(explainer, require_single_sample(x), target)
    images = torch.cat([*(x.flip(axis) for axis in range(2, x.ndim)), -x]) if other_images is None else other_images
    if images.shape[1:] != x.shape[1:] or not len(images):
        received = f"other_images is of shape {tuple(images.shape)} and x of shape {tuple(x.shape)}"
        raise InputError(f"{received}: expected one or more images of the same shape as x")
    alone, half = to_finite_array(probe.clean_maps[0]), len(images) // 2
    batch = torch.cat([images[:half], x, images[half:]])
    in_batch = probe.compute_maps(batch, [0] * len(batch), batch_size=len(batch))[half]
    return _compute_relative_difference(alone, to_finite_array(in_batch))


def _compute_relative_difference(first: FloatArray, second: FloatArray) -> float:
    """Return the largest absolute difference, divided by the largest absolute value of `first`."""
    peak = np.abs(first).max()
    if not peak > 0:
        raise UndefinedError("the map is zero everywhere: its relative difference is not defined")
    return float(np.abs(second - first).max() / peak)
