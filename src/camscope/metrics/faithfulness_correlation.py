"""Sensitivity: whether what a map says of sets of pixels is what the answer loses without them.

What the map says of a set is the sum of its values there: parts of the answer, as input x gradient, integrated gradients and
occlusion give them, or, for a CAM brought to the input's size, parts up to a factor. Sets are of the trial's regions, filled
with its fill, drawn by its seed; the same sets for every image. Undefined for NaN.

Pearson's correlation of rows, and where there is none.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from camscope.errors import GeometryError, InputError
from camscope.explainers.core.evaluation_context import expect_count
from camscope.metrics.base import Values, metric
from camscope.metrics.model_scorer import Of
from camscope.metrics.perturbation_test import SETS, Drops, Trial, Units, random_squares, row

SHARES = (0.05, 0.1, 0.2, 0.4, 0.8)
NO_SPREAD = "the map says the same of every set, or the answer loses the same with each: nothing correlates with that"


@metric(
    "infidelity",
    needs="trial",
    formula="the mean over squares S of (β Σ_S map - (f(x) - f(x without S)))², β such that it is least",
    paper="Yeh et al. 2019, arXiv:1901.09392, with squares removed; the best β for maps without a scale",
    high=None,
    higher_is_better=False,
    chance="the mean of the squared losses, that of a map of zeros",
    filled=True,
    precision=0.0,
)
def infidelity(
    trial: Trial,
    squares: int = SETS,
    masks: Tensor | None = None,
    *,
    scaled: bool = True,
    units: Units = "parts",
    of: Of = "score",
) -> Values:
    """(N,): in squares of the answer's units; of a map of zeros the mean of the squared losses, whatever β.

    `scaled`: with the best β, for maps without a scale of their own, such as CAMs; False: β = 1. `units`: "slopes" where
    the map is a gradient, whose part in a loss is its value times what changed. `squares`: drawn, their sides from 1 to half
    of the shortest axis; or `masks` (M,*S) bool: the sets themselves.
    """
    found = _squares(trial, squares, units) if masks is None else _of_masks(trial, masks, units)
    lost, said = found.lost[row(of)], found.said
    if scaled:
        square = said.square().sum(1, keepdim=True)
        said = said * (said * lost).sum(1, keepdim=True) / torch.where(square > 0, square, 1)
    return trial.values((said - lost).square().mean(1), lost)


@metric(
    "faithfulness-correlation",
    needs="trial",
    formula="Pearson's r over random sets S of one size of Σ_S map and f(x) - f(x without S)",
    paper="Bhatt et al. 2020, arXiv:2005.00631",
    low=-1.0,
    chance="0",
    filled=True,
)
def faithfulness_correlation(trial: Trial, share: float = 0.2, sets: int = SETS, of: Of = "score") -> Values:
    """(N,): -1..1. `share`: of the regions, in a set. Undefined where map or losses have no spread: for constant maps."""
    lost, r, none = _correlated(trial, share, sets, of)
    return trial.values(r, lost, {NO_SPREAD: none})


@metric(
    "sensitivity-n",
    needs="trial",
    formula="the mean over sizes n of Pearson's r over random sets S of n regions of Σ_S map and f(x) - f(x without S)",
    paper="Ancona et al. 2018, arXiv:1711.06104: a curve over n; its mean",
    low=-1.0,
    chance="0",
    filled=True,
)
def sensitivity_n(trial: Trial, shares: Sequence[float] = SHARES, sets: int = SETS, of: Of = "score") -> Values:
    """(N,): -1..1. `shares`: n, as shares of all regions. Undefined where one size is: see `faithfulness_correlation`."""
    if not len(shares):
        raise InputError("shares=(): name one at least, such as 0.2")
    each = [_correlated(trial, share, sets, of) for share in shares]
    lost, found, none = (torch.stack(parts) for parts in zip(*each, strict=True))
    return trial.values(found.mean(0), lost.transpose(0, 1), {NO_SPREAD: none.any(0)})


@metric(
    "completeness-gap",
    needs="trial",
    formula="|Σ map - (f(x) - f(fill))|",
    paper="Sundararajan et al. 2017, proposition 1, arXiv:1703.01365",
    high=None,
    higher_is_better=False,
    filled=True,
    precision=0.0,
)
def completeness_gap(trial: Trial, of: Of = "score") -> Values:
    """(N,): in the answer's units. For maps whose parts should add up, at the input's own pixels, and for their own baseline."""
    values = trial.after("strongest", [0, trial.total])[row(of)]
    total = trial.maps.flatten(1).sum(1)
    return trial.values((total - (values[:, 0] - values[:, 1])).abs(), values)


def _correlated(trial: Trial, share: float, sets: int, of: Of) -> tuple[Tensor, Tensor, Tensor]:
    """What was lost (N,M), its correlation with what the map says (N,), and where there is none."""
    expect_count(sets=sets)
    if sets < 2:
        raise InputError(f"sets={sets}: expected 2 or more, as one has no correlation")
    drops = trial.subsets(trial.count(share), sets)
    lost, clean = drops.lost[row(of)], trial.scores.clean[row(of), :, None]
    size = torch.maximum(clean.abs(), (clean - lost).abs()).nan_to_num().amax(1)
    r, none = correlation(drops.said, lost, 4 * trial.scores.precision * size)
    flat = trial.maps.flatten(1)
    return lost, r, none | (flat == flat[:, :1]).all(1)


def _squares(trial: Trial, squares: int, units: Units) -> Drops:
    expect_count(squares=squares)
    x = trial.scores.x
    most = max(1, min(x.shape[2:]) // 2)
    masks = random_squares(x.shape[2:], most, squares, trial.seed, x.device)
    return trial.drops(masks, squares, units, ("squares", squares))


def _of_masks(trial: Trial, masks: Tensor, units: Units) -> Drops:
    size = trial.scores.x.shape[2:]
    if masks.dtype != torch.bool or masks.ndim != len(size) + 1 or masks.shape[1:] != size or not len(masks):
        raise GeometryError(
            f"masks are {masks.dtype} {tuple(masks.shape)}; expected bool (M,{','.join(map(str, size))})"
        )
    there = masks.to(trial.scores.x.device)
    return trial.drops(lambda part: there[part], len(there), units)


ROUNDING = 16 * torch.finfo(torch.float64).eps


def correlation(one: Tensor, other: Tensor, rounding: Tensor | float = 0.0) -> tuple[Tensor, Tensor]:
    """(N,M) float64 twice -> r (N,) in -1..1, and which rows have none (N,) bool: one side has one value.

    `rounding`: how far values of `other` that are one may lie apart (N,).
    """
    first, no_spread = _unit(one, 0.0)
    second, none_there = _unit(other, rounding)
    return (first * second).sum(1).clamp(-1, 1), no_spread | none_there


def _unit(values: Tensor, rounding: Tensor | float) -> tuple[Tensor, Tensor]:
    """Off their mean and of length 1; and which rows have no spread."""
    known = values.nan_to_num(posinf=0.0, neginf=0.0)
    spread = known.amax(1) - known.amin(1)
    part = known - known.mean(1, keepdim=True)
    length = part.norm(dim=1, keepdim=True)
    return part / torch.where(length > 0, length, 1), spread <= ROUNDING * known.abs().amax(1) + rounding
