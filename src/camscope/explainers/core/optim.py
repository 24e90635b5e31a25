"""Adam without epsilon, so that the scale of the score does not change the steps (Kingma & Ba 2015, algorithm 1)."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

MOMENT_DECAY_RATES = 0.9, 0.999  # of the running means of the gradient and of its square, at each step


@dataclass
class Adam:
    """Computes the step of each parameter against its gradient; 0 where the gradient has always been 0."""

    learning_rate: float
    n_steps: int = 0
    gradient_mean: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float32, device="cpu"))
    squared_gradient_mean: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float32, device="cpu"))

    def compute_update(self, gradient: Tensor) -> Tensor:
        """Return the step to add, in the shape of the gradient."""
        self.n_steps += 1
        self.gradient_mean = self.gradient_mean.to(gradient).lerp(gradient, 1 - MOMENT_DECAY_RATES[0])
        self.squared_gradient_mean = self.squared_gradient_mean.to(gradient).lerp(
            gradient.square(), 1 - MOMENT_DECAY_RATES[1]
        )
        size = (self.squared_gradient_mean / (1 - MOMENT_DECAY_RATES[1] ** self.n_steps)).sqrt()
        return -self.learning_rate * torch.where(
            size > 0, self.gradient_mean / (1 - MOMENT_DECAY_RATES[0] ** self.n_steps) / size, 0
        )
