"""The HTML report of an audit: a single self-contained file that works without scripts."""

import base64
import csv
import hashlib
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import resources
from typing import TYPE_CHECKING, Any

from camscope.audit.core.schema import EstimateSummary, StageResult, Summary, Verdict, to_json_dict
from camscope.audit.report import sentences
from camscope.audit.report.figures import draw_figures
from camscope.audit.report.gallery import GALLERY_KINDS, Gallery
from camscope.audit.report.number_format import (
    format_estimate,
    format_interval,
    format_item_count,
    format_number,
    format_number_like,
    format_p_value,
)
from camscope.audit.report.verdict_labels import (
    CONCLUSION_MEANINGS,
    EFFECT_QUANTITIES,
    MARGIN_DESCRIPTIONS,
    VERDICT_KIND_FILTERS,
    VERDICT_KIND_LABELS,
    classify_verdict,
    describe_direction,
    group_overlapping_verdicts,
    group_verdicts_by_kind,
    group_verdicts_by_topic,
    sanitize_text,
)
from camscope.audit.shortcuts.region_attribution import MIN_OVERLAP_SHARE, find_overlapping_regions
from camscope.audit.verdicts.limitations import GENERAL_LIMITATIONS
from camscope.errors import InputError
from camscope.optional import require
from camscope.plurals import inflect

if TYPE_CHECKING:
    import jinja2

SITE_COLUMNS = ("site", "hospital", "center", "center", "institution", "clinic")
NO_QUESTIONS_TEXT = "No question was tested. This is not evidence in favor of the model."


@dataclass(frozen=True)
class PageSection:
    """A section of the page; `id` is the name of its template and its anchor."""

    id: str
    number: str
    title: str


PAGE_SECTIONS = tuple(
    PageSection(name, str(n), title)
    for n, (name, title) in enumerate(
        {
            "scope": "Scope and intended use",
            "data": "Data",
            "performance": "Performance",
            "methods": "Methods",
            "localization": "Localization",
            "faithfulness": "Faithfulness",
            "sanity": "Sanity",
            "robustness": "Robustness",
            "shortcut": "Shortcut tests",
            "clusters": "Attribution clusters",
            "galleries": "Galleries",
            "missing": "Deviations and missing tests",
            "provenance": "Provenance",
            "limits": "Glossary and limits",
            "norms": "Reporting norms",
        }.items(),
        start=1,
    )
)


def render_page(summary: Summary, gallery: Gallery | None = None, provenance: Mapping[str, Any] | None = None) -> str:
    """Render the report as HTML; every number comes from the summary, the gallery or the provenance."""
    environment = create_template_environment()
    from markupsafe import Markup

    summary_data = to_json_dict(summary)
    environment.filters["render_sentence"] = partial(_render_sentence, summary_data)
    environment.globals |= {
        "classify_verdict": classify_verdict,
        "format_item_count": partial(_format_item_count, summary_data),
        "compute_csp_digest": _compute_csp_digest,
        "effect_quantities": EFFECT_QUANTITIES,
        "describe_direction": describe_direction,
        "conclusion_meanings": CONCLUSION_MEANINGS,
        "min_overlap_share": MIN_OVERLAP_SHARE,
        "group_overlapping_verdicts": partial(
            group_overlapping_verdicts, overlapping_regions=find_overlapping_regions(summary)
        ),
        "section_ids": {section.id: section.id for section in PAGE_SECTIONS},
    }
    html: str = environment.get_template("page.html").render(
        summary=summary,
        sections=PAGE_SECTIONS,
        titles={one.id: one.title for one in PAGE_SECTIONS} | {"front": "Verdicts"},
        verdict_groups=group_verdicts_by_topic(summary),
        absent_objections={
            one.id: sentences.describe_absent_objections(summary, one.topic.name_in_sentence, one.questions)
            for one in group_verdicts_by_topic(summary)
        },
        sentences=sentences,
        no_questions_text=NO_QUESTIONS_TEXT,
        verdict_kind_filters=VERDICT_KIND_FILTERS,
        verdict_kind_labels=VERDICT_KIND_LABELS,
        untested_verdicts=group_verdicts_by_kind(summary.verdicts)["untested"],
        by_section={
            one.id: _sort_verdicts_by_kind([v for v in summary.verdicts if v.section == one.id])
            for one in PAGE_SECTIONS
        },
        site_column=_find_site_column(summary),
        figures=draw_figures(summary),
        gallery_sections=gallery.sections if gallery else (),
        gallery_kinds=GALLERY_KINDS,
        untested_stages=find_untested_stages(summary),
        limitations=[*GENERAL_LIMITATIONS, *(one for one in summary.limitations if one not in GENERAL_LIMITATIONS)],
        margin_descriptions=MARGIN_DESCRIPTIONS,
        norms=list(csv.DictReader(io.StringIO(read_norms_csv()))),
        norms_csv=read_norms_csv(),
        provenance=provenance or {},
        style=Markup(_read_template("page.css")),  # noqa: S704 - a file of this package
        script=Markup(_read_template("page.js")),  # noqa: S704 - a file of this package
    )
    return html


def find_untested_stages(summary: Summary) -> dict[str, StageResult]:
    """Return the stages that were not tested, by name."""
    names = (
        "check",
        "resolve",
        "predict",
        "explain",
        "localization",
        "faithfulness",
        "sanity",
        "robustness",
        "shortcut",
    )
    stages: dict[str, StageResult] = {name: getattr(summary, name) for name in names}
    return {name: stage for name, stage in stages.items() if not stage.tested}


def read_norms_csv() -> str:
    """Return the table of reporting norms and the audit parts that address them, as CSV."""
    return resources.files("camscope.audit.report").joinpath("norms.csv").read_text("utf-8")


def create_template_environment() -> "jinja2.Environment":
    """Create the template environment: all output is escaped, and a number without a filter raises an error."""
    require("jinja2", extra="audit")
    import jinja2

    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        loader=jinja2.FunctionLoader(_read_template),
        finalize=_finalize_output,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {f.__name__: f for f in (format_number, format_estimate, format_number_like, format_p_value)}
    environment.globals |= {"format_interval": format_interval, "inflect": inflect}
    environment.globals["none"] = None
    return environment


def _finalize_output(value: Any) -> Any:
    from markupsafe import Markup

    if isinstance(value, int | float):
        raise InputError(
            f"the template writes the number {value!r} without a filter: write {{{{ x | format_number }}}}"
        )
    return sanitize_text(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _format_item_count(summary_data: Mapping[str, Any], path: str, **field_values: str | list[str]) -> Any:
    return format_item_count(summary_data, path, **field_values)


def _render_sentence(summary_data: Mapping[str, Any], sentence: sentences.Sentence) -> Any:
    """Render a sentence as HTML, with its numbers tagged and user texts isolated."""
    from markupsafe import Markup

    markup = Markup()
    for part in sentence:
        match part:
            case str():
                markup += part
            case sentences.ExternalText(text):
                markup += Markup("<bdi>{}</bdi>").format(sanitize_text(text))
            case sentences.ItemCount(path, fields):
                markup += format_item_count(summary_data, path, **fields)
            case EstimateSummary():
                markup += format_estimate(part)
            case _:
                markup += format_number(part)
    return markup


def _sort_verdicts_by_kind(verdicts: Sequence[Verdict]) -> list[Verdict]:
    return [verdict for rows in group_verdicts_by_kind(verdicts).values() for verdict in rows]


def _find_site_column(summary: Summary) -> str | None:
    """Return the first subgroup column named like a site."""
    return next(
        (
            level_count.column
            for level_count in summary.check.level_counts
            if level_count.column.lower() in SITE_COLUMNS
        ),
        None,
    )


def _read_template(file_name: str) -> str:
    """Read a template of the package."""
    return resources.files("camscope.audit.report").joinpath("templates", *file_name.split("/")).read_text("utf-8")


def _compute_csp_digest(text: str) -> str:
    """Return the digest of an inline style or script for the content security policy."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
