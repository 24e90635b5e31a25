"""Strings planted wherever a patient can hide in an image, its file and its table, and a search for them in any bytes."""

import base64
import datetime
import gzip
import io
import re
import struct
import warnings
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pydicom
from PIL import Image, PngImagePlugin
from pydicom.datadict import dictionary_VR
from pydicom.dataset import Dataset

from tests.scan_files import PACKAGED, item

# in small letters; each begins with what it is searched by, as one expression of all would take five times as long
WORDS = [re.compile(one) for one in (r"knr\d{3}vogl", r"121314\.917\d{3}", r"1\.2\.826\.0\.9172\.\d{4}")]
NUMBERS = [re.compile(one) for one in (r"17(?:09|1\d)\d{4}", r"9172\d{5}")]  # not as a part of another number
DIGITS_AND_POINT = set("0123456789.")
BASE64 = re.compile(rb"[A-Za-z0-9+/]{24,}={0,2}")
TAGS = """
PatientName PatientID OtherPatientNames PatientBirthName PatientMotherBirthName PatientBirthDate PatientBirthTime
PatientAddress PatientTelephoneNumbers PatientComments AdditionalPatientHistory EthnicGroup Occupation MilitaryRank
IssuerOfPatientID ReferringPhysicianName PerformingPhysicianName OperatorsName PhysiciansOfRecord
NameOfPhysiciansReadingStudy RequestingPhysician InstitutionName InstitutionAddress InstitutionalDepartmentName
StationName Manufacturer ManufacturerModelName DeviceSerialNumber SoftwareVersions AccessionNumber StudyID
StudyDescription SeriesDescription ProtocolName ImageComments DerivationDescription StudyDate SeriesDate
AcquisitionDate ContentDate AcquisitionDateTime StudyInstanceUID SeriesInstanceUID SOPInstanceUID FrameOfReferenceUID
DeviceUID InstanceNumber PatientWeight BodyPartExamined RetrieveAETitle RetrieveURL LongCodeValue TextValue
WindowCenterWidthExplanation DetectorID ContrastBolusAgent RequestedProcedureDescription FilterType
""".split()  # noqa: SIM905 - a list of them is five times as long
SUSPECT = ("Modality", "RescaleType", "ImageType", "Units")  # read as words from lists of known ones


class Cage:
    """Makes canaries, each another, and knows where each was put."""

    def __init__(self) -> None:
        self.planted: dict[str, str] = {}  # the string -> where it is

    def word(self, where: str) -> str:
        return self._kept(f"KNR{len(self.planted):03d}VOGL", where)

    def value(self, keyword: str) -> object:
        """One that fits a DICOM element."""
        n = len(self.planted)
        match dictionary_VR(keyword):
            case "DA":
                return self._kept(self._date(n), keyword)
            case "TM":
                return self._kept(f"121314.{917000 + n}", keyword)
            case "IS" | "DS":
                return self._kept(f"9172{n:05d}", keyword)
            case "DT":
                return self._kept(self._date(n), keyword) + "121314"
            case "UI":
                return self._kept(f"1.2.826.0.9172.{1000 + n}", keyword)
            case "PN":
                return f"{self.word(keyword)}^{self.word(keyword)}"
        return self.word(keyword)

    def _date(self, n: int) -> str:
        return f"{datetime.date(1709, 1, 1) + datetime.timedelta(n):%Y%m%d}"

    def _kept(self, text: str, where: str) -> str:
        assert text not in self.planted
        self.planted[text] = where
        return text

    def found(self, data: bytes) -> set[str]:
        """Which of the canaries are in some bytes, however they are packed; slugs and small letters count."""
        known = {text.lower(): text for text in self.planted}
        seen = set()
        for text in map(str.lower, unpacked(data)):
            seen.update(word for pattern in WORDS for word in pattern.findall(text))
            numbers = (match for pattern in NUMBERS for match in pattern.finditer(text))
            seen.update(one[0] for one in numbers if text[one.start() - 1 : one.start()] not in DIGITS_AND_POINT)
        return {known[text] for text in seen & set(known)}


def unpacked(data: bytes, depth: int = 0) -> Iterator[str]:
    """The bytes as text in every width that NumPy or DICOM write, and all that is packed inside."""
    yield data.decode("latin-1")
    if b"\0" in data:
        yield data.replace(b"\0", b"").decode("latin-1")  # UTF-16 and UTF-32 of plain letters
    if depth > 4:
        return
    for inner in _inside(data):
        yield from unpacked(inner, depth + 1)


def _inside(data: bytes) -> Iterator[bytes]:
    if data[:2] == b"\x1f\x8b":
        yield zlib.decompressobj(31).decompress(data)
    elif data[:4] == b"PK\3\4":
        with zipfile.ZipFile(io.BytesIO(data)) as packed:
            yield " ".join(packed.namelist()).encode()
            yield from (packed.read(name) for name in packed.namelist())
    elif data[:4] == b"\x89PNG":
        yield from _of_png(data)
    elif data[:4] == b"PAR1":
        yield _of_parquet(data)
    elif data[:4] not in (b"RIFF", b"GIF8", b"\xff\xd8\xff\xe0"):
        for match in BASE64.finditer(data):
            text = match[0]
            yield base64.b64decode(text + b"=" * (-len(text) % 4)) if len(text.rstrip(b"=")) % 4 != 1 else b""


def _of_png(data: bytes) -> Iterator[bytes]:
    at, pixels = 8, b""
    while at + 8 <= len(data):
        length, kind = struct.unpack(">I4s", data[at : at + 8])
        body = data[at + 8 : at + 8 + length]
        pixels += body if kind == b"IDAT" else b""
        if kind in (b"zTXt", b"iTXt", b"iCCP"):
            for start in (place + 2 for place in range(len(body)) if body[place] == 0):
                with suppress(zlib.error):
                    yield zlib.decompress(body[start:])
        at += length + 12
    yield zlib.decompressobj().decompress(pixels)  # also what is left of one that was cut


def _of_parquet(data: bytes) -> bytes:
    import pyarrow.parquet as pq

    table = pq.read_table(io.BytesIO(data))
    columns = [name for name in table.column_names if name != "attribution"]
    return f"{table.schema.metadata} {table.schema} {table.select(columns).to_pylist()}".encode()


def dicom(cage: Cage, source: str = "CT_small.dcm", *, suspect: bool = False) -> Dataset:
    """A packaged file with a canary in every place that takes one."""
    data = pydicom.dcmread(PACKAGED / source)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for keyword in TAGS:
            setattr(data, keyword, cage.value(keyword))
        for keyword in SUSPECT if suspect else ():
            setattr(data, keyword, cage.word(keyword))
        inner = item(
            ScheduledProcedureStepDescription=cage.word("sequence"),
            ScheduledPerformingPhysicianName=cage.word("sequence"),
        )
        inner.ScheduledProtocolCodeSequence = [item(CodeMeaning=cage.word("sequence in a sequence"))]
        data.RequestAttributesSequence = [inner]
        data.ReferencedImageSequence = [item(ReferencedSOPInstanceUID=cage.value("ReferencedSOPInstanceUID"))]
        data.OriginalAttributesSequence = [item(ModifyingSystem=cage.word("ModifyingSystem"))]
        private = data.private_block(0x0011, cage.word("private creator"), create=True)
        private.add_new(1, "LO", cage.word("private LO"))
        private.add_new(2, "UN", cage.word("private UN").encode())
        private.add_new(3, "OB", cage.word("private OB").encode() + b"\0")
        private.add_new(4, "SQ", [item(PatientID=cage.word("private sequence"))])
        data.add_new((0x6000, 0x0022), "LO", cage.word("overlay description"))
        data.add_new((0xFFFC, 0xFFFC), "OB", cage.word("trailing padding").encode() + b"\0")
        meta = data.file_meta
        meta.MediaStorageSOPInstanceUID = data.SOPInstanceUID
        meta.ImplementationVersionName = cage.word("ImplementationVersionName")
        meta.SourceApplicationEntityTitle = cage.word("SourceApplicationEntityTitle")
        meta.PrivateInformationCreatorUID = cage.value("PrivateInformationCreatorUID")
        meta.PrivateInformation = cage.word("PrivateInformation").encode() + b"\0"
    data.preamble = cage.word("preamble").encode().ljust(128, b"\0")
    return data


def save(data: Dataset, path: Path) -> Path:
    """As a file; what no element may hold is written all the same."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        data.save_as(path)
    return path


def nifti(cage: Cage, path: Path, values: np.ndarray, world: np.ndarray) -> Path:
    """With a canary in each text of the header, in extensions, and in the gzip header where there is one."""
    import nibabel

    image = nibabel.Nifti1Image(values, world)
    for field in ("descrip", "aux_file", "db_name", "intent_name", "data_type"):
        image.header[field] = cage.word(f"NIfTI {field}")[: image.header[field].dtype.itemsize].encode()
    for code in ("comment", "afni", "xcede"):
        image.header.extensions.append(nibabel.nifti1.Nifti1Extension(code, cage.word(f"extension {code}").encode()))
    data = image.to_bytes()
    if path.name.endswith(".gz"):
        packed = io.BytesIO()
        with gzip.GzipFile(cage.word("name in gzip"), "wb", fileobj=packed) as file:
            file.write(data)
        data = packed.getvalue()
    path.write_bytes(data)
    return path


def itk(cage: Cage, path: Path, values: np.ndarray) -> Path:
    """An NRRD or MetaImage file with a canary in its metadata."""
    import SimpleITK

    image = SimpleITK.GetImageFromArray(values)
    image.SetMetaData("PatientName", cage.word(f"metadata of {path.suffix}"))
    SimpleITK.WriteImage(image, str(path))
    return path


def picture(cage: Cage, path: Path, pixels: np.ndarray) -> Path:
    """A PNG, JPEG or TIFF with a canary in each text that its format has."""
    image, exif = Image.fromarray(pixels), Image.Exif()
    for tag in (0x010E, 0x013B, 0x8298, 0x0131):  # description, artist, copyright, software
        exif[tag] = cage.word(f"EXIF {tag:04x} of {path.suffix}")
    if path.suffix == ".png":
        info = PngImagePlugin.PngInfo()
        info.add_text("Patient", cage.word("tEXt"))
        info.add_text("Comment", cage.word("zTXt"), zip=True)
        info.add_itxt("Author", cage.word("iTXt"), zip=True)
        image.save(path, pnginfo=info, exif=exif)
    elif path.suffix == ".jpg":
        image.save(path, exif=exif, comment=cage.word("JPEG comment"), xmp=cage.word("XMP").encode())
    else:
        image.save(path, exif=exif)
    return path
