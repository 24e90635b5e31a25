"""Settings of methods as text for results, without memory addresses or file names."""

import hashlib
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

SAFE_WORD_PATTERN = re.compile(r"[\w+-]{1,40}")  # a setting's word, but no path or file name


def describe_setting(value: Any) -> str:
    """Return the value of a setting as text. A tensor is described by its shape and a digest of its values."""
    if isinstance(value, list | tuple) and any(isinstance(item, Tensor) for item in value):
        return f"[{', '.join(map(describe_setting, value))}]"
    if not isinstance(value, Tensor):
        return format_without_address(value)
    if value.ndim == 0:
        return f"{float(value):g}"
    data = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes() if value.numel() else b""
    return f"tensor {tuple(value.shape)} {hashlib.sha256(data).hexdigest()[:8]}"


def format_without_address(value: object) -> str:
    """Return `str(value)` without memory addresses. Addresses would differ from process to process."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", str(value))


def is_number_or_word(value: Any) -> bool:
    """Whether the value of a setting is a number, a single word, or a list of numbers and words."""
    if isinstance(value, list | tuple):
        return all(map(is_number_or_word, value))
    return isinstance(value, bool | int | float | None) or bool(
        isinstance(value, str) and SAFE_WORD_PATTERN.fullmatch(value)
    )


def redact_parameters(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Replace the value of each setting that could hold a file name by its type and a digest. Keep numbers and single words."""
    return {
        name: value if is_number_or_word(value) else _format_type_and_digest(value)
        for name, value in parameters.items()
    }


def _format_type_and_digest(value: Any) -> str:
    return f"{type(value).__name__} {hashlib.sha256(format_without_address(value).encode()).hexdigest()[:8]}"
