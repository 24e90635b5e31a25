"""Words: texts from outside as the report shows them, and names for what the summary holds."""

from collections.abc import Mapping
from dataclasses import dataclass

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
