"""Plausible slips in the methods whose maps are of pixels; see `mutants`."""

import torch
from torch import nn

from camscope import Occlusion
from camscope.explainers import RISE, IntegratedGradients, SegmentAblation, SmoothGrad
from camscope.explainers.core import baselines
from camscope.explainers.gradient.smoothgrad import NoisyGradientExplainer
from camscope.explainers.path import straight_line_integral
from camscope.explainers.perturbation import occlusion
from camscope.explainers.perturbation.rise import SampledExplainer
from camscope.hooks import incremental_forward
from tests.mutants import Mutant


class Squares(nn.Module):
    """Class 1 is the sum of squares; class 0 nothing."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = x.square().flatten(1).sum(1)
        return torch.stack([torch.zeros_like(total), total], 1)


class Sums(nn.Module):
    """Class 1 is the sum; class 0 nothing."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = x.flatten(1).sum(1)
        return torch.stack([torch.zeros_like(total), total], 1)


X = torch.arange(1.0, 17.0, dtype=torch.float64).view(1, 1, 4, 4) / 16


def one_step_is_exact_on_squares() -> None:
    found = IntegratedGradients(Squares(), n_steps=1).attribute(X, 1)
    torch.testing.assert_close(found, X.square()[:, 0])


def two_noises_are_not_one() -> None:
    one, other = baselines.build_baseline_tensors(["noise", "noise"], X, IntegratedGradients(Squares()))
    assert not torch.equal(one, other)


def a_constant_score_is_no_evidence() -> None:
    class Constant(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tensor([[0.0, 1.0]], dtype=x.dtype).expand(len(x), 2) + 0 * x.sum()

    assert not RISE(Constant(), n_samples=20, grid_size=2).attribute(X, 1).any()


def a_linear_nets_cells_are_its_terms() -> None:
    torch.testing.assert_close(Occlusion(Sums(), window=1, stride=1).attribute(X, 1), X[:, 0])
    four = X[0, 0].unfold(0, 2, 1).unfold(1, 2, 1).sum((2, 3))[:2, :2]  # the windows that cover the second of each axis
    torch.testing.assert_close(Occlusion(Sums(), window=2, stride=1).attribute(X, 1)[0, 1, 1], four.mean())


def a_window_is_followed_as_far_as_it_reaches() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.Conv2d(2, 2, 3, stride=2, padding=1)).double()
    x, corners = torch.rand(1, 1, 12, 12, dtype=torch.float64), torch.tensor([[5, 4], [0, 10]])
    versions = incremental_forward.WindowTensor(x, torch.zeros(2, 1, 2, 2, dtype=torch.float64), corners)
    full = versions.extract_windows(torch.zeros_like(corners), [12, 12])
    with torch.no_grad():
        torch.testing.assert_close(incremental_forward.to_full_tensor(model(versions)), model(full))


def noise_is_a_share_of_the_span() -> None:
    one, other = (SmoothGrad(Squares(), n_samples=4, channel_reduction="sum").attribute(x, 1) for x in (X, X + 1))
    torch.testing.assert_close(other - one, torch.full_like(one, 2.0))


def each_segment_has_what_it_alone_loses() -> None:
    labels = torch.tensor([[3, 3, 7, 7]] * 4)
    found = SegmentAblation(Sums(), segments=labels).attribute(X, 1)[0]
    assert found[:, 0].tolist() == [float(X[..., :2].sum())] * 4
    assert found[:, 2].tolist() == [float(X[..., 2:].sum())] * 4


OF_PIXELS = [
    Mutant(
        "ends, not middles",
        straight_line_integral,
        "compute_step_midpoints",
        "places) + 0.5)",
        "places) + 1.0)",
        one_step_is_exact_on_squares,
    ),
    Mutant(
        "one seed for all",
        baselines,
        "build_baseline_tensors",
        "explainer.seed ^ i",
        "explainer.seed",
        two_noises_are_not_one,
    ),
    Mutant(
        "the level stays",
        SampledExplainer,
        "compute_sample_attribution",
        "values[added] - level",
        "values[added]",
        a_constant_score_is_no_evidence,
    ),
    Mutant(
        "gain for loss",
        Occlusion,
        "compute_sample_attribution",
        "masked_input.clean_score - scores.mean(0)",
        "scores.mean(0) - masked_input.clean_score",
        a_linear_nets_cells_are_its_terms,
    ),
    Mutant(
        "windows counted, not shared",
        occlusion,
        "average_over_windows",
        "cover.to(values.dtype) / cover.sum(0)",
        "cover.to(values.dtype)",
        a_linear_nets_cells_are_its_terms,
    ),
    Mutant(
        "reach forgotten",
        incremental_forward,
        "_run_windowed",
        "dilation[i] * (kernel[i] - 1) for",
        "dilation[i] * (kernel[i] - 2) for",
        a_window_is_followed_as_far_as_it_reaches,
    ),
    Mutant(
        "padding forgotten",
        incremental_forward,
        "_run_windowed",
        "extent_tensor - x.window_start - pads",
        "extent_tensor - x.window_start",
        a_window_is_followed_as_far_as_it_reaches,
    ),
    Mutant(
        "noise of a level",
        NoisyGradientExplainer,
        "_compute_mean_and_variance",
        "(x.amax() - x.amin())",
        "x.amax()",
        noise_is_a_share_of_the_span,
    ),
    Mutant(
        "segments hidden by turns",
        SegmentAblation,
        "compute_sample_attribution",
        "labels != every[part]",
        "labels == every[part]",
        each_segment_has_what_it_alone_loses,
    ),
]
