"""resolve: the model, its classes, its methods, and how fine they can see, tried on one image."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from camscope.audit.numbers import rounded
from camscope.audit.schema import Resolve, Tool
from camscope.audit.subject import Subject
from camscope.cards import card_of, digest
from camscope.errors import InputError
from camscope.explainers import Explainer
from camscope.explainers.facts import discreet, in_words
from camscope.models import nameless
from camscope.wording import plural

TRIED = 32  # images, to find one that can be explained


def resolve(subject: Subject) -> Resolve:
    """What is asked of what; an error here is one that every image would have."""
    rows = _tried(subject)
    model, card = subject.model, card_of(subject.model)
    said = card.source if card else subject.config.model.source
    tools = [_tool(tool, row) for tool, row in zip(subject.tools, rows[: len(subject.tools)], strict=True)]
    return Resolve(
        model=nameless(said) if subject.private else said,
        digest=digest(model),
        parameters=sum(one.numel() for one in model.parameters()),
        classes=len(subject.categories),
        categories=subject.categories,
        findings=tuple(one.name for one in subject.findings),
        input_size=tuple(rows[0]["input_size"]),
        preprocess=in_words(subject.tools[0].preprocess),
        outputs=subject.config.model.outputs,
        tools=tuple(tools),
    )


def _tried(subject: Subject) -> list[dict[str, Any]]:
    """The maps of the first image that has them all."""
    reasons = []
    for one in subject.loaded(subject.rows[:TRIED]):
        rows = [] if one.item is None else subject.worker.rows(subject.worker.collated([one]))
        failed = [row["error"] for row in rows if row.get("heat") is None] if rows else [one.error or ""]
        if not failed:
            return rows
        reasons.append(failed[0])
    raise InputError(f"no map could be made of the first {plural(len(reasons), 'image')}: {reasons[0]}")


def _tool(tool: Explainer, row: Mapping[str, Any]) -> Tool:
    stride = tuple(size / cells for size, cells in zip(row["input_size"], row["grid"], strict=True))
    return Tool(
        method=type(tool).name,
        title=tool.title,
        layer=row["layer"],
        grid=tuple(row["grid"]),
        stride=stride,
        settings={name: str(value) for name, value in discreet(tool.parameters).items()},
        paper=type(tool).paper,
        millimetres=_millimetres(row, stride),
    )


def _millimetres(row: Mapping[str, Any], stride: tuple[float, ...]) -> float | None:
    """Between the cells of a map, on the image, where its longest."""
    if row["world"] is None or row["placement"] is None:
        return None
    n = len(stride)
    linear = np.reshape(row["placement"], (n, n + 1))[:, :n] * np.asarray(stride)
    world = np.reshape(row["world"], (4, 4))[:3, 3 - n : 3]
    found = float(np.linalg.norm(world @ linear, axis=0).max())
    return rounded(found) if math.isfinite(found) else None
