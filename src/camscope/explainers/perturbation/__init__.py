"""Methods that hide parts of the input and measure the change of the score."""

from camscope.explainers.perturbation.global_sensitivity import HSIC, Sobol
from camscope.explainers.perturbation.mask_optimization import ExtremalPerturbation, MeaningfulPerturbation
from camscope.explainers.perturbation.occlusion import Occlusion, SegmentAblation
from camscope.explainers.perturbation.rise import DRISE, RISE

__all__ = [
    "DRISE",
    "HSIC",
    "RISE",
    "ExtremalPerturbation",
    "MeaningfulPerturbation",
    "Occlusion",
    "SegmentAblation",
    "Sobol",
]
