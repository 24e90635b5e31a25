"""Explainer: the template that every method fills in, and METHODS, the registry of them all."""

import math
import os
import platform
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from inspect import isabstract, signature
from typing import Any, ClassVar, TypeVar, final

import numpy as np
import torch
from torch import Tensor, nn

from camscope.cards import card_of, digest
from camscope.errors import CamscopeWarning, InputError, TargetError
from camscope.explainers.inputs import Item, Preprocessing, read_item
from camscope.explainers.scope import (
    Mode,
    OnNonFinite,
    Survey,
    calm,
    checked_finite,
    checked_input,
    expect_differentiable,
    home,
    survey,
    usable,
)
from camscope.explanation import MEANING, OK, ClassScore, Explanation
from camscope.hooks.base import unwrap
from camscope.layers import Layout
from camscope.structure import mapped
from camscope.targets import Question, Score
from camscope.version import __version__

METHODS: dict[str, type["Explainer"]] = {}
COMMON = ("model", "preprocess", "categories", "on_nonfinite")
TOP = 5

ExplainerClass = TypeVar("ExplainerClass", bound="type[Explainer]")


def register(cls: ExplainerClass) -> ExplainerClass:
    """Put a method into METHODS under its `name`: the CLI, the docs and the axiom tests find it there."""
    missing = [fact for fact in ("name", "paper") if not isinstance(getattr(cls, fact, None), str)]
    if missing or isabstract(cls):
        raise TypeError(f"{cls.__name__} cannot be registered: {', '.join(missing) or 'an abstract method'} is missing")
    if METHODS.setdefault(cls.name, cls) is not cls:
        raise ValueError(f"a method named {cls.name!r} is registered already: {METHODS[cls.name].__qualname__}")
    return cls


@dataclass
class Maps:
    """Raw maps (N,*s) of one score, and what is known of how they came about."""

    heat: Tensor
    layer: str | None = None
    layout: Layout | None = None
    zero_gradient: Tensor | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Run:
    """One call: the model as it was found, and each question with its maps."""

    known: Survey
    scores: list[Score]
    maps: list[Maps]


class Explainer(ABC):
    """Where a model looked. A method writes `heat`; everything else is here, once.

    `preprocess`: how an image becomes the model's input (default: that of a model camscope loaded). `categories`: class
    names by index. `mode`: "eval", or "as_is" for a model that is explained in train mode. `on_nonfinite`: "raise", or
    "warn" to go on with NaN or infinity.
    """

    name: ClassVar[str]
    paper: ClassVar[str]
    forwards: ClassVar[str] = "1"
    backwards: ClassVar[str] = "0"

    def __init__(
        self,
        model: nn.Module,
        *,
        preprocess: Any = None,
        categories: Sequence[str] | None = None,
        mode: Mode = "eval",
        on_nonfinite: OnNonFinite = "raise",
    ) -> None:
        if mode not in ("eval", "as_is") or on_nonfinite not in ("raise", "warn"):
            raise InputError(
                f"mode={mode!r}, on_nonfinite={on_nonfinite!r}: expected 'eval' | 'as_is' and 'raise' | 'warn'"
            )
        survey(model)
        self.model, self.mode, self.on_nonfinite = model, mode, on_nonfinite
        card = card_of(unwrap(model))
        self.preprocess = _preprocessing(preprocess if preprocess is not None else card.preprocess if card else None)
        self.categories = _names(categories if categories is not None else card.categories if card else None)

    @abstractmethod
    def heat(self, x: Tensor, score: Score) -> Tensor:
        """(N,C,*S) -> raw map (N,*s): as the method's formula has it, scaled by nothing."""

    def maps(self, x: Tensor, scores: Sequence[Score]) -> list[Maps]:
        """Maps of several scores of one input; a family that can share passes between them does it here."""
        return [Maps(self.heat(x, score)) for score in scores]

    @final
    def attribute(self, inputs: Tensor, target: Question = None, *args: Any, **kwargs: Any) -> Tensor:
        """(N,C,*S) -> raw maps (N,*s). `target`: see Score. The rest goes to the model after `inputs`."""
        return self._run(inputs, [target], args, kwargs).maps[0].heat

    @final
    def explain(self, image: Any, target: Question = None) -> Explanation:
        """One image (path, PIL image, uint8 array (H,W,3), or float tensor (C,H,W): the model's input) -> Explanation."""
        return self.explain_classes(image, [target])[0]

    @final
    def explain_classes(self, image: Any, targets: Sequence[Question]) -> list[Explanation]:
        """Several questions about one image, answered from one forward pass where the method allows it."""
        if isinstance(targets, str | int) or callable(targets):
            raise TargetError(f"explain_classes takes a list of questions; for one, explain(image, {targets!r})")
        questions = list(targets)
        if not questions:
            raise TargetError("no targets: pass a list of questions, e.g. [281, 285] or [None]")
        item = self._read(image)
        run = self._run(item.x[None], questions)
        digits = digest(run.known.model)
        return [self._explanation(0, item, run, which, digits) for which in range(len(questions))]

    @final
    def explain_batch(self, images: Sequence[Any], targets: Question = None) -> list[Explanation]:
        """Several images, each with its own target or all with one; inputs of one size share their passes."""
        if isinstance(images, str | os.PathLike):
            raise InputError(f"explain_batch takes a list of images; for one, explain({str(images)!r})")
        items = [self._read(image) for image in images]
        if not items:
            raise InputError("the batch is empty")
        plain = targets.tolist() if isinstance(targets, Tensor | np.ndarray) else targets
        each = list(plain) if isinstance(plain, list | tuple) else None
        if each is not None and len(each) != len(items):
            raise InputError(f"{len(each)} targets for {len(items)} images: give one, or one per image")
        results: dict[int, Explanation] = {}
        for shape in dict.fromkeys(item.x.shape for item in items):
            rows = [i for i, item in enumerate(items) if item.x.shape == shape]
            question = plain if each is None else [each[i] for i in rows]
            run = self._run(torch.stack([items[i].x for i in rows]), [question])
            digits = digest(run.known.model)
            results.update({i: self._explanation(n, items[i], run, 0, digits) for n, i in enumerate(rows)})
        return [results[i] for i in range(len(items))]

    @property
    def parameters(self) -> dict[str, Any]:
        """The method's own settings: its constructor's arguments that are not every method's."""
        names = [name for name in signature(type(self)).parameters if name not in COMMON]
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        return {name: value if isinstance(value, int | float | str) else str(value) for name, value in given.items()}

    def __repr__(self) -> str:
        settings = "".join(f", {name}={value!r}" for name, value in self.parameters.items())
        return f"{type(self).__name__}({type(self.model).__name__}{settings})"

    def _read(self, image: Any) -> Item:
        model = unwrap(self.model)
        return read_item(image, self.preprocess, model, home(model))

    def _run(
        self,
        x: Tensor,
        targets: Sequence[Question],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> "_Run":
        known = survey(self.model)
        if self.backwards != "0":
            expect_differentiable(known)
        with calm(known, self.mode):
            x = checked_input(x, known)
            args, kwargs = mapped(args, usable), mapped(dict(kwargs or {}), usable)
            scores = [Score(known.model, t, categories=self.categories, args=args, kwargs=kwargs) for t in targets]
            maps = self.maps(x, scores)
        for one in maps:
            checked_finite(f"the map of {self.name}", one.heat, self.on_nonfinite)
            for status in sorted({status for status in statuses(one) if status != OK}):
                warnings.warn(f"{self.name}: {MEANING[status]}", CamscopeWarning, stacklevel=3)
        return _Run(known, scores, maps)

    def _explanation(self, i: int, item: Item, run: "_Run", which: int, digits: str) -> Explanation:
        score, maps = run.scores[which], run.maps[which]
        index, values = score.class_of(i), score.values
        return Explanation(
            heat=maps.heat[i].cpu().numpy().copy(),
            method=self.name,
            target=index,
            label=score.label_of(i),
            score=float(values[i]) if values is not None else float("nan"),
            probability=_probability(score, i, index),
            top=_top(score, i),
            layer=maps.layer,
            layout=str(maps.layout) if maps.layout else None,
            input_size=tuple(item.x.shape[1:]),
            placement=item.placement,
            status=statuses(maps)[i],
            notes=self._notes(maps, item, run.known),
            name=item.name,
            parameters=self._settings(item),
            versions=_versions(),
            model=digits,
            image=item.image,
            seen=item.seen,
        )

    def _settings(self, item: Item) -> dict[str, Any]:
        return self.parameters if item.image is None else {**self.parameters, "preprocess": repr(self.preprocess)}

    def _notes(self, maps: Maps, item: Item, known: Survey) -> tuple[str, ...]:
        notes = list(maps.notes)
        if known.model is not self.model:
            notes.append(f"the eager model inside {type(self.model).__name__} was explained")
        elif known.compiled:
            notes.append(f"{type(self.model).__name__} is compiled, or a part of it: its eager form was explained")
        if item.placement is None:
            notes.append("the preprocessing has no known geometry: the map is drawn on the model's input")
        return tuple(notes)


def statuses(maps: Maps) -> list[str]:
    """One word per sample: "ok", or the gravest key of `MEANING` that applies."""
    flat = maps.heat.detach().flatten(1)
    low, high = flat.amin(1).tolist(), flat.amax(1).tolist()
    zero = [False] * len(flat) if maps.zero_gradient is None else maps.zero_gradient.tolist()
    return [_status(flat.shape[1], zero[i], low[i], high[i]) for i in range(len(flat))]


def _status(cells: int, zero_gradient: bool, low: float, high: float) -> str:
    if not (math.isfinite(low) and math.isfinite(high)):
        return "nonfinite"
    if zero_gradient:
        return "zero_gradient"
    if cells == 1:
        return "no_spatial_resolution"
    if not high > 0:
        return "no_positive_evidence"
    return "flat" if low == high else OK


def _probability(score: Score, i: int, index: int | None) -> float | None:
    return None if index is None else score.chances(i)[index]


def _top(score: Score, i: int) -> tuple[ClassScore, ...]:
    if score.logits is None:
        return ()
    logits = score.logits[i].double().cpu()
    chances = score.chances(i)
    best = logits.topk(min(TOP, len(logits))).indices.tolist()
    return tuple(ClassScore(k, score.name_of(k), float(logits[k]), chances[k]) for k in best)


def _versions() -> dict[str, str]:
    return {"camscope": __version__, "torch": str(torch.__version__), "python": platform.python_version()}


def _names(given: Any) -> tuple[str, ...] | None:
    """Class names by index, of a sequence or of a dict from index to name."""
    if isinstance(given, Mapping):
        given = [given[key] for key in sorted(given, key=int)]
    return None if given is None else tuple(map(str, given))


def _preprocessing(given: Any) -> Preprocessing | None:
    if given is None:
        return None
    from camscope.images.preprocess import as_preprocess

    ready: Preprocessing = as_preprocess(given)
    return ready
