"""The race of a method selection: rank candidates by their metric values, and drop significantly worse candidates."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from math import comb

import numpy as np

from camscope.errors import UndefinedError
from camscope.explainers import Explainer
from camscope.explainers.core.model_input import ModelInput
from camscope.metrics import METRICS
from camscope.metrics.mean_estimates import Estimate, estimate_difference, estimate_mean
from camscope.metrics.metric_registry import FloatArray, Mask
from camscope.plurals import plural
from camscope.registry import METHODS
from camscope.targets import TargetLike

FAITHFULNESS_METRIC, LOCALIZATION_METRIC, ROBUSTNESS_METRIC = "lerf-morf-gap", "enrichment", "stability"
RANKING_METRICS = FAITHFULNESS_METRIC, LOCALIZATION_METRIC  # robustness does not rank candidates, it excludes them


@dataclass(frozen=True)
class SelectionSample:
    """A sample for a method selection: a model input with its target and mask. The group is, for example, a patient."""

    item: ModelInput
    target: TargetLike = None
    mask: Mask | None = None
    group: Hashable = None  # a patient, a scene; None: no other image's


@dataclass
class CandidateState:
    """A candidate of a method selection, with the metric values of the images that it has explained."""

    explainer: Explainer
    metric_values: dict[str, list[float]] = field(default_factory=dict)  # of each criterion and image, NaN if undefined
    total_seconds: float = 0.0
    n_images: int = 0
    drop_reason: str = ""  # "" while it is in the race
    groups: Sequence[Hashable] | None = None  # of all images of the race; None: each image is its own group
    first_maps: list[FloatArray] = field(default_factory=list, repr=False)  # (N,*S), to find equal candidates

    @property
    def title(self) -> str:
        """The method and layer as text, such as `Grad-CAM · layer4`."""
        layer = getattr(self.explainer, "layer", None)
        parts = filter(None, (self.explainer.composed_name, layer if isinstance(layer, str) else None))
        return METHODS.replace_names_by_titles(" · ".join(parts))

    @property
    def seconds_per_image(self) -> float:
        """The mean time in seconds to compute a map."""
        return self.total_seconds / max(1, self.n_images)

    def estimate_metric(self, metric: str) -> Estimate | None:
        """Estimate the mean of a metric over the images seen so far. Return None if all values are undefined."""
        try:
            values = self.metric_values[metric]
            groups = None if self.groups is None else self.groups[: len(values)]
            return estimate_mean(values, groups, bounds=METRICS[metric].bounds)
        except UndefinedError:
            return None


# the sorted values of all candidates on the first images, by criterion
ReferenceValues = dict[str, FloatArray]


def pool_and_sort_metric_values(candidates: Sequence[CandidateState]) -> ReferenceValues:
    """Pool the values of all candidates for each metric, and sort them. Qualities are computed relative to these values."""
    names = [name for name in RANKING_METRICS if name in candidates[0].metric_values]
    every = {
        name: np.concatenate([np.asarray(candidate.metric_values[name], np.float64) for candidate in candidates])
        for name in names
    }
    return {name: np.sort(values[~np.isnan(values)]) for name, values in every.items()}


def compute_quality(candidates: Sequence[CandidateState], reference: ReferenceValues) -> FloatArray:
    """Return the quality of each candidate on each image, as an array (candidates,images). Qualities lie in 0..1.

    It is the share of reference values below the candidate's value, averaged over metrics. Equal values count half. An
    undefined value has quality 0 if another candidate has a value for that image.
    """
    shares = []
    for name, values in reference.items():
        candidate_values = np.array([candidate.metric_values[name] for candidate in candidates], np.float64)
        rounding = METRICS[name].rounding_tolerance
        below = np.searchsorted(values, candidate_values - rounding, "left")
        below = below + np.searchsorted(values, candidate_values + rounding, "right")
        share = np.where(np.isnan(candidate_values), 0.0, below / (2 * max(1, len(values))))
        share[:, np.isnan(candidate_values).all(0)] = np.nan
        shares.append(share)
    counts = (~np.isnan(shares)).sum(0)
    return np.asarray(np.nansum(shares, 0) / np.maximum(counts, 1), np.float64)


FINAL_SIGNIFICANCE_LEVEL, INTERIM_SIGNIFICANCE_LEVEL = 0.05, 0.01  # after all images, and before
MIN_GROUPS_TO_COMPARE = 8  # images, or groups: fewer cannot tell candidates apart


def get_remaining_candidates(candidates: Sequence[CandidateState]) -> list[CandidateState]:
    """Return the candidates that have not been dropped."""
    return [candidate for candidate in candidates if not candidate.drop_reason]


def rank_candidates(candidates: Sequence[CandidateState], reference: ReferenceValues) -> list[CandidateState]:
    """Sort the candidates by their mean quality. The best comes first."""
    if not candidates:
        return []
    return [candidates[i] for i in np.argsort(-compute_quality(candidates, reference).mean(1), kind="stable")]


def drop_worse_candidates(candidates: Sequence[CandidateState], reference: ReferenceValues, n_images: int) -> None:
    """Drop the candidates that are significantly worse than the best candidate.

    Before all `n_images` are seen, the significance level is stricter. The same values select the leader. Therefore p-values
    are corrected by Holm for all pairs of candidates.
    """
    if len(candidates) < 2:
        return
    leader, *rivals = rank_candidates(candidates, reference)
    n_seen, groups = leader.n_images, None if leader.groups is None else leader.groups[: leader.n_images]
    if (n_seen if groups is None else len(set(groups))) < MIN_GROUPS_TO_COMPARE:
        return
    level = INTERIM_SIGNIFICANCE_LEVEL if n_seen < n_images else FINAL_SIGNIFICANCE_LEVEL
    qualities = [compute_quality([leader, rival], reference) for rival in rivals]
    gaps = [estimate_difference(quality[0], quality[1], groups) for quality in qualities]
    p_values = [1.0 if gap.p_value is None else gap.p_value for gap in gaps]
    for position, i in enumerate(np.argsort(p_values, kind="stable")):
        if p_values[i] * comb(len(candidates) - position, 2) >= level:
            return  # Holm: after the first that stays, all stay
        behind = f"behind {leader.title} by {gaps[i].mean:.2f} of quality"
        rivals[i].drop_reason = f"{behind} after {plural(rivals[i].n_images, 'image')}"
