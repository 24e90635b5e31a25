"""Infidelity, sensitivity-n and related metrics: compare the attribution of a pixel set with the loss of score after
its removal.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from camscope.errors import GeometryError, InputError
from camscope.explainers.core.setting_checks import check_positive_integer
from camscope.metrics.metric_registry import MetricValues, register_metric
from camscope.metrics.model_scorer import OutputKind
from camscope.metrics.perturbation_test import (
    DEFAULT_N_SETS,
    AttributionUnit,
    PerturbationTest,
    get_row_of_output_kind,
    sample_squares,
)

_register = partial(register_metric, input_kind="perturbation_test", uses_imputation=True)
SENSITIVITY_N_SHARES = (0.05, 0.1, 0.2, 0.4, 0.8)
NO_SPREAD_REASON = "the attributions of all sets, or their output losses, are equal: a correlation is not defined"


@_register(
    "infidelity",
    formula="mean over squares S of (β Σ_S map - (f(x) - f(x without S)))², with the β that minimizes it",
    paper="Yeh et al. 2019, arXiv:1901.09392, with squares removed and the best β for maps without a scale",
    upper_bound=None,
    higher_is_better=False,
    chance_level="mean of the squared losses, the value of a map of zeros",
    rounding_tolerance=0.0,
)
def infidelity(
    test: PerturbationTest,
    n_squares: int = DEFAULT_N_SETS,
    masks: Tensor | None = None,
    *,
    fit_scale: bool = True,
    unit: AttributionUnit = "contributions",
    output_kind: OutputKind = "score",
) -> MetricValues:
    """Remove random squares. Return the mean squared difference (N,) between a square's attribution and the loss of output.

    The unit is that of the output, squared. For a map of zeros the value is the mean of the squared losses.

    Args:
        test: The maps and the model.
        n_squares: The number of random squares, with sides from 1 to half of the shortest axis.
        masks: (M,*S) bool, sets to use in place of random squares.
        fit_scale: Whether to multiply the map by the best factor β, since CAMs have no unit. False means β = 1.
        unit: "contributions", or "gradients" for a map of gradients, which is multiplied by the change of the input.
        output_kind: "score" or "probability".

    Returns:
        One value for each image.

    Raises:
        GeometryError: `masks` are not bool (M,*S).

    >>> import torch
    >>> from camscope.metrics import PerturbationTest, scoring_scope
    >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 3))
    >>> x = torch.rand(2, 1, 4, 4)
    >>> with scoring_scope(model, x, 0) as scorer:
    ...     values = infidelity(PerturbationTest(x[:, 0], scorer), n_squares=10)
    >>> len(values)
    2

    """
    size, device = test.scorer.x.shape[2:], test.scorer.x.device
    if masks is None:
        check_positive_integer(n_squares=n_squares)
        squares = sample_squares(size, max(1, min(size) // 2), n_squares, test.seed, device)
        drops = test.measure_drops(squares, n_squares, unit, ("squares", n_squares))
    else:
        if masks.dtype != torch.bool or masks.ndim != len(size) + 1 or masks.shape[1:] != size or not len(masks):
            size_text = ",".join(map(str, size))
            raise GeometryError(f"masks are {masks.dtype} of shape {tuple(masks.shape)}; expected bool (M,{size_text})")
        device_masks = masks.to(device)
        drops = test.measure_drops(lambda part: device_masks[part], len(masks), unit)
    lost, claimed = drops.score_drops[get_row_of_output_kind(output_kind)], drops.attribution_sums
    if fit_scale:
        square = claimed.square().sum(1, keepdim=True)
        claimed = claimed * (claimed * lost).sum(1, keepdim=True) / torch.where(square > 0, square, 1)
    return test.build_metric_values((claimed - lost).square().mean(1), lost)


@_register(
    "faithfulness-correlation",
    title="Faithfulness Correlation",
    formula="Pearson's r over random sets S of one size of Σ_S map and f(x) - f(x without S)",
    paper="Bhatt et al. 2020, arXiv:2005.00631",
    lower_bound=-1.0,
    chance_level="0",
)
def faithfulness_correlation(
    test: PerturbationTest, share: float = 0.2, n_sets: int = DEFAULT_N_SETS, output_kind: OutputKind = "score"
) -> MetricValues:
    """Remove random sets of regions. Return the correlation (N,) between attribution and loss of output, -1..1.

    The value is undefined if the map is constant, or if all sets lose the same.

    Args:
        test: The maps and the model.
        share: The share of the regions in a set, above 0 and below 1.
        n_sets: The number of random sets.
        output_kind: "score" or "probability".

    Returns:
        One value for each image.

    >>> import torch
    >>> from camscope.metrics import PerturbationTest, scoring_scope
    >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 3))
    >>> x = torch.rand(2, 1, 4, 4)
    >>> with scoring_scope(model, x, 0) as scorer:
    ...     values = faithfulness_correlation(PerturbationTest(x[:, 0], scorer), n_sets=10)
    >>> len(values)
    2

    """
    return sensitivity_n(test, (share,), n_sets, output_kind)


@_register(
    "sensitivity-n",
    title="Sensitivity-n",
    formula="mean over sizes n of Pearson's r over random sets S of n regions of Σ_S map and f(x) - f(x without S)",
    paper="Ancona et al. 2018, arXiv:1711.06104: a curve over n; its mean",
    lower_bound=-1.0,
    chance_level="0",
)
def sensitivity_n(
    test: PerturbationTest,
    shares: Sequence[float] = SENSITIVITY_N_SHARES,
    n_sets: int = DEFAULT_N_SETS,
    output_kind: OutputKind = "score",
) -> MetricValues:
    """Average `faithfulness_correlation` over several set sizes. The result (N,) lies in -1..1.

    The value is undefined if one of the correlations is undefined.

    Args:
        test: The maps and the model.
        shares: Sizes of the sets, as shares of all regions.
        n_sets: The number of random sets.
        output_kind: "score" or "probability".

    Returns:
        One value for each image.

    Raises:
        InputError: `shares` is empty.

    >>> import torch
    >>> from camscope.metrics import PerturbationTest, scoring_scope
    >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 3))
    >>> x = torch.rand(2, 1, 4, 4)
    >>> with scoring_scope(model, x, 0) as scorer:
    ...     values = sensitivity_n(PerturbationTest(x[:, 0], scorer), shares=[0.5], n_sets=10)
    >>> len(values)
    2

    """
    if not len(shares):
        raise InputError("shares is empty: pass at least one share, such as 0.2")
    correlations_by_share = [_correlate_attributions_with_losses(test, share, n_sets, output_kind) for share in shares]
    lost, correlations, undefined = (torch.stack(parts) for parts in zip(*correlations_by_share, strict=True))
    return test.build_metric_values(correlations.mean(0), lost.transpose(0, 1), {NO_SPREAD_REASON: undefined.any(0)})


@_register(
    "completeness-gap",
    formula="|Σ map - (f(x) - f(imputed image))|",
    paper="Sundararajan et al. 2017, proposition 1, arXiv:1703.01365",
    upper_bound=None,
    higher_is_better=False,
    rounding_tolerance=0.0,
)
def completeness_gap(test: PerturbationTest, output_kind: OutputKind = "score") -> MetricValues:
    """Impute all pixels. Return the absolute difference (N,) between the sum of each map and the loss of output.

    Use it for methods whose maps should sum to that loss. The maps need the resolution of the input.

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
    ...     values = completeness_gap(PerturbationTest(x[:, 0], scorer))
    >>> len(values)
    2

    """
    values = test.score_after_removal("strongest", [0, test.n_regions])[get_row_of_output_kind(output_kind)]
    total = test.maps.flatten(1).sum(1)
    return test.build_metric_values((total - (values[:, 0] - values[:, 1])).abs(), values)


class LossCorrelation(NamedTuple):
    """Losses of output (N,M), their correlation (N,) with the attributions, and where it is undefined (N,) bool."""

    losses: Tensor
    correlation: Tensor
    is_undefined: Tensor


def _correlate_attributions_with_losses(
    test: PerturbationTest, share: float, n_sets: int, output_kind: OutputKind
) -> LossCorrelation:
    """Remove random sets of regions. Correlate the attribution of each set with the loss of output."""
    check_positive_integer(n_sets=n_sets)
    if n_sets < 2:
        raise InputError(f"n_sets={n_sets}: expected 2 or more sets for a correlation")
    drops, row = test.measure_random_drops(test.count_regions(share), n_sets), get_row_of_output_kind(output_kind)
    lost, clean = drops.score_drops[row], test.scorer.clean_scores[row, :, None]
    size = torch.maximum(clean.abs(), (clean - lost).abs()).nan_to_num().amax(1)
    r, is_constant = correlate_tensor_rows(
        drops.attribution_sums, lost, 4 * test.scorer.machine_epsilon_of_scores * size
    )
    flat = test.maps.flatten(1)
    return LossCorrelation(lost, r, is_constant | (flat == flat[:, :1]).all(1))


CORRELATION_TOLERANCE = 16 * torch.finfo(torch.float64).eps


class RowCorrelations(NamedTuple):
    """Correlations (N,) of pairs of rows. `is_constant` (N,) bool marks pairs with a constant row, which have none."""

    correlation: Tensor
    is_constant: Tensor


def correlate_tensor_rows(
    first_rows: Tensor, second_rows: Tensor, rounding_tolerance: Tensor | float = 0.0
) -> RowCorrelations:
    """Return Pearson's correlation between each row of the first tensor and the same row of the second."""
    first, second = _normalize_rows(first_rows, 0.0), _normalize_rows(second_rows, rounding_tolerance)
    correlation = (first.rows * second.rows).sum(1).clamp(-1, 1)
    return RowCorrelations(correlation, first.is_constant | second.is_constant)


class NormalizedRows(NamedTuple):
    """Rows (N,M) with mean 0 and length 1, and which of the rows are constant (N,) bool."""

    rows: Tensor
    is_constant: Tensor


def _normalize_rows(values: Tensor, rounding_tolerance: Tensor | float) -> NormalizedRows:
    """Shift each row (N,M) to mean 0, and divide it by its length. Rows that vary less than the tolerance count as constant."""
    finite = values.nan_to_num(posinf=0.0, neginf=0.0)
    tolerance = CORRELATION_TOLERANCE * finite.abs().amax(1) + rounding_tolerance
    centered = finite - finite.mean(1, keepdim=True)
    length = centered.norm(dim=1, keepdim=True)
    is_constant = finite.amax(1) - finite.amin(1) <= tolerance
    return NormalizedRows(centered / torch.where(length > 0, length, 1), is_constant)
