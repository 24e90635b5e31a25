"""Board: the verdicts by what they are about, then by what they say of it; what one cause may have given stands together."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from camscope.audit.report.words import SUBJECTS, Subject, subject_of
from camscope.audit.schema import Summary, Verdict

KIND_WORDS: Mapping[str, str] = {
    "against": "against",
    "for": "for",
    "neither": "neither way",
    "untested": "not testable",
}
TOLD = ["supported", "not supported"]
TALLIES: Mapping[str, Mapping[str, str | list[str]]] = {
    "against": {"speaks": "against", "word": TOLD},
    "for": {"speaks": "for", "word": TOLD},
    "neither": {"speaks": "neither", "word": TOLD},
    "untested": {"word": "not testable"},
}


@dataclass(frozen=True)
class Side:
    """The verdicts on the model, on its maps or on the data, kind by kind; `questions`: those that were asked of it."""

    id: str
    subject: Subject
    kinds: Mapping[str, Sequence[Verdict]]
    questions: list[str]


@dataclass(frozen=True)
class Block:
    """Verdicts that stand together; `overlap`: because their regions share most of their pixels."""

    rows: list[Verdict]
    overlap: bool = False


def sides(summary: Summary) -> list[Side]:
    """Of the model, of the maps, of the data."""
    made = []
    for name, subject in SUBJECTS.items():
        own = [one for one in summary.verdicts if subject_of(one.question) == name]
        questions = list(dict.fromkeys(one.question for one in own)) or list(subject.questions)
        made.append(Side(name, subject, grouped(own), questions))
    return made


def kind_of(verdict: Verdict) -> str:
    """Whether it speaks for or against what it is about, neither, or was not testable."""
    return "untested" if verdict.word == "not testable" else verdict.speaks


def grouped(verdicts: Sequence[Verdict]) -> dict[str, list[Verdict]]:
    """What speaks against, then for, neither way, and what was not testable; each in the order it came."""
    return {kind: [one for one in verdicts if kind_of(one) == kind] for kind in KIND_WORDS}


def speaks(verdict: Verdict) -> str:
    """`against the model`, `for the maps`; of what was not testable nothing."""
    kind, name = kind_of(verdict), SUBJECTS[subject_of(verdict.question)].name
    return {"against": f"against {name}", "for": f"for {name}", "neither": "neither way", "untested": ""}[kind]


def blocks(rows: Sequence[Verdict], overlapping: Mapping[str, list[list[str]]]) -> list[Block]:
    """Verdicts in their order; of regions that overlap, all stand where the first of them does."""
    made: list[tuple[tuple[str, ...], Block]] = []
    for one in rows:
        group = _group(one, overlapping)
        known = [block for other, block in (made if group else made[-1:]) if other == group]
        if known:
            known[0].rows.append(one)
        else:
            made.append((group, Block([one], overlap=bool(group))))
    return [block for _, block in made]


def _group(one: Verdict, overlapping: Mapping[str, list[list[str]]]) -> tuple[str, ...]:
    """The regions that a verdict's own overlaps with, after its finding; of most verdicts none."""
    if (one.question, one.word) != ("shortcut", "supported"):
        return ()
    return next(((one.finding, *group) for group in overlapping.get(one.finding, []) if one.subject in group), ())
