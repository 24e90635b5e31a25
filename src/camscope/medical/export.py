"""One door to what viewers open."""

import os
from pathlib import Path
from typing import Any

from camscope.errors import InputError
from camscope.explanation import Explanation
from camscope.medical.dicom_export import require_highdicom
from camscope.medical.nifti_export import require_nibabel, to_nifti
from camscope.medical.parametric_map import to_parametric_map
from camscope.medical.secondary_capture import to_secondary_capture

EXPORT_KINDS = ("nifti", "pmap", "sc")


def require_packages(kind: str) -> None:
    """MissingExtraError where a package is not there that a kind is written with."""
    (require_nibabel if kind == "nifti" else require_highdicom)()


def export(
    explanation: Explanation,
    path: str | os.PathLike[str],
    kind: str,
    *,
    source: Any = None,
    profile: str = "research",
    overwrite: bool = False,
) -> Path:
    """Write a map as "nifti", as "pmap", a DICOM Parametric Map, or as "sc", a DICOM Secondary Capture.

    `source`: the scan that was explained; DICOM needs it, and `profile="clinical"`.
    """
    if kind == "nifti":
        return to_nifti(explanation, path, source=source, overwrite=overwrite)
    if kind not in EXPORT_KINDS:
        raise InputError(f"kind={kind!r}; expected one of {', '.join(EXPORT_KINDS)}")
    write = to_parametric_map if kind == "pmap" else to_secondary_capture
    if source is None and profile == "clinical":
        raise InputError(f'kind="{kind}" needs source=, the DICOM files that were explained')
    return write(explanation, source, path, profile=profile, overwrite=overwrite)
