"""Robustness metrics: how much a map changes under noise, shifts, rotations, other batches and repetition.

The target stays the same. A map of zeros or with NaN raises UndefinedError.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from camscope.errors import InputError, UndefinedError
from camscope.explainers.core.explainer import Explainer
from camscope.explainers.core.random_mixin import draw_seeds
from camscope.explainers.core.setting_checks import check_positive_integer, check_positive_number
from camscope.geometry import Placement
from camscope.hooks.find_layers import unwrap
from camscope.metrics.explainer_probe import ExplainerProbe, check_single_sample, compute_once
from camscope.metrics.input_transforms import ACQUISITION_TRANSFORMS, GaussianNoise, InputTransform, Rotation, Shift
from camscope.metrics.map_similarity import SIMILARITIES
from camscope.metrics.metric_registry import FloatArray, Mask, register_metric, to_finite_array
from camscope.targets import TargetLike

DEFAULT_TRANSFORMS: tuple[InputTransform, ...] = (Shift(1), Shift(4), Rotation(1), Rotation(3), GaussianNoise(0.01))
MAX_PROBABILITY_CHANGE = 0.05  # of probability, below which a prediction counts as stable
MIN_SHARED_AREA = 0.25  # share of the pixels that both inputs must show
_register_change = partial(register_metric, input_kind="explainer", upper_bound=None, higher_is_better=False)
_register_agreement = partial(register_metric, input_kind="explainer", lower_bound=-1.0, chance_level="0")


@_register_change(
    "max-sensitivity",
    title="Max-Sensitivity",
    formula="max of |map(x + d) - map(x)| / |map(x)| over draws of d, |d| at most radius in each value; Euclidean norms",
    paper="Yeh et al. 2019, arXiv:1901.09392; here divided by the map's own norm, a Monte Carlo lower bound",
    chance_level="about 1.4 for maps of independent noise with mean zero",
)
def max_sensitivity(
    explainer: Explainer,
    x: Tensor,
    target: TargetLike = None,
    *,
    radius: float = 0.02,
    n_samples: int = 10,
    seed: int = 0,
) -> float:
    """Return the largest relative change of the map of x (1,C,*S) under random noise, 0 or more.

    Args:
        explainer: The method.
        x: (1,C,*S) the clean input.
        target: What `Score` accepts.
        radius: Largest change of each value, in shares of the input's range.
        n_samples: Number of noisy inputs.
        seed: Seed of the noise.

    Returns:
        A relative change of the Euclidean norm.

    >>> from camscope import GradCAM, load_model
    >>> max_sensitivity(GradCAM(load_model("phantom"), "layer4"), torch.rand(1, 1, 64, 64), 1, n_samples=2) >= 0
    True

    """
    return float(_compute_sensitivities(explainer, x, target, radius, n_samples, seed).max())


@_register_change(
    "average-sensitivity",
    title="Average Sensitivity",
    formula="mean of |map(x + d) - map(x)| / |map(x)| over draws of d",
    paper="Yeh et al. 2019, arXiv:1901.09392, with the mean in place of the maximum",
    chance_level="about 1.4 for maps of independent noise with mean zero",
)
def average_sensitivity(
    explainer: Explainer,
    x: Tensor,
    target: TargetLike = None,
    *,
    radius: float = 0.02,
    n_samples: int = 10,
    seed: int = 0,
) -> float:
    """Return the mean relative change of the map of x (1,C,*S) under random noise (see `max_sensitivity`).

    Args:
        explainer: The method.
        x: (1,C,*S) the clean input.
        target: What `Score` accepts.
        radius: Largest change of each value, in shares of the input's range.
        n_samples: Number of noisy inputs.
        seed: Seed of the noise.

    Returns:
        A relative change of the Euclidean norm, 0 or more.

    >>> from camscope import GradCAM, load_model
    >>> average_sensitivity(GradCAM(load_model("phantom"), "layer4"), torch.rand(1, 1, 64, 64), 1, n_samples=2) >= 0
    True

    """
    return float(_compute_sensitivities(explainer, x, target, radius, n_samples, seed).mean())


@dataclass(frozen=True)
class TransformAgreement:
    """The similarity of the maps before and after one change of the input.

    Attributes:
        transform: The change.
        similarity: The similarity of the two maps, or None if it is not defined.
        compared_share: The share of the pixels that were compared.
        probability_change: The absolute change of the class's probability.
        is_prediction_stable: Whether the probability changed by less than the allowed change.
        reason: Why there is no similarity, or "" if there is one.

    >>> from camscope.metrics import Shift
    >>> agreement = TransformAgreement(Shift(2), 0.97, compared_share=0.9, probability_change=0.01, is_prediction_stable=True)
    >>> agreement.similarity
    0.97

    """

    transform: InputTransform
    similarity: float | None
    compared_share: float
    probability_change: float
    is_prediction_stable: bool
    reason: str = ""


def compare_under_transforms(
    explainer: Explainer,
    x: Tensor,
    target: TargetLike = None,
    *,
    transforms: Sequence[InputTransform] = DEFAULT_TRANSFORMS,
    similarity: str = "spearman",
    max_probability_change: float = MAX_PROBABILITY_CHANGE,
) -> list[TransformAgreement]:
    """Compare the map of x (1,C,*S) with the map of each changed input, on the pixels of x.

    Args:
        explainer: The method.
        x: (1,C,*S) the clean input.
        target: What `Score` accepts.
        transforms: The changes.
        similarity: "spearman", "pearson" or "jaccard", over the pixels of x that both inputs show.
        max_probability_change: Largest change of the class's probability for a stable prediction. For a target that is
            not a class, this is a relative change of the score.

    Returns:
        One agreement for each change.

    >>> from camscope import GradCAM, load_model
    >>> from camscope.metrics import Shift
    >>> explainer, x = GradCAM(load_model("phantom"), "layer4"), torch.rand(1, 1, 64, 64)
    >>> [agreement.transform for agreement in compare_under_transforms(explainer, x, 1, transforms=[Shift(2)])]
    [Shift(offset=2)]

    """
    return compare_batch_under_transforms(
        ExplainerProbe.from_explainer(explainer, check_single_sample(x), target),
        transforms,
        similarity,
        max_probability_change,
    )[0]


def compare_batch_under_transforms(
    probe: ExplainerProbe,
    transforms: Sequence[InputTransform] = DEFAULT_TRANSFORMS,
    similarity: str = "spearman",
    max_probability_change: float = MAX_PROBABILITY_CHANGE,
) -> list[list[TransformAgreement]]:
    """Compare the maps of all samples of a probe under each transform. Return the agreements as [sample][transform]."""
    if similarity not in (allowed := ("spearman", "pearson", "jaccard")):
        raise InputError(
            f"similarity={similarity!r}: expected one of {', '.join(allowed)}, which compare single pixels"
        )
    if not transforms:
        raise InputError("transforms is empty: pass at least one transform, such as Shift(2)")
    x, count, size = probe.x, len(probe.x), tuple(probe.x.shape[2:])
    transformed = torch.cat([transform.apply(x) for transform in transforms])
    maps = probe.clean_maps
    explained = probe.explain(transformed, list(range(count)) * len(transforms))
    transformed_maps = explained.maps.reshape(len(transforms), *maps.shape)
    changes = _compute_probability_changes(probe, transforms, transformed, explained.probabilities)
    agreements: list[list[TransformAgreement]] = []
    for n in range(count):
        clean_map = Placement.identity(size).project(to_finite_array(maps[n]))[0]
        agreements.append([])
        for transform, attribution, change in zip(transforms, transformed_maps[:, n], changes[:, n], strict=True):
            projected = transform.project_back(attribution, size)
            value, share, reason = _compare_covered_pixels(clean_map, *projected, similarity)
            is_stable = bool(change < max_probability_change)
            agreements[n].append(TransformAgreement(transform, value, share, float(change), is_stable, reason))
    return agreements


def compute_stable_prediction_share(
    probe: ExplainerProbe,
    transforms: Sequence[InputTransform] = DEFAULT_TRANSFORMS,
    max_probability_change: float = MAX_PROBABILITY_CHANGE,
) -> FloatArray:
    """Return the share of transforms that leave the prediction of each sample (N,) stable, 0..1."""
    transformed = torch.cat([change.apply(probe.x) for change in transforms])
    changes = _compute_probability_changes(probe, transforms, transformed)
    return np.asarray((changes < max_probability_change).mean(0))


def _compute_probability_changes(
    probe: ExplainerProbe,
    transforms: Sequence[InputTransform],
    transformed_inputs: Tensor,
    known_probabilities: FloatArray | None = None,
) -> FloatArray:
    """Return the absolute change of probability (transforms,N) for transformed inputs (transforms*N,C,*S).

    `known_probabilities` (transforms*N,) are those of the passes that explained the inputs.
    """
    count, clean, explainer = len(probe.x), probe.clean_probabilities, probe.explainer
    sample_index = list(range(count)) * len(transforms)
    probabilities = compute_once(  # the same for every method
        (*map(repr, transforms), repr(probe.select_targets(sample_index[:count])), explainer.mode),
        (unwrap(explainer.model), probe.x),
        lambda: (
            probe.compute_probabilities(transformed_inputs, sample_index)
            if known_probabilities is None
            else known_probabilities
        ),
    )
    changes = np.abs(probabilities.reshape(-1, count) - clean)
    if probe.score.classes is None:
        changes = changes / np.where(np.abs(clean) > 0, np.abs(clean), 1)
    return np.asarray(changes)


@_register_agreement(
    "stability",
    formula="mean over shifts of 1 and 4 pixels, rotations of 1 and 3 degrees and noise of Spearman(map, map projected back), "
    "where the class's probability changed by less than 0.05",
    paper="test-retest reliability",
)
def stability(
    explainer: Explainer,
    x: Tensor,
    target: TargetLike = None,
    *,
    transforms: Sequence[InputTransform] = DEFAULT_TRANSFORMS,
    similarity: str = "spearman",
    max_probability_change: float = MAX_PROBABILITY_CHANGE,
) -> float:
    """Return the mean similarity of the map under small shifts, rotations and noise, -1..1.

    The value is undefined if no change leaves the prediction stable. See `compare_under_transforms`.

    Args:
        explainer: The method.
        x: (1,C,*S) the clean input.
        target: What `Score` accepts.
        transforms: The changes.
        similarity: Name of a similarity in `SIMILARITIES`.
        max_probability_change: A change counts only if it changes the probability of the class by less than this.

    Returns:
        The mean over the changes that count.

    Raises:
        UndefinedError: No change leaves the prediction stable.

    >>> from camscope import GradCAM, load_model
    >>> from camscope.metrics import GaussianNoise
    >>> from camscope.phantom import draw_radiograph, to_model_input
    >>> x = to_model_input(draw_radiograph(0, "nodule").image[None])
    >>> stability(GradCAM(load_model("phantom"), "layer4"), x, 1, transforms=[GaussianNoise(0.01)]) > 0.9
    True

    """
    agreements = compare_under_transforms(
        explainer,
        x,
        target,
        transforms=transforms,
        similarity=similarity,
        max_probability_change=max_probability_change,
    )
    stable = [agreement for agreement in agreements if agreement.is_prediction_stable]
    values = [agreement.similarity for agreement in stable if agreement.similarity is not None]
    if not values:
        details = "; ".join(
            f"{agreement.transform}: {agreement.reason or f'|dp| {agreement.probability_change:.2g}'}"
            for agreement in agreements
        )
        raise UndefinedError(f"no transform keeps the prediction stable and the maps comparable ({details})")
    return float(np.mean(values))


@_register_agreement(
    "acquisition-stability",
    formula="mean over windows 5 % narrower and lower, and 5 % wider and higher, resampling to 0.9 of each side and back, and "
    "JPEG of quality 90 of Spearman(map, map of the changed input), where the class's probability changed by less than 0.05",
    paper="test-retest reliability under other acquisition settings",
)
def acquisition_stability(
    explainer: Explainer,
    x: Tensor,
    target: TargetLike = None,
    *,
    transforms: Sequence[InputTransform] = ACQUISITION_TRANSFORMS,
    similarity: str = "spearman",
    max_probability_change: float = MAX_PROBABILITY_CHANGE,
) -> float:
    """Return the mean similarity of the map under small changes of window, resolution and compression, -1..1.

    The value is undefined if no change leaves the prediction stable. See `compare_under_transforms`.

    Args:
        explainer: The method.
        x: (1,C,*S) the clean input.
        target: What `Score` accepts.
        transforms: The changes.
        similarity: Name of a similarity in `SIMILARITIES`.
        max_probability_change: A change counts only if it changes the probability of the class by less than this.

    Returns:
        The mean over the changes that count.

    Raises:
        UndefinedError: No change leaves the prediction stable.

    >>> from camscope import GradCAM, load_model
    >>> from camscope.metrics import IntensityWindow
    >>> from camscope.phantom import draw_radiograph, to_model_input
    >>> x = to_model_input(draw_radiograph(0, "nodule").image[None])
    >>> explainer = GradCAM(load_model("phantom"), "layer4")
    >>> acquisition_stability(explainer, x, 1, transforms=[IntensityWindow(1.05)]) > 0.9
    True

    """
    return stability(
        explainer,
        x,
        target,
        transforms=transforms,
        similarity=similarity,
        max_probability_change=max_probability_change,
    )


@_register_change(
    "determinism",
    formula="largest difference between repeated maps of one input / largest absolute value of the map",
    paper="repeated computation",
    chance_level="0 is expected",
)
def determinism(explainer: Explainer, x: Tensor, target: TargetLike = None, *, n_repeats: int = 3) -> float:
    """Return the largest relative difference between repeated maps of x (1,C,*S). Bit-exact maps give 0.

    Args:
        explainer: The method.
        x: (1,C,*S) the input.
        target: What `Score` accepts.
        n_repeats: Number of repetitions.

    Returns:
        A relative change of the Euclidean norm, 0 for equal maps.

    >>> from camscope import GradCAM, load_model
    >>> determinism(GradCAM(load_model("phantom"), "layer4"), torch.rand(1, 1, 64, 64), 1) < 0.001
    True

    """
    check_positive_integer(n_repeats=n_repeats)
    probe = ExplainerProbe.from_explainer(explainer, check_single_sample(x), target)
    first, *repeats = map(
        to_finite_array, (probe.clean_maps[0], *(probe.compute_maps(x, [0])[0] for _ in range(n_repeats)))
    )
    return max(_compute_relative_difference(first, repeat) for repeat in repeats)


@_register_change(
    "batch-invariance",
    formula="largest difference between the maps computed alone and in a batch / largest absolute value of the map",
    paper="repeated computation in a batch",
    chance_level="rounding: about 1e-6 in float32",
)
def batch_invariance(
    explainer: Explainer, x: Tensor, target: TargetLike = None, *, other_images: Tensor | None = None
) -> float:
    """Compute the map of x (1,C,*S) alone and in a batch. Return their largest relative difference.

    By default the batch holds x, x flipped along each axis, and x inverted.

    Args:
        explainer: The method.
        x: (1,C,*S) the input.
        target: What `Score` accepts.
        other_images: (M,C,*S) the other images of the batch. By default they are copies of x, flipped or inverted.

    Returns:
        A relative change of the Euclidean norm, 0 for a method that treats every image alone.

    Raises:
        InputError: The other images do not have the shape of x.

    >>> from camscope import GradCAM, load_model
    >>> batch_invariance(GradCAM(load_model("phantom"), "layer4"), torch.rand(1, 1, 64, 64), 1) < 0.01
    True

    """
    probe = ExplainerProbe.from_explainer(explainer, check_single_sample(x), target)
    images = torch.cat([*(x.flip(axis) for axis in range(2, x.ndim)), -x]) if other_images is None else other_images
    if images.shape[1:] != x.shape[1:] or not len(images):
        received = f"other_images is of shape {tuple(images.shape)} and x of shape {tuple(x.shape)}"
        raise InputError(f"{received}: expected one or more images of the same shape as x")
    alone, half = to_finite_array(probe.clean_maps[0]), len(images) // 2
    batch = torch.cat([images[:half], x, images[half:]])
    in_batch = probe.compute_maps(batch, [0] * len(batch), batch_size=len(batch))[half]
    return _compute_relative_difference(alone, to_finite_array(in_batch))


def _compute_sensitivities(
    explainer: Explainer, x: Tensor, target: TargetLike, radius: float, n_samples: int, seed: int
) -> FloatArray:
    """Return the relative change of the map for each noisy input (n_samples,)."""
    check_positive_number(radius=radius)
    check_positive_integer(n_samples=n_samples)
    probe = ExplainerProbe.from_explainer(explainer, check_single_sample(x), target)
    generator = torch.Generator(device="cpu")
    max_change = radius * float(x.max() - x.min())
    draws = [
        torch.rand(x.shape, generator=generator.manual_seed(draw_seed), dtype=torch.float32, device="cpu")
        for draw_seed in draw_seeds(n_samples, torch.Generator(device="cpu").manual_seed(seed))
    ]
    noisy = x + max_change * (2 * torch.cat(draws).to(x) - 1)
    clean_map = to_finite_array(probe.clean_maps).ravel()
    maps = to_finite_array(probe.compute_maps(noisy, [0] * n_samples)).reshape(n_samples, -1)
    norm = np.linalg.norm(clean_map)
    if not norm > 0:
        raise UndefinedError("the map is zero everywhere: its relative change is not defined")
    return np.asarray(np.linalg.norm(maps - clean_map, axis=1) / norm)


def _compare_covered_pixels(
    clean_map: FloatArray, transformed_map: FloatArray, covered_mask: Mask, similarity: str
) -> tuple[float | None, float, str]:
    """Return the similarity on the covered pixels, their share of all pixels, and a reason if there is no similarity."""
    share = float(covered_mask.mean())
    if share < MIN_SHARED_AREA:
        return None, share, f"only {share:.0%} of the pixels are shown by both inputs"
    try:
        return SIMILARITIES[similarity](clean_map[covered_mask], transformed_map[covered_mask]), share, ""
    except UndefinedError as error:
        return None, share, str(error)


def _compute_relative_difference(first: FloatArray, second: FloatArray) -> float:
    """Return the largest absolute difference divided by the largest absolute value of `first`."""
    peak = np.abs(first).max()
    if not peak > 0:
        raise UndefinedError("the map is zero everywhere: its relative difference is not defined")
    return float(np.abs(second - first).max() / peak)
