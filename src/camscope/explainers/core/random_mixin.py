"""`RandomMixin`: methods with a seed, and random numbers that do not depend on the batch."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from camscope.explainers.core.base_method import BaseMethod
from camscope.explainers.core.setting_checks import check_integer

ADAM_EPSILON = 1e-20  # tiny, so that the scale of the score does not change the steps; gradients of 0 give no step


@dataclass(kw_only=True, eq=False, repr=False)
class RandomMixin(BaseMethod):
    """A method that uses random numbers.

    Args:
        seed: Seed of the random numbers. They are drawn on the CPU and do not depend on the device.

    """

    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer(seed=self.seed)

    def generator(self) -> torch.Generator:
        """Return a new random generator, seeded with the seed of the method."""
        return torch.Generator(device="cpu").manual_seed(self.seed)


def draw_seeds(count: int, generator: torch.Generator) -> list[int]:
    """Draw `count` seeds, one for each random sample. A sample then gets the same random numbers at any batch size."""
    seeds: list[int] = torch.randint(2**63 - 1, (count,), generator=generator, device="cpu").tolist()
    return seeds


def draw_normal(seeds: Sequence[int], template: Tensor) -> Tensor:
    """Draw standard normal numbers (R,C,*S) from R seeds. Each row uses one seed and has the shape of `template` (C,*S)."""
    generator = torch.Generator(device="cpu")
    rows = [
        torch.randn(template.shape, generator=generator.manual_seed(seed), dtype=torch.float32, device="cpu")
        for seed in seeds
    ]
    return torch.stack(rows).to(template)
