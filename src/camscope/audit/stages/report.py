"""report: the page, with what is said of its pictures as JSON beside it."""

import json
from collections.abc import Mapping
from typing import Any

from camscope.audit.answers.answered import Answered
from camscope.audit.report import cases, gallery, page
from camscope.audit.schema import Summary
from camscope.audit.subject import Subject
from camscope.audit.writing import GALLERY, REPORT
from camscope.files import write_bytes


def report(subject: Subject, summary: Summary, provenance: Mapping[str, Any]) -> None:
    """`report.html` and `gallery.json`; pictures are read again from the images."""
    truths = {one.name: subject.truths(one) for one in subject.findings}
    known = cases(Answered.read(subject.folder), truths, subject.ids)
    pictures = gallery(
        subject.maps,
        summary,
        known,
        {one.name: str(one.index) for one in subject.findings},
        count=subject.config.sizes.gallery,
        allow_pixels=subject.config.report.allow_pixels,
    )
    said = json.dumps(pictures.plain, indent=2, sort_keys=True, allow_nan=False, ensure_ascii=False) + "\n"
    write_bytes(subject.folder / GALLERY, said.encode())
    write_bytes(subject.folder / REPORT, page(summary, pictures, provenance).encode())
