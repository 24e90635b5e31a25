"""The zoo: small forms of the model families that people have, and what camscope must find in each without being told."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

CLASSES = 7
Question = int | Callable[[Any], Tensor]


@dataclass(frozen=True)
class Row:
    """One architecture: the input (C,*S), the layer that must be chosen, and where its output (N,...) holds its map."""

    name: str
    build: Callable[[], nn.Module]
    size: tuple[int, ...]
    layer: str
    kind: str  # "maps": (N,K,*grid); "last": (N,*grid,K); "tokens": (N,prefix+cells,K)
    grid: tuple[int, ...]
    prefix: int = 0
    target: Question = 1
    behind: int = 0  # tokens behind the grid

    def model(self) -> nn.Module:
        """In float64 and eval mode, the same numbers every time, and no parameter so small that the output is blind to it."""
        torch.manual_seed(0)
        model = self.build().double().eval().requires_grad_(False)
        for parameter in model.parameters():
            if parameter.abs().max() < 1e-3:  # heads of zeros, layer scales of 1e-6: what training would change first
                nn.init.normal_(parameter, std=0.1)
        return model

    def inputs(self, samples: int = 1) -> Tensor:
        """(N,C,*S)"""
        return torch.randn(samples, *self.size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def by_hand(self, output: Tensor) -> Tensor:
        """(N,K,*grid): the layer's output taken apart as this row says, and not as camscope infers."""
        if self.kind == "maps":
            return output
        if self.kind == "tokens":
            assert output.shape[1] == self.prefix + math.prod(self.grid) + self.behind
            output = output[:, self.prefix : output.shape[1] - self.behind].reshape(
                len(output), *self.grid, output.shape[-1]
            )
        return output.permute(0, output.ndim - 1, *range(1, output.ndim - 1))


def region(output: Any) -> Tensor:
    """(N,): how much a part of the picture is class 1, of a segmentation model's output."""
    scores = output if isinstance(output, Tensor) else output["out" if "out" in output else "logits"]
    return scores[:, 1, : scores.shape[2] // 2, : scores.shape[3] // 2].mean((1, 2))


def direction(output: Any) -> Tensor:
    """(N,): an embedding along one direction of its space."""
    embedding = output.image_embeds if "image_embeds" in output else output.pooler_output
    return embedding @ torch.arange(embedding.shape[1], dtype=embedding.dtype).cos()


def query(output: Any) -> Tensor:
    """(N,): what a detector says of class 1 at its first query."""
    return output.logits[:, 0, 1]
