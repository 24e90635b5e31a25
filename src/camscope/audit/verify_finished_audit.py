"""Verify a finished audit: compare files with their digests, and recompute sampled rows."""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from camscope.atomic_writes_and_folder_locks import read_bytes
from camscope.audit.core.audit_context import AuditContext, ProgressCallback
from camscope.audit.core.config import Config
from camscope.audit.core.stored_predictions import Predictions
from camscope.audit.finished_audit import check_folder_readable
from camscope.audit.performance.compute_log_odds_and_features import compute_log_odds, compute_logits_and_mean_features
from camscope.audit.provenance import provenance_file
from camscope.audit.provenance.digests import digest_images, digest_optional_file, find_changed_images
from camscope.batch.image_manifest import import_arrow
from camscope.batch.sql_query import table_to_dicts
from camscope.errors import CamscopeError, InputError
from camscope.plurals import plural
from camscope.read_untrusted_files import MAX_JSON_BYTES, read_errors_converted

MAX_NAMES_SHOWN = 5  # of changed images
MAX_FILES_SHOWN = 20
RELATIVE_MAP_TOLERANCE = 1e-5  # relative to the maximum of a map; batches of other sizes differ by rounding
LOG_ODDS_TOLERANCE = 1e-4
NOT_RECOMPUTED = (
    "localization", "faithfulness", "sanity", "robustness", "interventions", "masked organs", "feature leakage",
    "attribution clusters",
)  # fmt: skip


@dataclass(frozen=True)
class CheckResult:
    """The result of one check. `name` is the checked file or part, and `message` the outcome."""

    name: str
    is_intact: bool
    message: str


@dataclass(frozen=True)
class VerificationResult:
    """The results of all checks. `not_recomputed` lists parts that are never recomputed."""

    checks: tuple[CheckResult, ...]
    not_recomputed: tuple[str, ...] = ()

    @property
    def is_intact(self) -> bool:
        """Whether every check passed."""
        return all(check.is_intact for check in self.checks)


def verify_audit(
    folder: str | os.PathLike[str],
    config: Config | Mapping[str, Any] | str | os.PathLike[str] | None = None,
    *,
    n_rows: int = 8,
    seed: int = 0,
    on_progress: ProgressCallback | None = None,
) -> VerificationResult:
    """Verify the files of a finished audit. If its config is given, verify the inputs and recompute some rows.

    Args:
        folder: The folder of the audit.
        config: The config of the audit; without it, inputs are not checked and no row is recomputed.
        n_rows: How many rows to recompute.
        seed: The seed of the sampled rows.
        on_progress: Called with the number of images read and their total.

    Returns:
        The result of every check.

    Raises:
        InputError: The folder holds no finished audit.

    """
    path = Path(folder)
    check_folder_readable(path)
    if path.is_file():
        raise InputError(f"{folder} is a file; expected the folder of an audit")
    if not (path / provenance_file.PROVENANCE_FILE).exists():
        raise InputError(f"{folder}: this folder holds no finished audit; {provenance_file.PROVENANCE_FILE} is missing")
    with read_errors_converted(f"{folder}: {provenance_file.PROVENANCE_FILE}"):
        content = read_bytes(path / provenance_file.PROVENANCE_FILE, MAX_JSON_BYTES)
    record, is_sealed = _parse_record_and_check_seal(content)
    seal_message = "unchanged" if is_sealed else "it was changed"
    checks = [
        CheckResult(provenance_file.PROVENANCE_FILE, is_sealed, seal_message),
        *_check_outputs(path, record),
    ]
    if config is None:
        return VerificationResult(tuple(checks))
    context = AuditContext(Config.from_source(config), path)
    checks += _check_inputs(context, record)
    checks += _run_check_or_report_error("images", lambda: _check_images(context, record, on_progress))
    checks += _run_check_or_report_error("rows", lambda: _recompute_rows(context, n_rows, seed))
    return VerificationResult(tuple(checks), NOT_RECOMPUTED)


def _parse_record_and_check_seal(content: bytes) -> tuple[dict[str, Any], bool]:
    """Parse the provenance record, and check it against its digest. Invalid JSON gives an empty record."""
    record: Any = {}
    try:
        record = json.loads(content)
        is_sealed = record["seal"] == provenance_file.compute_seal(record)
        is_sealed = is_sealed and provenance_file.serialize_record(record) == content
    except (ValueError, RecursionError, MemoryError, TypeError, KeyError, AttributeError):  # damaged in any way
        is_sealed = False
    return (record if isinstance(record, dict) else {}), is_sealed


def _get_table_or_empty(record: Mapping[str, Any], name: str) -> dict[str, Any]:
    part = record.get(name)
    return part if isinstance(part, dict) else {}


def _check_outputs(folder: Path, record: dict[str, Any]) -> Iterator[CheckResult]:
    """Yield whether all files of the audit have their recorded digests, then each file that differs."""
    current, recorded = provenance_file.digest_files(folder), _get_table_or_empty(record, "bytes")
    problems = {
        name: "is missing" if name not in current else "was changed"
        for name in recorded
        if current.get(name) != recorded[name]
    }
    problems |= {name: "was added" for name in current if name not in recorded}
    summary = f"{len(problems)} of them differ" if problems else "unchanged"
    yield CheckResult("outputs", not problems and bool(recorded), f"{plural(len(recorded), 'file')}, {summary}")
    for name, problem in sorted(problems.items())[:MAX_FILES_SHOWN]:
        yield CheckResult(name, False, problem)


def _check_inputs(context: AuditContext, record: dict[str, Any]) -> Iterator[CheckResult]:
    """Yield whether the weights, the data, the masks, the config and the code have their recorded digests."""
    config, data, model = context.config, _get_table_or_empty(record, "data"), _get_table_or_empty(record, "model")
    for name, path, digest in (
        ("weights file", config.model.weights, model.get("weights")),
        ("manifest file", config.data.manifest, data.get("manifest")),
    ):
        if digest is not None:
            is_same = digest_optional_file(path) == digest
            yield CheckResult(name, is_same, "unchanged" if is_same else "changed")
    try:
        identity = provenance_file.compute_digests_of_config_data_and_weights(context)
    except CamscopeError as error:
        yield CheckResult("inputs", False, str(error))
        return
    for name, digest, description in (
        ("config", record.get("config_digest"), "margins, methods and sizes"),
        ("data", data.get("digest"), "every cell of the manifest"),
        ("masks", record.get("masks"), "annotations and regions, every file"),
        ("model", model.get("digest"), "weights and buffers"),
        ("source", model.get("code"), "the source file of the model"),
        ("code", record.get("code"), "camscope itself"),
    ):
        is_same = identity[name] == digest
        yield CheckResult(name, is_same, f"{description}: {'unchanged' if is_same else 'changed'}")


def _run_check_or_report_error(name: str, check: Callable[[], Iterator[CheckResult]]) -> Iterator[CheckResult]:
    try:
        yield from check()
    except Exception as error:  # changed files can be wrong in any way
        yield CheckResult(name, False, f"they cannot be compared with the tables: {type(error).__name__}")


def _check_images(
    context: AuditContext, record: dict[str, Any], on_progress: ProgressCallback | None
) -> Iterator[CheckResult]:
    images = digest_images(context, on_progress)
    changed = find_changed_images(images, _get_table_or_empty(record, "rows"))
    names = ", ".join(changed[:MAX_NAMES_SHOWN]) + (", …" if len(changed) > MAX_NAMES_SHOWN else "")
    message = f"changed, {len(changed)} of {len(images)}: {names}" if changed else f"{len(images)}: unchanged"
    yield CheckResult("images", not changed, message)


def _recompute_rows(context: AuditContext, n_rows: int, seed: int) -> Iterator[CheckResult]:
    """Recompute the predictions and maps of `n_rows` sampled rows. Yield how they compare with the stored results."""
    predictions = Predictions.read(context.folder)
    order = np.random.default_rng(seed).permutation(len(predictions.rows))
    rows = sorted(predictions.rows[n] for n in order[:n_rows])
    table = context.maps.table(filter=import_arrow("dataset").field("row").isin(rows))
    stored_maps = {(map_["row"], map_["method"], map_["target"]): map_ for map_ in table_to_dicts(table)}
    for image in context.load_images(rows):
        row = image.row["row"]
        name = f"row {context.cohort.ids[row]}"
        digests = {map_["sha256"] for (map_row, _, _), map_ in stored_maps.items() if map_row == row}
        if image.item is None or digests - {image.sha256}:
            yield CheckResult(name, False, "the image differs")
            continue
        logits, _ = compute_logits_and_mean_features(context, image.item.x[None])
        log_odds = compute_log_odds(
            context, logits, context.findings, outputs_are_probabilities=predictions.outputs_are_probabilities
        )
        stored_log_odds = predictions.log_odds[predictions.rows.index(row)]
        if not np.allclose(log_odds.numpy()[0], stored_log_odds, LOG_ODDS_TOLERANCE, LOG_ODDS_TOLERANCE):
            yield CheckResult(name, False, "the prediction differs")
            continue
        maps = context.worker.compute_rows(context.worker.stack_model_inputs([image]))
        difference = max(
            _compute_map_difference(map_.get("attribution"), stored_maps[row, map_["method"], map_["target"]])
            for map_ in maps
        )
        message = f"{plural(len(maps), 'map')}, largest difference {difference:.1e} of the maximum"
        yield CheckResult(name, difference <= RELATIVE_MAP_TOLERANCE, message)


def _compute_map_difference(attribution: Any, stored_row: Mapping[str, Any]) -> float:
    """Return the largest difference between a recomputed map and the stored one, relative to the stored maximum.

    It is infinite if one map is missing or has another size.
    """
    stored = stored_row["attribution"]
    if attribution is None or stored is None:
        return 0.0 if attribution is stored else float("inf")
    recomputed, stored = np.asarray(attribution, np.float64), np.asarray(stored, np.float64)
    if recomputed.shape != stored.shape:
        return float("inf")
    return float(np.abs(recomputed - stored).max()) / (float(np.abs(stored).max()) or 1.0)
