"""Read the signature of a model's forward, and find the argument or dict key that takes the image."""

import copy
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Any, Self, get_args, get_type_hints

from torch import Tensor, nn
from torch.utils import _pytree

from camscope.errors import CamscopeError, InputError, is_out_of_memory
from camscope.plurals import inflect

if TYPE_CHECKING:
    from _collections_abc import dict_values

STRING_INDEX_PATTERN = re.compile(r"invalid data type 'str'")  # of PyTorch, for tensor["key"]
FRAMES_FIRST_MODEL_TYPES = frozenset({"timesformer", "videomae", "vivit", "vjepa2"})
PIXEL_VALUES = "pixel_values"  # Hugging Face's keyword for the image, which is not always the first parameter


class ReadRecordingDict(dict[str, Any]):
    """The input of a model that takes a dict. Its keys are attributes too: `batch.image` is `batch["image"]`.

    It records each key that the model looks up, present or missing. Copies of the dict share the records.
    """

    _read_keys: dict[str, None]
    _missing_keys: dict[str, None]

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Create the dict with empty records. Unpickling also calls this method."""
        self = super().__new__(cls)
        vars(self).update(_read_keys={}, _missing_keys={})
        return self

    @property
    def missing_keys(self) -> list[str]:
        """The missing keys that the model looked up, in the order of the look-ups."""
        return list(self._missing_keys)

    def was_read(self, key: str) -> bool:
        """Return whether the model read the value of this key."""
        return key in self._read_keys

    def _record_lookup(self, looked_up_key: object) -> None:
        if isinstance(looked_up_key, str):
            (self._read_keys if dict.__contains__(self, looked_up_key) else self._missing_keys)[looked_up_key] = None

    def __getitem__(self, key: str) -> Any:
        self._record_lookup(key)
        return super().__getitem__(key)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_"):
            self._record_lookup(name)
            if dict.__contains__(self, name):
                return super().__getitem__(name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)

    def __contains__(self, key: object) -> bool:
        is_present = super().__contains__(key)
        if not is_present:
            self._record_lookup(key)
        return is_present

    def __iter__(self) -> Iterator[str]:  # without this method, dict(batch) and {**batch} bypass `__getitem__`
        return super().__iter__()

    def __or__(self, other: Any) -> Any:
        merged = self.copy()
        merged.update(other)
        return merged

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a key. If the key is missing, return the default."""
        self._record_lookup(key)
        return super().get(key, default)

    def pop(self, key: str, *default: Any) -> Any:
        """Remove a key and return its value."""
        self._record_lookup(key)
        return super().pop(key, *default)

    def setdefault(self, key: str, default: Any = None) -> Any:
        """Return the value of a key. If the key is missing, first set it to the default."""
        super().setdefault(key, default)
        return self[key]

    def items(self) -> Any:
        """Return the items as `dict.items` does, and record that the model read all keys."""
        self._read_keys.update(dict.fromkeys(super().keys()))
        return super().items()

    def values(self) -> "dict_values[str, Any]":
        """Return the values as `dict.values` does, and record that the model read all keys."""
        self._read_keys.update(dict.fromkeys(super().keys()))
        return super().values()

    def copy(self) -> "ReadRecordingDict":
        """Return a copy of the dict. The copy shares the records of read keys with the original."""
        copied = type(self)()
        dict.update(copied, super().items())
        vars(copied).update(vars(self))
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> "ReadRecordingDict":
        copied = self.copy()
        dict.update(copied, {key: copy.deepcopy(value, memo) for key, value in super().items()})
        return copied


class _KeyProbeDict(ReadRecordingDict):
    """An empty dict that returns the same value for every key. It records the keys that a model looks up."""

    value: Any = None
    is_unpacked = False

    def __missing__(self, key: object) -> Any:
        if not isinstance(key, str):
            raise KeyError(key)
        return self.value

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or hasattr(Tensor, name):  # a model of tensors reads these, such as x.shape
            raise AttributeError(name)
        return self[name]

    def __contains__(self, key: object) -> bool:
        self._record_lookup(key)
        return isinstance(key, str)

    def get(self, key: str, default: Any = None) -> Any:
        return self[key]

    def pop(self, key: str, *default: Any) -> Any:
        return self[key]

    def keys(self) -> Any:
        self.is_unpacked = True
        return super().keys()

    def items(self) -> Any:
        self.is_unpacked = True
        return super().items()

    def copy(self) -> "ReadRecordingDict":
        self.is_unpacked = True
        return super().copy()


_pytree.register_pytree_node(  # PyTorch does not look into subclasses of dict otherwise
    ReadRecordingDict,
    lambda inputs: (list(inputs.values()), list(inputs)),
    lambda values, keys: ReadRecordingDict(zip(keys, values, strict=True)),
)


@dataclass(frozen=True)
class InputKey:
    """The name under which a model takes its image: a keyword of its forward, or a key of its input dict."""

    name: str
    in_dict: bool = False

    def call_with_input(self, model: nn.Module, x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the model with the image x under this key.

        A model that takes a dict gets kwargs as further keys of the dict. Raises InputError if the model reads other keys.
        """
        inputs = ReadRecordingDict({self.name: x, **kwargs})
        received = list(inputs)
        try:
            output = model(inputs, *args) if self.in_dict else model(*args, **inputs)
        except Exception as error:
            if not isinstance(error, CamscopeError) and not is_out_of_memory(error):
                self._check_key_was_read(model, inputs, received, error)
            raise
        if self.in_dict and inputs.missing_keys and not inputs.was_read(self.name):
            raise self._build_key_error(model, inputs.missing_keys, received)
        return output

    def _check_key_was_read(
        self, model: nn.Module, inputs: ReadRecordingDict, received: Sequence[str], error: Exception
    ) -> None:
        """Raise InputError if the model did not read this key, or if the model failed for lack of another key."""
        if self.name in list_forward_keywords(model):
            return
        if self.in_dict and inputs.was_read(self.name) and STRING_INDEX_PATTERN.search(str(error)):
            raise InputError(
                f"the forward of {type(model).__name__} reads a key inside of its input {self.name!r}, which is a tensor here. "
                "Pass a module whose forward takes the image and builds the nested dict for this model"
            ) from error
        names = _find_missing_keys_or_arguments(error)
        if any(name in received for name in _find_unexpected_arguments(error)):  # the model unpacks the dict
            names = _probe_looked_up_keys(model, inputs.get(self.name), (), {}) if self.in_dict else []
        names = [name for name in names if name not in received]
        is_unread = self.in_dict and not inputs.was_read(self.name)
        missing = list(dict.fromkeys([*inputs.missing_keys, *names]))
        if missing and (is_unread or names):
            raise self._build_key_error(model, missing, received) from error
        if is_unread or _find_unexpected_arguments(error):
            keywords = ", ".join(parameter.name for parameter in _read_parameters(model))
            raise InputError(
                f"input_key={self.name!r}: {type(model).__name__} has no forward argument and no dict key of this name. Its "
                f"arguments: {keywords}. Pass the name of the image argument, or leave input_key out if the image comes first"
            ) from error

    def _build_key_error(self, model: nn.Module, missing: Sequence[str], received: Sequence[str]) -> InputError:
        """Build the error for a model that reads keys which its input dict does not have."""
        names, noun = ", ".join(map(repr, missing)), inflect(len(missing), "key")
        return InputError(
            f"the forward of {type(model).__name__} reads the {noun} {names}, but received {', '.join(map(repr, received))}. "
            f"Pass the key of the image, such as input_key={_choose_image_key(missing)!r}, and other values with "
            "additional_forward_args={...}"
        )


def _find_missing_keys_or_arguments(error: Exception | None) -> list[str]:
    """Return the names that an error reports as missing: dict keys, attributes, or arguments of a call."""
    if isinstance(error, AttributeError) and isinstance(error.obj, ReadRecordingDict):
        return [str(error.name)]
    if isinstance(error, KeyError):
        return [name for name in error.args[:1] if isinstance(name, str)]
    if isinstance(error, TypeError) and (match := re.search(r"missing \d+ required .*?argument", str(error))):
        return re.findall(r"'(\w+)'", str(error)[match.end() :])
    return []


def _find_unexpected_arguments(error: Exception) -> list[str]:
    """Return the names that an error reports as unexpected arguments of a function call."""
    return re.findall(r"unexpected keyword argument '(\w+)'", str(error)) if isinstance(error, TypeError) else []


def _choose_image_key(keys: Sequence[str]) -> str:
    """Return the key under which the model most likely expects the image: a name such as `image`, otherwise the first key."""
    return next((key for key in keys if re.search("im(age|g)|pic|pixel|photo|scan", key, re.IGNORECASE)), keys[0])


def takes_frames_first(model: nn.Module) -> bool:
    """Whether a Hugging Face model takes videos with the frames first, (N,T,C,H,W). The model type in its config decides."""
    config = getattr(model, "config", None)
    is_huggingface = type(config).__module__.startswith("transformers.")
    return is_huggingface and getattr(config, "model_type", None) in FRAMES_FIRST_MODEL_TYPES


def call_model(
    model: nn.Module,
    x: Tensor,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    key: InputKey | None = None,
    *,
    frames_first: bool = False,
) -> Any:
    """Call the model. Pass the image x as the argument `key`.

    With `frames_first`, a video x (N,C,T,H,W) is passed as (N,T,C,H,W).
    """
    x = x.transpose(1, 2) if frames_first else x
    if key is not None:
        return key.call_with_input(model, x, args, kwargs)
    try:
        return model(x, *args, **kwargs)
    except Exception as error:
        if not isinstance(error, CamscopeError) and not is_out_of_memory(error):
            _raise_if_model_takes_dict(model, x, args, kwargs, error)
        raise


def _raise_if_model_takes_dict(
    model: nn.Module, x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any], error: Exception
) -> None:
    """Raise InputError if a model failed on a tensor and expects a dict."""
    if keys := _probe_looked_up_keys(model, x, args, kwargs, error):
        listing = f"It reads the keys {', '.join(map(repr, keys))}. " if len(keys) > 1 else ""
        raise InputError(
            f"the forward of {type(model).__name__} takes a dict, but received a tensor. {listing}Pass the key of the image, "
            f"such as input_key={_choose_image_key(keys)!r} in the constructor of the method"
        ) from error


def _probe_looked_up_keys(
    model: nn.Module, x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any], error: Exception | None = None
) -> list[str]:
    """Run a model on a dict that has x under every key. Return the keys that the model looks up.

    If the model raises the same `error` as before, the dict is not the cause, and the list is empty.
    """
    probe, probe_error = _KeyProbeDict(), None
    probe.value = x
    try:
        model(probe, *args, **kwargs)
    except Exception as raised:
        probe_error = raised
    if error is not None and (type(probe_error), str(probe_error)) == (type(error), str(error)):
        return []
    names = _find_missing_keys_or_arguments(probe_error) if probe.is_unpacked else []
    return list(dict.fromkeys([*probe.missing_keys, *names]))


def _read_parameters(model: nn.Module) -> list[Parameter]:
    """Return the parameters of a model's undecorated forward. For an unreadable signature, return *args and **kwargs."""
    try:
        return list(signature(model.forward).parameters.values())
    except (TypeError, ValueError):  # a builtin, for example
        return [Parameter("args", Parameter.VAR_POSITIONAL), Parameter("kwargs", Parameter.VAR_KEYWORD)]


def list_forward_keywords(model: nn.Module) -> frozenset[str]:
    """Return the names of all keyword arguments of a model's forward, including keys of `Unpack[SomeTypedDict]`."""
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
    """Find the argument of the model's forward that takes the image. Return None if the first argument takes the image.

    `name` is a keyword of forward, or a key of the dict that forward takes. Without a name, choose the keyword `pixel_values`
    if forward has it. Otherwise choose the only keyword of a forward without positional parameters, and raise an InputError
    if there are several.
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
