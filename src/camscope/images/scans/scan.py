"""The class `Scan`, a medical image with its position, and its conversion to display pixels.

Windows follow DICOM PS3.3 C.11.2.1. `pydicom.pixels` is not used, since windows also apply to scans in other formats, for
which pydicom need not be installed. A test compares both.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from camscope.errors import ImageError, PreprocessError, Remedy
from camscope.plurals import plural

Array = NDArray[Any]
Affine = NDArray[np.float64]
BURNED_IN_FLAGS = {
    True: ("burned-in annotation: YES",),
    None: ("burned-in annotation: not said, and such images often have it",),
    False: (),
}
MAX_VOXELS = 2**28  # of one scan: 1 GiB of float32, a thousand slices of 512 x 512


@dataclass(frozen=True, eq=False, repr=False)
class Scan:
    """A medical image: `values` (H,W) or (D,H,W) float32 in `unit`, or in color (H,W,3) or (D,H,W,3) uint8.

    Args:
        values: The values after modality LUT or rescale.
        name: A name that may be displayed, never a file name.
        affine: (4,4) from array indices (d,row,column) of voxel centers to millimeters in RAS+ as in NIfTI. For a 2-D
            image d is 0. None if the file has no position.
        is_color: Whether the values are colors.
        unit: "HU", "OD" and so on, or "" if unknown.
        modality: "CT", "MR" and so on, or "".
        steps: What was done to the stored numbers, in order.
        flags: Warnings about the file.
        sources: The files, never displayed.
        frame_indices: Which frame of its file each slice is, counted from 0, never displayed.
        has_burned_in_text: Whether text is part of the image. None if the file does not declare it and such images often
            contain text.
        pixel_spacing: Millimeters per pixel along each axis, for an image without a position.
        format_codes: Numeric codes that a writer of the same format needs, such as NIfTI's sform code.
        display_range: The values shown as black and white, if known: 0 and 1 after a window.

    """

    values: Array
    name: str
    affine: Affine | None = None
    is_color: bool = False
    unit: str = ""
    modality: str = ""
    steps: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    sources: tuple[Path, ...] = ()
    frame_indices: tuple[int, ...] = ()
    has_burned_in_text: bool | None = False
    pixel_spacing: tuple[float, ...] | None = None
    format_codes: Mapping[str, int] | None = None
    display_range: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        axes = len(self.shape)
        kind = np.uint8 if self.is_color else np.float32
        if axes not in (2, 3) or not self.values.size or self.values.dtype != kind:
            raise ImageError(
                f"{self.name}: an array of {self.values.dtype} with shape {self.values.shape} is not a scan; "
                "expected float32 (H,W) or (D,H,W), or uint8 with 3 colors"
            )
        if self.affine is not None:
            affine = np.array(self.affine, np.float64)
            affine.setflags(write=False)
            object.__setattr__(self, "affine", affine)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape (H,W) or (D,H,W), without the color axis."""
        return self.values.shape[:-1] if self.is_color else self.values.shape

    @property
    def spacing(self) -> tuple[float, ...] | None:
        """The voxel size in mm along each axis of (H,W) or (D,H,W). The value is `None` if the size is unknown."""
        if self.affine is None:
            return self.pixel_spacing
        return tuple(np.linalg.norm(self.affine[:3, :3], axis=0).tolist())[-len(self.shape) :]

    @property
    def is_safe_to_display(self) -> bool:
        """Whether the image may be displayed. Burned-in text forbids this, because it could contain patient data."""
        return self.has_burned_in_text is False

    def apply_window(self, window: Any) -> "Scan":
        """Clip the values to a display window, and rescale them to 0..1.

        `window` is a `Window`, (center, width) or "40,400". None returns the scan unchanged.
        """
        if window is None:
            return self
        window = parse_window(window)
        if self.is_color:
            raise PreprocessError(f"{self.name}: a window needs gray values, but the scan is in color")
        if self.display_range is not None:
            raise PreprocessError(f"{self.name}: a window is already applied; remove the second window, {window}")
        values = window(self.values).astype(np.float32, copy=False)
        return replace(self, values=values, unit="", display_range=(0.0, 1.0), steps=(*self.steps, f"window: {window}"))

    def __repr__(self) -> str:
        size = " x ".join(map(str, self.shape))
        parts = [self.name, size, *([self.modality] if self.modality else []), self._describe_value_range()]
        if self.spacing:
            parts.append(f"{' x '.join(f'{step:.4g}' for step in self.spacing)} mm")
        return f"<Scan {', '.join(parts)}; steps: {list(self.steps)}; flags: {list(self.flags)}>"

    def _describe_value_range(self) -> str:
        if self.is_color:
            return "RGB"
        with np.errstate(all="ignore"):
            finite = self.values[np.isfinite(self.values)]
        return f"{finite.min():g}..{finite.max():g} {self.unit}".strip() if finite.size else "no finite value"


def check_voxel_count(shape: tuple[int, ...], name: str, max_voxels: int = MAX_VOXELS) -> None:
    """Raise ImageError if a file header declares an invalid or too large shape."""
    size = " x ".join(map(str, shape))
    if any(side < 1 for side in shape):
        raise ImageError(f"{name}: the header declares {size} voxels; expected at least 1 along each axis")
    if math.prod(map(int, shape)) > max_voxels:  # Python integers: NumPy's would overflow
        raise ImageError(f"{name}: {size} values are more than the limit of {max_voxels} for this file")


def check_volume_index(index: int | None, count: int, name: str) -> None:
    """Check that a volume index is in range. A file with several volumes requires an index. Otherwise raise ImageError."""
    if index is None and count > 1:
        fix = f"choose one: file#0 .. file#{count - 1}, or volume=0"
        raise ImageError(f"{name}: a 4-D file of {plural(count, 'volume')}; {fix}")
    check_index_in_range(index, count, "volume", name)


def check_index_in_range(index: int | None, count: int, index_name: str, name: str) -> None:
    """Raise ImageError if the index of a frame, volume or series is out of range. The index None is accepted."""
    if index is not None and not 0 <= index < count:
        raise ImageError(f"{name}: {index_name} {index} is out of range: the file has {count} (0..{count - 1})")


def build_non_finite_flags(values: Array) -> tuple[str, ...]:
    """Return a warning that counts NaN and infinite values. Return an empty result if all values are finite."""
    count = values.size - int(np.count_nonzero(np.isfinite(values)))
    return (f"not finite: {count} of {plural(values.size, 'value')}",) if count else ()


Values = NDArray[np.floating[Any]]
WINDOW_KINDS = ("LINEAR", "LINEAR_EXACT", "SIGMOID")
EXPECTED_WINDOW = 'a Window, a pair (center, width), (center, width, kind) or "40,400"'


@dataclass(frozen=True)
class Window:
    """A display window of DICOM: `center` and `width` in the unit of the values.

    `kind` is LINEAR (the default), LINEAR_EXACT or SIGMOID.

    >>> Window(40, 400)(np.array([-160.0, 39.5, 240.0])).tolist()
    [0.0, 0.5, 1.0]
    """

    center: float
    width: float
    kind: str = "LINEAR"

    def __post_init__(self) -> None:
        if self.kind not in WINDOW_KINDS:
            raise PreprocessError(f"the window has kind {self.kind!r:.40}; expected one of {', '.join(WINDOW_KINDS)}")
        min_width = 1 if self.kind == "LINEAR" else 0
        # a LINEAR width of 1 is a step; a width of 0 is undefined
        if not np.isfinite([self.center, self.width]).all() or self.width < min_width or self.width == 0:
            window = f"a window of center {self.center} and width {self.width}"
            raise PreprocessError(f"{window}; the width must be {'at least 1' if min_width else 'above 0'}")

    def __call__(self, values: Values) -> Values:
        """Rescale values of any shape to 0..1. Keep the precision of the values, but use at least float32.

        LINEAR is (v - (c - 1/2)) / (w - 1) + 1/2, clipped, and for w = 1 a step above c - 1/2. LINEAR_EXACT is
        (v - c) / w + 1/2, clipped. SIGMOID is 1 / (1 + exp(-4 (v - c) / w)).
        """
        numbers = values.astype(np.promote_types(values.dtype, np.float32))
        center, width = self.center, self.width
        if self.kind == "SIGMOID":  # equal to the formula, without overflow
            return np.asarray((np.tanh(2 * (numbers - center) / width) + 1) / 2)
        if self.kind == "LINEAR":
            center, width = center - 0.5, width - 1
        if width == 0:
            return (values > center).astype(numbers.dtype)
        return np.asarray(np.clip((numbers - center) / width + 0.5, 0, 1))

    def __str__(self) -> str:
        return f"{self.kind}, center {self.center:g}, width {self.width:g}"


def parse_window(value: Any) -> Window:
    """Build a window from (center, width), (center, width, kind), a text such as "40,400", or a `Window`."""
    if isinstance(value, Window):
        return value
    parts = value.split(",") if isinstance(value, str) else value
    try:
        center, width, *kind = parts
        center, width = float(center), float(width)
    except (TypeError, ValueError):
        raise PreprocessError(f"the window is {value!r:.80}; expected {EXPECTED_WINDOW}") from None
    if len(kind) > 1:
        raise PreprocessError(f"the window is {value!r:.80}; expected {EXPECTED_WINDOW}")
    return Window(center, width, *(str(word).strip().upper() for word in kind))


Pixels = NDArray[np.uint8]


def convert_to_rgb_and_scaled_scan(scan: Scan, window: Any = None) -> tuple[Pixels, Scan]:
    """Convert a 2-D scan to RGB pixels (H,W,3) uint8. Return these pixels, and the scan rescaled to 0..1.

    Gray values are mapped by the window. If there is no window, their minimum and maximum become black and white. A color
    scan is returned unchanged.
    """
    if len(scan.shape) != 2:
        raise ImageError(
            f"{scan.name} is a volume of {' x '.join(map(str, scan.shape))}, but the preprocessing is for 2-D images",
            fix="use explain_slices (--slices 0), or pass preprocess=ScanPreprocess(...) to a 3-D model",
            remedy=Remedy.EXPLAIN_SLICES,
        )
    if scan.is_color:
        return np.ascontiguousarray(scan.values), scan
    displayed = scan.apply_window(window) if window is not None else rescale_to_display_range(scan)
    gray = np.rint(displayed.values * 255).astype(np.uint8)
    return np.repeat(gray[..., None], 3, axis=2), displayed


def convert_scan_to_display_pixels(scan: Scan, window: Any = None) -> Pixels:
    """Convert a scan to uint8 pixels for display.

    The shape is (H,W,3) for a 2-D scan, (D,H,W) for a volume and (D,H,W,3) for a color volume. Gray values are mapped by the
    window. If there is no window, their minimum and maximum become black and white.
    """
    if len(scan.shape) == 2:
        return convert_to_rgb_and_scaled_scan(scan, window)[0]
    if scan.is_color:
        return np.asarray(scan.values, np.uint8)
    displayed = scan.apply_window(window) if window is not None else rescale_to_display_range(scan)
    return np.asarray(np.rint(np.nan_to_num(displayed.values, nan=0.0) * 255), np.uint8)


def rescale_to_display_range(scan: Scan) -> Scan:
    """Rescale the values of a scan to 0..1 for display.

    The ends of the display range become 0 and 1. If it is unknown, the minimum and maximum of the values do. NaN becomes 0.
    """
    if scan.display_range is not None:
        low, high, steps = *scan.display_range, scan.steps
    else:
        finite = scan.values[np.isfinite(scan.values)]
        low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)
        unit = f" {scan.unit}" if scan.unit else ""
        steps = (*scan.steps, f"no window: the whole range, {low:g} to {high:g}{unit}")
    values = (np.nan_to_num(scan.values, nan=low, posinf=high, neginf=low) - low) / ((high - low) or 1.0)
    return replace(scan, values=values.astype(np.float32), unit="", display_range=(0.0, 1.0), steps=steps)
