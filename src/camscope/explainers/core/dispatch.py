"""Dispatch: explanations of one input by one or several methods, with shared passes.

- One call: several methods asked several questions of one input, from as few passes as possible.
- Several methods asked several questions of one image: from the image to the explanations.
- What is asked of an image, in the scene of that image: its places, and what the model makes of others.
- One method's error among several that share a pass: the others go on, where whoever asked them wants that.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence, Sized
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from camscope.errors import CamscopeError, InputError, ModelError, TargetError, warn_caller
from camscope.explainers.core.constant_scores import flag_constant_scores
from camscope.explainers.core.evaluation_context import (
    Survey,
    asking,
    checked_finite,
    expect_differentiable,
    interacting,
    survey,
    weight_versions,
    weights_key,
)
from camscope.explainers.core.inputs import ALONE, Companions, Item
from camscope.explainers.core.maps import Maps, answered, stacked, statuses, versions
from camscope.explainers.core.method import Method
from camscope.explanation import MEANING, OK, Explanation
from camscope.hooks.base import unwrap
from camscope.model_card import card_of, digest
from camscope.plurals import plural
from camscope.targets import Question, Scene, Score, Target, embedding_of

CHANGED = "the model's weights changed during the call, as where another thread trains it: the map mixes both models"
ONE_BY_ONE = "the samples of a batch see one another in this model: each was explained by itself"

Watch = Callable[[Sequence[Method]], None]  # told which methods work next: those that share a pass, or one alone


@dataclass(frozen=True)
class Run:
    """What a call gives of one method: the model as it was found, and each question with its maps."""

    known: Survey
    scores: list[Score]
    maps: list[Maps]


def run(
    tools: Sequence[Method],
    x: Tensor,
    targets: Sequence[Question],
    companions: Companions = ALONE,
    watch: Watch | None = None,
    *,
    warn: bool = True,
) -> list[Run]:
    """[method]: the maps of every question about one input x (N,C,*S). `warn`: of maps that are flagged.

    Where the samples of a batch see one another in the model, each is explained by itself.
    """
    known = survey(tools[0].model)
    if any(tool.takes_gradients for tool in tools):
        expect_differentiable(known)
    weights, runs = weight_versions(known.model), dict[int, Run]()
    for numbers in companies(tools):
        company = [tools[t] for t in numbers]
        try:
            each = _answers(company, known, x, targets, companions, watch)
        except RuntimeError as error:  # autograd notices some of it
            if weight_versions(known.model) != weights:
                raise ModelError(f"{CHANGED}; explain copy.deepcopy(model), or wait for the other thread") from error
            raise
        runs.update({t: Run(known, *answer) for t, answer in zip(numbers, each, strict=True)})
    changed = weight_versions(known.model) != weights
    if changed:
        warn_caller(CHANGED)
        for one in (one for each in runs.values() for one in each.maps):
            one.notes = (*one.notes, CHANGED)
    for t, tool in enumerate(tools):
        for one in runs[t].maps:
            checked_finite(f"the map of {tool.title}", one.heat, tool.on_nonfinite)
            for status in sorted({status for status in statuses(one) if status != OK} if warn else ()):
                warn_caller(f"{tool.title}: {MEANING[status]}")
    return [runs[t] for t in range(len(tools))]


def _answers(
    tools: Sequence[Method],
    known: Survey,
    x: Tensor,
    targets: Sequence[Question],
    companions: Companions,
    watch: Watch | None,
) -> list[tuple[list[Score], list[Maps]]]:
    """[method]: scores and maps of the methods of one company."""
    first, copies = tools[0], any(hasattr(tool, "batch_size") for tool in tools)
    if interacting(known, first, x, companions):
        rows = range(len(x))
        questions = [[question_at(target, row, len(x)) for target in targets] for row in rows]
        parts = [
            _answers(tools, known, x[row : row + 1], questions[row], companions.of([row], len(x)), watch)
            for row in rows
        ]
        return [_joined([part[t] for part in parts]) for t in range(len(tools))]
    with asking(known, first, x, companions, copies=copies) as asked:
        scores = [asked.score(first.asked(target)) for target in targets]
        several = made(tools, asked.x, scores, watch)
        weights = weights_key(known.model)
        for tool, each in zip(tools, several, strict=True):
            for score, maps in zip(scores, each, strict=True):
                flag_constant_scores(tool, asked.x, score, maps, weights)
        return [(scores, maps) for maps in several]


def question_at(target: Question, row: int, samples: int) -> Question:
    """One sample's question, of those of a batch."""
    single = isinstance(target, str) or getattr(target, "ndim", 1) == 0  # a number in an array has an axis less
    if callable(target) or not isinstance(target, Sized) or single:
        return target
    if len(target) != samples:
        raise TargetError(f"{plural(len(target), 'target')} for a batch of {samples}: give one, or one per sample")
    return cast(Question, target[row : row + 1])


def _joined(parts: Sequence[tuple[list[Score], list[Maps]]]) -> tuple[list[Score], list[Maps]]:
    """Scores and maps of samples that were explained one by one, as those of their batch."""
    scores = [Score.joined(each) for each in zip(*(part[0] for part in parts), strict=True)]
    return scores, [stacked(each, ONE_BY_ONE) for each in zip(*(part[1] for part in parts), strict=True)]


def companies(tools: Sequence[Method]) -> list[list[int]]:
    """The numbers of the methods of each company: of those that can share passes."""
    found: dict[Hashable, list[int]] = {}
    for t, tool in enumerate(tools):
        found.setdefault((tool.mode, *tool.call_settings.values(), tool.company), []).append(t)
    return list(found.values())


def made(tools: Sequence[Method], x: Tensor, scores: Sequence[Score], watch: Watch | None = None) -> list[list[Maps]]:
    """[method][score] of one company: what its shared passes give, then what takes passes of its own.

    What a module keeps on itself is of the last input that it saw: methods that run only the rest of the model, behind a
    layer, come before those that show the model other inputs.
    """
    if watch is not None:
        watch(tools)
    rows, done = tools[0].maps_of(tools, x, scores), dict[int, list[Maps]]()
    for t in sorted(range(len(tools)), key=lambda t: not tools[t].runs_rest):
        done[t] = []
        for one in rows[t]:
            if callable(one) and watch is not None:
                watch([tools[t]])
            done[t].append(one() if callable(one) else one)
    return [done[t] for t in range(len(tools))]


def explain_each(
    tools: Sequence[Method],
    image: Any,
    targets: Sequence[Question],
    companions: Companions = ALONE,
    *,
    watch: Watch | None = None,
) -> list[list[Explanation]]:
    """[method][target]: what several methods say of one image of one model, from as few passes as possible.

    `watch`: told which methods work next, for a progress bar or a clock.
    """
    if not tools or not targets:
        raise TargetError("no targets, or no methods: pass one at least of each, e.g. targets [281, 285] or [None]")
    expect_alike(tools)
    item = tools[0].read(image)
    runs = run(
        tools, item.x[None], [asked_of(tools[0], [one], [item], companions) for one in targets], companions, watch
    )
    digits = digest(runs[0].known.model)
    return [
        [explanations(tool, [item], made, which, digits)[0] for which in range(len(targets))]
        for tool, made in zip(tools, runs, strict=True)
    ]


def expect_alike(tools: Sequence[Method]) -> None:
    """An InputError unless all are of one model, and see and name the same things."""
    first = tools[0]
    for tool in tools[1:]:
        if unwrap(tool.model) is not unwrap(first.model):
            raise InputError(f"{first!r} and {tool!r} are not of one model: explain each by itself")
        for setting in ("preprocess", "categories"):
            if getattr(tool, setting) != getattr(first, setting):
                raise InputError(f"{first!r} and {tool!r} have another {setting}: explain each by itself")


def explanations(tool: Method, items: Sequence[Item], made: Run, which: int, digits: str) -> list[Explanation]:
    """[sample]: what a call found of one of its questions. What is on a GPU is fetched once, not for each sample."""
    score, maps = made.scores[which].on_cpu(), made.maps[which]
    heat, error = maps.heat.cpu().numpy(), None if maps.error is None else maps.error.cpu().numpy()
    measures = {name: values.tolist() for name, values in maps.measures.items()}
    status, settings, under, said = statuses(maps), tool.parameters, versions(), answered(score, len(items))
    return [
        Explanation(
            heat=heat[i].copy(),
            error=None if error is None else error[i].copy(),
            method=tool.title,
            **said[i],
            layer=maps.layer,
            layout=str(maps.layout) if maps.layout else None,
            input_size=tuple(item.x.shape[1:]),
            placement=item.placement,
            status=status[i],
            notes=_notes(tool, maps.notes_of(i), item, made.known),
            name=item.name,
            measures={name: values[i] for name, values in measures.items()},
            parameters=settings if item.image is None else {**settings, "preprocess": repr(tool.preprocess)},
            versions=under,
            model=digits,
            image=item.image,
            seen=item.seen,
            world=item.world,
            steps=item.steps,
        )
        for i, item in enumerate(items)
    ]


def _notes(tool: Method, found: tuple[str, ...], item: Item, known: Survey) -> tuple[str, ...]:
    notes = [*found, *item.flags]
    if not tool.class_specific:
        notes.append("the map does not depend on the score")
    if known.model is not tool.model:
        notes.append(f"the eager model inside {type(tool.model).__name__} was explained")
    elif known.compiled:
        notes.append(f"{type(tool.model).__name__} is compiled, or a part of it: its eager form was explained")
    if item.placement is None:
        notes.append(
            "placement unknown: the preprocessing has no known geometry on this image; the map is drawn on the model's input"
        )
    return tuple(notes)


def asked_of(tool: Method, targets: Sequence[Question], items: Sequence[Item], companions: Companions) -> Question:
    """What is asked of several inputs, each question in the scene of its own image; one where all are the same."""
    seen = [
        target.in_scene(_scene(tool, item, companions.of([i], len(items)))) if isinstance(target, Target) else target
        for i, (target, item) in enumerate(zip(targets, items, strict=True))
    ]
    return seen[0] if all(one is seen[0] for one in seen) else cast(Question, seen)


def _scene(tool: Method, item: Item, companions: Companions) -> Scene:
    place = item.placement
    card = card_of(unwrap(tool.model))
    return Scene(
        input_size=tuple(item.x.shape[1:]),
        image_size=place.image_size if place else None,
        to_input=place.to_input if place else _unplaced,
        to_image=place.to_image if place else _unplaced,
        embed=partial(_embedded, tool, companions=companions),
        embed_text=card.embed_text if card else None,
    )


def _embedded(tool: Method, image: Any, companions: Companions) -> Tensor:
    """(D,): what the model makes of another image, beside the same companions."""
    with asking(survey(tool.model), tool, tool.read(image).x[None], companions) as asked:
        return embedding_of(asked.score().forward(asked.x))[0].detach()


def _unplaced(points: ArrayLike) -> NDArray[Any]:
    raise TargetError("the preprocessing has no known geometry: a place on the image cannot be found on the input")


Errors = dict[int, CamscopeError | None]

_asked: ContextVar[Errors | None] = ContextVar("_asked", default=None)


@contextmanager
def excusing(methods: Sequence[object]) -> Iterator[Errors]:
    """Inside, none of these raises what its own map meets with: at the end it is here, by the method's id."""
    errors: Errors = {id(method): None for method in methods}
    token = _asked.set(errors)
    try:
        yield errors
    finally:
        _asked.reset(token)


def attempted(method: object, make: Callable[[], Maps], x: Tensor) -> Maps:
    """What `make` makes of x (N,C,*S); of an excused method in error, maps (N,2) that mean nothing."""
    try:
        return make()
    except CamscopeError as error:
        errors = _asked.get()
        if errors is None or id(method) not in errors:
            raise
        errors[id(method)] = error
        return Maps(x.new_tensor([[0.0, 1.0]]).expand(len(x), 2))
