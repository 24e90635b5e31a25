"""`BatchWorker`: explain batches of images and build their result rows. An image that fails does not affect the others."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from camscope.batch import result_rows
from camscope.batch.image_loading import LoadedImage, hash_source, prepare_input
from camscope.batch.image_manifest import Manifest
from camscope.batch.overlay_writer import OverlayImages, OverlayQueue, OverlayWriter
from camscope.errors import (
    ImageError,
    LayerError,
    MissingExtraError,
    ModelError,
    PreprocessError,
    TargetError,
    describe_out_of_memory,
    is_out_of_memory,
    is_transient,
)
from camscope.explainers import Explainer
from camscope.explainers.comparison.explain_by_supported_methods import MethodTimer
from camscope.explainers.core.evaluation_context import get_device_and_dtype
from camscope.explainers.core.model_input import NO_EXTRA_INPUTS, ModelInput, require_preprocess
from camscope.explainers.core.redacted_settings_text import format_without_address
from camscope.explainers.core.run_methods_in_shared_passes import (
    build_explanations,
    check_compatible_explainers,
    run_methods,
)
from camscope.explanation import Explanation
from camscope.hooks.find_layers import unwrap
from camscope.images.preprocess import Preprocess
from camscope.loaded_model_metadata_and_weight_digest import compute_model_digest
from camscope.targets import TargetLike

RUN_LEVEL_ERRORS = (LayerError, MissingExtraError, ModelError, PreprocessError)  # errors that all images share
DEFAULT_PIXELS_PER_BATCH = 16 * 224 * 224  # pixels per forward pass if no batch size is set
MIN_DEFAULT_BATCH_SIZE, MAX_DEFAULT_BATCH_SIZE = 16, 64  # images


@dataclass(frozen=True)
class ImageBatch:
    """Images that share a forward pass, and their model inputs `x` (N,C,*S). Without a readable image, `x` is None."""

    images: Sequence[LoadedImage]
    x: Tensor | None


@dataclass(frozen=True)
class BatchWorker:
    """Compute result rows with explainers of one model. If the manifest has no target for an image, `targets` apply."""

    explainers: Sequence[Explainer]
    targets: Sequence[TargetLike]
    manifest: Manifest
    batch_size: int | None = None
    reduced_decoding: bool = False
    overlay_writer: OverlayWriter | None = None
    window: Any = None
    allow_burned_in_text: bool = False

    def __post_init__(self) -> None:
        check_compatible_explainers(self.explainers)
        if self.manifest.images is None:  # a dataset may give the model's own input
            require_preprocess(self.explainers[0].preprocess, "the images")
        preprocess = self.explainers[0].preprocess
        if self.reduced_decoding and not isinstance(preprocess, Preprocess):
            raise PreprocessError(
                f"reduced decoding needs a camscope.Preprocess, but the preprocessing is {preprocess!r}; "
                "pass a camscope.Preprocess, or leave reduced_decoding out"
            )

    @cached_property
    def model_digest(self) -> str:
        """The digest of the model. It is computed once per run."""
        return compute_model_digest(unwrap(self.explainers[0].model))

    def prepare_model_input(self, source: Any) -> ModelInput:
        """Convert an image to a model input on the CPU. `source` is the bytes of a file, or an image from a dataset."""
        return prepare_input(
            source,
            self.explainers[0],
            reduced_decoding=self.reduced_decoding,
            window=self.window,
            keep_image=self.overlay_writer is not None,
            allow_burned_in_text=self.allow_burned_in_text,
            reject_scans_named_as_photos=self.manifest.images is None,
        )

    def get_targets_of_image_or_run(self, image: LoadedImage) -> Sequence[TargetLike]:
        """Return the targets of an image. If the manifest gives no target for it, use the targets of the run."""
        target = image.row.get("target")
        return self.targets if target is None else [parse_target(target)]

    def forward_pass_key(self, image: LoadedImage) -> object:
        """Return a key. Images with equal keys can share a forward pass."""
        has_target = image.row.get("target") is not None
        return None if image.item is None else (tuple(image.item.x.shape), has_target)

    def choose_batch_size(self, image: LoadedImage) -> int:
        """Return how many images of this size form a batch."""
        if image.item is None:
            return MIN_DEFAULT_BATCH_SIZE
        default = DEFAULT_PIXELS_PER_BATCH // max(1, image.item.x[0].numel())
        return self.batch_size or min(MAX_DEFAULT_BATCH_SIZE, max(MIN_DEFAULT_BATCH_SIZE, default))

    def stack_model_inputs(self, images: Sequence[LoadedImage]) -> ImageBatch:
        """Stack the inputs of images that share a forward pass. For a model on a GPU, the tensor is in pinned memory."""
        inputs = [image.item.x for image in images if image.item is not None]
        if not inputs:
            return ImageBatch(images, None)
        x = torch.stack(inputs)
        copies_to_gpu = (
            get_device_and_dtype(unwrap(self.explainers[0].model))[0].type == "cuda" and x.device.type == "cpu"
        )
        return ImageBatch(images, x.pin_memory() if copies_to_gpu else x)

    def compute_rows(self, batch: ImageBatch, overlay_queue: OverlayQueue | None = None) -> list[dict[str, Any]]:
        """Compute one row for each image, target and method of a batch. Overlays are put into the queue."""
        if batch.x is None:
            images = ((image, image.error or "", image.is_transient) for image in batch.images)
            return [row for failure in images for row in self._build_failure_rows(*failure)]
        try:
            return self._explain_batch(batch.images, batch.x, overlay_queue)
        except RUN_LEVEL_ERRORS:
            raise
        except TargetError as error:
            if len(batch.images) == 1 and batch.images[0].row.get("target") is None:
                raise
            reason, may_succeed = str(error), False
        except Exception as error:
            may_succeed = is_transient(error)
            out_of_memory = is_out_of_memory(error)
            reason = f"{describe_out_of_memory(error)}, alone" if out_of_memory else f"{type(error).__name__}: {error}"
        torch.cuda.empty_cache()  # not earlier: the error would still hold tensors of the failed forward pass
        if len(batch.images) == 1:
            return self._build_failure_rows(batch.images[0], reason, may_succeed)
        half = len(batch.images) // 2  # until only the image that fails is left
        halves = [ImageBatch(batch.images[part], batch.x[part]) for part in (slice(half), slice(half, None))]
        return [row for part in halves for row in self.compute_rows(part, overlay_queue)]

    def _explain_batch(
        self, images: Sequence[LoadedImage], x: Tensor, overlay_queue: OverlayQueue | None
    ) -> list[dict[str, Any]]:
        """Explain all images of a batch together. Return their rows, ordered by image."""
        items = [image.item for image in images if image.item is not None]
        targets_by_image = [self.get_targets_of_image_or_run(image) for image in images]
        bound_targets = [
            self.explainers[0].prepare_each_target_for_its_image(list(column), items, NO_EXTRA_INPUTS)
            for column in zip(*targets_by_image, strict=True)
        ]
        timer = MethodTimer()
        maps_by_method = run_methods(
            self.explainers,
            x.to(*get_device_and_dtype(unwrap(self.explainers[0].model)), non_blocking=True),
            bound_targets,
            on_pass=timer,
            warn_flagged=False,
        )
        n_maps = len(images) * len(bound_targets)
        seconds = [timer.get_seconds(explainer) / n_maps for explainer in self.explainers]
        explanations = [
            build_explanations(explainer, items, maps, target_index, self.model_digest)
            for target_index in range(len(bound_targets))
            for explainer, maps in zip(self.explainers, maps_by_method, strict=True)
        ]
        n_methods = len(self.explainers)
        return [
            self._build_map_row(image, explanation, n // n_methods, seconds[n % n_methods], overlay_queue)
            for image, image_explanations in zip(images, zip(*explanations, strict=True), strict=True)
            for n, explanation in enumerate(image_explanations)
        ]

    def _build_map_row(
        self,
        image: LoadedImage,
        explanation: Explanation,
        target_index: int,
        seconds: float,
        overlay_queue: OverlayQueue | None,
    ) -> dict[str, Any]:
        """Build the row of a map. With a queue of overlays, the row refers to its overlay image."""
        target = self._format_target(image, target_index)
        row = result_rows.build_map_row(self._build_image_columns(image), explanation, target, seconds)
        row["notes"] = [*row["notes"], *image.notes]
        if overlay_queue is None:
            return row
        return {**row, "overlay": overlay_queue(row, explanation, image, partial(self._read_overlay_images, image))}

    def _read_overlay_images(self, image: LoadedImage) -> OverlayImages:
        """Return the images on which to draw an overlay. If the images are no longer in memory, read the file again."""
        if not image.images_dropped:
            return OverlayImages(image.image, image.model_input_image)
        try:
            source = self.manifest.read_source(image.row)
        except OSError as error:
            raise ImageError(f"the image cannot be read again: {error.strerror or type(error).__name__}") from error
        if hash_source(source) != image.sha256:
            raise ImageError("the image has changed since it was explained")
        item = self.prepare_model_input(source)
        return OverlayImages(item.image, item.model_input_image)

    def _build_failure_rows(self, image: LoadedImage, error: str, is_transient: bool) -> list[dict[str, Any]]:
        """Build one row with the error for each target and method of an image that failed."""
        kind = result_rows.TRANSIENT if is_transient else result_rows.PERMANENT
        columns = {
            **self._build_image_columns(image),
            "status": result_rows.FAILED,
            "error": error,
            "failure_kind": kind,
        }
        return [
            {**columns, "target": self._format_target(image, index), "method": explainer.composed_name}
            for index in range(len(self.get_targets_of_image_or_run(image)))
            for explainer in self.explainers
        ]

    def _build_image_columns(self, image: LoadedImage) -> dict[str, Any]:
        """Return the columns whose values are the same in all rows of an image."""
        names = ("row", "id", "path", *self.manifest.extra_columns)
        return {**{name: image.row[name] for name in names}, "sha256": image.sha256}

    def _format_target(self, image: LoadedImage, target_index: int) -> str | None:
        """Return the requested target as text. Return None if the predicted class is the target."""
        target = self.get_targets_of_image_or_run(image)[target_index]
        return None if target is None else format_without_address(target)


def parse_target(cell: Any) -> TargetLike:
    """Convert a table cell to a class index or a class name. An index may be given as text, such as "3"."""
    text = str(cell)
    return int(text) if text.lstrip("-").isdecimal() else text
