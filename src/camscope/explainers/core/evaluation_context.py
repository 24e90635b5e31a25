"""The context of one call: the model in eval mode without side effects, and checks of settings and inputs."""

import itertools
import math
import numbers
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
from camscope.explainers.core.channel_axis_check import check_channels_not_last
from camscope.explainers.core.inputs import NO_EXTRA_INPUTS, ExtraInputs, check_dense_tensor
from camscope.explainers.core.noise_tests import samples_interact
from camscope.hooks.base import autocast_uncached, check_initialized, evaluation_mode, unwrap
from camscope.hooks.hook_free_copies import hooks_excluded_from_copies
from camscope.hooks.isolation import buffers_and_rng_restored, eval_mode_buffers_restored, rng_restored
from camscope.plurals import plural
from camscope.pytree import map_leaves
from camscope.targets import Score, TargetLike
from camscope.unusual_tensors import describe_unusual_tensor

P = ParamSpec("P")
T = TypeVar("T")
Mode = Literal["eval", "as_is"]
CHANNELS_LAST_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}  # by the rank of an input
MAX_COUNT_SETTING = 1_000_000  # samples, steps, cells, images in a pass
MAX_REPR_LENGTH = 60  # characters of a value in an error
OnNonFinite = Literal["raise", "warn"]
Precision = Literal["bf16"]
AutocastFactory = Callable[[], AbstractContextManager[None]]
QUANTIZED_MODULE_PREFIXES = ("torch.ao.nn.quantized", "torch.nn.quantized", "torch.ao.nn.intrinsic.quantized")
FLOAT_MODULES_FOR_QUANTIZATION = (  # modules of the quantized packages that compute in floats
    torch.ao.nn.quantized.FloatFunctional,
    torch.ao.nn.quantized.FXFloatFunctional,
)


@dataclass(frozen=True)
class ModelInfo:
    """Facts about a model: the eager module that hooks reach, its devices, and how it runs."""

    model: nn.Module
    modules: tuple[nn.Module, ...]
    devices: tuple[torch.device, ...]
    is_compiled: bool
    inference_tensor_name: str | None

    def weight_versions(self) -> dict[int, int]:
        """Return the version counter of each parameter. A counter changes if another thread trains the model."""
        parameters = (value for module in self.modules for value in module._parameters.values() if value is not None)
        return {id(value): value._version for value in parameters if not value.is_inference()}


def inspect_model(model: nn.Module) -> ModelInfo:
    """Return the facts about a model. Raise ModelError if the model cannot be explained."""
    inner = unwrap(model)
    name = type(inner).__name__
    if isinstance(inner, torch.jit.ScriptModule):
        raise ModelError(f"{name} is TorchScript: hooks cannot reach its layers; pass the original nn.Module")
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
                check_initialized(inner)
            if (kind := describe_unusual_tensor(value)) is not None and not kind.has_values:
                fix = "load the weights first" if value.is_meta else f"expected {kind.replacement}"
                raise ModelError(f"{path}.{key} of {name} is {kind.description}; {fix}")
            devices[value.device] = None
            inference = inference or (f"{path}.{key}" if value.is_inference() else None)
    return ModelInfo(inner, tuple(modules.values()), tuple(devices), compiled, inference)


@contextmanager
def inference_scope(model_info: ModelInfo, mode: Mode) -> Iterator[None]:
    """Switch the model to eval mode and disable gradients inside the `with`. Everything is restored at exit.

    Inference mode and compiled code are disabled, too. With `mode="as_is"` the train and eval modes stay.
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
            scope.enter_context(rng_restored(model_info.devices))
            scope.enter_context(evaluation_mode(model_info.model))
        if model_info.is_compiled:
            scope.enter_context(_force_eager())
        yield


@contextmanager
def autocast_scope(precision: Precision | None, model_info: ModelInfo) -> Iterator[AutocastFactory]:
    """Disable autocast inside the `with`. Yield a context manager that enables it again for calls of the model.

    The model runs under the caller's autocast, or in bfloat16 on its devices with `"bf16"`; its weights are not converted.
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
    """The settings of a method that affect how the model is called."""

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
    """The input x (N,C,*S) of one call as the model takes it, and the options of every score of that call."""

    x: Tensor
    model: nn.Module
    score_options: Mapping[str, Any]
    one_sample_per_pass: bool = False  # because the samples of a batch affect one another

    def create_score(self, target: TargetLike = None, score_cls: type[Score] = Score) -> Score:
        """Create the score of a target."""
        return score_cls(self.model, target, **self.score_options)


@contextmanager
def evaluation_context(
    model_info: ModelInfo,
    explainer: EvaluationSettings,
    x: Tensor,
    extra_inputs: ExtraInputs = NO_EXTRA_INPUTS,
    *,
    runs_copies: bool = False,
) -> Iterator[EvaluationContext]:
    """Prepare the model for one call, and yield the context of this call.

    `runs_copies`: whether perturbed copies will share passes.
    """
    one_sample_per_pass = has_interacting_samples(model_info, explainer, x, extra_inputs, runs_copies=runs_copies)
    with inference_scope(model_info, explainer.mode), autocast_scope(explainer.precision, model_info) as model_autocast:
        inputs = check_input(x, model_info, explainer)
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
            check_channels_not_last(inputs, context.create_score())
        yield context


def has_interacting_samples(
    model_info: ModelInfo,
    explainer: EvaluationSettings,
    x: Tensor,
    extra_inputs: ExtraInputs = NO_EXTRA_INPUTS,
    *,
    runs_copies: bool = False,
) -> bool:
    """Whether the samples of a batch x (N,C,*S) affect one another's outputs in eval mode.

    With `runs_copies`, also whether copies of one sample do.
    """
    check_input(x, model_info, explainer)
    if explainer.mode != "eval" or not (runs_copies or len(x) > 1):
        return False
    return samples_interact(
        model_info.model, clone_inference_tensor(x).detach(), extra_inputs, explainer.forward_options
    )


def check_one_of(setting: str, value: object, *options: object) -> None:
    """Raise InputError unless the value of a setting is one of `options`."""
    if value not in options:
        raise InputError(f"{setting}={value!r}: expected {' or '.join(map(repr, options))}")


def check_positive_number(*allowed: object, high: float = math.inf, **settings: object) -> None:
    """Raise InputError unless each setting is one of `allowed`, or a positive number up to `high`."""
    _check_settings("a positive number", lambda value: _is_finite_number(value) and value > 0, high, allowed, settings)


def check_number(*allowed: object, low: float = -math.inf, high: float = math.inf, **settings: object) -> None:
    """Raise InputError unless each setting is one of `allowed`, or a number from `low` to `high`."""
    expectation = "a number" if low == -math.inf else f"a number, {low:g} or more"
    _check_settings(expectation, lambda value: _is_finite_number(value) and value >= low, high, allowed, settings)


def check_positive_integer(*allowed: object, **settings: object) -> None:
    """Raise InputError unless each setting is one of `allowed`, or an integer from 1 to `MAX_COUNT_SETTING`."""
    expectation, high = "a whole number, 1 or more", MAX_COUNT_SETTING
    _check_settings(expectation, lambda value: _is_integer(value) and value >= 1, high, allowed, settings)


def check_integer(*allowed: object, **settings: object) -> None:
    """Raise InputError unless each setting is one of `allowed`, or a 64-bit integer."""
    expectation, high = "a whole number of 64 bits", 2**64
    _check_settings(expectation, lambda value: _is_integer(value) and -(2**63) <= value < high, high, allowed, settings)


def _check_settings(
    expectation: str,
    is_valid: Callable[[Any], bool],
    high: float,
    allowed: tuple[object, ...],
    settings: Mapping[str, Any],
) -> None:
    for name, value in settings.items():
        if any(value is option for option in allowed):
            continue
        if not is_valid(value) or value > high:
            expected = f"{high:,} at most" if is_valid(value) else expectation
            raise InputError(f"{name}={_shorten_repr(value)}: expected {' or '.join([expected, *map(repr, allowed)])}")


def _shorten_repr(value: object) -> str:
    """Return the repr of a value, cut to `MAX_REPR_LENGTH` characters."""
    try:
        text = repr(value)
    except ValueError:  # Python does not convert integers of more than 4,300 digits
        return "a number of thousands of digits"
    return text if len(text) <= MAX_REPR_LENGTH else f"{text[:MAX_REPR_LENGTH]}…"


def _is_integer(value: object) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _is_finite_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer too large for a float
        return False


def check_input(x: object, model_info: ModelInfo, explainer: EvaluationSettings) -> Tensor:
    """Return the input (N,C,*S), detached from the autograd graph. Raise InputError if the model cannot take it."""
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
    check_dense_tensor(x)
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
        _check_channels_first(x, model_info)
    if model_info.devices and x.device not in model_info.devices:
        devices = ", ".join(map(str, model_info.devices))
        raise InputError(f"the input is on {x.device}, but the model is on {devices}; move one of them")
    return clone_inference_tensor(x).detach()


def _check_channels_first(x: Tensor, model_info: ModelInfo) -> None:
    """Raise InputError for a video (N,T,C,H,W) or a bag of images (N,B,C,H,W). Expected is (N,C,D,H,W)."""
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
    """Return a copy of a tensor that was created under `inference_mode`. Other tensors are returned unchanged."""
    return value.clone() if value.is_inference() else value


def check_differentiable(model_info: ModelInfo) -> None:
    """Raise ModelError if autograd cannot differentiate the model's weights."""
    if model_info.inference_tensor_name:
        raise ModelError(
            f"{model_info.inference_tensor_name} of {type(model_info.model).__name__} was created under inference_mode and has "
            "no gradient; create the model, or a copy.deepcopy of it, outside of inference_mode"
        )


def device_and_dtype(model: nn.Module) -> tuple[torch.device, torch.dtype]:
    """Return the device and dtype of the model's first floating-point parameter or buffer."""
    for value in itertools.chain(model.parameters(), model.buffers()):
        if value.is_floating_point():
            return value.device, value.dtype
    return torch.device("cpu"), torch.float32


def check_finite(quantity: str, values: Tensor, policy: OnNonFinite) -> None:
    """Raise NonFiniteError, or warn, if any value is NaN or infinite."""
    if bool(values.sum().isfinite()) or bool(values.isfinite().all()):  # the sum is 30 times faster, and may overflow
        return
    bad = (~values.isfinite()).nonzero()
    count = f"{plural(len(bad), 'NaN or infinite value')} of {values.numel()}"
    message = f"{quantity} has {count}, the first at {tuple(bad[0].tolist())}"
    if policy == "raise":
        raise NonFiniteError(f'{message}; to continue anyway, pass on_nonfinite="warn"')
    warn_caller(message)


def run_uncompiled(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function: code that `torch.compile` compiles calls it eagerly, as hooks and backward passes need.

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
def _force_eager() -> Iterator[None]:
    """Run compiled code eagerly inside the `with`. The last thread to leave restores the compiler."""
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
