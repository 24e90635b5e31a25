"""Numbers: what a map is worth in every precision, layout and awkward magnitude."""

import os
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from camscope.errors import CamscopeWarning, InputError, LayerError, NonFiniteError
from camscope.explainers import METHODS, GradCAM, HiResCAM, LayerCAM
from tests.nets import CASES, Flat, Plain, Pooled, conv, plain, truth
from tests.refusals import first_answered, residual_or_plainer
from tests.tools import by_family_with, explainer, looks_at_layers

QUIET = pytest.mark.filterwarnings("ignore::camscope.errors.CamscopeWarning")


def test_float64_in_is_float64_precision_out():
    model, x = plain()
    heat = HiResCAM(model, "middle").attribute(x, 1)
    assert heat.dtype == torch.float64
    torch.testing.assert_close(heat, truth(model, x, 1), rtol=1e-12, atol=1e-16)
    assert HiResCAM(model, "middle").explain(x[0], 1).attribution.dtype == np.float64


# They compare scores that differ in their last half-precision digits, or stretch what is left: alike, not close.
AMPLIFYING = {
    "reciprocam": 0.98,
    "vitcx": 0.88,
    "groupcam": 0.94,
    "opticam": 0.99,
    "fullgrad": 0.8,
    "simplefullgrad": 0.8,
    # gradients at the pixels go through every ReLU, and one that turns over turns a whole field
    "saliency": 0.9,
    "guidedbackprop": 0.9,
    "guidedgradcam": 0.9,
    # differences of scores that differ little
    "occlusion": 0.98,
    "sobol": 0.9,
    "rise": 0.95,  # less their mean
    "drise": 0.95,
    "inputxgradient": 0.9,
    # a ReLU that half precision opens or shuts is one of the few gradients that a path of the tests meets
    "integratedgradients": 0.99,
    "blurig": 0.99,
    "expectedgradients": 0.99,
    "gradientshap": 0.99,
    "guidedig": 0.99,
    "xrai": 0.9,  # and a region may go to another segment
    "deeplift": 0.99,
    "deepliftshap": 0.99,
    "lrp": 0.98,
}


def assert_alike(method, heat, expected, error):
    """Maps in at least float32, close to the exact ones, or in so far correlated with them as the method allows."""
    assert heat.dtype == torch.float32
    if method not in AMPLIFYING:
        torch.testing.assert_close(heat, expected, rtol=0, atol=error * float(expected.abs().max()))
        return
    for one, exact in zip(heat.flatten(1), expected.flatten(1), strict=True):
        assert torch.corrcoef(torch.stack([one, exact]))[0, 1] > AMPLIFYING[method]


@QUIET
@pytest.mark.parametrize(
    ("method", "dtype"),
    [*((method, torch.float16) for method in METHODS), *by_family_with(METHODS, torch.bfloat16)],
)
@pytest.mark.by_family
def test_half_precision_models_give_float32_maps_close_to_the_float32_map(method, dtype):
    case = first_answered(method, "pooled", "tokens")
    model, x = case.make()
    expected = explainer(method, model, case.layer).attribute(x, 1)
    heat = explainer(method, model.to(dtype), case.layer).attribute(x.to(dtype), 1)
    assert_alike(method, heat, expected, 0.05 if dtype == torch.bfloat16 else 0.01)


@QUIET
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.by_family
def test_autocast_gives_float32_maps_and_spoils_no_training_that_follows(method):
    case = first_answered(method, "pooled", "tokens")
    model, x = case.make()
    expected = explainer(method, model, case.layer).attribute(x, 1)
    with torch.autocast("cpu", torch.bfloat16):
        heat = explainer(method, model, case.layer).attribute(x, 1)
        loss = model(x).float().sum()
    drawn_without_the_model = METHODS[method].control and not looks_at_layers(method)
    assert torch.equal(heat, expected) == drawn_without_the_model, "autocast did not reach the layer"
    assert_alike(method, heat, expected, 0.05)
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@QUIET
def test_the_sums_of_half_precision_are_float32_sums():
    # 4096 cells of 1 under a gradient of 1: a float16 sum stops at 2048, a bfloat16 one at 256
    for dtype in (torch.float16, torch.bfloat16):
        model = Pooled(nn.MaxPool2d(1), 1, classes=1).to(dtype)
        model.head.weight.data[:] = 1.0
        x = torch.ones(1, 1, 64, 64, dtype=dtype)
        for method in ("gradcam", "xgradcam"):
            heat = explainer(method, model, "features").attribute(x, 0)
            torch.testing.assert_close(heat, torch.full((1, 64, 64), 1 / 4096), rtol=1e-6, atol=0)


class Faint(nn.Module):
    """A score whose gradient at the layer is `factor`, too small for float16 below 2**-25."""

    def __init__(self, factor):
        super().__init__()
        self.layer, self.factor = nn.MaxPool2d(1), factor

    def forward(self, x):
        return self.layer(x).float().flatten(1).sum(1, keepdim=True) * self.factor


def test_a_float16_gradient_that_vanishes_is_taken_again():
    x = torch.full((2, 1, 4, 4), 0.5, dtype=torch.float16)
    for exponent in (-20, -26, -32, -38):
        heat = HiResCAM(Faint(2.0**exponent), "layer")
        with pytest.warns(CamscopeWarning, match="one value everywhere"):
            map_ = heat.attribute(x, 0)
        torch.testing.assert_close(map_, torch.full((2, 4, 4), 0.5 * 2.0**exponent), rtol=1e-6, atol=0)


def test_a_float16_gradient_that_is_lost_for_good_is_flagged():
    x = torch.ones(1, 1, 4, 4, dtype=torch.float16)
    with pytest.warns(CamscopeWarning, match="gradient is zero"):
        explanation = HiResCAM(Faint(2.0**-80), "layer").explain(x, 0)
    assert explanation.status == "zero_gradient"


def test_only_the_sample_whose_gradient_vanished_is_scaled():
    class Mixed(Faint):
        def forward(self, x):
            return super().forward(x) * torch.tensor([[2.0**30], [1.0]])

    x = torch.full((2, 1, 4, 4), 0.5, dtype=torch.float16)
    x[:, :, 0] = 1.0
    heat = HiResCAM(Mixed(2.0**-30), "layer").attribute(x, 0)
    torch.testing.assert_close(heat, x[:, 0].float() * torch.tensor([1.0, 2.0**-30]).view(2, 1, 1), rtol=1e-6, atol=0)


@QUIET
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.by_family
def test_any_memory_layout_of_the_input_and_the_weights(method):
    case = residual_or_plainer(method)
    model, x = case.make(3, torch.float64)
    tool = explainer(method, model, case.layer)
    expected = tool.attribute(x, 1)
    height, width = x.shape[2:]
    padded = torch.zeros(3, 3, 2 * height, width + 1, dtype=torch.float64)
    padded[:, :, ::2, 1:] = x
    layouts = {
        "channels last": x.contiguous(memory_format=torch.channels_last),
        "every other row": padded[:, :, ::2, 1:],
        "transposed": x.transpose(2, 3).contiguous().transpose(2, 3),
    }
    for name, values in layouts.items():
        assert torch.equal(values, x), name
        torch.testing.assert_close(tool.attribute(values, 1), expected, rtol=1e-10, atol=1e-14)
    expanded = x[:1].expand(3, -1, -1, -1)
    torch.testing.assert_close(tool.attribute(expanded, 1), expected[:1].expand(3, -1, -1), rtol=1e-10, atol=1e-14)
    model.to(memory_format=torch.channels_last)
    torch.testing.assert_close(tool.attribute(x, 1), expected, rtol=1e-10, atol=1e-14)


@QUIET
@pytest.mark.parametrize("channels", [1, 3, 5])
@pytest.mark.parametrize("size", [(9, 31), (40, 8)])
def test_any_number_of_channels_and_any_shape(channels, size):
    torch.manual_seed(0)
    model, x = Pooled(conv(channels=channels), 6).double(), torch.randn(2, channels, *size, dtype=torch.float64)
    features = model.features(x).detach()
    expected = torch.einsum("k,nkhw->nhw", model.head.weight[0].detach(), features).relu() / features[0, 0].numel()
    torch.testing.assert_close(GradCAM(model, "features").attribute(x, 0), expected, rtol=1e-12, atol=1e-16)
    explanation = GradCAM(model, "features").explain(x[0], 0)
    assert explanation.heatmap("input").shape == size
    assert explanation.overlay().shape == (*size, 3)


def test_a_flat_positive_map_is_displayed_as_one_everywhere():
    model = Flat(nn.MaxPool2d(1), 64, classes=1)
    model.head.weight.data[:] = 0.25
    with pytest.warns(CamscopeWarning, match="one value everywhere"):
        explanation = GradCAM(model, "features").explain(torch.full((1, 8, 8), 3.0), 0)
    assert explanation.status == "flat"
    for size in ("image", "input", "grid"):
        assert (explanation.heatmap(size) == 1.0).all()
    top = explanation.overlay(alpha=1.0)
    assert (top == top[0, 0]).all()
    assert top[0, 0].astype(int).sum() > 600, "the top of the color map is light"


def test_nothing_positive_is_zeros_and_says_so_in_every_place():
    model = Flat(nn.MaxPool2d(1), 64, classes=2)
    model.head.weight.data[0], model.head.weight.data[1] = -1.0, 0.0
    x = torch.rand(1, 8, 8) + 0.5
    for target, status, words in (
        (0, "no_positive_evidence", "nothing in the map"),
        (1, "zero_gradient", "is zero at"),
    ):
        with pytest.warns(CamscopeWarning, match=words):
            explanation = GradCAM(model, "features").explain(x, target)
        assert explanation.status == status
        assert not explanation.attribution.any()
        assert not explanation.heatmap().any()
        assert np.isfinite(explanation.heatmap()).all()
        assert words in explanation._repr_html_()


def test_flags_are_each_samples_own():
    model = Flat(nn.MaxPool2d(1), 64, classes=1)
    model.head.weight.data[:] = 1.0
    x = torch.rand(3, 1, 8, 8)
    x[1] *= -1
    x[2] = 2.0
    with pytest.warns(CamscopeWarning) as caught:
        explanations = GradCAM(model, "features").explain_batch(list(x), 0)
    assert [one.status for one in explanations] == ["ok", "no_positive_evidence", "flat"]
    assert len(caught) == 2
    assert all(warning.filename == __file__ for warning in caught), "a warning points at the line that asked"


def test_a_single_cell_is_flagged_and_no_cell_is_an_error():
    model = Pooled(nn.Sequential(nn.Conv2d(3, 5, 8), nn.ReLU()), 5, classes=2)
    model.head.weight.data[:] = 1.0
    with pytest.warns(CamscopeWarning, match="a single cell"):
        explanation = GradCAM(model, "features").explain(torch.rand(3, 8, 8) + 1, 0)
    assert explanation.status == "no_spatial_resolution"
    assert explanation.grid == (1, 1)
    with pytest.raises(LayerError, match=r"'head'.*\(1, 2\) has no spatial extent.*choose an earlier layer"):
        GradCAM(model, "head").explain(torch.rand(3, 8, 8), 0)


class Spoiled(Plain):
    """The plain network with a value spoiled on the way forwards, or a gradient on the way back."""

    where = "activation"
    what = float("nan")

    def before(self, x):
        y = super().before(x)
        if self.where == "activation":
            y = y.clone()
            y[1, 2, 3, 4] = self.what
        return y

    def after(self, y):
        if self.where == "gradient" and y.requires_grad:
            y.register_hook(self.spoil)
        scores = super().after(y.nan_to_num() if self.where == "activation" else y)
        return scores + torch.tensor([[0.0], [self.what]]) if self.where == "score" else scores

    def spoil(self, gradient):
        gradient = gradient.clone()
        gradient[0, 1, 2, 3], gradient[1, 1, 1, 1] = self.what, self.what
        return gradient


class Bad(nn.Module):
    """Spoils what passes: a layer of its own, so that it is this layer's output that is bad."""

    def forward(self, y):
        y = y.clone()
        y[1, 2, 3, 4] = float("nan")
        return y


@pytest.mark.parametrize("what", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    ("where", "words"),
    [
        (
            "gradient",
            r"the gradient at layer 'middle' has 2 NaN or infinite values of 768, the first at \(0, 1, 2, 3\)",
        ),
        ("score", r"the score has 1 NaN or infinite value of 2, the first at \(1,\)"),
    ],
)
def test_a_bad_gradient_or_score_is_an_error_that_names_it(where, words, what):
    model, x = plain(Spoiled)
    model.where, model.what = where, what
    with pytest.raises(NonFiniteError, match=words + r'; to continue anyway, pass on_nonfinite="warn"'):
        HiResCAM(model, "middle").attribute(x, 1)


def test_a_bad_activation_is_an_error_that_names_it_or_a_flag():
    class Net(Plain):
        def __init__(self):
            super().__init__()
            self.bad = Bad()

        def forward(self, x):
            return self.after(self.bad(self.before(x)).nan_to_num())

    model, x = plain(Net)
    words = r"the activation of layer 'bad' has 1 NaN or infinite value of 768, the first at \(1, 2, 3, 4\)"
    tool = HiResCAM(model, "bad", layout="channels_first")
    with pytest.raises(NonFiniteError, match=words):
        tool.attribute(x, 1)
    tool = HiResCAM(model, "bad", layout="channels_first", on_nonfinite="warn")
    with pytest.warns(CamscopeWarning) as caught:
        explanations = tool.explain_batch(list(x), 1)
    assert any("the activation of layer 'bad'" in str(one.message) for one in caught)
    assert [one.status for one in explanations] == ["ok", "nonfinite"]
    good, bad = explanations
    np.testing.assert_allclose(good.attribution, truth(model, x, 1)[0].numpy(), rtol=1e-10, atol=1e-16)
    assert np.isnan(bad.attribution[3, 4])
    assert np.isnan(bad.attribution).sum() == 1
    assert np.isfinite(bad.heatmap()).all()
    assert bad.overlay(colorbar=True).shape[0] == 8


@pytest.mark.parametrize("factor", [1e-9, 1e-30, 1e9])
@pytest.mark.parametrize("method", ["gradcam", "hirescam", "xgradcam", "layercam"])
def test_a_score_times_any_factor_displays_the_same(method, factor):
    class Scaled(Plain):
        def forward(self, x):
            return super().forward(x) * factor

    model, x = plain()
    scaled, _ = plain(Scaled)
    tool = METHODS[method]
    expected, found = tool(model, "middle").explain(x[0], 2), tool(scaled, "middle").explain(x[0], 2)
    assert expected.status == found.status == "ok"
    np.testing.assert_allclose(found.attribution, expected.attribution * factor, rtol=1e-10)
    np.testing.assert_allclose(found.heatmap(), expected.heatmap(), rtol=1e-10)


def test_tiny_float32_gradients_display_the_same():
    model, x = CASES["pooled"].make(1)
    expected = GradCAM(model, "features").explain(x, 0)
    assert expected.status == "ok"
    model.head.weight.data *= 1e-30
    faint = GradCAM(model, "features").explain(x, 0)
    assert faint.attribution.max() < 1e-29
    np.testing.assert_allclose(faint.heatmap(), expected.heatmap(), rtol=1e-4, atol=1e-6)


def test_probabilities_are_warned_of():
    class Probabilities(Plain):
        def forward(self, x):
            return super().forward(x).softmax(1)

    model, x = plain(Probabilities)
    with pytest.warns(CamscopeWarning, match="looks like probabilities.*explain the logits"):
        HiResCAM(model, "middle").attribute(x, 1)
    logits, _ = plain()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        HiResCAM(logits, "middle").attribute(x, 1)


def test_an_empty_batch_is_a_clear_error():
    model, _ = plain()
    with pytest.raises(InputError, match=r"the batch is empty: \(0, 3, 8, 8\)"):
        GradCAM(model, "middle").attribute(torch.zeros(0, 3, 8, 8), 1)
    with pytest.raises(InputError, match="the batch is empty"):
        GradCAM(model, "middle").explain_batch([], 1)
    with pytest.raises(InputError, match="1 target for 2 images"):
        GradCAM(model, "middle").explain_batch(list(torch.zeros(2, 3, 8, 8)), [1])


class Repeated(Plain):
    """The middle layer, of as many channels as it gets, three times over; the score reads what `reads` says."""

    reads = (0, 1, 2)

    def __init__(self):
        super().__init__()
        self.again = nn.Conv2d(6, 6, 3, padding=1)

    def forward(self, x):
        y, calls = self.before(x), []
        for _ in range(3):
            y = torch.tanh(self.again(y))
            calls.append(y)
        return self.after(sum(calls[i] for i in self.reads))


def repeated_truth(model, x, call):
    """Activation and total gradient of one call of `recompute`, by running the rest of the network from there."""
    y, inputs = model.before(x), []
    for i in range(3):
        y = model.again(y)
        inputs.append(y)
        if i == call:
            A = y = y.detach().requires_grad_()
        y = torch.tanh(y)
        inputs[i] = y
    score = model.after(sum(inputs[i] for i in model.reads))[:, 1].sum()
    return (A * torch.autograd.grad(score, A)[0]).sum(1).detach()


def test_a_layer_that_runs_several_times():
    torch.manual_seed(2)
    model, x = Repeated().double(), torch.randn(2, 3, 8, 8, dtype=torch.float64)
    for call in range(3):
        heat = HiResCAM(model, "again", call_index=call).attribute(x, 1)
        torch.testing.assert_close(heat, repeated_truth(model, x, call), rtol=1e-10, atol=1e-16)
    assert torch.equal(HiResCAM(model, "again", call_index=-1).attribute(x, 1), heat)
    explanation = HiResCAM(model, "again").explain(x[0], 1)
    np.testing.assert_allclose(explanation.attribution, heat[0].numpy(), rtol=1e-10, atol=1e-16)
    assert explanation.notes == ("layer 'again' ran 3 times; call 2 is explained",)
    with pytest.raises(LayerError, match="call_index=3 is out of range: layer 'again' ran 3 times"):
        HiResCAM(model, "again", call_index=3).attribute(x, 1)


def test_the_last_call_that_the_score_depends_on():
    torch.manual_seed(2)
    model, x = Repeated().double(), torch.randn(1, 3, 8, 8, dtype=torch.float64)
    model.reads = (0, 1)
    explanation = HiResCAM(model, "again").explain(x, 1)
    np.testing.assert_allclose(explanation.attribution, repeated_truth(model, x, 1)[0].numpy(), rtol=1e-10, atol=1e-16)
    assert "call 1 is explained" in explanation.notes[0]
    with pytest.raises(LayerError, match="layer 'again'"):
        HiResCAM(model, "again", call_index=2).explain(x, 1)


def test_two_inputs_through_one_layer():
    """A siamese network: both calls have the score's gradient, and neither depends on the other."""

    class Siamese(Plain):
        def forward(self, x, other):
            return self.after(self.middle(torch.tanh(self.first(x))) * self.middle(torch.tanh(self.first(other))))

    model, x = plain(Siamese)
    other = x.flip(0)
    first, second = model.before(x).detach(), model.before(other).detach()
    expected = {}
    for call, A in ((0, first), (1, second)):
        A = A.clone().requires_grad_()
        product = A * (second if call == 0 else first)
        expected[call] = (A * torch.autograd.grad(model.after(product)[:, 0].sum(), A)[0]).sum(1).detach()
    for frozen in (False, True):
        model.requires_grad_(not frozen)
        for call in (0, 1):
            heat = HiResCAM(model, "middle", call_index=call).attribute(x, 0, other)
            torch.testing.assert_close(heat, expected[call], rtol=1e-10, atol=1e-16)


def test_the_input_is_not_copied_and_nothing_before_the_layer_is_kept():
    model, x = plain()
    seen = []
    model.register_forward_pre_hook(lambda module, args: seen.append(args[0].data_ptr()))
    model.first.register_forward_hook(lambda module, args, output: seen.append(output.requires_grad))
    model.last.register_forward_hook(lambda module, args, output: seen.append(output.requires_grad))
    LayerCAM(model, "middle").attribute(x, 1)
    assert seen == [x.data_ptr(), False, True]


PEAK = """
import torch
from pathlib import Path
from torch import nn
from camscope import GradCAM

def peak(run):
    Path("/proc/self/clear_refs").write_text("5")  # resets the highest resident set to the present one
    run()
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024

layers = [nn.Conv2d(1 if i == 0 else 2, 2, 1) for i in range(12)]
model = nn.Sequential(*layers, nn.MaxPool2d(64), nn.Conv2d(2, 2, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten()).eval()
GradCAM(model, "13").attribute(torch.rand(1, 1, 64, 64), 1)  # what it loads is loaded
x = torch.rand(1, 1, 1024, 1024)
with torch.inference_mode():
    plain = peak(lambda: model(x))
for layer in ("13", "0"):
    print(peak(lambda: GradCAM(model, layer).attribute(x, 1)) - plain)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the system does not tell the peak")
def test_a_large_input_costs_what_inference_costs():
    """Twelve layers of 8 MB each come before the layer; from the first one on all are kept."""
    # the C library returns a large block to the system at once: what is resident is what is in use
    steady = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}
    late, early = map(float, subprocess.check_output([sys.executable, "-c", PEAK], env=steady).split())
    assert late < 20 < 60 < early


@pytest.mark.parametrize(("given", "own"), [(torch.float64, torch.float32), (torch.float32, torch.bfloat16)])
def test_an_input_of_another_type_than_the_model_is_an_error_that_names_both(given, own):
    model, x = CASES["pooled"].make(dtype=own)
    names = [str(dtype).removeprefix("torch.") for dtype in (given, own)]
    with pytest.raises(InputError, match="the input is {}, but the model's parameters are {}".format(*names)) as caught:
        GradCAM(model, "features").attribute(x.to(given), 1)
    assert f"pass x.to(torch.{names[1]})" in str(caught.value)
    GradCAM(model, "features").attribute(x, 1)


def test_a_model_that_brings_its_input_to_its_own_type_is_explained_and_its_own_errors_stay():
    model, x = CASES["pooled"].make(dtype=torch.float32)

    class Bringing(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, x):
            return self.model(x.float())

    expected = GradCAM(model, "features").attribute(x, 1)
    assert GradCAM(Bringing(), "model.features").attribute(x.double(), 1).equal(expected)
    with pytest.raises(RuntimeError, match="channels"):
        GradCAM(Bringing(), "model.features").attribute(x.double()[:, :1], 1)
