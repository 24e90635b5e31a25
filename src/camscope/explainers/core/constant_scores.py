"""Detect scores that do not depend on the input: they stay the same for noise in its place."""

import copy
import threading
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from camscope.explainers.core.maps import AttributionMaps, determine_statuses
from camscope.explanation import STATUS_OK
from camscope.hooks.isolation import hooks_muted
from camscope.targets import Score
from camscope.targets.outputs import ScoreRange

if TYPE_CHECKING:
    from camscope.explainers.core.method import BaseMethod

MAX_NOISE_TRIALS = 2  # the second only if the first changes no score
UNFLAGGED_STATUSES = (STATUS_OK, "flat", "layout_unverified")
NON_CLASS_TARGET_KEY = "other"  # for a target that is not a class

_varying_inputs_by_model: WeakIdKeyDictionary = (
    WeakIdKeyDictionary()
)  # by model: keys of input, weights and class whose score is known to vary
_varying_lock = threading.Lock()


def flag_constant_scores(
    explainer: "BaseMethod", x: Tensor, score: Score, maps: AttributionMaps, weights_key: Hashable
) -> None:
    """Set `constant_score` of maps whose score stays the same with noise in place of the sample of x (N,C,*S).

    Gradients at a layer do not reveal this, because the layer itself may be constant. A method that alters the input has
    found it already. The test takes one forward pass without hooks, once for each model, weights, input size and class;
    `weights_key` identifies the weights.
    """
    altered = getattr(explainer, "alters_input", False) and maps.constant_score is not None
    if explainer.control or not explainer.class_specific or altered or score.values is None:
        return
    rows = [n for n, status in enumerate(determine_statuses(maps)) if status in UNFLAGGED_STATUSES]
    if not rows:
        return
    constant = find_constant_rows(x, score, rows, weights_key, include_probabilities=_uses_rival_scores(explainer))
    if constant is not None:
        previous = (
            torch.zeros_like(constant) if maps.constant_score is None else maps.constant_score.to(constant.device)
        )
        maps.constant_score = previous | constant


def find_constant_rows(
    x: Tensor, score: Score, rows: Sequence[int], weights_key: Hashable, *, include_probabilities: bool = False
) -> Tensor | None:
    """Return which rows (N,) of x (N,C,*S) have a score that noise does not change; None if all are known to vary.

    `include_probabilities`: neither the score nor the probability may change.
    """
    classes = [score.class_index(row) for row in rows] if score.class_pairs is not None else [None] * len(rows)
    place = (tuple(x.shape[1:]), x.dtype, x.device, weights_key)
    keys = {
        row: (*place, NON_CLASS_TARGET_KEY if index is None else index)
        for row, index in zip(rows, classes, strict=True)
    }
    with _varying_lock:
        varying_keys = _varying_inputs_by_model.setdefault(score.model, set())
        if all(key in varying_keys for key in keys.values()):
            return None
    constant = _find_unchanged_scores(x, score, include_probabilities)
    if constant is None:
        return None
    flags: list[bool] = constant.tolist()
    with _varying_lock:
        varying_keys.update(key for row, key in keys.items() if not flags[row])
    chosen = torch.zeros_like(constant)
    chosen[list(rows)] = constant[list(rows)]
    return chosen


def _uses_rival_scores(explainer: "BaseMethod") -> bool:
    """Whether a map uses more than the score of its class: probabilities, or scores of rival classes."""
    if getattr(explainer, "has_custom_backward", False):
        return False
    return getattr(explainer, "runs_model", False) or getattr(explainer, "objective_key", "score") != "score"


def _find_unchanged_scores(x: Tensor, score: Score, include_probabilities: bool) -> Tensor | None:
    """Return for each sample (N,) whether noise changes its score by no more than rounding; None if the model refuses noise."""
    score_copy, scores = copy.copy(score), ScoreRange()
    if score.values is None:
        return None
    scores.add("score", score.values, None, len(x))
    constant = None
    devices = [x.device] if x.device.type == "cuda" else []
    try:
        for seed in range(MAX_NOISE_TRIALS):
            with torch.no_grad(), hooks_muted(score.model), torch.random.fork_rng(devices=devices):
                output = score_copy.forward(draw_noise_like(x, seed))
                values = score_copy.read_score(output, len(x)).detach()
                probabilities = score_copy.probability(output, len(x)).detach() if include_probabilities else None
            scores.add("score", values, None, len(x))
            if probabilities is not None:
                scores.add("probability", probabilities, None, len(x))
            constant = scores.is_constant(score.machine_epsilon)
            if constant is None or not bool(constant.any()):
                return constant
    except Exception:  # the model may reject noise, or a target find nothing in it
        return None
    return constant


def draw_noise_like(x: Tensor, seed: int) -> Tensor:
    """Return noise with shape, dtype, mean and spread of x (N,C,*S), or, for integers, in its range."""
    generator = torch.Generator(device="cpu").manual_seed(seed)
    if not x.is_floating_point():
        low, high = int(x.min()), int(x.max())
        return torch.randint(low, max(high, low + 1) + 1, x.shape, generator=generator, device="cpu").to(x)
    noise = torch.randn(x.shape, generator=generator, dtype=torch.float32, device="cpu").to(x)
    return x.mean() + noise * torch.where(x.std() > 0, x.std(), 1).nan_to_num(1.0)
