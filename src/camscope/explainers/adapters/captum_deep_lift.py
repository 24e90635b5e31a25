"""DeepLIFT and DeepLIFT SHAP by captum: gradients in which non-linear modules use Δout/Δin from a baseline.

In a copy of the model, some modules are replaced by modules that captum has rules for. Other non-linear operations are counted.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, cast

import torch
from torch import Tensor, nn

from camscope.errors import InputError, ModelError
from camscope.explainers.adapters.adapter_explainer import AdapterExplainer, call_with_gradients, check_same_score
from camscope.explainers.adapters.count_unsupported_deep_lift_operations import UnsupportedOperationCounter
from camscope.explainers.adapters.deep_lift_module_replacements import (
    replace_overlapping_pools,
    treat_clipped_relus_as_relus,
)
from camscope.explainers.adapters.model_copy_for_hooks import (
    ModuleCallRecords,
    RecordedEvaluator,
    clone_for_hooks,
    restart_call_counts,
)
from camscope.explainers.core.base_explainer import register_optional
from camscope.explainers.core.baselines import BackgroundMixin, BaselineMixin, build_baseline_tensors
from camscope.explainers.core.evaluation_context import check_finite
from camscope.explainers.core.perturbed_evaluator import PerturbedEvaluator
from camscope.explainers.path.additive_explainer import AdditiveAttribution, AdditiveExplainer
from camscope.images.files.redacted_errors_and_file_pseudonyms import ignore_warnings
from camscope.plurals import plural
from camscope.targets import Score, full_precision


@dataclass(kw_only=True, eq=False, repr=False)
class DeepLIFTBase(AdapterExplainer, AdditiveExplainer):
    """The mean over baselines x' of Σ_c m_c (x_c - x'_c). A subclass implements `build_baselines`.

    m is the gradient in which ReLU, ReLU6, Hardtanh, ELU, LeakyReLU, Sigmoid, Tanh, Softplus, Softmax and max pooling, as
    modules, pass on Δout/Δin (by captum). Anything else that is non-linear (functions, GELU, norms, attention) keeps its
    gradient. A note names these operations and how far the map is from adding up to f(x) - f(x'); the `diagnostics`
    `completeness_gap` and `score_change` hold the numbers. captum works on a copy of the modules, with one image and one x'
    at a time.
    """

    package, extra = "captum", "captum"
    evaluator_cls: ClassVar[type[PerturbedEvaluator]] = RecordedEvaluator
    sum_text: ClassVar[str] = "the score less the baselines' mean is"

    @property
    def default_background_notes(self) -> tuple[str, ...]:
        """Notes about the default background of the method. A method that uses no background has no notes."""
        return ()

    def compute_sample_attribution(
        self, evaluator: PerturbedEvaluator, sample: int, baseline_tensors: Sequence[Tensor]
    ) -> AdditiveAttribution:
        """Compute the mean DeepLIFT attribution of one sample over its baselines.

        The remark names the operations without a rule, and the largest gap of all baselines.
        """
        if evaluator.score.one_sample_per_pass:
            raise ModelError(
                f"{self.composed_name} requires independent samples, because it runs the input and its baseline in one batch. "
                "In this model the samples of a batch affect one another, as in a batch norm without running statistics; "
                "use integratedgradients"
            )
        parts = list[AdditiveAttribution]()
        with evaluator.track_sample_steps(sample, len(baseline_tensors)) as advance:
            for baseline in baseline_tensors:
                parts.append(self._attribute_to_baseline(cast(RecordedEvaluator, evaluator), sample, baseline))
                advance(1)
        remark = "".join(dict.fromkeys(part.remark for part in parts))
        if len(parts) > 1:
            gaps = [(float(part.values.double().sum() - part.expected_sum), part.expected_sum) for part in parts]
            gap, change = max(gaps, key=lambda pair: abs(pair[0]))
            count = plural(len(parts), "baseline")
            remark = f"; the worst of {count} has {gap:+.2g} of {float(change):.4g}{remark}"
        return AdditiveAttribution(
            torch.stack([part.values for part in parts]).mean(0),
            torch.stack([part.expected_sum for part in parts]).mean(),
            has_nonzero_path=any(not torch.equal(start, evaluator.x[sample]) for start in baseline_tensors),
            notes=self.default_background_notes,
            remark=remark,
        )

    def _attribute_to_baseline(
        self, evaluator: RecordedEvaluator, sample: int, baseline: Tensor
    ) -> AdditiveAttribution:
        """Compute the DeepLIFT attribution of one sample against one baseline (C,*S)."""
        x, score = evaluator.x[sample], evaluator.score
        score_module, unsupported_ops = (
            _ScoreModule(score, evaluator.call_records, sample),
            UnsupportedOperationCounter(),
        )
        unsupported_ops.exclude_operations_in_supported_modules(score_module)
        multipliers = call_with_gradients(lambda: _compute_multipliers(score_module, x, baseline, unsupported_ops))
        check_finite("the multipliers at the input", multipliers, self.on_nonfinite)
        value, reference = score_module.last_scores
        if self.mode == "eval":
            check_same_score(score, sample, value, evaluator.clean_scores[sample])
        values = full_precision(multipliers) * (full_precision(x) - full_precision(baseline))
        return AdditiveAttribution(
            values, value.double() - reference.double(), remark=unsupported_ops.describe_counted_operations()
        )


@register_optional("captum", "captum")
class DeepLIFT(BaselineMixin, DeepLIFTBase):
    """Σ_c m_c (x_c - x'_c): the contribution of each pixel against a baseline x' (Shrikumar et al. 2017, Rescale rule).

    See `DeepLIFTBase`.

    Use it instead of integrated gradients if passes are expensive. It needs the package captum.

    >>> explanation = DeepLIFT(model).explain(image, "nodule")
    >>> explanation.grid, sorted(explanation.diagnostics)
    ((128, 128), ['completeness_gap', 'score_change'])
    """

    name, title, paper = "deeplift", "DeepLIFT", "arXiv:1704.02685"
    forward_passes, backward_passes = "3", "2"


@register_optional("captum", "captum")
class DeepLIFTSHAP(BackgroundMixin, DeepLIFTBase):
    """The mean of DeepLIFT over background inputs, an estimate of Shapley values (Lundberg & Lee 2017, section 4.2).

    The background needs at least two inputs. See `DeepLIFTBase`.

    Use it if no single baseline is neutral. It needs the package captum.

    Raises:
        InputError: The background has fewer than two inputs.

    >>> DeepLIFTSHAP(model, background=["black", "white"]).explain(image, "nodule").grid
    (128, 128)

    """

    name, title, paper = "deepliftshap", "DeepLIFT SHAP", "arXiv:1705.07874"
    forward_passes, backward_passes = "1 + 2 x len(background)", "2 x len(background)"

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.list_baselines()) < 2:
            raise InputError("background has one input: deepliftshap requires two or more; for one input, use deeplift")

    def build_baselines(self, x: Tensor) -> list[Tensor]:
        """Return one tensor (N,C,*S) for each background image."""
        return build_baseline_tensors(self.list_baselines(), x, self)


class _NoInputGradientError(Exception):
    """Error that ends a pass: no gradient flows from the score to the input."""


class _ScoreModule(nn.Module):
    """A module that scores variants of one sample. It runs a copy of the model that captum can hook."""

    def __init__(self, score: Score, call_records: ModuleCallRecords, sample: int) -> None:
        super().__init__()
        self.clone = clone_for_hooks(score.model, call_records)
        replace_overlapping_pools(self.clone)
        treat_clipped_relus_as_relus(self.clone)
        self._score = copy.copy(score)
        self._score.model = self.clone
        self._sample = sample
        self.last_scores = torch.zeros(2, dtype=torch.float32, device="cpu")

    def forward(self, rows: Tensor) -> Tensor:
        """Return the scores (R,) of R perturbed copies (R,C,*S) of the input."""
        restart_call_counts(self.clone)
        sample_index = torch.full((len(rows),), self._sample, dtype=torch.long, device=rows.device)
        values = self._score(rows, sample_index)
        self.last_scores = values.detach()
        if not values.requires_grad:
            raise _NoInputGradientError
        return values


def get_captum_difference_threshold(x: Tensor, score: Score) -> float:
    """Return the difference below which captum treats activations as equal: the smallest normal number of their dtype."""
    with score.forward_context():
        device_type = x.device.type
        cast_dtype = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else x.dtype
    smallest_half = torch.finfo(torch.float16).smallest_normal * torch.finfo(torch.float16).eps
    return max(smallest_half if t == torch.float16 else torch.finfo(t).tiny for t in (x.dtype, cast_dtype))


def _compute_multipliers(
    score_module: _ScoreModule, x: Tensor, baseline_tensor: Tensor, unsupported_ops: UnsupportedOperationCounter
) -> Tensor | None:
    """Compute the DeepLIFT multipliers (C,*S) of one input and one baseline. Return None if no gradient reaches the input."""
    from captum.attr import DeepLift

    unsupported_ops.reset()
    # captum treats two inputs as equal if they are closer than `eps`, whatever their scale
    method = DeepLift(score_module, eps=get_captum_difference_threshold(x, score_module._score))
    try:
        with ignore_warnings(message_pattern="Setting forward, backward hooks"), unsupported_ops:
            multipliers: Tensor = method.attribute(
                x.detach().clone()[None].requires_grad_(),
                baseline_tensor[None],
                custom_attribution_func=lambda hook: hook,
            )
    except _NoInputGradientError:
        return None
    return multipliers.detach()[0]
