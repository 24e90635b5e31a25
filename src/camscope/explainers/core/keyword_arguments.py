"""Keywords of a call: which of them the model takes, which are settings, and which are another toolkit's."""

import inspect
from collections.abc import Callable, Collection, Mapping
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from camscope.errors import InputError
from camscope.explainers.core.inputs import Companions
from camscope.forward_signature import forward_signature
from camscope.hooks.base import unwrap

P = ParamSpec("P")
T = TypeVar("T")

ALIASES = {"n_steps": ("steps",), "n_samples": ("samples",), "baselines": ("baseline", "background")}
BATCH_SIZE = "batch_size= of the constructor"
OURS = {  # words of captum, pytorch-grad-cam and torchcam
    "aug_smooth": "Augmented(GradCAM(model))",
    "class_idx": "target=",
    "eigen_smooth": "Denoised(GradCAM(model))",
    "input_tensor": "the first argument of the call",
    "internal_batch_size": BATCH_SIZE,
    "perturbations_per_eval": BATCH_SIZE,
    "reshape_transform": "reshape= of the constructor",
    "return_convergence_delta": "explain(...).measures['completeness_gap']",
    "show_progress": "progress= of the constructor",
    "stdevs": "sigma= of the constructor",
    "target_category": "target=",
    "target_layer": "layer= of the constructor",
    "target_layers": "layer= of the constructor (Fused.over(...) for several layers)",
    "targets": "target=",
}


def split_keywords(
    model: nn.Module, keywords: Mapping[str, Any], settings: Collection[str], where: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Keywords of a call -> those for the model's forward, and those that are other names of settings (see ALIASES).

    `settings`: what the methods that are called have, of which `where` is the name in an error. InputError for a keyword
    that is neither.
    """
    inner = unwrap(model)
    named = forward_signature(inner).named if keywords else ()
    for_model, for_method = dict[str, Any](), dict[str, Any]()
    for word, value in keywords.items():
        if word in named:
            for_model[word] = value
        elif any(own in settings for own in ALIASES.get(word, ())):
            for_method[word] = value
        else:
            raise InputError(
                f"{_problem(word, settings, where)}. The forward of {type(inner).__name__} does not name it either; to "
                f"pass it to the model all the same: additional_forward_args={{{word!r}: ...}}"
            )
    return for_model, for_method


def _problem(word: str, settings: Collection[str], where: str) -> str:
    if word in ALIASES:
        return f"{word}= stands for {' or '.join(ALIASES[word])}, a setting that {where} does not have"
    if word in OURS:
        return f"{word}= is not a keyword of camscope: use {OURS[word]} instead"
    if word in settings:
        return f"{word}= is a setting of {where}: pass it to the constructor"
    return f"{word}= is not a keyword of {where}"


def extra_inputs(args: tuple[Any, ...], keywords: Mapping[str, Any], additional_forward_args: Any = None) -> Companions:
    """All that goes to the model with the image.

    `additional_forward_args`: a tuple of positional arguments, a dict of keywords, or a single positional argument.
    """
    if additional_forward_args is None:
        return Companions(args, keywords)
    if isinstance(additional_forward_args, Mapping):
        twice = sorted(set(keywords) & set(additional_forward_args))
        if twice:
            raise InputError(f"{', '.join(twice)}: given as a keyword and in additional_forward_args; pass one of them")
        return Companions(args, {**keywords, **additional_forward_args})
    more = additional_forward_args if isinstance(additional_forward_args, tuple) else (additional_forward_args,)
    return Companions((*args, *more), keywords)


def our_settings(keywords: Mapping[str, Any], settings: Collection[str], where: str) -> dict[str, Any]:
    """Keywords of a constructor under our names; InputError for another toolkit's that has no equal here."""
    known: dict[str, Any] = {}
    for word, value in keywords.items():
        own = word
        if word not in settings and word in (*ALIASES, *OURS):
            own = next((alias for alias in ALIASES.get(word, ()) if alias in settings), "")
            if not own:
                raise InputError(_problem(word, settings, where))
            value = value_of(own, value)
        if own in known or (own != word and own in keywords):
            raise InputError(f"{where}: {own}= is given twice, also under another name; pass one of them")
        if own == word or value is not None:
            known[own] = value
    return known


def value_of(setting: str, value: Any) -> Any:
    """What another toolkit's value is as a setting of ours: captum's baselines may be a number, or a tuple of one baseline."""
    if setting not in ("baseline", "background"):
        return value
    if isinstance(value, tuple):
        if len(value) != 1:
            raise InputError(
                f"baselines is a tuple of {len(value)}, but one input is explained: pass its baseline alone"
            )
        value = value[0]
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = torch.tensor(value, dtype=torch.float64, device="cpu")
    one_level = isinstance(value, Tensor) and value.ndim == 0
    return [value] if setting == "background" and one_level else value


def with_our_names(function: Callable[P, T]) -> Callable[P, T]:
    """The function, with an InputError that names our keyword where another toolkit's is passed."""
    own = inspect.signature(function).parameters

    @wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        for word in kwargs:
            if word not in own and word in ALIASES:
                raise InputError(
                    f"{word}= is not a keyword of {function.__name__}: pass it to the method, as {ALIASES[word][0]}="
                )
            if word not in own and word in OURS:
                raise InputError(f"{word}= is not a keyword of {function.__name__}: use {OURS[word]} instead")
        return function(*args, **kwargs)

    return checked
