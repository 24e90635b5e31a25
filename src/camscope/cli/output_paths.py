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
from camscope.images.files.source_files import selected
from camscope.safe_files import path_in, slug

PICTURES, RAW = ("png", "jpg", "jpeg", "webp"), ("npz", "json", "gif")
FORMATS = (*PICTURES, *RAW)


def images_of(given: Sequence[str], *, series: bool = False) -> list[Path]:
    """The files that are meant, each once: files as named, the images of a folder, those that a pattern matches.

    `series`: a folder is one image, a volume.
    """
    found: dict[Path, None] = {}
    for one in given:
        if series and Path(one).is_dir():
            found[Path(one)] = None
            continue
        meant = sorted(map(Path, source_files.images_of(one, deep=False)))
        if not meant:
            raise typer.BadParameter(_none_there(one), param_hint="'IMAGE'")
        found.update(dict.fromkeys(meant))
    return list(found)


def _none_there(given: str) -> str:
    """Why it means no image; a folder of scans is not named, for it may be called after a patient."""
    from camscope.images.files.redaction import scan_name
    from camscope.images.scans.scan_reader import is_scan

    if Path(given).is_dir() and is_scan(given):
        return f"{scan_name(given)} is a folder of DICOM files without a suffix; for one volume of them pass --series"
    return f"no image {'in the folder' if Path(given).is_dir() else 'for the pattern'} {given}"


def stem_of(row: int, image: Path, name: str | None = None) -> str:
    """`0003-1f0a92bc-cat`: row number, hash of the file's content, slug of its name; of a scan `0003-scan-1f0a92bc`."""
    if name is not None:
        return f"{row:04d}-{slug(name)}"
    if image.is_file():
        with image.open("rb") as file:
            mark = hashlib.file_digest(file, "sha256").hexdigest()
    else:
        mark = hashlib.sha256(os.fsencode(image)).hexdigest()
    return f"{row:04d}-{mark[:8]}-{slug(image.stem)}"


@dataclass(frozen=True)
class Files:
    """What is written of one image: pictures of all its maps together, and raw files, a tuple for each map."""

    pictures: tuple[Path, ...]
    raw: tuple[tuple[Path, ...], ...]

    @property
    def all(self) -> tuple[Path, ...]:
        """Every file."""
        return sum(self.raw, self.pictures)


@dataclass(frozen=True)
class Destination:
    """Where files go: into a folder under names of their own, or one of them to exactly `file`."""

    folder: Path
    formats: tuple[str, ...]
    overwrite: bool = False
    file: Path | None = None

    @classmethod
    def of(cls, given: str, formats: str | None, overwrite: bool) -> "Destination":
        """What `-o` and `--format` say; typer.BadParameter where they make no sense."""
        path = Path(given)
        if path.suffix.lower()[1:] in FORMATS and not path.is_dir() and not given.endswith(("/", os.sep)):
            if formats is not None:
                raise typer.BadParameter(f"-o {given} says the format already", param_hint="'--format'")
            expect_folder(path.parent)
            return cls(path.parent, (path.suffix.lower()[1:],), overwrite, path)
        if formats is None and re.fullmatch(r"\.[A-Za-z]\w{1,4}", path.suffix) and not path.exists():
            expected = f"expected a folder, or a file of {', '.join(FORMATS)}"
            raise typer.BadParameter(f"cannot write {path.suffix}: {expected}", param_hint="'--output'")
        expect_folder(path)
        chosen = tuple(dict.fromkeys((formats or "png").replace(",", " ").lower().split()))
        if not chosen or (unknown := [one for one in chosen if one not in FORMATS]):
            came = ", ".join(unknown) if chosen else "nothing"
            raise typer.BadParameter(f"{came}; expected some of {', '.join(FORMATS)}", param_hint="'--format'")
        return cls(path, chosen, overwrite)

    def stem(self, row: int, image: Path, shown: str | None = None) -> Path:
        """What the names of an image's files begin with. `shown`: what it is called, where its own name is not written."""
        return self.file.with_suffix("") if self.file else path_in(self.folder, stem_of(row, image, shown))

    def files(self, row: int, image: Path, maps: Sequence[str], shown: str | None = None) -> Files:
        """The files of one image, none of which is in the way; `maps`: a name for each of its maps; `shown`: see `stem`."""
        stem = self.stem(row, image, shown)
        name = self.file.suffix if self.file else None
        pictures = tuple(_with(stem, name or f".{kind}") for kind in self.formats if kind in PICTURES)
        tails = [""] if len(maps) == 1 else [f"-{one}" for one in maps]
        raw = tuple(tuple(_with(stem, tail + (name or f".{k}")) for k in self.formats if k in RAW) for tail in tails)
        files = Files(pictures, raw)
        for path in files.all:
            check_free(path, self.overwrite, image)
        return files


class ExistsError(OutputError):
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
        raise ExistsError(path, option)


def check_there(image: Path, shown: str | None = None) -> None:
    """Raise ImageError if there is no such file, before anything slow begins; `shown`: how the error calls it."""
    if not selected(image)[0].exists():
        raise ImageError(f"{image if shown is None else shown}: there is no such file")


def picture_file(
    output: str | None, folder: str, image: Path, tail: str, overwrite: bool, called: str | None = None
) -> Path:
    """Where the one picture made of an image goes, which must be free: `output`, or a name of its own in the folder.

    `called`: what the image is called, where its own name is not written.
    """
    file = path_in(folder, f"{stem_of(1, image, called)}{tail}.png") if output is None else Path(output)
    if file.suffix.lower()[1:] not in PICTURES:
        raise typer.BadParameter(f"{file}; expected a file of {', '.join(PICTURES)}", param_hint="'--output'")
    expect_folder(file.parent)
    check_free(file, overwrite, image)
    return file


def expect_folder(path: Path, option: str = "--output") -> None:
    """typer.BadParameter where a file has its name, or that of a folder that it is in."""
    for one in (path, *path.parents):
        if one.exists() and not one.is_dir():
            raise typer.BadParameter(f"{one} is a file, not a folder", param_hint=f"'{option}'")


def _with(stem: Path, tail: str) -> Path:
    return stem.with_name(stem.name + tail)
