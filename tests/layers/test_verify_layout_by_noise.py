"""Layouts are proved: a grid is accepted where its cells react to what lies under them, and an error where they do not."""

import gc
import math
import threading

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from camscope.errors import CamscopeWarning, LayerError
from camscope.explainers import FullGrad, GradCAM, HiResCAM, RefineCAM, Rollout
from camscope.explainers.fullgrad import ScoreDecomposition, decompose_scores
from camscope.hooks.run_without_hooks import hooks_muted
from camscope.hooks.spatial_map_tracker import SpatialMapTracker
from camscope.layers import judge_layout_from_noise_reactions, verify_layout_by_noise
from camscope.layers.choose_layer import choose_layer
from camscope.layers.judge_layout_from_noise_reactions import LayoutProbeResult, LayoutVerdict, judge_layout
from camscope.layers.layout import Layout
from camscope.layers.recorded_grids_and_token_counts import LayoutHints
from camscope.layers.spatial_layers import find_spatial_layers
from camscope.layers.verify_layout_by_noise import OutputLocation, probe_layout
from camscope.targets import Score
from tests.nets import CASES, plain
from tests.tools import seen_before
from tests.untouched import untouched

GRID = (4, 6)
CELLS = 24


class Patches(nn.Module):
    """Patches of 8 x 8 pixels as tokens, one more token before or behind them, one attention, the mean of all."""

    def __init__(self, order: Tensor | None = None, *, behind: bool = False, mixed: bool = False) -> None:
        super().__init__()
        self.embed, self.norm = nn.Conv2d(3, 16, 8, 8), nn.LayerNorm(16)
        self.query, self.key, self.value = (nn.Linear(16, 16) for _ in range(3))
        self.extra, self.head = nn.Parameter(torch.randn(16)), nn.Linear(16, 5)
        self.softmax = nn.Softmax(-1)
        self.order, self.behind, self.mixed = order, behind, mixed

    def forward(self, x: Tensor) -> Tensor:
        patches = self.embed(x).flatten(2).mT
        patches = patches if self.order is None else patches[:, self.order]
        tokens = F.pad(patches, (0, 0, 0, 1) if self.behind else (0, 0, 1, 0))  # no torch.cat says which is which
        place = -1 if self.behind else 0
        tokens = tokens + self.extra * F.one_hot(torch.tensor(place % tokens.shape[1]), tokens.shape[1])[:, None]
        if self.mixed:
            tokens = tokens.mean(1, keepdim=True) + torch.arange(tokens.shape[1])[:, None] * self.extra
        tokens = self.norm(tokens)
        query, key, value = (one(tokens)[:, None] for one in (self.query, self.key, self.value))  # of one head
        weights = self.softmax(query @ key.mT / 4)
        return self.head((tokens + (weights @ value)[:, 0]).mean(1))


def net(**settings: object) -> tuple[Patches, Tensor]:
    torch.manual_seed(0)
    return Patches(**settings).eval(), torch.randn(3, 32, 48)


def counted(model: nn.Module) -> list[int]:
    """How many samples each pass had, of all passes from now on: counted where hooks are not."""
    passes, forward = [], model.embed.forward

    def count(x: Tensor) -> Tensor:
        passes.append(len(x))
        return forward(x)

    model.embed.forward = count
    return passes


# --- the statistic


LABELS = torch.tensor([0, 2, 1, 1, 0, 2, 2, 0, 1, 2, 1, 0, 0, 1, 2, 1, 0, 2, 2, 1, 0, 1, 2, 0])


def distances(labels: Tensor, *, common: float = 0.0) -> Tensor:
    """(3,T): a token of label p differs by 1 in run p from the other runs, and all runs differ by `common` anywhere."""
    apart = torch.ones(3, len(labels), dtype=torch.float64)
    apart[labels, torch.arange(len(labels))] = 0
    return apart + common


@pytest.mark.parametrize("common", [0.0, 1.0, 5.0])
def test_tokens_that_react_in_place_are_verified_however_much_all_tokens_react_alike(common):
    apart = torch.cat([torch.ones(3, 1), distances(LABELS, common=common)], 1)
    assert judge_layout(apart, Layout("tokens", GRID, 1), LABELS, GRID) == LayoutProbeResult(LayoutVerdict.VERIFIED)


@pytest.mark.parametrize(
    ("apart", "layout", "reason"),
    [
        (torch.cat([torch.ones(3, 1), distances(LABELS)], 1), Layout("tokens", GRID), "they react like tokens 1+4x6"),
        (torch.cat([distances(LABELS), torch.ones(3, 1)], 1), Layout("tokens", GRID, 1), "like tokens 0+4x6"),
        (distances(LABELS.view(GRID).T.reshape(-1)), Layout("tokens", GRID), "react to other parts"),
        (
            distances(LABELS[torch.randperm(CELLS, generator=torch.Generator().manual_seed(1))]),
            Layout("tokens", GRID),
            "",
        ),
        (torch.zeros(3, CELLS), Layout("tokens", GRID), "it does not depend on the image"),
    ],
)
def test_tokens_that_react_elsewhere_or_not_at_all_are_contradicted(apart, layout, reason):
    found = judge_layout(apart.double(), layout, LABELS, GRID)
    assert found.verdict is LayoutVerdict.CONTRADICTED
    assert reason in found.reason


def test_tokens_that_all_react_alike_are_undecided():
    assert (
        judge_layout(torch.ones(3, CELLS).double(), Layout("tokens", GRID), LABELS, GRID).verdict
        is LayoutVerdict.UNDECIDED
    )


def snake(height: int = 4, width: int = 6) -> Tensor:
    order = torch.arange(height * width).view(height, width)
    order[1::2] = order[1::2].flip(1)
    return order.reshape(-1)


def exchanged(first: int, second: int, height: int = 4, width: int = 6) -> Tensor:
    order = torch.arange(height * width).view(height, width)
    order[[first, second]] = order[[second, first]]
    return order.reshape(-1)


def partly_shuffled(part: float, height: int, width: int) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    order = torch.arange(height * width)
    some = torch.randperm(len(order), generator=generator)[: int(part * len(order))]
    order[some] = order[some[torch.randperm(len(some), generator=generator)]]
    return order


def orders(height: int, width: int) -> dict[str, Tensor]:
    plane = torch.arange(height * width).view(height, width)
    return {
        "snake": snake(height, width),
        "two rows exchanged": exchanged(1, 2, height, width),
        "first and last row exchanged": exchanged(0, height - 1, height, width),
        "two columns exchanged": exchanged(0, 1, width, height).view(width, height).T.reshape(-1),
        "upside down": plane.flip(0).reshape(-1),
        "mirrored": plane.flip(1).reshape(-1),
        "moved on by a row": plane.roll(1, 0).reshape(-1),
        "a quarter shuffled": partly_shuffled(0.25, height, width),
    }


@pytest.mark.parametrize("noise", [0.0, 0.3])
@pytest.mark.parametrize("order", list(orders(8, 8)))
@pytest.mark.one_in(3)
def test_an_order_that_is_wrong_in_part_is_never_verified(order, noise):
    generator = torch.Generator().manual_seed(0)
    labels = judge_layout_from_noise_reactions.draw_noise_pattern((8, 8), 0)
    apart = distances(labels) + noise * torch.rand(3, 64, generator=generator).double()
    layout = Layout("tokens", (8, 8))
    assert judge_layout(apart, layout, labels, (8, 8)).verdict is LayoutVerdict.VERIFIED
    wrong = judge_layout(apart[:, orders(8, 8)[order]], layout, labels, (8, 8))
    assert wrong.verdict is not LayoutVerdict.VERIFIED
    if order != "a quarter shuffled":
        assert wrong.verdict is LayoutVerdict.CONTRADICTED


@pytest.mark.parametrize("part", [0.08, 0.15])
@pytest.mark.one_in(2)
def test_uneven_reactions_in_place_are_verified_and_tokens_out_of_place_are_not(part):
    blocks, layout = (14, 14), Layout("tokens", (14, 14))
    labels = judge_layout_from_noise_reactions.draw_noise_pattern(blocks, 0)
    weak = torch.rand(196, generator=torch.Generator().manual_seed(0)) < 0.25
    apart = distances(labels) + 5 * weak.double()
    assert judge_layout(apart, layout, labels, blocks) == LayoutProbeResult(LayoutVerdict.VERIFIED)
    wrong = distances(labels)[:, partly_shuffled(part, 14, 14)]
    assert judge_layout(wrong, layout, labels, blocks).verdict is not LayoutVerdict.VERIFIED


def test_tokens_of_a_signal_are_verified_in_place_and_not_in_another_order():
    labels, layout = judge_layout_from_noise_reactions.draw_noise_pattern((CELLS,), 0), Layout("tokens", (CELLS,))
    assert judge_layout(distances(labels), layout, labels, (CELLS,)) == LayoutProbeResult(LayoutVerdict.VERIFIED)
    for order in (torch.arange(CELLS).flip(0), torch.arange(CELLS).roll(1), partly_shuffled(0.3, 4, 6)):
        assert judge_layout(distances(labels)[:, order], layout, labels, (CELLS,)).verdict is not LayoutVerdict.VERIFIED


@pytest.mark.parametrize("grid", [(2, 2), (2, 3), (8,)], ids=str)
@pytest.mark.one_in(2)
def test_a_grid_of_few_cells_is_never_contradicted_by_what_may_be_chance(grid):
    count = math.prod(grid)
    labels, layout = judge_layout_from_noise_reactions.draw_noise_pattern(grid, 0), Layout("tokens", grid)
    assert judge_layout(distances(labels), layout, labels, grid) == LayoutProbeResult(LayoutVerdict.VERIFIED)
    assert judge_layout(distances((labels + 1) % 3), layout, labels, grid) == LayoutProbeResult(LayoutVerdict.UNDECIDED)
    for shift in range(1, count):
        assert (
            judge_layout(distances(labels.roll(shift)), layout, labels, grid).verdict is not LayoutVerdict.CONTRADICTED
        )


@pytest.mark.parametrize(
    "blocks", [(24,), (4, 6), (7, 7), pytest.param((14, 14), marks=pytest.mark.thorough), (3, 3, 3)], ids=str
)
@pytest.mark.one_in(2)
def test_the_pattern_tells_other_orders_from_its_own(blocks):
    field = judge_layout_from_noise_reactions.compute_expected_reaction(
        judge_layout_from_noise_reactions.draw_noise_pattern(blocks, 0), blocks, 0.0
    )
    for likeness, order in judge_layout_from_noise_reactions.iter_matches_in_other_orders(
        field, field, as_share_of_moved_cells=True
    ):
        if (
            len(blocks) > 1 or order != judge_layout_from_noise_reactions.EXCHANGED
        ):  # of single cells, some always have the same label
            assert float(likeness.max()) < 0.8, order


def test_a_right_grid_is_hardly_ever_contradicted_by_noise_alone_and_a_wrong_one_never_verified():
    generator = torch.Generator().manual_seed(0)
    right, wrong = [], []
    for strength in (0.05, 0.2, 0.5, 2.0):
        for _ in range(10):
            noise = 1 + 0.1 * torch.rand(3, CELLS, generator=generator).double()
            other = LABELS[torch.randperm(CELLS, generator=generator)]
            right.append(
                judge_layout(noise + strength * distances(LABELS), Layout("tokens", GRID), LABELS, GRID).verdict
            )
            wrong.append(
                judge_layout(noise + strength * distances(other), Layout("tokens", GRID), LABELS, GRID).verdict
            )
    assert LayoutVerdict.CONTRADICTED not in right
    assert LayoutVerdict.VERIFIED not in wrong
    assert set(wrong[-10:]) == {LayoutVerdict.CONTRADICTED}
    assert set(right[-10:]) == {LayoutVerdict.VERIFIED}


# --- models


@pytest.mark.usefixtures("passes_of_maps_alone")
def test_tokens_in_place_have_a_map_and_the_proof_is_made_once():
    model, x = net()
    passes = counted(model)
    first = GradCAM(model, "norm").explain(x, 1)
    assert (first.status, first.layout) == ("ok", "tokens 1+4x6")
    assert passes == [1] * 4, "one pass and three of the probe"
    assert GradCAM(model, "norm").explain(x + 1, 1).status == "ok"
    assert passes == [1] * 5


def test_one_sample_of_a_batch_is_probed():
    model, x = net()
    passes = counted(seen_before(model, x[None]))
    heat = GradCAM(model, "norm").attribute(x.expand(4, -1, -1, -1), 1)
    assert sorted(passes) == [1, 1, 1, 4]
    torch.testing.assert_close(
        heat[2], GradCAM(model, "norm", layout=Layout("tokens", GRID, 1)).attribute(x[None], 1)[0]
    )


def test_a_model_of_one_batch_size_is_probed_with_all_samples():
    class Fixed(Patches):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.view(2, 3, 32, 48))

    torch.manual_seed(0)
    model = Fixed().eval()
    x = torch.randn(2, 3, 32, 48)
    heat = GradCAM(model, "norm").attribute(x, 1)  # a warning of an unverified layout would be an error here
    torch.testing.assert_close(heat, GradCAM(model, "norm", layout=Layout("tokens", GRID, 1)).attribute(x, 1))


def by_columns() -> Tensor:
    return torch.arange(CELLS).view(GRID).T.reshape(-1)


@pytest.mark.usefixtures("passes_of_maps_alone")
@pytest.mark.parametrize(
    "settings",
    [
        {"behind": True},
        {"order": by_columns()},
        {"order": torch.arange(CELLS).flip(0)},
        {"order": torch.randperm(CELLS, generator=torch.Generator().manual_seed(3))},
        {"order": snake()},
        {"order": exchanged(0, 2)},
    ],
    ids=["class token behind", "by columns", "backwards", "shuffled", "snake", "two rows exchanged"],
)
@pytest.mark.one_in(2)
def test_a_wrong_grid_is_an_error_unless_the_layout_is_given(settings):
    model, x = net(**settings)
    with pytest.raises(
        LayerError, match=r"'norm': its output was read as tokens 1\+4x6, but its cells react to other parts"
    ):
        GradCAM(model, "norm").explain(x, 1)
    with pytest.raises(LayerError, match="attention between 25 tokens: its output was read as"):
        Rollout(model).explain(x, 1)
    with pytest.raises(LayerError, match="its output was read as"):
        GradCAM(model).explain(x, 1)
    passes = counted(model)
    assert GradCAM(model, "norm", layout=Layout("tokens", GRID, 1)).explain(x, 1).status == "ok"
    assert GradCAM(model, "norm", reshape=lambda out: out[:, 1:].unflatten(1, GRID).movedim(-1, 1)).explain(x, 1)
    assert passes == [1, 1]


def test_attention_between_tokens_in_place_is_verified_too():
    model, x = net()
    assert Rollout(model).explain(x, 1).status == "ok"


class Averaged(nn.Module):
    """A softmax whose probabilities are handed on as rows of a sequence (N,L,L), and logits (N,1,L,L) through a module."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Conv2d(3, 16, 8, 8), nn.LayerNorm(16)
        self.logits, self.drop, self.mean, self.head = (
            nn.Identity(),
            nn.Dropout(0.1),
            nn.Flatten(0, 1),
            nn.Linear(16, 5),
        )

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.norm(self.embed(x).flatten(2).mT)
        weights = self.mean(self.drop((tokens @ tokens.mT / 4).softmax(-1)[:, None]))
        return self.head((weights @ tokens).square().mean(1))


@pytest.mark.filterwarnings("ignore:Grad-CAM. nothing in the map:camscope.errors.CamscopeWarning")
@pytest.mark.parametrize("layer", ["drop", "mean"])
def test_weights_of_every_rank_and_module_are_no_image_unless_a_layout_is_given(layer):
    torch.manual_seed(0)
    model, x = Averaged().eval(), torch.randn(3, 64, 64)
    with pytest.raises(LayerError, match=r"holds attention weights between tokens|a flattened map"):
        GradCAM(model, layer).explain(x, 1)
    layout = "channels_first" if layer == "drop" else Layout("tokens", (8, 8))
    assert GradCAM(model, layer, layout=layout).explain(x, 1).layer == layer
    batch = x[None]
    assert layer not in [one.name for one in find_spatial_layers(model, lambda: model(batch), batch)]


class Queries(nn.Module):
    """A detector in small: 16 queries, as many as the image has patches, ask the tokens of the image."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Conv2d(3, 16, 8, 8), nn.LayerNorm(16)
        self.query_embed = nn.Embedding(16, 16)
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(16, 2, 32, batch_first=True), 2)
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.norm(self.embed(x).flatten(2).mT)
        queries = self.query_embed.weight.expand(len(x), -1, -1)
        return self.head(self.decoder(queries, tokens)).amax(1)


@pytest.mark.parametrize("layer", ["decoder.layers.0", "decoder.layers.1", "decoder.layers.1.norm3", "head"])
@pytest.mark.one_in(2)
def test_queries_of_a_decoder_are_no_image_though_their_number_is_a_square(layer):
    torch.manual_seed(0)
    model, x = Queries().eval(), torch.randn(3, 32, 32)
    with pytest.raises(LayerError, match=r"16 queries of a decoder|as many tokens as the model has queries"):
        GradCAM(model, layer).explain(x, 1)
    assert GradCAM(model, layer, layout=Layout("tokens", (4, 4))).explain(x, 1)
    assert GradCAM(model, "norm").explain(x, 1).status == "ok"
    assert GradCAM(model).explain(x, 1).layer in {"norm", "embed"}


def test_attention_weights_are_no_image():
    model, _ = net()
    x = torch.randn(3, 64, 64)  # 65 tokens: a plane of 65 x 65 has the input's proportions
    with pytest.raises(LayerError, match="holds attention weights between tokens, not an image"):
        GradCAM(model, "softmax").explain(x, 1)


@pytest.mark.filterwarnings("ignore:Grad-CAM. nothing in the map:camscope.errors.CamscopeWarning")
def test_attention_weights_of_a_convolutional_transformer_are_no_image():
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    model = timm.create_model("visformer_tiny", pretrained=False, num_classes=5).eval()
    x = torch.randn(3, 224, 224)
    with pytest.raises(LayerError, match="holds attention weights between tokens"):
        GradCAM(model, "stage2.0.attn.attn_drop").explain(x, 1)
    assert GradCAM(model, "stage3").explain(x, 1).layout == "channels_first 7x7"


@pytest.mark.filterwarnings("ignore:Grad-CAM. nothing in the map:camscope.errors.CamscopeWarning")
def test_a_layer_that_mixes_all_places_is_flagged():
    model, x = net(mixed=True)
    with pytest.warns(CamscopeWarning, match="could not be verified"):
        found = [GradCAM(model, "norm").explain(x, target) for target in range(5)]
    assert {one.status for one in found} <= {"layout_unverified", "no_positive_evidence"}
    assert "layout unverified" in [one.warning_text for one in found]


@pytest.mark.filterwarnings("ignore:Grad-CAM. the map has one value:camscope.errors.CamscopeWarning")
def test_a_uniform_image_is_probed_with_noise():
    model, x = net()
    assert GradCAM(model, "norm").explain(torch.zeros_like(x), 1).layout == "tokens 1+4x6"
    (finding,) = probe_layout(
        model, [OutputLocation("norm")], Layout("tokens", GRID, 1), torch.zeros_like(x)[None], model
    )
    assert finding.verdict is LayoutVerdict.VERIFIED


def test_the_values_of_the_probe_stay_within_those_of_the_image():
    model, _ = net()
    seen = []
    x = torch.rand(1, 3, 32, 48)
    probe_layout(
        model,
        [OutputLocation("norm")],
        Layout("tokens", GRID, 1),
        x,
        lambda inputs: (seen.append(inputs), model(inputs)),
    )
    assert len(seen) == 3
    assert all(one.min() >= x.min() - 1e-6 and one.max() <= x.max() + 1e-6 for one in seen)
    changed = torch.stack([(one != x).any(1).double().mean() for one in seen])
    torch.testing.assert_close(changed, torch.full((3,), 1 / 3, dtype=torch.float64), atol=0.01, rtol=0)


# --- biases of the whole network


def parts_of(model: nn.Module, x: Tensor) -> ScoreDecomposition:
    (shares,) = decompose_scores(x, [Score(model, 1)], FullGrad(model))
    return shares


@pytest.mark.parametrize(
    "order", [None, snake(), by_columns(), exchanged(0, 2)], ids=["right", "snake", "columns", "rows"]
)
@pytest.mark.one_in(2)
def test_biases_of_tokens_lie_on_the_input_only_where_the_tokens_do(order):
    model, x = net(order=order)
    for parameter in (model.norm.bias, model.value.bias):
        nn.init.normal_(parameter)
    shares = parts_of(model, x[None])
    assert ("norm" in shares.unmapped_layers) is (order is not None)
    assert not shares.layout_unverified


def test_a_map_of_biases_whose_tokens_mix_all_places_is_flagged():
    model, x = net(mixed=True)
    with pytest.warns(CamscopeWarning, match="could not be verified"):
        assert FullGrad(model).explain(x, 1).status == "layout_unverified"


# --- convolutions


@pytest.mark.parametrize("name", ["pooled", "residual", "signal", "volume", "flat"])
def test_what_convolutions_and_elementwise_steps_make_needs_no_pass(name):
    model, x = CASES[name].make()
    seen_before(model, x)
    passes = []
    first = next(module for module in model.modules() if isinstance(module, nn.modules.conv._ConvNd))
    forward = first.forward
    first.forward = lambda inputs: (passes.append(len(inputs)), forward(inputs))[1]
    GradCAM(model, CASES[name].layer).attribute(x, 1)
    assert passes == [2]


def test_maps_by_construction_are_told_from_other_planes():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1), nn.BatchNorm2d(4), nn.ReLU()).eval()
    position = nn.Parameter(torch.randn(1, 4, 8, 8))
    model.position = position
    x = torch.randn(1, 3, 16, 16)
    with torch.no_grad(), SpatialMapTracker(model, x) as ops:
        maps = model(x)
        added = maps + position
        joined = torch.cat([maps, added], 1)
        gated = joined * joined.mean((2, 3), keepdim=True).sigmoid()
        tokens = maps.flatten(2).mT
        weights = (tokens @ tokens.mT).softmax(-1)[:, None]  # (1,1,64,64)
        convolved = F.conv2d(weights, torch.randn(2, 1, 1, 1))
        back = tokens.mT.unflatten(2, (8, 8))
        again = F.conv2d(back, torch.randn(2, 4, 1, 1))
        moved = added.clone()
        moved += back
    assert all(map(ops.is_spatial_map, (maps, added, joined, gated, again)))
    assert not any(map(ops.is_spatial_map, (weights, convolved, back, moved)))


# --- nothing observable differs


def test_the_probe_leaves_model_hooks_and_random_numbers_alone():
    class Noisy(Patches):
        def forward(self, x: Tensor) -> Tensor:
            np.random.rand(), torch.rand(1)
            return super().forward(x)

    torch.manual_seed(0)
    model, x = Noisy().eval(), torch.randn(1, 3, 32, 48)
    heard = []
    model.norm.register_forward_hook(lambda *_: heard.append("after"))
    model.register_forward_pre_hook(lambda *_: heard.append("before"))
    with untouched(model, x):
        (finding,) = probe_layout(model, [OutputLocation("norm")], Layout("tokens", GRID, 1), x, model)
    assert finding.verdict is LayoutVerdict.VERIFIED
    assert heard == []
    model(x)
    assert heard == ["before", "after"]


def test_the_probe_runs_in_eval_mode_where_the_model_is_explained_in_train_mode():
    model, x = net()
    model.embed = nn.Sequential(model.embed, nn.BatchNorm2d(16))
    model.train()
    passes = []
    model.embed[1].register_forward_hook(lambda module, *_: passes.append(module.training))
    GradCAM(model, "norm", mode="as_is").attribute(x.expand(2, -1, -1, -1), 1)
    assert passes == [True], "the hook hears the one pass that is not the probe's"
    assert model.embed[1].num_batches_tracked == 0


def test_hooks_are_muted_in_one_thread_only():
    model, heard = nn.ReLU(), []
    hook = model.register_forward_hook(lambda *_: heard.append(threading.get_ident()))
    with hooks_muted(model):
        model(torch.ones(1))
        other = threading.Thread(target=model, args=(torch.ones(1),))
        other.start()
        other.join()
    assert heard == [other.ident]
    model(torch.ones(1))
    assert heard == [other.ident, threading.get_ident()]
    hook.remove()
    assert not model._forward_hooks


@pytest.mark.usefixtures("passes_of_maps_alone")
def test_what_is_known_goes_with_the_model_and_a_layer_that_is_replaced_is_proved_anew():
    model, x = net()
    GradCAM(model, "norm").explain(x, 1)
    held = len(verify_layout_by_noise._results_by_model)
    model.norm = nn.LayerNorm(16)
    passes = counted(model)
    GradCAM(model, "norm").explain(x, 1)
    assert passes == [1] * 4
    del model, passes
    gc.collect()
    assert len(verify_layout_by_noise._results_by_model) < held


# --- layers that are chosen


class TwoTowers(nn.Module):
    """An image and a text of 24 words, as many as the image has patches: the text comes last."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = nn.Conv2d(3, 16, 8, 8), nn.Embedding(24, 16)
        self.image_norm, self.text_norm = nn.LayerNorm(16), nn.LayerNorm(16)
        self.head = nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        image = self.image_norm(self.image(x).flatten(2).mT)
        text = self.text_norm(self.text(torch.arange(24).expand(len(x), -1)))
        return self.head(torch.cat([image.square().mean(1), text.square().mean(1)], 1))


def test_words_are_no_image_and_are_not_chosen():
    torch.manual_seed(0)
    model, x = TwoTowers().eval(), torch.randn(3, 32, 48)
    with pytest.raises(
        LayerError, match=r"'text_norm': its output was read as tokens 0\+4x6, but it does not depend on the image"
    ):
        GradCAM(model, "text_norm").explain(x, 1)
    batch = x[None]
    assert "text_norm" in [one.name for one in find_spatial_layers(model, lambda: model(batch), batch)]
    assert choose_layer(model, lambda inputs: model(inputs).sum(1), x[None]).name == "image_norm"
    assert GradCAM(model).explain(x, 1).layer == "image_norm"
    assert "text" not in str(RefineCAM(model).explain(x, 1).layer)


def test_the_text_tower_of_a_siglip_model_is_no_image():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.SiglipConfig(
        text_config={"vocab_size": 100, "max_position_embeddings": 64, **small},
        vision_config={"image_size": 64, "patch_size": 8, **small},
    )
    model, ids = transformers.SiglipModel(config).eval(), torch.randint(0, 100, (1, 64))

    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: Tensor) -> Tensor:
            return self.model(input_ids=ids, pixel_values=x).logits_per_image

    both, x = Wrapper().eval(), torch.randn(3, 64, 64)
    with pytest.raises(LayerError, match="64 text tokens, which lie on no grid"):
        GradCAM(both, "model.text_model.final_layer_norm").explain(x, 0)
    assert GradCAM(both).explain(x, 0).layer.startswith("model.vision_model")


# --- vision-language models


IMAGE = 99


@pytest.fixture(scope="module")
def llava():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    small = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(image_size=32, patch_size=8, projection_dim=16, **small),
        text_config=transformers.LlamaConfig(num_key_value_heads=2, vocab_size=100, **small),
        image_token_id=IMAGE,
    )
    return transformers.LlavaForConditionalGeneration(config).double().eval()


class Prompted(nn.Module):
    """A vision-language model that closes over its prompt."""

    def __init__(self, model: nn.Module, ids: list[int], *, embedded: bool = False) -> None:
        super().__init__()
        self.model, self.ids, self.embedded = model, torch.tensor([ids]), embedded

    def forward(self, x: Tensor) -> Tensor:
        ids = self.ids.expand(len(x), -1)
        given = {"inputs_embeds": self.model.get_input_embeddings()(ids)} if self.embedded else {"input_ids": ids}
        return self.model(pixel_values=x, **given).logits[:, -1]


LANGUAGE = "model.model.language_model.layers.0"
PATCHES = [IMAGE] * 16


@pytest.mark.parametrize(
    ("before", "behind"), [(1, 0), (1, 2), (1, 5), (1, 20), (0, 3), (12, 0), (7, 7)], ids=lambda count: str(count)
)
@pytest.mark.filterwarnings("ignore::camscope.errors.CamscopeWarning")
@pytest.mark.one_in(2)
def test_image_tokens_are_where_the_input_ids_hold_them(llava, before, behind):
    model = Prompted(llava, [*range(3, 3 + before), *PATCHES, *range(30, 30 + behind)]).eval()
    x = torch.randn(1, 3, 32, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    explanation = HiResCAM(model, LANGUAGE).explain(x[0], 7)
    assert explanation.layout == f"tokens {before}+4x4"
    kept = []
    hook = model.get_submodule(LANGUAGE).register_forward_hook(
        lambda module, args, out: kept.append(out.detach().requires_grad_()) or kept[-1]
    )
    score = model(x)[0, 7]
    hook.remove()
    (gradient,) = torch.autograd.grad(score, kept[0])
    expected = (gradient * kept[0])[0, before : before + 16].sum(-1).view(4, 4)
    np.testing.assert_allclose(explanation.attribution, expected.detach(), rtol=1e-9, atol=1e-15)


def test_a_layer_of_the_vision_tower_is_read_as_ever(llava):
    model = Prompted(llava, [*PATCHES, 5]).eval()  # 17 tokens here and there, at other places
    x = torch.randn(3, 32, 32, dtype=torch.float64)
    assert GradCAM(model, "model.model.vision_tower.pre_layrnorm").explain(x, 7).layout == "tokens 1+4x4"


@pytest.mark.filterwarnings("ignore::camscope.errors.CamscopeWarning")
@pytest.mark.parametrize(("before", "behind"), [(1, 3), (0, 3), (3, 0)])
@pytest.mark.one_in(2)
def test_the_layer_that_is_chosen_holds_the_image_where_the_input_ids_say(llava, before, behind):
    model = Prompted(llava, [*range(3, 3 + before), *PATCHES, *range(30, 30 + behind)]).eval()
    explanation = GradCAM(model).explain(torch.randn(3, 32, 32, dtype=torch.float64), 7)
    assert explanation.layer != "model"
    vision = "vision_tower" in explanation.layer
    assert explanation.layout == f"tokens {1 if vision else before}+4x4"


def test_the_image_in_what_the_whole_model_returns_is_where_the_input_ids_hold_it(llava):
    model = Prompted(llava, [1, 2, *PATCHES, 5, 6, 7]).eval()
    x = torch.randn(1, 3, 32, 32, dtype=torch.float64)
    layers = {one.name: str(one.layout) for one in find_spatial_layers(model, lambda: model(x), x)}
    certain = ("model.lm_head", "model.model.language_model.norm")
    with_more_tensors = (
        "model",
        "model.model",
    )  # newer versions of transformers also return the vision tower's output here
    assert {name: layers.get(name) for name in certain} == dict.fromkeys(certain, "tokens 2+4x4")
    assert {layers[name] for name in with_more_tensors if name in layers} <= {"tokens 2+4x4"}


def test_two_pieces_of_one_length_are_not_told_apart_by_guessing():
    with pytest.raises(LayerError, match="start at 0 and 17: each may be the image"):
        LayoutHints(concat_lengths={33: (16, 17), 17: (1, 16)}).count_tokens_before_image(33, 16)


@pytest.mark.parametrize(
    ("ids", "embedded", "message"),
    [
        ([1, *PATCHES, 5, 6], True, "no input ids of 19 tokens with image tokens were recorded"),
        ([1, *PATCHES[:8], 4, *PATCHES[8:], 5], False, "16 image tokens; expected one run without gaps"),
    ],
)
def test_image_tokens_of_unknown_place_are_an_error(llava, ids, embedded, message):
    model = Prompted(llava, ids, embedded=embedded).eval()
    with pytest.raises(LayerError, match=message):
        GradCAM(model, LANGUAGE).explain(torch.randn(3, 32, 32, dtype=torch.float64), 7)


def test_a_plain_network_is_explained_as_before():
    model, x = plain()
    assert GradCAM(model, "middle").explain(x[0], 1).status == "ok"
