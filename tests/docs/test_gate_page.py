"""The pipelines of the page on gates: they are YAML, and their commands are valid."""

import re
from pathlib import Path

import pytest

from tests.docs.test_page_commands import parse

yaml = pytest.importorskip("yaml")
PAGE = (Path(__file__).resolve().parents[2] / "docs" / "how-to" / "gate.md").read_text("utf-8")


def find_lines(value):
    """All texts of a YAML document."""
    if isinstance(value, dict):
        value = list(value.values())
    return [line for item in value for line in find_lines(item)] if isinstance(value, list) else [str(value)]


def test_both_pipelines_are_valid_and_have_a_gate():
    blocks = re.findall(r"^```yaml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        commands = [line for line in find_lines(yaml.safe_load(block)) if line.startswith("camscope ")]
        assert [command.split()[1] for command in commands] == ["batch", "diff"]
        for command in commands:
            parse(command)
    github, gitlab = map(yaml.safe_load, blocks)
    assert github["jobs"]["gate"]["steps"][-1]["with"]["path"] == "diff"
    assert gitlab["gate"]["artifacts"]["when"] == "always"


def test_every_condition_of_the_page_can_be_parsed():
    from camscope.audit.audit_fail_conditions import CHANGE_PATTERN, CORRELATION_PATTERN, VERDICT_PATTERN
    from camscope.evaluation.diff import FailCondition

    runs, audits = PAGE.partition("## Two audits")[::2]
    conditions = re.findall(r"^\| `([^`]+ (?:[<>]|fell)[^`]*)` \|", runs, re.MULTILINE)
    assert len(conditions) == 6
    for text in conditions:
        FailCondition.parse(text)
    texts = re.findall(r"^\| `([^`]+)` \|", audits, re.MULTILINE)
    assert len(texts) == 5
    for text in texts:
        assert any(pattern.fullmatch(text) for pattern in (VERDICT_PATTERN, CORRELATION_PATTERN, CHANGE_PATTERN)), text
