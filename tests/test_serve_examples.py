"""The FastAPI example and the queue example: maps equal to the direct ones from eight threads, errors, limits, warnings."""

import io
import json
import logging
import re
import runpy
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from camscope import GradCAM, load_model
from camscope.errors import CamscopeWarning, TargetError
from camscope.phantom import draw_radiograph

EXAMPLES = Path(__file__).parents[1] / "examples"
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the test client


def encode(pixels):
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.fixture(scope="module")
def uploads():
    return [encode(draw_radiograph(seed, "nodule").image) for seed in range(4)]


@pytest.fixture
def module():
    pytest.importorskip("fastapi")
    pytest.importorskip("httpx")
    return runpy.run_path(str(EXAMPLES / "serve_fastapi.py"))


@pytest.fixture
def limits(module):
    """The namespace that the functions of the example read their limits from."""
    return module["create_app"].__globals__


@pytest.fixture
def client(module):
    from fastapi.testclient import TestClient

    with TestClient(module["create_app"]()) as client:
        yield client


def post(client, data, target="nodule"):
    return client.post("/explain", content=data, params={} if target is None else {"target": target})


def test_eight_threads_get_the_direct_maps(client, uploads):
    explainer = GradCAM(load_model("phantom"), "layer4")
    targets = ["nodule", "effusion", "1", None]
    direct = {}
    for i, upload in enumerate(uploads):
        pixels = np.asarray(Image.open(io.BytesIO(upload)).convert("RGB"))
        for target in targets:
            explanation = explainer.explain(pixels, int(target) if target == "1" else target)
            direct[i, target] = explanation.annotated_image(), repr(explanation.score)
    jobs = [(n % 4, targets[n // 4 % 4]) for n in range(48)]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda job: post(client, uploads[job[0]], job[1]), jobs))
    assert {(answer.status_code, answer.headers["x-status"]) for answer in answers} == {(200, "ok")}
    for answer, job in zip(answers, jobs, strict=True):
        image, score = direct[job]
        np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(answer.content))), image)
        assert answer.headers["x-score"] == score
    assert len({image.tobytes() for image, _ in direct.values()}) > 4  # a mix-up of threads would be seen
    assert answers[0].headers["x-target"] == "nodule"
    assert client.app.state.n_requests == 0


def test_an_error_is_422_with_a_message_and_a_fix(client, uploads, limits, monkeypatch):
    pickled = io.BytesIO()
    torch.save({"weight": torch.ones(2)}, pickled)
    for data in (b"", b"no image", pickled.getvalue(), uploads[0][:500]):
        answer = post(client, data)
        assert (answer.status_code, answer.json()["error"]) == (422, "ImageError")
        assert answer.json()["message"]
    answer = post(client, uploads[0], "cat")
    assert (answer.status_code, answer.json()["error"]) == (422, "TargetError")
    with pytest.raises(TargetError) as caught:
        GradCAM(load_model("phantom")).explain(draw_radiograph(0, "nodule").image, "cat")
    assert "; ".join(filter(None, (answer.json()["message"], answer.json()["fix"]))) == str(caught.value)
    assert post(client, uploads[0], "99").json()["error"] == "TargetError"
    assert post(client, uploads[0], "9" * 5000).status_code == 422
    monkeypatch.setitem(limits, "MAX_PIXELS", 100)
    answer = post(client, uploads[0])
    assert (answer.status_code, answer.json()["error"]) == (422, "ImageError")
    assert client.app.state.n_requests == 0


def test_the_page_shows_an_answer_of_the_service(client):
    page = (EXAMPLES.parent / "docs" / "how-to" / "serve.md").read_text("utf-8")
    block = page.split("```json\n")[1].split("```")[0]
    assert post(client, b"no image").json() == json.loads(block)


def test_the_page_has_the_limits_of_the_example(limits):
    page = (EXAMPLES.parent / "docs" / "how-to" / "serve.md").read_text("utf-8")
    rows = dict(re.findall(r"^\| .*`(MAX_\w+)` \| (.+?) \|", page, re.M))
    values = {"MAX_BYTES": limits["MAX_BYTES"] / 2**20, "MAX_PIXELS": limits["MAX_PIXELS"] / 1e6}
    units = {"MAX_BYTES": " MiB", "MAX_PIXELS": " million"}
    names = ("MAX_BYTES", "MAX_PIXELS", "MAX_SECONDS", "MAX_RUNNING", "MAX_WAITING")
    assert rows == {name: f"{values.get(name, limits[name]):.0f}{units.get(name, '')}" for name in names}


def test_uploads_are_limited_in_bytes_number_and_time(client, uploads, limits, monkeypatch):
    from anyio import sleep

    monkeypatch.setitem(limits, "MAX_BYTES", len(uploads[0]))
    assert post(client, uploads[0]).status_code == 200
    assert post(client, uploads[0] + b"\0").status_code == 413
    client.app.state.n_requests = limits["MAX_RUNNING"] + limits["MAX_WAITING"]
    answer = post(client, uploads[0])
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    client.app.state.n_requests -= 1
    assert post(client, uploads[0]).status_code == 200
    monkeypatch.setitem(limits, "MAX_SECONDS", 0.05)
    monkeypatch.setitem(limits, "read_limited_body", lambda request: sleep(60))
    assert post(client, uploads[0]).status_code == 408


def test_a_warning_is_logged_once_and_counted(module, uploads, limits, monkeypatch, caplog):
    from fastapi.testclient import TestClient

    class Warner:
        def __init__(self):
            self.explainer, self.n_calls = GradCAM(load_model("phantom"), "layer4"), 0

        def explain(self, pixels, target):
            self.n_calls += 1
            warnings.warn("the same", CamscopeWarning, stacklevel=1)
            warnings.warn(f"call {self.n_calls}", CamscopeWarning, stacklevel=1)
            return self.explainer.explain(pixels, target)

    monkeypatch.setitem(limits, "MAX_MESSAGES", 3)
    filters, show = list(warnings.filters), warnings.showwarning
    with caplog.at_level(logging.WARNING, "camscope"), TestClient(module["create_app"](Warner)) as client:
        for _ in range(5):
            assert post(client, uploads[0]).status_code == 200
        counts = client.get("/warnings").json()
    assert counts == {"the same": 5, "call 1": 1, "call 2": 1}  # at most three texts
    logged = [record.getMessage() for record in caplog.records if record.name == "camscope"]
    assert sorted(logged) == ["call 1", "call 2", "the same"]
    assert (list(warnings.filters), warnings.showwarning) == (filters, show)


def test_the_queue_explains_files_and_reports_a_bad_one(tmp_path, capsys, uploads):
    source = tmp_path / "images"
    source.mkdir()
    for i, upload in enumerate(uploads):
        (source / f"{i}.png").write_bytes(upload)
    (source / "note.txt").write_text("no image")
    results = runpy.run_path(str(EXAMPLES / "serve_queue.py"))["main"](source, tmp_path / "maps")
    assert [(result.name, result.status) for result in results[:4]] == [(f"{i}.png", "ok") for i in range(4)]
    assert results[4].status == "error"
    assert "note.txt" in results[4].message
    assert len(capsys.readouterr().out.splitlines()) == 5
    explainer = GradCAM(load_model("phantom"), "layer4")
    for i in range(4):
        direct = explainer.explain(str(source / f"{i}.png")).annotated_image()
        np.testing.assert_array_equal(np.asarray(Image.open(tmp_path / "maps" / f"{i}.png.png")), direct)
