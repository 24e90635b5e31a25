"""A race of candidates: which ones drop out, and when more images would change nothing.

At the end, candidates drop out whose quality is significantly worse than the leader's. The test is Student's t, paired by
image or by the mean of a group of images (a patient), with at least eight of them, and a p-value of at least
`compute_min_p_value`. The same values select the leader, so p-values are corrected by Holm for all pairs of candidates.

Before the end, a candidate drops out once that result is nearly certain. The gap so far is partly due to chance and is shrunk by
empirical Bayes (Efron and Morris 1973, doi:10.1080/01621459.1973.10481350). The predictive probability of the final result uses
Student's t (Spiegelhalter et al. 1986, doi:10.1016/0197-2456(86)90003-6; Saville et al. 2014, doi:10.1177/1740774514531352).
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from math import comb, sqrt
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from camscope.errors import UndefinedError
from camscope.explainers import Explainer
from camscope.explainers.core.inputs import ModelInput
from camscope.metrics import METRICS
from camscope.metrics.statistics import Estimate, compute_min_p_value, estimate_mean
from camscope.optional import require
from camscope.plurals import plural
from camscope.registry import METHODS
from camscope.targets import TargetLike

Mask = npt.NDArray[np.bool_]
FloatArray = npt.NDArray[np.float64]
FAITHFULNESS_METRIC, LOCALIZATION_METRIC, ROBUSTNESS_METRIC = "lerf-morf-gap", "enrichment", "stability"
RANKING_METRICS = FAITHFULNESS_METRIC, LOCALIZATION_METRIC  # robustness does not rank candidates, it excludes them


@dataclass(frozen=True)
class SelectionSample:
    """An image as model input with its target, its mask on the input if there is one, and its group, such as a patient."""

    item: ModelInput
    target: TargetLike = None
    mask: Mask | None = None
    group: Hashable = None  # a patient, a scene; None: no other image's


@dataclass
class CandidateState:
    """A candidate and its values so far.

    `metric_values` holds the values of each criterion for each image, NaN if undefined. `groups` are those of the images of the
    race, None if each image is its own group. `first_maps` are the maps (N,*S) of the first images, to find equal candidates.
    """

    explainer: Explainer
    metric_values: dict[str, list[float]] = field(default_factory=dict)
    total_seconds: float = 0.0
    n_images: int = 0
    drop_reason: str = ""  # "" while it is in the race
    groups: Sequence[Hashable] | None = None
    first_maps: list[FloatArray] = field(default_factory=list, repr=False)

    @property
    def title(self) -> str:
        """Method and layer for display, such as `Grad-CAM · layer4`."""
        layer = getattr(self.explainer, "layer", None)
        parts = filter(None, (self.explainer.composed_name, layer if isinstance(layer, str) else None))
        return METHODS.display_name(" · ".join(parts))

    @property
    def seconds_per_image(self) -> float:
        """Seconds for one image."""
        return self.total_seconds / max(1, self.n_images)

    def estimate_metric(self, metric: str) -> Estimate | None:
        """Return the mean of a criterion over the images so far; None if it is undefined."""
        try:
            values = self.metric_values[metric]
            groups = None if self.groups is None else self.groups[: len(values)]
            return estimate_mean(values, groups, bounds=METRICS[metric].bounds)
        except UndefinedError:
            return None


# the sorted values of all candidates on the first images, by criterion
ReferenceValues = dict[str, FloatArray]


def collect_reference(candidates: Sequence[CandidateState]) -> ReferenceValues:
    """Return the sorted values of all candidates on the images that all explained, as a scale for later values."""
    names = [name for name in RANKING_METRICS if name in candidates[0].metric_values]
    every = {
        name: np.concatenate([np.asarray(candidate.metric_values[name], np.float64) for candidate in candidates])
        for name in names
    }
    return {name: np.sort(values[~np.isnan(values)]) for name, values in every.items()}


def compute_quality(candidates: Sequence[CandidateState], reference: ReferenceValues) -> FloatArray:
    """Return the quality (candidates, images): the share of reference values below the value, 0..1, averaged over criteria.

    Equal values count half. Values within the criterion's rounding tolerance are equal. The quality is 0 where the candidate's
    value is undefined and another one's is defined. It does not depend on which candidates are left.
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


RACE_SIGNIFICANCE_LEVEL = 0.05
MIN_PROBABILITY_TO_DROP, MAX_PROBABILITY_TO_KEEP = 0.93, 0.2  # of losing at the end
MIN_GROUPS_TO_COMPARE = 8  # images, or groups: fewer cannot tell candidates apart
MIN_GROUPS_TO_STOP_EARLY = 16  # images, or groups, before the race may end early


def survivors(candidates: Sequence[CandidateState]) -> list[CandidateState]:
    """Return the candidates that are still in the race."""
    return [candidate for candidate in candidates if not candidate.drop_reason]


def rank_candidates(candidates: Sequence[CandidateState], reference: ReferenceValues) -> list[CandidateState]:
    """Return the candidates, the best first."""
    if not candidates:
        return []
    return [candidates[i] for i in np.argsort(-compute_quality(candidates, reference).mean(1), kind="stable")]


def drop_losers(candidates: Sequence[CandidateState], reference: ReferenceValues, n_images: int) -> None:
    """Drop candidates that are worse than the leader, or before the end nearly certain to be."""
    if len(candidates) < 2:
        return
    leader, *rivals = rank_candidates(candidates, reference)
    probabilities = estimate_losing_probabilities(leader, rivals, reference, n_images)
    lost = [rival for rival, p in zip(rivals, probabilities, strict=True) if p >= MIN_PROBABILITY_TO_DROP]
    if len(candidates) - len(lost) <= 2 and not is_late_enough_to_stop(leader, n_images):
        return
    for loser in lost:
        gap = _compute_quality_gaps(leader, loser, reference).mean()
        loser.drop_reason = f"behind {leader.title} by {gap:.2f} of quality after {plural(loser.n_images, 'image')}"


def is_race_decided(candidates: Sequence[CandidateState], reference: ReferenceValues, n_images: int) -> bool:
    """Return whether no remaining candidate is likely to drop out."""
    if len(candidates) < 2:
        return True
    leader, *rivals = rank_candidates(candidates, reference)
    has_values = all(map(len, reference.values()))  # of every criterion
    if not has_values or not is_late_enough_to_stop(leader, n_images):
        return False
    probabilities = estimate_losing_probabilities(leader, rivals, reference, n_images)
    return all(probability <= MAX_PROBABILITY_TO_KEEP for probability in probabilities)


def estimate_losing_probabilities(
    leader: CandidateState, rivals: Sequence[CandidateState], reference: ReferenceValues, n_images: int
) -> list[float]:
    """Return the probability that each rival will be worse than the leader after all images; 0 or 1 at the end."""
    n_seen, n_images = count_groups(leader, n_images)
    if n_images < MIN_GROUPS_TO_COMPARE:  # too few to tell candidates apart
        return [0.0] * len(rivals)
    gaps = np.array([_compute_quality_gaps(leader, rival, reference) for rival in rivals])
    behind = np.array([_compute_standardized_gap(rival_gaps) for rival_gaps in gaps]) * sqrt(n_images)
    probabilities = [0.5] * len(rivals)
    if n_seen < MIN_GROUPS_TO_COMPARE:
        return probabilities
    n_remaining, shrinkage, is_rejected = n_images - n_seen, _estimate_shrinkage(gaps), True
    for position, i in enumerate(np.argsort(-behind, kind="stable")):
        level = 1 - RACE_SIGNIFICANCE_LEVEL / 2 / comb(1 + len(rivals) - position, 2)
        if not n_remaining:  # Holm: after the first that stays, all stay
            critical_value = require("scipy.special", extra="metrics").stdtrit(n_seen - 1, level)
            is_possible = compute_min_p_value(n_seen) < 2 * (1 - level)
            is_rejected = is_rejected and is_possible and bool(behind[i] > critical_value)
            probabilities[i] = float(is_rejected)
        else:
            expected = behind[i] * (n_seen + n_remaining * shrinkage[i]) / n_images
            spread = n_remaining * sqrt((shrinkage[i] / n_seen + 1 / n_remaining) / n_images)
            shortfall = (NormalDist().inv_cdf(level) - expected) / spread
            probabilities[i] = float(1 - require("scipy.special", extra="metrics").stdtr(n_seen - 1, shortfall))
    return probabilities


def _estimate_shrinkage(gaps: FloatArray) -> FloatArray:
    """Return the share (rivals,) of each mean gap that is not due to chance, from gaps (rivals, images), the best first.

    It compares the variance of the means of all better candidates with the variance expected by chance.
    """
    shares = []
    for n, rival_gaps in enumerate(gaps, start=1):
        better = np.vstack([np.zeros_like(rival_gaps), gaps[:n]])  # the leader's gap to itself
        means = better.mean(1)
        noise = better - better.mean(0) - means[:, None] + means.mean()
        chance_variance = (noise**2).sum() / (n * (len(rival_gaps) - 1) * len(rival_gaps))
        variance = max(0.0, means.var(ddof=1) - chance_variance)
        mean_variance = rival_gaps.var(ddof=1) / len(rival_gaps)
        shares.append(2 * variance / (2 * variance + mean_variance) if variance else 0.0)
    return np.array(shares, np.float64)


def is_late_enough_to_stop(leader: CandidateState, n_images: int) -> bool:
    """Return whether enough images were seen to predict the result."""
    n_seen, n_groups = count_groups(leader, n_images)
    return n_seen >= min(MIN_GROUPS_TO_STOP_EARLY, n_groups)


def _compute_quality_gaps(leader: CandidateState, candidate: CandidateState, reference: ReferenceValues) -> FloatArray:
    """Return the leader's advantage for each image or group."""
    quality = compute_quality([leader, candidate], reference)
    gaps = np.asarray(quality[0] - quality[1], np.float64)
    if leader.groups is None:
        return gaps
    indices = {group: n for n, group in enumerate(dict.fromkeys(leader.groups[: len(gaps)]))}
    group_indices = [indices[group] for group in leader.groups[: len(gaps)]]
    return np.asarray(np.bincount(group_indices, weights=gaps) / np.bincount(group_indices), np.float64)


def count_groups(candidate: CandidateState, n_images: int) -> tuple[int, int]:
    """Return the number of independent groups seen so far, and in all."""
    if candidate.groups is None:
        return candidate.n_images, n_images
    return len(set(candidate.groups[: candidate.n_images])), len(set(candidate.groups))


def _compute_standardized_gap(gaps: FloatArray) -> float:
    """Return the mean gap in standard deviations; infinite if all gaps are equal and positive."""
    spread = gaps.std(ddof=1) if len(gaps) > 1 else 0.0
    if spread > 0:
        return float(gaps.mean() / spread)
    return float(np.inf) if gaps.mean() > 0 and len(gaps) > 1 else 0.0
