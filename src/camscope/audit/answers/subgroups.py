"""subgroups: a number held against itself, level by level of the columns that were named."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from camscope.audit.answers.contrasts import Contrast, contrast, contrast_aurocs
from camscope.audit.numbers import number
from camscope.audit.schema import Level
from camscope.audit.subject import Finding, Subject
from camscope.errors import UndefinedError


def levels(
    subject: Subject,
    finding: Finding,
    values: Mapping[int, float],
    margin: float,
    truth: Mapping[int, bool] | None = None,
    region: str = "",
) -> Iterator[Level]:
    """Row -> number: the mean of each level against the others'; with a `truth`, the AUROC of the numbers."""
    rows, about = sorted(values), {"finding": finding.name, "region": region, "margin": margin}
    for column in subject.config.data.subgroups:
        said = subject.levels(column)
        try:
            found = _contrasts(subject, rows, [values[row] for row in rows], [said[row] for row in rows], margin, truth)
        except UndefinedError as error:
            found = ()
            yield _open(column, "", str(error), about)
        for one in found:
            yield _of(column, one, about)


def _contrasts(
    subject: Subject,
    rows: Sequence[int],
    values: Sequence[float],
    said: Sequence[str | None],
    margin: float,
    truth: Mapping[int, bool] | None,
) -> tuple[Contrast, ...]:
    groups = [subject.patients[row] for row in rows]
    if truth is None:
        return contrast(values, said, groups, margin=margin, **subject.how)
    known = np.array([truth[row] for row in rows], np.bool_)
    return contrast_aurocs(known, values, said, groups, margin=margin, **subject.how)


def _of(column: str, one: Contrast, about: Mapping[str, Any]) -> Level:
    level = str(one.level) if one.against is None else f"{one.level} against {one.against}"
    if one.difference is None or one.word is None:
        return _open(column, level, one.reason, about)
    difference = number(one.difference, 0.0, "no difference", one.reason)
    return Level(
        column=column,
        level=level,
        value=number(
            one.own, one.other.mean if one.other else None, "the others" if one.against is None else str(one.against)
        ),
        difference=difference,
        word=one.word,
        **about,
    )


def _open(column: str, level: str, reason: str, about: Mapping[str, Any]) -> Level:
    nothing = number(None, reason=reason)
    return Level(column=column, level=level, value=nothing, difference=nothing, word="not testable", **about)
