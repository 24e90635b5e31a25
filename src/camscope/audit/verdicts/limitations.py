"""limits: what an audit cannot say, and what is odd in this one. Neither can be switched off."""

from collections.abc import Iterator

from camscope.audit.core.schema import Resolve, Summary
from camscope.audit.core.subgroup_levels import FOR_A_WORD, FOR_AN_INTERVAL
from camscope.audit.shortcuts.region_attribution import overlapping
from camscope.explanation import MEANING
from camscope.plurals import plural

ALWAYS = (
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
SEVERE = ("error", "warning")
FEW = 30  # patients


def limits(summary: Summary) -> Iterator[str]:
    """The sentences that stand in every report."""
    yield from ALWAYS
    yield from _floor(summary.resolve)


def _floor(resolve: Resolve) -> Iterator[str]:
    for tool in resolve.tools:
        side = max(tool.stride, default=1.0)
        if side > 1:
            place = f", {tool.millimetres:.3g} mm on the image" if tool.millimetres is not None else ""
            cell = f"{side:.3g} pixels of the model's input wide{place}"
            yield f"A cell of the maps of {tool.title} is {cell}: nothing finer is seen."


def _overlapping(summary: Summary) -> Iterator[str]:
    """Regions that the answer relies on and that share their pixels: one cause would be counted once for each."""
    for finding, groups in overlapping(summary).items():
        for group in groups:
            yield (
                f"Regions that the answer for {finding} relies on overlap ({', '.join(group)}): "
                "one cause may be counted several times."
            )


def warnings(summary: Summary) -> Iterator[str]:
    """What is odd, the gravest first."""
    if summary.check.tested and not summary.check.grouped:
        yield "No column says whose image each is: images of one patient are counted as if they were independent."
    if summary.check.tested and summary.check.patients < FEW:
        count = summary.check.patients
        noun = "patient" if summary.check.grouped else "image"
        verb = "is" if count == 1 else "are"
        width = "intervals are wide" if count >= FOR_AN_INTERVAL else "there are no intervals"
        answers = "and some questions may not be answered" if count >= FOR_A_WORD else "and no verdict is given"
        yield f"There {verb} only {plural(count, noun)}: {width}, {answers}."
    if summary.predict.probabilities:
        yield "The model gives probabilities; log odds were made of them, and end where probabilities round to 0 or 1."
    failed = sum(one.rows for one in summary.explain.failures)
    if failed:
        yield f"{plural(failed, 'image lacks', 'images lack')} a map of some method: see failures.csv."
    yield from _overlapping(summary)
    for one in sorted(
        summary.check.found, key=lambda found: SEVERE.index(found.severity) if found.severity in SEVERE else 9
    ):
        if one.severity in SEVERE:
            yield f"{one.message} ({one.count} x)"
    for name in ("localise", "faithfulness", "sanity", "robustness", "shortcut"):
        stage = getattr(summary, name)
        if not stage.tested:
            yield f"{name} was not tested: {stage.reason or 'no reason was given'}."
    for maps in summary.explain.maps:
        flagged = {key: count for key, count in maps.statuses.items() if key not in ("ok", "layout_unverified")}
        if sum(flagged.values()) > maps.maps / 10:
            kinds = ", ".join(f"{status.replace('_', ' ')}: {count}" for status, count in flagged.items())
            share = f"{sum(flagged.values())} of {plural(maps.maps, 'map')}"
            yield f"Maps of {maps.method} for {maps.finding} with a flag: {share} ({kinds})."
        if unverified := maps.statuses.get("layout_unverified", 0):
            share = f"{unverified} of {plural(maps.maps, 'map')}"
            yield f"{share} of {maps.method} for {maps.finding}: {MEANING['layout_unverified']}."
