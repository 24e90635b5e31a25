"""Models that have only scores: functions, TorchScript and ONNX files have the maps of the same network as a module."""

import copy
import json
import pickle
from contextlib import suppress
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from typer.testing import CliRunner

from camscope import METHODS, Augmented, Fused, Preprocess, compare, load_model
from camscope.batch import BatchRun, run_batch
from camscope.cli import app
from camscope.errors import CamscopeWarning, InputError, MissingExtraError, ModelError, WeightsError
from camscope.evaluation import evaluate
from camscope.hooks.find_layers import unwrap
from camscope.hooks.wrap_black_box_function_as_module import ScoreFunction
from camscope.loaded_model_metadata_and_weight_digest import compute_model_digest
from camscope.metrics import randomize_weights
from camscope.metrics.model_scorer import scoring_scope
from camscope.models import redact_file_names
from camscope.models.onnx_file import OnnxNetwork
from camscope.targets import Box
from tests.onnx_files import node, value_info, write, write_network
from tests.untouched import untouched

pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("default::camscope.errors.CamscopeWarning"),
]
SIZE = (3, 24, 32)
SETTINGS = {
    "rise": {"n_samples": 64},
    "occlusion": {"window": 8, "stride": 8},
    "segmentablation": {"segments": lambda x: torch.arange(24).view(24, 1).expand(24, 32) // 6},
    "sobol": {"n_samples": 4, "grid_size": 3},
    "hsic": {"n_samples": 64, "grid_size": 3},
    "lime": {"n_samples": 40, "grid_size": 3},
    "kernelshap": {"n_samples": 40, "grid_size": 3},
    "center": {},
    "edges": {},
}
METRICS = ["deletion", "insertion", "maxsensitivity"]
FORMS = ("traced", "scripted", "frozen", "array", "lists", "tensor", "object", "onnx", "onnx of a fixed batch")


def network():
    torch.manual_seed(3)
    layers = [nn.Conv2d(3, 6, 5, 2, 2), nn.ReLU(), nn.Conv2d(6, 8, 3, 2, 1), nn.ReLU()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3)).eval()
    nn.init.normal_(model[-1].weight)
    return model


def image():
    return torch.randn(1, *SIZE, generator=torch.Generator().manual_seed(2))


class Service:
    """An object with a method that answers, as a client of a server has one."""

    def __init__(self, model):
        self.model, self.sizes = model, []

    def __call__(self, batch):
        self.sizes.append(len(batch))
        return self.model(batch)


def in_form(form, folder):
    """The same network in another form."""
    model = network()
    if form.startswith("onnx"):
        pytest.importorskip("onnxruntime")
        path = write_network(folder / "net.onnx", model, SIZE, 2 if "fixed" in form else "n")
        return load_model(f"onnx:{path}")
    return {
        "traced": lambda: torch.jit.trace(model.requires_grad_(False), image()),
        "scripted": lambda: torch.jit.script(model),
        "frozen": lambda: torch.jit.freeze(torch.jit.script(model)),
        "array": lambda: lambda batch: model(batch).numpy(),
        "lists": lambda: lambda batch: model(batch).tolist(),
        "tensor": lambda: model.forward,
        "object": lambda: Service(model),
    }[form]()


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.one_in(2)
def test_maps_are_those_of_the_module(form, tmp_path):
    model, x = in_form(form, tmp_path), image()
    answer = network()(x).detach()
    for name, settings in SETTINGS.items():
        expected = METHODS[name](network(), **settings).attribute(x, 1)
        with untouched(nn.Identity(), x):
            found = METHODS[name](model, **settings).attribute(x, 1)
        assert (found - expected).abs().max() <= 1e-4 * expected.abs().max(), name
        assert expected.abs().max() > 0, name
    explanation = METHODS["occlusion"](model).explain(x[0])
    assert explanation.target == int(answer.argmax())
    assert explanation.probability == pytest.approx(float(answer.softmax(1).max()), rel=1e-4)


def test_torchscript_is_left_as_it_was():
    model = torch.jit.script(nn.Sequential(nn.Conv2d(3, 3, 3), nn.BatchNorm2d(3), nn.Flatten())).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    METHODS["occlusion"](model, window=8).attribute(image(), 1)
    assert all(part.training for part in model.modules())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("form", ["traced", "array", "onnx"])
def test_every_other_method_says_in_one_sentence_why_it_cannot(form, tmp_path):
    model = in_form(form, tmp_path)
    reason = {
        "traced": "is TorchScript: hooks cannot reach its layers",
        "array": "lambda> is known by its scores alone",
    }
    for name in METHODS.keys() - SETTINGS.keys() - {"drise"}:
        with pytest.raises(ModelError, match=reason.get(form, "the ONNX model is known by its scores alone")) as error:
            METHODS[name](model)
        assert "such as rise, occlusion" in str(error.value)
        assert "\n" not in str(error.value)


def test_wrappers_take_what_their_methods_take():
    model, x = network(), image()
    for build in (lambda net: Augmented(METHODS["occlusion"](net)), lambda net: Fused([METHODS["occlusion"](net)])):
        torch.testing.assert_close(build(model.forward).attribute(x, 1), build(model).attribute(x, 1))


def test_one_function_is_one_model():
    """However often it is passed: methods of one function are compared, and a bound method is itself again."""
    service = Service(network())
    first, second = METHODS["rise"](service.__call__, n_samples=4), METHODS["occlusion"](service.__call__)
    assert first.model is second.model is unwrap(service.__call__)
    assert METHODS["occlusion"](service).model is METHODS["sobol"](service).model
    found = first.explain_methods(image()[0], [first, second, "hsic"])
    assert [each.method for each in found] == ["rise", "occlusion", "hsic"]
    comparison = compare(service, image()[0], ["occlusion", "center"])
    assert len(comparison.entries) == 2
    with pytest.warns(CamscopeWarning, match=r"Grad-CAM is left out.*scores alone"):
        assert len(compare(service, image()[0], ["gradcam", "edges"], skip_unsupported=True).entries) == 1
    with pytest.raises(ModelError, match="scores alone"):
        compare(service, image()[0], ["gradcam", "layercam"])


def test_passes_are_no_larger_than_memory_allows():
    """What a function needs inside is unknown: sixteen times its input is assumed, of a quarter of the memory."""
    service = Service(network())
    METHODS["rise"](service, n_samples=3000).attribute(image(), 1)
    limit = 2**28 // (4 * 16 * 4 * image().numel())
    assert max(service.sizes) == limit
    METHODS["rise"](service, n_samples=8, batch_size=3).attribute(image(), 1)
    assert service.sizes[-3:] == [3, 3, 2]


def test_a_function_that_finds_boxes_is_explained_by_drise():
    boxes = np.array([[2.0, 2.0, 14.0, 14.0], [16.0, 4.0, 30.0, 20.0]])

    def detect(batch):
        bright = batch[:, 0, 4:12, 4:12].mean((1, 2)).sigmoid().numpy()
        return [{"boxes": boxes, "labels": [1, 2], "scores": np.array([score, 0.5])} for score in bright]

    class Module(nn.Module):
        def forward(self, x):
            score = x[:, 0, 4:12, 4:12].mean((1, 2)).sigmoid()
            rows = [torch.stack([one, torch.tensor(0.5)]) for one in score]
            labels, corners = torch.tensor([1, 2]), torch.tensor(boxes)
            return [{"boxes": corners, "labels": labels, "scores": row} for row in rows]

    target = Box(2, 2, 14, 14, label=1)
    maps = [METHODS["drise"](model, n_samples=40).attribute(image(), target) for model in (detect, Module())]
    torch.testing.assert_close(*maps, rtol=1e-4, atol=1e-6)
    assert maps[0].abs().max() > 0


def test_the_digest_tells_models_apart(tmp_path):
    models = [network(), torch.jit.freeze(torch.jit.script(network())), lambda batch: batch.mean((2, 3)), np.asarray]
    other = network()
    with torch.no_grad():
        other[0].bias += 1
    models += [torch.jit.freeze(torch.jit.script(other)), Service(network())]
    digests = [compute_model_digest(unwrap(model)) for model in models]
    assert len(set(digests)) == len(models)
    assert digests[1] == compute_model_digest(torch.jit.freeze(torch.jit.script(network())))


def test_what_is_no_function_is_rejected():
    for wrong, message in (
        (Service, "the model is the class Service itself: pass an instance"),
        ("resnet18", "the model is a str; expected a torch.nn.Module, or a function"),
    ):
        with pytest.raises(ModelError, match=message):
            METHODS["rise"](wrong)


def test_results_of_any_kind_become_tensors():
    results = {"a": [1.0, 2.0], "b": [np.ones(2), {"c": np.float32(3)}], "d": None, "e": [], "f": torch.ones(1)}
    found = ScoreFunction(lambda batch: results)(torch.ones(1, 1, 2, 2))
    assert found["a"].tolist() == [1, 2]
    assert found["b"][0].tolist() == [1, 1]
    assert found["b"][1]["c"] == 3
    assert (found["d"], found["e"]) == (None, [])
    copied = copy.deepcopy(unwrap(np.asarray))
    assert copied.function is np.asarray


def write_images(folder):
    folder.mkdir()
    for number in range(2):
        pixels = np.random.default_rng(number).integers(0, 255, (24, 32, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
    return folder


MODELS = """
import torch
from tests.models.test_models_without_gradients import network

def module():
    return network()

def function():
    return lambda batch, model=network(): model(batch).numpy()

def scripted():
    return torch.jit.script(network())

def number():
    return 3

PREPROCESSING = {name: ((24, 32), (0.5,) * 3, (0.2,) * 3) for name in ("module", "function", "scripted")}
"""


@pytest.mark.slow
def test_batch_and_evaluate_have_the_same_numbers(tmp_path):
    images = write_images(tmp_path / "images")
    (tmp_path / "nets.py").write_text(MODELS, encoding="utf-8")
    preprocess = Preprocess(resize=SIZE[1:], mean=(0.5,) * 3, std=(0.2,) * 3)
    specs = {form: f"{tmp_path / 'nets.py'}:{form}" for form in ("module", "function", "scripted")}
    if find_spec("onnxruntime") is not None:
        specs["onnx"] = f"onnx:{write_network(tmp_path / 'net.onnx', network(), SIZE)}"
    tables = {}
    for form, spec in specs.items():
        model = load_model(spec)
        run_batch(METHODS["occlusion"](model, window=8, stride=8, preprocess=preprocess), images, tmp_path / form)
        run = BatchRun(tmp_path / form)
        maps = np.stack([explanation.attribution for explanation in run])
        settings = {"model": model, "preprocess": preprocess, "n_steps": 4}
        rows = evaluate(run, tmp_path / f"{form} values", metrics=METRICS, **settings).table().to_pylist()
        tables[form] = maps, [(row["method"], row["metric"], row["value"]) for row in rows]
    for form in specs.keys() - {"module"}:
        np.testing.assert_allclose(tables[form][0], tables["module"][0], atol=1e-5)
        assert [row[:2] for row in tables[form][1]] == [row[:2] for row in tables["module"][1]]
        found, expected = ([row[2] for row in tables[name][1]] for name in (form, "module"))
        np.testing.assert_allclose(np.array(found, float), np.array(expected, float), rtol=1e-3, atol=1e-5)
        assert len(found) >= 4


def test_weights_that_are_out_of_reach_are_not_randomized():
    for model, message in (
        (torch.jit.script(network()), "is TorchScript: to randomize weights, pass the original"),
        (Service(network()), "has no parameters: there is nothing to randomize"),
    ):
        with pytest.raises(ModelError, match=message):
            randomize_weights(METHODS["occlusion"](model))


def test_metrics_and_scores_take_a_function():
    model, x = network(), image()
    with scoring_scope(model, x, 1) as of_module, scoring_scope(model.forward, x, 1) as of_function:
        torch.testing.assert_close(of_function(x / 2), of_module(x / 2))


@pytest.mark.slow
def test_the_command_line_runs_functions_and_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_images(tmp_path / "images")
    (tmp_path / "nets.py").write_text(MODELS, encoding="utf-8")
    words = ["explain", "images/0.png", "--methods", "occlusion", "--json", "--overwrite", "--model"]
    scores = []
    for form in ("module", "function", "scripted"):
        (found,) = json.loads(CliRunner().invoke(app, [*words, f"nets.py:{form}"]).stdout)["images"]
        scores.append(found["explanations"][0]["value_range"])
    np.testing.assert_allclose(scores[1:], [scores[0]] * 2, rtol=1e-4)
    failed = CliRunner().invoke(app, ["explain", "images/0.png", "--model", "nets.py:function"])
    assert failed.exit_code == 2
    assert "is known by its scores alone" in failed.stderr
    every = CliRunner().invoke(app, ["compare", "images/0.png", "--methods", "all", "--model", "nets.py:function"])
    assert every.exit_code == 0, every.output
    assert every.stderr.count("left out: ") == 1  # one line for all
    assert "gradcam" in every.stderr
    assert "returned a int; expected" in CliRunner().invoke(app, [*words, "nets.py:number"]).output


@pytest.fixture
def onnx_file(tmp_path):
    pytest.importorskip("onnxruntime")
    return write_network(tmp_path / "net.onnx", network(), SIZE)


def test_an_onnx_file_has_the_numbers_of_the_network(onnx_file):
    model, x = load_model(f"onnx:{onnx_file}"), torch.randn(5, *SIZE)
    torch.testing.assert_close(model(x), network()(x), rtol=1e-4, atol=1e-5)
    fixed = load_model(f"onnx:{write_network(onnx_file.with_name('two.onnx'), network(), SIZE, 2)}")
    torch.testing.assert_close(fixed(x), model(x))
    again = pickle.loads(pickle.dumps(METHODS["occlusion"](model)))
    torch.testing.assert_close(again.attribute(x[:1], 1), METHODS["occlusion"](model).attribute(x[:1], 1))
    assert compute_model_digest(model) != compute_model_digest(fixed)
    assert redact_file_names("onnx:ward_3/net.onnx") == "onnx"
    with pytest.raises(InputError, match=r"the input is \(1, 3, 8, 8\), but .*takes \(N,3,24,32\)"):
        METHODS["occlusion"](model).attribute(torch.rand(1, 3, 8, 8))


def test_several_inputs_and_outputs_of_an_onnx_file(tmp_path):
    pytest.importorskip("onnxruntime")
    nodes = [node("Add", ["image", "other"], "sum"), node("GlobalAveragePool", ["sum"], "mean")]
    nodes += [node("Flatten", ["mean"], "logits")]
    shapes = {"image": ["n", 3, 4, 4], "other": ["n", 3, 1, 1]}
    inputs = [value_info(name, shape) for name, shape in shapes.items()]
    outputs = [value_info("sum", ["n", 3, 4, 4]), value_info("logits", ["n", 3])]
    model = load_model(f"onnx:{write(tmp_path / 'two.onnx', nodes, [], inputs, outputs)}")
    x, other = torch.rand(2, 3, 4, 4), torch.rand(2, 3, 1, 1)
    found = model(x, other=other)
    torch.testing.assert_close(found["sum"], x + other)
    torch.testing.assert_close(found["logits"], (x + other).mean((2, 3)))
    with pytest.raises(InputError, match=r"also takes other: pass additional_forward_args=\{'other'"):
        METHODS["center"](model).explain(x[0], 1)
    explanation = METHODS["occlusion"](model, window=2).explain(x[0], 1, additional_forward_args={"other": other[:1]})
    assert explanation.score == pytest.approx(float((x + other).mean((2, 3))[0, 1]), rel=1e-5)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not an ONNX model that can be run"),
        (b"no protocol buffer", "is not an ONNX model that can be run"),
        (None, "is not an ONNX model that can be run"),  # the first half
    ],
)
def test_a_damaged_onnx_file_is_one_error(onnx_file, content, message):
    half = onnx_file.read_bytes()[: onnx_file.stat().st_size // 2]
    onnx_file.write_bytes(half if content is None else content)
    with pytest.raises(ModelError, match=message) as error:
        load_model(f"onnx:{onnx_file}")
    assert len(str(error.value)) < 500


def test_flipped_bytes_of_an_onnx_file_never_crash(onnx_file):
    whole, generator = onnx_file.read_bytes(), np.random.default_rng(0)
    for _ in range(40):
        damaged = bytearray(whole)
        for place in generator.integers(0, len(whole), 4):
            damaged[place] ^= int(generator.integers(1, 256))
        onnx_file.write_bytes(damaged)
        with suppress(ModelError):  # any other error fails the test
            load_model(f"onnx:{onnx_file}")


def test_other_faults_of_an_onnx_spec(onnx_file, tmp_path, monkeypatch):
    with pytest.raises(WeightsError, match="holds its own weights"):
        load_model(f"onnx:{onnx_file}", weights="random")
    for place in (tmp_path / "missing.onnx", tmp_path):
        with pytest.raises(ModelError, match=r"there is no file .*expected onnx:FILE.onnx"):
            load_model(f"onnx:{place}")
    flat = [value_info("numbers", ["n", 3])]
    path = write(tmp_path / "flat.onnx", [node("Relu", ["numbers"], "y")], [], flat, [value_info("y", ["n", 3])])
    with pytest.raises(ModelError, match=r"has no input of an image \(N,C,H,W\); its inputs: numbers tensor\(float\)"):
        load_model(f"onnx:{path}")
    monkeypatch.setattr("camscope.models.onnx_file.MAX_ONNX_BYTES", 10)
    with pytest.raises(ModelError, match=r"net\.onnx cannot be read"):
        load_model(f"onnx:{onnx_file}")


def test_without_onnx_runtime_the_error_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "onnxruntime", None)
    with pytest.raises(MissingExtraError, match="onnx"):
        OnnxNetwork(b"", "net.onnx")
