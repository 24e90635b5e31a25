"""compare: what it costs, what it says of methods that coincide, and what its figure shows."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from camscope import Explanation, compare, load_model
from camscope.errors import CamscopeWarning, InputError, LayerError, OutputError, TargetError
from camscope.explainers import (
    BaseCAM,
    Contrast,
    Denoised,
    Explainer,
    Fused,
    GradCAM,
    HiResCAM,
    LayerCAM,
    RefineCAM,
    ScoreCAM,
)
from camscope.explainers.cam.weighted_channels_explainer import BaseWeightedChannels
from camscope.explainers.comparison import compare as comparison
from camscope.explainers.comparison.compare import compare_explainers
from camscope.explainers.comparison.equal_maps import correlate_maps
from camscope.explainers.comparison.explain_by_supported_methods import explain_supported
from camscope.explanation import shared_scales
from camscope.images.preprocess import Preprocess
from camscope.phantom import draw_radiograph
from tests.nets import CASES, Flat, Plain, Pooled, conv, plain
from tests.pictures import notebook_picture
from tests.tools import Counting

quiet = pytest.mark.filterwarnings("ignore::camscope.errors.CamscopeWarning")
DATA = Path(__file__).resolve().parents[4] / "shared" / "data"
INFERNO_TOP = (252, 255, 164)


class Center(Explainer):
    """No layer, no passes: the middle of the image."""

    name, paper = "center", "arXiv:0000.00000"

    def attribution(self, x, score):
        score(x)
        return torch.eye(4, dtype=x.dtype).expand(len(x), 4, 4)


class Classifier(BaseWeightedChannels):
    """The head's own row for weights (Zhou et al. 2016)."""

    name, paper = "cam", "arXiv:1512.04150"

    def channel_weights(self, features):
        return self.model.head.weight.detach()[features.score.classes][..., None]


class Unsuited(BaseCAM):
    """A method that has no answer for any model."""

    name, paper = "unsuited", "arXiv:0000.00000"

    def weights(self, activation, gradient):
        raise LayerError("no linear head")


class Ready(Center):
    """A method of its own company that fails."""

    name = "ready"

    def attribution(self, x, score):
        raise LayerError("no way")


# What it costs


@pytest.mark.usefixtures("passes_of_maps_alone")
@quiet
@pytest.mark.parametrize("layers", [["model.features"], ["model.features.2", "model.features"]])
def test_methods_and_layers_share_one_forward_and_one_backward_a_class(layers):
    model, x = CASES["pooled"].make()
    counting = Counting(model)
    found = compare(counting, x[0], ["gradcam", "layercam", "hirescam"], layers=layers, targets=[0, 1, None])
    assert (counting.forwards, counting.backwards) == (1, 3)
    assert len(found.explanations) == 3 * 3 * len(layers)


@quiet
def test_a_method_with_passes_of_its_own_shares_the_first_one():
    model, x = CASES["pooled"].make()
    alone = Counting(model)
    ScoreCAM(alone, "model.features", batch_size=1).explain(x[0], 1)
    both = Counting(model)
    tools = [ScoreCAM(both, "model.features", batch_size=1), GradCAM(both, "model.features")]
    compare_explainers(tools, x[0], [1])
    assert both.forwards == alone.forwards
    assert both.backwards == 1


@pytest.mark.slow
@quiet
def test_every_explanation_is_the_one_the_method_gives_alone():
    model, x = CASES["residual"].make()
    names = ["gradcam", "gradcam++", "hirescam", "layercam", "scorecam", "ablationcam"]
    found = compare(model, x[0], names, layers=["block", "stem"], targets=[2, 0])
    for one, row in zip(found.explanations, found.to_records(), strict=True):
        alone = GradCAM(model, one.layer).with_method(one.method).explain(x[0], one.target)
        np.testing.assert_allclose(one.attribution, alone.attribution, rtol=1e-5, atol=1e-7)
        assert (row["method"], row["layer"], row["target"]) == (one.method, alone.layer, alone.target)
        assert row["score"] == pytest.approx(alone.score, rel=1e-5)
        assert row["forward_passes"] == type(GradCAM(model).with_method(one.method)).forward_passes
    assert sum(row["seconds"] for row in found.to_records()) > 0


@quiet
def test_the_watcher_hears_of_the_shared_pass_and_then_of_each_long_one():
    model, x = CASES["pooled"].make()
    heard = []
    compare(
        model,
        x[0],
        ["gradcam", "scorecam", "layercam"],
        targets=[0, 1],
        on_pass=lambda t: heard.append([o.name for o in t]),
    )
    assert heard == [["gradcam", "scorecam", "layercam"], ["scorecam"], ["scorecam"]]


# What coincides


def test_methods_that_are_one_behind_a_pooling_are_said_to_be():
    model, x = CASES["pooled"].make(dtype=torch.float64)
    found = compare(model, x[0], ["gradcam", "gradcam++", "xgradcam", "hirescam"], layers=["features"], targets=[0, 1])
    assert [[one.method for one in group] for group in found.equivalent_maps] == 2 * [
        ["gradcam", "xgradcam", "hirescam"]
    ]
    for first, *others in found.equivalent_maps:
        for one in others:  # the truth, without the code that is tested
            drawn, expected = (np.maximum(e.attribution, 0) / e.attribution.max() for e in (one, first))
            np.testing.assert_allclose(drawn, expected, atol=1e-4)
    assert found.equivalence_notes == (
        "Grad-CAM, XGrad-CAM and HiResCAM are one map at features for every class: their formulas are one if the "
        "gradient there is one number per channel, as before global pooling",
    )


def test_a_title_with_a_comma_is_one_name_in_a_sentence():
    model, x = one_hot_activation()
    found = compare(model, x[None], [Denoised(GradCAM(model, "features")), HiResCAM(model, "features")], targets=[1])
    (sentence,) = found.equivalence_notes
    assert sentence.startswith("'Grad-CAM, denoised' and HiResCAM are one map at features")


def test_the_classifiers_own_weights_are_that_gradient():
    model, x = CASES["pooled"].make(dtype=torch.float64)
    found = compare(model, x[0], ["gradcam", Classifier], layers=["features"], targets=[0])
    assert [[one.method for one in group] for group in found.equivalent_maps] == [["gradcam", "cam"]]
    assert "if the gradient there is one number per channel" in found.equivalence_notes[0]


@quiet
def test_nothing_is_said_where_the_rest_of_the_model_is_not_linear():
    model, x = plain(Plain)
    found = compare(model, x[0], ["gradcam", "xgradcam", "hirescam", "layercam"], layers=["middle"], targets=[0, 1, 2])
    assert found.equivalent_maps == ()
    assert found.equivalence_notes == ()


def one_hot_activation():
    """Maps that are the same on this image only: a single cell is not zero, and all that reads it is positive."""
    model = Flat(nn.Sequential(nn.Identity()), 12, 2)
    with torch.no_grad():
        model.head.weight.copy_(torch.arange(1.0, 25).view(2, 12))
    x = torch.zeros(1, 3, 4)
    x[0, 1, 2] = 1.0
    return model, x


def test_maps_that_are_the_same_by_chance_are_not_explained():
    model, x = one_hot_activation()
    found = compare(model, x[None], ["eigencam", "hirescam"], layers=["features"], targets=[1])
    assert [[one.method for one in group] for group in found.equivalent_maps] == [["eigencam", "hirescam"]]
    assert found.equivalence_notes == ("Eigen-CAM and HiResCAM are one map at features: the maps are the same here",)


def test_positive_layers_make_layercam_and_the_elementwise_formula_one():
    torch.manual_seed(3)
    model, x = Flat(nn.Sequential(nn.Conv2d(3, 6, 3, 2, 1), nn.ReLU()), 6 * 16), torch.rand(3, 8, 8)
    names = ["gradcam-elementwise", "layercam", "hirescam"]
    found = compare(model, x, names, layers=["features"], targets=[0])
    assert [[one.method for one in group] for group in found.equivalent_maps] == [names[:2]]
    assert found.equivalence_notes[0].endswith("their formulas are one if nothing there is negative")
    signed = Flat(nn.Sequential(nn.Conv2d(3, 6, 3, 2, 1)), 6 * 16)
    assert compare(signed, x, names, layers=["features"], targets=[0]).equivalent_maps == ()


@quiet
def test_maps_without_evidence_coincide_with_nothing_and_two_layers_have_no_common_reason():
    model, x = CASES["pooled"].make()
    with torch.no_grad():
        model.head.weight.abs_().neg_()
    assert compare(model, x[0], ["gradcam", "hirescam"], layers=["features"], targets=[0]).equivalent_maps == ()
    with torch.no_grad():
        model.head.weight.abs_()
    tools = [
        GradCAM(model, name, layout="channels_first") for name in ("features.5", "features")
    ]  # one and the same tensor, by two names
    (sentence,) = compare(model, x[0], tools, targets=[0]).equivalence_notes
    assert sentence == "Grad-CAM at features.5 and Grad-CAM at features are one map: the maps are the same here"


def explanation(heat):
    return Explanation(np.asarray(heat, float), "m", 0, "cat", 1.0, input_size=(8, 8))


def test_correlations_are_those_of_the_displayed_maps():
    rng = np.random.default_rng(0)
    a, b = rng.integers(-3, 4, (2, 4, 4)).astype(float)  # with ties, and negative values that are not displayed
    both = [explanation(a), explanation(b), explanation(2 * np.maximum(a, 0))]
    shown = [np.maximum(one, 0).ravel() for one in (a, b)]
    ranks = [np.array([np.mean([(r < v).sum() + ((r == v).sum() + 1) / 2]) for v in r]) for r in shown]
    assert correlate_maps(both)[0, 1] == pytest.approx(np.corrcoef(*shown)[0, 1])
    assert correlate_maps(both, "spearman")[0, 1] == pytest.approx(np.corrcoef(*ranks)[0, 1])
    assert correlate_maps(both)[0, 2] == pytest.approx(1)
    np.testing.assert_array_equal(correlate_maps(both), correlate_maps(both).T)
    finer = explanation(np.maximum(a, 0).repeat(2, 0).repeat(2, 1))
    assert 0.8 < correlate_maps([both[0], finer])[0, 1] < 1  # on the finest grid of the two
    assert np.isnan(correlate_maps([both[0], explanation(np.ones((4, 4)))])[0, 1])
    with pytest.raises(InputError, match="kind='kendall'"):
        correlate_maps(both, "kendall")


# Rows, columns and the figure


@pytest.fixture(scope="module")
def net():
    return load_model("phantom")


def test_rows_are_classes_and_layers_and_a_method_without_a_layer_appears_once_a_class(net):
    scan = draw_radiograph(7, "nodule").image
    found = compare(net, scan, ["gradcam", Center, "layercam"], layers=["layer3", "layer4"], targets=["nodule", 2])
    assert found.column_labels == ("gradcam", "center", "layercam")
    assert [row.partition(" ")[0] for row in found.row_labels] == ["nodule", "nodule", "effusion", "effusion"]
    assert [row.endswith(layer) for row, layer in zip(found.row_labels, 2 * ["layer3", "layer4"], strict=True)] == 4 * [
        True
    ]
    told = [(one.label, one.layer, one.method) for one in found.explanations]
    assert told[:5] == [
        ("nodule", "layer3", "gradcam"),
        ("nodule", None, "center"),
        ("nodule", "layer3", "layercam"),
        ("nodule", "layer4", "gradcam"),
        ("nodule", "layer4", "layercam"),
    ]
    assert [label for label, _, _ in told[5:]] == 5 * ["effusion"]
    assert compare(net, scan, ["gradcam"], layers=["layer3", "layer4"]).row_labels == ("layer3", "layer4")


def test_a_map_of_several_layers_is_made_of_those_that_are_named_and_appears_once(net):
    scan, layers = draw_radiograph(7, "nodule").image, ["layer2", net.layer4]
    found = compare(net, scan, ["gradcam", "refinecam"], layers=layers, targets=["nodule", "effusion"])
    assert found.column_labels == ("gradcam", "refinecam · layer2 + layer4")
    assert len(found.row_labels) == 4
    refined = [one for one in found.explanations if one.method == "refinecam"]
    assert [(one.label, one.layer) for one in refined] == [(n, "layer2 + layer4") for n in ("nodule", "effusion")]
    np.testing.assert_array_equal(
        refined[1].attribution, RefineCAM(net, ["layer2", "layer4"]).explain(scan, "effusion").attribution
    )
    fused = Fused.at_layers(LayerCAM(net), ["layer2", "layer4"])
    columns = compare(net, scan, ["gradcam", fused], layers=layers).column_labels
    assert columns == ("gradcam", "layercam, fused · layer2 + layer4")
    assert compare(net, scan, [fused]).column_labels == ("layercam, fused",)


def test_layers_that_only_some_methods_have_are_columns(net):
    found = compare(net, draw_radiograph(7, "nodule").image, [GradCAM(net), LayerCAM(net, "layer3")])
    assert found.column_labels == ("gradcam · layer4", "layercam · layer3")
    assert len(found.row_labels) == 1


def test_one_method_with_two_settings_is_told_apart_and_a_copy_is_refused(net):
    scan = draw_radiograph(7, "nodule").image
    found = compare(net, scan, [ScoreCAM(net, n_channels=2), ScoreCAM(net, n_channels=4)])
    assert found.column_labels == ("scorecam n_channels=2", "scorecam n_channels=4")
    steep = [Denoised(ScoreCAM(net, n_channels=top)) for top in (2, 4)]
    assert compare(net, scan, steep).column_labels == (
        "scorecam, denoised n_channels=2",
        "scorecam, denoised n_channels=4",
    )
    with pytest.raises(InputError, match="gradcam is given twice"):
        compare(net, scan, ["gradcam", GradCAM])


def cells_of(found, monkeypatch):
    """What a figure hands to the sheet: the captions row by row, and the title."""
    handed = []
    monkeypatch.setattr(comparison.render, "draw_contact_sheet", lambda rows, title, **_: handed.append((rows, title)))
    found.figure()
    ((rows, title),) = handed
    return [[cell and cell.caption for cell in row] for row in rows], title


@pytest.mark.parametrize("first", [True, False], ids=["the contrast first", "the contrast last"])
def test_a_contrast_among_others_says_its_own_answer_and_nobody_elses(net, monkeypatch, first):
    contrast, others = Contrast(GradCAM(net), "nodule", "effusion"), ["gradcam", Denoised(LayerCAM(net))]
    found = compare(net, draw_radiograph(7, "nodule").image, [contrast, *others] if first else [*others, contrast])
    titles = ["Grad-CAM", "LayerCAM, denoised"]
    assert set(found.column_labels) == {"gradcam, contrast", "gradcam", "layercam, denoised"}
    (row,) = found.row_labels
    assert row.startswith("nodule (p=")
    (captions,), _ = cells_of(found, monkeypatch)
    assert captions[0] == row
    (own,) = [caption for caption in captions[1:] if caption not in titles]
    assert own.startswith("Grad-CAM, contrast · log-odds of nodule over effusion (score ")
    assert [row["method"] for row in found.to_records()] == [one.method for one in found.explanations]


def test_a_contrast_does_not_title_the_layers_of_the_others(net, monkeypatch):
    tools = [Contrast(GradCAM(net, "layer4"), "nodule", "effusion")]
    tools += [kind(net, layer) for kind in (GradCAM, LayerCAM) for layer in ("layer3", "layer4")]
    found = compare(
        net, draw_radiograph(7, "nodule").image, [*tools, Contrast(GradCAM(net, "layer3"), "nodule", "effusion")]
    )
    captions, title = cells_of(found, monkeypatch)
    assert title.startswith("array · nodule (p=")
    assert [row[0] for row in captions] == ["layer4", "layer3"]
    assert all(row[1].startswith("Grad-CAM, contrast · log-odds of nodule over") for row in captions)
    assert [row[2:] for row in captions] == 2 * [["Grad-CAM", "LayerCAM"]]


def squares(figure, width):
    """Tops and lefts of the pictures: runs of ink of one width, which the paper's white separates."""
    inked = (figure != 255).any(2)
    rows = [(a, b) for a, b in runs(inked.mean(1) > 0.25) if b - a >= width // 2]
    return [
        [(top, left) for left, right in runs(inked[top:bottom].mean(0) > 0.5) if right - left > width // 2]
        for top, bottom in rows
    ]


def runs(flags):
    edges = np.flatnonzero(np.diff(np.concatenate([[0], flags, [0]])))
    return list(zip(edges[::2], edges[1::2], strict=True))


def hot(picture):
    return (picture == INFERNO_TOP).all(2)


def test_the_figure_shows_the_image_and_then_its_maps_row_by_row(net):
    scan = draw_radiograph(7, "nodule").image
    found = compare(net, scan, ["gradcam", Center, "layercam"], layers=["layer3", "layer4"], targets=["nodule"])
    figure = found.figure(alpha=1.0, height=128)
    lines = squares(figure, 128)
    assert [len(line) for line in lines] == [4, 3]  # a hole where the method without a layer has said all
    assert {left for _, left in lines[1]} == {left for n, (_, left) in enumerate(lines[0]) if n != 2}
    photo = scan[..., None].repeat(3, 2)
    for line in lines:
        top, left = line[0]
        np.testing.assert_array_equal(figure[top : top + 128, left : left + 128], photo)
        assert all(hot(figure[top : top + 128, left : left + 128]).any() for top, left in line[1:])
    header = figure[: lines[0][0][0]]
    assert hot(header).any()  # one legend for all
    assert not hot(figure[:, lines[0][-1][1] + 128 :]).any()
    wide = found.figure(columns=2, height=128)
    assert [len(line) for line in squares(wide, 128)] == [2, 2, 2, 1]


def test_a_shared_scale_is_shared_by_the_classes_of_one_method_only(net):
    scan = draw_radiograph(7, "nodule").image
    found = compare(net, scan, ["gradcam", "gradcam++"], targets=["nodule", "effusion"])
    tops = [one.attribution.max() for one in found.explanations]
    weaker = int(np.argmin([tops[0], tops[2]]))
    own, shared = (found.figure(scale=scale, alpha=1.0, height=128) for scale in ("max", "shared"))
    for figure, expected in ((own, True), (shared, False)):
        top, left = squares(figure, 128)[weaker][1]
        assert hot(figure[top : top + 128, left : left + 128]).any() == expected
        top, left = squares(figure, 128)[1 - weaker][1]
        assert hot(figure[top : top + 128, left : left + 128]).any()
    scales = shared_scales(found.explanations)
    assert scales[0] == scales[2] == (0.0, pytest.approx(max(tops[0], tops[2]), rel=0.05))
    assert scales[1] == scales[3] != scales[0]
    assert shared_scales(found.explanations, "diverging")[0][0] < 0


def test_what_the_model_was_not_shown_is_left_out_or_marked(net):
    scan = draw_radiograph(7, "nodule").image
    wide = np.pad(scan, ((0, 0), (64, 64)), mode="edge")
    way = Preprocess(resize=len(scan), crop=(len(scan), len(scan)), mean=(0.55,), std=(0.2,), channels=1)
    found = compare(net, wide, ["gradcam"], preprocess=way, targets=[1])
    whole, part = found.figure(crop=False, height=128), found.figure(height=128)
    assert whole.shape[1] - part.shape[1] == 2 * 128
    top, left = squares(part, 128)[0][0]
    np.testing.assert_array_equal(part[top : top + 128, left : left + 128], scan[..., None].repeat(3, 2))


def test_a_flag_is_on_its_own_map_and_a_tensor_has_a_figure_too():
    model, x = CASES["pooled"].make()
    with torch.no_grad():
        model.head.weight[0].abs_().neg_()
        model.head.weight[1].abs_()
    with pytest.warns(CamscopeWarning, match="Grad-CAM: nothing in the map is positive"):
        found = compare(model, x[0], ["gradcam"], layers=["features"], targets=[0, 1])
    amber = (found.figure() == (255, 191, 0)).all(2)
    half = found.figure().shape[0] // 2
    assert amber[:half].any()
    assert not amber[half + 40 :].any()


def test_it_is_saved_and_shown_in_a_notebook(net, tmp_path):
    found = compare(net, draw_radiograph(7, "nodule").image, ["gradcam", "hirescam"])
    assert found.save(tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(OutputError, match="exists"):
        found.save(tmp_path / "a.png", overwrite=False)
    with pytest.raises(OutputError, match="cannot write"):
        found.save(tmp_path / "a.gif")
    page = found._repr_html_()
    assert "Grad-CAM and HiResCAM are one map" in page
    assert "data:image/png;base64," in page
    assert len(repr(found)) < 300


@pytest.mark.slow
@quiet
@pytest.mark.parametrize("case", ["signal", "volume"])
def test_a_signal_and_a_volume_have_a_figure_of_their_own_kind(case, tmp_path):
    model, x = CASES[case].make()
    found = compare(model, x[0], ["gradcam", "hirescam"], layers=["features"], targets=[1])
    assert found.correlate_maps().shape == (2, 2)
    first, own = found._build_figure_cells([one.overlay() for one in found.explanations], ["max"] * 2, None)[0][:2]
    assert first.caption == found.row_labels[0]
    np.testing.assert_array_equal(first.image, found.explanations[0].overlay(alpha=0))
    assert first.image.shape == own.image.shape
    np.testing.assert_array_equal(np.asarray(Image.open(found.save(tmp_path / "a.png"))), found.figure())
    assert notebook_picture(found).std() > 0
    for refused in (found.explanations[0].boxes, found.explanations[0].contours):
        with pytest.raises(InputError, match=r"the map .* has (1 axis|3 axes); outlines and boxes need 2 axes"):
            refused()


# What goes wrong


def test_a_method_without_an_answer_is_an_error_or_left_out(net):
    scan = draw_radiograph(7, "nodule").image
    with pytest.raises(LayerError, match="no linear head"):
        compare(net, scan, ["gradcam", Unsuited])
    with pytest.warns(CamscopeWarning, match="unsuited is left out: no linear head"):
        found = compare(net, scan, ["gradcam", Unsuited, "layercam"], skip_unsupported=True)
    assert found.column_labels == ("gradcam", "layercam")
    with pytest.raises(TargetError, match="class 9 is out of range"):
        compare(net, scan, ["gradcam", "layercam"], targets=[9], skip_unsupported=True)
    tools, answers = explain_supported([GradCAM(net), LayerCAM(net)], scan, [None])
    assert [[len(tools)], [row[0].method for row in answers]] == [[2], ["gradcam", "layercam"]]


class Unasked(BaseCAM):
    """A method that has no answer to any question: the shared pass fails with it."""

    name, paper = "unasked", "arXiv:0000.00000"

    def compute_differentiated_score(self, score, output, n_samples):
        raise TargetError("another question")

    def weights(self, activation, gradient):
        return gradient


def passes_of(methods, **keywords):
    """The passes of a comparison with the unsuited left out, and the comparison."""
    model, x = CASES["pooled"].make()
    counting = Counting(model)
    found = compare(counting, x[0], methods, layers=["model.features"], skip_unsupported=True, **keywords)
    return (counting.forwards, counting.backwards, counting.rows), found


@quiet
def test_one_without_an_answer_costs_the_others_nothing_and_takes_no_reason_from_them():
    names = ["gradcam", "sscam", "hirescam", "xgradcam"]
    price, found = passes_of(names, targets=[0, 1])
    for unsuited in (Unsuited, Ready):
        price_too, found_too = passes_of([names[0], unsuited, *names[1:]], targets=[0, 1])
        assert price_too == price
        assert found_too.equivalence_notes == found.equivalence_notes
        for one, other in zip(found.explanations, found_too.explanations, strict=True):
            np.testing.assert_array_equal(one.attribution, other.attribution)


@quiet
def test_one_that_fails_the_shared_pass_costs_only_some_of_those_again():
    names = ["gradcam", "sscam", "hirescam", "xgradcam"]
    (_, _, rows), found = passes_of(names, targets=[0, 1])
    (_, _, more), found_too = passes_of([*names, Unasked], targets=[0, 1])
    assert more - rows < 10 < rows  # what SS-CAM asks is asked once
    assert found_too.equivalence_notes == found.equivalence_notes
    assert [one.method for one in found_too.explanations] == [one.method for one in found.explanations]


def test_what_is_left_out_is_named_with_its_layer(net):
    scan = draw_radiograph(7, "nodule").image
    with pytest.warns(CamscopeWarning) as caught:
        found = compare(net, scan, ["gradcam", "cam"], layers=["layer3", "layer4"], skip_unsupported=True)
    (said,) = [str(one.message) for one in caught if "left out" in str(one.message)]
    assert said.startswith("CAM at layer3 is left out: ")
    assert [one.layer for one in found.explanations if one.method == "cam"] == ["layer4"]


def test_what_is_no_list_is_refused(net):
    scan = draw_radiograph(7, "nodule").image
    for wrong in ({"methods": "gradcam"}, {"layers": "layer4"}):
        with pytest.raises(InputError, match="must be lists"):
            compare(net, scan, **wrong)
    with pytest.raises(LayerError, match="layers is empty: pass at least one layer"):
        compare(net, scan, layers=[])
    with pytest.raises(LayerError, match="no layer 'nope'"):
        compare(net, scan, ["center"], layers=["nope"])
    with pytest.raises(TargetError, match="targets must be a list"):
        compare(net, scan, targets="nodule")
    with pytest.raises(InputError, match="nearest names: gradcam"):
        compare(net, scan, ["gradcma"])
    with pytest.raises(InputError, match="have different models"):
        compare(net, scan, ["gradcam", GradCAM(Pooled(conv(), 6), "features")])


@pytest.mark.skipif(not DATA.exists(), reason="../shared/data is not here")
@pytest.mark.thorough  # the nets above have equal maps, and others
def test_trained_weights_and_a_photograph():
    sys.path.insert(0, str(DATA))
    try:
        import models
    finally:
        sys.path.remove(str(DATA))
    photo = min((DATA / "photos" / "images").iterdir())
    names = ["gradcam", "xgradcam", "hirescam", "layercam"]
    found = compare(models.resnet18(), photo, names, layers=["layer3", "layer4"], preprocess="imagenet")
    said = {group[0].layer: [one.method for one in group] for group in found.equivalent_maps}
    assert said == {"layer4": ["gradcam", "xgradcam", "hirescam"]}
    vit = compare(models.deit_tiny(), photo, names[:3], preprocess="imagenet")
    assert vit.equivalent_maps == ()  # the class token is read, not the mean: the gradient differs from cell to cell
