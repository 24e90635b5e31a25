"""provenance: everything that an audit was made of, by its digest, so that another can be told from it."""

import hashlib
import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from camscope.audit.subject import Subject
from camscope.batch.manifest import arrow
from camscope.batch.run import digest_of_table
from camscope.cards import digest
from camscope.files import write_bytes
from camscope.version import __version__

FILE, LOG = "provenance.json", "log.jsonl"
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
)
TIMES = ("seconds",)  # columns of a table that no second run repeats
REQUIRED = (
    "camscope", "code", "config", "config_digest", "data", "model", "rows", "seeds", "versions", "machine", "outputs", "started",
    "ended", "stages", "declared_before_looking",
)  # fmt: skip


def identity(subject: Subject) -> dict[str, str]:
    """What two starts of one audit have in common."""
    return {
        "camscope": __version__,
        "code": code(),
        "config": subject.config.digest,
        "data": digest_of_table(subject.manifest),
        "model": digest(subject.model),
    }


def code() -> str:
    """Of the source of camscope itself, 16 hex digits."""
    root, sha = Path(__file__).parents[1], hashlib.sha256()
    for path in sorted(root.rglob("*")):
        if path.suffix in (".py", ".html", ".css", ".csv"):
            sha.update(f"{path.relative_to(root).as_posix()}\n".encode() + path.read_bytes())
    return sha.hexdigest()[:16]


def note(folder: Path, event: Mapping[str, Any]) -> None:
    """A line of the log: what happened when. No audit's digest depends on it."""
    folder.mkdir(parents=True, exist_ok=True)
    line = json.dumps({"time": datetime.now(UTC).isoformat(timespec="seconds"), **event}, sort_keys=True)
    with (folder / LOG).open("a", encoding="utf-8") as file:
        file.write(line + "\n")


def events(folder: Path) -> list[dict[str, Any]]:
    """The lines of the log; one that was cut off is left out."""
    found = []
    for line in (folder / LOG).read_text(encoding="utf-8").splitlines() if (folder / LOG).is_file() else ():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def write(subject: Subject) -> dict[str, Any]:
    """`provenance.json`: after all other outputs, whose digests it holds."""
    said = events(subject.folder)
    made = facts(subject) | {
        "started": said[0]["time"] if said else None,
        "ended": said[-1]["time"] if said else None,
        "stages": {one["stage"]: one["seconds"] for one in said if "stage" in one},
        "rows": rows(subject),
        "outputs": outputs(subject.folder),
    }
    made["seal"] = seal(made)
    write_bytes(subject.folder / FILE, (json.dumps(made, indent=2, sort_keys=True, allow_nan=False) + "\n").encode())
    return made


def facts(subject: Subject) -> dict[str, Any]:
    """What an audit is made of, the same for every start of it on one machine."""
    config, known = subject.config, identity(subject)
    return {
        "schema_version": "camscope/audit-provenance/1",
        "camscope": __version__,
        "code": known["code"],
        "config": _discreet(subject),
        "config_digest": known["config"],
        "declared_before_looking": True,
        "data": {"digest": known["data"], "rows": len(subject.rows), "manifest": digest_of_input(config.data.manifest)},
        "model": {
            "digest": known["model"],
            "weights": digest_of_input(config.model.weights),
            "code": digest_of_input(config.model.source.rpartition(":")[0]),
            "parameters": sum(one.numel() for one in subject.model.parameters()),
        },
        "seeds": {"audit": config.seed, "replicates": config.replicates},
        "versions": {"python": platform.python_version(), **dict(_versions())},
        "machine": {
            "system": platform.system(),
            "processor": platform.machine(),
            "threads": torch.get_num_threads(),
            "device": config.model.device,
            "tf32": bool(torch.backends.cuda.matmul.allow_tf32),
            "deterministic": torch.are_deterministic_algorithms_enabled(),
        },
        "command": " ".join(["camscope", *sys.argv[1:2]]) if not subject.private else "camscope audit",
    }


def seal(made: Mapping[str, Any]) -> str:
    """Of all that a provenance says beside the seal itself, 64 hex digits."""
    rest = {name: value for name, value in made.items() if name != "seal"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def rows(subject: Subject) -> dict[str, str | None]:
    """Of every row its name and the sha256 of its file."""
    table = subject.maps.table(["id", "sha256"])
    return dict(sorted(zip(table["id"].to_pylist(), table["sha256"].to_pylist(), strict=True)))


def outputs(folder: Path) -> dict[str, str]:
    """Of every file that the same audit makes again, its digest; of tables without the times in them."""
    return dict(sorted(_outputs(folder)))


def _outputs(folder: Path) -> Iterator[tuple[str, str]]:
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if not path.is_file() or path.name in (FILE, LOG) or path.name.startswith("."):
            continue
        yield name, digest_ofdigest_of_input(path)


def digest_ofdigest_of_input(path: Path) -> str:
    """Of what a file says, 64 hex digits: of a table of its rows, whatever was compressed how."""
    if path.suffix != ".parquet":
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    table = arrow("parquet").read_table(path)
    kept = table.select([name for name in table.column_names if name not in TIMES]).combine_chunks()
    sink = arrow().BufferOutputStream()
    with arrow("ipc").new_stream(sink, kept.schema.remove_metadata()) as writer:
        writer.write_table(kept.replace_schema_metadata())
    return hashlib.sha256(sink.getvalue()).hexdigest()


def _discreet(subject: Subject) -> dict[str, Any]:
    """The config; in the profile "research" without places of files."""
    plain = subject.config.model_dump(mode="json")
    if subject.private:
        for part, name in (("data", "manifest"), ("data", "root"), ("model", "weights"), ("model", "source")):
            if isinstance(said := plain[part][name], str) and os.sep in said:
                plain[part][name] = Path(said).name if part == "model" else "a file"
        if plain["data"]["evidence"] and os.sep in plain["data"]["evidence"]:
            plain["data"]["evidence"] = "files"
    return plain


def digest_of_input(place: str | None) -> str | None:
    """The sha256 of a file, if it is one."""
    if not place or not Path(place).is_file():
        return None
    with Path(place).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _versions() -> Iterator[tuple[str, str]]:
    for name in PACKAGES:
        try:
            yield name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
