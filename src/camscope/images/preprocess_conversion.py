"""Convert preprocessing configurations of torchvision, timm and Hugging Face to the arguments of `Preprocess`."""

import math
from collections.abc import Mapping
from typing import Any

from camscope.errors import PreprocessError
from camscope.optional_packages import require

PreprocessFields = dict[str, Any]

ADVICE = 'pass preprocess=lambda image: processor(image, return_tensors="pt")["pixel_values"]'
# numbers of PIL's filters
PIL_FILTERS = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic", 4: "box", 5: "hamming"}

# Hugging Face: families whose processor follows its configuration, and those whose integer `size` is the shorter side
SUPPORTED_FAMILIES = {
    *("beit", "bit", "blip", "chineseclip", "clip", "convnext", "deit", "mobilenetv1", "mobilenetv2"),
    *("owlvit", "pvt", "segformer", "siglip", "vit", "vithybrid"),
}
SHORTER_SIDE_FAMILIES = {"bit", "chineseclip", "clip", "convnext", "mobilenetv1", "mobilenetv2", "vithybrid"}
SUPPORTED_KEYS = {
    *("do_resize", "size", "resample", "do_center_crop", "crop_size", "crop_pct", "do_rescale"),
    *("rescale_factor", "do_normalize", "image_mean", "image_std", "image_processor_type"),
    *("feature_extractor_type",),
}
# without effect for an RGB photo and a single tensor
IGNORED_KEYS = {
    *("do_convert_rgb", "do_reduce_labels", "reduce_labels", "processor_class", "_processor_class"),
    *("backend", "data_format", "input_data_format", "return_tensors", "device", "disable_grouping"),
    *("_valid_processor_keys",),
}


def convert_torchvision_transform(transform: Any) -> PreprocessFields:
    """Convert the result of torchvision's `weights.transforms()` to arguments of `Preprocess`."""
    kind = type(transform).__name__
    if kind not in {"ImageClassification", "SemanticSegmentation"} or not hasattr(transform, "resize_size"):
        raise PreprocessError(
            f"the transform is a {kind}; expected torchvision's ImageClassification or SemanticSegmentation"
        )
    return {
        "resize": _parse_torchvision_size(transform.resize_size),
        "crop": _parse_torchvision_size(getattr(transform, "crop_size", None)),
        "mean": tuple(transform.mean),
        "std": tuple(transform.std),
        "interpolation": transform.interpolation.value.removesuffix("-exact"),
    }


def convert_timm_config(config: Any) -> PreprocessFields:
    """Convert a timm model or its data configuration to arguments of `Preprocess`."""
    config = config if isinstance(config, Mapping) else _resolve_timm_config(config)
    if unknown := config.keys() - {"input_size", "interpolation", "mean", "std", "crop_pct", "crop_mode"}:
        advice = "see timm.data.resolve_model_data_config(model)"
        raise _build_unsupported_error(sorted(unknown)[0], config, advice, "timm configuration")
    channels, *size = _get_required_value(config, "input_size", "timm configuration")
    scaled = tuple(math.floor(side / (config.get("crop_pct") or 0.875)) for side in size)
    mean = tuple(_get_required_value(config, "mean", "timm configuration"))
    fields = {
        "crop": tuple(size),
        "mean": mean,
        "std": tuple(_get_required_value(config, "std", "timm configuration")),
        "interpolation": _get_required_value(config, "interpolation", "timm configuration"),
        "channels": channels,
    }
    match config.get("crop_mode") or "center":
        case "squash":
            return fields | {"resize": scaled}
        case "border":
            return fields | {"resize": scaled, "fit": "inside", "fill": tuple(round(255 * value) for value in mean)}
        case "center":
            return fields | ({"resize": scaled[0]} if scaled[0] == scaled[1] else {"resize": scaled, "fit": "cover"})
    raise _build_unsupported_error("crop_mode", config, "known: center, squash, border", "timm configuration")


def convert_huggingface_processor(processor: Any) -> PreprocessFields:
    """Convert a Hugging Face image processor or its configuration to arguments of `Preprocess`."""
    config = processor if isinstance(processor, Mapping) else processor.to_dict()
    name = str(config.get("image_processor_type") or config.get("feature_extractor_type") or "")
    family = name.removesuffix("Fast").removesuffix("Pil").removesuffix("ImageProcessor")
    family = family.removesuffix("FeatureExtractor").lower()
    if family and family not in SUPPORTED_FAMILIES:
        raise _build_unsupported_error("image_processor_type", {"image_processor_type": name}, ADVICE)
    for key in config.keys() - SUPPORTED_KEYS - IGNORED_KEYS:
        if config[key] not in (None, False):
            raise _build_unsupported_error(key, config, ADVICE)
    geometry = _convert_huggingface_resize_and_crop(config, family, _find_crop_margin_rounding(processor, name))
    return geometry | _convert_huggingface_normalization(config)


def _convert_huggingface_resize_and_crop(config: Mapping[str, Any], family: str, rounding: str) -> PreprocessFields:
    """Convert the resize and crop settings of a Hugging Face image processor to those of `Preprocess`."""
    fields: PreprocessFields = {"resize": None, "crop": None, "rounding": rounding}
    if config.get("do_resize", "size" in config):
        size, pct = _parse_size(config, "size", family in SHORTER_SIDE_FAMILIES), config.get("crop_pct")
        fields["resize"] = size
        number = int(_get_required_value(config, "resample", "image processor"))
        if number not in PIL_FILTERS:
            raise _build_unsupported_error("resample", config, f"known: {PIL_FILTERS}")
        fields["interpolation"] = PIL_FILTERS[number]
        if family == "convnext":
            fields |= _convert_convnext_resize_and_crop(config, size, pct)
        elif pct is not None:
            raise _build_unsupported_error("crop_pct", config, ADVICE)
    if config.get("do_center_crop", "crop_size" in config):
        if fields["crop"] is not None:
            raise _build_unsupported_error("do_center_crop", config, ADVICE)
        fields["crop"] = _parse_size(config, "crop_size", False)
    return fields


def _convert_convnext_resize_and_crop(
    config: Mapping[str, Any], size: int | tuple[int, int], crop_pct: float | None
) -> PreprocessFields:
    """Return the resize and crop steps of ConvNeXT. At sizes of 384 pixels or more, the image is stretched and not cropped."""
    if not isinstance(size, int):
        raise _build_unsupported_error("size", config, 'ConvNeXT needs {"shortest_edge": ...}')
    if size >= 384:
        return {"resize": (size, size)}
    if crop_pct is None:
        raise _build_unsupported_error("crop_pct", config, "ConvNeXT below 384 pixels needs it")
    return {"resize": int(size / crop_pct), "crop": size}


def _convert_huggingface_normalization(config: Mapping[str, Any]) -> PreprocessFields:
    scale = config.get("rescale_factor", 1 / 255) if config.get("do_rescale", True) else 1.0
    if not config.get("do_normalize", "image_mean" in config):
        return {"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0), "scale": scale}
    mean, std = (_get_required_value(config, key, "image processor") for key in ("image_mean", "image_std"))
    return {"mean": _expand_to_three_channels(mean), "std": _expand_to_three_channels(std), "scale": scale}


def _parse_size(config: Mapping[str, Any], key: str, is_shorter_side: bool) -> int | tuple[int, int]:
    """Read a size from a configuration. An int is the length of the shorter side. Otherwise the size is (height, width)."""
    size = _get_required_value(config, key, "image processor")
    if isinstance(size, int):
        return size if is_shorter_side else (size, size)
    if not isinstance(size, Mapping):  # SizeDict of the processor
        size = {name: getattr(size, name, None) for name in ("height", "width", "shortest_edge", "longest_edge")}
    match {name: value for name, value in size.items() if value is not None}:
        case {"height": height, "width": width, **remaining} if not remaining:
            return (int(height), int(width))
        case {"shortest_edge": edge, **remaining} if not remaining:
            return int(edge) if key == "size" else (int(edge), int(edge))
    raise _build_unsupported_error(key, config, 'known: {"height", "width"}, {"shortest_edge"}, or one number')


def _find_crop_margin_rounding(processor: object, processor_name: str) -> str:
    """Return how a processor rounds half of an odd crop margin: "zero" (toward 0, torchvision) or "down" (PIL)."""
    if isinstance(processor, Mapping):
        return "down" if processor_name.endswith("Pil") else "zero"
    backend = getattr(processor, "backend", "torchvision" if type(processor).__name__.endswith("Fast") else "pil")
    return "down" if backend == "pil" else "zero"


def _resolve_timm_config(model: object) -> Mapping[str, Any]:
    if not hasattr(model, "pretrained_cfg"):
        raise PreprocessError(f"received a {type(model).__name__}; expected a timm model or a timm data configuration")
    timm = require("timm.data", extra="hub")
    return dict(timm.resolve_model_data_config(model))


def _parse_torchvision_size(value: Any) -> int | tuple[int, ...] | None:
    if value is None or isinstance(value, int):
        return value
    return int(value[0]) if len(value) == 1 else tuple(value)


def _expand_to_three_channels(values: Any) -> tuple[float, ...]:
    return (float(values),) * 3 if isinstance(values, int | float) else tuple(values)


def _get_required_value(config: Mapping[str, Any], key: str, config_name: str) -> Any:
    if config.get(key) is None:
        raise PreprocessError(f"the {config_name} has no {key!r}, which the preprocessing needs")
    return config[key]


def _build_unsupported_error(
    key: str, config: Mapping[str, Any], advice: str, config_name: str = "image processor"
) -> PreprocessError:
    setting = f"{key}={config[key]!r:.80}"
    return PreprocessError(f"the {config_name} says {setting}, which Preprocess cannot express; {advice}")
