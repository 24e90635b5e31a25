"""Many questions of one image: classes, methods and layers from one pass, beside a call for each."""

from collections.abc import Callable
from functools import partial

from benchmarks.beside import quiet, timed
from benchmarks.cases import Case
from benchmarks.report import OURS, Figure
from benchmarks.timing import Timed
from benchmarks.trained import case_or_random, first

CLASSES = (1, 2, 5, 10)
METHODS = ("gradcam", "hirescam", "gradcam++", "xgradcam", "layercam")
LAYERS = ("layer2", "layer3", "layer4")
SEPARATE, RATIO = "a call each", "camscope / a call each"


def figures(rounds: int, device: str) -> list[Figure]:
    """Of ResNet-18, one image."""
    case = first(case_or_random("resnet18", device, 1))
    return [figure for work, tasks in _tasks(case).items() for figure in _row(case, work, tasks, rounds)]


def _tasks(case: Case) -> dict[str, tuple[Callable[[], object], Callable[[], object]]]:
    """By what is asked: everything from one pass, and a call each."""
    from camscope.explainers import Explainer, GradCAM

    cam, image, top = GradCAM(case.model, case.layer), case.x[0], case.classes[0]
    tasks: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {}
    for count in CLASSES:
        classes = [(top + step) % 1000 for step in range(count)]
        tasks[f"{count} class{'es' if count > 1 else ''}"] = _both(
            partial(cam.explain_classes, image, classes),
            [partial(cam.explain, image, index) for index in classes],
        )
    methods: dict[str, list[Explainer]] = {
        f"{len(METHODS)} methods": [cam.with_method(name) for name in METHODS],
        f"{len(LAYERS)} layers": [GradCAM(case.model, layer) for layer in LAYERS],
    }
    for work, tools in methods.items():
        tasks[work] = _both(
            partial(cam.explain_methods, image, tools, top), [partial(tool.explain, image, top) for tool in tools]
        )
    return tasks


def _both(
    shared: Callable[[], object], calls: list[Callable[[], object]]
) -> tuple[Callable[[], object], Callable[[], object]]:
    return shared, lambda: [call() for call in calls]


def _row(case: Case, work: str, both: tuple[Callable[[], object], Callable[[], object]], rounds: int) -> list[Figure]:
    tasks: dict[str, Timed] = {name: quiet(run, case.device) for name, run in zip((OURS, SEPARATE), both, strict=True)}
    spreads, forward = timed(case, tasks, rounds)
    work = f"{work}, {case.name}"
    found = [Figure.of("sharing", work, name, spread, forward=forward) for name, spread in spreads.items()]
    ratio = spreads[OURS].median / spreads[SEPARATE].median
    return [*found, Figure("sharing", work, RATIO, ratio)]
