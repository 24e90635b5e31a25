"""Write the open questions of an audit as sentences, with the number of patients that would decide each question."""

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter

from markupsafe import Markup

from camscope.audit.core.stage_result_schema import StageResult
from camscope.audit.core.summary_schema import Summary, Verdict
from camscope.audit.report.data_and_method_sentences import fill_sentence, join_texts
from camscope.audit.shortcuts.region_names import format_region, name_region
from camscope.audit.verdicts.patients_needed import HARDLY_DECIDABLE
from camscope.audit.verdicts.verdict_rules import QUESTIONS, find_topic
from camscope.plurals import inflect
from camscope.registry import METHODS

MAX_ITEMS_NAMED = 4
IN_EACH_ROLE = " in each role"
STAGE_DESCRIPTIONS: Mapping[str, str] = {
    "check": "The data were not checked",
    "resolve": "The model was not loaded",
    "predict": "The predictions were not tested",
    "explain": "No maps were computed",
    "localization": "Not tested: whether the maps highlight the finding",
    "faithfulness": "Not tested: whether the maps show what the prediction depends on",
    "sanity": "Not tested: whether the maps depend on the trained weights",
    "robustness": "Not tested: whether the maps stay stable",
    "shortcut": "Not tested: what the prediction relies on",
}
OPEN_QUESTIONS: Mapping[str, str] = {
    "performance": "Whether the model distinguishes images with “{finding}” from those without",
    "shortcut": "Whether the prediction for “{finding}” relies on {items}",
    "masked organ": "Whether the model still detects “{finding}” when the organ is masked",
    "ground truth": "Whether the prediction for “{finding}” uses the area that is marked as “{finding}”",
    "faithfulness": "Whether {maps} show what the prediction for “{finding}” depends on",
    "localization": "Whether {maps} highlight “{finding}” more than chance and better than control maps",
    "sanity": "Whether {maps} for “{finding}” depend on the trained weights",
    "robustness": "Whether {maps} for “{finding}” stay stable under small changes of the image",
    "performance by subgroup": "Whether the model detects “{finding}” equally well regardless of {items}",
    "leakage": "Whether {items} can be predicted from the model's features",
    "shortcut by subgroup": "Whether regions affect the prediction for “{finding}” equally in all subgroups ({items})",
    "localization by subgroup": "Whether {maps} highlight “{finding}” equally well regardless of {items}",
    "attribution mass": "Whether {maps} for “{finding}” highlight {items}",
    "clusters": "Whether {maps} for “{finding}” fall into several clusters",
}  # of one or several open verdicts on one finding, the most important first


SHORT_NAMES: Mapping[str, str] = {
    "performance": "the AUROC",
    "shortcut": "reliance on other regions",
    "masked organ": "detection without the organ",
    "ground truth": "use of the marked area",
    "faithfulness": "whether further maps show what the prediction depends on",
    "localization": "whether further maps highlight the finding",
    "sanity": "whether further maps depend on the trained weights",
    "robustness": "the stability of further maps",
    "performance by subgroup": "further subgroups",
    "leakage": "whether the model's features reveal further columns of the manifest",
    "shortcut by subgroup": "effects of regions by subgroup",
    "localization by subgroup": "localization by subgroup",
    "attribution mass": "the attribution in other regions",
    "clusters": "clusters of maps",
}  # of questions that are not listed


@dataclass(frozen=True)
class OpenQuestion:
    """An open question of the audit, the reason, and the number of patients that would decide the question."""

    question: Markup
    reason: Markup
    section: str
    short_name: str


def iter_open_questions(summary: Summary) -> Iterator[OpenQuestion]:
    """Yield the questions that the audit leaves open. Each comes with a reason, and with how many patients would answer it.

    Those about the model come first, then the stages that were not tested.
    """
    stages = {name: stage for name, stage in summary if isinstance(stage, StageResult) and not stage.tested}
    about_model, about_maps_and_data = list[OpenQuestion](), list[OpenQuestion]()
    for verdict, question in _iter_open_verdicts(summary, stages):
        (about_model if find_topic(verdict.question) == "model" else about_maps_and_data).append(question)
    yield from about_model
    for name, stage in stages.items():
        text = fill_sentence(STAGE_DESCRIPTIONS[name])
        reason = fill_sentence("{reason}", reason=stage.reason or "no reason was given")
        yield OpenQuestion(text, reason, "missing", f"{name} (not tested)")
    yield from about_maps_and_data


def _iter_open_verdicts(summary: Summary, skipped: Container[str]) -> Iterator[tuple[Verdict, OpenQuestion]]:
    """Yield the open questions of tested stages, the most important first. Each comes with its first verdict."""
    groups: dict[tuple[str, str, Markup, str], list[Verdict]] = {}
    for verdict in summary.verdicts:
        if verdict.conclusion == "not decided" and verdict.section not in skipped:
            cause = "" if _is_short_of_patients(verdict) else _shorten_reason(verdict)
            maps = name_maps([verdict]) if verdict.question == "attribution mass" else Markup("")
            groups.setdefault((verdict.question, verdict.finding, maps, cause), []).append(verdict)
    order = list(OPEN_QUESTIONS)
    ranked = sorted(groups.items(), key=lambda item: order.index(item[0][0]) if item[0][0] in order else len(order))
    for (question, finding, _, _), verdicts in ranked:
        items = join_texts(list(dict.fromkeys(map(name_subject, verdicts))), MAX_ITEMS_NAMED)
        template = OPEN_QUESTIONS.get(question, "{claim}")
        maps = name_maps(verdicts)
        text = fill_sentence(template, finding=finding, items=items, maps=maps, claim=verdicts[0].claim)
        reason = explain_open_verdicts(verdicts, summary)
        yield verdicts[0], OpenQuestion(text, reason, verdicts[0].section, SHORT_NAMES.get(question, question))


def name_subject(verdict: Verdict) -> Markup:
    """Return the region, column or method that a verdict judges, as HTML."""
    if verdict.question in ("shortcut", "attribution mass"):
        region = verdict.qualifier.partition(" · ")[0]
        text = format_region(region)
        if not region or region not in text:
            return fill_sentence("{text}", text=text)
        prefix, name, suffix = text.partition(region)  # such as `the region “`, `marker` and `”`
        return fill_sentence(f"{prefix}{{name}}{suffix}", name=name)
    if verdict.question == "shortcut by subgroup":
        column, _, region = verdict.qualifier.partition(", effect of ")
        return fill_sentence("{region} by {column}", region=name_region(region), column=column)
    name = METHODS.replace_names_by_titles(verdict.qualifier) if verdict.qualifier else ""
    return fill_sentence("the column {name}" if verdict.question == "leakage" else "{name}", name=name)


def name_maps(verdicts: Sequence[Verdict]) -> Markup:
    """Name the maps that verdicts judge as HTML, such as `the maps of Grad-CAM and ROAD`. Without names, return "the maps"."""
    names: dict[str, None] = {}
    for verdict in verdicts:
        method = verdict.qualifier.rpartition(" · ")[2]
        if verdict.question == "localization by subgroup":  # whose qualifier is a column
            method = verdict.claim.removeprefix("The maps of ").partition(" highlight ")[0]
        names[METHODS.replace_names_by_titles(method)] = None
    named = [name for name in names if name]
    return fill_sentence("the maps of {names}", names=join_texts(named)) if named else Markup("the maps")


def explain_open_verdicts(verdicts: Sequence[Verdict], summary: Summary) -> Markup:
    """Say why verdicts are open, or how many patients would decide them. The reason is the same for all verdicts.

    An insertion needs patients in each role: receivers, donors and controls. The smallest group is named.
    """
    if not all(map(_is_short_of_patients, verdicts)):
        return _explain_first_verdict(verdicts)
    ranked = sorted(verdicts, key=_get_patients_needed)
    few, many = _get_patients_needed(ranked[0]), _get_patients_needed(ranked[-1])
    present = sorted(verdict.effect.n_groups for verdict in verdicts)
    template = (
        "needs about {few} patients" if few == many else "needs about {few} patients ({first}) to {many} ({last})"
    )
    counts = "{fewest}" if present[0] == present[-1] else "{fewest} to {most}"
    unit = "patients" if summary.check.has_patient_column else "images"
    if groups := [group for verdict in verdicts for group in verdict.effect.n_groups_by_role]:
        template = template.replace("patients", f"{unit} in each role", 1)
        counts += f" {min(groups, key=itemgetter(1))[0]}"
    template = template.replace("patients", unit)
    return fill_sentence(
        f"{template}; there {inflect(present[-1], 'is', 'are')} {counts}",
        few=few,
        many=many,
        first=name_subject(ranked[0]),
        last=name_subject(ranked[-1]),
        fewest=present[0],
        most=present[-1],
    )


def _explain_first_verdict(verdicts: Sequence[Verdict]) -> Markup:
    """Return the reason of the first verdict. If it is the only one and has an interval, state effect and margin before."""
    first = verdicts[0]
    reason = fill_sentence("{reason}", reason=_shorten_reason(first))
    if len(verdicts) > 1 or HARDLY_DECIDABLE not in first.reason or first.question not in QUESTIONS:
        return reason
    quantity, margin = QUESTIONS[first.question].effect_quantity, first.margin
    if margin is None:
        return reason
    return fill_sentence(
        "{quantity} {effect}, margin {margin}; {reason}",
        quantity=quantity, effect=first.effect, margin=margin, reason=reason,
    )  # fmt: skip


def _is_short_of_patients(verdict: Verdict) -> bool:
    """Return whether a verdict is open for lack of patients. Lack of donors is a different reason."""
    return verdict.patients_needed is not None and IN_EACH_ROLE not in verdict.reason


def _get_patients_needed(verdict: Verdict) -> int:
    return verdict.patients_needed or 0


def _shorten_reason(verdict: Verdict) -> str:
    """Return the first clause of a verdict's reason for being open."""
    return verdict.reason.partition("; ")[0] or "no reason was given"
