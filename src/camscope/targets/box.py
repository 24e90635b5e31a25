"""Box: a question of one detection among those that a detector returns."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from camscope.errors import TargetError
from camscope.plurals import plural
from camscope.targets.base import ClassNameLookup, ImageContext, Target, parse_finite_numbers
from camscope.targets.classes import parse_class_label, resolve_class_index
from camscope.targets.outputs import full_precision, get_output_tensor

MIN_MATCH_IOU = 0.5  # overlap that makes a detection the one that is meant
Activation = Literal["softmax", "sigmoid"]
DETECTION_MODELS = re.compile("For(ObjectDetection|(Instance|Panoptic)?Segmentation)$")  # of Hugging Face


@dataclass(frozen=True)
class DetectionHead:
    """The class scores of a Hugging Face detector, as its config describes them.

    `n_labels`: the number of classes; None where the classes are texts that the caller passes in.
    """

    n_labels: int | None
    focal_loss: bool = True


@dataclass(frozen=True)
class Detections:
    """One sample's detections: boxes (D,4) as x0, y0, x1, y1 on the model's input, and class probabilities (D,K)."""

    boxes: Tensor
    probabilities: Tensor


@dataclass(frozen=True, eq=False)
class Box(Target):
    """Why this box: its overlap (IoU) with a detection, times that detection's probability of the class, the largest such.

    Detections are matched in every pass anew, as a perturbed image may have others (Petsiuk et al. 2021); the overlap is
    a factor, not differentiated. `x0, y0, x1, y1`: left, top, right, bottom on the original image, or on the model's
    input where a tensor is explained. `label`: class index or name; None: that of the detection that overlaps most. Outputs:
    those of torchvision's detectors and of Hugging Face's detectors. `activation`: how class logits become probabilities:
    "softmax", where the last class means "no object" (DETR, YOLOS), or "sigmoid", where there is no such class (Deformable
    DETR, RT-DETR); None: as the config of a Hugging Face model has it. A channel's weight holds for the whole image:
    `hirescam`, `layercam` and `gradcam-elementwise` keep what belongs to one box, `gradcam` shows its class anywhere.
    """

    x0: float
    y0: float
    x1: float
    y1: float
    label: int | str | None = None
    activation: Activation | None = field(default=None, kw_only=True)
    heads: tuple[DetectionHead, ...] = field(default=(), kw_only=True, repr=False)
    input_size: tuple[int, ...] | None = field(default=None, kw_only=True, repr=False)

    dense = True

    def __post_init__(self) -> None:
        found = parse_finite_numbers(self.corners)
        if found is None:
            raise TargetError(f"Box{self.corners}: expected four finite numbers, left, top, right, bottom")
        known = dict(zip(("x0", "y0", "x1", "y1"), found, strict=True))
        for name, value in {
            **known,
            "label": None if self.label is None else parse_class_label(self.label, "label", "Box"),
        }.items():
            object.__setattr__(self, name, value)
        if not (self.x0 < self.x1 and self.y0 < self.y1):
            raise TargetError(f"Box{self.corners}: expected left < right and top < bottom")
        if self.activation not in (None, *get_args(Activation)):
            raise TargetError(f"Box(activation={self.activation!r}): expected 'softmax', 'sigmoid' or None")

    @property
    def corners(self) -> tuple[float, float, float, float]:
        """x0, y0, x1, y1"""
        return self.x0, self.y0, self.x1, self.y1

    def bind_model(self, model: nn.Module) -> "Box":
        """The box, with the class counts of the model's configs."""
        return replace(self, heads=find_detection_heads(model)) if self.activation is None else self

    def bind(self, image_context: ImageContext) -> "Box":
        """The box on the model's input."""
        ends = image_context.to_input([[self.y0, self.x0], [self.y1, self.x1]])
        (top, left), (bottom, right) = ends.min(0).tolist(), ends.max(0).tolist()
        height, width = image_context.input_size
        if left >= width or top >= height or right <= 0 or bottom <= 0:
            raise TargetError(f"Box{self.corners} lies outside of what the model sees: the crop has cut it away")
        return replace(self, x0=left, y0=top, x1=right, y1=bottom)

    def flipped(self, flips: Sequence[int], size: Sequence[int]) -> "Box":
        """The box where the view shows it."""
        sides = []
        for axis, ends in enumerate(((self.y0, self.y1), (self.x0, self.x1))):
            before = (self.input_size or tuple(size))[axis]
            low, high = (before - ends[1], before - ends[0]) if axis in flips else ends
            sides.append((low * size[axis] / before, high * size[axis] / before))
        (top, bottom), (left, right) = sides
        return replace(self, x0=left, y0=top, x1=right, y1=bottom, input_size=tuple(size))

    def resolve(self, output: Any, input_size: Sequence[int], class_names: Sequence[str] | None) -> "Box":
        """The class, fixed; TargetError where no detection is meant."""
        known = replace(self, input_size=tuple(input_size), activation=self._resolve_activation(output))
        found = parse_detections(output, known.input_size, known.activation)
        # a list of detections has the classes that were found, no more: how many there are it does not say
        count = len(class_names or ()) if isinstance(output, list | tuple) else found[0].probabilities.shape[1]
        if isinstance(self.label, str) or (self.label is not None and count):
            known = replace(
                known, label=resolve_class_index(self.label, count or found[0].probabilities.shape[1], class_names)
            )
        best = [known._find_best_match(one) for one in found]
        for sample, (overlap, _, near) in enumerate(best):
            if overlap < MIN_MATCH_IOU:
                raise TargetError(
                    f"sample {sample} has no detection that overlaps Box{tuple(round(c, 1) for c in self.corners)} by half; "
                    f"{near}"
                )
        classes = {index for _, index, _ in best}
        if known.label is None and len(classes) > 1:
            raise TargetError(f"the box is of different classes in the samples ({sorted(classes)}): pass of=")
        return replace(known, label=classes.pop()) if known.label is None else known

    def __call__(self, output: Any) -> Tensor:
        """(N,)"""
        return torch.stack(
            [
                self._score_sample(one)
                for one in parse_detections(output, self.input_size, self._resolve_activation(output))
            ]
        )

    def describe(self, sample: int, class_name: ClassNameLookup) -> str:
        """`nodule in the box (10, 20, 50, 60)`"""
        label = class_name(self.label) if isinstance(self.label, int) else "what is"
        return f"{label} in the box ({', '.join(f'{value:.4g}' for value in self.corners)}) of the input"

    def _resolve_activation(self, output: Any) -> Activation | None:
        """That of the output's class logits; None where it has none, or where nothing tells."""
        logits = get_output_tensor(output, "logits")
        return self.activation or (None if logits is None else infer_activation(self.heads, logits.shape[-1]))

    def _score_sample(self, detections: Detections) -> Tensor:
        if len(detections.boxes) == 0:
            return detections.probabilities.sum()
        chances, overlaps = self._class_probabilities(detections), compute_iou(detections.boxes.detach(), self.corners)
        best = (overlaps * chances.detach()).argmax()
        return overlaps[best] * chances[best]

    def _class_probabilities(self, detections: Detections) -> Tensor:
        """(D,): of the class that is asked for; of the likeliest where none is."""
        if not isinstance(self.label, int):
            return detections.probabilities.amax(1)
        return (
            detections.probabilities[:, self.label]
            if self.label < detections.probabilities.shape[1]
            else detections.probabilities.sum(1) * 0
        )

    def _find_best_match(self, detections: Detections) -> tuple[float, int, str]:
        """Overlap and class of the detection that is meant, and what there is in words."""
        if len(detections.boxes) == 0:
            return 0.0, -1, "it has no detection at all"
        chances = detections.probabilities.detach()
        overlaps = compute_iou(detections.boxes.detach(), self.corners)
        overlaps = torch.where(self._class_probabilities(detections).detach() > 0, overlaps, 0)
        best = int((overlaps + 1e-6 * chances.amax(1)).argmax())
        index = self.label if isinstance(self.label, int) else int(chances[best].argmax())
        corners = ", ".join(f"{value:.0f}" for value in detections.boxes[best].tolist())
        near = f"the nearest: class {int(chances[best].argmax())} at ({corners}), overlap {float(overlaps[best]):.2f}"
        return float(overlaps[best]), index, near


def find_detection_heads(model: nn.Module) -> tuple[DetectionHead, ...]:
    """The heads of the Hugging Face detectors in a model, the outermost first."""
    heads = []
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is None or not any(DETECTION_MODELS.search(cls.__name__) for cls in type(module).__mro__):
            continue
        n_labels = None if hasattr(config, "text_config") else getattr(config, "num_labels", None)
        heads.append(DetectionHead(n_labels, getattr(config, "use_focal_loss", True)))
    return tuple(heads)


def infer_activation(heads: Sequence[DetectionHead], n_logits: int) -> Activation | None:
    """How logits of so many columns become probabilities; None where no head has as many.

    A column beyond the labels is the no-object class of a softmax.
    """
    for head in heads:
        if head.n_labels is None:
            return "sigmoid"
        if n_logits in (head.n_labels, head.n_labels + 1):
            return "sigmoid" if head.focal_loss and n_logits == head.n_labels else "softmax"
    return None


def parse_detections(
    output: Any, input_size: tuple[int, ...] | None, activation: Activation | None = None
) -> list[Detections]:
    """What a detector returned for each sample.

    `input_size`: of the model's input, for boxes given as parts of it. `activation`: see `Box`; for class logits only.
    """
    if isinstance(output, list | tuple) and output and all(_is_torchvision_prediction(one) for one in output):
        return [_parse_torchvision_detections(one) for one in output]
    boxes, logits = (get_output_tensor(output, name) for name in ("pred_boxes", "logits"))
    if boxes is None or logits is None:
        raise TargetError(
            f"a Box asks a detector: a list of dicts with boxes, labels and scores, or an output with pred_boxes and "
            f"logits; {type(output).__name__} came"
        )
    if input_size is None:
        raise TargetError("a Box of an output whose boxes are parts of the input must be settled by a first pass")
    if activation is None:
        raise TargetError(
            f"the {plural(logits.shape[-1], 'class logit')} of each box may or may not end with a no-object "
            "class, and the model has "
            f"no Hugging Face config that decides: pass Box(..., activation='softmax') where the last one is 'no object', "
            f"else activation='sigmoid'"
        )
    height, width = input_size
    centre, extent = boxes.unflatten(2, (2, 2)).unbind(2)
    corners = torch.cat([centre - extent / 2, centre + extent / 2], 2) * boxes.new_tensor([width, height] * 2)
    scores = full_precision(logits)
    chances = scores.sigmoid() if activation == "sigmoid" else scores.softmax(2)[..., :-1]
    return [Detections(*pair) for pair in zip(corners, chances, strict=True)]


def compute_iou(boxes: Tensor, corners: Sequence[float]) -> Tensor:
    """(D,4), one box -> (D,): area in common over area of both."""
    own = boxes.new_tensor(list(corners))
    low, high = torch.maximum(boxes[:, :2], own[:2]), torch.minimum(boxes[:, 2:], own[2:])
    common = (high - low).clamp(min=0).prod(1)
    both = (boxes[:, 2:] - boxes[:, :2]).prod(1) + (own[2:] - own[:2]).prod() - common
    return torch.where(both > 0, common / both, 0)


def _parse_torchvision_detections(prediction: Mapping[str, Tensor]) -> Detections:
    """Of torchvision: one class and its score a detection, here one row (K,) each."""
    scores, labels = prediction["scores"], prediction["labels"].long()
    classes = int(labels.max()) + 1 if len(labels) else 1
    chances = scores.new_zeros(len(scores), classes)
    return Detections(prediction["boxes"], chances.scatter(1, labels[:, None], scores[:, None]))


def _is_torchvision_prediction(value: object) -> bool:
    return isinstance(value, Mapping) and {"boxes", "labels", "scores"} <= set(value)
