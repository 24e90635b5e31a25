"""How long the stages of an audit will take: their operations are timed on one or two images, and multiplied."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from math import sqrt
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from camscope.audit.core.audit_context import AuditContext
from camscope.audit.core.config import SampleSizes
from camscope.audit.core.fewest_steps_with_same_ranks import reduce_integration_steps
from camscope.audit.performance.compute_log_odds_and_features import compute_logits_and_mean_features
from camscope.audit.performance.feature_probes import N_PERMUTATIONS, probe_leakage
from camscope.audit.shortcuts.load_images_and_region_masks import RegionSample, load_region_samples
from camscope.audit.shortcuts.region_attribution import MAX_OTHER_MAPS, compute_mass_share, measure_region_width
from camscope.audit.stages.map_quality import (
    FAITHFULNESS_METRICS,
    LOCALIZATION_METRICS,
    N_RANDOMIZATION_DEPTHS,
    RANDOMIZATION_SEEDS,
    ROBUSTNESS_METRICS,
    TRANSFORMS_BY_METRIC,
)
from camscope.errors import CamscopeError
from camscope.evaluation.evaluate_model_free_metrics import CONTROL_NAMES, get_default_region_size
from camscope.evaluation.evaluate_run import DEFAULT_N_STEPS
from camscope.explainers import METHODS, Explainer
from camscope.metrics import METRICS
from camscope.metrics.explain_changed_inputs import ExplainerProbe, clean_maps_and_predictions_shared
from camscope.metrics.group_sequential import LOOK_SIZES, plan_interim_looks
from camscope.metrics.model_scorer import scoring_scope
from camscope.metrics.perturbation_test import PerturbationTest
from camscope.metrics.randomization_tests import MapComparison
from camscope.metrics.weight_randomization import copy_explainer, split_model

N_TIMED_IMAGES = 2
N_EDITED = 16  # images of the timed forward pass
SHORT_SECONDS = 0.2  # a shorter operation is timed a second time, warm
N_TIMED_VARIANTS = 4  # of an image, whose maps are timed together
MAPS_AT_FIRST_LOOK, MAPS_PER_IMAGE = 29, 11  # of a method and an image in the robustness stage; later looks take fewer
PASSES_PER_REGION = (4.0, 3.0, 2.0)  # edits of an image: with the finding, of any image, for insertions
SECONDS_PER_CLUSTERING, SECONDS_PER_CLUSTERED_MAP = 1.2, 0.037  # of a method and a finding; of each of its maps
N_MASS_SHARES = (
    2 + MAX_OTHER_MAPS
)  # of a region: in its map, for the confounder sensitivity, and in maps of other patients
N_TIMED_PERMUTATIONS = 2  # of a leakage probe, of which the stage takes more
N_CONTROL_EXPLAINERS = 2  # of the robustness stage


class RegionSeconds(NamedTuple):
    """How long the regions of an image take.

    Attributes:
        n_regions: The number of regions.
        detection: The seconds to load the image and detect all its regions.
        measurement: The seconds to compare a map with all regions of its image.

    """

    n_regions: int
    detection: float
    measurement: float


@dataclass(frozen=True)
class StageEstimator:
    """Times the operations of the stages on a few images `x` (N,C,*S) of the cohort, whose rows are `rows`."""

    context: AuditContext
    x: Tensor
    rows: tuple[int, ...]

    @classmethod
    def from_context(cls, context: AuditContext) -> "StageEstimator | None":
        """Load a few images for timing. Return None if no image can be read."""
        cohort = context.cohort
        batches = context.iter_batches(cohort.rows[: 2 * N_TIMED_IMAGES])
        images = next((batch for batch in batches if batch[0].item), None)
        if images is None:
            return None
        images = images[:N_TIMED_IMAGES]
        return cls(context, context.stack_on_device(images), tuple(image.row["row"] for image in images))

    def estimate_seconds_by_stage(
        self, sizes: SampleSizes | None = None, *, is_upper_bound: bool = False
    ) -> dict[str, float]:
        """Return the estimated seconds of each stage that is not skipped.

        `is_upper_bound`: for all sampled images, although looks may end a stage earlier.
        """
        context = self.context
        sizes = context.sample_sizes if sizes is None else sizes
        count = partial(self.estimate_number_of_sampled_images, is_upper_bound=is_upper_bound)
        n_rows = len(context.cohort.rows)
        compute: dict[str, Callable[[], float]] = {
            "check": lambda: len(context.cohort.full_manifest) * self.seconds_per_image_read,
            "predict": lambda: n_rows * (self.seconds_per_image_read + self.seconds_per_forward_pass),
            "explain": lambda: (
                n_rows * (self.seconds_per_image_read + len(context.findings) * sum(self.seconds_per_map.values()))
            ),
            "localization": lambda: n_rows * len(context.ground_truth) * self.seconds_per_localized_image,
            "faithfulness": lambda: count(sizes.faithfulness, LOOK_SIZES[1]) * self.seconds_per_faithfulness_image,
            "sanity": lambda: self.estimate_sanity_seconds(sizes.sanity),
            "robustness": lambda: self.estimate_robustness_seconds(sizes.robustness, is_upper_bound=is_upper_bound),
            "shortcut": lambda: self.estimate_shortcut_seconds(sizes),
        }
        return {name: seconds() for name, seconds in compute.items() if name not in context.config.skip}

    @cached_property
    def seconds_per_image_read(self) -> float:
        """The seconds to read one image as a model input."""
        return time_call(lambda: list(self.context.load_images(self.rows))) / len(self.rows)

    @cached_property
    def seconds_per_forward_pass(self) -> float:
        """The seconds per image of a forward pass with many images, without gradients."""
        x = self.x[:1].expand(N_EDITED, *self.x.shape[1:]).contiguous()
        return time_call(lambda: compute_logits_and_mean_features(self.context, x)) / N_EDITED

    @cached_property
    def seconds_per_map(self) -> dict[str, float]:
        """The seconds per map of each method, with the user's settings."""
        measured = reduce_integration_steps(self.context).seconds_by_method
        seconds = {name: times.configured for name, times in measured.items() if times.configured >= SHORT_SECONDS}
        return {
            name: seconds[name] if name in seconds else self._time_map(explainer)
            for name, explainer in ((each.composed_name, each) for each in self.context.explainers)
        }

    @cached_property
    def seconds_per_rank_map(self) -> dict[str, float]:
        """The seconds per map of each method, in the stages that compare ranks. A slow first measurement does not count."""
        rank = reduce_integration_steps(self.context)
        explainers = dict(zip(self.seconds_per_map, rank.explainers, strict=True))
        seconds = {steps.method: self._time_map(explainers[steps.method]) for steps in rank.path_steps}
        for name, measured in rank.seconds_by_method.items():
            if name in seconds and measured.reduced >= SHORT_SECONDS:
                seconds[name] = min(seconds[name], measured.reduced)
        return self.seconds_per_map | seconds

    def _time_map(self, explainer: Explainer) -> float:
        """Return the seconds that one map takes. Fast maps are timed in one batch, because the stages also batch them."""
        target, x = [self.context.findings[0].class_index], self.x[:1]
        probe = ExplainerProbe.from_explainer(explainer, x, target)
        seconds = time_call(lambda: probe.compute_maps(x, [0]))
        if seconds >= SHORT_SECONDS:
            return seconds
        variants = x.expand(N_TIMED_VARIANTS, *x.shape[1:]).contiguous()
        return time_call(lambda: probe.compute_maps(variants, [0] * N_TIMED_VARIANTS)) / N_TIMED_VARIANTS

    def estimate_number_of_sampled_images(
        self, n_samples: int, first_size: int = LOOK_SIZES[0], *, is_upper_bound: bool = False
    ) -> float:
        """Estimate how many images a stage evaluates, summed over all findings.

        Looks may end it after `first_size` images or later. Expected is the geometric mean of the first and the last look.
        """
        counts = self.count_positives(n_samples)
        if is_upper_bound:
            return sum(counts)
        return sum(
            sqrt(min([n, *(size for size in self._list_look_sizes(n) if size >= first_size)]) * n) for n in counts
        )

    def _list_look_sizes(self, n_images: int) -> Sequence[int]:
        return plan_interim_looks(n_images)[0].sizes if self.context.config.sequential and n_images else (n_images,)

    def count_positives(self, n_samples: int) -> list[int]:
        """Return for each finding the number of sampled images that have it."""
        truths = [self.context.cohort.get_truth_by_row(finding).values() for finding in self.context.findings]
        return [min(n_samples, sum(truth is True for truth in values)) for values in truths]

    @cached_property
    def seconds_per_localized_image(self) -> float:
        """The seconds to compare all maps of one image with its mask."""
        if not self.context.ground_truth:
            return 0.0
        ground_truth = next(iter(self.context.ground_truth.values()))
        manifest, position = self.context.cohort.manifest, self.context.cohort.manifest_position_by_row[self.rows[0]]
        (row,) = manifest.rows(position, position + 1)
        item = next(iter(self.context.load_images(self.rows[:1]))).item
        if item is None or item.placement is None:
            return self.seconds_per_image_read
        placement = item.placement
        size = placement.image_size
        mask = np.zeros(size, np.bool_)
        mask[tuple(slice(n // 3, 2 * n // 3) for n in size)] = True
        maps = [np.reshape(row["attribution"], row["grid"]) for row in self.context.first_maps]

        def load_mask() -> None:
            try:
                ground_truth.load_mask(row, size)
            except CamscopeError:  # the image has no mask
                return

        def evaluate_localization_metrics() -> None:
            """Compare all maps of one image with its mask."""
            for values in maps:
                attribution = placement.project(values)[0]
                for metric in map(METRICS.__getitem__, LOCALIZATION_METRICS):
                    metric(attribution, *([mask] if metric.input_kind == "mask" else []))

        time_call(evaluate_localization_metrics)  # the first call imports modules
        seconds_per_map = time_call(evaluate_localization_metrics) / len(maps)
        return self.seconds_per_image_read + time_call(load_mask) + (len(maps) + len(CONTROL_NAMES)) * seconds_per_map

    @cached_property
    def seconds_per_faithfulness_image(self) -> float:
        """The seconds that the faithfulness stage takes for one image."""
        n_methods = len(self.context.explainers)
        per_image = self.seconds_per_image_read
        return per_image + (n_methods + len(CONTROL_NAMES)) * self._time_perturbation_metrics()

    def _time_perturbation_metrics(self) -> float:
        """Return the seconds to compute all faithfulness metrics of one map. Several images share each forward pass."""
        config, x, targets = self.context.config, self.x, [self.context.findings[0].class_index] * len(self.x)
        attributions = torch.from_numpy(np.random.default_rng(0).random(tuple(x[:, 0].shape)))
        region_size = get_default_region_size(x[0])

        def evaluate_faithfulness_metrics() -> None:
            """Compute all faithfulness metrics with all imputations."""
            with scoring_scope(self.context.model, x, targets) as scorer:
                for imputation in config.imputations:
                    test = PerturbationTest(attributions, scorer, imputation, DEFAULT_N_STEPS, region_size)
                    for metric in map(METRICS.__getitem__, FAITHFULNESS_METRICS):
                        if metric.uses_imputation or imputation == config.imputations[0]:
                            metric(test)

        return time_call(evaluate_faithfulness_metrics) / len(x)

    def estimate_robustness_seconds(self, n_samples: int, *, is_upper_bound: bool = False) -> float:
        """Estimate the seconds of the robustness stage. After the first interim look, only metrics that decide a verdict run."""
        n_first = sum(min([n, *self._list_look_sizes(n)]) for n in self.count_positives(n_samples))
        n_images = self.estimate_number_of_sampled_images(n_samples, is_upper_bound=is_upper_bound)
        first, later = self._robustness_seconds_per_image
        return n_first * first + (n_images - n_first) * later

    @cached_property
    def _robustness_seconds_per_image(self) -> tuple[float, float]:
        """The seconds of an image up to the first interim look, and after it."""
        first = self._estimate_seconds_of_robustness_metrics(ROBUSTNESS_METRICS, MAPS_AT_FIRST_LOOK)
        return first, self._estimate_seconds_of_robustness_metrics(tuple(TRANSFORMS_BY_METRIC), MAPS_PER_IMAGE)

    def _estimate_seconds_of_robustness_metrics(self, names: Sequence[str], n_maps: int) -> float:
        """Estimate the seconds that some robustness metrics take for one image, with all methods."""
        per_image = self.seconds_per_image_read + 2 * self.seconds_per_forward_pass  # for two classes
        n_explainers = len(self.context.explainers) + N_CONTROL_EXPLAINERS
        return (
            per_image
            + n_maps * sum(self.seconds_per_rank_map.values())
            + n_explainers * self._time_robustness_metrics(names)
        )

    def _time_robustness_metrics(self, names: Sequence[str]) -> float:
        """Return the seconds of some robustness metrics for one image and method.
        The time of maps and predictions does not count.
        """
        edges, x, target = METHODS["edges"](self.context.model), self.x[:1], self.context.findings[0].class_index

        def evaluate_robustness_metrics() -> None:
            """Compute the robustness metrics that are defined for this input."""
            for metric in map(METRICS.__getitem__, names):
                try:
                    metric(edges, x, target)
                except CamscopeError:  # undefined for this input
                    continue

        with clean_maps_and_predictions_shared():
            evaluate_robustness_metrics()  # the predictions
            return time_call(evaluate_robustness_metrics)

    def estimate_sanity_seconds(self, n_samples: int) -> float:
        """Estimate how many seconds the sanity stage takes for `n_samples` images."""
        n_steps, (comparison, pair) = self._n_randomization_steps, self._seconds_to_compare_with_other_model_and_image
        n_tests = len(self.seconds_per_rank_map) + 1  # with the edge detector
        per_image = self.seconds_per_image_read + n_steps * (
            sum(self.seconds_per_rank_map.values()) + n_tests * comparison
        )
        copies = len(RANDOMIZATION_SEEDS) * n_tests * self._seconds_per_model_copy
        return sum(
            copies + n * per_image + n * (n - 1) * n_tests * pair  # each pair of images twice
            for n in self.count_positives(n_samples)
        )

    @cached_property
    def _n_randomization_steps(self) -> int:
        """The number of models in a randomization test: the trained one, one per depth for a first seed, one per other seed."""
        n_parts = len(split_model(self.context.model, self.x[:1]))
        return min(N_RANDOMIZATION_DEPTHS, n_parts) + len(RANDOMIZATION_SEEDS)

    @cached_property
    def _seconds_per_model_copy(self) -> float:
        """The seconds to make one copy of the model."""
        return time_call(lambda: copy_explainer(self.context.explainers[0]))

    @cached_property
    def _seconds_to_compare_with_other_model_and_image(self) -> tuple[float, float]:
        """The seconds to compare a map with the map of another model, and with the map of another image."""
        maps = np.random.default_rng(0).random((2, *self.x.shape[2:]))
        names = ("ssim", "spearman", "hog") if maps.ndim == 3 and min(maps.shape[1:]) >= 32 else ("ssim", "spearman")
        comparison = MapComparison(maps, names)

        def compare_models() -> None:
            for name in names:
                comparison.compare_with_trained(name, maps)

        compare_models()  # the first call imports modules
        seconds_per_pair = time_call(lambda: [comparison.compare_different_images(name) for name in names])
        return time_call(compare_models) / len(maps), seconds_per_pair

    @cached_property
    def _region_seconds(self) -> "RegionSeconds":
        """The number of regions and the seconds that they take in one image."""
        on_progress, self.context.on_progress = self.context.on_progress, lambda done, total: None
        start = time.perf_counter()
        samples: Sequence[RegionSample] = ()
        try:
            with suppress(CamscopeError):  # no region can be read
                samples = load_region_samples(self.context, self.rows).samples
        finally:
            self.context.on_progress = on_progress
        detection = (time.perf_counter() - start) / len(self.rows)
        masks = [mask for sample in samples for mask in sample.regions.values()]
        n_regions = len({name for sample in samples for name in sample.regions})
        if not masks:
            return RegionSeconds(n_regions, detection, 0.0)
        attribution = np.random.default_rng(0).random(masks[0].shape)

        def measure_all_regions() -> None:
            """Measure the width and the mass shares of every region once."""
            for mask in masks:
                measure_region_width(mask)
                for _ in range(N_MASS_SHARES):
                    compute_mass_share(attribution, mask)

        return RegionSeconds(n_regions, detection, time_call(measure_all_regions) / len(masks) * n_regions)

    @cached_property
    def _seconds_per_leakage_probe(self) -> float:
        """The seconds to probe one subgroup column for leakage, measured on random features with the model's dimensions."""
        context, n_rows = self.context, len(self.context.cohort.rows)
        if not context.config.data.subgroups:
            return 0.0
        features = compute_logits_and_mean_features(context, self.x)[1]
        values = np.random.default_rng(0).random((n_rows, features.shape[1]))
        labels = [n % 2 for n in range(n_rows)]

        def probe_random_features() -> None:
            """Run one leakage probe with a few permutations."""
            probe_leakage(values, labels, n_permutations=N_TIMED_PERMUTATIONS, n_resamples=1)

        time_call(probe_random_features)  # the first call imports modules
        seconds = time_call(probe_random_features)
        return seconds * (1 + N_PERMUTATIONS) / (1 + N_TIMED_PERMUTATIONS)

    def estimate_shortcut_seconds(self, sizes: SampleSizes) -> float:
        """Estimate how many seconds the shortcut stage takes."""
        context, n_rows = self.context, len(self.context.cohort.rows)
        regions = self._region_seconds
        n_edited, n_positive = min(n_rows, sizes.interventions), sum(self.count_positives(sizes.interventions // 2))
        of_positives, of_all, of_insertions = PASSES_PER_REGION
        n_negative = max(0, n_edited - n_positive)
        n_passes = regions.n_regions * (n_positive * of_positives + n_edited * of_all + n_negative * of_insertions)
        n_maps_per_image = len(context.explainers) * len(context.findings)
        clustering = sum(
            SECONDS_PER_CLUSTERING + n * SECONDS_PER_CLUSTERED_MAP for n in self.count_positives(sizes.regions)
        )
        return (
            min(n_rows, sizes.regions) * (regions.detection + n_maps_per_image * regions.measurement)
            + n_passes * self.seconds_per_forward_pass
            + len(context.explainers) * clustering
            + len(context.config.data.subgroups) * self._seconds_per_leakage_probe
        )


class RemainingTime:
    """The estimated seconds of the remaining stages, corrected by the seconds that finished stages took."""

    def __init__(self, seconds_by_stage: Mapping[str, float]) -> None:
        self.seconds_by_stage = dict(seconds_by_stage)
        self._expected, self._taken = 0.0, 0.0

    def record_stage_and_test_if_estimate_changed(self, name: str, seconds: float) -> bool:
        """Record how long a stage took. Return whether this changes the estimate for the remaining stages."""
        expected = self.seconds_by_stage.pop(name, None)
        if expected is None:
            return False
        before = self.measured_to_estimated_ratio
        self._expected, self._taken = self._expected + expected, self._taken + seconds
        return abs(self.measured_to_estimated_ratio - before) > MIN_CORRECTION * before

    @property
    def measured_to_estimated_ratio(self) -> float:
        """The ratio of measured to estimated time, over the finished stages."""
        return 1.0 if self._expected < MIN_SECONDS_FOR_CORRECTION else self._taken / self._expected

    @property
    def remaining(self) -> dict[str, float]:
        """The corrected estimate of each remaining stage in seconds."""
        return {name: self.measured_to_estimated_ratio * seconds for name, seconds in self.seconds_by_stage.items()}


MIN_CORRECTION = 0.15  # smaller corrections are not reported
MIN_SECONDS_FOR_CORRECTION = 5.0  # of finished stages, before the others are corrected by them


def time_call(function: Callable[[], Any]) -> float:
    """Return the duration of a call in seconds, or 0 for a call that fails.
    A fast call is repeated twice: the faster repetition counts.
    """
    try:
        seconds = _measure_seconds(function)
        return min(_measure_seconds(function) for _ in range(2)) if seconds < SHORT_SECONDS else seconds
    except CamscopeError:
        return 0.0


def _measure_seconds(function: Callable[[], Any]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start
