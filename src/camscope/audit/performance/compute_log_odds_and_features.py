"""Forward passes of the audited model, and its predictions as log odds. Log odds do not saturate."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from camscope.audit.core.audit_context import AuditContext
from camscope.audit.core.cohort import Finding
from camscope.errors import InputError, NonFiniteError
from camscope.explainers.core.evaluation_context import (
    evaluation_context,
    get_device_and_dtype,
    has_interacting_samples,
    inspect_model,
)
from camscope.hooks.record_layers import record_layers
from camscope.metrics.model_scorer import ScoringSettings
from camscope.plurals import plural
from camscope.pytree import find_main_tensor
from camscope.targets.find_class_scores import are_probabilities, class_scores


def compute_logits_and_mean_features(
    context: AuditContext, x: Tensor, layer: str | None = None, layer_grid: Sequence[int] = ()
) -> tuple[Tensor, Tensor]:
    """Return the logits (N,K) and the mean features (N,D) of model inputs. Raise a NonFiniteError for NaN and infinity.

    The features are the output of a layer, averaged over its `layer_grid`. Without a layer they are the logits.
    """
    x = x.to(*get_device_and_dtype(context.model))
    settings = ScoringSettings("eval", None, context.class_names or None)
    if len(x) > 1 and has_interacting_samples(inspect_model(context.model), settings, x):
        results = [compute_logits_and_mean_features(context, sample, layer, layer_grid) for sample in x.split(1)]
        return torch.cat([logits for logits, _ in results]), torch.cat([features for _, features in results])
    names = [] if layer is None else [layer]
    with (
        torch.no_grad(),
        evaluation_context(inspect_model(context.model), settings, x) as evaluation,
        record_layers(context.model, names, device=None) as records,
    ):
        score = evaluation.create_score(context.findings[0].class_index)
        logits = class_scores(score.forward(evaluation.x)).double()
    if not bool(logits.isfinite().all()):
        raise NonFiniteError("the model's output contains NaN or infinity")
    features = next((find_main_tensor(name, record.output)[1] for name, record in records.items()), logits)
    return logits.cpu(), average_features_over_space(features.float(), tuple(layer_grid)).cpu()


def average_features_over_space(output: Tensor, grid: tuple[int, ...]) -> Tensor:
    """Average a layer's output over space. Return one feature vector per image (N,D)."""
    if output.ndim < 3:
        return output
    if tuple(output.shape[1:-1]) == grid or (output.ndim == 3 and output.shape[1] >= math.prod(grid) > 1):
        return output.flatten(1, -2).mean(1)
    return output.flatten(2).mean(2)


def are_probability_outputs(logits: Tensor, outputs: str) -> bool:
    """Return whether the model's outputs (N,K) are probabilities instead of logits."""
    if outputs == "softmax":
        return logits.shape[1] > 1 and are_probabilities(logits)
    return bool(((logits >= 0) & (logits <= 1)).all())


def compute_log_odds(
    context: AuditContext, logits: Tensor, findings: Sequence[Finding], *, outputs_are_probabilities: bool
) -> Tensor:
    """Compute the log odds (N,F) of the findings. The model's outputs (N,K) may be logits or probabilities."""
    outputs = context.config.model.outputs
    if outputs == "softmax" and logits.shape[1] == 1:
        raise InputError(
            "the model has one output, and its softmax is always 1; if the output is the log odds of the finding, "
            'set outputs = "sigmoid" under [model]'
        )
    for finding in findings:
        if finding.class_index >= logits.shape[1]:
            raise InputError(
                f"class {finding.class_index} is out of range: the model has {plural(logits.shape[1], 'class')}"
            )
    if outputs == "sigmoid":
        epsilon = torch.finfo(torch.float32).eps / 2
        scores = logits.clamp(epsilon, 1 - epsilon).logit() if outputs_are_probabilities else logits
        return torch.stack([scores[:, finding.class_index] for finding in findings], 1)
    return torch.stack(
        [
            compute_softmax_log_odds(logits, finding.class_index, is_probability=outputs_are_probabilities)
            for finding in findings
        ],
        1,
    )


def compute_softmax_log_odds(outputs: Tensor, class_index: int, *, is_probability: bool = False) -> Tensor:
    """Return the log odds (N,) of one class against all other classes.

    From logits o, they are o_c minus the logsumexp of all other logits. Of probabilities the logarithm is taken. A
    probability of 0 becomes the smallest number of its type.
    """
    logits = outputs.clamp(min=torch.finfo(outputs.dtype).tiny).log() if is_probability else outputs
    other_logits = torch.cat([logits[:, :class_index], logits[:, class_index + 1 :]], 1)
    return logits[:, class_index] - other_logits.logsumexp(1)
