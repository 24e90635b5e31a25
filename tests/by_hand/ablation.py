"""Ablation methods, worked out by hand."""

from math import exp

NUMBERS = {
    # without channel k the score loses Σ A_k g_k: 1 - 2 + 0 + 0 and -4 + 0 + 1 - 4: relu(-1 A1 - 7 A2)
    "ablationcam": [[0.0, 0.0], [0.0, -1 + 7.0]],
    # the same, since the head is linear
    "liftcam": [[0.0, 0.0], [0.0, -1 + 7.0]],
    # a cell alone has the score A1 g1 + A2 g2 there, its rival the same of OTHER, both the same bias: of nothing, 1/2
    "reciprocam": [[1 / (1 + exp(-lead)) - 1 / 2 for lead in row] for row in [[-3 - 2, -2 + 4], [1 + 2, -4 - 2]]],
}
