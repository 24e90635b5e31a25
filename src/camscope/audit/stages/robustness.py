"""robustness: how far maps change where they should not: under shifts, turns and noise, taken otherwise, in company, twice."""

from collections.abc import Iterator, Mapping, Sequence

from camscope.audit.numbers import number
from camscope.audit.samples import measured
from camscope.audit.schema import Held, Measured
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
        patients = [subject.patients[row] for row in rows]
        for name, (shares, why) in _shares(subject, finding, rows).items() if rows else ():
            share = (
                number(None, reason=why)
                if why
                else number(estimated(shares, patients, bounds=(0.0, 1.0), **subject.how))
            )
            yield Held(metric=name, finding=finding.name, share=share)


def _shares(subject: Subject, finding: Finding, rows: Sequence[int]) -> dict[str, tuple[list[float], str]]:
    """Stability -> of each image the share of its changes under which the answer held, or why there is none."""
    found: dict[str, tuple[list[float], str]] = {name: ([], "") for name in CHANGES}
    for batch in subject.batches(rows):
        x = subject.on_device(batch)
        probe = Probe.of(subject.tools[0], x, [finding.index] * len(x))
        for name, changes in CHANGES.items():
            try:
                found[name][0].extend(held(probe, changes).tolist())
            except GeometryError as error:  # pictures are compressed, and signals are not
                found[name] = [], str(error)
    return found
