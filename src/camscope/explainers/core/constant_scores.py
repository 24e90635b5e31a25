"""Constancy: whether a score depends on the input at all, as the scores of noise in its place show."""

import copy
import threading
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from camscope.explainers.core.maps import Maps, statuses
from camscope.explanation import OK
from camscope.hooks.mute_hooks import hooks_muted
from camscope.targets import Score
from camscope.targets.score_range import ScoreRange

if TYPE_CHECKING:
    from camscope.explainers.core.method import Method

NOISES = 2  # a second one only where the first changes no score
UNFLAGGED = (OK, "flat", "layout_unverified")
OTHER_TARGET = "other"  # of a target that is no class

_varying: WeakIdKeyDictionary = WeakIdKeyDictionary()  # by model: what is known to vary, by input, weights and class
_lock = threading.Lock()


def flag_constant_scores(tool: "Method", x: Tensor, score: Score, maps: Maps, weights: Hashable) -> None:
    """Set `constant_score` where the score of a sample of x (N,C,*S) stays the same with noise in place of the sample.

    Gradients at a layer, and rules that hand shares back, say nothing of that: the layer itself may be constant. A method
    that altered the input has seen it already. One forward pass without hooks, once for each model, weights, size of the
    input and class; `weights`: what tells them from others.
    """
    altered = getattr(tool, "alters_input", False) and maps.constant_score is not None
    if tool.control or not tool.class_specific or altered or score.values is None:
        return
    rows = [n for n, status in enumerate(statuses(maps)) if status in UNFLAGGED]
    if not rows:
        return
    constant = constant_rows(x, score, rows, weights, probabilities=_reads_rivals(tool))
    if constant is not None:
        known = torch.zeros_like(constant) if maps.constant_score is None else maps.constant_score.to(constant.device)
        maps.constant_score = known | constant


def constant_rows(
    x: Tensor, score: Score, rows: Sequence[int], weights: Hashable, *, probabilities: bool = False
) -> Tensor | None:
    """(N,): which of these rows of x (N,C,*S) have a score that noise does not change; None where all are known to vary.

    `probabilities`: neither the score nor the probability may change.
    """
    classes = [score.class_of(row) for row in rows] if score.pairs is not None else [None] * len(rows)
    place = (tuple(x.shape[1:]), x.dtype, x.device, weights)
    keys = {row: (*place, OTHER_TARGET if index is None else index) for row, index in zip(rows, classes, strict=True)}
    with _lock:
        known = _varying.setdefault(score.model, set())
        if all(key in known for key in keys.values()):
            return None
    constant = _unchanged(x, score, probabilities)
    if constant is None:
        return None
    flags: list[bool] = constant.tolist()
    with _lock:
        known.update(key for row, key in keys.items() if not flags[row])
    chosen = torch.zeros_like(constant)
    chosen[list(rows)] = constant[list(rows)]
    return chosen


def _reads_rivals(tool: "Method") -> bool:
    """Whether a map is made of more than the class's own score: of probabilities, or of rivals' scores."""
    if getattr(tool, "own_rules", False):
        return False
    return getattr(tool, "runs_model", False) or getattr(tool, "question", "score") != "score"


def _unchanged(x: Tensor, score: Score, probabilities: bool) -> Tensor | None:
    """(N,): whether no noise changed a sample's score by more than rounding; None where the model takes no noise."""
    single, scores = copy.copy(score), ScoreRange()
    if score.values is None:
        return None
    scores.add("score", score.values, None, len(x))
    constant = None
    cards = [x.device] if x.device.type == "cuda" else []
    try:
        for seed in range(NOISES):
            with torch.no_grad(), hooks_muted(score.model), torch.random.fork_rng(devices=cards):
                output = single.forward(noise_like(x, seed))
                values = single.read(output, len(x)).detach()
                chances = single.chance(output, len(x)).detach() if probabilities else None
            scores.add("score", values, None, len(x))
            if chances is not None:
                scores.add("probability", chances, None, len(x))
            constant = scores.is_constant(score.precision)
            if constant is None or not bool(constant.any()):
                return constant
    except Exception:  # a model may refuse noise, or a target find nothing in it: then nothing is known
        return None
    return constant


def noise_like(x: Tensor, seed: int) -> Tensor:
    """Noise of the shape, type, mean and spread of x (N,C,*S); of integers, among its values."""
    draw = torch.Generator(device="cpu").manual_seed(seed)
    if not x.is_floating_point():
        low, high = int(x.min()), int(x.max())
        return torch.randint(low, max(high, low + 1) + 1, x.shape, generator=draw, device="cpu").to(x)
    noise = torch.randn(x.shape, generator=draw, dtype=torch.float32, device="cpu").to(x)
    return x.mean() + noise * torch.where(x.std() > 0, x.std(), 1).nan_to_num(1.0)
