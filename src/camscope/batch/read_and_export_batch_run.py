"""`BatchRun`: a `RunReader` that also writes a contact sheet, exports rows, and exports a reader study."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from camscope.atomic_writes_and_folder_locks import check_not_existing, write_bytes
from camscope.batch.export_rows_to_files import Exporter, ExportResult
from camscope.batch.fiftyone_samples import build_samples
from camscope.batch.html_contact_sheet import build_contact_sheet
from camscope.batch.reader_study.export_reader_study import ReaderStudyExport, ReaderStudyOptions, write_reader_study
from camscope.batch.run_reader import RunReader
from camscope.batch.sql_query import Query
from camscope.explanation import AUTO, InterpolationOption


class BatchRun(RunReader):
    """The maps that a run of `run_batch` has written.

    Iteration gives `Explanation` objects, and `query` gives rows of a table.

    Args:
        folder: The folder that `run_batch` wrote.
        dataset: The source of the images, as it was passed to `run_batch`. Default: the source that the run names.
        fetch: Whether images may be downloaded: those at URLs, and those of datasets that the run names.

    >>> import numpy as np, tempfile
    >>> from camscope import GradCAM, load_model, run_batch
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     images = [np.zeros((32, 32, 3), np.uint8)] * 2
    ...     _ = run_batch(GradCAM(load_model("phantom")), images, folder)
    ...     run = BatchRun(folder)
    ...     [explanation.name for explanation in run], run.query('"row" = 1')["id"].to_pylist()
    (['#0', '#1'], ['#1'])

    """

    def save_html(
        self,
        path: str | os.PathLike[str],
        where: str | None = None,
        sort: str | None = None,
        max_rows: int = 60,
        *,
        image_height: int = 224,
        interpolation: InterpolationOption = AUTO,
        overwrite: bool = False,
    ) -> Path:
        """Write a contact sheet of the selected rows. It is one HTML file with embedded images and without scripts.

        Args:
            path: The file to write.
            where: A condition in SQL: see `query`.
            sort: What to sort by, in SQL.
            max_rows: The maximum number of rows.
            image_height: Height of each image in pixels.
            interpolation: As for `Explanation.overlay`.
            overwrite: Replace an existing file.

        Returns:
            The path of the file.

        Raises:
            InputError: No row matches, or the query or the interpolation is invalid.
            OutputError: The file exists, or cannot be written.

        >>> import tempfile
        >>> run.save_html(f"{tempfile.mkdtemp()}/sheet.html", max_rows=2).suffix  # of a run of `run_batch`
        '.html'

        """
        check_not_existing(path, overwrite)
        query, num_threads = Query(where, sort, max_rows), os.cpu_count() or 1
        sheet = build_contact_sheet(self, query, image_height, num_threads, interpolation=interpolation)
        return write_bytes(path, sheet.html.encode(), overwrite=overwrite)

    def export(
        self,
        folder: str | os.PathLike[str],
        formats: str | Sequence[str] = "png",
        where: str | None = None,
        sort: str | None = None,
        max_rows: int | None = None,
        *,
        threshold: float = 0.5,
        interpolation: InterpolationOption = AUTO,
        overwrite: bool = False,
    ) -> ExportResult:
        """Export the selected rows as images, maps or tables.

        Args:
            folder: The folder of the files.
            formats: One or several formats. "png", "jpg", "webp": overlays at the size of the images. "npz", "json":
                the maps as `Explanation.save` writes them, without pixels. "csv": `rows.csv`, a table for spreadsheets.
                "coco": `coco.json`, boxes and outlines of the regions above the threshold.
            where: A condition in SQL: see `query`.
            sort: What to sort by, in SQL.
            max_rows: The maximum number of rows.
            threshold: The lower bound of a region, as a fraction of the maximum of the map.
            interpolation: Of overlays, as for `Explanation.overlay`.
            overwrite: Replace existing files.

        Returns:
            The number of files, and the reasons why some rows have no file.

        Raises:
            InputError: A format, the threshold, the interpolation or the query is invalid.
            OutputError: A table exists, or a file cannot be written.

        >>> import tempfile
        >>> result = run.export(tempfile.mkdtemp(), "csv")  # of a run of `run_batch`
        >>> type(result).__name__
        'ExportResult'

        """
        format_list = [formats] if isinstance(formats, str) else list(formats)
        exporter = Exporter(self, Path(folder), format_list, threshold, overwrite, interpolation=interpolation)
        return exporter.export_rows(Query(where, sort, max_rows), os.cpu_count() or 1, lambda _: None)

    def to_fiftyone(self, where: str | None = None, sort: str | None = None, max_rows: int | None = None) -> list[Any]:
        """Return the images of the selected rows as samples of FiftyOne.

        Each map is a Heatmap, named for its method and, if an image has several of them, its class. A Classification such as
        `gradcam_class` has the explained class and its probability. The fields `camscope_id` and `status` follow. The samples
        need no database: `fiftyone.Dataset().add_samples(samples)` stores them in one.

        Args:
            where: A condition in SQL: see `query`.
            sort: What to sort by, in SQL.
            max_rows: The maximum number of rows.

        Returns:
            A list of `fiftyone.Sample`, one for each image. A heatmap (H,W) has the size of the image, and its maximum is 1.

        Raises:
            InputError: FiftyOne is not installed, the query is invalid, or the run does not name its image files.

        >>> samples = run.to_fiftyone(max_rows=4)  # doctest: +SKIP
        >>> samples[0]["gradcam"].map.shape  # doctest: +SKIP
        (128, 128)

        """
        return build_samples(self, where, sort, max_rows)

    def export_reader_study(
        self,
        folder: str | os.PathLike[str],
        labels: str | os.PathLike[str] | None = None,
        options: ReaderStudyOptions | None = None,
        *,
        group: str | None = None,
        where: str | None = None,
        sort: str | None = None,
        max_rows: int | None = None,
        model_answers: str | None = None,
        positive: str | None = None,
    ) -> ReaderStudyExport:
        """Write a blinded reader study: each image without a map, with its map, and with a control map.

        The folder has one folder for each reader and session, with images under new names in an order of their own, a form
        and a page to fill it in. The folder `key` says which image is which. Keep it away from the readers.

        Args:
            folder: The folder to write. It must not exist.
            labels: The true class of each image: a column of the run or of its manifest, or a CSV file with the columns `id`
                and `label`. Default: the column `class`, where a run keeps the column `label` of its manifest.
            options: The design. Default: four readers, a crossed design, and the map of another case as control.
            group: The column of the patients. Default: `patient` or `patient_id`; without them, each image is a patient.
            where: A condition in SQL: see `query`. One map per image must remain.
            sort: What to sort by, in SQL, if `max_rows` is given.
            max_rows: The maximum number of cases.
            model_answers: The column of the class that the model predicts. Default: the class of the map, if the run
                explained the top class or its probability is above 0.5.
            positive: The positive one of two answers. Default: the one whose name does not mean "no finding".

        Returns:
            The folder, with the numbers of cases, patients, readers and sessions.

        Raises:
            InputError: Labels are missing, an image cannot be shown, or the design does not fit the cases.
            OutputError: The folder exists.

        >>> from camscope.batch import ReaderStudyOptions
        >>> from camscope.errors import InputError
        >>> try:
        ...     run.export_reader_study("study", options=ReaderStudyOptions(n_readers=2))  # `run`: of `run_batch`
        ... except InputError as error:
        ...     print(str(error)[:21])
        the run has no labels

        """
        return write_reader_study(
            self,
            folder,
            Query(where, sort, max_rows),
            options or ReaderStudyOptions(),
            labels,
            group,
            model_answers,
            positive,
        )
