"""Edit regions of images (remove, insert, keep only) and record how the predictions change."""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from hashlib import sha256
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from camscope.atomic_writes_and_folder_locks import open_atomic
from camscope.audit.core.audit_context import AuditContext
from camscope.audit.core.cohort import Finding
from camscope.audit.core.convert_to_summary_entries import summarize_estimate, summarize_estimate_or_reason
from camscope.audit.core.stored_predictions import Predictions
from camscope.audit.core.subgroup_levels import MIN_PATIENTS_FOR_VERDICT
from camscope.audit.core.summary_schema import InterventionEffect, MaskedAuroc
from camscope.audit.performance.auc import auroc
from camscope.audit.performance.compute_log_odds_and_features import compute_log_odds, compute_logits_and_mean_features
from camscope.audit.shortcuts.intervention_effects_and_reliance import (
    build_undefined_effect,
    estimate_insertion_effect,
    estimate_removal_effect,
)
from camscope.audit.shortcuts.load_images_and_region_masks import (
    FINDING_REGION,
    ORGAN_REGION,
    RegionSample,
    RegionSamples,
)
from camscope.batch.image_manifest import import_arrow
from camscope.errors import UndefinedError
from camscope.metrics.imputation import ImputationLike, build_imputer
from camscope.metrics.metric_registry import FloatArray, Mask
from camscope.read_untrusted_files import read_parquet

if TYPE_CHECKING:
    import pyarrow as pa


RowArray = NDArray[np.int64]
MIN_PREFERRED_IMAGES: Final = 5  # with fewer images of the preferred kind, all suitable images are used
INTERVENTIONS_FILE = "interventions.parquet"


class ReceiversDonorsControls(NamedTuple):
    """Row numbers (M,) of matched images: receivers of a region, donors of the region, and controls without it.

    The effect of pasting alone is excluded by a comparison with the receiver that has the control's pixels in the same place.
    """

    receivers: RowArray
    donors: RowArray
    controls: RowArray


def remove_region(x: Tensor, masks: Tensor, imputation: ImputationLike = "mean", seed: int = 0) -> Tensor:
    """Replace the region in each image (N,C,*S) by imputed pixels. The masks have the shape (N,*S).

    An imputation is an intervention, too: black looks like a collimator or like air, and blur keeps coarse structures. An
    effect that two imputations agree on is that of the region.
    """
    return build_imputer(imputation, x, seed)(masks, torch.arange(len(x), device=x.device))


def insert_region(x: Tensor, masks: Tensor, donors: Tensor) -> Tensor:
    """Copy the masked pixels of donor images into other images. Images have the shape (N,C,*S), and masks (N,*S)."""
    return torch.where(masks[:, None], donors, x)


def match_receivers_donors_and_controls(
    truth: ArrayLike, has_region: ArrayLike, groups: Sequence[Hashable] | None = None, seed: int = 0
) -> ReceiversDonorsControls:
    """For each receiver image, choose a donor with the region and a control without the region, all from different patients.

    `truth`, `has_region` and `groups` (N,) describe the images. The groups are the patients. Receivers are the negatives
    without the region, or all images without it where such negatives are few. Where every image has the region, they are
    the negatives. Donors are the positives with the region, or all images with it where those are few. Controls are of the
    same kind as receivers. The three are of different patients, and donors are used about equally often. With fewer than
    ten patients as controls, no patient is a control twice while another one is unused. UndefinedError if there is nothing
    to paste, or nothing to paste it into.
    """
    positive, carriers = np.asarray(truth, np.bool_), np.asarray(has_region, np.bool_)
    receivers = (
        _select_preferred_rows(~carriers & ~positive, ~carriers) if not carriers.all() else np.flatnonzero(~positive)
    )
    donors = _select_preferred_rows(carriers & positive, carriers)
    if not len(donors):
        raise UndefinedError("no image has the region")
    if not len(receivers):
        raise UndefinedError("every image has the region and is positive: no image can receive the region")
    patients: Sequence[Hashable] = range(len(positive)) if groups is None else groups
    random = np.random.default_rng(seed)
    rows = receivers.tolist(), random.permutation(donors).tolist(), random.permutation(receivers).tolist()
    triples = list(_iter_receivers_donors_and_controls(*rows, patients))
    if len({patients[control] for *_, control in triples}) < MIN_PATIENTS_FOR_VERDICT:
        triples = list(_iter_receivers_donors_and_controls(*rows, patients, prefer_unused_controls=True))
    if not triples:
        raise UndefinedError(
            "an insertion needs three patients: a receiver, a donor with the region and a control without it"
        )
    return ReceiversDonorsControls(*np.array(triples, np.int64).T)


def _iter_receivers_donors_and_controls(
    receivers: list[int],
    donors: list[int],
    controls: list[int],
    patients: Sequence[Hashable],
    *,
    prefer_unused_controls: bool = False,
) -> Iterator[tuple[int, int, int]]:
    """Yield the rows of a receiver, a donor and a control image. The three belong to different patients."""
    used: set[Hashable] = set()
    for n, row in enumerate(receivers):
        donor = _find_next_row(donors, n, patients, {patients[row]})
        excluded = {patients[row]} if donor is None else {patients[row], patients[donor]}
        unused = _find_next_row(controls, n, patients, excluded | used) if prefer_unused_controls else None
        control = _find_next_row(controls, n, patients, excluded) if unused is None else unused
        if donor is not None and control is not None:
            used.add(patients[control])
            yield row, donor, control


def _find_next_row(
    candidate_rows: list[int], start: int, patients: Sequence[Hashable], excluded_patients: set[Hashable]
) -> int | None:
    """Return the next row whose patient is not excluded, or None. The search wraps around at the end."""
    rotated = (candidate_rows[(start + step) % len(candidate_rows)] for step in range(len(candidate_rows)))
    return next((row for row in rotated if patients[row] not in excluded_patients), None)


def _select_preferred_rows(preferred: NDArray[np.bool_], fallback: NDArray[np.bool_]) -> RowArray:
    return np.flatnonzero(preferred if preferred.sum() >= MIN_PREFERRED_IMAGES else fallback)


@dataclass(frozen=True)
class InterventionRecord:
    """The log odds of one image without and with a region.

    For insertions, `donor_row` is the row of the pasted region. `control_row` is the row of the pasted pixels without
    the region.
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
    """Write `interventions.parquet`, with one row for each edited image."""
    rows = [{"id": image_ids[record.row], **asdict(record)} for record in records]
    table = import_arrow().Table.from_pylist(rows, schema=_build_interventions_schema())
    with open_atomic(folder / INTERVENTIONS_FILE) as file:
        import_arrow("parquet").write_table(table, file)


def read_interventions(folder: Path) -> "pa.Table":
    """Read `interventions.parquet`. If the file does not exist, return an empty table."""
    place = folder / INTERVENTIONS_FILE
    return read_parquet(place) if place.is_file() else _build_interventions_schema().empty_table()


def _build_interventions_schema() -> "pa.Schema":
    pa = import_arrow()
    texts = dict.fromkeys(("id", "finding", "region", "kind", "imputation"), pa.string())
    numbers = dict.fromkeys(("log_odds_without", "log_odds_with"), pa.float64())
    return pa.schema({"row": pa.int64(), **texts, **numbers, "donor_row": pa.int64(), "control_row": pa.int64()})


@dataclass(eq=False)
class InterventionRunner:
    """Runs the interventions for one finding.

    `log_odds`: row -> log odds of the original image. `log_odds_std`: their standard deviation, the unit of effects.
    """

    context: AuditContext
    samples: RegionSamples
    finding: Finding
    predictions: Predictions
    records: list[InterventionRecord] = field(default_factory=list)
    # (row, imputation, digest of the replaced pixels) -> the log odds of the edited image
    _edited_log_odds: dict[tuple[int, str, bytes], float] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.log_odds = self.predictions.log_odds_by_row(self.finding.name)
        self.log_odds_std = self.predictions.log_odds_std(self.finding.name)
        truths = self.context.cohort.get_truth_by_row(self.finding)
        self.truth_by_row = {sample.row: truths[sample.row] for sample in self.samples.samples}

    def run_interventions(self) -> Iterator[InterventionEffect]:
        """Yield the effects of interventions on every region: removing it, keeping only it, and inserting it."""
        for name in self.samples.region_names:
            yield from self.run_removals(name)
            yield self._run_insertion(name)

    def run_removals(self, region_name: str) -> Iterator[InterventionEffect]:
        """Yield the effects of removing a region, and of removing everything else. Every imputation is used.

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

    def compute_aurocs_with_region_masked_or_alone(self) -> Iterator[MaskedAuroc]:
        """Yield the AUROC with the organ masked, and for each region the AUROC with only this region visible."""
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
                estimate = summarize_estimate_or_reason(compute, 0.5, "chance")
                if not samples:
                    estimate = summarize_estimate(None, 0.5, "chance", "no image has the region")
                yield MaskedAuroc(
                    region=name, finding=self.finding.name, kind=kind, imputation=imputation, auroc=estimate
                )

    def _run_insertion(self, region_name: str) -> InterventionEffect:
        """Return the effect of inserting a region: the change with a donor's pixels minus the change with a control's pixels.

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
        """Match receiver, donor and control images for inserting a region."""
        labeled = [sample for sample in self.samples.samples if self.truth_by_row[sample.row] is not None]
        has_region = np.array([region_name in sample.regions for sample in labeled], np.bool_)
        truth = np.array([bool(self.truth_by_row[sample.row]) for sample in labeled], np.bool_)
        triples = match_receivers_donors_and_controls(
            truth, has_region, self._get_patients(labeled), self.context.config.seed
        )
        return [[labeled[i] for i in indices.tolist()] for indices in triples]

    def _record_interventions(
        self,
        region_name: str,
        intervention_kind: str,
        imputation: str | None,
        log_odds_without: FloatArray,
        log_odds_with: FloatArray,
        *samples: Sequence[RegionSample],
    ) -> None:
        """Record the log odds of edited images, with and without the region.

        For insertions, the samples are the receivers, the donors and the controls.
        """
        rows = zip(*([sample.row for sample in group] for group in samples), strict=True)
        values = zip(log_odds_without.tolist(), log_odds_with.tolist(), strict=True)
        self.records += [
            InterventionRecord(row, self.finding.name, region_name, intervention_kind, imputation, *pair, *source_rows)
            for (row, *source_rows), pair in zip(rows, values, strict=True)
        ]

    def _get_patients(self, samples: Sequence[RegionSample]) -> list[Any]:
        return [self.context.cohort.patients[sample.row] for sample in samples]

    def _compute_pasted_log_odds(
        self, receivers: Sequence[RegionSample], masks: Sequence[Mask], sources: Sequence[RegionSample]
    ) -> FloatArray:
        """Paste masked pixels of source images into receiver images. Return the log odds (N,) of the results."""
        return self._compute_log_odds(
            receivers, masks, lambda x, mask, part: insert_region(x, mask, _stack_inputs(sources[part]))
        )

    def _compute_edited_log_odds(
        self, samples: Sequence[RegionSample], region_name: str, imputation: str, *, keep: bool
    ) -> FloatArray:
        """Replace a region, or with `keep` everything outside it. Return the log odds (N,) of the edited images.

        Each image is edited once: to remove the organ is to keep only what is outside of it.
        """
        replaced = [sample.regions[region_name] ^ keep for sample in samples]
        digests = (sha256(mask.tobytes()).digest() for mask in replaced)
        keys = [(sample.row, imputation, digest) for sample, digest in zip(samples, digests, strict=True)]
        edits = zip(keys, samples, replaced, strict=True)
        new = {key: (sample, mask) for key, sample, mask in edits if key not in self._edited_log_odds}
        values = self._compute_log_odds(
            [sample for sample, _ in new.values()],
            [mask for _, mask in new.values()],
            lambda x, mask, _: remove_region(x, mask, imputation),
        )
        self._edited_log_odds.update(zip(new, values.tolist(), strict=True))
        return np.array([self._edited_log_odds[key] for key in keys], np.float64)

    def _compute_log_odds(
        self,
        samples: Sequence[RegionSample],
        masks: Sequence[Mask],
        edit: Callable[[Tensor, Tensor, slice], Tensor],
    ) -> FloatArray:
        """Edit images batch by batch. Return the log odds (N,) of the edited images."""
        log_odds, size = [np.empty(0)], self.context.config.perturbed_batch_size
        for start in range(0, len(samples), size):
            part = slice(start, start + size)
            x = edit(_stack_inputs(samples[part]), torch.from_numpy(np.stack(masks[part])), part)
            logits, _ = compute_logits_and_mean_features(self.context, x)
            are_probabilities = self.predictions.outputs_are_probabilities
            values = compute_log_odds(self.context, logits, [self.finding], outputs_are_probabilities=are_probabilities)
            log_odds.append(values.numpy()[:, 0])
        return np.concatenate(log_odds)


def _stack_inputs(samples: Sequence[RegionSample]) -> Tensor:
    return torch.stack([sample.x for sample in samples])
