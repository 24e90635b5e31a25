"""Malicious folders of nnU-Net and MONAI: what they would execute is not executed."""

import json
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch

from camscope import load_model
from camscope.errors import ModelError, WeightsError
from camscope.models.nnunet_checkpoint import StoredNumberType, read_nnunet_checkpoint, read_stored_number
from tests import nnunet_folders
from tests.bundles import UNET, write_bundle

pytestmark = pytest.mark.slow


class Evil:
    """Pickled, it is a call that writes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return exec, (f"open({str(self.path)!r}, 'w').close()",)


class Call:
    """Pickled, it is any call."""

    def __init__(self, function, *args):
        self.call = (function, args)

    def __reduce__(self):
        return self.call


def poison_checkpoint(kind, file, mark):
    content = torch.load(file, weights_only=False)
    if kind == "object in the log":
        content["logging"] = Evil(mark)
    elif kind == "object as weights":
        content["network_weights"] = Evil(mark)
    elif kind == "call of NumPy":
        content["_best_ema"] = Call(np.load, str(mark), None, True)
    elif kind == "scalar of objects":
        content["_best_ema"] = Call(np.float64(1).__reduce__()[0], np.dtype("O"), "x")
    elif kind == "plain pickle":
        file.write_bytes(pickle.dumps({"network_weights": Evil(mark)}))
        return
    torch.save(content, file, _use_new_zipfile_serialization=kind != "old format")


CHECKPOINTS = ("object in the log", "object as weights", "call of NumPy", "scalar of objects", "plain pickle")


@pytest.fixture
def folder(tmp_path):
    pytest.importorskip("dynamic_network_architectures")
    nnunet_folders.write_folder(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_a_malicious_checkpoint_of_nnunet_executes_nothing(kind, folder, tmp_path):
    allowed, mark = torch.serialization.get_safe_globals(), tmp_path / "mark"
    poison_checkpoint(kind, folder / "fold_0" / "checkpoint_final.pth", mark)
    with pytest.raises(WeightsError, match=r"not on the allow-list|cannot be read"):
        load_model(f"nnunet:{folder}")
    assert not mark.exists()
    assert torch.serialization.get_safe_globals() == allowed


def test_the_error_names_the_class(folder, tmp_path):
    poison_checkpoint("object in the log", folder / "fold_0" / "checkpoint_final.pth", tmp_path / "mark")
    with pytest.raises(WeightsError, match=r"names (builtins\.)?exec, which .*--trust-code"):
        load_model(f"nnunet:{folder}")


def test_trust_executes_a_checkpoint_and_says_so(folder, tmp_path):
    poison_checkpoint("object in the log", folder / "fold_0" / "checkpoint_final.pth", tmp_path / "mark")
    with pytest.warns(match="code in it is executed"):
        load_model(f"nnunet:{folder}", trust_code=True)
    assert (tmp_path / "mark").exists()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("network_class_name", "os.system"),
        ("network_class_name", "dynamic_network_architectures.architectures.unet.os.system"),
        ("network_class_name", "dynamic_network_architectures.architectures.unet.nn.Linear"),
        ("network_class_name", "mine.PlainConvUNet"),
        ("conv_op", "os.system"),
        ("nonlin", "torch.nn.modules.os.system"),
        ("norm_op", "torch.nn.functional.conv3d"),
        ("norm_op", "torch.hub.load"),
    ],
)
def test_plans_that_name_code_are_rejected(folder, key, value):
    content = json.loads((folder / "plans.json").read_text())
    described = content["configurations"]["3d_fullres"]["architecture"]
    (described if key in described else described["arch_kwargs"])[key] = value
    (folder / "plans.json").write_text(json.dumps(content))
    with pytest.raises(ModelError, match=rf"{value.replace('.', '[.]')}'"):
        load_model(f"nnunet:{folder}")


def test_numbers_of_numpy_are_read_as_numbers(tmp_path):
    numbers = {"a": np.float64(0.1), "b": np.float32(0.25), "c": np.int64(-7), "d": np.bool_(True), "e": np.uint8(3)}
    torch.save({"network_weights": {"w": torch.ones(2)}, "logging": numbers}, tmp_path / "checkpoint.pth")
    content = read_nnunet_checkpoint(tmp_path / "checkpoint.pth", trust_code=False)
    assert content["logging"] == {"a": 0.1, "b": 0.25, "c": -7, "d": True, "e": 3}
    assert {type(value) for value in content["logging"].values()} == {float, int, bool}


@pytest.mark.parametrize("code", ["O", "O8", "V8", "M8[ns]", "f8,O", "f4", "S8", "", 8, None])
def test_other_types_of_numpy_are_rejected(code):
    with pytest.raises(TypeError):
        read_stored_number(StoredNumberType(code), bytes(8))


def test_arrays_of_numpy_are_not_read(tmp_path):
    torch.save({"network_weights": {}, "array": np.arange(3)}, tmp_path / "checkpoint.pth")
    with pytest.raises(WeightsError, match="_reconstruct"):
        read_nnunet_checkpoint(tmp_path / "checkpoint.pth", trust_code=False)


# MONAI


def code(mark):
    return f"$open({str(mark)!r}, 'w').close()"


def poison_bundle(kind, folder, mark):
    """A malicious bundle of each kind, which would write `mark`, and what the error says."""
    weights, program = {"weight": torch.ones(1)}, code(mark)
    if kind == "expression":
        write_bundle(folder, weights, network_def=UNET | {"out_channels": program})
        return r"network_def::out_channels is the expression .\$open"
    if kind == "expression behind a reference":
        write_bundle(folder, weights, network_def=UNET | {"out_channels": "@count::a"}, count={"a": program})
        return "count::a is the expression"
    if kind == "expression as target":
        write_bundle(folder, weights, network_def=UNET | {"_target_": program})
        return "network_def::_target_ is the expression"
    if kind == "disabled by an expression":
        write_bundle(folder, weights, network_def=UNET | {"_disabled_": program})
        return "_disabled_ is the expression"
    if kind == "nested target":
        call = {"_target_": "builtins.open", "file": str(mark), "mode": "w"}
        write_bundle(folder, weights, network_def=UNET | {"out_channels": call})
        return r"network_def::out_channels::_target_ is 'builtins\.open'"
    if kind == "TorchScript":
        write_bundle(folder, weights)
        torch.jit.script(torch.nn.ReLU()).save(str(folder / "models" / "model.pt"))
        return "TorchScript"
    if kind == "pickle":
        write_bundle(folder, {"weight": Evil(mark)})
        return "exec"
    if kind == "yaml object":
        write_bundle(folder, weights)
        (folder / "configs" / "inference.json").unlink()
        (folder / "configs" / "inference.yaml").write_text(
            f"network_def: !!python/object/apply:os.system ['touch {mark}']\n"
        )
        return "cannot be read"
    write_bundle(folder, weights, network_def={"_target_": kind, "command": f"touch {mark}"})
    return "only layers of monai.networks and torch.nn"


BUNDLES = (
    *("expression", "expression behind a reference", "expression as target", "disabled by an expression"),
    *("nested target", "TorchScript", "pickle", "yaml object"),
    *("os.system", "subprocess.run", "monai.networks.nets.torch.hub.load", "monai.bundle.run", "torch.hub.load"),
    *("torch.nn.modules.module.torch._C._jit_set_profiling_mode", "monai.networks.utils.convert_to_onnx"),
    *("torch.nn.functional.relu", "torch.nnx.Linear", "monai.networks.netsx.UNet", "Transchex", "..UNet"),
)


@pytest.mark.filterwarnings("ignore")  # PyTorch warns of TorchScript
@pytest.mark.parametrize("kind", BUNDLES)
def test_a_malicious_bundle_executes_nothing(kind, tmp_path):
    pytest.importorskip("monai")
    mark = tmp_path / "mark"
    message = poison_bundle(kind, tmp_path / "bundle", mark)
    with pytest.raises((ModelError, WeightsError), match=message):
        load_model(f"bundle:{tmp_path}/bundle")
    assert not mark.exists()


def test_imports_of_a_bundle_are_not_executed(tmp_path):
    monai = pytest.importorskip("monai.networks.nets")
    mark = tmp_path / "mark"
    network = monai.UNet(**{key: value for key, value in UNET.items() if key != "_target_"})
    config = {"imports": ["$import os", f"$os.system('touch {mark}')"], "run": [code(mark)], "device": code(mark)}
    write_bundle(tmp_path / "bundle", network.state_dict(), **config)
    assert load_model(f"bundle:{tmp_path}/bundle")
    assert not mark.exists()


def test_the_command_line_trusts_only_by_its_option(tmp_path):
    monai = pytest.importorskip("monai.networks.nets")
    mark = tmp_path / "mark"
    network = monai.UNet(**{key: value for key, value in UNET.items() if key != "_target_"})
    definition = UNET | {"out_channels": f"$open({str(mark)!r}, 'w').close() or 2"}
    write_bundle(tmp_path / "bundle", network.state_dict(), network_def=definition, trust_code=True)
    command = [sys.executable, "-W", "ignore", "-m", "camscope", "layers", f"bundle:{tmp_path}/bundle", "--size", "16"]
    refused = subprocess.run(command, capture_output=True, text=True, check=False)
    assert refused.returncode != 0
    assert "--trust-code" in refused.stderr
    assert not mark.exists()


@pytest.mark.parametrize("spec", ["onnx:net.onnx", "resnet18", "models.py:net"])
def test_trust_is_for_models_with_code(spec):
    with pytest.raises(ModelError, match="trust_code is for yolo, nnunet, bundle"):
        load_model(spec, trust_code=True)
