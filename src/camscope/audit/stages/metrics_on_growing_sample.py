"""Metrics that run the model, on sampled images: evaluated look by look, until the verdict on each method is reached."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from camscope.atomic_writes_and_folder_locks import build_output_path
from camscope.audit.core.audit_context import AuditContext
from camscope.audit.core.cohort import Finding
from camscope.audit.core.convert_to_summary_entries import (
    add_patient_column,
    select_metric_values_of_finding,
    summarize_metrics,
)
from camscope.audit.core.stage_result_schema import MetricSummary, StoppingLook
from camscope.audit.verdicts.early_stopping import VerdictForecast
from camscope.batch import BatchOptions, BatchRun, Manifest, run_batch
from camscope.batch.image_manifest import import_arrow
from camscope.evaluation import evaluate
from camscope.evaluation.metric_value_files import MapSelection
from camscope.explainers import Explainer
from camscope.metrics import METRICS
from camscope.metrics.group_sequential import InterimLook, plan_interim_looks

if TYPE_CHECKING:
    import pyarrow as pa

IMAGES_PER_CHUNK = 8  # images lost by an interruption; each takes long
MIN_DECISION_CHANCE = 0.05  # with a smaller chance of a verdict at the last look, a test stops
StopReason = Literal["decided", "undecidable", "complete"]
# the metric summaries of a method at a look -> whether its verdict is reached, and the chance of one at the last look
Judge = Callable[[Sequence[MetricSummary], InterimLook], VerdictForecast]


@dataclass
class SampledMetrics:
    """The metrics of one finding: their summaries, the rows of the images, and where each method stopped."""

    summaries: list[MetricSummary] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    stopping_looks: list[StoppingLook] = field(default_factory=list)


@dataclass(frozen=True)
class SampledStage:
    """A stage that evaluates metrics on sampled images: its name, its metrics and methods, and the rule of its verdict.

    `first_look_metrics` decide no verdict and take many passes. They are evaluated at the first look alone, whose number of
    images does not depend on the results: their intervals are those of a single look.
    """

    context: AuditContext
    name: str
    metrics: tuple[str, ...]
    explainers: Sequence[Explainer]
    judge: Judge
    first_look_metrics: tuple[str, ...] = ()

    def evaluate_finding(self, finding: Finding, drawn_rows: Sequence[int]) -> SampledMetrics:
        """Evaluate the metrics for images with a finding. The images are used in the order in which they were drawn."""
        result = SampledMetrics()
        if not drawn_rows:
            return result
        looks = self._plan_looks(drawn_rows)
        active, tables = list(self.explainers), list["pa.Table"]()
        for look in looks:
            rows = list(drawn_rows) if look.is_last else list(drawn_rows[: look.n_patients])
            tables.append(self._evaluate_rows(finding, sorted(set(rows) - set(result.rows)), active, look))
            result.rows = rows
            table = import_arrow().concat_tables(tables)
            if len(looks) == 1:
                result.summaries = self._summarize_metrics_of_finding(table, finding, None)
                break
            active = self._summarize_and_drop_stopped_methods(result, finding, table, active, look, len(drawn_rows))
            if not active:
                break
        if len(looks) > 1:
            result.summaries = self._complete_summaries(result.summaries, tables[0], finding)
        return result

    def _complete_summaries(
        self, summaries: Sequence[MetricSummary], first_table: "pa.Table", finding: Finding
    ) -> list[MetricSummary]:
        """Return the summaries in order. Metrics that only the first interim look evaluated are added."""
        if not self.first_look_metrics:
            return _sort_summaries(summaries)
        once = import_arrow("compute").is_in(first_table["metric"], import_arrow().array(self.first_look_metrics))
        repeated = [line for line in summaries if line.metric not in self.first_look_metrics]
        return _sort_summaries(
            [*repeated, *self._summarize_metrics_of_finding(first_table.filter(once), finding, None)]
        )

    def _plan_looks(self, drawn_rows: Sequence[int]) -> list[InterimLook]:
        n_patients = len({self.context.cohort.patients[row] for row in drawn_rows})
        looks = plan_interim_looks(n_patients)
        return looks if self.context.config.sequential else [InterimLook(1, (n_patients,))]

    def _summarize_and_drop_stopped_methods(
        self,
        result: SampledMetrics,
        finding: Finding,
        table: "pa.Table",
        active: Sequence[Explainer],
        look: InterimLook,
        max_images: int,
    ) -> list[Explainer]:
        """Add the summaries of the methods that stop at this interim look. Return the methods that continue."""
        remaining, controls = [], list[MetricSummary]()
        for explainer in active:
            summaries = self._summarize_metrics_of_finding(
                _select_method(table, explainer.composed_name), finding, look
            )
            controls = [line for line in summaries if line.control]
            lines = [line for line in summaries if not line.control]
            reason = self._find_stop_reason(lines, look)
            if reason is None:
                remaining.append(explainer)
                continue
            result.summaries += lines
            result.stopping_looks.append(
                StoppingLook(
                    method=explainer.composed_name,
                    finding=finding.name,
                    look=look.number,
                    n_looks=len(look.sizes),
                    n_images=len(result.rows),
                    max_images=max_images,
                    confidence_level=round(look.confidence_level, 6),
                    reason=reason,
                )
            )
        if not remaining:
            result.summaries += controls
        return remaining

    def _find_stop_reason(self, lines: Sequence[MetricSummary], look: InterimLook) -> StopReason | None:
        if look.is_last:
            return "complete"
        is_decided, chance = self.judge(lines, look)
        return "decided" if is_decided else "undecidable" if chance < MIN_DECISION_CHANCE else None

    def _summarize_metrics_of_finding(
        self, table: "pa.Table", finding: Finding, look: InterimLook | None
    ) -> list[MetricSummary]:
        """Summarize the metric values of one finding. The intervals are corrected for the interim looks."""
        cohort = self.context.cohort
        values = select_metric_values_of_finding(cohort, add_patient_column(cohort, table), finding, True)
        n_methods = None if look is None else len(self.explainers)
        return summarize_metrics(
            values, finding.name, look=look, n_methods=n_methods, **cohort.config.bootstrap_options
        )

    def _evaluate_rows(
        self, finding: Finding, rows: Sequence[int], explainers: Sequence[Explainer], look: InterimLook
    ) -> "pa.Table":
        """Compute the metrics of some images. Stored maps and values are reused."""
        context, config = self.context, self.context.config
        parts = (self.name, str(finding.class_index), *([f"look-{look.number}"] if len(look.sizes) > 1 else []))
        folder = build_output_path(context.folder, *parts)
        run, selection = context.maps, None
        if all(explainer in context.explainers for explainer in explainers):
            titles = tuple(explainer.composed_name for explainer in explainers)
            selection = MapSelection(tuple(rows), titles, str(finding.class_index))
            explainers = context.explainers
        else:
            run = self._compute_maps(finding, rows, explainers, folder / "maps")
        return evaluate(
            run,
            folder / "values",
            metrics=[name for name in self.metrics if look.number == 1 or name not in self.first_look_metrics],
            model=context.model,
            preprocess=explainers[0].preprocess,
            explainers=explainers,
            imputations=config.imputations,
            batch_size=config.perturbed_batch_size,
            selection=selection,
            on_progress=context.on_progress,
        ).table()

    def _compute_maps(
        self, finding: Finding, rows: Sequence[int], explainers: Sequence[Explainer], folder: Path
    ) -> BatchRun:
        """Compute maps with explainers whose settings differ from the settings of the reported maps."""
        config, cohort = self.context.config, self.context.cohort
        positions = import_arrow().array([cohort.manifest_position_by_row[row] for row in rows], import_arrow().int64())

        def select_rows(manifest: Manifest) -> Manifest:
            return replace(manifest, table=manifest.table.take(positions))

        run_batch(
            explainers,
            select_rows(cohort.manifest_with_display_names),
            folder,
            [finding.class_index],
            options=BatchOptions(chunk_size=IMAGES_PER_CHUNK, window=config.data.window),
            batch_size=config.batch_size,
        )
        return BatchRun(folder, select_rows(cohort.manifest))


def _select_method(table: "pa.Table", method: str) -> "pa.Table":
    """Select the metric values of one method and of the control maps."""
    compute = import_arrow("compute")
    return table.filter(compute.or_(table["control"], compute.equal(table["method"], method)))


def _sort_summaries(summaries: Iterable[MetricSummary]) -> list[MetricSummary]:
    """Group the summaries by metric and imputation. Within each group, the best map comes first."""
    lines = list(summaries)
    keys = list(dict.fromkeys((line.metric, line.imputation) for line in lines))

    def get_sort_key(line: MetricSummary) -> tuple[int, float]:
        """Return the position of the metric, and the value with the sign that puts the best first."""
        sign = -1 if METRICS[line.metric].higher_is_better else 1
        return keys.index((line.metric, line.imputation)), sign * (line.value.value or 0.0)

    return sorted(lines, key=get_sort_key)
