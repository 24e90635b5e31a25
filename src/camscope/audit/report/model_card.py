"""The summary of an audit as Markdown, and as a part of a model card in the format of Hugging Face."""

import re
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from camscope.audit.core.summary_schema import Summary
from camscope.audit.report.overview import MAX_OPEN_QUESTIONS_SHOWN, Concern, build_overview, write_plain_text
from camscope.audit.report.verdict_display import sanitize_text
from camscope.errors import InputError
from camscope.optional import require

if TYPE_CHECKING:
    from huggingface_hub import EvalResult

AUDIT_DATASET_TYPE = "camscope-audit"  # tells the results of an audit from others of the same card
START_MARK, END_MARK = "<!-- camscope audit: start -->", "<!-- camscope audit: end -->"
SPECIAL_CHARACTERS = re.compile(r"([\\`*_{}\[\]<>#|~$])")  # of Markdown


def write_markdown_summary(summary: Summary, heading: str = "#") -> str:
    """Return the first screen of the report as Markdown. `heading`: the number signs of the first heading."""
    overview, lines = build_overview(summary), []
    n_images = summary.check.flow[-1].n_rows if summary.check.flow else None
    images = "unknown" if n_images is None else f"{n_images:,}"
    counted = "" if summary.check.has_patient_column else " (each image counts as one)"
    lines += [f"{heading} {_escape(summary.title) or 'Audit of an image classifier'}", ""]
    if summary.intended_use:
        lines += [_escape(summary.intended_use), ""]
    lines += [f"- **Model:** {_to_markdown(overview.model)}", f"- **Data:** {_to_markdown(overview.data)}"]
    lines += [f"- **Patients:** {summary.check.n_patients:,}{counted}", f"- **Images:** {images}", ""]
    lines += [f"{heading}# How well the model detects the finding", ""]
    lines += [
        f"- {_escape(answer.finding)}: AUROC **{_to_markdown(answer.estimate)}** ({_to_markdown(answer.sample)}). "
        f"{_to_markdown(answer.sentence)}"
        for answer in overview.answers
    ] or ["Not measured."]
    if overview.answers:
        lines += ["", "In brackets: the 95 % interval. An AUROC of 0.5 is chance."]
    lines += ["", f"{heading}# Biggest concern", ""]
    lines += [
        _format_concern(overview.concern, bold=True),
        *(_format_concern(item) for item in overview.other_concerns),
    ]
    lines += ["", f"{heading}# What was found", ""]
    lines += [_format_concern(result) for result in overview.results] or ["- Nothing else was decided."]
    lines += ["", f"{heading}# What could not be decided", ""]
    lines += [
        f"- {_to_markdown(item.question)}: {_to_markdown(item.reason)}."
        for item in overview.open_questions[:MAX_OPEN_QUESTIONS_SHOWN]
    ] or ["- No question was open." if summary.verdicts else "- No question was tested."]
    if more := overview.open_questions[MAX_OPEN_QUESTIONS_SHOWN:]:
        lines.append(f"- And {len(more)} more, listed in the report.")
    lines += ["", f"{heading}# What may not be concluded", ""]
    lines += [f"- {_to_markdown(clause)}" for clause in overview.unproven]
    lines += ["", f"Audited with camscope {_escape(summary.camscope_version)}; config {summary.config_digest[:16]}."]
    return "\n".join(lines) + "\n"


def _format_concern(concern: Concern, *, bold: bool = False) -> str:
    sentence = _to_markdown(concern.sentence)
    return f"- {f'**{sentence}**' if bold else sentence} {_to_markdown(concern.details)}".rstrip()


def _to_markdown(markup: Markup) -> str:
    return _escape(write_plain_text(markup))


def _escape(text: str) -> str:
    """Escape user text so that Markdown shows it unchanged."""
    return SPECIAL_CHARACTERS.sub(r"\\\1", sanitize_text(text))


def update_model_card(summary: Summary, content: str = "") -> str:
    """Return a model card with the results of an audit: its metrics in the front matter, its summary in the text.

    A part that an earlier audit wrote is replaced. All other parts of `content` are kept.
    """
    require("huggingface_hub", extra="hub")
    from huggingface_hub import ModelCard

    try:
        card: Any = ModelCard(content or "---\n{}\n---\n", ignore_metadata_errors=False)
    except Exception as error:  # the YAML parser may raise anything
        raise InputError(f"the model card has no valid front matter: {type(error).__name__}") from error
    foreign_results = [item for item in card.data.eval_results or [] if item.dataset_type != AUDIT_DATASET_TYPE]
    results = [*foreign_results, *_build_eval_results(summary)]
    if results:
        card.data.model_name = card.data.model_name or sanitize_text(summary.resolve.model) or "model"
        card.data.eval_results = results
    part = f"{START_MARK}\n{write_markdown_summary(summary, '##')}{END_MARK}"
    before, start, tail = card.text.partition(START_MARK)
    _, end, after = tail.partition(END_MARK)
    if bool(start) != bool(end):
        raise InputError(f"the model card has {START_MARK!r} without {END_MARK!r}; add it, or remove the old part")
    if start:
        card.text = f"{before}{part}{after}"
    else:
        card.text = f"{before.rstrip()}\n\n{part}\n".lstrip()
    return f"{card}\n" if not str(card).endswith("\n") else str(card)


def _build_eval_results(summary: Summary) -> "list[EvalResult]":
    """Return the metrics of each finding with their intervals, as entries of a model card."""
    from huggingface_hub import EvalResult

    results = []
    for performance in summary.predict.performance:
        metrics = {
            "roc_auc": ("AUROC", performance.auroc),
            "average_precision": ("average precision", performance.average_precision),
        }
        for metric_type, (name, estimate) in metrics.items():
            if estimate.value is None:
                continue
            interval = (
                None if estimate.low is None else {"low": estimate.low, "high": estimate.high, "confidence": 0.95}
            )
            results.append(
                EvalResult(
                    task_type="image-classification",
                    dataset_type=AUDIT_DATASET_TYPE,
                    dataset_name=sanitize_text(summary.title) or "audited images",
                    metric_type=metric_type,
                    metric_name=f"{name}, {sanitize_text(performance.finding)}",
                    metric_value=estimate.value,
                    metric_args=interval,
                )
            )
    return results
