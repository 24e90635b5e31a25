"""Unusual tensors in every place where a user can pass one: a right result, or one error that says what to pass."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode

from camscope.errors import CamscopeError, ImageError, InputError, LayerError, ModelError, PreprocessError, TargetError
from camscope.explainers import RISE, ExpectedGradients, GradCAM, IntegratedGradients, KernelSHAP, Occlusion, Saliency
from camscope.explanation import Explanation
from camscope.images.photo_reader import read_photo
from camscope.loaded_model_metadata_and_weight_digest import compute_model_digest
from camscope.metrics import METRICS, PerturbationTest, scoring_scope
from camscope.metrics.imputation import build_imputer
from camscope.targets import Classes, Region, Similarity
from camscope.unusual_tensors import describe_unusual_tensor, to_ordinary_tensor

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore::camscope.errors.CamscopeWarning", "ignore:.*nested tensors:UserWarning"),
    pytest.mark.filterwarnings(
        "ignore:Sparse CSR tensor support:UserWarning",
        "ignore:torch.quantize_per_tensor:UserWarning",
        "ignore:The PyTorch API of MaskedTensors:UserWarning",
        "ignore:It is not recommended to create a MaskedTensor:UserWarning",
    ),
]


def fake(x):
    with FakeTensorMode():
        return torch.empty(x.shape, dtype=x.dtype)


def functional(x):
    with FunctionalTensorMode():
        return FunctionalTensor.to_functional(x)


def escaped_from_vmap(x):
    escaped = []
    torch.func.vmap(lambda row: (escaped.append(row), row)[1])(x)
    return escaped[0]


WITHOUT_VALUES = {
    "meta": (lambda x: x.to("meta"), "on the meta device, which has no values"),
    "fake": (fake, "a FakeTensor, which has no values"),
    "functional": (functional, "part of a transform of torch.func"),
    "functionalized": (torch._to_functional_tensor, "part of a transform of torch.func"),
    "vmap": (escaped_from_vmap, "part of a transform of torch.func"),
    "lazy": (lambda x: nn.UninitializedParameter(), "an uninitialized parameter"),
}
WITH_VALUES = {
    "sparse_coo": (lambda x: x.to_sparse(), r"layout sparse_coo.*\.to_dense\(\)"),
    "sparse_csr": (lambda x: x.flatten(1).to_sparse_csr(), r"layout sparse_csr.*\.to_dense\(\)"),
    "mkldnn": (lambda x: x.to_mkldnn(), r"layout _mkldnn.*\.to_dense\(\)"),
    "nested": (lambda x: torch.nested.nested_tensor(list(x)), "a nested tensor.*to_padded_tensor"),
    "jagged": (
        lambda x: torch.nested.nested_tensor(list(x), layout=torch.jagged),
        "a nested tensor.*to_padded_tensor",
    ),
    "quantized": (lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8), r"quantized tensor.*\.dequantize\(\)"),
    "masked": (lambda x: torch.masked.masked_tensor(x, x > 0), r"a masked tensor.*\.to_tensor\(0\.0\)"),
    "bits8": (lambda x: x.to(torch.uint8).view(torch.bits8), r"a tensor of torch\.bits8.*view\(torch\.uint8\)"),
}
DTYPES = {
    "float8": (lambda x: x.to(torch.float8_e4m3fn), r"a tensor of torch\.float8_e4m3fn.*\.float\(\)"),
    "uint16": (lambda x: x.abs().to(torch.uint16), r"a tensor of torch\.uint16.*\.float\(\)"),
    "uint32": (lambda x: x.abs().to(torch.uint32), r"a tensor of torch\.uint32.*\.float\(\)"),
    "uint64": (lambda x: x.abs().to(torch.uint64), r"a tensor of torch\.uint64.*\.float\(\)"),
}
LAYOUTS = {**WITHOUT_VALUES, **WITH_VALUES}
ALL = {**LAYOUTS, **DTYPES}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 6, 3), nn.Linear(6, 4)

    def scores(self, x):
        return self.head(self.conv(x).relu().mean((2, 3)))

    def forward(self, x, factor=None):
        return self.scores(x) if factor is None else self.scores(x) * factor


def model():
    torch.manual_seed(0)
    return Net().eval()


def x():
    torch.manual_seed(0)
    return torch.randn(2, 3, 8, 8)


def test_an_ordinary_tensor_has_no_unusual_kind():
    for dtype in (torch.float16, torch.bfloat16, torch.float64, torch.int8, torch.bool, torch.complex64):
        assert describe_unusual_tensor(torch.ones(2, dtype=dtype)) is None
    assert describe_unusual_tensor(nn.Parameter(torch.ones(2))) is None


@pytest.mark.parametrize("kind", [*WITH_VALUES, *DTYPES])
def test_the_replacement_is_code_that_makes_an_ordinary_tensor(kind):
    unusual = ALL[kind][0](x())
    replaced = eval(describe_unusual_tensor(unusual).replacement, {"torch": torch, "x": unusual})
    assert describe_unusual_tensor(replaced) is None
    if kind not in DTYPES:
        torch.testing.assert_close(to_ordinary_tensor(unusual).float(), replaced)


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("call", ["attribute", "explain"])
def test_an_unusual_input_is_an_error(kind, call):
    convert, words = ALL[kind]
    for tool in (GradCAM(model(), "conv"), Saliency(model()), RISE(model(), n_samples=4)):
        with pytest.raises(InputError, match=f"the input is .*{words}"):
            getattr(tool, call)(convert(x()[:1]), 1)


@pytest.mark.parametrize("kind", [*LAYOUTS, "uint16"])
def test_an_unusual_baseline_is_an_error(kind):
    (convert, words), net = ALL[kind], model()
    gradients = IntegratedGradients(net, n_steps=2)
    for call in (
        lambda value: IntegratedGradients(net, n_steps=2, baseline=value),
        lambda value: Occlusion(net, baseline=["zero", value]),
        lambda value: ExpectedGradients(net, background=value),
        lambda value: gradients.attribute(x(), 1, baselines=value),
        lambda value: gradients.explain(x()[0], 1, baselines=value),
        lambda value: gradients.explain_batch(list(x()), 1, baselines=value),
        lambda value: IntegratedGradients(net, n_steps=2, baseline=lambda _: value).attribute(x(), 1),
    ):
        with pytest.raises(InputError, match=f"the baseline is .*{words}"):
            call(convert(x()))


def test_a_baseline_of_float8_counts_as_its_numbers():
    baseline = x().to(torch.float8_e4m3fn)
    expected = IntegratedGradients(model(), n_steps=2, baseline=baseline.float()).attribute(x(), 1)
    torch.testing.assert_close(IntegratedGradients(model(), n_steps=2, baseline=baseline).attribute(x(), 1), expected)


@pytest.mark.parametrize("kind", WITHOUT_VALUES)
def test_an_additional_argument_without_values_is_an_error(kind):
    convert, words = ALL[kind]
    for tool in (GradCAM(model(), "conv"), RISE(model(), n_samples=4)):
        for call in (
            lambda value, tool=tool: tool.attribute(x(), 1, value),
            lambda value, tool=tool: tool.attribute(x(), 1, additional_forward_args={"factor": [value]}),
            lambda value, tool=tool: tool.explain_batch(list(x()), 1, factor=value),
        ):
            with pytest.raises(
                InputError, match=rf"the additional argument (0|'factor'(\[0\])?) of the model is .*{words}"
            ):
                call(convert(torch.rand(2, 4)))


@pytest.mark.parametrize("kind", ["mkldnn", "nested", "quantized", "bits8", "float8"])
def test_an_additional_argument_that_the_model_cannot_compute_with_is_an_error(kind):
    convert, words = ALL[kind]
    for tool in (GradCAM(model(), "conv"), RISE(model(), n_samples=4)):
        for arguments in ((value := convert(torch.rand(2, 4))), (value,)), {"factor": value}:
            with pytest.raises(InputError, match=f"additional argument (0|'factor') is .*{words}"):
                tool.attribute(x(), 1, additional_forward_args=arguments)


class Graph(Net):
    """Multiplies its scores by a sparse matrix that all samples share."""

    def forward(self, x, matrix):
        return torch.sparse.mm(matrix, self.scores(x).T).T


def test_an_additional_argument_that_the_model_can_compute_with_is_right():
    net, matrix = Graph().eval(), torch.rand(4, 4)
    for tool in (GradCAM(net, "conv"), Saliency(net), RISE(net, n_samples=8, seed=1)):
        torch.testing.assert_close(tool.attribute(x(), 1, matrix.to_sparse()), tool.attribute(x(), 1, matrix))


def test_a_sparse_argument_is_not_split_into_samples():
    net, rows = model(), torch.rand(2, 4).to_sparse()
    with pytest.raises(
        InputError, match=r"argument 'factor' is .*cannot be split into 2 samples: pass value\.to_dense"
    ):
        Saliency(net).explain_batch([x()[0], x()[1][:, :6]], 1, factor=rows)


PLAIN = {
    "nested": lambda weight: torch.nested.to_padded_tensor(weight, 0.0),
    "quantized": torch.Tensor.dequantize,
    "masked": lambda weight: weight.to_tensor(0.0),
    "float8": torch.Tensor.float,
    "uint16": torch.Tensor.float,
    "bits8": lambda weight: weight.view(torch.uint8).float(),
    **dict.fromkeys(["sparse_coo", "sparse_csr", "mkldnn"], torch.Tensor.to_dense),
}


class Stored(Net):
    """Converts its unusual weight in the forward."""

    def __init__(self, kind, as_buffer):
        super().__init__()
        self.kind, weight = kind, self.head.weight.detach()
        del self.head.weight
        if as_buffer:
            self.head.register_buffer("weight", ALL[kind][0](weight))
        else:
            self.head.weight = nn.Parameter(ALL[kind][0](weight), requires_grad=False)

    def forward(self, x):
        return F.linear(self.conv(x).relu().mean((2, 3)), PLAIN[self.kind](self.head.weight), self.head.bias)


@pytest.mark.parametrize("kind", PLAIN)
@pytest.mark.parametrize("as_buffer", [False, True])
@pytest.mark.one_in(3)
def test_an_unusual_weight_that_the_model_can_compute_with_is_right(kind, as_buffer):
    net, plain = Stored(kind, as_buffer).eval(), Net().eval()
    state = {name: value for name, value in net.state_dict().items() if name != "head.weight"}
    plain.load_state_dict({**state, "head.weight": PLAIN[kind](net.head.weight)})
    for make in (lambda net: GradCAM(net, "conv"), Saliency, lambda net: RISE(net, n_samples=4)):
        torch.testing.assert_close(make(net).attribute(x(), 1), make(plain).attribute(x(), 1))
    explanation = GradCAM(net, "conv").explain(x()[0], 1)
    assert isinstance(explanation, Explanation)
    assert explanation.model == compute_model_digest(net)
    other = Stored(kind, as_buffer).eval()
    assert compute_model_digest(other) != explanation.model


@pytest.mark.parametrize("kind", [k for k in PLAIN if k != "sparse_csr"])
def test_an_unusual_weight_that_the_layer_does_not_support_is_an_error(kind):
    net, weight = model(), model().head.weight.detach()
    del net.head.weight
    net.head.weight = nn.Parameter(ALL[kind][0](weight), requires_grad=False)
    for tool in (GradCAM(net, "conv"), RISE(net, n_samples=4)):
        with pytest.raises(ModelError, match=rf"its weight head\.weight is .*{ALL[kind][1]}"):
            tool.attribute(x(), 1)


@pytest.mark.parametrize("kind", ["meta", "fake", "functional", "functionalized", "vmap"])
def test_a_weight_without_values_is_an_error(kind):
    net, weight = model(), model().head.weight.detach()
    del net.head.weight
    net.head.register_buffer("weight", ALL[kind][0](weight))
    for make in (lambda net: GradCAM(net, "conv"), Saliency):
        with pytest.raises(ModelError, match=rf"head\.weight of Net is .*{ALL[kind][1]}"):
            make(net)


@pytest.mark.parametrize("kind", [k for k in ALL if k != "sparse_csr"])
def test_an_unusual_image_or_result_of_a_preprocessing_is_an_error(kind):
    convert, words = ALL[kind]
    with pytest.raises(ImageError, match="the image is"):
        read_photo(convert(x()[0]))
    tool = GradCAM(model(), "conv", preprocess=lambda image: convert(torch.rand(3, 8, 8)))
    with pytest.raises(PreprocessError, match=f"the result of the preprocessing .* is .*{words}"):
        tool.explain(np.zeros((8, 8, 3), np.uint8), 1)


@pytest.mark.parametrize("kind", ALL)
def test_an_unusual_result_of_reshape_is_an_error(kind):
    convert, words = ALL[kind]
    tool = GradCAM(model(), "conv", reshape=lambda output: convert(output.detach()))
    with pytest.raises(LayerError, match=f"the result of reshape= for layer 'conv' is .*{words}"):
        tool.attribute(x(), 1)


@pytest.mark.parametrize("kind", DTYPES)
def test_a_map_of_another_dtype_counts_as_its_numbers(kind):
    values = torch.randint(0, 9, (2, 8)).float()
    assert METRICS.find("sparseness")(DTYPES[kind][0](values)) == METRICS.find("sparseness")(values)


@pytest.mark.parametrize("kind", LAYOUTS)
def test_an_unusual_map_mask_or_imputation_is_an_error(kind):
    (convert, words), values, mask = ALL[kind], torch.rand(2, 8), np.eye(2, 8, dtype=bool)
    with scoring_scope(model(), x(), 1) as scorer:
        for call in (
            lambda: METRICS.find("sparseness")(convert(values)),
            lambda: METRICS.find("pointing-game")(convert(values), mask),
            lambda: METRICS.find("pointing-game")(values.numpy(), convert(values)),
            lambda: PerturbationTest(convert(torch.rand(2, 8, 8)), scorer),
            lambda: build_imputer(convert(x()), x()),
        ):
            with pytest.raises(InputError, match=words):
                call()


def test_a_model_and_a_call_under_fake_tensor_mode_are_errors():
    with FakeTensorMode():
        net = Net().eval()
    with pytest.raises(ModelError, match=r"is a FakeTensor.*expected a tensor made outside of FakeTensorMode"):
        GradCAM(net, "conv")
    tool, image = GradCAM(model(), "conv"), x()
    with FakeTensorMode(), pytest.raises(InputError, match="call camscope outside of it"):
        tool.attribute(image, 1)


class Converting(Net):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def forward(self, x):
        return ALL[self.kind][0](self.scores(x))


@pytest.mark.parametrize("kind", [*LAYOUTS, "float8"])
@pytest.mark.parametrize("target", [None, 1])
def test_an_unusual_output_is_an_error(kind, target):
    net = Converting(kind).eval()
    for tool in (GradCAM(net, "conv"), Saliency(net)):
        with pytest.raises(TargetError, match=f"the model's output is .*{ALL[kind][1]}"):
            tool.attribute(x(), target)


@pytest.mark.parametrize("kind", [k for k in ALL if k not in ("sparse_csr", "jagged")])
def test_an_unusual_result_of_a_callable_target_is_an_error(kind):
    with pytest.raises(TargetError, match=f"the target '<lambda>' returned .*{ALL[kind][1]}"):
        Saliency(model()).attribute(x(), lambda output: ALL[kind][0](output[:, 1]))


class Side(Net):
    """Computes an unusual tensor that its scores do not need."""

    def __init__(self, kind):
        super().__init__()
        self.side = Converter(kind)

    def forward(self, x):
        self.side(activation := self.conv(x))
        return self.head(activation.relu().mean((2, 3)))


class Converter(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def forward(self, x):
        return ALL[self.kind][0](x)


@pytest.mark.parametrize("kind", ALL)
def test_an_unusual_layer_has_no_map_and_does_not_disturb_the_others(kind):
    net, plain = Side(kind).eval(), Net().eval()
    plain.load_state_dict(net.state_dict())
    with pytest.raises(LayerError, match="layer 'side' returns"):
        GradCAM(net, "side").attribute(x(), 1)
    torch.testing.assert_close(GradCAM(net, "conv").attribute(x(), 1), GradCAM(plain, "conv").attribute(x(), 1))


@pytest.mark.parametrize("kind", ["meta", "fake", "sparse_coo", "nested", "quantized", "masked", "bits8"])
def test_an_unusual_target_mask_reference_or_label_map_is_an_error(kind):
    convert, words = ALL[kind]
    net, labels = model(), convert(torch.ones(2, 8))
    tool = Saliency(net)
    for call in (
        lambda: tool.attribute(x(), labels),
        lambda: tool.explain_batch(list(x()), labels),
        lambda: Classes(labels),
        lambda: Similarity(labels),
        lambda: Similarity([labels]),
        lambda: tool.attribute(x(), Region(1, mask=labels)),
        lambda: KernelSHAP(net, segments=labels, n_samples=4).attribute(x(), 1),
    ):
        with pytest.raises(CamscopeError, match=words.partition(".*")[0]):
            call()
