"""Ablation-CAM: one rest of the model a channel. Beside a plain forward of one image, and beside grad-cam."""

from benchmarks.beside import beside_peers
from benchmarks.report import OURS, Figure
from benchmarks.trained import case_or_random, first

GOAL, TIMES_FASTER, SAME = 16.0, 40.0, 1e-5
PEER = "grad-cam"


def figures(rounds: int, device: str) -> list[Figure]:
    """The cost, the other toolkit's over it, and the difference of the maps."""
    case = first(case_or_random("resnet18", device, 1))
    work = f"{case.name} `{case.layer}`, times a forward pass"
    row = beside_peers(case, "ablationcam", rounds, section="ablation", work=work, goal=GOAL, warm_up=1)
    row = [figure for figure in row if figure.tool in (OURS, PEER)]
    return row + against(*row)


def against(ours: Figure, theirs: Figure) -> list[Figure]:
    """How many times faster than the other toolkit, and how far the maps are apart."""
    if ours.value is None or theirs.value is None or theirs.difference is None:
        return []
    return [
        Figure("ablation", f"times faster than {PEER}", OURS, theirs.value / ours.value, floor=TIMES_FASTER),
        Figure("ablation", f"largest distance from {PEER}'s map", OURS, theirs.difference, goal=SAME),
    ]
