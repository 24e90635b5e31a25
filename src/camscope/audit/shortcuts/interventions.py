"""Interventions on regions: removal, insertion and keeping only the region, with the table of the predictions."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from camscope.audit.core.cohort import Finding
from camscope.audit.core.context import AuditContext
from camscope.audit.core.schema import EstimateSummary, InterventionEffect, MaskedAuroc
from camscope.audit.core.summary_values import summarize_estimate
from camscope.audit.performance.auc import auroc
from camscope.audit.performance.model_outputs import compute_log_odds, compute_logits_and_features
from camscope.audit.shortcuts.effect_sizes import (
    StandardizedEffect,
    build_untested_effect,
    estimate_insertion_effect,
    estimate_removal_effect,
)
from camscope.audit.shortcuts.image_edits import insert_region, keep_region, match_insertion_triples, remove_region
from camscope.audit.shortcuts.region_samples import FINDING_REGION, ORGAN_REGION, RegionSample, RegionSamples
from camscope.batch.manifest import import_arrow
from camscope.errors import UndefinedError
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
    with open_atomic(folder / INTERVENTIONS_FILE) as file:
        import_arrow("parquet").write_table(
            import_arrow().Table.from_pylist(rows, schema=_build_interventions_schema()), file
        )


def read_interventions(folder: Path) -> "pa.Table":
    """Read `interventions.parquet`; an empty table where it does not exist."""
    place = folder / INTERVENTIONS_FILE
    return read_parquet(place) if place.is_file() else _build_interventions_schema().empty_table()


def _build_interventions_schema() -> "pa.Schema":
    pa = import_arrow()
    words = dict.fromkeys(("id", "finding", "region", "kind", "imputation"), pa.string())
    numbers = dict.fromkeys(("log_odds_without", "log_odds_with"), pa.float64())
    return pa.schema({"row": pa.int64(), **words, **numbers, "donor_row": pa.int64(), "control_row": pa.int64()})


NO_EFFECT_BASELINE = 0.0, "no effect"
FloatArray = npt.NDArray[np.float64]
ImageEdit = Callable[[Tensor, Tensor], Tensor]  # x (N,C,*S), masks (N,*S) -> changed x


@dataclass(eq=False)
class InterventionRunner:
    """Runs the interventions for a finding.

    `log_odds`: row -> log odds of the original image; `log_odds_std`: their standard deviation, the unit of effects.
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
        """Yield the effects of removing a region, and of keeping only the region, for every imputation."""
        samples = [
            sample for sample in self.samples.select_with_region(region_name) if self.truth_by_row[sample.row] is True
        ]
        for imputation in self.context.config.imputations:
            yield self._run_removal(region_name, samples, imputation, "remove")
            yield self._run_removal(region_name, samples, imputation, "keep only")

    def compute_masked_aurocs(self) -> Iterator[MaskedAuroc]:
        """Yield the AUROC after a region, or everything else, is replaced."""
        for name in self.samples.region_names:
            samples = [
                sample for sample in self.samples.select_with_region(name) if self.truth_by_row[sample.row] is not None
            ]
            for imputation in self.context.config.imputations:
                if name == ORGAN_REGION:
                    yield self._compute_masked_auroc(name, samples, imputation, "mask")
                if name != FINDING_REGION:
                    yield self._compute_masked_auroc(name, samples, imputation, "keep only")

    def _run_removal(
        self, region_name: str, samples: Sequence[RegionSample], imputation: str, kind: Literal["remove", "keep only"]
    ) -> InterventionEffect:
        """Return the decrease of the log odds without the region, or without everything else."""
        edit = remove_region if kind == "remove" else keep_region
        original_log_odds = np.array([self.log_odds[sample.row] for sample in samples])
        edited_log_odds = self._compute_edited_log_odds(
            samples, lambda x, masks: edit(x, masks, imputation), region_name
        )
        self._record_interventions(region_name, kind, imputation, samples, edited_log_odds, original_log_odds)
        effect = self._summarize_effect(
            lambda: estimate_removal_effect(
                region_name,
                imputation,
                original_log_odds,
                edited_log_odds,
                self.log_odds_std,
                self._get_patients(samples),
                **self.context.config.bootstrap_options,
            )
        )
        return InterventionEffect(
            region=region_name, finding=self.finding.name, kind=kind, imputation=imputation, effect=effect
        )

    def _run_insertion(self, region_name: str) -> InterventionEffect:
        """Return the effect of pasting a donor's region, relative to pasting the same region of a control image.

        Donors have the finding and the region. Where the control lacks the region, the donor's mask is used for it.
        """
        try:
            triples = list(self._iter_insertion_triples(region_name))
        except UndefinedError as error:
            untested = build_untested_effect(f"insert {region_name}", None, str(error), self.log_odds_std)
            effect = self._summarize_effect(lambda: untested)
            return InterventionEffect(
                region=region_name, finding=self.finding.name, kind="insert", imputation=None, effect=effect
            )
        receivers, donors, controls = ([triple[k] for triple in triples] for k in range(3))
        masks = [donor.regions[region_name] for _, donor, _ in triples]
        control_masks = [other.regions.get(region_name, donor.regions[region_name]) for _, donor, other in triples]
        log_odds_with = self._compute_pasted_log_odds(receivers, masks, donors)
        log_odds_without = self._compute_pasted_log_odds(receivers, control_masks, controls)
        self._record_interventions(
            region_name, "insert", None, receivers, log_odds_without, log_odds_with, donors, controls
        )
        effect = self._summarize_effect(
            lambda: estimate_insertion_effect(
                region_name,
                log_odds_without,
                log_odds_with,
                self.log_odds_std,
                self._get_patients(receivers),
                donors=self._get_patients(donors),
                controls=self._get_patients(controls),
                **self.context.config.bootstrap_options,
            )
        )
        return InterventionEffect(
            region=region_name, finding=self.finding.name, kind="insert", imputation=None, effect=effect
        )

    def _iter_insertion_triples(self, region_name: str) -> Iterator[tuple[RegionSample, RegionSample, RegionSample]]:
        """Yield receiver, donor and control of three patients; see `match_insertion_triples`."""
        labeled = [sample for sample in self.samples.samples if self.truth_by_row[sample.row] is not None]
        has_region = np.array([region_name in sample.regions for sample in labeled], np.bool_)
        truth = np.array([bool(self.truth_by_row[sample.row]) for sample in labeled], np.bool_)
        triples = match_insertion_triples(truth, has_region, self._get_patients(labeled), self.context.config.seed)
        for triple in zip(*(sample.tolist() for sample in triples), strict=True):
            receiver, donor, other = (labeled[sample] for sample in triple)
            yield receiver, donor, other

    def _compute_masked_auroc(
        self, region_name: str, samples: Sequence[RegionSample], imputation: str, kind: Literal["mask", "keep only"]
    ) -> MaskedAuroc:
        edit = remove_region if kind == "mask" else keep_region
        log_odds = self._compute_edited_log_odds(samples, lambda x, masks: edit(x, masks, imputation), region_name)
        truth, groups = (
            np.array([bool(self.truth_by_row[sample.row]) for sample in samples]),
            self._get_patients(samples),
        )
        try:
            if not samples:
                raise UndefinedError("no image has the region")
            estimate = summarize_estimate(
                auroc(truth, log_odds, groups, **self.context.config.bootstrap_options), 0.5, "chance"
            )
        except UndefinedError as error:
            estimate = summarize_estimate(None, 0.5, "chance", str(error))
        return MaskedAuroc(
            region=region_name, finding=self.finding.name, kind=kind, imputation=imputation, auroc=estimate
        )

    def _record_interventions(
        self,
        region_name: str,
        kind: str,
        imputation: str | None,
        samples: Sequence[RegionSample],
        log_odds_without: FloatArray,
        log_odds_with: FloatArray,
        *source_samples: Sequence[RegionSample],
    ) -> None:
        numbers = zip(*([sample.row for sample in group] for group in (samples, *source_samples)), strict=True)
        self.records += [
            InterventionRecord(
                row, self.finding.name, region_name, kind, imputation, without, with_region, *source_rows
            )
            for (row, *source_rows), without, with_region in zip(
                numbers, log_odds_without.tolist(), log_odds_with.tolist(), strict=True
            )
        ]

    def _summarize_effect(self, build_effect: Callable[[], StandardizedEffect]) -> EstimateSummary:
        if self.log_odds_std <= 0:
            return summarize_estimate(None, *NO_EFFECT_BASELINE, "the model gives every image the same score")
        effect = build_effect()
        return summarize_estimate(
            effect.estimate, *NO_EFFECT_BASELINE, effect.undefined_reason or effect.too_few_reason
        )

    def _get_patients(self, samples: Sequence[RegionSample]) -> list[Any]:
        return [self.context.cohort.patients[sample.row] for sample in samples]

    def _compute_pasted_log_odds(
        self, receivers: Sequence[RegionSample], masks: Sequence[Any], donors: Sequence[RegionSample]
    ) -> FloatArray:
        log_odds, size = [], self.context.config.perturbed_batch_size
        for start in range(0, len(receivers), size):
            part = slice(start, start + size)
            x = torch.stack([sample.x for sample in receivers[part]])
            donor_x = torch.stack([sample.x for sample in donors[part]])
            pasted = insert_region(x, torch.from_numpy(np.stack(masks[part])), donor_x)
            log_odds.append(self._compute_log_odds(pasted))
        return np.concatenate(log_odds) if log_odds else np.empty(0)

    def _compute_edited_log_odds(
        self, samples: Sequence[RegionSample], edit: ImageEdit, region_name: str
    ) -> FloatArray:
        """Return the log odds (N,) of edited images."""
        log_odds, size = [], self.context.config.perturbed_batch_size
        for start in range(0, len(samples), size):
            part = list(samples[start : start + size])
            x = torch.stack([sample.x for sample in part])
            log_odds.append(
                self._compute_log_odds(
                    edit(x, torch.from_numpy(np.stack([sample.regions[region_name] for sample in part])))
                )
            )
        return np.concatenate(log_odds) if log_odds else np.empty(0)

    def _compute_log_odds(self, x: Tensor) -> FloatArray:
        logits, _ = compute_logits_and_features(self.context, x)
        return compute_log_odds(
            self.context, logits, [self.finding], outputs_are_probabilities=self.outputs_are_probabilities
        ).numpy()[:, 0]
