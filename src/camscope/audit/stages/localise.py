"""localise: whether the maps lie on the finding, where somebody said where it is; beside maps that know nothing."""

from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import fmean

from camscope.audit.answers.subgroups import levels
from camscope.audit.lines import formulas, grouped, lines, of_finding, values
from camscope.audit.numbers import rounded
from camscope.audit.schema import Level, Line, Measured
from camscope.audit.subject import Finding, Subject
from camscope.files import path_in
from camscope.measure import Measures, measure

METRICS = (
    "energy-inside", "enrichment", "pointing-game", "average-precision", "rank-accuracy", "iou-swept", "peak-distance",
    "effective-area",
)  # fmt: skip


def localise(subject: Subject) -> Measured:
    """Of images with a finding and with its place, finding by finding; into `localise/`."""
    if not subject.evidence:
        why = "no masks, boxes or points say where findings are: name evidence in [data]"
        return Measured(tested=False, reason=why)
    known = [one for one in subject.findings if one.name in subject.evidence]
    made = [(finding, _measured(subject, finding)) for finding in known]
    found = [line for finding, values in made for line in _bounded(subject, values, finding)]
    if not any(line.value.n for line in found if line.metric == "enrichment" and not line.control):
        return Measured(tested=False, reason=f"no map has a value: {_why(subject, made)}")
    images = max(line.value.n for line in found if line.metric == "enrichment")
    levels = tuple(_levels(subject, made))
    return Measured(images=images, formulas=formulas(found), lines=tuple(found), levels=levels)


def _why(subject: Subject, made: Sequence[tuple[Finding, Measures]]) -> str:
    """What is said of most of the maps of images with a finding, and of how many."""
    said = Counter[str]()
    for finding, measures in made:
        maps = measures.table("not control and metric = 'enrichment'")
        said.update(one or "" for one in of_finding(subject, maps, finding, True)["reason"].to_pylist())
    return "; ".join(f"{why} ({count} x)" for why, count in said.most_common(3)) or "no image has the finding"


def _measured(subject: Subject, finding: Finding) -> Measures:
    evidence = subject.evidence[finding.name]
    return measure(
        subject.maps,
        path_in(subject.folder, "localise", str(finding.index)),
        evidence,
        METRICS,
        strict=False,
        told=subject.told,
    )


def _bounded(subject: Subject, measures: Measures, finding: Finding) -> Iterator[Line]:
    """The lines; of enrichment with the most that it can be: a uniform map has the area inside, and no map more than all."""
    own = of_finding(subject, measures.table(), finding, True)
    areas = [area for area in values(own, "energy-inside", "uniform", None).values() if area > 0]
    most = rounded(fmean(1 / area for area in areas)) if areas else None
    for line in lines(subject, measures, finding):
        yield line.model_copy(update={"most": most}) if line.metric == "enrichment" else line


def _levels(subject: Subject, made: Sequence[tuple[Finding, Measures]]) -> Iterator[Level]:
    """Whether the maps lie on a finding for some patients more than for others: the energy inside, by subgroup.

    Of the first method: the others look at the same images, and each question more makes all intervals wider.
    """
    tool = subject.tools[0]
    for finding, measures in made:
        own = of_finding(subject, grouped(subject, measures.table()), finding, True)
        inside = values(own, "energy-inside", tool.title, subject.about(tool)["layer"])
        if inside:
            yield from levels(subject, finding, inside, subject.config.margins.mass)
