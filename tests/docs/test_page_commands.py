"""The commands of every page: their options exist, and they run, page by page, where bundled data are enough."""

import json
import re
import shlex
import shutil
import tomllib
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
import typer
from PIL import Image
from safetensors.torch import save_file
from typer.testing import CliRunner

import camscope.models
from camscope import load_model
from camscope.cli import app
from camscope.explainers import METHODS
from camscope.loaded_model_metadata_and_weight_digest import (
    LoadedModelMetadata,
    attach_loaded_model_metadata,
    get_loaded_model_metadata,
)
from camscope.phantom import draw_radiograph

pytest.importorskip("pyarrow")
nibabel = pytest.importorskip("nibabel")

ROOT = Path(__file__).resolve().parents[2]
DOCS = [page for page in sorted((ROOT / "docs").rglob("*.md")) if "_build" not in page.parts]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "benchmarks" / "README.md", *DOCS]
SCRIPTS = [ROOT / "Makefile", *sorted((ROOT / "examples").glob("*.sh"))]
NOT_EXECUTED = {  # a part of the command, and why it is only parsed
    "demo --audit": "trains two models in two minutes; tests/cli runs audits",
    "audit ": "a study and minutes; tests/cli/test_audit.py runs each command",
    "--attention --head ": "the stand-in is no transformer; tests/cli runs it with a ViT",
    "benchmark phantom ": "every method; tests/cli runs it with one",
    "mcp ": "a server that waits for a client; tests/integrations/test_mcp_over_stdio.py drives it",
    "--engine ray": "a cluster; tests/batch/test_ray_engine.py runs it",
    "evaluate --reader-study": "forms that readers fill in; tests/cli/test_reader_study.py runs it",
    "scan.dcm": "scans; tests/medical and tests/cli/test_scan_options.py run these options",
    "brain.nii.gz": "the same",
    "series/": "the same",
}
BEFORE = {"evaluate.md": ["camscope batch photos --model resnet50 -o maps"]}  # what a page expects to be there
EXIT_CODE = re.compile(r"#.*\bexits with code (\d)")
EXTRA = re.compile(r"""(?:\bcamscope|(?<=["' ])\.)\[([\w,\s-]+)\]""")


def commands_of_page(page):
    """The lines of blocks that begin with `camscope`."""
    for block in re.findall(r"^ *```\w*\n(.*?)^ *```", page.read_text("utf-8"), re.MULTILINE | re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            command = line.strip().removeprefix("$ ")
            if command.startswith("camscope ") and not command.startswith("camscope needs"):
                yield command


def inline_commands(page):
    """Commands in a sentence, which may leave out arguments."""
    prose = re.sub(r"^ *```.*?^ *```", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    return [" ".join(code.split()) for code in re.findall(r"`(camscope [a-z][^`]*)`", prose)]


@cache
def build_commands():
    """The commands of the app, built once: it takes 20 ms."""
    return typer.main.get_command(app)


def find_command(words):
    """The command of the app and the words behind its name."""
    command, parent = build_commands(), None
    while words and hasattr(command, "commands") and not words[0].startswith("-"):
        parent, (name, *words) = command, words
        assert name in parent.commands, f"there is no command {name!r}"
        command = parent.commands[name]
    return command, words


def check_options(text):
    """Raise an AssertionError if a command or one of its options does not exist."""
    command, words = find_command(shlex.split(text, comments=True)[1:])
    names = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    for word in words:
        name = word.partition("=")[0]
        if re.match(r"--?[a-zA-Z]", word):
            assert name in {*names, "--help", "-h"}, f"{text}: no option {name}"


def parse(text):
    """Parse a whole command: its options, its arguments, and the types of their values."""
    check_options(text)
    command, words = find_command(shlex.split(text, comments=True)[1:])
    command.make_context("camscope", list(words))


EVERY_COMMAND = [(page.relative_to(ROOT).as_posix(), text) for page in PAGES for text in commands_of_page(page)]


@pytest.mark.parametrize(("page", "text"), EVERY_COMMAND)
def test_a_command_of_a_page_is_valid(page, text):
    parse(text)


def test_commands_in_sentences_and_scripts_have_the_options_they_name():
    inline = [text for page in PAGES for text in inline_commands(page)]
    assert len(inline) > 20
    for text in inline:
        check_options(re.sub(r"[.…]{3}|…", "", text))
    for script in SCRIPTS:
        lines = script.read_text("utf-8").replace("\\\n", " ").splitlines()
        for line in lines:
            for text in re.findall(r"(?:^|[\s/])(camscope (?:batch|demo|explain|audit)\b[^|&>\]]*)", line):
                check_options(text.replace('"$@"', ""))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("camscope explian a.png", "no command"),
        ("camscope explain a.png --methodes gradcam", "no option --methodes"),
        ("camscope audit explain a", "no command"),
    ],
)
def test_a_wrong_command_is_found(text, expected):
    with pytest.raises(AssertionError, match=expected):
        parse(text)


@pytest.mark.parametrize("text", ["camscope explain", "camscope explain a.png --alpha 7", "camscope methods a b"])
def test_wrong_values_and_missing_arguments_are_found(text):
    with pytest.raises(Exception) as error:  # noqa: PT011 - the class of typer depends on its version
        parse(text)
    assert hasattr(error.value, "format_message")


# Execution


N_IMAGES = 2
STAND_IN_CLASSES = ("tabby", "space shuttle", "stethoscope", "nodule")
FACTORY = """
from camscope import load_model

PREPROCESSING = {"net": ((128, 128), (0.5,), (0.2,))}


def net():
    return load_model("phantom")
"""


@pytest.fixture
def stand_in_model(monkeypatch):
    """A small model in place of those that would be downloaded. It has their layers, and four of their classes."""
    load = camscope.models.load_model

    def load_stand_in(spec, *, weights=None, trust_code=False):
        if spec == "phantom" or ".py:" in spec:
            return load(spec, weights=weights)
        model = load("phantom")
        card = get_loaded_model_metadata(model)
        small = replace(card.preprocess, resize=(64, 64))  # of 128: a quarter of the cost
        attach_loaded_model_metadata(model, LoadedModelMetadata(spec, small, STAND_IN_CLASSES, card.layer))
        return model

    monkeypatch.setattr(camscope.models, "load_model", load_stand_in)


@pytest.fixture
def files(tmp_path, monkeypatch):
    """The files that the commands of pages name."""
    monkeypatch.chdir(tmp_path)
    Path("assets").mkdir()
    shutil.copy(ROOT / "assets" / "astronaut.jpg", "assets")
    annotations, images, rows = [], [], ["path,site,target"]
    for folder in ("photos", "images"):
        Path(folder).mkdir()
        for n in range(N_IMAGES):
            scan = draw_radiograph(n, 1 + n % 3)
            Image.fromarray(scan.image).convert("RGB").save(f"{folder}/{n}.png")
            if folder == "photos":
                lines, columns = np.nonzero(scan.mask)
                box = [int(v) for v in (columns.min(), lines.min(), np.ptp(columns) + 1, np.ptp(lines) + 1)]
                height, width = scan.mask.shape
                images.append({"id": n, "file_name": f"{n}.png", "height": height, "width": width})
                annotations.append({"id": n, "image_id": n, "category_id": 1, "bbox": box})
                rows.append(f"photos/{n}.png,{'AB'[n % 2]},{scan.name}")
    shutil.copy("photos/0.png", "photo.png")
    Image.open("photo.png").save("photo.jpg")
    facts = {"images": images, "annotations": annotations, "categories": [{"id": 1, "name": "finding"}]}
    Path("annotations.json").write_text(json.dumps(facts))
    Path("list.csv").write_text("\n".join(rows))
    Path("photos.csv").write_text("\n".join(["path,patient", *(f"photos/{n}.png,{n}" for n in range(N_IMAGES))]))
    films = [f"{folder}/{n}.png" for folder in ("photos", "images") for n in range(N_IMAGES)]
    lines = [f"{film},{('no finding', 'nodule')[n % 2]},{n}" for n, film in enumerate(films)]
    Path("films.csv").write_text("\n".join(["path,label,patient", *lines]))
    voxels = np.random.default_rng(0).random((24, 24, 16), np.float32)
    nibabel.save(nibabel.Nifti1Image(voxels, np.diag([2, 2, 3, 1])), "scan.nii.gz")
    for name in ("models.py", "mine.py"):
        Path(name).write_text(FACTORY)
    for name in ("checkpoint.safetensors", "net.safetensors"):
        save_file(load_model("phantom").state_dict(), name)
    page = (ROOT / "docs" / "how-to" / "write-a-method.md").read_text("utf-8")
    code = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)[0]
    Path("peak.py").write_text(code.partition("\n\ncam = ")[0], encoding="utf-8")
    yield
    METHODS.pop("peakcam", None)


def write_files_of_page(page):
    """Write the Python files that a page shows, and for models with a function `net` their checkpoint."""
    blocks = re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```", page.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    for name, code in blocks:
        Path(name).write_text(code, encoding="utf-8")
        if "def net()" in code:
            torch.save(load_model(f"{name}:net").state_dict(), "checkpoint.pt")


EXECUTED_PAGES = [page for page in PAGES if list(commands_of_page(page))]
SLOW_PAGES = {  # and the tests that run the same commands
    "choose": "test_method_selection",
    "evaluate": "test_json_output",
    "json": "test_json_output",
    "own-model": "test_cli, and test_page_code for the code of the page",
}
SLOW_COMMANDS = ("choose photos/ ",)  # test_method_selection chooses between two methods


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=pytest.mark.thorough if page.stem in SLOW_PAGES else ()) for page in EXECUTED_PAGES],
    ids=lambda page: page.relative_to(ROOT).as_posix(),
)
@pytest.mark.filterwarnings("default::camscope.errors.CamscopeWarning")
def test_the_commands_of_a_page_run_one_after_the_other(page, files, stand_in_model, pytestconfig):
    write_files_of_page(page)
    left_out = (*NOT_EXECUTED, *(() if pytestconfig.getoption("--thorough") else SLOW_COMMANDS))
    for text in [*BEFORE.get(page.name, ()), *commands_of_page(page)]:
        if any(part in text for part in left_out):
            continue
        expected = int(match[1]) if (match := EXIT_CODE.search(text)) else 0
        result = CliRunner().invoke(app, shlex.split(text, comments=True)[1:])
        if "matches the condition" in result.output:  # the condition is about other images
            continue
        assert result.exit_code == expected, f"{text}\n{result.output}\n{result.exception!r}"


def test_no_reason_to_leave_a_command_out_is_stale_and_most_commands_run():
    texts = [text for _, text in EVERY_COMMAND]
    for part in NOT_EXECUTED:
        assert any(part in text for text in texts), part
    executed = [text for text in texts if not any(part in text for part in NOT_EXECUTED)]
    assert len(executed) > len(texts) / 2
    assert all((ROOT / "docs").rglob(name) for name in BEFORE)


# Extras


def test_every_extra_that_a_page_or_a_message_names_exists():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = set(project["optional-dependencies"])
    files = [*PAGES, *SCRIPTS, ROOT / "CHANGELOG.md", *sorted((ROOT / "examples").glob("*.py"))]
    files += [
        *sorted((ROOT / "src").rglob("*.py")),
        *sorted((ROOT / ".github").rglob("*.yml")),
        ROOT / "pyproject.toml",
    ]
    named = {}
    for file in files:
        for group in EXTRA.findall(file.read_text("utf-8")):
            for name in group.split(","):
                named.setdefault(name.strip(), file.relative_to(ROOT).as_posix())
    assert {"batch", "audit", "metrics"} <= set(named)
    assert {name: file for name, file in named.items() if name not in extras} == {}


def test_the_tables_of_extras_name_extras_that_exist_and_every_extra_of_users():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = set(project["optional-dependencies"])
    for page in (ROOT / "README.md", ROOT / "docs" / "get-started" / "install.md"):
        table = page.read_text("utf-8").partition("| extra | adds |")[2].partition("\n\n")[0]
        named = set(
            re.findall(r"`([\w-]+)`", "\n".join(row.split("|")[1] for row in table.splitlines() if row.count("|") > 2))
        )
        assert named <= extras, named - extras
        assert {"batch", "metrics", "audit", "medical", "hub", "captum", "lrp", "segments"} <= named
