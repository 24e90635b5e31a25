"""Choose sizes of the slow stages that fit a time budget. Describe the effects that stay detectable, and a missed budget."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from math import sqrt

from camscope.audit.core.audit_context import AuditContext
from camscope.audit.core.config import SampleSizes
from camscope.audit.core.stage_result_schema import PlannedSize
from camscope.audit.core.subgroup_levels import MIN_PATIENTS_FOR_VERDICT
from camscope.audit.stage_duration_estimates import StageEstimator
from camscope.errors import CamscopeWarning
from camscope.explainers import Explainer
from camscope.metrics.group_sequential import plan_interim_looks
from camscope.metrics.intervals_and_p_values import compute_t_quantile

SIZES_IN_ORDER = ("interventions", "faithfulness", "robustness", "sanity")  # as they are made smaller
OPTIONAL_STAGES = ("robustness", "faithfulness", "sanity")  # left out in this order if the smallest sizes do not fit
STAGE_BY_SIZE = {"interventions": "shortcut"}  # the other sizes have the names of their stages
MIN_SIZES = {"faithfulness": 10, "robustness": 10, "sanity": 10, "interventions": 40}
SHARE_FOR_STAGES = 0.9  # of the budget: the rest is for the report and for estimates that are too low
SHRINK_FACTOR = 0.9
MIN_NAMED_SHARE = 0.1  # of the remaining time: shorter stages are not named as the reason of a missed budget


class BudgetWarning(CamscopeWarning):
    """The budget of an audit will be missed."""


def plan_sample_sizes(
    estimator: StageEstimator, seconds: float, finished_stages: Collection[str] = (), factor: float = 1.0
) -> tuple[PlannedSize, ...]:
    """Return the new sizes of stages that a time budget makes smaller. All open stages shrink together, at most to ten patients.

    If the smallest sizes do not fit either, stages are left out. Finished stages keep the size they had.

    Args:
        estimator: Gives the seconds of each stage for given sizes.
        seconds: The time that is left for the open stages.
        finished_stages: Names of the stages that have run.
        factor: The ratio of measured to estimated time so far.

    """
    context = estimator.context
    configured = _limit_to_available_images(estimator, context.config.sample_sizes)
    sizes_of_finished = {
        name: min(getattr(configured, name), getattr(context.sample_sizes, name))
        for name in SIZES_IN_ORDER
        if STAGE_BY_SIZE.get(name, name) in finished_stages
    }
    sizes = configured.model_copy(update=sizes_of_finished)

    def fits_into_time_budget(sizes: SampleSizes) -> bool:
        expected = estimator.estimate_seconds_by_stage(sizes, is_upper_bound=True)
        open_stages = expected.keys() - set(finished_stages)
        return factor * sum(expected[name] for name in open_stages if getattr(sizes, name, 1)) <= seconds

    for smaller in _iter_smaller_sizes(sizes, [name for name in SIZES_IN_ORDER if name not in sizes_of_finished]):
        if fits_into_time_budget(sizes):
            break
        sizes = smaller
    return tuple(_list_planned_sizes(context, sizes, configured))


def _limit_to_available_images(estimator: StageEstimator, sizes: SampleSizes) -> SampleSizes:
    """Reduce the sample sizes to the number of available images: all rows for interventions, else images with a finding."""
    names = ("faithfulness", "robustness", "sanity")
    limits = {name: max([1, *estimator.count_positives(getattr(sizes, name))]) for name in names}
    return sizes.model_copy(
        update=limits | {"interventions": min(sizes.interventions, len(estimator.context.cohort.rows))}
    )


def _iter_smaller_sizes(sizes: SampleSizes, open_names: Sequence[str]) -> Iterator[SampleSizes]:
    """Yield smaller and smaller sample sizes. Sizes of stages that have not run shrink step by step, all together, to their
    minimum. Then optional stages are left out, one by one.
    """
    while any(getattr(sizes, name) > MIN_SIZES[name] for name in open_names):
        shrunk = {
            name: max(min(MIN_SIZES[name], getattr(sizes, name)), int(SHRINK_FACTOR * getattr(sizes, name)))
            for name in open_names
        }
        sizes = sizes.model_copy(update=shrunk)
        yield sizes
    for name in OPTIONAL_STAGES:
        if name in open_names:
            sizes = sizes.model_copy(update={name: 0})
            yield sizes


def _list_planned_sizes(context: AuditContext, sizes: SampleSizes, before: SampleSizes) -> Iterator[PlannedSize]:
    """Yield the sizes that became smaller. Two stages also have the smallest effect that stays detectable."""
    for name in SIZES_IN_ORDER:
        n_images, configured = getattr(sizes, name), getattr(before, name)
        if n_images < configured:
            yield PlannedSize.model_validate(
                {
                    "stage": name,
                    "n_images": n_images,
                    "configured_n_images": configured,
                    "min_effect": _compute_interval_half_width(context, n_images)
                    if name in OPTIONAL_STAGES[:2]
                    else None,
                }
            )


def _compute_interval_half_width(context: AuditContext, n_patients: int) -> float | None:
    """Return the half-width of the interval at the last interim look, in standard deviations of the patients' values."""
    if n_patients < MIN_PATIENTS_FOR_VERDICT:
        return None
    last = plan_interim_looks(n_patients)[-1] if context.config.sequential else None
    alpha = 0.05 if last is None else last.alpha
    return round(compute_t_quantile(n_patients - 1, alpha / 2) / sqrt(n_patients), 3)


def describe_missed_budget(
    budget: str, missed_seconds: float, seconds_by_stage: Mapping[str, float], explainers: Sequence[Explainer]
) -> str:
    """Say by how much the time budget will be missed. Name the slowest remaining stages and possible remedies."""
    remedies = ['name fewer methods, such as methods = ["gradcam"]'] if len(explainers) > 1 else []
    remedies += ["lower n_steps"] if any("n_steps" in explainer.parameters for explainer in explainers) else []
    remedies.append("audit fewer images by max_images")
    longest = sorted(seconds_by_stage.items(), key=lambda stage_and_seconds: -stage_and_seconds[1])
    min_seconds = MIN_NAMED_SHARE * sum(seconds_by_stage.values())
    stages = [f"{name} takes {format_duration(seconds)}" for name, seconds in longest if seconds >= min_seconds]
    reasons = " and ".join(stages[:2])
    return (
        f"the budget of {budget} will be missed by about {format_duration(missed_seconds)}, because {reasons}; "
        f"to be faster, {', or '.join(remedies)}"
    )


def format_duration(seconds: float) -> str:
    """Format seconds as text, such as `30 s`, `12 min` or `2.5 h`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
