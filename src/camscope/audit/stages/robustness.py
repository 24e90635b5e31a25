"""robustness: how far maps change where they should not: under shifts, turns and noise, taken otherwise, in company, twice."""

from collections.abc import Iterator, Mapping, Sequence

from camscope.audit.numbers import number
from camscope.audit.samples import measured
from camscope.audit.schema import Held, Measured, Number
from camscope.audit.subject import Finding, Subject
from camscope.errors import GeometryError
from camscope.metrics.acquisition import ACQUISITION
from camscope.metrics.changes import Change
from camscope.metrics.probe import Probe
from camscope.metrics.robustness import USUAL, held
from camscope.metrics.statistics import estimated

METRICS = ("stability", "acquisition-stability", "max-sensitivity", "determinism", "batch-invariance", "random-logit")
CHANGES: Mapping[str, Sequence[Change]] = {"stability": USUAL, "acquisition-stability": ACQUISITION}
SALT = 2


def robustness(subject: Subject) -> Measured:
    """Of images with each finding, drawn by the seed."""
    made = measured(subject, "robustness", subject.config.sizes.robustness, SALT, METRICS)
    return made.model_copy(update={"held": tuple(_held(subject))}) if made.tested else made


def _held(subject: Subject) -> Iterator[Held]:
    """How often the answer itself held under the changes of each stability."""
    for finding in subject.findings:
        rows = subject.sampled(subject.config.sizes.robustness, SALT, finding, only=True)
        for name, changes in CHANGES.items() if rows else ():
            yield Held(metric=name, finding=finding.name, share=_share(subject, finding, rows, changes))


def _share(subject: Subject, finding: Finding, rows: Sequence[int], changes: Sequence[Change]) -> Number:
    shares: list[float] = []
    for batch in subject.batches(rows):
        x = subject.on_device(batch)
        try:
            shares += held(Probe.of(subject.tools[0], x, [finding.index] * len(x)), changes).tolist()
        except GeometryError as error:  # pictures are compressed, and signals are not
            return number(None, reason=str(error))
    return number(estimated(shares, [subject.patients[row] for row in rows], **subject.how))
