"""Explainers: each says where a model looked; `METHODS` holds them all by name."""

from camscope.explainers.ablation import AblationCAM
from camscope.explainers.base import METHODS, Explainer, register
from camscope.explainers.cam import CAM, SPACE
from camscope.explainers.fusion import fuse
from camscope.explainers.gradient_cam import GradCAM, GradCAMPlusPlus, HiResCAM, LayerCAM, XGradCAM
from camscope.explainers.group_cam import GroupCAM
from camscope.explainers.layer import LayerExplainer
from camscope.explainers.opti_cam import OptiCAM
from camscope.explainers.score_cam import ISCAM, SSCAM, ScoreCAM

__all__ = [
    "CAM",
    "ISCAM",
    "METHODS",
    "SPACE",
    "SSCAM",
    "AblationCAM",
    "Explainer",
    "GradCAM",
    "GradCAMPlusPlus",
    "GroupCAM",
    "HiResCAM",
    "LayerCAM",
    "LayerExplainer",
    "OptiCAM",
    "ScoreCAM",
    "XGradCAM",
    "fuse",
    "register",
]
