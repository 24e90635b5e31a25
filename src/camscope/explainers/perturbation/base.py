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

MaskChunkBuilder = Callable[[slice], Tensor]  # some of a method's masks (R,*S): 1 shows the input, 0 the fill


class PerturbationAttribution(NamedTuple):
    """The map (*S) of one sample in float64, its standard error per cell if it is a mean, and notes."""

    attribution: Tensor
    standard_error: Tensor | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class MaskedInput:
    """One sample of a call, which is shown to the model through masks, and the fills (C,*S) that show where they hide it."""

    evaluator: PerturbedEvaluator
    sample: int
    baseline_tensors: Sequence[Tensor]

    @property
    def x(self) -> Tensor:
        """(C,*S)"""
        return self.evaluator.x[self.sample]

    @property
    def clean_score(self) -> Tensor:
        """(): the score with nothing hidden."""
        return self.evaluator.clean_scores[self.sample].double()

    @property
    def machine_epsilon(self) -> float:
        """Return the machine epsilon of the dtype of the model's scores."""
        return torch.finfo(self.evaluator.score.dtype).eps

    def apply_masks(self, masks: Tensor, baseline_tensor: Tensor) -> Tensor:
        """(R,*S) -> (R,C,*S): x m + fill (1 - m), the one or the other to the bit where m is 1 or 0."""
        return torch.lerp(baseline_tensor, self.x, masks[:, None].to(self.x.dtype))

    def score_masks(self, masks: Tensor, *, as_probability: bool = False) -> Tensor:
        """(R,*S) -> (F,R), float64: the score, or the probability, under each fill."""
        each = [
            self.evaluator.score_variants(self.sample, self.apply_masks(masks, fill), as_probability=as_probability)
            for fill in self.baseline_tensors
        ]
        return torch.stack(each).double()

    def score_all_masks(self, n_masks: int, build_masks: MaskChunkBuilder, *, as_probability: bool = False) -> Tensor:
        """(F,turns), float64: the scores, or probabilities, under so many masks, in passes that fit into memory."""
        scores = torch.empty(len(self.baseline_tensors), n_masks, dtype=torch.float64, device=self.x.device)

        def work(part: slice) -> None:
            scores[:, part] = self.score_masks(build_masks(part), as_probability=as_probability)

        self.evaluator.process_chunks(self.sample, n_masks, work)
        return scores

    def compute_mask_gradients(self, masks: Tensor, *, as_probability: bool = False) -> tuple[Tensor, Tensor]:
        """(R,*S) -> (R,), (R,*S): the score, or the probability, and its gradient at the masks; means over the fills."""
        values, slopes = (torch.zeros_like(like, dtype=torch.float64) for like in (masks.flatten(1)[:, 0], masks))

        def work(part: slice) -> None:
            each = [
                self.evaluator.compute_gradients(
                    self.sample, self.apply_masks(masks[part], fill), as_probability=as_probability
                )
                for fill in self.baseline_tensors
            ]
            for (value, gradient), fill in zip(each, self.baseline_tensors, strict=True):
                values[part] += value
                slopes[part] += (gradient * (full_precision(self.x) - full_precision(fill))).sum(1)

        process_chunks(len(masks), self.evaluator.choose_chunk_size(with_gradients=True), work)
        return values / len(self.baseline_tensors), (slopes / len(self.baseline_tensors)).to(masks.dtype)


class PerturbationExplainer(BaselineMixin, MultiPassExplainer):
    """Base of maps of the score lost or kept when input is hidden. Implement `compute_sample_attribution`.

    What is seen where the input is hidden is the `baseline`.
    """

    @abstractmethod
    def compute_sample_attribution(self, masked_input: MaskedInput) -> PerturbationAttribution:
        """The map of one sample."""

    def compute_score_maps(self, x: Tensor, score: Score) -> AttributionMaps:
        """The map (N,*S), and its standard error where it is a mean over masks."""
        runs, fills = PerturbedEvaluator(self, x, score), self.build_baselines(x)
        each = [
            self.compute_sample_attribution(MaskedInput(runs, i, [fill[i] for fill in fills])) for i in range(len(x))
        ]
        kind = torch.promote_types(x.dtype, torch.float32)
        errors = [sample_maps.standard_error for sample_maps in each if sample_maps.standard_error is not None]
        return AttributionMaps(
            torch.stack([sample_maps.attribution for sample_maps in each]).to(kind),
            sample_notes=tuple(sample_maps.notes for sample_maps in each),
            standard_error=torch.stack(errors).to(kind) if errors else None,
        )


def compute_relative_error(mean: Tensor, standard_error: Tensor) -> float:
    """Return the largest standard error as a share of the range of the mean map."""
    most, span = float(standard_error.max()), float(mean.max() - mean.min())
    return most / span if span > 0 else float(most > 0)


def describe_convergence(relative_error: float, tolerance: float | None, stopped_early: bool, max_samples: int) -> str:
    """Describe the standard error of a map, and whether it stopped before `max_samples` samples."""
    words = f"the largest standard error is {relative_error:.2%} of the map's range"
    if stopped_early:
        return f"{words}: settled to tolerance={tolerance:g} before all {max_samples}"
    return (
        f"{words}: not settled to tolerance={tolerance:g}"
        if tolerance is not None and relative_error > tolerance
        else words
    )


def expand_per_axis(value: int | Sequence[int], size: Sequence[int]) -> tuple[int, ...]:
    """One number for every axis of a size: at most that axis's own."""
    each = [value] * len(size) if isinstance(value, int) else value
    return tuple(min(int(value), length) for value, length in zip(each, size, strict=True))
