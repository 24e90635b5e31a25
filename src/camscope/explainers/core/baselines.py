"""Baselines: uninformative inputs. Integration paths start from baselines, and baselines replace hidden parts of an image."""

import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from camscope.errors import InputError, Remedy
from camscope.explainers.core.base_method import BaseMethod
from camscope.explainers.core.random_mixin import RandomMixin
from camscope.explainers.core.resize_and_blur import blur_input
from camscope.plurals import plural
from camscope.unusual_tensors import describe_unusual_tensor

BaselineKind = Literal["zero", "black", "white", "dark", "bright", "mean", "blur", "noise"]
BASELINE_KINDS = get_args(BaselineKind)
BaselineLike = str | Any  # a kind, a number, a tensor, an image that `explain` takes, or a function of the input
DEFAULT_BACKGROUND: tuple[BaselineLike, ...] = ("zero", "mean", "blur", "noise")  # where no background is given
BLUR_SIGMA_AND_RADIUS = 0.1, 0.3  # standard deviation of the Gaussian and where it is cut off, as shares of each axis


@dataclass(kw_only=True, eq=False, repr=False)
class BaselineMixin(RandomMixin):
    """A method that replaces the input, or parts of it, by a baseline. The map is the mean over all baselines.

    Args:
        baseline: "zero" (of the model's input), "black", "white", "dark", "bright", "mean", "blur", "noise", a number,
            an image, a tensor (C,*S) or (N,C,*S), a function of the input, or a list of these.

    """

    baseline: BaselineLike | Sequence[BaselineLike] = "zero"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.list_baselines()

    def list_baselines(self) -> Sequence[BaselineLike]:
        """Return the baselines of the method. The final map is the mean of one map per baseline."""
        return parse_baselines(self.baseline)

    def build_baselines(self, x: Tensor) -> list[Tensor]:
        """Return one tensor (N,C,*S) for each baseline."""
        return build_baseline_tensors(self.list_baselines(), x, self)


@dataclass(kw_only=True, eq=False, repr=False)
class BackgroundMixin(RandomMixin):
    """A method that compares the input with each of a set of background inputs. The map is the mean over them.

    Args:
        background: Inputs as the model takes them (M,C,*S), or a list of images, tensors and names of baselines. None:
            "zero", "mean", "blur" and "noise", and a note in the result.

    Raises:
        InputError: The background is empty, or is not a set of inputs.

    """

    background: Tensor | Sequence[BaselineLike] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.background, Tensor):
            check_baseline_tensor_is_ordinary(self.background)
        if isinstance(self.background, str) or (isinstance(self.background, Tensor) and self.background.ndim < 3):
            background = self.background
            received = repr(background) if isinstance(background, str) else f"a tensor {tuple(background.shape)}"
            raise InputError(f"background={received}: expected inputs (M,C,H,W), or a list of images")
        if len(self.list_baselines()) == 0:
            raise InputError("background is empty: expected at least one input")

    def list_baselines(self) -> Sequence[BaselineLike]:
        """Return all images of the background, which is the reference data set of the method."""
        if self.background is None or isinstance(self.background, Tensor):
            return DEFAULT_BACKGROUND if self.background is None else [*self.background]
        return parse_baselines(list(self.background), "background") if len(self.background) else ()

    @property
    def default_background_notes(self) -> tuple[str, ...]:
        """A note that names the default background. The tuple is empty if the user passed a background."""
        note = f"no background was given: {', '.join(DEFAULT_BACKGROUND)} instead"
        return (note,) if self.background is None else ()


def build_baseline_tensors(
    baselines: Sequence[BaselineLike], x: Tensor, explainer: RandomMixin, indices: Sequence[int] | None = None
) -> list[Tensor]:
    """Build one tensor (N,C,*S) per baseline. `indices` selects baselines by position."""
    return [
        build_baseline_tensor(baselines[i], x, explainer, explainer.seed ^ i)
        for i in (range(len(baselines)) if indices is None else indices)
    ]


def parse_baselines(
    baseline: BaselineLike | Sequence[BaselineLike], setting_name: str = "baseline"
) -> list[BaselineLike]:
    """Convert the setting of the user to a list of baselines. Raise InputError if a baseline is invalid."""
    baselines = list(baseline) if isinstance(baseline, list | tuple) else [baseline]
    if not baselines:
        raise InputError(f"{setting_name}=[]: expected at least one baseline, such as 'zero'")
    for entry in baselines:
        is_unknown_kind = isinstance(entry, str) and entry not in BASELINE_KINDS and not set("./") & set(entry)
        is_other_number = isinstance(entry, numbers.Number) and not _is_real_number(entry)
        if is_unknown_kind or is_other_number or entry is None or isinstance(entry, Mapping | list | tuple | set):
            raise InputError(
                f"{setting_name}={entry!r}: expected {', '.join(map(repr, BASELINE_KINDS))}, a number, an image, "
                f"a tensor (C,H,W) or (N,C,H,W), or a function of the input"
            )
        if isinstance(entry, Tensor):
            check_baseline_tensor_is_ordinary(entry)
    return baselines


def build_baseline_tensor(baseline: BaselineLike, x: Tensor, explainer: BaseMethod, seed: int = 0) -> Tensor:
    """Build the baseline of each sample of x (N,C,*S), as a tensor of the same shape.

    A baseline does not depend on other samples of the batch. It is one of:

    - "zero": 0 of the model's input, the mean color if inputs are normalized
    - "black", "white": the preprocessed value of such pixels
    - "dark", "bright", "mean": minimum, maximum and mean of each channel of the sample
    - "blur": a Gaussian blur with a standard deviation of a tenth of each side
    - "noise": uniform noise in the range of each channel
    - a number, or a tensor () , (C,*S) or (N,C,*S)
    - a function that is called with x and returns a number or a tensor
    - an image of any kind that `explain` takes
    """
    if isinstance(baseline, str) and baseline in BASELINE_KINDS:
        computed = compute_baseline_from_input(baseline, x, seed)
        return _build_color_baseline(baseline, x, explainer) if computed is None else computed
    if callable(baseline):
        baseline = baseline(x.transpose(1, 2) if explainer.frames_first else x)
    if _is_real_number(baseline):
        baseline = torch.tensor(baseline, dtype=x.dtype, device=x.device)
    if isinstance(baseline, Tensor):
        check_baseline_tensor_is_ordinary(baseline)
    tensor = baseline.to(x) if isinstance(baseline, Tensor) and baseline.is_floating_point() else None
    if tensor is not None and explainer.frames_first and tensor.ndim >= 4:
        tensor = tensor.transpose(-4, -3)  # like the model's input (T,C,H,W), of which x is the transpose
    if tensor is not None and (tensor.ndim == 0 or tensor.shape == x.shape):
        _check_finite_baseline(tensor)
        return tensor.expand_as(x)
    if tensor is None:
        tensor = explainer.prepare_input(baseline).x.to(x)
    in_background = isinstance(explainer, BackgroundMixin) and isinstance(explainer.background, Tensor)
    _check_baseline_shape_and_values(tensor, x, in_background=in_background)
    return tensor.reshape(1, *x.shape[1:]).expand_as(x)


def check_baseline_tensor_is_ordinary(baseline: Tensor) -> None:
    """Raise InputError if a baseline is a sparse, nested or otherwise unusual tensor. A float8 tensor is accepted."""
    kind = describe_unusual_tensor(baseline, "baseline")
    if kind is not None and not (kind.is_castable and baseline.is_floating_point()):
        raise InputError(f"the baseline is {kind.description}; expected an ordinary tensor: pass {kind.replacement}")


def compute_baseline_from_input(kind: str, x: Tensor, seed: int = 0) -> Tensor | None:
    """Compute the baseline "blur" or another `kind` from the input x (N,C,*S). Return None if preprocessing is needed."""
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
        noise = torch.rand(
            x.shape[1:], generator=torch.Generator(device="cpu").manual_seed(seed), dtype=torch.float32, device="cpu"
        )
        return low + (high - low) * noise.to(x)
    return None


def _check_baseline_shape_and_values(baseline: Tensor, x: Tensor, *, in_background: bool) -> None:
    """Raise InputError if a baseline differs in shape from one sample of x (N,C,*S), or has NaN or infinite values."""
    expected = tuple(x.shape[1:])
    if tuple(baseline.shape) not in (expected, (1, *expected)):
        hint = f"pass a tensor {expected}, an image that the preprocessing brings to that size, or 'zero'"
        if in_background:
            missing = baseline.ndim == len(expected) - 1
            hint = f"pass background[None]: one input is (1,{','.join(map(str, expected))})" if missing else hint
        raise InputError(
            f"the baseline has shape {tuple(baseline.shape)}; expected {expected}, the shape of the input: {hint}"
        )
    _check_finite_baseline(baseline)


def _check_finite_baseline(baseline: Tensor) -> None:
    """Raise an InputError if the baseline has NaN or infinite values."""
    bad = int((~baseline.isfinite()).sum())
    if bad:
        raise InputError(
            f"the baseline has {plural(bad, 'NaN or infinite value')} of {baseline.numel()}: expected finite values; "
            f"pass torch.nan_to_num(baseline), or 'zero'"
        )


def _build_color_baseline(color_name: str, x: Tensor, explainer: BaseMethod) -> Tensor:
    """Return a black or white image as the model's input, by its preprocessing."""
    if explainer.preprocess is None or x.ndim != 4:
        raise InputError(
            f"baseline={color_name!r} requires the preprocessing of the model, and none is known",
            fix="pass preprocess=, or 'zero', 'dark', 'bright', or a tensor (C,H,W)",
            remedy=Remedy.SET_PREPROCESS,
        )
    pixels = np.full((*x.shape[2:], 3), {"black": 0, "white": 255}[color_name], dtype=np.uint8)
    color: Tensor = explainer.preprocess(pixels)[0].to(x).flatten(1).mean(1)
    return color.view(1, -1, 1, 1).expand_as(x)


def _is_real_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)
