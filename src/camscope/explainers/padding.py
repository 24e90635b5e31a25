"""Detectors that pad what they are given: which part of their own plane the input is."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from camscope.hooks.base import Hooks, here_only

Shares = tuple[float, ...]


@contextmanager
def padding_seen(model: nn.Module) -> Iterator[list[Shares]]:
    """Of the pass inside the `with`: the share of each axis that the input takes, where torchvision's detectors pad.

    They bring an image to a size of their own, and that to a multiple of 32, at the end of each axis.
    """
    found: list[Shares] = []

    def note(module: nn.Module, args: object, output: Any) -> None:
        images = output[0]
        sizes = zip(images.image_sizes[0], images.tensors.shape[2:], strict=True)
        shares = tuple(own / padded for own, padded in sizes)
        if min(shares) < 1:
            found.append(shares)

    with Hooks() as hooks:
        for module in model.modules():
            if type(module).__name__ == "GeneralizedRCNNTransform":
                hooks.hold(module.register_forward_hook(here_only(note)))
        yield found
