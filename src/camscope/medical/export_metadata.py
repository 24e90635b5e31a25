"""Metadata of an exported map: facts about model and method, never about a patient or a file."""

import math
import unicodedata
from typing import Any

from camscope.explainers.core.base_method import is_simple_setting
from camscope.explanation import STATUS_OK, Explanation
from camscope.medical.scan_space import ScanSpaceMap
from camscope.version import __version__


def build_sidecar(explanation: Explanation, scan_map: ScanSpaceMap) -> dict[str, Any]:
    """Build the JSON sidecar from an allow-list. Settings are included only if they are numbers or single words."""
    low, high = scan_map.value_range
    metadata = {
        "software": "camscope",
        "software_version": __version__,
        "method": explanation.method,
        "layer": explanation.layer,
        "target": explanation.target,
        "label": explanation.label,
        "score": explanation.score,
        "probability": explanation.probability,
        "status": explanation.status,
        "diagnostics": dict(explanation.diagnostics),
        "parameters": {key: value for key, value in explanation.parameters.items() if is_simple_setting(value)},
        "model_digest": explanation.model,
        "versions": dict(explanation.versions),
        "scan_steps": list(explanation.scan_steps),
        "notes": list(explanation.notes),
        "grid": list(explanation.grid),
        "input_size": list(explanation.input_size),
        "image_size": list(scan_map.values.shape),
        "range": [low, high],
        "unit": "of the score",
        "covered_share": float(scan_map.covered.mean()),
        "not_covered": "0; the file *_covered holds the mask" if not scan_map.covered.all() else "none",
        "meaning": "what the model's score depends on, not a diagnosis",
    }
    return {key: _replace_nonfinite(value) for key, value in metadata.items()}


def _replace_nonfinite(value: Any) -> Any:
    """Replace NaN and infinity, which JSON lacks, by None."""
    if isinstance(value, dict):
        return {key: _replace_nonfinite(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def describe_derivation(explanation: Explanation, scan_map: ScanSpaceMap) -> str:
    """Describe the map for DICOM's DerivationDescription: at most 1024 ASCII characters."""
    layer = f", layer {explanation.layer}" if explanation.layer else ""
    share = float(scan_map.covered.mean())
    parts = [
        f"Model attribution, not a diagnosis: {explanation.method_title}{layer}, target {format_target(explanation)}, "
        f"score {explanation.score:.6g}",
        f"raw values in units of the score, linear between the {' x '.join(map(str, explanation.grid))} cells of the map",
        f"model digest {explanation.model or 'unknown'}",
        f"camscope {__version__}",
    ]
    if share < 1:
        parts.append(f"the model saw {100 * share:.1f} % of the image; the rest is 0")
    if explanation.status != STATUS_OK:
        parts.append(f"flagged: {explanation.warning_text}")
    return to_dicom_ascii("; ".join(parts), 1024)


def format_target(explanation: Explanation) -> str:
    """Format the target as `281 (tabby)`."""
    return f"{explanation.target} ({explanation.label})" if explanation.target is not None else explanation.label


def format_title(explanation: Explanation) -> str:
    """Format method, layer and label as `Grad-CAM layer4: tabby`, at most 64 characters."""
    layer = f" {explanation.layer}" if explanation.layer else ""
    label = explanation.label if to_dicom_ascii(explanation.label, 64) else f"class {explanation.target}"
    return to_dicom_ascii(f"{explanation.method_title}{layer}: {label}", 64)


def to_dicom_ascii(text: str, max_length: int) -> str:
    """Convert text to ASCII, which every DICOM character set has, without the backslash, which separates values."""
    letters = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode().replace("\\", "/")
    return " ".join("".join(letter if letter.isprintable() else " " for letter in letters).split())[:max_length].strip()
