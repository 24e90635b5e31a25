"""sanity: whether maps notice that the model has lost its training; an edge detector, which cannot, has to fail."""

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from camscope.audit.numbers import number, rounded
from camscope.audit.schema import Number, Randomised, Sanity, Similarity
from camscope.audit.subject import Finding, Subject
from camscope.errors import NonFiniteError, UndefinedError
from camscope.explainers import METHODS, Explainer
from camscope.metrics import Randomised as Found
from camscope.metrics import estimated, randomisation

SEEDS = (0, 1, 2)
LEAST = 5  # images, for what maps of different images have in common


def sanity(subject: Subject) -> Sanity:
    """Cascading randomisation of the parameters, output first, for each finding's images."""
    tools: list[tuple[Explainer, bool]] = [(tool, False) for tool in subject.tools]
    tools.append((METHODS["edges"](subject.model), True))
    made, images, done = [], set[int](), 0
    for finding in subject.findings:
        x, rows = _of_one_size(subject, subject.sampled(subject.config.sizes.sanity, 3, finding, only=True))
        if len(x) < LEAST:
            continue
        images.update(rows)
        patients = [subject.numbers[row] for row in rows]
        for tool, control in tools:
            subject.told(done := done + 1, len(tools) * len(subject.findings))
            made.append(_tested(subject, tool, x, patients, finding, control))
    if not made:
        return Sanity(tested=False, reason=f"fewer than {LEAST} images with a finding share a size")
    return Sanity(images=len(images), tests=tuple(made))


def _of_one_size(subject: Subject, rows: list[int]) -> tuple[Tensor, list[int]]:
    """The images of the usual size, and their rows."""
    read = zip(rows, subject.loaded(rows), strict=True)
    items = {row: one.item.x for row, one in read if one.item is not None}
    if not items:
        return torch.empty(0, dtype=torch.float32, device="cpu"), []
    usual = Counter(tuple(one.shape) for one in items.values()).most_common(1)[0][0]
    kept = {row: one for row, one in items.items() if tuple(one.shape) == usual}
    first = next(subject.model.parameters())
    return torch.stack(list(kept.values())).to(first.device, first.dtype), list(kept)


def _tested(
    subject: Subject, tool: Explainer, x: Tensor, patients: Sequence[Hashable], finding: Finding, control: bool
) -> Randomised:
    try:
        found = randomisation(tool, x, [finding.index] * len(x), seeds=SEEDS)
    except (NonFiniteError, UndefinedError) as error:
        return Randomised(
            method=tool.title, finding=finding.name, steps=(), seeds=SEEDS, similarities=(), passes=None,
            reason=str(error), control=control,
        )  # fmt: skip
    return Randomised(
        method=tool.title,
        finding=finding.name,
        steps=found.steps,
        seeds=found.seeds,
        similarities=tuple(_similarity(found, name, patients, subject.how) for name in found.values),
        passes=None if found.undecided else found.passes,
        reason=found.undecided or _unsaid(found),
        control=control,
    )


def _unsaid(found: Found) -> str:
    """Why there is neither a pass nor a failure; "" where there is one."""
    open_ones = [one.reason for one in found.verdicts.values() if one.passes is None]
    return open_ones[0] if found.passes is None else ""


def _similarity(found: Found, name: str, patients: Sequence[Hashable], how: dict[str, int]) -> Similarity:
    low, null, high = found.null_interval(name)
    verdict = None if found.undecided else found.verdicts[name]
    return Similarity(
        name=name,
        curve=tuple(rounded(float(one)) for one in found.curve(name)),
        low=rounded(low),
        null=rounded(null),
        high=rounded(high),
        passes=verdict.passes if verdict else None,
        reason=verdict.reason if verdict else found.undecided,
        end=_end(found, name, patients, how),
    )


def _end(found: Found, name: str, patients: Sequence[Hashable], how: dict[str, int]) -> Number:
    """How alike the maps are when all training is lost: a patient's images are drawn together, with those of every seed."""
    last = found.values[name][:, -1]
    try:
        made = estimated(last.ravel(), [*patients] * len(last), bounds=(-1.0, 1.0), **how)
    except UndefinedError:
        return number(None, reason="no map has a number: there is nothing to compare")
    known = int((~np.isnan(last)).any(0).sum())
    return number(replace(made, n=known, undefined=last.shape[1] - known))
