"""Read models of Ultralytics from checkpoints and YAML files, without executing code that is in them."""

import logging
import re
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from camscope.atomic_writes_and_folder_locks import describe_file_problem
from camscope.errors import ModelError, WeightsError, warn_caller
from camscope.models.checkpoint import ALLOW_LIST_LOCK, check_tensors_dense_and_stored, describe_refusal
from camscope.optional_packages import require
from camscope.read_untrusted_files import check_zip_sizes_and_checksums, read_errors_converted

EXTRA = "yolo"
SAFE_ACTIVATION = re.compile(r"(torch\.)?nn\.[A-Za-z]\w*\((\s*(\w+\s*=\s*)?[\w.+-]+\s*,?)*\)")


def read_checkpoint(path: str, *, trust_code: bool) -> nn.Module:
    """Read the model of a checkpoint of Ultralytics, in float32 on the CPU.

    Ultralytics pickles whole models. Its restricted loader reads them by `torch.load(weights_only=True)` and an allow-list
    of layers of Ultralytics and PyTorch. With `trust_code`, all code in the file is executed as the file says.

    Args:
        path: The file.
        trust_code: Whether the file may execute any code.

    Returns:
        The model inside.

    Raises:
        WeightsError: The file is no such checkpoint, or it names a class that is not on the allow-list.

    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise WeightsError(
            f"{path} is not a checkpoint: {describe_file_problem(file)}; camscope downloads none: fetch the file yourself"
        )
    with read_errors_converted(f"{path} cannot be read", WeightsError):
        if zipfile.is_zipfile(file):
            check_zip_sizes_and_checksums(file)
    checkpoint = _load_trusted(file) if trust_code else _load_restricted(file)
    model = (checkpoint.get("ema") or checkpoint.get("model")) if isinstance(checkpoint, Mapping) else checkpoint
    if not isinstance(model, require("ultralytics.nn.tasks", extra=EXTRA).BaseModel):
        raise WeightsError(
            f"{path} holds a {type(model).__name__}; expected a checkpoint with a model of Ultralytics. For a state dict pass "
            "yolo:NAME.yaml and weights=FILE"
        )
    check_tensors_dense_and_stored(model.state_dict(), path)
    result: nn.Module = model.float()
    return result


def _load_restricted(file: Path) -> Any:
    """Load a checkpoint by the restricted loader of Ultralytics. Restore PyTorch's allow-list, which the loader extends."""
    tasks = require("ultralytics.nn.tasks", extra=EXTRA)
    if not getattr(getattr(tasks, "_SafeLoad", None), "SUPPORTED", False):
        raise WeightsError(
            f"{file} is not read, because the installed ultralytics has no restricted loader; install a newer one"
        )
    name = str(file.resolve())
    if file.suffix != ".pt" or name != name.strip().replace("'", ""):
        raise WeightsError(f"{file}: Ultralytics reads a name that ends in .pt and has no quotes; rename the file")
    with ALLOW_LIST_LOCK, _messages_hidden():
        allowed = torch.serialization.get_safe_globals()
        try:
            checkpoint, _ = tasks.torch_safe_load(name, safe_only=True)
        except Exception as error:  # a malicious or broken file raises anything
            raise WeightsError(f"{file} {describe_refusal(file, error)}") from error
        finally:
            torch.serialization.clear_safe_globals()
            torch.serialization.add_safe_globals(allowed)
    return checkpoint


def _load_trusted(file: Path) -> Any:
    """Load a checkpoint by `pickle`, and warn the user: `pickle` executes code in the file."""
    warn_caller(f"{file} is read with trust_code: the code in it is executed")
    try:
        return torch.load(file, map_location="cpu", weights_only=False)
    except Exception as error:  # code of the file raises anything
        raise WeightsError(f"{file} raised {type(error).__name__} while it was read: {error}") from error


def build_from_yaml(name: str) -> nn.Module:
    """Build a model with random weights from a YAML file: a path, or a file of the package Ultralytics such as yolo11n.yaml.

    Args:
        name: The name or path.

    Returns:
        The model.

    Raises:
        ModelError: There is no such file, or it is no valid description of a model.

    """
    tasks = require("ultralytics.nn.tasks", extra=EXTRA)
    if "://" in name:
        raise ModelError(f"yolo:{name}: expected the name of a file; camscope downloads none")
    with _messages_hidden():
        try:
            description = tasks.yaml_model_load(str(Path(name).expanduser()))
            _check_description(tasks, name, description)
            return _select_class(tasks, description)(description, verbose=False)  # type: ignore[no-any-return]  # of the package
        except ModelError:
            raise
        except Exception as error:  # a damaged description raises anything
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            raise ModelError(f"yolo:{name} cannot be built by Ultralytics: {reason}") from error


def _check_description(tasks: Any, name: str, description: Any) -> None:
    """Raise ModelError if an activation or a layer is code instead of a plain layer. Ultralytics would execute the code."""
    activation = description.get("activation")
    if activation is not None and not SAFE_ACTIVATION.fullmatch(str(activation)):
        raise ModelError(
            f"yolo:{name}: the activation {str(activation)[:80]!r} is code; expected one such as nn.SiLU()"
        )
    for row in (*description["backbone"], *description["head"]):
        layer = str(row[2])
        namespace, _, attribute = layer.rpartition(".")
        module = {"": tasks, "nn": nn, "torchvision.ops": require("torchvision.ops", extra=EXTRA)}.get(namespace)
        layer_class = getattr(module, attribute, None)
        if not (isinstance(layer_class, type) and issubclass(layer_class, nn.Module)):
            raise ModelError(f"yolo:{name}: {layer[:80]!r} is not a layer of Ultralytics or PyTorch")


def _select_class(tasks: Any, description: Any) -> Any:
    """Return the class of Ultralytics that builds a model from a description."""
    if str(description["head"][-1][2]) == "RTDETRDecoder":
        return tasks.RTDETRDetectionModel
    classes = {
        "detect": tasks.DetectionModel,
        "segment": tasks.SegmentationModel,
        "pose": tasks.PoseModel,
        "obb": tasks.OBBModel,
        "classify": tasks.ClassificationModel,
    }
    task = tasks.guess_model_task(description)
    if task not in classes:
        raise ModelError(f"models of the task {task!r} have no detections and no class scores: explain their nn.Module")
    return classes[task]


@contextmanager
def _messages_hidden() -> Iterator[None]:
    """Hide the log messages of Ultralytics inside the `with`, but show errors."""
    logger = logging.getLogger("ultralytics")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
