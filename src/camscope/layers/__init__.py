"""Layers: find the layers with spatial extent, and where the cells of their output lie on the input."""

from camscope.layers.layout import Layout

__all__ = ["Layout"]
