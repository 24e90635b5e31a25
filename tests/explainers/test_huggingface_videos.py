"""Video models of Hugging Face take (N,T,C,H,W), as their processors make it; maps have frames, in the order of the video."""

import itertools

import numpy as np
import pytest
import torch
from torch import nn

from camscope import METHODS, GradCAM, LayerExplainer, Layout, load_model
from camscope.batch import BatchRun, run_batch
from camscope.errors import InputError, LayerError
from tests.untouched import untouched

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("default::camscope.errors.CamscopeWarning")
FRAMES, SIDE, PATCH, CLASSES = 6, 32, 8, 4
SIZES = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
CELLS = SIDE // PATCH


def build(family, **settings):
    sizes = {**SIZES, "num_labels": CLASSES, "image_size": SIDE, "num_frames": FRAMES}
    if family == "Vivit":
        settings["tubelet_size"] = [2, PATCH, PATCH]
    else:
        settings["patch_size"] = PATCH
    config = getattr(transformers, f"{family}Config")(**sizes, **settings)
    torch.manual_seed(4)
    model = getattr(transformers, f"{family}ForVideoClassification")(config).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.2)
    return model.double()


def v_jepa():
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "mlp_ratio": 1, "num_labels": CLASSES}
    sizes |= {"pred_hidden_size": 16, "pred_num_hidden_layers": 1, "pred_num_attention_heads": 2}
    config = transformers.VJEPA2Config(
        crop_size=SIDE, patch_size=PATCH, frames_per_clip=FRAMES, tubelet_size=2, num_pooler_layers=1, **sizes
    )
    torch.manual_seed(4)
    return transformers.VJEPA2ForVideoClassification(config).eval().double()


# how many frames a cell has, the tokens before the grid, and whether the tokens of a patch follow one another
FAMILIES = {
    "VideoMAE": (lambda: build("VideoMAE"), 2, 0, False),
    "TimeSformer": (lambda: build("Timesformer"), 1, 1, True),
    "TimeSformer, joint": (lambda: build("Timesformer", attention_type="joint_space_time"), 1, 1, True),
    "ViViT": (lambda: build("Vivit"), 2, 1, False),
    "V-JEPA 2": (v_jepa, 2, 0, False),
}


def video(samples=1):
    generator = torch.Generator().manual_seed(5)
    return torch.randn(samples, FRAMES, 3, SIDE, SIDE, dtype=torch.float64, generator=generator)


def by_hand(tokens, step, prefix, time_last):
    """(N,K,t,h,w) of tokens (N,T,K), taken apart as the code of the family puts them together."""
    tokens, frames = tokens[:, prefix:], FRAMES // step
    if time_last:
        return tokens.reshape(len(tokens), CELLS, CELLS, frames, -1).permute(0, 4, 3, 1, 2)
    return tokens.reshape(len(tokens), frames, CELLS, CELLS, -1).permute(0, 4, 1, 2, 3)


def record(model, layer, run):
    """The tokens that a layer returns while `run` runs, connected with the result."""
    found = []

    def keep(module, args, output):
        tensor = output if isinstance(output, torch.Tensor) else output[0]
        found.append(tensor)

    handle = model.get_submodule(layer).register_forward_hook(keep)
    try:
        return run(), found[-1]
    finally:
        handle.remove()


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.one_in(2)
def test_the_map_is_that_of_plain_autograd(family):
    make, *order = FAMILIES[family]
    model, x = make(), video(2)
    grid = (FRAMES // order[0], CELLS, CELLS)
    with untouched(model, x):
        found = GradCAM(model).attribute(x, 1)
        explanation = GradCAM(model).explain(x[1], 1)
    assert explanation.grid == grid
    assert (explanation.status, explanation.input_size) == ("ok", (FRAMES, SIDE, SIDE))
    logits, tokens = record(model, explanation.layer, lambda: model(x.clone().requires_grad_()).logits)
    (gradient,) = torch.autograd.grad(logits[:, 1].sum(), tokens)
    tokens, gradient = (by_hand(part.detach(), *order) for part in (tokens, gradient))
    expected = (gradient.mean((2, 3, 4), keepdim=True) * tokens).sum(1).relu()
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-12)
    np.testing.assert_allclose(explanation.attribution, expected[1], rtol=1e-8, atol=1e-12)
    assert expected.any()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.one_in(2)
def test_a_changed_patch_of_a_frame_changes_the_cell_of_its_frame_and_place(family):
    make, step, *_ = FAMILIES[family]
    model, x = make(), video()

    class Strength(LayerExplainer):
        name = "strength"

        def compute_layer_map(self, features):
            return features.activation[:, 0]

    layers = {"VideoMAE": "videomae.embeddings", "ViViT": "vivit.embeddings", "V-JEPA 2": "vjepa2.encoder.embeddings"}
    explainer = Strength(model, layers.get(family, "timesformer.embeddings"))
    clean = explainer.attribute(x, 1)
    for cell in itertools.product((0, FRAMES // step - 1), (0, 3), (1, 2)):
        changed = x.clone()
        t, i, j = cell
        rows, columns = slice(i * PATCH, (i + 1) * PATCH), slice(j * PATCH, (j + 1) * PATCH)
        changed[:, t * step : (t + 1) * step, :, rows, columns] *= -1
        difference = (explainer.attribute(changed, 1) - clean).abs()[0] > 1e-9
        assert difference.nonzero().tolist() == [list(cell)]


@pytest.mark.parametrize("family", ["VideoMAE", "TimeSformer"])
def test_pixel_maps_are_those_of_plain_autograd(family):
    model, x = FAMILIES[family][0](), video()
    leaf = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(leaf).logits[:, 2].sum(), leaf)
    found = METHODS["inputxgradient"](model).attribute(x, 2)
    torch.testing.assert_close(found, (gradient * x).sum(2), rtol=1e-8, atol=1e-12)
    hidden = METHODS["occlusion"](model, window=(2, 16, 16), stride=(2, 16, 16), baseline=0).attribute(x, 2)
    with torch.no_grad():
        x[:, 2:4, :, 16:, :16] = 0
        drop = model(video()).logits[0, 2] - model(x).logits[0, 2]
    torch.testing.assert_close(hidden[0, 2, 20, 3], drop, rtol=1e-6, atol=1e-9)


@pytest.mark.slow
def test_other_orders_and_layouts():
    model, x = FAMILIES["VideoMAE"][0](), video()
    expected = GradCAM(model).attribute(x, 1)
    torch.testing.assert_close(GradCAM(model, frames_first=True).attribute(x, 1), expected)
    assert GradCAM(model).parameters["frames_first"] is True
    with pytest.raises(InputError, match="axes"):
        GradCAM(model).attribute(x[:, 0], 1)
    wrapped = nn.Sequential(model)  # a module of the caller may move the axes itself
    with pytest.raises(InputError, match="pass frames_first=True"):
        GradCAM(wrapped).attribute(x, 1)
    layer = "timesformer.encoder.layer.0"
    timesformer = FAMILIES["TimeSformer"][0]()
    layout = Layout("tokens", (FRAMES, CELLS, CELLS), 1, time_last=True)
    maps = [GradCAM(timesformer, layer, layout=given).attribute(x, 1) for given in (layout, None)]
    torch.testing.assert_close(*maps)
    assert str(layout) == "tokens 1+6x4x4, time last"
    rows = torch.arange(12).view(1, 12, 1)  # a token, two patches of five frames, a token
    assert Layout("tokens", (5, 1, 2), 1, time_last=True).to_maps(rows).flatten().tolist() == [
        *(1, 6),
        *(2, 7),
        *(3, 8),
        *(4, 9),
        *(5, 10),
    ]


def test_models_whose_frames_are_a_batch_say_so():
    model = build("Timesformer", attention_type="space_only")
    with pytest.raises(LayerError, match=r"frames|one item per sample"):
        GradCAM(model).explain(video()[0], 1)
    with pytest.raises(LayerError, match="computes attention within windows"):
        METHODS["rollout"](FAMILIES["TimeSformer"][0]()).explain(video()[0], 1)


def test_rollout_of_a_joint_attention_has_the_order_of_the_video():
    """Rollout by hand: the attention of the class token, through both blocks, with half of the identity."""
    model, x = build("Timesformer", attention_type="joint_space_time"), video()
    found = METHODS["rollout"](model).attribute(x, 1)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        attentions = model(x, output_attentions=True).attentions
    flow = torch.eye(attentions[0].shape[-1], dtype=torch.float64)
    for attention in attentions:
        flow = (attention[0].mean(0) + torch.eye(len(flow), dtype=torch.float64)) / 2 @ flow
    expected = flow[0, 1:].view(CELLS, CELLS, FRAMES).permute(2, 0, 1)
    torch.testing.assert_close(found[0] / found[0].sum(), expected / expected.sum(), rtol=1e-6, atol=1e-9)


@pytest.mark.slow
def test_a_folder_is_loaded_and_a_batch_of_tensors_is_explained(tmp_path):
    build("VideoMAE").float().save_pretrained(tmp_path / "folder")
    model = load_model(f"hf:{tmp_path / 'folder'}")
    assert type(model).__name__ == "VideoMAEForVideoClassification"
    clips = video(3).float()
    run_batch(GradCAM(model), list(clips), tmp_path / "run", targets=[1])
    rows = [explanation.attribution for explanation in BatchRun(tmp_path / "run")]
    np.testing.assert_allclose(np.stack(rows), GradCAM(model).attribute(clips, 1), rtol=1e-4, atol=1e-7)
