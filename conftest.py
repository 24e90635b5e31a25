"""What the examples of docstrings may use: images, a finished run and a finished audit, each made on first use."""

import csv
import os
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("CAMSCOPE_KEY", "the key of the tests")  # names of scans: no key is made in a home folder

N_IMAGES = 12
SKIPPED_STAGES = ["localization", "faithfulness", "sanity", "robustness", "shortcut"]


@pytest.fixture(scope="session")
def example_images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of radiographs, with the table `manifest.csv`."""
    from PIL import Image

    from camscope.phantom import draw_radiograph

    folder = tmp_path_factory.mktemp("images")
    with (folder / "manifest.csv").open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(["path", "label", "patient"])
        for seed in range(N_IMAGES):
            phantom = draw_radiograph(seed, seed % 2)
            Image.fromarray(phantom.image).save(folder / f"{seed}.png")
            table.writerow([f"{seed}.png", phantom.name, f"patient {seed}"])
    return folder


@pytest.fixture(scope="session")
def example_run(example_images: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A finished run of Grad-CAM."""
    from camscope import BatchRun, GradCAM, load_model, run_batch

    folder = tmp_path_factory.mktemp("runs") / "run"
    images = sorted(example_images.glob("*.png"))[:4]
    run_batch(GradCAM(load_model("phantom")), images, folder, ["nodule"])
    return BatchRun(folder)


@pytest.fixture(scope="session")
def example_audit(example_images: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A finished audit of the bundled model, with the stages that are quick."""
    from camscope.audit import run_audit

    config = {
        "n_resamples": 200,
        "skip": SKIPPED_STAGES,
        "data": {"manifest": str(example_images / "manifest.csv"), "label": "label", "patient": "patient"},
        "model": {"source": "phantom"},
        "explain": {"findings": ["nodule"], "methods": ["gradcam"]},
    }
    return run_audit(config, tmp_path_factory.mktemp("audits") / "audit")


EXAMPLES = {"run": "example_run", "audit_run": "example_audit", "image_folder": "example_images"}


@pytest.fixture(autouse=True)
def example_values(request: pytest.FixtureRequest) -> None:
    """Put the values that an example uses but does not make into its namespace. Its files go to a folder of the run."""
    examples = getattr(request.node, "dtest", None)
    if examples is not None:
        request.getfixturevalue("monkeypatch").setattr(tempfile, "tempdir", str(request.getfixturevalue("tmp_path")))
        source = "".join(example.source for example in examples.examples)
        for name, fixture in EXAMPLES.items():
            if re.search(rf"\b{name}\b", source) and f"{name} = " not in source:
                request.getfixturevalue("doctest_namespace")[name] = request.getfixturevalue(fixture)
