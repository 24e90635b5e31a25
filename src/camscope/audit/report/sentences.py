"""Sentences of the report that contain numbers of the summary."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from camscope.audit.core.schema import (
    ClusterAnalysis,
    DataCheckResult,
    EstimateSummary,
    FindingPerformance,
    MetricsResult,
    StablePredictionShare,
    SubgroupDifference,
    SubgroupPerformance,
    Summary,
    Verdict,
)
from camscope.audit.report.number_format import count_items
from camscope.plurals import inflect

TESTED_CONCLUSIONS = ["supported", "not supported"]


@dataclass(frozen=True)
class ExternalText:
    """A text supplied by the user, such as the name of a finding."""

    text: str


@dataclass(frozen=True)
class ItemCount:
    """The number of items of a list in the summary with given field values: `("verdicts", {"conclusion": "not testable"})`."""

    path: str
    field_values: Mapping[str, str | list[str]]
    value: int


SentencePart = str | int | float | ExternalText | ItemCount | EstimateSummary
Sentence = tuple[SentencePart, ...]


def describe_absent_objections(summary: Summary, topic_name: str, questions: Sequence[str]) -> Sentence:
    """Describe what the absence of a contradicting verdict means, given how many questions could be tested."""
    n_questions = _count_verdicts(summary, question=list(questions))
    n_tested = _count_verdicts(summary, question=list(questions), conclusion=TESTED_CONCLUSIONS)
    if not n_questions.value:
        return (f"No question about {topic_name} was tested. This is not evidence in favor of {topic_name}.",)
    if not n_tested.value:
        if n_questions.value == 1:
            return (
                f"The only question about {topic_name} was not testable. This is not evidence in favor of {topic_name}.",
            )
        return (
            "None of the ",
            n_questions,
            f" questions about {topic_name} was testable. This is not evidence in favor of {topic_name}.",
        )
    return (
        f"No verdict contradicts {topic_name}: ",
        n_tested,
        " of ",
        n_questions,
        f" {inflect(n_questions.value, 'question')} could be tested. This is not proof of soundness.",
    )


def _count_verdicts(summary: Summary, **field_values: str | list[str]) -> ItemCount:
    data = {
        "verdicts": [{"question": verdict.question, "conclusion": verdict.conclusion} for verdict in summary.verdicts]
    }
    return ItemCount("verdicts", field_values, count_items(data, "verdicts", field_values))


def describe_patient_grouping(check: DataCheckResult) -> Sentence:
    """Describe whether images are grouped by patient."""
    if check.has_patient_column:
        noun = inflect(check.n_patients, "patient")
        return (
            "The images come from ",
            check.n_patients,
            f" {noun}. All images of a patient count as one unit of the statistics.",
        )
    return ("No column identifies the patient: each image counts as a patient, and intervals may be too narrow.",)


def describe_statistical_unit(check: DataCheckResult) -> str:
    """Describe the unit of the statistics, for a note below a table."""
    return "all images of a patient count as one unit" if check.has_patient_column else "each image counts as a patient"


def describe_config_declarations(provenance: Mapping[str, Any]) -> Sentence:
    """Describe whether the margins were declared before any result was available, according to the log of the folder."""
    count = provenance.get("declarations")
    if not isinstance(count, int):
        return ("It is not recorded whether other margins were declared earlier.",)
    if count == 1:
        return ("The config was declared before the first prediction, and no other config was used in this folder.",)
    when = (
        "this is the first of them, declared before the first prediction"
        if provenance.get("declared_before_results")
        else "this one was declared when results of another config were available"
    )
    return (count, f" different configs were declared in this folder: {when}.")


def describe_localization_images(stage: MetricsResult) -> Iterator[Sentence]:
    """Yield the number of images on which localization was measured, for each finding."""
    for finding, images in _count_images_by_finding(stage, "enrichment").items():
        yield "Images with ", ExternalText(finding), " that are annotated and whose maps have a value: ", images, "."


def describe_image_count(stage: MetricsResult) -> Iterator[Sentence]:
    """Yield the number of tested images."""
    if stage.n_images:
        noun = inflect(stage.n_images, "image with a finding was", "images with a finding were")
        yield stage.n_images, f" {noun} used, drawn by the seed."


def _count_images_by_finding(stage: MetricsResult, metric: str) -> dict[str, int]:
    counts: dict[str, int] = {}
    for line in stage.metric_summaries:
        if line.metric == metric and not line.control:
            counts[line.finding] = max(counts.get(line.finding, 0), line.value.n_values)
    return counts


def describe_stable_predictions(stable_share: StablePredictionShare) -> Sentence:
    """Describe under which share of the changes the prediction stayed the same."""
    finding, metric = ExternalText(stable_share.finding), ExternalText(stable_share.metric)
    if stable_share.share.value is None:
        reason = ExternalText(stable_share.share.reason)
        return (
            "It is not known how often the prediction for ",
            finding,
            " stayed the same under the changes of ",
            metric,
            " (",
            reason,
            ").",
        )
    return (
        "The prediction for ",
        finding,
        " stayed the same under this share of the changes of ",
        metric,
        ": ",
        stable_share.share,
        ". Maps under the other changes are excluded.",
    )


def describe_clusters(analysis: ClusterAnalysis) -> Sentence:
    """Describe the clusters of the maps, or why they were not tested."""
    if analysis.reason:
        verb = inflect(analysis.n_maps, "There is ", "There are ")
        return (
            "Not tested: ",
            ExternalText(analysis.reason),
            f". {verb}",
            analysis.n_maps,
            f" {inflect(analysis.n_maps, 'map')}.",
        )
    beginning: Sentence = (
        ("No clusters were found among ",)
        if analysis.n_clusters < 2
        else (analysis.n_clusters, " clusters were found among ")
    )
    excluded_text = inflect(
        analysis.n_excluded, "more has no positive values, and is", "more have no positive values, and are"
    )
    excluded_part = (": ", analysis.n_excluded, f" {excluded_text} excluded") if analysis.n_excluded else ()
    maps, patients = inflect(analysis.n_maps, "map"), inflect(analysis.n_patients, "patient")
    return *beginning, analysis.n_maps, f" {maps} of ", analysis.n_patients, f" {patients}", *excluded_part, "."


def describe_target(summary: Summary) -> str:
    """Describe the target of the maps and the unit of the effects."""
    outputs = "one class against all others" if summary.resolve.outputs == "softmax" else "the finding's own output"
    limit = (
        "computed from probabilities and limited where these round to 0 or 1"
        if summary.predict.outputs_are_probabilities
        else "computed from the outputs before a softmax or sigmoid"
    )
    return f"The class of each finding, in log odds: {outputs}, {limit}"


@dataclass(frozen=True)
class IntervalMethod:
    """A method of 95 % intervals: its description, its paper, and the estimates that use it."""

    description: Sentence
    paper: str
    estimate_labels: tuple[str, ...]


def list_interval_methods(summary: Summary) -> list[IntervalMethod]:
    """List all interval methods that occur in the summary."""
    labels_by_method: dict[str, dict[str, None]] = {}
    for label, estimate in iter_estimates(summary):
        if estimate.interval_method:
            labels_by_method.setdefault(estimate.interval_method, {})[label] = None
    if any(performance.bins for performance in summary.predict.performance):
        labels_by_method.setdefault("wilson", {})["shares of a reliability diagram"] = None
    descriptions = _describe_interval_methods(summary.n_resamples)
    names = sorted(
        labels_by_method,
        key=lambda name: (list(descriptions).index(name) if name in descriptions else len(descriptions), name),
    )
    return [
        IntervalMethod(*descriptions.get(name, ((ExternalText(name),), "")), tuple(labels_by_method[name]))
        for name in names
    ]


def _describe_interval_methods(n_resamples: int) -> dict[str, tuple[Sentence, str]]:
    return {
        "bootstrap": (
            (
                "bootstrap over patients with all their images, ",
                n_resamples,
                " resamples; percentiles, widened for few patients",
            ),
            "Hesterberg 2015, doi:10.1080/00031305.2015.1089789",
        ),
        "korn-graubard": (
            (
                "Korn and Graubard interval of a share, from the numbers of patients and images ",
                "and the variation between patients",
            ),
            "Korn and Graubard 1998, Survey Methodology 24, 193",
        ),
        "student": (
            (
                "Student's t interval of the jackknife over patients, with degrees of freedom adjusted for the numbers of images",
            ),
            "Bell and McCaffrey 2002, Survey Methodology 28, 169; MacKinnon, Nielsen and Webb 2023, doi:10.1002/jae.2969",
        ),
        "newcombe": (
            (
                "Newcombe interval of the area under the ROC curve, from the number of patients of either class, widened by "
                "the variance over ",
                n_resamples,
                " bootstrap resamples",
            ),
            "Newcombe 2006, method 5, doi:10.1002/sim.2324",
        ),
        "square-and-add": (
            ("square-and-add of the intervals of both groups",),
            "Zou 2007, doi:10.1037/1082-989X.12.4.399",
        ),
        "clustered": (
            ("Student's t interval of the jackknife over receivers, donors and control patients together",),
            "Cameron, Gelbach and Miller 2011, doi:10.1198/jbes.2010.07136",
        ),
        "wilson": (
            ("Wilson interval of a share, from the number of patients",),
            "Wilson 1927, doi:10.1080/01621459.1927.10502953",
        ),
    }


INTERVENTION_NOUNS = {"insert": "insertion", "remove": "removal", "keep only": "keeping only a region"}
PERFORMANCE_FIELD_LABELS = {
    "auroc": "AUROC",
    "average_precision": "average precision",
    "brier": "Brier score",
    "calibration_error": "calibration error",
    "slope": "calibration slope",
    "intercept": "calibration intercept",
}


def iter_estimates(model: BaseModel) -> Iterator[tuple[str, EstimateSummary]]:
    """Yield every estimate of a part of the summary with its label; verdicts are skipped because they hold copies."""
    for name in type(model).model_fields:
        value = getattr(model, name)
        for item in value if isinstance(value, tuple) else (value,):
            if isinstance(item, EstimateSummary):
                yield _describe_field(model, name), item
            elif isinstance(item, BaseModel) and not isinstance(item, Verdict):
                yield from iter_estimates(item)


def _describe_field(model: BaseModel, field_name: str) -> str:
    if isinstance(model, SubgroupDifference):
        return "differences between subgroups" if field_name == "difference" else "values of subgroups"
    if isinstance(model, FindingPerformance | SubgroupPerformance):
        return PERFORMANCE_FIELD_LABELS.get(field_name, field_name)
    return {
        ("MetricSummary", "value"): "metrics of maps",
        ("MetricSummary", "difference_to_control"): "differences between maps and control maps",
        ("StablePredictionShare", "share"): "shares of changes with an unchanged prediction",
        ("RandomizationSimilarity", "final_similarity"): "similarity of maps after randomization",
        ("AttributionMass", "share"): "shares of maps in regions",
        ("AttributionMass", "enrichment"): "enrichment of maps in regions",
        ("AttributionMass", "confounder_sensitivity"): "shares of regions in the highest tenth of maps",
        (
            "InterventionEffect",
            "effect",
        ): f"effects of {INTERVENTION_NOUNS.get(getattr(model, 'kind', ''), 'interventions')}",
        ("MaskedAuroc", "auroc"): "AUROC of masked images",
        ("ColumnLeakage", "auroc"): "AUROC of probes",
    }.get((type(model).__name__, field_name), field_name.replace("_", " "))
