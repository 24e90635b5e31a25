"""Methods that hide parts of the input and watch the score."""

from camscope.explainers.perturbations.extremal import ExtremalPerturbation
from camscope.explainers.perturbations.meaningful import MeaningfulPerturbation
from camscope.explainers.perturbations.occlusion import Occlusion
from camscope.explainers.perturbations.rise import DRISE, RISE
from camscope.explainers.perturbations.segments import SegmentAblation
from camscope.explainers.perturbations.sensitivity import HSIC, Sobol

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
