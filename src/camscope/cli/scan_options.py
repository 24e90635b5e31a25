"""Scans on the command line: what is meant, what it is called where others may see it, and what viewers open."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from camscope.cli import base
from camscope.errors import CamscopeError, CategoryError, ImageError
from camscope.images.files.source_files import is_medical

if TYPE_CHECKING:
    from camscope.batch.runner import Profile
    from camscope.explainers import Explainer
    from camscope.explanation import Explanation

TAILS = {"nifti": "-map.nii.gz", "pmap": "-pmap.dcm", "sc": "-sc.dcm"}
MASKED = "mask"

WindowOption = Annotated[
    str | None,
    typer.Option("--window", metavar="CENTRE,WIDTH", help="Of scans, what is black and white: 40,400 (soft tissue)."),
]
AllowPixelsOption = Annotated[
    bool, typer.Option("--allow-pixels", help="Draw on scans although text, as a name, may be part of their picture.")
]
ProfileOption = Annotated[
    str | None,
    typer.Option(
        "--profile", metavar="NAME", help="research (default for scans): no name of a file or a patient; or clinical."
    ),
]
ScansOption = Annotated[
    str | None,
    typer.Option(
        "--scans",
        metavar="SOURCE",
        help="What the run was made of: its images are read from there. Runs of scans do not say so.",
    ),
]


@dataclass(frozen=True)
class Scans:
    """How scans are read and written. `series`: a folder is one; `axis`: volumes are asked about slice by slice along it;
    `every`: all images are kept as private as scans are, for there are scans among them, or the profile says so;
    `opens`: the preprocessing opens files itself, as MONAI's transforms do.
    """

    series: bool = False
    window: str | None = None
    allow_pixels: bool = False
    exports: Sequence[str] = ()
    profile: str = "research"
    axis: int | None = None
    every: bool = False
    opens: bool = False

    def __post_init__(self) -> None:
        if unknown := [one for one in self.exports if one not in TAILS]:
            raise typer.BadParameter(f"{unknown[0]!r}; expected {', '.join(TAILS)}", param_hint="'--export'")
        checked(self.profile)
        if self.profile != "clinical" and {"pmap", "sc"} & set(self.exports):
            raise typer.BadParameter(
                "DICOM objects carry the patient's name and study, as an archive needs them: pass --profile clinical",
                param_hint="'--export'",
            )

    def expect_packages(self) -> None:
        """MissingExtraError where one of what is exported is not there, before anything is drawn."""
        if self.exports:
            from camscope.medical.export import expect_packages

            for kind in self.exports:
                expect_packages(kind)

    def meant(self, path: Path) -> bool:
        """Whether a path is read as a scan."""
        from camscope.images.scans.scan_reader import is_scan

        return (self.series and path.is_dir()) or is_medical(path.name) or is_scan(path)

    def read(self, path: Path) -> Any:
        """A scan, through the window; of a photograph its path."""
        if not self.meant(path):
            for given, said in (
                (self.window, "--window is for DICOM, NIfTI and their kin"),
                (self.axis, "--slices is for volumes"),
            ):
                if given is not None:
                    raise ImageError(f"{path} is no scan: {said}")
            return path
        if self.opens:
            if self.window is not None:
                raise ImageError(
                    "--window: the model's preprocessing is MONAI's, which opens files itself: set it there"
                )
            return path
        from camscope.images.scans.scan_reader import read_scan

        scan = read_scan(path, window=self.window)
        return replace(scan, burned_in=False) if self.allow_pixels else scan

    def private(self, path: Path) -> bool:
        """Whether a path may be shown nowhere."""
        return self.profile != "clinical" and (self.every or self.meant(path))

    def called(self, path: Path) -> str | None:
        """What a scan is called, `scan-1f0a92bc`; None where a path may be shown as it is."""
        from camscope.images.files.redaction import scan_name

        return scan_name(path) if self.private(path) else None

    def shown(self, path: Path) -> str:
        """A path as it may be shown."""
        return self.called(path) or base.shown(path)

    def among(self, paths: Sequence[Path], *, every: bool) -> "Scans":
        """The same for these images: all are private where one is a scan."""
        return replace(self, every=every or any(map(self.meant, paths)))

    def through(self, tools: "Sequence[Explainer]") -> "Scans":
        """The same for explainers: what enters a model as a scan is one."""
        from camscope.explainers.core.inputs import takes_scans
        from camscope.images.scans.monai import MonaiTransforms

        ways = [tool.preprocess for tool in tools]
        opens = any(isinstance(way, MonaiTransforms) for way in ways)
        return replace(self, every=self.every or any(map(takes_scans, ways)), opens=opens)

    def discreet(self, one: "Explanation", path: Path) -> "Explanation":
        """An explanation of a scan without a name of a file."""
        from camscope.explainers.core.maps import discreet

        called = self.called(path)
        return one if called is None else replace(one, name=called, parameters=discreet(one.parameters))

    def hush(self, error: Exception, path: Path) -> None:
        """Leave out of an error that goes on what `said` does."""
        if self.private(path) and (words := self.said(error, path)) != str(error):
            error.args = (words,)

    def said(self, error: Exception, path: Path) -> str:
        """What an error says, where it may name a patient without the words of others, and without the path."""
        called = self.called(path)
        if called is None:
            return base.reason(error)
        from camscope.images.files.redaction import unquoted

        if isinstance(error, OSError) and error.strerror:
            return f"{type(error).__name__}: {error.strerror}"
        kind = "" if isinstance(error, CamscopeError) else f"{type(error).__name__}: "
        words = re.sub(rf"(?<!\w){re.escape(path.name)}(?!\w)", called, unquoted(error).replace(str(path), called))
        return kind + base.in_options(base.shown(words))[: base.LONGEST]

    def files(self, stem: Path, tails: Sequence[str]) -> list[tuple[Path, ...]]:
        """What is exported of each map."""
        return [tuple(stem.with_name(stem.name + tail + TAILS[kind]) for kind in self.exports) for tail in tails]

    def write(self, one: "Explanation", paths: Sequence[Path], source: Path, *, overwrite: bool) -> list[Path]:
        """The exports of a map; the pictures of a volume's slices are a folder, which is not called .dcm."""
        from camscope.medical import export

        like, written = source if self.meant(source) else None, []
        for kind, path in zip(self.exports, paths, strict=True):
            if kind == "sc" and one.heat.ndim == 3:
                path = path.with_suffix("")
            path.parent.mkdir(parents=True, exist_ok=True)
            written.append(export(one, path, kind, source=like, profile=self.profile, overwrite=overwrite))
        return written


def checked(profile: str | None) -> "Profile | None":
    """A profile's name; typer.BadParameter for another word."""
    match profile:
        case None | "research" | "clinical":
            return profile
    raise typer.BadParameter(f"{profile!r}; expected research or clinical", param_hint="'--profile'")


def masks_of(given: Sequence[str], shape: tuple[int, ...]) -> "dict[str, Any]":
    """`lungs=FILE`, FILE, or `left=FILE:2` for the label 2: masks by name, images or scans of the image's own size.

    CategoryError for a mask of several labels of which none is named.
    """
    from camscope.images.files.redaction import unquoted
    from camscope.images.mask_files import read_labels
    from camscope.mask_labels import LabelChoice, listed

    found = {}
    for one in given:
        name, equals, place = one.rpartition("=")
        file, categories = _labeled(place)
        path, called = Path(file), f"mask {name}" if name else MASKED
        try:
            labels = read_labels(path, is_volume=len(shape) == 3)
        except ImageError as error:
            raise ImageError(f"the {called}: {unquoted(error).removeprefix(f'{path}: ')}") from None
        if not categories and len(names := labels.names()) > 1:
            raise CategoryError(
                f"the {called} holds {listed(names)} and no label was chosen; choose one with --mask NAME=FILE:{names[0]}, or "
                "FILE:all"
            )
        values = LabelChoice(categories).mask(labels)
        if values.shape != shape:
            sizes = (" x ".join(map(str, size)) for size in (values.shape, shape))
            raise ImageError("the {} is {} and the image {}; expected the same size".format(called, *sizes))
        found[name if equals else MASKED] = values
    return found


def _labeled(place: str) -> tuple[str, tuple[str, ...]]:
    """`FILE:1,2` -> FILE and the labels; a path that exists, or whose colon is a drive's, names no label."""
    file, colon, labels = place.rpartition(":")
    if not colon or len(file) < 2 or Path(place).exists() or "/" in labels or "\\" in labels:
        return place, ()
    return file, tuple(base.split(labels))
