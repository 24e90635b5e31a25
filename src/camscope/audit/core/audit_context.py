"""The context of an audit: the model, its explainers and the images as model inputs."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from camscope.audit.core.cohort import Cohort, Finding
from camscope.audit.core.config import Config, SampleSizes
from camscope.audit.core.config_faults import FaultCollector
from camscope.batch import BatchRun
from camscope.batch.batch_worker import BatchWorker
from camscope.batch.image_loading import LoadedImage, load_images
from camscope.errors import InputError, TargetError
from camscope.evaluation.ground_truth import GroundTruth
from camscope.explainers import METHODS, Explainer
from camscope.explainers.core.evaluation_context import get_device_and_dtype
from camscope.loaded_model_metadata_and_weight_digest import get_loaded_model_metadata
from camscope.models import load_model
from camscope.plurals import plural
from camscope.targets.class_targets import resolve_class_index

if TYPE_CHECKING:
    from camscope.audit.core.stage_result_schema import PathSteps, PlannedSize

ProgressCallback = Callable[[int, int], None]  # number of items done, total number
NUM_READ_THREADS = 4
MAX_TRIAL_IMAGES = 32  # images tried to find one that can be explained


class MapSeconds(NamedTuple):
    """The seconds of a map with the configured steps, and with the steps of stages that compare ranks."""

    configured: float
    reduced: float


class RankExplainers(NamedTuple):
    """The explainers of stages that compare ranks, and the step counts of explainers that integrate along a path.

    Attributes:
        explainers: Those of the context, in the same order. Some take fewer steps.
        path_steps: The steps of those that take fewer than configured.
        seconds_by_method: Display name -> the seconds of a map, of the methods whose steps were compared.

    """

    explainers: list[Explainer]
    path_steps: "tuple[PathSteps, ...]"
    seconds_by_method: dict[str, MapSeconds]


@dataclass(eq=False)
class AuditContext:
    """The model, the explainers and the cohort of an audit, loaded when they are first used.

    A running stage calls `on_progress` with the number of items done and their total.
    """

    config: Config
    folder: Path
    on_progress: ProgressCallback = field(default=lambda done, total: None)
    faults: FaultCollector = field(default_factory=FaultCollector)  # of the config
    rank_explainers: RankExplainers | None = None  # see `reduce_integration_steps`
    planned_sizes: "tuple[PlannedSize, ...]" = ()  # fewer images than configured, which fit a budget of time

    @property
    def sample_sizes(self) -> SampleSizes:
        """The number of images that each stage samples, from the config. A time budget may reduce the numbers."""
        sizes: dict[str, int] = {planned.stage: planned.n_images for planned in self.planned_sizes}
        return self.config.sample_sizes.model_copy(update=sizes)

    @cached_property
    def cohort(self) -> Cohort:
        """The audited rows of the manifest."""
        return Cohort(self.config)

    @cached_property
    def model(self) -> nn.Module:
        """The model on its device, in eval mode."""
        config = self.config.model
        try:
            device = torch.device(config.device)
            torch.zeros(1, device=device, dtype=torch.float32).item()  # fails for devices without numbers, as "meta"
        except (RuntimeError, AssertionError, NotImplementedError) as error:
            raise InputError(f"model.device = {config.device!r}: {str(error).partition(chr(10))[0]}") from error
        return load_model(config.source, weights=config.weights).to(device)

    @cached_property
    def class_names(self) -> tuple[str, ...]:
        """The class names of the model. The tuple is empty if the model declares no class names."""
        model_metadata = get_loaded_model_metadata(self.model)
        return (model_metadata.class_names if model_metadata else None) or ()

    @cached_property
    def findings(self) -> tuple[Finding, ...]:
        """The classes that the audit examines."""
        names = self.config.explain.findings
        findings = tuple(map(self.resolve_finding, names))
        if len({finding.class_index for finding in findings}) < len(findings):
            raise InputError(f"findings {', '.join(names)}: two names mean the same class; list each class once")
        return findings

    def resolve_finding(self, name: str) -> Finding:
        """Return a finding by the name or the number of its class. Raise a TargetError if the model has no such class."""
        n_classes, class_names = len(self.class_names), self.class_names
        if name.isdecimal() and n_classes and int(name) >= n_classes:
            raise TargetError(f"class {int(name)} is out of range: the model has {plural(n_classes, 'class')}")
        if not name.isdecimal() and not n_classes:
            raise TargetError(f"the model has no class names; write the finding {name!r} as a class index")
        index = int(name) if name.isdecimal() else resolve_class_index(name, n_classes, class_names)
        return Finding(index, class_names[index] if name.isdecimal() and n_classes else name)

    @cached_property
    def explainers(self) -> list[Explainer]:
        """The explainers of the config. CAM methods use the configured layer or the model's default layer."""
        from camscope.explainers.comparison.grid_of_targets_and_methods import accepts_layer_choice

        config, explainers = self.config.explain, []
        for name in config.methods:
            method, settings = METHODS.find(name), dict(config.settings.get(name, {}))
            if config.layer is not None and accepts_layer_choice(method):
                settings = {"layer": config.layer} | settings
            try:
                explainers.append(method(self.model, preprocess=self.config.model.preprocess or None, **settings))
            except TypeError as error:
                raise InputError(
                    f"the settings of {name} in explain.settings.{name} are not accepted: {error}"
                ) from error
        return explainers

    @cached_property
    def worker(self) -> BatchWorker:
        """The worker that loads images as model inputs and computes their maps."""
        return BatchWorker(
            self.explainers,
            [finding.class_index for finding in self.findings],
            self.cohort.manifest_with_display_names,
            self.config.batch_size,
            window=self.config.data.window,
        )

    @cached_property
    def ground_truth(self) -> dict[str, GroundTruth]:
        """A dict from finding name to the masks, boxes or points of the finding. It lists only findings with annotations."""
        source, findings = self.config.data.ground_truth, self.findings
        if source is None:
            return {}
        if not isinstance(source, dict):
            if len(findings) > 1:
                value = repr(source) if isinstance(source, str) else "{ … }"
                raise InputError(
                    f"ground_truth = {value} is for one finding, but the audit has {len(findings)} findings; name the "
                    f"finding, as in ground_truth = {{ {findings[0].name} = {value} }}"
                )
            return {findings[0].name: self.cohort.open_ground_truth(source)}
        if unknown := set(source) - {name for f in findings for name in (f.name, str(f.class_index))}:
            raise InputError(
                f"ground_truth has {sorted(unknown)[0]!r}; expected one of {', '.join(f.name for f in findings)}"
            )
        sources = {f.name: source.get(f.name) or source.get(str(f.class_index)) for f in findings}
        return {name: self.cohort.open_ground_truth(value) for name, value in sources.items() if value is not None}

    @cached_property
    def first_maps(self) -> list[dict[str, Any]]:
        """The maps of the first image for which every method succeeds.
        If a method fails, raise an error before all images run.
        """
        reasons = []
        for image in self.load_images(self.cohort.rows[:MAX_TRIAL_IMAGES]):
            rows = [] if image.item is None else self.worker.compute_rows(self.worker.stack_model_inputs([image]))
            failed = [row["error"] for row in rows if row.get("attribution") is None] if rows else [image.error or ""]
            if not failed:
                return rows
            reasons.append(failed[0])
        raise InputError(f"no map could be computed for the first {plural(len(reasons), 'image')}: {reasons[0]}")

    @property
    def maps(self) -> BatchRun:
        """The maps that the stage "explain" has written."""
        return BatchRun(self.folder / "maps", self.cohort.manifest)

    def load_images(self, rows: Sequence[int] | None = None) -> Iterator[LoadedImage]:
        """Load the given rows as model inputs, or all rows by default. An unreadable image has an error instead of an input."""
        positions = (self.cohort.manifest_position_by_row[row] for row in (self.cohort.rows if rows is None else rows))
        manifest = self.cohort.manifest_with_display_names
        manifest_rows = (manifest.rows(position, position + 1)[0] for position in positions)
        return load_images(manifest, manifest_rows, self.worker.prepare_model_input, NUM_READ_THREADS)

    def iter_batches(self, rows: Sequence[int] | None = None) -> Iterator[list[LoadedImage]]:
        """Yield batches of consecutive images of equal size. An unreadable image forms its own batch."""
        batch: list[LoadedImage] = []
        for image in self.load_images(rows):
            shapes = {each.item.x.shape if each.item is not None else None for each in (*batch[:1], image)}
            is_full = len(batch) == self.worker.choose_batch_size(image)
            if batch and (is_full or len(shapes) > 1 or None in shapes):
                yield batch
                batch = []
            batch.append(image)
        if batch:
            yield batch

    def stack_on_device(self, batch: Sequence[LoadedImage]) -> Tensor:
        """Return the readable images of a batch as a tensor (N,C,*S) on the model's device."""
        x = torch.stack([image.item.x for image in batch if image.item is not None])
        return x.to(*get_device_and_dtype(self.model))
