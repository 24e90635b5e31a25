"""The command line as a person meets it: what it writes, what it says, and how it ends."""

import io
import json
import os
import shlex
import signal
import struct
import subprocess
import sys
import time
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import typer
from PIL import Image
from rich.console import Console
from typer.testing import CliRunner

from camscope.atomic_writes_and_folder_locks import slug
from camscope.cli import app, console_output, demo, load_model_and_methods
from camscope.cli.input_images_and_output_paths import build_file_stem, list_images
from camscope.cli.option_parsing import list_setting_types, parse_settings
from camscope.explainers import METHODS, GradCAM
from camscope.explanation import Explanation
from camscope.phantom import draw_radiograph
from tests.refusals import ATTENTION

SRC = Path(__file__).resolve().parents[2] / "src"
INFERNO_TOP = (252, 255, 164)
COMMANDS = ("demo", "explain", "compare", "layers", "features", "methods")

EXPLODING = """
from torch import nn

class Exploding(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x):
        raise RuntimeError("boom [red]in[/red]\\nthe forward")

def exploding():
    return Exploding()

def broken():
    raise KeyError("no such thing")

def plain():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))

PREPROCESSING = {"exploding": ((32, 32), (0.5,) * 3, (0.5,) * 3)}
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty folder to work in, with a picture of a nodule, and what the files in it are later compared with."""
    monkeypatch.chdir(tmp_path)
    Image.fromarray(draw_radiograph(7, "nodule").image).save("nodule.png")
    Path("model.py").write_text(EXPLODING)
    return tmp_path


def run(*words, code=0):
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    return result


def assert_refused(*words, code, saying):
    """The command ends with this code and one line of error, and leaves the folder as it was."""
    before = sorted(Path().rglob("*"))
    result = run(*words, code=code)
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, result.stderr
    assert saying in errors[0]
    assert sorted(Path().rglob("*")) == before
    return result


def written(folder="camscope-explain"):
    return sorted(path.name for path in Path(folder).iterdir())


def bomb(path):
    """A PNG of a few bytes whose header claims 60000 x 60000 pixels."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 60000, 60000, 8, 2, 0, 0, 0)
    data = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0")) + chunk(b"IEND", b"")
    Path(path).write_bytes(b"\x89PNG\r\n\x1a\n" + data)


# What each command does


@pytest.mark.slow
def test_demo_draws_explains_and_judges(here):
    result = run("demo", "-o", "d", "--methods", "gradcam,layercam")
    assert sorted(p.name for p in Path("d/images").iterdir()) == [
        "1-nodule.png",
        "2-effusion.png",
        "3-pneumothorax.png",
        "4-no-finding.png",
    ]
    figure = np.asarray(Image.open("d/demo.png"))
    assert figure.shape[0] > 4 * 256
    assert figure.shape[1] > 3 * 256
    for words in ("Grad-CAM", "LayerCAM", "energy", "hit", "d/demo.png", "all findings"):
        assert words in result.stdout
    assert_refused("demo", "-o", "d", code=1, saying="d/demo.png exists")
    run("demo", "-o", "d", "--methods", "gradcam", "--overwrite")


def test_the_two_numbers_of_the_demo_by_hand():
    heat = np.array([[1.0, 0.0], [-5.0, 3.0]])
    right, left = np.array([[False, False], [False, True]]), np.array([[True, False], [True, False]])
    assert demo.compute_hit_and_energy(heat, right) == (True, 0.75)
    assert demo.compute_hit_and_energy(heat, left) == (False, 0.25)  # negative values are no energy
    assert demo.compute_hit_and_energy(np.zeros((2, 2)), right) == (False, None)


def test_explain_says_and_writes_the_answer(here):
    result = run("explain", "nodule.png")
    assert written() == [build_file_stem(1, Path("nodule.png")) + ".png"]
    for words in ("nodule.png", "top", "1 nodule", "score", "probability", "layer4", "Grad-CAM", "ok", *written()):
        assert words in result.stdout


@pytest.mark.slow
def test_explain_says_which_net_answers_where_nobody_named_one(here):
    said = "note: model: phantom, the bundled model of synthetic radiographs; choose another with --model"
    assert said in run("explain", "nodule.png").stderr.splitlines()
    assert "note: model" not in run("explain", "nodule.png", "--model", "phantom", "-o", "named").stderr
    assert said in run("compare", "nodule.png", "--methods", "gradcam").stderr.splitlines()


def test_explain_says_what_is_odd_about_a_file(here):
    picture = Image.open("nodule.png")
    picture.save("moving.gif", save_all=True, append_images=[picture.rotate(90)])
    picture.save("named.jpg", format="PNG")
    found = run("explain", "moving.gif", "named.jpg").stdout
    assert "note: an animation or a stack: of 2 frames the first was read" in found
    assert "note: the file is called .jpg and is a PNG" in found


def test_the_hottest_pixel_that_is_written_lies_in_the_finding(here):
    mask = draw_radiograph(7, "nodule").mask
    run("explain", "nodule.png", "-t", "nodule", "-o", "x.png", "--alpha", "1")
    rgb = np.asarray(Image.open("x.png").convert("RGB"))
    top, left, side = _second_square(rgb)
    assert side == 3 * len(mask)  # each pixel is a square of nine
    hot = np.argwhere((rgb[top : top + side, left : left + side] == INFERNO_TOP).all(2)) // 3
    assert len(hot)
    assert all(mask[row, column] for row, column in hot)


def _second_square(rgb):
    """Top, left and side of the second picture in a figure of square ones: runs that are not the paper's white."""
    inked = [_runs((rgb[rgb.shape[0] // 2] != 255).any(1)), _runs((rgb[:, rgb.shape[1] // 3] != 255).any(1))]
    left, right = [(a, b) for a, b in inked[0] if b - a > 100][1]
    top, bottom = next((a, b) for a, b in inked[1] if b - a > 100)
    assert right - left == bottom - top
    return top, left, right - left


def _runs(flags):
    edges = np.flatnonzero(np.diff(np.concatenate([[0], flags, [0]])))
    return list(zip(edges[::2], edges[1::2], strict=True))


def test_several_methods_and_classes_give_one_figure_and_raw_files(here):
    run("explain", "nodule.png", "--methods", "gradcam,hirescam", "--targets", "effusion,1", "--format", "png,npz,json")
    stem = build_file_stem(1, Path("nodule.png"))
    tails = [f"-{m}-q{q}" for m in ("gradcam", "hirescam") for q in (1, 2)]
    raw = [f"{stem}{tail}.{kind}" for tail in tails for kind in ("json", "npz")]
    assert written() == sorted([f"{stem}.png", *raw])
    one = Explanation.load(f"camscope-explain/{stem}-hirescam-q1.npz")
    assert (one.method, one.label) == ("hirescam", "effusion")
    facts = json.loads(Path(f"camscope-explain/{stem}-gradcam-q2.json").read_text())
    assert (facts["method"], facts["target"]) == ("gradcam", 1)


@pytest.mark.slow
def test_the_look_changes_the_picture(here):
    looks = {"plain": [], "alpha": ["--alpha", "0.2"], "map": ["--colormap", "viridis"]}
    looks |= {"contour": ["--contour", "0.5"], "boxes": ["--boxes", "0.5"]}
    for name, words in looks.items():
        run("explain", "nodule.png", "-o", f"{name}.png", *words)
    assert len({Path(f"{name}.png").read_bytes() for name in looks}) == len(looks)


def test_layer_method_settings_and_preprocessing_reach_the_method(here):
    run("explain", "nodule.png", "--layers", "layer1", "--set", "call_index=-1", "-o", "a.npz")
    one = Explanation.load("a.npz")
    assert (one.layer, one.grid, one.parameters["call_index"]) == ("layer1", (32, 32), -1)
    run("explain", "nodule.png", "-m", "model.py:plain", "--preprocess", "imagenet", "-o", "b.npz")
    assert Explanation.load("b.npz").input_size == (224, 224)


def test_folders_and_patterns_are_read_in_order(here):
    Path("in").mkdir()
    for name in ("b.png", "a.PNG", "c.txt", ".hidden.png"):
        Path("in", name).write_bytes(Path("nodule.png").read_bytes())
    result = run("explain", "in", "i?/*.png", "nodule.png")
    assert [name[:4] for name in written()] == ["0001", "0002", "0003"]
    assert [line for line in result.stdout.splitlines() if line.endswith(("png", "PNG")) and line[0] != " "] == [
        "in/a.PNG",
        "in/b.png",
        "nodule.png",
    ]


@pytest.mark.slow
def test_layers_marks_candidates_and_the_default(here):
    lines = run("layers", "phantom").stdout.splitlines()
    (default,) = [line for line in lines if line.lstrip().startswith("★")]
    assert " layer4 " in default
    marked = [line.split()[1] for line in lines if line.startswith((" ●", "●")) and "×" in line]
    assert {"conv1", "layer1", "layer4.0"} <= set(marked)
    assert not {"avgpool", "fc"} & set(marked)
    everything = run("layers", "phantom", "--all").stdout
    assert "layer4.0.conv2" in everything
    assert "layer4.0.conv2" not in "\n".join(lines)
    assert "1×1×64×96" in run("layers", "phantom", "--size", "64x96").stdout
    assert "1×3×224×224" in run("layers", "model.py:plain").stdout


def test_features_draws_the_channels(here):
    result = run("features", "nodule.png", "--layer", "layer2", "--limit", "4", "-o", "f.png")
    assert "4 of 32 channels" in result.stdout
    four = np.asarray(Image.open("f.png"))
    run("features", "nodule.png", "--layer", "layer2", "--limit", "16", "-o", "g.png")
    assert np.asarray(Image.open("g.png")).size > 3 * four.size
    assert_refused("features", "nodule.png", "--layer", "layer2", "-o", "f.png", code=1, saying="f.png exists")
    assert_refused("features", "nodule.png", "--layer", "layer9", code=2, saying="nearest names")
    assert_refused("features", "none.png", "--layer", "layer2", code=1, saying="no such file")


def test_methods_lists_one_that_a_script_registered(monkeypatch):
    from camscope.explainers import METHODS, GradCAM

    for name, module in (("mine", "__main__"), ("theirs", "their.package")):
        own = type(
            "Mine",
            (GradCAM,),
            {"name": name, "title": f"Own {name}", "__doc__": "Their own map.", "__module__": module},
        )
        monkeypatch.setitem(METHODS, name, own)
    lines = run("methods").stdout.splitlines()
    heading = next(n for n, line in enumerate(lines) if "registered by your own code" in line)
    assert [line.split()[0] for line in lines[heading + 1 :] if "Their own map." in line] == ["mine", "theirs"]


def test_the_page_of_a_method_says_what_its_settings_mean():
    text = run("methods", "finercam").stdout
    assert "Weight of the mean of the similar classes" in " ".join(text.replace("│", " ").split())
    assert ">>>" not in text
    assert "Args:" not in text


def test_methods_lists_every_one():
    text = run("methods").stdout
    for name, method in METHODS.items():
        assert name in text
        assert method.paper in text


@pytest.mark.parametrize("width", [100, 160])
def test_methods_fit_into_a_terminal_and_controls_stand_apart(width, monkeypatch):
    monkeypatch.setattr(console_output, "MIN_WIDTH_WITHOUT_TERMINAL", width)
    monkeypatch.setenv("COLUMNS", str(width))
    lines = run("methods").stdout.splitlines()
    assert max(map(len, lines)) <= width
    heading = next(i for i, line in enumerate(lines) if "controls:" in line)
    places = {line.split()[0]: i for i, line in enumerate(lines) if line[1:2].strip()}
    for name, method in METHODS.items():
        assert (places[name] > heading) == method.control, name
        assert any(method.paper in line for line in lines), method.paper


def test_a_method_that_takes_several_layers_is_listed_among_those_that_take_one():
    text = run("methods").stdout
    assert text.index("of one layer, or several") < text.index(" refinecam ") < text.index(" whole network ")
    assert text.index(" whole network ") < text.index(" fullgrad ")


def test_the_methods_of_a_group_are_listed_from_the_simple_to_the_costly():
    names = [line.split()[0] for line in run("methods").stdout.splitlines() if line[1:2].strip()]
    layered = [name for name in names if name in METHODS]
    layered = layered[: min(map(layered.index, ATTENTION))]
    passes = [(METHODS[name].backward_passes, METHODS[name].forward_passes) for name in layered]
    known = [all(map(str.isdecimal, each)) for each in passes]
    assert known == sorted(known, reverse=True)
    assert any(known)
    assert not all(known)
    assert layered.index("gradcam") < 6
    assert layered.index("gradcam") < min(map(layered.index, ("gradcam++", "bagcam", "finercam", "refinecam")))
    words = [name for name, plain in zip(layered, known, strict=True) if not plain]
    assert words.index("scorecam") < words.index("sscam")
    assert [name for name in load_model_and_methods.parse_methods("all") if name in layered] == layered


def test_methods_that_read_attention_are_a_family():
    text = run("methods").stdout
    assert text.index("of one layer, or several") < text.index("attention of transformers")
    for name in ATTENTION:
        assert text.index("attention of transformers") < text.index(f" {name} ") < text.index(" whole network ")


@pytest.mark.slow
def test_the_examples_in_the_helps_work(here):
    for command in COMMANDS:
        text = run(command, "--help").stdout
        (line,) = [line for line in text.splitlines() if "Example:" in line]
        words = shlex.split(line.partition("Example:")[2])
        assert words[:2] == ["camscope", command]
        run(*words[1:])


# What goes wrong


@pytest.mark.parametrize(
    ("words", "saying"),
    [
        (["--target", "99"], "class 99 is out of range"),
        (["--target=-1"], "class -1 is negative"),
        (["--target", "nodul"], "nearest names: 'nodule'"),
        (["--target", "nodule,effusion"], "for several classes pass --targets"),
        (["--layers", "layer9"], "no layer 'layer9'"),
        (["--layers", "fc"], "fc"),
        (["--methods", "gradcma"], "nearest names: gradcam"),
        (["--model", "nosuchnet"], "no model 'nosuchnet'"),
        (["--model", "model.py:nothing"], "no function 'nothing'"),
        (["--model", "model.py:broken"], "KeyError"),
        (
            ["--model", "model.py:plain"],
            "known for nodule.png; pass --preprocess imagenet, or define PREPROCESSING in the",
        ),
        (
            ["--model", "model.py:plain", "--preprocess", "imagenet", "-t", "zebra"],
            "define CATEGORIES in the model's file, or pass an index",
        ),
        (
            ["--model", "model.py:plain", "--preprocess", "imagenet", "-t", "3,5"],
            "or pass an index; for several classes pass --targets",
        ),
        (["--weights", "model.py"], "model.py"),
        (["--weights", "none.pt"], "no such file"),
        (["--preprocess", "imagnet"], "imagnet"),
        (["--colormap", "pink"], "choose from auto, inferno"),
        (["--alpha", "2"], "--alpha"),
        (["--contour", "0.5,x"], "expected levels"),
        (["--device", "nowhere"], "--device"),
        (["--set", "speed=3"], "known: mode, on_nonfinite"),
        (["--set", "call_index=last"], "expected int or none"),
        (["--set", "call"], "not name=value"),
        (["--set", "reshape=tokens"], "set it in Python"),
        (["--set", "class_names=a,b"], "set it in Python"),
        (["--set", "layer=layer1"], "has its own option: --layers"),
        (["--methods", "occlusion", "--set", "window=12,x"], "window='x': expected int"),
        (["--format", "bmp"], "expected some of png"),
        (["--targets", "1", "--target", "1"], "not both"),
        (["-o", "x.bmp"], "cannot write .bmp"),
        (["-o", "model.py/"], "is a file"),
        (["-o", "model.py/maps/today"], "model.py is a file, not a folder"),
        (["-o", "model.py/map.png"], "model.py is a file, not a folder"),
        (["-o", "x.npz", "--targets", "0,1"], "holds one map"),
        (["-o", "x.png", "--format", "npz"], "sets the format already"),
        (["-o", "x.png", "model.py"], "one file for 2 images"),
        (["no/images/*.png"], "no image for the pattern"),
        (["--nosuch"], "No such option"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_use_is_one_line_and_2(here, words, saying):
    assert_refused("explain", "nodule.png", *words, code=2, saying=saying)


def test_wrong_use_of_the_rest(here):
    assert_refused("nosuch", code=2, saying="No such command 'nosuch'")
    assert_refused("explain", code=2, saying="Missing argument")
    assert_refused("layers", "nosuchnet", code=2, saying="nearest names")
    missing = assert_refused("explain", "nodule.png", "--model", "nope.py:net", code=2, saying="no file nope.py")
    assert "executed" not in missing.stderr
    assert_refused(
        "compare", "nodule.png", "-o", "model.py/figure.png", code=2, saying="model.py is a file, not a folder"
    )
    assert_refused("layers", "--size", "big", code=2, saying="expected N or HxW")
    assert_refused("demo", "--count", "2", code=2, saying="--count")
    Path("empty").mkdir()
    assert_refused("explain", "empty", code=2, saying="no image in the folder")


def test_a_missing_extra_says_what_to_install(here, monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    assert_refused("explain", "nodule.png", "--model", "timm:resnet18", code=2, saying='pip install "camscope[hub]"')


@pytest.mark.parametrize(("kind", "package"), [("nifti", "nibabel"), ("sc", "highdicom"), ("pmap", "pydicom")])
def test_what_an_export_needs_is_there_before_anything_is_drawn(here, monkeypatch, kind, package):
    monkeypatch.setitem(sys.modules, package, None)
    words = ("--export", kind, "--profile", "clinical", "-o", "out")
    assert_refused("explain", "nodule.png", *words, code=2, saying=f"{package} is not installed; run: pip install")


def _bad(name):
    whole = Path("nodule.png").read_bytes()
    makers = {
        "truncated.png": lambda path: path.write_bytes(whole[: len(whole) // 2]),
        "text.jpg": lambda path: path.write_text("this is no picture\n"),
        "empty.png": lambda path: path.write_bytes(b""),
        "bomb.png": bomb,
        "folder.png": lambda path: path.mkdir(),
        "absent.png": lambda path: None,
    }
    makers[name](Path(name))
    return name


@pytest.mark.parametrize(
    ("name", "saying"),
    [
        ("truncated.png", "damaged"),
        ("text.jpg", "not an image"),
        ("empty.png", "empty"),
        ("bomb.png", "3600000000 pixels"),
        ("absent.png", "no such file"),
    ],
)
def test_a_bad_image_is_one_line_and_1(here, name, saying):
    result = assert_refused("explain", _bad(name), code=1, saying=saying)
    assert name in result.stderr


def test_the_good_images_go_on(here):
    names = [_bad(name) for name in ("truncated.png", "text.jpg", "bomb.png")]
    result = run("explain", names[0], "nodule.png", *names[1:], code=1)
    assert [name[:4] for name in written()] == ["0002"]
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert [name in line for name, line in zip(names, errors, strict=True)] == [True] * 3
    assert "3 of 4 images failed" in result.stderr


def test_a_model_that_raises_is_one_line_and_1(here):
    result = assert_refused(
        "explain", "nodule.png", "-m", "model.py:exploding", code=1, saying="RuntimeError: boom [red]in[/red]"
    )
    assert "note: model.py is executed as code" in result.stderr
    shown = CliRunner().invoke(app, ["explain", "nodule.png", "-m", "model.py:exploding", "--debug"])
    assert shown.exit_code == 1
    assert "Traceback" in shown.stderr
    assert_refused("layers", "model.py:exploding", code=1, saying="run again with --debug")


def test_nothing_is_overwritten_unless_asked(here):
    run("explain", "nodule.png", "--format", "png,json", "-t", "1")
    before = {path: path.read_bytes() for path in Path("camscope-explain").iterdir()}
    assert_refused("explain", "nodule.png", "--format", "json", "-t", "0", code=1, saying="exists; pass --overwrite")
    assert {path: path.read_bytes() for path in before} == before
    run("explain", "nodule.png", "--format", "json", "-t", "0", "--overwrite")
    assert [path.suffix for path in before if path.read_bytes() != before[path]] == [".json"]


def test_neither_the_image_nor_what_a_link_points_to_is_overwritten(here):
    assert_refused("explain", "nodule.png", "-o", "nodule.png", "--overwrite", code=1, saying="is the input image")
    Path("link.png").symlink_to("elsewhere.png")
    assert_refused("explain", "nodule.png", "-o", "link.png", code=1, saying="link.png exists")
    run("explain", "nodule.png", "-o", "link.png", "--overwrite")
    assert not Path("link.png").is_symlink()
    assert not Path("elsewhere.png").exists()


def test_warnings_are_notes(here):
    """An exploded weight file: a net of zeros has no evidence for anything."""
    import torch

    from camscope.phantom import load_phantom_model

    torch.save({k: torch.zeros_like(v) for k, v in load_phantom_model().state_dict().items()}, "zeros.pt")
    result = run("explain", "nodule.png", "--weights", "zeros.pt")
    assert "note: Grad-CAM: " in result.stdout
    assert "zero gradient" in result.stdout
    assert "Warning" not in result.output


def test_names_from_outside_are_shown_as_they_are_and_steer_nothing(here):
    name = "[bold]:cat:\x1b[31m.png"
    Path(name).write_bytes(Path("nodule.png").read_bytes())
    result = run("explain", name)
    assert "[bold]:cat:\N{REPLACEMENT CHARACTER}[31m.png" in result.stdout
    assert "\x1b" not in result.output
    assert written()[0].endswith("-bold-cat-31m.png")


@pytest.mark.parametrize("charset", ["ascii", "cp1252", "cp437", "utf-8"])
@pytest.mark.parametrize(
    "words", [["methods"], ["layers", "phantom"], ["--help"], ["explain", "nodule ✓….png"]], ids=" ".join
)
@pytest.mark.one_in(5)
def test_every_encoding_of_the_terminal_can_be_printed_to(here, words, charset):
    Path("nodule ✓….png").write_bytes(Path("nodule.png").read_bytes())
    result = CliRunner(charset=charset).invoke(app, words)
    assert result.exit_code == 0, result.output
    words = result.stdout_bytes.decode(charset)
    assert "\\u" not in words
    if "nodule" in words:
        assert ("nodule ✓…" if charset == "utf-8" else "nodule +") in words


@pytest.mark.slow
def test_help_is_printed_by_a_process_without_utf8():
    plain = {"PYTHONIOENCODING": "ascii", "LC_ALL": "C", "LANG": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-m", "camscope", "explain", "--help"]
    env = {**os.environ, "PYTHONPATH": str(SRC), **plain}
    done = subprocess.run(command, capture_output=True, env=env, timeout=600)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"cpu, cuda, cuda:1, mps ..." in b" ".join(done.stdout.replace(b"|", b" ").split())


def test_an_encoding_that_somebody_chose_to_lose_characters_in_stays(monkeypatch):
    for errors, expected in (("backslashreplace", b"\\u2713"), ("strict", b"+")):
        stream = io.BytesIO()
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(stream, "ascii", errors))
        console_output.install_ascii_fallback()
        sys.stdout.write("✓")
        sys.stdout.flush()
        assert stream.getvalue().strip() == expected


def test_a_spinner_shows_brackets_as_they_are(monkeypatch):
    console = Console(file=io.StringIO(), force_terminal=True, markup=False)
    monkeypatch.setattr(console_output, "stdout_console", lambda: console)
    with console_output.spinner("loading a[/b].py [bold]net"):
        pass
    assert "loading a[/b].py [bold]net" in console.file.getvalue()


# What is written where


def test_slugs_are_plain_and_never_empty():
    assert slug("Café au lait: 2/3") == "Cafe-au-lait-2-3"
    assert slug("../..") == "image"
    assert slug("猫") == "image"
    assert len(slug("x" * 300)) == 40


def test_an_image_is_meant_once(here):
    assert list_images(["nodule.png", "*.png", "."]) == [Path("nodule.png")]


def test_settings_are_read_by_the_signature():
    class Method:
        def __init__(self, model, n: int = 3, share: float = 0.5, fast: bool = False, kind: str = "a") -> None: ...

    assert set(list_setting_types(Method)) == {"n", "share", "fast", "kind"}
    chosen = parse_settings(["n=7", "share=1", "fast=yes", "kind=7"], {"m": Method})["m"]
    assert chosen == {"n": 7, "share": 1.0, "fast": True, "kind": "7"}
    assert [type(value) for value in chosen.values()] == [int, float, bool, str]
    assert parse_settings(["mode=as_is", "call_index=none"], {"gradcam": GradCAM}) == {
        "gradcam": {"mode": "as_is", "call_index": None}
    }


def test_settings_that_take_lists_are_said_with_commas():
    class Method:
        def __init__(
            self, several: Sequence[int] | int | None = None, shares: list[float] | tuple[float, ...] = (), n: int = 1
        ) -> None: ...

    def read(*pairs, methods=None):
        return parse_settings(pairs, methods or {"m": Method})["m"]

    assert read("several=12, 8", "shares=0.5") == {"several": [12, 8], "shares": [0.5]}
    assert read("several=12") == {"several": 12}
    assert read("several=none", "shares=1,0") == {"several": None, "shares": [1.0, 0.0]}
    assert read("baseline=cat.png,blur", methods={"m": METHODS["rise"]}) == {"baseline": ["cat.png", "blur"]}
    assert read("background=cat.png", methods={"m": METHODS["gradientshap"]}) == {"background": ["cat.png"]}
    with pytest.raises(typer.BadParameter, match=r"expected int or a Python object$"):
        read("segments=cells.png", methods={"m": METHODS["segmentablation"]})
    for pair in ("several=12,x", "shares=1,", "n=1,2"):
        with pytest.raises(typer.BadParameter, match=r"expected (int|float)$"):
            read(pair)


@pytest.mark.slow
def test_fills_and_backgrounds_are_files_and_words(here):
    Path("gray.png").write_bytes(Path("nodule.png").read_bytes())
    asked = "explain", "nodule.png", "-o", "a.json", "--overwrite", "--methods"
    run(*asked, "occlusion", "--set", "baseline=zero,blur", "--set", "window=64,32", "--set", "stride=64,32")
    assert json.loads(Path("a.json").read_text())["parameters"]["baseline"] == "['zero', 'blur']"
    run(*asked, "gradientshap", "--set", "background=gray.png,blur", "--set", "n_samples=2")
    assert "no background" not in Path("a.json").read_text()


# The process


def _process(*words, **options):
    environment = {**os.environ, "PYTHONPATH": str(SRC)}
    command = [sys.executable, *words]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600, **options)


@pytest.mark.slow
def test_help_is_light_and_the_module_runs():
    done = _process("-X", "importtime", "-m", "camscope", "explain", "--help")
    assert done.returncode == 0
    assert "Example:" in done.stdout
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
    assert "typer" in imported
    assert not imported & {"torch", "torchvision", "numpy", "cv2", "PIL"}


def test_version_is_the_packages_own():
    from camscope.version import __version__

    assert run("--version").stdout.strip() == f"camscope {__version__}"
    assert "explain" in run().stdout  # no command: the help


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="signals are POSIX's")
def test_an_interrupted_run_leaves_nothing_half_written(here):
    sleeping = "import time\nfrom torch import nn\ndef slow():\n    open('started', 'w').close()\n    time.sleep(600)\n"
    Path("slow.py").write_text(sleeping)
    environment = {**os.environ, "PYTHONPATH": str(SRC)}
    command = [sys.executable, "-m", "camscope", "explain", "nodule.png", "-m", "slow.py:slow"]
    with subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # which a shell's background jobs ignore
    ) as process:
        until = time.monotonic() + 300
        while not Path("started").exists() and time.monotonic() < until:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=300)
    assert process.returncode == 130
    assert errors.splitlines()[-1] == "error: interrupted"
    assert not Path("camscope-explain").exists()
