"""Scans on the command line: what is meant, what it is called where others may see it, and what viewers open."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from camscope.cli import base
from camscope.errors import CamscopeError, CategoryError, ImageError
from camscope.images.files.source_files import is_scan_name

if TYPE_CHECKING:
    from camscope.batch.options import PrivacyProfile
    from camscope.explainers import Explainer
    from camscope.explanation import Explanation

EXPORT_SUFFIXES = {"nifti": "-map.nii.gz", "pmap": "-pmap.dcm", "sc": "-sc.dcm"}
DEFAULT_MASK_NAME = "mask"

WindowOption = Annotated[
    str | None,
    typer.Option(
        "--window",
        metavar="CENTRE,WIDTH",
        help="Scans: center and width of the display window, such as 40,400 (soft tissue).",
    ),
]
AllowBurnedInTextOption = Annotated[
    bool, typer.Option("--allow-pixels", help="Draw on scans although text in the image may identify a patient.")
]
ProfileOption = Annotated[
    str | None,
    typer.Option(
        "--profile",
        metavar="NAME",
        help="research (default for scans): output holds no file or patient names; clinical: it may.",
    ),
]
ImageSourceOption = Annotated[
    str | None,
    typer.Option(
        "--scans",
        metavar="SOURCE",
        help="Source of the images of a run of scans: the files or manifest it was made from.",
    ),
]


@dataclass(frozen=True)
class ScanOptions:
    """How scans are read and written. `folders_are_series`: a folder is one; `slice_axis`: volumes are asked about slice by slice along it;
    `all_private`: all images are kept as private as scans are, for there are scans among them, or the profile says so;
    `preprocess_opens_files`: the preprocessing opens files itself, as MONAI's transforms do.
    """

    folders_are_series: bool = False
    window: str | None = None
    allow_burned_in_text: bool = False
    export_formats: Sequence[str] = ()
    profile: str = "research"
    slice_axis: int | None = None
    all_private: bool = False
    preprocess_opens_files: bool = False

    def __post_init__(self) -> None:
        if unknown := [one for one in self.export_formats if one not in EXPORT_SUFFIXES]:
            raise typer.BadParameter(f"{unknown[0]!r}; expected {', '.join(EXPORT_SUFFIXES)}", param_hint="'--export'")
        parse_profile(self.profile)
        if self.profile != "clinical" and {"pmap", "sc"} & set(self.export_formats):
            raise typer.BadParameter(
                "DICOM objects carry the patient's name and study, as an archive needs them: pass --profile clinical",
                param_hint="'--export'",
            )

    def require_export_packages(self) -> None:
        """MissingExtraError where one of what is exported is not there, before anything is drawn."""
        if self.export_formats:
            from camscope.medical.export import require_packages

            for kind in self.export_formats:
                require_packages(kind)

    def is_read_as_scan(self, path: Path) -> bool:
        """Whether a path is read as a scan."""
        from camscope.images.scans.scan_reader import is_scan

        return (self.folders_are_series and path.is_dir()) or is_scan_name(path.name) or is_scan(path)

    def read_image(self, path: Path) -> Any:
        """A scan, through the window; of a photograph its path."""
        if not self.is_read_as_scan(path):
            for given, said in (
                (self.window, "--window is for DICOM, NIfTI and their kin"),
                (self.slice_axis, "--slices is for volumes"),
            ):
                if given is not None:
                    raise ImageError(f"{path} is no scan: {said}")
            return path
        if self.preprocess_opens_files:
            if self.window is not None:
                raise ImageError(
                    "--window: the model's preprocessing is MONAI's, which opens files itself: set it there"
                )
            return path
        from camscope.images.scans.scan_reader import read_scan

        scan = read_scan(path, window=self.window)
        return replace(scan, has_burned_in_text=False) if self.allow_burned_in_text else scan

    def is_private(self, path: Path) -> bool:
        """Whether a path may be shown nowhere."""
        return self.profile != "clinical" and (self.all_private or self.is_read_as_scan(path))

    def pseudonym(self, path: Path) -> str | None:
        """What a scan is called, `scan-1f0a92bc`; None where a path may be shown as it is."""
        from camscope.images.files.redaction import pseudonymize_source

        return pseudonymize_source(path) if self.is_private(path) else None

    def display_name(self, path: Path) -> str:
        """A path as it may be shown."""
        return self.pseudonym(path) or base.display_text(path)

    def for_images(self, paths: Sequence[Path], *, all_private: bool) -> "ScanOptions":
        """The same for these images: all are private where one is a scan."""
        return replace(self, all_private=all_private or any(map(self.is_read_as_scan, paths)))

    def for_explainers(self, explainers: "Sequence[Explainer]") -> "ScanOptions":
        """The same for explainers: what enters a model as a scan is one."""
        from camscope.explainers.core.inputs import accepts_scans
        from camscope.images.scans.monai import MonaiPreprocess

        ways = [tool.preprocess for tool in explainers]
        opens = any(isinstance(way, MonaiPreprocess) for way in ways)
        return replace(
            self, all_private=self.all_private or any(map(accepts_scans, ways)), preprocess_opens_files=opens
        )

    def redact_explanation(self, explanation: "Explanation", path: Path) -> "Explanation":
        """An explanation of a scan without a name of a file."""
        from camscope.explainers.core.maps import redact_parameters

        called = self.pseudonym(path)
        return (
            explanation
            if called is None
            else replace(explanation, name=called, parameters=redact_parameters(explanation.parameters))
        )

    def redact_error(self, error: Exception, path: Path) -> None:
        """Leave out of an error that goes on what `format_redacted_error` does."""
        if self.is_private(path) and (words := self.format_redacted_error(error, path)) != str(error):
            error.args = (words,)

    def format_redacted_error(self, error: Exception, path: Path) -> str:
        """What an error says, where it may name a patient without the words of others, and without the path."""
        called = self.pseudonym(path)
        if called is None:
            return base.format_error(error)
        from camscope.images.files.redaction import redact_error_message

        if isinstance(error, OSError) and error.strerror:
            return f"{type(error).__name__}: {error.strerror}"
        kind = "" if isinstance(error, CamscopeError) else f"{type(error).__name__}: "
        words = re.sub(
            rf"(?<!\w){re.escape(path.name)}(?!\w)", called, redact_error_message(error).replace(str(path), called)
        )
        words = base.word_remedy(error, words) if isinstance(error, CamscopeError) else words
        return kind + base.display_text(words)[: base.MAX_ERROR_LENGTH]

    def list_export_paths(self, stem: Path, suffixes: Sequence[str]) -> list[tuple[Path, ...]]:
        """What is exported of each map."""
        return [
            tuple(stem.with_name(stem.name + tail + EXPORT_SUFFIXES[kind]) for kind in self.export_formats)
            for tail in suffixes
        ]

    def export_map(
        self, explanation: "Explanation", paths: Sequence[Path], source: Path, *, overwrite: bool
    ) -> list[Path]:
        """The exports of a map; the pictures of a volume's slices are a folder, which is not called .dcm."""
        from camscope.medical import export

        like, written = source if self.is_read_as_scan(source) else None, []
        for kind, path in zip(self.export_formats, paths, strict=True):
            if kind == "sc" and explanation.attribution.ndim == 3:
                path = path.with_suffix("")
            path.parent.mkdir(parents=True, exist_ok=True)
            written.append(export(explanation, path, kind, source=like, profile=self.profile, overwrite=overwrite))
        return written


def parse_profile(profile: str | None) -> "PrivacyProfile | None":
    """A profile's name; typer.BadParameter for another word."""
    match profile:
        case None | "research" | "clinical":
            return profile
    raise typer.BadParameter(f"{profile!r}; expected research or clinical", param_hint="'--profile'")


def read_named_masks(mask_options: Sequence[str], shape: tuple[int, ...]) -> "dict[str, Any]":
    """`lungs=FILE`, FILE, or `residuals=FILE:2` for the label 2: masks by name, images or scans of the image's own size.

    CategoryError for a mask of several labels of which none is named.
    """
    from camscope.images.files.redaction import redact_error_message
    from camscope.images.mask_files import read_label_image
    from camscope.mask_labels import LabelChoice, format_name_list

    found = {}
    for one in mask_options:
        name, equals, place = one.rpartition("=")
        file, categories = _split_mask_labels(place)
        path, called = Path(file), f"mask {name}" if name else DEFAULT_MASK_NAME
        try:
            labels = read_label_image(path, is_volume=len(shape) == 3)
        except ImageError as error:
            raise ImageError(f"the {called}: {redact_error_message(error).removeprefix(f'{path}: ')}") from None
        if not categories and len(names := labels.label_names()) > 1:
            raise CategoryError(
                f"the {called} holds {format_name_list(names)} and no label was chosen; choose one with --mask NAME=FILE:{names[0]}, or "
                "FILE:all"
            )
        values = LabelChoice(categories).select_mask(labels)
        if values.shape != shape:
            sizes = (" x ".join(map(str, size)) for size in (values.shape, shape))
            raise ImageError("the {} is {} and the image {}; expected the same size".format(called, *sizes))
        found[name if equals else DEFAULT_MASK_NAME] = values
    return found


def _split_mask_labels(text: str) -> tuple[str, tuple[str, ...]]:
    """`PROVENANCE_FILE:1,2` -> FILE and the labels; a path that exists, or whose colon is a drive's, names no label."""
    file, colon, labels = text.rpartition(":")
    if not colon or len(file) < 2 or Path(text).exists() or "/" in labels or "\\" in labels:
        return text, ()
    return file, tuple(base.split_list(labels))
