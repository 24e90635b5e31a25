"""Numbers that nobody can mean: one error that names the setting, before anything is computed or memory is taken."""

import inspect
from fractions import Fraction
from typing import get_type_hints

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from camscope import render
from camscope.cli import app
from camscope.errors import CamscopeError, InputError
from camscope.explainers import METHODS
from camscope.explainers.core.setting_checks import (
    MAX_COUNT_SETTING,
    check_number,
    check_positive_integer,
    check_positive_number,
)

HUGE = (10**9, 10**30, 10**5000)
WRONG = (-1, 0, 1.5, float("nan"), float("inf"), True, "8")
COUNTS = [
    (name, setting)
    for name, method in METHODS.items()
    for setting in inspect.signature(method).parameters
    if get_type_hints(method.__init__)[setting] in (int, int | None) and setting not in ("seed", "call_index", "margin")
]


@pytest.mark.parametrize(("name", "setting"), COUNTS)
def test_a_count_is_one_that_a_run_can_end_with(name, setting):
    model = nn.Sequential(nn.Conv2d(3, 2, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2, 2))
    for value in (*HUGE, *WRONG):
        with pytest.raises(InputError, match=rf"^{setting}=.*expected") as error:
            METHODS[name](model, **{setting: value})
        assert len(str(error.value)) < 300


def test_numbers_have_bounds_and_errors_stay_short():
    assert len(COUNTS) > 60
    check_positive_integer(batch_size=MAX_COUNT_SETTING)
    with pytest.raises(InputError, match=r"^samples=1000001: expected 1,000,000 at most$"):
        check_positive_integer(samples=MAX_COUNT_SETTING + 1)
    with pytest.raises(
        InputError, match=r"^samples=a number of thousands of digits: expected 1,000,000 at most or None$"
    ):
        check_positive_integer(None, samples=10**5000)
    check_number(fraction=Fraction(1, 2), high=1)
    with pytest.raises(InputError, match=r"^fraction=1e\+300: expected 1 at most"):
        check_number(fraction=1e300, low=0, high=1)
    with pytest.raises(InputError, match=r"^width=1e\+300: expected 10 at most"):
        check_positive_number(width=1e300, high=10)


def test_the_masks_of_rise_have_a_limit():
    model = nn.Sequential(nn.Conv2d(3, 2, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2, 2)).eval()
    with pytest.raises(InputError, match=r"^grid_size=500, n_samples=1000000: the masks need 4,\d{3},\d{3},\d{3}"):
        METHODS["rise"](model, grid_size=500, n_samples=MAX_COUNT_SETTING).attribute(torch.rand(1, 3, 32, 32), target=1)


PICTURE = np.zeros((8, 600, 3), np.uint8)


@pytest.mark.parametrize("height", [10**9, 10**40, 0, -1, float("nan"), float("inf"), "8"])
def test_a_picture_has_a_number_of_rows_that_it_can_have(height, tmp_path):
    cube = render.Volume(np.zeros((4, 4, 4)), np.zeros((4, 4, 4)))
    for draw in (
        lambda: render.resize_to_fit(PICTURE, height),
        lambda: render.draw_image_grid([PICTURE], ["a"], height=height),
        lambda: render.draw_planes(cube, height=height),
        lambda: render.draw_planes(cube, size=height),
        lambda: render.draw_slices(cube, size=height),
    ):
        with pytest.raises(InputError, match=r"(height|size)=.*expected 1 to 32,768 rows"):
            draw()
    with pytest.raises(InputError, match=r"height=32000: the image would have 32,000 x 2,400,000 pixels"):
        render.resize_to_fit(PICTURE, 32_000)


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    from PIL import Image

    folder = tmp_path_factory.mktemp("images")
    for n in range(2):
        Image.fromarray(np.full((32, 32, 3), 40 * n, np.uint8)).save(folder / f"{n}.png")
    return folder


@pytest.mark.parametrize("number", ["1000000000", "9" * 40])
@pytest.mark.parametrize("option", ["--height", "--batch-size", "--threads", "--chunk"])
def test_a_batch_is_refused_before_anything_is_written(option, number, images, tmp_path):
    pytest.importorskip("pyarrow")
    result = CliRunner().invoke(
        app, ["batch", str(images), "-o", str(tmp_path / "run"), "--overlays", "png", option, number]
    )
    assert result.exit_code == 2
    assert result.stderr.count("error: ") == 1
    assert "expected" in result.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("number", ["1000000000", "9" * 40, "9" * 5000, "100000x100000"])
def test_the_size_of_an_example_has_a_limit(number):
    result = CliRunner().invoke(app, ["layers", "phantom", "--size", number])
    assert (result.exit_code, result.stderr.count("expected 67,108,864 numbers at most")) == (2, 1)


def test_threads_are_as_many_as_a_process_can_have(images, tmp_path):
    pytest.importorskip("pyarrow")
    from camscope.batch import BatchRun, Query, inspect_images, run_batch
    from camscope.batch.html_contact_sheet import build_contact_sheet
    from camscope.evaluation import evaluate
    from camscope.explainers import GradCAM
    from camscope.models import load_model

    for threads in (0, -1, 10**9, 1.5):
        with pytest.raises(InputError, match="num_threads="):
            inspect_images(images, num_threads=threads)
        with pytest.raises(InputError, match="num_threads="):
            run_batch(GradCAM(load_model("phantom")), images, tmp_path / "no", num_threads=threads)
    run_batch(GradCAM(load_model("phantom")), images, tmp_path / "run")
    with pytest.raises(InputError, match="num_threads="):
        evaluate(tmp_path / "run", tmp_path / "values", num_threads=10**9)
    with pytest.raises(InputError, match="max_rows="):
        Query(max_rows=10**40)
    with pytest.raises(CamscopeError, match=r"image_height=1000000000; expected 32 to 2,048 pixels"):
        build_contact_sheet(BatchRun(tmp_path / "run"), Query(), image_height=10**9)
