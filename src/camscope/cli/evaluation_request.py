"""Maps first: what `camscope evaluate` and `camscope compare` do with images that have no maps yet."""

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

RUN_FOLDER = "run"  # the folder of the maps, in that of the values
MAX_IMAGES_TRIED = 8  # images, to find one that can be read


@dataclass(frozen=True)
class EvaluationRequest:
    """The maps of a command line: those of a run, or of images that `camscope batch` takes."""

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
        """The run, the model if metrics ask it, and what became of images, if maps are made: in a folder of `output`."""
        from camscope.batch import BatchRun
        from camscope.errors import InputError
        from camscope.evaluation.map_metrics import build_value_schema

        if has_images(self.source):
            folder = Path(output) / RUN_FOLDER
            outcome, net, manifest = self._generate_run(folder)
            return BatchRun(folder, self.image_source or manifest), net if self.needs_model else None, outcome
        if Path(self.source).is_file():
            raise InputError(
                f"{self.source}: it is a file, and no image; expected the folder of a run, or images: a file, a folder, a "
                "pattern in quotes, or a .csv or .parquet manifest"
            )
        run = BatchRun(self.source, self.image_source, fetch=self.fetch)
        self._check_group_column(build_value_schema(run.dataset.schema).names)
        print_not_fetched_note(run)
        given: dict[str, object] = {
            "--methods": self.methods,
            "--layers": self.layers,
            "--root": self.root,
            "--images": self.n_images,
        }
        given |= {"--target": self.targets[0], "--set": self.setting_pairs or None}
        check_options_unset(
            given, f"{self.source} is a run, whose maps are made; for its images name them, as '{self.source}/*.png'"
        )
        return (
            run,
            None if self.model is None else base.load_model_on_device(self.model, self.weights, self.device),
            None,
        )

    @property
    def needs_model(self) -> bool:
        """Whether a metric that is named asks the model."""
        from camscope.evaluation.metric_evaluation import MODEL_INPUT_KINDS
        from camscope.metrics import METRICS

        return any(METRICS[name].input_kind in MODEL_INPUT_KINDS for name in self.metrics or ())

    def _generate_run(self, folder: Path) -> "tuple[BatchOutcome, nn.Module, Manifest]":
        """The run in `folder`, or the rest of it, the model and the images. What is wrong is told before the model is loaded."""
        from camscope.batch import build_manifest
        from camscope.evaluation.map_generation import check_ground_truth, generate_maps, sample_manifest
        from camscope.evaluation.metric_evaluation import select_metrics

        kinds = base.parse_methods(self.methods or "gradcam")
        named = None if self.layers is None else base.split_list(self.layers)
        options.check_layers_usable(kinds, named)
        given = parse_settings(self.setting_pairs, kinds)
        keywords = {name: {**progress.silent_method_settings(kind), **given[name]} for name, kind in kinds.items()}
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
        tools = options.build_explainers(kinds, net, named, self.preprocess, keywords)
        if self.methods == "all":
            tools = _select_answering_explainers(tools, manifest)
        with base.collect_warnings(), progress.outcome_progress("maps") as told:
            outcome = generate_maps(tools, manifest, folder, self.targets, overwrite=self.overwrite, on_progress=told)
        return outcome, net, manifest

    def _check_group_column(self, columns: "Sequence[str]") -> None:
        if self.group is not None and self.group not in columns:
            raise typer.BadParameter(
                f"no column {self.group!r}; there are {', '.join(columns)}", param_hint="'--group'"
            )


def _select_answering_explainers(explainers: "list[Explainer]", manifest: "Manifest") -> "list[Explainer]":
    """Those that have an answer for the first image that can be read; else all of them, and the run says what is wrong."""
    from camscope.errors import ImageError, InputError
    from camscope.explainers.comparison.best_effort import explain_supported

    for row in manifest.rows(0, MAX_IMAGES_TRIED):
        with (
            contextlib.suppress(ImageError, InputError),
            base.collect_warnings(),
            base.spinner("looking for methods that answer"),
        ):
            source = manifest.resolve_path(row["path"]) if manifest.images is None else manifest.images[row["row"]]
            return list(explain_supported(explainers, source, [None])[0])
    return explainers


def is_run(source: str) -> bool:
    """Whether maps are there already: a folder that `camscope batch` wrote."""
    return (Path(source) / "run.json").is_file()


def is_image_source(source: str) -> bool:
    """Whether images are meant, of which there may be many: a folder, a pattern, a manifest, or a dataset's name."""
    from camscope.batch.sources import TABLE_SUFFIXES
    from camscope.batch.sources import DATASET_PREFIXES

    path = Path(source)
    if source.startswith(DATASET_PREFIXES) or path.is_dir():
        return not is_run(source)
    return path.suffix.lower() in TABLE_SUFFIXES or (not path.exists() and glob.has_magic(source))


def has_images(source: str) -> bool:
    """Whether images are meant, of which there may be only one: a file that a reader takes."""
    from camscope.images.files.source_files import PHOTO_SUFFIXES, SCAN_SUFFIXES
    from camscope.images.scans.scan_reader import is_scan

    file = Path(source)
    return is_image_source(source) or (
        file.is_file() and (file.name.lower().endswith((*PHOTO_SUFFIXES, *SCAN_SUFFIXES)) or is_scan(file))
    )


def print_not_fetched_note(run: "BatchRun") -> None:
    """A note where images of a run are not on this machine, and nobody asked to fetch them."""
    if count := run.n_unfetched_images:
        base.print_note(
            f"{plural(count, 'image of the run is', 'images of the run are')} not on this machine, not fetched; "
            "to fetch them pass --fetch"
        )


def check_options_unset(options: Mapping[str, object], reason: str) -> None:
    """typer.BadParameter for the first option that was given, and has no meaning here."""
    for option, value in options.items():
        if value not in (None, False):
            raise typer.BadParameter(reason, param_hint=f"'{option}'")


@contextlib.contextmanager
def resume_hint(folder: "str | Path") -> Iterator[None]:
    """Where it is interrupted, it is said what is kept and how to go on."""
    try:
        yield
    except KeyboardInterrupt as error:
        error.add_note(f"what is done is in {folder}: start the same command again, and it goes on")
        raise


def print_failures(outcome: "BatchOutcome | None") -> None:
    """Why images have no map, on stderr; exit code 1 where there are any."""
    if outcome is not None and outcome.n_failures:
        for reason, count in outcome.failure_counts.most_common(20):
            base.print_note(f"{plural(count, 'image')} without a map: {reason}")
        raise typer.Exit(base.EXIT_FAILED)
