"""Samples: the maps of some images in a run of their own, for the stages that ask the model many times of each."""

from dataclasses import replace

from camscope.audit.lines import lines
from camscope.audit.schema import Measured
from camscope.audit.subject import Subject
from camscope.batch import Manifest, Run, run_batch
from camscope.batch.manifest import arrow
from camscope.measure import Measures, measure

CHUNK = 8  # images that are lost where an audit is stopped: each takes long


def measured(subject: Subject, name: str, rows: list[int], metrics: tuple[str, ...]) -> Measured:
    """Metrics that ask the model about some images; maps and values are in the folder `name`."""
    if not rows:
        return Measured(tested=False, reason="no image has a label and an answer")
    folder, config = subject.folder / name, subject.config
    shown, whole = _some(subject, subject.shown, rows), _some(subject, subject.manifest, rows)
    targets = [one.index for one in subject.findings]
    run_batch(
        subject.tools,
        shown,
        folder / "maps",
        targets,
        batch_size=config.batch_size,
        chunk=CHUNK,
        window=config.data.window,
    )
    made: Measures = measure(
        Run(folder / "maps", whole),
        folder / "values",
        metrics=metrics,
        model=subject.model,
        preprocess=subject.tools[0].preprocess,
        tools=subject.tools,
        fills=config.fills,
        batch_size=config.batch_size,
        told=subject.told,
    )
    return Measured(images=len(rows), lines=tuple(lines(subject, made)))


def _some(subject: Subject, manifest: Manifest, rows: list[int]) -> Manifest:
    places = arrow().array([subject.place[row] for row in rows], arrow().int64())
    return replace(manifest, table=manifest.table.take(places))
