"""`Tap`: record the output of a layer, and the gradient of a score with respect to this output."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar
from weakref import ref

import torch
from torch import Tensor, nn

from camscope.errors import LayerError, Remedy
from camscope.hooks.find_layers import find_layers, unwrap
from camscope.hooks.thread_local_hooks import (
    Hooks,
    is_in_backward_pass,
    reentrant_checkpoints_disabled,
    register_gradient_hook,
    thread_local_hook,
)
from camscope.plurals import plural
from camscope.pytree import find_main_tensor, replace_leaf

T = TypeVar("T")


@dataclass
class TappedCall:
    """One call of one layer: a copy of its output and, after `backward`, the score's gradient with respect to it."""

    activation: Tensor
    gradient: Tensor | None = None


class Tap(Hooks):
    """Outputs of one or several layers, and the gradients of a score with respect to them.

    ::

        with Tap(model, "layer4") as tap:
            scores = model(x)
            tap.backward(scores[:, 3].sum())
        tap.activation, tap.gradient        # of the last call that the score depends on

    Inside the `with` the graph starts at the layer. The forward pass runs without gradients until the layer's output, a new
    leaf, switches them on. The model continues with a clone, so an in-place operation cannot overwrite the snapshot.

    Args:
        model: The model.
        layers: Names, glob patterns or modules.
        output_index: Key of the tensor, for a layer that returns several.
        call_index: Which call is read, for a layer that runs several times. The default is the last one that the score
            depends on.
        gradients: Whether to record gradients. If False, no graph is built.
        keep_graph: Whether the graph reaches back to the input and the parameters before the layer, and whether `activation`
            and `gradient` belong to it, so that a loss of them can be differentiated. The caller switches gradients on.

    >>> model = nn.Sequential(nn.Identity(), nn.Linear(2, 1))
    >>> with Tap(model, "0", gradients=False) as tap:
    ...     score = model(torch.ones(1, 2))
    >>> tap.activation.tolist()
    [[1.0, 1.0]]

    """

    def __init__(
        self,
        model: nn.Module,
        layers: str | nn.Module | Iterable[str | nn.Module],
        *,
        output_index: str | int | None = None,
        call_index: int | None = None,
        gradients: bool = True,
        keep_graph: bool = False,
    ) -> None:
        super().__init__()
        self._modules = find_layers(unwrap(model), layers)
        self._output_index, self._call_index, self._gradients = output_index, call_index, gradients
        self._keep_graph = keep_graph
        self.calls: dict[str, list[TappedCall]] = {name: [] for name in self._modules}

    def _install_hooks(self) -> None:
        """Hook the tapped layers. Raise a LayerError for a layer in TorchScript."""
        if self._keep_graph:
            self.enter_context(reentrant_checkpoints_disabled())
        else:
            self._enter_gradient_scope()
        for name, module in self._modules.items():
            if isinstance(module, torch.jit.ScriptModule):
                raise LayerError(
                    f"layer {name!r} is TorchScript: hooks cannot reach it",
                    fix="choose a layer outside of it",
                    remedy=Remedy.SET_LAYER,
                )
            self.add_handle(module.register_forward_hook(thread_local_hook(partial(self._record_output, name))))

    def run(self, forward: Callable[[], T]) -> T:
        """Run a forward pass and return its result. If the model disabled gradients, repeat the pass with gradients enabled.

        The result does not show whether a part of its graph is missing. So the forward pass runs again whenever
        gradients were off.
        """
        result = forward()
        self._check_each_layer_ran()
        if not self._gradients:
            return result
        if not torch.is_grad_enabled():
            for calls in self.calls.values():
                calls.clear()
            torch.set_grad_enabled(True)
            result = forward()
            self._check_each_layer_ran()
        torch.set_grad_enabled(True)  # for the score, even where the model switches them off and never back on
        return result

    def backward(self, score: Tensor, *, retain_graph: bool = False) -> None:
        """Compute the gradient of a scalar score at every recorded call. The `.grad` of tensors does not change."""
        self._check_each_layer_ran()
        unrelated = f"the score does not depend on {self._format_layer_names()}"
        if not score.requires_grad:
            raise LayerError(f"{unrelated}: the model detaches the output, or turns gradients off after the layer")
        calls = [call for calls in self.calls.values() for call in calls]
        for call in calls:
            call.gradient = None
        activations, create_graph = [call.activation for call in calls], self._keep_graph
        gradients = torch.autograd.grad(
            score, activations, allow_unused=True, retain_graph=retain_graph or create_graph, create_graph=create_graph
        )
        if create_graph:
            for call, gradient in zip(calls, gradients, strict=True):
                call.gradient = gradient
        if all(call.gradient is None for call in calls):
            raise LayerError(unrelated)

    def compute_gradient(self, score: Tensor, *, retain_graph: bool = False) -> Tensor:
        """Return the gradient of a scalar score with respect to `activation`, in the same shape."""
        self.backward(score, retain_graph=retain_graph)
        return self.gradient

    @property
    def activation(self) -> Tensor:
        """The output of the tapped layer in the selected call, such as (N,K,h,w)."""
        activation = self.select_call().activation
        return activation if self._keep_graph else activation.detach()

    @property
    def gradient(self) -> Tensor:
        """The gradient of the score with respect to `activation`, in the same shape."""
        gradient = self.select_call().gradient
        if gradient is None:
            raise LayerError(
                f"no gradient at {self._format_layer_names()}: call backward(score) first, with a score of this call"
            )
        return gradient

    def select_call(self, layer: str | None = None) -> TappedCall:
        """Return call number `call_index` of a layer. The name is optional if only one layer is recorded."""
        names = self._format_layer_names()
        if layer is None and len(self.calls) != 1:
            tapped = plural(len(self.calls), "layer is", "layers are")
            raise LayerError(f"{tapped} tapped; pass the name of one: {', '.join(self.calls)}")
        calls = self.calls[layer if layer is not None else next(iter(self.calls))]
        if self._call_index is not None:
            if not -len(calls) <= self._call_index < len(calls):
                raise LayerError(
                    f"call_index={self._call_index} is out of range: {names} ran {plural(len(calls), 'time')}"
                )
            return calls[self._call_index]
        if not calls:
            raise LayerError(f"{names} has not run")
        return ([call for call in calls if call.gradient is not None] or calls)[-1]

    def _record_output(self, name: str, module: nn.Module, args: object, output: Any) -> Any:
        """Store a copy of a layer's output, and pass on another copy whose gradient is recorded."""
        path, tensor = find_main_tensor(name, output, self._output_index)
        if not self._gradients:
            self.calls[name].append(TappedCall(tensor.detach().clone()))
            return None
        connected = torch.is_grad_enabled() and tensor.requires_grad and (self._keep_graph or any(self.calls.values()))
        snapshot = tensor.clone() if connected else tensor.detach().clone().requires_grad_()
        if not is_in_backward_pass():
            call = TappedCall(snapshot)
            if not self._keep_graph:
                register_gradient_hook(snapshot, partial(_store_gradient, ref(call)))
            self.calls[name].append(call)
        torch.set_grad_enabled(True)
        return replace_leaf(output, path, snapshot.clone())

    def _check_each_layer_ran(self) -> None:
        for name, calls in self.calls.items():
            if not calls:
                raise LayerError(
                    f"layer {name!r} did not run in the forward pass: the model does not use it, or it is TorchScript"
                )

    def _format_layer_names(self) -> str:
        return " or ".join(f"layer {name!r}" for name in self.calls)


def _store_gradient(call_reference: ref[TappedCall], gradient: Tensor) -> None:
    # a weak reference, so that tensor, hook and call form no cycle for the garbage collector
    call = call_reference()
    if call is not None:
        call.gradient = gradient
