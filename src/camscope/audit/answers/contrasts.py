"""Contrasts: does a number differ between sites, sexes or scanners, does it not, or is that open?"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import copysign, sqrt
from typing import Literal

import numpy as np
import numpy.typing as npt

from camscope.audit.answers.levels import levels_of
from camscope.audit.answers.performance import area_estimate
from camscope.audit.answers.ranking import Ranking, kept, ranked, redrawn, under_roc
from camscope.audit.enough import FOR_A_WORD
from camscope.errors import InputError, UndefinedError
from camscope.explainers.scope import expect_count
from camscope.metrics.base import Floats, Mask
from camscope.metrics.statistics import BOOTSTRAP, REPLICATES, Estimate, draws, holm, interval_of, numbered, p_of

Word = Literal["different", "equivalent", "undecided"]
LEVEL = 0.05
SQUARE_AND_ADD = "square-and-add"  # the method of an interval: that of `_moved`


@dataclass(frozen=True)
class Contrast:
    """A level of a column against another, or against all others (`against` is None).

    `own`, `other`: the number of either. `difference`: own - other; the `p` in it is of this contrast alone, `p` is Holm's
    over the levels. `word`: "equivalent" where the interval lies within ± the margin; else "different" where it leaves zero
    out and `p` is at most 5 %; else "undecided". A `reason` says why nothing, or less, could be said; where a side is too
    small all the others are None.
    """

    level: Hashable
    against: Hashable
    own: Estimate | None = None
    other: Estimate | None = None
    difference: Estimate | None = None
    p: float | None = None
    word: Word | None = None
    reason: str = ""


@dataclass(frozen=True)
class Side:
    """The number of one side, in draws of the patients of both; of its own `patients`, by number, `witnesses` vouch for it."""

    estimate: Estimate
    drawn: Floats
    patients: npt.NDArray[np.int64]
    witnesses: int
    constant: bool = False


Interval = tuple[Callable[[Side, Side], tuple[float, float]], str]  # the ends of a difference, and the method


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

    return _contrasts(side, (_percentiles, BOOTSTRAP), _levels(subgroup, known), margin)


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
        raise InputError(f"{len(known)} rows and {len(subgroup)} levels; expected (N,) of both")
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
    made = [_contrast(name, against, side, interval, levels[name], every, margin) for name, against in pairs]
    tested = [one for one in made if one.difference is not None]
    corrected = dict(zip(map(id, tested), holm([_p(one) for one in tested]), strict=True))
    return tuple(_judged(one, corrected[id(one)], margin) if id(one) in corrected else one for one in made)


def _contrast(
    level: Hashable,
    against: Hashable,
    side: Callable[[Mask], Side],
    interval: Interval,
    rows: Mask,
    every: Mask,
    margin: float,
) -> Contrast:
    sides = []
    for words, some in ((level, rows), ("all others" if against is None else against, every & ~rows)):
        try:
            sides.append(side(some))
        except UndefinedError as error:
            return Contrast(level, against, reason=f"{words}: {error}")
    own, other = sides
    ends, method = interval
    gaps, n = _gaps(own, other), min(own.witnesses, other.witnesses)
    one, two, patients = own.estimate, other.estimate, len(np.union1d(own.patients, other.patients))
    difference = Estimate(
        one.mean - two.mean, *ends(own, other), one.n + two.n, patients, p=p_of(gaps, n), method=method
    )
    flat = [str(words) for words, made in ((level, own), (against or "all others", other)) if made.constant]
    reason = f"all values of {' and of '.join(flat)} are equal" if flat else ""
    return Contrast(level, against, one, two, difference, word="undecided" if len(flat) == 2 else None, reason=reason)


def _gaps(own: Side, other: Side) -> Floats:
    """Draws of the difference. A side whose values are all equal is taken to vary as the other does: it would not be seen."""
    one, two = own.drawn, other.drawn
    if own.constant:
        one = one + (two[::-1] - other.estimate.mean) * sqrt(other.witnesses / own.witnesses)
    if other.constant:
        two = two + (own.drawn[::-1] - own.estimate.mean) * sqrt(own.witnesses / other.witnesses)
    gaps = one - two
    return np.asarray(gaps[~np.isnan(gaps)])


def _p(one: Contrast) -> float:
    return 1.0 if one.difference is None or one.difference.p is None else one.difference.p


def _judged(one: Contrast, p: float, margin: float) -> Contrast:
    if one.difference is None or one.word is not None:
        return replace(one, p=p)
    low, high = one.difference.low, one.difference.high
    word: Word = "undecided"
    if -margin < low and high < margin:
        word = "equivalent"
    elif (low > 0 or high < 0) and p <= LEVEL:
        word = "different"
    return replace(one, p=p, word=word)


def _mean(given: Floats, rows: Mask, group: npt.NDArray[np.int64], least: int, replicates: int, seed: int) -> Side:
    count, own = int(group.max()) + 1, np.unique(group[rows])
    patients = len(own)
    _expect_patients(patients, least)
    sums = np.bincount(group[rows], weights=given[rows], minlength=count)
    sizes = np.bincount(group[rows], minlength=count)
    drawn = np.concatenate([_ratio(sums[part].sum(1), sizes[part].sum(1)) for part in draws(count, replicates, seed)])
    low, high = interval_of(kept(drawn, f"{patients} groups"), patients)
    made = Estimate(float(given[rows].mean()), low, high, int(rows.sum()), patients)
    return Side(made, drawn, own, patients, constant=float(np.ptp(given[rows])) == 0)


def _ratio(sums: Floats, sizes: npt.NDArray[np.int64]) -> Floats:
    return np.asarray(np.divide(sums, sizes, out=np.full(len(sums), np.nan), where=sizes > 0))


def _area(ranking: Ranking, least: int, replicates: int, seed: int) -> Side:
    _expect_patients(ranking.patients, least)
    witnesses = min(ranking.witnesses)
    if witnesses < (least + 1) // 2:
        raise UndefinedError(f"{ranking.words()}, {witnesses} of one class: expected {(least + 1) // 2} of each")
    drawn = redrawn(ranking, under_roc, replicates, seed)
    return Side(area_estimate(ranking, drawn), drawn, np.unique(ranking.group), witnesses)


def _expect_patients(patients: int, least: int) -> None:
    if patients < least:
        raise UndefinedError(f"{patients} groups; expected {least}, so few patients say nothing of others")


def _percentiles(own: Side, other: Side) -> tuple[float, float]:
    return interval_of(_gaps(own, other), min(own.witnesses, other.witnesses))


def _moved(own: Side, other: Side) -> tuple[float, float]:
    """Square-and-add: each side's own interval, which is no point where all pairs are in order, and how both move together.

    Zou 2007, doi:10.1037/1082-989X.12.4.399.
    """
    one, two = own.estimate, other.estimate
    both = ~np.isnan(own.drawn + other.drawn)
    r = _correlation(own.drawn[both], other.drawn[both])
    ends = ((one.mean - one.low, two.high - two.mean, -1.0), (one.high - one.mean, two.mean - two.low, 1.0))
    gap = one.mean - two.mean
    low, high = (gap + copysign(sqrt(max(0.0, a * a + b * b - 2 * r * a * b)), sign) for a, b, sign in ends)
    return low, high


def _correlation(one: Floats, two: Floats) -> float:
    return float(np.corrcoef(one, two)[0, 1]) if np.ptp(one) > 0 and np.ptp(two) > 0 else 0.0
