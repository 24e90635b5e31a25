import csv
import importlib
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.metrics import roc_auc_score

from camscope.errors import InputError
from camscope.images.photo_reader import read_photo
from camscope.loaded_model_metadata_and_weight_digest import get_loaded_model_metadata
from camscope.models import load_model
from camscope.phantom.shortcut_study import (
    draw_study,
    to_study_input,
    train_shortcut_model,
    write_study,
    write_weights,
)

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # benchmarks/ is not installed
draw_volume_study = importlib.import_module("benchmarks.volume_study").draw_volume_study


def log_odds(net, study):
    with torch.no_grad():
        logits = net(to_study_input(study.images)).double()
    return (logits[:, 1] - logits[:, 0]).numpy()


def auroc(net, study):
    return roc_auc_score(study.labels, log_odds(net, study))


@pytest.mark.slow
def test_the_token_travels_with_the_finding_as_often_as_asked():
    for p in (0.05, 0.5, 0.95):
        study = draw_study(600, 3, p)
        assert study.labels.sum() == 300
        assert study.has_marker[study.labels == 1].mean() == pytest.approx(p)
        assert study.has_marker[study.labels == 0].mean() == pytest.approx(1 - p)
    assert (draw_study(40, 3, 1.0).has_marker == (draw_study(40, 3, 1.0).labels == 1)).all()


def test_of_one_seed_studies_differ_in_their_tokens_alone_and_masks_are_exact():
    without, aligned, flipped = draw_study(40, 5, 0.5, marker_site=None), draw_study(40, 5, 1.0), draw_study(40, 5, 0.0)
    assert (aligned.images == draw_study(40, 5, 1.0).images).all()
    assert ((aligned.images != flipped.images) == (aligned.marker_masks | flipped.marker_masks)).all()
    assert (aligned.labels == without.labels).all()
    assert (aligned.images[aligned.marker_masks] == 255).all()
    assert (aligned.images[~aligned.marker_masks] < 255).all()
    assert set(aligned.marker_masks.sum((1, 2)).tolist()) == {0, 8}
    assert (aligned.lesion_masks.any((1, 2)) == (aligned.labels == 1)).all()
    inside = (aligned.lesion_masks & aligned.lung_masks).sum() / aligned.lesion_masks.sum()
    assert inside > 0.8  # a soft rim reaches over the lung's edge


def test_patients_have_one_to_three_images_of_one_class_and_one_site():
    study = draw_study(300, 1)
    counts = {name: study.patients.count(name) for name in study.patients}
    assert set(counts.values()) == {1, 2, 3}
    split = 0
    for name in counts:
        rows = np.array([one == name for one in study.patients])
        split += len(set(study.labels[rows].tolist())) > 1
        own = study.select(rows)
        assert len(set(own.sites)) == len(set(own.sexes)) == len(set(own.ages.tolist())) == 1
    assert split <= 1  # the patient in the middle, so that one half is exactly one half
    assert 0.4 < np.mean([site == "A" for site in study.sites]) < 0.6


@pytest.mark.slow
def test_marker_at_one_site_and_two_ways_to_be_right():
    study = draw_study(300, 2, 0.9, marker_site="B")
    at_b = np.array(study.sites) == "B"
    assert not study.has_marker[~at_b].any()
    assert study.has_marker[at_b & (study.labels == 1)].mean() == pytest.approx(0.9, abs=0.01)
    assert study.has_marker[at_b & (study.labels == 0)].mean() == pytest.approx(0.1, abs=0.01)
    mixed = draw_study(300, 2, mixed=True)
    lesion = mixed.lesion_masks.any((1, 2))
    assert not (lesion & mixed.has_marker).any()
    assert ((lesion | mixed.has_marker) == (mixed.labels == 1)).all()
    assert lesion.sum() == mixed.has_marker.sum() == 75


@pytest.mark.thorough  # test_interventions trains three such nets
def test_a_net_learns_its_study_in_seconds_and_the_shortcut_with_it():
    study = draw_study(1000, 7, 0.95)
    net = train_shortcut_model(study, seed=3)
    aligned, independent, flipped = (auroc(net, draw_study(300, 8, p)) for p in (0.95, 0.5, 0.05))
    assert aligned >= 0.99
    assert aligned > independent + 0.02 > flipped + 0.1
    clean = train_shortcut_model(draw_study(1000, 7, 0.5), seed=3)
    assert min(auroc(clean, draw_study(300, 8, p)) for p in (0.95, 0.5, 0.05)) >= 0.99


def test_training_gives_the_same_weights_and_leaves_the_process_alone():
    study = draw_study(64, 1)
    torch.manual_seed(5)
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    first, second = train_shortcut_model(study, n_epochs=1), train_shortcut_model(study, n_epochs=1)
    assert all(
        torch.equal(a, b) for a, b in zip(first.state_dict().values(), second.state_dict().values(), strict=True)
    )
    other = train_shortcut_model(study, seed=1, n_epochs=1)
    assert not torch.equal(first.fc.weight, other.fc.weight)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_num_threads() == threads
    assert not first.training


def test_a_written_study_and_net_are_read_back(tmp_path):
    study = draw_study(40, 4, 0.8)
    manifest = write_study(study, tmp_path / "study")
    assert manifest == tmp_path / "study" / "manifest.csv"
    rows = list(csv.DictReader(manifest.read_text().splitlines()))
    assert [*rows[0]] == [
        "id",
        "path",
        "label",
        "patient",
        "site",
        "sex",
        "age",
        "mask",
        "region_marker",
        "region_lungs",
    ]
    for i, row in enumerate(rows):
        assert (np.array(Image.open(manifest.parent / row["path"])) == study.images[i]).all()
        assert row["label"] == ("clear", "lesion")[study.labels[i]]
        assert (row["patient"], row["site"], row["sex"]) == (study.patients[i], study.sites[i], study.sexes[i])
        for column, masks in (("mask", study.lesion_masks), ("region_marker", study.marker_masks)):
            assert bool(row[column]) == masks[i].any()
            if row[column]:
                assert ((np.array(Image.open(manifest.parent / row[column])) > 0) == masks[i]).all()
        assert row["region_lungs"]
    net = train_shortcut_model(study, n_epochs=1)
    weights = write_weights(net, tmp_path)
    assert weights.read_bytes() == write_weights(net, tmp_path / "again").read_bytes()
    model = load_model("camscope.phantom.shortcut_study:create_shortcut_model", weights=weights)
    card = get_loaded_model_metadata(model)
    assert (card.class_names, card.layer) == (("clear", "lesion"), "layer3")
    x = torch.stack([card.preprocess(read_photo(manifest.parent / row["path"]).pixels)[0] for row in rows])
    assert torch.allclose(x, to_study_input(study.images), atol=1e-6)
    assert torch.allclose(model(x), net(to_study_input(study.images)), atol=1e-5)


@pytest.mark.slow
def test_volumes_carry_a_marker_that_travels_too(tmp_path):
    study = draw_volume_study(64, 2, 1.0)
    assert study.images.shape == (64, 32, 32, 32)
    assert (study.has_marker == (study.labels == 1)).all()
    other = draw_volume_study(64, 2, 0.0)
    assert ((study.images != other.images) <= (study.marker_masks | other.marker_masks)).all()
    assert set(study.marker_masks.sum((1, 2, 3)).tolist()) == {0, 64}
    assert (study.lesion_masks & ~study.lung_masks).sum() < 0.05 * study.lesion_masks.sum()
    net = train_shortcut_model(study, n_epochs=4)
    assert auroc(net, study) > 0.9
    manifest = write_study(study.select(np.arange(3)), tmp_path)
    first = next(csv.DictReader(manifest.read_text().splitlines()))
    with Image.open(tmp_path / first["path"]) as pages:
        assert pages.n_frames == 32
        pages.seek(20)
        assert (np.array(pages) == study.images[0, 20]).all()


@pytest.mark.parametrize("arguments", [(1, 0), (10, -1), (10, 0, 1.5)])
def test_impossible_studies_are_refused(arguments):
    with pytest.raises(
        InputError, match=r"n_images=.*; expected at least two images, a seed of 0 or more, and a share in 0\.\.1"
    ):
        draw_study(*arguments)
    with pytest.raises(InputError, match="at least 1 epoch and 32 images"):
        train_shortcut_model(draw_study(10, 0))
