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
from camscope.explainers.gradients import (
    Deconvnet,
    ExcitationBackprop,
    GuidedBackprop,
    GuidedGradCAM,
    InputXGradient,
    Saliency,
    SmoothGrad,
    SmoothGradSquared,
    VarGrad,
)
from camscope.explainers.group_cam import GroupCAM
from camscope.explainers.layer import LayerExplainer
from camscope.explainers.lift_cam import LIFTCAM
from camscope.explainers.opti_cam import OptiCAM
from camscope.explainers.paths import XRAI, BlurIG, ExpectedGradients, GradientSHAP, GuidedIG, IntegratedGradients
from camscope.explainers.perturbations import (
    DRISE,
    HSIC,
    RISE,
    ExtremalPerturbation,
    MeaningfulPerturbation,
    Occlusion,
    SegmentAblation,
    Sobol,
)
from camscope.explainers.refine import RefineCAM
from camscope.explainers.score_cam import ISCAM, SSCAM, ScoreCAM
from camscope.explainers.vit_cx import ViTCX
from camscope.explainers.wrappers import Augmented, Contrast, Denoised

__all__ = [
    "CAM",
    "DRISE",
    "FEM",
    "HSIC",
    "ISCAM",
    "KPCACAM",
    "LIFTCAM",
    "LIME",
    "LRP",
    "METHODS",
    "RISE",
    "SPACE",
    "SSCAM",
    "XRAI",
    "AblationCAM",
    "Augmented",
    "BagCAM",
    "BlurIG",
    "CentreGaussian",
    "Chefer",
    "ClassGain",
    "Comparison",
    "Concepts",
    "Contrast",
    "Deconvnet",
    "DeepFeatureFactorization",
    "DeepLIFT",
    "DeepLIFTSHAP",
    "Denoised",
    "EdgeDetector",
    "EigenCAM",
    "EigenGradCAM",
    "ExcitationBackprop",
    "ExpectedGradients",
    "Explainer",
    "ExtremalPerturbation",
    "Features",
    "FinerCAM",
    "FullGrad",
    "Fused",
    "GradCAM",
    "GradCAMElementWise",
    "GradCAMPlusPlus",
    "GradECLIP",
    "GradientRollout",
    "GradientSHAP",
    "GroupCAM",
    "GuidedBackprop",
    "GuidedGradCAM",
    "GuidedIG",
    "HiResCAM",
    "InputXGradient",
    "IntegratedGradients",
    "KernelSHAP",
    "LayerCAM",
    "LayerExplainer",
    "LeGrad",
    "MeaningfulPerturbation",
    "Occlusion",
    "OptiCAM",
    "RandomCAM",
    "ReciproCAM",
    "RefineCAM",
    "Rollout",
    "Saliency",
    "ScoreCAM",
    "SegmentAblation",
    "ShapleyCAM",
    "SimpleFullGrad",
    "SmoothGrad",
    "SmoothGradCAMPlusPlus",
    "SmoothGradSquared",
    "Sobol",
    "VarGrad",
    "ViTCX",
    "WeightedChannels",
    "XGradCAM",
    "ZhouCAM",
    "compare",
    "completeness",
    "fuse",
    "register",
]
