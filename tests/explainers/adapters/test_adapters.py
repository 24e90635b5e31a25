"""DeepLIFT, LIME, KernelSHAP and LRP: what captum and zennit say of the same net, nets with known answers, refusals."""

import copy
import importlib.util
import itertools
import math
import re
import sys
import threading
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from torch import nn

import camscope as CAMSCOPE
from camscope import LIME, LRP, METHODS, DeepLIFT, DeepLIFTSHAP, GradCAM, KernelSHAP, SegmentAblation
from camscope.errors import InputError, MissingExtraError, ModelError
from tests.nets import CASES, Flat, Pooled, Residual, conv
from tests.untouched import untouched

pytestmark = [
    pytest.mark.filterwarnings("ignore::camscope.errors.CamscopeWarning"),
    pytest.mark.filterwarnings(
        "ignore:Setting forward, backward hooks:UserWarning"
    ),  # captum's own, when asked directly
    pytest.mark.filterwarnings("ignore:Input Tensor 0 did not already require gradients:UserWarning"),
]

HERE = {package: importlib.util.find_spec(package) is not None for package in ("captum", "zennit", "sklearn")}
CAPTUM = pytest.mark.skipif(not HERE["captum"], reason="the extra captum is not installed")
ZENNIT = pytest.mark.skipif(not HERE["zennit"], reason="the extra lrp is not installed")
SKLEARN = pytest.mark.skipif(not HERE["sklearn"], reason="captum's own fits take scikit-learn")


def made(build, *shape, seed=3):
    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    model, x = build().double().eval(), torch.randn(2, *shape, dtype=torch.float64)
    torch.random.set_rng_state(state)
    return model, x


def assert_close(found, expected, **keywords):
    torch.testing.assert_close(found, expected, **{"rtol": 1e-10, "atol": 1e-14, **keywords})


# --- DeepLIFT


@CAPTUM
@pytest.mark.parametrize("case", ["pooled", "flat", "signal", "volume"])
def test_deeplift_is_captums_where_every_relu_is_a_module_of_its_own(case):
    from captum.attr import DeepLift

    model, x = CASES[case].make(dtype=torch.float64)
    direct = DeepLift(model).attribute(x, torch.full_like(x, 0.25), target=1).sum(1).detach()
    assert_close(DeepLIFT(model, baseline=torch.full_like(x[0], 0.25)).attribute(x, 1), direct)


@CAPTUM
def test_deepliftshap_is_captums():
    from captum.attr import DeepLiftShap

    model, x = CASES["pooled"].make(dtype=torch.float64)
    background = torch.randn(3, *x.shape[1:], dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    direct = DeepLiftShap(model).attribute(x, background, target=2).sum(1).detach()
    assert_close(DeepLIFTSHAP(model, background=background).attribute(x, 2), direct)


class TwoReLUs(Residual):
    """The same net, with a ReLU for each place."""

    def __init__(self):
        super().__init__()
        self.second = nn.ReLU()

    def forward(self, x):
        x = self.relu(self.norm(self.stem(x)))
        return self.head(self.dropout(self.second(self.block(x) + x)).mean((2, 3)))


@CAPTUM
def test_a_relu_that_runs_twice_is_two_relus():
    from captum.attr import DeepLift

    model, x = CASES["residual"].make(dtype=torch.float64)
    apart = TwoReLUs().double().eval()
    apart.load_state_dict(model.state_dict())
    expected = DeepLift(apart).attribute(x, torch.zeros_like(x), target=1).sum(1).detach()
    assert_close(DeepLIFT(model).attribute(x, 1), expected)
    assert type(model.relu) is nn.ReLU
    with pytest.raises(RuntimeError, match="used more than once"):
        DeepLift(model).attribute(x, torch.zeros_like(x), target=1)


class BesideAReLU(nn.Module):
    """f = Σ w (relu(y) + y), y = x + 1: the tensor that the ReLU takes goes on beside it."""

    def __init__(self):
        super().__init__()
        self.relu, self.head = nn.ReLU(), nn.Linear(4, 2)

    def forward(self, x):
        y = x + 1
        return self.head((self.relu(y) + y).flatten(1))


@CAPTUM
def test_what_a_relu_takes_may_go_another_way_too():
    from captum.attr import DeepLift

    model = BesideAReLU().double().eval()
    x = torch.tensor([[[[-3.0, 2.0], [-0.5, 1.0]]]], dtype=torch.float64)
    # relu(y) + y goes from 2 at y = 1 to relu(x + 1) + x + 1
    terms = model.head.weight[1].detach().view(2, 2) * ((x + 1).clamp(min=0) + x + 1 - 2)[0, 0]
    assert_close(DeepLIFT(model).attribute(x, 1)[0], terms)
    direct = DeepLift(model).attribute(x, torch.zeros_like(x), target=1)[0, 0].detach()
    assert not torch.allclose(direct, terms), "captum by itself loses the other way"


@CAPTUM
@pytest.mark.parametrize(
    ("rank", "pool"), [(1, nn.MaxPool1d(3, 2)), (2, nn.MaxPool2d(3, 2, 1)), (3, nn.MaxPool3d(2, 1))]
)
def test_max_pooling_behind_a_relu_is_complete_where_windows_overlap(rank, pool):
    from captum.attr import DeepLift

    kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[rank - 1]
    cells = {1: 3 * 5, 2: 3 * 16, 3: 3 * 27}[rank]
    size = {1: (14,), 2: (10, 10), 3: (6, 6, 6)}[rank]
    model, x = made(
        lambda: nn.Sequential(kind(2, 3, 3), nn.ReLU(True), pool, nn.Tanh(), nn.Flatten(), nn.Linear(cells, 2)),
        2,
        *size,
    )
    start = x.flip(0)[0]  # each of two images against the other
    change = (model(x[:1]) - model(start[None]))[:, 1].detach()
    assert_close(DeepLIFT(model, baseline=start).attribute(x[:1], 1).flatten(1).sum(1), change)
    direct = DeepLift(model).attribute(x[:1], start[None], target=1).detach()
    assert not torch.allclose(direct.sum(), change[0], rtol=0.01), "captum by itself loses what windows share"


@CAPTUM
def test_windows_laid_out_have_the_same_maximum():
    from camscope.explainers.adapters.deep_lift_module_replacements import NonOverlappingMaxPool

    x = torch.randn(2, 3, 9, 11, dtype=torch.float64) - 5
    for pool in (nn.MaxPool2d(3, 2, 1), nn.MaxPool2d((3, 2), (1, 1)), nn.MaxPool2d(2, 1)):
        assert torch.equal(NonOverlappingMaxPool(pool, 2)(x), pool(x))


class Reused(nn.Module):
    """Functions, and a module without a rule."""

    def __init__(self):
        super().__init__()
        self.first, self.gelu, self.head = nn.Conv2d(3, 4, 3), nn.GELU(), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.gelu(torch.relu(self.first(x))).mean((2, 3)))


class Largest(nn.Module):
    def forward(self, x):
        return x.max(3).values.amax(2)


@CAPTUM
@pytest.mark.parametrize("act", [nn.ReLU6(True), nn.ReLU6(), nn.Hardtanh(-0.2, 0.1), nn.Hardtanh(inplace=True)])
def test_what_is_clipped_has_the_rule_of_relus(act):
    model, x = made(lambda: nn.Sequential(nn.Conv2d(3, 4, 3), act, nn.Flatten(), nn.Linear(64, 2)), 3, 6, 6)
    x *= 20  # most is beyond the limits: the gradient there is 0, and what changed is not
    plain = made(lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2)), 3, 6, 6)[0]
    y = model[0](x).detach()
    at_0 = model[0].bias.detach().view(4, 1, 1)
    step = nn.functional.hardtanh(y, act.min_val, act.max_val) - nn.functional.hardtanh(at_0, act.min_val, act.max_val)
    passed = step / (y - at_0) * model[3].weight[1].detach().view(4, 4, 4)
    expected = x * torch.nn.grad.conv2d_input(x.shape, model[0].weight.detach(), passed)
    with untouched(model, x):
        found = DeepLIFT(model).attribute(x, 1)
    assert_close(found, expected.sum(1))
    assert_close(found.sum((1, 2)), (model(x) - model(torch.zeros_like(x)))[:, 1].detach())
    assert not torch.allclose(DeepLIFT(plain).attribute(x, 1), found, rtol=0.1)
    assert not any("no rule" in note for note in DeepLIFT(model).explain(x[0], 1).notes)
    seen = []
    model[1].register_forward_hook(lambda module, args, output: seen.append(output))
    assert_close(DeepLIFT(model).attribute(x, 1), found)
    assert seen, "the model's own hooks run on the copy"


@CAPTUM
def test_what_captum_cannot_reach_is_named_with_the_gap():
    model, x = made(Reused, 3, 8, 8)
    (note,) = [one for one in DeepLIFT(model).explain(x[0], 1).notes if one.startswith("completeness")]
    assert "captum has no rule for gelu (1 x), relu (1 x), which keep their gradient" in note
    largest = nn.Sequential(model.first, nn.RReLU(), Largest(), model.head)
    (note,) = [one for one in DeepLIFT(largest).explain(x[0], 1).notes if one.startswith("completeness")]
    assert "captum has no rule for amax (1 x), max (1 x), rrelu (1 x), which keep" in note
    exact, y = CASES["pooled"].make(dtype=torch.float64)
    (note,) = [one for one in DeepLIFT(exact).explain(y[0], 1).notes if one.startswith("completeness")]
    assert "no rule" not in note
    total = DeepLIFT(exact).attribute(y, 1).sum((1, 2))
    assert_close(total, (exact(y) - exact(torch.zeros_like(y)))[:, 1].detach())


@CAPTUM
def test_a_faint_input_has_the_map_of_a_bright_one():
    class Loud(nn.Module):
        def __init__(self, model, factor):
            super().__init__()
            self.model, self.factor = model, factor

        def forward(self, x):
            return self.model(x * self.factor)

    model, x = CASES["pooled"].make(dtype=torch.float64)
    expected = DeepLIFT(model).attribute(x, 1)
    assert_close(DeepLIFT(Loud(model, 1e20)).attribute(x * 1e-20, 1), expected)


class Bent(nn.Module):
    """f = 2 relu(x0) + x1²: the ReLU is complete, the square keeps its gradient."""

    def __init__(self):
        super().__init__()
        self.relu = nn.ReLU()

    def forward(self, x):
        a, b = x.flatten(1).T
        return torch.stack([a, 2 * self.relu(a) + b.square()], 1)


X = torch.tensor([[[1.0, 3.0]]], dtype=torch.float64)


@CAPTUM
def test_how_far_deeplift_is_from_adding_up_by_hand():
    # from (-1, 1): Δrelu/Δx = 1/2, so 2 · 1/2 · 2 = 2; of the square the gradient 6 · 2 = 12: 14, where f goes from 1 to 11
    start = torch.tensor([[[-1.0, 1.0]]], dtype=torch.float64)
    one = DeepLIFT(Bent(), baseline=start).explain(X, 1)
    assert_close(torch.from_numpy(one.attribution), torch.tensor([[2.0, 12.0]], dtype=torch.float64))
    assert one.diagnostics == {"completeness_gap": pytest.approx(4.0), "score_change": pytest.approx(10.0)}
    # from 0: 2 + 6 · 3 = 20, where f goes from 0 to 11; of both the means
    both = DeepLIFTSHAP(Bent(), background=[start, "zero"]).explain(X, 1)
    assert both.diagnostics == {"completeness_gap": pytest.approx((4 + 9) / 2), "score_change": pytest.approx(10.5)}
    (note,) = [said for said in both.notes if said.startswith("completeness")]
    assert "add up to 17, the score less the baselines' mean is 10.5: the gap is +6.5, 61.90% of it" in note
    assert "; the worst of 2 baselines has +9 of 11; captum has no" in note
    (note,) = [said for said in one.notes if said.startswith("completeness")]
    assert (
        "values add up to 14, the score less the baselines' mean is 10: the gap is +4, 40.00% of it; captum has no"
        in note
    )


# --- LIME and KernelSHAP


class Terms(nn.Module):
    """A score that is a sum over pixels: Σ_p tanh(Σ_c w_c x_cp), and its negative."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Conv2d(3, 2, 1, bias=False)

    def forward(self, x):
        return torch.tanh(self.mix(x)).sum((2, 3))


@CAPTUM
@pytest.mark.parametrize("method", [LIME, KernelSHAP])
def test_of_a_sum_over_cells_each_has_its_term(method):
    model, x = made(Terms, 3, 6, 9)
    terms = torch.tanh(model.mix(x)).detach()[:, 1]
    cells = terms.view(2, 2, 3, 3, 3).sum((2, 4))  # a grid of 2 x 3 blocks of 3 x 3
    expected = cells.repeat_interleave(3, 1).repeat_interleave(3, 2)
    segments = (torch.arange(6) // 3)[:, None] * 3 + torch.arange(9) // 3
    settings = {"alpha": 0.0} if method is LIME else {}
    assert_close(
        method(model, segments=segments * 7 - 5, n_samples=60, **settings).attribute(x, 1), expected, atol=1e-12
    )
    by_grid = method(model, grid_size=3, n_samples=80, **settings).attribute(x, 1)
    blocks = terms.view(2, 3, 2, 3, 3).sum((2, 4)).repeat_interleave(2, 1).repeat_interleave(3, 2)
    assert_close(by_grid, blocks, atol=1e-12)


@CAPTUM
@pytest.mark.parametrize("method", [LIME, KernelSHAP])
def test_segments_are_whatever_segment_ablation_takes(method):
    pytest.importorskip("skimage")
    model, x = made(Terms, 3, 8, 8)
    x[0, 0, :, 4:], x[1, 1, 4:] = 20, 20  # each picture has its own superpixels
    labels = torch.stack([SegmentAblation(model, segments=4).compute_segment_labels(one) for one in x])
    assert not torch.equal(labels[0], labels[1])
    settings = {"alpha": 0.0} if method is LIME else {}
    found = method(model, segments=np.int64(4), n_samples=20, **settings).attribute(x, 1)
    for i, one in enumerate(x):
        for given in (labels[i], labels[i].numpy(), lambda x, i=i: labels[i]):
            tool = method(model, segments=given, n_samples=20, **settings)
            assert torch.equal(tool.attribute(one[None], 1)[0], found[i])
        lost = SegmentAblation(model, segments=labels[i]).attribute(one[None], 1)
        assert_close(found[i], lost[0], atol=1e-12)  # the score is a sum of terms


class Game(nn.Module):
    """A score of four cells that is no sum: x0 x1 + 2 x2 - x1 x2 x3."""

    def forward(self, x):
        a, b, c, d = x.flatten(1).T
        return torch.stack([a, a * b + 2 * c - b * c * d], 1)


@pytest.mark.slow
@CAPTUM
def test_kernelshap_comes_to_the_shapley_values():
    x = torch.tensor([[[[1.0, 2.0], [0.5, 3.0]]]], dtype=torch.float64)
    values = torch.zeros(4, dtype=torch.float64)
    for order in itertools.permutations(range(4)):
        shown = torch.zeros(1, 4, dtype=torch.float64)
        for cell in order:
            before = Game()(shown)[0, 1]
            shown[0, cell] = x.flatten()[cell]
            values[cell] += (Game()(shown)[0, 1] - before) / math.factorial(4)
    heat = KernelSHAP(Game(), n_samples=2000).attribute(x, 1)
    assert_close(heat.flatten(), values, atol=0.1, rtol=0)
    assert_close(heat.sum(), values.sum())


@CAPTUM
def test_kernelshap_is_complete_but_for_rounding_and_lime_does_not_say_so():
    model = Bent()
    one = KernelSHAP(model, grid_size=2, n_samples=10, baseline=["zero", -X]).explain(X, 1)
    assert one.diagnostics["score_change"] == pytest.approx((11 + 2) / 2)  # f is 11, 0 at 0, and 9 at -x
    assert one.diagnostics["completeness_gap"] == pytest.approx(0, abs=1e-12)
    assert LIME(model, grid_size=2, n_samples=10).explain(X, 1).diagnostics == {}


@CAPTUM
@SKLEARN
def test_kernelshap_and_lime_are_captums_own_on_the_pixels():
    from captum._utils.models.linear_model import SkLearnRidge
    from captum.attr import KernelShap, Lime

    model, x = CASES["pooled"].make()
    mask = (torch.arange(16) // 8)[:, None] * 3 + torch.arange(12) // 4
    with torch.random.fork_rng():
        torch.manual_seed(4)
        shap = KernelShap(model).attribute(x[:1], target=1, feature_mask=mask[None, None], n_samples=60)[:, 0]
        torch.manual_seed(4)
        near = Lime(
            model,
            SkLearnRidge(alpha=1.0),
            similarity_func=lambda original, changed, z, **_: math.exp(
                -((1 - math.sqrt(float(z.sum()) / 6)) ** 2) / (2 * 0.25**2)
            ),
        ).attribute(x[:1], target=1, feature_mask=mask[None, None], n_samples=60)[:, 0]
    settings = {"segments": mask, "n_samples": 60, "seed": 4}
    for found, direct in (
        (KernelSHAP(model, **settings).attribute(x[:1], 1), shap),
        (LIME(model, **settings).attribute(x[:1], 1), near),
    ):
        assert_close(found, direct, rtol=0, atol=1e-3 * float(direct.abs().max()))  # captum fits in float32


@CAPTUM
@pytest.mark.parametrize("method", [LIME, KernelSHAP])
def test_a_seed_says_it_all_and_the_passes_may_be_any_size(method):
    model, x = CASES["pooled"].make(dtype=torch.float64)
    first = method(model, n_samples=30, grid_size=3).attribute(x, 1)
    torch.manual_seed(99)
    with untouched(model, x):
        again = method(model, n_samples=30, grid_size=3).attribute(x, 1)
    assert torch.equal(first, again)
    assert_close(method(model, n_samples=30, grid_size=3, batch_size=7).attribute(x, 1), first, atol=1e-12)
    assert not torch.allclose(method(model, n_samples=30, grid_size=3, seed=1).attribute(x, 1), first)


@CAPTUM
def test_too_few_versions_are_said_and_the_fit_is_judged():
    model, x = CASES["pooled"].make(dtype=torch.float64)
    (few,) = [one for one in KernelSHAP(model, n_samples=10).explain(x[0], 1).notes if "linear model" in one]
    assert "over 10 samples; they do not determine the cells: raise n_samples, or lower grid_size" in few
    (enough,) = [one for one in LIME(model, n_samples=60, grid_size=2).explain(x[0], 1).notes if "linear model" in one]
    assert "a linear model of 4 cells explains" in enough
    assert "determine" not in enough


# --- LRP


class SumOfPixels(nn.Module):
    """A constant, plus a sum over all axes of the input that counts nothing."""

    def forward(self, x):
        return torch.zeros(len(x), 5) + x.sum() * 0


@pytest.mark.skipif(find_spec("zennit") is None, reason="zennit is not installed")
@pytest.mark.filterwarnings("ignore::camscope.errors.CamscopeWarning")
def test_a_sum_over_all_axes_has_a_rule():
    assert not LRP(SumOfPixels()).attribute(torch.rand(1, 3, 4, 4), 1).any()


def sequential():
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Conv2d(4, 5, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(20, 3),
    )


@ZENNIT
@pytest.mark.parametrize(
    "composite",
    ["epsilon_plus", "epsilon_plus_flat", "epsilon_alpha2_beta1", "epsilon_alpha2_beta1_flat", "epsilon_gamma_box"],
)
def test_lrp_is_zennits_where_every_step_is_a_module(composite):
    from zennit.attribution import Gradient
    from zennit.composites import COMPOSITES

    from camscope.explainers.adapters.zennit_rules_for_functions import make_relative_stabilizer

    model, x = made(sequential, 3, 8, 8)
    x = x[:1]
    box = {"low": x.amin((2, 3), keepdim=True), "high": x.amax((2, 3), keepdim=True)}
    own = COMPOSITES[composite](
        epsilon=make_relative_stabilizer(1e-6),
        stabilizer=make_relative_stabilizer(1e-6),
        **(box if composite == "epsilon_gamma_box" else {}),
    )
    with Gradient(copy.deepcopy(model), own) as attributor:
        _, expected = attributor(x, lambda output: output * torch.tensor([[0.0, 1.0, 0.0]], dtype=torch.float64))
    with untouched(model, x):
        assert_close(LRP(model, composite=composite).attribute(x, 1), expected.detach().sum(1))


class Modules(nn.Module):
    """`Residual` as zennit wants it: each step a module, the batch norm in the layer before it."""

    def __init__(self, model):
        from torch.nn.utils.fusion import fuse_conv_bn_eval
        from zennit.layer import Sum

        super().__init__()
        self.stem = fuse_conv_bn_eval(model.stem, model.norm)
        self.block, self.first, self.second = model.block, nn.ReLU(), nn.ReLU()
        self.sum, self.pool, self.head = Sum(), nn.AdaptiveAvgPool2d(1), model.head

    def forward(self, x):
        x = self.first(self.stem(x))
        y = self.second(self.sum(torch.stack([self.block(x), x], -1)))
        return self.head(self.pool(y).flatten(1))


@ZENNIT
def test_sums_means_batch_norms_and_a_relu_used_twice_have_the_rules_of_modules():
    model, x = CASES["residual"].make(dtype=torch.float64)
    model.norm.running_mean += torch.randn(6, generator=torch.Generator().manual_seed(1))
    model.norm.running_var += 1
    expected = LRP(Modules(model).double().eval()).attribute(x, 1)
    with untouched(model, x):
        assert_close(LRP(model).attribute(x, 1), expected, rtol=1e-8)


@ZENNIT
@pytest.mark.parametrize("composite", ["epsilon_plus", "epsilon_alpha2_beta1"])
def test_relevance_is_conserved_where_there_are_no_biases(composite):
    def build():
        return Flat(nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.ReLU(), nn.AvgPool2d(2)), 36)

    model, x = made(build, 3, 8, 8)
    model.head.bias.data.zero_()
    x = x.abs()  # no step of the z+ rule is without a part that is positive
    model.features[0].weight.data.abs_()
    tool = LRP(model, composite="epsilon_plus", epsilon=0.0)
    assert_close(tool.attribute(x, 1).sum((1, 2)), model(x)[:, 1].detach(), rtol=1e-8)
    (note,) = [one for one in tool.explain(x[0], 1).notes if one.startswith("conservation")]
    assert "0.00% of it" in note


@ZENNIT
def test_what_a_bias_keeps_of_the_relevance_by_hand():
    model = nn.Sequential(nn.Flatten(), nn.Linear(2, 2)).double()
    model[1].weight.data[:], model[1].bias.data[:] = torch.tensor([[1.0, 1.0], [2.0, -1.0]]), torch.tensor([0.0, 5.0])
    one = LRP(model, epsilon=0.0).explain(X, 1)
    # z = 2 · 1 - 3 + 5 = 4: the pixels have 2/4 and -3/4 of 4, the bias keeps 5
    assert_close(torch.from_numpy(one.attribution), torch.tensor([[2.0, -3.0]], dtype=torch.float64), rtol=1e-8)
    assert one.diagnostics == {"conservation_gap": pytest.approx(-5.0), "output_relevance": pytest.approx(4.0)}
    assert "the pixels' values add up to -1, the output begins with 4: the gap is -5, 125.00% of it" in one.notes[-1]


@ZENNIT
def test_lrp_of_functions_in_place_is_that_of_modules():
    class Functions(nn.Module):
        def __init__(self, parts):
            super().__init__()
            self.parts = parts

        def forward(self, x):
            x = self.parts[0](x)
            nn.functional.relu_(x)
            x = nn.functional.avg_pool2d(x, 2)
            x = nn.functional.relu(self.parts[3](x), True)
            return self.parts[6](x.flatten(1)) * 1.0

    model, x = made(sequential, 3, 8, 8)
    assert_close(LRP(Functions(model)).attribute(x, 1), LRP(model).attribute(x, 1))


@ZENNIT
@pytest.mark.parametrize(
    ("module", "function"),
    [
        (nn.LogSigmoid(), nn.functional.logsigmoid),
        (nn.Hardtanh(0, 0.5), lambda y: y.clip(0, 0.5)),
        (nn.AdaptiveMaxPool2d(1), lambda y: y.amax((2, 3), keepdim=True)),
    ],
)
def test_lrp_has_a_rule_for_every_way_to_write_a_function(module, function):
    class As(nn.Module):
        def __init__(self, model, act):
            super().__init__()
            self.first, self.last, self.act = model[0], model[6], act

        def forward(self, x):
            return self.last(self.act(self.first(x)).mean((2, 3)).repeat(1, 5))

    model, x = made(sequential, 3, 8, 8)
    assert_close(LRP(As(model, function)).attribute(x, 1), LRP(As(model, module)).attribute(x, 1))


@ZENNIT
def test_lrp_of_what_is_enlarged_gives_each_cell_what_its_pixels_have():
    class Larger(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(36, 2, bias=False)

        def forward(self, x):
            return self.head(nn.functional.interpolate(x, scale_factor=3.0).flatten(1))

    model, x = made(Larger, 1, 2, 2)
    each = model.head.weight[1].detach().view(2, 3, 2, 3).sum((1, 3))
    assert_close(LRP(model, epsilon=0.0).attribute(x, 1), x[:, 0] * each, rtol=1e-8)


@ZENNIT
def test_a_batch_norm_that_follows_no_layer_is_named():
    model, x = made(lambda: Pooled(nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 6, 3), nn.ReLU()), 6), 3, 8, 8)
    assert any("pass relevance on unchanged: features.0" in note for note in LRP(model).explain(x[0], 1).notes)


# --- what is refused


@CAPTUM
def test_wrong_settings_are_refused():
    model, x = CASES["pooled"].make()
    with pytest.raises(InputError, match="background has one input: deepliftshap requires two or more"):
        DeepLIFTSHAP(model, background=["zero"])
    with pytest.raises(InputError, match=r"the segments are int64 \(2, 2\); expected .* input, \(16, 12\)"):
        LIME(model, segments=torch.zeros(2, 2, dtype=torch.long)).attribute(x, 1)
    with pytest.raises(InputError, match=r"^segments=0: expected a whole number, 1 or more or None"):
        KernelSHAP(model, segments=0)
    with pytest.raises(InputError, match="requires at least two cells, but there is only one"):
        KernelSHAP(model, grid_size=1).attribute(x, 1)
    with pytest.raises(InputError, match=r"samples=1: expected 3 or more"):
        KernelSHAP(model, n_samples=1).attribute(x, 1)
    with pytest.raises(InputError, match=r"width=1e-06: all samples have the weight 0"):
        LIME(model, kernel_width=1e-6, n_samples=5).attribute(x, 1)


@ZENNIT
def test_lrp_says_what_it_has_no_rule_for():
    class Backwards(nn.Module):
        def __init__(self):
            super().__init__()
            self.head, self.first = nn.Linear(4, 3), nn.Conv2d(3, 4, 3)

        def forward(self, x):
            return self.head(torch.relu(self.first(x)).mean((2, 3)))

    class Gated(Backwards):
        def forward(self, x):
            y = self.first(x)
            return self.head((y * y.sigmoid()).mean((2, 3)))

    model, x = made(Gated, 3, 8, 8)
    with untouched(model, x), pytest.raises(ModelError, match=r"no rule for these operations of Gated: mul \(1 x\)"):
        LRP(model).attribute(x, 1)
    model, x = made(Backwards, 3, 8, 8)
    with pytest.raises(ModelError, match=r"By name, this is 'head', but 'first' runs first"):
        LRP(model, composite="epsilon_gamma_box").attribute(x, 1)
    with pytest.raises(InputError, match="composite='guided': expected 'epsilon_plus' or"):
        LRP(model, composite="guided")


@CAPTUM
def test_a_model_that_cannot_be_copied_or_answers_otherwise_as_a_copy_is_refused():
    model, x = CASES["pooled"].make()
    model.lock = threading.Lock()
    with pytest.raises(ModelError, match=r"Pooled cannot be copied \(cannot pickle '_thread\.lock' object\)"):
        DeepLIFT(model).attribute(x, 1)

    class Statement(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.relu, self.head = nn.Conv2d(3, 6, 3), nn.ReLU(inplace=True), nn.Linear(6, 3)

        def forward(self, x):
            x = self.first(x)
            self.relu(x)
            return self.head(x.mean((2, 3)))

    model, x = made(Statement, 3, 8, 8)
    with pytest.raises(ModelError, match=r"but its copy .* write x = module\(x\)"):
        DeepLIFT(model).attribute(x, 1)


@CAPTUM
def test_a_model_that_fails_in_the_copy_is_left_as_it_was_and_the_error_says_how_far_it_came():
    calls = []

    def second(module, args):
        calls.append(1)
        if len(calls) % 2 == 0:
            raise ArithmeticError("the second pass")

    model, x = CASES["pooled"].make()
    model.head.register_forward_pre_hook(second)
    with untouched(model, x), pytest.raises(ArithmeticError) as caught:
        DeepLIFT(model).attribute(x, 1)
    assert caught.value.__notes__ == ["deeplift, image 1 of 2: stopped after 0 of 1 step"]


# --- without the extras


@pytest.fixture
def imported_anew():
    """What is imported of camscope is new, as in a process that has just begun; afterwards it is what it was."""
    before = dict(sys.modules)
    for name in [name for name in before if name.partition(".")[0] in ("camscope", "captum", "zennit")]:
        del sys.modules[name]
    yield
    sys.modules.clear()
    sys.modules.update(before)


@pytest.mark.slow
def test_without_the_extras_the_names_say_what_to_install(imported_anew, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "captum", None)
    monkeypatch.setitem(sys.modules, "zennit", None)
    import camscope
    from camscope.cli import main

    assert camscope is not CAMSCOPE
    model = nn.Sequential(nn.Conv2d(3, 2, 1), nn.Flatten(), nn.Linear(8, 2))
    assert not {"deeplift", "deepliftshap", "lime", "kernelshap", "lrp"} & set(camscope.METHODS)
    for ask, extra in (
        (lambda: camscope.DeepLIFT(model), "captum"),
        (lambda: camscope.GradCAM(model, "0").with_method("lime"), "captum"),
        (lambda: camscope.LRP(model), "lrp"),
    ):
        package = "zennit" if extra == "lrp" else extra
        says = f'{package} is not installed; run: pip install "camscope[{extra}]"'
        with pytest.raises(ImportError, match=f"^{re.escape(says)}$"):
            ask()
    monkeypatch.setattr(sys, "argv", ["camscope", "explain", "none.png", "--methods", "lrp"])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    assert 'pip install "camscope[lrp]"' in " ".join(capsys.readouterr().err.split())


@pytest.mark.skipif(HERE["captum"], reason="captum is installed")
def test_a_method_without_its_package_is_asked_for_by_name():
    with pytest.raises(MissingExtraError, match=r'captum is not installed; run: pip install "camscope\[captum\]"'):
        GradCAM(Pooled(conv(), 6), "features").with_method("deeplift")


@pytest.mark.skipif(find_spec("zennit") is None, reason="zennit is not installed")
def test_relevance_of_a_healthy_model_is_not_called_constant():
    # both of its passes are of the same input: that their scores are equal says nothing of the model
    for seed in range(6):
        torch.manual_seed(seed)
        layers = nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 5)
        explanation = LRP(nn.Sequential(*layers).eval()).explain(torch.randn(3, 16, 16), 1)
        assert explanation.status != "constant_score"


@ZENNIT
def test_a_batch_norm_that_was_merged_has_an_epsilon_that_every_pytorch_takes(monkeypatch):
    seen = []
    original = torch.nn.functional.batch_norm

    def strict(*args, **kwargs):
        seen.append(args[7] if len(args) > 7 else kwargs["eps"])
        return original(*args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "batch_norm", strict)
    model, x = CASES["residual"].make()
    METHODS["lrp"](model).attribute(x, 1)
    assert len(seen) > 1
    assert min(seen) > 0
    assert 1 + torch.tensor(min(seen)) == 1


@CAPTUM
@pytest.mark.parametrize("method", ["deeplift", "deepliftshap"])
def test_layers_that_half_precision_leaves_unchanged_keep_their_gradient(method):
    """Where a layer's output is that of the baseline, no change is divided by none."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 3)).eval()
    x = torch.zeros(1, 3, 8, 8)
    x[..., :4] = torch.rand(1, 3, 8, 4)
    settings = {"background": ["zero", "mean"]} if method == "deepliftshap" else {}
    expected = METHODS[method](model, **settings).attribute(x, 1)
    with torch.autocast("cpu", torch.float16):
        found = METHODS[method](model, **settings).attribute(x, 1)
    assert found.isfinite().all()
    assert (found - expected).abs().max() < 0.02 * expected.abs().max()
