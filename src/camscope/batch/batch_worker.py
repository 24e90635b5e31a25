"""Worker: the rows of some images, whose passes are shared, each image failing for itself."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from camscope.batch import result_rows
from camscope.batch.image_loading import (
    InputOptions,
    LoadedImage,
    hash_source,
    prepare_input,
    read_row_source,
    require_reducible,
)
from camscope.batch.manifest import Manifest
from camscope.batch.overlays import Background, OverlayQueue, OverlayWriter
from camscope.errors import (
    ImageError,
    LayerError,
    MissingExtraError,
    ModelError,
    PreprocessError,
    TargetError,
    describe_out_of_memory,
    is_out_of_memory,
)
from camscope.explainers import Explainer
from camscope.explainers.comparison.best_effort import MethodTimer
from camscope.explainers.core.dispatch import bind_targets, build_explanations, check_compatible_explainers, run_methods
from camscope.explainers.core.evaluation_context import device_and_dtype
from camscope.explainers.core.inputs import NO_EXTRA_INPUTS, ModelInput, require_preprocess
from camscope.explainers.core.maps import format_without_address
from camscope.explanation import Explanation, PixelArray
from camscope.hooks.base import unwrap
from camscope.model_card import compute_model_digest
from camscope.targets import TargetLike

RUN_LEVEL_ERRORS = (LayerError, MissingExtraError, ModelError, PreprocessError)  # errors that every image would have


DEFAULT_PIXELS_PER_BATCH = 16 * 224 * 224  # of the images of a pass, where nobody says how many there are
MIN_DEFAULT_BATCH_SIZE, MAX_DEFAULT_BATCH_SIZE = 16, 64  # such images


@dataclass(frozen=True)
class ImageBatch:
    """Images that share a pass, with their inputs `x` (N,C,*S), in memory from which a GPU takes them; None: unread ones."""

    images: Sequence[LoadedImage]
    x: Tensor | None

    def split_in_half(self) -> tuple["ImageBatch", "ImageBatch"]:
        """Each with half of the images."""
        half, x = len(self.images) // 2, self.x
        first, second = (None, None) if x is None else (x[:half], x[half:])
        return ImageBatch(self.images[:half], first), ImageBatch(self.images[half:], second)


@dataclass(frozen=True)
class BatchWorker:
    """Explainers of one model, the questions for images whose row asks none, and what goes along.

    `batch_size`: images in one pass; None: 16, and of images smaller than 224 x 224 as many as have as many pixels, up to 64.
    `reduced_decoding`: a large JPEG is decoded at a half, a quarter or an eighth, four times what it is resized to at least.
    `overlay_writer`: how overlays are drawn, if they are. `window`: of scans, see `read_scan`; `allow_burned_in_text`: scans are drawn on
    although text may be part of their picture.
    """

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
        if self.reduced_decoding:
            require_reducible(self.explainers[0])

    @cached_property
    def model_digest(self) -> str:
        """Of the model, which stays as it is while the run goes on."""
        return compute_model_digest(unwrap(self.explainers[0].model))

    def read_item(self, source: Any) -> ModelInput:
        """A file's bytes, or an image of a dataset, as the model takes it, in memory; with a picture only if it is drawn on."""
        drawn, nameless = self.overlay_writer is not None, self.manifest.images is None
        way = InputOptions(self.reduced_decoding, drawn, self.window, self.allow_burned_in_text, nameless)
        return prepare_input(source, self.explainers[0], way)

    def targets_for(self, image: LoadedImage) -> Sequence[TargetLike]:
        """The row's own target, or the run's."""
        own = image.row.get("target")
        return self.targets if own is None else [parse_target(own)]

    def batch_key(self, image: LoadedImage) -> object:
        """Images of one group share their passes: of one size, asked as many questions, by themselves or by the run."""
        own = image.row.get("target") is not None
        return None if image.item is None else (tuple(image.item.x.shape), own)

    def batch_size_for(self, image: LoadedImage) -> int:
        """How many images like this one share a pass."""
        if image.item is None:
            return MIN_DEFAULT_BATCH_SIZE
        return self.batch_size or min(
            MAX_DEFAULT_BATCH_SIZE,
            max(MIN_DEFAULT_BATCH_SIZE, DEFAULT_PIXELS_PER_BATCH // max(1, image.item.x[0].numel())),
        )

    def collate(self, images: Sequence[LoadedImage]) -> ImageBatch:
        """Images of one group as a batch."""
        items = [one.item.x for one in images if one.item is not None]
        if not items:
            return ImageBatch(images, None)
        x = torch.stack(items)
        on_gpu = device_and_dtype(unwrap(self.explainers[0].model))[0].type == "cuda" and x.device.type == "cpu"
        return ImageBatch(images, x.pin_memory() if on_gpu else x)

    def compute_rows(self, batch: ImageBatch, overlay_queue: OverlayQueue | None = None) -> list[dict[str, Any]]:
        """The rows of a batch: of each image its targets, of each target the methods. `overlay_queue`: their overlays."""
        if batch.x is None:
            return [
                row
                for one in batch.images
                for row in self._build_failure_rows(one, one.error or "", is_transient=one.is_transient)
            ]
        try:
            return self._explain_batch(batch.images, batch.x, overlay_queue)
        except RUN_LEVEL_ERRORS:
            raise
        except TargetError as error:
            if len(batch.images) == 1 and batch.images[0].row.get("target") is None:
                raise
            why, transient = str(error), False
        except Exception as error:
            transient = is_out_of_memory(error)
            why = f"{describe_out_of_memory(error)}, alone" if transient else f"{type(error).__name__}: {error}"
        torch.cuda.empty_cache()  # only here, where the error is gone, and with it what the pass that failed held
        return self._retry_in_halves(batch, overlay_queue, why, is_transient=transient)

    def _explain_batch(
        self, images: Sequence[LoadedImage], x: Tensor, overlay_queue: OverlayQueue | None
    ) -> list[dict[str, Any]]:
        """The rows, image by image."""
        items = [one.item for one in images if one.item is not None]
        each = [self.targets_for(one) for one in images]
        questions = [
            bind_targets(self.explainers[0], list(column), items, NO_EXTRA_INPUTS) for column in zip(*each, strict=True)
        ]
        model = unwrap(self.explainers[0].model)
        clock = MethodTimer()
        runs = run_methods(
            self.explainers,
            x.to(*device_and_dtype(model), non_blocking=True),
            questions,
            on_pass=clock,
            warn_flagged=False,
        )
        seconds = [clock.get_seconds(tool) / (len(images) * len(questions)) for tool in self.explainers]
        made = [
            build_explanations(tool, items, made, q, self.model_digest)
            for q in range(len(questions))
            for tool, made in zip(self.explainers, runs, strict=True)
        ]
        return [
            self._build_map_row(one, row, n // len(self.explainers), seconds[n % len(self.explainers)], overlay_queue)
            for one, own in zip(images, zip(*made, strict=True), strict=True)
            for n, row in enumerate(own)
        ]

    def _build_map_row(
        self,
        image: LoadedImage,
        explanation: Explanation,
        target_index: int,
        seconds: float,
        overlay_queue: OverlayQueue | None,
    ) -> dict[str, Any]:
        row = result_rows.map_row(
            self._image_columns(image), explanation, self._target_text(image, target_index), seconds
        )
        row["notes"] = [*row["notes"], *image.notes]
        if overlay_queue is None:
            return row
        background = Background(
            partial(self._read_background, image), image.n_pixels, in_memory=not image.images_dropped
        )
        return {**row, "overlay": overlay_queue(row, explanation, background)}

    def _read_background(self, image: LoadedImage) -> tuple[PixelArray | None, PixelArray | None]:
        """What an overlay is drawn on, read again where it was not kept: the image, and what the model saw of it."""
        if not image.images_dropped:
            return image.image, image.model_input_image
        try:
            source = read_row_source(self.manifest, image.row["path"])
        except OSError as error:
            raise ImageError(f"it cannot be read again: {error.strerror or type(error).__name__}") from error
        if hash_source(source) != image.sha256:
            raise ImageError("it has changed since it was explained")
        item = self.read_item(source)
        return item.image, item.model_input_image

    def _retry_in_halves(
        self, batch: ImageBatch, overlay_queue: OverlayQueue | None, error: str, *, is_transient: bool
    ) -> list[dict[str, Any]]:
        """In halves, down to the image that fails."""
        if len(batch.images) == 1:
            return self._build_failure_rows(batch.images[0], error, is_transient=is_transient)
        return [row for half in batch.split_in_half() for row in self.compute_rows(half, overlay_queue)]

    def _build_failure_rows(self, image: LoadedImage, error: str, *, is_transient: bool) -> list[dict[str, Any]]:
        return [
            result_rows.failure_row(
                self._image_columns(image), error, self._target_text(image, q), tool.full_name, transient=is_transient
            )
            for q in range(len(self.targets_for(image)))
            for tool in self.explainers
        ]

    def _image_columns(self, image: LoadedImage) -> dict[str, Any]:
        return result_rows.common_columns(image.row, self.manifest.extra_columns, image.sha256)

    def _target_text(self, image: LoadedImage, target_index: int) -> str | None:
        """The target as it was asked; None: the predicted class."""
        asked = self.targets_for(image)[target_index]
        return None if asked is None else format_without_address(asked)


def parse_target(cell: Any) -> TargetLike:
    """A class index or name of a table's cell: CSV has numbers for both."""
    text = str(cell)
    return int(text) if text.lstrip("-").isdecimal() else text
