"""faithfulness: what the model says of images in which what a map shows is removed, under two fills at least."""

from camscope.audit.samples import measured
from camscope.audit.schema import Measured
from camscope.audit.subject import Subject

METRICS = (
    "lerf-morf-gap", "deletion", "insertion", "aopc", "necessity", "sufficiency", "average-drop", "average-gain", "road",
)  # fmt: skip


def faithfulness(subject: Subject) -> Measured:
    """Of images with each finding, drawn by the seed."""
    return measured(subject, "faithfulness", subject.config.sizes.faithfulness, 1, METRICS)
