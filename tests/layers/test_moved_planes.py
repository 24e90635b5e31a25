"""Planes that a model flips, transposes, rolls or shuffles: what convolutions make of them is no map of the input."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from camscope.errors import LayerError
from camscope.explainers import GradCAM
from camscope.hooks.spatial_map_tracker import SpatialMapTracker
from camscope.layers import choose_layer as layer_choice
from camscope.layers import verify_layout_by_noise
from camscope.layers.judge_layout_from_noise_reactions import LayoutProbeResult, LayoutVerdict
from camscope.layers.spatial_layers import find_spatial_layers

pytestmark = pytest.mark.filterwarnings("ignore::camscope.errors.CamscopeWarning")


def order(length: int) -> Tensor:
    return torch.randperm(length, generator=torch.Generator().manual_seed(1))


def written(x: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    y[..., 5:] = x[..., :-5]
    return y


MOVES = {
    "transposed": lambda x: x.transpose(2, 3),
    "mirrored": lambda x: x.flip(-1),
    "upside down": lambda x: x.flip(-2),
    "turned": lambda x: x.rot90(1, (2, 3)),
    "rolled": lambda x: x.roll(x.shape[-1] // 2, -1),
    "rolled by one": lambda x: x.roll(1, -1),
    "rows shuffled": lambda x: x[:, :, order(x.shape[2])],
    "columns shuffled": lambda x: x.index_select(3, order(x.shape[3])),
    "cells shuffled": lambda x: x.flatten(2)[..., order(x[0, 0].numel())].view(x.shape),
    "half the channels mirrored": lambda x: torch.cat([x[:, : x.shape[1] // 2], x[:, x.shape[1] // 2 :].flip(-1)], 1),
    "two rows exchanged": lambda x: x[:, :, [1, 0, *range(2, x.shape[2])]],
    "halves exchanged": lambda x: torch.cat(x.chunk(2, 3)[::-1], 3),
    "written elsewhere": written,
}


def flipped(x: Tensor) -> Tensor:
    return x.flip(-1)


def scripted(x: Tensor) -> Tensor:
    return torch.jit.script(flipped)(x)


@torch.library.custom_op("camscope_tests::relu", mutates_args=())
def named_like_another(x: Tensor) -> Tensor:
    return x.flip(-1)


named_like_another.register_autograd(lambda ctx, gradient: gradient.flip(-1))


class Flipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return torch.from_numpy(x.numpy()[..., ::-1].copy())

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return gradient.flip(-1)


def written_through_numpy(x: Tensor) -> Tensor:
    y = x * 1
    values = y.detach().numpy()
    values[:] = values[..., ::-1].copy()
    return y


def written_through_data(x: Tensor) -> Tensor:
    y = x * 1
    y.data.copy_(x.flip(-1))
    return y


def written_through_a_view(x: Tensor) -> Tensor:
    y = x * 1
    y.view(-1).copy_(x.flip(-1).reshape(-1))
    return y


def filled(x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    y.numpy()[:] = x.detach().numpy()[..., ::-1]
    return y


def mirror(x: Tensor) -> Tensor:
    return torch.eye(x.shape[-1]).flip(0)


# what function modes do not see, or see without its meaning
UNSEEN_MOVES = {
    "TorchScript": scripted,
    "a traced function": lambda x: torch.jit.trace(lambda y: y.transpose(2, 3), (x,))(x),
    "NumPy": lambda x: torch.from_numpy(x.detach().numpy()[..., ::-1].copy()),
    "lists": lambda x: torch.tensor(x.flip(-1).tolist()),
    "DLPack": lambda x: torch.from_dlpack(torch.from_dlpack(x.detach()).flip(-1)),
    "an autograd function": Flipped.apply,
    "a custom operation": named_like_another,
    "a custom operation of another name": lambda x: torch.ops.camscope_tests.relu(x),
    "vmap": torch.func.vmap(lambda y: y.flip(-1)),
    "a checkpoint": lambda x: torch.utils.checkpoint.checkpoint(lambda y: y.flip(-1), x, use_reentrant=False),
    "an operation of ATen": lambda x: torch.ops.aten.flip(x, [-1]),
    "integers": lambda x: (x * 1000).int().flip(-1).float() / 1000,
    "quantized numbers": lambda x: torch.quantize_per_tensor(x.detach(), 0.01, 0, torch.qint8).flip(-1).dequantize(),
    "complex numbers": lambda x: torch.fft.ifft(torch.fft.fft(x).conj()).real,
    "a sampled grid": lambda x: F.grid_sample(
        x,
        F.affine_grid(torch.tensor([[[-1.0, 0, 0], [0, 1, 0]]]).expand(len(x), -1, -1), x.shape, False),
        align_corners=False,
    ),
    "written through NumPy": written_through_numpy,
    "written through data": written_through_data,
    "written through a view": written_through_a_view,
    "written into new memory": filled,
    "a matrix behind": lambda x: x @ mirror(x),
    "a matrix before": lambda x: mirror(x) @ x,
    "einsum": lambda x: torch.einsum("vw,nkhw->nkhv", mirror(x), x),
}

# a plane in place is part of the result, but not what makes its values
MIXED_MOVES = {
    "a sum": lambda x: 0 * x + UNSEEN_MOVES["NumPy"](x),
    "a sum of one plane": lambda x: 0 * x + x[0, 0].flip(-1),
    "a sum of one line": lambda x: 0 * x + x[0, 0, 0].flip(-1),
    "a sum with lists": lambda x: 0 * x + UNSEEN_MOVES["lists"](x),
    "a sum with integers": lambda x: 0 * x + UNSEEN_MOVES["integers"](x),
    "a sum with a matrix product": lambda x: 0 * x + UNSEEN_MOVES["a matrix before"](x),
    "a sum with new memory": lambda x: 0 * x + filled(x),
    "the larger one": lambda x: torch.max(x - 100, x.flip(-1)),
    "an einsum of two": lambda x: torch.einsum("nkhw,nkhw->nkhw", 0 * x + 1, x.flip(-1)),
}

SHIFTS = {
    "padded and cropped": lambda x: F.pad(x, (x.shape[-1] // 2, -(x.shape[-1] // 2))),
    "cropped and padded": lambda x: F.pad(x, (-(x.shape[-1] // 2), x.shape[-1] // 2)),
    "padded and cropped by a module": lambda x: nn.ConstantPad2d((x.shape[-1] // 2, -(x.shape[-1] // 2), 0, 0), 0.0)(x),
    "rows padded and cropped": lambda x: F.pad(x, (0, 0, 6, -6)),
    "padded at the left": lambda x: F.pad(x, (x.shape[-1], 0)),
    "padded at the right": lambda x: F.pad(x, (0, x.shape[-1] // 2)),
    "padded at the top with one": lambda x: F.pad(x, (0, 0, 10, 0), value=1.0),
    "padded at all sides": lambda x: F.pad(x, (x.shape[-1] // 2,) * 4),
    "cropped at the left": lambda x: F.pad(x, (-8, 0)),
    "rolled by circular padding": lambda x: F.pad(x, (8, 0, 0, 0), mode="circular")[..., :-8],
    "reflected at the left": lambda x: F.pad(x, (8, 0, 0, 0), mode="reflect"),
    "replicated at the left": lambda x: F.pad(x, (8, 0, 0, 0), mode="replicate"),
    "many small shifts": lambda x: F.avg_pool2d(
        F.pad(F.avg_pool2d(F.pad(F.avg_pool2d(F.pad(x, (2, -2)), 1), (3, -3)), 1), (3, -3)), 1
    ),
}


class Net(nn.Module):
    """Three convolutions. What `move` does happens to the image, or before the last convolution."""

    def __init__(self, move, where: str = "middle") -> None:
        super().__init__()
        self.move, self.where = move, where
        self.first, self.second = nn.Conv2d(3, 16, 3, 2, 1), nn.Conv2d(16, 16, 3, 2, 1)
        self.last, self.head = nn.Conv2d(16, 16, 3, padding=1), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.move(x) if self.where == "image" else x
        x = self.second(self.first(x).relu()).relu()
        x = self.move(x) if self.where == "middle" else x
        return self.head(self.last(x).relu().mean((2, 3)))


def net(move, where: str = "middle", size: int = 64) -> tuple[Net, Tensor]:
    torch.manual_seed(0)
    return Net(move, where).eval(), torch.randn(3, size, size)


@pytest.fixture
def probes(monkeypatch):
    """The number of probes, of three forward passes each, counted by their calls."""
    calls, probe = [], verify_layout_by_noise.probe_output_layouts
    monkeypatch.setattr(
        verify_layout_by_noise,
        "probe_output_layouts",
        lambda *args, **kwargs: (calls.append(1), probe(*args, **kwargs))[1],
    )
    return calls


def answer(model: nn.Module, layer: str | None, x: Tensor) -> str:
    """Return "rejected", the status that flags the map, or the layer that was chosen instead, which lies in place."""
    try:
        explanation = GradCAM(model, layer).explain(x, 1)
    except LayerError as error:
        return "rejected" if "its cells react to other parts of the image" in str(error) else str(error)
    return explanation.layer if explanation.layer == "second" else explanation.status


@pytest.mark.parametrize("where", ["image", "middle"])
@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("layer", ["last", None], ids=["named", "chosen"])
@pytest.mark.one_in(5)
def test_what_convolutions_make_of_a_moved_plane_is_rejected_or_flagged(move, where, layer, probes):
    model, x = net(MOVES[move], where)
    assert answer(model, layer, x) in {"rejected", "layout_unverified", "second"}
    assert probes


@pytest.mark.filterwarnings(
    "ignore:.torch.jit:FutureWarning", "ignore:.torch.jit:DeprecationWarning", "ignore:torch.quantize:UserWarning"
)
@pytest.mark.parametrize("where", ["image", "middle"])
@pytest.mark.parametrize("move", [*UNSEEN_MOVES, *MIXED_MOVES])
@pytest.mark.one_in(5)
def test_what_convolutions_make_of_a_plane_that_was_not_followed_is_probed(move, where, probes):
    model, x = net((UNSEEN_MOVES | MIXED_MOVES)[move], where)
    assert answer(model, "last", x) in {"rejected", "layout_unverified"}
    assert probes


@pytest.mark.parametrize("where", ["image", "middle"])
@pytest.mark.parametrize("move", SHIFTS)
@pytest.mark.one_in(5)
def test_what_convolutions_make_of_a_shifted_plane_is_rejected_or_flagged(move, where, probes):
    model, x = net(SHIFTS[move], where)
    assert answer(model, "last", x) in {"rejected", "layout_unverified"}
    assert probes


@pytest.mark.parametrize("move", ["transposed", "mirrored", "upside down", "turned", "rolled"])
def test_a_plane_that_is_moved_as_a_whole_is_rejected(move):
    model, x = net(MOVES[move])
    with pytest.raises(LayerError, match="'last': its output was read as channels_first 16x16, but its cells react"):
        GradCAM(model, "last").explain(x, 1)
    assert GradCAM(model, "second").explain(x, 1).status == "ok"
    assert GradCAM(model).explain(x, 1).layer == "second"


def windows(x: Tensor) -> Tensor:
    n, k, h, w = x.shape
    rows = x.view(n, k, h // 4, 4, w // 4, 4).permute(0, 2, 4, 3, 5, 1).reshape(-1, 16, k)
    rows = rows + (rows @ rows.mT).softmax(-1) @ rows
    return rows.view(n, h // 4, w // 4, 4, 4, k).permute(0, 5, 1, 3, 2, 4).reshape(n, k, h, w)


def shifted_windows(x: Tensor) -> Tensor:
    return windows(x.roll((-2, -2), (2, 3))).roll((2, 2), (2, 3))


def channels_last(x: Tensor) -> Tensor:
    return F.gelu(F.layer_norm(x.permute(0, 2, 3, 1), (x.shape[1],))).permute(0, 3, 1, 2)


def with_class_token(x: Tensor) -> Tensor:
    tokens = torch.cat([x.new_zeros(len(x), 1, x.shape[1]), x.flatten(2).mT], 1)
    tokens = F.scaled_dot_product_attention(tokens, tokens, tokens)
    return tokens[:, 1:].mT.unflatten(2, x.shape[2:])


def shuffled_channels(x: Tensor) -> Tensor:
    return x.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)


def copied_neighbors(x: Tensor) -> Tensor:
    n, k, h, w = x.shape
    return x[:, :, :, None, :, None].expand(n, k, h, 2, w, 2).reshape(n, k, 2 * h, 2 * w)


def normalized(x: Tensor) -> Tensor:
    centered = x - x.mean(1, keepdim=True)
    return centered / (centered.pow(2).mean(1, keepdim=True) + 1e-6).sqrt()


def gated(x: Tensor) -> Tensor:
    gate = torch.cat([x.mean(1, keepdim=True), x.amax(1, keepdim=True)], 1).sum(1, keepdim=True).sigmoid()
    return x * gate * x.mean((2, 3), keepdim=True).sigmoid()


class Squared(torch.autograd.Function):
    """An activation that function modes do not see."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x * x.sigmoid()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return gradient


IN_PLACE = {
    "twice mirrored": lambda x: x.flip(3).flip(3),
    "channels last": channels_last,
    "windows of attention": windows,
    "shifted windows": shifted_windows,
    "tokens with a class token": with_class_token,
    "channels shuffled": shuffled_channels,
    "cropped at the center by one": lambda x: x[:, :, 1:-1, 1:-1],
    "one line less": lambda x: x[..., :-1, :-1],
    "every other cell": lambda x: torch.cat([x[..., i::2, j::2] for i in (0, 1) for j in (0, 1)], 1)[:, ::4],
    "space to depth": lambda x: F.pixel_unshuffle(x, 2)[:, ::4],
    "copied neighbors": copied_neighbors,
    "skip connection": lambda x: torch.cat([x, F.interpolate(F.max_pool2d(x, 2), scale_factor=2.0)], 1)[:, ::2],
    "cropped skip connection": lambda x: x[..., 1:-1, 1:-1] + F.avg_pool2d(x, 3, 1),
    "coordinates": lambda x: torch.cat([x[:, 1:], torch.linspace(0, 1, x.shape[3]).expand(x[:, :1].shape)], 1),
    "normalized by place": normalized,
    "gated": gated,
    "an unseen function": Squared.apply,
    "einsum": lambda x: torch.einsum("nkhw,jk->njhw", x, torch.eye(16)),
    "padded as by a convolution": lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"),
    "padded for an even size": lambda x: F.pad(x, (0, 1, 0, 1)),
    "padded and cropped back": lambda x: F.pad(x, (9, 0, 0, 9))[:, :, :-9, 9:],
    "checkpointed": lambda x: torch.utils.checkpoint.checkpoint(torch.relu, x, use_reentrant=False),
    "channel attention": lambda x: ((x.flatten(2) @ x.flatten(2).mT).softmax(-1) @ x.flatten(2)).view(x.shape),
}


NEED_16_CHANNELS = {
    "every other cell",
    "space to depth",
    "skip connection",
    "coordinates",
    "einsum",
    "channels shuffled",
}


@pytest.mark.parametrize(
    ("move", "where"),
    [
        (move, where)
        for move in IN_PLACE
        for where in ("middle", "image")
        if where == "middle" or move not in NEED_16_CHANNELS
    ],
)
@pytest.mark.one_in(5)
def test_a_plane_that_lies_in_place_in_the_end_needs_no_probe(move, where, probes):
    model, x = net(IN_PLACE[move], where)
    assert GradCAM(model, "last").explain(x, 1).status != "layout_unverified"
    assert GradCAM(model).explain(x, 1).layer == "last"
    assert not probes


def test_an_image_that_is_used_again_after_a_move_is_still_in_place(probes):
    class Two(Net):
        def forward(self, x: Tensor) -> Tensor:
            moved = self.first(x).flatten(2).mT.mean(1)
            return self.head(
                self.last(self.second(self.first(F.interpolate(x, size=(48, 48)))).relu()).mean((2, 3)) + moved
            )

    torch.manual_seed(0)
    assert GradCAM(Two(None).eval(), "last").explain(torch.randn(3, 64, 64), 1).status == "ok"
    assert not probes


@pytest.mark.parametrize(
    "crop",
    [lambda x: x[..., 24:-24, 24:-24], lambda x: x[..., 16:, 16:], lambda x: x[..., :40]],
    ids=["small", "at a corner", "the left side"],
)
def test_a_small_crop_and_one_off_center_are_probed(crop, probes):
    model, x = net(crop, "image")
    assert answer(model, "last", x) in {"rejected", "layout_unverified"}
    assert len(probes) == 1


CROPS = {
    "an eighth of each side": lambda x: x[:, :, 2:-2, 2:-2] if x.shape[2] == 16 else x[:, :, 8:-8, 8:-8],
    "negative padding": lambda x: F.pad(x, (-(x.shape[-1] // 8),) * 4),
    "narrowed": lambda x: x.narrow(3, 3, x.shape[3] - 6),
    "resized afterwards": lambda x: F.interpolate(x[..., 4:-4, 4:-4], x.shape[2:]),
    "a border": lambda x: F.pad(x, (4, 4, 4, 4)),
    "a reflected border": lambda x: F.pad(x, (4, 4, 4, 4), mode="reflect"),
    "to a multiple at the right": lambda x: F.pad(x, (0, 4)),
}


@pytest.mark.parametrize("where", ["image", "middle"])
@pytest.mark.parametrize("crop", CROPS)
def test_a_crop_and_a_border_are_rejected_or_flagged(crop, where, probes):
    model, x = net(CROPS[crop], where)
    assert answer(model, "last", x) in {"rejected", "layout_unverified"}
    assert probes


@pytest.mark.parametrize(("size", "crop", "stride"), [(300, 224, 4), (256, 224, 8), (256, 224, 32), (128, 64, 16)])
def test_no_map_of_a_center_crop_counts_as_in_place(size, crop, stride):
    class Cropped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.head = nn.Conv2d(3, 4, stride, stride), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            first = (x.shape[2] - crop) // 2
            x = x[..., first : first + crop, first : first + crop]
            return self.head(self.layer((x - 0.5) / 0.2).relu().mean((2, 3)))

    torch.manual_seed(0)
    assert answer(Cropped().eval(), "layer", torch.rand(3, size, size)) in {"rejected", "layout_unverified"}


@pytest.mark.parametrize("where", ["image", "middle"])
def test_no_earlier_moved_layer_takes_the_place_of_a_rejected_one(where, monkeypatch):
    model, x = net(MOVES["mirrored"], where)
    verdicts = {"last": LayoutVerdict.CONTRADICTED}
    monkeypatch.setattr(
        layer_choice,
        "probe_layer_layout",
        lambda model, layer, *others: LayoutProbeResult(verdicts.get(layer.name, LayoutVerdict.UNDECIDED)),
    )
    if where == "image":
        with pytest.raises(LayerError, match="layer 'last'"):
            layer_choice.choose_layer(model, lambda batch: model(batch)[:, 1], x[None])
    else:
        assert layer_choice.choose_layer(model, lambda batch: model(batch)[:, 1], x[None]).name == "second"


def test_the_error_of_a_moved_plane_names_the_cause_and_a_remedy():
    model, x = net(MOVES["mirrored"])
    for _ in range(2):  # the second time from the cache
        with pytest.raises(LayerError, match="the model crops, pads or shifts its maps: apply that to the image first"):
            GradCAM(model, "last").explain(x, 1)


BORDERS = {
    "none": [nn.Conv2d(3, 8, 5), nn.MaxPool2d(2), nn.Conv2d(8, 8, 5), nn.MaxPool2d(2)],
    "padded as TensorFlow does": [
        part for _ in range(3) for part in (nn.ZeroPad2d((0, 1, 0, 1)), nn.LazyConv2d(8, 3, 2), nn.ReLU())
    ],
    "padded for large kernels": [nn.ReflectionPad2d(3), nn.Conv2d(3, 8, 7), nn.ZeroPad2d(2), nn.Conv2d(8, 8, 5, 2)],
    "rounded up": [nn.Conv2d(3, 8, 7, 2, 3), nn.MaxPool2d(3, 2, ceil_mode=True), nn.Conv2d(8, 8, 3, 2, 1)],
    "large strides": [nn.Conv2d(3, 8, 11, 4, 2), nn.MaxPool2d(3, 2), nn.Conv2d(8, 8, 5, padding=2)],
}


@pytest.mark.parametrize("borders", BORDERS)
def test_the_borders_that_kernels_need_are_in_place(borders, probes):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(*BORDERS[borders]), nn.AdaptiveAvgPool2d(1), nn.Flatten()).eval()
    x = torch.rand(3, 67, 67)
    model(x[None])
    assert GradCAM(model, "0").explain(x, 1).status != "layout_unverified"
    assert not probes


class Fused(Net):
    """The same with an attention layer, whose fused kernel is not intercepted."""

    def __init__(self, move) -> None:
        super().__init__(move)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.move(self.second(self.first(x).relu()).relu())
        tokens = self.last(x).relu().flatten(2).mT
        return self.head((tokens + self.attention(tokens, tokens, tokens, need_weights=False)[0]).mean(1))


@pytest.mark.usefixtures("passes_of_maps_alone")
def test_a_model_with_fused_attention_is_followed_in_a_pass_of_its_own(probes):
    torch.manual_seed(0)
    x = torch.randn(3, 64, 64)
    passes = []
    model = Fused(lambda y: y).eval()
    forward = model.first.forward
    model.first.forward = lambda y: (passes.append(len(y)), forward(y))[1]
    assert GradCAM(model, "last").explain(x, 1).status == "ok"
    assert GradCAM(model, "last").explain(x, 1).status == "ok"
    assert (passes, probes) == ([1, 1, 1], [])
    assert answer(Fused(MOVES["mirrored"]).eval(), "last", x) == "rejected"


def test_moved_planes_are_told_from_planes_in_place():
    torch.manual_seed(0)
    model, x = nn.Conv2d(3, 4, 3, padding=1), torch.randn(2, 3, 12, 12)
    with torch.no_grad(), SpatialMapTracker(model, x) as tracker:
        in_place = model(x)
        mirrored = in_place.flip(3)
        convolved = F.conv2d(mirrored, torch.randn(4, 4, 1, 1))
        both = in_place + convolved
        sorted_rows = in_place.sort(3).values
        of_sorted = F.conv2d(sorted_rows, torch.randn(4, 4, 1, 1))
    assert [tracker.is_spatial_map(one) for one in (in_place, mirrored, convolved, both, of_sorted)] == [True] + [
        False
    ] * 4
    assert [tracker.is_misplaced(one) for one in (in_place, mirrored, convolved, both)] == [False, True, True, False]


@pytest.mark.parametrize(("n_mirrored", "is_misplaced"), [(0, False), (2, False), (4, True), (8, True)])
def test_a_window_over_many_moved_planes_is_moved(n_mirrored, is_misplaced):
    torch.manual_seed(0)
    model, x = nn.Conv2d(3, 8, 3, padding=1), torch.randn(2, 3, 12, 12)
    with torch.no_grad(), SpatialMapTracker(model, x) as tracker:
        maps = model(x)
        mixed = torch.cat([maps[:, n_mirrored:], maps[:, :n_mirrored].flip(3)], 1)
        output = F.conv2d(mixed, torch.randn(4, 8, 3, 3), padding=1)
    assert tracker.is_misplaced(output) is is_misplaced


def test_layers_tell_whether_their_planes_were_moved():
    model, x = net(MOVES["rolled"])
    batch = x[None]
    layers = {layer.name: layer for layer in find_spatial_layers(model, lambda: model(batch), batch)}
    assert [(layers[name].by_construction, layers[name].is_misplaced) for name in ("second", "last")] == [
        (True, False),
        (False, True),
    ]


@pytest.mark.parametrize("train", [False, True])
def test_a_trained_model_with_buffers_needs_no_probe(train, probes):
    """Loading weights writes the buffers in place, and a model in train mode runs on copies of them."""
    first, second = (
        nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3, 1, 1)) for _ in "ab"
    )
    first.load_state_dict(second.state_dict())
    model = nn.Sequential(first, nn.AdaptiveAvgPool2d(1), nn.Flatten()).train(train)
    GradCAM(model, "0.3").attribute(torch.rand(2, 3, 32, 32), 1)
    assert not probes
