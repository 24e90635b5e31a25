"""The first stages: the images, and the model with its methods.

- check: what is in the data, before any model sees it.
- resolve: the model, its classes, its methods, and how fine they can see, tried on one image.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from camscope.audit.core.config import Marks
from camscope.audit.core.context import Subject
from camscope.audit.core.schema import Check, Count, Found, Marked, Resolve, Step, Tool
from camscope.audit.core.subgroup_levels import AGE, band, by_the_year, in_order, missing
from camscope.audit.core.summary_values import rounded
from camscope.audit.shortcuts.region_samples import masked
from camscope.batch import Manifest, inspect_images
from camscope.batch.manifest import arrow
from camscope.errors import InputError
from camscope.explainers import Explainer
from camscope.explainers.core.inputs import takes_scans
from camscope.explainers.core.maps import discreet, in_words
from camscope.model_card import card_of, digest
from camscope.models import nameless
from camscope.plurals import inflect, plural

NAMED = 20  # ids that a finding names


def check(subject: Subject) -> Check:
    """Every image is read once; of a manifest with splits those of all splits, for patients may be in several."""
    data = subject.config.data
    columns = subject.whole.table.column_names
    made = inspect_images(
        _numbered(subject.whole),
        patient=data.patient,
        split=data.split,
        target=data.label,
        mask=_column(subject),
        by=[name for name in data.subgroups if name in columns],
        profile=subject.config.report.profile,
        keep=list(subject.config.report.columns),
        scans=takes_scans(subject.tools[0].preprocess),
        told=subject.told,
    )
    found = [
        Found(
            code=one.code,
            severity=one.severity,
            message=one.message,
            count=one.count,
            ids=tuple(made.names(one.rows, NAMED)),
        )
        for one in made.findings
        if one.code != "columns"  # of a run's own tables, which an audit's manifest is not
    ]
    return Check(
        annotated=data.annotated,
        marked=tuple(_marked(subject)),
        flow=tuple(_flow(subject)),
        patients=len(set(subject.patients.values())),
        grouped=data.patient is not None,
        found=tuple(found),
        mix=made.mix,
        levels=tuple(_levels(subject)),
    )


def _marked(subject: Subject) -> Iterator[Marked]:
    """Of every finding and region with masks or boxes: which of their categories count."""
    for name, evidence in {**subject.evidence, **masked(subject)}.items():
        yield Marked(name=name, source=evidence.source, categories=evidence.categories, left_out=evidence.left_out)


def _column(subject: Subject) -> str | None:
    """Of the manifest, that says where the first finding is."""
    named = subject.config.data.evidence
    first = next(iter(named.values()), None) if isinstance(named, dict) else named
    first = first.column if isinstance(first, Marks) else first
    return first if first in subject.whole.table.column_names else None


def _numbered(manifest: Manifest) -> Manifest:
    """With its rows counted from 0, and ages by the year in bands: each of few patients gives its target away."""
    rows, table = arrow().array(np.arange(len(manifest))), manifest.table
    for place, name in enumerate(table.column_names):
        if name.lower() in AGE and by_the_year(name, ages := table[name].to_pylist()):
            bands = [None if missing(one) else band(one) for one in ages]
            table = table.set_column(place, name, arrow().array(bands, arrow().string()))
    return replace(manifest, table=table.set_column(0, "row", rows))


def _flow(subject: Subject) -> list[Step]:
    data, whole = subject.config.data, subject.whole.table
    paths = whole["path"].to_pylist()
    made = [Step(name=f"{inflect(len(paths), 'row')} of the manifest", rows=len(paths))]
    if data.split is not None:
        paths = [
            path for path, value in zip(paths, whole[data.split].to_pylist(), strict=True) if str(value) == data.use
        ]
        made.append(Step(name=f"{inflect(len(paths), 'row')} of the audited split", rows=len(paths)))
    if lost := sum(not path for path in paths):
        made.append(Step(name=f"{inflect(lost, 'row')} without a path", rows=lost, reason="left out", lost=True))
    reason = "drawn by the seed" if len(subject.rows) < len(paths) - lost else ""
    return [*made, Step(name=f"{inflect(len(subject.rows), 'row')} audited", rows=len(subject.rows), reason=reason)]


def _levels(subject: Subject) -> list[Count]:
    truths = {one.name: subject.truths(one) for one in subject.findings}
    made = []
    for column in subject.config.data.subgroups:
        said = subject.levels(column)
        for level in in_order({one for one in said.values() if one is not None}):
            rows = [row for row, one in said.items() if one == level]
            positives = {name: sum(truth[row] is True for row in rows) for name, truth in truths.items()}
            patients = len({subject.patients[row] for row in rows})
            made.append(Count(column=column, level=level, rows=len(rows), patients=patients, positives=positives))
    return made


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
