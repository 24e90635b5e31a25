"""`camscope compare`, and `camscope explain` with many methods: shared passes, one word about what is in the way."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from camscope.cli import app, load_model_and_methods
from camscope.cli.input_images_and_output_paths import build_file_stem
from camscope.errors import LayerError
from camscope.explainers import METHODS, BaseCAM
from camscope.explanation import Explanation
from camscope.phantom import draw_radiograph

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
COUNTED = """
import torch
from torch import nn

def note(letter):
    with open("passes", "a") as file:
        file.write(letter)

class Counted(nn.Module):
    def __init__(self):
        super().__init__()
        self.features, self.head = nn.Sequential(nn.Conv2d(3, 4, 3, 2), nn.ReLU()), nn.Linear(4, 3)

    def forward(self, x):
        note("f")
        output = self.head(self.features(x).mean((2, 3)))
        if output.requires_grad:
            output.register_hook(lambda gradient: note("b"))
        return output

def counted():
    torch.manual_seed(1)
    return Counted()

PREPROCESSING = {"counted": ((32, 32), (0.5,) * 3, (0.5,) * 3)}
TARGET_LAYER = {"counted": "features"}
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Image.fromarray(draw_radiograph(7, "nodule").image).save("nodule.png")
    Image.fromarray(draw_radiograph(8, "effusion").image).save("effusion.png")
    Path("model.py").write_text(COUNTED)
    return tmp_path


@pytest.fixture
def only_methods():
    """Put these into the registry alone; at the end it is what it was, in its own order."""
    before = dict(METHODS)

    def put(methods):
        METHODS.clear()
        METHODS.update(methods)

    yield put
    put(before)


def run(*words, code=0):
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    return result


def errors(result):
    return [line for line in result.stderr.splitlines() if line.startswith("error: ")]


def passes():
    text = Path("passes").read_text()
    return text.count("f"), text.count("b")


def row(result, method, label=""):
    """The columns of a line of the table."""
    title = METHODS.replace_names_by_titles(method)
    (line,) = [line for line in result.stdout.splitlines() if line.split()[:1] == [title] and label in line]
    return line.split()


@pytest.mark.slow
def test_compare_says_the_numbers_what_is_one_and_where_the_figure_is(here):
    result = run("compare", "nodule.png", "--methods", "gradcam,hirescam,layercam", "--targets", "nodule,2")
    name = f"camscope-compare/{build_file_stem(1, Path('nodule.png'))}.png"
    assert f"figure  {name}" in result.stdout
    words = row(result, "hirescam", "1 nodule")
    assert words[1:4] == ["layer4", "1", "nodule"]
    assert words[5:8] == ["ok", "1", "1"]
    assert words[9] == "1.000"
    assert float(row(result, "layercam", "2 effusion")[9]) < 0.9
    (said,) = [line for line in result.stdout.splitlines() if line.startswith("same")]
    assert "Grad-CAM and HiResCAM are one map at layer4 for every class" in said
    figure = np.asarray(Image.open(name).convert("RGB"))
    assert figure.shape[1] > 4 * 256 > figure.shape[0] / 1.5
    (error,) = errors(run("compare", "nodule.png", code=1))
    assert f"{name} exists; pass --overwrite" in error
    run("compare", "nodule.png", "--overwrite")


@pytest.mark.slow
@pytest.mark.usefixtures("passes_of_maps_alone")
def test_methods_and_classes_cost_one_forward_and_a_backward_a_class(here):
    for command, option in (("compare", "--methods"), ("explain", "--methods")):
        words = ["-m", "model.py:counted", option, "gradcam,layercam,hirescam,xgradcam", "-o", f"{command}.png"]
        run(command, "nodule.png", *words, "--targets", "0,1")
        assert passes() == (1, 2)
        Path("passes").unlink()
    run("compare", "nodule.png", *words[:-1], "two.png", "--layers", "features,features.0")
    assert passes() == (1, 1)


@pytest.mark.slow
def test_layers_settings_and_the_look_reach_the_comparison(here):
    result = run(
        "compare", "nodule.png", "--layers", "layer2,layer4", "--methods", "gradcam,scorecam", "--set", "n_channels=2"
    )
    assert [line.split()[1] for line in result.stdout.splitlines() if line.split()[:1] == ["Score-CAM"]] == [
        "layer2",
        "layer4",
    ]
    looks = {"plain": [], "alpha": ["--alpha", "0.2"], "map": ["--colormap", "viridis"], "columns": ["--columns", "1"]}
    looks["shared"] = ["--shared-scale"]
    for name, words in looks.items():
        run("compare", "nodule.png", "-o", f"{name}.png", "--methods", "gradcam", "--targets", "1,2", *words)
    assert len({Path(f"{name}.png").read_bytes() for name in looks}) == len(looks)


@pytest.mark.slow
def test_a_method_of_several_layers_takes_them_at_once(here):
    result = run("compare", "nodule.png", "--layers", "layer2,layer4", "--methods", "gradcam,refinecam")
    lines = [line for line in result.stdout.splitlines() if line.split()[:1] == ["RefineCAM"]]
    assert len(lines) == 1
    assert "layer2 + layer4" in lines[0]
    run("explain", "nodule.png", "--layers", "layer2,layer4", "--methods", "refinecam", "-o", "both.npz")
    assert Explanation.load("both.npz").layer == "layer2 + layer4"


@pytest.mark.slow
def test_a_layer_is_of_those_methods_that_have_one_to_choose(here, only_methods):
    only_methods({name: METHODS[name] for name in ("gradcam", "fullgrad")})
    for methods in ("gradcam,fullgrad", "all"):
        result = run("explain", "nodule.png", "--layers", "layer3", "--overwrite", "--methods", methods)
        assert "layer3" in row(result, "gradcam")
        assert "layer3" not in row(result, "fullgrad")


def test_a_layer_that_nobody_could_look_at_is_refused_before_the_model_is_loaded(here, monkeypatch):
    (error,) = errors(run("explain", "nodule.png", "--layers", "nope", "--methods", "gradcam,fullgrad", code=2))
    assert "no layer 'nope'" in error
    monkeypatch.setattr(load_model_and_methods, "load_model_on_device", lambda *_: pytest.fail("the model is loaded"))
    for command in ("explain", "compare"):
        (error,) = errors(run(command, "nodule.png", "--layers", "layer4", "--methods", "fullgrad,center", code=2))
        assert "fullgrad and center have no layer setting" in error
    (error,) = errors(
        run("explain", "nodule.png", "--layers", "layer3,layer4", "--methods", "refinecam,gradcam", code=2)
    )
    assert "gradcam takes one layer, but 2 are named; to compare layers use camscope compare" in error


@pytest.mark.slow
def test_the_demo_of_all_methods_leaves_out_what_has_no_answer(here, only_methods):
    only_methods({name: METHODS[name] for name in ("rollout", "gradcam", "layercam")})
    result = run("demo", "--methods", "all", "-o", "drawn")
    assert "LayerCAM" in result.stdout
    assert "rollout" not in result.stdout
    assert "no self-attention" in errors(run("demo", "--methods", "rollout", "-o", "none", code=2))[0]


@pytest.mark.slow
def test_all_leaves_out_what_has_no_answer_and_a_name_does_not(here, only_methods):
    class Unsuited(BaseCAM):
        name, title, paper = "unsuited", "Unsuited", "arXiv:0000.00000"

        def weights(self, activation, gradient):
            raise LayerError("no linear head")

    kept = {name: METHODS[name] for name in ("gradcam", "layercam")}
    only_methods({**kept, "unsuited": Unsuited})
    result = run("compare", "nodule.png", "--methods", "all")
    assert "note    Unsuited is left out: no linear head" in result.stdout
    assert row(result, "layercam")[5] == "ok"
    assert "no linear head" in errors(run("compare", "nodule.png", "-o", "b.png", "--methods", "unsuited", code=2))[0]
    result = run("explain", "nodule.png", "--methods", "all", "--format", "png,npz")
    assert "note: Unsuited is left out" in result.stdout
    stem = build_file_stem(1, Path("nodule.png"))
    written = sorted(path.name for path in Path("camscope-explain").iterdir())
    assert written == [f"{stem}-gradcam.npz", f"{stem}-layercam.npz", f"{stem}.png"]


@pytest.mark.parametrize(
    ("words", "code", "saying"),
    [
        (["none.png"], 1, "none.png: there is no such file"),
        (["nodule.png", "-o", "nodule.png", "--overwrite"], 1, "is the input image"),
        (["model.py"], 1, "not an image"),
        (["nodule.png", "--methods", "gradcma"], 2, "nearest names: gradcam"),
        (["nodule.png", "--layers", "layer9"], 2, "no layer 'layer9'"),
        (["nodule.png", "--layers", ","], 2, "no layer is named"),
        (["nodule.png", "--methods", ""], 2, "no method is named"),
        (["nodule.png", "--methods", "center", "--layers", "layer4"], 2, "center has no layer setting"),
        (["nodule.png", "--targets", "9"], 2, "class 9 is out of range"),
        pytest.param(
            *(["nodule.png", "--methods", "all", "--targets", "9"], 2, "class 9 is out of range"),
            marks=pytest.mark.thorough,  # 2 seconds; one method is asked above
        ),
        (["nodule.png", "--colormap", "pink"], 2, "choose from auto, inferno"),
        (["nodule.png", "-o", "x.gif"], 2, "expected a file ending in png"),
        (["nodule.png", "--set", "speed=3"], 2, "known: mode"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_use_and_bad_images_are_one_line(here, words, code, saying):
    before = sorted(Path().rglob("*"))
    (error,) = errors(run("compare", *words, code=code))
    assert saying in error
    assert sorted(Path().rglob("*")) == before


@pytest.mark.parametrize("words", [["explain"], ["compare"], ["features", "-l", "layer2"]], ids=lambda words: words[0])
def test_an_image_that_is_not_there_is_noticed_before_the_model_is_loaded(here, monkeypatch, words):
    monkeypatch.setattr(load_model_and_methods, "load_model_on_device", lambda *_: pytest.fail("the model is loaded"))
    (error,) = errors(run(words[0], "none.png", *words[1:], code=1))
    assert "none.png: there is no such file" in error


@pytest.mark.slow
def test_a_rerun_says_once_what_is_there_already_and_goes_on_with_the_rest(here):
    run("explain", "nodule.png", "effusion.png")
    before = {path: path.read_bytes() for path in Path("camscope-explain").iterdir()}
    Image.fromarray(draw_radiograph(9, "nodule").image).save("new.png")
    result = run("explain", "nodule.png", "effusion.png", "new.png", "none.png", code=1)
    assert errors(result) == [
        "error: none.png: there is no such file",
        f"error: 2 images have output already, such as {min(before)}; pass --overwrite, or another -o",
    ]
    assert result.stderr.splitlines()[-1] == "1 of 4 images failed, 2 are unchanged, 1 are explained"
    assert {path: path.read_bytes() for path in before} == before
    assert len(list(Path("camscope-explain").iterdir())) == 3


@pytest.mark.slow
def test_classes_of_one_figure_share_their_scale_when_asked(here):
    for name, words in {"own.png": [], "shared.png": ["--shared-scale"]}.items():
        run("explain", "nodule.png", "--targets", "nodule,effusion", "--alpha", "1", "-o", name, *words)
    own, shared = (np.asarray(Image.open(name)) for name in ("own.png", "shared.png"))
    assert own.shape[0] == shared.shape[0]
    hot = [(picture == (252, 255, 164)).all(2).sum() for picture in (own, shared)]
    assert hot[0] > hot[1] > 0  # the weaker class does not reach the top color any more


@pytest.mark.skipif(not DATA.exists(), reason="../shared/data is not here")
def test_trained_weights_of_ones_own_and_a_photograph(here):
    photo = min((DATA / "photos" / "images").iterdir())
    words = ["-m", f"{DATA / 'models.py'}:resnet18", "--methods", "gradcam,hirescam,layercam", "-o", "why.jpg"]
    result = run("compare", photo, *words, "--layers", "layer3,layer4")
    assert "Grad-CAM and HiResCAM are one map at layer4" in result.stdout
    assert np.asarray(Image.open("why.jpg")).shape[0] > 2 * 256
