"""Which image files a folder, a pattern or a name means: names only, nothing is opened."""

import glob
import os
import re
import sys
from collections.abc import Iterator

PICTURES = (".png", ".jpg", ".jpeg", ".jfif", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", ".avif")
MEDICAL = (".dcm", ".dicom", ".nii", ".nii.gz", ".nrrd", ".mha", ".mhd")


def images_of(given: str, *, deep: bool) -> Iterator[str]:
    """A file as named, also one that is not there; the images of a folder, of all below it if `deep`; those of a pattern.

    Folders and patterns leave out what is hidden and what has no image's suffix, and the overlays of runs among them: they
    would be the next run's images. Links to folders are followed, and each folder is searched once, however many links lead
    to it. In the order of the disk.
    """
    if os.path.isdir(given):  # noqa: PTH112 - of a million names none becomes a Path
        for folder in folders_below(given) if deep else [given]:
            with os.scandir(folder) as entries:
                yield from (entry.path for entry in entries if _is_image(entry.name) and entry.is_file())
    elif os.path.lexists(given) or not glob.has_magic(given):
        yield given
    else:
        yield from (path for path in _matches(given) if _is_image(os.path.basename(path)) and _is_meant(path))  # noqa: PTH119 - as above


def folders_below(folder: str) -> Iterator[str]:
    """A folder and all below it but hidden ones and the overlays of runs, each once: by its own path before any link's."""
    found, links = {_identity(folder)}, [folder]
    while links:
        level, linked = links, []
        for start in level:
            waiting = [start]
            while waiting:
                one = waiting.pop()
                yield one
                with os.scandir(one) as entries:
                    inner = [entry for entry in entries if not entry.name.startswith(".") and entry.is_dir()]
                linked += [entry.path for entry in inner if _is_link(entry)]
                for path in (entry.path for entry in inner if not _is_link(entry)):
                    if (real := _identity(path)) not in found and not _of_a_run(path):
                        found.add(real)
                        waiting.append(path)
        links = []
        for path in sorted(linked):
            if (real := _identity(path)) not in found and not _of_a_run(path):
                found.add(real)
                links.append(path)


def _identity(folder: str) -> tuple[int, int]:
    """What a folder is told from others by, behind all links."""
    status = os.stat(folder)  # noqa: PTH116 - as above
    return status.st_dev, status.st_ino


def _is_link(entry: "os.DirEntry[str]") -> bool:
    return entry.is_symlink() or (sys.version_info >= (3, 12) and entry.is_junction())


def _matches(pattern: str) -> Iterator[str]:
    """The paths of a pattern. Under `**` each folder is searched once, where glob follows a link to a folder above for ever."""
    before, wild, after = _split(pattern)
    if not wild:
        yield from glob.iglob(pattern)  # noqa: PTH207 - Path.glob takes no absolute pattern
        return
    found: set[str] = set()
    for base in glob.iglob(before) if before else [""]:  # noqa: PTH207 - as above
        if not os.path.isdir(base or os.curdir):  # noqa: PTH112 - as above
            continue
        for folder in folders_below(base or os.curdir):
            here = os.path.relpath(folder, os.curdir) if not base else folder
            rest = os.path.join(glob.escape("" if here == os.curdir else here), after or "*")  # noqa: PTH118 - as above
            for path in _matches(rest):
                if path not in found:
                    found.add(path)
                    yield path


def _split(pattern: str) -> tuple[str, bool, str]:
    """`a/**/b.png` -> `a/` and `b.png`: what stands before and behind the first `**`, if there is one."""
    match = re.search(r"(?:^|(?<=[/\\]))\*\*(?:[/\\]+|$)" if os.sep == "\\" else r"(?:^|(?<=/))\*\*(?:/+|$)", pattern)
    return (pattern, False, "") if match is None else (pattern[: match.start()], True, pattern[match.end() :])


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
