"""Robustness: how far a map changes where it should not: under a little noise, a shift, a turn, in company, asked twice.

All take an explainer, one input x (1,C,*S) as the model takes it, and a question. The question is settled on the clean input:
an altered one is asked about the same class. A map of zeros has no number (UndefinedError), and NaN in a map has none.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from camscope.errors import InputError, UndefinedError
from camscope.explainers.core.base import Explainer
from camscope.explainers.core.batching import draw_seeds
from camscope.explainers.core.evaluation_context import check_positive_integer, check_positive_number
from camscope.geometry import Placement
from camscope.metrics.base import FloatArray, Mask, register_metric, to_finite_array
from camscope.metrics.explainer_probe import ExplainerProbe, check_single_sample
from camscope.metrics.input_transforms import ACQUISITION_TRANSFORMS, GaussianNoise, InputTransform, Rotation, Shift
from camscope.metrics.similarity import SIMILARITIES
from camscope.targets import TargetLike

DEFAULT_TRANSFORMS: tuple[InputTransform, ...] = (Shift(1), Shift(4), Rotation(1), Rotation(3), GaussianNoise(0.01))
MAX_PROBABILITY_CHANGE = 0.05  # of probability: a prediction that changed by less has held
MIN_SHARED_AREA = 0.25  # of the input's pixels: fewer in common are no comparison


@register_metric(
    "max-sensitivity",
    title="Max-Sensitivity",
    input_kind="explainer",
    formula="max of |map(x + d) - map(x)| / |map(x)| over draws of d, |d| at most radius in each value; Euclidean norms",
    paper="Yeh et al. 2019, arXiv:1901.09392; here divided by the map's own norm, a Monte Carlo estimate from below",
    upper_bound=None,
    higher_is_better=False,
    chance_level="about 1.4 for a map drawn anew each time, of mean zero",
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
    """(1,C,*S) -> 0 or more. `radius`: of the input's own range, least to largest value."""
    return float(_compute_sensitivities(explainer, x, target, radius, n_samples, seed).max())


@register_metric(
    "average-sensitivity",
    title="Average Sensitivity",
    input_kind="explainer",
    formula="the mean over the same draws",
    paper="Yeh et al. 2019, with the mean for the maximum",
    upper_bound=None,
    higher_is_better=False,
    chance_level="about 1.4 for a map drawn anew each time, of mean zero",
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
    """(1,C,*S) -> 0 or more; see `max_sensitivity`."""
    return float(_compute_sensitivities(explainer, x, target, radius, n_samples, seed).mean())


@dataclass(frozen=True)
class TransformAgreement:
    """What became of one change: the agreement of the maps where both know something, and of the predictions.

    `similarity`: None where there is none, with the `reason`. `compared_share`: share of the pixels that were compared. `probability_change`: by how
    much the class's probability changed, |dp|; `is_prediction_stable`: whether that is less than what was allowed.
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
    """(1,C,*S) -> for each change, the agreement of the map with that of the changed input, carried back.

    Compared on the pixels of x that both inputs show; `similarity`: "spearman", "pearson" or "jaccard". `max_probability_change`: how
    far the class's probability may move; of a question that is not one class's, the score, in shares of its size.
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
    """[sample][change]: the agreements of each sample of a probe, whose passes are shared."""
    if similarity not in (known := ("spearman", "pearson", "jaccard")):
        raise InputError(f"similarity={similarity!r}: expected one of {', '.join(known)}, which need no whole picture")
    if not transforms:
        raise InputError("transforms is empty: name one at least, such as Shift(2)")
    x, count = probe.x, len(probe.x)
    changed, owners = torch.cat([change.apply(x) for change in transforms]), list(range(count))
    maps = probe.compute_maps(torch.cat([x, changed]), owners * (1 + len(transforms)))
    others = maps[count:].reshape(len(transforms), *maps[:count].shape)
    moved = _compute_probability_changes(probe, changed)
    return [
        _compare_sample_maps(
            maps[n], others[:, n], moved[:, n], tuple(x.shape[2:]), transforms, similarity, max_probability_change
        )
        for n in owners
    ]


def compute_stable_prediction_share(
    probe: ExplainerProbe,
    transforms: Sequence[InputTransform] = DEFAULT_TRANSFORMS,
    max_probability_change: float = MAX_PROBABILITY_CHANGE,
) -> FloatArray:
    """(N,) 0..1: of each sample of a probe the share of changes under which its prediction held: what a stability looks at."""
    moved = _compute_probability_changes(probe, torch.cat([change.apply(probe.x) for change in transforms]))
    return np.asarray((moved < max_probability_change).mean(0))


def _compute_probability_changes(probe: ExplainerProbe, transformed_inputs: Tensor) -> FloatArray:
    """(changes*N,C,*S) -> (changes,N): by how much the chance of each sample's question changed."""
    owners = list(range(len(probe.x))) * (len(transformed_inputs) // len(probe.x))
    moved = np.abs(
        probe.compute_probabilities(transformed_inputs, owners).reshape(-1, len(probe.x)) - probe.clean_probabilities
    )
    if probe.score.classes is None:
        moved = moved / np.where(np.abs(probe.clean_probabilities) > 0, np.abs(probe.clean_probabilities), 1)
    return np.asarray(moved)


def _compare_sample_maps(
    attribution: FloatArray,
    transformed_attributions: FloatArray,
    probability_changes: FloatArray,
    size: tuple[int, ...],
    transforms: Sequence[InputTransform],
    similarity: str,
    max_probability_change: float,
) -> list[TransformAgreement]:
    """Of one sample's map with those (changes,*s) of its changed inputs."""
    found = []
    clean = Placement.identity(size).project(to_finite_array(attribution))[0]
    for change, other, gap in zip(transforms, transformed_attributions, probability_changes, strict=True):
        value, share, reason = _compute_shared_similarity(clean, *change.project_back(other, size), similarity)
        found.append(TransformAgreement(change, value, share, float(gap), bool(gap < max_probability_change), reason))
    return found


@register_metric(
    "stability",
    title="Stability",
    input_kind="explainer",
    formula="mean over shifts of 1 and 4 pixels, turns of 1 and 3 degrees and noise of Spearman(map, map carried back), "
    "where the class's probability moved by less than 0.05",
    paper="test-retest: the same picture, taken again",
    lower_bound=-1.0,
    chance_level="0",
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
    """(1,C,*S) -> -1..1; undefined where the prediction held under no change. See `compare_under_transforms`."""
    return _compute_mean_similarity(
        compare_under_transforms(
            explainer,
            x,
            target,
            transforms=transforms,
            similarity=similarity,
            max_probability_change=max_probability_change,
        )
    )


@register_metric(
    "acquisition-stability",
    title="Acquisition stability",
    input_kind="explainer",
    formula="mean over windows 5 % narrower and lower, and 5 % wider and higher, resampling to 0.9 of each side and back, and "
    "JPEG of quality 90 of Spearman(map, map of the changed input), where the class's probability moved by less than 0.05",
    paper="test-retest: the same picture, taken and kept another way",
    lower_bound=-1.0,
    chance_level="0",
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
    """(1,C,*S) -> -1..1; undefined where the prediction held under no change. See `compare_under_transforms`."""
    return _compute_mean_similarity(
        compare_under_transforms(
            explainer,
            x,
            target,
            transforms=transforms,
            similarity=similarity,
            max_probability_change=max_probability_change,
        )
    )


def _compute_mean_similarity(agreements: Sequence[TransformAgreement]) -> float:
    """Over the changes under which the prediction held and the maps compare."""
    values = [one.similarity for one in agreements if one.is_prediction_stable and one.similarity is not None]
    if not values:
        words = "; ".join(
            f"{one.transform}: {one.reason or f'|dp| {one.probability_change:.2g}'}" for one in agreements
        )
        raise UndefinedError(f"under no change did the prediction hold and the maps compare ({words})")
    return float(np.mean(values))


@register_metric(
    "determinism",
    title="Determinism",
    input_kind="explainer",
    formula="largest difference between maps of the same input, asked again / largest size of the map",
    paper="a repetition",
    upper_bound=None,
    higher_is_better=False,
    chance_level="0 is what is expected",
)
def determinism(explainer: Explainer, x: Tensor, target: TargetLike = None, *, n_repeats: int = 3) -> float:
    """(1,C,*S) -> 0 for maps that are equal to the bit."""
    check_positive_integer(n_repeats=n_repeats)
    probe = ExplainerProbe.from_explainer(explainer, check_single_sample(x), target)
    first, *others = (to_finite_array(probe.compute_maps(x, [0])[0]) for _ in range(1 + n_repeats))
    return max(_compute_relative_difference(first, other) for other in others)


@register_metric(
    "batch-invariance",
    title="Batch invariance",
    input_kind="explainer",
    formula="largest difference between the map made alone and in a batch / largest size of the map",
    paper="a repetition, in company",
    upper_bound=None,
    higher_is_better=False,
    chance_level="rounding: about 1e-6 in float32",
)
def batch_invariance(
    explainer: Explainer, x: Tensor, target: TargetLike = None, *, other_images: Tensor | None = None
) -> float:
    """(1,C,*S) -> 0 or more. `other_images` (M,C,*S): the company; None is x flipped along each axis, turned dark for light, x."""
    probe = ExplainerProbe.from_explainer(explainer, check_single_sample(x), target)
    company = torch.cat([*(x.flip(axis) for axis in range(2, x.ndim)), -x, x]) if other_images is None else other_images
    if company.shape[1:] != x.shape[1:] or not len(company):
        raise InputError(
            f"other_images is {tuple(company.shape)} and x {tuple(x.shape)}: expected (M,{x.shape[1]},*S), M > 0"
        )
    alone = to_finite_array(probe.compute_maps(x, [0])[0])
    half = len(company) // 2
    batch = torch.cat([company[:half], x, company[half:]])
    return _compute_relative_difference(
        alone, to_finite_array(probe.compute_maps(batch, [0] * len(batch), batch_size=len(batch))[half])
    )


def _compute_sensitivities(
    explainer: Explainer, x: Tensor, target: TargetLike, radius: float, n_samples: int, seed: int
) -> FloatArray:
    """(samples,)"""
    check_positive_number(radius=radius)
    check_positive_integer(n_samples=n_samples)
    probe, generator = (
        ExplainerProbe.from_explainer(explainer, check_single_sample(x), target),
        torch.Generator(device="cpu"),
    )
    reach = radius * float(x.max() - x.min())
    drawn = []
    for one in draw_seeds(n_samples, torch.Generator(device="cpu").manual_seed(seed)):
        drawn.append(torch.rand(x.shape, generator=generator.manual_seed(one), dtype=torch.float32, device="cpu").to(x))
    noisy = x + reach * (2 * torch.cat(drawn) - 1)
    maps = to_finite_array(probe.compute_maps(torch.cat([x, noisy]), [0] * (n_samples + 1))).reshape(n_samples + 1, -1)
    norm = np.linalg.norm(maps[0])
    if not norm > 0:
        raise UndefinedError("the map is zero everywhere: no change is large or small beside it")
    return np.asarray(np.linalg.norm(maps[1:] - maps[0], axis=1) / norm)


def _compute_shared_similarity(
    clean_map: FloatArray, transformed_map: FloatArray, covered_mask: Mask, similarity: str
) -> tuple[float | None, float, str]:
    """The agreement on the pixels that are covered, their share, and why there is none."""
    share = float(covered_mask.mean())
    if share < MIN_SHARED_AREA:
        return None, share, f"only {share:.0%} of the pixels are shown by both"
    try:
        return SIMILARITIES[similarity](clean_map[covered_mask], transformed_map[covered_mask]), share, ""
    except UndefinedError as error:
        return None, share, str(error)


def _compute_relative_difference(first: FloatArray, second: FloatArray) -> float:
    """The largest difference, in shares of the first one's largest size."""
    peak = np.abs(first).max()
    if not peak > 0:
        raise UndefinedError("the map is zero everywhere: no difference is large or small beside it")
    return float(np.abs(second - first).max() / peak)
