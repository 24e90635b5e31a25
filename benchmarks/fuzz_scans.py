"""Damaged medical files: mutates small DICOM and NIfTI files from a seed, reads each, and prints what became of them.

    python -m benchmarks.fuzz_scans               # 2,000 files, a minute or so
    python -m benchmarks.fuzz_scans --count 150 --seed 7

A scan, or one error of camscope's own, is right. Anything else, more than two seconds or 256 MiB are listed, and end the
program with 1.
"""

import argparse
import collections
import faulthandler
import gzip
import resource
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from camscope.errors import CamscopeError
from camscope.images.scans import read_scan

SECONDS, MEGABYTES = 2.0, 256
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
Mutation = Callable[[bytearray, np.random.Generator], bytes]


@dataclass(frozen=True)
class Outcome:
    """What became of one file."""

    kind: str
    mutation: str
    result: str
    seconds: float
    megabytes: float

    @property
    def bad(self) -> bool:
        """Whether it is what may not be."""
        return self.result.startswith("!") or self.seconds > SECONDS or self.megabytes > MEGABYTES


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
    before, begin = _peak(), time.perf_counter()
    try:
        scan = read_scan(data, frame=0 if kind == "NIfTI" else None)  # some NIfTI files have four axes
        np.isfinite(scan.values[0].astype(np.float32)).all()
        repr(scan)
        result = "scan, flagged" if scan.flags else "scan"
    except CamscopeError as error:
        result = "damaged" if "damaged" in str(error) else "refused"
    except Exception as error:
        result = f"!{type(error).__name__}: {error}"
    return Outcome(kind, mutation, result, time.perf_counter() - begin, _peak() - before)


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _flipped(data: bytearray, rng: np.random.Generator) -> bytes:
    for at in rng.integers(len(data), size=rng.integers(1, 17)):
        data[at] ^= 1 << rng.integers(8)
    return bytes(data)


def _flipped_header(data: bytearray, rng: np.random.Generator) -> bytes:
    for at in rng.integers(min(len(data), 3000), size=rng.integers(1, 9)):
        data[at] = rng.integers(256)
    return bytes(data)


def _cut(data: bytearray, rng: np.random.Generator) -> bytes:
    return bytes(data[: max(1, int(rng.integers(len(data))))])


def _without_a_block(data: bytearray, rng: np.random.Generator) -> bytes:
    at = rng.integers(len(data))
    del data[at : at + rng.integers(1, 600)]
    return bytes(data) or b"\0"


def _doubled_block(data: bytearray, rng: np.random.Generator) -> bytes:
    at = int(rng.integers(len(data)))
    return bytes(data[:at] + data[max(0, at - 200) :])


def _zeroed(data: bytearray, rng: np.random.Generator) -> bytes:
    at, length = int(rng.integers(len(data))), int(rng.integers(1, 300))
    data[at : at + length] = bytes(len(data[at : at + length]))
    return bytes(data)


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


_DAMAGE: tuple[Mutation, ...] = (_flipped, _flipped_header, _cut, _without_a_block, _doubled_block, _zeroed)
DICOM_MUTATIONS: tuple[Mutation, ...] = (*_DAMAGE, _lying_field, _lying_field, _lying_length)
NIFTI_MUTATIONS: tuple[Mutation, ...] = (*_DAMAGE, _lying_nifti, _lying_nifti, _lying_nifti)


def main() -> int:
    """Print the table; 1 where a file did what none may."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--trace", action="store_true", help="name each file before it is read, on stderr")
    options = parser.parse_args()
    faulthandler.enable()
    for data in samples().values():  # libraries are imported, and the memory that they take is theirs
        read("", "", data)
    outcomes = []
    for number, (name, mutation, data) in enumerate(mutated(options.count, options.seed)):
        if options.trace:
            print(number, name, mutation, file=sys.stderr, flush=True)
        outcomes.append(read(name, mutation, data))
        if outcomes[-1].bad:
            print("BAD", number, name, outcomes[-1])
    _print(outcomes)
    return int(any(outcome.bad for outcome in outcomes))


def _print(outcomes: list[Outcome]) -> None:
    kinds = ("scan", "scan, flagged", "refused", "damaged")
    print("| files | mutation | " + " | ".join(kinds) + " | other | slowest s | most MiB |")
    print("|---|---" + "|---:" * (len(kinds) + 3) + "|")
    for key in sorted({(one.kind, one.mutation) for one in outcomes}):
        group = [one for one in outcomes if (one.kind, one.mutation) == key]
        counts = collections.Counter(one.result for one in group)
        other = len(group) - sum(counts[kind] for kind in kinds)
        row = [*key, *(counts[kind] for kind in kinds), other]
        row += [f"{max(one.seconds for one in group):.2f}", f"{max(one.megabytes for one in group):.0f}"]
        print("| " + " | ".join(map(str, row)) + " |")
    total = collections.Counter(one.result for one in outcomes)
    print(f"{len(outcomes)} files: " + ", ".join(f"{total[kind]} {kind}" for kind in kinds))


if __name__ == "__main__":
    sys.exit(main())
