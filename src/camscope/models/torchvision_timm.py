"""Models of torchvision and timm, with their own preprocessing.

- What every library of published models needs: the package, the numbers, and words for what cannot be had.
- Models of torchvision, with the preprocessing and the categories of their own weights.
- Models of timm's registry, with their own preprocessing.
"""

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
from camscope.model_card import ModelCard
from camscope.models.checkpoint import (
    RANDOM_WEIGHTS,
    StateDict,
    WeightsSource,
    build_for_checkpoint,
    fixed_seed_scope,
    format_model_source,
    read_state_dict,
    strip_wrapper_prefix,
)
from camscope.optional import require


def build_with_weights(
    build: Callable[[int | None], nn.Module], weights: str | os.PathLike[str]
) -> tuple[nn.Module, bool]:
    """A model without its published weights (`build`: see `build_for_checkpoint`), and whether its classes are the published ones."""
    return (
        (build(None), False)
        if weights == RANDOM_WEIGHTS
        else build_for_checkpoint(build, read_state_dict(weights), weights)
    )


def make_weights_unavailable_error(spec: str, error: Exception, advice: str) -> WeightsError:
    """The error for weights that are neither here nor to be had; `advice` says what to fetch, and how to pass it."""
    return WeightsError(f"the weights of {spec!r} cannot be had ({type(error).__name__}: {error}); {advice}")


ModelBuilder = Callable[..., nn.Module]


def load_torchvision_model(name: str, weights: WeightsSource) -> tuple[nn.Module, ModelCard]:
    """A model of torchvision's registry, with its default weights, those of a file, or none ("random")."""
    from torchvision.models import get_model_weights

    builder = _find_torchvision_builder(name)
    published = get_model_weights(builder).DEFAULT
    with fixed_seed_scope():
        if weights is None:
            model, usual = _load_published_torchvision(builder, published, name), True
        else:
            model, usual = _build_torchvision(builder, weights)
    class_names = tuple(published.meta.get("categories", ())) if usual else ()
    preprocess = as_preprocess(published.transforms())
    return model, ModelCard(format_model_source(f"torchvision:{name}", weights), preprocess, class_names or None)


def _find_torchvision_builder(name: str) -> ModelBuilder:
    from torchvision.models import get_model_builder, list_models, quantization

    quantised = list_models(module=quantization)
    names = sorted(set(list_models()) - set(quantised))
    if name in names:
        builder: ModelBuilder = get_model_builder(name)
        return builder
    if name in quantised:
        raise ModelError(f"{name!r} is quantised: it has no gradients to explain; load {name.partition('_')[2]!r}")
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.0)
    raise ModelError(f"no model {name!r} in torchvision; nearest names: {', '.join(near)}")


def _load_published_torchvision(builder: ModelBuilder, published: Any, name: str) -> nn.Module:
    """The library's own way, after its file was fetched (or found) and seen to hold nothing but tensors."""
    cache = Path(torch.hub.get_dir()) / "checkpoints"
    try:
        progress = sys.stderr.isatty()
        published.get_state_dict(progress=progress, check_hash=True, map_location="cpu", weights_only=True)
    except Exception as error:  # no network, a broken download, a broken file in the cache: all end here
        advice = f"fetch {published.url} and pass it: weights=FILE (--weights FILE), or put it into {cache}"
        raise make_weights_unavailable_error(name, error, f"{advice}, in place of what may lie there") from error
    return builder(weights=published, progress=False)


def _build_torchvision(builder: ModelBuilder, weights: str | os.PathLike[str]) -> tuple[nn.Module, bool]:
    """A model without its published weights, and whether its classes are the published ones."""
    if weights == RANDOM_WEIGHTS:
        return builder(**_get_builder_options(builder, {})), False
    if builder.__module__.startswith("torchvision.models.detection"):
        raise WeightsError(
            f"torchvision builds {builder.__name__} otherwise around its own weights than around a file; "
            "build it in a function of yours, and load FILE.py:FUNCTION"
        )
    state = strip_wrapper_prefix(read_state_dict(weights), ())
    options = _get_builder_options(builder, state)
    return build_for_checkpoint(
        lambda n: builder(**options, **({} if n is None else {"num_classes": n})), state, weights
    )


def _get_builder_options(builder: ModelBuilder, state: StateDict) -> dict[str, Any]:
    """What torchvision sets along with its own weights, and what only the file knows of its architecture."""
    options: dict[str, Any] = {"weights": None}
    if "weights_backbone" in inspect.signature(builder).parameters:
        options["weights_backbone"] = None
    if builder.__name__ in ("googlenet", "inception_v3"):
        heads = any(name.startswith(("aux1.", "AuxLogits.")) for name in state)
        options |= {"transform_input": True, "init_weights": False, "aux_logits": heads}
    if any(name.startswith("aux_classifier.") for name in state):
        options["aux_loss"] = True
    if {"encoder.pos_embedding", "conv_proj.weight"} <= state.keys():
        tokens, patch = state["encoder.pos_embedding"].shape[1], state["conv_proj.weight"].shape[-1]
        options["image_size"] = patch * math.isqrt(tokens - 1)
    return options


def load_timm_model(name: str, weights: WeightsSource) -> tuple[nn.Module, ModelCard]:
    """A model with its published weights, those of a file, or none ("random")."""
    timm = require("timm", extra="hub")
    if not timm.is_model(name):
        near = difflib.get_close_matches(name, timm.list_models(), n=3, cutoff=0.0)
        raise ModelError(f"no model {name!r} in timm; nearest names: {', '.join(near)}")
    with fixed_seed_scope():
        if weights is None:
            model, usual = _load_published_timm(timm, name), True
        else:
            model, usual = build_with_weights(lambda classes: _build_timm(timm, name, classes), weights)
    return model, ModelCard(
        format_model_source(f"timm:{name}", weights),
        _get_timm_preprocess(model),
        _get_timm_class_names(model) if usual else None,
    )


def _load_published_timm(timm: Any, name: str) -> nn.Module:
    try:
        model: nn.Module = timm.create_model(name, pretrained=True)
    except (OSError, RuntimeError) as error:
        config = timm.get_pretrained_cfg(name)
        place = f" of the Hugging Face repository {config.hf_hub_id!r}" if config and config.hf_hub_id else ""
        advice = f"fetch model.safetensors{place} and pass it: weights=FILE (--weights FILE)"
        raise make_weights_unavailable_error(f"timm:{name}", error, advice) from error
    return model


def _build_timm(timm: Any, name: str, n_classes: int | None) -> nn.Module:
    try:
        model: nn.Module = timm.create_model(name, **({} if n_classes is None else {"num_classes": n_classes}))
    except RuntimeError as error:  # an unknown tag after the dot
        raise ModelError(f"timm cannot build {name!r}: {error}") from error
    return model


def _get_timm_preprocess(model: nn.Module) -> Callable[..., Any]:
    data = require("timm.data", extra="hub")
    config = data.resolve_model_data_config(model)
    try:
        return Preprocess.from_timm(config)
    except PreprocessError:  # Preprocess has no exact words for it: timm's own transform
        return as_preprocess(data.create_transform(**config, is_training=False))


def _get_timm_class_names(model: nn.Module) -> tuple[str, ...] | None:
    """The names of the ImageNet subset that the published weights were trained on, if it is one."""
    data = require("timm.data", extra="hub")
    subset = data.infer_imagenet_subset(model)
    if subset is None:
        return None
    names = data.ImageNetInfo(subset)
    return tuple(str(names.index_to_description(i)) for i in range(names.num_classes()))
