"""Baselines: inputs that show nothing, which paths start from and which hidden places are filled with."""

import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from camscope.errors import InputError
from camscope.explainers.core.batching import Seeded
from camscope.explainers.core.method import Method
from camscope.explainers.core.resampling import blurred
from camscope.plurals import plural

Kind = Literal["zero", "black", "white", "dark", "bright", "mean", "blur", "noise"]
KINDS = get_args(Kind)
Baseline = str | Any  # a Kind, or an image of any kind that `explain` takes, or a tensor (C,*S)
NOTHING: tuple[Baseline, ...] = ("zero", "mean", "blur", "noise")  # where no background is given
BLUR = 0.1, 0.3  # standard deviation of the Gaussian and where it is cut off, as shares of each axis


@dataclass(kw_only=True, eq=False, repr=False)
class WithBaseline(Seeded):
    """A method that shows the model something else in the input's place.

    `baseline`: see `filled`; of several the map is the mean. `seed`: of what is drawn.
    """

    baseline: Baseline | Sequence[Baseline] = "zero"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.baselines()

    def baselines(self) -> Sequence[Baseline]:
        """Those that the map is the mean over."""
        return several(self.baseline)

    def starts(self, x: Tensor) -> list[Tensor]:
        """(N,C,*S) -> one such tensor for each baseline."""
        return starts(self.baselines(), x, self)


@dataclass(kw_only=True, eq=False, repr=False)
class WithBackground(Seeded):
    """A method whose map is a mean over a background of inputs that the input is set against.

    `background`: inputs as the model takes them (M,C,*S), or a list of images, tensors and names of baselines (see
    `filled`); without one "zero", "mean", "blur" and "noise", which the result notes. `seed`: of what is drawn.
    """

    background: Tensor | Sequence[Baseline] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.background, str) or (isinstance(self.background, Tensor) and self.background.ndim < 3):
            raise InputError(f"background={_shown(self.background)}: expected inputs (M,C,H,W), or a list of images")
        if len(self.baselines()) == 0:
            raise InputError("background holds nothing: expected one input at least")

    def baselines(self) -> Sequence[Baseline]:
        """All of the background."""
        if self.background is None or isinstance(self.background, Tensor):
            return NOTHING if self.background is None else [*self.background]
        return several(list(self.background), "background") if len(self.background) else ()

    @property
    def said(self) -> tuple[str, ...]:
        """What a result says where no background was given."""
        return () if self.background is not None else (f"no background was given: {', '.join(NOTHING)} instead",)


def starts(baselines: Sequence[Baseline], x: Tensor, tool: Seeded, chosen: Sequence[int] | None = None) -> list[Tensor]:
    """(N,C,*S) -> one such tensor for each baseline, or for those of the `chosen` places; see `filled`."""
    places = range(len(baselines)) if chosen is None else chosen
    return [filled(baselines[which], x, tool, tool.seed ^ which) for which in places]


def several(baseline: Baseline | Sequence[Baseline], setting: str = "baseline") -> list[Baseline]:
    """The baselines that a setting names: one, or a list of them."""
    found = list(baseline) if isinstance(baseline, list | tuple) else [baseline]
    if not found:
        raise InputError(f"{setting}=[]: name one at least, such as 'zero'")
    for one in found:
        words = isinstance(one, str) and one not in KINDS and not _may_be_a_path(one)
        if words or one is None or isinstance(one, numbers.Number | Mapping | list | tuple | set):
            raise InputError(
                f"{setting}={one!r}: expected {', '.join(map(repr, KINDS))}, an image, or a tensor (C,H,W){_level(one)}"
            )
    return found


def filled(baseline: Baseline, x: Tensor, tool: Method, seed: int = 0) -> Tensor:
    """(N,C,*S) -> the same shape: each sample's own baseline, the same whatever batch it came in.

    "zero": 0 of the model's input, the mean colour where inputs are normalised; "black", "white": what the preprocessing
    makes of such pixels; "dark", "bright", "mean": each channel's least and largest value and mean over the sample; "blur":
    a Gaussian of a tenth of each side; "noise": drawn evenly from each channel's range; else an image, or a tensor
    (C,*S), (N,C,*S) or (), which is one number for all.
    """
    if isinstance(baseline, str) and baseline in KINDS:
        made = of_itself(baseline, x, seed)
        return _colour(baseline, x, tool) if made is None else made
    given = baseline.to(x) if isinstance(baseline, Tensor) and baseline.is_floating_point() else None
    if (
        given is not None and tool.frames_first and given.ndim >= 4
    ):  # as the model's input (T,C,H,W), of which x is the transpose
        given = given.transpose(-4, -3)
    if given is not None and (given.ndim == 0 or given.shape == x.shape):
        _expect_finite(given)
        return given.expand_as(x)
    if given is None:
        given = tool.read(baseline).x.to(x)
    _expect_fitting(given, x, whole=isinstance(tool, WithBackground) and isinstance(tool.background, Tensor))
    return given.reshape(1, *x.shape[1:]).expand_as(x)


def of_itself(kind: str, x: Tensor, seed: int = 0) -> Tensor | None:
    """(N,C,*S) -> the same shape: one of the KINDS that needs no more than the input; None for one that does."""
    axes = tuple(range(2, x.ndim))
    if kind == "zero":
        return torch.zeros_like(x)
    if kind == "mean":
        return x.mean(axes, keepdim=True).expand_as(x)
    if kind in ("dark", "bright"):
        return (x.amin if kind == "dark" else x.amax)(axes, keepdim=True).expand_as(x)
    if kind == "blur":
        return blurred(x, *BLUR)
    if kind == "noise":
        low, high = x.amin(axes, keepdim=True), x.amax(axes, keepdim=True)
        drawn = torch.rand(
            x.shape[1:], generator=torch.Generator(device="cpu").manual_seed(seed), dtype=torch.float32, device="cpu"
        )
        return low + (high - low) * drawn.to(x)
    return None


def _expect_fitting(given: Tensor, x: Tensor, *, whole: bool) -> None:
    """An InputError unless it is finite and as large as a sample of (N,C,*S); `whole`: one of a background's tensor."""
    expected = tuple(x.shape[1:])
    if tuple(given.shape) not in (expected, (1, *expected)):
        hint = f"pass a tensor {expected}, an image that the preprocessing brings to that size, or 'zero'"
        if whole:
            missing = given.ndim == len(expected) - 1
            hint = f"pass background[None]: one input is (1,{','.join(map(str, expected))})" if missing else hint
        raise InputError(f"the baseline is {tuple(given.shape)}; the input is {expected}: {hint}")
    _expect_finite(given)


def _expect_finite(given: Tensor) -> None:
    bad = int((~given.isfinite()).sum())
    if bad:
        raise InputError(
            f"the baseline has {plural(bad, 'NaN or infinite value')} of {given.numel()}: expected finite ones; "
            f"torch.nan_to_num(baseline) has none, or pass 'zero'"
        )


def _colour(name: str, x: Tensor, tool: Method) -> Tensor:
    if tool.preprocess is None or x.ndim != 4:
        raise InputError(
            f"baseline={name!r}: what {name} is to the model is known from its preprocessing only, and for pictures only; "
            f"pass preprocess=, or 'zero', 'dark', 'bright', or a tensor (C,H,W)"
        )
    pixels = np.full((*x.shape[2:], 3), {"black": 0, "white": 255}[name], dtype=np.uint8)
    colour: Tensor = tool.preprocess(pixels)[0].to(x).flatten(1).mean(1)
    return colour.view(1, -1, 1, 1).expand_as(x)


def _level(one: Any) -> str:
    real = isinstance(one, numbers.Real) and not isinstance(one, bool)
    return f"; of one level: torch.full((C,H,W), {float(one)})" if real else ""


def _may_be_a_path(word: str) -> bool:
    return "." in word or "/" in word


def _shown(background: object) -> str:
    return repr(background) if isinstance(background, str) else f"a tensor {tuple(getattr(background, 'shape', ()))}"
