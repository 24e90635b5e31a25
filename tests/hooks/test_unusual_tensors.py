"""Sparse, nested, quantized and fake tensors, lazy layers and transforms of torch.func: one error each, which says what to do."""

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from camscope.errors import InputError, LayerError, ModelError, TargetError
from camscope.explainers import RISE, GradCAM, IntegratedGradients, Saliency
from camscope.hooks import extract_features, inspect_layers

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore::camscope.errors.CamscopeWarning", "ignore:.*nested tensors:UserWarning"),
    pytest.mark.filterwarnings(
        "ignore:Sparse CSR tensor support:UserWarning", "ignore:torch.quantize_per_tensor:UserWarning"
    ),
    pytest.mark.filterwarnings(
        "ignore:.torch.jit.script.:FutureWarning", "ignore:.torch.jit.script.:DeprecationWarning"
    ),
]


class Net(nn.Module):
    """A convolution, something done to its output, and a head."""

    def __init__(self, between=nn.Identity):
        super().__init__()
        self.conv, self.between, self.head = nn.Conv2d(3, 6, 3), between(), nn.Linear(6, 4)

    def forward(self, x):
        return self.head(self.between(self.conv(x).relu()).mean((2, 3)))


def x():
    torch.manual_seed(0)
    return torch.randn(2, 3, 8, 8)


def tools(model):
    for tool in (
        GradCAM(model, "conv"),
        Saliency(model),
        IntegratedGradients(model, n_steps=2),
        RISE(model, n_samples=4),
    ):
        yield tool.attribute
        yield lambda x, target, tool=tool: tool.explain(x[0] if x.ndim == 4 else x, target)


INPUTS = {
    "sparse_coo": (lambda x: x.to_sparse(), r"layout sparse_coo; expected an ordinary .* x\.to_dense\(\)"),
    "sparse_csr": (lambda x: x[0, 0].to_sparse_csr(), r"layout sparse_csr; .* x\.to_dense\(\)"),
    "mkldnn": (lambda x: x.to_mkldnn(), r"layout _mkldnn; .* x\.to_dense\(\)"),
    "nested": (lambda x: torch.nested.nested_tensor(list(x)), r"a nested tensor; .*to_padded_tensor"),
}


@pytest.mark.parametrize("kind", INPUTS)
def test_an_input_that_is_no_dense_array_is_an_error_that_names_the_conversion(kind):
    convert, words = INPUTS[kind]
    for tool in (GradCAM(Net().eval(), "conv"), RISE(Net().eval(), n_samples=4)):
        for call in (tool.attribute, tool.explain):
            with pytest.raises(InputError, match=words):
                call(convert(x()), 1)


TRANSFORMS = {
    "vmap": lambda call, x: torch.func.vmap(lambda one: call(one[None], 1))(x),
    "grad": lambda call, x: torch.func.grad(lambda one: call(one, 1).sum())(x),
    "jvp": lambda call, x: torch.func.jvp(lambda one: call(one, 1), (x,), (x,)),
    "functionalize": lambda call, x: torch.func.functionalize(lambda one: call(one, 1))(x),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_inside_a_transform_the_error_says_to_call_it_outside(transform):
    for call in tools(Net().eval()):
        with pytest.raises(
            InputError, match=r"torch\.func .*: call camscope outside of torch.func, with the whole batch"
        ):
            TRANSFORMS[transform](call, x())


def test_lazy_layers_are_an_error_before_anything_runs_and_stay_lazy():
    model = nn.Sequential(nn.LazyConv2d(6, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LazyLinear(4))
    for call in (
        GradCAM,
        Saliency,
        lambda model: inspect_layers(model, x()),
        lambda model: extract_features(model, "0", x()),
    ):
        with pytest.raises(
            ModelError, match=r"layer '0' \(LazyConv2d\) has no weights yet: before explaining, run model\(x\) once"
        ):
            call(model.eval())
    assert isinstance(model[0], nn.LazyConv2d)
    model(x())
    assert GradCAM(model, "0").attribute(x(), 1).isfinite().all()


class Sparse(nn.Module):
    def forward(self, x):
        return x.to_sparse()


class Nested(nn.Module):
    def forward(self, x):
        return torch.nested.as_nested_tensor(list(x.unbind()))


class SparseNet(Net):
    def forward(self, x):
        return self.head(self.between(self.conv(x).relu()).to_dense().mean((2, 3)))


class NestedNet(Net):
    def forward(self, x):
        return self.head(self.between(self.conv(x).relu()).to_padded_tensor(0.0).mean((2, 3)))


@pytest.mark.parametrize(
    ("model", "words"), [(SparseNet(Sparse), "layout sparse_coo"), (NestedNet(Nested), "a nested tensor")]
)
def test_a_layer_without_a_dense_output_has_no_map_and_the_others_have(model, words):
    with pytest.raises(
        LayerError, match=rf"layer 'between' returns .*{words}.*choose a layer that returns an ordinary"
    ):
        GradCAM(model.eval(), "between").attribute(x(), 1)
    plain = Net()
    plain.load_state_dict(model.state_dict())
    for kind, settings in ((GradCAM, {"layer": "conv"}), (RISE, {"n_samples": 8})):
        expected = kind(plain.eval(), **settings).attribute(x(), 1)
        torch.testing.assert_close(kind(model, **settings).attribute(x(), 1), expected)


class ByImage(nn.Module):
    """Runs each image by itself, under vmap."""

    def __init__(self):
        super().__init__()
        self.net = Net()

    def forward(self, x):
        return torch.func.vmap(lambda one: self.net(one[None])[0])(x)


def test_a_layer_inside_a_models_own_vmap_is_an_error_and_the_input_can_be_explained():
    model = ByImage().eval()
    with pytest.raises(LayerError, match=r"layer 'net\.conv' returns part of a transform of torch\.func"):
        GradCAM(model, "net.conv").attribute(x(), 1)
    torch.testing.assert_close(Saliency(model).attribute(x(), 1), Saliency(model.net).attribute(x(), 1))


def test_a_functional_call_in_a_model_is_explained_like_a_plain_one():
    class Functional(ByImage):
        def forward(self, x):
            weights = {name: value * 1 for name, value in self.net.named_parameters()}
            return torch.func.functional_call(self.net, weights, (x,))

    model = Functional().eval()
    expected = GradCAM(model.net, "conv").attribute(x(), 1)
    torch.testing.assert_close(GradCAM(model, "net.conv").attribute(x(), 1), expected)


def test_scores_that_are_no_dense_array_are_an_error():
    class SparseOutput(Net):
        def forward(self, x):
            return super().forward(x).to_sparse()

    tool = Saliency(SparseOutput().eval())
    with pytest.raises(TargetError, match=r"the model's output is a tensor of layout sparse_coo; .*to_dense\(\)"):
        tool.attribute(x(), 1)

    def sparse(output):
        return output.to_dense()[:, 1].to_sparse()

    with pytest.raises(TargetError, match=r"the target 'sparse' returned a tensor of layout sparse_coo"):
        tool.attribute(x(), sparse)
    heat = tool.attribute(x(), lambda output: output.to_dense()[:, 1])
    assert heat.isfinite().all()


def quantized(x):
    return torch.quantize_per_tensor(x, 0.1, 0, torch.qint8)


def fake(x):
    with FakeTensorMode():
        return torch.empty(x.shape, dtype=x.dtype)


@pytest.mark.parametrize(
    ("change", "message"),
    [(quantized, r"a quantized tensor; .*pass x\.dequantize\(\)"), (fake, r"a FakeTensor.*outside of FakeTensorMode")],
)
@pytest.mark.parametrize("call", ["explain", "attribute"])
def test_quantized_and_fake_inputs_are_an_error_that_says_what_to_pass(change, message, call):
    x = torch.randn(1, 3, 8, 8)
    with pytest.raises(InputError, match=message):
        getattr(GradCAM(Net().eval(), "conv"), call)(change(x), 1)


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (torch.Tensor.to_sparse, "of layout sparse_coo"),
        (lambda target: quantized(target.float()), "a quantized tensor"),
        (fake, "a FakeTensor"),
        (lambda target: target.to("meta"), "on the meta device"),
        (lambda target: torch.nested.nested_tensor([target]), "a nested tensor"),
    ],
)
def test_targets_without_plain_numbers_are_an_error_that_says_what_to_pass(change, kind):
    with pytest.raises(TargetError, match=f"the target is .*{kind}.*: expected a class index, or an ordinary tensor"):
        GradCAM(Net().eval(), "conv").attribute(torch.randn(1, 3, 8, 8), change(torch.tensor([1])))
