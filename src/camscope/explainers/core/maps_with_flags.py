"""`AttributionMaps`: the raw maps of one score with notes and flags, and the status of each map."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest

import torch
from torch import Tensor

from camscope.errors import CamscopeError
from camscope.explanation import STATUS_OK
from camscope.layers.layout import Layout


@dataclass
class AttributionMaps:
    """Raw maps (N,*s) of one score for N samples, with notes and flags.

    `notes` are about all samples, `sample_notes` about each sample. `constant_score` (N,) says whether the score was
    the same for all altered inputs, up to rounding. `diagnostics` are numbers (N,) by name for the results.
    `standard_error` (N,*s) is that of each cell, if the map is a mean over random samples. `layout_unverified` says
    whether the layout of the layer could be neither verified nor contradicted.
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
        """Return the notes about one sample. Notes about all samples are included."""
        return (*self.notes, *(self.sample_notes[sample] if self.sample_notes else ()))


DeferredMap = Callable[[], AttributionMaps]  # computes a map that needs its own passes, after the shared ones


def compute_map_or_return_error(compute: DeferredMap) -> AttributionMaps | CamscopeError:
    """Compute a map. Return an error instead of raising it, so that other methods can continue."""
    try:
        return compute()
    except CamscopeError as error:
        return error


def compute_map_or_raise(entry: AttributionMaps | DeferredMap | CamscopeError) -> AttributionMaps:
    """Return the map of one result of `compute_shared_maps`. Compute a deferred map now. If the result is an error, raise it."""
    if isinstance(entry, CamscopeError):
        raise entry
    return entry() if callable(entry) else entry


def merge_notes_and_flags(maps: Sequence[AttributionMaps], attribution: Tensor, *notes: str) -> AttributionMaps:
    """Merge the notes and flags of several maps. The merged result gets the new `attribution` (N,*s).

    Each note appears once. A zero gradient or a constant score is reported only if all maps have it.
    """

    def merge_notes(rows: Iterable[Iterable[str]]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(note for row in rows for note in row))

    def keep_flags_of_all_maps(flags: list[Tensor]) -> Tensor:
        return torch.stack(flags).all(0)

    return replace(
        maps[0],
        attribution=attribution,
        standard_error=None,
        zero_gradient=_join_if_none_missing([item.zero_gradient for item in maps], keep_flags_of_all_maps),
        constant_score=_join_if_none_missing([item.constant_score for item in maps], keep_flags_of_all_maps),
        notes=merge_notes([*(item.notes for item in maps), notes]),
        sample_notes=tuple(map(merge_notes, zip_longest(*(item.sample_notes for item in maps), fillvalue=()))),
        layout_unverified=any(item.layout_unverified for item in maps),
        diagnostics={},  # diagnostics of one map do not hold for the merged map
    )


def concatenate_sample_maps(maps: Sequence[AttributionMaps], *notes: str) -> AttributionMaps:
    """Concatenate maps that were computed one sample at a time into the maps of a batch."""
    shared = tuple(note for note in maps[0].notes if all(note in sample.notes for sample in maps))
    return replace(
        maps[0],
        attribution=torch.cat([sample.attribution for sample in maps]),
        standard_error=_join_if_none_missing([sample.standard_error for sample in maps], torch.cat),
        zero_gradient=_join_if_none_missing([sample.zero_gradient for sample in maps], torch.cat),
        constant_score=_join_if_none_missing([sample.constant_score for sample in maps], torch.cat),
        notes=(*shared, *notes),
        sample_notes=tuple(tuple(note for note in sample.get_sample_notes(0) if note not in shared) for sample in maps),
        diagnostics={name: torch.cat([sample.diagnostics[name] for sample in maps]) for name in maps[0].diagnostics},
    )


def _join_if_none_missing(parts: Sequence[Tensor | None], join: Callable[[list[Tensor]], Tensor]) -> Tensor | None:
    present = [part for part in parts if part is not None]
    return join(present) if len(present) == len(parts) else None


def find_samples_below_precision(precision: float, scores: Tensor, gradient: Tensor, activation: Tensor) -> Tensor:
    """Return a mask (N,) of samples for which a zero activation would change the score by less than the share `precision`."""
    change = gradient.flatten(1).norm(dim=1) * activation.flatten(1).norm(dim=1)  # an upper bound, by Cauchy-Schwarz
    faint: Tensor = (change > 0) & (change <= precision * scores.detach().abs())
    return faint


def determine_statuses(maps: AttributionMaps) -> list[str]:
    """Return the status of each sample: the most severe applicable status in `STATUS_MEANINGS`, or "ok"."""
    flat = maps.attribution.detach().flatten(1)
    low, high = flat.amin(1).tolist(), flat.amax(1).tolist()
    zero, constant = (
        [False] * len(flat) if flags is None else flags.tolist() for flags in (maps.zero_gradient, maps.constant_score)
    )
    statuses = [_determine_status(flat.shape[1], zero[i], constant[i], low[i], high[i]) for i in range(len(flat))]
    return ["layout_unverified" if status == STATUS_OK and maps.layout_unverified else status for status in statuses]


def _determine_status(n_cells: int, zero_gradient: bool, constant_score: bool, low: float, high: float) -> str:
    """Return the status of a map. The first reason against its use decides."""
    if not (math.isfinite(low) and math.isfinite(high)):
        return "nonfinite"
    if zero_gradient:
        return "zero_gradient"
    if n_cells == 1:
        return "no_spatial_resolution"
    if constant_score:
        return "constant_score"
    if not high > 0:
        return "no_positive_evidence"
    return "flat" if low == high else STATUS_OK
