"""Layers: which ones have spatial extent, and where the cells of their output are."""

from camscope.layers.layout import Layout

__all__ = ["Layout"]
