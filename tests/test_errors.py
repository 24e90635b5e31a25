"""Errors: one tree, each with its message, the fix in Python's words, and the remedy for front ends."""

import copy
import pickle

import pytest

from camscope import errors
from camscope.errors import CamscopeError, InputError, MissingExtraError, OutputError, Remedy

ERROR_CLASSES = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, CamscopeError) and kind is not MissingExtraError
]


@pytest.mark.parametrize("kind", ERROR_CLASSES, ids=lambda kind: kind.__name__)
def test_an_error_carries_its_fix_and_its_remedy(kind: type[CamscopeError]) -> None:
    error = kind("two layouts fit", fix="pass layout=", remedy=Remedy.SET_LAYOUT)
    for copied in (error, copy.copy(error), pickle.loads(pickle.dumps(error))):
        assert type(copied) is kind
        assert str(copied) == "two layouts fit; pass layout="
        assert (copied.problem, copied.fix, copied.remedy) == ("two layouts fit", "pass layout=", Remedy.SET_LAYOUT)


@pytest.mark.parametrize("kind", ERROR_CLASSES, ids=lambda kind: kind.__name__)
def test_an_error_without_a_fix_is_its_message(kind: type[CamscopeError]) -> None:
    error = kind("no layer")
    assert (str(error), error.problem, error.fix, error.remedy) == ("no layer", "no layer", "", None)


def test_a_missing_extra_is_fixed_by_pip() -> None:
    error = pickle.loads(pickle.dumps(MissingExtraError("scipy", "metrics")))
    assert error.problem == "scipy is not installed"
    assert error.fix == 'run: pip install "camscope[metrics]"'
    assert error.remedy is Remedy.INSTALL_EXTRA


def test_the_problem_follows_a_redacted_message() -> None:
    error = InputError("the file of Jane Doe is damaged", fix="pass another", remedy=Remedy.SET_TARGET)
    error.args = ("a file is damaged; pass another",)
    assert error.problem == "a file is damaged"


def test_an_error_is_also_one_of_pythons_own() -> None:
    error = OutputError("out.png exists", remedy=Remedy.ALLOW_OVERWRITE)
    assert isinstance(error, OSError)
    assert error.errno is None
