"""Ranking: rows in the order of their answers, and AUROC and average precision of any number of draws of patients."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from camscope.errors import InputError, UndefinedError
from camscope.metrics.base import Floats, Mask
from camscope.metrics.clusters import effective_groups
from camscope.metrics.statistics import draws, numbered
from camscope.wording import plural

Numbers = npt.NDArray[np.int64]
Area = Callable[[Floats, Floats], Floats]  # (r,V) weights of positives and of negatives at each answer -> (r,)
LOST = 0.1  # the share of draws that may hold one class only


@dataclass(frozen=True)
class Ranking:
    """Rows with an answer, the lowest first: `truth` (N,), `group` (N,) numbers, `place` (N,), equal for equal answers.

    `order` (N,): which rows these were. `groups`: how many are drawn from. `undefined`: rows without an answer.
    """

    truth: Mask
    group: Numbers
    place: Numbers
    order: Numbers
    groups: int
    undefined: int

    @property
    def positives(self) -> int:
        """How many rows show the finding."""
        return int(self.truth.sum())

    @property
    def negatives(self) -> int:
        """How many do not."""
        return len(self.truth) - self.positives

    @property
    def witnesses(self) -> tuple[int, int]:
        """How many groups have a positive, and how many a negative row."""
        return len(np.unique(self.group[self.truth])), len(np.unique(self.group[~self.truth]))

    @property
    def effective(self) -> float:
        """How many groups the rows of the class weigh as that has the fewest; see `effective_groups`."""
        return effective_groups(self._sizes)

    @property
    def largest(self) -> float:
        """The share of that class's rows that one group has."""
        return float(self._sizes.max() / self._sizes.sum())

    @property
    def _sizes(self) -> Numbers:
        sizes = [np.bincount(self.group[rows]) for rows in (self.truth, ~self.truth)]
        return min(sizes, key=effective_groups)

    @property
    def patients(self) -> int:
        """How many groups have a row."""
        return len(np.unique(self.group))

    def only(self, rows: Mask) -> "Ranking":
        """(M,) of the rows as they came -> the ranking of some; draws are still of all groups."""
        some = rows[self.order]
        made = replace(self, truth=self.truth[some], group=self.group[some], place=self.place[some])
        return _two_classes(replace(made, order=self.order[some]))

    def summed(self, weights: Floats) -> tuple[Floats, Floats]:
        """(r,N) of the rows in order -> (r,V), (r,V): at each answer the weight of positives and of negatives."""
        positive = weights * self.truth
        negative = weights - positive
        starts = np.flatnonzero(np.diff(self.place, prepend=-1))
        if len(starts) == len(self.truth):
            return positive, negative
        return np.add.reduceat(positive, starts, 1), np.add.reduceat(negative, starts, 1)

    def point(self, area: Area) -> float:
        """The number of all rows."""
        return float(area(*self.summed(np.ones((1, len(self.truth)))))[0])

    def words(self) -> str:
        """What there is of each class."""
        classes = f"{plural(self.positives, 'positive')} and {plural(self.negatives, 'negative')}"
        return f"{classes} in {plural(self.patients, 'group')}"


def ranked(truth: npt.ArrayLike, answer: npt.ArrayLike, groups: Sequence[Hashable] | None) -> Ranking:
    """(N,) bool, (N,) numbers, (N,) patients -> their ranking; UndefinedError where a class has no row."""
    known, given = expect_truth(truth), np.asarray(answer, np.float64)
    if given.shape != known.shape:
        raise InputError(f"truth {known.shape} and answers {given.shape}; expected (N,) of both, of the same images")
    if np.isinf(given).any():
        raise InputError(
            f"answer {int(np.flatnonzero(np.isinf(given))[0])} is infinite: expected numbers, NaN for none"
        )
    order = np.argsort(given, kind="stable")[: len(given) - int(np.isnan(given).sum())]  # NaN are last
    names = list(groups) if groups is not None else list(range(len(given)))
    if len(names) != len(given):
        raise InputError(f"{plural(len(given), 'answer')} and {plural(len(names), 'group')}; expected (N,) of both")
    group = numbered([names[int(i)] for i in order], len(order))
    place = np.unique(given[order], return_inverse=True)[1]
    lost = len(given) - len(order)
    return _two_classes(Ranking(known[order], group, place, order, len(np.unique(group)), lost))


def _two_classes(ranking: Ranking) -> Ranking:
    if not ranking.positives or not ranking.negatives:
        raise UndefinedError(f"{ranking.words()}: of one class there is none")
    return ranking


def expect_truth(truth: npt.ArrayLike) -> Mask:
    """(N,) bool; InputError for anything else."""
    known = np.asarray(truth)
    if known.dtype != np.bool_ or known.ndim != 1:
        raise InputError(f"truth is {known.dtype} {known.shape}; expected (N,) bool: True where the finding is")
    return known


def redrawn(ranking: Ranking, area: Area, replicates: int, seed: int) -> Floats:
    """(replicates,): the number of draws of groups; NaN where a draw holds one class only."""
    rows = len(ranking.truth)
    made = []
    for drawn in draws(ranking.groups, replicates, seed, rows):
        positive, negative = ranking.summed(times(drawn, ranking.groups)[:, ranking.group])
        both = (positive.sum(1) > 0) & (negative.sum(1) > 0)
        values = np.full(len(drawn), np.nan)
        values[both] = area(positive[both], negative[both])
        made.append(values)
    return np.concatenate(made)


def kept(drawn: Floats, words: str) -> Floats:
    """The replicates with a value; UndefinedError where more than a tenth have none."""
    lost = int(np.isnan(drawn).sum())
    if lost > LOST * len(drawn):
        raise UndefinedError(f"{words}: {lost} of {plural(len(drawn), 'draw')} of groups hold one class only")
    return drawn[~np.isnan(drawn)]


def times(drawn: Numbers, groups: int) -> Floats:
    """(r,groups) numbers -> (r,groups): how often each group was drawn."""
    flat = drawn + groups * np.arange(len(drawn))[:, None]
    return np.bincount(flat.ravel(), minlength=len(drawn) * groups).reshape(len(drawn), groups).astype(np.float64)


def under_roc(positive: Floats, negative: Floats) -> Floats:
    """(r,V), (r,V) -> (r,): the share of pairs in which the positive one is higher; equals count half."""
    lower = np.cumsum(negative, 1) - 0.5 * negative
    return np.asarray((positive * lower).sum(1) / (positive.sum(1) * negative.sum(1)))


def under_precision(positive: Floats, negative: Floats) -> Floats:
    """(r,V), (r,V) -> (r,): Σ over answers, the highest first, of the recall gained there times the precision."""
    hits = np.cumsum(positive[:, ::-1], 1)
    called = hits + np.cumsum(negative[:, ::-1], 1)
    precision = np.divide(hits, called, out=np.zeros_like(hits), where=called > 0)
    return np.asarray((positive[:, ::-1] * precision).sum(1) / hits[:, -1])
