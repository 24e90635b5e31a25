"""localise: whether the maps lie on the finding, where somebody said where it is; beside maps that know nothing."""

from collections.abc import Iterator

from camscope.audit.answers.subgroups import levels
from camscope.audit.lines import grouped, lines, of_finding, values
from camscope.audit.schema import Level, Measured
from camscope.audit.subject import Subject
from camscope.errors import InputError
from camscope.measure import Measures, measure

METRICS = (
    "energy-inside", "enrichment", "pointing-game", "average-precision", "rank-accuracy", "iou-swept", "peak-distance",
    "effective-area",
)  # fmt: skip


def localise(subject: Subject) -> Measured:
    """Of images with the finding and with its place; into `localise/`."""
    if subject.evidence is None:
        return Measured(
            tested=False, reason="no masks, boxes or points say where findings are: name evidence in [data]"
        )
    made = measure(subject.maps, subject.folder / "localise", subject.evidence, METRICS, told=subject.told)
    found = lines(subject, made, only=True)
    if not any(line.value.n for line in found if line.metric == "enrichment" and not line.control):
        raise InputError(
            "no image with the finding has evidence that was shown to the model: are the masks those of the images?"
        )
    images = max(line.value.n for line in found if line.metric == "enrichment")
    return Measured(images=images, lines=tuple(found), levels=tuple(_levels(subject, made)))


def _levels(subject: Subject, made: Measures) -> Iterator[Level]:
    """Whether the maps lie on the finding for some patients more than for others: the energy inside, by subgroup.

    Of the first method, and the first finding.
    """
    finding, tool = subject.findings[0], subject.tools[0]
    own = of_finding(subject, grouped(subject, made.table()), finding, True)
    layer = next(
        (
            one
            for one, method in zip(own["layer"].to_pylist(), own["method"].to_pylist(), strict=True)
            if method == tool.title
        ),
        None,
    )
    yield from levels(subject, values(own, "energy-inside", tool.title, layer), subject.config.margins.mass)
