"""The placement of a map: worked numbers, brute force, and the two directions against each other."""

import itertools
import json
import pickle

import numpy as np
import pytest

from camscope.errors import GeometryError
from camscope.geometry import Placement

RNG = np.random.default_rng(0)
CHAIN = Placement.identity((480, 640)).resized((256, 341)).cropped((16, 58), (224, 224))


def brute(place: Placement, heat: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Pixel by pixel, from the definition: the pixel's center, in cells, among the 2^n nearest cell centers."""
    values, covered = np.zeros(place.image_size), np.zeros(place.image_size, bool)
    for pixel in np.ndindex(*place.image_size):
        point = place.to_input(np.array(pixel)[None] + 0.5)[0]
        if not all(0 <= p <= n for p, n in zip(point, place.input_size, strict=True)):
            continue
        covered[pixel] = True
        cell = point * heat.shape / place.input_size - 0.5
        for corner in itertools.product((0, 1), repeat=heat.ndim):
            index = np.floor(cell).astype(int) + corner
            share = np.prod(1 - np.abs(cell - index))
            values[pixel] += share * heat[tuple(np.clip(index, 0, np.array(heat.shape) - 1))]
    return values, covered


def test_a_resized_and_cropped_plane_lies_where_arithmetic_says():
    # the crop's corner is 16 rows and 58 columns into the 256 x 341 image, each of whose pixels is 1.875 x 1.8768 wide
    assert CHAIN.to_image([[0, 0]]) == pytest.approx(np.array([[16 * 480 / 256, 58 * 640 / 341]]))
    assert CHAIN.to_image([[224, 224]]) == pytest.approx(np.array([[240 * 480 / 256, 282 * 640 / 341]]))
    assert (CHAIN.input_size, CHAIN.image_size) == ((224, 224), (480, 640))
    # cell (3, 3) of a 7 x 7 map has its center in the middle of the crop
    center = CHAIN.cell_to_image_matrix((7, 7)) @ [3.5, 3.5, 1]
    assert center == pytest.approx(CHAIN.to_image([[112, 112]])[0])


@pytest.mark.parametrize(
    ("change", "numpy"),
    [
        (lambda p: p.flipped(0), lambda a: a[::-1]),
        (lambda p: p.flipped(1), lambda a: a[:, ::-1]),
        (lambda p: p.transposed((1, 0)), lambda a: a.T),
        (lambda p: p.cropped((3, 2), (4, 5)), lambda a: a[3:7, 2:7]),
        (lambda p: p.padded((2, 0), (1, 3)), lambda a: np.pad(a, ((2, 1), (0, 3)))),
        (
            lambda p: p.flipped(1).transposed((1, 0)).cropped((-1, 2), (9, 6)),
            lambda a: np.pad(a[:, ::-1].T, ((1, 0), (0, 0)))[:9, 2:8],
        ),
    ],
)
def test_each_step_moves_pixels_as_numpy_moves_them(change, numpy):
    image = RNG.uniform(1, 2, (9, 11))
    place, seen = change(Placement.identity(image.shape)), numpy(image)
    assert place.input_size == seen.shape
    values, covered = place.project(seen)  # a map of one cell a pixel comes back to the pixels it was cut from
    assert values[covered] == pytest.approx(image[covered], abs=1e-12)
    assert covered.sum() == (seen != 0).sum()
    assert not values[~covered].any()


def test_three_dimensions_reorder_as_numpy_reorders():
    volume = RNG.uniform(1, 2, (3, 4, 5))
    values, covered = (
        Placement.identity((3, 4, 5)).transposed((2, 0, 1)).flipped(0).project(volume.transpose(2, 0, 1)[::-1])
    )
    assert covered.all()
    assert values == pytest.approx(volume, abs=1e-12)


@pytest.mark.parametrize(
    ("place", "grid"),
    [
        (Placement.identity((30, 44)).resized((25, 37)).cropped((-2, 5), (24, 24)).flipped(1), (7, 5)),
        (Placement.identity((30, 44)).resized((64, 80)).transposed((1, 0)).flipped(0), (4, 9)),
        (Placement(np.array([[0.8, -0.3, 6.0], [0.4, 0.9, -2.0]]), (28, 26), (30, 44)), (6, 7)),
        (Placement(np.array([[0.3, 0.2, 0.0, 1], [0.0, 0.5, 0.1, 0], [0.1, 0.0, 0.4, 2]]), (20, 20, 20), (9, 10, 11)), (2, 3, 4)),
        (Placement.identity((50,)).resized((20,)).cropped((3,), (12,)), (5,)),
    ],
    ids=["separable", "transposed", "rotated", "rotated 3-D", "1-D"],
)  # fmt: skip
def test_project_is_its_definition(place, grid):
    heat = RNG.normal(size=grid)
    values, covered = place.project(heat)
    expected, expected_covered = brute(place, heat)
    assert np.array_equal(covered, expected_covered)
    assert 0 < covered.mean() <= 1
    assert values == pytest.approx(expected, abs=1e-12)
    assert place.project(heat.astype(np.float32))[0] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("block", [1, 7, 1 << 20])
@pytest.mark.one_in(2)
def test_blocks_do_not_show(monkeypatch, block):
    place = Placement(np.array([[0.8, -0.3, 6.0], [0.4, 0.9, -2.0]]), (28, 26), (30, 44))
    heat = RNG.normal(size=(6, 7))
    monkeypatch.setattr("camscope.geometry.PIXELS_PER_BLOCK", block)
    assert place.project(heat)[0] == pytest.approx(brute(place, heat)[0], abs=1e-12)


def test_there_and_back():
    points = RNG.uniform(-50, 300, (20, 2))
    assert CHAIN.to_input(CHAIN.to_image(points)) == pytest.approx(points)


@pytest.mark.parametrize("size", [(480, 640), (640, 480)])
def test_the_hottest_cell_lands_on_its_own_center(size):
    place = Placement.identity(size).resized((256, 341) if size[0] < size[1] else (341, 256))
    place = place.cropped([(n - 224) // 2 for n in place.input_size], (224, 224))
    heat = np.zeros((7, 7))
    heat[2, 5] = 1
    values, covered = place.project(heat)
    hottest = np.unravel_index(values.argmax(), values.shape)
    there = place.to_input(np.array(hottest)[None] + 0.5)[0]
    assert np.abs(there - [2.5 * 32, 5.5 * 32]).max() < 0.5 + 1e-9
    assert 0.5 < covered.mean() < 0.6  # 224 x 224 of 256 x 341


def test_a_flat_map_stays_flat_and_one_cell_covers_all():
    values, covered = CHAIN.project(np.full((1, 1), 0.1, np.float32))
    assert values.dtype == np.float32
    assert set(np.unique(values)) == {np.float32(0), np.float32(0.1)}
    assert np.array_equal(values != 0, covered)
    assert CHAIN.project(np.ones((7, 7)))[0].max() == 1


def test_it_is_a_value_of_plain_numbers():
    assert Placement.from_dict(json.loads(json.dumps(CHAIN.to_dict()))) == CHAIN
    assert pickle.loads(pickle.dumps(CHAIN)) == CHAIN
    assert hash(CHAIN.flipped(0).flipped(0)) == hash(CHAIN)
    assert CHAIN.flipped(0) != CHAIN
    with pytest.raises(ValueError, match="read-only"):
        CHAIN.matrix[0, 0] = 7


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda: Placement.identity((0, 3)), r"size is \(0, 3\)"),
        (lambda: Placement(np.zeros((2, 3)), (3, 3), (3, 3)), "invertible"),
        (lambda: Placement(np.array([[1, 0, np.nan], [0, 1, 0]]), (3, 3), (3, 3)), "finite"),
        (lambda: Placement(np.eye(2), (3, 3), (3, 3)), r"expected \(2, 3\)"),
        (lambda: CHAIN.project(np.zeros((7, 7, 7))), r"shape \(7, 7, 7\)"),
        (lambda: CHAIN.resized((1.5, 2)), "expected 2 integers"),
        (lambda: CHAIN.to_image([[1, 2, 3]]), r"expected \(M, 2\)"),
        (lambda: CHAIN.transposed((0, 0)), "expected each of the 2 axes once"),
        (lambda: Placement.from_dict({"matrix": []}), "to_dict"),
    ],
)
def test_wrong_numbers_are_named(wrong, says):
    with pytest.raises(GeometryError, match=says):
        wrong()
