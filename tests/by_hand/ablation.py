"""Ablation methods, worked out by hand."""

NUMBERS = {
    # without channel k the score loses Σ A_k g_k: 1 - 2 + 0 + 0 and -4 + 0 + 1 - 4: relu(-1 A1 - 7 A2)
    "ablationcam": [[0.0, 0.0], [0.0, -1 + 7.0]],
}
