"""Nets that learn a study in seconds, and with it the shortcut that it offers: how far an audit finds it is then known.

From the command line: `--model camscope.phantom.shortcut:shortcut_net --weights net.safetensors`.
"""

from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from camscope.errors import InputError
from camscope.files import write_generated
from camscope.phantom.study import FINDINGS, SIZE, Study, draw_study, draw_volume_study, write_study
from camscope.phantom.train import packed, reproducible
from camscope.wording import plural

__all__ = [
    "FINDINGS",
    "ShortcutNet",
    "Study",
    "as_input",
    "draw_study",
    "draw_volume_study",
    "shortcut_net",
    "shortcut_volume_net",
    "train_shortcut_net",
    "write_net",
    "write_study",
]

MEAN, STD = 0.4, 0.25
BATCH: Final = 32
RATE: Final = 2e-2

PREPROCESSING: Final = {"shortcut_net": ((SIZE, SIZE), (MEAN,), (STD,))}
CATEGORIES: Final = {"shortcut_net": list(FINDINGS), "shortcut_volume_net": list(FINDINGS)}
TARGET_LAYER: Final = {"shortcut_net": "layer3", "shortcut_volume_net": "layer3"}


class ShortcutNet(nn.Module):
    """Grey images (N,1,*S) -> (N,2): three convolutions, each of which halves the resolution, the mean, a linear layer.

    A cell of `layer3` is 8 pixels wide and sees 22: a token of 5 pixels is below its resolution. `axes`: 2 or 3 of space.
    """

    def __init__(self, axes: int = 2) -> None:
        super().__init__()
        self.layer1, self.layer2, self.layer3 = _halving(axes, 1, 8), _halving(axes, 8, 16), _halving(axes, 16, 16)
        self.fc = nn.Linear(16, len(FINDINGS))

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        scores: Tensor = self.fc(self.layer3(self.layer2(self.layer1(x))).flatten(2).mean(2))
        return scores


def _halving(axes: int, before: int, after: int) -> nn.Sequential:
    """An even kernel, so that each cell stays centred on its own pixels."""
    convolution, norm = (nn.Conv2d, nn.BatchNorm2d) if axes == 2 else (nn.Conv3d, nn.BatchNorm3d)
    return nn.Sequential(convolution(before, after, 4, 2, 1, bias=False), norm(after), nn.ReLU())


def shortcut_net() -> ShortcutNet:
    """A net for radiographs (N,1,64,64), whose weights come from a file that `write_net` wrote."""
    return ShortcutNet().eval()


def shortcut_volume_net() -> ShortcutNet:
    """A net for volumes (N,1,32,32,32), whose weights come from a file that `write_net` wrote."""
    return ShortcutNet(3).eval()


def as_input(images: NDArray[Any]) -> Tensor:
    """A study's images (N,H,W) uint8 or volumes (N,D,H,W) float32 as the net takes them: (N,1,*S) float32."""
    one = torch.from_numpy(images).unsqueeze(1).float()
    return (one / 255 - MEAN) / STD if images.ndim == 3 else one


def train_shortcut_net(study: Study, seed: int = 0, epochs: int = 8) -> ShortcutNet:
    """A net in eval mode that has seen every image `epochs` times; the same arguments give the same weights.

    Of 1,000 radiographs, 8 epochs take about 2 s of one core; 400 volumes need 5 and a minute. Threads, determinism and
    the random state of the process are put back.
    """
    if epochs < 1 or len(study) < BATCH:
        raise InputError(
            f"epochs={epochs} of {plural(len(study), 'image')}; expected one at least, and a batch of {BATCH}"
        )
    x, labels = as_input(study.images), torch.from_numpy(study.labels)
    with reproducible(seed, threads=1):
        net = ShortcutNet(x.ndim - 2)
        descent = torch.optim.AdamW(net.parameters(), lr=RATE, weight_decay=0.01)
        batches = [
            rows
            for _ in range(epochs)
            for rows in torch.randperm(len(x), device="cpu").split(BATCH)
            if len(rows) == BATCH
        ]
        schedule = torch.optim.lr_scheduler.OneCycleLR(descent, RATE, total_steps=len(batches) + 1)
        for rows in batches:
            loss = F.cross_entropy(net(x[rows]), labels[rows])
            descent.zero_grad()
            loss.backward()
            descent.step()
            schedule.step()
    return net.eval()


def write_net(net: nn.Module, folder: Path, *, overwrite: bool = True) -> Path:
    """`net.safetensors` in a folder, the same bytes for the same weights; its path. The model: `shortcut_net` here."""
    state = {name: value.detach().contiguous() for name, value in net.state_dict().items()}
    return write_generated(folder / "net.safetensors", packed(state), overwrite=overwrite)
