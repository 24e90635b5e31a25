"""asking: the log odds that the model gives, in eval mode, leaving it as it was."""

from collections.abc import Sequence

import torch
from torch import Tensor

from camscope.audit.shortcuts.interventions import LogOdds
from camscope.audit.subject import Finding, Subject
from camscope.errors import InputError
from camscope.explainers.scope import asking, home, survey
from camscope.hooks.record import record
from camscope.metrics.scores import Asking
from camscope.structure import the_tensor
from camscope.targets.outputs import class_scores


def odds_of(
    subject: Subject, x: Tensor, findings: Sequence[Finding], layer: str | None = None
) -> tuple[Tensor, Tensor]:
    """(N,C,*S) -> (N,F) log odds, and (N,D) features: a layer's output, averaged over places; without one the logits."""
    outputs, names = subject.config.model.outputs, [] if layer is None else [layer]
    with (
        torch.no_grad(),
        asking(
            survey(subject.model), Asking("eval", None, subject.categories or None), x.to(*home(subject.model))
        ) as asked,
        record(subject.model, names, device=None) as seen,
    ):
        score = asked.score(findings[0].index)
        logits = class_scores(score.forward(asked.x)).double()
    odds = torch.stack([LogOdds(one.index, outputs)(logits) for one in findings], 1)
    if not bool(odds.isfinite().all()):
        raise InputError("the model's answers hold NaN or infinity")
    kept = next((the_tensor(name, one.output)[1] for name, one in seen.items()), logits)
    features = kept.float().flatten(2).mean(2) if kept.ndim > 2 else kept.float()
    return odds.cpu(), features.cpu()
