"""Interventions on regions: removal, insertion and keeping only the region, with the table of the predictions."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from camscope.audit.core.cohort import Finding
from camscope.audit.core.context import AuditContext
from camscope.audit.core.schema import InterventionEffect, MaskedAuroc
from camscope.audit.core.summary_values import summarize_estimate
from camscope.audit.performance.auc import auroc
from camscope.audit.performance.performance_summary import summarize_or_reason
from camscope.audit.performance.predict_log_odds import compute_log_odds, compute_logits_and_features
from camscope.audit.shortcuts.effect_sizes import (
    build_undefined_effect,
    estimate_insertion_effect,
    estimate_removal_effect,
)
from camscope.audit.shortcuts.image_edits import insert_region, keep_region, match_insertion_triples, remove_region
from camscope.audit.shortcuts.inputs_with_regions import FINDING_REGION, ORGAN_REGION, RegionSample, RegionSamples
from camscope.batch.manifest import import_arrow
from camscope.errors import UndefinedError
from camscope.metrics.base import FloatArray, Mask
from camscope.safe_files import open_atomic
from camscope.untrusted_files import read_parquet

if TYPE_CHECKING:
    import pyarrow as pa


INTERVENTIONS_FILE = "interventions.parquet"


@dataclass(frozen=True)
class InterventionRecord:
    """An intervention on one image: the log odds without and with the region.

    `donor_row`, `control_row`: for insertions, the row of the pasted region, and of the pasted pixels without it.
    """

    row: int
    finding: str
    region: str
    kind: str
    imputation: str | None
    log_odds_without: float
    log_odds_with: float
    donor_row: int | None = None
    control_row: int | None = None


def write_interventions(folder: Path, records: Iterable[InterventionRecord], image_ids: Mapping[int, str]) -> None:
    """Write `interventions.parquet`: every intervention, with the id of its image."""
    rows = [{"id": image_ids[record.row], **asdict(record)} for record in records]
    table = import_arrow().Table.from_pylist(rows, schema=_build_interventions_schema())
    with open_atomic(folder / INTERVENTIONS_FILE) as file:
        import_arrow("parquet").write_table(table, file)


def read_interventions(folder: Path) -> "pa.Table":
    """Read `interventions.parquet`. An empty table where it does not exist."""
    place = folder / INTERVENTIONS_FILE
    return read_parquet(place) if place.is_file() else _build_interventions_schema().empty_table()


def _build_interventions_schema() -> "pa.Schema":
    pa = import_arrow()
    texts = dict.fromkeys(("id", "finding", "region", "kind", "imputation"), pa.string())
    numbers = dict.fromkeys(("log_odds_without", "log_odds_with"), pa.float64())
    return pa.schema({"row": pa.int64(), **texts, **numbers, "donor_row": pa.int64(), "control_row": pa.int64()})


@dataclass(eq=False)
class InterventionRunner:
    """Runs the interventions for a finding.

    `log_odds`: row -> log odds of the original image. `log_odds_std`: their standard deviation, the unit of effects.
    """

    context: AuditContext
    samples: RegionSamples
    finding: Finding
    log_odds: Mapping[int, float]
    log_odds_std: float
    outputs_are_probabilities: bool = False
    records: list[InterventionRecord] = field(default_factory=list)

    def __post_init__(self) -> None:
        truths = self.context.cohort.get_truth(self.finding)
        self.truth_by_row = {sample.row: truths[sample.row] for sample in self.samples.samples}

    def run_interventions(self) -> Iterator[InterventionEffect]:
        """Yield the effects of removing, keeping and inserting every region."""
        for name in self.samples.region_names:
            yield from self.run_removals(name)
            yield self._run_insertion(name)

    def run_removals(self, region_name: str) -> Iterator[InterventionEffect]:
        """Yield the effects of removing a region, and of keeping only the region, for every imputation.

        An effect is the decrease of the log odds without the region, or without everything else.
        """
        samples = [
            sample for sample in self.samples.select_with_region(region_name) if self.truth_by_row[sample.row] is True
        ]
        original = np.array([self.log_odds[sample.row] for sample in samples])
        kinds: tuple[Literal["remove", "keep only"], ...] = ("remove", "keep only")
        patients, options = self._get_patients(samples), self.context.config.bootstrap_options
        for imputation, kind in product(self.context.config.imputations, kinds):
            edited = self._compute_edited_log_odds(samples, region_name, imputation, keep=kind == "keep only")
            self._record_interventions(region_name, kind, imputation, edited, original, samples)
            effect = estimate_removal_effect(original, edited, self.log_odds_std, patients, **options)
            yield InterventionEffect(
                region=region_name, finding=self.finding.name, kind=kind, imputation=imputation, effect=effect
            )

    def compute_masked_aurocs(self) -> Iterator[MaskedAuroc]:
        """Yield the AUROC after a region, or everything else, is replaced."""
        for name in self.samples.region_names:
            samples = [
                sample for sample in self.samples.select_with_region(name) if self.truth_by_row[sample.row] is not None
            ]
            truth = np.array([self.truth_by_row[sample.row] for sample in samples], np.bool_)
            kinds: list[Literal["mask", "keep only"]] = ["mask"] if name == ORGAN_REGION else []
            kinds += ["keep only"] if name != FINDING_REGION else []
            for imputation, kind in product(self.context.config.imputations, kinds):
                log_odds = self._compute_edited_log_odds(samples, name, imputation, keep=kind == "keep only")
                compute = partial(
                    auroc, truth, log_odds, self._get_patients(samples), **self.context.config.bootstrap_options
                )
                estimate = summarize_or_reason(compute, 0.5, "chance")
                if not samples:
                    estimate = summarize_estimate(None, 0.5, "chance", "no image has the region")
                yield MaskedAuroc(
                    region=name, finding=self.finding.name, kind=kind, imputation=imputation, auroc=estimate
                )

    def _run_insertion(self, region_name: str) -> InterventionEffect:
        """Return the effect of pasting a donor's region, relative to pasting the same region of a control image.

        Donors have the finding and the region. Where the control lacks the region, the donor's mask is used for it.
        """
        try:
            receivers, donors, controls = self._match_insertion_samples(region_name)
        except UndefinedError as error:
            effect = build_undefined_effect(str(error), self.log_odds_std)
        else:
            masks = [donor.regions[region_name] for donor in donors]
            control_masks = [
                control.regions.get(region_name, mask) for control, mask in zip(controls, masks, strict=True)
            ]
            inserted = self._compute_pasted_log_odds(receivers, masks, donors)
            reference = self._compute_pasted_log_odds(receivers, control_masks, controls)
            self._record_interventions(region_name, "insert", None, reference, inserted, receivers, donors, controls)
            patients = [self._get_patients(samples) for samples in (receivers, donors, controls)]
            effect = estimate_insertion_effect(reference, inserted, self.log_odds_std, *patients)
        return InterventionEffect(
            region=region_name, finding=self.finding.name, kind="insert", imputation=None, effect=effect
        )

    def _match_insertion_samples(self, region_name: str) -> list[list[RegionSample]]:
        """Return receivers, donors and controls. See `match_insertion_triples`."""
        labeled = [sample for sample in self.samples.samples if self.truth_by_row[sample.row] is not None]
        has_region = np.array([region_name in sample.regions for sample in labeled], np.bool_)
        truth = np.array([bool(self.truth_by_row[sample.row]) for sample in labeled], np.bool_)
        triples = match_insertion_triples(truth, has_region, self._get_patients(labeled), self.context.config.seed)
        return [[labeled[i] for i in indices.tolist()] for indices in triples]

    def _record_interventions(
        self,
        region_name: str,
        kind: str,
        imputation: str | None,
        log_odds_without: FloatArray,
        log_odds_with: FloatArray,
        *samples: Sequence[RegionSample],
    ) -> None:
        """Record interventions on samples. For insertions these are the receivers, the donors and the controls."""
        rows = zip(*([sample.row for sample in group] for group in samples), strict=True)
        values = zip(log_odds_without.tolist(), log_odds_with.tolist(), strict=True)
        self.records += [
            InterventionRecord(row, self.finding.name, region_name, kind, imputation, *pair, *source_rows)
            for (row, *source_rows), pair in zip(rows, values, strict=True)
        ]

    def _get_patients(self, samples: Sequence[RegionSample]) -> list[Any]:
        return [self.context.cohort.patients[sample.row] for sample in samples]

    def _compute_pasted_log_odds(
        self, receivers: Sequence[RegionSample], masks: Sequence[Mask], sources: Sequence[RegionSample]
    ) -> FloatArray:
        """Return the log odds (N,) of receivers with the masked pixels of other images."""
        return self._compute_log_odds(
            insert_region(_stack_inputs(receivers[part]), _stack_masks(masks[part]), _stack_inputs(sources[part]))
            for part in self._iter_batches(len(receivers))
        )

    def _compute_edited_log_odds(
        self, samples: Sequence[RegionSample], region_name: str, imputation: str, *, keep: bool
    ) -> FloatArray:
        """Return the log odds (N,) of images with the region, or with everything else, replaced."""
        edit, masks = keep_region if keep else remove_region, [sample.regions[region_name] for sample in samples]
        return self._compute_log_odds(
            edit(_stack_inputs(samples[part]), _stack_masks(masks[part]), imputation)
            for part in self._iter_batches(len(samples))
        )

    def _iter_batches(self, n_samples: int) -> Iterator[slice]:
        size = self.context.config.perturbed_batch_size
        return (slice(start, start + size) for start in range(0, n_samples, size))

    def _compute_log_odds(self, batches: Iterable[Tensor]) -> FloatArray:
        log_odds = [np.empty(0)]
        for x in batches:
            logits, _ = compute_logits_and_features(self.context, x)
            values = compute_log_odds(
                self.context, logits, [self.finding], outputs_are_probabilities=self.outputs_are_probabilities
            )
            log_odds.append(values.numpy()[:, 0])
        return np.concatenate(log_odds)


def _stack_inputs(samples: Sequence[RegionSample]) -> Tensor:
    return torch.stack([sample.x for sample in samples])


def _stack_masks(masks: Sequence[Mask]) -> Tensor:
    return torch.from_numpy(np.stack(masks))
