"""Damaged medical files: mutates small DICOM and NIfTI files from a seed, reads each, and prints what became of them.

    python -m benchmarks.fuzz_scans               # 2,000 files, a minute or so
    python -m benchmarks.fuzz_scans --count 150 --seed 7

A scan, or one error of camscope's own, is right. Anything else, more than two seconds or 256 MiB are listed, and end the
program with 1.
"""

import gzip
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks.fuzzing import DAMAGE, Mutation, Outcome, options, outcome, run
from camscope.images.scans.scan_reader import read_scan

DICOM = (
    *(
        "CT_small.dcm",
        "MR_small_RLE.dcm",
        "MR_small_jp2klossless.dcm",
        "MR_small_jpeg_ls_lossless.dcm",
        "MR_small_bigendian.dcm",
    ),
    *(
        "SC_rgb_jpeg_dcmtk.dcm",
        "SC_rgb_rle_2frame.dcm",
        "rtdose.dcm",
        "liver_1frame.dcm",
        "image_dfl.dcm",
        "693_J2KI.dcm",
    ),
    *(
        "MR_small_implicit.dcm",
        "SC_ybr_full_422_uncompressed.dcm",
        "SC_rgb_small_odd_jpeg.dcm",
        "JPEGLSNearLossless_16.dcm",
    ),
    *("examples_palette.dcm", "dicomdirtests/77654033/CR1/6154", "J2K_pixelrep_mismatch.dcm"),
)
NIFTI = ("anatomical.nii", "standard.nii.gz", "functional.nii", "example_nifti2.nii.gz", "reoriented_anat_moved.nii")
# group 0028 elements that say how much there is, and of what
TAGS = (0x0002, 0x0004, 0x0006, 0x0008, 0x0010, 0x0011, 0x0100, 0x0101, 0x0102, 0x0103, 0x1052, 0x1053, 0x0030)
NUMBERS = (0, 1, 2, 3, 7, 8, 16, 17, 32, 64, 255, 256, 4096, 32767, 32768, 65535)
FLOATS = (0, -1, 1, 3, 1e30, -1e30, np.nan, np.inf, 352, 1e-40)
WHOLE = (0, -1, 1, 2, 3, 4, 7, 8, 16, 32, 64, 127, 128, 256, 512, 1024, 1536, 2304, 32767, -32768)


def samples() -> dict[str, bytes]:
    """The files to mutate, which lie inside the packages pydicom and nibabel."""
    import nibabel
    import pydicom

    dicom, nifti = (Path(str(package.__file__)).parent for package in (pydicom, nibabel))
    found = {name: (dicom / "data" / "test_files" / name).read_bytes() for name in DICOM}
    return found | {name: (nifti / "tests" / "data" / name).read_bytes() for name in NIFTI}


def mutated(count: int, seed: int) -> Iterator[tuple[str, str, bytes]]:
    """File, mutation and bytes, `count` times."""
    rng, files = np.random.default_rng(seed), list(samples().items())
    for number in range(count):
        name, data = files[number % len(files)]
        packed = name.endswith(".gz") and rng.random() < 0.7  # else the packing itself is damaged
        mutations = NIFTI_MUTATIONS if ".nii" in name else DICOM_MUTATIONS
        mutation = mutations[rng.integers(len(mutations))]
        damaged = mutation(bytearray(gzip.decompress(data) if packed else data), rng)
        yield name, mutation.__name__.strip("_"), gzip.compress(damaged, 1) if packed else damaged


def read(name: str, mutation: str, data: bytes) -> Outcome:
    """One file, read."""
    kind = "NIfTI" if ".nii" in name else "DICOM"

    def scanned() -> str:
        scan = read_scan(data, frame=0 if kind == "NIfTI" else None)  # some NIfTI files have four axes
        np.isfinite(scan.values[0].astype(np.float32)).all()
        repr(scan)
        return "scan, flagged" if scan.flags else "scan"

    return outcome(kind, mutation, scanned)


def _lying_field(data: bytearray, rng: np.random.Generator) -> bytes:
    """A number of the image's description, or the length of an element, is another one."""
    for _ in range(int(rng.integers(1, 4))):
        tag = b"\x28\x00" + int(TAGS[rng.integers(len(TAGS))]).to_bytes(2, "little")
        if (at := data.find(tag, 128)) < 0:
            continue
        wide = data[at + 4 : at + 6].isalpha()
        if rng.random() < 0.25:
            data[at + 6 : at + 8] = int(rng.choice(NUMBERS)).to_bytes(2, "little")
        elif bytes(data[at + 4 : at + 6]) in (b"IS", b"DS"):
            length = int.from_bytes(data[at + 6 : at + 8], "little")
            words = (b"99999999", b"-1", b"0", b"1e308", b"nan", b"1\\2", b"2147483647", b"x")
            data[at + 8 : at + 8 + length] = words[rng.integers(len(words))].ljust(length)[:length]
        else:
            data[at + 8 : at + 10] = int(rng.choice(NUMBERS)).to_bytes(2, "little") if wide else rng.bytes(2)
    return bytes(data)


def _lying_length(data: bytearray, rng: np.random.Generator) -> bytes:
    """The length of the pixel data, or of what is found first after a place, is another one."""
    at = data.rfind(b"\xe0\x7f\x10\x00") if rng.random() < 0.5 else int(rng.integers(132, max(133, len(data) - 12)))
    length = int(rng.choice([0, 1, 0xFFFFFFFF, 0xFFFFFFFE, 0x7FFFFFFF, 0x10000000]))
    data[at + 8 : at + 12] = length.to_bytes(4, "little")
    return bytes(data)


def _lying_nifti(data: bytearray, rng: np.random.Generator) -> bytes:
    """Fields of a NIfTI header are others: sides, type, offset, slope, codes, affine."""
    from nibabel.nifti1 import header_dtype as first
    from nibabel.nifti2 import header_dtype as second

    kind = second if data.startswith(b"n+2", 4) else first
    if len(data) < kind.itemsize:
        return bytes(data)
    header = np.frombuffer(bytes(data[: kind.itemsize]), kind).copy()
    names = ["dim", "datatype", "bitpix", "vox_offset", "scl_slope", "scl_inter", "sform_code", "qform_code", "pixdim"]
    for field in rng.choice([*names, "srow_x", "quatern_b", "xyzt_units", "dim", "datatype", "magic"], size=3):
        value = header[str(field)]
        if value.dtype.kind == "S":
            continue
        known = FLOATS if value.dtype.kind == "f" else WHOLE if value.itemsize > 1 else WHOLE[:12]
        value.flat[rng.integers(value.size)] = rng.choice(known)
    return header.tobytes() + bytes(data[kind.itemsize :])


DICOM_MUTATIONS: tuple[Mutation, ...] = (*DAMAGE, _lying_field, _lying_field, _lying_length)
NIFTI_MUTATIONS: tuple[Mutation, ...] = (*DAMAGE, _lying_nifti, _lying_nifti, _lying_nifti)


def main() -> int:
    """Print the table; 1 where a file did what none may."""
    given = options(__doc__, 2000)
    for data in samples().values():  # libraries are imported, and the memory that they take is theirs
        read("", "", data)
    return run(mutated(given.count, given.seed), read, trace=given.trace)


if __name__ == "__main__":
    sys.exit(main())
