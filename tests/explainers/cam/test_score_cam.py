"""The score-weighted methods against their formulas written as loops, and what they do where there is nothing to see."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from camscope.errors import InputError, ModelError
from camscope.explainers import ISCAM, METHODS, SSCAM, GroupCAM, OptiCAM, ScoreCAM
from camscope.explainers.core.resize_and_blur import blur_input
from tests.nets import CASES, Pooled

pytestmark = pytest.mark.filterwarnings("ignore::camscope.errors.CamscopeWarning")
MASKED = {
    "scorecam": {},
    "sscam": {"n_samples": 3, "sigma": 0.7, "seed": 4},
    "iscam": {"n_samples": 3},
    "groupcam": {"n_groups": 4},
}
EVERY = MASKED | {"opticam": {"n_steps": 3}}


def network(dead: tuple[int, ...] = (), samples: int = 2) -> tuple[Pooled, Tensor]:
    """Six channels of 4 x 3 from inputs of 16 x 12, in float64; the dead ones are constant, at another value each."""
    model, x = CASES["pooled"].make(samples, torch.float64)
    last = model.features[4]
    last.weight.data[list(dead)] = 0
    last.bias.data[list(dead)] = torch.arange(1.0, len(dead) + 1, dtype=torch.float64)
    model.head.weight.data *= 10
    return model, x


def mask(channel: Tensor, size: tuple[int, int] = (16, 12)) -> Tensor:
    large = F.interpolate(channel[None, None], size, mode="bilinear", align_corners=False)[0, 0]
    low, high = large.min(), large.max()
    return torch.zeros_like(large) if channel.min() == channel.max() else (large - low) / (high - low)


def by_the_book(model: Pooled, x: Tensor, versions) -> Tensor:
    """relu Σ_k softmax_k(mean over versions of the logit) A_k, one sample, channel and version at a time."""
    maps = []
    for image, activation in zip(x, model.features(x).detach(), strict=True):
        scores = []
        for channel in activation:
            inputs = versions(image, mask(channel))
            scores.append(torch.stack([model(one[None])[0, 1].detach() for one in inputs]).mean())
        weights = torch.stack(scores).softmax(0)
        maps.append(sum(w * channel for w, channel in zip(weights, activation, strict=True)).relu())
    return torch.stack(maps)


def noises(samples: int, seed: int, channels: int) -> Tensor:
    drawn = torch.randn(samples, channels, 16, 12, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)
    return drawn.double()


BOOKS = [
    (ScoreCAM, {}, lambda x, m: [x * m]),
    (ISCAM, {"n_samples": 3}, lambda x, m: [x * m / 3, x * m * 2 / 3, x * m]),
    (SSCAM, {"n_samples": 3, "sigma": 0.7, "seed": 4}, lambda x, m: [x * (m + 0.7 * n) for n in noises(3, 4, 1)]),
    (
        SSCAM,
        {"n_samples": 3, "sigma": 0.7, "seed": 4, "noise": "input"},
        lambda x, m: [x * m + 0.7 * (x.max() - x.min()) * n for n in noises(3, 4, 3)],
    ),
]


@pytest.mark.parametrize("batch_size", [None, 1, 4])
@pytest.mark.parametrize(("method", "settings", "versions"), BOOKS)
def test_masked_scores_are_the_formula_in_loops(method, settings, versions, batch_size):
    model, x = network(dead=(1, 4))
    heat = method(model, "features", batch_size=batch_size, **settings).attribute(x, 1)
    expected = by_the_book(model, x, versions)
    assert expected.flatten(1).any(1).all()
    torch.testing.assert_close(heat, expected, rtol=1e-10, atol=1e-12)


class Rows(nn.Module):
    """Counts the rows that a model is given."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.rows = model, 0

    def forward(self, x: Tensor) -> Tensor:
        self.rows += len(x)
        return self.model(x)


@pytest.mark.parametrize(
    ("method", "dead", "rows"),
    [
        ("scorecam", (), 1 + 6),
        ("scorecam", (1, 2, 4), 1 + 3 + 1),  # one empty input serves all dead channels
        ("sscam", (1, 2, 4), 1 + 3 * 3 + 3),  # the noises alone
        ("iscam", (1, 2, 4), 1 + 3 * 3 + 1),  # fading in nothing is nothing
        ("groupcam", (), 2 + 3),  # six channels make three groups of two
        ("groupcam", (0, 1, 2, 3), 2 + 1),  # flat groups restore nothing
        ("opticam", (), 1 + 3),
    ],
)
@pytest.mark.usefixtures("passes_of_maps_alone")
def test_the_cost_in_rows(method, dead, rows):
    model, x = network(dead, samples=1)
    model.features = nn.Sequential(*model.features[:-1])  # no ReLU, so that no live channel is dead by chance
    counting = Rows(model)
    METHODS[method](counting, "model.features", **EVERY[method]).attribute(x, 1)
    if method == "groupcam":  # the ReLU of a group may empty it
        assert 2 <= counting.rows <= rows
    else:
        assert counting.rows == rows


@pytest.mark.parametrize("method", EVERY)
def test_channels_that_are_all_constant_give_no_shape(method):
    model, x = network(dead=(0, 1, 2, 3, 4, 5))
    for settings in ({}, {"n_channels": 2}) if "n_channels" in METHODS[method].__dataclass_fields__ else ({},):
        heat = METHODS[method](model, "features", **EVERY[method], **settings).attribute(x, 1)
        assert heat.isfinite().all()
        torch.testing.assert_close(heat, heat[:, :1, :1].expand_as(heat), rtol=0, atol=0)


@pytest.mark.parametrize("method", EVERY)
def test_an_empty_or_constant_input_gives_numbers(method):
    model, x = network()
    heat = METHODS[method](model, "features", **EVERY[method]).attribute(torch.stack([x[0] * 0, x[1] * 0 + 3]), 1)
    assert heat.isfinite().all()


def test_top_takes_the_strongest_channels():
    model, x = network(dead=(1,), samples=1)
    activation = model.features(x).detach()[0]
    order = activation.flatten(1).abs().mean(1).argsort(descending=True)[:2]
    scores = torch.stack([model(x * mask(activation[k]))[0, 1].detach() for k in order])
    expected = (scores.softmax(0)[:, None, None] * activation[order]).sum(0).relu()
    torch.testing.assert_close(ScoreCAM(model, "features", n_channels=2).attribute(x, 1)[0], expected)
    full = ScoreCAM(model, "features").attribute(x, 1)
    assert not torch.allclose(full[0], expected, rtol=1e-3)
    for enough in (6, 100):
        assert torch.equal(ScoreCAM(model, "features", n_channels=enough).attribute(x, 1), full)


@pytest.mark.parametrize("seed", [0, 5])
def test_the_noise_is_its_seeds_and_the_callers_state_stays(seed):
    model, x = network()
    state = torch.random.get_rng_state()
    one, same, other = (SSCAM(model, "features", n_samples=2, seed=s).attribute(x, 1) for s in (seed, seed, seed + 1))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert torch.equal(torch.random.get_rng_state(), state)


def group_cam_by_the_book(model: Pooled, x: Tensor, groups: int) -> Tensor:
    """One sample; the blur of the whole input is a matrix along either axis."""
    features = model.features(x).detach()[0]
    weights = model.head.weight.detach()[1] / features[0].numel()  # of a mean and a linear head
    background = torch.einsum("ij,cjk,lk->cil", bell(16), x[0], bell(12))

    def chance(image):
        return model(image[None]).softmax(1)[0, 1].detach()

    heat = torch.zeros_like(features[0])
    size = -(-len(features) // groups)
    for first in range(0, len(features), size):
        group = sum(weights[k] * features[k] for k in range(first, min(first + size, len(features)))).relu()
        group[group <= group.quantile(0.7)] = 0
        large = F.interpolate(group[None, None], (16, 12), mode="bilinear")[0, 0]
        if large.max() > large.min():
            shown = (large - large.min()) / (large.max() - large.min())
            gain = chance(x[0] * shown + background * (1 - shown)) - chance(background)
            heat += gain * (group - large.min()) / (large.max() - large.min())
    return heat.relu()


def bell(cells: int) -> Tensor:
    """(cells, cells): row i mixes the cells around i, mirrored at the borders; sigma 50 and reach 25 of 224."""
    matrix, reach = torch.zeros(cells, cells, dtype=torch.float64), max(1, round(25 * cells / 224))
    steps = torch.arange(-reach, reach + 1, dtype=torch.float64)
    weights = torch.exp(-0.5 * (steps / (50 * cells / 224)) ** 2)
    for i in range(cells):
        for step, weight in zip(range(-reach, reach + 1), weights / weights.sum(), strict=True):
            j = abs(i + step)
            matrix[i, j if j < cells else 2 * (cells - 1) - j] += weight
    return matrix


def test_group_cam_is_its_formula_in_loops():
    model, x = network()
    heat = GroupCAM(model, "features", n_groups=4).attribute(x, 1)
    assert heat.flatten(1).any(1).all()
    for i in range(2):
        torch.testing.assert_close(heat[i], group_cam_by_the_book(model, x[i : i + 1], 4), rtol=1e-9, atol=1e-14)


def test_group_cam_of_a_callable_or_of_one_output_counts_the_score_itself():
    model, x = network()
    tool = GroupCAM(model, "features", n_groups=2)
    assert not torch.allclose(tool.attribute(x, lambda output: output[:, 1]), tool.attribute(x, 1), rtol=1e-2)
    single = Pooled(model.features, 6, 1).double().eval()
    single.head.weight.data[:], single.head.bias.data[:] = model.head.weight.data[1:2], model.head.bias.data[1:2]
    expected = tool.attribute(x, lambda output: output[:, 1])
    torch.testing.assert_close(GroupCAM(single, "features", n_groups=2).attribute(x, 0), expected)


@pytest.mark.parametrize("shape", [(9,), (9, 5), (9, 5, 7), (1, 4)])
def test_a_blur_keeps_constants_and_is_separable(shape):
    constant = torch.full((2, 3, *shape), 1.7, dtype=torch.float64)
    torch.testing.assert_close(blur_input(constant, 0.2, 0.3), constant)
    x = torch.randn(2, 3, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    once = blur_input(x, 0.2, 0.3)
    assert once.std() < 0.9 * x.std()
    torch.testing.assert_close(blur_input(x.transpose(2, -1), 0.2, 0.3).transpose(2, -1), once)


def test_a_blur_is_the_same_under_autocast():
    x = torch.randn(1, 3, 16, 12, generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", torch.bfloat16):
        inside = blur_input(x, 0.2, 0.3)
    assert torch.equal(inside, blur_input(x, 0.2, 0.3))


def opti_cam_by_the_book(model: Pooled, x: Tensor, steps: int, rate: float) -> Tensor:
    """One sample, with torch's own optimizer."""
    channels = model.features(x).detach()[0]
    channels = channels[channels.flatten(1).std(1) > 0]  # a constant one has no share
    shares = torch.zeros(len(channels), dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([shares], lr=rate, eps=1e-300, maximize=True)
    for _ in range(steps):
        optimizer.zero_grad()
        mixture = (shares.softmax(0)[:, None, None] * channels).sum(0)
        large = F.interpolate(mixture[None, None], (16, 12), mode="bilinear")[0, 0]
        shown = (large - large.min()) / (large.max() - large.min())
        model(x * shown)[0, 1].backward(inputs=[shares])
        optimizer.step()
    mixture = (shares.detach().softmax(0)[:, None, None] * channels).sum(0)
    return mixture - mixture.min()


def test_opti_cam_is_adam_on_the_masked_score():
    model, x = network()
    heat = OptiCAM(model, "features", n_steps=7, learning_rate=0.2).attribute(x, 1)
    for i in range(2):
        torch.testing.assert_close(heat[i], opti_cam_by_the_book(model, x[i : i + 1], 7, 0.2), rtol=1e-9, atol=1e-12)


def test_opti_cam_finds_a_mask_that_scores_more():
    model, x = network()

    def score(steps: int) -> Tensor:
        heat = OptiCAM(model, "features", n_steps=steps, learning_rate=0.05).attribute(x, 1)
        return torch.stack([model((x[i] * mask(heat[i]))[None])[0, 1].detach() for i in range(2)])

    assert (score(40) > score(10)).all()
    assert (score(10) > score(1)).all()


@pytest.mark.parametrize("factor", [1e-9, 1e9])
def test_opti_cam_does_not_depend_on_the_unit_of_the_score(factor):
    model, x = network()
    tool = OptiCAM(model, "features", n_steps=5)
    expected = tool.attribute(x, 1)
    torch.testing.assert_close(tool.attribute(x, lambda output: factor * output[:, 1]), expected)


def test_opti_cam_of_a_model_that_turns_gradients_off_is_that_of_the_model_without():
    class Off(Pooled):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                maps = self.features(x)
            return self.head(maps.flatten(2).mean(2))

    model, x = CASES["pooled"].make()
    expected = OptiCAM(model, "features", n_steps=3).attribute(x, 1)
    model.__class__ = Off
    assert torch.equal(OptiCAM(model, "features", n_steps=3).attribute(x, 1), expected)


def test_opti_cam_says_where_no_gradient_comes_from():
    class Detached(Pooled):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).detach()

    model, x = CASES["pooled"].make()
    model.__class__ = Detached
    with pytest.raises(ModelError, match="no gradient flows from the score to the input"):
        OptiCAM(model, "features").attribute(x, 1)


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("scorecam", {"n_channels": 0}),
        ("scorecam", {"batch_size": 0}),
        ("sscam", {"n_samples": 0}),
        ("sscam", {"sigma": float("nan")}),
        ("sscam", {"noise": "both"}),
        ("iscam", {"n_samples": -1}),
        ("groupcam", {"n_groups": 0}),
        ("scorecam", {"n_channels": 1.5}),
        ("sscam", {"n_samples": 1.5}),
        ("sscam", {"sigma": "a"}),
        ("iscam", {"n_samples": True}),
        ("groupcam", {"n_groups": 2.5}),
        ("opticam", {"n_steps": 0}),
        ("opticam", {"n_steps": 2.5}),
        ("ablationcam", {"batch_size": 0}),
        ("ablationcam", {"batch_size": -1}),
        ("reciprocam", {"batch_size": 0}),
        ("reciprocam", {"batch_size": "a"}),
        ("dff", {"n_concepts": 2.5}),
        ("dff", {"n_iterations": 0}),
        ("dff", {"batch_size": 0}),
        ("dff", {"tolerance": -1.0}),
        ("finercam", {"n_references": 1.5}),
        ("smoothgradcam++", {"n_samples": 2.5}),
        ("opticam", {"learning_rate": 0.0}),
    ],
)
def test_settings_without_sense_are_refused_by_name(method, settings):
    with pytest.raises(InputError, match=f"^{next(iter(settings))}="):
        METHODS[method](CASES["pooled"].make()[0], "features", **settings)
