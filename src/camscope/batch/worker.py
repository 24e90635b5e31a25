"""Worker: the rows of some images, whose passes are shared, each image failing for itself."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from camscope.batch import rows
from camscope.batch.manifest import Manifest
from camscope.batch.reading import Loaded
from camscope.cards import digest
from camscope.errors import LayerError, MissingExtraError, ModelError, PreprocessError, TargetError
from camscope.explainers import Explainer
from camscope.explainers.inputs import ALONE, Item
from camscope.explainers.run import run
from camscope.explainers.scene import asked_of
from camscope.explainers.together import expect_alike, explanation
from camscope.hooks.base import unwrap
from camscope.targets import Question

OF_THE_RUN = (LayerError, MissingExtraError, ModelError, PreprocessError)  # errors that every image would have


@dataclass(frozen=True)
class Worker:
    """Explainers of one model, the questions for images whose row asks none, and what goes along."""

    tools: Sequence[Explainer]
    targets: Sequence[Question]
    manifest: Manifest
    batch_size: int = 16

    def __post_init__(self) -> None:
        expect_alike(self.tools)

    def read(self, data: bytes) -> Item:
        """A file's bytes as the model takes them."""
        return self.tools[0].read(data)

    def asked(self, one: Loaded) -> Sequence[Question]:
        """The row's own target, or the run's."""
        own = one.row.get("target")
        return self.targets if own is None else [_question(own)]

    def group(self, one: Loaded) -> object:
        """Images of one group share their passes: of one size, asked as many questions, by themselves or by the run."""
        own = one.row.get("target") is not None
        return None if one.item is None else (tuple(one.item.x.shape), own)

    def rows(self, images: Sequence[Loaded]) -> list[dict[str, Any]]:
        """The rows of images of one group: of each its targets, of each target the methods."""
        if images[0].item is None:
            return [row for one in images for row in self._failed(one, one.error or "")]
        begin = time.perf_counter()
        try:
            found = self._explained(images)
        except torch.OutOfMemoryError as error:
            torch.cuda.empty_cache()
            return self._apart(images, f"out of memory, alone: {error}")
        except OF_THE_RUN:
            raise
        except TargetError as error:
            if len(images) == 1 and images[0].row.get("target") is None:
                raise
            return self._apart(images, str(error))
        except Exception as error:
            return self._apart(images, f"{type(error).__name__}: {error}")
        seconds = (time.perf_counter() - begin) / max(1, sum(map(len, found)))
        return [{**row, "seconds": seconds} for own in found for row in own]

    def _explained(self, images: Sequence[Loaded]) -> list[list[dict[str, Any]]]:
        """[image]: its rows."""
        items = [one.item for one in images if one.item is not None]
        each = [self.asked(one) for one in images]
        questions = [asked_of(self.tools[0], list(column), items, ALONE) for column in zip(*each, strict=True)]
        runs = run(self.tools, torch.stack([item.x for item in items]), questions, warn=False)
        digits = digest(unwrap(self.tools[0].model))
        return [
            [
                rows.found(self._common(one), explanation(tool, i, items[i], made, q, digits), self._said(one, q), 0.0)
                for q in range(len(questions))
                for tool, made in zip(self.tools, runs, strict=True)
            ]
            for i, one in enumerate(images)
        ]

    def _apart(self, images: Sequence[Loaded], error: str) -> list[dict[str, Any]]:
        """In halves, down to the image that fails."""
        if len(images) == 1:
            return self._failed(images[0], error)
        half = len(images) // 2
        return [*self.rows(images[:half]), *self.rows(images[half:])]

    def _failed(self, one: Loaded, error: str) -> list[dict[str, Any]]:
        return [
            rows.failed(self._common(one), error, self._said(one, q), tool.title)
            for q in range(len(self.asked(one)))
            for tool in self.tools
        ]

    def _common(self, one: Loaded) -> dict[str, Any]:
        return rows.of_image(one.row, self.manifest.carried, one.sha256)

    def _said(self, one: Loaded, which: int) -> str | None:
        """The target as it was asked; None: the predicted class."""
        asked = self.asked(one)[which]
        return None if asked is None else str(asked)


def _question(given: Any) -> Question:
    """A class index or name of a table's cell: CSV has numbers for both."""
    text = str(given)
    return int(text) if text.lstrip("-").isdecimal() else text
