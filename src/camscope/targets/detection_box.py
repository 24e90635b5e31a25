"""Box: the target that explains one detection of an object detector."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from camscope.errors import TargetError
from camscope.plurals import plural
from camscope.targets.base import ClassNameLookup, ImageContext, Target, parse_finite_numbers
from camscope.targets.class_targets import parse_class_label, resolve_class_index
from camscope.targets.detector_rows_before_nms import DetectionRows
from camscope.targets.find_class_scores import full_precision, get_output_tensor

MIN_MATCH_IOU = 0.5  # overlap from which a detection matches the box
Activation = Literal["softmax", "sigmoid"]
DETECTION_MODELS = re.compile("For(ObjectDetection|(Instance|Panoptic)?Segmentation)$")  # of Hugging Face


@dataclass(frozen=True)
class HuggingFaceDetectorSettings:
    """The settings of a Hugging Face detector that tell how to read its logits.

    `n_labels` is the number of classes. A detector whose classes are texts of the caller has the value None.
    """

    n_labels: int | None
    focal_loss: bool = True


@dataclass(frozen=True)
class Detections:
    """The D detections of one sample: boxes (D,4), and probabilities (D,K) of K classes.

    A box is x0, y0, x1, y1 in pixels of the model's input.
    """

    boxes: Tensor
    probabilities: Tensor


class BoxMatch(NamedTuple):
    """The detection that overlaps a box most: its overlap, its class, and a description for errors."""

    overlap: float
    class_index: int
    description: str


@dataclass(frozen=True, eq=False)
class Box(Target):
    """The score of one detection: its overlap (IoU) with the box times its probability of the class.

    The detection with the highest product counts. Detections are matched anew in every forward pass, because a perturbed
    image may have others (Petsiuk et al. 2021). The overlap is a constant factor of the gradient. The target reads the
    outputs of detectors of torchvision and Hugging Face, and the rows of YOLO before their suppression. In `gradcam` a
    channel has one weight for the whole image, so the map may show all objects of the class. `hirescam`, `layercam` and
    `gradcam-elementwise` show one box.

    Args:
        x0: Left edge in pixels of the original image, or of the model's input where a tensor is explained. Also accepted is
            a `supervision.Detections` with one row, in place of all four edges and the class.
        y0: Top edge.
        x1: Right edge.
        y1: Bottom edge.
        label: Index or name of the class, or None for the class of the detection that overlaps the box most. Of the rows of
            YOLO that overlap it by half or more, it is the class of the most probable one.
        activation: How class logits become probabilities: "softmax" where the last class means "no object" (DETR,
            YOLOS), "sigmoid" where there is no such class (Deformable DETR, RT-DETR). None follows the config of a
            Hugging Face model.
        detector_settings: The settings of the Hugging Face detectors in the model, which `prepare_for_model` sets.
        input_size: Size of the model's input, which `prepare_for_image` and `resolve_choices` set.
        image_corners: The corners in pixels of the original image, which `prepare_for_image` sets.
        is_best: Whether the box is the best of its class, which `BestBox` sets. Then results store the class as their target.
        strides: For rows of YOLO, the stride of the level that predicts the box in each sample, which `resolve_choices` sets.

    Raises:
        TargetError: The corners are not finite or not in order, or `activation` is unknown.

    >>> Box(0, 0, 4, 4, "dog").corners
    (0, 0, 4, 4)

    """

    x0: float
    y0: float = math.nan
    x1: float = math.nan
    y1: float = math.nan
    label: int | str | None = None
    activation: Activation | None = field(default=None, kw_only=True)
    detector_settings: tuple[HuggingFaceDetectorSettings, ...] = field(default=(), kw_only=True, repr=False)
    input_size: tuple[int, ...] | None = field(default=None, kw_only=True, repr=False)
    image_corners: tuple[float, float, float, float] | None = field(default=None, kw_only=True, repr=False)
    strides: tuple[float, ...] = field(default=(), kw_only=True, repr=False)
    is_best: bool = field(default=False, kw_only=True, repr=False)

    selects_positions = True

    def __post_init__(self) -> None:
        if hasattr(self.x0, "xyxy"):
            _set_edges_from_single_detection(self)
        corners = parse_finite_numbers(self.corners)
        if corners is None:
            raise TargetError(f"Box{self.corners}: expected four finite numbers (left, top, right, bottom)")
        label = None if self.label is None else parse_class_label(self.label, "label", "Box")
        unsigned = [corner or abs(corner) for corner in corners]  # -0.0 becomes 0.0
        for name, value in zip(("x0", "y0", "x1", "y1", "label"), (*unsigned, label), strict=True):
            object.__setattr__(self, name, value)
        if not (self.x0 < self.x1 and self.y0 < self.y1):
            raise TargetError(f"Box{self.corners}: expected left < right and top < bottom")
        if self.activation not in (None, *get_args(Activation)):
            raise TargetError(f"Box(activation={self.activation!r}): expected 'softmax', 'sigmoid' or None")

    @classmethod
    def from_detections(cls, detections: Any, activation: Activation | None = None) -> "list[Box]":
        """Return one box for each row of a `supervision.Detections`.

        Args:
            detections: An object with `xyxy` (n,4) in pixels of the original image, and `class_id` (n,) or None.
            activation: See `Box`.

        Returns:
            The boxes in the order of the rows. The class of a row is its `class_id`.

        Raises:
            TargetError: The object has no boxes of this form.

        >>> import numpy as np
        >>> from types import SimpleNamespace  # stands for supervision.Detections
        >>> rows = SimpleNamespace(xyxy=np.array([[0, 0, 4, 4], [2, 2, 9, 8]]), class_id=np.array([1, 17]))
        >>> [(box.corners, box.label) for box in Box.from_detections(rows)]
        [((0.0, 0.0, 4.0, 4.0), 1), ((2.0, 2.0, 9.0, 8.0), 17)]

        """
        return [
            cls(edges[0], edges[1], edges[2], edges[3], label, activation=activation)
            for edges, label in _read_detection_rows(detections)
        ]

    @property
    def corners(self) -> tuple[float, float, float, float]:
        """The edges of the box: left, top, right and bottom, as (x0, y0, x1, y1)."""
        return self.x0, self.y0, self.x1, self.y1

    def get_class_index(self, sample: int) -> int | None:
        """Return the class if the box is the best of its class. Otherwise return None."""
        return self.label if self.is_best and isinstance(self.label, int) else None

    def prepare_for_model(self, model: nn.Module) -> "Box":
        """Return the box with the settings of the Hugging Face detectors in the model. Without a detector, return the box itself.

        A score of one sample or one part of an output has no model, and gets a prepared box.
        """
        detector_settings = read_huggingface_detector_settings(model) if self.activation is None else ()
        return replace(self, detector_settings=detector_settings) if detector_settings else self

    def prepare_for_image(self, image_context: ImageContext) -> "Box":
        """Return the box for one image: convert pixels of the image to pixels of the model's input."""
        ends = image_context.to_input([[self.y0, self.x0], [self.y1, self.x1]])
        (top, left), (bottom, right) = ends.min(0).tolist(), ends.max(0).tolist()
        height, width = image_context.input_size
        if left >= width or top >= height or right <= 0 or bottom <= 0:
            raise TargetError(f"Box{self.corners} lies outside of the model's input: the crop has removed it")
        image_corners = self.corners if image_context.image_size is not None else None
        return replace(self, x0=left, y0=top, x1=right, y1=bottom, image_corners=image_corners)

    def flipped(self, flips: Sequence[int], size: Sequence[int]) -> "Box":
        """Return the box for a flipped and resized input. The new box has the same content."""
        sides = []
        for axis, ends in enumerate(((self.y0, self.y1), (self.x0, self.x1))):
            before = (self.input_size or tuple(size))[axis]
            low, high = (before - ends[1], before - ends[0]) if axis in flips else ends
            sides.append((low * size[axis] / before, high * size[axis] / before))
        (top, bottom), (left, right) = sides
        return replace(self, x0=left, y0=top, x1=right, y1=bottom, input_size=tuple(size))

    def resolve_choices(self, output: Any, input_size: Sequence[int], class_names: Sequence[str] | None) -> "Box":
        """Return the box with a fixed class. Raise TargetError if no detection has an IoU of at least 0.5 with the box."""
        resolved = replace(self, input_size=tuple(input_size), activation=self._resolve_activation(output))
        detections = parse_detections(output, resolved.input_size, resolved.activation)
        # a list of detections holds only the classes that were detected, not their number
        n_classes = len(class_names or ()) if isinstance(output, list | tuple) else detections[0].probabilities.shape[1]
        if isinstance(self.label, str) or (self.label is not None and n_classes):
            n_classes = n_classes or detections[0].probabilities.shape[1]
            resolved = replace(resolved, label=resolve_class_index(self.label, n_classes, class_names))
        is_unsuppressed = isinstance(output, DetectionRows)
        matches = [resolved._find_best_match(sample, by_probability=is_unsuppressed) for sample in detections]
        for sample, (overlap, _, nearest) in enumerate(matches):
            if overlap < MIN_MATCH_IOU:
                box = f"Box({', '.join(f'{round(corner, 1):zg}' for corner in self.corners)})"
                raise TargetError(f"sample {sample} has no detection that overlaps {box} by half; {nearest}")
        classes = {index for _, index, _ in matches}
        if resolved.label is None and len(classes) > 1:
            raise TargetError(
                f"the box has different classes in the samples of the batch: {sorted(classes)}", fix="pass label="
            )
        resolved = replace(resolved, label=classes.pop()) if resolved.label is None else resolved
        if isinstance(output, DetectionRows):
            best = [resolved._find_scored_row(sample) for sample in detections]
            resolved = replace(resolved, strides=tuple(float(output.strides[n, row]) for n, row in enumerate(best)))
        return resolved

    def __call__(self, output: Any) -> Tensor:
        """Compute the score of each sample (N,)."""
        samples = parse_detections(output, self.input_size, self._resolve_activation(output))
        return torch.stack([self._score_sample(detections) for detections in samples])

    def describe(self, sample: int, class_name: ClassNameLookup) -> str:
        """Return a description of the box, such as `nodule in the box (10, 20, 50, 60) of the image`.

        The corners are in pixels of the original image. Where it is unknown, they are in pixels of the model's input.
        """
        label = class_name(self.label) if isinstance(self.label, int) else "an object"
        corners = ", ".join(f"{round(value, 1):zg}" for value in self.image_corners or self.corners)
        frame = "image" if self.image_corners else "model's input"
        stride = self.strides[sample] if sample < len(self.strides) else 0
        level = f", predicted at stride {stride:g}" if stride else ""
        return f"{label} in the box ({corners}) of the {frame}{level}"

    def _resolve_activation(self, output: Any) -> Activation | None:
        """Return the activation that turns class logits into probabilities. Return None if the activation is unknown."""
        logits = get_output_tensor(output, "logits")
        return self.activation or (
            None if logits is None else infer_softmax_or_sigmoid(self.detector_settings, logits.shape[-1])
        )

    def _score_sample(self, detections: Detections) -> Tensor:
        if len(detections.boxes) == 0:
            return detections.probabilities.sum()
        probabilities = self._select_class_probabilities(detections)
        best = self._find_scored_row(detections)
        return compute_iou(detections.boxes[best, None].detach(), self.corners)[0] * probabilities[best]

    def _find_scored_row(self, detections: Detections) -> int:
        """Return the index of the detection that gives the score: the one with the largest overlap times probability."""
        overlaps = compute_iou(detections.boxes.detach(), self.corners)
        return int((overlaps * self._select_class_probabilities(detections).detach()).argmax())

    def _select_class_probabilities(self, detections: Detections) -> Tensor:
        """Return one probability (D,) per detection: for the target's class, or the largest one for a target without a class."""
        probabilities = detections.probabilities
        if not isinstance(self.label, int):
            return probabilities.amax(1)
        return probabilities[:, self.label] if self.label < probabilities.shape[1] else probabilities.sum(1) * 0

    def _find_best_match(self, detections: Detections, *, by_probability: bool) -> BoxMatch:
        """Find the detection with the largest overlap. `by_probability` selects the most probable one that overlaps by half."""
        if len(detections.boxes) == 0:
            return BoxMatch(0.0, -1, "it has no detection")
        probabilities = detections.probabilities.detach()
        overlaps = compute_iou(detections.boxes.detach(), self.corners)
        overlaps = torch.where(self._select_class_probabilities(detections).detach() > 0, overlaps, 0)
        ranking = overlaps + 1e-6 * probabilities.amax(1)
        if by_probability:
            ranking = torch.where(overlaps >= MIN_MATCH_IOU, 1 + probabilities.amax(1), ranking)
        best = int(ranking.argmax())
        overlap, top_class = float(overlaps[best]), int(probabilities[best].argmax())
        corners = ", ".join(f"{value:z.0f}" for value in detections.boxes[best].tolist())
        nearest = f"the nearest: class {top_class} at ({corners}), overlap {overlap:.2f}"
        return BoxMatch(overlap, self.label if isinstance(self.label, int) else top_class, nearest)


def _read_detection_rows(detections: Any) -> list[tuple[tuple[float, ...], int | None]]:
    """Return the edges and the class of each row of a `supervision.Detections`."""
    rows = [tuple(map(float, row)) for row in getattr(detections, "xyxy", ())]
    class_ids = getattr(detections, "class_id", None)
    labels = [None] * len(rows) if class_ids is None else [int(class_id) for class_id in class_ids]
    if not hasattr(detections, "xyxy") or len(labels) != len(rows) or any(len(row) != 4 for row in rows):
        raise TargetError(
            f"{type(detections).__name__}: expected detections with xyxy (n,4) and class_id (n,), as supervision.Detections"
        )
    return list(zip(rows, labels, strict=True))


def _set_edges_from_single_detection(box: Box) -> None:
    """Set the edges and the class of a box that was created from a `supervision.Detections`."""
    rows = _read_detection_rows(box.x0)
    if len(rows) != 1:
        raise TargetError(
            f"Box takes one detection, and these are {plural(len(rows), 'row')}",
            fix="pass Box.from_detections(detections), a list with one Box for each row, or a single row such as detections[0]",
        )
    if any(not math.isnan(value) for value in (box.y0, box.x1, box.y1)):
        raise TargetError("Box takes either a detection or four edges, not both", fix="pass only the detection")
    edges, label = rows[0]
    for name, value in zip(("x0", "y0", "x1", "y1"), edges, strict=True):
        object.__setattr__(box, name, value)
    if box.label is None:
        object.__setattr__(box, "label", label)


def read_huggingface_detector_settings(model: nn.Module) -> tuple[HuggingFaceDetectorSettings, ...]:
    """Return the settings of each Hugging Face detector in a model. The outermost module comes first."""
    detector_settings = []
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is None or not any(DETECTION_MODELS.search(cls.__name__) for cls in type(module).__mro__):
            continue
        n_labels = None if hasattr(config, "text_config") else getattr(config, "num_labels", None)
        detector_settings.append(HuggingFaceDetectorSettings(n_labels, getattr(config, "use_focal_loss", True)))
    return tuple(detector_settings)


def infer_softmax_or_sigmoid(
    detector_settings: Sequence[HuggingFaceDetectorSettings], n_logits: int
) -> Activation | None:
    """Infer whether class logits need a softmax or a sigmoid. Return None if this is uncertain.

    A softmax has one more logit than classes, for "no object".
    """
    for head in detector_settings:
        if head.n_labels is None:
            return "sigmoid"
        if n_logits in (head.n_labels, head.n_labels + 1):
            return "sigmoid" if head.focal_loss and n_logits == head.n_labels else "softmax"
    return None


def parse_detections(
    output: Any, input_size: tuple[int, ...] | None, activation: Activation | None = None
) -> list[Detections]:
    """Convert the output of a detector to detections of each sample. The boxes are in pixels of the model's input."""
    if isinstance(output, DetectionRows):
        return [Detections(*pair) for pair in zip(output.boxes, output.probabilities, strict=True)]
    predictions = output if isinstance(output, list | tuple) else []
    fields = {"boxes", "labels", "scores"}
    if predictions and all(isinstance(row, Mapping) and fields <= set(row) for row in predictions):
        return [_parse_torchvision_detections(row) for row in predictions]
    boxes, logits = (get_output_tensor(output, name) for name in ("pred_boxes", "logits"))
    if boxes is None or logits is None:
        raise TargetError(
            f"a Box needs the output of a detector: expected a list of dicts with boxes, labels and scores, or an output with "
            f"pred_boxes and logits; received {type(output).__name__}"
        )
    if input_size is None:
        raise TargetError(
            "the boxes of this output are fractions of the input size, which is unknown: use the Box in a method or a Score"
        )
    if activation is None:
        raise TargetError(
            f"the last of {plural(logits.shape[-1], 'class logit')} of a box may be a no-object class, and the model has no "
            "Hugging Face config that tells",
            fix="pass Box(..., activation='softmax') where the last one is 'no object', else activation='sigmoid'",
        )
    height, width = input_size
    center, extent = boxes.unflatten(2, (2, 2)).unbind(2)
    corners = torch.cat([center - extent / 2, center + extent / 2], 2) * boxes.new_tensor([width, height] * 2)
    scores = full_precision(logits)
    probabilities = scores.sigmoid() if activation == "sigmoid" else scores.softmax(2)[..., :-1]
    return [Detections(*pair) for pair in zip(corners, probabilities, strict=True)]


def compute_iou(boxes: Tensor, corners: Sequence[float]) -> Tensor:
    """Compute the intersection over union (D,) of one box with several boxes (D,4)."""
    box = boxes.new_tensor(list(corners))
    low, high = torch.maximum(boxes[:, :2], box[:2]), torch.minimum(boxes[:, 2:], box[2:])
    intersection = (high - low).clamp(min=0).prod(1)
    union = (boxes[:, 2:] - boxes[:, :2]).prod(1) + (box[2:] - box[:2]).prod() - intersection
    return torch.where(union > 0, intersection / union, 0)


def _parse_torchvision_detections(prediction: Mapping[str, Tensor]) -> Detections:
    """Convert D detections of one sample from torchvision. The score of a detection becomes one row of probabilities (D,K)."""
    scores, labels = prediction["scores"], prediction["labels"].long()
    n_classes = int(labels.max()) + 1 if len(labels) else 1
    probabilities = scores.new_zeros(len(scores), n_classes)
    return Detections(prediction["boxes"], probabilities.scatter(1, labels[:, None], scores[:, None]))
