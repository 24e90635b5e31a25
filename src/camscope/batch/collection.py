"""Run: a finished run, or what is there of one, as an Arrow table or explanation by explanation."""

import os
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from camscope.batch.manifest import Numbered, arrow, placed
from camscope.batch.reading import bytes_of, sha256_of
from camscope.batch.sources import LIBRARIES, manifest_of
from camscope.batch.store import Store
from camscope.errors import ImageError, InputError
from camscope.explanation import Explanation, Pixels
from camscope.geometry import Placement
from camscope.images.photo import read_photo

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.dataset as ds


class Run:
    """The maps of a run: `for explanation in Run("heatmaps")`, `Run("heatmaps").table(["id", "label", "score"])`."""

    def __init__(self, folder: str | os.PathLike[str], dataset: Any = None) -> None:
        self.folder, self._given = Path(folder), dataset
        facts = Store(folder).facts
        if facts is None:
            raise InputError(f"{folder}: this is no run: it holds no run.json")
        self.facts: dict[str, Any] = facts

    @property
    def dataset(self) -> "ds.Dataset":
        """The rows, read when they are asked for."""
        parts = [str(Store(self.folder).path_of(chunk)) for chunk in sorted(Store(self.folder).finished())]
        if not parts:
            raise InputError(f"{self.folder}: no part of the run is finished")
        return arrow("dataset").dataset(parts, format="parquet")

    def __len__(self) -> int:
        return int(self.dataset.count_rows())

    def table(self, columns: list[str] | None = None) -> "pa.Table":
        """All rows, or some of their columns."""
        return self.dataset.to_table(columns=columns)

    def __iter__(self) -> Iterator[Explanation]:
        """The maps; rows of images that failed have none."""
        for batch in self.dataset.to_batches(batch_size=256):
            for row in batch.to_pylist():
                if row["heat"] is not None:
                    yield self.explanation(row)

    def photo(self, row: Mapping[str, Any]) -> Pixels:
        """(H,W,3): the image of a row, read again; ImageError where it is not there, or no longer the one explained."""
        root, path = self.facts["root"], row["path"]
        try:
            if self._images is not None:
                source = self._images[row["row"]]
            else:
                path = placed(path, Path(root["folder"]), confined=root["confined"])
                source = bytes_of(path)
        except (OSError, ValueError) as error:
            raise ImageError(f"{path}: it cannot be read: {getattr(error, 'strerror', None) or error}") from error
        if sha256_of(source) != row["sha256"]:
            raise ImageError(f"{path}: it has changed since it was explained")
        return read_photo(source).pixels

    @cached_property
    def _images(self) -> Numbered | None:
        """Of the dataset that the run is of, if it is of one: the one given, or that of its name."""
        named = self.facts["made_with"]["manifest"]["dataset"]
        if named is None:
            return None
        if self._given is None and not named.startswith(LIBRARIES):
            raise ImageError(f"the run is of a dataset, {named!r}; to see its images pass it: Run(folder, dataset)")
        return manifest_of(self._given or named, self.facts["root"]["folder"]).images

    def explanation(self, row: Mapping[str, Any], image: Pixels | None = None) -> Explanation:
        """A row of the table with its map. `image`: its photograph, as `photo` reads it; without, the map lies on grey."""
        made = self.facts["made_with"]
        grid, size = tuple(row["grid"]), tuple(row["input_size"])
        placement = row["placement"]
        settings = made["methods"].get(f"{row['method']} {row['parameters']}", {})
        return Explanation(
            heat=np.array(row["heat"], np.float32).reshape(grid),
            method=row["method"],
            target=self._class(row),
            label=row["label"],
            score=row["score"],
            probability=row["probability"],
            layer=row["layer"],
            layout=None,
            input_size=size,
            placement=None
            if placement is None
            else Placement(
                np.array(placement, np.float64).reshape(len(size), len(size) + 1), size, tuple(row["image_size"])
            ),
            status=row["status"],
            notes=tuple(row["notes"]),
            name=row["id"],
            measures={},
            parameters=settings,
            versions=self.facts["versions"],
            model=made["model"]["digest"],
            image=image,
            seen=None,
        )

    def _class(self, row: Mapping[str, Any]) -> int | None:
        """The index of the class that was asked for, if it was a class."""
        known, asked = self.facts["categories"], row["target"]
        if asked.isdecimal():
            return int(asked)
        return known.index(row["label"]) if row["label"] in known else None

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r}, {len(self)} rows)"
