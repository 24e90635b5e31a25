"""localise: whether the maps lie on the finding, where somebody said where it is; beside maps that know nothing."""

from camscope.audit.subgroups import levels
from camscope.audit.lines import grouped, lines, of_finding, values
from camscope.audit.schema import Level, Measured
from camscope.audit.subject import Subject
from camscope.errors import InputError
from camscope.measure import measure

METRICS = (
    "energy-inside", "enrichment", "pointing-game", "average-precision", "rank-accuracy", "iou-swept", "matched-dice",
    "peak-distance", "effective-area",
)  # fmt: skip


def localise(subject: Subject) -> Measured:
    """Of images with the finding and with its place; into `localise/`."""
    if subject.evidence is None:
        return Measured(tested=False, reason="no masks, boxes or points say where findings are: name evidence in [data]")
    made = measure(
        subject.maps, subject.folder / "localise", subject.evidence, METRICS, told=subject.told
    )
    found = lines(subject, made, only=True)
    if not any(line.value.n for line in found if line.metric == "enrichment" and not line.control):
        raise InputError("no image with the finding has evidence that was shown to the model: are the masks those of the images?")
    images = max(line.value.n for line in found if line.metric == "enrichment")
    return Measured(images=images, lines=tuple(found), levels=tuple(_levels(subject, made)))


def _levels(subject: Subject, made: object) -> list[Level]:
    """Whether the maps lie on the finding for some patients more than for others: the energy inside, by subgroup."""
    from camscope.measure import Measures

    table, found = grouped(subject, Measures(subject.folder / "localise").table()), []
    for finding in subject.findings[:1]:
        own = of_finding(subject, table, finding, True)
        tool = subject.tools[0]
        layer = next((one for one in own.filter(_is(own, tool.title))["layer"].to_pylist()), None)
        found += levels(subject, values(own, "energy-inside", tool.title, layer), subject.config.margins.mass)
    return found


def _is(table: object, method: str) -> object:
    from camscope.batch.manifest import arrow

    return arrow("compute").equal(table["method"], method)  # type: ignore[index]  # Arrow's table
