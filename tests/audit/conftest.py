"""Finished audits of two nets, made once for all tests."""

import json
import shutil
from collections import defaultdict

import pytest

pytest.importorskip("pydantic")
pytest.importorskip("pyarrow")


from camscope import audit
from camscope.audit.core.config import Config
from camscope.audit.demo_dataset_and_model import CONFOUNDED_PROBABILITY, UNBIASED_PROBABILITY, write_demo_study
from tests.audit.audits import FAST, IMAGES, changed


@pytest.fixture(scope="module")
def cases(made_once, one_thread):
    """Of a clean and a confounded net: the config, and the finished audit."""

    def build(folder):
        for name, p in (("clean", UNBIASED_PROBABILITY), ("confounded", CONFOUNDED_PROBABILITY)):
            quick = (
                {"skip": ("faithfulness", "sanity", "robustness")} if name == "clean" else {}
            )  # whose audit is made again and again
            config = changed(write_demo_study(folder / name / "study", p, n_images=IMAGES), **FAST, **quick)
            (folder / f"{name}.json").write_text(config.model_dump_json())
            audit.run_audit(config, folder / name / "audit")

    folder = made_once("audits-of-two-nets", build)
    return {
        name: (
            Config.from_source(json.loads((folder / f"{name}.json").read_text())),
            audit.AuditRun(folder / name / "audit"),
        )
        for name in ("clean", "confounded")
    }


@pytest.fixture
def without_figures(monkeypatch):
    """Reports have no charts, which take a third of a small audit: test_page draws them."""
    monkeypatch.setattr("camscope.audit.report.render_html_page.draw_figures", lambda summary: defaultdict(list))


@pytest.fixture
def copied(cases, tmp_path):
    """A copy of the confounded audit, to be damaged."""
    shutil.copytree(cases["confounded"][1].folder, tmp_path / "audit")
    return tmp_path / "audit"
