"""An estimate of the seconds that each stage will take, from a few timed forward passes and maps."""

import time
from collections.abc import Callable, Mapping

from camscope.audit.core.context import AuditContext
from camscope.audit.performance.model_outputs import compute_logits_and_features
from camscope.audit.shortcuts.region_samples import list_requested_regions, open_region_masks
from camscope.batch.image_loading import LoadedImage
from camscope.errors import InputError
from camscope.metrics.weight_randomization import split_model

N_TIMED_IMAGES = 4
FAITHFULNESS_PASSES_PER_MAP = 60  # forward passes per map and imputation; imputing itself costs some of them
ROBUSTNESS_MAPS_PER_IMAGE = 35  # maps of each method
N_CONTROL_MAPS = 4
N_RANDOMIZATION_SEEDS = 3
SECONDS_PER_REGION = 0.01  # to detect a region in an image
SECONDS_PER_MAP_SCORE = 0.004  # to compare a map with a mask
SECONDS_PER_CLUSTERING = 5.0  # to cluster the maps of a method


def estimate_stage_seconds(context: AuditContext) -> Mapping[str, float]:
    """Return the estimated seconds of each stage on this machine; empty where no image can be read."""
    cohort = context.cohort
    images = [image for image in context.load_images(cohort.rows[:N_TIMED_IMAGES]) if image.item is not None]
    images = [
        image for image in images if image.item and images[0].item and image.item.x.shape == images[0].item.x.shape
    ]
    if not images:
        return {}
    batch, rows, n_images = context.worker.collate(images), [image.row["row"] for image in images], len(images)
    predict_seconds = _time_second_call(lambda: compute_logits_and_features(context, context.stack_on_device(images)))
    map_seconds = _time_second_call(lambda: context.worker.compute_rows(batch))
    read_seconds = _time_second_call(lambda: list(context.load_images(rows)))
    seconds_by_stage = _extrapolate_stage_seconds(
        context, predict_seconds / n_images, map_seconds / n_images, read_seconds / n_images, images
    )
    return {name: seconds for name, seconds in seconds_by_stage.items() if name not in context.config.skip}


def _extrapolate_stage_seconds(
    context: AuditContext,
    predict_seconds: float,
    map_seconds: float,
    read_seconds: float,
    images: list[LoadedImage],
) -> dict[str, float]:
    """Extrapolate the seconds per image: for a prediction, for all maps of an image, and for reading it."""
    config, n_rows, sizes = context.config, len(context.cohort.rows), context.config.sample_sizes
    n_findings, n_methods, n_imputations = len(context.findings), len(context.explainers), len(config.imputations)
    n_maps = n_methods + N_CONTROL_MAPS
    n_regions = len(open_region_masks(context)) + len(list_requested_regions(context))
    n_model_parts = len(split_model(context.model, context.stack_on_device(images[:1])))
    region_seconds = min(n_rows, sizes.regions) * (read_seconds + n_regions * SECONDS_PER_REGION)
    n_edited_images = min(n_rows, sizes.interventions) * n_findings * n_regions * (2 * n_imputations + 2)
    faithfulness_passes = n_maps * n_imputations * FAITHFULNESS_PASSES_PER_MAP
    return {
        "check": len(context.cohort.full_manifest) * read_seconds,
        "predict": n_rows * (read_seconds + predict_seconds),
        "explain": n_rows * (read_seconds + map_seconds),
        "localization": n_rows * (read_seconds + n_maps * SECONDS_PER_MAP_SCORE) if context.ground_truth else 0.0,
        "faithfulness": min(n_rows, sizes.faithfulness) * faithfulness_passes * predict_seconds,
        "sanity": min(n_rows, sizes.sanity) * N_RANDOMIZATION_SEEDS * n_model_parts * map_seconds / n_findings,
        "robustness": min(n_rows, sizes.robustness) * ROBUSTNESS_MAPS_PER_IMAGE * map_seconds,
        "shortcut": region_seconds + n_edited_images * predict_seconds + n_methods * SECONDS_PER_CLUSTERING,
    }


def _time_second_call(function: Callable[[], object]) -> float:
    """Return the seconds of the second call; the first one warms up."""
    try:
        function()
        start = time.perf_counter()
        function()
    except InputError:
        return 0.0
    return time.perf_counter() - start
