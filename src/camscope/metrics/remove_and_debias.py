"""ROAD: removed pixels are imputed from their neighbours, so that the shape of what is removed does not give them away.

Regions removed in the map's order, at several shares; the fill is always `Imputation`, whatever the trial's. The authors
count how many images keep their class; an image by itself has a probability.
"""

from collections.abc import Sequence

from camscope.errors import InputError
from camscope.metrics.base import metric
from camscope.metrics.fills import Imputation
from camscope.metrics.removal import RANDOM
from camscope.metrics.scores import Of
from camscope.metrics.trial import Order, Trial, row
from camscope.metrics.values import Values

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
