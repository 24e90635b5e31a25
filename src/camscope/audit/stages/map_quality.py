"""Stages that test the maps: faithfulness, robustness, sanity checks and localization.

- faithfulness: what the model says of images in which what a map shows is removed, under two fills at least.
- robustness: how far maps change where they should not: under shifts, turns and noise, taken otherwise, in company,
  twice.
- sanity: whether maps notice that the model has lost its training; an edge detector, which cannot, has to fail.
- Samples: the maps of some images in a run of their own, for the stages that ask the model many times of each.
- localise: whether the maps lie on the finding, where somebody said where it is; beside maps that know nothing.
"""

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import numpy as np
import torch
from torch import Tensor

from camscope.audit.core.context import Finding, Subject
from camscope.audit.core.schema import Held, Level, Line, Measured, Number, Randomised, Sanity, Similarity
from camscope.audit.core.summary_values import formulas, grouped, lines, number, of_finding, rounded, values
from camscope.audit.performance.subgroups import levels
from camscope.batch import Manifest, Run, run_batch
from camscope.batch.manifest import arrow
from camscope.errors import GeometryError, NonFiniteError, UndefinedError
from camscope.evaluation import Measures, measure
from camscope.explainers import METHODS, Explainer
from camscope.metrics import Randomised as Found
from camscope.metrics import randomisation
from camscope.metrics.explainer_probe import Probe
from camscope.metrics.input_transforms import ACQUISITION, Change
from camscope.metrics.robustness import USUAL, held
from camscope.metrics.statistics import estimated
from camscope.safe_files import path_in

FAITHFULNESS_METRICS = (
    "lerf-morf-gap", "deletion", "insertion", "aopc", "necessity", "sufficiency", "average-drop", "average-gain", "road",
)  # fmt: skip


def faithfulness(subject: Subject) -> Measured:
    """Of images with each finding, drawn by the seed."""
    return measured(subject, "faithfulness", subject.config.sizes.faithfulness, 1, FAITHFULNESS_METRICS)


ROBUSTNESS_METRICS = (
    "stability",
    "acquisition-stability",
    "max-sensitivity",
    "determinism",
    "batch-invariance",
    "random-logit",
)
CHANGES: Mapping[str, Sequence[Change]] = {"stability": USUAL, "acquisition-stability": ACQUISITION}
SALT = 2


def robustness(subject: Subject) -> Measured:
    """Of images with each finding, drawn by the seed."""
    made = measured(subject, "robustness", subject.config.sizes.robustness, SALT, ROBUSTNESS_METRICS)
    return made.model_copy(update={"held": tuple(_held(subject))}) if made.tested else made


def _held(subject: Subject) -> Iterator[Held]:
    """How often the answer itself held under the changes of each stability."""
    for finding in subject.findings:
        rows = subject.sampled(subject.config.sizes.robustness, SALT, finding, only=True)
        patients = [subject.patients[row] for row in rows]
        for name, (shares, why) in _shares(subject, finding, rows).items() if rows else ():
            share = (
                number(None, reason=why)
                if why
                else number(estimated(shares, patients, bounds=(0.0, 1.0), **subject.how))
            )
            yield Held(metric=name, finding=finding.name, share=share)


def _shares(subject: Subject, finding: Finding, rows: Sequence[int]) -> dict[str, tuple[list[float], str]]:
    """Stability -> of each image the share of its changes under which the answer held, or why there is none."""
    found: dict[str, tuple[list[float], str]] = {name: ([], "") for name in CHANGES}
    for batch in subject.batches(rows):
        x = subject.on_device(batch)
        probe = Probe.of(subject.tools[0], x, [finding.index] * len(x))
        for name, changes in CHANGES.items():
            try:
                found[name][0].extend(held(probe, changes).tolist())
            except GeometryError as error:  # pictures are compressed, and signals are not
                found[name] = [], str(error)
    return found


SEEDS = (0, 1, 2)
LEAST = 5  # images, for what maps of different images have in common


def sanity(subject: Subject) -> Sanity:
    """Cascading randomisation of the parameters, output first, for each finding's images."""
    tools: list[tuple[Explainer, bool]] = [(tool, False) for tool in subject.tools]
    tools.append((METHODS["edges"](subject.model), True))
    made, images, done = [], set[int](), 0
    for finding in subject.findings:
        x, rows = _of_one_size(subject, subject.sampled(subject.config.sizes.sanity, 3, finding, only=True))
        if len(x) < LEAST:
            continue
        images.update(rows)
        patients = [subject.numbers[row] for row in rows]
        for tool, control in tools:
            subject.told(done := done + 1, len(tools) * len(subject.findings))
            made.append(_tested(subject, tool, x, patients, finding, control))
    if not made:
        return Sanity(tested=False, reason=f"fewer than {LEAST} images with a finding share a size")
    return Sanity(images=len(images), tests=tuple(made))


def _of_one_size(subject: Subject, rows: list[int]) -> tuple[Tensor, list[int]]:
    """The images of the usual size, and their rows."""
    read = zip(rows, subject.loaded(rows), strict=True)
    items = {row: one.item.x for row, one in read if one.item is not None}
    if not items:
        return torch.empty(0, dtype=torch.float32, device="cpu"), []
    usual = Counter(tuple(one.shape) for one in items.values()).most_common(1)[0][0]
    kept = {row: one for row, one in items.items() if tuple(one.shape) == usual}
    first = next(subject.model.parameters())
    return torch.stack(list(kept.values())).to(first.device, first.dtype), list(kept)


def _tested(
    subject: Subject, tool: Explainer, x: Tensor, patients: Sequence[Hashable], finding: Finding, control: bool
) -> Randomised:
    try:
        found = randomisation(tool, x, [finding.index] * len(x), seeds=SEEDS)
    except (NonFiniteError, UndefinedError) as error:
        return Randomised(
            method=tool.title, finding=finding.name, steps=(), seeds=SEEDS, similarities=(), passes=None,
            reason=str(error), control=control,
        )  # fmt: skip
    return Randomised(
        method=tool.title,
        finding=finding.name,
        steps=found.steps,
        seeds=found.seeds,
        similarities=tuple(_similarity(found, name, patients, subject.how) for name in found.values),
        passes=None if found.undecided else found.passes,
        reason=found.undecided or _unsaid(found),
        control=control,
    )


def _unsaid(found: Found) -> str:
    """Why there is neither a pass nor a failure; "" where there is one."""
    open_ones = [one.reason for one in found.verdicts.values() if one.passes is None]
    return open_ones[0] if found.passes is None else ""


def _similarity(found: Found, name: str, patients: Sequence[Hashable], how: dict[str, int]) -> Similarity:
    low, null, high = found.null_interval(name)
    verdict = None if found.undecided else found.verdicts[name]
    return Similarity(
        name=name,
        curve=tuple(rounded(float(one)) for one in found.curve(name)),
        low=rounded(low),
        null=rounded(null),
        high=rounded(high),
        passes=verdict.passes if verdict else None,
        reason=verdict.reason if verdict else found.undecided,
        end=_end(found, name, patients, how),
    )


def _end(found: Found, name: str, patients: Sequence[Hashable], how: dict[str, int]) -> Number:
    """How alike the maps are when all training is lost: a patient's images are drawn together, with those of every seed."""
    last = found.values[name][:, -1]
    try:
        made = estimated(last.ravel(), [*patients] * len(last), bounds=(-1.0, 1.0), **how)
    except UndefinedError:
        return number(None, reason="no map has a number: there is nothing to compare")
    known = int((~np.isnan(last)).any(0).sum())
    return number(replace(made, n=known, undefined=last.shape[1] - known))


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


LOCALIZATION_METRICS = (
    "energy-inside", "enrichment", "pointing-game", "average-precision", "rank-accuracy", "iou-swept", "peak-distance",
    "effective-area",
)  # fmt: skip


def localise(subject: Subject) -> Measured:
    """Of images with a finding and with its place, finding by finding; into `localise/`."""
    if not subject.evidence:
        why = "no masks, boxes or points say where findings are: name evidence in [data]"
        return Measured(tested=False, reason=why)
    known = [one for one in subject.findings if one.name in subject.evidence]
    made = [(finding, _measured_localization(subject, finding)) for finding in known]
    found = [line for finding, values in made for line in _bounded(subject, values, finding)]
    if not any(line.value.n for line in found if line.metric == "enrichment" and not line.control):
        return Measured(tested=False, reason=f"no map has a value: {_why(subject, made)}")
    images = max(line.value.n for line in found if line.metric == "enrichment")
    levels = tuple(_levels(subject, made))
    return Measured(images=images, formulas=formulas(found), lines=tuple(found), levels=levels)


def _why(subject: Subject, made: Sequence[tuple[Finding, Measures]]) -> str:
    """What is said of most of the maps of images with a finding, and of how many."""
    said = Counter[str]()
    for finding, measures in made:
        maps = measures.table("not control and metric = 'enrichment'")
        said.update(one or "" for one in of_finding(subject, maps, finding, True)["reason"].to_pylist())
    return "; ".join(f"{why} ({count} x)" for why, count in said.most_common(3)) or "no image has the finding"


def _measured_localization(subject: Subject, finding: Finding) -> Measures:
    evidence = subject.evidence[finding.name]
    return measure(
        subject.maps,
        path_in(subject.folder, "localise", str(finding.index)),
        evidence,
        LOCALIZATION_METRICS,
        strict=False,
        told=subject.told,
    )


def _bounded(subject: Subject, measures: Measures, finding: Finding) -> Iterator[Line]:
    """The lines; of enrichment with the most that it can be: a uniform map has the area inside, and no map more than all."""
    own = of_finding(subject, measures.table(), finding, True)
    areas = [area for area in values(own, "energy-inside", "uniform", None).values() if area > 0]
    most = rounded(fmean(1 / area for area in areas)) if areas else None
    for line in lines(subject, measures, finding):
        yield line.model_copy(update={"most": most}) if line.metric == "enrichment" else line


def _levels(subject: Subject, made: Sequence[tuple[Finding, Measures]]) -> Iterator[Level]:
    """Whether the maps lie on a finding for some patients more than for others: the energy inside, by subgroup.

    Of the first method: the others look at the same images, and each question more makes all intervals wider.
    """
    tool = subject.tools[0]
    for finding, measures in made:
        own = of_finding(subject, grouped(subject, measures.table()), finding, True)
        inside = values(own, "energy-inside", tool.title, subject.about(tool)["layer"])
        if inside:
            yield from levels(subject, finding, inside, subject.config.margins.mass)
