"""predict: the model's answers, and how well they tell a finding from its absence, by subgroup too."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from camscope.audit.answers import Answered, log_odds
from camscope.audit.levels import levels
from camscope.audit.numbers import number, rounded
from camscope.audit.performance import auroc, average_precision, calibration
from camscope.audit.schema import Answers, Bin, Number, Predict
from camscope.audit.subject import Finding, Subject
from camscope.errors import InputError, UndefinedError
from camscope.explainers.scope import asking, survey
from camscope.hooks.record import record
from camscope.metrics.scores import Asking
from camscope.structure import the_tensor
from camscope.targets.outputs import are_probabilities, class_scores


def predict(subject: Subject) -> Predict:
    """One pass over all images; what each was given is in `predictions.parquet`."""
    made = _answered(subject)
    if not made.rows:
        why = next(iter(made.errors.values()), "")
        raise InputError(f"the model has an answer for none of the images: {why}")
    truths = [subject.truths(finding) for finding in subject.findings]
    made.write(subject.folder, subject.ids, truths)
    return Predict(findings=tuple(_of(subject, made, finding) for finding in subject.findings))


def _answered(subject: Subject) -> Answered:
    rows: list[int] = []
    odds: list[Tensor] = []
    features: list[Tensor] = []
    errors: dict[int, str] = {}
    done = 0
    for batch in subject.batches():
        done += len(batch)
        subject.told(done, len(subject.rows))
        for one in batch:
            if one.item is None:
                errors[one.row["row"]] = one.error or "it cannot be read"
        there = [one for one in batch if one.item is not None]
        if there:
            answers, seen = _asked(subject, subject.on_device(there))
            rows += [one.row["row"] for one in there]
            odds.append(answers)
            features.append(seen)
    names = tuple(one.name for one in subject.findings)
    if not odds:
        return Answered([], names, np.empty((0, len(names))), np.empty((0, 0), np.float32), errors)
    return Answered(rows, names, torch.cat(odds).numpy(), torch.cat(features).numpy(), errors)


def _asked(subject: Subject, x: Tensor) -> tuple[Tensor, Tensor]:
    """(N,F) log odds, and (N,D): the mean over places of the first method's layer, or of the model's output."""
    outputs = subject.config.model.outputs
    layer = next((tool.layer for tool in subject.tools if getattr(tool, "layer", None)), None)
    with (
        torch.no_grad(),
        asking(survey(subject.model), Asking("eval", None, subject.categories or None), x) as asked,
        record(subject.model, [layer] if layer else [], device=None) as seen,
    ):
        score = asked.score(subject.findings[0].index)
        logits = class_scores(score.forward(asked.x)).double()
    if are_probabilities(logits) and outputs == "softmax" and logits.shape[1] > 1:
        logits = logits.clamp_min(torch.finfo(torch.float32).tiny).log()
    odds = torch.stack([log_odds(logits, one.index, outputs) for one in subject.findings], 1)
    if not bool(odds.isfinite().all()):
        raise InputError("the model's answers hold NaN or infinity")
    kept = next((the_tensor(name, one.output)[1] for name, one in seen.items()), logits)
    pooled = kept.float().flatten(2).mean(2) if kept.ndim > 2 else kept.float()
    return odds.cpu(), pooled.cpu()


def _of(subject: Subject, made: Answered, finding: Finding) -> Answers:
    truths, odds = subject.truths(finding), made.of(finding.name)
    rows = [row for row in made.rows if truths[row] is not None]
    truth, answer = np.array([bool(truths[row]) for row in rows], np.bool_), np.array([odds[row] for row in rows])
    groups, config = [subject.patients[row] for row in rows], subject.config
    how = {"replicates": config.replicates, "seed": config.seed}
    if not 0 < truth.sum() < len(truth):
        raise InputError(
            f"of {len(truth)} labelled images {int(truth.sum())} have the finding {finding.name!r}: some with it and some "
            f"without are needed; is the label column right?"
        )
    chance = 1 / (1 + np.exp(-answer))
    judged = calibration(truth, chance, groups, **how)
    values = {row: answer for row, answer in zip(rows, answer.tolist(), strict=True)}
    return Answers(
        finding=finding.name,
        positives=int(truth.sum()),
        negatives=int((~truth).sum()),
        spread=rounded(made.spread(finding.name)) or 0.0,
        auroc=_number(lambda: auroc(truth, answer, groups, **how), 0.5, "chance"),
        average_precision=_number(lambda: average_precision(truth, answer, groups, **how), float(truth.mean()), "prevalence"),
        brier=number(judged.brier, float(truth.mean() * (1 - truth.mean())), "the prevalence for all"),
        calibration_error=number(judged.error, 0.0, "perfect"),
        slope=rounded(judged.slope),
        intercept=rounded(judged.intercept),
        bins=tuple(_bins(judged)),
        levels=tuple(levels(subject, values, config.margins.auroc, truth={row: bool(truths[row]) for row in rows})),
    )
