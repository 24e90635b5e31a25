"""`camscope audit`: what a new user types, from a config to two audits held against one another."""

import json
import os
import re
import shutil
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

pytest.importorskip("pydantic")

from camscope.audit import demo_dataset_and_model, run_audit
from camscope.audit.core.config import Config
from camscope.audit.demo_dataset_and_model import write_demo_study
from camscope.cli import app
from camscope.explainers import METHODS
from camscope.phantom.shortcut_study import draw_study, train_shortcut_model
from tests.audit.audits import figures_left_out

pytestmark = pytest.mark.usefixtures("one_thread")
BUDGET = "1s"  # too little: the test of its note shares the audit
LIGHT = 'skip = ["localization", "faithfulness", "sanity", "robustness"]\n'


@pytest.fixture(scope="module")
def study(tmp_path_factory, one_thread):
    """A folder with a study, its net, and the config that `build_config` writes, made light."""
    folder = tmp_path_factory.mktemp("study")
    config = write_demo_study(folder, 0.95, n_images=48)
    weights = config.model.weights
    args = ["init", "manifest.csv", "--model", config.model.source, "--weights", weights, "--modality", "xray"]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        told = asked(*args, "-o", "audit.toml")
        assert told.exit_code == 0, told.output
        assert "camscope audit run audit.toml" in told.output
    text = (folder / "audit.toml").read_text().replace('["gradcam", "integratedgradients"]', '["gradcam"]')
    (folder / "audit.toml").write_text(LIGHT + text)
    return folder


@pytest.fixture
def without_figures():
    """Reports have no charts: that of `made` has them."""
    with figures_left_out():
        yield


@pytest.fixture(scope="module")
def made(study, one_thread):
    """Its audit."""
    told = asked("run", str(study / "audit.toml"), "-o", str(study / "audit"), "--budget", BUDGET)
    assert told.exit_code == 0, told.output
    return told, study / "audit"


def asked(*args):
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, ["audit", *args])


def test_it_says_how_long_it_takes_what_it_found_and_where_the_report_is(made):
    told, folder = made
    assert "about " in told.output
    assert "from here: " in told.output
    assert "The prediction for “lesion” relies on the region “marker”." in told.output
    assert "● supported" in told.output
    assert "change of the log odds, in SD" in told.output
    assert "Localization was not tested" in told.output
    assert re.search(r"AUROC +lesion: [01]\.\d+ \[.*\], \d+ images of \d+ patients\. ", told.output)
    assert re.search(
        r"concern The prediction for “lesion” relies on .*: .* receivers, \d+ donors; the whole interval", told.output
    )
    assert str(folder / "report.html") in told.output.replace("\n", "")
    assert "<svg" in (folder / "report.html").read_text("utf-8")


@pytest.mark.slow
def test_what_draws_the_report_is_imported_before_the_first_stage(study, tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "matplotlib.backends.backend_svg", raising=False)

    def stop(stage, done, total):
        raise RuntimeError(stage)

    with pytest.raises(RuntimeError, match="images"):
        run_audit(study / "audit.toml", tmp_path / "late", on_progress=stop)
    assert "matplotlib.backends.backend_svg" in sys.modules


def test_a_budget_that_is_too_small_is_told_before_the_slow_stages(made):
    told, _ = made
    note = "note: the budget of 1s will be missed by about "
    assert told.output.count(note) == 1
    assert told.output.index("from here: ") < told.output.index(note) < told.output.index("AUROC")


@pytest.mark.slow
def test_an_image_that_cannot_be_read_is_an_exit_code_of_its_own(study, tmp_path, without_figures):
    shutil.copytree(study, tmp_path / "study", ignore=shutil.ignore_patterns("audit"))
    folder = tmp_path / "study"
    next((folder / "images").iterdir()).write_bytes(b"no picture")
    text = (
        (folder / "audit.toml")
        .read_text()
        .replace(LIGHT, LIGHT.replace('"localization"', '"localization", "shortcut"'))
    )
    (folder / "audit.toml").write_text(text)
    told = asked("run", str(folder / "audit.toml"), "-o", str(folder / "audit"))
    assert told.exit_code == 1, told.output
    assert "failures.csv" in told.output
    assert asked("verify", str(folder / "audit")).exit_code == 0


@pytest.mark.parametrize("charset", ["cp1252", "ascii"])
def test_a_sound_audit_is_verified_whatever_the_encoding_of_the_terminal_is(made, charset):
    told = CliRunner(charset=charset).invoke(app, ["audit", "verify", str(made[1])])
    assert told.exit_code == 0, told.output
    assert "+ provenance.json" in told.stdout_bytes.decode(charset)


def test_it_is_verified_and_a_change_is_a_failure(study, made, tmp_path):
    config = study / "with budget.toml"  # the audit was started with the option
    config.write_text(f'budget = "{BUDGET}"\n' + (study / "audit.toml").read_text())
    told = asked("verify", str(made[1]), "--config", str(config), "--rows", "2")
    assert told.exit_code == 0, told.output
    assert told.output.count("row ") == 2
    assert "not recomputed: localization" in " ".join(told.output.split())
    shutil.copytree(made[1], tmp_path / "audit")
    file = tmp_path / "audit" / "summary.json"
    text = file.read_text()
    turned = text.replace('"conclusion": "supported"', '"conclusion": "not supported"', 1)
    assert turned != text  # else nothing was changed, and nothing is there to be noticed
    file.write_text(turned)
    told = asked("verify", str(tmp_path / "audit"))
    assert told.exit_code == 1
    assert "✗ summary.json  was changed" in told.output


PEAK = """
from camscope.explainers import BaseCAM, register

@register
class PeakCAM(BaseCAM):
    name, paper = "peakcam", "ours"

    def weights(self, activation, gradient):
        return gradient.amax(-1, keepdim=True)
"""


@pytest.mark.thorough  # test_plugins asks the other commands
def test_a_method_of_a_plugin_is_audited_and_verified(study, tmp_path):
    plugin, config, folder = tmp_path / "peak.py", study / "plugin.toml", str(tmp_path / "audit")
    plugin.write_text(PEAK)
    config.write_text((study / "audit.toml").read_text().replace('["gradcam"]', '["peakcam"]'))
    try:
        refused = asked("run", str(config), "-o", folder)
        assert refused.exit_code == 2
        assert "peakcam" in refused.output
        told = asked("run", str(config), "-o", folder, "--plugin", str(plugin))
        assert told.exit_code == 0, told.output
        assert "peakcam" in Path(folder, "summary.json").read_text()
        told = asked("verify", folder, "--config", str(config), "--rows", "1", "--plugin", str(plugin))
        assert told.exit_code == 0, told.output
    finally:
        METHODS.pop("peakcam", None)


HUGE = 10 * 2**30  # bytes of a sparse file, which takes no room on the disk
OUTPUTS = (
    "summary.json",
    "gallery.json",
    "provenance.json",
    "report.html",
    "log.jsonl",
    "failures.csv",
    "metrics.parquet",
    "predictions.parquet",
    "maps/run.json",
    "stages/check.json",
)


def huge(file):
    with file.open("r+b") as stream:
        stream.truncate(HUGE)


def pipe(file):
    file.unlink()
    os.mkfifo(file)


def folder(file):
    file.unlink()
    file.mkdir()


DAMAGES = {
    "huge": huge,
    "empty": lambda file: file.write_bytes(b""),
    "noise": lambda file: file.write_bytes(b"\x00\xff[" * 50),
    "nested": lambda file: file.write_bytes(b"[" * 100_000),
    "missing": lambda file: file.unlink(),
    "pipe": pipe,
    "folder": folder,
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", OUTPUTS)
@pytest.mark.one_in(5)
def test_a_damaged_output_is_a_failed_check_or_one_error(made, tmp_path, name, damage):
    shutil.copytree(made[1], tmp_path / "audit")
    DAMAGES[damage](tmp_path / "audit" / name)
    start = time.monotonic()
    with limited(2 * 2**30):
        told = asked("verify", str(tmp_path / "audit"))
    assert told.exit_code == 1, told.output
    assert time.monotonic() - start < 20  # a second where the machine is idle
    words = [line for line in told.output.splitlines() if line.startswith(("error: ", "✗ "))]
    assert words, told.output
    assert not told.output.startswith("error: ") or len(words) == 1
    assert "Traceback" not in told.output
    assert name in told.output
    assert "out of memory" not in told.output
    assert "MemoryError" not in told.output


@contextmanager
def limited(room):
    """Only so many bytes more of address space: what would read a huge file fails at once."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_AS)
    status = Path("/proc/self/statm")
    if not status.is_file():
        pytest.skip("it is not known how much memory the process has")
    held = int(status.read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + room, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def test_its_summary_goes_to_one_page_and_to_a_model_card(made, tmp_path):
    pytest.importorskip("huggingface_hub")
    _, folder = made
    page, text, card = (tmp_path / name for name in ("one.html", "one.md", "README.md"))
    card.write_text("---\nlicense: mit\n---\n# My model\n", encoding="utf-8")
    told = asked("export", str(folder), "-o", str(text), "--model-card", str(card), "--json")
    assert told.exit_code == 0, told.output
    assert json.loads(told.stdout)["model_card"] == str(card)
    assert "relies on the region “marker”" in text.read_text(encoding="utf-8")
    assert "# My model" in card.read_text(encoding="utf-8")
    assert "roc_auc" in card.read_text(encoding="utf-8")
    assert asked("export", str(folder), "-o", str(page)).exit_code == 0
    assert "Biggest concern" in page.read_text(encoding="utf-8")
    for args, code, said in (
        ((), 2, "no file to write is named"),
        (("-o", str(tmp_path / "one.txt")), 2, "ends in .md or .html"),
        (("-o", str(text)), 1, "exists"),
    ):
        refused = asked("export", str(folder), *args)
        assert refused.exit_code == code, refused.output
        assert said in refused.output


def test_two_are_compared(made, tmp_path):
    told = asked("compare", str(made[1]), str(made[1]), "-o", str(tmp_path / "gaps.json"))
    assert told.exit_code == 0, told.output
    assert "no verdict changed" in told.output
    plain = json.loads((tmp_path / "gaps.json").read_text())
    assert {one["difference"]["value"] for one in plain["differences"]} == {0.0}


def test_a_gate_of_two_audits_has_the_exit_code_of_its_conditions(made):
    folder = str(made[1])
    for words in (["audit", "compare"], ["diff"]):
        passed = CliRunner().invoke(app, [*words, folder, folder, "--fail-on", "AUROC fell by > 0.02"])
        assert (passed.exit_code, "passes" in passed.output) == (0, True), passed.output
        failed = CliRunner().invoke(app, [*words, folder, folder, "--fail-on", "AUROC rose by > -0.02"])
        assert failed.exit_code == 2
        wrong = CliRunner().invoke(app, [*words, folder, folder, "--fail-on", "map correlation < 1.5", "--json"])
        assert (wrong.exit_code, json.loads(wrong.stdout)["failed"]) == (1, True)
    mixed = CliRunner().invoke(app, ["diff", folder, f"{folder}/maps"])
    assert (mixed.exit_code, "expected two of one kind" in mixed.stderr) == (2, True)


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (("run", "nowhere.toml"), 2, "the config file does not exist; camscope audit init writes one"),
        (("verify", "nowhere"), 2, "this folder holds no finished audit"),
        (("compare", "nowhere", "nowhere"), 2, "holds no audit"),
        (
            ("init", "nowhere.csv", "--model", "phantom"),
            2,
            "the manifest nowhere.csv cannot be read: there is no such file",
        ),
    ],
)
def test_what_is_not_there_is_one_line(args, code, words):
    told = asked(*args)
    assert told.exit_code == code
    assert words in " ".join(told.output.split())


def test_a_file_where_a_folder_is_named_is_one_line(tmp_path):
    (tmp_path / "some.csv").write_text("path,label\na.png,nodule\nb.png,clear\n")
    told = asked(
        "init", str(tmp_path / "some.csv"), "--model", "phantom", "-o", str(tmp_path / "some.csv" / "audit.toml")
    )
    assert told.exit_code == 1
    assert "some.csv is a file, not a folder; choose another place" in " ".join(told.output.split())


def test_columns_that_nobody_wrote_are_not_listed(tmp_path):
    (tmp_path / "some.csv").write_text("path,color\na.png,red\nb.png,blue\n")
    told = asked("init", str(tmp_path / "some.csv"), "--model", "phantom", "-o", str(tmp_path / "audit.toml"))
    assert told.exit_code == 2
    assert "no column of 0 and 1 that has the name of a class; it has path, color" in " ".join(told.output.split())


def test_help_has_examples():
    for name in ("init", "run", "compare", "verify"):
        told = asked(name, "--help")
        assert "Example: camscope audit" in told.output


@pytest.mark.slow
def test_the_demonstration_audits_two_nets_and_goes_on(tmp_path, monkeypatch, without_figures):
    def small(folder, p, *, seed, overwrite=False):
        made = write_demo_study(folder, p, n_images=12, seed=seed, overwrite=overwrite).model_dump()
        skip = ("localization", "faithfulness", "sanity", "robustness", "shortcut")
        made["explain"] |= {"methods": ("gradcam",), "settings": {}}
        return Config.from_source(made | {"skip": skip, "n_resamples": 200})

    monkeypatch.setattr(demo_dataset_and_model, "write_demo_study", small)
    monkeypatch.setattr(
        demo_dataset_and_model,
        "_train_demo_model",
        lambda p, seed: train_shortcut_model(draw_study(64, 1, p), n_epochs=1),
    )
    runner = CliRunner(env={"COLUMNS": "200"})
    told = runner.invoke(app, ["demo", "--audit", "-o", str(tmp_path / "out")])
    assert told.exit_code == 0, told.output
    assert re.search(r"AUROC   clean \d\.\d+, confounded \d\.\d+", told.output)
    for name in ("clean", "confounded"):
        report = tmp_path / "out" / name / "audit" / "report.html"
        assert f"report  {report}" in told.output
        assert "Simulated X-rays" in report.read_text("utf-8")
    log = report.with_name("log.jsonl")
    before = log.read_text()
    again = runner.invoke(app, ["demo", "--audit", "-o", str(tmp_path / "out")])
    assert again.exit_code == 0, again.output
    assert log.read_text() == before, "nothing is computed again"
