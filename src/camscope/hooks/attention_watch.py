"""What a watched forward pass does instead of attention: the same, by way of the probabilities."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from camscope.hooks.body import body_of
from camscope.hooks.calls import Calls, name_of
from camscope.hooks.checkpoint import recomputing

T = TypeVar("T")
CALLERS = (F.multi_head_attention_forward, torch.autograd.grad)  # the latter runs checkpoints again
WEIGHING = (F.linear, F.layer_norm, F.conv1d, F.conv2d, F.conv3d)
PASSING = ("to", "dropout", "type_as", "contiguous")  # probabilities are still what they were behind these
PRODUCTS = {"matmul": 0, "bmm": 0, "baddbmm": 1}  # and which argument is the first factor


@dataclass
class Attention:
    """One self-attention: probabilities (N,heads,T,T), at least float32, and what is known of (N,heads,T,d) each.

    All are parts of the graph, which begins at the first attention's probabilities.
    """

    probabilities: Tensor
    query: Tensor | None = None
    key: Tensor | None = None
    value: Tensor | None = None
    output: Tensor | None = None


class Watch(Calls):
    """Sees every function that the model calls; keeps what is an attention."""

    def __init__(self, found: list[Attention]) -> None:
        super().__init__()
        self._found, self._noting, self._heads = found, False, 0
        self.cut = False  # whether gradients were off again between two attentions
        self._scores: tuple[Tensor, Tensor, Tensor] | None = None  # the last product, and its queries and keys
        self._given: tuple[Tensor, Attention] | None = None  # the last probabilities, as the model has them

    def during(self, forward: Callable[[], T]) -> T:
        """Attentions are noted while this runs."""
        self._noting = True
        try:
            return forward()
        finally:
            self._noting, self._scores, self._given = False, None, None

    def called(self, func: Callable[..., Any], args: Sequence[Any], named: dict[str, Any]) -> Any:
        """The result of every function that the model calls: its own, or the same by way of the probabilities."""
        name = name_of(func)
        if func in CALLERS:
            return self._inside(func, args, named)
        if name == "scaled_dot_product_attention":
            return self._fused(func, *args, **named)
        if func in WEIGHING:  # with parameters that want gradients, it would keep its input for nobody
            args = tuple(one.detach() if isinstance(one, nn.Parameter) else one for one in args)
        result = func(*args, **named)
        if name == "softmax":
            return self._softmax(result, named.get("dim", args[1] if len(args) > 1 else None))
        if name in PASSING and self._given is not None and args and args[0] is self._given[0]:
            self._given = result, self._given[1]
        if name in PRODUCTS and len(args) >= PRODUCTS[name] + 2:
            return self._product(args[PRODUCTS[name]], args[PRODUCTS[name] + 1], result)
        return result

    def _inside(self, func: Callable[..., Any], args: Sequence[Any], named: dict[str, Any]) -> Any:
        """The body of a function of PyTorch, watched."""
        before = self._heads
        if func is F.multi_head_attention_forward:
            self._heads = named["num_heads"] if "num_heads" in named else args[4]
        try:
            with self:
                return body_of(func)(*args, **named)
        finally:
            self._heads = before

    def _fused(
        self,
        func: Callable[..., Tensor],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **more: Any,
    ) -> Tensor:
        if query.is_nested or not _is_square((query.shape[-2], key.shape[-2])):
            return func(query, key, value, attn_mask, dropout_p, is_causal, **more)
        kind, dtype = query.device.type, query.dtype
        if torch.is_autocast_enabled(kind) and dtype != torch.float64:
            dtype = torch.get_autocast_dtype(kind)
        with torch.autocast(kind, enabled=False):
            q, k, v = (_full(one.to(dtype)) for one in (query, key, value))
            if more.get("enable_gqa"):
                k, v = (one.repeat_interleave(q.shape[-3] // one.shape[-3], -3) for one in (k, v))
            kept = self._keep(_probabilities(q, k, attn_mask, is_causal, more.get("scale")))
            given = F.dropout(kept.probabilities, dropout_p).view(*q.shape[:-1], q.shape[-2])
            output = given @ v
            kept.query, kept.key, kept.value, kept.output = map(self._by_heads, (q, k, v, output))
            return _handed_on(kept.output, output.shape, dtype)

    def _softmax(self, result: Tensor, dim: int | None) -> Tensor:
        rank = 3 if self._heads else 4
        if result.ndim < rank or dim not in (-1, result.ndim - 1) or not _is_square(result.shape[-2:]):
            return result
        kept = self._keep(_full(result))
        given = _handed_on(kept.probabilities, result.shape, result.dtype)
        if self._scores is not None and self._scores[0].shape == result.shape:
            kept.query, kept.key = (self._by_heads(_full(one)) for one in self._scores[1:])
        self._given, self._scores = (given, kept), None
        return given

    def _product(self, left: Tensor, right: Tensor, result: Tensor) -> Tensor:
        """A product before a softmax is of queries and keys, one after it of probabilities and values."""
        if self._given is not None and left is self._given[0]:
            kept, self._given = self._given[1], None
            kept.value, kept.output = self._by_heads(_full(right)), self._by_heads(result)
            return _handed_on(kept.output, result.shape, result.dtype)
        if result.ndim >= 3 and _is_square(result.shape[-2:]):
            self._scores = result, left, right.transpose(-2, -1)
        return result

    def _keep(self, probabilities: Tensor) -> Attention:
        by_heads = self._by_heads(probabilities)
        self.cut = self.cut or (bool(self._found) and not torch.is_grad_enabled())
        if not (torch.is_grad_enabled() and by_heads.requires_grad and self._found):
            by_heads = by_heads.detach().requires_grad_()
        torch.set_grad_enabled(True)
        kept = Attention(by_heads)
        if self._noting and not recomputing():
            self._found.append(kept)
        return kept

    def _by_heads(self, values: Tensor) -> Tensor:
        """(N,heads,…): with the axis of heads that three axes do not show."""
        if values.ndim != 3:
            return values
        return values.unflatten(0, (-1, self._heads)) if self._heads else values[:, None]


def _probabilities(q: Tensor, k: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None) -> Tensor:
    """(…,T,T): a row that may look nowhere is zero, as the kernels have it."""
    scores = q @ k.transpose(-2, -1) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if is_causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    if mask is None:
        return scores.softmax(-1)
    scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    blind = (scores == -math.inf).all(-1, keepdim=True)
    return scores.masked_fill(blind, 0).softmax(-1).masked_fill(blind, 0)


def _handed_on(kept: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A copy, which the model may change in place, and which the kept tensor lies before in the graph."""
    return kept.view(shape).to(dtype, copy=True)


def _full(values: Tensor) -> Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))


def _is_square(shape: Sequence[int]) -> bool:
    return shape[-1] == shape[-2] > 1
