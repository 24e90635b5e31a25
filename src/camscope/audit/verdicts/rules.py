"""Judged: an interval beside a margin, and a verdict of it; no word without a value, of few patients, or without a reason."""

from collections.abc import Sequence
from typing import Literal

from camscope.audit.core.schema import Number, Verdict, Word
from camscope.audit.core.subgroup_levels import FOR_A_WORD
from camscope.audit.core.summary_values import patients

Speaks = Literal["for", "against", "neither"]
Told = tuple[Word, str]  # and why it cannot be told

NOTHING = Number(reason="there is nothing to test it with")
ABOVE = "supported where the interval lies wholly above the margin, not supported where it lies wholly below"
ENOUGH = f"not testable with fewer than {FOR_A_WORD} patients"  # of every rule
FLAT = "every image has the same value, which is the margin"
WIDE = "the interval holds the margin: more images are needed to tell"


def beyond(number: Number, margin: float) -> Told:
    """Whether a number lies above a margin, with the reason where it cannot be told."""
    if lacking := lacks(number):
        return "not testable", lacking
    if number.low is None or number.high is None:
        return "not testable", number.reason or "there is no interval"
    if number.low > margin:
        return "supported", ""
    if number.high < margin:
        return "not supported", ""
    return "not testable", FLAT if number.low == number.high else WIDE


def lacks(number: Number) -> str:
    """What a number lacks for a word to rest on it: a value, or patients; "" where it has both."""
    if number.value is None:
        return number.reason or "there is no value"
    if number.groups < FOR_A_WORD:
        each = " of each kind" if number.roles else ""
        return f"too few patients to tell: {patients(number)}, and {FOR_A_WORD}{each} are needed"
    return ""


def out_of_reach(most: float | None, margin: float) -> str:
    """Why an enrichment cannot exceed the margin, whatever a map shows; "" where it can."""
    if most is None or most > margin:
        return ""
    return f"it takes up so much of the images that a map which is all inside has an enrichment of {most:.2f}, within the margin"


def under_all(found: Sequence[Told]) -> Told:
    """The word on which all fills agree."""
    words = {word for word, _ in found}
    if len(words) == 1:
        return found[0]
    return "not testable", next((why for word, why in found if word == "not testable"), "") or "the fills disagree"


def made(
    question: str,
    claim: str,
    finding: str,
    found: Told,
    effect: Number,
    section: str,
    rule: str,
    *,
    good: bool | None,
    margin: float | None = None,
    subject: str = "",
) -> Verdict:
    """`good`: whether "supported" speaks for the model; None: neither does."""
    word, reason = _borne(found, effect)
    speaks: Speaks = "neither"
    if good is not None and word != "not testable":
        speaks = "for" if (word == "supported") is good else "against"
    return Verdict(
        question=question, claim=claim, finding=finding, subject=subject, word=word, speaks=speaks, effect=effect,
        margin=margin, rule=f"{rule}; {ENOUGH}", reason=reason, section=section,
    )  # fmt: skip


def _borne(found: Told, effect: Number) -> Told:
    """The word, where what is shown beside it can bear one."""
    word, reason = found
    if word != "not testable" and (lacking := lacks(effect)):
        return "not testable", lacking
    return word, reason or (effect.reason or str(NOTHING.reason) if word == "not testable" else "")
