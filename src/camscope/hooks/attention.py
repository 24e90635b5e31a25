"""Attentions: every self-attention of one forward pass, in whatever layer and by whatever kernel it is computed.

What a watched forward pass does instead of attention: the same, by way of the probabilities.
Blocks: the modules around each self-attention, and passes in which none of them runs.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Self, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from camscope.errors import LayerError
from camscope.hooks.base import Hooks, autocast_uncached, here_only, plain_checkpoints, recomputing, unwrap
from camscope.hooks.function_mode import Calls, Stand, body_of, has_own, name_of, shadowed
from camscope.plurals import plural
from camscope.pytree import Path, leaves, replaced

T = TypeVar("T")


class Attentions(Hooks):
    """The self-attentions of a forward pass, in the order in which they are computed, without touching the model.

        with Attentions() as seen:
            scores = seen.run(lambda: model(x))
            torch.autograd.grad(scores.sum(), [one.probabilities for one in seen.all])

    Fused kernels are computed anew from their queries and keys; elsewhere a softmax over the last axis of (…,T,T) is an
    attention. The graph starts at the first one: what comes before runs without gradients. Cross-attention is left out.
    Only the thread that entered the `with` is watched.
    """

    def __init__(self) -> None:
        super().__init__()
        self.all: list[Attention] = []

    def __enter__(self) -> Self:
        super().__enter__()
        try:
            self.enter_context(torch.inference_mode(False))
            self.enter_context(torch.no_grad())
            self.enter_context(autocast_uncached())
            self.enter_context(plain_checkpoints())
            self._watch: Watch = self.enter_context(Watch(self.all))  # a checkpoint that runs again must find it, too
        except BaseException:
            self.close()
            raise
        return self

    def run(self, forward: Callable[[], T]) -> T:
        """The result of a forward pass; done again with gradients on everywhere where the model turned them off."""
        result = self._watch.during(forward)
        if self.all and (self._watch.cut or not torch.is_grad_enabled()):
            self.all.clear()
            torch.set_grad_enabled(True)
            result = self._watch.during(forward)
        if not self.all:
            raise LayerError(
                "no self-attention was seen in the forward pass: the method is for transformers, and reads attention "
                "between tokens; for any other model pass a method that looks at a layer, such as gradcam"
            )
        torch.set_grad_enabled(True)  # for the score, even where the model switches them off and never back on
        return result


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


@dataclass
class Block:
    """A module that held one self-attention of a pass; its output (N,T,K), a part of the graph, in what it returned."""

    name: str
    module: nn.Module
    output: Tensor
    path: Path
    returned: Any


class Blocks(Hooks):
    """Inside the `with`: which module was around each attention of a list that forward passes fill.

    A block is found by what it does: it is the outermost module that holds this attention and no other, and returns one
    tensor of as many tokens.
    """

    def __init__(self, model: nn.Module, attentions: list[Attention]) -> None:
        super().__init__()
        self._model, self._attentions = unwrap(model), attentions
        self._inside: list[tuple[nn.Module, int]] = []
        self._found: dict[int, Block] = {}

    def __enter__(self) -> Self:
        super().__enter__()
        for name, module in self._model.named_modules():
            if not isinstance(module, torch.jit.ScriptModule):
                self.hold(module.register_forward_pre_hook(here_only(self._begin)))
                self.hold(module.register_forward_hook(here_only(partial(self._end, name))))
        return self

    def around(self, attentions: Sequence[Attention]) -> list[Block]:
        """The block of each of the attentions; a LayerError where they have none, or blocks of several kinds."""
        numbers = [next(i for i, one in enumerate(self._attentions) if one is wanted) for wanted in attentions]
        blocks = [self._found[i] for i in numbers if i in self._found]
        kinds = {(type(block.module), block.output.shape) for block in blocks}
        if len(blocks) < len(numbers) or len({id(block.module) for block in blocks}) < len(blocks) or len(kinds) > 1:
            raise LayerError(
                f"{plural(len(numbers), 'self-attention')}, and {plural(len(blocks), 'block')} around them ("
                f"{', '.join(dict.fromkeys(f'{b.name} {type(b.module).__name__}' for b in blocks)) or 'none'}): expected "
                f"as many modules of one class, each with one attention, that return one tensor of the tokens' shape"
            )
        return blocks

    def _begin(self, module: nn.Module, args: object) -> None:
        if not self._inside:
            self._found.clear()
        self._inside.append((module, len(self._attentions)))

    def _end(self, name: str, module: nn.Module, args: object, returned: Any) -> Any:
        before = next((count for one, count in reversed(self._inside) if one is module), -1)
        while self._inside and self._inside.pop()[0] is not module:
            pass
        if recomputing() or before < 0 or len(self._attentions) != before + 1:
            return None
        samples, _, _, tokens = self._attentions[before].probabilities.shape[:4]
        shapes = (samples, tokens), (tokens, samples)
        outputs = [(path, one) for path, one in leaves(returned) if one.ndim == 3 and tuple(one.shape[:2]) in shapes]
        if len(outputs) != 1:
            return None
        path, output = outputs[0]
        self._found[before] = Block(name, module, output, path, returned)
        return replaced(returned, path, output.clone())  # a next block may add to it in place


@contextmanager
def skipped(blocks: Sequence[Block], output: Tensor) -> Iterator[None]:
    """Passes of this thread in which no block runs: each returns what it did, the last one this output in its place."""
    for block in blocks:
        if has_own(block.module):
            raise LayerError(f"block {block.name!r} has a forward of its own on the instance: it cannot be left out")
    last = blocks[-1]
    stands: dict[nn.Module, Stand] = {block.module: partial(_hand_back, block.returned) for block in blocks}
    stands[last.module] = partial(_hand_back, replaced(last.returned, last.path, output))
    with shadowed(stands):
        yield


def _hand_back(returned: Any, module: nn.Module, args: object, kwargs: object) -> Any:
    return returned
