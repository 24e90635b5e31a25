"""Find the input images that a command names, and choose the paths of its output files."""

import hashlib
import itertools
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from camscope.atomic_writes_and_folder_locks import build_output_path, slug
from camscope.cli import shared_options
from camscope.errors import ImageError, OutputError
from camscope.images.files import find_and_open_image_files
from camscope.images.files.find_and_open_image_files import split_path_and_index

RASTER_FORMATS, VECTOR_FORMATS = ("png", "jpg", "jpeg", "webp"), ("pdf", "svg")
MAP_FILE_FORMATS, CAPTION_SUFFIX = ("npz", "json", "gif"), ".txt"
OUTPUT_FORMATS = (*RASTER_FORMATS, *VECTOR_FORMATS, *MAP_FILE_FORMATS)


def list_images(sources: Sequence[str], *, folders_are_series: bool = False) -> list[Path]:
    """List the images in `sources`. A source is a file, a folder or a glob pattern.

    With `folders_are_series`, a folder is one image, a DICOM series.
    """
    paths: dict[Path, None] = {}
    for source in sources:
        if folders_are_series and Path(source).is_dir():
            paths[Path(source)] = None
            continue
        matches = sorted(map(Path, find_and_open_image_files.list_image_paths(source, recursive=False)))
        if not matches:
            raise shared_options.build_option_error("IMAGE", _explain_missing_image(source))
        paths.update(dict.fromkeys(matches))
    return list(paths)


def _explain_missing_image(source: str) -> str:
    """Say why a source contains no image.

    A folder of scans is named by its pseudonym, because the folder name may identify a patient.
    """
    from camscope.images.files.redacted_errors_and_file_pseudonyms import pseudonymize_source
    from camscope.images.scans.scan_reader import is_scan

    if Path(source).is_dir() and is_scan(source):
        folder = pseudonymize_source(source)
        return f"{folder} is a folder of DICOM files without a suffix; to read a volume pass --series"
    return f"no image {'in the folder' if Path(source).is_dir() else 'for the pattern'} {source}"


def build_file_stem(image_number: int, image: Path, pseudonym: str | None = None) -> str:
    """Build the start of an image's output file names, such as `0003-1f0a92bc-cat`: number, content hash and name.

    A pseudonym replaces hash and name, as in `0003-scan-1f0a92bc`.
    """
    if pseudonym is not None:
        return f"{image_number:04d}-{slug(pseudonym)}"
    digest = hashlib.sha256(os.fsencode(image)).hexdigest()
    if image.is_file():
        with image.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    return f"{image_number:04d}-{digest[:8]}-{slug(image.stem)}"


class OutputFiles(NamedTuple):
    """The output paths of one image."""

    figures: list[Path]
    map_files: list[list[Path]]  # of each map
    exports: list[list[Path]]  # of each map


@dataclass(frozen=True)
class Destination:
    """The output folder and the formats of its files. `file` is set if the user named a single output file."""

    folder: Path
    formats: tuple[str, ...]
    overwrite: bool = False
    file: Path | None = None

    @classmethod
    def from_options(cls, output: str, formats: str | None, overwrite: bool) -> "Destination":
        """Parse `--output` and `--format`. Raise typer.BadParameter if values are invalid, or contradict each other."""
        path = Path(output)
        if path.suffix.lower()[1:] in OUTPUT_FORMATS and not path.is_dir() and not output.endswith(("/", os.sep)):
            if formats is not None:
                raise shared_options.build_option_error("--format", f"-o {output} sets the format already")
            check_can_be_folder(path.parent)
            return cls(path.parent, (path.suffix.lower()[1:],), overwrite, path)
        if formats is None and re.fullmatch(r"\.[A-Za-z]\w{1,4}", path.suffix) and not path.exists():
            expected = f"expected a folder, or a file ending in {', '.join(OUTPUT_FORMATS)}"
            raise shared_options.build_option_error("--output", f"cannot write {path.suffix}: {expected}")
        check_can_be_folder(path)
        chosen = tuple(dict.fromkeys((formats or "png").replace(",", " ").lower().split()))
        if not chosen or (unknown := [name for name in chosen if name not in OUTPUT_FORMATS]):
            received = ", ".join(unknown) if chosen else "nothing"
            raise shared_options.build_option_error(
                "--format", f"{received}; expected some of {', '.join(OUTPUT_FORMATS)}"
            )
        return cls(path, chosen, overwrite)

    def list_output_files(
        self,
        image_number: int,
        image: Path,
        map_names: Sequence[str],
        pseudonym: str | None = None,
        export_suffixes: Sequence[str] = (),
    ) -> OutputFiles:
        """List the output paths of one image: its figures, and the files and exports of each map.

        Raises OutputExistsError if a file exists and `--overwrite` is not set.
        """
        if self.file:
            stem, endings = self.file.with_suffix(""), {self.formats[0]: self.file.suffix}
        else:
            stem = build_output_path(self.folder, build_file_stem(image_number, image, pseudonym))
            endings = {kind: f".{kind}" for kind in self.formats}
        figure_endings = [
            ending for group in (RASTER_FORMATS, VECTOR_FORMATS) for kind, ending in endings.items() if kind in group
        ]
        figure_endings += [f"{ending}{CAPTION_SUFFIX}" for kind, ending in endings.items() if kind in VECTOR_FORMATS]
        map_endings = [ending for kind, ending in endings.items() if kind in MAP_FILE_FORMATS]
        suffixes = [""] if len(map_names) == 1 else [f"-{name}" for name in map_names]
        figures = [stem.with_name(stem.name + ending) for ending in figure_endings]
        map_files, exports = (
            [[stem.with_name(stem.name + suffix + ending) for ending in group] for suffix in suffixes]
            for group in (map_endings, export_suffixes)
        )
        for path in itertools.chain(figures, *map_files, *exports):
            check_overwrite_allowed(path, self.overwrite, image)
        return OutputFiles(figures, map_files, exports)


class OutputExistsError(OutputError):
    """An output file exists, and `--overwrite` is not set."""

    def __init__(self, path: Path, option: str = "-o") -> None:
        super().__init__(f"{path} exists; pass --overwrite, or another {option}")
        self.path = path


def check_overwrite_allowed(path: Path, overwrite: bool, input_image: Path | None = None, option: str = "-o") -> None:
    """Raise an OutputError if the output is the input image. Also raise it if the output exists and `overwrite` is False."""
    if input_image is not None and path.exists() and input_image.exists() and path.samefile(input_image):
        raise OutputError(f"the output {path} is the input image; pass another -o")
    if os.path.lexists(path) and not overwrite:
        raise OutputExistsError(path, option)


def check_image_exists(image: Path, pseudonym: str | None = None) -> None:
    """Raise an ImageError if the image file does not exist. The message contains `pseudonym` instead of the path."""
    if not split_path_and_index(image)[0].exists():
        display_name = image if pseudonym is None else pseudonym
        raise ImageError(f"{display_name}: there is no such file")


def resolve_figure_path(
    output: str | None,
    default_folder: str,
    image: Path,
    stem_suffix: str,
    overwrite: bool,
    pseudonym: str | None = None,
    formats: Sequence[str] = RASTER_FORMATS,
) -> Path:
    """Return the path of a figure. It is `output`, or else a generated file name in `default_folder`.

    Raises OutputExistsError if the file exists and `overwrite` is False.
    """
    stem = build_file_stem(1, image, pseudonym)
    file = build_output_path(default_folder, f"{stem}{stem_suffix}.png") if output is None else Path(output)
    if file.suffix.lower()[1:] not in formats:
        raise shared_options.build_option_error("--output", f"{file}; expected a file ending in {', '.join(formats)}")
    check_can_be_folder(file.parent)
    check_overwrite_allowed(file, overwrite, image)
    if file.suffix.lower()[1:] in VECTOR_FORMATS:
        check_overwrite_allowed(file.with_name(f"{file.name}{CAPTION_SUFFIX}"), overwrite, image)
    return file


def check_can_be_folder(path: Path, option: str = "--output") -> None:
    """Raise typer.BadParameter if the path, or a parent of the path, is a file. The path could not become a folder then."""
    for parent in (path, *path.parents):
        if parent.exists() and not parent.is_dir():
            raise shared_options.build_option_error(option, f"{parent} is a file, not a folder")
