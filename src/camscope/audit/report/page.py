"""Page: the report of an audit, one file of HTML that needs nothing else and works without scripts."""

import base64
import csv
import hashlib
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import resources
from typing import TYPE_CHECKING, Any

from camscope.audit.core.schema import Number, Stage, Summary, Verdict, plain
from camscope.audit.report import sentences
from camscope.audit.report.figures import figures
from camscope.audit.report.gallery_schema import KINDS, Pictures
from camscope.audit.report.number_format import between, chance, counted, estimate, like, numeral
from camscope.audit.report.verdict_labels import (
    KIND_WORDS,
    MARGINS,
    MEANS,
    QUANTITY,
    TALLIES,
    blocks,
    clean,
    grouped,
    kind_of,
    sides,
    speaks,
)
from camscope.audit.shortcuts.region_attribution import MOST, overlapping
from camscope.audit.verdicts.limitations import ALWAYS
from camscope.errors import InputError, MissingExtraError
from camscope.plurals import inflect

if TYPE_CHECKING:
    import jinja2

SITES = ("site", "hospital", "centre", "center", "institution", "clinic")
UNASKED = "No question was asked. This says nothing for the model."


@dataclass(frozen=True)
class Section:
    """`id`: of its template and its anchor; `number`: as it is printed."""

    id: str
    number: str
    title: str


SECTIONS = tuple(
    Section(name, str(n), title)
    for n, (name, title) in enumerate(
        {
            "scope": "Scope and intended use",
            "data": "Data",
            "performance": "Performance",
            "methods": "Methods",
            "localisation": "Localisation",
            "faithfulness": "Faithfulness",
            "sanity": "Sanity",
            "robustness": "Robustness",
            "shortcut": "Shortcut tests",
            "clusters": "Ways of looking",
            "galleries": "Galleries",
            "missing": "Deviations and missing tests",
            "provenance": "Provenance",
            "limits": "Glossary and limits",
            "norms": "Reporting norms",
        }.items(),
        start=1,
    )
)


def page(summary: Summary, pictures: Pictures | None = None, provenance: Mapping[str, Any] | None = None) -> str:
    """The report. Every number in it is one of the summary, of the pictures' own (`Pictures.plain`), or of the provenance."""
    engine = environment()
    from markupsafe import Markup

    with_numbers = plain(summary)
    engine.filters["sentence"] = partial(_sentence, with_numbers)
    engine.globals |= {
        "kind_of": kind_of,
        "counted": partial(_counted, with_numbers),
        "digest_of": _digest,
        "quantity": QUANTITY,
        "speaks": speaks,
        "means": MEANS,
        "most": MOST,
        "blocks": partial(blocks, overlapping=overlapping(summary)),
        "anchors": {one.id: one.id for one in SECTIONS},
    }
    html: str = engine.get_template("page.html").render(
        summary=summary,
        sections=SECTIONS,
        titles={one.id: one.title for one in SECTIONS} | {"front": "Verdicts"},
        sides=sides(summary),
        objections={one.id: sentences.no_objection(summary, one.subject.name, one.questions) for one in sides(summary)},
        say=sentences,
        unasked=UNASKED,
        tallies=TALLIES,
        kind_words=KIND_WORDS,
        untested=grouped(summary.verdicts)["untested"],
        by_section={one.id: _in_order([v for v in summary.verdicts if v.section == one.id]) for one in SECTIONS},
        site=_site(summary),
        drawn=figures(summary),
        shelves=pictures.shelves if pictures else (),
        kinds=KINDS,
        skipped=skipped(summary),
        limits=[*ALWAYS, *(one for one in summary.limits if one not in ALWAYS)],
        margins=MARGINS,
        norms=list(csv.DictReader(io.StringIO(norms_csv()))),
        norms_csv=norms_csv(),
        provenance=provenance or {},
        style=Markup(_own("page.css")),  # noqa: S704 - the package's own file
        script=Markup(_own("page.js")),  # noqa: S704 - the package's own file
    )
    return html


def skipped(summary: Summary) -> dict[str, Stage]:
    """The stages that were not tested, by their names."""
    names = ("check", "resolve", "predict", "explain", "localise", "faithfulness", "sanity", "robustness", "shortcut")
    stages: dict[str, Stage] = {name: getattr(summary, name) for name in names}
    return {name: stage for name, stage in stages.items() if not stage.tested}


def norms_csv() -> str:
    """Which part of an audit helps to answer which item of which norm, as a table for spreadsheets."""
    return resources.files("camscope.audit.report").joinpath("norms.csv").read_text("utf-8")


def environment() -> "jinja2.Environment":
    """The templates' engine: everything is escaped, and a number that did not come through a filter is an error."""
    try:
        import jinja2
    except ImportError as error:
        raise MissingExtraError("jinja2", "audit") from error
    engine = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        loader=jinja2.FunctionLoader(_own),
        finalize=_finalised,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    engine.filters |= {"n": numeral, "estimate": estimate, "like": like, "p": chance}
    engine.globals |= {"between": between, "inflect": inflect}
    engine.globals["none"] = None
    return engine


def _finalised(value: Any) -> Any:
    from markupsafe import Markup

    if isinstance(value, int | float):
        raise InputError(
            f"the template writes the number {value!r} by itself: numbers go through a filter, as {{{{ x | n }}}}"
        )
    return clean(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _counted(with_numbers: Mapping[str, Any], path: str, **known: str | list[str]) -> Any:
    return counted(with_numbers, path, **known)


def _sentence(with_numbers: Mapping[str, Any], parts: sentences.Sentence) -> Any:
    """A sentence with its numbers marked as such, and what came from outside set apart."""
    from markupsafe import Markup

    written = Markup()
    for part in parts:
        match part:
            case str():
                written += part
            case sentences.Name(text):
                written += Markup("<bdi>{}</bdi>").format(clean(text))
            case sentences.Count(path, fields):
                written += counted(with_numbers, path, **fields)
            case Number():
                written += estimate(part)
            case _:
                written += numeral(part)
    return written


def _in_order(verdicts: Sequence[Verdict]) -> list[Verdict]:
    return [one for rows in grouped(verdicts).values() for one in rows]


def _site(summary: Summary) -> str | None:
    """The column that says where images are from."""
    return next((one.column for one in summary.check.levels if one.column.lower() in SITES), None)


def _own(name: str) -> str:
    """A file of the package."""
    return resources.files("camscope.audit.report").joinpath("templates", *name.split("/")).read_text("utf-8")


def _digest(text: str) -> str:
    """As a content security policy names a text that may stand in the page."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
