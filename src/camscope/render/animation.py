"""A way through a volume, slice by slice, as an animated GIF or WebP.

Frames: slices of a volume, or moments of a video, each with its part of the map.
"""

import io
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from camscope.errors import ImageError, InputError
from camscope.plurals import plural
from camscope.render.anatomical_axes import View
from camscope.render.colormap import colourise, lower_bound
from camscope.render.image_grid import padded, panel
from camscope.render.overlay import overlay
from camscope.render.rgb_image import DARK_PAPER, LIGHT_INK, Picture, checked_picture
from camscope.render.volume import Volume, drawn
from camscope.render.volume_annotations import ACCENT, framed, letter_size, middle, numbered, of_the_peak, put, told

if TYPE_CHECKING:
    from PIL.Image import Image


Watch = Callable[[int, int], None]

ANIMATED: dict[str, tuple[str, dict[str, Any]]] = {
    ".gif": ("GIF", {"optimize": False, "disposal": 1}),
    ".webp": ("WEBP", {"quality": 90, "method": 4}),
}
SHORTEST = 20  # milliseconds a frame: what is shorter, browsers show slower
SAMPLED = 24  # frames that a GIF's one palette is made of
GREYS, RAMP = 52, 64  # of a GIF's 256 colours: levels of grey, and steps of the map's own colours
NEUTRAL = 6  # colours whose channels differ less are greys
FRAMES = 96  # of a longer way
SECONDS = 8.0
LARGEST = 360  # pixels of the longest side, unless asked for: every slice is in the file


def animate(
    volume: Volume,
    axis: int | str | None = None,
    *,
    seconds: float = SECONDS,
    suffix: str = ".gif",
    most: int = FRAMES,
    size: int | None = None,
    caption: str = "",
    watch: Watch | None = None,
) -> bytes:
    """(D,H,W) -> the bytes of an animation through the slices along an axis, again and again, `seconds` a round.

    `axis`: as in `slices`. Every slice, or `most` of them evenly spread, the peak's among them: its number is coloured.
    One scale; the bar, the peak and the legend stay beside it. `size`, `caption`: as in `planes`; `watch`: as in `animation`.
    """
    view = volume.view(axis)
    numbers = evenly(volume.shape[view.normal], most, volume.peak[view.normal])
    factor = volume.finest(size) if size else min(volume.finest(None), LARGEST / max(volume.extent))
    letters = letter_size(round(factor * max(volume.millimetres(view))))
    beside = _beside(volume, view, factor, letters, caption)
    made = (_frame(volume, view, number, factor, letters, beside) for number in numbers)
    ramp = colourise(np.linspace(lower_bound(volume.colormap), 1, RAMP)[None], volume.colormap)
    marks = np.array([[DARK_PAPER, LIGHT_INK, ACCENT, *(colour for _, colour, _ in volume.outlines)]], np.uint8)
    keep = np.concatenate([ramp, marks], axis=1)
    return animation(made, seconds=seconds, suffix=suffix, count=len(numbers), keep=keep, watch=watch)


def animation(
    pictures: Sequence[Picture] | Iterator[Picture],
    *,
    seconds: float = SECONDS,
    suffix: str = ".gif",
    count: int | None = None,
    keep: Picture | None = None,
    watch: Watch | None = None,
) -> bytes:
    """Pictures (H,W,3) of one size -> the bytes of an animated `.gif` or `.webp`, again and again, `seconds` a round.

    A GIF has one palette, of 256 colours that all its pictures have in common; nothing is dithered, so that a value's colour
    is the same everywhere. `keep` (…,3): colours that it must have. `count`: of an iterator's pictures. `watch(done, count)`:
    called after each picture.
    """
    if suffix.lower() not in ANIMATED:
        raise InputError(f"no animation format {suffix!r}; choose from {', '.join(ANIMATED)}")
    kept = list(_watched(pictures, len(pictures) if isinstance(pictures, Sequence) else count, watch))
    if not kept or len({one.shape for one in kept}) > 1:
        raise InputError(
            f"{plural(len(kept), 'picture')} of {plural(len({one.shape for one in kept}), 'size')}; expected some, of one size"
        )
    kind, options = ANIMATED[suffix.lower()]
    images = (
        _in_one_palette(kept, np.zeros((0, 3), np.uint8) if keep is None else keep) if kind == "GIF" else _images(kept)
    )
    stream = io.BytesIO()
    try:
        first, *rest = images
        first.save(
            stream, kind, save_all=True, append_images=rest, duration=_durations(len(kept), seconds), loop=0, **options
        )
    except (OSError, ValueError) as error:
        raise ImageError(
            f"{plural(len(kept), 'picture')} {kept[0].shape} cannot be written as {kind}: {error}"
        ) from error
    return stream.getvalue()


def _watched(
    pictures: Sequence[Picture] | Iterator[Picture], count: int | None, watch: Watch | None
) -> Iterator[Picture]:
    for done, picture in enumerate(pictures, 1):
        yield checked_picture(picture)
        if watch is not None:
            watch(done, done if count is None else count)


def _durations(count: int, seconds: float) -> list[int]:
    """Milliseconds of each frame, in the hundredths of a second that a GIF counts; together they are the round."""
    if not 0 < seconds < np.inf:
        raise InputError(f"seconds={seconds}: expected the seconds of a round")
    ends = np.rint(np.linspace(0, 100 * seconds, count + 1)).astype(int).tolist()
    return [max(SHORTEST, 10 * (end - start)) for start, end in pairwise(ends)]


def _images(pictures: Sequence[Picture]) -> "list[Image]":
    from PIL import Image

    return [Image.fromarray(one) for one in pictures]


def _in_one_palette(pictures: Sequence[Picture], keep: Picture) -> "list[Image]":
    """In 256 colours: greys, those to be kept, and what is best for all others, in pictures from all over the way."""
    from PIL import Image

    levels = np.rint(np.linspace(0, 255, GREYS)).astype(np.uint8)
    fixed = np.unique(np.concatenate([levels[:, None].repeat(3, axis=1), keep.reshape(-1, 3)]), axis=0)[:255]
    some = np.unique(np.linspace(0, len(pictures) - 1, min(SAMPLED, len(pictures))).round().astype(int))
    # each colour once: else the many dark pixels would leave nothing to the few hot ones
    mixed = _distinct([pictures[i] for i in some])
    found = Image.fromarray(mixed[None]).quantize(256 - len(fixed), method=Image.Quantize.MEDIANCUT, kmeans=1)
    others = np.asarray(found.getpalette(), np.uint8).reshape(-1, 3)[: 256 - len(fixed)]
    palette = Image.new("P", (1, 1))
    palette.putpalette(np.concatenate([fixed, others]).tobytes())
    return [Image.fromarray(one).quantize(palette=palette, dither=Image.Dither.NONE) for one in pictures]


def _distinct(pictures: Sequence[Picture]) -> Picture:
    """(M,3): the colours of pictures that are no greys, each once; black where all are."""
    present = np.zeros(1 << 24, np.bool_)
    for one in pictures:
        present[one.astype(np.uint32) @ np.array([1 << 16, 1 << 8, 1], np.uint32)] = True
    numbers = np.flatnonzero(present)
    colours = np.stack([numbers >> 16, numbers >> 8 & 255, numbers & 255], axis=1).astype(np.uint8)
    coloured = colours[np.ptp(colours, axis=1) > NEUTRAL]
    return coloured if len(coloured) else np.zeros((1, 3), np.uint8)


def _beside(volume: Volume, view: View, factor: float, letters: int, caption: str) -> Picture:
    return told(volume, letters, factor, round(factor * volume.millimetres(view)[0]), [caption, *of_the_peak(volume)])


def _frame(volume: Volume, view: View, number: int, factor: float, letters: int, beside: Picture) -> Picture:
    ink = ACCENT if number == volume.peak[view.normal] and not volume.warning else LIGHT_INK
    title = numbered(volume, view, middle(volume, view, number))
    plane = framed(drawn(volume, view, number, factor), title, view.edges(volume.letters), letters, ink=ink)
    left = plane.shape[1] + letters
    out = padded(
        plane,
        bottom=max(0, beside.shape[0] + 2 * letters - plane.shape[0]),
        right=letters + beside.shape[1],
        paper=DARK_PAPER,
    )
    put(out, beside, 2 * letters, left)
    return out


MOST = 12


def chosen_frames(values: NDArray[np.floating], most: int = MOST) -> list[int]:
    """(D,H,W) -> which of D frames to show: evenly spread, the one with the largest value among them.

    >>> chosen_frames(np.zeros((3, 1, 1))), len(chosen_frames(np.zeros((100, 1, 1))))
    ([0, 1, 2], 12)
    """
    return evenly(len(values), most, int(values.reshape(len(values), -1).max(1).argmax()))


def evenly(length: int, most: int, peak: int) -> list[int]:
    """Of so many frames at most `most`, evenly spread, one of them put where the peak is."""
    frames = np.unique(np.linspace(0, length - 1, min(most, length)).round().astype(int))
    frames[np.abs(frames - peak).argmin()] = peak
    return [int(frame) for frame in frames]


def frames(
    pictures: NDArray[np.uint8],
    values: NDArray[np.floating],
    *,
    alpha: float = 0.85,
    colormap: str = "inferno",
    covered: NDArray[np.bool_] | None = None,
    which: Sequence[int] | None = None,
    columns: int | None = None,
    height: int = 192,
) -> Picture:
    """(D,H,W,3) and (D,H,W) in 0..1 -> (h,w,3): the overlays of some frames side by side, numbered from 0.

    `which`: default those of `chosen_frames`. The values have one scale, so that frames can be compared.
    """
    if pictures.shape[:3] != values.shape or pictures.ndim != 4:
        raise InputError(f"frames are {pictures.shape} and the map {values.shape}; expected (D,H,W,3) and (D,H,W)")
    numbers = chosen_frames(values) if which is None else list(which)
    made = [
        overlay(
            np.ascontiguousarray(pictures[i]),
            values[i],
            alpha=alpha,
            colormap=colormap,
            covered=None if covered is None else covered[i],
        )
        for i in numbers
    ]
    return panel(made, [f"{i}" for i in numbers], columns=columns, height=height)
