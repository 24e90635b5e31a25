"""`EvaluationRequest`: open the run for `evaluate` or `compare`. If the user passes images, compute a run of these images."""

import contextlib
import glob
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import typer

from camscope.cli import (
    commands_and_error_reports,
    console_output,
    load_model_and_methods,
    option_parsing,
    progress_bars,
    shared_options,
)
from camscope.plurals import plural

if TYPE_CHECKING:
    from torch import nn

    from camscope.batch import BatchOutcome, BatchRun, Query
    from camscope.batch.image_manifest import Manifest
    from camscope.explainers import Explainer

RUN_FOLDER = "run"  # subfolder of the maps in the output folder
IMAGE_PARAMETERS = (
    "class_names",
    "method_names",
    "layer_names",
    "root",
    "n_images",
    "target",
    "targets",
    "setting_pairs",
)
MISSING_SCANS = (
    "the run of scans does not name its files; pass --scans with the files or the manifest that it was made from"
)
MAX_IMAGES_TRIED = 8  # when searching for a readable image


class OpenedRun(NamedTuple):
    """A run to evaluate. It comes with the model for metrics that need a model, and with the outcome of a new run."""

    run: "BatchRun"
    model: "nn.Module | None"
    outcome: "BatchOutcome | None"


class GeneratedRun(NamedTuple):
    """The outcome of a computed run, its model, and the manifest of its images."""

    outcome: "BatchOutcome"
    model: "nn.Module"
    manifest: "Manifest"


@dataclass(frozen=True)
class EvaluationRequest:
    """The options that `camscope evaluate` and `camscope compare` share. Fields have the names of command parameters."""

    source: str
    model: str | None = None
    weights: str | None = None
    trust_code: bool = False
    class_names: str | None = None
    method_names: str | None = None
    layer_names: str | None = None
    target: str | None = None
    targets: str | None = None
    preprocess: str | None = None
    root: str | None = None
    n_images: int | None = None
    seed: int = 0
    masks: str | None = None
    categories: str | None = None
    metrics: str | None = None
    group: str | None = None
    device: str = "cpu"
    setting_pairs: Sequence[str] | None = None
    overwrite: bool = False
    allow_outside_root: bool = False
    fetch: bool = False
    image_source: str | None = None

    @classmethod
    def from_context(cls, context: typer.Context) -> "EvaluationRequest":
        """Read the options from the context of the running command."""
        names = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in context.params.items() if name in names})

    def open_or_generate_run(self, context: typer.Context, output: str | Path) -> "OpenedRun":
        """Open the run that the user named. If the user named images, compute a run of them.

        The model of an existing run is loaded only if the user named it.
        """
        from camscope.batch import BatchRun
        from camscope.errors import InputError
        from camscope.evaluation.evaluate_model_free_metrics import build_value_schema

        if is_image_or_collection(self.source):
            folder = Path(output) / RUN_FOLDER
            outcome, net, manifest = self._generate_run(context, folder)
            run = BatchRun(folder, self.image_source or manifest)
            return OpenedRun(run, net if self.needs_model else None, outcome)
        if Path(self.source).is_file():
            raise InputError(
                f"{self.source} is a file, but not an image; expected the folder of a run, an image, a folder, a "
                "pattern in quotes, or a .csv or .parquet manifest"
            )
        scans = self.image_source
        source = scans and open_image_source(scans, self.root, allow_outside_root=self.allow_outside_root)
        run = BatchRun(self.source, source, fetch=self.fetch)
        self._check_group_column(build_value_schema(run.dataset.schema).names)
        print_missing_images_note(run)
        if self.root is not None and scans is None:
            remedy = "pass --scans with its files too" if run.is_pseudonymized else "leave --root out"
            has_paths = "does not name its files" if run.is_pseudonymized else "has the paths of its images"
            raise shared_options.build_option_error("--root", f"{self.source} is a run, which {has_paths}; {remedy}")
        reason = f"{self.source} is a run with computed maps; to explain images, name them, such as 'images/*.png'"
        parameters = [name for name in IMAGE_PARAMETERS if scans is None or name != "root"]
        shared_options.check_options_unset(context, parameters, reason)
        if self.model is None:
            return OpenedRun(run, None, None)
        net = load_model_and_methods.load_model_on_device(
            self.model, self.weights, self.device, trust_code=self.trust_code
        )
        return OpenedRun(run, net, None)

    @property
    def metric_names(self) -> list[str] | None:
        """The names of the requested metrics. The value is `None` if the user requests the default metrics."""
        return None if self.metrics is None else shared_options.split_list(self.metrics)

    @property
    def ground_truth_categories(self) -> list[str]:
        """The mask categories that the user chose as ground truth."""
        return shared_options.split_list(self.categories or "")

    @property
    def needs_model(self) -> bool:
        """Whether at least one requested metric needs the model."""
        from camscope.evaluation.evaluate_run import MODEL_INPUT_KINDS
        from camscope.metrics import METRICS

        return any(METRICS[name].input_kind in MODEL_INPUT_KINDS for name in self.metric_names or ())

    def _generate_run(self, context: typer.Context, folder: Path) -> "GeneratedRun":
        """Check all options, and compute the maps of the images into `folder`. An interrupted computation is resumed."""
        from camscope.batch import build_manifest
        from camscope.evaluation.evaluate_run import select_metrics
        from camscope.evaluation.map_generation import generate_maps, load_and_check_ground_truth, sample_manifest

        names, targets = self.method_names or "gradcam", option_parsing.parse_targets(self.target, self.targets)
        chosen = option_parsing.ExplainerOptions.parse(context, names, self.layer_names, self.setting_pairs)
        select_metrics(self.metric_names, self.masks is not None, True)
        all_images = build_manifest(self.source, self.root, anywhere=self.allow_outside_root)
        manifest = sample_manifest(all_images, self.n_images, self.seed)
        self._check_group_column(manifest.table.column_names)
        if self.masks is not None:
            load_and_check_ground_truth(
                self.masks, manifest, self.ground_truth_categories, allow_outside_root=self.allow_outside_root
            )
        parsed_names = option_parsing.parse_class_names(self.class_names)
        net = load_model_and_methods.load_model_on_device(
            self.model or "phantom", self.weights, self.device, context, parsed_names, trust_code=self.trust_code
        )
        explainers = chosen.build_explainers(net, self.preprocess, show_method_bars=False)
        if self.method_names == "all":
            explainers = _select_supporting_explainers(explainers, manifest)
        with console_output.collect_warnings(), progress_bars.show_batch_progress("maps") as on_progress:
            outcome = generate_maps(
                explainers, manifest, folder, targets, overwrite=self.overwrite, on_progress=on_progress
            )
        return GeneratedRun(outcome, net, manifest)

    def _check_group_column(self, columns: "Sequence[str]") -> None:
        if self.group is not None and self.group not in columns:
            raise shared_options.build_option_error(
                "--group", f"there is no column {self.group!r}; choose from {', '.join(columns)}"
            )


def _select_supporting_explainers(explainers: "list[Explainer]", manifest: "Manifest") -> "list[Explainer]":
    """Select the explainers that can explain the first readable image. If no image is readable, select all explainers."""
    from camscope.errors import ImageError, InputError
    from camscope.explainers.comparison.explain_by_supported_methods import explain_supported

    for row in manifest.rows(0, MAX_IMAGES_TRIED):
        with (
            contextlib.suppress(ImageError, InputError),
            console_output.collect_warnings(),
            console_output.spinner("checking which methods support the model"),
        ):
            source = (
                manifest.path_resolver.resolve(row["path"]) if manifest.images is None else manifest.images[row["row"]]
            )
            return list(explain_supported(explainers, source, [None])[0])
    return explainers


def is_run_folder(source: str) -> bool:
    """Return whether the source is the folder of a run, as `camscope batch` writes it."""
    return (Path(source) / "run.json").is_file()


def is_image_collection(source: str) -> bool:
    """Return whether the source is a folder of images, a glob pattern, a manifest or a dataset."""
    from camscope.batch.build_manifest_from_source import DATASET_PREFIXES, TABLE_SUFFIXES

    path = Path(source)
    if source.startswith(DATASET_PREFIXES) or path.is_dir():
        return not is_run_folder(source)
    return path.suffix.lower() in TABLE_SUFFIXES or (not path.exists() and glob.has_magic(source))


def is_image_or_collection(source: str) -> bool:
    """Return whether the source is one image file or a collection of images."""
    from camscope.images.files.find_and_open_image_files import PHOTO_SUFFIXES, SCAN_SUFFIXES
    from camscope.images.scans.scan_reader import is_scan

    file = Path(source)
    return is_image_collection(source) or (
        file.is_file() and (file.name.lower().endswith((*PHOTO_SUFFIXES, *SCAN_SUFFIXES)) or is_scan(file))
    )


def count_matching_rows_or_exit(run: "BatchRun", query: "Query") -> int:
    """Count the rows of a run that match a query. If no row matches, print an error and exit with code 1."""
    if not (n_rows := query.count_matching(run.dataset)):
        commands_and_error_reports.report_error(
            "InputError",
            f"none of {plural(len(run), 'row', spec=',')} matches the condition: {query.where}",
            commands_and_error_reports.EXIT_FAILED,
        )
        raise typer.Exit(commands_and_error_reports.EXIT_FAILED)
    return n_rows


def open_image_source(source: str | None, root: str | None, *, allow_outside_root: bool) -> "Manifest | None":
    """Return the manifest of `--scans`, whose paths start in `--root`. Return None if the user does not pass `--scans`."""
    from camscope.batch import build_manifest

    if source is None:
        if root is not None or allow_outside_root:
            raise shared_options.build_option_error(
                "--root" if root is not None else "--anywhere", "it belongs to --scans SOURCE"
            )
        return None
    return build_manifest(source, root, anywhere=allow_outside_root)


def print_missing_images_note(run: "BatchRun") -> None:
    """Print a note if images of a run are not on this machine. The note suggests `--fetch`, which downloads them."""
    if count := run.n_unfetched_images:
        images = plural(count, "image of the run is", "images of the run are")
        console_output.print_note(f"{images} not on this machine, not fetched; to fetch them pass --fetch")


@contextlib.contextmanager
def add_resume_hint_on_interrupt(folder: "str | Path") -> Iterator[None]:
    """If the user interrupts the `with` block, add a hint to the error: the folder of the finished work, and how to resume."""
    try:
        yield
    except KeyboardInterrupt as error:
        error.add_note(f"finished work is in {folder}: run the same command again to resume")
        raise


def exit_if_images_failed(outcome: "BatchOutcome | None") -> None:
    """If some images have no map, print the reasons on stderr and exit with code 1."""
    if outcome is not None and outcome.n_failures:
        for reason, count in outcome.failure_counts.most_common(20):
            console_output.print_note(f"{plural(count, 'image')} without a map: {reason}")
        raise typer.Exit(commands_and_error_reports.EXIT_FAILED)
