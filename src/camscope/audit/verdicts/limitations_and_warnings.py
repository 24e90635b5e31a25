"""Limitations and warnings of a report. No option switches them off."""

from collections.abc import Iterator

from camscope.audit.core.subgroup_levels import MIN_PATIENTS_FOR_INTERVAL, MIN_PATIENTS_FOR_VERDICT
from camscope.audit.core.summary_schema import Summary
from camscope.audit.shortcuts.region_attribution import find_overlapping_regions
from camscope.audit.shortcuts.region_names import name_region
from camscope.explanation import STATUS_MEANINGS
from camscope.plurals import plural
from camscope.registry import METHODS

GENERAL_LIMITATIONS = (
    "Attribution shows what the prediction is sensitive to. It shows neither disease nor cause.",
    "A map that highlights a finding does not prove that the model uses it. A map that misses it does not prove a shortcut.",
    "The location of a finding is what annotators marked. Where readers looked was not recorded.",
    "Confounders that were not named, or that are not visible, are not excluded.",
    "A region that a map does not show may still decide the prediction. Only interventions test this.",
    "Images with replaced or inserted pixels differ from the training images. Every imputation is named.",
    "Randomization tests find maps that do not depend on the trained weights. They do not rank methods.",
    "The margins were chosen by the person who ran the audit. The config digest was recorded before the first prediction.",
    "The numbers apply to these data and these weights only.",
    "This is not a clinical validation. It supports documentation and does not confer compliance.",
)
REPORTED_SEVERITIES = ("error", "warning")
COPIES = ("duplicates", "duplicates-with-different-targets")  # codes of issues
STOP_REASONS = {
    "decided": "the verdict was reached",
    "undecidable": "the other images would hardly have decided it",
}
FEW_PATIENTS = 30  # fewer patients are worth a warning


def list_limitations(summary: Summary) -> Iterator[str]:
    """Yield the general limitations, and the limits that each method's map resolution sets."""
    yield from GENERAL_LIMITATIONS
    for explainer in summary.resolve.explainers:
        side = max(explainer.stride, default=1.0)
        if side > 1:
            place = f", {explainer.stride_mm:.3g} mm on the image" if explainer.stride_mm is not None else ""
            cell = f"{side:.3g} pixels of the model's input wide{place}"
            title = METHODS.replace_names_by_titles(explainer.title)
            yield f"A cell of the maps of {title} is {cell}: smaller structures are not resolved."
    yield from _list_savings(summary)


def _list_savings(summary: Summary) -> Iterator[str]:
    """Yield what stages left out to save time: images after an interim look, integration steps, and images beyond the budget."""
    for planned in summary.planned_sizes:
        if planned.n_images:
            effect = (
                ""
                if planned.min_effect is None
                else (
                    f": a distance of less than {planned.min_effect:.2f} standard deviations from a margin is not decided"
                )
            )
            yield (
                f"The budget of time limits {planned.stage} to {planned.n_images} of "
                f"{plural(planned.configured_n_images, 'image')}{effect}."
            )
    for name in ("faithfulness", "robustness"):
        for look in getattr(summary, name).stopping_looks:
            if look.reason != "complete":
                yield (
                    f"{name.capitalize()} of {METHODS.replace_names_by_titles(look.method)} for {look.finding} "
                    "stopped at interim look "
                    f"{look.look} of {look.n_looks}, after {look.n_images} of {plural(look.max_images, 'image')}: "
                    f"{STOP_REASONS[look.reason]}."
                )
    for name in ("sanity", "robustness"):
        for steps in getattr(summary, name).path_steps:
            yield (
                f"{name.capitalize()} computes maps of {METHODS.replace_names_by_titles(steps.method)} with {steps.n_steps} of "
                f"{plural(steps.configured_n_steps, 'step')}. Their ranks correlate by {steps.rank_correlation:.3f} with those "
                f"of the reported maps ({plural(steps.n_images, 'image')})."
            )


def list_warnings(summary: Summary) -> Iterator[str]:
    """Yield warnings about the data, the model and the maps."""
    if summary.check.tested:
        yield from _list_patient_warnings(summary)
    if summary.predict.outputs_are_probabilities:
        yield (
            "The model returns probabilities. Log odds were computed from them and are limited where a probability rounds "
            "to 0 or 1."
        )
    if failed := sum(step.n_rows for step in summary.explain.failures):
        yield f"{plural(failed, 'image lacks', 'images lack')} the map of at least one method: see failures.csv."
    for finding, groups in find_overlapping_regions(summary).items():
        for group in groups:
            yield (
                f"Regions that the prediction for “{finding}” relies on overlap ({', '.join(map(name_region, group))}): "
                "one cause may be counted several times."
            )
    for severity in REPORTED_SEVERITIES:
        for issue in summary.check.issues:
            if issue.severity == severity:
                effect = (
                    " Copies count several times, so that intervals are too narrow." if issue.code in COPIES else ""
                )
                yield f"{plural(issue.count, 'image')}: {issue.message}.{effect}"
    for name in ("localization", "faithfulness", "sanity", "robustness", "shortcut"):
        stage = getattr(summary, name)
        if not stage.tested:
            yield f"{name.capitalize()} was not tested: {stage.reason or 'no reason was given'}."
    yield from _list_map_warnings(summary)


def _list_patient_warnings(summary: Summary) -> Iterator[str]:
    """Yield warnings about unknown patients and about too few patients."""
    if not summary.check.has_patient_column:
        yield "The data do not say which images show the same patient: each image counts as one patient."
    n_patients = summary.check.n_patients
    if n_patients < FEW_PATIENTS:
        noun, verb = "patient" if summary.check.has_patient_column else "image", "is" if n_patients == 1 else "are"
        width = "intervals are wide" if n_patients >= MIN_PATIENTS_FOR_INTERVAL else "there are no intervals"
        open_questions = n_patients >= MIN_PATIENTS_FOR_VERDICT
        answers = "and some questions may not be decided" if open_questions else "and no verdict is given"
        yield f"There {verb} only {plural(n_patients, noun)}: {width}, {answers}."


def _list_map_warnings(summary: Summary) -> Iterator[str]:
    """Yield warnings about methods of which many maps have a flag or an unverified layout."""
    for maps in summary.explain.map_counts:
        flagged = {key: count for key, count in maps.status_counts.items() if key not in ("ok", "layout_unverified")}
        if sum(flagged.values()) > maps.n_maps / 10:
            kinds = ", ".join(f"{status.replace('_', ' ')}: {count}" for status, count in flagged.items())
            share = f"{sum(flagged.values())} of {plural(maps.n_maps, 'map')}"
            yield f"Maps of {METHODS.replace_names_by_titles(maps.method)} for {maps.finding} with a flag: {share} ({kinds})."
        if unverified := maps.status_counts.get("layout_unverified", 0):
            share = f"{unverified} of {plural(maps.n_maps, 'map')}"
            title = METHODS.replace_names_by_titles(maps.method)
            yield f"{share} of {title} for {maps.finding}: {STATUS_MEANINGS['layout_unverified']}."
