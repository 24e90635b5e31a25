"""Target layers: where a layer's output holds its channels and its grid, and which layer to explain."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from camscope.errors import LayerError
from camscope.hooks.base import Hooks, find_layer, here_only, unwrap
from camscope.hooks.tap import Tap
from camscope.structure import the_tensor

__all__ = ["Layout", "SpatialLayer", "choose_layer", "find_layer", "read_layout", "spatial_layers"]

CHANNELS_FIRST, CHANNELS_LAST, TOKENS = "channels_first", "channels_last", "tokens"
MOST_PREFIX_TOKENS = 5
CANDIDATES = 12  # layers that are looked at, from the end
CONVOLUTIONAL = (
    nn.modules.conv._ConvNd,
    nn.modules.batchnorm._NormBase,
    nn.modules.pooling._MaxPoolNd,
    nn.modules.pooling._AvgPoolNd,
    nn.GroupNorm,
)
PASS_THROUGH = (
    nn.Identity,
    nn.modules.dropout._DropoutNd,
    nn.modules.pooling._AdaptiveAvgPoolNd,
    nn.modules.pooling._AdaptiveMaxPoolNd,
)


@dataclass(frozen=True)
class Layout:
    """How a layer's output holds K channels on a grid: (N,K,*grid), (N,*grid,K), or (N, prefix + cells, K) tokens."""

    kind: str
    grid: tuple[int, ...]
    prefix: int = 0

    def to_maps(self, output: Tensor) -> Tensor:
        """(N,K,*grid): the output with its channels first and its prefix tokens left out."""
        if self.kind == CHANNELS_FIRST:
            return output
        if self.kind == TOKENS:
            output = output[:, self.prefix :].unflatten(1, self.grid)
        return output.movedim(-1, 1)

    def __str__(self) -> str:
        grid = "x".join(map(str, self.grid))
        return f"{self.kind} {self.prefix}+{grid}" if self.kind == TOKENS else f"{self.kind} {grid}"


@dataclass(frozen=True)
class SpatialLayer:
    """A layer whose output has a grid, in the order in which layers finish."""

    name: str
    layout: Layout


def read_layout(
    shape: Sequence[int],
    input_shape: Sequence[int],
    module: nn.Module | None = None,
    layout: str | Layout | None = None,
) -> Layout:
    """Layout of an output of this shape for an input (N,C,*S): inferred from the shape, checked against S's aspect.

    `layout`: "channels_first", "channels_last" or a `Layout`, where the shape alone is ambiguous. Raises LayerError.

    >>> print(read_layout((2, 197, 768), (2, 3, 224, 224)))
    tokens 1+14x14
    >>> print(read_layout((2, 7, 10, 768), (2, 3, 224, 320)))
    channels_last 7x10
    """
    size, shape = tuple(input_shape[2:]), tuple(shape)
    if isinstance(layout, Layout):
        return _agreeing(layout, shape)
    if shape[0] != input_shape[0]:
        raise LayerError(f"output {shape} is not one item a sample of the batch of {input_shape[0]}; pass reshape=")
    if len(shape) == 3 and (layout == TOKENS or (len(size) > 1 and layout is None)):
        return _token_layout(shape, size, module)
    if len(shape) != len(size) + 2:
        raise LayerError(
            f"output {shape} has no spatial extent for an input {tuple(input_shape)}; choose an earlier layer"
        )
    kind = layout or _kind(shape, size, module)
    if kind not in (CHANNELS_FIRST, CHANNELS_LAST):
        raise LayerError(f"layout={layout!r}: expected {CHANNELS_FIRST!r}, {CHANNELS_LAST!r} or a Layout")
    return Layout(kind, shape[2:] if kind == CHANNELS_FIRST else shape[1:-1])


def spatial_layers(model: nn.Module, run: Callable[[], object], input_shape: Sequence[int]) -> list[SpatialLayer]:
    """Every layer with more than one cell, from one forward pass `run`, in the order in which the layers finish."""
    finished: dict[str, SpatialLayer] = {}

    def note(name: str, module: nn.Module, output: object) -> None:
        finished.pop(name, None)
        try:
            layout = read_layout(the_tensor(name, output)[1].shape, input_shape, module)
        except LayerError:
            return
        if math.prod(layout.grid) > 1:
            finished[name] = SpatialLayer(name, layout)

    with torch.no_grad(), Hooks() as hooks:
        for name, module in unwrap(model).named_modules():
            if name and not isinstance(module, (*PASS_THROUGH, torch.jit.ScriptModule)):
                hook = here_only(lambda module, args, output, name=name: note(name, module, output))
                hooks.hold(module.register_forward_hook(hook))
        run()
    return list(finished.values())


def choose_layer(model: nn.Module, score: Callable[[Tensor], Tensor], x: Tensor) -> SpatialLayer:
    """The last layer with spatial extent that the score (N,) reads there.

    Checked with one backward pass: a transformer that classifies by a class token reads no patch after its last
    attention, and an auxiliary head may run last.
    """
    layers = spatial_layers(model, lambda: score(x), x.shape)
    if not layers:
        raise LayerError(f"no layer of {type(model).__name__} has spatial extent for an input {tuple(x.shape)}")
    last = {layer.name: layer for layer in layers[-CANDIDATES:]}
    if layers[-1].layout.kind == TOKENS:
        last = {layer.name: layer for layer in layers if layer.layout.kind == TOKENS}
    with Tap(model, last) as tap:
        tap.backward(tap.run(lambda: score(x)).sum())
    for name, layer in reversed(last.items()):
        gradient = tap.chosen(name).gradient
        if gradient is not None and (layer.layout.kind != TOKENS or bool(layer.layout.to_maps(gradient).any())):
            return layer
    raise LayerError(
        f"the score's gradient is zero at the patch tokens of every layer of {type(model).__name__} (an untrained head?); "
        f"name a layer"
    )


def _kind(shape: tuple[int, ...], size: tuple[int, ...], module: nn.Module | None) -> str:
    if isinstance(module, CONVOLUTIONAL):
        return CHANNELS_FIRST
    grids = {CHANNELS_FIRST: shape[2:], CHANNELS_LAST: shape[1:-1]}
    if _is_channels_last(module) and _fits(grids[CHANNELS_LAST], size, 2.0):
        return CHANNELS_LAST
    for cells_off in (0.6, 2.0, math.inf):
        fitting = [kind for kind, grid in grids.items() if _fits(grid, size, cells_off)]
        if fitting == [CHANNELS_LAST] and module is not None and _is_convolutional(module):
            break  # its shape speaks against its kind: strides that differ, or more channels than a grid has cells
        if len(fitting) == 1:
            return fitting[0]
        if len(fitting) == 2 and module is not None and _is_convolutional(module):
            return CHANNELS_FIRST
        if len(fitting) == 2:
            break
    raise LayerError(
        f"output {shape} for an input of {size} may be channels first or channels last; pass layout={CHANNELS_FIRST!r} "
        f"or layout={CHANNELS_LAST!r}"
    )


def _fits(grid: Sequence[int], size: Sequence[int], cells_off: float) -> bool:
    """Whether a grid has the input's aspect, to within so many cells of rounding, and is no finer than 4 x the input."""
    if any(cells > 4 * pixels for cells, pixels in zip(grid, size, strict=True)):
        return False
    strides = [math.log(pixels / cells) for cells, pixels in zip(grid, size, strict=True)]
    return max(strides) - min(strides) <= cells_off * sum(1 / cells for cells in grid)


def _is_convolutional(module: nn.Module) -> bool:
    kinds = [type(part) for part in module.modules()]
    return (
        any(issubclass(kind, CONVOLUTIONAL) for kind in kinds) and nn.LayerNorm not in kinds and nn.Linear not in kinds
    )


def _is_channels_last(module: nn.Module | None) -> bool:
    """Whether the layer works on the last axis alone, as on channels; a LayerNorm may span the whole map instead."""
    if type(module) is nn.LayerNorm:
        return len(module.normalized_shape) == 1
    return type(module) is nn.Linear


def _agreeing(layout: Layout, shape: tuple[int, ...]) -> Layout:
    """The layout that was asked for, if an output of this shape can have it."""
    grid = tuple(layout.grid)
    held = {
        CHANNELS_FIRST: shape[2:] == grid,
        CHANNELS_LAST: shape[1:-1] == grid,
        TOKENS: len(shape) == 3 and layout.prefix >= 0 and shape[1] == layout.prefix + math.prod(grid),
    }
    if not grid or not held.get(layout.kind, False):
        raise LayerError(f"output {shape} is not {layout}: expected one of {', '.join(held)}, its grid, and the prefix")
    return layout


def _token_layout(shape: tuple[int, ...], size: tuple[int, ...], module: nn.Module | None) -> Layout:
    if not _has_channels(module, shape[2]) and any(math.prod(grid) == shape[2] for grid, _ in _grids(size)):
        raise LayerError(
            f"output {shape} for an input of {size} may be tokens (N,T,K) or a flattened map (N,K,cells); "
            f"pass layout=Layout('tokens', grid, prefix), or reshape="
        )
    found: dict[tuple[int, ...], bool] = {}
    for grid, tiles in _grids(size):
        if 0 <= shape[1] - math.prod(grid) <= MOST_PREFIX_TOKENS:
            found[grid] = found.get(grid, False) or tiles
    exact = [grid for grid, is_exact in found.items() if is_exact and math.prod(grid) >= 16]
    choice = list(found) if len(found) == 1 else exact
    if len(choice) != 1:
        known = ", ".join(f"{shape[1] - math.prod(g)}+{'x'.join(map(str, g))}" for g in found) or "none"
        raise LayerError(
            f"output {shape} as tokens of an input of {size}: grids that fit: {known}; "
            f"pass layout=Layout('tokens', grid, prefix)"
        )
    return Layout(TOKENS, choice[0], shape[1] - math.prod(choice[0]))


def _has_channels(module: nn.Module | None, count: int) -> bool:
    """Whether a part of the layer shows that its last axis is so many channels."""
    return module is not None and any(
        (type(part) is nn.LayerNorm and tuple(part.normalized_shape) == (count,))
        or (isinstance(part, nn.Linear) and part.out_features == count)
        for part in module.modules()
    )


def _grids(size: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], bool]]:
    """Grids of square patches over the input, and whether the patches tile it exactly."""
    for patch in range(max(size), 0, -1):
        exact = all(pixels % patch == 0 for pixels in size)
        for grid in {tuple(pixels // patch for pixels in size), tuple(-(-pixels // patch) for pixels in size)}:
            if math.prod(grid) > 1:
                yield grid, exact
