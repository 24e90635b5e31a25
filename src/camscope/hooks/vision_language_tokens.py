"""Find the image tokens among the text tokens of a vision-language model, and the layers that hold text or queries."""

import inspect
from collections.abc import Collection
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn

from camscope.hooks.exclude_hooks_from_copies import exclude_flags_from_copies
from camscope.hooks.find_layers import unwrap
from camscope.hooks.thread_local_hooks import thread_local_hook

IMAGE_TOKEN_CONFIG_KEYS = ("image_token_id", "image_token_index")
QUERY_COUNT_CONFIG_KEYS = ("num_queries", "num_query_tokens", "num_object_queries")
ImageTokenPositions = dict[int, tuple[int, ...] | None]  # by the length of a sequence; None where samples differ


def read_image_token_id(config: object) -> int | None:
    """Read the id of the token that stands for an image patch from a model's config. Return None if there is no such id."""
    tokens = (getattr(config, name, None) for name in IMAGE_TOKEN_CONFIG_KEYS)
    return next((token for token in tokens if isinstance(token, int) and not isinstance(token, bool)), None)


def is_vision_language_model(model: nn.Module) -> bool:
    """Whether a model mixes image patches with text tokens, as vision-language models do."""
    return any(read_image_token_id(getattr(module, "config", None)) is not None for module in unwrap(model).modules())


def _find_nearest_config(model: nn.Module, layer: str) -> object:
    """Return the config of a layer, or of the nearest parent with a config. Return None if no parent has a config."""
    parts = layer.split(".") if layer else []
    for end in range(len(parts), -1, -1):
        config = getattr(unwrap(model).get_submodule(".".join(parts[:end])), "config", None)
        if config is not None:
            return config
    return None


def holds_language_model_tokens(model: nn.Module, layer: str, n_tokens: int, positions: ImageTokenPositions) -> bool:
    """Whether a layer of a vision-language model holds the tokens of the language model: text mixed with image tokens.

    The image encoder has a config without a vocabulary. For the model itself and its head, the number of tokens
    decides.
    """
    config = _find_nearest_config(model, layer)
    if config is None:
        return False
    return hasattr(config, "vocab_size") or (read_image_token_id(config) is not None and n_tokens in positions)


def record_text_lengths(model: nn.Module, scope: ExitStack, lengths: set[int]) -> None:
    """Until `scope` closes, add the number of tokens of each text that the model embeds to `lengths`."""
    for module in unwrap(model).modules():
        size = getattr(getattr(module, "config", None), "vocab_size", None)
        if not isinstance(size, int):
            continue
        for part in module.modules():
            if isinstance(part, nn.Embedding) and part.num_embeddings >= size:

                def record_length(module: nn.Module, args: tuple[Any, ...], output: object) -> None:
                    lengths.update(arg.shape[1] for arg in args[:1] if isinstance(arg, Tensor) and arg.ndim == 2)

                scope.callback(part.register_forward_hook(thread_local_hook(record_length)).remove)


def is_text_layer(model: nn.Module, layer: str, n_tokens: int, lengths: Collection[int]) -> bool:
    """Whether a layer holds text tokens: its language model embedded a text of `n_tokens` tokens."""
    config = _find_nearest_config(model, layer)
    return n_tokens in lengths and hasattr(config, "vocab_size")


def find_vocabulary_sizes(model: nn.Module) -> set[int]:
    """Return the vocabulary size of each language model inside a model."""
    configs = (getattr(module, "config", None) for module in unwrap(model).modules())
    sizes = (getattr(config, "vocab_size", None) for config in configs if config is not None)
    return {size for size in sizes if isinstance(size, int)}


def find_query_counts(model: nn.Module) -> set[int]:
    """Return the numbers of learned queries that the detectors and connectors inside a model have."""
    counts: set[int] = set()
    for name, module in unwrap(model).named_modules():
        config = getattr(module, "config", None)
        settings = (getattr(config, setting, getattr(module, setting, None)) for setting in QUERY_COUNT_CONFIG_KEYS)
        counts.update(count for count in settings if isinstance(count, int) and not isinstance(count, bool))
        if isinstance(module, nn.Embedding) and "quer" in name.rpartition(".")[2]:
            counts.add(module.num_embeddings)
        for label, parameter in module.named_parameters(recurse=False):
            if "quer" in label and parameter.ndim in (2, 3) and "weight" not in label and "bias" not in label:
                counts.add(parameter.shape[-2])
    return counts


def is_query_layer(model: nn.Module, layer: str, n_tokens: int) -> bool:
    """Whether a layer holds learned queries of a decoder. Such queries have no position on the image."""
    path = layer.split(".")
    inside = any("decoder" in part or "qformer" in part for part in path)
    parts = [unwrap(model).get_submodule(".".join(path[: end + 1])) for end in range(len(path))]
    inside = inside or any(isinstance(part, nn.TransformerDecoder | nn.TransformerDecoderLayer) for part in parts)
    return inside and n_tokens in find_query_counts(model)


def record_image_tokens(model: nn.Module, scope: ExitStack, positions: ImageTokenPositions) -> None:
    """Until `scope` closes, store in `positions` where the image tokens are among the model's input ids."""
    for module in unwrap(model).modules():
        token = read_image_token_id(getattr(module, "config", None))
        if token is not None:

            def record_positions(
                module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], token: int = token
            ) -> None:
                ids = _find_input_ids(module, args, kwargs)
                if ids is not None:
                    is_image = ids == token
                    is_same = bool((is_image == is_image[:1]).all())
                    positions[ids.shape[1]] = tuple(is_image[0].nonzero()[:, 0].tolist()) if is_same else None

            handle = module.register_forward_pre_hook(thread_local_hook(record_positions), with_kwargs=True)
            exclude_flags_from_copies(handle)
            scope.callback(handle.remove)


def _find_input_ids(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """Return the argument `input_ids` (N,T) of a call. Return None if the call has none."""
    try:
        arguments = inspect.signature(module.forward).bind_partial(*args, **kwargs).arguments
    except TypeError:
        return None
    input_ids = arguments.get("input_ids", arguments.get("kwargs", {}).get("input_ids"))
    return input_ids if isinstance(input_ids, Tensor) and input_ids.ndim == 2 else None
