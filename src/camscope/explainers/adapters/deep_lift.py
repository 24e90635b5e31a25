"""DeepLIFT and DeepLIFT SHAP by captum: a gradient in which non-linear modules pass on Δout/Δin from a baseline.

captum has rules for modules of certain types only. Three preparations on a copy of the model make it complete:

- ReLU6 and Hardtanh become ReLUs by type, to which the same rule applies.
- Max pooling with overlapping windows becomes one without overlap, which is what captum's rule expects.
- Non-linear operations without a rule keep their gradient, and are counted.
"""

import copy
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from camscope.errors import InputError, ModelError
from camscope.explainers.adapters.base import (
    AdapterExplainer,
    ModuleCallRecords,
    call_with_gradients,
    check_same_score,
    clone_for_hooks,
    module_calls_recorded,
    restart_call_counts,
)
from camscope.explainers.core.base import register_optional
from camscope.explainers.core.baselines import BackgroundMixin, BaselineMixin, build_baseline_tensors
from camscope.explainers.core.evaluation_context import check_finite
from camscope.explainers.core.maps import AttributionMaps
from camscope.explainers.core.pixel_base import PerturbedEvaluator, PixelExplainer, format_completeness_gap
from camscope.hooks.function_mode import MAX_FUNCTIONS, BaseFunctionMode, function_name
from camscope.hooks.gradients import RESCALED_FUNCTIONS
from camscope.images.files.redaction import ignore_warnings
from camscope.plurals import plural
from camscope.pytree import iter_leaves
from camscope.targets import Score, full_precision

CLIPPED_RELU_TYPES = (nn.ReLU6, nn.Hardtanh)


def convert_clipped_relus(model: nn.Module) -> None:
    """Turn every clipping module of a model's copy into a ReLU by type, with its function unchanged."""
    modules: Iterator[Any] = model.modules()  # whose types change
    for part in modules:
        if type(part) in CLIPPED_RELU_TYPES:
            clip = partial(F.hardtanh, min_val=part.min_val, max_val=part.max_val, inplace=part.inplace)
            part.__class__ = nn.ReLU  # the object stays the same for hooks and other modules
            vars(part)["forward"] = clip


_OTHER_NONLINEAR_NAMES = (
    "maximum min amin minimum softmax softmin log_softmax layer_norm group_norm instance_norm rms_norm local_response_norm "
    "normalize glu lp_pool1d lp_pool2d lp_pool3d multi_head_attention_forward scaled_dot_product_attention"
)
NONLINEAR_FUNCTIONS = RESCALED_FUNCTIONS | MAX_FUNCTIONS | set(_OTHER_NONLINEAR_NAMES.split())


class UnsupportedOps(BaseFunctionMode):
    """Counts, inside the `with`, non-linear operations for which captum has no rule."""

    def __init__(self) -> None:
        super().__init__()
        self.reset()

    def reset(self) -> None:
        """Reset the counts; call it before each pass."""
        self._supported_module_depth, self.counts = 0, Counter[str]()

    def track_supported_modules(self, model: nn.Module) -> None:
        """Exclude modules with a rule of captum from the count, and give each its own copy of its input.

        captum replaces the gradient of that input. If the tensor were used elsewhere too, the other path would be lost.
        """
        from captum.attr._core.deep_lift import SUPPORTED_NON_LINEAR

        def enter(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            self._supported_module_depth += 1
            return tuple(argument.clone() if isinstance(argument, Tensor) else argument for argument in args)

        def leave(module: nn.Module, args: object, output: object) -> None:
            self._supported_module_depth -= 1

        for module in model.modules():
            if type(module) in SUPPORTED_NON_LINEAR and not module._backward_hooks:
                module.register_forward_pre_hook(enter)
                module.register_forward_hook(leave)

    def run_function(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Return the result of the function, and count it if it is non-linear and has no rule."""
        name = function_name(func)
        if func is Tensor.register_hook and not args[0].requires_grad:
            return None  # captum sets its hooks also where gradients are disabled: the value is a constant there
        result = func(*args, **kwargs)
        if (
            name in NONLINEAR_FUNCTIONS
            and not self._supported_module_depth
            and any(argument.requires_grad for _, argument in iter_leaves(result))
        ):
            self.counts[name] += 1
        return result

    def describe(self) -> str:
        """Return the end of a sentence that names the counted operations."""
        operations = ", ".join(f"{name} ({count} x)" for name, count in sorted(self.counts.items()))
        return f"; captum has no rule for {operations}, which keep their gradient" if operations else ""


RANK_BY_MAX_POOL: dict[type[nn.Module], int] = {nn.MaxPool1d: 1, nn.MaxPool2d: 2, nn.MaxPool3d: 3}


class NonOverlappingMaxPool(nn.Module):
    """A max pooling with overlapping windows, computed by laying out each window and pooling without overlap."""

    def __init__(self, pool: Any, rank: int) -> None:
        super().__init__()
        self.kernel_size, self.stride, self.padding = (
            _expand_per_axis(size, rank) for size in (pool.kernel_size, pool.stride, pool.padding)
        )
        self.pool = nn.MaxPool1d(prod(self.kernel_size))

    def forward(self, x: Tensor) -> Tensor:
        """Pool (N,K,*s) to (N,K,*t)."""
        rank = len(self.kernel_size)
        sides = [side for pad in reversed(self.padding) for side in (pad, pad)]
        # the padding is less than every value, and the same in every row
        laid = F.pad(x, sides, value=float(x.detach().amin()) - 1)
        for axis, (size, step) in enumerate(zip(self.kernel_size, self.stride, strict=True), start=x.ndim - rank):
            laid = laid.unfold(axis, size, step)
        grid = laid.shape[: x.ndim]
        largest: Tensor = self.pool(laid.reshape(len(x), -1, prod(self.kernel_size)))
        return largest.view(grid)


def replace_overlapping_pools(model: nn.Module) -> None:
    """Replace every max pooling with overlapping windows in a copy of a model."""
    for parent in list(model.modules()):
        for key, child in parent._modules.items():
            rank = RANK_BY_MAX_POOL.get(type(child), 0) if child is not None else 0
            if rank and _has_overlapping_windows(child, rank):
                parent._modules[key] = NonOverlappingMaxPool(child, rank)


def _has_overlapping_windows(pool: Any, rank: int) -> bool:
    overlap = any(
        step < size
        for size, step in zip(
            _expand_per_axis(pool.kernel_size, rank), _expand_per_axis(pool.stride, rank), strict=True
        )
    )
    plain = not (pool.ceil_mode or pool.return_indices or pool._forward_hooks or pool._forward_pre_hooks)
    return overlap and plain and set(_expand_per_axis(pool.dilation, rank)) == {1}


def _expand_per_axis(value: int | tuple[int, ...], rank: int) -> tuple[int, ...]:
    return value if isinstance(value, tuple) else (value,) * rank


class BaselineAttribution(NamedTuple):
    """The contributions (C,*S) of one sample to the score against one baseline, and the change of the score ().

    `has_zero_multipliers`: whether all multipliers are 0. `unsupported_ops_note`: which operations kept their gradient.
    """

    values: Tensor
    score_change: Tensor
    has_zero_multipliers: bool
    unsupported_ops_note: str

    @property
    def total(self) -> float:
        """The sum of the contributions."""
        return float(self.values.double().sum())


@dataclass(kw_only=True, eq=False, repr=False)
class DeepLIFTBase(AdapterExplainer, PixelExplainer):
    """The mean over baselines x' of Σ_c m_c (x_c - x'_c). A subclass implements `build_baselines`.

    m is the gradient in which ReLU, ReLU6, Hardtanh, ELU, LeakyReLU, Sigmoid, Tanh, Softplus, Softmax and max pooling, as
    modules, pass on Δout/Δin (by captum). Anything else that is non-linear (functions, GELU, norms, attention) keeps its
    gradient. A note names these operations and how far the map is from adding up to f(x) - f(x'); the `diagnostics`
    `completeness_gap` and `score_change` hold the numbers. captum works on a copy of the modules, with one image and one x'
    at a time.
    """

    package: ClassVar[str] = "captum"
    extra: ClassVar[str] = "captum"

    @abstractmethod
    def build_baselines(self, x: Tensor) -> list[Tensor]:
        """Return one tensor (N,C,*S) for each x'."""

    @property
    def baseline_notes(self) -> tuple[str, ...]:
        """Notes about the baselines."""
        return ()

    def compute_score_maps(self, x: Tensor, score: Score) -> AttributionMaps:
        """Return the mean map over the baselines, with its completeness."""
        with module_calls_recorded(score.model) as records:
            evaluator = PerturbedEvaluator(self, x, score)
        if score.one_sample_per_pass:
            raise ModelError(
                f"{self.full_name} runs the input and its baseline in one batch, and in this model the "
                f"samples of a batch affect one another, as in a batch norm without running statistics; "
                f"pass integratedgradients"
            )
        baselines = self.build_baselines(x)
        per_sample = [
            self._attribute_to_baselines(evaluator, records, sample, [start[sample] for start in baselines])
            for sample in range(len(x))
        ]
        means = [_average_attributions(parts) for parts in per_sample]
        values, changes = (
            torch.stack([parts.values for parts in means]),
            torch.stack([parts.score_change for parts in means]),
        )
        return AttributionMaps(
            self.reduce_channels(values),
            zero_gradient=torch.tensor([parts.has_zero_multipliers for parts in means], device=x.device),
            sample_notes=tuple(
                (*self.baseline_notes, self._format_completeness(mean, parts))
                for mean, parts in zip(means, per_sample, strict=True)
            ),
            diagnostics={"completeness_gap": values.double().flatten(1).sum(1) - changes, "score_change": changes},
        )

    def _attribute_to_baselines(
        self,
        evaluator: PerturbedEvaluator,
        call_records: ModuleCallRecords,
        sample: int,
        baseline_tensors: Sequence[Tensor],
    ) -> list[BaselineAttribution]:
        """Return the contributions of one sample against each of the baselines (C,*S)."""
        attributions = list[BaselineAttribution]()
        with evaluator.track_sample_steps(sample, len(baseline_tensors)) as advance:
            for start in baseline_tensors:
                attributions.append(self._attribute_to_baseline(evaluator, call_records, sample, start))
                advance(1)
        return attributions

    def _format_completeness(self, mean: BaselineAttribution, per_baseline: Sequence[BaselineAttribution]) -> str:
        """Return a note with the completeness gap of the mean and, of several baselines, the largest gap."""
        change = float(mean.score_change)
        if len(per_baseline) == 1:
            text = format_completeness_gap(
                self.describe_summands(), mean.total, "the score less the baseline's is", change
            )
        else:
            text = format_completeness_gap(
                self.describe_summands(), mean.total, "the score less the baselines' mean is", change
            )
            gaps = [parts.total - float(parts.score_change) for parts in per_baseline]
            worst = max(range(len(per_baseline)), key=lambda which: abs(gaps[which]))
            change = float(per_baseline[worst].score_change)
            text += f"; the worst of {plural(len(per_baseline), 'baseline')} has {gaps[worst]:+.2g} of {change:.4g}"
        return f"completeness: {text}{mean.unsupported_ops_note}"

    def _attribute_to_baseline(
        self, evaluator: PerturbedEvaluator, call_records: ModuleCallRecords, sample: int, baseline_tensor: Tensor
    ) -> BaselineAttribution:
        """Return the contributions of one sample against one baseline (C,*S)."""
        score_module, residual = _ScoreModule(evaluator.score, call_records, sample), UnsupportedOps()
        residual.track_supported_modules(score_module)
        multipliers = full_precision(
            call_with_gradients(
                lambda: _compute_multipliers(score_module, evaluator.x[sample], baseline_tensor, residual)
            )
        )
        check_finite("the multipliers at the input", multipliers, self.on_nonfinite)
        value, reference = score_module.last_scores
        if self.mode == "eval":
            check_same_score(evaluator.score, sample, value, evaluator.clean_scores[sample])
        results = multipliers * (full_precision(evaluator.x[sample]) - full_precision(baseline_tensor))
        change = value.double() - reference.double()
        return BaselineAttribution(results, change, not bool(multipliers.any()), residual.describe())


def _average_attributions(per_baseline: Sequence[BaselineAttribution]) -> BaselineAttribution:
    """Return the mean over the baselines."""
    return BaselineAttribution(
        torch.stack([attribution.values for attribution in per_baseline]).mean(0),
        torch.stack([attribution.score_change for attribution in per_baseline]).mean(),
        all(attribution.has_zero_multipliers for attribution in per_baseline),
        "".join(dict.fromkeys(attribution.unsupported_ops_note for attribution in per_baseline)),
    )


@register_optional("captum", "captum")
class DeepLIFT(BaselineMixin, DeepLIFTBase):
    """Σ_c m_c (x_c - x'_c): the contribution of each pixel against a baseline x' (Shrikumar et al. 2017, Rescale rule).

    See `DeepLIFTBase`.
    """

    name, title, paper = "deeplift", "DeepLIFT", "arXiv:1704.02685"
    forward_passes: ClassVar[str] = "3"
    backward_passes: ClassVar[str] = "2"


@register_optional("captum", "captum")
class DeepLIFTSHAP(BackgroundMixin, DeepLIFTBase):
    """The mean of DeepLIFT over background inputs, an estimate of Shapley values (Lundberg & Lee 2017, section 4.2).

    The background needs at least two inputs; see `DeepLIFTBase`.
    """

    name, title, paper = "deepliftshap", "DeepLIFT SHAP", "arXiv:1705.07874"
    forward_passes: ClassVar[str] = "1 + 2 x len(background)"
    backward_passes: ClassVar[str] = "2 x len(background)"

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.list_baselines()) < 2:
            raise InputError("background holds one input: deepliftshap is a mean over several; for one, use deeplift")

    def build_baselines(self, x: Tensor) -> list[Tensor]:
        """Return one tensor (N,C,*S) for each input of the background."""
        return build_baseline_tensors(self.list_baselines(), x, self)


class _NoInputGradientError(Exception):
    """The output of the pass has no gradient to the input."""


class _ScoreModule(nn.Module):
    """The score of variants of one sample as a module, computed by a clone of the model."""

    def __init__(self, score: Score, call_records: ModuleCallRecords, sample: int) -> None:
        super().__init__()
        self.clone = clone_for_hooks(score.model, call_records)
        replace_overlapping_pools(self.clone)
        convert_clipped_relus(self.clone)
        self._score = copy.copy(score)
        self._score.model = self.clone
        self._sample = sample
        self.last_scores = torch.zeros(2, dtype=torch.float32, device="cpu")

    def forward(self, rows: Tensor) -> Tensor:
        """Return the scores (R,) of variants (R,C,*S)."""
        restart_call_counts(self.clone)
        sample_index = torch.full((len(rows),), self._sample, dtype=torch.long, device=rows.device)
        values = self._score(rows, sample_index)
        self.last_scores = values.detach()
        if not values.requires_grad:
            raise _NoInputGradientError
        return values


def compute_smallest_difference(x: Tensor, score: Score) -> float:
    """Return the difference above which captum tells two activations apart: the smallest number of their type.

    Under autocast the type is what autocast casts to. Activations in float16 are often subnormal.
    """
    with score.forward_context():
        device_type = x.device.type
        cast = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else x.dtype
    smallest_half = torch.finfo(torch.float16).tiny * torch.finfo(torch.float16).eps
    return max(smallest_half if dtype == torch.float16 else torch.finfo(dtype).tiny for dtype in (x.dtype, cast))


def _compute_multipliers(
    score_module: _ScoreModule, x: Tensor, baseline_tensor: Tensor, unsupported_ops: UnsupportedOps
) -> Tensor | None:
    """Return captum's multipliers (C,*S) of one input against one baseline; None if the model disables gradients."""
    from captum.attr import DeepLift

    unsupported_ops.reset()
    # captum treats two inputs as equal if they are closer than `eps`, whatever their scale
    method = DeepLift(score_module, eps=compute_smallest_difference(x, score_module._score))
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
