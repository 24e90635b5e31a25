"""The runner: checks a config, estimates the time, and runs the stages in order.

- running: the stages in order, each written when it is done, so that an audit that was stopped goes on where it was.
- askable: whether a config can be asked of its manifest and its model, which is known before any image is read.
- estimating: how long the stages will take, from a few passes of the model and of each method, before they begin.
"""

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from camscope.audit.core.context import Subject
from camscope.audit.core.schema import (
    Check,
    Explain,
    Measured,
    Part,
    Predict,
    Resolve,
    Sanity,
    Shortcut,
    Stage,
    Summary,
)
from camscope.audit.core.subgroup_levels import MOST
from camscope.audit.performance.model_outputs import logits_of
from camscope.audit.provenance import provenance
from camscope.audit.provenance.digests import of_images, others
from camscope.audit.provenance.file_ownership import (
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
from camscope.audit.shortcuts.region_samples import masked, wanted
from camscope.audit.stages.data_and_model import check, resolve
from camscope.audit.stages.map_quality import faithfulness, localise, robustness, sanity
from camscope.audit.stages.predict import explain, predict
from camscope.audit.stages.shortcut import shortcut
from camscope.batch.image_loading import Loaded
from camscope.batch.run_store import SIBLING
from camscope.errors import CamscopeError, CategoryError, InputError, OutputError, PreprocessError
from camscope.evaluation.ground_truth import Evidence
from camscope.images.scans.scan import Window
from camscope.metrics.weight_randomization import parts
from camscope.plurals import plural
from camscope.safe_files import path_in, write_bytes

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
    from camscope.audit.verdicts import verdicts
    from camscope.audit.verdicts.limitations import limits, warnings
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


TRIED = 4  # images
REMOVALS = 60  # passes of an image for each map and fill: of removal step by step, and of imputation, which costs more
AGAIN = 35  # maps of an image that robustness makes of each method
CONTROLS = 4  # maps that know nothing
SEEDS = 3  # of randomisation
FOUND = 0.01  # seconds to find a region in an image
JUDGED = 0.004  # seconds to hold a map against a mask
CLUSTERED = 5.0  # seconds for the clusters of a method
Seconds = Mapping[str, float]


def estimated(subject: Subject) -> Seconds:
    """Stage -> seconds, about: of the machine as it is now. Empty where no image can be read."""
    images = [one for one in subject.loaded(subject.rows[:TRIED]) if one.item is not None]
    images = [one for one in images if one.item and images[0].item and one.item.x.shape == images[0].item.x.shape]
    if not images:
        return {}
    batch = subject.worker.collated(images)
    once = _timed(lambda: logits_of(subject, subject.on_device(images))) / len(images)
    maps = _timed(lambda: subject.worker.rows(batch)) / len(images)
    read = _timed(lambda: list(subject.loaded([one.row["row"] for one in images]))) / len(images)
    return {
        name: value
        for name, value in _stages(subject, once, maps, read, images).items()
        if name not in subject.config.skip
    }


def _stages(subject: Subject, once: float, maps: float, read: float, images: list[Loaded]) -> dict[str, float]:
    """`once`, `maps`, `read`: seconds an image for an answer, for all its maps, and to read it."""
    config, rows = subject.config, len(subject.rows)
    sizes, findings, tools = config.sizes, len(subject.findings), len(subject.tools)
    regions = len(masked(subject)) + len(wanted(subject))
    tried, seen = min(rows, sizes.interventions), min(rows, sizes.regions)
    losing = len(parts(subject.model, subject.on_device(images[:1])))
    return {
        "check": len(subject.whole) * read,
        "predict": rows * (read + once),
        "explain": rows * (read + maps),
        "localise": rows * (read + (tools + CONTROLS) * JUDGED) if subject.evidence else 0.0,
        "faithfulness": min(rows, sizes.faithfulness) * (tools + CONTROLS) * len(config.fills) * REMOVALS * once,
        "sanity": min(rows, sizes.sanity) * SEEDS * losing * maps / findings,
        "robustness": min(rows, sizes.robustness) * AGAIN * maps,
        "shortcut": seen * (read + regions * FOUND)
        + tried * findings * regions * (2 * len(config.fills) + 2) * once
        + tools * CLUSTERED,
    }


def _timed(work: Callable[[], object]) -> float:
    """Seconds of the second time: the first one warms up."""
    try:
        work()
        begun = time.perf_counter()
        work()
    except InputError:
        return 0.0
    return time.perf_counter() - begun
