"""The four PyTorch hooks (tensor, forward, forward-pre, full-backward) and what people do with them."""

from camscope.hooks.base import find_layer, find_layers, unwrap
from camscope.hooks.edit import clip_gradients, edit
from camscope.hooks.layer_table import Inspection, LayerRow, inspect
from camscope.hooks.record import Call, LayerRecord, Recording, extract, record
from camscope.hooks.tap import Tap

__all__ = [
    "Call",
    "Inspection",
    "LayerRecord",
    "LayerRow",
    "Recording",
    "Tap",
    "clip_gradients",
    "edit",
    "extract",
    "find_layer",
    "find_layers",
    "inspect",
    "record",
    "unwrap",
]
