"""limits: what an audit cannot say, and what is odd in this one. Neither can be switched off."""

from collections.abc import Iterator

from camscope.audit.core.schema import ResolveResult, Summary
from camscope.audit.core.subgroup_levels import MIN_PATIENTS_FOR_INTERVAL, MIN_PATIENTS_FOR_VERDICT
from camscope.audit.shortcuts.region_attribution import find_overlapping_regions
from camscope.explanation import STATUS_MEANINGS
from camscope.plurals import plural

GENERAL_LIMITATIONS = (
    "Attribution shows what the model's answer is sensitive to, not disease and not cause.",
    "Maps that lie on a finding do not prove that the model uses it; maps that do not are no proof of a shortcut.",
    "Where a finding lies is what annotators marked, if anything was marked; where readers look was not recorded.",
    "Confounders that nobody named, or that cannot be seen, are not excluded.",
    "A region that a map does not show may still decide the answer: interventions decide, maps show where.",
    "Images in which something is filled or inserted are not of the kind that the model learnt: every fill is named.",
    "Randomisation tests find maps that do not depend on the training; they do not rank methods.",
    "Margins were chosen by whoever ran the audit; the digest of the config was taken before this run asked the model anything.",
    "The numbers hold for this data and these weights only.",
    "This is no clinical validation; it supports documentation, and confers no compliance.",
)
REPORTED_SEVERITIES = ("error", "warning")
FEW_PATIENTS = 30  # patients


def list_limitations(summary: Summary) -> Iterator[str]:
    """The sentences that stand in every report."""
    yield from GENERAL_LIMITATIONS
    yield from _describe_map_resolution(summary.resolve)


def _describe_map_resolution(resolve: ResolveResult) -> Iterator[str]:
    for tool in resolve.explainers:
        side = max(tool.stride, default=1.0)
        if side > 1:
            place = f", {tool.stride_mm:.3g} mm on the image" if tool.stride_mm is not None else ""
            cell = f"{side:.3g} pixels of the model's input wide{place}"
            yield f"A cell of the maps of {tool.title} is {cell}: nothing finer is seen."


def _describe_overlaps(summary: Summary) -> Iterator[str]:
    """Regions that the answer relies on and that share their pixels: one cause would be counted once for each."""
    for finding, groups in find_overlapping_regions(summary).items():
        for group in groups:
            yield (
                f"Regions that the answer for {finding} relies on overlap ({', '.join(group)}): "
                "one cause may be counted several times."
            )


def list_warnings(summary: Summary) -> Iterator[str]:
    """What is odd, the gravest first."""
    if summary.check.tested and not summary.check.has_patient_column:
        yield "No column says whose image each is: images of one patient are counted as if they were independent."
    if summary.check.tested and summary.check.n_patients < FEW_PATIENTS:
        count = summary.check.n_patients
        noun = "patient" if summary.check.has_patient_column else "image"
        verb = "is" if count == 1 else "are"
        width = "intervals are wide" if count >= MIN_PATIENTS_FOR_INTERVAL else "there are no intervals"
        answers = (
            "and some questions may not be answered" if count >= MIN_PATIENTS_FOR_VERDICT else "and no verdict is given"
        )
        yield f"There {verb} only {plural(count, noun)}: {width}, {answers}."
    if summary.predict.outputs_are_probabilities:
        yield "The model gives probabilities; log odds were made of them, and end where probabilities round to 0 or 1."
    failed = sum(one.n_rows for one in summary.explain.failures)
    if failed:
        yield f"{plural(failed, 'image lacks', 'images lack')} a map of some method: see failures.csv."
    yield from _describe_overlaps(summary)
    for one in sorted(
        summary.check.issues,
        key=lambda found: REPORTED_SEVERITIES.index(found.severity) if found.severity in REPORTED_SEVERITIES else 9,
    ):
        if one.severity in REPORTED_SEVERITIES:
            yield f"{one.message} ({one.count} x)"
    for name in ("localization", "faithfulness", "sanity", "robustness", "shortcut"):
        stage = getattr(summary, name)
        if not stage.tested:
            yield f"{name} was not tested: {stage.reason or 'no reason was given'}."
    for maps in summary.explain.map_counts:
        flagged = {key: count for key, count in maps.status_counts.items() if key not in ("ok", "layout_unverified")}
        if sum(flagged.values()) > maps.n_maps / 10:
            kinds = ", ".join(f"{status.replace('_', ' ')}: {count}" for status, count in flagged.items())
            share = f"{sum(flagged.values())} of {plural(maps.n_maps, 'map')}"
            yield f"Maps of {maps.method} for {maps.finding} with a flag: {share} ({kinds})."
        if unverified := maps.status_counts.get("layout_unverified", 0):
            share = f"{unverified} of {plural(maps.n_maps, 'map')}"
            yield f"{share} of {maps.method} for {maps.finding}: {STATUS_MEANINGS['layout_unverified']}."
