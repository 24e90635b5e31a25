"""Probe: an explainer and one question, fixed on the clean input, so that altered inputs and models are asked the same."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from camscope.errors import InputError, TargetError
from camscope.explainers.core.base import Explainer
from camscope.explainers.core.dispatch import run_methods
from camscope.explainers.core.evaluation_context import evaluation_context, inspect_model
from camscope.metrics.base import FloatArray
from camscope.targets import Score, TargetLike

PROBE_BATCH_SIZE = 16  # inputs of one pass


@dataclass(frozen=True)
class ExplainerProbe:
    """What is asked of each sample of x (N,C,*S), and the model's clean answer: `clean_probabilities` (N,).

    What the explainer chooses for itself, such as its layer, is chosen on the clean input, too. A chance is the softmax of
    the class; of a question that is not one class's, the score. `n_classes`: how many the model tells apart; None where its
    output is none of classes.
    """

    explainer: Explainer
    x: Tensor
    score: Score
    clean_probabilities: FloatArray
    n_classes: int | None

    @classmethod
    def from_explainer(cls, explainer: Explainer, x: Tensor, target: TargetLike = None) -> "ExplainerProbe":
        """One forward pass settles the question; `target`: see Score."""
        with evaluation_context(inspect_model(explainer.model), explainer, x) as asked:
            score = asked.create_score(explainer.resolve_target(target))
            output = score.forward(asked.x)
            chances = score.probability(output, len(asked.x))
            explainer = explainer.resolve(asked.x, score)
        logits = score.logits
        return cls(explainer, x, score, _to_float_array(chances), None if logits is None else logits.shape[1])

    def select_targets(self, sample_index: Sequence[int]) -> Any:
        """The question of each sample that is named, as `attribute` takes them."""
        pairs, target = self.score.class_pairs, self.score.target
        if pairs is not None and self.score.classes is not None:
            return pairs[list(sample_index), 0].tolist()
        if isinstance(target, list):
            return [target[owner] for owner in sample_index]
        if callable(target) and len(self.x) > 1 and list(sample_index) != list(range(len(self.x))):
            raise TargetError("a callable target is asked of one image at a time here: pass x of one sample")
        return target

    def compute_maps(self, x: Tensor, sample_index: Sequence[int], batch_size: int = PROBE_BATCH_SIZE) -> FloatArray:
        """(R,C,*S) -> (R,*s): maps of versions of the samples `sample_index` (R,), each asked its own sample's question."""
        made = []
        for start in range(0, len(x), batch_size):
            part = slice(start, start + batch_size)
            made.append(
                run_methods([self.explainer], x[part], [self.select_targets(sample_index[part])], warn_flagged=False)[0]
                .maps[0]
                .attribution
            )
        return _to_float_array(torch.cat(made))

    def compute_probabilities(self, x: Tensor, sample_index: Sequence[int]) -> FloatArray:
        """(R,C,*S) -> (R,): the chance of each version's own question."""
        found = []
        with evaluation_context(inspect_model(self.explainer.model), self.explainer, x) as asked:
            for start in range(0, len(asked.x), PROBE_BATCH_SIZE):
                part = asked.x[start : start + PROBE_BATCH_SIZE]
                rows = torch.tensor(sample_index[start : start + PROBE_BATCH_SIZE], device=part.device)
                found.append(self.score.probability(self.score.forward(part, rows), len(part), rows))
        return _to_float_array(torch.cat(found))

    def select_sample(self, sample: int) -> "ExplainerProbe":
        """The question about one sample, by itself."""
        return ExplainerProbe.from_explainer(self.explainer, self.x[sample : sample + 1], self.select_targets([sample]))

    def with_explainer(self, explainer: Explainer) -> "ExplainerProbe":
        """The same questions, put to another explainer."""
        return replace(self, explainer=explainer)


def check_single_sample(x: Tensor) -> Tensor:
    """(1,C,*S): one sample, or an InputError that says so."""
    if x.ndim < 3 or len(x) != 1:
        raise InputError(f"x is {tuple(x.shape)}: expected one sample (1,C,*S); for a batch, call it for each")
    return x


def _to_float_array(values: Tensor) -> FloatArray:
    return np.asarray(values.detach().to("cpu", torch.float64).numpy())
