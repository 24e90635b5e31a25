"""Versions that differ in a window: a model's answer is that of whole tensors, and less is worked out for it."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from camscope import Occlusion
from camscope.explainers.perturbation import window_scorer as strategy
from camscope.hooks.incremental_forward import CostTracker, WindowTensor, cut_windows, to_full_tensor
from tests.nets import CASES


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.Conv2d(4, 4, 1)
        self.norm = nn.BatchNorm2d(4)

    def forward(self, x):
        y = self.norm(self.one(x))
        y += self.two(x)
        return F.relu(torch.cat([y, x * 2 - 1], 1), inplace=True)


class Squeeze(nn.Module):
    """Weighs channels by their means, which every window reaches."""

    def forward(self, x):
        return x * x.mean((2, 3), keepdim=True).sigmoid()


class Aliased(nn.Module):
    """Changes what it is given by other names of it."""

    def forward(self, x):
        x.detach().relu_()
        x[:, 1:3].mul_(2)
        return x.relu_()


class Added(nn.Module):
    """In place, to something of another shape than the versions have."""

    def forward(self, x):
        x += torch.ones_like(x[:1])
        return x


STEM = nn.Conv2d(3, 4, 5, stride=2, padding=2)
NETS = {
    "strides and borders": (2, lambda: nn.Sequential(STEM, nn.ReLU(), nn.Conv2d(4, 6, 3, stride=2, padding=1))),
    "dilation and groups": (2, lambda: nn.Sequential(STEM, nn.Conv2d(4, 4, 3, padding=2, dilation=2, groups=2))),
    "strides longer than kernels": (2, lambda: nn.Conv2d(3, 4, 1, stride=3)),
    "the largest": (2, lambda: nn.Sequential(STEM, nn.MaxPool2d(3, 2, 1), nn.MaxPool2d((2, 1)))),
    "means": (2, lambda: nn.Sequential(STEM, nn.AvgPool2d(3, 2, 1), nn.AvgPool2d(2, ceil_mode=True))),
    "means that leave the border out": (2, lambda: nn.AvgPool2d(3, 2, 1, count_include_pad=False)),
    "a residual block": (2, lambda: nn.Sequential(STEM, Residual(), nn.Conv2d(8, 2, 3))),
    "activations": (2, lambda: nn.Sequential(STEM, nn.GELU(), nn.Hardswish(inplace=True), nn.ReLU6(True), nn.ELU())),
    "channels weighed": (2, lambda: nn.Sequential(STEM, Squeeze(), nn.Conv2d(4, 2, 3))),
    "changed by other names": (2, lambda: nn.Sequential(STEM, Aliased(), nn.Conv2d(4, 2, 3))),
    "added in place": (2, lambda: nn.Sequential(STEM, Added(), nn.Conv2d(4, 2, 3))),
    "norms that train": (2, lambda: nn.Sequential(STEM, nn.BatchNorm2d(4).train())),
    "other borders": (2, lambda: nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect")),
    "transposed": (2, lambda: nn.Sequential(STEM, nn.ConvTranspose2d(4, 2, 2, stride=2))),
    "to the end": (2, lambda: nn.Sequential(STEM, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))),
    "signals": (1, lambda: nn.Sequential(nn.Conv1d(3, 4, 5, 2, 2), nn.MaxPool1d(2), nn.BatchNorm1d(4), nn.ReLU())),
    "volumes": (3, lambda: nn.Sequential(nn.Conv3d(3, 4, 3, 1, 1), nn.MaxPool3d(2), nn.AvgPool3d(2), nn.ReLU())),
}


@pytest.mark.parametrize("name", NETS)
def test_the_answer_is_that_of_whole_tensors(name):
    axes, build = NETS[name]
    torch.manual_seed(0)
    model = build().double().eval()
    model[1].train() if name == "norms that train" else None
    size = [29, 26, 12][:axes]
    x, fill, window = drawn(3, *size), drawn(3, *size, seed=1), [6, 5, 4][:axes]
    last = [length - own for length, own in zip(size, window, strict=True)]
    corners = torch.tensor([[0] * axes, last, [1] * axes, [one // 2 for one in last]])
    full = x.repeat(4, *[1] * (axes + 1))
    for row, corner in zip(full, corners.tolist(), strict=True):
        place = (slice(None), *(slice(one, one + own) for one, own in zip(corner, window, strict=True)))
        row[place] = fill[place]
    versions = WindowTensor(x[None], cut_windows(fill, corners, window), corners)
    assert torch.equal(to_full_tensor(versions), full)
    with torch.no_grad():
        expected, found = model(full), model(versions)
    assert found.shape == expected.shape
    torch.testing.assert_close(to_full_tensor(found), expected, rtol=1e-12, atol=1e-13)


def test_what_is_spared_is_counted():
    x, corners = drawn(1, 3, 20, 20), torch.tensor([[0, 0], [8, 8]])
    versions = WindowTensor(x, torch.zeros(2, 3, 4, 4, dtype=x.dtype), corners, account := CostTracker())
    with torch.no_grad():
        found = nn.Conv2d(3, 5, 3, padding=1, dtype=torch.float64)(versions)
    assert found.window.shape == (2, 5, 6, 6)
    assert (account.saved_multiplications, account.clean_multiplications) == (
        2 * (20 * 20 - 6 * 6) * 5 * 3 * 9,
        20 * 20 * 5 * 3 * 9,
    )
    assert account.max_row_bytes == 5 * 6 * 6 * 8


# --- in occlusion


def both_ways(model, x, monkeypatch, **settings):
    """The explanation with whole passes, and the one that may spare."""
    monkeypatch.setattr(strategy, "MIN_MULTIPLICATIONS", 0)
    made = Occlusion(model, **settings).explain(x, 1)
    monkeypatch.setattr(strategy, "MIN_SAVED_SHARE", 2)
    plain = Occlusion(model, **settings).explain(x, 1)
    assert not any("of the multiplications" in note for note in plain.notes)
    monkeypatch.undo()
    return plain, made


class Big(nn.Module):
    def __init__(self, middle=None):
        super().__init__()
        self.stem, self.middle = nn.Conv2d(3, 4, 3, padding=1), middle or nn.ReLU()
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.middle(self.stem(x)).amax((2, 3)))


def test_occlusion_spares_what_no_window_reaches_and_says_so(monkeypatch):
    model, x = Big().double().eval(), drawn(3, 24, 24)
    plain, made = both_ways(model, x, monkeypatch, window=6, stride=3, baseline=["zero", "blur"])
    assert made.notes == (
        "49 windows of 6 x 6 pixels",
        "81% of the multiplications are of what no window reaches, and were left out",
    )
    torch.testing.assert_close(
        torch.from_numpy(made.attribution), torch.from_numpy(plain.attribution), rtol=1e-10, atol=1e-13
    )
    assert plain.attribution.any()


class Places(nn.Module):
    """Asks which cells were the largest."""

    def forward(self, x):
        return F.max_pool2d(x, 2, return_indices=True)[1].double() / 100


def test_where_which_cell_was_the_largest_is_asked_all_passes_are_whole(monkeypatch):
    model, x = Big(Places()).double().eval(), drawn(3, 24, 24)
    plain, made = both_ways(model, x, monkeypatch, window=6)
    assert made.notes == plain.notes
    assert made.attribution.tobytes() == plain.attribution.tobytes()


def test_a_hook_of_the_user_sees_whole_tensors_only(monkeypatch):
    model, x = Big().double().eval(), drawn(3, 24, 24)
    seen = []
    handle = model.stem.register_forward_hook(lambda module, args, output: seen.append(type(output)))
    _, made = both_ways(model, x, monkeypatch, window=6)
    handle.remove()
    assert set(seen) == {torch.Tensor}
    assert len(made.notes) == 1


def test_a_small_model_has_whole_passes():
    model, x = CASES["pooled"].make(dtype=torch.float64)
    assert len(Occlusion(model, window=2).explain(x[0], 1).notes) == 1
