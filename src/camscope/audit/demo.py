"""demonstration: studies whose shortcut is known, with a net that learnt them, ready to be audited."""

from functools import cache
from pathlib import Path
from typing import Any

from camscope.audit.core.config import Config
from camscope.phantom.shortcut_study import ShortcutNet, draw_study, train_shortcut_net, write_net, write_study

CLEAN, CONFOUNDED = 0.5, 0.95  # how often the token is there where the finding is, and is not where it is not
TRAINED, UNSEEN = 1, 99  # seeds of the images that the net learns, and of those of the audit


def phantom_audit(
    folder: Path, p: float = CONFOUNDED, *, images: int = 200, seed: int = 0, overwrite: bool = True
) -> Config:
    """Draw a study, train a net on it in seconds, write images, masks, manifest and weights; the config of their audit.

    `p`: P(token | lesion) = 1 - P(token | clear), in training and in the audited images: 0.5 says nothing, 1 everything.
    """
    manifest = write_study(draw_study(images, UNSEEN + seed, p), folder, overwrite=overwrite)
    return Config.of(described(manifest, write_net(_learnt(p, seed), folder, overwrite=overwrite), p))


@cache
def _learnt(p: float, seed: int) -> ShortcutNet:
    """The same net each time."""
    return train_shortcut_net(draw_study(1000, TRAINED + seed, p), seed)


def described(manifest: Path, weights: Path, p: float) -> dict[str, Any]:
    """The tables of the config."""
    return {
        "title": "Phantom radiographs, a token that " + ("travels with the lesion" if p > CLEAN else "says nothing"),
        "question": "Is there a lesion in the lungs?",
        "data": {
            "manifest": str(manifest),
            "label": "label",
            "patient": "patient",
            "subgroups": ["site", "sex"],
            "evidence": "mask",
        },
        "model": {"source": "camscope.phantom.shortcut_study:shortcut_net", "weights": str(weights)},
        "explain": {
            "findings": ["lesion"],
            "methods": ["gradcam", "integratedgradients"],
            "settings": {"integratedgradients": {"steps": 16}},
        },
        "regions": {"modality": "xray", "organ": "region_lungs", "columns": {"token": "region_token"}},
        "sizes": {"faithfulness": 24, "robustness": 12, "sanity": 12, "interventions": 200, "gallery": 8},
        "margins": {"prevalence": 0.1},  # which 29 patients can show
        "report": {"columns": ["site"]},
    }
