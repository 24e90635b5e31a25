"""estimating: how long the stages will take, from a few passes of the model and of each method, before they begin."""

import time
from collections.abc import Callable, Mapping

from camscope.audit.answers.asking import logits_of
from camscope.audit.shortcuts.scenes import masked, wanted
from camscope.audit.subject import Subject
from camscope.batch.reading import Loaded
from camscope.errors import InputError
from camscope.metrics.forgetting import parts

TRIED = 4  # images
REMOVALS = 60  # passes of an image for each map and fill: of removal step by step, and of imputation, which costs more
AGAIN = 35  # maps of an image that robustness makes of each method
CONTROLS = 4  # maps that know nothing
SEEDS = 3  # of randomisation
FOUND = 0.01  # seconds to find a region in an image
JUDGED = 0.004  # seconds to hold a map against a mask
CLUSTERED = 5.0  # seconds for the clusters of a method
Seconds = Mapping[str, float]


def estimated(subject: Subject) -> Seconds:
    """Stage -> seconds, about: of the machine as it is now. Empty where no image can be read."""
    images = [one for one in subject.loaded(subject.rows[:TRIED]) if one.item is not None]
    images = [one for one in images if one.item and images[0].item and one.item.x.shape == images[0].item.x.shape]
    if not images:
        return {}
    batch = subject.worker.collated(images)
    once = _timed(lambda: logits_of(subject, subject.on_device(images))) / len(images)
    maps = _timed(lambda: subject.worker.rows(batch)) / len(images)
    read = _timed(lambda: list(subject.loaded([one.row["row"] for one in images]))) / len(images)
    return {
        name: value
        for name, value in _stages(subject, once, maps, read, images).items()
        if name not in subject.config.skip
    }


def _stages(subject: Subject, once: float, maps: float, read: float, images: list[Loaded]) -> dict[str, float]:
    """`once`, `maps`, `read`: seconds an image for an answer, for all its maps, and to read it."""
    config, rows = subject.config, len(subject.rows)
    sizes, findings, tools = config.sizes, len(subject.findings), len(subject.tools)
    regions = len(masked(subject)) + len(wanted(subject))
    tried, seen = min(rows, sizes.interventions), min(rows, sizes.regions)
    losing = len(parts(subject.model, subject.on_device(images[:1])))
    return {
        "check": len(subject.whole) * read,
        "predict": rows * (read + once),
        "explain": rows * (read + maps),
        "localise": rows * (read + (tools + CONTROLS) * JUDGED) if subject.evidence else 0.0,
        "faithfulness": min(rows, sizes.faithfulness) * (tools + CONTROLS) * len(config.fills) * REMOVALS * once,
        "sanity": min(rows, sizes.sanity) * SEEDS * losing * maps / findings,
        "robustness": min(rows, sizes.robustness) * AGAIN * maps,
        "shortcut": seen * (read + regions * FOUND)
        + tried * findings * regions * (2 * len(config.fills) + 2) * once
        + tools * CLUSTERED,
    }


def _timed(work: Callable[[], object]) -> float:
    """Seconds of the second time: the first one warms up."""
    try:
        work()
        begun = time.perf_counter()
        work()
    except InputError:
        return 0.0
    return time.perf_counter() - begun
