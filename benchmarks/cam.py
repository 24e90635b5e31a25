"""Grad-CAM beside the other toolkits on each model, camscope's one-backward CAMs, and five classes of one image."""

from benchmarks import beside
from benchmarks.beside import quiet, timed
from benchmarks.cases import Case
from benchmarks.report import OURS, Figure
from benchmarks.timing import Timed
from benchmarks.trained import first

GOAL, GOAL_CLASSES = 1.08, 1.25
CLASSES = 5


def beside_peers(case: Case, rounds: int) -> list[Figure]:
    """Grad-CAM by every tool, and how far its maps are from camscope's."""
    work = f"{case.name} `{case.layer}`"
    return beside.beside_peers(case, "gradcam", rounds, section="gradcam", work=work, goal=GOAL)


def every_method(case: Case, rounds: int) -> list[Figure]:
    """Each of camscope's CAMs that needs one backward pass."""
    from camscope.explainers import METHODS, BaseWeightedChannels

    weighted = {name: cls for name, cls in METHODS.items() if issubclass(cls, BaseWeightedChannels)}
    chosen = {name: cls for name, cls in weighted.items() if cls.needs_gradient and cls.backward_passes == "1"}

    def task(cls: type[BaseWeightedChannels]) -> Timed:
        cam = cls(case.model, case.layer)
        return quiet(lambda: cam.attribute(case.x, case.classes), case.device)

    spreads, forward = timed(case, {name: task(cls) for name, cls in chosen.items()}, rounds)
    return [
        Figure.of("methods", f"{name}, {case.name}", OURS, spread, forward=forward, goal=GOAL)
        for name, spread in spreads.items()
    ]


def several_classes(case: Case, rounds: int) -> list[Figure]:
    """Five classes of one image: whole explanations, and the raw maps of one class for comparison."""
    from camscope.explainers import GradCAM

    one = first(case)
    questions = [(case.classes[0] + step) % 10 for step in range(CLASSES)]
    goals = {"five explanations": GOAL_CLASSES}
    explainer = GradCAM(one.model, one.layer)
    tasks = {
        "five explanations": quiet(lambda: explainer.explain_classes(one.x[0], questions), one.device),
        "one explanation": quiet(lambda: explainer.explain(one.x[0], questions[0]), one.device),
        "one raw map": quiet(lambda: explainer.attribute(one.x, questions[0]), one.device),
    }
    spreads, forward = timed(one, tasks, rounds)
    return [
        Figure.of("classes", f"{name}, {case.name}", OURS, spread, forward=forward, goal=goals.get(name))
        for name, spread in spreads.items()
    ]
