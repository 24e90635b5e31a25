"""Models of several inputs: what goes beside the image, with every call that explains."""

import numpy as np
import pytest
import torch
from torch import nn

from camscope import GradCAM, IntegratedGradients, Preprocess, Saliency, ScoreCAM, compare
from camscope.errors import InputError
from camscope.targets import Similarity

torch.manual_seed(0)
CONV = nn.Conv2d(3, 4, 3, padding=1).double()


class WithTable(nn.Module):
    """An image and a row of a table that gates the image's channels; `scale` by keyword."""

    def __init__(self):
        super().__init__()
        self.conv = CONV
        self.relu = nn.ReLU()
        self.gate = nn.Linear(2, 4).double()
        self.head = nn.Linear(4, 3).double()

    def forward(self, x, table, *, scale=1.0):
        gated = self.relu(self.conv(x)) * self.gate(table)[..., None, None]
        return self.head(gated.mean((2, 3))) * scale


class Siamese(nn.Module):
    """How alike two images are."""

    def __init__(self):
        super().__init__()
        self.conv = CONV

    def forward(self, one, other):
        return (self.conv(one).relu().mean((2, 3)) * self.conv(other).mean((2, 3))).sum(1)


@pytest.fixture
def case():
    torch.manual_seed(1)
    return WithTable().eval(), torch.randn(3, 3, 6, 8).double(), torch.randn(3, 2).double()


def by_hand(model, x, table, target, scale=1.0):
    """Grad-CAM (h,w) of one image at the ReLU, from the gate and the head's row alone."""
    weights = model.gate(table) * model.head.weight[target] * scale / x[0].numel()
    return (weights[:, None, None] * model.conv(x[None])[0].relu()).sum(0).relu().detach()


@pytest.mark.parametrize("target", [0, 2])
def test_explain_hands_on_what_the_model_takes_beside_the_image(case, target):
    model, x, table = case
    tool, row = GradCAM(model, "relu"), table[:1]
    for found in (
        tool.explain(x[0], target, row, scale=2.0),
        *tool.explain_classes(x[0], [target], scale=2.0, table=row),
        *tool.explain_methods(x[0], ["gradcam"], target, row, scale=2.0),
    ):
        expected = by_hand(model, x[0], table[0], target, 2.0)
        np.testing.assert_allclose(found.attribution, expected, rtol=1e-9, atol=1e-15)
        assert found.score == pytest.approx(model(x[:1], row, scale=2.0)[0, target].item())


def test_each_image_of_a_batch_goes_with_its_own_row_also_where_sizes_differ(case):
    model, x, table = case
    images = [x[0], x[1][:, :4], x[2]]
    tool = GradCAM(model, "relu")
    together = tool.explain_batch(images, [0, 1, 2], table, scale=0.5)
    for i, found in enumerate(together):
        alone = tool.explain(images[i], i, table[i : i + 1], scale=0.5)
        np.testing.assert_allclose(found.attribution, alone.attribution, rtol=1e-9, atol=1e-15)
        assert alone.attribution.any()


def test_a_method_of_many_passes_repeats_the_row(case):
    model, x, table = case
    tool = ScoreCAM(model, "relu")
    both = tool.attribute(x[:2], 1, table[:2])
    for i in range(2):
        np.testing.assert_allclose(tool.explain(x[i], 1, table[i : i + 1]).attribution, both[i], rtol=1e-9, atol=1e-12)


def test_two_images_of_a_siamese_net_are_each_explained_beside_the_other():
    torch.manual_seed(2)
    one, other = torch.randn(2, 1, 3, 6, 6).double()
    model = Siamese().eval()
    found = GradCAM(model, "conv", call_index=0).explain(one[0], None, other)
    with torch.no_grad():
        weights = model.conv(other).mean((2, 3))[0]
    activation = model.conv(one)[0].detach()
    gradient = weights[:, None, None] * (activation > 0) / 36
    expected = (gradient.mean((1, 2), keepdim=True) * activation).sum(0).relu()
    np.testing.assert_allclose(found.attribution, expected, rtol=1e-9, atol=1e-15)


def test_a_comparison_and_a_similarity_take_them_too(case):
    model, x, table = case
    seen = compare(model, x[0], ["gradcam", "hirescam"], layers=["conv"], targets=[1], args=(table[:1],))
    for method, found in zip(("gradcam", "hirescam"), seen.explanations, strict=True):
        alone = GradCAM(model, "conv").explain_methods(x[0], [method], 1, table[:1])[0]
        np.testing.assert_array_equal(found.attribution, alone.attribution)
    found = GradCAM(model, "conv").explain(x[0], Similarity(x[1]), table[:1])
    mine, its = model(x[:1], table[:1])[0].detach(), model(x[1:2], table[:1])[0].detach()
    assert found.score == pytest.approx(float(torch.cosine_similarity(mine, its, dim=0)))


def test_photographs_go_with_their_rows(case):
    model, _, table = case
    photo = np.random.default_rng(0).integers(0, 255, (40, 50, 3), dtype=np.uint8)
    tool = GradCAM(model.float(), "conv", preprocess=Preprocess(resize=12, crop=12, mean=(0.5,) * 3, std=(0.5,) * 3))
    found = tool.explain(photo, 0, table[:1].float())
    assert found.attribution.shape == (12, 12)
    assert found.heatmap().shape == (40, 50)


def test_without_them_the_models_own_error_is_heard(case):
    model, x, _ = case
    with pytest.raises(TypeError, match="table"):
        GradCAM(model, "conv").explain(x[0], 0)


class ChangesTable(WithTable):
    """It doubles its table in place, in one of three ways."""

    how = "method"

    def forward(self, x, table, *, scale=1.0):
        if self.how == "method":
            table.mul_(2)
        elif self.how == "data":
            table.data.mul_(2)
        else:
            table += table
        return super().forward(x, table, scale=scale)


@pytest.mark.filterwarnings("ignore:.*could not be verified")  # the layer's layout, from a pass with hidden changes
@pytest.mark.parametrize("how", ["method", "data", "operator"])
@pytest.mark.parametrize("tool", [GradCAM, ScoreCAM, IntegratedGradients, Saliency])
@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.one_in(5)
def test_a_table_that_the_model_changes_in_place_stays_the_callers(case, how, tool, samples):
    simple, x, table = case
    model, x, table = ChangesTable().eval().double(), x[:samples], table[:samples]
    model.load_state_dict(simple.double().state_dict())
    model.how = how
    layer = {"layer": "relu"} if tool in (GradCAM, ScoreCAM) else {}
    expected, before = tool(simple, **layer).attribute(x, 1, 2 * table), table.clone()
    for passed in ({"additional_forward_args": (table,)}, {"table": table}):
        torch.testing.assert_close(tool(model, **layer).attribute(x, 1, **passed), expected, rtol=1e-9, atol=1e-12)
        assert torch.equal(table, before)


class ChangesImage(WithTable):
    """It changes its image without PyTorch's notice."""

    def forward(self, x):
        x.data.sub_(0.5)
        return self.head(self.conv(x).relu().mean((2, 3)))


@pytest.mark.parametrize("tool", [GradCAM, ScoreCAM, IntegratedGradients, Saliency])
def test_an_image_that_the_model_changes_unnoticed_is_an_error_and_is_restored(case, tool):
    x = case[1]
    x[0, 0, 0, 0] = 0.25
    before = x.clone()
    with pytest.raises(InputError, match=r"changed its input in place.*x\.clone\(\)"):
        tool(ChangesImage().eval().double()).attribute(x, 1)
    assert torch.equal(x, before)
