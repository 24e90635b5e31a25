"""The signature of a model's forward: its keyword arguments, and the argument that is the image."""

from contextlib import suppress
from dataclasses import dataclass
from inspect import Parameter, signature
from typing import Any, get_args, get_type_hints

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from camscope.errors import InputError

PIXEL_VALUES = "pixel_values"  # Hugging Face's keyword for the image, which is not always the first parameter
DICT_METHODS = ("get", "items", "keys", "pop", "values")


@dataclass(frozen=True)
class InputKey:
    """The name by which a model takes its image: a keyword of its forward, or a key of the dict that is its first argument."""

    name: str
    in_dict: bool = False

    def call_with_input(self, model: nn.Module, x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the model with the image x under this key. For a model that takes a dict, kwargs go into the dict, too."""
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
    """Call the model with the image x, passed as the argument `key`.

    With `frames_first`, (N,C,T,H,W) is passed as (N,T,C,H,W).
    """
    x = x.transpose(1, 2) if frames_first else x
    if key is not None:
        return key.call_with_input(model, x, args, kwargs)
    try:
        return model(x, *args, **kwargs)
    except (AttributeError, IndexError, TypeError) as error:
        if isinstance(error, AttributeError) and isinstance(error.obj, Tensor) and error.name in DICT_METHODS:
            raise _dict_error(model, "'image'") from error
        if not isinstance(error, AttributeError):
            with suppress(AttributeError, IndexError, TypeError), _DictAccess(model):
                model(x, *args, **kwargs)
        raise


class _DictAccess(TorchFunctionMode):
    """A function mode that raises InputError where a model reads a tensor by a name, as it would read a dict."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model = model

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is Tensor.__getitem__ and isinstance(args[1], str):
            raise _dict_error(self._model, repr(args[1]))
        return func(*args, **(kwargs or {}))


def _dict_error(model: nn.Module, key: str) -> InputError:
    return InputError(
        f"the forward of {type(model).__name__} takes a dict, but received a tensor. Pass the key of the image, such as "
        f"input_key={key} in the constructor of the method"
    )


def _read_parameters(model: nn.Module) -> list[Parameter]:
    """Return the parameters of a model's forward, also through decorators. If they cannot be read, return *args and **kwargs."""
    try:
        return list(signature(model.forward).parameters.values())
    except (TypeError, ValueError):  # a builtin, for example
        return [Parameter("args", Parameter.VAR_POSITIONAL), Parameter("kwargs", Parameter.VAR_KEYWORD)]


def list_forward_keywords(model: nn.Module) -> frozenset[str]:
    """Return the names of all keyword arguments of a model's forward, including those of `Unpack[SomeTypedDict]`."""
    keywords: set[str] = set()
    for parameter in _read_parameters(model):
        if parameter.kind in (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY):
            keywords.add(parameter.name)
        for part in get_args(parameter.annotation) if parameter.kind is Parameter.VAR_KEYWORD else ():
            try:
                keywords.update(get_type_hints(part))
            except (TypeError, NameError):  # not a class, or one whose annotations cannot be imported
                keywords.update(getattr(part, "__annotations__", {}))
    return frozenset(keywords)


def find_input_key(model: nn.Module, name: str | None = None) -> InputKey | None:
    """Find the argument of the model's forward that takes the image. None: the first argument.

    `name` is a keyword of its forward, or a key of the dict that its forward takes. Without a name it is `pixel_values` where
    forward has that keyword, or the only keyword of a forward without positional parameters. InputError where several keywords
    are possible.
    """
    parameters = _read_parameters(model)
    positional = [parameter.name for parameter in parameters if parameter.kind is Parameter.POSITIONAL_OR_KEYWORD]
    keyword_only = [parameter for parameter in parameters if parameter.kind is Parameter.KEYWORD_ONLY]
    names = [parameter.name for parameter in keyword_only]
    has_positions = bool(positional) or any(
        parameter.kind in (Parameter.POSITIONAL_ONLY, Parameter.VAR_POSITIONAL) for parameter in parameters
    )
    if name is not None:
        return InputKey(name, in_dict=has_positions and name not in (*positional, *names))
    if PIXEL_VALUES in (*positional[1:], *names):
        return InputKey(PIXEL_VALUES)
    if has_positions:
        return None
    required = [parameter.name for parameter in keyword_only if parameter.default is Parameter.empty]
    for candidates in (required, names):
        if len(candidates) == 1:
            return InputKey(candidates[0])
    keywords = ", ".join(names) or "none by name"
    raise InputError(
        f"the forward of {type(model).__name__} takes keyword arguments only ({keywords}). Pass the name of the image "
        "argument, such as input_key='image' in the constructor of the method"
    )
