"""BestBox: the target that explains the best-scoring detection of a class."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from camscope.errors import TargetError
from camscope.targets.base import ClassNameLookup, ImageContext, PointTransform, Target
from camscope.targets.class_targets import parse_class_label, resolve_class_index
from camscope.targets.detection_box import (
    Box,
    Detections,
    HuggingFaceDetectorSettings,
    infer_softmax_or_sigmoid,
    parse_detections,
    read_huggingface_detector_settings,
)
from camscope.targets.find_class_scores import get_output_tensor
from camscope.targets.score_per_sample import PerSampleTarget


@dataclass(frozen=True, eq=False)
class BestBox(Target):
    """The score of the detection with the highest probability of a class.

    The first forward pass finds it. From then on the target is the `Box` of that detection, so a changed image cannot move
    it to another object. For YOLO, a class alone is this target.

    Args:
        label: Index or name of the class, or None for the class of the best detection.
        detector_settings: The settings of the Hugging Face detectors in the model, which `prepare_for_model` sets.
        to_image: Converts points of the input to points of the image, which `prepare_for_image` sets.

    >>> BestBox("dog")
    BestBox(label='dog')

    """

    label: int | str | None = None
    detector_settings: tuple[HuggingFaceDetectorSettings, ...] = field(default=(), kw_only=True, repr=False)
    to_image: PointTransform | None = field(default=None, kw_only=True, repr=False)

    selects_positions = True

    def __post_init__(self) -> None:
        label = None if self.label is None else parse_class_label(self.label, "label", "BestBox")
        object.__setattr__(self, "label", label)

    def prepare_for_model(self, model: nn.Module) -> "BestBox":
        """Return the target with the settings of the Hugging Face detectors in the model."""
        return replace(self, detector_settings=read_huggingface_detector_settings(model))

    def prepare_for_image(self, image_context: ImageContext) -> "BestBox":
        """Return the target for one image. The box is described in pixels of this image."""
        return replace(self, to_image=image_context.to_image if image_context.image_size is not None else None)

    def resolve_choices(self, output: Any, input_size: Sequence[int], class_names: Sequence[str] | None) -> Target:
        """Return the box of the best detection, or one box per sample. Raise TargetError if a sample has no detection."""
        logits = get_output_tensor(output, "logits")
        activation = None if logits is None else infer_softmax_or_sigmoid(self.detector_settings, logits.shape[-1])
        samples = parse_detections(output, tuple(input_size), activation)
        boxes = [
            replace(self._find_box(number, detections, class_names), activation=activation)
            for number, detections in enumerate(samples)
        ]
        target: Target = boxes[0] if len(boxes) == 1 else PerSampleTarget(boxes)
        return target.resolve_choices(output, input_size, class_names)

    def _find_box(self, sample: int, detections: Detections, class_names: Sequence[str] | None) -> Box:
        """Return the box with the highest score, of the class if there is one. Raise a TargetError without a detection."""
        boxes, probabilities = detections.boxes.detach(), detections.probabilities.detach()
        label = self.label
        if label is not None:
            label = resolve_class_index(label, max(probabilities.shape[1], len(class_names or ())), class_names)
        columns = probabilities if label is None else probabilities[:, label : label + 1]
        has_area = (boxes[:, 2:] > boxes[:, :2]).all(1)
        scores = torch.where(has_area, columns.amax(1), 0) if columns.numel() else boxes.new_zeros(1)
        row = int(scores.argmax())
        if not scores[row] > 0:
            of_class = "" if label is None else f" of class {label}"
            raise TargetError(f"sample {sample} has no detection{of_class}")
        x0, y0, x1, y1 = boxes[row].tolist()
        image_corners = None
        if self.to_image is not None:
            ends = self.to_image([[y0, x0], [y1, x1]])
            (top, left), (bottom, right) = ends.min(0).tolist(), ends.max(0).tolist()
            image_corners = (left, top, right, bottom)
        index = int(probabilities[row].argmax()) if label is None else label
        return Box(x0, y0, x1, y1, index, image_corners=image_corners, is_best=True)

    def __call__(self, output: Any) -> Tensor:
        """Raise TargetError. Before any call, `resolve_choices` replaces this target by a target for a box."""
        raise TargetError("a BestBox is resolved by the first forward pass: use it in a method or a Score")

    def describe(self, sample: int, class_name: ClassNameLookup) -> str:
        """Return a description of the target before its box is known."""
        label = class_name(self.label) if isinstance(self.label, int) else self.label
        return "the best detection" if label is None else f"the best detection of {label}"
