"""Maps: what a method makes of one question, before it is an Explanation.

Facts that go with a map: what the model said of the sample, and under which versions.
"""

import hashlib
import math
import platform
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from math import isnan
from typing import Any

import torch
from torch import Tensor

from camscope.explanation import OK, ClassScore
from camscope.layers.layout import Layout
from camscope.targets import Score
from camscope.version import __version__


@dataclass
class Maps:
    """Raw maps (N,*s) of one score, and what is known of how they came about: of all, and of each sample (`own`).

    `constant_score` (N,): whether the score did not change, but for rounding, with all that was altered.
    `measures`: numbers (N,) by name, which go into the results as they are.
    `error` (N,*s): each cell's standard error, where the map is a mean over what was drawn.
    `unverified`: whether the layout of the layer could be neither verified nor contradicted.
    """

    heat: Tensor
    layer: str | None = None
    layout: Layout | None = None
    zero_gradient: Tensor | None = None
    constant_score: Tensor | None = None
    notes: tuple[str, ...] = ()
    own: tuple[tuple[str, ...], ...] = ()
    measures: dict[str, Tensor] = field(default_factory=dict)
    error: Tensor | None = None
    unverified: bool = False

    def notes_of(self, sample: int) -> tuple[str, ...]:
        """What a result of one sample says of itself."""
        return (*self.notes, *(self.own[sample] if self.own else ()))


Later = Callable[[], Maps]  # a map that takes passes of its own, made when the shared ones are over


def merged(several: Sequence[Maps], heat: Tensor, *said: str) -> Maps:
    """The maps (N,*s) that several became: each note once; a zero gradient or a constant score where all have it."""
    return replace(
        several[0],
        heat=heat,
        error=None,
        zero_gradient=_in_all([one.zero_gradient for one in several]),
        constant_score=_in_all([one.constant_score for one in several]),
        notes=_once([*(one.notes for one in several), said]),
        own=tuple(map(_once, zip_longest(*(one.own for one in several), fillvalue=()))),
        unverified=any(one.unverified for one in several),
        measures={},  # each was of one map: of what they became it does not hold
    )


def stacked(several: Sequence[Maps], *said: str) -> Maps:
    """The maps of samples that were explained one by one, as those of one batch."""
    shared = tuple(note for note in several[0].notes if all(note in one.notes for one in several))
    return replace(
        several[0],
        heat=torch.cat([one.heat for one in several]),
        error=_cat([one.error for one in several]),
        zero_gradient=_cat([one.zero_gradient for one in several]),
        constant_score=_cat([one.constant_score for one in several]),
        notes=(*shared, *said),
        own=tuple(tuple(note for note in one.notes_of(0) if note not in shared) for one in several),
        measures={name: torch.cat([one.measures[name] for one in several]) for name in several[0].measures},
    )


def _cat(parts: Sequence[Tensor | None]) -> Tensor | None:
    known = [part for part in parts if part is not None]
    return torch.cat(known) if len(known) == len(parts) else None


def _in_all(flags: Sequence[Tensor | None]) -> Tensor | None:
    known = [flag for flag in flags if flag is not None]
    return torch.stack(known).all(0) if len(known) == len(flags) else None


def is_faint(precision: float, values: Tensor, gradient: Tensor, at: Tensor) -> Tensor:
    """(N,): whether the score (N,), to first order, would not change by its own precision if all of `at` were zero.

    The gradient there, and `at`, are (N,...); `precision`: see `Score.precision`. Where one of them is zero there is
    nothing to compare.
    """
    change = gradient.flatten(1).norm(dim=1) * at.flatten(1).norm(dim=1)  # or less, by Cauchy and Schwarz
    faint: Tensor = (change > 0) & (change <= precision * values.detach().abs())
    return faint


def _once(notes: Iterable[Iterable[str]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(note for row in notes for note in row))


def statuses(maps: Maps) -> list[str]:
    """One word per sample: "ok", or the gravest key of `MEANING` that applies."""
    flat = maps.heat.detach().flatten(1)
    low, high = flat.amin(1).tolist(), flat.amax(1).tolist()
    zero = [False] * len(flat) if maps.zero_gradient is None else maps.zero_gradient.tolist()
    constant = [False] * len(flat) if maps.constant_score is None else maps.constant_score.tolist()
    found = [_status(flat.shape[1], zero[i], constant[i], low[i], high[i]) for i in range(len(flat))]
    return ["layout_unverified" if status == OK and maps.unverified else status for status in found]


def _status(cells: int, zero_gradient: bool, constant_score: bool, low: float, high: float) -> str:
    if not (math.isfinite(low) and math.isfinite(high)):
        return "nonfinite"
    if zero_gradient:
        return "zero_gradient"
    if cells == 1:
        return "no_spatial_resolution"
    if not high > 0:
        return "no_positive_evidence"
    if constant_score:
        return "constant_score"
    return "flat" if low == high else OK


TOP = 5
WORD = re.compile(r"[\w+-]{1,40}")  # of a setting: no path, and no name of a file


def answered(score: Score, samples: int) -> list[dict[str, Any]]:
    """Question and answer of each sample, as an Explanation has them: target, label, score, probability, top."""
    values = [float("nan")] * samples if score.values is None else score.values.tolist()
    chances, asked = score.chances(), [score.class_of(i) for i in range(samples)]
    tops = _tops(score, samples, chances)
    return [
        {
            "target": index,
            "label": score.label_of(i),
            "score": values[i],
            "probability": None if index is None or chances is None else _known(float(chances[i, index])),
            "top": tops[i],
        }
        for i, index in enumerate(asked)
    ]


def versions() -> dict[str, str]:
    """What the numbers depend on beside the model."""
    return {"camscope": __version__, "torch": str(torch.__version__), "python": platform.python_version()}


def in_words(value: object) -> str:
    """As an object calls itself, without where it lies in memory: the same in every process."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", str(value))


def is_plain(value: Any) -> bool:
    """Whether a setting is a number or a single word, or some of them."""
    if isinstance(value, list | tuple):
        return all(map(is_plain, value))
    return (
        value is None or isinstance(value, bool | int | float) or bool(isinstance(value, str) and WORD.fullmatch(value))
    )


def discreet(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Settings for those who may know no file: of what is not plain, as the path of an image, its kind and a digest."""
    return {name: value if is_plain(value) else _digested(value) for name, value in parameters.items()}


def _digested(value: Any) -> str:
    return f"{type(value).__name__} {hashlib.sha256(in_words(value).encode()).hexdigest()[:8]}"


def _tops(score: Score, samples: int, chances: Tensor | None) -> list[tuple[ClassScore, ...]]:
    """[sample]: the leading classes; read off all samples at once, as a tensor's single values are slow to read."""
    if score.logits is None:
        return [()] * samples
    best = score.logits.double().topk(min(TOP, score.logits.shape[1]), 1)
    shares = torch.full_like(best.values, torch.nan) if chances is None else chances.gather(1, best.indices)
    each = zip(*(part.tolist() for part in (best.indices, best.values, shares)), strict=True)
    return [
        tuple(ClassScore(k, score.name_of(k), value, _known(share)) for k, value, share in zip(*row, strict=True))
        for row in each
    ]


def _known(chance: float) -> float | None:
    return None if isnan(chance) else chance
