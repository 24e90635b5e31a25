"""DeepLIFT and DeepLIFT-SHAP, by captum: a gradient in which non-linear modules pass on Δout/Δin from a baseline.

ReLU6 and hardtanh under captum's rule for ReLUs: it goes by a module's type, and the rule by what comes out.
What is not linear in a model and has no rule of captum's: it keeps its gradient, and is counted.
Max pooling whose windows overlap, as one whose windows do not: captum's rule for it keeps one window a pixel only.
"""

import copy
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from camscope.errors import InputError, ModelError
from camscope.explainers.adapters.base import (
    AdapterExplainer,
    Seen,
    expect_the_same_score,
    kept_on,
    observed,
    rewind,
    twin_of,
)
from camscope.explainers.core.base import register_with
from camscope.explainers.core.baselines import WithBackground, WithBaseline, starts
from camscope.explainers.core.evaluation_context import checked_finite
from camscope.explainers.core.maps import Maps
from camscope.explainers.core.pixel_base import PixelExplainer, Runs, gap_in_words
from camscope.hooks.function_mode import MAXIMA, Calls, name_of
from camscope.hooks.gradients import ELEMENTWISE
from camscope.images.files.redaction import ignoring
from camscope.plurals import plural
from camscope.pytree import leaves
from camscope.targets import Score, full_precision

CLIPPED = (nn.ReLU6, nn.Hardtanh)


def ruled(model: nn.Module) -> None:
    """In a copy of a model, make every module that clips a ReLU by name, which does what it did."""
    modules: Iterator[Any] = model.modules()  # whose types change
    for part in modules:
        if type(part) in CLIPPED:
            clip = partial(F.hardtanh, min_val=part.min_val, max_val=part.max_val, inplace=part.inplace)
            part.__class__ = nn.ReLU  # it stays what hooks and other modules know
            vars(part)["forward"] = clip


_OTHERS = (
    "maximum min amin minimum softmax softmin log_softmax layer_norm group_norm instance_norm rms_norm local_response_norm "
    "normalize glu lp_pool1d lp_pool2d lp_pool3d multi_head_attention_forward scaled_dot_product_attention"
)
BENT = ELEMENTWISE | MAXIMA | set(_OTHERS.split())


class Unruled(Calls):
    """Counts, inside the `with`, what is not linear and has no rule, since captum reaches modules of certain types only."""

    def __init__(self) -> None:
        super().__init__()
        self.begin()

    def begin(self) -> None:
        """Before a pass."""
        self._ruled, self.counts = 0, Counter[str]()

    def watch(self, model: nn.Module) -> None:
        """Where captum has a rule nothing is counted; what such a module is given is a tensor of its own.

        captum replaces the gradient of that tensor: of one that goes elsewhere too, it would lose the other way.
        """
        from captum.attr._core.deep_lift import SUPPORTED_NON_LINEAR

        def enter(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            self._ruled += 1
            return tuple(one.clone() if isinstance(one, Tensor) else one for one in args)

        def leave(module: nn.Module, args: object, output: object) -> None:
            self._ruled -= 1

        for module in model.modules():
            if type(module) in SUPPORTED_NON_LINEAR and not module._backward_hooks:
                module.register_forward_pre_hook(enter)
                module.register_forward_hook(leave)

    def called(self, func: Callable[..., Any], args: Sequence[Any], named: dict[str, Any]) -> Any:
        """What the function returns."""
        name = name_of(func)
        if func is Tensor.register_hook and not args[0].requires_grad:
            return None  # captum sets its hooks also where gradients are off: there a value is a constant
        result = func(*args, **named)
        if name in BENT and not self._ruled and any(one.requires_grad for _, one in leaves(result)):
            self.counts[name] += 1
        return result

    def in_words(self) -> str:
        """What keeps its gradient."""
        said = ", ".join(f"{name} ({count} x)" for name, count in sorted(self.counts.items()))
        return f"; captum has no rule for {said} here, which keep their gradient" if said else ""


POOLS: dict[type[nn.Module], int] = {nn.MaxPool1d: 1, nn.MaxPool2d: 2, nn.MaxPool3d: 3}


class Windows(nn.Module):
    """The same maximum: every window is laid out by itself, and a pooling without overlap takes the largest of each."""

    def __init__(self, pool: Any, rank: int) -> None:
        super().__init__()
        self.size, self.stride, self.padding = (
            _each(one, rank) for one in (pool.kernel_size, pool.stride, pool.padding)
        )
        self.pool = nn.MaxPool1d(prod(self.size))

    def forward(self, x: Tensor) -> Tensor:
        """(N,K,*s) -> (N,K,*t)"""
        rank = len(self.size)
        sides = [side for pad in reversed(self.padding) for side in (pad, pad)]
        # beyond the border lies what is less than all: the same in every row, so that it changes nothing
        laid = F.pad(x, sides, value=float(x.detach().amin()) - 1)
        for axis, (size, step) in enumerate(zip(self.size, self.stride, strict=True), start=x.ndim - rank):
            laid = laid.unfold(axis, size, step)
        grid = laid.shape[: x.ndim]
        largest: Tensor = self.pool(laid.reshape(len(x), -1, prod(self.size)))
        return largest.view(grid)


def laid_out(model: nn.Module) -> None:
    """Replace, in a copy of a model, every max pooling whose windows overlap."""
    for parent in list(model.modules()):
        for key, child in parent._modules.items():
            rank = POOLS.get(type(child), 0) if child is not None else 0
            if rank and _overlaps(child, rank):
                parent._modules[key] = Windows(child, rank)


def _overlaps(pool: Any, rank: int) -> bool:
    overlap = any(
        step < size for size, step in zip(_each(pool.kernel_size, rank), _each(pool.stride, rank), strict=True)
    )
    plain = not (pool.ceil_mode or pool.return_indices or pool._forward_hooks or pool._forward_pre_hooks)
    return overlap and plain and set(_each(pool.dilation, rank)) == {1}


def _each(value: int | tuple[int, ...], rank: int) -> tuple[int, ...]:
    return value if isinstance(value, tuple) else (value,) * rank


class Against(NamedTuple):
    """What each pixel and channel (C,*S) adds to the score against a baseline, and the score's change ().

    `flat`: whether all multipliers are 0. `unruled`: what kept its gradient, in words.
    """

    values: Tensor
    change: Tensor
    flat: bool
    unruled: str

    @property
    def total(self) -> float:
        """What the values add up to."""
        return float(self.values.double().sum())


@dataclass(kw_only=True, eq=False, repr=False)
class Lifted(AdapterExplainer, PixelExplainer):
    """The mean, over inputs x' that stand for nothing, of Σ_c m_c (x_c - x'_c). A method says which by `starts`.

    m: the gradient in which ReLU, ReLU6, Hardtanh, ELU, LeakyReLU, Sigmoid, Tanh, Softplus, Softmax and max pooling pass
    on Δout/Δin, by captum, as modules. What has no rule there (functions, GELU, norms, attention) keeps its gradient: a
    note names it, and how far the map is from adding up to f(x) - f(x'); so do `measures`, `completeness_gap` and
    `score_change`. captum works on a copy of the modules, one image and one x' at a time; there a module that runs several
    times is several, what a rule is for is a tensor of its own, what clips is a ReLU by name, and windows of a pooling do
    not overlap, all of which captum needs.
    """

    package: ClassVar[str] = "captum"
    extra: ClassVar[str] = "captum"

    @abstractmethod
    def starts(self, x: Tensor) -> list[Tensor]:
        """(N,C,*S) -> one such tensor for each x'."""

    @property
    def said(self) -> tuple[str, ...]:
        """What a result says of them."""
        return ()

    def attributed(self, x: Tensor, score: Score) -> Maps:
        """The mean over the baselines, and how far it is from being complete."""
        with observed(score.model) as seen:
            runs = Runs(self, x, score)
        if score.one_by_one:
            raise ModelError(
                f"{self.title} runs the input and its baseline in one batch, and in this model the "
                "samples of a batch see one "
                f"another, as in a batch norm without running statistics; pass integratedgradients"
            )
        starts = self.starts(x)
        each = [self._each(runs, seen, sample, [start[sample] for start in starts]) for sample in range(len(x))]
        every = [_mean(one) for one in each]
        values, changes = torch.stack([one.values for one in every]), torch.stack([one.change for one in every])
        return Maps(
            self.over_channels(values),
            zero_gradient=torch.tensor([one.flat for one in every], device=x.device),
            own=tuple((*self.said, self._completeness(mean, parts)) for mean, parts in zip(every, each, strict=True)),
            measures={"completeness_gap": values.double().flatten(1).sum(1) - changes, "score_change": changes},
        )

    def _each(self, runs: Runs, seen: Seen, sample: int, starts: Sequence[Tensor]) -> list[Against]:
        """One sample against each of the baselines (C,*S)."""
        each = list[Against]()
        with runs.counted(sample, len(starts)) as advance:
            for start in starts:
                each.append(self._against(runs, seen, sample, start))
                advance(1)
        return each

    def _completeness(self, mean: Against, each: Sequence[Against]) -> str:
        """How far the mean is from adding up, and of several the one that is farthest."""
        change = float(mean.change)
        if len(each) == 1:
            words = gap_in_words(self.parts(), mean.total, "the score less the baseline's is", change)
        else:
            words = gap_in_words(self.parts(), mean.total, "the score less the baselines' mean is", change)
            gaps = [one.total - float(one.change) for one in each]
            worst = max(range(len(each)), key=lambda which: abs(gaps[which]))
            words += f"; the worst of {plural(len(each), 'baseline')} has {gaps[worst]:+.2g} of {float(each[worst].change):.4g}"
        return f"completeness: {words}{mean.unruled}"

    def _against(self, runs: Runs, seen: Seen, sample: int, start: Tensor) -> Against:
        """One sample against one baseline (C,*S)."""
        asked, rest = _Asked(runs.score, seen, sample), Unruled()
        rest.watch(asked)
        multipliers = full_precision(kept_on(lambda: _multipliers(asked, runs.x[sample], start, rest)))
        checked_finite("the multipliers at the input", multipliers, self.on_nonfinite)
        value, reference = asked.values
        if self.mode == "eval":
            expect_the_same_score(runs.score, sample, value, runs.values[sample])
        found = multipliers * (full_precision(runs.x[sample]) - full_precision(start))
        change = value.double() - reference.double()
        return Against(found, change, not bool(multipliers.any()), rest.in_words())


def _mean(each: Sequence[Against]) -> Against:
    """Over the baselines."""
    return Against(
        torch.stack([one.values for one in each]).mean(0),
        torch.stack([one.change for one in each]).mean(),
        all(one.flat for one in each),
        "".join(dict.fromkeys(one.unruled for one in each)),
    )


@register_with("captum", "captum")
class DeepLIFT(WithBaseline, Lifted):
    """Σ_c m_c (x_c - x'_c): what each pixel adds to the score against a baseline x' (Shrikumar et al. 2017, Rescale rule).

    See `Lifted`.
    """

    name, paper = "deeplift", "arXiv:1704.02685"
    forwards: ClassVar[str] = "3"
    backwards: ClassVar[str] = "2"


@register_with("captum", "captum")
class DeepLIFTSHAP(WithBackground, Lifted):
    """The mean of DeepLIFT over a background of baselines: an estimate of Shapley values (Lundberg & Lee 2017, section 4.2).

    The background holds two at least; see `Lifted`.
    """

    name, paper = "deepliftshap", "arXiv:1705.07874"
    forwards: ClassVar[str] = "1 + 2 x len(background)"
    backwards: ClassVar[str] = "2 x len(background)"

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.baselines()) < 2:
            raise InputError("background holds one input: deepliftshap is a mean over several; pass one to deeplift")

    def starts(self, x: Tensor) -> list[Tensor]:
        """(N,C,*S) for each of the background."""
        return starts(self.baselines(), x, self)


class _CutError(Exception):
    """The pass left no way for a gradient to the input."""


class _Asked(nn.Module):
    """The score of rows that are versions of one sample, by a twin of its model."""

    def __init__(self, score: Score, seen: Seen, sample: int) -> None:
        super().__init__()
        self.twin = twin_of(score.model, seen)
        laid_out(self.twin)
        ruled(self.twin)
        self._score = copy.copy(score)
        self._score.model = self.twin
        self._sample = sample
        self.values = torch.zeros(2, dtype=torch.float32, device="cpu")

    def forward(self, rows: Tensor) -> Tensor:
        """(R,C,*S) -> (R,)"""
        rewind(self.twin)
        owners = torch.full((len(rows),), self._sample, dtype=torch.long, device=rows.device)
        values = self._score(rows, owners)
        self.values = values.detach()
        if not values.requires_grad:
            raise _CutError
        return values


def least(x: Tensor, score: Score) -> float:
    """Beyond which two outputs of a layer differ: the least number of the input's type, or of what autocast casts to."""
    with score.around():
        kind = x.device.type
        cast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    half = (
        torch.finfo(torch.float16).tiny * torch.finfo(torch.float16).eps
    )  # its activations are often below its `tiny`
    return max(half if dtype == torch.float16 else torch.finfo(dtype).tiny for dtype in (x.dtype, cast))


def _multipliers(asked: _Asked, x: Tensor, start: Tensor, rest: Unruled) -> Tensor | None:
    """(C,*S): captum's, of one input against one baseline; None where gradients are off on the way."""
    from captum.attr import DeepLift

    rest.begin()
    # captum takes two inputs for the same that are closer than `eps`; the map of a faint input is that of a bright one
    tool = DeepLift(asked, eps=least(x, asked._score))
    try:
        with ignoring(message="Setting forward, backward hooks"), rest:
            found: Tensor = tool.attribute(
                x.detach().clone()[None].requires_grad_(), start[None], custom_attribution_func=lambda one: one
            )
    except _CutError:
        return None
    return found.detach()[0]
