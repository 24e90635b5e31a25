"""Kinds of inputs: bags and videos, integers, and models with convolutions of several ranks."""

import numpy as np
import pytest
import torch
from torch import nn

from camscope import (
    METHODS,
    Augmented,
    Denoised,
    ExcitationBackprop,
    GradCAM,
    HiResCAM,
    IntegratedGradients,
    Occlusion,
    Saliency,
    ScoreCAM,
)
from camscope.errors import InputError, LayerError
from camscope.explainers.attention.token_attention_explainer import TokenAttentionExplainer
from camscope.explainers.core.model_input import infer_spatial_rank
from camscope.targets import Score

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore::camscope.errors.CamscopeWarning"),
]


# --- bags and videos


class Bag(nn.Module):
    """Multiple-instance learning: the features of each instance, pooled by attention. (N,B,C,H,W) -> (N,2)."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Tanh())
        self.weigh, self.head = nn.Linear(4, 1), nn.Linear(4, 2)

    def forward(self, bags):
        each = self.features(bags.flatten(0, 1)).square().mean((2, 3)).unflatten(0, bags.shape[:2])
        return self.head((each * self.weigh(each).softmax(1)).sum(1))


class FirstChannels(nn.Module):
    """The same model, whose input is (N,C,B,H,W)."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model(x.transpose(1, 2))


@pytest.fixture
def bags():
    torch.manual_seed(0)
    return Bag().double().eval(), torch.randn(2, 5, 3, 6, 8).double()


@pytest.mark.parametrize(
    "make",
    [
        Saliency,
        lambda model, **more: IntegratedGradients(model, n_steps=3, **more),
        lambda model, **more: Occlusion(model, window=2, stride=2, **more),
        lambda model, **more: Augmented(Saliency(model, **more)),
    ],
)
def test_the_map_of_a_bag_has_a_plane_for_each_instance(bags, make):
    model, x = bags
    found = make(model, frames_first=True).attribute(x, 1)
    assert found.shape == (2, 5, 6, 8)
    torch.testing.assert_close(found, make(FirstChannels(model), frames_first=False).attribute(x.transpose(1, 2), 1))
    for given in (x[0], x[:1]):
        one = make(model, frames_first=True).explain(given, 1)
        np.testing.assert_allclose(one.attribution, found[0].numpy(), atol=1e-12)
        assert one.input_size == (5, 6, 8)


@pytest.mark.parametrize("instances", [3, 5])
def test_baselines_of_a_bag_have_its_axes(bags, instances):
    model, x = bags
    x = x[:, :instances]
    tool, other = (
        IntegratedGradients(model, n_steps=3, frames_first=True),
        torch.randn(3, 3, 6, 8)[0:1].expand(instances, 3, 6, 8),
    )
    other = (other * torch.arange(instances).view(-1, 1, 1, 1)).double()
    same = IntegratedGradients(FirstChannels(model), n_steps=3, frames_first=False)
    for given, moved in ((other, other.transpose(0, 1)), (x.flip(0), x.flip(0).transpose(1, 2))):
        found = tool.attribute(x, 1, baselines=given)
        torch.testing.assert_close(found, same.attribute(x.transpose(1, 2), 1, baselines=moved))


def test_the_gradient_of_a_bag_is_summed_over_colors_and_not_over_instances(bags):
    model, x = bags
    leaf = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(leaf)[:, 1].sum(), leaf)
    found = Saliency(model, frames_first=True, channel_reduction="sum").attribute(x, 1)
    torch.testing.assert_close(found, gradient.sum(2))


def test_a_layer_that_sees_all_instances_as_one_batch_takes_reshape(bags):
    model, x = bags
    tool = HiResCAM(model, "features", frames_first=True)
    with pytest.raises(LayerError, match=r"pass reshape="):
        tool.attribute(x, 1)
    tool = HiResCAM(
        model, "features", frames_first=True, reshape=lambda output: output.unflatten(0, (-1, 5)).transpose(1, 2)
    )
    found = tool.attribute(x, 1)
    maps = model.features(x.flatten(0, 1)).detach().requires_grad_()
    each = maps.square().mean((2, 3)).unflatten(0, (2, 5))
    score = model.head((each * model.weigh(each).softmax(1)).sum(1))[:, 1].sum()
    (gradient,) = torch.autograd.grad(score, maps)
    torch.testing.assert_close(found, (maps * gradient).sum(1).unflatten(0, (2, 5)).detach())


@pytest.mark.parametrize("instances", [3, 5])
def test_a_bag_whose_kind_nobody_said_is_an_error_that_names_the_setting(bags, instances):
    model, x = bags
    x = x[:, :instances]  # three instances of three colors: which is which cannot be told
    for tool in (Saliency(model), GradCAM(model)):
        with pytest.raises(InputError, match=r"If it is a video or a bag \(N,T,C,H,W\), pass frames_first=True"):
            tool.attribute(x, 1)
    assert Saliency(model, frames_first=True).attribute(x, 1).shape == (2, instances, 6, 8)


def test_volumes_are_taken_as_they_were():
    model = nn.Sequential(nn.Conv3d(3, 4, 1), nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(4, 2))
    assert Saliency(model).attribute(torch.randn(1, 3, 3, 6, 8), 1).shape == (1, 3, 6, 8)
    with pytest.raises(InputError, match="expected are 5 axes"):
        Saliency(model, frames_first=True).attribute(torch.randn(1, 3, 6, 8), 1)


# --- integers


class Converting(nn.Module):
    """A model that takes pixels of 0 to 255 and converts them itself, but only if they are integers."""

    def __init__(self):
        super().__init__()
        self.conv, self.act, self.head = nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Linear(4, 2)

    def forward(self, x):
        x = x.float() / 255 if not x.is_floating_point() else x
        return self.head(self.act(self.conv(x)).mean((2, 3)))


@pytest.fixture
def pixels():
    torch.manual_seed(0)
    return Converting().eval(), torch.randint(0, 256, (2, 3, 8, 10), dtype=torch.uint8)


@pytest.mark.parametrize(
    "name", sorted(name for name, cls in METHODS.items() if not issubclass(cls, TokenAttentionExplainer))
)
@pytest.mark.one_in(5)
def test_integers_are_explained_as_the_model_reads_them_or_refused(pixels, name):
    model, x = pixels
    tool = METHODS[name](model)
    if tool.accepts_integer_input:
        expected = tool.attribute(x.float() / 255, 1)
        torch.testing.assert_close(tool.attribute(x, 1), expected)
        np.testing.assert_allclose(tool.explain(x[0], 1).attribution, expected[0].numpy(), rtol=1e-4, atol=1e-7)
    else:
        with pytest.raises(InputError, match=r"the input is torch.uint8.*Pass x.float\(\).*such as GradCAM"):
            tool.attribute(x, 1)


def test_which_methods_take_integers(pixels):
    model, _ = pixels
    assert GradCAM(model).accepts_integer_input
    assert Denoised(GradCAM(model)).accepts_integer_input
    assert Augmented(GradCAM(model)).accepts_integer_input
    for tool in (
        ScoreCAM(model),
        Saliency(model),
        ExcitationBackprop(model),
        Augmented(GradCAM(model), scales=(1.0, 2.0)),
    ):
        assert not tool.accepts_integer_input


def test_integers_for_a_model_that_does_not_convert_them():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(2), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(4, 2))
    x = torch.randint(0, 256, (1, 3, 8, 8), dtype=torch.uint8)
    with pytest.raises(InputError, match=r"the input is uint8, but the model needs floats: pass x.float\(\)"):
        GradCAM(model, "0").attribute(x, 1)
    with pytest.raises(InputError, match="but the model needs floats"):
        GradCAM(model, "0").explain(x[0], 1)
    with pytest.raises(InputError, match=r"expected .* a uint8 tensor \(C,H,W\)"):
        GradCAM(model, "0").explain(torch.zeros(8, 8, 3, dtype=torch.uint8), 1)


# --- convolutions of several ranks


class Mixed(nn.Module):
    """A channel attention whose Conv1d is registered before the Conv2d that sees the image, as in ECA."""

    def __init__(self, channels=3):
        super().__init__()
        self.gate = nn.Conv1d(1, 1, 3, padding=1)
        self.conv, self.head = nn.Conv2d(channels, 4, 3), nn.Linear(4, 2)

    def forward(self, x):
        y = self.conv(x)
        return self.head((y * self.gate(y.mean((2, 3))[:, None])[:, 0, :, None, None]).mean((2, 3)))


@pytest.mark.parametrize("channels", [1, 3])
def test_what_is_registered_first_does_not_decide_the_rank_of_the_input(channels):
    torch.manual_seed(0)
    model, x = Mixed(channels).eval(), torch.randn(1, channels, 8, 10)
    expected = GradCAM(model, "conv").attribute(x, 1)[0]
    for given in (x, x[0]):
        np.testing.assert_allclose(GradCAM(model, "conv").explain(given, 1).attribution, expected.numpy(), atol=1e-7)


@pytest.mark.parametrize(
    ("parts", "shape", "expected"),
    [
        ([nn.Conv1d(1, 1, 3), nn.Conv2d(3, 4, 3)], (3, 8, 8), 2),
        ([nn.Conv2d(3, 4, 3), nn.Conv1d(1, 1, 3)], (3, 8, 8), 2),
        ([nn.Conv1d(12, 4, 3), nn.Conv2d(1, 4, 3)], (12, 100), 1),
        ([nn.Conv2d(5, 4, 3), nn.Conv3d(1, 4, 3)], (1, 7, 8, 8), 3),
        ([nn.Conv3d(1, 4, 3), nn.Conv2d(7, 4, 3)], (1, 7, 8, 8), None),
        ([nn.Conv1d(1, 1, 3), nn.Conv3d(2, 4, 3)], None, 3),
        ([nn.Linear(3, 4)], (12, 100), 1),
        ([nn.Linear(3, 4)], (3, 8, 8), 2),
    ],
)
def test_ranks_by_hand(parts, shape, expected):
    model = nn.ModuleList(parts)
    if expected is None:
        with pytest.raises(InputError, match="may be one input or a batch of one"):
            infer_spatial_rank(model, shape)
    else:
        assert infer_spatial_rank(model, shape) == expected


def test_a_score_keeps_the_frames_where_the_model_has_them(bags):
    model, x = bags
    score = Score(model, 1, frames_first=True)
    torch.testing.assert_close(score(x.transpose(1, 2)), model(x)[:, 1])


@pytest.mark.parametrize("shape", [(2, 4), (1, 5), (2, 3), (1, 1), (3, 2)])
def test_a_bag_is_an_error_that_says_what_to_pass_and_then_has_a_map_for_each_instance(shape):
    torch.manual_seed(0)
    model, x = Bag().eval(), torch.randn(*shape, 3, 16, 16)
    with pytest.raises(InputError, match=r"video or a bag \(N,T,C,H,W\), pass frames_first=True"):
        HiResCAM(model).attribute(x, 1)
    remedy = rf"layer 'features': .*one for each of the {shape[1]} frames? of a video, or instances of a bag: .*reshape=lambda"
    with pytest.raises(LayerError, match=remedy):
        HiResCAM(model, frames_first=True).attribute(x, 1)
    with pytest.raises(LayerError, match=rf"one for each of the {shape[1]} frames? of a video, or instances of a bag"):
        HiResCAM(model, "features", frames_first=True).attribute(x, 1)
    with pytest.raises(LayerError, match=r"layer 'weigh'"):
        HiResCAM(model, "weigh", frames_first=True).attribute(x, 1)
    A = model.features(x.flatten(0, 1)).detach().requires_grad_()
    each = A.square().mean((2, 3)).unflatten(0, shape)
    (gradient,) = torch.autograd.grad(model.head((each * model.weigh(each).softmax(1)).sum(1))[:, 1].sum(), A)
    expected = (A * gradient).sum(1).detach().unflatten(0, shape)
    found = HiResCAM(
        model,
        "features",
        frames_first=True,
        reshape=lambda maps: maps.unflatten(0, (-1, shape[1])).transpose(1, 2),
    ).attribute(x, 1)
    torch.testing.assert_close(found, expected)
    pixels = METHODS["saliency"](model, frames_first=True).attribute(x, 1)
    assert pixels.shape == (*shape, 16, 16)


def test_a_bag_as_a_list_of_tensors_is_an_error_that_says_to_stack_them():
    bag = [torch.randn(3, 16, 16) for _ in range(4)]
    with pytest.raises(InputError, match=r"the input is a list; .*torch\.stack"):
        HiResCAM(Bag().eval(), "features").attribute(bag, 1)
    with pytest.raises(InputError, match=r"the image is a list; .*torch\.stack"):
        HiResCAM(Bag().eval(), "features").explain(bag, 1)


# --- channels at the last axis


class ChannelsLast(nn.Module):
    """A net for images (N,...,C) as other frameworks pass them."""

    def __init__(self, rank: int, channels: int, prepare) -> None:
        super().__init__()
        kind = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[rank]
        self.conv, self.head, self.prepare = kind(channels, 6, 3, padding=1), nn.Linear(6, 4), prepare

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.conv(self.prepare(x)).relu().flatten(2).mean(2))


CHANNELS_LAST = {
    "normalized": (2, 3, lambda x: (x.permute(0, 3, 1, 2) - 0.5) / 0.2),
    "normalized before": (2, 3, lambda x: ((x - torch.tensor([0.5, 0.4, 0.3])) / 0.2).permute(0, 3, 1, 2)),
    "resized": (2, 3, lambda x: torch.nn.functional.interpolate(x.movedim(-1, 1), size=(20, 20))),
    "gray": (2, 1, lambda x: x.permute(0, 3, 1, 2).contiguous()),
    "with transparency": (2, 4, lambda x: x.movedim(-1, 1)),
    "a signal": (1, 2, lambda x: x.mT),
    "a volume": (3, 1, lambda x: x.movedim(-1, 1)),
}


@pytest.mark.parametrize(
    "method", [Saliency, GradCAM, pytest.param("fullgrad", id="FullGrad"), pytest.param("rise", id="RISE")]
)
@pytest.mark.parametrize("case", CHANNELS_LAST)
def test_an_input_with_channels_last_is_rejected_with_the_wrapper_that_it_needs(case, method):
    rank, channels, prepare = CHANNELS_LAST[case]
    model, x = ChannelsLast(rank, channels, prepare).eval(), torch.rand(1, *[16] * rank, channels)
    explainer = METHODS[method](model) if isinstance(method, str) else method(model)
    with pytest.raises(InputError, match=f"has its {channels} channels? at the last axis.*x.permute"):
        explainer.attribute(x, 1)


def test_the_wrapper_for_an_input_with_channels_last_gives_the_map_of_the_image():
    rank, channels, prepare = CHANNELS_LAST["normalized"]
    model, x = ChannelsLast(rank, channels, prepare).eval(), torch.rand(1, 16, 16, 3)

    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.model(x.permute(0, 2, 3, 1))

    assert Saliency(Wrapper().eval()).attribute(x.permute(0, 3, 1, 2), 1).shape == (1, 16, 16)


def test_a_narrow_image_is_no_image_with_channels_last():
    model = ChannelsLast(2, 5, lambda x: x).eval()
    assert Saliency(model).attribute(torch.rand(1, 5, 16, 3), 1).shape == (1, 16, 3)
    mirrored = ChannelsLast(2, 5, lambda x: x.flip(-1)).eval()
    assert Saliency(mirrored).attribute(torch.rand(1, 5, 16, 3), 1).shape == (1, 16, 3)
