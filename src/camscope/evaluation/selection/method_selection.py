"""Select the best method and layer for a model, by a race in which worse candidates drop out early."""

import contextlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path

import numpy as np

from camscope.atomic_writes_and_folder_locks import write_bytes
from camscope.errors import CamscopeError, InputError
from camscope.evaluation.evaluate_model_free_metrics import get_default_region_size
from camscope.evaluation.selection.candidate_explainers import (
    DEFAULT_CANDIDATE_METHODS,
    evaluate_candidates,
    get_model_device,
)
from camscope.evaluation.selection.rank_and_drop_candidates import (
    FAITHFULNESS_METRIC,
    LOCALIZATION_METRIC,
    MIN_GROUPS_TO_COMPARE,
    ROBUSTNESS_METRIC,
    CandidateState,
    ReferenceValues,
    SelectionSample,
    drop_worse_candidates,
    get_remaining_candidates,
    pool_and_sort_metric_values,
    rank_candidates,
)
from camscope.explainers import METHODS, Explainer
from camscope.explainers.core.run_methods_in_shared_passes import run_methods
from camscope.hooks.find_layers import unwrap
from camscope.loaded_model_metadata_and_weight_digest import compute_model_digest
from camscope.metrics.map_similarity import spearman
from camscope.metrics.weight_randomization import randomize_weights
from camscope.plurals import plural
from camscope.read_untrusted_files import read_toml

MAX_UNTRAINED_CORRELATION = 0.7  # Spearman, with the untrained model's map; above it the map shows only the image
MIN_MEDIAN_STABILITY = 0.5
MAX_EQUAL_COST_RATIO = 1.2  # times vary by as much between runs
BLOCK_SIZE = 8  # images in a round


@dataclass(frozen=True)
class MethodSelection:
    """The result of a method selection. `best` holds the winner, two winners that do not differ, or none."""

    best: list[CandidateState]
    candidates: list[CandidateState]
    n_images: int  # that the leader explained
    n_groups: int  # independent images, or groups of images, that there are

    @property
    def survivors(self) -> list[CandidateState]:
        """The candidates that have not been dropped."""
        return get_remaining_candidates(self.candidates)

    @property
    def cheapest(self) -> CandidateState:
        """The candidate to choose if only the cost counts.

        Costs up to 20 % above the lowest count as equal. Of these candidates, methods whose map depends on the class come
        first, then the order of `DEFAULT_CANDIDATE_METHODS` counts, then the rank.
        """
        remaining = self.survivors or self.candidates
        limit = MAX_EQUAL_COST_RATIO * min(candidate.seconds_per_image for candidate in remaining)
        cheap = [candidate for candidate in remaining if candidate.seconds_per_image <= limit]
        return min(cheap, key=lambda candidate: _get_tie_break_key(candidate.explainer))

    @property
    def chosen(self) -> CandidateState:
        """The candidate to save: the best one. Without a clear winner, it is the cheapest one."""
        return self.best[0] if self.best else self.cheapest

    @property
    def recommendation(self) -> str:
        """The recommendation as text. It names the best method, with its faithfulness and computation time."""
        if not self.survivors:
            return "none: no candidate has maps that are robust and depend on the trained weights"
        if not self.best:
            names, cheap = ", ".join(candidate.title for candidate in self.survivors), self.cheapest
            if self.n_groups < MIN_GROUPS_TO_COMPARE:
                few = plural(self.n_groups, "image or group", "images or groups")
                text = f"{few} cannot tell candidates apart: {MIN_GROUPS_TO_COMPARE} are needed ({names})"
            else:
                count = plural(len(self.survivors), "candidate")
                text = f"no clear winner after {plural(self.n_images, 'image')}: {count} do not differ significantly ({names})"
            return f"{text}; one of the cheapest of them is {cheap.title}, {cheap.seconds_per_image:.3f} s an image"
        return " or ".join(
            f"{candidate.title} (faithfulness {candidate.estimate_metric(FAITHFULNESS_METRIC)}, "
            f"{candidate.seconds_per_image:.3f} s an image)"
            for candidate in self.best
        )


def _get_tie_break_key(explainer: Explainer) -> tuple[bool, int]:
    """Return a sort key that decides between methods of equal cost."""
    names = DEFAULT_CANDIDATE_METHODS
    position = names.index(explainer.name) if explainer.name in names else len(names)
    return not explainer.class_specific, position


# appends the values of a block of samples to each candidate
BlockEvaluator = Callable[[Sequence[CandidateState], Sequence[SelectionSample]], None]
RaceProgressCallback = Callable[[int, int, int], None]  # images seen, images there are, candidates left


def select_method(
    explainers: Sequence[Explainer],
    samples: Sequence[SelectionSample],
    *,
    n_steps: int = 6,
    region_size: int | None = None,
    seed: int = 0,
    never_drop: bool = False,
    on_progress: RaceProgressCallback | None = None,
    evaluate_block: BlockEvaluator | None = None,
) -> MethodSelection:
    """Select the best explainer of a model in a race. All samples have the same input size.

    If `never_drop` is true, all candidates explain all images. `n_steps` and `region_size` are those of `PerturbationTest`.
    Raises InputError for fewer than two candidates or images.
    """
    if len(explainers) < 2 or len(samples) < 2:
        raise InputError(
            f"got {plural(len(explainers), 'candidate')} and {plural(len(samples), 'image')}; expected at least two of each"
        )
    shuffled = _shuffle_by_group(samples, seed)
    groups = None if all(sample.group is None for sample in shuffled) else [sample.group for sample in shuffled]
    masked = [LOCALIZATION_METRIC] if any(sample.mask is not None for sample in samples) else []
    names = (FAITHFULNESS_METRIC, *masked, ROBUSTNESS_METRIC)
    candidates = [CandidateState(explainer, {name: [] for name in names}, groups=groups) for explainer in explainers]
    for candidate in candidates:
        candidate.drop_reason = find_model_independence_reason(candidate.explainer, shuffled[:BLOCK_SIZE], seed)
    reference: ReferenceValues = {}
    for start in range(0, len(shuffled), BLOCK_SIZE):
        racing, block = get_remaining_candidates(candidates), shuffled[start : start + BLOCK_SIZE]
        if not racing or (len(racing) == 1 and start and not never_drop):
            break
        if evaluate_block is None:
            evaluate_candidates(racing, block, n_steps, region_size or get_default_region_size(block[0].item.x), seed)
        else:
            evaluate_block(racing, block)
        reference = pool_and_sort_metric_values(racing) | {
            name: values for name, values in reference.items() if len(values)
        }
        n_seen = start + len(block)
        if not never_drop or n_seen == len(shuffled):
            _drop_duplicate_and_unstable_candidates(racing)
            drop_worse_candidates(get_remaining_candidates(racing), reference, len(shuffled))
        if on_progress is not None:
            on_progress(n_seen, len(samples), len(get_remaining_candidates(candidates)))
    return _build_selection(candidates, reference, len(samples))


def _shuffle_by_group(samples: Sequence[SelectionSample], seed: int) -> list[SelectionSample]:
    """Shuffle samples, but keep the samples of each group together. Raise an InputError if only some samples have a group."""
    shuffled = [samples[i] for i in np.random.default_rng(seed).permutation(len(samples))]
    n_without_group = sum(sample.group is None for sample in shuffled)
    if 0 < n_without_group < len(shuffled):
        count = plural(n_without_group, "image has", "images have")
        raise InputError(f"{count} no group: give all images a group, or no image")
    order = {group: n for n, group in enumerate(dict.fromkeys(sample.group for sample in shuffled))}
    return sorted(shuffled, key=lambda sample: order[sample.group])


def find_model_independence_reason(explainer: Explainer, samples: Sequence[SelectionSample], seed: int) -> str:
    """Say why the maps of an explainer do not depend on the trained weights. If the maps depend on the weights, return ""."""
    if explainer.control:
        return "a control: it does not depend on the model"
    untrained, correlations = randomize_weights(explainer, seed), []
    for sample in samples[:4]:
        x = sample.item.x[None]
        with contextlib.suppress(CamscopeError, ArithmeticError):
            runs = [run_methods([e], x.to(get_model_device(e)), [sample.target])[0] for e in (explainer, untrained)]
            correlations.append(spearman(*(run.maps[0].attribution[0].detach().cpu().numpy() for run in runs)))
    correlation = float(np.median(correlations)) if correlations else 0.0
    if correlation <= MAX_UNTRAINED_CORRELATION:
        return ""
    return f"its maps stay the same without the trained weights (correlation {correlation:.2f})"


def _drop_duplicate_and_unstable_candidates(candidates: Sequence[CandidateState]) -> None:
    """Drop candidates with the same maps as another candidate.
    Also drop candidates whose maps change under small image changes.
    """
    for n, candidate in enumerate(candidates):
        remaining = get_remaining_candidates(candidates[:n])
        duplicate = next((other for other in remaining if have_same_maps(candidate, other)), None)
        if duplicate is not None:
            candidate.drop_reason = f"its maps are those of {duplicate.title}"
    for candidate in get_remaining_candidates(candidates):
        values = np.array(candidate.metric_values[ROBUSTNESS_METRIC])
        stability = float(np.median(values[~np.isnan(values)])) if not np.isnan(values).all() else 1.0
        if stability < MIN_MEDIAN_STABILITY:
            candidate.drop_reason = f"its maps change under small changes of the image (correlation {stability:.2f})"


def have_same_maps(first: CandidateState, second: CandidateState) -> bool:
    """Return whether the first maps of two candidates are equal. Each map is first divided by its largest value."""
    for first_map, second_map in zip(first.first_maps, second.first_maps, strict=True):
        first_peak, second_peak = np.abs(first_map).max(), np.abs(second_map).max()
        difference = np.abs(first_map * second_peak - second_map * first_peak).max()
        if not difference <= 1e-3 * first_peak * second_peak or (first_peak > 0) != (second_peak > 0):
            return False
    return bool(first.first_maps)


def _build_selection(
    candidates: Sequence[CandidateState], reference: ReferenceValues, n_images: int
) -> MethodSelection:
    """Rank the remaining candidates. If the result is not clear, the selection names no best candidates."""
    ranked = rank_candidates(get_remaining_candidates(candidates), reference)
    dropped = sorted((c for c in candidates if c.drop_reason), key=lambda candidate: -candidate.n_images)
    n_seen = max(candidate.n_images for candidate in ranked or candidates)
    n_groups = n_images if candidates[0].groups is None else len(set(candidates[0].groups))
    is_clear = len(ranked) == 1 or (len(ranked) == 2 and n_groups >= MIN_GROUPS_TO_COMPARE)
    return MethodSelection(ranked if is_clear else [], [*ranked, *dropped], n_seen, n_groups)


@dataclass(frozen=True)
class SavedSelection:
    """The selected method and layer, with the digest of the model."""

    method: str
    layer: str | None
    model_digest: str


def save_selection(selection: MethodSelection, path: str | Path, *, overwrite: bool = False) -> Path:
    """Write the selected method to a TOML file. If there is no clear winner, write the cheapest candidate."""

    def quote_toml_string(text: str) -> str:  # a TOML string equals one of JSON up to one escape
        return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")

    best = selection.chosen
    lines = [f"# {selection.recommendation}", f"method = {quote_toml_string(best.explainer.name)}"]
    layer = getattr(best.explainer, "layer", None)
    lines += [f"layer = {quote_toml_string(layer)}"] if isinstance(layer, str) else []
    lines += [f"model = {quote_toml_string(compute_model_digest(unwrap(best.explainer.model)))}"]
    lines += [f"clear = {str(bool(selection.best)).lower()}"]
    for candidate in selection.candidates:
        lines += ["", "[[standing]]", f"title = {quote_toml_string(candidate.title)}", f"images = {candidate.n_images}"]
        lines += [f"seconds = {candidate.seconds_per_image:.4f}"]
        for name in candidate.metric_values:
            if (estimate := candidate.estimate_metric(name)) is not None:
                numbers = [number for number in (estimate.mean, estimate.low, estimate.high) if isfinite(number)]
                lines.append(f"{name} = [{', '.join(f'{number:.4f}' for number in numbers)}]")
        lines += [f"out = {quote_toml_string(candidate.drop_reason)}"] if candidate.drop_reason else []
    return write_bytes(path, ("\n".join(lines) + "\n").encode(), overwrite=overwrite)


def read_selection(path: str | Path) -> SavedSelection:
    """Read a TOML file that `save_selection` wrote. Raise an InputError for any other file."""
    data = read_toml(path, f"{path} was not written by camscope choose --save")
    method, layer, model = (data.get(name) for name in ("method", "layer", "model"))
    if isinstance(method, str) and isinstance(layer, str | None) and isinstance(model, str) and method in METHODS:
        return SavedSelection(method, layer, model)
    raise InputError(
        f"{path} was not written by camscope choose --save: expected text for method, model and, if there is one, layer"
    )
