"""Box: a question of one detection among those that a detector returns."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from camscope.errors import TargetError
from camscope.plurals import plural
from camscope.targets.base import Names, Scene, Target, numbers_in
from camscope.targets.classes import index_of, one_class
from camscope.targets.outputs import full_precision, part_of

MATCHED = 0.5  # overlap that makes a detection the one that is meant
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
    chances: Tensor


@dataclass(frozen=True, eq=False)
class Box(Target):
    """Why this box: its overlap (IoU) with a detection, times that detection's probability of the class, the largest such.

    Detections are matched in every pass anew, as a perturbed image may have others (Petsiuk et al. 2021); the overlap is
    a factor, not differentiated. `x0, y0, x1, y1`: left, top, right, bottom on the original image, or on the model's
    input where a tensor is explained. `of`: class index or name; None: that of the detection that overlaps most. Outputs:
    those of torchvision's detectors and of Hugging Face's detectors. `activation`: how class logits become probabilities:
    "softmax", where the last class means "no object" (DETR, YOLOS), or "sigmoid", where there is no such class (Deformable
    DETR, RT-DETR); None: as the config of a Hugging Face model has it. A channel's weight holds for the whole image:
    `hirescam`, `layercam` and `gradcam-elementwise` keep what belongs to one box, `gradcam` shows its class anywhere.
    """

    x0: float
    y0: float
    x1: float
    y1: float
    of: int | str | None = None
    activation: Activation | None = field(default=None, kw_only=True)
    heads: tuple[DetectionHead, ...] = field(default=(), kw_only=True, repr=False)
    size: tuple[int, ...] | None = field(default=None, kw_only=True, repr=False)

    dense = True

    def __post_init__(self) -> None:
        found = numbers_in(self.corners)
        if found is None:
            raise TargetError(f"Box{self.corners}: expected four finite numbers, left, top, right, bottom")
        known = dict(zip(("x0", "y0", "x1", "y1"), found, strict=True))
        for name, value in {**known, "of": None if self.of is None else one_class(self.of, "of", "Box")}.items():
            object.__setattr__(self, name, value)
        if not (self.x0 < self.x1 and self.y0 < self.y1):
            raise TargetError(f"Box{self.corners}: expected left < right and top < bottom")
        if self.activation not in (None, *get_args(Activation)):
            raise TargetError(f"Box(activation={self.activation!r}): expected 'softmax', 'sigmoid' or None")

    @property
    def corners(self) -> tuple[float, float, float, float]:
        """x0, y0, x1, y1"""
        return self.x0, self.y0, self.x1, self.y1

    def for_model(self, model: nn.Module) -> "Box":
        """The box, with the class counts of the model's configs."""
        return replace(self, heads=detection_heads(model)) if self.activation is None else self

    def in_scene(self, scene: Scene) -> "Box":
        """The box on the model's input."""
        ends = scene.to_input([[self.y0, self.x0], [self.y1, self.x1]])
        (top, left), (bottom, right) = ends.min(0).tolist(), ends.max(0).tolist()
        height, width = scene.input_size
        if left >= width or top >= height or right <= 0 or bottom <= 0:
            raise TargetError(f"Box{self.corners} lies outside of what the model sees: the crop has cut it away")
        return replace(self, x0=left, y0=top, x1=right, y1=bottom)

    def viewed(self, flips: Sequence[int], size: Sequence[int]) -> "Box":
        """The box where the view shows it."""
        sides = []
        for axis, ends in enumerate(((self.y0, self.y1), (self.x0, self.x1))):
            before = (self.size or tuple(size))[axis]
            low, high = (before - ends[1], before - ends[0]) if axis in flips else ends
            sides.append((low * size[axis] / before, high * size[axis] / before))
        (top, bottom), (left, right) = sides
        return replace(self, x0=left, y0=top, x1=right, y1=bottom, size=tuple(size))

    def settled(self, output: Any, size: Sequence[int], categories: Sequence[str] | None) -> "Box":
        """The class, fixed; TargetError where no detection is meant."""
        known = replace(self, size=tuple(size), activation=self._activation(output))
        found = detections(output, known.size, known.activation)
        # a list of detections has the classes that were found, no more: how many there are it does not say
        count = len(categories or ()) if isinstance(output, list | tuple) else found[0].chances.shape[1]
        if isinstance(self.of, str) or (self.of is not None and count):
            known = replace(known, of=index_of(self.of, count or found[0].chances.shape[1], categories))
        best = [known._best(one) for one in found]
        for sample, (overlap, _, near) in enumerate(best):
            if overlap < MATCHED:
                raise TargetError(
                    f"sample {sample} has no detection that overlaps Box{tuple(round(c, 1) for c in self.corners)} by half; "
                    f"{near}"
                )
        classes = {index for _, index, _ in best}
        if known.of is None and len(classes) > 1:
            raise TargetError(f"the box is of different classes in the samples ({sorted(classes)}): pass of=")
        return replace(known, of=classes.pop()) if known.of is None else known

    def __call__(self, output: Any) -> Tensor:
        """(N,)"""
        return torch.stack([self._score(one) for one in detections(output, self.size, self._activation(output))])

    def words(self, sample: int, name: Names) -> str:
        """`nodule in the box (10, 20, 50, 60)`"""
        label = name(self.of) if isinstance(self.of, int) else "what is"
        return f"{label} in the box ({', '.join(f'{value:.4g}' for value in self.corners)}) of the input"

    def _activation(self, output: Any) -> Activation | None:
        """That of the output's class logits; None where it has none, or where nothing tells."""
        logits = part_of(output, "logits")
        return self.activation or (None if logits is None else activation_of(self.heads, logits.shape[-1]))

    def _score(self, found: Detections) -> Tensor:
        if len(found.boxes) == 0:
            return found.chances.sum()
        chances, overlaps = self._chances(found), overlap(found.boxes.detach(), self.corners)
        best = (overlaps * chances.detach()).argmax()
        return overlaps[best] * chances[best]

    def _chances(self, found: Detections) -> Tensor:
        """(D,): of the class that is asked for; of the likeliest where none is."""
        if not isinstance(self.of, int):
            return found.chances.amax(1)
        return found.chances[:, self.of] if self.of < found.chances.shape[1] else found.chances.sum(1) * 0

    def _best(self, found: Detections) -> tuple[float, int, str]:
        """Overlap and class of the detection that is meant, and what there is in words."""
        if len(found.boxes) == 0:
            return 0.0, -1, "it has no detection at all"
        chances = found.chances.detach()
        overlaps = overlap(found.boxes.detach(), self.corners)
        overlaps = torch.where(self._chances(found).detach() > 0, overlaps, 0)
        best = int((overlaps + 1e-6 * chances.amax(1)).argmax())
        index = self.of if isinstance(self.of, int) else int(chances[best].argmax())
        corners = ", ".join(f"{value:.0f}" for value in found.boxes[best].tolist())
        near = f"the nearest: class {int(chances[best].argmax())} at ({corners}), overlap {float(overlaps[best]):.2f}"
        return float(overlaps[best]), index, near


def detection_heads(model: nn.Module) -> tuple[DetectionHead, ...]:
    """The heads of the Hugging Face detectors in a model, the outermost first."""
    heads = []
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is None or not any(DETECTION_MODELS.search(cls.__name__) for cls in type(module).__mro__):
            continue
        n_labels = None if hasattr(config, "text_config") else getattr(config, "num_labels", None)
        heads.append(DetectionHead(n_labels, getattr(config, "use_focal_loss", True)))
    return tuple(heads)


def activation_of(heads: Sequence[DetectionHead], n_logits: int) -> Activation | None:
    """How logits of so many columns become probabilities; None where no head has as many.

    A column beyond the labels is the no-object class of a softmax.
    """
    for head in heads:
        if head.n_labels is None:
            return "sigmoid"
        if n_logits in (head.n_labels, head.n_labels + 1):
            return "sigmoid" if head.focal_loss and n_logits == head.n_labels else "softmax"
    return None


def detections(output: Any, size: tuple[int, ...] | None, activation: Activation | None = None) -> list[Detections]:
    """What a detector returned for each sample.

    `size`: of the model's input, for boxes given as parts of it. `activation`: see `Box`; for class logits only.
    """
    if isinstance(output, list | tuple) and output and all(_is_listed(one) for one in output):
        return [_listed(one) for one in output]
    boxes, logits = (part_of(output, name) for name in ("pred_boxes", "logits"))
    if boxes is None or logits is None:
        raise TargetError(
            f"a Box asks a detector: a list of dicts with boxes, labels and scores, or an output with pred_boxes and "
            f"logits; {type(output).__name__} came"
        )
    if size is None:
        raise TargetError("a Box of an output whose boxes are parts of the input must be settled by a first pass")
    if activation is None:
        raise TargetError(
            f"the {plural(logits.shape[-1], 'class logit')} of each box may or may not end with a no-object "
            "class, and the model has "
            f"no Hugging Face config that decides: pass Box(..., activation='softmax') where the last one is 'no object', "
            f"else activation='sigmoid'"
        )
    height, width = size
    centre, extent = boxes.unflatten(2, (2, 2)).unbind(2)
    corners = torch.cat([centre - extent / 2, centre + extent / 2], 2) * boxes.new_tensor([width, height] * 2)
    scores = full_precision(logits)
    chances = scores.sigmoid() if activation == "sigmoid" else scores.softmax(2)[..., :-1]
    return [Detections(*pair) for pair in zip(corners, chances, strict=True)]


def overlap(boxes: Tensor, corners: Sequence[float]) -> Tensor:
    """(D,4), one box -> (D,): area in common over area of both."""
    own = boxes.new_tensor(list(corners))
    low, high = torch.maximum(boxes[:, :2], own[:2]), torch.minimum(boxes[:, 2:], own[2:])
    common = (high - low).clamp(min=0).prod(1)
    both = (boxes[:, 2:] - boxes[:, :2]).prod(1) + (own[2:] - own[:2]).prod() - common
    return torch.where(both > 0, common / both, 0)


def _listed(one: Mapping[str, Tensor]) -> Detections:
    """Of torchvision: one class and its score a detection, here one row (K,) each."""
    scores, labels = one["scores"], one["labels"].long()
    classes = int(labels.max()) + 1 if len(labels) else 1
    chances = scores.new_zeros(len(scores), classes)
    return Detections(one["boxes"], chances.scatter(1, labels[:, None], scores[:, None]))


def _is_listed(one: object) -> bool:
    return isinstance(one, Mapping) and {"boxes", "labels", "scores"} <= set(one)
