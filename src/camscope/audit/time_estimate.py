"""An estimate of the seconds that each stage will take, from a few timed forward passes and maps."""

import time
from collections.abc import Callable, Mapping

from camscope.audit.core.context import AuditContext
from camscope.audit.performance.predict_log_odds import compute_logits_and_features
from camscope.audit.shortcuts.inputs_with_regions import list_requested_regions, open_region_masks
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
    config, cohort = context.config, context.cohort
    images = next((batch for batch in context.iter_batches(cohort.rows[:N_TIMED_IMAGES]) if batch[0].item), None)
    if images is None:
        return {}
    batch, rows, x = (
        context.worker.collate(images),
        [image.row["row"] for image in images],
        context.stack_on_device(images),
    )
    predict_seconds, map_seconds, read_seconds = (
        _time_second_call(function) / len(images)
        for function in (
            lambda: compute_logits_and_features(context, x),
            lambda: context.worker.compute_rows(batch),
            lambda: list(context.load_images(rows)),
        )
    )  # of an image: its prediction, all its maps, and reading it
    n_findings, n_methods, n_imputations = len(context.findings), len(context.explainers), len(config.imputations)
    n_maps, sizes, n_rows = n_methods + N_CONTROL_MAPS, config.sample_sizes, len(cohort.rows)
    n_regions = len(open_region_masks(context)) + len(list_requested_regions(context))
    n_edited_images = min(n_rows, sizes.interventions) * n_findings * n_regions * (2 * n_imputations + 2)
    n_model_parts = len(split_model(context.model, x[:1]))
    faithfulness_passes = n_maps * n_imputations * FAITHFULNESS_PASSES_PER_MAP
    seconds_by_stage = {
        "check": len(cohort.full_manifest) * read_seconds,
        "predict": n_rows * (read_seconds + predict_seconds),
        "explain": n_rows * (read_seconds + map_seconds),
        "localization": n_rows * (read_seconds + n_maps * SECONDS_PER_MAP_SCORE) if context.ground_truth else 0.0,
        "faithfulness": min(n_rows, sizes.faithfulness) * faithfulness_passes * predict_seconds,
        "sanity": min(n_rows, sizes.sanity) * N_RANDOMIZATION_SEEDS * n_model_parts * map_seconds / n_findings,
        "robustness": min(n_rows, sizes.robustness) * ROBUSTNESS_MAPS_PER_IMAGE * map_seconds,
        "shortcut": min(n_rows, sizes.regions) * (read_seconds + n_regions * SECONDS_PER_REGION)
        + n_edited_images * predict_seconds
        + n_methods * SECONDS_PER_CLUSTERING,
    }
    return {name: seconds for name, seconds in seconds_by_stage.items() if name not in config.skip}


def _time_second_call(function: Callable[[], object]) -> float:
    """Return the seconds of the second call; the first one warms up."""
    try:
        function()
        start = time.perf_counter()
        function()
    except InputError:
        return 0.0
    return time.perf_counter() - start
