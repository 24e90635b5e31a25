"""Small models of Ultralytics with random weights, whose scores depend on the image."""

import warnings
from functools import cache

import numpy as np
import torch
from PIL import Image

from camscope import Preprocess, load_model
from camscope.loaded_model_metadata_and_weight_digest import get_loaded_model_metadata

SIDE = 96
RTDETR = "yolov8n-rtdetr"


@cache
def image():
    """(96,128,3): smooth blobs of color, unlike noise, so that the levels differ."""
    coarse = np.random.default_rng(3).integers(0, 256, (9, 12, 3), np.uint8)
    return np.asarray(Image.fromarray(coarse).resize((128, 96), Image.Resampling.BICUBIC))


def make_lively(network):
    """Give BatchNorm the statistics of an image, and the class scores a spread: as they come, all are nearly the same."""
    for module in network.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.momentum = None
            module.reset_running_stats()
    head, x = network.model[-1], Preprocess.letterbox(SIDE)(image())[0][None]
    is_rtdetr = type(head).__name__ == "RTDETRDecoder"
    last = [level[-1] for name in ("cv3", "one2one_cv3") for level in getattr(head, name, ())]
    sides = [level[-1] for name in ("cv2", "one2one_cv2") for level in getattr(head, name, ())]
    last += [*head.dec_score_head, head.enc_score_head] if is_rtdetr else []
    kept = []
    handles = [layer.register_forward_hook(lambda *args: kept.append((args[0], args[2]))) for layer in last + sides]
    with torch.no_grad():
        for mlp in (*head.dec_bbox_head, head.enc_bbox_head) if is_rtdetr else ():
            torch.nn.init.normal_(mlp.layers[-1].weight, std=0.02)
        for layer in last + sides:
            torch.nn.init.normal_(layer.weight, std=0.1)
        network.train()
        head.train(not is_rtdetr)
        network.predict(torch.cat([x, x.flip(3), 1 - x, x.flip(2)]))
        network.eval()
        kept.clear()
        network.predict(x)
        for layer, output in kept:
            is_side = any(layer is other for other in sides)
            layer.weight *= (0.3 if is_side else 1) / output.std()
            layer.bias.fill_(1.0 if is_side else -1.5)
            if is_side and head.reg_max > 1:  # the most probable distance is one or two cells
                layer.bias.copy_(-(torch.arange(head.reg_max) - 1.4).abs().repeat(4) * 2)
    for handle in handles:
        handle.remove()


@cache
def model_object(name):
    """A `YOLO` object with random weights, whose scores depend on the image."""
    import ultralytics

    kind = ultralytics.RTDETR if name == RTDETR else ultralytics.YOLO
    torch.manual_seed(0)
    made = kind(f"{name}.yaml")
    make_lively(made.model)
    return made


def predictions(made, **settings):
    """What the package's own `predict` finds: boxes (D,4) on the image, scores (D,), classes (D,)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = made.predict(
            np.ascontiguousarray(image()[..., ::-1]), imgsz=SIDE, conf=0.05, max_det=100, verbose=False, **settings
        )[0]
    found = result.boxes if result.boxes is not None else result.obb
    return found.xyxy.clone(), found.conf.clone(), found.cls.long().clone()


def preprocess(name):
    return (
        get_loaded_model_metadata(load_model(model_object(name))).preprocess
        if name == RTDETR
        else Preprocess.letterbox(SIDE)
    )


def rows_on_image(name):
    """Boxes (A,4) on the image and probabilities (A,K), from the wrapper."""
    model = load_model(model_object(name)).eval()
    if name == RTDETR:
        way = Preprocess(resize=(SIDE, SIDE), mean=(0,) * 3, std=(1,) * 3, interpolation="opencv-bilinear")
    else:
        way = Preprocess.letterbox(SIDE)
    x, place = way(image())
    with torch.no_grad():
        rows = model(x[None])
    ends = [place.to_image(rows.boxes[0, :, [column + 1, column]].numpy()) for column in (0, 2)]
    boxes = torch.tensor(np.concatenate([end[:, ::-1] for end in ends], 1))
    return boxes, rows.probabilities[0]


def pick_box(name, stride):
    """A row of a level with a moderate score: its box, its class, and its number."""
    x, _ = preprocess(name)(image())
    with torch.no_grad():
        rows = load_model(model_object(name)).eval()(x[None])
    boxes = rows.boxes[0]
    is_inside = (boxes > -SIDE / 2).all(1) & (boxes < SIDE * 1.5).all(1) & (boxes[:, 2:] - boxes[:, :2] > 4).all(1)
    middle = (boxes[:, :2] + boxes[:, 2:]) / 2
    is_inside &= ((middle > 16) & (middle < 60)).all(1)
    of_level = ((rows.strides[0] == stride) & is_inside).nonzero()[:, 0]
    scores, labels = rows.probabilities[0, of_level].max(1)
    place = int((scores - 0.6).abs().argmin())
    return rows.boxes[0, of_level[place]].tolist(), int(labels[place]), int(of_level[place])
