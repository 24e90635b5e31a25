"""The names of files that are made of a run's rows: plain, and each its own."""

import re

import pytest

from camscope.batch.result_rows import OutputNames

SHA = "1f0a92bc" + "0" * 56


def row(**changes):
    known = {"row": 3, "id": "a/cat.png", "path": "a/cat.png", "sha256": SHA, "method": "gradcam", "target": "nodule"}
    return {**known, "parameters_digest": "531cbfe8", **changes}


def named(methods=("gradcam 531cbfe8",), targets=(None,)):
    return OutputNames.from_run({"methods": {key: {} for key in methods}, "targets": list(targets)})


def test_a_row_alone_is_named_for_its_image():
    assert named().file_stem(row()) == "00000003-1f0a92bc-cat"
    assert named().file_stem(row(id="patient 7")) == "00000003-1f0a92bc-patient-7"
    assert named().file_stem(row(path="s3://bucket/dog.jpg", id="s3://bucket/dog.jpg")) == "00000003-1f0a92bc-dog"


def test_siblings_are_told_apart_by_what_differs():
    several = named(["gradcam 1", "layercam 1"], ["nodule", "lung"])
    assert several.file_stem(row()) == "00000003-1f0a92bc-cat-gradcam-nodule"
    layers = named(["gradcam 531cbfe8", "gradcam c87c3296"])
    assert layers.file_stem(row()) == "00000003-1f0a92bc-cat-gradcam-531cbfe8"


@pytest.mark.parametrize("others", [("肺炎", "心臓"), ("a b", "a-b"), ("A", "a"), ("n" * 50, "n" * 51)])
def test_no_two_targets_share_a_name(others):
    several = named(targets=others)
    first, second = (several.file_stem(row(target=one)) for one in others)
    assert first.lower() != second.lower()


@pytest.mark.parametrize(
    "id_", ["../../etc/passwd", "a\x00b", "CON", "<script>", "", "-rf", "a" * 500, "\u202egpj.exe"]
)
def test_nothing_of_an_id_can_be_misread(id_):
    made = named(["gradcam 1", "layercam, denoised 1"], ["x/../y", "z"]).file_stem(
        row(id=id_, target="x/../y", sha256=None)
    )
    assert re.fullmatch(r"00000003-[0-9a-f]{8}-[A-Za-z0-9-]{1,80}", made)
