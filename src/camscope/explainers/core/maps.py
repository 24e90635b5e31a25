"""The maps of one score before they become explanations, with their status, and the model's predictions."""

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
    """Raw maps (N,*s) of one score, with notes about all samples (`notes`) and about each (`sample_notes`).

    `constant_score` (N,): whether the score stayed the same, up to rounding, for all altered inputs.
    `diagnostics`: numbers (N,) by name, which results contain unchanged.
    `standard_error` (N,*s): the standard error of each cell, if the map is a mean over random samples.
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
        """Return the notes that apply to one sample."""
        return (*self.notes, *(self.sample_notes[sample] if self.sample_notes else ()))


DeferredMap = Callable[[], AttributionMaps]  # computes a map that needs its own passes, after the shared ones


def compute_or_return_error(compute: DeferredMap) -> AttributionMaps | CamscopeError:
    """Return the map or, so that other methods of a shared pass continue, the error of this method."""
    try:
        return compute()
    except CamscopeError as error:
        return error


def resolve_map(entry: AttributionMaps | DeferredMap | CamscopeError) -> AttributionMaps:
    """Return the map of an entry of `compute_shared_maps`: compute a deferred one, raise an error."""
    if isinstance(entry, CamscopeError):
        raise entry
    return entry() if callable(entry) else entry


def merge_maps(maps: Sequence[AttributionMaps], attribution: Tensor, *notes: str) -> AttributionMaps:
    """Return the merged maps (N,*s): each note once; a zero gradient or a constant score only if all maps have it."""
    return replace(
        maps[0],
        attribution=attribution,
        standard_error=None,
        zero_gradient=_all_if_complete([item.zero_gradient for item in maps]),
        constant_score=_all_if_complete([item.constant_score for item in maps]),
        notes=_merge_unique_notes([*(item.notes for item in maps), notes]),
        sample_notes=tuple(map(_merge_unique_notes, zip_longest(*(item.sample_notes for item in maps), fillvalue=()))),
        layout_unverified=any(item.layout_unverified for item in maps),
        diagnostics={},  # diagnostics of one map do not hold for the merged map
    )


def stack_samples(maps: Sequence[AttributionMaps], *notes: str) -> AttributionMaps:
    """Return the maps of separately explained samples as those of one batch."""
    shared = tuple(note for note in maps[0].notes if all(note in sample.notes for sample in maps))
    return replace(
        maps[0],
        attribution=torch.cat([sample.attribution for sample in maps]),
        standard_error=_concatenate_if_complete([sample.standard_error for sample in maps]),
        zero_gradient=_concatenate_if_complete([sample.zero_gradient for sample in maps]),
        constant_score=_concatenate_if_complete([sample.constant_score for sample in maps]),
        notes=(*shared, *notes),
        sample_notes=tuple(tuple(note for note in sample.get_sample_notes(0) if note not in shared) for sample in maps),
        diagnostics={name: torch.cat([sample.diagnostics[name] for sample in maps]) for name in maps[0].diagnostics},
    )


def _concatenate_if_complete(parts: Sequence[Tensor | None]) -> Tensor | None:
    present = [part for part in parts if part is not None]
    return torch.cat(present) if len(present) == len(parts) else None


def _all_if_complete(flags: Sequence[Tensor | None]) -> Tensor | None:
    present = [flag for flag in flags if flag is not None]
    return torch.stack(present).all(0) if len(present) == len(flags) else None


def is_below_precision(precision: float, values: Tensor, gradient: Tensor, activation: Tensor) -> Tensor:
    """Whether each score (N,), to first order, changes by less than its own rounding if all of `activation` becomes zero.

    The gradient there and `activation` are (N,...). `precision` is the machine epsilon of the score. A zero gradient or
    activation gives False, because there is nothing to compare.
    """
    change = gradient.flatten(1).norm(dim=1) * activation.flatten(1).norm(dim=1)  # an upper bound, by Cauchy-Schwarz
    faint: Tensor = (change > 0) & (change <= precision * values.detach().abs())
    return faint


def _merge_unique_notes(notes: Iterable[Iterable[str]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(note for row in notes for note in row))


def determine_statuses(maps: AttributionMaps) -> list[str]:
    """Return for each sample "ok", or the most severe key of `STATUS_MEANINGS` that applies."""
    flat = maps.attribution.detach().flatten(1)
    low, high = flat.amin(1).tolist(), flat.amax(1).tolist()
    zero = [False] * len(flat) if maps.zero_gradient is None else maps.zero_gradient.tolist()
    constant = [False] * len(flat) if maps.constant_score is None else maps.constant_score.tolist()
    statuses = [_determine_status(flat.shape[1], zero[i], constant[i], low[i], high[i]) for i in range(len(flat))]
    return ["layout_unverified" if status == STATUS_OK and maps.layout_unverified else status for status in statuses]


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
SAFE_WORD_PATTERN = re.compile(r"[\w+-]{1,40}")  # a setting's word, but no path or file name


def collect_predictions(score: Score, n_samples: int) -> list[dict[str, Any]]:
    """Return the fields of an Explanation that hold target and answer: target, label, score, probability, top classes."""
    values = [float("nan")] * n_samples if score.values is None else score.values.tolist()
    probabilities, class_indices = score.probabilities(), [score.class_index(i) for i in range(n_samples)]
    tops = _collect_top_classes(score, n_samples, probabilities)
    return [
        {
            "target": index,
            "label": score.describe(i),
            "score": values[i],
            "probability": None
            if index is None or probabilities is None
            else _nan_to_none(float(probabilities[i, index])),
            "top_classes": tops[i],
        }
        for i, index in enumerate(class_indices)
    ]


def get_library_versions() -> dict[str, str]:
    """Return the versions of the software that the numbers depend on."""
    return {"camscope": __version__, "torch": str(torch.__version__), "python": platform.python_version()}


def format_without_address(value: object) -> str:
    """Return an object as text without its memory address, so that it is the same in every process."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", str(value))


def is_simple_setting(value: Any) -> bool:
    """Whether a setting is a number or a single word, or a list of these."""
    if isinstance(value, list | tuple):
        return all(map(is_simple_setting, value))
    return (
        value is None
        or isinstance(value, bool | int | float)
        or bool(isinstance(value, str) and SAFE_WORD_PATTERN.fullmatch(value))
    )


def redact_parameters(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings without file names: any value that is not simple, such as a path, becomes its type and a digest."""
    return {name: value if is_simple_setting(value) else _digest_value(value) for name, value in parameters.items()}


def _digest_value(value: Any) -> str:
    return f"{type(value).__name__} {hashlib.sha256(format_without_address(value).encode()).hexdigest()[:8]}"


def _collect_top_classes(score: Score, n_samples: int, probabilities: Tensor | None) -> list[tuple[ClassScore, ...]]:
    """Return the leading classes of each sample."""
    if score.logits is None:
        return [()] * n_samples
    best = score.logits.double().topk(min(MAX_TOP_CLASSES, score.logits.shape[1]), 1)
    shares = torch.full_like(best.values, torch.nan) if probabilities is None else probabilities.gather(1, best.indices)
    columns = zip(*(part.tolist() for part in (best.indices, best.values, shares)), strict=True)
    return [
        tuple(
            ClassScore(k, score.class_name(k), value, _nan_to_none(share)) for k, value, share in zip(*row, strict=True)
        )
        for row in columns
    ]


def _nan_to_none(probability: float) -> float | None:
    return None if isnan(probability) else probability
