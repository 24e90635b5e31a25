"""A picture's segments of several scales, and a map spread over those that hold most of it."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from camscope.explainers.segments import of_skimage

SMOOTHED = 0.8  # cells: the Gaussian that a picture is under when it is cut; Felzenszwalb & Huttenlocher's own


@dataclass(frozen=True)
class Regions:
    """Segments that may overlap: entry n says that pixel `pixels[n]` is one of segment `owners[n]`'s; sorted by pixel.

    `first` (P+1,): where each pixel's entries begin. All of it lies on the CPU.
    """

    pixels: Tensor
    owners: Tensor
    first: Tensor
    count: int

    def spread(self, values: Tensor, fewest: int) -> Tensor:
        """(H,W) -> (H,W): the segment with the largest mean over its free pixels takes them and gives each that mean.

        A segment with less than `fewest` free pixels takes none; the pixels that are left share theirs.
        """
        flat = values.flatten().double().cpu()
        sums = flat.new_zeros(self.count).index_add_(0, self.owners, flat[self.pixels])
        sizes = self.owners.bincount(minlength=self.count)
        found, free = torch.zeros_like(flat), torch.ones(len(flat), dtype=torch.bool, device="cpu")
        members = self.pixels[self.owners.argsort(stable=True)].split(sizes.tolist())
        while bool((sizes >= fewest).any()):
            best = int(torch.where(sizes >= fewest, sums / sizes.clamp(min=1), -torch.inf).argmax())
            new = members[best][free[members[best]]]
            found[new], free[new] = flat[new].mean(), False
            entries = self._entries(new)
            sums.index_add_(0, self.owners[entries], -flat[self.pixels[entries]])
            sizes = sizes - self.owners[entries].bincount(minlength=self.count)
        found[free] = flat[free].mean() if bool(free.any()) else 0.0
        return found.view_as(values).to(values)

    def _entries(self, pixels: Tensor) -> Tensor:
        """The entries of these pixels."""
        begins, counts = self.first[pixels], self.first[pixels + 1] - self.first[pixels]
        offsets = torch.arange(int(counts.sum()), device="cpu") - (counts.cumsum(0) - counts).repeat_interleave(counts)
        return begins.repeat_interleave(counts) + offsets


def regions_of(x: Tensor, scales: Sequence[float], min_size: int, margin: int) -> Regions:
    """(C,H,W) -> the segments of all scales, each wider by so many pixels; of a picture stretched to -1..1."""
    wide = x.double().cpu()
    low, high = wide.amin(), wide.amax()
    picture = 2 * (wide - low) / torch.where(high > low, high - low, 1) - 1
    seen = (picture if len(x) <= 3 else picture.mean(0, keepdim=True)).movedim(0, -1).numpy()
    cut = of_skimage("segmentation").felzenszwalb
    owners, pixels, count = [], [], 0
    for scale in scales:
        labels = cut(seen, scale=scale, sigma=SMOOTHED, min_size=min_size)
        for label in np.unique(labels):
            inside = places(labels == label, margin)
            pixels.append(inside)
            owners.append(torch.full_like(inside, count))
            count += 1
    every, whose = torch.cat(pixels), torch.cat(owners)
    order = every.argsort(stable=True)
    first = F.pad(every.bincount(minlength=seen[..., 0].size).cumsum(0), (1, 0))
    return Regions(every[order], whose[order], first, count)


def places(mask: NDArray[np.bool_], margin: int) -> Tensor:
    """(H,W) -> (P,): the numbers of the pixels not farther than so many pixels from the mask; looked for near it only."""
    rows, columns = (np.nonzero(mask.any(axis))[0] for axis in (1, 0))
    top, left = (max(0, int(one[0]) - margin) for one in (rows, columns))
    part = mask[top : int(rows[-1]) + margin + 1, left : int(columns[-1]) + margin + 1]
    down, right = of_skimage("morphology").isotropic_dilation(part, margin).nonzero()
    return torch.from_numpy((down + top) * mask.shape[1] + right + left)
