"""Masking: what the answer becomes when the image is multiplied by its map.

a: the map's positive part over its maximum, 0..1; x a: the model's input times a, pixel by pixel. That is not an image of the
kind the model knows, and a map that is large everywhere does well by changing nothing: a constant one loses nothing. One
pass an image, shared. Undefined for NaN, and for a map in which nothing is positive.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from camscope.errors import GeometryError
from camscope.metrics.base import MetricValues, register_metric
from camscope.metrics.faithfulness_correlation import correlate_batch
from camscope.metrics.model_scorer import OutputKind
from camscope.metrics.perturbation_test import NONFINITE_MAP, PerturbationTest, get_score_row

GRAD_CAM_PLUS_PLUS_PAPER = "Chattopadhay et al. 2018, arXiv:1710.11063"
MAX_ROUNDING_STEPS = 64  # steps of the answer's type: another batch may round so differently
NO_POSITIVE_VALUE = "nothing in the map is positive"
NONPOSITIVE_SCORE = "the image's own answer is not positive: there is no share of it to lose"
NO_ROOM_FOR_GAIN = "the image's own answer leaves no room below 1"
NONFINITE_MASKED_MAP = "the map of the masked image holds NaN or infinity"
CONSTANT_MAP = "the map, or that of the masked image, has one value everywhere: nothing correlates with it"


@register_metric(
    "average-drop",
    input_kind="trial",
    formula="max(0, p(x) - p(x a)) / p(x)",
    paper=GRAD_CAM_PLUS_PLUS_PAPER,
    higher_is_better=False,
    chance_level="0 for a constant map",
)
def average_drop(test: PerturbationTest, output_kind: OutputKind = "probability") -> MetricValues:
    """(N,): 0..1 of a probability, as a share, not in percent. The mean over images is the metric of the paper."""
    clean, masked, undefined = _select_masking_scores(test, output_kind)
    return test.build_values(
        _compute_relative_drop(clean, masked), masked, {**undefined, NONPOSITIVE_SCORE: clean <= 0}
    )


@register_metric(
    "average-increase",
    input_kind="trial",
    formula="1 if p(x a) > p(x), else 0",
    paper=GRAD_CAM_PLUS_PLUS_PAPER,
    chance_level="0 for a constant map",
)
def average_increase(test: PerturbationTest, output_kind: OutputKind = "probability") -> MetricValues:
    """(N,): 0 or 1; the mean over images is the metric of the paper. What rounding may do is no increase."""
    clean, masked, undefined = _select_masking_scores(test, output_kind)
    more = masked - clean > MAX_ROUNDING_STEPS * test.scorer.score_epsilon * clean.abs()
    return test.build_values(more.double(), masked, undefined)


@register_metric(
    "average-gain",
    input_kind="trial",
    formula="max(0, p(x a) - p(x)) / (1 - p(x))",
    paper="Zhang et al. 2024, arXiv:2301.07002",
    chance_level="0 for a constant map",
)
def average_gain(test: PerturbationTest, output_kind: OutputKind = "probability") -> MetricValues:
    """(N,): 0..1, of a probability only; undefined where the image's own is 1 already."""
    clean, masked, undefined = _select_masking_scores(test, output_kind)
    room = 1 - clean
    gain = (masked - clean).clamp(min=0) / torch.where(room > 0, room, 1)
    return test.build_values(gain, masked, {**undefined, NO_ROOM_FOR_GAIN: room <= 0})


@register_metric(
    "adcc",
    input_kind="again",
    formula="3 / (1 / coherency + 1 / (1 - complexity) + 1 / (1 - average drop))",
    paper="Poppi et al. 2021, arXiv:2104.10252",
)
def adcc(
    test: PerturbationTest, compute_maps: Callable[[Tensor], Tensor], output_kind: OutputKind = "probability"
) -> MetricValues:
    """(N,): 0..1; 0 where one of the three is 0.

    `compute_maps`: the same method's maps (N,*S) of other inputs (N,C,*S), for the classes of x. Coherency: (1 + r) / 2, r the
    correlation of a with that of the map of x a; undefined where one of them is constant. Complexity: the mean of a.
    """
    clean, masked, undefined = _select_masking_scores(test, output_kind)
    a, x = test.normalized_maps, test.scorer.x
    other = compute_maps(x * a[:, None].to(x.dtype)).detach().to(a)
    if other.shape != a.shape:
        raise GeometryError(
            f"compute_maps returned maps {tuple(other.shape)}; expected {tuple(a.shape)}, the size of the input"
        )
    here, there = a.flatten(1), other.flatten(1)
    undefined[NONFINITE_MASKED_MAP] = ~there.isfinite().all(1)
    correlated, constant = correlate_batch(here, there.clamp(min=0))
    undefined |= {NONPOSITIVE_SCORE: clean <= 0, CONSTANT_MAP: constant}
    parts = [(1 + correlated) / 2, 1 - here.mean(1), 1 - _compute_relative_drop(clean, masked)]
    worst = torch.stack(parts).amin(0)
    harmonic = 3 / torch.stack([1 / torch.where(part > 0, part, 1) for part in parts]).sum(0)
    return test.build_values(torch.where(worst > 0, harmonic, 0), masked, undefined)


def _select_masking_scores(test: PerturbationTest, output_kind: OutputKind) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """(N,) each: p(x) and p(x a); the images without a map to mask with."""
    nothing = ~(test.normalized_maps > 0).flatten(1).any(1)
    return (
        test.scorer.clean_scores[get_score_row(output_kind)],
        test.masked_scores[get_score_row(output_kind)],
        {NONFINITE_MAP: ~test.is_finite, NO_POSITIVE_VALUE: nothing},
    )


def _compute_relative_drop(clean_scores: Tensor, masked_scores: Tensor) -> Tensor:
    return (clean_scores - masked_scores).clamp(min=0) / torch.where(clean_scores > 0, clean_scores, 1)
