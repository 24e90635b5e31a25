"""From stored numbers to amounts: modality LUT or rescale, and the inversion of MONOCHROME1, each said in a step.

Pixels of DICOM frames as amounts or colours, with the steps on the way and what is odd about them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from camscope.errors import ImageError
from camscope.images.scans.dicom_pixels import Layout, colours_of, frames_of
from camscope.images.scans.dicom_tags import (
    UNITS,
    first_numbers,
    functional_groups,
    items,
    known_uid,
    number,
    numbers,
    places,
    whole,
    word,
    words_of,
)
from camscope.images.scans.scan import not_finite
from camscope.plurals import plural

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


@dataclass(frozen=True, eq=False)
class Picture:
    """Frames (M,H,W) float32, or (M,H,W,3) uint8 in colour.

    `before` and `after`: steps before and after those that the frames' `amounts` say; `padded` pixels are `padding`.
    """

    frames: Array
    before: tuple[str, ...]
    amounts: tuple[Amounts, ...] = ()
    after: tuple[str, ...] = ()
    padded: int = 0
    padding: float = 0.0

    @property
    def colour(self) -> bool:
        """Whether its values are colours."""
        return not self.amounts

    @property
    def unit(self) -> str:
        """That of all frames; '' where they differ, and of what was inverted."""
        units = {"" if amount.inverted else amount.unit for amount in self.amounts}
        return units.pop() if len(units) == 1 else ""

    def steps(self, what: str) -> tuple[str, ...]:
        """In order; `what`: a frame or a slice, where each has its own."""
        return (*self.before, *_said(self.amounts, what), *self.after)

    def flags(self) -> tuple[str, ...]:
        """What is odd about the values."""
        units = {amount.unit for amount in self.amounts}
        inverted = [amount.unit for amount in self.amounts if amount.inverted and amount.unit]
        odd = [f"MONOCHROME1 in {inverted[0]}: inverted, and so no longer {inverted[0]}"] if inverted else []
        if len(units) > 1:
            odd.append("the unit is not the same for all")
        if len({amount.inverted for amount in self.amounts}) > 1:
            odd.append("MONOCHROME1 and MONOCHROME2 side by side")
        if self.padded:
            odd.append(f"padding: {plural(self.padded, 'pixel')} of {self.padding:g} are outside what was measured")
        return (*odd, *not_finite(self.frames))


def picture_of(dataset: "Dataset", layout: Layout, wanted: Sequence[int], name: str) -> Picture:
    """The pixel pipeline of some frames of a file."""
    shape = (len(wanted), layout.rows, layout.columns)
    decoded = frames_of(dataset, layout, wanted, name)
    if layout.colour:
        convert, steps = colours_of(dataset, layout, name)
        colours = np.empty((*shape, 3), np.uint8)
        _fill(colours, (convert(array, space) for array, space in decoded), name)
        return Picture(colours, (*_stored(dataset, layout), *steps))
    amounts = _amounts(dataset, layout, wanted, name)
    padding, counts = padding_of(dataset, layout), []

    def converted() -> Iterator[Array]:
        for (array, _), amount in zip(decoded, amounts, strict=False):
            if padding is not None:
                counts.append(int(np.count_nonzero((array >= padding[0]) & (array <= padding[1]))))
            yield amount(array, layout)

    values = np.empty(shape, np.float32)
    _fill(values, converted(), name)
    said = float(amounts[0](np.array([[padding[0]]]), layout)[0, 0]) if padding else 0.0
    maps = real_world(functional_groups(dataset, wanted[:1])[0])
    return Picture(values, _stored(dataset, layout), tuple(amounts), maps, sum(counts), said)


def joined(pictures: Sequence[Picture], frames: Array) -> Picture:
    """Pictures of one frame each, as one of many, whose values are `frames`."""
    first = pictures[0]
    amounts = tuple(amount for picture in pictures for amount in picture.amounts)
    before, after = ([getattr(picture, when) for picture in pictures] for when in ("before", "after"))
    padding = next((picture.padding for picture in pictures if picture.padded), 0.0)
    padded = sum(picture.padded for picture in pictures)
    return replace(
        first,
        frames=frames,
        before=_shared(before),
        amounts=amounts,
        after=_shared(after),
        padded=padded,
        padding=padding,
    )


def _shared(every: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """Steps that all have as they are; of those that differ, that they do."""
    kinds: dict[str, set[str]] = {}
    for steps in every:
        for step in steps:
            kinds.setdefault(step.split(":")[0], set()).add(step)
    if len(set(every)) == 1:
        return every[0]
    return tuple(
        min(said) if len(said) == 1 else f"{kind}: not the same for all slices" for kind, said in kinds.items()
    )


def _fill(array: Array, frames: Iterator[Array], name: str) -> None:
    count = 0
    for frame in frames:
        if frame.shape != array.shape[1:]:
            raise ImageError(f"{name}: frame {count} was decoded to {frame.shape}; the header says {array.shape[1:]}")
        array[count] = frame
        count += 1
    if count < len(array):
        raise ImageError(f"{name}: {plural(count, 'frame')} of pixels; the header says {len(array)}")


def _amounts(dataset: "Dataset", layout: Layout, wanted: Sequence[int], name: str) -> list[Amounts]:
    if "PerFrameFunctionalGroupsSequence" not in dataset:
        return [amounts_of(dataset, functional_groups(dataset, [0])[0], layout, name)] * len(wanted)
    return [amounts_of(dataset, groups, layout, name) for groups in functional_groups(dataset, wanted)]


def _said(amounts: Sequence[Amounts], what: str) -> tuple[str, ...]:
    """Their steps where all have the same, else the range of what differs."""
    every = {amount.steps(): None for amount in amounts}
    if len(every) < 2:
        return next(iter(every), ())
    slopes, intercepts = ({getattr(amount, key) for amount in amounts} for key in ("slope", "intercept"))
    others = {step: None for steps in every for step in steps if not step.startswith("rescale")}
    rescale = f"rescale: each {what} its own, slope {_range(slopes)}, intercept {_range(intercepts)}"
    return (*others, rescale)


def _range(values: set[float]) -> str:
    ends = sorted({min(values), max(values)})
    return "..".join(f"{end:.10g}" for end in ends)


def _stored(dataset: "Dataset", layout: Layout) -> tuple[str, ...]:
    kind = "floating point" if layout.floating else "signed" if layout.signed else "unsigned"
    syntax = dataset.file_meta.TransferSyntaxUID
    name = known_uid(syntax)
    decoded = (f"decoded: {name}",) if name and syntax.is_compressed else ()
    lossy = (
        ("lossy: the image was once compressed with loss",) if word(dataset, "LossyImageCompression", {"01"}) else ()
    )
    return (*decoded, *lossy, f"stored: {layout.stored} of {plural(layout.allocated, 'bit')}, {kind}")
