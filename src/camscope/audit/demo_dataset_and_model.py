"""Create a demo of an audit: a synthetic dataset with a known shortcut, and a model trained on it."""

from functools import cache
from pathlib import Path
from typing import Any

from camscope.audit.core.config import Config
from camscope.phantom.shortcut_study import ShortcutNet, draw_study, train_shortcut_model, write_study, write_weights

# The probability of the marker in images with the finding; in images without it, 1 minus this.
UNBIASED_PROBABILITY, CONFOUNDED_PROBABILITY = 0.5, 0.95
TRAIN_SEED, TEST_SEED = 1, 99


def write_demo_study(
    folder: Path,
    marker_probability: float = CONFOUNDED_PROBABILITY,
    *,
    n_images: int = 200,
    seed: int = 0,
    overwrite: bool = True,
) -> Config:
    """Write a synthetic dataset, and the weights of a model trained on similar images. Return a config that audits the model.

    `marker_probability`: P(marker | lesion) = 1 - P(marker | clear), in the training and the audited images. At 0.5 the marker
    is unrelated to the lesion, and at 1 it determines it.
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
    """Return a model trained with this seed. The result is cached."""
    return train_shortcut_model(draw_study(1000, TRAIN_SEED + seed, marker_probability), seed)


def build_demo_config(manifest: Path, weights: Path, marker_probability: float) -> dict[str, Any]:
    """Return the config tables of the demo audit."""
    return {
        "title": "Simulated X-rays with a marker that is "
        + ("confounded with the lesion" if marker_probability > UNBIASED_PROBABILITY else "unrelated to the lesion"),
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
        "margins": {"reliance_prevalence": 0.1},  # takes 29 patients
        "report": {"columns": ["site"]},
    }
