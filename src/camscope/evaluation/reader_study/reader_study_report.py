"""Describe a reader study in plain sentences and as a Markdown report."""

from collections.abc import Iterator
from math import isfinite

from camscope.batch.reader_study.study_design import CONTROL_MAP, CROSSED, WITH_MAP, WITHOUT_MAP
from camscope.evaluation.reader_study.reader_measures import MEASURES, ReaderMeasure
from camscope.evaluation.reader_study.reader_study_estimates import MeasureEstimate, ReaderStudyEstimates
from camscope.metrics.mean_estimates import Estimate
from camscope.plurals import plural

CONDITION_TITLES = {WITHOUT_MAP: "without map", WITH_MAP: "with map", CONTROL_MAP: "with control map"}
COMPARISON_TITLES = {
    (WITH_MAP, WITHOUT_MAP): "map vs. none",
    (WITH_MAP, CONTROL_MAP): "map vs. control",
    (CONTROL_MAP, WITHOUT_MAP): "control vs. none",
}
MEASURES_BY_NAME = {measure.name: measure for measure in MEASURES}
LIMITS = """\
## What this study cannot show

- The intervals hold for other readers and patients like those of the study. A few readers of one clinic do not represent all.
- An interval that contains 0 does not show that maps have no effect. It shows which effects are still possible.
- The readers knew that they were observed, and the share of positive cases may differ from that of daily work.
- A crossed study with a washout cannot exclude that readers remembered an image.
- p values are not corrected for the number of measures. The accuracy of `map vs. none` is the main comparison.
- Results hold for this method, layer, color map and model version only. The study does not validate the model for clinical use.
"""


def format_value(measure: ReaderMeasure, value: float, *, is_difference: bool = False) -> str:
    """Format a value: shares as percent or percentage points, AUROC with three digits, seconds, or a ratio of times."""
    if not isfinite(value):
        return "–"
    if measure.is_time:
        return f"× {value:.2f}" if is_difference else f"{value:.1f} s"
    if measure.is_auroc:
        return f"{value:+.3f}" if is_difference else f"{value:.3f}"
    return f"{100 * value:+.1f}" if is_difference else f"{100 * value:.1f} %"


def format_estimate(measure: ReaderMeasure, estimate: Estimate, *, is_difference: bool = False) -> str:
    """Format a value with its interval in brackets."""
    value = format_value(measure, estimate.mean, is_difference=is_difference)
    if not isfinite(estimate.low):
        return value
    ends = [
        format_value(measure, end, is_difference=is_difference).strip("× s%") for end in (estimate.low, estimate.high)
    ]
    return f"{value} [{', '.join(ends)}]"


def format_p(estimate: Estimate) -> str:
    """Format a p-value. Without one, return a dash."""
    if estimate.p_value is None:
        return "–"
    return "<0.001" if estimate.p_value < 0.0005 else f"{estimate.p_value:.3f}"


def excludes_no_difference(line: MeasureEstimate) -> bool:
    """Return whether the interval by reader and patient excludes "no difference"."""
    neutral, pooled = 1.0 if MEASURES_BY_NAME[line.measure].is_time else 0.0, line.estimates.pooled
    return isfinite(pooled.low) and (pooled.low > neutral or pooled.high < neutral)


def build_statements(result: ReaderStudyEstimates) -> list[str]:
    """Build sentences about accuracy, control maps, time, answers that follow the model, and agreement."""
    return [
        *_describe_accuracy(result),
        *_describe_control(result),
        *_describe_time(result),
        *_describe_automation_bias(result),
        *_describe_agreement(result),
    ]


def _describe_accuracy(result: ReaderStudyEstimates) -> Iterator[str]:
    measure, line = MEASURES_BY_NAME["accuracy"], result.find("accuracy", WITH_MAP, WITHOUT_MAP)
    levels = [result.find("accuracy", name) for name in (WITH_MAP, WITHOUT_MAP)]
    if line is None or levels[0] is None or levels[1] is None:
        return
    shares = [format_value(measure, level.estimates.pooled.mean) for level in levels if level is not None]
    pooled = line.estimates.pooled
    difference = format_estimate(measure, pooled, is_difference=True)
    counts = dict(pooled.n_groups_by_role)
    yield (
        f"{plural(counts['readers'], 'reader')} answered {shares[0]} of the cases correctly with maps, and {shares[1]} without. "
        f"The difference is {difference} percentage points (95 % interval by reader and by patient, "
        f"{plural(counts['patients'], 'patient')})."
    )
    if not isfinite(pooled.low):
        yield "There are too few readers or patients for an interval of this difference."
    elif not excludes_no_difference(line):
        yield "The interval contains 0: the study does not show whether maps change the accuracy."
    else:
        yield f"The interval excludes 0: with maps, readers are {'more' if pooled.mean > 0 else 'less'} accurate."


def _describe_control(result: ReaderStudyEstimates) -> Iterator[str]:
    line, gain = result.find("accuracy", WITH_MAP, CONTROL_MAP), result.find("accuracy", WITH_MAP, WITHOUT_MAP)
    if line is None or gain is None:
        return
    difference = format_estimate(MEASURES_BY_NAME["accuracy"], line.estimates.pooled, is_difference=True)
    yield f"Compared with control maps, the difference in accuracy is {difference} percentage points."
    if excludes_no_difference(gain) and not excludes_no_difference(line):
        yield "So the study does not show that the difference comes from what the maps mark, rather than from any overlay."


def _describe_time(result: ReaderStudyEstimates) -> Iterator[str]:
    line = result.find("seconds", WITH_MAP, WITHOUT_MAP)
    if line is None:
        return
    medians = [result.median_seconds[name] for name in (WITH_MAP, WITHOUT_MAP)]
    ratio = format_estimate(MEASURES_BY_NAME["seconds"], line.estimates.pooled, is_difference=True)
    yield (
        f"A reading takes {medians[0]:.1f} s with maps and {medians[1]:.1f} s without (medians). The ratio of the geometric "
        f"means is {ratio.removeprefix('× ')}."
    )


def _describe_automation_bias(result: ReaderStudyEstimates) -> Iterator[str]:
    line = result.find("follows-wrong-model", WITH_MAP, WITHOUT_MAP)
    if line is None:
        return
    measure, pooled = MEASURES_BY_NAME["follows-wrong-model"], line.estimates.pooled
    difference = format_estimate(measure, pooled, is_difference=True)
    n_patients = dict(pooled.n_groups_by_role)["patients"]
    yield (
        f"Where the model is wrong ({plural(n_patients, 'patient')}), the share of answers that equal the model's answer "
        f"changes by {difference} percentage points with maps."
    )
    change = next(
        (change for change in result.changes if (change.before, change.after) == (WITHOUT_MAP, WITH_MAP)), None
    )
    if change is not None:
        yield (
            f"In {change.n_to_wrong_model} of {plural(change.n_wrong_model, 'such reading')}, a reader was right without the "
            "map and gave the model's wrong answer with it (automation bias)."
        )


def _describe_agreement(result: ReaderStudyEstimates) -> Iterator[str]:
    texts = [
        f"{estimate} {CONDITION_TITLES[condition]}"
        for condition, estimate in result.agreement_between_readers.items()
        if condition in (WITHOUT_MAP, WITH_MAP)
    ]
    if texts:
        yield f"Agreement between readers (Krippendorff's alpha) is {' and '.join(texts)}."


def format_report(result: ReaderStudyEstimates) -> str:
    """Format the result as a Markdown report."""
    study, conditions = result.study, result.conditions
    n_sessions = len(conditions) if study["design"] == CROSSED else 1
    sections = [
        "# Reader study",
        "\n".join(f"- {sentence}" for sentence in build_statements(result)),
        "![Accuracy and time of the readers](figure.svg)",
        "## Design",
        "\n".join(
            [
                f"- Readers: {len(result.readers)} of {study['n_readers']}",
                f"- Cases: {study['n_cases']} of {plural(study['n_patients'], 'patient')}",
                f"- Design: {study['design']}, {plural(n_sessions, 'session')} per reader",
                f"- Conditions: {', '.join(CONDITION_TITLES[name] for name in conditions)} (controls: {study['controls']})",
                f"- Maps: {study['method']}" + (f" of {study['layer']}" if study["layer"] else ""),
                f"- Answers: {', '.join(study['answers'])}; positive: {study['positive_answer'] or 'none'}",
                f"- Readings: {len(result.readings)}, {result.readings.n_missing} missing",
                f"- Seed: {study['seed']}; run: {study['run']}; model: {study['model']}",
            ]
        ),
        "## All readers",
        "Means over readers, with 95 % intervals by reader and by patient. Differences of shares are in percentage points, "
        "those of times are ratios.",
        _format_table(build_level_rows(result)),
        _format_table(build_difference_rows(result)),
        "## Each reader",
        "Accuracy of each reader, with 95 % intervals by patient.",
        _format_table(build_reader_rows(result)),
        "## Agreement",
        _format_agreement(result),
        "## Changed answers",
        _format_changes(result),
        LIMITS.rstrip(),
    ]
    return "\n\n".join(sections) + "\n"


def build_level_rows(result: ReaderStudyEstimates) -> list[list[str]]:
    """Build a table of all measures under each condition: means over readers. The first row has the headings."""
    rows = [["measure", *(CONDITION_TITLES[name] for name in result.conditions)]]
    for measure in MEASURES:
        lines = [line for name in result.conditions if (line := result.find(measure.name, name)) is not None]
        if lines:
            rows.append([measure.title, *(format_estimate(measure, line.estimates.pooled) for line in lines)])
    return rows


def build_difference_rows(result: ReaderStudyEstimates) -> list[list[str]]:
    """Build a table of the differences of all measures: means over readers. The first row has the headings."""
    pairs = [pair for pair in COMPARISON_TITLES if set(pair) <= set(result.conditions)]
    rows = [["measure", *(cell for pair in pairs for cell in (COMPARISON_TITLES[pair], "p"))]]
    for measure in MEASURES:
        lines = [line for pair in pairs if (line := result.find(measure.name, *pair)) is not None]
        cells = [
            cell
            for line in lines
            for cell in (
                format_estimate(measure, line.estimates.pooled, is_difference=True),
                format_p(line.estimates.pooled),
            )
        ]
        rows += [[measure.title, *cells]] if cells else []
    return rows


def build_reader_rows(result: ReaderStudyEstimates) -> list[list[str]]:
    """Build a table with the accuracy of each reader. The first row has the headings."""
    measure, conditions = MEASURES_BY_NAME["accuracy"], result.conditions
    levels = [line for name in conditions if (line := result.find("accuracy", name)) is not None]
    line = result.find("accuracy", WITH_MAP, WITHOUT_MAP)
    if line is None:
        return [["reader"]]
    head = ["reader", *(CONDITION_TITLES[level.condition] for level in levels), "map vs. none", "p"]
    rows = []
    for index, reader in enumerate(line.readers):
        difference = line.estimates.by_reader[index]
        cells = [format_estimate(measure, level.estimates.by_reader[index]) for level in levels]
        rows.append(
            [str(reader), *cells, format_estimate(measure, difference, is_difference=True), format_p(difference)]
        )
    return [head, *rows]


def _format_agreement(result: ReaderStudyEstimates) -> str:
    rows = [
        ["between readers", "Krippendorff's alpha", CONDITION_TITLES[condition], str(estimate)]
        for condition, estimate in result.agreement_between_readers.items()
    ] + [
        ["within readers", "Cohen's kappa, mean", " and ".join(CONDITION_TITLES[name] for name in pair), str(estimate)]
        for pair, estimate in result.agreement_within_readers.items()
    ]
    return (
        _format_table([["agreement", "statistic", "conditions", "value"], *rows])
        if rows
        else "No agreement is defined."
    )


def _format_changes(result: ReaderStudyEstimates) -> str:
    head = ["change", "pairs", "changed", "to right", "to wrong", "right to the model's wrong answer", "model wrong"]
    rows = [
        [
            f"{CONDITION_TITLES[change.before]} to {CONDITION_TITLES[change.after]}",
            *(str(count) for name, count in vars(change).items() if name.startswith("n_")),
        ]
        for change in result.changes
    ]
    return _format_table([head, *rows]) if rows else "No reader saw a case under two conditions."


def _format_table(rows: list[list[str]]) -> str:
    """Format rows as a Markdown table. The first row has the headings."""
    lines = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
