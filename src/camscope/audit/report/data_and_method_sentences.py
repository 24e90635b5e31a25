"""Sentences of the report that contain numbers of the summary, as HTML."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup
from pydantic import BaseModel

from camscope.audit.core.stage_result_schema import (
    DataCheckResult,
    EstimateSummary,
    MetricsResult,
    SanityResult,
    StablePredictionShare,
)
from camscope.audit.core.summary_schema import ClusterAnalysis, InterventionEffect, ReviewCase, Summary, Verdict
from camscope.audit.report.number_format import format_estimate, format_item_count, format_number
from camscope.audit.report.verdict_labels_and_groups import DECIDED_CONCLUSIONS, sanitize_text
from camscope.audit.verdicts.map_verdicts import ROBUSTNESS_CONDITIONS
from camscope.plurals import inflect

INTERVAL_METHODS: Mapping[str, tuple[str, str]] = {
    "bootstrap": (
        "bootstrap over patients with all their images, {n_resamples} resamples; percentiles, widened for few patients",
        "Hesterberg 2015, doi:10.1080/00031305.2015.1089789",
    ),
    "korn-graubard": (
        "Korn and Graubard interval of a share, from the numbers of patients and images and the variation between patients",
        "Korn and Graubard 1998, Survey Methodology 24, 193",
    ),
    "student": (
        "Student's t interval of the jackknife over patients, with degrees of freedom adjusted for the numbers of images",
        "Bell and McCaffrey 2002, Survey Methodology 28, 169; MacKinnon, Nielsen and Webb 2023, doi:10.1002/jae.2969",
    ),
    "newcombe": (
        "Newcombe interval of the area under the ROC curve, from the number of patients of either class, widened by the "
        "variance over {n_resamples} bootstrap resamples",
        "Newcombe 2006, method 5, doi:10.1002/sim.2324",
    ),
    "square-and-add": ("square-and-add of the intervals of both groups", "Zou 2007, doi:10.1037/1082-989X.12.4.399"),
    "clustered": (
        "Student's t interval of the jackknife over receivers, donors and control patients together",
        "Cameron, Gelbach and Miller 2011, doi:10.1198/jbes.2010.07136",
    ),
    "wilson": (
        "Wilson interval of a share, from the number of patients",
        "Wilson 1927, doi:10.1080/01621459.1927.10502953",
    ),
}  # the description of each method and its paper
COUNT_WORDS = (
    "no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve", "thirteen",
    "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty",
)  # fmt: skip
PERFORMANCE_LABELS = {
    "auroc": "AUROC",
    "average_precision": "average precision",
    "brier": "Brier score",
    "calibration_error": "calibration error",
    "slope": "calibration slope",
    "intercept": "calibration intercept",
}
ESTIMATE_LABELS = {
    "SubgroupDifference.value": "values of subgroups",
    "SubgroupDifference.difference": "differences between subgroups",
    **{f"FindingPerformance.{name}": label for name, label in PERFORMANCE_LABELS.items()},
    **{f"SubgroupPerformance.{name}": label for name, label in PERFORMANCE_LABELS.items()},
    "MetricSummary.value": "metrics of maps",
    "MetricSummary.difference_to_control": "differences between maps and control maps",
    "StablePredictionShare.share": "shares of changes with an unchanged prediction",
    "RandomizationSimilarity.final_similarity": "similarity of maps after randomization",
    "AttributionMass.share": "shares of maps in regions",
    "AttributionMass.enrichment": "enrichment of maps in regions",
    "AttributionMass.confounder_sensitivity": "shares of regions in the highest tenth of maps",
    "insert": "effects of insertion",
    "remove": "effects of removal",
    "keep only": "effects of keeping only a region",
    "MaskedAuroc.auroc": "AUROC of masked images",
    "ColumnLeakage.auroc": "AUROC of probes",
}  # by the kind of an intervention, or by class and field


def fill_sentence(template: str, **values: float | str | EstimateSummary) -> Markup:
    """Insert values into a sentence template. Numbers become tagged HTML, and user text is isolated from its direction."""
    parts: dict[str, Markup] = {}
    for name, value in values.items():
        if isinstance(value, Markup):
            parts[name] = value
        elif isinstance(value, str):
            parts[name] = Markup("<bdi>{}</bdi>").format(sanitize_text(value))
        else:
            parts[name] = format_estimate(value) if isinstance(value, EstimateSummary) else format_number(value)
    return Markup(template).format(**parts)  # noqa: S704 - the template is a text of this package


def join_texts(texts: Sequence[str | Markup], max_texts: int | None = None, word: str = "and") -> Markup:
    """Join texts to `a, b and c` as HTML. Texts beyond `max_texts` are only counted, as in `a, b and three more`."""
    named = list(texts) if max_texts is None or len(texts) <= max_texts else texts[:max_texts]
    parts = [fill_sentence("{text}", text=text) for text in named]
    if len(named) < len(texts):
        parts.append(Markup("{} more").format(count_in_words(len(texts) - len(named))))
    if len(parts) < 2:
        return Markup("").join(parts)
    return Markup(", ").join(parts[:-1]) + Markup(f" {word} ") + parts[-1]  # noqa: S704 - a text of this package


def count_in_words(count: int) -> str:
    """Return a small count as a word, and a larger one as "many". In a report, digits are only for numbers of the summary."""
    return COUNT_WORDS[count] if count < len(COUNT_WORDS) else "many"


def explain_missing_contradictions(summary: Summary, topic_name: str, questions: Sequence[str]) -> Markup:
    """Explain what the absence of contradictions about a topic means. This depends on how many questions were decided."""
    data = {"verdicts": [vars(verdict) for verdict in summary.verdicts]}
    conclusions = [verdict.conclusion for verdict in summary.verdicts if verdict.question in questions]
    n_questions = format_item_count(data, "verdicts", question=list(questions))
    no_evidence = f"This is not evidence in favor of {topic_name}."
    if not conclusions:
        return fill_sentence(f"No question about {topic_name} was tested. {no_evidence}")
    if not set(conclusions) & set(DECIDED_CONCLUSIONS):
        if len(conclusions) == 1:
            return fill_sentence(f"The only question about {topic_name} was not decided. {no_evidence}")
        sentence = f"None of the {{n_questions}} questions about {topic_name} was decided. {no_evidence}"
        return fill_sentence(sentence, n_questions=n_questions)
    directions = {verdict.direction for verdict in summary.verdicts if verdict.question in questions}
    if directions == {"neither"}:
        sentence = f"None of the {{n_questions}} questions counts for or against {topic_name}."
        if len(conclusions) == 1:
            sentence = f"The only question about {topic_name} counts neither for nor against it."
        return fill_sentence(sentence, n_questions=n_questions)
    return fill_sentence(
        f"No verdict contradicts {topic_name}: {{n_tested}} of {{n_questions}} {inflect(len(conclusions), 'question')} could "
        "be decided. This is not proof of soundness.",
        n_tested=format_item_count(data, "verdicts", question=list(questions), conclusion=DECIDED_CONCLUSIONS),
        n_questions=n_questions,
    )


def describe_patient_grouping(check: DataCheckResult) -> Markup:
    """Say whether images are grouped by patient. Explain the consequence for the intervals."""
    if not check.has_patient_column:
        return Markup(
            "The data do not say which images show the same patient: each image counts as one patient, and intervals may be "
            "too narrow."
        )
    noun = inflect(check.n_patients, "patient")
    sentence = (
        f"The images come from {{n_patients}} {noun}. All images of a patient count as one unit of the statistics."
    )
    return fill_sentence(sentence, n_patients=check.n_patients)


def describe_statistical_unit(check: DataCheckResult) -> str:
    """Describe the unit of the statistics for a note below a table."""
    return (
        "all images of a patient count as one unit" if check.has_patient_column else "each image counts as one patient"
    )


def describe_config_declarations(provenance: Mapping[str, Any]) -> Markup:
    """Say whether the user declared the margins before the first result. The log of the folder shows the order."""
    count = provenance.get("declarations")
    if not isinstance(count, int):
        return Markup("It is not recorded whether other margins were declared earlier.")
    if count == 1:
        return Markup(
            "The config was declared before the first prediction, and no other config was used in this folder."
        )
    when = (
        "this is the first of them, declared before the first prediction"
        if provenance.get("declared_before_results")
        else "this one was declared when results of another config were available"
    )
    return fill_sentence(f"{{count}} different configs were declared in this folder: {when}.", count=count)


def describe_localization_images(stage: MetricsResult) -> Iterator[Markup]:
    """Yield one sentence per finding with the number of images in the localization test."""
    counts: dict[str, int] = {}
    for line in stage.metric_summaries:
        if line.metric == "enrichment" and not line.control:
            counts[line.finding] = max(counts.get(line.finding, 0), line.value.n_values)
    sentence = "Images with “{finding}” that are annotated and whose maps have a value: {count}."
    return (fill_sentence(sentence, finding=finding, count=count) for finding, count in counts.items())


def describe_sanity_images(stage: SanityResult) -> Iterator[Markup]:
    """Yield one sentence per finding with two counts: the images in the randomization test, and the images of other sizes."""
    for images in stage.images_by_finding:
        size = Markup(" × ").join(map(format_number, images.size))
        noun = inflect(images.n_images, "image")
        sentence = f"{{finding}}: {{n_images}} {noun} whose input measures {{size}}, drawn at random."
        if images.n_other_sizes:
            verb = inflect(images.n_other_sizes, "image of another size was", "images of other sizes were")
            sentence += f" {{n_other_sizes}} {verb} left out, because the test needs inputs of one size."
        yield fill_sentence(
            sentence,
            finding=images.finding,
            n_images=images.n_images,
            size=size or Markup("nothing"),
            n_other_sizes=images.n_other_sizes,
        )
    if not stage.images_by_finding:
        yield from describe_image_count(stage)


def describe_image_count(stage: MetricsResult | SanityResult) -> Iterator[Markup]:
    """Yield one sentence with the number of tested images. Without such images, yield nothing."""
    if stage.n_images:
        noun = inflect(stage.n_images, "image with a finding was", "images with a finding were")
        yield fill_sentence(f"{{n_images}} {noun} used, drawn at random.", n_images=stage.n_images)


def describe_stable_predictions(stable_share: StablePredictionShare) -> Markup:
    """Say in how many images the prediction stayed the same under image changes."""
    condition = ROBUSTNESS_CONDITIONS.get(stable_share.metric, "under the tested changes")
    sentence = (
        f"The prediction for “{{finding}}” stayed the same in this share of the images {condition}: {{share}}. Only the maps of "
        "these images are compared."
    )
    if stable_share.share.value is None:
        sentence = (
            f"It is not known how often the prediction for “{{finding}}” stayed the same {condition}: {{reason}}."
        )
    share, reason = stable_share.share, stable_share.share.reason or "there is no value"
    return fill_sentence(sentence, finding=stable_share.finding, share=share, reason=reason)


def describe_clusters(analysis: ClusterAnalysis) -> Markup:
    """Describe the clusters of the maps. If the audit did not cluster maps, give the reason."""
    maps, patients = inflect(analysis.n_maps, "map"), inflect(analysis.n_patients, "patient")
    if analysis.reason:
        sentence = f"Not tested: {{reason}}. {inflect(analysis.n_maps, 'There is', 'There are')} {{n_maps}} {maps}."
    else:
        beginning = "No clusters were" if analysis.n_clusters < 2 else "{n_clusters} clusters were"
        excluded = inflect(
            analysis.n_excluded, "more has no positive values, and is", "more have no positive values, and are"
        )
        ending = f": {{n_excluded}} {excluded} excluded" if analysis.n_excluded else ""
        sentence = f"{beginning} found among {{n_maps}} {maps} of {{n_patients}} {patients}{ending}."
    names = ("reason", "n_maps", "n_clusters", "n_excluded", "n_patients")
    return fill_sentence(sentence, **{name: getattr(analysis, name) for name in names})


def is_uncounted_removal(intervention: InterventionEffect, summary: Summary) -> bool:
    """Return whether an effect removes a region that every image has, unlike a marker. Such a removal decides no verdict."""
    markers = summary.shortcut.markers_by_finding.get(intervention.finding, ())
    return intervention.kind == "remove" and intervention.region not in markers


def group_review_cases(cases: Sequence[ReviewCase]) -> dict[tuple[str, str], list[str]]:
    """Return (finding, reason) -> the ids of the images to review for that reason."""
    groups: dict[tuple[str, str], list[str]] = {}
    for case in cases:
        groups.setdefault((case.finding, case.reason), []).append(case.id)
    return groups


def describe_masked_aurocs(summary: Summary) -> str:
    """Say which AUROC of masked images decides a verdict, and why the AUROC of a region alone decides nothing."""
    has_organ = any(masked.kind == "mask" for masked in summary.shortcut.masked_auroc)
    first = (
        "Only the AUROC with the organ masked decides a verdict."
        if has_organ
        else "These numbers decide nothing, because the config names no masks of the organ."
    )
    return (
        f"{first} If only a region is kept, the image resembles none of the training images, and the outline of the region may "
        "show the finding."
    )


def describe_explained_output(summary: Summary) -> str:
    """Describe the model output that the maps explain. Effects are measured in its log odds."""
    outputs = "one class against all others" if summary.resolve.outputs == "softmax" else "the finding's own output"
    limit = (
        "computed from probabilities and limited where these round to zero or one"
        if summary.predict.outputs_are_probabilities
        else "computed from the outputs before a softmax or sigmoid"
    )
    return f"The class of each finding, in log odds: {outputs}, {limit}"


@dataclass(frozen=True)
class IntervalMethod:
    """A method for 95 % intervals, with its paper and the kinds of estimates that use it."""

    description: Markup
    paper: str
    estimate_labels: tuple[str, ...]


def list_interval_methods(summary: Summary) -> list[IntervalMethod]:
    """Return every method that computed an interval in the summary."""
    labels_by_method: dict[str, dict[str, None]] = {}
    for label, estimate in iter_estimates(summary):
        if estimate.interval_method:
            labels_by_method.setdefault(estimate.interval_method, {})[label] = None
    if any(performance.bins for performance in summary.predict.performance):
        labels_by_method.setdefault("wilson", {})["shares of a reliability diagram"] = None
    unknown = {name: ("{name}", "") for name in sorted(labels_by_method) if name not in INTERVAL_METHODS}
    return [
        IntervalMethod(
            fill_sentence(description, n_resamples=summary.n_resamples, name=name), paper, tuple(labels_by_method[name])
        )
        for name, (description, paper) in {**INTERVAL_METHODS, **unknown}.items()
        if name in labels_by_method
    ]


def iter_estimates(model: BaseModel) -> Iterator[tuple[str, EstimateSummary]]:
    """Yield (label, estimate) for every estimate in the summary. Verdicts are skipped, because they repeat estimates."""
    for name, value in model:
        for item in value if isinstance(value, tuple) else (value,):
            if isinstance(item, EstimateSummary):
                key = model.kind if isinstance(model, InterventionEffect) else f"{type(model).__name__}.{name}"
                yield ESTIMATE_LABELS.get(key, name.replace("_", " ")), item
            elif isinstance(item, BaseModel) and not isinstance(item, Verdict):
                yield from iter_estimates(item)
