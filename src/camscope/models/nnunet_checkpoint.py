"""Read checkpoints of nnU-Net without executing code in them: tensors, plain containers, and numbers of NumPy."""

import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from camscope.errors import WeightsError, warn_caller
from camscope.images.files.redacted_errors_and_file_pseudonyms import ignore_warnings
from camscope.models.checkpoint import ALLOW_LIST_LOCK, check_tensors_dense_and_stored, describe_refusal
from camscope.plurals import plural
from camscope.read_untrusted_files import check_zip_sizes_and_checksums

NUMBER_KINDS = "bifu"  # booleans, integers and floats


class StoredNumberType:
    """Stand in for `numpy.dtype` while a checkpoint is read. It holds a name of numbers and nothing else."""

    def __init__(self, code: Any = "", *_: Any) -> None:
        self.code, self.byte_order = code, "="

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, tuple) and len(state) > 1 and state[1] in ("<", ">", "=", "|"):
            self.byte_order = state[1]


def read_stored_number(number_type: Any, content: Any = b"") -> float | int | bool:
    """Stand in for NumPy's constructor of scalars. Return a Python number from its bytes."""
    code = getattr(number_type, "code", None)
    if not isinstance(number_type, StoredNumberType) or not isinstance(code, str) or not isinstance(content, bytes):
        raise TypeError("a scalar of NumPy is no number")
    if len(code) > 3 or code[:1] not in NUMBER_KINDS:
        raise TypeError(f"a scalar of NumPy has the type {code[:20]!r}")
    dtype = np.dtype(f"{number_type.byte_order}{code}")
    if len(content) != dtype.itemsize:
        raise TypeError(f"a scalar of NumPy has {plural(len(content), 'byte')} in place of {dtype.itemsize}")
    number: float | int | bool = np.frombuffer(content, dtype)[0].item()
    return number


STAND_INS: list[Callable[..., Any] | tuple[Callable[..., Any], str]] = [
    (StoredNumberType, "numpy.dtype"),
    (read_stored_number, "numpy.core.multiarray.scalar"),
    (read_stored_number, "numpy._core.multiarray.scalar"),
]


def read_nnunet_checkpoint(file: Path, *, trust_code: bool) -> dict[str, Any]:
    """Read a checkpoint of nnU-Net v2 as a dictionary. All its tensors are on the CPU.

    Args:
        file: The file, such as `fold_0/checkpoint_final.pth`.
        trust_code: Whether the file may execute any code.

    Returns:
        The content, with the key `network_weights`.

    Raises:
        WeightsError: The file is no such checkpoint, or it names a class that is not on the allow-list.

    """
    if trust_code:
        warn_caller(f"{file} is read with trust_code: the code in it is executed")
    try:
        if zipfile.is_zipfile(file):
            check_zip_sizes_and_checksums(file)
        content = torch.load(file, map_location="cpu", weights_only=False) if trust_code else _load_restricted(file)
    except Exception as error:  # a malicious or broken file raises anything
        raise WeightsError(f"{file} {describe_refusal(file, error)}") from error
    weights = content.get("network_weights") if isinstance(content, Mapping) else None
    if not isinstance(weights, Mapping) or not all(isinstance(value, torch.Tensor) for value in weights.values()):
        raise WeightsError(f"{file} is no checkpoint of nnU-Net v2; expected tensors under the key network_weights")
    check_tensors_dense_and_stored(weights, file)
    return dict(content)


def _load_restricted(file: Path) -> Any:
    with ALLOW_LIST_LOCK, torch.serialization.safe_globals(STAND_INS), ignore_warnings(message_pattern=""):
        return torch.load(file, map_location="cpu", weights_only=True)
