"""Score-weighted methods, worked out by hand."""

from math import exp, sqrt

import torch

# channels stretched to 0..1: H1 = [1/2, 1; 0, 1/2], H2 = [1, 1/3; 2/3, 0]; the layer is the input, so x ∘ H1 has
# A1 ∘ H1 = [1/2, 2; 0, 1/2] and A2 ∘ H1 = [1, 0; 0, -1/2], and the score without its bias is the sum with G
FIRST = (1 / 2 - 2) + (-2 - 2)
# A1 ∘ H2 = [1, 2/3; 0, 0], A2 ∘ H2 = [2, 0; 2/3, 0]
SECOND = (1 - 2 / 3) + (-4 + 2 / 3)


def weighted(first, second):
    """relu(w1 A1 + w2 A2), w the softmax of two scores."""
    w1 = exp(first) / (exp(first) + exp(second))
    w2 = 1 - w1
    return [[w1 + 2 * w2, 2 * w1], [w2, max(w1 - w2, 0.0)]]


def grouped():
    """Each channel a group: weights 1/2 and 1; what is left above the percentiles 0.55 and 1.1 is one cell each.

    M1 = [0, 1; 0, 0], M2 = [1, 0; 0, 0]: each restores one pixel, in both channels, of the blurred input B.
    """
    e = exp(-0.5 / (2 * 50 / 224) ** 2)
    t = 2 * e / (1 + 2 * e)  # mirrored at both ends, each of two cells takes this part from the other
    s = 1 - t

    def blurred(a, b, c, d):
        return (s * (s * a + t * b) + t * (s * c + t * d), s * (t * a + s * b) + t * (t * c + s * d))

    top_left, top_right = blurred(1, 2, 0, 1), blurred(2, 0, 1, -1)
    bottom_left, bottom_right = blurred(0, 1, 1, 2), blurred(1, -1, 2, 0)  # the same, upside down
    b1, b2 = (*top_left, *bottom_left), (*top_right, *bottom_right)
    g1, g2 = (-1, 1, 0, -2), (-2, -1, 3, 4)  # G less OTHER: with the same bias, only that decides
    before = sum(b * g for b, g in zip(b1, g1, strict=True)) + sum(b * g for b, g in zip(b2, g2, strict=True))

    def chance(score):
        return 1 / (1 + exp(-score))

    first = chance(before + (2 - b1[1]) * g1[1] + (0 - b2[1]) * g2[1]) - chance(before)
    second = chance(before + (1 - b1[0]) * g1[0] + (2 - b2[0]) * g2[0]) - chance(before)
    return [[max(second, 0.0), max(first, 0.0)], [0.0, 0.0]]


def optimized():
    """S = p [1, 2; 0, 1] + (1 - p) [2, 0; 1, 0], and the score of x ∘ mask is Σ mask [-3, -2; 1, -4].

    Where p < 1/2 the least cell is p and the largest 2 - p: the mask is [1, p / (2 - 2p); (1 - 2p) / (2 - 2p), 0], the
    score's slope in p is -6 / (2 - 2p)². At p = 1/2 two cells are least and share: half of -6 from below, of -14 from
    above. u1 and u2 have opposite slopes, so p = 1 / (1 + exp(-2 u1)).
    """
    u = mean = square = 0.0
    for step in range(1, 51):
        p = 1 / (1 + exp(-2 * u))
        slope = (-10.0 if step == 1 else -6 / (2 - 2 * p) ** 2) * p * (1 - p)
        mean, square = 0.9 * mean + 0.1 * slope, 0.999 * square + 0.001 * slope**2
        u += 0.1 * mean / (1 - 0.9**step) / sqrt(square / (1 - 0.999**step))
    p = 1 / (1 + exp(-2 * u))
    return [[2 - 2 * p, p], [1 - 2 * p, 0.0]]


def joined():
    """H1 and H2 are 0.45 apart, and so two masks; s1 - s2 decides, and a cell counts it by H1 / (H1 + H2).

    Where s1 > s2, H1 / (H1 + H2) = [1/3, 3/4; 0, 1] of the difference; otherwise H2's part, [2/3, 1/4; 1, 0]. The score
    is linear: G less OTHER, times x and the noise Z of 0.05 of x's range, which is 3.
    """
    drawn = torch.randn(2, 2, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    noise = [0.05 * 3 * value for value in drawn.flatten().tolist()]
    x, row = (1, 2, 0, 1, 2, 0, 1, -1), (-1, 1, 0, -2, -2, -1, 3, 4)

    def chance(kept, hidden):
        score = sum(g * (a * k + z * h) for g, a, z, k, h in zip(row, x, noise, kept * 2, hidden * 2, strict=True))
        return 1 / (1 + exp(-score))

    def gain(mask):
        hidden = tuple(1 - m for m in mask)
        return chance(mask, hidden) - chance((1, 1, 1, 1), hidden)

    more = gain((1 / 2, 1, 0, 1 / 2)) - gain((1, 1 / 3, 2 / 3, 0))
    return [[more / 3, more * 3 / 4], [0.0, more]] if more > 0 else [[-more * 2 / 3, -more / 4], [-more, 0.0]]


NUMBERS = {
    "scorecam": weighted(FIRST, SECOND),
    # a linear head, and the same noises for both channels: what they add to the scores is the same and cancels
    "sscam": weighted(FIRST, SECOND),
    # a linear head: the mean of 1/10 .. 10/10 of each score
    "iscam": weighted(0.55 * FIRST, 0.55 * SECOND),
    "groupcam": grouped(),
    "opticam": optimized(),
    "vitcx": joined(),
}
