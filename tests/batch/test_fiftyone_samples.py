"""Samples of FiftyOne from a run. They are built without its database; the test is skipped without the library."""

from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("pyarrow")

from PIL import Image

from camscope import GradCAM, HiResCAM, load_model, run_batch
from camscope.batch import BatchRun
from camscope.batch.batch_runner import PrivacyOptions
from camscope.errors import InputError
from camscope.phantom import draw_radiograph

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    for seed in range(2):
        Image.fromarray(draw_radiograph(seed, "nodule").image).save(folder / f"{seed}.png")
    return folder


@pytest.fixture(scope="module")
def run(images, tmp_path_factory):
    model, folder = load_model("phantom"), tmp_path_factory.mktemp("run") / "run"
    run_batch([GradCAM(model), HiResCAM(model)], images, folder, ["nodule", "effusion"])
    return BatchRun(folder)


class StandInSample(dict):
    """The interface of `fiftyone.Sample` that is used."""

    def __init__(self, filepath):
        super().__init__()
        self.filepath = filepath


@pytest.fixture(params=["stand-in", "fiftyone"])
def library(request, monkeypatch):
    if request.param == "fiftyone":
        return pytest.importorskip("fiftyone")
    stand_in = SimpleNamespace(Sample=StandInSample, Heatmap=SimpleNamespace, Classification=SimpleNamespace)
    monkeypatch.setitem(__import__("sys").modules, "fiftyone", stand_in)
    return stand_in


def test_each_image_is_a_sample_with_its_maps(run, images, library):
    samples = run.to_fiftyone()
    assert [sample.filepath for sample in samples] == [str(images / "0.png"), str(images / "1.png")]
    rows = run.table().to_pylist()
    for sample in samples:
        own = [row for row in rows if row["id"] == sample["camscope_id"]]
        assert len(own) == 4
        assert {row["label"] for row in own} == {"nodule", "effusion"}
        for row in own:
            name = f"{row['method']}_{row['label']}"
            field = sample[name]
            assert sample[f"{name}_class"].label == row["label"]
            assert sample[f"{name}_class"].confidence == pytest.approx(row["probability"])
            attribution = np.reshape(row["attribution"], row["grid"])
            assert field.map.shape == (128, 128)
            if attribution.max() > 0:
                assert float(field.map.max()) == pytest.approx(1)
                cell = np.divide(np.unravel_index(field.map.argmax(), (128, 128)), 128 / np.array(row["grid"]))
                peak = np.unravel_index(attribution.argmax(), attribution.shape)
                assert np.abs(cell - 0.5 - peak).max() <= 1  # the pixel lies in or next to the strongest cell
            assert list(field.range)[1] == 1


def test_rows_are_selected(run, library):
    (sample,) = run.to_fiftyone("\"row\" = 1 and method = 'gradcam' and label = 'nodule'")
    assert sample["gradcam"].map.shape == (128, 128)


def test_a_run_without_file_names_is_an_error(images, tmp_path, library):
    run_batch(GradCAM(load_model("phantom")), images, tmp_path / "run", privacy=PrivacyOptions(profile="research"))
    with pytest.raises(InputError, match="does not name its image files"):
        BatchRun(tmp_path / "run").to_fiftyone()


def test_a_missing_library_is_an_error(run, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "fiftyone", None)
    with pytest.raises(InputError, match="pip install fiftyone"):
        run.to_fiftyone()
