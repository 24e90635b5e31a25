"""robustness: how far maps change where they should not: under shifts, turns and noise, taken otherwise, in company, twice."""

from camscope.audit.samples import measured
from camscope.audit.schema import Measured
from camscope.audit.subject import Subject

METRICS = ("stability", "acquisition-stability", "max-sensitivity", "determinism", "batch-invariance", "random-logit")


def robustness(subject: Subject) -> Measured:
    """Of images with each finding, drawn by the seed."""
    return measured(subject, "robustness", subject.config.sizes.robustness, 2, METRICS)
