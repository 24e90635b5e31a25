"""Rules of AttnLRP as changed gradients: input times this gradient is the relevance of the input."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.weak import WeakIdKeyDictionary

from camscope.hooks.attention_recorder import compute_attention_probabilities
from camscope.hooks.intercept_torch_functions import (
    ACTIVATIONS,
    BaseFunctionMode,
    bypass_torch_function,
    get_function_name,
    split_names,
)

PRODUCTS = split_names("matmul mm bmm baddbmm einsum mul multiply")  # of two tensors that both follow from the input
DIVISIONS = split_names("div divide true_divide truediv")
# the rule sees what these functions call
COMPOSITE_FUNCTIONS = split_names("multi_head_attention_forward")
CLAMPS = split_names("clamp clamp_min clamp_max clip")  # also used as a bound, which keeps its gradient


class AppliedRules(NamedTuple):
    """How often each rule was applied in a forward pass."""

    n_products: int
    n_normalizations: int
    n_activations: int


class _IdentityRule(torch.autograd.Function):
    """An activation z = f(x) that passes its relevance on: the gradient at x is z/x times the gradient at z."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, z: Tensor) -> Tensor:
        ctx.save_for_backward(x.detach().clone(), z)  # a clone, because the model may change x in place
        return z.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        x, z = ctx.saved_tensors
        stabilizer = torch.finfo(x.dtype).eps
        divisor = torch.where(x < 0, x - stabilizer, x + stabilizer)
        return gradients[0] * z / divisor, None


class AttentionRelevanceMode(BaseFunctionMode):
    """A function mode under which gradients follow the rules of AttnLRP (Achtibat et al. 2024, section 3).

    - Linear layers, convolutions, sums, means and the softmax keep their gradient.
    - A product of two tensors that follow from the input, such as queries and keys, gives half of the gradient to each.
    - An activation z = f(x) passes z/x times the gradient on.
    - A layer, group or RMS norm divides by a constant. A quotient does so too.

    Args:
        x: The input. The rules hold for tensors that are computed from it, not for parameters.

    """

    def __init__(self, x: Tensor) -> None:
        super().__init__()
        self._from_input: Any = WeakIdKeyDictionary()
        self._counts = Counter[str]()
        self._mark(x)

    @property
    def applied_rules(self) -> AppliedRules:
        """How often each rule was applied so far."""
        return AppliedRules(self._counts["product"], self._counts["norm"], self._counts["activation"])

    def run_intercepted_function(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Call a function so that its gradient follows the rules."""
        name = get_function_name(func)
        if not any(map(self._follows_from_input, _list_tensors([args, kwargs]))):
            return func(*args, **kwargs)
        result = self._call_by_rule(name, func, args, kwargs)
        for tensor in _list_tensors([result]):
            self._mark(tensor)
        return result

    def _call_by_rule(self, name: str, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if name in COMPOSITE_FUNCTIONS:
            with self:
                return bypass_torch_function(func)(*args, **kwargs)
        if name == "scaled_dot_product_attention":
            with self:
                return compute_attention(*args, **kwargs)
        if name in ("layer_norm", "group_norm", "rms_norm"):
            self._counts["norm"] += 1
            return _NORMS[name](*args, **kwargs)
        if name in ("rsqrt", "reciprocal"):
            self._counts["norm"] += 1
            return func(*args, **kwargs).detach()
        if name == "normalize":
            self._counts["norm"] += 1
            return args[0] * (func(*args, **kwargs) / _replace_zeros(args[0])).detach()
        if name in DIVISIONS and len(args) > 1 and self._follows_from_input(args[1]):
            self._counts["norm"] += 1
            return func(args[0], args[1].detach(), *args[2:], **kwargs)
        if name in ACTIVATIONS - CLAMPS and self._follows_from_input(args[0] if args else None):
            self._counts["activation"] += 1
            return _apply_identity_rule(func, args, kwargs)
        if name in PRODUCTS and sum(map(self._follows_from_input, _list_tensors([args]))) > 1:
            self._counts["product"] += 1
            return func(*self._halve_gradients(args), **kwargs)
        return func(*args, **kwargs)

    def _halve_gradients(self, values: Any) -> Any:
        if isinstance(values, Tensor):
            return halve_gradient(values) if self._follows_from_input(values) else values
        return [self._halve_gradients(value) for value in values] if isinstance(values, list | tuple) else values

    def _follows_from_input(self, value: object) -> bool:
        return isinstance(value, Tensor) and value in self._from_input

    def _mark(self, tensor: Tensor) -> None:
        self._from_input[tensor] = True


def _apply_identity_rule(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    """Call an activation by the identity rule. An activation in place changes its input."""
    x = args[0]
    with torch.no_grad():
        z = func(x.detach().clone(), *args[1:], **kwargs)
    result: Tensor = _IdentityRule.apply(x, z)
    is_in_place = (
        getattr(func, "__name__", "").endswith("_")
        or kwargs.get("inplace", False)
        or any(each is True for each in args[1:])
    )
    return x.copy_(result) if is_in_place else result


def halve_gradient(x: Tensor) -> Tensor:
    """Return a tensor with the same values, through which half of the gradient flows back."""
    half = x * 0.5
    return half + half.detach()


def compute_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute softmax(q kᵀ s) v step by step. The arguments are those of `scaled_dot_product_attention`."""
    if enable_gqa:
        key, value = (each.repeat_interleave(query.size(-3) // each.size(-3), -3) for each in (key, value))
    attention = compute_attention_probabilities(query, key, attn_mask, is_causal, scale)
    return torch.matmul(F.dropout(attention, dropout_p) if dropout_p else attention, value)


def _normalize_layer(
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    axes = tuple(range(-len(normalized_shape), 0))
    return _scale_and_shift(_divide_by_deviation(x, axes, eps), weight, bias)


def _normalize_groups(
    x: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    grouped = x.reshape(len(x), num_groups, -1)
    shape = (1, -1, *[1] * (x.ndim - 2))
    parameters = (None if each is None else each.view(shape) for each in (weight, bias))
    return _scale_and_shift(_divide_by_deviation(grouped, (-1,), eps).view_as(x), *parameters)


def _normalize_by_root_mean_square(
    x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    axes = tuple(range(-len(normalized_shape), 0))
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    return _scale_and_shift(x * (x.square().mean(axes, keepdim=True) + eps).rsqrt().detach(), weight, None)


def _divide_by_deviation(x: Tensor, axes: tuple[int, ...], eps: float) -> Tensor:
    """Return (x - mean) / standard deviation, where the deviation counts as a constant."""
    deviation = (x.var(axes, correction=0, keepdim=True) + eps).sqrt()
    return (x - x.mean(axes, keepdim=True)) / deviation.detach()


def _scale_and_shift(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    scaled = x if weight is None else x * weight
    return scaled if bias is None else scaled + bias


_NORMS: dict[str, Callable[..., Tensor]] = {
    "layer_norm": _normalize_layer,
    "group_norm": _normalize_groups,
    "rms_norm": _normalize_by_root_mean_square,
}


def _replace_zeros(x: Tensor) -> Tensor:
    return torch.where(x == 0, torch.ones_like(x), x)


def _list_tensors(values: Any) -> list[Tensor]:
    """Return the tensors in nested lists, tuples and dicts."""
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, dict):
        values = list(values.values())
    return [tensor for value in values for tensor in _list_tensors(value)] if isinstance(values, list | tuple) else []
