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
        [explanation(tool, 0, item, made, which, digits) for which in range(len(targets))]
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


def explanation(tool: Method, i: int, item: Item, made: Run, which: int, digits: str) -> Explanation:
    """What a call found of its sample i and one of its questions."""
    score, maps = made.scores[which], made.maps[which]
    return Explanation(
        heat=maps.heat[i].cpu().numpy().copy(),
        error=None if maps.error is None else maps.error[i].cpu().numpy().copy(),
        method=tool.title,
        **answered(score, i),
        layer=maps.layer,
        layout=str(maps.layout) if maps.layout else None,
        input_size=tuple(item.x.shape[1:]),
        placement=item.placement,
        status=statuses(maps)[i],
        notes=_notes(tool, maps.notes_of(i), item, made.known),
        name=item.name,
        measures={name: float(values[i]) for name, values in maps.measures.items()},
        parameters=_settings(tool, item),
        versions=versions(),
        model=digits,
        image=item.image,
        seen=item.seen,
    )


def _settings(tool: Method, item: Item) -> dict[str, Any]:
    return tool.parameters if item.image is None else {**tool.parameters, "preprocess": repr(tool.preprocess)}


def _notes(tool: Method, found: tuple[str, ...], item: Item, known: Survey) -> tuple[str, ...]:
    notes = list(found)
    if known.model is not tool.model:
        notes.append(f"the eager model inside {type(tool.model).__name__} was explained")
    elif known.compiled:
        notes.append(f"{type(tool.model).__name__} is compiled, or a part of it: its eager form was explained")
    if item.placement is None:
        notes.append("the preprocessing has no known geometry: the map is drawn on the model's input")
    return tuple(notes)
