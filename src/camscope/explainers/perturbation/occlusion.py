"""Occlusion of windows and of segments.

- Occlusion: what the score loses under a window that slides over the input.
- Windows that are filled one after the other, by passes that work out only what a window reaches, where that is
  exact.
- Segment ablation: what the score loses when one segment of the input is hidden.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook
from torch.utils._python_dispatch import TorchDispatchMode

from camscope.errors import InputError
from camscope.explainers.core.base import register
from camscope.explainers.core.batching import copies_within_memory, in_turns
from camscope.explainers.core.evaluation_context import expect_count, expect_positive
from camscope.explainers.core.segmentation import COMPACTNESS, Segments, expect_segments, labels_of
from camscope.explainers.perturbation.base import Found, PerturbationExplainer, Veiled, extents
from camscope.hooks.function_mode import has_own
from camscope.hooks.incremental_forward import Account, Patched, windows
from camscope.plurals import plural

SHARE = 7  # the usual window is so large a part of an axis: 32 of 224


@register
class Occlusion(PerturbationExplainer):
    """The mean, over the windows W that cover a pixel, of f(x) - f(x with W filled) (Zeiler & Fergus 2014, section 4.2).

    The authors show the probability that is left; this is the score that is lost, in which a linear net's map is its
    terms' sums over windows. `window`: pixels along each axis, or one number for all; None: a seventh of each. `stride`:
    between windows; None: half a window. All windows are whole: the last one along an axis ends where the axis does.
    What no window reaches, layer by layer, is worked out once where that is exact: see `windows.scores_under`.
    """

    name, paper = "occlusion", "arXiv:1311.2901"
    forwards: ClassVar[str] = "1 + windows"
    window: int | Sequence[int] | None = None
    stride: int | Sequence[int] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("window", "stride"):
            expect_counts(None, **{name: getattr(self, name)})

    def found(self, veiled: Veiled) -> Found:
        """(*S)"""
        covers = self.covers(veiled.x.shape[1:])
        size = [int(cover[0].sum()) for cover in covers]
        corners = torch.cartesian_prod(*(cover.int().argmax(1) for cover in covers)).view(-1, len(covers))
        scores, spared = scores_under(veiled, corners.to(veiled.x.device), size)
        lost = (veiled.value - scores.mean(0)).view([len(cover) for cover in covers])
        words = f"{plural(len(corners), 'window')} of {' x '.join(map(str, size))} pixels"
        more = (
            [f"{spared:.0%} of the multiplications are of what no window reaches, and were left out"] if spared else []
        )
        return Found(mean_over(lost, [cover.to(lost.device) for cover in covers]), notes=(words, *more))

    def covers(self, size: Sequence[int]) -> list[Tensor]:
        """Along each axis (windows, pixels), bool: which pixels each window covers."""
        try:
            windows = extents([-(-length // SHARE) for length in size] if self.window is None else self.window, size)
            strides = extents([-(-own // 2) for own in windows] if self.stride is None else self.stride, size)
        except ValueError as error:
            raise InputError(
                f"window={self.window!r}, stride={self.stride!r}: expected one number, or one for each of the input's "
                f"{plural(len(size), 'axis')}"
            ) from error
        return [_cover(*axis) for axis in zip(size, windows, strides, strict=True)]


def _cover(length: int, window: int, stride: int) -> Tensor:
    starts = [*range(0, length - window, stride), length - window]
    if any(later - earlier > window for earlier, later in pairwise(starts)):
        raise InputError(f"stride={stride}: a window of {window} leaves gaps; pass a stride of {window} at most")
    pixels, first = torch.arange(length, device="cpu"), torch.tensor(starts, device="cpu")[:, None]
    return (pixels >= first) & (pixels < first + window)


def mean_over(values: Tensor, covers: Sequence[Tensor]) -> Tensor:
    """(one a window along each axis) -> (*S): over the windows that cover a pixel, axis by axis."""
    for axis, cover in enumerate(covers):
        share = cover.to(values.dtype) / cover.sum(0)
        values = (values.movedim(axis, -1) @ share).movedim(-1, axis)
    return values


def expect_counts(*also: object, **settings: object) -> None:
    """An InputError unless each setting is a whole number, 1 or more, several of them, or one of `also`."""
    for name, value in settings.items():
        if isinstance(value, list | tuple) and value:
            for one in value:
                expect_count(**{name: one})
        else:
            expect_count(*also, **{name: value})


aten = torch.ops.aten
PRODUCTS = {aten.mm: 0, aten.addmm: 1, aten.bmm: 0, aten.baddbmm: 1}  # which argument has the rows
WORTHWHILE = 0.2  # of a pass's operations, and so many of them: what is spared must pay for cutting and pasting
LARGE = 10**7
ROUNDING, COARSE = 64, 4  # so many of a number's own, in half precision: two ways to the same sums
TRIED = 2  # windows, by both ways


class Operations(TorchDispatchMode):
    """Inside the `with`, counts the multiplications of convolutions, matrix products and attention."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # which PyTorch has not typed
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: object, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        """What the operation returns."""
        result, kind = func(*args, **(kwargs or {})), func.overloadpacket
        if kind is aten.convolution:
            self.count += result.numel() * args[1][0].numel()
        elif kind in PRODUCTS:
            self.count += result.numel() * args[PRODUCTS[kind]].shape[-1]
        elif kind is aten._scaled_dot_product_flash_attention_for_cpu:
            self.count += 2 * args[0].numel() * args[1].shape[-2]
        return result


def scores_under(veiled: Veiled, corners: Tensor, size: Sequence[int]) -> tuple[Tensor, float]:
    """(W,axes) -> (F,W), float64: the score with each window filled, and the share of the multiplications left out.

    Passes are whole, unless the scores of the middle window and of the first are the same by a pass that works out only
    what the windows reach, and a good part is spared (on the CPU: elsewhere it was not measured).
    """
    middle, count = len(corners) // 2, len(corners)
    order = torch.tensor([middle, *(n for n in range(count) if n != middle)], device=corners.device)
    places = corners[order]
    found = torch.empty(len(veiled.fills), count, dtype=torch.float64, device=veiled.x.device)
    with veiled.runs.counted(veiled.sample, count) as advance:

        def first(part: slice) -> None:
            found[:, part] = _whole(veiled, places[part], size)
            advance(part.stop - part.start)

        with Operations() as counted:
            in_turns(min(TRIED, count), veiled.runs.at_once(), first)
        plan = _tried(veiled, places[:TRIED], size, found[:, :TRIED], counted.count)

        def work(part: slice) -> None:
            own = slice(part.start + TRIED, part.stop + TRIED)
            # the last pass is a whole one: what a model keeps of it on itself is a plain tensor
            found[:, own] = plan.scores(veiled, places[own], size, last=own.stop == count)
            advance(part.stop - part.start)

        in_turns(max(0, count - TRIED), plan.at_once, work)
    return found[:, order.argsort()], plan.left_out


@dataclass
class Plan:
    """How passes are made: whole, or working out what windows reach, of which a first pass told what it spares.

    `operations`: multiplications of a row's whole pass. `spared`, `clean`: see `Account`, of one row.
    """

    at_once: int
    operations: float
    spared: float = 0.0
    clean: float = 0.0
    account: Account = field(default_factory=Account)
    rows: int = 0

    def scores(self, veiled: Veiled, corners: Tensor, size: Sequence[int], *, last: bool) -> Tensor:
        """(R,axes) -> (F,R)"""
        self.rows += len(corners) * len(veiled.fills)
        if last and self.spared and len(corners) > 1:
            before = self.scores(veiled, corners[:-1], size, last=False)
            self.rows -= (len(corners) - 1) * len(veiled.fills)
            return torch.cat([before, _whole(veiled, corners[-1:], size)], 1)
        if last or not self.pays(len(corners)):
            return _whole(veiled, corners, size)
        try:
            return _patched(veiled, corners, size, self.account)
        except torch.OutOfMemoryError:
            raise
        except Exception:  # the model's own error will come again of whole tensors
            self.spared = 0.0
            return _whole(veiled, corners, size)

    def pays(self, rows: int) -> bool:
        """Whether a pass of so many rows spares a good part of them, the clean one that goes with it counted."""
        return rows * self.spared - self.clean > WORTHWHILE * rows * self.operations

    @property
    def left_out(self) -> float:
        """The share of all multiplications that was not made."""
        return max(0, self.account.spared - self.account.clean) / max(1.0, self.rows * self.operations)


def _tried(veiled: Veiled, corners: Tensor, size: Sequence[int], scores: Tensor, operations: int) -> Plan:
    """How to go on behind windows (R,axes) whose scores (F,R) are those of whole passes of so many multiplications."""
    rows, tool = len(corners) * len(veiled.fills), veiled.runs.tool
    plan = Plan(veiled.runs.at_once(), operations / rows, rows=rows)
    plain = not _has_any_global_hook() and all(map(_is_plain, veiled.runs.score.model.modules()))
    alone = len(corners) < TRIED or (tool.batch_size or TRIED) < TRIED
    if veiled.x.device.type != "cpu" or not plain or alone or plan.operations < LARGE:
        return plan
    account = Account(least=WORTHWHILE * operations / len(veiled.fills))
    try:
        found = _patched(veiled, corners, size, account)
    except torch.OutOfMemoryError:
        raise
    except Exception:  # not worthwhile, or whatever the model raises of tensors that are none
        return plan
    precision = veiled.precision
    rounding = (ROUNDING if precision < 1e-5 else COARSE) * precision
    if bool(((found - scores).abs() <= rounding * (1 + scores.abs())).all()):
        plan.spared, plan.clean = account.spared / rows, account.clean / len(veiled.fills)
        if tool.batch_size is None:
            plan.at_once = max(plan.at_once, copies_within_memory(account.widest, veiled.x.device))
    return plan


def _whole(veiled: Veiled, corners: Tensor, size: Sequence[int]) -> Tensor:
    """(R,axes) -> (F,R)"""
    hidden = torch.ones((), dtype=torch.bool, device=corners.device)
    for axis, length in enumerate(veiled.x.shape[1:]):
        place = torch.arange(length, device=corners.device) - corners[:, axis, None]
        shape = [len(corners), *(length if i == axis else 1 for i in range(len(size)))]
        hidden = hidden & ((place >= 0) & (place < size[axis])).view(shape)
    return veiled.scores(~hidden)


def _patched(veiled: Veiled, corners: Tensor, size: Sequence[int], account: Account) -> Tensor:
    """(R,axes) -> (F,R): of passes that work out what the windows reach."""
    scores = []
    for fill in veiled.fills:
        versions = Patched(veiled.x[None], windows(fill, corners, size), corners, account)
        scores.append(veiled.runs.scores(veiled.sample, versions))
    return torch.stack(scores).double()


def _is_plain(module: nn.Module) -> bool:
    """Whether nobody but PyTorch sees what a module is given."""
    heard = module._forward_hooks or module._forward_pre_hooks
    return not (heard or has_own(module) or isinstance(module, torch.jit.ScriptModule))


@register
class SegmentAblation(PerturbationExplainer):
    """f(x) - f(x with segment s filled), in every pixel of s: ablation (Zeiler & Fergus 2014) of superpixels.

    `segments`: so many superpixels, a label map, or what makes one: see `segments.labels_of`. `compactness`: of SLIC, how
    much nearness counts beside colour.
    """

    name, paper = "segmentablation", "arXiv:1311.2901"
    forwards: ClassVar[str] = "1 + parts"
    segments: Segments = 50
    compactness: float = COMPACTNESS

    def __post_init__(self) -> None:
        super().__post_init__()
        expect_segments(segments=self.segments)
        expect_positive(compactness=self.compactness)

    def found(self, veiled: Veiled) -> Found:
        """(*S)"""
        numbers, labels = self.labels(veiled.x).unique(return_inverse=True)
        every = torch.arange(len(numbers), device=labels.device).view(-1, *[1] * labels.ndim)
        lost = veiled.value - veiled.all_scores(len(numbers), lambda part: labels != every[part]).mean(0)
        return Found(lost[labels], notes=(plural(len(numbers), "segment"),))

    def labels(self, x: Tensor) -> Tensor:
        """(C,*S) -> (*S): the number of each pixel's segment."""
        return labels_of(self.segments, x, self.compactness)
