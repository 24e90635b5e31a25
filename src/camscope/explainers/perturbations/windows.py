"""Windows that are filled one after the other, by passes that work out only what a window reaches, where that is exact."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook
from torch.utils._python_dispatch import TorchDispatchMode

from camscope.explainers.chunks import copies_within_memory, in_turns
from camscope.explainers.perturbations.base import Veiled
from camscope.hooks.patched import Account, Patched, windows
from camscope.hooks.shadow import has_own

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
