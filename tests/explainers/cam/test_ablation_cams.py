"""Ablation methods against one full forward pass a change, on every kind of network, and what they cost."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from camscope.errors import LayerError
from camscope.explainers import AblationCAM, ReciproCAM
from camscope.explainers.cam.layer_features_and_perturbed_scores import LayerFeatures
from camscope.hooks import edit_layers
from camscope.layers.infer_layout import infer_layout
from tests.nets import CASES, Plain, Pooled, plain
from tests.tools import Largest

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore::camscope.errors.CamscopeWarning"),
]


def kept(model, layer, x, *args, call=0, **kwargs):
    """The layer's output in one plain forward pass, and the model's."""
    found = []
    handle = model.get_submodule(layer).register_forward_hook(lambda module, args, output: found.append(output.clone()))
    with torch.no_grad():
        output = model(x, *args, **kwargs)
    handle.remove()
    return found[call], output


def changed(model, layer, x, function, *args, call=0, **kwargs):
    """The model's output where a function of the layer's maps took their place in one call: a full forward pass."""
    seen = []

    def once(output):
        seen.append(None)
        return function(output) if len(seen) == call + 1 else None

    with torch.no_grad(), edit_layers(model, {layer: once}):
        return model(x, *args, **kwargs)


def slow_ablation(model, layer, x, targets, *args, to_maps=None, call=0, **kwargs):
    """Ablation-CAM in loops: the whole batch runs once for each channel of each sample."""
    output, logits = kept(model, layer, x, *args, call=call, **kwargs)
    to_maps = to_maps or infer_layout(output.shape, x.shape, model.get_submodule(layer)).to_maps
    A, heat = to_maps(output), []
    for n, target in enumerate(targets):
        total = torch.zeros_like(A[n, 0])
        for k in range(A.shape[1]):

            def without(values, n=n, k=k):
                to_maps(values)[n, k] = 0
                return values

            altered = changed(model, layer, x, without, *args, call=call, **kwargs)
            total += (logits[n, target] - altered[n, target]) * A[n, k]
        heat.append(total.relu())
    return torch.stack(heat)


def slow_recipro(model, layer, x, targets, gaussian=False):
    """ReciproCAM in loops over cells and their neighbors."""
    output, _ = kept(model, layer, x)
    to_maps = infer_layout(output.shape, x.shape, model.get_submodule(layer)).to_maps
    grid = to_maps(output).shape[2:]
    nothing = changed(model, layer, x, lambda values: (to_maps(values).zero_(), values)[1]).softmax(1)
    heat = torch.zeros(len(x), *grid, dtype=x.dtype)
    for cell in torch.cartesian_prod(*map(torch.arange, grid)).view(-1, len(grid)).tolist():
        mask = torch.zeros(grid, dtype=x.dtype)
        for other in torch.cartesian_prod(*map(torch.arange, grid)).view(-1, len(grid)).tolist():
            distances = [abs(a - b) for a, b in zip(cell, other, strict=True)]
            if gaussian and max(distances) <= 1:
                mask[tuple(other)] = math.prod(0.25 if d else 0.5 for d in distances)
            elif not any(distances):
                mask[tuple(other)] = 1.0

        def left(values, mask=mask):
            to_maps(values).mul_(mask)
            return values

        chances = changed(model, layer, x, left).softmax(1)
        heat[(slice(None), *cell)] = (chances - nothing)[range(len(x)), targets]
    return heat


def assert_same(found, expected):
    assert expected.abs().max() > 0
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-12 * float(expected.abs().max()))


@pytest.mark.parametrize("batch_size", [None, 1, 7])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.one_in(2)
def test_ablation_is_a_full_forward_pass_for_each_channel(case, batch_size):
    model, x = case.make(3, torch.float64)
    expected = slow_ablation(model, case.layer, x, [2, 0, 1])
    assert_same(AblationCAM(model, case.layer, batch_size=batch_size).attribute(x, [2, 0, 1]), expected)


@pytest.mark.parametrize("gaussian", [False, True])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.one_in(2)
def test_recipro_is_a_full_forward_pass_for_each_cell(case, gaussian):
    model, x = case.make(3, torch.float64)
    model.head.weight.data *= 20  # chances that differ
    expected = slow_recipro(model, case.layer, x, [2, 0, 1], gaussian)
    assert expected.std() > 1e-4
    assert_same(ReciproCAM(model, case.layer, gaussian=gaussian, batch_size=7).attribute(x, [2, 0, 1]), expected)


def test_recipro_makes_no_more_masks_at_a_time_than_rows():
    model, x = plain(samples=3)
    with Largest() as largest:
        ReciproCAM(model, "middle", batch_size=4).attribute(x, 1)
    assert largest.numbers == 4 * 6 * 64, "the activations of four rows"


def test_recipro_of_a_single_output_or_a_callable_is_the_score_itself():
    model, x = CASES["pooled"].make(dtype=torch.float64)
    A, _ = kept(model, "features", x)
    scores = torch.einsum("k,nkhw->nhw", model.head.weight[1], A) / 12
    assert_same(ReciproCAM(model, "features").attribute(x, lambda output: output[:, 1]), scores.detach())
    model.head = nn.Linear(6, 1).double()
    single = torch.einsum("k,nkhw->nhw", model.head.weight[0], A) / 12
    assert_same(ReciproCAM(model, "features").attribute(x, 0), single.detach())


def test_recipro_of_a_map_that_changes_nothing_is_zero():
    """Not one, not noise: there is nothing in it for any cell to give."""
    model, x = CASES["tokens"].make()
    model.head.weight.data[:] = 0
    for target in (1, lambda output: output[:, 1] + 1000):
        assert not ReciproCAM(model, "block").attribute(x, target).any()


def test_recipro_says_where_the_scores_are_too_coarse_for_a_cell():
    model, x = CASES["pooled"].make(1)
    assert not any("rounding" in note for note in ReciproCAM(model, "features").explain(x[0], 1).notes)
    notes = ReciproCAM(model.bfloat16(), "features").explain(x[0].bfloat16(), 1).notes
    assert "no cell alone changes the score by much more than its rounding in torch.bfloat16" in notes


def way_of(model, layer, x, monkeypatch):
    """The way that an ablation of three samples took."""
    ways = []
    original = LayerFeatures._run_in_chunks

    def noting(self, way, *args):
        ways.append(way)
        return original(self, way, *args)

    with monkeypatch.context() as patch:
        patch.setattr(LayerFeatures, "_run_in_chunks", noting)
        heat = AblationCAM(model, layer).attribute(x, 1)
    return ways[-1], heat


class Counting(Plain):
    """Counts its rows before the layer, as many a model does."""

    def forward(self, x):
        rows = x.shape[0]
        y = self.before(x)
        return self.head(torch.sigmoid(self.last(F.elu(y))).reshape(rows, 5, -1).mean(2))


class Mixing(Plain):
    """Each sample sees the mean of the batch."""

    def after(self, y):
        return super().after(y - 0.3 * y.mean(0, keepdim=True))


class Groups(Plain):
    """Rows in groups of three, of which each sees the one before: frames of a video."""

    def after(self, y):
        frames = y.view(-1, 3, *y.shape[1:])
        return super().after((frames + 0.5 * frames.roll(1, 1)).flatten(0, 1))


class Asserting(Plain):
    """Refuses a batch that grows by an error of a kind of its own."""

    def forward(self, x):
        y = self.before(x)
        if len(y) != len(x):
            raise ArithmeticError("not my batch")
        return self.after(y)


@pytest.mark.parametrize(
    ("kind", "samples", "way"),
    [
        (Plain, 3, "together"),
        (Plain, 1, "together"),
        (Counting, 3, "whole"),
        (Counting, 1, "whole"),
        (Asserting, 3, "whole"),
        (Mixing, 3, "batch"),
        (Mixing, 1, "batch"),
        (Groups, 3, "batch"),
        (Groups, 6, "batch"),
    ],
)
def test_whatever_a_model_does_with_its_rows_the_map_is_right(kind, samples, way, monkeypatch):
    model, x = plain(kind, samples=samples)
    taken, heat = way_of(model, "middle", x, monkeypatch)
    batches = x.split(1) if kind is Mixing else [x]  # samples that affect one another are explained one by one
    assert_same(heat, torch.cat([slow_ablation(model, "middle", some, [1] * len(some)) for some in batches]))
    assert taken == way


@pytest.mark.parametrize(("samples", "way"), [(3, "apart"), (1, "together")])
def test_a_path_around_the_layer(samples, way, monkeypatch):
    model, x = CASES["residual"].make(samples, torch.float64)
    taken, heat = way_of(model, "block", x, monkeypatch)
    assert_same(heat, slow_ablation(model, "block", x, [1] * samples))
    assert taken == way


def test_batch_norm_in_train_mode_mixes_the_samples():
    model, x = CASES["residual"].make(3, torch.float64)
    model.norm.train()
    model.norm.momentum = 0.0
    expected = slow_ablation(model, "stem", x, [1, 1, 1])
    assert_same(AblationCAM(model, "stem", mode="as_is").attribute(x, 1), expected)


class Again(Plain):
    """The layer runs three times."""

    def forward(self, x):
        y = self.middle(torch.tanh(self.first(x)))
        y = self.middle(torch.tanh(y[:, :4]))
        return self.after(self.middle(torch.tanh(y[:, 2:])))


@pytest.mark.parametrize("call", [0, 1, 2])
@pytest.mark.parametrize("samples", [1, 3])
def test_one_call_of_a_layer_that_runs_several_times(call, samples):
    model, x = plain(Again, samples=samples)
    expected = slow_ablation(model, "middle", x, [2] * samples, call=call)
    assert_same(AblationCAM(model, "middle", call_index=call).attribute(x, 2), expected)


class Gated(Plain):
    """A gate for each sample before the layer and another after it, a scale for all, and a bias by keyword."""

    def forward(self, x, gate, scale, *, late, joined):
        y = self.before(x * gate)
        return self.head(torch.cat([torch.sigmoid(self.last(y * late)).mean((2, 3)) * scale, joined], 1)[:, 1:])


@pytest.mark.parametrize("samples", [1, 3])
def test_what_the_model_takes_beside_the_image_goes_with_its_sample(samples):
    model, x = plain(Gated, samples=samples)
    torch.manual_seed(2)
    gate, late, joined = torch.rand(samples, 3, 1, 1), torch.rand(samples, 6, 1, 1), torch.rand(samples, 1)
    args, kwargs = (gate.double(), torch.tensor(2.0)), {"late": late.double(), "joined": joined.double()}
    expected = slow_ablation(model, "middle", x, [1] * samples, *args, **kwargs)
    assert_same(AblationCAM(model, "middle").attribute(x, 1, *args, **kwargs), expected)


class Packed(nn.Module):
    """The layer returns its map among other things."""

    def __init__(self, kind):
        super().__init__()
        self.conv, self.kind = nn.Conv2d(3, 6, 3, padding=1), kind

    def forward(self, x):
        y = self.conv(x)
        return {"tuple": (x.mean(), y), "dict": {"size": x.shape, "map": y}, "several": (y, 2 * y)}[self.kind]


@pytest.mark.parametrize(("kind", "key"), [("tuple", None), ("dict", None), ("several", 0)])
def test_a_map_in_a_tuple_or_a_dict(kind, key):
    class Unpacking(Plain):
        def __init__(self):
            super().__init__()
            self.packed = Packed(kind)

        def forward(self, x):
            found = self.packed(x)
            y = found["map"] if kind == "dict" else found[1] if kind == "tuple" else found[0] + found[1].sigmoid()
            return self.after(y)

    torch.manual_seed(3)
    model, x = plain(Unpacking, samples=3)
    A = model.packed.conv(x).detach()
    expected = torch.zeros(3, 8, 8, dtype=torch.float64)
    other = (2 * A).sigmoid() if kind == "several" else 0
    clean = model.after(A + other)[:, 1]
    for k in range(6):
        without = A.clone()
        without[:, k] = 0
        expected += (clean - model.after(without + other)[:, 1]).detach()[:, None, None] * A[:, k]
    assert_same(AblationCAM(model, "packed", output_index=key).attribute(x, 1), expected.relu())


def test_a_reshape_that_copies_is_a_clear_error():
    model, x = plain()
    for copying in (lambda y: y * 1.0, lambda y: y.clone(), lambda y: torch.cat([y, y], 1)):
        with pytest.raises(LayerError, match=r"reshape= copies the output of layer 'middle'.*return a view"):
            AblationCAM(model, "middle", reshape=copying).attribute(x, 1)


def test_a_reshape_that_takes_a_view_is_followed():
    model, x = plain(samples=3)
    halves = {"reshape": lambda y: y[:, 2:]}  # two channels of six are left as they are
    assert_same(
        AblationCAM(model, "middle", **halves).attribute(x, 1),
        slow_ablation(model, "middle", x, [1, 1, 1], to_maps=halves["reshape"]),
    )


class Small(Plain):
    """A device whose memory ends at so many rows behind the layer."""

    rows, most = 5, 0

    def after(self, y):
        if len(y) > self.rows:
            raise torch.OutOfMemoryError("out of memory")
        self.most = max(self.most, len(y))
        return super().after(y)


@pytest.mark.parametrize("rows", [3, 4, 5, 11])
def test_where_memory_ends_pieces_are_halved(rows):
    model, x = plain(Small, samples=3)
    expected = slow_ablation(plain(samples=3)[0], "middle", x, [1, 1, 1])
    model.rows = rows
    assert_same(AblationCAM(model, "middle").attribute(x, 1), expected)
    assert model.most <= rows


def test_where_one_row_is_too_many_the_error_is_the_models_own():
    model, x = plain(Small, samples=1)
    model.rows = 0
    with pytest.raises(torch.OutOfMemoryError, match=r"^out of memory$"):
        AblationCAM(model, "middle").attribute(x, 1)


class Rows:
    """How many rows went through each of some modules, pass by pass."""

    def __init__(self, **modules):
        self.passes = {name: [] for name in modules}
        for name, module in modules.items():
            module.register_forward_hook(lambda module, args, out, name=name: self.passes[name].append(len(out)))

    def total(self, name):
        return sum(self.passes[name])


def test_what_comes_before_the_layer_runs_once_a_piece_and_dead_channels_cost_nothing():
    model, x = CASES["pooled"].make(2)
    bias = model.features[4].bias.data
    bias[1], bias[4] = -100.0, -100.0  # two channels that the ReLU behind makes zero
    alive = kept(model, "features", x)[0].flatten(2).any(-1)
    assert alive.sum() == 2 * 3  # one more is dead by itself
    rows = Rows(stem=model.features[0], head=model.head)
    AblationCAM(model, "features").attribute(x, 1)
    # the clean pass, the check with an odd number of rows, and one piece: each altered row, and each sample's clean one
    assert rows.passes == {"stem": [2, 2, 2], "head": [2, 5, 6 + 2]}
    rows.passes["head"].clear()
    AblationCAM(model, "features", batch_size=4).attribute(x, 1)  # pieces: 4 + 1; 3 of one sample, 1 of another; 2
    assert rows.passes["head"] == [2, 4, 1, 4 + 2, 2 + 1]


def test_of_a_residual_model_each_sample_has_passes_of_its_own():
    model, x = CASES["residual"].make(3)
    rows = Rows(stem=model.stem, head=model.head)
    AblationCAM(model, "block").attribute(x, 1)
    # clean; a check that fails in the middle; the check of each sample alone (the last has one row more); each sample
    assert rows.passes["stem"] == [3, 3, 1, 1, 1, 1, 1, 1]
    assert rows.passes["head"] == [3, 2, 2, 3, 7, 7, 7]


@pytest.mark.slow
def test_a_channel_that_is_not_read_weighs_exactly_nothing(monkeypatch):
    """Batches of different sizes are rounded differently; clean and altered rows of one batch are not."""
    torch.manual_seed(0)
    model, x = Pooled(nn.Sequential(nn.Conv2d(3, 512, 3), nn.ReLU()), 512, classes=100), torch.randn(1, 3, 12, 12)
    model.head.weight.data[:, ::2] = 0
    found, original = [], AblationCAM.channel_weights
    monkeypatch.setattr(
        AblationCAM, "channel_weights", lambda self, features: found.append(original(self, features)) or found[-1]
    )
    for batch_size in (None, 1, 100):
        AblationCAM(model, "features", batch_size=batch_size).attribute(x, 1)
    assert all(weights[:, 1::2].all() and not weights[:, ::2].any() for weights in found)


def test_the_map_of_negative_scores_is_not_turned_inside_out():
    """Division by y, as the paper has it, would turn the sign where every logit is negative: nothing else changes."""
    model, x = CASES["pooled"].make(dtype=torch.float64)
    right = AblationCAM(model, "features").attribute(x, 1)
    model.head.bias.data -= 50.0
    torch.testing.assert_close(AblationCAM(model, "features").attribute(x, 1), right, rtol=1e-10, atol=1e-12)


def test_the_prefix_tokens_stay_as_they_are():
    model, x = CASES["tokens"].make(1)
    seen = []
    model.attention.register_forward_pre_hook(lambda module, args: seen.append(args[0].detach().clone()))
    ReciproCAM(model, "block").attribute(x, 1)
    clean, altered = seen[0][0], seen[-1]
    assert (altered[:, :1] == clean[:1]).all()
    assert altered[:, 1:].any(2).sum(1).tolist() == [1] * 24 + [0]


def test_pooled_and_linear_ablation_is_the_class_activation_map_weighed_by_means():
    model, x = CASES["pooled"].make(dtype=torch.float64)
    model.head.weight.data.abs_()
    A, _ = kept(model, "features", x)
    expected = torch.einsum("k,nk,nkhw->nhw", model.head.weight[2].detach(), A.mean((2, 3)), A)
    assert_same(AblationCAM(model, "features").attribute(x, 2), expected)
