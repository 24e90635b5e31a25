"""Expected gradients and GradientSHAP: integrated gradients averaged over random baselines."""

from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from camscope.explainers.core.base_explainer import register
from camscope.explainers.core.baselines import BackgroundMixin, build_baseline_tensors
from camscope.explainers.core.perturbed_evaluator import PerturbedEvaluator
from camscope.explainers.core.random_mixin import draw_normal, draw_seeds
from camscope.explainers.core.validated_setting_types import NonNegativeNumber, PositiveInteger
from camscope.explainers.path.additive_explainer import AdditiveAttribution, AdditiveExplainer
from camscope.targets import full_precision


class PathSamples(NamedTuple):
    """Random points on paths from baselines to a sample. Each point has a baseline index, a fraction 0..1, and a noise seed."""

    baseline_indices: Tensor
    fractions: Tensor
    noise_seeds: Sequence[int]

    @classmethod
    def draw(cls, n_samples: int, n_baselines: int, generator: torch.Generator) -> "PathSamples":
        """Divide the path into `n_samples` equal steps and draw one point in each. All baselines are drawn equally often."""
        n_rounds = -(-n_samples // n_baselines)
        rounds = [torch.randperm(n_baselines, generator=generator, device="cpu") for _ in range(n_rounds)]
        offsets = torch.rand(n_samples, generator=generator, dtype=torch.float64, device="cpu")
        fractions = (torch.arange(n_samples, device="cpu") + offsets) / n_samples
        return cls(torch.cat(rounds)[:n_samples], fractions, draw_seeds(n_samples, generator))


@register
class ExpectedGradients(BackgroundMixin, AdditiveExplainer):
    """Integrated gradients averaged over many baselines x' of a background data set (Erion et al. 2021).

    The map is E[(x - x') ∂f(x' + a (x - x'))/∂x] over x' and a in 0..1. The pairs are stratified, which does not change
    the expectation. Use it if a set of typical inputs is available, and no single baseline is neutral.

    Args:
        n_samples: Number of random pairs (x', a).

    >>> background = [draw_radiograph(seed, "no finding").image for seed in (1, 2)]
    >>> ExpectedGradients(model, background=background, n_samples=8).explain(image, "nodule").grid
    (128, 128)

    """

    name, title, paper = "expectedgradients", "Expected Gradients", "arXiv:1906.10670"
    forward_passes: ClassVar[str] = "1 + n_references + n_samples"
    backward_passes: ClassVar[str] = "n_samples"
    n_samples: PositiveInteger = 50

    def __post_init__(self) -> None:
        super().__post_init__()
        self.n_references: int = min(len(self.list_baselines()), self.n_samples)  # how many baselines are drawn

    def build_baselines(self, x: Tensor) -> list[Tensor]:
        """Build one tensor (N,C,*S) for each background image that was drawn."""
        drawn = self._draw_path_samples().baseline_indices.unique().tolist()
        return build_baseline_tensors(self.list_baselines(), x, self, drawn)

    def compute_sample_attribution(
        self, evaluator: PerturbedEvaluator, sample: int, baseline_tensors: Sequence[Tensor]
    ) -> AdditiveAttribution:
        """Compute the attribution of one sample as the mean over random points on paths from baselines to the sample."""
        x, draws, baselines = evaluator.x[sample], self._draw_path_samples(), torch.stack(list(baseline_tensors))
        picks = draws.baseline_indices.unique(return_inverse=True)[1]
        total = torch.zeros_like(x, dtype=torch.float64)
        scores = torch.empty(len(baselines), dtype=evaluator.clean_scores.dtype, device=x.device)

        def add_gradients(part: slice) -> None:
            starts, ends = baselines[picks[part].to(x.device)], self.compute_path_ends(x, draws, part)
            shares = draws.fractions[part].to(x).view(-1, *[1] * x.ndim)
            gradients = evaluator.compute_scores_and_gradients(sample, starts + (ends - starts) * shares)[1]
            products = (full_precision(ends) - full_precision(starts)) * gradients
            total.add_(products.sum(0, dtype=torch.float64))

        def score_baselines(part: slice) -> None:
            scores[part] = evaluator.score_variants(sample, baselines[part])

        evaluator.process_chunks(sample, self.n_samples, add_gradients, with_gradients=True)
        evaluator.process_chunks(sample, len(baselines), score_baselines)
        frequency = picks.bincount().to(scores) / self.n_samples
        change = evaluator.clean_scores[sample] - (frequency * scores).sum()
        values = (total / self.n_samples).to(full_precision(x).dtype)
        moved = not all(torch.equal(baseline, x) for baseline in baselines)
        return AdditiveAttribution(values, change, self.n_samples, moved, self.default_background_notes)

    def _draw_path_samples(self) -> PathSamples:
        return PathSamples.draw(self.n_samples, len(self.list_baselines()), self.generator())

    def compute_path_ends(self, x: Tensor, path_samples: PathSamples, rows: slice) -> Tensor:
        """Return where R of the paths end, as (R,C,*S). By default each path ends at the sample (C,*S)."""
        return x.expand(rows.stop - rows.start, *x.shape)


@register
class GradientSHAP(ExpectedGradients):
    """Expected gradients of noisy copies z of the input: E[(z - x') ∂f(x' + a (z - x'))/∂x] (Lundberg & Lee 2017).

    Without noise these are expected gradients. With noise the map sums to the change of the score only if the score
    does not react to the noise. Use it for results that are comparable with those of captum and shap.

    Args:
        sigma: Standard deviation of the noise, as a share of the range of the sample.

    >>> GradientSHAP(model, background=["black", "blur"], n_samples=8).explain(image, "nodule").method_title
    'GradientSHAP'

    """

    name, title, paper = "gradientshap", "GradientSHAP", "arXiv:1705.07874"
    sigma: NonNegativeNumber = 0.1

    def compute_path_ends(self, x: Tensor, path_samples: PathSamples, rows: slice) -> Tensor:
        """Return where R of the paths end, as (R,C,*S). Each path ends at a noisy copy of the sample (C,*S)."""
        return x + draw_normal(path_samples.noise_seeds[rows], x) * (self.sigma * (x.amax() - x.amin()))
