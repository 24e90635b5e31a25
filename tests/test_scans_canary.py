"""Canaries planted wherever a patient can hide: none is in anything that camscope writes or says, packed or not."""

import csv
import io
import logging
import shutil
import warnings
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

pytest.importorskip("pyarrow")
pytest.importorskip("nibabel")
pytest.importorskip("pydicom")

from PIL import Image
from typer.testing import CliRunner

from camscope import GradCAM
from camscope.batch import Run, run_batch
from camscope.cli import app
from camscope.errors import CamscopeError
from camscope.images.scan_preprocess import ScanPreprocess
from camscope.measure import measure
from canaries import Cage, dicom, nifti, picture, save
from scan_files import slices

pytestmark = [
    pytest.mark.filterwarnings("ignore::camscope.errors.CamscopeWarning"),
    pytest.mark.usefixtures("one_thread"),
]
MODEL = """
import warnings
import torch
from torch import nn
from camscope.images.scan_preprocess import ScanPreprocess

def positive(conv, pool):
    torch.manual_seed(0)
    net = nn.Sequential(conv, nn.ReLU(), pool(1), nn.Flatten(), nn.Linear(3, 2)).eval()
    net[-1].weight.data.abs_()
    return net

def flat():
    return positive(nn.Conv2d(1, 3, 3, 2), nn.AdaptiveAvgPool2d)

def deep():
    return positive(nn.Conv3d(1, 3, 3), nn.AdaptiveAvgPool3d)

def colours():
    return positive(nn.Conv2d(3, 3, 3, 2), nn.AdaptiveAvgPool2d)

raising, warning, own = flat, colours, colours

class Raising(ScanPreprocess):
    def __call__(self, scan):
        raise KeyError(f"no entry for {scan.sources}, WORD")

def warn(image):
    warnings.warn("WORD was here")
    return torch.zeros(3, 24, 24)

def fail(image):
    raise LookupError("WORD is not in the table")

flat_way = ScanPreprocess(resize=24, normalise="range")
PREPROCESSING = {
    "flat": flat_way, "deep": ScanPreprocess(resize=8, normalise="range"), "raising": Raising(resize=24), "warning": warn, "own": fail
}
"""


@dataclass
class Ward:
    """A folder of images in which everything that can name a patient does, and what is in it."""

    cage: Cage
    folder: Path
    files: dict[str, Path] = field(default_factory=dict)
    model: Path = Path()

    def name(self, what: str, suffix: str) -> Path:
        """A file whose name is a canary."""
        self.files[what] = self.folder / f"{self.cage.word(f'name of {what}')}{suffix}"
        return self.files[what]

    def table(self, kinds: list[str], masks: dict[str, Path] | None = None) -> Path:
        """A manifest whose own name, and every column but the target, is a canary."""
        path = self.folder / f"{self.cage.word('name of a manifest')}.csv"
        with path.open("w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(["path", "target", "patient", "born", "note", "outlines"])
            for kind in kinds:
                words = [self.cage.word(f"column of {kind}"), self.cage.value("PatientBirthDate"), self.cage.word("column")]
                where = self.files.get(kind, kind)
                mask = (masks or {}).get(kind)
                relative = where.relative_to(self.folder) if isinstance(where, Path) else where
                rows.writerow([relative, 1, *words, "" if mask is None else mask.relative_to(self.folder)])
        return path


@pytest.fixture(scope="module")
def ward(tmp_path_factory) -> Ward:
    cage = Cage()
    made = Ward(cage, tmp_path_factory.mktemp("data") / cage.word("folder") / f"{cage.word('folder')} in a folder")
    made.folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    save(dicom(cage), made.name("ct", ".dcm"))
    save(dicom(cage, "MR_small.dcm", suspect=True), made.name("suspect", ".dcm"))
    burned = dicom(cage)
    burned.BurnedInAnnotation = "YES"
    save(burned, made.name("burned", ".dcm"))
    made.name("cut", ".dcm").write_bytes(made.files["ct"].read_bytes()[:5000])
    made.name("text", ".dcm").write_text(f"no DICOM, but {cage.word('text of a file')}")
    shutil.copy(made.files["ct"], made.name("no suffix", ""))
    made.name("gone", ".dcm")
    world = np.array([[0, 0, 2.0, 5], [-1.0, 0, 0, 7], [0, 1.5, 0, -3], [0, 0, 0, 1]])
    for what, suffix in (("nifti", ".nii"), ("packed", ".nii.gz")):
        nifti(cage, made.name(what, suffix), rng.random((10, 9, 8)).astype(np.float32), world)
    made.name("cut nifti", ".nii.gz").write_bytes(made.files["packed"].read_bytes()[:-300])
    picture(cage, made.name("png", ".png"), (rng.random((30, 30)) * 60000).astype(np.uint16))
    picture(cage, made.name("photo", ".png"), (rng.random((30, 30, 3)) * 255).astype(np.uint8))
    picture(cage, made.name("jpeg", ".jpg"), (rng.random((30, 30, 3)) * 255).astype(np.uint8))
    picture(cage, made.name("tiff", ".tif"), (rng.random((30, 30)) * 60000).astype(np.uint16))
    made.name("cut png", ".png").write_bytes(made.files["photo"].read_bytes()[:400])
    series = made.name("series", "")
    for at, one in enumerate(slices((rng.random((5, 10, 10)) * 99).astype(np.int16), [(0, 0, 2.0 * z) for z in range(5)])):
        for keyword in ("PatientName", "PatientID", "InstitutionName", "SeriesDescription"):
            setattr(one, keyword, cage.value(keyword))
        one.file_meta.ImplementationVersionName = cage.word("meta of a slice")
        save(one, series / f"{cage.word('name of a slice')}-{at}.dcm")
    mask = np.zeros((128, 128, 3), np.uint8)
    mask[40:80, 30:90] = 255
    picture(cage, made.name("mask", ".png"), mask)
    picture(cage, made.name("wrong mask", ".png"), mask[:50])
    made.name("broken mask", ".png").write_bytes(b"\x89PNG\r\n\x1a\n" + cage.word("text of a mask").encode())
    made.model = tmp_path_factory.mktemp("models") / "model.py"
    made.model.write_text(MODEL.replace("WORD", cage.word("an exception's message")))
    return made


def of_files(cage: Cage, folder: Path) -> set[str]:
    """What is found in the files below a folder, in their names, and in those of folders."""
    found = set()
    for path in folder.rglob("*"):
        found |= cage.found(str(path.relative_to(folder)).encode())
        if path.is_file():
            found |= cage.found(path.read_bytes())
    return found


def told(cage: Cage, found: set[str]) -> dict[str, str]:
    return {cage.planted[one]: one for one in sorted(found)}


class Ears:
    """Everything that is said inside: on both streams, in logs, by warnings."""

    def __init__(self, cage: Cage, caplog, capfd):
        self.cage, self.caplog, self.capfd, self.text = cage, caplog, capfd, ""

    def __enter__(self):
        self.caplog.clear()
        self.caplog.set_level(logging.DEBUG)
        self.capfd.readouterr()
        self._caught = warnings.catch_warnings(record=True)
        self._warned = self._caught.__enter__()
        warnings.simplefilter("always")
        return self

    def __exit__(self, *error):
        self._caught.__exit__(*error)
        captured = self.capfd.readouterr()
        self.text += captured.out + captured.err + self.caplog.text + "".join(str(one.message) for one in self._warned)

    def run(self, *words, code=0):
        """A command, with what it prints."""
        with self:
            result = CliRunner().invoke(app, [str(word) for word in words])
        assert result.exit_code == code, result.output
        self.text += result.stdout + result.stderr
        return result

    @property
    def heard(self) -> dict[str, str]:
        return told(self.cage, self.cage.found(self.text.encode()))


@pytest.fixture
def ears(ward, caplog, capfd, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    return Ears(ward.cage, caplog, capfd)


def model(ward, name):
    return f"{ward.model}:{name}"


FLAT = ["ct", "suspect", "burned", "cut", "text", "no suffix", "gone", "png", "tiff", "jpeg", "cut png", "../away.dcm"]
LINKS = ["memory://{}/there.png", "memory://{}/gone.dcm", "file:///{}.dcm", "https://localhost:9/{}.dcm", "nothing://{}.dcm"]


def linked(cage: Cage) -> list[str]:
    """URLs with a canary in each; behind the first there is a picture."""
    import fsspec

    made = [one.format(cage.word("URL")) for one in LINKS]
    buffer = io.BytesIO()
    Image.fromarray(np.full((20, 20), 999, np.uint16)).save(buffer, "PNG")
    with fsspec.open(made[0], "wb") as file:
        file.write(buffer.getvalue())
    return made


@pytest.mark.parametrize("kind", ["png", "webp"])
def test_runs_and_what_is_made_of_them(ward, ears, kind, tmp_path):
    cage = ward.cage
    pytest.importorskip("fsspec")
    masks = {"ct": ward.files["mask"], "suspect": ward.files["broken mask"]}
    table = ward.table([*FLAT, *linked(cage), f"../{cage.word('path that leads away')}.dcm"], masks)
    out = tmp_path / "out"
    ears.run("batch", table, "-o", out, "-m", model(ward, "flat"), "--overlays", kind, "--layer", "1", code=1)
    assert told(cage, of_files(cage, out)) == {}
    run = Run(out)
    print([(r["error"]) for r in run.table().to_pylist()])
    assert run.failures == 11
    assert all(row["path"].startswith("scan-") for row in run.table().to_pylist())
    for words in ([], ["--scans", table]):
        page = tmp_path / f"page{len(words)}.html"
        ears.run("show", out, *words, "-o", page)
        assert told(cage, cage.found(page.read_bytes())) == {}
    ears.run("export", out, "--format", "png,jpg,webp,npz,json,csv,coco", "-o", tmp_path / "export", code=1)
    measures = tmp_path / "measures"
    for masks in ([], ["--masks", "outlines"], ["--masks", ward.folder]):
        words = ["--scans", table, "-o", measures, "--overwrite", "--figure", tmp_path / "figure.png"]
        result = ears.run("measure", out, *words, *masks, "--overwrite", code=2 if masks[1:] == ["outlines"] else 0)
    assert told(cage, of_files(cage, tmp_path)) == {}
    assert ears.heard == {}
    assert "scan-" in ears.text
