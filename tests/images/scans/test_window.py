"""Windows: DICOM's three formulas, by their ends and middles, and beside pydicom's."""

import numpy as np
import pytest
from pydicom.pixels import apply_windowing

from camscope.errors import PreprocessError
from camscope.images.scans.scan import WINDOW_KINDS, Window, parse_window
from tests.scan_files import dicom

HU = np.linspace(-1100, 3100, 4201)


@pytest.mark.parametrize(
    ("window", "value", "expected"),
    [
        # PS3.3 C.11.2.1.2.1, the standard's own example: c=2048, w=4096 takes 0..4095 to the whole range
        (Window(2048, 4096), 0, 0),
        (Window(2048, 4096), 4095, 1),
        (Window(0, 100), -50, 0),  # c - 0.5 - (w - 1) / 2 = -50
        (Window(0, 100), 49, 1),  # c - 0.5 + (w - 1) / 2 = 49
        (Window(0, 100), -0.5, 0.5),
        (Window(0, 1), -0.5, 0),
        (Window(0, 1), -0.4, 1),
        (Window(0, 100, "LINEAR_EXACT"), -50, 0),
        (Window(0, 100, "LINEAR_EXACT"), 25, 0.75),
        (Window(0, 0.5, "LINEAR_EXACT"), 0.25, 1),
        (Window(40, 400, "SIGMOID"), 40, 0.5),
        (Window(0, 4, "SIGMOID"), 1, 1 / (1 + np.exp(-1))),
        (Window(0, 1, "SIGMOID"), -1e6, 0),
    ],
)
def test_worked_numbers(window, value, expected):
    assert window(np.array([float(value)]))[0] == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("kind", WINDOW_KINDS)
@pytest.mark.parametrize(("center", "width"), [(40, 400), (-600, 1500), (300.5, 2.5), (0, 1)])
def test_equal_to_pydicoms(kind, center, width):
    header = dicom(np.zeros((1, 1), np.int16), RescaleSlope=1, RescaleIntercept=0)
    header.WindowCenter, header.WindowWidth, header.VOILUTFunction = center, width, kind
    low, high = -(2**15), 2**15 - 1  # the range that pydicom maps to
    ours = low + (high - low) * Window(center, width, kind)(HU)
    with np.errstate(over="ignore"):  # of theirs
        theirs = apply_windowing(HU, header)
    np.testing.assert_allclose(ours / (high - low), theirs / (high - low), rtol=0, atol=1e-6)


def test_float32_stays_and_integers_become_float():
    assert Window(0, 10)(HU.astype(np.float32)).dtype == np.float32
    assert Window(0, 10)(np.arange(3)).dtype.kind == "f"


@pytest.mark.parametrize("given", ["40,400", (40, 400), [40, 400, "linear"], Window(40, 400)])
def test_what_a_window_may_be_given_as(given):
    assert parse_window(given) == Window(40, 400)


@pytest.mark.parametrize(
    "given", ["lung", 40, (1, 2, 3, 4), (40, 0.5), (0, 0, "SIGMOID"), (0, -1, "linear_exact"), (np.nan, 3)]
)
def test_what_is_no_window_is_one_error(given):
    with pytest.raises(PreprocessError, match="window"):
        parse_window(given)
