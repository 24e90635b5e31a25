"""Keywords of a call: those that the model's forward names, those of settings, other toolkits', and typing errors."""

import inspect
import re
from functools import wraps
from typing import TypedDict, Unpack

import numpy as np
import pytest
import torch
from torch import nn

from camscope import (
    METHODS,
    Augmented,
    Denoised,
    ExpectedGradients,
    GradCAM,
    IntegratedGradients,
    LayerCAM,
    Occlusion,
    ScoreCAM,
    compare,
    run_batch,
)
from camscope.errors import InputError
from camscope.evaluation import evaluate
from camscope.explainers.core.translate_keywords_of_other_toolkits import FOREIGN_KEYWORD_HINTS, UNNECESSARY_KEYWORDS
from camscope.forward_signature import list_forward_keywords

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore::camscope.errors.CamscopeWarning"),
]


class More(TypedDict, total=False):
    gain: float


def decorated(function):
    @wraps(function)
    def inside(*args, **kwargs):
        return function(*args, **kwargs)

    return inside


class Swallowing(nn.Module):
    """A forward as Hugging Face writes them: decorated, with a **kwargs that it ignores but for what its type lists."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.head = nn.Linear(4, 3)

    @decorated
    def forward(self, x, scale=1.0, **kwargs: Unpack[More]):
        pooled = torch.tanh(self.conv(x)).square().mean((2, 3))
        return self.head(pooled) * scale * kwargs.get("gain", 1.0) + kwargs.get("secret", 0.0)


@pytest.fixture
def case():
    torch.manual_seed(0)
    return Swallowing().double().eval(), torch.randn(2, 3, 6, 8).double()


CALLS = {
    "attribute": lambda tool, x, **more: tool.attribute(x, 1, **more),
    "explain": lambda tool, x, **more: tool.explain(x[0], 1, **more),
    "explain_classes": lambda tool, x, **more: tool.explain_classes(x[0], [1], **more),
    "explain_methods": lambda tool, x, **more: tool.explain_methods(x[0], [tool], 1, **more),
    "explain_batch": lambda tool, x, **more: tool.explain_batch(list(x), 1, **more),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("word", ["eigen_smooth", "nonsense", "steps", "layer", "n_steps", "internal_batch_size"])
def test_a_keyword_that_nobody_takes_is_an_error_and_never_the_models(case, call, word):
    model, x = case
    with pytest.raises(InputError, match=rf"{word}=.*forward of Swallowing does not list it.*additional_forward_args"):
        CALLS[call](GradCAM(model, "conv"), x, **{word: 1})


@pytest.mark.parametrize("word", sorted(set(FOREIGN_KEYWORD_HINTS) - {"targets"}))
def test_other_toolkits_words_are_answered_with_ours(case, word):
    model, x = case
    ours = FOREIGN_KEYWORD_HINTS[word].partition(" ")[0].partition("(")[0]
    for ask in (
        lambda: GradCAM(model, "conv").attribute(x, 1, **{word: 1}),
        lambda: GradCAM(model, **{word: 1}),
        lambda: compare(model, x[0], ["gradcam"], **{word: 1}),
        lambda: run_batch(GradCAM(model), "images", "out", **{word: 1}),
        lambda: evaluate("run", "out", **{word: 1}),
    ):
        with pytest.raises(InputError) as raised:
            ask()
        assert ours in str(raised.value)


@pytest.mark.parametrize("word", sorted(UNNECESSARY_KEYWORDS))
def test_other_toolkits_words_that_are_not_needed_are_errors_that_say_why(case, word):
    model, x = case
    for ask in (lambda: GradCAM(model, "conv").attribute(x, 1, **{word: 1}), lambda: GradCAM(model, **{word: 1})):
        with pytest.raises(InputError, match=rf"^{word}= is not a keyword of camscope: it is not needed, because "):
            ask()


@pytest.mark.parametrize(
    ("tool", "word", "ours"),
    [
        (GradCAM, "use_cuda", "model.to"),
        (GradCAM, "device", "model.to"),
        (Occlusion, "strides", "stride="),
        (Occlusion, "sliding_window_shapes", "window="),
        (IntegratedGradients, "multiply_by_inputs", "InputXGradient"),
    ],
)
def test_a_constructors_foreign_word_is_answered_with_ours(case, tool, word, ours):
    with pytest.raises(InputError, match=f"^{word}= is not a keyword of camscope: use .*{re.escape(ours)}"):
        tool(case[0], **{word: 3})


def test_targets_is_answered_with_target_where_it_is_not_a_name_of_the_call(case):
    model, x = case
    with pytest.raises(InputError, match="use target= instead"):
        GradCAM(model, "conv").attribute(x, targets=[1, 2])
    assert len(GradCAM(model, "conv").explain_batch(list(x), targets=[1, 2])) == 2


def test_a_misspelled_setting_is_pythons_own_error_in_the_constructor(case):
    with pytest.raises(TypeError, match="nonsense"):
        GradCAM(case[0], nonsense=1)


def score_of(model, x, **more):
    return GradCAM(model, "conv").explain(x[0], 1, **more).score


def test_named_keywords_reach_the_model_through_decorators_and_types(case):
    model, x = case
    plain = model(x[:1])[0, 1].item()
    assert score_of(model, x, scale=3.0) == pytest.approx(3 * plain)
    assert score_of(model, x, gain=2.0) == pytest.approx(2 * plain)
    assert list_forward_keywords(model) == {"x", "scale", "gain"}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"secret": 5.0}, lambda plain: plain + 5),
        ((2.0,), lambda plain: 2 * plain),
        (torch.tensor(4.0), lambda plain: 4 * plain),
        (None, lambda plain: plain),
    ],
)
def test_additional_forward_args_are_a_dict_a_tuple_or_one_argument(case, given, expected):
    model, x = case
    plain = expected(model(x[:1])[0, 1].item())
    assert score_of(model, x, additional_forward_args=given) == pytest.approx(plain)


def test_additional_forward_args_go_with_each_image_and_each_pass(case):
    model, x = case
    scale = torch.tensor([[2.0], [-3.0]]).double()
    tool = ScoreCAM(model, "conv")
    both = tool.attribute(x, 1, additional_forward_args=(scale,))
    for i, one in enumerate(tool.explain_batch(list(x), 1, additional_forward_args={"scale": scale})):
        alone = tool.attribute(x[i : i + 1], 1, additional_forward_args=scale[i : i + 1])[0]
        torch.testing.assert_close(both[i], alone)
        np.testing.assert_allclose(one.attribution, alone.numpy())


def test_one_keyword_given_in_two_ways_is_an_error(case):
    model, x = case
    with pytest.raises(InputError, match=r"scale: given as a keyword and in additional_forward_args"):
        GradCAM(model, "conv").attribute(x, 1, scale=1.0, additional_forward_args={"scale": 2.0})


# --- n_steps, n_samples, baselines


def by_hand(model, x, baseline, steps):
    """(N,*S): integrated gradients at the midpoints, summed over channels."""
    total = torch.zeros_like(x)
    for j in range(steps):
        point = (baseline + (x - baseline) * ((j + 0.5) / steps)).detach().requires_grad_()
        total += torch.autograd.grad(model(point)[:, 1].sum(), point)[0]
    return ((x - baseline) * total / steps).sum(1)


BASELINES = {
    "number": lambda x: (0.25, torch.full_like(x, 0.25)),
    "one for all": lambda x: (x[:1] / 3, (x[:1] / 3).expand_as(x)),
    "without a batch": lambda x: (x[0] / 3, (x[:1] / 3).expand_as(x)),
    "each its own": lambda x: (x.flip(0) / 3, x.flip(0) / 3),
    "a tuple of one": lambda x: ((x.flip(0) / 3,), x.flip(0) / 3),
    "none": lambda x: (None, torch.zeros_like(x)),
    "a function": lambda x: (lambda inputs: inputs / 3, x / 3),
    "a function of a number": lambda x: (lambda inputs: 0.25, torch.full_like(x, 0.25)),
}


@pytest.mark.parametrize("kind", BASELINES)
def test_n_steps_and_baselines_of_a_call_mean_what_captum_means(case, kind):
    model, x = case
    given, baseline = BASELINES[kind](x)
    tool = IntegratedGradients(model, n_steps=2)
    found = tool.attribute(x, 1, n_steps=7, baselines=given)
    torch.testing.assert_close(found, by_hand(model, x, baseline, 7))
    for one, expected in zip(tool.explain_batch(list(x), 1, n_steps=7, baselines=given), found, strict=True):
        np.testing.assert_allclose(one.attribution, expected.numpy(), atol=1e-12)
        assert one.parameters["n_steps"] == 7
    torch.testing.assert_close(tool.attribute(x, 1), by_hand(model, x, torch.zeros_like(x), 2))  # of that call alone


@pytest.mark.parametrize("kind", sorted(set(BASELINES) - {"a tuple of one", "none"}))
def test_the_setting_baseline_takes_what_captums_baselines_takes(case, kind):
    model, x = case
    given, baseline = BASELINES[kind](x)
    found = IntegratedGradients(model, n_steps=7, baseline=given).attribute(x, 1)
    torch.testing.assert_close(found, by_hand(model, x, baseline, 7))


def test_a_baseline_for_each_image_follows_it_where_sizes_differ(case):
    model, x = case
    images = [x[0], x[1][:, :4], x[1]]
    tool = IntegratedGradients(model, n_steps=3)
    baselines = torch.stack([x[1], x[0], x[0] / 2])
    with pytest.raises(InputError, match="the baseline has shape"):
        tool.explain_batch(images, 1, baselines=baselines)
    found = tool.explain_batch([x[0], x[1]], 1, baselines=baselines[:2])
    np.testing.assert_allclose(found[1].attribution, by_hand(model, x[1:], x[:1], 3)[0].numpy(), atol=1e-12)


def test_the_same_names_in_a_constructor(case):
    model, x = case
    for tool in (
        IntegratedGradients(model, n_steps=4, baselines=0.25),
        IntegratedGradients(model, n_steps=4, baselines=(0.25,)),
    ):
        assert (tool.n_steps, tool.parameters["baseline"]) == (4, 0.25)
        torch.testing.assert_close(tool.attribute(x, 1), by_hand(model, x, torch.full_like(x, 0.25), 4))
    with pytest.raises(InputError, match="baseline= is given twice"):
        IntegratedGradients(model, baseline=0.5, baselines=0.5)
    with pytest.raises(InputError, match="n_steps= is a setting that GradCAM does not have"):
        GradCAM(model, n_steps=4)
    with pytest.raises(InputError, match="a tuple of 2"):
        IntegratedGradients(model, baselines=(x, x))


def test_a_distribution_of_baselines_is_a_background(case):
    model, x = case
    background = torch.randn(5, 3, 6, 8).double()
    expected = ExpectedGradients(model, background=background, n_samples=11).attribute(x, 1)
    tool = ExpectedGradients(model)
    torch.testing.assert_close(tool.attribute(x, 1, baselines=background, n_samples=11), expected)
    assert ExpectedGradients(model, baselines=background, n_samples=11).n_samples == 11
    assert tool.attribute(x, 1, baselines=0.5, n_samples=3).any()


def test_settings_reach_what_is_inside_a_wrapper_and_the_methods_that_have_them(case):
    model, x = case
    assert Augmented(IntegratedGradients(model), flips=False).explain(x[0], 1, n_steps=3).diagnostics == {}
    many, few = (
        Augmented(IntegratedGradients(model, n_steps=steps), flips=False).attribute(x, 1, **more)
        for steps, more in ((50, {"n_steps": 1}), (1, {}))
    )
    torch.testing.assert_close(many, few)
    steps, none = IntegratedGradients(model).explain_methods(x[0], ["integratedgradients", "gradcam"], 1, n_steps=3)
    assert steps.parameters["n_steps"] == 3
    assert "steps" not in none.parameters
    with pytest.raises(InputError, match="n_steps= is a setting that Denoised does not have"):
        Denoised(LayerCAM(model, "conv")).attribute(x, 1, n_steps=3)


def test_captum_agrees(case):
    attr = pytest.importorskip("captum.attr")
    model, x = case
    given = {"target": 1, "baselines": x.flip(0), "additional_forward_args": (2.0,)}
    theirs = attr.IntegratedGradients(model).attribute(x, n_steps=6, method="riemann_middle", **given)
    torch.testing.assert_close(IntegratedGradients(model).attribute(x, n_steps=6, **given), theirs.sum(1))
    theirs = attr.Occlusion(model).attribute(x, (3, 2, 2), (3, 2, 2), **given)
    ours = Occlusion(model, window=2, stride=2).attribute(x, **given)
    torch.testing.assert_close(ours.float(), theirs[:, 0].float())  # captum computes it in float32


def test_every_constructor_knows_the_words_and_keeps_its_signature(case):
    for cls in METHODS.values():
        assert not set(inspect.signature(cls).parameters) & ({"baselines"} | set(FOREIGN_KEYWORD_HINTS)), cls
        with pytest.raises(InputError, match="layer= of the constructor"):
            cls(case[0], target_layers=["conv"])
