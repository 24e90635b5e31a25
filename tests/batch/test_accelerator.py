"""A run whose model is on a card: the rows of a run on the CPU, also where it was stopped. CAMSCOPE_DEVICE=cuda names it."""

import numpy as np
import pytest
import torch
from PIL import Image

from camscope import GradCAM, IntegratedGradients, LayerCAM, load_model
from tests.nets import DEVICE

pytest.importorskip("pyarrow")

from camscope.batch import BatchOptions, BatchRun, run_batch

IMAGES, CHUNK = (6, 2) if DEVICE.type == "cpu" else (240, 8)
OPTIONS = BatchOptions(chunk_size=CHUNK)
COLUMNS = ["row", "id", "status", "target", "method", "layer"]


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    folder, drawn = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    for n in range(IMAGES):
        size = (48, 40) if n % 3 else (40, 64)
        Image.fromarray(drawn.integers(0, 256, (*size, 3), dtype=np.uint8)).save(folder / f"{n:03d}.png")
    return folder


def tools(device):
    model = load_model("phantom").to(device)
    return [GradCAM(model), LayerCAM(model, "layer3"), IntegratedGradients(model, n_steps=8 if IMAGES > 6 else 3)]


@pytest.mark.slow
def test_the_rows_of_a_run_that_was_stopped_are_those_of_the_cpu(images, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    run_batch(tools("cpu"), images, tmp_path / "cpu", overlays="jpg", options=OPTIONS)

    def stop(outcome):
        if outcome.n_processed >= 2 * CHUNK:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_batch(tools(DEVICE), images, tmp_path / "card", overlays="jpg", options=OPTIONS, on_progress=stop)
    outcome = run_batch(tools(DEVICE), images, tmp_path / "card", overlays="jpg", options=OPTIONS)
    assert outcome.n_done_before >= CHUNK
    assert outcome.n_done_before + outcome.n_processed == IMAGES
    assert outcome.n_failures == 0
    one, other = (
        BatchRun(tmp_path / name).table([*COLUMNS, "attribution", "score"]).to_pylist() for name in ("cpu", "card")
    )
    assert [[row[name] for name in COLUMNS] for row in one] == [[row[name] for name in COLUMNS] for row in other]
    for expected, found in zip(one, other, strict=True):
        heat, here = (np.asarray(row["attribution"], np.float32) for row in (expected, found))
        np.testing.assert_allclose(here, heat, rtol=0, atol=1e-4 * float(np.abs(heat).max()))
        np.testing.assert_allclose(found["score"], expected["score"], rtol=1e-4, atol=1e-5)
    assert len(list((tmp_path / "card" / "overlays").rglob("*.jpg"))) == 3 * IMAGES
