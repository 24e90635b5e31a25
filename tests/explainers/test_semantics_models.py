"""Models: every kind that can be explained, and one clear error for each kind that cannot."""

import threading
import warnings
from collections import OrderedDict, namedtuple
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

from camscope import Layout
from camscope.errors import InputError, LayerError, ModelError, TargetError
from camscope.explainers import METHODS, GradCAM, HiResCAM
from camscope.explainers.core.evaluation_context import check_and_detach_input, inference_scope, inspect_model
from camscope.hooks.find_layers import find_layer, find_layers
from camscope.layers.infer_layout import infer_layout
from camscope.layers.recorded_grids_and_token_counts import LayoutHints
from camscope.targets import Box, Classes, Difference, LogProbability, Region, TextSimilarity
from camscope.targets import OutputPart as Part
from tests.nets import CASES, Plain, Tokens, plain, truth
from tests.tools import by_family_with, explainer
from tests.untouched import untouched

pytestmark = pytest.mark.filterwarnings("ignore::camscope.errors.CamscopeWarning")


def assert_truth(heat, model, x, target=1):
    torch.testing.assert_close(heat, truth(model, x, target), rtol=1e-10, atol=1e-16)


def stance():
    return torch._dynamo.eval_frame._stance.stance


# --- wrappers


def test_data_parallel():
    model, x = plain()
    wrapped = nn.DataParallel(model)
    tool = HiResCAM(wrapped, "middle")
    assert_truth(tool.attribute(x, 1), model, x)
    assert tool.explain(x[0], 1).notes == ("the eager model inside DataParallel was explained",)
    assert_truth(HiResCAM(wrapped, model.middle).attribute(x, 1), model, x)


class Holding(nn.Module):
    """A user's own module around another one."""

    def __init__(self, model):
        super().__init__()
        self.module = model

    def forward(self, x):
        return self.module(x)


WRAPPED = {
    "plain": lambda model: model,
    "DataParallel": nn.DataParallel,
    "AveragedModel": AveragedModel,
    "AveragedModel in DataParallel": lambda model: nn.DataParallel(AveragedModel(model)),
    "compiled": torch.compile,
    "compiled in DataParallel": lambda model: nn.DataParallel(torch.compile(model)),
    "a user's own": Holding,
    "compiled inside a user's own": lambda model: Holding(torch.compile(model)),
}


@pytest.mark.parametrize("name", ["middle", "module.middle", "_orig_mod.middle", "module._orig_mod.middle"])
@pytest.mark.parametrize("wrap", WRAPPED)
@pytest.mark.one_in(3)
def test_a_layer_is_found_with_and_without_the_prefix_of_any_wrapper(wrap, name):
    model, x = plain()
    wrapped = WRAPPED[wrap](model)
    assert_truth(HiResCAM(wrapped, name).attribute(x, 1), model, x)
    found = [find_layer(wrapped, name)[1], *find_layers(wrapped, name.replace("middle", "mid*")).values()]
    assert len(found) == 2
    assert all(torch.equal(one.weight, model.middle.weight) for one in found)  # AveragedModel makes a copy


def test_a_layer_that_is_called_as_a_wrapper_calls_its_model_keeps_its_name():
    model = nn.ModuleDict({"module": nn.ModuleDict({"last": nn.Identity()}), "last": nn.ReLU()})
    assert find_layer(model, "last")[0] == "last"
    assert find_layer(model, "module.last")[0] == "module.last"
    assert find_layer(model, "module")[0] == "module"
    with pytest.raises(LayerError, match=r"no layer 'module\.first'"):
        find_layer(model, "module.first")


def test_distributed_data_parallel(tmp_path):
    if not torch.distributed.is_available():
        pytest.skip("torch was built without distributed")
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model, x = plain()
        wrapped = nn.parallel.DistributedDataParallel(model)
        with untouched(model, x):
            explanation = HiResCAM(wrapped, "middle").explain(x[0], 1)
        np.testing.assert_allclose(explanation.attribution, truth(model, x[:1], 1)[0].numpy(), rtol=1e-10, atol=1e-16)
        assert explanation.notes == ("the eager model inside DistributedDataParallel was explained",)
        wrapped(x).sum().backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("how", ["function", "method", "part"])
def test_compiled_models_are_explained_in_eager_form_and_compile_again(how):
    model, x = plain()
    compilations = []

    def backend(graph, inputs):
        compilations.append(graph)
        return graph.forward

    torch.compiler.reset()
    compiled = torch.compile(model, backend=backend) if how == "function" else model
    if how == "method":
        model.compile(backend=backend)
    if how == "part":
        model.last = torch.compile(model.last, backend=backend)
    tool = HiResCAM(compiled, "middle")
    with untouched(model, x):
        heat = tool.attribute(x, 1)
        explanation = tool.explain(x[0], 1)
    assert not compilations
    assert_truth(heat, plain()[0], x)
    last = plain()[0].last(F.elu(model.before(x))).detach()
    gradient = model.head.weight[1].detach().view(1, 5, 1, 1) * last.sigmoid() * (1 - last.sigmoid()) / 64
    torch.testing.assert_close(HiResCAM(compiled, "last").attribute(x, 1), (last * gradient).sum(1))
    assert any("eager" in note for note in explanation.notes), explanation.notes
    assert stance() == "default"
    with torch.no_grad():
        compiled(x)
    assert compilations, "the caller's model is no longer compiled"


def test_the_last_of_several_threads_gives_compilation_back():
    model = plain()[0]
    model.compile(backend="eager")
    step = threading.Barrier(2, timeout=120)

    def leaves_first():
        with inference_scope(inspect_model(model), "eval"):
            step.wait()
            step.wait()
        step.wait()

    thread = threading.Thread(target=leaves_first)
    thread.start()
    step.wait()
    with inference_scope(inspect_model(model), "eval"):
        step.wait()
        step.wait()
        assert stance() == "force_eager", "the other thread took the stance with it"
    thread.join()
    assert stance() == "default"


# --- models that cannot be explained


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_frozen_script_inside_a_model_has_no_mode_to_put_back():
    class Partly(nn.Module):
        def __init__(self):
            super().__init__()
            stem = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).eval()
            self.stem, self.block, self.head = (
                torch.jit.freeze(torch.jit.script(stem)),
                nn.Conv2d(4, 4, 3),
                nn.Linear(4, 2),
            )

        def forward(self, x):
            return self.head(self.block(self.stem(x)).relu().mean((2, 3)))

    assert GradCAM(Partly(), "block").attribute(torch.rand(1, 3, 12, 12), lambda output: -output[:, 0]).isfinite().all()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_torchscript_is_refused():
    model, x = plain()
    for scripted in (torch.jit.trace(model, x), torch.jit.script(nn.Sequential(nn.Conv2d(3, 3, 3)))):
        with pytest.raises(ModelError, match="is TorchScript: hooks cannot reach its layers; pass the original"):
            HiResCAM(scripted, "middle")
    model.last = torch.jit.script(model.last)
    assert_truth(HiResCAM(model, "middle").attribute(x, 1), model, x)
    with pytest.raises(LayerError, match="layer 'last' is TorchScript: hooks cannot reach it"):
        HiResCAM(model, "last").attribute(x, 1)
    assert HiResCAM(model).explain(x[0], 1).layer == "middle"
    with pytest.raises(
        LayerError, match=r"no layer of Sequential has spatial extent.*cannot look into its TorchScript parts"
    ):
        HiResCAM(nn.Sequential(torch.jit.script(nn.Conv2d(3, 3, 3)), nn.AdaptiveAvgPool2d(1), nn.Flatten())).attribute(
            x.float(), 1
        )


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_an_exported_program_is_refused():
    model, x = plain()
    program = torch.export.export(model, (x,))
    with pytest.raises(ModelError, match=r"the model is a ExportedProgram; expected a torch.nn.Module"):
        HiResCAM(program, "middle")
    with pytest.raises(ModelError, match=r"is an exported program, which has no layers: pass the original nn.Module"):
        HiResCAM(program.module(), "middle")
    traced = torch.fx.symbolic_trace(model)  # which calls its modules as before
    assert torch.equal(HiResCAM(traced, "middle").attribute(x, 1), HiResCAM(model, "middle").attribute(x, 1))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_a_quantized_model_is_refused_by_the_name_of_its_layer():
    model, _ = CASES["pooled"].make()
    try:
        quantized = torch.ao.quantization.quantize_dynamic(model, {nn.Linear})
    except RuntimeError as error:
        pytest.skip(f"no quantized engine here: {error}")
    with pytest.raises(ModelError, match=r"^head is quantized and has no gradient; pass the original float model"):
        GradCAM(quantized, "features")


class Summed(nn.Module):
    """A residual block whose sums and products are functions of `functions`, a FloatFunctional or None."""

    def __init__(self, functions):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 6, 3, 2, 1), nn.Conv2d(6, 6, 3, 1, 1)
        self.norm, self.relu, self.fc, self.functions = nn.BatchNorm2d(6), nn.ReLU(), nn.Linear(6, 3), functions

    def forward(self, x):
        a = self.relu(self.first(x))
        b = self.norm(self.second(a))
        total = a + b if self.functions is None else self.functions.add(a, b)
        total = self.relu(total)
        doubled = total * 2.0 if self.functions is None else self.functions.mul_scalar(total, 2.0)
        return self.fc(doubled.mean((2, 3)))


@pytest.mark.parametrize(
    ("method", "functions"),
    [*((method, "FloatFunctional") for method in METHODS), *by_family_with(METHODS, "FXFloatFunctional")],
)
@pytest.mark.by_family
def test_a_model_that_is_ready_to_be_quantized_is_explained_as_the_float_model_that_it_is(method, functions):
    torch.manual_seed(0)
    plain_model = Summed(None).eval()
    ready = Summed(getattr(torch.ao.nn.quantized, functions)()).eval()
    ready.load_state_dict(plain_model.state_dict())
    x = torch.randn(2, 3, 12, 12)

    def answer(model):
        try:
            return explainer(method, model, "norm").attribute(x, 1)
        except (LayerError, ModelError) as error:
            return str(error)

    expected, found = answer(plain_model), answer(ready)
    assert type(found) is type(expected)
    if isinstance(expected, str):
        assert found == expected
    else:
        torch.testing.assert_close(found, expected)


def test_the_meta_device_is_refused():
    with torch.device("meta"):
        model = Plain()
    with pytest.raises(ModelError, match=r"first.weight of Plain is a tensor on the meta device.*load the weights"):
        GradCAM(model, "middle")


def test_weights_made_under_inference_mode_are_refused():
    with torch.inference_mode():
        model = Plain()
        x = torch.randn(1, 3, 8, 8)
    with pytest.raises(ModelError, match=r"first.weight of Plain was created under inference_mode"):
        GradCAM(model, "middle").attribute(x, 1)


def test_a_tensor_on_another_device_is_an_error_that_names_both():
    model, x = plain()
    tool = GradCAM(model, "middle")
    info = replace(inspect_model(model), devices=(torch.device("cuda:1"),))
    with pytest.raises(InputError, match="the input is on cpu, but the model is on cuda:1; move one of them"):
        check_and_detach_input(x[:1], info, tool)
    for ask in (tool.attribute, tool.explain):
        with pytest.raises(InputError, match="the input is a tensor on the meta device, which has no values"):
            ask(x[:1].to("meta"), 1)


@pytest.mark.parametrize(
    ("x", "words"),
    [
        (torch.zeros(2, 3, 8, 8, dtype=torch.int64), "the input is int64, but the model needs floats"),
        (torch.zeros(2, 3, 8, 8, dtype=torch.bool), "the input is torch.bool; expected a float tensor"),
        (torch.zeros(3, 8), r"the input has shape \(3, 8\); expected \(N,C,H,W\)"),
        (np.zeros((2, 3, 8, 8)), "the input is a ndarray; expected a float tensor"),
        (None, "the input is a NoneType"),
    ],
)
def test_what_is_not_an_input_is_refused(x, words):
    with pytest.raises(InputError, match=words):
        GradCAM(plain()[0], "middle").attribute(x, 1)


def test_explain_takes_one_input():
    tool = GradCAM(plain()[0], "middle")
    with pytest.raises(InputError, match=r"\(2, 3, 8, 8\); expected one input .* pass a batch to explain_batch"):
        tool.explain(torch.zeros(2, 3, 8, 8), 1)
    with pytest.raises(InputError, match=r"is torch.int64: pass a float tensor"):
        tool.explain(torch.zeros(3, 8, 8, dtype=torch.int64), 1)


def test_two_axes_are_a_signal_unless_a_convolution_says_otherwise():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(2), nn.Linear(12, 12), nn.Tanh(), nn.Flatten(), nn.Linear(24, 3))
    x = torch.randn(2, 12)
    tool = GradCAM(model, "2", layout="channels_first")
    np.testing.assert_array_equal(tool.explain(x, 1).attribution, tool.attribute(x[None], 1)[0])
    with pytest.raises(InputError, match=r"the tensor has shape \(2, 12\); expected one input \(C,H,W\)"):
        GradCAM(plain()[0], "middle").explain(x, 1)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (None, r"the model is a \w+; expected a torch.nn.Module"),
        ("resnet18", r"the model is a \w+; expected a torch.nn.Module"),
        (torch.nn.functional.relu, "relu is known by its scores alone, without layers and gradients"),
        (Plain, "the model is the class Plain itself"),
    ],
    ids=["None", "text", "function", "class"],
)
def test_what_is_not_a_module_is_refused(model, message):
    with pytest.raises(ModelError, match=message):
        GradCAM(model, "middle")


@pytest.mark.parametrize("setting", [{"mode": "train"}, {"on_nonfinite": "ignore"}, {"precision": "int8"}])
def test_unknown_settings_are_refused(setting):
    with pytest.raises(InputError, match=f"{next(iter(setting))}='.*': expected .* or "):
        GradCAM(plain()[0], "middle", **setting)


# --- layers


def test_an_unknown_layer_is_answered_with_the_three_nearest_names():
    with pytest.raises(LayerError, match=r"no layer 'midle' in Plain; nearest names: middle, \w+, \w+$"):
        GradCAM(plain()[0], "midle")
    with pytest.raises(LayerError, match="the layer ReLU is not a part of this Plain"):
        GradCAM(plain()[0], nn.ReLU())


def test_a_layer_that_never_ran_or_that_the_score_does_not_read():
    class Aside(Plain):
        def __init__(self):
            super().__init__()
            self.unused, self.aside = nn.Conv2d(6, 2, 1), nn.Conv2d(6, 2, 1)

        def after(self, y):
            return super().after(y), self.aside(y)

    model, x = plain(Aside)
    for ask, layer, words in (
        (1, "unused", "layer 'unused' did not run in the forward pass"),
        (1, "aside", "the score does not depend on layer 'aside'"),
        (lambda output: output[0][:, 1].detach(), "middle", "the score does not depend on layer 'middle'"),
    ):
        with untouched(model, x), pytest.raises(LayerError, match=words):
            HiResCAM(model, layer).attribute(x, ask)
    heat = HiResCAM(model, "aside").attribute(x, lambda output: output[1].sum((1, 2, 3)))
    torch.testing.assert_close(heat, model.aside(model.before(x)).detach().sum(1))


def test_a_layer_of_integers():
    class Rounded(Plain):
        def __init__(self):
            super().__init__()
            self.mask = nn.Identity()

        def forward(self, x):
            y = self.before(x)
            return self.after(y * self.mask((y > 0).long()))

    model, x = plain(Rounded)
    with pytest.raises(LayerError, match=r"layer 'mask' returns no floating-point tensor.*int64"):
        HiResCAM(model, "mask").attribute(x, 1)


Pair = namedtuple("Pair", ["size", "maps"])


@dataclass(frozen=True)
class Record:
    size: int
    maps: torch.Tensor


@dataclass
class Output(OrderedDict):
    """As Hugging Face's ModelOutput: a dict whose keys are attributes too."""

    maps: torch.Tensor
    size: int = 3

    def __post_init__(self):
        super().__init__(maps=self.maps, size=self.size)

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        object.__setattr__(self, key, value)

    def __reduce__(self):
        return type(self), (self.maps, self.size)


STRUCTURES = {
    "tuple": (lambda y: (3, y), lambda out: out[1]),
    "list": (lambda y: [y, y.mean((2, 3))], lambda out: out[0]),
    "dict": (lambda y: {"size": 3, "maps": y}, lambda out: out["maps"]),
    "namedtuple": (lambda y: Pair(3, y), lambda out: out.maps),
    "frozen dataclass": (lambda y: Record(3, y), lambda out: out.maps),
    "model output": (lambda y: Output(y), lambda out: out.maps),
    "nested": (lambda y: {"a": [(torch.ones(3, 3), {"b": y})]}, lambda out: out["a"][0][1]["b"]),
}


class Packing(nn.Module):
    def __init__(self, conv, pack):
        super().__init__()
        self.conv, self.pack = conv, pack

    def forward(self, x):
        return self.pack(self.conv(x))


@pytest.mark.parametrize("kind", STRUCTURES)
def test_layers_that_return_structures(kind):
    pack, unpack = STRUCTURES[kind]
    model, x = plain()
    packing, types = Packing(model.middle, pack), set()

    class Unpacking(nn.Module):
        def forward(self, x):
            output = packing(model.first(x).tanh())
            types.add((type(output), type(pack(torch.zeros(1, 1, 1, 1)))))
            return model.after(unpack(output))

    net = Unpacking()
    net.packing, net.model = packing, model
    assert_truth(HiResCAM(net, "packing", layout="channels_first").attribute(x, 1), model, x)
    assert len(types) == 1
    assert len(set(*types)) == 1, "the model was given another type than its layer returned"


def test_two_candidates_are_listed_and_output_chooses():
    model, x = plain()
    packing = Packing(model.middle, lambda y: {"raw": y, "double": 2 * y})

    class Both(nn.Module):
        def forward(self, x):
            output = packing(model.first(x).tanh())
            return model.after(output["raw"]) + 3 * model.after(output["double"] / 2)

    net = Both()
    net.packing = packing
    with pytest.raises(
        LayerError, match=r"several tensors: \['raw'\] \(2, 6, 8, 8\), \['double'\] \(2, 6, 8, 8\); choose"
    ):
        HiResCAM(net, "packing").attribute(x, 1)
    for key, factor in (("raw", 1), ("double", 3)):
        heat = HiResCAM(net, "packing", output_index=key, layout="channels_first").attribute(x, 1)
        torch.testing.assert_close(heat, factor * truth(model, x, 1), rtol=1e-10, atol=1e-16)
    with pytest.raises(LayerError, match=r"no floating-point tensor .*output_index='other'"):
        HiResCAM(net, "packing", output_index="other").attribute(x, 1)


# --- checkpoints


class Checkpointed(Plain):
    reentrant, where = True, "around"

    def kept(self, function, value):
        return checkpoint(function, value, use_reentrant=self.reentrant)

    def forward(self, x):
        if self.where == "off":
            with torch.no_grad():
                y = self.kept(self.before, x)
            return self.kept(self.after, y)
        if self.where == "around":
            return self.kept(lambda v: self.after(self.before(v)), x)
        if self.where == "before":
            return self.after(self.kept(self.before, x))
        return self.kept(self.after, self.kept(self.before, x))


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("where", ["around", "before", "both", "off"])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.one_in(3)
def test_activation_checkpointing(reentrant, where, training):
    model, x = plain(Checkpointed)
    model.reentrant, model.where = reentrant, where
    for frozen in (False, True):
        model.train(training).requires_grad_(not frozen)
        with untouched(model, x):
            explanation = HiResCAM(model, "middle").explain(x[0], 1)
        expected = truth(model, x[:1], 1)[0].numpy()
        np.testing.assert_allclose(explanation.attribution, expected, rtol=1e-10, atol=1e-16)
        assert explanation.notes == (), "a layer that is computed again did not run twice"


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_layer_that_runs_in_several_checkpoints(reentrant):
    class Shared(Plain):
        def forward(self, x):
            y = self.first(x)
            for _ in range(3):
                y = torch.tanh(y)
                y = checkpoint(self.square, y, use_reentrant=reentrant) if self.checks else self.square(y)
            return self.after(self.middle(y))

        def __init__(self):
            super().__init__()
            self.square, self.checks = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.Tanh()), True

    torch.manual_seed(4)
    model, x = Shared().double(), torch.randn(1, 3, 8, 8, dtype=torch.float64)
    for call in (0, 1, 2, None):
        model.checks = False
        expected = HiResCAM(model, "square.0", call_index=call).explain(x, 1)
        model.checks = True
        found = HiResCAM(model, "square.0", call_index=call).explain(x, 1)
        np.testing.assert_allclose(found.attribution, expected.attribution, rtol=1e-10, atol=1e-16)
        assert found.notes == expected.notes


# --- layouts


def patches(values, patch):
    return values.unfold(2, patch, patch).unfold(3, patch, patch)


@pytest.mark.parametrize("prefix", range(6))
@pytest.mark.parametrize("grid", [(4, 4), (4, 6), (9, 5), (5, 16)])
@pytest.mark.one_in(5)
def test_tokens_lie_where_their_patches_lie(prefix, grid):
    """A head that reads one patch alone: its cell, at its row and column, is all there is in the map."""
    torch.manual_seed(0)
    model = Tokens(prefix).double()
    model.block = nn.Sequential(nn.Linear(8, 8).double())
    row, column = grid[0] - 1, 1
    place = prefix + row * grid[1] + column
    x = torch.randn(2, 3, 4 * grid[0], 4 * grid[1], dtype=torch.float64)

    class OneToken(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, x):
            x = model.embed(x).flatten(2).transpose(1, 2)
            x = model.block(torch.cat([model.prefix.expand(len(x), -1, -1), x], 1))
            return x[:, place].square().sum(1, keepdim=True)

    tool = HiResCAM(OneToken(), "model.block")
    explanation = tool.explain(x[0], 0)
    assert explanation.layout == f"tokens {prefix}+{grid[0]}x{grid[1]}"
    expected = np.zeros(grid)
    token = model.block(model.embed(x[:1]).flatten(2).transpose(1, 2))[0, row * grid[1] + column]
    expected[row, column] = 2 * token.square().sum().item()
    np.testing.assert_allclose(explanation.attribution, expected, rtol=1e-10)
    hottest = np.unravel_index(explanation.heatmap("input").argmax(), x.shape[2:])
    assert (hottest[0] // 4, hottest[1] // 4) == (row, column)


@pytest.mark.slow
def test_the_layout_of_tokens_is_right_or_an_error_but_never_wrong():
    for patch in (4, 14, 16):
        for h in range(1, 33, 3):
            for w in (1, 2, 3, 7, 14, 24):
                for prefix in range(6) if h * w > 1 else ():
                    shape = (2, prefix + h * w, 10007)  # channels that no grid has as cells
                    try:
                        layout = infer_layout(shape, (2, 3, h * patch, w * patch))
                    except LayerError:
                        assert h * w < 16, "from sixteen patches on the grid is known"
                    else:
                        assert layout == Layout("tokens", (h, w), prefix), (patch, h, w, prefix)


def test_a_flattened_map_is_not_taken_for_tokens():
    """(N,K,hw) with K = 64 = 8 x 8: both axes could be the patches of a square image."""
    net = nn.Sequential(nn.Conv2d(3, 64, 32, 32), nn.ReLU(), nn.Flatten(2))
    model = nn.Sequential(net, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(64, 2))
    x = torch.randn(1, 3, 224, 224)
    with pytest.raises(LayerError, match="may be tokens"):
        GradCAM(model, "0").attribute(x, 0)
    assert GradCAM(model).explain(x, 0).layer == "0.1"
    large = nn.LayerNorm(1024)  # 1024 = 32 x 32 is the width of large transformers
    assert infer_layout((1, 197, 1024), (1, 3, 224, 224), large) == Layout("tokens", (14, 14), 1)


def test_strides_that_differ_do_not_turn_channels_into_rows():
    block = nn.Sequential(nn.Conv2d(1, 16, 3, stride=(4, 16), padding=1), nn.ReLU())
    with pytest.raises(LayerError, match="may have channels first or channels last"):
        infer_layout((1, 16, 16, 4), (1, 1, 64, 64), block)
    assert infer_layout((1, 16, 16, 4), (1, 1, 64, 64), block[0]).grid == (16, 4)


class AuxiliaryLast(nn.Module):
    """An auxiliary head runs last and is dropped."""

    def __init__(self):
        super().__init__()
        self.features, self.aux, self.head = nn.Conv2d(3, 6, 3, 2), nn.Conv2d(6, 2, 3), nn.Linear(6, 2)

    def forward(self, x):
        features = self.features(x)
        scores = self.head(features.mean((2, 3)))
        self.aux(features)
        return scores


def test_the_chosen_layer_leads_to_the_score():
    assert GradCAM(AuxiliaryLast()).explain(torch.randn(3, 24, 16), 1).layer == "features"


def test_a_wrapped_model_keeps_what_is_known_of_it():
    from camscope import load_model
    from camscope.phantom import draw_radiograph

    scan = draw_radiograph(7, "nodule").image
    plain_answer = GradCAM(load_model("phantom")).explain(scan, "nodule")
    wrapped = GradCAM(nn.DataParallel(load_model("phantom"))).explain(scan, "nodule")
    assert (wrapped.layer, wrapped.label) == ("layer4", "nodule")
    assert np.array_equal(wrapped.attribution, plain_answer.attribution)


def test_a_name_needs_as_many_categories_as_there_are_classes():
    model, x = plain()
    with pytest.raises(TargetError, match="2 class names for a model with 3 classes"):
        GradCAM(model, "middle", class_names=["no", "yes"]).attribute(x, "yes")
    by_number = GradCAM(model, "middle", class_names={2: "c", 0: "a", 1: "b"}).explain(x[:1], "c")
    assert by_number.target == 2


@pytest.mark.filterwarnings("ignore::camscope.errors.CamscopeWarning")
def test_probabilities_are_not_put_through_a_softmax_again():
    def ending_in(last):
        head = nn.Linear(3, 3, bias=False)
        head.weight.data = 4 * torch.eye(3)
        return nn.Sequential(nn.Conv2d(3, 3, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), head, last)

    x = torch.randn(3, 6, 6)
    softmax = GradCAM(ending_in(nn.Softmax(1)), "0").explain(x, 1)
    assert softmax.probability == pytest.approx(softmax.score)
    sigmoid = GradCAM(ending_in(nn.Sigmoid()), "0").explain(x, 1)
    assert sigmoid.probability is None


def test_one_thing_where_a_list_is_asked_for():
    model, x = plain()
    tool = GradCAM(model, "middle")
    for targets in (1, "cat"):
        with pytest.raises(TargetError, match="expects a list of targets"):
            tool.explain_classes(x[0], targets)
    with pytest.raises(InputError, match="expects a list of images"):
        tool.explain_batch("cat.jpg")
    for layer in (4, ["middle", "last"]):
        with pytest.raises(LayerError, match="expected one layer name or module"):
            GradCAM(model, layer)


@pytest.mark.slow
def test_a_convolutions_grid_settles_what_tokens_alone_do_not():
    nine = Tokens(0, patch=8)
    assert HiResCAM(nine, "block").explain(torch.randn(3, 24, 24), 1).layout == "tokens 0+3x3"
    sixteen = Tokens(9, patch=5)  # 25 tokens of 20 x 20 pixels: 4 x 4 patches and nine more, not 5 x 5
    assert HiResCAM(sixteen, "block").explain(torch.randn(3, 20, 20), 1).layout == "tokens 9+4x4"
    assert infer_layout((1, 25, 8), (1, 3, 20, 20), sixteen.block) == Layout("tokens", (5, 5))


def test_tokens_that_lie_on_no_map_of_the_model_are_an_error():
    class Queries(Tokens):
        def forward(self, x):
            places = self.embed(x).flatten(2).transpose(1, 2)
            queries = self.prefix.expand(len(x), -1, -1)
            return self.head(self.block(queries + self.attention(queries, places, places)[0]).mean(1))

    model, x = Queries(16, patch=8), torch.randn(1, 3, 40, 40)  # 16 questions would be 4 x 4 patches of 10 pixels
    with pytest.raises(
        LayerError, match=r"layer 'block': .*expected one grid that fits, found: none; pass layout=Layout"
    ):
        HiResCAM(model, "block").attribute(x, 1)
    assert GradCAM(model).explain(x, 1).grid == (5, 5)


@pytest.fixture
def hiera():
    """Windows of tokens, merged twice two by two, of an input of 16 x 32 pixels."""
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    model = timm.models.hiera.Hiera(
        img_size=(16, 32), stages=(1, 1, 1), q_pool=2, embed_dim=8, num_heads=1, mask_unit_size=(4, 4), num_classes=5
    )
    return model.eval(), torch.randn(2, 3, 16, 32)


@pytest.mark.slow
def test_tokens_kept_by_windows_are_refused_until_they_are_in_rows(hiera):
    model, x = hiera
    places = {}
    for name in ("blocks.0", "blocks.1", "blocks.2"):
        kept = []
        handle = model.get_submodule(name).register_forward_hook(lambda _, args, output, kept=kept: kept.append(output))
        changed = x[:1].clone()
        changed[..., :8, 16:24] += 1  # one window in eight: the third of the first row
        with torch.no_grad():
            model(torch.cat([x[:1], changed]))
        handle.remove()
        places[name] = (kept[0][1] - kept[0][0]).abs().sum(1)
    with pytest.raises(LayerError, match=r"the 32 tokens are stored window by window.* merges them to 2"):
        GradCAM(model, "blocks.0").attribute(x, 1)
    with pytest.raises(LayerError, match="stored window by window"):
        GradCAM(model, "blocks.1").attribute(x, 1)
    assert GradCAM(model, "blocks.2").attribute(x, 1).shape == (2, 1, 2)
    assert places["blocks.2"].argmax() == 1  # in rows at last
    flat = GradCAM(model, "blocks.0", layout=Layout("tokens", (4, 8))).attribute(x, 1)
    assert flat.shape == (2, 4, 8)  # whoever names a layout is believed


def test_a_video_with_its_channels_behind_the_time_is_refused_until_its_kind_is_said():
    torch.manual_seed(0)

    class TimeFirst(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv3d(3, 5, 3, padding=1)

        def forward(self, x):
            return self.conv(x.transpose(1, 2)).relu().mean((2, 3, 4))

    x = torch.randn(1, 8, 3, 6, 6)
    model = TimeFirst()
    with pytest.raises(InputError, match=r"3 channels at the third axis. If it is a video .*pass frames_first=True"):
        GradCAM(model, "conv").attribute(x, 1)
    with pytest.raises(InputError, match="at the third axis"):
        GradCAM(model, "conv").explain(x[0], 1)
    found = HiResCAM(model, "conv", frames_first=True).explain(x[0], 1)
    maps = model.conv(x.transpose(1, 2))[0, 1].detach()
    np.testing.assert_allclose(found.attribution, maps.relu().numpy() / maps.numel(), atol=1e-7)
    assert GradCAM(nn.Sequential(nn.Conv3d(3, 5, 3, padding=1), nn.ReLU(), plain_pool()), "1").attribute(
        x.transpose(1, 2), 1
    ).shape == (1, 8, 6, 6)


def plain_pool():
    return nn.Sequential(nn.AdaptiveAvgPool3d(1), nn.Flatten())


@pytest.mark.parametrize("categories", [5, "tabby"])
def test_categories_are_names(categories):
    with pytest.raises(InputError, match="expected a sequence of names in class order"):
        GradCAM(plain()[0], class_names=categories)


class Joined(Tokens):
    """Tokens before and behind the grid, put together at once or one after the other."""

    def __init__(self, before, behind, nested):
        super().__init__(before + behind, patch=4)
        self.split, self.nested = [before, behind], nested

    def forward(self, x):
        before, behind = (part.expand(len(x), -1, -1) for part in self.prefix.split(self.split, 1))
        places = self.embed(x).flatten(2).transpose(1, 2)
        first = torch.cat([before, places], 1) if self.nested else None
        joined = torch.cat([first, behind], dim=-2) if self.nested else torch.concat([before, places, behind], dim=1)
        x = self.block(joined)
        return self.head((x + self.attention(x, x, x, need_weights=False)[0]).mean(1))


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(("before", "behind"), [(1, 3), (0, 1), (2, 0), (0, 0)])
def test_tokens_behind_the_grid_are_told_from_those_before_it(before, behind, nested):
    torch.manual_seed(3)
    model, x = Joined(before, behind, nested).double().eval(), torch.randn(2, 3, 16, 24).double()
    kept = []
    handle = model.block.register_forward_hook(lambda module, args, output: kept.append(output))
    (gradient,) = torch.autograd.grad(model(x)[:, 1].sum(), kept[0])
    handle.remove()
    cells = slice(before, before + 24)
    expected = (kept[0] * gradient)[:, cells].sum(-1).view(2, 4, 6).detach()
    tool = HiResCAM(model, "block")
    assert tool.explain(x[0], 1).layout == f"tokens {before}+4x6"
    torch.testing.assert_close(tool.attribute(x, 1), expected, rtol=1e-9, atol=1e-12)


def test_a_plane_that_is_no_grid_of_the_input_is_an_error():
    class Unfolded(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.head = nn.Conv2d(3, 4, 1), nn.Linear(4, 5)

        def forward(self, x):
            patches = F.pixel_unshuffle(x, 4).unflatten(1, (3, 16)).flatten(3)  # (N,3,16 pixels of a patch, patches)
            return self.head(self.conv(patches).relu().mean((2, 3)))

    torch.manual_seed(0)
    with pytest.raises(
        LayerError, match="'conv': its output was read as channels_first 16x256, but its cells react to"
    ):
        GradCAM(Unfolded(), "conv").explain(torch.randn(3, 64, 64), 1)


def test_a_grid_of_other_proportions_than_the_input_is_questioned():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, (1, 8), (1, 8)), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5))
    said = GradCAM(model, "0").explain(torch.randn(3, 64, 64), 1)
    assert said.notes == ("the grid 64x8 of layer '0' has not the proportions of the input 64x64: is it one?",)
    model, x = plain()
    assert GradCAM(model, "middle").explain(x[0], 1).notes == ()


def test_a_layer_whose_last_axis_is_its_channels_is_not_read_as_a_map_of_them():
    windows = nn.Sequential(nn.LayerNorm(192), nn.Linear(192, 192))  # (N, windows, patches of each, K)
    with pytest.raises(LayerError, match="has channels last, but its other axes do not have the aspect ratio"):
        infer_layout((1, 4, 196, 192), (1, 3, 224, 224), windows)
    assert infer_layout((1, 7, 7, 192), (1, 3, 224, 224), windows) == Layout("channels_last", (7, 7))


@pytest.mark.slow
def test_tokens_behind_the_grid_are_left_out_by_a_layout():
    model, x = Tokens(0, patch=8), torch.randn(1, 3, 40, 40)
    behind = HiResCAM(model, "block", layout=Layout("tokens", (2, 5), 5)).attribute(x, 1)
    assert torch.equal(behind, HiResCAM(model, "block").attribute(x, 1)[:, 1:3])


def test_a_volume_may_have_another_stride_along_its_depth():
    assert infer_layout((1, 4, 4, 6, 32), (1, 3, 8, 32, 48), nn.LayerNorm(32)) == Layout("channels_last", (4, 4, 6))
    assert infer_layout((1, 4, 8, 12, 7), (1, 3, 8, 64, 96), None, None, LayoutHints({(4, 8, 12)})) == Layout(
        "channels_last", (4, 8, 12)
    )


def test_ambiguous_tokens_are_an_error_that_layout_or_reshape_settles():
    model = Tokens(0, patch=8, width=192)
    model.embed = nn.PixelUnshuffle(8)  # patches without a convolution, whose grid would be known
    model.block = nn.Linear(192, 192)
    x = torch.randn(1, 3, 24, 24)  # 9 tokens: 3 x 3, or 2 x 2 patches of 12 and five more
    with pytest.raises(LayerError, match=r"layer 'block': .*expected one grid that fits, found: .*pass layout=Layout"):
        HiResCAM(model, "block").attribute(x, 1)
    by_layout = HiResCAM(model, "block", layout=Layout("tokens", (3, 3))).attribute(x, 1)
    by_reshape = HiResCAM(model, "block", reshape=lambda y: y.transpose(1, 2).unflatten(2, (3, 3))).attribute(x, 1)
    assert by_layout.shape == (1, 3, 3)
    assert torch.equal(by_layout, by_reshape)
    for layout in (
        Layout("tokens", (4, 3)),
        Layout("tokens", (3, 3), 1),
        Layout("channels_first", (3, 3)),
        Layout("sideways", (3, 3)),
        "sideways",
    ):
        with pytest.raises(LayerError, match="layer 'block'"):
            HiResCAM(model, "block", layout=layout).attribute(x, 1)
    with pytest.raises(
        LayerError, match=r"reshape= returned the shape \(9, 192\) for layer 'block'; expected \(N,K,h,w\) with N = 1"
    ):
        HiResCAM(model, "block", reshape=lambda y: y[0]).attribute(x, 1)


def test_channels_last_and_first_are_told_apart_by_the_inputs_aspect():
    model, x = CASES["channels last"].make()
    tool = HiResCAM(model, "mix")
    assert tool.explain(x[0], 1).layout == "channels_last 6x4"
    features = model.mix(model.stem(x).permute(0, 2, 3, 1)).detach()
    expected = (features * model.head.weight[1]).sum(3).detach() / 24
    torch.testing.assert_close(tool.attribute(x, 1), expected)
    settled = HiResCAM(model, "mix", layout="channels_last").attribute(x, 1)
    assert torch.equal(settled, tool.attribute(x, 1))
    assert HiResCAM(model, "stem").explain(x[0], 1).layout == "channels_first 6x4"


@pytest.mark.parametrize("rank", [2, 3])
def test_a_cube_of_equal_sides_has_its_channels_first_where_convolutions_made_it(rank):
    kind, pool = {2: (nn.Conv2d, nn.AdaptiveAvgPool2d), 3: (nn.Conv3d, nn.AdaptiveAvgPool3d)}[rank]
    torch.manual_seed(0)
    model = nn.Sequential(kind(3, 8, 2, 2), nn.ReLU(), pool(1), nn.Flatten(), nn.Linear(8, 3))
    x = torch.randn(1, 3, *[16] * rank)
    found = HiResCAM(model, "1").attribute(x, 1)
    maps = model[1](model[0](x)).detach()[0]
    expected = (maps * model[4].weight[1].detach().view(8, *[1] * rank)).sum(0) / 8**rank
    torch.testing.assert_close(found[0], expected)
    assert torch.equal(HiResCAM(model, "1", layout="channels_first").attribute(x, 1), found)


def test_a_cube_of_equal_sides_is_ambiguous_where_a_layer_works_on_the_last_axis():
    class Permuting(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm, self.act, self.head = (
                nn.Conv2d(3, 8, 2, 2),
                nn.LayerNorm(8),
                nn.ReLU(),
                nn.Linear(8, 3),
            )

        def forward(self, x):
            return self.head(self.act(self.norm(self.conv(x).permute(0, 2, 3, 1))).mean((1, 2)))

    x = torch.randn(1, 3, 16, 16)
    with pytest.raises(
        LayerError, match=r"layer 'act': output \(1, 8, 8, 8\).*may have channels first or channels last"
    ):
        HiResCAM(Permuting(), "act").attribute(x, 1)


def test_a_layer_norm_over_the_whole_map_is_no_sign_of_channels_last():
    class Normed(Plain):
        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm([6, 8, 16])

        def forward(self, x):
            return self.after(self.norm(self.before(x)))

    torch.manual_seed(0)
    model, x = Normed(), torch.randn(1, 3, 8, 16)
    assert HiResCAM(model, "norm").explain(x, 1).layout == "channels_first 8x16"


@pytest.mark.slow
def test_none_chooses_the_last_layer_with_space_and_says_which():
    expected = {
        "pooled": "features",
        "flat": "features",
        "residual": "dropout",
        "tokens": None,
        "channels last": "mix",
        "signal": "features",
        "volume": "features",
    }
    for name, case in CASES.items():
        model, x = case.make(1)
        explanation = GradCAM(model).explain(x, 1)
        assert explanation.grid == case.grid, name
        assert f"layer {explanation.layer!r} was chosen" in explanation.notes
        if name != "residual":
            assert expected[name] in (None, explanation.layer), name
        assert np.array_equal(GradCAM(model, explanation.layer).explain(x, 1).attribution, explanation.attribution), (
            name
        )
    with pytest.raises(LayerError, match=r"no layer of Sequential has spatial extent"):
        GradCAM(nn.Sequential(nn.Flatten(), nn.Linear(192, 2))).attribute(torch.randn(1, 3, 8, 8), 1)


# --- outputs and questions


@dataclass
class Answer:
    logits: torch.Tensor
    features: torch.Tensor


@pytest.mark.parametrize("key", ["pooler_output", "image_embeds"])
def test_an_embedding_has_no_classes_and_the_error_says_what_to_pass(key):
    class Tower(Plain):
        def forward(self, x):
            return {key: super().forward(x), "last_hidden_state": x}

    model, x = plain(Tower)
    with pytest.raises(TargetError, match=f"has no class scores, but an embedding '{key}'; pass a target.*direction"):
        HiResCAM(model, "middle").attribute(x, 1)
    assert_truth(HiResCAM(model, "middle").attribute(x, lambda output: output[key][:, 1]), plain()[0], x)


OUTPUTS = {
    "dict": lambda s: {"logits": s, "aux": s * 2},
    "the only (B,K) of a dict": lambda s: {"scores": s, "maps": torch.zeros(2, 3, 4, 4)},
    "tuple": lambda s: (torch.zeros(2, 3, 4, 4), s, torch.zeros(2, 3, dtype=torch.int64)),
    "dataclass": lambda s: Answer(s, s * 2),
    "namedtuple": lambda s: namedtuple("Out", ["logits", "aux_logits"])(s, s * 2),
    "object": lambda s: type("Anything", (), {"logits": s})(),
    "list of one": lambda s: [s],
    "(B,K,1,1)": lambda s: s[:, :, None, None],
}


def answering(pack):
    class Answering(Plain):
        def forward(self, x):
            return pack(super().forward(x))

    return plain(Answering)


@pytest.mark.parametrize("kind", OUTPUTS)
def test_the_scores_are_found_in_any_output(kind):
    model, x = answering(OUTPUTS[kind])
    heat = HiResCAM(model, "middle").attribute(x, 1)
    assert_truth(heat, plain()[0], x)


@pytest.mark.parametrize(
    ("pack", "words"),
    [
        (
            lambda s: (s, s * 2),
            r"the output tuple has no unique tensor of class scores: it holds 0 \(2, 3\), 1 \(2, 3\); pass target=",
        ),
        (lambda s: {"a": 1}, "the output dict has no unique tensor of class scores.*no float tensor"),
        (lambda s: None, "the output NoneType has no unique tensor"),
        (lambda s: s.argmax(1), "the model's output is torch.int64, and integers have no gradient"),
        (lambda s: s[:, :, None, None].expand(2, 3, 4, 4), r"\(2, 3, 4, 4\) has class scores at every position.*mask"),
        (lambda s: {"out": s[:, :, None].expand(2, 3, 4)}, r"\(2, 3, 4\) has class scores at every position"),
        (lambda s: s[:1], "1 score for a batch of 2: expected one row per sample"),
        (lambda s: s.flatten(), "6 scores for a batch of 2"),
        (lambda s: s.mean(), "1 score for a batch of 2"),
    ],
)
def test_an_output_without_one_score_per_sample_asks_for_a_target(pack, words):
    model, x = answering(pack)
    with untouched(model, x), pytest.raises(TargetError, match=words):
        HiResCAM(model, "middle").attribute(x, 1)


def test_a_squeezed_batch_of_one_is_not_taken_for_a_batch():
    model, x = answering(lambda s: s.squeeze(0))
    for target in (None, 0, 1):
        with pytest.raises(TargetError, match=r"3 scores for a batch of 1.*must not squeeze"):
            HiResCAM(model, "middle").attribute(x[:1], target)


def test_a_segmentation_is_explained_through_a_mask():
    model, x = answering(lambda s: s[:, :, None, None] * torch.ones(4, 4))
    mask = torch.zeros(4, 4)
    mask[0] = 0.25
    assert_truth(
        HiResCAM(model, "middle").attribute(x, lambda output: (output[:, 1] * mask).sum((1, 2))), plain()[0], x
    )


@pytest.mark.parametrize("shape", [(-1, 1), (-1,), ()])
def test_one_number_per_sample(shape):
    model, x = answering(lambda s: s[:, 1].reshape(shape))
    x = x[:1] if shape == () else x
    for target in (None, 0, [0] * len(x)):
        assert_truth(HiResCAM(model, "middle").attribute(x, target), plain()[0], x)
    explanation = HiResCAM(model, "middle").explain(x[0], None)
    assert (explanation.target, explanation.probability) == (0, None)
    with pytest.raises(
        TargetError, match=r"class 1 does not exist in a model with one output.*evidence against.*-output"
    ):
        HiResCAM(model, "middle").attribute(x, 1)
    against = HiResCAM(model, "middle").attribute(x, lambda output: -output.flatten())
    torch.testing.assert_close(against, -truth(plain()[0], x, 1), rtol=1e-10, atol=1e-16)


def test_several_inputs_and_keyword_inputs_pass_through():
    class Mixed(Plain):
        def forward(self, x, other, scale=1.0, *, shift):
            return self.after(self.before(x) + other) * scale + shift

    model, x = plain(Mixed)
    other = torch.randn(2, 6, 8, 8, dtype=torch.float64)
    A = (model.before(x) + other).detach()
    A.requires_grad_()
    gradient = torch.autograd.grad(model.after(A)[:, 0].sum() * 5, A)[0]
    heat = HiResCAM(model, "middle").attribute(x, 0, other, scale=5.0, shift=100)
    torch.testing.assert_close(heat, (model.before(x).detach() * gradient).sum(1))
    with pytest.raises(TypeError, match="missing 1 required"):
        HiResCAM(model, "middle").attribute(x, 0, shift=1)


@pytest.mark.parametrize(
    "target",
    [
        2,
        np.int64(2),
        np.uint8(2),
        np.array(2),
        np.array([2, 2]),
        torch.tensor(2),
        torch.tensor([2, 2]),
        torch.tensor([2, 2], dtype=torch.int16),
        [2, 2],
        (2, 2),
        [np.int32(2), torch.tensor(2)],
        ["cat", 2],
        "cat",
        "CAT",
        "house cat",
        lambda output: output[:, 2],
    ],
)
def test_a_class_is_asked_for_in_many_ways(target):
    model, x = plain()
    synonyms = isinstance(target, str) and target == "house cat"
    names = ["ant", "bee", "cat, house cat" if synonyms else "cat"]
    assert_truth(HiResCAM(model, "middle", class_names=names).attribute(x, target), model, x, 2)


def test_one_target_each_for_a_batch_of_explanations():
    model, x = plain()
    tool = HiResCAM(model, "middle")
    for targets in ([2, 0], (2, 0), np.array([2, 0]), torch.tensor([2, 0])):
        assert [one.target for one in tool.explain_batch(list(x), targets)] == [2, 0]
    for target in (1, np.int64(1), np.array(1), torch.tensor(1)):
        assert [one.target for one in tool.explain_batch(list(x), target)] == [1, 1]
    images = [x[0], torch.randn(3, 6, 9, dtype=torch.float64), x[1]]
    mixed = tool.explain_batch(images, np.array([0, 1, 2]))
    assert [(one.target, one.grid) for one in mixed] == [(0, (8, 8)), (1, (6, 9)), (2, (8, 8))]
    for one, image in zip(mixed, images, strict=True):
        np.testing.assert_allclose(
            one.attribution, truth(model, image[None], one.target)[0].numpy(), rtol=1e-9, atol=1e-15
        )
    with pytest.raises(InputError, match="3 targets for 2 images"):
        tool.explain_batch(list(x), [0, 1, 2])
    with pytest.raises(TargetError, match="no targets"):
        tool.explain_classes(x[0], [])
    with pytest.raises(TargetError, match=r"1 score for a batch of 2.*target must not sum over it"):
        tool.explain_batch(list(x), lambda output: output[:, 1].sum())


class Watched(Plain):
    """Counts the passes through its head, forwards and backwards."""

    def __init__(self):
        super().__init__()
        self.forwards, self.backwards = 0, 0

    def forward(self, x):
        self.forwards += 1
        output = super().forward(x)
        if output.requires_grad:
            output.register_hook(self.note)
        return output

    def note(self, gradient):
        self.backwards += 1


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (3, r"class 3 is out of range: the model has 3 classes \(0\.\.2\)"),
        (-1, "class -1 is negative: class indices start at 0"),
        (np.int64(10**12), "class 1000000000000 is out of range"),
        ([0], "1 target for a batch of 2: pass one target, or one per sample"),
        ([0, 1, 2], "3 targets for a batch of 2"),
        ([], "0 targets for a batch of 2"),
        ([0, 3], "class 3 is out of range"),
        ([[0, 1]], "is a nested list: expected one class"),
        (torch.zeros(2, 1, dtype=torch.int64), "is a nested list"),
        (True, "target True is a bool: expected a class index"),
        (np.True_, "target True is a bool"),
        (torch.tensor([True, False]), "is a bool"),
        (1.0, "target 1.0 is a float"),
        (torch.tensor(1.0), "target 1.0 is a float"),
        (np.float32(1), "target 1.0 is a float"),
        ({"class": 1}, "is a dict: expected a class index"),
        ("cow", "no class 'cow'; nearest names: '"),
        ("bat", "class 'bat' is ambiguous: 1 'bat', 2 'Bat'; pass the index"),
        (lambda output: output, r"returned torch.float64 \(2, 3\); expected one float per sample"),
        (lambda output: 3, "returned int; expected one float per sample"),
        (lambda output: output.argmax(1), "returned torch.int64"),
        (lambda output: output[:1, 0], "1 score for a batch of 2"),
    ],
)
def test_what_is_not_a_class_is_refused_before_any_backward(target, words):
    model, x = plain(Watched)
    tool = HiResCAM(model, "middle", class_names=["ant", "bat", "Bat"])
    with untouched(model.middle, x), pytest.raises(TargetError, match=words):
        tool.attribute(x, target)
    assert model.backwards == 0


@pytest.mark.parametrize(
    "target",
    [
        *(3, -1, [0, 1], True, "cow", lambda output: output, LogProbability(3), Classes([0, 3]), Classes, Difference),
        *(Part("heads"), Region(1), Box(0, 0, 4, 4), TextSimilarity("a cat")),
    ],
)
def test_one_bad_class_among_good_ones_is_refused_before_any_backward(target):
    model, x = plain(Watched)
    with pytest.raises(TargetError):
        HiResCAM(model, "middle", class_names=["ant", "bee", "cat"]).explain_classes(x[0], [0, target])
    assert model.backwards == 0


def test_a_name_without_categories_is_refused():
    model, x = plain(Watched)
    with pytest.raises(
        TargetError,
        match="class 'cat' cannot be found by its name: the model's class names are not known; pass class_names=",
    ):
        HiResCAM(model, "middle").attribute(x, "cat")
    assert model.backwards == 0


def test_categories_of_another_length_name_no_class():
    model, x = plain()
    explanation = HiResCAM(model, "middle", class_names=["ant", "bee"]).explain(x[0], 1)
    assert explanation.label == "class 1"
    explanation = HiResCAM(model, "middle", class_names=["ant", "bee", "cat"]).explain(x[0], 1)
    assert explanation.label == "bee"
    assert {one.label for one in explanation.top_classes} == {"ant", "bee", "cat"}
    chances = [one.probability for one in explanation.top_classes]
    assert chances == sorted(chances, reverse=True)
    assert sum(chances) == pytest.approx(1)


def test_no_warning_where_all_is_well():
    model, x = plain()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert HiResCAM(model, "middle").explain(x[0], 1).status == "ok"


class Decoded(Plain):
    """A class head beside a long decoder that the class does not read."""

    def __init__(self):
        super().__init__()
        self.decoder = nn.Sequential(*[nn.Conv2d(5, 5, 3, padding=1) for _ in range(30)])

    def after(self, y):
        z = self.last(y)
        self.decoder(z)
        return self.head(z.mean((2, 3)))


def test_the_layer_is_found_before_any_number_of_layers_that_the_class_does_not_read():
    assert GradCAM(Decoded().eval()).explain(torch.randn(3, 8, 8), 1).layer == "last"


def test_a_score_that_reads_no_layer_is_one_clear_error():
    model, x = plain()
    with pytest.raises(
        LayerError, match=r"depends on no layer of Plain with spatial extent.*name a layer, or a method"
    ):
        GradCAM(model).attribute(x, lambda output: output[:, 1].detach())
