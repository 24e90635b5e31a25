"""Maps: whether they lie on the finding, show what the answer depends on, notice training, and stay where they should."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from camscope.audit.core.schema import Line, Measured, Number, Randomised, Similarity, Summary, Verdict, Word
from camscope.audit.verdicts.model import equal, together
from camscope.audit.verdicts.rules import ABOVE, NOTHING, Told, beyond, lacks, made, out_of_reach, under_all
from camscope.metrics.randomization_result import UNCHANGED

OVER = (
    "supported where the interval lies wholly above the margin, and that of the paired difference from the best control map, "
    "which does not depend on the model, wholly above zero; not supported where the first lies wholly below the margin, or the "
    "second nowhere above zero; not testable where the finding is so large that no map could reach the margin"
)
RANKING = ("deletion", "insertion", "road", "lerf-morf-gap")  # what changes as a map's order says, best first or last
FAITHFUL = (
    f"of those of {', '.join(RANKING)} that were measured: supported where the interval of the paired difference from the "
    "best control map, which does not depend on the model, lies wholly on the better side of zero for all of them, under every "
    "fill; not supported where it does so for none, under no fill, and lies wholly on the worse side for one at least, under "
    "every fill"
)
STEADY = {
    "stability": "under small shifts, turns and noise",
    "acquisition-stability": "when the picture is windowed, resampled and compressed a little differently",
}
SIDES: Mapping[Word, str] = {"supported": "for", "not supported": "against", "not testable": "neither for nor against"}
SANE = (
    "supported where, by every measure of similarity, maps of the untrained model are on average no more like the trained "
    "model's than maps of different images are to one another, at the upper end of their 95 % interval, and less alike than "
    f"{UNCHANGED}; not supported where by one of them they are more alike; not testable unless an edge detector fails the same "
    "test on the same images"
)


def localised(summary: Summary) -> Iterator[Verdict]:
    """Whether maps lie on the finding, and on that of every subgroup alike."""
    for finding in summary.resolve.findings:
        own = _lines(summary.localise, ("enrichment",), finding)
        if not own:
            claim, margin = f"The maps lie on {finding} more than chance would have it.", summary.margins["enrichment"]
            why = summary.localise.reason or f"no masks, boxes or points say where {finding} is"
            found: Told = "not testable", why
            yield made("localisation", claim, finding, found, NOTHING, "localisation", OVER, good=True, margin=margin)
        for one in own:
            yield _localised(summary, one)
        for (name, _, column), levels in together(summary.localise.levels).items():
            if name == finding:
                whose = summary.resolve.tools[0].title if summary.resolve.tools else "the first method"
                claim = f"The maps of {whose} lie on {finding} to the same extent whatever the {column}."
                yield equal("localisation by subgroup", claim, finding, levels, "localisation", column)


def _lines(stage: Measured, metrics: Iterable[str], finding: str) -> list[Line]:
    """Of methods."""
    return [one for one in stage.lines if one.metric in metrics and one.finding == finding and not one.control]


def _localised(summary: Summary, one: Line) -> Verdict:
    margin = summary.margins["enrichment"]
    word, why = _on_it(one, margin)
    inside = _lines(summary.localise, ("energy-inside",), one.finding)
    share = next((each.value.value for each in inside if (each.method, each.layer) == (one.method, one.layer)), None)
    said = "" if share is None else f"{share:.2f} of their heat lies inside"
    return made(
        "localisation", f"The maps of {one.method} lie on {one.finding} more than chance would have it.", one.finding,
        (word, "; ".join(filter(None, (why, said)))), one.value, "localisation", OVER, good=True, margin=margin,
        subject=one.method,
    )  # fmt: skip


def _on_it(one: Line, margin: float) -> Told:
    if why := out_of_reach(one.most, margin):
        return "not testable", why
    chance, control = beyond(one.value, margin), _over_control(one)
    if chance[0] != "supported" and control[0] == "not supported":
        return control
    return control if chance[0] == "supported" else chance


def _over_control(one: Line) -> Told:
    """Whether it does better than the best of the maps that know nothing of the model."""
    name = one.value.baseline_name or "a map"
    if one.over is None or one.over.value is None:
        return "not testable", f"it was not compared with {name}, which knows nothing of the model"
    if lacking := lacks(one.over):
        return "not testable", lacking
    if one.over.low is None or one.over.high is None:
        lacking = f": {one.over.reason}" if one.over.reason else ""
        return "not testable", f"its difference to {name}, which knows nothing of the model, has no interval{lacking}"
    if one.over.low > 0:
        return "supported", ""
    if one.over.high <= 0:
        return "not supported", f"{name}, which knows nothing of the model, does as well"
    return "not testable", f"it cannot be told from {name}, which knows nothing of the model: more images would tell"


def faithful(summary: Summary) -> Iterator[Verdict]:
    """Whether the answer changes as the maps say, by every metric that goes by their order."""
    stage = summary.faithfulness
    for finding in summary.resolve.findings:
        own = _lines(stage, RANKING, finding)
        if not own:
            claim = f"The maps show what the answer for {finding} depends on."
            yield _open("faithfulness", claim, finding, stage.reason or f"no map of {finding} was tested", FAITHFUL)
        for method in dict.fromkeys(one.method for one in own):
            mine = [one for one in own if one.method == method]
            found, shown = _by_all(mine)
            claim = f"The maps of {method} show what the answer for {finding} depends on."
            yield made(
                "faithfulness", claim, finding, found, shown.over or NOTHING, "faithfulness", FAITHFUL, good=True,
                margin=0.0, subject=method,
            )  # fmt: skip


def _open(question: str, claim: str, finding: str, why: str, rule: str) -> Verdict:
    """Of what was not tested."""
    return made(question, claim, finding, ("not testable", why), NOTHING, question, rule, good=True)


def _by_all(own: Sequence[Line]) -> tuple[Told, Line]:
    """What the metrics say together, and of the lines that gave the word the one that speaks least for the maps."""
    names = [name for name in RANKING if any(one.metric == name for one in own)]
    said = {name: under_all([_over_all(one) for one in own if one.metric == name]) for name in names}
    found = _agreed(said, any(_over_all(one)[0] == "supported" for one in own))
    gave = [name for name in names if said[name][0] == found[0]] or names
    least = min((one for one in own if one.metric in gave), key=lambda one: (one.over and one.over.value) or 0.0)
    shown = f"shown: {least.metric}{f' under {least.fill}' if least.fill else ''}"
    return (found[0], "; ".join(filter(None, (found[1], shown)))), least


def _over_all(one: Line) -> Told:
    """Whether it is better than of every map that knows nothing."""
    return beyond(one.over or NOTHING, 0.0)


def _agreed(said: Mapping[str, Told], somewhere: bool) -> Told:
    """The word of all metrics; `somewhere`: whether one is better under any fill."""
    words = [word for word, _ in said.values()]
    sides = "; ".join(_side(said, word) for word in SIDES if word in words)
    if set(words) == {"supported"}:
        return "supported", ""
    if "not supported" in words and not somewhere:
        return "not supported", sides
    if "supported" in words or len(set(words)) > 1:
        return "not testable", f"the metrics do not all agree: {sides}"
    return "not testable", next(why for word, why in said.values() if word == "not testable")


def _side(said: Mapping[str, Told], wanted: Word) -> str:
    """Which metrics say so."""
    names = [name for name, (word, _) in said.items() if word == wanted]
    return f"{' and '.join(names)} {'speak' if len(names) > 1 else 'speaks'} {SIDES[wanted]} the maps"


def sane(summary: Summary) -> Iterator[Verdict]:
    """Whether the maps of each finding notice that the training is gone, where an edge detector fails to."""
    for finding in summary.resolve.findings:
        own = [one for one in summary.sanity.tests if one.finding == finding]
        if not own:
            claim = f"The maps for {finding} depend on what the model has learnt."
            why = summary.sanity.reason or f"too few images with {finding} share a size"
            yield _open("sanity", claim, finding, why, SANE)
        control = next((one for one in own if one.control), None)
        for one in own:
            if not one.control:
                claim, (found, effect) = (
                    f"The maps of {one.method} depend on what the model has learnt.",
                    _sane(one, control),
                )
                yield made(
                    "sanity", claim, finding, found, effect, "sanity", SANE, good=True, subject=one.method
                )  # fmt: skip


def _sane(one: Randomised, control: Randomised | None) -> tuple[Told, Number]:
    """The word, and the similarity that gave it."""
    last = next((each for each in one.similarities if each.passes is one.passes), None)
    effect = NOTHING if last is None else _end(last)
    if one.passes is None:
        return ("not testable", one.reason), effect
    if control is None or control.passes is None:
        why = "the test has no result for the edge detector, which has to fail it"
        return ("not testable", why), effect
    if control.passes:
        why = "the edge detector, which knows nothing of the model, did not fail: the test is too weak here"
        return ("not testable", why), effect
    return ("supported" if one.passes else "not supported", ""), effect


def _end(last: Similarity) -> Number:
    why = "; ".join(filter(None, (f"{last.name} after the last step", last.end.reason)))
    beside = {"baseline": last.high, "baseline_name": "maps of different images, at most", "reason": why}
    return last.end.model_copy(update=beside)


def robust(summary: Summary) -> Iterator[Verdict]:
    """Whether the maps stay where they are under changes that do not matter."""
    margin, stage = summary.margins["robust"], summary.robustness
    for finding in summary.resolve.findings:
        own = _lines(stage, STEADY, finding)
        if not own:
            claim = f"The maps for {finding} stay where they are under changes that do not matter."
            yield _open("robustness", claim, finding, stage.reason or f"no map of {finding} was tested", ABOVE)
        for one in own:
            claim = f"The maps of {one.method} for {finding} stay where they are {STEADY[one.metric]}."
            yield made(
                "robustness", claim, finding, beyond(one.value, margin), one.value, "robustness", ABOVE, good=True,
                margin=margin, subject=one.method,
            )  # fmt: skip
