import importlib
import sys
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch.nn import functional as F

from camscope import phantom
from camscope.errors import InputError, TargetError
from camscope.phantom import (
    CATEGORIES,
    PREPROCESSING,
    PhantomNet,
    draw_radiograph,
    load_phantom_model,
    to_model_input,
)

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # benchmarks/ is not installed
training = importlib.import_module("benchmarks.train_phantom")

FINDINGS = CATEGORIES[1:]


@pytest.fixture(scope="module")
def net():
    return load_phantom_model()


@pytest.fixture(scope="module")
def fresh():
    return training.draw_dataset(200, 20_240)


def test_same_seed_gives_the_same_bytes_and_leaves_global_randomness_alone():
    np.random.seed(1)
    torch.manual_seed(1)
    before, torch_before = np.random.get_state()[1].copy(), torch.get_rng_state()
    first, second, other = draw_radiograph(5), draw_radiograph(5), draw_radiograph(6)
    assert first.image.tobytes() == second.image.tobytes()
    assert first.label == second.label
    assert (first.image != other.image).mean() > 0.5
    assert (np.random.get_state()[1] == before).all()
    assert torch.equal(torch.get_rng_state(), torch_before)


@pytest.mark.parametrize("finding", FINDINGS)
def test_mask_is_exactly_where_the_finding_changes_the_image(finding):
    for seed in range(20):
        ill, well = draw_radiograph(seed, finding), draw_radiograph(seed, "no finding")
        assert ((ill.image != well.image) == ill.mask).all()
        assert not well.mask.any()
        assert well.boxes == ()
        step = np.abs(ill.image.astype(int) - well.image)[ill.mask]
        assert (step >= 2).mean() > 0.99  # no faint fringe
        pieces = cv2.connectedComponents(ill.mask.astype(np.uint8))[0] - 1
        assert pieces == 1
        ((left, top, right, bottom),) = ill.boxes
        assert ill.mask[top:bottom, left:right].sum() == ill.mask.sum()
        assert ill.mask[[top, bottom - 1], left:right].any(axis=1).all()
        assert ill.mask[top:bottom, [left, right - 1]].any(axis=0).all()


@pytest.mark.slow
def test_findings_differ_in_size_and_shape():
    def filled(phantom):  # share of its box that the evidence fills: a disc fills pi / 4
        ((left, top, right, bottom),) = phantom.boxes
        return phantom.mask.sum() / ((right - left) * (bottom - top))

    drawn = {name: [draw_radiograph(seed, name) for seed in range(40)] for name in FINDINGS}
    area = {name: np.median([one.mask.sum() for one in some]) for name, some in drawn.items()}
    fill = {name: np.median([filled(one) for one in some]) for name, some in drawn.items()}
    assert area["nodule"] < area["effusion"] / 2
    assert fill["nodule"] == pytest.approx(np.pi / 4, abs=0.06)
    assert fill["pneumothorax"] < 0.55
    assert all(one.boxes[0][3] > 64 for one in drawn["effusion"])  # at the base
    assert all(one.boxes[0][1] < 64 for one in drawn["pneumothorax"])  # from the apex


def test_dataset_is_even_shuffled_and_made_of_single_draws():
    some = training.draw_dataset(10, 3)
    assert sorted(np.bincount(some.labels)) == [2, 2, 3, 3]
    assert (np.diff(some.labels) < 0).any()
    one = draw_radiograph((3 << 32) + 7, int(some.labels[7]))
    assert (some.images[7] == one.image).all()
    assert (some.masks[7] == one.mask).all()
    assert not some.marker_masks.any()


@pytest.mark.slow
def test_marker_correlation_is_the_phi_coefficient():
    def phi(correlation):
        some = training.draw_dataset(200, 11, marker_class="effusion", marker_correlation=correlation, size=64)
        has_marker = some.marker_masks.any(axis=(1, 2))
        assert has_marker.mean() == pytest.approx(1 / 4, abs=0.05)
        return np.corrcoef(has_marker, some.labels == CATEGORIES.index("effusion"))[0, 1]

    assert phi(1.0) == pytest.approx(1.0, abs=1e-9)
    assert phi(0.6) == pytest.approx(0.6, abs=0.1)
    assert phi(0.0) == pytest.approx(0.0, abs=0.1)


@pytest.mark.parametrize("corner", ["top left", "bottom right"])
def test_marker_changes_its_corner_alone(corner):
    for seed in range(10):
        plain, marked = draw_radiograph(seed, "nodule"), draw_radiograph(seed, "nodule", marker_corner=corner)
        assert ((plain.image != marked.image) == marked.marker_mask).all()
        assert (plain.mask == marked.mask).all()
        rows, columns = np.nonzero(marked.marker_mask)
        assert len(rows) > 20
        assert (rows < 32).all() if "top" in corner else (rows >= 96).all()
        assert (columns < 32).all() if "left" in corner else (columns >= 96).all()


@pytest.mark.parametrize("size", [64, 200, 512])
def test_other_sizes_show_the_same_finding(size):
    small, large = (
        draw_radiograph(4, "effusion", marker_corner="top left"),
        draw_radiograph(4, "effusion", marker_corner="top left", size=size),
    )
    assert large.image.shape == large.mask.shape == (size, size)
    assert large.mask.mean() == pytest.approx(small.mask.mean(), rel=0.1)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: draw_radiograph(1, "tumour"), TargetError, "unknown finding 'tumour'.*nodule"),
        (lambda: draw_radiograph(1, 4), TargetError, r"unknown finding 4.*0\.\.3"),
        (lambda: draw_radiograph(1, True), TargetError, "unknown finding True"),
        (lambda: draw_radiograph(-1), InputError, "seed is -1"),
        (lambda: draw_radiograph(1, size=8), InputError, "size is 8"),
        (lambda: draw_radiograph(1, marker_corner="middle"), InputError, "unknown marker_corner 'middle'"),
        (lambda: training.draw_dataset(0, 1), InputError, "n is 0"),
        (lambda: training.draw_dataset(4, 1, marker_correlation=0.5), InputError, "marker_class"),
        (lambda: training.draw_dataset(4, 1, marker_class="nodule", marker_correlation=1.5), InputError, r"1\.5"),
        (lambda: training.train_phantom_model(n_steps=0), InputError, "steps is 0"),
    ],
)
def test_bad_arguments_are_named(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_the_bundled_net_reads_like_a_resnet(net):
    names = [name for name, _ in net.named_children()]
    assert names == ["conv1", "bn1", "relu", "maxpool", "layer1", "layer2", "layer3", "layer4", "avgpool", "fc"]
    assert not any(module.training for module in net.modules())
    assert all(value.dtype == torch.float32 for value in net.parameters())
    grids = []
    for layer in (net.layer1, net.layer2, net.layer3, net.layer4):
        layer.register_forward_hook(lambda _, __, out: grids.append(tuple(out.shape[2:])))
    assert net(to_model_input(draw_radiograph(1).image[None])).shape == (1, len(CATEGORIES))
    assert grids == [(32, 32), (32, 32), (16, 16), (16, 16)]
    for layer in (net.layer1, net.layer2, net.layer3, net.layer4):
        layer._forward_hooks.clear()


def test_the_bundled_weights_are_small_and_say_how_they_were_made():
    path = Path(phantom.__file__).with_name("phantom.safetensors")
    with safe_open(path, "pt") as file:
        facts = file.metadata()
        assert path.stat().st_size <= 2_000_000
    assert facts.keys() == {"accuracy", "seed", "steps", "version"}
    assert float(facts["accuracy"]) >= 0.95


@pytest.mark.slow
def test_the_bundled_net_is_right_on_fresh_phantoms(net, fresh):
    assert np.mean(list(training.compute_accuracy_by_class(net, fresh).values())) >= 0.95


@pytest.mark.slow
def test_grad_cam_of_the_bundled_net_points_at_the_evidence(net, fresh):
    hits = {name: [] for name in FINDINGS}
    for start in range(0, 200, 50):
        x, labels = to_model_input(fresh.images[start : start + 50]), torch.from_numpy(fresh.labels[start : start + 50])
        activation = net.layer3(net.layer2(net.layer1(net.maxpool(net.relu(net.bn1(net.conv1(x)))))))
        activation = net.layer4(activation).detach().requires_grad_()
        scores = net.fc(activation.mean((2, 3))).gather(1, labels[:, None])
        (gradient,) = torch.autograd.grad(scores.sum(), activation)
        heat = F.relu((gradient.mean((2, 3), keepdim=True) * activation).sum(1, keepdim=True)).detach()
        for i, up in enumerate(F.interpolate(heat, scale_factor=8, mode="bilinear").numpy()[:, 0]):
            if labels[i]:  # half a cell is 4 pixels
                near = cv2.dilate(fresh.masks[start + i].astype(np.uint8), np.ones((9, 9), np.uint8))
                hits[CATEGORIES[labels[i]]].append(near.flat[up.argmax()])
    assert {name: np.mean(hit) > 0.8 for name, hit in hits.items()} == dict.fromkeys(FINDINGS, True)


def test_input_is_centered_and_scaled(fresh):
    x = to_model_input(fresh.images)
    assert x.shape == (200, 1, PREPROCESSING.size, PREPROCESSING.size)
    assert x[0, 0, 3, 5].item() == pytest.approx((fresh.images[0, 3, 5] / 255 - PREPROCESSING.mean) / PREPROCESSING.std)
    assert abs(x.mean()) < 0.3
    assert 0.7 < x.std() < 1.4


@pytest.mark.thorough
def test_training_learns_repeats_itself_and_puts_everything_back(tmp_path):
    torch.manual_seed(3)
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    with torch.no_grad():
        first, second = (training.train_phantom_model(1, n_steps=12, n_images=64) for _ in range(2))
    assert np.mean(first.losses[-3:]) < np.mean(first.losses[:3])
    assert first.losses == second.losses
    for name, trained in (("a", first), ("b", second)):
        training.save_weights(
            trained.model, tmp_path / name, {"seed": "1", "steps": "12", "version": "1", "accuracy": "0", "more": "2"}
        )
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert training.train_phantom_model(2, n_steps=1, n_images=64).losses != first.losses[:1]
    assert (
        training.train_phantom_model(1, n_steps=1, n_images=64, marker_class=1, marker_correlation=1.0).losses
        != first.losses[:1]
    )
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.slow
def test_the_command_writes_weights_that_load(tmp_path, capsys):
    out = tmp_path / "net.safetensors"
    training.main(["--output", str(out), "--steps", "2", "--images", "32", "--seed", "4"])
    assert {path.name for path in tmp_path.iterdir()} == {"net.safetensors"}
    with safe_open(out, "pt") as file:
        assert file.metadata()["steps"] == "2"
        PhantomNet().load_state_dict({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118 - no mapping
    printed = capsys.readouterr().out
    assert all(name in printed for name in CATEGORIES)


def test_training_and_held_out_seeds_never_meet():
    assert training.TRAINING_SEED_START > training.HELD_OUT_SEED > 20_240
