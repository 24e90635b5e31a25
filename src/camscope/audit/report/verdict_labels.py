"""Labels of the report: texts, and the order of the verdicts.

- Words: texts from outside as the report shows them, and names for what the summary holds.
- Board: the verdicts by what they are about, then by what they say of it; what one cause may have given stands
  together.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from camscope.audit.core.schema import Summary, Verdict

QUANTITY: Mapping[str, str] = {
    "performance": "AUROC",
    "performance by subgroup": "difference in AUROC",
    "evidence": "change of the log odds, in SD",
    "shortcut": "change of the log odds, in SD",
    "shortcut by subgroup": "difference of the change, in SD",
    "blanked organ": "AUROC that is left",
    "localisation": "enrichment",
    "localisation by subgroup": "difference of the share inside",
    "where the maps lie": "enrichment",
    "faithfulness": "over the best control",
    "sanity": "similarity that is left",
    "robustness": "rank correlation",
    "leak": "AUROC of the probe",
    "strategies": "stability of the clusters",
}


@dataclass(frozen=True)
class Subject:
    """What verdicts are about: `title`, `words` on it, its `name` in a sentence, and the questions that are asked of it."""

    title: str
    words: str
    name: str
    questions: tuple[str, ...]


SUBJECTS: Mapping[str, Subject] = {
    "model": Subject(
        "The model",
        "What it answers, and what its answers rest on.",
        "the model",
        (
            "performance", "performance by subgroup", "evidence", "shortcut", "shortcut by subgroup", "blanked organ",
        ),
    ),
    "maps": Subject(
        "The maps",
        "Whether they show what the model does. A map that does not is no evidence, and speaks against no model.",
        "the maps",
        (
            "localisation", "localisation by subgroup", "where the maps lie", "faithfulness", "sanity", "robustness",
            "strategies",
        ),
    ),
    "data": Subject(
        "The data",
        "What travels with the images, and could be learnt in the finding's place.",
        "the data",
        ("leak",),
    ),
}  # fmt: skip

MEANS: Mapping[str, str] = {
    "supported": "the claim holds",
    "not supported": "the claim does not hold",
    "not testable": "its rule gives no answer, which is no acquittal",
}


def subject_of(question: str) -> str:
    """Whether a question is asked of the model, of the maps or of the data; a new one, of the model."""
    return next((name for name, one in SUBJECTS.items() if question in one.questions), "model")


MARGINS: Mapping[str, str] = {
    "effect": "An intervention counts from this change of the log odds, in their standard deviations",
    "auroc": "A difference in AUROC between subgroups that would matter",
    "useful": "The AUROC that the model has to exceed",
    "blanked": "The AUROC above which a model that has lost the organ still answers",
    "enrichment": "A region's share of the map over its share of the image, where chance is one",
    "mass": "A difference of a map's share between subgroups that would matter",
    "robust": "The rank correlation of maps under changes that do not matter",
    "leak": "The AUROC of a probe below which a column cannot be read off the features to any extent that matters",
    "prevalence": "The smallest share of patients whose reliance on a region has to be found before it is called absent",
}


JOINERS = "\N{ZERO WIDTH NON-JOINER}\N{ZERO WIDTH JOINER}\N{SOFT HYPHEN}"  # which words are written with


def clean(text: str) -> str:
    """A text from outside in one line, in which nothing steers: neither a control character nor a change of direction."""
    line = " ".join(text.split())
    if line.isprintable():
        return line
    return "".join(
        letter if letter.isprintable() or letter in JOINERS else "\N{REPLACEMENT CHARACTER}" for letter in line
    )


KIND_WORDS: Mapping[str, str] = {
    "against": "against",
    "for": "for",
    "neither": "neither way",
    "untested": "not testable",
}
TOLD = ["supported", "not supported"]
TALLIES: Mapping[str, Mapping[str, str | list[str]]] = {
    "against": {"speaks": "against", "word": TOLD},
    "for": {"speaks": "for", "word": TOLD},
    "neither": {"speaks": "neither", "word": TOLD},
    "untested": {"word": "not testable"},
}


@dataclass(frozen=True)
class Side:
    """The verdicts on the model, on its maps or on the data, kind by kind; `questions`: those that were asked of it."""

    id: str
    subject: Subject
    kinds: Mapping[str, Sequence[Verdict]]
    questions: list[str]


@dataclass(frozen=True)
class Block:
    """Verdicts that stand together; `overlap`: because their regions share most of their pixels."""

    rows: list[Verdict]
    overlap: bool = False


def sides(summary: Summary) -> list[Side]:
    """Of the model, of the maps, of the data."""
    made = []
    for name, subject in SUBJECTS.items():
        own = [one for one in summary.verdicts if subject_of(one.question) == name]
        questions = list(dict.fromkeys(one.question for one in own)) or list(subject.questions)
        made.append(Side(name, subject, grouped(own), questions))
    return made


def kind_of(verdict: Verdict) -> str:
    """Whether it speaks for or against what it is about, neither, or was not testable."""
    return "untested" if verdict.word == "not testable" else verdict.speaks


def grouped(verdicts: Sequence[Verdict]) -> dict[str, list[Verdict]]:
    """What speaks against, then for, neither way, and what was not testable; each in the order it came."""
    return {kind: [one for one in verdicts if kind_of(one) == kind] for kind in KIND_WORDS}


def speaks(verdict: Verdict) -> str:
    """`against the model`, `for the maps`; of what was not testable nothing."""
    kind, name = kind_of(verdict), SUBJECTS[subject_of(verdict.question)].name
    return {"against": f"against {name}", "for": f"for {name}", "neither": "neither way", "untested": ""}[kind]


def blocks(rows: Sequence[Verdict], overlapping: Mapping[str, list[list[str]]]) -> list[Block]:
    """Verdicts in their order; of regions that overlap, all stand where the first of them does."""
    made: list[tuple[tuple[str, ...], Block]] = []
    for one in rows:
        group = _group(one, overlapping)
        known = [block for other, block in (made if group else made[-1:]) if other == group]
        if known:
            known[0].rows.append(one)
        else:
            made.append((group, Block([one], overlap=bool(group))))
    return [block for _, block in made]


def _group(one: Verdict, overlapping: Mapping[str, list[list[str]]]) -> tuple[str, ...]:
    """The regions that a verdict's own overlaps with, after its finding; of most verdicts none."""
    if (one.question, one.word) != ("shortcut", "supported"):
        return ()
    return next(((one.finding, *group) for group in overlapping.get(one.finding, []) if one.subject in group), ())
