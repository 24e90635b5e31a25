"""Where explanations of one image agree: maps that look the same, with the reason where it is known, and correlations.

Coincidences in words.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Literal, NoReturn

import numpy as np
import torch
from torch import Tensor

from camscope.errors import InputError
from camscope.explainers.cam.base import CAM, SPACE, LayerExplainer
from camscope.explainers.cam.layer_features import Features
from camscope.explainers.core.base import Explainer
from camscope.explainers.core.maps import Maps
from camscope.explanation import Explanation, Floats
from camscope.geometry import Placement
from camscope.targets import Score

SAME = 1e-4  # of the maximum
EVEN = "the gradient there is one number per channel, as where a model pools what it reads"
POSITIVE = "nothing there is negative"
CLASSIFIER = (
    "cam"  # weighs by the classifier's row, which is a gradient that is one number per channel, times the cells
)


@dataclass(frozen=True, eq=False)
class Coincidence:
    """Explanations of one class whose displayed map is the same, to 1e-4 of its maximum.

    `because`: what was found true of the layer in this pass, under which the formulas of `explained` are one whatever
    the numbers; both are empty where the maps are the same here and no more is known.
    """

    explanations: tuple[Explanation, ...]
    because: tuple[str, ...] = ()
    explained: tuple[Explanation, ...] = ()


class Witness(LayerExplainer):
    """Rides along in a pass that others share, and notes what is true of a layer. Its map means nothing."""

    name, paper = "witness", ""
    backwards = "1"
    needs_gradient = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.facts: list[frozenset[str]] = []  # one entry a score, in order

    def combine(self, features: Features) -> Tensor:
        """(1,2): a map that no status applies to."""
        A, g = features.activation, features.gradient.flatten(2)
        even = (g - g.mean(SPACE, keepdim=True)).abs().amax() <= SAME * g.abs().amax()
        true = {EVEN: bool(even), POSITIVE: bool(A.amin() >= 0)}
        self.facts.append(frozenset(fact for fact, holds in true.items() if holds))
        return A.new_tensor([[0.0, 1.0]])

    def _maps(self, features: Features) -> Maps:
        return Maps(self.combine(features), features.layer)


def witnesses(tools: Sequence[Explainer]) -> list[Witness]:
    """One for each layer at which several methods might coincide, and which a gradient reaches anyway."""
    layers: dict[object, list[LayerExplainer]] = {}
    for tool in tools:
        if isinstance(tool, LayerExplainer) and (_reads_gradient(tool) or tool.name == CLASSIFIER):
            layers.setdefault((tool.mode, tool.company, tool.layer, str(tool.layout), tool.reshape), []).append(tool)
    made = []
    for found in layers.values():
        first = next((tool for tool in found if tool.needs_gradient), None)
        if first is not None and len(found) > 1:
            witness = first.sibling(Witness)
            made += [witness] if isinstance(witness, Witness) else []
    return made


def coincidences(
    explanations: Sequence[Explanation], tools: Sequence[Explainer], facts: Mapping[str | None, frozenset[str]]
) -> list[Coincidence]:
    """Groups among explanations of one class; `tools` made them, `facts` are what is true of each layer.

    A map without positive evidence coincides with nothing: its status says so already.
    """
    groups: list[list[int]] = []
    for n, one in enumerate(explanations):
        if not one.heatmap("grid").any():
            continue
        home = next((group for group in groups if _looks_same(explanations[group[0]], one)), None)
        groups.append([n]) if home is None else home.append(n)
    found = []
    for group in (group for group in groups if len(group) > 1):
        alike = tuple(explanations[n] for n in group)
        layers = {one.layer for one in alike}
        known = facts.get(layers.pop()) if len(layers) == 1 else None
        because, explained = ((), []) if known is None else _reason(known, [tools[n] for n in group])
        found.append(Coincidence(alike, because, tuple(alike[i] for i in explained)))
    return found


def correlations(explanations: Sequence[Explanation], kind: Literal["pearson", "spearman"] = "pearson") -> Floats:
    """(M,M): correlation of the maps as they are displayed, on the finest grid among them; NaN beside a constant map."""
    if kind not in ("pearson", "spearman"):
        raise InputError(f"kind={kind!r}: expected 'pearson' or 'spearman'")
    finest = np.max([one.grid for one in explanations], axis=0)
    place = Placement.identity(finest.tolist())
    rows = np.stack([place.project(one.heatmap("grid").astype(np.float64))[0].ravel() for one in explanations])
    if kind == "spearman":
        rows = np.stack([_ranks(row) for row in rows])
    centred = rows - rows.mean(1, keepdims=True)
    norms = np.linalg.norm(centred, axis=1)
    known = norms > 1e-12 * np.abs(rows).max(1)  # a constant map leaves rounding behind
    scaled = centred / np.where(known, norms, np.nan)[:, None]
    return np.asarray((scaled @ scaled.T).clip(-1, 1))


def _ranks(values: Floats) -> Floats:
    """(M,): ranks, the mean one among equals."""
    _, which, counts = np.unique(values, return_inverse=True, return_counts=True)
    return np.asarray((counts.cumsum() - (counts - 1) / 2)[which])


def _looks_same(one: Explanation, other: Explanation) -> bool:
    return one.grid == other.grid and _same(one.heatmap("grid"), other.heatmap("grid"))


def _same(one: Floats, other: Floats) -> bool:
    return bool(np.abs(one - other).max() <= SAME)


def _reads_gradient(tool: Explainer) -> bool:
    """Whether the map is a formula of the activation and the score's gradient there, and of nothing else."""
    return isinstance(tool, CAM) and tool.question == "score" and not (tool.runs_model or tool.second_order)


def _reason(facts: frozenset[str], tools: Sequence[Explainer]) -> tuple[tuple[str, ...], list[int]]:
    """As little of the facts as makes the most formulas one, and the numbers of the methods whose formulas they are."""
    best: tuple[tuple[str, ...], list[int]] = (), []
    given = [fact for fact in (EVEN, POSITIVE) if fact in facts]
    for because in (some for size in range(len(given) + 1) for some in combinations(given, size)):
        drawn = {t: maps for t, tool in enumerate(tools) if (maps := _formula(tool, because)) is not None}
        first = next(iter(drawn.values()), None)
        alike = [t for t, maps in drawn.items() if first is not None and _same(first, maps)]
        if len(alike) > max(1, len(best[1])):
            best = because, alike
    return best


def _formula(tool: Explainer, because: Sequence[str]) -> Floats | None:
    """(N,h,w): what a method makes of numbers drawn at random of which only this is true; None if it reads others."""
    draw = torch.Generator(device="cpu").manual_seed(0)
    A = torch.randn((8, 5, 3, 4), generator=draw, dtype=torch.float64, device="cpu")
    g = torch.randn((8, 5, 3, 4), generator=draw, dtype=torch.float64, device="cpu")
    A = A.abs() if POSITIVE in because else A
    g = g[..., :1, :1].expand_as(g) if EVEN in because else g
    if tool.name == CLASSIFIER and EVEN in because:
        heat = (g * A).sum(1)
    elif isinstance(tool, CAM) and _reads_gradient(tool):
        heat = tool.combine(_features(tool, A, g))
    else:
        return None
    shown = heat.relu().numpy()
    peaks = shown.max((1, 2), keepdims=True)
    return np.asarray(shown / np.where(peaks > 0, peaks, 1))


def _features(tool: Explainer, activation: Tensor, gradient: Tensor) -> Features:
    score = Score(tool.model)
    values = activation.new_zeros(len(activation))
    return Features(
        "", activation, activation, score, values, None, _nothing, gradient, again=_nothing, curvature=_nothing
    )


def _nothing(*_: object) -> NoReturn:
    raise NotImplementedError("a formula of activation and gradient reads nothing else")


def sentences(coincidences: Sequence[Coincidence], methods: Mapping[int, str], questions: int) -> tuple[str, ...]:
    """What coincides and why; what holds for several of so many questions is said once.

    `methods`: the name under which each explanation's method goes, by the explanation's id.
    """
    said: dict[tuple[tuple[str, ...], str, str], list[Coincidence]] = {}
    for group in coincidences:
        words = _in_words(group, [_quoted(methods[id(one)]) for one in group.explanations])
        said.setdefault(words, []).append(group)
    return tuple(
        f"{_listed(names)} are one map{where}{_of(groups, questions)}: {why}{_below(names, groups)}"
        for (names, where, why), groups in said.items()
    )


def _quoted(name: str) -> str:
    """`'gradcam, denoised'`: a wrapper's title has a comma of its own, and stands in a list."""
    return f"'{name}'" if "," in name else name


def _in_words(group: Coincidence, methods: Sequence[str]) -> tuple[tuple[str, ...], str, str]:
    """The names of the methods, ` at layer4`, and why they coincide."""
    layers = {one.layer for one in group.explanations}
    if len(layers) > 1:
        names = tuple(f"{name} at {one.layer}" for name, one in zip(methods, group.explanations, strict=True))
        return names, "", _why(group, names)
    layer = layers.pop()
    return tuple(methods), f" at {layer}" if layer else "", _why(group, methods)


def _why(group: Coincidence, names: Sequence[str]) -> str:
    explained = [name for name, one in zip(names, group.explanations, strict=True) if one in group.explained]
    if not explained:
        return "the maps are the same here"
    rest = [name for name in names if name not in explained]
    whose = f"the formulas of {_listed(explained)} are one" if rest else "their formulas are one"
    because = f"{' and '.join(group.because)}, so " if group.because else ""
    return f"{because}{whose}" + (f"; {_listed(rest)} {_agrees(rest)} here" if rest else "")


def _below(names: Sequence[str], groups: Sequence[Coincidence]) -> str:
    """Which of them go below zero, where others do not: the same cell by cell, they differ where a picture interpolates."""
    heats = [[float(group.explanations[i].heat.min()) for group in groups] for i in range(len(names))]
    signed = [name for name, lowest in zip(names, heats, strict=True) if min(lowest) < 0]
    if len(signed) in (0, len(names)):
        return ""
    have, their = ("has", "its picture") if len(signed) == 1 else ("have", "their pictures")
    return f"; {_listed(signed)} also {have} a negative part, which narrows {their} between the cells"


def _agrees(names: Sequence[str]) -> str:
    return "is the same" if len(names) == 1 else "are the same"


def _of(groups: Sequence[Coincidence], questions: int) -> str:
    """For which classes, where there are several."""
    if questions == 1:
        return ""
    if len(groups) == questions:
        return " for every class"
    return f" for {_listed([group.explanations[0].label for group in groups])}"


def _listed(names: Sequence[str]) -> str:
    """`a, b and c`"""
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
