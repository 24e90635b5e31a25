"""Write and read `provenance.json` and the log of an audit, with digests of inputs and outputs."""

import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import torch

from camscope.atomic_writes_and_folder_locks import (
    build_write_error,
    make_folder,
    open_regular_file,
    read_bytes,
    write_bytes,
)
from camscope.audit.core.audit_context import AuditContext
from camscope.audit.provenance.digests import (
    NO_DIGEST,
    digest_file,
    digest_file_content,
    digest_masks,
    digest_model_source,
    digest_optional_file,
)
from camscope.batch.image_manifest import hash_manifest
from camscope.loaded_model_metadata_and_weight_digest import compute_model_digest
from camscope.models import redact_file_names
from camscope.read_untrusted_files import read_errors_converted
from camscope.version import __version__

PROVENANCE_FILE, LOG_FILE = "provenance.json", "log.jsonl"
MAX_LOG_BYTES, MAX_OUTPUT_BYTES = 2**28, 2**30  # of the log, and of any other file except tables
PARQUET_MAGIC = b"PAR1"  # at both ends of a file
PACKAGES = (
    "torch", "torchvision", "numpy", "pyarrow", "scipy", "scikit-learn", "scikit-image", "pydantic", "pydicom", "nibabel",
    "pillow", "simplejpeg", "matplotlib", "jinja2",
)  # fmt: skip
PREPROCESSING_COLUMNS = ("image_size", "input_size", "placement", "affine", "scan_steps")
START_EVENT = "begun"  # event of the log when an audit starts


def compute_digests_of_config_data_and_weights(context: AuditContext) -> dict[str, str]:
    """Return the digests of the config, the data, the masks, the model, its source and the code, and the version.

    An audit can only resume with unchanged digests.
    """
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
    """Return the digest of the camscope source code as 16 hex digits."""
    root, sha = Path(__file__).parents[2], hashlib.sha256()
    for path in sorted(root.rglob("*")):
        if path.suffix in (".py", ".html", ".css", ".csv"):
            sha.update(f"{path.relative_to(root).as_posix()}\n".encode() + path.read_bytes())
    return sha.hexdigest()[:16]


@cache
def describe_commit() -> str:
    """Return the git commit of the camscope source. It ends with "-dirty" if files were changed."""
    root, git = Path(__file__).parents[4], shutil.which("git")
    if git is None or not (root / ".git").exists() or not (root / "src" / "camscope").is_dir():
        return "not from a checkout"
    command = [git, "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}  # read-only
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)  # noqa: S603 - fixed arguments
    return result.stdout.strip() or "a checkout that git cannot read"


def append_event(folder: Path, event: Mapping[str, Any]) -> None:
    """Append an event to the log of a folder. The current time is added to the event."""
    make_folder(folder)
    line = json.dumps({"time": datetime.now(UTC).isoformat(timespec="seconds"), **event}, sort_keys=True)
    log = folder / LOG_FILE
    cut = log.is_file() and not _ends_with_newline(log)
    added = ("\n" if cut else "") + line + "\n"
    try:
        with log.open("a", encoding="utf-8") as file:
            file.write(added)
    except OSError as error:
        raise build_write_error(log, error, len(added.encode())) from error


def _ends_with_newline(path: Path) -> bool:
    """Return whether a file ends with a newline. An empty file counts as such."""
    with open_regular_file(path) as file:
        if not (size := file.seek(0, os.SEEK_END)):
            return True
        file.seek(size - 1)
        return file.read(1) == b"\n"


def read_events(folder: Path) -> list[dict[str, Any]]:
    """Return the events in the log of a folder. A truncated line is skipped."""
    log, events = folder / LOG_FILE, []
    with read_errors_converted(f"{log} is not a valid audit log"):
        text = read_bytes(log, MAX_LOG_BYTES).decode("utf-8", errors="replace") if log.is_file() else ""
    for line in text.splitlines():
        try:
            events.append(json.loads(line))
        except (ValueError, RecursionError):
            continue
    return [event for event in events if isinstance(event, dict)]


def log_audit_start(context: AuditContext, *, is_restart: bool) -> None:
    """Log that an audit starts with this config. Resuming the audit adds no second entry.

    `is_restart`: the audit starts from scratch.
    """
    config_digests = list_config_digests(context.folder)
    if is_restart or not config_digests or config_digests[-1] != context.config.digest:
        append_event(context.folder, {"event": START_EVENT, "config": context.config.digest})


def list_config_digests(folder: Path) -> list[str]:
    """Return the config digest of every audit that was started in a folder, oldest first."""
    return [str(event.get("config")) for event in read_events(folder) if event.get("event") == START_EVENT]


def write_provenance(context: AuditContext, identity: Mapping[str, str]) -> dict[str, Any]:
    """Write `provenance.json` and return its content. The file is written last, because it lists the digests of all outputs."""
    events = read_events(context.folder)
    start = max((n for n, event in enumerate(events) if event.get("event") == START_EVENT), default=0)
    events = events[start:]  # of the latest audit
    record = collect_provenance_facts(context, identity) | {
        "started": events[0]["time"] if events else None,
        "ended": events[-1]["time"] if events else None,
        "stages": {event["stage"]: event["seconds"] for event in events if "stage" in event},
        "rows": read_explained_image_digests(context),
        "preprocessing": compute_preprocessing_digests_by_image(context),
        "outputs": digest_outputs(context.folder),
        "bytes": digest_files(context.folder),
    }
    record["seal"] = compute_seal(record)
    write_bytes(context.folder / PROVENANCE_FILE, serialize_record(record))
    return record


def serialize_record(record: Mapping[str, Any]) -> bytes:
    """Convert a record to JSON bytes. Equal records give equal bytes."""
    return (json.dumps(record, indent=2, sort_keys=True, allow_nan=False) + "\n").encode()


def collect_provenance_facts(context: AuditContext, identity: Mapping[str, str]) -> dict[str, Any]:
    """Collect the facts for `provenance.json` about the inputs, the model and the machine."""
    config, parameters = context.config, list(context.model.parameters())
    config_digests = list(dict.fromkeys(list_config_digests(context.folder))) or [identity["config"]]
    return {
        "schema_version": "camscope/audit-provenance/2",
        "camscope": __version__,
        "code": identity["code"],
        "commit": describe_commit(),
        "config": _redact_config(context),
        "config_digest": identity["config"],
        "declarations": len(config_digests),  # the different configs used in the folder
        "declared_before_results": config_digests[0] == identity["config"],
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
            "parameters": sum(parameter.numel() for parameter in parameters),
            "numbers": sorted({str(parameter.dtype).removeprefix("torch.") for parameter in parameters}),
            "loaded": "strictly: no missing and no unexpected keys" if config.model.weights else "by the model source",
        },
        "seeds": {"audit": config.seed, "replicates": config.n_resamples},
        "versions": {
            "python": platform.python_version(),
            **_list_package_versions(),
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
    """Return the digest of a provenance record. The record's `seal` entry is left out of the computation."""
    unsealed = {name: value for name, value in record.items() if name != "seal"}
    return hashlib.sha256(json.dumps(unsealed, sort_keys=True).encode()).hexdigest()


def read_explained_image_digests(context: AuditContext) -> dict[str, str | None]:
    """Return a dict from image id to the digest of the explained image file."""
    table = context.maps.table(["id", "sha256"])
    return dict(sorted(zip(table["id"].to_pylist(), table["sha256"].to_pylist(), strict=True)))


def replace_digests_of_explained_images(
    context: AuditContext, image_digests: Mapping[str, str | None]
) -> dict[str, str | None]:
    """Replace the digest of each image that has maps. The new digest is of the file from which the maps were computed."""
    map_image_digests = read_explained_image_digests(context).items()
    return {**image_digests, **{name: digest for name, digest in map_image_digests if digest is not None}}


def compute_preprocessing_digests_by_image(context: AuditContext) -> dict[str, str]:
    """Return a dict from image id to a digest of the preprocessing: sizes, placement and scan steps."""
    digests: dict[str, str] = {}
    for row in context.maps.table(["id", *PREPROCESSING_COLUMNS]).to_pylist():
        name = row.pop("id")
        if name not in digests or row["input_size"] is not None:  # one method may fail where another succeeds
            digests[name] = hashlib.sha256(json.dumps(row, sort_keys=True).encode()).hexdigest()[:16]
    return dict(sorted(digests.items()))


def digest_outputs(folder: Path) -> dict[str, str]:
    """Return a dict from file name to a digest of the content, for all reproducible outputs. Time columns do not matter."""
    return {
        name: digest_file_content(path)
        for name, path in _iter_output_files(folder)
        if name != LOG_FILE and not path.name.startswith(".")
    }


def digest_files(folder: Path) -> dict[str, str]:
    """Return a dict from file name to the digest of the bytes. An unreadable file gets the digest "none".

    A truncated table and any other file above the size limit count as unreadable.
    """
    digests = {}
    for name, path in _iter_output_files(folder):
        digests[name] = NO_DIGEST
        with suppress(OSError):
            if path.suffix != ".parquet":
                digests[name] = digest_file(path, MAX_OUTPUT_BYTES)
            elif _is_complete_parquet_file(path):
                digests[name] = digest_file(path)
    return digests


def _iter_output_files(folder: Path) -> Iterator[tuple[str, Path]]:
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if (path.is_file() or path.is_symlink()) and name != PROVENANCE_FILE:
            yield name, path


def _is_complete_parquet_file(path: Path) -> bool:
    with open_regular_file(path) as file:
        start = file.read(len(PARQUET_MAGIC))
        file.seek(-len(start), os.SEEK_END)
        return start == PARQUET_MAGIC == file.read()


def _redact_config(context: AuditContext) -> dict[str, Any]:
    """Return the config as stored in the provenance. With the profile "research", file names are hidden."""
    if not context.cohort.hides_file_names:
        return context.config.model_dump(mode="json")
    redacted = context.config.to_redacted_dict()
    redacted["model"]["source"] = redact_file_names(redacted["model"]["source"])
    return redacted


@cache
def _list_package_versions() -> dict[str, str]:
    versions = {}
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions
