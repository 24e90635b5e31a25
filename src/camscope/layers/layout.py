"""`Layout`: which axes of a layer's output are the channels and the spatial grid."""

import math
from dataclasses import dataclass

import torch
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
    """Return whether a module returns (N,K,*grid), by its type or by its attribute `returns_channels_first`."""
    return isinstance(module, CHANNELS_FIRST_MODULES) or getattr(module, "returns_channels_first", False) is True


def build_ambiguous_layout_error(
    text: str, fix: str = "pass layout=Layout('tokens', grid, prefix), or reshape="
) -> LayerError:
    """Build the error for an output whose shape is not enough to infer its layout."""
    return LayerError(text, fix=fix, remedy=Remedy.SET_LAYOUT)


@dataclass(frozen=True)
class Layout:
    """The axes of a layer's output: (N,K,*grid), (N,*grid,K), or tokens (N, prefix + cells, K), for K channels on a
    grid.

    Attributes:
        kind: "channels_first", "channels_last" or "tokens".
        grid: Cells along each axis.
        prefix: Number of tokens before those of the grid, such as the class token.
        time_last: Whether the tokens of a video are stored patch by patch, each with all its frames, as in TimeSformer.

    >>> import torch
    >>> Layout("tokens", (2, 2), prefix=1).to_maps(torch.zeros(1, 5, 8)).shape
    torch.Size([1, 8, 2, 2])

    """

    kind: str
    grid: tuple[int, ...]
    prefix: int = 0
    time_last: bool = False

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
            output = self.order_tokens(output)[:, self.prefix : self.prefix + math.prod(self.grid)]
            output = output.unflatten(1, self.grid)
        return output.movedim(-1, 1)

    def order_tokens(self, output: Tensor) -> Tensor:
        """Return tokens (N,T,K) with the grid's tokens in the order of its cells. The last axis of the grid changes fastest.

        Args:
            output: The tokens of the layer.

        Returns:
            (N,T,K), the same tokens.

        >>> import torch
        >>> tokens = torch.arange(5).view(1, 5, 1)  # one class token, then two patches of two frames
        >>> Layout("tokens", (2, 1, 2), prefix=1, time_last=True).order_tokens(tokens).flatten().tolist()
        [0, 1, 3, 2, 4]

        """
        if not self.time_last:
            return output
        first, last = self.prefix, self.prefix + math.prod(self.grid)
        cells = output[:, first:last].unflatten(1, (*self.grid[1:], self.grid[0])).movedim(len(self.grid), 1)
        return torch.cat([output[:, :first], cells.flatten(1, len(self.grid)), output[:, last:]], 1)

    def __str__(self) -> str:
        grid = "x".join(map(str, self.grid))
        order = ", time last" if self.time_last else ""
        return f"{self.kind} {self.prefix}+{grid}{order}" if self.kind == TOKENS else f"{self.kind} {grid}"
