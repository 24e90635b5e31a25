"""Explanations with three axes: planes, slices, projections and animations of them; outlines of masks on those with two."""

import io
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from camscope import GradCAM, render
from camscope.errors import GeometryError, InputError, OutputError
from camscope.explanation import Explanation, figure
from camscope.geometry import Placement
from camscope.render.draw_regions_and_outlines import OUTLINE_COLORS
from camscope.render.image_grid import WARNING_COLOR
from tests.pictures import notebook_picture

pytestmark = pytest.mark.usefixtures("one_thread")


@dataclass(frozen=True, eq=False, repr=False)
class Placed(Explanation):
    """With a place in the world."""

    affine: np.ndarray | None = None


def volume(kind=Explanation, **facts):
    """A map of 3 x 4 x 5 cells on an input of 6 x 8 x 10, cut from an image of 8 x 10 x 10 from (1, 2, 0) on."""
    heat = np.zeros((3, 4, 5), np.float32)
    heat[1, 2, 3] = 5.0
    known = {
        "attribution": heat,
        "method": "gradcam",
        "target": 1,
        "label": "lesion",
        "score": 2.0,
        "layer": "layer4",
        "input_size": (6, 8, 10),
        "placement": Placement.identity((8, 10, 10)).cropped((1, 2, 0), (6, 8, 10)),
        "image": np.random.default_rng(0).normal(size=(8, 10, 10)).astype(np.float32),
        "model_input_image": np.full((6, 8, 10, 3), 90, np.uint8),
    }
    return kind(**{**known, **facts})


def test_a_volume_is_drawn_where_it_lies():
    one = volume()
    assert one.volume().shape == (8, 10, 10)
    assert one.volume("input").shape == (6, 8, 10)
    assert one.volume("grid").shape == (3, 4, 5)
    assert volume(image=None).volume().shape == (6, 8, 10)
    assert one.volume("grid").peak == (1, 2, 3)
    covered = np.zeros((8, 10, 10), bool)
    covered[1:7, 2:] = True
    np.testing.assert_array_equal(one.volume().covered, covered)
    # cell (1,2,3) reaches from 2 to 4, 4 to 6, 6 to 8 on the input; the image begins one slice and two rows earlier
    assert one.volume().peak == (3, 6, 6)


@pytest.mark.parametrize("image", ["float", "gray", "color"])
def test_an_image_of_any_kind_lies_below(image):
    numbers = np.random.default_rng(0).integers(0, 256, (8, 10, 10, 3), dtype=np.uint8)
    drawn = {"float": numbers[..., 0] - 1000.0, "gray": numbers[..., 0], "color": numbers}[image]
    one = volume(image=drawn)
    for picture in (one.planes(), one.slices(), one.projection(), one.overlay(), one.planes((0, 0, 0))):
        assert picture.dtype == np.uint8
        assert picture.shape[2] == 3
    assert (one.overlay(alpha=0.0) != one.overlay()).any()


def test_the_world_of_the_input_is_that_of_the_image():
    world = np.diag([-1.0, 2, 3, 1])
    world[:3, 3] = 100, -50, 7
    one = volume(Placed, affine=world)
    assert one.volume().spacing is None
    np.testing.assert_array_equal(one.volume().affine, world)
    np.testing.assert_allclose(one.volume("input").affine @ [0, 0, 0, 1], world @ [1, 2, 0, 1])
    # a cell of 2 x 2 x 2 voxels: the first one's center is between two voxels
    np.testing.assert_allclose(one.volume("grid").affine @ [0, 0, 0, 1], world @ [1.5, 2.5, 0.5, 1])
    assert one.volume("grid").voxel_size == (2, 4, 6)
    assert volume(Placed, affine=world, placement=None).volume().affine is None
    assert {view.name for view in one.volume().views} == {"axial", "coronal", "sagittal"}


@pytest.mark.slow
def test_a_volume_s_picture_is_its_planes(tmp_path):
    one = volume()
    np.testing.assert_array_equal(notebook_picture(one), one.planes())
    np.testing.assert_array_equal(
        np.asarray(Image.open(io.BytesIO(one.save(tmp_path / "why.png").read_bytes()))), one.planes()
    )
    two = figure([one, one])
    assert two.shape[0] > 480
    assert two.shape[1] > 2 * 200
    assert one.overlay(height=200).shape[0] == 200


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".gif", ".webp"])
@pytest.mark.one_in(2)
def test_a_saved_volume_moves(suffix, tmp_path):
    seen = []
    film = Image.open(io.BytesIO(volume().save(tmp_path / f"why{suffix}").read_bytes()))
    assert film.n_frames == 8
    path = volume().animate(
        tmp_path / f"slow{suffix}", 2, "input", seconds=1, on_progress=lambda *step: seen.append(step)
    )
    assert Image.open(io.BytesIO(path.read_bytes())).n_frames == 10
    assert seen[-1] == (10, 10)
    with pytest.raises(OutputError, match="exists"):
        volume().animate(path, overwrite=False)
    with pytest.raises(OutputError, match=r"as an animation; use \.gif or \.webp"):
        volume().animate(tmp_path / "why.png")


def test_a_flat_map_has_no_planes(tmp_path):
    flat = volume(attribution=np.ones((4, 5)), input_size=(8, 10), placement=None, image=None, model_input_image=None)
    for view in (flat.planes, flat.slices, flat.projection, flat.volume):
        with pytest.raises(InputError, match=r"the map \(4, 5\) has 2 axes and is not a volume: expected 3 axes"):
            view()
    with pytest.raises(
        InputError, match=r"the map \(4, 5\) has 2 axes and is not a volume: expected 3 axes; draw it by overlay\(\)"
    ):
        flat.animate(tmp_path / "why.gif")
    with pytest.raises(OutputError, match=r"cannot write \.gif"):
        flat.save(tmp_path / "why.gif")
    assert list(tmp_path.iterdir()) == []


def test_a_flagged_volume_says_so_once():
    one = volume(attribution=np.zeros((3, 4, 5), np.float32), status="no_positive_evidence")
    assert (one.planes() == WARNING_COLOR).all(2).any()
    assert not (one.overlay() == WARNING_COLOR).all(2).any(), "a figure has its own strip for it"
    assert (figure([one]) == WARNING_COLOR).all(2).any()
    assert (one.annotated_image(300) == WARNING_COLOR).all(2).any()
    assert volume(attribution=np.full((3, 4, 5), np.nan), status="nonfinite").planes().ndim == 3


def test_masks_are_outlined_in_each_plane():
    mask = np.zeros((8, 10, 10), bool)
    mask[2:6, 3:9, 3:9] = True
    picture = volume().planes(mask={"lesion": mask})
    assert (picture == OUTLINE_COLORS[0]).all(2).sum() > 300
    for view in (volume().slices, volume().projection, volume().overlay):
        assert (view(mask=mask) == OUTLINE_COLORS[0]).all(2).sum() > 100
    with pytest.raises(GeometryError, match="expected the same size"):
        volume().planes(size="input", mask=mask)


def test_masks_are_outlined_on_a_photograph():
    lungs, opacity = np.zeros((40, 50), bool), np.zeros((40, 50), bool)
    lungs[5:35, 5:45], opacity[10:20, 10:20] = True, True
    photo = np.random.default_rng(0).integers(0, 256, (40, 50, 3), dtype=np.uint8)
    one = volume(
        attribution=np.ones((4, 5)),
        input_size=(40, 50),
        placement=Placement.identity((40, 50)),
        image=photo,
        model_input_image=photo,
    )
    plain, named = one.overlay(mask=lungs), one.overlay(mask={"lungs": lungs, "opacity": opacity})
    assert plain.shape == (40, 50, 3)
    assert named.shape[0] > 40
    assert (named[5, 10:40] == OUTLINE_COLORS[0]).all() or (named[4, 10:40] == OUTLINE_COLORS[0]).all()
    assert (named[:40] == OUTLINE_COLORS[1]).all(2).any()
    assert (named[25:30, 10:40] == one.overlay()[25:30, 10:40]).all()
    assert one.overlay(mask={"lungs": lungs}, colorbar=True, height=200).shape[0] > 200
    with pytest.raises(GeometryError, match=r"the mask lungs is \(50, 40\)"):
        one.overlay(mask={"lungs": lungs.T})


@pytest.mark.filterwarnings(
    "ignore::camscope.errors.CamscopeWarning"
)  # whether anything speaks for the class does not matter
@pytest.mark.parametrize(("channels", "is_volume"), [(1, True), (2, True), (3, False), (4, True)])
def test_a_tensor_of_three_channels_is_a_video_and_of_any_other_number_a_volume(channels, is_volume):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv3d(channels, 2, 1), nn.AdaptiveAvgPool3d(1), nn.Flatten()).eval()
    x = torch.rand(channels, 4, 12, 12, generator=torch.Generator().manual_seed(0))
    one = GradCAM(net, "0").explain(x, 1)
    assert np.array_equal(one.overlay(), render.draw_planes(replace(one.volume(), flag=""), bar=False)) is is_volume


def test_a_video_stays_a_strip_and_a_place_makes_it_a_volume():
    film = np.random.default_rng(0).integers(0, 256, (6, 8, 10, 3), dtype=np.uint8)
    one = volume(image=None, model_input_image=film)
    for interpolation in ("smooth", "bilinear", "cells"):
        strip = render.draw_frames(film, one.heatmap("input", interpolation=interpolation), columns=render.MAX_FRAMES)
        np.testing.assert_array_equal(one.overlay(interpolation=interpolation), strip, "a strip of frames")
    with pytest.raises(InputError, match="outlines and boxes need 2 axes"):
        one.overlay(mask=np.ones((6, 8, 10)))
    placed = volume(Placed, image=None, model_input_image=film, affine=np.eye(4))
    assert (placed.overlay() != replace(placed, attribution=-placed.attribution).overlay()).any()
    np.testing.assert_array_equal(placed.overlay(), render.draw_planes(placed.volume(), bar=False))
