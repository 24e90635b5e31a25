"""Methods of many passes: what each takes beyond the bare loop of the same passes, and what captum takes of that."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from benchmarks.beside import Agreement, agreement, quiet, timed
from benchmarks.cases import Case
from benchmarks.report import OURS, Figure
from benchmarks.timing import Clock, Timed
from benchmarks.tool import NotOfferedError
from benchmarks.trained import case_or_random, first

if TYPE_CHECKING:
    from camscope.explainers import Explainer

GOAL, BATCH = 1.05, 16
CAPTUM = "captum"


@dataclass(frozen=True)
class Work:
    """A method with its settings here, and the same by captum where that has it: a function of its module and a case."""

    method: str
    settings: dict[str, Any] = field(default_factory=dict)
    by_captum: Callable[[Any, Case], Callable[[], Tensor]] | None = None
    alike: bool = True  # whether captum computes the same map
    model: str = "resnet18"

    @property
    def title(self) -> str:
        """`occlusion, window_size=32, stride=16`"""
        return ", ".join([self.method, *(f"{name}={value}" for name, value in self.settings.items())])


def _integrated(captum: Any, case: Case) -> Callable[[], Tensor]:
    tool, known = captum.IntegratedGradients(case.model), {"method": "riemann_middle", "internal_batch_size": BATCH}
    return lambda: tool.attribute(case.x, target=case.classes[0], n_steps=50, **known).sum(1)


def _smooth(captum: Any, case: Case) -> Callable[[], Tensor]:
    tool = captum.NoiseTunnel(captum.Saliency(case.model))
    stdevs = 0.15 * float(case.x.max() - case.x.min())
    given = {"nt_samples": 32, "nt_samples_batch_size": BATCH, "stdevs": stdevs, "abs": False}
    return lambda: tool.attribute(case.x, target=case.classes[0], nt_type="smoothgrad", **given).sum(1)


def _occlusion(captum: Any, case: Case) -> Callable[[], Tensor]:
    tool, channels = captum.Occlusion(case.model), case.x.shape[1]
    windows = {"sliding_window_shapes": (channels, 32, 32), "strides": (channels, 16, 16)}
    return lambda: tool.attribute(case.x, target=case.classes[0], perturbations_per_eval=BATCH, **windows)[:, 0]


WORKS = (
    Work("integratedgradients", {"n_steps": 50}, _integrated),
    Work("smoothgrad", {"n_samples": 32}, _smooth, alike=False),
    Work("occlusion", {"window": 32, "stride": 16}, _occlusion),
    Work("occlusion", {"window": 32, "stride": 16}, _occlusion, model="mobilenet_v2"),
    Work("occlusion", {"window": 32, "stride": 16}, _occlusion, model="densenet121"),
    Work("rise", {"n_samples": 256}),
)


def clock(device: str) -> Clock:
    """On the CPU the process's own time, which others on the machine do not change."""
    return time.process_time if device == "cpu" else time.perf_counter


def figures(rounds: int, device: str) -> Iterator[list[Figure]]:
    """A row a method: of one image, in passes of the same size, over the forward and backward passes alone."""
    from camscope.explainers import METHODS

    for work in WORKS:
        case = first(case_or_random(work.model, device, 1))
        kind: Any = METHODS[work.method]
        tool: Explainer = kind(case.model, batch_size=BATCH, **work.settings)
        ours = partial(tool.attribute, case.x, case.classes)
        tasks: dict[str, Callable[[], Tensor]] = {OURS: ours}
        found: dict[str, Agreement] = {}
        try:
            tasks[CAPTUM] = peer(work, case)
            found = {CAPTUM: agreement(tasks[CAPTUM]().detach(), ours())} if work.alike else {}
        except (NotOfferedError, ModuleNotFoundError):
            pass
        alone = bare(case, *passes(case, ours))
        spreads, seconds = timed(
            case, {name: quiet(run, device, clock(device)) for name, run in tasks.items()}, rounds, 1, alone
        )
        yield [
            made.compared(found[name].difference, found[name].correlation) if name in found else made
            for name, spread in spreads.items()
            for made in [
                Figure.of(
                    "loops",
                    f"{work.title}, {case.name}",
                    name,
                    spread,
                    forward=seconds,
                    goal=GOAL if name == OURS else None,
                )
            ]
        ]


def peer(work: Work, case: Case) -> Callable[[], Tensor]:
    """Captum's work of the same kind."""
    import captum.attr

    if work.by_captum is None:
        raise NotOfferedError(work.method)
    return work.by_captum(captum.attr, case)


def passes(case: Case, run: Callable[[], object]) -> tuple[list[int], list[int]]:
    """Rows of each pass while something runs: of those without gradients, and of those with."""
    plain: list[int] = []
    graphs: list[int] = []
    note = case.model.register_forward_pre_hook(
        lambda module, args: (graphs if args[0].requires_grad else plain).append(len(args[0]))
    )
    try:
        quiet(run, case.device)()
    finally:
        note.remove()
    return plain, graphs


def bare(case: Case, plain: list[int], graphs: list[int]) -> Timed:
    """The same passes of inputs that lie ready: forward, and forward and backward to the input."""
    batch = case.x.expand(max(plain + graphs), *case.x.shape[1:]).contiguous()

    def run() -> None:
        with torch.inference_mode():
            for size in plain:
                case.model(batch[:size])
        for size in graphs:
            x = batch[:size].detach().requires_grad_()
            torch.autograd.grad(case.model(x)[:, case.classes[0]].sum(), x)

    return quiet(run, case.device, clock(case.device))
