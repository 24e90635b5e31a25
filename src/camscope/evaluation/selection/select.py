"""choose: which method, at which layer, on this model and these images. Candidates race; losers drop out early.

Every candidate explains the same images, a block at a time. Of each map it is asked how much faster the model's answer goes
when the map's strongest regions are removed than when its weakest are (under two fills), where the evidence is known how much
of the map lies in it, and whether the map stays as it is when the image hardly changes. Maps that stay as they are when the
model loses its training do not start; of maps that are the same one stays; maps that do not hold still are out. See `race`
for who drops out when.

A choice as a file: TOML that `camscope explain` and `camscope batch` take, with the evidence that it rests on.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path

import numpy as np

from camscope.data_readers import read_toml
from camscope.errors import CamscopeError, InputError
from camscope.evaluation.map_metrics import get_default_region_size
from camscope.evaluation.selection.candidate_scores import evaluate_candidates, get_model_device
from camscope.evaluation.selection.racing import (
    FAITHFULNESS_METRIC,
    LOCALIZATION_METRIC,
    MIN_GROUPS_TO_COMPARE,
    ROBUSTNESS_METRIC,
    CandidateState,
    ReferenceValues,
    SelectionSample,
    collect_reference,
    count_groups,
    drop_losers,
    is_race_decided,
    rank_candidates,
    survivors,
)
from camscope.explainers import METHODS, Explainer
from camscope.explainers.core.dispatch import run_methods
from camscope.hooks.base import unwrap
from camscope.metrics.similarity import spearman
from camscope.metrics.weight_randomization import randomize_weights
from camscope.model_card import compute_model_digest
from camscope.plurals import plural
from camscope.safe_files import write_bytes

MAX_UNTRAINED_CORRELATION = (
    0.7  # of Spearman's correlation with the untrained model's map: above it a map shows the image, not what was learnt
)
MIN_MEDIAN_STABILITY = (
    0.5  # of the median stability: below it most of a map is other than that of the image a moment later
)


@dataclass(frozen=True)
class MethodSelection:
    """`best`: one, or two that cannot be told apart; empty where there is no clear winner. `candidates`: all, the best first.

    `n_images`: that the leader saw; `n_maps`: maps judged in all, and `n_maps_without_drops` those of a race in which nobody drops out.
    `n_groups`: images, or groups of them, that there were to tell candidates apart by.
    """

    best: list[CandidateState]
    candidates: list[CandidateState]
    n_images: int
    n_maps: int
    n_maps_without_drops: int
    n_groups: int

    @property
    def survivors(self) -> list[CandidateState]:
        """Those that are still in the race."""
        return [one for one in self.candidates if not one.drop_reason]

    @property
    def cheapest(self) -> CandidateState:
        """Of those that are still in the race."""
        return min(self.survivors or self.candidates, key=lambda one: one.seconds_per_image)

    @property
    def recommendation(self) -> str:
        """The recommendation in words, with its evidence and its price."""
        if not self.survivors:
            return "none: the maps of no candidate depend on what the model learnt and hold still"
        if not self.best:
            names, cheap = ", ".join(one.title for one in self.survivors), self.cheapest
            if self.n_groups < MIN_GROUPS_TO_COMPARE:
                few = plural(self.n_groups, "image or group", "images or groups")
                found = f"{few} cannot tell candidates apart: {MIN_GROUPS_TO_COMPARE} are needed ({names})"
            else:
                alike = plural(len(self.survivors), "candidate is", "candidates are")
                found = f"no clear winner after {plural(self.n_images, 'image')}: {alike} alike ({names})"
            return f"{found}; the cheapest of them is {cheap.title}, {cheap.seconds_per_image:.3f} s an image"
        said = []
        for one in self.best:
            gap = one.estimate_metric(FAITHFULNESS_METRIC)
            said.append(f"{one.title} (faithfulness {gap}, {one.seconds_per_image:.3f} s an image)")
        return " or ".join(said)


BlockEvaluator = Callable[
    [Sequence[CandidateState], Sequence[SelectionSample]], None
]  # adds a block's values to each standing
RaceProgressCallback = Callable[[int, int, int], None]  # images seen, images there are, candidates left


def select_method(
    explainers: Sequence[Explainer],
    samples: Sequence[SelectionSample],
    *,
    block_size: int = 8,
    n_steps: int = 6,
    region_size: int | None = None,
    seed: int = 0,
    never_drop: bool = False,
    on_progress: RaceProgressCallback | None = None,
    evaluate_block: BlockEvaluator | None = None,
) -> MethodSelection:
    """Race explainers of one model over samples of one size; see the module.

    `block_size`: images in a round. `n_steps`, `region_size`: points of a removal curve, and the side in pixels of what is removed at a
    time; None: a fourteenth of the input's shortest side. `seed`: the order of the images, and of ties. `never_drop`: nobody
    drops out before the end. `evaluate_block`: who adds a block's values, instead of asking the model.
    """
    if len(explainers) < 2 or len(samples) < 2:
        raise InputError(f"candidates: {len(explainers)}, images: {len(samples)}; a race needs two of each at least")
    drawn = _shuffle_by_group(samples, seed)
    groups = None if all(one.group is None for one in drawn) else [one.group for one in drawn]
    masked = [LOCALIZATION_METRIC] if any(one.mask is not None for one in samples) else []
    names = (FAITHFULNESS_METRIC, *masked, ROBUSTNESS_METRIC)
    standings = [CandidateState(tool, {name: [] for name in names}, groups=groups) for tool in explainers]
    for one in standings:
        one.drop_reason = find_model_independence_reason(one.explainer, drawn[:block_size], seed)
    known: ReferenceValues = {}
    for start in range(0, len(drawn), block_size):
        racing, some = survivors(standings), drawn[start : start + block_size]
        if not racing or (known and not never_drop and is_race_decided(racing, known, len(drawn))):
            break
        if evaluate_block is None:
            evaluate_candidates(racing, some, n_steps, region_size or get_default_region_size(some[0].item.x), seed)
        else:
            evaluate_block(racing, some)
        known = collect_reference(racing) | {name: values for name, values in known.items() if len(values)}
        seen = start + len(some)
        if not never_drop or seen == len(drawn):
            _drop_duplicates_and_unstable(racing)
            drop_losers(survivors(racing), known, len(drawn))
        if on_progress is not None:
            on_progress(seen, len(samples), len(survivors(standings)))
    return _build_selection(standings, known, len(samples))


def _shuffle_by_group(samples: Sequence[SelectionSample], seed: int) -> list[SelectionSample]:
    """In random order, those of a group one after the other; InputError where only some have a group."""
    drawn = [samples[i] for i in np.random.default_rng(seed).permutation(len(samples))]
    if any(one.group is None for one in drawn) and not all(one.group is None for one in drawn):
        raise InputError(
            f"{plural(sum(one.group is None for one in drawn), 'image has', 'images have')} no group: name one "
            "of each, or of none"
        )
    places = {group: n for n, group in enumerate(dict.fromkeys(one.group for one in drawn))}
    return sorted(drawn, key=lambda one: places[one.group])


def find_model_independence_reason(explainer: Explainer, samples: Sequence[SelectionSample], seed: int) -> str:
    """Why a candidate's maps say nothing of what the model learnt: they are the same without it; "" where they are not.

    Alike: Spearman's correlation of the map with that of the same architecture, untrained, in the median above `MAX_UNTRAINED_CORRELATION`.
    """
    if explainer.control:
        return "a control: it does not look at the model"
    other, found = randomize_weights(explainer, seed), []
    for one in samples[:4]:
        x = one.item.x[None]
        try:
            pair = [
                run_methods([each], x.to(get_model_device(each)), [one.target])[0]
                .maps[0]
                .attribution[0]
                .detach()
                .cpu()
                .numpy()
                for each in (explainer, other)
            ]
            found.append(spearman(*pair))
        except (CamscopeError, ArithmeticError):
            continue
    alike = float(np.median(found)) if found else 0.0
    return (
        f"its maps stay as they are without the model's training (correlation {alike:.2f})"
        if alike > MAX_UNTRAINED_CORRELATION
        else ""
    )


def _drop_duplicates_and_unstable(candidates: Sequence[CandidateState]) -> None:
    """Those whose maps are another's, and those that do not hold still."""
    for n, one in enumerate(candidates):
        twin = next((other for other in candidates[:n] if not other.drop_reason and have_same_maps(one, other)), None)
        if twin is not None:
            one.drop_reason = f"its maps are those of {twin.title}"
    for one in survivors(candidates):
        held = np.array(one.metric_values[ROBUSTNESS_METRIC])
        still = float(np.median(held[~np.isnan(held)])) if not np.isnan(held).all() else 1.0
        if still < MIN_MEDIAN_STABILITY:
            one.drop_reason = f"its maps do not hold still when the image hardly changes (correlation {still:.2f})"


def have_same_maps(first: CandidateState, second: CandidateState) -> bool:
    """Whether their maps of the first images are one another's, but for their scale, to a thousandth of the largest value."""
    for mine, theirs in zip(first.first_maps, second.first_maps, strict=True):
        tall, wide = np.abs(mine).max(), np.abs(theirs).max()
        if not np.abs(mine * wide - theirs * tall).max() <= 1e-3 * tall * wide or (tall > 0) != (wide > 0):
            return False
    return bool(first.first_maps)


def _build_selection(
    candidates: Sequence[CandidateState], reference: ReferenceValues, n_images: int
) -> MethodSelection:
    left = rank_candidates(survivors(candidates), reference)
    rest = sorted((one for one in candidates if one.drop_reason), key=lambda one: -one.n_images)
    started = [one for one in candidates if one.n_images]
    seen = max((one.n_images for one in left or started), default=0)
    explained = sum(one.n_images for one in started)
    independent = count_groups(candidates[0], n_images)[1]
    clear = len(left) == 1 or (len(left) == 2 and independent >= MIN_GROUPS_TO_COMPARE)
    return MethodSelection(left if clear else [], [*left, *rest], seen, explained, n_images * len(started), independent)


@dataclass(frozen=True)
class SavedSelection:
    """A method, its layer, and the digest of the model that it was chosen for."""

    method: str
    layer: str | None
    model_digest: str


def save_selection(selection: MethodSelection, path: str | Path, *, overwrite: bool = False) -> Path:
    """Write the first of the best, or where there is no clear winner the cheapest of those that are alike."""
    best = selection.best[0] if selection.best else selection.cheapest
    lines = [f"# {selection.recommendation}", f"method = {_quote_toml(best.explainer.name)}"]
    layer = getattr(best.explainer, "layer", None)
    lines += [f"layer = {_quote_toml(layer)}"] if isinstance(layer, str) else []
    lines += [
        f"model = {_quote_toml(compute_model_digest(unwrap(best.explainer.model)))}",
        f"clear = {str(bool(selection.best)).lower()}",
    ]
    for one in selection.candidates:
        lines += ["", "[[standing]]", f"title = {_quote_toml(one.title)}", *_format_candidate(one)]
    return write_bytes(path, ("\n".join(lines) + "\n").encode(), overwrite=overwrite)


def read_selection(path: str | Path) -> SavedSelection:
    """What `save_selection` wrote; InputError for another file."""
    plain = read_toml(path, f"{path} is not a choice that camscope choose --save wrote")
    method, layer, model = (plain.get(name) for name in ("method", "layer", "model"))
    if (
        not (isinstance(method, str) and isinstance(layer, str | None) and isinstance(model, str))
        or method not in METHODS
    ):
        raise InputError(
            f"{path} is not a choice that camscope choose --save wrote: expected the name of a method, of a layer if it has "
            "one, and the digest of a model, each as text"
        )
    return SavedSelection(method, layer, model)


def _format_candidate(candidate: CandidateState) -> list[str]:
    found = [f"images = {candidate.n_images}", f"seconds = {candidate.seconds_per_image:.4f}"]
    for name in candidate.metric_values:
        if (estimate := candidate.estimate_metric(name)) is not None:
            numbers = [candidate for candidate in (estimate.mean, estimate.low, estimate.high) if isfinite(candidate)]
            found.append(f"{name} = [{', '.join(f'{candidate:.4f}' for candidate in numbers)}]")
    return [*found, f"out = {_quote_toml(candidate.drop_reason)}"] if candidate.drop_reason else found


def _quote_toml(text: str) -> str:
    """A string as TOML has it, which is JSON's where nothing is beyond its escapes."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
