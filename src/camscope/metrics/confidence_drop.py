"""Masking: what the answer becomes when the image is multiplied by its map.

a: the map's positive part over its maximum, 0..1; x a: the model's input times a, pixel by pixel. That is not an image of the
kind the model knows, and a map that is large everywhere does well by changing nothing: a constant one loses nothing. One
pass an image, shared. Undefined for NaN, and for a map in which nothing is positive.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from camscope.errors import GeometryError
from camscope.metrics.base import Values, metric
from camscope.metrics.faithfulness_correlation import correlation
from camscope.metrics.model_scorer import Of
from camscope.metrics.perturbation_test import NOT_FINITE, Trial, row

GRAD_CAM_PLUS_PLUS = "Chattopadhay et al. 2018, arXiv:1710.11063"
ROUNDING = 64  # steps of the answer's type: another batch may round so differently
NOTHING = "nothing in the map is positive"
NOT_POSITIVE = "the image's own answer is not positive: there is no share of it to lose"
NO_ROOM = "the image's own answer leaves no room below 1"
OTHER_NOT_FINITE = "the map of the masked image holds NaN or infinity"
ONE_VALUE = "the map, or that of the masked image, has one value everywhere: nothing correlates with it"


@metric(
    "average-drop",
    needs="trial",
    formula="max(0, p(x) - p(x a)) / p(x)",
    paper=GRAD_CAM_PLUS_PLUS,
    higher_is_better=False,
    chance="0 for a constant map",
)
def average_drop(trial: Trial, of: Of = "probability") -> Values:
    """(N,): 0..1 of a probability, as a share, not in percent. The mean over images is the metric of the paper."""
    clean, masked, undefined = _given(trial, of)
    return trial.values(_drop(clean, masked), masked, {**undefined, NOT_POSITIVE: clean <= 0})


@metric(
    "average-increase",
    needs="trial",
    formula="1 if p(x a) > p(x), else 0",
    paper=GRAD_CAM_PLUS_PLUS,
    chance="0 for a constant map",
)
def average_increase(trial: Trial, of: Of = "probability") -> Values:
    """(N,): 0 or 1; the mean over images is the metric of the paper. What rounding may do is no increase."""
    clean, masked, undefined = _given(trial, of)
    more = masked - clean > ROUNDING * trial.scores.precision * clean.abs()
    return trial.values(more.double(), masked, undefined)


@metric(
    "average-gain",
    needs="trial",
    formula="max(0, p(x a) - p(x)) / (1 - p(x))",
    paper="Zhang et al. 2024, arXiv:2301.07002",
    chance="0 for a constant map",
)
def average_gain(trial: Trial, of: Of = "probability") -> Values:
    """(N,): 0..1, of a probability only; undefined where the image's own is 1 already."""
    clean, masked, undefined = _given(trial, of)
    room = 1 - clean
    gain = (masked - clean).clamp(min=0) / torch.where(room > 0, room, 1)
    return trial.values(gain, masked, {**undefined, NO_ROOM: room <= 0})


@metric(
    "adcc",
    needs="again",
    formula="3 / (1 / coherency + 1 / (1 - complexity) + 1 / (1 - average drop))",
    paper="Poppi et al. 2021, arXiv:2104.10252",
)
def adcc(trial: Trial, again: Callable[[Tensor], Tensor], of: Of = "probability") -> Values:
    """(N,): 0..1; 0 where one of the three is 0.

    `again`: the same method's maps (N,*S) of other inputs (N,C,*S), for the classes of x. Coherency: (1 + r) / 2, r the
    correlation of a with that of the map of x a; undefined where one of them is constant. Complexity: the mean of a.
    """
    clean, masked, undefined = _given(trial, of)
    a, x = trial.shares, trial.scores.x
    other = again(x * a[:, None].to(x.dtype)).detach().to(a)
    if other.shape != a.shape:
        raise GeometryError(f"again gave maps {tuple(other.shape)}; expected {tuple(a.shape)}, the size of the input")
    here, there = a.flatten(1), other.flatten(1)
    undefined[OTHER_NOT_FINITE] = ~there.isfinite().all(1)
    correlated, constant = correlation(here, there.clamp(min=0))
    undefined |= {NOT_POSITIVE: clean <= 0, ONE_VALUE: constant}
    parts = [(1 + correlated) / 2, 1 - here.mean(1), 1 - _drop(clean, masked)]
    worst = torch.stack(parts).amin(0)
    harmonic = 3 / torch.stack([1 / torch.where(part > 0, part, 1) for part in parts]).sum(0)
    return trial.values(torch.where(worst > 0, harmonic, 0), masked, undefined)


def _given(trial: Trial, of: Of) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """(N,) each: p(x) and p(x a); the images without a map to mask with."""
    nothing = ~(trial.shares > 0).flatten(1).any(1)
    return trial.scores.clean[row(of)], trial.masked[row(of)], {NOT_FINITE: ~trial.finite, NOTHING: nothing}


def _drop(clean: Tensor, masked: Tensor) -> Tensor:
    return (clean - masked).clamp(min=0) / torch.where(clean > 0, clean, 1)
