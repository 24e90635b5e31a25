"""`camscope features` without a class: PCA of patches, similarity to a point, and attention."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.cli.test_cli import assert_refused, run

ENCODER = """
import torch
from torchvision.models import VisionTransformer

def vit():
    torch.manual_seed(0)
    return VisionTransformer(image_size=32, patch_size=8, num_layers=2, num_heads=2, hidden_dim=16, mlp_dim=16)

PREPROCESSING = {"vit": ((32, 32), (0.5,) * 3, (0.5,) * 3)}
"""
MODEL = ("--model", "encoder.py:vit")


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    folder = tmp_path_factory.mktemp("encoder")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        Path("encoder.py").write_text(ENCODER)
        Path("photos").mkdir()
        for number in range(2):
            pixels = np.random.default_rng(number).integers(0, 255, (64, 64, 3), dtype=np.uint8)
            pixels[:, 32:] = (200, 30, 30)
            Image.fromarray(pixels).save(f"photos/{number}.png")
        yield folder


def ask(*words):
    return json.loads(run("features", *words, *MODEL, "--json").stdout)


def test_pca_draws_each_image_with_its_colors(here):
    answer = ask("photos", "--pca", "-o", "pca.png")
    assert (answer["drawing"], answer["layer"], answer["n_drawn"]) == ("pca", "encoder", 3)
    assert [Path(path).name for path in answer["images"]] == ["0.png", "1.png"]
    assert answer["shape"] == [16, 4, 4]
    ratios = answer["explained_variance_ratio"]
    assert ratios == sorted(ratios, reverse=True)
    assert sum(ratios) <= 1
    height, width = np.asarray(Image.open("pca.png")).shape[:2]
    assert height > 2 * 256
    assert width > 2 * 256


def test_a_point_and_a_layer(here):
    answer = ask(
        "photos/0.png", "photos/1.png", "--point", "48,16", "-l", "encoder.layers.encoder_layer_0", "-o", "s.png"
    )
    assert (answer["drawing"], answer["layer"], answer["n_drawn"]) == (
        "similarity",
        "encoder.layers.encoder_layer_0",
        2,
    )
    printed = run("features", "photos/0.png", "--point", "48,16", "-o", "t.png", *MODEL).stdout
    assert "similarity to (48, 16)" in printed


def test_attention_of_all_heads_or_of_one(here):
    answer = ask("photos/0.png", "--attention", "-o", "all.png")
    assert (answer["drawing"], answer["layer"], answer["shape"]) == ("attention", None, [2, 4, 4])
    answer = ask("photos/0.png", "--attention", "--head", "1", "--block", "0", "--point", "48,16", "-o", "one.png")
    assert (answer["n_drawn"], answer["shape"]) == (1, [1, 4, 4])
    assert np.asarray(Image.open("one.png")).size < np.asarray(Image.open("all.png")).size


@pytest.mark.parametrize(
    ("words", "code", "saying"),
    [
        (("--pca", "--point", "1,2"), 2, "--pca"),
        (("--head", "1"), 2, "add --attention"),
        (("--block", "1", "--pca"), 2, "add --attention"),
        (("--attention", "--layer", "encoder.ln"), 2, "choose a block by --block"),
        (("--point", "left"), 2, "expected pixels X,Y"),
        (("--point", "99,2"), 2, "outside of the model's input"),
        (("--attention", "--head", "7"), 2, "head=7; expected 0..1"),
        ((), 2, "pass a layer, or one of --pca, --point and --attention"),
        (("photos/1.png", "--attention"), 2, "2 images; expected one"),
    ],
)
def test_options_that_exclude_each_other_or_do_not_fit_are_one_error(here, words, code, saying):
    assert_refused("features", "photos/0.png", *words, *MODEL, code=code, saying=saying)
