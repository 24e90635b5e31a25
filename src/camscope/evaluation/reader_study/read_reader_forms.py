"""Read the filled forms of a reader study, and join them with the key. All faults of all forms are reported together."""

import csv
import io
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from camscope.atomic_writes_and_folder_locks import read_bytes
from camscope.batch.reader_study import study_files
from camscope.errors import FormError, InputError
from camscope.plurals import plural

MAX_FILE_BYTES = 2**26  # of a form or the key
MAX_LISTED_FAULTS, MAX_QUOTED_CHARACTERS = 50, 40  # in a message
MAX_SECONDS = 86_400.0  # of one reading


@dataclass(frozen=True)
class StudyReadings:
    """The readings of a study that have an answer, as columns of equal length N.

    Attributes:
        reader: (N,) number of the reader.
        session: (N,) number of the session.
        row: (N,) row of the image in the run.
        patient: (N,) number of the patient.
        condition: (N,) condition.
        truth: (N,) true class.
        answer: (N,) answer of the reader.
        model_answer: (N,) answer of the model, or "".
        confidence: (N,) confidence in 0..100, or NaN.
        seconds: (N,) time of the reading, or NaN.
        n_missing: The number of readings without an answer.

    """

    reader: npt.NDArray[np.int64]
    session: npt.NDArray[np.int64]
    row: npt.NDArray[np.int64]
    patient: npt.NDArray[np.int64]
    condition: npt.NDArray[Any]
    truth: npt.NDArray[Any]
    answer: npt.NDArray[Any]
    model_answer: npt.NDArray[Any]
    confidence: npt.NDArray[np.float64]
    seconds: npt.NDArray[np.float64]
    n_missing: int = 0

    def __len__(self) -> int:
        return len(self.reader)


@dataclass(eq=False)
class FormFaults:
    """Collects the faults of forms, each with its file and line."""

    texts: list[str] = field(default_factory=list)

    def add(self, file: str, line: int | None, text: str) -> None:
        """Record a fault. A fault without a line belongs to the whole file."""
        place = file if line is None else f"{file}, line {line}"
        self.texts.append(f"{place}: {text}")

    def raise_if_any(self) -> None:
        """Raise a FormError that lists all faults, if any were recorded."""
        if self.texts:
            listed = self.texts[:MAX_LISTED_FAULTS]
            n_further = len(self.texts) - len(listed)
            more = [f"and {plural(n_further, 'further fault')}"] if n_further else []
            head = f"{plural(len(self.texts), 'fault')} in the forms; correct them, and repeat the command:"
            raise FormError("\n".join([head, *listed, *more]))


def read_study(folder: Path, key_folder: Path) -> dict[str, Any]:
    """Read study.json. Raise an InputError if it is missing or damaged."""
    path = key_folder / study_files.STUDY_FILE
    if not path.is_file():
        raise InputError(
            f"{key_folder} holds no {study_files.STUDY_FILE}; expected the key of the reader study {folder} (key=, or --key)"
        )
    try:
        study = json.loads(read_bytes(path, MAX_FILE_BYTES))
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: it is damaged: {error}") from error
    required = {"study": str, "answers": list, "conditions": list, "n_readers": int, "n_cases": int, "n_patients": int}
    if not isinstance(study, dict) or study.get("schema") != study_files.STUDY_SCHEMA:
        raise InputError(f"{path}: it is not the description of a reader study of this version of camscope")
    if wrong := [name for name, kind in required.items() if not isinstance(study.get(name), kind)]:
        raise InputError(f"{path}: it is damaged: {', '.join(wrong)} is missing or invalid")
    return study


def read_readings(
    folder: Path, key_folder: Path, study: Mapping[str, Any], *, allow_missing: bool = False
) -> StudyReadings:
    """Read all forms and the key of a study. Raise a FormError that lists every fault."""
    key = _read_key(key_folder / study_files.KEY_FILE, study)
    faults, lines_by_session = FormFaults(), dict[tuple[int, int], dict[str, Mapping[str, str]]]()
    for reader, session in sorted({(entry["reader"], entry["session"]) for entry in key}):
        cases = {entry["case"] for entry in key if (entry["reader"], entry["session"]) == (reader, session)}
        names = study_files.name_reader_folder(reader), study_files.name_session_folder(session)
        path = folder.joinpath(*names, study_files.FORM_FILE)
        token = study_files.compute_form_token(study["study"], reader, session)
        file = "/".join((*names, study_files.FORM_FILE))
        lines_by_session[reader, session] = _read_form(
            path, file, token, cases, study["answers"], faults, allow_missing=allow_missing
        )
    faults.raise_if_any()
    rows = []
    for entry in key:
        line = lines_by_session[entry["reader"], entry["session"]].get(entry["case"])
        if line is not None:
            rows.append({**entry, **line})
    if not rows:
        raise InputError("no form has an answer")
    columns: dict[str, Any] = {
        name: np.array([row[name] for row in rows], np.int64) for name in ("reader", "session", "row", "patient")
    }
    for name in ("condition", "truth", "answer", "model_answer"):
        columns[name] = np.array([row[name] for row in rows], np.str_)
    for name in ("confidence", "seconds"):
        columns[name] = np.array([float(row[name]) if row[name] else math.nan for row in rows])
    return StudyReadings(**columns, n_missing=len(key) - len(rows))


def _read_key(path: Path, study: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Read key.csv. Raise an InputError if it does not fit study.json."""
    try:
        table = _read_csv(path)
        if list(table[0]) != list(study_files.KEY_COLUMNS):
            raise ValueError(f"expected the columns {', '.join(study_files.KEY_COLUMNS)}")
        key: list[dict[str, Any]] = [
            {**line, **{name: int(line[name]) for name in ("reader", "session", "row", "patient")}} for line in table
        ]
    except (OSError, ValueError, IndexError, TypeError, csv.Error) as error:
        reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else error
        raise InputError(f"{path}: it is missing or damaged: {reason}") from error
    places = {(line["reader"], line["session"], line["case"]) for line in key}
    is_complete = (
        len(places) == len(key)
        and {line["condition"] for line in key} == set(study["conditions"])
        and {line["truth"] for line in key} <= set(study["answers"])
        and {line["reader"] for line in key} == set(range(1, study["n_readers"] + 1))
    )
    if not is_complete:
        raise InputError(f"{path}: it does not belong to {study_files.STUDY_FILE} of the same folder, or is damaged")
    return key


def _read_csv(path: Path) -> list[dict[str, str]]:
    """Read a CSV file with commas or semicolons, as spreadsheets write it."""
    text = read_bytes(path, MAX_FILE_BYTES).decode("utf-8-sig")
    head = text.partition("\n")[0]
    delimiter = ";" if head.count(";") > head.count(",") else ","
    return list(csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter, restkey="", restval=""))


def _read_form(
    path: Path,
    file: str,
    token: str,
    cases: set[str],
    answers: Sequence[str],
    faults: FormFaults,
    *,
    allow_missing: bool,
) -> dict[str, Mapping[str, str]]:
    """Read a form. Return its filled lines by case, and record its faults."""
    try:
        table = _read_csv(path)
    except FileNotFoundError:
        if not allow_missing:
            faults.add(file, None, "there is no such file")
        return {}
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        faults.add(file, None, f"it cannot be read as a CSV file in UTF-8: {error}")
        return {}
    missing_columns = [name for name in study_files.FORM_COLUMNS[:5] if not table or name not in table[0]]
    if missing_columns:
        faults.add(file, 1, f"the column {', '.join(missing_columns)} is missing")
        return {}
    if not any((line.get("answer") or "").strip() for line in table):
        if not allow_missing:
            faults.add(file, None, "no case has an answer")
        return {}
    filled: dict[str, Mapping[str, str]] = {}
    listed = set[str]()
    for number, raw in enumerate(table, start=2):
        line = {name: (raw.get(name) or "").strip() for name in study_files.FORM_COLUMNS}
        case = line["case"].zfill(3) if line["case"].isdecimal() else line["case"]  # a spreadsheet drops zeros
        if line["form"] != token:
            faults.add(
                file, number, f"form {_quote(line['form'])} belongs to another session or study; expected {token}"
            )
        elif case not in cases:
            faults.add(file, number, f"case {_quote(line['case'])} is not in this session")
        elif case in listed:
            faults.add(file, number, f"case {case} occurs a second time")
        elif not line["answer"]:
            if not allow_missing:
                faults.add(file, number, f"case {case} has no answer")
        else:
            filled[case] = _check_answer(line, file, number, answers, faults)
        listed.add(case)
    if not allow_missing and all(line.get("form") == token for line in table):
        for case in sorted(cases - listed):
            faults.add(file, None, f"case {case} has no line")
    return filled


def _check_answer(
    line: Mapping[str, str], file: str, number: int, answers: Sequence[str], faults: FormFaults
) -> Mapping[str, str]:
    """Check the answer and the numbers of a line. Return the line with the answer in its spelling of the study."""
    by_folded = {answer.casefold(): answer for answer in answers}
    answer = by_folded.get(line["answer"].casefold())
    if answer is None:
        faults.add(file, number, f"answer {_quote(line['answer'])} is not allowed; expected {', '.join(answers)}")
    numbers = {}
    for name, highest in (("confidence", float(study_files.MAX_CONFIDENCE)), ("seconds", MAX_SECONDS)):
        text = line[name].replace(",", ".")
        try:
            is_valid = not text or (0 <= float(text) <= highest and (name != "seconds" or float(text) > 0))
        except ValueError:
            is_valid = False
        if not is_valid:
            lowest = "above 0" if name == "seconds" else "from 0"
            faults.add(
                file, number, f"{name} {_quote(line[name])}; expected a number {lowest} to {highest:g}, or nothing"
            )
        numbers[name] = text if is_valid else ""
    return {**line, **numbers, "answer": answer or ""}


def _quote(text: str) -> str:
    shortened = text if len(text) <= MAX_QUOTED_CHARACTERS else text[: MAX_QUOTED_CHARACTERS - 1] + "…"
    return repr(shortened)
