"""Plausible slips in what leaves for viewers of medical images; see `mutants`."""

import contextlib
import tempfile
from pathlib import Path

import nibabel
import numpy as np
import pydicom

from camscope.errors import OutputError
from camscope.images.scans.scan import Scan
from camscope.images.scans.scan_reader import read_scan
from camscope.medical import (
    dicom_export,
    dicom_export_headers,
    nifti_export,
    to_nifti,
    to_parametric_map,
    to_secondary_capture,
)
from tests.mutants import Mutant
from tests.scans import enhanced, explained, series

CT = Path(str(pydicom.__file__)).parent / "data" / "test_files" / "CT_small.dcm"
SHEARED = np.array([[1.0, 0, 0.5, 3], [0, 2, 0, 4], [0, 0, 3, 5], [0, 0, 0, 1]])


def voxels_come_back_in_order() -> None:
    one = explained(Scan(np.zeros((2, 3, 4), np.float32), "scan-0", np.eye(4)))
    with tempfile.TemporaryDirectory() as folder:
        assert (nibabel.load(to_nifti(one, Path(folder, "map.nii"))).get_fdata() == one.attribution).all()


def a_quaternion_says_nothing_of_shear() -> None:
    one = explained(Scan(np.zeros((2, 3, 4), np.float32), "scan-0", SHEARED))
    with tempfile.TemporaryDirectory() as folder:
        header = nibabel.load(to_nifti(one, Path(folder, "map.nii"))).header
    assert (int(header["sform_code"]), int(header["qform_code"])) == (2, 0)


def frames_lie_where_they_say() -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = enhanced(Path(folder, "many.dcm"), series(Path(folder, "in")))
        scan = read_scan(file)
        one = explained(scan)
        found = pydicom.dcmread(to_parametric_map(one, file, Path(folder, "map.dcm"), profile="clinical"))
        for frame, group in zip(found.pixel_array, found.PerFrameFunctionalGroupsSequence, strict=True):
            there = np.array(group.PlanePositionSequence[0].ImagePositionPatient, float) * [-1, -1, 1]
            at = round((np.linalg.inv(scan.affine) @ [*there, 1])[0])
            assert (frame == one.attribution[at]).all()
        captures = to_secondary_capture(one, file, Path(folder, "captures"), profile="clinical")
        numbers = [
            pydicom.dcmread(file).SourceImageSequence[0].ReferencedFrameNumber for file in sorted(captures.iterdir())
        ]
        assert numbers == [frame + 1 for frame in scan.frame_indices]


def sides_are_the_patients() -> None:
    assert dicom_export_headers.get_patient_orientation(pydicom.dcmread(CT), 0) == ["L", "P"]


def research_writes_no_dicom() -> None:
    with tempfile.TemporaryDirectory() as folder:
        with contextlib.suppress(OutputError):
            to_parametric_map(explained(read_scan(CT)), CT, Path(folder, "map.dcm"))
        assert not list(Path(folder).iterdir())


def other_weights_are_another_device() -> None:
    assert dicom_export_headers.compute_device_uid("0" * 16) != dicom_export_headers.compute_device_uid("1" * 16)


OF_EXPORTS = [
    Mutant(
        "rows for columns", nifti_export, "_encode_nifti", 'tobytes("F")', 'tobytes("C")', voxels_come_back_in_order
    ),
    Mutant(
        "shear is dropped",
        nifti_export,
        "_set_affine",
        'header["qform_code"] = 0',
        "pass",
        a_quaternion_says_nothing_of_shear,
    ),
    Mutant(
        "frames as sorted",
        dicom_export,
        "_order_values_and_positions",
        "values[np.argsort(frames)]",
        "values",
        frames_lie_where_they_say,
    ),
    Mutant("frames from 0", dicom_export, "_build_secondary_capture", "frame + 1", "frame", frames_lie_where_they_say),
    Mutant(
        "left for right",
        dicom_export_headers,
        "_get_direction_letter",
        "direction[axis] < 0",
        "direction[axis] > 0",
        sides_are_the_patients,
    ),
    Mutant(
        "any profile",
        dicom_export_headers,
        "check_profile_is_clinical",
        'profile != "clinical"',
        "False",
        research_writes_no_dicom,
    ),
    Mutant(
        "one device",
        dicom_export_headers,
        "compute_device_uid",
        "NAMESPACE, digest",
        "NAMESPACE, MANUFACTURER",
        other_weights_are_another_device,
    ),
]
