"""verifying: whether an audit is still what it was: its files; with its config data, weights and rows computed again, too."""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from camscope.audit import provenance
from camscope.audit.answers.answered import Answered
from camscope.audit.answers.asking import logits_of, odds_of
from camscope.audit.audited import AuditRun
from camscope.audit.config import Config
from camscope.audit.digesting import of_input
from camscope.audit.report import unknown
from camscope.audit.subject import Subject
from camscope.audit.verdicts import verdicts
from camscope.audit.writing import GALLERY, REPORT, SUMMARY
from camscope.batch.manifest import arrow
from camscope.batch.query import as_dicts
from camscope.errors import CamscopeError, InputError

CLOSE = 1e-5  # of a map's largest value: other companions in a pass, another order of sums


@dataclass(frozen=True)
class Checked:
    """One thing that was looked at."""

    name: str
    holds: bool
    said: str


@dataclass(frozen=True)
class Verified:
    """All that was looked at."""

    checks: tuple[Checked, ...]

    @property
    def holds(self) -> bool:
        """Whether everything is as it was."""
        return all(one.holds for one in self.checks)


def verified(
    folder: str | os.PathLike[str],
    config: Config | str | os.PathLike[str] | None = None,
    *,
    rows: int = 8,
    seed: int = 0,
) -> Verified:
    """Every output against its digest. With the `config` also manifest, weights and code, and `rows` drawn by the seed again.

    InputError where no finished audit is.
    """
    place = Path(folder)
    try:
        written = (place / provenance.FILE).read_bytes()
    except OSError as error:
        raise InputError(f"{folder}: it has no {provenance.FILE}: no finished audit is here") from error
    known = _known(written)
    checks = [_sealed(known, written), *_outputs(place, known), _judged(place), _said(place, known)]
    if config is not None:
        checks += _again(place, Config.of(config), known, rows, seed)
    return Verified(tuple(checks))


def _known(written: bytes) -> dict[str, Any]:
    """What a provenance says; nothing, if it says nothing any more."""
    try:
        known = json.loads(written)
    except ValueError:
        return {}
    return known if isinstance(known, dict) else {}


def _part(known: Mapping[str, Any], name: str) -> dict[str, Any]:
    part = known.get(name)
    return part if isinstance(part, dict) else {}


def _sealed(known: dict[str, Any], written: bytes) -> Checked:
    try:
        same = known.get("seal") == provenance.seal(known) and provenance.as_written(known) == written
    except ValueError:  # a number that JSON does not have
        same = False
    return Checked(provenance.FILE, same, "as it was written" if same else "it was changed")


def _outputs(folder: Path, known: dict[str, Any]) -> Iterator[Checked]:
    there, then = provenance.files(folder), _part(known, "bytes")
    wrong = {
        name: "is missing" if name not in there else "was changed" for name in then if there.get(name) != then[name]
    }
    wrong |= {name: "was not there" for name in there if name not in then}
    yield Checked(
        "outputs",
        not wrong and bool(then),
        f"{len(then)} files" + (f", {len(wrong)} of them differ" if wrong else ", all as they were"),
    )
    for name, why in sorted(wrong.items())[:20]:
        yield Checked(name, False, why)


def _judged(folder: Path) -> Checked:
    """Whether the verdicts follow from the numbers."""
    try:
        summary = AuditRun(folder).summary
        same = tuple(verdicts(summary)) == summary.verdicts
    except CamscopeError as error:
        return Checked("summary", False, str(error))
    except Exception as error:  # a summary that was changed can be wrong in any way
        return Checked("verdicts", False, f"they do not follow from the numbers: {type(error).__name__}")
    return Checked(
        "verdicts",
        same,
        f"{len(summary.verdicts)} follow from the numbers" if same else "they do not follow from the numbers",
    )


def _said(folder: Path, known: dict[str, Any]) -> Checked:
    """Whether every number of the page is one of the files beside it."""
    try:
        summary, gallery = (json.loads((folder / name).read_bytes()) for name in (SUMMARY, GALLERY))
        wrong = unknown((folder / REPORT).read_text(encoding="utf-8"), summary, known, gallery)
    except Exception as error:  # files that were changed can be wrong in any way
        return Checked("numbers of the page", False, f"it cannot be read: {type(error).__name__}")
    return Checked("numbers of the page", not wrong, wrong[0] if wrong else "each is one of the files beside it")


def _again(folder: Path, config: Config, known: dict[str, Any], rows: int, seed: int) -> Iterator[Checked]:
    subject = Subject(config, folder)
    data, model = _part(known, "data"), _part(known, "model")
    for name, place, then in (
        ("weights file", config.model.weights, model.get("weights")),
        ("manifest file", config.data.manifest, data.get("manifest")),
    ):
        if then is not None:
            same = of_input(place) == then
            yield Checked(name, same, "the same bytes" if same else "other bytes")
    try:
        facts = provenance.identity(subject)
    except CamscopeError as error:
        yield Checked("inputs", False, str(error))
        return
    for name, there, words in (
        ("config", known.get("config_digest"), "margins, methods and sizes"),
        ("data", data.get("digest"), "every cell of the manifest"),
        ("masks", known.get("masks"), "evidence and regions, every file"),
        ("model", model.get("digest"), "weights and buffers"),
        ("source", model.get("code"), "the file whose function makes the model"),
        ("code", known.get("code"), "camscope itself"),
    ):
        same = facts[name] == there
        yield Checked(name, same, f"{words}: {'the same' if same else 'another'}")
    try:
        yield from _rows(subject, rows, seed)
    except Exception as error:  # tables that were changed can be wrong in any way
        yield Checked("rows", False, f"they cannot be computed again: {type(error).__name__}")


def _rows(subject: Subject, count: int, seed: int) -> Iterator[Checked]:
    """Images, answers and maps of some rows, made again from the files."""
    then = Answered.read(subject.folder)
    drawn = sorted(np.random.default_rng(seed).permutation(then.rows)[:count].tolist())
    table = subject.maps.dataset.to_table(filter=arrow("dataset").field("row").isin(drawn))
    maps = {(row["row"], row["method"], row["target"]): row for row in as_dicts(table)}
    for one in subject.loaded(drawn):
        row, name = one.row["row"], subject.ids[one.row["row"]]
        own = [known for (number, _, _), known in maps.items() if number == row]
        if one.item is None or any(one.sha256 != known["sha256"] for known in own):
            yield Checked(f"row {name}", False, "its image is another one")
            continue
        logits, _ = logits_of(subject, one.item.x[None])
        odds = odds_of(subject, logits, subject.findings, probabilities=then.probabilities).numpy()[0]
        before = then.odds[then.rows.index(row)]
        if not np.allclose(odds, before, rtol=1e-4, atol=1e-4):
            yield Checked(f"row {name}", False, "its answer is another one")
            continue
        made = subject.worker.rows(subject.worker.collated([one]))
        off = max(_off(again, maps[row, again["method"], again["target"]]) for again in made)
        yield Checked(f"row {name}", off <= CLOSE, f"{len(made)} maps, largest difference {off:.1e} of the maximum")


def _off(again: Any, then: Any) -> float:
    if again.get("heat") is None or then["heat"] is None:
        return 0.0 if again.get("heat") is None and then["heat"] is None else float("inf")
    one, other = np.asarray(again["heat"], np.float64), np.asarray(then["heat"], np.float64)
    if one.shape != other.shape:
        return float("inf")
    largest = float(np.abs(other).max())
    gap = float(np.abs(one - other).max())
    return gap / largest if largest > 0 else gap
