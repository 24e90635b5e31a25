"""The result of a verdict as a sentence, and what follows from an AUROC, as HTML with the numbers of the summary."""

from dataclasses import dataclass

from markupsafe import Markup

from camscope.audit.core.stage_result_schema import EstimateSummary, FindingPerformance
from camscope.audit.core.summary_schema import Summary, Verdict
from camscope.audit.report.data_and_method_sentences import fill_sentence
from camscope.audit.report.number_format import format_estimate, format_number
from camscope.audit.report.verdict_labels_and_groups import VerdictKind, classify_verdict, describe_sample
from camscope.audit.verdicts import NO_PERFORMANCE_REASON
from camscope.audit.verdicts.model_and_data_verdicts import INVERTED_REASON
from camscope.audit.verdicts.patients_needed import TWO_SIDED_QUESTIONS
from camscope.audit.verdicts.verdict_rules import QUESTIONS
from camscope.plurals import inflect

QUESTIONS_WITHOUT_MARGIN = ("faithfulness", "sanity", "clusters")  # their rules compare with controls
MASKED_ORGAN_SUPPORTED = ("masked organ", "supported")
MASKED_ORGAN_EXPLANATION = " It must then use something outside of the organ."
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
    """A result, or a reason to doubt the model, with the report section that holds the numbers.

    `verdicts`: the verdicts that it states.
    """

    sentence: Markup
    details: Markup
    section: str
    tone: VerdictKind
    verdicts: tuple[Verdict, ...] = ()


def build_performance_answer(performance: FindingPerformance, summary: Summary) -> PerformanceAnswer:
    """Say in one sentence what the AUROC of a finding shows."""
    verdict = next((item for item in summary.verdicts if is_performance_verdict_of(item, performance.finding)), None)
    tone: VerdictKind = classify_verdict(verdict) if verdict else "untested"
    return PerformanceAnswer(
        performance.finding,
        format_estimate(performance.auroc),
        describe_sample(performance.auroc, has_patients=summary.check.has_patient_column),
        explain_auroc(performance, verdict, summary.margins.get("useful_auroc")),
        tone,
    )


def is_performance_verdict_of(verdict: Verdict, finding: str) -> bool:
    """Return whether a verdict judges the AUROC of a finding."""
    return (verdict.question, verdict.finding) == ("performance", finding)


def explain_auroc(performance: FindingPerformance, verdict: Verdict | None, margin: float | None) -> Markup:
    """Say in one sentence what follows from an AUROC and its interval."""
    auroc, finding = performance.auroc, performance.finding
    if auroc.value is None:
        return fill_sentence("There is no AUROC: {reason}.", reason=auroc.reason or "nothing was tested")
    if auroc.low is None or auroc.high is None:
        reason = (verdict.reason if verdict else "") or auroc.reason or "there is no interval"
        return fill_sentence("It decides nothing: {reason}.", reason=reason)
    if auroc.high < 0.5:
        sentence = "The ranking is inverted: images without “{finding}” score higher than images with it."
    elif auroc.low <= 0.5:
        sentence = "It is not shown that the model detects “{finding}”: the interval {position}."
    elif margin is None or verdict is None:
        sentence = "The whole interval lies above chance."
    elif verdict.conclusion == "supported":
        sentence = "The whole interval lies above {margin}, the minimum that was set before the audit."
    elif verdict.conclusion == "not supported":
        sentence = "The whole interval lies below {margin}, the minimum that was set before the audit."
    elif auroc.low <= margin <= auroc.high:
        sentence = (
            "It is better than chance. The interval includes {margin}, the minimum that was set before the audit."
        )
    else:
        sentence = "It decides nothing: {reason}."
    reason, position = verdict.reason if verdict else "", describe_interval_at_chance(auroc, margin)
    numbers = {"margin": 0.0 if margin is None else margin}
    return fill_sentence(sentence, finding=finding, reason=reason, position=position, **numbers)


def describe_interval_at_chance(auroc: EstimateSummary, margin: float | None) -> Markup:
    """Describe an AUROC interval that includes chance or lies below it. Name the required margin, if there is one."""
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


def build_result_sentence(verdict: Verdict, summary: Summary) -> Concern:
    """State the conclusion of a verdict as a sentence. Add the effect, the sample and the margin."""
    return Concern(
        fill_sentence("{answer}", answer=write_answer(verdict)),
        describe_effect(verdict, has_patients=summary.check.has_patient_column),
        verdict.section,
        classify_verdict(verdict),
        (verdict,),
    )


def write_answer(verdict: Verdict) -> str:
    """State the conclusion of a verdict as a sentence. Verdicts of old versions have no sentence, so their claim is used."""
    is_denied = verdict.conclusion == "not supported"
    return verdict.answer or (f"Not supported: {verdict.claim}" if is_denied else verdict.claim)


def describe_effect(verdict: Verdict, *, has_patients: bool) -> Markup:
    """Describe the effect of a verdict by quantity, value, interval, sample and margin."""
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
    explanation = MASKED_ORGAN_EXPLANATION if (verdict.question, verdict.conclusion) == MASKED_ORGAN_SUPPORTED else ""
    if INVERTED_REASON in verdict.reason:  # the ranking is inverted
        quantity = f"one minus {quantity}"
    return fill_sentence(
        f"{{quantity}}: {{effect}}, {{sample}}{{margin}}.{explanation}",
        quantity=f"{quantity[:1].upper()}{quantity[1:]}",
        effect=verdict.effect,
        sample=sample,
        margin=margin,
    )


def explain_conclusion(verdict: Verdict) -> Markup:
    """Say in one clause how the interval compares with the margin. Without an interval, name the margin, if there is one."""
    margin, low, high = verdict.margin, verdict.effect.low, verdict.effect.high
    if verdict.conclusion != "not decided" and _is_decided_without_margin(verdict):
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
    if verdict.conclusion != "not decided" and not is_consistent:  # another part of the rule decided
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
