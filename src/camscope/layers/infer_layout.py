"""Infer the layout of a layer's output from its shape: which axes are the channels and the spatial grid."""

import math
from collections.abc import Collection, Iterable, Iterator, Sequence

from torch import nn

from camscope.errors import LayerError, Remedy
from camscope.layers.layout import (
    CHANNELS_FIRST,
    CHANNELS_FIRST_MODULES,
    CHANNELS_LAST,
    TOKENS,
    Grid,
    Layout,
    build_ambiguous_layout_error,
    returns_channels_first,
)
from camscope.layers.recorded_grids_and_token_counts import NO_HINTS, LayoutHints
from camscope.plurals import plural

MAX_PREFIX_TOKENS = (5, 9)  # a class token and four registers; eight, where no grid is found with fewer
MAX_HALVINGS = 5  # of a grid, by merged tokens


def infer_layout(
    shape: Sequence[int],
    input_shape: Sequence[int],
    module: nn.Module | None = None,
    layout: str | Layout | None = None,
    hints: LayoutHints = NO_HINTS,
) -> Layout:
    """Infer the layout of a layer's output from the shapes of the output and of the input (N,C,*S).

    If the shape is ambiguous, pass `layout`: "channels_first", "channels_last" or a `Layout`. `hints` come from
    `record_layout_hints`: tokens are on a grid of the model's convolutions, or on a halved one. Raise LayerError if no
    layout, or more than one, fits.

    >>> print(infer_layout((2, 197, 768), (2, 3, 224, 224)))
    tokens 1+14x14
    >>> print(infer_layout((2, 7, 10, 768), (2, 3, 224, 320)))
    channels_last 7x10
    """
    size, shape = tuple(input_shape[2:]), tuple(shape)
    if isinstance(layout, Layout):
        return _require_fitting_layout(layout, shape)
    if shape[0] != input_shape[0]:
        one_each = f"output {shape} has not one item per sample of the batch of {input_shape[0]}; pass reshape="
        raise LayerError(advise_on_per_frame_output(shape, input_shape) or one_each)
    tokens = layout == TOKENS or (layout is None and (len(size) > 1 or _has_prefix_tokens(shape, module, hints.grids)))
    if len(shape) == 3 and tokens:
        return _infer_token_layout(shape, size, module, hints)
    if len(shape) != len(size) + 2:
        raise LayerError(
            advise_on_per_frame_output(shape, input_shape)
            or f"output {shape} has no spatial extent for an input {tuple(input_shape)}; choose an earlier layer"
        )
    kind = layout or _infer_layout_kind(shape, size, module, hints)
    if kind not in (CHANNELS_FIRST, CHANNELS_LAST):
        raise LayerError(f"layout={layout!r}: expected {CHANNELS_FIRST!r}, {CHANNELS_LAST!r} or a Layout")
    return Layout(kind, shape[2:] if kind == CHANNELS_FIRST else shape[1:-1])


def advise_on_per_frame_output(shape: Sequence[int], input_shape: Sequence[int]) -> str:
    """Return advice for an error about an output (N*T,K,h,w) with one item per video frame. Return "" for other outputs."""
    is_per_frame = len(input_shape) == 5 and len(shape) == 4 and shape[0] == input_shape[0] * input_shape[2]
    if not is_per_frame or math.prod(shape[2:]) == 1:
        return ""
    return (
        f"output {tuple(shape)} has not one item per sample of the batch of {input_shape[0]}, but one for each of the "
        f"{plural(input_shape[2], 'frame')} of a video, or instances of a bag: name the layer, and pass reshape=lambda maps: "
        f"maps.unflatten(0, (-1, {input_shape[2]})).transpose(1, 2) for maps (N,T,h,w)"
    )


def _infer_layout_kind(
    shape: tuple[int, ...], size: tuple[int, ...], module: nn.Module | None, hints: LayoutHints = NO_HINTS
) -> str:
    """Infer from shapes and modules whether an output has channels first or last. Raise a LayerError if unclear."""
    if returns_channels_first(module):
        return CHANNELS_FIRST
    grids = {CHANNELS_FIRST: shape[2:], CHANNELS_LAST: shape[1:-1]}
    if _has_channels_last_axis(module, shape[-1]) and not _has_channels_last_axis(module, shape[1]):
        if _matches_aspect(grids[CHANNELS_LAST], size, 2.0) or _matches_aspect(grids[CHANNELS_LAST], size, 2.0, -2):
            return CHANNELS_LAST
        raise LayerError(
            f"output {shape} for an input of {size} has channels last, but its other axes do not have the aspect ratio of the "
            "input. They may be windows, or patches in another order",
            fix="choose another layer, or pass reshape=",
            remedy=Remedy.SET_LAYER,
        )
    # works on the last axis alone, as on channels; a LayerNorm may span the whole map instead
    spans_channels = type(module) is nn.LayerNorm and len(module.normalized_shape) == 1
    if (spans_channels or type(module) is nn.Linear) and _matches_aspect(grids[CHANNELS_LAST], size, 2.0, -2):
        return CHANNELS_LAST
    kinds = {type(part) for part in module.modules()} if module is not None else set()
    is_convolutional = any(issubclass(kind, CHANNELS_FIRST_MODULES) for kind in kinds)
    is_convolutional = is_convolutional and not kinds & {nn.LayerNorm, nn.Linear}
    for axes, max_cells_off in (
        (0, 0.6),
        (0, 2.0),
        (-2, 0.6),
        (-2, 2.0),
        (0, math.inf),
    ):  # depth may have its own stride
        fitting = [kind for kind, grid in grids.items() if _matches_aspect(grid, size, max_cells_off, axes)]
        if fitting == [CHANNELS_LAST] and is_convolutional:
            break  # its shape contradicts its kind: strides that differ, or more channels than a grid has cells
        if len(fitting) == 1 or (fitting and is_convolutional):
            return fitting[0]
        if fitting:
            break
    halved = set().union(*_iter_halved_grids(hints.grids))
    fitting_kinds = [kind for kind, grid in grids.items() if grid in halved]
    if len(fitting_kinds) == 1:
        return fitting_kinds[0]
    # the grid comes from convolutions, and nothing moved their channels
    if CHANNELS_FIRST in fitting_kinds and not hints.works_on_last_axis:
        return CHANNELS_FIRST
    raise build_ambiguous_layout_error(
        f"output {shape} for an input of {size} may have channels first or channels last",
        f"pass layout={CHANNELS_FIRST!r} or layout={CHANNELS_LAST!r}",
    )


def _matches_aspect(grid: Sequence[int], size: Sequence[int], max_cells_off: float, first_axis: int = 0) -> bool:
    """Whether a grid has the aspect ratio of the input, with a tolerance of `max_cells_off` cells. Axes before
    `first_axis` are ignored.
    """
    if any(cells > 4 * pixels for cells, pixels in zip(grid, size, strict=True)):
        return False
    strides = [math.log(pixels / cells) for cells, pixels in zip(grid, size, strict=True)][first_axis:]
    return max(strides) - min(strides) <= max_cells_off * sum(1 / cells for cells in grid[first_axis:])


def has_unequal_strides(grid: Sequence[int], size: Sequence[int]) -> bool:
    """Whether the strides along rows and columns clearly differ: one is more than twice the other, beyond rounding."""
    plane = [math.log(pixels / cells) for pixels, cells in zip(size, grid, strict=True)][-2:]
    return max(plane) - min(plane) > math.log(2) + sum(1 / cells for cells in grid[-2:])


def _require_fitting_layout(layout: Layout, shape: tuple[int, ...]) -> Layout:
    """Return the layout that the user passed. Raise LayerError if the layout does not fit the shape of the output."""
    grid = tuple(layout.grid)
    expected_shapes = {
        CHANNELS_FIRST: shape[2:] == grid,
        CHANNELS_LAST: shape[1:-1] == grid,
        TOKENS: len(shape) == 3 and layout.prefix >= 0 and shape[1] >= layout.prefix + math.prod(grid),
    }
    if not grid or not expected_shapes.get(layout.kind, False):
        kinds = ", ".join(expected_shapes)
        raise LayerError(
            f"output {shape} does not have the layout {layout}: pass the right kind ({kinds}), grid and prefix"
        )
    return layout


def _infer_token_layout(
    shape: tuple[int, ...], size: tuple[int, ...], module: nn.Module | None, hints: LayoutHints
) -> Layout:
    """Infer the grid and the number of prefix tokens of an output (N,T,K). Raise a LayerError if unclear."""
    grids = [grid for grid in hints.grids if len(grid) == len(size)]
    framed = [(size[0], *grid) for grid in hints.grids if len(grid) == 2] if len(size) == 3 and not grids else []
    patches = _map_patch_grids_to_exact_tiling(size)
    if not _has_channels_last_axis(module, shape[2]) and shape[2] in map(math.prod, (*patches, *grids)):
        raise build_ambiguous_layout_error(
            f"output {shape} for an input of {size} may be tokens (N,T,K) or a flattened map (N,K,cells)"
        )
    if grids or framed:
        # tokens of several frames are not merged
        unmerged, *merged = _iter_halved_grids(grids) if grids else [set(framed)]
        concatenated = [
            grid for grid in unmerged if hints.count_tokens_before_image(shape[1], math.prod(grid)) is not None
        ]
        fitting = (
            _find_grids_with_prefix(shape[1], unmerged)
            or concatenated
            or next(filter(None, (_find_grids_with_prefix(shape[1], level, (1,)) for level in merged)), [])
        )
        candidates = [grid for grid in fitting if math.prod(grid) == math.prod(fitting[0])]
    else:
        fitting = _find_grids_with_prefix(shape[1], patches)
        exact = [grid for grid in fitting if patches[grid] and math.prod(grid) >= 16]
        candidates = fitting if len(fitting) == 1 else exact
    if len(candidates) != 1:
        listing = ", ".join(f"{shape[1] - math.prod(g)}+{'x'.join(map(str, g))}" for g in fitting) or "none"
        raise build_ambiguous_layout_error(
            f"output {shape} holds tokens of an input of {size}: expected one grid that fits, found: {listing}"
        )
    cells = math.prod(candidates[0])
    before = hints.count_tokens_before_image(shape[1], cells)
    return Layout(TOKENS, candidates[0], shape[1] - cells if before is None else before)


def infer_vision_language_token_layout(shape: Sequence[int], input_shape: Sequence[int], hints: LayoutHints) -> Layout:
    """Infer where the image tokens are among the tokens (N,T,K) of a vision-language model. Return a layout.

    Raise LayerError if the image tokens have gaps between them, or do not fit exactly one grid.
    """
    tokens, size = shape[1], tuple(input_shape[2:])
    fix = "pass layout=Layout('tokens', grid, prefix) if you know it, or choose a layer of the vision tower"
    if tokens not in hints.image_token_positions:
        raise build_ambiguous_layout_error(
            f"output {tuple(shape)} belongs to a vision-language model, but no input ids of "
            f"{plural(tokens, 'token')} with image tokens were recorded",
            f"pass input_ids to the model, or {fix}",
        )
    positions = hints.image_token_positions[tokens]
    if positions is None:
        raise build_ambiguous_layout_error(
            "the image tokens are at different positions in the samples of the batch",
            f"explain one at a time, or {fix}",
        )
    count = len(positions)
    if not count or positions[-1] - positions[0] + 1 != count:
        raise build_ambiguous_layout_error(
            f"the input ids hold {plural(count, 'image token')}; expected one run without gaps", fix
        )
    levels: Iterable[set[Grid]] = [set(_map_patch_grids_to_exact_tiling(size))]
    if hints.grids:
        levels = _iter_halved_grids([grid for grid in hints.grids if len(grid) == len(size)])
    fitting = next(filter(None, ([grid for grid in level if math.prod(grid) == count] for level in levels)), [])
    if len(fitting) != 1:
        listing = " or ".join("x".join(map(str, grid)) for grid in sorted(fitting)) or "none"
        raise build_ambiguous_layout_error(
            f"the input ids hold {plural(count, 'image token')}; expected one grid with as many cells, found: {listing}",
            fix,
        )
    return Layout(TOKENS, fitting[0], positions[0])


def _find_grids_with_prefix(
    n_tokens: int, grids: Collection[Grid], max_prefixes: Sequence[int] = MAX_PREFIX_TOKENS
) -> list[Grid]:
    """Return the grids that fit a number of tokens, with at most a few prefix tokens. The largest grid is first."""
    levels = ([grid for grid in grids if 0 <= n_tokens - math.prod(grid) <= prefix] for prefix in max_prefixes)
    return sorted(next(filter(None, levels), []), key=math.prod, reverse=True)


def _iter_halved_grids(grids: Collection[Grid]) -> Iterator[set[Grid]]:
    """Yield a set of grids, then a set with half as many cells along each axis, and so on."""
    level = set(grids)
    for _ in range(MAX_HALVINGS):
        yield level
        level = {
            (*grid[:n_leading], *(-(-cells // 2) if up else cells // 2 for cells in grid[n_leading:]))
            for grid in level
            for n_leading in {0, max(0, len(grid) - 2)}
            for up in (False, True)
        }


def _has_prefix_tokens(shape: tuple[int, ...], module: nn.Module | None, grids: Collection[Grid]) -> bool:
    """Whether some tokens of a signal's output (N,T,K) are prefix tokens: there are a few more tokens than a grid has cells."""
    cells = {grid[0] for grid in grids if len(grid) == 1}
    if isinstance(module, CHANNELS_FIRST_MODULES) or cells & set(shape[1:]):
        return False
    return any(0 < shape[1] - count <= max(MAX_PREFIX_TOKENS) for count in cells)


def _has_channels_last_axis(module: nn.Module | None, n_channels: int) -> bool:
    """Whether a LayerNorm or Linear inside a layer expects this number of channels on the last axis."""
    return module is not None and any(
        (type(part) is nn.LayerNorm and tuple(part.normalized_shape) == (n_channels,))
        or (isinstance(part, nn.Linear) and part.out_features == n_channels)
        for part in module.modules()
    )


def _map_patch_grids_to_exact_tiling(input_size: tuple[int, ...]) -> dict[Grid, bool]:
    """Return all grids of square patches over an input. The value of a grid says whether its patches tile the input exactly."""
    is_exact: dict[Grid, bool] = {}
    for patch in range(max(input_size), 0, -1):
        exact = all(pixels % patch == 0 for pixels in input_size)
        rounded = ([pixels // patch for pixels in input_size], [-(-pixels // patch) for pixels in input_size])
        for grid in set(map(tuple, rounded)):
            if math.prod(grid) > 1:
                is_exact[grid] = is_exact.get(grid, False) or exact
    return is_exact
