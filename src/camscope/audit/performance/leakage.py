"""Can site, scanner or sex be read off what a model keeps of an image? A linear probe that never saw the patient.

leaks: which columns of the manifest can be read off the model's features.
"""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from camscope.audit.core.context import Subject
from camscope.audit.core.predictions import Answered
from camscope.audit.core.schema import Leak
from camscope.audit.core.subgroup_levels import levels_of
from camscope.audit.core.summary_values import number, rounded
from camscope.audit.performance.auc import NEWCOMBE, Ranking, area_interval, kept, ranked, redrawn, under_roc
from camscope.errors import InputError, UndefinedError
from camscope.explainers.core.evaluation_context import expect_count
from camscope.metrics.base import Floats, Mask
from camscope.metrics.statistics import REPLICATES, Estimate, numbered
from camscope.optional import sklearn
from camscope.plurals import plural

Numbers = npt.NDArray[np.int64]
SURPRISING = 0.05


@dataclass(frozen=True)
class Level:
    """One level of the column: its rows and patients, and the AUROC of telling it from all others."""

    name: Hashable
    n: int
    groups: int
    auroc: float


@dataclass(frozen=True)
class LeakTest:
    """What a linear probe reads off features.

    `auroc`: of two levels, or the mean over levels, each against all others; its interval is of other patients read by the
    same probes. `chance`: what it is on average where labels are dealt to patients at random and probes learnt anew,
    `chance_high` the most that any of `permutations` deals gave, `p` how often chance gives as much. `readable`: the
    interval lies above a half and p is at most 5 %. `features`: how many vary. `left_out`: levels with too few patients, and
    how many these have.
    """

    auroc: Estimate
    chance: float
    chance_high: float
    p: float
    readable: bool
    levels: tuple[Level, ...]
    features: int
    folds: int
    permutations: int
    left_out: tuple[tuple[Hashable, int], ...]


def leak(
    features: npt.ArrayLike,
    labels: Sequence[Hashable],
    groups: Sequence[Hashable] | None = None,
    *,
    folds: int = 5,
    permutations: int = 20,
    replicates: int = REPLICATES,
    seed: int = 0,
) -> LeakTest:
    """(N,D), (N,) labels, (N,) patients -> AUROC of an L2 logistic probe of standardised features, patients held out whole.

    Left out are rows without a label, and levels with fewer than two patients a fold. UndefinedError where fewer than two
    levels remain, or no feature varies.
    """
    expect_count(folds=folds, permutations=permutations, replicates=replicates)
    given, every = np.asarray(features, np.float64), numbered(groups, len(labels))
    if given.ndim != 2 or len(given) != len(labels) or not np.isfinite(given).all() or folds < 2:
        raise InputError(
            f"features {given.shape} of {plural(len(labels), 'label')} in {plural(folds, 'fold')}: expected "
            "(N,D) finite numbers, and 2 folds"
        )
    levels, few = _enough(levels_of(labels), every, 2 * folds)
    rows = np.logical_or.reduce(list(levels.values()))
    label = np.select([own[rows] for own in levels.values()], range(len(levels)))
    x, group = _standardised(given[rows]), np.unique(every[rows], return_inverse=True)[1]
    probe = _Probe(x, group, folds, seed)
    rankings = _rankings(label, probe.scores(label), group)
    random = np.random.default_rng(seed)
    null = [_area(probe, _dealt(label, group, random), group) for _ in range(permutations)]
    found = _estimate(rankings, len(labels) - len(label), replicates, seed)
    p = (1 + sum(one >= found.mean for one in null)) / (1 + permutations)
    named = tuple(_level(name, ranking) for name, ranking in zip(levels, rankings, strict=True))
    varying = int((np.ptp(given[rows], 0) > 0).sum())
    readable = bool(found.low > 0.5 and p <= SURPRISING)
    return LeakTest(found, float(np.mean(null)), max(null), p, readable, named, varying, folds, permutations, few)


def _enough(
    levels: dict[Hashable, Mask], group: Numbers, least: int
) -> tuple[dict[Hashable, Mask], tuple[tuple[Hashable, int], ...]]:
    patients = {name: len(np.unique(group[rows])) for name, rows in levels.items()}
    few = tuple((name, count) for name, count in patients.items() if count < least)
    if len(levels) - len(few) < 2:
        words = ", ".join(f"{name!r}: {count}" for name, count in patients.items()) or "none has a label"
        raise UndefinedError(f"expected two levels of {plural(least, 'patient')} or more; there are {words}")
    return {name: rows for name, rows in levels.items() if patients[name] >= least}, few


def _standardised(x: Floats) -> Floats:
    """(N,D) -> (N,d): features that vary, of mean 0 and deviation 1, their products over D; turned, where D > N, into N."""
    varying = x[:, np.ptp(x, 0) > 0]
    if not varying.shape[1]:
        raise UndefinedError(f"no feature of {x.shape[1]} varies")
    centred = varying - varying.mean(0)
    scaled = centred / centred.std(0) / np.sqrt(varying.shape[1])
    if scaled.shape[1] <= len(scaled):
        return np.asarray(scaled)
    left, size, _ = np.linalg.svd(scaled, full_matrices=False)  # the probe sees products of rows only, which stay
    return np.asarray(left * size)


@dataclass(frozen=True)
class _Probe:
    """Out-of-fold scores of the rows (N,d) of patients, for any labels."""

    x: Floats
    group: Numbers
    folds: int
    seed: int

    def scores(self, label: Numbers) -> Floats:
        """(N,) -> (N,K): log odds of each level, by a probe of other patients to which all levels weigh alike."""
        split = sklearn("model_selection").StratifiedGroupKFold(self.folds, shuffle=True, random_state=self.seed)
        made = np.zeros((len(label), int(label.max()) + 1))
        for train, test in split.split(self.x, label, self.group):
            probe = sklearn("linear_model").LogisticRegression(class_weight="balanced", max_iter=1000)
            given = probe.fit(self.x[train], label[train]).decision_function(self.x[test])
            made[np.ix_(test, probe.classes_)] = _log_odds(given)
        return made


def _log_odds(given: Floats) -> Floats:
    """(n,) of the second of two, or (n,K) logits -> (n,K): o_k - log Σ_others exp(o)."""
    if given.ndim == 1:
        return np.stack([-given, given], 1)
    others = [np.logaddexp.reduce(np.delete(given, k, 1), 1) for k in range(given.shape[1])]
    return np.asarray(given - np.stack(others, 1))


def _dealt(label: Numbers, group: Numbers, random: np.random.Generator) -> Numbers:
    """(N,): each patient gets the labels of another, in any order, over again where that one has fewer images."""
    order = np.argsort(group, kind="stable")
    sizes = np.bincount(group)
    starts = np.cumsum(sizes) - sizes
    giver = random.permutation(len(sizes))[group[order]]
    shuffled = label[order][np.lexsort((random.random(len(label)), group[order]))]
    made = np.empty_like(label)
    made[order] = shuffled[starts[giver] + (np.arange(len(label)) - starts[group[order]]) % sizes[giver]]
    return made


def _rankings(label: Numbers, scores: Floats, group: Numbers) -> list[Ranking]:
    """One of each level, of two the same twice; draws of all are of the same patients."""
    made = [ranked(label == k, scores[:, k], None) for k in range(scores.shape[1])]
    return [replace(one, group=group[one.order], groups=int(group.max()) + 1) for one in made]


def _area(probe: _Probe, label: Numbers, group: Numbers) -> float:
    return _mean_area(_rankings(label, probe.scores(label), group))


def _mean_area(rankings: list[Ranking]) -> float:
    return float(np.mean([one.point(under_roc) for one in rankings]))


def _estimate(rankings: list[Ranking], undefined: int, replicates: int, seed: int) -> Estimate:
    drawn = np.mean([redrawn(one, under_roc, replicates, seed) for one in rankings], 0)
    rarest, words = min(rankings, key=lambda one: min(one.witnesses)), rankings[0].words()
    few = min(rankings, key=lambda one: one.effective)
    low, high = area_interval(_mean_area(rankings), kept(drawn, words), *rarest.witnesses, effective=few.effective)
    one = rankings[0]
    return Estimate(
        _mean_area(rankings),
        low,
        high,
        len(one.truth),
        one.patients,
        undefined,
        method=NEWCOMBE,
        witnesses=min(rarest.witnesses),
        effective=few.effective,
        largest=few.largest,
    )


def _level(name: Hashable, ranking: Ranking) -> Level:
    patients = len(np.unique(ranking.group[ranking.truth]))
    return Level(name, ranking.positives, patients, ranking.point(under_roc))


def leaks(subject: Subject, answered: Answered) -> Iterator[Leak]:
    """A probe for each subgroup column, of rows that say something in it."""
    places = {row: n for n, row in enumerate(answered.rows)}
    for column in subject.config.data.subgroups:
        said = subject.levels(column)
        rows = [row for row in answered.rows if said[row] is not None]
        features = answered.features[[places[row] for row in rows]]
        try:
            found = leak(
                features,
                [str(said[row]) for row in rows],
                [subject.patients[row] for row in rows],
                seed=subject.config.seed,
            )
            yield Leak(
                column=column,
                auroc=number(found.auroc, found.chance, "labels dealt to patients at random"),
                null_high=rounded(found.chance_high),
                readable=found.readable,
            )
        except UndefinedError as error:
            yield Leak(column=column, auroc=number(None, 0.5, "chance", str(error)), null_high=None)
