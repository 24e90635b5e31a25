"""Pictures from arrays: pure functions, uint8 (H,W,3) RGB in and out; maps are (H,W), 0..1, or -1..1 where signed."""

from camscope.render.animation import ANIMATED, SECONDS, Watch, animate, animation
from camscope.render.channels import channel_grid
from camscope.render.chart import Curve, axis, chart
from camscope.render.colour import COLORMAPS, DIVERGING, PERCEPTUAL, colourise
from camscope.render.compass import world_of_cells
from camscope.render.frames import MOST, chosen_frames, frames
from camscope.render.legend import SWATCHES, Entry, legend, regions, swatches
from camscope.render.notebook import notebook_figure
from camscope.render.outlines import OUTLINE, Masks, draw_outlines, key_below, outlines
from camscope.render.overlay import not_covered, overlay, pale
from camscope.render.panel import beside, captioned, colour_bar, levelled, padded, panel
from camscope.render.picture import FORMATS, Picture, encode, expect_height, fitted
from camscope.render.planes import planes
from camscope.render.projection import projection
from camscope.render.scale import Scale, scaled, shown
from camscope.render.shapes import Box, boxes, contours, draw_boxes, draw_contours, draw_marker
from camscope.render.sheet import Cell, sheet
from camscope.render.slices import slices
from camscope.render.text import text_tile
from camscope.render.trace import trace
from camscope.render.volume import Volume

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
