"""Explainers: each says where a model looked; `METHODS` holds them all by name."""

from camscope.explainers.ablation import AblationCAM
from camscope.explainers.base import METHODS, Explainer, register
from camscope.explainers.cam import CAM, SPACE
from camscope.explainers.concepts import ClassGain, Concepts
from camscope.explainers.decomposition import FEM, KPCACAM, EigenCAM, EigenGradCAM
from camscope.explainers.deep_features import DeepFeatureFactorization
from camscope.explainers.fusion import fuse
from camscope.explainers.gradient_cam import GradCAM, GradCAMPlusPlus, HiResCAM, LayerCAM, XGradCAM
from camscope.explainers.layer import LayerExplainer
from camscope.explainers.score_cam import ScoreCAM

__all__ = [
    "CAM",
    "FEM",
    "KPCACAM",
    "METHODS",
    "SPACE",
    "AblationCAM",
    "ClassGain",
    "Concepts",
    "DeepFeatureFactorization",
    "EigenCAM",
    "EigenGradCAM",
    "Explainer",
    "GradCAM",
    "GradCAMPlusPlus",
    "HiResCAM",
    "LayerCAM",
    "LayerExplainer",
    "ScoreCAM",
    "XGradCAM",
    "fuse",
    "register",
]
