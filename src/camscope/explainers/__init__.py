"""Explainers: each says where a model looked; `METHODS` holds them all by name."""

from camscope.explainers.ablation import AblationCAM
from camscope.explainers.base import METHODS, Explainer, register
from camscope.explainers.cam import CAM, SPACE, WeightedChannels
from camscope.explainers.features import Features
from camscope.explainers.fusion import Fused, fuse
from camscope.explainers.gradient_cam import GradCAM, GradCAMPlusPlus, HiResCAM, LayerCAM, XGradCAM
from camscope.explainers.layer import LayerExplainer
from camscope.explainers.refine import RefineCAM
from camscope.explainers.score_cam import ScoreCAM
from camscope.explainers.wrappers import Augmented, Contrast, Denoised

__all__ = [
    "CAM",
    "METHODS",
    "SPACE",
    "AblationCAM",
    "Augmented",
    "Contrast",
    "Denoised",
    "Explainer",
    "Features",
    "Fused",
    "GradCAM",
    "GradCAMPlusPlus",
    "HiResCAM",
    "LayerCAM",
    "LayerExplainer",
    "RefineCAM",
    "ScoreCAM",
    "WeightedChannels",
    "XGradCAM",
    "fuse",
    "register",
]
