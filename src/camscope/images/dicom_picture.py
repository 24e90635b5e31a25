"""Pixels of DICOM frames as amounts or colours, with the steps on the way and what is odd about them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from camscope.errors import ImageError
from camscope.images.dicom_colour import colours_of
from camscope.images.dicom_frames import frames_of
from camscope.images.dicom_layout import Layout
from camscope.images.dicom_values import Amounts, amounts_of, padding_of, real_world
from camscope.images.scan import not_finite
from camscope.images.tags import functional_groups, known_uid, word
from camscope.wording import plural

if TYPE_CHECKING:
    from pydicom.dataset import Dataset

Array = NDArray[Any]


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
