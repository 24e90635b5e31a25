"""Patches of a trained transformer on photographs: what is alike lies on the same object."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from camscope import Preprocess, extract_patch_features

DATA = Path(__file__).resolve().parents[4] / "shared" / "data"
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@pytest.fixture(scope="module")
def deit():
    if not (DATA / "models.py").is_file():
        pytest.skip("needs the trained weights in ../shared/data")
    sys.path.insert(0, str(DATA))
    try:
        import models
    finally:
        sys.path.remove(str(DATA))
    return models.deit_tiny()


def boxed_images():
    """The photographs with one box: (file, box in rows and columns of its patches)."""
    notes = json.loads((DATA / "imagenet_boxes" / "annotations.json").read_text("utf-8"))
    boxes = {}
    for note in notes["annotations"]:
        boxes.setdefault(note["image_id"], []).append(note["bbox"])
    for image in notes["images"]:
        if len(boxes.get(image["id"], ())) == 1:
            yield DATA / "imagenet_boxes" / "images" / image["file_name"], boxes[image["id"]][0]


def test_the_patches_most_similar_to_the_middle_of_an_object_lie_on_it(deit):
    """Of 40 photographs: the share of the ten most similar patches inside the box, against the area of the box."""
    preprocess = Preprocess(mean=MEAN, std=STD, resize=(224, 224))
    hits, areas = [], []
    for file, (x, y, width, height) in list(boxed_images())[:40]:
        with Image.open(file) as image:
            pixels = np.asarray(image.convert("RGB"))
        features = extract_patch_features(deit, pixels, "encoder", preprocess=preprocess)
        (explanation,) = features.similarity_to_point((x + width / 2, y + height / 2))
        centers = (np.arange(14) + 0.5) / 14
        rows = (centers * pixels.shape[0] >= y) & (centers * pixels.shape[0] < y + height)
        columns = (centers * pixels.shape[1] >= x) & (centers * pixels.shape[1] < x + width)
        inside = rows[:, None] & columns[None]
        best = np.argsort(explanation.attribution, axis=None)[::-1][1:11]  # the first is the patch itself
        hits.append(inside.flatten()[best].mean())
        areas.append(inside.mean())
    assert np.mean(hits) > np.mean(areas) + 0.4, (np.mean(hits), np.mean(areas))


def test_three_dogs_share_a_color_that_a_zebra_and_elephants_do_not(deit):
    names = ["n02088238_basset", "n02100236_German_short-haired_pointer", "n02109047_Great_Dane", "n02391049_zebra",
             "n02504013_Indian_elephant"]  # fmt: skip
    files = [DATA / "photos" / "images" / f"{name}.JPEG" for name in names]
    preprocess = Preprocess(mean=MEAN, std=STD, resize=256, crop=224)
    pca = extract_patch_features(deit, files, preprocess=preprocess).pca()
    cells = [(5, 6), (4, 9), (8, 6), (4, 5), (5, 6)]  # on each animal
    colors = [pca.maps[(i, slice(None), *cell)] for i, cell in enumerate(cells)]
    among_dogs = max(np.linalg.norm(colors[i] - colors[j]) for i, j in ((0, 1), (0, 2), (1, 2)))
    to_others = min(np.linalg.norm(colors[i] - colors[j]) for i in range(3) for j in (3, 4))
    assert among_dogs < to_others, (among_dogs, to_others)
