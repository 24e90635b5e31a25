"""Sanity: whether a map notices that its model has lost what it learnt (Adebayo et al. 2018, arXiv:1810.03292).

The parts of a copy of the model lose their values, from the output down, and each time the map is made again and compared
with that of the trained model, beside what maps of different images have in common. A map that is still alike when nothing
is left of the training shows the image, not the model. That it changes is no merit: noise changes too (Binder et al. 2023).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from camscope.errors import InputError, NonFiniteError, TargetError, UndefinedError
from camscope.explainers.core.base import Explainer
from camscope.explainers.core.batching import seeds as drawn_seeds
from camscope.explainers.core.evaluation_context import expect_one_of, expect_whole
from camscope.geometry import Placement
from camscope.metrics.base import Floats, metric
from camscope.metrics.explainer_probe import Probe, single
from camscope.metrics.randomization_result import Randomised
from camscope.metrics.similarity import (
    BLOCK,
    CELL,
    SIMILARITIES,
    are_signed,
    as_picture,
    correlations,
    hog_features,
    on_scale,
    ranks,
    windowed,
)
from camscope.metrics.weight_randomization import Part, copied, leave_nothing, named, parts, reset
from camscope.targets import Question

Order = Literal["cascading", "independent"]


def randomisation(
    tool: Explainer,
    x: Tensor,
    target: Question = None,
    *,
    order: Order = "cascading",
    layers: Sequence[str | nn.Module] | None = None,
    seeds: Sequence[int] = (0, 1, 2),
    similarities: Sequence[str] | None = None,
) -> Randomised:
    """(N,C,*S) -> how alike the maps stay, step by step, as the model's parts lose their values; see `untrained`.

    `order`: "cascading", each step on top of those before it, which ends with an untrained model; "independent", one part
    at a time. `layers`: the parts, output first; None: at most 20, found. `seeds`: one run each, 3 at least for a verdict
    worth the name. Maps are compared on the input's pixels; `similarities`: of ssim, spearman, hog and pearson; None: the
    first three, hog where it has room. The questions are those that the trained model settles: of the random one, the same
    classes. The model is copied; it stays as it was. x holds two images at least, for the null: maps of different images;
    five for a verdict; 11 have 55 pairs.
    """
    expect_one_of("order", order, "cascading", "independent")
    similarities = _usual(x) if similarities is None else similarities
    _expect(x, seeds, similarities)
    probe = Probe.of(tool, x, target)
    clean = _on_input(_maps(probe, x), x)
    steps = parts(tool.model, x[:1]) if layers is None else named(tool.model, layers)
    compared = Compared(clean, similarities)
    values = {name: np.empty((len(seeds), len(steps), len(x))) for name in similarities}
    shown = [clean[0]]
    for s, seed in enumerate(seeds):
        for k, other in enumerate(_models(probe.tool, steps, order, seed)):
            maps = _on_input(_maps(probe.with_tool(other), x), x)
            shown += [maps[0]] if s == 0 else []
            for name in similarities:
                values[name][s, k] = compared.with_same(name, maps)
    null = {name: compared.null(name) for name in similarities}
    return Randomised(
        tool.title,
        order,
        tuple(one.name for one in steps),
        tuple(seeds),
        values,
        null,
        compared.signed,
        np.stack(shown),
        whole=leave_nothing(tool.model, steps),
    )


@metric(
    "random-logit",
    needs="explainer",
    formula="Spearman(map of the class, map of another one)",
    paper="Sixt et al. 2020, arXiv:1912.09818, where it is SSIM",
    low=-1.0,
    higher_is_better=False,
    chance="1 for a map that does not depend on the class",
)
def random_logit(
    tool: Explainer,
    x: Tensor,
    target: Question = None,
    *,
    other: Question = None,
    similarity: str = "spearman",
    seed: int = 0,
) -> float:
    """(1,C,*S) -> how alike the maps of two classes are. `other`: the second one; None draws any but the first.

    A model of two classes, or of one output, has maps that mirror one another where they are signed: -1.
    """
    expect_whole(seed=seed)
    probe = Probe.of(tool, single(x), target)
    if other is None:
        own = probe.score.class_of(0)
        if own is None or probe.classes is None or probe.classes < 2:
            raise TargetError(
                "the question is not one of several classes: pass other=, the question to compare it with"
            )
        step = int(
            torch.randint(1, probe.classes, (), generator=torch.Generator(device="cpu").manual_seed(seed), device="cpu")
        )
        other = (own + step) % probe.classes
    second = Probe.of(probe.tool, x, other)
    one, two = (_on_input(_maps(each, x), x)[0] for each in (probe, second))
    for heat, asked in ((one, probe), (two, second)):
        if not heat.any():
            raise UndefinedError(
                f"the map of {asked.score.label_of(0)} is zero everywhere: there is nothing to compare"
            )
    return SIMILARITIES[similarity](one, two)


class Compared:
    """Maps (N,*S) of the trained model, ready to be compared with others, and with one another."""

    def __init__(self, maps: Floats, similarities: Sequence[str]) -> None:
        self.scaled = [_scaled(one) for one in maps]
        self.signed = are_signed([one for one in self.scaled if one is not None])
        self._rows = {name: self._features(name, self.scaled) for name in similarities if name != "ssim"}

    def with_same(self, name: str, maps: Floats) -> Floats:
        """(N,*S) -> (N,): each with the trained model's map of the same image; NaN where there is no number."""
        others = [_scaled(one) for one in maps]
        if name == "ssim":
            return np.array([self._ssim(*pair) for pair in zip(self.scaled, others, strict=True)])
        return correlations(self._rows[name], self._features(name, others))

    def null(self, name: str) -> Floats:
        """(N,N): maps of different images; NaN beside itself."""
        count = len(self.scaled)
        made = np.full((count, count), np.nan)
        for i in range(count - 1):
            rest = range(i + 1, count)
            if name == "ssim":
                found = np.array([self._ssim(self.scaled[i], self.scaled[j]) for j in rest])
            else:
                rows = self._rows[name]
                found = correlations(np.broadcast_to(rows[i], rows[i + 1 :].shape), rows[i + 1 :])
            made[i, i + 1 :] = made[i + 1 :, i] = found
        return made

    def _ssim(self, one: Floats | None, other: Floats | None) -> float:
        if one is None or other is None:
            return np.nan
        return windowed(as_picture(one, self.signed), as_picture(other, self.signed))

    def _features(self, name: str, maps: Sequence[Floats | None]) -> Floats:
        """(N,M): what of each map is correlated; NaN for a map without a scale."""
        made = [None if one is None else FEATURES[name](one) for one in maps]
        length = next((len(one) for one in made if one is not None), 1)
        return np.stack([np.full(length, np.nan) if one is None else one for one in made])


FEATURES: Mapping[str, Callable[[Floats], Floats]] = {"pearson": np.ravel, "spearman": ranks, "hog": hog_features}


def _models(tool: Explainer, steps: Sequence[Part], order: Order, seed: int) -> Iterator[Explainer]:
    """The explainer after each step; a part's draws are the same in either order."""
    other = copied(tool)
    for step, one in zip(steps, drawn_seeds(len(steps), torch.Generator(device="cpu").manual_seed(seed)), strict=True):
        other = copied(tool) if order == "independent" else other
        reset(other.model, step.modules, one)
        yield other


def _maps(probe: Probe, x: Tensor) -> Floats:
    """(N,*s): NaN for a map that came out with NaN or infinity, as of a net of random weights it may."""
    try:
        return probe.maps(x, range(len(x)))
    except NonFiniteError:
        if len(x) == 1:
            return np.full((1, *x.shape[2:]), np.nan)
    each = [probe.alone(i) for i in range(len(x))]
    return np.concatenate([_on_input(_maps(one, one.x), one.x) for one in each])


def _on_input(maps: Floats, x: Tensor) -> Floats:
    """(N,*s) -> (N,*S): on the input's pixels."""
    place = Placement.identity(tuple(x.shape[2:]))
    return np.stack([place.project(one)[0] for one in maps])


def _scaled(values: Floats) -> Floats | None:
    """Divided by its largest size; None for a map without one: of zeros, or with NaN."""
    if not np.isfinite(values).all():
        return None
    try:
        return on_scale(values)
    except UndefinedError:
        return None


def _usual(x: Tensor) -> tuple[str, ...]:
    roomy = x.ndim == 4 and min(x.shape[2:]) >= BLOCK * CELL
    return ("ssim", "spearman", "hog") if roomy else ("ssim", "spearman")


def _expect(x: Tensor, seeds: Sequence[int], similarities: Sequence[str]) -> None:
    if len(x) < 2:
        raise InputError(f"x is {tuple(x.shape)}: expected two images or more: the null is of maps of different images")
    if not seeds or not similarities:
        raise InputError("seeds and similarities name one at least, such as seeds=(0, 1, 2)")
    for seed in seeds:
        expect_whole(seeds=seed)
    if unknown := [one for one in similarities if one not in ("ssim", *FEATURES)]:
        raise InputError(f"no similarity {unknown[0]!r} here; expected some of {', '.join(('ssim', *FEATURES))}")
