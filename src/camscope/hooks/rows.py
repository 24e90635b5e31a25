"""Linear layers whose backward pass leaves out the rows that no gradient reaches: exact, and cheap for class tokens.

After its last attention a transformer that classifies by a class token sends one row's gradient back through layers
that work on all of them: products with zeros, most of what a CAM at the last attention costs.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable

from camscope.hooks.base import Hooks
from camscope.hooks.copying import Mark


@contextmanager
def zero_rows_skipped(model: nn.Module) -> Iterator[None]:
    """Gradients of inputs, not of weights, through the model's linear layers on (N,T,K), in this thread, on a CPU.

    A layer with anybody else's hook on it, or with a class or a forward of its own, is left alone. On a card, finding
    the rows would wait for the card.
    """
    with Hooks() as hooks:
        for module in model.modules():
            if type(module) is nn.Linear:
                hooks.hold(module.register_forward_hook(_Skip()))
        yield


class _Skip(Mark):
    """The forward hook of one thread: the same output, with another way back."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()

    def __call__(self, module: nn.Linear, args: tuple[Any, ...], output: Any) -> Tensor | None:
        if threading.get_ident() != self._thread or not torch.is_grad_enabled() or not _is_plain(module):
            return None
        x = args[0] if args else None
        if not isinstance(x, Tensor) or not x.requires_grad or x.ndim < 3 or x.device.type != "cpu":
            return None
        back: Tensor = _LiveRows.apply(x, output.detach(), module.weight.detach())
        return back


def _is_plain(module: nn.Linear) -> bool:
    """Whether what left the module is x Wᵀ + b and nothing else."""
    hooks = (*module._forward_hooks.values(), *nn.modules.module._global_forward_hooks.values())
    return "forward" not in module.__dict__ and all(isinstance(hook, _Skip) for hook in hooks)


class _LiveRows(torch.autograd.Function):
    """x Wᵀ + b, worked out already; its gradient g W, only for the rows in which g is not zero."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, output: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        same: Tensor = output.new_empty(0)
        same.set_(output)  # type: ignore[call-overload]  # a tensor is a source too; and no view: it may be changed in place
        return same

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        weight = ctx.saved_tensors[0].to(gradient.dtype)
        rows = gradient.flatten(0, -2)
        live = rows.abs().amax(-1).nonzero()[:, 0]
        if 2 * len(live) > len(rows):
            return gradient @ weight, None, None
        back = rows.new_zeros(len(rows), weight.shape[1])
        back[live] = rows[live] @ weight
        return back.view(*gradient.shape[:-1], -1), None, None
