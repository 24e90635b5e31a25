"""Several layers as one map: `fuse` of explanations, `Fused` of explainers, and RefineCAM, their product."""

import numpy as np
import pytest
import torch
from torch import nn

from camscope import Contrast, Preprocess
from camscope.errors import InputError, LayerError
from camscope.explainers import (
    METHODS,
    AblationCAM,
    Denoised,
    FullGrad,
    Fused,
    GradCAM,
    GradCAMPlusPlus,
    HiResCAM,
    LayerCAM,
    RefineCAM,
    fuse,
)
from camscope.explainers.ensemble.refine_cam import find_last_layer_per_resolution
from camscope.explanation import Explanation
from camscope.layers.spatial_layers import find_spatial_layers
from camscope.targets import Difference
from tests.by_hand import A, G
from tests.nets import CASES, Flat, Tokens
from tests.tools import Counting, seen_before

pytestmark = pytest.mark.filterwarnings("ignore::camscope.errors.CamscopeWarning")


def explanation(heat, **facts):
    known = {"method": "gradcam", "target": 1, "label": "one", "score": 2.0, "layer": "a", "input_size": (8, 8)}
    return Explanation(np.array(heat, dtype=np.float32), **{**known, **facts})


def test_fuse_by_hand():
    first = explanation([[2.0, 0.0], [0.0, -4.0]])
    second = explanation([[0.0, 10.0], [5.0, 0.0]], layer="b")
    np.testing.assert_array_equal(fuse([first, second]).attribution, [[1.0, 1.0], [0.5, 0.0]])
    np.testing.assert_array_equal(fuse([first, second], "mean").attribution, [[0.5, 0.5], [0.25, 0.0]])
    assert fuse([first, second]).layer == "a + b"
    assert fuse([first]).attribution.tolist() == [[1.0, 0.0], [0.0, 0.0]]


def test_fuse_brings_a_coarse_map_to_the_finest_grid():
    coarse, fine = explanation([[0.0, 4.0]]), explanation(np.zeros((2, 4)), status="no_positive_evidence", layer="b")
    fused = fuse([coarse, fine])
    # cell centers 0.5 and 1.5 hold 0 and 1; the four new centers lie at 0.25, 0.75, 1.25, 1.75, the ends are flat
    np.testing.assert_allclose(fused.attribution, [[0.0, 0.25, 0.75, 1.0]] * 2)
    assert fused.status == "ok"
    assert any("b: nothing in the map is positive" in note for note in fused.notes)
    empty = explanation(np.zeros((1, 2)), status="zero_gradient")
    assert fuse([empty, fine]).status == "zero_gradient"
    assert not fuse([empty, fine]).attribution.any()


@pytest.mark.parametrize(
    "other", [{"target": 2}, {"method": "layercam"}, {"input_size": (9, 9)}, {"model": "beef"}, {"name": "dog.jpg"}]
)
def test_fuse_refuses_what_does_not_belong_together(other):
    with pytest.raises(InputError, match=f"cannot fuse explanations with different {next(iter(other))}: "):
        fuse([explanation([[1.0]]), explanation([[1.0]], **other)])


def test_fuse_refuses_two_images_of_one_name():
    with pytest.raises(InputError, match="different inputs: their scores are 2 and 3"):
        fuse([explanation([[1.0]]), explanation([[1.0]], score=3.0)])
    dark, light = np.zeros((8, 8, 3), np.uint8), np.full((8, 8, 3), 9, np.uint8)
    with pytest.raises(InputError, match="of different images"):
        fuse([explanation([[1.0]], model_input_image=dark), explanation([[1.0]], model_input_image=light)])


def test_a_fused_map_says_what_it_is():
    fused = fuse([explanation([[1.0]]), explanation([[2.0]], layer="b")], "mean")
    assert fused.parameters == {"layer": "a + b", "fusion_mode": "mean"}
    assert any("divided by its maximum" in note for note in fused.notes)


def test_fuse_refuses_nothing_and_an_unknown_way():
    with pytest.raises(InputError, match="fuse got no explanations"):
        fuse([])
    with pytest.raises(InputError, match="fusion_mode='sum': expected 'max' or 'mean'"):
        fuse([explanation([[1.0]])], "sum")


def test_fused_layers_of_one_call_lie_on_one_picture():
    model, x = CASES["pooled"].make(1)
    maps = [LayerCAM(model, layer).explain(x, 1) for layer in ("features.0", "features.4")]
    fused = fuse(maps)
    assert (fused.grid, fused.placement) == (maps[0].grid, maps[0].placement)
    assert fused.heatmap("input").shape == (16, 12)


# --- Fused: the same of explainers, from shared passes


def over_maximum(heat):
    return np.maximum(heat, 0) / heat.max() if heat.max() > 0 else np.zeros_like(heat)


@pytest.mark.parametrize("how", ["max", "mean", "product"])
def test_fused_is_fuse(how):
    model, x = CASES["pooled"].make(1, torch.float64)
    layers = ["features.1", "features.4"]
    fused = Fused.at_layers(LayerCAM(model), layers, how).explain(x[0], 1)
    expected = fuse([LayerCAM(model, layer).explain(x[0], 1) for layer in layers], how)
    np.testing.assert_allclose(fused.attribution, expected.attribution, rtol=1e-12, atol=0)
    assert (fused.layer, fused.status, fused.score) == (expected.layer, expected.status, expected.score)
    assert fused.method == "layercam, fused"
    assert fused.parameters["fusion_mode"] == how
    assert "layer='features.1'" in fused.parameters["explainers"]


def test_fused_by_hand_of_two_methods_of_one_layer():
    model = Flat(nn.MaxPool2d(1), 8, classes=2).double()
    model.head.weight.data[1] = torch.tensor(G).flatten()
    x = torch.tensor([A], dtype=torch.float64)
    pair = [GradCAM(model, "features"), HiResCAM(model, "features")]
    # [2.5, 1; 1, 0] / 2.5 and [-3, -2; 1, -4] cut at zero / 1
    expected = {"max": [[1.0, 0.4], [1.0, 0.0]], "mean": [[0.5, 0.2], [0.7, 0.0]], "product": [[0, 0], [0.4, 0]]}
    for how, numbers in expected.items():
        heat = Fused(pair, how).attribute(x, 1)[0]
        torch.testing.assert_close(heat, torch.tensor(numbers, dtype=torch.float64), rtol=1e-14, atol=1e-14)
    assert Fused(pair).explain(x[0], 1).caption.endswith("Grad-CAM + HiResCAM, fused · features + features")


def test_the_layers_of_one_method_share_one_forward_and_one_backward_pass():
    model, x = CASES["pooled"].make()
    counting = seen_before(Counting(model), x)
    fused = Fused.at_layers(LayerCAM(counting), ["model.features.0", "model.features.2", "model.features"])
    fused.attribute(x, 1)
    assert (counting.forwards, counting.backwards) == (1, 1)
    fused.explain_classes(x[0], [0, 1, 2])
    assert (counting.forwards, counting.backwards) == (2, 4)


def test_a_layer_without_evidence_is_named():
    model, x = CASES["flat"].make(1)
    model.head.weight.data[1] = -model.head.weight.data[1].abs()  # nothing speaks for class 1 at the last layer
    fused = Fused.at_layers(LayerCAM(model, layout="channels_first"), ["features.1", "features.5"]).explain(x[0], 1)
    assert any(note.startswith("features.5: nothing in the map is positive") for note in fused.notes)
    first = LayerCAM(model, "features.1").explain(x[0], 1)
    np.testing.assert_allclose(fused.attribution, over_maximum(first.attribution), rtol=1e-6)


def test_fused_refuses_what_does_not_belong_together():
    model, _ = CASES["pooled"].make()
    other, _ = CASES["flat"].make()
    with pytest.raises(InputError, match="have different models"):
        Fused([GradCAM(model), GradCAM(other)])
    for setting in ({"class_names": ["a", "b", "c"]}, {"preprocess": Preprocess(mean=(0.5,) * 3, std=(0.5,) * 3)}):
        with pytest.raises(InputError, match=f"have different {next(iter(setting))}: explain each separately"):
            Fused([GradCAM(model), GradCAM(model, **setting)])
        assert Fused([GradCAM(model, **setting), LayerCAM(model, **setting)]).inner
    with pytest.raises(InputError, match="differ in mode, precision, input_key or frames_first"):
        Fused([GradCAM(model), GradCAM(model, mode="as_is")])
    with pytest.raises(InputError, match="Fused got no list of explainers"):
        Fused([])
    with pytest.raises(InputError, match="Fused got no list of explainers: pass a list"):
        Fused(GradCAM(model))
    for layers in (["features.1", "features.4"], [model.features]):
        with pytest.raises(InputError, match=r"the list has layers: use Fused\.at_layers\(explainer, layers\)"):
            Fused(layers)
    with pytest.raises(InputError, match="wraps an explainer"):
        Fused([3])
    with pytest.raises(InputError, match="fusion_mode='sum': expected 'max'"):
        Fused([GradCAM(model)], "sum")
    with pytest.raises(InputError, match="takes a list of layers"):
        Fused.at_layers(GradCAM(model), "features")
    for wrong, why in {
        "gradcam": r"takes an explainer, such as GradCAM\(model\); got 'gradcam'",
        GradCAM: r"takes an explainer, such as GradCAM\(model\); got <class",
        FullGrad(
            model
        ): r"FullGrad\(Pooled\) does not explain a single layer: Fused\.at_layers takes a method that does",
        RefineCAM(model): "RefineCAM.* does not explain a single layer",
        Fused([GradCAM(model)]): "has several layers already",
        Denoised(
            GradCAM(model)
        ): r"is a wrapper and has no layer: pass Denoised\(Fused\.at_layers\(explainer, layers\)\)",
    }.items():
        with pytest.raises(InputError, match=why) as caught:
            Fused.at_layers(wrong, ["features"])
        assert ("is a wrapper and has no layer" in str(caught.value)) == isinstance(wrong, Denoised)


def test_fused_of_questions_that_differ_is_refused():
    model, x = CASES["pooled"].make()
    with pytest.raises(InputError, match="explain different targets"):
        Fused([Contrast(GradCAM(model), 0, 1), Contrast(GradCAM(model), 1, 0)]).attribute(x)
    with pytest.raises(InputError, match="explain different targets"):
        Fused([GradCAM(model), Contrast(GradCAM(model), 1, 0)]).attribute(x)
    both = Fused([Contrast(GradCAM(model, layer), 0, 1) for layer in ("features.1", "features.4")])
    expected = Fused.at_layers(GradCAM(model), ["features.1", "features.4"]).attribute(x, Difference(0, 1))
    torch.testing.assert_close(both.attribute(x), expected)


def test_fused_takes_methods_that_share_no_passes():
    model, x = CASES["residual"].make(2, torch.float64)
    fused = Fused([AblationCAM(model, "block"), GradCAM(model, "block")]).attribute(x, [1, None])
    alone = [tool(model, "block").attribute(x, [1, None]) for tool in (AblationCAM, GradCAM)]
    expected = [np.maximum(*(over_maximum(heat[i].numpy()) for heat in alone)) for i in range(2)]
    np.testing.assert_allclose(fused, np.stack(expected), rtol=1e-12, atol=1e-15)


# --- RefineCAM: the product of stages


def enlarged(heat, rows, columns):
    """One map on a finer grid, one cell at a time: linear between the cells' centers, flat beyond the outermost."""
    made = np.zeros((rows, columns))
    for i in range(rows):
        for j in range(columns):
            y = min(max((i + 0.5) * heat.shape[0] / rows - 0.5, 0), heat.shape[0] - 1)
            x = min(max((j + 0.5) * heat.shape[1] / columns - 0.5, 0), heat.shape[1] - 1)
            for a in {int(y), min(int(y) + 1, heat.shape[0] - 1)}:
                for b in {int(x), min(int(x) + 1, heat.shape[1] - 1)}:
                    made[i, j] += (1 - abs(y - a)) * (1 - abs(x - b)) * heat[a, b]
    return made


class Stages(nn.Module):
    """A stem and three stages of two steps each, every one at half the resolution; the first step still has the old one."""

    def __init__(self):
        super().__init__()

        def stage(i, o):
            return nn.Sequential(nn.Conv2d(i, o, 1), nn.Conv2d(o, o, 3, 2, 1), nn.ELU())

        self.stem = nn.Conv2d(3, 4, 3, 2, 1)
        self.one, self.two, self.three = stage(4, 5), stage(5, 6), stage(6, 7)
        self.head = nn.Linear(7, 3)

    def forward(self, x):
        return self.head(self.three(self.two(self.one(self.stem(x)))).mean((2, 3)))


def staged():
    torch.manual_seed(3)
    return Stages().double().eval(), torch.randn(2, 3, 48, 32, dtype=torch.float64)


def stretched(values):
    return (values - values.min()) / (values.max() - values.min())


def test_refine_cam_is_the_product_of_the_layers_one_after_the_other():
    model, x = staged()
    layers = ["one", "two", "three"]
    expected = np.ones((2, 12, 8))
    for layer in layers:
        heat = GradCAMPlusPlus(model, layer).attribute(x, [1, 2]).numpy()
        for i in range(2):
            expected[i] *= stretched(enlarged(stretched(heat[i]), 12, 8))
    assert expected.any(axis=(1, 2)).all(), "a test of a product needs one that is not zero"
    np.testing.assert_allclose(RefineCAM(model, layers).attribute(x, [1, 2]), expected, rtol=1e-10, atol=1e-14)
    np.testing.assert_allclose(
        RefineCAM(model, "one, two,three").attribute(x, [1, 2]), expected, rtol=1e-10, atol=1e-14
    )


def test_refine_cam_finds_the_last_layer_of_every_resolution():
    model, x = staged()
    found = RefineCAM(model).explain(x[0], 1)
    assert found.layer == "stem + one + two + three"
    assert found.notes[0] == "layers stem, one, two, three were chosen"
    same = RefineCAM(model, ["stem", "one", "two", "three"]).explain(x[0], 1)
    assert found.attribution.tobytes() == same.attribution.tobytes()
    deeper = nn.Sequential(nn.Conv2d(3, 3, 1), model).double()
    assert RefineCAM(deeper).explain(x[0], 1).layer == "1.stem + 1.one + 1.two + 1.three"  # the four coarsest


def test_the_first_step_of_a_block_ends_no_stage():
    model, x = staged()
    layers = find_spatial_layers(model, lambda: model(x), x)
    grids = {layer.name: layer.layout.grid for layer in layers}
    assert grids["two.0"] == grids["one"]
    assert find_last_layer_per_resolution(model, layers, "three") == ["stem", "one", "two", "three"]
    assert find_last_layer_per_resolution(model, layers, "two") == ["stem", "one", "two"]


def test_refine_cam_of_tokens_is_its_last_block_and_says_so():
    model, x = CASES["tokens"].make(dtype=torch.float64)
    found = RefineCAM(model).explain(x[0], 1)
    assert "one resolution" in found.notes[0]
    np.testing.assert_allclose(found.attribution, over_maximum(GradCAMPlusPlus(model).explain(x[0], 1).attribution))
    torch.manual_seed(0)
    deep = Tokens()
    deep.block = nn.Sequential(deep.block, nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)))
    deep = deep.double().eval()
    several = RefineCAM(deep, ["block.0", "block.1"], base_method="layercam").attribute(x, 1)
    each = [LayerCAM(deep, f"block.{i}").attribute(x, 1).numpy() for i in range(2)]
    expected = [over_maximum(each[0][i]) * over_maximum(each[1][i]) for i in range(2)]
    np.testing.assert_allclose(several, np.stack(expected), rtol=1e-12, atol=1e-15)


@pytest.mark.usefixtures("passes_of_maps_alone")
def test_refine_cam_looks_for_its_layers_once():
    model, x = CASES["pooled"].make()
    counting = Counting(model)
    tool = RefineCAM(counting)
    tool.attribute(x, 1)
    first = counting.forwards
    tool.attribute(x, 2)
    assert counting.forwards == first + 1


def test_refine_cam_refuses_what_it_cannot_use():
    model, _ = CASES["pooled"].make()
    with pytest.raises(InputError, match="layers is empty"):
        RefineCAM(model, [])
    for given in ("features,", "", ["features", " "]):
        with pytest.raises(InputError, match="has an empty name: expected names with commas between"):
            RefineCAM(model, given)
    with pytest.raises(LayerError, match="featurs"):
        RefineCAM(model, ["features", "featurs"])
    with pytest.raises(InputError, match="base_method='nonesuch' is not a method"):
        RefineCAM(model, base_method="nonesuch")
    with pytest.raises(InputError, match="base_method=3 is not a method"):
        RefineCAM(model, base_method=3)
    with pytest.raises(InputError, match="base_method='refinecam' is not a method that explains one layer: pass "):
        RefineCAM(model, base_method="refinecam")


def test_refine_cam_passes_its_settings_on():
    model, _ = CASES["pooled"].make()
    assert RefineCAM(model, mode="as_is", precision="bf16")._base_explainer.parameters == {
        "mode": "as_is",
        "precision": "bf16",
    }
    assert METHODS["refinecam"] is RefineCAM
