"""YOLO and RT-DETR of Ultralytics: their rows before suppression, and the levels of their neck as one layer.

Ultralytics is under the AGPL-3.0. It is imported only if a model of it is loaded.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from camscope.errors import InputError, ModelError, WeightsError
from camscope.images.preprocess import OPENCV_BILINEAR, Preprocess
from camscope.loaded_model_metadata_and_weight_digest import LoadedModelMetadata
from camscope.models.checkpoint import (
    RANDOM_WEIGHTS,
    WeightsSource,
    fixed_seed_scope,
    format_model_source,
    load_state_dict_strictly,
    read_state_dict,
)
from camscope.models.ultralytics_checkpoint import EXTRA, build_from_yaml, read_checkpoint
from camscope.optional_packages import require
from camscope.targets import BestBox, DetectionRows

YAML_SUFFIXES = (".yaml", ".yml")
DEFAULT_SIDE, DEFAULT_CLASSIFICATION_SIDE = 640, 224
MIN_PADDING_MULTIPLE = 32  # of Ultralytics
STATE_OF_RTDETR = ("anchors", "valid_mask", "shapes")  # attributes that a forward pass of its decoder sets


class NeckLevels(nn.Module):
    """Join the levels of a neck on the grid of the finest: (N,K_l,h_l,w_l) for each level -> (N,sum of K_l,h,w).

    Each cell of a coarse level is repeated. The head gets the mean of the repeated cells, which is the cell itself. So the
    gradient of a box lies at the level that predicts it, spread over the repeated cells, and is zero at the others.
    """

    returns_channels_first = True

    def forward(self, levels: Sequence[Tensor]) -> Tensor:
        """Join the levels, of which the first is the finest."""
        size = levels[0].shape[2:]
        return torch.cat([levels[0], *(F.interpolate(level, size=size, mode="nearest") for level in levels[1:])], 1)


class UltralyticsDetector(nn.Module):
    """A detector of Ultralytics that converts images (N,C,H,W) to `DetectionRows`: all rows before suppression or top-k.

    The model inside is not changed. Its layers have the names that they have in a `YOLO` object, `model.model.16`. The
    layer `neck` holds the levels that the head reads.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model: Any = model
        self.neck = NeckLevels()

    def forward(self, images: Tensor) -> DetectionRows:
        """Predict the rows (N,A) of images (N,C,H,W) with values from 0 to 1."""
        head, levels = self.model.model[-1], self._compute_levels(images)
        joined = self.neck(levels)
        parts = joined.split([level.shape[1] for level in levels], 1)
        sizes = [tuple(level.shape[2:]) for level in levels]
        inputs = [
            F.avg_pool2d(part, (sizes[0][0] // size[0], sizes[0][1] // size[1])) if size != sizes[0] else part
            for part, size in zip(parts, sizes, strict=True)
        ]
        if type(head).__name__ == "RTDETRDecoder":
            return _predict_queries(head, inputs, images)
        return _predict_cells(head, inputs)

    def _compute_levels(self, images: Tensor) -> list[Tensor]:
        """Run all layers before the head. Return the maps that the head reads, finest first."""
        multiple, (height, width) = int(max(self.model.stride)), images.shape[2:]
        if height % multiple or width % multiple:
            raise InputError(f"the input is {height}x{width}; expected sides that are multiples of {multiple}")
        x: Any = images
        outputs: list[Any] = []
        *layers, head = self.model.model
        for layer in layers:
            x = layer(_select_inputs(layer.f, x, outputs))
            outputs.append(x if layer.i in self.model.save else None)
        levels: list[Tensor] = _select_inputs(head.f, x, outputs)
        return levels


class UltralyticsClassifier(nn.Module):
    """A classifier of Ultralytics: images (N,C,H,W) to logits (N,K), in place of probabilities."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model: Any = model

    def forward(self, images: Tensor) -> Tensor:
        """Compute the logits (N,K) of images (N,C,H,W) with values from 0 to 1."""
        output = self.model(images)
        logits: Tensor = output[1] if isinstance(output, tuple) else output
        return logits


def load_yolo_model_and_metadata(
    name: str, weights: WeightsSource, *, trust_code: bool = False
) -> tuple[nn.Module, LoadedModelMetadata]:
    """Load a model of Ultralytics: a checkpoint FILE.pt, or NAME.yaml with random weights or the weights of a file."""
    require("ultralytics", extra=EXTRA)
    source = format_model_source(f"yolo:{name}", weights)
    if name.endswith(YAML_SUFFIXES):
        with fixed_seed_scope():
            model = build_from_yaml(name)
        if weights is not None and weights != RANDOM_WEIGHTS:
            load_state_dict_strictly(model, read_state_dict(weights), weights)
        return wrap_yolo_model_and_build_metadata(model, source)
    if not name.endswith(".pt"):
        raise ModelError(f"yolo:{name}: expected a checkpoint FILE.pt, or NAME.yaml")
    if weights is not None:
        raise WeightsError(f"yolo:{name} has its own weights; omit weights=, or pass yolo:NAME.yaml")
    return wrap_yolo_model_and_build_metadata(read_checkpoint(name, trust_code=trust_code), source)


def is_ultralytics_object(model: object) -> bool:
    """Return whether an object is a `YOLO` or `RTDETR` object of Ultralytics, without importing the package."""
    return any(cls.__module__ == "ultralytics.engine.model" for cls in type(model).__mro__)


def wrap_yolo_model_and_build_metadata(model: Any, source: str | None = None) -> tuple[nn.Module, LoadedModelMetadata]:
    """Wrap a `YOLO` object, or the module inside of it, for explanations. The object stays unchanged.

    Args:
        model: The object or module.
        source: Text that loads the model again. None for an object that the caller made.

    Returns:
        The wrapper, and its model_metadata.

    Raises:
        ModelError: The model is of an unsupported task, or has been exported.

    """
    heads = require("ultralytics.nn.modules.head", extra=EXTRA)
    network: Any = model.model if is_ultralytics_object(model) else model
    if not hasattr(network, "modules"):
        raise ModelError(
            f"the model {network!r:.80} is exported, and has no layers; pass the YOLO object of its FILE.pt"
        )
    head, names = network.model[-1], _get_class_names(network)
    source = source or f"a {type(network).__name__} of Ultralytics"
    side, channels = _get_side(network), getattr(network, "yaml", {}).get("channels", 3)
    if isinstance(head, heads.Classify):
        preprocess = Preprocess(resize=side, crop=side, mean=(0.0,) * 3, std=(1.0,) * 3)
        return UltralyticsClassifier(network), LoadedModelMetadata(source, preprocess, names)
    is_rtdetr = isinstance(head, heads.RTDETRDecoder)
    is_open_vocabulary = isinstance(head, (heads.WorldDetect, heads.YOLOEDetect))
    if is_open_vocabulary or not (is_rtdetr or isinstance(head, heads.Detect)):
        raise ModelError(
            f"{type(network).__name__} of Ultralytics has the head {type(head).__name__}; expected a model that detects, "
            "segments, poses, classifies or has oriented boxes"
        )
    if is_rtdetr:
        shape = (side, side) if isinstance(side, int) else side
        preprocess = Preprocess(resize=shape, mean=(0.0,) * 3, std=(1.0,) * 3, interpolation=OPENCV_BILINEAR)
    else:
        multiple = max(int(max(network.stride)), MIN_PADDING_MULTIPLE)
        preprocess = Preprocess.letterbox(side, multiple, channels)
    return UltralyticsDetector(network), LoadedModelMetadata(
        source, preprocess, names, "neck", build_class_target=BestBox
    )


def _get_class_names(network: Any) -> tuple[str, ...] | None:
    """Return the class names. Return None if all names are numbers, as in an untrained model."""
    names = getattr(network, "names", None) or {}
    texts = [str(names[key]) for key in sorted(names)] if isinstance(names, dict) else list(map(str, names))
    return tuple(texts) if texts and not all(map(str.isdecimal, texts)) else None


def _get_side(network: Any) -> int | tuple[int, int]:
    """Return the side or (height, width) of the input with which the model was trained."""
    args = getattr(network, "args", None) or {}
    side = args.get("imgsz") if isinstance(args, dict) else getattr(args, "imgsz", None)
    if isinstance(side, list | tuple):
        return (int(side[0]), int(side[-1])) if len(set(side)) > 1 else int(side[0])
    default = DEFAULT_CLASSIFICATION_SIDE if type(network).__name__ == "ClassificationModel" else DEFAULT_SIDE
    return int(side) if side else default


def _select_inputs(index: int | Sequence[int], previous: Any, outputs: Sequence[Any]) -> Any:
    """Return the input of a layer: the previous output for -1, or the outputs of earlier layers."""
    if isinstance(index, int):
        return previous if index == -1 else outputs[index]
    return [previous if number == -1 else outputs[number] for number in index]


def _predict_cells(head: Any, levels: list[Tensor]) -> DetectionRows:
    """Predict one row for each cell of the levels.
    An end-to-end head predicts by its one-to-one branch, if this branch is left.
    """
    boxes_module = require("ultralytics.utils.tal", extra=EXTRA)
    has_one_to_one_branch = getattr(head, "one2one_cv2", None) is not None
    raw = head.forward_head(levels, **(head.one2one if has_one_to_one_branch else head.one2many))
    anchors, strides = (part.transpose(0, 1) for part in boxes_module.make_anchors(levels, head.stride, 0.5))
    distances = head.dfl(raw["boxes"])
    if "angle" in raw:
        rotated = boxes_module.dist2rbox(distances, raw["angle"], anchors[None], dim=1) * strides
        boxes = _enclose_rotated_boxes(rotated, raw["angle"])
    else:
        boxes = boxes_module.dist2bbox(distances, anchors[None], xywh=False, dim=1) * strides
    probabilities = raw["scores"].sigmoid().transpose(1, 2)
    return DetectionRows(boxes.transpose(1, 2), probabilities, strides.expand(len(boxes), -1))


def _enclose_rotated_boxes(rotated: Tensor, angles: Tensor) -> Tensor:
    """Return the upright boxes (N,4,A) around rotated boxes (N,4,A) with centers, sizes and angles (N,1,A)."""
    center, (width, height) = rotated[:, :2], rotated[:, 2:].abs().split(1, 1)
    cosine, sine = angles.cos().abs(), angles.sin().abs()
    half = torch.cat([width * cosine + height * sine, width * sine + height * cosine], 1) / 2
    return torch.cat([center - half, center + half], 1)


def _predict_queries(head: Any, levels: list[Tensor], images: Tensor) -> DetectionRows:
    """Predict one row for each query of an RT-DETR decoder."""
    with _attributes_restored(head, STATE_OF_RTDETR):
        head.shapes = []  # anchors of an earlier pass may be of inference mode
        output = head(levels)
    boxes, logits = (part[-1] for part in (output if head.training else output[1])[:2])
    center, extent = boxes.unflatten(2, (2, 2)).unbind(2)
    height, width = images.shape[2:]
    corners = torch.cat([center - extent / 2, center + extent / 2], 2) * boxes.new_tensor([width, height] * 2)
    return DetectionRows(corners, logits.sigmoid(), corners.new_zeros(corners.shape[:2]))


@contextmanager
def _attributes_restored(module: nn.Module, names: Sequence[str]) -> Iterator[None]:
    """Restore attributes of a module at the end of the `with`. Remove attributes that the module did not have."""
    before = {name: vars(module)[name] for name in names if name in vars(module)}
    try:
        yield
    finally:
        for name in names:
            vars(module).pop(name, None)
        vars(module).update(before)
