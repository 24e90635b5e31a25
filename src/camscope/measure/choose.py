"""choose: which method, at which layer, on this model and these images. Candidates race; losers drop out early.

Every candidate explains the same images, a block at a time. Of each map it is asked how much faster the model's answer goes
when the map's strongest regions are removed than when its weakest are (under two fills), and, where the evidence is known, how
much of the map lies in it. Candidates are ranked on each image; after each block those whose mean rank is worse than the
leader's, beyond chance, drop out. Maps that stay as they are when the model loses its training do not start.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from camscope.errors import CamscopeError, InputError, UndefinedError
from camscope.explainers import Explainer
from camscope.explainers.inputs import Item
from camscope.geometry import Placement
from camscope.metrics import METRICS
from camscope.metrics.forgetting import untrained
from camscope.metrics.scores import scoring
from camscope.metrics.similarity import spearman
from camscope.metrics.statistics import Estimate, difference, estimated, holm
from camscope.metrics.trial import Trial
from camscope.targets import Question

Mask = npt.NDArray[np.bool_]
FILLS = ("mean", "blur")
LEVEL = 0.05
REPLICATES = 20_000  # so that a correction for dozens of candidates leaves something to see
FAITHFULNESS, LOCALISATION = "lerf-morf-gap", "enrichment"


@dataclass(frozen=True)
class Sample:
    """An image as the model takes it, what is asked of it, and on the input's plane where the evidence is, if that is known."""

    item: Item
    target: Question = None
    mask: Mask | None = None


@dataclass
class Standing:
    """A candidate's evidence so far. `values`: [criterion] of each image, NaN where there is no number."""

    tool: Explainer
    values: dict[str, list[float]] = field(default_factory=dict)
    seconds: float = 0.0
    images: int = 0
    out: str = ""  # why it is out of the race

    @property
    def title(self) -> str:
        """`gradcam · layer4`"""
        layer = getattr(self.tool, "layer", None)
        return " · ".join(filter(None, (self.tool.title, layer if isinstance(layer, str) else None)))

    @property
    def price(self) -> float:
        """Seconds an image."""
        return self.seconds / max(1, self.images)

    def estimate(self, criterion: str) -> Estimate | None:
        """The mean of a criterion over the images that it saw."""
        try:
            return estimated(self.values[criterion])
        except UndefinedError:
            return None


@dataclass(frozen=True)
class Choice:
    """`best`: one, or two that cannot be told apart; empty where there is no clear winner. `standings`: all, the best first.

    `images`: that the leader saw; `explained`: maps made in all, and `exhaustive` those of a race in which nobody drops out.
    """

    best: list[Standing]
    standings: list[Standing]
    images: int
    explained: int
    exhaustive: int

    @property
    def alike(self) -> list[Standing]:
        """Those that are still in the race."""
        return [one for one in self.standings if not one.out]

    @property
    def cheapest(self) -> Standing:
        """Of those that are still in the race."""
        return min(self.alike or self.standings, key=lambda one: one.price)

    @property
    def sentence(self) -> str:
        """The recommendation in words, with its evidence and its price."""
        if not self.alike:
            return "none: the maps of no candidate depend on what the model learnt"
        if not self.best:
            alike, cheap = self.alike, self.cheapest
            names = ", ".join(one.title for one in alike)
            return (
                f"no clear winner after {self.images} images: {len(alike)} candidates are alike ({names}); the cheapest of "
                f"them is {cheap.title}, {cheap.price:.3f} s an image"
            )
        said = []
        for one in self.best:
            gap = one.estimate(FAITHFULNESS)
            said.append(f"{one.title} (faithfulness {gap}, {one.price:.3f} s an image)")
        return " or ".join(said)


Judge = Callable[["Sequence[Standing]", Sequence[Sample]], None]  # adds a block's values to each standing
Told = Callable[[int, int, int], None]  # images seen, images there are, candidates left


def choose(
    tools: Sequence[Explainer],
    samples: Sequence[Sample],
    *,
    block: int = 8,
    least: int = 16,
    steps: int = 6,
    region: int = 16,
    seed: int = 0,
    exhaustive: bool = False,
    told: Told | None = None,
    judge: Judge | None = None,
) -> Choice:
    """Race explainers of one model over samples of one size; see the module.

    `block`: images in a round; `least`: before anybody drops out; `steps`, `region`: points of a removal curve, and the side in
    pixels of what is removed at a time. `seed`: the order of the images, and of ties. `exhaustive`: nobody drops out. `judge`:
    who adds a block's values, instead of asking the model.
    """
    if len(tools) < 2 or len(samples) < 2:
        raise InputError(f"{len(tools)} candidates and {len(samples)} images; a race needs two of each at least")
    order = np.random.default_rng(seed).permutation(len(samples))
    standings = [Standing(tool) for tool in tools]
    criteria = [FAITHFULNESS, *([LOCALISATION] if any(one.mask is not None for one in samples) else [])]
    for one in standings:
        one.values = {name: [] for name in criteria}
    first = [samples[i] for i in order[:block]]
    for one in standings:
        one.out = shows_the_image(one.tool, first, seed)
    seen = 0
    for start in range(0, len(order), block):
        some = [samples[i] for i in order[start : start + block]]
        racing = [one for one in standings if not one.out]
        if len(racing) < 2 and not exhaustive:
            break
        if judge is None:
            judged(racing, some, steps, region, seed)
        else:
            judge(racing, some)
        seen += len(some)
        if seen >= least and not exhaustive:
            drop_losers(racing, seed)
        if told is not None:
            told(seen, len(samples), sum(not one.out for one in standings))
    if exhaustive:
        drop_losers([one for one in standings if not one.out], seed)
    return _chosen(standings, seen, len(samples))


def shows_the_image(tool: Explainer, samples: Sequence[Sample], seed: int) -> str:
    """Why a candidate's maps say nothing of what the model learnt: they are the same without it; "" where they are not.

    Alike: Spearman's correlation of the map with that of the same architecture, untrained, in the median above 0.7.
    """
    if tool.control:
        return "a control: it does not look at the model"
    other, found = untrained(tool, seed), []
    for one in samples[:4]:
        x = one.item.x[None]
        try:
            pair = [each.attribute(x.to(_home(each)), one.target)[0].detach().cpu().numpy() for each in (tool, other)]
            found.append(spearman(*pair))
        except (CamscopeError, ArithmeticError):
            continue
    alike = float(np.median(found)) if found else 0.0
    return f"its maps stay as they are without the model's training (correlation {alike:.2f})" if alike > 0.7 else ""


def drop_losers(racing: Sequence[Standing], seed: int) -> None:
    """Those whose mean rank over images is worse than the leader's, beyond chance (paired, Holm), are out."""
    ranks = ranked(racing)
    leader = int(np.nanmean(ranks, 1).argmin())
    rest = [i for i in range(len(racing)) if i != leader]
    gaps = [difference(ranks[i], ranks[leader], replicates=REPLICATES, seed=seed) for i in rest]
    for i, gap, p in zip(rest, gaps, holm([gap.p or 1.0 for gap in gaps]), strict=True):
        if gap.mean > 0 and p < LEVEL:
            racing[
                i
            ].out = f"behind {racing[leader].title} by {gap.mean:.1f} ranks after {racing[i].images} images (p {p:.3f})"


def ranked(racing: Sequence[Standing]) -> npt.NDArray[np.float64]:
    """[candidate, image]: the mean over criteria of its rank among the candidates there, 1 the best; what ties shares."""
    criteria = list(racing[0].values)
    each = [np.array([one.values[name] for one in racing], np.float64) for name in criteria]
    return np.asarray(np.nanmean([np.apply_along_axis(_ranks, 0, -values) for values in each], 0), np.float64)


def _ranks(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """From 1, ties their mean; what is undefined is last."""
    known = np.where(np.isnan(values), np.inf, values)
    below, equal = (known[None] < known[:, None]).sum(1), (known[None] == known[:, None]).sum(1)
    return np.asarray(below + (equal + 1) / 2, np.float64)


def judged(racing: Sequence[Standing], samples: Sequence[Sample], steps: int, region: int, seed: int) -> None:
    """A block of images: maps of all candidates, then what they are worth."""
    model = racing[0].tool.model
    x = torch.stack([one.item.x for one in samples]).to(_home(racing[0].tool))
    targets: Any = [one.target for one in samples]
    maps = []
    for one in racing:
        begin = time.perf_counter()
        maps.append(_on_input(one.tool.attribute(x, targets), x))
        one.seconds += time.perf_counter() - begin
        one.images += len(samples)
    with scoring(model, x, targets, categories=racing[0].tool.categories) as scores:
        for one, heat in zip(racing, maps, strict=True):
            gaps = [METRICS[FAITHFULNESS](Trial(heat, scores, fill, steps, region, seed)).array for fill in FILLS]
            one.values[FAITHFULNESS] += np.mean(gaps, 0).tolist()
    if LOCALISATION in racing[0].values:
        for one, heat in zip(racing, maps, strict=True):
            one.values[LOCALISATION] += [
                _enrichment(*pair) for pair in zip(heat, (s.mask for s in samples), strict=True)
            ]


def _enrichment(heat: npt.NDArray[np.float64], mask: Mask | None) -> float:
    try:
        return float("nan") if mask is None else float(METRICS[LOCALISATION](heat, mask))
    except UndefinedError:
        return float("nan")


def _on_input(maps: Tensor, x: Tensor) -> npt.NDArray[np.float64]:
    """(N,*s) -> (N,*S)"""
    place = Placement.identity(tuple(x.shape[2:]))
    return np.stack([place.project(one)[0] for one in maps.detach().double().cpu().numpy()])


def _home(tool: Explainer) -> torch.device:
    from camscope.explainers.scope import home
    from camscope.hooks.base import unwrap

    return home(unwrap(tool.model))[0]


def _chosen(standings: list[Standing], seen: int, images: int) -> Choice:
    left = [one for one in standings if not one.out]
    places = ranked(left).mean(1) if left else []
    order = [left[i] for i in np.argsort(places, kind="stable")] if left else []
    rest = sorted((one for one in standings if one.out), key=lambda one: -one.images)
    best = order if len(order) <= 2 else []
    started = [one for one in standings if one.images]
    return Choice(best, [*order, *rest], seen, sum(one.images for one in started), images * len(started))
