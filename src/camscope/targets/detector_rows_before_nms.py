"""`DetectionRows`: every row that a detector predicts, before non-maximum suppression."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class DetectionRows:
    """The A rows of a detector for each of N samples, before non-maximum suppression.

    Args:
        boxes: (N,A,4) x0, y0, x1, y1 in pixels of the model's input.
        probabilities: (N,A,K) probabilities of K classes.
        strides: (N,A) pixels of the input per cell of the grid in which the row was predicted, or 0 for a row of no grid.

    >>> import torch
    >>> DetectionRows(torch.zeros(1, 2, 4), torch.zeros(1, 2, 3), torch.full((1, 2), 8.0)).boxes.shape
    torch.Size([1, 2, 4])

    """

    boxes: Tensor
    probabilities: Tensor
    strides: Tensor
