"""This version reads what older versions have written: explanations, runs and audits."""

import json
from pathlib import Path

import numpy as np
import pytest

from camscope import Explanation, __version__

VERSIONS = sorted(Path(__file__).parent.glob("v*"))


@pytest.fixture(params=VERSIONS, ids=lambda folder: folder.name)
def golden(request):
    return request.param, json.loads((request.param / "expected.json").read_text())


def test_this_minor_version_has_its_files():
    assert f"v{'.'.join(__version__.split('.')[:2])}" in {folder.name for folder in VERSIONS}


def test_an_explanation_of_an_older_version_is_read(golden):
    folder, expected = golden
    explanation = Explanation.load(folder / "explanation.npz")
    assert (explanation.target, explanation.score) == (expected["target"], expected["score"])
    assert float(np.sum(explanation.attribution)) == pytest.approx(expected["attribution_sum"], rel=1e-6)
    assert explanation.overlay().shape == (32, 32, 3)


def test_a_run_of_an_older_version_is_read_and_exported(golden, tmp_path):
    pytest.importorskip("pyarrow")
    from camscope.batch import BatchRun

    folder, _ = golden
    run = BatchRun(folder / "run")
    assert run.n_failed_rows == 1
    assert len(run.query("status = 'ok'", "probability desc")) == 3
    run.export(tmp_path / "tables", ["csv", "npz"])
    assert len(list((tmp_path / "tables").rglob("*.npz"))) == 3


def test_an_audit_of_an_older_version_is_read(golden):
    pytest.importorskip("pyarrow")
    pytest.importorskip("pydantic")
    from camscope import audit

    folder, expected = golden
    run = audit.AuditRun(folder / "audit")
    assert [[one.question, one.conclusion, one.direction] for one in run.verdicts] == expected["verdicts"]
    assert run.metrics().num_rows > 0
