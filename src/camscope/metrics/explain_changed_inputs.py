"""`ExplainerProbe`: explains changed inputs or changed models for the targets that the clean input gave."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from camscope.errors import InputError, TargetError
from camscope.explainers.control_methods import BaseControl
from camscope.explainers.core.base_explainer import Explainer
from camscope.explainers.core.evaluation_context import check_finite, evaluation_context, inspect_model
from camscope.explainers.core.run_methods_in_shared_passes import run_methods
from camscope.hooks.find_layers import unwrap
from camscope.metrics.metric_registry import FloatArray
from camscope.targets import Score, TargetLike

PROBE_BATCH_SIZE = 16  # inputs of one forward pass
_Value = TypeVar("_Value")
# key -> the objects whose ids are part of the key, which keeps them alive, and the value
_cache: ContextVar[dict[Hashable, tuple[object, Any]] | None] = ContextVar("probe_cache", default=None)


@contextmanager
def clean_maps_and_predictions_shared() -> Iterator[None]:
    """Let the metrics in the `with` block share results for the same image: probes, unperturbed maps and predictions."""
    token = _cache.set({})
    try:
        yield
    finally:
        _cache.reset(token)


def compute_once(key: Hashable, objects: Sequence[object], compute: Callable[[], _Value]) -> _Value:
    """Compute a value. Inside `clean_maps_and_predictions_shared`, a value with equal key and objects is computed only once."""
    cache = _cache.get()
    if cache is None:
        return compute()
    full_key = (key, *map(id, objects))
    if full_key not in cache:
        cache[full_key] = objects, compute()
    value: _Value = cache[full_key][1]
    return value


class ExplainedVariants(NamedTuple):
    """Maps (R,*s) of input variants, and the probabilities (R,) of their classes, or None if the maps took no such pass."""

    maps: FloatArray
    probabilities: FloatArray | None


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
        """Create a probe for the images x. Targets and layers are chosen once. `target` is what `Score` accepts."""
        key = ("probe", repr(target))
        return compute_once(key, (explainer, x), lambda: cls._resolve_target_and_layers(explainer, x, target))

    @classmethod
    def _resolve_target_and_layers(cls, explainer: Explainer, x: Tensor, target: TargetLike) -> "ExplainerProbe":
        """Run the model on x once. Resolve the target and the layer for all methods."""
        model_info = inspect_model(explainer.model, scores_suffice=explainer.needs_only_scores)
        with evaluation_context(model_info, explainer, x) as context:
            resolved = explainer.resolve_target(target)

            def predict_score_and_probabilities() -> tuple[Score, FloatArray]:
                score = context.create_score(resolved)
                output = score.forward(context.x)
                return score, _to_float_array(score.probability(output, len(context.x)))

            settings = explainer.mode, explainer.precision, explainer.class_names, explainer.forward_options
            key = ("prediction", repr(resolved), repr(settings))
            score, probabilities = compute_once(key, (unwrap(explainer.model), x), predict_score_and_probabilities)
            explainer = explainer.with_chosen_layers(context.x, score)
        logits = score.logits
        return cls(explainer, x, score, probabilities, None if logits is None else logits.shape[1])

    @cached_property
    def clean_maps(self) -> FloatArray:
        """The maps (N,*s) of the unperturbed input. All samples are explained in one batch."""
        return self.compute_maps(self.x, range(len(self.x)))

    def select_targets(self, sample_index: Sequence[int]) -> Any:
        """Return the targets of the samples in `sample_index`. `Explainer.attribute` accepts them."""
        pairs, target = self.score.class_pairs, self.score.target
        if pairs is not None and self.score.classes is not None:
            return pairs[list(sample_index), 0].tolist()
        if isinstance(target, list):
            return [target[index] for index in sample_index]
        if callable(target) and len(self.x) > 1 and list(sample_index) != list(range(len(self.x))):
            raise TargetError("a callable target supports only one image: pass one sample x (1,C,*S)")
        return target

    def compute_maps(self, x: Tensor, sample_index: Sequence[int], batch_size: int = PROBE_BATCH_SIZE) -> FloatArray:
        """Explain changed inputs (R,C,*S). Row i has the target of the original sample `sample_index[i]`. Return the maps."""
        return self.explain(x, sample_index, batch_size).maps

    def explain(self, x: Tensor, sample_index: Sequence[int], batch_size: int = PROBE_BATCH_SIZE) -> ExplainedVariants:
        """Explain changed inputs (R,C,*S). Return the maps, and the probability of each target (see `compute_maps`)."""
        maps, probabilities = [], []
        for start in range(0, len(x), batch_size):
            part = slice(start, start + batch_size)
            if isinstance(self.explainer, BaseControl):  # its map does not need a pass of the model
                with torch.no_grad():
                    control_map = self.explainer.control_map(x[part])
                check_finite(f"the map of {self.explainer.composed_name}", control_map, self.explainer.on_nonfinite)
                maps.append(control_map)
                continue
            targets = [self.select_targets(sample_index[part])]
            (result,) = run_methods([self.explainer], x[part], targets, warn_flagged=False, find_constant_scores=False)
            maps.append(result.maps[0].attribution)
            score = result.scores[0]
            if score.logits is not None and score.classes is not None:
                probabilities.append(score.probability(score.logits, len(score.logits)))
        is_complete = sum(map(len, probabilities)) == len(x)
        return ExplainedVariants(
            _to_float_array(torch.cat(maps)), _to_float_array(torch.cat(probabilities)) if is_complete else None
        )

    def compute_probabilities(self, x: Tensor, sample_index: Sequence[int]) -> FloatArray:
        """Return the probability (R,) of each changed input (R,C,*S), for the target of its original sample."""
        probabilities = []
        model_info = inspect_model(self.explainer.model, scores_suffice=self.explainer.needs_only_scores)
        with evaluation_context(model_info, self.explainer, x) as context:
            for start in range(0, len(context.x), PROBE_BATCH_SIZE):
                part = context.x[start : start + PROBE_BATCH_SIZE]
                rows = torch.tensor(sample_index[start : start + PROBE_BATCH_SIZE], device=part.device)
                probabilities.append(self.score.probability(self.score.forward(part, rows), len(part), rows))
        return _to_float_array(torch.cat(probabilities))


def require_single_sample(x: Tensor) -> Tensor:
    """Check that x holds exactly one sample (1,C,*S), and return x. Otherwise raise an InputError."""
    if x.ndim < 3 or len(x) != 1:
        raise InputError(
            f"x has shape {tuple(x.shape)}: expected one sample (1,C,*S). Call the metric once for each sample"
        )
    return x


def _to_float_array(values: Tensor) -> FloatArray:
    return np.asarray(values.detach().to("cpu", torch.float64).numpy())
