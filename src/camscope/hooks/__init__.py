"""The four PyTorch hooks (tensor, forward, forward-pre, full-backward) and what people do with them."""

from camscope.hooks.base import find_layer, find_layers, unwrap
from camscope.hooks.tap import Tap

__all__ = ["Tap", "find_layer", "find_layers", "unwrap"]
