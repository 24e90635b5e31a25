"""Load a model by name from torchvision, timm, Hugging Face, the package itself or the user's own code."""

from contextlib import nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from camscope.errors import CamscopeError, ModelError, describe_out_of_memory, is_out_of_memory
from camscope.images.preprocess import Preprocess
from camscope.loaded_model_metadata_and_weight_digest import LoadedModelMetadata, attach_loaded_model_metadata
from camscope.models.checkpoint import (
    RANDOM_WEIGHTS,
    WeightsSource,
    fixed_seed_scope,
    format_model_source,
    load_state_dict_strictly,
    read_state_dict,
)
from camscope.models.clip_image_encoder import load_clip_image_encoder_and_metadata
from camscope.models.huggingface import load_huggingface_model_and_metadata
from camscope.models.monai_bundle import load_monai_bundle_and_metadata
from camscope.models.nnunet import load_nnunet_model_and_metadata
from camscope.models.onnx_file import load_onnx_model_and_metadata
from camscope.models.torchvision_timm import load_timm_model_and_metadata, load_torchvision_model_and_metadata
from camscope.models.ultralytics_yolo import (
    is_ultralytics_object,
    load_yolo_model_and_metadata,
    wrap_yolo_model_and_build_metadata,
)
from camscope.models.user_function import load_model_and_metadata_from_user_function

__all__ = ["load_model", "load_state_dict_strictly", "read_state_dict"]


_wrappers: WeakKeyDictionary[nn.Module, nn.Module] = WeakKeyDictionary()  # of YOLO objects
MODEL_SPEC_FORMS = (
    "phantom, torchvision:NAME, timm:NAME, hf:ORG/NAME or hf:FOLDER, clip:…, onnx:FILE.onnx, yolo:FILE.pt or yolo:NAME.yaml, "
    "nnunet:FOLDER, bundle:FOLDER, FILE.py:FUNCTION, PACKAGE.MODULE:FUNCTION"
)
LOADER_WITH_TRUST_BY_LIBRARY = {
    "yolo": load_yolo_model_and_metadata,
    "nnunet": load_nnunet_model_and_metadata,
    "bundle": load_monai_bundle_and_metadata,
}
LOADER_BY_LIBRARY = {
    "torchvision": load_torchvision_model_and_metadata,
    "timm": load_timm_model_and_metadata,
    "hf": load_huggingface_model_and_metadata,
    "clip": load_clip_image_encoder_and_metadata,
    "onnx": load_onnx_model_and_metadata,
    **LOADER_WITH_TRUST_BY_LIBRARY,
}


def load_model(spec: str | nn.Module, *, weights: WeightsSource = None, trust_code: bool = False) -> nn.Module:
    """Load a model in eval mode. Store its preprocessing, class names and target layer in a `LoadedModelMetadata`.

    Args:
        spec: "phantom" (bundled), "torchvision:resnet50" or just "resnet50", "timm:vit_tiny_patch16_224", "hf:org/name" or
            "hf:/a/folder", "clip:org/name" (the image encoder of CLIP or SigLIP, for `Similarity` and `TextSimilarity`),
            "models.py:resnet18" or "package.module:resnet18". Another form is "onnx:model.onnx", a file that holds its weights,
            for methods that need only scores. A Python file or module runs as code: name only code that you trust. The
            function is called without arguments and returns the module, or a function from a batch to scores. See
            `camscope.models.user_function`. "yolo:best.pt" or "yolo:yolo11n.yaml" is a model of Ultralytics, and so is its
            `YOLO` object, which keeps its mode. "nnunet:FOLDER" is a trained model of nnU-Net v2, and "bundle:FOLDER" a
            bundle of MONAI.
        weights: A checkpoint that replaces the published weights and must fit exactly: a file of safetensors, or a file of
            `torch.save` with tensors alone. If the file has another number of classes, the model's last layer gets that
            number, and the class names are unknown. "random" loads untrained weights, the same every time.
        trust_code: Whether the files of "yolo:", "nnunet:" and "bundle:" may execute code. By default only layers on an
            allow-list are read.

    Returns:
        The module.

    Raises:
        ModelError: The model does not exist, or is not a module.
        WeightsError: The weights cannot be fetched, read or loaded.
        MissingExtraError: timm, transformers, ultralytics, monai, onnxruntime or another optional package is not installed.

    >>> load_model("phantom").training
    False

    """
    # a model on the meta device has no values, and loading weights into it does nothing
    with torch.device("cpu") if _is_meta_default_device() else nullcontext():
        try:
            model, model_metadata = _load_model_and_metadata(spec, weights, trust_code=trust_code)
        except Exception as error:
            if isinstance(error, CamscopeError) or not is_out_of_memory(error):
                raise
            source = format_model_source(str(spec), weights)
            raise ModelError(
                f"{source}: {describe_out_of_memory(error)} while loading it; load a smaller model"
            ) from error
    attach_loaded_model_metadata(model.eval() if isinstance(spec, str) else model, model_metadata)
    return model


def _wrap_yolo_once(yolo: Any) -> tuple[nn.Module, LoadedModelMetadata]:
    """Wrap a `YOLO` object. Return the same wrapper each time, until the object gets another model."""
    model, model_metadata = wrap_yolo_model_and_build_metadata(yolo)
    existing = _wrappers.get(yolo)
    if existing is not None and existing.model is yolo.model:
        return existing, model_metadata
    _wrappers[yolo] = model
    return model, model_metadata


def _is_meta_default_device() -> bool:
    try:
        return torch.get_default_device().type == "meta"
    except AttributeError:  # PyTorch 2.6, after a default device was set and reset
        return False


def redact_file_names(source: str) -> str:
    """Remove the names of files and folders from a text about the source of a model.

    >>> redact_file_names("hospital/net_of_ward_3.py:densenet, weights=ward_3.pt")
    'densenet, with weights'
    """
    spec, several, _ = source.partition(", weights=")
    library, colon, name = spec.partition(":")
    public_name = spec
    if colon and library not in LOADER_BY_LIBRARY:
        public_name = spec.rpartition(":")[2]
    elif colon and (library in ("onnx", *LOADER_WITH_TRUST_BY_LIBRARY) or name.startswith(("/", ".", "~"))):
        public_name = library
    return f"{public_name}, with weights" if several else public_name


def _load_model_and_metadata(
    spec: str | nn.Module, weights: WeightsSource, *, trust_code: bool
) -> tuple[nn.Module, LoadedModelMetadata]:
    """Load the model that a spec describes, and its metadata. Raise a ModelError for an unknown spec."""
    if is_ultralytics_object(spec):
        if weights is not None:
            raise ModelError("a YOLO object has its own weights; omit weights=")
        return _wrap_yolo_once(spec)
    if not isinstance(spec, str) or not spec:
        raise ModelError(f"the model is {spec!r}; expected one of {MODEL_SPEC_FORMS}")
    if spec == "phantom":
        return load_bundled_model_and_metadata(weights)
    library, colon, name = spec.partition(":")
    if trust_code:
        if library not in LOADER_WITH_TRUST_BY_LIBRARY:
            raise ModelError(
                f"{spec}: trust_code is for {', '.join(LOADER_WITH_TRUST_BY_LIBRARY)}; other files of weights never execute code"
            )
        return LOADER_WITH_TRUST_BY_LIBRARY[library](name, weights, trust_code=True)
    if colon and library in LOADER_BY_LIBRARY:
        return LOADER_BY_LIBRARY[library](name, weights)
    if colon:
        return load_model_and_metadata_from_user_function(spec, weights)
    if spec.endswith(".py"):
        raise ModelError(
            f"{spec} is a file; expected also the name of the function that returns the model: {spec}:FUNCTION"
        )
    if spec.endswith((".pt", ".pth", ".bin", ".ckpt", ".safetensors")):
        raise ModelError(f"{spec} contains weights without an architecture; pass the model's name and weights={spec!r}")
    try:
        return load_torchvision_model_and_metadata(spec, weights)
    except ModelError as error:
        raise ModelError(f"{error}; a model is one of {MODEL_SPEC_FORMS}") from error.__cause__


def load_bundled_model_and_metadata(weights: WeightsSource) -> tuple[nn.Module, LoadedModelMetadata]:
    """Load PhantomNet, a small model that comes with the package. It was trained on the images of `camscope.phantom`."""
    from camscope.phantom import CATEGORIES, PREPROCESSING, PhantomNet, load_phantom_model

    with fixed_seed_scope():
        model = load_phantom_model() if weights is None else PhantomNet()
    if weights is not None and weights != RANDOM_WEIGHTS:
        load_state_dict_strictly(model, read_state_dict(weights), weights)
    size, mean, std = PREPROCESSING
    preprocess = Preprocess(resize=(size, size), mean=(mean,), std=(std,), channels=1)
    class_names = None if weights == RANDOM_WEIGHTS else tuple(CATEGORIES)
    return model, LoadedModelMetadata(format_model_source("phantom", weights), preprocess, class_names, "layer4")
