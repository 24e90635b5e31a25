"""Write the folder of a blinded reader study: images for each reader and session, forms, and the key."""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from camscope import render
from camscope.atomic_writes_and_folder_locks import create_folder_atomically
from camscope.batch.image_loading import map_in_order
from camscope.batch.reader_study import study_files
from camscope.batch.reader_study.study_cases import (
    MAX_ANSWERS,
    StudyCase,
    choose_positive_answer,
    read_study_cases,
)
from camscope.batch.reader_study.study_design import (
    CONTROL_MAP,
    DESIGNS,
    WITH_MAP,
    WITHOUT_MAP,
    Reading,
    draw_control_donors,
    draw_readings,
)
from camscope.batch.run_reader import RunReader, read_original_image
from camscope.batch.run_store import hash_run_config
from camscope.batch.sql_query import Query
from camscope.errors import InputError
from camscope.explanation import STATUS_OK, Explanation, PixelArray
from camscope.plurals import plural
from camscope.version import __version__

OTHER_CASE, FLIPPED, NO_CONTROLS = "other-case", "flipped", "none"
CONTROLS = (OTHER_CASE, FLIPPED, NO_CONTROLS)
MIN_IMAGE_SIZE, MAX_IMAGE_SIZE = 128, 4096  # pixels
FILE_TIME_SECONDS = 946_684_800  # the same for all images, since the order of writing follows the conditions
CANVAS_COLOR = (0, 0, 0)


@dataclass(frozen=True)
class ReaderStudyOptions:
    """The design of a reader study.

    Attributes:
        n_readers: The number of readers.
        design: "crossed": each reader sees each case once under every condition, in one session per condition. "split": each
            reader sees each case once, in one session.
        controls: "other-case": a third condition with the map of another patient. "flipped": with the map turned by 180
            degrees. "none": no such condition.
        seed: Seed of the orders, the conditions and the control maps.
        washout_days: Days between two sessions, for the instructions.
        image_size: Height and width of every image in pixels.

    Raises:
        InputError: A value is out of range.

    >>> ReaderStudyOptions(controls="none").conditions
    ('none', 'map')

    """

    n_readers: int = 4
    design: Literal["crossed", "split"] = "crossed"
    controls: Literal["other-case", "flipped", "none"] = "other-case"
    seed: int = 0
    washout_days: int = 28
    image_size: int = 768

    def __post_init__(self) -> None:
        for name, value, choices in (("design", self.design, DESIGNS), ("controls", self.controls, CONTROLS)):
            if value not in choices:
                raise InputError(f"{name}={value!r}; expected {', '.join(choices)}")
        if not MIN_IMAGE_SIZE <= self.image_size <= MAX_IMAGE_SIZE:
            raise InputError(f"image_size={self.image_size}; expected {MIN_IMAGE_SIZE} to {MAX_IMAGE_SIZE} pixels")
        if self.washout_days < 0 or self.seed < 0:
            raise InputError(f"washout_days={self.washout_days}, seed={self.seed}; expected numbers from 0")

    @property
    def conditions(self) -> tuple[str, ...]:
        """The conditions of the study."""
        return (WITHOUT_MAP, WITH_MAP) if self.controls == NO_CONTROLS else (WITHOUT_MAP, WITH_MAP, CONTROL_MAP)


@dataclass(frozen=True)
class ReaderStudyExport:
    r"""The folder of a reader study that was written.

    Attributes:
        folder: The folder.
        n_cases: The number of cases.
        n_patients: The number of patients.
        n_readers: The number of readers.
        n_sessions: The sessions of each reader.
        conditions: The conditions.
        answers: The allowed answers.
        positive_answer: The answer that counts as positive, with two answers.
        n_model_errors: Cases where the model's answer is wrong. None if no answer of the model is available.
        n_maps_without_information: Cases whose map has a warning, such as a zero gradient.

    >>> import tempfile
    >>> folder = tempfile.mkdtemp()
    >>> table = Path(folder, "labels.csv")
    >>> _ = table.write_text("id,label\n" + "".join(f"{id},nodule\n" for id in run.table(["id"])["id"].to_pylist()))
    >>> study = run.export_reader_study(f"{folder}/study", table)
    >>> study.n_cases, study.n_readers, study.n_sessions
    (4, 4, 3)

    """

    folder: Path
    n_cases: int
    n_patients: int
    n_readers: int
    n_sessions: int
    conditions: tuple[str, ...]
    answers: tuple[str, ...]
    positive_answer: str | None
    n_model_errors: int | None
    n_maps_without_information: int

    @property
    def n_readings(self) -> int:
        """The number of readings of all readers."""
        return self.n_cases * self.n_readers * self.n_sessions


def write_reader_study(
    run: RunReader,
    folder: str | os.PathLike[str],
    query: Query,
    options: ReaderStudyOptions,
    labels: str | os.PathLike[str] | None = None,
    group: str | None = None,
    model_answers: str | None = None,
    positive: str | None = None,
    on_progress: Callable[[int], None] = lambda _: None,
) -> ReaderStudyExport:
    """Write the folder of a reader study: see `BatchRun.export_reader_study`. `on_progress` gets the number of finished cases."""
    cases = read_study_cases(run, query, labels, group, model_answers)
    answers = sorted({case.truth for case in cases})
    if len(answers) > MAX_ANSWERS:
        raise InputError(
            f"the labels have {plural(len(answers), 'class')}; a form has at most {MAX_ANSWERS} answers: select rows"
        )
    positive_answer = choose_positive_answer(answers, positive)
    patients = [case.patient for case in cases]
    readings = draw_readings(patients, options.n_readers, options.conditions, options.design, options.seed)
    donors: Sequence[int] = range(len(cases))
    if options.controls == OTHER_CASE:
        shapes = [(*case.row["grid"], *case.row["input_size"]) for case in cases]
        donors = draw_control_donors(patients, shapes, options.seed).tolist()
    n_flagged = sum(case.row["status"] != STATUS_OK for case in cases)
    model_errors = [case.model_answer != case.truth for case in cases if case.model_answer is not None]
    study = _describe_study(run, cases, options, answers, positive_answer, n_flagged)
    with create_folder_atomically(folder) as root:
        _write_images(run, root, cases, donors, readings, options, on_progress)
        _write_session_files(root, readings, study)
        _write_key(root, cases, donors, readings, study)
    return ReaderStudyExport(
        folder=Path(folder),
        n_cases=len(cases),
        n_patients=len(set(patients)),
        n_readers=options.n_readers,
        n_sessions=max(reading.session for reading in readings),
        conditions=options.conditions,
        answers=tuple(answers),
        positive_answer=positive_answer,
        n_model_errors=sum(model_errors) if model_errors else None,
        n_maps_without_information=n_flagged,
    )


def _describe_study(
    run: RunReader,
    cases: Sequence[StudyCase],
    options: ReaderStudyOptions,
    answers: Sequence[str],
    positive_answer: str | None,
    n_flagged: int,
) -> dict[str, Any]:
    """Return the content of study.json. It names no image and no patient."""
    row = cases[0].row
    study = {
        "schema": study_files.STUDY_SCHEMA,
        **asdict(options),
        "conditions": list(options.conditions),
        "answers": list(answers),
        "positive_answer": positive_answer,
        "n_cases": len(cases),
        "n_patients": len({case.patient for case in cases}),
        "n_maps_without_information": n_flagged,
        "method": row["method"],
        "layer": row["layer"],
        "model": run.run_info["run_config"]["model"]["digest"],
        "run": hash_run_config(run.run_info),
        "camscope": __version__,
    }
    identity = [study, [[case.row["row"], case.truth] for case in cases]]
    return {"study": hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16], **study}


def _write_images(
    run: RunReader,
    root: Path,
    cases: Sequence[StudyCase],
    donors: Sequence[int],
    readings: Sequence[Reading],
    options: ReaderStudyOptions,
    on_progress: Callable[[int], None],
) -> None:
    """Draw each case once under each condition, and write it to all its places. Raise an InputError if images are missing."""
    readings_by_case: dict[int, list[Reading]] = {}
    for reading in readings:
        readings_by_case.setdefault(reading.case, []).append(reading)

    def draw_case(index: int) -> dict[str, bytes] | str:
        image, failure = read_original_image(run, cases[index].row)
        if image is None:
            return failure or "it cannot be read"
        conditions = dict.fromkeys(reading.condition for reading in readings_by_case[index])
        donor = cases[donors[index]].row
        return {
            condition: _draw_condition(run, cases[index], donor, image, condition, options) for condition in conditions
        }

    failures = Counter[str]()
    for index, drawings in enumerate(map_in_order(draw_case, range(len(cases)), os.cpu_count() or 1)):
        if isinstance(drawings, str):
            failures[drawings] += 1
        elif not failures:
            for path, data in _iter_files(root, readings_by_case[index], drawings):
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)
                os.utime(path, (FILE_TIME_SECONDS, FILE_TIME_SECONDS))
        on_progress(1)
    if failures:
        reasons = "; ".join(f"{reason} ({plural(count, 'image')})" for reason, count in failures.most_common(3))
        raise InputError(
            f"{failures.total()} of {plural(len(cases), 'image')} cannot be shown to readers: {reasons}; leave their rows out "
            "(where=, or --where), or pass the images (--scans)"
        )


def _iter_files(root: Path, readings: Sequence[Reading], drawings: dict[str, bytes]) -> Iterator[tuple[Path, bytes]]:
    for reading in readings:
        folders = study_files.name_reader_folder(reading.reader), study_files.name_session_folder(reading.session)
        yield root.joinpath(*folders, f"{study_files.name_case(reading.place)}.png"), drawings[reading.condition]


def _draw_condition(
    run: RunReader,
    case: StudyCase,
    donor: Any,
    image: PixelArray,
    condition: str,
    options: ReaderStudyOptions,
) -> bytes:
    """Draw a case under a condition, as a PNG file without metadata. All conditions have the same size and format."""
    size = options.image_size
    resized = render.resize_to_fit(image, size, size)
    if condition != WITHOUT_MAP:
        explanation = run.explanation(case.row, image)
        if condition == CONTROL_MAP:
            explanation = replace(explanation, **_control_fields(explanation, run.explanation(donor), options.controls))
        placement = explanation.placement
        if placement is None:
            raise InputError("the position of a map on its image is unknown")
        explanation = replace(explanation, image=resized, placement=placement.on_resized_image(resized.shape[:2]))
        resized = explanation.overlay("image")
    rows, columns = size - resized.shape[0], size - resized.shape[1]
    canvas = render.pad_image(
        resized, rows // 2, rows - rows // 2, columns // 2, columns - columns // 2, background=CANVAS_COLOR
    )
    return render.encode_image(canvas, ".png")


def _control_fields(explanation: Explanation, donor: Explanation, controls: str) -> dict[str, Any]:
    """Return the map of a control: that of another case, or the own map turned by 180 degrees."""
    if controls == FLIPPED:
        return {"attribution": np.ascontiguousarray(explanation.attribution[::-1, ::-1])}
    return {"attribution": donor.attribution, "status": donor.status}


def _write_session_files(root: Path, readings: Sequence[Reading], study: dict[str, Any]) -> None:
    """Write the form, the instructions and the page of each session."""
    answers, n_cases = study["answers"], study["n_cases"]
    n_sessions = max(reading.session for reading in readings)
    for reader, session in sorted({(reading.reader, reading.session) for reading in readings}):
        folder = root / study_files.name_reader_folder(reader) / study_files.name_session_folder(session)
        token = study_files.compute_form_token(study["study"], reader, session)
        instructions = study_files.format_instructions(
            reader, session, n_sessions, n_cases, answers, study["washout_days"]
        )
        page = study_files.render_reading_page(token, reader, session, n_cases, answers)
        folder.joinpath(study_files.FORM_FILE).write_bytes(study_files.format_empty_form(token, n_cases))
        folder.joinpath(study_files.INSTRUCTIONS_FILE).write_bytes(instructions)
        folder.joinpath(study_files.PAGE_FILE).write_bytes(page)


def _write_key(
    root: Path, cases: Sequence[StudyCase], donors: Sequence[int], readings: Sequence[Reading], study: dict[str, Any]
) -> None:
    """Write key.csv and study.json. Rows and patients are numbers, so that the key holds no name."""
    numbers = {patient: n + 1 for n, patient in enumerate(dict.fromkeys(case.patient for case in cases))}
    rows = []
    for reading in readings:
        case = cases[reading.case]
        is_other_case = reading.condition == CONTROL_MAP and study["controls"] == OTHER_CASE
        rows.append(
            {
                "reader": reading.reader,
                "session": reading.session,
                "case": study_files.name_case(reading.place),
                "condition": reading.condition,
                "row": case.row["row"],
                "patient": numbers[case.patient],
                "truth": case.truth,
                "model_answer": case.model_answer or "",
                "control_row": cases[donors[reading.case]].row["row"] if is_other_case else "",
            }
        )
    folder = root / study_files.KEY_FOLDER
    folder.mkdir()
    folder.joinpath(study_files.KEY_FILE).write_bytes(study_files.format_csv(study_files.KEY_COLUMNS, rows))
    folder.joinpath(study_files.STUDY_FILE).write_bytes((json.dumps(study, indent=2) + "\n").encode())
