"""Conditions of a gate on the comparison of two audits, such as `AUROC fell by > 0.02` or `verdict changed`."""

import re
from collections.abc import Sequence

from camscope.audit.audit_comparison import AuditComparison, PairedDifference
from camscope.errors import InputError
from camscope.evaluation.diff.fail_conditions import ABOVE, NUMBER, ConditionResult, build_unknown_condition_error
from camscope.plurals import plural

AUDIT_CONDITION_EXAMPLES = (
    "verdict changed",
    "AUROC fell by > 0.02",
    "AUROC fell significantly",
    "energy-inside of gradcam fell by > 0.1",
    "map correlation < 0.8",
)
VERDICT_PATTERN = re.compile(rf"verdicts? changed(?: {ABOVE} (?P<limit>\d+))?", re.IGNORECASE)
CORRELATION_PATTERN = re.compile(
    rf"map correlation(?: of (?P<method>\S+))? (?:<|below) (?P<threshold>-?{NUMBER})", re.IGNORECASE
)
CHANGE_PATTERN = re.compile(
    rf"(?P<name>.+?) (?P<direction>fell|rose)(?: by {ABOVE} (?P<threshold>{NUMBER})| (?P<significant>significantly))",
    re.IGNORECASE,
)


def check_audit_conditions(comparison: AuditComparison, texts: Sequence[str]) -> list[ConditionResult]:
    """Check conditions on the comparison of two audits.

    Args:
        comparison: What `compare_audits` returned.
        texts: Conditions: `verdict changed`, `verdict changed > 2`, `QUANTITY fell by > X`, `QUANTITY rose by > X`,
            `QUANTITY fell significantly`, `map correlation < X`. A quantity is a name in `comparison.differences`.

    Returns:
        One result for each condition. For quantities, `ids` are those that fulfill it.

    Raises:
        InputError: A text is not a condition, or the comparison has no such quantity.

    """
    return [_check_condition(comparison, text) for text in texts]


def _check_condition(comparison: AuditComparison, text: str) -> ConditionResult:
    words = " ".join(re.sub(r"([<>])", r" \1 ", text).split())
    if match := VERDICT_PATTERN.fullmatch(words):
        changed = [f"{each.claim}: {each.first} → {each.second}" for each in comparison.verdict_changes]
        n_changed = len(changed)
        reason = f"{plural(n_changed, 'verdict')} changed"
        return ConditionResult(
            text, n_changed > int(match["limit"] or 0), n_changed, n_changed, ids=tuple(changed), reason=reason
        )
    if match := CORRELATION_PATTERN.fullmatch(words):
        return _check_correlations(comparison, text, match["method"], float(match["threshold"]))
    if match := CHANGE_PATTERN.fullmatch(words):
        rows = [row for row in comparison.differences if _names_quantity(row, match["name"])]
        if not rows:
            names = ", ".join(dict.fromkeys(row.name for row in comparison.differences)) or "none"
            raise InputError(f"condition {text!r}: both audits have no {match['name']}; they have {names}")
        sign = -1 if match["direction"].lower() == "fell" else 1
        threshold = float(match["threshold"] or 0)
        met = [row for row in rows if _has_changed(row, sign, threshold, is_significant=bool(match["significant"]))]
        return _build_result(text, [_describe(row) for row in met], [_describe(row) for row in rows])
    raise build_unknown_condition_error(text, AUDIT_CONDITION_EXAMPLES)


def _names_quantity(row: PairedDifference, name: str) -> bool:
    """Return whether a name is that of a quantity, or of a metric for all methods."""
    names = row.name.lower(), row.name.lower().partition(" of ")[0], f"{row.name} of {row.finding}".lower()
    return name.lower() in names


def _has_changed(row: PairedDifference, sign: int, threshold: float, *, is_significant: bool) -> bool:
    value = row.difference.value
    if value is None or (is_significant and not row.is_significant):
        return False
    return sign * value > threshold


def _check_correlations(
    comparison: AuditComparison, text: str, method: str | None, threshold: float
) -> ConditionResult:
    """Check the mean rank correlations between the maps of both models."""
    agreements = [
        (f"{each.method}, {each.finding}: {each.correlation.value:.3f}", each.correlation.value)
        for each in comparison.cross_model_agreements
        if each.correlation.value is not None and method in (None, each.method)
    ]
    met = [name for name, value in agreements if value < threshold]
    return _build_result(text, met, [name for name, _ in agreements])


def _build_result(text: str, met: Sequence[str], compared: Sequence[str]) -> ConditionResult:
    if not compared:
        return ConditionResult(text, None, 0, 0, reason="both audits have no such value")
    reason = "; ".join(compared[:3])
    return ConditionResult(text, bool(met), len(met), len(compared), ids=tuple(met), reason=reason)


def _describe(row: PairedDifference) -> str:
    """Describe a difference with its interval, such as `AUROC, nodule: -0.031 [-0.050, -0.012]`."""
    estimate = row.difference
    interval = "" if estimate.low is None or estimate.high is None else f" [{estimate.low:+.3f}, {estimate.high:+.3f}]"
    value = "not defined" if estimate.value is None else f"{estimate.value:+.3f}{interval}"
    return f"{row.name}, {row.finding}: {value}"
