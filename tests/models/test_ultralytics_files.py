"""Files of Ultralytics: what they hold is read, and what they would execute is not."""

import subprocess
import sys
import warnings

import pytest
import torch

ultralytics = pytest.importorskip("ultralytics")

from camscope import Preprocess, load_model  # noqa: E402 - as above
from camscope.errors import ModelError, WeightsError  # noqa: E402 - as above
from camscope.loaded_model_metadata_and_weight_digest import get_loaded_model_metadata  # noqa: E402 - as above
from tests.ultralytics_nets import RTDETR, SIDE, image, model_object  # noqa: E402 - as above


class Evil:
    """Pickled, it is a call that writes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return exec, (f"open({str(self.path)!r}, 'w').close()",)


def save(content, path, **settings):
    torch.save(content, path, **settings)
    return path


def poisoned(kind, folder, mark):
    """A malicious file of each kind, which would write `mark`, and what the error says."""
    network = ultralytics.YOLO("yolo11n.yaml").model
    code = f"open({str(mark)!r}, 'w').close() or nn.SiLU()"
    description = {"nc": 2, "activation": code, "backbone": [[-1, 1, "Conv", [8, 3, 2]]], "head": []}
    path = folder / "best.pt"
    if kind == "object":
        save({"model": Evil(mark)}, path)
        return path, r"names .*exec"
    if kind == "attribute":
        network.model[0].extra = Evil(mark)
        save({"model": network}, path)
        return path, r"names .*exec"
    if kind == "old format":
        save({"model": Evil(mark)}, path, _use_new_zipfile_serialization=False)
        return path, r"names .*exec"
    if kind == "pickle":
        import pickle

        path.write_bytes(pickle.dumps({"model": Evil(mark)}))
        return path, "is not read|cannot be read"
    if kind == "call of a layer":
        from ultralytics.nn.tasks import DetectionModel

        class Call:
            def __reduce__(self):
                return DetectionModel, (description,)

        save({"model": Call()}, path)
        return path, "cannot be read|is not read"
    if kind == "getattr":

        class Call:
            def __reduce__(self):
                return getattr, (torch.nn.Module, "__subclasses__")

        save({"model": Call()}, path)
        return path, "cannot be read|is not read|names"
    if kind == "TorchScript":
        torch.jit.script(torch.nn.ReLU()).save(str(path))
        return path, "TorchScript"
    path = folder / "net.yaml"
    if kind == "activation":
        path.write_text(
            f"nc: 2\nactivation: {code!r}\nbackbone:\n- [-1, 1, Conv, [8, 3, 2]]\nhead:\n- [[0], 1, Detect, [nc]]\n"
        )
        return path, "is code"
    if kind == "function":
        path.write_text("nc: 2\nbackbone:\n- [-1, 1, check_requirements, [evil]]\nhead:\n- [[0], 1, Detect, [nc]]\n")
        return path, "is not a layer"
    path.write_text(f"nc: !!python/object/apply:os.system ['touch {mark}']\nbackbone: []\nhead: []\n")
    return path, "cannot be built"


KINDS = (
    *("object", "attribute", "old format", "pickle", "call of a layer", "getattr", "TorchScript"),
    *("activation", "function", "yaml object"),
)


@pytest.mark.filterwarnings("ignore")  # PyTorch warns of TorchScript
@pytest.mark.parametrize("kind", KINDS)
def test_a_malicious_file_executes_nothing(kind, tmp_path):
    allowed = set(map(str, torch.serialization.get_safe_globals()))
    mark = tmp_path / "mark"
    path, expected = poisoned(kind, tmp_path, mark)
    with pytest.raises((WeightsError, ModelError), match=expected):
        load_model(f"yolo:{path}")
    assert not mark.exists()
    added = set(map(str, torch.serialization.get_safe_globals())) - allowed
    assert not [entry for entry in added if "ultralytics" in entry or "getattr" in entry or "torch.nn" in entry]


@pytest.mark.parametrize("name", ["yolov8n-pose", "yolov10n", "yolo26n", RTDETR])
def test_a_checkpoint_of_the_package_is_read_without_trust(name, tmp_path):
    made = model_object(name)
    made.model.names = {i: f"kind {i}" for i in range(len(made.model.names))}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made.save(tmp_path / "best.pt")
        theirs = type(made)(tmp_path / "best.pt")  # in half precision, as in the file
    model, (x, _) = load_model(f"yolo:{tmp_path}/best.pt"), Preprocess.letterbox(SIDE)(image())
    assert get_loaded_model_metadata(model).class_names == tuple(made.model.names.values())
    assert not model.training
    with torch.no_grad():
        torch.testing.assert_close(vars(model(x[None])), vars(load_model(theirs)(x[None])))
    made.model.names = {i: str(i) for i in range(len(made.model.names))}


def test_trust_executes_and_says_so(tmp_path):
    network = ultralytics.YOLO("yolo11n.yaml").model
    network.extra = Evil(tmp_path / "mark")
    save({"model": network}, tmp_path / "best.pt")
    with pytest.warns(match="code in it is executed"):
        load_model(f"yolo:{tmp_path}/best.pt", trust_code=True)
    assert (tmp_path / "mark").exists()


def test_the_command_line_trusts_only_by_its_option(tmp_path):
    network = ultralytics.YOLO("yolo11n.yaml").model
    network.extra = Evil(tmp_path / "mark")
    save({"model": network}, tmp_path / "best.pt")
    command = [sys.executable, "-m", "camscope", "layers", f"yolo:{tmp_path}/best.pt", "--size", "64"]
    refused = subprocess.run(command, capture_output=True, text=True, check=False)
    assert refused.returncode != 0
    assert "--trust-code" in refused.stderr
    assert not (tmp_path / "mark").exists()
    trusted = subprocess.run([*command, "--trust-code"], capture_output=True, text=True, check=True)
    assert "code in the file is executed" in " ".join(trusted.stderr.split())
    assert (tmp_path / "mark").exists()
    assert "neck" in trusted.stdout


@pytest.mark.parametrize(
    ("spec", "settings", "message"),
    [
        ("yolo:nowhere.pt", {}, "downloads none"),
        ("yolo:yolo11n.onnx", {}, r"expected a checkpoint FILE\.pt, or NAME\.yaml"),
        ("yolo:nowhere.yaml", {}, "cannot be built"),
        ("yolo:yolo26n-depth.yaml", {}, "depth"),
        ("yolo:yoloe-11n.yaml", {}, "cannot be built"),
        ("yolo:https://example.org/best.yaml", {}, "downloads none"),
        ("resnet18", {"trust_code": True}, "trust_code is for yolo, nnunet, bundle"),
    ],
)
def test_what_cannot_be_loaded_is_one_error(spec, settings, message):
    with pytest.raises((ModelError, WeightsError), match=message):
        load_model(spec, **settings)
