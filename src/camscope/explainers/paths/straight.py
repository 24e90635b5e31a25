"""The straight line from a baseline to the input, and the gradient's mean on it."""

import torch
from torch import Tensor

from camscope.explainers.paths.base import Along, between, difference
from camscope.explainers.runs import Runs
from camscope.wording import plural

MOST = 2**14  # steps


def straight(runs: Runs, sample: int, start: Tensor, change: Tensor, steps: int, tolerance: float | None) -> Along:
    """(C,*S): (x - x') times the gradient's mean over the middles of equal steps from x' to x; and how many steps.

    `tolerance`: see IntegratedGradients. Three times as many steps have the old ones' middles among theirs, which are not
    run again.
    """
    way = difference(start, runs.x[sample])
    total = gradients_at(runs, sample, start, middles(steps))

    def wanting() -> bool:
        gap = (way.double() * total).sum() / steps - change
        return tolerance is not None and not bool(gap.abs() <= tolerance * change.abs())

    while 3 * steps <= MOST and wanting():
        steps *= 3
        total += gradients_at(runs, sample, start, middles(steps, new=True))
    said = (
        (f"not within tolerance={tolerance:g} after {plural(steps, 'step')}, the most that are taken",)
        if wanting()
        else ()
    )
    return Along(way * (total / steps).to(way.dtype), steps, said)


def middles(steps: int, *, new: bool = False) -> Tensor:
    """(steps,) in 0..1: the middles of equal steps; `new`: without those of a third as many steps."""
    places = torch.arange(steps, dtype=torch.float64, device="cpu")
    return ((places[places % 3 != 1] if new else places) + 0.5) / steps


def gradients_at(runs: Runs, sample: int, start: Tensor, shares: Tensor) -> Tensor:
    """(R,) -> (C,*S), float64: the sum of the gradients so far on the way."""
    total = torch.zeros_like(start, dtype=torch.float64)

    def work(part: slice) -> None:
        versions = between(start, runs.x[sample], shares[part].to(start.device))
        total.add_(runs.gradients(sample, versions)[1].sum(0, dtype=torch.float64))

    runs.in_turns(sample, len(shares), work, gradients=True)
    return total
