"""The files of a reader study: names, columns, and the instructions that every reader gets."""

import csv
import hashlib
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from typing import Any

from camscope.batch.html_contact_sheet import compute_csp_digest
from camscope.optional_packages import require

STUDY_SCHEMA = 1
KEY_FOLDER, KEY_FILE, STUDY_FILE = "key", "key.csv", "study.json"
FORM_FILE, INSTRUCTIONS_FILE, PAGE_FILE = "form.csv", "instructions.md", "read.html"
FORM_COLUMNS = ("form", "case", "answer", "confidence", "seconds", "comment")
KEY_COLUMNS = ("reader", "session", "case", "condition", "row", "patient", "truth", "model_answer", "control_row")
MIN_CONFIDENCE, MAX_CONFIDENCE = 0, 100

INSTRUCTIONS = """\
# Reading session {session} of reader {reader}

You see {n_cases} images, one after the other. Some have a colored overlay, and some have none. Decide for each image:

{answers}

1. Open `read.html` in a browser, in this folder. It works without a network. Choose an answer and how sure you are of it. The
   page measures the time. At the end, save `form.csv`, and replace the file of that name in this folder.
2. Or open the images in any viewer, and fill in `form.csv` by hand: `answer` is one of the answers above, `confidence` is how
   sure you are of it, from 0 (a guess) to 100 (certain), and `seconds` is the time of the image. `comment` may stay empty.

Read the images in their order, without a break inside an image. Do not change an answer later, and do not compare with an
earlier session. Do not discuss the images before the study ends. Leave the columns `form` and `case` as they are.
{washout}
The answers of this study do not affect the care of any patient.
"""
WASHOUT = "\nWait at least {days} days between two sessions, so that you do not remember the images.\n"


def name_reader_folder(reader: int) -> str:
    """Return the folder name of a reader, such as `reader-1`."""
    return f"reader-{reader}"


def name_session_folder(session: int) -> str:
    """Return the folder name of a session, such as `session-1`."""
    return f"session-{session}"


def name_case(place: int) -> str:
    """Return the name of a case in a session, such as `007`."""
    return f"{place:03d}"


def compute_form_token(study_id: str, reader: int, session: int) -> str:
    """Return the 8 hex digits in the column `form`. They show that a form belongs to this study, reader and session."""
    return hashlib.sha256(f"{study_id}/{reader}/{session}".encode()).hexdigest()[:8]


def format_csv(columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> bytes:
    """Format rows as a CSV file in UTF-8."""
    stream = io.StringIO(newline="")
    writer = csv.DictWriter(stream, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return stream.getvalue().encode()


def format_empty_form(token: str, n_cases: int) -> bytes:
    """Format the form of a session, with one line for each case and without answers."""
    rows = [dict.fromkeys(FORM_COLUMNS, "") | {"form": token, "case": name_case(n + 1)} for n in range(n_cases)]
    return format_csv(FORM_COLUMNS, rows)


def format_instructions(
    reader: int, session: int, n_sessions: int, n_cases: int, answers: Sequence[str], washout_days: int
) -> bytes:
    """Format the instructions of a session as Markdown."""
    text = INSTRUCTIONS.format(
        reader=reader,
        session=session,
        n_cases=n_cases,
        answers="\n".join(f"- `{answer}`" for answer in answers),
        washout=WASHOUT.format(days=washout_days) if n_sessions > 1 else "",
    )
    return text.encode()


def render_reading_page(token: str, reader: int, session: int, n_cases: int, answers: Sequence[str]) -> bytes:
    """Render the page that shows the images of a session and saves the form. It loads nothing but these images."""
    jinja2 = require("jinja2", extra="batch")
    files = resources.files("camscope.batch.reader_study")
    script, style = (files.joinpath(f"reading_page.{suffix}").read_text("utf-8") for suffix in ("js", "css"))
    data = {"form": token, "cases": [name_case(n + 1) for n in range(n_cases)], "answers": list(answers)}
    data |= {"columns": list(FORM_COLUMNS), "file": FORM_FILE}
    environment = jinja2.Environment(autoescape=True)
    page: str = environment.from_string(files.joinpath("reading_page.html").read_text("utf-8")).render(
        title=f"Reader {reader}, session {session}",
        data=json.dumps(data).replace("<", "\\u003c"),
        answers=answers,
        n_cases=n_cases,
        script=script,
        style=style,
        script_digest=compute_csp_digest(script),
        style_digest=compute_csp_digest(style),
    )
    return page.encode()
