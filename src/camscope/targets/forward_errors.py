"""Explain why a model's forward failed: mixed dtypes, a wrong argument, or an unusual tensor."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from camscope.errors import CamscopeError, InputError, ModelError, is_out_of_memory
from camscope.pytree import format_argument, iter_argument_leaves
from camscope.unusual_tensors import describe_unusual_tensor

INTEGER_TYPE_NAMES = {  # as torch spells them in errors
    torch.uint8: ("byte", "unsigned char"),
    torch.int8: ("char",),
    torch.int16: ("short",),
    torch.int32: ("int",),
    torch.int64: ("long",),
}
FLOAT_TYPE_NAMES = {torch.float64: "double", torch.float32: "float", torch.float16: "half", torch.bfloat16: "bfloat16"}


@contextmanager
def forward_errors_explained(
    model: nn.Module, x: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[None]:
    """Convert errors of the model's forward inside the `with` to an error that names the cause.

    Known causes are mixed dtypes, and arguments or weights that are unusual tensors. Other errors stay unchanged.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, CamscopeError) or is_out_of_memory(error):
            raise
        if isinstance(error, RuntimeError):
            _raise_if_dtypes_mixed(error, model, x)
        _raise_if_tensor_unusual(error, model, args, kwargs)
        raise


def _raise_if_dtypes_mixed(error: RuntimeError, model: nn.Module, x: Tensor) -> None:
    """If an error is about mixed dtypes, raise an InputError that names the dtypes of the input and the parameters."""
    dtypes = list(dict.fromkeys(value.dtype for value in model.parameters() if value.is_floating_point()))
    message, received = str(error).lower(), str(x.dtype).removeprefix("torch.")
    named = set(re.findall("bfloat16|double|float|half", message))
    names_model = not named.isdisjoint(FLOAT_TYPE_NAMES.get(dtype, "") for dtype in dtypes)
    if names_model and any(name in message for name in INTEGER_TYPE_NAMES.get(x.dtype, ())):
        raise InputError(
            f"the input is {received}, but the model needs floats: pass x.float(), or the float tensor that the model's "
            "preprocessing returns"
        ) from error
    if names_model and x.dtype not in dtypes and FLOAT_TYPE_NAMES.get(x.dtype) in named:
        expected = [str(dtype).removeprefix("torch.") for dtype in dtypes]
        raise InputError(
            f"the input is {received}, but the model's parameters are {' and '.join(expected)}: pass "
            f"x.to(torch.{expected[0]}), or model.to(torch.{received})"
        ) from error


def _raise_if_tensor_unusual(
    error: Exception, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> None:
    """Raise a CamscopeError if an argument or weight is an unusual tensor, for example a sparse tensor."""
    reason = f"the forward of {type(model).__name__} raised {type(error).__name__}"
    for path, value in iter_argument_leaves(args, kwargs):
        if (kind := describe_unusual_tensor(value, "value")) is not None:
            raise InputError(
                f"{reason}, and its additional argument {format_argument(path)} is {kind.description}: if the model does not "
                f"support that, pass {kind.replacement}"
            ) from error
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        if (kind := describe_unusual_tensor(value, "weight")) is not None:
            raise ModelError(
                f"{reason}, and its weight {name} is {kind.description}: if the layer does not support that, set the weight to "
                f"{kind.replacement}"
            ) from error
