"""Times of CAMs as ratios to a forward pass: camscope beside the other toolkits, method by method, class by class."""

import warnings
from collections.abc import Callable

from torch import Tensor

from benchmarks import peers
from benchmarks.cases import Case
from benchmarks.report import OURS, Figure
from benchmarks.timing import Spread, Timed, collector_off, in_turns, ratios, seconds

FORWARD = "forward"
GOAL, GOAL_CLASSES = 1.08, 1.25
CLASSES = 5
WARM_UP = 2


def beside_peers(case: Case, rounds: int) -> list[Figure]:
    """Grad-CAM by every tool, and how far its maps are from camscope's."""
    found: dict[str, float | None] = {}
    notes: dict[str, str] = {}
    ours = _heat(OURS, case)
    for name in peers.TOOLS:
        try:
            found[name] = None if name == OURS else peers.difference(_heat(name, case), ours)
        except Exception as error:
            notes[name] = _reason(error)
    spreads, forward = _timed(case, {name: _with_tool(name, case) for name in found}, rounds)
    work = f"{case.name} `{case.layer}`"
    if blank := peers.empty(ours):
        work += f", {blank} of {len(ours)} maps without evidence"
    return [
        _peer_figure(work, name, spreads[name], forward, found[name])
        if name in found
        else Figure("gradcam", work, name, None, note=notes[name])
        for name in peers.TOOLS
    ]


def _peer_figure(work: str, name: str, spread: Spread, forward: float, difference: float | None) -> Figure:
    goal = GOAL if name == OURS else None
    return Figure.of("gradcam", work, name, spread, forward=forward, difference=difference, goal=goal)


def every_method(case: Case, rounds: int) -> list[Figure]:
    """Each of camscope's CAMs that needs one backward pass."""
    from camscope.explainers import CAM, METHODS

    chosen = {name: cls for name, cls in METHODS.items() if issubclass(cls, CAM) and cls.backwards == "1"}

    def task(cls: type[CAM]) -> Timed:
        cam = cls(case.model, case.layer)
        return lambda: _quietly(lambda: cam.attribute(case.x, case.classes), case.device)

    spreads, forward = _timed(case, {name: task(cls) for name, cls in chosen.items()}, rounds)
    return [
        Figure.of("methods", f"{name}, {case.name}", OURS, spread, forward=forward, goal=GOAL)
        for name, spread in spreads.items()
    ]


def several_classes(case: Case, rounds: int) -> list[Figure]:
    """Five classes of one image: whole explanations, and the raw maps of one class for comparison."""
    from camscope.explainers import GradCAM

    one = Case(case.name, case.model, case.layer, case.x[:1], case.classes[:1], case.prefix)
    questions = [(case.classes[0] + step) % 10 for step in range(CLASSES)]
    goals = {"five explanations": GOAL_CLASSES}
    explainer = GradCAM(one.model, one.layer)
    tasks = {
        "five explanations": lambda: explainer.explain_classes(one.x[0], questions),
        "one explanation": lambda: explainer.explain(one.x[0], questions[0]),
        "one raw map": lambda: explainer.attribute(one.x, questions[0]),
    }

    def task(run: Callable[[], object]) -> Timed:
        return lambda: _quietly(run, one.device)

    spreads, forward = _timed(one, {name: task(run) for name, run in tasks.items()}, rounds)
    return [
        Figure.of("classes", f"{name}, {case.name}", OURS, spread, forward=forward, goal=goals.get(name))
        for name, spread in spreads.items()
    ]


def _timed(case: Case, tasks: dict[str, Timed], rounds: int) -> tuple[dict[str, Spread], float]:
    """Each task's ratio to a forward pass of the case, and the median forward pass in seconds."""
    every: dict[str, Timed] = {FORWARD: lambda: seconds(case.forward, case.device), **tasks}
    for _ in range(WARM_UP):
        for task in every.values():
            task()
    with collector_off():
        times = in_turns(every, rounds)
    spreads = ratios(times, FORWARD)
    del spreads[FORWARD]
    return spreads, Spread.of(times[FORWARD]).median


def _with_tool(name: str, case: Case) -> Timed:
    def task() -> float:
        with peers.open_tool(name, case) as tool:
            return seconds(tool.run, case.device)

    return task


def _heat(name: str, case: Case) -> Tensor:
    with peers.open_tool(name, case) as tool:
        return tool.heat(tool.run()).detach().clone()


def _quietly(run: Callable[[], object], device: str) -> float:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return seconds(run, device)


def _reason(error: Exception) -> str:
    """Why a tool has no figure, in a table's width."""
    if isinstance(error, ModuleNotFoundError):
        return "not installed"
    text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return text if len(text) <= 90 else text[:89] + "…"
