"""`ExplainerProbe`: explains changed inputs or changed models for the targets that the clean input gave."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from camscope.errors import InputError, TargetError
from camscope.explainers.core.evaluation_context import evaluation_context, inspect_model
from camscope.explainers.core.explainer import Explainer
from camscope.explainers.core.shared_passes import run_methods
from camscope.metrics.metric_registry import FloatArray
from camscope.targets import Score, TargetLike

PROBE_BATCH_SIZE = 16  # inputs of one forward pass


@dataclass(frozen=True)
class ExplainerProbe:
    """An explainer with fixed targets and layers, which were chosen on the clean input x (N,C,*S)."""

    explainer: Explainer
    x: Tensor
    score: Score
    clean_probabilities: FloatArray  # (N,) of the class; for a target that is not a class, the score
    n_classes: int | None  # None if the model's output is not one of classes

    @classmethod
    def from_explainer(cls, explainer: Explainer, x: Tensor, target: TargetLike = None) -> "ExplainerProbe":
        """Create a probe: choose the targets and layers on x once. `target` is what `Score` accepts."""
        with evaluation_context(inspect_model(explainer.model), explainer, x) as context:
            score = context.create_score(explainer.resolve_target(target))
            output = score.forward(context.x)
            probabilities = score.probability(output, len(context.x))
            explainer = explainer.with_chosen_layers(context.x, score)
        logits = score.logits
        return cls(explainer, x, score, _to_float_array(probabilities), None if logits is None else logits.shape[1])

    def select_targets(self, sample_index: Sequence[int]) -> Any:
        """Return the targets of the samples `sample_index`, as `Explainer.attribute` accepts them."""
        pairs, target = self.score.class_pairs, self.score.target
        if pairs is not None and self.score.classes is not None:
            return pairs[list(sample_index), 0].tolist()
        if isinstance(target, list):
            return [target[index] for index in sample_index]
        if callable(target) and len(self.x) > 1 and list(sample_index) != list(range(len(self.x))):
            raise TargetError("a callable target supports only one image: pass one sample x (1,C,*S)")
        return target

    def compute_maps(self, x: Tensor, sample_index: Sequence[int], batch_size: int = PROBE_BATCH_SIZE) -> FloatArray:
        """Return maps (R,*s) of input variants (R,C,*S). Row i explains the target of the clean sample `sample_index[i]`."""
        maps = []
        for start in range(0, len(x), batch_size):
            part = slice(start, start + batch_size)
            targets = [self.select_targets(sample_index[part])]
            maps.append(run_methods([self.explainer], x[part], targets, warn_flagged=False)[0].maps[0].attribution)
        return _to_float_array(torch.cat(maps))

    def compute_probabilities(self, x: Tensor, sample_index: Sequence[int]) -> FloatArray:
        """Return the probability (R,) of each input variant (R,C,*S) for the target of its clean sample."""
        probabilities = []
        with evaluation_context(inspect_model(self.explainer.model), self.explainer, x) as context:
            for start in range(0, len(context.x), PROBE_BATCH_SIZE):
                part = context.x[start : start + PROBE_BATCH_SIZE]
                rows = torch.tensor(sample_index[start : start + PROBE_BATCH_SIZE], device=part.device)
                probabilities.append(self.score.probability(self.score.forward(part, rows), len(part), rows))
        return _to_float_array(torch.cat(probabilities))


def check_single_sample(x: Tensor) -> Tensor:
    """Return x if it holds one sample (1,C,*S). Otherwise raise InputError."""
    if x.ndim < 3 or len(x) != 1:
        raise InputError(
            f"x has shape {tuple(x.shape)}: expected one sample (1,C,*S). Call the metric once for each sample"
        )
    return x


def _to_float_array(values: Tensor) -> FloatArray:
    return np.asarray(values.detach().to("cpu", torch.float64).numpy())
