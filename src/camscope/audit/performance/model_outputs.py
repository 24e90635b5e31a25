"""Forward passes of the audited model, and its predictions as log odds.

Log odds do not saturate: the effect of a region is visible at a probability of 0.999 as at 0.7.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from camscope.audit.core.cohort import Finding
from camscope.audit.core.context import AuditContext
from camscope.errors import InputError, NonFiniteError, TargetError
from camscope.explainers.core.evaluation_context import (
    check_one_of,
    device_and_dtype,
    evaluation_context,
    has_interacting_samples,
    inspect_model,
)
from camscope.hooks.record import record_layers
from camscope.metrics.model_scorer import ScoringSettings, scoring_scope
from camscope.plurals import plural
from camscope.pytree import find_main_tensor
from camscope.targets.base import ClassNameLookup, Target
from camscope.targets.classes import resolve_class_index
from camscope.targets.outputs import are_probabilities, class_scores, full_precision


def compute_logits_and_features(
    context: AuditContext, x: Tensor, layer: str | None = None, grid: Sequence[int] = ()
) -> tuple[Tensor, Tensor]:
    """(N,C,*S) -> (N,K), and (N,D) features: a layer's output of this grid, averaged over places; without one the logits.

    NonFiniteError for NaN and infinity.
    """
    x = x.to(*device_and_dtype(context.model))
    settings = ScoringSettings("eval", None, context.class_names or None)
    if len(x) > 1 and has_interacting_samples(inspect_model(context.model), settings, x):
        each = [compute_logits_and_features(context, record, layer, grid) for record in x.split(1)]
        return torch.cat([logits for logits, _ in each]), torch.cat([features for _, features in each])
    names = [] if layer is None else [layer]
    with (
        torch.no_grad(),
        evaluation_context(inspect_model(context.model), settings, x) as evaluation,
        record_layers(context.model, names, device=None) as records,
    ):
        score = evaluation.create_score(context.findings[0].class_index)
        logits = class_scores(score.forward(evaluation.x)).double()
    if not bool(logits.isfinite().all()):
        raise NonFiniteError("the model's answer holds NaN or infinity")
    features = next((find_main_tensor(name, record.output)[1] for name, record in records.items()), logits)
    return logits.cpu(), pool_features(features.float(), tuple(grid)).cpu()


def pool_features(output: Tensor, grid: tuple[int, ...]) -> Tensor:
    """(N,D): of a layer's output (N,D,*grid), (N,*grid,D) or of tokens (N,T,D) the mean over places."""
    if output.ndim < 3:
        return output
    if tuple(output.shape[1:-1]) == grid or (output.ndim == 3 and output.shape[1] >= math.prod(grid) > 1):
        return output.flatten(1, -2).mean(1)
    return output.flatten(2).mean(2)


def are_probability_outputs(logits: Tensor, outputs: str) -> bool:
    """Whether the answers (N,K) to all images are probabilities: of a softmax, or each by itself."""
    if outputs == "softmax":
        return logits.shape[1] > 1 and are_probabilities(logits)
    return bool(((logits >= 0) & (logits <= 1)).all())


def compute_log_odds(
    context: AuditContext, logits: Tensor, findings: Sequence[Finding], *, outputs_are_probabilities: bool
) -> Tensor:
    """(N,K) -> (N,F) log odds; of probabilities those that they stand for, as far as numbers reach."""
    outputs = context.config.model.outputs
    if outputs == "softmax" and logits.shape[1] == 1:
        raise InputError(
            "the model has one output, and the softmax of one is 1: if it is the log odds of the finding, "
            'set outputs = "sigmoid" under [model]'
        )
    for finding in findings:
        if finding.class_index >= logits.shape[1]:
            raise InputError(
                f"class {finding.class_index} is out of range: the model has {plural(logits.shape[1], 'class')}"
            )
    if outputs == "sigmoid" and outputs_are_probabilities:
        epsilon = torch.finfo(torch.float32).eps / 2
        logits = logits.clamp(epsilon, 1 - epsilon).logit()
    return torch.stack(
        [
            LogOdds(finding.class_index, outputs, outputs_are_probabilities=outputs_are_probabilities)(logits)
            for finding in findings
        ],
        1,
    )


LogOddsKind = Literal["softmax", "sigmoid"]
LogOddsArray = NDArray[np.float64]

N_MEMORY_PROBE_IMAGES: Final = 8  # images that the model is first asked about, to see what a pass of it takes


@dataclass(frozen=True)
class LogOdds(Target):
    """(N,): the log odds of one class of logits o (N,K): o_c - logsumexp of all others; of kind "sigmoid" o_c itself.

    A constant added to all logits changes nothing. A model that gives softmax probabilities is asked for their logarithms,
    of which the smallest number of its type is the end.
    """

    index: int
    kind: LogOddsKind = "softmax"
    outputs_are_probabilities: bool | None = field(default=None, kw_only=True, repr=False)

    def __post_init__(self) -> None:
        check_one_of("kind", self.kind, "softmax", "sigmoid")

    def resolve(self, output: Any, input_size: Sequence[int], class_names: Sequence[str] | None) -> Self:
        """With it known whether the model gives probabilities."""
        return replace(self, outputs_are_probabilities=are_probabilities(class_scores(output).detach()))

    def describe(self, sample: int, class_name: ClassNameLookup) -> str:
        """Describe the target."""
        return f"log odds of {class_name(self.index)}"

    def __call__(self, output: Any) -> Tensor:
        """(N,)"""
        logits = full_precision(class_scores(output))
        index = resolve_class_index(self.index, logits.shape[1], None)
        if self.kind == "sigmoid":
            return logits[:, index]
        if logits.shape[1] == 1:
            raise TargetError('the model has one output, and the softmax of one is 1: ask for LogOdds(0, "sigmoid")')
        is_probability = (
            are_probabilities(logits) if self.outputs_are_probabilities is None else self.outputs_are_probabilities
        )
        logits = logits.clamp(min=torch.finfo(logits.dtype).tiny).log() if is_probability else logits
        other_logits = torch.cat([logits[:, :index], logits[:, index + 1 :]], 1)
        return logits[:, index] - other_logits.logsumexp(1)


def compute_target_scores(
    model: nn.Module, x: Tensor, target: Target, *, batch_size: int | None = None
) -> LogOddsArray:
    """(N,C,*S) -> (N,): the model's answers, in passes that fit into memory, or of `batch_size`; see `scoring_scope`.

    The model is left as it was.
    """
    if len(x) == 0:
        return np.empty(0)
    first = x[: min(N_MEMORY_PROBE_IMAGES, batch_size or N_MEMORY_PROBE_IMAGES)]
    sample_index = torch.arange(len(x), device=x.device) % len(first)
    with scoring_scope(model, first, target, batch_size=batch_size) as scores:
        values = scores.score_variants(len(x), lambda part: (x[part], sample_index[part]))[0]
    return np.asarray(values.cpu().numpy(), np.float64)
