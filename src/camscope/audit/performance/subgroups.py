"""Subgroups: whether a number differs between sites, sexes or scanners.

- Contrasts: does a number differ between sites, sexes or scanners, does it not, or is that open?.
- subgroups: a number held against itself, level by level of the columns that were named.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import copysign, sqrt
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from camscope.audit.core.context import Finding, Subject
from camscope.audit.core.schema import Level
from camscope.audit.core.subgroup_levels import FOR_A_WORD, levels_of
from camscope.audit.core.summary_values import number
from camscope.audit.performance.auc import Ranking, area_estimate, area_interval, kept, ranked, redrawn, under_roc
from camscope.errors import InputError, UndefinedError
from camscope.explainers.core.evaluation_context import expect_count
from camscope.metrics.base import Floats, Mask
from camscope.metrics.cluster_variance import degrees_of_freedom, deletion_effects
from camscope.metrics.statistics import PRECISION, REPLICATES, STUDENT, Estimate, estimated, numbered, p_of, t_quantile
from camscope.plurals import plural

Word = Literal["different", "equivalent", "undecided"]
Ends = Callable[[float], tuple[float, float]]  # at a level
LEVEL = 0.05
SQUARE_AND_ADD = "square-and-add"  # the method of an interval: that of `_moved`


@dataclass(frozen=True)
class Contrast:
    """A level of a column against another, or against all others (`against` is None).

    `own`, `other`: the number of either. `difference`: own - other; its interval and `p` are corrected for how many levels are
    compared (Bonferroni), and are of one procedure. `word`: "equivalent" where the interval lies within ± the margin; else
    "different" where it leaves zero out; else "undecided". A `reason` says why nothing, or less, could be said; where a side
    is too small all the others are None.
    """

    level: Hashable
    against: Hashable
    own: Estimate | None = None
    other: Estimate | None = None
    difference: Estimate | None = None
    word: Word | None = None
    reason: str = ""


@dataclass(frozen=True)
class Side:
    """The number of one side; of its own `patients`, by number, `witnesses` vouch for it.

    Of a mean, `moves`: by how much each group, by number, moves it (see `deletion_effects`), and `freedom`: degrees of freedom
    of what they say. Of an AUROC, `drawn`: the number in draws of the patients of both sides, and `at`: its interval at a level.
    """

    estimate: Estimate
    patients: npt.NDArray[np.int64]
    witnesses: int
    constant: bool = False
    moves: Floats = field(default_factory=lambda: np.zeros(0))
    freedom: float = np.inf
    drawn: Floats = field(default_factory=lambda: np.zeros(0))
    at: Ends = lambda level: (np.nan, np.nan)


Interval = tuple[Callable[[Side, Side, float], tuple[float, float]], str]  # the ends of a difference, and the method


def contrast(
    values: npt.ArrayLike,
    subgroup: Sequence[Hashable],
    groups: Sequence[Hashable] | None = None,
    *,
    margin: float,
    least: int = FOR_A_WORD,
    replicates: int = REPLICATES,
    seed: int = 0,
) -> tuple[Contrast, ...]:
    """(N,) a number of each image, (N,) its level -> the mean of each level against that of all others; two: one contrast.

    `margin`: the difference that would not matter, declared before looking. `groups`: patients, drawn whole from all rows,
    so that one may have images in several levels. A side needs `least` patients. Rows without a value or level are left out.
    """
    given = np.asarray(values, np.float64)
    if given.ndim != 1 or np.isinf(given).any():
        raise InputError(f"values {given.shape}: expected (N,) numbers, NaN for none")
    expect_count(least=least, replicates=replicates)
    group, known = numbered(groups, len(given)), ~np.isnan(given)

    def side(rows: Mask) -> Side:
        return _mean(given, rows & known, group, least, replicates, seed)

    return _contrasts(side, (_student, STUDENT), _levels(subgroup, known), margin)


def contrast_aurocs(
    truth: npt.ArrayLike,
    answer: npt.ArrayLike,
    subgroup: Sequence[Hashable],
    groups: Sequence[Hashable] | None = None,
    *,
    margin: float,
    least: int = FOR_A_WORD,
    replicates: int = REPLICATES,
    seed: int = 0,
) -> tuple[Contrast, ...]:
    """As `contrast`, of each level's AUROC. Of either class a side needs half of `least` patients, too."""
    whole = ranked(truth, answer, groups)
    expect_count(least=least, replicates=replicates)
    known = np.isin(np.arange(len(np.asarray(truth))), whole.order)

    def side(rows: Mask) -> Side:
        return _area(whole.only(rows), least, replicates, seed)

    return _contrasts(side, (_moved, SQUARE_AND_ADD), _levels(subgroup, known), margin)


def _levels(subgroup: Sequence[Hashable], known: Mask) -> dict[Hashable, Mask]:
    if len(subgroup) != len(known):
        raise InputError(f"{plural(len(known), 'row')} and {plural(len(subgroup), 'level')}; expected (N,) of both")
    made = {level: rows & known for level, rows in levels_of(subgroup).items()}
    if len(made) < 2:
        raise UndefinedError(f"all rows are of one level, {next(iter(made))!r}" if made else "no row has a level")
    return made


def _contrasts(
    side: Callable[[Mask], Side],
    interval: Interval,
    levels: Mapping[Hashable, Mask],
    margin: float,
) -> tuple[Contrast, ...]:
    if not 0 < margin < np.inf:
        raise InputError(f"margin={margin}: expected the difference that would not matter, above 0")
    names = list(levels)
    pairs = [(names[0], names[1])] if len(names) == 2 else [(name, None) for name in names]
    every = np.logical_or.reduce(list(levels.values()))
    sides = [_both(side, (name, levels[name]), (against, every & ~levels[name])) for name, against in pairs]
    count = sum(not isinstance(one, str) for one in sides)
    return tuple(
        Contrast(*pair, reason=both) if isinstance(both, str) else _contrast(*pair, *both, interval, count, margin)
        for pair, both in zip(pairs, sides, strict=True)
    )


def _both(side: Callable[[Mask], Side], *sides: tuple[Hashable, Mask]) -> tuple[Side, Side] | str:
    """The two sides, or why one of them has no number."""
    made = []
    for name, rows in sides:
        try:
            made.append(side(rows))
        except UndefinedError as error:
            return f"{'all others' if name is None else name}: {error}"
    return made[0], made[1]


def _contrast(
    level: Hashable,
    against: Hashable,
    own: Side,
    other: Side,
    interval: Interval,
    count: int,
    margin: float,
) -> Contrast:
    """`count`: how many contrasts there are, for which each is corrected."""
    one, two, patients = own.estimate, other.estimate, len(np.union1d(own.patients, other.patients))
    ends, method = interval
    flat = [str(words) for words, made in ((level, own), (against or "all others", other)) if made.constant]
    reason = f"all values of {' and of '.join(flat)} are equal" if flat else ""
    reason = reason or _dominance(level, own) or _dominance(against or "all others", other)
    low, high, p = np.nan, np.nan, None
    if len(flat) < 2 and not (one.is_dominated or two.is_dominated):
        low, high = ends(own, other, 1 - LEVEL / count)
        p = min(1.0, count * p_of(lambda certainty: ends(own, other, certainty)))
    difference = Estimate(one.mean - two.mean, low, high, one.n + two.n, patients, p=p, method=method)
    return Contrast(level, against, one, two, difference, _word(low, high, margin), reason)


def _dominance(level: Hashable, side: Side) -> str:
    why = side.estimate.dominance("patient")
    return f"{level}: {why}" if why else ""


def _word(low: float, high: float, margin: float) -> Word:
    if -margin < low and high < margin:
        return "equivalent"
    return "different" if low > 0 or high < 0 else "undecided"


def _error(own: Side, other: Side) -> float:
    """Of the difference of two means, by the jackknife: of patients in both, both move at once.

    A side whose values are all equal is taken to vary as the other does: it would not be seen.
    """
    one, two = own.moves, other.moves
    if own.constant:
        return sqrt(float((two**2).sum()) * (1 + other.witnesses / own.witnesses))
    if other.constant:
        return sqrt(float((one**2).sum()) * (1 + own.witnesses / other.witnesses))
    return sqrt(float(((one - two) ** 2).sum()))


def _mean(given: Floats, rows: Mask, group: npt.NDArray[np.int64], least: int, replicates: int, seed: int) -> Side:
    count, own = int(group.max()) + 1, np.unique(group[rows])
    patients = len(own)
    _expect_patients(patients, least)
    sums = np.bincount(group[rows], weights=given[rows], minlength=count)
    sizes = np.bincount(group[rows], minlength=count)
    constant = float(np.ptp(given[rows])) <= PRECISION * float(np.abs(given[rows]).max())
    moves = np.zeros(count)
    if patients > 1:
        moves[own] = deletion_effects(np.asarray(sums[own], np.float64), sizes[own])
    made = estimated(given[rows], group[rows].tolist(), replicates=replicates, seed=seed)
    freedom = degrees_of_freedom(sizes[own]) if patients > 1 else 1.0
    return Side(made, own, patients, constant, moves, freedom)


def _area(ranking: Ranking, least: int, replicates: int, seed: int) -> Side:
    _expect_patients(ranking.patients, least)
    witnesses = min(ranking.witnesses)
    if witnesses < (least + 1) // 2:
        raise UndefinedError(f"{ranking.words()}, {witnesses} of one class: expected {(least + 1) // 2} of each")
    drawn = redrawn(ranking, under_roc, replicates, seed)
    point, known = ranking.point(under_roc), kept(drawn, ranking.words())

    def at(level: float) -> tuple[float, float]:
        return area_interval(point, known, *ranking.witnesses, level=level, effective=ranking.effective)

    return Side(area_estimate(ranking, drawn), np.unique(ranking.group), witnesses, drawn=drawn, at=at)


def _expect_patients(patients: int, least: int) -> None:
    if patients < least:
        raise UndefinedError(f"{plural(patients, 'group')}; expected {least}, so few patients say nothing of others")


def _student(own: Side, other: Side, level: float) -> tuple[float, float]:
    """Student's t of the jackknife's variance, with the degrees of freedom of the side that has fewer."""
    gap = own.estimate.mean - other.estimate.mean
    half = t_quantile(min(own.freedom, other.freedom), (1 - level) / 2) * _error(own, other)
    return gap - half, gap + half


def _moved(own: Side, other: Side, level: float) -> tuple[float, float]:
    """Square-and-add: each side's own interval, which is no point where all pairs are in order, and how both move together.

    Zou 2007, doi:10.1037/1082-989X.12.4.399.
    """
    one, two, (low, high), (least, most) = own.estimate, other.estimate, own.at(level), other.at(level)
    both = ~np.isnan(own.drawn + other.drawn)
    r = _correlation(own.drawn[both], other.drawn[both])
    ends = ((one.mean - low, most - two.mean, -1.0), (high - one.mean, two.mean - least, 1.0))
    gap = one.mean - two.mean
    first, last = (gap + copysign(sqrt(max(0.0, a * a + b * b - 2 * r * a * b)), sign) for a, b, sign in ends)
    return first, last


def _correlation(one: Floats, two: Floats) -> float:
    return float(np.corrcoef(one, two)[0, 1]) if np.ptp(one) > 0 and np.ptp(two) > 0 else 0.0


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
            found = _subgroup_contrasts(
                subject, rows, [values[row] for row in rows], [said[row] for row in rows], margin, truth
            )
        except UndefinedError as error:
            found = ()
            yield _open(column, "", str(error), about)
        for one in found:
            yield _of(column, one, about)


def _subgroup_contrasts(
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
