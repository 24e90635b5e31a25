"""Several methods, layers and classes from one pass; the same question asked of other inputs; half the precision."""

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
import torchvision
from torch import nn

from camscope.errors import InputError, LayerError, ModelError, TargetError
from camscope.explainers import (
    METHODS,
    AblationCAM,
    GradCAM,
    HiResCAM,
    IntegratedGradients,
    LayerCAM,
    LayerExplainer,
    Occlusion,
    ScoreCAM,
    ShapleyCAM,
    SmoothGrad,
)
from camscope.explainers.core.chunk_perturbed_copies_by_memory import count_copies_that_fit_in_memory, map_chunks
from camscope.explainers.core.run_methods_in_shared_passes import explain_grid
from camscope.targets import Difference, Score
from tests.nets import CASES, Pooled, Tokens, conv, plain
from tests.refusals import first_answered
from tests.tools import Counting, explainer
from tests.untouched import untouched

pytestmark = pytest.mark.filterwarnings("ignore::camscope.errors.CamscopeWarning")


@pytest.mark.usefixtures("passes_of_maps_alone")
def test_methods_of_one_layer_share_a_forward_and_a_backward_pass():
    model, x = CASES["residual"].make()
    counted = Counting(model)
    names = ["gradcam", "layercam", "hirescam", "xgradcam", "gradcam++"]
    together = GradCAM(counted, "model.block").explain_methods(x[0], names, 1)
    assert (counted.forwards, counted.backwards) == (1, 1)
    assert [one.method for one in together] == names
    for one in together:
        alone = GradCAM(counted, "model.block").with_method(one.method).explain(x[0], 1)
        assert one.attribution.tobytes() == alone.attribution.tobytes()
        assert (one.layer, one.status, one.score, one.notes) == (alone.layer, alone.status, alone.score, alone.notes)


@pytest.mark.usefixtures("passes_of_maps_alone")
def test_layers_and_classes_share_the_forward_pass_and_each_class_one_backward_pass():
    model, x = CASES["pooled"].make()
    counted = Counting(model)
    layers = ["model.features.0", "model.features.2", "model.features"]
    tools = [kind(counted, layer, layout="channels_first") for layer in layers for kind in (GradCAM, HiResCAM)]
    rows = explain_grid(tools, x[0], [2, None, 0])
    assert (counted.forwards, counted.backwards) == (1, 3)
    for tool, row in zip(tools, rows, strict=True):
        alone = [tool.explain(x[0], target) for target in (2, None, 0)]
        np.testing.assert_array_equal(
            np.stack([one.attribution for one in row]), np.stack([one.attribution for one in alone])
        )
        assert {one.layer for one in row} == {tool.layer}


def test_methods_that_run_the_model_again_take_part():
    model, x = CASES["flat"].make()
    counted = Counting(model)
    tool = GradCAM(counted, "model.features.4")
    one, two, three = tool.explain_methods(x[0], ["gradcam", "ablationcam", ScoreCAM], 1)
    assert counted.backwards == 1
    for explanation, kind in ((one, GradCAM), (two, AblationCAM), (three, ScoreCAM)):
        np.testing.assert_array_equal(explanation.attribution, kind(model, "features.4").explain(x[0], 1).attribution)


def test_siblings_have_the_same_settings_and_unknown_methods_near_names():
    model, _ = CASES["tokens"].make()
    tool = ScoreCAM(model, "block", class_names=["a", "b", "c"], precision="bf16", n_channels=3, call_index=0)
    other = tool.with_method("ablationcam")
    assert (other.layer, other.class_names, other.precision, other.call_index) == ("block", ("a", "b", "c"), "bf16", 0)
    occlusion = Occlusion(model, baseline="noise", seed=3, batch_size=2, progress=True)
    for method in ("rise", "integratedgradients", "xrai", "meaningfulperturbation"):
        other = occlusion.with_method(method)
        assert (other.baseline, other.seed, other.batch_size, other.progress) == ("noise", 3, 2, True)
    assert Occlusion(model).with_method("meaningfulperturbation").baseline == "blur", "what is usual there"
    smooth = SmoothGrad(model, n_samples=3, channel_reduction="l2", seed=4)
    assert (smooth.with_method("saliency").channel_reduction, smooth.with_method("vargrad").n_samples) == (
        "l2",
        3,
    )
    assert (smooth.with_method("rise").n_samples, smooth.with_method("randomcam").seed) == (4000, 4)
    with pytest.raises(InputError, match="no method 'gradcam2'; nearest names: gradcam"):
        tool.with_method("gradcam2")
    with pytest.raises(InputError, match=r"for one method use explain_methods\(image, \['gradcam'\]\)"):
        tool.explain_methods(torch.zeros(3, 24, 16), "gradcam")


def test_an_explainer_is_callable_as_attribute_is():
    model, x = CASES["pooled"].make()
    explainer = GradCAM(model, "features")
    assert torch.equal(explainer(x, 1), explainer.attribute(x, 1))
    assert torch.equal(explainer(x, target=[1] * len(x)), explainer.attribute(x, 1))


def test_methods_of_two_models_are_refused():
    (one, x), (other, _) = CASES["pooled"].make(), CASES["flat"].make()
    with pytest.raises(InputError, match="have different models"):
        explain_grid([GradCAM(one, "features"), GradCAM(other, "features.4")], x[0], [None])
    with pytest.raises(TargetError, match="no methods"):
        explain_grid([], x[0], [None])


def test_a_layer_that_the_score_does_not_reach_is_named_among_several():
    class Aside(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.aside, self.head = nn.Conv2d(3, 4, 3, 2), nn.Conv2d(3, 4, 3, 2), nn.Linear(4, 3)

        def forward(self, x):
            self.aside(x)
            return self.head(self.used(x).mean((2, 3)))

    model = Aside().eval()
    tools = [GradCAM(model, layer, layout="channels_first") for layer in ("used", "aside")]
    with pytest.raises(LayerError, match="the score does not depend on layer 'aside'"):
        explain_grid(tools, torch.randn(3, 12, 12), [0])


def test_a_pass_without_gradients_builds_no_graph():
    class Activation(LayerExplainer):
        name, paper = "activation", "this test"

        def compute_layer_map(self, features):
            assert not features.values.requires_grad
            with pytest.raises(LayerError, match="needs_gradient = True"):
                features.gradient  # noqa: B018  # that it raises is the test
            return features.activation.sum(1)

    model, x = CASES["residual"].make()
    graphs = []
    model.head.register_forward_hook(lambda module, args, output: graphs.append(output.requires_grad))
    with untouched(model, x):
        heat = Activation(model, "block").attribute(x, 1)
    assert graphs == [False]
    torch.testing.assert_close(heat, model.block(model.relu(model.norm(model.stem(x)))).sum(1).detach())


class Curved(LayerExplainer):
    """Hessian times activation, summed over channels."""

    name, paper, backward_passes = "curved", "this test", "3"
    needs_gradient = second_order = True

    def compute_layer_map(self, features):
        return features.compute_curvature().sum(1)


def test_the_curvature_is_the_hessian_times_the_activation():
    model, x = plain(samples=1)
    A = model.before(x).detach()
    hessian = torch.autograd.functional.hessian(lambda a: model.after(a)[0, 1], A).reshape(A.numel(), -1)
    expected = (hessian @ A.flatten()).view_as(A).sum(1)
    heat = Curved(model, "middle").attribute(x, 1)
    assert heat.abs().max() > 1e-4
    torch.testing.assert_close(heat, expected, rtol=1e-9, atol=1e-14)
    linear, y = CASES["pooled"].make()
    assert not Curved(linear, "features").attribute(y, 0).any()


class PooledInBoxes(nn.Module):
    """A torchvision operation behind the layer that has no second derivative."""

    def __init__(self):
        super().__init__()
        self.features = nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, x):
        boxes = [torch.tensor([[0.0, 0.0, 4.0, 4.0]])] * len(x)
        pooled = torchvision.ops.roi_align(self.features(x).relu(), boxes, 2).flatten(1)
        return torch.stack([pooled.square().sum(1), pooled.sum(1)], 1)


def test_an_operation_without_second_derivatives_is_one_error():
    model = PooledInBoxes().eval()
    with pytest.raises(
        ModelError, match="shapleycam needs second derivatives, and an operation behind layer 'features'"
    ):
        ShapleyCAM(model, "features").attribute(torch.rand(1, 3, 8, 8), 0)
    assert GradCAM(model, "features").attribute(torch.rand(1, 3, 8, 8), 0).shape == (1, 8, 8)


@pytest.mark.slow
@pytest.mark.parametrize("method", [GradCAM, IntegratedGradients])
@pytest.mark.one_in(2)
def test_compiled_code_calls_a_method_eagerly(method):
    model, x = plain(samples=1)
    expected, explainer = 2 * method(model).attribute(x, 1), method(model)
    for function in (
        lambda y: 2 * method(model).attribute(y + 0, 1),
        lambda y: 2 * explainer.attribute(y + 0, 1),
        lambda y: 2 * explainer(y + 0, 1),
    ):
        compiled = torch.compile(function, backend="eager")
        for _ in range(2):
            torch.testing.assert_close(compiled(x), expected)


@pytest.mark.thorough  # test_package_structure asks it of the process in which it times the import
def test_the_compiler_is_not_imported_with_the_package():
    code = "import camscope, sys; camscope.GradCAM; assert 'torch._dynamo' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.slow
def test_attention_has_a_curvature_too():
    torch.manual_seed(0)
    model, x = Tokens().double().eval(), torch.randn(1, 3, 24, 16).double()
    A = model.block(torch.cat([model.prefix, model.embed(x).flatten(2).transpose(1, 2)], 1)).detach()

    def score(a):
        return model.head((a + model.attention(a, a, a, need_weights=False)[0]).mean(1))[0, 1]

    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        hessian = torch.autograd.functional.hessian(score, A).reshape(A.numel(), -1)
    expected = (hessian @ A.flatten()).view_as(A)[:, 1:].sum(2).view(1, 6, 4)
    torch.testing.assert_close(Curved(model, "block").attribute(x, 1), expected, rtol=1e-8, atol=1e-12)


def test_a_question_is_asked_of_versions_of_their_own_samples():
    model, x = CASES["pooled"].make(3)
    score = Score(model, [2, 0, 1])
    clean = score(x)
    owners = torch.tensor([2, 0, 0, 1, 2])
    torch.testing.assert_close(score(x[owners], owners), clean[owners])
    with pytest.raises(TargetError, match="the output has 4 samples, but the first call had 3"):
        score(x[[0, 1, 2, 0]])


def test_what_a_model_takes_for_each_sample_goes_with_its_versions():
    class Offset(nn.Module):
        def forward(self, x, offset, *, table, scale):
            assert len(table) == 5, "a table that is the same for all stays as it is"
            return (x.flatten(1)[:, :3] + offset) * scale[:, None]

    x, offset, scale = torch.randn(2, 3, 2, 2), torch.randn(2, 3), torch.tensor([1.0, -2.0])
    score = Score(Offset(), 1, args=(offset,), kwargs={"table": torch.ones(5, 2), "scale": scale})
    clean, owners = score(x), torch.tensor([1, 1, 0])
    torch.testing.assert_close(score(x[owners], owners), clean[owners])


def test_an_argument_as_long_as_the_batch_that_is_not_one_a_sample_is_refused():
    class Weighted(Pooled):
        def forward(self, x, weights):
            return super().forward(x * weights.view(1, -1, 1, 1))

    torch.manual_seed(0)
    model, x, weights = Weighted(conv(), 6).eval(), torch.randn(3, 3, 16, 12), torch.tensor([1.0, 5.0, -3.0])
    message = "3 entries, as many as the batch has samples, but the entries do not belong to the samples"
    with pytest.raises(InputError, match=message):
        ScoreCAM(model, "features.3", layout="channels_first", batch_size=3).attribute(x, 1, weights)
    assert GradCAM(model, "features.3", layout="channels_first").attribute(x, 1, weights).any()
    one = ScoreCAM(model, "features.3", layout="channels_first").attribute(x[:1], 1, weights)
    assert one.shape == (1, 4, 3)


def test_pieces_are_halved_where_memory_ends_and_lose_nothing():
    sizes = []

    def run(part):
        sizes.append(part.stop - part.start)
        if sizes[-1] > 3:
            raise torch.OutOfMemoryError("too much")
        return torch.arange(part.start, part.stop)

    assert map_chunks(10, 8, run).tolist() == list(range(10))
    assert sizes == [8, 4, 2, 2, 2, 2, 2]
    assert map_chunks(0, 8, run).shape == (0,)
    with pytest.raises(torch.OutOfMemoryError):
        map_chunks(1, 1, lambda part: run(slice(0, 9)))


def test_wide_layers_leave_room_for_few_copies():
    cpu = torch.device("cpu")
    assert count_copies_that_fit_in_memory(2**20, cpu) == 64
    assert count_copies_that_fit_in_memory(2**40, cpu) == 1


@pytest.mark.parametrize("method", ["gradcam", "hirescam", "scorecam", "ablationcam"])
def test_bf16_is_close_and_changes_nothing(method):
    torch.manual_seed(3)
    model, x = Pooled(conv(), 6).eval(), torch.randn(2, 3, 32, 24)
    tool = GradCAM(model, "features.3", precision="bf16").with_method(method)
    strides = []
    model.features[0].register_forward_pre_hook(lambda module, args: strides.append(args[0].stride()))
    with untouched(model, x):
        heat = tool.attribute(x, 1)
    assert not torch.is_autocast_enabled("cpu")
    assert strides[0][1] == 1, "the channels lie last in memory"
    assert heat.dtype == torch.float32
    exact = GradCAM(model, "features.3").with_method(method).attribute(x, 1)
    assert not torch.equal(heat, exact), "bfloat16 was not used"
    torch.testing.assert_close(heat, exact, rtol=0.1, atol=0.05 * float(exact.abs().max()))
    assert tool.explain(x[0], 1).parameters["precision"] == "bf16"


def test_several_precisions_do_not_share_a_pass():
    model, x = CASES["pooled"].make()
    one, two = LayerCAM(model, "features"), LayerCAM(model, "features", precision="bf16")
    exact, rough = (row[0].attribution for row in explain_grid([one, two], x[0], [1]))
    np.testing.assert_array_equal(exact, one.explain(x[0], 1).attribution)
    assert not np.array_equal(exact, rough)


class Twice(nn.Module):
    """A layer that runs twice, of which the score reads the first call only."""

    def __init__(self):
        super().__init__()
        self.twice, self.head = nn.Conv2d(3, 4, 3, 1, 1), nn.Linear(4, 3)

    def forward(self, x):
        read, aside = self.twice(x), self.twice(-x)
        return {"logits": self.head(read.relu().mean((2, 3))), "aside": aside}


@pytest.mark.parametrize("method", [name for name, kind in METHODS.items() if issubclass(kind, LayerExplainer)])
@pytest.mark.one_in(5)
def test_the_call_that_counts_is_the_same_for_every_method(method):
    torch.manual_seed(0)
    model, x = Twice().double().eval(), torch.randn(2, 3, 6, 6).double()
    if method == "cam":
        pytest.skip("a ReLU lies between the layer and the pooling")
    tool = METHODS[method](model, "twice", layout="channels_first")
    first = METHODS[method](model, "twice", layout="channels_first", call_index=0)
    torch.testing.assert_close(tool.attribute(x, 1), first.attribute(x, 1), rtol=1e-10, atol=1e-12)
    assert "layer 'twice' ran 2 times; call 0 is explained" in tool.explain(x[0], 1).notes


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.by_family
def test_every_method_has_a_bf16_map_in_float32(method):
    case = first_answered(method, "pooled", "tokens")
    model, x = case.make(1)
    tool = explainer(method, model, case.layer, precision="bf16")
    one = tool.explain(x, 1)
    assert one.attribution.dtype == np.float32
    assert np.isfinite(one.attribution).all()
    with torch.autocast("cpu", torch.bfloat16):
        assert explainer(method, model, case.layer).attribute(x, 1).dtype == torch.float32


def test_settings_that_only_share_a_name_are_not_handed_on():
    model, _ = CASES["pooled"].make()
    finer = METHODS["finercam"](model, "features", gamma=0.3)
    assert finer.with_method("kpcacam").gamma == METHODS["kpcacam"](model, "features").gamma
    assert METHODS["sscam"](model, "features", n_samples=3).with_method("smoothgradcam++").n_samples == 25
    assert ScoreCAM(model, "features", n_channels=5).with_method("sscam").n_channels == 5


def test_explainers_with_another_preprocessing_do_not_answer_together():
    from camscope import Preprocess

    model, x = CASES["pooled"].make()
    one = GradCAM(model, "features", preprocess=Preprocess(resize=(16, 12), mean=(0.5,) * 3, std=(0.5,) * 3))
    other = GradCAM(model, "features", preprocess=Preprocess(resize=(8, 8), mean=(0.5,) * 3, std=(0.5,) * 3))
    with pytest.raises(InputError, match="have different preprocess: explain each separately"):
        one.explain_methods(x[0], [one, other])
    with pytest.raises(InputError, match="have different class_names"):
        one.explain_methods(x[0], [one, replace(one, class_names=["a", "b", "c"])])


def test_explainers_with_the_same_callable_as_their_preprocessing_answer_together():
    model, _ = CASES["pooled"].make()

    def small(image):
        return torch.from_numpy(np.array(image.resize((12, 16)))).permute(2, 0, 1) / 255

    tools = [kind(model, "features", preprocess=small) for kind in (GradCAM, LayerCAM)]
    photo = np.random.default_rng(0).integers(0, 256, (20, 18, 3), dtype=np.uint8)
    one, two = (row[0] for row in explain_grid(tools, photo, [1]))
    assert (one.method, two.method) == ("gradcam", "layercam")
    with pytest.raises(InputError, match="have different preprocess"):
        explain_grid([tools[0], LayerCAM(model, "features", preprocess=lambda image: small(image))], photo, [1])


@pytest.mark.parametrize("method", ["scorecam", "groupcam", "vitcx", "ablationcam", "reciprocam", "sscam"])
@pytest.mark.parametrize("batch_size", [None, 2, 3])
@pytest.mark.one_in(5)
def test_a_callable_that_holds_something_of_each_sample_is_asked_in_its_place(method, batch_size):
    torch.manual_seed(1)
    model, x = nn.Sequential(conv(), nn.Conv2d(6, 4, 1)).double().eval(), torch.randn(2, 3, 16, 12).double()
    masks = (torch.rand(2, 4, 3) > 0.5).double()
    tool = METHODS[method](model, "0", batch_size=batch_size)
    both = tool.attribute(x, lambda output: (output[:, 3] * masks).sum((1, 2)))
    for i in range(2):
        alone = tool.attribute(x[i : i + 1], lambda output, i=i: (output[:, 3] * masks[i]).sum((1, 2)))
        torch.testing.assert_close(both[i], alone[0], rtol=1e-9, atol=1e-12)


def test_a_difference_has_the_probability_of_the_one_against_the_other():
    class Logits(nn.Module):
        def forward(self, x):
            return x.flatten(1)

    x = torch.tensor([[[2.0, 2.0, 9.0]], [[-100.0, -101.0, -100.0]]])
    score = Score(Logits(), Difference(0, 1))
    torch.testing.assert_close(
        score.probability(score.forward(x), 2), torch.tensor([0.5, 1 / (1 + np.exp(-1.0))]).float()
    )
