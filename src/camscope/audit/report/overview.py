"""The first screen of a report: the audited model and data, the main results, the biggest concern and the open questions.

All sentences are HTML whose numbers are those of the summary. The one-page summary and the model card use the same sentences.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from markupsafe import Markup

from camscope.audit.core.stage_result_schema import RANDOM_SAMPLE_REASON
from camscope.audit.core.summary_schema import Summary, Verdict
from camscope.audit.report.concerns import (
    contradicts_model,
    get_effect_size,
    iter_concerns,
    list_columns_that_determine_label,
)
from camscope.audit.report.data_and_method_sentences import count_in_words, fill_sentence, join_texts
from camscope.audit.report.number_format import format_item_count, format_number
from camscope.audit.report.open_questions import OpenQuestion, iter_open_questions, name_subject
from camscope.audit.report.verdict_and_auroc_sentences import (
    Concern,
    PerformanceAnswer,
    build_performance_answer,
    build_result_sentence,
    is_performance_verdict_of,
)
from camscope.audit.report.verdict_labels_and_groups import classify_verdict, sanitize_text
from camscope.audit.verdicts.verdict_rules import find_topic
from camscope.plurals import inflect

NOTHING_DECIDED = "Nothing was decided that counts for or against the model or its maps."
MAX_CLASSES_NAMED = 6
MAX_RESULTS_SHOWN = 4
MAX_OTHER_CONCERNS = 2
MAX_OPEN_QUESTIONS_SHOWN = 5  # without other concerns; the section on missing tests lists all


@dataclass(frozen=True)
class Overview:
    """The content of the first screen."""

    model: Markup
    data: Markup
    patients: Markup
    answers: list[PerformanceAnswer]
    chance: Markup
    concern: Concern
    other_concerns: list[Concern]
    more_concerns: Markup
    results: list[Concern]
    all_verdicts: Markup
    notes: list[Markup]
    open_questions: list[OpenQuestion]
    all_open_questions: Markup
    further_questions: Markup
    unproven: list[Markup]


def build_overview(summary: Summary) -> Overview:
    """Build the content of the report's first screen."""
    concerns = list(iter_concerns(summary))
    results = list(_iter_results(summary, [verdict for concern in concerns for verdict in concern.verdicts]))
    first_results = results[:MAX_RESULTS_SHOWN]
    concern = concerns[0] if concerns else _describe_missing_concern(summary)
    # the open questions name the stages that were not tested
    other_concerns = [item for item in concerns[1:] if item.section != "missing"]
    first_concerns = other_concerns[:MAX_OTHER_CONCERNS]
    open_questions = list(iter_open_questions(summary))
    first_questions = open_questions[: MAX_OPEN_QUESTIONS_SHOWN - len(first_concerns)]
    return Overview(
        model=describe_model(summary),
        data=describe_data(summary),
        patients=format_patient_count(summary),
        answers=[build_performance_answer(performance, summary) for performance in summary.predict.performance],
        chance=_describe_chance(summary),
        concern=concern,
        other_concerns=first_concerns,
        more_concerns=_count_more_concerns(len(other_concerns) - len(first_concerns)),
        results=first_results,
        all_verdicts=_count_verdicts(summary, [*concerns, *first_results]),
        notes=[
            *_explain_effects(summary),
            *_explain_sample_sizes(first_results, summary),
        ],
        open_questions=first_questions,
        all_open_questions=_count_open_questions(summary) if len(open_questions) > len(first_questions) else Markup(""),
        further_questions=_name_further_questions(open_questions[len(first_questions) :]),
        unproven=list(iter_unproven_conclusions(summary)),
    )


def describe_model(summary: Summary) -> Markup:
    """Describe the model by its architecture, source, size and classes."""
    resolve = summary.resolve
    if not resolve.model:
        return Markup("no model was loaded")
    names, source = resolve.class_names, resolve.model.removesuffix(", with weights")
    is_named_by_class = resolve.architecture.lower() in ("", source.lower())
    model = "{model}" if is_named_by_class else "{model} (class {architecture})"
    size = ", {n_parameters} parameters" if resolve.n_parameters else ""
    classes = "; {n_classes} classes" if len(names) > MAX_CLASSES_NAMED or not names else "; classes: {names}"
    return fill_sentence(
        f"{model}{size}{classes}",
        architecture=resolve.architecture,
        model=source,
        n_parameters=resolve.n_parameters,
        n_classes=resolve.n_classes,
        names=join_texts([fill_sentence("“{name}”", name=name) for name in names[:MAX_CLASSES_NAMED]]),
    )


def describe_data(summary: Summary) -> Markup:
    """Describe the images by their kind. Also count the images with and without each finding."""
    kind = summary.data_description
    parts = [fill_sentence("{kind}", kind=f"{kind[:1].upper()}{kind[1:]}")] if kind else []
    flow = summary.check.flow
    if flow and flow[-1].reason == RANDOM_SAMPLE_REASON:
        parts.append(fill_sentence("{n} of {m} images, drawn at random", n=flow[-1].n_rows, m=flow[0].n_rows))
    parts += [
        fill_sentence("{n} with “{finding}”, {m} without", n=item.n_positives, m=item.n_negatives, finding=item.finding)
        for item in summary.predict.performance
    ]
    return Markup("; ").join(parts) or Markup("not described")


def format_patient_count(summary: Summary) -> Markup:
    """Return the number of patients as HTML, or say that it is unknown."""
    if not summary.check.tested:
        return Markup("unknown")
    return format_number(summary.check.n_patients) if summary.check.has_patient_column else Markup("unknown")


def _describe_chance(summary: Summary) -> Markup:
    """Say which AUROC is the chance level, in one sentence. Return "" if there is no AUROC."""
    baseline = next((item.auroc.baseline for item in summary.predict.performance), None)
    return Markup("") if baseline is None else fill_sentence("{baseline} is chance.", baseline=baseline)


def _count_more_concerns(count: int) -> Markup:
    return Markup("and {} more {}").format(count_in_words(count), inflect(count, "concern")) if count else Markup("")


def _count_verdicts(summary: Summary, stated: Sequence[Concern]) -> Markup:
    """Say how many verdicts there are. Also count the contradicting verdicts that are not in `stated`."""
    if not summary.verdicts:
        return Markup("")
    data = {"verdicts": [vars(verdict) for verdict in summary.verdicts]}
    text = fill_sentence(
        f"All {{count}} {inflect(len(summary.verdicts), 'verdict')}", count=format_item_count(data, "verdicts")
    )
    stated_ids = {id(verdict) for item in stated for verdict in item.verdicts}
    against = [
        item for item in summary.verdicts if classify_verdict(item) == "contradicts" and id(item) not in stated_ids
    ]
    for topic in ("model", "maps"):
        if count := sum(find_topic(item.question) == topic for item in against):
            text += Markup(", {} more against the {}").format(count_in_words(count), topic)
    return text


def _count_open_questions(summary: Summary) -> Markup:
    """Return the text of the link to all verdicts that are not decided."""
    data = {"verdicts": [vars(verdict) for verdict in summary.verdicts]}
    count = format_item_count(data, "verdicts", conclusion="not decided")
    return fill_sentence("All {count} verdicts that are not decided", count=count)


def _name_further_questions(questions: Sequence[OpenQuestion]) -> Markup:
    """Name the open questions that are missing on the first screen. If the first screen lists all questions, return ""."""
    names = list(dict.fromkeys(question.short_name for question in questions))
    return fill_sentence("Also open: {names}.", names=join_texts(names)) if names else Markup("")


def _explain_effects(summary: Summary) -> Iterator[Markup]:
    """Explain the terms for changes of the log odds. Yield nothing if no verdict uses these terms."""
    if any(verdict.effect.n_groups_by_role for verdict in summary.verdicts):
        yield Markup(
            "Change of the log odds: how far the prediction moves if a region of one image (of the donor) is pasted into "
            "another (of the receiver), compared with pasting from an image without the region (of the control). The unit is "
            "the standard deviation (SD) over all images."
        )


def _explain_sample_sizes(results: Sequence[Concern], summary: Summary) -> Iterator[Markup]:
    """Explain why the numbers of images differ between results. Yield nothing if the numbers are equal."""
    if len({verdict.effect.n_values for result in results for verdict in result.verdicts}) < 2:
        return
    stages = (summary.faithfulness, summary.robustness)
    stops = any(look.reason != "complete" for stage in stages for look in stage.stopping_looks)
    ending = ", and some tests stop once their verdict is reached or out of reach" if stops else ""
    yield fill_sentence(
        f"The numbers of images differ: some tests need images with the finding or with a mask, some draw a sample{ending}."
    )


def _describe_missing_concern(summary: Summary) -> Concern:
    """Explain the absence of concerns: no result calls the model into question."""
    decided = [item for item in summary.verdicts if item.conclusion != "not decided"]
    if not any(find_topic(item.question) == "model" for item in decided):
        sentence = Markup("No question about the model could be decided.")
        return Concern(sentence, Markup("This is not evidence in favor of the model."), "missing", "untested")
    sentence = Markup("None of the decided questions counts against the model.")
    of_model = sorted({item.question for item in summary.verdicts if find_topic(item.question) == "model"})
    data = {"verdicts": [vars(verdict) for verdict in summary.verdicts]}
    details = fill_sentence(
        "Of {all} questions about the model, {open} are not decided. Causes that were not tested, or not named, remain possible.",
        all=format_item_count(data, "verdicts", question=of_model),
        open=format_item_count(data, "verdicts", question=of_model, conclusion="not decided"),
    )
    return Concern(sentence, details, "missing", "neither")


def _iter_results(summary: Summary, stated: Sequence[Verdict] = ()) -> Iterator[Concern]:
    """Yield the decided verdicts by topic: model, maps, data. Within each topic, contradictions come first.

    `stated`: the verdicts that are stated elsewhere.
    """
    stated_ids = {id(verdict) for verdict in stated}
    ranks, topics = {"contradicts": 0, "supports": 1, "neither": 2}, ("model", "maps", "data")
    decided = [item for item in summary.verdicts if item.conclusion != "not decided"]
    groups: dict[tuple[str, ...], list[Verdict]] = {}
    for item in sorted(decided, key=lambda item: (topics.index(find_topic(item.question)), ranks[item.direction])):
        if item.question not in ("performance", "attribution mass") and id(item) not in stated_ids:
            key = (item.question, item.finding, item.conclusion)
            groups.setdefault(key if item.question != "robustness" else (*key, item.claim), []).append(item)
    for first, *further in groups.values():
        result = build_result_sentence(first, summary)
        if further:
            names = join_texts(list(dict.fromkeys(map(name_subject, further))))
            details = fill_sentence("{a} The conclusion is the same for {b}.", a=result.details, b=names)
            result = replace(result, details=details, verdicts=(first, *further))
        yield result


def iter_unproven_conclusions(summary: Summary) -> Iterator[Markup]:
    """Yield the conclusions that the audit does not allow, as clauses such as "that …"."""
    for performance in summary.predict.performance:
        verdict = next(
            (item for item in summary.verdicts if is_performance_verdict_of(item, performance.finding)), None
        )
        if verdict is None or verdict.conclusion != "supported":
            yield fill_sentence("that the model detects “{finding}”", finding=performance.finding)
    reliance = [item for item in summary.verdicts if contradicts_model(item) and item.question == "shortcut"]
    if reliance:
        largest = max(reliance, key=get_effect_size)
        yield fill_sentence(
            "that the performance holds where {item} is not related to “{finding}”",
            item=name_subject(largest),
            finding=largest.finding,
        )
    for column, finding in list_columns_that_determine_label(summary):
        yield fill_sentence(
            "that the model detects “{finding}” and not the column {column}", finding=finding, column=column
        )
    open_regions = [
        verdict
        for verdict in summary.verdicts
        if verdict.question == "shortcut" and verdict.conclusion == "not decided"
    ]
    if open_regions:
        items = join_texts(list(dict.fromkeys(map(name_subject, open_regions))), word="or")
        yield fill_sentence("that the prediction is independent of {items}", items=items)
    yield Markup("that no other cause, such as one that was not named or is not visible, plays a part")
    yield Markup("that the numbers hold for other images, other patients or other weights")
    yield Markup("that the model is safe or useful for patients: this is not a clinical validation")


def write_plain_text(markup: Markup) -> str:
    """Convert HTML to one line of plain text."""
    return sanitize_text(markup.striptags())
