"""Convert stored DICOM pixels to values such as HU, by modality LUT or rescale, or to colors."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from camscope.errors import ImageError
from camscope.images.scans.dicom_header_values import (
    VALUE_UNITS,
    decode_uint16_table,
    get_uid_name,
    iter_macro_items,
    read_allowed_code_word,
    read_first_numbers,
    read_functional_groups,
    read_integer,
    read_number,
    read_numbers,
    read_sequence_items,
)
from camscope.images.scans.dicom_pixels import PixelLayout, decode_frames, get_color_converter
from camscope.images.scans.scan import build_non_finite_flags
from camscope.plurals import plural

if TYPE_CHECKING:
    from pydicom.dataset import Dataset


Array = NDArray[Any]
VALUE_TRANSFORMATION_SEQUENCE, REAL_WORLD_SEQUENCE = "PixelValueTransformationSequence", "RealWorldValueMappingSequence"


@dataclass(frozen=True)
class ModalityLUT:
    """Converts stored numbers to values: slope * stored + intercept, or a lookup table. MONOCHROME1 is inverted.

    The inversion is smallest + largest - stored, where smallest and largest are the ends of the storable range. It is done
    with whole numbers before the rescale, so that it is exact. The values of a table are inverted within the range of its
    bits.
    """

    slope: float = 1.0
    intercept: float = 0.0
    unit: str = ""
    is_declared: bool = False  # whether the file declares slope and intercept
    table: Array | None = None
    first_stored_value: int = 0  # stored number of the table's first entry
    table_bits: int = 16  # bits of the table's entries
    is_inverted: bool = False

    def __call__(self, stored: Array, layout: PixelLayout) -> Array:
        """Convert stored numbers (H,W) to values (H,W) float32."""
        least, largest = layout.storable_range
        if self.table is not None:
            index = np.clip(stored.astype(np.int64) - self.first_stored_value, 0, len(self.table) - 1)
            values = self.table[index].astype(np.float64)
            return ((1 << self.table_bits) - 1 - values if self.is_inverted else values).astype(np.float32)
        values = stored.astype(np.float64)
        if self.is_inverted:
            values = least + largest - values
        return (values * self.slope + self.intercept).astype(np.float32)

    def describe_conversion_steps(self) -> tuple[str, ...]:
        """Describe the conversion steps as text, one after another."""
        unit = f" ({self.unit})" if self.unit else ""
        if self.table is not None:
            steps = [f"modality LUT: {plural(len(self.table), 'entry')} of {plural(self.table_bits, 'bit')}{unit}"]
            return (*steps, "MONOCHROME1: inverted (values within the LUT's range)") if self.is_inverted else (*steps,)
        steps = ["MONOCHROME1: inverted (stored values within their range)"] if self.is_inverted else []
        if self.is_declared:
            steps.append(f"rescale: slope {self.slope:.10g}, intercept {self.intercept:.10g}{unit}")
        return tuple(steps)


def read_modality_lut(
    dataset: "Dataset", functional_groups: "list[Dataset]", layout: PixelLayout, name: str
) -> ModalityLUT:
    """Read the modality LUT of one frame, or its rescale slope and intercept."""
    inverted = layout.photometric_interpretation == "MONOCHROME1"
    if inverted and layout.is_floating:
        raise ImageError(
            f"{name}: MONOCHROME1 with floating-point pixels cannot be inverted, as they have no fixed range"
        )
    modality = read_allowed_code_word(dataset, "Modality", {"CT", "RTDOSE", "PT"})
    places = list(iter_macro_items(functional_groups, VALUE_TRANSFORMATION_SEQUENCE))
    unit = next(filter(None, (read_allowed_code_word(place, "RescaleType", VALUE_UNITS) for place in places)), "")
    if modality == "PT":
        unit = unit or read_allowed_code_word(dataset, "Units", VALUE_UNITS)
    if modality == "RTDOSE" and (scale := read_number(dataset, "DoseGridScaling")) is not None:
        dose_unit = read_allowed_code_word(dataset, "DoseUnits", VALUE_UNITS)
        return ModalityLUT(scale, 0.0, dose_unit, is_declared=True, is_inverted=inverted)
    if table := read_sequence_items(dataset, "ModalityLUTSequence"):
        return _read_lut_table(dataset, table[0], inverted, name)
    slope, intercept = (
        read_first_numbers(functional_groups, VALUE_TRANSFORMATION_SEQUENCE, key, 1)
        for key in ("RescaleSlope", "RescaleIntercept")
    )
    if slope is None and intercept is None:
        return ModalityLUT(unit="" if layout.is_floating else unit, is_inverted=inverted)
    if slope is not None and slope[0] == 0:
        raise ImageError(f"{name}: the rescale slope is 0, which would make all pixels equal")
    # a CT declares its unit only if it is not HU
    is_unit_declared = any(place.get("RescaleType") for place in places)
    unit = unit or ("HU" if modality == "CT" and not is_unit_declared else "")
    return ModalityLUT((slope or (1.0,))[0], (intercept or (0.0,))[0], unit, is_declared=True, is_inverted=inverted)


def _read_lut_table(dataset: "Dataset", lut_item: "Dataset", is_inverted: bool, name: str) -> ModalityLUT:
    """Read the table of a modality LUT. Raise an ImageError if it does not match its descriptor."""
    descriptor = read_numbers(lut_item, "LUTDescriptor", 3)
    data = lut_item.get("LUTData")
    if descriptor is None or data is None:
        raise ImageError(f"{name}: the modality LUT has no descriptor or no data")
    entries, first, depth = (int(value) for value in descriptor)
    entries = entries or 1 << 16
    is_binary = isinstance(data, bytes)
    table = decode_uint16_table(dataset, data) if is_binary else np.atleast_1d(np.asarray(data, np.uint16))
    if len(table) < entries or not 8 <= depth <= 16:
        received = f"{plural(len(table), 'entry')} of {plural(depth, 'bit')}"
        raise ImageError(f"{name}: the modality LUT has {received}; its descriptor says {entries}")
    unit = read_allowed_code_word(lut_item, "ModalityLUTType", VALUE_UNITS)
    return ModalityLUT(1.0, 0.0, unit, False, table[:entries], first, depth, is_inverted)


def _describe_real_world_maps(functional_groups: "list[Dataset]") -> tuple[str, ...]:
    """Describe the real-world value maps of a file. The values are not converted by these maps."""
    maps = next(filter(None, (read_sequence_items(group, REAL_WORLD_SEQUENCE) for group in functional_groups)), [])
    steps = []
    for item in maps[:3]:
        slope, intercept = read_number(item, "RealWorldValueSlope"), read_number(item, "RealWorldValueIntercept")
        mapping = "a table" if slope is None else f"slope {slope:.10g}, intercept {intercept or 0:.10g}"
        steps.append(f"real-world value map: {mapping}, not applied")
    return tuple(steps)


def _read_padding_range(dataset: "Dataset", layout: PixelLayout) -> tuple[int, int] | None:
    """Return the smallest and the largest stored number that marks padding. Return None if no padding is declared."""
    if layout.is_floating or (value := read_integer(dataset, "PixelPaddingValue")) is None:
        return None
    limit = read_integer(dataset, "PixelPaddingRangeLimit")
    # some files store a negative number unsigned, or the other way round
    ends = [_convert_to_stored_sign(number, layout) for number in (value, value if limit is None else limit)]
    return min(ends), max(ends)


def _convert_to_stored_sign(value: int, layout: PixelLayout) -> int:
    full = 1 << layout.bits_allocated
    if layout.is_signed and value >= full // 2:
        return value - full
    return value + full if not layout.is_signed and value < 0 else value


@dataclass(frozen=True, eq=False)
class DecodedFrames:
    """Decoded frames: `values` (M,H,W) float32, or (M,H,W,3) uint8 in color.

    The conversion steps are `steps_before`, those of the `modality_luts`, and `steps_after`. `n_padded_pixels` counts the
    padding pixels, whose value is `padding_value`.
    """

    values: Array
    steps_before: tuple[str, ...]
    modality_luts: tuple[ModalityLUT, ...] = ()
    steps_after: tuple[str, ...] = ()
    n_padded_pixels: int = 0
    padding_value: float = 0.0

    @property
    def is_color(self) -> bool:
        """Whether the frames are color images."""
        return not self.modality_luts

    @property
    def unit_of_all_frames(self) -> str:
        """The unit that all frames share. Different units or inverted values give ""."""
        units = {"" if lut.is_inverted else lut.unit for lut in self.modality_luts}
        return units.pop() if len(units) == 1 else ""

    def describe_conversion_steps(self, item_name: str) -> tuple[str, ...]:
        """Describe the conversion steps as text, one after another. `item_name` is "frame" or "slice"."""
        return (*self.steps_before, *_describe_modality_luts(self.modality_luts, item_name), *self.steps_after)

    def list_value_flags(self) -> tuple[str, ...]:
        """List warnings about the values, for example about different units, padding and NaN."""
        units = {lut.unit for lut in self.modality_luts}
        inverted_units = [lut.unit for lut in self.modality_luts if lut.is_inverted and lut.unit]
        flags = [f"MONOCHROME1 in {unit}: inverted, and so no longer {unit}" for unit in inverted_units[:1]]
        if len(units) > 1:
            flags.append("the unit is not the same for all")
        if len({lut.is_inverted for lut in self.modality_luts}) > 1:
            flags.append("a mixture of MONOCHROME1 and MONOCHROME2")
        if self.n_padded_pixels:
            padding = f"{plural(self.n_padded_pixels, 'pixel')} of {self.padding_value:g}"
            flags.append(f"padding: {padding} are outside what was measured")
        return (*flags, *build_non_finite_flags(self.values))


def decode_dicom_pixels(
    dataset: "Dataset", layout: PixelLayout, frame_indices: Sequence[int], name: str
) -> DecodedFrames:
    """Decode the selected frames of a DICOM file. Convert the stored numbers to values or colors."""
    shape = (len(frame_indices), layout.rows, layout.columns)
    decoded = decode_frames(dataset, layout, frame_indices, name)
    if layout.is_color:
        convert, steps = get_color_converter(dataset, layout, name)
        colors = np.empty((*shape, 3), np.uint8)
        _copy_frames(colors, (convert(array, space) for array, space in decoded), name)
        return DecodedFrames(colors, (*_describe_pixel_storage(dataset, layout), *steps))
    modality_luts = _read_modality_luts(dataset, layout, frame_indices, name)
    padding, counts = _read_padding_range(dataset, layout), []

    def iter_converted_frames() -> Iterator[Array]:
        for (array, _), lut in zip(decoded, modality_luts, strict=False):
            if padding is not None:
                counts.append(int(np.count_nonzero((array >= padding[0]) & (array <= padding[1]))))
            yield lut(array, layout)

    values = np.empty(shape, np.float32)
    _copy_frames(values, iter_converted_frames(), name)
    padding_value = float(modality_luts[0](np.array([[padding[0]]]), layout)[0, 0]) if padding else 0.0
    real_world_maps = _describe_real_world_maps(read_functional_groups(dataset, frame_indices[:1])[0])
    storage = _describe_pixel_storage(dataset, layout)
    return DecodedFrames(values, storage, tuple(modality_luts), real_world_maps, sum(counts), padding_value)


def join_decoded_frames(parts: Sequence[DecodedFrames], values: Array) -> DecodedFrames:
    """Join several results into one with the frames `values`. Merge conversion steps, and add padding counts."""
    return DecodedFrames(
        values,
        _merge_conversion_steps([part.steps_before for part in parts]),
        tuple(lut for part in parts for lut in part.modality_luts),
        _merge_conversion_steps([part.steps_after for part in parts]),
        sum(part.n_padded_pixels for part in parts),
        next((part.padding_value for part in parts if part.n_padded_pixels), 0.0),
    )


def _merge_conversion_steps(steps_by_frame: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """Merge the conversion steps of several frames. If a step differs between frames, a note replaces it."""
    variants_by_kind: dict[str, set[str]] = {}
    for steps in steps_by_frame:
        for step in steps:
            variants_by_kind.setdefault(step.split(":")[0], set()).add(step)
    if len(set(steps_by_frame)) == 1:
        return steps_by_frame[0]
    return tuple(
        min(variants) if len(variants) == 1 else f"{kind}: not the same for all slices"
        for kind, variants in variants_by_kind.items()
    )


def _copy_frames(destination: Array, frames: Iterator[Array], name: str) -> None:
    """Copy decoded frames into an array. Raise an ImageError if their shape or number differs from the header."""
    count = 0
    for frame in frames:
        if frame.shape != destination.shape[1:]:
            raise ImageError(f"{name}: frame {count} has shape {frame.shape}; the header says {destination.shape[1:]}")
        destination[count] = frame
        count += 1
    if count < len(destination):
        raise ImageError(
            f"{name}: the file has {plural(count, 'frame')} of pixels; the header says {plural(len(destination), 'frame')}"
        )


def _read_modality_luts(
    dataset: "Dataset", layout: PixelLayout, frame_indices: Sequence[int], name: str
) -> list[ModalityLUT]:
    if "PerFrameFunctionalGroupsSequence" not in dataset:
        return [read_modality_lut(dataset, read_functional_groups(dataset, [0])[0], layout, name)] * len(frame_indices)
    groups_by_frame = read_functional_groups(dataset, frame_indices)
    return [read_modality_lut(dataset, groups, layout, name) for groups in groups_by_frame]


def _describe_modality_luts(modality_luts: Sequence[ModalityLUT], item_name: str) -> tuple[str, ...]:
    """Describe the steps of several modality LUTs as text. If they differ, give the ranges of slope and intercept."""
    distinct_steps = {lut.describe_conversion_steps(): None for lut in modality_luts}
    if len(distinct_steps) < 2:
        return next(iter(distinct_steps), ())
    slopes, intercepts = ({getattr(lut, key) for lut in modality_luts} for key in ("slope", "intercept"))
    other_steps = {step: None for steps in distinct_steps for step in steps if not step.startswith("rescale")}
    rescale = f"rescale: differs by {item_name}, slope {_format_range(slopes)}, intercept {_format_range(intercepts)}"
    return (*other_steps, rescale)


def _format_range(values: set[float]) -> str:
    return "..".join(f"{end:.10g}" for end in sorted({min(values), max(values)}))


def _describe_pixel_storage(dataset: "Dataset", layout: PixelLayout) -> tuple[str, ...]:
    """Describe how the pixels are stored: compression, loss, bits and sign."""
    kind = "floating point" if layout.is_floating else "signed" if layout.is_signed else "unsigned"
    syntax = dataset.file_meta.TransferSyntaxUID
    name = get_uid_name(syntax)
    decoded = (f"decoded: {name}",) if name and syntax.is_compressed else ()
    is_lossy = bool(read_allowed_code_word(dataset, "LossyImageCompression", {"01"}))
    lossy = ("lossy: the image was once compressed with loss",) * is_lossy
    return (*decoded, *lossy, f"stored: {layout.bits_stored} of {plural(layout.bits_allocated, 'bit')}, {kind}")
