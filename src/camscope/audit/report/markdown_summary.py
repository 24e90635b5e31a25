"""The summary of an audit as Markdown."""

import re
from typing import TYPE_CHECKING

from markupsafe import Markup

from camscope.audit.core.summary_schema import Summary
from camscope.audit.report.overview import NOTHING_DECIDED, build_overview, write_plain_text
from camscope.audit.report.verdict_and_auroc_sentences import Concern
from camscope.audit.report.verdict_labels_and_groups import sanitize_text

if TYPE_CHECKING:
    pass


SPECIAL_CHARACTERS = re.compile(r"([\\`*_{}\[\]<>#|~$])")  # of Markdown


def write_markdown_summary(summary: Summary, heading: str = "#") -> str:
    """Write the first screen of the report as Markdown. `heading` is the number signs before its title, such as `##`."""
    overview, lines = build_overview(summary), []
    n_images = summary.check.flow[-1].n_rows if summary.check.flow else None
    images = "unknown" if n_images is None else f"{n_images:,}"
    counted = "" if summary.check.has_patient_column else " (each image counts as one patient)"
    lines += [f"{heading} {_escape_markdown(summary.title) or 'Audit of an image classifier'}", ""]
    if summary.intended_use:
        lines += [_escape_markdown(summary.intended_use), ""]
    lines += [f"- **Model:** {_to_markdown(overview.model)}", f"- **Data:** {_to_markdown(overview.data)}"]
    lines += [f"- **Patients:** {_to_markdown(overview.patients)}{counted}", f"- **Images:** {images}", ""]
    lines += [f"{heading}# How well the model detects the finding", ""]
    lines += [
        f"- {_escape_markdown(answer.finding)}: AUROC **{_to_markdown(answer.estimate)}** ({_to_markdown(answer.sample)}). "
        f"{_to_markdown(answer.sentence)}"
        for answer in overview.answers
    ] or ["Not measured."]
    if overview.answers:
        lines += ["", f"In brackets: the 95 % interval. {_to_markdown(overview.chance)}".rstrip()]
    lines += ["", f"{heading}# Biggest concern", ""]
    lines += [
        _format_concern(overview.concern, bold=True),
        *(_format_concern(item) for item in overview.other_concerns),
    ]
    if overview.more_concerns:
        lines.append(f"- {_to_markdown(overview.more_concerns)}, listed in the report.")
    lines += ["", f"{heading}# What was found", ""]
    lines += [_format_concern(result) for result in overview.results] or [f"- {NOTHING_DECIDED}"]
    notes = [f"{_to_markdown(overview.all_verdicts)}: see the report."] if overview.all_verdicts else []
    notes += map(_to_markdown, overview.notes)
    lines += ["", " ".join(notes)] if notes else []
    lines += ["", f"{heading}# What was not tested or not decided", ""]
    lines += [f"- {_to_markdown(item.question)}: {_to_markdown(item.reason)}." for item in overview.open_questions] or [
        "- No question was open." if summary.verdicts else "- No question was tested."
    ]
    if overview.further_questions:
        lines.append(f"- {_to_markdown(overview.further_questions)}")
    if overview.all_open_questions:
        lines.append(f"- {_to_markdown(overview.all_open_questions)}: see the report.")
    lines += ["", f"{heading}# What may not be concluded", ""]
    lines += [f"- {_to_markdown(clause)}" for clause in overview.unproven]
    lines += [
        "",
        f"Audited with camscope {_escape_markdown(summary.camscope_version)}; config {summary.config_digest[:16]}.",
    ]
    return "\n".join(lines) + "\n"


def _format_concern(concern: Concern, *, bold: bool = False) -> str:
    sentence = _to_markdown(concern.sentence)
    return f"- {f'**{sentence}**' if bold else sentence} {_to_markdown(concern.details)}".rstrip()


def _to_markdown(markup: Markup) -> str:
    return _escape_markdown(write_plain_text(markup))


def _escape_markdown(text: str) -> str:
    """Escape the special characters of user text. Markdown then shows the text unchanged."""
    return SPECIAL_CHARACTERS.sub(r"\\\1", sanitize_text(text))
