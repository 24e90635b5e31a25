"""Annotate drawings of volumes: titles and direction letters around a slice, crosshairs, scale bar and side panel."""

from collections.abc import Sequence
from functools import partial

import numpy as np

from camscope.render.color_bar import draw_color_bar, format_range_number
from camscope.render.draw_regions_and_outlines import draw_outline_legend_items, truncate_legend_line
from camscope.render.draw_text import draw_text
from camscope.render.image_encoding import DARK_BACKGROUND_COLOR, LIGHT_TEXT_COLOR, Color, RGBImage
from camscope.render.image_grid import WARNING_COLOR
from camscope.render.pad_and_stack_images import arrange_tiles, pad_image, paste_tile, stack_vertically
from camscope.render.volume_data import (
    AnatomicalView,
    EdgeLetters,
    Volume,
    VoxelIndex,
    find_xyz_of_array_axes,
    format_xyz_location,
)

ACCENT_COLOR: Color = (0, 229, 255)  # of the peak and the crosshair
DARK_ACCENT_COLOR: Color = (0, 96, 120)  # the same on the pale image under a signed map
CROSSHAIR_GAP_PIXELS = 9  # keeps the point itself free
RULER_LENGTHS_MM = (1, 2, 5, 10, 20, 50, 100, 200, 500)


draw_text_on_dark = partial(draw_text, text_color=LIGHT_TEXT_COLOR, background=DARK_BACKGROUND_COLOR)
pad_on_dark = partial(pad_image, background=DARK_BACKGROUND_COLOR)
arrange_on_dark = partial(arrange_tiles, background=DARK_BACKGROUND_COLOR)
stack_on_dark = partial(stack_vertically, background=DARK_BACKGROUND_COLOR)


def choose_font_size(width: int) -> int:
    """Return the font size in pixels for a drawing of `width` pixels."""
    return min(22, max(11, width // 26))


def compute_letter_margin(font_size: int) -> int:
    """Return the margin in pixels around a slice that leaves room for its direction letters."""
    return round(1.5 * font_size)


def add_title_and_edge_letters(
    plane: RGBImage,
    title: str,
    edge_letters: EdgeLetters,
    font_size: int,
    *,
    text_color: Color = LIGHT_TEXT_COLOR,
) -> RGBImage:
    """Add a title above a slice (h,w,3), and the letter of the patient direction at each edge."""
    margin, title_tile = compute_letter_margin(font_size), draw_text_on_dark(title, font_size, text_color=text_color)
    above, below = (margin, margin) if any(edge_letters) else (2, 4)
    out = pad_on_dark(plane, above, below, margin, margin)
    missing_width = max(0, margin + title_tile.shape[1] - out.shape[1])
    out = pad_on_dark(out, top=title_tile.shape[0], right=missing_width)
    paste_tile(out, title_tile, 0, margin - max(2, font_size // 4))
    top, left = out.shape[0] - plane.shape[0] - below, margin
    bottom, right = top + plane.shape[0], left + plane.shape[1]
    middle, center = top + plane.shape[0] / 2, left + plane.shape[1] / 2
    positions = (
        (top - margin / 2, center),
        (bottom + margin / 2, center),
        (middle, margin / 2),
        (middle, right + margin / 2),
    )
    for letter, (row, column) in zip(edge_letters, positions, strict=True):
        if letter:
            tile = draw_text_on_dark(letter, font_size)
            paste_tile(out, tile, round(row - tile.shape[0] / 2), round(column - tile.shape[1] / 2))
    return out


def compute_slice_row_and_column_in_frame(font_size: int, has_letters: bool) -> tuple[int, int]:
    """Return the row and column of the slice's top left pixel in the image that `add_title_and_edge_letters` returns."""
    margin = compute_letter_margin(font_size)
    return draw_text_on_dark("", font_size).shape[0] + (margin if has_letters else 2), margin


def draw_crosshair(plane: RGBImage, row: float, column: float, color: Color) -> RGBImage:
    """Draw a thin, half-transparent crosshair around a point. The point itself stays free."""
    out = plane.copy()
    i, j = min(int(row), plane.shape[0] - 1), min(int(column), plane.shape[1] - 1)
    for arm in (
        np.s_[: max(0, i - CROSSHAIR_GAP_PIXELS), j],
        np.s_[i + CROSSHAIR_GAP_PIXELS + 1 :, j],
        np.s_[i, : max(0, j - CROSSHAIR_GAP_PIXELS)],
        np.s_[i, j + CROSSHAIR_GAP_PIXELS + 1 :],
    ):
        out[arm] = np.rint(0.35 * out[arm] + 0.65 * np.asarray(color)).astype(np.uint8)
    return out


def format_slice_title(volume: Volume, view: AnatomicalView, voxel: VoxelIndex) -> str:
    """Format the title of a slice: view, index and position, such as `axial 17 · S 12.0 mm` or `axis 0: 17`."""
    separator = " " if view.name.isalpha() else ": "
    return f"{view.name}{separator}{voxel[view.normal_axis]}{format_slice_position(volume, voxel, view.normal_axis)}"


def get_middle_voxel(volume: Volume, view: AnatomicalView, slice_index: int) -> VoxelIndex:
    """Return the index of the voxel in the middle of a slice."""
    voxel = [length // 2 for length in volume.shape]
    voxel[view.normal_axis] = slice_index
    return voxel[0], voxel[1], voxel[2]


def format_slice_position(volume: Volume, voxel: VoxelIndex, normal_axis: int) -> str:
    """Format a slice's position in millimeters, such as ` · S 12.0 mm`.

    Without an affine, the position is the distance from the first slice. Without a voxel size, the text is empty.
    """
    if volume.affine_matrix is not None:
        world_axis = find_xyz_of_array_axes(volume.affine_matrix)[normal_axis]
        return f" · {format_xyz_location(volume.affine_matrix, voxel)[world_axis]} mm"
    return f" · {voxel[normal_axis] * volume.voxel_size[normal_axis]:.1f} mm" if volume.has_physical_size else ""


def draw_side_panel(
    volume: Volume, font_size: int, pixels_per_mm: float, height: int, text_lines: Sequence[str], *, bar: bool = True
) -> RGBImage:
    """Draw a side panel of about `height` rows: a color bar, text lines, a legend of masks, and a warning if there is one."""
    edge, gap = max(2, font_size // 4), font_size // 2
    panel_width = 12 * font_size
    pieces = []
    if volume.map_warning is not None:
        pieces.append(
            draw_text(volume.map_warning, font_size, width=panel_width, max_lines=4, background=WARNING_COLOR)
        )
    parts = [part for text in text_lines for part in text.split(" · ") if part]
    below = [draw_text_on_dark(truncate_legend_line(part), font_size) for part in parts]
    below += [pad_on_dark(key, left=edge) for key in draw_outline_legend_items(volume.outlines, font_size)]
    if volume.has_physical_size:
        below.append(pad_on_dark(draw_scale_bar(pixels_per_mm, panel_width // 2, font_size), left=edge))
    if bar and volume.alpha > 0:
        available_height = height - sum(piece.shape[0] + gap for piece in (*pieces, *below)) - 2 * gap
        color_bar = draw_color_bar(
            min(260, max(6 * font_size, available_height)),
            *volume.value_range,
            volume.colormap,
            width=font_size,
            font_size=font_size,
            text_color=LIGHT_TEXT_COLOR,
            background=DARK_BACKGROUND_COLOR,
        )
        pieces.append(pad_on_dark(color_bar, left=edge, bottom=gap // 2))
    top = np.full((1, panel_width, 3), DARK_BACKGROUND_COLOR, np.uint8)
    return stack_on_dark([top, *(pad_on_dark(piece, bottom=gap) for piece in (*pieces, *below))])


def draw_scale_bar(pixels_per_mm: float, width: int, font_size: int) -> RGBImage:
    """Draw a scale bar (h,w,3): a line labeled with its length in millimeters."""
    length = max((mm for mm in RULER_LENGTHS_MM if mm * pixels_per_mm <= width), default=RULER_LENGTHS_MM[0])
    pixels = max(2, round(length * pixels_per_mm))
    text = draw_text_on_dark(f"{length} mm", font_size)
    out, middle = pad_on_dark(text, left=pixels + 6), text.shape[0] // 2
    out[middle : middle + 2, :pixels] = LIGHT_TEXT_COLOR
    out[middle - 4 : middle + 6, [0, 1, pixels - 2, pixels - 1]] = LIGHT_TEXT_COLOR
    return out


def describe_orientation(view: AnatomicalView, volume: Volume) -> str:
    """Describe the orientation of a view, such as `top A, left R`. The text is empty if the directions are unknown."""
    edges = view.get_edge_letters(volume.axis_end_letters)
    return f"top {edges.top}, left {edges.left}" if edges.top and edges.left else ""


def describe_voxel(volume: Volume, voxel: VoxelIndex) -> list[str]:
    """Describe a voxel as lines of text: its map value, index and position."""
    value = float(volume.values[voxel])
    label = "peak" if voxel == volume.peak and not volume.map_warning else "value"
    descriptions = [f"{label} {format_range_number(value, value, value)}", f"voxel {voxel[0]}, {voxel[1]}, {voxel[2]}"]
    if volume.affine_matrix is not None:
        descriptions.append(f"{'  '.join(format_xyz_location(volume.affine_matrix, voxel))} mm")
    return descriptions


def describe_peak(volume: Volume) -> list[str]:
    """Describe the voxel with the strongest map value as lines of text.

    The list is empty if the map is invisible, empty or flat.
    """
    return describe_voxel(volume, volume.peak) if volume.alpha > 0 and not volume.map_warning else []
