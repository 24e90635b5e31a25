"""The config, the manifest and the model of the page on audits belong together, and its list of faults is what is printed."""

import re
import textwrap
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("pydantic")
pytest.importorskip("pyarrow")

from PIL import Image

from camscope.audit.config_validation import validate_config
from camscope.audit.core.audit_context import AuditContext
from camscope.audit.core.config import Config
from camscope.errors import ConfigError

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "how-to" / "audit.md").read_text("utf-8")


def block(language, start):
    """The block of the page in a language that begins with a text."""
    (text,) = re.findall(rf"^```{language}\n({re.escape(start)}.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    return text


@pytest.fixture
def study(tmp_path, monkeypatch):
    """The files of the page, with images and masks of noise."""
    monkeypatch.chdir(tmp_path)
    manifest = block("text", "path,label")
    for folder in ("images", "masks"):
        (tmp_path / folder).mkdir()
        for name in re.findall(rf"{folder}/(\d+\.png)", manifest):
            pixels = np.random.default_rng(0).integers(0, 255, (480, 480), dtype=np.uint8)
            Image.fromarray(pixels if folder == "images" else (pixels > 99) * np.uint8(255)).save(
                tmp_path / folder / name
            )
    (tmp_path / "manifest.csv").write_text(manifest)
    (tmp_path / "models.py").write_text(block("python", "# models.py"))
    text = block("toml", "title").replace('root = "/data/study"', f'root = "{tmp_path}"')
    (tmp_path / "audit.toml").write_text(text.replace("weights = ", "# weights = "))
    return tmp_path


@pytest.mark.slow
def test_the_files_of_the_page_are_an_audit(study):
    config, faults = Config.parse_source("audit.toml")
    context = AuditContext(config, study / "audit", faults=faults)
    validate_config(context)
    assert [row["method"] for row in context.first_maps] == ["gradcam", "integratedgradients"]
    assert config.data.subgroups == ("site",)


def test_the_faults_of_the_page_are_what_is_printed(study):
    text = (study / "audit.toml").read_text()
    for old, new in (
        ('["site"]\nground', '["Site"]\nground'),
        ('"gradcam"', '"gradcamm"'),
        ("faithfulness = 24", "faithfulness = 4"),
    ):
        assert old in text
        text = text.replace(old, new)
    (study / "audit.toml").write_text(text)
    config, faults = Config.parse_source("audit.toml")
    with pytest.raises(ConfigError) as raised:
        validate_config(AuditContext(config, study / "audit", faults=faults))
    expected = textwrap.dedent(block("text", "error: audit.toml has")).replace("error: ", "")
    assert [line.split() for line in str(raised.value).splitlines()] == [line.split() for line in expected.splitlines()]
