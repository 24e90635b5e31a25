"""Robustness: how far a map changes where it should not: under a little noise, a shift, a turn, in company, asked twice.

All take an explainer, one input x (1,C,*S) as the model takes it, and a question. The question is settled on the clean input:
an altered one is asked about the same class. A map of zeros has no number (UndefinedError), and NaN in a map has none.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from camscope.errors import InputError, UndefinedError
from camscope.explainers.core.base import Explainer
from camscope.explainers.core.batching import seeds
from camscope.explainers.core.evaluation_context import expect_count, expect_positive
from camscope.geometry import Placement
from camscope.metrics.base import Floats, Mask, finite, metric
from camscope.metrics.explainer_probe import Probe, single
from camscope.metrics.input_transforms import ACQUISITION, Change, Noise, Rotation, Shift
from camscope.metrics.similarity import SIMILARITIES
from camscope.targets import Question

USUAL: tuple[Change, ...] = (Shift(1), Shift(4), Rotation(1), Rotation(3), Noise(0.01))
EPSILON = 0.05  # of probability: a prediction that changed by less has held
LEAST = 0.25  # of the input's pixels: fewer in common are no comparison


@metric(
    "max-sensitivity",
    needs="explainer",
    formula="max of |map(x + d) - map(x)| / |map(x)| over draws of d, |d| at most radius in each value; Euclidean norms",
    paper="Yeh et al. 2019, arXiv:1901.09392; here divided by the map's own norm, a Monte Carlo estimate from below",
    high=None,
    higher_is_better=False,
    chance="about 1.4 for a map drawn anew each time, of mean zero",
)
def max_sensitivity(
    tool: Explainer, x: Tensor, target: Question = None, *, radius: float = 0.02, samples: int = 10, seed: int = 0
) -> float:
    """(1,C,*S) -> 0 or more. `radius`: of the input's own range, least to largest value."""
    return float(_sensitivities(tool, x, target, radius, samples, seed).max())


@metric(
    "average-sensitivity",
    needs="explainer",
    formula="the mean over the same draws",
    paper="Yeh et al. 2019, with the mean for the maximum",
    high=None,
    higher_is_better=False,
    chance="about 1.4 for a map drawn anew each time, of mean zero",
)
def average_sensitivity(
    tool: Explainer, x: Tensor, target: Question = None, *, radius: float = 0.02, samples: int = 10, seed: int = 0
) -> float:
    """(1,C,*S) -> 0 or more; see `max_sensitivity`."""
    return float(_sensitivities(tool, x, target, radius, samples, seed).mean())


@dataclass(frozen=True)
class Agreement:
    """What became of one change: the agreement of the maps where both know something, and of the predictions.

    `value`: None where there is none, with the `reason`. `covered`: share of the pixels that were compared. `moved`: by how
    much the class's probability changed, |dp|; `held`: whether that is less than what was allowed.
    """

    change: Change
    value: float | None
    covered: float
    moved: float
    held: bool
    reason: str = ""


def agreements(
    tool: Explainer,
    x: Tensor,
    target: Question = None,
    *,
    changes: Sequence[Change] = USUAL,
    similarity: str = "spearman",
    epsilon: float = EPSILON,
) -> list[Agreement]:
    """(1,C,*S) -> for each change, the agreement of the map with that of the changed input, carried back.

    Compared on the pixels of x that both inputs show; `similarity`: "spearman", "pearson" or "jaccard". `epsilon`: how
    far the class's probability may move; of a question that is not one class's, the score, in shares of its size.
    """
    return agreements_of(Probe.of(tool, single(x), target), changes, similarity, epsilon)[0]


def agreements_of(
    probe: Probe, changes: Sequence[Change] = USUAL, similarity: str = "spearman", epsilon: float = EPSILON
) -> list[list[Agreement]]:
    """[sample][change]: the agreements of each sample of a probe, whose passes are shared."""
    if similarity not in (known := ("spearman", "pearson", "jaccard")):
        raise InputError(f"similarity={similarity!r}: expected one of {', '.join(known)}, which need no whole picture")
    if not changes:
        raise InputError("changes is empty: name one at least, such as Shift(2)")
    x, count = probe.x, len(probe.x)
    changed, owners = torch.cat([change.applied(x) for change in changes]), list(range(count))
    maps = probe.maps(torch.cat([x, changed]), owners * (1 + len(changes)))
    others = maps[count:].reshape(len(changes), *maps[:count].shape)
    moved = _moved(probe, changed)
    return [
        _agreements(maps[n], others[:, n], moved[:, n], tuple(x.shape[2:]), changes, similarity, epsilon)
        for n in owners
    ]


def held(probe: Probe, changes: Sequence[Change] = USUAL, epsilon: float = EPSILON) -> Floats:
    """(N,) 0..1: of each sample of a probe the share of changes under which its prediction held: what a stability looks at."""
    moved = _moved(probe, torch.cat([change.applied(probe.x) for change in changes]))
    return np.asarray((moved < epsilon).mean(0))


def _moved(probe: Probe, changed: Tensor) -> Floats:
    """(changes*N,C,*S) -> (changes,N): by how much the chance of each sample's question changed."""
    owners = list(range(len(probe.x))) * (len(changed) // len(probe.x))
    moved = np.abs(probe.chances_of(changed, owners).reshape(-1, len(probe.x)) - probe.chances)
    if probe.score.classes is None:
        moved = moved / np.where(np.abs(probe.chances) > 0, np.abs(probe.chances), 1)
    return np.asarray(moved)


def _agreements(
    heat: Floats,
    others: Floats,
    moved: Floats,
    size: tuple[int, ...],
    changes: Sequence[Change],
    similarity: str,
    epsilon: float,
) -> list[Agreement]:
    """Of one sample's map with those (changes,*s) of its changed inputs."""
    found = []
    clean = Placement.identity(size).project(finite(heat))[0]
    for change, other, gap in zip(changes, others, moved, strict=True):
        value, share, reason = _compared(clean, *change.carried_back(other, size), similarity)
        found.append(Agreement(change, value, share, float(gap), bool(gap < epsilon), reason))
    return found


@metric(
    "stability",
    needs="explainer",
    formula="mean over shifts of 1 and 4 pixels, turns of 1 and 3 degrees and noise of Spearman(map, map carried back), "
    "where the class's probability moved by less than 0.05",
    paper="test-retest: the same picture, taken again",
    low=-1.0,
    chance="0",
)
def stability(
    tool: Explainer,
    x: Tensor,
    target: Question = None,
    *,
    changes: Sequence[Change] = USUAL,
    similarity: str = "spearman",
    epsilon: float = EPSILON,
) -> float:
    """(1,C,*S) -> -1..1; undefined where the prediction held under no change. See `agreements`."""
    return _mean(agreements(tool, x, target, changes=changes, similarity=similarity, epsilon=epsilon))


@metric(
    "acquisition-stability",
    needs="explainer",
    formula="mean over windows 5 % narrower and lower, and 5 % wider and higher, resampling to 0.9 of each side and back, and "
    "JPEG of quality 90 of Spearman(map, map of the changed input), where the class's probability moved by less than 0.05",
    paper="test-retest: the same picture, taken and kept another way",
    low=-1.0,
    chance="0",
)
def acquisition_stability(
    tool: Explainer,
    x: Tensor,
    target: Question = None,
    *,
    changes: Sequence[Change] = ACQUISITION,
    similarity: str = "spearman",
    epsilon: float = EPSILON,
) -> float:
    """(1,C,*S) -> -1..1; undefined where the prediction held under no change. See `agreements`."""
    return _mean(agreements(tool, x, target, changes=changes, similarity=similarity, epsilon=epsilon))


def _mean(found: Sequence[Agreement]) -> float:
    """Over the changes under which the prediction held and the maps compare."""
    values = [one.value for one in found if one.held and one.value is not None]
    if not values:
        words = "; ".join(f"{one.change}: {one.reason or f'|dp| {one.moved:.2g}'}" for one in found)
        raise UndefinedError(f"under no change did the prediction hold and the maps compare ({words})")
    return float(np.mean(values))


@metric(
    "determinism",
    needs="explainer",
    formula="largest difference between maps of the same input, asked again / largest size of the map",
    paper="a repetition",
    high=None,
    higher_is_better=False,
    chance="0 is what is expected",
)
def determinism(tool: Explainer, x: Tensor, target: Question = None, *, repeats: int = 3) -> float:
    """(1,C,*S) -> 0 for maps that are equal to the bit."""
    expect_count(repeats=repeats)
    probe = Probe.of(tool, single(x), target)
    first, *others = (finite(probe.maps(x, [0])[0]) for _ in range(1 + repeats))
    return max(_gap(first, other) for other in others)


@metric(
    "batch-invariance",
    needs="explainer",
    formula="largest difference between the map made alone and in a batch / largest size of the map",
    paper="a repetition, in company",
    high=None,
    higher_is_better=False,
    chance="rounding: about 1e-6 in float32",
)
def batch_invariance(tool: Explainer, x: Tensor, target: Question = None, *, others: Tensor | None = None) -> float:
    """(1,C,*S) -> 0 or more. `others` (M,C,*S): the company; None is x flipped along each axis, turned dark for light, x."""
    probe = Probe.of(tool, single(x), target)
    company = torch.cat([*(x.flip(axis) for axis in range(2, x.ndim)), -x, x]) if others is None else others
    if company.shape[1:] != x.shape[1:] or not len(company):
        raise InputError(
            f"others is {tuple(company.shape)} and x {tuple(x.shape)}: expected (M,{x.shape[1]},*S), M > 0"
        )
    alone = finite(probe.maps(x, [0])[0])
    half = len(company) // 2
    batch = torch.cat([company[:half], x, company[half:]])
    return _gap(alone, finite(probe.maps(batch, [0] * len(batch), at_once=len(batch))[half]))


def _sensitivities(tool: Explainer, x: Tensor, target: Question, radius: float, samples: int, seed: int) -> Floats:
    """(samples,)"""
    expect_positive(radius=radius)
    expect_count(samples=samples)
    probe, generator = Probe.of(tool, single(x), target), torch.Generator(device="cpu")
    reach = radius * float(x.max() - x.min())
    drawn = []
    for one in seeds(samples, torch.Generator(device="cpu").manual_seed(seed)):
        drawn.append(torch.rand(x.shape, generator=generator.manual_seed(one), dtype=torch.float32, device="cpu").to(x))
    noisy = x + reach * (2 * torch.cat(drawn) - 1)
    maps = finite(probe.maps(torch.cat([x, noisy]), [0] * (samples + 1))).reshape(samples + 1, -1)
    norm = np.linalg.norm(maps[0])
    if not norm > 0:
        raise UndefinedError("the map is zero everywhere: no change is large or small beside it")
    return np.asarray(np.linalg.norm(maps[1:] - maps[0], axis=1) / norm)


def _compared(clean: Floats, other: Floats, covered: Mask, similarity: str) -> tuple[float | None, float, str]:
    """The agreement on the pixels that are covered, their share, and why there is none."""
    share = float(covered.mean())
    if share < LEAST:
        return None, share, f"only {share:.0%} of the pixels are shown by both"
    try:
        return SIMILARITIES[similarity](clean[covered], other[covered]), share, ""
    except UndefinedError as error:
        return None, share, str(error)


def _gap(one: Floats, other: Floats) -> float:
    """The largest difference, in shares of the first one's largest size."""
    peak = np.abs(one).max()
    if not peak > 0:
        raise UndefinedError("the map is zero everywhere: no difference is large or small beside it")
    return float(np.abs(other - one).max() / peak)
