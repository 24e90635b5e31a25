"""Occlusion: how much the score drops if a sliding window or a segment of the input is hidden."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from camscope.errors import InputError
from camscope.explainers.core.base import register
from camscope.explainers.core.batching import count_copies_in_memory, process_chunks
from camscope.explainers.core.evaluation_context import check_positive_integer
from camscope.explainers.core.segmentation import SLIC_COMPACTNESS, SegmentsLike, check_segments, resolve_segment_labels
from camscope.explainers.core.setting_types import PositiveNumber
from camscope.explainers.perturbation.base import (
    MaskedInput,
    PerturbationAttribution,
    PerturbationExplainer,
    expand_per_axis,
)
from camscope.hooks.base import has_global_hooks
from camscope.hooks.function_mode import has_instance_forward
from camscope.hooks.incremental_forward import CostTracker, WindowTensor, cut_windows
from camscope.plurals import plural

DEFAULT_WINDOW_DIVISOR = 7  # the default window is this part of an axis: 32 of 224


@register
class Occlusion(PerturbationExplainer):
    """Mean drop of the score when windows that cover a pixel are hidden (Zeiler & Fergus 2014, section 4.2).

    A pixel has the mean of f(x) - f(x with W filled) over the windows W that cover it. The authors show the remaining
    probability; this map shows the loss of score. For a linear model it is the sum of the terms over each window. All
    windows are full: the last one along an axis ends at the border. Activations that no window reaches are computed
    once, where that is exact. Use it as the most direct test of what the score needs, and for models without gradients.

    Args:
        window: Size in pixels per axis, or one number for all. None: a seventh of each axis.
        stride: Step between windows in pixels, per axis or one number for all. None: half a window.

    >>> explanation = Occlusion(model, window=32, stride=32).explain(image, "nodule")
    >>> len(set(explanation.attribution.ravel().tolist()))  # 4 x 4 windows
    16

    """

    name, title, paper = "occlusion", "Occlusion", "arXiv:1311.2901"
    forward_passes: ClassVar[str] = "1 + windows"
    window: int | Sequence[int] | None = None
    stride: int | Sequence[int] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("window", "stride"):
            value = getattr(self, name)
            if isinstance(value, list | tuple) and value:
                for item in value:
                    check_positive_integer(**{name: item})
            else:
                check_positive_integer(None, **{name: value})

    def compute_sample_attribution(self, masked_input: MaskedInput) -> PerturbationAttribution:
        """Compute the mean drop of the score over the windows that cover each pixel."""
        covers = self.compute_window_masks(masked_input.x.shape[1:])
        size = [int(cover[0].sum()) for cover in covers]
        corners = torch.cartesian_prod(*(cover.int().argmax(1) for cover in covers)).view(-1, len(covers))
        scorer = WindowScorer(masked_input, size)
        scores = scorer.score_windows(corners.to(masked_input.x.device))
        lost = (masked_input.clean_score - scores.mean(0)).view([len(cover) for cover in covers])
        notes = [f"{plural(len(corners), 'window')} of {' x '.join(map(str, size))} pixels"]
        if share := scorer.saved_share:
            notes.append(f"{share:.0%} of the multiplications are of what no window reaches, and were left out")
        attribution = average_over_windows(lost, [cover.to(lost.device) for cover in covers])
        return PerturbationAttribution(attribution, notes=tuple(notes))

    def compute_window_masks(self, size: Sequence[int]) -> list[Tensor]:
        """Return for each axis which pixels each window covers, as a boolean tensor (windows,pixels)."""
        window, stride = self.window, self.stride
        try:
            default = [-(-length // DEFAULT_WINDOW_DIVISOR) for length in size]
            windows = expand_per_axis(default if window is None else window, size)
            strides = expand_per_axis([-(-length // 2) for length in windows] if stride is None else stride, size)
        except ValueError as error:
            raise InputError(
                f"window={window!r}, stride={stride!r}: expected one number, or one for each spatial axis ({len(size)})"
            ) from error
        return [_compute_axis_coverage(*axis) for axis in zip(size, windows, strides, strict=True)]


def _compute_axis_coverage(length: int, window: int, stride: int) -> Tensor:
    starts = [*range(0, length - window, stride), length - window]
    if any(later - earlier > window for earlier, later in pairwise(starts)):
        raise InputError(
            f"stride={stride} leaves gaps between windows of {plural(window, 'pixel')}: pass a stride of at most {window}"
        )
    pixels, first = torch.arange(length, device="cpu"), torch.tensor(starts, device="cpu")[:, None]
    return (pixels >= first) & (pixels < first + window)


def average_over_windows(values: Tensor, coverage: Sequence[Tensor]) -> Tensor:
    """Return the mean value (*S) of the windows that cover each pixel. `values` is a grid with one number per window."""
    for axis, cover in enumerate(coverage):
        share = cover.to(values.dtype) / cover.sum(0)
        values = (values.movedim(axis, -1) @ share).movedim(-1, axis)
    return values


aten = torch.ops.aten
MATMUL_ROW_ARGUMENT = {aten.mm: 0, aten.addmm: 1, aten.bmm: 0, aten.baddbmm: 1}  # which argument has the rows
MIN_SAVED_SHARE = 0.2  # of a pass's multiplications, to be worth cutting and pasting
MIN_MULTIPLICATIONS = 10**7
ROUNDING_STEPS, HALF_PRECISION_ROUNDING_STEPS = 64, 4  # allowed between the two ways to compute the same sums
N_TRIAL_WINDOWS = 2  # computed both ways


class MultiplicationCounter(TorchDispatchMode):
    """Count the multiplications of convolutions, matrix products and attention inside the `with`."""

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


class WindowScorer:
    """Compute the scores of one input with each window hidden.

    Window passes compute only the activations that a window changes. On the CPU, a trial compares two windows in full passes
    and in window passes. If the scores are equal and enough multiplications are saved, all others run in window passes.
    """

    def __init__(self, masked_input: MaskedInput, size: Sequence[int]) -> None:
        self._masked_input, self._size = masked_input, size
        self._chunk_size = masked_input.evaluator.choose_chunk_size()
        self._n_rows, self._multiplications_per_row = 0, 0.0  # of full passes
        self._saved_per_row, self._clean_per_pass = 0.0, 0.0  # multiplications, by the trial
        self._cost_tracker = CostTracker()

    @property
    def saved_share(self) -> float:
        """The share of all multiplications that window passes saved."""
        saved = self._cost_tracker.saved_multiplications - self._cost_tracker.clean_multiplications
        return max(0, saved) / max(1.0, self._n_rows * self._multiplications_per_row)

    def score_windows(self, corners: Tensor) -> Tensor:
        """Return the scores (B,W) with each of W windows filled by each of B baselines. `corners` (W,axes): first pixels."""
        masked_input, count, middle = self._masked_input, len(corners), len(corners) // 2
        order = torch.tensor([middle, *(n for n in range(count) if n != middle)], device=corners.device)
        places, device = corners[order], masked_input.x.device
        scores = torch.empty(len(masked_input.baselines), count, dtype=torch.float64, device=device)
        with masked_input.evaluator.track_sample_steps(masked_input.sample, count) as advance:

            def run_trial(part: slice) -> None:
                scores[:, part] = self._score_full_passes(places[part])
                advance(part.stop - part.start)

            with MultiplicationCounter() as counted:
                process_chunks(min(N_TRIAL_WINDOWS, count), self._chunk_size, run_trial)
            self._decide_pass_type_by_trial(places[:N_TRIAL_WINDOWS], scores[:, :N_TRIAL_WINDOWS], counted.count)

            def score_chunk(part: slice) -> None:
                columns = slice(part.start + N_TRIAL_WINDOWS, part.stop + N_TRIAL_WINDOWS)
                scores[:, columns] = self._score_chunk(places[columns], is_last=columns.stop == count)
                advance(part.stop - part.start)

            process_chunks(max(0, count - N_TRIAL_WINDOWS), self._chunk_size, score_chunk)
        return scores[:, order.argsort()]

    def _decide_pass_type_by_trial(self, corners: Tensor, scores: Tensor, n_multiplications: int) -> None:
        """Decide whether to use window passes, by comparison with the `scores` (B,R) of full passes of windows (R,axes)."""
        evaluator, n_baselines = self._masked_input.evaluator, len(self._masked_input.baselines)
        self._n_rows = len(corners) * n_baselines
        self._multiplications_per_row = n_multiplications / self._n_rows
        is_hooked = has_global_hooks() or not all(map(_has_no_hooks, evaluator.score.model.modules()))
        n_windows = min(len(corners), evaluator.explainer.batch_size or N_TRIAL_WINDOWS)
        is_cheap = self._multiplications_per_row < MIN_MULTIPLICATIONS
        if self._masked_input.x.device.type != "cpu" or is_hooked or is_cheap or n_windows < N_TRIAL_WINDOWS:
            return
        tracker = CostTracker(min_saved_multiplications=MIN_SAVED_SHARE * n_multiplications / n_baselines)
        try:
            window_scores = self._score_window_passes(corners, tracker)
        except torch.OutOfMemoryError:
            raise
        except Exception:  # not worthwhile, or the model's code does not run on such tensors
            return
        epsilon = evaluator.score.machine_epsilon
        rounding = (ROUNDING_STEPS if epsilon < 1e-5 else HALF_PRECISION_ROUNDING_STEPS) * epsilon
        if bool(((window_scores - scores).abs() <= rounding * (1 + scores.abs())).all()):
            self._saved_per_row = tracker.saved_multiplications / self._n_rows
            self._clean_per_pass = tracker.clean_multiplications / n_baselines
            if evaluator.explainer.batch_size is None:
                n_copies = count_copies_in_memory(tracker.max_row_bytes, self._masked_input.x.device)
                self._chunk_size = max(self._chunk_size, n_copies)

    def _score_chunk(self, corners: Tensor, *, is_last: bool) -> Tensor:
        """Return the scores (B,R) of windows (R,axes). The last pass is a full pass, as a model may store tensors of it."""
        if is_last and self._saved_per_row and len(corners) > 1:
            before = self._score_chunk(corners[:-1], is_last=False)
            return torch.cat([before, self._score_chunk(corners[-1:], is_last=True)], 1)
        n_rows = len(corners)
        self._n_rows += n_rows * len(self._masked_input.baselines)
        saved = n_rows * self._saved_per_row - self._clean_per_pass
        if is_last or saved <= MIN_SAVED_SHARE * n_rows * self._multiplications_per_row:
            return self._score_full_passes(corners)
        try:
            return self._score_window_passes(corners, self._cost_tracker)
        except torch.OutOfMemoryError:
            raise
        except Exception:  # an error of the model itself occurs again with full tensors
            self._saved_per_row = 0.0
            return self._score_full_passes(corners)

    def _score_full_passes(self, corners: Tensor) -> Tensor:
        """Return the scores (B,R) of windows (R,axes), computed in full passes."""
        hidden = torch.ones((), dtype=torch.bool, device=corners.device)
        for axis, (length, extent) in enumerate(zip(self._masked_input.x.shape[1:], self._size, strict=True)):
            place = torch.arange(length, device=corners.device) - corners[:, axis, None]
            shape = [len(corners), *(length if i == axis else 1 for i in range(len(self._size)))]
            hidden = hidden & ((place >= 0) & (place < extent)).view(shape)
        return self._masked_input.score_masks(~hidden)

    def _score_window_passes(self, corners: Tensor, cost_tracker: CostTracker) -> Tensor:
        """Return the scores (B,R) of windows (R,axes), computed in passes that skip unchanged activations."""
        scores, x = [], self._masked_input.x
        for baseline in self._masked_input.baselines:
            variants = WindowTensor(x[None], cut_windows(baseline, corners, self._size), corners, cost_tracker)
            scores.append(self._masked_input.evaluator.score_variants(self._masked_input.sample, variants))
        return torch.stack(scores).double()


def _has_no_hooks(module: nn.Module) -> bool:
    """Whether the module has no hooks that observe its input."""
    is_hooked = module._forward_hooks or module._forward_pre_hooks or has_instance_forward(module)
    return not (is_hooked or isinstance(module, torch.jit.ScriptModule))


@register
class SegmentAblation(PerturbationExplainer):
    """Drop of the score when a superpixel s is hidden: f(x) - f(x with s filled) (Zeiler & Fergus 2014).

    Use it instead of occlusion if regions should follow the borders in the image, or are known, such as organs.
    Superpixels need the package scikit-image.

    Args:
        segments: A number of superpixels, a label map (*S) of integers, or a function of the input that returns one.
        compactness: Weight of distance relative to color in SLIC.

    >>> halves = torch.arange(128)[:, None].expand(128, 128) // 64  # upper and lower half
    >>> explanation = SegmentAblation(model, segments=halves).explain(image, "nodule")
    >>> len(set(explanation.attribution.ravel().tolist()))
    2

    """

    name, title, paper = "segmentablation", "Segment Ablation", "arXiv:1311.2901"
    forward_passes: ClassVar[str] = "1 + parts"
    segments: SegmentsLike = 50
    compactness: PositiveNumber = SLIC_COMPACTNESS

    def __post_init__(self) -> None:
        super().__post_init__()
        check_segments(segments=self.segments)

    def compute_sample_attribution(self, masked_input: MaskedInput) -> PerturbationAttribution:
        """Compute the drop of the score for each segment and assign it to the pixels."""
        numbers, labels = self.compute_segment_labels(masked_input.x).unique(return_inverse=True)
        every = torch.arange(len(numbers), device=labels.device).view(-1, *[1] * labels.ndim)
        scores = masked_input.score_all_masks(len(numbers), lambda part: labels != every[part])
        lost = masked_input.clean_score - scores.mean(0)
        return PerturbationAttribution(lost[labels], notes=(plural(len(numbers), "segment"),))

    def compute_segment_labels(self, x: Tensor) -> Tensor:
        """Return the number of the segment of each pixel (*S) for an input (C,*S)."""
        return resolve_segment_labels(self.segments, x, self.compactness)
