"""A hospital of canaries, and what the client of the official SDK asks `camscope mcp` there, over stdio and over HTTP."""

import base64
import contextlib
import io
import json
import os
import re
import struct
import subprocess
import sys
import tempfile
import zlib
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("mcp")
pytest.importorskip("pydicom")
pytest.importorskip("httpx2")

import httpx2
from mcp.client import Client
from mcp.client.stdio import StdioServerParameters, stdio_client
from mcp.client.streamable_http import streamable_http_client
from PIL import Image

from camscope import GradCAM, load_model, run_batch
from camscope.audit.provenance.audit_files_safe_to_replace import PLAN_FILE, SUMMARY_FILE
from camscope.batch import BatchRun
from camscope.evaluation import evaluate
from camscope.explanation import figure
from camscope.phantom import draw_radiograph
from tests.audit_summary import full
from tests.canaries import Cage, dicom, picture, save

TOKEN = "a-token-of-the-tests-0123456789"
SCAN_MODEL = """
import torch
from torch import nn
from camscope.images.scans.scan_preprocess import ScanPreprocess

def flat():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 3, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 2)).eval()
    net[-1].weight.data.abs_()
    return net

PREPROCESSING = {"flat": ScanPreprocess(resize=24, normalize="range")}
"""


@dataclass
class Hospital:
    """Folders of a server: photos and scans below the root, a run, an audit, and a file outside."""

    folder: Path
    cage: Cage = field(default_factory=Cage)

    @property
    def root(self):
        return self.folder / "root"

    def values(self):
        """A new folder for metric values."""
        return tempfile.mkdtemp(dir=self.folder)

    def options(self):
        audit, run, model = self.folder / "audit", self.folder / "night", self.folder / "model.py"
        return [
            *("--model", "phantom", "--model", f"scans={model}:flat", "--root", str(self.root)),
            *("--run", str(run), "--audit", f"yearly={audit}"),
        ]


def png_that_claims(width, height):
    """A PNG file of few bytes whose header claims many pixels."""

    def chunk(kind, body):
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    pixels = zlib.compress(bytes(1000))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def build_hospital(tmp_path_factory):
    made = Hospital(tmp_path_factory.mktemp("hospital"))
    cage, root = made.cage, made.root
    (root / "photos").mkdir(parents=True)
    for seed in range(3):
        Image.fromarray(draw_radiograph(seed, "nodule").image).save(root / "photos" / f"{seed}.png")
    (root / "bomb.png").write_bytes(png_that_claims(30000, 30000))
    outside = made.folder / "outside.png"
    Image.fromarray(draw_radiograph(7, "nodule").image).save(outside)
    (root / "link.png").symlink_to(outside)
    save(dicom(cage), root / "scans" / f"{cage.word('name of a scan')}.dcm")
    burned = dicom(cage)
    burned.BurnedInAnnotation = "YES"
    save(burned, root / "scans" / f"{cage.word('name of a burned scan')}.dcm")
    picture(cage, root / "scans" / f"{cage.word('name of a picture')}.png", np.zeros((30, 30, 3), np.uint8))
    (root / "scans" / f"{cage.word('name of a cut scan')}.dcm").write_bytes(
        next((root / "scans").glob("*.dcm")).read_bytes()[:5000]
    )
    (made.folder / "model.py").write_text(SCAN_MODEL)
    run_batch(GradCAM(load_model("phantom")), root / "photos", made.folder / "night")
    (made.folder / "audit").mkdir()
    (made.folder / "audit" / PLAN_FILE).write_text("{}")
    (made.folder / "audit" / SUMMARY_FILE).write_text(full().model_dump_json())
    return made


def environment(**extra):
    return {**os.environ, "OMP_NUM_THREADS": "1", **extra}


@contextlib.asynccontextmanager
async def connect_over_stdio(hospital, *options):
    arguments = ["-m", "camscope", "mcp", *hospital.options(), *options]
    parameters = StdioServerParameters(command=sys.executable, args=arguments, env=environment())
    with (hospital.folder / "stderr.txt").open("a") as errors:
        async with Client(stdio_client(parameters, errlog=errors)) as client:
            yield client


@contextlib.contextmanager
def run_http_server(hospital):
    """The address of a server over HTTP."""
    token_file = hospital.folder / "token.txt"
    token_file.write_text(f"{TOKEN}\n")
    options = ["--http", "0", "--token-file", str(token_file), "--allow-writing"]
    command = [sys.executable, "-m", "camscope", "mcp", *hospital.options(), *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, env=environment(), text=True) as process:
        try:
            lines = []
            while not (lines and "http://" in lines[-1]):
                line = process.stderr.readline()
                assert line, f"the server has ended: {lines}"
                lines.append(line)
            assert TOKEN not in "".join(lines)  # only a random token is printed
            yield re.search(r"http://127\.0\.0\.1:\d+/mcp", lines[-1])[0]
        finally:
            process.terminate()
            process.wait(20)
            process.stderr.close()


@contextlib.asynccontextmanager
async def connect_over_http(url, token=TOKEN):
    headers = {"Authorization": f"Bearer {token}"}
    async with (
        httpx2.AsyncClient(headers=headers, timeout=60) as session,
        Client(streamable_http_client(url, http_client=session)) as client,
    ):
        yield client


def pixels_of(reply):
    (block,) = [block for block in reply.content if block.type == "image"]
    assert block.mime_type == "image/png"
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(block.data))))


async def call_every_tool(client, hospital, seen):
    """Call each tool, and compare the replies with direct calls of the library."""

    async def call(name, **arguments):
        reply = await client.call_tool(name, arguments)
        seen.append(reply.model_dump_json())
        assert not reply.is_error, reply.content[0].text
        return reply

    tools = {tool.name: tool for tool in (await client.list_tools()).tools}
    assert sorted(tools) == ["compare", "evaluate", "explain", "layers", "methods", "query", "verdicts"]
    assert all(tool.output_schema["properties"]["versions"] for tool in tools.values())
    photo, cam = hospital.root / "photos" / "0.png", GradCAM(load_model("phantom"))
    direct = cam.explain(photo, "effusion")

    reply = await call("explain", image="photos/0.png", target="effusion")
    assert (pixels_of(reply) == figure([direct], height=320)).all()
    facts = reply.structured_content["map"]
    assert (facts["label"], facts["layer"], facts["status"]) == ("effusion", direct.layer, "ok")
    assert facts["score"] == pytest.approx(direct.score, rel=1e-6)
    assert tuple(facts["peak"]) == direct.peak
    absolute = await call("explain", image=str(photo), target="effusion")
    assert absolute.structured_content["image"] == "photos/0.png"

    reply = await call("compare", image="photos/0.png", methods=["gradcam", "layercam"])
    maps = reply.structured_content["maps"]
    assert [each["method"] for each in maps] == ["gradcam", "layercam"]
    assert maps[0]["correlation"] == pytest.approx(1)
    assert pixels_of(reply).std() > 10

    reply = await call("evaluate", run="night", metrics=["sparseness"])
    (metric,) = reply.structured_content["metrics"]
    means = {each["method"]: each["mean"] for each in metric["methods"]}
    values = evaluate(hospital.folder / "night", hospital.values(), metrics=["sparseness"]).table("method = 'gradcam'")
    expected = np.mean(values["value"].to_pylist())
    assert means["gradcam"] == pytest.approx(float(expected))
    assert pixels_of(reply).std() > 10
    reply = await call("evaluate", images=["photos/0.png", "photos/1.png"], metrics=["sparseness"])
    assert reply.structured_content["metrics"][0]["methods"][0]["n_values"] == 2

    reply = await call("methods")
    assert {"gradcam", "rise"} <= {each["name"] for each in reply.structured_content["methods"]}
    reply = await call("layers", model="phantom")
    assert reply.structured_content["default_layer"] == direct.layer
    reply = await call("query", run="night", condition="label = 'nodule'", sort="probability desc", limit=2)
    rows = BatchRun(hospital.folder / "night").query("label = 'nodule'", "probability desc", 2).to_pylist()
    names = [f"photos/{Path(row['id']).name}" for row in rows]  # without the folders above the root
    assert [row["id"] for row in reply.structured_content["rows"]] == names
    assert "attribution" not in reply.structured_content["columns"]
    assert pixels_of(reply).std() > 10
    reply = await call("verdicts", audit="yearly")
    assert len(reply.structured_content["verdicts"]) == len(full().verdicts)
    assert reply.structured_content["verdicts"][0]["direction"] == "contradicts"


REFUSALS = {  # the call, and a part of its error
    "a path outside": ("explain", {"image": "OUTSIDE"}, "outside of the folders"),
    "a parent folder": ("explain", {"image": "../outside.png"}, "outside of the folders"),
    "a missing file outside": ("explain", {"image": "/no/such/file.png"}, "outside of the folders"),
    "a symlink out": ("explain", {"image": "link.png"}, "outside of the folders"),
    "a URL": ("explain", {"image": "file:///etc/passwd"}, "outside of the folders"),
    "a module name": ("explain", {"image": "photos/0.png", "model": "os.py:system"}, "not started with this model"),
    "a checkpoint": ("explain", {"image": "photos/0.png", "weights": "evil.pt"}, "no argument weights"),
    "a huge image": ("explain", {"image": "bomb.png"}, "more than"),
    "a method's file": ("explain", {"image": "photos/0.png", "method": "evil.py"}, "evil.py"),
    "SQL that reads files": ("query", {"run": "night", "condition": "(SELECT count(*) FROM read_text('OUTSIDE')) > 0"}, ""),
    "SQL of two statements": ("query", {"run": "night", "condition": "true); DROP TABLE run; SELECT (1"}, ""),
    "a run's folder": ("query", {"run": "/etc"}, "not started with this run"),
    "masks outside": ("evaluate", {"images": ["photos/0.png"], "masks": "/etc"}, "outside of the folders"),
    "images outside": ("evaluate", {"images": ["OUTSIDE"], "metrics": ["sparseness"]}, "outside of the folders"),
    "a wrong type": ("explain", {"image": 7}, "its arguments"),
}  # fmt: skip


async def call_what_must_be_refused(client, hospital, seen):
    outside = str(hospital.folder / "outside.png")
    for reason, (name, arguments, part) in REFUSALS.items():
        text = json.loads(json.dumps(arguments).replace("OUTSIDE", outside))
        reply = await client.call_tool(name, text)
        seen.append(reply.model_dump_json())
        message = reply.content[0].text
        assert reply.is_error, reason
        assert part in message, (reason, message)
        assert "Traceback" not in message
        assert "\n" not in message
        assert str(hospital.folder) not in message, reason
        assert len(reply.content) == 1


async def call_with_scans(client, hospital, seen):
    """Explain, compare and evaluate files whose names and headers are full of canaries, with and without success."""
    n_errors, scans = 0, sorted((hospital.root / "scans").iterdir())
    assert len(scans) == 4
    for path in scans:
        relative = path.relative_to(hospital.root).as_posix()
        for name, arguments in {
            "explain": {"image": relative, "target": 1},
            "compare": {"image": relative, "methods": ["gradcam", "layercam"], "target": 1},
            "evaluate": {"images": [relative], "metrics": ["sparseness"], "target": 1},
        }.items():
            reply = await client.call_tool(name, {**arguments, "model": "scans"})
            n_errors += reply.is_error
            text = reply.model_dump_json()
            seen.append(text)
            for block in reply.content:
                if block.type == "image":
                    assert not hospital.cage.found(base64.b64decode(block.data))
            assert not hospital.cage.found(text.encode()), (name, path.name, reply.content[0].text)
    assert 0 < n_errors < 3 * len(scans)  # some are damaged or have text in their pixels
