"""Several methods asked several questions of one image: from the image to the explanations."""

from collections.abc import Sequence
from typing import Any

from camscope.cards import digest
from camscope.errors import InputError, TargetError
from camscope.explainers.facts import answered, versions
from camscope.explainers.inputs import ALONE, Companions, Item
from camscope.explainers.maps import statuses
from camscope.explainers.method import Method
from camscope.explainers.run import Run, Watch, run
from camscope.explainers.scene import asked_of
from camscope.explainers.scope import Survey
from camscope.explanation import Explanation
from camscope.hooks.base import unwrap
from camscope.targets import Question


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
