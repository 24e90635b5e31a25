"""`ActivationsAndGradients`: record the outputs of layers and the gradients at these outputs. Names follow pytorch-grad-cam."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from camscope.hooks.thread_local_hooks import thread_local_hook


class ActivationsAndGradients:
    """The outputs of layers in the last forward pass, and the gradients of the next backward pass, on the CPU."""

    def __init__(
        self,
        model: nn.Module,
        target_layers: Sequence[nn.Module],
        reshape_transform: Callable[[Any], Tensor] | None,
        detach: bool = True,
    ) -> None:
        self.model, self.reshape_transform, self.detach = model, reshape_transform, detach
        self.activations: list[Tensor] = []
        self.gradients: list[Tensor] = []
        self.handles = [layer.register_forward_hook(self.save_activation) for layer in target_layers]

    def __call__(self, x: Any) -> Any:
        """Delete the stored activations and gradients. Run the model on x and return its output."""
        self.clear()
        return self.model(x)

    def save_activation(self, module: nn.Module, input: object, output: Any) -> None:
        """Store the output of a layer. Also store its gradient when a backward pass reaches the layer."""
        self.activations.append(self._reshape_and_move_to_cpu(output))
        if isinstance(output, Tensor) and output.requires_grad:
            register: Callable[[Callable[[Tensor], None]], object] = output.register_hook
            register(lambda gradient: self.gradients.insert(0, self._reshape_and_move_to_cpu(gradient)))

    def clear(self) -> None:
        """Delete the stored activations and gradients."""
        self.activations, self.gradients = [], []

    def release(self) -> None:
        """Remove the hooks, and delete the stored activations and gradients."""
        for handle in self.handles:
            handle.remove()
        self.clear()

    def _reshape_and_move_to_cpu(self, values: Any) -> Tensor:
        shaped: Tensor = values if self.reshape_transform is None else self.reshape_transform(values)
        return shaped.detach().cpu() if self.detach else shaped


class StructuredOutputError(Exception):
    """A layer's output is no tensor, so it has no gradient."""


class OverwrittenOutputs:
    """The outputs of layers as they are at the end of the forward pass. Later in-place operations may have changed them."""

    def __init__(self, layers: Mapping[str, nn.Module], reshape: Callable[[Any], Tensor]) -> None:
        self._layers, self._reshape = layers, reshape
        self.outputs: dict[str, Tensor] = {}

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Record the first call of each layer inside the `with`. Raise StructuredOutputError if an output is not a tensor."""
        handles: list[Any] = []

        def record(name: str, module: nn.Module, args: object, output: Any) -> None:
            if name not in self.outputs:
                # of a device other than the CPU, pytorch-grad-cam copies the output at once
                shaped = self._reshape(output).detach()
                self.outputs[name] = shaped if shaped.device.type == "cpu" else shaped.clone()

        def check(module: nn.Module, args: object, output: Any) -> None:
            if not isinstance(output, Tensor):
                raise StructuredOutputError(type(output).__name__)

        def append_hook(name: str, module: nn.Module, args: object) -> None:
            # only now, so that it sees the output that the hooks of the explainer pass on
            handles.append(module.register_forward_hook(thread_local_hook(partial(record, name))))

        for name, layer in self._layers.items():
            handles.append(layer.register_forward_hook(thread_local_hook(check)))
            handles.append(layer.register_forward_pre_hook(thread_local_hook(partial(append_hook, name))))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def to_device(values: Any, device: torch.device) -> Any:
    """Move a tensor to a device. Return any other value unchanged."""
    return values.to(device) if isinstance(values, Tensor) else values
