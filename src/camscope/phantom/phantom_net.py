"""`PhantomNet`: a small residual network for synthetic radiographs, with bundled weights."""

from importlib.resources import files
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from camscope.phantom.radiograph_drawing import CATEGORIES, DEFAULT_SIDE_PIXELS


class PhantomPreprocessing(NamedTuple):
    """The preprocessing of PhantomNet: convert to gray, resize to size x size pixels, and normalize by mean and std."""

    size: int
    mean: float
    std: float


PREPROCESSING: Final = PhantomPreprocessing(DEFAULT_SIDE_PIXELS, mean=0.55, std=0.2)


class ResidualBlock(nn.Module):
    """Two convolutions (N,C,H,W) -> (N,K,h,w) with a shortcut connection."""

    def __init__(self, in_channels: int, out_channels: int, kernel_sizes: tuple[int, int], stride: int = 1) -> None:
        super().__init__()
        first, second = kernel_sizes
        self.conv1 = nn.Conv2d(in_channels, out_channels, first, stride, (first - 1) // 2, bias=False)
        self.bn1 = nn.BatchNorm2d(out_channels)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(out_channels, out_channels, second, 1, second // 2, bias=False)
        self.bn2 = nn.BatchNorm2d(out_channels)
        pool = nn.AvgPool2d(stride) if stride > 1 else nn.Identity()
        self.downsample = nn.Sequential(
            pool, nn.Conv2d(in_channels, out_channels, 1, bias=False), nn.BatchNorm2d(out_channels)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Run the block on x. Return its output (N,K,h,w)."""
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += self.downsample(x)
        result: Tensor = self.relu(out)
        return result


class PhantomNet(nn.Module):
    """A residual network from gray images (N,1,H,W) to class scores (N,4). Its layers are named as in torchvision's ResNet.

    For images of 128 x 128 pixels, the grids of `layer1` … `layer4` have 32, 32, 16 and 16 cells a side. Two choices make
    maps precise. Late kernels of 1 x 1 limit the receptive field of a cell of `layer4` to 44 pixels. Kernels with
    stride 2 have an even size, which keeps each cell centered on its pixels. An odd size, as in torchvision's ResNet,
    shifts the map by half a cell of the finer grid.

    Args:
        n_classes: Number of class scores.

    >>> PhantomNet()(torch.zeros(2, 1, 128, 128)).shape
    torch.Size([2, 4])

    """

    def __init__(self, n_classes: int = len(CATEGORIES)) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 6, 2, 2, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(2)
        self.layer1 = nn.Sequential(ResidualBlock(16, 16, (3, 1)))
        self.layer2 = nn.Sequential(ResidualBlock(16, 32, (3, 3)))
        self.layer3 = nn.Sequential(ResidualBlock(32, 64, (4, 1), stride=2))
        self.layer4 = nn.Sequential(ResidualBlock(64, 96, (1, 1)))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(96, n_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits (N,classes)."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        scores: Tensor = self.fc(torch.flatten(self.avgpool(x), 1))
        return scores


def to_model_input(images: NDArray[np.uint8]) -> Tensor:
    """Convert uint8 images (N,H,W) to the network's float32 input (N,1,H,W).

    Args:
        images: (N,H,W) uint8 gray images.

    Returns:
        (N,1,H,W) float32, normalized.

    >>> to_model_input(np.zeros((2, 128, 128), np.uint8)).shape
    torch.Size([2, 1, 128, 128])

    """
    gray = torch.from_numpy(images).unsqueeze(1).float() / 255
    return (gray - PREPROCESSING.mean) / PREPROCESSING.std


def load_phantom_model() -> PhantomNet:
    """Load the network with its bundled weights, in eval mode. There is no download.

    Returns:
        The network on the CPU. `load_model("phantom")` adds the preprocessing and the class names.

    >>> load_phantom_model().training
    False

    """
    from safetensors.torch import load

    net, weights = PhantomNet(), load(files("camscope.phantom").joinpath("phantom.safetensors").read_bytes())
    net.load_state_dict(weights, assign=net.fc.weight.is_meta)  # a copy to the meta device does nothing
    return net.eval()
