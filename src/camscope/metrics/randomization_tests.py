"""Sanity checks: whether a map depends on the trained weights and on the class (Adebayo et al. 2018, arXiv:1810.03292)."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from camscope.errors import InputError, NonFiniteError, TargetError, UndefinedError
from camscope.explainers.core.base_explainer import Explainer
from camscope.explainers.core.random_mixin import draw_seeds
from camscope.explainers.core.setting_checks import check_integer, check_one_of, check_positive_integer
from camscope.geometry import Placement
from camscope.metrics.explain_changed_inputs import ExplainerProbe, require_single_sample
from camscope.metrics.map_similarity import (
    HOG_BLOCK_SIZE,
    HOG_CELL_SIZE,
    SIMILARITIES,
    compute_hog_features,
    compute_ssim,
    correlate_rows,
    divide_by_peak,
    rank_values,
    shift_to_unit_interval,
)
from camscope.metrics.metric_registry import FloatArray, register_metric
from camscope.metrics.randomization_result import RandomizationResult
from camscope.metrics.weight_randomization import (
    ModelPart,
    build_parts_from_layers,
    copy_explainer,
    covers_all_weights,
    randomize_modules,
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
    n_depths: int | None = None,
) -> RandomizationResult:
    """Run the model parameter randomization test on the images x (N,C,*S).

    Maps are compared at the resolution of the input. The targets are chosen with the trained model and stay the same for the
    randomized copies. The model itself stays unchanged.

    Args:
        explainer: The method.
        x: (N,C,*S) at least two images, for the similarity of maps of different images (the null distribution). A
            verdict needs
            five images.
        target: What `Score` accepts.
        order: "cascading" randomizes each part on top of those before it and ends with an untrained model.
            "independent"
            randomizes one part at a time.
        layers: The parts, from the output. Default: at most 20 parts of the model.
        seeds: One run for each; use at least three for a verdict.
        similarities: Names out of ssim, spearman, hog and pearson. Default: the first three; hog only for large enough
            images.
        n_depths: Number of steps after which maps are compared, evenly spaced, with the first and the last. All parts
            are randomized, so the similarities of these steps do not depend on it. None: after every step.

    Returns:
        The similarities at each step, with a verdict and a figure.

    Raises:
        InputError: There are fewer than two images, a name is unknown, or `n_depths` is not positive.

    >>> from camscope import GradCAM, load_model
    >>> explainer, x = GradCAM(load_model("phantom"), "layer4"), torch.rand(2, 1, 64, 64)
    >>> result = run_randomization_test(explainer, x, 1, layers=["fc"], seeds=[0], similarities=["spearman"])
    >>> result.order, result.covers_whole_model
    ('cascading', False)

    """
    check_one_of("order", order, "cascading", "independent")
    if similarities is None:
        fits_hog = x.ndim == 4 and min(x.shape[2:]) >= HOG_BLOCK_SIZE * HOG_CELL_SIZE
        similarities = ("ssim", "spearman", "hog") if fits_hog else ("ssim", "spearman")
    _check_images_seeds_and_similarities(x, seeds, similarities)
    check_positive_integer(None, n_depths=n_depths)
    probe = ExplainerProbe.from_explainer(explainer, x, target)
    clean = _project_to_input(_compute_maps_or_nan(probe, x), x)
    parts = split_model(explainer.model, x[:1]) if layers is None else build_parts_from_layers(explainer.model, layers)
    depths = _select_depths(len(parts), n_depths)
    comparison = MapComparison(clean, similarities)
    values = {name: np.empty((len(seeds), len(depths), len(x))) for name in similarities}
    first_image_maps = [clean[0]]
    for run, seed in enumerate(seeds):
        for step, randomized in enumerate(_iter_randomized_explainers(probe.explainer, parts, order, seed, depths)):
            maps = _project_to_input(_compute_maps_or_nan(replace(probe, explainer=randomized), x), x)
            first_image_maps += [maps[0]] if run == 0 else []
            for name in similarities:
                values[name][run, step] = comparison.compare_with_trained(name, maps)
    null = {name: comparison.compare_different_images(name) for name in similarities}
    return RandomizationResult(
        explainer.composed_name,
        order,
        tuple(parts[depth].name for depth in depths),
        tuple(seeds),
        values,
        null,
        comparison.is_signed,
        np.stack(first_image_maps),
        covers_whole_model=covers_all_weights(explainer.model, parts),
    )


@register_metric(
    "random-logit",
    title="Random Logit",
    input_kind="explainer",
    formula="Spearman(map of the class, map of another class)",
    paper="Sixt et al. 2020, arXiv:1912.09818, with SSIM in the paper",
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
    """Explain x (1,C,*S) for two classes. Return the similarity of the two maps, -1..1.

    For a model with two classes or one output, signed maps of the two classes are negatives of each other and give -1.

    Args:
        explainer: The method.
        x: (1,C,*S) the input.
        target: The first class, as `Score` accepts it. None: the top class.
        other_target: The second class. None: a different class, drawn by `seed`.
        similarity: Name of a similarity in `SIMILARITIES`.
        seed: Seed of the second class.

    Returns:
        The similarity. A method that does not depend on the class has 1.

    Raises:
        TargetError: The target is not one of several classes, and there is no other target.
        UndefinedError: A map is zero everywhere.

    >>> from camscope import HiResCAM, load_model
    >>> explainer = HiResCAM(load_model("phantom"), "layer4")
    >>> -1 <= random_logit(explainer, torch.rand(1, 1, 64, 64), 1, other_target=2) <= 1
    True

    """
    check_integer(seed=seed)
    probe = ExplainerProbe.from_explainer(explainer, require_single_sample(x), target)
    if other_target is None:
        class_index = probe.score.class_index(0)
        if class_index is None or probe.n_classes is None or probe.n_classes < 2:
            raise TargetError("the target is not one of several classes: pass other_target= for the second map")
        generator = torch.Generator(device="cpu").manual_seed(seed)
        step = int(torch.randint(1, probe.n_classes, (), generator=generator, device="cpu"))
        other_target = (class_index + step) % probe.n_classes
    second = ExplainerProbe.from_explainer(probe.explainer, x, other_target)
    first_map, second_map = (_project_to_input(_compute_maps_or_nan(p, x), x)[0] for p in (probe, second))
    for attribution, map_probe in ((first_map, probe), (second_map, second)):
        if not attribution.any():
            target_text = map_probe.score.describe(0)
            raise UndefinedError(f"the map of {target_text} is zero everywhere: its similarity is not defined")
    return SIMILARITIES[similarity](first_map, second_map)


class MapComparison:
    """Comparison of the trained model's maps (N,*S) with other maps, and with each other."""

    def __init__(self, maps: FloatArray, similarities: Sequence[str]) -> None:
        self.is_signed = any(bool((values < 0).any()) for values in maps if np.isfinite(values).all())
        self._features = {name: self._extract_features(name, maps) for name in similarities}

    def compare_with_trained(self, similarity: str, maps: FloatArray) -> FloatArray:
        """Compare each map with the trained model's map of the same image. Return similarities (N,). They are NaN if
        undefined.
        """
        return _compare_features(similarity, self._features[similarity], self._extract_features(similarity, maps))

    def compare_different_images(self, similarity: str) -> FloatArray:
        """Compare the trained model's maps of different images. Return all similarities (N,N). The diagonal is NaN."""
        features = self._features[similarity]
        similarities = np.full((len(features), len(features)), np.nan)
        for i in range(len(features) - 1):
            others = features[i + 1 :]
            row = _compare_features(similarity, np.broadcast_to(features[i], others.shape), others)
            similarities[i, i + 1 :] = similarities[i + 1 :, i] = row
        return similarities

    def _extract_features(self, similarity: str, maps: FloatArray) -> FloatArray:
        """Extract the features (N,…) that a similarity measure compares. Maps of zeros and maps with NaN give NaN."""
        scaled_maps = [_divide_by_peak_or_none(attribution) for attribution in maps]
        extract = FEATURE_EXTRACTORS[similarity]
        features = [None if scaled is None else extract(scaled, self.is_signed) for scaled in scaled_maps]
        shape = next((vector.shape for vector in features if vector is not None), (1,))
        return np.stack([np.full(shape, np.nan) if vector is None else vector for vector in features])


FEATURE_EXTRACTORS: Mapping[str, Callable[[FloatArray, bool], FloatArray]] = {
    "ssim": shift_to_unit_interval,
    "pearson": lambda scaled, _: scaled.ravel(),
    "spearman": lambda scaled, _: rank_values(scaled),
    "hog": lambda scaled, _: compute_hog_features(scaled),
}


def _compare_features(similarity: str, first: FloatArray, second: FloatArray) -> FloatArray:
    """Compare two sets of features row by row. Return the similarities (N,). A row with NaN gives NaN."""
    if similarity != "ssim":
        return correlate_rows(first, second)
    pairs = zip(first, second, strict=True)
    return np.array([np.nan if np.isnan([a.flat[0], b.flat[0]]).any() else compute_ssim(a, b) for a, b in pairs])


def _select_depths(n_parts: int, n_depths: int | None) -> list[int]:
    """Return the steps after which maps are compared: evenly spaced steps, with the first and the last step."""
    if n_depths is None or n_depths >= n_parts:
        return list(range(n_parts))
    return [n_parts - 1] if n_depths == 1 else [round(i * (n_parts - 1) / (n_depths - 1)) for i in range(n_depths)]


def _iter_randomized_explainers(
    explainer: Explainer,
    model_parts: Sequence[ModelPart],
    order: RandomizationOrder,
    seed: int,
    depths: Sequence[int],
) -> Iterator[Explainer]:
    """Yield the explainer with a randomized model, after each selected step of the test."""
    randomized = copy_explainer(explainer)
    seeds = draw_seeds(len(model_parts), torch.Generator(device="cpu").manual_seed(seed))
    for step, (part, part_seed) in enumerate(zip(model_parts, seeds, strict=True)):
        if order == "independent":
            if step not in depths:
                continue
            randomized = copy_explainer(explainer)
        randomize_modules(randomized.model, part.module_names, part_seed)
        if step in depths:
            yield randomized


def _compute_maps_or_nan(probe: ExplainerProbe, x: Tensor) -> FloatArray:
    """Compute the maps of x. If a map contains NaN or infinity, all its values become NaN."""
    try:
        return probe.clean_maps if x is probe.x else probe.compute_maps(x, range(len(x)))
    except NonFiniteError:
        if len(x) == 1:
            return np.full((1, *x.shape[2:]), np.nan)
    maps = []
    for i in range(len(x)):
        sample = ExplainerProbe.from_explainer(probe.explainer, probe.x[i : i + 1], probe.select_targets([i]))
        maps.append(_project_to_input(_compute_maps_or_nan(sample, sample.x), sample.x))
    return np.concatenate(maps)


def _project_to_input(maps: FloatArray, x: Tensor) -> FloatArray:
    """Resize maps to the resolution of the input x (N,C,*S)."""
    placement = Placement.identity(tuple(x.shape[2:]))
    return np.stack([placement.project(attribution)[0] for attribution in maps])


def _divide_by_peak_or_none(values: FloatArray) -> FloatArray | None:
    """Divide a map by its largest absolute value. Return None if the map is zero or contains NaN."""
    return divide_by_peak(values) if np.isfinite(values).all() and values.any() else None


def _check_images_seeds_and_similarities(x: Tensor, seeds: Sequence[int], similarities: Sequence[str]) -> None:
    """Raise InputError for a single image, no seeds or similarities, a seed that is no integer, or an unknown similarity."""
    if len(x) < 2:
        raise InputError(
            f"x has shape {tuple(x.shape)}: expected two images or more, since maps of different images are compared"
        )
    if not seeds or not similarities:
        raise InputError("seeds or similarities is empty: pass at least one of each, such as seeds=(0, 1, 2)")
    for seed in seeds:
        check_integer(seeds=seed)
    if unknown := [name for name in similarities if name not in FEATURE_EXTRACTORS]:
        raise InputError(f"unknown similarity {unknown[0]!r}; expected some of {', '.join(FEATURE_EXTRACTORS)}")
