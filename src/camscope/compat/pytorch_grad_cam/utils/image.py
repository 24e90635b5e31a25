"""Images and overlays, under the names of pytorch-grad-cam."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from camscope.errors import InputError
from camscope.optional_packages import require

Array = npt.NDArray[Any]
EPSILON = 1e-7


def preprocess_image(
    img: Array, mean: Sequence[float] = [0.5, 0.5, 0.5], std: Sequence[float] = [0.5, 0.5, 0.5]
) -> Tensor:
    """Convert an image (H,W,3) to a model input (1,3,H,W). Each channel is normalized with its mean and standard deviation."""
    x = torch.from_numpy(np.ascontiguousarray(img.transpose(2, 0, 1)))
    x = x.float() / 255 if x.dtype == torch.uint8 else x
    center, spread = (x.new_tensor(values).view(-1, 1, 1) for values in (mean, std))
    return ((x - center) / spread)[None]


def deprocess_image(img: Array) -> Array:
    """Convert an array to an image for display. The mean becomes 0.5, and the standard deviation becomes 0.1."""
    scaled = (img - img.mean()) / (img.std() + 1e-5) * 0.1 + 0.5
    return _to_bytes(scaled.clip(0, 1))


def show_cam_on_image(
    img: Array, mask: Array, use_rgb: bool = False, colormap: int = 2, image_weight: float = 0.5
) -> Array:
    """Overlay a map (H,W) on an image (H,W,3). Both are in 0..1. The result is uint8, and its brightest value is 255."""
    import cv2

    colored = cv2.applyColorMap(_to_bytes(mask), colormap)
    if use_rgb:
        colored = cv2.cvtColor(colored, cv2.COLOR_BGR2RGB)
    if np.max(img) > 1:
        raise InputError(f"the image goes up to {np.max(img):g}: pass float values in 0..1, as from img / 255")
    if not 0 <= image_weight <= 1:
        raise InputError(f"image_weight={image_weight}: expected a number from 0 to 1")
    blended = (1 - image_weight) * (np.float32(colored) / 255) + image_weight * img
    return _to_bytes(blended / blended.max())


def create_labels_legend(concept_scores: Array, labels: Mapping[int, str], top_k: int = 2) -> list[str]:
    """Return one text for each concept. Its lines are the `top_k` labels of the concept with their scores."""
    best = np.argsort(concept_scores, axis=1)[:, ::-1][:, :top_k]
    return [
        "\n".join(f"{','.join(labels[k].split(',')[:3])}:{scores[k]:.2f}" for k in row)
        for row, scores in zip(best, concept_scores, strict=True)
    ]


def show_factorization_on_image(
    img: Array,
    explanations: Array,
    colors: Sequence[Any] | None = None,
    image_weight: float = 0.5,
    concept_labels: Sequence[str] | None = None,
) -> Array:
    """Overlay the maps of concepts (C,H,W) on an image (H,W,3) in 0..1. The strongest concept of a pixel gives the color."""
    import cv2

    if colors is None:
        colormap = require("matplotlib", extra="metrics").colormaps["gist_rainbow"]
        colors = [colormap(place)[:3] for place in np.arange(0, 1, 1 / len(explanations))]
    strongest = explanations.argmax(axis=0)
    pixels = np.empty(img.shape, np.uint8)
    pixels[:] = _to_bytes(np.asarray(colors)[:, :3])[strongest]
    hsv = cv2.cvtColor(pixels, cv2.COLOR_RGB2HSV)
    hsv[..., 2] = _to_bytes(explanations.max(axis=0))
    colored = np.float32(cv2.cvtColor(hsv, cv2.COLOR_HSV2RGB)) / 255
    result = _to_bytes(img * image_weight + colored * (1 - image_weight))
    return result if concept_labels is None else np.hstack([result, _draw_legend(result, colors, concept_labels)])


def _draw_legend(image: Array, colors: Sequence[Any], labels: Sequence[str]) -> Array:
    """Draw a legend of the same size as the image. The text of a label has the color of the label."""
    from PIL import Image, ImageDraw, ImageFont

    height, width = image.shape[:2]
    legend = Image.new("RGB", (width, height))
    rows = sum(len(label.splitlines()) for label in labels) + len(labels)
    font = ImageFont.load_default(max(6, height // max(rows, 12)))
    lines = ImageDraw.Draw(legend)
    for i, (label, color) in enumerate(zip(labels, colors, strict=False)):
        fill = tuple(int(255 * float(part)) for part in color[:3])
        lines.text((5, i * height // len(labels)), label, fill=fill, font=font)
    return np.asarray(legend)


def scale_cam_image(cam: Any, target_size: Sequence[int] | None = None) -> Array:
    """Scale each map of (N,*s) to 0..1 by its minimum and maximum. Resize the maps to (W,H) or (W,H,D), as float32."""
    import cv2

    scaled = []
    for values in cam:
        shifted = values - np.min(values)
        image: Any = np.asarray(shifted / (EPSILON + np.max(shifted)), np.float32)
        if target_size is not None and image.ndim > 2:
            zoom = require("scipy.ndimage", extra="metrics").zoom
            image = zoom(image, np.asarray(target_size[::-1]) / image.shape)
        elif target_size is not None:
            image = cv2.resize(image, tuple(target_size))
        scaled.append(image)
    return np.asarray(scaled, np.float32)


def scale_accross_batch_and_channels(tensor: Array, target_size: Sequence[int]) -> Array:
    """Scale each channel of (N,K,h,w) to 0..1 by its minimum and maximum, and resize it."""
    n_samples, n_channels = tensor.shape[:2]
    scaled = scale_cam_image(tensor.reshape(-1, *tensor.shape[2:]), target_size)
    return scaled.reshape(n_samples, n_channels, *scaled.shape[1:])


def _to_bytes(values: Any) -> Array:
    return (255 * np.asarray(values)).astype(np.uint8)
