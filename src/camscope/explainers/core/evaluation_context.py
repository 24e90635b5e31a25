"""The context of one call: the model in eval mode without side effects, and a checked input."""

import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any, Literal, ParamSpec, Protocol, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from camscope.errors import InputError, ModelError, NonFiniteError, warn_caller
from camscope.explainers.core.find_constant_scores_and_interacting_samples import samples_interact
from camscope.explainers.core.model_input import NO_EXTRA_INPUTS, ExtraInputs, check_input_tensor_is_ordinary
from camscope.explainers.core.reject_channels_last_input import check_input_channels_not_last
from camscope.hooks.exclude_hooks_from_copies import hooks_excluded_from_copies
from camscope.hooks.find_layers import check_lazy_layers_initialized, unwrap
from camscope.hooks.restore_buffers_and_rng import (
    buffers_and_rng_restored,
    eval_mode_buffers_restored,
    rng_restored_unless_other_threads_run,
)
from camscope.hooks.thread_local_evaluation_mode import evaluation_mode
from camscope.hooks.thread_local_hooks import autocast_uncached
from camscope.hooks.wrap_black_box_function_as_module import ScoreFunction
from camscope.plurals import plural
from camscope.pytree import map_leaves
from camscope.targets import Score, TargetLike
from camscope.unusual_tensors import describe_unusual_tensor

P = ParamSpec("P")
T = TypeVar("T")
Mode = Literal["eval", "as_is"]
CHANNELS_LAST_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}  # by the rank of an input
OnNonFinite = Literal["raise", "warn"]
Precision = Literal["bf16"]
AutocastFactory = Callable[[], AbstractContextManager[None]]
QUANTIZED_MODULE_PREFIXES = ("torch.ao.nn.quantized", "torch.nn.quantized", "torch.ao.nn.intrinsic.quantized")
FLOAT_MODULES_FOR_QUANTIZATION = (  # modules of the quantized packages that compute in floats
    torch.ao.nn.quantized.FloatFunctional,
    torch.ao.nn.quantized.FXFloatFunctional,
)


SCORES_ALONE = "needs only scores, such as rise, occlusion, sobol, hsic, lime or kernelshap"


@dataclass(frozen=True)
class ModelInfo:
    """Facts about a model: the unwrapped module, the parts and devices of the module, and whether it is compiled."""

    model: nn.Module
    modules: tuple[nn.Module, ...]
    devices: tuple[torch.device, ...]
    is_compiled: bool
    inference_tensor_name: str | None

    def read_version_counter_by_parameter_id(self) -> dict[int, int]:
        """Return PyTorch's version counter of each parameter, by id. Training in another thread changes the counters."""
        parameters = (value for module in self.modules for value in module._parameters.values() if value is not None)
        return {id(value): value._version for value in parameters if not value.is_inference()}


def inspect_model(model: nn.Module, *, scores_suffice: bool = False) -> ModelInfo:
    """Collect facts about a model. Raise ModelError for a model that cannot be explained, such as a quantized model.

    If `scores_suffice`, the model may be TorchScript or a function, which have no layers that hooks could reach.
    """
    inner = unwrap(model)
    name = type(inner).__name__
    if not scores_suffice and isinstance(inner, torch.jit.ScriptModule):
        raise ModelError(
            f"{name} is TorchScript: hooks cannot reach its layers; pass the original nn.Module, or use a method that "
            f"{SCORES_ALONE}"
        )
    if not scores_suffice and isinstance(inner, ScoreFunction):
        raise ModelError(
            f"{inner.name} is known by its scores alone, without layers and gradients; use a method that {SCORES_ALONE}"
        )
    parts = [type(child) for key, child in inner.named_children() if not key.startswith("_")]
    if isinstance(inner, torch.fx.GraphModule) and set(parts) <= {nn.Module}:
        raise ModelError(f"{name} is an exported program, which has no layers: pass the original nn.Module")
    modules, devices = dict(inner.named_modules()), dict[torch.device, None]()
    compiled, inference = False, None
    for path, module in modules.items():
        is_quantized = type(module).__module__.startswith(QUANTIZED_MODULE_PREFIXES)
        if is_quantized and type(module) not in FLOAT_MODULES_FOR_QUANTIZATION:
            raise ModelError(f"{path or name} is quantized and has no gradient; pass the original float model")
        compiled = compiled or "_orig_mod" in module._modules or module._compiled_call_impl is not None
        for key, value in (*module._parameters.items(), *module._buffers.items()):
            if value is None:
                continue
            if is_lazy(value):
                check_lazy_layers_initialized(inner)
            if (kind := describe_unusual_tensor(value)) is not None and not kind.has_values:
                fix = "load the weights first" if value.is_meta else f"expected {kind.replacement}"
                raise ModelError(f"{path}.{key} of {name} is {kind.description}; {fix}")
            devices[value.device] = None
            inference = inference or (f"{path}.{key}" if value.is_inference() else None)
    return ModelInfo(inner, tuple(modules.values()), tuple(devices), compiled, inference)


@contextmanager
def inference_scope(model_info: ModelInfo, mode: Mode) -> Iterator[None]:
    """Put the model in eval mode and disable gradients inside the `with`. Restore the previous state at the end.

    Inference mode and compiled code are disabled, too. With `mode="as_is"`, each module stays in train or eval mode.
    """
    with ExitStack() as scope:
        scope.enter_context(hooks_excluded_from_copies())
        scope.enter_context(torch.inference_mode(False))
        scope.enter_context(torch.no_grad())
        scope.enter_context(autocast_uncached())
        if mode == "as_is":
            scope.enter_context(buffers_and_rng_restored(model_info.model))
        else:
            scope.enter_context(eval_mode_buffers_restored(model_info.model))
            scope.enter_context(rng_restored_unless_other_threads_run(model_info.devices))
            scope.enter_context(evaluation_mode(model_info.model))
        if model_info.is_compiled:
            scope.enter_context(compiled_code_run_eagerly())
        yield


@contextmanager
def autocast_scope(precision: Precision | None, model_info: ModelInfo) -> Iterator[AutocastFactory]:
    """Disable autocast inside the `with`. Yield a context manager that enables autocast for calls of the model.

    The model runs with the caller's autocast settings, or in bfloat16 if `precision` is "bf16". Its weights stay
    unchanged.
    """
    kinds = {device.type for device in model_info.devices} or {"cpu"}
    dtypes = {kind: torch.get_autocast_dtype(kind) for kind in kinds if torch.is_autocast_enabled(kind)}
    if precision == "bf16":
        dtypes = dict.fromkeys(kinds, torch.bfloat16)
    with ExitStack() as scope:
        for kind in dtypes:
            scope.enter_context(torch.autocast(kind, enabled=False))

        @contextmanager
        def model_autocast() -> Iterator[None]:
            with ExitStack() as model_scope:
                for kind, dtype in dtypes.items():
                    model_scope.enter_context(torch.autocast(kind, dtype, cache_enabled=False))
                yield

        yield model_autocast


class EvaluationSettings(Protocol):
    """The settings of a method that affect calls of the model."""

    mode: Mode
    precision: Precision | None
    class_names: Sequence[str] | None

    @property
    def forward_options(self) -> Mapping[str, Any]:
        """Options for the call of the model's forward."""

    @property
    def accepts_integer_input(self) -> bool:
        """Whether the input may be an integer tensor."""


@dataclass(frozen=True)
class EvaluationContext:
    """The input x (N,C,*S) of one call as the model takes it, and the options that all scores of the call share."""

    x: Tensor
    model: nn.Module
    score_options: Mapping[str, Any]
    one_sample_per_pass: bool = False  # because the samples of a batch affect one another

    def create_score(
        self, target: TargetLike = None, score_cls: type[Score] = Score, *, optional_target: bool = False
    ) -> Score:
        """Create the score of a target. `optional_target` has the same meaning as in `Score`."""
        return score_cls(self.model, target, optional_target=optional_target, **self.score_options)


@contextmanager
def evaluation_context(
    model_info: ModelInfo,
    explainer: EvaluationSettings,
    x: Tensor,
    extra_inputs: ExtraInputs = NO_EXTRA_INPUTS,
    *,
    runs_copies: bool = False,
) -> Iterator[EvaluationContext]:
    """Prepare the model for one call of an explainer. Yield a context that holds the checked input.

    `runs_copies` says whether perturbed copies of a sample will share passes.
    """
    one_sample_per_pass = has_interacting_samples(model_info, explainer, x, extra_inputs, runs_copies=runs_copies)
    with inference_scope(model_info, explainer.mode), autocast_scope(explainer.precision, model_info) as model_autocast:
        inputs = check_and_detach_input(x, model_info, explainer)
        if explainer.precision == "bf16" and inputs.ndim in CHANNELS_LAST_FORMATS:
            inputs = inputs.contiguous(memory_format=CHANNELS_LAST_FORMATS[inputs.ndim])
        score_options = {
            "args": map_leaves(extra_inputs.args, clone_inference_tensor),
            "kwargs": map_leaves(dict(extra_inputs.kwargs), clone_inference_tensor),
            "class_names": explainer.class_names,
            "forward_context": model_autocast,
            "input_size": inputs.shape[2:],
            "one_sample_per_pass": one_sample_per_pass,
            **explainer.forward_options,
        }
        context = EvaluationContext(inputs, model_info.model, score_options, one_sample_per_pass)
        if not explainer.forward_options.get("frames_first"):
            check_input_channels_not_last(inputs, context.create_score())
        yield context


def has_interacting_samples(
    model_info: ModelInfo,
    explainer: EvaluationSettings,
    x: Tensor,
    extra_inputs: ExtraInputs = NO_EXTRA_INPUTS,
    *,
    runs_copies: bool = False,
) -> bool:
    """Whether the output for one sample of a batch x (N,C,*S) depends on the other samples in eval mode.

    With `runs_copies`, a batch of one sample is tested, too, because copies of the sample will form a batch.
    """
    check_and_detach_input(x, model_info, explainer)
    if explainer.mode != "eval" or not (runs_copies or len(x) > 1):
        return False
    return samples_interact(
        model_info.model, clone_inference_tensor(x).detach(), extra_inputs, explainer.forward_options
    )


def check_and_detach_input(x: object, model_info: ModelInfo, explainer: EvaluationSettings) -> Tensor:
    """Check the input (N,C,*S), and return it detached from autograd. Raise InputError if the model cannot take it."""
    return check_input(x, model_info, explainer).detach()


def check_input(x: object, model_info: ModelInfo, explainer: EvaluationSettings) -> Tensor:
    """Check the input (N,C,*S), and return it with its graph. Raise InputError if the model cannot take it."""
    if not isinstance(x, Tensor):
        hint = " (an image of another kind goes to explain)"
        if isinstance(x, list | tuple) and x and all(isinstance(part, Tensor) for part in x):
            hint = (
                ": pass a batch as torch.stack(images), or a bag of instances as torch.stack(instances)[None] with "
                "frames_first=True"
            )
        if isinstance(x, int) or (isinstance(x, list | tuple) and x and all(isinstance(part, int) for part in x)):
            hint = f": it comes first and the target second, as in attribute(x, {x})"
        raise InputError(
            f"the input is a {type(x).__name__}; expected a float tensor (N,C,H,W) as the model takes it{hint}"
        )
    check_input_tensor_is_ordinary(x)
    if x.dtype == torch.bool or x.is_complex():
        raise InputError(f"the input is {x.dtype}; expected a float tensor (N,C,H,W) as the model takes it")
    if not x.is_floating_point() and not explainer.accepts_integer_input:
        raise InputError(
            f"the input is {x.dtype}, and this method requires a float input. Pass x.float() if "
            "the model accepts it, or use a method that only reads a layer, such as GradCAM"
        )
    if x.ndim < 3:
        raise InputError(f"the input has shape {tuple(x.shape)}; expected (N,C,H,W), (N,C,L) or (N,C,D,H,W)")
    if x.shape[0] == 0 or x.numel() == 0:
        raise InputError(f"the batch is empty: {tuple(x.shape)}")
    frames_first = explainer.forward_options.get("frames_first")
    if frames_first and x.ndim != 5:
        raise InputError(
            f"the input has {plural(x.ndim, 'axis')}; with frames_first=True expected are 5 axes, (N,T,C,H,W)"
        )
    if frames_first is None and x.ndim == 5:
        _reject_undeclared_video_or_bag(x, model_info)
    if model_info.devices and x.device not in model_info.devices:
        devices = ", ".join(map(str, model_info.devices))
        raise InputError(f"the input is on {x.device}, but the model is on {devices}; move one of them")
    return clone_inference_tensor(x)


def _reject_undeclared_video_or_bag(x: Tensor, model_info: ModelInfo) -> None:
    """Raise InputError if a 5-D input looks like a video (N,T,C,H,W) or a bag of images instead of a volume (N,C,D,H,W)."""
    convolutions = [
        next((module for module in model_info.modules if isinstance(module, kind)), None)
        for kind in (nn.Conv2d, nn.Conv3d)
    ]
    counts, flat = {layer.in_channels for layer in convolutions if layer is not None}, convolutions[1] is None
    if x.shape[2] not in counts or x.shape[2] > 4:
        return
    if x.shape[1] not in counts or (flat and x.shape[1] == x.shape[2]):
        raise InputError(
            f"the input {tuple(x.shape)} seems to have its {plural(x.shape[2], 'channel')} at the third axis. If it is a video "
            f"or a bag (N,T,C,H,W), pass frames_first=True to the method; if it is a volume (N,C,D,H,W), pass frames_first=False"
        )


def clone_inference_tensor(value: Tensor) -> Tensor:
    """Copy a tensor that was created under `inference_mode`. Return other tensors unchanged."""
    return value.clone() if value.is_inference() else value


def check_no_inference_mode_weights(model_info: ModelInfo) -> None:
    """Raise ModelError if a weight was created under `inference_mode`. Autograd does not work with such weights."""
    if model_info.inference_tensor_name:
        raise ModelError(
            f"{model_info.inference_tensor_name} of {type(model_info.model).__name__} was created under inference_mode and has "
            "no gradient; create the model, or a copy.deepcopy of it, outside of inference_mode"
        )


def get_device_and_dtype(model: nn.Module) -> tuple[torch.device, torch.dtype]:
    """Return the device and dtype of the model's first floating-point parameter or buffer."""
    for value in itertools.chain(model.parameters(), model.buffers()):
        if value.is_floating_point():
            return value.device, value.dtype
    return torch.device("cpu"), torch.float32


def check_finite(quantity: str, values: Tensor, policy: OnNonFinite) -> None:
    """Raise NonFiniteError if any value is NaN or infinite. With the policy "warn", issue a warning instead."""
    if bool(values.sum().isfinite()) or bool(values.isfinite().all()):  # the sum is 30 times faster, and may overflow
        return
    bad = (~values.isfinite()).nonzero()
    count = f"{plural(len(bad), 'NaN or infinite value')} of {values.numel()}"
    message = f"{quantity} has {count}, the first at {tuple(bad[0].tolist())}"
    if policy == "raise":
        raise NonFiniteError(f'{message}; to continue anyway, pass on_nonfinite="warn"')
    warn_caller(message)


def run_uncompiled(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function to run eagerly, even inside code that `torch.compile` compiles.

    `torch.compiler.disable` alone would import the compiler with camscope, which takes a second.
    """

    @wraps(function)
    def call_eagerly(*args: P.args, **kwargs: P.kwargs) -> T:
        if torch.compiler.is_compiling():
            return cast(T, torch.compiler.disable(function)(*args, **kwargs))
        return function(*args, **kwargs)

    return call_eagerly


_eager_lock = threading.Lock()
_eager_thread_ids: list[int] = []
_compiler_stance = ExitStack()


@contextmanager
def compiled_code_run_eagerly() -> Iterator[None]:
    """Run compiled code eagerly in all threads inside the `with`. The compiler is restored when the last thread leaves."""
    thread_id = threading.get_ident()
    with _eager_lock:
        if not _eager_thread_ids:
            _compiler_stance.enter_context(torch.compiler.set_stance("force_eager"))
        _eager_thread_ids.append(thread_id)
    try:
        yield
    finally:
        with _eager_lock:
            _eager_thread_ids.remove(thread_id)
            if not _eager_thread_ids:
                _compiler_stance.close()
