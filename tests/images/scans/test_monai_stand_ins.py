"""What MONAI's transforms are given and what is shown of it, with stand-ins for them: MONAI itself is tried in test_monai."""

from pathlib import Path

import pytest
import torch
from torch import nn

pytest.importorskip("pydicom")

import pydicom

from camscope import GradCAM, explain_slices, read_scan
from camscope.cli.scan_options import ScanOptions
from camscope.errors import ImageError, PreprocessError
from tests.scans import series

pytestmark = pytest.mark.filterwarnings("ignore::camscope.errors.CamscopeWarning")
CT = Path(pydicom.__file__).parent / "data" / "test_files" / "CT_small.dcm"


class LoadImage:
    """A file's path becomes a tensor (C,H,W)."""

    __module__ = "monai.transforms"

    def __call__(self, path):
        assert isinstance(path, str)
        return torch.from_numpy(read_scan(path).values.copy())[None]


def tool():
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2, 2)).eval()
    return GradCAM(net, "0", preprocess=LoadImage())


def test_text_in_a_picture_that_they_load_is_not_shown(tmp_path):
    data = pydicom.dcmread(CT)
    for said, shown in (("NO", True), ("YES", False)):
        data.BurnedInAnnotation = said
        data.save_as(tmp_path / f"{said}.dcm")
        one = tool().explain(tmp_path / f"{said}.dcm", 1)
        assert (one.model_input_image is not None) is shown
        assert any("not shown" in note for note in one.notes) is not shown
        assert one.overlay().ndim == 3


def test_on_the_command_line_they_get_the_path(tmp_path):
    reading = ScanOptions().with_privacy_for([tool()])
    assert tool().explain(reading.read_scan_or_return_path(CT), 1).attribution.shape == (126, 126)
    with pytest.raises(ImageError, match="--window has no effect: the model's MONAI preprocessing reads the file; set"):
        ScanOptions(window="40,400").with_privacy_for([tool()]).read_scan_or_return_path(CT)


def test_what_is_read_already_is_refused(tmp_path):
    with pytest.raises(PreprocessError, match="load a file themselves"):
        tool().explain(read_scan(CT), 1)
    with pytest.raises(PreprocessError, match="load a file themselves"):
        explain_slices(tool(), series(tmp_path / "in", 4), 1)
