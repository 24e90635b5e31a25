"""Image tokens: where a vision-language model puts the patches of the image among the words."""

import inspect
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn

from camscope.hooks.base import here_only, unwrap
from camscope.hooks.copying import mark_flags

TOKEN_SETTINGS = ("image_token_id", "image_token_index")

Positions = dict[int, tuple[int, ...] | None]  # by the length of a sequence; None where samples differ


def image_token_of(module: nn.Module) -> int | None:
    """The token that stands for a patch of the image in the input ids, if the module's config names one."""
    config = getattr(module, "config", None)
    found = (getattr(config, name, None) for name in TOKEN_SETTINGS)
    return next((token for token in found if isinstance(token, int) and not isinstance(token, bool)), None)


def has_image_tokens(model: nn.Module) -> bool:
    """Whether the model puts patches of an image in the place of tokens of a text."""
    return any(image_token_of(module) is not None for module in unwrap(model).modules())


def is_in_language_model(model: nn.Module, layer: str) -> bool:
    """Whether the nearest config around a layer is that of a language model: it has a vocabulary."""
    parts = layer.split(".") if layer else []
    for end in range(len(parts), -1, -1):
        config = getattr(unwrap(model).get_submodule(".".join(parts[:end])), "config", None)
        if config is not None:
            return hasattr(config, "vocab_size")
    return False


def note_image_tokens(model: nn.Module, scope: ExitStack, positions: Positions) -> None:
    """Inside the scope, in this thread: `positions` learns where the input ids that the model is given hold the image."""
    for module in unwrap(model).modules():
        token = image_token_of(module)
        if token is not None:

            def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], token: int = token) -> None:
                ids = _input_ids(module, args, kwargs)
                if ids is not None:
                    held = ids == token
                    same = bool((held == held[:1]).all())
                    positions[ids.shape[1]] = tuple(held[0].nonzero()[:, 0].tolist()) if same else None

            handle = module.register_forward_pre_hook(here_only(note), with_kwargs=True)
            mark_flags(handle)
            scope.callback(handle.remove)


def _input_ids(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    try:
        given = inspect.signature(module.forward).bind_partial(*args, **kwargs).arguments
    except TypeError:
        return None
    found = given.get("input_ids", given.get("kwargs", {}).get("input_ids"))
    return found if isinstance(found, Tensor) and found.ndim == 2 else None
