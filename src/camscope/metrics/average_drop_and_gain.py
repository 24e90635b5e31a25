"""Average drop and related metrics: how the output changes when the input x is multiplied by its map a.

The map a is the positive part of the attribution, divided by its maximum. A map with NaN or without a positive value
has no metric value. A constant map changes nothing.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from camscope.errors import GeometryError
from camscope.metrics.deletion_insertion import compute_road_gap_per_share
from camscope.metrics.faithfulness_correlation import correlate_tensor_rows
from camscope.metrics.metric_registry import MetricValues, register_metric
from camscope.metrics.model_scorer import OutputKind
from camscope.metrics.perturbation_test import NONFINITE_MAP, PerturbationTest, get_row_of_output_kind

GRAD_CAM_PLUS_PLUS_PAPER = "Chattopadhay et al. 2018, arXiv:1710.11063"
MAX_ROUNDING_STEPS = 64  # machine epsilons by which another batch size may change the output
NO_POSITIVE_VALUE = "nothing in the map is positive"
NONPOSITIVE_SCORE = "the output for the clean image is not positive: a relative drop is not defined"
NO_ROOM_FOR_GAIN = "the output for the clean image is already 1: it cannot increase"
NONFINITE_MASKED_MAP = "the map of the masked image contains NaN or infinity"
ARCC_SHARES = (0.2, 0.4, 0.6, 0.8)
_register = partial(register_metric, input_kind="perturbation_test")
CONSTANT_MAP = "the map of the clean or of the masked image is constant: their correlation is not defined"


@_register(
    "average-drop",
    title="Average Drop",
    formula="max(0, p(x) - p(x a)) / p(x)",
    paper=GRAD_CAM_PLUS_PLUS_PAPER,
    higher_is_better=False,
    chance_level="0 for a constant map",
)
def average_drop(test: PerturbationTest, output_kind: OutputKind = "probability") -> MetricValues:
    """Multiply each image by its map. Return the relative drop (N,) of the output.

    Args:
        test: The maps and the model.
        output_kind: "score" or "probability".

    Returns:
        One value for each image. 0 if the output does not fall, 1 if it falls to 0.

    >>> import torch
    >>> from camscope.metrics import PerturbationTest, scoring_scope
    >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 3))
    >>> x = torch.rand(2, 1, 4, 4)
    >>> with scoring_scope(model, x, 0) as scorer:
    ...     values = average_drop(PerturbationTest(x[:, 0], scorer))
    >>> len(values)
    2

    """
    clean, masked, undefined = _get_clean_and_masked_scores(test, output_kind)
    undefined[NONPOSITIVE_SCORE] = clean <= 0
    return test.build_metric_values(_compute_relative_drop(clean, masked), masked, undefined)


@_register(
    "average-increase",
    title="Average Increase",
    formula="1 if p(x a) > p(x), else 0",
    paper=GRAD_CAM_PLUS_PLUS_PAPER,
    chance_level="0 for a constant map",
)
def average_increase(test: PerturbationTest, output_kind: OutputKind = "probability") -> MetricValues:
    """Multiply each image by its map. Return 1 for each image (N,) whose output increases, and 0 for the others.

    Increases within rounding error do not count. The paper averages the values over images.

    Args:
        test: The maps and the model.
        output_kind: "score" or "probability".

    Returns:
        One value for each image.

    >>> import torch
    >>> from camscope.metrics import PerturbationTest, scoring_scope
    >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 3))
    >>> x = torch.rand(2, 1, 4, 4)
    >>> with scoring_scope(model, x, 0) as scorer:
    ...     values = average_increase(PerturbationTest(x[:, 0], scorer))
    >>> set(values.numbers) <= {0.0, 1.0}
    True

    """
    clean, masked, undefined = _get_clean_and_masked_scores(test, output_kind)
    increased = masked - clean > MAX_ROUNDING_STEPS * test.scorer.machine_epsilon_of_scores * clean.abs()
    return test.build_metric_values(increased.double(), masked, undefined)


@_register(
    "average-gain",
    title="Average Gain",
    formula="max(0, p(x a) - p(x)) / (1 - p(x))",
    paper="Zhang et al. 2024, arXiv:2301.07002",
    chance_level="0 for a constant map",
)
def average_gain(test: PerturbationTest, output_kind: OutputKind = "probability") -> MetricValues:
    """Multiply each image by its map. Return the relative gain (N,) of the probability, 0..1.

    Args:
        test: The maps and the model.
        output_kind: "score" or "probability".

    Returns:
        One value for each image.

    >>> import torch
    >>> from camscope.metrics import PerturbationTest, scoring_scope
    >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 3))
    >>> x = torch.rand(2, 1, 4, 4)
    >>> with scoring_scope(model, x, 0) as scorer:
    ...     values = average_gain(PerturbationTest(x[:, 0], scorer))
    >>> len(values)
    2

    """
    clean, masked, undefined = _get_clean_and_masked_scores(test, output_kind)
    room = 1 - clean
    gain = (masked - clean).clamp(min=0) / torch.where(room > 0, room, 1)
    return test.build_metric_values(gain, masked, {**undefined, NO_ROOM_FOR_GAIN: room <= 0})


@register_metric(
    "adcc",
    title="ADCC",
    input_kind="perturbation_test_and_maps",
    formula="3 / (1 / coherency + 1 / (1 - complexity) + 1 / (1 - average drop))",
    paper="Poppi et al. 2021, arXiv:2104.10252",
)
def adcc(
    test: PerturbationTest, compute_maps: Callable[[Tensor], Tensor], output_kind: OutputKind = "probability"
) -> MetricValues:
    """Return the harmonic mean (N,) of three terms: coherency, 1 - complexity and 1 - average drop. It lies in 0..1.

    The value is 0 if one of the three is 0. Complexity is the mean of the map a. Coherency is (1 + r) / 2, where r is the
    correlation of a with the map of the masked image x a. It is undefined if one of these maps is constant. `compute_maps`
    explains the classes of x.

    Args:
        test: The maps and the model.
        compute_maps: Function (N,C,*S) -> maps (N,*S) of the same method for other inputs.
        output_kind: "score" or "probability".

    Returns:
        One value for each image.

    Raises:
        GeometryError: `compute_maps` returns maps of another shape.

    >>> import torch
    >>> from camscope.metrics import PerturbationTest, scoring_scope
    >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 3))
    >>> x = torch.rand(2, 1, 4, 4)
    >>> with scoring_scope(model, x, 0) as scorer:
    ...     values = adcc(PerturbationTest(x[:, 0], scorer), lambda masked: masked[:, 0])
    >>> len(values)
    2

    """
    clean, masked, undefined = _get_clean_and_masked_scores(test, output_kind)
    coherency, simplicity, reasons = _compute_coherency_and_simplicity(test, compute_maps)
    kept = 1 - _compute_relative_drop(clean, masked)
    reasons[NONPOSITIVE_SCORE] = clean <= 0
    return test.build_metric_values(_compute_harmonic_mean(coherency, simplicity, kept), masked, undefined | reasons)


@register_metric(
    "arcc",
    title="ARCC",
    input_kind="perturbation_test_and_maps",
    formula="3 / (1 / coherency + 1 / (1 - complexity) + 1 / ROAD)",
    paper="Domeniconi et al. 2026, arXiv:2605.14641",
)
def arcc(
    test: PerturbationTest,
    compute_maps: Callable[[Tensor], Tensor],
    shares: Sequence[float] = ARCC_SHARES,
    noise_std: float = 0.01,
    output_kind: OutputKind = "probability",
) -> MetricValues:
    """Return the harmonic mean (N,) of three terms: coherency, 1 - complexity and ROAD. It lies in 0..1.

    The formula is that of `adcc`, with `road` over `shares` in place of 1 - average drop. The value is 0 if one of the three
    is not positive.

    Args:
        test: The maps and the model.
        compute_maps: Function (N,C,*S) -> maps (N,*S) of the same method for other inputs.
        shares: Shares of the regions that ROAD removes.
        noise_std: Noise of ROAD's imputation, in shares of the channel's standard deviation.
        output_kind: "score" or "probability".

    Returns:
        One value for each image.

    >>> import torch
    >>> from camscope.metrics import PerturbationTest, scoring_scope
    >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 3))
    >>> x = torch.rand(2, 1, 4, 4)
    >>> with scoring_scope(model, x, 0) as scorer:
    ...     values = arcc(PerturbationTest(x[:, 0], scorer), lambda masked: masked[:, 0], shares=[0.5])
    >>> len(values)
    2

    """
    _, _, undefined = _get_clean_and_masked_scores(test, output_kind)
    coherency, simplicity, reasons = _compute_coherency_and_simplicity(test, compute_maps)
    gap = compute_road_gap_per_share(test, shares, noise_std, output_kind)
    mean = _compute_harmonic_mean(coherency, simplicity, gap.mean(1))
    return test.build_metric_values(mean, gap, undefined | reasons)


class CoherencyAndSimplicity(NamedTuple):
    """Coherency and 1 - complexity of maps (N,) each. `undefined_by_reason` marks the images (N,) without a value."""

    coherency: Tensor
    simplicity: Tensor
    undefined_by_reason: dict[str, Tensor]


def _compute_coherency_and_simplicity(
    test: PerturbationTest, compute_maps: Callable[[Tensor], Tensor]
) -> CoherencyAndSimplicity:
    """Compute two terms for each map: coherency, and 1 - complexity. `compute_maps` explains the masked images."""
    a, x = test.normalized_maps, test.scorer.x
    masked_maps = compute_maps(x * a[:, None].to(x.dtype)).detach().to(a)
    if masked_maps.shape != a.shape:
        expected_shape = f"{tuple(a.shape)}, the size of the input"
        raise GeometryError(
            f"compute_maps returned maps of shape {tuple(masked_maps.shape)}; expected {expected_shape}"
        )
    clean_flat, masked_flat = a.flatten(1), masked_maps.flatten(1)
    correlation, constant = correlate_tensor_rows(clean_flat, masked_flat.clamp(min=0))
    undefined = {NONFINITE_MASKED_MAP: ~masked_flat.isfinite().all(1), CONSTANT_MAP: constant}
    return CoherencyAndSimplicity((1 + correlation) / 2, 1 - clean_flat.mean(1), undefined)


def _compute_harmonic_mean(*parts: Tensor) -> Tensor:
    """Return the harmonic mean (N,) of several numbers (N,). A number of 0 or less gives the mean 0."""
    smallest = torch.stack(parts).amin(0)
    harmonic = len(parts) / torch.stack([1 / torch.where(part > 0, part, 1) for part in parts]).sum(0)
    return torch.where(smallest > 0, harmonic, 0)


class CleanAndMaskedScores(NamedTuple):
    """Outputs (N,) for clean and for masked images. `undefined_by_reason` marks the images (N,) without a value."""

    clean: Tensor
    masked: Tensor
    undefined_by_reason: dict[str, Tensor]


def _get_clean_and_masked_scores(test: PerturbationTest, output_kind: OutputKind) -> CleanAndMaskedScores:
    """Return two outputs of the model: for the original images, and for the images multiplied by their maps."""
    nothing = ~(test.normalized_maps > 0).flatten(1).any(1)
    row, undefined = get_row_of_output_kind(output_kind), {NONFINITE_MAP: ~test.is_finite, NO_POSITIVE_VALUE: nothing}
    return CleanAndMaskedScores(test.scorer.clean_scores[row], test.scores_of_weighted_images[row], undefined)


def _compute_relative_drop(clean_scores: Tensor, scores_of_weighted_images: Tensor) -> Tensor:
    return (clean_scores - scores_of_weighted_images).clamp(min=0) / torch.where(clean_scores > 0, clean_scores, 1)
