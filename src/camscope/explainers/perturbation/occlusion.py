"""Occlusion of windows and of segments.

- Occlusion: what the score loses under a window that slides over the input.
- Windows that are filled one after the other, by passes that work out only what a window reaches, where that is
  exact.
- Segment ablation: what the score loses when one segment of the input is hidden.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook
from torch.utils._python_dispatch import TorchDispatchMode

from camscope.errors import InputError
from camscope.explainers.core.base import register
from camscope.explainers.core.batching import count_copies_in_memory, process_chunks
from camscope.explainers.core.evaluation_context import check_positive_integer, check_positive_number
from camscope.explainers.core.segmentation import SLIC_COMPACTNESS, SegmentsLike, check_segments, resolve_segment_labels
from camscope.explainers.perturbation.base import (
    MaskedInput,
    PerturbationAttribution,
    PerturbationExplainer,
    expand_per_axis,
)
from camscope.hooks.function_mode import has_instance_forward
from camscope.hooks.incremental_forward import CostTracker, WindowTensor, cut_windows
from camscope.plurals import plural

DEFAULT_WINDOW_DIVISOR = 7  # the usual window is so large a part of an axis: 32 of 224


@register
class Occlusion(PerturbationExplainer):
    """Mean over the windows W that cover a pixel of f(x) - f(x with W filled) (Zeiler & Fergus 2014, section 4.2).

    The authors show the remaining probability; this map shows the loss of score. For a linear model it is the sum of
    the terms over each window. `window` is the size in pixels per axis, or one number for all; by default a seventh of
    each axis. `stride` is the step between windows, by default half a window. All windows are full: the last one along
    an axis ends at the border. Activations that no window reaches are computed once, where that is exact.
    """

    name, title, paper = "occlusion", "Occlusion", "arXiv:1311.2901"
    forward_passes: ClassVar[str] = "1 + windows"
    window: int | Sequence[int] | None = None
    stride: int | Sequence[int] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("window", "stride"):
            check_positive_integers(None, **{name: getattr(self, name)})

    def compute_sample_attribution(self, masked_input: MaskedInput) -> PerturbationAttribution:
        """(*S)"""
        covers = self.compute_window_coverage(masked_input.x.shape[1:])
        size = [int(cover[0].sum()) for cover in covers]
        corners = torch.cartesian_prod(*(cover.int().argmax(1) for cover in covers)).view(-1, len(covers))
        scores, spared = score_windows(masked_input, corners.to(masked_input.x.device), size)
        lost = (masked_input.clean_score - scores.mean(0)).view([len(cover) for cover in covers])
        words = f"{plural(len(corners), 'window')} of {' x '.join(map(str, size))} pixels"
        more = (
            [f"{spared:.0%} of the multiplications are of what no window reaches, and were left out"] if spared else []
        )
        return PerturbationAttribution(
            average_over_windows(lost, [cover.to(lost.device) for cover in covers]), notes=(words, *more)
        )

    def compute_window_coverage(self, size: Sequence[int]) -> list[Tensor]:
        """Return per axis a bool array (windows, pixels) of the pixels that each window covers."""
        try:
            windows = expand_per_axis(
                [-(-length // DEFAULT_WINDOW_DIVISOR) for length in size] if self.window is None else self.window, size
            )
            strides = expand_per_axis(
                [-(-length // 2) for length in windows] if self.stride is None else self.stride, size
            )
        except ValueError as error:
            raise InputError(
                f"window={self.window!r}, stride={self.stride!r}: expected one number, or one for each of the input's "
                f"{plural(len(size), 'axis')}"
            ) from error
        return [_cover_axis(*axis) for axis in zip(size, windows, strides, strict=True)]


def _cover_axis(length: int, window: int, stride: int) -> Tensor:
    starts = [*range(0, length - window, stride), length - window]
    if any(later - earlier > window for earlier, later in pairwise(starts)):
        raise InputError(f"stride={stride}: a window of {window} leaves gaps; pass a stride of {window} at most")
    pixels, first = torch.arange(length, device="cpu"), torch.tensor(starts, device="cpu")[:, None]
    return (pixels >= first) & (pixels < first + window)


def average_over_windows(values: Tensor, coverage: Sequence[Tensor]) -> Tensor:
    """(one a window along each axis) -> (*S): over the windows that cover a pixel, axis by axis."""
    for axis, cover in enumerate(coverage):
        share = cover.to(values.dtype) / cover.sum(0)
        values = (values.movedim(axis, -1) @ share).movedim(-1, axis)
    return values


def check_positive_integers(*allowed: object, **settings: object) -> None:
    """An InputError unless each setting is a whole number, 1 or more, several of them, or one of `allowed`."""
    for name, value in settings.items():
        if isinstance(value, list | tuple) and value:
            for item in value:
                check_positive_integer(**{name: item})
        else:
            check_positive_integer(*allowed, **{name: value})


aten = torch.ops.aten
MATMUL_ROW_ARGUMENT = {aten.mm: 0, aten.addmm: 1, aten.bmm: 0, aten.baddbmm: 1}  # which argument has the rows
MIN_SAVED_SHARE = 0.2  # of a pass's operations, and so many of them: what is spared must pay for cutting and pasting
MIN_MULTIPLICATIONS = 10**7
FULL_PRECISION_ROUNDING_STEPS, HALF_PRECISION_ROUNDING_STEPS = (
    64,
    4,
)  # so many of a number's own, in half precision: two ways to the same sums
N_TRIAL_WINDOWS = 2  # windows, by both ways


class MultiplicationCounter(TorchDispatchMode):
    """Inside the `with`, counts the multiplications of convolutions, matrix products and attention."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # which PyTorch has not typed
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: object, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        """Run the operation, count its multiplications, and return its result."""
        result, kind = func(*args, **(kwargs or {})), func.overloadpacket
        if kind is aten.convolution:
            self.count += result.numel() * args[1][0].numel()
        elif kind in MATMUL_ROW_ARGUMENT:
            self.count += result.numel() * args[MATMUL_ROW_ARGUMENT[kind]].shape[-1]
        elif kind is aten._scaled_dot_product_flash_attention_for_cpu:
            self.count += 2 * args[0].numel() * args[1].shape[-2]
        return result


def score_windows(masked_input: MaskedInput, corners: Tensor, size: Sequence[int]) -> tuple[Tensor, float]:
    """(W,axes) -> (F,W), float64: the score with each window filled, and the share of the multiplications left out.

    Passes are whole, unless the scores of the middle window and of the first are the same by a pass that works out only
    what the windows reach, and a good part is spared (on the CPU: elsewhere it was not measured).
    """
    middle, count = len(corners) // 2, len(corners)
    order = torch.tensor([middle, *(n for n in range(count) if n != middle)], device=corners.device)
    places = corners[order]
    scores = torch.empty(len(masked_input.baseline_tensors), count, dtype=torch.float64, device=masked_input.x.device)
    with masked_input.evaluator.track_sample_steps(masked_input.sample, count) as advance:

        def first(part: slice) -> None:
            scores[:, part] = _score_full_passes(masked_input, places[part], size)
            advance(part.stop - part.start)

        with MultiplicationCounter() as counted:
            process_chunks(min(N_TRIAL_WINDOWS, count), masked_input.evaluator.choose_chunk_size(), first)
        plan = _plan_from_trial(
            masked_input, places[:N_TRIAL_WINDOWS], size, scores[:, :N_TRIAL_WINDOWS], counted.count
        )

        def work(part: slice) -> None:
            columns = slice(part.start + N_TRIAL_WINDOWS, part.stop + N_TRIAL_WINDOWS)
            # the last pass is a whole one: what a model keeps of it on itself is a plain tensor
            scores[:, columns] = plan.score_chunk(masked_input, places[columns], size, is_last=columns.stop == count)
            advance(part.stop - part.start)

        process_chunks(max(0, count - N_TRIAL_WINDOWS), plan.chunk_size, work)
    return scores[:, order.argsort()], plan.saved_share


@dataclass
class WindowPlan:
    """Plan of the forward passes: full passes, or passes that compute only what the windows reach.

    `multiplications_per_row` counts the multiplications of one row's full pass. `saved_multiplications` and
    `clean_multiplications` are those of `CostTracker` for one row.
    """

    chunk_size: int
    multiplications_per_row: float
    saved_multiplications: float = 0.0
    clean_multiplications: float = 0.0
    cost_tracker: CostTracker = field(default_factory=CostTracker)
    n_rows: int = 0

    def score_chunk(self, masked_input: MaskedInput, corners: Tensor, size: Sequence[int], *, is_last: bool) -> Tensor:
        """(R,axes) -> (F,R)"""
        self.n_rows += len(corners) * len(masked_input.baseline_tensors)
        if is_last and self.saved_multiplications and len(corners) > 1:
            before = self.score_chunk(masked_input, corners[:-1], size, is_last=False)
            self.n_rows -= (len(corners) - 1) * len(masked_input.baseline_tensors)
            return torch.cat([before, _score_full_passes(masked_input, corners[-1:], size)], 1)
        if is_last or not self.is_worthwhile(len(corners)):
            return _score_full_passes(masked_input, corners, size)
        try:
            return _score_window_passes(masked_input, corners, size, self.cost_tracker)
        except torch.OutOfMemoryError:
            raise
        except Exception:  # the model's own error will come again of whole tensors
            self.saved_multiplications = 0.0
            return _score_full_passes(masked_input, corners, size)

    def is_worthwhile(self, n_rows: int) -> bool:
        """Whether a pass of so many rows spares a good part of them, the clean one that goes with it counted."""
        return (
            n_rows * self.saved_multiplications - self.clean_multiplications
            > MIN_SAVED_SHARE * n_rows * self.multiplications_per_row
        )

    @property
    def saved_share(self) -> float:
        """Return the share of all multiplications that was saved."""
        return max(0, self.cost_tracker.saved_multiplications - self.cost_tracker.clean_multiplications) / max(
            1.0, self.n_rows * self.multiplications_per_row
        )


def _plan_from_trial(
    masked_input: MaskedInput, corners: Tensor, size: Sequence[int], scores: Tensor, n_multiplications: int
) -> WindowPlan:
    """Return the plan after a trial on windows (R,axes) with known scores (F,R) of full passes."""
    rows, explainer = len(corners) * len(masked_input.baseline_tensors), masked_input.evaluator.explainer
    plan = WindowPlan(masked_input.evaluator.choose_chunk_size(), n_multiplications / rows, n_rows=rows)
    plain = not _has_any_global_hook() and all(map(_has_no_hooks, masked_input.evaluator.score.model.modules()))
    alone = len(corners) < N_TRIAL_WINDOWS or (explainer.batch_size or N_TRIAL_WINDOWS) < N_TRIAL_WINDOWS
    if masked_input.x.device.type != "cpu" or not plain or alone or plan.multiplications_per_row < MIN_MULTIPLICATIONS:
        return plan
    account = CostTracker(
        min_saved_multiplications=MIN_SAVED_SHARE * n_multiplications / len(masked_input.baseline_tensors)
    )
    try:
        window_scores = _score_window_passes(masked_input, corners, size, account)
    except torch.OutOfMemoryError:
        raise
    except Exception:  # not worthwhile, or whatever the model raises of tensors that are none
        return plan
    precision = masked_input.machine_epsilon
    rounding = (FULL_PRECISION_ROUNDING_STEPS if precision < 1e-5 else HALF_PRECISION_ROUNDING_STEPS) * precision
    if bool(((window_scores - scores).abs() <= rounding * (1 + scores.abs())).all()):
        plan.saved_multiplications, plan.clean_multiplications = (
            account.saved_multiplications / rows,
            account.clean_multiplications / len(masked_input.baseline_tensors),
        )
        if explainer.batch_size is None:
            plan.chunk_size = max(plan.chunk_size, count_copies_in_memory(account.max_row_bytes, masked_input.x.device))
    return plan


def _score_full_passes(masked_input: MaskedInput, corners: Tensor, size: Sequence[int]) -> Tensor:
    """(R,axes) -> (F,R)"""
    hidden = torch.ones((), dtype=torch.bool, device=corners.device)
    for axis, length in enumerate(masked_input.x.shape[1:]):
        place = torch.arange(length, device=corners.device) - corners[:, axis, None]
        shape = [len(corners), *(length if i == axis else 1 for i in range(len(size)))]
        hidden = hidden & ((place >= 0) & (place < size[axis])).view(shape)
    return masked_input.score_masks(~hidden)


def _score_window_passes(
    masked_input: MaskedInput, corners: Tensor, size: Sequence[int], cost_tracker: CostTracker
) -> Tensor:
    """Score windows (R,axes) -> (F,R) by passes that compute only what the windows reach."""
    scores = []
    for fill in masked_input.baseline_tensors:
        versions = WindowTensor(masked_input.x[None], cut_windows(fill, corners, size), corners, cost_tracker)
        scores.append(masked_input.evaluator.score_variants(masked_input.sample, versions))
    return torch.stack(scores).double()


def _has_no_hooks(module: nn.Module) -> bool:
    """Return whether the module has no hooks that observe its input."""
    heard = module._forward_hooks or module._forward_pre_hooks
    return not (heard or has_instance_forward(module) or isinstance(module, torch.jit.ScriptModule))


@register
class SegmentAblation(PerturbationExplainer):
    """f(x) - f(x with segment s filled), in every pixel of s: ablation (Zeiler & Fergus 2014) of superpixels.

    `segments`: so many superpixels, a label map, or what makes one: see `resolve_segment_labels`. `compactness`: of SLIC, how
    much nearness counts beside color.
    """

    name, title, paper = "segmentablation", "Segment Ablation", "arXiv:1311.2901"
    forward_passes: ClassVar[str] = "1 + parts"
    segments: SegmentsLike = 50
    compactness: float = SLIC_COMPACTNESS

    def __post_init__(self) -> None:
        super().__post_init__()
        check_segments(segments=self.segments)
        check_positive_number(compactness=self.compactness)

    def compute_sample_attribution(self, masked_input: MaskedInput) -> PerturbationAttribution:
        """(*S)"""
        numbers, labels = self.compute_segment_labels(masked_input.x).unique(return_inverse=True)
        every = torch.arange(len(numbers), device=labels.device).view(-1, *[1] * labels.ndim)
        lost = masked_input.clean_score - masked_input.score_all_masks(
            len(numbers), lambda part: labels != every[part]
        ).mean(0)
        return PerturbationAttribution(lost[labels], notes=(plural(len(numbers), "segment"),))

    def compute_segment_labels(self, x: Tensor) -> Tensor:
        """Return the segment number of each pixel of an input, (C,*S) -> (*S)."""
        return resolve_segment_labels(self.segments, x, self.compactness)
