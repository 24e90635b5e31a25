"""Targets: functions of one sample's output, under the names of pytorch-grad-cam."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor


class ClassifierOutputTarget:
    """The score of a class."""

    def __init__(self, category: int) -> None:
        self.category = category

    def __call__(self, model_output: Tensor) -> Tensor:
        """Return the score of the class, from the output of one sample (K,) or of several samples (N,K)."""
        return model_output[..., self.category]


class ClassifierOutputSoftmaxTarget(ClassifierOutputTarget):
    """The probability of a class."""

    def __call__(self, model_output: Tensor) -> Tensor:
        """Return the softmax probability of the class."""
        return model_output.softmax(-1)[..., self.category]


class ClassifierOutputReST(ClassifierOutputTarget):
    """The score of a class plus the logarithm of its probability."""

    def __call__(self, model_output: Tensor) -> Tensor:
        """Return the sum of the logit and the log-probability of the class."""
        return model_output[..., self.category] + model_output.log_softmax(-1)[..., self.category]


class BinaryClassifierOutputTarget:
    """The score of a model with one output. Category 1 gives the score, and any other category gives the negated score."""

    def __init__(self, category: int) -> None:
        self.category = category

    def __call__(self, model_output: Tensor) -> Tensor:
        """Return the output for category 1, and the negative output for category 0."""
        return model_output if self.category == 1 else -model_output


class SoftmaxOutputTarget:
    """The probabilities of all classes."""

    def __call__(self, model_output: Tensor) -> Tensor:
        """Return the softmax probabilities of all classes."""
        return model_output.softmax(-1)


class RawScoresOutputTarget:
    """The model's output, unchanged."""

    def __call__(self, model_output: Tensor) -> Tensor:
        """Return the output unchanged."""
        return model_output


class SemanticSegmentationTarget:
    """The sum of a class's scores over a mask (H,W)."""

    def __init__(self, category: int, mask: Any) -> None:
        self.category, self.mask = category, mask if isinstance(mask, Tensor) else torch.from_numpy(np.asarray(mask))

    def __call__(self, model_output: Tensor) -> Tensor:
        """Return the sum of the class scores inside the mask, from the output of one sample (K,H,W)."""
        self.mask = self.mask.to(model_output.device)
        return (model_output[self.category] * self.mask).sum()


class FasterRCNNBoxScoreTarget:
    """The sum, over given boxes, of the overlap (IoU) with the best detected box and the score of that box.

    A box counts only if its best detected box has the same label, and overlaps it by more than `iou_threshold`.
    """

    def __init__(self, labels: Sequence[int], bounding_boxes: Any, iou_threshold: float = 0.5) -> None:
        self.labels, self.bounding_boxes, self.iou_threshold = labels, bounding_boxes, iou_threshold

    def __call__(self, model_outputs: Mapping[str, Tensor]) -> Tensor:
        """Return the score (1,) of one image. The output is a dict of boxes, labels and scores."""
        from torchvision.ops import box_iou

        boxes = model_outputs["boxes"]
        total = torch.zeros(1, dtype=torch.float32, device=boxes.device)
        if len(boxes) == 0:
            return total
        references = torch.as_tensor(np.asarray(self.bounding_boxes), dtype=boxes.dtype, device=boxes.device)
        for overlaps, label in zip(box_iou(references.reshape(-1, 4), boxes), self.labels, strict=False):
            best = int(overlaps.argmax())
            if overlaps[best] > self.iou_threshold and model_outputs["labels"][best] == label:
                total = total + overlaps[best] + model_outputs["scores"][best]
        return total


class FinerWeightedTarget:
    """The differences between a class and other classes, weighted by the probabilities of the others."""

    def __init__(self, main_category: int, comparison_categories: Sequence[int], alpha: float) -> None:
        self.main_category, self.comparison_categories, self.alpha = main_category, comparison_categories, alpha

    def __call__(self, model_output: Tensor) -> Tensor:
        """Return the weighted mean of the differences: main class minus alpha times a comparison class."""
        comparisons = list(self.comparison_categories)
        weights = model_output.softmax(-1)[..., comparisons]
        differences = model_output[..., self.main_category, None] - self.alpha * model_output[..., comparisons]
        return (weights * differences).sum(-1) / (weights.sum(-1) + 1e-9)
