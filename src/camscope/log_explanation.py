"""Write an explanation to a logger of a training: TensorBoard, W&B, MLflow, or a logger of Lightning."""

import math
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from camscope.errors import OutputError

EXPECTED_WRITER = (
    "expected a writer with add_image (TensorBoard), a run or module with log and Image (W&B), a module or client with "
    "log_image (MLflow), or a logger of Lightning with one of these as its experiment"
)


def log_picture_and_numbers(
    writer: Any, tag: str, picture: npt.NDArray[np.uint8], numbers: Mapping[str, float], text: str, step: int | None
) -> None:
    """Write a picture (H,W,3), numbers and a text under a tag. The methods that the writer has decide on its kind.

    Raise OutputError for a writer of another kind.
    """
    finite = {f"{tag}/{name}": float(value) for name, value in numbers.items() if math.isfinite(value)}
    if _has_methods(writer, "add_image"):
        writer.add_image(tag, picture, step, dataformats="HWC")
        for name, value in finite.items() if _has_methods(writer, "add_scalar") else ():
            writer.add_scalar(name, value, step)
        if _has_methods(writer, "add_text"):
            writer.add_text(f"{tag}/status", text, step)
    elif _has_methods(writer, "log_image", "log_metric"):
        _log_to_mlflow(writer, tag, picture, finite, step)
    elif _has_methods(writer, "log") and (image_class := _find_image_class(writer)) is not None:
        writer.log({tag: image_class(picture, caption=text), **finite}, step=step)
    elif getattr(writer, "experiment", None) is not None:  # a logger of Lightning
        run_id = getattr(writer, "run_id", None)
        experiment = writer.experiment
        if run_id is not None and _has_methods(experiment, "log_image", "log_metric"):
            experiment = _ClientOfRun(experiment, run_id)
        log_picture_and_numbers(experiment, tag, picture, numbers, text, step)
    else:
        raise OutputError(f"the writer is a {type(writer).__name__}; {EXPECTED_WRITER}")


class _ClientOfRun:
    """A client of MLflow, whose methods take the id of a run first."""

    def __init__(self, client: Any, run_id: str) -> None:
        self._client, self._run_id = client, run_id

    def log_image(self, image: npt.NDArray[np.uint8], **kwargs: Any) -> None:
        """Write a picture to the run."""
        self._client.log_image(self._run_id, image, **kwargs)

    def log_metric(self, key: str, value: float, step: int | None = None) -> None:
        """Write a number to the run."""
        self._client.log_metric(self._run_id, key, value, step=step)


def _log_to_mlflow(
    writer: Any, tag: str, picture: npt.NDArray[np.uint8], numbers: Mapping[str, float], step: int | None
) -> None:
    """Write to the module `mlflow`. A key of an image may hold no slash, so that slashes become hyphens there."""
    writer.log_image(picture, key=tag.replace("/", "-"), step=step or 0)
    for name, value in numbers.items():
        writer.log_metric(name, value, step=step)


def _has_methods(writer: Any, *names: str) -> bool:
    return all(callable(getattr(writer, name, None)) for name in names)


def _find_image_class(writer: Any) -> Callable[..., Any] | None:
    """Return the class `Image` of the module wandb, or of the package that a run belongs to. Nothing is imported."""
    image = getattr(writer, "Image", None)
    package = sys.modules.get(type(writer).__module__.partition(".")[0])
    image_class = image if image is not None else getattr(package, "Image", None)
    return image_class if callable(image_class) else None
