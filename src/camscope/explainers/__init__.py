"""Explainers: each says where a model looked; `METHODS` holds them all by name."""

from camscope.explainers.ablation import AblationCAM, ReciproCAM
from camscope.explainers.base import METHODS, Explainer, register
from camscope.explainers.cam import CAM, SPACE
from camscope.explainers.fusion import fuse
from camscope.explainers.gradient_cam import GradCAM, GradCAMPlusPlus, HiResCAM, LayerCAM, XGradCAM
from camscope.explainers.layer import LayerExplainer
from camscope.explainers.lift_cam import LIFTCAM
from camscope.explainers.score_cam import ScoreCAM

__all__ = [
    "CAM",
    "LIFTCAM",
    "METHODS",
    "SPACE",
    "AblationCAM",
    "Explainer",
    "GradCAM",
    "GradCAMPlusPlus",
    "HiResCAM",
    "LayerCAM",
    "LayerExplainer",
    "ReciproCAM",
    "ScoreCAM",
    "XGradCAM",
    "fuse",
    "register",
]
