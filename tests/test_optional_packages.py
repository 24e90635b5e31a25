"""Optional packages: they are imported where they are used, and a missing one names its extra."""

import pickle
import re
import statistics

import pytest

from camscope import optional_packages
from camscope.errors import MissingExtraError


def test_a_module_that_is_there_is_returned() -> None:
    assert optional_packages.require("statistics", extra="metrics") is statistics


@pytest.mark.parametrize(
    ("module", "package"),
    [
        ("no_such_package", "no_such_package"),
        ("no_such_package.part", "no_such_package"),
        ("sklearn.no_such_part", "scikit-learn"),
        ("skimage.no_such_part", "scikit-image"),
    ],
)
def test_the_error_names_the_distribution_and_the_extra(module: str, package: str) -> None:
    command = f'{package} is not installed; run: pip install "camscope[audit]"'
    with pytest.raises(MissingExtraError, match=re.escape(command)) as caught:
        optional_packages.require(module, extra="audit")
    assert isinstance(caught.value.__cause__, ImportError)
    assert str(pickle.loads(pickle.dumps(caught.value))) == command
