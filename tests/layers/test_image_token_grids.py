"""Grids of image tokens, and the map that several of them share."""

import numpy as np
import pytest

from camscope.errors import GeometryError
from camscope.layers.image_token_grids import (
    TokenGrid,
    build_packed_tile_grids,
    build_square_tile_grids,
    build_whole_image_grid,
    compose_token_map,
    list_placed_tokens,
    select_views,
)
from camscope.layers.tile_boxes_of_processor import Tile

WHOLE = Tile((0.0, 0.0, 40.0, 80.0), (8, 8))
LEFT, RIGHT = Tile((0.0, 0.0, 40.0, 40.0), (8, 8)), Tile((0.0, 40.0, 40.0, 80.0), (8, 8))


def test_one_tile_has_its_own_cells():
    grids = build_square_tile_grids(5, [LEFT], n_prefix=1)
    placed = compose_token_map(np.array([9.0, 1, 2, 3, 4]), grids, (40, 80))
    assert placed.attribution.tolist() == [[1, 2], [3, 4]]
    assert placed.placement.to_image([[2, 2]]).tolist() == [[40, 40]]
    assert list_placed_tokens(grids) == [1, 2, 3, 4]


def test_tiles_lie_beside_each_other():
    grids = build_square_tile_grids(8, [LEFT, RIGHT])
    placed = compose_token_map(np.arange(8.0), grids, (40, 80))
    assert placed.attribution.tolist() == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert placed.placement.to_image([[0, 0], [2, 4]]).tolist() == [[0, 0], [40, 80]]


def test_an_overview_is_added_and_interpolated():
    grids = build_square_tile_grids(12, [LEFT, RIGHT, WHOLE])
    assert [grid.is_overview for grid in grids] == [False, False, True]
    values = np.concatenate([np.zeros(8), [0.0, 4.0, 0.0, 4.0]])
    placed = compose_token_map(values, grids, (40, 80))
    assert placed.attribution.tolist() == [[0, 1, 3, 4], [0, 1, 3, 4]]  # linear between the centers of two cells
    assert [grid.is_overview for grid in select_views(grids, "overview")] == [True]
    assert len(select_views(grids, "tiles")) == 2
    assert len(select_views(grids, "all")) == 3


def test_packed_rows_end_with_a_separator():
    def pack(centers):  # the rows of two tiles, each with a separator
        left, right = centers[1].reshape(2, 2, 2), centers[2].reshape(2, 2, 2)
        rows = [np.concatenate([left[y], right[y], [[np.nan, np.nan]]]) for y in (0, 1)]
        return np.concatenate([centers[0], *rows])

    base, fine = build_packed_tile_grids(14, [WHOLE, LEFT, RIGHT], 2, pack)
    assert base.tokens.tolist() == [[0, 1], [2, 3]]
    assert base.is_overview
    assert fine.tokens.tolist() == [[4, 5, 6, 7], [9, 10, 11, 12]]
    assert fine.box == (0, 0, 40, 80)


@pytest.mark.parametrize(
    "build",
    [
        lambda: build_square_tile_grids(6, [LEFT]),
        lambda: build_square_tile_grids(9, [LEFT, RIGHT]),
        lambda: build_whole_image_grid(6, (2, 2), (40, 80)),
        lambda: build_packed_tile_grids(7, [WHOLE, LEFT], 2, lambda centers: centers.reshape(-1, 2)),
        lambda: build_packed_tile_grids(8, [WHOLE, LEFT], 2, lambda centers: centers.reshape(-1, 2)),
    ],
)
def test_a_number_of_tokens_that_does_not_fit_is_an_error(build):
    with pytest.raises(GeometryError):
        build()


def test_the_views_of_one_grid_are_that_grid():
    grids = [TokenGrid(np.array([[0]]), (0.0, 0.0, 1.0, 1.0))]
    assert select_views(grids, "tiles") == select_views(grids, "overview") == grids
