"""Nothing of a patient in a name, a message, a log line or a repr: strings planted wherever one can hide are looked for."""

import gzip
import logging
import os
import subprocess
import sys
import traceback
import warnings

import nibabel
import numpy as np
import pydicom
import pytest
from PIL import Image, PngImagePlugin

from camscope.errors import CamscopeError
from camscope.images.files import redacted_errors_and_file_pseudonyms
from camscope.images.files.redacted_errors_and_file_pseudonyms import pseudonymize_source
from camscope.images.scans.scan_reader import read_scan
from tests.scan_files import PACKAGED, dicom, folder, item, slices, written

CANARY = "KanarieVogel"
TEXTS = ("PatientName", "PatientID", "PatientBirthDate", "AccessionNumber", "InstitutionName", "ReferringPhysicianName")
TEXTS += (
    "StudyDescription",
    "SeriesDescription",
    "ProtocolName",
    "StudyID",
    "PatientComments",
    "ImageComments",
    "Manufacturer",
)
TEXTS += ("RescaleType", "Modality", "BodyPartExamined", "StationName", "OperatorsName", "ImageType", "Units")


def marked(header: pydicom.Dataset) -> pydicom.Dataset:
    """A canary of its own in each text, in UIDs' place, in a sequence and in a private tag."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for at, keyword in enumerate(TEXTS):
            setattr(header, keyword, "19700101" if keyword.endswith("Date") else f"{CANARY}{at}")
        header.SeriesInstanceUID = "1.2.3.77777"
        header.RequestAttributesSequence = [item(ScheduledProcedureStepDescription=f"{CANARY}-in-a-sequence")]
        header.private_block(0x0011, f"{CANARY}-creator", create=True).add_new(1, "LO", f"{CANARY}-private")
    return header


def clean(text: str) -> bool:
    return CANARY.lower() not in text.lower() and "77777" not in text and "19700101" not in text


def broken(data: bytes):
    """The file whole, cut, and with numbers that lie."""
    yield data
    yield from (data[:length] for length in (140, 300, 700, len(data) - 5))
    for tag, value in (
        (b"\x28\x00\x10\x00", b"\xff\xff"),
        (b"\x28\x00\x00\x01", b"\x0c\x00"),
        (b"\x28\x00\x04\x00", b"XX"),
    ):
        at = data.find(tag)
        yield data[: at + 8] + value + data[at + 10 :]
    at = data.find(CANARY.encode())  # a length that lies, inside a text
    yield data[: at - 2] + b"\xff\x7f" + data[at:]
    yield data.replace(b"1.2.840.10008.1.2.1\0", f"{CANARY}\0\0\0\0\0\0\0\0".encode()[:20], 1)


def messages_of(source, caplog, capfd) -> str:
    """Everything that is said while a source is read, and of what comes of it."""
    caplog.clear()  # of what writing the file said
    capfd.readouterr()
    said = ""
    try:
        said += repr(read_scan(source))
    except CamscopeError as error:
        said += str(error) + repr(error) + "".join(traceback.format_exception(error)).replace(__file__, "")
    captured = capfd.readouterr()
    return said + caplog.text + captured.out + captured.err


def test_dicom_says_nothing_of_a_patient(tmp_path, caplog, capfd):
    caplog.set_level(logging.DEBUG)
    home = tmp_path / f"{CANARY}-folder"
    home.mkdir()
    data = written(marked(dicom(np.zeros((4, 4), np.uint16), RescaleSlope=1, RescaleIntercept=0)))
    for at, damaged in enumerate(broken(data)):
        path = home / f"{CANARY}-{at}.dcm"
        path.write_bytes(damaged)
        for source in (path, damaged, f"{path}#7"):
            assert clean(messages_of(source, caplog, capfd))
    assert clean(messages_of(home, caplog, capfd))
    assert clean(messages_of(home / "nothing.dcm", caplog, capfd))


def test_packaged_files_and_series_say_nothing(tmp_path, caplog, capfd):
    for name in ("CT_small.dcm", "JPEG-lossy.dcm", "MR_truncated.dcm", "badVR.dcm", "rtplan.dcm"):
        header = pydicom.dcmread(PACKAGED / name)
        path = tmp_path / f"{CANARY}{name}"
        path.write_bytes((PACKAGED / name).read_bytes())
        said = messages_of(path, caplog, capfd)
        assert clean(said)
        for keyword in ("PatientName", "PatientID", "StudyInstanceUID", "SeriesInstanceUID", "InstitutionName"):
            value = str(header.get(keyword, ""))
            assert not value or value not in said
    made = [marked(one) for one in slices(np.zeros((3, 4, 4), np.int16), [(0, 0, 0), (0, 0, 1), (0, 0, 1)])]
    assert clean(messages_of(folder(tmp_path / CANARY, made), caplog, capfd))
    assert clean(messages_of(folder(tmp_path / CANARY, made[:2], ["a", "b"]), caplog, capfd))


def test_nifti_and_png_say_nothing(tmp_path, caplog, capfd):
    image = nibabel.Nifti1Image(np.zeros((3, 3, 3), np.int16), np.eye(4))
    for field in ("descrip", "aux_file", "db_name", "intent_name"):
        image.header[field] = CANARY.encode()
    image.header.extensions.append(nibabel.nifti1.Nifti1Extension("comment", CANARY.encode()))
    path = tmp_path / f"{CANARY}.nii"
    nibabel.save(image, path)
    data = path.read_bytes()
    for damaged in (data, data[:300], data[:-4], data[:40] + b"\xff" * 16 + data[56:]):
        for source in (damaged, gzip.compress(damaged), gzip.compress(damaged)[:-9]):
            assert clean(messages_of(source, caplog, capfd))
        path.write_bytes(damaged)
        assert clean(messages_of(path, caplog, capfd))
    info = PngImagePlugin.PngInfo()
    info.add_text("Patient", CANARY)
    picture = tmp_path / f"{CANARY}.png"
    Image.fromarray(np.zeros((4, 4), np.uint16)).save(picture, pnginfo=info)
    assert clean(messages_of(picture, caplog, capfd))
    picture.write_bytes(picture.read_bytes()[:-30])
    assert clean(messages_of(picture, caplog, capfd))
    for suffix in (".nrrd", ".mha", ".mhd"):
        (tmp_path / f"{CANARY}{suffix}").write_bytes(b"NRRD0004\nElementDataFile = LOCAL\n" + CANARY.encode())
        assert clean(messages_of(tmp_path / f"{CANARY}{suffix}", caplog, capfd))


def test_many_threads_share_one_silence(caplog):
    """None of them ends it for the others, and afterwards all is as it was."""
    from concurrent.futures import ThreadPoolExecutor

    path = PACKAGED / "MR_small_padded.dcm"  # of which pydicom warns, and logs
    read_scan(path)
    before, level = list(warnings.filters), logging.getLogger("pydicom").level
    with ThreadPoolExecutor(4) as pool:
        scans = list(pool.map(read_scan, [path] * 24))
    assert {scan.values.tobytes() for scan in scans} == {scans[0].values.tobytes()}
    assert (list(warnings.filters), logging.getLogger("pydicom").level, caplog.text) == (before, level, "")


# --- names


def test_a_name_is_a_keyed_hash_of_the_absolute_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CAMSCOPE_KEY", "one")
    name = pseudonymize_source("a.dcm")
    assert name == pseudonymize_source(tmp_path / "a.dcm")
    assert name.startswith("scan-")
    assert len(name) == 13
    assert (
        len(
            {name, pseudonymize_source("b.dcm"), pseudonymize_source(b"a.dcm"), pseudonymize_source(["a.dcm", "b.dcm"])}
        )
        == 4
    )
    monkeypatch.setenv("CAMSCOPE_KEY", "two")
    assert pseudonymize_source("a.dcm") != name


def test_the_key_is_made_once_and_for_its_owner_alone(tmp_path, monkeypatch):
    monkeypatch.delenv("CAMSCOPE_KEY")
    monkeypatch.setenv("HOME", str(tmp_path))
    name = pseudonymize_source("a.dcm")
    path = tmp_path / ".config/camscope/key"
    assert path.stat().st_mode & 0o777 == 0o600
    assert len(path.read_bytes()) == 64
    assert [entry.name for entry in path.parent.iterdir()] == ["key"]
    assert pseudonymize_source("a.dcm") == name
    path.unlink()
    assert pseudonymize_source("a.dcm") != name


def test_an_empty_key_is_none(tmp_path, monkeypatch):
    monkeypatch.delenv("CAMSCOPE_KEY")
    monkeypatch.setenv("HOME", str(tmp_path))
    path = tmp_path / ".config/camscope/key"
    path.parent.mkdir(parents=True)
    path.touch()
    assert len(redacted_errors_and_file_pseudonyms.load_pseudonym_key()) == 64


def test_without_a_home_the_key_lasts_as_long_as_the_process(tmp_path, monkeypatch):
    monkeypatch.delenv("CAMSCOPE_KEY")
    (tmp_path / "file").touch()
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    assert pseudonymize_source("a.dcm") == pseudonymize_source("a.dcm")
    code = (
        "from camscope.images.files.redacted_errors_and_file_pseudonyms import pseudonymize_source\n"
        "print(pseudonymize_source('a.dcm'))"
    )
    environment = {key: value for key, value in os.environ.items() if key != "CAMSCOPE_KEY"}
    runs = [
        subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        for _ in "12"
    ]
    assert runs[0].stdout != runs[1].stdout


def test_logs_and_warnings_are_as_they_were(caplog):
    logger = logging.getLogger("pydicom")
    read_scan(PACKAGED / "MR_small_padded.dcm")  # the package's own two filters are in place
    level, filters = logger.level, list(warnings.filters)
    with pytest.raises(CamscopeError):
        read_scan(PACKAGED / "badVR.dcm")
    read_scan(PACKAGED / "MR_small_padded.dcm")  # of which pydicom warns, and logs
    assert (logger.level, list(warnings.filters), caplog.text) == (level, filters, "")
