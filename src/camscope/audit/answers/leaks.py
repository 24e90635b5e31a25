"""leaks: which columns of the manifest can be read off the model's features."""

from collections.abc import Iterator

from camscope.audit.answers.answered import Answered
from camscope.audit.answers.leak import leak
from camscope.audit.numbers import number, rounded
from camscope.audit.schema import Leak
from camscope.audit.subject import Subject
from camscope.errors import UndefinedError


def leaks(subject: Subject, answered: Answered) -> Iterator[Leak]:
    """A probe for each subgroup column, of rows that say something in it."""
    places = {row: n for n, row in enumerate(answered.rows)}
    for column in subject.config.data.subgroups:
        said = subject.levels(column)
        rows = [row for row in answered.rows if said[row] is not None]
        features = answered.features[[places[row] for row in rows]]
        try:
            found = leak(
                features,
                [str(said[row]) for row in rows],
                [subject.patients[row] for row in rows],
                seed=subject.config.seed,
            )
            yield Leak(
                column=column,
                auroc=number(found.auroc, found.chance, "labels dealt to patients at random"),
                null_high=rounded(found.chance_high),
                readable=found.readable,
            )
        except UndefinedError as error:
            yield Leak(column=column, auroc=number(None, 0.5, "chance", str(error)), null_high=None)
