"""`machine_epsilon="bf16"`: what it takes, and what it does to the maps of real photographs."""

import copy
from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

from benchmarks import cases, trained
from benchmarks.agreement import spearmans
from benchmarks.beside import quiet, timed
from benchmarks.cases import Case
from benchmarks.report import OURS, Figure, rounded_down
from benchmarks.timing import Spread, Timed

GOAL, FLOOR = 0.6, 0.99
PHOTOGRAPHS = 40
BEFORE = "before its ReLU"
MODELS = ("resnet18", "mobilenet_v2", "deit_tiny")


def times(name: str, rounds: int, device: str, batch: int) -> list[Figure]:
    """Grad-CAM of a model in both precisions, and what the model alone takes in bfloat16."""
    from camscope.explainers import GradCAM

    case = cases.build(name, device, batch)
    half, full = GradCAM(case.model, case.layer, precision="bf16"), GradCAM(case.model, case.layer)
    tasks = {
        OURS: quiet(lambda: half.attribute(case.x, case.classes), device),
        "camscope, float32": quiet(lambda: full.attribute(case.x, case.classes), device),
        "a plain pass in bfloat16": _half_forward(case),
    }
    spreads, forward = timed(case, tasks, rounds)
    work = f"{case.name} `{case.layer}`"
    return [
        Figure.of("precision", work, tool, spread, forward=forward, goal=GOAL if tool == OURS else None)
        for tool, spread in spreads.items()
    ]


def maps(device: str, photographs: int = PHOTOGRAPHS) -> Iterator[list[Figure]]:
    """How the trained models' maps rank their cells in bfloat16 and in float32; which photographs fall below the floor."""
    if not trained.here():
        return
    files = trained.names(photographs)
    for name in MODELS:
        parts = [trained.case(name, part, device) for part in _parts(files)]
        after, before = ([one for case in parts for one in _ranks(case, relu)] for relu in (True, False))
        yield [
            _figure(trained.TITLES[name], OURS, dict(zip(files, after, strict=True))),
            _figure(trained.TITLES[name], BEFORE, dict(zip(files, before, strict=True))),
        ]


def _figure(work: str, tool: str, found: dict[str, float | None]) -> Figure:
    """One cell a model: the least, the quartiles, and the photographs below the floor by name."""
    known = {name: value for name, value in found.items() if value is not None}
    spread = Spread.of(list(known.values()))
    below = [f"{_short(name)} {rounded_down(value)}" for name, value in known.items() if value < FLOOR]
    note = f"mean {rounded_down(sum(known.values()) / len(known))} of {len(known)}"
    note += f"; below: {', '.join(below)}" if below else ""
    return Figure("bf16", work, tool, min(known.values()), spread.low, spread.high, floor=FLOOR, note=note)


def _ranks(case: Case, relu: bool) -> list[float | None]:
    """Of each photograph; None where one of its maps does not vary."""
    one, other = heat_in(case, None, relu), heat_in(case, "bf16", relu)
    each = [spearmans(other[i : i + 1], one[i : i + 1]) for i in range(len(one))]
    return [found[0] if found else None for found in each]


def heat_in(case: Case, precision: Literal["bf16"] | None, relu: bool = True) -> Tensor:
    """(N,h,w): Grad-CAM of the top classes in float32, with its ReLU or without."""
    from camscope.explainers import GradCAM

    class Signed(GradCAM):
        relu = False

    kept: list[Tensor] = []
    cam = (GradCAM if relu else Signed)(case.model, case.layer, precision=precision)
    quiet(lambda: kept.append(cam.attribute(case.x, case.classes)), case.device)()
    return kept[0]


def _half_forward(case: Case) -> Timed:
    model = copy.deepcopy(case.model).to(torch.bfloat16).to(memory_format=torch.channels_last)
    x = case.x.to(torch.bfloat16).to(memory_format=torch.channels_last)

    def run() -> None:
        with torch.inference_mode():
            model(x)

    return quiet(run, case.device)


def _parts(files: list[str], size: int = 8) -> list[list[str]]:
    return [files[i : i + size] for i in range(0, len(files), size)]


def _short(file: str) -> str:
    return file.partition("_")[2].rpartition(".")[0] or file
