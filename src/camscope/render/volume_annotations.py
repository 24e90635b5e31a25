"""Annotations on a dark background: framed planes with edge letters, crosshairs, and the side panel."""

from collections.abc import Sequence

import numpy as np

from camscope.render.anatomical_axes import AnatomicalView, find_world_axis, format_location
from camscope.render.colormap import DIVERGING
from camscope.render.image_grid import WARNING_COLOR, draw_color_bar, format_range_number, pad_image
from camscope.render.legend import draw_outline_keys, truncate_legend_line
from camscope.render.rgb_image import DARK_BACKGROUND_COLOR, LIGHT_TEXT_COLOR, Color, RGBImage
from camscope.render.text import draw_text
from camscope.render.volume import Volume, VoxelIndex

ACCENT_COLOR: Color = (0, 229, 255)  # of the peak and the crosshair
DARK_ACCENT_COLOR: Color = (0, 96, 120)  # the same on the pale image under a signed map
CROSSHAIR_GAP_PIXELS = 9  # keeps the point itself free
RULER_LENGTHS_MM = (1, 2, 5, 10, 20, 50, 100, 200, 500)


def draw_text_on_dark(
    text: str, font_size: int, *, text_color: Color = LIGHT_TEXT_COLOR, width: int | None = None, max_lines: int = 1
) -> RGBImage:
    """Draw text on the dark background."""
    return draw_text(
        text, font_size, text_color=text_color, background=DARK_BACKGROUND_COLOR, width=width, max_lines=max_lines
    )


def choose_font_size(width: int) -> int:
    """Return the font size in pixels for a drawing of this width."""
    return min(22, max(11, width // 26))


def compute_letter_margin(font_size: int) -> int:
    """Return the margin in pixels around a plane for its edge letters."""
    return round(1.5 * font_size)


def add_plane_frame(
    plane: RGBImage,
    title: str,
    edge_letters: tuple[str, str, str, str],
    font_size: int,
    *,
    text_color: Color = LIGHT_TEXT_COLOR,
) -> RGBImage:
    """Add a title above a plane (h,w,3), and letters at its four edges."""
    margin, title_tile = compute_letter_margin(font_size), draw_text_on_dark(title, font_size, text_color=text_color)
    has_letters = any(edge_letters)
    out = pad_image(
        plane,
        margin if has_letters else 2,
        margin if has_letters else 4,
        margin,
        margin,
        background=DARK_BACKGROUND_COLOR,
    )
    out = pad_image(
        out,
        top=title_tile.shape[0],
        right=max(0, margin + title_tile.shape[1] - out.shape[1]),
        background=DARK_BACKGROUND_COLOR,
    )
    paste_tile(out, title_tile, 0, margin - max(2, font_size // 4))
    top, left = out.shape[0] - plane.shape[0] - (margin if has_letters else 4), margin
    middle, center = top + plane.shape[0] / 2, left + plane.shape[1] / 2
    positions = (
        (top - margin / 2, center),
        (top + plane.shape[0] + margin / 2, center),
        (middle, margin / 2),
        (middle, left + plane.shape[1] + margin / 2),
    )
    for letter, (row, column) in zip(edge_letters, positions, strict=True):
        if letter:
            tile = draw_text_on_dark(letter, font_size)
            paste_tile(out, tile, round(row - tile.shape[0] / 2), round(column - tile.shape[1] / 2))
    return out


def compute_plane_corner(font_size: int, has_letters: bool) -> tuple[int, int]:
    """Return (row, column) of a plane's first pixel in its frame."""
    return draw_text_on_dark("", font_size).shape[0] + (
        compute_letter_margin(font_size) if has_letters else 2
    ), compute_letter_margin(font_size)


def paste_tile(out: RGBImage, tile: RGBImage, row: int, column: int) -> None:
    """Paste a tile in place, cropped at the borders."""
    row, column = max(0, row), max(0, column)
    target = out[row : row + tile.shape[0], column : column + tile.shape[1]]
    target[:] = tile[: target.shape[0], : target.shape[1]]


def draw_crosshair(plane: RGBImage, row: float, column: float, color: Color) -> RGBImage:
    """Draw thin half-transparent lines through a point, leaving the point itself free."""
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


def choose_accent_color(volume: Volume) -> Color:
    """Return the color of crosshairs and of the peak's slice that is visible on the volume's background."""
    return DARK_ACCENT_COLOR if volume.colormap == DIVERGING and volume.alpha > 0 else ACCENT_COLOR


def arrange_tiles(rows: Sequence[Sequence[RGBImage]], gap: int = 0) -> RGBImage:
    """Arrange images in rows and columns on the dark background, each at the top left of its cell."""
    widths = [max(cell.shape[1] for cell in column) + gap for column in zip(*rows, strict=True)]
    bands = []
    for row in rows:
        row_height = max(cell.shape[0] for cell in row) + gap
        cells = [
            pad_image(
                cell, bottom=row_height - cell.shape[0], right=width - cell.shape[1], background=DARK_BACKGROUND_COLOR
            )
            for cell, width in zip(row, widths, strict=True)
        ]
        bands.append(np.concatenate(cells, axis=1))
    return np.concatenate(bands)


def format_plane_title(volume: Volume, view: AnatomicalView, voxel: VoxelIndex) -> str:
    """Format a plane's name, number and position: `axial 17 · S 12.0 mm` or `axis 0: 17`."""
    separator = " " if view.name.isalpha() else ": "
    return f"{view.name}{separator}{voxel[view.normal_axis]}{format_slice_position(volume, voxel, view.normal_axis)}"


def get_middle_voxel(volume: Volume, view: AnatomicalView, slice_index: int) -> VoxelIndex:
    """Return the voxel in the middle of a slice."""
    depth, row, column = (
        slice_index if axis == view.normal_axis else length // 2 for axis, length in enumerate(volume.shape)
    )
    return depth, row, column


def format_slice_position(volume: Volume, voxel: VoxelIndex, normal_axis: int) -> str:
    """Format a slice's position: ` · S 12.0 mm` with an affine, ` · 85.0 mm` from the first slice, or ''."""
    if volume.affine_matrix is not None:
        return (
            f" · {format_location(volume.affine_matrix, voxel)[find_world_axis(volume.affine_matrix, normal_axis)]} mm"
        )
    return f" · {voxel[normal_axis] * volume.voxel_size[normal_axis]:.1f} mm" if volume.has_physical_size else ""


def draw_side_panel(
    volume: Volume, font_size: int, pixels_per_mm: float, height: int, text_lines: Sequence[str], *, bar: bool = True
) -> RGBImage:
    """Draw a panel of about `height` rows: a warning, the color bar, text lines, the outline legend and a ruler."""
    edge, gap = max(2, font_size // 4), font_size // 2
    panel_width = 12 * font_size
    above = (
        []
        if volume.warning is None
        else [draw_text(volume.warning, font_size, width=panel_width, max_lines=4, background=WARNING_COLOR)]
    )
    below = [
        draw_text_on_dark(truncate_legend_line(part), font_size)
        for word in text_lines
        for part in word.split(" · ")
        if part
    ]
    below += [
        pad_image(piece, left=edge, background=DARK_BACKGROUND_COLOR)
        for piece in draw_outline_keys(volume.outlines, font_size)
    ]
    if volume.has_physical_size:
        below.append(
            pad_image(
                draw_ruler(pixels_per_mm, panel_width // 2, font_size), left=edge, background=DARK_BACKGROUND_COLOR
            )
        )
    if bar and volume.alpha > 0:
        available_height = height - sum(piece.shape[0] + gap for piece in (*above, *below)) - 2 * gap
        above.append(
            pad_image(
                _draw_color_bar(volume, font_size, available_height),
                left=edge,
                bottom=gap // 2,
                background=DARK_BACKGROUND_COLOR,
            )
        )
    pieces = [pad_image(piece, bottom=gap, background=DARK_BACKGROUND_COLOR) for piece in (*above, *below)]
    panel_width = max([panel_width, *(piece.shape[1] for piece in pieces)])
    top = np.full((1, panel_width, 3), DARK_BACKGROUND_COLOR, np.uint8)
    return np.concatenate(
        [
            top,
            *(
                pad_image(piece, right=panel_width - piece.shape[1], background=DARK_BACKGROUND_COLOR)
                for piece in pieces
            ),
        ]
    )


def _draw_color_bar(volume: Volume, font_size: int, max_height: int) -> RGBImage:
    height = min(260, max(6 * font_size, max_height))
    return draw_color_bar(
        height,
        *volume.value_range,
        volume.colormap,
        width=font_size,
        font_size=font_size,
        text_color=LIGHT_TEXT_COLOR,
        background=DARK_BACKGROUND_COLOR,
    )


def draw_ruler(pixels_per_mm: float, width: int, font_size: int) -> RGBImage:
    """Draw a ruler (h,w,3): a line of a round number of millimeters with its label."""
    length = max(
        (candidate for candidate in RULER_LENGTHS_MM if candidate * pixels_per_mm <= width), default=RULER_LENGTHS_MM[0]
    )
    pixels = max(2, round(length * pixels_per_mm))
    text = draw_text_on_dark(f"{length} mm", font_size)
    out = np.full((text.shape[0], pixels + 6 + text.shape[1], 3), DARK_BACKGROUND_COLOR, np.uint8)
    middle = text.shape[0] // 2
    out[middle : middle + 2, :pixels] = LIGHT_TEXT_COLOR
    out[middle - 4 : middle + 6, [0, 1, pixels - 2, pixels - 1]] = LIGHT_TEXT_COLOR
    out[:, pixels + 6 :] = text
    return out


def describe_orientation(view: AnatomicalView, volume: Volume) -> str:
    """Describe the patient's sides of a slice as text, for images too small for edge letters."""
    top, _, left, _ = view.get_edge_letters(volume.axis_end_letters)
    return f"top {top}, left {left}" if top and left else ""


def describe_voxel(volume: Volume, voxel: VoxelIndex) -> list[str]:
    """Describe a voxel's map value, index and position."""
    value = float(volume.values[voxel])
    label = "peak" if voxel == volume.peak and not volume.warning else "value"
    descriptions = [f"{label} {format_range_number(value, value, value)}", f"voxel {voxel[0]}, {voxel[1]}, {voxel[2]}"]
    return (
        descriptions
        if volume.affine_matrix is None
        else [*descriptions, f"{'  '.join(format_location(volume.affine_matrix, voxel))} mm"]
    )


def describe_peak(volume: Volume) -> list[str]:
    """Describe the peak, if the map has one and is visible."""
    return describe_voxel(volume, volume.peak) if volume.alpha > 0 and not volume.warning else []
