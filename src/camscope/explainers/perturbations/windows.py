"""Windows that are filled one after the other, by passes that work out only what a window reaches, where that is exact."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from camscope.explainers.perturbations.base import Veiled
from camscope.hooks.patched import Patched, windows
from camscope.hooks.shadow import has_own

WORTHWHILE = 0.2  # of a pass's operations, and so many of them: what is spared must pay for cutting and pasting
LARGE = 10**7
ROUNDING = 64  # so many of a number's own: two ways to the same sums


class Operations(TorchDispatchMode):
    """Inside the `with`, counts what PyTorch's convolutions and matrix products take: two for a multiplication."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # which PyTorch has not typed
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: object, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        """What the operation returns."""
        result, cost = func(*args, **(kwargs or {})), flop_registry.get(func.overloadpacket)
        self.count += 0 if cost is None else cost(*args, **(kwargs or {}), out_val=result)
        return result


def scores_under(veiled: Veiled, corners: Tensor, size: Sequence[int]) -> tuple[Tensor, float]:
    """(W,axes) -> (F,W), float64: the score with each window filled, and the share of the operations that was spared.

    Passes are whole, unless the middle window's score is the same by one that works out only what the window reaches, and
    a good part of the pass is spared (on the CPU: elsewhere it was not measured).
    """
    middle = len(corners) // 2
    order = torch.tensor([middle, *range(middle), *range(middle + 1, len(corners))], device=corners.device)
    corners = corners[order]
    found = torch.empty(len(veiled.fills), len(corners), dtype=torch.float64, device=veiled.x.device)
    spared = 0.0

    def work(part: slice) -> None:
        nonlocal spared
        if part.start == 0:
            found[:, :1], spared = _first(veiled, corners[:1], size)
        rest = slice(max(part.start, 1), part.stop)
        if rest.start < rest.stop:
            found[:, rest] = (_patched if spared else _whole)(veiled, corners[rest], size)

    veiled.runs.in_turns(veiled.sample, len(corners), work)
    return found[:, order.argsort()], spared


def _first(veiled: Veiled, corners: Tensor, size: Sequence[int]) -> tuple[Tensor, float]:
    """(1,axes) -> (F,1): the score of a whole pass, and the share of its operations that need not be made."""
    with Operations() as operations:
        scores = _whole(veiled, corners, size)
    can = veiled.x.device.type == "cpu" and all(map(_is_plain, veiled.runs.score.model.modules()))
    if not can or operations.count < LARGE:
        return scores, 0.0
    spared = Counter[str]()
    try:
        found = _patched(veiled, corners, size, spared)
    except torch.OutOfMemoryError:
        raise
    except Exception:  # whatever the model raises of tensors that are none, its whole passes are right
        return scores, 0.0
    share = 2 * spared["multiplications"] / operations.count
    same = bool(((found - scores).abs() <= ROUNDING * veiled.precision * (1 + scores.abs())).all())
    return scores, share if same and share >= WORTHWHILE else 0.0


def _whole(veiled: Veiled, corners: Tensor, size: Sequence[int]) -> Tensor:
    """(R,axes) -> (F,R)"""
    hidden = torch.ones((), dtype=torch.bool, device=corners.device)
    for axis, length in enumerate(veiled.x.shape[1:]):
        place = torch.arange(length, device=corners.device) - corners[:, axis, None]
        shape = [len(corners), *(length if i == axis else 1 for i in range(len(size)))]
        hidden = hidden & ((place >= 0) & (place < size[axis])).view(shape)
    return veiled.scores(~hidden)


def _patched(veiled: Veiled, corners: Tensor, size: Sequence[int], spared: Counter[str] | None = None) -> Tensor:
    """(R,axes) -> (F,R): of passes that work out what the windows reach."""
    scores = []
    for fill in veiled.fills:
        versions = Patched(veiled.x[None], windows(fill, corners, size), corners, spared)
        scores.append(veiled.runs.scores(veiled.sample, versions))
    return torch.stack(scores).double()


def _is_plain(module: nn.Module) -> bool:
    """Whether nobody but PyTorch sees what a module is given."""
    heard = module._forward_hooks or module._forward_pre_hooks
    return not (heard or has_own(module) or isinstance(module, torch.jit.ScriptModule))
