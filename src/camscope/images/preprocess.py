"""The way from a photograph into a model, which knows where each input pixel came from."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from camscope.errors import PreprocessError
from camscope.geometry import Placement
from camscope.images.callable_preprocess import Probed
from camscope.images.preprocess_configs import huggingface_fields, timm_fields, torchvision_fields
from camscope.images.scans.monai import MonaiTransforms, of_monai
from camscope.images.scans.scan_preprocess import ScanPreprocess
from camscope.plurals import plural

if TYPE_CHECKING:
    from PIL.Image import Image

Pixels = NDArray[np.uint8]
IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "box", "hamming", "lanczos")
LARGE, ROWS = 2**25, 256  # pixels of an image whose channels are resized one after the other; rows made gray at a time
CHOICES = {
    "fit": ("stretch", "cover", "inside"),
    "rounding": ("even", "zero", "down"),
    "interpolation": INTERPOLATIONS,
    "channels": (1, 3),
}


@dataclass(frozen=True, kw_only=True)
class Preprocess:
    """Pixels (H,W,3) uint8 -> (tensor (C,H,W) float32, Placement): grey, resize, centre crop, scale, normalise.

    `mean`, `std`: one number for each channel, of the scaled values.
    `resize`: the length of the shorter side, or the (height, width) wanted. `fit`: what becomes of the latter:
        "stretch" to exactly that, or keep the proportions and "cover" it, or lie "inside" it.
    `crop`: side or (height, width) of the centre crop; where it is larger than the image, `fill` (uint8, one for each
        channel) surrounds it. `rounding` of an odd margin's half: "even" (torchvision, timm), towards "zero" or "down".
    `interpolation`: one of Pillow's filters, which are always antialiased.
    `channels`: 3 for RGB, 1 for grey by luminance. `scale`: what a pixel value is multiplied by.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    resize: int | tuple[int, int] | None = None
    crop: int | tuple[int, int] | None = None
    interpolation: str = "bilinear"
    fit: Literal["stretch", "cover", "inside"] = "stretch"
    rounding: Literal["even", "zero", "down"] = "even"
    fill: tuple[int, ...] = (0, 0, 0)
    channels: int = 3
    scale: float = 1 / 255

    def __post_init__(self) -> None:
        for name, known in CHOICES.items():
            if (value := getattr(self, name)) not in known:
                raise PreprocessError(f"{name}={value!r}; expected one of {', '.join(map(repr, known))}")
        for name in ("mean", "std"):
            if len(values := tuple(map(float, getattr(self, name)))) != self.channels:
                raise PreprocessError(
                    f"{name} has {plural(len(values), 'number')} for {plural(self.channels, 'channel')}"
                )
            object.__setattr__(self, name, values)
        if not all(self.std) or not self.scale:
            raise PreprocessError(f"std={self.std} and scale={self.scale}: none of them may be 0")
        for name in ("resize", "crop"):
            object.__setattr__(self, name, _sides(getattr(self, name), name))
        object.__setattr__(self, "fill", tuple(self.fill)[: self.channels])
        if len(self.fill) != self.channels or not all(0 <= value <= 255 for value in self.fill):
            raise PreprocessError(f"fill={self.fill}; expected {plural(self.channels, 'number')} from 0 to 255")

    def __call__(self, pixels: Pixels) -> tuple[Tensor, Placement]:
        """(H,W,3) uint8 -> the model's input (C,H,W), and where it lies on the image."""
        from PIL import Image

        height, width = pixels.shape[:2]
        resized, start, place = _way(self, (height, width))
        if resized is not None and height * width > LARGE:
            image = self._resized_by_channel(pixels, resized)
        else:
            image = Image.fromarray(pixels)
            if self.channels == 1:
                image = image.convert("L")
            if resized is not None:
                image = image.resize(resized[::-1], Image.Resampling[self.interpolation.upper()])
        if start is not None:
            image = self._cropped(image, start, place.input_size)
        return self._normalised(image), place

    def resized(self, size: tuple[int, ...]) -> tuple[int, int]:
        """(H,W) of an image -> what it is resized to, before the crop."""
        height, width = size
        if self.resize is None:
            return height, width
        if isinstance(self.resize, int):
            # torchvision's way, to the letter: multiply first, then cut
            longer = int(self.resize * max(size) / min(size))
            return (self.resize, longer) if height <= width else (longer, self.resize)
        tall, wide = self.resize
        if self.fit == "stretch":
            return tall, wide
        ratio = (max if self.fit == "inside" else min)(height / tall, width / wide)
        return max(1, round(height / ratio)), max(1, round(width / ratio))

    def background(self, tensor: Tensor) -> Pixels:
        """(C,H,W) or (1,C,H,W), the model's input -> (H,W,3) uint8: the picture that the model sees."""
        plane = tensor.detach().cpu().double().reshape(tensor.shape[-3:])
        if plane.shape[0] != self.channels:
            raise PreprocessError(
                f"a tensor of shape {tuple(tensor.shape)}; expected {plural(self.channels, 'channel')}"
            )
        std, mean = (torch.from_numpy(_column(one)).double() for one in (self.std, self.mean))
        values = (plane * std + mean) / self.scale
        picture = values.round().clamp(0, 255).to(torch.uint8).expand(3, -1, -1)
        return np.array(picture.permute(1, 2, 0).numpy(), order="C")

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and words, for JSON."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Self:
        """The preprocessing that `to_dict` wrote."""
        if unknown := plain.keys() - {field.name for field in fields(cls)}:
            raise PreprocessError(f"a stored preprocessing has no {sorted(unknown)[0]!r}")
        if missing := {"mean", "std"} - plain.keys():
            raise PreprocessError(f"a stored preprocessing needs {sorted(missing)[0]!r}")
        values: dict[str, Any] = {k: tuple(value) if isinstance(value, list) else value for k, value in plain.items()}
        return cls(**values)

    @classmethod
    def preset(cls, name: str) -> Self:
        """The preprocessing of that name."""
        if name not in PRESETS:
            raise PreprocessError(f"no preprocessing is called {name!r}; there is: {', '.join(sorted(PRESETS))}")
        return cls(**PRESETS[name])

    @classmethod
    def from_torchvision(cls, transform: object) -> Self:
        """As `weights.transforms()` of a torchvision classification or segmentation model."""
        return cls(**torchvision_fields(transform))

    @classmethod
    def from_timm(cls, config: object) -> Self:
        """As `timm.data.create_transform` on `timm.data.resolve_model_data_config(model)`; or give the model."""
        return cls(**timm_fields(config))

    @classmethod
    def from_huggingface(cls, processor: object) -> Self:
        """As a Hugging Face image processor, given as such or by its configuration.

        Equal to its `pixel_values` with the PIL backend; the torchvision backend has its own resampling, which differs
        from Pillow's by rounding.
        """
        return cls(**huggingface_fields(processor))

    def _resized_by_channel(self, pixels: Pixels, size: tuple[int, int]) -> "Image":
        """The same image as from all channels at once, in a third of the memory."""
        from PIL import Image

        way = Image.Resampling[self.interpolation.upper()]
        if self.channels == 1:
            grey = np.empty(pixels.shape[:2], np.uint8)
            for top in range(0, len(pixels), ROWS):
                grey[top : top + ROWS] = np.asarray(Image.fromarray(pixels[top : top + ROWS]).convert("L"))
            return Image.fromarray(grey).resize(size[::-1], way)
        planes = (Image.fromarray(np.ascontiguousarray(pixels[..., channel])) for channel in range(3))
        return Image.merge("RGB", [plane.resize(size[::-1], way) for plane in planes])

    def _margin(self, surplus: int) -> int:
        """Where the crop starts; negative where it is larger than the image."""
        if self.rounding == "down":
            return surplus // 2
        return round(surplus / 2) if self.rounding == "even" and surplus > 0 else int(surplus / 2)

    def _cropped(self, image: "Image", start: Sequence[int], size: Sequence[int]) -> "Image":
        from PIL import Image

        height, width = size
        canvas = Image.new(image.mode, (width, height), self.fill if self.channels == 3 else self.fill[0])
        canvas.paste(image, (-start[1], -start[0]))
        return canvas

    def _normalised(self, image: "Image") -> Tensor:
        values = np.asarray(image).reshape(image.height, image.width, self.channels).transpose(2, 0, 1)
        # divided, not multiplied, as torchvision does: the same last bit; by NumPy, whose calls are the cheaper ones
        scaled = values.astype(np.float32, order="C")
        scaled /= np.float32(1 / self.scale)
        scaled -= _column(self.mean)
        scaled /= _column(self.std)
        return torch.from_numpy(scaled)


@lru_cache(maxsize=256)
def _way(steps: Preprocess, size: tuple[int, int]) -> tuple[tuple[int, int] | None, list[int] | None, Placement]:
    """Of an image (H,W): what it is resized to, where its crop starts, and where the input then lies; many are of one size."""
    place, resized, start = Placement.identity(size), None, None
    if steps.resize is not None:
        resized = steps.resized(size)
        place = place.resized(resized)
    if steps.crop is not None:
        side = (steps.crop, steps.crop) if isinstance(steps.crop, int) else steps.crop
        start = [steps._margin(have - want) for have, want in zip(place.input_size, side, strict=True)]
        place = place.cropped(start, side)
    return resized, start, place


@lru_cache(maxsize=64)
def _column(values: tuple[float, ...]) -> NDArray[np.float32]:
    return np.array(values, np.float32)[:, None, None]


PRESETS: dict[str, dict[str, Any]] = {"imagenet": {"resize": 256, "crop": 224, **IMAGENET}}


def as_preprocess(value: object) -> Callable[[Any], Any]:
    """Whatever says how a photograph enters a model, as one call: pixels (H,W,3) uint8 -> (tensor (C,H,W), placement).

    `value`: a Preprocess, a ScanPreprocess, which takes scans, MONAI's transforms, which take paths, the name of a preset,
    torchvision's `weights.transforms()`, a timm model or configuration, a Hugging Face image processor or its configuration,
    or any callable that takes a PIL image and returns a float tensor (C,H,W) or (1,C,H,W). Such a callable's placement is
    measured; it is None where it is random or not affine.
    """
    if isinstance(value, Preprocess | Probed | ScanPreprocess | MonaiTransforms):
        return value
    if of_monai(value) and callable(value):
        return MonaiTransforms(value)
    if isinstance(value, str):
        return Preprocess.preset(value)
    if isinstance(value, Mapping):
        return _from_mapping(value)
    if hasattr(value, "pretrained_cfg"):
        return Preprocess.from_timm(value)
    if hasattr(value, "image_mean") and hasattr(value, "to_dict"):
        return Preprocess.from_huggingface(value)
    if type(value).__module__ == "torchvision.transforms._presets" and hasattr(value, "resize_size"):
        return Preprocess.from_torchvision(value)
    if callable(value):
        return Probed(value)
    raise PreprocessError(
        f"the preprocessing is a {type(value).__name__}; expected a Preprocess, the name of a preset "
        f"({', '.join(sorted(PRESETS))}), weights.transforms(), a timm or Hugging Face configuration, "
        "or a callable from a PIL image to a float tensor (C,H,W)"
    )


def _from_mapping(config: Mapping[str, Any]) -> Preprocess:
    if config.keys() & {"image_mean", "do_normalize", "do_resize", "image_processor_type", "feature_extractor_type"}:
        return Preprocess.from_huggingface(config)
    return Preprocess.from_timm(config) if "input_size" in config else Preprocess.from_dict(config)


def _sides(value: object, name: str) -> int | tuple[int, int] | None:
    match value:
        case None:
            return None
        case int() if value > 0 and not isinstance(value, bool):
            return value
        case (int() as height, int() as width) if height > 0 and width > 0:
            return height, width
    raise PreprocessError(f"{name}={value!r}; expected a positive whole number, (height, width), or None")
