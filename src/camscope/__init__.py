"""Where a vision model looked, as a number you can trust before it is a picture.

    from camscope import GradCAM

    explanation = GradCAM(model, "layer4").explain("cat.jpg", 281)
    explanation.save("cat_why.png")

Everything is loaded when it is first used: `import camscope` costs next to nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from camscope.version import __version__

if TYPE_CHECKING:
    from camscope.batch import BatchRun, inspect_images, run_batch
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
        BaseCAM,
        BlurIG,
        CenterGaussian,
        Chefer,
        Comparison,
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
        completeness,
        fuse,
    )
    from camscope.explanation import Explanation
    from camscope.geometry import Placement
    from camscope.hooks import Tap, clip_gradients, edit_layers, extract_features, inspect_layers, record_layers
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
    from camscope.targets import (
        Box,
        Class,
        Classes,
        Difference,
        LogProbability,
        OutputPart,
        Region,
        Similarity,
        Target,
        TextSimilarity,
    )

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
    "BaseCAM",
    "BatchRun",
    "BlurIG",
    "Box",
    "CenterGaussian",
    "Chefer",
    "Class",
    "Classes",
    "Comparison",
    "Concepts",
    "Contrast",
    "Deconvnet",
    "DeepFeatureFactorization",
    "DeepLIFT",
    "DeepLIFTSHAP",
    "Denoised",
    "Difference",
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
    "LogProbability",
    "MeaningfulPerturbation",
    "Occlusion",
    "OptiCAM",
    "OutputPart",
    "Placement",
    "Preprocess",
    "RandomCAM",
    "ReciproCAM",
    "RefineCAM",
    "Region",
    "Rollout",
    "Saliency",
    "ScanPreprocess",
    "ScoreCAM",
    "SegmentAblation",
    "ShapleyCAM",
    "Similarity",
    "SimpleFullGrad",
    "SmoothGrad",
    "SmoothGradCAMPlusPlus",
    "SmoothGradSquared",
    "Sobol",
    "Tap",
    "Target",
    "TextSimilarity",
    "VarGrad",
    "ViTCX",
    "XGradCAM",
    "__version__",
    "clip_gradients",
    "compare",
    "completeness",
    "edit_layers",
    "explain_patch",
    "explain_patches",
    "explain_slices",
    "extract_features",
    "fuse",
    "inspect_images",
    "inspect_layers",
    "load_model",
    "read_scan",
    "record_layers",
    "run_batch",
    "to_nifti",
    "to_parametric_map",
    "to_secondary_capture",
]

_NAMES = {
    "camscope.batch": "BatchRun inspect_images run_batch",
    "camscope.explainers": (
        "AblationCAM Augmented BagCAM BaseCAM BlurIG CAM CenterGaussian Chefer Comparison Concepts Contrast "
        "DRISE Deconvnet DeepFeatureFactorization DeepLIFT DeepLIFTSHAP Denoised EdgeDetector EigenCAM "
        "EigenGradCAM ExcitationBackprop ExpectedGradients Explainer ExtremalPerturbation FEM FinerCAM "
        "FullGrad Fused GradCAM GradCAMElementWise GradCAMPlusPlus GradECLIP GradientRollout GradientSHAP "
        "GroupCAM GuidedBackprop GuidedGradCAM GuidedIG HSIC HiResCAM ISCAM InputXGradient "
        "IntegratedGradients KPCACAM KernelSHAP LIFTCAM LIME LRP LayerCAM LeGrad METHODS "
        "MeaningfulPerturbation Occlusion OptiCAM RISE RandomCAM ReciproCAM RefineCAM Rollout SSCAM Saliency "
        "ScoreCAM SegmentAblation ShapleyCAM SimpleFullGrad SmoothGrad SmoothGradCAMPlusPlus "
        "SmoothGradSquared Sobol VarGrad ViTCX XGradCAM XRAI compare completeness fuse"
    ),
    "camscope.explanation": "Explanation",
    "camscope.geometry": "Placement",
    "camscope.hooks": "Tap clip_gradients edit_layers extract_features inspect_layers record_layers",
    "camscope.images.preprocess": "Preprocess",
    "camscope.images.scans.scan_preprocess": "ScanPreprocess",
    "camscope.images.scans.scan_reader": "read_scan",
    "camscope.layers.layout": "Layout",
    "camscope.medical": "explain_patch explain_patches explain_slices to_nifti to_parametric_map to_secondary_capture",
    "camscope.models": "load_model",
    "camscope.targets": "Box Class Classes Difference LogProbability OutputPart Region Similarity Target TextSimilarity",
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
