"""Files that someone else made: a run, a table or a folder names what it likes, and nothing happens outside its place."""

import ast
import contextlib
import csv
import io
import json
import os
import random
import re
import shutil
import signal
import socket
import string
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

import camscope
from camscope import GradCAM, load_model
from camscope.atomic_writes_and_folder_locks import (
    build_output_path,
    check_regular_files,
    open_regular_file,
    write_bytes,
)
from camscope.cli import app
from camscope.errors import CamscopeError, ImageError, InputError, OutputError
from tests.floors import iter_nodes

pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
fsspec = pytest.importorskip("fsspec")
pytest.importorskip("duckdb")

from camscope.batch import BatchRun, OverlayOptions, build_manifest, inspect_images, run_batch, run_reader  # noqa: E402 - it needs pyarrow
from camscope.batch.csv_export import CellEscaper  # noqa: E402
from camscope.batch.inspection import DatasetInspection  # noqa: E402
from camscope.batch.path_resolver import REMOTE_SCHEMES, PathResolver, is_network_share, is_remote_store_url  # noqa: E402
from camscope.batch.run_store import RunStore  # noqa: E402
from camscope.evaluation import evaluate, load_ground_truth  # noqa: E402
from camscope.evaluation.ground_truth import CocoAnnotations  # noqa: E402

SOURCES = Path(camscope.__file__).parent
HOSTILE = [
    "/../../../victim/pwned",
    "../../victim/pwned",
    "..",
    "/victim",
    "a/b",
    "a\\b",
    "C:x",
    "-rf",
    ".hidden",
    "a\x00b",
    "x" * 300,
]
WORDS = ("sha256", "parameters_digest", "method", "target", "id", "path", "label", "layer", "overlay")


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    for n in range(3):
        Image.fromarray(np.random.default_rng(n).integers(0, 256, (24, 24, 3), dtype=np.uint8)).save(
            folder / f"{n}.png"
        )
    return folder


@pytest.fixture(scope="module")
def run(images, tmp_path_factory):
    """Three images by one method, with their overlays."""
    folder = tmp_path_factory.mktemp("received") / "run"
    run_batch(GradCAM(load_model("phantom")), images, folder, ["nodule"], overlays=OverlayOptions("png", height=16))
    return folder


def received(run, folder, change=lambda facts: None, **columns):
    """A copy of a run whose facts and columns someone changed."""
    shutil.copytree(run, folder)
    facts = json.loads((folder / "run.json").read_text())
    change(facts)
    (folder / "run.json").write_text(json.dumps(facts))
    for part in (folder / "parts").iterdir():
        table = parquet.read_table(part)
        for name, value in columns.items():
            values = [value(n) if callable(value) else value for n in range(table.num_rows)]
            at = table.schema.get_field_index(name)
            table = table.set_column(at, name, pa.array(values, pa.string()))
        parquet.write_table(table, part)
    return folder


def files_of(folder):
    return {path for path in folder.rglob("*") if not path.is_dir() or path.is_symlink()}


def anywhere(folder="/"):
    return lambda facts: facts.update(root={"folder": str(folder), "confined": False})


@pytest.fixture
def in_time():
    """What waits for a pipe is interrupted, in the main thread."""

    def late(number, frame):
        raise TimeoutError("it waits for a pipe, or reads a device")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


# --- where outputs go


@pytest.mark.parametrize("word", HOSTILE)
@pytest.mark.one_in(3)
def test_a_run_names_no_file_outside_the_folder_of_its_export(run, word, tmp_path):
    def several(facts):  # so that the settings and the target are part of the names
        facts["run_config"]["methods"] = {f"{word} aaaa": {}, f"{word} bbbb": {}}
        facts["run_config"]["targets"] = [word, "nodule"]

    made = received(run, tmp_path / "in" / "run", several, **dict.fromkeys(WORDS, word))
    (tmp_path / "victim").mkdir()
    before, out = files_of(tmp_path), tmp_path / "out" / "a" / "b"
    told = BatchRun(made).export(out, ["json", "npz", "csv", "coco"])
    BatchRun(made).save_html(tmp_path / "page.html")
    new = files_of(tmp_path) - before - {tmp_path / "page.html"}
    assert told.n_files == len(new) == 8  # two of each image, and the two tables
    assert {path.parent for path in new} == {out}
    assert all(re.fullmatch(r"[a-z0-9][A-Za-z0-9.-]{1,239}", path.name) for path in new)


def test_a_name_is_a_plain_one_or_an_error(tmp_path):
    draw = random.Random(0)
    letters = "ab01._-/\\: \x00\n~é%*" + "".join(chr(draw.randrange(0x2000, 0x10000)) for _ in range(4)).replace(
        "\ud800", ""
    )
    words = ["".join(draw.choices(letters, k=draw.randrange(6))) for _ in range(3000)]
    allowed = 0
    for word in [*words, *HOSTILE, "..", ".", "", "a\n", "a/../b", "x" * 241]:
        try:
            path = build_output_path(tmp_path, word)
        except OutputError:
            continue
        allowed += 1
        assert (path.parent, path.name) == (tmp_path, word)
        assert word.isascii()
        assert set(word) <= set(string.ascii_letters + string.digits + "._-")
        assert word[0] not in ".-"
    assert 20 < allowed < 1000
    assert build_output_path(tmp_path, "a", "b.png") == tmp_path / "a" / "b.png"


def test_no_link_leads_an_output_out_of_its_folder(run, images, tmp_path):
    out, victim = tmp_path / "out", tmp_path / "victim"
    out.mkdir()
    shutil.copytree(run, victim)
    before = {path: path.read_bytes() for path in files_of(victim)}
    (out / "sub").symlink_to(victim)
    (out / "file.png").symlink_to(victim / "run.json")
    for names in (("sub", "a.png"), ("sub",), ("file.png",)):
        with pytest.raises(OutputError, match="through a link; remove the link"):
            build_output_path(out, *names)
    for name in ("parts", "overlays"):
        mine = received(run, tmp_path / f"mine-{name}")
        shutil.rmtree(mine / name)
        (mine / name).symlink_to(victim / name)
        for overwrite in (False, True):
            with pytest.raises(OutputError, match=f"{name} leads out of .* through a link"):
                run_batch(
                    GradCAM(load_model("phantom")),
                    images,
                    mine,
                    ["nodule"],
                    overlays=OverlayOptions("png", height=16),
                    overwrite=overwrite,
                )
    assert {path: path.read_bytes() for path in files_of(victim)} == before


WRITERS = {  # beside atomic_writes_and_folder_locks.py: the log of an audit, the key of names of scans, a cache, a device
    # files of a reader study have fixed names or numbers, in a folder that is renamed when it is complete; a log is appended to
    "batch/reader_study/export_reader_study.py": 6,
    "cli/event_log.py": 1,
    "audit/provenance/provenance_file.py": 1,
    "images/files/redacted_errors_and_file_pseudonyms.py": 1,
}


def test_files_are_opened_for_writing_in_one_place():
    """By the syntax tree: a new place that writes has to come here, and to say how it stays in its folder."""
    found: dict[str, int] = {}
    for path in SOURCES.rglob("*.py"):
        for node in iter_nodes(path):
            if isinstance(node, ast.Call) and _writes(node):
                name = path.relative_to(SOURCES).as_posix()
                found[name] = found.get(name, 0) + 1
    assert found.pop("atomic_writes_and_folder_locks.py") >= 1
    assert found == WRITERS


def _writes(call):
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if name in ("write_text", "touch", "imwrite", "to_csv", "to_parquet") or (
        name == "write_bytes" and isinstance(call.func, ast.Attribute)
    ):
        return True
    if name == "open" and isinstance(call.func, ast.Attribute) and getattr(call.func.value, "id", "") == "os":
        return any("O_WRONLY" in ast.dump(one) or "O_RDWR" in ast.dump(one) for one in call.args)
    modes = [one.value for one in call.args if isinstance(one, ast.Constant) and isinstance(one.value, str)]
    if name in ("FileIO", "_TemporaryFile"):
        return True
    return name == "open" and any(re.fullmatch(r"[rwxab+]{1,3}", mode) and set(mode) & set("wxa+") for mode in modes)


# readers of files that path_in made
JOINED = {
    "audit/provenance/audit_files_safe_to_replace.py",
    "audit/run_stages.py",
    "batch/reader_study/export_reader_study.py",  # numbers of readers, sessions and cases
    "cli/benchmark_methods_on_synthetic_radiographs.py",
}


def test_names_that_are_put_together_become_paths_in_one_place():
    """Nowhere is a formatted text joined to a folder, but to read what is there."""
    found = set()
    for path in SOURCES.rglob("*.py"):
        for node in iter_nodes(path):
            joined = node.right if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div) else None
            if isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) in (
                "Path",
                "joinpath",
                "join",
            ):
                joined = next((one for one in node.args[1:] if isinstance(one, ast.JoinedStr)), None)
            if isinstance(joined, ast.JoinedStr):
                found.add(path.relative_to(SOURCES).as_posix())
    assert found == JOINED


# --- a received run is inert


def behind_urls(images):
    """The images of a run in a store that answers everyone."""
    for n in range(3):
        with fsspec.open(f"memory://received/{n}.png", "wb") as file:
            file.write((images / f"{n}.png").read_bytes())
    return lambda n: f"memory://received/{n}.png"


def test_nothing_is_fetched_unless_asked_for(run, images, tmp_path, monkeypatch):
    made = received(run, tmp_path / "run", anywhere(), path=behind_urls(images))
    asked, original = [], fsspec.open
    monkeypatch.setattr(fsspec, "open", lambda url, *words: asked.append(url) or original(url, *words))
    monkeypatch.setattr(socket.socket, "connect", lambda *words: asked.append(words))
    model = load_model("phantom")
    kept = BatchRun(made)
    page = kept.save_html(tmp_path / "page.html").read_text()
    assert "Original missing: the image is not on this machine; to fetch it, pass --fetch" in page
    told = kept.export(tmp_path / "png", "png")
    assert (told.n_files, list(told.failure_counts)) == (
        0,
        ["the image is not on this machine; to fetch it, pass --fetch (Python: fetch=True)"],
    )
    assert len(list(kept)) == 3
    assert kept.n_unfetched_images == 3
    evaluate(kept, tmp_path / "values")
    with pytest.raises(ImageError, match="3 images of the run are not on this machine; to fetch them, pass --fetch"):
        evaluate(kept, tmp_path / "asked", metrics=["deletion"], model=model)
    assert asked == []
    fetching = BatchRun(made, fetch=True)
    row = fetching.table().to_pylist()[1]
    np.testing.assert_array_equal(fetching.read_image(row), np.asarray(Image.open(images / "1.png")))
    assert asked == ["memory://received/1.png"]
    assert fetching.n_unfetched_images == 0


@pytest.mark.slow
def test_commands_fetch_with_fetch_alone(run, images, tmp_path, monkeypatch):
    made = received(run, tmp_path / "run", anywhere(), path=behind_urls(images))
    asked, original = [], fsspec.open
    monkeypatch.setattr(fsspec, "open", lambda url, *words: asked.append(url) or original(url, *words))

    def call(*words):
        before = len(asked)
        done = CliRunner().invoke(app, [str(word) for word in words])
        return done.exit_code, len(asked) - before, done.stderr

    commands = (
        ("show", made, "-o", tmp_path / "page.html"),
        ("export", made, "-o", tmp_path / "png"),
        ("evaluate", made, "-o", tmp_path / "values", "--metrics", "sparseness"),
    )
    for words in commands:
        code, count, said = call(*words)
        assert count == 0, words
        assert "pass --fetch" in said, words
        code, count, said = call(*words, "--overwrite", "--fetch")
        assert (code, count >= 3, "--fetch" in said) == (0, True, False), words


def test_a_run_names_neither_a_dataset_to_download_nor_the_folder_for_it(run, tmp_path, monkeypatch):
    victim = tmp_path / "victim"
    victim.mkdir()

    def change(facts):
        facts["root"] = {"folder": str(victim), "confined": True}
        facts["run_config"]["manifest"]["dataset"] = "torchvision:FakeData"

    made, asked = received(run, tmp_path / "run", change), []
    monkeypatch.setattr(run_reader, "build_manifest", lambda *words: asked.append(words) or build_manifest(*words))
    page = BatchRun(made).save_html(tmp_path / "page.html").read_text()
    assert "not downloaded by default; pass --fetch" in page
    with pytest.raises(ImageError, match="the dataset 'torchvision:FakeData', which is not downloaded by default"):
        BatchRun(made).require_images()
    assert asked == []
    BatchRun(made, fetch=True).require_images()
    assert asked == [("torchvision:FakeData",)]  # and no folder
    assert list(victim.iterdir()) == []


def test_a_run_is_read_with_what_it_was_made_of_wherever_it_says_that_is(run, images, tmp_path):
    """What was passed is the user's own: it is read, URLs too, and nothing that the run names."""
    made = received(run, tmp_path / "run", anywhere(tmp_path), path=lambda n: f"https://localhost:9/{n}.png")
    table = BatchRun(made, [images / f"{n}.png" for n in range(3)])
    np.testing.assert_array_equal(
        table.read_image(table.table().to_pylist()[2]), np.asarray(Image.open(images / "2.png"))
    )
    one = BatchRun(made, images / "0.png")
    with pytest.raises(ImageError, match=r"^the manifest has no row 2, so it is not the manifest of the run"):
        one.read_image(one.table().to_pylist()[2])


@pytest.mark.parametrize("ending", [".png", ".dcm", ".nii.gz", ".mhd", "", ".dcm#1"])
@pytest.mark.parametrize("kind", ["pipe", "device", "socket"])
@pytest.mark.one_in(5)
def test_what_never_ends_is_neither_waited_for_nor_read(run, ending, kind, tmp_path, in_time, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a socket's name is short
    name = f"never{ending.partition('#')[0]}"
    if kind == "pipe":
        os.mkfifo(name)
    elif kind == "device":
        Path(name).symlink_to("/dev/zero")
    else:
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(name)
    made = received(run, tmp_path / "run", anywhere(), path=str(tmp_path / f"never{ending}"))
    kept = BatchRun(made)
    with pytest.raises(ImageError, match="not a regular file"):
        kept.read_source(kept.table().to_pylist()[0])
    with pytest.raises(CamscopeError, match="not a regular file"):
        load_ground_truth("mask", ["mask"], tmp_path, allow_outside_root=True).load_mask(
            {"mask": name, "row": 0}, (24, 24)
        )
    for place in (Path(name), Path(name).resolve()):
        with pytest.raises(OSError, match="not a regular file"):
            open_regular_file(place)


def test_a_file_without_size_is_empty_whatever_is_behind_it():
    if not Path("/proc/self/pagemap").exists():
        pytest.skip("this system has no /proc")
    with open_regular_file("/proc/self/pagemap") as file:  # a quarter of a petabyte
        assert file.read() == b""


def test_a_folder_of_a_run_or_an_audit_with_a_pipe_in_it_is_an_error(run, tmp_path, in_time):
    made = received(run, tmp_path / "run")
    for part in (made / "parts").iterdir():
        part.unlink()
        os.mkfifo(part)
    with pytest.raises(InputError, match="the run has no finished part file"):
        BatchRun(made).table()
    (made / "run.json").unlink()
    os.mkfifo(made / "run.json")
    with pytest.raises(OutputError, match=r"run\.json: it cannot be read: it is not a regular file"):
        BatchRun(made)
    with pytest.raises(OSError, match="not a regular file, but a pipe"):
        check_regular_files(made)
    pytest.importorskip("pydantic")
    from camscope.audit import AuditRun
    from camscope.audit.verify_finished_audit import verify_audit

    audit = tmp_path / "audit"
    (audit / "maps").mkdir(parents=True)
    (audit / "maps" / "gone.json").symlink_to(tmp_path / "nowhere")
    with pytest.raises(InputError, match="holds no audit"):
        AuditRun(audit)
    (audit / "maps" / "part").symlink_to("/dev/zero")
    for opened in (AuditRun, verify_audit):
        with pytest.raises(InputError, match=r"the audit cannot be read: .*not a regular file"):
            opened(audit)


# --- paths of tables


@pytest.fixture
def house(images, tmp_path):
    """A root, with links that lead out of it, and what is outside."""
    root, outside = tmp_path / "root", tmp_path / "outside"
    for folder in (root / "sub", root / "series", root / "detached", outside):
        folder.mkdir(parents=True)
    for folder in (root, outside, root / "sub"):
        shutil.copy(images / "0.png", folder / "a.png")
    (outside / "scan.dcm").write_bytes(b"secret")
    (root / "link.png").symlink_to(outside / "a.png")
    (root / "scan.dcm").symlink_to(outside / "scan.dcm")
    (root / "folder").symlink_to(outside)
    (root / "series" / "1.dcm").symlink_to(outside / "scan.dcm")
    (root / "detached" / "a.mhd").write_text("ElementDataFile = a.raw\n")
    (root / "detached" / "a.raw").symlink_to(outside / "scan.dcm")
    (root / "inside.png").symlink_to(root / "sub" / "a.png")
    return root


OUTSIDE = [
    "../outside/a.png", "{}/../outside/a.png", "sub/../../outside/a.png", "link.png", "folder/a.png", "folder", "scan.dcm",
    "scan.dcm#0", "series", "series#0", "detached/a.mhd", "..", "/etc/hostname", "file://{}/a.png", "simplecache://::a.png",
    "simplecache://::Secret", "simplecache://a.png::", "asynclocal://{}/a.png", "zip://a::{}/a.zip", "x://../../outside/a.png",
]  # fmt: skip
INSIDE = [
    "a.png",
    "sub/a.png",
    "sub/../a.png",
    "{}/a.png",
    "inside.png",
    "sub",
    "gone.png",
    "s3://bucket/a.png",
    "a.png#0",
]


@pytest.mark.parametrize("path", OUTSIDE)
def test_one_rule_for_every_path_of_a_table(path, house, tmp_path):
    path = path.format(house)
    (house / "list.csv").write_text(f'path,mask\n"{path}","{path}"\n')
    manifest = build_manifest(house / "list.csv")
    with pytest.raises(InputError, match=r"leads? out of .*--anywhere"):
        manifest.path_resolver.resolve(path)
    (facts,) = inspect_images(house / "list.csv").to_table().to_pylist()
    assert (facts["status"], facts["issue_codes"][:1]) == ("failed", ["outside-root"])
    row = manifest.rows(0, 1)[0]
    with pytest.raises(InputError, match=r"leads? out of .*--anywhere"):
        load_ground_truth("mask", ["mask"], house).load_mask(row, (24, 24))
    column = load_ground_truth("mask", ["mask"], manifest.path_resolver)
    with pytest.raises(InputError, match=r"1 mask in the column 'mask' leads? out of .*--anywhere"):
        column.check_mask_paths_inside_root([path, "a.png", None, "", [[0, 0, 1, 1]], "[[1, 2]]"])
    coco = {
        "images": [{"id": 1, "file_name": "a.png", "height": 24, "width": 24}],
        "categories": [{"id": 1, "name": "x"}],
    }
    coco["annotations"] = [{"image_id": 1, "category_id": 1, "mask_file": path}]
    (house / "coco.json").write_text(json.dumps(coco))
    with pytest.raises(InputError, match=r"leads? out of .*--anywhere"):
        CocoAnnotations.read(house / "coco.json").load_mask({"path": "a.png"}, (24, 24))


@pytest.mark.parametrize("path", INSIDE)
def test_what_is_inside_stays_allowed(path, house):
    path = path.format(house)
    assert PathResolver(house).resolve(path) == (path if "://" in path or path.startswith("/") else f"{house}/{path}")


def test_masks_elsewhere_are_read_with_anywhere(house, tmp_path):
    Image.new("L", (24, 24), 255).save(tmp_path / "outside" / "full.png")
    columns, row = ["mask"], {"mask": "../outside/full.png", "row": 0}
    assert load_ground_truth("mask", columns, house, allow_outside_root=True).load_mask(row, (24, 24)).all()
    Image.fromarray(np.uint8(np.eye(24)) * 255).save(tmp_path / "outside" / "mask.png")
    (house / "list.csv").write_text("path,mask\na.png,../outside/mask.png\n")
    run_batch(GradCAM(load_model("phantom")), house / "list.csv", tmp_path / "run", ["nodule"])
    words = [
        "evaluate",
        str(tmp_path / "run"),
        "--masks",
        "mask",
        "--metrics",
        "enrichment",
        "-o",
        str(tmp_path / "values"),
    ]
    refused = CliRunner().invoke(app, words)
    assert (refused.exit_code, "1 mask in the column 'mask' leads out of" in refused.stderr) == (2, True)
    assert CliRunner().invoke(app, [*words, "--anywhere"]).exit_code == 0
    with pytest.raises(InputError, match="1 mask in the column"):
        evaluate(tmp_path / "run", tmp_path / "more", "mask")


def test_masks_behind_urls_are_read_as_images_are(images, tmp_path):
    Image.new("L", (24, 24), 1).save(tmp_path / "mask.png")
    with fsspec.open("memory://masks/1.png", "wb") as file:
        file.write((tmp_path / "mask.png").read_bytes())
    row = {"mask": "memory://masks/1.png", "row": 0}
    assert load_ground_truth("mask", ["mask"], tmp_path).load_mask(row, (24, 24)).all()
    with pytest.raises(InputError, match="is not on this machine; to fetch it"):
        load_ground_truth("mask", ["mask"], PathResolver(tmp_path, fetch=False)).load_mask(row, (24, 24))
    coco = {
        "images": [{"id": 1, "file_name": "a.png", "height": 24, "width": 24}],
        "annotations": [{"image_id": 1, "category_id": 1, "mask_file": "memory://masks/1.png"}],
        "categories": [{"id": 1, "name": "cell"}],
    }
    (tmp_path / "coco.json").write_text(json.dumps(coco))
    received = load_ground_truth(tmp_path / "coco.json", [], PathResolver(tmp_path, fetch=False))
    with pytest.raises(InputError, match="is not on this machine; to fetch it"):
        received.load_mask({"path": "a.png", "row": 0}, (24, 24))
    with pytest.raises(InputError, match=r"the mask memory://masks/2\.png cannot be read: FileNotFoundError"):
        load_ground_truth("mask", ["mask"], tmp_path).load_mask({**row, "mask": "memory://masks/2.png"}, (24, 24))


def test_an_audit_holds_its_masks_to_the_same_rule(house):
    pytest.importorskip("pydantic")
    from camscope.audit.core.audit_context import AuditContext
    from camscope.audit.core.config import Config

    (house / "list.csv").write_text(f"path,mask,label\na.png,{house.parent}/outside/a.png,nodule\n")
    text = """
[data]
manifest = "list.csv"
label = "label"
ground_truth = "mask"
{}
[model]
source = "phantom"
[explain]
findings = ["nodule"]
"""
    with pytest.raises(InputError, match="1 mask in the column 'mask' leads out of"):
        _ = AuditContext(Config.from_toml(text.format(""), house), house / "audit").ground_truth
    for root in ('root = ".."', 'root = ""'):
        subject = AuditContext(Config.from_toml(text.format(root), house), house / "audit")
        assert set(subject.ground_truth) == {"nodule"}
    assert not subject.cohort.manifest.path_resolver.confined


def test_only_listed_stores_are_remote():
    """Of all schemes that fsspec knows or takes for a path, those that read no file of this machine."""
    from fsspec.registry import known_implementations

    assert {
        name for name in known_implementations if is_remote_store_url(f"{name}://host/a.png")
    } == REMOTE_SCHEMES & set(known_implementations)
    local = {
        "",
        "file",
        "local",
        "asynclocal",
        "dir",
        "git",
        "generic",
        "reference",
        "dask",
        "dvc",
        "hdfs",
        "arrow_hdfs",
        "sftp",
        "ssh",
        "smb",
    }
    assert not local & REMOTE_SCHEMES
    for name in [*local, "FILE", "File", "f\u0131le", "a", "acme", *(name.upper() for name in REMOTE_SCHEMES)]:
        for url in (
            f"{name}://host/a",
            f"simplecache::{name}://host/a",
            f"zip://a::{name}://host/a",
            f"{name}://a::https://host/a",
        ):
            assert not is_remote_store_url(url), url


def test_a_network_share_counts_as_another_machine():
    assert is_network_share(r"\\server\share\a.png", windows=True)
    assert is_network_share("//server/share/a.png", windows=True)
    for path in (r"C:\a.png", r"\a.png", "a//b", r"\\\a", "s3://a"):
        assert not is_network_share(path, windows=True)
    assert not is_network_share("//server/share/a.png", windows=False)


# --- tables for people

FORMULAS = "=+-@"


def cells_of(text, split):
    """What a spreadsheet that splits lines at `split` sees, with quotation marks and white space taken away."""
    for line in re.split(r"[\r\n]+", text):
        for cell in line.split(split):
            yield cell.strip().strip('"').strip()
    for row in csv.reader(io.StringIO(text, newline=""), delimiter=split):
        yield from (cell.strip() for cell in row)


def is_number(cell):
    return re.fullmatch(r'[+-]?\d+(\.\d*)?([eE][+-]?\d+)?[\]}"\s]*', cell) is not None


def test_no_cell_is_a_formula_wherever_the_line_is_split():
    draw, cells = random.Random(1), CellEscaper()
    texts = [
        'x;=HYPERLINK("http://127.0.0.1/")',
        "a\t@b",
        "a,+b",
        "1;-2",
        "[0.5, -0.25]",
        *("".join(draw.choices("=+-@;,|\t\n\r \"'ab1.", k=6)) for _ in range(3000)),
    ]
    for text in texts:
        stream = io.StringIO(newline="")
        csv.writer(stream).writerow(["1", cells.to_csv_cell(text), "end"])
        for split in ",;\t|":
            for cell in cells_of(stream.getvalue(), split):
                assert cell[:1] not in FORMULAS or not cell or is_number(cell), (text, split, cell)
    for plain in ("a-b", "a = b", "-5", "+1e-9", "x@y", "'=1", "a; b", ""):
        assert cells.to_csv_cell(plain) == plain
    assert cells.to_csv_cell([[-1.0, 0.5], [-3e-05, 2]]) == "[[-1.0, 0.5], [-3e-05, 2]]"
    assert (
        cells.to_csv_cell("x;-2") == "x;'-2"
    )  # where the comma is the decimal mark, the next cell could go on: -2,1+cmd|…


@pytest.mark.slow
def test_nothing_unseen_hides_a_formula():
    cells = CellEscaper()
    letters = map(chr, range(0x110000))
    unseen = [one for one in letters if unicodedata.category(one) in ("Cc", "Cf", "Zs", "Zl", "Zp") or one.isspace()]
    assert len(unseen) > 200
    unseen += ["\ufe0f", "\U000e0100", "\u034f", "\u3164", "\u2800", "\u200b\xa0\ufeff"]
    for letter in unseen:
        for before in ("", "x;", "x,", "x|", "x\t", "x\n"):
            for sign in "=+-@\uff1d\uff0b\uff0d\uff20\u2212\ufe66":
                text = f"{before}{letter}{sign}1+1"
                assert f"'{sign}1+1" in cells.to_csv_cell(text), (before, letter, sign)
    for plain in ("a\u200b=1", "caf\u00e9 - x", "x\u00a0y", "\u200bx=1"):
        assert cells.to_csv_cell(plain) == plain


def test_no_table_of_a_command_has_a_formula_behind_a_semicolon(images, tmp_path):
    evil = 'x;=HYPERLINK(""http://127.0.0.1/"")'
    (images / "list.csv").write_text(f'path,note,"no;=te"\n0.png,"{evil}",1\n1.png,-1,"\t@x"\n')
    run_batch(GradCAM(load_model("phantom")), images / "list.csv", tmp_path / "run", ["nodule"])
    told = BatchRun(tmp_path / "run").export(tmp_path, "csv")
    found: DatasetInspection = inspect_images(images / "list.csv", profile="clinical")
    found.save(tmp_path / "inspected.csv")
    for name in ("rows.csv", "inspected.csv"):
        text = (tmp_path / name).read_text(encoding="utf-8-sig")
        assert "x;'=HYPERLINK" in text
        assert "no;'=te" in text
        for split in ",;\t|":
            assert [
                cell for cell in cells_of(text, split) if cell[:1] in FORMULAS and cell and not is_number(cell)
            ] == []
    assert told.n_escaped_cells == 3


def test_a_store_is_read_by_the_regular_files_that_it_has(tmp_path):
    store = RunStore(tmp_path / "run")
    (tmp_path / "run" / "parts").mkdir(parents=True)
    (tmp_path / "run" / "parts" / "part-00000000.parquet").mkdir()
    assert store.finished_chunks() == set()


# --- parts whose columns are not those of a run


def changed_parts(run, folder, change):
    """A copy of a run whose tables someone changed."""
    made = received(run, folder)
    for part in (made / "parts").iterdir():
        table = parquet.read_table(part, partitioning=None)
        parquet.write_table(change(table).replace_schema_metadata(table.schema.metadata), part)
    return made


def columns_of(kind):
    """What someone may put in the place of a column: three rows."""
    return {
        "text": pa.array(["7"] * 3),
        "numbers": pa.array([7] * 3),
        "fractions": pa.array([0.5] * 3),
        "a struct": pa.array([{"a": 1}] * 3),
        "a list of texts": pa.array([["a"]] * 3),
        "a list of structs": pa.array([[{"a": 1}]] * 3),
        "times": pa.array([0] * 3, pa.timestamp("ns")),
        "bytes": pa.array([b"\xff"] * 3),
        "nothing": pa.nulls(3),
    }[kind]


TYPES = (
    "text",
    "numbers",
    "fractions",
    "a struct",
    "a list of texts",
    "a list of structs",
    "times",
    "bytes",
    "nothing",
)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*TYPES, "no column", "two columns"])
@pytest.mark.one_in(5)
def test_a_column_of_another_type_is_one_error(run, kind, tmp_path):
    names = BatchRun(run).dataset.schema.names
    kinds = {name: str(BatchRun(run).dataset.schema.field(name).type) for name in names}
    for n, name in enumerate(names):

        def change(table, name=name):
            at = table.schema.get_field_index(name)
            if kind == "no column":
                return table.drop_columns([name])
            if kind == "two columns":
                return table.append_column(name, table[name])
            return table.set_column(at, name, columns_of(kind))

        made = changed_parts(run, tmp_path / f"run{n}", change)
        if kind == "no column" and name in ("failure_kind", "affine", "scan_steps", "overlay"):
            assert len(BatchRun(made)) == 3
            continue
        if kind in TYPES and str(columns_of(kind).type) == kinds[name].replace("element", "item"):
            continue
        with pytest.raises(InputError, match=f"^a part of the run cannot be read|^the part files .*{name}"):
            BatchRun(made).table()
        with pytest.raises(CamscopeError):
            BatchRun(made).export(tmp_path / f"out{n}", ["csv", "npz"])


@pytest.mark.parametrize("name", ["row", "id", "status", "method"])
def test_a_row_without_its_key_is_one_error_wherever_a_run_is_read(run, name, images, tmp_path):
    def change(table):
        column = pa.array([*table[name].to_pylist()[:2], None], table.schema.field(name).type)
        return table.set_column(table.schema.get_field_index(name), name, column)

    made, runner = changed_parts(run, tmp_path / "run", change), CliRunner()
    with pytest.raises(InputError, match=f"1 row has no value in the column {name}"):
        BatchRun(made).table()
    for command in ("show", "export", "evaluate", "compare"):
        output = tmp_path / ("page.html" if command == "show" else command)
        told = runner.invoke(app, [command, str(made), "-o", str(output)])
        assert told.exit_code in (1, 2), command
        assert f"1 row has no value in the column {name}" in told.stderr, (command, told.stderr)
    for again in (False, True):
        with contextlib.suppress(CamscopeError):  # what is done is not looked at again unless it is asked for
            explainer = GradCAM(load_model("phantom"))
            run_batch(
                explainer, images, made, ["nodule"], overlays=OverlayOptions("png", height=16), retry_failed=again
            )


# --- what is named as a file and is none


@pytest.fixture
def pipes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("p.pt", "p.safetensors", "p.py", "p.csv", "p.parquet", "p.json", "p.toml", "p", "p.png"):
        os.mkfifo(name)
    Path("model").mkdir()
    os.mkfifo("model/model.safetensors")
    return tmp_path


NAMED = [
    ("explain", "{}/0.png", "--weights", "p.pt"),
    ("explain", "{}/0.png", "--weights", "p.safetensors"),
    ("explain", "{}/0.png", "--choice", "p.json"),
    ("explain", "{}/0.png", "--mask", "p.png"),
    ("layers", "p.py:build"),
    ("layers", "hf:model"),
    ("batch", "p.csv"),
    ("batch", "p.parquet"),
    ("inspect-images", "p.csv"),
    ("evaluate", "{}", "--masks", "p.json"),
    ("audit", "run", "p.toml"),
    ("audit", "init", "p.csv", "--model", "phantom"),
]


@pytest.mark.parametrize("words", NAMED, ids=" ".join)
@pytest.mark.one_in(5)
def test_a_pipe_is_named_as_what_it_is_and_is_not_waited_for(words, images, pipes, in_time):
    told = CliRunner().invoke(app, [word.format(images) for word in words])
    assert told.exit_code in (1, 2)
    assert "not a regular file" in " ".join(told.stderr.split())
    assert told.stderr.count("error: ") == 1


def test_a_model_that_is_a_file_is_not_looked_for_elsewhere(pipes, in_time):
    told = CliRunner().invoke(app, ["layers", "hf:p"])
    assert (told.exit_code, told.stderr.count("hf:p is not a folder: expected org/name")) == (2, 1)


def test_an_output_replaces_files_and_nothing_else(images, pipes, in_time):
    Path("null.png").symlink_to("/dev/null")
    for name in ("p.png", "null.png", "model"):
        with pytest.raises(OutputError, match="a file must not replace it"):
            write_bytes(name, b"x")
        assert not Path(name).is_file()
    for name in ("p.png", "null.png"):
        told = CliRunner().invoke(app, ["explain", str(images / "0.png"), "-o", name, "--overwrite"])
        assert (told.exit_code, told.stderr.count("a file must not replace it")) == (1, 1)


def test_no_run_config_or_page_can_trust():
    from camscope.audit.core.config import Config

    texts = {
        path: path.read_text("utf-8")
        for part in ("audit", "batch", "evaluation", "integrations")
        for path in (SOURCES / part).rglob("*.*")
        if path.suffix in (".py", ".html", ".js", ".toml")
    }
    assert len(texts) > 50
    assert not [path for path, text in texts.items() if "trust" in text and "trust_code" in text.replace("-", "_")]
    assert "trust_code" not in Config.model_fields
