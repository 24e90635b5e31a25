"""Labels of the report: texts, and the order of the verdicts.

- Words: texts from outside as the report shows them, and names for what the summary holds.
- Board: the verdicts by what they are about, then by what they say of it; what one cause may have given stands
  together.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from camscope.audit.core.schema import Summary, Verdict

EFFECT_QUANTITIES: Mapping[str, str] = {
    "performance": "AUROC",
    "performance by subgroup": "difference in AUROC",
    "ground truth": "change of the log odds, in SD",
    "shortcut": "change of the log odds, in SD",
    "shortcut by subgroup": "difference of the change, in SD",
    "masked organ": "AUROC that is left",
    "localization": "enrichment",
    "localization by subgroup": "difference of the share inside",
    "attribution mass": "enrichment",
    "faithfulness": "over the best control",
    "sanity": "similarity that is left",
    "robustness": "rank correlation",
    "leakage": "AUROC of the probe",
    "clusters": "stability of the clusters",
}


@dataclass(frozen=True)
class VerdictTopic:
    """What verdicts are about: `title`, `description` on it, its `name_in_sentence` in a sentence, and the questions that are asked of it."""

    title: str
    description: str
    name_in_sentence: str
    questions: tuple[str, ...]


VERDICT_TOPICS: Mapping[str, VerdictTopic] = {
    "model": VerdictTopic(
        "The model",
        "What it answers, and what its answers rest on.",
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
        "Whether they show what the model does. A map that does not is no evidence, and speaks against no model.",
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
        "What travels with the images, and could be learnt in the finding's place.",
        "the data",
        ("leakage",),
    ),
}

CONCLUSION_MEANINGS: Mapping[str, str] = {
    "supported": "the claim holds",
    "not supported": "the claim does not hold",
    "not testable": "its rule gives no answer, which is no acquittal",
}


def find_topic_id(question: str) -> str:
    """Whether a question is asked of the model, of the maps or of the data; a new one, of the model."""
    return next((name for name, topic in VERDICT_TOPICS.items() if question in topic.questions), "model")


MARGIN_DESCRIPTIONS: Mapping[str, str] = {
    "effect": "An intervention counts from this change of the log odds, in their standard deviations",
    "auroc_difference": "A difference in AUROC between subgroups that would matter",
    "useful_auroc": "The AUROC that the model has to exceed",
    "masked_auroc": "The AUROC above which a model that has lost the organ still answers",
    "enrichment": "A region's share of the map over its share of the image, where chance is one",
    "mass_difference": "A difference of a map's share between subgroups that would matter",
    "robustness_correlation": "The rank correlation of maps under changes that do not matter",
    "leakage_auroc": "The AUROC of a probe below which a column cannot be read off the features to any extent that matters",
    "reliance_prevalence": "The smallest share of patients whose reliance on a region has to be found before it is called absent",
}


JOINING_CHARACTERS = "\N{ZERO WIDTH NON-JOINER}\N{ZERO WIDTH JOINER}\N{SOFT HYPHEN}"  # which words are written with


def sanitize_text(text: str) -> str:
    """A text from outside in one line, in which nothing steers: neither a control character nor a change of direction."""
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
    "neither": "neither way",
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
    """The verdicts on the model, on its maps or on the data, kind by kind; `questions`: those that were asked of it."""

    id: str
    topic: VerdictTopic
    verdicts_by_kind: Mapping[str, Sequence[Verdict]]
    questions: list[str]


@dataclass(frozen=True)
class VerdictRowGroup:
    """Verdicts that stand together; `regions_overlap`: because their regions share most of their pixels."""

    verdicts: list[Verdict]
    regions_overlap: bool = False


def group_verdicts_by_topic(summary: Summary) -> list[VerdictGroup]:
    """Of the model, of the maps, of the data."""
    groups = []
    for name, topic in VERDICT_TOPICS.items():
        verdicts = [verdict for verdict in summary.verdicts if find_topic_id(verdict.question) == name]
        questions = list(dict.fromkeys(verdict.question for verdict in verdicts)) or list(topic.questions)
        groups.append(VerdictGroup(name, topic, group_verdicts_by_kind(verdicts), questions))
    return groups


def classify_verdict(verdict: Verdict) -> str:
    """Whether it speaks for or against what it is about, neither, or was not testable."""
    return "untested" if verdict.conclusion == "not testable" else verdict.direction


def group_verdicts_by_kind(verdicts: Sequence[Verdict]) -> dict[str, list[Verdict]]:
    """What speaks against, then for, neither way, and what was not testable; each in the order it came."""
    return {
        kind: [verdict for verdict in verdicts if classify_verdict(verdict) == kind] for kind in VERDICT_KIND_LABELS
    }


def describe_direction(verdict: Verdict) -> str:
    """`against the model`, `for the maps`; of what was not testable nothing."""
    kind, name = classify_verdict(verdict), VERDICT_TOPICS[find_topic_id(verdict.question)].name_in_sentence
    return {
        "contradicts": f"contradicts {name}",
        "supports": f"supports {name}",
        "neither": "neither way",
        "untested": "",
    }[kind]


def group_overlapping_verdicts(
    verdicts: Sequence[Verdict], overlapping_regions: Mapping[str, list[list[str]]]
) -> list[VerdictRowGroup]:
    """Verdicts in their order; of regions that overlap, all stand where the first of them does."""
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
    """The regions that a verdict's own overlaps with, after its finding; of most verdicts none."""
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
