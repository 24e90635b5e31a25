"""Synthetic chest radiographs with exact masks of their findings, and a small network trained on them."""

from camscope.phantom.phantom_net import PREPROCESSING, PhantomNet, load_phantom_model, to_model_input
from camscope.phantom.radiograph_drawing import CATEGORIES, Phantom, draw_findings, draw_radiograph

__all__ = [
    "CATEGORIES",
    "PREPROCESSING",
    "Phantom",
    "PhantomNet",
    "draw_findings",
    "draw_radiograph",
    "load_phantom_model",
    "to_model_input",
]
