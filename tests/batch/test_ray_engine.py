"""The Ray engine: on a real Ray of two workers, the rows of the local engine, whatever dies on the way."""

import contextlib
import itertools
import json
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from camscope import GradCAM, LayerCAM, load_model
from camscope.errors import InputError, LayerError, MissingExtraError, RunError

pa = pytest.importorskip("pyarrow")
ray = pytest.importorskip("ray", reason="Ray is not installed: the engine is not tested")
pytest.importorskip("ray", reason="Ray is not installed: the engine is not tested")

from camscope.batch import (  # noqa: E402 - it needs pyarrow
    BatchOptions,
    BatchRun,
    OverlayOptions,
    build_manifest,
    local_engine,
    ray_engine,
    run_batch,
)
from camscope.batch.batch_runner import build_run_info  # noqa: E402
from camscope.batch.run_store import RunStore  # noqa: E402

WORKERS = {"local": None, "ray": 1}  # one where one will do: it takes three seconds to start
SRC = Path(__file__).resolve().parents[2] / "src"

pytestmark = [
    pytest.mark.skipif(os.name != "posix", reason="SIGKILL is POSIX's"),
]


@pytest.fixture(scope="module", autouse=True)
def two_workers(one_thread):
    """A Ray of this file's own, beside whatever others run; its workers see the same camscope, and run on one thread."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(SRC))
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("RAY_worker_niceness", "0")  # it is 15: what else runs, and be it other tests, would come first
        patch.delenv("RAY_ADDRESS", raising=False)
        ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=80 * 2**20)
        ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import the tests
        yield
        ray.cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
        ray.shutdown()


@pytest.fixture(scope="module")
def model():
    return load_model("phantom")


@pytest.fixture
def folder(tmp_path):
    """Sixteen small pictures, two of them broken, one of another size."""
    made = tmp_path / "images"
    made.mkdir()
    drawn = np.random.default_rng(0)
    for n in range(16):
        size = (30, 20) if n == 5 else (24, 24)
        Image.fromarray(drawn.integers(0, 256, (*size, 3), dtype=np.uint8)).save(made / f"{n:02}.png")
    (made / "04.png").write_bytes(b"no image")
    (made / "11.png").write_bytes(b"")
    return made


def rows(output):
    return BatchRun(output).table().drop_columns(["seconds"])


class Preprocess:
    """(H,W) image -> (3,24,24); a test says what else happens when one is read."""

    def __init__(self, folder):
        self.folder = folder

    def __call__(self, image):
        self.happens(image)
        pixels = np.asarray(image.convert("RGB").resize((24, 24)), dtype=np.float32)
        return torch.from_numpy(pixels).permute(2, 0, 1) / 255

    def happens(self, image):
        pass

    def times(self):
        """How often this was asked, by any process: each time leaves a file behind."""
        for n in itertools.count():
            with contextlib.suppress(FileExistsError):
                (self.folder / f"{type(self).__name__}-{n}").touch(exist_ok=False)
                break
        return n

    def __repr__(self):
        return "stretched"


class CountsReads(Preprocess):
    def happens(self, image):
        self.times()


class DiesOnceAtTheSixth(Preprocess):
    def happens(self, image):
        if self.times() == 5:
            os.kill(os.getpid(), signal.SIGKILL)


class DiesOfThePortrait(Preprocess):
    def happens(self, image):
        if image.size == (20, 30) and self.times() < 6:
            os.kill(os.getpid(), signal.SIGKILL)


class WaitsUntilTwoHaveMet(Preprocess):
    def happens(self, image):
        (self.folder / str(os.getpid())).touch()
        until = time.monotonic() + 300
        while len(list(self.folder.iterdir())) < 2 and time.monotonic() < until:
            time.sleep(0.01)


class Refuses(torch.nn.Module):
    """A net that takes no image."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Conv2d(3, 2, 3)

    def forward(self, x):
        raise RuntimeError("no")


class DiesOnceWhileItWrites(RunStore):
    """Half of the third part is on the disk when its process is killed; the fourth is whole, but nobody was told of it."""

    def write_part(self, chunk, table):
        import pyarrow.parquet

        write_table, seen = pyarrow.parquet.write_table, self.folder / "seen"

        def half(rows, file, **how):
            sink = pa.BufferOutputStream()
            write_table(rows, sink, **how)
            file.write(sink.getvalue().to_pybytes()[:-100])
            file.flush()
            os.kill(os.getpid(), signal.SIGKILL)

        if chunk == 2 and not seen.exists():
            seen.touch()
            pyarrow.parquet.write_table = half
        super().write_part(chunk, table)
        if chunk == 3 and not (self.folder / "untold").exists():
            (self.folder / "untold").touch()
            os.kill(os.getpid(), signal.SIGKILL)


# --- the same rows


@pytest.mark.slow
def test_its_rows_are_the_local_engines_byte_for_byte_and_each_goes_on_where_the_other_was(folder, model, tmp_path):
    lines = [f"images/{n:02}.png,{'effusion' if n % 3 else ''},{n % 2},2026-01-0{n % 9 + 1}," for n in range(16)]
    file = tmp_path / "list.csv"
    file.write_text("\n".join(["path,target,site,taken,nothing", *lines, "images/gone.png,,1,2026-01-01,"]))
    tools, told = [GradCAM(model), LayerCAM(model, "layer3")], []

    def run(output, on_progress=None, **options):
        how = {"batch_size": 2, "overlays": OverlayOptions("png", height=32), "on_progress": on_progress}
        return run_batch(tools, file, tmp_path / output, [None, "nodule"], options=BatchOptions(3, **options), **how)

    whole = run("local")
    assert (whole.n_processed, whole.n_failures, whole.failure_counts["there is no such file"]) == (17, 3, 1)
    assert run("ray", shard=(0, 6)).n_processed == 3, "the local engine begins"
    other = run(
        "ray", lambda so_far: told.append((so_far.n_images, so_far.n_processed, so_far.n_failures)), engine="ray"
    )
    assert (other.n_done_before, other.n_processed) == (3, 14)
    assert (other.failure_counts, other.flag_counts) == (whole.failure_counts, whole.flag_counts)
    assert (told[0], told[-1]) == ((17, 0, 0), (17, 14, 3))
    assert len(told) == 1 + 5, "it is told when a chunk is done"
    assert rows(tmp_path / "ray").equals(rows(tmp_path / "local"))
    drawn = [
        {path.name: path.read_bytes() for path in (tmp_path / engine / "overlays").rglob("*.png")}
        for engine in ("ray", "local")
    ]
    assert len(drawn[0]) == 6 * 4 + 8 * 2
    assert drawn[0] == drawn[1]
    facts = [json.loads((tmp_path / engine / "run.json").read_text()) for engine in ("ray", "local")]
    assert facts[0] == facts[1]
    RunStore(tmp_path / "ray").part_path(1).unlink()
    again = run("ray")
    assert (again.n_done_before, again.n_processed) == (14, 3)
    assert rows(tmp_path / "ray").equals(rows(tmp_path / "local"))


OWN = """
import torch
from dataclasses import dataclass
from camscope.images.preprocess import Preprocess

@dataclass
class Sizes:
    wide: int = 8

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.sizes = Sizes()
        self.conv = torch.nn.Conv2d(3, self.sizes.wide, 3)

    def forward(self, x):
        return act(self.conv(x))

def act(x):
    return torch.relu(x)

def net():
    torch.manual_seed(0)
    after = torch.nn.Conv2d(8, 8, 3), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(8, 2)
    return torch.nn.Sequential(Block(), *after)

PREPROCESSING = {"net": Preprocess(resize=(16, 16), mean=(0.5,) * 3, std=(0.5,) * 3)}
CATEGORIES = {"net": ["cat", "dog"]}
TARGET_LAYER = {"net": "0"}
"""


@pytest.mark.thorough
def test_a_model_of_ones_own_file_goes_along_with_what_is_known_of_it(folder, tmp_path, monkeypatch):
    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)  # all paths are relative ones: workers begin where the driver is
    tool = GradCAM(load_model("own.py:net"))
    for engine in ("local", "ray"):
        run_batch(
            tool,
            "images/*.png",
            engine,
            ["dog"],
            options=BatchOptions(chunk_size=6, engine=engine, num_workers=WORKERS[engine]),
        )
    assert rows("ray").equals(rows("local"))
    assert set(rows("ray")["label"].to_pylist()) == {"dog", None}
    assert rows("ray")["layer"][0].as_py() == "0"  # the file says so; the last one would be "1"
    assert rows("ray")["path"][0].as_py() == "images/00.png"


PEAK = """
from camscope.explainers import BaseCAM, register

@register
class PeakCAM(BaseCAM):
    name, paper = "peakcam", "ours"

    def weights(self, activation, gradient):
        return gradient.amax(-1, keepdim=True)
"""


@pytest.mark.slow
def test_workers_load_a_plugin_that_only_the_driver_has(folder, tmp_path, monkeypatch):
    from typer.testing import CliRunner

    from camscope.cli import app
    from camscope.explainers import METHODS

    monkeypatch.chdir(tmp_path)
    Path("peak.py").write_text(PEAK)
    words = ["batch", str(folder), "--methods", "peakcam", "--plugin", "peak.py", "--chunk", "8"]
    try:
        for engine in (["--engine", "ray", "--workers", "1"], ["--engine", "local"]):
            result = CliRunner().invoke(app, [*words, *engine, "-o", engine[1]])
            assert "14 of 16 images" in result.output, result.output
        assert rows("ray").equals(rows("local"))
    finally:
        METHODS.pop("peakcam", None)


@pytest.mark.slow
def test_the_documents_code_runs(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = (SRC.parent / "docs" / "how-to" / "batch.md").read_text(encoding="utf-8")
    section = page[page.index("## On a Ray cluster") :]
    (first, *_), (own, *_) = (re.findall(r"^```python\n(.*?)^```", text, re.M | re.S) for text in (page, section))
    names = {}
    exec(first, names)
    exec(own.replace("num_workers=2", "num_workers=1"), names)
    assert len(BatchRun("heatmaps-by-ray")) == 16


def test_the_commands_in_the_document_have_the_options_they_use():
    from typer.main import get_command

    from camscope.cli import app

    page = (SRC.parent / "docs" / "how-to" / "batch.md").read_text(encoding="utf-8")
    known = {option for one in get_command(app).commands["batch"].params for option in one.opts}
    commands = re.findall(r"^(?:camscope batch|sbatch) .*$", page, re.M)
    assert len(commands) >= 4
    assert {word for command in commands for word in command.split() if word.startswith("-")} <= known


@pytest.mark.thorough
def test_workers_that_wait_for_a_cpu_do_not_hold_up_the_others_and_failures_are_retried(folder, model, tmp_path):
    options = BatchOptions(chunk_size=2, engine="ray", num_workers=5)  # this Ray has two CPUs
    outcome = run_batch(GradCAM(model), folder, tmp_path / "out", options=options)
    assert (outcome.n_processed, outcome.n_failures) == (16, 2)
    (folder / "04.png").write_bytes((folder / "03.png").read_bytes())
    again = run_batch(GradCAM(model), folder, tmp_path / "out", options=options, retry_failed=True)
    assert (again.n_done_before, again.n_processed, again.n_failures) == (14, 2, 1)


# --- what dies


@pytest.mark.parametrize(
    "instants",
    [{"writing"}, pytest.param({"reading", "writing", "telling"}, marks=pytest.mark.thorough)],  # each starts a worker
    ids=" ".join,
)
def test_workers_that_are_killed_while_they_read_and_while_they_write_leave_no_trace(instants, folder, model, tmp_path):
    manifest, plan = build_manifest(folder), local_engine.ChunkPlan(16, 3)
    results, reader = {}, DiesOnceAtTheSixth if "reading" in instants else CountsReads
    for name in ("ray", "local"):
        tool = GradCAM(model, "layer4", preprocess=reader(tmp_path))  # and by the second run it has died
        worker, store = local_engine.BatchWorker([tool], [None], manifest, 2), DiesOnceWhileItWrites(tmp_path / name)
        store.begin_or_resume(build_run_info(worker, 3))
        if name == "local":
            (store.folder / "seen").touch()
        if name == "local" or "telling" not in instants:
            (store.folder / "untold").touch()
        compute = (
            partial(ray_engine.compute_chunks_on_ray, worker, store, plan, 2, None, 1)
            if name == "ray"
            else partial(local_engine.compute_chunks, worker, store, plan, 2)
        )
        results[name] = local_engine.run_chunks(compute, store, plan)
    assert len(list(tmp_path.glob(f"{reader.__name__}-*"))) > 2 * 14, "none was killed: no image was read again"
    assert (tmp_path / "ray" / "seen").exists(), "none was killed in writing"
    assert results["ray"] == results["local"]
    assert rows(tmp_path / "ray").equals(rows(tmp_path / "local"))


@pytest.mark.thorough
def test_images_whose_worker_always_dies_end_the_run_with_their_numbers(folder, model, tmp_path, monkeypatch):
    monkeypatch.setattr(ray_engine, "MAX_ATTEMPTS_PER_CHUNK", 1)
    tool = GradCAM(model, "layer4", preprocess=DiesOfThePortrait(tmp_path))
    with pytest.raises(
        RunError, match=r"rows 4 to 5 of the manifest, from .*/04\.png on: the worker process crashed 1 time"
    ):
        run_batch(tool, folder, tmp_path / "out", options=BatchOptions(chunk_size=2, engine="ray", num_workers=1))
    assert len(list(tmp_path.glob("DiesOfThePortrait-*"))) == 1


DRIVER = """
import sys
from camscope import GradCAM, load_model
from camscope.batch import OverlayOptions, BatchOptions, run_batch
if __name__ == "__main__":
    options = BatchOptions(chunk_size=1, engine="ray", address=sys.argv[3], num_workers=1)
    run_batch(GradCAM(load_model("phantom")), sys.argv[1], sys.argv[2], options=options)
"""


@pytest.mark.thorough  # test_killed_at_any_instant (test_runner) kills a local run
def test_a_driver_that_is_killed_is_followed_by_the_local_engine(folder, model, tmp_path):
    for n in range(16, 100):
        shutil.copy(folder / "00.png", folder / f"{n}.png")
    words = [str(folder), str(tmp_path / "out"), ray.get_runtime_context().gcs_address]
    process = subprocess.Popen([sys.executable, "-c", DRIVER, *words], stderr=subprocess.PIPE)
    parts = tmp_path / "out" / "parts"
    while process.poll() is None and not (parts.exists() and any(parts.glob("part-*"))):
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    _, said = process.communicate()
    assert (process.returncode, said) == (-signal.SIGKILL, b"")
    outcome = run_batch(GradCAM(model), folder, tmp_path / "out", options=BatchOptions(chunk_size=1))
    assert 0 < outcome.n_done_before < 100
    run_batch(GradCAM(model), folder, tmp_path / "whole", options=BatchOptions(chunk_size=1))
    assert rows(tmp_path / "out").equals(rows(tmp_path / "whole"))


# --- how it ends


@pytest.mark.thorough
def test_failures_are_counted_over_all_workers(folder, tmp_path):
    met = tmp_path / "met"
    met.mkdir()
    tool = GradCAM(Refuses(), "layer", preprocess=WaitsUntilTwoHaveMet(met))
    good = [folder / f"{n:02}.png" for n in (0, 1, 2, 3, 6, 7, 8, 9)]
    with pytest.raises(RunError, match=r"^8 images failed, more than the limit of 7: RuntimeError: no \(8 x\)$"):
        run_batch(tool, good, tmp_path / "out", options=BatchOptions(chunk_size=1, engine="ray", max_failures=7))
    assert len(list(met.iterdir())) == 2


def test_what_every_image_would_fail_of_is_the_error_of_the_local_engine(folder, model, tmp_path):
    errors = []
    for engine in ("local", "ray"):
        with pytest.raises(LayerError) as caught:
            run_batch(
                GradCAM(model, "head"),
                folder,
                tmp_path / engine,
                options=BatchOptions(engine=engine, num_workers=WORKERS[engine]),
            )
        errors.append(caught.value)
    assert type(errors[0]) is type(errors[1]) is LayerError
    assert str(errors[0]) == str(errors[1])
    assert (errors[1].__cause__, errors[1].__suppress_context__) == (None, False)


def test_errors_of_all_kinds_arrive_as_they_were():
    missing = pickle.loads(ray_engine.pickle_error(MissingExtraError("fsspec", "batch")))
    assert (type(missing), str(missing)) == (MissingExtraError, str(MissingExtraError("fsspec", "batch")))

    class OddError(Exception):
        def __init__(self, one, two):
            super().__init__(f"{one} and {two}")

    odd = pickle.loads(ray_engine.pickle_error(OddError(1, 2)))
    assert (type(odd), str(odd)) == (RunError, "OddError: 1 and 2")


def test_what_cannot_be_sent_is_said(folder, model, tmp_path):
    tool = GradCAM(model, "layer4", preprocess=Preprocess(iter(())))
    tool.preprocess.function = (n for n in ())
    with pytest.raises(
        RunError, match=r"cannot be sent to workers \(TypeError: cannot pickle 'generator' object\); use the"
    ):
        run_batch(tool, folder, tmp_path / "out", options=BatchOptions(engine="ray"))


def test_arguments_of_the_other_engine_and_rays_that_are_not_there(folder, model, tmp_path, monkeypatch):
    with pytest.raises(InputError, match="expected 'local' or 'ray'"):
        run_batch(GradCAM(model), folder, tmp_path / "out", options=BatchOptions(engine="dask"))
    with pytest.raises(InputError, match="address and num_workers are options of Ray"):
        run_batch(GradCAM(model), folder, tmp_path / "out", options=BatchOptions(num_workers=2))
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(RunError, match=r"no Ray cluster at 127\.0\.0\.1:9 \(.*refused\); leave the address out"):
        run_batch(GradCAM(model), folder, tmp_path / "out", options=BatchOptions(engine="ray", address="127.0.0.1:9"))
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtraError, match=r'ray is not installed; run: pip install "camscope\[ray\]"'):
        run_batch(GradCAM(model), folder, tmp_path / "out", options=BatchOptions(engine="ray"))


def test_a_folder_that_workers_do_not_see_is_named(tmp_path):
    with pytest.raises(
        RunError, match=r"has no folder .*/parts, where parts are written; choose a folder that all nodes share"
    ):
        ray_engine.require_shared_folder(tmp_path / "parts", "where parts are written")


@pytest.mark.parametrize(
    ("machines", "workers", "cuda", "expected"),
    [
        ([(8, 0)], None, False, (8, 1)),
        ([(8, 0)], 2, False, (2, 4)),
        ([(8, 0), (4, 0)], 3, False, (3, 4)),
        ([(8, 0), (4, 0)], 4, False, (4, 2)),
        ([(8, 0)], 20, False, (20, 1)),
        ([(8, 2), (16, 1), (64, 0)], None, True, (3, 4)),
        ([(8, 2), (16, 1)], 1, True, (1, 16)),
    ],
)
def test_workers_share_out_what_a_cluster_has(machines, workers, cuda, expected):
    nodes = [{"Alive": True, "Resources": {"CPU": float(cpus), "GPU": float(gpus)}} for cpus, gpus in machines]
    dead = {"Alive": False, "Resources": {"CPU": 99.0, "GPU": 9.0}}
    assert ray_engine.plan_actor_pool([*nodes, dead], workers, cuda) == expected


def test_a_model_on_cuda_needs_a_gpu():
    with pytest.raises(InputError, match="the cluster has no GPU"):
        ray_engine.plan_actor_pool([{"Alive": True, "Resources": {"CPU": 8.0}}], None, True)
