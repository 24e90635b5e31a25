"""Collection: a finished run, or what is there of one, as an Arrow table or explanation by explanation.

Sight: the original of a row read again, and its map laid over it at the size of a thumbnail.
"""

import html
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

import numpy as np

from camscope import render
from camscope.batch.image_loading import hash_source
from camscope.batch.manifest import PSEUDONYMIZED_DATASET, Manifest, SupportsImageIndex, import_arrow
from camscope.batch.path_resolver import PathResolver
from camscope.batch.pseudonymize import ImageAccessor, pseudonymize_manifest
from camscope.batch.query import Query, RowReader, open_map_parts, read_rows, table_to_dicts, translate_part_errors
from camscope.batch.result_rows import FAILED
from camscope.batch.run_store import RUN_FILE, RunStore
from camscope.batch.sources import DATASET_PREFIXES, build_manifest
from camscope.data_readers import read_errors_converted
from camscope.errors import CamscopeError, ImageError, InputError
from camscope.explanation import Explanation, PixelArray, check_explanation
from camscope.geometry import Placement
from camscope.images.photo import read_photo
from camscope.images.scans.scan import convert_scan_to_display_pixels
from camscope.images.scans.scan_reader import is_scan, read_scan
from camscope.plurals import plural

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.dataset as ds


class MapCollection:
    """The rows of a run, their maps and their images.

    `dataset`: what the run was made of, as `run_batch` took it; the images are then read from there. `fetch`: whether images
    that are not on this machine are fetched: those behind URLs, and datasets that the run names. Without it, reading a run
    that someone else made contacts no other machine and downloads nothing.
    """

    def __init__(self, folder: str | os.PathLike[str], dataset: Any = None, *, fetch: bool = False) -> None:
        self.folder, self._source, self._open_lock = Path(folder), dataset, threading.Lock()
        self.fetch = fetch
        facts = RunStore(folder).run_info
        if facts is None and self.folder.is_file():
            raise InputError(f"{folder}: it is a file; expected the folder of a run, as camscope batch writes it")
        if facts is None:
            raise InputError(f"{folder}: this is no run: it holds no run.json")
        if wrong := [name for name, holds in _check_run_info(facts).items() if not holds]:
            raise InputError(
                f"{self.folder / RUN_FILE}: it is damaged: {', '.join(wrong)} is missing or not what a run has there"
            )
        self.run_info: dict[str, Any] = facts

    @property
    def dataset(self) -> "ds.Dataset":
        """The rows, read when they are asked for."""
        parts = [
            str(RunStore(self.folder).part_path(chunk)) for chunk in sorted(RunStore(self.folder).finished_chunks())
        ]
        if not parts:
            raise InputError(f"{self.folder}: no part of the run is finished")
        return open_map_parts(parts)

    def __len__(self) -> int:
        rows = self.dataset
        with translate_part_errors():
            return int(rows.count_rows())

    def table(self, columns: list[str] | None = None, filter: Any = None) -> "pa.Table":
        """All rows, or those for which an expression of PyArrow holds, or some of their columns."""
        return read_rows(self.dataset, columns, filter)

    def query(
        self,
        where: str | None = None,
        sort: str | None = None,
        limit: int | None = None,
        columns: Sequence[str] | None = None,
    ) -> "pa.Table":
        """The rows for which a condition holds: `score_function.query("label = 'nodule' and probability < 0.6", "probability", 10)`.

        `where`, `sort`: DuckDB's SQL over the columns of the run. Failed rows are rows too: `status = 'failed'`. Of the parts
        only the columns that these name are read, and then of the chosen rows what is asked for, maps too.
        """
        rows = self.dataset
        if unknown := [name for name in columns or () if name not in rows.schema.names]:
            raise InputError(f"no column {', '.join(unknown)}; the columns are {', '.join(rows.schema.names)}")
        places = Query(where, sort, limit).find_positions(rows)
        with translate_part_errors():
            return RowReader(rows).take(places, columns)

    def __iter__(self) -> Iterator[Explanation]:
        """The maps; rows of images that failed have none."""
        rows = self.dataset
        for piece in RowReader(rows).iter_tables(Query().find_positions(rows)):
            for row in table_to_dicts(piece):
                if row["attribution"] is not None:
                    yield self.explanation(row)

    def read_image(self, row: Mapping[str, Any]) -> PixelArray:
        """(H,W,3): the image of a row, read again; ImageError where it is not there, or no longer the one explained."""
        source = self.read_source(row)
        require_unchanged(row, source)
        return read_display_image(source, self.run_info["made_with"].get("window"))

    def require_images(self) -> None:
        """ImageError where the images are those of a dataset that is not given, or would have to be fetched."""
        with self._open_lock:
            _ = self._images
        if count := self.n_unfetched_images:
            raise ImageError(
                f"{plural(count, 'image of the run is', 'images of the run are')} not on this machine; to fetch "
                "them pass --fetch (Python: fetch=True)"
            )

    @property
    def n_unfetched_images(self) -> int:
        """How many images are not on this machine, and not fetched because nobody asked for it."""
        made = self.run_info["made_with"]["manifest"]
        if self.fetch or self._source is not None or made["dataset"] == PSEUDONYMIZED_DATASET:
            return 0
        if made["dataset"] is not None:
            return int(made["rows"]) if made["dataset"].startswith(DATASET_PREFIXES) else 0
        paths = self.dataset.to_table(columns=["path"])["path"].unique().to_pylist()
        return sum(path is not None and self.path_resolver.is_remote_path(path) for path in paths)

    @cached_property
    def path_resolver(self) -> PathResolver:
        """Where the paths in its rows lead."""
        root = self.run_info["root"]
        return PathResolver(Path(root["folder"]), confined=bool(root["confined"]), fetch=self.fetch)

    def read_source(self, row: Mapping[str, Any]) -> Any:
        """What a row is of, fetched again: a file's bytes, or an image of a dataset; ImageError where it is not there."""
        path = row["path"]
        try:
            with self._open_lock:
                images = self._images
            if images is not None:
                return images[row["row"]]
            return self.path_resolver.read(path)
        except ImageError:
            raise
        except FileNotFoundError as error:
            raise ImageError(f"{path}: there is no such file") from (None if self.is_pseudonymized else error)
        except Exception as error:  # a store's own package may raise anything
            if self.is_pseudonymized:  # its words may be those of the file's name
                why = getattr(error, "strerror", None) or type(error).__name__
                raise ImageError(f"{path}: it cannot be read: {why}") from None
            if isinstance(error, InputError):
                raise ImageError(str(error)) from error
            if not isinstance(error, OSError | ValueError):
                raise
            raise ImageError(f"{path}: it cannot be read: {getattr(error, 'strerror', None) or error}") from error

    @property
    def is_pseudonymized(self) -> bool:
        """Whether the run does not name its files."""
        return bool(self.run_info["made_with"]["manifest"]["dataset"] == PSEUDONYMIZED_DATASET)

    @property
    def source_manifest(self) -> Manifest | None:
        """What the run was made of, where it was passed."""
        with self._open_lock:
            images = self._images if self._source is not None else None
        return images.manifest if isinstance(images, ImageAccessor) else None

    def original_row(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        """A row with its path and all columns as the manifest has them, where that is known."""
        origin = self.source_manifest
        return row if origin is None else {**row, **origin.row_by_number(row["row"])}

    @cached_property
    def _images(self) -> SupportsImageIndex | None:
        """Those of what was given, or of the dataset that the run names; None: the files that its rows name."""
        named = self.run_info["made_with"]["manifest"]["dataset"]
        if self._source is not None:
            manifest = build_manifest(self._source)
            if named == PSEUDONYMIZED_DATASET:
                manifest = pseudonymize_manifest(manifest)
            return ImageAccessor(manifest) if manifest.images is None else manifest.images
        if named is None:
            return None
        if named == PSEUDONYMIZED_DATASET:
            raise ImageError(
                "the run does not say where its scans are; pass what it was made of: Run(folder, manifest)"
            )
        if not named.startswith(DATASET_PREFIXES):
            raise ImageError(f"the run is of a dataset, {named!r}; to see its images pass it: Run(folder, dataset)")
        if not self.fetch:
            raise ImageError(
                f"the run is of the dataset {named!r}, which is fetched on request only: pass --fetch (Python: fetch=True), or "
                "what the run was made of: Run(folder, dataset)"
            )
        return build_manifest(named).images  # never in a folder that the run names

    def explanation(self, row: Mapping[str, Any], image: PixelArray | None = None) -> Explanation:
        """A row of the table with its map. `image`: its photograph, as `read_image` reads it; without, the map lies on grey."""
        with read_errors_converted(
            "a row of the run holds no map", quote_original=not self.is_pseudonymized, wrap_camscope_errors=True
        ):
            return check_explanation(self._build_explanation(row, image))

    def _build_explanation(self, row: Mapping[str, Any], image: PixelArray | None) -> Explanation:
        made = self.run_info["made_with"]
        grid, size = tuple(row["grid"]), tuple(row["input_size"])
        placement = row["placement"]
        settings = made["methods"].get(f"{row['method']} {row['parameters']}", {})
        return Explanation(
            attribution=np.array(row["attribution"], np.float32).reshape(grid),
            method=row["method"],
            target=self._target_index(row),
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
            diagnostics={},
            parameters=settings,
            versions=self.run_info["versions"],
            model=made["model"]["digest"],
            image=image,
            model_input_image=None,
            affine=None if row.get("affine") is None else np.array(row["affine"], np.float64).reshape(4, 4),
            scan_steps=tuple(row.get("scan_steps") or ()),
        )

    def _target_index(self, row: Mapping[str, Any]) -> int | None:
        """The index of the class that was asked for, if it was a class."""
        known, asked = self.run_info["categories"], row["target"]
        if asked is not None and asked.isdecimal():
            return int(asked)
        return known.index(row["label"]) if row["label"] in known else None

    @property
    def n_failed_rows(self) -> int:
        """Rows without a map."""
        with translate_part_errors():
            return int(self.dataset.count_rows(filter=import_arrow("dataset").field("status") == FAILED))

    @property
    def summary(self) -> dict[str, str]:
        """What the run is, in a few words each."""
        made, done = self.run_info["made_with"], RunStore(self.folder).finished_chunks()
        planned, chunk = made["manifest"]["rows"], made["chunk"]
        there = sum(min(chunk, planned - one * chunk) for one in done)
        without = self.n_failed_rows if done else 0
        return {
            "model": f"{made['model']['source']} ({made['model']['digest'][:12]})",
            "methods": ", ".join(sorted({key.rpartition(" ")[0] for key in made["methods"]})),
            "targets": ", ".join("the top class" if one is None else one for one in made["targets"]),
            "images": f"{there:,}" if there == planned else f"{there:,} of {planned:,} so far",
            "rows": f"{len(self) if done else 0:,}" + (f" ({without:,} without a map)" if without else ""),
        }

    def __repr__(self) -> str:
        said = self.summary
        return (
            f"<Run {self.folder}: images {said['images']}, rows {said['rows']}, {said['methods']} of {said['model']}>"
        )

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><th style='text-align:left'>{html.escape(name)}</th><td style='text-align:left'>{html.escape(text)}</td></tr>"
            for name, text in {"run": str(self.folder), **self.summary}.items()
        )
        return f"<table>{rows}</table>"


def _check_run_info(run_info: Mapping[str, Any]) -> dict[str, bool]:
    """What a run.json has, by name: whether this one has it."""
    made, root = run_info["made_with"], run_info.get("root")
    if not isinstance(made, Mapping):
        return {"made_with": False}
    model, manifest, targets = made.get("model"), made.get("manifest"), made.get("targets")
    return {
        "model": isinstance(model, Mapping) and all(isinstance(model.get(key), str) for key in ("source", "digest")),
        "methods": isinstance(made.get("methods"), Mapping) and all(map(_is_mapping, made["methods"].values())),
        "targets": isinstance(targets, list) and all(isinstance(one, str | None) for one in targets),
        "manifest": isinstance(manifest, Mapping)
        and _is_count(manifest.get("rows"))
        and isinstance(manifest.get("dataset", 0), str | None),
        "chunk": _is_count(made.get("chunk")) and made["chunk"] > 0,
        "window": isinstance(made.get("window"), str | None),
        "root": isinstance(root, Mapping)
        and isinstance(root.get("folder"), str)
        and isinstance(root.get("confined"), bool),
        "versions": _is_mapping(run_info.get("versions"))
        and all(isinstance(run_info["versions"].get(name), str) for name in ("camscope", "torch")),
        "categories": isinstance(run_info.get("categories"), list)
        and all(isinstance(one, str) for one in run_info["categories"]),
    }


def _is_mapping(value: object) -> bool:
    return isinstance(value, Mapping)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def read_display_image(source: Any, window: str | None = None) -> PixelArray:
    """(H,W,3), or (D,H,W) of a volume: an image as it is looked at, a grey scan through the run's window.

    ImageError where text may be part of a scan's picture.
    """
    if not isinstance(source, Path) and not is_scan(source):
        return read_photo(source).pixels
    scan = read_scan(source)
    if not scan.is_safe_to_display:
        raise ImageError(f"{scan.name}: it is not shown, for text may be part of its picture")
    return convert_scan_to_display_pixels(scan, window)


def require_unchanged(row: Mapping[str, Any], source: Any) -> None:
    """ImageError unless what a row is of is to the byte what was explained."""
    if hash_source(source) != row["sha256"]:
        raise ImageError(f"{row['path']}: it has changed since it was explained")


OVERSAMPLING = 2  # a map is drawn on so many pixels for one of the thumbnail


def read_original(maps: MapCollection, row: Mapping[str, Any]) -> tuple[PixelArray | None, str | None]:
    """The picture (H,W,3) of a row, or why it cannot be seen: a store's own package may raise anything."""
    try:
        return maps.read_image(row), None
    except Exception as error:
        return None, strip_file_name(error, PurePath(row["path"]).name)


def render_thumbnail(explanation: Explanation, image: PixelArray | None, height: int) -> PixelArray:
    """(h,w,3): a map over its photograph, or on grey, in `height` rows. A large photograph is made smaller before."""
    place = explanation.placement
    if place is None or explanation.attribution.ndim != 2:
        return explanation.overlay(height=height)
    bound, whole = OVERSAMPLING * height, place.image_size
    factor = min(1.0, bound / whole[0], 2 * bound / whole[1])
    if image is not None and factor < 1:
        image = render.resize_to_fit(image, bound, 2 * bound)
    now = [max(1, round(pixels * factor)) for pixels in whole] if image is None else image.shape[:2]
    return replace(explanation, image=image, placement=place.on_resized_image(now)).overlay("image", height=height)


def strip_file_name(error: Exception, name: str) -> str:
    """A reason without the file's name in front, which the row has: so that equal reasons are equal."""
    said = str(error) if isinstance(error, CamscopeError) else f"{type(error).__name__}: {error}"
    head, colon, rest = said.partition(": ")
    return rest if colon and (head == "the file" or head.endswith(name)) else said
