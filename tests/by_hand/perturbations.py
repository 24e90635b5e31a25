"""Methods that hide parts of the input, worked out by hand; those that draw at random draw the same numbers here."""

from itertools import product
from math import exp, sqrt

import torch
from torch.quasirandom import SobolEngine

# what each cell adds to the score, both channels together: 1 - 4, -2 + 0, 0 + 1, 0 - 4
CELLS = (-3.0, -2.0, 1.0, -4.0)
# and to the score less the other class's, whose row is OTHER: 2, -4, 0, 2 and 0, 0, -2, 0
AGAINST = (-3.0 - 2, -2.0 + 4, 1.0 + 2, -4.0 - 2)


def shaped(cells):
    return [list(cells[:2]), list(cells[2:])]


def chance(mask):
    return 1 / (1 + exp(-sum(a * m for a, m in zip(AGAINST, mask, strict=True))))


def seen(samples):
    """Three cells of two pixels' width are two; a grid of three is enlarged to three and not shifted: a pixel a cell."""
    drawn = torch.rand(samples, 9 + 2, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    masks = [[row[0] < 0.5, row[1] < 0.5, row[3] < 0.5, row[4] < 0.5] for row in drawn.tolist()]
    level = sum(map(chance, masks)) / samples
    return shaped([sum((chance(m) - level) * (m[i] / 0.5 - 1) for m in masks) / samples for i in range(4)])


def points(samples, dimensions):
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)  # PyTorch rounds the first point to it
    try:
        return SobolEngine(dimensions, scramble=True, seed=0).draw(samples, dtype=torch.float64).tolist()
    finally:
        torch.set_default_dtype(default)


def total_indices():
    """f(A) - f(A with a_i = b_i) = w_i (a_i - b_i), as the score is a sum."""
    rows = points(3, 8)
    scores = [sum(w * a for w, a in zip(CELLS, row, strict=False)) for row in rows]
    mean = sum(scores) / 3
    variance = sum((score - mean) ** 2 for score in scores) / 2
    squares = [sum((CELLS[i] * (row[i] - row[4 + i])) ** 2 for row in rows) for i in range(4)]
    return shaped([one / (2 * 3 * variance) for one in squares])


def dependence():
    """Σ_jk (K_jk - its means) L_jk / 9²"""
    drawn = torch.rand(10, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    masks = (drawn.argsort(0) < 5).tolist()
    scores = [sum(w * m for w, m in zip(CELLS, row, strict=True)) for row in masks]
    mean = sum(scores) / 10
    variance = sum((score - mean) ** 2 for score in scores) / 9
    alike = [[exp(-((a - b) ** 2) / 2 / variance) for a in scores] for b in scores]
    found = []
    for i in range(4):
        same = [[float(a[i] == b[i]) for a in masks] for b in masks]
        rows = [sum(row) / 10 for row in same]
        whole = sum(rows) / 10
        pairs = product(range(10), repeat=2)
        found.append(sum((same[j][k] - rows[j] - rows[k] + whole) * alike[j][k] for j, k in pairs) / 9**2)
    return shaped(found)


def blurred(size=2):
    """The input's blur, 0.1 of each axis wide and mirrored at its ends: each of two cells takes a part t of the other."""
    e = exp(-0.5 / (0.1 * size) ** 2)
    t = 2 * e / (1 + 2 * e)

    def of(cells):
        rows = [((1 - t) * a + t * b, t * a + (1 - t) * b) for a, b in (cells[:2], cells[2:])]
        mixed = [((1 - t) * a + t * b, t * a + (1 - t) * b) for a, b in zip(*rows, strict=True)]
        return mixed[0][0], mixed[1][0], mixed[0][1], mixed[1][1]

    return of((1, 2, 0, 1)), of((2, 0, 1, -1))


def gains(row):
    """What each pixel adds to the score more than its blur does."""
    first, second = blurred()
    given, g = ((1, 2, 0, 1), (2, 0, 1, -1)), (row[:4], row[4:])
    return [sum(g[c][i] * (given[c][i] - blur[i]) for c, blur in enumerate((first, second))) for i in range(4)]


GAINS = gains((1, -1, 2, 0, -2, 1, 1, 4))


def least_deleted():
    """Two steps of Adam, a linear score's probability; the blur of all takes nothing from it, so it starts with no disc."""
    apart = gains((-1, 1, 0, -2, -2, -1, 3, 4))  # G less OTHER
    first, second = blurred()
    row = (-1, 1, 0, -2, -2, -1, 3, 4)
    hidden = sum(a * b for a, b in zip(row, (*first, *second), strict=True))
    m, mean, square = [1.0] * 4, [0.0] * 4, [0.0] * 4
    neighbors = [(0, 1), (2, 3), (0, 2), (1, 3)]
    for step in range(1, 3):
        p = 1 / (1 + exp(-hidden - sum(a * b for a, b in zip(apart, m, strict=True))))
        slopes = [p * (1 - p) * a - 1e-4 for a in apart]
        for i, j in neighbors:
            rough = 1e-2 * 3 * abs(m[i] - m[j]) * (m[i] - m[j])
            slopes[i], slopes[j] = slopes[i] + rough, slopes[j] - rough
        for i, slope in enumerate(slopes):
            mean[i], square[i] = 0.9 * mean[i] + 0.1 * slope, 0.999 * square[i] + 0.001 * slope**2
            size = sqrt(square[i] / (1 - 0.999**step))
            m[i] = min(1.0, max(0.0, m[i] - 0.1 * mean[i] / (1 - 0.9**step) / size))
    return shaped([1 - one for one in m])


def smoothed(coarse):
    """The smooth maximum over 9 x 9 neighbors, those beyond the border as the nearest of the four cells; its slopes."""
    values, slopes = [], []
    for i in range(4):
        pulls = []  # of each neighbor: whose value it has, and its kernel
        for down, right in product(range(-4, 5), repeat=2):
            owner = 2 * min(1, max(0, i // 2 + down)) + min(1, max(0, i % 2 + right))
            pulls.append((owner, exp(-2 * max(0.0, sqrt(down**2 + right**2) / 3 - 0.5) ** 2)))
        total = sum(exp(20 * k * coarse[j]) for j, k in pulls)
        value = sum(exp(20 * k * coarse[j]) / total * k * coarse[j] for j, k in pulls)
        slope = [0.0] * 4
        for j, k in pulls:
            slope[j] += k * exp(20 * k * coarse[j]) / total * (1 + 20 * (k * coarse[j] - value))
        values.append(value)
        slopes.append(slope)
    return values, slopes


def extremal():
    """Two steps of an area of 0.2, which is to be one cell of four as no part of one counts, and one of 0.7, three cells.

    Of two cells the second would be one of two that are equal.
    """
    found = [0.0] * 4
    for ones in (1, 3):
        m, speed = [0.5] * 4, [0.0] * 4
        for step in range(2):
            values, slopes = smoothed(m)
            order = sorted(range(4), key=lambda i: values[i])
            wanted = [0.0] * 4
            for i in order[4 - ones :]:
                wanted[i] = 1.0
            weight = 300 * 16 ** (step / 2) if step else 0
            pulls = [gain - weight * 2 * (v - w) / 4 for gain, v, w in zip(GAINS, values, wanted, strict=True)]
            for j in range(4):
                speed[j] = 0.9 * speed[j] + 0.1 * sum(pulls[i] * slopes[i][j] for i in range(4))
            m = [min(1.0, max(0.0, a + 0.04 * b)) for a, b in zip(m, speed, strict=True)]
        found = [a + b / 2 for a, b in zip(found, smoothed(m)[0], strict=True)]
    return shaped(found)


NUMBERS = {
    # one window, larger than the input: the whole score but the bias
    "occlusion": [[-8.0, -8.0], [-8.0, -8.0]],
    "segmentablation": shaped(CELLS),
    "rise": seen(12),
    "drise": seen(10),
    "sobol": total_indices(),
    "hsic": dependence(),
    "extremalperturbation": extremal(),
    "meaningfulperturbation": least_deleted(),
}
