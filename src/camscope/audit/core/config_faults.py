"""The faults of a config: collected, located by their line in the TOML file, and raised as one error."""

import copy
import difflib
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from camscope.errors import CamscopeError, ConfigError, MissingExtraError
from camscope.plurals import plural
from camscope.read_untrusted_files import MAX_ERROR_CHARACTERS

KeyPath = tuple[str, ...]
ConfigModel = TypeVar("ConfigModel", bound=BaseModel)
MAX_STATEMENT_LINES = 200  # of a list or text over several lines; a longer one has no line numbers after it
MAX_NAMES_LISTED = 12  # allowed names in a message
MIN_SIMILARITY = 0.6  # of a name to be called the nearest one
LIMIT_WORDING = {"ge": "{} or more", "gt": "more than {}", "le": "{} or less", "lt": "less than {}"}


@dataclass(frozen=True)
class ConfigFault:
    """A setting that cannot be used: its key, the reason, and the error of a check if one raised it."""

    key: KeyPath
    message: str
    error: CamscopeError | None = None


@dataclass(eq=False)
class FaultCollector:
    """Collects the faults of a config, so that all of them are reported at once.

    `source_name` is the name of the TOML file. `lines` maps each key to its line in the file.
    """

    source_name: str = "the config"
    lines: Mapping[KeyPath, int] = field(default_factory=dict)
    faults: list[ConfigFault] = field(default_factory=list)

    def add(self, key: str, message: str, error: CamscopeError | None = None) -> None:
        """Record a fault of a key such as `data.label`. An error that several checks raise is recorded once."""
        if error is None or message not in [fault.message for fault in self.faults]:
            self.faults.append(ConfigFault(tuple(key.split(".")), message, error))

    @contextmanager
    def collect(self, key: str) -> Iterator[None]:
        """Catch an error of the `with` block, and record it as a fault of `key`."""
        try:
            yield
        except MissingExtraError:
            raise
        except CamscopeError as error:
            self.add(key, str(error), error)

    def raise_if_any(self) -> None:
        """Raise one error that lists all faults. If there is only one fault, the error keeps its original type."""
        faults = sorted(self.faults, key=lambda fault: self.find_line(fault.key) or 0)
        if not faults:
            return
        if len(faults) == 1:
            error = faults[0].error
            if error is None:
                raise ConfigError(f"{self.source_name}: {self._format_fault(faults[0])}")
            if self.find_line(faults[0].key) is not None:
                error.args = (f"{self.source_name}: {self._format_fault(faults[0])}",)
            raise error
        listed = "\n".join(f"  {self._format_fault(fault)}" for fault in faults)
        raise ConfigError(f"{self.source_name} has {plural(len(faults), 'fault')}:\n{listed}")

    def find_line(self, key: KeyPath) -> int | None:
        """Return the line number of a key in the file. A missing key gets the line of the innermost table around the key."""
        return next((self.lines[key[:n]] for n in range(len(key), 0, -1) if key[:n] in self.lines), None)

    def _format_fault(self, fault: ConfigFault) -> str:
        line, name = self.find_line(fault.key), ".".join(fault.key)
        return f"{f'line {line}: ' if line is not None else ''}{name}: {fault.message}"


def find_key_lines(text: str) -> dict[KeyPath, int]:
    """Return the line number of each key and table in a valid TOML text. Lines count from 1."""
    lines: dict[KeyPath, int] = {}
    table: KeyPath = ()
    prefix: KeyPath = ()
    statement, start = "", 1
    for number, line in enumerate(text.splitlines(), 1):
        statement, start = (statement + line + "\n", start) if statement else (line + "\n", number)
        if number - start > MAX_STATEMENT_LINES:
            break
        try:
            parsed = tomllib.loads(statement)
        except ValueError:  # the statement continues in the next line
            continue
        paths = list(_iter_key_paths(parsed))
        if statement.lstrip().startswith("["):
            table = max(paths, key=len, default=())
            paths, prefix = [table[:n] for n in range(1, len(table) + 1)], ()
        else:
            prefix = table
        for path in paths:
            lines.setdefault((*prefix, *path), start)
        statement = ""
    return lines


def _iter_key_paths(parsed: Mapping[str, Any]) -> Iterator[KeyPath]:
    """Yield the path of every key in nested tables."""
    for key, value in parsed.items():
        yield (key,)
        if isinstance(value, Mapping):
            yield from ((key, *path) for path in _iter_key_paths(value))


def suggest_nearest_name(name: str, names: Iterable[str]) -> str:
    """Return a hint such as `; did you mean 'Label'?`. Return "" if no name is similar. Case is ignored."""
    by_lower_name = {other.casefold(): other for other in names}
    nearest = difflib.get_close_matches(name.casefold(), by_lower_name, n=1, cutoff=MIN_SIMILARITY)
    return f"; did you mean {by_lower_name[nearest[0]]!r}?" if nearest else ""


def join_names_with_limit(names: Sequence[str]) -> str:
    """Join names with commas. A long list is shortened and ends with the number of names."""
    more = f", … ({len(names)} in all)" if len(names) > MAX_NAMES_LISTED else ""
    return ", ".join(names[:MAX_NAMES_LISTED]) + more if names else "none"


def validate_tables(
    model: type[ConfigModel], tables: Mapping[str, Any], collector: FaultCollector
) -> ConfigModel | None:
    """Validate the tables of a config. Record every fault, not only the first.

    Return the config, with defaults in place of settings that have a fault, or None if a required setting has one.
    """
    remaining: dict[str, Any] = copy.deepcopy(dict(tables))
    removed: set[KeyPath] = set()
    while True:
        try:
            return model.model_validate(remaining)
        except ValidationError as error:
            new_faults = list(_iter_faults(model, remaining, error))
            for fault in new_faults:
                if fault.key[:2] not in removed:
                    collector.add(".".join(fault.key), fault.message)
            keys = {fault.key[:2] for fault in new_faults if _remove_if_present(remaining, fault.key[:2])}
            if not keys:
                return None
            removed |= keys


def _remove_if_present(tables: dict[str, Any], key: KeyPath) -> bool:
    """Remove a key from nested tables. Return whether the key existed."""
    for name in key[:-1]:
        if not isinstance(tables.get(name), dict):
            return tables.pop(name, None) is not None
        tables = tables[name]
    return bool(key) and tables.pop(key[-1], None) is not None


def _iter_faults(model: type[BaseModel], tables: Mapping[str, Any], error: ValidationError) -> Iterator[ConfigFault]:
    """Yield the faults of a validation error. A value that fits no type of a union counts as one fault."""
    groups: dict[tuple[Any, ...], list[Any]] = {}
    for number, details in enumerate(error.errors(include_url=False)):
        is_union = any("MaskSource" in str(part) or str(part) == "str" for part in details["loc"])
        groups.setdefault(details["loc"][:2] if is_union else (number,), []).append(details)
    paths = set[KeyPath]()
    for group in groups.values():
        details = _choose_error_of_union(group)
        path = _find_key_path_in_tables(tables, details["loc"], is_missing=details["type"] == "missing")
        if details["type"] == "too_short" and path in paths:  # without the items that have a fault
            continue
        paths.add(path)
        message = str(details["msg"]).removeprefix("Value error, ")
        if details["type"] == "value_error":
            prefix, colon, text = message.partition(": ")
            if (
                colon
                and len(path) == 1
                and " " not in prefix
                and prefix.partition(".")[0] in _list_table_keys(model, path)
            ):
                path, message = (*path, *prefix.split(".")), text
        else:
            message = _describe_problem(model, path, details)
        yield ConfigFault(path, message)


def _choose_error_of_union(group: Sequence[Any]) -> Any:
    """Choose the most useful error for a value that fits no type of a union. For a table, it is the error of the table type."""
    is_table = isinstance(group[0]["input"], Mapping) and group[0]["type"] == "string_type"
    in_table = [details for details in group[is_table:] if any("MaskSource" in str(part) for part in details["loc"])]
    useful = [details for details in in_table if details["type"] not in ("string_type", "model_type")]
    return (useful or group[is_table:] or group)[0]


def _find_key_path_in_tables(tables: Any, location: Iterable[Any], *, is_missing: bool) -> KeyPath:
    """Return the key path that belongs to an error location. Type names inside the location are dropped."""
    path: list[str] = []
    for part in location:
        if isinstance(tables, Mapping) and part in tables:
            tables = tables[part]
            path.append(str(part))
        elif is_missing and isinstance(tables, Mapping) and str(part).isidentifier() and "MaskSource" not in str(part):
            path.append(str(part))
    return tuple(path)


def _list_table_keys(model: type[BaseModel], path: KeyPath) -> list[str]:
    """Return the keys that the table at a path may have."""
    table: Any = model
    for name in path:
        fields = getattr(table, "model_fields", {})
        table = fields[name].annotation if name in fields else None
    return list(getattr(table, "model_fields", {}))


def _describe_problem(model: type[BaseModel], path: KeyPath, details: Mapping[str, Any]) -> str:
    """Describe a faulty setting: the value received and the values allowed."""
    kind, context, value = details["type"], details.get("ctx", {}), details["input"]
    if kind == "missing":
        return "it is missing, and has no default"
    if kind == "extra_forbidden":
        keys = _list_table_keys(model, path[:-1])
        expected = f"; expected one of {', '.join(keys)}" if keys else ""
        return f"there is no such setting{expected}{suggest_nearest_name(path[-1], keys)}"
    received = repr(value)[:MAX_ERROR_CHARACTERS]
    if kind == "literal_error":
        expected = str(context["expected"]).replace("'", "")
        names = expected.replace(" or ", ", ").split(", ")
        return f"{received} is not allowed; expected {expected}{suggest_nearest_name(str(value), names)}"
    limits = [wording.format(context[name]) for name, wording in LIMIT_WORDING.items() if name in context]
    if limits:
        return f"{received} is not allowed; expected {' and '.join(limits)}"
    message = str(details["msg"])
    return f"{received}: {message[0].lower()}{message[1:]}"
