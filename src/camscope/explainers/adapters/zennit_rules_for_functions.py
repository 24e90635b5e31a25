"""Rules of layer-wise relevance propagation for functions outside of modules, with zennit's hooks."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from camscope.hooks.intercept_torch_functions import (
    ACTIVATIONS,
    AVERAGING_FUNCTIONS,
    DROPOUTS,
    MAX_FUNCTIONS,
    SCALING_FUNCTIONS,
    BaseFunctionMode,
    get_function_name,
    selects_bicubic_interpolation,
)
from camscope.pytree import iter_leaves, map_leaves

_DATA_MOVEMENT_NAMES = (
    "view view_as reshape reshape_as flatten unflatten permute transpose swapaxes movedim moveaxis t get squeeze unsqueeze "
    "contiguous clone cat concat concatenate stack split tensor_split chunk unbind getitem narrow select index_select "
    "expand expand_as repeat roll flip rot90 pad channel_shuffle pixel_shuffle pixel_unshuffle "
    "to float double half bfloat16 type type_as cpu cuda requires_grad retain_grad"
)  # the gradient is the relevance
PASS_THROUGH_FUNCTIONS = ACTIVATIONS | SCALING_FUNCTIONS | {"neg"}
GRADIENT_FUNCTIONS = MAX_FUNCTIONS | DROPOUTS | set(_DATA_MOVEMENT_NAMES.split())
SUM_SIGNS = {"add": 1, "iadd": 1, "radd": 1, "sub": -1, "isub": -1}


class RelevanceRuleMode(BaseFunctionMode):
    """A function mode that applies zennit's rules to function calls outside of modules. It counts functions that have no rule."""

    def __init__(self, stabilizer: Callable[[Tensor], Tensor], exact_stabilizer: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._stabilizer, self._exact_stabilizer = stabilizer, exact_stabilizer
        self._hooks: list[Any] = []  # the graph holds only weak references to zennit's hooks
        self._ruled_module_depth, self.unsupported_functions = 0, Counter[str]()

    def reset(self) -> None:
        """Reset the counts. Call this method before each pass."""
        self.remove_hooks()
        self._ruled_module_depth = 0
        self.unsupported_functions.clear()

    def remove_hooks(self) -> None:
        """Remove the hooks and free their tensors. Call this method after the last pass."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def skip_functions_inside_module(self, module: nn.Module) -> None:
        """Apply no rule to functions inside this module, because the module itself has a rule."""
        module.register_forward_pre_hook(self._enter_module, prepend=True)
        module.register_forward_hook(self._leave_module)

    def _enter_module(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        self._ruled_module_depth += 1
        # zennit would attach its rule to a graph node that does not exist where gradients are disabled
        return None if torch.is_grad_enabled() else map_leaves(args, Tensor.detach)

    def _leave_module(self, module: nn.Module, args: object, output: object) -> None:
        self._ruled_module_depth -= 1

    def run_intercepted_function(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Call a function and return its result. If there is a relevance rule for the function, apply it."""
        name, spelled = get_function_name(func), getattr(func, "__name__", "")
        tensors = [argument for argument in (*args, *kwargs.values()) if isinstance(argument, Tensor)]
        alive = [tensor for tensor in tensors if tensor.requires_grad]
        if self._ruled_module_depth or not alive or not torch.is_grad_enabled():
            return func(*args, **kwargs)
        ruled_result = self._call_with_rule(name, func, tuple(args), kwargs, alive)
        if ruled_result is not None:
            return args[0].copy_(ruled_result) if _is_in_place(spelled, args, kwargs) else ruled_result
        result = func(*args, **kwargs)
        if name not in GRADIENT_FUNCTIONS and any(leaf.requires_grad for _, leaf in iter_leaves(result)):
            self.unsupported_functions[name] += 1
        return result

    def _call_with_rule(
        self,
        name: str,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        differentiable: list[Tensor],
    ) -> Tensor | None:
        """Call a function with its relevance rule. If no rule applies, return None and do not call the function."""
        from zennit.rules import Norm, Pass

        if name in SUM_SIGNS and not kwargs and len(args) == 2:
            return self._add_with_rule(SUM_SIGNS[name], *args)
        if len(differentiable) != 1 or not (args and differentiable[0] is args[0]):
            return None
        if name in PASS_THROUGH_FUNCTIONS:
            return self._run_module_with_hook(Pass(), _FunctionModule(func, args[1:], kwargs), args[0])
        if name in AVERAGING_FUNCTIONS and not selects_bicubic_interpolation(kwargs):
            return self._run_module_with_hook(Norm(self._stabilizer), _FunctionModule(func, args[1:], kwargs), args[0])
        return None

    def _add_with_rule(self, second_sign: int, first: Any, second: Any) -> Tensor | None:
        """Add two values. A tensor gets relevance in proportion to its magnitude, and a constant gets none."""
        from zennit.layer import Sum
        from zennit.rules import Norm

        template = first if isinstance(first, Tensor) else second
        a, b = (
            addend if isinstance(addend, Tensor) else torch.full_like(template, addend, requires_grad=False)
            for addend in (first, second)
        )
        if second_sign < 0 and b.requires_grad:
            return None
        both = a.requires_grad and b.requires_grad
        addends = torch.stack(torch.broadcast_tensors(a, b if second_sign > 0 else -b), -1)
        return self._run_module_with_hook(Norm(self._stabilizer if both else self._exact_stabilizer), Sum(), addends)

    def _run_module_with_hook(self, hook: Any, module: nn.Module, x: Tensor) -> Tensor:
        hook.register(module)
        self._hooks.append(hook)
        result: Tensor = module(x)
        return result


def _is_in_place(raw_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a function call works in place, such as `x += y`, `x.relu_()` or `F.relu(x, True)`."""
    is_requested = kwargs.get("inplace") is True or (
        raw_name.strip("_") in ACTIVATIONS and any(argument is True for argument in args)
    )
    return is_requested or raw_name.startswith("__i") or (raw_name.endswith("_") and not raw_name.endswith("__"))


class _FunctionModule(nn.Module):
    """A module that calls a function. Its input is the first argument, and all other arguments are fixed."""

    def __init__(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__()
        self._func, self._args, self._kwargs = func, args, kwargs

    def forward(self, x: Tensor) -> Any:
        """Call the function on x. All further arguments are fixed."""
        return self._func(x, *self._args, **self._kwargs)


def make_relative_stabilizer(epsilon: float) -> Callable[[Tensor], Tensor]:
    """Return a function that moves values z away from zero. The distance is `epsilon` times the root mean square of each row."""

    def stabilize(z: Tensor) -> Tensor:
        rows = z.flatten(1) if z.ndim > 1 else z[..., None]  # a sum over all axes has none
        scale = rows.square().mean(-1).sqrt().view([*z.shape[:1], *[1] * (z.ndim - 1)])
        step = torch.where(scale > 0, epsilon * scale, 1)
        return torch.where(z < 0, z - step, z + step)

    return stabilize


def has_zennit_rule(module: nn.Module) -> bool:
    """Whether zennit has a relevance rule for a module. Attention modules have no rule."""
    from zennit.layer import Sum
    from zennit.types import Activation, AvgPool, BatchNorm, Linear

    has_rule = isinstance(module, (Activation, AvgPool, BatchNorm, Linear, Sum))
    return has_rule and not isinstance(module, nn.MultiheadAttention)
