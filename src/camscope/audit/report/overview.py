"""The first screen of a report: what was audited, the main results, the biggest concern, and what stays open.

All sentences are HTML whose numbers are those of the summary. The one-page summary and the model card use the same sentences.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from markupsafe import Markup

from camscope.audit.core.stage_result_schema import EstimateSummary, FindingPerformance, LevelCount, StageResult
from camscope.audit.core.summary_schema import Summary, Verdict
from camscope.audit.report.number_format import format_estimate, format_item_count, format_number
from camscope.audit.report.open_questions import MAX_ITEMS_NAMED, OpenQuestion, iter_open_questions, name_subject
from camscope.audit.report.sentences import count_in_words, fill_sentence, join_texts
from camscope.audit.report.verdict_labels_and_groups import (
    VerdictKind,
    classify_verdict,
    describe_sample,
    format_sentence,
    sanitize_text,
)
from camscope.audit.shortcuts.region_attribution import find_overlapping_regions
from camscope.audit.verdicts import NO_PERFORMANCE_REASON
from camscope.audit.verdicts.patients_needed import TWO_SIDED_QUESTIONS
from camscope.audit.verdicts.verdict_rules import QUESTIONS, find_topic
from camscope.plurals import inflect

MAX_CLASSES_NAMED = 6
MAX_RESULTS_SHOWN = 4
MAX_OPEN_QUESTIONS_SHOWN = 5  # the section on missing tests lists all
MAX_OTHER_CONCERNS = 2

QUESTIONS_WITHOUT_MARGIN = ("faithfulness", "sanity", "clusters")  # their rules compare with controls
MARKED_CAUSES = ("shortcut", "masked organ")
MISSABLE_SHARE = "could have been missed"  # of the clause about the smallest share of patients that a test can detect


@dataclass(frozen=True)
class PerformanceAnswer:
    """The AUROC of a finding, the number of images, and what follows from the interval."""

    finding: str
    estimate: Markup
    sample: Markup
    sentence: Markup
    tone: VerdictKind


@dataclass(frozen=True)
class Concern:
    """A result, or what questions the model, with the section of the report that holds the numbers.

    `verdicts`: the verdicts that it states.
    """

    sentence: Markup
    details: Markup
    section: str
    tone: VerdictKind
    verdicts: tuple[Verdict, ...] = ()


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
    sample_note: Markup
    open_questions: list[OpenQuestion]
    unproven: list[Markup]


def build_overview(summary: Summary) -> Overview:
    """Return the content of the first screen."""
    concerns = list(iter_concerns(summary))
    results = list(_iter_results(summary, [verdict for concern in concerns for verdict in concern.verdicts]))
    shown = results[:MAX_RESULTS_SHOWN]
    more_concerns = concerns[1 + MAX_OTHER_CONCERNS :]
    return Overview(
        model=describe_model(summary),
        data=describe_data(summary),
        patients=describe_patients(summary),
        answers=[build_performance_answer(performance, summary) for performance in summary.predict.performance],
        chance=_describe_chance(summary),
        concern=concerns[0] if concerns else _describe_missing_concern(summary),
        other_concerns=concerns[1 : 1 + MAX_OTHER_CONCERNS],
        more_concerns=_count_more_concerns(len(more_concerns)),
        results=shown,
        all_verdicts=_count_verdicts(summary, [*concerns, *shown]),
        sample_note=_explain_sample_sizes(shown, summary),
        open_questions=list(iter_open_questions(summary)),
        unproven=list(iter_unproven_conclusions(summary)),
    )


def describe_model(summary: Summary) -> Markup:
    """Describe the model: its name and its classes."""
    resolve = summary.resolve
    if not resolve.model:
        return Markup("no model was loaded")
    names = resolve.class_names
    if not names:
        return fill_sentence("{model}", model=resolve.model)
    if len(names) > MAX_CLASSES_NAMED:
        return fill_sentence("{model}, with {n} classes", model=resolve.model, n=resolve.n_classes)
    sentence = "{model}. It distinguishes the classes {names}"
    return fill_sentence(sentence, model=resolve.model, names=join_texts(names))


def describe_data(summary: Summary) -> Markup:
    """Describe the images: their kind, and how many of them have each finding."""
    parts = [fill_sentence("{kind}", kind=summary.data_description)] if summary.data_description else []
    parts += [
        fill_sentence("{n} with {finding}, {m} without", n=item.n_positives, m=item.n_negatives, finding=item.finding)
        for item in summary.predict.performance
    ]
    return Markup("; ").join(parts) or Markup("not described")


def describe_patients(summary: Summary) -> Markup:
    """Return the number of patients, or that it is not known."""
    if not summary.check.tested:
        return Markup("unknown")
    return format_number(summary.check.n_patients) if summary.check.has_patient_column else Markup("not identified")


def _describe_chance(summary: Summary) -> Markup:
    """Return which AUROC is chance, as a sentence. "" without an AUROC."""
    baseline = next((item.auroc.baseline for item in summary.predict.performance), None)
    return Markup("") if baseline is None else fill_sentence("{baseline} is chance.", baseline=baseline)


def _count_more_concerns(count: int) -> Markup:
    return Markup("and {} more {}").format(count_in_words(count), inflect(count, "concern")) if count else Markup("")


def _count_verdicts(summary: Summary, stated: Sequence[Concern]) -> Markup:
    """Say how many verdicts there are, and how many of those not stated contradict the model or the maps."""
    if not summary.verdicts:
        return Markup("")
    data = {"verdicts": [vars(verdict) for verdict in summary.verdicts]}
    text = fill_sentence(
        f"All {{count}} {inflect(len(summary.verdicts), 'verdict')}", count=format_item_count(data, "verdicts")
    )
    known = {id(verdict) for item in stated for verdict in item.verdicts}
    against = [item for item in summary.verdicts if classify_verdict(item) == "contradicts" and id(item) not in known]
    for topic in ("model", "maps"):
        if count := sum(find_topic(item.question) == topic for item in against):
            text += Markup(", {} more against the {}").format(count_in_words(count), topic)
    return text


def _explain_sample_sizes(results: Sequence[Concern], summary: Summary) -> Markup:
    """Explain why results have different numbers of images. "" if they have the same."""
    if len({verdict.effect.n_values for result in results for verdict in result.verdicts}) < 2:
        return Markup("")
    stages = (summary.faithfulness, summary.robustness)
    stops = any(look.reason != "complete" for stage in stages for look in stage.stopping_looks)
    ending = ", and some tests stop once their verdict is reached or out of reach" if stops else ""
    return fill_sentence(
        f"The numbers of images differ: some tests need images with the finding or with a mask, some draw a sample{ending}."
    )


def build_performance_answer(performance: FindingPerformance, summary: Summary) -> PerformanceAnswer:
    """Say what the AUROC of a finding shows."""
    verdict = next((item for item in summary.verdicts if _is_performance_verdict_of(item, performance.finding)), None)
    tone: VerdictKind = classify_verdict(verdict) if verdict else "untested"
    return PerformanceAnswer(
        performance.finding,
        format_estimate(performance.auroc),
        describe_sample(performance.auroc, has_patients=summary.check.has_patient_column),
        _explain_auroc(performance, verdict, summary.margins.get("useful_auroc")),
        tone,
    )


def _is_performance_verdict_of(verdict: Verdict, finding: str) -> bool:
    return (verdict.question, verdict.finding) == ("performance", finding)


def _explain_auroc(performance: FindingPerformance, verdict: Verdict | None, margin: float | None) -> Markup:
    """Return in one sentence what follows from an AUROC and its interval."""
    auroc, finding = performance.auroc, performance.finding
    if auroc.value is None:
        return fill_sentence("There is no AUROC: {reason}.", reason=auroc.reason or "nothing was tested")
    if auroc.low is None or auroc.high is None:
        reason = (verdict.reason if verdict else "") or auroc.reason or "there is no interval"
        return fill_sentence("It decides nothing: {reason}.", reason=reason)
    if auroc.high < 0.5:
        sentence = "The ranking is inverted: images without {finding} score higher than images with it."
    elif auroc.low <= 0.5:
        sentence = "It is not shown that the model detects {finding}: the interval {position}."
    elif margin is None or verdict is None:
        sentence = "The whole interval lies above chance."
    elif verdict.conclusion == "supported":
        sentence = "The whole interval lies above {margin}, the AUROC that was required before the audit."
    elif verdict.conclusion == "not supported":
        sentence = "The whole interval lies below {margin}, the AUROC that was required before the audit."
    elif auroc.low <= margin <= auroc.high:
        sentence = "It is better than chance. The interval includes {margin}, the AUROC that was required before the audit."
    else:
        sentence = "It decides nothing: {reason}."
    reason, position = verdict.reason if verdict else "", _describe_interval_at_chance(auroc, margin)
    numbers = {"margin": 0.0 if margin is None else margin}
    return fill_sentence(sentence, finding=finding, reason=reason, position=position, **numbers)


def _describe_interval_at_chance(auroc: EstimateSummary, margin: float | None) -> Markup:
    """Say how an interval that reaches chance lies to chance and to the margin."""
    chance = Markup("chance")
    if auroc.baseline is not None:
        chance = fill_sentence("chance ({baseline})", baseline=auroc.baseline)
    high = auroc.high or 0.0
    if high < 0.5:
        return fill_sentence("lies below {chance}", chance=chance)
    if margin is None:
        return fill_sentence("includes {chance}", chance=chance)
    template = "includes {chance} and the required {margin}"
    if high < margin:
        template = "includes {chance} and lies below the required {margin}"
    return fill_sentence(template, chance=chance, margin=margin)


def iter_concerns(summary: Summary) -> Iterator[Concern]:
    """Yield what questions the model, the most serious first."""
    against = [item for item in summary.verdicts if _contradicts_model(item)]
    causes = list(_iter_concerns_about_regions(against, summary))
    yield from causes[:1]
    yield from (build_result_sentence(item, summary) for item in against if item.question == "masked organ")
    yield from causes[1:]
    yield from _iter_concerns_about_determining_columns(summary)
    chance = {item.finding: item for item in summary.predict.performance if _reaches_chance(item)}
    for finding, performance in chance.items():
        sentence = fill_sentence("This audit does not show that the model detects {finding}.", finding=finding)
        position = _describe_interval_at_chance(performance.auroc, summary.margins.get("useful_auroc"))
        details = fill_sentence("The interval of the AUROC {position}.", position=position)
        verdicts = tuple(item for item in summary.verdicts if _is_performance_verdict_of(item, finding))
        tone = classify_verdict(verdicts[0]) if verdicts else "untested"
        yield Concern(sentence, details, "performance", tone, verdicts)
    other = [item for item in against if item.question not in MARKED_CAUSES]
    yield from (
        build_result_sentence(item, summary)
        for item in other
        if item.question != "performance" or item.finding not in chance
    )
    yield from _iter_concerns_about_open_performance(summary)
    for item in summary.verdicts:
        if (item.question, item.conclusion) == ("leakage", "supported"):
            yield build_result_sentence(item, summary)
    if summary.check.tested and not summary.check.has_patient_column:
        sentence = Markup("The data do not say which images show the same patient.")
        details = Markup("Each image counts as one patient, so that the intervals may be too narrow.")
        yield Concern(sentence, details, "data", "neither")
    yield from _iter_concerns_about_missing_stages(summary)


def _iter_concerns_about_regions(against: Sequence[Verdict], summary: Summary) -> Iterator[Concern]:
    """Yield the regions that a prediction relies on, the largest effect first. Overlapping regions are one concern."""
    reliance = sorted((item for item in against if item.question == "shortcut"), key=_get_effect_size, reverse=True)
    overlaps, stated = find_overlapping_regions(summary), set[int]()
    for verdict in reliance:
        if id(verdict) in stated:
            continue
        regions = next((group for group in overlaps.get(verdict.finding, []) if verdict.qualifier in group), [])
        others = [
            item
            for item in reliance
            if item is not verdict and item.finding == verdict.finding and item.qualifier in regions
        ]
        stated |= {id(item) for item in others}
        concern = build_result_sentence(verdict, summary)
        if others:
            sentence = "{details} Regions that overlap it have an effect too, perhaps from the same cause: {names}."
            names = join_texts(list(map(name_subject, others)))
            details = fill_sentence(sentence, details=concern.details, names=names)
            concern = replace(concern, details=details, verdicts=(verdict, *others))
        yield concern


def _iter_concerns_about_missing_stages(summary: Summary) -> Iterator[Concern]:
    """Yield one concern about all stages that were not tested, if the model was tested at all."""
    stages = {name: stage for name, stage in summary if isinstance(stage, StageResult) and not stage.tested}
    if not summary.predict.tested or not stages:
        return
    names = join_texts(list(stages))
    subject = inflect(len(stages), "This stage was", "These stages were")
    sentence = fill_sentence(f"{subject} not tested: {{names}}.", names=names)
    reasons = {stage.reason or "no reason was given" for stage in stages.values()}
    details = Markup("The reasons differ.")
    if len(reasons) == 1:
        details = fill_sentence("{reason}", reason=format_sentence(reasons.pop()))
    yield Concern(sentence, details, "missing", "untested")


def _reaches_chance(performance: FindingPerformance) -> bool:
    return performance.auroc.low is not None and performance.auroc.low <= 0.5


def _contradicts_model(verdict: Verdict) -> bool:
    return classify_verdict(verdict) == "contradicts" and find_topic(verdict.question) == "model"


def _get_effect_size(verdict: Verdict) -> float:
    return abs(verdict.effect.value or 0.0)


def _iter_concerns_about_open_performance(summary: Summary) -> Iterator[Concern]:
    """Yield the findings that the model detects better than chance, but perhaps not well enough."""
    for performance in summary.predict.performance:
        verdict = next(
            (item for item in summary.verdicts if _is_performance_verdict_of(item, performance.finding)), None
        )
        if verdict is None or verdict.conclusion != "not testable" or _reaches_chance(performance):
            continue
        sentence = fill_sentence(
            "It is not decided whether the model detects {finding} well enough.", finding=performance.finding
        )
        details = _explain_auroc(performance, verdict, summary.margins.get("useful_auroc"))
        yield Concern(sentence, details, "performance", "neither")


def _list_columns_that_determine_label(summary: Summary) -> list[tuple[str, str]]:
    """Return the columns and findings for which each level has only images with the finding, or only images without it."""
    columns = dict.fromkeys(level.column for level in summary.check.level_counts)
    return [
        (column, finding)
        for finding in summary.resolve.findings
        for column in columns
        if _determines_label([level for level in summary.check.level_counts if level.column == column], finding)
    ]


def _iter_concerns_about_determining_columns(summary: Summary) -> Iterator[Concern]:
    """Yield the columns from whose value the label follows."""
    n_rows = summary.check.flow[-1].n_rows if summary.check.flow else None
    for column, finding in _list_columns_that_determine_label(summary):
        if sum(level.n_rows for level in summary.check.level_counts if level.column == column) == n_rows:
            template = "The column {column} alone determines the label {finding} in all {n_rows} images."
        else:
            template = "The column {column} alone determines the label {finding} wherever it has a value."
        sentence = fill_sentence(template, column=column, finding=finding, n_rows=n_rows or 0)
        details = Markup("The model may have learned the column instead of the finding; these data cannot tell.")
        yield Concern(sentence, details, "data", "contradicts")


def _determines_label(levels: Sequence[LevelCount], finding: str) -> bool:
    """Return whether no level of a column has both images with a finding and images without it."""
    counts = [(level.positives_by_finding.get(finding), level.n_rows) for level in levels]
    if len(counts) < 2 or any(n_positives not in (0, n_rows) for n_positives, n_rows in counts):
        return False
    return len({n_positives == 0 for n_positives, _ in counts}) == 2


def _describe_missing_concern(summary: Summary) -> Concern:
    """Describe what follows if no result questions the model."""
    decided = [item for item in summary.verdicts if item.conclusion != "not testable"]
    if not any(find_topic(item.question) == "model" for item in decided):
        sentence = Markup("No question about the model could be decided.")
        return Concern(sentence, Markup("This is not evidence in favor of the model."), "missing", "untested")
    sentence = Markup("No tested question contradicts the model.")
    details = Markup("Causes that were not tested, or not named, remain possible.")
    return Concern(sentence, details, "missing", "neither")


def build_result_sentence(verdict: Verdict, summary: Summary) -> Concern:
    """Return the conclusion of a verdict as a sentence, and its effect, sample and margin."""
    answer = verdict.answer or verdict.claim
    if not verdict.answer and verdict.conclusion == "not supported":
        answer = f"Not supported: {verdict.claim}"
    return Concern(
        fill_sentence("{answer}", answer=answer),
        describe_effect(verdict, has_patients=summary.check.has_patient_column),
        verdict.section,
        classify_verdict(verdict),
        (verdict,),
    )


def describe_effect(verdict: Verdict, *, has_patients: bool) -> Markup:
    """Describe the effect of a verdict: its quantity, value, interval, sample and margin."""
    if verdict.effect.value is None:
        return fill_sentence("{reason}.", reason=verdict.reason or "Nothing was measured")
    quantity = QUESTIONS[verdict.question].effect_quantity if verdict.question in QUESTIONS else "effect"
    margin = Markup("; ") + reason if (reason := explain_conclusion(verdict)) else Markup("")
    roles = tuple((role, count) for role, count in verdict.effect.n_groups_by_role if role != "controls")
    if roles:
        counts = [fill_sentence(f"{{n}} {inflect(n, role.removesuffix('s'))}", n=n) for role, n in roles]
        sample = Markup(", ").join(counts)
    else:
        sample = describe_sample(verdict.effect, has_patients=has_patients)
    return fill_sentence(
        "{quantity}: {effect}, {sample}{margin}.",
        quantity=f"{quantity[:1].upper()}{quantity[1:]}",
        effect=verdict.effect,
        sample=sample,
        margin=margin,
    )


def explain_conclusion(verdict: Verdict) -> Markup:
    """Explain in a clause how the interval lies to the margin. Without an interval, name the margin, if there is one."""
    margin, low, high = verdict.margin, verdict.effect.low, verdict.effect.high
    if verdict.conclusion != "not testable" and _is_decided_without_margin(verdict):
        return fill_sentence("{reason}", reason=verdict.reason.partition("; ")[0])
    if margin is None or low is None or high is None:
        return Markup("") if margin is None else fill_sentence("the margin is {margin}", margin=margin)
    is_two_sided = verdict.question in TWO_SIDED_QUESTIONS
    if low > margin:
        clause = "the whole interval lies above the margin of {margin}"
    elif is_two_sided and high < -margin:
        clause = "the whole interval lies below the margin of {opposite}"
    elif is_two_sided and -margin <= low and high <= margin:
        clause = "the whole interval lies within the margin of ±{margin}"
    elif high < margin and not is_two_sided:
        clause = "the whole interval lies below the margin of {margin}"
    else:
        clause = "the interval includes the margin of {margin}"
    is_consistent = is_two_sided or (low > margin) == (verdict.conclusion == "supported")
    if verdict.conclusion != "not testable" and not is_consistent:  # another part of the rule decided
        return fill_sentence("{reason}", reason=verdict.reason.partition("; ")[0])
    opposite = Markup("−") + format_number(margin)
    if verdict.direction == "neither" and NO_PERFORMANCE_REASON in verdict.reason:
        clause += f". {NO_PERFORMANCE_REASON[:1].upper()}{NO_PERFORMANCE_REASON[1:]}"
    power = next((part for part in verdict.reason.split("; ") if MISSABLE_SHARE in part), "")
    if verdict.conclusion == "not supported" and power:
        clause += "; {power}"
    return fill_sentence(clause, margin=margin, opposite=opposite, power=power)


def _is_decided_without_margin(verdict: Verdict) -> bool:
    is_decodable = (verdict.question, verdict.conclusion) == ("leakage", "supported")
    return bool(verdict.reason) and (is_decodable or verdict.question in QUESTIONS_WITHOUT_MARGIN)


def _iter_results(summary: Summary, stated: Sequence[Verdict] = ()) -> Iterator[Concern]:
    """Yield the decided verdicts on the model, then on the maps, then on the data. In each group, contradictions come first.

    `stated`: the verdicts that are stated elsewhere.
    """
    known = {id(verdict) for verdict in stated}
    ranks, topics = {"contradicts": 0, "supports": 1, "neither": 2}, ("model", "maps", "data")
    decided = [item for item in summary.verdicts if item.conclusion != "not testable"]
    groups: dict[tuple[str, ...], list[Verdict]] = {}
    for item in sorted(decided, key=lambda item: (topics.index(find_topic(item.question)), ranks[item.direction])):
        if item.question not in ("performance", "attribution mass") and id(item) not in known:
            key = (item.question, item.finding, item.conclusion)
            groups.setdefault(key if item.question != "robustness" else (*key, item.claim), []).append(item)
    for first, *further in groups.values():
        result = build_result_sentence(first, summary)
        if further:
            names = join_texts(list(dict.fromkeys(map(name_subject, further))))
            details = fill_sentence("{a} The same holds for {b}.", a=result.details, b=names)
            result = replace(result, details=details, verdicts=(first, *further))
        yield result


def iter_unproven_conclusions(summary: Summary) -> Iterator[Markup]:
    """Yield what may not be concluded from the audit, each as a clause that begins with "that"."""
    for performance in summary.predict.performance:
        verdict = next(
            (item for item in summary.verdicts if _is_performance_verdict_of(item, performance.finding)), None
        )
        if verdict is None or verdict.conclusion != "supported":
            yield fill_sentence("that the model detects {finding}", finding=performance.finding)
    reliance = [item for item in summary.verdicts if _contradicts_model(item) and item.question == "shortcut"]
    if reliance:
        largest = max(reliance, key=_get_effect_size)
        yield fill_sentence(
            "that the performance holds where {item} is not related to {finding}",
            item=name_subject(largest),
            finding=largest.finding,
        )
    for column, finding in _list_columns_that_determine_label(summary):
        yield fill_sentence(
            "that the model detects {finding} and not the column {column}", finding=finding, column=column
        )
    open_regions = [
        verdict
        for verdict in summary.verdicts
        if verdict.question == "shortcut" and verdict.conclusion == "not testable"
    ]
    if open_regions:
        items = join_texts(list(dict.fromkeys(map(name_subject, open_regions))), MAX_ITEMS_NAMED, word="or")
        yield fill_sentence("that the prediction is independent of {items}", items=items)
    yield Markup("that no other cause, such as one that nobody named or that is invisible, plays a part")
    yield Markup("that the numbers hold for other images, other patients or other weights")
    yield Markup("that the model is safe or useful for patients: this is not a clinical validation")


def write_plain_text(markup: Markup) -> str:
    """Return HTML as one line of plain text."""
    return sanitize_text(markup.striptags())
