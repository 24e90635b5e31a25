"""Explanation: views of the raw map, files that come back as they went, pictures that mean what they show."""

import base64
import html
import io
import json
import re
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from camscope import render
from camscope.atomic_writes_and_folder_locks import write_bytes
from camscope.errors import CamscopeError, GeometryError, InputError, OutputError
from camscope.explanation import STATUS_MEANINGS, ClassScore, Explanation, add_own_maximum, figure
from camscope.geometry import Placement
from tests.pictures import notebook_picture, photograph

HEAT = np.array([[0.0, 1.0, 0.5], [-3.0, 4.0, 2.0]])
TOP = {name: tuple(render.colorize(np.array([[1.0]]), name)[0, 0]) for name in ("inferno", "viridis", "diverging")}


def explanation(heat=HEAT, **facts):
    """A map of 2 x 3 cells on an input of 20 x 30, the center of an image of 40 x 50."""
    rng = np.random.default_rng(0)
    known = {
        "method": "gradcam",
        "target": 3,
        "label": "tabby",
        "score": 7.25,
        "probability": 0.5,
        "top_classes": (ClassScore(3, "tabby", 7.25, 0.5), ClassScore(0, "fox", 6.0, None)),
        "layer": "layer4",
        "layout": "channels_first 2x3",
        "input_size": (20, 30),
        "placement": Placement.identity((40, 50)).cropped((10, 10), (20, 30)),
        "notes": ("one", "two"),
        "name": "cat.jpg",
        "parameters": {"layer": "layer4", "call": 2},
        "versions": {"torch": "2.9"},
        "model": "beef",
        "image": rng.integers(0, 256, (40, 50, 3), dtype=np.uint8),
        "model_input_image": rng.integers(0, 256, (20, 30, 3), dtype=np.uint8),
    }
    return Explanation(np.array(heat, dtype=np.float32), **{**known, **facts})


# --- views


def test_facts_of_the_map():
    one = explanation()
    assert one.grid == (2, 3)
    assert one.stride == (10.0, 10.0)
    assert one.caption == "tabby (p=0.50) · Grad-CAM · layer4"
    assert explanation(probability=None, layer=None).caption == "tabby (score 7.25) · Grad-CAM"


def test_scales_of_the_grid_by_hand():
    one = explanation()
    np.testing.assert_array_equal(one.heatmap("grid", None), HEAT)
    np.testing.assert_array_equal(one.heatmap("grid"), [[0, 0.25, 0.125], [0, 1, 0.5]])
    np.testing.assert_array_equal(one.heatmap("grid", "symmetric"), HEAT / 4)
    np.testing.assert_array_equal(one.heatmap("grid", (-4.0, 4.0)), (HEAT + 4) / 8)
    np.testing.assert_array_equal(one.heatmap("grid", (0.0, 2.0)), [[0, 0.5, 0.25], [0, 1, 1]])
    assert not explanation(-abs(HEAT)).heatmap("grid").any()
    assert not explanation(HEAT * 0).heatmap("grid", "symmetric").any()
    assert (explanation(HEAT * 0 + 2).heatmap() == explanation(HEAT * 0 + 2).coverage_mask()).all()
    with pytest.raises(InputError, match=r"scale=\(2.0, 1.0\): expected \(lo, hi\) with lo < hi"):
        one.heatmap("grid", (2.0, 1.0))


def test_a_scale_shared_by_two_images_compares_them():
    weak, strong = explanation(HEAT / 2), explanation(HEAT)
    assert weak.heatmap("grid", (0.0, 4.0)).max() == 0.5 * strong.heatmap("grid", (0.0, 4.0)).max()


def test_what_was_cropped_away_is_not_covered():
    one, inside = explanation(), np.zeros((40, 50), dtype=bool)
    inside[10:30, 10:40] = True
    np.testing.assert_array_equal(one.coverage_mask(), inside)
    assert one.coverage_mask("input").shape == (20, 30)
    assert one.coverage_mask("input").all()
    assert one.coverage_mask("grid").shape == (2, 3)
    heat = one.heatmap("image", None)
    assert heat.shape == (40, 50)
    assert not heat[~inside].any()
    np.testing.assert_array_equal(heat[10:30, 10:40], one.heatmap("input", None))


def test_the_map_lies_on_the_input_cell_by_cell():
    # ten pixels a cell: pixel i has its center at i + 0.5, cell j at 10 j + 5; linear between, level outside
    rows = np.stack([np.interp(np.arange(30) + 0.5, [5, 15, 25], row) for row in HEAT])
    expected = np.stack([np.interp(np.arange(20) + 0.5, [5, 15], column) for column in rows.T], axis=1)
    np.testing.assert_allclose(explanation().heatmap("input", None), expected, atol=1e-5)


def test_an_unknown_place_or_size_is_an_error():
    lost = explanation(placement=None)
    for view in (lost.heatmap, lost.coverage_mask):
        with pytest.raises(GeometryError, match=r"unknown.*use size='input'"):
            view()
    assert lost.heatmap("input").shape == (20, 30)
    assert lost.overlay().shape == (20, 30, 3)
    with pytest.raises(GeometryError, match="size='photo': expected 'image', 'input' or 'grid'"):
        explanation().heatmap("photo")


def test_overlays_have_the_size_of_what_they_lie_on():
    one = explanation()
    assert one.overlay().shape == (40, 50, 3)
    assert one.overlay("input").shape == (20, 30, 3)
    assert one.overlay("grid").shape == (2, 3, 3)
    assert explanation(image=None).overlay().shape == (20, 30, 3)
    assert explanation(image=None, model_input_image=None).overlay("image").shape == (40, 50, 3)
    wide = one.overlay(colorbar=True)
    assert wide.shape[0] == 40
    assert wide.shape[1] > 50
    np.testing.assert_array_equal(wide[:, :50], one.overlay())


@pytest.mark.parametrize("colormap", TOP)
@pytest.mark.parametrize("size", ["image", "input", "grid"])
def test_the_hottest_pixel_has_the_top_color(size, colormap):
    one = explanation()
    values, picture = one.heatmap(size, None), one.overlay(size, alpha=1.0, colormap=colormap)
    hottest = np.unravel_index(values.argmax(), values.shape)
    assert tuple(picture[hottest]) == TOP[colormap]
    top = np.argwhere((picture == TOP[colormap]).all(2))
    limit = values.max() * (1 - 1 / 255)
    assert all(values[tuple(place)] >= limit for place in top), "a colder pixel has the top color"


def test_no_opacity_is_the_photograph_and_a_shifted_map_shifts_the_overlay():
    one = explanation()
    np.testing.assert_array_equal(one.overlay(alpha=0.0), one.image)
    gray = np.full((20, 30, 3), 100, dtype=np.uint8)
    place = Placement.identity((20, 30))
    left = explanation([[1.0, 0, 0]], image=gray, model_input_image=gray, placement=place).overlay()
    right = explanation([[0, 0, 1.0]], image=gray, model_input_image=gray, placement=place).overlay()
    np.testing.assert_array_equal(left, right[:, ::-1])
    assert (left[:, 20:] == 100).all()
    assert (left[:, :5] != 100).any(2).all()


def bar_ends(monkeypatch, one, **keywords):
    ends = []

    def spy(height, lo, hi, colormap="inferno", **rest):
        ends.append((lo, hi))
        return np.zeros((height, 4, 3), dtype=np.uint8)

    with monkeypatch.context() as patch:
        patch.setattr(render, "draw_color_bar", spy)
        one.overlay(colorbar=True, **keywords)
        figure([one], **{key: value for key, value in keywords.items() if key != "size"})
    return ends[0], ends[1]


def test_the_color_bar_names_the_raw_value_of_the_top_color(monkeypatch):
    """The hottest cell may lie where no pixel of the image is: in padding, or between two pixels."""
    place = Placement.identity((20, 10)).padded((0, 10), (0, 10))
    one = explanation(image=np.zeros((20, 10, 3), np.uint8), placement=place)
    shown = one.heatmap("image", None, interpolation="smooth")
    assert shown.max() < HEAT.max() - 0.01
    for ends in bar_ends(monkeypatch, one, colormap="inferno"):
        assert ends == (0.0, shown.max())
    for pair in ((-1.0, 6.0), [-1, 6]):
        for ends in bar_ends(monkeypatch, one, scale=pair):
            assert ends == (-1.0, 6.0)
        for colors in ("inferno", "diverging"):
            assert np.array_equal(one.overlay(scale=pair, colormap=colors), one.overlay(scale=(-1, 6), colormap=colors))
    for ends in bar_ends(monkeypatch, one, colormap="diverging"):
        assert ends == (-abs(shown).max(), abs(shown).max())
    for ends in bar_ends(monkeypatch, one, scale="symmetric", colormap="inferno"):
        assert ends == (0.0, abs(shown).max())
    for ends in bar_ends(monkeypatch, explanation(-abs(HEAT)), colormap="inferno"):
        assert ends == (0.0, 0.0)
    for ends in bar_ends(monkeypatch, explanation(-abs(HEAT))):
        assert ends[0] == -ends[1] < 0


def test_a_map_with_negative_values_has_the_diverging_colors_unless_others_are_named():
    signed, positive = explanation(HEAT - HEAT.mean()), explanation(abs(HEAT))
    assert (signed.colormap, positive.colormap) == ("diverging", "inferno")
    np.testing.assert_array_equal(signed.overlay("input"), signed.overlay("input", colormap="diverging"))
    np.testing.assert_array_equal(positive.overlay("input"), positive.overlay("input", colormap="inferno"))
    assert not np.array_equal(signed.overlay("input"), signed.overlay("input", colormap="inferno"))


def test_single_pixels_are_scaled_by_what_nearly_all_stay_under(monkeypatch):
    heat = np.linspace(0, 1, 1001).reshape(7, 143).astype(np.float32)
    heat[0, 0], heat[0, 1] = 1000.0, -500.0  # two outliers
    one = replace(explanation(heat), input_size=(7, 143), placement=None)
    top = np.quantile(abs(heat), 0.995)
    assert 0.99 < top < 1
    np.testing.assert_allclose(one.heatmap("grid", "auto"), np.clip(heat / top, -1, 1), rtol=1e-6)
    np.testing.assert_allclose(one.heatmap("grid", "robust"), one.heatmap("grid", "auto"))
    assert one.heatmap("grid").max() == 1
    assert one.heatmap("grid")[6, 142] == np.float32(1e-3), "the default divides by the maximum, as ever"
    coarse = replace(one, input_size=(14, 286))
    np.testing.assert_allclose(coarse.heatmap("grid", "auto"), coarse.heatmap("grid", "max"))
    assert replace(one, attribution=np.eye(20, 1000, dtype=np.float32)).heatmap("grid", "robust").max() == 1, (
        "most are zero"
    )


def test_the_diverging_map_is_white_at_zero_for_every_scale():
    one, gray = (
        explanation([[-4.0, 0.0, 2.0]], image=None, model_input_image=None),
        198.0,
    )  # 128 is no picture; 0.45 of its way from white
    for scale, positions in (
        ("max", (-1.0, 0.0, 0.5)),
        ("symmetric", (-1.0, 0.0, 0.5)),
        (None, (-1.0, 0.0, 0.5)),
        ((-4.0, 4.0), (-1.0, 0.0, 0.5)),
        ((-1.0, 2.0), (-0.5, 0.0, 1.0)),
    ):
        colors = render.colorize(np.array([positions]), "diverging")[0]
        expected = gray + abs(np.array(positions))[:, None] * (colors - gray)  # weak values are transparent, 0 wholly
        shown = one.overlay("grid", scale=scale, alpha=1.0, colormap="diverging")[0]
        np.testing.assert_allclose(shown, expected, atol=0.51, err_msg=str(scale))


def test_contours_and_boxes_enclose_what_reaches_the_level():
    one = explanation()
    mask = one.heatmap() >= 0.5
    rows, columns = np.where(mask)
    (box,) = one.boxes(0.5)
    assert (box.top, box.left) == (rows.min(), columns.min())
    assert (box.height, box.width) == (np.ptp(rows) + 1, np.ptp(columns) + 1)
    (polygon,) = one.contours(0.5)
    np.testing.assert_array_equal(polygon.min(0), [rows.min(), columns.min()])
    np.testing.assert_array_equal(polygon.max(0), [rows.max() + 1, columns.max() + 1])
    for keywords in ({"contour": 0.5}, {"contour": [0.3, 0.6]}, {"box_threshold": 0.5}):
        drawn = one.overlay(**keywords)
        assert drawn.shape == (40, 50, 3)
        assert (drawn != one.overlay(contour=2.0)).any(), "nothing was drawn"
    assert one.boxes(2.0) == []


def test_not_a_number_is_shown_as_nothing_and_stays_in_the_raw_map():
    heat = HEAT.copy()
    heat[0, 0], heat[0, 2], heat[1, 0] = np.nan, np.inf, -np.inf
    one = explanation(heat, status="nonfinite")
    assert np.isnan(one.attribution[0, 0])
    for scale in ("max", "symmetric", None, (0.0, 1.0)):
        assert np.isfinite(one.heatmap(scale=scale)).all()
    np.testing.assert_array_equal(one.heatmap("grid"), [[0, 0.25, 0], [0, 1, 0.5]])
    assert one.overlay(colorbar=True).dtype == np.uint8


# --- statuses


AMBER = (255, 191, 0)


@pytest.mark.parametrize("status", STATUS_MEANINGS)
def test_a_flagged_map_is_marked_in_figures_and_words(status):
    ok, flagged = explanation(), explanation(status=status)
    assert (figure([flagged]) == AMBER).all(2).sum() > 1000
    assert not (figure([ok]) == AMBER).all(2).any()
    assert STATUS_MEANINGS[status] in html.unescape(flagged._repr_html_())
    two = figure([ok, flagged])
    marked = np.argwhere((two == AMBER).all(2))
    assert marked[:, 1].min() > two.shape[1] / 2 - 5, "the mark stands under the wrong picture"


def test_a_saved_overlay_has_a_caption_on_request(tmp_path):
    one = explanation()
    plain, captioned = (Image.open(one.save(tmp_path / f"{flag}.png", caption=flag)) for flag in (False, True))
    overlay = np.asarray(plain)
    assert plain.width == captioned.width
    assert captioned.height > plain.height
    assert (np.asarray(captioned)[: plain.height] == overlay).all()
    assert np.asarray(captioned)[plain.height :].std() > 0  # text


def test_a_caption_has_the_own_maximum_on_a_scale_that_several_maps_share():
    one = explanation(np.array([[0.0, 0.3217, 0.1], [0.0, 0.0, 0.0]]))
    assert add_own_maximum(one.caption, one, (0, 2.0)) == f"{one.caption} · max 0.32"
    assert add_own_maximum(one.caption, one, "auto") == one.caption
    own, shared = (
        figure([one, one]),
        figure([one, one], scale=(0, float(one.heatmap(scale=None, interpolation="smooth").max()))),
    )
    assert (own[:300] == shared[:300]).all()  # the same map
    assert not np.array_equal(own, shared)  # another caption


def test_a_figure_of_several_has_a_cell_for_each():
    one = figure([explanation()])
    three = figure([explanation(label=str(i)) for i in range(3)], columns=3)
    assert three.dtype == np.uint8
    assert three.shape[0] == one.shape[0]
    assert three.shape[1] > 2.5 * one.shape[1]


@pytest.mark.slow
@pytest.mark.parametrize(("height", "width"), [(960, 1280), (300, 9000)])
@pytest.mark.one_in(2)
def test_a_notebook_gets_at_most_300_kb_of_a_large_photograph_in_one_format(height, width):
    place = Placement.identity((height, width))
    noise = photograph(height, width)  # nothing takes more bytes
    one = explanation(image=noise, placement=place, input_size=(height, width))
    assert len(one._repr_html_()) <= 300_000
    shown = notebook_picture(one)
    assert max(shown.shape[:2]) <= 1200
    assert abs(shown.shape[1] / shown.shape[0] - one.overlay(colorbar=True).shape[1] / height) < 0.05 * width / height
    assert one.overlay().shape == noise.shape, "the full size, where it is asked for"


def test_a_small_picture_is_shown_in_a_notebook_as_it_is():
    one = explanation()
    np.testing.assert_array_equal(notebook_picture(one), one.overlay(colorbar=True))


def test_notebooks_get_an_escaped_label():
    nasty = '<script>alert("1")</script> & "quoted" \' onerror=x'
    page = explanation(label=nasty, status="flat")._repr_html_()
    assert "<script" not in page
    assert re.findall(r"<(/?\w+)", page) == ["figure", "img", "figcaption", "/figcaption", "/figure"]
    assert page.count('"') == 4, "a quote of the label ended an attribute"
    picture = re.search(r"base64,([A-Za-z0-9+/=]+)", page)[1]
    assert Image.open(io.BytesIO(base64.b64decode(picture))).size[1] == 40


# --- files


def assert_same(found, one, pictures):
    for field in Explanation.__dataclass_fields__:
        if field == "attribution":
            assert found.attribution.dtype == one.attribution.dtype
            np.testing.assert_array_equal(found.attribution, one.attribution)
        elif field in ("image", "model_input_image"):
            expected = getattr(one, field) if pictures else None
            assert (getattr(found, field) is None) == (expected is None)
            if expected is not None:
                np.testing.assert_array_equal(getattr(found, field), expected)
        else:
            assert getattr(found, field) == getattr(one, field), field


@pytest.mark.parametrize("suffix", [".npz", ".json", ".NPZ"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_saved_explanations_come_back(tmp_path, suffix, dtype):
    heat = np.random.default_rng(1).normal(size=(5, 7)).astype(dtype) / 3
    heat[0, 0], heat[0, 1] = np.nan, np.inf
    for facts in (
        {},
        {
            "placement": None,
            "image": None,
            "model_input_image": None,
            "target": None,
            "probability": None,
            "top_classes": (),
        },
    ):
        one = Explanation(heat, **{**{k: v for k, v in vars(explanation()).items() if k != "attribution"}, **facts})
        path = one.save(tmp_path / f"why{suffix}")
        assert path == tmp_path / f"why{suffix}"
        assert_same(Explanation.load(path), one, pictures=suffix.lower() == ".npz")
        assert [entry.name for entry in tmp_path.iterdir()] == [f"why{suffix}"]


@pytest.mark.parametrize("suffix", [".png", ".jpg", ".webp"])
def test_saved_pictures_are_the_overlay_at_its_own_size(tmp_path, suffix):
    one = explanation()
    path = one.save(str(tmp_path / "deep" / f"why{suffix}"))
    with Image.open(path) as picture:
        found = np.asarray(picture.convert("RGB"))
    expected = one.overlay()
    assert found.shape == expected.shape == one.image.shape
    assert abs(found.astype(int) - expected).mean() < (3 if suffix == ".jpg" else 1e-9)


def test_a_flagged_picture_says_so_under_the_overlay(tmp_path):
    one = explanation(status="flat")
    with Image.open(one.save(tmp_path / "why.png")) as picture:
        found = np.asarray(picture.convert("RGB"))
    rows = len(one.image)
    assert np.array_equal(found[:rows], one.overlay())
    strip = found[rows:].reshape(-1, 3)
    assert len(strip)
    assert (strip == AMBER).all(1).mean() > 0.2


def test_an_unknown_suffix_writes_nothing(tmp_path):
    for name in ("why.txt", "why", "why.png.exe", ".png"):
        with pytest.raises(OutputError, match="cannot write"):
            explanation().save(tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_overwriting_is_refused_on_request(tmp_path):
    path = explanation().save(tmp_path / "why.json")
    before = path.read_bytes()
    with pytest.raises(OutputError, match="exists"):
        explanation(label="other").save(path, overwrite=False)
    assert path.read_bytes() == before
    explanation(label="other").save(path)
    assert Explanation.load(path).label == "other"


def broken(*args, **kwargs):
    raise OSError("the disk is full")


@pytest.mark.parametrize("at", ["camscope.render.encode_image", "os.fsync", "pathlib.Path.replace"])
def test_a_failure_leaves_the_old_file_and_no_other(tmp_path, monkeypatch, at):
    path = tmp_path / "why.png"
    explanation().save(path)
    before = path.read_bytes()
    monkeypatch.setattr(at, broken)
    with pytest.raises(OSError, match="the disk is full"):
        explanation(label="other").save(path)
    with pytest.raises(OSError, match="the disk is full"):
        explanation().save(tmp_path / "new.png")
    assert [entry.name for entry in tmp_path.iterdir()] == ["why.png"]
    assert path.read_bytes() == before


def test_files_have_ordinary_permissions_and_links_are_replaced_not_followed(tmp_path):
    ordinary, target = tmp_path / "ordinary", tmp_path / "target"
    ordinary.write_bytes(b"")
    target.write_bytes(b"precious")
    link = tmp_path / "link.json"
    link.symlink_to(target)
    write_bytes(link, b"{}")
    assert target.read_bytes() == b"precious"
    assert not link.is_symlink()
    assert link.stat().st_mode == ordinary.stat().st_mode
    long = tmp_path / ("x" * 250 + ".json")
    assert write_bytes(long, b"{}").read_bytes() == b"{}"


class Planted:
    def __reduce__(self):
        return Path.touch, (Path("planted"),)


def garbage(tmp_path):
    good = explanation()
    npz, facts = (
        good.save(tmp_path / "good.npz").read_bytes(),
        json.loads(good.save(tmp_path / "good.json").read_text()),
    )
    pickled = io.BytesIO()
    np.savez(pickled, facts=np.array(json.dumps(facts)), attribution=np.array([Planted()], dtype=object))
    plain, words, empty = io.BytesIO(), io.BytesIO(), io.BytesIO()
    np.save(plain, HEAT)
    np.savez(words, facts=np.array("not json"), attribution=HEAT)
    with zipfile.ZipFile(empty, "w"):
        pass
    flipped = bytearray(npz)
    flipped[len(npz) // 2] ^= 0xFF
    yield from (
        ("empty.npz", b""),
        ("text.npz", b"hello, this is a text file"),
        ("truncated.npz", npz[: len(npz) // 2]),
        ("flipped.npz", bytes(flipped)),
        ("pickled.npz", pickled.getvalue()),
        ("array.npz", plain.getvalue()),
        ("words.npz", words.getvalue()),
        ("nothing.npz", empty.getvalue()),
        ("empty.json", b""),
        ("bytes.json", bytes(range(256))),
        ("list.json", b"[1, 2]"),
        ("text.json", b'"text"'),
        ("number.json", b"3"),
        ("none.json", b"null"),
        ("missing.json", json.dumps({k: v for k, v in facts.items() if k != "attribution"}).encode()),
        ("extra.json", json.dumps({**facts, "__class__": 1}).encode()),
        ("ragged.json", json.dumps({**facts, "attribution": [[1, 2], [3]]}).encode()),
        ("letters.json", json.dumps({**facts, "attribution": [["a"]], "dtype": "U1"}).encode()),
        ("objects.json", json.dumps({**facts, "attribution": [[{}]], "dtype": "O"}).encode()),
        ("place.json", json.dumps({**facts, "placement": {"matrix": 3}}).encode()),
        ("scores.json", json.dumps({**facts, "top_classes": [3]}).encode()),
    )


def test_whatever_is_no_saved_explanation_is_one_clear_error(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, content in garbage(tmp_path):
        path = tmp_path / name
        path.write_bytes(content)
        with pytest.raises(InputError, match=f"{name} is not an explanation that save"):
            Explanation.load(path)
    assert not (tmp_path / "planted").exists(), "something was unpickled"
    with pytest.raises(InputError, match="cannot be read: No such file"):
        Explanation.load(tmp_path / "absent.npz")


def test_errors_are_of_the_tree():
    assert issubclass(OutputError, CamscopeError)
    assert issubclass(OutputError, OSError)


@pytest.mark.parametrize("status", ["zero_gradient", "constant_score"])
def test_a_map_without_information_is_drawn_without_a_hot_spot(status):
    image = np.random.default_rng(0).integers(0, 255, (8, 8, 3), dtype=np.uint8)
    noise = Explanation(
        np.array([[0.0, 2e-12], [1e-12, 0.0]]), "gradcam", 3, "tabby", 7.5, input_size=(8, 8), model_input_image=image
    )
    assert (noise.overlay() != image).any()
    flagged = replace(noise, status=status)
    np.testing.assert_array_equal(flagged.overlay(), image)
    np.testing.assert_array_equal(flagged.overlay(contour=0.5), image)
    np.testing.assert_array_equal(flagged.overlay(box_threshold=0.5), image)
    assert flagged.annotated_image().shape[0] > 8, "the strip with the warning"
    assert flagged.heatmap("input", scale=None).max() == 2e-12
    assert flagged.attribution.max() == 2e-12
    volume = Explanation(
        np.eye(4)[:2].reshape(2, 2, 2), "gradcam", 3, "tabby", 7.5, input_size=(4, 4, 4), status=status
    )
    assert not volume.volume("input").values.any()
