"""Rows without a gradient are left out of the backward pass, and nobody can tell but by the clock."""

import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from camscope.hooks import Tap
from camscope.hooks.gradients import zero_gradient_rows_skipped
from tests.untouched import untouched


class ClassToken(nn.Module):
    """Tokens (N,T,8), mixed once, then a block of linear layers; only the first token is read, or all of them."""

    def __init__(self, reads_all=False):
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(8), nn.Linear(17, 17)
        self.up, self.down, self.head = nn.Linear(8, 32), nn.Linear(32, 8), nn.Linear(8, 5)
        self.reads_all = reads_all

    def forward(self, x):
        x = self.norm(x)
        x = x + self.mix(x.transpose(1, 2)).transpose(1, 2)
        x = x + self.down(F.relu_(self.up(x)))
        return self.head(x.mean(1) if self.reads_all else x[:, 0])


def setting(reads_all=False):
    torch.manual_seed(3)
    return ClassToken(reads_all).double().eval(), torch.randn(4, 17, 8, dtype=torch.float64)


def tapped(model, x):
    with Tap(model, "norm") as tap:
        return tap.compute_gradient(tap.run(lambda: model(x))[:, 2].sum())


@pytest.mark.parametrize("reads_all", [False, True])
def test_the_gradient_is_the_same(reads_all):
    model, x = setting(reads_all)
    expected = tapped(model, x)
    with untouched(model, x), zero_gradient_rows_skipped(model):
        assert torch.allclose(tapped(model, x), expected, rtol=1e-13, atol=1e-16)
    assert expected.abs().amin() > 0


def test_the_products_with_zeros_are_not_made():
    model, x = setting()

    def multiplications():
        with Tap(model, "norm") as tap:
            score = tap.run(lambda: model(x))[:, 2].sum()
            with FlopCounterMode(display=False) as counter:
                tap.backward(score)
        return counter.get_total_flops()

    plain = multiplications()
    with zero_gradient_rows_skipped(model):
        skipping = multiplications()
    left_out = 2 * 2 * 4 * 16 * (8 * 32)  # two products of two flops, for 16 of 17 tokens of 4 samples, in up and down
    assert plain - skipping == left_out


def test_a_layer_with_a_hook_or_a_forward_of_its_own_is_left_alone():
    model, x = setting()
    model.up.register_forward_hook(lambda module, args, output: 3 * output)
    plain_forward = model.down.forward
    model.down.forward = lambda rows: plain_forward(rows).square()
    expected = tapped(model, x)
    with zero_gradient_rows_skipped(model):
        assert torch.equal(tapped(model, x), expected)


def test_half_precision_and_autocast():
    model, x = setting()
    model, x = model.float(), x.float()
    with torch.autocast("cpu", torch.bfloat16):
        expected = tapped(model, x)
        with zero_gradient_rows_skipped(model):
            found = tapped(model, x)
    assert found.dtype == expected.dtype
    assert torch.allclose(found.float(), expected.float(), rtol=0.02, atol=1e-3)


def test_not_a_number_is_not_a_zero():
    model, x = setting()
    gradient = torch.zeros(4, 17, 32, dtype=torch.float64)
    gradient[1, 5, 0] = torch.nan
    with zero_gradient_rows_skipped(model):
        (back,) = torch.autograd.grad(model.up(x.requires_grad_()), x, gradient)
    assert back[1, 5].isnan().all()
    assert int(back.isnan().sum()) == 8


def test_another_thread_has_the_plain_layers():
    model, x = setting()
    seen = []

    def elsewhere():
        y = x.clone().requires_grad_()
        seen.append(type(model.up(y).grad_fn).__name__)

    with zero_gradient_rows_skipped(model):
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        here = type(model.up(x.clone().requires_grad_()).grad_fn).__name__
    assert here == "_NonzeroRowsLinearBackward"
    assert seen != [here]
