"""`WindowScorer`: the scores of an input with each window hidden, in passes that skip unchanged activations."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from camscope.explainers.core.chunk_perturbed_copies_by_memory import count_copies_that_fit_in_memory, process_chunks
from camscope.explainers.perturbation.perturbation_explainer import (
    MaskedInput,
)
from camscope.hooks.incremental_forward import CostTracker, WindowTensor, cut_windows
from camscope.hooks.intercept_torch_functions import has_instance_forward
from camscope.hooks.thread_local_hooks import has_global_hooks
from camscope.hooks.wrap_black_box_function_as_module import is_opaque

aten = torch.ops.aten
MATMUL_ROW_ARGUMENT = {aten.mm: 0, aten.addmm: 1, aten.bmm: 0, aten.baddbmm: 1}  # which argument has the rows
MIN_SAVED_SHARE = 0.2  # of a pass's multiplications, to be worth cutting and pasting
MIN_MULTIPLICATIONS = 10**7
ROUNDING_STEPS, HALF_PRECISION_ROUNDING_STEPS = 64, 4  # allowed between the two ways to compute the same sums
N_TRIAL_WINDOWS = 2  # computed both ways


class MultiplicationCounter(TorchDispatchMode):
    """A dispatch mode that counts the multiplications of convolutions, matrix products and attention."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # which PyTorch has not typed
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: object, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        """Run an operation and return its result. Count the multiplications of the operation."""
        result, kind = func(*args, **(kwargs or {})), func.overloadpacket
        if kind is aten.convolution:
            self.count += result.numel() * args[1][0].numel()
        elif kind in MATMUL_ROW_ARGUMENT:
            self.count += result.numel() * args[MATMUL_ROW_ARGUMENT[kind]].shape[-1]
        elif kind is aten._scaled_dot_product_flash_attention_for_cpu:
            self.count += 2 * args[0].numel() * args[1].shape[-2]
        return result


class WindowScorer:
    """Computes the scores of one input with each window hidden.

    A window pass computes only the activations that the hidden window changes. On the CPU, a trial runs two windows
    both in full passes and in window passes. If the scores agree and enough multiplications are saved, all other
    windows run in window passes.
    """

    def __init__(self, masked_input: MaskedInput, size: Sequence[int]) -> None:
        self._masked_input, self._size = masked_input, size
        self._chunk_size = masked_input.evaluator.choose_chunk_size()
        self._n_rows, self._multiplications_per_row = 0, 0.0  # of full passes
        self._saved_per_row, self._clean_per_pass = 0.0, 0.0  # multiplications, by the trial
        self._cost_tracker = CostTracker()

    @property
    def saved_multiplication_share(self) -> float:
        """The share of all multiplications that was saved by computing only inside of windows."""
        saved = self._cost_tracker.saved_multiplications - self._cost_tracker.clean_multiplications
        return max(0, saved) / max(1.0, self._n_rows * self._multiplications_per_row)

    def score_windows(self, corners: Tensor) -> Tensor:
        """Fill each of W windows by each of B baselines, and compute the scores (B,W). `corners` (W,axes) are first pixels."""
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
        """Try passes that compute only inside of windows. Use such passes if they reproduce the `scores` (B,R) of full passes."""
        evaluator, n_baselines = self._masked_input.evaluator, len(self._masked_input.baselines)
        self._n_rows = len(corners) * n_baselines
        self._multiplications_per_row = n_multiplications / self._n_rows
        is_hooked = has_global_hooks() or not all(map(_has_no_hooks_or_patches, evaluator.score.model.modules()))
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
                n_copies = count_copies_that_fit_in_memory(tracker.max_row_bytes, self._masked_input.x.device)
                self._chunk_size = max(self._chunk_size, n_copies)

    def _score_chunk(self, corners: Tensor, *, is_last: bool) -> Tensor:
        """Compute the scores (B,R) of R windows. The last pass computes all cells, because a model may keep tensors of it."""
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
        """Compute the scores (B,R) of R windows by passes over all cells. `corners` (R,axes) are the first pixels."""
        hidden = torch.ones((), dtype=torch.bool, device=corners.device)
        for axis, (length, extent) in enumerate(zip(self._masked_input.x.shape[1:], self._size, strict=True)):
            place = torch.arange(length, device=corners.device) - corners[:, axis, None]
            shape = [len(corners), *(length if i == axis else 1 for i in range(len(self._size)))]
            hidden = hidden & ((place >= 0) & (place < extent)).view(shape)
        return self._masked_input.score_masks(~hidden)

    def _score_window_passes(self, corners: Tensor, cost_tracker: CostTracker) -> Tensor:
        """Compute the scores (B,R) of R windows by passes inside of the windows. `corners` (R,axes) are the first pixels."""
        scores, x = [], self._masked_input.x
        for baseline in self._masked_input.baselines:
            variants = WindowTensor(x[None], cut_windows(baseline, corners, self._size), corners, cost_tracker)
            scores.append(self._masked_input.evaluator.score_variants(self._masked_input.sample, variants))
        return torch.stack(scores).double()


def _has_no_hooks_or_patches(module: nn.Module) -> bool:
    """Whether a module is free of hooks and of a patched forward. Hooks and patches would see incomplete inputs."""
    is_hooked = module._forward_hooks or module._forward_pre_hooks or has_instance_forward(module)
    return not (is_hooked or is_opaque(module))
