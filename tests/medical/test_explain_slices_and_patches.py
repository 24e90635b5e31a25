"""Volumes through models of pictures, slice by slice, and through models of patches: maps at their place in the volume."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from camscope import GradCAM
from camscope.errors import GeometryError, InputError
from camscope.geometry import Placement
from camscope.images.preprocess import Preprocess
from camscope.images.scans.scan import Scan
from camscope.images.scans.scan_preprocess import ScanPreprocess
from camscope.medical import explain_patch, explain_patches, explain_slices

pytestmark = pytest.mark.filterwarnings("ignore::camscope.errors.CamscopeWarning")
WORLD = np.array(
    [[0.0, 0, 0.7, 3], [0, -0.7, 0, -7], [5, 0, 0, 11], [0, 0, 0, 1.0]]
)  # (d,row,column) leads up, back, right


class Brightness(nn.Module):
    """Class 1 is what is bright: its map is the picture itself, pooled by four."""

    def __init__(self, channels=1):
        super().__init__()
        self.pool = nn.AvgPool2d(4)
        self.channels = channels

    def forward(self, x):
        bright = self.pool(x[:, :1]).mean((2, 3))
        return torch.cat([0.1 - bright, bright], 1)


def bright_at(at, shape=(6, 16, 24)):
    values = np.zeros(shape, np.float32)
    values[at[0], at[1] : at[1] + 4, at[2] : at[2] + 4] = 1000
    return Scan(values, "scan-0", WORLD, unit="HU")


def test_slices_become_one_map_whose_peak_is_where_the_evidence_is():
    scan = bright_at((4, 8, 16))
    made = explain_slices(GradCAM(Brightness(), "pool", preprocess=ScanPreprocess(normalize=(0, 1000))), scan, 1)
    assert made.volume.grid == (6, 4, 6)
    assert np.argwhere(made.volume.attribution).tolist() == [[4, 2, 4]]
    assert made.highest_slice == 4
    assert made.scores.tolist() == pytest.approx([0, 0, 0, 0, 1 / 24, 0])
    values, covered = made.volume.placement.project(made.volume.attribution)
    assert covered.all()
    assert values[4].max() > 0
    assert values[[0, 1, 2, 3, 5]].max() == 0
    index = np.array([*made.volume.peak, 1])
    assert made.volume.peak_mm == tuple((WORLD @ index)[:3])
    assert "flagged: 5 of 6 slices" in made.volume.notes[-1]


@pytest.mark.slow
def test_slices_along_any_axis_of_a_turned_volume_lie_where_they_were_cut():
    scan = bright_at((1, 4, 8), (8, 12, 16))
    for orientation in (None, "RAS", "SPL", "LPI"):
        for axis in range(3):
            tool = GradCAM(Brightness(), "pool", preprocess=ScanPreprocess(orientation=orientation, resize=16))
            volume = explain_slices(tool, scan, 1, axis=axis, batch_size=5).volume
            values, covered = volume.placement.project(volume.attribution)
            assert covered.all()
            center = np.argwhere(values > 0.5 * values.max()).mean(0)
            assert np.abs(center - [1, 5.5, 9.5]).max() <= 1.1, (orientation, axis, center)
            assert volume.peak_mm == tuple((WORLD @ [*volume.peak, 1])[:3])
            assert np.abs(np.array(volume.peak) - [1, 5.5, 9.5]).max() <= 3
            np.testing.assert_array_equal(volume.image, np.where(scan.values > 0, 255, 0))


def test_slices_are_drawn_through_the_window_that_the_model_sees_them_through():
    scan = bright_at((4, 8, 16))
    way = ScanPreprocess(window=(2000, 4001))
    assert explain_slices(GradCAM(Brightness(), "pool", preprocess=way), scan, 1).volume.image.max() == 64


def test_a_model_of_pictures_sees_all_slices_on_one_scale():
    scan = bright_at((4, 8, 16))
    scan.values[2, :4, :4] = 500
    way = Preprocess(mean=(0, 0, 0), std=(1, 1, 1))
    made = explain_slices(GradCAM(Brightness(), "pool", preprocess=way), scan, 1)
    assert made.scores[2] == pytest.approx(made.scores[4] / 2, rel=0.01)
    assert made.volume.image.shape == (6, 16, 24)
    assert any("whole range, 0 to 1000 HU" in step for step in made.volume.scan_steps)


def test_slices_of_a_scan_whose_picture_may_hold_a_name_are_not_shown():
    tool = GradCAM(Brightness(), "pool", preprocess=ScanPreprocess(normalize=(0, 1000)))
    for said, shown in ((False, True), (True, False), (None, False)):
        made = explain_slices(tool, replace(bright_at((4, 8, 16)), has_burned_in_text=said), 1)
        assert (made.volume.image is not None) is shown
        assert (made.volume.model_input_image is not None) is shown
        assert any("not shown" in note for note in made.volume.notes) is not shown


def test_without_a_class_the_surest_slice_says_which():
    made = explain_slices(
        GradCAM(Brightness(), "pool", preprocess=ScanPreprocess(normalize=(0, 10))), bright_at((4, 8, 16))
    )
    assert made.volume.target == 1
    assert {one.target for one in made.slices} == {1}
    assert any("highest probability" in note for note in made.volume.notes)
    with pytest.raises(InputError, match="use explain"):
        explain_slices(
            GradCAM(Brightness(), "pool", preprocess=ScanPreprocess()), Scan(np.zeros((4, 4), np.float32), "s")
        )
    with pytest.raises(InputError, match="axis=3"):
        explain_slices(GradCAM(Brightness(), "pool", preprocess=ScanPreprocess()), bright_at((4, 8, 16)), axis=3)


class Volume(nn.Module):
    def __init__(self):
        super().__init__()
        self.pool = nn.AvgPool3d(2)

    def forward(self, x):
        bright = self.pool(x).mean((2, 3, 4))
        return torch.cat([-bright, bright], 1)


def test_a_patch_is_explained_at_its_place():
    scan = Scan(np.zeros((8, 8, 12), np.float32), "scan-0", WORLD)
    scan.values[6:8, 2:4, 8:10] = 1
    tool = GradCAM(Volume(), "pool", preprocess=ScanPreprocess())
    one = explain_patch(tool, scan, (4, 0, 6), (4, 4, 6), 1)
    assert one.peak[0] in (6, 7)
    assert one.peak[1] in (2, 3)
    assert one.peak[2] in (8, 9)
    assert one.coverage_mask().sum() == 4 * 4 * 6
    assert one.image.shape == scan.shape
    whole = explain_patches(tool, scan, (4, 4, 6), 1, overlap=0.5)
    assert whole.input_size == (8, 8, 12)
    assert whole.coverage_mask().all()
    assert np.abs(np.array(whole.peak) - [6.5, 2.5, 8.5]).max() <= 0.5
    assert "the mean of" in whole.notes[-1]
    for start, size in (((5, 0, 0), (4, 4, 6)), ((0, 0), (4, 4)), ((0, 0, 0), (0, 1, 1))):
        with pytest.raises(InputError):
            explain_patch(tool, scan, start, size, 1)
    with pytest.raises(InputError, match="differ in their top class"):
        explain_patches(tool, scan, (4, 4, 6), None)
    with pytest.raises(InputError, match="do not fit"):
        explain_patches(tool, scan, (9, 4, 6), 1)


def test_patches_are_flagged_only_where_none_of_them_says_anything():
    scan = Scan(np.zeros((8, 8, 12), np.float32), "scan-0", WORLD)
    scan.values[6:8, 2:4, 8:10] = 1
    tool = GradCAM(Volume(), "pool", preprocess=ScanPreprocess())
    for target in (0, 1):
        scan.values[0, 0, 0] = -90  # the patch of the highest score for class 0, of the least for class 1
        whole = explain_patches(tool, scan, (4, 4, 6), target, overlap=0)
        assert (whole.status == "ok") is bool((whole.attribution > 0).any())
        assert any("patches are flagged" in note for note in whole.notes)
    scan.values[0, 0, 0] = 0
    whole = explain_patches(tool, scan, (4, 4, 6), 0, overlap=0)
    assert whole.status == "no_positive_evidence"


def test_placements_follow_one_another():
    outer = Placement.identity((8, 12)).transposed((1, 0)).flipped(0)
    inner = Placement.identity(outer.input_size).resized((6, 4)).cropped((1, 1), (4, 2))
    point = [[1.5, 0.5]]
    np.testing.assert_allclose(outer.composed(inner).to_image(point), outer.to_image(inner.to_image(point)))
    with pytest.raises(GeometryError, match="image size of the inner placement"):
        outer.composed(Placement.identity((3, 3)))
