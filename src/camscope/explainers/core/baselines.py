"""Baselines: inputs that show nothing, which paths start from and which hidden places are filled with."""

import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from camscope.errors import InputError, Remedy
from camscope.explainers.core.batching import RandomMixin
from camscope.explainers.core.method import BaseMethod
from camscope.explainers.core.resampling import blur_input
from camscope.plurals import plural

BaselineKind = Literal["zero", "black", "white", "dark", "bright", "mean", "blur", "noise"]
BASELINE_KINDS = get_args(BaselineKind)
BaselineLike = str | Any  # a Kind, or an image of any kind that `explain` takes, or a tensor (C,*S)
DEFAULT_BACKGROUND: tuple[BaselineLike, ...] = ("zero", "mean", "blur", "noise")  # where no background is given
BLUR_SIGMA_AND_RADIUS = 0.1, 0.3  # standard deviation of the Gaussian and where it is cut off, as shares of each axis


@dataclass(kw_only=True, eq=False, repr=False)
class BaselineMixin(RandomMixin):
    """A method that shows the model something else in the input's place.

    `baseline`: see `build_baseline_tensor`; of several the map is the mean. `seed`: of what is drawn.
    """

    baseline: BaselineLike | Sequence[BaselineLike] = "zero"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.list_baselines()

    def list_baselines(self) -> Sequence[BaselineLike]:
        """Those that the map is the mean over."""
        return parse_baselines(self.baseline)

    def build_baselines(self, x: Tensor) -> list[Tensor]:
        """(N,C,*S) -> one such tensor for each baseline."""
        return build_baseline_tensors(self.list_baselines(), x, self)


@dataclass(kw_only=True, eq=False, repr=False)
class BackgroundMixin(RandomMixin):
    """A method whose map is a mean over a background of inputs that the input is set against.

    `background`: inputs as the model takes them (M,C,*S), or a list of images, tensors and names of baselines (see
    `build_baseline_tensor`); without one "zero", "mean", "blur" and "noise", which the result notes. `seed`: of what is drawn.
    """

    background: Tensor | Sequence[BaselineLike] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.background, str) or (isinstance(self.background, Tensor) and self.background.ndim < 3):
            raise InputError(
                f"background={_describe_background(self.background)}: expected inputs (M,C,H,W), or a list of images"
            )
        if len(self.list_baselines()) == 0:
            raise InputError("background holds nothing: expected one input at least")

    def list_baselines(self) -> Sequence[BaselineLike]:
        """All of the background."""
        if self.background is None or isinstance(self.background, Tensor):
            return DEFAULT_BACKGROUND if self.background is None else [*self.background]
        return parse_baselines(list(self.background), "background") if len(self.background) else ()

    @property
    def baseline_notes(self) -> tuple[str, ...]:
        """What a result says where no background was given."""
        return (
            ()
            if self.background is not None
            else (f"no background was given: {', '.join(DEFAULT_BACKGROUND)} instead",)
        )


def build_baseline_tensors(
    baselines: Sequence[BaselineLike], x: Tensor, explainer: RandomMixin, indices: Sequence[int] | None = None
) -> list[Tensor]:
    """(N,C,*S) -> one such tensor for each baseline, or for those of the `indices` places; see `build_baseline_tensor`."""
    places = range(len(baselines)) if indices is None else indices
    return [build_baseline_tensor(baselines[which], x, explainer, explainer.seed ^ which) for which in places]


def parse_baselines(
    baseline: BaselineLike | Sequence[BaselineLike], setting_name: str = "baseline"
) -> list[BaselineLike]:
    """The baselines that a setting names: one, or a list of them."""
    found = list(baseline) if isinstance(baseline, list | tuple) else [baseline]
    if not found:
        raise InputError(f"{setting_name}=[]: name one at least, such as 'zero'")
    for one in found:
        words = isinstance(one, str) and one not in BASELINE_KINDS and not _looks_like_path(one)
        if words or one is None or isinstance(one, numbers.Number | Mapping | list | tuple | set):
            raise InputError(
                f"{setting_name}={one!r}: expected {', '.join(map(repr, BASELINE_KINDS))}, an image, or a tensor (C,H,W){_suggest_constant_baseline(one)}"
            )
    return found


def build_baseline_tensor(baseline: BaselineLike, x: Tensor, explainer: BaseMethod, seed: int = 0) -> Tensor:
    """(N,C,*S) -> the same shape: each sample's own baseline, the same whatever batch it came in.

    "zero": 0 of the model's input, the mean colour where inputs are normalised; "black", "white": what the preprocessing
    makes of such pixels; "dark", "bright", "mean": each channel's least and largest value and mean over the sample; "blur":
    a Gaussian of a tenth of each side; "noise": drawn evenly from each channel's range; else an image, or a tensor
    (C,*S), (N,C,*S) or (), which is one number for all.
    """
    if isinstance(baseline, str) and baseline in BASELINE_KINDS:
        made = compute_baseline_from_input(baseline, x, seed)
        return _build_color_baseline(baseline, x, explainer) if made is None else made
    given = baseline.to(x) if isinstance(baseline, Tensor) and baseline.is_floating_point() else None
    if (
        given is not None and explainer.frames_first and given.ndim >= 4
    ):  # as the model's input (T,C,H,W), of which x is the transpose
        given = given.transpose(-4, -3)
    if given is not None and (given.ndim == 0 or given.shape == x.shape):
        _check_finite_baseline(given)
        return given.expand_as(x)
    if given is None:
        given = explainer.prepare_input(baseline).x.to(x)
    _check_baseline_shape(
        given, x, in_background=isinstance(explainer, BackgroundMixin) and isinstance(explainer.background, Tensor)
    )
    return given.reshape(1, *x.shape[1:]).expand_as(x)


def compute_baseline_from_input(kind: str, x: Tensor, seed: int = 0) -> Tensor | None:
    """(N,C,*S) -> the same shape: one of the KINDS that needs no more than the input; None for one that does."""
    axes = tuple(range(2, x.ndim))
    if kind == "zero":
        return torch.zeros_like(x)
    if kind == "mean":
        return x.mean(axes, keepdim=True).expand_as(x)
    if kind in ("dark", "bright"):
        return (x.amin if kind == "dark" else x.amax)(axes, keepdim=True).expand_as(x)
    if kind == "blur":
        return blur_input(x, *BLUR_SIGMA_AND_RADIUS)
    if kind == "noise":
        low, high = x.amin(axes, keepdim=True), x.amax(axes, keepdim=True)
        drawn = torch.rand(
            x.shape[1:], generator=torch.Generator(device="cpu").manual_seed(seed), dtype=torch.float32, device="cpu"
        )
        return low + (high - low) * drawn.to(x)
    return None


def _check_baseline_shape(baseline: Tensor, x: Tensor, *, in_background: bool) -> None:
    """An InputError unless it is finite and as large as a sample of (N,C,*S); `in_background`: one of a background's tensor."""
    expected = tuple(x.shape[1:])
    if tuple(baseline.shape) not in (expected, (1, *expected)):
        hint = f"pass a tensor {expected}, an image that the preprocessing brings to that size, or 'zero'"
        if in_background:
            missing = baseline.ndim == len(expected) - 1
            hint = f"pass background[None]: one input is (1,{','.join(map(str, expected))})" if missing else hint
        raise InputError(f"the baseline is {tuple(baseline.shape)}; the input is {expected}: {hint}")
    _check_finite_baseline(baseline)


def _check_finite_baseline(baseline: Tensor) -> None:
    bad = int((~baseline.isfinite()).sum())
    if bad:
        raise InputError(
            f"the baseline has {plural(bad, 'NaN or infinite value')} of {baseline.numel()}: expected finite ones; "
            f"torch.nan_to_num(baseline) has none, or pass 'zero'"
        )


def _build_color_baseline(color_name: str, x: Tensor, explainer: BaseMethod) -> Tensor:
    if explainer.preprocess is None or x.ndim != 4:
        raise InputError(
            f"baseline={color_name!r}: what {color_name} is to the model is known from its preprocessing only, and for images only",
            fix="pass preprocess=, or 'zero', 'dark', 'bright', or a tensor (C,H,W)",
            remedy=Remedy.SET_PREPROCESS,
        )
    pixels = np.full((*x.shape[2:], 3), {"black": 0, "white": 255}[color_name], dtype=np.uint8)
    colour: Tensor = explainer.preprocess(pixels)[0].to(x).flatten(1).mean(1)
    return colour.view(1, -1, 1, 1).expand_as(x)


def _suggest_constant_baseline(baseline: Any) -> str:
    real = isinstance(baseline, numbers.Real) and not isinstance(baseline, bool)
    return f"; of one level: torch.full((C,H,W), {float(baseline)})" if real else ""


def _looks_like_path(text: str) -> bool:
    return "." in text or "/" in text


def _describe_background(background: object) -> str:
    return repr(background) if isinstance(background, str) else f"a tensor {tuple(getattr(background, 'shape', ()))}"
