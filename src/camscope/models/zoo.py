"""Models of torchvision, with the preprocessing and the categories of their own weights."""

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

from camscope.cards import ModelCard
from camscope.errors import ModelError, WeightsError
from camscope.images.preprocess import as_preprocess
from camscope.models.checkpoint import RANDOM, State, Weights, aligned, described, fitted, read_state, same_numbers
from camscope.models.fetch import unavailable

Builder = Callable[..., nn.Module]


def torchvision_model(name: str, weights: Weights) -> tuple[nn.Module, ModelCard]:
    """A model of torchvision's registry, with its default weights, those of a file, or none ("random")."""
    from torchvision.models import get_model_weights

    builder = _builder(name)
    published = get_model_weights(builder).DEFAULT
    with same_numbers():
        if weights is None:
            model, usual = _published(builder, published, name), True
        else:
            model, usual = _built(builder, weights)
    categories = tuple(published.meta.get("categories", ())) if usual else ()
    way = as_preprocess(published.transforms())
    return model, ModelCard(described(f"torchvision:{name}", weights), way, categories or None)


def _builder(name: str) -> Builder:
    from torchvision.models import get_model_builder, list_models, quantization

    quantised = list_models(module=quantization)
    names = sorted(set(list_models()) - set(quantised))
    if name in names:
        builder: Builder = get_model_builder(name)
        return builder
    if name in quantised:
        raise ModelError(f"{name!r} is quantised: it has no gradients to explain; load {name.partition('_')[2]!r}")
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.0)
    raise ModelError(f"no model {name!r} in torchvision; nearest names: {', '.join(near)}")


def _published(builder: Builder, published: Any, name: str) -> nn.Module:
    """The library's own way, after its file was fetched (or found) and seen to hold nothing but tensors."""
    cache = Path(torch.hub.get_dir()) / "checkpoints"
    try:
        progress = sys.stderr.isatty()
        published.get_state_dict(progress=progress, check_hash=True, map_location="cpu", weights_only=True)
    except Exception as error:  # no network, a broken download, a broken file in the cache: all end here
        advice = f"fetch {published.url} and pass it: weights=FILE (--weights FILE), or put it into {cache}"
        raise unavailable(name, error, f"{advice}, in place of what may lie there") from error
    return builder(weights=published, progress=False)


def _built(builder: Builder, weights: str | os.PathLike[str]) -> tuple[nn.Module, bool]:
    """A model without its published weights, and whether its classes are the published ones."""
    if weights == RANDOM:
        return builder(**_options(builder, {})), False
    if builder.__module__.startswith("torchvision.models.detection"):
        raise WeightsError(
            f"torchvision builds {builder.__name__} otherwise around its own weights than around a file; "
            "build it in a function of yours, and load FILE.py:FUNCTION"
        )
    state = aligned(read_state(weights), ())
    options = _options(builder, state)
    return fitted(lambda n: builder(**options, **({} if n is None else {"num_classes": n})), state, weights)


def _options(builder: Builder, state: State) -> dict[str, Any]:
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
