"""`Preprocess`: convert photos to a model's input, and record which part of the image the input shows."""

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from camscope.errors import PreprocessError
from camscope.geometry import Placement
from camscope.images.measure_callable_preprocess import CallablePreprocess
from camscope.images.preprocess_conversion import (
    convert_huggingface_processor,
    convert_timm_config,
    convert_torchvision_transform,
)
from camscope.images.scans.monai_preprocess import MonaiPreprocess, is_monai_object
from camscope.images.scans.scan_preprocess import ScanPreprocess
from camscope.plurals import plural
from camscope.read_untrusted_files import read_errors_converted

if TYPE_CHECKING:
    from PIL.Image import Image

Pixels = NDArray[np.uint8]
IMAGENET_STATISTICS = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
OPENCV_BILINEAR = "opencv-bilinear"
INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "box", "hamming", "lanczos", OPENCV_BILINEAR)
# larger images are resized channel by channel; rows converted to gray at a time
LARGE_IMAGE_PIXELS, ROWS_PER_GRAY_STRIP = 2**25, 256
MAX_SIDE = 2**16
LETTERBOX_GRAY = 114  # of Ultralytics
HUGGINGFACE_KEYS = {"image_mean", "do_normalize", "do_resize", "image_processor_type", "feature_extractor_type"}
FIELD_CHOICES = {
    "fit": ("stretch", "cover", "inside"),
    "rounding": ("even", "zero", "down"),
    "interpolation": INTERPOLATIONS,
    "channels": (1, 3),
}


@dataclass(frozen=True, kw_only=True)
class Preprocess:
    """Preprocessing of pixels (H,W,3) uint8 to a tensor (C,H,W) float32. The steps are resize, center crop and normalize.

    A call returns the tensor and its placement on the image.

    Args:
        mean: One number per channel, for the scaled values.
        std: One number per channel, for the scaled values.
        resize: Length of the shorter side, or (height, width).
        crop: Side or (height, width) of the center crop. Where it is larger than the image, `fill` surrounds the image.
        multiple: Pad each side with `fill` to a multiple of this number, instead of a crop. See `letterbox`.
        interpolation: A filter of Pillow, which is antialiased, or "opencv-bilinear", which is not.
        fit: How the image is resized to (height, width). "stretch" gives exactly that size. The others keep the
            proportions: with "cover" no side is shorter than requested, with "inside" no side is longer.
        rounding: How half of an odd crop margin is rounded: to "even" (torchvision, timm), towards "zero", or "down".
        fill: One uint8 value per channel.
        channels: 3 for RGB, 1 for gray by luminance.
        scale: Factor applied to pixel values.

    Raises:
        PreprocessError: A setting has an invalid value.

    >>> tensor, placement = Preprocess.from_preset("imagenet")(np.zeros((300, 400, 3), np.uint8))
    >>> tuple(tensor.shape), placement.image_size
    ((3, 224, 224), (300, 400))

    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    resize: int | tuple[int, int] | None = None
    crop: int | tuple[int, int] | None = None
    multiple: int | None = None
    interpolation: str = "bilinear"
    fit: Literal["stretch", "cover", "inside"] = "stretch"
    rounding: Literal["even", "zero", "down"] = "even"
    fill: tuple[int, ...] = (0, 0, 0)
    channels: int = 3
    scale: float = 1 / 255

    def __post_init__(self) -> None:
        for name, choices in FIELD_CHOICES.items():
            if (value := getattr(self, name)) not in choices:
                raise PreprocessError(f"{name}={value!r}; expected one of {', '.join(map(repr, choices))}")
        for name in ("mean", "std"):
            values = _parse_finite_numbers(getattr(self, name), name)
            if len(values) != self.channels:
                n_values = plural(len(values), "number")
                raise PreprocessError(f"{name} has {n_values} for {plural(self.channels, 'channel')}")
            object.__setattr__(self, name, values)
        _parse_finite_numbers([self.scale], "scale")
        _parse_finite_numbers(self.fill, "fill")
        if not all(self.std) or not self.scale:
            raise PreprocessError(f"std={self.std} and scale={self.scale}; expected numbers other than 0")
        for name in ("resize", "crop"):
            object.__setattr__(self, name, _parse_side_lengths(getattr(self, name), name))
        if self.multiple is not None and (
            self.crop is not None or not isinstance(self.multiple, int) or self.multiple < 1
        ):
            raise PreprocessError(
                f"multiple={self.multiple!r} with crop={self.crop}; expected a positive number and no crop"
            )
        object.__setattr__(self, "fill", tuple(self.fill)[: self.channels])
        if len(self.fill) != self.channels or not all(0 <= value <= 255 for value in self.fill):
            raise PreprocessError(f"fill={self.fill}; expected {plural(self.channels, 'number')} from 0 to 255")

    def __call__(self, pixels: Pixels) -> tuple[Tensor, Placement]:
        """Convert an image (H,W,3) uint8 to the model's input (C,H,W). Also return which part of the image the input shows."""
        from PIL import Image

        height, width = pixels.shape[:2]
        resized, start, placement = _plan_resize_and_crop(self, (height, width))
        if resized is not None and height * width > LARGE_IMAGE_PIXELS and self.interpolation != OPENCV_BILINEAR:
            image = self._resize_by_channel(pixels, resized)
        else:
            image = Image.fromarray(pixels)
            if self.channels == 1:
                image = image.convert("L")
            if resized is not None and self.interpolation != OPENCV_BILINEAR:
                image = image.resize(resized[::-1], Image.Resampling[self.interpolation.upper()])
            elif resized is not None and resized != (height, width):
                image = Image.fromarray(_resize_by_opencv(np.asarray(image), resized))
        if start is not None:
            rows, columns = placement.input_size
            canvas = Image.new(image.mode, (columns, rows), self.fill if self.channels == 3 else self.fill[0])
            canvas.paste(image, (-start[1], -start[0]))
            image = canvas
        return self._convert_to_normalized_tensor(image), placement

    def compute_resized_size(self, image_size: tuple[int, ...]) -> tuple[int, int]:
        """Return the size (H,W) that an image has after the resize step and before the crop.

        Args:
            image_size: (H,W) of the image.

        Returns:
            (H,W) in pixels.

        >>> Preprocess.from_preset("imagenet").compute_resized_size((300, 400))
        (256, 341)

        """
        height, width = image_size
        if self.resize is None:
            return height, width
        if isinstance(self.resize, int):
            # bit-exact with torchvision: multiply first, then truncate
            longer = int(self.resize * max(image_size) / min(image_size))
            return (self.resize, longer) if height <= width else (longer, self.resize)
        tall, wide = self.resize
        if self.fit == "stretch":
            return tall, wide
        ratio = (max if self.fit == "inside" else min)(height / tall, width / wide)
        return max(1, round(height / ratio)), max(1, round(width / ratio))

    def denormalize(self, tensor: Tensor) -> Pixels:
        """Convert the model's input (C,H,W) or (1,C,H,W) back to pixels (H,W,3) uint8.

        Args:
            tensor: (C,H,W) or (1,C,H,W).

        Returns:
            (H,W,3) uint8.

        Raises:
            PreprocessError: The tensor has another shape.

        >>> import torch
        >>> Preprocess.from_preset("imagenet").denormalize(torch.zeros(3, 2, 2))[0, 0].tolist()  # the mean color
        [124, 116, 104]

        """
        values_in = tensor.detach().cpu().double().reshape(tensor.shape[-3:])
        if values_in.shape[0] != self.channels:
            expected = plural(self.channels, "channel")
            raise PreprocessError(f"the tensor has shape {tuple(tensor.shape)}; expected {expected}")
        std, mean = (
            torch.from_numpy(_reshape_to_channel_axis(statistic)).double() for statistic in (self.std, self.mean)
        )
        values = (values_in * std + mean) / self.scale
        pixels = values.round().clamp(0, 255).to(torch.uint8).expand(3, -1, -1)
        return np.array(pixels.permute(1, 2, 0).numpy(), order="C")

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as a dictionary that JSON can store.

        Returns:
            The arguments of the constructor by name.

        >>> Preprocess.from_preset("imagenet").to_dict()["channels"]
        3

        """
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> Self:
        """Build a preprocessing from the dictionary that `to_dict` returns.

        Args:
            config: The dictionary.

        Returns:
            The preprocessing.

        Raises:
            PreprocessError: A key is unknown or missing.

        >>> preprocess = Preprocess.from_preset("imagenet")
        >>> Preprocess.from_dict(preprocess.to_dict()) == preprocess
        True

        """
        if unknown := config.keys() - {field.name for field in fields(cls)}:
            raise PreprocessError(f"the stored preprocessing has an unknown key {sorted(unknown)[0]!r}")
        if missing := {"mean", "std"} - config.keys():
            raise PreprocessError(f"the stored preprocessing lacks {sorted(missing)[0]!r}")
        values: dict[str, Any] = {k: tuple(value) if isinstance(value, list) else value for k, value in config.items()}
        return cls(**values)

    @classmethod
    def letterbox(cls, size: int | tuple[int, int], multiple: int | None = 32, channels: int = 3) -> Self:
        """Build the letterbox of YOLO: resize to fit inside `size`, pad with gray, and scale pixels to 0..1.

        Args:
            size: The longest side, or (height, width).
            multiple: Pad each side to a multiple of this number, which is the model's largest stride. None pads to `size`.
            channels: See `Preprocess`.

        Returns:
            The preprocessing. Its placement leaves out the padding.

        >>> tensor, placement = Preprocess.letterbox(640)(np.zeros((300, 400, 3), np.uint8))
        >>> tuple(tensor.shape), placement.to_image([[0, 0]]).tolist()
        ((3, 480, 640), [[0.0, 0.0]])

        """
        sides = (size, size) if isinstance(size, int) else (size[0], size[1])
        return cls(
            mean=(0.0,) * channels,
            std=(1.0,) * channels,
            resize=sides,
            crop=sides if multiple is None else None,
            multiple=multiple,
            interpolation=OPENCV_BILINEAR,
            fit="inside",
            fill=(LETTERBOX_GRAY,) * channels,
            channels=channels,
        )

    @classmethod
    def from_preset(cls, name: str) -> Self:
        """Build a preprocessing from the name of a preset, such as "imagenet".

        Args:
            name: Name of the preset.

        Returns:
            The preprocessing.

        Raises:
            PreprocessError: The name is unknown. The message lists all presets.

        >>> Preprocess.from_preset("imagenet").crop
        224

        """
        if name not in PRESETS:
            raise PreprocessError(f"there is no preset {name!r}; expected one of {', '.join(sorted(PRESETS))}")
        return cls(**PRESETS[name])

    @classmethod
    def from_torchvision(cls, transform: object) -> Self:
        """Build a preprocessing from `weights.transforms()` of a torchvision classification or segmentation model.

        Args:
            transform: The transform.

        Returns:
            The preprocessing.

        Raises:
            PreprocessError: The transform is of another kind.

        >>> from torchvision.models import ResNet18_Weights
        >>> Preprocess.from_torchvision(ResNet18_Weights.DEFAULT.transforms()).resize
        256

        """
        return cls(**convert_torchvision_transform(transform))

    @classmethod
    def from_timm(cls, config: object) -> Self:
        """Build a preprocessing from a timm model or its data configuration.

        Args:
            config: The model, or the dictionary of `timm.data.resolve_model_data_config`.

        Returns:
            The preprocessing.

        Raises:
            PreprocessError: A step is not supported.

        >>> config = {"input_size": (3, 32, 32), "interpolation": "bicubic", "mean": (0.5,) * 3, "std": (0.5,) * 3}
        >>> Preprocess.from_timm(config | {"crop_pct": 1.0, "crop_mode": "center"}).crop
        (32, 32)

        """
        with read_errors_converted("the timm configuration", PreprocessError):
            return cls(**convert_timm_config(config))

    @classmethod
    def from_huggingface(cls, processor: object) -> Self:
        """Build a preprocessing from a Hugging Face image processor or its configuration.

        The result equals `pixel_values` of the PIL backend. The torchvision backend has its own resampling, which differs
        by rounding.

        Args:
            processor: The processor, or its configuration as a dictionary.

        Returns:
            The preprocessing.

        Raises:
            PreprocessError: A step is not supported.

        >>> config = {"do_resize": True, "size": {"height": 32, "width": 32}, "resample": 2, "do_rescale": True}
        >>> config |= {"rescale_factor": 1 / 255, "do_normalize": True, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
        >>> Preprocess.from_huggingface(config).resize
        (32, 32)

        """
        with read_errors_converted("the configuration of the image processor", PreprocessError):
            return cls(**convert_huggingface_processor(processor))

    def _resize_by_channel(self, pixels: Pixels, size: tuple[int, int]) -> "Image":
        """Resize the channels of an image separately. This needs less memory."""
        from PIL import Image

        resampling = Image.Resampling[self.interpolation.upper()]
        if self.channels == 1:
            gray = np.empty(pixels.shape[:2], np.uint8)
            for top in range(0, len(pixels), ROWS_PER_GRAY_STRIP):
                rows = np.s_[top : top + ROWS_PER_GRAY_STRIP]
                gray[rows] = np.asarray(Image.fromarray(pixels[rows]).convert("L"))
            return Image.fromarray(gray).resize(size[::-1], resampling)
        planes = (Image.fromarray(np.ascontiguousarray(pixels[..., channel])) for channel in range(3))
        return Image.merge("RGB", [plane.resize(size[::-1], resampling) for plane in planes])

    def _compute_crop_start(self, surplus: int) -> int:
        """Return the index of the first pixel of a center crop.
        `surplus` is the length of the image minus the length of the crop.

        Both numbers are negative if the crop is longer than the image.
        """
        if self.rounding == "down":
            return surplus // 2
        return round(surplus / 2) if self.rounding == "even" and surplus > 0 else int(surplus / 2)

    def _convert_to_normalized_tensor(self, image: "Image") -> Tensor:
        """Scale the pixels, then subtract the mean and divide by the standard deviation."""
        values = np.asarray(image).reshape(image.height, image.width, self.channels).transpose(2, 0, 1)
        # division as in torchvision gives the same last bit; NumPy calls are cheaper than torch's
        scaled = values.astype(np.float32, order="C")
        scaled /= np.float32(1 / self.scale)
        scaled -= _reshape_to_channel_axis(self.mean)
        scaled /= _reshape_to_channel_axis(self.std)
        return torch.from_numpy(scaled)


class ResizeAndCropPlan(NamedTuple):
    """The size (H,W) after resizing, the first pixel of the crop, and the placement. None stands for no resize or no crop."""

    resized_size: tuple[int, int] | None
    crop_start: list[int] | None
    placement: Placement


@lru_cache(maxsize=256)
def _plan_resize_and_crop(preprocess: Preprocess, image_size: tuple[int, int]) -> ResizeAndCropPlan:
    """Plan the resize and crop steps for all images of one size (H,W)."""
    placement, resized, start = Placement.identity(image_size), None, None
    if preprocess.resize is not None:
        resized = preprocess.compute_resized_size(image_size)
        placement = placement.resized(resized)
    crop: int | tuple[int, ...] | None = preprocess.crop
    if preprocess.multiple is not None:
        crop = tuple(-(-length // preprocess.multiple) * preprocess.multiple for length in placement.input_size)
    if crop is not None:
        crop_size = (crop, crop) if isinstance(crop, int) else crop
        surplus = [length - crop for length, crop in zip(placement.input_size, crop_size, strict=True)]
        start = [preprocess._compute_crop_start(pixels) for pixels in surplus]
        placement = placement.cropped(start, crop_size)
    return ResizeAndCropPlan(resized, start, placement)


def _resize_by_opencv(pixels: Pixels, size: tuple[int, int]) -> Pixels:
    """Resize an image (H,W) or (H,W,3) bilinearly without antialiasing, as Ultralytics does."""
    import cv2

    return np.asarray(cv2.resize(pixels, size[::-1], interpolation=cv2.INTER_LINEAR), np.uint8)


@lru_cache(maxsize=64)
def _reshape_to_channel_axis(values: tuple[float, ...]) -> NDArray[np.float32]:
    return np.array(values, np.float32)[:, None, None]


PRESETS: dict[str, dict[str, Any]] = {"imagenet": {"resize": 256, "crop": 224, **IMAGENET_STATISTICS}}


def as_preprocess(value: object) -> Callable[[Any], Any]:
    """Convert a preprocessing of any supported kind to a function. The function returns (tensor, placement) for pixels.

    Args:
        value: A Preprocess, a ScanPreprocess (which takes scans), MONAI transforms (which take paths), the name of a
            preset, torchvision's `weights.transforms()`, a timm model or configuration, or a Hugging Face image
            processor or its configuration. Also any callable from a PIL image to a float tensor (C,H,W) or (1,C,H,W).

    Returns:
        A callable from pixels (H,W,3) uint8 to (tensor, placement). The placement of a custom callable is measured.
        A callable that is random or not affine has the placement None.

    Raises:
        PreprocessError: If the value describes no preprocessing.

    """
    if isinstance(value, Preprocess | CallablePreprocess | ScanPreprocess | MonaiPreprocess):
        return value
    if is_monai_object(value) and callable(value):
        return MonaiPreprocess(value)
    if isinstance(value, str):
        return Preprocess.from_preset(value)
    if isinstance(value, Mapping):
        if value.keys() & HUGGINGFACE_KEYS:
            return Preprocess.from_huggingface(value)
        return Preprocess.from_timm(value) if "input_size" in value else Preprocess.from_dict(value)
    if hasattr(value, "pretrained_cfg"):
        return Preprocess.from_timm(value)
    if hasattr(value, "image_mean") and hasattr(value, "to_dict"):
        return Preprocess.from_huggingface(value)
    if type(value).__module__ == "torchvision.transforms._presets" and hasattr(value, "resize_size"):
        return Preprocess.from_torchvision(value)
    if callable(value):
        return CallablePreprocess(value)
    raise PreprocessError(
        f"the preprocessing is a {type(value).__name__}; expected a Preprocess, the name of a preset "
        f"({', '.join(sorted(PRESETS))}), weights.transforms(), a timm or Hugging Face configuration, "
        "or a callable from a PIL image to a float tensor (C,H,W)"
    )


def _parse_finite_numbers(values: Any, name: str) -> tuple[float, ...]:
    with suppress(TypeError, ValueError, OverflowError):
        numbers = tuple(map(float, values))
        if all(map(math.isfinite, numbers)):
            return numbers
    raise PreprocessError(f"{name}={values!r:.80}; expected finite numbers")


def _parse_side_lengths(value: object, name: str) -> int | tuple[int, int] | None:
    """Return a size as one number, as height and width, or None. Raise a PreprocessError for any other value."""
    match value:
        case None:
            return None
        case int() if 0 < value <= MAX_SIDE and not isinstance(value, bool):
            return value
        case (int() as height, int() as width) if 0 < height <= MAX_SIDE and 0 < width <= MAX_SIDE:
            return height, width
    expected = f"a positive whole number up to {MAX_SIDE}, (height, width), or None"
    raise PreprocessError(f"{name}={value!r:.80}; expected {expected}")
