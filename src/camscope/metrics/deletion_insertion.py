"""Deletion, insertion, ROAD and masking: the answer as the regions of a map are removed or shown.

Removal: what becomes of the answer as a map's regions are removed one after the other, or shown.

The number of each is that of the trial's fill and steps. `of`: "probability", see `targets.Score.chance`, or the "score"
itself, whose scale is the model's own. All of them use the same passes; the points of a curve are equally far apart.
Undefined for a map with NaN; a constant one, or one of zeros, is a random order.

ROAD: removed pixels are imputed from their neighbours, so that the shape of what is removed does not give them away.

Regions removed in the map's order, at several shares; the fill is always `Imputation`, whatever the trial's. The authors
count how many images keep their class; an image by itself has a probability.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from camscope.errors import InputError
from camscope.explainers.core.evaluation_context import expect_count
from camscope.metrics.base import Values, metric
from camscope.metrics.imputation import Imputation
from camscope.metrics.model_scorer import Of
from camscope.metrics.perturbation_test import Order, Trial, row

RANDOM = "what a random order gets, that of a constant map"


def curve(trial: Trial, order: Order = "strongest", of: Of = "probability") -> Tensor:
    """(N,steps + 1): what is left of the answer as regions are removed, the strongest first (MoRF) or the weakest (LeRF)."""
    return trial.after(order, trial.counts)[row(of)]


@metric(
    "deletion",
    needs="trial",
    formula="the area under p(x without the map's first k of n regions) over k / n in 0..1, by trapezoids",
    paper="Petsiuk et al. 2018, arXiv:1806.07421; the curve is MoRF, Samek et al. 2017, arXiv:1509.06321",
    higher_is_better=False,
    chance=RANDOM,
    filled=True,
)
def deletion(trial: Trial, of: Of = "probability") -> Values:
    """(N,): 0..1 of a probability. The curve's first point is the image, the last one the fill."""
    values = curve(trial, "strongest", of)
    return trial.values(_area(trial, values), values)


@metric(
    "insertion",
    needs="trial",
    formula="the area under p(the fill with the map's first k of n regions shown) over k / n in 0..1, by trapezoids",
    paper="Petsiuk et al. 2018, arXiv:1806.07421; backwards the curve is LeRF, Samek et al. 2017, arXiv:1509.06321",
    chance=RANDOM,
    filled=True,
)
def insertion(trial: Trial, of: Of = "probability") -> Values:
    """(N,): 0..1 of a probability. To show the first k is to remove the last n - k: the curve is LeRF, and so is its area."""
    values = curve(trial, "weakest", of)
    return trial.values(_area(trial, values), values)


@metric(
    "lerf-morf-gap",
    needs="trial",
    formula="the area between LeRF and MoRF: with one fill, insertion - deletion",
    paper="Samek et al. 2017, arXiv:1509.06321",
    low=-1.0,
    chance="0, in expectation over orders",
    filled=True,
)
def lerf_morf_gap(trial: Trial, of: Of = "probability") -> Values:
    """(N,): -1..1 of a probability. What the fill does to every order alike is in both curves, and cancels."""
    gap = curve(trial, "weakest", of) - curve(trial, "strongest", of)
    return trial.values(_area(trial, gap), gap)


@metric(
    "aopc",
    needs="trial",
    formula="1 / (L + 1) Σ_k p(x) - p(x without the map's first k regions), k = 0 … L",
    paper="Samek et al. 2017, arXiv:1509.06321",
    low=-1.0,
    chance=RANDOM,
    filled=True,
)
def aopc(trial: Trial, first: int | None = None, of: Of = "probability") -> Values:
    """(N,): -1..1 of a probability. `first`: L, single regions; None: the points of the curve, L of which are steps.

    As in the paper: a trial with region=9, and first=100.
    """
    expect_count(None, first=first)
    counts = trial.counts if first is None else list(range(min(first, trial.total) + 1))
    values = trial.after("strongest", counts)[row(of)]
    return trial.values((values[:, :1] - values).mean(1), values)


@metric(
    "necessity",
    needs="trial",
    formula="p(x) - p(x without the map's first regions, a share of them)",
    paper="comprehensiveness of DeYoung et al. 2020, arXiv:1911.03429",
    low=-1.0,
    chance=RANDOM,
    filled=True,
)
def necessity(trial: Trial, share: float = 0.2, of: Of = "probability") -> Values:
    """(N,): -1..1 of a probability. `share`: between 0 and 1."""
    return _lost(trial, "strongest", trial.count(share), of)


@metric(
    "sufficiency",
    needs="trial",
    formula="p(x) - p(only the map's first regions, a share of them)",
    paper="sufficiency of DeYoung et al. 2020, arXiv:1911.03429",
    low=-1.0,
    higher_is_better=False,
    chance=RANDOM,
    filled=True,
)
def sufficiency(trial: Trial, share: float = 0.2, of: Of = "probability") -> Values:
    """(N,): -1..1 of a probability. `share`: between 0 and 1. Nothing is lost where the first regions suffice."""
    return _lost(trial, "weakest", trial.total - trial.count(share), of)


def _lost(trial: Trial, order: Order, count: int, of: Of) -> Values:
    values = trial.after(order, [0, count])[row(of)]
    return trial.values(values[:, 0] - values[:, 1], values)


def _area(trial: Trial, values: Tensor) -> Tensor:
    """(N,points) -> (N,): by trapezoids over the share of the regions."""
    shares = torch.tensor(trial.counts, dtype=values.dtype, device=values.device) / trial.total
    return torch.trapezoid(values, shares, dim=1)


PAPER = "Rong et al. 2022, arXiv:2202.00449"
SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


@metric(
    "road-morf",
    needs="trial",
    formula="the mean over shares of p(x without the map's strongest share, imputed)",
    paper=PAPER,
    higher_is_better=False,
    chance=RANDOM,
)
def road_morf(trial: Trial, shares: Sequence[float] = SHARES, noise: float = 0.01, of: Of = "probability") -> Values:
    """(N,): 0..1 of a probability. `noise`: of the imputation, as a share of the channel's standard deviation."""
    return _road(trial, ["strongest"], shares, noise, of)


@metric(
    "road-lerf",
    needs="trial",
    formula="the mean over shares of p(x without the map's weakest share, imputed)",
    paper=PAPER,
    chance=RANDOM,
)
def road_lerf(trial: Trial, shares: Sequence[float] = SHARES, noise: float = 0.01, of: Of = "probability") -> Values:
    """(N,): 0..1 of a probability; see `road_morf`."""
    return _road(trial, ["weakest"], shares, noise, of)


@metric(
    "road",
    needs="trial",
    formula="road-lerf - road-morf",
    paper=PAPER,
    low=-1.0,
    chance="0, in expectation over orders",
)
def road(trial: Trial, shares: Sequence[float] = SHARES, noise: float = 0.01, of: Of = "probability") -> Values:
    """(N,): -1..1 of a probability; see `road_morf`."""
    return _road(trial, ["weakest", "strongest"], shares, noise, of)


def _road(trial: Trial, orders: Sequence[Order], shares: Sequence[float], noise: float, of: Of) -> Values:
    """The mean of the first order's points, less that of the second's where there is one."""
    if not len(shares):
        raise InputError("shares=(): name one at least, such as 0.2")
    counts = [trial.count(share, "shares") for share in shares]
    imputed = trial.under(Imputation(noise))
    first, *rest = (imputed.after(order, counts)[row(of)] for order in orders)
    gap = first - rest[0] if rest else first
    return trial.values(gap.mean(1), gap)
