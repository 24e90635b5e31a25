"""Load models of torchvision and timm, with the preprocessing and class names of their published weights."""

import difflib
import inspect
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from camscope.errors import ModelError, PreprocessError, WeightsError
from camscope.images.preprocess import Preprocess, as_preprocess
from camscope.loaded_model_metadata_and_weight_digest import LoadedModelMetadata
from camscope.models.checkpoint import (
    RANDOM_WEIGHTS,
    BuiltModel,
    StateDict,
    WeightsSource,
    build_and_load_checkpoint,
    fixed_seed_scope,
    format_model_source,
    read_state_dict,
    strip_wrapper_prefix,
)
from camscope.optional_packages import require

MAX_TOKENS = 2**16  # of a vision transformer, whose position embedding is built for them


def make_weights_unavailable_error(spec: str, error: Exception, advice: str) -> WeightsError:
    """Build the error for weights that cannot be downloaded. `advice` tells the user how to get them."""
    return WeightsError(f"the weights of {spec!r} are not available ({type(error).__name__}: {error}); {advice}")


ModelBuilder = Callable[..., nn.Module]


def load_torchvision_model_and_metadata(name: str, weights: WeightsSource) -> tuple[nn.Module, LoadedModelMetadata]:
    """Load a torchvision model. `weights` is a checkpoint file or "random". None means the published weights."""
    from torchvision.models import get_model_weights

    builder = _find_torchvision_builder(name)
    published = get_model_weights(builder).DEFAULT
    with fixed_seed_scope():
        if weights is None:
            model, has_published_classes = _load_published_torchvision(builder, published, name), True
        else:
            model, has_published_classes = _build_torchvision_random_or_from_file(builder, weights)
    class_names = tuple(published.meta.get("categories", ())) if has_published_classes else ()
    preprocess = as_preprocess(published.transforms())
    return model, LoadedModelMetadata(
        format_model_source(f"torchvision:{name}", weights), preprocess, class_names or None
    )


def _find_torchvision_builder(name: str) -> ModelBuilder:
    """Return the function that builds a model of torchvision. Raise a ModelError with the nearest names."""
    from torchvision.models import get_model_builder, list_models, quantization

    quantized = list_models(module=quantization)
    names = sorted(set(list_models()) - set(quantized))
    if name in names:
        builder: ModelBuilder = get_model_builder(name)
        return builder
    if name in quantized:
        raise ModelError(f"{name!r} is quantized and has no gradients; load {name.partition('_')[2]!r}")
    nearest = difflib.get_close_matches(name, names, n=3, cutoff=0.0)
    raise ModelError(f"no model {name!r} in torchvision; nearest names: {', '.join(nearest)}")


def _load_published_torchvision(builder: ModelBuilder, published: Any, name: str) -> nn.Module:
    """Load a torchvision model with its published weights. Download the weights if needed. Read only tensors from the file."""
    cache = Path(torch.hub.get_dir()) / "checkpoints"
    try:
        progress = sys.stderr.isatty()
        published.get_state_dict(progress=progress, check_hash=True, map_location="cpu", weights_only=True)
    except Exception as error:  # no network, a broken download, or a broken file in the cache
        advice = f"fetch {published.url} and pass it: weights=FILE (--weights FILE), or put it into {cache}"
        raise make_weights_unavailable_error(name, error, f"{advice}, in place of what may lie there") from error
    return builder(weights=published, progress=False)


def _build_torchvision_random_or_from_file(builder: ModelBuilder, random_or_file: str | os.PathLike[str]) -> BuiltModel:
    """Build a torchvision model. Its weights are random or come from a checkpoint file."""
    if random_or_file == RANDOM_WEIGHTS:
        return BuiltModel(builder(**_get_builder_options(builder, {})), has_published_classes=False)
    if builder.__module__.startswith("torchvision.models.detection"):
        raise WeightsError(
            f"{builder.__name__}: a detection model cannot be loaded from a file by name; "
            "write a function that builds the model, and load FILE.py:FUNCTION"
        )
    state = strip_wrapper_prefix(read_state_dict(random_or_file), ())
    options = _get_builder_options(builder, state)
    return build_and_load_checkpoint(
        lambda n: builder(**options, **({} if n is None else {"num_classes": n})), state, random_or_file
    )


def _get_builder_options(builder: ModelBuilder, state: StateDict) -> dict[str, Any]:
    """Return the keyword arguments that torchvision needs to build the architecture of a state dict."""
    options: dict[str, Any] = {"weights": None}
    if "weights_backbone" in inspect.signature(builder).parameters:
        options["weights_backbone"] = None
    if builder.__name__ in ("googlenet", "inception_v3"):
        heads = any(name.startswith(("aux1.", "AuxLogits.")) for name in state)
        options |= {"transform_input": True, "init_weights": False, "aux_logits": heads}
    if any(name.startswith("aux_classifier.") for name in state):
        options["aux_loss"] = True
    if {"encoder.pos_embedding", "conv_proj.weight"} <= state.keys():
        positions, patches = state["encoder.pos_embedding"].shape, state["conv_proj.weight"].shape
        if (
            len(positions) == 3 and len(patches) == 4 and 1 < positions[1] <= MAX_TOKENS
        ):  # otherwise the weights do not fit
            options["image_size"] = patches[-1] * math.isqrt(positions[1] - 1)
    return options


def load_timm_model_and_metadata(name: str, weights: WeightsSource) -> tuple[nn.Module, LoadedModelMetadata]:
    """Load a timm model. `weights` is a checkpoint file or "random". None means the published weights."""
    timm = require("timm", extra="hub")
    if not timm.is_model(name):
        nearest = difflib.get_close_matches(name, timm.list_models(), n=3, cutoff=0.0)
        raise ModelError(f"no model {name!r} in timm; nearest names: {', '.join(nearest)}")
    with fixed_seed_scope():
        if weights is None:
            model, has_published_classes = _load_published_timm(timm, name), True
        else:
            model, has_published_classes = _build_timm_random_or_from_file(timm, name, weights)
    preprocess, class_names = (
        _get_timm_preprocess(model),
        _get_timm_class_names(model) if has_published_classes else None,
    )
    return model, LoadedModelMetadata(format_model_source(f"timm:{name}", weights), preprocess, class_names)


def _load_published_timm(timm: Any, name: str) -> nn.Module:
    """Load a model of timm with its published weights. Without a network, the error says how to get them."""
    try:
        model: nn.Module = timm.create_model(name, pretrained=True)
    except (OSError, RuntimeError) as error:
        config = timm.get_pretrained_cfg(name)
        repository = f" of the Hugging Face repository {config.hf_hub_id!r}" if config and config.hf_hub_id else ""
        advice = f"fetch model.safetensors{repository} and pass it: weights=FILE (--weights FILE)"
        raise make_weights_unavailable_error(f"timm:{name}", error, advice) from error
    return model


def _build_timm_random_or_from_file(timm: Any, name: str, random_or_file: str | os.PathLike[str]) -> BuiltModel:
    """Build a timm model. Its weights are random or come from a checkpoint file."""

    def build(n_classes: int | None) -> nn.Module:
        try:
            model: nn.Module = timm.create_model(name, **({} if n_classes is None else {"num_classes": n_classes}))
        except RuntimeError as error:  # an unknown tag after the dot
            raise ModelError(f"timm cannot build {name!r}: {error}") from error
        return model

    if random_or_file == RANDOM_WEIGHTS:
        return BuiltModel(build(None), has_published_classes=False)
    return build_and_load_checkpoint(build, read_state_dict(random_or_file), random_or_file)


def _get_timm_preprocess(model: nn.Module) -> Callable[..., Any]:
    """Return the preprocessing of a model of timm."""
    data = require("timm.data", extra="hub")
    config = data.resolve_model_data_config(model)
    try:
        return Preprocess.from_timm(config)
    except PreprocessError:  # Preprocess cannot express it: use timm's own transform
        return as_preprocess(data.create_transform(**config, is_training=False))


def _get_timm_class_names(model: nn.Module) -> tuple[str, ...] | None:
    """Return the class names of a timm model that was trained on ImageNet. Return None for any other dataset."""
    data = require("timm.data", extra="hub")
    if (subset := data.infer_imagenet_subset(model)) is None:
        return None
    names = data.ImageNetInfo(subset)
    return tuple(str(names.index_to_description(i)) for i in range(names.num_classes()))
