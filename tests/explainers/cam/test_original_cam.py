"""The original CAM: its numbers, how its head is found, and every way in which a head is not linear in the layer."""

import pytest
import torch
from torch import nn

from camscope.errors import LayerError, ModelError, TargetError
from camscope.explainers import CAM, Contrast, FinerCAM, GradCAM, HiResCAM
from camscope.targets import Difference
from tests.nets import CASES, Flat, Pooled, Tokens, conv

pytestmark = pytest.mark.filterwarnings("ignore::camscope.errors.CamscopeWarning")


class Headed(nn.Module):
    """Features as they are, then `tail`, then the class scores."""

    def __init__(self, *tail, channels=6):
        super().__init__()
        self.features, self.tail = nn.Conv2d(3, channels, 3), nn.Sequential(*tail)

    def forward(self, x):
        return self.tail(self.features(x)).flatten(1)


class Reduced(nn.Module):
    """The mean, the sum or the maximum over space."""

    def __init__(self, how):
        super().__init__()
        self.how = how

    def forward(self, x):
        return getattr(x.flatten(2), self.how)(2)


class Plus(nn.Module):
    def forward(self, x):
        return x + 7


def inputs(samples=3, dtype=torch.float64):
    return torch.randn(samples, 3, 8, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)


def built(*tail, **keywords):
    torch.manual_seed(1)
    return Headed(*tail, **keywords).double().eval()


def test_two_channels_by_hand():
    model = Pooled(nn.MaxPool2d(1), 2, classes=3).double()
    model.head.weight.data[1] = torch.tensor([2.0, -3.0])
    x = torch.tensor([[[[1.0, 2.0], [0.0, 1.0]], [[2.0, 0.0], [1.0, -1.0]]]], dtype=torch.float64)
    assert CAM(model, "features").attribute(x, 1)[0].tolist() == [[2.0 - 6, 4.0], [-3.0, 2 + 3.0]]


def test_its_mean_is_the_score_without_the_bias_and_grad_cam_its_positive_part():
    for case in ("pooled", "channels last", "signal", "volume"):
        model, x = CASES[case].make(dtype=torch.float64)
        model.head.weight.data -= 0.2  # so that the maps have both signs
        heat = CAM(model, CASES[case].layer).attribute(x, 2)
        torch.testing.assert_close(heat.flatten(1).mean(1), (model(x)[:, 2] - model.head.bias[2]).detach())
        assert (heat < 0).any()
        grad_cam = GradCAM(model, CASES[case].layer).attribute(x, 2)
        torch.testing.assert_close(heat.relu() / heat[0].numel(), grad_cam, rtol=1e-11, atol=1e-15)


def linear(classes=4, channels=6):
    return nn.Linear(channels, classes)


LINEAR = {
    "mean and dropout": lambda: (Reduced("mean"), nn.Dropout(0.5), linear()),
    "sum": lambda: (Reduced("sum"), linear()),
    "no bias": lambda: (Reduced("mean"), nn.Linear(6, 4, bias=False)),
    "a convolution after the pooling": lambda: (nn.AdaptiveAvgPool2d(1), nn.Conv2d(6, 4, 1)),
    "a convolution before the pooling": lambda: (nn.Conv2d(6, 4, 1), nn.AdaptiveAvgPool2d(1)),
    "a constant added": lambda: (Reduced("mean"), linear(), Plus()),
    "one output": lambda: (Reduced("mean"), linear(1)),
    "one output and a constant": lambda: (Reduced("mean"), linear(1), Plus()),
    "an idle head after it": lambda: (Reduced("mean"), linear(), Idle()),
}


class Idle(nn.Module):
    """A head of the same shape that only looks on."""

    def __init__(self):
        super().__init__()
        self.auxiliary = linear()

    def forward(self, y):
        self.auxiliary(y.new_zeros(1, 6))
        return y


@pytest.mark.parametrize("name", LINEAR)
def test_linear_tails_are_found_whatever_they_are_made_of(name):
    model, x = built(*LINEAR[name]()), inputs()
    heat = CAM(model, "features").attribute(x, 0)
    head = next(module for module in model.tail if isinstance(module, nn.Linear | nn.Conv2d))
    row = head.weight.detach()[0].view(6, 1, 1)
    torch.testing.assert_close(heat, (row * model.features(x).detach()).sum(1), rtol=1e-12, atol=1e-14)
    cells = 1 if name == "sum" else heat[0].numel()
    torch.testing.assert_close(heat, cells * HiResCAM(model, "features").attribute(x, 0), rtol=1e-10, atol=1e-13)


NOT_LINEAR = {
    "a ReLU between": lambda: (nn.ReLU(), Reduced("mean"), linear()),
    "a norm after the pooling": lambda: (Reduced("mean"), nn.LayerNorm(6), linear()),
    "a maximum": lambda: (Reduced("amax"), linear()),
    "a ReLU behind the head": lambda: (nn.Conv2d(6, 4, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1)),
    "a log-softmax": lambda: (Reduced("mean"), linear(), nn.LogSoftmax(1)),
    "a sigmoid": lambda: (Reduced("mean"), linear(), nn.Sigmoid()),
    "a layer between": lambda: (nn.Conv2d(6, 6, 3), Reduced("mean"), linear()),
    "a gate": lambda: (nn.SiLU(), Reduced("mean"), linear()),
}


@pytest.mark.parametrize("name", NOT_LINEAR)
def test_what_is_not_linear_is_refused(name):
    model = built(*NOT_LINEAR[name]())
    with pytest.raises(ModelError, match=r"the class scores are not 'tail\.\d' of the mean or sum of layer 'features'"):
        CAM(model, "features").attribute(inputs(), 0)


@pytest.mark.parametrize(
    "tail", [(nn.Flatten(), nn.Linear(6 * 30, 4)), (Reduced("mean"), nn.Linear(6, 5), nn.Linear(5, 4))]
)
def test_without_a_head_of_the_right_size_it_says_what_it_looked_for(tail):
    with pytest.raises(
        ModelError, match="no Linear or 1x1 convolution maps the 6 channels of layer 'features' to 4 cl"
    ):
        CAM(built(*tail), "features").attribute(inputs(), 0)


def test_the_layer_that_is_pooled_is_linear_and_the_one_before_its_norm_is_not():
    """As in Swin: a LayerNorm on channels last, the mean, the head."""

    class Swin(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.norm, self.head = nn.Conv2d(3, 6, 4, 4), nn.LayerNorm(6), nn.Linear(6, 3)

        def forward(self, x):
            return self.head(self.norm(self.stem(x).permute(0, 2, 3, 1)).mean((1, 2)))

    model, x = Swin().double().eval(), torch.randn(2, 3, 24, 16, dtype=torch.float64)
    assert CAM(model, "norm").attribute(x).shape == (2, 6, 4)
    with pytest.raises(ModelError, match="not 'head' of the mean or sum of layer 'stem'"):
        CAM(model, "stem").attribute(x)


def test_a_prefix_token_that_is_pooled_too_is_more_than_the_layer():
    class Mean(Tokens):
        def forward(self, x):
            x = self.embed(x).flatten(2).transpose(1, 2)
            return self.head(self.block(torch.cat([self.prefix.expand(len(x), -1, -1), x], 1)).mean(1))

    x = torch.randn(2, 3, 24, 16)
    assert CAM(Mean(prefix=0).eval(), "block").attribute(x).shape == (2, 6, 4)
    with pytest.raises(ModelError, match="or 'head' also reads other layers"):
        CAM(Mean(prefix=1).eval(), "block").attribute(x)


def test_the_head_by_name_and_by_module_and_the_wrong_one():
    model, x = built(Reduced("mean"), linear(), Idle()), inputs()
    right = CAM(model, "features").attribute(x, 1)
    for head in ("tail.1", model.tail[1]):
        tool = CAM(model, "features", head=head)
        assert torch.equal(tool.attribute(x, 1), right)
        assert tool.parameters["head"] == "tail.1"
    with pytest.raises(ModelError, match=r"not 'tail\.2\.auxiliary' of the mean or sum"):
        CAM(model, "features", head="tail.2.auxiliary").attribute(x, 1)
    with pytest.raises(LayerError, match=r"head 'tail\.0' is a Reduced; expected a Linear or a 1x1 convolution"):
        CAM(model, "features", head="tail.0")
    with pytest.raises(LayerError, match=r"head 'features' is a Conv2d; expected"):
        CAM(model, "features", head="features")
    flat = Flat(nn.MaxPool2d(1), 8)
    with pytest.raises(ModelError, match="head 'head' does not map the 2 channels of layer 'features' to 3 classes"):
        CAM(flat, "features", head="head").attribute(torch.randn(1, 2, 2, 2))


def test_a_layer_that_is_the_score_map_already_is_told_from_the_one_before_its_head():
    """As in SqueezeNet: a 1x1 convolution makes the class scores of each cell, and their mean is the output."""
    head = nn.Conv2d(6, 3, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), *head).double().eval()
    with pytest.raises(ModelError, match="to 3 classes; name the layer before the head, or use gradcam"):
        CAM(model).attribute(inputs(), 0)
    assert CAM(model, "1", layout="channels_first").attribute(inputs(), 0).shape == (3, 6, 5)
    with pytest.raises(ModelError, match="to 3 classes; use gradcam"):
        CAM(Flat(nn.MaxPool2d(1), 8), "features").attribute(torch.randn(1, 2, 2, 2))


def test_dropout_that_is_on_is_named():
    model = built(Reduced("mean"), nn.Dropout(0.5), linear()).train()
    with pytest.raises(ModelError, match=r"the class scores differ .* because dropout 'tail\.1' is on"):
        CAM(model, "features", mode="as_is").attribute(inputs(), 0)
    CAM(model, "features").attribute(inputs(), 0)


class Counting(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model, self.passes = model, 0

    def forward(self, x):
        self.passes += 1
        return self.model(x)


@pytest.mark.usefixtures("passes_of_maps_alone")
@pytest.mark.parametrize(("tail", "passes"), [("mean and dropout", 1), ("sum", 1), ("a constant added", 4)])
def test_one_pass_where_the_scores_are_the_heads_and_four_where_a_constant_is_added(tail, passes):
    counting = Counting(built(*LINEAR[tail]()))
    CAM(counting, "model.features").attribute(inputs(), 0)
    assert counting.passes == passes


@pytest.mark.parametrize("tail", ["mean and dropout", "sum", "a constant added"])
def test_of_a_difference_the_rows_differ_whatever_else_the_batch_is_asked(tail):
    model, x = built(*LINEAR[tail]()), inputs()
    tool = CAM(model, "features")
    rather = tool.attribute(x, 2) - tool.attribute(x, 0)
    torch.testing.assert_close(Contrast(tool, 2, 0).attribute(x), rather, rtol=1e-12, atol=1e-14)
    mixed = tool.attribute(x, [Difference(2, 0), 1, None])
    torch.testing.assert_close(mixed[0], rather[0], rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(mixed[1:], torch.cat([tool.attribute(x, 1)[1:2], tool.attribute(x)[2:]]))


@pytest.mark.parametrize("method", [CAM, FinerCAM])
def test_what_is_refused_is_named(method):
    tool = method(built(*LINEAR["sum"]()), "features")
    with pytest.raises(TargetError, match=r"a callable.*: pass a class, .*or use gradcam"):
        tool.attribute(inputs(), lambda output: output[:, 1])
    if method is FinerCAM:
        with pytest.raises(TargetError, match="a difference or a callable: pass a class"):
            Contrast(tool, 2, 0).attribute(inputs())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_told_from_what_is_not_linear(dtype):
    torch.manual_seed(0)
    for tail, linear_one in ((LINEAR["mean and dropout"], True), (NOT_LINEAR["a ReLU between"], False)):
        model = Headed(*tail()).to(dtype).eval()
        tool = CAM(model, "features")
        if linear_one:
            assert tool.attribute(inputs(dtype=dtype), 0).isfinite().all()
        else:
            with pytest.raises(ModelError):
                tool.attribute(inputs(dtype=dtype), 0)
    model = Headed(*LINEAR["mean and dropout"]()).eval()
    exact = CAM(model, "features").attribute(inputs(dtype=torch.float32), 0)
    rough = CAM(model, "features", precision="bf16").attribute(inputs(dtype=torch.float32), 0)
    torch.testing.assert_close(rough, exact, rtol=0, atol=float(0.03 * exact.abs().max()))


def test_without_a_layer_it_takes_the_one_that_is_pooled():
    torch.manual_seed(0)
    model = Pooled(conv(), 6).eval()
    explanation = CAM(model).explain(torch.randn(3, 16, 12), 1)
    assert explanation.layer == "features"
    assert (explanation.method, explanation.parameters.get("head")) == ("cam", None)
