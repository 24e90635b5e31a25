"""Samples: the maps of some images in a run of their own, for the stages that ask the model many times of each."""

from dataclasses import replace
from pathlib import Path

from camscope.audit.lines import formulas, lines
from camscope.audit.schema import Line, Measured
from camscope.audit.subject import Finding, Subject
from camscope.batch import Manifest, Run, run_batch
from camscope.batch.manifest import arrow
from camscope.files import path_in
from camscope.measure import measure

CHUNK = 8  # images that are lost where an audit is stopped: each takes long


def measured(subject: Subject, name: str, count: int, salt: int, metrics: tuple[str, ...]) -> Measured:
    """Metrics that ask the model about images with each finding, drawn by the seed; in the folder `name`, finding by finding."""
    found: list[Line] = []
    images = set[int]()
    for finding in subject.findings:
        rows = subject.sampled(count, salt, finding, only=True)
        images.update(rows)
        place = path_in(subject.folder, name, str(finding.index))
        found += _measured(subject, place, finding, rows, metrics) if rows else []
    if not images:
        return Measured(tested=False, reason="no image with a finding has an answer")
    return Measured(images=len(images), formulas=formulas(found), lines=tuple(found))


def _measured(
    subject: Subject, folder: Path, finding: Finding, rows: list[int], metrics: tuple[str, ...]
) -> list[Line]:
    config = subject.config
    shown, whole = _some(subject, subject.shown, rows), _some(subject, subject.manifest, rows)
    run_batch(
        subject.tools,
        shown,
        folder / "maps",
        [finding.index],
        batch_size=config.batch_size,
        chunk=CHUNK,
        window=config.data.window,
    )
    made = measure(
        Run(folder / "maps", whole),
        folder / "values",
        metrics=metrics,
        model=subject.model,
        preprocess=subject.tools[0].preprocess,
        tools=subject.tools,
        fills=config.fills,
        batch_size=config.at_once,
        told=subject.told,
    )
    return lines(subject, made, finding)


def _some(subject: Subject, manifest: Manifest, rows: list[int]) -> Manifest:
    places = arrow().array([subject.place[row] for row in rows], arrow().int64())
    return replace(manifest, table=manifest.table.take(places))
