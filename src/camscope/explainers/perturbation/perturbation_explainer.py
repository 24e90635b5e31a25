"""Base class of methods that hide parts of the input and measure the change of the score."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from camscope.explainers.core.baselines import BaselineMixin
from camscope.explainers.core.chunk_perturbed_copies_by_memory import process_chunks
from camscope.explainers.core.maps_with_flags import AttributionMaps
from camscope.explainers.core.perturbed_evaluator import PerturbedEvaluator
from camscope.explainers.core.pixel_explainers import MultiPassExplainer
from camscope.targets import Score, full_precision

MaskChunkBuilder = Callable[[slice], Tensor]  # a slice of the masks -> (R,*S): 1 shows the input, 0 the baseline


class PerturbationAttribution(NamedTuple):
    """The map (*S) of one sample in float64, and notes. If the map is a mean, it has a standard error (*S)."""

    attribution: Tensor
    standard_error: Tensor | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class MaskedInput:
    """One sample with masks: hidden pixels are replaced by a baseline, or by each of several baselines (C,*S)."""

    evaluator: PerturbedEvaluator
    sample: int
    baselines: Sequence[Tensor]

    @property
    def x(self) -> Tensor:
        """The sample (C,*S)."""
        return self.evaluator.x[self.sample]

    @property
    def clean_score(self) -> Tensor:
        """The score of the sample without any mask, as a scalar tensor."""
        return self.evaluator.clean_scores[self.sample].double()

    def apply_masks(self, masks: Tensor, baseline: Tensor) -> Tensor:
        """Apply R masks m (R,*S) to the sample x: x m + baseline (1 - m)."""
        return torch.lerp(baseline, self.x, masks[:, None].to(self.x.dtype))

    def score_masks(self, masks: Tensor, *, as_probability: bool = False) -> Tensor:
        """Compute the scores (B,R) of the sample under R masks (R,*S) and B baselines. Optionally return probabilities."""
        rows = [
            self.evaluator.score_variants(self.sample, self.apply_masks(masks, baseline), as_probability=as_probability)
            for baseline in self.baselines
        ]
        return torch.stack(rows).double()

    def score_all_masks(self, n_masks: int, build_masks: MaskChunkBuilder, *, as_probability: bool = False) -> Tensor:
        """Compute the scores (B,n_masks) of the sample under many masks and B baselines, in chunks that fit into memory."""
        scores = torch.empty(len(self.baselines), n_masks, dtype=torch.float64, device=self.x.device)

        def score_masks_of_chunk(part: slice) -> None:
            scores[:, part] = self.score_masks(build_masks(part), as_probability=as_probability)

        self.evaluator.process_chunks(self.sample, n_masks, score_masks_of_chunk)
        return scores

    def compute_scores_and_mask_gradients(
        self, masks: Tensor, *, as_probability: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Compute the scores (R,) under R masks, and the gradients (R,*S) at the masks. Average over the baselines."""
        values, slopes = (torch.zeros_like(like, dtype=torch.float64) for like in (masks.flatten(1)[:, 0], masks))

        def add_gradients(part: slice) -> None:
            each = [
                self.evaluator.compute_scores_and_gradients(
                    self.sample, self.apply_masks(masks[part], baseline), as_probability=as_probability
                )
                for baseline in self.baselines
            ]
            for (value, gradient), baseline in zip(each, self.baselines, strict=True):
                values[part] += value
                slopes[part] += (gradient * (full_precision(self.x) - full_precision(baseline))).sum(1)

        process_chunks(len(masks), self.evaluator.choose_chunk_size(with_gradients=True), add_gradients)
        return values / len(self.baselines), (slopes / len(self.baselines)).to(masks.dtype)


class PerturbationExplainer(BaselineMixin, MultiPassExplainer):
    """Base class of methods that replace pixels by a `baseline`. A subclass implements `compute_sample_attribution`."""

    @property
    def needs_only_scores(self) -> bool:
        """Whether the method needs only the scores of the model. True if it uses no gradients."""
        return not self.uses_gradients

    @abstractmethod
    def compute_sample_attribution(self, masked_input: MaskedInput) -> PerturbationAttribution:
        """Compute the map of one sample from its scores under masks."""

    def compute_score_maps(self, x: Tensor, score: Score) -> AttributionMaps:
        """Compute the maps (N,*S) of one score. Maps that are means over masks also get a standard error."""
        evaluator, baselines = PerturbedEvaluator(self, x, score), self.build_baselines(x)
        inputs = [MaskedInput(evaluator, i, [baseline[i] for baseline in baselines]) for i in range(len(x))]
        parts = [self.compute_sample_attribution(masked_input) for masked_input in inputs]
        dtype = torch.promote_types(x.dtype, torch.float32)
        errors = [part.standard_error for part in parts if part.standard_error is not None]
        return AttributionMaps(
            torch.stack([part.attribution for part in parts]).to(dtype),
            sample_notes=tuple(part.notes for part in parts),
            standard_error=torch.stack(errors).to(dtype) if errors else None,
        )


def compute_relative_error(mean: Tensor, standard_error: Tensor) -> float:
    """Compute the largest standard error of a mean map, relative to the range of the map."""
    largest, span = float(standard_error.max()), float(mean.max() - mean.min())
    return largest / span if span > 0 else float(largest > 0)


def describe_convergence(relative_error: float, tolerance: float | None, n_samples: int, max_samples: int) -> str:
    """Return a sentence about the standard error of a map. The sentence reports if sampling stopped before `max_samples`."""
    text = f"the largest standard error is {relative_error:.2%} of the map's range"
    if n_samples < max_samples:
        return f"{text}: settled to tolerance={tolerance:g} before all {max_samples}"
    is_settled = tolerance is None or relative_error <= tolerance
    return text if is_settled else f"{text}: not settled to tolerance={tolerance:g}"


def expand_and_limit_per_axis(value: int | Sequence[int], size: Sequence[int]) -> tuple[int, ...]:
    """Return one number per axis. Repeat a single number. Limit each number to the length of the axis."""
    values = [value] * len(size) if isinstance(value, int) else value
    return tuple(min(int(number), length) for number, length in zip(values, size, strict=True))
