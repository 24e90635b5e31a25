"""Methods from files (`--plugin`) and from installed packages (entry points): every command knows them."""

import json
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

import camscope
from camscope import load_model
from camscope.cli import app
from camscope.errors import CamscopeWarning, InputError
from camscope.explainers import METHODS
from camscope.phantom import draw_radiograph
from camscope.registry import METHOD_ENTRY_POINTS, Registry
from camscope.user_code_and_plugins import Plugin, find_plugins, load_plugin

PEAK = '''
from pathlib import Path

from torch import Tensor

from camscope.explainers import SPATIAL_AXIS, BaseCAM, register

Path("executed.txt").write_text("yes")


@register
class PeakCAM(BaseCAM):
    """Each channel weighs its largest gradient: relu Σ_k max(g_k) A_k."""

    name, paper = "peakcam", "ours"
    factor: float = 1.0

    def weights(self, activation: Tensor, gradient: Tensor) -> Tensor:
        return self.factor * gradient.amax(SPATIAL_AXIS, keepdim=True)
'''


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    for n in range(8):
        Image.fromarray(draw_radiograph(n, 1 + n % 3).image).save(folder / f"{n}.png")
    return folder


@pytest.fixture
def here(tmp_path, monkeypatch, images):
    """A folder with a plugin and images. Afterwards no method of a plugin or a package is left."""
    monkeypatch.chdir(tmp_path)
    Path("peak.py").write_text(PEAK, encoding="utf-8")
    shutil.copytree(images, "images")
    known = set(METHODS)
    yield tmp_path
    for name in set(METHODS) - known:
        del METHODS[name]


def run(*words, code=0):
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    return result


def test_explain_computes_the_map_of_the_formula(here):
    result = run(
        "explain", "images/0.png", "--plugin", "peak.py", "--methods", "peakcam", "-o", "m.npz", "-l", "layer4"
    )
    assert "note: peak.py is executed as code" in result.stderr
    assert "PeakCAM" in result.stdout
    from camscope import Explanation, GradCAM
    from camscope.hooks import Tap

    explanation, model = Explanation.load("m.npz"), load_model("phantom")
    x = GradCAM(model).preprocess(np.asarray(Image.open("images/0.png").convert("RGB")))[0][None]
    with Tap(model, "layer4") as tap:
        model(x)[:, explanation.target].sum().backward()
    activation, gradient = tap.activation[0].detach(), tap.gradient[0]
    expected = (gradient.amax((-2, -1), keepdim=True) * activation).sum(0).relu()
    np.testing.assert_allclose(explanation.attribution, expected, rtol=1e-4, atol=1e-6)


PLUGIN = ("--plugin", "peak.py", "--methods")


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ("batch", "images", "-o", "run", *PLUGIN, "peakcam"),
        ("compare", "images/0.png", "-o", "c.png", *PLUGIN, "gradcam,Peak-CAM"),
        ("compare", "images", "-o", "c", *PLUGIN, "gradcam,peakcam", "--images", "4", "--metrics", "sparseness"),
        ("evaluate", "images", "-o", "e", *PLUGIN, "peakcam", "--metrics", "sparseness"),
        ("choose", "images", *PLUGIN, "gradcam,peakcam", "--layers", "layer4", "--save", "c.toml"),
        ("benchmark", "phantom", "--count", "2", "-o", "b", *PLUGIN, "peakcam"),
        ("demo", "-o", "d", *PLUGIN, "peakcam", "--count", "4"),
    ],
    ids=lambda words: "-".join(words[:2]).replace("/", "-"),
)
@pytest.mark.filterwarnings("default::camscope.errors.CamscopeWarning")
@pytest.mark.one_in(3)
def test_every_command_knows_a_method_of_a_plugin(here, words):
    result = run(*words)
    assert "PeakCAM" in result.output or words[0] == "batch"
    unknown = [word for word in words if word not in PLUGIN[:2]]
    forget_methods()
    refused = run(*unknown, "--overwrite", code=2)
    assert "to load a method from a file pass --plugin FILE.py" in " ".join(refused.stderr.split())


@pytest.mark.slow
def test_the_table_of_methods_has_a_group_for_them_and_a_page(here):
    assert "registered by your own code" in run("methods", "--plugin", "peak.py").stdout
    assert '"factor": 1.0' in run("methods", "peakcam", "--plugin", "peak.py", "--json").stdout
    page = run("methods", "peakcam", "--plugin", "peak.py").stdout
    assert "Example: camscope explain photo.jpg --plugin peak.py --methods peakcam" in page
    forget_methods()
    assert "registered by your own code" not in run("methods").stdout


def test_settings_of_a_plugin_are_set_like_those_of_other_methods(here):
    for factor in (1, 3):
        words = ("--set", f"factor={factor}", "-o", f"{factor}.npz", "-l", "layer4")
        run("explain", "images/0.png", *PLUGIN, "peakcam", *words)
    from camscope import Explanation

    one, three = (Explanation.load(f"{factor}.npz").attribution for factor in (1, 3))
    np.testing.assert_allclose(three, 3 * one, rtol=1e-5)


@pytest.mark.parametrize("name", ["gradcam", "Grad-CAM", "grad_cam", "gradcam++", "gradcam_plusplus"])
def test_a_name_that_exists_is_an_error_and_nothing_is_registered(here, name):
    second = PEAK.replace("PeakCAM", "Second").replace('"peakcam"', f'"{name}"')
    Path("peak.py").write_text(PEAK + second, encoding="utf-8")
    known = dict(METHODS)
    result = run("explain", "images/0.png", *PLUGIN, "peakcam", code=2)
    assert "already refers to 'gradcam" in " ".join(result.stderr.split())
    assert dict(METHODS) == known
    assert not Path("camscope-explain").exists()


@pytest.mark.parametrize(
    ("file", "text", "expected"),
    [
        ("missing.py", None, "there is no plugin missing.py"),
        ("peak.txt", PEAK, "is not a Python file; expected FILE.py"),
        ("broken.py", "import no_such_package_anywhere", "ModuleNotFoundError"),
        ("leaves.py", "raise SystemExit(0)", "raised SystemExit"),
        ("empty.py", "x = 1", "registers no method; decorate its class with @register"),
        ("syntax.py", "def", "SyntaxError"),
    ],
)
def test_a_file_that_is_no_plugin_is_one_error(here, file, text, expected):
    if text is not None:
        Path(file).write_text(text, encoding="utf-8")
    result = run("methods", "--plugin", file, code=2)
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert expected in errors[0]
    assert not [name for name in sys.modules if name.startswith("_camscope_plugin_") and not find_plugins_of(name)]


def find_plugins_of(module):
    return find_plugins([type("Probe", (), {"__module__": module})])


@pytest.mark.parametrize("words", [["explain", "--plugin", "peak.py", "--help"], ["explain", "--plugin", "peak.py"]])
def test_help_and_wrong_usage_execute_nothing(here, words):
    CliRunner().invoke(app, words)
    assert not Path("executed.txt").exists()


def test_the_same_file_twice_is_executed_once(here):
    run("methods", "peakcam", "--plugin", "peak.py", "--plugin", "./peak.py")
    Path("executed.txt").unlink()
    run("methods", "peakcam", "--plugin", "peak.py")
    assert not Path("executed.txt").exists()


def forget_methods():
    for name in {"peakcam"} & set(METHODS):
        del METHODS[name]


@pytest.mark.slow
def test_a_run_names_its_plugin_and_resumes_only_with_it(here):
    words = ("batch", "images", "-o", "run", "--methods", "peakcam")
    run(*words, "--plugin", "peak.py")
    recorded = json.loads(Path("run/run.json").read_text())["run_config"]["plugins"]
    ((name, methods),) = recorded.items()
    assert name.startswith("peak.py ")
    assert methods == "peakcam"
    assert "8 images (8 processed before)" in run(*words, "--plugin", "peak.py").stdout
    forget_methods()
    Path("executed.txt").unlink()
    assert "--plugin FILE.py" in run(*words, code=2).stderr
    assert not Path("executed.txt").exists(), "a plugin that a run names is never loaded"
    Path("peak.py").write_text(PEAK.replace("amax", "amin"), encoding="utf-8")
    changed = " ".join(run(*words, "--plugin", "peak.py", code=1).stderr.split())
    assert "holds another run (plugins.peak.py " in changed


@pytest.mark.slow
def test_each_shard_loads_the_plugin(here):
    for shard in ("0/2", "1/2"):
        forget_methods()
        run("batch", "images", "-o", "run", *PLUGIN, "peakcam", "--shard", shard, "--chunk", "4")
    run("batch", "images", "-o", "whole", *PLUGIN, "peakcam", "--chunk", "4")
    shared, whole = (camscope.BatchRun(folder).table().drop_columns(["seconds"]) for folder in ("run", "whole"))
    assert shared.equals(whole)
    assert len(whole) == 8


@pytest.mark.slow
def test_a_received_run_is_read_without_its_plugin_and_says_what_it_needs(here):
    run("batch", "images", "-o", "run", *PLUGIN, "peakcam", "--set", "factor=2")
    forget_methods()
    Path("executed.txt").unlink()
    run("export", "run", "--format", "csv", "-o", "rows.csv")
    run("show", "run", "-o", "page.html")
    run("evaluate", "run", "-o", "e", "--metrics", "sparseness")
    words = ("evaluate", "run", "-o", "f", "--metrics", "stability", "--model", "phantom")
    result = run(*words, code=2)
    errors = " ".join(result.stderr.split())
    assert "the run was made with the plugin peak.py" in errors
    assert "pass --plugin FILE.py, as for the run" in errors
    assert not Path("executed.txt").exists()
    run(*words, "--plugin", "peak.py")


def test_the_research_profile_hides_the_name_of_the_file(here):
    Path("peak.py").rename("of_jane_doe.py")
    words = ("--profile", "research", "--methods", "peakcam", "--plugin", "of_jane_doe.py")
    run("batch", "images", "-o", "run", *words)
    assert "jane" not in Path("run/run.json").read_text()


def test_another_process_loads_a_plugin_from_its_code(here):
    run("methods", "--plugin", "peak.py")
    (plugin,) = find_plugins([METHODS["peakcam"]])
    forget_methods()
    Path("peak.py").unlink()
    received = load_plugin(Plugin("/elsewhere/peak.py", plugin.source))
    assert received.method_names == ("peakcam",)
    assert METHODS["peakcam"].__module__ == plugin.module_name
    assert METHODS["peakcam"](load_model("phantom"), "layer4").attribute(torch.zeros(1, 1, 64, 64)).shape[0] == 1


# Installed packages


def install(folder, name, code, value, monkeypatch):
    """What an installer leaves behind: a module and a dist-info folder with its entry points, on the path."""
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.py").write_text(code, encoding="utf-8")
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{METHOD_ENTRY_POINTS}]\n{name} = {value}\n")
    if str(folder) not in sys.path:
        monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(METHODS, "_pending_groups", [METHOD_ENTRY_POINTS])
    monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.mark.parametrize("value", ["peakpackage", "peakpackage:PeakCAM"])
def test_a_method_of_an_installed_package_is_known_in_python_and_listed(here, monkeypatch, value):
    install(here / "site", "peakpackage", PEAK, value, monkeypatch)
    assert METHODS.find("Peak-CAM").name == "peakcam"
    assert "peakcam" in run("methods").stdout


@pytest.mark.thorough  # test_every_command_knows_a_method_of_a_plugin asks the commands
def test_a_method_of_an_installed_package_is_known_to_every_command(here, monkeypatch):
    install(here / "site", "peakpackage", PEAK, "peakpackage", monkeypatch)
    run("explain", "images/0.png", "--methods", "peakcam", "-o", "why.png")
    run("batch", "images/[0-1].png", "-o", "run", "--methods", "peakcam")
    run("compare", "images/0.png", "--methods", "gradcam,peakcam", "-o", "c.png")
    run("choose", "images/[0-3].png", "--methods", "gradcam,peakcam", "--layers", "layer4", "--save", "c.toml")
    run("evaluate", "run", "-o", "e", "--metrics", "stability", "--model", "phantom")
    assert "plugins" not in json.loads(Path("run/run.json").read_text())["run_config"]


@pytest.mark.thorough  # asked above in this process
def test_a_new_process_knows_the_method_of_an_installed_package(here, monkeypatch):
    install(here / "site", "peakpackage", PEAK, "peakpackage", monkeypatch)
    source = Path(camscope.__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(source), str(here / "site")])}
    words = [sys.executable, "-m", "camscope", "methods", "Peak-CAM", "--json"]
    told = subprocess.run(words, capture_output=True, text=True, env=environment, check=True)
    assert json.loads(told.stdout)["methods"][0]["settings"]["factor"] == 1.0
    assert "executed" not in told.stderr


BROKEN = {
    "an import": ("import no_such_package_anywhere", "ModuleNotFoundError: No module named 'no_such_package_anywhere'"),
    "a taken name": (PEAK.replace('"peakcam"', '"Grad_CAM"'), "already refers to 'gradcam'"),
    "an exit": ("raise SystemExit(3)", "SystemExit: 3"),
    "a class that is not registered": ("class PeakCAM: ...", "PeakCAM is not registered; decorate it with @register"),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", BROKEN)
@pytest.mark.filterwarnings("always::camscope.errors.CamscopeWarning")
def test_a_package_that_fails_is_one_note_and_breaks_nothing(here, monkeypatch, kind):
    code, expected = BROKEN[kind]
    value = "brokenpackage:PeakCAM" if kind == "a class that is not registered" else "brokenpackage"
    install(here / "site", "brokenpackage", code, value, monkeypatch)
    install(here / "site", "peakpackage", PEAK, "peakpackage", monkeypatch)
    known = set(METHODS._entries)
    result = run("explain", "images/0.png", "--methods", "gradcam,peakcam", "-o", "why.png")
    notes = [line for line in result.stderr.splitlines() if "brokenpackage" in line]
    assert len(notes) == 1, result.stderr
    assert notes[0].startswith("note: the package brokenpackage registers no method")
    assert expected in notes[0]
    assert set(METHODS) == known | {"peakcam"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "brokenpackage" not in run("methods").stderr, "one warning is enough"


def test_in_python_a_package_that_fails_is_one_warning_at_the_line_of_the_user(here, monkeypatch):
    install(here / "site", "brokenpackage", "1 / 0", "brokenpackage", monkeypatch)
    with pytest.warns(CamscopeWarning, match="brokenpackage.*ZeroDivisionError") as caught:
        METHODS.find("gradcam")
    assert caught[0].filename == __file__
    METHODS.find("gradcam")


def test_entry_points_of_other_groups_are_not_imported(here, monkeypatch):
    install(here / "site", "brokenpackage", "1 / 0", "brokenpackage", monkeypatch)
    registry = Registry("method", None, "camscope.others")
    registry.load()
    with pytest.raises(InputError):
        registry.find("gradcam")
    monkeypatch.setattr(METHODS, "_pending_groups", [])
