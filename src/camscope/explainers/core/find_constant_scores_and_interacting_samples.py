"""Run a model on noise: find samples whose score is constant, and whether the samples of a batch affect one another."""

import copy
import threading
from collections.abc import Hashable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.weak import WeakIdKeyDictionary

from camscope.explainers.core.model_input import NO_EXTRA_INPUTS, ExtraInputs
from camscope.forward_signature import call_model, find_input_key
from camscope.hooks.restore_buffers_and_rng import eval_mode_buffers_restored
from camscope.hooks.run_without_hooks import copy_without_hooks, hooks_muted
from camscope.hooks.thread_local_evaluation_mode import evaluation_mode
from camscope.hooks.thread_local_hooks import autocast_uncached
from camscope.pytree import iter_leaves, map_leaves
from camscope.targets import Score
from camscope.targets.find_class_scores import ScoreRange
from camscope.unusual_tensors import describe_unusual_tensor

# relative to the largest value
RELATIVE_TOLERANCE_BY_DTYPE = {torch.float16: 2e-2, torch.bfloat16: 5e-2, torch.float32: 1e-4, torch.float64: 1e-9}
MAX_NOISE_TRIALS = 2  # the second only if the first changes no score
NON_CLASS_TARGET_KEY = "other"  # for a target that is not a class
_lock = threading.Lock()
_interaction_cache: WeakKeyDictionary[nn.Module, dict[Hashable, bool]] = WeakKeyDictionary()
# keys of input, weights and class whose score is known to vary
_varying_inputs_by_model: WeakIdKeyDictionary = WeakIdKeyDictionary()


def draw_noise_like(x: Tensor, seed: int, n_samples: int | None = None) -> Tensor:
    """Draw noise with the shape, dtype, mean and standard deviation of x (N,C,*S). Integer noise has the range of x."""
    generator = torch.Generator(device="cpu").manual_seed(seed)
    shape = x.shape if n_samples is None else (n_samples, *x.shape[1:])
    if not x.is_floating_point():
        low, high = int(x.min()), int(x.max())
        return torch.randint(low, max(high, low + 1) + 1, shape, generator=generator, device="cpu").to(x)
    noise = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").to(x)
    return x.mean() + noise * torch.where(x.std() > 0, x.std(), 1).nan_to_num(1.0)


def find_samples_with_constant_score(
    x: Tensor, score: Score, rows: Sequence[int], weights_key: Hashable, *, include_probabilities: bool = False
) -> Tensor | None:
    """Replace the input by noise, and return a mask (N,) of the samples in `rows` whose score does not change.

    Return None if all scores are known to vary, or if the test fails.
    """
    place = (tuple(x.shape[1:]), x.dtype, x.device, weights_key)
    classes = {row: None if score.class_pairs is None else score.class_index(row) for row in rows}
    keys = {row: (*place, NON_CLASS_TARGET_KEY if index is None else index) for row, index in classes.items()}
    with _lock:
        varying_keys = _varying_inputs_by_model.setdefault(score.model, set())
        if all(key in varying_keys for key in keys.values()):
            return None
    constant = _find_scores_unchanged_by_noise(x, score, include_probabilities)
    if constant is None:
        return None
    flags: list[bool] = constant.tolist()
    with _lock:
        varying_keys.update(key for row, key in keys.items() if not flags[row])
    chosen = torch.zeros_like(constant)
    chosen[list(rows)] = constant[list(rows)]
    return chosen


def _find_scores_unchanged_by_noise(x: Tensor, score: Score, include_probabilities: bool) -> Tensor | None:
    """Replace the whole input by noise, and return which samples (N,) keep their score within rounding.

    Return None if the model or the target rejects noise.
    """
    score_copy, scores, constant = copy.copy(score), ScoreRange(), None
    if score.values is None:
        return None
    scores.include_scores("score", score.values, None, len(x))
    devices = [x.device] if x.device.type == "cuda" else []
    try:
        for seed in range(MAX_NOISE_TRIALS):
            with torch.no_grad(), hooks_muted(score.model), torch.random.fork_rng(devices=devices):
                output = score_copy.forward(draw_noise_like(x, seed))
                values = score_copy.read_score(output, len(x)).detach()
                probabilities = score_copy.probability(output, len(x)).detach() if include_probabilities else None
            scores.include_scores("score", values, None, len(x))
            if probabilities is not None:
                scores.include_scores("probability", probabilities, None, len(x))
            constant = scores.is_constant(score.machine_epsilon)
            if constant is None or not bool(constant.any()):
                return constant
    except Exception:  # the model may reject noise, or a target find nothing in it
        return None
    return constant


def samples_interact(
    model: nn.Module,
    x: Tensor,
    extra_inputs: ExtraInputs = NO_EXTRA_INPUTS,
    forward_options: Mapping[str, Any] | None = None,
) -> bool:
    """Whether the model's output for one sample of x (N,C,*S) depends on the other samples of the batch in eval mode.

    The test runs once per model and shape, on a copy without hooks. Two batches of two noise images share the first
    image, and the second image has a small or a large spread. If the model rejects such images, all images have the
    same spread. If the model rejects these, too, the samples count as independent, unless a batch norm has no running
    statistics. For `forward_options` see `BaseMethod.forward_options`.
    """
    parts = tuple((type(part), _is_norm_without_statistics(part)) for part in model.modules())
    key = (tuple(x.shape[1:]), x.dtype, x.device, hash(parts))
    with _lock:
        interact = _interaction_cache.get(model, {}).get(key)
    if interact is None:
        interact = _is_output_changed_by_other_samples(model, x, extra_inputs, forward_options or {})
        with _lock:
            _interaction_cache.setdefault(model, {})[key] = interact
    return interact


def _is_output_changed_by_other_samples(
    model: nn.Module, x: Tensor, extra_inputs: ExtraInputs, forward_options: Mapping[str, Any]
) -> bool:
    """Run a copy of the model on the first sample with two different neighbors. Return whether its output differs."""
    images = unequal = draw_noise_like(x[:1], 0, n_samples=3)
    if x.is_floating_point():
        unequal = images * images.new_tensor([0.3, 0.1, 10]).view(-1, *[1] * (images.ndim - 1))
    extra = extra_inputs.select_rows([0, 0], len(x))  # the extra inputs of the first sample, for both
    try:
        model_copy = copy_without_hooks(model)
        key = find_input_key(model, forward_options.get("input_key"))
        frames_first = bool(forward_options.get("frames_first"))

        def compute_first_sample_outputs(samples: Tensor) -> list[list[Tensor]]:
            answers = []
            for other in (1, 2):
                torch.set_rng_state(states)
                pair = samples[[0, other]]
                args, kwargs = map_leaves((extra.args, dict(extra.kwargs)), Tensor.clone)  # it may change them in place
                output = call_model(model_copy, pair, args, kwargs, key, frames_first=frames_first)
                answers.append(_read_first_sample(output))
            return answers

        with (
            torch.inference_mode(False),
            torch.no_grad(),
            autocast_uncached(),
            eval_mode_buffers_restored(model_copy),
            evaluation_mode(model_copy),
            torch.random.fork_rng(devices=[x.device] if x.device.type == "cuda" else []),
        ):
            states = torch.get_rng_state()
            try:
                first_answers, other_answers = compute_first_sample_outputs(unequal)
            except Exception:  # it accepts inputs of its own range alone
                first_answers, other_answers = compute_first_sample_outputs(images)
    except Exception:  # an error of the model is raised again when the model itself runs
        return any(map(_is_norm_without_statistics, model.modules()))
    pairs = zip(first_answers, other_answers, strict=False)
    return any(tensor.shape != other.shape or _differ_beyond_rounding(tensor, other) for tensor, other in pairs)


def _read_first_sample(output: Any) -> list[Tensor]:
    """Return the tensors that belong to the first sample, from a model's output for two samples."""
    is_list = isinstance(output, list | tuple) and len(output) == 2
    has_structure_per_sample = is_list and not any(isinstance(item, Tensor) for item in output)
    leaves = [leaf for _, leaf in iter_leaves(output[0] if has_structure_per_sample else output)]
    tensors = [leaf for leaf in leaves if describe_unusual_tensor(leaf) is None and leaf.is_floating_point()]
    return tensors if has_structure_per_sample else [leaf[0] for leaf in tensors if leaf.ndim > 0 and len(leaf) == 2]


def _differ_beyond_rounding(tensor: Tensor, other: Tensor) -> bool:
    """Return whether two tensors differ by more than the rounding of their dtype."""
    if not tensor.numel():
        return False
    tolerance = RELATIVE_TOLERANCE_BY_DTYPE.get(tensor.dtype, 1e-4) * tensor.abs().amax()
    return bool((tensor - other).abs().amax() > tolerance)


def _is_norm_without_statistics(module: nn.Module) -> bool:
    return isinstance(module, _BatchNorm) and module.running_mean is None and module.running_var is None
