"""The tests can fail: each planted slip is noticed by a check that the right code passes."""

import pytest
from mutants import MUTANTS

pytestmark = pytest.mark.filterwarnings("ignore::camscope.errors.CamscopeWarning")


@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.slip for mutant in MUTANTS])
def test_a_planted_slip_is_noticed(mutant):
    mutant.check()
    with pytest.MonkeyPatch.context() as patch:
        mutant.apply(patch)
        survived = False
        try:
            mutant.check()
            survived = True
        except Exception as error:  # noqa: BLE001 - a slip may end in any error; only passing is wrong
            assert not isinstance(error, NameError | SyntaxError | TypeError), "the slip itself is broken"
    assert not survived, mutant.slip
    mutant.check()
