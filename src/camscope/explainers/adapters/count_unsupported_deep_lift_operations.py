"""Count the non-linear operations of a model for which captum's DeepLIFT has no rule."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from camscope.hooks.deep_lift_rescale_rule import RESCALED_FUNCTIONS
from camscope.hooks.intercept_torch_functions import MAX_FUNCTIONS, BaseFunctionMode, get_function_name
from camscope.pytree import iter_leaves

_OTHER_NONLINEAR_NAMES = (
    "maximum min amin minimum softmax softmin log_softmax layer_norm group_norm instance_norm rms_norm local_response_norm "
    "normalize glu lp_pool1d lp_pool2d lp_pool3d multi_head_attention_forward scaled_dot_product_attention"
)
NONLINEAR_FUNCTIONS = RESCALED_FUNCTIONS | MAX_FUNCTIONS | set(_OTHER_NONLINEAR_NAMES.split())


class UnsupportedOperationCounter(BaseFunctionMode):
    """A function mode that counts non-linear operations without a rule in captum's DeepLIFT."""

    def __init__(self) -> None:
        super().__init__()
        self.reset()

    def reset(self) -> None:
        """Reset the counts. Call this method before each pass."""
        self._supported_module_depth, self.counts = 0, Counter[str]()

    def exclude_operations_in_supported_modules(self, model: nn.Module) -> None:
        """Do not count operations inside modules for which captum has a rule. Pass each such module a copy of its input.

        captum replaces the gradient of that input. Without the copy, the gradient of other uses of the tensor would be
        lost.
        """
        from captum.attr._core.deep_lift import SUPPORTED_NON_LINEAR

        def enter_module(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            self._supported_module_depth += 1
            return tuple(argument.clone() if isinstance(argument, Tensor) else argument for argument in args)

        def leave_module(module: nn.Module, args: object, output: object) -> None:
            self._supported_module_depth -= 1

        for module in model.modules():
            if type(module) in SUPPORTED_NON_LINEAR and not module._backward_hooks:
                module.register_forward_pre_hook(enter_module)
                module.register_forward_hook(leave_module)

    def run_intercepted_function(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Call a function and return its result. Count the call if the function is non-linear and captum has no rule for it."""
        name = get_function_name(func)
        if func is Tensor.register_hook and not args[0].requires_grad:
            return None  # captum sets its hooks also where gradients are disabled: the value is a constant there
        result = func(*args, **kwargs)
        if (
            name in NONLINEAR_FUNCTIONS
            and not self._supported_module_depth
            and any(argument.requires_grad for _, argument in iter_leaves(result))
        ):
            self.counts[name] += 1
        return result

    def describe_counted_operations(self) -> str:
        """Return a clause that names the counted operations, for the end of a sentence. Return "" if nothing was counted."""
        operations = ", ".join(f"{name} ({count} x)" for name, count in sorted(self.counts.items()))
        return f"; captum has no rule for {operations}, which keep their gradient" if operations else ""
