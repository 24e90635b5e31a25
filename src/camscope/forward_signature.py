"""The signature of a model's forward: which keywords it names, and where it takes the image."""

import inspect
from dataclasses import dataclass
from typing import Any, get_args, get_type_hints

from torch import Tensor, nn

from camscope.errors import InputError

PIXEL_VALUES = "pixel_values"  # Hugging Face's name of the image, which is not the first parameter of every forward


@dataclass(frozen=True)
class ForwardSignature:
    """The parameters of a function, in order.

    `positional`: names of those that are taken by position or keyword; `keyword_only`: the others; `required_keywords`: those of
    the latter without a default. `takes_args`, `takes_kwargs`: whether there are `*args` (or nameless positions) and
    `**kwargs`; `kwargs_annotation`: that of `**kwargs`.
    """

    positional: tuple[str, ...] = ()
    keyword_only: tuple[str, ...] = ()
    required_keywords: tuple[str, ...] = ()
    takes_args: bool = False
    takes_kwargs: bool = False
    kwargs_annotation: Any = None

    @property
    def keyword_names(self) -> frozenset[str]:
        """All keywords that it names, also in a TypedDict: `**kwargs: Unpack[SomeTypedDict]`."""
        declared: set[str] = set()
        for part in get_args(self.kwargs_annotation):
            try:
                declared.update(get_type_hints(part))
            except (TypeError, NameError):  # no class, or one whose annotations are not importable
                declared.update(getattr(part, "__annotations__", {}))
        return frozenset((*self.positional, *self.keyword_only, *declared))


@dataclass(frozen=True)
class InputKey:
    """The name by which a model takes its image: a keyword of its forward, or a key of the dict that is its first argument."""

    name: str
    in_dict: bool = False

    def call_with_input(self, model: nn.Module, x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The model's output; of a model that takes a dict, the keywords go into the dict as well."""
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
    """The model's output for x, handed on under `key`; with `frames_first`, (N,C,T,H,W) enters it as (N,T,C,H,W)."""
    x = x.transpose(1, 2) if frames_first else x
    return model(x, *args, **kwargs) if key is None else key.call_with_input(model, x, args, kwargs)


def read_forward_signature(model: nn.Module) -> ForwardSignature:
    """The signature of a model's forward, seen through its decorators."""
    try:
        parameters = list(inspect.signature(model.forward).parameters.values())
    except (TypeError, ValueError):  # it has none that can be read, as a builtin
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
    """How a model takes its image; None: as its first argument.

    `name`: a keyword of its forward, else a key of the dict that its forward takes. Without one it is `pixel_values` where
    forward names that, or the only keyword of a forward without positions. InputError where several keywords may be it.
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
        f"the forward of {type(model).__name__} takes keywords only ({keywords}): say which one is the image, as "
        f"input_key='image' in the constructor of the method"
    )
