"""What an audit says it was made of: every file, mask and line of the model's code, whatever was declared before, no names."""

import json
import os
import random
import shutil
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("pydantic")
pytest.importorskip("pyarrow")

import pyarrow.compute as compute
import pyarrow.parquet as parquet
from PIL import Image, ImageOps

from camscope import audit
from camscope.audit.check_audits_comparable import check_comparable_and_list_notes
from camscope.audit.core.audit_context import AuditContext
from camscope.audit.core.config import Config
from camscope.audit.demo_dataset_and_model import write_demo_study
from camscope.audit.provenance import provenance_file
from camscope.audit.provenance.digests import digest_file, digest_images, digest_masks, digest_model_source
from camscope.audit.run_stages import check_images_unchanged
from camscope.audit.verify_finished_audit import verify_audit
from camscope.errors import InputError, OutputError
from tests.audit.audits import figures_left_out

SKIP = ("faithfulness", "sanity", "robustness")
CODE = """from camscope.phantom import shortcut_study as shortcut

net = shortcut.create_shortcut_model
PREPROCESSING = {"net": shortcut.PREPROCESSING["create_shortcut_model"]}
CATEGORIES = {"net": shortcut.CATEGORIES["create_shortcut_model"]}
"""
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def case(tmp_path_factory, one_thread):
    """A study with a net in a file of its own, the plain config with places relative to the study, and its audit."""
    folder = tmp_path_factory.mktemp("provenance")
    plain = write_demo_study(folder, 0.95, n_images=48).model_dump()
    (folder / "quiverleaf.py").write_text(CODE)
    plain["skip"] = SKIP
    plain["explain"] = {"findings": ("lesion",), "methods": ("gradcam",)}
    plain["data"] |= {"manifest": "manifest.csv", "ground_truth": "./mask"}
    plain["model"] = {"source": "quiverleaf.py:net", "weights": Path(plain["model"]["weights"]).name}
    plain["data"]["subgroups"], plain["regions"]["presets"], plain["sample_sizes"]["gallery"] = (), ("border",), 4
    with pytest.MonkeyPatch.context() as patch, figures_left_out():
        patch.chdir(folder)
        made = audit.run_audit(plain, "audit")
    return folder, plain, folder / made.folder


@pytest.fixture
def copied(case, tmp_path, monkeypatch):
    """A copy of all of it, where we now are."""
    shutil.copytree(case[0], tmp_path / "study")
    monkeypatch.chdir(tmp_path / "study")
    return case[1]


def known(folder="audit"):
    return json.loads((Path(folder) / "provenance.json").read_bytes())


def failed(plain=None, rows=0):
    config = None if plain is None else Config.from_source(plain)
    return {one.name for one in verify_audit("audit", config, n_rows=rows).checks if not one.is_intact}


# Files


@pytest.mark.parametrize("n_flips", [6, pytest.param(24, marks=pytest.mark.thorough)])
def test_a_flipped_bit_anywhere_in_any_file_is_seen_and_nothing_raises(copied, n_flips):
    drawn = random.Random(0)
    files = [path for path in sorted(Path("audit").rglob("*")) if path.is_file()]
    tables = [path for path in files if path.suffix == ".parquet"]
    assert len(tables) >= 4
    for n in range(n_flips):
        path = drawn.choice(tables if n % 3 else [one for one in files if one.name != "report.html"])
        kept = path.read_bytes()
        changed = bytearray(kept)
        changed[drawn.randrange(len(changed))] ^= 1 << drawn.randrange(8)
        path.write_bytes(bytes(changed))
        found = verify_audit("audit")
        assert any(
            one.name in (path.name, path.relative_to("audit").as_posix()) for one in found.checks if not one.is_intact
        ), path
        path.write_bytes(kept)
    assert verify_audit("audit").is_intact


@pytest.mark.slow
def test_a_number_that_is_written_otherwise_and_a_provenance_that_is_none_are_seen(copied):
    place = Path("audit/provenance.json")
    kept = place.read_bytes()
    for other in (kept.replace(b"\n", b"\r\n"), kept[: len(kept) // 2], b"[]", b"\xff", b'{"bytes": 1, "seal": NaN}'):
        place.write_bytes(other)
        assert not verify_audit("audit").is_intact
        assert failed(copied)


def test_damaged_tables_are_changes_with_the_config_too(copied):
    for name in ("predictions.parquet", "maps/run.json"):
        kept = Path("audit", name).read_bytes()
        Path("audit", name).write_bytes(kept[: len(kept) // 2])
        assert {name, "rows"} <= failed(copied, rows=2)
        Path("audit", name).write_bytes(kept)


def test_tables_have_the_digest_of_their_bytes_beside_that_of_their_content(case):
    said = known(case[2])
    assert set(said["bytes"]) == {*said["outputs"], "log.jsonl"}
    other = {name for name in said["outputs"] if said["outputs"][name] != said["bytes"][name]}
    assert other == {name for name in said["outputs"] if name.endswith(".parquet")}


def test_everything_that_is_required_is_there(case):
    said = known(case[2])
    assert {"masks", "bytes", "declarations", "commit", "preprocessing", "seal"} <= set(said)
    assert all(value is not None for value in said.values())
    assert said["preprocessing"].keys() == said["rows"].keys()
    assert len(set(said["preprocessing"].values())) == 1  # all are of one size, and placed alike


def test_what_produced_it_names_kinds_of_numbers(case):
    said = known(case[2])
    assert said["model"]["numbers"] == ["float32"]
    assert said["model"]["loaded"].startswith("strictly")


def invert(count, folder="images"):
    """Other pictures in the place of so many."""
    for file in sorted(Path(folder).iterdir())[:count]:
        ImageOps.invert(Image.open(file)).save(file)


def resealed(**facts):
    """The provenance as a forger would leave it: it holds for the files as they are now."""
    said = (
        known()
        | {
            "bytes": provenance_file.digest_files(Path("audit")),
            "outputs": provenance_file.digest_outputs(Path("audit")),
        }
        | facts
    )
    said["seal"] = provenance_file.compute_seal(said)
    Path("audit/provenance.json").write_bytes(provenance_file.serialize_record(said))


def halved(name, column):
    """Halve the numbers of a column of a table."""
    table = parquet.read_table(f"audit/{name}")
    place = table.column_names.index(column)
    parquet.write_table(
        table.set_column(place, table.schema.field(column), compute.divide(table[column], 2.0)), f"audit/{name}"
    )


@pytest.mark.parametrize(
    ("name", "column"),
    [
        ("interventions.parquet", "log_odds_without"),
        ("metrics.parquet", "value"),
        ("predictions.parquet", "log odds lesion"),
    ],
)
def test_a_changed_table_is_seen(copied, name, column):
    halved(name, column)
    assert failed() == {"outputs", name}


def test_changed_predictions_are_seen_though_the_seal_was_made_again(copied):
    halved("predictions.parquet", "log odds lesion")
    resealed()
    found = failed(copied, rows=4)
    assert len(found) == 4
    assert all(name.startswith("row ") for name in found)


def test_a_file_that_was_added_is_seen_wherever_it_is(copied):
    for name in (".hidden", "stages/provenance.json", "maps/.x/y"):
        place = Path("audit", name)
        place.parent.mkdir(exist_ok=True)
        place.write_text("{}")
        assert failed() == {"outputs", name}
        place.unlink()


# Its images


def test_images_that_are_other_ones_are_counted(copied):
    invert(4)
    (found,) = (one for one in verify_audit("audit", Config.from_source(copied), n_rows=0).checks if not one.is_intact)
    assert (found.name, found.message[:43]) == ("images", "changed, 4 of 48: 00000, 00001, 00002, 0000")
    Path("images/00000.png").unlink()
    assert failed(copied) == {"images"}


@pytest.mark.slow
@pytest.mark.parametrize("undone", [(), ("explain", "localization", "shortcut")])
def test_an_audit_does_not_go_on_with_other_images(copied, undone):
    invert(4)
    before = Path("audit/report.html").read_bytes()
    for stage in undone:
        Path(f"audit/stages/{stage}.json").unlink()
    with pytest.raises(OutputError, match="4 of 48 images have changed since the first start of this audit"):
        audit.run_audit(copied, "audit")
    assert Path("audit/report.html").read_bytes() == before


def test_images_that_change_while_it_runs_are_seen_at_its_end(copied):
    context = AuditContext(Config.from_source(copied), Path("audit"))
    before = digest_images(context)
    check_images_unchanged(context.folder, before, provenance_file.replace_digests_of_explained_images(context, before))
    invert(2)
    after = digest_images(AuditContext(Config.from_source(copied), Path("audit")))
    with pytest.raises(OutputError, match="2 of 48 images"):  # the maps were computed from the first images
        check_images_unchanged(
            context.folder, after, provenance_file.replace_digests_of_explained_images(context, after)
        )


def test_the_digest_of_an_image_is_that_of_its_map_and_of_what_cannot_be_read_there_is_none(copied):
    told = []
    Path("images/00003.png").unlink()
    found = digest_images(
        AuditContext(Config.from_source(copied), Path("audit")), lambda done, total: told.append((done, total))
    )
    assert found == {**known()["rows"], "00003": None}
    assert told == [(32, 48), (48, 48)]


# Two of them


def settings(name, value):
    """A copy of the audit in whose provenance a setting is another one."""
    said = known("other")
    *above, last = name.split(".")
    place = said["config"]
    for one in above:
        place = place[one]
    place[last] = value
    Path("other/provenance.json").write_bytes(provenance_file.serialize_record(said))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("seed", 1),
        ("imputations", ["mean", "noise"]),
        ("sample_sizes.interventions", 20),
        ("regions.organ", None),
        ("data.patient", None),
        ("explain.layer", "layer1"),
        ("model.outputs", "sigmoid"),
    ],
)
def test_audits_that_were_made_otherwise_are_not_compared(copied, name, value):
    shutil.copytree("audit", "other")
    settings(name, value)
    with pytest.raises(InputError, match=f"different settings: {name} is "):
        check_comparable_and_list_notes(audit.AuditRun("audit"), audit.AuditRun("other"))
    settings("model.source", "another.py:architecture")
    if name in ("explain.layer", "model.outputs"):  # which are the other model's own
        assert check_comparable_and_list_notes(audit.AuditRun("audit"), audit.AuditRun("other")) == ()


def test_another_setting_of_a_method_is_named_and_other_margins_are_a_remark(copied):
    shutil.copytree("audit", "other")
    settings("margins.effect", 0.2)
    (found,) = check_comparable_and_list_notes(audit.AuditRun("audit"), audit.AuditRun("other"))
    assert found.startswith("margins.effect is 0.1 in the first and 0.2 in the second")
    settings("sample_sizes.gallery", 4)
    assert len(check_comparable_and_list_notes(audit.AuditRun("audit"), audit.AuditRun("other"))) == 1
    summary = json.loads(Path("other/summary.json").read_bytes())
    summary["resolve"]["explainers"][0]["settings"]["mode"] = "train"
    Path("other/summary.json").write_text(json.dumps(summary))
    with pytest.raises(InputError, match="mode of gradcam is eval in the first and train in the second"):
        check_comparable_and_list_notes(audit.AuditRun("audit"), audit.AuditRun("other"))
    summary = json.loads(Path("audit/summary.json").read_bytes())
    summary["resolve"]["findings"] = ["1"]
    Path("other/summary.json").write_text(json.dumps(summary))
    with pytest.raises(InputError, match="the findings are lesion in the first and 1 in the second"):
        check_comparable_and_list_notes(audit.AuditRun("audit"), audit.AuditRun("other"))


@pytest.mark.parametrize(("part", "words"), [("rows", "2 of 48 images differ"), ("masks", "use different masks")])
def test_audits_of_other_images_or_masks_are_not_compared(copied, part, words):
    shutil.copytree("audit", "other")
    said = known("other")
    other = {"rows": said["rows"] | {"00000": "another", "00001": None}, "masks": "another"}
    Path("other/provenance.json").write_bytes(provenance_file.serialize_record(said | {part: other[part]}))
    with pytest.raises(InputError, match=words):
        check_comparable_and_list_notes(audit.AuditRun("audit"), audit.AuditRun("other"))
    Path("other/provenance.json").unlink()
    with pytest.raises(InputError, match="is missing"):
        check_comparable_and_list_notes(audit.AuditRun("audit"), audit.AuditRun("other"))


# What it was made of


def test_the_commit_is_that_of_the_checkout_or_there_is_none(monkeypatch, tmp_path):
    root = Path(provenance_file.__file__).parents[3]
    provenance_file.describe_commit.cache_clear()
    if (root / ".git").exists():
        head = subprocess.run(["git", "-C", root, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
        assert provenance_file.describe_commit().removesuffix("-dirty") == head.stdout.strip()
    monkeypatch.setattr(
        provenance_file,
        "__file__",
        str(tmp_path / "site-packages/camscope/audit/provenance/provenance_file.py"),
    )
    provenance_file.describe_commit.cache_clear()
    assert provenance_file.describe_commit() == "not from a checkout"
    provenance_file.describe_commit.cache_clear()


def test_the_same_config_holds_from_another_folder(copied, tmp_path, monkeypatch):
    assert failed(copied, rows=2) == set()
    text = json.loads(Config.from_source(copied).model_dump_json())
    text["data"]["manifest"] = "study/manifest.csv"
    text["model"] |= {"source": "study/quiverleaf.py:net", "weights": f"study/{text['model']['weights']}"}
    text["data"]["ground_truth"] = "study/mask"
    monkeypatch.chdir(tmp_path)
    found = verify_audit("study/audit", Config.from_source(text), n_rows=1)
    assert {one.name for one in found.checks if not one.is_intact} == set()


@pytest.mark.parametrize("part", ["mask", "region_lungs", "region_marker"])
def test_a_mask_that_is_changed_or_gone_is_seen(copied, part):
    file = sorted(Path(part).iterdir())[0]
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(bytes(data))
    assert failed(copied) == {"masks"}
    file.unlink()
    assert digest_masks(AuditContext(Config.from_source(copied), Path("audit"))) not in ("none", known()["masks"])


def test_a_column_says_the_same_as_the_folder_and_a_coco_file_is_digested_with_what_it_names(copied):
    Path("masks").mkdir()
    Path("masks/one.png").write_bytes(b"1")
    image = {"id": 1, "file_name": "images/00000.png", "height": 64, "width": 64}
    annotation = {"image_id": 1, "category_id": 1, "mask_file": "masks/one.png"}
    coco = {"categories": [{"id": 1, "name": "lesion"}], "images": [image], "annotations": [annotation]}
    Path("coco.json").write_text(json.dumps(coco))
    folder, named = masks(copied, "mask"), masks(copied, "coco.json")
    Path("masks/one.png").write_bytes(b"2")
    assert masks(copied, "coco.json") != named
    assert masks(copied, None) == "none"
    os.chdir("..")  # where no folder is called as the column
    assert masks({**copied, "data": {**copied["data"], "manifest": "study/manifest.csv"}}, "mask") == folder


def masks(plain, evidence):
    data = {**plain["data"], "ground_truth": evidence}
    return digest_masks(AuditContext(Config.from_source({**plain, "data": data, "regions": {}}), Path("audit")))


@pytest.mark.slow
def test_another_source_of_the_model_is_seen_and_begins_another_audit(copied):
    Path("quiverleaf.py").write_text(CODE + "# another\n")
    assert failed(copied) == {"source"}
    with pytest.raises(OutputError, match="another file of the model"):
        audit.run_audit(copied, "audit")


def test_the_source_of_a_module_is_its_file():
    import camscope.phantom.shortcut_study as module

    assert digest_model_source("camscope.phantom.shortcut_study:create_shortcut_model") == digest_file(module.__file__)
    assert {
        digest_model_source(one) for one in ("phantom", "resnet18", "timm:net", "no.such.module:net", "nowhere.py:net")
    } == {"none"}


# What was declared, and what is not named


@pytest.mark.slow
def test_what_was_declared_before_stays_in_the_log(copied, without_figures):
    said = known()
    assert (said["declarations"], said["declared_before_results"]) == (1, True)
    first = said["config_digest"]
    light = {**copied, "skip": (*SKIP, "shortcut")}
    made = audit.run_audit({**light, "margins": {"effect": 0.2}}, "audit", overwrite=True)
    said = known()
    assert (said["declarations"], said["declared_before_results"]) == (2, False)
    assert provenance_file.list_config_digests(Path("audit")) == [first, said["config_digest"]]
    assert "check" in said["stages"]
    assert made.interventions().num_rows == 0
    assert verify_audit("audit").is_intact
    log = Path("audit/log.jsonl").read_bytes()
    audit.run_audit({**light, "margins": {"effect": 0.2}}, "audit")
    assert Path("audit/log.jsonl").read_bytes() == log


def test_the_profile_research_names_no_file_though_it_has_no_folder(case):
    folder, plain, made = case
    for name in (plain["data"]["manifest"], plain["model"]["weights"], "quiverleaf"):
        assert name.encode() not in (made / "provenance.json").read_bytes()
    said = known(made)["config"]
    assert said["model"]["source"] == "net"
    assert said["model"]["weights"] == said["data"]["manifest"] == "a file"
    clinical = {**plain, "report": {"profile": "clinical"}}
    shown = provenance_file._redact_config(AuditContext(Config.from_source(clinical), folder))
    assert shown["model"]["source"] == "quiverleaf.py:net"


# Its tables


def test_failures_are_counted_by_record_and_interventions_are_a_table(copied):
    made = audit.AuditRun("audit")
    assert made.n_failures == 0
    Path("audit/failures.csv").write_bytes('\ufeffid,stage,reason\r\n1,predict,"two\nlines"\r\n'.encode())
    assert made.n_failures == 1
    assert made.interventions().num_rows > 0
