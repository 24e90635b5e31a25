"""askable: whether a config can be asked of its manifest and its model, which is known before any image is read."""

from camscope.audit.answers.levels import MOST
from camscope.audit.shortcuts.scenes import masked, wanted
from camscope.audit.subject import Subject
from camscope.errors import CamscopeError, CategoryError, InputError, PreprocessError
from camscope.images.window import Window
from camscope.measure.evidence import Evidence
from camscope.wording import plural

PROBED = 32  # masks that are looked into for several labels before the audit begins


def expect_askable(subject: Subject) -> None:
    """An error for what a later stage would only find out after an hour: names of classes, labels, layers, regions, masks."""
    for column in subject.config.data.subgroups:
        if (count := len({*subject.levels(column).values()} - {None})) > MOST:
            raise InputError(
                f"subgroups: {column!r} has {plural(count, 'level')}, and the report shows them all: at most {MOST} are allowed"
            )
    if subject.config.data.window is not None:
        Window.of(subject.config.data.window)
    wanted(subject), subject.tools  # each raises what is wrong with it
    for evidence in (*subject.evidence.values(), *masked(subject).values()):
        _expect_choice(subject, evidence)
    if subject.tools[0].preprocess is None and subject.manifest.images is None:
        raise PreprocessError(
            'the model does not say how images enter it: say preprocess = "imagenet" in [model], or PREPROCESSING in the '
            "file of its factory"
        )
    for finding in subject.findings:
        truth = [one for one in subject.truths(finding).values() if one is not None]
        if not 0 < sum(truth) < len(truth):
            raise InputError(
                f"of {plural(len(truth), 'labeled row')}, {sum(truth)} with the finding {finding.name!r}: some "
                "with it and some without "
                f"are needed; is {subject.config.data.label or 'its column'!r} the column of labels?"
            )


def _expect_choice(subject: Subject, evidence: Evidence) -> None:
    """CategoryError where the first masks hold several labels, and none was chosen; what else is odd is for later stages."""
    for row in subject.manifest.rows(0, min(PROBED, len(subject.rows))):
        try:
            evidence.mask(row, (1, 1))
        except CategoryError:
            raise
        except CamscopeError:  # of another size than this one, say
            continue
