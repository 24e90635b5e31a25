"""How the pixels of a DICOM image are stored, by its header: checked before any of them is touched."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from camscope.errors import ImageError
from camscope.images.scan import MAX_VOXELS, check_size
from camscope.images.tags import PHOTOMETRIC, known_uid, whole, word
from camscope.wording import plural

if TYPE_CHECKING:
    from pydicom.dataset import Dataset

PIXELS = ("PixelData", "FloatPixelData", "DoubleFloatPixelData")
NEEDED = ("Rows", "Columns", "BitsAllocated", "SamplesPerPixel")


@dataclass(frozen=True)
class Layout:
    """How the pixels of an image are stored: checked numbers of its header."""

    rows: int
    columns: int
    frames: int
    samples: int
    allocated: int
    stored: int
    signed: bool
    photometric: str
    floating: bool

    @property
    def colour(self) -> bool:
        """Whether its values are colours, not amounts."""
        return not self.photometric.startswith("MONOCHROME")

    @property
    def range(self) -> tuple[int, int]:
        """The least and the largest number that can be stored."""
        half = 1 << (self.stored - 1)
        return (-half, half - 1) if self.signed else (0, 2 * half - 1)


def layout_of(dataset: "Dataset", name: str, limit: int = MAX_VOXELS, wanted: int | None = None) -> Layout:
    """Of a data set with pixels; `wanted`: how many of its frames will be read."""
    held = [keyword for keyword in PIXELS if keyword in dataset]
    if not held:
        kind = known_uid(dataset.get("SOPClassUID", "")) or known_uid(
            dataset.file_meta.get("MediaStorageSOPClassUID", "")
        )
        raise ImageError(f"{name}: the file has no pixels{f' ({kind})' if kind else ''}")
    found = {keyword: whole(dataset, keyword) for keyword in NEEDED}
    if missing := [keyword for keyword, value in found.items() if value is None]:
        raise ImageError(f"{name}: the header has no {', '.join(missing)}")
    rows, columns, allocated, samples = (
        found[key] or 0 for key in ("Rows", "Columns", "BitsAllocated", "SamplesPerPixel")
    )
    floating = held[0] != "PixelData"
    frames = _frames(dataset)
    stored = allocated if floating else (whole(dataset, "BitsStored") or allocated)
    photometric = word(dataset, "PhotometricInterpretation", PHOTOMETRIC)
    if not photometric:
        raise ImageError(f"{name}: the PhotometricInterpretation is none of {', '.join(sorted(PHOTOMETRIC))}")
    if frames is None:
        raise ImageError(f"{name}: the header's NumberOfFrames is not a whole number")
    if allocated not in (1, 8, 16, 32, 64) or not 1 <= stored <= allocated or samples not in (1, 3):
        raise ImageError(
            f"{name}: {stored} of {plural(allocated, 'bit')}, {plural(samples, 'sample')} a pixel: no such pixels are known"
        )
    layout = Layout(
        rows,
        columns,
        frames,
        samples,
        allocated,
        stored,
        whole(dataset, "PixelRepresentation") == 1,
        photometric,
        floating,
    )
    if layout.colour != (samples == 3) and photometric != "PALETTE COLOR":
        raise ImageError(f"{name}: {photometric} with {plural(samples, 'sample')} a pixel")
    check_size((frames if wanted is None else wanted, rows, columns, samples), name, limit)
    if frames < 1:
        raise ImageError(f"{name}: an image of {plural(frames, 'frame')}")
    return layout


def _frames(dataset: "Dataset") -> int | None:
    if "NumberOfFrames" not in dataset or dataset["NumberOfFrames"].is_empty:
        return 1
    return whole(dataset, "NumberOfFrames")
