"""Nets that people write themselves: signals, volumes, a U-Net, and a transformer of each rank."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.row import CLASSES, Row, region

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class ResidualNet(nn.Module):
    """Stem, two residual blocks of stride 2, mean, head; over 1, 2 or 3 axes."""

    def __init__(self, rank: int, channels: int) -> None:
        super().__init__()
        conv, norm = CONVOLUTIONS[rank - 1], NORMS[rank - 1]
        self.stem = nn.Sequential(conv(channels, 8, 3, 2, 1), norm(8), nn.ReLU(inplace=True))
        self.down = nn.ModuleList(conv(8, 8, 1, 2) for _ in range(2))
        self.blocks = nn.ModuleList(nn.Sequential(conv(8, 8, 3, 2, 1), norm(8)) for _ in range(2))
        self.relu, self.head = nn.ReLU(inplace=True), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block, down in zip(self.blocks, self.down, strict=True):
            y = block(x)
            y += down(x)
            x = self.relu(y)
        return self.head(x.flatten(2).mean(2))


class Transformer(nn.Module):
    """Patches of `patch`, a class token, torch's own encoder; over 1, 2 or 3 axes."""

    def __init__(self, patch: tuple[int, ...], channels: int) -> None:
        super().__init__()
        self.embed = CONVOLUTIONS[len(patch) - 1](channels, 16, patch, patch)
        self.token = nn.Parameter(torch.randn(1, 1, 16))
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        patches = self.embed(x).flatten(2).transpose(1, 2)
        return self.head(self.encoder(torch.cat([self.token.expand(len(x), -1, -1), patches], 1))[:, 0])


class UNet(nn.Module):
    """One level down and up again, a class score at every pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.deep = nn.Conv2d(1, 8, 3, 2, 1), nn.Conv2d(8, 8, 3, 1, 1)
        self.up, self.last = nn.ConvTranspose2d(8, 8, 2, 2), nn.Conv2d(9, 8, 3, 1, 1)
        self.scores = nn.Conv2d(8, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(F.relu(self.deep(F.relu(self.down(x)))))
        return self.scores(F.relu(self.last(torch.cat([x, y], 1))))


ROWS = [
    Row("1-D residual net (ECG)", partial(ResidualNet, 1, 12), (12, 200), "relu", "maps", (25,)),
    Row("1-D transformer", partial(Transformer, (10,), 12), (12, 200), "encoder.layers.1.norm1", "tokens", (20,), 1),
    Row("2-D transformer", partial(Transformer, (8, 8), 1), (1, 40, 64), "encoder.layers.1.norm1", "tokens", (5, 8), 1),
    Row("3-D residual net (volume)", partial(ResidualNet, 3, 1), (1, 16, 32, 40), "relu", "maps", (2, 4, 5)),
    Row(
        "3-D transformer",
        partial(Transformer, (4, 8, 8), 1),
        (1, 12, 32, 40),
        "encoder.layers.1.norm1",
        "tokens",
        (3, 4, 5),
        1,
    ),
    Row("U-Net", UNet, (1, 32, 48), "last", "maps", (32, 48), target=region),
]
