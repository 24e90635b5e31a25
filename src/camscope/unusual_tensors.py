"""Find unusual tensors, such as sparse, quantized or meta tensors, and say what to pass instead."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.masked import MaskedTensor
from torch.nn.parameter import is_lazy

UNSIGNED_DTYPES = (torch.uint16, torch.uint32, torch.uint64)  # with few operators
ORDINARY_DTYPES = (
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool),
    *(torch.complex32, torch.complex64, torch.complex128),
)


class UnusualTensor(NamedTuple):
    """Description of a tensor that PyTorch's ordinary operators do not support.

    Args:
        description: What the tensor is, such as `a quantized tensor`.
        replacement: What to pass instead: code such as `x.dequantize()`, or a phrase.
        has_values: Whether a model may be able to use the tensor. A tensor without values never has a result.
        is_castable: Whether only its dtype is unusual, and `.float()` converts it.

    """

    description: str
    replacement: str
    has_values: bool = True
    is_castable: bool = False


def describe_unusual_tensor(tensor: Tensor, name: str = "x") -> UnusualTensor | None:
    """Describe what is unusual about a tensor. Return None for an ordinary tensor.

    `name` is the name of the tensor in the suggested replacement, such as `x.to_dense()`.

    >>> describe_unusual_tensor(torch.eye(2).to_sparse())[:2]
    ('a tensor of layout sparse_coo', 'x.to_dense()')
    >>> print(describe_unusual_tensor(torch.eye(2)))
    None
    """
    if is_lazy(tensor):
        return UnusualTensor(
            "an uninitialized parameter, which has no values", "a tensor with values", has_values=False
        )
    if (
        torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        or torch._is_functional_tensor(tensor)
        or isinstance(tensor, FunctionalTensor)
    ):
        return UnusualTensor(
            "part of a transform of torch.func, as inside vmap", "a tensor from outside of torch.func", has_values=False
        )
    if isinstance(tensor, FakeTensor):
        replacement = "a tensor made outside of FakeTensorMode"
        return UnusualTensor("a FakeTensor, which has no values", replacement, has_values=False)
    if tensor.is_meta:
        return UnusualTensor(
            "a tensor on the meta device, which has no values", "a tensor with values", has_values=False
        )
    if tensor.is_nested:
        return UnusualTensor("a nested tensor", f"torch.nested.to_padded_tensor({name}, 0.0)")
    if tensor.is_quantized:
        return UnusualTensor("a quantized tensor", f"{name}.dequantize()")
    if isinstance(tensor, MaskedTensor):
        return UnusualTensor("a masked tensor", f"{name}.to_tensor(0.0)")
    if tensor.layout != torch.strided:
        layout = str(tensor.layout).removeprefix("torch.")
        return UnusualTensor(f"a tensor of layout {layout}", f"{name}.to_dense()")
    if tensor.dtype not in ORDINARY_DTYPES:
        return _describe_unusual_dtype(tensor.dtype, name)
    return None


def to_ordinary_tensor(tensor: Tensor) -> Tensor:
    """Convert an unusual tensor to an ordinary one. `UnusualTensor.replacement` names the conversion.

    Numbers of less than a byte become the bytes of their memory. Masked values become 0.
    """
    if tensor.is_nested:
        padded: Tensor = torch.nested.to_padded_tensor(tensor, 0.0)
        return padded
    if tensor.is_quantized:
        return tensor.dequantize()
    if isinstance(tensor, MaskedTensor):
        masked: Tensor = tensor.to_tensor(0.0)
        return masked
    if tensor.layout != torch.strided:
        return tensor.to_dense()
    kind = describe_unusual_tensor(tensor)
    return tensor if kind is None or kind.is_castable else tensor.view(torch.uint8)


def check_ordinary_tensor(
    tensor: Tensor, role: str, name: str, error: Callable[[str], Exception], *, allow_castable: bool = False
) -> None:
    """Raise an error if a tensor is not ordinary. `role` names the tensor in the message, such as `the input`.

    With `allow_castable`, dtypes such as float8 and uint16 are accepted, because the caller converts them.
    """
    kind = describe_unusual_tensor(tensor, name)
    if kind is not None and not (allow_castable and kind.is_castable):
        raise error(f"{role} is {kind.description}; expected an ordinary tensor: pass {kind.replacement}")


def _describe_unusual_dtype(dtype: torch.dtype, name: str) -> UnusualTensor:
    description = f"a tensor of {dtype}"
    if dtype in UNSIGNED_DTYPES or "float8" in str(dtype):
        return UnusualTensor(description, f"{name}.float()", is_castable=True)
    return UnusualTensor(description, f"{name}.view(torch.uint8).float()")  # bits, and numbers of less than a byte


def is_inside_transform() -> bool:
    """Return whether this thread runs inside a transform of torch.func, such as vmap or grad."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def is_fake_mode_active() -> bool:
    """Return whether FakeTensorMode is active in this thread. In this mode, operators return tensors without values."""
    return detect_fake_mode() is not None
