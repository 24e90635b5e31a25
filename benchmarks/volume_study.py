"""Synthetic volumes with exact masks of their lesions, datasets of them with a shortcut, and models that learn them.

`draw_volume_study` is the 3-D counterpart of `camscope.phantom.shortcut_study.draw_study`.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from camscope.errors import InputError
from camscope.phantom.shortcut_study import ShortcutNet, ShortcutStudy, choose_images_with_marker, draw_patients

VOLUME_CLASSES: Final = ("clear", "lesion")
DEFAULT_SIDE_VOXELS: Final = 32
DEFAULT_VOLUME_STEPS: Final = 120


@dataclass(frozen=True, eq=False)
class VolumePhantom:
    """`values` (D,H,W) float32, about 0 to 1.5; `label`: its place in `VOLUME_CLASSES`; `mask` (D,H,W): the lesion's voxels.

    `marker_mask`, `tissue_mask` (D,H,W): the voxels of the marker in the corner, and of the ellipsoid.
    """

    values: NDArray[np.float32]
    label: int
    mask: NDArray[np.bool_]
    marker_mask: NDArray[np.bool_]
    tissue_mask: NDArray[np.bool_]


def draw_volume(seed: int, lesion: bool, side: int = DEFAULT_SIDE_VOXELS, *, marker: bool = False) -> VolumePhantom:
    """An ellipsoid of tissue with bright vessels, and in it, where there is a `lesion`, a ball as bright as they are.

    `marker`: a brighter cube in the first corner, moved by a voxel or so; the rest is the same without it.
    """
    if side < 16:
        raise InputError(f"side={side}; expected at least 16 voxels")
    random = np.random.default_rng((seed, int(lesion)))
    coordinates = np.indices((side,) * 3) + 0.5
    center, radii = side / 2 + random.uniform(-1, 1, 3), side * random.uniform(0.36, 0.46, 3)
    inside = (((coordinates - center[:, None, None, None]) / radii[:, None, None, None]) ** 2).sum(0) <= 1
    values = 0.45 * inside + _draw_smooth_noise(random, side) * 0.15 + random.normal(0, 0.05, inside.shape)
    for _ in range(3):  # vessels, which both kinds have: what is bright is not all evidence
        start, direction = center + random.uniform(-0.4, 0.4, 3) * radii, random.normal(size=3)
        off = coordinates - start[:, None, None, None]
        along = np.tensordot(direction / np.linalg.norm(direction), off, 1)
        values[(((off**2).sum(0) - along**2) <= 1.2) & inside] = 1.0
    ball = np.zeros(inside.shape, np.bool_)
    if lesion:
        at = center + random.uniform(-0.45, 0.45, 3) * radii
        ball = ((coordinates - at[:, None, None, None]) ** 2).sum(0) <= (side * random.uniform(0.10, 0.13)) ** 2
        values[ball] = 1.0 + random.normal(0, 0.05, int(ball.sum()))
    cube = np.zeros_like(ball)
    if marker:
        cube[tuple(slice(start, start + side // 8) for start in random.integers(1, 4, 3).tolist())] = True
        values[cube] = 1.5
    return VolumePhantom(values.astype(np.float32), int(lesion), ball, cube, inside)


class VolumeNet(nn.Module):
    """(N,1,D,H,W) -> (N,2): a convolution, two residual blocks that halve the resolution, the mean, a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv3d(1, 8, 3, padding=1, bias=False), nn.BatchNorm3d(8), nn.ReLU())
        self.layer1, self.layer2 = _ResidualBlock(8, 16), _ResidualBlock(16, 32)
        self.fc = nn.Linear(32, len(VOLUME_CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        scores: Tensor = self.fc(self.layer2(self.layer1(self.stem(x))).mean((2, 3, 4)))
        return scores


class _ResidualBlock(nn.Module):
    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv3d(in_channels, out_channels, 3, 2, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm3d(out_channels), nn.BatchNorm3d(out_channels)
        self.conv2 = nn.Conv3d(out_channels, out_channels, 3, padding=1, bias=False)
        self.shortcut = nn.Conv3d(in_channels, out_channels, 1, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        inner = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(inner)) + self.shortcut(x))


def train_volume_model(
    seed: int = 0, *, n_steps: int = DEFAULT_VOLUME_STEPS, batch_size: int = 16, marker_share: float | None = None
) -> VolumeNet:
    """A net in eval mode, trained on `n_steps` batches of fresh phantoms; the random state of the process stays as it was.

    `marker_share`: P(marker | lesion) = 1 - P(marker | clear); None: no phantom has a marker.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = VolumeNet().train()
    rate, random = 1e-2, np.random.default_rng(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=n_steps)
    for step in range(n_steps):
        marked = [
            marker_share is not None and random.random() < (marker_share if n % 2 else 1 - marker_share)
            for n in range(batch_size)
        ]
        first = 10**6 * (seed + 1) + step * batch_size
        volumes = [draw_volume(first + n, bool(n % 2), marker=marked[n]) for n in range(batch_size)]
        x = torch.from_numpy(np.stack([volume.values for volume in volumes])[:, None])
        loss = F.cross_entropy(model(x), torch.tensor([volume.label for volume in volumes], device="cpu"))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return model.eval()


def _draw_smooth_noise(random: np.random.Generator, side: int) -> NDArray[np.float64]:
    """Noise of large grains, from -1 to 1."""
    coarse = torch.from_numpy(random.uniform(-1, 1, (1, 1, 5, 5, 5)))
    return np.asarray(F.interpolate(coarse, (side,) * 3, mode="trilinear", align_corners=True)[0, 0].numpy())


def draw_volume_study(n_images: int, seed: int, marker_share: float = 0.5) -> ShortcutStudy:
    """Draw N volumes (32,32,32), half of them with a lesion, with a marker in one corner; see `draw_study`.

    `lung_masks` are the ellipsoid of tissue: where a lesion may be.
    """
    _, people, random = draw_patients(n_images, seed, marker_share)
    labels = people["labels"]
    markers = choose_images_with_marker(labels, marker_share, random, np.ones(n_images, np.bool_))
    volumes = [draw_volume((seed << 32) + i, bool(labels[i]), marker=bool(markers[i])) for i in range(n_images)]
    parts = [(volume.values, volume.mask, volume.marker_mask, volume.tissue_mask) for volume in volumes]
    images, lesion_masks, marker_masks, lung_masks = map(np.stack, zip(*parts, strict=True))
    return ShortcutStudy(images, lesion_masks, marker_masks, lung_masks, **people)


def create_shortcut_volume_model() -> ShortcutNet:
    """Create a model for volumes (N,1,32,32,32), whose weights come from a file that `write_weights` wrote."""
    return ShortcutNet(3).eval()
