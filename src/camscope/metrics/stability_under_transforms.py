"""Stability of maps: compare the maps of an input before and after shifts, rotations, noise and other transforms.

The target stays the same. A map of zeros or with NaN raises UndefinedError.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from camscope.errors import InputError, UndefinedError
from camscope.explainers.core.base_explainer import Explainer
from camscope.geometry import Placement
from camscope.hooks.find_layers import unwrap
from camscope.metrics.explain_changed_inputs import ExplainerProbe, compute_once, require_single_sample
from camscope.metrics.input_transforms import ACQUISITION_TRANSFORMS, GaussianNoise, InputTransform, Rotation, Shift
from camscope.metrics.map_similarity import SIMILARITIES
from camscope.metrics.metric_registry import FloatArray, Mask, register_metric, to_finite_array
from camscope.targets import TargetLike

DEFAULT_TRANSFORMS: tuple[InputTransform, ...] = (Shift(1), Shift(4), Rotation(1), Rotation(3), GaussianNoise(0.01))
MAX_PROBABILITY_CHANGE = 0.05  # of probability, below which a prediction counts as stable
MIN_SHARED_AREA = 0.25  # share of the pixels that both inputs must show
_register_agreement = partial(register_metric, input_kind="explainer", lower_bound=-1.0, chance_level="0")


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
    """Change x (1,C,*S) by each transform. Project each new map back to the pixels of x, and compare it with the map of x.

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
        ExplainerProbe.from_explainer(explainer, require_single_sample(x), target),
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
    """Compare the maps of all samples under each transform. Return the agreements as [sample][transform]."""
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
            value, share, reason = _compute_similarity_on_covered_pixels(clean_map, *projected, similarity)
            is_stable = bool(change < max_probability_change)
            agreements[n].append(TransformAgreement(transform, value, share, float(change), is_stable, reason))
    return agreements


def compute_stable_prediction_share(
    probe: ExplainerProbe,
    transforms: Sequence[InputTransform] = DEFAULT_TRANSFORMS,
    max_probability_change: float = MAX_PROBABILITY_CHANGE,
) -> FloatArray:
    """Return, for each sample (N,), the share of transforms that leave the prediction stable, 0..1."""
    transformed = torch.cat([change.apply(probe.x) for change in transforms])
    changes = _compute_probability_changes(probe, transforms, transformed)
    return np.asarray((changes < max_probability_change).mean(0))


def _compute_probability_changes(
    probe: ExplainerProbe,
    transforms: Sequence[InputTransform],
    transformed_inputs: Tensor,
    known_probabilities: FloatArray | None = None,
) -> FloatArray:
    """Return the absolute change of probability for each transform and sample (transforms,N).

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
    """Return the mean similarity between the map and the maps under small shifts, rotations and noise, -1..1.

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
    """Return the mean similarity between the map and the maps under other windows, resolutions and compression, -1..1.

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


class CoveredSimilarity(NamedTuple):
    """The similarity of two maps on shared pixels, the share of these pixels, and the reason for an undefined similarity."""

    similarity: float | None
    covered_share: float
    undefined_reason: str


def _compute_similarity_on_covered_pixels(
    clean_map: FloatArray, transformed_map: FloatArray, covered_mask: Mask, similarity: str
) -> CoveredSimilarity:
    """Compare two maps on the pixels that both inputs show. Without a value, give the reason."""
    share = float(covered_mask.mean())
    if share < MIN_SHARED_AREA:
        return CoveredSimilarity(None, share, f"only {share:.0%} of the pixels are shown by both inputs")
    try:
        value = SIMILARITIES[similarity](clean_map[covered_mask], transformed_map[covered_mask])
    except UndefinedError as error:
        return CoveredSimilarity(None, share, str(error))
    return CoveredSimilarity(value, share, "")
