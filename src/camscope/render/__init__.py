"""Draw images from arrays: pure functions from and to uint8 (H,W,3) RGB. Maps are (H,W) in 0..1, or -1..1 where signed."""

from camscope.render.anatomical_axes import compute_cell_affine
from camscope.render.animation import (
    ANIMATION_FORMATS,
    ANIMATION_SECONDS,
    MAX_FRAMES,
    ProgressCallback,
    animate_volume,
    choose_frames,
    draw_frames,
    encode_animation,
)
from camscope.render.colormap import COLORMAPS, DIVERGING, PERCEPTUAL, Scale, apply_scale, colorize, to_display_range
from camscope.render.feature_maps import draw_channel_grid, draw_signal_trace
from camscope.render.image_grid import (
    CaptionedImage,
    add_caption,
    draw_color_bar,
    draw_contact_sheet,
    draw_image_grid,
    join_horizontally,
    pad_image,
    pad_to_height,
)
from camscope.render.legend import (
    OUTLINE_COLORS,
    REGION_COLORS,
    LegendEntry,
    Masks,
    add_outline_legend,
    choose_region_colors,
    draw_outlines,
    draw_region_legend,
    draw_regions,
    prepare_outlines,
)
from camscope.render.notebook import build_figure_html
from camscope.render.overlay import fade_to_gray, hatch_uncovered, overlay
from camscope.render.rgb_image import (
    IMAGE_FORMATS,
    RGBImage,
    build_data_uri,
    check_image_height,
    encode_image,
    resize_to_fit,
)
from camscope.render.shapes import Box, draw_boxes, draw_contours, draw_marker, find_boxes, find_contours
from camscope.render.text import draw_text
from camscope.render.volume import Volume
from camscope.render.volume_views import draw_planes, draw_projection, draw_slices

__all__ = [
    "ANIMATION_FORMATS",
    "ANIMATION_SECONDS",
    "COLORMAPS",
    "DIVERGING",
    "IMAGE_FORMATS",
    "MAX_FRAMES",
    "OUTLINE_COLORS",
    "PERCEPTUAL",
    "REGION_COLORS",
    "Box",
    "CaptionedImage",
    "LegendEntry",
    "Masks",
    "ProgressCallback",
    "RGBImage",
    "Scale",
    "Volume",
    "add_caption",
    "add_outline_legend",
    "animate_volume",
    "apply_scale",
    "build_data_uri",
    "build_figure_html",
    "check_image_height",
    "choose_frames",
    "choose_region_colors",
    "colorize",
    "compute_cell_affine",
    "draw_boxes",
    "draw_channel_grid",
    "draw_color_bar",
    "draw_contact_sheet",
    "draw_contours",
    "draw_frames",
    "draw_image_grid",
    "draw_marker",
    "draw_outlines",
    "draw_planes",
    "draw_projection",
    "draw_region_legend",
    "draw_regions",
    "draw_signal_trace",
    "draw_slices",
    "draw_text",
    "encode_animation",
    "encode_image",
    "fade_to_gray",
    "find_boxes",
    "find_contours",
    "hatch_uncovered",
    "join_horizontally",
    "overlay",
    "pad_image",
    "pad_to_height",
    "prepare_outlines",
    "resize_to_fit",
    "to_display_range",
]
