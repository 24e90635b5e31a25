"""Log maps of the same samples again and again during a training, without an effect on the training."""

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from camscope.errors import CamscopeError, InputError, OutputError, warn_caller
from camscope.explainers.core.base_explainer import Explainer, get_explainer_class
from camscope.plurals import plural
from camscope.targets import TargetLike

IMAGE_KEYS, LABEL_KEYS = (
    ("pixel_values", "image", "img"),
    ("labels", "label"),
)  # of an item of a data set that is a dict


class SampleMaps:
    """Maps of fixed samples for a callback.

    The samples are read once, at the first map, so that random augmentations stay the same. Maps are computed in eval mode.
    Modes, gradients, buffers and random numbers are restored, so that the weights of the training do not change.

    Args:
        samples: A tensor (N,C,*S) of model inputs, a list of images as `explain` takes them, or a data set. Its items are
            images, pairs of image and label, or dicts with `pixel_values` or `image` and `labels` or `label`.
        indices: Which samples. None: the first 4.
        targets: One target for all samples, or a list with one for each. None: the label of the data set, or else the
            class with the highest score.
        methods: Names or classes of methods.
        layer: The layer of the methods that have one. Name it, so that the maps of all epochs have the same layer.
        tag: First part of the tags: `tag/method/index`.
        every_n_epochs: Epochs between two maps.
        height: Rows of each overlay. None: as many as the image has.
        preprocess: As for an explainer, for samples that are no tensors.
        class_names: As for an explainer.
        settings: Further settings of the methods by name.

    Raises:
        InputError: No sample, no method, or a wrong number of targets.

    """

    def __init__(
        self,
        samples: Any,
        *,
        indices: Sequence[int] | None = None,
        targets: TargetLike = None,
        methods: Sequence[str | type[Explainer]] = ("gradcam",),
        layer: str | None = None,
        tag: str = "maps",
        every_n_epochs: int = 1,
        height: int | None = 256,
        preprocess: Any = None,
        class_names: Sequence[str] | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        if isinstance(methods, str | type):
            methods = [methods]
        if every_n_epochs < 1 or not methods:
            raise InputError(f"every_n_epochs={every_n_epochs}, {plural(len(methods), 'method')}: expected 1 or more")
        self.indices = list(range(min(4, len(samples)))) if indices is None else list(indices)
        if not self.indices:
            raise InputError("there is no sample: pass samples, or indices= of a data set")
        self.methods = [get_explainer_class(method) for method in methods]
        self.every_n_epochs, self.tag, self._layer, self._height = every_n_epochs, tag, layer, height
        self._samples, self._targets = samples, targets
        self._options = {"preprocess": preprocess, "class_names": class_names, **(settings or {})}
        self._explainers: list[Explainer] = []
        self._items: tuple[list[Any], list[Any]] | None = None

    def log(self, model: nn.Module, writers: Sequence[Any], step: int, *, first: bool = False) -> int:
        """Compute the maps and write them. Return how many were written.

        With `first`, an error is raised, before a training of hours. Later, a warning reports it, and the training continues.

        Args:
            model: The model that is trained.
            writers: The loggers, as `Explanation.log` takes them. Those that take no pictures are skipped.
            step: The step of the training.
            first: Whether the training starts here.

        Raises:
            CamscopeError: Only with `first`: the maps cannot be computed or written.

        """
        try:
            with random_numbers_restored():
                return self._write(model, writers, step)
        except CamscopeError as error:
            if first:
                raise
            warn_caller(f"no maps at step {step}: {error}")
            return 0

    def _write(self, model: nn.Module, writers: Sequence[Any], step: int) -> int:
        """Compute all maps with one call per method, and write each to every writer that takes pictures."""
        count, problems = 0, []
        images, targets = self._items = self._items or self._read_samples()
        for explainer in self._get_explainers(model):
            for index, explanation in zip(self.indices, explainer.explain_batch(images, targets), strict=True):
                for writer in writers:
                    try:
                        explanation.log(writer, f"{self.tag}/{explainer.name}/{index}", step, height=self._height)
                        count += 1
                    except OutputError as error:
                        problems.append(error)
        if not count:
            raise (
                problems[0]
                if problems
                else OutputError(
                    "the trainer has no logger", fix="pass writer=, such as a SummaryWriter, or a logger to the trainer"
                )
            )
        return count

    def _get_explainers(self, model: nn.Module) -> list[Explainer]:
        """Build the explainers for a model, once."""
        if not self._explainers or self._explainers[0].model is not model:
            self._explainers = [self._build_explainer(method, model) for method in self.methods]
        return self._explainers

    def _build_explainer(self, method: type[Explainer], model: nn.Module) -> Explainer:
        names = method.__dataclass_fields__
        layer: dict[str, Any] = {"layer": self._layer} if self._layer is not None and "layer" in names else {}
        return method(model, **layer, **{name: value for name, value in self._options.items() if name in names})

    def _read_samples(self) -> tuple[list[Any], list[Any]]:
        """Read the samples, and choose the target of each."""
        pairs = [split_sample(self._samples[index]) for index in self.indices]
        targets = self._targets
        if isinstance(targets, list | tuple | Tensor):
            if len(targets) != len(pairs):
                raise InputError(
                    f"{plural(len(targets), 'target')} for {plural(len(pairs), 'sample')}: give one for each"
                )
            return [image for image, _ in pairs], list(targets)
        return [image for image, _ in pairs], [label if targets is None else targets for _, label in pairs]


def split_sample(item: Any) -> tuple[Any, int | None]:
    """Split an item of a data set into its image and its label. Only an integer label counts.

    >>> split_sample({"image": "cat.png", "label": 3})
    ('cat.png', 3)
    >>> split_sample("cat.png")
    ('cat.png', None)

    """
    image, label = item, None
    if isinstance(item, Mapping):
        key = next((key for key in IMAGE_KEYS if key in item), None)
        if key is None:
            raise InputError(f"a sample has the keys {', '.join(map(str, item))}; expected {' or '.join(IMAGE_KEYS)}")
        image, label = item[key], next((item[key] for key in LABEL_KEYS if key in item), None)
    elif isinstance(item, tuple | list) and len(item) > 1:
        image, label = item[0], item[1]
    if isinstance(label, Tensor | np.generic) and label.ndim == 0:
        label = label.item()
    return image, label if isinstance(label, int) and not isinstance(label, bool) else None


@contextmanager
def random_numbers_restored() -> Iterator[None]:
    """Restore the random numbers of PyTorch, NumPy and Python at the end of the `with`."""
    python, numpy = random.getstate(), np.random.get_state()
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
