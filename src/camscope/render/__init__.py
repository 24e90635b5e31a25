"""Pictures from arrays: pure functions, uint8 (H,W,3) RGB in and out; maps are (H,W), 0..1, or -1..1 where signed."""

from camscope.render.anatomical_axes import world_of_cells
from camscope.render.animation import ANIMATED, MOST, SECONDS, Watch, animate, animation, chosen_frames, frames
from camscope.render.colormap import COLORMAPS, DIVERGING, PERCEPTUAL, Scale, colourise, scaled, shown
from camscope.render.feature_maps import channel_grid, trace
from camscope.render.image_grid import Cell, beside, captioned, colour_bar, levelled, padded, panel, sheet
from camscope.render.legend import (
    OUTLINE,
    SWATCHES,
    Entry,
    Masks,
    draw_outlines,
    key_below,
    legend,
    outlines,
    regions,
    swatches,
)
from camscope.render.line_chart import Curve, axis, chart
from camscope.render.notebook import notebook_figure
from camscope.render.overlay import not_covered, overlay, pale
from camscope.render.rgb_image import FORMATS, Picture, encode, expect_height, fitted
from camscope.render.shapes import Box, boxes, contours, draw_boxes, draw_contours, draw_marker
from camscope.render.text import text_tile
from camscope.render.volume import Volume
from camscope.render.volume_views import planes, projection, slices

__all__ = [
    "ANIMATED",
    "COLORMAPS",
    "DIVERGING",
    "FORMATS",
    "MOST",
    "OUTLINE",
    "PERCEPTUAL",
    "SECONDS",
    "SWATCHES",
    "Box",
    "Cell",
    "Curve",
    "Entry",
    "Masks",
    "Picture",
    "Scale",
    "Volume",
    "Watch",
    "animate",
    "animation",
    "axis",
    "beside",
    "boxes",
    "captioned",
    "channel_grid",
    "chart",
    "chosen_frames",
    "colour_bar",
    "colourise",
    "contours",
    "draw_boxes",
    "draw_contours",
    "draw_marker",
    "draw_outlines",
    "encode",
    "expect_height",
    "fitted",
    "frames",
    "key_below",
    "legend",
    "levelled",
    "not_covered",
    "notebook_figure",
    "outlines",
    "overlay",
    "padded",
    "pale",
    "panel",
    "planes",
    "projection",
    "regions",
    "scaled",
    "sheet",
    "shown",
    "slices",
    "swatches",
    "text_tile",
    "trace",
    "world_of_cells",
]
