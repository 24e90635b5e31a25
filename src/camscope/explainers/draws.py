"""Draws: random numbers that a setting fixes, and that nobody else's depend on."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from camscope.explainers.method import Method
from camscope.explainers.scope import expect_whole


@dataclass(kw_only=True, eq=False, repr=False)
class Seeded(Method):
    """A method that draws. `seed`: of all that is drawn, on the CPU: the same numbers on every device."""

    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        expect_whole(seed=self.seed)

    def drawing(self) -> torch.Generator:
        """Where its numbers come from, from the first on."""
        return torch.Generator(device="cpu").manual_seed(self.seed)


def seeds(count: int, generator: torch.Generator) -> list[int]:
    """So many, one for each turn: what a turn draws does not depend on which turns run with it."""
    drawn: list[int] = torch.randint(2**63 - 1, (count,), generator=generator, device="cpu").tolist()
    return drawn


def normal(seeds: Sequence[int], like: Tensor) -> Tensor:
    """(C,*S) -> (R,C,*S): standard normal numbers, each row from a seed of its own."""
    generator = torch.Generator(device="cpu")
    rows = [
        torch.randn(like.shape, generator=generator.manual_seed(one), dtype=torch.float32, device="cpu")
        for one in seeds
    ]
    return torch.stack(rows).to(like)
