"""A chart: the line runs where its values are."""

import numpy as np
import pytest

from camscope.errors import InputError
from camscope.render import Curve, draw_chart_axis, draw_line_chart


def middle(picture, column, color=(38, 84, 160)):
    rows = np.flatnonzero((picture[:, column] == color).all(1))
    return float(rows.mean()) if rows.size else None


def flat(values):
    return Curve(np.array(values), np.array(values), np.array(values))


def test_values_stand_in_the_middle_of_their_steps():
    picture = draw_line_chart(flat([1.0, 0.0, 0.5]), step_width=40, height=113)
    assert picture.shape == (113, 120, 3)
    assert [middle(picture, column) for column in (20, 60, 100)] == pytest.approx([6, 106, 56], abs=1)
    assert middle(picture, 40) == pytest.approx(56, abs=1.5)  # half way


def test_the_band_and_the_spread_lie_where_they_are_said_to():
    values = np.array([0.5, 0.5])
    picture = draw_line_chart(
        Curve(values, values - 0.2, values + 0.3), (0.0, 0.1), step_width=50, height=113, ticks=()
    )
    band = np.flatnonzero((picture == (247, 224, 176)).all(2).all(1))
    assert (band.min(), band.max()) == (96, 105)
    pale = np.flatnonzero(~(picture[:, 40] == 255).all(1))
    assert pale.min() == pytest.approx(106 - 80, abs=1)


def test_a_gap_is_a_gap_and_what_is_beyond_the_ends_stands_at_them():
    picture = draw_line_chart(flat([0.2, np.nan, 7.0]), step_width=40, height=113, ticks=())
    assert middle(picture, 60) is None
    assert middle(picture, 100) == pytest.approx(6, abs=1)
    assert draw_line_chart(flat([np.nan]), (np.nan, np.nan), ticks=()).min() == 255


def test_the_axis_has_its_numbers_beside_their_lines():
    numbers = draw_chart_axis(113, (0.0, 1.0), (0.0, 1.0))
    inked = np.flatnonzero((numbers < 128).any((1, 2)))
    assert inked.min() < 20
    assert inked.max() > 93
    assert not (numbers[40:70] < 128).any()


def test_nothing_is_no_chart():
    for call in (lambda: draw_line_chart(flat([])), lambda: draw_line_chart(flat([1.0]), value_range=(1.0, 1.0))):
        with pytest.raises(InputError, match="expected at least one value"):
            call()
