"""Every file that pydicom's package carries: decoded, without pixels, or one named error; by name, so that none slips."""

import collections
import importlib.util

import numpy as np
import pydicom
import pytest

from camscope.errors import ImageError
from camscope.images.scans.dicom_file_reader import read_dicom
from tests.scan_files import PACKAGED

WITHOUT_PIXELS = {
    *("ExplVR_BigEndNoMeta.dcm", "ExplVR_LitEndNoMeta.dcm", "UN_sequence.dcm", "empty_charset_LEI.dcm"),
    *("no_meta_group_length.dcm", "priv_SQ.dcm", "reportsi.dcm", "reportsi_with_empty_number_tags.dcm", "rtplan.dcm"),
    *("rtplan_truncated.dcm", "rtstruct.dcm", "test-SR.dcm", "waveform_ecg.dcm", "dicomdirtests/DICOMDIR"),
    *(
        f"dicomdirtests/DICOMDIR-{kind}"
        for kind in ("bigEnd", "empty.dcm", "implicit", "nooffset", "nopatient", "reordered")
    ),
}
NO_CODEC = "the codec for it is not installed (pylibjpeg and pylibjpeg-libjpeg)"
ERRORS = {
    "JPEG-lossy.dcm": NO_CODEC,
    "JPGExtended.dcm": NO_CODEC,
    "SC_rgb_jpeg_gdcm.dcm": NO_CODEC,
    "GDCMJ2K_TextGBR.dcm": "the pixels (JPEG 2000 Image Compression (Lossless Only)) cannot be decoded",
    "JPEG2000-embedded-sequence-delimiter.dcm": "compressed frame 0 has 1024 x 3722445056 pixels; the header says 1024 x 256",
    "MR_truncated.dcm": "8130 bytes of pixels; the header says 8192",
    "badVR.dcm": "NumberOfFrames is not a whole number",
    "meta_missing_tsyntax.dcm": "the header has no Rows, Columns, BitsAllocated, SamplesPerPixel",
    "nested_priv_SQ.dcm": "the header has no Rows, Columns, BitsAllocated, SamplesPerPixel",
}
NO_DICOM = {
    *(
        "README.txt",
        "crayons.icc",
        "no_meta.dcm",
        "rtplan.dump",
        "rtstruct.dump",
        "test1.json",
        "test_PN.json",
        "zipMR.gz",
    ),
    "dicomdirtests/README.txt",
}
FILES = sorted(
    str(path.relative_to(PACKAGED))
    for path in PACKAGED.rglob("*")
    if path.is_file() and "TINY_ALPHA" not in path.parts and "__pycache__" not in path.parts
)
BY_OPENJPEG = {"GDCMJ2K_TextGBR.dcm"}  # Pillow calls its stream broken
OPENJPEG = all(importlib.util.find_spec(name) for name in ("openjpeg", "pylibjpeg"))
GPL = all(importlib.util.find_spec(name) for name in ("libjpeg", "pylibjpeg"))


@pytest.mark.filterwarnings("ignore::UserWarning")  # of pydicom, when it is asked for a second opinion
@pytest.mark.parametrize("name", FILES)
@pytest.mark.one_in(5)
def test_is_accounted_for(name):
    path = PACKAGED / name
    if name in WITHOUT_PIXELS:
        expected = "the file has no pixels"
    elif name in NO_DICOM:
        expected = "this is not a DICOM file: 'DICM' is not at byte 128"
    else:
        expected = ERRORS.get(name)
    if expected is None or (GPL and expected == NO_CODEC) or (OPENJPEG and name in BY_OPENJPEG):
        _as_pydicom_reads_it(path)
        return
    with pytest.raises(ImageError) as caught:
        read_dicom(path)
    assert expected in str(caught.value)
    assert ("camscope[codecs-gpl]" in str(caught.value)) == (expected == NO_CODEC)


def _as_pydicom_reads_it(path):
    scan, theirs = read_dicom(path), pydicom.dcmread(path)
    array = theirs.pixel_array.astype(np.float64)
    if theirs.PhotometricInterpretation == "PALETTE COLOR":
        assert scan.is_color
        return  # tests/images/scans/test_dicom.py has its colors
    if scan.is_color:
        deep = 2 ** int(theirs.BitsStored) - 1
        assert abs(scan.values - array * 255 / deep).max() <= 0.5
        return
    if theirs.PhotometricInterpretation == "MONOCHROME1":
        array = 2 ** int(theirs.BitsStored) - 1 - array
    slope = float(theirs.get("DoseGridScaling") or theirs.get("RescaleSlope") or 1)
    np.testing.assert_array_equal(
        scan.values, (array * slope + float(theirs.get("RescaleIntercept") or 0)).astype(np.float32)
    )


def test_the_counts():
    """At the top 55 decoded, 21 without pixels (13, and 8 that are no DICOM), 9 errors; in its folder 31, 8 (7 and 1), 0."""
    assert {*WITHOUT_PIXELS, *ERRORS, *NO_DICOM} <= set(FILES)
    counts = collections.Counter((_kind(name), "/" in name) for name in FILES)
    top = {kind: counts[kind, False] for kind in ("decoded", "without pixels", "no DICOM", "error")}
    below = {kind: counts[kind, True] for kind in top}
    assert top == {"decoded": 55, "without pixels": 13, "no DICOM": 8, "error": 9}
    assert below == {"decoded": 31, "without pixels": 7, "no DICOM": 1, "error": 0}


def _kind(name):
    kinds = {"no DICOM": NO_DICOM, "error": ERRORS, "without pixels": WITHOUT_PIXELS}
    return next((kind for kind, names in kinds.items() if name in names), "decoded")


def test_the_headers_of_a_folder_without_pixels():
    headers = [path for path in (PACKAGED / "dicomdirtests/TINY_ALPHA/PT000000").rglob("*") if path.is_file()]
    assert len(headers) == 50
    for path in headers:
        with pytest.raises(ImageError, match=r"the file has no pixels \(CT Image Storage\)"):
            read_dicom(path)
