"""Maps first: what `camscope measure` and `camscope compare` do with images that have no maps yet."""

import contextlib
import glob
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from camscope.cli import base, options, progress
from camscope.cli.options import settings
from camscope.plurals import plural

if TYPE_CHECKING:
    from torch import nn

    from camscope.batch import Outcome, Run
    from camscope.batch.manifest import Manifest
    from camscope.explainers import Explainer

RUN = "run"  # the folder of the maps, in that of the values
TRIED = 8  # images, to find one that can be read


@dataclass(frozen=True)
class Wanted:
    """The maps of a command line: those of a run, or of images that `camscope batch` takes."""

    source: str
    model: str | None = None
    weights: str | None = None
    methods: str | None = None
    layers: str | None = None
    questions: "Sequence[int | str | None]" = (None,)
    preprocess: str | None = None
    root: str | None = None
    images: int | None = None
    seed: int = 0
    masks: str | None = None
    category: str | None = None
    metrics: "Sequence[str] | None" = None
    group: str | None = None
    device: str = "cpu"
    set_: Sequence[str] = ()
    overwrite: bool = False
    anywhere: bool = False
    fetch: bool = False
    scans: str | None = None

    def mapped(self, output: str) -> "tuple[Run, nn.Module | None, Outcome | None]":
        """The run, the model if metrics ask it, and what became of images, if maps are made: in a folder of `output`."""
        from camscope.batch import Run
        from camscope.errors import InputError
        from camscope.evaluation.map_metrics import columns

        if has_images(self.source):
            folder = Path(output) / RUN
            outcome, net, manifest = self._made(folder)
            return Run(folder, self.scans or manifest), net if self.asks else None, outcome
        if Path(self.source).is_file():
            raise InputError(
                f"{self.source}: it is a file, and no image; expected the folder of a run, or images: a file, a folder, a "
                "pattern in quotes, or a .csv or .parquet manifest"
            )
        run = Run(self.source, self.scans, fetch=self.fetch)
        self._expect_group(columns(run.dataset.schema).names)
        tell_not_fetched(run)
        given: dict[str, object] = {
            "--methods": self.methods,
            "--layers": self.layers,
            "--root": self.root,
            "--images": self.images,
        }
        given |= {"--target": self.questions[0], "--set": self.set_ or None}
        expect_none(
            given, f"{self.source} is a run, whose maps are made; for its images name them, as '{self.source}/*.png'"
        )
        return (
            run,
            None if self.model is None else base.loaded(self.model, self.weights, self.device),
            None,
        )

    @property
    def asks(self) -> bool:
        """Whether a metric that is named asks the model."""
        from camscope.evaluation.metric_evaluation import ASKING
        from camscope.metrics import METRICS

        return any(METRICS[name].needs in ASKING for name in self.metrics or ())

    def _made(self, folder: Path) -> "tuple[Outcome, nn.Module, Manifest]":
        """The run in `folder`, or the rest of it, the model and the images. What is wrong is told before the model is loaded."""
        from camscope.batch import manifest_of
        from camscope.evaluation.map_generation import expect_evidence, make_maps, some_of
        from camscope.evaluation.metric_evaluation import chosen

        kinds = base.methods_of(self.methods or "gradcam")
        named = None if self.layers is None else base.split(self.layers)
        options.expect_a_layer(kinds, named)
        given = settings(self.set_, kinds)
        keywords = {name: {**progress.silent(kind), **given[name]} for name, kind in kinds.items()}
        chosen(self.metrics, self.masks is not None, True)
        manifest = some_of(manifest_of(self.source, "" if self.anywhere else self.root), self.images, self.seed)
        self._expect_group(manifest.table.column_names)
        if self.masks is not None:
            expect_evidence(self.masks, manifest, base.split(self.category or ""), anywhere=self.anywhere)
        net = base.loaded(self.model or "phantom", self.weights, self.device)
        tools = options.explainers(kinds, net, named, self.preprocess, keywords)
        if self.methods == "all":
            tools = _suited(tools, manifest)
        with base.remarks(), progress.counting("maps") as told:
            outcome = make_maps(tools, manifest, folder, self.questions, overwrite=self.overwrite, told=told)
        return outcome, net, manifest

    def _expect_group(self, columns: "Sequence[str]") -> None:
        if self.group is not None and self.group not in columns:
            raise typer.BadParameter(
                f"no column {self.group!r}; there are {', '.join(columns)}", param_hint="'--group'"
            )


def _suited(tools: "list[Explainer]", manifest: "Manifest") -> "list[Explainer]":
    """Those that have an answer for the first image that can be read; else all of them, and the run says what is wrong."""
    from camscope.errors import ImageError, InputError
    from camscope.explainers.comparison.best_effort import explain_suited

    for row in manifest.rows(0, TRIED):
        with (
            contextlib.suppress(ImageError, InputError),
            base.remarks(),
            base.working("looking for methods that answer"),
        ):
            source = manifest.place(row["path"]) if manifest.images is None else manifest.images[row["row"]]
            return list(explain_suited(tools, source, [None])[0])
    return tools


def is_run(source: str) -> bool:
    """Whether maps are there already: a folder that `camscope batch` wrote."""
    return (Path(source) / "run.json").is_file()


def is_images(source: str) -> bool:
    """Whether images are meant, of which there may be many: a folder, a pattern, a manifest, or a dataset's name."""
    from camscope.batch.manifest import TABLES
    from camscope.batch.sources import LIBRARIES

    path = Path(source)
    if source.startswith(LIBRARIES) or path.is_dir():
        return not is_run(source)
    return path.suffix.lower() in TABLES or (not path.exists() and glob.has_magic(source))


def has_images(source: str) -> bool:
    """Whether images are meant, of which there may be only one: a file that a reader takes."""
    from camscope.images.files.source_files import MEDICAL, PICTURES
    from camscope.images.scans.scan_reader import is_scan

    file = Path(source)
    return is_images(source) or (
        file.is_file() and (file.name.lower().endswith((*PICTURES, *MEDICAL)) or is_scan(file))
    )


def tell_not_fetched(run: "Run") -> None:
    """A note where images of a run are not on this machine, and nobody asked to fetch them."""
    if count := run.not_fetched:
        base.note(
            f"{plural(count, 'image of the run is', 'images of the run are')} not on this machine, not fetched; "
            "to fetch them pass --fetch"
        )


def expect_none(given: Mapping[str, object], why: str) -> None:
    """typer.BadParameter for the first option that was given, and has no meaning here."""
    for option, value in given.items():
        if value not in (None, False):
            raise typer.BadParameter(why, param_hint=f"'{option}'")


@contextlib.contextmanager
def resumable(folder: "str | Path") -> Iterator[None]:
    """Where it is interrupted, it is said what is kept and how to go on."""
    try:
        yield
    except KeyboardInterrupt as error:
        error.add_note(f"what is done is in {folder}: start the same command again, and it goes on")
        raise


def tell_failures(outcome: "Outcome | None") -> None:
    """Why images have no map, on stderr; exit code 1 where there are any."""
    if outcome is not None and outcome.failures:
        for reason, count in outcome.reasons.most_common(20):
            base.note(f"{plural(count, 'image')} without a map: {reason}")
        raise typer.Exit(base.FAILED)
