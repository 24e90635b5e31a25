"""`--log FILE.jsonl`: an append-only log of a command for programs. Each event is one JSON object on one line."""

import contextlib
import datetime
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from camscope.errors import OutputError
from camscope.json_values import to_json_value

if TYPE_CHECKING:
    import typer

SCHEMA = "camscope/log/1"
# Arguments that name no file, no column and no person. The values of others are only logged with --profile clinical.
HARMLESS_PARAMETERS = frozenset(
    (
        "address", "allow_burned_in_text", "allow_outside_root", "as_json", "batch_size", "budget", "chunk_size",
        "device", "engine", "fetch", "imputation", "interpolation", "layer_names", "max_failures", "method_names",
        "metrics", "n_images", "n_steps", "num_threads", "num_workers", "overlay_height", "overlays", "overwrite",
        "preprocess", "profile", "reduced_decoding", "retry_failed", "seed", "shard", "target", "targets", "window",
    )
)  # fmt: skip
HIDDEN_VALUE = "hidden"
LOG_FIELDS = {
    "schema": "`camscope/log/1`",
    "event": "`start`, `progress`, `failed_image`, `error` or `end`",
    "time": "time in UTC, ISO 8601",
    "command": "start: the command",
    "versions.*": "start: versions of camscope, Python and PyTorch",
    "arguments.*": "start: the options, with `hidden` for file names, columns and settings unless `--profile clinical` is passed",
    "process": "start: the number of the process",
    "label": "progress: what is computed, such as `maps`",
    "done": "progress, end: finished steps, usually images",
    "total": "progress, end: all steps",
    "rate": "progress: steps per second since the start",
    "seconds_left": "progress: estimated time, or null",
    "n_failures": "progress, end: images without a map, or null",
    "id": "failed_image: the id of the image as the run has it, a pseudonym in the profile research",
    "reason": "failed_image: the reason, as the run has it",
    "kind": "failed_image: `transient` or `permanent`; error: class of the error",
    "message": "error: the error as one line, or `hidden`",
    "exit_code": "end: exit code of the command",
    "seconds": "end: time of the command",
}


class EventLog:
    """An append-only file of events. Each event is flushed, so that a killed process loses none."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.shows_paths = False
        self.last_progress: dict[str, Any] = {}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("a", encoding="utf-8")
        except OSError as error:
            raise OutputError(f"{path}: the log cannot be written: {error.strerror or error}") from error

    def write(self, event: str, **fields: Any) -> None:
        """Append an event. A log on a full disk does not end the command."""
        time = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        document = {"schema": SCHEMA, "event": event, "time": time, **to_json_value(fields)}
        if event == "progress":
            self.last_progress = {name: fields.get(name) for name in ("done", "total", "n_failures")}
        with contextlib.suppress(OSError):
            self._file.write(json.dumps(document, allow_nan=False) + "\n")
            self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class CommandEnd(NamedTuple):
    """How a command ends: its exit code, and the error, unless the command chose the exit code itself."""

    exit_code: int
    error_kind: str | None = None
    message: str = ""


_current: EventLog | None = None


def log_event(event: str, **fields: Any) -> None:
    """Append an event to the log of the running command. Without `--log`, do nothing."""
    if _current is not None:
        _current.write(event, **fields)


@contextlib.contextmanager
def event_log_scope(context: "typer.Context", describe_end: Callable[[BaseException], CommandEnd]) -> Iterator[None]:
    """Log the start and the end of a command that was passed `--log`, with its exit code.

    `describe_end` describes the error by which a command ends. The message of an error may contain a file name, so it is
    only logged with `--profile clinical`.
    """
    global _current
    path = context.params.get("log")
    if path is None:
        yield
        return
    import time

    from camscope.explainers.core.run_methods_in_shared_passes import get_library_versions

    log, started, exit_code = EventLog(path), time.monotonic(), 1
    log.shows_paths = context.params.get("profile") == "clinical"
    previous, _current = _current, log
    arguments = {
        name: value if log.shows_paths or value is None or name in HARMLESS_PARAMETERS else HIDDEN_VALUE
        for name, value in context.params.items()
    }
    command = context.command_path.removeprefix("camscope ")
    log.write("start", command=command, versions=get_library_versions(), arguments=arguments, process=os.getpid())
    try:
        yield
        exit_code = 0
    except BaseException as error:
        end = describe_end(error)
        exit_code = end.exit_code
        if end.error_kind is not None:
            log.write("error", kind=end.error_kind, message=end.message if log.shows_paths else HIDDEN_VALUE)
        raise
    finally:
        log.write("end", exit_code=exit_code, seconds=round(time.monotonic() - started, 3), **log.last_progress)
        log.close()
        _current = previous


def describe_log() -> str:
    """Write a reference of the fields of a log, as Markdown."""
    rows = "\n".join(f"| `{name}` | {text} |" for name, text in LOG_FIELDS.items())
    return f"| field | content |\n|---|---|\n{rows}"
