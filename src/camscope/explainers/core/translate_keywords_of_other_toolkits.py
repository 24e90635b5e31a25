"""Keywords of captum, pytorch-grad-cam and torchcam: translate settings with captum's names, and advise on all other keywords."""

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from torch import Tensor

from camscope.errors import InputError
from camscope.explainers.core.base_method import BaseMethod
from camscope.explainers.core.baselines import check_baseline_tensor_is_ordinary
from camscope.explainers.core.model_input import ModelInput

P = ParamSpec("P")
T = TypeVar("T")
Method = TypeVar("Method", bound=BaseMethod)
CAPTUM_SETTING_NAMES = {"n_steps": ("n_steps",), "n_samples": ("n_samples",), "baselines": ("baseline", "background")}
BATCH_SIZE_HINT = "batch_size= of the constructor"
FOREIGN_KEYWORD_HINTS = {  # keywords of captum, pytorch-grad-cam and torchcam
    "abs": "channel_reduction= of the constructor",
    "attribute_to_layer_input": "layer= of the constructor, with the layer before",
    "aug_smooth": "Augmented(GradCAM(model))",
    "class_idx": "target=",
    "comparison_categories": "n_references= of the constructor of FinerCAM, or Contrast(GradCAM(model), a, b)",
    "comparison_idx": "Contrast(GradCAM(model), a, b)",
    "conv_layer": "layer= of the constructor",
    "device": "model.to(...) before, and pass the input on the same device",
    "device_ids": "model.to(...) before, and pass the input on the same device",
    "draw_baseline_from_distrib": "ExpectedGradients",
    "eigen_smooth": "Denoised(GradCAM(model))",
    "fc_layer": "head= of the constructor of CAM",
    "forward_func": "the model as the first argument of the constructor",
    "input_tensor": "the first argument of the call",
    "feature_mask": "segments= of SegmentAblation",
    "internal_batch_size": BATCH_SIZE_HINT,
    "layer_baselines": "baseline= of the constructor of a method that has one",
    "multiply_by_inputs": "Saliency for the gradient, InputXGradient for its product with the input",
    "nt_samples": "n_samples= of the constructor of SmoothGrad",
    "nt_samples_batch_size": BATCH_SIZE_HINT,
    "nt_type": "SmoothGrad, SmoothGradSquared or VarGrad",
    "num_references": "n_references= of the constructor",
    "num_samples": "n_samples= of the constructor",
    "perturbations_per_eval": BATCH_SIZE_HINT,
    "perturbations_per_pass": BATCH_SIZE_HINT,
    "reshape_transform": "reshape= of the constructor",
    "return_convergence_delta": "explain(...).diagnostics['completeness_gap']",
    "show_progress": "progress= of the constructor",
    "sliding_window_shapes": "window= of the constructor",
    "std": "sigma= of the constructor",
    "strides": "stride= of the constructor",
    "stdevs": "sigma= of the constructor",
    "target_category": "target=",
    "target_layer": "layer= of the constructor",
    "target_layers": "layer= of the constructor (Fused.at_layers(...) for several layers)",
    "targets": "target=",
    "use_cuda": "model.to('cuda') before, and pass the input on the same device",
}
UNNECESSARY_KEYWORDS = {  # of torchcam, pytorch-grad-cam and captum, and why they are not needed
    "ablation_layer": "channels are set to zero at the layer itself",
    "attr_dim_summation": "the map is the sum over the channels of the layer",
    "compute_input_gradient": "a method computes the gradients that it needs",
    "detach": "maps are detached from the graph",
    "enable_hooks": "no hook stays on the model",
    "grad_kwargs": "a method computes the gradients that it needs",
    "hook": "no hook stays on the model",
    "input_layer": "the input is that of the call",
    "input_shape": "the shape is that of the input",
    "interpolate_mode": "maps are enlarged bilinearly",
    "layer_attributions": "a call computes the map itself",
    "memory_efficient": "passes are as large as batch_size= of the constructor allows",
    "normalized": "attribute(...) returns the raw map, and heatmap() of an explanation scales it",
    "prefix_tokens": "the tokens of the image are found",
    "ratio_channels_to_ablate": "all channels are ablated",
    "relu_attributions": "the map has a ReLU where the method's paper has one",
    "retain_graph": "every call runs its own passes",
    "return_input_shape": "the shape is that of the input",
    "score_used": "a call runs the model itself",
    "scores": "a call runs the model itself",
    "tpu_compatible": "a method uses the device of the model",
    "use_cached_outputs": "a call runs the model itself",
    "uses_gradients": "a method computes the gradients that it needs",
}


def describe_foreign_keyword(keyword: str) -> str | None:
    """Return what a user should write instead of a keyword of another toolkit. Return None for an unknown keyword."""
    if keyword in UNNECESSARY_KEYWORDS:
        return f"{keyword}= is not a keyword of camscope: it is not needed, because {UNNECESSARY_KEYWORDS[keyword]}"
    if keyword in FOREIGN_KEYWORD_HINTS:
        return f"{keyword}= is not a keyword of camscope: use {FOREIGN_KEYWORD_HINTS[keyword]} instead"
    return None


def describe_unknown_keyword(keyword: str, setting_names: Collection[str], owner_name: str) -> str:
    """Return the error text for a keyword that `owner_name` does not accept. The text explains what to write instead."""
    if keyword in CAPTUM_SETTING_NAMES:
        own_names = CAPTUM_SETTING_NAMES[keyword]
        meaning = "is" if keyword in own_names else f"stands for {' or '.join(own_names)},"
        return f"{keyword}= {meaning} a setting that {owner_name} does not have"
    if (advice := describe_foreign_keyword(keyword)) is not None:
        return advice
    if keyword in setting_names:
        return f"{keyword}= is a setting of {owner_name}: pass it to the constructor"
    return f"{keyword}= is not a keyword of {owner_name}"


def apply_captum_settings(explainer: Method, captum_settings: Mapping[str, Any]) -> Method:
    """Return a copy of the explainer with settings that are given by captum's names. Ignore settings that the explainer lacks."""
    return explainer.with_settings(
        **{
            name: translated
            for word, value in captum_settings.items()
            for name in CAPTUM_SETTING_NAMES[word]
            if name in explainer.setting_names and (translated := translate_setting_value(name, value)) is not None
        }
    )


def select_baseline_rows(
    explainer: BaseMethod, captum_settings: Mapping[str, Any], rows: Sequence[int], inputs: Sequence[ModelInput]
) -> dict[str, Any]:
    """Return the settings for the images in `rows`. If there is one baseline per image, select the baselines of these images."""
    settings = dict(captum_settings)
    baseline = translate_setting_value("baseline", settings.get("baselines"))
    if isinstance(baseline, Tensor):
        check_baseline_tensor_is_ordinary(baseline)
    is_per_image = isinstance(baseline, Tensor) and baseline.ndim == inputs[rows[0]].x.ndim + 1
    if "baseline" in explainer.setting_names and is_per_image and len(baseline) == len(inputs):
        settings["baselines"] = baseline[list(rows)]
    return settings


def translate_setting_names(
    keywords: Mapping[str, Any], setting_names: Collection[str], owner_name: str
) -> dict[str, Any]:
    """Translate captum's names of settings to camscope's names. Raise InputError for a name that camscope lacks."""
    settings: dict[str, Any] = {}
    for word, value in keywords.items():
        name = word
        if word not in setting_names and (word in CAPTUM_SETTING_NAMES or describe_foreign_keyword(word) is not None):
            name = next((alias for alias in CAPTUM_SETTING_NAMES.get(word, ()) if alias in setting_names), "")
            if not name:
                raise InputError(describe_unknown_keyword(word, setting_names, owner_name))
            value = translate_setting_value(name, value)
        if name in settings or (name != word and name in keywords):
            raise InputError(f"{owner_name}: {name}= is given twice, under two names; pass it once")
        if name == word or value is not None:
            settings[name] = value
    return settings


def translate_setting_value(setting_name: str, value: Any) -> Any:
    """Convert the value of a setting from captum's form to camscope's. For example, unpack a tuple that holds one baseline."""
    if setting_name not in ("baseline", "background"):
        return value
    if isinstance(value, tuple):
        if len(value) != 1:
            raise InputError(
                f"baselines is a tuple of {len(value)}; expected one baseline, because one input is explained"
            )
        value = value[0]
    is_scalar = isinstance(value, int | float) or (isinstance(value, Tensor) and value.ndim == 0)
    return [value] if setting_name == "background" and is_scalar else value


def reject_foreign_keywords(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function. A keyword of another toolkit then raises an InputError that suggests the right keyword."""
    parameters = inspect.signature(function).parameters

    @wraps(function)
    def check_and_call(*args: P.args, **kwargs: P.kwargs) -> T:
        for word in kwargs:
            if word not in parameters and word in CAPTUM_SETTING_NAMES:
                raise InputError(
                    f"{word}= is not a keyword of {function.__name__}: pass it to the method, as {CAPTUM_SETTING_NAMES[word][0]}="
                )
            if word not in parameters and (advice := describe_foreign_keyword(word)) is not None:
                raise InputError(advice.replace("camscope", function.__name__, 1))
        return function(*args, **kwargs)

    return check_and_call
