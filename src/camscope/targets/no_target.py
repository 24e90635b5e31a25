"""NoTarget: stands in for a target where a method needs no target and the model's output has no class scores."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from camscope.pytree import iter_leaves
from camscope.targets.base import ClassNameLookup, Target
from camscope.unusual_tensors import describe_unusual_tensor

NO_TARGET_LABEL = "no target"


class NoTarget(Target):
    """No target: the map does not depend on the output, which may have any structure.

    The number that `mix_output` reads is not a score. Its gradient shows which layers, and which calls of a layer, affect
    the output.
    """

    @property
    def selects_positions(self) -> bool:
        """Whether the layer is chosen as for an output with scores at many positions, before the head. Always True."""
        return True

    def __call__(self, output: Any) -> Tensor:
        """Return the weighted sum of the output of one sample, with the shape (1,)."""
        return self.mix_output(output, 1)

    def mix_output(self, output: Any, n_rows: int) -> Tensor:
        """Combine all numbers of an output into one, with fixed weights. Divide it equally among the rows (n_rows,)."""
        total = torch.zeros((), dtype=torch.float32, device="cpu")
        for _, leaf in iter_leaves(output):
            if leaf.is_floating_point() and describe_unusual_tensor(leaf) is None and leaf.numel():
                values = leaf.flatten().float()
                values = torch.where(values.isfinite(), values, 0)
                weights = torch.arange(1, len(values) + 1, dtype=values.dtype, device=values.device).cos()
                total = total.to(leaf.device) + (values * weights).mean()
        return (total / n_rows).expand(n_rows)

    def describe(self, sample: int, class_name: ClassNameLookup) -> str:
        """Return the label that explanations without a target have."""
        return NO_TARGET_LABEL

    def flipped(self, flips: Sequence[int], size: Sequence[int]) -> "NoTarget":
        """Return this object unchanged, because it does not refer to a position in the image."""
        return self
