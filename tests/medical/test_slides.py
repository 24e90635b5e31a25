"""Whole-slide images: tiles, attention and maps of a slide that the test writes, against computations by hand."""

import json

import numpy as np
import pytest
import torch
from torch import nn

pytest.importorskip("openslide")
tifffile = pytest.importorskip("tifffile")

from camscope.errors import ImageError, InputError, ModelError, TargetError  # noqa: E402 - skipped without the package
from camscope.images.preprocess import Preprocess  # noqa: E402 - skipped without the package
from camscope.medical import GatedAttention, explain_slide, read_slide_tiles  # noqa: E402 - skipped without the package
from camscope.medical.slide_explanation import _trace_regions  # noqa: E402 - skipped without the package

pytestmark = pytest.mark.filterwarnings("default::camscope.errors.CamscopeWarning")

WIDTH, HEIGHT, SIDE = 512, 384, 64
PREPROCESS = Preprocess(resize=(SIDE, SIDE), mean=(0.0,) * 3, std=(1.0,) * 3)


def draw_slide(tumor=(300, 130)):
    """White background, pale tissue, and a red square of 40 pixels whose top left corner is `tumor` (x, y)."""
    pixels = np.full((HEIGHT, WIDTH, 3), 255, np.uint8)
    pixels[64:320, 64:448] = (230, 170, 210)
    x, y = tumor
    pixels[y : y + 40, x : x + 40] = (200, 0, 30)
    return pixels


def write_slide(path, pixels):
    """A tiled TIFF with a pyramid of three levels."""
    with tifffile.TiffWriter(path) as file:
        options = {"photometric": "rgb", "tile": (128, 128), "compression": None}
        for level in range(3):
            step = 2**level
            file.write(pixels[::step, ::step], subfiletype=1 if level else 0, **options)
    return path


@pytest.fixture
def slide(tmp_path):
    return write_slide(tmp_path / "slide.tif", draw_slide())


class Encoder(nn.Module):
    """Two features: the mean of (red - 2 blue) behind a ReLU on a grid of 8 x 8, and a constant."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 2, 8, stride=8)
        self.relu = nn.ReLU()
        with torch.no_grad():
            self.conv.weight.zero_()
            self.conv.bias.copy_(torch.tensor([0.0, 0.5]))
            self.conv.weight[0, 0], self.conv.weight[0, 2] = 1 / 64, -2 / 64

    def forward(self, x):
        return self.relu(self.conv(x)).mean((2, 3))


def build_head(seed=0):
    torch.manual_seed(seed)
    head = GatedAttention(2, 2, n_hidden=4)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.randn_like(parameter))
        head.tanh_layer.weight.copy_(torch.tensor([[4.0, 0.0]] * 4))
        head.weight_layer.weight.fill_(2.0)
        head.classifier.weight.copy_(torch.tensor([[-5.0, 0.0], [5.0, 1.0]]))
    return head


def test_tiles_lie_where_their_pixels_are(slide):
    tiles = read_slide_tiles(slide, tile_size=SIDE)
    assert tiles.size == (WIDTH, HEIGHT)
    assert tiles.downsample == 1
    expected = {(x, y) for x in range(64, 448, 64) for y in range(64, 320, 64)}  # the tissue, without the background
    assert {tuple(corner) for corner in tiles.corners.tolist()} == expected
    pixels = draw_slide()
    for (x, y), tile in zip(tiles.corners, tiles.iter_tiles(), strict=True):
        np.testing.assert_array_equal(tile, pixels[y : y + SIDE, x : x + SIDE])


def test_tiles_of_a_level_have_coordinates_of_level_zero(slide):
    tiles = read_slide_tiles(slide, tile_size=32, level=1, min_tissue=0.5)
    assert tiles.downsample == 2
    assert tiles.extent == 64
    pixels = draw_slide()[::2, ::2]
    (tile,) = tiles.iter_tiles([5])
    x, y = tiles.corners[5] // 2
    np.testing.assert_array_equal(tile, pixels[y : y + 32, x : x + 32])


def test_overlap_and_background(slide):
    everything = read_slide_tiles(slide, tile_size=SIDE, min_tissue=0)
    assert len(everything) == (WIDTH // SIDE) * (HEIGHT // SIDE)
    half = read_slide_tiles(slide, tile_size=SIDE, min_tissue=0, overlap=0.5)
    assert len(half) == (2 * WIDTH // SIDE - 1) * (2 * HEIGHT // SIDE - 1)
    with pytest.raises(InputError, match="level=7; the slide has the levels 0 to 2"):
        read_slide_tiles(slide, level=7)
    with pytest.raises(InputError, match="overlap"):
        read_slide_tiles(slide, overlap=1)
    with pytest.raises(ImageError, match="no tile"):
        read_slide_tiles(slide, tile_size=1024)


def test_files_that_are_no_slide_are_one_error_without_their_name(tmp_path):
    for name, content in {"Patient_Miller.svs": b"no slide", "empty.tif": b""}.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ImageError, match="OpenSlide") as error:
            read_slide_tiles(tmp_path / name)
        assert "Miller" not in str(error.value)
    damaged = write_slide(tmp_path / "cut.tif", draw_slide()).read_bytes()[:200_000]
    (tmp_path / "cut.tif").write_bytes(damaged)
    with pytest.raises(ImageError):
        list(read_slide_tiles(tmp_path / "cut.tif", tile_size=SIDE, min_tissue=0).iter_tiles())


def by_hand(pixels, corners, head):
    """Features, attention and logits from the pixels and the weights, without the modules."""
    tiles = np.stack([pixels[y : y + SIDE, x : x + SIDE] for x, y in corners]) / 255
    cells = tiles.reshape(len(tiles), 8, 8, 8, 8, 3).mean((2, 4))
    activation = np.stack([np.maximum(cells[..., 0] - 2 * cells[..., 2], 0), np.full(cells.shape[:3], 0.5)], 1)
    features = activation.mean((2, 3))
    weights = {name: value.detach().double().numpy() for name, value in head.named_parameters()}
    inner = np.tanh(features @ weights["tanh_layer.weight"].T + weights["tanh_layer.bias"])
    gate = 1 / (1 + np.exp(-(features @ weights["gate_layer.weight"].T + weights["gate_layer.bias"])))
    energy = (inner * gate) @ weights["weight_layer.weight"][0] + weights["weight_layer.bias"][0]
    attention = np.exp(energy) / np.exp(energy).sum()
    logits = weights["classifier.weight"] @ (attention @ features) + weights["classifier.bias"]
    return activation, features, attention, logits


def test_attention_and_score_are_those_by_hand(slide):
    tiles, head = read_slide_tiles(slide, tile_size=SIDE), build_head()
    explanation = explain_slide(Encoder(), head, tiles, "tumor", preprocess=PREPROCESS, class_names=["normal", "tumor"])
    _, _, attention, logits = by_hand(draw_slide(), tiles.corners, head)
    np.testing.assert_allclose(explanation.attention, attention, rtol=1e-4)
    assert explanation.attention.sum() == pytest.approx(1, abs=1e-5)
    assert explanation.score == pytest.approx(logits[1], rel=1e-4)
    assert explanation.probability == pytest.approx(np.exp(logits[1]) / np.exp(logits).sum(), rel=1e-4)
    assert explanation.label == "tumor"
    explained = attention[list(explanation.tile_explanations)]
    np.testing.assert_allclose(explained, np.sort(attention)[::-1][:8], rtol=1e-6)


def test_a_map_in_a_tile_is_the_gradient_of_the_score_of_the_slide(slide):
    """Grad-CAM by finite differences of the score by hand: the weight of a channel is d score / d feature / cells."""
    tiles, head = read_slide_tiles(slide, tile_size=SIDE), build_head()
    explanation = explain_slide(Encoder(), head, tiles, 1, preprocess=PREPROCESS, layer="relu", n_explained_tiles=3)
    activation, features, _, _ = by_hand(draw_slide(), tiles.corners, head)

    def score(changed):
        weights = {name: value.detach().double().numpy() for name, value in head.named_parameters()}
        inner = np.tanh(changed @ weights["tanh_layer.weight"].T + weights["tanh_layer.bias"])
        gate = 1 / (1 + np.exp(-(changed @ weights["gate_layer.weight"].T + weights["gate_layer.bias"])))
        energy = (inner * gate) @ weights["weight_layer.weight"][0]
        attention = np.exp(energy) / np.exp(energy).sum()
        return weights["classifier.weight"][1] @ (attention @ changed)

    for index, part in explanation.tile_explanations.items():
        slopes = []
        for channel in range(2):
            step = np.zeros_like(features)
            step[index, channel] = 1e-6
            slopes.append((score(features + step) - score(features - step)) / 2e-6)
        expected = np.maximum(np.tensordot(np.array(slopes) / 64, activation[index], 1), 0)
        np.testing.assert_allclose(part.attribution, expected, rtol=1e-3, atol=1e-6)
    assert max(part.attribution.max() for part in explanation.tile_explanations.values()) > 0


@pytest.mark.parametrize("tumor", [(300, 130), (80, 270), (400, 70)])
def test_maps_lie_on_the_tumor(tmp_path, tumor):
    tiles = read_slide_tiles(write_slide(tmp_path / "a.tif", draw_slide(tumor)), tile_size=SIDE)
    explanation = explain_slide(Encoder(), build_head(), tiles, 1, preprocess=PREPROCESS, layer="relu")
    x, y = tumor
    corner = tiles.corners[explanation.attention.argmax()]
    assert corner[0] - 40 < x < corner[0] + SIDE
    assert corner[1] - 40 < y < corner[1] + SIDE
    detail = explanation.compute_map("detail")
    assert detail.shape == tiles.thumbnail.shape[:2]
    scale = WIDTH / detail.shape[1]
    row, column = np.unravel_index(detail.argmax(), detail.shape)
    assert x - 8 <= column * scale <= x + 48
    assert y - 8 <= row * scale <= y + 48
    overlay = explanation.overlay()
    assert overlay.shape == tiles.thumbnail.shape
    explanation.save(tmp_path / "overlay.png", "detail")
    assert (tmp_path / "overlay.png").stat().st_size > 1000
    with pytest.raises(InputError, match="kind"):
        explanation.compute_map("heat")


def read_geojson(path):
    """Read by an independent parser, which checks the geometry."""
    geojson = pytest.importorskip("geojson")
    collection = geojson.loads(path.read_text())
    assert isinstance(collection, geojson.FeatureCollection)
    assert collection.is_valid, collection.errors()
    return collection["features"]


def signed_area(ring):
    points = np.array(ring)
    x, y = points[:-1].T
    return (x @ np.roll(y, -1) - y @ np.roll(x, -1)) / 2


def test_geojson_has_the_objects_that_qupath_reads(tmp_path, slide):
    tiles = read_slide_tiles(slide, tile_size=SIDE)
    explanation = explain_slide(Encoder(), build_head(), tiles, 1, preprocess=PREPROCESS, layer="relu")
    features = read_geojson(explanation.to_geojson(tmp_path / "map.geojson"))
    detections = [feature for feature in features if feature["properties"]["objectType"] == "detection"]
    annotations = [feature for feature in features if feature["properties"]["objectType"] == "annotation"]
    assert len(detections) == len(tiles)
    for feature, corner, attention in zip(detections, tiles.corners, explanation.attention, strict=True):
        (ring,) = feature["geometry"]["coordinates"]
        assert np.min(ring, 0).tolist() == corner.tolist()
        assert np.max(ring, 0).tolist() == (corner + SIDE).tolist()
        assert ring[0] == ring[-1]
        assert feature["properties"]["measurements"]["attention"] == pytest.approx(attention)
    for feature in features:
        kind = feature["properties"]["classification"]
        assert isinstance(kind["name"], str)
        assert len(kind["color"]) == 3
        assert all(isinstance(part, int) and 0 <= part <= 255 for part in kind["color"])
        outer, *holes = feature["geometry"]["coordinates"]
        assert signed_area(outer) > 0  # counterclockwise, as RFC 7946 asks
        assert all(signed_area(hole) < 0 for hole in holes)
    assert annotations
    peak = max(annotations, key=lambda feature: feature["properties"]["measurements"]["peak"])
    left, top = np.min(peak["geometry"]["coordinates"][0], 0)
    right, bottom = np.max(peak["geometry"]["coordinates"][0], 0)
    assert 300 - 8 <= left < right <= 340 + 8  # the red square, within one cell of the layer
    assert 130 - 8 <= top < bottom <= 170 + 8
    with pytest.raises(InputError, match="threshold"):
        explanation.to_geojson(tmp_path / "b.geojson", threshold=0)
    json.loads((tmp_path / "map.geojson").read_text(), parse_constant=pytest.fail)  # no NaN


def test_regions_have_their_holes():
    mask = np.zeros((8, 9), bool)
    mask[1:7, 2:8] = True
    mask[3:5, 4:6] = False
    mask[0, 0] = True
    regions = sorted(_trace_regions(mask), key=len)
    assert [len(rings) for rings in regions] == [1, 2]
    assert sorted(map(tuple, regions[0][0][:-1].tolist())) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    outer, hole = regions[1]
    assert signed_area(outer) == 36
    assert signed_area(hole) == -4


def test_heads_with_other_outputs(slide):
    tiles, features = read_slide_tiles(slide, tile_size=SIDE), nn.Linear(2, 2)
    n_tiles = len(tiles)

    class PerClass(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, features):
            attention = torch.stack([torch.arange(len(features)).float(), torch.ones(len(features))]).softmax(1)
            return {"logits": self.linear(attention[:1] @ features), "attention": attention}

    explanation = explain_slide(Encoder(), PerClass(), tiles, 0, preprocess=PREPROCESS, n_explained_tiles=0)
    assert explanation.attention.argmax() == n_tiles - 1
    second = explain_slide(Encoder(), PerClass(), tiles, 1, preprocess=PREPROCESS, n_explained_tiles=0)
    np.testing.assert_allclose(second.attention, 1 / n_tiles, rtol=1e-5)
    with pytest.raises(ModelError, match="the head returned a Tensor"):
        explain_slide(Encoder(), features, tiles, 0, preprocess=PREPROCESS)
    with pytest.raises(ModelError, match="the encoder returned"):
        explain_slide(nn.Conv2d(3, 2, 3), PerClass(), tiles, 0, preprocess=PREPROCESS)
    with pytest.raises(TargetError, match="out of range"):
        explain_slide(Encoder(), PerClass(), tiles, 5, preprocess=PREPROCESS)


def test_models_keep_their_mode(slide):
    encoder, head = Encoder().train(), build_head().train()
    explain_slide(encoder, head, read_slide_tiles(slide, tile_size=SIDE), 1, preprocess=PREPROCESS, n_explained_tiles=1)
    assert encoder.training
    assert head.training
    assert all(not module._forward_hooks for module in encoder.modules())
