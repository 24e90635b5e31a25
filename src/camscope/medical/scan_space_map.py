"""`ScanSpaceMap`: a map resampled to the voxels of its scan, and its description for exports without patient data."""

import math
import unicodedata
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from camscope.errors import GeometryError
from camscope.explainers.core.redacted_settings_text import is_number_or_word
from camscope.explanation import STATUS_OK, Explanation
from camscope.images.scans.scan import Affine, Scan
from camscope.json_values import to_json_value
from camscope.plurals import plural
from camscope.version import __version__


@dataclass(frozen=True, eq=False)
class ScanSpaceMap:
    """A map on the voxels of its scan. `values` (H,W) or (D,H,W) are float32 in score units, 0 for voxels not `covered`."""

    values: NDArray[np.float32]
    covered: NDArray[np.bool_]
    affine: Affine | None

    @property
    def value_range(self) -> tuple[float, float]:
        """The smallest and the largest value of the voxels that the map covers. A map that covers no voxel gives (0, 0)."""
        covered_values = self.values[self.covered]
        return (float(covered_values.min()), float(covered_values.max())) if covered_values.size else (0.0, 0.0)

    @property
    def slices(self) -> NDArray[np.float32]:
        """The values as slices (D,H,W). A 2-D map has one slice."""
        return self.values[None] if self.values.ndim == 2 else self.values


def resample_map_to_scan(explanation: Explanation, scan: Scan | None = None) -> ScanSpaceMap:
    """Resample a map to the resolution of its scan. Raise a GeometryError if `scan` differs from the explained scan."""
    values = explanation.heatmap("image", scale=None).astype(np.float32)
    affine = explanation.affine
    if values.ndim not in (2, 3):
        raise GeometryError(f"the map has {plural(values.ndim, 'axis')}; expected 2 for an image or 3 for a volume")
    if scan is not None:
        if values.shape != scan.shape:
            map_size, scan_size = (" x ".join(map(str, shape)) for shape in (values.shape, scan.shape))
            raise GeometryError(
                f"the map has the size {map_size}, but {scan.name} has {scan_size}: pass the explained scan"
            )
        if affine is None:
            affine = scan.affine
        elif scan.affine is not None and not np.allclose(affine, scan.affine, rtol=1e-4, atol=1e-3):
            raise GeometryError(f"the map and {scan.name} have different positions: pass the explained scan")
    return ScanSpaceMap(values, explanation.coverage_mask("image"), affine)


def build_json_sidecar(explanation: Explanation, scan_map: ScanSpaceMap) -> dict[str, Any]:
    """Build the JSON sidecar of an exported map. It holds method, target, score and settings, but no patient data."""
    fields = ("method", "layer", "target", "label", "score", "probability", "status")
    metadata = {
        "software": "camscope",
        "software_version": __version__,
        **{name: getattr(explanation, name) for name in fields},
        "diagnostics": dict(explanation.diagnostics),
        "parameters": {key: value for key, value in explanation.parameters.items() if is_number_or_word(value)},
        "model_digest": explanation.model,
        "versions": dict(explanation.versions),
        "scan_steps": list(explanation.scan_steps),
        "notes": list(explanation.notes),
        "grid": list(explanation.grid),
        "input_size": list(explanation.input_size),
        "image_size": list(scan_map.values.shape),
        "range": list(scan_map.value_range),
        "unit": "of the score",
        "covered_share": float(scan_map.covered.mean()),
        "not_covered": "0; the file *_covered holds the mask" if not scan_map.covered.all() else "none",
        "meaning": "what the model's score depends on, not a diagnosis",
    }
    return {key: to_json_value(value) for key, value in metadata.items()}


def describe_derivation(explanation: Explanation, scan_map: ScanSpaceMap) -> str:
    """Write the text of the DICOM attribute DerivationDescription for a map. It has at most 1024 ASCII characters."""
    layer = f", layer {explanation.layer}" if explanation.layer else ""
    target = explanation.label if explanation.target is None else f"{explanation.target} ({explanation.label})"
    share = float(scan_map.covered.mean())
    answer = explanation.label if math.isnan(explanation.score) else f"target {target}, score {explanation.score:.6g}"
    parts = [
        f"Model attribution, not a diagnosis: {explanation.method_title}{layer}, {answer}",
        f"raw values in units of the score, linear between the {' x '.join(map(str, explanation.grid))} cells of the map",
        f"model digest {explanation.model or 'unknown'}",
        f"camscope {__version__}",
    ]
    if share < 1:
        parts.append(f"the model saw {100 * share:.1f} % of the image; the rest is 0")
    if explanation.status != STATUS_OK:
        parts.append(f"flagged: {explanation.warning_text}")
    return to_dicom_ascii("; ".join(parts), 1024)


def format_map_title(explanation: Explanation) -> str:
    """Format method, layer and label of a map as `Grad-CAM layer4: tabby`. The text has at most 64 characters."""
    layer = f" {explanation.layer}" if explanation.layer else ""
    label = explanation.label if to_dicom_ascii(explanation.label, 64) else f"class {explanation.target}"
    return to_dicom_ascii(f"{explanation.method_title}{layer}: {label}", 64)


def to_dicom_ascii(text: str, max_length: int) -> str:
    """Convert text to ASCII for a DICOM element. Backslashes become slashes, and the text is cut to `max_length` characters."""
    letters = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode().replace("\\", "/")
    return " ".join("".join(letter if letter.isprintable() else " " for letter in letters).split())[:max_length].strip()
