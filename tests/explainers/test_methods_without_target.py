"""Methods that need no target: they explain a model whatever its output holds, and say that no target was used."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torchvision.models.detection import fasterrcnn_mobilenet_v3_large_320_fpn
from typer.testing import CliRunner

from camscope import (
    FEM,
    KPCACAM,
    METHODS,
    Augmented,
    DeepFeatureFactorization,
    EigenCAM,
    Fused,
    GradCAM,
    compare,
    load_model,
)
from camscope.batch import BatchRun, run_batch
from camscope.cli import app
from camscope.errors import CamscopeWarning, TargetError
from camscope.explanation import Explanation
from tests.untouched import untouched

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("default::camscope.errors.CamscopeWarning")
SIZE = (3, 64, 96)
NO_TARGET = "no target was used: the map does not depend on the output, which has no class scores"
WITHOUT_TARGET = [name for name, method in METHODS.items() if not method.class_specific and name != "rollout"]


class Detector(nn.Module):
    """Two grids and a head for each, as YOLO has them; `answer` makes the output of the two results."""

    def __init__(self, answer=None):
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 5, 4, 2), nn.SiLU())
        self.middle = nn.Sequential(nn.Conv2d(8, 8, 3, 2, 1), nn.SiLU())
        self.deep = nn.Sequential(nn.Conv2d(8, 16, 3, 2, 1), nn.SiLU())
        self.heads = nn.ModuleList([nn.Conv2d(8, 7, 1), nn.Conv2d(16, 7, 1)])
        self.answer = answer or (lambda maps: (torch.cat([part.flatten(2) for part in maps], 2), maps))

    def forward(self, x):
        middle = self.middle(self.stem(x))
        return self.answer([self.heads[0](middle), self.heads[1](self.deep(middle))])


def inputs(samples=2):
    return torch.randn(samples, *SIZE, generator=torch.Generator().manual_seed(1))


def rows_of_boxes(maps):
    """As a detector returns them: a dict of another number of boxes for each sample."""
    flat = [part.flatten(1).T for part in maps[1]]
    return [{"boxes": rows[rows[:, 0] > 0, :4], "labels": rows.argmax(1)} for rows in flat]


OUTPUTS = {
    "nothing": lambda maps: None,
    "an empty list": lambda maps: [],
    "texts": lambda maps: ["a box"] * len(maps[0]),
    "integers": lambda maps: maps[1].argmax(1),
    "one number for all": lambda maps: {"loss": maps[0].mean(), "other": maps[1].mean()},
    "boxes of each sample": rows_of_boxes,
    "without a gradient": lambda maps: {"a": maps[0].detach(), "b": [maps[1].detach()]},
    "infinity": lambda maps: [maps[0] * torch.inf, maps[1]],
    "scores at every position": lambda maps: maps[1],
}


def first_singular_map(model, x):
    """Eigen-CAM (N,h,w) of the deep layer, by numpy, up to its sign."""
    with torch.no_grad():
        activation = model.deep(model.middle(model.stem(x))).double().numpy()
    maps = []
    for sample in activation:
        cells = sample.reshape(len(sample), -1).T
        maps.append((cells @ np.linalg.svd(cells)[2][0]).reshape(sample.shape[1:]))
    return np.stack(maps)


@pytest.mark.parametrize("kind", OUTPUTS)
def test_a_map_needs_no_class_scores(kind):
    model, x = Detector(OUTPUTS[kind]).eval(), inputs()
    with untouched(model, x):
        found = EigenCAM(model, "deep").attribute(x).numpy()
    expected = first_singular_map(model, x)
    expected *= np.sign((expected * found).sum((1, 2), keepdims=True))
    np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max())
    explanation = EigenCAM(model).explain(x[0])
    assert (explanation.label, explanation.target, explanation.status) == ("no target", None, "ok")
    assert NO_TARGET in explanation.notes
    assert np.isnan(explanation.score)
    assert explanation.probability is None
    assert explanation.caption == f"no target · Eigen-CAM · {explanation.layer}"


@pytest.mark.parametrize("answer", [None, OUTPUTS["scores at every position"]])
def test_the_layer_is_the_last_before_the_head(answer):
    assert EigenCAM(Detector(answer).eval()).explain(inputs()[0]).layer == "deep"
    inside = nn.Sequential(Detector(answer)).eval()  # a module that returns the output is no head if all is inside it
    assert EigenCAM(inside).explain(inputs()[0]).layer == "0.deep"


@pytest.mark.parametrize("name", WITHOUT_TARGET)
def test_the_map_is_that_of_any_target(name):
    model, x = Detector().eval(), inputs()
    explainer = METHODS[name](model, "deep") if name not in ("center", "edges") else METHODS[name](model)
    expected = explainer.attribute(x, lambda output: output[0].flatten(1).sum(1))
    assert torch.equal(explainer.attribute(x), expected)
    assert torch.equal(explainer.attribute(x, [None, None]), expected)


def sam():
    vision = {"hidden_size": 16, "output_channels": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "mlp_dim": 16}
    vision |= {
        "image_size": 96,
        "window_size": 2,
        "global_attn_indexes": [1],
        "num_pos_feats": 8,
        "initializer_range": 0.1,
    }
    prompt = {"hidden_size": 16, "image_size": 96, "mask_input_channels": 4, "image_embedding_size": 6}
    mask = {
        "hidden_size": 16,
        "mlp_dim": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "iou_head_hidden_dim": 16,
    }
    parts = {"vision_config": vision, "prompt_encoder_config": prompt, "mask_decoder_config": mask}
    return transformers.SamModel(transformers.SamConfig(**parts))


def mask2former():
    swin = {"image_size": 64, "embed_dim": 8, "depths": [1] * 4, "num_heads": [1] * 4, "window_size": 2}
    swin |= {"out_features": [f"stage{n}" for n in range(1, 5)]}
    widths = {"feature_size": 32, "mask_feature_size": 32, "hidden_dim": 32, "encoder_feedforward_dim": 16}
    counts = {"encoder_layers": 1, "decoder_layers": 2, "num_attention_heads": 2, "num_queries": 5, "num_labels": 3}
    config = transformers.Mask2FormerConfig(
        backbone_config=transformers.SwinConfig(**swin), dim_feedforward=16, **widths, **counts
    )
    return transformers.Mask2FormerForUniversalSegmentation(config)


def vit():
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    return transformers.ViTModel(transformers.ViTConfig(image_size=64, patch_size=16, **sizes))


def faster_rcnn():
    return fasterrcnn_mobilenet_v3_large_320_fpn(weights=None, weights_backbone=None, num_classes=4)


PUBLISHED = {  # model: size of the input, layer chosen, grid
    sam: (96, "vision_encoder", (6, 6)),
    mask2former: (64, "model.pixel_level_module.encoder.hidden_states_norms.stage4", (2, 2)),
    vit: (64, "layernorm", (4, 4)),
    faster_rcnn: (96, "backbone.body.16", (10, 10)),
}


@pytest.mark.slow
@pytest.mark.parametrize("build", PUBLISHED)
@pytest.mark.one_in(2)
def test_published_models_need_no_target(build):
    torch.manual_seed(0)
    model, (side, layer, grid) = build().eval(), PUBLISHED[build]
    x = torch.rand(2, 3, side, side)
    found = EigenCAM(model).explain_batch(list(x))
    assert {(each.layer, each.grid, each.label) for each in found} == {(layer, grid, "no target")}
    assert all(each.attribution.any() for each in found)


def test_wrappers_of_such_methods_need_no_target():
    model, x = Detector().eval(), inputs()
    for explainer in (Augmented(EigenCAM(model)), Fused([EigenCAM(model), FEM(model)])):
        explanation = explainer.explain(x[0])
        assert NO_TARGET in explanation.notes
        assert explanation.attribution.any()
    with pytest.raises(TargetError, match="no unique tensor of class scores"):
        Fused([EigenCAM(model), GradCAM(model)]).explain(x[0])
    concepts = DeepFeatureFactorization(model, n_concepts=2).factorize(list(x))
    assert (concepts.layer, concepts.gains.shape) == ("deep", (2, 0))


def test_other_methods_and_given_targets_are_as_before():
    model, x = Detector().eval(), inputs()
    for explainer, target in ((GradCAM(model), None), (EigenCAM(model), 1), (KPCACAM(model, "deep"), "cat")):
        with pytest.raises(TargetError, match="no unique tensor of class scores"):
            explainer.explain(x[0], target)
    with pytest.raises(TargetError, match="or use a method that needs no target, such as eigencam"):
        GradCAM(model).explain(x[0])
    of_function = EigenCAM(model).explain(x[0], lambda output: output[0].flatten(1).sum(1))
    assert of_function.label == "the output of a function"
    assert "the map does not depend on the score" in of_function.notes
    phantom = EigenCAM(load_model("phantom")).explain(torch.rand(1, 128, 128))
    assert phantom.top_classes  # a classifier still tells what it predicts
    assert NO_TARGET not in phantom.notes


def test_compare_draws_what_needs_no_target():
    comparison = compare(Detector().eval(), inputs()[0], ["eigencam", "fem"])
    assert {entry.explanation.label for entry in comparison.entries} == {"no target"}
    with pytest.warns(CamscopeWarning, match="Grad-CAM is left out"):
        both = compare(Detector().eval(), inputs()[0], ["gradcam", "eigencam"], skip_unsupported=True)
    assert [entry.explanation.method for entry in both.entries] == ["eigencam"]


def test_a_saved_explanation_is_read_again(tmp_path):
    explanation = EigenCAM(Detector().eval()).explain(inputs()[0])
    loaded = Explanation.load(explanation.save(tmp_path / "map.npz"))
    assert loaded.label == "no target"
    assert np.isnan(loaded.score)
    assert "NaN" not in explanation.save(tmp_path / "map.json").read_text(encoding="utf-8")


@pytest.mark.slow
def test_batch_and_command_line_run_without_target(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "images"
    folder.mkdir()
    for i in range(2):
        Image.fromarray(np.random.default_rng(i).integers(0, 255, (64, 96, 3), dtype=np.uint8)).save(
            folder / f"{i}.png"
        )
    model = Detector().eval()
    preprocess = {"preprocess": lambda image: torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255}
    run_batch([EigenCAM(model, **preprocess), FEM(model, **preprocess)], folder, tmp_path / "run")
    rows = [(row.label, row.target, row.status, row.layer) for row in BatchRun(tmp_path / "run")]
    assert rows == [("no target", None, "ok", "deep")] * 4
    (tmp_path / "net.py").write_text(
        "from tests.explainers.test_methods_without_target import Detector\n"
        "def detector():\n    return Detector()\n"
        "PREPROCESSING = {'detector': ((64, 96), (0.5,) * 3, (0.5,) * 3)}\n",
        encoding="utf-8",
    )
    words = ["explain", "images/0.png", "--model", "net.py:detector", "--methods", "eigencam,fem"]
    (image,) = json.loads(CliRunner().invoke(app, [*words, "--json"]).stdout)["images"]
    assert [(each["label"], each["score"], each["layer"]) for each in image["explanations"]] == [
        ("no target", None, "deep")
    ] * 2
    assert "nan" not in CliRunner().invoke(app, [*words, "-o", "again"]).stdout
