"""The scope of one call: a model that can be explained, left as it was; numbers that are numbers."""

import itertools
import math
import numbers
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from camscope.errors import InputError, ModelError, NonFiniteError, warn_caller
from camscope.explainers.core.inputs import ALONE, Companions, expect_ordinary
from camscope.explainers.core.sample_interaction import samples_interact
from camscope.hooks.base import autocast_uncached, evaluating, expect_initialized, unwrap
from camscope.hooks.buffer_isolation import buffers_isolated, isolated, random_numbers_kept
from camscope.hooks.hook_free_copies import clean_copies
from camscope.plurals import plural
from camscope.pytree import mapped
from camscope.targets import Question, Score

Mode = Literal["eval", "as_is"]
MAX_COUNT = 1_000_000  # of samples, steps, cells, images in a pass
MAX_REPR = 60  # letters of a value in an error
OnNonFinite = Literal["raise", "warn"]
Precision = Literal["bf16"]
Casts = Callable[[], AbstractContextManager[None]]
QUANTISED = ("torch.ao.nn.quantized", "torch.nn.quantized", "torch.ao.nn.intrinsic.quantized")
FLOAT_FUNCTIONS = (  # they compute in floats, and lie among the quantised ones: the sums of a model that may be quantised later
    torch.ao.nn.quantized.FloatFunctional,
    torch.ao.nn.quantized.FXFloatFunctional,
)


@dataclass(frozen=True)
class Survey:
    """What one walk through a model tells: the eager module that hooks reach, where its numbers are, how it runs."""

    model: nn.Module
    devices: tuple[torch.device, ...]
    compiled: bool
    made_in_inference_mode: str | None


def survey(model: nn.Module) -> Survey:
    """The eager module inside a model and what an explanation must know of it, or a ModelError that says why not."""
    inner = unwrap(model)
    name = type(inner).__name__
    if isinstance(inner, torch.jit.ScriptModule):
        raise ModelError(f"{name} is TorchScript: hooks cannot reach its layers; pass the original nn.Module")
    parts = [type(part) for key, part in inner.named_children() if not key.startswith("_")]
    if isinstance(inner, torch.fx.GraphModule) and set(parts) <= {nn.Module}:
        raise ModelError(
            f"{name} holds an exported program, whose operations belong to no layer: pass the nn.Module that was exported"
        )
    expect_initialized(inner)
    devices: dict[torch.device, None] = {}
    compiled, inference = False, None
    for path, module in inner.named_modules():
        if type(module).__module__.startswith(QUANTISED) and type(module) not in FLOAT_FUNCTIONS:
            raise ModelError(f"{path or name} is quantised: it has no gradient; pass the float model it was made from")
        compiled = compiled or "_orig_mod" in module._modules or module._compiled_call_impl is not None
        for key, value in (*module._parameters.items(), *module._buffers.items()):
            if value is None:
                continue
            if value.is_meta:
                raise ModelError(
                    f"{path}.{key} of {name} is on the meta device: it has no values; load the weights first"
                )
            devices[value.device] = None
            inference = inference or (f"{path}.{key}" if value.is_inference() else None)
    return Survey(inner, tuple(devices), compiled, inference)


@contextmanager
def calm(known: Survey, mode: Mode) -> Iterator[None]:
    """No gradients, no inference mode, no compiled code, and eval mode unless `mode="as_is"`; all put back at the end."""
    with ExitStack() as scope:
        scope.enter_context(clean_copies())
        scope.enter_context(torch.inference_mode(False))
        scope.enter_context(torch.no_grad())
        scope.enter_context(autocast_uncached())
        scope.enter_context(buffers_isolated(known.model) if mode == "eval" else isolated(known.model))
        if mode == "eval":
            scope.enter_context(random_numbers_kept(known.devices))
            scope.enter_context(evaluating(known.model))
        if known.compiled:
            scope.enter_context(_eager())
        yield


def weight_versions(model: nn.Module) -> dict[int, int]:
    """How often each parameter was changed in place: another thread that trains the model meanwhile changes some."""
    return {id(value): value._version for value in model.parameters() if not value.is_inference()}


def weights_key(model: nn.Module) -> int:
    """A number that is another one when a parameter was replaced or changed in place."""
    return hash(frozenset(weight_versions(model).items()))


@contextmanager
def precisely(precision: Precision | None, known: Survey) -> Iterator[Casts]:
    """Autocast is off, so that a method's own arithmetic is exact; what is yielded brings it back for the model's.

    It is the caller's own autocast, or bfloat16 on the model's devices under `"bf16"`; nothing of the model is converted.
    """
    kinds = {device.type for device in known.devices} or {"cpu"}
    dtypes = {kind: torch.get_autocast_dtype(kind) for kind in kinds if torch.is_autocast_enabled(kind)}
    if precision == "bf16":
        dtypes = dict.fromkeys(kinds, torch.bfloat16)
    with ExitStack() as scope:
        for kind in dtypes:
            scope.enter_context(torch.autocast(kind, enabled=False))
        yield partial(_cast, dtypes)


@contextmanager
def _cast(dtypes: Mapping[str, torch.dtype]) -> Iterator[None]:
    with ExitStack() as scope:
        for kind, dtype in dtypes.items():
            scope.enter_context(torch.autocast(kind, dtype, cache_enabled=False))
        yield


def prepared(x: Tensor, precision: Precision | None) -> Tensor:
    """The input with its channels last in memory under `"bf16"`, where there is such an order; else as it is."""
    orders = {4: torch.channels_last, 5: torch.channels_last_3d}
    if precision != "bf16" or x.ndim not in orders:
        return x
    return x.contiguous(memory_format=orders[x.ndim])


class Settings(Protocol):
    """What a call must know of a method."""

    mode: Mode
    precision: Precision | None
    categories: Sequence[str] | None

    @property
    def call_settings(self) -> Mapping[str, Any]:
        """How the model is called with an input."""

    @property
    def takes_integers(self) -> bool:
        """Whether the input may be of integers."""


@dataclass(frozen=True)
class Asked:
    """The input x (N,C,*S) of one call, as the model takes it, and what every question about it is asked with."""

    x: Tensor
    model: nn.Module
    beside: Mapping[str, Any]
    one_by_one: bool = False  # the model's samples see one another

    def score(self, target: Question = None, kind: type[Score] = Score) -> Score:
        """The number that a question means."""
        return kind(self.model, target, **self.beside)


@contextmanager
def asking(
    known: Survey, tool: Settings, x: Tensor, companions: Companions = ALONE, *, copies: bool = False
) -> Iterator[Asked]:
    """Inside the `with` the model is calm, and the arithmetic around it exact; the companions go to the model with x.

    `copies`: the model is going to see batches of altered copies. Where its samples see one another, each has a pass of
    its own.
    """
    apart = interacting(known, tool, x, companions, copies=copies)
    with calm(known, tool.mode), precisely(tool.precision, known) as casts:
        more = {"args": mapped(companions.args, usable), "kwargs": mapped(dict(companions.kwargs), usable)}
        inputs = prepared(checked_input(x, known, tool), tool.precision)
        settings = {"categories": tool.categories, "one_by_one": apart, **tool.call_settings}
        yield Asked(inputs, known.model, {**settings, "around": casts, "size": inputs.shape[2:], **more}, apart)


def interacting(
    known: Survey, tool: Settings, x: Tensor, companions: Companions = ALONE, *, copies: bool = False
) -> bool:
    """Whether samples see one another, in eval mode, where there are several of x (N,C,*S), or `copies` of one."""
    checked_input(x, known, tool)
    if tool.mode != "eval" or not (copies or len(x) > 1):
        return False
    return samples_interact(known.model, usable(x).detach(), companions, tool.call_settings)


def expect_one_of(setting: str, value: object, *words: object) -> None:
    """An InputError unless the value of a setting is one of these."""
    if value not in words:
        raise InputError(f"{setting}={value!r}: expected {' or '.join(map(repr, words))}")


def expect_positive(*also: object, high: float = math.inf, **settings: object) -> None:
    """An InputError unless each setting is a positive number, at most `high`, or one of `also`."""
    _expect("a positive number", lambda value: _is_finite(value) and value > 0, also, settings)
    _expect_at_most(high, also, settings)


def expect_number(*also: object, low: float = -math.inf, high: float = math.inf, **settings: object) -> None:
    """An InputError unless each setting is a number, `low` or more and `high` or less, or one of `also`."""
    words = "a number" if low == -math.inf else f"a number, {low:g} or more"
    _expect(words, lambda value: _is_finite(value) and value >= low, also, settings)
    _expect_at_most(high, also, settings)


def expect_count(*also: object, **settings: object) -> None:
    """An InputError unless each setting is a whole number, 1 or more and `MAX_COUNT` or less, or one of `also`.

    A larger one is a slip, which would end hours later, or in the memory that numbers for so many passes take.
    """
    _expect("a whole number, 1 or more", lambda value: _is_whole(value) and value >= 1, also, settings)
    _expect_at_most(MAX_COUNT, also, settings)


def _expect_at_most(high: float, also: tuple[object, ...], settings: Mapping[str, object]) -> None:
    _expect(f"{high:,} at most", lambda value: value <= high, also, settings)


def expect_whole(*also: object, **settings: object) -> None:
    """An InputError unless each setting is a whole number of 64 bits, or one of `also`."""
    _expect("a whole number of 64 bits", lambda value: _is_whole(value) and -(2**63) <= value < 2**64, also, settings)


def _expect(words: str, fits: Callable[[Any], bool], also: tuple[object, ...], settings: Mapping[str, object]) -> None:
    for name, value in settings.items():
        if not any(value is one for one in also) and not fits(value):
            raise InputError(f"{name}={_shortened(value)}: expected {' or '.join([words, *map(repr, also)])}")


def _shortened(value: object) -> str:
    """A value as it is written in Python; of a number of hundreds of digits some of them."""
    try:
        text = repr(value)
    except ValueError:  # Python writes out no number of more than 4,300 digits
        return "a number of thousands of digits"
    return text if len(text) <= MAX_REPR else f"{text[:MAX_REPR]}…"


def _is_whole(value: object) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _is_finite(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # of a whole number that is too large for a float
        return False


def checked_input(x: Tensor, known: Survey, tool: Settings) -> Tensor:
    """(N,C,*S): the input, cut from the caller's graph without a copy; an InputError if the model cannot take it."""
    _expect_no_list(x)
    if not isinstance(x, Tensor):
        raise InputError(
            f"the input is a {type(x).__name__}; expected a float tensor (N,C,H,W) as the model takes it (an image of "
            f"another kind goes to explain)"
        )
    expect_ordinary(x)
    if x.dtype == torch.bool or x.is_complex():
        raise InputError(f"the input is {x.dtype}; expected a float tensor (N,C,H,W) as the model takes it")
    if not x.is_floating_point() and not tool.takes_integers:
        raise InputError(
            f"the input is {x.dtype}, whose values can be neither changed by little nor differentiated: pass x.float() where "
            f"the model gives the same answer, or a method that only looks at a layer, such as GradCAM"
        )
    if x.ndim < 3:
        raise InputError(f"the input is {tuple(x.shape)}; expected (N,C,H,W), or (N,C,L), (N,C,D,H,W)")
    if x.shape[0] == 0 or x.numel() == 0:
        raise InputError(f"the batch is empty: {tuple(x.shape)}")
    if tool.call_settings.get("frames_first") and x.ndim != 5:
        raise InputError(
            f"the input has {plural(x.ndim, 'axis')}: a model with frames_first=True takes five, (N,T,C,H,W)"
        )
    if tool.call_settings.get("frames_first") is None:
        expect_channels_first(x, known.model)
    if known.devices and x.device not in known.devices:
        places = ", ".join(map(str, known.devices))
        raise InputError(f"the input is on {x.device}, the model on {places}; move one of them")
    return usable(x).detach()


def _expect_no_list(value: object) -> None:
    """An InputError for images in a list, which may be a batch or the instances of a bag."""
    if isinstance(value, list | tuple) and value and all(isinstance(part, Tensor) for part in value):
        raise InputError(
            f"the input is a {type(value).__name__}; expected a float tensor (N,C,H,W) as the model takes it: pass a batch as "
            f"torch.stack(images), or a bag of instances as torch.stack(instances)[None] with frames_first=True"
        )


def expect_channels_first(x: Tensor, model: nn.Module) -> None:
    """An InputError for a video (N,T,C,H,W) or a bag of images (N,B,C,H,W), whose channels are not where others have them."""
    if x.ndim != 5:
        return
    kinds = (nn.Conv2d, nn.Conv3d)
    firsts = [next((part for part in model.modules() if isinstance(part, kind)), None) for kind in kinds]
    counts, flat = {one.in_channels for one in firsts if one is not None}, firsts[1] is None
    if x.shape[2] not in counts or x.shape[2] > 4:
        return
    if x.shape[1] not in counts or (flat and x.shape[1] == x.shape[2]):
        raise InputError(
            f"the input {tuple(x.shape)} seems to have its {plural(x.shape[2], 'channel')} behind the frames of a video, or the "
            f"instances of a bag: pass frames_first=True to the method where it is (N,T,C,H,W), False where it is (N,C,D,H,W)"
        )


def usable(value: Tensor) -> Tensor:
    """The tensor itself; a copy of one made under `inference_mode`, which no graph may hold."""
    return value.clone() if value.is_inference() else value


def expect_differentiable(known: Survey) -> None:
    """A ModelError for weights that autograd refuses."""
    if known.made_in_inference_mode:
        raise ModelError(
            f"{known.made_in_inference_mode} of {type(known.model).__name__} was made under inference_mode: it has no "
            f"gradient; make the model outside of it, or pass copy.deepcopy(model) made outside"
        )


def home(model: nn.Module) -> tuple[torch.device, torch.dtype]:
    """Where an image goes: device and float type of the model's first floating parameter or buffer."""
    for value in itertools.chain(model.parameters(), model.buffers()):
        if value.is_floating_point():
            return value.device, value.dtype
    return torch.device("cpu"), torch.float32


def checked_finite(what: str, values: Tensor, policy: OnNonFinite) -> None:
    """Raise NonFiniteError (or warn) naming what, how many and the first index, if a value is NaN or infinite."""
    if bool(values.sum().isfinite()) or bool(values.isfinite().all()):  # the sum is 30 times faster, and may overflow
        return
    bad = (~values.isfinite()).nonzero()
    count = f"{plural(len(bad), 'NaN or infinite value')} of {values.numel()}"
    message = f"{what} has {count}, the first at {tuple(bad[0].tolist())}"
    if policy == "raise":
        raise NonFiniteError(f'{message}; pass on_nonfinite="warn" to go on')
    warn_caller(message)


_eager_lock = threading.Lock()
_eager_threads: list[int] = []
_stance = ExitStack()


@contextmanager
def _eager() -> Iterator[None]:
    """Compiled code runs in plain Python; the stance is the process's, so the last thread inside puts it back."""
    here = threading.get_ident()
    with _eager_lock:
        if not _eager_threads:
            _stance.enter_context(torch.compiler.set_stance("force_eager"))
        _eager_threads.append(here)
    try:
        yield
    finally:
        with _eager_lock:
            _eager_threads.remove(here)
            if not _eager_threads:
                _stance.close()
