"""choose: which method, at which layer, on this model and these images. Candidates race; losers drop out early.

Every candidate explains the same images, a block at a time. Of each map it is asked how much faster the model's answer goes
when the map's strongest regions are removed than when its weakest are (under two fills), where the evidence is known how much
of the map lies in it, and whether the map stays as it is when the image hardly changes. Maps that stay as they are when the
model loses its training do not start; of maps that are the same one stays; maps that do not hold still are out. See `race`
for who drops out when.

A choice as a file: TOML that `camscope explain` and `camscope batch` take, with the evidence that it rests on.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path

import numpy as np

from camscope.data_readers import read_toml
from camscope.errors import CamscopeError, InputError
from camscope.evaluation.map_metrics import side_of
from camscope.evaluation.selection.candidate_scores import home_of, judged
from camscope.evaluation.selection.racing import (
    FAITHFULNESS,
    FEWEST,
    LOCALISATION,
    ROBUSTNESS,
    Reference,
    Sample,
    Standing,
    decided,
    left_over,
    order,
    reference,
    without_losers,
    witnesses,
)
from camscope.explainers import METHODS, Explainer
from camscope.explainers.core.dispatch import run
from camscope.hooks.base import unwrap
from camscope.metrics.similarity import spearman
from camscope.metrics.weight_randomization import untrained
from camscope.model_card import digest
from camscope.plurals import plural
from camscope.safe_files import write_bytes

BLIND = (
    0.7  # of Spearman's correlation with the untrained model's map: above it a map shows the image, not what was learnt
)
RESTLESS = 0.5  # of the median stability: below it most of a map is other than that of the image a moment later


@dataclass(frozen=True)
class Choice:
    """`best`: one, or two that cannot be told apart; empty where there is no clear winner. `standings`: all, the best first.

    `images`: that the leader saw; `explained`: maps judged in all, and `exhaustive` those of a race in which nobody drops out.
    `witnesses`: images, or groups of them, that there were to tell candidates apart by.
    """

    best: list[Standing]
    standings: list[Standing]
    images: int
    explained: int
    exhaustive: int
    witnesses: int

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
            return "none: the maps of no candidate depend on what the model learnt and hold still"
        if not self.best:
            names, cheap = ", ".join(one.title for one in self.alike), self.cheapest
            if self.witnesses < FEWEST:
                few = plural(self.witnesses, "image or group", "images or groups")
                found = f"{few} cannot tell candidates apart: {FEWEST} are needed ({names})"
            else:
                alike = plural(len(self.alike), "candidate is", "candidates are")
                found = f"no clear winner after {plural(self.images, 'image')}: {alike} alike ({names})"
            return f"{found}; the cheapest of them is {cheap.title}, {cheap.price:.3f} s an image"
        said = []
        for one in self.best:
            gap = one.estimate(FAITHFULNESS)
            said.append(f"{one.title} (faithfulness {gap}, {one.price:.3f} s an image)")
        return " or ".join(said)


Judge = Callable[[Sequence[Standing], Sequence[Sample]], None]  # adds a block's values to each standing
Told = Callable[[int, int, int], None]  # images seen, images there are, candidates left


def choose(
    tools: Sequence[Explainer],
    samples: Sequence[Sample],
    *,
    block: int = 8,
    steps: int = 6,
    region: int | None = None,
    seed: int = 0,
    exhaustive: bool = False,
    told: Told | None = None,
    judge: Judge | None = None,
) -> Choice:
    """Race explainers of one model over samples of one size; see the module.

    `block`: images in a round. `steps`, `region`: points of a removal curve, and the side in pixels of what is removed at a
    time; None: a fourteenth of the input's shortest side. `seed`: the order of the images, and of ties. `exhaustive`: nobody
    drops out before the end. `judge`: who adds a block's values, instead of asking the model.
    """
    if len(tools) < 2 or len(samples) < 2:
        raise InputError(f"candidates: {len(tools)}, images: {len(samples)}; a race needs two of each at least")
    drawn = _in_turn(samples, seed)
    groups = None if all(one.group is None for one in drawn) else [one.group for one in drawn]
    masked = [LOCALISATION] if any(one.mask is not None for one in samples) else []
    names = (FAITHFULNESS, *masked, ROBUSTNESS)
    standings = [Standing(tool, {name: [] for name in names}, groups=groups) for tool in tools]
    for one in standings:
        one.out = shows_the_image(one.tool, drawn[:block], seed)
    known: Reference = {}
    for start in range(0, len(drawn), block):
        racing, some = left_over(standings), drawn[start : start + block]
        if not racing or (known and not exhaustive and decided(racing, known, len(drawn))):
            break
        if judge is None:
            judged(racing, some, steps, region or side_of(some[0].item.x), seed)
        else:
            judge(racing, some)
        known = reference(racing) | {name: values for name, values in known.items() if len(values)}
        seen = start + len(some)
        if not exhaustive or seen == len(drawn):
            _drop(racing)
            without_losers(left_over(racing), known, len(drawn))
        if told is not None:
            told(seen, len(samples), len(left_over(standings)))
    return _chosen(standings, known, len(samples))


def _in_turn(samples: Sequence[Sample], seed: int) -> list[Sample]:
    """In random order, those of a group one after the other; InputError where only some have a group."""
    drawn = [samples[i] for i in np.random.default_rng(seed).permutation(len(samples))]
    if any(one.group is None for one in drawn) and not all(one.group is None for one in drawn):
        raise InputError(
            f"{plural(sum(one.group is None for one in drawn), 'image has', 'images have')} no group: name one "
            "of each, or of none"
        )
    places = {group: n for n, group in enumerate(dict.fromkeys(one.group for one in drawn))}
    return sorted(drawn, key=lambda one: places[one.group])


def shows_the_image(tool: Explainer, samples: Sequence[Sample], seed: int) -> str:
    """Why a candidate's maps say nothing of what the model learnt: they are the same without it; "" where they are not.

    Alike: Spearman's correlation of the map with that of the same architecture, untrained, in the median above `BLIND`.
    """
    if tool.control:
        return "a control: it does not look at the model"
    other, found = untrained(tool, seed), []
    for one in samples[:4]:
        x = one.item.x[None]
        try:
            pair = [
                run([each], x.to(home_of(each)), [one.target])[0].maps[0].heat[0].detach().cpu().numpy()
                for each in (tool, other)
            ]
            found.append(spearman(*pair))
        except (CamscopeError, ArithmeticError):
            continue
    alike = float(np.median(found)) if found else 0.0
    return f"its maps stay as they are without the model's training (correlation {alike:.2f})" if alike > BLIND else ""


def _drop(racing: Sequence[Standing]) -> None:
    """Those whose maps are another's, and those that do not hold still."""
    for n, one in enumerate(racing):
        twin = next((other for other in racing[:n] if not other.out and same(one, other)), None)
        if twin is not None:
            one.out = f"its maps are those of {twin.title}"
    for one in left_over(racing):
        held = np.array(one.values[ROBUSTNESS])
        still = float(np.median(held[~np.isnan(held)])) if not np.isnan(held).all() else 1.0
        if still < RESTLESS:
            one.out = f"its maps do not hold still when the image hardly changes (correlation {still:.2f})"


def same(one: Standing, other: Standing) -> bool:
    """Whether their maps of the first images are one another's, but for their scale, to a thousandth of the largest value."""
    for mine, theirs in zip(one.first, other.first, strict=True):
        tall, wide = np.abs(mine).max(), np.abs(theirs).max()
        if not np.abs(mine * wide - theirs * tall).max() <= 1e-3 * tall * wide or (tall > 0) != (wide > 0):
            return False
    return bool(one.first)


def _chosen(standings: Sequence[Standing], known: Reference, images: int) -> Choice:
    left = order(left_over(standings), known)
    rest = sorted((one for one in standings if one.out), key=lambda one: -one.images)
    started = [one for one in standings if one.images]
    seen = max((one.images for one in left or started), default=0)
    explained = sum(one.images for one in started)
    independent = witnesses(standings[0], images)[1]
    clear = len(left) == 1 or (len(left) == 2 and independent >= FEWEST)
    return Choice(left if clear else [], [*left, *rest], seen, explained, images * len(started), independent)


@dataclass(frozen=True)
class Chosen:
    """A method, its layer, and the digest of the model that it was chosen for."""

    method: str
    layer: str | None
    model: str


def save(choice: Choice, path: str | Path, *, overwrite: bool = False) -> Path:
    """Write the first of the best, or where there is no clear winner the cheapest of those that are alike."""
    best = choice.best[0] if choice.best else choice.cheapest
    lines = [f"# {choice.sentence}", f"method = {_word(best.tool.name)}"]
    layer = getattr(best.tool, "layer", None)
    lines += [f"layer = {_word(layer)}"] if isinstance(layer, str) else []
    lines += [f"model = {_word(digest(unwrap(best.tool.model)))}", f"clear = {str(bool(choice.best)).lower()}"]
    for one in choice.standings:
        lines += ["", "[[standing]]", f"title = {_word(one.title)}", *_evidence(one)]
    return write_bytes(path, ("\n".join(lines) + "\n").encode(), overwrite=overwrite)


def read(path: str | Path) -> Chosen:
    """What `save` wrote; InputError for another file."""
    plain = read_toml(path, f"{path} is not a choice that camscope choose --save wrote")
    method, layer, model = (plain.get(name) for name in ("method", "layer", "model"))
    if (
        not (isinstance(method, str) and isinstance(layer, str | None) and isinstance(model, str))
        or method not in METHODS
    ):
        raise InputError(
            f"{path} is not a choice that camscope choose --save wrote: expected the name of a method, of a layer if it has "
            "one, and the digest of a model, each as text"
        )
    return Chosen(method, layer, model)


def _evidence(one: Standing) -> list[str]:
    found = [f"images = {one.images}", f"seconds = {one.price:.4f}"]
    for name in one.values:
        if (estimate := one.estimate(name)) is not None:
            numbers = [one for one in (estimate.mean, estimate.low, estimate.high) if isfinite(one)]
            found.append(f"{name} = [{', '.join(f'{one:.4f}' for one in numbers)}]")
    return [*found, f"out = {_word(one.out)}"] if one.out else found


def _word(text: str) -> str:
    """A string as TOML has it, which is JSON's where nothing is beyond its escapes."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
