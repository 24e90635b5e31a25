"""Draw a volume with its map: three slices through a voxel, slices side by side, or maximum projections."""

from typing import Literal

import numpy as np

from camscope.errors import InputError
from camscope.render.animation import MAX_FRAMES, choose_even_indices
from camscope.render.colors import DIVERGING
from camscope.render.draw_slice import draw_slice, draw_slice_overlay
from camscope.render.image_encoding import (
    DARK_BACKGROUND_COLOR,
    LIGHT_TEXT_COLOR,
    RGBImage,
    Values,
    check_image_height,
    resize_to_fit,
)
from camscope.render.pad_and_stack_images import pad_image
from camscope.render.volume_annotations import (
    ACCENT_COLOR,
    DARK_ACCENT_COLOR,
    add_title_and_edge_letters,
    arrange_on_dark,
    choose_font_size,
    compute_letter_margin,
    compute_slice_row_and_column_in_frame,
    describe_orientation,
    describe_peak,
    describe_voxel,
    draw_crosshair,
    draw_side_panel,
    draw_text_on_dark,
    format_slice_position,
    format_slice_title,
    get_middle_voxel,
    pad_on_dark,
    stack_on_dark,
)
from camscope.render.volume_data import AnatomicalView, Volume, VoxelIndex

MIN_HEIGHT_WITH_TEXT = 240  # below this, text would leave no room for the planes
EDGE_PIXELS = 8


def draw_planes(
    volume: Volume,
    voxel_index: tuple[int, int, int] | None = None,
    *,
    size: int | None = None,
    height: int | None = None,
    caption: str = "",
    bar: bool = True,
) -> RGBImage:
    """Draw three orthogonal slices of a volume (D,H,W). The slices meet in one voxel.

    If the volume has `axis_letters` or an `affine`, the slices are axial, coronal and sagittal as in radiology: the
    patient's right is at the left, and the front at the top or left. Otherwise the slices are along axis 0, 1 and 2. Slices
    are numbered from 0.

    Args:
        volume: The volume with its map.
        voxel_index: (d, row, column). Default: the voxel with the strongest map value.
        size: Pixels of the volume's longest side.
        height: Rows of the whole drawing, instead of `size`.
        caption: Text to show.
        bar: Whether to draw the color bar and the value as a number.

    Returns:
        (h,w,3) uint8.

    >>> volume = Volume(np.zeros((4, 8, 8), np.uint8), np.random.rand(4, 8, 8))
    >>> draw_planes(volume, size=32).shape[2]
    3

    """
    if height is not None:
        check_image_height("height", height)
    voxel, pixels_per_mm = volume.resolve_voxel(voxel_index), volume.choose_pixels_per_mm(size)
    if height is not None and height < MIN_HEIGHT_WITH_TEXT:
        return _draw_bare_planes(volume, voxel, height)
    font_size = choose_font_size(round(pixels_per_mm * max(volume.extent_mm)) if height is None else height // 2)
    pixels_per_mm = pixels_per_mm if height is None else _compute_pixels_per_mm(volume, height, font_size)
    first, second, third = (
        add_title_and_edge_letters(
            _draw_plane_with_crosshair(volume, view, voxel, pixels_per_mm),
            format_slice_title(volume, view, voxel),
            view.get_edge_letters(volume.axis_end_letters),
            font_size,
        )
        for view in volume.views
    )
    title_height = draw_text_on_dark("", font_size).shape[0]
    text_lines = [caption, *(describe_voxel(volume, voxel) if bar and volume.alpha > 0 else [])]
    side_panel = draw_side_panel(volume, font_size, pixels_per_mm, first.shape[0] - title_height, text_lines, bar=bar)
    side_panel = pad_on_dark(side_panel, top=title_height, left=compute_letter_margin(font_size) - font_size // 4)
    composed = arrange_on_dark([[first, side_panel], [second, third]])
    composed = pad_on_dark(composed, top=font_size // 2, bottom=font_size // 2, right=font_size // 2)
    return composed if height is None else resize_to_fit(composed, height)


def _draw_bare_planes(volume: Volume, voxel: VoxelIndex, height: int) -> RGBImage:
    """Draw three slices (height,w,3) without text. This is for drawings that are too small for text."""
    pixels_per_mm = (height - EDGE_PIXELS) / sum(
        volume.get_slice_height_and_width_mm(view)[0] for view in volume.views[:2]
    )
    first, second, third = (_draw_plane_with_crosshair(volume, view, voxel, pixels_per_mm) for view in volume.views)
    return resize_to_fit(arrange_on_dark([[first], [second, third]], EDGE_PIXELS // 2), height)


def _compute_pixels_per_mm(volume: Volume, height: int, font_size: int) -> float:
    """Return the scale in pixels per millimeter at which two annotated slices, stacked vertically, fill `height` rows."""
    has_letters = volume.axis_end_letters is not None
    annotation_rows = 2 * compute_slice_row_and_column_in_frame(font_size, has_letters=has_letters)[0] + font_size
    annotation_rows += 2 * (compute_letter_margin(font_size) if has_letters else 4)
    rows = sum(volume.get_slice_height_and_width_mm(view)[0] for view in volume.views[:2])
    return max(height / 4, height - annotation_rows) / rows


def _draw_plane_with_crosshair(
    volume: Volume, view: AnatomicalView, voxel: VoxelIndex, pixels_per_mm: float
) -> RGBImage:
    plane = draw_slice(volume, view, voxel[view.normal_axis], pixels_per_mm)
    ratio = np.divide(plane.shape[:2], (volume.shape[view.row_axis], volume.shape[view.column_axis]))
    row, column = np.multiply(view.get_row_and_column_of_voxel(voxel, volume.shape), ratio)
    is_pale = volume.colormap == DIVERGING and volume.alpha > 0
    return draw_crosshair(plane, row, column, DARK_ACCENT_COLOR if is_pale else ACCENT_COLOR)


MAX_GRID_WIDTH = 1200  # default


def draw_slices(
    volume: Volume,
    axis: int | str | None = None,
    *,
    n_slices: int = MAX_FRAMES,
    columns: int | None = None,
    size: int | None = None,
    caption: str = "",
) -> RGBImage:
    """Draw evenly spaced slices of a volume (D,H,W) along an axis. A frame marks the slice with the strongest map value.

    Slices are numbered from 0.

    Args:
        volume: The volume with its map.
        axis: 0, 1, 2, or "axial", "coronal", "sagittal" where the volume's axes are known. Default: the first or the axial
            one.
        n_slices: Number of slices.
        columns: Slices side by side. Default: as many as leave few cells empty.
        size: Pixels of a slice's longer side.
        caption: Text to show.

    Returns:
        (h,w,3) uint8.

    Raises:
        InputError: `n_slices` is below 1, or the axis is unknown.

    >>> volume = Volume(np.zeros((4, 8, 8), np.uint8), np.random.rand(4, 8, 8))
    >>> draw_slices(volume, 0, n_slices=2, size=32).shape[2]
    3

    """
    if n_slices < 1:
        raise InputError(f"n_slices={n_slices}: expected at least 1 slice")
    view = volume.get_view(axis)
    slice_indices = choose_even_indices(volume.shape[view.normal_axis], n_slices, volume.peak[view.normal_axis])
    height, width = volume.get_slice_height_and_width_mm(view)
    columns = min(columns or _choose_n_slice_columns(len(slice_indices), height / width), len(slice_indices))
    if size is not None:
        check_image_height("size", size)
        pixels_per_mm = size / max(height, width)
    else:
        pixels_per_mm = min(volume.choose_pixels_per_mm(None), MAX_GRID_WIDTH / columns / width)
    font_size = choose_font_size(round(0.4 * columns * pixels_per_mm * width))
    cells = [_draw_slice_cell(volume, view, slice_index, pixels_per_mm, font_size) for slice_index in slice_indices]
    grid = arrange_on_dark([cells[start : start + columns] for start in range(0, len(cells), columns)], font_size // 2)
    orientation = " · ".join(filter(None, (view.name, describe_orientation(view, volume))))
    text_lines = [caption, *describe_peak(volume), orientation]
    side_panel = draw_side_panel(volume, font_size, pixels_per_mm, min(440, grid.shape[0]), text_lines)
    return pad_on_dark(
        arrange_on_dark([[grid, pad_on_dark(side_panel, left=font_size)]]), top=font_size, left=font_size
    )


def _draw_slice_cell(
    volume: Volume, view: AnatomicalView, slice_index: int, pixels_per_mm: float, font_size: int
) -> RGBImage:
    """Draw a slice with its number and position. The slice of the peak has a colored border."""
    plane = draw_slice(volume, view, slice_index, pixels_per_mm)
    is_peak = slice_index == volume.peak[view.normal_axis] and not volume.map_warning
    plane = pad_image(plane, 2, 2, 2, 2, background=ACCENT_COLOR if is_peak else DARK_BACKGROUND_COLOR)
    position = format_slice_position(volume, get_middle_voxel(volume, view, slice_index), view.normal_axis)
    text_color = ACCENT_COLOR if is_peak else LIGHT_TEXT_COLOR
    return stack_on_dark([draw_text_on_dark(f"{slice_index}{position}", font_size, text_color=text_color), plane])


def _choose_n_slice_columns(n_slices: int, height_to_width: float) -> int:
    """Return the number of columns for a grid of slices. The grid is about 1.5 times as wide as it is high."""
    best = max(1, min(n_slices, round((n_slices * 1.5 * height_to_width) ** 0.5)))
    candidates = range(max(1, best - 1), min(n_slices, best + 1) + 1)
    return min(candidates, key=lambda columns: (-n_slices % columns, abs(columns - best), -columns))


def draw_projection(
    volume: Volume,
    axis: int | str | None = None,
    *,
    background: Literal["mean", "max"] = "mean",
    size: int | None = None,
    caption: str = "",
) -> RGBImage:
    """Project a volume (D,H,W) along an axis. Draw the maximum of the map on the projected image.

    In a signed map, the value of the largest magnitude is drawn with its sign. A pixel is covered if any voxel on its line
    of sight is covered.

    Args:
        volume: The volume with its map.
        axis: As in `draw_slices`. Default: all three projections, side by side at one scale.
        background: Projection of the image along the axis: "mean" or "max".
        size: Pixels of the volume's longest side.
        caption: Text to show.

    Returns:
        (h,w,3) uint8.

    Raises:
        InputError: `background` or `axis` is unknown.

    >>> volume = Volume(np.zeros((4, 8, 8), np.uint8), np.random.rand(4, 8, 8))
    >>> draw_projection(volume, 0, size=32).shape[2]
    3

    """
    if background not in ("mean", "max"):
        raise InputError(f"background={background!r}: expected 'mean' or 'max'")
    pixels_per_mm = volume.choose_pixels_per_mm(size)
    views = volume.views if axis is None else (volume.get_view(axis),)
    font_size = choose_font_size(
        round(pixels_per_mm * max(max(volume.get_slice_height_and_width_mm(view)) for view in views))
    )
    cells = [_draw_projected_view(volume, view, background, pixels_per_mm, font_size) for view in views]
    max_height = max(cell.shape[0] for cell in cells)
    side_panel = draw_side_panel(volume, font_size, pixels_per_mm, max_height, [caption, *describe_peak(volume)])
    return pad_on_dark(arrange_on_dark([[*cells, side_panel]], font_size // 2), top=font_size // 2)


def project_strongest(values: Values, axis: int, colormap: str) -> Values:
    """Return the maxima of a map (D,H,W) along an axis.

    For the diverging colormap, return the value of the largest magnitude with its sign.
    """
    if colormap != DIVERGING:
        return np.asarray(values.max(axis))
    high, low = values.max(axis), values.min(axis)
    return np.asarray(np.where(high >= -low, high, low))


def _draw_projected_view(
    volume: Volume, view: AnatomicalView, background: str, pixels_per_mm: float, font_size: int
) -> RGBImage:
    """Draw the strongest values along an axis over a projection of the volume."""
    gray = view.extract_slices(volume.image_as_uint8)
    background_plane = gray.max(0) if background == "max" else _stretch_contrast(gray.mean(0, dtype=np.float32))
    covered = None if volume.covered is None else np.asarray(view.extract_slices(volume.covered).any(0))
    masks = [outline._replace(mask=np.asarray(view.extract_slices(outline.mask).any(0))) for outline in volume.outlines]
    values = project_strongest(view.extract_slices(volume.colored_values), 0, volume.colormap)
    plane = draw_slice_overlay(volume, view, background_plane, values, covered, masks, pixels_per_mm)
    return add_title_and_edge_letters(
        plane, f"{view.name}, maximum", view.get_edge_letters(volume.axis_end_letters), font_size
    )


def _stretch_contrast(image: Values) -> RGBImage:
    """Stretch the contrast of an image to the full range from black to white."""
    low, high = float(image.min()), float(image.max())
    return np.asarray(np.rint((image - low) * (255 / (high - low) if high > low else 0)), np.uint8)
