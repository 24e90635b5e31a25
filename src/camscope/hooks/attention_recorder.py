"""Record the self-attentions of a forward pass, for any layer and any attention kernel.

- `AttentionRecorder` records probabilities and values. It replaces fused kernels by the same computation in steps.
- `AttentionBlockFinder` finds the module around each self-attention, and `blocks_skipped` runs a model without them.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from camscope.errors import LayerError
from camscope.hooks.find_layers import unwrap
from camscope.hooks.intercept_torch_functions import (
    BaseFunctionMode,
    bypass_torch_function,
    get_function_name,
    has_instance_forward,
    override_forward,
)
from camscope.hooks.thread_local_hooks import Hooks, is_in_backward_pass, thread_local_hook
from camscope.plurals import plural
from camscope.pytree import LeafPath, iter_leaves, replace_leaf

T = TypeVar("T")


class AttentionRecorder(Hooks):
    """Records the self-attentions of a forward pass, in the order in which they are computed, without changing the model.

        with AttentionRecorder() as recorder:
            scores = recorder.run(lambda: model(x))
            torch.autograd.grad(scores.sum(), [attention.probabilities for attention in recorder.attentions])

    Fused kernels are recomputed from their queries and keys. Elsewhere, a softmax over the last axis of (…,T,T) counts as an
    attention. The graph starts at the first attention, and everything before it runs without gradients. Cross-attention is
    ignored. Only the thread that entered the `with` is recorded.
    """

    def __init__(self) -> None:
        super().__init__()
        self.attentions: list[Attention] = []

    def _install_hooks(self) -> None:
        self._enter_gradient_scope()
        # entered, because a checkpoint that runs again must find it, too
        self._capture: AttentionCapture = self.enter_context(AttentionCapture(self.attentions))

    def run(self, forward: Callable[[], T]) -> T:
        """Run a forward pass and return its result. If the model disabled gradients, repeat the pass with gradients enabled."""
        result = self._capture.record_during(forward)
        if self.attentions and (self._capture.gradients_interrupted or not torch.is_grad_enabled()):
            self.attentions.clear()
            torch.set_grad_enabled(True)
            result = self._capture.record_during(forward)
        if not self.attentions:
            raise LayerError(
                "no self-attention ran in the forward pass: this method requires a transformer. "
                "For any other model use a method that reads a layer, such as gradcam"
            )
        torch.set_grad_enabled(True)  # for the score, even where the model switches them off and never back on
        return result


FUNCTIONS_TO_ENTER = (F.multi_head_attention_forward, torch.autograd.grad)  # the latter runs checkpoints again
PARAMETRIC_FUNCTIONS = (F.linear, F.layer_norm, F.conv1d, F.conv2d, F.conv3d)
VALUE_PRESERVING_METHODS = ("to", "dropout", "type_as", "contiguous")  # of probabilities
MATMUL_LEFT_ARGUMENT = {"matmul": 0, "bmm": 0, "baddbmm": 1}  # and which argument is the first factor


@dataclass
class Attention:
    """One self-attention: probabilities (N,heads,T,T) in at least float32. Query, key and value (N,heads,T,d) may be
    unknown.

    All are parts of the graph, which starts at the probabilities of the first attention.
    """

    probabilities: Tensor
    query: Tensor | None = None
    key: Tensor | None = None
    value: Tensor | None = None
    output: Tensor | None = None


class AttentionCapture(BaseFunctionMode):
    """A function mode that finds the attentions among the function calls of a model, and records them."""

    def __init__(self, attentions: list[Attention]) -> None:
        super().__init__()
        self._attentions, self._is_recording, self._n_heads = attentions, False, 0
        self.gradients_interrupted = False  # whether gradients were off again between two attentions
        self._last_product: tuple[Tensor, Tensor, Tensor] | None = None  # the last product, and its queries and keys
        self._last_probabilities: tuple[Tensor, Attention] | None = None  # the last, as the model has them

    def record_during(self, forward: Callable[[], T]) -> T:
        """Run a forward pass, and record its attentions."""
        self._is_recording = True
        try:
            return forward()
        finally:
            self._is_recording, self._last_product, self._last_probabilities = False, None, None

    def run_intercepted_function(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Call a function and return its result. If the function is a step of an attention, record its result."""
        name = get_function_name(func)
        if func in FUNCTIONS_TO_ENTER:
            return self._run_and_intercept_inner_calls(func, args, kwargs)
        if name == "scaled_dot_product_attention":
            return self._compute_and_record_fused_attention(func, *args, **kwargs)
        if func in PARAMETRIC_FUNCTIONS:  # with parameters that want gradients, it would keep its input without need
            args = tuple(arg.detach() if isinstance(arg, nn.Parameter) else arg for arg in args)
        result = func(*args, **kwargs)
        if name == "softmax":
            return self._record_softmax(result, kwargs.get("dim", args[1] if len(args) > 1 else None))
        last = self._last_probabilities
        if name in VALUE_PRESERVING_METHODS and last is not None and args and args[0] is last[0]:
            self._last_probabilities = result, last[1]
        place = MATMUL_LEFT_ARGUMENT.get(name, len(args))
        return (
            self._record_queries_keys_or_values(args[place], args[place + 1], result)
            if len(args) >= place + 2
            else result
        )

    def _run_and_intercept_inner_calls(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        """Run a PyTorch function. Also intercept the function calls that it makes."""
        before = self._n_heads
        if func is F.multi_head_attention_forward:
            self._n_heads = kwargs["num_heads"] if "num_heads" in kwargs else args[4]
        try:
            with self:
                return bypass_torch_function(func)(*args, **kwargs)
        finally:
            self._n_heads = before

    def _compute_and_record_fused_attention(
        self,
        func: Callable[..., Tensor],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **kwargs: Any,
    ) -> Tensor:
        """Compute a fused attention step by step and record it. Return the output in the dtype of the model."""
        if query.is_nested or not _is_square((query.shape[-2], key.shape[-2])):
            return func(query, key, value, attn_mask, dropout_p, is_causal, **kwargs)
        kind, dtype = query.device.type, query.dtype
        if torch.is_autocast_enabled(kind) and dtype != torch.float64:
            dtype = torch.get_autocast_dtype(kind)
        with torch.autocast(kind, enabled=False):
            q, k, v = (_widen_to_float32(tensor.to(dtype)) for tensor in (query, key, value))
            if kwargs.get("enable_gqa"):
                k, v = (tensor.repeat_interleave(q.shape[-3] // tensor.shape[-3], -3) for tensor in (k, v))
            attention = self._record_attention(
                compute_attention_probabilities(q, k, attn_mask, is_causal, kwargs.get("scale"))
            )
            output = F.dropout(attention.probabilities, dropout_p).view(*q.shape[:-1], q.shape[-2]) @ v
            attention.query, attention.key, attention.value = map(self._add_head_axis, (q, k, v))
            attention.output = self._add_head_axis(output)
            return _copy_with_shape_and_dtype(attention.output, output.shape, dtype)

    def _record_softmax(self, result: Tensor, dim: int | None) -> Tensor:
        """Record the result of a softmax that computes attention. Return the probabilities that the model uses from here."""
        rank = 3 if self._n_heads else 4
        if result.ndim < rank or dim not in (-1, result.ndim - 1) or not _is_square(result.shape[-2:]):
            return result
        attention = self._record_attention(_widen_to_float32(result))
        probabilities = _copy_with_shape_and_dtype(attention.probabilities, result.shape, result.dtype)
        if self._last_product is not None and self._last_product[0].shape == result.shape:
            query, key = map(_widen_to_float32, self._last_product[1:])
            attention.query, attention.key = self._add_head_axis(query), self._add_head_axis(key)
        self._last_probabilities, self._last_product = (probabilities, attention), None
        return probabilities

    def _record_queries_keys_or_values(self, left: Tensor, right: Tensor, result: Tensor) -> Tensor:
        """Record a matrix product of an attention, and return its result. Before the softmax, the factors are queries
        and keys. After the softmax, they are probabilities and values.
        """
        if self._last_probabilities is not None and left is self._last_probabilities[0]:
            attention, self._last_probabilities = self._last_probabilities[1], None
            attention.value = self._add_head_axis(_widen_to_float32(right))
            attention.output = self._add_head_axis(result)
            return _copy_with_shape_and_dtype(attention.output, result.shape, result.dtype)
        if result.ndim >= 3 and _is_square(result.shape[-2:]):
            self._last_product = result, left, right.transpose(-2, -1)
        return result

    def _record_attention(self, probabilities: Tensor) -> Attention:
        """Store the probabilities of an attention layer. Return them with a gradient, one matrix per head."""
        by_heads = self._add_head_axis(probabilities)
        self.gradients_interrupted |= bool(self._attentions) and not torch.is_grad_enabled()
        if not (torch.is_grad_enabled() and by_heads.requires_grad and self._attentions):
            by_heads = by_heads.detach().requires_grad_()
        torch.set_grad_enabled(True)
        attention = Attention(by_heads)
        if self._is_recording and not is_in_backward_pass():
            self._attentions.append(attention)
        return attention

    def _add_head_axis(self, values: Tensor) -> Tensor:
        """Add an axis of heads to a tensor: (N·heads,…) becomes (N,heads,…). A tensor with four axes has it already,
        and stays unchanged.
        """
        if values.ndim != 3:
            return values
        return values.unflatten(0, (-1, self._n_heads)) if self._n_heads else values[:, None]


def compute_attention_probabilities(
    q: Tensor, k: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None
) -> Tensor:
    """Compute attention probabilities (…,T,T) from queries and keys. A row whose positions are all masked is zero."""
    scores = q @ k.transpose(-2, -1) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if is_causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    if mask is None:
        return scores.softmax(-1)
    scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    blind = (scores == -math.inf).all(-1, keepdim=True)
    return scores.masked_fill(blind, 0).softmax(-1).masked_fill(blind, 0)


def _copy_with_shape_and_dtype(values: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return a copy of recorded values. The model may change this copy in place, and gradients flow through it."""
    return values.view(shape).to(dtype, copy=True)


def _widen_to_float32(values: Tensor) -> Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))


def _is_square(shape: Sequence[int]) -> bool:
    return shape[-1] == shape[-2] > 1


@dataclass
class AttentionBlock:
    """A module that computes one self-attention of a forward pass. Its `output` (N,T,K) is part of the graph."""

    name: str
    module: nn.Module
    output: Tensor
    path: LeafPath
    output_structure: Any


class AttentionBlockFinder(Hooks):
    """Finds the module around each recorded attention, in forward passes inside the `with`.

    A block is the outermost module that computes exactly one attention and returns one tensor with as many tokens.
    """

    def __init__(self, model: nn.Module, attentions: list[Attention]) -> None:
        super().__init__()
        self._model, self._attentions = unwrap(model), attentions
        self._open_modules: list[tuple[nn.Module, int]] = []
        self._blocks: dict[int, AttentionBlock] = {}

    def _install_hooks(self) -> None:
        """Hook every module, to relate its output to the attention that ran inside it."""
        for name, module in self._model.named_modules():
            if not isinstance(module, torch.jit.ScriptModule):
                self.add_handle(module.register_forward_pre_hook(thread_local_hook(self._enter_module)))
                self.add_handle(
                    module.register_forward_hook(thread_local_hook(partial(self._record_attention_block, name)))
                )

    def find_blocks(self, attentions: Sequence[Attention]) -> list[AttentionBlock]:
        """Return the block around each attention. Raise LayerError for an attention outside of a block, and for blocks
        of different types.
        """
        number_by_id = {id(recorded): number for number, recorded in enumerate(self._attentions)}
        numbers = [number_by_id[id(attention)] for attention in attentions]
        blocks = [self._blocks[i] for i in numbers if i in self._blocks]
        kinds = {(type(block.module), block.output.shape) for block in blocks}
        if len(blocks) < len(numbers) or len({id(block.module) for block in blocks}) < len(blocks) or len(kinds) > 1:
            names = ", ".join(dict.fromkeys(f"{block.name} {type(block.module).__name__}" for block in blocks))
            raise LayerError(
                f"{plural(len(numbers), 'self-attention')} in {plural(len(blocks), 'block')} ({names or 'none'}): "
                "expected one block for each, all of one class, with one attention each and a single output tensor "
                "in the shape of the tokens"
            )
        return blocks

    def _enter_module(self, module: nn.Module, args: object) -> None:
        if not self._open_modules:
            self._blocks.clear()
        self._open_modules.append((module, len(self._attentions)))

    def _record_attention_block(self, name: str, module: nn.Module, args: object, layer_output: Any) -> Any:
        """Store a module's output as an attention block if exactly one attention ran inside the module."""
        before = next((count for item, count in reversed(self._open_modules) if item is module), -1)
        while self._open_modules and self._open_modules.pop()[0] is not module:
            pass
        if is_in_backward_pass() or before < 0 or len(self._attentions) != before + 1:
            return None
        samples, _, _, tokens = self._attentions[before].probabilities.shape[:4]
        shapes = (samples, tokens), (tokens, samples)
        leaves = [
            leaf for leaf in iter_leaves(layer_output) if leaf[1].ndim == 3 and tuple(leaf[1].shape[:2]) in shapes
        ]
        if len(leaves) != 1:
            return None
        path, output = leaves[0]
        self._blocks[before] = AttentionBlock(name, module, output, path, layer_output)
        return replace_leaf(layer_output, path, output.clone())  # a next block may add to it in place


@contextmanager
def blocks_skipped(blocks: Sequence[AttentionBlock], output: Tensor) -> Iterator[None]:
    """Skip attention blocks inside the `with`. The last block returns `output`. All others return their recorded output."""
    for block in blocks:
        if has_instance_forward(block.module):
            patched = f"block {block.name!r} has a forward on the instance"
            raise LayerError(f"{patched} and cannot be skipped: remove that patch")
    last = blocks[-1]
    stored = {block.module: block.output_structure for block in blocks}
    stored[last.module] = replace_leaf(last.output_structure, last.path, output)
    with override_forward(dict.fromkeys(stored, lambda module, args, kwargs: stored[module])):
        yield
