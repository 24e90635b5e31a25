"""Input of `camscope evaluate` and `camscope compare`: an existing run, or images whose maps are computed first."""

import contextlib
import glob
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from camscope.cli import base, options, progress
from camscope.cli.options import parse_settings
from camscope.plurals import plural

if TYPE_CHECKING:
    from torch import nn

    from camscope.batch import BatchOutcome, BatchRun
    from camscope.batch.manifest import Manifest
    from camscope.explainers import Explainer

RUN_FOLDER = "run"  # subfolder of the maps in the output folder
MAX_IMAGES_TRIED = 8  # when searching for a readable image


@dataclass(frozen=True)
class EvaluationRequest:
    """Options of a command that evaluates maps: those of a run, or of images as for `camscope batch`."""

    source: str
    model: str | None = None
    weights: str | None = None
    methods: str | None = None
    layers: str | None = None
    targets: "Sequence[int | str | None]" = (None,)
    preprocess: str | None = None
    root: str | None = None
    n_images: int | None = None
    seed: int = 0
    masks: str | None = None
    categories: str | None = None
    metrics: "Sequence[str] | None" = None
    group: str | None = None
    device: str = "cpu"
    setting_pairs: Sequence[str] = ()
    overwrite: bool = False
    allow_outside_root: bool = False
    fetch: bool = False
    image_source: str | None = None

    def open_or_generate_run(self, output: str) -> "tuple[BatchRun, nn.Module | None, BatchOutcome | None]":
        """Open the run, or compute it below `output`.

        Returns the run, the model if a metric needs it, and the outcome of the computation, if there was one.
        """
        from camscope.batch import BatchRun
        from camscope.errors import InputError
        from camscope.evaluation.map_metrics import build_value_schema

        if has_images(self.source):
            folder = Path(output) / RUN_FOLDER
            outcome, net, manifest = self._generate_run(folder)
            return BatchRun(folder, self.image_source or manifest), net if self.needs_model else None, outcome
        if Path(self.source).is_file():
            raise InputError(
                f"{self.source} is a file, but not an image; expected the folder of a run, or images: a file, a folder, a "
                "pattern in quotes, or a .csv or .parquet manifest"
            )
        run = BatchRun(self.source, self.image_source, fetch=self.fetch)
        self._check_group_column(build_value_schema(run.dataset.schema).names)
        print_not_fetched_note(run)
        options_for_images: dict[str, object] = {
            "--methods": self.methods,
            "--layers": self.layers,
            "--root": self.root,
            "--images": self.n_images,
        }
        options_for_images |= {"--target": self.targets[0], "--set": self.setting_pairs or None}
        check_options_unset(
            options_for_images,
            f"{self.source} is a run with computed maps; to explain images, name them, such as 'images/*.png'",
        )
        return (
            run,
            None if self.model is None else base.load_model_on_device(self.model, self.weights, self.device),
            None,
        )

    @property
    def needs_model(self) -> bool:
        """Return whether a requested metric runs the model."""
        from camscope.evaluation.metric_evaluation import MODEL_INPUT_KINDS
        from camscope.metrics import METRICS

        return any(METRICS[name].input_kind in MODEL_INPUT_KINDS for name in self.metrics or ())

    def _generate_run(self, folder: Path) -> "tuple[BatchOutcome, nn.Module, Manifest]":
        """Compute or resume the run in `folder`; return its outcome, the model and the manifest.

        Options are checked before the model is loaded.
        """
        from camscope.batch import build_manifest
        from camscope.evaluation.map_generation import check_ground_truth, generate_maps, sample_manifest
        from camscope.evaluation.metric_evaluation import select_metrics

        explainer_classes = base.parse_methods(self.methods or "gradcam")
        layers = None if self.layers is None else base.split_list(self.layers)
        options.check_layers_usable(explainer_classes, layers)
        parsed_settings = parse_settings(self.setting_pairs, explainer_classes)
        settings_by_method = {
            name: {**progress.silent_method_settings(explainer_cls), **parsed_settings[name]}
            for name, explainer_cls in explainer_classes.items()
        }
        select_metrics(self.metrics, self.masks is not None, True)
        manifest = sample_manifest(
            build_manifest(self.source, "" if self.allow_outside_root else self.root), self.n_images, self.seed
        )
        self._check_group_column(manifest.table.column_names)
        if self.masks is not None:
            check_ground_truth(
                self.masks, manifest, base.split_list(self.categories or ""), allow_outside_root=self.allow_outside_root
            )
        net = base.load_model_on_device(self.model or "phantom", self.weights, self.device)
        explainers = options.build_explainers(explainer_classes, net, layers, self.preprocess, settings_by_method)
        if self.methods == "all":
            explainers = _select_answering_explainers(explainers, manifest)
        with base.collect_warnings(), progress.outcome_progress("maps") as on_progress:
            outcome = generate_maps(
                explainers, manifest, folder, self.targets, overwrite=self.overwrite, on_progress=on_progress
            )
        return outcome, net, manifest

    def _check_group_column(self, columns: "Sequence[str]") -> None:
        if self.group is not None and self.group not in columns:
            raise typer.BadParameter(
                f"no column {self.group!r}; choose from {', '.join(columns)}", param_hint="'--group'"
            )


def _select_answering_explainers(explainers: "list[Explainer]", manifest: "Manifest") -> "list[Explainer]":
    """Select the explainers that support the first readable image; return all of them if no image is readable."""
    from camscope.errors import ImageError, InputError
    from camscope.explainers.comparison.supported_methods import explain_supported

    for row in manifest.rows(0, MAX_IMAGES_TRIED):
        with (
            contextlib.suppress(ImageError, InputError),
            base.collect_warnings(),
            base.spinner("checking which methods support the model"),
        ):
            source = manifest.resolve_path(row["path"]) if manifest.images is None else manifest.images[row["row"]]
            return list(explain_supported(explainers, source, [None])[0])
    return explainers


def is_run(source: str) -> bool:
    """Return whether the source is a folder that `camscope batch` wrote."""
    return (Path(source) / "run.json").is_file()


def is_image_source(source: str) -> bool:
    """Return whether the source may name many images: a folder, a pattern, a manifest, or a dataset."""
    from camscope.batch.sources import DATASET_PREFIXES, TABLE_SUFFIXES

    path = Path(source)
    if source.startswith(DATASET_PREFIXES) or path.is_dir():
        return not is_run(source)
    return path.suffix.lower() in TABLE_SUFFIXES or (not path.exists() and glob.has_magic(source))


def has_images(source: str) -> bool:
    """Return whether the source names one or more images."""
    from camscope.images.files.source_files import PHOTO_SUFFIXES, SCAN_SUFFIXES
    from camscope.images.scans.scan_reader import is_scan

    file = Path(source)
    return is_image_source(source) or (
        file.is_file() and (file.name.lower().endswith((*PHOTO_SUFFIXES, *SCAN_SUFFIXES)) or is_scan(file))
    )


def print_not_fetched_note(run: "BatchRun") -> None:
    """Print a note if images of a run are missing on this machine and `--fetch` was not given."""
    if count := run.n_unfetched_images:
        base.print_note(
            f"{plural(count, 'image of the run is', 'images of the run are')} not on this machine, not fetched; "
            "to fetch them pass --fetch"
        )


def check_options_unset(options: Mapping[str, object], reason: str) -> None:
    """Raise typer.BadParameter with the reason for the first option that is set."""
    for option, value in options.items():
        if value not in (None, False):
            raise typer.BadParameter(reason, param_hint=f"'{option}'")


@contextlib.contextmanager
def resume_hint(folder: "str | Path") -> Iterator[None]:
    """Add a note on what is kept and how to resume to a KeyboardInterrupt raised inside the block."""
    try:
        yield
    except KeyboardInterrupt as error:
        error.add_note(f"finished work is in {folder}: run the same command again to resume")
        raise


def print_failures(outcome: "BatchOutcome | None") -> None:
    """Print why images have no map on stderr, and exit with code 1 if there are any."""
    if outcome is not None and outcome.n_failures:
        for reason, count in outcome.failure_counts.most_common(20):
            base.print_note(f"{plural(count, 'image')} without a map: {reason}")
        raise typer.Exit(base.EXIT_FAILED)
