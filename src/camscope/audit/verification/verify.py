"""verifying: whether an audit is still what it was: its files; with its config data, weights and rows computed again, too."""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from camscope.audit.audit_run import AuditRun, expect_readable
from camscope.audit.core.config import Config
from camscope.audit.core.context import Subject, Told
from camscope.audit.core.output_tables import GALLERY, METRICS, REPORT, SUMMARY, metrics
from camscope.audit.provenance import provenance
from camscope.audit.provenance.digests import of_images, of_input, others
from camscope.audit.report import Pictures, page, unknown, unpictured
from camscope.audit.verdicts import verdicts
from camscope.audit.verification.recompute import LEFT, Checked, following, recomputed
from camscope.data_readers import MAX_JSON, read_json
from camscope.errors import CamscopeError, InputError
from camscope.plurals import plural
from camscope.safe_files import read_bytes

UNREADABLE = (ValueError, RecursionError, MemoryError)  # what reading and writing damaged JSON raises
NAMED = 5  # images that are other ones
DRAWN_BY = ("matplotlib", "jinja2")  # what a page looks like depends on these


@dataclass(frozen=True)
class Verified:
    """All that was looked at; `left`: what was not computed again."""

    checks: tuple[Checked, ...]
    left: tuple[str, ...] = ()

    @property
    def holds(self) -> bool:
        """Whether everything is as it was."""
        return all(one.holds for one in self.checks)


def verified(
    folder: str | os.PathLike[str],
    config: Config | Mapping[str, Any] | str | os.PathLike[str] | None = None,
    *,
    rows: int = 8,
    seed: int = 0,
    told: Told | None = None,
) -> Verified:
    """Every output against its digest, the words against the numbers, and the numbers against the tables.

    With the `config` also manifest, images, weights and code, and `rows` drawn by the seed again. `told`: how many images are
    read, of how many. InputError where no finished audit is.
    """
    place = Path(folder)
    expect_readable(place)
    try:
        written = read_bytes(place / provenance.FILE, MAX_JSON)
    except FileNotFoundError as error:
        raise InputError(f"{folder}: it has no {provenance.FILE}: no finished audit is here") from error
    except NotADirectoryError as error:
        raise InputError(f"{folder}: it is a file; expected the folder of an audit") from error
    except (OSError, MemoryError) as error:
        why = getattr(error, "strerror", None) or "there is not enough memory for it"
        raise InputError(f"{folder}: {provenance.FILE} cannot be read: {why}") from error
    known = _known(written)
    checks = [_sealed(known, written), *_outputs(place, known), _declared(place, known)]
    sound = all(one.holds for one in checks)  # else it is known by now that something was changed
    checks += [_judged(place), _said(place, known)]
    if sound:
        checks += [*_followed(place), _worded(place, known)]
    if config is None:
        return Verified(tuple(checks))
    subject = Subject(Config.of(config), place)
    checks += [*_inputs(subject, known), *_images(subject, known, told), *_again(subject, rows, seed)]
    return Verified(tuple(checks), LEFT)


def _known(written: bytes) -> dict[str, Any]:
    """What a provenance says; nothing, if it says nothing any more."""
    try:
        known = json.loads(written)
    except UNREADABLE:
        return {}
    return known if isinstance(known, dict) else {}


def _part(known: Mapping[str, Any], name: str) -> dict[str, Any]:
    part = known.get(name)
    return part if isinstance(part, dict) else {}


def _sealed(known: dict[str, Any], written: bytes) -> Checked:
    try:
        same = known.get("seal") == provenance.seal(known) and provenance.as_written(known) == written
    except (*UNREADABLE, TypeError):  # a number that JSON does not have, names of unequal kinds
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
        plural(len(then), "file") + (f", {len(wrong)} of them differ" if wrong else ", all as they were"),
    )
    for name, why in sorted(wrong.items())[:20]:
        yield Checked(name, False, why)


def _declared(folder: Path, known: dict[str, Any]) -> Checked:
    """Whether it says how often something was declared as the log does."""
    try:
        there = provenance.declarations(folder, str(known.get("config_digest")))
    except CamscopeError as error:
        return Checked("declarations", False, str(error))
    same = all(known.get(name) == value for name, value in there.items())
    return Checked("declarations", same, "as in the log" if same else f"the log has {there['declarations']}")


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


def _followed(folder: Path) -> Iterator[Checked]:
    """Whether the numbers follow from the tables."""
    with suppress(InputError):  # it has no summary any more, as the verdicts say
        yield from following(AuditRun(folder))


def _said(folder: Path, known: dict[str, Any]) -> Checked:
    """Whether every number of the page is one of the files beside it."""
    try:
        summary, gallery = (read_json(folder / name) for name in (SUMMARY, GALLERY))
        wrong = unknown(_text(folder / REPORT), summary, known, gallery)
    except Exception as error:  # files that were changed can be wrong in any way
        return Checked("numbers of the page", False, f"it cannot be read: {type(error).__name__}")
    return Checked("numbers of the page", not wrong, wrong[0] if wrong else "each is one of the files beside it")


def _text(path: Path) -> str:
    return read_bytes(path, MAX_JSON).decode("utf-8")


def _worded(folder: Path, known: dict[str, Any]) -> Checked:
    """Whether the page, made again of the files beside it, is the same but for its pictures, whose digests are."""
    name, then = "words of the page", _part(known, "versions")
    if known.get("code") != provenance.code() or any(
        then.get(one) != now for one, now in provenance.versions(DRAWN_BY)
    ):
        return Checked(name, True, "they were written by another camscope, or with other packages: not written again")
    try:
        pictures = Pictures.of(read_json(folder / GALLERY))
        made = page(AuditRun(folder).summary, pictures, provenance.on_page(known))
        same = made == unpictured(_text(folder / REPORT))
    except Exception as error:  # files that were changed can be wrong in any way
        return Checked(name, False, f"it cannot be written again: {type(error).__name__}")
    return Checked(name, same, "written again they are the same" if same else "written again they are others")


def _inputs(subject: Subject, known: dict[str, Any]) -> Iterator[Checked]:
    config, data, model = subject.config, _part(known, "data"), _part(known, "model")
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


def _images(subject: Subject, known: dict[str, Any], told: Told | None) -> Iterator[Checked]:
    """Every image of the run by its bytes, and what is said of each beside."""
    try:
        images = of_images(subject, told)
        changed = others(images, _part(known, "rows"))
        named = ", ".join(changed[:NAMED]) + (", …" if len(changed) > NAMED else "")
        said = f"not the same bytes, {len(changed)} of {len(images)}: {named}" if changed else "the same bytes"
        yield Checked("images", not changed, said if changed else f"{len(images)}: {said}")
        yield _labelled(subject)
        same = AuditRun(subject.folder).metrics().equals(metrics(subject))
        yield Checked(METRICS, same, "as the stages measured it" if same else "the stages measured something else")
    except Exception as error:  # files that were changed can be wrong in any way
        yield Checked("images", False, f"they cannot be held against the tables: {type(error).__name__}")


def _labelled(subject: Subject) -> Checked:
    """Whether the truths and patients of the predictions are those of the manifest."""
    table = AuditRun(subject.folder).predictions()
    columns = {"patient": subject.numbers} | {f"truth {one.name}": subject.truths(one) for one in subject.findings}
    rows, wrong = table["row"].to_pylist(), []
    for name, known in columns.items():
        off = sum(known[row] != said for row, said in zip(rows, table[name].to_pylist(), strict=True))
        wrong += [f"the column {name!r} of the predictions has other values: {off} of {len(rows)}"] if off else []
    return Checked.of("labels", f"{len(rows)} and their patients, as in the manifest", wrong)


def _again(subject: Subject, rows: int, seed: int) -> Iterator[Checked]:
    try:
        yield from recomputed(subject, AuditRun(subject.folder), rows, seed)
    except Exception as error:  # tables that were changed can be wrong in any way
        yield Checked("rows", False, f"they cannot be computed again: {type(error).__name__}")
