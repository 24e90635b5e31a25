"""The tests can fail: each planted slip is noticed by a check that the right code passes."""

import pytest
from torch import nn

from camscope.hooks import thread_local_evaluation_mode
from tests.mutants import MUTANTS
from tests.mutants_of_audits import OF_AUDITS
from tests.mutants_of_exports import OF_EXPORTS
from tests.mutants_of_faithfulness import OF_FAITHFULNESS
from tests.mutants_of_layouts import OF_LAYOUTS
from tests.mutants_of_metrics import OF_METRICS
from tests.mutants_of_pixels import OF_PIXELS
from tests.mutants_of_privacy import OF_PRIVACY
from tests.mutants_of_scans import OF_SCANS

pytestmark = pytest.mark.filterwarnings("ignore::camscope.errors.CamscopeWarning")


@pytest.mark.parametrize(
    "mutant",
    [*MUTANTS, *OF_PIXELS, *OF_METRICS, *OF_FAITHFULNESS, *OF_SCANS, *OF_EXPORTS, *OF_PRIVACY, *OF_AUDITS, *OF_LAYOUTS],
    ids=lambda mutant: mutant.slip,
)
def test_a_planted_slip_is_noticed(mutant):
    with pytest.MonkeyPatch.context() as patch:
        mutant.apply(patch)
        with pytest.raises((AssertionError, RuntimeError)):  # a wrong number, or a pass that torch refuses
            mutant.check()
    forget_views()
    mutant.check()  # which the right code passes


def forget_views():
    """Clear the flags of modules that a planted slip left behind: another module may have the same id."""
    vars(thread_local_evaluation_mode)["_flags_by_thread"].clear()
    vars(thread_local_evaluation_mode)["_use_counts_by_thread"].clear()
    if "training" in vars(nn.Module):
        del nn.Module.training
