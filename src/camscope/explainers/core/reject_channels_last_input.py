"""Check that an input has its channels at the second axis. This also applies to models that move channels internally."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from camscope.errors import InputError
from camscope.hooks.find_layers import unwrap
from camscope.hooks.intercept_torch_functions import SPATIAL_RANKS, get_function_name
from camscope.hooks.run_without_hooks import hooks_muted
from camscope.hooks.spatial_map_tracker import SpatialMapTracker
from camscope.plurals import plural
from camscope.targets import Score

MAX_IMAGE_CHANNELS = 4


class _FirstConvolution(SpatialMapTracker):
    """Tracks a model up to the first convolution.
    Records the `shape` of the convolution's input, and whether cells are misplaced.
    """

    shape: tuple[int, ...] | None = None
    is_input_misplaced = False

    def run_intercepted_function(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if self.shape is None and get_function_name(func) in {f"conv{rank}d" for rank in SPATIAL_RANKS}:
            source = args[0] if args else kwargs["input"]
            self.shape, self.is_input_misplaced = tuple(source.shape), self.is_misplaced(source)
        return super().run_intercepted_function(func, args, kwargs)


def check_input_channels_not_last(x: Tensor, score: Score) -> None:
    """Raise InputError if the model's first convolution treats the last axis of x as channels.

    The check runs one forward pass, and only for an input whose last axis is its shortest and has at most four values.
    """
    channels = x.shape[-1]
    if channels > MAX_IMAGE_CHANNELS or min(x.shape[1:-1]) <= channels:
        return
    devices = [x.device] if x.device.type == "cuda" else []
    with hooks_muted(score.model), torch.random.fork_rng(devices=devices), torch.no_grad():
        copied = x.clone()  # the model may change it in place
        first = _FirstConvolution(unwrap(score.model), copied)
        with suppress(Exception), first:  # the method meets the error again, and reports it
            score.forward(copied)
    shape, size = first.shape, tuple(x.shape[1:-1])
    if shape is None or len(shape) != x.ndim or shape[1] != channels:
        return
    if shape[2:] == size or first.is_input_misplaced:
        last = x.ndim - 1
        there, back = (0, last, *range(1, last)), (0, *range(2, last + 1), 1)
        raise InputError(
            f"the input {tuple(x.shape)} has its {plural(channels, 'channel')} at the last axis, which the model moves; expected "
            f"(N,C,H,W), (N,C,L) or (N,C,D,H,W). Pass x.permute{there}, and a module whose forward(x) returns "
            f"model(x.permute{back})"
        )
