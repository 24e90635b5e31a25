"""The signature of a model's forward: its keywords, and how it takes the image."""

import inspect
from dataclasses import dataclass
from typing import Any, get_args, get_type_hints

from torch import Tensor, nn

from camscope.errors import InputError

PIXEL_VALUES = "pixel_values"  # Hugging Face's keyword for the image, which is not always the first parameter


@dataclass(frozen=True)
class ForwardSignature:
    """The parameters of a function, in order.

    `positional` holds the names of parameters by position or keyword, `keyword_only` the other names, and `required_keywords`
    those of the latter without a default. `takes_args` and `takes_kwargs` tell whether there are `*args` (or positional-only
    parameters) and `**kwargs`. `kwargs_annotation` is the annotation of `**kwargs`.
    """

    positional: tuple[str, ...] = ()
    keyword_only: tuple[str, ...] = ()
    required_keywords: tuple[str, ...] = ()
    takes_args: bool = False
    takes_kwargs: bool = False
    kwargs_annotation: Any = None

    @property
    def keyword_names(self) -> frozenset[str]:
        """Return all keywords, including those of a TypedDict: `**kwargs: Unpack[SomeTypedDict]`."""
        declared: set[str] = set()
        for part in get_args(self.kwargs_annotation):
            try:
                declared.update(get_type_hints(part))
            except (TypeError, NameError):  # not a class, or one whose annotations cannot be imported
                declared.update(getattr(part, "__annotations__", {}))
        return frozenset((*self.positional, *self.keyword_only, *declared))


@dataclass(frozen=True)
class InputKey:
    """The name by which a model takes its image: a keyword of its forward, or a key of the dict that is its first argument."""

    name: str
    in_dict: bool = False

    def call_with_input(self, model: nn.Module, x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the model; for a model that takes a dict, the keyword arguments go into the dict as well."""
        if self.in_dict:
            return model({self.name: x, **kwargs}, *args)
        return model(*args, **{self.name: x, **kwargs})


def call_model(
    model: nn.Module,
    x: Tensor,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    key: InputKey | None = None,
    *,
    frames_first: bool = False,
) -> Any:
    """Call the model with x under `key`; with `frames_first`, (N,C,T,H,W) is passed as (N,T,C,H,W)."""
    x = x.transpose(1, 2) if frames_first else x
    return model(x, *args, **kwargs) if key is None else key.call_with_input(model, x, args, kwargs)


def read_forward_signature(model: nn.Module) -> ForwardSignature:
    """Read the signature of a model's forward through its decorators."""
    try:
        parameters = list(inspect.signature(model.forward).parameters.values())
    except (TypeError, ValueError):  # it has no readable signature, such as a builtin
        return ForwardSignature(takes_args=True, takes_kwargs=True)
    kinds = inspect.Parameter
    keyword_only = [parameter for parameter in parameters if parameter.kind is kinds.KEYWORD_ONLY]
    var_keyword = next((parameter for parameter in parameters if parameter.kind is kinds.VAR_KEYWORD), None)
    return ForwardSignature(
        positional=tuple(parameter.name for parameter in parameters if parameter.kind is kinds.POSITIONAL_OR_KEYWORD),
        keyword_only=tuple(parameter.name for parameter in keyword_only),
        required_keywords=tuple(parameter.name for parameter in keyword_only if parameter.default is kinds.empty),
        takes_args=any(parameter.kind in (kinds.POSITIONAL_ONLY, kinds.VAR_POSITIONAL) for parameter in parameters),
        takes_kwargs=var_keyword is not None,
        kwargs_annotation=None if var_keyword is None else var_keyword.annotation,
    )


def find_input_key(model: nn.Module, name: str | None = None) -> InputKey | None:
    """Find how a model takes its image; None means as its first argument.

    `name` is a keyword of its forward, or a key of the dict that its forward takes. Without a name it is `pixel_values` where
    forward has that keyword, or the only keyword of a forward without positional parameters. InputError where several keywords
    are possible.
    """
    signature = read_forward_signature(model)
    positions = bool(signature.positional) or signature.takes_args
    if name is not None:
        named = name in signature.positional or name in signature.keyword_only
        return InputKey(name, in_dict=not named and positions)
    if PIXEL_VALUES in (*signature.positional[1:], *signature.keyword_only):
        return InputKey(PIXEL_VALUES)
    if positions:
        return None
    for names in (signature.required_keywords, signature.keyword_only):
        if len(names) == 1:
            return InputKey(names[0])
    keywords = ", ".join(signature.keyword_only) or "none by name"
    raise InputError(
        f"the forward of {type(model).__name__} takes keywords only ({keywords}): name the one that is the image, such as "
        f"input_key='image' in the constructor of the method"
    )
