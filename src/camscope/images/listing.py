"""Which image files a folder, a pattern or a name means: names only, nothing is opened."""

import glob
import os
import re
from collections.abc import Iterator

PICTURES = (".png", ".jpg", ".jpeg", ".jfif", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", ".avif")
MEDICAL = (".dcm", ".dicom", ".nii", ".nii.gz", ".nrrd", ".mha", ".mhd")


def images_of(given: str, *, deep: bool) -> Iterator[str]:
    """A file as named, also one that is not there; the images of a folder, of all below it if `deep`; those of a pattern.

    Folders and patterns leave out what is hidden and what has no image's suffix, and the overlays of runs among them: they
    would be the next run's images. In the order of the disk.
    """
    if os.path.isdir(given):  # noqa: PTH112 - of a million names none becomes a Path
        yield from _below(given, deep)
    elif os.path.lexists(given) or not glob.has_magic(given):
        yield given
    else:
        matches = glob.iglob(given, recursive=True)  # noqa: PTH207 - Path.glob takes no absolute pattern
        yield from (path for path in matches if _is_image(os.path.basename(path)) and _is_meant(path))  # noqa: PTH119 - as above


def _below(folder: str, deep: bool) -> Iterator[str]:
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_file() and _is_image(entry.name):
                yield entry.path
            elif deep and entry.is_dir(follow_symlinks=False) and not entry.name.startswith("."):
                yield from () if _of_a_run(entry.path) else _below(entry.path, deep)


def _is_image(name: str) -> bool:
    return name.lower().endswith((*PICTURES, *MEDICAL)) and not name.startswith(".")


def _is_meant(path: str) -> bool:
    return os.path.isfile(path) and not _of_a_run(os.path.dirname(path))  # noqa: PTH113, PTH120 - as above


def _of_a_run(folder: str) -> bool:
    """Whether the overlays of a run lie there: they are in folders that are numbers."""
    above, name = os.path.split(folder)
    run, overlays = os.path.split(above)
    return name.isdecimal() and overlays == "overlays" and os.path.isfile(os.path.join(run, "run.json"))  # noqa: PTH113, PTH118 - as above


def is_medical(name: str) -> bool:
    """Whether a name is that of a medical image, or of a part of one, as `scan.dcm#3`."""
    return re.sub(r"#\d+$", "", name).lower().endswith(MEDICAL)
