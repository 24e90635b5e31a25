"""Contours, boxes and marks on hand-drawn maps, with coordinates worked out by hand."""

import numpy as np
import pytest

from camscope.errors import InputError
from camscope.render import Box, draw_boxes, draw_contours, find_boxes, find_contours

TWO = np.array(
    [
        [0.0, 0.0, 0.0, 0.0, 0.0, 0.0],
        [0.0, 0.5, 0.9, 0.0, 0.0, 0.0],
        [0.0, 0.0, 0.6, 0.0, 0.0, 0.0],
        [0.0, 0.0, 0.0, 0.0, 0.0, 1.0],
    ]
)


def area(polygon):
    """Signed area by the shoelace formula."""
    (r, c), (s, d) = polygon.T, np.roll(polygon, -1, axis=0).T
    return float((r * d - c * s).sum() / 2)


def cycle(polygon):
    """The corners, from the first one on; the direction does not matter."""
    points = [tuple(p) for p in polygon]
    start = points.index(min(points))
    around = points[start:] + points[:start]
    return min(around, [around[0], *around[:0:-1]])


def test_contours_run_along_the_pixels_edges():
    small, large = sorted((cycle(p) for p in find_contours(TWO, 0.5)), key=len)
    assert small == [(3, 5), (3, 6), (4, 6), (4, 5)]
    assert large == [(1, 1), (1, 3), (3, 3), (3, 2), (2, 2), (2, 1)]
    assert [cycle(p) for p in find_contours(TWO, 0.95)] == [small]
    assert find_contours(TWO, 1.0001) == []


def test_a_hole_has_a_contour_of_its_own():
    ring = np.ones((5, 5))
    ring[2, 2] = 0
    found = sorted((cycle(p) for p in find_contours(ring, 1.0)), key=str)
    assert found == [[(0, 0), (0, 5), (5, 5), (5, 0)], [(2, 2), (2, 3), (3, 3), (3, 2)]]


@pytest.mark.parametrize("seed", range(20))
def test_contours_enclose_exactly_the_pixels_at_the_level(seed):
    rng = np.random.default_rng(seed)
    values = rng.random(rng.integers(1, 30, 2))
    found = find_contours(values, 0.6)
    assert abs(sum(area(p) for p in found)) == (values >= 0.6).sum()
    assert all(len(p) >= 4 for p in found)


def test_boxes_of_hand_drawn_blobs_strongest_first():
    assert find_boxes(TWO, 0.5) == [Box(5, 3, 1, 1, 1.0), Box(left=1, top=1, width=2, height=2, peak=0.9)]
    assert find_boxes(TWO, 0.55) == [Box(5, 3, 1, 1, 1.0), Box(2, 1, 1, 2, 0.9)]
    assert find_boxes(np.eye(3) * 0.7, 0.7) == [Box(0, 0, 3, 3, 0.7)]  # corners touch
    assert find_boxes(np.array([[0.4, 0.0, 0.4]]), 0.3) == [Box(0, 0, 1, 1, 0.4), Box(2, 0, 1, 1, 0.4)]


def test_a_box_has_the_peak_of_its_own_pixels_alone():
    nested = np.full((7, 7), 0.3)
    nested[1:6, 1:6] = 0.0
    nested[3, 3] = 0.9
    assert find_boxes(nested, 0.2) == [Box(3, 3, 1, 1, 0.9), Box(0, 0, 7, 7, 0.3)]


def test_no_evidence_has_no_shape():
    assert find_contours(np.zeros((8, 8)), 1e-12) == []
    assert find_boxes(np.zeros((8, 8)), 1e-12) == []
    image = np.full((8, 8, 3), 7, np.uint8)
    np.testing.assert_array_equal(draw_contours(image, np.zeros((8, 8)), [0.1, 0.5]), image)


def changed(image, drawn):
    return (image != drawn).any(axis=2)


@pytest.mark.parametrize("gray", [0, 255])
def test_a_contour_is_drawn_on_the_edge_and_nowhere_else(gray):
    image = np.full((100, 120, 3), gray, np.uint8)
    values = np.zeros((100, 120))
    values[20:60, 30:90] = 1.0
    where = changed(image, draw_contours(image, values, 0.5))
    assert where[20, 30:90].all()
    assert where[59, 30:90].all()
    assert where[20:60, 30].all()
    assert where[20:60, 89].all()
    assert not where[25:55, 35:85].any()
    assert not where[:15].any()
    assert not where[65:].any()
    assert not where[:, :25].any()
    assert not where[:, 95:].any()


def test_each_level_is_drawn_in_its_own_color():
    image = np.zeros((60, 60, 3), np.uint8)
    values = np.zeros((60, 60))
    values[10:50, 10:50], values[25:35, 25:35] = 0.5, 1.0
    drawn = draw_contours(image, values, [0.5, 1.0]).astype(int)
    low, high = drawn[8:12, 30].sum(axis=0), drawn[23:27, 30].sum(axis=0)
    assert high[0] > 1.2 * low[0] or high[1] > 2 * low[1]
    assert (draw_contours(image, values, 0.5) != drawn).any()


def test_boxes_and_labels_are_drawn_where_they_are():
    image = np.full((100, 120, 3), 60, np.uint8)
    low, high = Box(30, 50, 40, 20, 0.9), Box(80, 2, 20, 20, 0.5)
    frames = changed(image, draw_boxes(image, [low, high]))
    assert frames[50, 30:70].all()
    assert frames[69, 30:70].all()
    assert not frames[55:65, 35:65].any()
    labels = changed(image, draw_boxes(image, [low, high], ["0.9", "0.5"])) & ~frames
    assert labels[35:48, 30:50].sum() > 100  # above the box
    assert labels[5:18, 84:96].sum() > 50  # inside: there is no room above
    wide = draw_boxes(image, [low], ["a label wider than the picture itself"])
    assert wide.shape == image.shape
    with pytest.raises(InputError, match="1 label for 2 boxes"):
        draw_boxes(image, [low, high], ["one"])


def test_lines_grow_with_the_picture():
    def thickness(size):
        image, values = np.full((size, size, 3), 60, np.uint8), np.zeros((size, size))
        values[: size // 2] = 1.0
        line = draw_contours(image, values, 0.5)[size // 4 : 3 * size // 4, size // 2].astype(int) - 60
        return (np.abs(line).max(axis=1) > 30).sum()  # more than the smoothing's last traces

    assert thickness(100) <= 6
    assert 2.5 < thickness(2000) / thickness(250) < 8
