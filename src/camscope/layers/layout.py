"""`Layout`: which axes of a layer's output are the channels and the spatial grid."""

import math
from dataclasses import dataclass

from torch import Tensor, nn

from camscope.errors import LayerError, Remedy

CHANNELS_FIRST, CHANNELS_LAST, TOKENS = "channels_first", "channels_last", "tokens"
Grid = tuple[int, ...]
CHANNELS_FIRST_MODULES = (
    nn.modules.conv._ConvNd,
    nn.modules.batchnorm._NormBase,
    nn.modules.pooling._MaxPoolNd,
    nn.modules.pooling._AvgPoolNd,
    nn.GroupNorm,
)


def returns_channels_first(module: nn.Module | None) -> bool:
    """Return whether a module returns (N,K,*grid) by its type, or by its own statement."""
    return isinstance(module, CHANNELS_FIRST_MODULES) or getattr(module, "returns_channels_first", False) is True


def build_ambiguous_layout_error(
    text: str, fix: str = "pass layout=Layout('tokens', grid, prefix), or reshape="
) -> LayerError:
    """Build the error for an output whose layout cannot be inferred from its shape."""
    return LayerError(text, fix=fix, remedy=Remedy.SET_LAYOUT)


@dataclass(frozen=True)
class Layout:
    """The axes of a layer's output: (N,K,*grid), (N,*grid,K), or tokens (N, prefix + cells, K), for K channels on a
    grid.

    Attributes:
        kind: "channels_first", "channels_last" or "tokens".
        grid: Cells along each axis.
        prefix: Number of tokens before those of the grid, such as the class token.

    >>> import torch
    >>> Layout("tokens", (2, 2), prefix=1).to_maps(torch.zeros(1, 5, 8)).shape
    torch.Size([1, 8, 2, 2])

    """

    kind: str
    grid: tuple[int, ...]
    prefix: int = 0

    def to_maps(self, output: Tensor) -> Tensor:
        """Convert an output of the layer to maps (N,K,*grid). Tokens outside the grid are removed.

        Args:
            output: The output of the layer.

        Returns:
            (N,K,*grid).

        >>> import torch
        >>> Layout("channels_last", (2, 3)).to_maps(torch.zeros(1, 2, 3, 8)).shape
        torch.Size([1, 8, 2, 3])

        """
        if self.kind == CHANNELS_FIRST:
            return output
        if self.kind == TOKENS:
            output = output[:, self.prefix : self.prefix + math.prod(self.grid)].unflatten(1, self.grid)
        return output.movedim(-1, 1)

    def __str__(self) -> str:
        grid = "x".join(map(str, self.grid))
        return f"{self.kind} {self.prefix}+{grid}" if self.kind == TOKENS else f"{self.kind} {grid}"
