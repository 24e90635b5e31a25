"""Patched: versions of one input that differ from it in a window each; a model works out only what the windows reach."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from camscope.pytree import mapped

MOST = 0.7  # of a map's cells: where a patch is larger, the whole map costs no more
aten = torch.ops.aten
POINTWISE = {
    *(aten.relu, aten.relu_, aten.hardtanh, aten.hardtanh_, aten.leaky_relu, aten.leaky_relu_, aten.elu, aten.elu_),
    *(aten.gelu, aten.silu, aten.silu_, aten.mish, aten.mish_, aten.hardswish, aten.hardswish_, aten.hardsigmoid),
    *(aten.hardsigmoid_, aten.sigmoid, aten.sigmoid_, aten.tanh, aten.tanh_, aten.softplus, aten.clamp, aten.clamp_),
    *(aten.clamp_min, aten.clamp_min_, aten.neg, aten.abs, aten.clone, aten._to_copy),
}
ARITHMETIC = {aten.add, aten.add_, aten.sub, aten.sub_, aten.mul, aten.mul_, aten.div, aten.div_}
NORMS = {aten.native_batch_norm, aten.cudnn_batch_norm, aten._native_batch_norm_legit_no_training}
POOLS = {aten.max_pool2d_with_indices, aten.max_pool3d_with_indices, aten.avg_pool2d, aten.avg_pool3d}


@dataclass
class Account:
    """What passes of versions spared, and took: multiplications of convolutions, and bytes.

    `spared`: of the versions' rows; `clean`: made for the clean one; `widest`: bytes of a row, where it is largest. A pass
    that comes to whole tensors before `least` is spared ends with NotWorthwhileError.
    """

    spared: int = 0
    clean: int = 0
    widest: int = 1
    least: float = 0.0

    def note(self, values: Tensor) -> None:
        """Take in what an operation made of all rows."""
        self.widest = max(self.widest, values.nbytes // max(1, len(values)))


class NotWorthwhileError(Exception):
    """Whole tensors are needed before enough is spared."""


class Patched(Tensor):
    """R versions (R,C,*S) of one sample, for a model to be run on without gradients.

    They are `clean` (1,C,*S), but for `patch` (R,C,*s), whose first cell lies at `first` (R,axes). Convolutions, poolings,
    batch norms, sums, concatenations and activations hand on such versions: of each only what its patch reaches is worked
    out, to the bit what a whole pass does but for rounding. Any other operation is given the whole tensors.
    """

    clean: Tensor
    patch: Tensor
    first: Tensor
    account: Account

    @staticmethod
    def __new__(
        cls: type["Patched"], clean: Tensor, patch: Tensor, first: Tensor, account: Account | None = None
    ) -> "Patched":
        """A tensor with a shape and a type, and no numbers of its own."""
        made: Patched = Tensor._make_wrapper_subclass(
            cls, (len(patch), *clean.shape[1:]), dtype=clean.dtype, device=clean.device
        )
        made.clean, made.patch, made.first = clean, patch, first
        made.account = Account() if account is None else account
        made.account.note(patch)
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # PyTorch calls it so; its stub is of an instance
        cls, func: Any, types: object, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """By the rule for the operation, or of whole tensors."""
        kwargs, kind = kwargs or {}, func.overloadpacket
        found: Any = None
        if kind in (aten.detach, aten.alias):
            found = args[0]
        elif kind in POINTWISE | ARITHMETIC:
            found = _pointwise(func, args, kwargs)
        elif kind in NORMS:
            found = _normed(func, args, kwargs)
        elif kind is aten.cat:
            found = _joined(func, args[0], args[1] if len(args) > 1 else kwargs.get("dim", 0))
        elif kind is aten.convolution:
            found = _convolved(func, *args)
        elif kind in POOLS and not kwargs:
            found = _pooled(func, *args)
        return _wholly(func, args, kwargs) if found is None else found

    def whole(self) -> Tensor:
        """(R,C,*S), which is the patch from now on: what is done to it, or to a view of it, is done to these versions."""
        if self.patch.shape != self.shape:
            if self.account.spared < self.account.least:
                raise NotWorthwhileError
            start = torch.zeros_like(self.first)
            self.patch, self.first = self.cut(start, self.shape[2:]), start
            self.account.note(self.patch)
        return self.patch

    def cut(self, begin: Tensor, size: Sequence[int], beyond: float = 0.0) -> Tensor:
        """(R,axes) -> (R,C,*size): what lies from there on, `beyond` the borders one number."""
        found = windows(self.clean[0], begin, size, beyond)
        for row, corner, first, patch in zip(found, begin.tolist(), self.first.tolist(), self.patch, strict=True):
            there, taken = [slice(None)], [slice(None)]
            for place, own, length, extent in zip(corner, first, size, patch.shape[1:], strict=True):
                low = max(0, own - place)
                high = max(low, min(length, own + extent - place))
                there.append(slice(low, high))
                taken.append(slice(low + place - own, high + place - own))
            row[tuple(there)] = patch[tuple(taken)]
        return found

    def made(self, clean: Tensor, patch: Tensor, first: Tensor | None = None) -> "Patched":
        """Other versions, of the same window each."""
        return Patched(clean, patch, self.first if first is None else first, self.account)


def windows(values: Tensor, corners: Tensor, size: Sequence[int], beyond: float = 0.0) -> Tensor:
    """(C,*S), (R,axes) -> (R,C,*size): what lies from each corner on, `beyond` the borders one number."""
    places, pads, starts = corners.tolist(), list[int](), list[int]()
    for axis, length in enumerate(size):
        along = [place[axis] for place in places]
        pads = [max(0, -min(along)), max(0, max(along) + length - values.shape[1 + axis]), *pads]  # the last axis first
        starts.append(pads[0])
    wide, found = F.pad(values, pads, value=beyond), values.new_empty(len(places), len(values), *size)
    for row, place in zip(found, places, strict=True):
        firsts = map(int.__add__, place, starts)
        row.copy_(wide[(slice(None), *(slice(one, one + length) for one, length in zip(firsts, size, strict=True)))])
    return found


def whole(value: Tensor) -> Tensor:
    """A tensor with numbers of its own."""
    return value.whole() if isinstance(value, Patched) else value


def _wholly(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The operation on whole tensors; what it changes in place, and what it takes a view of, is the versions' own."""
    result = func(*mapped(tuple(args), whole), **mapped(dict(kwargs), whole))
    return args[0] if args and isinstance(args[0], Patched) and result is args[0].patch else result


def _pointwise(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Patched | None:
    """Of each cell by itself; of several versions on the smallest window that holds theirs."""
    versions = [one for one in args if isinstance(one, Patched)]
    if any(isinstance(one, Tensor) and not _of_channels(one, versions[0]) for one in args):
        return None
    if len(versions) > 1 and len({one.shape for one in versions}) > 1:
        return None
    patches, first = _together(versions)
    if _large(patches[0], versions[0]):
        return None
    cleans, each = iter([one.clean.clone() for one in versions]), iter([one.clone() for one in patches])
    clean = func(*(next(cleans) if isinstance(one, Patched) else one for one in args), **kwargs)
    patch = func(*(next(each) if isinstance(one, Patched) else one for one in args), **kwargs)
    if func._schema.is_mutable:
        versions[0].clean, versions[0].patch, versions[0].first = clean, patch, first
        return versions[0]
    return versions[0].made(clean, patch, first)


def _of_channels(value: Tensor, like: Patched) -> bool:
    """Whether a tensor is versions too, or has a number for each channel at most."""
    if isinstance(value, Patched) or value.numel() == 1:
        return True
    return value.ndim == like.ndim and value.shape[0] == 1 and set(value.shape[2:]) == {1}


def _together(versions: Sequence[Patched]) -> tuple[list[Tensor], Tensor]:
    """Their patches, all of the smallest window that holds each, and where it begins."""
    if len(versions) == 1:
        return [versions[0].patch], versions[0].first
    begin = torch.stack([one.first for one in versions]).amin(0)
    sizes = [torch.tensor(one.patch.shape[2:], device=begin.device) for one in versions]
    ends = torch.stack([one.first + size for one, size in zip(versions, sizes, strict=True)]).amax(0)
    size: list[int] = (ends - begin).amax(0).tolist()
    last = torch.tensor(versions[0].shape[2:], device=begin.device) - torch.tensor(size, device=begin.device)
    begin = torch.minimum(begin, last)
    return [one.cut(begin, size) for one in versions], begin


def _large(patch: Tensor, versions: Tensor) -> bool:
    return math.prod(patch.shape[2:]) > MOST * math.prod(versions.shape[2:])


def _normed(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...] | None:
    """A batch norm by what it has learnt; the rest of what it returns is empty."""
    x, trains = args[0], func.overloadpacket is not aten._native_batch_norm_legit_no_training and args[5]
    if not isinstance(x, Patched) or trains or kwargs:
        return None
    clean, *rest = func(x.clean, *args[1:])
    return x.made(clean, func(x.patch, *args[1:])[0]), *rest


def _joined(func: Any, parts: Sequence[Tensor], axis: int) -> Patched | None:
    """Versions one behind the other, along the channels."""
    versions = [one for one in parts if isinstance(one, Patched)]
    if axis != 1 or len(versions) < len(parts) or len({one.shape[2:] for one in versions}) > 1:
        return None
    patches, first = _together(versions)
    if _large(patches[0], versions[0]):
        return None
    return versions[0].made(func([one.clean for one in versions], 1), func(patches, 1), first)


def _convolved(
    func: Any,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Patched | None:
    if not isinstance(x, Patched) or transposed or isinstance(weight, Patched):
        return None

    def run(values: Tensor, padding: Sequence[int]) -> Tensor:
        found: Tensor = func(values, weight, bias, stride, padding, dilation, False, output_padding, groups)
        return found

    made = _windowed(run, x, weight.shape[2:], stride, padding, dilation)
    if made is not None:
        cells, reached = math.prod(made.shape[2:]), math.prod(made.patch.shape[2:])
        x.account.spared += len(made) * weight.numel() * (cells - reached)
        x.account.clean += weight.numel() * cells
    return made


def _pooled(
    func: Any,
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] | int = 0,
    *rest: Any,
) -> Any:
    """The largest or the mean of each window. Which cell was the largest is told to nobody."""
    axes = x.ndim - 2
    largest = func.overloadpacket in (aten.max_pool2d_with_indices, aten.max_pool3d_with_indices)
    dilation = _each(rest[0], axes) if largest and rest else [1] * axes
    rounded_up = bool(rest[1:] and rest[1]) if largest else bool(rest and rest[0])
    kernel, padding = _each(kernel, axes), _each(padding, axes)
    stride = _each(stride, axes) if stride else kernel
    counts_padding = largest or not any(padding) or len(rest) < 2 or rest[1]
    if not isinstance(x, Patched) or rounded_up or not counts_padding or (not largest and rest[2:] and rest[2]):
        return None

    def run(values: Tensor, padding: Sequence[int]) -> Tensor:
        found: Any = func(values, kernel, stride, padding, *rest)
        value: Tensor = found[0] if largest else found
        return value

    made = _windowed(run, x, kernel, stride, padding, dilation, beyond=-math.inf if largest else 0.0)
    if made is None or not largest:
        return made
    return made, torch.empty(made.shape, dtype=torch.long, device="meta")


def _each(given: Sequence[int] | int, axes: int) -> list[int]:
    several = [given] if isinstance(given, int) else list(given)
    return several * axes if len(several) == 1 else several


def _windowed(
    run: Callable[[Tensor, Sequence[int]], Tensor],
    x: Patched,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    beyond: float = 0.0,
) -> Patched | None:
    """`run` (values, padding) on the whole once, and on the part of each version that its patch can reach."""
    clean = run(x.clean, padding)
    axes = range(x.ndim - 2)
    reach = [dilation[i] * (kernel[i] - 1) for i in axes]
    size = [min(clean.shape[2 + i], (x.patch.shape[2 + i] + reach[i] - 1) // stride[i] + 1) for i in axes]
    if math.prod(size) > MOST * math.prod(clean.shape[2:]):
        return None
    steps, pads, wide = (torch.tensor(list(one), device=x.first.device) for one in (stride, padding, reach))
    last = torch.tensor([clean.shape[2 + i] - size[i] for i in axes], device=x.first.device)
    first = -torch.div(wide - x.first - pads, steps, rounding_mode="floor")  # the first that reaches it, rounded up
    first = torch.minimum(first.clamp(min=0), last)
    seen = [(size[i] - 1) * stride[i] + reach[i] + 1 for i in axes]
    return x.made(clean, run(x.cut(first * steps - pads, seen, beyond), [0] * len(seen)), first)
