"""What is not linear in a model and has no rule of captum's: it keeps its gradient, and is counted."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from camscope.hooks.calls import Calls, name_of
from camscope.hooks.rescale import ELEMENTWISE
from camscope.hooks.vocabulary import MAXIMA
from camscope.structure import leaves

_OTHERS = (
    "maximum min amin minimum softmax softmin log_softmax layer_norm group_norm instance_norm rms_norm local_response_norm "
    "normalize glu lp_pool1d lp_pool2d lp_pool3d multi_head_attention_forward scaled_dot_product_attention"
)
BENT = ELEMENTWISE | MAXIMA | set(_OTHERS.split())


class Unruled(Calls):
    """Counts, inside the `with`, what is not linear and has no rule, since captum reaches modules of certain types only."""

    def __init__(self) -> None:
        super().__init__()
        self.begin()

    def begin(self) -> None:
        """Before a pass."""
        self._ruled, self.counts = 0, Counter[str]()

    def watch(self, model: nn.Module) -> None:
        """Where captum has a rule nothing is counted; what such a module is given is a tensor of its own.

        captum replaces the gradient of that tensor: of one that goes elsewhere too, it would lose the other way.
        """
        from captum.attr._core.deep_lift import SUPPORTED_NON_LINEAR

        def enter(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            self._ruled += 1
            return tuple(one.clone() if isinstance(one, Tensor) else one for one in args)

        def leave(module: nn.Module, args: object, output: object) -> None:
            self._ruled -= 1

        for module in model.modules():
            if type(module) in SUPPORTED_NON_LINEAR and not module._backward_hooks:
                module.register_forward_pre_hook(enter)
                module.register_forward_hook(leave)

    def called(self, func: Callable[..., Any], args: Sequence[Any], named: dict[str, Any]) -> Any:
        """What the function returns."""
        name = name_of(func)
        if func is Tensor.register_hook and not args[0].requires_grad:
            return None  # captum sets its hooks also where gradients are off: there a value is a constant
        result = func(*args, **named)
        if name in BENT and not self._ruled and any(one.requires_grad for _, one in leaves(result)):
            self.counts[name] += 1
        return result

    def in_words(self) -> str:
        """What keeps its gradient."""
        said = ", ".join(f"{name} ({count} x)" for name, count in sorted(self.counts.items()))
        return f"; captum has no rule for {said} here, which keep their gradient" if said else ""
