"""Hooks for layers: record and edit values inside a model, clip gradients, and read gradients at a layer."""

from camscope.hooks.edit_activations_and_gradients import clip_gradients, edit_layers
from camscope.hooks.find_layers import find_layer, find_layers, unwrap
from camscope.hooks.layer_table import LayerRow, LayerTable, inspect_layers
from camscope.hooks.record_layers import extract_features, record_layers
from camscope.hooks.recorded_layer_calls import LayerCall, LayerRecord, Recording
from camscope.hooks.tap_layer_output_and_gradient import Tap

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
