"""Quantus as a second opinion, where it is installed and the definitions agree: docs/explanation/metrics/faithfulness.md."""

import numpy as np
import pytest
import torch
from torch import nn

from camscope.metrics import METRICS, PerturbationTest, removal_curve, scoring_scope
from camscope.metrics.imputation import impute_linearly

quantus = pytest.importorskip("quantus", reason="Quantus is not installed: it is compared with where it is")
pytestmark = pytest.mark.filterwarnings("ignore")
SIDE = 8


class Precise(nn.Sequential):
    """Works in float64 on what Quantus hands over in float32."""

    def forward(self, x):
        return super().forward(x.double())


@pytest.fixture(scope="module")
def given():
    """A small net in float64, five images of one channel, the classes asked for, and maps without ties."""
    torch.manual_seed(0)
    model = Precise(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(4 * 36, 3)).double().eval()
    x = torch.randn(5, 1, SIDE, SIDE).double()
    return model, x, [0, 1, 2, 0, 1], torch.randn(5, SIDE, SIDE, dtype=torch.float64)


def theirs(metric, given, softmax):
    """What Quantus says of the same."""
    model, x, classes, heat = given
    return metric(model, x.numpy(), np.array(classes), heat.numpy()[:, None], softmax=softmax, device="cpu")


def trial(given, scores, **settings):
    return PerturbationTest(given[3], scores, imputation="zero", **settings)


QUIET = {"perturb_baseline": 0.0, "disable_warnings": True, "normalize": False}


def test_pixel_flipping_is_the_deletion_curve(given, monkeypatch):
    monkeypatch.setattr(np, "trapz", np.trapezoid, raising=False)  # a name that NumPy 2 has dropped
    model, x, classes, _ = given
    found = np.array(theirs(quantus.PixelFlipping(features_in_step=4, **QUIET), given, softmax=True))
    areas = theirs(quantus.PixelFlipping(features_in_step=4, return_auc_per_sample=True, **QUIET), given, softmax=True)
    with scoring_scope(model, x, classes) as scores:
        own = removal_curve(trial(given, scores, n_steps=16))
        area = METRICS["deletion"](trial(given, scores, n_steps=16)).array
    np.testing.assert_allclose(own[:, 1:], found, atol=1e-6)  # theirs leaves out the image itself
    first = (own[:, 0] + own[:, 1]).numpy() / 2
    np.testing.assert_allclose(area, (np.array(areas) + first) / 16, atol=1e-6)  # and has steps of 1, not of 1/n


def test_region_perturbation_is_what_aopc_is_the_mean_of(given):
    model, x, classes, _ = given
    metric = quantus.RegionPerturbation(patch_size=2, regions_evaluation=9, order="morf", **QUIET)
    found = np.array(theirs(metric, given, softmax=False))
    with scoring_scope(model, x, classes) as scores:
        own = METRICS["aopc"](trial(given, scores, region_size=2), n_regions=9, output_kind="score").array
    np.testing.assert_allclose(own, found.sum(1) / (9 + 1), atol=1e-6)  # theirs leaves out k = 0, where nothing is lost


def test_imputation_is_road_without_noise(given):
    from quantus.functions.perturb_func import noisy_linear_imputation

    x = given[1].repeat(1, 3, 1, 1) * torch.tensor([1.0, 2.0, -1.0]).view(1, 3, 1, 1)
    for image, heat in zip(x, given[3], strict=True):
        for share in (0.1, 0.5, 0.9):
            chosen = heat.flatten().argsort(descending=True)[: int(share * SIDE**2)]
            removed = torch.zeros(SIDE**2, dtype=torch.bool)
            removed[chosen] = True
            found = noisy_linear_imputation(image.numpy(), chosen.numpy(), noise=0.0)
            own = impute_linearly(image[None], removed.view(1, SIDE, SIDE), tolerance=1e-10)[0]
            np.testing.assert_allclose(own, found, atol=1e-6)


def test_road_removes_the_same_pixels(given):
    """Theirs is whether each image keeps its class; ours is its probability, of the same images."""
    model, x, _, _ = given
    classes = model(x).argmax(1).tolist()
    metric = quantus.ROAD(percentages=[10, 30, 50, 70], noise=0.0, disable_warnings=True, normalize=False)
    found = theirs(metric, (model, x, classes, given[3]), softmax=True)
    with scoring_scope(model, x, classes) as scores:
        one = trial(given, scores).with_imputation("inpainting")
        kept = []
        for percent in (10, 30, 50, 70):
            removed = one.region_ranks < int(percent / 100 * SIDE**2)
            kept.append((model(impute_linearly(x, removed, 1e-10)).argmax(1) == torch.tensor(classes)).double().mean())
    assert [float(one) for one in kept] == pytest.approx([found[percent] for percent in (10, 30, 50, 70)])


def test_infidelity_of_the_same_sets(given):
    model, x, classes, _ = given
    metric = quantus.Infidelity(perturb_patch_sizes=[4], n_perturb_samples=1, **QUIET)
    found = theirs(metric, given, softmax=False)
    blocks = torch.arange(SIDE).view(-1, 1) // 4 * 2 + torch.arange(SIDE) // 4
    masks = torch.stack(
        [blocks <= last for last in range(4)]
    )  # theirs removes one block after the other, and puts none back
    with scoring_scope(model, x, classes) as scores:
        own = METRICS["infidelity"](trial(given, scores), masks=masks, fit_scale=False, unit="gradients").array
    np.testing.assert_allclose(own, found, atol=1e-6)


def test_faithfulness_correlation_of_the_same_sets(given, monkeypatch):
    model, x, classes, _ = given
    with scoring_scope(model, x, classes) as scores:
        one = trial(given, scores, seed=3)
        own = METRICS["faithfulness-correlation"](one, share=0.25, n_sets=20).array
        from camscope.metrics.perturbation_test import sample_region_sets

        masks = sample_region_sets(torch.arange(SIDE**2).view(SIDE, SIDE), SIDE**2, 16, 20, 3)(slice(0, 20))
    sets = iter([mask.flatten().nonzero()[:, 0].numpy() for mask in masks for _ in range(len(x))])
    monkeypatch.setattr(np.random, "choice", lambda *args, **kwargs: next(sets))
    metric = quantus.FaithfulnessCorrelation(nr_runs=20, subset_size=16, return_aggregate=False, **QUIET)
    np.testing.assert_allclose(own, theirs(metric, given, softmax=False), atol=1e-6)
