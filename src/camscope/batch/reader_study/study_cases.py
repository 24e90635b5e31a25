"""Read the cases of a reader study from a run: one row per image, with its true class, patient and model answer."""

import csv
import io
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from camscope.atomic_writes_and_folder_locks import read_bytes
from camscope.batch.image_manifest import LABEL_COLUMN
from camscope.batch.run_reader import RunReader
from camscope.batch.sql_query import Query, RowReader, table_to_dicts
from camscope.errors import InputError
from camscope.plurals import plural

MAX_LABEL_BYTES, MAX_ANSWERS = 2**26, 9  # bytes of a file of labels; answers that a single key selects
PATIENT_COLUMNS = ("patient", "patient_id")  # columns that group the images by default
NEGATIVE_NAMES = ("no finding", "normal", "negative", "healthy", "benign", "none", "absent", "no", "false", "0")
LISTED_ROWS = 3  # rows that a message names


@dataclass(frozen=True)
class StudyCase:
    """A case of a reader study: a row of the run with the true class, the patient and the model's answer, if known."""

    row: Mapping[str, Any]
    truth: str
    patient: str
    model_answer: str | None


def read_study_cases(
    run: RunReader, query: Query, labels: str | os.PathLike[str] | None, group: str | None, model_answers: str | None
) -> list[StudyCase]:
    """Read the cases that a query selects. Raise an InputError if a case has no map, no label, or two maps."""
    rows = [
        row
        for table in RowReader(run.dataset).iter_tables(np.sort(query.find_positions(run.dataset)))
        for row in table_to_dicts(table)
    ]
    if not rows:
        raise InputError(f"no row of the run matches: {query.where}")
    _require_one_map_per_image(run, rows)
    originals = [run.original_row(row) for row in rows]
    truths = _read_labels(originals, labels)
    group_column = group or next((name for name in PATIENT_COLUMNS if name in originals[0]), None)
    patients = _read_column(originals, group_column, "group") if group_column else [str(row["row"]) for row in rows]
    answers = _read_model_answers(run, originals, model_answers)
    return [StudyCase(*fields) for fields in zip(rows, truths, patients, answers, strict=True)]


def choose_positive_answer(answers: Sequence[str], positive: str | None) -> str | None:
    """Return the answer that counts as positive. With more than two answers, return None."""
    if positive is not None and (positive not in answers or len(answers) != 2):
        raise InputError(
            f"positive={positive!r}; expected one of two answers, but the answers are {', '.join(answers)}"
        )
    if positive is not None or len(answers) != 2:
        return positive
    negatives = [answer for answer in answers if answer.strip().lower() in NEGATIVE_NAMES]
    return next((answer for answer in answers if answer not in negatives), None) if len(negatives) == 1 else answers[1]


def _require_one_map_per_image(run: RunReader, rows: Sequence[Mapping[str, Any]]) -> None:
    missing = [str(row["row"]) for row in rows if row["attribution"] is None]
    if missing:
        raise InputError(
            f"{plural(len(missing), 'row has', 'rows have')} no map (row {', '.join(missing[:LISTED_ROWS])}); leave them out, "
            "such as by --where \"status <> 'failed'\""
        )
    counts = Counter(row["row"] for row in rows)
    if max(counts.values()) > 1:
        config = run.run_info["run_config"]
        methods = ", ".join(dict.fromkeys(key.rpartition(" ")[0] for key in config["methods"]))
        raise InputError(
            f"an image has {plural(max(counts.values()), 'map')} (methods {methods}; "
            f"{plural(len(config['targets']), 'target')}); a study has one map per image: "
            "select it, such as by --where \"method = 'gradcam'\""
        )
    if any(len(row["grid"]) != 2 or (row["image_size"] is not None and len(row["image_size"]) != 2) for row in rows):
        raise InputError(
            "the run has maps of volumes or signals; a reader study shows images: export slices as images first"
        )
    if any(row["placement"] is None for row in rows):
        raise InputError(
            "the position of a map on its image is unknown, so that the map cannot be drawn over the image"
        )


def _read_labels(rows: Sequence[Mapping[str, Any]], labels: str | os.PathLike[str] | None) -> list[str]:
    """Return the true class of each row, from a column of the run or manifest, or from a CSV file with `id` and `label`."""
    name = LABEL_COLUMN if labels is None else os.fspath(labels)
    if name in rows[0]:
        return _read_column(rows, name, "labels")
    if labels is None or not Path(name).is_file():
        received = "the run has no labels" if labels is None else f"labels={name!r} is neither a column nor a file"
        raise InputError(
            f"{received}; a reader study needs the true class of each image: name a column of the run ({', '.join(rows[0])}), "
            "or a CSV file with the columns id and label (labels=, or --labels)"
        )
    try:
        text = read_bytes(name, MAX_LABEL_BYTES).decode("utf-8-sig")
        table = list(csv.DictReader(io.StringIO(text, newline="")))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{name}: it cannot be read as a CSV file in UTF-8: {error}") from error
    if not table or not {"id", "label"} <= set(table[0]):
        raise InputError(f"{name}: expected a CSV file with the columns id and label")
    by_id = {line["id"]: (line["label"] or "").strip() for line in table}
    if len(by_id) < len(table):
        raise InputError(f"{name}: an id occurs more than once; expected one line per image")
    missing = [str(row["row"]) for row in rows if not by_id.get(row["id"])]
    if missing:
        raise InputError(
            f"{name}: {plural(len(missing), 'image has', 'images have')} no label (row {', '.join(missing[:LISTED_ROWS])}); "
            "expected the ids of the run in the column id"
        )
    return [by_id[row["id"]] for row in rows]


def _read_column(rows: Sequence[Mapping[str, Any]], name: str, argument: str) -> list[str]:
    if name not in rows[0]:
        raise InputError(f"{argument}={name!r}: the run has no such column; its columns are {', '.join(rows[0])}")
    values = ["" if row[name] is None else str(row[name]).strip() for row in rows]
    missing = [str(row["row"]) for row, value in zip(rows, values, strict=True) if not value]
    if missing:
        raise InputError(
            f"{argument}: {plural(len(missing), 'row has', 'rows have')} no value in the column {name} (row "
            f"{', '.join(missing[:LISTED_ROWS])}); leave them out, such as by --where '{name} is not null'"
        )
    return values


def _read_model_answers(run: RunReader, rows: Sequence[Mapping[str, Any]], column: str | None) -> list[str | None]:
    """Return the class that the model predicts for each row. Where the run does not contain it, return None for the row."""
    if column is not None:
        return list(_read_column(rows, column, "model_answers"))
    class_names, is_top_class = run.run_info["class_names"], run.run_info["run_config"]["targets"] == [None]
    answers: list[str | None] = []
    for row in rows:
        label, probability = row["label"], row["probability"]
        if is_top_class or (probability is not None and probability > 0.5):
            answers.append(label)
        elif probability is not None and probability < 0.5 and len(class_names) == 2 and label in class_names:
            answers.append(class_names[1 - class_names.index(label)])
        else:
            answers.append(None)
    return answers
