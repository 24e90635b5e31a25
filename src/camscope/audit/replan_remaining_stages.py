"""Estimate how long the remaining stages of an audit take, and plan their sizes again after each stage, under a time budget."""

import time
import warnings
from collections.abc import Callable, Mapping

from camscope.audit.core.audit_context import AuditContext
from camscope.audit.core.stage_result_schema import PlannedSize
from camscope.audit.sample_sizes_for_time_budget import (
    SHARE_FOR_STAGES,
    SIZES_IN_ORDER,
    STAGE_BY_SIZE,
    BudgetWarning,
    describe_missed_budget,
    plan_sample_sizes,
)
from camscope.audit.stage_duration_estimates import RemainingTime, StageEstimator

ESTIMATE_AFTER_STAGE = "resolve"  # this stage has run the model and the methods once
EstimateCallback = Callable[[Mapping[str, float]], None]  # stage -> estimated seconds


class RemainingStagePlanner:
    """Estimates the seconds of the stages that have not run. Under a budget it plans their sizes again after each stage.

    The estimates start after the stage "resolve", and only if that stage runs now. A resumed audit keeps the sizes that were
    planned when it ran for the first time.

    Args:
        context: The context of the audit.
        on_estimate: Called with the estimated seconds of the remaining stages, at first and when they change.

    """

    def __init__(self, context: AuditContext, on_estimate: EstimateCallback | None = None) -> None:
        self.context = context
        self._on_estimate = on_estimate
        self._start = time.monotonic()
        self._estimator: StageEstimator | None = None
        self._finished: list[str] = []
        self._remaining = RemainingTime({})
        self._remaining_at_most = RemainingTime({})  # if no interim look ends a stage
        self._is_budget_missed = False

    @property
    def _seconds_spent(self) -> float:
        return time.monotonic() - self._start

    def plan_sizes_after_stage(self, name: str, seconds: float) -> tuple[PlannedSize, ...] | None:
        """Take note of a stage that has run, and plan the sizes of the remaining stages. None without a budget or a new plan.

        Args:
            name: The name of the stage.
            seconds: How long it took.

        """
        budget = self.context.config.budget_seconds
        self._finished.append(name)
        if name == ESTIMATE_AFTER_STAGE and (self._on_estimate is not None or budget is not None):
            self._estimator = StageEstimator.from_context(self.context)
        self._remaining_at_most.record_stage_and_test_if_estimate_changed(name, seconds)
        if self._estimator is None or budget is None or not self._has_open_sizes():
            return None
        factor = max(1.0, self._remaining_at_most.measured_to_estimated_ratio)
        planned = plan_sample_sizes(
            self._estimator, SHARE_FOR_STAGES * budget - self._seconds_spent, self._finished, factor
        )
        is_new = name == ESTIMATE_AFTER_STAGE or planned != self.context.planned_sizes
        self.context.planned_sizes = planned
        return planned if is_new else None

    def _has_open_sizes(self) -> bool:
        return any(STAGE_BY_SIZE.get(name, name) not in self._finished for name in SIZES_IN_ORDER)

    def report_remaining_time_after_stage(self, name: str, seconds: float) -> None:
        """Report the estimate of the remaining stages if it has changed, and warn once if they exceed the budget.

        Args:
            name: The name of the stage that has run.
            seconds: How long it took.

        """
        is_changed = self._remaining.record_stage_and_test_if_estimate_changed(name, seconds)
        if self._estimator is not None:
            is_changed |= self._estimate_remaining_stages(self._estimator)
        remaining = self._remaining.remaining
        if self._on_estimate is not None and is_changed and remaining:
            self._on_estimate(remaining)
        if not self._is_budget_missed:
            self._is_budget_missed = warn_if_budget_is_missed(self.context, remaining, self._seconds_spent)

    def _estimate_remaining_stages(self, estimator: StageEstimator) -> bool:
        """Estimate the remaining stages at their planned sizes. Return whether an estimate differs from the last one."""
        expected, at_most = (
            {name: value for name, value in estimates.items() if name not in self._finished}
            for estimates in (
                estimator.estimate_seconds_by_stage(),
                estimator.estimate_seconds_by_stage(is_upper_bound=True),
            )
        )
        is_changed = expected != self._remaining.seconds_by_stage
        self._remaining.seconds_by_stage, self._remaining_at_most.seconds_by_stage = expected, at_most
        return is_changed


def warn_if_budget_is_missed(context: AuditContext, remaining: Mapping[str, float], seconds: float) -> bool:
    """Warn if the remaining stages exceed the time budget, and return whether they do. `seconds` have already been spent."""
    budget, budget_seconds = context.config.budget, context.config.budget_seconds
    if budget is None or budget_seconds is None or not remaining:
        return False
    missed_seconds = seconds + sum(remaining.values()) - budget_seconds
    if missed_seconds > 0:
        warnings.warn(
            describe_missed_budget(budget, missed_seconds, remaining, context.explainers), BudgetWarning, stacklevel=4
        )
    return missed_seconds > 0
