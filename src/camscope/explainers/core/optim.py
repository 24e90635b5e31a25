"""Adam without its epsilon: steps whose length the unit of the score does not change (Kingma & Ba 2015, algorithm 1)."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

KEPT = 0.9, 0.999  # of the running means of the gradient and of its square, at each step


@dataclass
class Adam:
    """Moves against a gradient, a number for each; 0 where the gradient has always been."""

    learning_rate: float
    steps: int = 0
    mean: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float32, device="cpu"))
    square: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float32, device="cpu"))

    def move(self, gradient: Tensor) -> Tensor:
        """What to add, in the gradient's shape."""
        self.steps += 1
        self.mean = self.mean.to(gradient).lerp(gradient, 1 - KEPT[0])
        self.square = self.square.to(gradient).lerp(gradient.square(), 1 - KEPT[1])
        size = (self.square / (1 - KEPT[1] ** self.steps)).sqrt()
        return -self.learning_rate * torch.where(size > 0, self.mean / (1 - KEPT[0] ** self.steps) / size, 0)
