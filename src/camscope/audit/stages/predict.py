"""The stages of predictions and maps.

- predict: the model's answers, and how well they tell a finding from its absence, by subgroup too.
- explain: the raw maps of every image, each method and finding, as a run of `camscope batch`.
"""

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from camscope.audit.core.context import Finding, Subject
from camscope.audit.core.predictions import Answered
from camscope.audit.core.schema import Answers, Explain, Maps, Predict, Step
from camscope.audit.core.summary_values import rounded
from camscope.audit.performance.model_outputs import gives_probabilities, logits_of, odds_of
from camscope.audit.performance.performance_summary import bins, by_group, measures
from camscope.audit.performance.subgroups import levels
from camscope.batch import Outcome, Run, run_batch
from camscope.batch.image_loading import Loaded
from camscope.errors import (
    OUT_OF_MEMORY,
    InputError,
    LayerError,
    MissingExtraError,
    ModelError,
    NonFiniteError,
    RunError,
    TargetError,
    is_out_of_memory,
    memory_reason,
)
from camscope.plurals import inflect, plural
from camscope.safe_files import path_in


def predict(subject: Subject) -> Predict:
    """One pass over all images; what each was given is in `predictions.parquet`."""
    made = _answered(subject)
    if not made.rows:
        why = next(iter(made.errors.values()), "")
        raise InputError(f"the model has an answer for none of the images: {why}")
    truths = [subject.truths(finding) for finding in subject.findings]
    made.write(subject.folder, subject.ids, subject.numbers, truths)
    return Predict(
        probabilities=made.probabilities,
        flow=tuple(_flow(subject, made)),
        findings=tuple(_of(subject, made, finding) for finding in subject.findings),
    )


def _flow(subject: Subject, made: Answered) -> Iterator[Step]:
    """How many images have an answer, how many of them a label, and what became of the others."""
    yield Step(name=f"{inflect(len(made.rows), 'image')} with an answer", rows=len(made.rows))
    for why, count in sorted(Counter(made.errors.values()).items()):
        yield Step(name=f"{inflect(count, 'image')} without an answer", rows=count, reason=why, lost=True)
    for finding in subject.findings:
        truths = subject.truths(finding)
        known = sum(truths[row] is not None for row in made.rows)
        if known < len(made.rows):
            why = "the others count in no question that needs to know the truth"
            yield Step(name=f"of them labeled for {finding.name}", rows=known, reason=why)


def _answered(subject: Subject) -> Answered:
    rows: list[int] = []
    answers: list[Tensor] = []
    features: list[Tensor] = []
    errors: dict[int, str] = {}
    done = 0
    for batch in subject.batches():
        subject.told(done := done + len(batch), len(subject.rows))
        for one, found in _asked(subject, batch):
            if isinstance(found, str):
                errors[one.row["row"]] = found
            else:
                rows.append(one.row["row"])
                answers.append(found[0])
                features.append(found[1])
    names = tuple(one.name for one in subject.findings)
    if not rows:
        return Answered([], names, np.empty((0, len(names))), np.empty((0, 0), np.float32), errors)
    logits = torch.stack(answers)
    plain = gives_probabilities(logits, subject.config.model.outputs)
    odds = odds_of(subject, logits, subject.findings, probabilities=plain)
    return Answered(rows, names, odds.numpy(), torch.stack(features).numpy(), errors, plain)


def _asked(subject: Subject, batch: Sequence[Loaded]) -> Iterator[tuple[Loaded, tuple[Tensor, Tensor] | str]]:
    """Each image with its logits and features, or why it has none: one that the model fails on fails for itself."""
    there = [one for one in batch if one.item is not None]
    yield from ((one, one.error or "it cannot be read") for one in batch if one.item is None)
    if not there:
        return
    layer, grid = subject.pooled
    try:
        logits, features = logits_of(subject, subject.on_device(there), layer, grid)
    except (LayerError, MissingExtraError, ModelError, TargetError):
        raise
    except Exception as error:
        if len(there) == 1 and is_out_of_memory(error):  # of the machine, not of the image: another start may have it
            raise RunError(
                f"{subject.ids[there[0].row['row']]}: {memory_reason(error)}, for this image alone; free some memory or take a "
                "smaller input, and start again: the audit goes on"
            ) from error
        if len(there) == 1:
            yield there[0], f"the model fails: {error if isinstance(error, NonFiniteError) else type(error).__name__}"
            return
        for one in there:
            yield from _asked(subject, [one])
        return
    for one, own, seen in zip(there, logits, features, strict=True):
        yield one, (own, seen)


def _of(subject: Subject, made: Answered, finding: Finding) -> Answers:
    truths, odds = subject.truths(finding), made.of(finding.name)
    rows = [row for row in made.rows if truths[row] is not None]
    truth, answer = np.array([bool(truths[row]) for row in rows], np.bool_), np.array([odds[row] for row in rows])
    groups, config = [subject.patients[row] for row in rows], subject.config
    if not 0 < truth.sum() < len(truth):
        raise InputError(
            f"of {plural(len(truth), 'labeled image')}, {int(truth.sum())} with the finding {finding.name!r}: "
            "some with it and some "
            f"without are needed; is the label column right?"
        )
    found, judged = measures(truth, answer, groups, **subject.how)
    values = dict(zip(rows, answer.tolist(), strict=True))
    return Answers(
        finding=finding.name,
        positives=int(truth.sum()),
        negatives=int((~truth).sum()),
        spread=rounded(made.spread(finding.name)) or 0.0,
        **found,
        bins=tuple(bins(judged)),
        groups=tuple(by_group(subject, rows, truth, answer)),
        levels=tuple(levels(subject, finding, values, config.margins.auroc, {row: bool(truths[row]) for row in rows})),
    )


CHUNK = 64  # images that are lost where an audit is stopped


def explain(subject: Subject) -> Explain:
    """Into `maps/`, which goes on where it was."""
    config = subject.config

    def told(outcome: Outcome) -> None:
        subject.told(outcome.before + outcome.images, outcome.total)

    outcome = run_batch(
        subject.tools,
        subject.shown,
        path_in(subject.folder, "maps"),
        [one.index for one in subject.findings],
        batch_size=config.batch_size,
        chunk=CHUNK,
        window=config.data.window,
        retry_failed=True,
        told=told,
    )
    if short := [reason for reason in outcome.transient if reason.startswith(OUT_OF_MEMORY)]:
        count = sum(outcome.transient[reason] for reason in short)
        raise RunError(
            f"{plural(count, 'image has', 'images have')} no map: {short[0]}; free some memory or lower "
            "batch_size, and start again: the audit goes on"
        )
    if outcome.failures == outcome.total:
        raise RunError(f"no image has a map: {outcome.reasons.most_common(1)[0][0]}")
    failures = [Step(name="no map", rows=count, reason=why) for why, count in sorted(outcome.reasons.items())]
    return Explain(maps=tuple(_maps(subject)), failures=tuple(failures))


def _maps(subject: Subject) -> list[Maps]:
    table = Run(subject.folder / "maps").table(["method", "target", "status"])
    seen = Counter(zip(*(table[name].to_pylist() for name in ("method", "target", "status")), strict=True))
    made = []
    for tool in subject.tools:
        for finding in subject.findings:
            own = {
                status: count
                for (method, target, status), count in sorted(seen.items())
                if (method, target) == (tool.title, str(finding.index))
            }
            failures = own.pop("failed", 0)
            made.append(
                Maps(method=tool.title, finding=finding.name, maps=sum(own.values()), failures=failures, statuses=own)
            )
    return made
