"""Provenance: what an audit was computed from, with digests, versions and a self-test of the metrics.

- provenance: everything that an audit was made of, by its digest, so that another can be told from it.
- self_test: whether metrics give here what one knows by hand, of a map that is even and of one that is all inside.
"""

import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from camscope.audit.core.context import AuditContext
from camscope.audit.performance.auc import auroc
from camscope.audit.provenance.digests import (
    NO_DIGEST,
    digest_content,
    digest_file,
    digest_masks,
    digest_model_source,
    digest_optional_file,
)
from camscope.batch.manifest import hash_manifest
from camscope.data_readers import MAX_JSON_BYTES, read_errors_converted
from camscope.metrics import METRICS
from camscope.model_card import compute_model_digest
from camscope.models import redact_file_names
from camscope.safe_files import make_folder, make_write_error, open_regular_file, read_bytes, write_bytes
from camscope.version import __version__

PROVENANCE_FILE, LOG_FILE = "provenance.json", "log.jsonl"
MAX_LOG = 2**28  # bytes
PARQUET = b"PAR1"  # with which a table begins and ends
PACKAGES = (
    "torch",
    "torchvision",
    "numpy",
    "pyarrow",
    "scipy",
    "scikit-learn",
    "scikit-image",
    "pydantic",
    "pydicom",
    "nibabel",
    "pillow",
    "matplotlib",
    "jinja2",
)
PREPROCESSING_COLUMNS = ("image_size", "input_size", "placement", "affine", "scan_steps")
NO_CHECKOUT = "not from a checkout"
FIELDS_NOT_ON_PAGE = (
    "started",
    "ended",
    "stages",
    "rows",
    "preprocessing",
    "outputs",
    "bytes",
    "completeness",
    "seal",
)  # not on the page
START_EVENT = "begun"  # the event of the log with which an audit begins
REQUIRED_FIELDS = (
    "camscope", "code", "config", "config_digest", "data", "masks", "model", "rows", "seeds", "versions", "machine", "outputs",
    "bytes", "started", "ended", "stages", "declarations", "declared_before_results", "commit", "preprocessing", "self_test",
)  # fmt: skip


def compute_identity(context: AuditContext) -> dict[str, str]:
    """What two starts of one audit have in common."""
    return {
        "camscope": __version__,
        "code": digest_code(),
        "config": context.config.digest,
        "data": hash_manifest(context.cohort.manifest),
        "model": compute_model_digest(context.model),
        "source": digest_model_source(context.config.model.source),
        "masks": digest_masks(context),
    }


@cache
def digest_code() -> str:
    """Of the source of camscope itself, 16 hex digits."""
    root, sha = Path(__file__).parents[2], hashlib.sha256()
    for path in sorted(root.rglob("*")):
        if path.suffix in (".py", ".html", ".css", ".csv"):
            sha.update(f"{path.relative_to(root).as_posix()}\n".encode() + path.read_bytes())
    return sha.hexdigest()[:16]


@cache
def describe_commit() -> str:
    """Of the checkout that camscope runs from, with "-dirty" behind it where files differ from it; else that there is none."""
    root, git = Path(__file__).parents[4], shutil.which("git")
    if git is None or not (root / ".git").exists() or not (root / "src" / "camscope").is_dir():
        return NO_CHECKOUT
    asked = [git, "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    alone = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}  # it only looks
    found = subprocess.run(asked, capture_output=True, text=True, check=False, env=alone)  # noqa: S603 - of our own words
    return found.stdout.strip() or "a checkout that git does not read"


def append_event(folder: Path, event: Mapping[str, Any]) -> None:
    """A line of the log: what happened when. No audit's digest depends on it."""
    make_folder(folder)
    line = json.dumps({"time": datetime.now(UTC).isoformat(timespec="seconds"), **event}, sort_keys=True)
    log = folder / LOG_FILE
    cut = log.is_file() and log.read_bytes()[-1:] not in (b"\n", b"")
    added = ("\n" if cut else "") + line + "\n"
    try:
        with log.open("a", encoding="utf-8") as file:
            file.write(added)
    except OSError as error:
        raise make_write_error(log, error, len(added.encode())) from error


def read_events(folder: Path) -> list[dict[str, Any]]:
    """The lines of the log; one that was cut off is left out."""
    log, found = folder / LOG_FILE, []
    with read_errors_converted(f"{log}: this is no log of an audit"):
        said = read_bytes(log, MAX_LOG).decode("utf-8", errors="replace") if log.is_file() else ""
    for line in said.splitlines():
        try:
            found.append(json.loads(line))
        except (ValueError, RecursionError):
            continue
    return [one for one in found if isinstance(one, dict)]


def log_audit_start(context: AuditContext, *, is_restart: bool) -> None:
    """Into the log: that an audit with this config begins; it stays there for all later ones in the folder.

    Not where one goes on that was stopped; `is_restart`: it does not.
    """
    known = list_config_digests(context.folder)
    if is_restart or not known or known[-1] != context.config.digest:
        append_event(context.folder, {"event": START_EVENT, "config": context.config.digest})


def list_config_digests(folder: Path) -> list[str]:
    """The digest of the config of each audit that was begun in a folder, in order."""
    return [str(one.get("config")) for one in read_events(folder) if one.get("event") == START_EVENT]


def count_declarations(folder: Path, config_digest: str) -> dict[str, int | bool]:
    """How many different configs there were in a folder, and whether this one is the first of them."""
    known = list(dict.fromkeys(list_config_digests(folder))) or [config_digest]
    return {"declarations": len(known), "declared_before_results": known[0] == config_digest}


def _latest_audit_events(log_events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The events of the audit that was begun last."""
    last = max((n for n, one in enumerate(log_events) if one.get("event") == START_EVENT), default=0)
    return log_events[last:]


def write_provenance(context: AuditContext, identity: Mapping[str, str]) -> dict[str, Any]:
    """`provenance.json`: after all other outputs, whose digests it holds."""
    said = _latest_audit_events(read_events(context.folder))
    made = collect_facts(context, identity) | {
        "started": said[0]["time"] if said else None,
        "ended": said[-1]["time"] if said else None,
        "stages": {one["stage"]: one["seconds"] for one in said if "stage" in one},
        "rows": read_map_image_digests(context),
        "preprocessing": digest_preprocessing(context),
        "outputs": digest_outputs(context.folder),
        "bytes": digest_files(context.folder),
    }
    made["completeness"] = sum(made.get(name) is not None for name in REQUIRED_FIELDS) / len(REQUIRED_FIELDS)
    made["seal"] = compute_seal(made)
    write_bytes(context.folder / PROVENANCE_FILE, serialize_record(made))
    return made


def serialize_record(record: Mapping[str, Any]) -> bytes:
    """The one way in which a provenance stands in its file."""
    return (json.dumps(record, indent=2, sort_keys=True, allow_nan=False) + "\n").encode()


def collect_facts(context: AuditContext, identity: Mapping[str, str]) -> dict[str, Any]:
    """What an audit is made of, the same for every start of it on one machine."""
    config = context.config
    return {
        "schema_version": "camscope/audit-provenance/1",
        "camscope": __version__,
        "code": identity["code"],
        "commit": describe_commit(),
        "config": _redact_config(context),
        "config_digest": identity["config"],
        **count_declarations(context.folder, identity["config"]),
        "data": {
            "digest": identity["data"],
            "rows": len(context.cohort.rows),
            "manifest": digest_optional_file(config.data.manifest),
        },
        "masks": identity["masks"],
        "model": {
            "digest": identity["model"],
            "weights": digest_optional_file(config.model.weights),
            "code": identity["source"],
            "parameters": sum(one.numel() for one in context.model.parameters()),
            "numbers": sorted({str(one.dtype).removeprefix("torch.") for one in context.model.parameters()}),
            "loaded": "strictly: no key was missing, and none too many" if config.model.weights else "by its source",
        },
        "self_test": run_self_test(),
        "seeds": {"audit": config.seed, "replicates": config.n_resamples},
        "versions": {
            "python": platform.python_version(),
            **{name: one for name, one in iter_package_versions(PACKAGES) if one is not None},
            **({"cuda": torch.version.cuda} if torch.version.cuda else {}),
        },
        "machine": {
            "system": platform.system(),
            "processor": platform.machine(),
            "threads": torch.get_num_threads(),
            "device": config.model.device,
            "tf32": bool(torch.backends.cuda.matmul.allow_tf32),
            "deterministic": torch.are_deterministic_algorithms_enabled(),
        },
        "command": " ".join(["camscope", *sys.argv[1:2]]) if not context.cohort.hides_file_names else "camscope audit",
    }


def compute_seal(record: Mapping[str, Any]) -> str:
    """Of all that a provenance says beside the seal itself, 64 hex digits."""
    rest = {name: value for name, value in record.items() if name != "seal"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def read_map_image_digests(context: AuditContext) -> dict[str, str | None]:
    """Of every row its name and the sha256 of its file."""
    table = context.maps.table(["id", "sha256"])
    return dict(sorted(zip(table["id"].to_pylist(), table["sha256"].to_pylist(), strict=True)))


def update_image_digests(context: AuditContext, image_digests: Mapping[str, str | None]) -> dict[str, str | None]:
    """Return the digests of the images as the maps were computed from them; `image_digests` of those without a map."""
    return {
        **image_digests,
        **{name: digits for name, digits in read_map_image_digests(context).items() if digits is not None},
    }


def digest_preprocessing(context: AuditContext) -> dict[str, str]:
    """Of every row its name and 16 hex digits of what was done to its image: sizes, placement, and of a scan each step."""
    made: dict[str, str] = {}
    for row in context.maps.table(["id", *PREPROCESSING_COLUMNS]).to_pylist():
        name = row.pop("id")
        if name not in made or row["input_size"] is not None:  # one method may fail where another does not
            made[name] = hashlib.sha256(json.dumps(row, sort_keys=True).encode()).hexdigest()[:16]
    return dict(sorted(made.items()))


def select_page_fields(record: Mapping[str, Any]) -> dict[str, Any]:
    """What of a provenance stands in the report, which is made before it."""
    return {name: value for name, value in record.items() if name not in FIELDS_NOT_ON_PAGE}


def digest_outputs(folder: Path) -> dict[str, str]:
    """Of every file that the same audit makes again, the digest of what it says; of tables without the times in them."""
    made = (
        (name, path) for name, path in _iter_output_files(folder) if name != LOG_FILE and not path.name.startswith(".")
    )
    return {name: digest_content(path) for name, path in made}


def digest_files(folder: Path) -> dict[str, str]:
    """Of every file beside the provenance itself, the digest of its bytes; of one that cannot be read, "none"."""
    return {name: _digest_or_placeholder(path) for name, path in _iter_output_files(folder)}


def _iter_output_files(folder: Path) -> Iterator[tuple[str, Path]]:
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if (path.is_file() or path.is_symlink()) and name != PROVENANCE_FILE:
            yield name, path


def _digest_or_placeholder(path: Path) -> str:
    """A table that is not whole, and a file that is too large to be read, is not read for its digest either."""
    table = path.suffix == ".parquet"
    try:
        return digest_file(path, None if table else MAX_JSON_BYTES) if not table or _is_whole(path) else NO_DIGEST
    except OSError:
        return NO_DIGEST


def _is_whole(table: Path) -> bool:
    with open_regular_file(table) as file:
        first = file.read(len(PARQUET))
        file.seek(-min(len(first), len(PARQUET)), os.SEEK_END)
        return first == PARQUET == file.read()


def _redact_config(context: AuditContext) -> dict[str, Any]:
    """The config; in the profile "research" without names of files, and of the model's source the bare function."""
    if not context.cohort.hides_file_names:
        return context.config.model_dump(mode="json")
    plain = context.config.to_redacted_dict()
    plain["model"]["source"] = redact_file_names(plain["model"]["source"])
    return plain


def iter_package_versions(packages: Iterable[str]) -> Iterator[tuple[str, str | None]]:
    """Of each package; None of one that is not there."""
    for name in packages:
        try:
            yield name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield name, None


MAP_SIDE, MASK_SIDE = 8, 4
EXPECTED_VALUES = {
    "energy-inside": (0.25, 1.0),
    "enrichment": (1.0, 4.0),
    "pointing-game": (0.25, 1.0),
    "average-precision": (0.25, 1.0),
}  # of an even map, and of one that is the mask: a quarter of the image


@cache
def run_self_test() -> str:
    """That it passed, or what is wrong."""
    return "; ".join(_find_failures()) or "passed"


def _find_failures() -> Iterator[str]:
    mask = np.zeros((MAP_SIDE, MAP_SIDE), np.bool_)
    mask[:MASK_SIDE, :MASK_SIDE] = True
    for name, known in EXPECTED_VALUES.items():
        for heat, expected in zip((np.ones((MAP_SIDE, MAP_SIDE)), mask.astype(np.float64)), known, strict=True):
            if abs((found := float(METRICS[name](heat, mask))) - expected) > 1e-9:
                yield f"{name} is {found} and not {expected}"
    odds, truth = np.arange(20.0), np.arange(20) >= 10
    for answers, area in ((odds, 1.0), (odds[[*range(9), 10, 9, *range(11, 20)]], 0.99)):
        if abs((mean := auroc(truth, answers, n_resamples=200).mean) - area) > 1e-9:
            yield f"AUROC is {mean} and not {area}"
