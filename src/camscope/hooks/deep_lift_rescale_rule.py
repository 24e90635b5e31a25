"""DeepLIFT's Rescale rule: the backward pass of elementwise functions multiplies by Δout/Δin from a reference pass."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from camscope.hooks.intercept_torch_functions import ACTIVATIONS, SCALAR_ARITHMETIC, BaseFunctionMode, get_function_name

RESCALED_FUNCTIONS = ACTIVATIONS | SCALAR_ARITHMETIC


class RescaleRule(BaseFunctionMode):
    """A function mode for two passes: of a reference, and of an input whose gradients become DeepLIFT's multipliers.

        with RescaleRule() as rule:
            reference(model, x)             # calls rule.start_reference_pass() at the layer from which the passes differ
            rule.stop_recording_and_applying()
            score = model(x).sum()          # calls rule.start_input_pass() there
            torch.autograd.grad(score, layer_output)

    The n-th elementwise function after the layer is compared with the n-th one of the other pass. A function keeps its
    gradient if the model took another path, or if both inputs agree up to rounding. All other operations keep theirs.
    The rule acts only in the thread that entered it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._references: dict[int, tuple[str, Tensor]] = {}
        self.stop_recording_and_applying()

    def stop_recording_and_applying(self) -> None:
        """Stop recording and applying the rule. From now on all functions run unchanged."""
        self._call_count, self._is_recording, self._is_comparing = 0, False, False

    def start_reference_pass(self) -> None:
        """From now on, record the inputs of elementwise functions. These inputs are the references of the next pass."""
        self.stop_recording_and_applying()
        self._is_recording = True

    def start_input_pass(self) -> None:
        """From now on, apply the Rescale rule to elementwise functions. Use the recorded references."""
        self.stop_recording_and_applying()
        self._is_comparing = True

    def run_intercepted_function(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Call a function and return its result. The backward pass of an elementwise function follows the Rescale rule."""
        name, keywords = get_function_name(func), dict(kwargs)
        first = args[0] if args else keywords.pop("input", None)
        several = name != "prelu" and any(isinstance(arg, Tensor) for arg in (*args[1:], *keywords.values()))
        is_random = name == "rrelu" and (keywords.get("training") or True in args[3:])  # anew each time
        if name not in RESCALED_FUNCTIONS or several or is_random or not isinstance(first, Tensor):
            return func(*args, **kwargs)
        return self._apply_elementwise(name, first, lambda z: func(z, *args[1:], **keywords))

    def _apply_elementwise(self, name: str, z: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        """Apply a function. Its backward pass multiplies by the change of the output over that of the input."""
        call_number, self._call_count = self._call_count, self._call_count + 1
        if self._is_recording:
            self._references[call_number] = name, z.detach().clone()
        reference_name, reference = self._references.get(call_number, ("", z))
        is_comparable = self._is_comparing and name == reference_name and z.shape == reference.shape
        if not (is_comparable and z.requires_grad and torch.is_grad_enabled()):
            return function(z)
        z_copy = z.detach().clone()
        result, multiplier = _compute_multiplier(function, z_copy, reference)
        passed: Tensor = _MultiplyGradient.apply(z, result, multiplier)
        in_place = result.data_ptr() == z_copy.data_ptr()
        return z.copy_(passed) if in_place else passed


class RescaledOutput(NamedTuple):
    """The output f(z) of an elementwise function, and its multiplier by DeepLIFT."""

    output: Tensor
    multiplier: Tensor


def _compute_multiplier(function: Callable[[Tensor], Tensor], z: Tensor, reference: Tensor) -> RescaledOutput:
    """Return f(z) and its DeepLIFT multiplier, (f(z) - f(reference)) / (z - reference).

    If z differs from the reference only by rounding, the multiplier is the gradient f'. f may overwrite z.
    """
    leaf = z.detach().clone().requires_grad_()
    with torch.enable_grad():
        slope = function(leaf.clone())
    (gradient,) = torch.autograd.grad(slope, leaf, torch.ones_like(slope))
    step, size = z - reference, torch.maximum(z.abs(), reference.abs())
    with torch.no_grad():
        result = function(z)
        secant = (result - function(reference.clone())) / step
    # half of the digits: below, rounding in the secant is larger than the curvature's effect on the gradient
    is_reliable = (step.abs() > torch.finfo(z.dtype).eps ** 0.5 * size) & secant.isfinite()
    return RescaledOutput(result, torch.where(is_reliable, secant, gradient))


class _MultiplyGradient(torch.autograd.Function):
    """A function with a known result. Its backward pass multiplies the gradient by a given factor."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, result: Tensor, multiplier: Tensor) -> Tensor:
        ctx.multiplier = multiplier  # not among the saved tensors: a checkpoint that runs again would miss it there
        return result.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient * ctx.multiplier, None, None
