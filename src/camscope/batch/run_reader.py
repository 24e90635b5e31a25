"""`RunReader`: read the rows, maps and images of a run folder, as a table or as explanations. The run may be incomplete."""

import html
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from camscope import render
from camscope.batch.build_manifest_from_source import DATASET_PREFIXES, build_manifest
from camscope.batch.image_loading import hash_source
from camscope.batch.image_manifest import (
    PSEUDONYMIZED_DATASET,
    ImageAccessor,
    Manifest,
    SupportsImageIndex,
    import_arrow,
    pseudonymize_manifest,
)
from camscope.batch.path_resolver import PathResolver
from camscope.batch.result_rows import EXPLANATION_COLUMNS, FAILED
from camscope.batch.run_store import RUN_FILE, RunStore
from camscope.batch.sql_query import Query, RowReader, open_map_parts, read_rows, table_to_dicts, translate_part_errors
from camscope.errors import CamscopeError, ImageError, InputError
from camscope.explanation import AUTO, Explanation, InterpolationOption, PixelArray, require_valid_explanation
from camscope.geometry import Placement
from camscope.images.photo_reader import read_photo
from camscope.images.scans.scan import convert_scan_to_display_pixels
from camscope.images.scans.scan_reader import is_scan, read_scan
from camscope.plurals import plural
from camscope.read_untrusted_files import read_errors_converted

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.dataset as ds


class RunReader:
    """Reader of the rows of a run, their maps and their images.

    `dataset` is the source of the images, as it was passed to `run_batch`. `fetch` allows images to be downloaded: those at
    URLs, and those of datasets that the run names. Without it, a run that someone else sent contacts no other machine.
    """

    def __init__(self, folder: str | os.PathLike[str], dataset: Any = None, *, fetch: bool = False) -> None:
        self.folder, self._source, self._open_lock = Path(folder), dataset, threading.Lock()
        self.fetch = fetch
        run_info = RunStore(folder).run_info
        if run_info is None:
            problem = "is a file" if self.folder.is_file() else "is not the folder of a run, since it holds no run.json"
            raise InputError(f"{folder} {problem}; expected the folder of a run, as camscope batch writes it")
        if invalid := _find_invalid_entries(run_info):
            raise InputError(f"{self.folder / RUN_FILE}: it is damaged: {', '.join(invalid)} is missing or invalid")
        self.run_info: dict[str, Any] = run_info

    @property
    def dataset(self) -> "ds.Dataset":
        """The rows as an Arrow dataset. Data is only read when the dataset is used."""
        store = RunStore(self.folder)
        parts = [str(store.part_path(chunk)) for chunk in sorted(store.finished_chunks())]
        if not parts:
            raise InputError(
                f"{self.folder}: the run has no finished part file; wait for the first one, or start the run again"
            )
        return open_map_parts(parts)

    def __len__(self) -> int:
        rows = self.dataset
        with translate_part_errors():
            return int(rows.count_rows())

    def table(self, columns: list[str] | None = None, filter: Any = None) -> "pa.Table":
        """Return the rows as an Arrow table. Columns and a filter may be chosen.

        Args:
            columns: The columns to read. Default: all.
            filter: A PyArrow expression for the rows to read. Default: all.

        Returns:
            The table, in the order of the run.

        >>> run.table(["id", "label", "status"]).num_rows  # of a run of `run_batch` over four images
        4

        """
        return read_rows(self.dataset, columns, filter)

    def query(
        self,
        where: str | None = None,
        sort: str | None = None,
        max_rows: int | None = None,
        columns: Sequence[str] | None = None,
    ) -> "pa.Table":
        """Return the rows that fulfill an SQL condition, such as `run.query("label = 'nodule'", "probability", 10)`.

        Args:
            where: A condition in DuckDB's SQL over the columns of the run. Failed rows are included: `status =
                'failed'`.
            sort: What to sort by, in SQL.
            max_rows: The maximum number of rows.
            columns: The columns to return. Default: all, including the maps.

        Returns:
            The table. Only the columns of the condition are read for all rows.

        Raises:
            InputError: The query is not valid SQL, or names a column that the run does not have.

        >>> run.query("label = 'nodule'", "probability", 2).num_rows  # of a run of `run_batch`
        2

        """
        rows = self.dataset
        if unknown := [name for name in columns or () if name not in rows.schema.names]:
            raise InputError(
                f"the run has no column {', '.join(unknown)}; its columns are {', '.join(rows.schema.names)}"
            )
        positions = Query(where, sort, max_rows).find_positions(rows)
        with translate_part_errors():
            return RowReader(rows).read_rows_at(positions, columns)

    def __iter__(self) -> Iterator[Explanation]:
        """Iterate over all maps as explanations. Rows without a map are skipped."""
        rows = self.dataset
        for table in RowReader(rows).iter_tables(Query().find_positions(rows)):
            for row in table_to_dicts(table):
                if row["attribution"] is not None:
                    yield self.explanation(row)

    def read_image(self, row: Mapping[str, Any]) -> PixelArray:
        """Read the image of a row.

        Args:
            row: A row of `table` or `query`, as a dictionary.

        Returns:
            (H,W,3) uint8.

        Raises:
            ImageError: The image is missing or has changed.

        >>> run.read_image(run.table().to_pylist()[0]).shape  # of a run of `run_batch`
        (128, 128, 3)

        """
        source = self.read_source(row)
        require_unchanged_image(row, source)
        return read_display_image(source, self.run_info["run_config"].get("window"))

    def require_images(self) -> None:
        """Check that the images are on this machine or in a dataset from the caller. Otherwise raise an ImageError.

        Raises:
            ImageError: Images are missing, and `fetch` is not set.

        >>> run.require_images()  # of a run of `run_batch`

        """
        with self._open_lock:
            _ = self._dataset_images
        if count := self.n_unfetched_images:
            raise ImageError(
                f"{plural(count, 'image of the run is', 'images of the run are')} not on this machine; to fetch "
                "them, pass --fetch (Python: fetch=True)"
            )

    @property
    def n_unfetched_images(self) -> int:
        """The number of images that are remote and must not be downloaded."""
        manifest = self.run_info["run_config"]["manifest"]
        if self.fetch or self._source is not None or manifest["dataset"] == PSEUDONYMIZED_DATASET:
            return 0
        if manifest["dataset"] is not None:
            return int(manifest["rows"]) if manifest["dataset"].startswith(DATASET_PREFIXES) else 0
        paths = self.dataset.to_table(columns=["path"])["path"].unique().to_pylist()
        return sum(path is not None and self.path_resolver.is_remote_path(path) for path in paths)

    @cached_property
    def path_resolver(self) -> PathResolver:
        """The resolver for the paths in the rows."""
        root = self.run_info["root"]
        return PathResolver(Path(root["folder"]), confined=bool(root["confined"]), fetch=self.fetch)

    def read_source(self, row: Mapping[str, Any]) -> Any:
        """Return the source of a row's image: the bytes of a file, the path of a scan, or an image of a dataset.

        Args:
            row: A row of `table` or `query`, as a dictionary.

        Returns:
            The image in a form that `Explainer.explain` accepts.

        Raises:
            ImageError: The image cannot be read.

        >>> run.read_source(run.table().to_pylist()[0])[1:4]  # of a run of `run_batch`, whose first image is a PNG file
        b'PNG'

        """
        path = row["path"]
        try:
            with self._open_lock:
                images = self._dataset_images
            return self.path_resolver.read_source(path) if images is None else images[row["row"]]
        except ImageError:
            raise
        except FileNotFoundError as error:
            raise ImageError(f"{path}: there is no such file") from (None if self.is_pseudonymized else error)
        except Exception as error:  # the package of a store may raise anything
            reason = getattr(error, "strerror", None)
            if self.is_pseudonymized:  # the message may contain the file name
                raise ImageError(f"{path}: it cannot be read: {reason or type(error).__name__}") from None
            if isinstance(error, InputError):
                raise ImageError(str(error)) from error
            if not isinstance(error, OSError | ValueError):
                raise
            raise ImageError(f"{path}: it cannot be read: {reason or error}") from error

    @property
    def is_pseudonymized(self) -> bool:
        """Whether pseudonyms replace the file names."""
        return bool(self.run_info["run_config"]["manifest"]["dataset"] == PSEUDONYMIZED_DATASET)

    @property
    def manifest_of_passed_images(self) -> Manifest | None:
        """The manifest of the image source that the caller passed. The value is `None` if the caller passed no image source."""
        with self._open_lock:
            images = self._dataset_images if self._source is not None else None
        return images.manifest if isinstance(images, ImageAccessor) else None

    def original_row(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        """Extend a row by the original path and by all columns of the manifest.

        Args:
            row: A row of `table` or `query`, as a dictionary.

        Returns:
            The row with more columns. Without an image source, the same row.

        >>> row = run.table(["row", "id", "path"]).to_pylist()[0]  # of a run of `run_batch`
        >>> run.original_row(row)["row"]
        0

        """
        manifest = self.manifest_of_passed_images
        return row if manifest is None else {**row, **manifest.row_by_number(row["row"])}

    @cached_property
    def _dataset_images(self) -> SupportsImageIndex | None:
        """The images of the dataset that the caller passed or the run names, by index. `None` if the images are files."""
        dataset_name = self.run_info["run_config"]["manifest"]["dataset"]
        if self._source is not None:
            manifest = build_manifest(self._source)
            if dataset_name == PSEUDONYMIZED_DATASET:
                manifest = pseudonymize_manifest(manifest)
            return ImageAccessor(manifest) if manifest.images is None else manifest.images
        if dataset_name is None:
            return None
        if dataset_name == PSEUDONYMIZED_DATASET:
            raise ImageError(
                "the file names of the run are pseudonyms; pass the source of the images: BatchRun(folder, manifest)"
            )
        if not dataset_name.startswith(DATASET_PREFIXES):
            raise ImageError(
                f"the images belong to the dataset {dataset_name!r}; pass the dataset: BatchRun(folder, dataset)"
            )
        if not self.fetch:
            raise ImageError(
                f"the images belong to the dataset {dataset_name!r}, which is not downloaded by default; pass --fetch "
                "(Python: fetch=True), or pass the dataset: BatchRun(folder, dataset)"
            )
        return build_manifest(dataset_name).images  # never from a folder that the run names

    def explanation(self, row: Mapping[str, Any], image: PixelArray | None = None) -> Explanation:
        """Convert a row of the run to an `Explanation`.

        Args:
            row: A row of `table` or `query`, as a dictionary.
            image: The image of the row, as `read_image` returns it. Default: the map is drawn on gray.

        Returns:
            The explanation, with the raw map at the resolution of its layer.

        Raises:
            InputError: The row has no map.

        >>> row = run.table().to_pylist()[0]  # of a run of `run_batch`
        >>> run.explanation(row).label
        'nodule'

        """
        with read_errors_converted(
            "a row of the run holds no map", quote_original=not self.is_pseudonymized, wrap_camscope_errors=True
        ):
            return require_valid_explanation(self._build_explanation(row, image))

    def _build_explanation(self, row: Mapping[str, Any], image: PixelArray | None) -> Explanation:
        """Build the explanation of a row of the run, with an optional image."""
        run_config, class_names, target = self.run_info["run_config"], self.run_info["class_names"], row["target"]
        if target is not None and target.isdecimal():
            class_index: int | None = int(target)
        else:  # None if the target is not a class
            class_index = class_names.index(row["label"]) if row["label"] in class_names else None
        input_size = tuple(row["input_size"])
        placement = None
        if row["placement"] is not None:
            matrix = np.array(row["placement"], np.float64).reshape(len(input_size), len(input_size) + 1)
            placement = Placement(matrix, input_size, tuple(row["image_size"]))
        return Explanation(
            **{name: row[name] for name in EXPLANATION_COLUMNS},
            attribution=np.array(row["attribution"], np.float32).reshape(tuple(row["grid"])),
            target=class_index,
            layout=None,
            input_size=input_size,
            placement=placement,
            notes=tuple(row["notes"]),
            name=row["id"],
            diagnostics={},
            parameters=run_config["methods"].get(f"{row['method']} {row['parameters_digest']}", {}),
            versions=self.run_info["versions"],
            model=run_config["model"]["digest"],
            image=image,
            model_input_image=None,
            affine=None if row.get("affine") is None else np.array(row["affine"], np.float64).reshape(4, 4),
            scan_steps=tuple(row.get("scan_steps") or ()),
        )

    @property
    def n_failed_rows(self) -> int:
        """The number of rows that have no map."""
        with translate_part_errors():
            return int(self.dataset.count_rows(filter=import_arrow("dataset").field("status") == FAILED))

    @property
    def summary(self) -> dict[str, str]:
        """Short texts that describe the run: its model, methods, targets, images and rows."""
        run_config, chunks = self.run_info["run_config"], RunStore(self.folder).finished_chunks()
        n_planned, chunk_size = run_config["manifest"]["rows"], run_config["chunk_size"]
        n_done = sum(min(chunk_size, n_planned - chunk * chunk_size) for chunk in chunks)
        n_failed = self.n_failed_rows if chunks else 0
        return {
            "model": f"{run_config['model']['source']} ({run_config['model']['digest'][:12]})",
            "methods": ", ".join(sorted({key.rpartition(" ")[0] for key in run_config["methods"]})),
            "targets": ", ".join(target or "the top class" for target in run_config["targets"]),
            "images": f"{n_done:,}" if n_done == n_planned else f"{n_done:,} of {n_planned:,} so far",
            "rows": f"{len(self) if chunks else 0:,}" + (f" ({n_failed:,} without a map)" if n_failed else ""),
        }

    def __repr__(self) -> str:
        texts = self.summary
        return f"<BatchRun {self.folder}: images {texts['images']}, rows {texts['rows']}, {texts['methods']} of {texts['model']}>"

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><th style='text-align:left'>{html.escape(name)}</th><td style='text-align:left'>{html.escape(text)}</td></tr>"
            for name, text in {"run": str(self.folder), **self.summary}.items()
        )
        return f"<table>{rows}</table>"


def _find_invalid_entries(run_info: Mapping[str, Any]) -> list[str]:
    """Return the names of run.json entries that are missing or invalid."""
    run_config = run_info["run_config"]
    methods, targets, class_names = run_config.get("methods"), run_config.get("targets"), run_info.get("class_names")
    entries = (run_config.get("model"), run_config.get("manifest"), run_info.get("root"), run_info.get("versions"))
    model, manifest, root, versions = (entry if isinstance(entry, Mapping) else {} for entry in entries)
    n_rows, chunk_size = (
        value if isinstance(value, int) and not isinstance(value, bool) else -1
        for value in (manifest.get("rows"), run_config.get("chunk_size"))
    )
    is_valid = {
        "model": all(isinstance(model.get(key), str) for key in ("source", "digest")),
        "methods": isinstance(methods, Mapping) and all(isinstance(value, Mapping) for value in methods.values()),
        "targets": isinstance(targets, list) and all(isinstance(target, str | None) for target in targets),
        "manifest": n_rows >= 0 and isinstance(manifest.get("dataset", 0), str | None),
        "chunk_size": chunk_size > 0,
        "window": isinstance(run_config.get("window"), str | None),
        "root": isinstance(root.get("folder"), str) and isinstance(root.get("confined"), bool),
        "versions": all(isinstance(versions.get(name), str) for name in ("camscope", "torch")),
        "class_names": isinstance(class_names, list) and all(isinstance(name, str) for name in class_names),
    }
    return [name for name, valid in is_valid.items() if not valid]


def read_display_image(source: Any, window: str | None = None) -> PixelArray:
    """Read an image as pixels for display, (H,W,3) or (D,H,W). `window` is the gray value window for scans.

    Raises an ImageError for a scan whose pixels may show text.
    """
    if not isinstance(source, Path) and not is_scan(source):
        return read_photo(source).pixels
    scan = read_scan(source)
    if not scan.is_safe_to_display:
        raise ImageError(f"{scan.name}: the scan is not shown, since text may be burned into its pixels")
    return convert_scan_to_display_pixels(scan, window)


def require_unchanged_image(row: Mapping[str, Any], source: Any) -> None:
    """Raise an ImageError if the image of a row has changed since it was explained."""
    if hash_source(source) != row["sha256"]:
        raise ImageError(f"{row['path']}: it has changed since it was explained")


OVERSAMPLING = 2  # pixels that are drawn per pixel of a thumbnail, in each direction


class OriginalImage(NamedTuple):
    """The image (H,W,3) of a row, or None and the reason why it cannot be read."""

    pixels: PixelArray | None
    failure_reason: str | None


def read_original_image(run: RunReader, row: Mapping[str, Any]) -> OriginalImage:
    """Read the original image of a row. If this fails, return the reason instead."""
    try:
        return OriginalImage(run.read_image(row), None)
    except Exception as error:  # the package of a store may raise anything
        return OriginalImage(None, strip_file_name(error, PurePath(row["path"]).name))


def render_thumbnail(
    explanation: Explanation, image: PixelArray | None, height: int, interpolation: InterpolationOption = AUTO
) -> PixelArray:
    """Draw a map over its image, `height` pixels high. Without an image, draw the map on a gray background."""
    placement = explanation.placement
    if placement is None or explanation.attribution.ndim != 2:
        return explanation.overlay(height=height, interpolation=interpolation)
    max_height, full_size = OVERSAMPLING * height, placement.image_size
    factor = min(1.0, max_height / full_size[0], 2 * max_height / full_size[1])
    if image is not None and factor < 1:  # drawing a large image would be slow
        image = render.resize_to_fit(image, max_height, 2 * max_height)
    size = [max(1, round(length * factor)) for length in full_size] if image is None else image.shape[:2]
    resized = replace(explanation, image=image, placement=placement.on_resized_image(size))
    return resized.overlay("image", height=height, interpolation=interpolation)


def strip_file_name(error: Exception, name: str) -> str:
    """Return the message of an error. A file name at its start is removed."""
    message = str(error) if isinstance(error, CamscopeError) else f"{type(error).__name__}: {error}"
    head, colon, reason = message.partition(": ")
    return reason if colon and (head == "the file" or head.endswith(name)) else message
