"""Explainers: methods that show which parts of an image a model uses. `METHODS` is their registry."""

# isort: off
# the order in which methods are registered is the order in which they are listed
from camscope.explainers.adapters.captum_deep_lift import DeepLIFT, DeepLIFTSHAP
from camscope.explainers.adapters.zennit_lrp import LRP
from camscope.explainers.adapters.lime_and_kernel_shap import LIME, KernelSHAP
from camscope.explainers.attention.rollout import GradientRollout, Rollout
from camscope.explainers.attention.chefer import Chefer
from camscope.explainers.attention.legrad import LeGrad
from camscope.explainers.attention.grad_eclip import GradECLIP
from camscope.explainers.cam.ablation_cam import AblationCAM
from camscope.explainers.cam.recipro_cam import ReciproCAM
from camscope.explainers.cam.lift_cam import LIFTCAM
from camscope.explainers.cam.layer_explainer import LayerExplainer
from camscope.explainers.cam.weighted_channels_explainer import SPATIAL_AXIS, BaseCAM, BaseWeightedChannels
from camscope.explainers.cam.eigen_cams import EigenCAM, EigenGradCAM, SegEigenCAM
from camscope.explainers.cam.kpca_cam import KPCACAM
from camscope.explainers.cam.fem import FEM
from camscope.explainers.cam.deep_feature_factorization import ClassGain, Concepts, DeepFeatureFactorization
from camscope.explainers.cam.gradcam_variants import (
    BagCAM,
    GradCAM,
    GradCAMElementWise,
    GradCAMPlusPlus,
    HiResCAM,
    LayerCAM,
    XGradCAM,
)
from camscope.explainers.cam.smooth_gradcam_plus_plus import SmoothGradCAMPlusPlus
from camscope.explainers.cam.finer_cam import FinerCAM
from camscope.explainers.cam.shapley_cam import ShapleyCAM
from camscope.explainers.cam.layer_features_and_perturbed_scores import LayerFeatures
from camscope.explainers.cam.original_cam import CAM
from camscope.explainers.cam.score_cam import ISCAM, SSCAM, ScoreCAM
from camscope.explainers.cam.group_cam import GroupCAM
from camscope.explainers.cam.opti_cam import OptiCAM
from camscope.explainers.cam.vit_cx import ViTCX
from camscope.explainers.comparison.compare import Comparison, compare
from camscope.explainers.control_methods import CenterGaussian, EdgeDetector, RandomCAM
from camscope.explainers.core.base_explainer import METHODS, Explainer, register
from camscope.explainers.ensemble.augmentation_at_test_time import Augmented
from camscope.explainers.ensemble.difference_of_class_scores import Contrast
from camscope.explainers.ensemble.principal_component_of_channel_contributions import Denoised
from camscope.explainers.ensemble.map_fusion import Fused, fuse
from camscope.explainers.ensemble.refine_cam import RefineCAM
from camscope.explainers.ensemble.sess import SESS
from camscope.explainers.features.attention_maps import AttentionMaps, extract_attention_maps
from camscope.explainers.features.patch_features import PatchFeatures, extract_patch_features
from camscope.explainers.features.patch_pca import PatchPCA
from camscope.explainers.fullgrad import FullGrad, SimpleFullGrad, completeness
from camscope.explainers.gradient.attn_lrp import AttnLRP
from camscope.explainers.gradient.excitation_backprop import ExcitationBackprop
from camscope.explainers.gradient.guided_backprop import Deconvnet, GuidedBackprop
from camscope.explainers.gradient.saliency import InputXGradient, Saliency
from camscope.explainers.gradient.guided_gradcam import GuidedGradCAM
from camscope.explainers.gradient.smoothgrad import SmoothGrad, SmoothGradSquared, VarGrad
from camscope.explainers.path.integrated_gradients import IntegratedGradients
from camscope.explainers.path.guided_ig import GuidedIG
from camscope.explainers.path.expected_gradients import ExpectedGradients, GradientSHAP
from camscope.explainers.path.blur_ig import BlurIG
from camscope.explainers.path.xrai import XRAI
from camscope.explainers.perturbation.sobol_and_hsic import HSIC, Sobol
from camscope.explainers.perturbation.mask_optimization import ExtremalPerturbation, MeaningfulPerturbation
from camscope.explainers.perturbation.occlusion import Occlusion, SegmentAblation
from camscope.explainers.perturbation.rise import DRISE, RISE
from camscope.explainers.vision_language.draw_words import draw_words
# isort: on

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
    "AttentionMaps",
    "AttnLRP",
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
    "PatchFeatures",
    "PatchPCA",
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
    "draw_words",
    "extract_attention_maps",
    "extract_patch_features",
    "fuse",
    "register",
]
