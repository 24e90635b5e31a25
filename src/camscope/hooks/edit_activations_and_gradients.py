"""Edit the inputs, outputs and gradients of layers inside a `with`, by functions that return the new value."""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, ParamSpec, TypeVar

from torch import Tensor, nn

from camscope.errors import InputError, LayerError
from camscope.hooks.find_layers import find_layers, unwrap
from camscope.hooks.thread_local_hooks import (
    Hooks,
    is_autograd_thread,
    reentrant_checkpoints_disabled,
    register_gradient_hook,
)
from camscope.plurals import plural
from camscope.pytree import find_main_tensor, iter_leaves, replace_leaf

P = ParamSpec("P")
T = TypeVar("T")
EditFunction = Callable[[Any], Any]


@contextmanager
def edit_layers(
    model: nn.Module, edits: Mapping[str | nn.Module, EditFunction], kind: str = "output"
) -> Iterator[None]:
    """Apply functions to the outputs, inputs or gradients of layers inside the `with`. The model uses the results instead.

        with edit_layers(model, {"layer3": lambda features: 0.5 * (features + features.flip(0))}):
            scores = model(x)

    Several edits of one layer are applied in order.

    Args:
        model: The model.
        edits: Functions by layer name, glob pattern or module. A function gets a copy, so it may work in place. The model
            continues with the returned value. None leaves the value unchanged.
        kind: What is replaced. "output" is the floating tensor of highest rank in what the layer returns. "input" is the
            floating tensor among its positional inputs (its keyword inputs where it has no other). Several are passed and
            returned as a tuple. "gradient" is the gradient that flows back into the output: call backward inside the `with`.

    Raises:
        InputError: `kind` is unknown.
        LayerError: A layer is unknown, or a function returns anything else.

    >>> import torch
    >>> identity = nn.Sequential(nn.Identity())
    >>> with edit_layers(identity, {"0": lambda value: 2 * value}):
    ...     identity(torch.ones(1, 2)).tolist()
    [[2.0, 2.0]]

    """
    if kind not in _EDITORS:
        raise InputError(f"kind={kind!r}; expected {', '.join(map(repr, _EDITORS))}")
    register, editor = _EDITORS[kind]
    with Hooks() as hooks:
        hooks.enter_context(reentrant_checkpoints_disabled())
        for layer, function in edits.items():
            for name, module in find_layers(model, layer).items():
                hooks.add_handle(
                    register(module, _limit_hook_to_thread_or_autograd(partial(editor, hooks, name, function)))
                )
        yield


@contextmanager
def clip_gradients(model: nn.Module, max_abs: float) -> Iterator[None]:
    """Clamp the gradients of all parameters to [-max_abs, max_abs] in each backward pass inside the `with`.

    Each backward pass is clamped separately, so the sum of several in `.grad` may be larger. NaN stays NaN.

    Args:
        model: The model.
        max_abs: Largest absolute value of a gradient, a positive number.

    Raises:
        InputError: `max_abs` is not positive.

    >>> import torch
    >>> layer = nn.Linear(1, 1, bias=False)
    >>> with clip_gradients(layer, 0.5):
    ...     layer(torch.tensor([[3.0]])).sum().backward()
    >>> layer.weight.grad.tolist()
    [[0.5]]

    """
    if not max_abs > 0:
        raise InputError(f"max_abs={max_abs!r}; expected a positive number")

    with Hooks() as hooks:
        for parameter in unwrap(model).parameters():
            if parameter.requires_grad:
                clamp = _limit_hook_to_thread_or_autograd(lambda gradient: gradient.clamp(-max_abs, max_abs))
                hooks.add_handle(register_gradient_hook(parameter, clamp))
        yield


def _limit_hook_to_thread_or_autograd(hook: Callable[P, T]) -> Callable[P, T | None]:
    """Return a hook that runs only in the current thread and in threads of autograd."""
    owner = threading.get_ident()

    def call_in_allowed_thread(*args: P.args, **kwargs: P.kwargs) -> T | None:
        return hook(*args, **kwargs) if threading.get_ident() == owner or is_autograd_thread() else None

    return call_in_allowed_thread


def _edit_output(hooks: Hooks, name: str, function: EditFunction, module: nn.Module, args: object, output: Any) -> Any:
    path, tensor = find_main_tensor(name, output)
    changed = function(tensor.clone())
    return None if changed is None else replace_leaf(output, path, _require_tensor(name, changed))


def _edit_args_and_kwargs(
    hooks: Hooks, name: str, function: EditFunction, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, Any] | None:
    """Replace the tensors that a layer receives by what the edit function returns for them."""
    inputs: Any = (args, kwargs)
    leaves = [(path, leaf) for path, leaf in iter_leaves(inputs) if leaf.is_floating_point()]
    leaves = [(path, leaf) for path, leaf in leaves if path[0] == 0] or leaves
    if not leaves:
        raise LayerError(f"layer {name!r} has no input to edit: it receives no floating-point tensor")
    copies = tuple(leaf.clone() for _, leaf in leaves)
    changed = function(copies if len(copies) > 1 else copies[0])
    if changed is None:
        return None
    parts = changed if len(copies) > 1 else (changed,)
    if not isinstance(parts, tuple | list) or len(parts) != len(copies):
        count = plural(len(copies), "tensor")
        raise LayerError(
            f"layer {name!r} receives {count}: the edit function must return a tuple of as many tensors, or None"
        )
    for (path, _), part in zip(leaves, parts, strict=True):
        inputs = replace_leaf(inputs, path, _require_tensor(name, part))
    return inputs[0], inputs[1]


def _edit_gradient(
    hooks: Hooks, name: str, function: EditFunction, module: nn.Module, args: object, output: Any
) -> Any:
    """Replace the gradient at a layer's output by what the edit function returns for it."""
    path, tensor = find_main_tensor(name, output)
    if not tensor.requires_grad:
        return None

    def edit_gradient(gradient: Tensor) -> Tensor | None:
        result: Tensor | None = function(gradient.clone())
        if result is not None and _require_tensor(name, result).shape != gradient.shape:
            shapes = f"{tuple(result.shape)}; expected the gradient's own {tuple(gradient.shape)}"
            raise LayerError(f"the edit of the gradient at layer {name!r} returns shape {shapes}")
        return result

    # a separate tensor: the layer may return one that others use too, and their gradients are not this layer's
    leaving = tensor.clone()
    hooks.add_handle(register_gradient_hook(leaving, edit_gradient))
    return replace_leaf(output, path, leaving)


def _require_tensor(name: str, value: object) -> Tensor:
    if not isinstance(value, Tensor):
        raise LayerError(f"the edit of layer {name!r} returns a {type(value).__name__}; expected a tensor, or None")
    return value


_EDITORS: dict[str, tuple[Callable[[nn.Module, Any], Any], Callable[..., Any]]] = {
    "output": (nn.Module.register_forward_hook, _edit_output),
    "input": (partial(nn.Module.register_forward_pre_hook, with_kwargs=True), _edit_args_and_kwargs),
    "gradient": (nn.Module.register_forward_hook, _edit_gradient),
}
