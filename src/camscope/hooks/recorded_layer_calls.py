"""Recorded calls of layers: snapshots of inputs and outputs, and the gradients at both."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NoReturn

import torch
from torch import Tensor

from camscope.errors import LayerError
from camscope.plurals import plural
from camscope.pytree import LeafPath, iter_leaves, replace_leaf


class GradientAccumulator:
    """The gradient at one tensor in the last backward pass, summed over all paths on which it arrives.

    If a view is changed in place, autograd sends only a part of its gradient here, or none. The view's version counter
    shows this, and then no gradient is returned.
    """

    def __init__(self, tensor: Tensor, take_snapshot: Callable[[Tensor], Tensor]) -> None:
        self._take_snapshot = take_snapshot
        self._alias = tensor.detach() if tensor._is_view() else None
        self._version = tensor._version
        self._backward_pass_id, self._was_lost = -1, False
        self._sum: Tensor | None = None

    def add_gradient(self, gradient: Tensor | None) -> None:
        """Add a gradient of the tensor to the sum. The first gradient of a new backward pass starts a new sum."""
        if gradient is None:
            return
        this_pass, copy = torch._C._current_graph_task_id(), self._take_snapshot(gradient)
        self._sum = copy if self._sum is None or this_pass != self._backward_pass_id else self._sum + copy
        self._backward_pass_id = this_pass

    def add_node_gradient(self, node_input_index: int, input_gradients: tuple[Tensor | None, ...], _: object) -> None:
        """Add a gradient to the sum. A node of the autograd graph sends it to its input `node_input_index`."""
        self.add_gradient(input_gradients[node_input_index])

    @property
    def is_gradient_lost(self) -> bool:
        """Whether the gradient is unknown. This happens if the tensor is a view that was changed in place."""
        return self._was_lost or (self._alias is not None and self._alias._version != self._version)

    @property
    def gradient(self) -> Tensor | None:
        """The total gradient, or None if no gradient arrived."""
        return None if self.is_gradient_lost else self._sum

    def release_view(self) -> None:
        """Check for the last time whether the gradient of the tensor is lost. Then release the tensor's memory."""
        self._was_lost, self._alias = self.is_gradient_lost, None


@dataclass(eq=False)
class TensorGradients:
    """The gradients at the tensors of a nested input or output, one accumulator for each tensor."""

    structure: Any = None
    accumulators: dict[LeafPath, GradientAccumulator] = field(default_factory=dict)

    def get_gradients_in_structure(self) -> Any:
        """Return the nested input or output, with each tensor replaced by its gradient."""
        result = self.structure
        for path, accumulator in self.accumulators.items():
            result = replace_leaf(result, path, accumulator.gradient)
        return result


@dataclass(eq=False)
class LayerCall:
    """One call of one layer: snapshots of its inputs and outputs, in the dtypes of the model.

    Attributes:
        inputs: The positional inputs, or None if they were not recorded.
        kwargs: The keyword inputs, or None if they were not recorded.
        output: The output, or None if it was not recorded.

    >>> import torch
    >>> from torch import nn
    >>> from camscope.hooks import record_layers
    >>> model = nn.Sequential(nn.ReLU())
    >>> with record_layers(model, "0", inputs=True) as recording:
    ...     _ = model(torch.tensor([[-1.0, 2.0]]))
    >>> call = recording["0"].calls[0]
    >>> call.inputs[0].tolist(), call.output.tolist()
    ([[-1.0, 2.0]], [[0.0, 2.0]])

    """

    inputs: tuple[Any, ...] | None = None
    kwargs: dict[str, Any] | None = None
    output: Any = None
    _at_inputs: TensorGradients = field(default_factory=lambda: TensorGradients(((), {})), repr=False)
    _at_output: TensorGradients = field(default_factory=TensorGradients, repr=False)

    @property
    def gradient(self) -> Any:
        """The gradient with respect to the output, nested like the output. The value is `None` if no gradient arrived."""
        return self._at_output.get_gradients_in_structure()

    @property
    def input_gradients(self) -> tuple[Any, ...]:
        """The gradients with respect to the positional inputs. Only paths through this call count."""
        return tuple(self._at_inputs.get_gradients_in_structure()[0])

    @property
    def kwarg_gradients(self) -> dict[str, Any]:
        """The gradients with respect to the keyword inputs. Only paths through this call count."""
        return dict(self._at_inputs.get_gradients_in_structure()[1])

    def iter_accumulators(self) -> Iterator[GradientAccumulator]:
        """Yield the gradient accumulators of all inputs and outputs of the call."""
        return chain(self._at_inputs.accumulators.values(), self._at_output.accumulators.values())


class LayerRecord:
    """All calls of one layer, in the order in which they ended. The properties describe the last call.

    Args:
        name: Name of the layer.
        recorded_kinds: What is recorded: "inputs", "outputs", "gradients".

    >>> import torch
    >>> from torch import nn
    >>> from camscope.hooks import record_layers
    >>> layer = nn.ReLU()
    >>> model = nn.Sequential(layer, layer)
    >>> with record_layers(model, "0") as recording:
    ...     _ = model(torch.ones(1, 2))
    >>> recording["0"].name, len(recording["0"].calls)
    ('0', 2)

    """

    def __init__(self, name: str, recorded_kinds: frozenset[str]) -> None:
        self.name, self.calls = name, list[LayerCall]()
        self._recorded_kinds = recorded_kinds

    @property
    def last_call(self) -> LayerCall:
        """The last call. Raises LayerError if the layer did not run."""
        if not self.calls:
            raise LayerError(f"layer {self.name!r} did not run inside the `with`")
        return self.calls[-1]

    @property
    def output(self) -> Any:
        """The output of the layer in its last call, nested as the layer returned it."""
        return self.last_call.output if "outputs" in self._recorded_kinds else self._raise_not_recorded("outputs")

    @property
    def input(self) -> Any:
        """The positional input of the last call. For several inputs it is a tuple."""
        inputs = self.last_call.inputs
        return _unwrap_single(inputs) if inputs is not None else self._raise_not_recorded("inputs")

    @property
    def gradient(self) -> Any:
        """The gradient with respect to `output` in the last backward pass. It has the shape of `output`."""
        return self._require_recorded_gradient(self.last_call.gradient, "output")

    @property
    def input_gradient(self) -> Any:
        """The gradient with respect to `input`. Only paths through this layer count."""
        return self._require_recorded_gradient(_unwrap_single(self.last_call.input_gradients), "input")

    def _require_recorded_gradient(self, gradient: object, location: str) -> Any:
        """Return a recorded gradient. Raise a LayerError that says why it is missing."""
        if "gradients" not in self._recorded_kinds:
            self._raise_not_recorded("gradients")
        if next(iter_leaves(gradient), None) is not None:
            return gradient
        if any(accumulator.is_gradient_lost for accumulator in self.last_call.iter_accumulators()):
            changed = "is a view that the model changes in place"
            raise LayerError(f"the {location} of layer {self.name!r} {changed}: no gradient")
        raise LayerError(
            f"no gradient at the {location} of layer {self.name!r}: inside the `with`, run the model with gradients enabled "
            f"and call backward; a tensor at or before the {location} must require gradients"
        )

    def _raise_not_recorded(self, tensor_role: str) -> NoReturn:
        raise LayerError(
            f"{tensor_role} of layer {self.name!r} were not recorded: pass {tensor_role}=True to record_layers"
        )

    def __len__(self) -> int:
        return len(self.calls)

    def __repr__(self) -> str:
        text = f"{self.name or '(model)'}  {plural(len(self.calls), 'call')}"
        if not self.calls:
            return text
        gradient = self.last_call.gradient if "gradients" in self._recorded_kinds else None
        values = [("input", self.last_call.inputs), ("output", self.last_call.output), ("gradient", gradient)]
        return text + "".join(f"  {what} {_format_shapes(value)}" for what, value in values if _format_shapes(value))


class Recording(dict[str, LayerRecord]):
    """Layers by name, in the model's order. A layer that never ran has no calls.

    recording["layer4"].output, recording["layer4"].input, recording["layer4"].gradient  # of the last call
    recording["layer4"].calls[0].output                                                  # of any call

    >>> import torch
    >>> from torch import nn
    >>> from camscope.hooks import record_layers
    >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
    >>> with record_layers(model, ["0", "1"]) as recording:
    ...     _ = model(torch.ones(1, 2))
    >>> {name: tuple(record.output.shape) for name, record in recording.items()}
    {'0': (1, 3), '1': (1, 3)}
    """

    def __missing__(self, name: object) -> NoReturn:
        raise LayerError(f"layer {name!r} was not recorded; recorded layers: {', '.join(map(repr, self)) or 'none'}")

    def __repr__(self) -> str:
        return "\n".join([f"Recording of {plural(len(self), 'layer')}", *map(repr, self.values())])


def _unwrap_single(values: tuple[Any, ...]) -> Any:
    return values[0] if len(values) == 1 else values


def _format_shapes(value: object) -> str:
    return " ".join(f"({', '.join(map(str, leaf.shape))})" for _, leaf in iter_leaves(value))
