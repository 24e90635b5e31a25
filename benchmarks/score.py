"""Score-CAM: what it takes beyond the forward passes that it cannot do without."""

from collections.abc import Callable

import torch

from benchmarks.beside import quiet, timed
from benchmarks.cases import Case
from benchmarks.report import OURS, Figure
from benchmarks.timing import Timed
from benchmarks.trained import case_or_random, first

GOAL, GOAL_BF16 = 1.05, 0.6
BATCH = 32


def figures(rounds: int, device: str) -> list[Figure]:
    """In float32, and in bfloat16, each over the same number of plain passes in float32."""
    from camscope.explainers import ScoreCAM

    case = first(case_or_random("resnet18", device, 1))
    one, half = ScoreCAM(case.model, case.layer), ScoreCAM(case.model, case.layer, precision="bf16")
    passes = rows(case, lambda: one.attribute(case.x, case.classes))
    tasks = {
        "float32": quiet(lambda: one.attribute(case.x, case.classes), device),
        "bfloat16": quiet(lambda: half.attribute(case.x, case.classes), device),
    }
    spreads, forward = timed(case, tasks, rounds, warm_up=1, base=plain(case, passes))
    goals = {"float32": GOAL, "bfloat16": GOAL_BF16}
    return [
        Figure.of(
            "score",
            f"{case.name} `{case.layer}`, {passes} passes in batches of {BATCH}, {name}",
            OURS,
            spread,
            forward=forward,
            goal=goals[name],
        )
        for name, spread in spreads.items()
    ]


def rows(case: Case, run: Callable[[], object]) -> int:
    """How many rows the model sees while something runs."""
    seen: list[int] = []
    handle = case.model.register_forward_pre_hook(lambda module, args: seen.append(len(args[0])))
    try:
        quiet(run, case.device)()
    finally:
        handle.remove()
    return sum(seen)


def plain(case: Case, passes: int) -> Timed:
    """So many forward passes of the image, in batches that lie ready."""
    whole, rest = divmod(passes, BATCH)
    batch = case.x.expand(BATCH, *case.x.shape[1:]).contiguous()

    def run() -> None:
        with torch.inference_mode():
            for _ in range(whole):
                case.model(batch)
            if rest:
                case.model(batch[:rest])

    return quiet(run, case.device)
