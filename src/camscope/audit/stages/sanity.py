"""sanity: whether maps notice that the model has lost its training; an edge detector, which cannot, has to fail."""

from collections import Counter

import torch
from torch import Tensor

from camscope.audit.numbers import rounded
from camscope.audit.schema import Randomised, Sanity, Similarity
from camscope.audit.subject import Finding, Subject
from camscope.errors import NonFiniteError, UndefinedError
from camscope.explainers import METHODS, Explainer
from camscope.metrics import Randomised as Found
from camscope.metrics import randomisation

SEEDS = (0, 1, 2)
LEAST = 5  # images, for what maps of different images have in common


def sanity(subject: Subject) -> Sanity:
    """Cascading randomisation of the parameters, output first, for each finding's images."""
    tools: list[tuple[Explainer, bool]] = [(tool, False) for tool in subject.tools]
    tools.append((METHODS["edges"](subject.model), True))
    made, images, done = [], 0, 0
    for finding in subject.findings:
        x = _of_one_size(subject, subject.sampled(subject.config.sizes.sanity, 3, finding, only=True))
        if len(x) < LEAST:
            continue
        images = max(images, len(x))
        for tool, control in tools:
            subject.told(done := done + 1, len(tools) * len(subject.findings))
            made.append(_tested(tool, x, finding, control))
    if not made:
        return Sanity(tested=False, reason="fewer than five images with a finding share a size")
    return Sanity(images=images, tests=tuple(made))


def _of_one_size(subject: Subject, rows: list[int]) -> Tensor:
    items = [one.item.x for one in subject.loaded(rows) if one.item is not None]
    if not items:
        return torch.empty(0)
    usual = Counter(tuple(one.shape) for one in items).most_common(1)[0][0]
    kept = torch.stack([one for one in items if tuple(one.shape) == usual])
    first = next(subject.model.parameters())
    return kept.to(first.device, first.dtype)


def _tested(tool: Explainer, x: Tensor, finding: Finding, control: bool) -> Randomised:
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
        similarities=tuple(_similarity(found, name) for name in found.values),
        passes=None if found.undecided else found.passes,
        reason=found.undecided,
        control=control,
    )


def _similarity(found: Found, name: str) -> Similarity:
    low, null, high = found.null_interval(name)
    verdict = None if found.undecided else found.verdicts[name]
    return Similarity(
        name=name,
        curve=tuple(rounded(float(one)) for one in found.curve(name)),
        low=rounded(low),
        null=rounded(null),
        high=rounded(high),
        passes=bool(verdict and verdict.passes),
        reason=verdict.reason if verdict else found.undecided,
    )
