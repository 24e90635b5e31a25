"""Explainers: each says where a model looked; `METHODS` holds them all by name."""

from camscope.explainers.ablation import AblationCAM
from camscope.explainers.base import METHODS, Explainer, register
from camscope.explainers.cam import CAM, SPACE
from camscope.explainers.comparison import Comparison, compare
from camscope.explainers.fusion import fuse
from camscope.explainers.gradient_cam import GradCAM, GradCAMPlusPlus, HiResCAM, LayerCAM, XGradCAM
from camscope.explainers.layer import LayerExplainer
from camscope.explainers.score_cam import ScoreCAM

__all__ = [
    "CAM",
    "METHODS",
    "SPACE",
    "AblationCAM",
    "Comparison",
    "Explainer",
    "GradCAM",
    "GradCAMPlusPlus",
    "HiResCAM",
    "LayerCAM",
    "LayerExplainer",
    "ScoreCAM",
    "XGradCAM",
    "compare",
    "fuse",
    "register",
]
