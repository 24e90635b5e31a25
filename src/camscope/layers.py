"""Target layers: where a layer's output holds its channels and its grid, and which layer to explain."""

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from camscope.errors import LayerError
from camscope.hooks.base import Hooks, find_layer, here_only, unwrap
from camscope.hooks.tap import Tap
from camscope.structure import the_tensor

__all__ = [
    "Layout",
    "SpatialLayer",
    "choose_layer",
    "find_layer",
    "note_grids",
    "read_layout",
    "spatial_layers",
]

CHANNELS_FIRST, CHANNELS_LAST, TOKENS = "channels_first", "channels_last", "tokens"
ENCODERS = ("backbone", "encoder", "vision_model")
Grid = tuple[int, ...]
MOST_PREFIX_TOKENS = (5, 9)  # a class token and four registers; eight, where no grid is found with fewer
CANDIDATES = 12  # layers that are looked at in one pass, from the end
MOST_HALVINGS = 5  # of a grid, by merged tokens
MAKING_GRIDS = (nn.modules.conv._ConvNd, nn.modules.pooling._MaxPoolNd, nn.modules.pooling._AvgPoolNd)
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
        """(N,K,*grid): the output with its channels first and the tokens before and behind the grid left out."""
        if self.kind == CHANNELS_FIRST:
            return output
        if self.kind == TOKENS:
            output = output[:, self.prefix : self.prefix + math.prod(self.grid)].unflatten(1, self.grid)
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
    grids: Collection[Grid] = (),
) -> Layout:
    """Layout of an output of this shape for an input (N,C,*S): inferred from the shape, checked against S's aspect.

    `layout`: "channels_first", "channels_last" or a `Layout`, where the shape alone is ambiguous. `grids`: those of the
    model's convolutions, see `note_grids`: where there are any, tokens lie on one of them, or on one halved. Raises
    LayerError.

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
    tokens = layout == TOKENS or (layout is None and (len(size) > 1 or _has_prefix(shape, module, grids)))
    if len(shape) == 3 and tokens:
        return _token_layout(shape, size, module, [grid for grid in grids if len(grid) == len(size)])
    if len(shape) != len(size) + 2:
        raise LayerError(
            f"output {shape} has no spatial extent for an input {tuple(input_shape)}; choose an earlier layer"
        )
    kind = layout or _kind(shape, size, module, grids)
    if kind not in (CHANNELS_FIRST, CHANNELS_LAST):
        raise LayerError(f"layout={layout!r}: expected {CHANNELS_FIRST!r}, {CHANNELS_LAST!r} or a Layout")
    return Layout(kind, shape[2:] if kind == CHANNELS_FIRST else shape[1:-1])


def note_grids(model: nn.Module, scope: ExitStack) -> set[Grid]:
    """The grids of the maps that the model's convolutions make inside the scope: a set that fills while it runs."""
    seen: set[Grid] = set()

    def note(module: nn.Module, args: object, output: object) -> None:
        if isinstance(output, Tensor) and math.prod(output.shape[2:]) > 1:
            seen.add(tuple(output.shape[2:]))

    for module in unwrap(model).modules():
        if isinstance(module, MAKING_GRIDS):
            scope.callback(module.register_forward_hook(here_only(note)).remove)
    return seen


def spatial_layers(model: nn.Module, run: Callable[[], object], input_shape: Sequence[int]) -> list[SpatialLayer]:
    """Every layer with more than one cell, from one forward pass `run`, in the order in which the layers finish."""
    finished: dict[str, tuple[nn.Module, torch.Size]] = {}

    def note(name: str, module: nn.Module, output: object) -> None:
        finished.pop(name, None)
        with suppress(LayerError):
            finished[name] = module, the_tensor(name, output)[1].shape

    with torch.no_grad(), Hooks() as hooks:
        grids = note_grids(model, hooks)
        for name, module in unwrap(model).named_modules():
            if name and not isinstance(module, (*PASS_THROUGH, torch.jit.ScriptModule)):
                hook = here_only(lambda module, args, output, name=name: note(name, module, output))
                hooks.hold(module.register_forward_hook(hook))
        run()
    found = []
    for name, (module, shape) in finished.items():
        with suppress(LayerError):
            layout = read_layout(shape, input_shape, module, grids=grids)
            found += [SpatialLayer(name, layout)] if math.prod(layout.grid) > 1 else []
    return found


def choose_layer(
    model: nn.Module, score: Callable[[Tensor], Tensor], x: Tensor, *, dense: bool = False
) -> SpatialLayer:
    """The last layer with spatial extent that the score (N,) reads there, and that holds features.

    Checked with one backward pass: a transformer that classifies by a class token reads no patch after its last
    attention, and an auxiliary head may run last. `dense`: the score is of one place among many, which the head's own
    layers hold already: the last layer of the model's backbone or encoder, or of its coarsest grid where it names none.
    """
    layers = spatial_layers(model, lambda: score(x), x.shape)
    layers = _encoding(model, layers) if dense else layers
    if not layers:
        raise LayerError(f"no layer of {type(model).__name__} has spatial extent for an input {tuple(x.shape)}")
    at_once = len(layers) if dense else CANDIDATES
    if layers[-1].layout.kind == TOKENS:
        layers = [layer for layer in layers if layer.layout.kind == TOKENS]
        at_once = len(layers)
    depends = False
    for end in range(len(layers), 0, -at_once):
        gradients = _gradients(model, score, x, layers[max(0, end - at_once) : end])
        read = _read(model, gradients, dense=dense)
        if read:
            return next((layer for layer, features in read.items() if features), next(iter(read)))
        depends = depends or bool(gradients)
    if not depends:
        raise LayerError(
            f"the score depends on no layer of {type(model).__name__} with spatial extent: the model detaches it, or turns "
            f"gradients off; name a layer, or a method without gradients"
        )
    where = "in" if dense else "at the patch tokens of"
    raise LayerError(
        f"the score's gradient is zero {where} every layer of {type(model).__name__} (an untrained head?); name a layer"
    )


def _gradients(
    model: nn.Module, score: Callable[[Tensor], Tensor], x: Tensor, layers: Sequence[SpatialLayer]
) -> dict[SpatialLayer, Tensor]:
    """The score's gradient at those of the layers that it reads, the last one first."""
    with Tap(model, [layer.name for layer in layers]) as tap:
        scores = tap.run(lambda: score(x)).sum()
        if scores.requires_grad:
            with suppress(LayerError):  # none of these is read
                tap.backward(scores)
        every = {layer: tap.chosen(layer.name).gradient for layer in reversed(layers)}
    return {layer: gradient for layer, gradient in every.items() if gradient is not None}


def _read(model: nn.Module, gradients: dict[SpatialLayer, Tensor], *, dense: bool) -> dict[SpatialLayer, bool]:
    """Those of the layers that are read at their cells, and whether they hold features."""
    found = {}
    for layer, gradient in gradients.items():
        channels = layer.layout.to_maps(gradient).transpose(0, 1).flatten(1).any(1)
        sure = layer.layout.kind != TOKENS and not dense  # one place may be read off one of several resolutions
        if sure or bool(channels.any()):
            answer = len(channels) > 1 and int(channels.sum()) == 1  # at every place: one of its channels is the score
            found[layer] = not answer and not (layer.layout.kind == TOKENS and _is_a_step(model, layer.name))
    return found


def _encoding(model: nn.Module, layers: list[SpatialLayer]) -> list[SpatialLayer]:
    """Those of the part that makes features of the image, before a head makes an answer at every place."""
    names = [name for name, _ in unwrap(model).named_modules() if name.rpartition(".")[2] in ENCODERS]
    shallow = sorted(names, key=lambda name: name.count("."))[:1]
    bodies = [f"{name}.body" for name in shallow if any(one.name.startswith(f"{name}.body.") for one in layers)]
    for part in (*bodies, *shallow):
        if inside := [layer for layer in layers if layer.name == part or layer.name.startswith(f"{part}.")]:
            return inside
    fewest = min((math.prod(layer.layout.grid) for layer in layers), default=0)
    return [layer for layer in layers if math.prod(layer.layout.grid) == fewest]


def _is_a_step(model: nn.Module, name: str) -> bool:
    """Whether tokens are not those of the stream: a Linear makes queries, keys and values of them, or class scores.

    A decoder's are questions of its own, whose number may be that of a grid's cells.
    """
    return "decoder" in name.split(".") or isinstance(find_layer(model, name)[1], nn.Linear)


def _kind(shape: tuple[int, ...], size: tuple[int, ...], module: nn.Module | None, seen: Collection[Grid] = ()) -> str:
    if isinstance(module, CONVOLUTIONAL):
        return CHANNELS_FIRST
    grids = {CHANNELS_FIRST: shape[2:], CHANNELS_LAST: shape[1:-1]}
    if _is_channels_last(module) and _fits(grids[CHANNELS_LAST], size, 2.0, -2):
        return CHANNELS_LAST
    for axes, cells_off in ((0, 0.6), (0, 2.0), (-2, 0.6), (-2, 2.0), (0, math.inf)):  # depth may have its own stride
        fitting = [kind for kind, grid in grids.items() if _fits(grid, size, cells_off, axes)]
        if fitting == [CHANNELS_LAST] and module is not None and _is_convolutional(module):
            break  # its shape speaks against its kind: strides that differ, or more channels than a grid has cells
        if len(fitting) == 1:
            return fitting[0]
        if len(fitting) == 2 and module is not None and _is_convolutional(module):
            return CHANNELS_FIRST
        if len(fitting) == 2:
            break
    known = [kind for kind, grid in grids.items() if any(grid in level for level in _halved(seen))]
    if len(known) == 1:
        return known[0]
    raise LayerError(
        f"output {shape} for an input of {size} may be channels first or channels last; pass layout={CHANNELS_FIRST!r} "
        f"or layout={CHANNELS_LAST!r}"
    )


def _fits(grid: Sequence[int], size: Sequence[int], cells_off: float, axes: int = 0) -> bool:
    """Whether a grid has the input's aspect, to within so many cells of rounding, and is no finer than 4 x the input.

    `axes`: the first one whose stride is held against the others'.
    """
    if any(cells > 4 * pixels for cells, pixels in zip(grid, size, strict=True)):
        return False
    strides = [math.log(pixels / cells) for cells, pixels in zip(grid, size, strict=True)][axes:]
    return max(strides) - min(strides) <= cells_off * sum(1 / cells for cells in grid[axes:])


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
        TOKENS: len(shape) == 3 and layout.prefix >= 0 and shape[1] >= layout.prefix + math.prod(grid),
    }
    if not grid or not held.get(layout.kind, False):
        raise LayerError(f"output {shape} is not {layout}: expected one of {', '.join(held)}, its grid, and the prefix")
    return layout


def _token_layout(
    shape: tuple[int, ...], size: tuple[int, ...], module: nn.Module | None, seen: Collection[Grid] = ()
) -> Layout:
    if not _has_channels(module, shape[2]) and any(math.prod(grid) == shape[2] for grid in (*_grids(size), *seen)):
        raise LayerError(
            f"output {shape} for an input of {size} may be tokens (N,T,K) or a flattened map (N,K,cells); "
            f"pass layout=Layout('tokens', grid, prefix), or reshape="
        )
    if seen:
        own, *merged = _halved(seen)
        found = _under(shape[1], own) or next(filter(None, (_under(shape[1], level, (1,)) for level in merged)), [])
        choice = [grid for grid in found if math.prod(grid) == math.prod(found[0])]
    else:
        patches = _grids(size)
        found = _under(shape[1], patches)
        choice = found if len(found) == 1 else [grid for grid in found if patches[grid] and math.prod(grid) >= 16]
    if len(choice) != 1:
        known = ", ".join(f"{shape[1] - math.prod(g)}+{'x'.join(map(str, g))}" for g in found) or "none"
        raise LayerError(
            f"output {shape} as tokens of an input of {size}: grids that fit: {known}; "
            f"pass layout=Layout('tokens', grid, prefix), or reshape="
        )
    return Layout(TOKENS, choice[0], shape[1] - math.prod(choice[0]))


def _under(tokens: int, grids: Collection[Grid], most: Sequence[int] = MOST_PREFIX_TOKENS) -> list[Grid]:
    """Grids with as many cells as there are tokens, or a few less, which are the prefix: the largest first."""
    for prefix in most:
        found = [grid for grid in grids if 0 <= tokens - math.prod(grid) <= prefix]
        if found:
            return sorted(found, key=math.prod, reverse=True)
    return []


def _halved(grids: Collection[Grid]) -> Iterator[set[Grid]]:
    """The grids themselves, and again and again what merging two by two cells leaves, or, of a volume, also two of each axis."""
    level = set(grids)
    for _ in range(MOST_HALVINGS):
        yield level
        level = {
            (*grid[:kept], *(-(-cells // 2) if up else cells // 2 for cells in grid[kept:]))
            for grid in level
            for kept in {0, max(0, len(grid) - 2)}
            for up in (False, True)
        }


def _has_prefix(shape: tuple[int, ...], module: nn.Module | None, seen: Collection[Grid]) -> bool:
    """Whether (N,T,K) of a signal has a few more rows than one of the model's maps has cells: tokens with a prefix."""
    cells = {grid[0] for grid in seen if len(grid) == 1}
    return (
        not isinstance(module, CONVOLUTIONAL)
        and not cells & set(shape[1:])
        and any(0 < shape[1] - count <= max(MOST_PREFIX_TOKENS) for count in cells)
    )


def _has_channels(module: nn.Module | None, count: int) -> bool:
    """Whether a part of the layer shows that its last axis is so many channels."""
    return module is not None and any(
        (type(part) is nn.LayerNorm and tuple(part.normalized_shape) == (count,))
        or (isinstance(part, nn.Linear) and part.out_features == count)
        for part in module.modules()
    )


def _grids(size: tuple[int, ...]) -> dict[Grid, bool]:
    """Grids of square patches over the input, and whether the patches tile it exactly."""
    found: dict[Grid, bool] = {}
    for patch in range(max(size), 0, -1):
        exact = all(pixels % patch == 0 for pixels in size)
        for grid in {tuple(pixels // patch for pixels in size), tuple(-(-pixels // patch) for pixels in size)}:
            if math.prod(grid) > 1:
                found[grid] = found.get(grid, False) or exact
    return found
