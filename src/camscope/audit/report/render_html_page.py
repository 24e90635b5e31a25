"""Render the HTML report of an audit as a single file that works without scripts."""

import csv
import io
from collections.abc import Mapping
from functools import partial
from importlib import resources
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from camscope.audit.core.stage_result_schema import StageResult
from camscope.audit.core.summary_schema import Summary
from camscope.audit.report import data_and_method_sentences
from camscope.audit.report.gallery import GALLERY_KINDS, Gallery
from camscope.audit.report.number_format import (
    format_estimate,
    format_interval,
    format_item_count,
    format_number,
    format_number_like,
    format_p_value,
)
from camscope.audit.report.overview import NOTHING_DECIDED, build_overview
from camscope.audit.report.section_figures import draw_figures
from camscope.audit.report.verdict_and_auroc_sentences import write_answer
from camscope.audit.report.verdict_labels_and_groups import (
    CONCLUSION_MEANINGS,
    MARGIN_DESCRIPTIONS,
    VERDICT_KIND_FILTERS,
    VERDICT_KIND_LABELS,
    classify_verdict,
    describe_direction,
    describe_sample,
    format_sentence,
    group_overlapping_verdicts,
    group_verdicts_by_kind,
    group_verdicts_by_topic,
    sanitize_text,
)
from camscope.audit.shortcuts.border_and_marker_detectors import REGIONS
from camscope.audit.shortcuts.region_attribution import MIN_OVERLAP_SHARE, find_overlapping_regions
from camscope.audit.shortcuts.region_names import name_region
from camscope.audit.verdicts.limitations_and_warnings import GENERAL_LIMITATIONS
from camscope.audit.verdicts.verdict_rules import QUESTIONS
from camscope.batch.html_contact_sheet import compute_csp_digest
from camscope.errors import InputError
from camscope.metrics import METRICS
from camscope.optional_packages import require
from camscope.plurals import inflect
from camscope.registry import METHODS

if TYPE_CHECKING:
    import jinja2

SITE_COLUMNS = ("site", "hospital", "center", "institution", "clinic")
NO_QUESTIONS_TEXT = "No question was tested. This is not evidence in favor of the model."
PAGE_SECTIONS = {
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
}  # the name of the template, which is the anchor, and the title


def render_page(summary: Summary, gallery: Gallery | None = None, provenance: Mapping[str, Any] | None = None) -> str:
    """Render the report as HTML. Every number comes from the summary, the gallery or the provenance."""
    environment = create_template_environment()
    environment.globals |= {
        "format_item_count": partial(format_item_count, summary.model_dump(mode="json")),
        "describe_sample": partial(describe_sample, has_patients=summary.check.has_patient_column),
        "group_overlapping_verdicts": partial(
            group_overlapping_verdicts, overlapping_regions=find_overlapping_regions(summary)
        ),
    }
    topics = group_verdicts_by_topic(summary)
    verdicts_by_kind = group_verdicts_by_kind(summary.verdicts)
    html: str = environment.get_template("page.html").render(
        summary=summary,
        overview=build_overview(summary),
        is_one_page=False,
        verdict_groups=topics,
        absent_objections={
            group.topic: data_and_method_sentences.explain_missing_contradictions(
                summary, f"the {group.topic}", group.questions
            )
            for group in topics
        },
        untested_verdicts=verdicts_by_kind["untested"],
        by_section={
            section: [
                verdict for verdicts in verdicts_by_kind.values() for verdict in verdicts if verdict.section == section
            ]
            for section in PAGE_SECTIONS
        },
        site_column=next(
            (level.column for level in summary.check.level_counts if level.column.lower() in SITE_COLUMNS), None
        ),
        figures=draw_figures(summary),
        gallery_sections=gallery.sections if gallery else (),
        untested_stages={name: stage for name, stage in summary if isinstance(stage, StageResult) and not stage.tested},
        limitations=dict.fromkeys((*GENERAL_LIMITATIONS, *summary.limitations)),
        provenance=provenance or {},
    )
    return html


def render_one_page_overview(summary: Summary) -> str:
    """Render the first screen of the report as a separate HTML page. It prints on one sheet."""
    environment = create_template_environment()
    environment.globals["describe_sample"] = partial(describe_sample, has_patients=summary.check.has_patient_column)
    html: str = environment.get_template("summary.html").render(
        summary=summary, overview=build_overview(summary), is_one_page=True
    )
    return html


def read_reporting_guidelines_csv() -> str:
    """Return a CSV table of the items of reporting guidelines, with the audit sections that address each item."""
    return resources.files("camscope.audit.report").joinpath("norms.csv").read_text("utf-8")


def create_template_environment() -> "jinja2.Environment":
    """Create the Jinja environment. It escapes all output, and it rejects numbers that no filter formatted."""
    require("jinja2", extra="audit")
    import jinja2

    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        loader=jinja2.FunctionLoader(_read_template),
        finalize=_reject_unformatted_number,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {f.__name__: f for f in (format_number, format_estimate, format_number_like, format_p_value)}
    environment.filters |= {"as_sentence": format_sentence, "region_name": name_region}
    environment.filters |= {
        "metric_title": METRICS.replace_names_by_titles,
        "method_title": METHODS.replace_names_by_titles,
    }
    environment.globals |= {
        "classify_verdict": classify_verdict,
        "compute_csp_digest": compute_csp_digest,
        "conclusion_meanings": CONCLUSION_MEANINGS,
        "describe_direction": describe_direction,
        "effect_quantities": {name: question.effect_quantity for name, question in QUESTIONS.items()},
        "format_interval": format_interval,
        "gallery_kinds": GALLERY_KINDS,
        "inflect": inflect,
        "nothing_decided": NOTHING_DECIDED,
        "level_conclusions": {"undecided": "not decided"},
        "margin_descriptions": MARGIN_DESCRIPTIONS,
        "min_overlap_share": MIN_OVERLAP_SHARE,
        "no_questions_text": NO_QUESTIONS_TEXT,
        "none": None,
        "norms": list(csv.DictReader(io.StringIO(read_reporting_guidelines_csv()))),
        "norms_csv": read_reporting_guidelines_csv(),
        "region_descriptions": {name: region.description for name, region in REGIONS.items()},
        "script": Markup(_read_template("page.js")),  # noqa: S704 - a file of this package
        "sections": PAGE_SECTIONS,
        "sentences": data_and_method_sentences,
        "style": Markup(_read_template("page.css")),  # noqa: S704 - a file of this package
        "verdict_kind_filters": VERDICT_KIND_FILTERS,
        "verdict_kind_labels": VERDICT_KIND_LABELS,
        "write_answer": write_answer,
    }
    return environment


def _reject_unformatted_number(value: Any) -> Any:
    if isinstance(value, int | float):
        raise InputError(
            f"the template writes the number {value!r} without a filter: write {{{{ x | format_number }}}}"
        )
    return sanitize_text(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _read_template(file_name: str) -> str:
    """Return the text of a template file in this package."""
    return resources.files("camscope.audit.report").joinpath("templates", *file_name.split("/")).read_text("utf-8")
