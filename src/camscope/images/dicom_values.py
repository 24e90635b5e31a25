"""From stored numbers to amounts: modality LUT or rescale, and the inversion of MONOCHROME1, each said in a step."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from camscope.errors import ImageError
from camscope.images.dicom_layout import Layout
from camscope.images.tags import UNITS, first_numbers, items, number, numbers, places, whole, word, words_of
from camscope.wording import plural

if TYPE_CHECKING:
    from pydicom.dataset import Dataset

Array = NDArray[Any]
TRANSFORM, REAL_WORLD = "PixelValueTransformationSequence", "RealWorldValueMappingSequence"


@dataclass(frozen=True)
class Amounts:
    """What stored numbers mean: v = slope * stored + intercept, or a table's entry; then, of MONOCHROME1, inverted.

    Inverted means mirrored within the range that can be stored: stored -> least + largest - stored, before the rescale.
    That is the same as mirroring the values in the range that they can have, but exact, since it is done with whole
    numbers: the twin of a picture, with mirrored numbers and the other photometric interpretation, has its very bits.
    After a table, the mirror is the range of the table's bits.
    """

    slope: float = 1.0
    intercept: float = 0.0
    unit: str = ""
    said: bool = False  # whether the file says the slope and intercept
    table: Array | None = None
    first: int = 0  # the stored number of the table's first entry
    depth: int = 16  # bits of the table's entries
    inverted: bool = False

    def __call__(self, stored: Array, layout: Layout) -> Array:
        """(H,W) stored numbers -> (H,W) float32."""
        least, largest = layout.range
        if self.table is not None:
            at = np.clip(stored.astype(np.int64) - self.first, 0, len(self.table) - 1)
            values = self.table[at].astype(np.float64)
            return ((1 << self.depth) - 1 - values if self.inverted else values).astype(np.float32)
        values = stored.astype(np.float64)
        if self.inverted:
            values = least + largest - values
        return self.rescaled(values).astype(np.float32)

    def rescaled(self, values: Array) -> Array:
        """Slope * values + intercept."""
        return values * self.slope + self.intercept

    def steps(self) -> tuple[str, ...]:
        """In words, in order."""
        unit = f" ({self.unit})" if self.unit else ""
        told = (
            [f"modality LUT: {plural(len(self.table), 'entry')} of {plural(self.depth, 'bit')}{unit}"]
            if self.table is not None
            else []
        )
        if self.said:
            told.append(f"rescale: slope {self.slope:.10g}, intercept {self.intercept:.10g}{unit}")
        if not self.inverted:
            return tuple(told)
        where = "values within the LUT's range" if self.table is not None else "stored values within their range"
        step = f"MONOCHROME1: inverted ({where})"
        return (*told, step) if self.table is not None else (step, *told)


def amounts_of(dataset: "Dataset", groups: "list[Dataset]", layout: Layout, name: str) -> Amounts:
    """Of one frame, from its functional groups or the header."""
    inverted = layout.photometric == "MONOCHROME1"
    if inverted and layout.floating:
        raise ImageError(f"{name}: MONOCHROME1 with floating-point pixels, which have no range to be inverted in")
    modality = word(dataset, "Modality", {"CT", "RTDOSE", "PT"})
    unit = next((unit for place in places(groups, TRANSFORM) if (unit := word(place, "RescaleType", UNITS))), "")
    if modality == "PT":
        unit = unit or word(dataset, "Units", UNITS)
    if modality == "RTDOSE" and (scale := number(dataset, "DoseGridScaling")) is not None:
        return Amounts(scale, 0.0, word(dataset, "DoseUnits", UNITS), said=True, inverted=inverted)
    if table := items(dataset, "ModalityLUTSequence"):
        return _tabled(dataset, table[0], inverted, name)
    slope, intercept = (first_numbers(groups, TRANSFORM, key, 1) for key in ("RescaleSlope", "RescaleIntercept"))
    if slope is None and intercept is None:
        return Amounts(unit="" if layout.floating else unit, inverted=inverted)
    if slope is not None and slope[0] == 0:
        raise ImageError(f"{name}: a rescale slope of 0 makes every pixel the same")
    # a CT says its unit only where it is not HU
    said = any(place.get("RescaleType") for place in places(groups, TRANSFORM))
    unit = unit or ("HU" if modality == "CT" and not said else "")
    return Amounts((slope or (1.0,))[0], (intercept or (0.0,))[0], unit, said=True, inverted=inverted)


def _tabled(dataset: "Dataset", item: "Dataset", inverted: bool, name: str) -> Amounts:
    descriptor = numbers(item, "LUTDescriptor", 3)
    data = item.get("LUTData")
    if descriptor is None or data is None:
        raise ImageError(f"{name}: the modality LUT has no descriptor or no data")
    entries, first, depth = (int(value) for value in descriptor)
    entries = entries or 1 << 16
    table = words_of(dataset, data) if isinstance(data, bytes) else np.atleast_1d(np.asarray(data, np.uint16))
    if len(table) < entries or not 8 <= depth <= 16:
        raise ImageError(
            f"{name}: a modality LUT of {plural(len(table), 'entry')} of {plural(depth, 'bit')}; its descriptor says {entries}"
        )
    unit = word(item, "ModalityLUTType", UNITS)
    return Amounts(unit=unit, table=table[:entries], first=first, depth=depth, inverted=inverted)


def real_world(groups: "list[Dataset]") -> tuple[str, ...]:
    """Real-world value maps are recorded, not applied: the modality's values are what models were trained on."""
    maps = next((found for group in groups if (found := items(group, REAL_WORLD))), [])
    told = []
    for one in maps[:3]:
        slope, intercept = number(one, "RealWorldValueSlope"), number(one, "RealWorldValueIntercept")
        what = "a table" if slope is None else f"slope {slope:.10g}, intercept {intercept or 0:.10g}"
        told.append(f"real-world value map: {what}, not applied")
    return tuple(told)


def padding_of(dataset: "Dataset", layout: Layout) -> tuple[int, int] | None:
    """The least and largest stored number that stands for 'no measurement'."""
    if layout.floating or (value := whole(dataset, "PixelPaddingValue")) is None:
        return None
    limit = whole(dataset, "PixelPaddingRangeLimit")
    # a negative number is written unsigned by some, and the other way round
    ends = [_as_stored(one, layout) for one in (value, value if limit is None else limit)]
    return min(ends), max(ends)


def _as_stored(value: int, layout: Layout) -> int:
    full = 1 << layout.allocated
    if layout.signed and value >= full // 2:
        return value - full
    return value + full if not layout.signed and value < 0 else value
