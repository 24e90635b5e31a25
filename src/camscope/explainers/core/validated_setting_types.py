"""Types of settings that state the valid values, such as `n_samples: PositiveInteger = 25`."""

from dataclasses import Field, fields
from functools import partial
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from camscope.explainers.core.setting_checks import (
    check_number,
    check_one_of,
    check_positive_integer,
    check_positive_number,
)

Number = Annotated[float, check_number]
NonNegativeNumber = Annotated[float, partial(check_number, low=0)]
PositiveNumber = Annotated[float, check_positive_number]
Fraction = Annotated[float, partial(check_number, low=0, high=1)]
PositiveInteger = Annotated[int, check_positive_integer]


def check_settings(method: Any) -> None:
    """Check that each setting of the dataclass `method` has the declared type. Otherwise raise InputError.

    Only settings of the types `Literal`, bool and those of this module are checked, each also as `... | None`.
    """
    for setting in fields(method):
        _check_setting(setting, getattr(method, setting.name))


def _check_setting(setting: Field[Any], value: object) -> None:
    """Check a value by the type annotation of its setting: a bool, a Literal or an annotated type."""
    is_union = get_origin(setting.type) in (Union, UnionType)
    types = get_args(setting.type) if is_union else (setting.type,)
    allowed = [None] * (NoneType in types)
    value_types = [value_type for value_type in types if value_type is not NoneType]
    if value_types == [bool]:
        check_one_of(setting.name, value, *allowed, True, False)
    elif len(value_types) == 1 and get_origin(value_types[0]) is Literal:
        check_one_of(setting.name, value, *allowed, *get_args(value_types[0]))
    elif len(value_types) == 1:
        for check in getattr(value_types[0], "__metadata__", ()):
            check(*allowed, **{setting.name: value})
