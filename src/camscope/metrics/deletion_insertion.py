"""Metrics from the model's output while the regions of a map are removed or shown step by step.

Deletion, insertion, AOPC, necessity, sufficiency and ROAD. `output_kind` is "probability" (of the class) or "score".
Probabilities give values in 0..1, and differences of probabilities in -1..1. ROAD always uses `NoisyLinearImputation`.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from camscope.errors import InputError
from camscope.explainers.core.setting_checks import check_positive_integer
from camscope.metrics.imputation import NoisyLinearImputation
from camscope.metrics.metric_registry import MetricValues, register_metric
from camscope.metrics.model_scorer import OutputKind
from camscope.metrics.perturbation_test import PerturbationTest, RemovalOrder, get_row_of_output_kind

RANDOM_ORDER_LEVEL = "the value of a random order, which is that of a constant map"
_register = partial(
    register_metric, input_kind="perturbation_test", chance_level=RANDOM_ORDER_LEVEL, uses_imputation=True
)


def removal_curve(
    test: PerturbationTest, order: RemovalOrder = "strongest", output_kind: OutputKind = "probability"
) -> Tensor:
    """Remove regions step by step in the given order. Return the model's output after each step (N, steps + 1).

    Args:
        test: The maps and the model.
        order: "strongest" or "weakest" regions first.
        output_kind: "score" or "probability".

    Returns:
        (N, steps + 1) float64, the first column of the unchanged input.

    >>> import torch
    >>> from camscope.metrics import PerturbationTest, scoring_scope
    >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 3))
    >>> x = torch.rand(2, 1, 4, 4)
    >>> with scoring_scope(model, x, 0) as scorer:
    ...     values = removal_curve(PerturbationTest(x[:, 0], scorer, n_steps=4))
    >>> values.shape
    torch.Size([2, 5])

    """
    return test.score_after_removal(order, test.removal_counts)[get_row_of_output_kind(output_kind)]


@_register(
    "deletion",
    formula="area under p(x without the map's first k of n regions) over k / n (trapezoidal rule)",
    paper="Petsiuk et al. 2018, arXiv:1806.07421; the curve is MoRF, Samek et al. 2017, arXiv:1509.06321",
    higher_is_better=False,
)
def deletion(test: PerturbationTest, output_kind: OutputKind = "probability") -> MetricValues:
    """Remove regions from strongest to weakest. Return the area (N,) under the curve of the model's output.

    Args:
        test: The maps and the model.
        output_kind: "score" or "probability".

    Returns:
        One value for each image. Lower is better.

    >>> import torch
    >>> from camscope.metrics import PerturbationTest, scoring_scope
    >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 3))
    >>> x = torch.rand(2, 1, 4, 4)
    >>> with scoring_scope(model, x, 0) as scorer:
    ...     values = deletion(PerturbationTest(x[:, 0], scorer))
    >>> len(values)
    2

    """
    values = removal_curve(test, "strongest", output_kind)
    return test.build_metric_values(_compute_area_under_curve(test, values), values)


@_register(
    "insertion",
    formula="area under p(the imputed image with the map's first k of n regions shown) over k / n (trapezoidal rule)",
    paper="Petsiuk et al. 2018, arXiv:1806.07421; the reversed curve is LeRF, Samek et al. 2017, arXiv:1509.06321",
)
def insertion(test: PerturbationTest, output_kind: OutputKind = "probability") -> MetricValues:
    """Show regions from strongest to weakest. Return the area (N,) under the curve of the model's output.

    To show the first k regions is to remove the last n - k. The curve is therefore LeRF backwards, with the same area.

    Args:
        test: The maps and the model.
        output_kind: "score" or "probability".

    Returns:
        One value for each image. Higher is better.

    >>> import torch
    >>> from camscope.metrics import PerturbationTest, scoring_scope
    >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 3))
    >>> x = torch.rand(2, 1, 4, 4)
    >>> with scoring_scope(model, x, 0) as scorer:
    ...     values = insertion(PerturbationTest(x[:, 0], scorer))
    >>> len(values)
    2

    """
    values = removal_curve(test, "weakest", output_kind)
    return test.build_metric_values(_compute_area_under_curve(test, values), values)


@_register(
    "lerf-morf-gap",
    title="LeRF-MoRF gap",
    formula="area between LeRF and MoRF: insertion - deletion under one imputation",
    paper="Samek et al. 2017, arXiv:1509.06321",
    lower_bound=-1.0,
    chance_level="0, in expectation over orders",
)
def lerf_morf_gap(test: PerturbationTest, output_kind: OutputKind = "probability") -> MetricValues:
    """Return the area (N,) between the LeRF and the MoRF curve. Effects of the imputation itself cancel out.

    Args:
        test: The maps and the model.
        output_kind: "score" or "probability".

    Returns:
        One value for each image. Higher is better; 0 for a random order.

    >>> import torch
    >>> from camscope.metrics import PerturbationTest, scoring_scope
    >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 3))
    >>> x = torch.rand(2, 1, 4, 4)
    >>> with scoring_scope(model, x, 0) as scorer:
    ...     values = lerf_morf_gap(PerturbationTest(x[:, 0], scorer))
    >>> len(values)
    2

    """
    gap = removal_curve(test, "weakest", output_kind) - removal_curve(test, "strongest", output_kind)
    return test.build_metric_values(_compute_area_under_curve(test, gap), gap)


@_register(
    "aopc",
    title="AOPC",
    formula="1 / (L + 1) Σ_k p(x) - p(x without the map's first k regions), k = 0 … L",
    paper="Samek et al. 2017, arXiv:1509.06321",
    lower_bound=-1.0,
)
def aopc(test: PerturbationTest, n_regions: int | None = None, output_kind: OutputKind = "probability") -> MetricValues:
    """Return the mean loss of output (N,) along the MoRF curve. For a probability, it lies in -1..1.

    The paper uses region_size=9 and n_regions=100.

    Args:
        test: The maps and the model.
        n_regions: Number L of single regions. None: the steps of the curve.
        output_kind: "score" or "probability".

    Returns:
        One value for each image.

    >>> import torch
    >>> from camscope.metrics import PerturbationTest, scoring_scope
    >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 3))
    >>> x = torch.rand(2, 1, 4, 4)
    >>> with scoring_scope(model, x, 0) as scorer:
    ...     values = aopc(PerturbationTest(x[:, 0], scorer), n_regions=4)
    >>> len(values)
    2

    """
    check_positive_integer(None, n_regions=n_regions)
    counts = test.removal_counts if n_regions is None else list(range(min(n_regions, test.n_regions) + 1))
    values = test.score_after_removal("strongest", counts)[get_row_of_output_kind(output_kind)]
    return test.build_metric_values((values[:, :1] - values).mean(1), values)


@_register(
    "necessity",
    formula="p(x) - p(x without a share of the regions, the strongest first)",
    paper="comprehensiveness of DeYoung et al. 2020, arXiv:1911.03429",
    lower_bound=-1.0,
)
def necessity(test: PerturbationTest, share: float = 0.2, output_kind: OutputKind = "probability") -> MetricValues:
    """Remove the strongest `share` of the regions. Return how much the output (N,) falls.

    Args:
        test: The maps and the model.
        share: The share of the regions, above 0 and below 1.
        output_kind: "score" or "probability".

    Returns:
        One value for each image.

    >>> import torch
    >>> from camscope.metrics import PerturbationTest, scoring_scope
    >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 3))
    >>> x = torch.rand(2, 1, 4, 4)
    >>> with scoring_scope(model, x, 0) as scorer:
    ...     values = necessity(PerturbationTest(x[:, 0], scorer))
    >>> len(values)
    2

    """
    return _compute_score_loss_after_removal(test, "strongest", test.count_regions(share), output_kind)


@_register(
    "sufficiency",
    formula="p(x) - p(only a share of the regions, the strongest first)",
    paper="sufficiency of DeYoung et al. 2020, arXiv:1911.03429",
    lower_bound=-1.0,
    higher_is_better=False,
)
def sufficiency(test: PerturbationTest, share: float = 0.2, output_kind: OutputKind = "probability") -> MetricValues:
    """Show only the strongest `share` of the regions. Return how much the output (N,) falls.

    Args:
        test: The maps and the model.
        share: The share of the regions, above 0 and below 1.
        output_kind: "score" or "probability".

    Returns:
        One value for each image.

    >>> import torch
    >>> from camscope.metrics import PerturbationTest, scoring_scope
    >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 3))
    >>> x = torch.rand(2, 1, 4, 4)
    >>> with scoring_scope(model, x, 0) as scorer:
    ...     values = sufficiency(PerturbationTest(x[:, 0], scorer))
    >>> len(values)
    2

    """
    return _compute_score_loss_after_removal(test, "weakest", test.n_regions - test.count_regions(share), output_kind)


def _compute_score_loss_after_removal(
    test: PerturbationTest, order: RemovalOrder, n_removed: int, output_kind: OutputKind
) -> MetricValues:
    """Remove `n_removed` regions in the given order. Return how much the output falls."""
    values = test.score_after_removal(order, [0, n_removed])[get_row_of_output_kind(output_kind)]
    return test.build_metric_values(values[:, 0] - values[:, 1], values)


def _compute_area_under_curve(test: PerturbationTest, values: Tensor) -> Tensor:
    """Return the area (N,) under each curve (N,points). The horizontal axis is the share of removed regions."""
    shares = torch.tensor(test.removal_counts, dtype=values.dtype, device=values.device) / test.n_regions
    return torch.trapezoid(values, shares, dim=1)


_register_road = partial(_register, paper="Rong et al. 2022, arXiv:2202.00449", uses_imputation=False)
ROAD_SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


@_register_road(
    "road-morf",
    title="ROAD (MoRF)",
    formula="mean over shares of p(x without the strongest share of the regions)",
    higher_is_better=False,
)
def road_morf(
    test: PerturbationTest,
    shares: Sequence[float] = ROAD_SHARES,
    noise_std: float = 0.01,
    output_kind: OutputKind = "probability",
) -> MetricValues:
    """Remove the strongest regions. Return the mean output (N,). For a probability, it lies in 0..1.

    Args:
        test: The maps and the model.
        shares: Shares of the regions that are removed.
        noise_std: Noise of the imputation, in shares of the channel's standard deviation.
        output_kind: "score" or "probability".

    Returns:
        One value for each image.

    >>> import torch
    >>> from camscope.metrics import PerturbationTest, scoring_scope
    >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 3))
    >>> x = torch.rand(2, 1, 4, 4)
    >>> with scoring_scope(model, x, 0) as scorer:
    ...     values = road_morf(PerturbationTest(x[:, 0], scorer), shares=[0.5])
    >>> len(values)
    2

    """
    return _compute_mean_road_score(test, "strongest", shares, noise_std, output_kind)


@_register_road(
    "road-lerf",
    title="ROAD (LeRF)",
    formula="mean over shares of p(x without the weakest share of the regions)",
)
def road_lerf(
    test: PerturbationTest,
    shares: Sequence[float] = ROAD_SHARES,
    noise_std: float = 0.01,
    output_kind: OutputKind = "probability",
) -> MetricValues:
    """Remove the weakest regions. Return the mean output (N,). See `road_morf`.

    Args:
        test: The maps and the model.
        shares: Shares of the regions that are removed.
        noise_std: Noise of the imputation, in shares of the channel's standard deviation.
        output_kind: "score" or "probability".

    Returns:
        One value for each image.

    >>> import torch
    >>> from camscope.metrics import PerturbationTest, scoring_scope
    >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 3))
    >>> x = torch.rand(2, 1, 4, 4)
    >>> with scoring_scope(model, x, 0) as scorer:
    ...     values = road_lerf(PerturbationTest(x[:, 0], scorer), shares=[0.5])
    >>> len(values)
    2

    """
    return _compute_mean_road_score(test, "weakest", shares, noise_std, output_kind)


@_register_road(
    "road",
    title="ROAD",
    formula="road-lerf - road-morf",
    lower_bound=-1.0,
    chance_level="0, in expectation over orders",
)
def road(
    test: PerturbationTest,
    shares: Sequence[float] = ROAD_SHARES,
    noise_std: float = 0.01,
    output_kind: OutputKind = "probability",
) -> MetricValues:
    """Return the mean output without the weakest regions, minus that without the strongest (N,). Probabilities give -1..1.

    Args:
        test: The maps and the model.
        shares: Shares of the regions that are removed.
        noise_std: Noise of the imputation, in shares of the channel's standard deviation.
        output_kind: "score" or "probability".

    Returns:
        One value for each image.

    >>> import torch
    >>> from camscope.metrics import PerturbationTest, scoring_scope
    >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 3))
    >>> x = torch.rand(2, 1, 4, 4)
    >>> with scoring_scope(model, x, 0) as scorer:
    ...     values = road(PerturbationTest(x[:, 0], scorer), shares=[0.5])
    >>> len(values)
    2

    """
    gap = compute_road_gap_per_share(test, shares, noise_std, output_kind)
    return test.build_metric_values(gap.mean(1), gap)


def compute_road_gap_per_share(
    test: PerturbationTest, shares: Sequence[float], noise_std: float, output_kind: OutputKind
) -> Tensor:
    """Remove the weakest regions, or the strongest regions. Return the difference of the two outputs (N,shares)."""
    weakest, strongest = (
        _score_after_road_imputation(test, order, shares, noise_std, output_kind) for order in ("weakest", "strongest")
    )
    return weakest - strongest


def _compute_mean_road_score(
    test: PerturbationTest,
    order: RemovalOrder,
    shares: Sequence[float],
    noise_std: float,
    output_kind: OutputKind,
) -> MetricValues:
    """Remove several shares of the regions in one order. Return the mean output (N,) over the shares."""
    scores = _score_after_road_imputation(test, order, shares, noise_std, output_kind)
    return test.build_metric_values(scores.mean(1), scores)


def _score_after_road_imputation(
    test: PerturbationTest, order: RemovalOrder, shares: Sequence[float], noise_std: float, output_kind: OutputKind
) -> Tensor:
    """Impute several shares of the regions, one share at a time. Return the model's output for each share (N,shares)."""
    if not len(shares):
        raise InputError("shares is empty: pass at least one share, such as 0.2")
    counts = [test.count_regions(share, "shares") for share in shares]
    imputed = test.with_imputation(NoisyLinearImputation(noise_std))
    return imputed.score_after_removal(order, counts)[get_row_of_output_kind(output_kind)]
