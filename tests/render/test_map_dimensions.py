"""Pictures of maps with one axis and with three: by meaning."""

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from camscope import HiResCAM
from camscope.errors import InputError
from camscope.render import choose_frames, colorize, draw_frames, draw_signal_trace
from tests.nets import CASES
from tests.pictures import notebook_picture

pytestmark = pytest.mark.usefixtures("one_thread")


def test_the_background_of_a_trace_is_the_map():
    signals = np.zeros((2, 50), np.uint8)
    values = np.zeros(50)
    values[29:32] = 1.0
    picture = draw_signal_trace(signals, values, alpha=1.0, width=500, lane_height=40)
    assert picture.shape == (80, 500, 3)
    hottest = colorize(np.ones((1, 1)), "inferno")[0, 0]
    assert (picture[20, 305] == hottest).all()
    assert (picture[20, :200] == 255).all(), "zero leaves the paper"
    assert (draw_signal_trace(signals, values, alpha=0.0, width=500, lane_height=40)[:20] == 255).all()


def test_the_line_of_a_trace_follows_its_signal():
    rising = np.linspace(0, 255, 100).astype(np.uint8)
    picture = draw_signal_trace(np.stack([rising, rising[::-1]]), np.zeros(100), width=200, lane_height=100)
    for lane, left, right in ((picture[:100], 80, 20), (picture[100:], 20, 80)):
        dark = (lane < 60).all(2)
        assert np.nonzero(dark[:, 10])[0].mean() == pytest.approx(left, abs=15)
        assert np.nonzero(dark[:, -10])[0].mean() == pytest.approx(right, abs=15)
    with pytest.raises(InputError, match=r"expected \(C,L\) and \(L,\)"):
        draw_signal_trace(np.zeros((2, 5), np.uint8), np.zeros(6))


def test_the_hottest_frame_is_always_shown():
    values = np.zeros((40, 2, 2))
    values[17, 1, 0] = 3.0
    chosen = choose_frames(values)
    assert 17 in chosen
    assert len(chosen) == 12
    assert chosen == sorted(chosen)
    assert choose_frames(values[:5]) == [0, 1, 2, 3, 4]


def test_frames_have_one_scale():
    values = np.zeros((2, 8, 8))
    values[0], values[1] = 1.0, 0.25
    dark = np.zeros((2, 32, 32, 3), np.uint8)
    picture = draw_frames(dark, values.repeat(4, 1).repeat(4, 2), columns=2, height=32)
    middle = picture.shape[1] // 4
    assert picture[16, middle].sum() > 2 * picture[16, 3 * middle].sum() > 0
    with pytest.raises(InputError, match=r"expected \(D,H,W,3\)"):
        draw_frames(dark, values)


@pytest.mark.parametrize("name", ["signal", "volume"])
def test_an_explanation_of_any_rank_is_a_picture(name, tmp_path):
    case = CASES[name]
    model, x = case.make(1)
    found = HiResCAM(model, case.layer).explain(x[0], 1)
    assert np.asarray(Image.open(found.save(tmp_path / "why.png"))).std() > 0
    assert notebook_picture(found).std() > 0
    assert (found.overlay(alpha=0.0) != found.overlay(alpha=1.0)).any()
    with pytest.raises(InputError, match="outlines and boxes need 2 axes"):
        found.overlay(contour=0.5)
    back = type(found).load(found.save(tmp_path / "why.npz"))
    assert (back.overlay() == found.overlay()).all()


@pytest.mark.filterwarnings("ignore::camscope.errors.CamscopeWarning")
def test_a_video_is_one_strip_and_a_volume_a_sheet():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv3d(3, 4, 1), nn.ReLU(), nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(4, 2)).eval()
    film = HiResCAM(model, "1").explain(torch.rand(3, 16, 24, 24), 1).overlay()
    gray = HiResCAM(model, "1").explain(torch.rand(1, 16, 24, 24).expand(3, -1, -1, -1), 1).overlay()
    assert film.shape[1] > 5 * film.shape[0]
    assert gray.shape[1] < 2 * gray.shape[0]
