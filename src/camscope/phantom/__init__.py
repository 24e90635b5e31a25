"""Synthetic radiographs whose evidence is known to the pixel, and a small net trained on them."""

from camscope.phantom.network import PREPROCESSING, PhantomNet, as_input, load_phantom_net
from camscope.phantom.radiograph import CATEGORIES, Phantom, Phantoms, dataset, draw, draw_several

__all__ = [
    "CATEGORIES",
    "PREPROCESSING",
    "Phantom",
    "PhantomNet",
    "Phantoms",
    "as_input",
    "dataset",
    "draw",
    "draw_several",
    "load_phantom_net",
]
