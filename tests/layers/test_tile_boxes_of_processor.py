"""Where the tiles of a processor come from, for processors whose geometry is known."""

import numpy as np
import pytest
from PIL import Image

from camscope.errors import GeometryError
from camscope.layers.tile_boxes_of_processor import measure_tiles

MEAN, STD = np.array([0.5, 0.4, 0.3])[:, None, None], np.array([0.2, 0.3, 0.25])[:, None, None]


def normalize(image, size, box=None, resample=Image.Resampling.BICUBIC):
    """Crop a box (top, left, bottom, right), resize it, and normalize it as processors do: (3,h,w)."""
    resized = Image.fromarray(image).resize(size[::-1], resample, box=box and (box[1], box[0], box[3], box[2]))
    return (np.asarray(resized, np.float64).transpose(2, 0, 1) / 255 - MEAN) / STD


def boxes(read_tiles, size=(90, 160)):
    return np.array([tile.box for tile in measure_tiles(read_tiles, size)])


@pytest.mark.parametrize("resample", [Image.Resampling.BILINEAR, Image.Resampling.LANCZOS])
@pytest.mark.parametrize("size", [(48, 48), (300, 200)])
def test_a_resized_image_is_the_whole_image(size, resample):
    found = boxes(lambda image: normalize(image, size, resample=resample)[None])
    assert found.tolist() == [[0, 0, 90, 160]]


def test_tiles_and_an_overview():
    def read_tiles(image):
        large = normalize(image, (64, 96))
        tiles = [large[:, y : y + 32, x : x + 32] for y in (0, 32) for x in (0, 32, 64)]
        return np.stack([*tiles, normalize(image, (32, 32))])

    expected = [(y, x, y + 45, x + 160 / 3) for y in (0, 45) for x in (0, 160 / 3, 320 / 3)]
    assert np.abs(boxes(read_tiles) - [*expected, (0, 0, 90, 160)]).max() < 0.7


def test_a_crop_leaves_out_the_borders():
    assert (
        np.abs(boxes(lambda image: normalize(image, (56, 56), (10, 20, 80, 90))[None]) - (10, 20, 80, 90)).max() < 0.7
    )


def test_padding_lies_outside_the_image():
    def read_tiles(image):
        padded = np.zeros((3, 64, 64))
        padded[:, 14:50] = normalize(image, (36, 64))  # 2.5 pixels of the image each
        return padded[None]

    assert np.abs(boxes(read_tiles) - (-35, 0, 125, 160)).max() < 0.8


@pytest.mark.parametrize(
    ("read_tiles", "message"),
    [
        (lambda image: normalize(image, (32, 32))[None, :, :, ::-1], "turned, flipped or warped"),
        (lambda image: normalize(image, (32, 32)).transpose(0, 2, 1)[None], "turned, flipped or warped"),
        (lambda image: np.zeros((1, 3, 32, 32)), "shows nothing of the image"),
        (lambda image: normalize(image, (32, 32)), "expected .M,3,h,w."),
    ],
)
def test_other_geometry_is_an_error(read_tiles, message):
    with pytest.raises(GeometryError, match=message):
        boxes(read_tiles)
