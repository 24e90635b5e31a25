"""ViT-CX against its formula written as loops, its clusters against linkage one pair at a time, and what its noise is."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from camscope.errors import InputError
from camscope.explainers import ViTCX
from camscope.explainers.cam.vit_cx import cluster_masks_by_complete_linkage
from tests.nets import CASES, Flat, Pooled

pytestmark = pytest.mark.filterwarnings("ignore::camscope.errors.CamscopeWarning")
ROWS = [[1.0, 0.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0], [0.9, 0.0, 0.0, 0.0], [3.0, 3.0, 3.0, 3.0]]


def network(samples: int = 2) -> tuple[Pooled, Tensor]:
    """Six channels of 4 x 3 from inputs of 16 x 12, in float64: two nearly alike, one constant."""
    model, x = CASES["pooled"].make(samples, torch.float64)
    last = model.features[4]
    last.weight.data[3], last.bias.data[3] = 2 * last.weight.data[1], 2 * last.bias.data[1] + 0.05
    last.weight.data[4], last.bias.data[4] = 0, 1
    model.head.weight.data *= 10
    return model, x


def scaled(values: Tensor) -> Tensor:
    low, high = values.min(), values.max()
    return torch.zeros_like(values) if low == high else (values - low) / (high - low)


def enlarged(mask: Tensor, image: Tensor) -> Tensor:
    return F.interpolate(mask[None, None], image.shape[1:], mode="bilinear", align_corners=False)[0, 0]


def linked(masks: list[Tensor], reach: float) -> list[list[int]]:
    """Clusters by complete linkage: the two nearest are joined, one pair after the other."""
    found = [[k] for k, mask in enumerate(masks) if mask.any()]

    def apart(one: list[int], other: list[int]) -> float:
        pairs = [(masks[i].flatten(), masks[j].flatten()) for i in one for j in other]
        return max(0.0, *(1 - float(F.cosine_similarity(first, second, 0, 0)) for first, second in pairs))

    while len(found) > 1:
        distance, i, j = min((apart(found[i], found[j]), i, j) for j in range(len(found)) for i in range(j))
        if distance >= reach:
            break
        found[i] += found.pop(j)
    return found


def by_the_book(model: nn.Module, channels: Tensor, image: Tensor, distance: float, sigma: float, seed: int) -> Tensor:
    """One sample, mask and cell at a time; with p(x) added, which the least cell takes away."""
    drawn = torch.randn(image.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32).double()
    noise = sigma * (image.max() - image.min()) * drawn

    def chance(inputs: Tensor) -> Tensor:
        return model(inputs[None]).softmax(1)[0, 1].detach()

    alone = [scaled(channel) for channel in channels]
    groups = linked([enlarged(mask, image) for mask in alone], distance)
    masks = [scaled(torch.stack([alone[k] for k in group]).sum(0)) for group in groups]
    gains = []
    for mask in masks:
        M = scaled(enlarged(mask, image))
        gains.append(chance(image * M + noise * (1 - M)) - chance(image + noise * (1 - M)) + chance(image))
    heat = torch.full_like(channels[0], torch.inf)
    for cell in range(heat.numel()):
        parts = [mask.flatten()[cell] for mask in masks]
        if sum(parts) > 0:
            heat.view(-1)[cell] = sum(s * part for s, part in zip(gains, parts, strict=True)) / sum(parts)
    return torch.where(heat.isinf(), 0, heat - heat.min())


@pytest.mark.parametrize("batch_size", [None, 1, 3])
@pytest.mark.parametrize(
    "settings", [{}, {"distance": 0.35, "sigma": 0.3, "seed": 4}, {"distance": 0}, {"sigma": 0}], ids=str
)
def test_the_map_is_the_formula_in_loops(settings, batch_size):
    model, x = network()
    heat = ViTCX(model, "features", batch_size=batch_size, **settings).attribute(x, 1)
    asked = {"distance": 0.1, "sigma": 0.05, "seed": 0} | settings
    for i in range(2):
        expected = by_the_book(model, model.features(x).detach()[i], x[i], **asked)
        assert expected.any()
        torch.testing.assert_close(heat[i], expected, rtol=1e-9, atol=1e-14)


def flat(rows: list[list[float]]) -> tuple[Flat, Tensor]:
    """The input is the layer: K channels of 2 x 2, and a head whose class 1 has the logit Σ x, class 0 none."""
    model = Flat(nn.MaxPool2d(1), 4 * len(rows), classes=2).double()
    model.head.weight.data[0], model.head.weight.data[1] = 0, 1
    model.head.bias.data[:] = 0
    return model, torch.tensor(rows, dtype=torch.float64).view(1, -1, 2, 2)


def test_two_masks_by_hand():
    # channels 0 and 2 are one mask of the first cell, 1 another of the second, 3 is constant and none; the first shows
    # 1 + 0.9 + 3, the second 1 + 3, and the whole, 14.9, is the same for both; nothing shows the other cells
    model, x = flat(ROWS)
    p = torch.tensor([4.9, 4.0], dtype=torch.float64).sigmoid()
    heat = ViTCX(model, "features", layout="channels_first", sigma=0).attribute(x, 1)
    torch.testing.assert_close(heat, torch.stack([p[0] - p[1], *p.new_zeros(3)]).view(1, 2, 2))


def test_a_callable_counts_the_score_itself_by_hand():
    model, x = flat(ROWS)
    tool = ViTCX(model, "features", layout="channels_first", sigma=0)
    expected = torch.tensor([[[0.9, 0.0], [0.0, 0.0]]], dtype=torch.float64)
    torch.testing.assert_close(tool.attribute(x, lambda output: 1000 + output[:, 1]), expected)


@pytest.mark.parametrize(
    "rows", [ROWS[:1], [ROWS[0], ROWS[2]], ROWS[3:], ROWS[:2]], ids=["one", "alike", "none", "even"]
)
def test_masks_that_do_not_differ_make_a_map_of_nothing_and_say_so(rows):
    model, x = flat(rows)
    for sigma in (0, 0.05) if rows != ROWS[:2] else (0,):
        tool = ViTCX(model, "features", layout="channels_first", sigma=sigma)
        assert not tool.attribute(x, 1).any()
        assert rows == ROWS[3:] or any(
            note.startswith("no two masks differ in what they do") for note in tool.explain(x[0], 1).notes
        )


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.one_in(3)
def test_clusters_are_those_of_one_pair_after_the_other(seed):
    masks = torch.rand(2, 20, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    masks[0, 7] = masks[0, 3] = masks[0, 11]
    unit = masks / masks.norm(dim=2, keepdim=True)
    for reach in (0.0, 0.05, 0.1, 0.3, 2.0):
        homes = cluster_masks_by_complete_linkage((1 - unit @ unit.mT).clamp(min=0), reach)
        for rows, numbers in zip(masks, homes.tolist(), strict=True):
            found = [[k for k, home in enumerate(numbers) if home == first] for first in dict.fromkeys(numbers)]
            assert all(first == found[i][0] for i, first in enumerate(dict.fromkeys(numbers)))
            assert sorted(found) == sorted(map(sorted, linked(list(rows), reach)))


def test_a_chain_of_neighbors_is_not_one_cluster():
    places = torch.tensor([0.0, 1.0, 2.1, 3.3])
    apart = (places[:, None] - places).abs()[None]
    assert cluster_masks_by_complete_linkage(apart, 1.15).tolist() == [[0, 0, 2, 3]]
    assert cluster_masks_by_complete_linkage(apart, 1.25).tolist() == [[0, 0, 2, 2]]
    assert cluster_masks_by_complete_linkage(apart, 3.3).tolist() == [[0, 0, 2, 2]]  # less than, not as far as
    assert cluster_masks_by_complete_linkage(apart, 3.4).tolist() == [[0, 0, 0, 0]]


def test_distances_that_rounding_makes_another_from_the_other_side_join_all_the_same():
    round_in_a_ring = torch.tensor([[[0.0, 0.05, 0.06], [0.06, 0.0, 0.05], [0.05, 0.06, 0.0]]])
    assert cluster_masks_by_complete_linkage(round_in_a_ring, 0.07).tolist() == [[0, 0, 0]]


def test_the_noise_is_its_seeds_and_the_callers_state_stays():
    model, x = network()
    state = torch.random.get_rng_state()
    one, same, other = (ViTCX(model, "features", seed=seed).attribute(x, 1) for seed in (5, 5, 6))
    assert one.numpy().tobytes() == same.numpy().tobytes()
    assert not torch.equal(one, other)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_the_noise_goes_with_the_unit_of_the_input():
    class Scaled(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: Tensor) -> Tensor:
            return self.model(x / 1000)

    model, x = network()
    expected = ViTCX(model, "features").attribute(x, 1)
    torch.testing.assert_close(ViTCX(Scaled(model), "model.features").attribute(1000 * x, 1), expected)


@pytest.mark.parametrize(
    "settings", [{"distance": -0.1}, {"sigma": -1.0}, {"sigma": "a"}, {"seed": 0.5}, {"batch_size": 0}]
)
def test_settings_without_sense_are_refused_by_name(settings):
    with pytest.raises(InputError, match=f"^{next(iter(settings))}="):
        ViTCX(network()[0], "features", **settings)
