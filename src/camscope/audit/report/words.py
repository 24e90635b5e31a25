"""Words: texts from outside as the report shows them, and names for what the summary holds."""

from collections.abc import Mapping

QUANTITY: Mapping[str, str] = {
    "performance": "AUROC",
    "performance by subgroup": "difference in AUROC",
    "evidence": "change of the log odds, in SD",
    "shortcut": "change of the log odds, in SD",
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

SPEAKS: Mapping[str, str] = {
    "against": "speaks against the model",
    "for": "speaks for the model",
    "neither": "speaks neither way",
    "untested": "could not be tested",
}

MARGINS: Mapping[str, str] = {
    "effect": "An intervention counts from this change of the log odds, in their standard deviations",
    "auroc": "A difference in AUROC between subgroups that would matter",
    "useful": "The AUROC that the model has to exceed",
    "blanked": "The AUROC above which a model that has lost the organ still answers",
    "enrichment": "A region's share of the map over its share of the image, where chance is one",
    "mass": "A difference of a map's share between subgroups that would matter",
    "robust": "The rank correlation of maps under changes that do not matter",
    "leak": "The AUROC of a probe below which a column cannot be read off the features to any extent that matters",
}


def clean(text: str) -> str:
    """A text from outside in one line, in which nothing steers: neither a control character nor a change of direction."""
    line = " ".join(text.split())
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in line)
