"""Read the model's input from an image of any kind, or from a tensor that is the model's input."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from camscope.errors import CamscopeError, InputError, PreprocessError, Remedy
from camscope.explanation import PixelArray
from camscope.geometry import Placement
from camscope.pytree import format_argument, iter_argument_leaves, select_argument_rows
from camscope.unusual_tensors import (
    check_ordinary_tensor,
    describe_unusual_tensor,
    is_fake_mode_active,
    is_inside_transform,
)

if TYPE_CHECKING:
    from camscope.images.scans.scan import Scan

PreprocessFunction = Callable[[Any], Any]  # pixels, a scan or a path -> the input and its placement
HIDDEN_IMAGE_NOTE = "the picture is not shown: text may be part of it, as a name; allow it with allow_pixels"


@dataclass(frozen=True)
class ModelInput:
    """One input of the model (C,*S), with its placement on the original image and images to draw the map on."""

    x: Tensor
    placement: Placement | None
    name: str
    image: PixelArray | None
    model_input_image: PixelArray | None
    affine: NDArray[np.float64] | None = None  # (4,4) of a scan, from voxels to millimeters
    scan_steps: tuple[str, ...] = ()  # how a scan's stored numbers were changed
    flags: tuple[str, ...] = ()  # warnings about the image


@dataclass(frozen=True)
class ExtraInputs:
    """The inputs that a model takes in addition to the image, such as a row of a table or a second image."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for path, value in iter_argument_leaves(self.args, self.kwargs):
            if (kind := describe_unusual_tensor(value)) is not None and not kind.has_values:
                raise InputError(
                    f"the additional argument {format_argument(path)} of the model is {kind.description}: pass {kind.replacement}"
                )

    def select_rows(self, rows: Sequence[int], batch_size: int) -> "ExtraInputs":
        """Select the extra inputs of some samples of a batch.

        Tensors with `batch_size` rows are indexed by `rows`. Other values stay unchanged.
        """
        if list(rows) == list(range(batch_size)):
            return self
        index = torch.tensor(rows, device="cpu")
        return ExtraInputs(*select_argument_rows(self.args, dict(self.kwargs), index, batch_size))


NO_EXTRA_INPUTS = ExtraInputs()


def read_model_input(
    source: Any,
    preprocess: PreprocessFunction | None,
    model: nn.Module,
    device_and_dtype: tuple[torch.device, torch.dtype],
    *,
    frames_first: bool = False,
) -> ModelInput:
    """Read an image of any kind and preprocess it for the model. A float tensor is not preprocessed."""
    if isinstance(source, ModelInput):
        return source
    if isinstance(source, list | tuple) and source and all(isinstance(part, Tensor) for part in source):
        raise InputError(
            f"the image is a {type(source).__name__}; expected one image. Pass several images to explain_batch, or a bag of "
            f"instances as torch.stack(instances) with frames_first=True"
        )
    if isinstance(source, Tensor):
        check_input_tensor_is_ordinary(source)
    if isinstance(source, Tensor) and (
        source.dtype != torch.uint8 or (preprocess is None and _is_channels_first_image(source))
    ):
        x = _require_single_input(source, 3 if frames_first else infer_spatial_rank(model, source.shape))
        return _read_tensor(x.transpose(0, 1) if frames_first else x, preprocess)
    from camscope.images.files.redacted_errors_and_file_pseudonyms import pseudonymize_source
    from camscope.images.photo_reader import read_photo
    from camscope.images.scans.monai_preprocess import MonaiPreprocess
    from camscope.images.scans.scan import Scan
    from camscope.images.scans.scan_preprocess import ScanPreprocess
    from camscope.images.scans.scan_reader import is_safe_to_display, is_scan, read_scan

    if isinstance(preprocess, MonaiPreprocess) and isinstance(source, str | Path):
        x, place, affine = preprocess(source)
        is_visible, name = is_safe_to_display(Path(source)), pseudonymize_source(source)
        input_image, flags = (render_model_input(x, None), ()) if is_visible else (None, (HIDDEN_IMAGE_NOTE,))
        return ModelInput(x.to(*device_and_dtype), place, name, None, input_image, affine, flags=flags)
    if isinstance(source, Scan) or isinstance(preprocess, ScanPreprocess) or is_scan(source):
        return prepare_scan(read_scan(source), preprocess, device_and_dtype)
    photo = read_photo(source)
    x, placement = require_preprocess(preprocess, photo.name)(photo.pixels)
    input_image = render_model_input(x, preprocess)
    return ModelInput(x.to(*device_and_dtype), placement, photo.name, photo.pixels, input_image, flags=photo.flags)


def _read_tensor(x: Tensor, preprocess: PreprocessFunction | None) -> ModelInput:
    """Create the model's input from a tensor (C,*S). The placement comes from MONAI metadata, if the tensor has any."""
    from camscope.images.scans.monai_preprocess import is_monai_object, read_placement_and_affine, strip_metadata

    if is_monai_object(x):
        (place, affine), x = read_placement_and_affine(x), strip_metadata(x)
        return ModelInput(x, place, "tensor", None, render_model_input(x, None), affine)
    return ModelInput(x, Placement.identity(tuple(x.shape[1:])), "tensor", None, render_model_input(x, preprocess))


def check_input_tensor_is_ordinary(x: Tensor) -> None:
    """Raise InputError for a sparse, nested or otherwise unusual tensor. Also raise it inside a transform of `torch.func`."""
    if is_inside_transform():
        raise InputError(
            "torch.func (vmap, grad, jvp, functionalize) cannot transform the hooks and backward passes of camscope: "
            "call camscope outside of torch.func, with the whole batch (N,C,H,W)"
        )
    check_ordinary_tensor(x, "the input", "x", InputError)
    if is_fake_mode_active():
        raise InputError("FakeTensorMode is active, in which tensors have no values: call camscope outside of it")


def accepts_scans(preprocess: object) -> bool:
    """Whether a preprocessing takes medical scans instead of RGB pixels."""
    from camscope.images.scans.monai_preprocess import MonaiPreprocess
    from camscope.images.scans.scan_preprocess import ScanPreprocess

    return isinstance(preprocess, ScanPreprocess | MonaiPreprocess)


def prepare_scan(
    scan: "Scan", preprocess: Any, device_and_dtype: tuple[torch.device, torch.dtype], *, with_images: bool = True
) -> ModelInput:
    """Preprocess a scan for the model. The preprocessing may be one for scans or one for images.

    `with_images` says whether the result holds images to draw the map on.
    """
    from camscope.images.scans.monai_preprocess import MonaiPreprocess
    from camscope.images.scans.scan import convert_scan_to_display_pixels, convert_to_rgb_and_scaled_scan
    from camscope.images.scans.scan_preprocess import ScanPreprocess

    problem, fix = "", "pass preprocess=ScanPreprocess(...)"
    if isinstance(preprocess, MonaiPreprocess):
        problem = f"{scan.name}: MONAI's transforms load a file themselves, and this one is read already"
        fix = f"explain its path, or {fix}"
    elif preprocess is None and len(scan.shape) == 3:
        problem = f"no preprocessing is known for the volume {scan.name}"
    if problem:
        raise PreprocessError(problem, fix=fix, remedy=Remedy.SET_SCAN_PREPROCESS)
    scan_preprocess = require_preprocess(preprocess, scan.name)
    visible = with_images and scan.is_safe_to_display
    flags = scan.flags if scan.is_safe_to_display else (*scan.flags, HIDDEN_IMAGE_NOTE)
    placement: Placement | None
    if isinstance(scan_preprocess, ScanPreprocess):
        x, placement = _apply_preprocess(scan_preprocess, scan, scan.name)
        image = convert_scan_to_display_pixels(scan, scan_preprocess.window) if visible else None
        steps = (*scan.steps, *scan_preprocess.steps)
    else:
        pixels, display = convert_to_rgb_and_scaled_scan(scan)
        (x, placement), steps = _apply_preprocess(scan_preprocess, pixels, scan.name), display.steps
        image = pixels if visible else None
    input_image = render_model_input(x, preprocess) if visible else None
    return ModelInput(x.to(*device_and_dtype), placement, scan.name, image, input_image, scan.affine, steps, flags)


def _apply_preprocess(preprocess: PreprocessFunction, source: Any, name: str) -> Any:
    """Apply a preprocessing to a scan. An error names only the type of the cause, to hide patient data."""
    try:
        return preprocess(source)
    except Exception as error:
        cause = error.__cause__ if isinstance(error, CamscopeError) else error
        if cause is None or isinstance(cause, CamscopeError):
            raise
        raise PreprocessError(f"{name}: the preprocessing raised {type(cause).__name__}") from error


def require_preprocess(preprocess: PreprocessFunction | None, image_name: str) -> PreprocessFunction:
    """Return the preprocessing. For a missing preprocessing, raise a PreprocessError that names the image."""
    if preprocess is None:
        raise PreprocessError(
            f"no preprocessing is known for {image_name}",
            fix='pass preprocess=weights.transforms(), a camscope.Preprocess, the preset "imagenet" or any callable PIL image '
            "-> tensor; or pass a float tensor that is the model's input",
            remedy=Remedy.SET_PREPROCESS,
        )
    return preprocess


def infer_spatial_rank(model: nn.Module, shape: Sequence[int] | None = None) -> int:
    """Infer the number of spatial axes of the model's input from its convolutions. Without convolutions it is 2.

    `shape` is that of one input or of a batch of one. Without a shape, the largest rank of all convolutions is
    returned. Raise InputError if the shape and its channels fit convolutions of several ranks.
    """
    ranks: dict[int, set[int]] = {}
    for module in model.modules():
        if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
            ranks.setdefault(len(module.kernel_size), set()).add(module.in_channels)
    if not ranks:
        return 1 if shape is not None and len(shape) == 2 else 2
    if shape is None:
        return max(ranks)
    channels = {rank: shape[0] for rank in ranks if len(shape) == rank + 1}
    channels |= {rank: shape[1] for rank in ranks if len(shape) == rank + 2 and shape[0] == 1}
    fitting = [rank for rank, count in channels.items() if count in ranks[rank]] or list(channels)
    if len(fitting) > 1:
        raise InputError(
            f"the tensor {tuple(shape)} may be one input or a batch of one, because {type(model).__name__} has convolutions of "
            f"{' and '.join(map(str, sorted(fitting)))} dimensions. Pass a batch (1,C,...) to "
            "attribute(x)"
        )
    return fitting[0] if fitting else max(ranks)


def _is_channels_first_image(x: Tensor) -> bool:
    """Whether a uint8 tensor has the channels first, (C,*S) or (1,C,*S), and not last, (H,W,C)."""
    return x.ndim > 3 or (x.ndim == 3 and (x.shape[0] in (1, 3, 4) or x.shape[2] not in (1, 3, 4)))


def _require_single_input(x: Tensor, n_spatial_axes: int) -> Tensor:
    """Return a tensor (C,*S) or (1,C,*S) as (C,*S). Raise InputError for any other shape or dtype."""
    if not x.is_floating_point() and x.dtype != torch.uint8:
        raise InputError(f"the tensor is {x.dtype}: pass a float tensor that is the model's input, or a uint8 image")
    if x.ndim == n_spatial_axes + 2 and x.shape[0] == 1:
        return x[0]
    if x.ndim != n_spatial_axes + 1:
        raise InputError(
            f"the tensor has shape {tuple(x.shape)}; expected one input (C,{','.join('DHW'[-n_spatial_axes:])}) or "
            f"(1,C,...); pass a batch to explain_batch"
        )
    return x


def render_model_input(x: Tensor, preprocess: PreprocessFunction | None) -> PixelArray | None:
    """Convert the model's input to an image (H,W,3): denormalize it if possible, otherwise scale it by its extremes.

    A signal becomes (C,L), with each channel scaled separately. A volume or a video becomes (D,H,W,3), from the first
    channel of a volume or the three channels of a video.
    """
    if x.is_meta or x.ndim not in (2, 3, 4):
        return None
    if x.ndim == 2:
        return _scale_to_uint8(x, x.amin(1, keepdim=True), x.amax(1, keepdim=True))
    background = getattr(preprocess, "denormalize", None)
    if background is not None and x.ndim == 3:
        return np.asarray(background(x), dtype=np.uint8)
    is_color = x.shape[0] == 3 or (x.shape[0] > 3 and x.ndim == 3)
    channels = x[:3] if is_color else x[:1].expand(3, *x.shape[1:])
    return np.ascontiguousarray(np.moveaxis(_scale_to_uint8(channels, channels.amin(), channels.amax()), 0, -1))


def _scale_to_uint8(x: Tensor, low: Tensor, high: Tensor) -> PixelArray:
    """Scale values from the range `low`..`high` to 0..255. If all values are equal, return 128."""
    values, low, high = (tensor.detach().float().cpu().nan_to_num(0.0, 0.0, 0.0) for tensor in (x, low, high))
    scaled = torch.where(high > low, (values - low) * 255 / (high - low), 128)
    return np.asarray(scaled.round().clamp(0, 255).to(torch.uint8).numpy())
