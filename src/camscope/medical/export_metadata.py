"""What is told of a map beside its numbers: of the model and the method, never of a patient or a file."""

import math
import unicodedata
from typing import Any

from camscope.explainers.core.maps import is_plain
from camscope.explanation import OK, Explanation
from camscope.medical.scan_space import Native
from camscope.version import __version__


def sidecar(explanation: Explanation, native: Native) -> dict[str, Any]:
    """For JSON: an allow-list. Settings are numbers and single words; what else a setting may be is left out."""
    low, high = native.ends
    facts = {
        "software": "camscope",
        "software_version": __version__,
        "method": explanation.method,
        "layer": explanation.layer,
        "target": explanation.target,
        "label": explanation.label,
        "score": explanation.score,
        "probability": explanation.probability,
        "status": explanation.status,
        "measures": dict(explanation.measures),
        "parameters": {key: value for key, value in explanation.parameters.items() if is_plain(value)},
        "model_digest": explanation.model,
        "versions": dict(explanation.versions),
        "steps": list(explanation.steps),
        "notes": list(explanation.notes),
        "grid": list(explanation.grid),
        "input_size": list(explanation.input_size),
        "image_size": list(native.values.shape),
        "range": [low, high],
        "unit": "of the score",
        "covered_share": float(native.covered.mean()),
        "not_covered": "0; the file *_covered says which voxels" if not native.covered.all() else "none",
        "meaning": "what the model's score depends on, not a diagnosis",
    }
    return {key: _finite(value) for key, value in facts.items()}


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity."""
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def derivation(explanation: Explanation, native: Native) -> str:
    """In one paragraph, for DICOM's DerivationDescription: at most 1024 characters of ASCII."""
    layer = f", layer {explanation.layer}" if explanation.layer else ""
    share = float(native.covered.mean())
    parts = [
        f"Model attribution, not a diagnosis: {explanation.method}{layer}, target {target(explanation)}, "
        f"score {explanation.score:.6g}",
        f"raw values in units of the score, linear between the {' x '.join(map(str, explanation.grid))} cells of the map",
        f"model digest {explanation.model or 'unknown'}",
        f"camscope {__version__}",
    ]
    if share < 1:
        parts.append(f"the model was shown {100 * share:.1f} % of the image; the rest is 0")
    if explanation.status != OK:
        parts.append(f"flagged: {explanation.flag}")
    return plain("; ".join(parts), 1024)


def target(explanation: Explanation) -> str:
    """`281 (tabby)`."""
    return f"{explanation.target} ({explanation.label})" if explanation.target is not None else explanation.label


def title(explanation: Explanation) -> str:
    """`gradcam layer4: tabby`, at most 64 characters."""
    layer = f" {explanation.layer}" if explanation.layer else ""
    label = explanation.label if plain(explanation.label, 64) else f"class {explanation.target}"
    return plain(f"{explanation.method}{layer}: {label}", 64)


def plain(text: str, length: int) -> str:
    """Letters that every character set of DICOM has, without the backslash, which separates values."""
    letters = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode().replace("\\", "/")
    return " ".join("".join(letter if letter.isprintable() else " " for letter in letters).split())[:length].strip()
