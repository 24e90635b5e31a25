"""running: the stages in order, each written when it is done, so that an audit that was stopped goes on where it was."""

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from camscope.audit import provenance
from camscope.audit.askable import expect_askable
from camscope.audit.digesting import of_images, others
from camscope.audit.estimating import estimated
from camscope.audit.ownership import (
    LAST,
    PLAN,
    STAGES,
    expect_own,
    is_plan,
    note_begun,
    note_finished,
    note_written,
    remove_outputs,
)
from camscope.audit.schema import Check, Explain, Measured, Part, Predict, Resolve, Sanity, Shortcut, Stage, Summary
from camscope.audit.stages.check import check
from camscope.audit.stages.explain import explain
from camscope.audit.stages.faithfulness import faithfulness
from camscope.audit.stages.localise import localise
from camscope.audit.stages.predict import predict
from camscope.audit.stages.resolve import resolve
from camscope.audit.stages.robustness import robustness
from camscope.audit.stages.sanity import sanity
from camscope.audit.stages.shortcut import shortcut
from camscope.audit.subject import Subject
from camscope.batch.store import SIBLING
from camscope.errors import OutputError
from camscope.files import path_in, write_bytes
from camscope.wording import plural

IMAGES = "images"
FORESEEN_AFTER = "resolve"  # which has tried the model and the methods
Telling = Callable[[str, int, int], None]  # a stage, and how much of it is done, of how much
Foreseeing = Callable[[Mapping[str, float]], None]  # stage -> seconds that it will take, about


@dataclass(frozen=True)
class Job:
    """A stage: what it does, and what it makes."""

    work: Callable[[Subject], Part]
    kind: type[Stage]
    optional: bool = False


JOBS: dict[str, Job] = {
    "check": Job(check, Check),
    "resolve": Job(resolve, Resolve),
    "predict": Job(predict, Predict),
    "explain": Job(explain, Explain),
    "localise": Job(localise, Measured, optional=True),
    "faithfulness": Job(faithfulness, Measured, optional=True),
    "sanity": Job(sanity, Sanity, optional=True),
    "robustness": Job(robustness, Measured, optional=True),
    "shortcut": Job(shortcut, Shortcut, optional=True),
}


def stages(subject: Subject, told: Telling, *, overwrite: bool, foreseen: Foreseeing | None = None) -> dict[str, Stage]:
    """The parts of all stages: those that are there are read, the others are made."""
    begin(subject, told, overwrite=overwrite)
    made: dict[str, Stage] = {}
    for name, job in JOBS.items():
        there = _there(subject.folder, name, job)
        made[name] = there or _done(subject, name, job, told)
        if name == FORESEEN_AFTER and foreseen is not None and there is None:
            foreseen({stage: took for stage, took in estimated(subject).items() if stage not in made})
    return made


def begin(subject: Subject, told: Telling, *, overwrite: bool) -> None:
    """The folder is this audit's: a new one, or one of the same config, data, images, weights and version.

    What cannot be asked is an error before anything is read. Then, before any stage looks at them, all images are read and
    their digests noted; `told` of it as of the stage "images".
    """
    expect_askable(subject)
    _expect_audit(subject.folder)
    plan, facts = subject.folder / PLAN, provenance.identity(subject)
    some = any((subject.folder / STAGES).glob("*.json"))
    known = _read(plan) if plan.is_file() and some and not overwrite else None  # a plan alone has cost nothing
    if known is not None:
        _expect_same(subject, facts, known)
    expect_own(subject.folder)
    images = of_images(subject, lambda done, total: told(IMAGES, done, total))
    if known is not None:
        expect_images(subject, known.get(IMAGES))
        note_finished(subject.folder)
        return
    remove_outputs(subject.folder)
    note_begun(subject.folder, LAST)
    write_bytes(plan, as_json({**facts, IMAGES: images}))


def _expect_audit(folder: Path) -> None:
    """OutputError for a folder that holds anything, and no audit: files of other programs are called `audit.json` too."""
    there = (one.name for one in folder.iterdir()) if folder.is_dir() else ()
    if any(not SIBLING.fullmatch(name) for name in there) and not is_plan(folder / PLAN):
        raise OutputError(f"{folder} exists and is no audit; choose another folder")


def _expect_same(subject: Subject, facts: Mapping[str, str], known: Any) -> None:
    if other := next((name for name in facts if not isinstance(known, dict) or known.get(name) != facts[name]), None):
        raise OutputError(
            f"{subject.folder} holds an audit with another {other}: choose another folder, or allow overwriting"
        )


def expect_images(subject: Subject, then: Any) -> None:
    """OutputError where the images are not `then`: there would be answers of old ones beside maps of new ones."""
    images = of_images(subject)
    if changed := others(images, then if isinstance(then, dict) else {}):
        raise OutputError(
            f"{subject.folder}: {len(changed)} of {plural(len(images), 'image')} differ from those that its stages have seen: "
            "choose another folder, or allow overwriting"
        )


def _done(subject: Subject, name: str, job: Job, told: Telling) -> Stage:
    """Run a stage, and keep what it made. One that is skipped says so."""
    begun = time.monotonic()
    if name in subject.config.skip:
        part: Part = job.kind(tested=False, reason="it was skipped, by the config")
    else:
        told(name, 0, 1)
        note_begun(subject.folder, name, [one.index for one in subject.findings] if name != "check" else [])
        subject.told = lambda done, total: told(name, done, total)
        part = job.work(subject)
    written = as_json(part.model_dump(mode="json"))
    write_bytes(path_in(subject.folder, STAGES, f"{name}.json"), written)
    note_written(subject.folder, name)
    provenance.note(subject.folder, {"stage": name, "seconds": round(time.monotonic() - begun, 3)})
    return job.kind.model_validate_json(written)  # as a second start reads it, in the order of the file


def _there(folder: Path, name: str, job: Job) -> Stage | None:
    """What a stage made before; None where it did not, or not wholly."""
    found = _read(folder / STAGES / f"{name}.json")
    if found is None:
        return None
    try:
        return job.kind.model_validate(found)
    except ValidationError:
        return None


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None


def as_json(plain: Mapping[str, Any]) -> bytes:
    """Sorted, without NaN, the same bytes for the same content."""
    return (json.dumps(plain, indent=2, sort_keys=True, allow_nan=False, ensure_ascii=False) + "\n").encode()


def summarised(subject: Subject, made: Mapping[str, Any]) -> Summary:
    """All parts, with the verdicts that follow from them."""
    from camscope.audit.limits import limits, warnings
    from camscope.audit.verdicts import verdicts
    from camscope.version import __version__

    config, facts = subject.config, provenance.identity(subject)
    plain = Summary(
        camscope=__version__,
        title=config.title,
        question=config.question,
        config=facts["config"],
        data=facts["data"],
        seed=config.seed,
        replicates=config.replicates,
        margins=config.margins.model_dump(),
        fills=config.fills,
        profile=config.report.profile,
        verdicts=(),
        warnings=(),
        limits=(),
        **made,
    )
    judged = plain.model_copy(update={"verdicts": tuple(verdicts(plain))})
    return judged.model_copy(update={"warnings": tuple(warnings(judged)), "limits": tuple(limits(judged))})


def folder_of(output: str | os.PathLike[str]) -> Path:
    """Where an audit goes; OutputError for a file."""
    path = Path(output)
    if path.exists() and not path.is_dir():
        raise OutputError(f"{path} is a file; an audit is a folder")
    return path
