"""Explainers: each says where a model looked; `METHODS` holds them all by name."""

from camscope.explainers.base import METHODS, Explainer, register
from camscope.explainers.cam import CAM, SPACE
from camscope.explainers.fusion import fuse
from camscope.explainers.gradient_cam import GradCAM, GradCAMPlusPlus, HiResCAM, LayerCAM, XGradCAM

__all__ = [
    "CAM",
    "METHODS",
    "SPACE",
    "Explainer",
    "GradCAM",
    "GradCAMPlusPlus",
    "HiResCAM",
    "LayerCAM",
    "XGradCAM",
    "fuse",
    "register",
]
