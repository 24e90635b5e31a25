"""Labels of the report and the grouping of verdicts by topic, direction and overlapping regions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from camscope.audit.core.schema import Summary, Verdict

EFFECT_QUANTITIES: Mapping[str, str] = {
    "performance": "AUROC",
    "performance by subgroup": "difference in AUROC",
    "ground truth": "change of the log odds, in SD",
    "shortcut": "change of the log odds, in SD",
    "shortcut by subgroup": "difference in the change, in SD",
    "masked organ": "AUROC of masked images",
    "localization": "enrichment",
    "localization by subgroup": "difference in the share inside",
    "attribution mass": "enrichment",
    "faithfulness": "difference from the best control",
    "sanity": "similarity after randomization",
    "robustness": "rank correlation",
    "leakage": "AUROC of the probe",
    "clusters": "stability of the clusters",
}


@dataclass(frozen=True)
class VerdictTopic:
    """A topic of verdicts (model, maps or data), with its questions."""

    title: str
    description: str
    name_in_sentence: str
    questions: tuple[str, ...]


VERDICT_TOPICS: Mapping[str, VerdictTopic] = {
    "model": VerdictTopic(
        "The model",
        "Performance, and the image regions that predictions rely on.",
        "the model",
        (
            "performance",
            "performance by subgroup",
            "ground truth",
            "shortcut",
            "shortcut by subgroup",
            "masked organ",
        ),
    ),
    "maps": VerdictTopic(
        "The maps",
        "Whether maps show what the model uses. An unfaithful map is not evidence against the model.",
        "the maps",
        (
            "localization",
            "localization by subgroup",
            "attribution mass",
            "faithfulness",
            "sanity",
            "robustness",
            "clusters",
        ),
    ),
    "data": VerdictTopic(
        "The data",
        "Image properties that correlate with a finding and could be learned instead of it.",
        "the data",
        ("leakage",),
    ),
}

CONCLUSION_MEANINGS: Mapping[str, str] = {
    "supported": "the claim holds",
    "not supported": "the claim does not hold",
    "not testable": "the rule gives no conclusion",
}


def find_topic_id(question: str) -> str:
    """Return the topic of a question: "model", "maps" or "data"; "model" for unknown questions."""
    return next((name for name, topic in VERDICT_TOPICS.items() if question in topic.questions), "model")


MARGIN_DESCRIPTIONS: Mapping[str, str] = {
    "effect": "Smallest relevant change of the log odds by an intervention, in standard deviations",
    "auroc_difference": "Smallest relevant difference in AUROC between subgroups",
    "useful_auroc": "AUROC that the model must exceed",
    "masked_auroc": "AUROC above which a model still detects the finding with the organ masked",
    "enrichment": "Enrichment: share of the attribution in a region over its share of the image; chance is one",
    "mass_difference": "Smallest relevant difference in the share inside between subgroups",
    "robustness_correlation": "Rank correlation of maps under irrelevant changes",
    "leakage_auroc": "AUROC of a probe below which a column is considered not predictable from the features",
    "reliance_prevalence": "Share of patients with a reliance that the test must be able to detect before it is called absent",
}


JOINING_CHARACTERS = (
    "\N{ZERO WIDTH NON-JOINER}\N{ZERO WIDTH JOINER}\N{SOFT HYPHEN}"  # used inside words of some scripts
)


def sanitize_text(text: str) -> str:
    """Return a user text in one line, without control characters and bidirectional overrides."""
    line = " ".join(text.split())
    if line.isprintable():
        return line
    return "".join(
        character if character.isprintable() or character in JOINING_CHARACTERS else "\N{REPLACEMENT CHARACTER}"
        for character in line
    )


VERDICT_KIND_LABELS: Mapping[str, str] = {
    "contradicts": "contradicts",
    "supports": "supports",
    "neither": "neutral",
    "untested": "not testable",
}
DECIDED_CONCLUSIONS = ["supported", "not supported"]
VERDICT_KIND_FILTERS: Mapping[str, Mapping[str, str | list[str]]] = {
    "contradicts": {"direction": "contradicts", "conclusion": DECIDED_CONCLUSIONS},
    "supports": {"direction": "supports", "conclusion": DECIDED_CONCLUSIONS},
    "neither": {"direction": "neither", "conclusion": DECIDED_CONCLUSIONS},
    "untested": {"conclusion": "not testable"},
}


@dataclass(frozen=True)
class VerdictGroup:
    """The verdicts of one topic by kind; `questions`: the questions with a verdict, or all questions of the topic."""

    id: str
    topic: VerdictTopic
    verdicts_by_kind: Mapping[str, Sequence[Verdict]]
    questions: list[str]


@dataclass(frozen=True)
class VerdictRowGroup:
    """Verdicts shown together; `regions_overlap`: their regions share most of their pixels."""

    verdicts: list[Verdict]
    regions_overlap: bool = False


def group_verdicts_by_topic(summary: Summary) -> list[VerdictGroup]:
    """Group the verdicts of a summary by topic and kind."""
    groups = []
    for name, topic in VERDICT_TOPICS.items():
        verdicts = [verdict for verdict in summary.verdicts if find_topic_id(verdict.question) == name]
        questions = list(dict.fromkeys(verdict.question for verdict in verdicts)) or list(topic.questions)
        groups.append(VerdictGroup(name, topic, group_verdicts_by_kind(verdicts), questions))
    return groups


def classify_verdict(verdict: Verdict) -> str:
    """Return the kind of a verdict: "supports", "contradicts", "neither" or "untested"."""
    return "untested" if verdict.conclusion == "not testable" else verdict.direction


def group_verdicts_by_kind(verdicts: Sequence[Verdict]) -> dict[str, list[Verdict]]:
    """Group verdicts by kind: contradicting, supporting, neutral, not testable."""
    return {
        kind: [verdict for verdict in verdicts if classify_verdict(verdict) == kind] for kind in VERDICT_KIND_LABELS
    }


def describe_direction(verdict: Verdict) -> str:
    """Return `contradicts the model`, `supports the maps`, `neutral`, or "" if not testable."""
    kind, name = classify_verdict(verdict), VERDICT_TOPICS[find_topic_id(verdict.question)].name_in_sentence
    return {
        "contradicts": f"contradicts {name}",
        "supports": f"supports {name}",
        "neither": "neutral",
        "untested": "",
    }[kind]


def group_overlapping_verdicts(
    verdicts: Sequence[Verdict], overlapping_regions: Mapping[str, list[list[str]]]
) -> list[VerdictRowGroup]:
    """Group verdicts in their order; verdicts on overlapping regions follow the first of them."""
    groups: list[tuple[tuple[str, ...], VerdictRowGroup]] = []
    for verdict in verdicts:
        key = _get_overlap_key(verdict, overlapping_regions)
        matching = [row_group for other_key, row_group in (groups if key else groups[-1:]) if other_key == key]
        if matching:
            matching[0].verdicts.append(verdict)
        else:
            groups.append((key, VerdictRowGroup([verdict], regions_overlap=bool(key))))
    return [row_group for _, row_group in groups]


def _get_overlap_key(verdict: Verdict, overlapping_regions: Mapping[str, list[list[str]]]) -> tuple[str, ...]:
    """Return the finding and the overlapping regions of a verdict; () if its region overlaps with no other."""
    if (verdict.question, verdict.conclusion) != ("shortcut", "supported"):
        return ()
    return next(
        (
            (verdict.finding, *group)
            for group in overlapping_regions.get(verdict.finding, [])
            if verdict.qualifier in group
        ),
        (),
    )
