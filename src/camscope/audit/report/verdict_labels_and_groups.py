"""Labels for verdicts, and groups of verdicts by topic, direction and overlapping regions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from markupsafe import Markup

from camscope.audit.core.stage_result_schema import EstimateSummary
from camscope.audit.core.summary_schema import Summary, Verdict
from camscope.audit.report.number_format import format_number
from camscope.audit.verdicts.verdict_rules import QUESTIONS, find_topic
from camscope.plurals import inflect

TOPIC_DESCRIPTIONS = {
    "model": "Performance, and the image regions that predictions rely on.",
    "maps": "Whether maps show what the model uses. An unfaithful map is not evidence against the model.",
    "data": "Image properties that correlate with a finding and could be learned instead of it.",
}
CONCLUSION_MEANINGS: Mapping[str, str] = {
    "supported": "the claim holds",
    "not supported": "the claim does not hold",
    "not decided": "the rule gives no conclusion",
}
MARGIN_DESCRIPTIONS: Mapping[str, str] = {
    "effect": "Smallest relevant change of the log odds by an intervention, in standard deviations",
    "auroc_difference": "Smallest relevant difference in AUROC between subgroups",
    "useful_auroc": "AUROC that the model must exceed",
    "masked_auroc": "AUROC above which a model still detects the finding with the organ masked",
    "enrichment": "Enrichment: share of the attribution in a region over its share of the image; chance is one",
    "mass_difference": "Smallest relevant difference in the share of the map inside the finding, between subgroups",
    "robustness_correlation": "Rank correlation of maps under irrelevant changes",
    "leakage_auroc": "AUROC of a probe below which a column is considered not predictable from the features",
    "reliance_prevalence": "Share of patients with a reliance that the test must be able to detect before it is called absent",
}
DECIDED_CONCLUSIONS = ["supported", "not supported"]
VERDICT_KIND_LABELS = {
    "contradicts": "contradicts",
    "supports": "supports",
    "neither": "neutral",
    "untested": "not decided",
}
VERDICT_KIND_FILTERS: Mapping[str, Mapping[str, str | list[str]]] = {
    **{kind: {"direction": kind, "conclusion": DECIDED_CONCLUSIONS} for kind in ("contradicts", "supports", "neither")},
    "untested": {"conclusion": "not decided"},
}  # the fields of the verdicts of each kind
VerdictKind = Literal["supports", "contradicts", "neither", "untested"]
JOINING_CHARACTERS = (
    "\N{ZERO WIDTH NON-JOINER}\N{ZERO WIDTH JOINER}\N{SOFT HYPHEN}"  # used inside words of some scripts
)


def sanitize_text(text: str) -> str:
    """Return user text as one line without control characters and bidirectional overrides."""
    line = " ".join(text.split())
    if line.isprintable():
        return line
    return "".join(
        character if character.isprintable() or character in JOINING_CHARACTERS else "\N{REPLACEMENT CHARACTER}"
        for character in line
    )


def describe_sample(estimate: EstimateSummary, *, has_patients: bool = True) -> Markup:
    """Say what an estimate counts, as HTML: `164 images of 99 patients`, or `9 insertions: 9 receivers, 4 donors`."""
    unit = inflect(estimate.n_values, estimate.unit.removesuffix("s"))
    images = Markup("{} {}").format(format_number(estimate.n_values), unit)
    if estimate.n_groups_by_role:
        counts = [(count, inflect(count, role.removesuffix("s"))) for role, count in estimate.n_groups_by_role]
        texts = Markup(", ").join(Markup("{} {}").format(format_number(count), noun) for count, noun in counts)
        return images + ": " + texts
    if not has_patients or not estimate.n_groups:
        return images
    noun = inflect(estimate.n_groups, "patient")
    return Markup("{} of {} {}").format(images, format_number(estimate.n_groups), noun)


def format_sentence(text: str) -> str:
    """Turn a clause into a sentence with a capital letter and a period. Empty text stays empty."""
    return f"{text[:1].upper()}{text[1:].rstrip('.')}." if text else ""


@dataclass(frozen=True)
class TopicVerdicts:
    """The verdicts of one topic by kind, and the questions of the topic."""

    topic: str
    description: str
    verdicts_by_kind: Mapping[str, Sequence[Verdict]]
    questions: list[str]


def group_verdicts_by_topic(summary: Summary) -> list[TopicVerdicts]:
    """Group the verdicts of a summary by topic, then by kind."""
    groups = []
    for topic, description in TOPIC_DESCRIPTIONS.items():
        verdicts = [verdict for verdict in summary.verdicts if find_topic(verdict.question) == topic]
        questions = [verdict.question for verdict in verdicts] or [
            name for name in QUESTIONS if find_topic(name) == topic
        ]
        kinds = group_verdicts_by_kind(verdicts)
        groups.append(TopicVerdicts(topic, description, kinds, list(dict.fromkeys(questions))))
    return groups


def classify_verdict(verdict: Verdict) -> VerdictKind:
    """Return the kind of a verdict: "supports", "contradicts", "neither" or "untested"."""
    return "untested" if verdict.conclusion == "not decided" else verdict.direction


def group_verdicts_by_kind(verdicts: Sequence[Verdict]) -> dict[str, list[Verdict]]:
    """Group verdicts by kind. The order is contradicting, supporting, neutral, not decided."""
    return {
        kind: [verdict for verdict in verdicts if classify_verdict(verdict) == kind] for kind in VERDICT_KIND_LABELS
    }


def describe_direction(verdict: Verdict) -> str:
    """Describe the direction of a verdict as text, such as `contradicts the model` or `not decided`."""
    kind = classify_verdict(verdict)
    label = VERDICT_KIND_LABELS[kind]
    return f"{label} the {find_topic(verdict.question)}" if kind in ("contradicts", "supports") else label


@dataclass(frozen=True)
class VerdictRowGroup:
    """Verdicts that the report shows together. `regions_overlap`: their regions share most of their pixels."""

    verdicts: list[Verdict]
    regions_overlap: bool = False


def group_overlapping_verdicts(
    verdicts: Sequence[Verdict], overlapping_regions: Mapping[str, list[list[str]]]
) -> list[VerdictRowGroup]:
    """Group the verdicts whose regions overlap. All other verdicts keep their order."""
    groups: list[VerdictRowGroup] = []
    groups_by_region: dict[tuple[str, str], VerdictRowGroup] = {}
    for verdict in verdicts:
        is_reliance = (verdict.question, verdict.conclusion) == ("shortcut", "supported")
        region_groups = overlapping_regions.get(verdict.finding, []) if is_reliance else []
        regions = next((regions for regions in region_groups if verdict.qualifier in regions), [])
        group = groups_by_region.get((verdict.finding, verdict.qualifier)) if regions else None
        if group is None and not regions and groups and not groups[-1].regions_overlap:
            group = groups[-1]
        if group is None:
            group = VerdictRowGroup([], regions_overlap=bool(regions))
            groups.append(group)
            groups_by_region |= {(verdict.finding, region): group for region in regions}
        group.verdicts.append(verdict)
    return groups
