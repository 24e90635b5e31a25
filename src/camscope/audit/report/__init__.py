"""The report of an audit."""

from camscope.audit.schema import Summary
from camscope.audit.subject import Subject


def write_report(subject: Subject, summary: Summary) -> None:
    """Later."""
