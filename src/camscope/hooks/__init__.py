"""Hooks for layers: record and edit values inside a model, clip gradients, and read gradients at a layer."""

from camscope.hooks.base import find_layer, find_layers, unwrap
from camscope.hooks.edit import clip_gradients, edit_layers
from camscope.hooks.layer_table import LayerRow, LayerTable, inspect_layers
from camscope.hooks.record import LayerCall, LayerRecord, Recording, extract_features, record_layers
from camscope.hooks.tap import Tap

__all__ = [
    "LayerCall",
    "LayerRecord",
    "LayerRow",
    "LayerTable",
    "Recording",
    "Tap",
    "clip_gradients",
    "edit_layers",
    "extract_features",
    "find_layer",
    "find_layers",
    "inspect_layers",
    "record_layers",
    "unwrap",
]
