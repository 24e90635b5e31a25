"""Grad-CAM and saliency maps for PyTorch, with metrics that test whether the maps can be trusted.

    from camscope import GradCAM

    explanation = GradCAM(model, "layer4").explain("cat.jpg", 281)
    explanation.save("cat_why.png")

Every name is loaded on first use, so `import camscope` is cheap. Targets other than a class index or name are in
`camscope.targets`, tools for hooks in `camscope.hooks`, audits in `camscope.audit`.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from camscope.names_of_other_toolkits import describe_camscope_counterpart
from camscope.version import __version__ as __version__

if TYPE_CHECKING:
    from camscope.batch import BatchRun as BatchRun
    from camscope.batch import inspect_images as inspect_images
    from camscope.batch import run_batch as run_batch
    from camscope.errors import CamscopeError as CamscopeError
    from camscope.errors import CamscopeWarning as CamscopeWarning
    from camscope.explainers import *  # noqa: F403 - its public names are listed below
    from camscope.explanation import Explanation as Explanation
    from camscope.images.preprocess import Preprocess as Preprocess
    from camscope.images.scans.scan_preprocess import ScanPreprocess as ScanPreprocess
    from camscope.images.scans.scan_reader import read_scan as read_scan
    from camscope.layers.layout import Layout as Layout
    from camscope.medical import explain_patch as explain_patch
    from camscope.medical import explain_patches as explain_patches
    from camscope.medical import explain_slices as explain_slices
    from camscope.medical import explain_sliding_windows as explain_sliding_windows
    from camscope.medical import to_nifti as to_nifti
    from camscope.medical import to_parametric_map as to_parametric_map
    from camscope.medical import to_secondary_capture as to_secondary_capture
    from camscope.models import load_model as load_model

_NAMES_BY_MODULE = {
    "camscope.batch": "BatchRun inspect_images run_batch",
    "camscope.errors": "CamscopeError CamscopeWarning",
    "camscope.explainers": """
        CAM DRISE FEM HSIC ISCAM KPCACAM LIFTCAM LIME LRP METHODS RISE SESS SPATIAL_AXIS SSCAM XRAI AblationCAM
        AttentionMaps AttnLRP Augmented BagCAM BaseCAM BaseWeightedChannels BlurIG CenterGaussian Chefer
        ClassGain Comparison Concepts Contrast Deconvnet DeepFeatureFactorization DeepLIFT DeepLIFTSHAP
        Denoised EdgeDetector EigenCAM EigenGradCAM ExcitationBackprop ExpectedGradients Explainer
        ExtremalPerturbation FinerCAM FullGrad Fused GradCAM GradCAMElementWise GradCAMPlusPlus
        GradECLIP GradientRollout GradientSHAP GroupCAM GuidedBackprop GuidedGradCAM GuidedIG HiResCAM
        InputXGradient IntegratedGradients KernelSHAP LayerCAM LayerExplainer LayerFeatures LeGrad
        MeaningfulPerturbation Occlusion OptiCAM PatchFeatures PatchPCA RandomCAM ReciproCAM RefineCAM
        Rollout Saliency ScoreCAM SegEigenCAM SegmentAblation ShapleyCAM SimpleFullGrad SmoothGrad
        SmoothGradCAMPlusPlus SmoothGradSquared Sobol VarGrad ViTCX XGradCAM compare completeness
        draw_words extract_attention_maps extract_patch_features fuse register
    """,
    "camscope.explanation": "Explanation",
    "camscope.images.preprocess": "Preprocess",
    "camscope.images.scans.scan_preprocess": "ScanPreprocess",
    "camscope.images.scans.scan_reader": "read_scan",
    "camscope.layers.layout": "Layout",
    "camscope.medical": """
        explain_patch explain_patches explain_slices explain_sliding_windows to_nifti to_parametric_map to_secondary_capture
    """,
    "camscope.models": "load_model",
}
_HOMES = {name: module for module, names in _NAMES_BY_MODULE.items() for name in names.split()}
__all__ = sorted([*_HOMES, "__version__"], key=lambda name: (not name.isupper(), not name[0].isupper(), name))


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        if (advice := describe_camscope_counterpart(name)) is not None:
            raise ImportError(advice)  # an AttributeError would lose its message in `from camscope import name`
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
