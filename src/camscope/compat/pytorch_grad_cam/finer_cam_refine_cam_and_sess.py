"""Methods of pytorch-grad-cam that run another CAM several times and combine its maps: Finer-CAM, RefineCAM and SESS."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from camscope.compat.pytorch_grad_cam.activations_and_gradients import to_device
from camscope.compat.pytorch_grad_cam.base_cam import Array, BaseCAM, OutputTarget
from camscope.compat.pytorch_grad_cam.cam_classes import GradCAM, GradCAMPlusPlus, Reshape
from camscope.compat.pytorch_grad_cam.utils.image import scale_cam_image
from camscope.compat.pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget, FinerWeightedTarget
from camscope.explainers.ensemble.sess import list_window_corners

DEFAULT_COMPARISON_CATEGORIES = (1, 2, 3)
BLUR_SIZE, BLUR_SIGMA = (11, 11), 5.0


class WindowCorner(NamedTuple):
    """The upper left corner of a window: column x and row y."""

    x: int
    y: int


class WindowPlace(NamedTuple):
    """The upper left corner of a window in a scaled image, and the width and height of that image."""

    x: int
    y: int
    image_width: int
    image_height: int


class FinerCAM:
    """Finer-CAM: another CAM, applied to the difference between a class and the classes with the nearest scores."""

    def __init__(
        self,
        model: nn.Module,
        target_layers: Sequence[nn.Module],
        reshape_transform: Reshape | None = None,
        base_method: Callable[..., BaseCAM] = GradCAM,
    ) -> None:
        self.base_cam = base_method(model, target_layers, reshape_transform)
        self.compute_input_gradient = self.base_cam.compute_input_gradient
        self.uses_gradients = self.base_cam.uses_gradients

    def __call__(self, *args: Any, **kwargs: Any) -> Array:
        """Return the maps that `forward` computes."""
        return self.forward(*args, **kwargs)

    def forward(
        self,
        input_tensor: Tensor,
        targets: Sequence[OutputTarget] | None = None,
        eigen_smooth: bool = False,
        alpha: float = 1,
        comparison_categories: Sequence[int] | None = None,
        target_idx: int | None = None,
    ) -> Array:
        """Return the maps (N,H,W) of an input.

        Args:
            input_tensor: The model's input.
            targets: Targets that replace the comparison.
            eigen_smooth: See `BaseCAM`.
            alpha: The weight of the other classes.
            comparison_categories: Ranks of the other classes, sorted by how near their scores are. Default: 1, 2 and 3.
            target_idx: The class. Default: the class with the highest score of each sample.

        """
        ranks = list(comparison_categories or DEFAULT_COMPARISON_CATEGORIES)

        def choose_targets(output: Tensor) -> list[OutputTarget]:
            chosen: list[OutputTarget] = []
            for scores in output.detach().cpu().numpy():
                main = int(scores.argmax()) if target_idx is None else target_idx
                order = np.argsort(np.abs(scores - scores[main]))
                chosen.append(FinerWeightedTarget(main, [int(order[rank]) for rank in ranks], alpha))
            return chosen

        self.base_cam.choose_targets = choose_targets  # type: ignore[method-assign] # of this object alone
        return self.base_cam.forward(input_tensor, targets, eigen_smooth)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> bool:
        """Return True for an IndexError, so that Python suppresses it. pytorch-grad-cam does the same."""
        return self.base_cam.__exit__(*details)


class RefineCAM:
    """RefineCAM: the product of another CAM's maps of several layers, scaled to 0..1."""

    def __init__(
        self,
        model: nn.Module,
        target_layers: Sequence[nn.Module],
        reshape_transform: Reshape | None = None,
        base_method: Callable[..., BaseCAM] = GradCAMPlusPlus,
        **kwargs: Any,
    ) -> None:
        self.base_cam_per_layer = [base_method(model, [layer], reshape_transform, **kwargs) for layer in target_layers]

    def __call__(self, *args: Any, **kwargs: Any) -> Array:
        """Return the maps that `forward` computes."""
        return self.forward(*args, **kwargs)

    def forward(
        self, input_tensor: Tensor, targets: Sequence[OutputTarget] | None = None, eigen_smooth: bool = False
    ) -> Array:
        """Return the maps (N,H,W). With `eigen_smooth`, average over augmented inputs, as pytorch-grad-cam does."""
        product = np.prod([cam(input_tensor, targets, eigen_smooth) for cam in self.base_cam_per_layer], axis=0)
        return scale_cam_image(product)


class SESS:
    """SESS: another CAM's maps of windows of the image at several scales, joined with the windows' scores as weights."""

    def __init__(
        self,
        model: nn.Module,
        target_layers: Sequence[nn.Module],
        reshape_transform: Reshape | None = None,
        base_method: Callable[..., BaseCAM] = GradCAM,
        scales: Sequence[int] | None = None,
        num_scales: int = 12,
        scale_step_ratio: float = 2 / 7,
        window_size: int | None = None,
        step_size: int | None = None,
        pre_filter_ratio: float = 0.0,
        theta: float = 0.0,
        pool: str = "mean",
        smooth: bool = True,
        use_softmax_scores: bool = True,
        batch_size: int = 32,
        **kwargs: Any,
    ) -> None:
        self.base_cam = base_method(model, target_layers, reshape_transform, **kwargs)
        self.device = self.base_cam.device
        self.scales, self.num_scales, self.scale_step_ratio = scales, num_scales, scale_step_ratio
        self.window_size, self.step_size, self.pre_filter_ratio = window_size, step_size, pre_filter_ratio
        self.theta, self.pool, self.smooth = theta, pool, smooth
        self.use_softmax_scores, self.batch_size = use_softmax_scores, batch_size

    def __call__(self, *args: Any, **kwargs: Any) -> Array:
        """Return the maps that `forward` computes."""
        return self.forward(*args, **kwargs)

    def forward(
        self, input_tensor: Tensor, targets: Sequence[OutputTarget] | None = None, eigen_smooth: bool = False
    ) -> Array:
        """Return the maps (N,H,W) of an input."""
        x = to_device(input_tensor, self.device)
        chosen = targets if targets is not None else [None] * len(x)
        maps = [self.forward_single_image(x[i : i + 1], chosen[i], eigen_smooth) for i in range(len(x))]
        return scale_cam_image(np.stack(maps))

    def forward_single_image(
        self, input_tensor: Tensor, target: OutputTarget | None, eigen_smooth: bool = False
    ) -> Array:
        """Return the map (H,W) of an input (1,C,H,W). The map is not scaled to 0..1 yet."""
        import cv2

        target = self.get_target(input_tensor) if target is None else target
        size = tuple(input_tensor.shape[2:])
        window = self.window_size or min(size)
        patches, places = self.collect_patches(input_tensor, window, self.step_size or window)
        scores = self.get_scores(patches, target)
        weights = scores / scores.max() if scores.max() > 0 else np.ones_like(scores)
        indices = np.sort(np.argsort(scores)[int(len(patches) * self.pre_filter_ratio) :])
        maps: list[Array] = []
        for part in np.array_split(indices, range(self.batch_size, len(indices), self.batch_size)):
            cams = self.base_cam(torch.cat([patches[i] for i in part]), [target] * len(part), eigen_smooth=eigen_smooth)
            maps += [
                self.paste_cam(cam * weights[i], places[i], (size[0], size[1]))
                for i, cam in zip(part, cams, strict=True)
            ]
        joined = self._join_window_maps(np.stack(maps))
        return cv2.GaussianBlur(joined, BLUR_SIZE, BLUR_SIGMA) if self.smooth else joined

    def get_scales(self, window_size: int) -> list[int]:
        """Return the sizes to which the image is resized: each is the length of its shorter side in pixels."""
        if self.scales is not None:
            return list(self.scales)
        return [window_size + i * round(window_size * self.scale_step_ratio) for i in range(self.num_scales)]

    def collect_patches(
        self, input_tensor: Tensor, window_size: int, step_size: int
    ) -> tuple[list[Tensor], list[WindowPlace]]:
        """Return windows (1,C,window,window) of the image at all scales, and the place of each window."""
        height, width = input_tensor.shape[2:]
        patches, places = [], []
        for scale in self.get_scales(window_size):
            shorter = min(height, width)
            grid = [scale if side == shorter else int(scale * side / shorter) for side in (height, width)]
            scaled = input_tensor
            if grid != [height, width]:
                scaled = F.interpolate(input_tensor, grid, mode="bilinear", align_corners=False, antialias=True)
            for left, top in sliding_window(grid[0], grid[1], step_size, window_size):
                patches.append(scaled[..., top : top + window_size, left : left + window_size])
                places.append(WindowPlace(left, top, grid[1], grid[0]))
        return patches, places

    def get_target(self, input_tensor: Tensor) -> OutputTarget:
        """Return a target for the class with the highest score."""
        with torch.no_grad():
            return ClassifierOutputTarget(int(self.base_cam.model(input_tensor)[0].argmax(-1)))

    def get_scores(self, patches: Sequence[Tensor], target: OutputTarget) -> Array:
        """Return the score of each window for the target. Negative scores become 0."""
        scores: list[float] = []
        for start in range(0, len(patches), self.batch_size):
            with torch.no_grad():
                output = self.base_cam.model(torch.cat(list(patches[start : start + self.batch_size])))
            rows = output.softmax(-1) if self.use_softmax_scores else output
            scores += [float(target(row)) for row in rows]
        return np.maximum(np.asarray(scores, np.float32), 0)

    def paste_cam(self, cam: Array, coordinates: WindowPlace, target_size: tuple[int, int]) -> Array:
        """Paste the map of a window into an empty map of the whole image. Then resize the map to (H,W)."""
        import cv2

        left, top, width, height = coordinates
        canvas = np.zeros((height, width), np.float32)
        canvas[top : top + cam.shape[0], left : left + cam.shape[1]] = cam
        return cv2.resize(canvas, target_size[::-1])

    def _join_window_maps(self, maps: Array) -> Array:
        """Join the maps of all windows. Take their maximum, or the mean of the values above `theta`."""
        if self.pool == "max":
            highest: Array = maps.max(axis=0)
            return highest
        counted = maps > self.theta
        mean: Array = np.where(counted, maps, 0).sum(0) / np.maximum(counted.sum(0), 1)
        return mean.astype(np.float32)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> bool:
        """Return True for an IndexError, so that Python suppresses it. pytorch-grad-cam does the same."""
        return self.base_cam.__exit__(*details)


def sliding_window(height: int, width: int, step_size: int, window_size: int) -> list[WindowCorner]:
    """Return the upper left corner of each window. The order is row by row."""
    corners = list_window_corners((height, width), (step_size,) * 2, (window_size,) * 2)
    return [WindowCorner(left, top) for top, left in corners]
