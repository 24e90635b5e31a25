"""Sanity: whether a map notices that its model has lost what it learnt (Adebayo et al. 2018, arXiv:1810.03292).

The parts of a copy of the model lose their values, from the output down, and each time the map is made again and compared
with that of the trained model, beside what maps of different images have in common. A map that is still alike when nothing
is left of the training shows the image, not the model. That it changes is no merit: noise changes too (Binder et al. 2023).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from camscope.errors import InputError, NonFiniteError, TargetError, UndefinedError
from camscope.explainers.core.base import Explainer
from camscope.explainers.core.batching import draw_seeds as drawn_seeds
from camscope.explainers.core.evaluation_context import check_integer, check_one_of
from camscope.geometry import Placement
from camscope.metrics.base import FloatArray, register_metric
from camscope.metrics.explainer_probe import ExplainerProbe, check_single_sample
from camscope.metrics.randomization_result import RandomizationResult
from camscope.metrics.similarity import (
    HOG_BLOCK_SIZE,
    HOG_CELL_SIZE,
    SIMILARITIES,
    compute_hog_features,
    compute_ssim,
    correlate_rows,
    divide_by_peak,
    has_negative_values,
    rank_values,
    shift_to_unit_interval,
)
from camscope.metrics.weight_randomization import (
    ModelPart,
    copy_explainer,
    cover_whole_model,
    reset_modules,
    select_parts,
    split_model,
)
from camscope.targets import TargetLike

RandomizationOrder = Literal["cascading", "independent"]


def run_randomization_test(
    explainer: Explainer,
    x: Tensor,
    target: TargetLike = None,
    *,
    order: RandomizationOrder = "cascading",
    layers: Sequence[str | nn.Module] | None = None,
    seeds: Sequence[int] = (0, 1, 2),
    similarities: Sequence[str] | None = None,
) -> RandomizationResult:
    """(N,C,*S) -> how alike the maps stay, step by step, as the model's parts lose their values; see `randomize_weights`.

    `order`: "cascading", each step on top of those before it, which ends with an untrained model; "independent", one part
    at a time. `layers`: the parts, output first; None: at most 20, found. `seeds`: one run each, 3 at least for a verdict
    worth the name. Maps are compared on the input's pixels; `similarities`: of ssim, spearman, hog and pearson; None: the
    first three, hog where it has room. The questions are those that the trained model settles: of the random one, the same
    classes. The model is copied; it stays as it was. x holds two images at least, for the null: maps of different images;
    five for a verdict; 11 have 55 pairs.
    """
    check_one_of("order", order, "cascading", "independent")
    similarities = _select_default_similarities(x) if similarities is None else similarities
    _check_arguments(x, seeds, similarities)
    probe = ExplainerProbe.from_explainer(explainer, x, target)
    clean = _project_to_input(_compute_maps_or_nan(probe, x), x)
    steps = split_model(explainer.model, x[:1]) if layers is None else select_parts(explainer.model, layers)
    compared = MapComparison(clean, similarities)
    values = {name: np.empty((len(seeds), len(steps), len(x))) for name in similarities}
    shown = [clean[0]]
    for s, seed in enumerate(seeds):
        for k, other in enumerate(_iter_randomized_explainers(probe.explainer, steps, order, seed)):
            maps = _project_to_input(_compute_maps_or_nan(probe.with_explainer(other), x), x)
            shown += [maps[0]] if s == 0 else []
            for name in similarities:
                values[name][s, k] = compared.compare_with_trained(name, maps)
    null = {name: compared.compare_different_images(name) for name in similarities}
    return RandomizationResult(
        explainer.full_name,
        order,
        tuple(one.name for one in steps),
        tuple(seeds),
        values,
        null,
        compared.is_signed,
        np.stack(shown),
        covers_whole_model=cover_whole_model(explainer.model, steps),
    )


@register_metric(
    "random-logit",
    title="Random Logit",
    input_kind="explainer",
    formula="Spearman(map of the class, map of another one)",
    paper="Sixt et al. 2020, arXiv:1912.09818, where it is SSIM",
    lower_bound=-1.0,
    higher_is_better=False,
    chance_level="1 for a map that does not depend on the class",
)
def random_logit(
    explainer: Explainer,
    x: Tensor,
    target: TargetLike = None,
    *,
    other_target: TargetLike = None,
    similarity: str = "spearman",
    seed: int = 0,
) -> float:
    """(1,C,*S) -> how alike the maps of two classes are. `other_target`: the second one; None draws any but the first.

    A model of two classes, or of one output, has maps that mirror one another where they are signed: -1.
    """
    check_integer(seed=seed)
    probe = ExplainerProbe.from_explainer(explainer, check_single_sample(x), target)
    if other_target is None:
        own = probe.score.class_index(0)
        if own is None or probe.n_classes is None or probe.n_classes < 2:
            raise TargetError(
                "the question is not one of several classes: pass other_target=, the question to compare it with"
            )
        step = int(
            torch.randint(
                1, probe.n_classes, (), generator=torch.Generator(device="cpu").manual_seed(seed), device="cpu"
            )
        )
        other_target = (own + step) % probe.n_classes
    second = ExplainerProbe.from_explainer(probe.explainer, x, other_target)
    one, two = (_project_to_input(_compute_maps_or_nan(each, x), x)[0] for each in (probe, second))
    for heat, asked in ((one, probe), (two, second)):
        if not heat.any():
            raise UndefinedError(
                f"the map of {asked.score.describe(0)} is zero everywhere: there is nothing to compare"
            )
    return SIMILARITIES[similarity](one, two)


class MapComparison:
    """Maps (N,*S) of the trained model, ready to be compared with others, and with one another."""

    def __init__(self, maps: FloatArray, similarities: Sequence[str]) -> None:
        self.scaled_maps = [_scale_or_none(one) for one in maps]
        self.is_signed = has_negative_values([one for one in self.scaled_maps if one is not None])
        self._features_by_similarity = {
            name: self._stack_features(name, self.scaled_maps) for name in similarities if name != "ssim"
        }

    def compare_with_trained(self, similarity: str, maps: FloatArray) -> FloatArray:
        """(N,*S) -> (N,): each with the trained model's map of the same image; NaN where there is no number."""
        others = [_scale_or_none(one) for one in maps]
        if similarity == "ssim":
            return np.array([self._compute_ssim(*pair) for pair in zip(self.scaled_maps, others, strict=True)])
        return correlate_rows(self._features_by_similarity[similarity], self._stack_features(similarity, others))

    def compare_different_images(self, similarity: str) -> FloatArray:
        """(N,N): maps of different images; NaN beside itself."""
        count = len(self.scaled_maps)
        made = np.full((count, count), np.nan)
        for i in range(count - 1):
            rest = range(i + 1, count)
            if similarity == "ssim":
                found = np.array([self._compute_ssim(self.scaled_maps[i], self.scaled_maps[j]) for j in rest])
            else:
                rows = self._features_by_similarity[similarity]
                found = correlate_rows(np.broadcast_to(rows[i], rows[i + 1 :].shape), rows[i + 1 :])
            made[i, i + 1 :] = made[i + 1 :, i] = found
        return made

    def _compute_ssim(self, first: FloatArray | None, second: FloatArray | None) -> float:
        if first is None or second is None:
            return np.nan
        return compute_ssim(
            shift_to_unit_interval(first, self.is_signed), shift_to_unit_interval(second, self.is_signed)
        )

    def _stack_features(self, similarity: str, maps: Sequence[FloatArray | None]) -> FloatArray:
        """(N,M): what of each map is correlated; NaN for a map without a scale."""
        made = [None if one is None else FEATURE_EXTRACTORS[similarity](one) for one in maps]
        length = next((len(one) for one in made if one is not None), 1)
        return np.stack([np.full(length, np.nan) if one is None else one for one in made])


FEATURE_EXTRACTORS: Mapping[str, Callable[[FloatArray], FloatArray]] = {
    "pearson": np.ravel,
    "spearman": rank_values,
    "hog": compute_hog_features,
}


def _iter_randomized_explainers(
    explainer: Explainer, model_parts: Sequence[ModelPart], order: RandomizationOrder, seed: int
) -> Iterator[Explainer]:
    """The explainer after each step; a part's draws are the same in either order."""
    other = copy_explainer(explainer)
    for step, one in zip(
        model_parts, drawn_seeds(len(model_parts), torch.Generator(device="cpu").manual_seed(seed)), strict=True
    ):
        other = copy_explainer(explainer) if order == "independent" else other
        reset_modules(other.model, step.module_names, one)
        yield other


def _compute_maps_or_nan(probe: ExplainerProbe, x: Tensor) -> FloatArray:
    """(N,*s): NaN for a map that came out with NaN or infinity, as of a net of random weights it may."""
    try:
        return probe.compute_maps(x, range(len(x)))
    except NonFiniteError:
        if len(x) == 1:
            return np.full((1, *x.shape[2:]), np.nan)
    each = [probe.select_sample(i) for i in range(len(x))]
    return np.concatenate([_project_to_input(_compute_maps_or_nan(one, one.x), one.x) for one in each])


def _project_to_input(maps: FloatArray, x: Tensor) -> FloatArray:
    """(N,*s) -> (N,*S): on the input's pixels."""
    place = Placement.identity(tuple(x.shape[2:]))
    return np.stack([place.project(one)[0] for one in maps])


def _scale_or_none(values: FloatArray) -> FloatArray | None:
    """Divided by its largest size; None for a map without one: of zeros, or with NaN."""
    if not np.isfinite(values).all():
        return None
    try:
        return divide_by_peak(values)
    except UndefinedError:
        return None


def _select_default_similarities(x: Tensor) -> tuple[str, ...]:
    roomy = x.ndim == 4 and min(x.shape[2:]) >= HOG_BLOCK_SIZE * HOG_CELL_SIZE
    return ("ssim", "spearman", "hog") if roomy else ("ssim", "spearman")


def _check_arguments(x: Tensor, seeds: Sequence[int], similarities: Sequence[str]) -> None:
    if len(x) < 2:
        raise InputError(f"x is {tuple(x.shape)}: expected two images or more: the null is of maps of different images")
    if not seeds or not similarities:
        raise InputError("seeds and similarities name one at least, such as seeds=(0, 1, 2)")
    for seed in seeds:
        check_integer(seeds=seed)
    if unknown := [one for one in similarities if one not in ("ssim", *FEATURE_EXTRACTORS)]:
        raise InputError(
            f"no similarity {unknown[0]!r} here; expected some of {', '.join(('ssim', *FEATURE_EXTRACTORS))}"
        )
