"""Animations: as many pictures as slices, as long as asked, in the map's own colors, of a sane size."""

import io

import numpy as np
import pytest
from PIL import Image

from camscope.errors import InputError
from camscope.render import Volume, animate_volume, colorize, encode_animation
from camscope.render.volume_annotations import choose_font_size, compute_slice_row_and_column_in_frame

pytestmark = pytest.mark.usefixtures("one_thread")


def volume(shape=(12, 16, 20), peak=(4, 5, 6)):
    values = np.zeros(shape)
    values[peak] = 1.0
    picture = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    return Volume(picture, values, alpha=1.0)


@pytest.mark.parametrize("suffix", [".gif", ".webp"])
def test_every_slice_is_a_picture_and_a_round_takes_its_seconds(suffix):
    watched = []
    data = animate_volume(volume(), seconds=1.9, suffix=suffix, size=80, on_progress=lambda *seen: watched.append(seen))
    film = Image.open(io.BytesIO(data))
    assert film.n_frames == 12
    assert film.info["loop"] == 0
    durations = []
    for frame in range(12):
        film.seek(frame)
        film.load()
        durations.append(film.info["duration"])
    assert sum(durations) == 1900
    assert set(durations) <= {150, 160}
    assert watched == [(n, 12) for n in range(1, 13)]


def test_the_hottest_voxel_shines_in_its_own_slice_only():
    one = volume()
    film = Image.open(io.BytesIO(animate_volume(one, size=20 * 21)))
    top, left = compute_slice_row_and_column_in_frame(choose_font_size(420), has_letters=False)
    row, column = top + 5 * 21 + 10, left + 6 * 21 + 10
    hottest = colorize(np.ones((1, 1)))[0, 0].astype(int)
    for frame in range(12):
        film.seek(frame)
        away = abs(np.asarray(film.convert("RGB"))[row, column].astype(int) - hottest).max()
        assert (away <= 4) == (frame == 4), (frame, away)


def test_a_gif_keeps_grays_and_the_map_s_own_colors():
    grays = np.tile(np.arange(256, dtype=np.uint8)[None, :, None], (64, 1, 3))
    ramp = colorize(np.tile(np.linspace(0, 1, 256), (64, 1)))
    noise = np.random.default_rng(0).integers(0, 256, (64, 256, 3), dtype=np.uint8)
    pictures = [grays, ramp, noise]
    film = Image.open(io.BytesIO(encode_animation(pictures, palette_colors=colorize(np.linspace(0, 1, 64)[None]))))
    for frame, limit in ((0, 6), (1, 12)):
        film.seek(frame)
        assert abs(np.asarray(film.convert("RGB")).astype(int) - pictures[frame]).max() <= limit


@pytest.mark.slow
def test_a_long_way_is_thinned_and_small():
    g = np.indices((64, 256, 256))
    picture = ((g[1] // 8 + g[2] // 8 + g[0]) % 7 * 30).astype(np.uint8)
    values = np.exp(-((g[0] - 30) ** 2 + (g[1] - 90) ** 2 / 8 + (g[2] - 150) ** 2 / 8) / 80)
    one = Volume(picture, values)
    assert len(animate_volume(one, size=256)) < 3e6
    film = Image.open(io.BytesIO(animate_volume(one, size=64, max_frames=10)))
    assert film.n_frames == 10
    assert Image.open(io.BytesIO(animate_volume(one, 1, size=64, max_frames=7))).n_frames == 7


def test_what_cannot_move_is_one_clear_error():
    still = np.zeros((8, 8, 3), np.uint8)
    with pytest.raises(InputError, match=r"no animation format '.mp4'; choose from .gif, .webp"):
        encode_animation([still], suffix=".mp4")
    with pytest.raises(InputError, match="of 2 sizes"):
        encode_animation([still, still[:4]])
    with pytest.raises(InputError, match="0 images"):
        encode_animation([])
    with pytest.raises(InputError, match="seconds=0"):
        encode_animation([still], seconds=0)
