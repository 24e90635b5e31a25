"""Little networks with known answers, one for each way in which a layer can hold its map."""

import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

DEVICE = torch.device(
    os.environ.get("CAMSCOPE_DEVICE", "cpu")
)  # of the networks and inputs below, and so of the axioms


class Pooled(nn.Module):
    """features -> mean over space -> linear head: d score / d A_k = w_k / cells, everywhere."""

    def __init__(self, features: nn.Module, channels: int, classes: int = 3) -> None:
        super().__init__()
        self.features, self.head = features, nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x).flatten(2).mean(2))


class Flat(nn.Module):
    """features -> flatten -> linear head: d score / d A is the head's row."""

    def __init__(self, features: nn.Module, numbers: int, classes: int = 3) -> None:
        super().__init__()
        self.features, self.head = features, nn.Linear(numbers, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x).flatten(1))


def conv(rank: int = 2, channels: int = 3) -> nn.Sequential:
    """Two convolutions of stride 2 over rank spatial axes, 6 channels out."""
    kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[rank - 1]
    return nn.Sequential(
        kind(channels, 4, 3, 2, 1), nn.ReLU(inplace=True), kind(4, 6, 3, 2, 1), nn.Tanh(), kind(6, 6, 1), nn.ReLU()
    )


class Residual(nn.Module):
    """Batch norm, in-place ReLU straight after the tapped layer, residual +=, dropout: everything that rewrites."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 6, 3, 2, 1), nn.BatchNorm2d(6)
        self.block, self.relu, self.dropout = nn.Conv2d(6, 6, 3, 1, 1), nn.ReLU(inplace=True), nn.Dropout(0.5)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.norm(self.stem(x)))
        y = self.block(x)
        y += x
        y = self.dropout(self.relu(y))
        return self.head(y.mean((2, 3)))


class Tokens(nn.Module):
    """A patch embedding, `prefix` extra tokens in front, one attention, and a head that reads the mean token."""

    def __init__(self, prefix: int = 1, patch: int = 4, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, width, patch, patch)
        self.prefix = nn.Parameter(torch.randn(1, prefix, width))
        self.block = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU())
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x).flatten(2).transpose(1, 2)
        x = self.block(torch.cat([self.prefix.expand(len(x), -1, -1), x], 1))
        return self.head((x + self.attention(x, x, x, need_weights=False)[0]).mean(1))


class ChannelsLast(nn.Module):
    """Features as (N,h,w,K), as Swin and MLP-Mixers hold them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.mix = nn.Conv2d(3, 8, 4, 4), nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 7), nn.GELU())
        self.head = nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.mix(self.stem(x).permute(0, 2, 3, 1)).mean((1, 2)))


@dataclass(frozen=True)
class Case:
    """A network, the layer to explain, one input's shape, and the map's."""

    build: Callable[[], nn.Module]
    layer: str
    input_shape: tuple[int, ...]
    grid: tuple[int, ...]

    def make(
        self, samples: int = 2, dtype: torch.dtype = torch.float32, device: torch.device = DEVICE
    ) -> tuple[nn.Module, Tensor]:
        """The same network and the same inputs, every time; they are drawn on the CPU."""
        state = torch.random.get_rng_state()
        torch.manual_seed(7)  # with which nearly every map has positive evidence
        model, x = self.build().to(dtype).eval(), torch.randn(samples, *self.input_shape).to(dtype)
        torch.random.set_rng_state(state)
        return model.to(device), x.to(device)


CASES = {
    "pooled": Case(lambda: Pooled(conv(), 6), "features", (3, 16, 12), (4, 3)),
    "flat": Case(lambda: Flat(conv(), 6 * 12), "features.4", (3, 16, 12), (4, 3)),
    "residual": Case(Residual, "block", (3, 12, 12), (6, 6)),
    "tokens": Case(Tokens, "block", (3, 24, 16), (6, 4)),
    "channels last": Case(ChannelsLast, "mix", (3, 24, 16), (6, 4)),
    "signal": Case(lambda: Pooled(conv(1, 2), 6), "features", (2, 20), (5,)),
    "volume": Case(lambda: Pooled(conv(3, 1), 6), "features", (1, 8, 12, 16), (2, 3, 4)),
}


class Plain(nn.Module):
    """Three convolutions and a head, in pieces that a test can run in its own way; every layer has a name of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 6, 3, padding=1)
        self.last, self.head = nn.Conv2d(6, 5, 3, padding=1), nn.Linear(5, 3)

    def before(self, x: Tensor) -> Tensor:
        return self.middle(torch.tanh(self.first(x)))

    def after(self, y: Tensor) -> Tensor:
        return self.head(torch.sigmoid(self.last(F.elu(y))).mean((2, 3)))

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.before(x))


def plain(kind: type[nn.Module] = Plain, *, samples: int = 2) -> tuple[nn.Module, Tensor]:
    """A float64 network of `kind` with always the same weights, and inputs (N,3,8,8)."""
    torch.manual_seed(5)
    weights = Plain().state_dict()
    model = kind()
    model.load_state_dict(weights, strict=False)
    return model.double().eval().to(DEVICE), torch.randn(samples, 3, 8, 8, dtype=torch.float64).to(DEVICE)


def truth(model: Plain, x: Tensor, target: int) -> Tensor:
    """The HiRes map at `foreground`, straight from its definition: activation times gradient, summed over channels."""
    A = model.before(x).detach().requires_grad_()
    (gradient,) = torch.autograd.grad(model.after(A)[:, target].sum(), A)
    return (A * gradient).sum(1).detach()


def linear() -> tuple[Flat, Tensor]:
    """The flat linear head of `by_hand`, straight on the input: the features hand it on. Two classes, float64."""
    model = Flat(nn.MaxPool2d(1), 8, classes=2).double()
    return model.eval().to(DEVICE), torch.ones(1, 2, 2, 2, dtype=torch.float64).to(DEVICE)
