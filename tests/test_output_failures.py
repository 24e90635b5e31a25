"""Every command and function that writes: one error with the path where nothing can be written, or where the path is none."""

import sys
from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner

from camscope import GradCAM, load_model
from camscope.cli import app
from camscope.errors import CamscopeError, OutputError
from camscope.phantom import draw_radiograph

pytest.importorskip("pyarrow")
pytest.importorskip("nibabel")
pytest.importorskip("pydantic")

from camscope import audit
from camscope.audit.demo_dataset_and_model import write_demo_study
from camscope.batch import BatchRun, run_batch
from camscope.medical import to_nifti


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    folder = tmp_path_factory.mktemp("study")
    (folder / "images").mkdir()
    for seed in range(2):
        Image.fromarray(draw_radiograph(seed).image).save(folder / "images" / f"{seed}.png")
    run_batch(GradCAM(load_model("phantom")), folder / "images", folder / "run")
    return folder


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return write_demo_study(tmp_path_factory.mktemp("audit"), 0.5, n_images=24)


# without the rights to write, also for root: a folder of the kernel, and one below a file
PLACES = [
    pytest.param("/proc/none", marks=pytest.mark.skipif(not Path("/proc/self").exists(), reason="there is no /proc")),
    pytest.param("/sys/none", marks=pytest.mark.skipif(not Path("/sys/kernel").exists(), reason="there is no /sys")),
    "file/none",
]


@pytest.fixture
def place(request, tmp_path):
    (tmp_path / "file").write_text("a file")
    return tmp_path / request.param


@pytest.mark.parametrize("place", PLACES, indirect=True)
@pytest.mark.parametrize(
    "arguments",
    [
        ["explain", "images/0.png", "--model", "phantom", "-o", "{}/a.png"],
        ["explain", "images/0.png", "--model", "phantom", "-o", "{}.npz"],
        ["explain", "images/0.png", "images/1.png", "--model", "phantom", "-o", "{}"],
        ["batch", "images", "--model", "phantom", "-o", "{}"],
        ["export", "run", "-o", "{}"],
        ["export", "run", "-o", "{}", "--format", "csv"],
        ["show", "run", "-o", "{}/page.html"],
        ["compare", "images/0.png", "--model", "phantom", "--methods", "gradcam,layercam", "-o", "{}/a.png"],
        ["demo", "-o", "{}", "--methods", "gradcam"],
    ],
)
@pytest.mark.one_in(2)
def test_a_command_that_cannot_write_is_one_error_with_the_path(study, place, monkeypatch, arguments):
    monkeypatch.chdir(study)
    result = CliRunner().invoke(app, [argument.format(place) for argument in arguments])
    text = result.output.replace("\n", "")
    assert result.exit_code in (1, 2), text
    assert isinstance(result.exception, SystemExit)
    assert "Traceback" not in text
    assert str(place if place.parent.is_dir() else place.parent) in text
    assert "choose another" in text or "is a file, not a folder" in text


def save_as(suffix):
    def save(study, config, path):
        GradCAM(load_model("phantom")).explain(study / "images" / "0.png").save(f"{path}.{suffix}")

    return save


WRITERS = {
    "png": save_as("png"),
    "npz": save_as("npz"),
    "json": save_as("json"),
    "run": lambda study, config, path: run_batch(GradCAM(load_model("phantom")), study / "images", path),
    "page": lambda study, config, path: BatchRun(study / "run").save_html(f"{path}.html"),
    "export": lambda study, config, path: BatchRun(study / "run").export(path),
    "table": lambda study, config, path: BatchRun(study / "run").export(path, "csv"),
    "nifti": lambda study, config, path: to_nifti(
        GradCAM(load_model("phantom")).explain(study / "images" / "0.png"), f"{path}.nii"
    ),
    "audit": lambda study, config, path: audit.run_audit(config, path),
}


@pytest.mark.parametrize("place", PLACES, indirect=True)
@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.one_in(2)
def test_a_function_that_cannot_write_is_one_error_with_the_path(study, config, place, name):
    with pytest.raises(OutputError) as raised:
        WRITERS[name](study, config, place)
    assert str(place if place.parent.is_dir() else place.parent) in str(raised.value)


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("character", ["\0", "\ud800"])
def test_a_character_that_no_path_has_is_one_error(study, config, tmp_path, name, character):
    with pytest.raises(OutputError, match="cannot be a path"):
        WRITERS[name](study, config, f"{tmp_path}/no_{character}_path/a")


@pytest.mark.parametrize("character", ["\0", "\ud800"])
def test_a_character_that_no_path_has_is_one_error_of_an_input_too(study, character):
    name = f"no_{character}_path"
    for read in (GradCAM(load_model("phantom")).explain, BatchRun, audit.Config.from_source):
        with pytest.raises(CamscopeError):
            read(name)
    for spec in (f"{name}.py:net", f"{name}:net", name, f"hf:{name}"):
        if sys.modules.get("transformers") or not spec.startswith("hf:"):
            with pytest.raises(CamscopeError):
                load_model(spec)
    with pytest.raises(CamscopeError):
        run_batch(GradCAM(load_model("phantom")), name, study / "other")
