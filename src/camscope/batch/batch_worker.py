"""Worker: the rows of some images, whose passes are shared, each image failing for itself."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from camscope.batch import result_rows
from camscope.batch.image_loading import Loaded, Way, expect_reducible, sha256_of, source_of, taken_in
from camscope.batch.manifest import Manifest
from camscope.batch.overlays import Background, Drawing, Pictures
from camscope.errors import (
    ImageError,
    LayerError,
    MissingExtraError,
    ModelError,
    PreprocessError,
    TargetError,
    is_out_of_memory,
    memory_reason,
)
from camscope.explainers import Explainer
from camscope.explainers.comparison.best_effort import Clock
from camscope.explainers.core.dispatch import asked_of, expect_alike, explanations, run
from camscope.explainers.core.evaluation_context import home
from camscope.explainers.core.inputs import ALONE, Item, known
from camscope.explainers.core.maps import in_words
from camscope.explanation import Explanation, Pixels
from camscope.hooks.base import unwrap
from camscope.model_card import digest
from camscope.targets import Question

OF_THE_RUN = (LayerError, MissingExtraError, ModelError, PreprocessError)  # errors that every image would have


PIXELS = 16 * 224 * 224  # of the images of a pass, where nobody says how many there are
LEAST, MOST = 16, 64  # such images


@dataclass(frozen=True)
class Batch:
    """Images that share a pass, with their inputs `x` (N,C,*S), in memory from which a GPU takes them; None: unread ones."""

    images: Sequence[Loaded]
    x: Tensor | None

    def halves(self) -> tuple["Batch", "Batch"]:
        """Each with half of the images."""
        half, x = len(self.images) // 2, self.x
        first, second = (None, None) if x is None else (x[:half], x[half:])
        return Batch(self.images[:half], first), Batch(self.images[half:], second)


@dataclass(frozen=True)
class Worker:
    """Explainers of one model, the questions for images whose row asks none, and what goes along.

    `batch_size`: images in one pass; None: 16, and of images smaller than 224 x 224 as many as have as many pixels, up to 64.
    `reduced`: a large JPEG is decoded at a half, a quarter or an eighth, four times what it is resized to at least.
    `pictures`: how overlays are drawn, if they are. `window`: of scans, see `read_scan`; `allow_pixels`: scans are drawn on
    although text may be part of their picture.
    """

    tools: Sequence[Explainer]
    targets: Sequence[Question]
    manifest: Manifest
    batch_size: int | None = None
    reduced: bool = False
    pictures: Pictures | None = None
    window: Any = None
    allow_pixels: bool = False

    def __post_init__(self) -> None:
        expect_alike(self.tools)
        if self.manifest.images is None:  # a dataset may give the model's own input
            known(self.tools[0].preprocess, "the images")
        if self.reduced:
            expect_reducible(self.tools[0])

    @cached_property
    def digits(self) -> str:
        """Of the model, which stays as it is while the run goes on."""
        return digest(unwrap(self.tools[0].model))

    def read(self, source: Any) -> Item:
        """A file's bytes, or an image of a dataset, as the model takes it, in memory; with a picture only if it is drawn on."""
        drawn, nameless = self.pictures is not None, self.manifest.images is None
        way = Way(self.reduced, drawn, self.window, self.allow_pixels, nameless)
        return taken_in(source, self.tools[0], way)

    def asked(self, one: Loaded) -> Sequence[Question]:
        """The row's own target, or the run's."""
        own = one.row.get("target")
        return self.targets if own is None else [question_of(own)]

    def group(self, one: Loaded) -> object:
        """Images of one group share their passes: of one size, asked as many questions, by themselves or by the run."""
        own = one.row.get("target") is not None
        return None if one.item is None else (tuple(one.item.x.shape), own)

    def at_once(self, one: Loaded) -> int:
        """How many images like this one share a pass."""
        if one.item is None:
            return LEAST
        return self.batch_size or min(MOST, max(LEAST, PIXELS // max(1, one.item.x[0].numel())))

    def collated(self, images: Sequence[Loaded]) -> Batch:
        """Images of one group as a batch."""
        items = [one.item.x for one in images if one.item is not None]
        if not items:
            return Batch(images, None)
        x = torch.stack(items)
        on_gpu = home(unwrap(self.tools[0].model))[0].type == "cuda" and x.device.type == "cpu"
        return Batch(images, x.pin_memory() if on_gpu else x)

    def rows(self, batch: Batch, draw: Drawing | None = None) -> list[dict[str, Any]]:
        """The rows of a batch: of each image its targets, of each target the methods. `draw`: their overlays."""
        if batch.x is None:
            return [row for one in batch.images for row in self._failed(one, one.error or "", transient=one.transient)]
        try:
            return self._explained(batch.images, batch.x, draw)
        except OF_THE_RUN:
            raise
        except TargetError as error:
            if len(batch.images) == 1 and batch.images[0].row.get("target") is None:
                raise
            why, transient = str(error), False
        except Exception as error:
            transient = is_out_of_memory(error)
            why = f"{memory_reason(error)}, alone" if transient else f"{type(error).__name__}: {error}"
        torch.cuda.empty_cache()  # only here, where the error is gone, and with it what the pass that failed held
        return self._apart(batch, draw, why, transient=transient)

    def _explained(self, images: Sequence[Loaded], x: Tensor, draw: Drawing | None) -> list[dict[str, Any]]:
        """The rows, image by image."""
        items = [one.item for one in images if one.item is not None]
        each = [self.asked(one) for one in images]
        questions = [asked_of(self.tools[0], list(column), items, ALONE) for column in zip(*each, strict=True)]
        model = unwrap(self.tools[0].model)
        clock = Clock()
        runs = run(self.tools, x.to(*home(model), non_blocking=True), questions, watch=clock, warn=False)
        seconds = [clock.of(tool) / (len(images) * len(questions)) for tool in self.tools]
        made = [
            explanations(tool, items, made, q, self.digits)
            for q in range(len(questions))
            for tool, made in zip(self.tools, runs, strict=True)
        ]
        return [
            self._found(one, row, n // len(self.tools), seconds[n % len(self.tools)], draw)
            for one, own in zip(images, zip(*made, strict=True), strict=True)
            for n, row in enumerate(own)
        ]

    def _found(
        self, one: Loaded, made: Explanation, which: int, seconds: float, draw: Drawing | None
    ) -> dict[str, Any]:
        row = result_rows.found(self._common(one), made, self._said(one, which), seconds)
        row["notes"] = [*row["notes"], *one.notes]
        if draw is None:
            return row
        background = Background(partial(self._images_of, one), one.pixels, waiting=not one.dropped)
        return {**row, "overlay": draw(row, made, background)}

    def _images_of(self, one: Loaded) -> tuple[Pixels | None, Pixels | None]:
        """What an overlay is drawn on, read again where it was not kept: the image, and what the model saw of it."""
        if not one.dropped:
            return one.image, one.seen
        try:
            source = source_of(self.manifest, one.row["path"])
        except OSError as error:
            raise ImageError(f"it cannot be read again: {error.strerror or type(error).__name__}") from error
        if sha256_of(source) != one.sha256:
            raise ImageError("it has changed since it was explained")
        item = self.read(source)
        return item.image, item.seen

    def _apart(self, batch: Batch, draw: Drawing | None, error: str, *, transient: bool) -> list[dict[str, Any]]:
        """In halves, down to the image that fails."""
        if len(batch.images) == 1:
            return self._failed(batch.images[0], error, transient=transient)
        return [row for half in batch.halves() for row in self.rows(half, draw)]

    def _failed(self, one: Loaded, error: str, *, transient: bool) -> list[dict[str, Any]]:
        return [
            result_rows.failed(self._common(one), error, self._said(one, q), tool.title, transient=transient)
            for q in range(len(self.asked(one)))
            for tool in self.tools
        ]

    def _common(self, one: Loaded) -> dict[str, Any]:
        return result_rows.of_image(one.row, self.manifest.carried, one.sha256)

    def _said(self, one: Loaded, which: int) -> str | None:
        """The target as it was asked; None: the predicted class."""
        asked = self.asked(one)[which]
        return None if asked is None else in_words(asked)


def question_of(given: Any) -> Question:
    """A class index or name of a table's cell: CSV has numbers for both."""
    text = str(given)
    return int(text) if text.lstrip("-").isdecimal() else text
