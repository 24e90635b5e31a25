"""Names of captum, torch-cam and pytorch-grad-cam with their counterparts in camscope, for errors that help to migrate."""

NO_COUNTERPART = ""
NAMES_ELSEWHERE = {
    # captum
    "Deconvolution": "Deconvnet",
    "DeepLift": "DeepLIFT (extra captum)",
    "DeepLiftShap": "DeepLIFTSHAP (extra captum)",
    "FeatureAblation": "SegmentAblation(model, segments=...)",
    "FeaturePermutation": NO_COUNTERPART,
    "GradientShap": "GradientSHAP",
    "GuidedGradCam": "GuidedGradCAM",
    "InternalInfluence": NO_COUNTERPART,
    "KernelShap": "KernelSHAP (extra captum)",
    "LayerActivation": "camscope.hooks.record_layers",
    "LayerAttribution": "GradCAM(model, layer).explain(image).heatmap()",
    "LayerConductance": NO_COUNTERPART,
    "LayerGradCam": "GradCAM(model, layer)",
    "LayerGradientXActivation": "HiResCAM(model, layer), its sum over the channels",
    "LayerIntegratedGradients": NO_COUNTERPART,
    "Lime": "LIME (extra captum)",
    "NoiseTunnel": "SmoothGrad, SmoothGradSquared or VarGrad",
    "ShapleyValueSampling": "KernelSHAP (extra captum)",
    "TCAV": NO_COUNTERPART,
    "infidelity": "camscope.metrics.infidelity",
    "sensitivity_max": "camscope.metrics.max_sensitivity",
    "visualization": "explanation.overlay() or compare(...)",
    "viz": "explanation.overlay() or compare(...)",
    # torch-cam
    "ClassificationMetric": "camscope.metrics.average_drop and average_increase",
    "DeletionInsertionMetric": "camscope.metrics.deletion and insertion",
    "GradCAMpp": "GradCAMPlusPlus",
    "SmoothGradCAMpp": "SmoothGradCAMPlusPlus",
    "overlay_mask": "explanation.overlay(alpha=0.5)",
    # pytorch-grad-cam, whose own names are in camscope.compat.pytorch_grad_cam
    "ActivationsAndGradients": "camscope.hooks.record_layers",
    "ClassifierOutputSoftmaxTarget": "camscope.targets.LogProbability(category)",
    "ClassifierOutputTarget": "the class index itself, as in GradCAM(model).explain(image, 281)",
    "GuidedBackpropReLUModel": "GuidedBackprop",
    "KPCA_CAM": "KPCACAM",
    "ROADCombined": "camscope.metrics.road",
    "SemanticSegmentationTarget": "camscope.targets.Region",
    "show_cam_on_image": "explanation.overlay()",
}


def describe_camscope_counterpart(name: str) -> str | None:
    """Return a sentence with the camscope name that replaces a name of another toolkit. Return None for an unknown name.

    >>> describe_camscope_counterpart("GradCAMpp")
    "'GradCAMpp' is a name of another toolkit: use GradCAMPlusPlus"
    """
    if name not in NAMES_ELSEWHERE:
        return None
    counterpart = NAMES_ELSEWHERE[name]
    return f"{name!r} is a name of another toolkit: " + (
        f"use {counterpart}" if counterpart else "camscope has no such method"
    )
