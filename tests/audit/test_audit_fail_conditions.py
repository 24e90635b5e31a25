"""Conditions on the comparison of two audits: which quantities they name, and in which direction they changed."""

import pytest

from camscope.audit.audit_comparison import AuditComparison, CrossModelAgreement, PairedDifference, VerdictChange
from camscope.audit.audit_fail_conditions import check_audit_conditions
from camscope.audit.core.stage_result_schema import EstimateSummary
from camscope.errors import InputError
from camscope.evaluation.diff.fail_conditions import choose_exit_code


def estimate(value, **fields):
    return EstimateSummary(value=value, n_values=40, n_groups=40, **fields)


def difference(name, finding, before, after, p_value=None):
    change = estimate(after - before, low=after - before - 0.01, high=after - before + 0.01, p_value=p_value)
    return PairedDifference(name, finding, estimate(before), estimate(after), change)


COMPARISON = AuditComparison(
    ("1", "2"),
    (
        difference("AUROC", "nodule", 0.95, 0.90, p_value=0.001),
        difference("AUROC", "effusion", 0.90, 0.91, p_value=0.3),
        difference("energy-inside of gradcam", "nodule", 0.5, 0.35),
    ),
    (VerdictChange("uses the lungs", "supported", "not decided"),),
    cross_model_agreements=(CrossModelAgreement("gradcam", "nodule", estimate(0.7)),),
)


@pytest.mark.parametrize(
    ("text", "holds", "n_met"),
    [
        ("verdict changed", True, 1),
        ("verdicts changed > 1", False, 1),
        ("AUROC fell by > 0.02", True, 1),
        ("auroc of nodule fell by > 0.02", True, 1),
        ("AUROC of effusion fell by > 0.02", False, 0),
        ("AUROC fell by > 0.06", False, 0),
        ("AUROC rose by > 0.005", True, 1),
        ("AUROC fell significantly", True, 1),
        ("AUROC rose significantly", False, 0),
        ("energy-inside fell by > 0.1", True, 1),
        ("energy-inside of gradcam fell by > 0.2", False, 0),
        ("map correlation < 0.8", True, 1),
        ("map correlation of gradcam < 0.6", False, 0),
        ("map correlation of layercam < 0.6", None, 0),
    ],
)
def test_a_condition_is_checked(text, holds, n_met):
    (result,) = check_audit_conditions(COMPARISON, [text])
    assert (result.holds, result.n_met) == (holds, n_met)
    assert choose_exit_code([result]) == {True: 1, False: 0, None: 2}[holds]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("verdict chnged", "nearest: 'verdict changed'"),
        ("AUPRC fell by > 0.1", "have no AUPRC; they have AUROC, energy-inside of gradcam"),
    ],
)
def test_an_unknown_condition_or_quantity_is_one_error(text, expected):
    with pytest.raises(InputError, match=expected):
        check_audit_conditions(COMPARISON, [text])


def test_a_condition_that_holds_counts_more_than_one_that_cannot_be_checked():
    texts = ["map correlation of layercam < 0.6", "verdict changed"]
    assert choose_exit_code(check_audit_conditions(COMPARISON, texts)) == 1
