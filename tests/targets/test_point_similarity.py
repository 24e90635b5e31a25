"""Point: the mean similarity of all other patches, as plain PyTorch computes it, and its gradient."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from camscope import Augmented, HiResCAM, Occlusion
from camscope.errors import TargetError
from camscope.targets import Point
from camscope.targets.patch_features_in_outputs import find_patch_features
from tests.encoders import BY_NAME

pytestmark = pytest.mark.filterwarnings("ignore::camscope.errors.CamscopeWarning")


def score_of(tokens, cell):
    """(N,) the mean cosine of all other patches to the patch of a cell."""
    query = tokens[:, cell : cell + 1].detach()
    cosines = F.cosine_similarity(tokens, query, dim=2)
    others = [i for i in range(tokens.shape[1]) if i != cell]
    return cosines[:, others].mean(1)


@pytest.mark.parametrize("name", ["DINOv2", "DINOv2, registers", "DINOv3", "SigLIP", "CONCH"])
def test_score_and_gradient_are_those_of_plain_autograd(name):
    encoder = BY_NAME[name]
    model, x = encoder.model(), encoder.image()
    explanation = HiResCAM(model).explain(x, Point((50, 20)))  # row 1, column 3
    outputs = []
    part = model.get_submodule(explanation.layer)
    handle = part.register_forward_hook(lambda *call: outputs.append(call[2]))
    output = model(x[None].clone().requires_grad_())
    handle.remove()
    tokens = output if isinstance(output, torch.Tensor) else output.last_hidden_state
    score = score_of(tokens[:, encoder.prefix :], 7)
    assert explanation.score == pytest.approx(score.item(), abs=1e-5)
    at_layer = outputs[-1] if isinstance(outputs[-1], torch.Tensor) else outputs[-1][0]
    (gradient,) = torch.autograd.grad(score.sum(), at_layer)
    expected = (gradient * at_layer).sum(2)[0, encoder.prefix :].detach().reshape(4, 4)
    torch.testing.assert_close(
        torch.as_tensor(explanation.attribution), expected, rtol=1e-3, atol=1e-5 * float(expected.abs().max()) + 1e-8
    )


class Colors(nn.Module):
    """The mean color of each 8 x 8 patch."""

    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, 3, 8, 8, groups=3)
        nn.init.constant_(self.patches.weight, 1 / 64)
        nn.init.zeros_(self.patches.bias)

    def forward(self, x):
        return self.patches(x)


def test_occlusion_finds_where_else_the_color_is():
    x = torch.zeros(3, 32, 32)
    x[1] = 1  # green
    x[:2, 8:16, 8:16] = torch.tensor([1.0, 0.0])[:, None, None]
    x[:2, 24:, 24:] = torch.tensor([1.0, 0.0])[:, None, None]  # the other red patch
    heat = Occlusion(Colors(), window=8, stride=8, baseline="zero").explain(x, Point((12, 12))).attribution
    peak = np.unravel_index(np.asarray(heat).argmax(), heat.shape)
    assert (peak[0] * 4 // heat.shape[0], peak[1] * 4 // heat.shape[1]) == (3, 3)


def test_flips_keep_the_patch():
    x = torch.rand(3, 32, 32, generator=torch.Generator().manual_seed(0))
    model = Colors()
    target = Point((4, 20))
    flipped = Augmented(HiResCAM(model, "patches")).explain(x, target)
    assert flipped.score == pytest.approx(score_of(model(x[None]).flatten(2).mT, 4 * 2).item(), abs=1e-5)


@pytest.mark.parametrize(
    ("output", "stride", "n_prefix", "expected"),
    [
        (torch.rand(1, 5 + 6, 8), (16, 16), None, (5, (2, 3))),
        (torch.rand(1, 1 + 6 + 4, 8), (16, 16), 1, (1, (2, 3))),
        (torch.rand(1, 2 + 24, 8), None, 2, (2, (4, 6))),
    ],
)
def test_tokens_off_the_grid_are_left_out(output, stride, n_prefix, expected):
    first, grid = expected
    maps = find_patch_features({"last_hidden_state": output}, (32, 48), stride, n_prefix)
    tokens = output[:, first : first + grid[0] * grid[1]]
    torch.testing.assert_close(maps.flatten(2).mT, tokens)
    assert maps.shape[2:] == grid


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Point((1, "a")), "expected finite numbers"),
        (lambda: Point((1, 2), -1), "n_prefix_tokens=-1"),
        (
            lambda: find_patch_features(torch.rand(1, 8), (32, 32), (8, 8)),
            "needs an output with the features of patches",
        ),
        (lambda: find_patch_features(torch.rand(1, 5, 8), (32, 32), (8, 8)), "some are masked or merged"),
        (lambda: find_patch_features(torch.rand(1, 17, 8), (32, 32), None), "the grid of 17 tokens is unknown"),
        (lambda: HiResCAM(Colors()).explain(torch.rand(3, 32, 32), Point((40, 2))), "outside of the model's input"),
        (lambda: HiResCAM(Colors()).explain(torch.rand(3, 32, 32), Point((4, 2, 1))), "3 numbers; expected 2"),
        (lambda: HiResCAM(Colors()).explain(torch.zeros(3, 32, 32), Point((4, 2))), "the features there are zero"),
    ],
)
def test_a_wrong_point_or_output_is_one_error(call, message):
    with pytest.raises(TargetError, match=message):
        call()
