"""Race: who drops out, and when more images would change nothing any more.

At the end those are out whose quality is worse than the leader's beyond chance: paired by image, or by the mean of a group of
images (a patient), of eight at least, Student's t, and no surer than so many images can be (`compute_min_p_value`). Who leads is told by
the same values, and so is one of all pairs that are
left: step by step (Holm) there are as many comparisons as pairs. Before it a candidate drops out as soon as that end can be
foreseen: a gap so far is luck in part, and the more the less those who are as good or better differ beyond chance (empirical
Bayes: Efron and Morris 1973, doi:10.1080/01621459.1973.10481350); what is left of it goes on, with Student's tails for what the
images so far know (predictive probability: Spiegelhalter et al. 1986, doi:10.1016/0197-2456(86)90003-6; Saville et al. 2014,
doi:10.1177/1740774514531352).

Standing: a candidate in a race, and what is known of it so far; Sample: an image that it is judged by.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from math import comb, sqrt
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt

from camscope.errors import UndefinedError
from camscope.explainers import Explainer
from camscope.explainers.core.inputs import ModelInput
from camscope.metrics import METRICS
from camscope.metrics.statistics import Estimate, compute_min_p_value, estimate_mean
from camscope.optional import require
from camscope.plurals import plural
from camscope.targets import TargetLike

Mask = npt.NDArray[np.bool_]
FloatArray = npt.NDArray[np.float64]
FAITHFULNESS_METRIC, LOCALIZATION_METRIC, ROBUSTNESS_METRIC = "lerf-morf-gap", "enrichment", "stability"
RANKING_METRICS = (
    FAITHFULNESS_METRIC,
    LOCALIZATION_METRIC,
)  # what ranks candidates; the maps of what is not robust are out


@dataclass(frozen=True)
class SelectionSample:
    """An image as the model takes it, what is asked of it, and on the input's plane where the evidence is, if that is known."""

    item: ModelInput
    target: TargetLike = None
    mask: Mask | None = None
    group: Hashable = None  # a patient, a scene; None: nobody else's


@dataclass
class CandidateState:
    """A candidate's evidence so far. `metric_values`: [criterion] of each image, NaN where there is no number.

    `groups`: of all images of the race, in its order; images of one are no independent witnesses. None: each is its own.
    `first_maps`: its maps (N,*S) of the first images, by which those that are the same are told.
    """

    explainer: Explainer
    metric_values: dict[str, list[float]] = field(default_factory=dict)
    total_seconds: float = 0.0
    n_images: int = 0
    drop_reason: str = ""  # why it is out of the race
    groups: Sequence[Hashable] | None = None
    first_maps: list[FloatArray] = field(default_factory=list, repr=False)

    @property
    def title(self) -> str:
        """`gradcam · layer4`"""
        layer = getattr(self.explainer, "layer", None)
        return " · ".join(filter(None, (self.explainer.full_name, layer if isinstance(layer, str) else None)))

    @property
    def seconds_per_image(self) -> float:
        """Seconds an image."""
        return self.total_seconds / max(1, self.n_images)

    def estimate_metric(self, metric: str) -> Estimate | None:
        """The mean of a criterion over the images that it saw."""
        try:
            values = self.metric_values[metric]
            groups = None if self.groups is None else self.groups[: len(values)]
            return estimate_mean(values, groups, bounds=METRICS[metric].bounds)
        except UndefinedError:
            return None


# of each criterion that ranks, the values of all candidates on the first images where it has any, in order
ReferenceValues = dict[str, FloatArray]


def collect_reference(candidates: Sequence[CandidateState]) -> ReferenceValues:
    """What all candidates made of the images that all of them saw: by it a value is called high or low from then on."""
    names = [name for name in RANKING_METRICS if name in candidates[0].metric_values]
    every = {
        name: np.concatenate([np.asarray(one.metric_values[name], np.float64) for one in candidates]) for name in names
    }
    return {name: np.sort(values[~np.isnan(values)]) for name, values in every.items()}


def compute_quality(candidates: Sequence[CandidateState], reference: ReferenceValues) -> FloatArray:
    """[candidate, image]: the share of the reference's values that its own exceeds (equal ones count half), 0..1.

    Values that differ by no more than the criterion's precision are equal. The mean over criteria; 0 where it has no number
    and another candidate has one. It does not depend on who else is left.
    """
    shares = []
    for name, values in reference.items():
        own = np.array([one.metric_values[name] for one in candidates], np.float64)
        rounding = METRICS[name].rounding_tolerance
        below = np.searchsorted(values, own - rounding, "left") + np.searchsorted(values, own + rounding, "right")
        found = np.where(np.isnan(own), 0.0, below / (2 * max(1, len(values))))
        found[:, np.isnan(own).all(0)] = np.nan
        shares.append(found)
    counts = (~np.isnan(shares)).sum(0)
    return np.asarray(np.nansum(shares, 0) / np.maximum(counts, 1), np.float64)


RACE_SIGNIFICANCE_LEVEL = 0.05
MIN_PROBABILITY_TO_DROP, MAX_PROBABILITY_TO_KEEP = (
    0.93,
    0.2,
)  # of what the end will say: so sure that somebody is out, so unlikely that anybody else will be
MIN_GROUPS_TO_COMPARE = 8  # images, or groups: fewer tell nobody from anybody, and foresee nothing
MIN_GROUPS_TO_STOP_EARLY = 16  # and before so many the race is not over


def survivors(candidates: Sequence[CandidateState]) -> list[CandidateState]:
    """Those that are still in the race."""
    return [one for one in candidates if not one.drop_reason]


def rank_candidates(candidates: Sequence[CandidateState], reference: ReferenceValues) -> list[CandidateState]:
    """The best first."""
    if not candidates:
        return []
    return [candidates[i] for i in np.argsort(-compute_quality(candidates, reference).mean(1), kind="stable")]


def drop_losers(candidates: Sequence[CandidateState], reference: ReferenceValues, n_images: int) -> None:
    """Put out whoever is worse than the leader; before the end, whoever is as good as sure to be."""
    if len(candidates) < 2:
        return
    leader, *rest = rank_candidates(candidates, reference)
    lost = [
        one
        for one, chance in zip(rest, estimate_losing_probabilities(leader, rest, reference, n_images), strict=True)
        if chance >= MIN_PROBABILITY_TO_DROP
    ]
    if len(candidates) - len(lost) <= 2 and not is_late_enough_to_stop(leader, n_images):
        return
    for one in lost:
        gap = _compute_quality_gaps(leader, one, reference).mean()
        one.drop_reason = f"behind {leader.title} by {gap:.2f} of quality after {plural(one.n_images, 'image')}"


def is_race_decided(candidates: Sequence[CandidateState], reference: ReferenceValues, n_images: int) -> bool:
    """Whether nobody who is left can be expected to drop out: one is left, or all others are likely to stay."""
    if len(candidates) < 2:
        return True
    leader, *rest = rank_candidates(candidates, reference)
    if not is_late_enough_to_stop(leader, n_images) or not all(
        map(len, reference.values())
    ):  # of a criterion no image had a value yet
        return False
    return all(
        chance <= MAX_PROBABILITY_TO_KEEP for chance in estimate_losing_probabilities(leader, rest, reference, n_images)
    )


def estimate_losing_probabilities(
    leader: CandidateState, rivals: Sequence[CandidateState], reference: ReferenceValues, n_images: int
) -> list[float]:
    """How sure it is that each of the rest, the best first, will be worse than the leader once all images are seen.

    At the end 0 or 1.
    """
    if not has_enough_groups(leader, n_images):
        return [0.0] * len(rivals)
    seen, n_images = count_groups(leader, n_images)
    gaps = np.array([_compute_quality_gaps(leader, one, reference) for one in rivals])
    behind, found = np.array([_compute_standardized_gap(each) for each in gaps]) * sqrt(n_images), [0.5] * len(rivals)
    if seen < MIN_GROUPS_TO_COMPARE:
        return found
    to_come, real, still = n_images - seen, _estimate_shrinkage(gaps), True
    for place, i in enumerate(np.argsort(-behind, kind="stable")):
        level = 1 - RACE_SIGNIFICANCE_LEVEL / 2 / comb(1 + len(rivals) - place, 2)
        if not to_come:  # Holm: after the first that stays all stay
            still = (
                still
                and bool(behind[i] > _import_scipy_special().stdtrit(seen - 1, level))
                and compute_min_p_value(seen) < 2 * (1 - level)
            )
            found[i] = float(still)
        else:
            expected = behind[i] * (seen + to_come * real[i]) / n_images
            spread = to_come * sqrt((real[i] / seen + 1 / to_come) / n_images)
            short = (NormalDist().inv_cdf(level) - expected) / spread
            found[i] = float(1 - _import_scipy_special().stdtr(seen - 1, short))
    return found


def _estimate_shrinkage(gaps: FloatArray) -> FloatArray:
    """(rest, images), the best first -> (rest,): the share of each mean gap that is not luck.

    Estimated from how far apart the means of those who are as good or better are, beside how far luck alone would bring them.
    """
    shares = []
    for n, own in enumerate(gaps, start=1):
        better = np.vstack([np.zeros_like(own), gaps[:n]])  # the leader's gap to itself
        means = better.mean(1)
        noise = better - better.mean(0) - means[:, None] + means.mean()
        luck = (noise**2).sum() / (n * (len(own) - 1) * len(own))
        apart = max(0.0, means.var(ddof=1) - luck)
        shares.append(2 * apart / (2 * apart + own.var(ddof=1) / len(own)) if apart else 0.0)
    return np.array(shares, np.float64)


def has_enough_groups(candidate: CandidateState, n_images: int) -> bool:
    """Whether so many images, or the groups that they are of, can tell anybody from anybody."""
    return count_groups(candidate, n_images)[1] >= MIN_GROUPS_TO_COMPARE


def is_late_enough_to_stop(leader: CandidateState, n_images: int) -> bool:
    """Whether so many were seen that one may foresee how the race ends."""
    seen, there = count_groups(leader, n_images)
    return seen >= min(MIN_GROUPS_TO_STOP_EARLY, there)


def _compute_quality_gaps(leader: CandidateState, candidate: CandidateState, reference: ReferenceValues) -> FloatArray:
    """[image], or [group]: by how much the leader is better."""
    both = compute_quality([leader, candidate], reference)
    gaps = np.asarray(both[0] - both[1], np.float64)
    if leader.groups is None:
        return gaps
    numbers = {group: n for n, group in enumerate(dict.fromkeys(leader.groups[: len(gaps)]))}
    places = [numbers[group] for group in leader.groups[: len(gaps)]]
    return np.asarray(np.bincount(places, weights=gaps) / np.bincount(places), np.float64)


def count_groups(candidate: CandidateState, n_images: int) -> tuple[int, int]:
    """How many independent ones were seen, and how many there are."""
    if candidate.groups is None:
        return candidate.n_images, n_images
    return len(set(candidate.groups[: candidate.n_images])), len(set(candidate.groups))


def _compute_standardized_gap(gaps: FloatArray) -> float:
    """Their mean in standard deviations; infinite where all are the same and none is 0."""
    spread = gaps.std(ddof=1) if len(gaps) > 1 else 0.0
    if spread > 0:
        return float(gaps.mean() / spread)
    return float(np.inf) if gaps.mean() > 0 and len(gaps) > 1 else 0.0


def _import_scipy_special() -> Any:
    return require("scipy.special", extra="metrics")
