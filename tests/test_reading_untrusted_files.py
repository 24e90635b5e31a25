"""Files that others may have made: sizes are checked before anything is read, and whatever fails is one error."""

import io
import json
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from camscope.errors import CamscopeError, ImageError, InputError, OutputError, WeightsError
from camscope.explanation import Explanation
from camscope.explanation_io import MAX_METADATA_BYTES
from camscope.models import read_state_dict
from camscope.read_untrusted_files import read_errors_converted, read_json, read_npz, read_parquet, read_toml

DEEP = "[" * 100_000 + "]" * 100_000


def explanation(**fields):
    heat = np.ones((3, 4), np.float32)
    return Explanation(
        **{
            "attribution": heat,
            "method": "gradcam",
            "target": 1,
            "label": "a",
            "score": 1.0,
            "input_size": (6, 8),
            **fields,
        }
    )


def peak_of(call):
    """Bytes that a call has allocated at most."""
    tracemalloc.start()
    try:
        call()
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return peak


@pytest.mark.parametrize(
    ("raised", "saying"),
    [
        (KeyError("name"), "file: it is damaged, or of another kind (KeyError: 'name')"),
        (RecursionError("maximum"), "file: it is nested too deeply"),
        (MemoryError(), "file: there is not enough memory for it"),
        (PermissionError(13, "Permission denied"), "file: it cannot be read: Permission denied"),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"), "file: it is damaged"),
    ],
    ids=lambda one: type(one).__name__,
)
def test_whatever_is_raised_is_one_error(raised, saying):
    for kind in (InputError, OutputError, WeightsError):
        with pytest.raises(kind) as error, read_errors_converted("file", kind):
            raise raised
        assert str(error.value).startswith(saying)


def test_own_errors_stay_and_words_that_may_name_a_patient_are_dropped():
    with pytest.raises(ImageError, match=r"^its own$"), read_errors_converted("file"):
        raise ImageError("its own")
    with pytest.raises(InputError, match=r"^file: its own$"), read_errors_converted("file", wrap_camscope_errors=True):
        raise ImageError("its own")
    with pytest.raises(InputError) as error, read_errors_converted("file", quote_original=False):
        raise ValueError("Jane Doe")
    assert "Jane" not in str(error.value)
    with pytest.raises(KeyboardInterrupt), read_errors_converted("file"):
        raise KeyboardInterrupt


@pytest.mark.slow
def test_arrays_are_weighed_before_they_are_read(tmp_path):
    explanation(image=np.zeros((3000, 3000, 3), np.uint8)).save(path := tmp_path / "large.npz")
    assert path.stat().st_size < 100_000
    assert Explanation.load(path).image.nbytes == 27_000_000

    def refused():
        with pytest.raises(InputError, match=r"the arrays have 27,00\d,\d+ bytes, more than the limit of 20,000,000"):
            Explanation.load(path, max_bytes=20_000_000)

    refused()  # what is imported is none of the second call's memory
    assert peak_of(refused) < 2_000_000


@pytest.mark.slow
def test_each_array_has_a_limit_that_fits_its_role(tmp_path):
    path = explanation().save(tmp_path / "a.npz")
    with np.load(path) as archive:
        arrays = dict(archive)
    long = np.array(str(arrays["facts"]) + " " * (MAX_METADATA_BYTES // 4))  # spaces, which JSON allows
    np.savez_compressed(path, **{**arrays, "facts": long})
    assert path.stat().st_size < 200_000

    def refused():
        with pytest.raises(
            InputError, match=r"the array facts has 67,\d+,\d+ bytes, more than the limit of 67,108,864"
        ):
            Explanation.load(path)

    refused()
    assert peak_of(refused) < 2_000_000


def test_the_limit_of_a_caller_is_also_that_of_a_json_file(tmp_path):
    path = explanation().save(tmp_path / "a.json")
    assert Explanation.load(path, max_bytes=path.stat().st_size).label == "a"
    with pytest.raises(InputError, match=r"it has [\d,]+ bytes; the limit is 99"):
        Explanation.load(path, max_bytes=99)


def test_a_manifest_and_coco_annotations_have_limits(tmp_path, monkeypatch):
    pytest.importorskip("pyarrow")
    from camscope.batch import build_manifest
    from camscope.evaluation.ground_truth import load_ground_truth

    (tmp_path / "m.csv").write_text("path\n" + "".join(f"{n}.png\n" for n in range(100)))
    (tmp_path / "c.json").write_text(json.dumps({"images": [], "annotations": []}) + " " * 600)
    assert len(build_manifest(tmp_path / "m.csv")) == 100
    monkeypatch.setattr("camscope.batch.build_manifest_from_source.MAX_MANIFEST_BYTES", 500)
    with pytest.raises(InputError, match=r"the manifest: .*it has 695 bytes; the limit is 500"):
        build_manifest(tmp_path / "m.csv")
    monkeypatch.setattr("camscope.evaluation.ground_truth.MAX_COCO_BYTES", 500)
    with pytest.raises(InputError, match=r"it has 6[0-9]+ bytes; the limit is 500"):
        load_ground_truth(tmp_path / "c.json", (), tmp_path, [])


@pytest.mark.parametrize("content", [b"\xff\xfe", b"a," + b"x" * 200_000, None])
def test_a_damaged_table_of_failures_is_one_error(tmp_path, content):
    pytest.importorskip("pydantic")
    from camscope.audit.finished_audit import AuditRun

    run = AuditRun.__new__(AuditRun)  # an audit of which only the folder counts
    run.folder = tmp_path
    if content is not None:
        (tmp_path / "failures.csv").write_bytes(content)
    with pytest.raises(InputError, match=r"failures\.csv is not a table of failures"):
        _ = run.n_failures


def test_a_remote_file_has_a_limit_and_is_read_to_its_end(monkeypatch):
    fsspec = pytest.importorskip("fsspec")
    from camscope.batch import path_resolver

    data = bytes(range(256)) * 4
    fsspec.filesystem("memory").pipe("/limits/a.png", data)
    monkeypatch.setattr(path_resolver, "READ_BYTES", 100)
    assert path_resolver.read_location_bytes("memory://limits/a.png") == data
    monkeypatch.setattr(path_resolver, "MAX_FILE_BYTES", 1024)
    assert path_resolver.read_location_bytes("memory://limits/a.png") == data
    monkeypatch.setattr(path_resolver, "MAX_FILE_BYTES", 1023)
    with pytest.raises(OSError, match="it has more than 1,023 bytes"):
        path_resolver.read_location_bytes("memory://limits/a.png")


@pytest.mark.parametrize("shape", [(2**22, 2**22), (2**62, 4), (-1, 3), (3,)])
def test_a_header_that_claims_another_size_is_refused_without_making_room_for_it(tmp_path, shape):
    stream = io.BytesIO()
    np.save(stream, np.zeros((3, 4), np.float32))
    with zipfile.ZipFile(tmp_path / "claims.npz", "w") as archive:
        header = stream.getvalue()[:128].replace(b"(3, 4), }", f"{shape}, }}".encode()).ljust(128)[:128]
        archive.writestr("attribution.npy", header + stream.getvalue()[128:])

    def refused():
        with pytest.raises(CamscopeError), read_errors_converted("file"):
            read_npz(tmp_path / "claims.npz", {"attribution": 2**32})

    assert peak_of(refused) < 2_000_000


def test_an_archive_of_a_checkpoint_that_unpacks_to_more_than_it_has_is_not_read(tmp_path):
    torch.save({"weight": torch.zeros(1000, 1000)}, tmp_path / "w.pt")
    assert read_state_dict(tmp_path / "w.pt")["weight"].shape == (1000, 1000)
    with (
        zipfile.ZipFile(tmp_path / "w.pt") as sound,
        zipfile.ZipFile(tmp_path / "packed.pt", "w", zipfile.ZIP_DEFLATED) as made,
    ):
        for name in sound.namelist():
            made.writestr(name, sound.read(name))
    with pytest.raises(WeightsError, match=r"packed.pt is not read: it has \d,\d+ bytes and would unpack to 4,\d+,\d+"):
        read_state_dict(tmp_path / "packed.pt")


@pytest.mark.parametrize("content", [DEEP, "9" * 5000, '{"a": ' * 5000 + "1" + "}" * 5000, "\udcff", "", "{", "nan?"])
def test_text_that_breaks_its_parser_is_one_error(tmp_path, content):
    path = tmp_path / "file"
    path.write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(InputError, match="file"):
        read_json(path)
    path.write_bytes(b"a = " + path.read_bytes())
    with pytest.raises(InputError, match="file: this is no TOML file"):
        read_toml(path)


def test_a_file_that_is_too_large_or_none_is_not_read(tmp_path):
    (tmp_path / "big").write_bytes(b" " * 1000)
    with pytest.raises(InputError, match="it has 1,000 bytes; the limit is 999"):
        read_json(tmp_path / "big", max_bytes=999)
    with pytest.raises(InputError, match="it is a folder"):
        read_json(tmp_path)
    with pytest.raises(InputError, match="not a regular file"):
        read_json(Path("/dev/zero"))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("score", "<b>"),
        ("score", [1.0]),
        ("probability", []),
        ("label", 3),
        ("method", None),
        ("layer", 1),
        ("notes", [3]),
        ("input_size", [6]),
        ("input_size", [10**9, 10**9]),
        ("input_size", [0, 8]),
        ("input_size", "ab"),
        ("target", True),
        ("status", "fine"),
        ("diagnostics", {"gap": "x"}),
        ("top_classes", [{"index": 0, "label": None, "score": 1, "probability": 1}]),
        ("affine", [[0] * 4] * 3),
        ("placement", {"matrix": [[1, 0, 0], [0, 1, 0]], "input_size": [6, 8], "image_size": [2**20, 2**20]}),
        ("versions", []),
        ("attribution", [[]]),
        ("attribution", DEEP),
    ],
)
def test_a_field_of_an_explanation_that_is_another_is_refused_when_it_is_loaded(tmp_path, field, value):
    path = explanation().save(tmp_path / "a.json")
    facts = {**json.loads(path.read_text()), field: value}
    path.write_text(json.dumps(facts).replace(f'"{DEEP}"', DEEP))
    with pytest.raises(InputError, match=r"a\.json is not an explanation"):
        Explanation.load(path)


def test_an_explanation_is_utf8_whatever_the_locale_is(tmp_path, monkeypatch):
    monkeypatch.setattr("locale.getencoding", lambda: "cp1252")
    path = explanation().save(tmp_path / "a.json")
    path.write_bytes(path.read_bytes().replace(b'"a"', '"ä✓"'.encode()))
    assert Explanation.load(path).label == "ä✓"


# --- tables


@pytest.fixture
def parquet():
    pytest.importorskip("duckdb")
    pytest.importorskip("pyarrow")
    return pytest.importorskip("pyarrow.parquet")


def test_a_table_whose_few_bytes_claim_many_values_is_not_read(tmp_path, parquet, monkeypatch):
    from camscope.batch import build_manifest

    pa = pytest.importorskip("pyarrow")
    table = pa.table({"path": ["a.png"], "numbers": pa.array([np.zeros(100_000, np.int8)])})
    parquet.write_table(table, path := tmp_path / "m.parquet", compression="zstd")
    assert len(build_manifest(path)) == 1
    monkeypatch.setattr("camscope.read_untrusted_files.MAX_EXCESS_VALUES", 1000)
    with pytest.raises(InputError, match="a column claims more values than its bytes hold"):
        build_manifest(path)


@pytest.mark.parametrize("name", ["a[b]*.parquet", "plain.parquet"])
def test_a_sound_table_is_read_whatever_its_name_is(tmp_path, parquet, name):
    pa = pytest.importorskip("pyarrow")
    parquet.write_table(pa.table({"path": ["a.png", "b.png"]}), tmp_path / name)
    assert len(read_parquet(tmp_path / name)) == 2


def test_a_column_name_that_is_no_utf8_is_one_error(tmp_path, parquet):
    from camscope.batch import build_manifest

    (tmp_path / "m.csv").write_bytes(b"path,\xddcol\na.png,1\n")
    with pytest.raises(InputError, match="the manifest"):
        build_manifest(tmp_path / "m.csv")


CHANGES = [
    lambda facts: facts.pop("versions"),
    lambda facts: facts["versions"].pop("torch"),
    lambda facts: facts.update(class_names={}),
    lambda facts: facts.update(root=None),
    lambda facts: facts["run_config"].update(chunk_size=0),
    lambda facts: facts["run_config"]["manifest"].update(rows={"a": 1}),
    lambda facts: facts["run_config"].update(model="net"),
    lambda facts: facts["run_config"].update(methods=[]),
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_run_json_that_lacks_something_is_named_at_once(tmp_path, parquet, change):
    from camscope.batch import BatchRun

    made = {
        "model": {"source": "net", "digest": "0"}, "methods": {}, "targets": [None], "manifest": {"rows": 1, "dataset": None},
        "chunk_size": 1,
    }  # fmt: skip
    facts = {
        "schema": "camscope/run/2",
        "run_config": made,
        "root": {"folder": "", "confined": False},
        "versions": {"camscope": "1", "torch": "2"},
        "class_names": [],
    }
    (tmp_path / "run.json").write_text(json.dumps(facts))
    repr(BatchRun(tmp_path))
    change(facts)
    (tmp_path / "run.json").write_text(json.dumps(facts))
    with pytest.raises(InputError, match=r"run\.json: it is damaged"):
        BatchRun(tmp_path)


def test_an_outline_far_outside_of_its_image_is_one_error():
    pytest.importorskip("pyarrow")
    from camscope.evaluation.ground_truth import mask_from_polygons

    for far in (1e30, float("nan"), -3e9):
        with pytest.raises(
            InputError,
            match=r"a polygon has the coordinate (1e\+30|nan|3000000000\.0); expected pixel coordinates of its image",
        ):
            mask_from_polygons([[0, 0, far, 0, 5, 5]], (10, 10))
