"""Where the image tokens of a vision-language model lie on the image: one grid for each tile, and their common map."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from camscope.errors import GeometryError
from camscope.geometry import Placement
from camscope.layers.tile_boxes_of_processor import Tile
from camscope.plurals import plural

FloatArray = NDArray[np.float64]
Box = tuple[float, float, float, float]
Views = Literal["all", "tiles", "overview"]

# each tile is one square of tokens, row by row, in the order of the tiles
FAMILIES_OF_SQUARE_TILES = (*("gemma3", "idefics3", "internvl", "llava", "paligemma", "smolvlm"),)
FAMILIES_OF_PACKED_TILES = ("llava_next", "llava_onevision")  # an overview, then the rows of all tiles, without padding
FAMILIES_OF_MERGED_PATCHES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5")
FAMILIES_WITH_MEAN_TOKEN = ("florence2",)  # the mean of all cells, then the cells
FAMILIES_OF_LEARNED_QUERIES = ("blip_2", "idefics2")  # their image tokens have no place on the image
FAMILIES = tuple(
    sorted(
        (
            *FAMILIES_OF_SQUARE_TILES,
            *FAMILIES_OF_PACKED_TILES,
            *FAMILIES_OF_MERGED_PATCHES,
            *FAMILIES_WITH_MEAN_TOKEN,
            *FAMILIES_OF_LEARNED_QUERIES,
            "gemma4",
        )
    )
)
MIN_OVERVIEW_SHARE = 0.99  # of the image, from which a tile among several is an overview
MAX_SNAPPED_CELLS = 0.15  # of a cell, by which the edge of a tile may differ from the cells of the common map
MAX_PREFIX_TOKENS = 9  # of a vision tower: a class token and registers


@dataclass(frozen=True, eq=False)
class TokenGrid:
    """A grid of image tokens: their indices (h,w) among the tokens of one image, and the box of the grid in image pixels."""

    tokens: NDArray[np.int64]
    box: Box
    is_overview: bool = False


PackCoordinates = Callable[[FloatArray], FloatArray]  # (M,cells,2) -> (T,2), NaN at tokens that have no place


def build_square_tile_grids(n_tokens: int, tiles: Sequence[Tile], n_prefix: int = 0) -> list[TokenGrid]:
    """Return the grids of tiles that are squares of tokens, row by row. Each has `n_prefix` tokens before the grid."""
    per_tile, remainder = divmod(n_tokens, len(tiles))
    side = math.isqrt(max(0, per_tile - n_prefix))
    if remainder or side == 0 or side**2 != per_tile - n_prefix:
        raise GeometryError(
            f"{plural(n_tokens, 'image token')} for {plural(len(tiles), 'tile')}: expected the same square number of tokens "
            "for each tile"
        )
    return build_tower_grids((side, side), per_tile, tiles)


def build_tower_grids(grid: tuple[int, int], n_tokens_per_tile: int, tiles: Sequence[Tile]) -> list[TokenGrid]:
    """Return the grids of a vision tower: each tile has tokens before the cells, and then the cells row by row."""
    n_prefix = n_tokens_per_tile - math.prod(grid)
    if not 0 <= n_prefix <= MAX_PREFIX_TOKENS:
        raise GeometryError(f"{plural(n_tokens_per_tile, 'token')} for a grid of {grid[0]}x{plural(grid[1], 'cell')}")
    cells = np.arange(math.prod(grid)).reshape(grid) + n_prefix
    return _mark_overviews([TokenGrid(cells + i * n_tokens_per_tile, tile.box) for i, tile in enumerate(tiles)])


def build_packed_tile_grids(n_tokens: int, tiles: Sequence[Tile], side: int, pack: PackCoordinates) -> list[TokenGrid]:
    """Return the grids of an overview and of the cells of all other tiles, which the model packs without padding.

    `pack` is the model's own packing. It receives the coordinates of all cells instead of their features.
    """
    centers = np.stack([_compute_cell_centers(tile.box, (side, side)).reshape(-1, 2) for tile in tiles])
    packed = pack(centers)
    if len(packed) != n_tokens:
        raise GeometryError(f"the model packs {plural(len(packed), 'image token')}, but the prompt has {n_tokens}")
    base = TokenGrid(np.arange(side**2).reshape(side, side), tiles[0].box, is_overview=len(tiles) > 1)
    if len(tiles) == 1:
        return [base]
    ends = np.flatnonzero(np.isnan(packed[:, 0]))
    starts = np.array([side**2, *(ends[:-1] + 1)])
    if len(ends) == 0 or ends[-1] != n_tokens - 1 or len(set((ends - starts).tolist())) > 1:
        raise GeometryError("the rows of the image tokens have different lengths")
    tokens = np.stack([np.arange(start, end) for start, end in zip(starts, ends, strict=True)])
    y, x = packed[tokens, 0].mean(1), packed[tokens, 1].mean(0)
    cell = [(tiles[1].box[axis + 2] - tiles[1].box[axis]) / side for axis in (0, 1)]
    steps = [float(np.diff(line).mean()) if len(line) > 1 else cell[axis] for axis, line in enumerate((y, x))]
    box = (y[0] - steps[0] / 2, x[0] - steps[1] / 2, y[-1] + steps[0] / 2, x[-1] + steps[1] / 2)
    return [base, TokenGrid(tokens, (float(box[0]), float(box[1]), float(box[2]), float(box[3])))]


def build_whole_image_grid(
    n_tokens: int, grid: tuple[int, int], image_size: tuple[int, int], n_prefix: int = 0
) -> list[TokenGrid]:
    """Return the grid of tokens that show the whole image, row by row, after `n_prefix` other tokens."""
    if math.prod(grid) + n_prefix != n_tokens:
        raise GeometryError(f"{plural(n_tokens, 'image token')} for a grid of {grid[0]}x{plural(grid[1], 'cell')}")
    box = (0.0, 0.0, float(image_size[0]), float(image_size[1]))
    return [TokenGrid(np.arange(n_prefix, n_tokens).reshape(grid), box)]


def select_views(grids: Sequence[TokenGrid], views: Views) -> list[TokenGrid]:
    """Select all grids, the tiles alone, or the overview of the whole image alone. A single grid is always selected."""
    if views == "all" or len(grids) == 1:
        return list(grids)
    return [grid for grid in grids if grid.is_overview == (views == "overview")] or list(grids)


class PlacedMap(NamedTuple):
    """A map (h,w) and where it lies on the image."""

    attribution: FloatArray
    placement: Placement


def compose_token_map(values: NDArray[Any], grids: Sequence[TokenGrid], image_size: tuple[int, int]) -> PlacedMap:
    """Put the values (T,) of image tokens on one map. A place that several tiles show gets the sum of their values.

    With one grid, the map has its cells. With several, the map covers the image in the finest cells of all grids, and the
    values of larger cells are interpolated linearly.
    """
    if len(grids) == 1:
        grid = grids[0]
        return PlacedMap(values[grid.tokens], _place_box(grid.box, grid.tokens.shape, image_size))
    cells = [_compute_cell_size(grid) for grid in grids]
    shape = (
        max(1, round(image_size[0] / min(cell[0] for cell in cells))),
        max(1, round(image_size[1] / min(cell[1] for cell in cells))),
    )
    total = np.zeros(shape, values.dtype)
    for grid in grids:
        scale = np.divide(shape, image_size)
        box = [_snap_to_cell(edge * scale[axis % 2]) for axis, edge in enumerate(grid.box)]
        total += _place_box(box, grid.tokens.shape, shape).project(values[grid.tokens]).values
    whole = (0.0, 0.0, float(image_size[0]), float(image_size[1]))
    return PlacedMap(total, _place_box(whole, shape, image_size))


def _snap_to_cell(edge: float) -> float:
    """Return the border between two cells if an edge is close to it: tiles are measured, and next to each other."""
    return float(round(edge)) if abs(edge - round(edge)) <= MAX_SNAPPED_CELLS else edge


def list_placed_tokens(grids: Sequence[TokenGrid]) -> list[int]:
    """Return the indices of all tokens that have a place on the image, in ascending order."""
    return sorted(int(token) for grid in grids for token in grid.tokens.flat)


def _place_box(box: Sequence[float], shape: Sequence[int], image_size: Sequence[int]) -> Placement:
    """Return the placement of a map of this shape, whose cells count as its pixels, at a box of the image."""
    steps = (box[2] - box[0]) / shape[0], (box[3] - box[1]) / shape[1]
    matrix = np.array([[steps[0], 0.0, box[0]], [0.0, steps[1], box[1]]])
    return Placement(matrix, (int(shape[0]), int(shape[1])), (int(image_size[0]), int(image_size[1])))


def _compute_cell_size(grid: TokenGrid) -> tuple[float, float]:
    rows, columns = grid.tokens.shape
    return (grid.box[2] - grid.box[0]) / rows, (grid.box[3] - grid.box[1]) / columns


def _compute_cell_centers(box: Box, grid: tuple[int, int]) -> FloatArray:
    """Return the centers (h,w,2) of the cells of a grid in image pixels."""
    cell = (box[2] - box[0]) / grid[0], (box[3] - box[1]) / grid[1]
    index = np.indices(grid).transpose(1, 2, 0) + 0.5
    return np.asarray(index * cell + (box[0], box[1]), np.float64)


def _mark_overviews(grids: Sequence[TokenGrid]) -> list[TokenGrid]:
    """Mark the grids among several that show the whole of what all of them show."""
    if len(grids) == 1:
        return list(grids)
    boxes = np.array([grid.box for grid in grids])
    area = (boxes[:, 2].max() - boxes[:, 0].min()) * (boxes[:, 3].max() - boxes[:, 1].min())
    shares = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1]) / area
    return [
        TokenGrid(grid.tokens, grid.box, bool(share >= MIN_OVERVIEW_SHARE))
        for grid, share in zip(grids, shares, strict=True)
    ]
