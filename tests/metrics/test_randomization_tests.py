"""Sanity: parts lose what they learnt, the user's model loses nothing; an edge detector fails, Grad-CAM passes."""

import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from torch import nn

from camscope.errors import InputError, LayerError, ModelError, OutputError, TargetError, UndefinedError
from camscope.explainers import CenterGaussian, Denoised, EdgeDetector, GradCAM, InputXGradient, Saliency
from camscope.explainers.control_methods import BaseControl
from camscope.metrics import (
    METRICS,
    RandomizationResult,
    average_precision,
    random_logit,
    randomize_weights,
    run_randomization_test,
)
from camscope.metrics.weight_randomization import randomize_modules, split_model
from camscope.models import load_model
from camscope.phantom import draw_radiograph, load_phantom_model, to_model_input
from camscope.render.randomization_figure import SimilarityCurve, _colorize_map, draw_randomization_figure
from tests.nets import CASES, Flat, Tokens
from tests.pictures import notebook_picture
from tests.untouched import untouched

pytestmark = pytest.mark.filterwarnings("ignore::camscope.errors.CamscopeWarning")
DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
FINDINGS = ("nodule", "effusion", "pneumothorax")


@pytest.fixture(scope="module")
def net():
    return load_phantom_model()


@pytest.fixture(scope="module")
def scans():
    return torch.cat([to_model_input(draw_radiograph(i, FINDINGS[i % 3]).image[None]) for i in range(12)])


# What the parts are, and how they lose their values


def test_the_parts_go_from_the_output_to_the_input(net, scans):
    names = [one.name for one in split_model(net, scans[:1])]
    assert names == ["fc", "layer4.0", "layer3.0", "layer2.0", "layer1.0", "bn1", "conv1"]
    every = [name for one in split_model(net, scans[:1]) for name in one.module_names]
    holders = [name for name, module in net.named_modules() if list(module.parameters(recurse=False))]
    assert sorted(every) == sorted(holders)
    (whole,) = split_model(net, max_parts=1)
    assert (whole.name, sorted(whole.module_names)) == ("PhantomNet", sorted(holders))
    assert len(split_model(net, scans[:1], max_parts=100)) == len(holders)


class Backwards(nn.Module):
    """Its layers are written in the opposite order to that in which they run; one is never called by itself."""

    def __init__(self):
        super().__init__()
        self.head, self.second, self.first = nn.Linear(4, 2), nn.Conv2d(4, 4, 1), nn.Conv2d(3, 4, 1)
        self.scale = nn.Parameter(torch.arange(4.0))
        self.unused = nn.Linear(2, 2)

    def forward(self, x):
        return self.head((self.second(self.first(x)) * self.scale.view(-1, 1, 1)).mean((2, 3)))


def test_the_order_is_that_in_which_they_run():
    names = [one.name for one in split_model(Backwards(), torch.ones(1, 3, 2, 2))]
    assert names[:3] == ["head", "second", "first"]
    assert set(names[3:]) == {"Backwards", "unused"}  # what runs with the whole comes last


def test_a_part_is_asked_for_its_own_start_and_else_its_values_change_places():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.PReLU(4), Tokens(), nn.BatchNorm2d(2, affine=False))
    for value in [*model.parameters(), *model.buffers()]:
        value.data = torch.arange(value.numel()).view(value.shape).to(value.dtype) + 2
    before = {name: value.clone() for name, value in model.named_parameters()}
    (whole,) = split_model(model, max_parts=1)
    randomize_modules(model, whole.module_names, 5)
    assert model[0].weight.abs().max() <= 1 / np.sqrt(27)  # as PyTorch draws a convolution with 27 inputs
    assert torch.equal(model[1].weight, torch.ones(4))
    assert torch.equal(model[1].bias, torch.zeros(4))
    for norm in (model[1], model[4]):
        assert torch.equal(norm.running_mean, torch.zeros_like(norm.running_mean))
        assert torch.equal(norm.running_var, torch.ones_like(norm.running_var))
    assert torch.equal(model[2].weight, torch.full((4,), 0.25))
    for name in ("3.prefix", "3.attention.in_proj_weight"):
        value = model.get_parameter(name)
        assert torch.equal(value.flatten().sort().values, before[name].flatten().sort().values)
        assert not torch.equal(value, before[name])
    assert model[3].attention.out_proj.weight.abs().max() < 1


def test_draws_are_of_the_seed_and_nobody_elses():
    made = []
    for seed in (1, 1, 2):
        model, state = nn.Linear(3, 3), torch.get_rng_state()
        randomize_modules(model, [""], seed)
        assert torch.equal(torch.get_rng_state(), state)
        made.append(model.weight.detach())
    assert torch.equal(made[0], made[1])
    assert not torch.equal(made[0], made[2])


@pytest.mark.slow
@pytest.mark.parametrize("kind", [GradCAM, lambda net: Denoised(GradCAM(net)), InputXGradient])
@pytest.mark.one_in(2)
def test_the_users_model_is_not_touched(net, scans, kind):
    tool, x = kind(net), scans[:2]
    with untouched(net, x):
        first = run_randomization_test(tool, x, seeds=[0], layers=["fc", net.layer4])
    with untouched(net, x):
        again = run_randomization_test(tool, x, seeds=[0], layers=["fc", net.layer4])
    assert first.part_names == ("fc", "layer4")
    for name in first.similarities:
        np.testing.assert_array_equal(first.similarities[name], again.similarities[name])
    with untouched(net, x):
        other = randomize_weights(tool, 3)
    assert other.model is not net
    assert not torch.equal(other.model.fc.weight, net.fc.weight)
    assert tool.model is net


class Breaking(BaseControl):
    """An error in the middle: the third call."""

    name, paper, calls = "breaking", "", 0

    def control_map(self, x):
        type(self).calls += 1
        if self.calls == 3:
            raise RuntimeError("in the middle")
        return x[:, 0]


@pytest.mark.slow
def test_the_users_model_is_not_touched_by_an_error_either(net, scans):
    with untouched(net, scans), pytest.raises(RuntimeError, match="in the middle"):
        run_randomization_test(Breaking(net), scans)
    with untouched(net, scans), pytest.raises(TargetError, match="class 9 is out of range"):
        run_randomization_test(GradCAM(net), scans, 9)
    with untouched(net, scans), pytest.raises(LayerError, match="no layer 'layr4'"):
        run_randomization_test(GradCAM(net), scans, layers=["layr4"])


def test_a_model_that_cannot_be_copied_is_an_error():
    class Uncopied(Flat):
        def __deepcopy__(self, memo):
            raise TypeError("it holds a file")

    model = Uncopied(nn.Identity(), 75)
    with pytest.raises(ModelError, match=r"Uncopied cannot be copied \(it holds a file\)"):
        randomize_weights(Saliency(model))


# The verdict


@pytest.mark.slow
def test_the_edge_detector_fails_and_gradcam_passes_on_every_seed(net, scans):
    edges = run_randomization_test(EdgeDetector(net), scans[:5], n_depths=2)
    assert not edges.passes
    assert [one.reason for one in edges.verdicts.values()] == 3 * ["the map is still the same"]
    for values in edges.similarities.values():
        np.testing.assert_allclose(values, 1.0)
    found = run_randomization_test(GradCAM(net), scans[:5], seeds=range(5), n_depths=2)
    assert found.passes
    runs = [
        replace(found, seeds=(seed,), similarities={name: each[[seed]] for name, each in found.similarities.items()})
        for seed in range(5)
    ]
    assert sum(run.passes for run in runs) >= 4
    assert found.compute_mean_curve("spearman")[-1] < 0.2 < edges.compute_mean_curve("spearman")[-1]


def test_a_map_that_is_the_same_for_every_image_fails_too(net, scans):
    found = run_randomization_test(CenterGaussian(net), scans[:5], seeds=[0], layers=[net])
    assert found.null_intervals["ssim"] == pytest.approx((1.0, 1.0, 1.0))
    assert not found.passes


class Noise(BaseControl):
    """Drawn anew for every model and every image."""

    name, paper = "noise", ""

    def control_map(self, x):
        mark = int(1e6 * float(self.model.conv1.weight.sum()))
        return torch.rand(x[:, 0].shape, generator=torch.Generator().manual_seed(mark % 2**40))


@pytest.mark.slow
def test_noise_passes_which_is_no_merit(net, scans):
    assert run_randomization_test(Noise(net), scans, layers=[net]).passes


def told(values, null, order="cascading"):
    """A test of one similarity, (seeds,steps,N), with one value for all pairs of different images."""
    values = np.asarray(values, float)
    pairs = np.full((values.shape[2], values.shape[2]), float(null))
    np.fill_diagonal(pairs, np.nan)
    steps = tuple(f"layer{k}" for k in range(values.shape[1]))
    maps = np.ones((1 + len(steps), 8, 8))
    return RandomizationResult(
        "m", order, steps, tuple(range(len(values))), {"spearman": values}, {"spearman": pairs}, False, maps
    )


def test_verdicts_by_hand():
    falls = told([[[0.9, 0.7, 0.8, 0.8, 0.8], [0.2, 0.4, 0.0, 0.2, 0.2]], [[0.6] * 5, [0.2, 0.4, 0.0, 0.1, 0.3]]], 0.3)
    np.testing.assert_allclose(falls.compute_mean_curve("spearman"), [1.0, 0.7, 0.2])
    low, high = falls.compute_seed_range("spearman")
    np.testing.assert_allclose([low, high], [[1.0, 0.6, 0.2], [1.0, 0.8, 0.2]])
    assert falls.passes
    assert falls.verdicts["spearman"][:4] == (True, pytest.approx(0.2), pytest.approx(0.3), pytest.approx(0.3))
    assert "less similar than" in falls.verdicts["spearman"].reason
    stays = told([[[0.2] * 5, [0.3, 0.4, 0.5, 0.4, 0.4]]], 0.3)
    assert not stays.passes
    assert "more similar than" in stays.verdicts["spearman"].reason
    same = told([[[0.99, 0.98, 1.0, 1.0, 1.0]]], 1.0)
    assert (same.passes, same.verdicts["spearman"].reason) == (False, "the map is still the same")


@pytest.mark.slow
def test_a_part_of_the_model_is_no_end(net, scans):
    found = run_randomization_test(Saliency(net), scans[:5], seeds=[0], layers=["fc", "layer4"])
    with pytest.raises(UndefinedError, match="some trained weights are left"):
        _ = found.passes
    every = ["fc", "layer4", "layer3", "layer2", "layer1", "bn1", "conv1"]
    assert run_randomization_test(Saliency(net), scans[:5], seeds=[0], layers=every).no_verdict_reason == ""


def test_four_images_are_no_null():
    few = told([[[0.1] * 4]], 0.3)
    with pytest.raises(UndefinedError, match=r"4 images are too few .* pass 5 or more"):
        _ = few.passes
    assert few.summary.startswith("m, cascading randomization, no verdict (4 images")
    assert few.figure().shape[2] == 3


def test_maps_without_a_number_are_counted_and_too_many_neither_pass_nor_fail():
    few, many = told([[[0.1, np.nan, 0.2, 0.1, 0.2]]], 0.3), told([[[0.1, 0.1, *3 * [np.nan]]]], 0.3)
    assert (few.passes, few.n_undefined, few.compute_mean_curve("spearman")[-1]) == (True, 1, pytest.approx(0.15))
    assert (many.passes, many.n_undefined) == (None, 3)
    assert "nothing to compare" in many.verdicts["spearman"].reason
    for other, passes in (
        (0.1, None),
        (1.0, False),
    ):  # of two similarities one that fails decides, one that passes does not
        both = {**many.similarities, "hog": np.full((1, 1, 5), other)}
        assert (
            replace(
                many,
                similarities=both,
                null_similarities={**many.null_similarities, "hog": many.null_similarities["spearman"]},
            ).passes
            is passes
        )
    none = told([[[np.nan] * 5]], np.nan)
    assert none.passes is None
    assert none.summary.startswith("m, cascading randomization, no verdict (5 images")
    assert np.isnan(none.null_intervals["spearman"]).all()
    assert none.figure().shape[2] == 3


def test_the_null_is_of_means_over_as_many_pairs_as_images():
    random = np.random.default_rng(0)
    pairs = random.random((20, 20))
    np.fill_diagonal(pairs, np.nan)
    found = RandomizationResult(
        "m", "cascading", ("a",), (0,), {"hog": np.zeros((1, 1, 20))}, {"hog": pairs}, False, np.ones((2, 8, 8))
    )
    low, middle, high = found.null_intervals["hog"]
    assert middle == pytest.approx(np.nanmean(pairs))
    error = 1 / np.sqrt(12 * 20)  # of a mean of twenty even draws
    assert high - low == pytest.approx(2 * 1.96 * error, rel=0.15)


@pytest.mark.slow
def test_one_part_at_a_time(net, scans):
    cascade = run_randomization_test(GradCAM(net), scans[:3], seeds=[4], layers=["fc", "layer4"])
    single = run_randomization_test(GradCAM(net), scans[:3], seeds=[4], layers=["fc", "layer4"], order="independent")
    np.testing.assert_array_equal(cascade.similarities["hog"][:, 0], single.similarities["hog"][:, 0])
    assert not np.array_equal(cascade.similarities["hog"][:, 1], single.similarities["hog"][:, 1])
    with pytest.raises(UndefinedError, match="only the cascading order"):
        _ = single.passes
    behind = run_randomization_test(GradCAM(net, "layer3"), scans[:3], seeds=[4], layers=["conv1"], order="independent")
    assert behind.compute_mean_curve("hog")[-1] < 1


class Broken(BaseControl):
    """NaN for the second sample of the input, once the model has lost its values; zeros for the third."""

    name, paper = "broken", ""

    def control_map(self, x):
        heat = x[:, 0].clone()
        if self.model is not Broken.own:
            marks = x[:, 0, 0, 0]
            heat[marks == 2] = torch.nan
            heat[marks == 3] = 0.0
        return heat


def test_nan_and_zeros_of_a_random_net_cost_only_their_own_numbers(net):
    x = torch.randn(4, 1, 128, 128)
    x[:, 0, 0, 0] = torch.arange(1.0, 5.0)
    Broken.own = net
    found = run_randomization_test(
        Broken(net), x, seeds=[0], layers=["fc"], similarities=["ssim", "spearman", "hog", "pearson"]
    )
    for values in found.similarities.values():
        np.testing.assert_array_equal(np.isnan(values[0, 0]), [False, True, True, False])
        np.testing.assert_allclose(values[0, 0, [0, 3]], 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["signal", "volume", "tokens"])
@pytest.mark.one_in(2)
def test_any_number_of_axes(case):
    model, x = CASES[case].make()
    found = run_randomization_test(Saliency(model), torch.cat([x, -x, x.flip(-1), -x.flip(-1)]), 1, seeds=[0])
    assert set(found.similarities) == {"ssim", "spearman"}  # these have no room for a picture's histograms
    assert found.figure().shape[2] == 3
    assert f"<Saliency, cascading randomization: {'passes' if found.passes else 'fails'} ({4 * len(x)} images" in repr(
        found
    )


def test_questions_are_the_trained_models(net, scans):
    seen = []

    class Told(Saliency):
        def compute_maps(self, x, scores):
            made = super().compute_maps(x, scores)
            seen.append(scores[0].classes.tolist())
            return made

    run_randomization_test(Told(net), scans[:3], seeds=[0, 1], layers=["fc"])
    assert seen == 3 * [net(scans[:3]).argmax(1).tolist()]


# Another class, and no training at all


def test_another_class_by_hand():
    model = Flat(nn.Identity(), 30, 2).double()
    x = torch.randn(1, 1, 5, 6, dtype=torch.float64)
    model.head.weight.data[1] = -model.head.weight.data[0]
    assert random_logit(InputXGradient(model), x, 0) == pytest.approx(-1.0)
    assert random_logit(Saliency(model), x, 0) == pytest.approx(1.0)  # sizes: the same for both
    assert random_logit(EdgeDetector(model), x, 0) == pytest.approx(1.0)
    assert random_logit(InputXGradient(model), x, 0, other_target=1, similarity="pearson") == pytest.approx(-1.0)
    model.head.weight.data[1] = 0
    with pytest.raises(UndefinedError, match="the map of class 1 is zero everywhere"):
        random_logit(InputXGradient(model), x, 0)
    with pytest.raises(TargetError, match="pass other_target="):
        random_logit(InputXGradient(model), x, lambda output: output[:, 0])
    assert METRICS["random-logit"].input_kind == "explainer"


@pytest.mark.slow
def test_the_other_class_is_any_but_the_first():
    model = Flat(nn.Identity(), 4, 5).double()
    model.head.weight.data[:] = torch.tensor([[1.0, 2, 3, 4], [1, 2, 4, 3], [1, 4, 3, 2], [4, 3, 2, 1], [2, 1, 4, 3]])
    x = torch.ones(1, 1, 2, 2, dtype=torch.float64)
    found = {round(random_logit(InputXGradient(model), x, 0, seed=seed), 6) for seed in range(40)}
    assert found == {0.8, 0.2, -1.0, 0.6}


@pytest.mark.slow
def test_an_untrained_net_finds_nothing(net):
    cases = [draw_radiograph(i, "nodule") for i in range(6)]
    x = torch.cat([to_model_input(one.image[None]) for one in cases])

    def found(tool):
        heats = [one.heatmap("input") for one in tool.explain_batch(list(x), 1)]
        return np.mean([average_precision(heat, one.mask) for heat, one in zip(heats, cases, strict=True)])

    assert found(randomize_weights(GradCAM(net))) < 0.15 < 0.4 < found(GradCAM(net))


# The picture


@pytest.mark.slow
def test_the_picture_shows_each_step(net, scans, tmp_path):
    found = run_randomization_test(GradCAM(net), scans[:3], seeds=[0], layers=["fc", "layer4"])
    picture = found.figure()
    curve, band = ((picture == color).all(2) for color in ((38, 84, 160), (247, 224, 176)))
    blue = np.flatnonzero(curve.sum(0) > 12)  # where three curves have their points
    assert [round((column - blue[0]) / 128) for column in (blue[0], blue[len(blue) // 2], blue[-1])] == [0, 1, 2]
    assert (band.sum(1) > 300).sum() > 3  # the interval of the null
    assert found.save_figure(tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert notebook_picture(found).std() > 0
    with pytest.raises(OutputError, match="cannot write"):
        found.save_figure(tmp_path / "a.gif")
    assert "fc " in repr(found)


@pytest.mark.slow
def test_gaps_are_left_out_and_curves_have_their_levels():
    gap, flat = np.array([1.0, np.nan, 0.5]), np.full(3, 0.5)
    curve = SimilarityCurve("ssim", gap, gap, gap, (0.0, 0.1, 0.2), None, "")
    picture = draw_randomization_figure("m", ["a", "b"], np.zeros((3, 4, 4)), [curve])
    rows, columns = np.nonzero((picture == (38, 84, 160)).all(2))
    middle = 90 + 192  # of the second step, which has no value
    assert columns.min() < middle - 100
    assert columns.max() > middle + 100
    assert not (np.abs(columns - middle) < 60).any()
    full = draw_randomization_figure("m", ["a", "b"], np.zeros((3, 4, 4)), [curve._replace(mean_values=flat)])
    assert np.nonzero((full == (38, 84, 160)).all(2))[0].mean() == pytest.approx(rows[columns > middle].mean(), abs=1)
    pale = draw_randomization_figure(
        "m", ["a", "b"], np.zeros((3, 4, 4)), [curve._replace(seed_low=flat, seed_high=flat + 0.3)]
    )
    assert not np.array_equal(pale, picture)


@pytest.mark.parametrize(("shape", "size"), [((40, 80), (40, 80)), ((8,), (2, 8)), ((5, 6, 7), (6, 7))])
def test_a_thumbnail_has_its_peak_where_the_map_has_it(shape, size):
    attribution = np.zeros(shape)
    attribution[..., -2] = 1.0
    tile = _colorize_map(attribution)
    assert tile.shape == (*size, 3)
    assert (tile[:, -2] == (252, 255, 164)).all()
    assert (tile[:, :-2] == (0, 0, 4)).all()


def read_pages_of_metrics():
    docs = Path(__file__).resolve().parents[2] / "docs"
    pages = [docs / "explanation" / "metrics.md", *sorted((docs / "explanation" / "metrics").glob("*.md"))]
    return "\n".join(place.read_text(encoding="utf-8") for place in [*pages, docs / "how-to" / "evaluate.md"])


def test_the_pages_name_every_metric():
    named = set(re.findall(r"^\| (`[a-z-]+`(?:, `[a-z-]+`)*)", read_pages_of_metrics(), re.MULTILINE))
    told_of = {name for row in named for name in re.findall(r"[a-z-]+", row)} | {"random-logit"}
    assert set(METRICS) <= told_of


@pytest.mark.thorough  # tests/docs/test_page_code.py runs the code of each of these pages
def test_the_code_in_the_page_runs(net, scans, tmp_path, monkeypatch):
    page = read_pages_of_metrics()
    code = "\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL))
    case = draw_radiograph(7, "nodule")
    names = {"model": load_model("phantom"), "scan": case.image, "mask": case.mask, "x": scans[:1], "images": scans[:5]}
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos").mkdir()
    for n in range(2):
        Image.fromarray(draw_radiograph(n, "nodule").image).save(tmp_path / "photos" / f"{n}.png")
    exec(code, names)
    assert (tmp_path / "compared.pdf").read_bytes().startswith(b"%PDF")
    assert (tmp_path / "sanity.png").stat().st_size > 10_000


@pytest.mark.slow
def test_refused(net, scans):
    for call, error, words in (
        (lambda: run_randomization_test(GradCAM(net), scans[:1]), InputError, "expected two images or more"),
        (lambda: run_randomization_test(GradCAM(net), scans, seeds=[]), InputError, "pass at least one of each"),
        (lambda: run_randomization_test(GradCAM(net), scans, seeds=[0.5]), InputError, "seeds=0.5"),
        (lambda: run_randomization_test(GradCAM(net), scans, order="bottom-up"), InputError, "order='bottom-up'"),
        (
            lambda: run_randomization_test(GradCAM(net), scans, similarities=["jaccard"]),
            InputError,
            "unknown similarity 'jaccard'",
        ),
        (
            lambda: run_randomization_test(GradCAM(net), scans, layers=["relu"]),
            LayerError,
            "layer 'relu' has no parameters",
        ),
        (lambda: run_randomization_test(GradCAM(net), scans, layers=[]), LayerError, "layers is empty"),
        (lambda: randomize_weights(EdgeDetector(Flat(nn.Identity(), 4)), seed="a"), InputError, "seed='a'"),
        (lambda: split_model(nn.Sequential(nn.ReLU())), ModelError, "has no parameters"),
    ):
        with pytest.raises(error, match=words):
            call()


@pytest.mark.skipif(not DATA.exists(), reason="../shared/data is not here")
@pytest.mark.thorough  # test_the_edge_detector_fails_and_gradcam_passes_on_every_seed asks the same of phantoms
def test_on_photographs_the_edge_detector_fails_and_gradcam_passes():
    from torchvision import transforms

    sys.path.insert(0, str(DATA))
    try:
        import models
    finally:
        sys.path.remove(str(DATA))
    way = transforms.Compose(
        [
            transforms.Resize(256),
            transforms.CenterCrop(224),
            transforms.ToTensor(),
            transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        ]
    )
    photos = sorted((DATA / "photos" / "images").iterdir())[::5]
    x = torch.stack([way(ImageOps.exif_transpose(Image.open(path)).convert("RGB")) for path in photos])
    model = models.resnet18()
    found = run_randomization_test(
        GradCAM(model), x, seeds=range(5), layers=[model]
    )  # the last step of a cascade, at once
    curves = found.similarities.items()
    each = [replace(found, seeds=(n,), similarities={name: runs[[n]] for name, runs in curves}) for n in range(5)]
    assert sum(one.passes for one in each) >= 4
    assert not run_randomization_test(EdgeDetector(model), x, seeds=[0], layers=[model]).passes


@pytest.mark.slow
def test_fewer_depths_are_the_same_steps_to_the_bit(net, scans):
    tool = GradCAM(net, "layer4")
    every = run_randomization_test(tool, scans[:2], 1, seeds=(0, 1), similarities=("spearman",))
    count = len(every.part_names)
    few = run_randomization_test(tool, scans[:2], 1, seeds=(0, 1), similarities=("spearman",), n_depths=3)
    steps = [0, round((count - 1) / 2), count - 1]
    assert few.part_names == tuple(every.part_names[step] for step in steps)
    np.testing.assert_array_equal(few.similarities["spearman"], every.similarities["spearman"][:, steps])
    assert few.covers_whole_model
    last = run_randomization_test(tool, scans[:2], 1, seeds=(0,), similarities=("spearman",), n_depths=1)
    assert last.part_names == every.part_names[-1:]
    apart = run_randomization_test(tool, scans[:2], 1, order="independent", seeds=(0,), similarities=("spearman",))
    some = run_randomization_test(
        tool, scans[:2], 1, order="independent", seeds=(0,), similarities=("spearman",), n_depths=3
    )
    np.testing.assert_array_equal(some.similarities["spearman"], apart.similarities["spearman"][:, steps])
    with pytest.raises(InputError, match="n_depths"):
        run_randomization_test(tool, scans[:2], 1, n_depths=0)
