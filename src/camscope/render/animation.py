"""Animate a volume slice by slice as a GIF or WebP, and draw selected frames of a video or volume in a grid."""

import io
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from camscope.errors import ImageError, InputError
from camscope.plurals import plural
from camscope.render.colors import colorize, get_colormap_minimum, overlay
from camscope.render.draw_slice import draw_slice
from camscope.render.image_encoding import DARK_BACKGROUND_COLOR, LIGHT_TEXT_COLOR, RGBImage, require_rgb_image
from camscope.render.image_grid import draw_image_grid
from camscope.render.volume_annotations import (
    ACCENT_COLOR,
    add_title_and_edge_letters,
    arrange_on_dark,
    choose_font_size,
    describe_peak,
    draw_side_panel,
    format_slice_title,
    get_middle_voxel,
    pad_on_dark,
)
from camscope.render.volume_data import AnatomicalView, Volume

if TYPE_CHECKING:
    from PIL.Image import Image


ProgressCallback = Callable[[int, int], None]

ANIMATION_FORMATS: dict[str, tuple[str, dict[str, Any]]] = {
    ".gif": ("GIF", {"optimize": False, "disposal": 1}),
    ".webp": ("WEBP", {"quality": 90, "method": 4}),
}
MIN_FRAME_MILLISECONDS = 20  # browsers slow down shorter frames
MAX_PALETTE_FRAMES = 24  # frames from which a GIF's palette is computed
N_GRAY_LEVELS, N_RAMP_COLORS = 52, 64  # of a GIF's 256 colors: gray levels, and steps of the colormap
MAX_GRAY_CHANNEL_SPREAD = 6  # colors whose channels differ less count as gray
MAX_ANIMATION_FRAMES = 96  # of an animation
ANIMATION_SECONDS = 8.0
MAX_ANIMATION_SIDE_PIXELS = 360  # default, as every slice is in the file


def animate_volume(
    volume: Volume,
    axis: int | str | None = None,
    *,
    seconds: float = ANIMATION_SECONDS,
    suffix: str = ".gif",
    max_frames: int = MAX_ANIMATION_FRAMES,
    size: int | None = None,
    caption: str = "",
    on_progress: ProgressCallback | None = None,
) -> bytes:
    """Encode a looping animation that moves through the slices of a volume (D,H,W) along an axis.

    It shows every slice, or `max_frames` evenly spaced slices. The slice of the peak is included, and its number is
    highlighted. All frames have one color scale, and a side panel with the color bar, the peak and the legend.

    Args:
        volume: The volume with its map.
        axis: As in `draw_slices`.
        seconds: Duration of one loop.
        suffix: ".gif" or ".webp".
        max_frames: Largest number of slices.
        size: As in `draw_planes`.
        caption: As in `draw_planes`.
        on_progress: As in `encode_animation`.

    Returns:
        The bytes of the file.

    >>> volume = Volume(np.zeros((2, 8, 8), np.uint8), np.random.rand(2, 8, 8))
    >>> animate_volume(volume, axis=0, seconds=1)[:3]
    b'GIF'

    """
    view = volume.get_view(axis)
    slice_indices = choose_even_indices(volume.shape[view.normal_axis], max_frames, volume.peak[view.normal_axis])
    pixels_per_mm = volume.choose_pixels_per_mm(size)
    if not size:
        pixels_per_mm = min(pixels_per_mm, MAX_ANIMATION_SIDE_PIXELS / max(volume.extent_mm))
    font_size = choose_font_size(round(pixels_per_mm * max(volume.get_slice_height_and_width_mm(view))))
    height = round(pixels_per_mm * volume.get_slice_height_and_width_mm(view)[0])
    side_panel = draw_side_panel(volume, font_size, pixels_per_mm, height, [caption, *describe_peak(volume)])
    frames = (_draw_animation_frame(volume, view, i, pixels_per_mm, font_size, side_panel) for i in slice_indices)
    ramp = colorize(np.linspace(get_colormap_minimum(volume.colormap), 1, N_RAMP_COLORS)[None], volume.colormap)
    outline_colors = [outline.color for outline in volume.outlines]
    annotation_colors = [DARK_BACKGROUND_COLOR, LIGHT_TEXT_COLOR, ACCENT_COLOR, *outline_colors]
    palette_colors = np.concatenate([ramp[0], np.array(annotation_colors, np.uint8)])
    return encode_animation(
        frames,
        seconds=seconds,
        suffix=suffix,
        n_frames=len(slice_indices),
        palette_colors=palette_colors,
        on_progress=on_progress,
    )


def encode_animation(
    frames: Sequence[RGBImage] | Iterator[RGBImage],
    *,
    seconds: float = ANIMATION_SECONDS,
    suffix: str = ".gif",
    n_frames: int | None = None,
    palette_colors: RGBImage | None = None,
    on_progress: ProgressCallback | None = None,
) -> bytes:
    """Encode images (H,W,3) of equal size as a looping `.gif` or `.webp` animation.

    All frames of a GIF share one palette of 256 colors without dithering, so that a value has the same color everywhere.

    Args:
        frames: The images, in a sequence or an iterator.
        seconds: Duration of one loop.
        suffix: ".gif" or ".webp".
        n_frames: Number of frames, which an iterator needs. Default: the length of the sequence.
        palette_colors: Colors (…,3) uint8 that the palette must include, in addition to grays. Default: no such colors.
        on_progress: Called as `on_progress(done, count)` after each frame.

    Returns:
        The bytes of the file.

    Raises:
        InputError: The suffix is unknown, or the images differ in size.
        ImageError: The images are too large for the format.

    >>> encode_animation([np.zeros((8, 8, 3), np.uint8), np.full((8, 8, 3), 255, np.uint8)])[:3]
    b'GIF'

    """
    from PIL import Image

    if suffix.lower() not in ANIMATION_FORMATS:
        raise InputError(f"there is no animation format {suffix!r}; choose from {', '.join(ANIMATION_FORMATS)}")
    count = len(frames) if isinstance(frames, Sequence) else n_frames
    checked_frames: list[RGBImage] = []
    for frame in frames:
        checked_frames.append(require_rgb_image(frame))
        if on_progress is not None:
            on_progress(len(checked_frames), len(checked_frames) if count is None else count)
    n_sizes = len({frame.shape for frame in checked_frames})
    if n_sizes != 1:
        received = f"{plural(len(checked_frames), 'image')} of {plural(n_sizes, 'size')}"
        raise InputError(f"{received}; expected images of equal size")
    format_name, options = ANIMATION_FORMATS[suffix.lower()]
    if format_name == "GIF":
        images = _quantize_frames(
            checked_frames, np.zeros((0, 3), np.uint8) if palette_colors is None else palette_colors
        )
    else:
        images = [Image.fromarray(frame) for frame in checked_frames]
    durations = _compute_frame_durations(len(images), seconds)
    stream = io.BytesIO()
    try:
        images[0].save(
            stream, format_name, save_all=True, append_images=images[1:], duration=durations, loop=0, **options
        )
    except (OSError, ValueError) as error:
        received = f"{plural(len(images), 'image')} {checked_frames[0].shape}"
        raise ImageError(f"{received} cannot be written in the format {format_name}: {error}") from error
    return stream.getvalue()


def _compute_frame_durations(n_frames: int, seconds: float) -> list[int]:
    """Return the duration of each frame in milliseconds, as multiples of 10 ms. Together they last one loop."""
    if not 0 < seconds < np.inf:
        raise InputError(f"seconds={seconds}: expected a positive number of seconds")
    ends = np.rint(np.linspace(0, 100 * seconds, n_frames + 1)).astype(int).tolist()
    return [max(MIN_FRAME_MILLISECONDS, 10 * (end - start)) for start, end in pairwise(ends)]


def _quantize_frames(frames: Sequence[RGBImage], palette_colors: RGBImage) -> "list[Image]":
    """Quantize all frames to one palette of 256 colors: gray levels, `palette_colors`, and the most important other colors."""
    from PIL import Image

    levels = np.rint(np.linspace(0, 255, N_GRAY_LEVELS)).astype(np.uint8)
    grays = levels[:, None].repeat(3, axis=1)
    fixed_colors = np.unique(np.concatenate([grays, palette_colors.reshape(-1, 3)]), axis=0)[:255]
    n_free = 256 - len(fixed_colors)
    samples = np.unique(np.linspace(0, len(frames) - 1, min(MAX_PALETTE_FRAMES, len(frames))).round().astype(int))
    # each color once: otherwise the many dark pixels would dominate the few bright ones
    colors = _collect_chromatic_colors([frames[i] for i in samples])
    quantized = Image.fromarray(colors[None]).quantize(n_free, method=Image.Quantize.MEDIANCUT, kmeans=1)
    free_colors = np.asarray(quantized.getpalette(), np.uint8).reshape(-1, 3)[:n_free]
    palette = Image.new("P", (1, 1))
    palette.putpalette(np.concatenate([fixed_colors, free_colors]).tobytes())
    return [Image.fromarray(frame).quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]


def _collect_chromatic_colors(frames: Sequence[RGBImage]) -> RGBImage:
    """Return the distinct colors (M,3) in the frames, without grays. If only grays occur, return black."""
    present = np.zeros(1 << 24, np.bool_)
    for frame in frames:
        present[frame.astype(np.uint32) @ np.array([1 << 16, 1 << 8, 1], np.uint32)] = True
    numbers = np.flatnonzero(present)
    colors = np.stack([numbers >> 16, numbers >> 8 & 255, numbers & 255], axis=1).astype(np.uint8)
    chromatic = colors[np.ptp(colors, axis=1) > MAX_GRAY_CHANNEL_SPREAD]
    return chromatic if len(chromatic) else np.zeros((1, 3), np.uint8)


def _draw_animation_frame(
    volume: Volume, view: AnatomicalView, slice_index: int, pixels_per_mm: float, font_size: int, side_panel: RGBImage
) -> RGBImage:
    """Draw one frame: a slice with its title, and the side panel. The slice of the peak is highlighted."""
    is_peak = slice_index == volume.peak[view.normal_axis] and not volume.map_warning
    plane = add_title_and_edge_letters(
        draw_slice(volume, view, slice_index, pixels_per_mm),
        format_slice_title(volume, view, get_middle_voxel(volume, view, slice_index)),
        view.get_edge_letters(volume.axis_end_letters),
        font_size,
        text_color=ACCENT_COLOR if is_peak else LIGHT_TEXT_COLOR,
    )
    panel = pad_on_dark(side_panel, top=2 * font_size, left=font_size)
    return arrange_on_dark([[plane, panel]])


MAX_FRAMES = 12


def choose_frames(values: NDArray[np.floating], max_frames: int = MAX_FRAMES) -> list[int]:
    """Choose evenly spaced frames of a map (D,H,W), including the frame with the largest value. Return their indices.

    Args:
        values: (D,H,W) the map.
        max_frames: Largest number of frames.

    Returns:
        Indices along the first axis, in ascending order.

    >>> choose_frames(np.zeros((3, 1, 1))), len(choose_frames(np.zeros((100, 1, 1))))
    ([0, 1, 2], 12)

    """
    return choose_even_indices(len(values), max_frames, int(values.reshape(len(values), -1).max(1).argmax()))


def choose_even_indices(length: int, max_count: int, peak_index: int) -> list[int]:
    """Return at most `max_count` evenly spaced indices below `length`. `peak_index` takes the place of the nearest index."""
    frames = np.unique(np.linspace(0, length - 1, min(max_count, length)).round().astype(int))
    frames[np.abs(frames - peak_index).argmin()] = peak_index
    return [int(frame) for frame in frames]


def draw_frames(
    images: NDArray[np.uint8],
    values: NDArray[np.floating],
    *,
    alpha: float = 0.85,
    colormap: str = "inferno",
    columns: int | None = None,
    height: int = 192,
) -> RGBImage:
    """Draw a grid of frames (D,H,W,3), overlaid with a map (D,H,W) in 0..1. `choose_frames` selects the frames.

    Args:
        images: (D,H,W,3) uint8 frames.
        values: (D,H,W) in 0..1, or -1..1 for the diverging colormap.
        alpha: Opacity of the strongest value.
        colormap: One of COLORMAPS.
        columns: Frames in a row. Default: as many as leave few cells empty.
        height: Rows of each frame.

    Returns:
        (h,w,3) uint8.

    Raises:
        InputError: The frames and the map differ in size.

    >>> draw_frames(np.zeros((3, 8, 8, 3), np.uint8), np.random.rand(3, 8, 8), height=32).shape[2]
    3

    """
    if images.shape[:3] != values.shape or images.ndim != 4:
        raise InputError(f"the frames are {images.shape} and the map is {values.shape}; expected (D,H,W,3) and (D,H,W)")
    frames = choose_frames(values)
    overlays = [overlay(np.ascontiguousarray(images[i]), values[i], alpha=alpha, colormap=colormap) for i in frames]
    return draw_image_grid(overlays, list(map(str, frames)), columns=columns, height=height)
