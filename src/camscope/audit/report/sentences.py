"""Sentences of the report that speak of numbers. Each is made from the part of the summary that holds its numbers."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from camscope.audit.core.schema import (
    Answers,
    Check,
    Group,
    Held,
    Level,
    Measured,
    Number,
    Strategies,
    Summary,
    Verdict,
)
from camscope.audit.report.number_format import number_of
from camscope.plurals import inflect

TESTED = ["supported", "not supported"]


@dataclass(frozen=True)
class Name:
    """A text from outside, as the name of a finding."""

    text: str


@dataclass(frozen=True)
class Count:
    """How many items of a list of the summary have these fields: `("verdicts", {"word": "not testable"})`."""

    path: str
    fields: Mapping[str, str | list[str]]
    value: int


Part = str | int | float | Name | Count | Number
Sentence = tuple[Part, ...]


def no_objection(summary: Summary, name: str, questions: Sequence[str]) -> Sentence:
    """What it means that no verdict speaks against `name`, by how many of its questions could be tested at all."""
    asked = _count(summary, question=list(questions))
    tested = _count(summary, question=list(questions), word=TESTED)
    if not asked.value:
        return (f"No question about {name} was asked. This says nothing for {name}.",)
    if not tested.value:
        if asked.value == 1:
            return (f"The only question about {name} could not be tested. This says nothing for {name}.",)
        return ("None of the ", asked, f" questions about {name} could be tested. This says nothing for {name}.")
    return (
        f"Nothing that could be tested speaks against {name}: ",
        tested,
        " of ",
        asked,
        f" {inflect(asked.value, 'question')} could be tested. This is not proof of soundness.",
    )


def _count(summary: Summary, **fields: str | list[str]) -> Count:
    known = {"verdicts": [{"question": one.question, "word": one.word} for one in summary.verdicts]}
    return Count("verdicts", fields, number_of(known, "verdicts", fields))


def patients(check: Check) -> Sentence:
    """What the unit of the statistics is."""
    if check.grouped:
        noun = inflect(check.patients, "patient")
        return ("The images are of ", check.patients, f" {noun}. Statistics take all images of a patient as one unit.")
    return (
        "No column says which images are of one patient: each image counts as a patient, and intervals may be too narrow.",
    )


def unit(check: Check) -> str:
    """The same, in a note below a table."""
    return "a patient's images are one unit" if check.grouped else "each image counts as a patient"


def declared(provenance: Mapping[str, Any]) -> Sentence:
    """Whether the margins were declared before any result could be seen, as far as the folder's log says."""
    count = provenance.get("declarations")
    if not isinstance(count, int):
        return ("It is not recorded whether other margins were declared before these.",)
    if count == 1:
        return (
            "The config was declared before the model was asked anything, and no other one was used in this folder.",
        )
    when = (
        "this one is the first of them, declared before the model was asked anything"
        if provenance.get("declared_before_looking")
        else "this one was declared after results of another one could be seen"
    )
    return ("In this folder ", count, f" different configs were declared: {when}.")


def localised(stage: Measured) -> Iterator[Sentence]:
    """On how many images of each finding it was measured where maps lie."""
    for finding, images in _images(stage, "enrichment").items():
        yield "Images with ", Name(finding), " whose place is marked and whose maps have a value: ", images, "."


def measured(stage: Measured) -> Iterator[Sentence]:
    """On how many images maps were tested."""
    if stage.images:
        noun = inflect(stage.images, "image with a finding was", "images with a finding were")
        yield stage.images, f" {noun} used, drawn by the seed."


def _images(stage: Measured, metric: str) -> dict[str, int]:
    found: dict[str, int] = {}
    for line in stage.lines:
        if line.metric == metric and not line.control:
            found[line.finding] = max(found.get(line.finding, 0), line.value.n)
    return found


def held(one: Held) -> Sentence:
    """Under which share of the changes of a stability the answer itself stayed the same."""
    finding, metric = Name(one.finding), Name(one.metric)
    if one.share.value is None:
        why = Name(one.share.reason)
        return (
            "It is not known how often the answer for ",
            finding,
            " held under the changes of ",
            metric,
            " (",
            why,
            ").",
        )
    return (
        "The answer for ",
        finding,
        " held under this share of the changes of ",
        metric,
        ": ",
        one.share,
        ". Maps under the other changes are left out.",
    )


def groups_of_maps(one: Strategies) -> Sentence:
    """What was found of groups of maps, or why nothing could be."""
    if one.reason:
        verb = inflect(one.maps, "There is ", "There are ")
        return "Not tested: ", Name(one.reason), f". {verb}", one.maps, f" {inflect(one.maps, 'map')}."
    found: Sentence = (
        ("No grouping is claimed among ",) if one.claimed < 2 else (one.claimed, " groups are claimed among ")
    )
    more = inflect(one.left_out, "more has no positive values, and is", "more have no positive values, and are")
    left = (": ", one.left_out, f" {more} left out") if one.left_out else ()
    maps, patients = inflect(one.maps, "map"), inflect(one.patients, "patient")
    return *found, one.maps, f" {maps} of ", one.patients, f" {patients}", *left, "."


def scores(summary: Summary) -> str:
    """What the maps explain and effects are measured in."""
    outputs = "one class against all others" if summary.resolve.outputs == "softmax" else "the finding's own output"
    limit = (
        "made from probabilities, so that they end where these round to 0 or 1"
        if summary.predict.probabilities
        else "made from the model's scores before a softmax or sigmoid"
    )
    return f"The class of each finding, in log odds: {outputs}, {limit}"


@dataclass(frozen=True)
class IntervalMethod:
    """How 95 % intervals are made, by which paper, and which numbers of the summary have such an interval."""

    text: Sentence
    paper: str
    used_for: tuple[str, ...]


def intervals(summary: Summary) -> list[IntervalMethod]:
    """Every method of an interval that occurs in the summary."""
    used: dict[str, dict[str, None]] = {}
    for label, number in numbers_of(summary):
        if number.interval:
            used.setdefault(number.interval, {})[label] = None
    if any(one.bins for one in summary.predict.findings):
        used.setdefault("wilson", {})["shares of a reliability diagram"] = None
    known = _methods(summary.replicates)
    ordered = sorted(used, key=lambda name: (list(known).index(name) if name in known else len(known), name))
    return [IntervalMethod(*known.get(name, ((Name(name),), "")), tuple(used[name])) for name in ordered]


def _methods(replicates: int) -> dict[str, tuple[Sentence, str]]:
    return {
        "bootstrap": (
            (
                "bootstrap over patients with all their images, ",
                replicates,
                " resamples; percentiles, wider for few patients",
            ),
            "Hesterberg 2015, doi:10.1080/00031305.2015.1089789",
        ),
        "korn-graubard": (
            (
                "Korn and Graubard's interval of a share, from the numbers of patients and of their images, ",
                "and how much patients differ",
            ),
            "Korn and Graubard 1998, Survey Methodology 24, 193",
        ),
        "student": (
            ("Student's t of the jackknife over patients, with degrees of freedom for their numbers of images",),
            "Bell and McCaffrey 2002, Survey Methodology 28, 169; MacKinnon, Nielsen and Webb 2023, doi:10.1002/jae.2969",
        ),
        "newcombe": (
            (
                "Newcombe's interval of an area under the ROC curve, from the number of patients of either class, widened by "
                "the variance over ",
                replicates,
                " bootstrap resamples",
            ),
            "Newcombe 2006, method 5, doi:10.1002/sim.2324",
        ),
        "square-and-add": (
            ("from the intervals of both sides, by square-and-add",),
            "Zou 2007, doi:10.1037/1082-989X.12.4.399",
        ),
        "clustered": (
            ("Student's t of the jackknife over receivers, donors and third patients together",),
            "Cameron, Gelbach and Miller 2011, doi:10.1198/jbes.2010.07136",
        ),
        "wilson": (
            ("Wilson's interval of a share, from the number of patients",),
            "Wilson 1927, doi:10.1080/01621459.1927.10502953",
        ),
    }


KINDS = {"insert": "insertion", "remove": "removal", "keep only": "keeping only a region"}
FIELDS = {
    "auroc": "AUROC",
    "average_precision": "average precision",
    "brier": "Brier score",
    "calibration_error": "calibration error",
    "slope": "calibration slope",
    "intercept": "calibration intercept",
}


def numbers_of(part: BaseModel) -> Iterator[tuple[str, Number]]:
    """Every estimate of a part of the summary but the verdicts', which are copies, with what it is an estimate of."""
    for name in type(part).model_fields:
        value = getattr(part, name)
        for one in value if isinstance(value, tuple) else (value,):
            if isinstance(one, Number):
                yield _label(part, name), one
            elif isinstance(one, BaseModel) and not isinstance(one, Verdict):
                yield from numbers_of(one)


def _label(part: BaseModel, name: str) -> str:
    if isinstance(part, Level):
        return "differences between subgroups" if name == "difference" else "values of subgroups"
    if isinstance(part, Answers | Group):
        return FIELDS.get(name, name)
    return {
        ("Line", "value"): "metrics of maps",
        ("Line", "over"): "differences between maps and control maps",
        ("Held", "share"): "shares of changes under which the answer held",
        ("Similarity", "end"): "similarity of maps after randomization",
        ("Mass", "share"): "shares of maps in regions",
        ("Mass", "enrichment"): "enrichment of maps in regions",
        ("Mass", "confounder_sensitivity"): "regions among the highest values of maps",
        ("Intervention", "effect"): f"effects of {KINDS.get(getattr(part, 'kind', ''), 'interventions')}",
        ("Blanked", "auroc"): "AUROC of changed images",
        ("Leak", "auroc"): "AUROC of probes",
    }.get((type(part).__name__, name), name.replace("_", " "))
