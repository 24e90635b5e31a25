"""asking: what the model gives, in eval mode, leaving it as it was; and its log odds."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from camscope.audit.shortcuts.interventions import LogOdds
from camscope.audit.subject import Finding, Subject
from camscope.errors import InputError, NonFiniteError
from camscope.explainers.scope import asking, home, interacting, survey
from camscope.hooks.record import record
from camscope.metrics.scores import Asking
from camscope.structure import the_tensor
from camscope.targets.outputs import are_probabilities, class_scores
from camscope.wording import plural


def logits_of(subject: Subject, x: Tensor, layer: str | None = None, grid: Sequence[int] = ()) -> tuple[Tensor, Tensor]:
    """(N,C,*S) -> (N,K), and (N,D) features: a layer's output of this grid, averaged over places; without one the logits.

    NonFiniteError for NaN and infinity.
    """
    x = x.to(*home(subject.model))
    settings = Asking("eval", None, subject.categories or None)
    if len(x) > 1 and interacting(survey(subject.model), settings, x):
        each = [logits_of(subject, one, layer, grid) for one in x.split(1)]
        return torch.cat([logits for logits, _ in each]), torch.cat([features for _, features in each])
    names = [] if layer is None else [layer]
    with (
        torch.no_grad(),
        asking(survey(subject.model), settings, x) as asked,
        record(subject.model, names, device=None) as seen,
    ):
        score = asked.score(subject.findings[0].index)
        logits = class_scores(score.forward(asked.x)).double()
    if not bool(logits.isfinite().all()):
        raise NonFiniteError("the model's answer holds NaN or infinity")
    kept = next((the_tensor(name, one.output)[1] for name, one in seen.items()), logits)
    return logits.cpu(), pooled(kept.float(), tuple(grid)).cpu()


def pooled(output: Tensor, grid: tuple[int, ...]) -> Tensor:
    """(N,D): of a layer's output (N,D,*grid), (N,*grid,D) or of tokens (N,T,D) the mean over places."""
    if output.ndim < 3:
        return output
    if tuple(output.shape[1:-1]) == grid or (output.ndim == 3 and output.shape[1] >= math.prod(grid) > 1):
        return output.flatten(1, -2).mean(1)
    return output.flatten(2).mean(2)


def gives_probabilities(logits: Tensor, outputs: str) -> bool:
    """Whether the answers (N,K) to all images are probabilities: of a softmax, or each by itself."""
    if outputs == "softmax":
        return logits.shape[1] > 1 and are_probabilities(logits)
    return bool(((logits >= 0) & (logits <= 1)).all())


def odds_of(subject: Subject, logits: Tensor, findings: Sequence[Finding], *, probabilities: bool) -> Tensor:
    """(N,K) -> (N,F) log odds; of probabilities those that they stand for, as far as numbers reach."""
    outputs = subject.config.model.outputs
    if outputs == "softmax" and logits.shape[1] == 1:
        raise InputError(
            "the model has one output, and the softmax of one is 1: if it is the log odds of the finding, "
            'set outputs = "sigmoid" under [model]'
        )
    for one in findings:
        if one.index >= logits.shape[1]:
            raise InputError(f"class {one.index} is out of range: the model has {plural(logits.shape[1], 'class')}")
    if outputs == "sigmoid" and probabilities:
        least = torch.finfo(torch.float32).eps / 2
        logits = logits.clamp(least, 1 - least).logit()
    return torch.stack([LogOdds(one.index, outputs, probabilities=probabilities)(logits) for one in findings], 1)
