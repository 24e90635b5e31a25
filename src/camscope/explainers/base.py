"""Explainer: the template that every method fills in, and METHODS, the registry of them all."""

import difflib
import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from inspect import isabstract, signature
from typing import Any, ClassVar, TypeVar, cast, dataclass_transform, final

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn

from camscope.cards import card_of, digest
from camscope.errors import CamscopeWarning, InputError, TargetError
from camscope.explainers.facts import answered, versions
from camscope.explainers.inputs import Item, Preprocessing, read_item
from camscope.explainers.maps import Maps, statuses
from camscope.explainers.scope import (
    Mode,
    OnNonFinite,
    Precision,
    Survey,
    calm,
    checked_finite,
    checked_input,
    expect_differentiable,
    expect_one_of,
    home,
    precisely,
    prepared,
    survey,
    usable,
)
from camscope.explanation import MEANING, OK, Explanation
from camscope.hooks.base import unwrap
from camscope.structure import mapped
from camscope.targets import Difference, Question, Scene, Score, Target, embedding_of

METHODS: dict[str, type["Explainer"]] = {}
COMMON = ("model", "preprocess", "categories", "on_nonfinite")  # of no weight for the map

ExplainerClass = TypeVar("ExplainerClass", bound="type[Explainer]")


@dataclass_transform(kw_only_default=True, eq_default=False)
def register(cls: ExplainerClass) -> ExplainerClass:
    """Put a method into METHODS under its `name`: the CLI, the docs and the axiom tests find it there.

    A setting of a method is an annotated attribute with its default, `samples: int = 25`; its constructor takes it.
    """
    dataclass(kw_only=True, eq=False, repr=False)(cls)
    missing = [fact for fact in ("name", "paper") if not isinstance(getattr(cls, fact, None), str)]
    if missing or isabstract(cls):
        raise TypeError(f"{cls.__name__} cannot be registered: {', '.join(missing) or 'an abstract method'} is missing")
    if METHODS.setdefault(cls.name, cls) is not cls:
        raise ValueError(f"a method named {cls.name!r} is registered already: {METHODS[cls.name].__qualname__}")
    return cls


Later = Callable[[], Maps]  # a map that takes passes of its own, made when the shared ones are over
Watch = Callable[[Sequence["Explainer"]], None]  # told which methods work next: those that share a pass, or one alone


@dataclass(frozen=True)
class _Run:
    """One call: the model as it was found, and each question with its maps."""

    known: Survey
    scores: list[Score]
    maps: list[Maps]


@dataclass(eq=False, repr=False)
class Explainer(ABC):
    """Where a model looked. A method writes `heat`; everything else is here, once.

    `preprocess`: how an image becomes the model's input (default: that of a model camscope loaded). `categories`: class
    names by index. `mode`: "eval", or "as_is" for a model that is explained in train mode. `on_nonfinite`: "raise", or
    "warn" to go on with NaN or infinity. `precision`: "bf16" runs the model in bfloat16 with the channels last in
    memory, about twice as fast; Grad-CAM's maps keep their order (three models, 40 photographs: ranks correlate at
    0.977 or more); where terms cancel, as in Grad-CAM++ and XGrad-CAM at a LayerNorm, nothing may be left of them.
    Default: the model's own.
    """

    model: nn.Module
    _: KW_ONLY
    preprocess: Any = None
    categories: Sequence[str] | None = None
    mode: Mode = "eval"
    on_nonfinite: OnNonFinite = "raise"
    precision: Precision | None = None

    name: ClassVar[str]
    paper: ClassVar[str]
    forwards: ClassVar[str] = "1"
    backwards: ClassVar[str] = "0"
    control: ClassVar[bool] = False  # a floor for comparisons: it knows nothing of the model's answer
    class_specific: ClassVar[bool] = True  # whether the map depends on the target

    def __post_init__(self) -> None:
        expect_one_of("mode", self.mode, "eval", "as_is")
        expect_one_of("on_nonfinite", self.on_nonfinite, "raise", "warn")
        expect_one_of("precision", self.precision, None, "bf16")
        survey(self.model)
        card = card_of(unwrap(self.model))
        known = card.preprocess if self.preprocess is None and card else self.preprocess
        self.preprocess = _preprocessing(known)
        self.categories = _names(card.categories if self.categories is None and card else self.categories)

    @abstractmethod
    def heat(self, x: Tensor, score: Score) -> Tensor:
        """(N,C,*S) -> raw map (N,*s): as the method's formula has it, scaled by nothing."""

    def maps(self, x: Tensor, scores: Sequence[Score]) -> list[Maps]:
        """Maps of several scores of one input; a family that can share passes between them does it here."""
        return [Maps(self.heat(x, score)) for score in scores]

    def settled(self, x: Tensor, score: Score) -> "Explainer":
        """The same method, with whatever it chooses for itself chosen for this input."""
        return self

    @property
    def title(self) -> str:
        """The method as a result names it."""
        return self.name

    @property
    def takes_gradients(self) -> bool:
        """Whether any of the model's are taken."""
        return self.backwards != "0"

    def asked(self, target: Question) -> Question:
        """The question that a target means; TargetError for one that the method does not answer."""
        return target

    @property
    def company(self) -> Hashable:
        """Methods of one company can share passes: `maps_of` makes the maps of them all."""
        return id(self)

    @staticmethod
    def maps_of(tools: "Sequence[Explainer]", x: Tensor, scores: Sequence[Score]) -> Sequence[Sequence[Maps | Later]]:
        """[method][score] of one company; a family that can share passes between methods does it here."""
        return [tool.maps(x, scores) for tool in tools]

    @final
    def attribute(self, inputs: Tensor, target: Question = None, *args: Any, **kwargs: Any) -> Tensor:
        """(N,C,*S) -> raw maps (N,*s). `target`: see Score. The rest goes to the model after `inputs`."""
        return _run([self], inputs, [target], args, kwargs)[0].maps[0].heat

    @final
    def explain(self, image: Any, target: Question = None) -> Explanation:
        """One image (path, PIL image, uint8 array (H,W,3), or float tensor (C,H,W): the model's input) -> Explanation."""
        return explain_each([self], image, [target])[0][0]

    @final
    def explain_classes(self, image: Any, targets: Sequence[Question]) -> list[Explanation]:
        """Several questions about one image, answered from one forward pass where the method allows it."""
        if isinstance(targets, str | int | Difference) or callable(targets):
            raise TargetError(f"explain_classes takes a list of questions; for one, explain(image, {targets!r})")
        return explain_each([self], image, list(targets))[0]

    @final
    def explain_methods(
        self, image: Any, methods: "Sequence[str | type[Explainer] | Explainer]", target: Question = None
    ) -> list[Explanation]:
        """One question about one image, answered by several methods with this one's settings, from as few passes as possible.

        `methods`: names, classes, or explainers of the same model. Those that look at layers share one forward and one
        backward pass.
        """
        if isinstance(methods, str):
            raise InputError(f"explain_methods takes a list of methods; for one, explain_methods(image, [{methods!r}])")
        tools = [one if isinstance(one, Explainer) else self.sibling(one) for one in methods]
        return [row[0] for row in explain_each(tools, image, [target])]

    def sibling(self, method: "str | type[Explainer]") -> "Explainer":
        """Another method for the same model, with the same settings where it has them."""
        kind = kind_of(method)
        shared = [name for name in signature(kind).parameters if _declared(name, kind) is _declared(name, type(self))]
        return kind(**{name: getattr(self, name) for name in shared})

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
            question = self._asked_of([plain if each is None else each[i] for i in rows], [items[i] for i in rows])
            run = _run([self], torch.stack([items[i].x for i in rows]), [question])[0]
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
        usual = {name: one.default for name, one in signature(type(self)).parameters.items()}
        changed = {name: value for name, value in self.parameters.items() if value != usual.get(name)}
        settings = "".join(f", {name}={value!r}" for name, value in changed.items())
        return f"{type(self).__name__}({type(self.model).__name__}{settings})"

    def _asked_of(self, targets: Sequence[Question], items: Sequence[Item]) -> Question:
        """What is asked of several inputs, each question in the scene of its own image; one where all are the same."""
        seen = [_in_scene(target, self._scene(item)) for target, item in zip(targets, items, strict=True)]
        return seen[0] if all(one is seen[0] for one in seen) else cast(Question, seen)

    def _scene(self, item: Item) -> Scene:
        place = item.placement
        card = card_of(unwrap(self.model))
        return Scene(
            input_size=tuple(item.x.shape[1:]),
            image_size=place.image_size if place else None,
            to_input=place.to_input if place else _unplaced,
            to_image=place.to_image if place else _unplaced,
            embed=self._embedded,
            embed_text=card.embed_text if card else None,
        )

    def _embedded(self, image: Any) -> Tensor:
        """(D,): what the model makes of another image."""
        known, x = survey(self.model), self._read(image).x[None]
        with calm(known, self.mode), precisely(self.precision, known) as casts:
            score = Score(known.model, around=casts)
            return embedding_of(score.forward(prepared(checked_input(x, known), self.precision)))[0].detach()

    def _read(self, image: Any) -> Item:
        model = unwrap(self.model)
        return read_item(image, self.preprocess, model, home(model))

    def _explanation(self, i: int, item: Item, run: "_Run", which: int, digits: str) -> Explanation:
        score, maps = run.scores[which], run.maps[which]
        return Explanation(
            heat=maps.heat[i].cpu().numpy().copy(),
            method=self.title,
            **answered(score, i),
            layer=maps.layer,
            layout=str(maps.layout) if maps.layout else None,
            input_size=tuple(item.x.shape[1:]),
            placement=item.placement,
            status=statuses(maps)[i],
            notes=self._notes(maps.notes_of(i), item, run.known),
            name=item.name,
            parameters=self._settings(item),
            versions=versions(),
            model=digits,
            image=item.image,
            seen=item.seen,
        )

    def _settings(self, item: Item) -> dict[str, Any]:
        return self.parameters if item.image is None else {**self.parameters, "preprocess": repr(self.preprocess)}

    def _notes(self, found: tuple[str, ...], item: Item, known: Survey) -> tuple[str, ...]:
        notes = list(found)
        if known.model is not self.model:
            notes.append(f"the eager model inside {type(self.model).__name__} was explained")
        elif known.compiled:
            notes.append(f"{type(self.model).__name__} is compiled, or a part of it: its eager form was explained")
        if item.placement is None:
            notes.append("the preprocessing has no known geometry: the map is drawn on the model's input")
        return tuple(notes)


def kind_of(method: str | type[Explainer]) -> type[Explainer]:
    """The method of a name, or the class itself; InputError for a name that is none."""
    kind = method if isinstance(method, type) else METHODS.get(method)
    if kind is None:
        near = difflib.get_close_matches(str(method), METHODS, n=3, cutoff=0.0)
        raise InputError(f"no method {method!r}; nearest names: {', '.join(near)}")
    return kind


def explain_each(
    tools: Sequence[Explainer], image: Any, targets: Sequence[Question], *, watch: Watch | None = None
) -> list[list[Explanation]]:
    """[method][target]: what several methods say of one image of one model, from as few passes as possible.

    `watch`: told which methods work next, for a progress bar or a clock.
    """
    if not tools or not targets:
        raise TargetError("no targets, or no methods: pass one at least of each, e.g. targets [281, 285] or [None]")
    first = tools[0]
    for tool in tools[1:]:
        if unwrap(tool.model) is not unwrap(first.model):
            raise InputError(f"{first!r} and {tool!r} are not of one model: explain each by itself")
        for setting in ("preprocess", "categories"):
            if getattr(tool, setting) != getattr(first, setting):
                raise InputError(f"{first!r} and {tool!r} have another {setting}: explain each by itself")
    item = first._read(image)
    scene = first._scene(item)
    runs = _run(tools, item.x[None], [_in_scene(target, scene) for target in targets], watch=watch)
    digits = digest(runs[0].known.model)
    return [
        [tool._explanation(0, item, run, which, digits) for which in range(len(targets))]
        for tool, run in zip(tools, runs, strict=True)
    ]


def _run(
    tools: Sequence[Explainer],
    x: Tensor,
    targets: Sequence[Question],
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    watch: Watch | None = None,
) -> list[_Run]:
    known = survey(tools[0].model)
    if any(tool.takes_gradients for tool in tools):
        expect_differentiable(known)
    companies: dict[Hashable, list[int]] = {}
    for t, tool in enumerate(tools):
        companies.setdefault((tool.mode, tool.company), []).append(t)
    runs: dict[int, _Run] = {}
    for numbers in companies.values():
        first, company = tools[numbers[0]], [tools[t] for t in numbers]
        with calm(known, first.mode), precisely(first.precision, known) as casts:
            inputs = prepared(checked_input(x, known), first.precision)
            extra, named = mapped(args, usable), mapped(dict(kwargs or {}), usable)
            asked = [first.asked(target) for target in targets]
            facts = {"categories": first.categories, "args": extra, "kwargs": named, "around": casts}
            scores = [Score(known.model, one, **facts) for one in asked]
            made = _made(company, inputs, scores, watch)
        runs.update({t: _Run(known, scores, maps) for t, maps in zip(numbers, made, strict=True)})
    for t, tool in enumerate(tools):
        for one in runs[t].maps:
            checked_finite(f"the map of {tool.title}", one.heat, tool.on_nonfinite)
            for status in sorted({status for status in statuses(one) if status != OK}):
                warnings.warn(f"{tool.title}: {MEANING[status]}", CamscopeWarning, stacklevel=3)
    return [runs[t] for t in range(len(tools))]


def _made(tools: Sequence[Explainer], x: Tensor, scores: Sequence[Score], watch: Watch | None) -> list[list[Maps]]:
    """[method][score] of one company: what its shared passes give, then what takes passes of its own."""
    if watch is not None:
        watch(tools)
    made: list[list[Maps]] = []
    for tool, row in zip(tools, tools[0].maps_of(tools, x, scores), strict=True):
        made.append([])
        for one in row:
            if callable(one) and watch is not None:
                watch([tool])
            made[-1].append(one() if callable(one) else one)
    return made


def _in_scene(target: Question, scene: Scene) -> Question:
    return target.in_scene(scene) if isinstance(target, Target) else target


def _unplaced(points: ArrayLike) -> NDArray[Any]:
    raise TargetError("the preprocessing has no known geometry: a place on the image cannot be found on the input")


def _declared(setting: str, kind: type) -> type | None:
    """The class that a setting comes from: one of the same name may mean something else elsewhere."""
    return next((one for one in kind.__mro__ if setting in vars(one).get("__annotations__", {})), None)


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
