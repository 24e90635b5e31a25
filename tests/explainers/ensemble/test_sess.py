"""SESS against a plain loop over crops, and the windows by hand."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from camscope import SESS, GradCAM
from camscope.errors import InputError, TargetError
from camscope.explainers.ensemble.sess import list_window_corners
from camscope.targets import Region

pytestmark = pytest.mark.filterwarnings("ignore::camscope.errors.CamscopeWarning")


@pytest.fixture
def model():
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 5, 3, padding=1), nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(5, 3)]
    return nn.Sequential(*layers).double().eval()


def test_windows_by_hand():
    assert list_window_corners((8,), (3,), (4,)) == [(0,), (3,), (4,)]
    assert list_window_corners((8,), (4,), (4,)) == [(0,), (4,)]
    assert list_window_corners((3,), (2,), (4,)) == [(0,)]
    assert list_window_corners((6, 5), (6, 2), (6, 3)) == [(0, 0), (0, 2)]


def test_the_map_is_the_mean_of_the_weighted_maps_of_windows(model):
    x = torch.randn(1, 3, 8, 8, dtype=torch.float64)
    parts, weights = [], []
    for length in (8, 12):
        enlarged = F.interpolate(x, (length, length), mode="bilinear", align_corners=False)
        for top in range(0, length - 7, 4):
            for left in range(0, length - 7, 4):
                window = enlarged[..., top : top + 8, left : left + 8]
                heat = GradCAM(model, "0").attribute(window, 1)
                canvas = torch.zeros(1, 1, length, length, dtype=torch.float64)
                canvas[..., top : top + 8, left : left + 8] = heat / heat.max() if heat.max() > 0 else 0
                weights.append(model(window).softmax(1)[0, 1].item())
                placed = F.interpolate(canvas, (8, 8), mode="bilinear", align_corners=False)
                parts.append(weights[-1] * placed[0, 0].detach().numpy())
    assert len(parts) == 1 + 4
    counted = np.maximum((np.array(parts) > 0).sum(0), 1)
    expected = np.sum(parts, 0) / counted / max(weights)
    found = SESS(GradCAM(model, "0"), n_scales=2, scale_step=0.5).attribute(x, 1)[0]
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-9, atol=1e-12)
    assert 0 < found.max() <= 1


def test_one_scale_is_the_map_itself_from_0_to_1(model):
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    inner = GradCAM(model, "0").attribute(x, [1, 2])
    assert (inner.flatten(1).amax(1) > 0).all()
    expected = inner / inner.flatten(1).amax(1).view(-1, 1, 1)
    torch.testing.assert_close(SESS(GradCAM(model, "0"), n_scales=1).attribute(x, [1, 2]), expected)


def test_a_small_object_is_found_at_a_larger_scale():
    """Two stripes of width 1 that the layer, with cells of 4 x 4, joins into one at the scale of the input."""
    model = nn.Sequential(nn.Conv2d(1, 2, 4, 4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2, 2)).eval()
    nn.init.constant_(model[0].weight, 1 / 16)
    nn.init.constant_(model[3].weight[0], -1)
    nn.init.constant_(model[3].weight[1], 1)
    x = torch.zeros(1, 1, 16, 16)
    x[..., 5] = x[..., 7] = 8.0
    once, several = (SESS(GradCAM(model, "0"), n_scales, 1.0).attribute(x, 1)[0] for n_scales in (1, 4))
    assert once[:, 2].min() / once[:, 5].max() > several[:, 2].min() / several[:, 5].max()


def test_what_has_no_class_and_no_scale_is_refused(model):
    x = torch.randn(1, 3, 8, 8, dtype=torch.float64)
    dense = nn.Sequential(model[0], model[1]).eval()
    with pytest.raises(TargetError, match="moves windows over the input"):
        SESS(GradCAM(dense, "0")).attribute(x, Region(mask=np.eye(8, dtype=bool), label=1))
    with pytest.raises(InputError, match="n_scales=0"):
        SESS(GradCAM(model, "0"), n_scales=0)
    with pytest.raises(InputError, match="scale_step"):
        SESS(GradCAM(model, "0"), scale_step=-1.0)
