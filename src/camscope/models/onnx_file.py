"""Load an ONNX file, which ONNX Runtime runs on the CPU. The loaded model gives scores, but has no layers or gradients."""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from camscope.atomic_writes_and_folder_locks import describe_file_problem, read_bytes
from camscope.errors import InputError, ModelError, WeightsError
from camscope.hooks.wrap_black_box_function_as_module import ScoreFunction
from camscope.loaded_model_metadata_and_weight_digest import LoadedModelMetadata
from camscope.models.checkpoint import WeightsSource, format_model_source
from camscope.optional_packages import require
from camscope.read_untrusted_files import read_errors_converted

MAX_ONNX_BYTES = 2**31  # the limit of the format for a file that holds its weights
NUMPY_TYPES = {
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(double)": np.float64,
    "tensor(uint8)": np.uint8,
}
ERROR_LEVEL = 3  # of ONNX Runtime's log


class OnnxNetwork:
    """The function of an ONNX file: a batch (N,C,*S) to its output, or to a dict of several outputs.

    A file with a fixed batch size runs as often as needed.

    Args:
        content: The bytes of the file.
        source: What errors call the file.

    Raises:
        ModelError: ONNX Runtime cannot load the file, or the model has no input that is an image.

    """

    def __init__(self, content: bytes, source: str) -> None:
        self._content, self._source, self.__name__ = content, source, "the ONNX model"
        self._create_session()

    def _create_session(self) -> None:
        """Create the session of ONNX Runtime, and find the input that takes the images."""
        runtime = require("onnxruntime", extra="onnx")
        options = runtime.SessionOptions()
        options.log_severity_level, options.intra_op_num_threads = ERROR_LEVEL, torch.get_num_threads()
        with read_errors_converted(f"{self._source} is not an ONNX model that can be run", ModelError):
            self._session: Any = runtime.InferenceSession(self._content, options, providers=["CPUExecutionProvider"])
        inputs = {item.name: item for item in self._session.get_inputs()}
        images = [name for name, item in inputs.items() if item.type in NUMPY_TYPES and len(item.shape) > 2]
        if not images:
            listing = ", ".join(f"{name} {item.type} {item.shape}" for name, item in inputs.items()) or "none"
            raise ModelError(f"{self._source} has no input of an image (N,C,H,W); its inputs: {listing}")
        self._image_name, self._other_names = images[0], [name for name in inputs if name != images[0]]
        self._dtype, (batch, *self._size) = NUMPY_TYPES[inputs[images[0]].type], inputs[images[0]].shape
        self._batch_size = batch if isinstance(batch, int) and batch > 0 else None
        self._output_names = [item.name for item in self._session.get_outputs()]

    def __getstate__(self) -> dict[str, Any]:
        return {name: vars(self)[name] for name in ("_content", "_source", "__name__")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._create_session()  # a session cannot be pickled

    def __call__(self, x: Tensor, **inputs: Any) -> Any:
        """Return the output for a batch (N,C,*S). `inputs` are all other inputs of the model, by name."""
        expected = [size if isinstance(size, int) else None for size in self._size]
        fits = len(expected) == x.ndim - 1 and all(
            size in (None, actual) for size, actual in zip(expected, x.shape[1:], strict=True)
        )
        if not fits:
            shape = ",".join("N" if size is None else str(size) for size in (None, *expected))
            raise InputError(
                f"the input is {tuple(x.shape)}, but {self._source} takes ({shape}); resize in preprocess="
            )
        if missing := [name for name in self._other_names if name not in inputs]:
            raise InputError(
                f"{self._source} also takes {', '.join(missing)}: pass additional_forward_args={{{missing[0]!r}: …}}"
            )
        images = x.cpu().numpy().astype(self._dtype, copy=False)
        more_inputs = {name: np.asarray(inputs[name]) for name in self._other_names}
        step, outputs = self._batch_size or len(images), []
        for start in range(0, len(images), step):
            part = images[start : start + step]
            padded = np.concatenate([part, np.repeat(part[-1:], step - len(part), 0)])  # to the batch size of the file
            values = self._session.run(self._output_names, {self._image_name: padded, **more_inputs})
            outputs.append([_cut_rows(value, len(part), step) for value in values])
        joined = [np.concatenate(values) for values in zip(*outputs, strict=True)]
        return joined[0] if len(joined) == 1 else dict(zip(self._output_names, joined, strict=True))


def _cut_rows(value: Any, n_rows: int, step: int) -> Any:
    """Remove the padding rows from an array with one row per image. Return its first rows."""
    return value[:n_rows] if value.ndim and len(value) == step else np.atleast_1d(value)


def load_onnx_model_and_metadata(name: str, weights: WeightsSource) -> tuple[nn.Module, LoadedModelMetadata]:
    """Load an ONNX file that contains its weights. ONNX Runtime runs the model on the CPU."""
    file, spec = Path(name).expanduser(), f"onnx:{name}"
    if weights is not None:
        raise WeightsError(f"{spec} holds its own weights; omit weights=")
    if not file.is_file():
        raise ModelError(f"there is no file {name}: {describe_file_problem(file)}; expected onnx:FILE.onnx")
    with read_errors_converted(f"{name} cannot be read", ModelError):
        content = read_bytes(file, MAX_ONNX_BYTES)
    network = OnnxNetwork(content, name)
    return ScoreFunction(network, hashlib.sha256(content).hexdigest()), LoadedModelMetadata(
        format_model_source(spec, None)
    )
