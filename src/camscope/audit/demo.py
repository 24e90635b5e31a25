"""demonstration: studies whose shortcut is known, with a net that learnt them, ready to be audited."""

from functools import cache
from pathlib import Path
from typing import Any

from camscope.audit.core.config import Config
from camscope.phantom.shortcut_study import ShortcutNet, draw_study, train_shortcut_model, write_study, write_weights

UNBIASED_PROBABILITY, CONFOUNDED_PROBABILITY = (
    0.5,
    0.95,
)  # how often the token is there where the finding is, and is not where it is not
TRAIN_SEED, TEST_SEED = 1, 99  # seeds of the images that the net learns, and of those of the audit


def write_demo_study(
    folder: Path,
    marker_probability: float = CONFOUNDED_PROBABILITY,
    *,
    n_images: int = 200,
    seed: int = 0,
    overwrite: bool = True,
) -> Config:
    """Draw a study, train a net on it in seconds, write images, masks, manifest and weights; the config of their audit.

    `marker_probability`: P(token | lesion) = 1 - P(token | clear), in training and in the audited images: 0.5 says nothing, 1 everything.
    """
    manifest = write_study(draw_study(n_images, TEST_SEED + seed, marker_probability), folder, overwrite=overwrite)
    return Config.from_source(
        build_demo_config(
            manifest,
            write_weights(_train_demo_model(marker_probability, seed), folder, overwrite=overwrite),
            marker_probability,
        )
    )


@cache
def _train_demo_model(marker_probability: float, seed: int) -> ShortcutNet:
    """The same net each time."""
    return train_shortcut_model(draw_study(1000, TRAIN_SEED + seed, marker_probability), seed)


def build_demo_config(manifest: Path, weights: Path, marker_probability: float) -> dict[str, Any]:
    """The tables of the config."""
    return {
        "title": "Phantom radiographs, a marker that "
        + ("travels with the lesion" if marker_probability > UNBIASED_PROBABILITY else "says nothing"),
        "intended_use": "Is there a lesion in the lungs?",
        "data": {
            "manifest": str(manifest),
            "label": "label",
            "patient": "patient",
            "subgroups": ["site", "sex"],
            "ground_truth": "mask",
        },
        "model": {"source": "camscope.phantom.shortcut_study:create_shortcut_model", "weights": str(weights)},
        "explain": {
            "findings": ["lesion"],
            "methods": ["gradcam", "integratedgradients"],
            "settings": {"integratedgradients": {"n_steps": 16}},
        },
        "regions": {"modality": "xray", "organ": "region_lungs", "columns": {"marker": "region_marker"}},
        "sample_sizes": {"faithfulness": 24, "robustness": 12, "sanity": 12, "interventions": 200, "gallery": 8},
        "margins": {"reliance_prevalence": 0.1},  # which 29 patients can show
        "report": {"columns": ["site"]},
    }
