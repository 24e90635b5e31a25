"""Wrappers: exact where they must be, explainers like any other, and nothing of the model changed."""

import pickle
from collections import OrderedDict

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from camscope.errors import InputError, LayerError, ModelError, TargetError
from camscope.explainers import (
    METHODS,
    SESS,
    AblationCAM,
    Augmented,
    Contrast,
    Denoised,
    Fused,
    GradCAM,
    HiResCAM,
    LayerCAM,
    RefineCAM,
    XGradCAM,
)
from camscope.explainers.core.resize_and_blur import resize_input
from camscope.explainers.core.run_methods_in_shared_passes import explain_grid
from camscope.targets import Box, Difference, OutputPart, Region, Score, Target
from tests.nets import CASES, Pooled, plain
from tests.tools import Counting, seen_before
from tests.untouched import untouched

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore::camscope.errors.CamscopeWarning"),
]


class Summed(nn.Module):
    """features -> sum over space -> linear head: d score / d A_k = w_k, everywhere, at every size."""

    def __init__(self, features, channels):
        super().__init__()
        self.features, self.head = features, nn.Linear(channels, 3)

    def forward(self, x):
        return self.head(self.features(x).flatten(2).sum(2))


def pointwise(kind=nn.Conv2d):
    """A float64 network that sees each cell by itself, so that it is equivariant under every flip."""
    torch.manual_seed(2)
    return Summed(nn.Sequential(kind(3, 5, 1), nn.Tanh(), kind(5, 6, 1)), 6).double().eval()


def inputs(*shape):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(4))


# --- Augmented


@pytest.mark.parametrize("flips", [True, False, 0, -1, (0, 1)])
def test_the_mean_over_flips_of_an_equivariant_network_is_the_plain_map(flips):
    model, x = pointwise(), inputs(2, 3, 6, 5)
    for method in (GradCAM, HiResCAM, LayerCAM):
        tool = method(model, "features")
        torch.testing.assert_close(Augmented(tool, flips).attribute(x, 1), tool.attribute(x, 1), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(("flips", "axes"), [(True, [(2,)]), (0, [(1,)]), ((1, 0), [(1,), (2,), (1, 2)])])
def test_each_flip_is_carried_back_by_a_flip_and_counts_once(flips, axes):
    model, x = CASES["flat"].make(dtype=torch.float64)
    tool = HiResCAM(model, "features.4")
    views = [tool.attribute(x, 1), *(tool.attribute(x.flip([a + 1 for a in axis]), 1).flip(axis) for axis in axes)]
    assert not torch.allclose(views[0], views[1]), "a test of a flip needs a network that sees it"
    made = Augmented(tool, flips).attribute(x, 1)
    torch.testing.assert_close(made, torch.stack(views).mean(0), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("case", ["residual", "tokens", "channels last", "signal", "volume"])
def test_the_map_of_the_flipped_input_is_the_flipped_map_on_every_network(case):
    case = CASES[case]
    model, x = case.make(dtype=torch.float64)
    every = tuple(range(x.ndim - 2))
    tool = Augmented(GradCAM(model, case.layer), every)
    flipped = tool.attribute(x.flip(-1), 1)
    torch.testing.assert_close(flipped.flip(-1), tool.attribute(x, 1), rtol=1e-9, atol=1e-14)


def test_other_scales_are_brought_back_between_cell_centers():
    model, x = pointwise(), inputs(2, 3, 8, 6)
    tool = HiResCAM(model, "features")
    size = {0.5: (4, 3), 2.0: (16, 12)}
    views = [tool.attribute(x, 1)]
    for target in size.values():
        seen = F.interpolate(x, target, mode="bilinear", antialias=True)
        there = F.interpolate(tool.attribute(seen, 1)[:, None], (8, 6), mode="bilinear")[:, 0]
        views.append(there * mean_size(views[0]) / mean_size(there))
    made = Augmented(tool, False, (0.5, 2.0)).attribute(x, 1)
    torch.testing.assert_close(made, torch.stack(views).mean(0), rtol=1e-12, atol=1e-14)
    again = Augmented(tool, False, (1.0, 0.5, 2.0, 0.5)).attribute(x, 1)
    torch.testing.assert_close(again, made)


def mean_size(maps):
    return maps.abs().mean((1, 2), keepdim=True)


@pytest.mark.parametrize("scales", [(2.0,), (0.5,), (0.5, 2.0)])
@pytest.mark.parametrize("method", [HiResCAM, LayerCAM, GradCAM, "eigencam"])
def test_of_a_constant_image_every_scale_says_the_same_whatever_the_number_of_cells(method, scales):
    torch.manual_seed(1)
    model = Pooled(nn.Conv2d(3, 4, 1), 4).double().eval()
    model.features.bias.data += 2
    model.head.weight.data.abs_()
    tool = (METHODS[method] if isinstance(method, str) else method)(model, "features")
    x = torch.tensor([0.5, -0.3, 1.0], dtype=torch.float64).view(1, 3, 1, 1).expand(1, 3, 8, 8)
    right = tool.attribute(x, 1)
    assert right.all()
    torch.testing.assert_close(Augmented(tool, True, scales).attribute(x, 1), right, rtol=1e-12, atol=0)


def test_a_scale_whose_maps_are_zero_counts_as_zero():
    class Sized(nn.Module):
        """Only inputs of 8 cells have a score that depends on them."""

        def __init__(self):
            super().__init__()
            self.features = nn.MaxPool2d(1)

        def forward(self, x):
            return self.features(x).sum((2, 3)) * (x.shape[2] == 8)

    x = inputs(1, 3, 8, 8)
    tool = HiResCAM(Sized(), "features")
    torch.testing.assert_close(Augmented(tool, False, (2.0,)).attribute(x, 1), tool.attribute(x, 1) / 2)


@pytest.mark.parametrize("wrap", [lambda one: one, Denoised, lambda one: Contrast(one, 1, 0), lambda one: Fused([one])])
@pytest.mark.parametrize("method", [GradCAM, RefineCAM])
@pytest.mark.one_in(3)
def test_the_layer_of_the_plain_input_serves_every_view(method, wrap):
    model, x = shrinking(), torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    tool = wrap(method(model))
    plain = tool.explain(x[0])
    small = tool.explain(x[0, :, :8, :8])
    assert plain.layer != small.layer, "a test of the layer needs a choice that depends on the size"
    made = Augmented(tool, scales=(0.5,)).explain(x[0])
    assert made.layer == plain.layer
    named = method(model, plain.layer.split(" + ") if method is RefineCAM else plain.layer)
    expected = Augmented(wrap(named), scales=(0.5,)).explain(x[0])
    np.testing.assert_array_equal(made.attribution, expected.attribution)
    assert sum("chosen" in note for note in made.notes) == sum("chosen" in note for note in plain.notes)


def shrinking():
    """Four stages of stride 2: how many of them have more than one cell depends on the input."""
    torch.manual_seed(0)
    stages = {name: nn.Conv2d(c, 6, 3, 2, 1) for name, c in (("a", 3), ("b", 6), ("c", 6), ("d", 6))}
    return Pooled(nn.Sequential(OrderedDict(stages)), 6).eval()


def test_a_ramp_stays_a_ramp_through_every_scale():
    model = Summed(nn.Conv1d(1, 2, 1, bias=False), 2).double()
    ramp = torch.arange(32, dtype=torch.float64)[None, None]
    tool = HiResCAM(model, "features", layout="channels_first")
    made = Augmented(tool, False, (0.5, 1.5, 3.0)).attribute(ramp, 1)
    torch.testing.assert_close(made[0, 4:-4], tool.attribute(ramp, 1)[0, 4:-4], rtol=1e-12, atol=1e-12)


def test_shrinking_averages_what_it_drops_whatever_the_rank():
    stripes = torch.ones(1, 1, 16, dtype=torch.float64)
    stripes[..., ::2] = -1
    assert resize_input(stripes, (4,)).abs().max() < 0.1  # without antialiasing some of the stripes would stay
    flat = inputs(2, 3, 12, 10)
    torch.testing.assert_close(resize_input(flat, (5, 7)), F.interpolate(flat, (5, 7), mode="bilinear", antialias=True))
    deep = flat[:, :, None].expand(-1, -1, 4, -1, -1)
    torch.testing.assert_close(
        resize_input(deep, (2, 5, 7)), resize_input(flat, (5, 7))[:, :, None].expand(-1, -1, 2, -1, -1)
    )
    assert resize_input(flat.half(), (5, 7)).dtype == torch.float16


class Places(nn.Module):
    """Sees each cell by itself and answers for each: whatever it is asked, under every flip it says the same."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 5, 1), nn.Tanh())
        self.head = nn.Conv2d(5, 3, 1)

    def forward(self, x):
        return {"out": self.head(self.features(x)), "aux": torch.zeros(len(x), 2)}


class Parts(Places):
    """A detection in each of 2 x 4 parts of the input."""

    def forward(self, x):
        height, width = x.shape[2] / 2, x.shape[3] / 4
        corners = [(j * width, i * height, (j + 1) * width, (i + 1) * height) for i in range(2) for j in range(4)]
        scores = F.adaptive_avg_pool2d(super().forward(x)["out"][:, 1], (2, 4)).flatten(1).sigmoid()
        labels = torch.ones(8, dtype=torch.int64)
        return [{"boxes": x.new_tensor(corners), "labels": labels, "scores": one} for one in scores]


class Queries(Parts):
    """The same detections, as DETR returns them."""

    def forward(self, x):
        found, size = super().forward(x), x.new_tensor([x.shape[3], x.shape[2]])
        boxes = torch.stack([one["boxes"] for one in found]).unflatten(2, (2, 2))
        boxes = torch.cat([boxes.mean(2) / size, boxes.diff(dim=2)[:, :, 0] / size], 2)
        chances = torch.stack([one["scores"] for one in found])[..., None]
        return {"pred_boxes": boxes, "logits": torch.cat([-100 + chances * 0, chances, 0 * chances], 2)}


CORNER = np.zeros((8, 8), bool)
CORNER[:4, :2] = True
PLACED = [
    (Places, Region(1, mask=CORNER)),
    (Places, Region(1, point=(1.5, 2.5))),
    (Places, OutputPart("out", Region(1, mask=CORNER))),
    (Parts, Box(0, 0, 2, 4)),
    (Queries, Box(0, 0, 2, 4, activation="softmax")),
    (Places, Region(1)),
]


def asked_of_a_place(kind):
    torch.manual_seed(3)
    return kind().double().eval(), inputs(2, 3, 8, 8)


@pytest.mark.parametrize(("kind", "question"), PLACED)
def test_a_question_of_a_place_goes_along_with_every_flip(kind, question):
    model, x = asked_of_a_place(kind)
    tool = HiResCAM(model, "features")
    right = tool.attribute(x, question)
    assert right.any()
    for flips in (True, 0, (0, 1)):
        torch.testing.assert_close(Augmented(tool, flips).attribute(x, question), right, rtol=1e-9, atol=1e-14)
    several = Augmented(tool, (0, 1)).explain_batch(list(x), [question, question])
    torch.testing.assert_close(torch.stack([torch.from_numpy(one.attribution) for one in several]), right)


@pytest.mark.parametrize(("kind", "question"), PLACED[:-1])
def test_a_question_of_a_place_goes_along_with_every_scale(kind, question):
    model, x = asked_of_a_place(kind)
    made = Augmented(HiResCAM(model, "features"), True, (0.5, 2.0)).attribute(x, question)
    inside = F.max_pool2d(torch.from_numpy(CORNER).double()[None], 3, 1, 1)[0] > 0  # between cells it is interpolated
    assert made[:, inside].any()
    assert not made[:, ~inside].any()


def test_a_place_that_cannot_be_carried_along_is_an_error():
    class Mine(Target):
        selects_positions = True

        def __call__(self, output):
            return output["out"][:, 1, 0, 0]

        def describe(self, sample, class_name):
            return "mine"

    model, x = asked_of_a_place(Places)
    with pytest.raises(
        TargetError, match=r"Mine is a position in the image, so flips need its method flipped\(flips, size\)"
    ):
        Augmented(HiResCAM(model, "features")).attribute(x, Mine())
    assert HiResCAM(model, "features").attribute(x, Mine()).any()


class Sided(nn.Module):
    """Its top class says which side is bright."""

    def __init__(self):
        super().__init__()
        self.features = nn.MaxPool2d(1)

    def forward(self, x):
        left, right = self.features(x).mean(1).tensor_split(2, 2)
        return torch.stack([left.sum((1, 2)), right.sum((1, 2))], 1)


def test_the_plain_pass_comes_first_and_fixes_the_class():
    x = torch.zeros(2, 1, 4, 4)
    x[0, ..., :2], x[1, ..., 2:] = 1, 1
    tool = Augmented(HiResCAM(Sided(), "features", layout="channels_first"))
    torch.testing.assert_close(tool.attribute(x), tool.attribute(x, [0, 1]))
    assert [one.target for one in tool.explain_batch(list(x))] == [0, 1]
    assert [one.score for one in tool.explain_batch(list(x))] == [8.0, 8.0]


@pytest.mark.parametrize("flips", ["h", None, 1.0, ("h",), (True,)])
def test_flips_that_are_no_axes_are_refused(flips):
    with pytest.raises(InputError, match=r"^flips=.*: expected True, False, or spatial axes"):
        Augmented(GradCAM(pointwise()), flips)


@pytest.mark.parametrize("scales", [(0.0,), (-1.0,), (float("nan"),), (float("inf"),), 0.75, "1", ("a",), None])
def test_scales_that_are_none_are_refused(scales):
    with pytest.raises(InputError, match="factors above 0"):
        Augmented(GradCAM(pointwise()), scales=scales)


def test_an_axis_that_the_input_lacks_is_refused():
    with pytest.raises(InputError, match=r"flips=2 is out of range: the spatial axes of the input are 0\.\.1"):
        Augmented(GradCAM(pointwise(), "features"), 2).attribute(inputs(1, 3, 4, 4), 0)


def test_a_size_that_the_model_refuses_is_named_with_the_models_own_words():
    model, x = CASES["flat"].make()
    tool = GradCAM(model, "features.4")
    why = (
        r"^Flat does not accept an input of size 8 x 6 \(scale 0\.5\): pass scales=\(1\.0,\).* RuntimeError: .*mat1 and"
    )
    with untouched(model, x), pytest.raises(InputError, match=why) as caught:
        Augmented(tool, scales=(1.0, 0.5)).attribute(x, 1)
    assert isinstance(caught.value.__cause__, RuntimeError)
    with pytest.raises(LayerError, match="no layer 'nowhere'"):  # what camscope says itself stays as it is
        Augmented(Astray(model, "features.4"), False, (0.5,)).attribute(x, 1)
    with pytest.raises(ZeroDivisionError):  # and so does what fails at the input's own size
        Augmented(Astray(model, "features.4"), flips=True).attribute(x, 1)


class Astray(GradCAM):
    """Fails at every input but its first."""

    seen = 0

    def compute_maps(self, x, scores):
        self.seen += 1
        if self.seen > 1 and x.shape[2] == 16:
            raise ZeroDivisionError
        if self.seen > 1:
            raise LayerError("no layer 'nowhere'")
        return super().compute_maps(x, scores)


# --- Denoised


def test_contributions_of_rank_one_are_their_sum():
    torch.manual_seed(1)
    model = Pooled(nn.Conv2d(1, 6, 1, bias=False), 6).double()
    x = inputs(3, 1, 5, 4)
    for method in (GradCAM, XGradCAM, HiResCAM, AblationCAM):
        tool = method(model, "features", layout="channels_first")
        right = tool.attribute(x, 1)
        assert right.any()
        torch.testing.assert_close(Denoised(tool).attribute(x, 1), right, rtol=1e-9, atol=1e-12)


def along_the_first_component(parts):
    """(K,cells): numpy's own singular vectors, one sample at a time."""
    first = np.linalg.svd(parts, full_matrices=False)[2][0]
    return parts.sum(0) @ first * first


@pytest.mark.parametrize("method", [GradCAM, HiResCAM])
def test_of_the_sum_the_part_along_the_first_component_is_kept(method):
    model, x = CASES["flat"].make(dtype=torch.float64)
    row, features = model.head.weight[2].detach().view(6, 4, 3), model.features(x).detach()
    weights = row if method is HiResCAM else row.mean((1, 2), keepdim=True)
    parts = (weights * features).flatten(2).numpy()
    expected = np.stack([along_the_first_component(one) for one in parts]).reshape(2, 4, 3)
    expected = expected if method is HiResCAM else np.maximum(expected, 0)
    plain = method(model, "features")
    made = Denoised(plain).attribute(x, 2)
    np.testing.assert_allclose(made, expected, rtol=1e-9, atol=1e-12)
    assert not torch.allclose(made, plain.attribute(x, 2))
    assert "compute_layer_map" not in vars(plain)


def test_the_size_of_the_gradient_only_scales_the_map():
    model, x = CASES["flat"].make()
    right = Denoised(HiResCAM(model, "features")).attribute(x, 1)
    model.head.weight.data *= 2.0**-100
    torch.testing.assert_close(Denoised(HiResCAM(model, "features")).attribute(x, 1) * 2.0**100, right)
    model.head.weight.data.zero_()
    assert not Denoised(GradCAM(model, "features")).attribute(x, 1).any()


def test_a_single_map_is_its_own_first_component():
    model, x = CASES["residual"].make(1)
    for inner in (RefineCAM(model, "block"), METHODS["eigencam"](model, "block")):
        made, right = Denoised(inner).explain(x[0], 1), inner.explain(x[0], 1)
        assert made.attribution.tobytes() == right.attribution.tobytes()
        assert any("nothing was denoised" in note for note in made.notes)
    contrast = Denoised(Contrast(GradCAM(model, "block"), 0, 1)).explain(x[0])  # which only asks another question
    assert (
        contrast.attribution.tobytes()
        == Contrast(Denoised(GradCAM(model, "block")), 0, 1).explain(x[0]).attribution.tobytes()
    )
    assert not any("denoised" in note for note in contrast.notes)


def test_denoised_goes_round_what_any_wrapper_is_round():
    model, x = CASES["residual"].make(dtype=torch.float64)
    one, two = GradCAM(model), HiResCAM(model, "norm")
    refine = RefineCAM(model, "block")
    cases = [
        (Denoised(Augmented(one, scales=(0.5,))), Augmented(Denoised(one), scales=(0.5,)), True),
        (Denoised(Fused([one, two], "mean")), Fused([Denoised(one), Denoised(two)], "mean"), True),
        (Denoised(Contrast(Augmented(two), 0, 1)), Contrast(Augmented(Denoised(two)), 0, 1), True),
        (Denoised(Denoised(one)), Denoised(one), False),
        (Denoised(Augmented(refine)), Augmented(Denoised(refine)), False),
    ]
    for outer, inner, changes in cases:
        target = None if isinstance(inner, Contrast) else 1
        made, right = outer.explain(x[0], target), inner.explain(x[0], target)
        assert made.attribution.tobytes() == right.attribution.tobytes(), outer
        assert made.notes == right.notes
        assert (made.attribution.tobytes() != outer.explainer.explain(x[0], target).attribution.tobytes()) == changes, (
            outer
        )
        assert any("nothing was denoised" in note for note in made.notes) == ("refinecam" in inner.composed_name)


def test_denoised_methods_share_their_passes():
    model, x = CASES["residual"].make()
    counted = seen_before(Counting(model), x)
    tools = [kind(counted, layer) for kind in (GradCAM, HiResCAM) for layer in ("model.block", "model.norm")]
    found = explain_grid([Denoised(one) for one in tools], x[0], [1])
    assert (counted.forwards, counted.backwards) == (1, 1)
    Denoised(Fused(tools)).attribute(x, 1)
    assert (counted.forwards, counted.backwards) == (2, 2)
    for (made,), one in zip(found, tools, strict=True):
        alone = Denoised(one).explain(x[0], 1)
        assert (made.attribution.tobytes(), made.method, made.layer) == (
            alone.attribution.tobytes(),
            alone.method,
            alone.layer,
        )


# --- Contrast


def test_the_contrast_of_a_linear_method_is_the_difference_of_two_maps():
    for case in ("flat", "residual", "tokens"):
        model, x = CASES[case].make(dtype=torch.float64)
        tool = HiResCAM(model, CASES[case].layer)
        expected = tool.attribute(x, 2) - tool.attribute(x, 0)
        torch.testing.assert_close(Contrast(tool, 2, 0).attribute(x), expected, rtol=1e-10, atol=1e-13)


def test_a_contrast_says_what_it_is():
    model, x = CASES["pooled"].make(1)
    names = ["lynx", "tabby", "fox"]
    made = Contrast(GradCAM(model, "features", class_names=names), "tabby", "lynx").explain(x[0])
    logits = model(x)[0].detach()
    assert (made.target, made.probability, made.label) == (None, None, "log-odds of tabby over lynx")
    assert made.score == pytest.approx(float(logits[1] - logits[0]), rel=1e-5)
    assert made.caption == f"log-odds of tabby over lynx (score {made.score:.3g}) · Grad-CAM, contrast · features"
    assert len(made.top_classes) == 3


def test_a_contrast_takes_no_other_target():
    model, x = CASES["pooled"].make()
    tool = Augmented(Contrast(GradCAM(model, "features"), 1, 0))
    for target in (1, "cat", [0, 1], Difference(0, 1), lambda output: output[:, 0]):
        with (
            untouched(model, x),
            pytest.raises(TargetError, match="explains 1 rather than 0 and accepts no other target"),
        ):
            tool.attribute(x, target)
    with pytest.raises(TargetError, match="accepts no other target"):
        Contrast(tool, 1, 2).attribute(x)
    assert len(tool.explain_classes(x[0], [None, None])) == 2
    with pytest.raises(TargetError, match="expects a list"):
        GradCAM(model).explain_classes(x[0], Difference(0, 1))


@pytest.mark.parametrize(
    ("pair", "words"),
    [
        ((True, 0), "bool"),
        ((0, 1.0), "float"),
        ((-1, 0), "class -1 is negative"),
        ((None, 0), "a=None of a Difference"),
        (([0], 1), r"a=\[0\] of a Difference"),
    ],
)
def test_what_is_not_a_class_is_no_side_of_a_difference(pair, words):
    with pytest.raises(TargetError, match=words):
        Difference(*pair)
    with pytest.raises(TargetError, match=words):
        Contrast(GradCAM(pointwise()), *pair)


@pytest.mark.parametrize(
    ("pair", "words"),
    [
        ((0, 3), r"class 3 is out of range: the model has 3 classes \(0\.\.2\)"),
        (("cat", "cow"), "no class 'cow'; nearest names"),
        ((0, "cat"), "class 0 with itself"),
    ],
)
def test_a_difference_of_classes_that_are_not_there_is_refused_before_any_backward(pair, words):
    model, x = CASES["pooled"].make()
    output = []
    model.register_forward_hook(lambda module, args, out: output.append(out))
    tool = GradCAM(model, "features", class_names=["cat", "dog", "fox"])
    with untouched(model, x), pytest.raises(TargetError, match=words):
        tool.attribute(x, Difference(*pair))
    output[-1].sum().backward()  # its graph is whole


def test_a_list_may_ask_each_sample_its_own_kind_of_question():
    model, x = CASES["pooled"].make(4, torch.float64)
    tool = GradCAM(model, "features", class_names=["cat", "dog", "fox"])
    questions = [Difference(np.int64(2), "cat"), 1, None, Difference("dog", "fox")]
    together = tool.explain_batch(list(x), questions)
    for one, image, question in zip(together, x, questions, strict=True):
        alone = tool.explain(image, question)
        np.testing.assert_allclose(one.attribution, alone.attribution, rtol=1e-12)
        assert (one.target, one.label, one.probability) == (alone.target, alone.label, alone.probability)
        assert one.score == pytest.approx(alone.score)
    logits = model(x).tolist()
    assert [one.score for one in together[::3]] == pytest.approx(
        [logits[0][2] - logits[0][0], logits[3][1] - logits[3][2]]
    )
    assert (together[0].label, together[1].label) == ("log-odds of fox over cat", "dog")
    assert (together[0].target, together[1].target) == (None, 1)


def test_versions_of_a_sample_are_asked_its_own_difference():
    score = Score(nn.Identity(), [Difference(1, 0), 2, Difference(0, 2)])
    values = torch.tensor([[1.0, 5.0, 0.0], [7.0, 0.0, 3.0], [2.0, 0.0, 8.0]])
    assert score(values).tolist() == [4.0, 3.0, -6.0]
    assert score.classes is None
    assert score(values[[2, 0, 0]], torch.tensor([2, 0, 1])).tolist() == [-6.0, 4.0, 0.0]
    assert Score(nn.Identity(), [0, 1, 2])(values).tolist() == [1.0, 0.0, 8.0]


# --- an explainer like any other

WRAPPED = {
    "augmented": lambda model, layer: Augmented(GradCAM(model, layer)),
    "denoised": lambda model, layer: Denoised(LayerCAM(model, layer)),
    "fused": lambda model, layer: Fused([GradCAM(model, layer), HiResCAM(model, layer)], "mean"),
    "nested": lambda model, layer: Augmented(Denoised(HiResCAM(model, layer)), 0),
    "sess": lambda model, layer: SESS(GradCAM(model, layer), n_scales=2, scale_step=1.0),
    "refinecam": lambda model, layer: RefineCAM(model),  # with the layers that it finds
}
EVERY_WRAPPER = pytest.mark.parametrize("build", WRAPPED.values(), ids=WRAPPED)
EVERY_CASE = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


@EVERY_CASE
@EVERY_WRAPPER
@pytest.mark.one_in(5)
def test_the_same_question_has_the_same_bytes_and_changes_nothing(build, case):
    model, x = case.make()
    model.train()
    model.get_submodule(case.layer).eval()
    model(x).sum().backward()
    tool = build(model, case.layer)
    with untouched(model, x):
        first, again = tool.attribute(x, 2), tool.attribute(x, 2)
        tool.explain(x[0], 1)
    assert first.numpy().tobytes() == again.numpy().tobytes()
    assert (first.dtype, first.ndim, len(first)) == (x.dtype, x.ndim - 1, 2)
    assert first.isfinite().all()
    assert not first.requires_grad


@EVERY_CASE
@EVERY_WRAPPER
@pytest.mark.one_in(5)
def test_each_sample_alone_has_its_map_in_the_batch(build, case):
    model, x = case.make(4, torch.float64)
    tool, targets = build(model, case.layer), [2, None, 0, 1]
    batch = tool.attribute(x, targets)
    for i, target in enumerate(targets):
        torch.testing.assert_close(tool.attribute(x[i : i + 1], target)[0], batch[i], rtol=1e-9, atol=1e-12)
    together = [one.attribution for one in tool.explain_batch(list(x), targets)]
    np.testing.assert_allclose(np.stack(together), batch.numpy(), rtol=1e-9, atol=1e-12)


class Exploding(nn.Module):
    def forward(self, x):
        raise ArithmeticError("the head exploded")


@EVERY_CASE
@EVERY_WRAPPER
@pytest.mark.one_in(5)
def test_a_failed_call_changes_nothing_and_the_next_one_is_right(build, case):
    model, x = case.make()
    model.train()
    tool = build(model, case.layer)
    right = tool.attribute(x, 1)
    for target in (3, -1, "cat", [0], 1.0, True):
        with untouched(model, x), pytest.raises(TargetError):
            tool.attribute(x, target)
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)][-1]
    handle = linear.register_forward_pre_hook(lambda module, args: Exploding()(*args))
    with untouched(model, x), pytest.raises(ArithmeticError, match=r"^the head exploded$"):
        tool.attribute(x, 1)
    handle.remove()
    assert torch.equal(tool.attribute(x, 1), right)


@EVERY_CASE
@EVERY_WRAPPER
@pytest.mark.one_in(5)
def test_callers_without_gradients_get_the_same_map_and_a_constant_changes_nothing(build, case):
    model, x = case.make(dtype=torch.float64)
    tool = build(model, case.layer)
    right = tool.attribute(x, 1)
    with torch.inference_mode():
        assert torch.equal(tool.attribute(x.clone(), 1), right)
    model.get_submodule("head").bias.data += 1000
    torch.testing.assert_close(tool.attribute(x, 1), right, rtol=1e-8, atol=1e-12)


@EVERY_WRAPPER
def test_several_classes_are_several_calls(build):
    model, x = CASES["residual"].make()
    tool, targets = build(model, "block"), [2, None, Difference(1, 0), lambda output: output[:, 1]]
    for one, target in zip(tool.explain_classes(x[0], targets), targets, strict=True):
        alone = tool.explain(x[0], target)
        assert one.attribution.tobytes() == alone.attribution.tobytes()
        assert (one.target, one.label, one.score, one.status) == (alone.target, alone.label, alone.score, alone.status)


def test_a_wrapper_names_what_is_inside_with_its_settings():
    model, x = plain()
    tool = Augmented(Denoised(GradCAM(model, "middle", mode="as_is")), scales=[0.5, 1])
    inside = "GradCAM(Plain, layer='middle', mode='as_is')"
    assert repr(tool) == f"Augmented(Denoised({inside}), scales=(0.5, 1))"
    assert tool.parameters == {"explainer": f"Denoised({inside})", "flips": True, "scales": "(0.5, 1)"}
    made = tool.explain(x[0], 1)
    assert made.method == "gradcam, denoised, augmented"
    assert made.caption.endswith("Grad-CAM, denoised, augmented · middle")
    assert "the mean of 4 views" in made.notes
    pair = Fused([GradCAM(model, "middle"), GradCAM(model, "last")])
    assert repr(pair) == ("Fused([GradCAM(Plain, layer='middle'), GradCAM(Plain, layer='last')])")
    assert not {type(one).name for one in (tool, pair)} & set(METHODS)


def test_a_wrapper_keeps_the_mode_the_precision_and_the_way_in():
    model, x = CASES["residual"].make()
    inner = GradCAM(model, "block", mode="as_is", preprocess="imagenet", class_names=["a", "b", "c"], precision="bf16")
    for tool in (Augmented(inner), Denoised(inner), Contrast(inner, 0, 1), Fused([inner])):
        assert (tool.mode, tool.precision, tool.class_names) == ("as_is", "bf16", ("a", "b", "c"))
        assert tool.preprocess is inner.preprocess
    exact, coarse = (Augmented(HiResCAM(model, "block", precision=one)).attribute(x, 1) for one in (None, "bf16"))
    assert coarse.dtype == torch.float32
    assert 0 < (exact - coarse).abs().max() < 0.05 * exact.abs().max()


def test_several_methods_are_wrapped_alike():
    model, x = CASES["residual"].make()
    tool = Denoised(GradCAM(model, "block"))
    made = tool.explain_methods(x[0], ["layercam", HiResCAM, GradCAM(model, "stem")], 1)
    assert [one.method for one in made] == ["layercam, denoised", "hirescam, denoised", "gradcam"]
    assert made[0].attribution.tobytes() == Denoised(LayerCAM(model, "block")).explain(x[0], 1).attribution.tobytes()
    assert repr(Contrast(GradCAM(model), 1, 0).with_method("layercam")) == "Contrast(LayerCAM(Residual), a=1, b=0)"
    fused = Fused.at_layers(GradCAM(model), ["stem", "block"], "product").with_method("layercam")
    assert [one.layer for one in fused.explainers] == ["stem", "block"]
    assert (fused.fusion_mode, fused.composed_name) == ("product", "layercam, fused")


def test_gradients_are_asked_for_only_by_what_takes_them():
    with torch.inference_mode():
        model = Pooled(nn.Conv2d(3, 4, 3), 4).eval()
    x = torch.randn(1, 3, 6, 6)
    assert Denoised(AblationCAM(model, "features", layout="channels_first")).attribute(x, 1).shape == (1, 4, 4)
    with pytest.raises(ModelError, match="inference_mode"):
        Denoised(GradCAM(model, "features")).attribute(x, 1)


def test_a_wrapper_goes_through_pickle_and_round_explainers_only():
    model, x = CASES["pooled"].make()
    tool = Augmented(Contrast(GradCAM(model, "features"), 1, 0))
    assert torch.equal(pickle.loads(pickle.dumps(tool)).attribute(x), tool.attribute(x))
    for wrong in ("gradcam", GradCAM, model):
        with pytest.raises(InputError, match="Denoised wraps an explainer, such as GradCAM"):
            Denoised(wrong)
