"""Methods that hide parts of the input and watch the score."""

from camscope.explainers.perturbations.occlusion import Occlusion
from camscope.explainers.perturbations.rise import DRISE, RISE

__all__ = ["DRISE", "RISE", "Occlusion"]
