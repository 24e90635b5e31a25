"""Explainers: each says where a model looked; `METHODS` holds them all by name."""

from camscope.explainers.ablation import AblationCAM, ReciproCAM
from camscope.explainers.adapters import LIME, LRP, DeepLIFT, DeepLIFTSHAP, KernelSHAP
from camscope.explainers.attention import Chefer, GradECLIP, GradientRollout, LeGrad, Rollout
from camscope.explainers.base import METHODS, Explainer, register
from camscope.explainers.cam import CAM, SPACE, WeightedChannels
from camscope.explainers.classifier_cam import ZhouCAM
from camscope.explainers.comparison import Comparison, compare
from camscope.explainers.concepts import ClassGain, Concepts
from camscope.explainers.controls import CentreGaussian, EdgeDetector, RandomCAM
from camscope.explainers.decomposition import FEM, KPCACAM, EigenCAM, EigenGradCAM
from camscope.explainers.deep_features import DeepFeatureFactorization
from camscope.explainers.features import Features
from camscope.explainers.full_grad import FullGrad, SimpleFullGrad, completeness
from camscope.explainers.fusion import Fused, fuse
from camscope.explainers.gradient_cam import (
    BagCAM,
    GradCAM,
    GradCAMElementWise,
    GradCAMPlusPlus,
    HiResCAM,
    LayerCAM,
    XGradCAM,
)
from camscope.explainers.gradient_variants import FinerCAM, ShapleyCAM, SmoothGradCAMPlusPlus
from camscope.explainers.gradients import InputXGradient, Saliency
from camscope.explainers.group_cam import GroupCAM
from camscope.explainers.layer import LayerExplainer
from camscope.explainers.lift_cam import LIFTCAM
from camscope.explainers.opti_cam import OptiCAM
from camscope.explainers.paths import IntegratedGradients
from camscope.explainers.refine import RefineCAM
from camscope.explainers.score_cam import ISCAM, SSCAM, ScoreCAM
from camscope.explainers.vit_cx import ViTCX
from camscope.explainers.wrappers import Augmented, Contrast, Denoised

__all__ = [
    "CAM",
    "FEM",
    "ISCAM",
    "KPCACAM",
    "LIFTCAM",
    "LIME",
    "LRP",
    "METHODS",
    "SPACE",
    "SSCAM",
    "AblationCAM",
    "Augmented",
    "BagCAM",
    "CentreGaussian",
    "Chefer",
    "ClassGain",
    "Comparison",
    "Concepts",
    "Contrast",
    "DeepFeatureFactorization",
    "DeepLIFT",
    "DeepLIFTSHAP",
    "Denoised",
    "EdgeDetector",
    "EigenCAM",
    "EigenGradCAM",
    "Explainer",
    "Features",
    "FinerCAM",
    "FullGrad",
    "Fused",
    "GradCAM",
    "GradCAMElementWise",
    "GradCAMPlusPlus",
    "GradECLIP",
    "GradientRollout",
    "GroupCAM",
    "HiResCAM",
    "InputXGradient",
    "IntegratedGradients",
    "KernelSHAP",
    "LayerCAM",
    "LayerExplainer",
    "LeGrad",
    "OptiCAM",
    "RandomCAM",
    "ReciproCAM",
    "RefineCAM",
    "Rollout",
    "Saliency",
    "ScoreCAM",
    "ShapleyCAM",
    "SimpleFullGrad",
    "SmoothGradCAMPlusPlus",
    "ViTCX",
    "WeightedChannels",
    "XGradCAM",
    "ZhouCAM",
    "compare",
    "completeness",
    "fuse",
    "register",
]
