"""Models of timm's registry, with their own preprocessing."""

import difflib
from collections.abc import Callable
from typing import Any

from torch import nn

from camscope.cards import ModelCard
from camscope.errors import ModelError, PreprocessError
from camscope.images.preprocess import Preprocess, as_preprocess
from camscope.models.checkpoint import Weights, described, same_numbers
from camscope.models.fetch import built, package, unavailable


def timm_model(name: str, weights: Weights) -> tuple[nn.Module, ModelCard]:
    """A model with its published weights, those of a file, or none ("random")."""
    timm = package("timm")
    if not timm.is_model(name):
        near = difflib.get_close_matches(name, timm.list_models(), n=3, cutoff=0.0)
        raise ModelError(f"no model {name!r} in timm; nearest names: {', '.join(near)}")
    with same_numbers():
        if weights is None:
            model, usual = _published(timm, name), True
        else:
            model, usual = built(lambda classes: _built(timm, name, classes), weights)
    return model, ModelCard(described(f"timm:{name}", weights), _way(model), _categories(model) if usual else None)


def _published(timm: Any, name: str) -> nn.Module:
    try:
        model: nn.Module = timm.create_model(name, pretrained=True)
    except (OSError, RuntimeError) as error:
        config = timm.get_pretrained_cfg(name)
        place = f" of the Hugging Face repository {config.hf_hub_id!r}" if config and config.hf_hub_id else ""
        advice = f"fetch model.safetensors{place} and pass it: weights=FILE (--weights FILE)"
        raise unavailable(f"timm:{name}", error, advice) from error
    return model


def _built(timm: Any, name: str, classes: int | None) -> nn.Module:
    try:
        model: nn.Module = timm.create_model(name, **({} if classes is None else {"num_classes": classes}))
    except RuntimeError as error:  # an unknown tag after the dot
        raise ModelError(f"timm cannot build {name!r}: {error}") from error
    return model


def _way(model: nn.Module) -> Callable[..., Any]:
    data = package("timm.data")
    config = data.resolve_model_data_config(model)
    try:
        return Preprocess.from_timm(config)
    except PreprocessError:  # Preprocess has no exact words for it: timm's own transform
        return as_preprocess(data.create_transform(**config, is_training=False))


def _categories(model: nn.Module) -> tuple[str, ...] | None:
    """The names of the ImageNet subset that the published weights were trained on, if it is one."""
    data = package("timm.data")
    subset = data.infer_imagenet_subset(model)
    if subset is None:
        return None
    names = data.ImageNetInfo(subset)
    return tuple(str(names.index_to_description(i)) for i in range(names.num_classes()))
