"""Batch: the rows of a run, which are those of single calls, whatever ends it half-way."""

import contextlib
import json
import multiprocessing
import os
import random
import runpy
import sys
import time
import weakref
import zlib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from camscope import RISE, GradCAM, LayerCAM, load_model
from camscope.errors import ImageError, InputError, LayerError, OutputError, PreprocessError, RunError, TargetError

pa = pytest.importorskip("pyarrow")
csv, parquet = pytest.importorskip("pyarrow.csv"), pytest.importorskip("pyarrow.parquet")

from camscope.batch import BatchOptions, BatchRun, build_manifest, path_resolver, run_batch  # noqa: E402 - it needs pyarrow
from camscope.batch.run_store import RunStore  # noqa: E402

WITHOUT_TIME = [
    "row",
    "id",
    "path",
    "sha256",
    "status",
    "error",
    "target",
    "label",
    "score",
    "method",
    "layer",
    "attribution",
]


@pytest.fixture(scope="module")
def model():
    return load_model("phantom")


@pytest.fixture
def folder(tmp_path):
    """Seven pictures, two of them of another size, one of them broken."""
    made = tmp_path / "images"
    made.mkdir()
    drawn = np.random.default_rng(0)
    for n in range(7):
        size = (40, 30) if n in (2, 3) else (32, 32)
        Image.fromarray(drawn.integers(0, 256, (*size, 3), dtype=np.uint8)).save(made / f"{n}.png")
    (made / "4.png").write_bytes(b"no image")
    return made


def tools(model):
    return [GradCAM(model), LayerCAM(model, "layer3")]


def rows(output):
    return BatchRun(output).table(WITHOUT_TIME).to_pylist()


# --- manifests


def test_a_folder_a_pattern_and_a_list_mean_their_images_in_order(folder):
    (folder / "deep").mkdir()
    Image.new("RGB", (8, 8)).save(folder / "deep" / "x.jpg")
    (folder / "notes.txt").write_text("no image")
    names = [str(folder / f"{n}.png") for n in range(7)]
    assert build_manifest(folder).table["path"].to_pylist() == [*names, str(folder / "deep" / "x.jpg")]
    assert build_manifest(str(folder / "*.png")).table["path"].to_pylist() == names
    given = build_manifest([names[3], names[0], names[3]])
    assert given.table.to_pylist() == [
        {"row": 0, "id": names[3], "path": names[3]},
        {"row": 1, "id": names[0], "path": names[0]},
    ]
    with pytest.raises(InputError, match="there is no image"):
        build_manifest(str(folder / "*.bmp"))
    with pytest.raises(InputError, match="there is no such file or folder"):
        build_manifest(folder / "not")


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere names are text")
def test_a_name_that_is_not_text_is_told(folder):
    try:
        (folder / os.fsdecode(b"\xff.png")).write_bytes(b"")
    except OSError:
        pytest.skip("this file system allows no such name")
    with pytest.raises(InputError, match=r"udcff.png': the file name is not valid UTF-8"):
        build_manifest(folder)


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_a_table_carries_its_other_columns_along(kind, tmp_path):
    table = pa.table(
        {"site": ["a", "b"], "path": ["1.png", "sub/2.png"], "id": ["07", "8"], "target": ["nodule", None]}
    )
    file = tmp_path / f"list.{kind}"
    (csv.write_csv if kind == "csv" else parquet.write_table)(table, file)
    made = build_manifest(file)
    assert made.table.column_names == ["row", "id", "path", "site", "target"]
    assert made.table["id"].to_pylist() == ["07", "8"]
    assert made.extra_columns == ["site"]
    assert made.path_resolver.resolve("1.png") == str(tmp_path / "1.png")
    assert made.path_resolver.resolve("s3://bucket/1.png") == "s3://bucket/1.png"


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"file": ["1.png"]}, "the manifest has 1 column, but none is called .path."),
        ({"path": ["1.png", None]}, "row 1 has no path"),
        ({"path": ["1.png", "2.png"], "id": ["a", "a"]}, "1 row repeats an id"),
        ({"path": ["1.png"], "attribution": [1], "score": [2]}, "the column names attribution, score are reserved"),
        ({"path": pa.array([], pa.string())}, "the manifest has no rows"),
        ({"path": ["1.png"], "Label": ["x"]}, "the column names Label are reserved"),  # SQL knows no capitals
        ({"path": ["1.png"], "age": [1], "Age": [2]}, "several columns are called age"),
        ({"path": pa.array([b"\xff.png"])}, "the column path cannot be read as string"),
        ({"path": pa.array([["1.png"]])}, "the column path cannot be read as string"),
        ({"path": ["1.png"], "target": [0.5]}, "the column target cannot be read as int64"),
    ],
)
def test_what_cannot_be_a_manifest_is_one_clear_error(columns, message, tmp_path):
    parquet.write_table(pa.table(columns), tmp_path / "list.parquet")
    with pytest.raises(InputError, match=message):
        build_manifest(tmp_path / "list.parquet")
    with pytest.raises(InputError, match="there is no such manifest"):
        build_manifest(tmp_path / "other.csv")


def test_a_csv_of_columns_named_alike_or_in_other_letters_than_utf8_is_one_clear_error(tmp_path):
    (tmp_path / "list.csv").write_text("path,x,x\n1.png,2,3\n")
    with pytest.raises(InputError, match="several columns are called x"):
        build_manifest(tmp_path / "list.csv")
    (tmp_path / "list.csv").write_bytes(b"path\nM\xfcller.png\n")
    with pytest.raises(InputError, match=r"this is not a CSV table: .*UTF-?8"):
        build_manifest(tmp_path / "list.csv")


def test_names_made_of_digits_stay_names_and_numbers_with_gaps_stay_classes(tmp_path):
    (tmp_path / "list.csv").write_text("path,target\n007,1\n008,\n")
    assert build_manifest(tmp_path / "list.csv").table["path"].to_pylist() == ["007", "008"]
    pandas = pa.table({"path": ["1.png", "2.png", "3.png"], "target": [1.0, None, float("nan")]})
    parquet.write_table(pandas, tmp_path / "list.parquet")
    assert build_manifest(tmp_path / "list.parquet").table["target"].to_pylist() == [1, None, None]


def test_a_path_may_not_leave_the_root_unless_it_is_allowed_to(folder, model, tmp_path):
    (tmp_path / "lists").mkdir()
    (tmp_path / "lists" / "list.csv").write_text("path\n../images/0.png\n")
    outcome = run_batch(GradCAM(model), tmp_path / "lists" / "list.csv", tmp_path / "out")
    (reason,) = outcome.failure_counts
    assert reason.startswith("../images/0.png: the path leads out of")
    inside = run_batch(GradCAM(model), tmp_path / "lists" / "list.csv", tmp_path / "in", root=tmp_path)
    assert list(inside.failure_counts) == [
        f"../images/0.png: the path leads out of {tmp_path}; move the file there, or pass --anywhere"
    ]
    assert build_manifest(tmp_path / "lists" / "list.csv", root="").root is None
    anywhere = build_manifest(tmp_path / "lists" / "list.csv", anywhere=True)
    assert Path(anywhere.path_resolver.resolve("../images/0.png")).resolve() == folder / "0.png", "from the manifest on"
    assert build_manifest(tmp_path / "lists" / "list.csv").find_paths_outside_root() == ["../images/0.png"]
    assert anywhere.find_paths_outside_root() == []


def test_the_label_of_an_audit_is_the_class_of_a_row(tmp_path):
    (tmp_path / "list.csv").write_text("path,label\na.png,cat\n")
    assert build_manifest(tmp_path / "list.csv").table["class"].to_pylist() == ["cat"]
    assert build_manifest(tmp_path / "list.csv", strict=False).table["label"].to_pylist() == ["cat"]
    (tmp_path / "list.csv").write_text("path,label,class\na.png,cat,dog\n")
    with pytest.raises(InputError, match="label are reserved for results"):
        build_manifest(tmp_path / "list.csv")


@pytest.mark.parametrize(
    ("paths", "common"),
    [
        (("/a/b/1.png", "/a/c/2.png"), "/a"),
        (("/a/1.png", "/a/2.png"), "/a"),
        (("/a/1.png", "/b/2.png"), None),
        (("/a/1.png", "2.png"), None),
        (("/a/1.png", "s3://bucket/2.png"), None),
        ((), None),
    ],
)
def test_the_folder_that_absolute_paths_share(paths, common):
    assert path_resolver.find_common_folder(paths) == common


@pytest.mark.parametrize(
    "link",
    [
        *(
            "file://{}",
            "FILE://{}",
            "local://{}",
            "zip://a.png::{}",
            "simplecache::file://{}",
            "dir://a.png::file://{}",
        ),
        *(
            "simplecache://::Secret",
            "simplecache://::geheim\u00e4",
            "simplecache://Secret::",
            "asynclocal://{}",
            "x://../../{}",
        ),
        *(
            "reference://::{}",
            "generic://file://{}",
            "zip://{}",
            "HTTPS://host/a.png",
            "hdfs:///{}",
            "sftp://localhost/{}",
        ),
        *("https://host/b.zip::", "https://host/b.zip::{}", "://{}", "acme://{}", "data://{}"),
    ],
)
def test_a_url_of_this_machines_files_does_not_get_round_the_root(link, folder, tmp_path):
    manifest = build_manifest([link.format(folder)], tmp_path / "lists")
    with pytest.raises(InputError, match=r"lead out of .*pass --anywhere"):
        manifest.path_resolver.resolve(manifest.table["path"][0].as_py())
    assert build_manifest([link.format(folder)], "").path_resolver.resolve("file:///a.png") == "file:///a.png"
    known = ("s3://bucket/a.png", "simplecache::s3://bucket/a.png", "zip://a.png::simplecache::https://host/b.zip")
    for elsewhere in (*known, "filecache://a::gs://bucket/a"):
        assert manifest.path_resolver.resolve(elsewhere) == elsewhere


# --- rows


@pytest.mark.slow
def test_the_rows_are_what_single_calls_say(folder, model, tmp_path):
    outcome = run_batch(
        tools(model), folder, tmp_path / "out", [None, "nodule"], options=BatchOptions(chunk_size=4), batch_size=3
    )
    assert (outcome.n_processed, outcome.n_failures) == (7, 1)
    made = rows(tmp_path / "out")
    assert [(row["row"], row["method"]) for row in made] == [
        (n, m) for n in range(7) for m in ["gradcam", "layercam"] * 2
    ]
    for row in made:
        path = folder / f"{row['row']}.png"
        if row["row"] == 4:
            assert (row["status"], row["attribution"]) == ("failed", None)
            assert "not an image of a format that Pillow knows" in row["error"]
            continue
        target = "nodule" if row["target"] == "nodule" else None
        tool = tools(model)[row["method"] == "layercam"]
        one = tool.explain(path, target)
        np.testing.assert_allclose(np.float32(row["attribution"]), one.attribution.ravel(), rtol=1e-4, atol=1e-6)
        assert (row["label"], row["layer"], row["status"]) == (one.label, one.layer, one.status)
        assert row["score"] == pytest.approx(one.score, rel=1e-5)


def test_a_run_gives_explanations_that_lie_on_their_images(folder, model, tmp_path):
    run_batch(GradCAM(model), folder, tmp_path / "out")
    made = BatchRun(tmp_path / "out")
    found = {one.name: one for one in made}
    assert len(found) == 6 < len(made) == 7
    name = str(folder / "2.png")
    one = GradCAM(model).explain(name)
    assert found[name].placement == one.placement
    assert (found[name].model, found[name].target) == (one.model, one.target)
    np.testing.assert_allclose(found[name].heatmap(), one.heatmap(), atol=1e-4)
    row = made.table().to_pylist()[2]
    np.testing.assert_array_equal(made.read_image(row), one.image)
    np.testing.assert_array_equal(made.explanation(row, made.read_image(row)).overlay(), one.overlay())
    (folder / "2.png").write_bytes((folder / "3.png").read_bytes())
    with pytest.raises(ImageError, match=r"2\.png: it has changed since"):
        made.read_image(row)
    with pytest.raises(InputError, match="is not the folder of a run"):
        BatchRun(folder)


def test_a_rows_own_target_goes_before_the_runs(folder, model, tmp_path):
    file = tmp_path / "list.csv"
    file.write_text(
        "path,target,site\nimages/0.png,2,a\nimages/1.png,,b\nimages/2.png,effusion,c\nimages/3.png,tulip,d\n"
    )
    outcome = run_batch(GradCAM(model), file, tmp_path / "out", ["nodule"])
    made = BatchRun(tmp_path / "out").table().to_pylist()
    assert [row["target"] for row in made] == ["2", "nodule", "effusion", "tulip"]
    assert [row["site"] for row in made] == ["a", "b", "c", "d"]
    assert [row["label"] for row in made[:3]] == [model_name(model, 2), "nodule", "effusion"]
    assert outcome.n_failures == 1
    assert "tulip" in made[3]["error"]


def model_name(model, index):
    return GradCAM(model).class_names[index]


def test_what_every_image_would_fail_of_ends_the_run(folder, model, tmp_path):
    with pytest.raises(TargetError, match="tulip"):
        run_batch(GradCAM(model), folder, tmp_path / "one", ["tulip"])
    with pytest.raises(LayerError):
        run_batch(GradCAM(model, "head"), folder, tmp_path / "two")
    with pytest.raises(RunError, match=r"1 image failed, more than the limit of 0: .*format that Pillow knows"):
        run_batch(GradCAM(model), folder, tmp_path / "three", options=BatchOptions(max_failures=0))


def test_a_preprocessing_that_is_not_known_ends_the_run_and_one_that_fails_an_image_does_not(folder, model, tmp_path):
    with pytest.raises(PreprocessError, match="no preprocessing is known for the images"):
        run_batch(GradCAM(torch.nn.Sequential(torch.nn.Conv2d(3, 2, 3)), "0"), folder, tmp_path / "one")

    def fussy(image):
        if image.height == 40:
            raise ValueError("too tall")
        return torch.zeros(1, 32, 32)

    run_batch(GradCAM(model, preprocess=fussy), folder, tmp_path / "two")
    errors = [row["error"] for row in rows(tmp_path / "two")]
    assert [n for n, error in enumerate(errors) if error and "fussy raised ValueError: too tall" in error] == [2, 3]


def test_one_image_that_the_model_cannot_take_fails_alone(folder, tmp_path):
    class Choosy(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.head = torch.nn.Conv2d(3, 4, 3), torch.nn.Linear(4, 2)

        def forward(self, x):
            if bool((x[:, 0, 0, 0] > 2).any()):
                raise RuntimeError("too bright")
            return self.head(self.layer(x).relu().mean((2, 3)))

    Image.new("RGB", (32, 32), "white").save(folder / "5.png")
    tool = GradCAM(Choosy(), "layer", preprocess="imagenet")
    run_batch(tool, [folder / f"{n}.png" for n in (0, 1, 5, 6)], tmp_path / "out")
    assert [row["error"] for row in rows(tmp_path / "out")] == [None, None, "RuntimeError: too bright", None]


# --- restarts


def test_what_a_pass_without_memory_held_is_gone_before_its_halves_are_tried(folder, model, tmp_path, monkeypatch):
    from camscope.batch import batch_worker

    held, alive = [], []

    def run(tools, x, *rest, real=batch_worker.run_methods, **options):
        alive.append(any(one() is not None for one in held))
        if len(x) > 1:
            activation = torch.ones(8)
            held.append(weakref.ref(activation))
            raise torch.OutOfMemoryError("no room")
        return real(tools, x, *rest, **options)

    monkeypatch.setattr(batch_worker, "run_methods", run)
    assert run_batch(GradCAM(model), folder, tmp_path / "out").n_failures == 1
    assert len(held) > 2
    assert not any(alive)


@pytest.mark.slow
def test_a_run_that_is_ended_goes_on_where_it_was(folder, model, tmp_path, monkeypatch):
    run_batch(tools(model), folder, tmp_path / "whole", options=BatchOptions(chunk_size=2))
    write, written = RunStore.write_part, []

    def until_the_third(store, chunk, table):
        if len(written) == 2:
            raise KeyboardInterrupt
        written.append(chunk)
        write(store, chunk, table)

    monkeypatch.setattr(RunStore, "write_part", until_the_third)
    with pytest.raises(KeyboardInterrupt):
        run_batch(tools(model), folder, tmp_path / "parts", options=BatchOptions(chunk_size=2))
    monkeypatch.undo()
    outcome = run_batch(tools(model), folder, tmp_path / "parts", options=BatchOptions(chunk_size=2))
    assert (outcome.n_images, outcome.n_done_before, outcome.n_processed, outcome.n_failures) == (7, 4, 3, 1)
    assert rows(tmp_path / "parts") == rows(tmp_path / "whole")
    done = run_batch(tools(model), folder, tmp_path / "parts", options=BatchOptions(chunk_size=2, max_failures=1))
    assert (done.n_processed, done.failure_counts) == (0, outcome.failure_counts)
    with pytest.raises(RunError, match="1 image failed, more than the limit of 0"):
        run_batch(tools(model), folder, tmp_path / "parts", options=BatchOptions(chunk_size=2, max_failures=0))


def test_a_part_that_somebody_damaged_is_named_and_made_anew_once_it_is_removed(folder, model, tmp_path):
    run_batch(GradCAM(model), folder, tmp_path / "out", options=BatchOptions(chunk_size=4))
    whole = rows(tmp_path / "out")
    part = tmp_path / "out" / "parts" / "part-00000001.parquet"
    part.write_bytes(part.read_bytes()[:100])
    with pytest.raises(OutputError, match=r"remove it, and it is computed again: .*part-00000001\.parquet"):
        run_batch(GradCAM(model), folder, tmp_path / "out", options=BatchOptions(chunk_size=4))
    part.unlink()
    assert run_batch(GradCAM(model), folder, tmp_path / "out", options=BatchOptions(chunk_size=4)).n_done_before == 4
    assert rows(tmp_path / "out") == whole


def test_a_shard_that_does_not_exist_is_refused():
    for shard in ((3, 3), (-1, 3), (0, 0)):
        with pytest.raises(InputError, match=r"shard=.*: expected 0/n to n-1/n"):
            BatchOptions(shard=shard)


@pytest.mark.slow
def test_shards_make_the_rows_of_one_run(folder, model, tmp_path):
    run_batch(tools(model), folder, tmp_path / "whole", options=BatchOptions(chunk_size=2))
    for which in (2, 0, 1):
        run_batch(tools(model), folder, tmp_path / "shared", options=BatchOptions(chunk_size=2, shard=(which, 3)))
    assert rows(tmp_path / "shared") == rows(tmp_path / "whole")


@pytest.mark.parametrize("kind", ["jpg", "jpeg", "png", "webp"])
@pytest.mark.one_in(2)
def test_overwriting_removes_what_a_run_wrote_and_nothing_else(kind, folder, model, tmp_path):
    output = tmp_path / "out"
    own = [output / "parts" / "notes.txt", output / "overlays" / "mine.jpg", output / "overlays" / "000000" / "b.jpg"]
    for path in own:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("precious")
    run_batch(GradCAM(model), folder, output, overlays=kind, options=BatchOptions(chunk_size=2))
    (output / "parts" / f".{'0f' * 8}.part").write_bytes(b"of a process that was killed")
    run_batch(LayerCAM(model), folder, output, options=BatchOptions(chunk_size=4), overwrite=True)
    assert [path.read_text() for path in own] == ["precious"] * 3
    files = sorted(path for path in output.rglob("*") if path.is_file())
    parts = [output / "parts" / f"part-{n:08d}.parquet" for n in range(2)]
    assert files == sorted([*own, *parts, output / "run.json"])


def test_a_file_of_that_name_by_another_program_is_left_alone(folder, model, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "run.json").write_text('{"lr": 0.1}')
    for overwrite in (False, True):
        with pytest.raises(OutputError, match=r"run.json: it belongs to another program; choose another folder"):
            run_batch(GradCAM(model), folder, tmp_path / "out", overwrite=overwrite)
    with pytest.raises(OutputError, match="belongs to another program"):
        BatchRun(tmp_path / "out")
    (tmp_path / "out" / "run.json").write_text('{"run_co')
    with pytest.raises(OutputError, match="damaged or belongs to another program"):
        run_batch(GradCAM(model), folder, tmp_path / "out", overwrite=True)
    (tmp_path / "out" / "run.json").unlink()
    assert run_batch(GradCAM(model), folder, tmp_path / "out", overwrite=True).n_processed == 7


@pytest.mark.parametrize("older", [{"schema": "camscope/run/1", "run_config": {}}, {"made_with": {"chunk": 256}}])
def test_a_run_of_an_older_schema_is_one_error_and_is_not_resumed(older, folder, model, tmp_path):
    run_batch(GradCAM(model), folder, tmp_path / "out")
    file = tmp_path / "out" / "run.json"
    assert json.loads(file.read_text())["schema"] == "camscope/run/2"
    file.write_text(json.dumps(older))
    for overwrite in (False, True):
        with pytest.raises(
            OutputError, match=r"has the schema camscope/run/1, and this version of camscope reads .*/2"
        ):
            run_batch(GradCAM(model), folder, tmp_path / "out", overwrite=overwrite)
    with pytest.raises(OutputError, match="compute the run again in another folder"):
        BatchRun(tmp_path / "out")
    assert len(list((tmp_path / "out" / "parts").iterdir())) == 1


def test_where_no_run_can_be_written_is_said(folder, model, tmp_path):
    (tmp_path / "taken").write_text("a file")
    for output in (tmp_path / "taken", tmp_path / "taken" / "deep"):
        with pytest.raises(OutputError, match="taken is a file, not a folder; choose another place"):
            run_batch(GradCAM(model), folder, output)


def test_what_is_ones_own_is_known_again_by_another_process(tmp_path, capsys):
    script = tmp_path / "mine.py"
    script.write_text(
        "import numpy as np, torch\n"
        "from camscope import GradCAM, load_model, run_batch\n"
        "def prepared(image):\n"
        "    return torch.tensor(np.asarray(image.convert('L')), dtype=torch.float32)[None] / 255\n"
        "class Mine:\n"
        "    def __len__(self): return 2\n"
        "    def __getitem__(self, n): return np.full((64, 64, 3), 9 * n, np.uint8)\n"
        "tool = GradCAM(load_model('phantom'), preprocess=prepared)\n"
        f"print(run_batch(tool, Mine(), r'{tmp_path / 'out'}', [lambda logits: logits[:, 1]]).n_done_before)\n"
    )
    runpy.run_path(str(script), run_name="__main__")
    assert capsys.readouterr().out == "0\n"
    script.write_text(
        "kept = [object() for _ in range(100_000)]\n" + script.read_text()
    )  # things lie elsewhere in memory
    again = another_process(runs_a_script, script, said := tmp_path / "said")
    again.join()
    assert (again.exitcode, said.read_text()) == (0, "2\n")
    facts = BatchRun(tmp_path / "out").run_info["run_config"]
    assert "0x" not in json.dumps(facts)
    assert "prepared" in facts["preprocess"]


@pytest.mark.slow
def test_a_single_target_needs_no_list(model, folder, tmp_path):
    for number, target in enumerate(("nodule", 1, 0)):
        run_batch(GradCAM(model), folder, tmp_path / str(number), target)
    rows = [
        set(BatchRun(tmp_path / str(number)).query("status <> 'failed'")["label"].to_pylist()) for number in range(3)
    ]
    assert rows == [{"nodule"}, {"nodule"}, {"no finding"}]


def test_two_functions_of_one_name_cannot_be_told_apart(folder, model, tmp_path):
    targets = [lambda logits: logits[:, 0], lambda logits: logits[:, 1]]
    with pytest.raises(
        InputError, match=r"two targets are called .*lambda.*; define them as functions with different names"
    ):
        run_batch(GradCAM(model), folder, tmp_path / "out", targets)


def test_another_run_is_refused_with_what_differs(folder, model, tmp_path):
    run_batch(GradCAM(model), folder, tmp_path / "out")
    with pytest.raises(
        OutputError, match=r"holds another run \(targets: \[None\] there, \['nodule'\] here\); pass overwrite"
    ):
        run_batch(GradCAM(model), folder, tmp_path / "out", ["nodule"])
    with pytest.raises(OutputError, match=r"layer"):
        run_batch(GradCAM(model, "layer3"), folder, tmp_path / "out")
    (folder / "7.png").write_bytes((folder / "6.png").read_bytes())
    with pytest.raises(OutputError, match=r"manifest\.rows: 7 there, 8 here"):
        run_batch(GradCAM(model), folder, tmp_path / "out")
    assert run_batch(GradCAM(model), folder, tmp_path / "out", overwrite=True).n_processed == 8
    (tmp_path / "out" / "run.json").write_text("{")
    with pytest.raises(OutputError, match="it is damaged"):
        run_batch(GradCAM(model), folder, tmp_path / "out")


def makes_a_run(images, output, said):
    os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT), 2)
    run_batch(GradCAM(load_model("phantom")), images, output, options=BatchOptions(chunk_size=3), batch_size=2)


def runs_a_script(script, said):
    with Path(said).open("w") as stream, contextlib.redirect_stdout(stream):
        runpy.run_path(str(script), run_name="__main__")


def another_process(work, *arguments):
    """One that does the work, forked off one that has imported what it takes: it starts in no time."""
    ways = multiprocessing.get_context("spawn" if os.name == "nt" else "forkserver")
    multiprocessing.set_forkserver_preload([__name__, "camscope.phantom.radiograph", "cv2"])
    process = ways.Process(target=work, args=arguments)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # the server of Python 3.11 leaves out sys_path
        process.start()
    return process


def another_run(images, output):
    return another_process(makes_a_run, images, output, f"{output}-said")


@pytest.mark.skipif(os.name != "posix", reason="SIGKILL is POSIX's")
@pytest.mark.parametrize("n_kills", [1, pytest.param(3, marks=pytest.mark.thorough)])
def test_killed_at_any_instant_it_ends_with_the_rows_of_an_uninterrupted_run(n_kills, model, tmp_path):
    images = tmp_path / "images"
    images.mkdir()
    drawn = np.random.default_rng(1)
    for n in range(30 * n_kills):
        Image.fromarray(drawn.integers(0, 256, (24, 24, 3), dtype=np.uint8)).save(images / f"{n:02}.png")
    run_batch(GradCAM(model), images, tmp_path / "whole", options=BatchOptions(chunk_size=3), batch_size=2)
    instants, parts = random.Random(0), tmp_path / "out" / "parts"
    for _ in range(n_kills):
        process = another_run(images, tmp_path / "out")
        before = len(list(parts.glob("part-*"))) if parts.exists() else 0
        while process.is_alive() and (not parts.exists() or len(list(parts.glob("part-*"))) < before + 2):
            time.sleep(0.005)
        time.sleep(instants.random() * 0.1)
        process.kill()
        process.join()
    run_batch(GradCAM(model), images, tmp_path / "out", options=BatchOptions(chunk_size=3), batch_size=2)
    assert rows(tmp_path / "out") == rows(tmp_path / "whole")


def test_what_a_run_was_made_with_is_told(folder, model, tmp_path):
    run_batch(tools(model), folder, tmp_path / "out")
    facts = json.loads((tmp_path / "out" / "run.json").read_text())
    assert facts["run_config"]["model"]["source"] == "phantom"
    assert facts["versions"].keys() >= {"camscope", "torch", "python"}
    assert [name.split()[0] for name in facts["run_config"]["methods"]] == ["gradcam", "layercam"]


def test_bad_files_of_eight_kinds_are_each_told_why(folder, model, tmp_path, monkeypatch):
    """A truncated file, none, text, a bomb, a wrong extension, an unreadable one, one that vanished, and an animation."""
    good = (folder / "0.png").read_bytes()
    Image.new("RGB", (64, 64), "red").save(folder / "whole.jpg")
    (folder / "truncated.jpg").write_bytes((folder / "whole.jpg").read_bytes()[:-200])
    (folder / "nothing.png").write_bytes(b"")
    (folder / "text.jpg").write_text("this is no picture")
    (folder / "wrong.jpg").write_bytes(good)
    frames = [Image.new("RGB", (16, 16), color) for color in ("red", "blue")]
    frames[0].save(folder / "moving.gif", save_all=True, append_images=frames[1:])
    bomb = bytearray(good)
    bomb[16:24] = (20_000).to_bytes(4, "big") * 2  # the header's width and height
    bomb[29:33] = zlib.crc32(bomb[12:29]).to_bytes(4, "big")
    (folder / "bomb.png").write_bytes(bomb)
    read = path_resolver.read_location_bytes

    def refused(place):  # whoever runs the tests may be allowed to read everything
        if place.endswith("locked.png"):
            raise PermissionError(13, "Permission denied")
        return read(place)

    monkeypatch.setattr(path_resolver, "read_location_bytes", refused)
    names = [
        "truncated.jpg",
        "nothing.png",
        "text.jpg",
        "bomb.png",
        "wrong.jpg",
        "locked.png",
        "vanished.png",
        "moving.gif",
    ]
    run_batch(GradCAM(model), [folder / "0.png", *(folder / name for name in names)], tmp_path / "out")
    told = {os.path.basename(row["path"]): row["error"] for row in rows(tmp_path / "out")}  # noqa: PTH119 - a name's end
    assert [name for name, error in told.items() if error is None] == ["0.png", "wrong.jpg", "moving.gif"]
    notes = {os.path.basename(row["path"]): row["notes"] for row in BatchRun(tmp_path / "out").table().to_pylist()}  # noqa: PTH119
    assert notes["wrong.jpg"][-1] == "the file is called .jpg and is a PNG"
    assert notes["moving.gif"][-1] == "an animation or a stack: of 2 frames the first was read"
    assert notes["0.png"] == []
    for name, reason in {
        "truncated.jpg": "it is damaged",
        "nothing.png": "the file is empty",
        "text.jpg": "not an image of a format that Pillow knows",
        "bomb.png": "Pillow refuses it: Image size (400000000 pixels)",
        "locked.png": "it cannot be read: Permission denied",
        "vanished.png": "there is no such file",
    }.items():
        assert reason in told[name], told


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no pipes among its files")
def test_a_pipe_and_a_device_are_not_waited_for(folder, model, tmp_path):
    os.mkfifo(folder / "7.png")
    outcome = run_batch(GradCAM(model), [folder / "7.png", "/dev/zero", folder / "0.png"], tmp_path / "out")
    assert outcome.failure_counts == {
        "it cannot be read: it is not a regular file, but a pipe, a socket or a device": 2
    }


@pytest.mark.slow
def test_two_processes_on_one_folder_make_one_run(model, tmp_path):
    """Both work off every part, at the same time: of two that write the same one, one wins."""
    images = tmp_path / "images"
    images.mkdir()
    drawn = np.random.default_rng(2)
    for n in range(30):
        Image.fromarray(drawn.integers(0, 256, (24, 24, 3), dtype=np.uint8)).save(images / f"{n:02}.png")
    both = [another_run(images, tmp_path / "out") for _ in range(2)]
    for process in both:
        process.join()
    assert [process.exitcode for process in both] == [0, 0]
    assert (tmp_path / "out-said").read_bytes() == b""
    run_batch(GradCAM(model), images, tmp_path / "whole", options=BatchOptions(chunk_size=3), batch_size=2)
    assert rows(tmp_path / "out") == rows(tmp_path / "whole")
    assert sorted(os.listdir(tmp_path / "out")) == ["parts", "run.json"]  # noqa: PTH208 - names


def test_of_two_processes_that_begin_different_runs_at_once_one_is_refused(tmp_path):
    store = _Racing(tmp_path / "out", {"run_config": {"targets": ["nodule"]}})
    with pytest.raises(OutputError, match=r"holds another run \(targets: \['nodule'\] there, \['effusion'\] here\)"):
        store.begin_or_resume({"run_config": {"targets": ["effusion"]}})


class _Racing(RunStore):
    """A folder in which somebody else begins a run just after it was seen to be empty."""

    def __init__(self, folder, said):
        super().__init__(folder)
        self._said, self._looked = said, 0

    @property
    def run_info(self):
        self._looked += 1
        if self._looked == 1:
            RunStore(self.folder).begin_or_resume(self._said)
            return None
        return RunStore(self.folder).run_info


def test_a_run_that_failed_before_its_first_part_leaves_its_folder_to_another(folder, model, tmp_path):
    with pytest.raises(TargetError, match="tulip"):
        run_batch(GradCAM(model), folder, tmp_path / "out", ["tulip"])
    assert run_batch(GradCAM(model), folder, tmp_path / "out", ["nodule"]).n_processed == 7


def test_the_same_names_in_another_folder_are_other_pictures(folder, model, tmp_path, monkeypatch):
    monkeypatch.chdir(folder)
    run_batch(GradCAM(model), ["0.png", "1.png"], tmp_path / "out")
    other = tmp_path / "other"
    other.mkdir()
    for name in ("0.png", "1.png"):
        Image.new("RGB", (32, 32), "red").save(other / name)
    monkeypatch.chdir(other)
    with pytest.raises(OutputError, match=r"manifest\.folder: .*images there, .*other here"):
        run_batch(GradCAM(model), ["0.png", "1.png"], tmp_path / "out")


def test_what_a_killed_process_left_half_written_goes_after_a_day(folder, model, tmp_path):
    run_batch(GradCAM(model), folder, tmp_path / "out")
    new, old = (tmp_path / "out" / "parts" / f".{letter * 16}.part" for letter in "ab")
    for path in (new, old):
        path.write_bytes(b"half")
    os.utime(old, (time.time() - 100_000,) * 2)
    run_batch(GradCAM(model), folder, tmp_path / "out")
    assert new.exists()
    assert not old.exists()


def test_times_of_pandas_go_along_in_microseconds_for_python_knows_no_finer_ones(folder, model, tmp_path):
    whole, finer = 1_700_000_000_000_000_000, 1_700_000_000_000_000_001
    names = [str(folder / "0.png"), str(folder / "1.png")]
    columns = {
        "taken": pa.array([whole, None], pa.timestamp("ns", "UTC")),
        "exact": pa.array([whole, finer], pa.timestamp("ns")),
    }
    parquet.write_table(pa.table({"path": names, **columns}), tmp_path / "list.parquet")
    made = build_manifest(tmp_path / "list.parquet", root="")
    assert made.table.schema.field("taken").type == pa.timestamp("us", "UTC")
    assert made.table["exact"].to_pylist()[1].endswith("000000001")
    run_batch(GradCAM(model), made, tmp_path / "out")
    assert BatchRun(tmp_path / "out").table()["taken"].to_pylist()[0].timestamp() == whole / 1e9


@pytest.mark.slow
def test_the_seconds_of_a_row_are_those_of_its_method(folder, model, tmp_path):
    """Two share a pass and its price, the third takes 32 passes of its own."""
    GradCAM(model).attribute(torch.zeros(1, 1, 128, 128))  # whatever is slow the first time
    run_batch([GradCAM(model), RISE(model, n_samples=32), LayerCAM(model)], folder, tmp_path / "run")
    each = {}
    for row in BatchRun(tmp_path / "run").table(["method", "seconds", "status"]).to_pylist():
        if row["status"] != "failed":
            each.setdefault(row["method"], []).append(row["seconds"])
    assert each["gradcam"] == each["layercam"]
    assert 0 < 2 * np.median(each["gradcam"]) < np.median(each["rise"])


@pytest.mark.parametrize(
    ("shape", "many"),
    [((3, 224, 224), 16), ((3, 512, 512), 16), ((1, 128, 128), 49), ((3, 64, 64), 64), ((1, 32, 32, 32), 24)],
)
def test_small_images_share_a_pass_with_more_of_their_kind(shape, many):
    from camscope.batch.batch_worker import BatchWorker
    from camscope.batch.image_loading import LoadedImage
    from camscope.explainers.core.model_input import ModelInput

    tool = GradCAM(load_model("phantom"))
    manifest = SimpleNamespace(images=None)
    one = LoadedImage({}, None, ModelInput(torch.zeros(shape), None, "", None, None))
    assert BatchWorker([tool], [None], manifest).choose_batch_size(one) == many
    assert BatchWorker([tool], [None], manifest, batch_size=5).choose_batch_size(one) == 5


def test_small_files_are_read_by_one_thread_and_large_ones_by_as_many_as_there_are_cores(tmp_path, monkeypatch):
    from camscope.batch.batch_runner import SMALL_FILE_BYTES, choose_num_threads
    from camscope.batch.image_manifest import pseudonymize_manifest

    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    for name, size in (("small.png", SMALL_FILE_BYTES - 1), ("large.png", SMALL_FILE_BYTES)):
        (tmp_path / name).write_bytes(bytes(size))
    for name, many in (("small.png", 1), ("large.png", 8)):
        manifest = build_manifest([tmp_path / name])
        assert choose_num_threads(manifest) == choose_num_threads(pseudonymize_manifest(manifest)) == many
    assert choose_num_threads(build_manifest([np.zeros((8, 8, 3), np.uint8)])) == 8, "of a dataset nothing is known"
    (tmp_path / "gone.csv").write_text("path\ngone.png\n")
    assert choose_num_threads(build_manifest(tmp_path / "gone.csv")) == 8
