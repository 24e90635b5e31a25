"""Medical images: volumes slice by slice and patch by patch, and explanations as objects that a viewer opens."""

from camscope.medical.patches import explain_patch, explain_patches
from camscope.medical.slices import Slices, explain_slices

__all__ = ["Slices", "explain_patch", "explain_patches", "explain_slices"]
