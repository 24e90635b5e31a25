"""Pictures from arrays: pure functions, uint8 (H,W,3) RGB in and out; maps are (H,W), 0..1, or -1..1 where signed."""

from camscope.render.channels import channel_grid
from camscope.render.chart import Curve, axis, chart
from camscope.render.colour import COLORMAPS, DIVERGING, PERCEPTUAL, colourise
from camscope.render.frames import MOST, chosen_frames, frames
from camscope.render.legend import SWATCHES, Entry, legend, regions, swatches
from camscope.render.overlay import not_covered, overlay, pale
from camscope.render.panel import beside, captioned, colour_bar, levelled, padded, panel
from camscope.render.picture import FORMATS, Picture, encode, fitted
from camscope.render.scale import Scale, scaled, shown
from camscope.render.shapes import Box, boxes, contours, draw_boxes, draw_contours, draw_marker
from camscope.render.sheet import Cell, sheet
from camscope.render.text import text_tile
from camscope.render.trace import trace

__all__ = [
    "COLORMAPS",
    "DIVERGING",
    "FORMATS",
    "MOST",
    "PERCEPTUAL",
    "SWATCHES",
    "Box",
    "Cell",
    "Curve",
    "Entry",
    "Picture",
    "Scale",
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
    "encode",
    "fitted",
    "frames",
    "legend",
    "levelled",
    "not_covered",
    "overlay",
    "padded",
    "pale",
    "panel",
    "regions",
    "scaled",
    "sheet",
    "shown",
    "swatches",
    "text_tile",
    "trace",
]
