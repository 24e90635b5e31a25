"""Canaries planted wherever a patient can hide: none is in anything that camscope writes or says, packed or not."""

import csv
import importlib.util
import io
import logging
import shutil
import warnings
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("nibabel")
pytest.importorskip("pydicom")

from PIL import Image
from typer.testing import CliRunner

from camscope.batch import BatchRun
from camscope.cli import app
from tests.canaries import Cage, dicom, itk, nifti, picture, save
from tests.scan_files import slices

pytestmark = [
    pytest.mark.filterwarnings("ignore::camscope.errors.CamscopeWarning"),
    pytest.mark.usefixtures("one_thread"),
]
MODEL = """
import warnings
import torch
from torch import nn
from camscope.images.scans.scan_preprocess import ScanPreprocess

def positive(conv, pool):
    torch.manual_seed(0)
    net = nn.Sequential(conv, nn.ReLU(), pool(1), nn.Flatten(), nn.Linear(3, 2)).eval()
    net[-1].weight.data.abs_()
    return net

def flat():
    return positive(nn.Conv2d(1, 3, 3, 2), nn.AdaptiveAvgPool2d)

def deep():
    return positive(nn.Conv3d(1, 3, 3), nn.AdaptiveAvgPool3d)

def colors():
    return positive(nn.Conv2d(3, 3, 3, 2), nn.AdaptiveAvgPool2d)

raising, warning, own = flat, colors, colors

class Raising(ScanPreprocess):
    def __call__(self, scan):
        raise KeyError(f"no entry for {scan.sources}, WORD")

def warn(image):
    warnings.warn("WORD was here")
    return torch.zeros(3, 24, 24)

def fail(image):
    raise LookupError("WORD is not in the table")

flat_way = ScanPreprocess(resize=24, normalize="range")
PREPROCESSING = {
    "flat": flat_way, "deep": ScanPreprocess(resize=8, normalize="range"), "raising": Raising(resize=24),
    "warning": warn, "own": fail
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
                words = [
                    self.cage.word(f"column of {kind}"),
                    self.cage.value("PatientBirthDate"),
                    self.cage.word("column"),
                ]
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
    if importlib.util.find_spec("SimpleITK") is not None:
        for suffix in (".nrrd", ".mha"):
            itk(cage, made.name(suffix, suffix), rng.random((10, 9, 8)).astype(np.float32))
    picture(cage, made.name("png", ".png"), (rng.random((30, 30)) * 60000).astype(np.uint16))
    picture(cage, made.name("photo", ".png"), (rng.random((30, 30, 3)) * 255).astype(np.uint8))
    picture(cage, made.name("jpeg", ".jpg"), (rng.random((30, 30, 3)) * 255).astype(np.uint8))
    picture(cage, made.name("tiff", ".tif"), (rng.random((30, 30)) * 60000).astype(np.uint16))
    made.name("cut png", ".png").write_bytes(made.files["photo"].read_bytes()[:400])
    series = made.name("series", "")
    for at, one in enumerate(
        slices((rng.random((5, 10, 10)) * 99).astype(np.int16), [(0, 0, 2.0 * z) for z in range(5)])
    ):
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
LINKS = [
    "memory://{}/there.png",
    "memory://{}/gone.dcm",
    "file:///{}.dcm",
    "https://localhost:9/{}.dcm",
    "nothing://{}.dcm",
]


def linked(cage: Cage) -> list[str]:
    """URLs with a canary in each; behind the first there is a picture."""
    import fsspec

    made = [one.format(cage.word("URL")) for one in LINKS]
    buffer = io.BytesIO()
    Image.fromarray(np.full((20, 20), 999, np.uint16)).save(buffer, "PNG")
    with fsspec.open(made[0], "wb") as file:
        file.write(buffer.getvalue())
    return made


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["png", "webp"])
def test_runs_and_what_is_made_of_them(ward, ears, kind, tmp_path):
    cage = ward.cage
    pytest.importorskip("fsspec")
    masks = {"ct": ward.files["mask"], "suspect": ward.files["broken mask"]}
    table = ward.table([*FLAT, *linked(cage), f"../{cage.word('path that leads away')}.dcm"], masks)
    out = tmp_path / "out"
    ears.run("batch", table, "-o", out, "-m", model(ward, "flat"), "--overlays", kind, "--layers", "1", code=1)
    assert told(cage, of_files(cage, out)) == {}
    run = BatchRun(out)
    assert run.n_failed_rows == 11
    assert all(row["path"].startswith("scan-") for row in run.table().to_pylist())
    for words in ([], ["--scans", table]):
        page = tmp_path / f"page{len(words)}.html"
        ears.run("show", out, *words, "-o", page)
        assert told(cage, cage.found(page.read_bytes())) == {}
    every = ("--format", "png,jpg,webp,npz,json,csv,coco")
    assert "pass --scans" in ears.run("export", out, *every, "-o", tmp_path / "export", code=2).stderr
    ears.run("export", out, *every, "-o", tmp_path / "export", "--scans", table, code=1)  # burned-in text
    measures = tmp_path / "measures"
    asked = [[], ["--masks", "outlines"], ["--masks", ward.folder, "--category", "all"]]
    for masks in asked if kind == "png" else asked[1:2]:
        words = ["--scans", table, "-o", measures, "--overwrite", "--figure", tmp_path / "figure.png"]
        ears.run("evaluate", out, *words, *masks, "--overwrite", code=2 if masks[1:] == ["outlines"] else 0)
    assert told(cage, of_files(cage, tmp_path)) == {}
    assert ears.heard == {}
    assert "scan-" in ears.text


@pytest.mark.slow
def test_runs_of_volumes(ward, ears, tmp_path):
    kinds = [kind for kind in ("nifti", "packed", "cut nifti", "series", ".nrrd", ".mha") if kind in ward.files]
    table = ward.table(kinds)
    out = tmp_path / "out"
    ears.run("batch", table, "-o", out, "-m", model(ward, "deep"), "--overlays", "png", "--height", 64, code=1)
    assert BatchRun(out).n_failed_rows == 1
    ears.run("show", out, "--scans", table, "-o", tmp_path / "page.html")
    ears.run("export", out, "--format", "png,npz,json,csv", "-o", tmp_path / "export", code=2)
    ears.run("export", out, "--format", "png,npz,json,csv", "-o", tmp_path / "export", "--scans", table)
    ears.run("evaluate", out, "--scans", table, "-o", tmp_path / "measures", "--metrics", "sparseness")
    assert told(ward.cage, of_files(ward.cage, tmp_path)) == {}
    assert ears.heard == {}


@pytest.mark.parametrize("given", ["series", "no suffix", "png"])
def test_what_is_a_scan_by_its_bytes_or_its_way_is_private_too(ward, ears, given, tmp_path):
    """A table that names folders of slices, files without a suffix, or pictures that enter the model as scans."""
    net = model(ward, "deep" if given == "series" else "flat")
    ears.run("batch", ward.table([given]), "-o", tmp_path, "-m", net, "--layers", "1")
    assert BatchRun(tmp_path).table().to_pylist()[0]["path"].startswith("scan-")
    assert told(ward.cage, of_files(ward.cage, tmp_path)) == {}
    assert ears.heard == {}


@pytest.mark.parametrize(("name", "failures"), [("raising", 4), ("own", 4), ("warning", 1)])
def test_what_a_preprocessing_of_ones_own_says(ward, ears, name, failures, tmp_path):
    """Its error's kind is told; a warning's words are its own, which reach the console as those of any code do."""
    table, net = ward.table(["ct", "photo", "jpeg", "cut"]), model(ward, name)
    ears.run("batch", table, "-o", tmp_path / "out", "-m", net, "--layers", "1", code=1)
    assert BatchRun(tmp_path / "out").n_failed_rows == failures
    for image in ("ct", "photo"):
        ears.run(
            "explain",
            ward.files[image],
            "--profile",
            "research",
            "-m",
            net,
            "-o",
            tmp_path / image,
            "--layers",
            "1",
            code=2 if name != "warning" else 0,
        )
    assert told(ward.cage, of_files(ward.cage, tmp_path)) == {}
    assert {where for where in ears.heard if where != "an exception's message" or name != "warning"} == set()


@pytest.mark.slow
def test_explanations(ward, ears, tmp_path):
    cage, files, everything = ward.cage, ward.files, ["--format", "png,jpg,webp,npz,json", "--export", "nifti"]

    def explain(net, to, *words, code=0):
        return ears.run("explain", *words, "-m", model(ward, net), "-o", tmp_path / to, "--layers", "1", code=code)

    explain("flat", "one", files["ct"], *everything, "--mask", f"lesion={files['mask']}")
    for mask in ("wrong mask", "broken mask", "gone"):
        explain("flat", mask, files["ct"], "--mask", f"lesion={files[mask]}", code=1)
    each = [
        files[one] for one in ("ct", "suspect", "burned", "no suffix", "cut", "text", "gone", "png", "tiff", "photo")
    ]
    several = ["--format", "png,npz,json", "--export", "nifti"]
    explain("flat", "flat", *each, *several, code=1)
    assert "have output" in explain("flat", "flat", *each, *several, code=1).stderr
    explain("colors", "photos", files["photo"], files["ct"], "--preprocess", "imagenet", "--format", "png,json")
    moving = ["--format", "png,npz,json,gif", "--export", "nifti"]
    explain("deep", "deep", *(files[one] for one in ("nifti", "packed", "cut nifti")), *moving, code=1)
    explain("deep", "series", files["series"], "--series", *moving)
    explain("flat", "slices", files["nifti"], "--slices", 2)
    explain("deep", "lost", ward.folder / cage.word("folder that is not there"), "--series", code=1)
    explain("deep", "lost", ward.folder, code=1)
    words = ["--methods", "integratedgradients", "--set", f"baseline={files['png']}", "--format", "json"]
    ears.run("explain", files["ct"], "-m", model(ward, "flat"), "-o", tmp_path / "baseline", *words)
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"".join(path.suffixes[-2:]) for path in written} >= {".png", ".npz", ".json", ".gif", ".nii.gz"}
    assert told(cage, of_files(cage, tmp_path)) == {}
    assert ears.heard == {}


@pytest.mark.slow
def test_other_commands_call_a_scan_by_its_hash(ward, ears, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for image in ("ct", "cut", "gone"):
        words = [ward.files[image], "-m", model(ward, "flat"), "--layers", "1"]
        ears.run("compare", *words, "--methods", "gradcam,layercam", code=int(image != "ct"))
        ears.run("features", *words, code=int(image != "ct"))
    words = ["-m", model(ward, "flat"), "--layers", "1", "--metrics", "sparseness"]
    ears.run("compare", ward.table(["ct", "suspect"]), *words, "--methods", "gradcam,layercam")
    masks = {"ct": ward.files["mask"], "suspect": ward.files["broken mask"]}
    for first in ("ct", "suspect"):
        words = ["-m", model(ward, "flat"), "--layers", "1", "--metrics", "enrichment", "--masks", "outlines"]
        table = ward.table([first, "cut", "png"], masks)
        ears.run("evaluate", table, *words, "-o", f"measures {first}", code=1 if first == "ct" else 2)
    words = ["-m", model(ward, "flat"), "--layers", "1", "--methods", "gradcam,layercam", "--save", "choice.toml"]
    table = ward.table(
        ["ct", "suspect", "burned", "png", "tiff", "cut", "gone", "text"], {"ct": ward.files["wrong mask"]}
    )
    ears.run("choose", table, *words)
    ears.run("choose", table, *words, "--masks", "outlines", "--overwrite", code=2)
    assert told(ward.cage, of_files(ward.cage, tmp_path)) == {}
    assert ears.heard == {}


def test_errors_of_tables_quote_no_cell(ward, ears, tmp_path):
    cage, folder = ward.cage, ward.folder
    word = [cage.word("cell") for _ in range(8)]
    tables = {
        "ragged": f"path,patient\n{word[0]}.dcm,{word[1]}\n{word[0]}.dcm,{word[1]},{word[2]}\n",
        "no header": f"{word[3]}.dcm,{word[4]}\n",
        "not a class": f"path,id\n{word[5]}.dcm,{word[6]}\n{word[7]}.dcm,{word[6]}\n",
        "empty": "path,id\n",
        "not UTF-8": "path\n\xff\n",
    }
    for name, text in tables.items():
        path = folder / f"{cage.word(f'name of a table: {name}')}.csv"
        path.write_bytes(text.encode("latin-1"))
        ears.run("batch", path, "-o", tmp_path / "out", "-m", model(ward, "flat"), code=2)
    for source in ("gone.csv", "gone.dcm", "*.dcm"):
        ears.run(
            "batch",
            folder / f"{cage.word('source')}{source}",
            "-o",
            tmp_path / "out",
            "-m",
            model(ward, "flat"),
            code=2,
        )
    table = ward.table(["ct"])
    ears.run("batch", table, "--keep", "age", "-o", tmp_path / "out", "-m", model(ward, "flat"), code=2)
    assert ears.heard == {}


@pytest.mark.slow
def test_the_clinical_profile_shows_that_canaries_are_found(ward, ears, tmp_path):
    cage, net = ward.cage, model(ward, "flat")
    words = ["--profile", "clinical", "-m", net, "--layers", "1"]
    ears.run("batch", ward.table(["ct", "suspect", "png", "gone"]), "-o", tmp_path / "out", *words, code=1)
    ears.run("export", tmp_path / "out", "--format", "csv,coco,json", "-o", tmp_path / "export")
    ears.run("explain", ward.files["ct"], "-o", tmp_path / "one", "--export", "pmap,sc", *words)
    found = told(cage, of_files(cage, tmp_path) | cage.found(ears.text.encode()))
    assert len(cage.planted) >= 60
    assert len(found) > 30
    assert {"PatientName", "PatientID", "AccessionNumber", "StudyInstanceUID", "name of ct", "column of ct"} <= set(
        found
    )


def test_a_canary_is_found_where_it_was_put(ward):
    """All that the files hold is seen by the search, packed or not; what only names and tables hold is another matter."""
    files = of_files(ward.cage, ward.folder)
    elsewhere = ("name", "column", "folder", "cell", "source", "URL", "path", "exception")
    missed = {
        one: where
        for one, where in ward.cage.planted.items()
        if one not in files and not any(w in where for w in elsewhere)
    }
    assert missed == {}


@pytest.mark.slow
def test_what_is_found_of_images_names_none(ward, ears, tmp_path):
    """`inspect-images` over everything: damaged and lost files, wrong masks, one patient in two splits."""
    masks = {"ct": ward.files["mask"], "suspect": ward.files["wrong mask"], "burned": ward.files["broken mask"]}
    kinds = [*FLAT, *linked(ward.cage), "nifti", "packed", "cut nifti", "series", "photo"]
    table = ward.table(kinds, masks)
    words = ["--mask", "outlines", "--patient", "patient", "--split", "target"]
    for kind in (".parquet", ".csv"):
        outputs = ["-o", tmp_path / f"{kind[1:]}.json", "--table", tmp_path / f"table{kind}"]
        ears.run("inspect-images", table, *outputs, *words, code=1)
    ears.run("inspect-images", ward.folder, "-o", tmp_path / "folder.json", code=1)
    assert len([*tmp_path.iterdir()]) == 5
    assert told(ward.cage, of_files(ward.cage, tmp_path)) == {}
    assert ears.heard == {}
