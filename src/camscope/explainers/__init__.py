"""Explainers: methods that show which parts of an image a model uses. `METHODS` is their registry."""

from camscope.explainers.adapters.deep_lift import DeepLIFT, DeepLIFTSHAP
from camscope.explainers.adapters.lrp import LRP
from camscope.explainers.adapters.surrogate import LIME, KernelSHAP
from camscope.explainers.attention.methods import Chefer, GradECLIP, GradientRollout, LeGrad, Rollout
from camscope.explainers.cam.ablation_cams import LIFTCAM, AblationCAM, ReciproCAM
from camscope.explainers.cam.base import SPATIAL_AXIS, BaseCAM, BaseWeightedChannels, LayerExplainer
from camscope.explainers.cam.decomposition import FEM, KPCACAM, EigenCAM, EigenGradCAM, SegEigenCAM
from camscope.explainers.cam.feature_factorization import ClassGain, Concepts, DeepFeatureFactorization
from camscope.explainers.cam.gradient import (
    BagCAM,
    FinerCAM,
    GradCAM,
    GradCAMElementWise,
    GradCAMPlusPlus,
    HiResCAM,
    LayerCAM,
    ShapleyCAM,
    SmoothGradCAMPlusPlus,
    XGradCAM,
)
from camscope.explainers.cam.layer_features import LayerFeatures
from camscope.explainers.cam.original_cam import CAM
from camscope.explainers.cam.score_cam import ISCAM, SSCAM, GroupCAM, OptiCAM, ScoreCAM
from camscope.explainers.cam.vit_cx import ViTCX
from camscope.explainers.comparison.compare import Comparison, compare
from camscope.explainers.controls import CenterGaussian, EdgeDetector, RandomCAM
from camscope.explainers.core.base import METHODS, Explainer, register
from camscope.explainers.ensemble.explainer_wrappers import Augmented, Contrast, Denoised
from camscope.explainers.ensemble.fusion import Fused, RefineCAM, fuse
from camscope.explainers.ensemble.sess import SESS
from camscope.explainers.fullgrad import FullGrad, SimpleFullGrad, completeness
from camscope.explainers.gradient.excitation_backprop import ExcitationBackprop
from camscope.explainers.gradient.input_gradients import (
    Deconvnet,
    GuidedBackprop,
    GuidedGradCAM,
    InputXGradient,
    Saliency,
    SmoothGrad,
    SmoothGradSquared,
    VarGrad,
)
from camscope.explainers.path.integrated_gradients import (
    BlurIG,
    ExpectedGradients,
    GradientSHAP,
    GuidedIG,
    IntegratedGradients,
)
from camscope.explainers.path.xrai import XRAI
from camscope.explainers.perturbation.global_sensitivity import HSIC, Sobol
from camscope.explainers.perturbation.mask_optimization import ExtremalPerturbation, MeaningfulPerturbation
from camscope.explainers.perturbation.occlusion import Occlusion, SegmentAblation
from camscope.explainers.perturbation.rise import DRISE, RISE

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
    "SESS",
    "SPATIAL_AXIS",
    "SSCAM",
    "XRAI",
    "AblationCAM",
    "Augmented",
    "BagCAM",
    "BaseCAM",
    "BaseWeightedChannels",
    "BlurIG",
    "CenterGaussian",
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
    "LayerFeatures",
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
    "SegEigenCAM",
    "SegmentAblation",
    "ShapleyCAM",
    "SimpleFullGrad",
    "SmoothGrad",
    "SmoothGradCAMPlusPlus",
    "SmoothGradSquared",
    "Sobol",
    "VarGrad",
    "ViTCX",
    "XGradCAM",
    "compare",
    "completeness",
    "fuse",
    "register",
]
