"""MONAI's transforms and tensors, where MONAI is installed: the map lies where MONAI's own inverse puts it."""

import warnings

import numpy as np
import pytest
import torch
from torch import nn

pytest.importorskip("nibabel")

import nibabel

from camscope import GradCAM
from camscope.errors import ImageError

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.thorough,  # test_monai_stand_ins asks it of stand-ins: MONAI takes five seconds to import
]
NET = nn.Sequential(nn.Conv3d(1, 2, 1), nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(2, 2)).eval()


@pytest.fixture(scope="module")
def monai():
    """MONAI's transforms, which take seconds to import: only where these tests run."""
    return pytest.importorskip(
        "monai.transforms", reason="MONAI is not installed: its transforms are tried where it is"
    )


@pytest.fixture
def file(tmp_path):
    values = np.random.default_rng(0).random((24, 30, 12)).astype(np.float32)
    world = np.array([[0, 0, 2.0, 5], [-1.0, 0, 0, 7], [0, 1.5, 0, -3], [0, 0, 0, 1]])
    nibabel.save(nibabel.Nifti1Image(values, world), tmp_path / "brain.nii.gz")
    return tmp_path / "brain.nii.gz"


def test_the_place_is_that_of_monais_own_inverse(monai, file):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        turn = monai.Orientation("PLI")
    steps = (turn, monai.Spacing((2.0, 1.5, 3.0)), monai.Flip(1), monai.ResizeWithPadOrCrop((10, 20, 8)))
    way = monai.Compose([monai.LoadImage(image_only=True), monai.EnsureChannelFirst(), *steps])
    one = GradCAM(NET, "0", preprocess=way).explain(str(file), 1)
    made = way(str(file))
    spot = torch.zeros(made.shape[1:])
    spot[3:5, 8:11, 4] = 1
    values, covered = one.placement.project(spot.numpy())
    back = made.clone()
    back[:] = spot[None]
    for step in reversed(steps):
        back = step.inverse(back)
    mine, theirs = ((np.argwhere(v > 0.4 * v.max())).mean(0) for v in (values, back[0].numpy()))
    assert np.abs(mine - theirs).max() < 1.0
    np.testing.assert_allclose(one.affine, nibabel.load(file).affine)
    assert one.placement.image_size == (24, 30, 12)
    assert not covered.all()
    assert "brain" not in repr(one)


def test_dictionaries_and_tensors_are_taken_too(monai, file):
    plain = monai.Compose([monai.LoadImage(image_only=True), monai.EnsureChannelFirst(), monai.Orientation("RAS")])
    named = monai.Compose(
        [monai.LoadImaged(["image"]), monai.EnsureChannelFirstd(["image"]), monai.Orientationd(["image"], "RAS")]
    )
    first = GradCAM(NET, "0", preprocess=plain).explain(str(file), 1)
    second = GradCAM(NET, "0", preprocess=named).explain(str(file), 1)
    third = GradCAM(NET, "0").explain(plain(str(file)), 1)
    for other in (second, third):
        assert other.placement == first.placement
        np.testing.assert_array_equal(other.attribution, first.attribution)
        assert type(other.attribution) is np.ndarray


def test_what_the_matrices_do_not_tell_has_no_place_and_what_fails_names_no_file(monai, file):
    for bent in (monai.Transpose((0, 2, 1, 3)), monai.Rand3DElastic((1, 2), (1, 2), prob=1.0)):
        way = monai.Compose(
            [monai.LoadImage(image_only=True), monai.EnsureChannelFirst(), bent, monai.ScaleIntensity()]
        )
        one = GradCAM(NET, "0", preprocess=way).explain(str(file), 1)
        assert one.placement is None
        assert "no known geometry" in one.notes[-1]
    with pytest.raises(ImageError, match="raised") as error:
        GradCAM(NET, "0", preprocess=monai.LoadImage(image_only=True)).explain(str(file.with_name("nobody.nii.gz")), 1)
    assert "nobody" not in str(error.value)
    with pytest.raises(ImageError, match="EnsureChannelFirst"):
        GradCAM(NET, "0", preprocess=monai.Compose([monai.LoadImage(image_only=True), lambda x: x[0, 0]])).explain(
            str(file), 1
        )
