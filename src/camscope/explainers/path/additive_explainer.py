"""Base classes of maps that sum to a known number, such as the change of the score from a baseline."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from camscope.explainers.core.baselines import BaselineMixin
from camscope.explainers.core.maps_with_flags import AttributionMaps
from camscope.explainers.core.perturbed_evaluator import PerturbedEvaluator
from camscope.explainers.core.pixel_explainers import MultiPassExplainer, PixelExplainer, format_completeness_gap
from camscope.plurals import plural
from camscope.targets import Score


class AdditiveAttribution(NamedTuple):
    """The attribution values (C,*S) of one sample, and the sum that they should have.

    `notes` are about the sample. `remark` is added to the note about the sum.
    """

    values: Tensor
    expected_sum: Tensor
    n_gradients: int | None = None
    has_nonzero_path: bool = True
    notes: tuple[str, ...] = ()
    remark: str = ""


class AdditiveExplainer(PixelExplainer, MultiPassExplainer):
    """Base class of maps that sum to a known number. A subclass implements `compute_sample_attribution`.

    Notes and `diagnostics` report the difference from this sum, before `channel_reduction` removes the signs.
    """

    evaluator_cls: ClassVar[type[PerturbedEvaluator]] = PerturbedEvaluator
    sum_name: ClassVar[str] = "completeness"
    sum_text: ClassVar[str] = "the score changes by"
    diagnostic_names: ClassVar[tuple[str, str]] = ("completeness_gap", "score_change")

    @abstractmethod
    def compute_sample_attribution(
        self, evaluator: PerturbedEvaluator, sample: int, baseline_tensors: Sequence[Tensor]
    ) -> AdditiveAttribution:
        """Compute the attribution of one sample in comparison with baselines. `baseline_tensors` are (C,*S)."""

    def build_baselines(self, x: Tensor) -> list[Tensor]:
        """Build one tensor (N,C,*S) for each baseline. By default there is no baseline."""
        return []

    def compute_score_maps(self, x: Tensor, score: Score) -> AttributionMaps:
        """Compute the maps (N,*S) of one score. Notes compare the sum of each map with its expected sum."""
        evaluator, baselines = self.evaluator_cls(self, x, score), self.build_baselines(x)
        samples = [(evaluator, i, [baseline[i] for baseline in baselines]) for i in range(len(x))]
        parts = [self.compute_sample_attribution(*sample) for sample in samples]
        values, expected = torch.stack([part.values for part in parts]), [part.expected_sum.double() for part in parts]
        totals, changes = values.double().flatten(1).sum(1), torch.stack(expected)
        has_path = torch.tensor([part.has_nonzero_path for part in parts], device=x.device)
        diagnostics = dict(zip(self.diagnostic_names, (totals - changes, changes), strict=True))
        counts = [part.n_gradients for part in parts if part.n_gradients is not None]
        if counts:
            diagnostics["gradients"] = torch.tensor(counts, device="cpu")
        return AttributionMaps(
            self.convert_values_to_maps(evaluator, values),
            zero_gradient=has_path & ~values.flatten(1).any(1),
            sample_notes=tuple(
                (*part.notes, self.describe_sum(part, total))
                for part, total in zip(parts, totals.tolist(), strict=True)
            ),
            diagnostics=diagnostics,
        )

    def describe_sum(self, attribution: AdditiveAttribution, total: float) -> str:
        """Return a note that compares the sum of the values, `total`, with the expected sum."""
        gap = format_completeness_gap(self.describe_summands(), total, self.sum_text, float(attribution.expected_sum))
        n_gradients = attribution.n_gradients
        count = "" if n_gradients is None else f", after {plural(n_gradients, 'gradient')}"
        return f"{self.sum_name}: {gap}{count}{attribution.remark}"

    def convert_values_to_maps(self, evaluator: PerturbedEvaluator, values: Tensor) -> Tensor:
        """Convert attribution values (N,C,*S) to maps (N,*S). By default, combine the channels of each pixel."""
        return self.reduce_channels(values)


class BaselinePathExplainer(BaselineMixin, AdditiveExplainer):
    """Base class of maps that sum to the score minus the score of a baseline. A subclass implements `integrate_path`."""

    @abstractmethod
    def integrate_path(
        self, evaluator: PerturbedEvaluator, sample: int, baseline: Tensor, score_change: Tensor
    ) -> AdditiveAttribution:
        """Integrate gradients from a baseline (C,*S) to one sample. On the way, the score changes by `score_change`."""

    def compute_sample_attribution(
        self, evaluator: PerturbedEvaluator, sample: int, baseline_tensors: Sequence[Tensor]
    ) -> AdditiveAttribution:
        """Compute the attribution of one sample as the mean over its baselines."""
        score = evaluator.clean_scores[sample]
        parts = []
        for start in baseline_tensors:
            change = score - evaluator.score_input(sample, start)
            parts.append(self.integrate_path(evaluator, sample, start, change))
        moved = any(not torch.equal(start, evaluator.x[sample]) for start in baseline_tensors)
        still = () if moved else ("the input is the baseline itself: there is nothing to explain",)
        values = torch.stack([part.values for part in parts]).mean(0)
        change = torch.stack([part.expected_sum for part in parts]).mean()
        notes = tuple(dict.fromkeys((*still, *(note for part in parts for note in part.notes))))
        return AdditiveAttribution(values, change, sum(part.n_gradients or 0 for part in parts), moved, notes)
