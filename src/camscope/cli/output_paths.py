"""Which images are meant, and the files that are written of them."""

import hashlib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import typer

from camscope.errors import ImageError, OutputError
from camscope.images.files import source_files
from camscope.images.files.source_files import split_selector
from camscope.safe_files import build_output_path, slug

RASTER_FORMATS, MAP_FILE_FORMATS = ("png", "jpg", "jpeg", "webp"), ("npz", "json", "gif")
OUTPUT_FORMATS = (*RASTER_FORMATS, *MAP_FILE_FORMATS)


def list_images(sources: Sequence[str], *, folders_are_series: bool = False) -> list[Path]:
    """The files that are meant, each once: files as named, the images of a folder, those that a pattern matches.

    `folders_are_series`: a folder is one image, a volume.
    """
    found: dict[Path, None] = {}
    for one in sources:
        if folders_are_series and Path(one).is_dir():
            found[Path(one)] = None
            continue
        meant = sorted(map(Path, source_files.list_image_paths(one, recursive=False)))
        if not meant:
            raise typer.BadParameter(_format_no_image(one), param_hint="'IMAGE'")
        found.update(dict.fromkeys(meant))
    return list(found)


def _format_no_image(source: str) -> str:
    """Why it means no image; a folder of scans is not named, for it may be called after a patient."""
    from camscope.images.files.redaction import pseudonymize_source
    from camscope.images.scans.scan_reader import is_scan

    if Path(source).is_dir() and is_scan(source):
        return f"{pseudonymize_source(source)} is a folder of DICOM files without a suffix; for one volume of them pass --series"
    return f"no image {'in the folder' if Path(source).is_dir() else 'for the pattern'} {source}"


def build_file_stem(row: int, image: Path, pseudonym: str | None = None) -> str:
    """`0003-1f0a92bc-cat`: row number, hash of the file's content, slug of its name; of a scan `0003-scan-1f0a92bc`."""
    if pseudonym is not None:
        return f"{row:04d}-{slug(pseudonym)}"
    if image.is_file():
        with image.open("rb") as file:
            mark = hashlib.file_digest(file, "sha256").hexdigest()
    else:
        mark = hashlib.sha256(os.fsencode(image)).hexdigest()
    return f"{row:04d}-{mark[:8]}-{slug(image.stem)}"


@dataclass(frozen=True)
class OutputFiles:
    """What is written of one image: pictures of all its maps together, and raw files, a tuple for each map."""

    figures: tuple[Path, ...]
    map_files: tuple[tuple[Path, ...], ...]

    @property
    def all_files(self) -> tuple[Path, ...]:
        """Every file."""
        return sum(self.map_files, self.figures)


@dataclass(frozen=True)
class Destination:
    """Where files go: into a folder under names of their own, or one of them to exactly `file`."""

    folder: Path
    formats: tuple[str, ...]
    overwrite: bool = False
    file: Path | None = None

    @classmethod
    def from_options(cls, output: str, formats: str | None, overwrite: bool) -> "Destination":
        """What `-o` and `--format` say; typer.BadParameter where they make no sense."""
        path = Path(output)
        if path.suffix.lower()[1:] in OUTPUT_FORMATS and not path.is_dir() and not output.endswith(("/", os.sep)):
            if formats is not None:
                raise typer.BadParameter(f"-o {output} says the format already", param_hint="'--format'")
            check_is_folder(path.parent)
            return cls(path.parent, (path.suffix.lower()[1:],), overwrite, path)
        if formats is None and re.fullmatch(r"\.[A-Za-z]\w{1,4}", path.suffix) and not path.exists():
            expected = f"expected a folder, or a file of {', '.join(OUTPUT_FORMATS)}"
            raise typer.BadParameter(f"cannot write {path.suffix}: {expected}", param_hint="'--output'")
        check_is_folder(path)
        chosen = tuple(dict.fromkeys((formats or "png").replace(",", " ").lower().split()))
        if not chosen or (unknown := [one for one in chosen if one not in OUTPUT_FORMATS]):
            came = ", ".join(unknown) if chosen else "nothing"
            raise typer.BadParameter(f"{came}; expected some of {', '.join(OUTPUT_FORMATS)}", param_hint="'--format'")
        return cls(path, chosen, overwrite)

    def output_stem(self, row: int, image: Path, pseudonym: str | None = None) -> Path:
        """What the names of an image's files begin with. `pseudonym`: what it is called, where its own name is not written."""
        return (
            self.file.with_suffix("")
            if self.file
            else build_output_path(self.folder, build_file_stem(row, image, pseudonym))
        )

    def output_files(
        self, row: int, image: Path, map_names: Sequence[str], pseudonym: str | None = None
    ) -> OutputFiles:
        """The files of one image, none of which is in the way; `map_names`: a name for each of its maps; `pseudonym`: see `stem`."""
        stem = self.output_stem(row, image, pseudonym)
        name = self.file.suffix if self.file else None
        pictures = tuple(_append_suffix(stem, name or f".{kind}") for kind in self.formats if kind in RASTER_FORMATS)
        tails = [""] if len(map_names) == 1 else [f"-{one}" for one in map_names]
        raw = tuple(
            tuple(_append_suffix(stem, tail + (name or f".{k}")) for k in self.formats if k in MAP_FILE_FORMATS)
            for tail in tails
        )
        files = OutputFiles(pictures, raw)
        for path in files.all_files:
            check_free(path, self.overwrite, image)
        return files


class OutputExistsError(OutputError):
    """A file that would be replaced, and was not asked to be."""

    def __init__(self, path: Path, option: str = "-o") -> None:
        super().__init__(f"{path} exists; pass --overwrite, or another {option}")
        self.path = path


def check_free(path: Path, overwrite: bool, image: Path | None = None, option: str = "-o") -> None:
    """Raise ExistsError if writing to `path` would replace a file; OutputError if the image itself, even with `overwrite`.

    `option`: by which the file is named.
    """
    if image is not None and path.exists() and image.exists() and path.samefile(image):
        raise OutputError(f"{path} is the image itself; pass another -o")
    if os.path.lexists(path) and not overwrite:
        raise OutputExistsError(path, option)


def check_image_exists(image: Path, pseudonym: str | None = None) -> None:
    """Raise ImageError if there is no such file, before anything slow begins; `pseudonym`: how the error calls it."""
    if not split_selector(image)[0].exists():
        raise ImageError(f"{image if pseudonym is None else pseudonym}: there is no such file")


def resolve_figure_path(
    output: str | None, folder: str, image: Path, suffix: str, overwrite: bool, pseudonym: str | None = None
) -> Path:
    """Where the one picture made of an image goes, which must be free: `output`, or a name of its own in the folder.

    `pseudonym`: what the image is called, where its own name is not written.
    """
    file = (
        build_output_path(folder, f"{build_file_stem(1, image, pseudonym)}{suffix}.png")
        if output is None
        else Path(output)
    )
    if file.suffix.lower()[1:] not in RASTER_FORMATS:
        raise typer.BadParameter(f"{file}; expected a file of {', '.join(RASTER_FORMATS)}", param_hint="'--output'")
    check_is_folder(file.parent)
    check_free(file, overwrite, image)
    return file


def check_is_folder(path: Path, option: str = "--output") -> None:
    """typer.BadParameter where a file has its name, or that of a folder that it is in."""
    for one in (path, *path.parents):
        if one.exists() and not one.is_dir():
            raise typer.BadParameter(f"{one} is a file, not a folder", param_hint=f"'{option}'")


def _append_suffix(stem: Path, suffix: str) -> Path:
    return stem.with_name(stem.name + suffix)
