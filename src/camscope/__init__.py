"""Grad-CAM and saliency maps for PyTorch, with the numbers that say whether to trust them.

    from camscope import GradCAM

    explanation = GradCAM(model, "layer4").explain("cat.jpg", 281)
    explanation.save("cat_why.png")

Every name is loaded on first use, so `import camscope` is cheap. Targets other than a class index or name are in
`camscope.targets`, tools for hooks in `camscope.hooks`, audits in `camscope.audit`.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from camscope.version import __version__

if TYPE_CHECKING:
    from camscope.batch import BatchRun, inspect_images, run_batch
    from camscope.errors import CamscopeError, CamscopeWarning
    from camscope.explainers import (
        CAM,
        DRISE,
        FEM,
        HSIC,
        ISCAM,
        KPCACAM,
        LIFTCAM,
        LIME,
        LRP,
        METHODS,
        RISE,
        SSCAM,
        XRAI,
        AblationCAM,
        Augmented,
        BagCAM,
        BlurIG,
        CenterGaussian,
        Chefer,
        Concepts,
        Contrast,
        Deconvnet,
        DeepFeatureFactorization,
        DeepLIFT,
        DeepLIFTSHAP,
        Denoised,
        EdgeDetector,
        EigenCAM,
        EigenGradCAM,
        ExcitationBackprop,
        ExpectedGradients,
        Explainer,
        ExtremalPerturbation,
        FinerCAM,
        FullGrad,
        Fused,
        GradCAM,
        GradCAMElementWise,
        GradCAMPlusPlus,
        GradECLIP,
        GradientRollout,
        GradientSHAP,
        GroupCAM,
        GuidedBackprop,
        GuidedGradCAM,
        GuidedIG,
        HiResCAM,
        InputXGradient,
        IntegratedGradients,
        KernelSHAP,
        LayerCAM,
        LeGrad,
        MeaningfulPerturbation,
        Occlusion,
        OptiCAM,
        RandomCAM,
        ReciproCAM,
        RefineCAM,
        Rollout,
        Saliency,
        ScoreCAM,
        SegmentAblation,
        ShapleyCAM,
        SimpleFullGrad,
        SmoothGrad,
        SmoothGradCAMPlusPlus,
        SmoothGradSquared,
        Sobol,
        VarGrad,
        ViTCX,
        XGradCAM,
        compare,
        fuse,
    )
    from camscope.explanation import Explanation
    from camscope.images.preprocess import Preprocess
    from camscope.images.scans.scan_preprocess import ScanPreprocess
    from camscope.images.scans.scan_reader import read_scan
    from camscope.layers.layout import Layout
    from camscope.medical import (
        explain_patch,
        explain_patches,
        explain_slices,
        to_nifti,
        to_parametric_map,
        to_secondary_capture,
    )
    from camscope.models import load_model

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
    "SSCAM",
    "XRAI",
    "AblationCAM",
    "Augmented",
    "BagCAM",
    "BatchRun",
    "BlurIG",
    "CamscopeError",
    "CamscopeWarning",
    "CenterGaussian",
    "Chefer",
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
    "Explanation",
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
    "Layout",
    "LeGrad",
    "MeaningfulPerturbation",
    "Occlusion",
    "OptiCAM",
    "Preprocess",
    "RandomCAM",
    "ReciproCAM",
    "RefineCAM",
    "Rollout",
    "Saliency",
    "ScanPreprocess",
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
    "XGradCAM",
    "__version__",
    "compare",
    "explain_patch",
    "explain_patches",
    "explain_slices",
    "fuse",
    "inspect_images",
    "load_model",
    "read_scan",
    "run_batch",
    "to_nifti",
    "to_parametric_map",
    "to_secondary_capture",
]

_HOMES = dict.fromkeys(__all__, "camscope.explainers") | {
    name: module
    for module, names in {
        "camscope.batch": "BatchRun inspect_images run_batch",
        "camscope.errors": "CamscopeError CamscopeWarning",
        "camscope.explanation": "Explanation",
        "camscope.images.preprocess": "Preprocess",
        "camscope.images.scans.scan_preprocess": "ScanPreprocess",
        "camscope.images.scans.scan_reader": "read_scan",
        "camscope.layers.layout": "Layout",
        "camscope.medical": "explain_patch explain_patches explain_slices to_nifti to_parametric_map to_secondary_capture",
        "camscope.models": "load_model",
    }.items()
    for name in names.split()
}
del _HOMES["__version__"]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
