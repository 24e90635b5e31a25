"""Base of the methods that hide parts of the input and measure the change of the score."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from camscope.explainers.core.base_method import AttributionMaps
from camscope.explainers.core.baselines import BaselineMixin
from camscope.explainers.core.batching import process_chunks
from camscope.explainers.core.pixel_base import MultiPassExplainer, PerturbedEvaluator
from camscope.targets import Score, full_precision

MaskChunkBuilder = Callable[[slice], Tensor]  # some of a method's masks (R,*S): 1 shows the input, 0 the baseline


class PerturbationAttribution(NamedTuple):
    """The map (*S) of one sample in float64, its standard error per cell if it is a mean, and notes."""

    attribution: Tensor
    standard_error: Tensor | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class MaskedInput:
    """One sample that is shown to the model through masks, and the baselines (C,*S) that fill what they hide."""

    evaluator: PerturbedEvaluator
    sample: int
    baselines: Sequence[Tensor]

    @property
    def x(self) -> Tensor:
        """The sample (C,*S)."""
        return self.evaluator.x[self.sample]

    @property
    def clean_score(self) -> Tensor:
        """The score () with nothing hidden."""
        return self.evaluator.clean_scores[self.sample].double()

    def apply_masks(self, masks: Tensor, baseline: Tensor) -> Tensor:
        """Return x m + baseline (1 - m) for masks m (R,*S), exact where m is 0 or 1."""
        return torch.lerp(baseline, self.x, masks[:, None].to(self.x.dtype))

    def score_masks(self, masks: Tensor, *, as_probability: bool = False) -> Tensor:
        """Return the score, or the probability, of each baseline under masks (R,*S), as (B,R) in float64."""
        rows = [
            self.evaluator.score_variants(self.sample, self.apply_masks(masks, baseline), as_probability=as_probability)
            for baseline in self.baselines
        ]
        return torch.stack(rows).double()

    def score_all_masks(self, n_masks: int, build_masks: MaskChunkBuilder, *, as_probability: bool = False) -> Tensor:
        """Return the scores, or probabilities, (B,n_masks) in float64, in passes that fit into memory."""
        scores = torch.empty(len(self.baselines), n_masks, dtype=torch.float64, device=self.x.device)

        def work(part: slice) -> None:
            scores[:, part] = self.score_masks(build_masks(part), as_probability=as_probability)

        self.evaluator.process_chunks(self.sample, n_masks, work)
        return scores

    def compute_mask_gradients(self, masks: Tensor, *, as_probability: bool = False) -> tuple[Tensor, Tensor]:
        """Return the score (R,), or the probability, and its gradient at masks (R,*S); means over the baselines."""
        values, slopes = (torch.zeros_like(like, dtype=torch.float64) for like in (masks.flatten(1)[:, 0], masks))

        def work(part: slice) -> None:
            each = [
                self.evaluator.compute_gradients(
                    self.sample, self.apply_masks(masks[part], baseline), as_probability=as_probability
                )
                for baseline in self.baselines
            ]
            for (value, gradient), baseline in zip(each, self.baselines, strict=True):
                values[part] += value
                slopes[part] += (gradient * (full_precision(self.x) - full_precision(baseline))).sum(1)

        process_chunks(len(masks), self.evaluator.choose_chunk_size(with_gradients=True), work)
        return values / len(self.baselines), (slopes / len(self.baselines)).to(masks.dtype)


class PerturbationExplainer(BaselineMixin, MultiPassExplainer):
    """Base of maps of the score lost or kept when a `baseline` hides input. Implement `compute_sample_attribution`."""

    @abstractmethod
    def compute_sample_attribution(self, masked_input: MaskedInput) -> PerturbationAttribution:
        """Return the map of one sample."""

    def compute_score_maps(self, x: Tensor, score: Score) -> AttributionMaps:
        """Return the map (N,*S), and its standard error if it is a mean over masks."""
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
    """Return the largest standard error as a share of the range of the mean map."""
    largest, span = float(standard_error.max()), float(mean.max() - mean.min())
    return largest / span if span > 0 else float(largest > 0)


def describe_convergence(relative_error: float, tolerance: float | None, n_samples: int, max_samples: int) -> str:
    """Describe the standard error of a map, and whether it stopped before `max_samples` samples."""
    text = f"the largest standard error is {relative_error:.2%} of the map's range"
    if n_samples < max_samples:
        return f"{text}: settled to tolerance={tolerance:g} before all {max_samples}"
    is_settled = tolerance is None or relative_error <= tolerance
    return text if is_settled else f"{text}: not settled to tolerance={tolerance:g}"


def expand_per_axis(value: int | Sequence[int], size: Sequence[int]) -> tuple[int, ...]:
    """Return a number for every axis of a size, limited by the length of the axis."""
    values = [value] * len(size) if isinstance(value, int) else value
    return tuple(min(int(number), length) for number, length in zip(values, size, strict=True))
