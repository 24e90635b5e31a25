"""Write the reference pages that are generated from the package, and the inventories of other projects' names."""

import inspect
import re
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from click import Context
from remedies import AUDIT_REMEDIES, ERROR_REMEDIES, STATUS_REMEDIES, list_audit_messages, list_remedies_for_programs
from typer.cli import get_docs_for_click
from typer.main import get_command

from camscope import errors
from camscope.audit.core.summary_schema import Summary
from camscope.batch.result_rows import get_result_column_types
from camscope.cli import app
from camscope.cli.commands_and_error_reports import REMEDY_WORDING
from camscope.cli.event_log import describe_log
from camscope.cli.json_output import describe_json_output
from camscope.cli.list_methods import COST_LEGEND, describe_method
from camscope.cli.option_parsing import list_setting_types
from camscope.explainers import METHODS, BaseCAM, Explainer
from camscope.explainers.core.method_docstrings import read_description, read_setting_descriptions
from camscope.explanation import STATUS_MEANINGS
from camscope.metrics import METRICS

INVENTORY_HEADER = (
    "# Sphinx inventory version 2\n# Project: {name}\n# Version: \n"
    "# The remainder of this file is compressed using zlib.\n"
)


def write_inventories(sources: Path, folder: Path) -> dict[str, str]:
    """Write one inventory for each list of names, so that links to other projects need no network.

    A list has the address of the documentation in its first line, then a role, a name and a page in each line.

    Returns:
        The address of each project by the name of its list.

    """
    folder.mkdir(parents=True, exist_ok=True)
    addresses = {}
    for source in sorted(sources.glob("*.txt")):
        address, *entries = source.read_text(encoding="utf-8").splitlines()
        rows = (entry.split() for entry in entries if entry.strip())
        text = "".join(f"{name} py:{role} 1 {page} -\n" for role, name, page in rows)
        header = INVENTORY_HEADER.format(name=source.stem).encode()
        (folder / f"{source.stem}.inv").write_bytes(header + zlib.compress(text.encode()))
        addresses[source.stem] = address
    return addresses


def write_generated_pages(folder: Path) -> None:
    """Write what the pages of methods, metrics, errors and commands include into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    pages = {
        "methods.md": describe_methods(),
        "metrics.md": describe_metrics(),
        "errors.md": describe_errors(),
        "command-line.md": describe_commands(),
        "run-columns.md": describe_run_columns(),
        "summary-fields.md": describe_summary(),
        "json.md": describe_json_output(),
        "log.md": describe_log(),
    }
    for name, text in pages.items():
        path = folder / name
        content = text.rstrip() + "\n"
        if not path.is_file() or path.read_text(encoding="utf-8") != content:  # an unchanged page is not built again
            path.write_text(content, encoding="utf-8")


def describe_methods() -> str:
    """Return the part of the page of all methods: a table, then each with its settings."""
    rows, sections = [], []
    shared = {*list_setting_types(Explainer), *list_setting_types(BaseCAM)}
    for method in METHODS.values():
        facts = describe_method(method)
        anchor = f"method-{facts['name'].replace('+', 'plus')}"
        rows.append(
            (f"[{facts['title']}](#{anchor})", f"`{facts['name']}`", facts["forward_passes"], facts["backward_passes"])
        )
        meanings = read_setting_descriptions(method)
        settings = "\n".join(
            f"- `{name}={value!r}`: {' '.join(meanings[name].split())}"
            for name, value in facts["settings"].items()
            if name not in shared
        )
        sections.append(
            f"({anchor})=\n## {facts['title']}\n\n"
            f"{{py:class}}`camscope.{method.__name__}` · `{facts['name']}` · {facts['paper'] or 'no paper'}\n\n"
            f"```text\n{read_description(method)}\n```\n\n"
            f"Forward passes: {facts['forward_passes']}. Backward passes: {facts['backward_passes']}."
            + (f"\n\nSettings:\n\n{settings}" if settings else "")
        )
    table = format_table(("method", "name", "forward passes", "backward passes"), rows)
    return f"{table}\n\nIn the cost columns, {COST_LEGEND}.\n\n" + "\n\n".join(sections)


def describe_metrics() -> str:
    """Return the part of the page of all metrics."""
    rows = [
        (
            metric.title,
            f"`{name}`",
            metric.input_kind,
            "–" if metric.higher_is_better is None else "higher" if metric.higher_is_better else "lower",
            metric.formula,
            metric.paper,
        )
        for name, metric in METRICS.items()
    ]
    return format_table(("metric", "name", "needs", "better", "formula", "source"), rows)


def describe_errors() -> str:
    """Return the part of the page of errors, remedies and statuses."""
    classes = [
        value
        for value in vars(errors).values()
        if inspect.isclass(value) and issubclass(value, errors.CamscopeError | errors.CamscopeWarning)
    ]
    rows = [
        (
            f"`{cls.__name__}`",
            f"`{next(base.__name__ for base in cls.__mro__[1:])}`",
            (inspect.getdoc(cls) or "").splitlines()[0],
            ERROR_REMEDIES[cls.__name__],
        )
        for cls in classes
    ]
    statuses = [(f"`{status}`", meaning, STATUS_REMEDIES[status]) for status, meaning in STATUS_MEANINGS.items()]
    remedies = [
        (
            f"`{errors.Remedy[name]}`",
            ", ".join(f"`{error}`" for error in raised),
            "<br>".join(f"``{fix}``" for fix in fixes) or "–",
            f"``{wording}``" if (wording := REMEDY_WORDING.get(errors.Remedy[name])) else "–",
        )
        for name, raised, fixes in list_remedies_for_programs()
    ]
    messages = [
        (when, f"``{message}``", remedy if remedy in AUDIT_REMEDIES.values() else f"``{remedy}``")
        for when, message, remedy in list_audit_messages()
    ]
    return (
        "## Errors\n\n"
        + format_table(("error", "kind of", "raised for", "what to do"), rows)
        + "\n\n## Flags\n\nThe `status` of an explanation is `ok` or one of these flags.\n\n"
        + format_table(("status", "meaning", "what to do"), statuses)
        + "\n\n## Remedies for programs\n\nAn error may have a `remedy`, which programs read in place of the text. "
        "`--json` prints it.\n\n"
        + format_table(("remedy", "errors", "in Python", "on the command line"), remedies)
        + "\n\n## Messages of an audit\n\nAll messages of `camscope audit init`, of a config and of the start of "
        "`camscope audit run`. … stands for a value. The list is read from the code.\n\n"
        + format_table(("where", "message", "what to do"), messages)
    )


def describe_commands() -> str:
    """Return the part of the page of the command line."""
    command = get_command(app)
    return get_docs_for_click(obj=command, ctx=Context(command), name="camscope").replace(
        "# `camscope`", "# Command line", 1
    )


def describe_run_columns() -> str:
    """Return the table of the Parquet columns of a run."""
    return format_table(
        ("column", "type"), [(f"`{name}`", f"`{arrow_type}`") for name, arrow_type in get_result_column_types().items()]
    )


def describe_summary() -> str:
    """Return the tables of `summary.json`: its fields, then those of every object in it."""
    schema = Summary.model_json_schema()
    sections = [_describe_fields("summary.json", schema)]
    sections += [_describe_fields(name, definition) for name, definition in sorted(schema["$defs"].items())]
    return "\n\n".join(sections)


def _describe_fields(title: str, definition: dict[str, Any]) -> str:
    text, meanings = _split_docstring(definition.get("description") or "")
    rows = []
    for name, field in definition.get("properties", {}).items():
        is_optional = name not in definition.get("required", ())
        rows.append((f"`{name}`", _name_json_type(field), "optional" if is_optional else "", meanings.get(name, "")))
    n_columns = 4 if meanings else 3
    table = format_table(("field", "type", "", "content")[:n_columns], (row[:n_columns] for row in rows))
    return f"### {title}\n\n{text}\n\n{table}"


def _split_docstring(docstring: str) -> tuple[str, dict[str, str]]:
    """Return the text of a docstring before its sections, and its attributes with their meanings."""
    text, _, section = inspect.cleandoc(docstring).partition("Attributes:\n")
    meanings, name = {}, ""
    for line in section.splitlines():
        if not line.startswith(" "):  # an empty line, or the next section
            break
        if re.match(r"    \w+: ", line):
            name, _, line = line.strip().partition(": ")
        meanings[name] = f"{meanings.get(name, '')} {line.strip()}".strip()
    return " ".join(text.partition(">>>")[0].split()), meanings


def _name_json_type(field: dict[str, Any]) -> str:
    """Return the type of a field of a JSON schema in words."""
    if "$ref" in field:
        return f"{field['$ref'].rpartition('/')[2]}"
    if "const" in field:
        return f"`{field['const']}`"
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"])
    if "anyOf" in field:
        return " or ".join(_name_json_type(choice) for choice in field["anyOf"])
    if field.get("type") == "array" and "items" in field:
        return f"list of {_name_json_type(field['items'])}"
    if field.get("type") == "object" and isinstance(field.get("additionalProperties"), dict):
        return f"object of {_name_json_type(field['additionalProperties'])}"
    return str(field.get("type", "any"))


def format_table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """Return a Markdown table."""
    lines = [header, tuple("---" for _ in header), *rows]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in row) + " |" for row in lines
    )
