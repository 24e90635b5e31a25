"""Deletion, insertion, ROAD and masking: the answer as the regions of a map are removed or shown.

Removal: what becomes of the answer as a map's regions are removed one after the other, or shown.

The number of each is that of the trial's fill and steps. `label`: "probability", see `with_target.Score.chance`, or the "score"
itself, whose scale is the model's own. All of them use the same passes; the points of a curve are equally far apart.
Undefined for a map with NaN; a constant one, or one of zeros, is a random order.

ROAD: removed pixels are imputed from their neighbours, so that the shape of what is removed does not give them away.

Regions removed in the map's order, at several shares; the fill is always `NoisyLinearImputation`, whatever the trial's. The authors
count how many images keep their class; an image by itself has a probability.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from camscope.errors import InputError
from camscope.explainers.core.evaluation_context import check_positive_integer
from camscope.metrics.base import MetricValues, register_metric
from camscope.metrics.imputation import NoisyLinearImputation
from camscope.metrics.model_scorer import OutputKind
from camscope.metrics.perturbation_test import PerturbationTest, RemovalOrder, get_score_row

RANDOM_ORDER_LEVEL = "what a random order gets, that of a constant map"


def removal_curve(
    test: PerturbationTest, order: RemovalOrder = "strongest", output_kind: OutputKind = "probability"
) -> Tensor:
    """(N,steps + 1): what is left of the answer as regions are removed, the strongest first (MoRF) or the weakest (LeRF)."""
    return test.score_after_removal(order, test.removal_counts)[get_score_row(output_kind)]


@register_metric(
    "deletion",
    title="Deletion",
    input_kind="perturbation_test",
    formula="the area under p(x without the map's first k of n regions) over k / n in 0..1, by trapezoids",
    paper="Petsiuk et al. 2018, arXiv:1806.07421; the curve is MoRF, Samek et al. 2017, arXiv:1509.06321",
    higher_is_better=False,
    chance_level=RANDOM_ORDER_LEVEL,
    uses_imputation=True,
)
def deletion(test: PerturbationTest, output_kind: OutputKind = "probability") -> MetricValues:
    """(N,): 0..1 of a probability. The curve's first point is the image, the last one the fill."""
    values = removal_curve(test, "strongest", output_kind)
    return test.build_values(_compute_area_under_curve(test, values), values)


@register_metric(
    "insertion",
    title="Insertion",
    input_kind="perturbation_test",
    formula="the area under p(the fill with the map's first k of n regions shown) over k / n in 0..1, by trapezoids",
    paper="Petsiuk et al. 2018, arXiv:1806.07421; backwards the curve is LeRF, Samek et al. 2017, arXiv:1509.06321",
    chance_level=RANDOM_ORDER_LEVEL,
    uses_imputation=True,
)
def insertion(test: PerturbationTest, output_kind: OutputKind = "probability") -> MetricValues:
    """(N,): 0..1 of a probability. To show the first k is to remove the last n - k: the curve is LeRF, and so is its area."""
    values = removal_curve(test, "weakest", output_kind)
    return test.build_values(_compute_area_under_curve(test, values), values)


@register_metric(
    "lerf-morf-gap",
    title="LeRF-MoRF gap",
    input_kind="perturbation_test",
    formula="the area between LeRF and MoRF: with one fill, insertion - deletion",
    paper="Samek et al. 2017, arXiv:1509.06321",
    lower_bound=-1.0,
    chance_level="0, in expectation over orders",
    uses_imputation=True,
)
def lerf_morf_gap(test: PerturbationTest, output_kind: OutputKind = "probability") -> MetricValues:
    """(N,): -1..1 of a probability. What the fill does to every order alike is in both curves, and cancels."""
    gap = removal_curve(test, "weakest", output_kind) - removal_curve(test, "strongest", output_kind)
    return test.build_values(_compute_area_under_curve(test, gap), gap)


@register_metric(
    "aopc",
    title="AOPC",
    input_kind="perturbation_test",
    formula="1 / (L + 1) Σ_k p(x) - p(x without the map's first k regions), k = 0 … L",
    paper="Samek et al. 2017, arXiv:1509.06321",
    lower_bound=-1.0,
    chance_level=RANDOM_ORDER_LEVEL,
    uses_imputation=True,
)
def aopc(test: PerturbationTest, n_regions: int | None = None, output_kind: OutputKind = "probability") -> MetricValues:
    """(N,): -1..1 of a probability. `n_regions`: L, single regions; None: the points of the curve, L of which are steps.

    As in the paper: a trial with region=9, and first=100.
    """
    check_positive_integer(None, n_regions=n_regions)
    counts = test.removal_counts if n_regions is None else list(range(min(n_regions, test.n_regions) + 1))
    values = test.score_after_removal("strongest", counts)[get_score_row(output_kind)]
    return test.build_values((values[:, :1] - values).mean(1), values)


@register_metric(
    "necessity",
    title="Necessity",
    input_kind="perturbation_test",
    formula="p(x) - p(x without the map's first regions, a share of them)",
    paper="comprehensiveness of DeYoung et al. 2020, arXiv:1911.03429",
    lower_bound=-1.0,
    chance_level=RANDOM_ORDER_LEVEL,
    uses_imputation=True,
)
def necessity(test: PerturbationTest, share: float = 0.2, output_kind: OutputKind = "probability") -> MetricValues:
    """(N,): -1..1 of a probability. `share`: between 0 and 1."""
    return _compute_score_drop(test, "strongest", test.count_regions(share), output_kind)


@register_metric(
    "sufficiency",
    title="Sufficiency",
    input_kind="perturbation_test",
    formula="p(x) - p(only the map's first regions, a share of them)",
    paper="sufficiency of DeYoung et al. 2020, arXiv:1911.03429",
    lower_bound=-1.0,
    higher_is_better=False,
    chance_level=RANDOM_ORDER_LEVEL,
    uses_imputation=True,
)
def sufficiency(test: PerturbationTest, share: float = 0.2, output_kind: OutputKind = "probability") -> MetricValues:
    """(N,): -1..1 of a probability. `share`: between 0 and 1. Nothing is lost where the first regions suffice."""
    return _compute_score_drop(test, "weakest", test.n_regions - test.count_regions(share), output_kind)


def _compute_score_drop(
    test: PerturbationTest, order: RemovalOrder, n_removed: int, output_kind: OutputKind
) -> MetricValues:
    values = test.score_after_removal(order, [0, n_removed])[get_score_row(output_kind)]
    return test.build_values(values[:, 0] - values[:, 1], values)


def _compute_area_under_curve(test: PerturbationTest, values: Tensor) -> Tensor:
    """(N,points) -> (N,): by trapezoids over the share of the regions."""
    shares = torch.tensor(test.removal_counts, dtype=values.dtype, device=values.device) / test.n_regions
    return torch.trapezoid(values, shares, dim=1)


ROAD_PAPER = "Rong et al. 2022, arXiv:2202.00449"
ROAD_SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


@register_metric(
    "road-morf",
    title="ROAD (MoRF)",
    input_kind="perturbation_test",
    formula="the mean over shares of p(x without the map's strongest share, imputed)",
    paper=ROAD_PAPER,
    higher_is_better=False,
    chance_level=RANDOM_ORDER_LEVEL,
)
def road_morf(
    test: PerturbationTest,
    shares: Sequence[float] = ROAD_SHARES,
    noise_std: float = 0.01,
    output_kind: OutputKind = "probability",
) -> MetricValues:
    """(N,): 0..1 of a probability. `noise_std`: of the imputation, as a share of the channel's standard deviation."""
    return _compute_road(test, ["strongest"], shares, noise_std, output_kind)


@register_metric(
    "road-lerf",
    title="ROAD (LeRF)",
    input_kind="perturbation_test",
    formula="the mean over shares of p(x without the map's weakest share, imputed)",
    paper=ROAD_PAPER,
    chance_level=RANDOM_ORDER_LEVEL,
)
def road_lerf(
    test: PerturbationTest,
    shares: Sequence[float] = ROAD_SHARES,
    noise_std: float = 0.01,
    output_kind: OutputKind = "probability",
) -> MetricValues:
    """(N,): 0..1 of a probability; see `road_morf`."""
    return _compute_road(test, ["weakest"], shares, noise_std, output_kind)


@register_metric(
    "road",
    title="ROAD",
    input_kind="perturbation_test",
    formula="road-lerf - road-morf",
    paper=ROAD_PAPER,
    lower_bound=-1.0,
    chance_level="0, in expectation over orders",
)
def road(
    test: PerturbationTest,
    shares: Sequence[float] = ROAD_SHARES,
    noise_std: float = 0.01,
    output_kind: OutputKind = "probability",
) -> MetricValues:
    """(N,): -1..1 of a probability; see `road_morf`."""
    return _compute_road(test, ["weakest", "strongest"], shares, noise_std, output_kind)


def _compute_road(
    test: PerturbationTest,
    orders: Sequence[RemovalOrder],
    shares: Sequence[float],
    noise_std: float,
    output_kind: OutputKind,
) -> MetricValues:
    """The mean of the first order's points, less that of the second's where there is one."""
    if not len(shares):
        raise InputError("shares=(): name one at least, such as 0.2")
    counts = [test.count_regions(share, "shares") for share in shares]
    imputed = test.with_imputation(NoisyLinearImputation(noise_std))
    first, *rest = (imputed.score_after_removal(order, counts)[get_score_row(output_kind)] for order in orders)
    gap = first - rest[0] if rest else first
    return test.build_values(gap.mean(1), gap)
