"""Folders of runs and audits: nothing foreign is replaced or removed, one writer replaces a run, failed images can be retried."""

import errno
import json
import multiprocessing
import os
import resource
import threading
import time
from concurrent.futures.process import BrokenProcessPool
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from camscope import GradCAM, LayerCAM, load_model
from camscope.errors import ImageError, OutputError, RunError, describe_out_of_memory, is_out_of_memory, is_transient

pa = pytest.importorskip("pyarrow")

from camscope.atomic_writes_and_folder_locks import (  # noqa: E402
    FolderLock,
    create_folder_atomically,
    folder_locked,
    open_atomic,
    write_bytes,
    write_unless_identical,
)
from camscope.batch import BatchOptions, BatchRun, build_manifest, run_batch  # noqa: E402 - it needs pyarrow
from camscope.batch import image_loading as batch_memory  # noqa: E402
from camscope.batch import overlay_writer as batch_pictures  # noqa: E402
from camscope.batch.image_loading import MemoryBudget  # noqa: E402
from camscope.batch.run_store import RunStore  # noqa: E402
from camscope.evaluation import evaluate  # noqa: E402
from camscope.images.files.find_and_open_image_files import list_image_paths  # noqa: E402

FACTS = {"run_config": {"methods": {"gradcam 0": {}}, "targets": [0]}}
OTHER = {"run_config": {"methods": {"layercam 0": {}}, "targets": [1]}}


@pytest.fixture(scope="module")
def model():
    return load_model("phantom")


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "images"
    made.mkdir()
    drawn = np.random.default_rng(0)
    for n in range(4):
        Image.fromarray(drawn.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(made / f"{n}.png")
    return made


def rows_of(number: int) -> "pa.Table":
    return pa.table({"row": [number], "status": ["ok"]})


# --- what is not ours


def test_overwriting_removes_no_parts_that_no_run_json_claims(folder, model, tmp_path):
    foreign = tmp_path / "out" / "parts" / "part-00000000.parquet"
    foreign.parent.mkdir(parents=True)
    foreign.write_bytes(b"mine")
    with pytest.raises(OutputError, match=r"holds part files but no run\.json"):
        run_batch(GradCAM(model), folder, tmp_path / "out", overwrite=True)
    assert foreign.read_bytes() == b"mine"


def test_values_do_not_replace_the_maps_they_are_computed_from(folder, model, tmp_path):
    run_batch(GradCAM(model), folder, tmp_path / "out")
    with pytest.raises(OutputError, match="holds maps, which cannot be replaced by metric values"):
        evaluate(tmp_path / "out", tmp_path / "out", overwrite=True)
    assert len(BatchRun(tmp_path / "out")) == 4


def test_overwriting_removes_nothing_behind_a_link(tmp_path):
    there, out = RunStore(tmp_path / "there"), RunStore(tmp_path / "out")
    for store in (there, out):
        with store.open_run(FACTS):
            store.write_part(0, rows_of(0))
    (tmp_path / "aside").mkdir()
    out.parts_folder.rename(tmp_path / "aside" / "parts")
    out.parts_folder.symlink_to(there.parts_folder)
    with pytest.raises(OutputError, match="a link"):
        RunStore(out.folder).begin_or_resume(OTHER, overwrite=True)
    assert there.finished_chunks() == {0}


def audit_of_another_program(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "audit.json").write_text('{"auditReportVersion": 2}')
    return folder


def test_a_folder_with_another_programs_audit_json_is_no_audit(tmp_path):
    pytest.importorskip("pydantic")
    from camscope.audit.run_stages import _check_audit_folder

    with pytest.raises(OutputError, match="exists and is not an audit"):
        _check_audit_folder(audit_of_another_program(tmp_path / "npm"))


def own_audit(folder: Path) -> Path:
    """What an audit that was stopped leaves behind, and some files of the user's own beside it."""
    from camscope.audit.provenance.audit_files_safe_to_replace import REPORT_STAGE, log_stage_start

    (folder / "stages").mkdir(parents=True)
    plan = dict.fromkeys(("camscope", "code", "config", "data", "model", "source", "masks"), "x")
    (folder / "audit.json").write_text(json.dumps(plan))
    (folder / "log.jsonl").write_text('{"event": "begun", "time": "now"}\n')
    for stage in (REPORT_STAGE, "check", "explain", "faithfulness", "localization"):
        log_stage_start(folder, stage, [0])
    (folder / "stages" / "check.json").write_text('{"tested": true, "reason": ""}')
    for name in ("maps", "faithfulness/0/maps", "localization/0"):
        store = RunStore(folder / name)
        with store.open_run(FACTS):
            store.write_part(0, rows_of(0))
    (folder / "thesis.tex").write_text("mine")
    return folder


def files_below(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def logged_audit(folder: Path) -> Path:
    """What an audit leaves behind that wrote down what it wrote."""
    from camscope.audit.provenance.audit_files_safe_to_replace import REPORT_STAGE, log_stage_files, log_stage_start

    own_audit(folder)
    for stage in ("check", "explain", "faithfulness", "localization", REPORT_STAGE):
        log_stage_start(folder, stage, [0])
        log_stage_files(folder, stage)
    return folder


@pytest.mark.parametrize("audit", [own_audit, logged_audit])
def test_of_an_audit_only_what_an_audit_wrote_is_removed(audit, tmp_path):
    pytest.importorskip("pydantic")
    from camscope.audit.provenance.audit_files_safe_to_replace import list_audit_files, remove_outputs

    folder = audit(tmp_path / "audit")
    (folder / "maps" / f".{'0' * 16}.part").write_bytes(b"half")
    list_audit_files(folder)
    remove_outputs(folder)
    assert sorted(files_below(folder)) == ["audit.json", "log.jsonl", "thesis.tex"]
    assert not (folder / "maps").exists()


FOREIGN = ["maps/precious.txt", "stages/notes.md", "robustness/r.txt", "faithfulness/0/maps/parts/x.parquet"]


@pytest.mark.parametrize("audit", [own_audit, logged_audit])
def test_all_that_no_audit_wrote_is_listed_and_nothing_is_removed(audit, tmp_path):
    pytest.importorskip("pydantic")
    from camscope.audit.provenance.audit_files_safe_to_replace import remove_outputs

    folder = audit(tmp_path / "audit")
    for name in FOREIGN:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("mine")
    (folder / "localization" / "1").symlink_to(tmp_path)
    before = files_below(folder)
    with pytest.raises(OutputError, match="nothing was replaced or removed") as error:
        remove_outputs(folder)
    for name in (*FOREIGN, "localization/1 (a link)"):
        assert name in str(error.value)
    assert files_below(folder) == before


@pytest.mark.parametrize(
    "place", ["robustness/7", "robustness/7/maps", "faithfulness/1/values", "faithfulness/0", "maps/x"]
)
def test_a_run_of_the_users_own_in_an_audit_is_not_removed(place, tmp_path):
    pytest.importorskip("pydantic")
    from camscope.audit.provenance.audit_files_safe_to_replace import remove_outputs

    folder = logged_audit(tmp_path / "audit")
    store = RunStore(folder / place)
    with store.open_run(FACTS):
        store.write_part(0, rows_of(0))
    before = files_below(folder)
    with pytest.raises(
        OutputError, match=rf"not written by an audit.*{place}/run\.json, {place}/parts/part-00000000\.parquet"
    ):
        remove_outputs(folder)
    assert files_below(folder) == before


@pytest.mark.parametrize(
    "name", ["stages/check.json", "maps/run.json", "faithfulness/0/maps/parts/part-00000000.parquet"]
)
def test_what_was_changed_since_an_audit_wrote_it_is_not_removed(name, tmp_path):
    pytest.importorskip("pydantic")
    from camscope.audit.provenance.audit_files_safe_to_replace import remove_outputs

    folder = logged_audit(tmp_path / "audit")
    (folder / name).write_bytes((folder / name).read_bytes() + b"\n")
    before = files_below(folder)
    with pytest.raises(OutputError, match=rf"changed since: {name}; nothing"):
        remove_outputs(folder)
    assert files_below(folder) == before


def test_a_stage_that_was_stopped_leaves_what_may_be_removed(tmp_path):
    pytest.importorskip("pydantic")
    from camscope.audit.provenance.audit_files_safe_to_replace import log_stage_start, remove_outputs

    folder = logged_audit(tmp_path / "audit")
    log_stage_start(folder, "robustness", [0, 2])
    for place in ("robustness/0/maps", "robustness/7/maps"):
        store = RunStore(folder / place)
        with store.open_run(FACTS):
            store.write_part(0, rows_of(0))
    with pytest.raises(OutputError, match=r"changed since: robustness/7/maps/run\.json, robustness/7/maps/parts/part"):
        remove_outputs(folder)
    RunStore(folder / "robustness" / "7" / "maps").remove()
    remove_outputs(folder)
    assert sorted(files_below(folder)) == ["audit.json", "log.jsonl", "thesis.tex"]


@pytest.mark.parametrize(
    "name", ["report.html", "summary.json", "metrics.parquet", "failures.csv", "stages/check.json", "maps/run.json"]
)
def test_a_foreign_file_under_a_name_of_an_audit_is_an_error_and_stays(name, tmp_path):
    pytest.importorskip("pydantic")
    from camscope.audit.provenance.audit_files_safe_to_replace import remove_outputs

    folder = own_audit(tmp_path / "audit")
    (folder / name).write_text('{"mine": 1}')
    with pytest.raises(OutputError, match="not written by an audit"):
        remove_outputs(folder)
    assert (folder / name).read_text() == '{"mine": 1}'
    assert RunStore(folder / "faithfulness" / "0" / "maps").finished_chunks() == {0}, (
        "nothing was removed before the error"
    )


def test_a_generated_file_replaces_no_other(tmp_path):
    path = write_unless_identical(tmp_path / "list.csv", b"path\n")
    assert write_unless_identical(path, b"path\n") == path
    with pytest.raises(OutputError, match="exists"):
        write_unless_identical(path, b"other\n")
    assert write_unless_identical(path, b"other\n", overwrite=True).read_bytes() == b"other\n"


# --- two processes


def test_a_run_that_another_process_writes_is_not_replaced_and_shards_share_it(tmp_path):
    first, second, third = (RunStore(tmp_path / "out") for _ in range(3))
    with first.open_run(FACTS), second.open_run(FACTS):
        with pytest.raises(OutputError, match="another process is writing"):
            third.begin_or_resume(OTHER, overwrite=True)
        first.write_part(0, rows_of(0))
        second.write_part(1, rows_of(1))
    with third.open_run(OTHER, overwrite=True):
        assert third.finished_chunks() == set()


def test_a_process_whose_run_was_replaced_ends_with_one_error(tmp_path, monkeypatch):
    monkeypatch.setattr(FolderLock, "_try_lock", lambda self, kind: True)  # a file system without locks
    first, second = RunStore(tmp_path / "out"), RunStore(tmp_path / "out")
    first.begin_or_resume(FACTS)
    second.begin_or_resume(OTHER, overwrite=True)
    with pytest.raises(RunError, match="replaced by another run"):
        first.write_part(0, rows_of(0))
    assert (second.finished_chunks(), os.listdir(second.parts_folder)) == (set(), [])  # noqa: PTH208 - names


def test_a_part_of_another_run_is_not_counted_as_done(tmp_path):
    stale, store = RunStore(tmp_path / "stale"), RunStore(tmp_path / "out")
    with stale.open_run(OTHER):
        stale.write_part(0, rows_of(0))
    with store.open_run(FACTS):
        store.write_part(1, rows_of(1))
        (stale.parts_folder / "part-00000000.parquet").rename(store.part_path(0))
        assert store.select_parts_of_run([0, 1]) == [1]


def _hold(folder, ready):
    store = RunStore(folder)
    store.begin_or_resume(FACTS)
    ready.set()
    time.sleep(60)


def test_a_killed_process_leaves_no_lock(tmp_path):
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    process = context.Process(target=_hold, args=(tmp_path / "out", ready))
    process.start()
    assert ready.wait(30)
    with pytest.raises(OutputError, match="another process"):
        RunStore(tmp_path / "out").begin_or_resume(OTHER, overwrite=True)
    process.kill()
    process.join()
    with RunStore(tmp_path / "out").open_run(OTHER, overwrite=True) as new:
        assert new


def test_an_audits_folder_is_held_by_one_at_a_time_and_an_empty_one_goes(tmp_path):
    audit = tmp_path / "audit"
    with folder_locked(audit), pytest.raises(OutputError, match="another process"), folder_locked(audit):
        pass
    assert not (tmp_path / "audit").exists()


# --- failures


@pytest.mark.slow
def test_a_file_that_was_away_is_explained_when_failed_images_are_retried(folder, model, tmp_path):
    (folder / "1.png").rename(tmp_path / "away.png")
    (folder / "2.png").write_bytes(b"no image")
    (tmp_path / "list.csv").write_text("path\n" + "".join(f"images/{n}.png\n" for n in range(4)))
    tools = [GradCAM(model), LayerCAM(model, "layer3")]
    outcome = run_batch(tools, tmp_path / "list.csv", tmp_path / "out", options=BatchOptions(chunk_size=2))
    assert outcome.transient_failure_counts == {"there is no such file": 1}
    assert outcome.n_failures == 2
    (tmp_path / "away.png").rename(folder / "1.png")
    assert (
        run_batch(tools, tmp_path / "list.csv", tmp_path / "out", options=BatchOptions(chunk_size=2)).n_failures == 2
    ), "not asked to"
    again = run_batch(
        tools, tmp_path / "list.csv", tmp_path / "out", options=BatchOptions(chunk_size=2), retry_failed=True
    )
    assert (again.n_images, again.n_done_before, again.n_processed, again.n_failures) == (4, 2, 2, 1)
    assert not again.transient_failure_counts
    run_batch(tools, tmp_path / "list.csv", tmp_path / "whole", options=BatchOptions(chunk_size=2))
    columns = ["row", "id", "sha256", "status", "error", "failure_kind", "method"]
    there, whole = BatchRun(tmp_path / "out"), BatchRun(tmp_path / "whole")
    assert there.table(columns).to_pylist() == whole.table(columns).to_pylist()
    for one, other in zip(there, whole, strict=True):  # the images of a pass are other ones
        np.testing.assert_allclose(one.attribution, other.attribution, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_values_of_a_retried_image_are_computed_again(folder, model, tmp_path):
    (folder / "1.png").rename(tmp_path / "away.png")
    (tmp_path / "list.csv").write_text("path\n" + "".join(f"images/{n}.png\n" for n in range(4)))
    run_batch(GradCAM(model), tmp_path / "list.csv", tmp_path / "out")
    before = evaluate(tmp_path / "out", tmp_path / "values").table("not control and value is not null")
    (tmp_path / "away.png").rename(folder / "1.png")
    run_batch(GradCAM(model), tmp_path / "list.csv", tmp_path / "out", retry_failed=True)
    after = evaluate(tmp_path / "out", tmp_path / "values").table("not control and value is not null")
    assert set(after["row"].to_pylist()) - set(before["row"].to_pylist()) == {1}


def test_out_of_memory_is_transient_and_called_so(folder, model, tmp_path, monkeypatch):
    def full(self, *args, **kwargs):
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(Image.Image, "load", full)
        outcome = run_batch(GradCAM(model), folder, tmp_path / "out")
    assert list(outcome.failure_counts) == ["out of memory while decoding it"]
    assert outcome.transient_failure_counts == outcome.failure_counts
    assert run_batch(GradCAM(model), folder, tmp_path / "out", retry_failed=True).n_failures == 0


def test_threads_that_ran_out_are_transient(folder, model, tmp_path, monkeypatch):
    def without_threads(*_, **__):
        raise RuntimeError("can't start new thread")

    for name in ("camscope.batch.image_loading.read_photo", "camscope.batch.batch_worker.run_methods"):
        with monkeypatch.context() as patched:
            patched.setattr(name, without_threads)
            outcome = run_batch(GradCAM(model), folder, tmp_path / name)
        assert outcome.n_failures == outcome.n_images
        assert outcome.transient_failure_counts == outcome.failure_counts
        assert run_batch(GradCAM(model), folder, tmp_path / name, retry_failed=True).n_failures == 0


def caused_by(cause):
    try:
        raise ValueError("a row could not be read") from cause
    except ValueError as error:
        return error


@pytest.mark.parametrize(
    ("error", "transient", "memory"),
    [
        (FileNotFoundError(errno.ENOENT, "no such file"), True, False),
        (OSError(errno.EIO, "input/output error"), True, False),
        (OSError(errno.EISDIR, "is a directory"), False, False),
        (OSError("broken data stream when reading image file"), False, False),
        (TimeoutError(), True, False),
        (ValueError("not an image"), False, False),
        (MemoryError(), True, True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True, True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8000 bytes"), True, True),
        (RuntimeError("can't start new thread"), True, False),
        (RuntimeError("can't start new thread\n"), True, False),
        (RuntimeError("can't start new thread at interpreter shutdown"), True, False),
        (RuntimeError("Thread creation failed: Resource temporarily unavailable"), True, False),
        (BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"), True, False),
        (OSError(errno.EMFILE, "Too many open files"), True, False),
        (OSError(errno.ENFILE, "Too many open files in system"), True, False),
        (OSError("Too many open files"), True, False),
        (RuntimeError("unable to open shared memory object </torch_1>: Too many open files (24)"), True, False),
        (BrokenProcessPool("A process in the process pool was terminated abruptly"), True, False),
        (ExceptionGroup("errors of threads", [MemoryError()]), True, True),
        (ExceptionGroup("errors", [ExceptionGroup("errors", [MemoryError(), TimeoutError()])]), True, False),
        (ExceptionGroup("errors of threads", [MemoryError(), ValueError("not an image")]), False, False),
        (ExceptionGroup("errors of threads", [caused_by(MemoryError())]), True, False),
        (caused_by(ExceptionGroup("errors of threads", [OSError(errno.EMFILE, "too many")])), True, False),
        (ValueError("Too many open files"), False, False),
        (ImageError("can't start new thread"), False, False),
        (RuntimeError("shapes differ"), False, False),
    ],
)
def test_failures_are_told_apart_also_behind_an_error_of_ours(error, transient, memory):
    def read():
        try:
            raise error
        except Exception:
            raise ImageError("a.png: it cannot be read") from None

    with pytest.raises(ImageError) as found:
        read()
    assert is_transient(found.value) is transient
    assert (is_transient(error), is_out_of_memory(error)) == (transient, memory)


def test_a_group_that_is_the_context_of_an_error_in_it_ends():
    error = ValueError("not an image")
    error.__context__ = ExceptionGroup("errors of threads", [error])
    assert not is_transient(error)
    assert not is_transient(error.__context__)


def test_rows_that_fail_for_a_moment_are_retried_and_say_so(folder, model, tmp_path, monkeypatch):
    def fail(*_, **__):
        raise ExceptionGroup("errors of threads", [RuntimeError("can't start new thread at interpreter shutdown")])

    with monkeypatch.context() as patched:
        patched.setattr("camscope.batch.batch_worker.run_methods", fail)
        outcome = run_batch(GradCAM(model), folder, tmp_path / "out")
    assert outcome.transient_failure_counts == outcome.failure_counts != {}
    assert run_batch(GradCAM(model), folder, tmp_path / "out", retry_failed=True).n_failures == 0


def test_a_memory_error_is_told_without_stack_frames():
    said = "[enforce fail at alloc_cpu.cpp:118] err == 0. DefaultCPUAllocator: can't allocate memory: "
    said += "you tried to allocate 96 bytes. Error code 12\nframe #0: c10::ThrowEnforceNotMet"
    assert describe_out_of_memory(RuntimeError(said)) == "out of memory (96 bytes requested)"


# --- links


def test_linked_folders_are_searched_once_and_a_link_to_itself_ends(tmp_path):
    (tmp_path / "d" / "a").mkdir(parents=True)
    (tmp_path / "e" / "f").mkdir(parents=True)
    for name in ("d/x.png", "d/a/y.png", "e/q.png", "e/f/r.png"):
        (tmp_path / name).touch()
    (tmp_path / "d" / "a" / "self").symlink_to(tmp_path / "d")
    (tmp_path / "d" / "linked").symlink_to(tmp_path / "e")
    (tmp_path / "d" / "twice").symlink_to(tmp_path / "e")
    expected = [str(tmp_path / name) for name in ("d/a/y.png", "d/linked/f/r.png", "d/linked/q.png", "d/x.png")]
    assert sorted(list_image_paths(str(tmp_path / "d"), recursive=True)) == expected
    assert sorted(list_image_paths(str(tmp_path / "d" / "**" / "*.png"), recursive=True)) == expected
    assert build_manifest(str(tmp_path / "d" / "**" / "*.png")).table["path"].to_pylist() == expected


def test_double_stars_match_what_glob_matches_where_there_is_no_link(tmp_path, monkeypatch):
    import glob

    for name in ("a/b/c/1.png", "a/b/2.png", "a/3.png", "4.png", "a/.hidden/5.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    for pattern in ("**/*.png", "a/**/*.png", "a/**", "**/b/**/*.png", "*/**/c/*.png", "./**/*.png"):
        there = {os.path.normpath(path) for path in glob.glob(pattern, recursive=True) if path.endswith(".png")}  # noqa: PTH207
        assert {os.path.normpath(path) for path in list_image_paths(pattern, recursive=True)} == there


# --- memory


def test_large_images_are_decoded_alone_and_overlays_have_a_largest_size(folder, model, tmp_path, monkeypatch):
    Image.new("1", (900, 600), 1).save(folder / "large.png")
    monkeypatch.setattr(batch_memory, "MAX_WAITING_BYTES", 0)  # none waits: each is read again when it is drawn
    plain = run_batch(GradCAM(model), folder, tmp_path / "plain")
    monkeypatch.setattr(batch_pictures, "MAX_OVERLAY_PIXELS", 60_000)
    outcome = run_batch(GradCAM(model), folder, tmp_path / "out", overlays="png")
    assert outcome.n_processed == plain.n_processed == 5
    (overlay,) = (tmp_path / "out" / "overlays").rglob("*large*.png")
    with Image.open(overlay) as drawn:
        assert drawn.width * drawn.height <= 60_000 * 1.3  # a strip below it may tell of a flag
        assert drawn.width == 300
    assert BatchRun(tmp_path / "out").table(["attribution"]) == BatchRun(tmp_path / "plain").table(["attribution"])


def test_a_budget_admits_what_fits_and_what_is_too_large_alone():
    budget, order = MemoryBudget(1), []
    entered = threading.Event()

    def large():
        with budget.reserve(2**40):
            order.append("large")
            entered.set()

    with budget.reserve(2**20):
        thread = threading.Thread(target=large)
        thread.start()
        assert not entered.wait(0.1)
        order.append("small")
    thread.join()
    assert order == ["small", "large"]


@pytest.mark.parametrize("is_limited", [True, False])
def test_large_images_are_decoded_and_drawn_one_after_the_other(model, tmp_path, monkeypatch, is_limited):
    from camscope.images import photo_reader

    (tmp_path / "images").mkdir()
    for n in range(12):
        Image.new("1", (500, 400), n % 2).save(tmp_path / "images" / f"{n}.png")
    n_bytes = 500 * 400 * (batch_memory.DECODING_BYTES_PER_PIXEL + batch_memory.DRAWING_BYTES_PER_PIXEL)
    monkeypatch.setattr(batch_memory, "MAX_BUDGET_BYTES", int(1.9 * 500 * 400 * batch_memory.DECODING_BYTES_PER_PIXEL))
    monkeypatch.setattr(batch_memory, "MAX_WAITING_BYTES", n_bytes)
    decode, lock, active, peaks = photo_reader._decode_pixels, threading.Lock(), [0], []

    def counted(*args):
        with lock:
            active[0] += 1
            peaks.append(active[0])
        time.sleep(0.02)
        try:
            return decode(*args)
        finally:
            with lock:
                active[0] -= 1

    monkeypatch.setattr(photo_reader, "_decode_pixels", counted)
    if not is_limited:  # without the limit the images are decoded at once, and this test would notice
        monkeypatch.setattr(MemoryBudget, "reserve", lambda self, n_bytes: nullcontext())
    outcome = run_batch(GradCAM(model), tmp_path / "images", tmp_path / "out", overlays="jpg", num_threads=6)
    assert outcome.n_processed == 12
    assert len(peaks) >= 12
    assert (max(peaks) == 1) is is_limited


def test_waiting_images_count_until_they_are_freed(monkeypatch):
    monkeypatch.setattr(batch_memory, "MAX_WAITING_BYTES", 100)
    budget, image = MemoryBudget(1), np.zeros((5, 6, 3), np.uint8)
    assert budget.try_reserve_memory_for_images(image, None)
    assert not budget.try_reserve_memory_for_images(np.zeros((5, 6, 3), np.uint8))
    del image
    assert budget.try_reserve_memory_for_images(np.zeros((5, 6, 3), np.uint8))


# --- disks


@pytest.fixture
def small_files():
    """No file may be larger than 4,096 bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_file_that_cannot_be_written_is_named_and_leaves_nothing(tmp_path, small_files):
    with pytest.raises(OutputError, match=rf"{tmp_path}/a\.bin: it cannot be written: .*10,000 bytes needed"):
        write_bytes(tmp_path / "a.bin", bytes(10_000))
    store = RunStore(tmp_path / "run")
    with store.open_run(FACTS), pytest.raises(OutputError, match=r"part-00000003\.parquet: it cannot be written"):
        store.write_part(3, pa.table({"row": np.random.default_rng(0).integers(0, 2**62, 5000)}))
    with (
        pytest.raises(OutputError, match=r"0001\.dcm: it cannot be written"),
        create_folder_atomically(tmp_path / "series") as made,
    ):
        write_bytes(made / "0001.dcm", bytes(10_000))
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == ["run.json"]
    assert not (tmp_path / "series").exists()


def test_on_a_full_disk_the_bytes_needed_and_free_are_told(tmp_path, monkeypatch):
    def full(file):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OutputError, match=r"a\.bin: it cannot be written: No space left on device \(.*bytes free\)"):
        write_bytes(tmp_path / "a.bin", b"data")
    assert not list(tmp_path.iterdir())


def test_an_error_of_who_writes_stays_what_it_is(tmp_path):
    with pytest.raises(FileNotFoundError), open_atomic(tmp_path / "a.csv"):
        (tmp_path / "not there").read_bytes()
    assert not list(tmp_path.iterdir())
