"""The page of errors: each error, flag and message of an audit has a remedy, and messages that are raised are in the list."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("pydantic")
pytest.importorskip("pyarrow")

from camscope import errors
from camscope.audit.config_generation import build_config
from camscope.audit.core.config import Config
from camscope.errors import CamscopeError
from camscope.explanation import STATUS_MEANINGS

ROOT = Path(__file__).resolve().parents[2]
SPEC = importlib.util.spec_from_file_location("remedies", ROOT / "docs" / "remedies.py")
remedies = importlib.util.module_from_spec(SPEC)
sys.modules["remedies"] = remedies  # as docs/build_reference.py imports it
SPEC.loader.exec_module(remedies)
MESSAGES = remedies.list_audit_messages()
FILES = {name: (remedies.PACKAGE / "audit" / name).read_text("utf-8") for name in remedies.AUDIT_START}
TABLES = {
    "data": {"manifest": "manifest.csv", "label": "label"},
    "model": {"source": "phantom"},
    "explain": {"findings": ["nodule"]},
}


def matches(message):
    """Whether the list has a message, where … stands for any text."""
    patterns = [re.escape(text).replace("…", ".*") for _, text, _ in MESSAGES if re.search(r"\w{3} \w", text)]
    return any(re.search(pattern, message, re.DOTALL) for pattern in patterns)


def test_each_error_and_each_flag_has_a_remedy():
    classes = [
        value
        for value in vars(errors).values()
        if isinstance(value, type) and issubclass(value, CamscopeError | errors.CamscopeWarning)
    ]
    assert set(remedies.ERROR_REMEDIES) == {cls.__name__ for cls in classes}
    assert set(remedies.STATUS_REMEDIES) == set(STATUS_MEANINGS)


def test_each_message_of_an_audit_has_a_remedy():
    assert [text for _, text, remedy in MESSAGES if not remedy] == []


def test_each_remedy_that_is_written_by_hand_is_used():
    used = {remedy for _, _, remedy in MESSAGES}
    assert {text for text in remedies.AUDIT_REMEDIES.values() if text not in used} == set()


@pytest.mark.parametrize("name", FILES)
def test_the_list_has_every_error_of_a_module(name):
    """Search the text, not its syntax tree: the first words in quotes behind each error are in the list."""
    raised = re.findall(r"(?:Error|faults\.add)\(\s*f?([\"'])((?:(?!\1).)+)\1", FILES[name])
    fragments = [max(re.split(r"\{.*?\}", text), key=len) for _, text in raised if " " in text]
    listed = " ".join(f"{text}; {remedy} {text} {remedy}" for _, text, remedy in MESSAGES)
    words = [re.split(r"[;:,.]", fragment)[0].strip() for fragment in fragments]
    assert [text for text in words if text not in listed] == []
    assert len(raised) > 0 or name == "core/config_faults.py"


@pytest.mark.parametrize(
    ("table", "key", "value"),
    [
        ("data", "subgroups", ["path"]),
        ("data", "split", "split"),
        ("data", "labels", {"nodule": "nodule"}),
        ("data", "ground_truth", {"nodule": {}}),
        ("data", "root_folder", "."),
        ("explain", "settings", {"rise": {}}),
        ("explain", "settings", {"gradcam": {"n": 1}}),
        ("explain", "findings", ["nodule", "nodule"]),
        ("margins", "effect", -1),
        ("model", "outputs", "linear"),
    ],
)
def test_a_fault_of_a_config_is_in_the_list(table, key, value):
    with pytest.raises(CamscopeError) as raised:
        Config.from_source({**TABLES, table: {**TABLES.get(table, {}), key: value}})
    assert matches(str(raised.value))


@pytest.mark.parametrize("options", [{"modality": "sonar"}, {}], ids=["modality", "no manifest"])
def test_a_message_of_init_is_in_the_list(options, tmp_path):
    with pytest.raises(CamscopeError) as raised:
        build_config(str(tmp_path / "manifest.csv"), "phantom", **options)
    assert matches(str(raised.value))
