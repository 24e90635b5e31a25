"""Paths, worked out by hand: the score is linear, so that each value has G times what it is less its baseline's."""

from math import exp, pi

import torch

G = [[[1.0, -1.0], [2.0, 0.0]], [[-2.0, 1.0], [1.0, 4.0]]]
D = exp(-0.5 * (0.4 * pi / 2) ** 2)  # what a Gaussian of 0.4 cells, 0.2 of two, leaves of the only wave there is
LESS_THE_MEAN = [[-3.0, -1.5], [-1.5, -6.0]]  # each channel less its middle, 1 and 0.5, times G


def noise(samples=8):
    """Mean of what seed 0 draws, a tenth of the span of 3: [c][i][j]."""
    drawn = torch.Generator().manual_seed(0)
    assert all(len(torch.randperm(2, generator=drawn)) == 2 for _ in range(samples // 2))
    torch.rand(samples, generator=drawn, dtype=torch.float64)
    each = [torch.Generator().manual_seed(int(seed)) for seed in torch.randint(2**63 - 1, (samples,), generator=drawn)]
    return (0.3 * torch.stack([torch.randn(2, 2, 2, generator=one).double() for one in each]).mean(0)).tolist()


NOISE = noise()
EXPECTED = [[-3.0, -1.75], [-0.25, -5.0]]  # from zero and from the means, half of each

NUMBERS = {
    "integratedgradients": [[-3.0, -2.0], [1.0, -4.0]],
    "guidedig": [[-3.0, -2.0], [1.0, -4.0]],
    # neither channel has a wave along both axes, so every wave is left by the same share
    "blurig": [[(1 - D) * one for one in row] for row in LESS_THE_MEAN],
    "expectedgradients": EXPECTED,
    "gradientshap": [
        [EXPECTED[i][j] + sum(G[c][i][j] * NOISE[c][i][j] for c in (0, 1)) for j in (0, 1)] for i in (0, 1)
    ],
    # from the least and the largest value of each channel, whose middles are 1 and 0.5; all four pixels are one segment
    "xrai": [[-3.0] * 2] * 2,
}
