"""Insert the results of an audit into a model card in the format of Hugging Face."""

from typing import TYPE_CHECKING, Any

from camscope.audit.core.summary_schema import Summary
from camscope.audit.report.markdown_summary import write_markdown_summary
from camscope.audit.report.verdict_labels_and_groups import sanitize_text
from camscope.errors import InputError
from camscope.optional_packages import require

if TYPE_CHECKING:
    from huggingface_hub import EvalResult

AUDIT_DATASET_TYPE = "camscope-audit"  # tells the results of an audit from others of the same card
START_MARK, END_MARK = "<!-- camscope audit: start -->", "<!-- camscope audit: end -->"


def update_model_card(summary: Summary, content: str = "") -> str:
    """Add the results of an audit to a model card. Metrics go to the front matter, and the summary goes to the text.

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
    """Return the metrics of each finding, with their intervals, as entries of a model card."""
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
