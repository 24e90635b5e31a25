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

from camscope.errors import CamscopeError
from camscope.explanation import STATUS_OK, ClassScore
from camscope.layers.layout import Layout
from camscope.targets import Score
from camscope.version import __version__


@dataclass
class AttributionMaps:
    """Raw maps (N,*s) of one score, and what is known of how they came about: of all, and of each sample (`sample_notes`).

    `constant_score` (N,): whether the score did not change, but for rounding, with all that was altered.
    `diagnostics`: numbers (N,) by name, which go into the results as they are.
    `standard_error` (N,*s): each cell's standard error, where the map is a mean over what was drawn.
    `layout_unverified`: whether the layout of the layer could be neither verified nor contradicted.
    """

    attribution: Tensor
    layer: str | None = None
    layout: Layout | None = None
    zero_gradient: Tensor | None = None
    constant_score: Tensor | None = None
    notes: tuple[str, ...] = ()
    sample_notes: tuple[tuple[str, ...], ...] = ()
    diagnostics: dict[str, Tensor] = field(default_factory=dict)
    standard_error: Tensor | None = None
    layout_unverified: bool = False

    def get_sample_notes(self, sample: int) -> tuple[str, ...]:
        """What a result of one sample says of itself."""
        return (*self.notes, *(self.sample_notes[sample] if self.sample_notes else ()))


DeferredMap = Callable[[], AttributionMaps]  # computes a map that needs its own passes, after the shared ones


def compute_or_return_error(compute: DeferredMap) -> AttributionMaps | CamscopeError:
    """Return the map, or the error of one method, so that other methods of a shared pass go on."""
    try:
        return compute()
    except CamscopeError as error:
        return error


def resolve_map(entry: AttributionMaps | DeferredMap | CamscopeError) -> AttributionMaps:
    """Return the map of an entry of `compute_shared_maps`: compute a deferred one, and raise an error."""
    if isinstance(entry, CamscopeError):
        raise entry
    return entry() if callable(entry) else entry


def merge_maps(maps: Sequence[AttributionMaps], attribution: Tensor, *notes: str) -> AttributionMaps:
    """The maps (N,*s) that several became: each note once; a zero gradient or a constant score where all have it."""
    return replace(
        maps[0],
        attribution=attribution,
        standard_error=None,
        zero_gradient=_all_if_complete([one.zero_gradient for one in maps]),
        constant_score=_all_if_complete([one.constant_score for one in maps]),
        notes=_merge_unique_notes([*(one.notes for one in maps), notes]),
        sample_notes=tuple(map(_merge_unique_notes, zip_longest(*(one.sample_notes for one in maps), fillvalue=()))),
        layout_unverified=any(one.layout_unverified for one in maps),
        diagnostics={},  # each was of one map: of what they became it does not hold
    )


def stack_samples(maps: Sequence[AttributionMaps], *notes: str) -> AttributionMaps:
    """The maps of samples that were explained one by one, as those of one batch."""
    shared = tuple(note for note in maps[0].notes if all(note in one.notes for one in maps))
    return replace(
        maps[0],
        attribution=torch.cat([one.attribution for one in maps]),
        standard_error=_concatenate_if_complete([one.standard_error for one in maps]),
        zero_gradient=_concatenate_if_complete([one.zero_gradient for one in maps]),
        constant_score=_concatenate_if_complete([one.constant_score for one in maps]),
        notes=(*shared, *notes),
        sample_notes=tuple(tuple(note for note in one.get_sample_notes(0) if note not in shared) for one in maps),
        diagnostics={name: torch.cat([one.diagnostics[name] for one in maps]) for name in maps[0].diagnostics},
    )


def _concatenate_if_complete(parts: Sequence[Tensor | None]) -> Tensor | None:
    known = [part for part in parts if part is not None]
    return torch.cat(known) if len(known) == len(parts) else None


def _all_if_complete(flags: Sequence[Tensor | None]) -> Tensor | None:
    known = [flag for flag in flags if flag is not None]
    return torch.stack(known).all(0) if len(known) == len(flags) else None


def is_below_precision(precision: float, values: Tensor, gradient: Tensor, activation: Tensor) -> Tensor:
    """(N,): whether the score (N,), to first order, would not change by its own precision if all of `activation` were zero.

    The gradient there, and `activation`, are (N,...); `machine_epsilon`: see `Score.precision`. Where one of them is zero there is
    nothing to compare.
    """
    change = gradient.flatten(1).norm(dim=1) * activation.flatten(1).norm(dim=1)  # or less, by Cauchy and Schwarz
    faint: Tensor = (change > 0) & (change <= precision * values.detach().abs())
    return faint


def _merge_unique_notes(notes: Iterable[Iterable[str]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(note for row in notes for note in row))


def determine_statuses(maps: AttributionMaps) -> list[str]:
    """One word per sample: "ok", or the gravest key of `STATUS_MEANINGS` that applies."""
    flat = maps.attribution.detach().flatten(1)
    low, high = flat.amin(1).tolist(), flat.amax(1).tolist()
    zero = [False] * len(flat) if maps.zero_gradient is None else maps.zero_gradient.tolist()
    constant = [False] * len(flat) if maps.constant_score is None else maps.constant_score.tolist()
    found = [_determine_status(flat.shape[1], zero[i], constant[i], low[i], high[i]) for i in range(len(flat))]
    return ["layout_unverified" if status == STATUS_OK and maps.layout_unverified else status for status in found]


def _determine_status(n_cells: int, zero_gradient: bool, constant_score: bool, low: float, high: float) -> str:
    if not (math.isfinite(low) and math.isfinite(high)):
        return "nonfinite"
    if zero_gradient:
        return "zero_gradient"
    if n_cells == 1:
        return "no_spatial_resolution"
    if not high > 0:
        return "no_positive_evidence"
    if constant_score:
        return "constant_score"
    return "flat" if low == high else STATUS_OK


MAX_TOP_CLASSES = 5
SAFE_WORD_PATTERN = re.compile(r"[\w+-]{1,40}")  # of a setting: no path, and no name of a file


def collect_predictions(score: Score, n_samples: int) -> list[dict[str, Any]]:
    """Question and answer of each sample, as an Explanation has them: target, label, score, probability, top."""
    values = [float("nan")] * n_samples if score.values is None else score.values.tolist()
    chances, asked = score.probabilities(), [score.class_index(i) for i in range(n_samples)]
    tops = _collect_top_classes(score, n_samples, chances)
    return [
        {
            "target": index,
            "label": score.describe(i),
            "score": values[i],
            "probability": None if index is None or chances is None else _nan_to_none(float(chances[i, index])),
            "top_classes": tops[i],
        }
        for i, index in enumerate(asked)
    ]


def get_library_versions() -> dict[str, str]:
    """What the numbers depend on beside the model."""
    return {"camscope": __version__, "torch": str(torch.__version__), "python": platform.python_version()}


def format_without_address(value: object) -> str:
    """As an object calls itself, without where it lies in memory: the same in every process."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", str(value))


def is_simple_setting(value: Any) -> bool:
    """Whether a setting is a number or a single word, or some of them."""
    if isinstance(value, list | tuple):
        return all(map(is_simple_setting, value))
    return (
        value is None
        or isinstance(value, bool | int | float)
        or bool(isinstance(value, str) and SAFE_WORD_PATTERN.fullmatch(value))
    )


def redact_parameters(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Settings for those who may know no file: of what is not plain, as the path of an image, its kind and a digest."""
    return {name: value if is_simple_setting(value) else _digest_value(value) for name, value in parameters.items()}


def _digest_value(value: Any) -> str:
    return f"{type(value).__name__} {hashlib.sha256(format_without_address(value).encode()).hexdigest()[:8]}"


def _collect_top_classes(score: Score, n_samples: int, probabilities: Tensor | None) -> list[tuple[ClassScore, ...]]:
    """[sample]: the leading classes; read off all samples at once, as a tensor's single values are slow to read."""
    if score.logits is None:
        return [()] * n_samples
    best = score.logits.double().topk(min(MAX_TOP_CLASSES, score.logits.shape[1]), 1)
    shares = torch.full_like(best.values, torch.nan) if probabilities is None else probabilities.gather(1, best.indices)
    each = zip(*(part.tolist() for part in (best.indices, best.values, shares)), strict=True)
    return [
        tuple(
            ClassScore(k, score.class_name(k), value, _nan_to_none(share)) for k, value, share in zip(*row, strict=True)
        )
        for row in each
    ]


def _nan_to_none(probability: float) -> float | None:
    return None if isnan(probability) else probability
