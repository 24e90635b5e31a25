"""`Explanation.log`: the real SummaryWriter, whose file is read back, and recorders with the signatures of W&B and MLflow."""

import io
import sys
import types

import numpy as np
import pytest
from PIL import Image

from camscope.errors import OutputError
from camscope.explanation import Explanation


@pytest.fixture
def explanation():
    return Explanation(np.eye(4), "gradcam", 3, "tabby", 7.5, probability=0.25, layer="layer4", input_size=(32, 32))


def read_events(folder):
    """The pictures, scalars and texts of an event file, read by the reader of TensorBoard."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(folder), size_guidance={"images": 0, "scalars": 0, "tensors": 0})
    events.Reload()
    pictures = {
        tag: [(e.step, np.asarray(Image.open(io.BytesIO(e.encoded_image_string)))) for e in events.Images(tag)]
        for tag in events.Tags()["images"]
    }
    scalars = {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    texts = {
        tag: [(e.step, e.tensor_proto.string_val[0].decode()) for e in events.Tensors(tag)]
        for tag in events.Tags()["tensors"]
    }
    return pictures, scalars, texts


def test_an_event_file_is_read_back(explanation, tmp_path):
    pytest.importorskip("tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(tmp_path)
    for step in (2, 5):
        explanation.log(writer, "maps/tabby", step)
    writer.close()
    pictures, scalars, texts = read_events(tmp_path)
    ((first, picture), (second, _)) = pictures["maps/tabby"]
    assert (first, second) == (2, 5)
    np.testing.assert_array_equal(picture, explanation.annotated_image())
    assert scalars == {
        "maps/tabby/score": [(2, 7.5), (5, 7.5)],
        "maps/tabby/probability": [(2, 0.25), (5, 0.25)],
        "maps/tabby/ok": [(2, 1.0), (5, 1.0)],
    }
    assert texts["maps/tabby/status/text_summary"] == [(step, explanation.caption) for step in (2, 5)]


class Recorder:
    """Keeps every call with its arguments by name."""

    def __init__(self):
        self.calls = []


class WandbImage:
    def __init__(self, data_or_path, mode=None, caption=None):
        self.data, self.caption = data_or_path, caption


class WandbRun(Recorder):
    """`Run.log(data, step=None, commit=None)`, of a package `wandb` that is imported already."""

    def log(self, data, step=None, commit=None):
        self.calls.append((data, step, commit))


class MLflowModule(Recorder):
    """The functions of the module `mlflow` with their documented arguments."""

    def log_image(self, image, artifact_file=None, key=None, step=None, timestamp=None, synchronous=False):
        assert (artifact_file is None) != (key is None)
        self.calls.append(("image", key, image.shape, step))

    def log_metric(self, key, value, step=None, synchronous=None):
        self.calls.append(("metric", key, value, step))


class MLflowClient(Recorder):
    """The methods of `MlflowClient`, which take the run first."""

    def log_image(self, run_id, image, artifact_file=None, key=None, step=None, timestamp=None, synchronous=None):
        self.calls.append((run_id, "image", key, image.shape, step))

    def log_metric(self, run_id, key, value, timestamp=None, step=None, synchronous=None):
        self.calls.append((run_id, "metric", key, value, step))


def check_wandb(calls, explanation):
    ((data, step, _),) = calls
    assert step == 7
    assert {name: value for name, value in data.items() if name != "maps"} == {
        "maps/score": 7.5,
        "maps/ok": 1.0,
        "maps/probability": 0.25,
    }
    assert data["maps"].caption == explanation.caption
    np.testing.assert_array_equal(data["maps"].data, explanation.annotated_image())


def test_a_run_of_wandb_finds_the_image_class_of_its_package(explanation, monkeypatch):
    package = types.ModuleType("wandb")
    package.Image = WandbImage
    monkeypatch.setitem(sys.modules, "wandb", package)
    monkeypatch.setattr(WandbRun, "__module__", "wandb.sdk.wandb_run")
    run = WandbRun()
    explanation.log(run, "maps", 7)
    check_wandb(run.calls, explanation)


def test_the_module_wandb(explanation):
    run = WandbRun()
    explanation.log(types.SimpleNamespace(log=run.log, Image=WandbImage), "maps", 7)
    check_wandb(run.calls, explanation)


def test_mlflow(explanation):
    writer = MLflowModule()
    explanation.log(writer, "maps/tabby", 7)
    assert writer.calls == [
        ("image", "maps-tabby", (32, 32, 3), 7),
        ("metric", "maps/tabby/score", 7.5, 7),
        ("metric", "maps/tabby/ok", 1.0, 7),
        ("metric", "maps/tabby/probability", 0.25, 7),
    ]


def test_loggers_of_lightning(explanation):
    client = MLflowClient()
    explanation.log(types.SimpleNamespace(experiment=client, run_id="abc"), "maps", 1)
    assert client.calls[0] == ("abc", "image", "maps", (32, 32, 3), 1)
    assert client.calls[1] == ("abc", "metric", "maps/score", 7.5, 1)
    module = MLflowModule()
    explanation.log(types.SimpleNamespace(experiment=module), "maps", 1)
    assert len(module.calls) == 4


def test_a_warning_and_a_missing_score(explanation, tmp_path):
    flat = Explanation(np.ones((2, 2)), "gradcam", None, "no target", float("nan"), input_size=(64, 64), status="flat")
    writer = MLflowModule()
    flat.log(writer, "maps", height=128)
    assert writer.calls[0][2][0] > 128  # the warning stands below the overlay
    assert [call[:3] for call in writer.calls[1:]] == [("metric", "maps/ok", 0.0)]


@pytest.mark.parametrize("writer", [None, 3, object(), types.SimpleNamespace(log=print)])
def test_another_writer_is_one_error_that_names_what_it_must_have(explanation, writer):
    with pytest.raises(OutputError, match=r"add_image \(TensorBoard\).*Image \(W&B\).*log_image \(MLflow\)"):
        explanation.log(writer, "maps")
