"""What questions the model, as sentences: reliance on regions, chance performance, columns, and missing tests."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from markupsafe import Markup

from camscope.audit.core.stage_result_schema import FindingPerformance, StageResult
from camscope.audit.core.summary_schema import Summary, Verdict
from camscope.audit.report.data_and_method_sentences import fill_sentence, join_texts
from camscope.audit.report.open_questions import name_subject
from camscope.audit.report.verdict_and_auroc_sentences import (
    Concern,
    build_result_sentence,
    describe_interval_at_chance,
    explain_auroc,
    is_performance_verdict_of,
)
from camscope.audit.report.verdict_labels_and_groups import classify_verdict, format_sentence
from camscope.audit.shortcuts.region_attribution import find_overlapping_regions
from camscope.audit.verdicts.verdict_rules import find_topic
from camscope.plurals import inflect

MIN_LOG_ODDS_STD = 0.1  # with a smaller deviation, most probabilities differ by less than five percentage points
MARKED_CAUSES = ("shortcut", "masked organ")


def iter_concerns(summary: Summary) -> Iterator[Concern]:
    """Yield the results that call the model into question. The most serious comes first."""
    against = [item for item in summary.verdicts if contradicts_model(item)]
    causes = list(_iter_concerns_about_regions(against, summary))
    yield from causes[:1]
    yield from (build_result_sentence(item, summary) for item in against if item.question == "masked organ")
    yield from causes[1:]
    yield from _iter_concerns_about_determining_columns(summary)
    chance = {item.finding: item for item in summary.predict.performance if _reaches_chance(item)}
    for finding, performance in chance.items():
        sentence = fill_sentence("This audit does not show that the model detects “{finding}”.", finding=finding)
        position = describe_interval_at_chance(performance.auroc, summary.margins.get("useful_auroc"))
        details = fill_sentence("The interval of the AUROC {position}.", position=position)
        verdicts = tuple(item for item in summary.verdicts if is_performance_verdict_of(item, finding))
        tone = classify_verdict(verdicts[0]) if verdicts else "untested"
        yield Concern(sentence, details, "performance", tone, verdicts)
    yield from _iter_concerns_about_constant_output(summary)
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
    """Yield the regions on which a prediction relies, the largest effect first. Overlapping regions form one concern."""
    reliance = sorted((item for item in against if item.question == "shortcut"), key=get_effect_size, reverse=True)
    overlaps, stated = find_overlapping_regions(summary), set[int]()
    for verdict in reliance:
        if id(verdict) in stated:
            continue
        regions = next((group for group in overlaps.get(verdict.finding, []) if verdict.qualifier in group), [])
        overlapping = [
            item
            for item in reliance
            if item is not verdict and item.finding == verdict.finding and item.qualifier in regions
        ]
        stated |= {id(item) for item in overlapping}
        concern = build_result_sentence(verdict, summary)
        if overlapping:
            sentence = "{details} Regions that overlap it have an effect too, perhaps from the same cause: {names}."
            names = join_texts(list(map(name_subject, overlapping)))
            details = fill_sentence(sentence, details=concern.details, names=names)
            concern = replace(concern, details=details, verdicts=(verdict, *overlapping))
        yield concern


def _iter_concerns_about_missing_stages(summary: Summary) -> Iterator[Concern]:
    """Yield one concern that names all untested stages. Yield nothing if the model itself was not tested."""
    stages = {name: stage for name, stage in summary if isinstance(stage, StageResult) and not stage.tested}
    if not summary.predict.tested or not stages:
        return
    names = join_texts(list(stages))
    beginning = inflect(len(stages), "This stage was", "These stages were")
    sentence = fill_sentence(f"{beginning} not tested: {{names}}.", names=names)
    reasons = {stage.reason or "no reason was given" for stage in stages.values()}
    details = Markup("The reasons differ.")
    if len(reasons) == 1:
        details = fill_sentence("{reason}", reason=format_sentence(reasons.pop()))
    yield Concern(sentence, details, "missing", "untested")


def _reaches_chance(performance: FindingPerformance) -> bool:
    return performance.auroc.low is not None and performance.auroc.low <= 0.5


def contradicts_model(verdict: Verdict) -> bool:
    """Return whether a verdict contradicts the model. Verdicts against the maps do not count."""
    return classify_verdict(verdict) == "contradicts" and find_topic(verdict.question) == "model"


def get_effect_size(verdict: Verdict) -> float:
    """Return the absolute size of an effect. Return 0 for an effect without a value."""
    return abs(verdict.effect.value or 0.0)


def _iter_concerns_about_constant_output(summary: Summary) -> Iterator[Concern]:
    """Yield the findings for which the model's output hardly varies between images."""
    for performance in summary.predict.performance:
        if performance.log_odds_std < MIN_LOG_ODDS_STD:
            sentence = fill_sentence(
                "The model answers nearly the same for all images, with “{finding}” or without.",
                finding=performance.finding,
            )
            template = "The standard deviation of the log odds is {deviation}. Effects in SD look large next to it."
            yield Concern(
                sentence, fill_sentence(template, deviation=performance.log_odds_std), "performance", "neither"
            )


def _iter_concerns_about_open_performance(summary: Summary) -> Iterator[Concern]:
    """Yield a concern for each finding that is detected better than chance, but perhaps not well enough."""
    for performance in summary.predict.performance:
        verdict = next(
            (item for item in summary.verdicts if is_performance_verdict_of(item, performance.finding)), None
        )
        if verdict is None or verdict.conclusion != "not decided" or _reaches_chance(performance):
            continue
        sentence = fill_sentence(
            "It is not decided whether the model detects “{finding}” well enough.", finding=performance.finding
        )
        details = explain_auroc(performance, verdict, summary.margins.get("useful_auroc"))
        yield Concern(sentence, details, "performance", "untested")


def list_columns_that_determine_label(summary: Summary) -> list[tuple[str, str]]:
    """Return (column, finding) pairs. Within each level of the column, either all images have the finding or none has it."""
    determining = summary.check.determining_columns.items()
    return [(column, finding) for finding, n_images_by_column in determining for column in n_images_by_column]


def _iter_concerns_about_determining_columns(summary: Summary) -> Iterator[Concern]:
    """Yield the columns that alone determine the label."""
    n_rows = summary.check.flow[-1].n_rows if summary.check.flow else None
    for column, finding in list_columns_that_determine_label(summary):
        if summary.check.determining_columns[finding][column] == n_rows:
            template = "The column {column} alone determines the label “{finding}” in all {n_rows} images."
        else:
            template = "The column {column} alone determines the label “{finding}” wherever it has a value."
        sentence = fill_sentence(template, column=column, finding=finding, n_rows=n_rows or 0)
        details = Markup("The model may have learned the column instead of the finding; these data cannot tell.")
        yield Concern(sentence, details, "data", "contradicts")
