"""From files to maps: what batches, places, formats and hidden pictures must keep, over scans, end to end."""

import base64
import csv
import importlib
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

pytest.importorskip("pyarrow")
pytest.importorskip("nibabel")
pytest.importorskip("pydicom")

import nibabel
from PIL import Image
from typer.testing import CliRunner

from camscope import GradCAM, HiResCAM, Preprocess, Saliency
from camscope.batch import BatchRun, run_batch
from camscope.cli import app
from camscope.errors import CamscopeError
from camscope.explainers import METHODS
from camscope.images.measure_callable_preprocess import CallablePreprocess
from camscope.images.scans.scan import Scan
from camscope.images.scans.scan_preprocess import ScanPreprocess
from tests.nets import CASES
from tests.refusals import answers
from tests.scan_files import dicom, folder, slices, written
from tests.tools import explainer
from tests.untouched import untouched

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # benchmarks/ is not installed
fuzz = importlib.import_module("benchmarks.fuzz_scans")

pytestmark = [
    pytest.mark.filterwarnings("ignore::camscope.errors.CamscopeWarning"),
    pytest.mark.usefixtures("one_thread"),
]
ONE_PASS = [name for name, kind in METHODS.items() if kind.forward_passes == "1" and kind.backward_passes in ("0", "1")]


# --- batches


@pytest.mark.parametrize("shape", ["pooled", "volume"])
@pytest.mark.parametrize("method", ONE_PASS)
@pytest.mark.one_in(5)
def test_a_map_does_not_depend_on_its_batch(method, shape):
    """1, 2, 3, 7 and 8 at once, of which 3 are as wide as the map and 6 as many as its channels; mixed predictions."""
    case = CASES[shape]
    if not answers(method, shape):
        pytest.skip("refused: see tests/refusals.py")
    model, x = case.make(8)
    with torch.no_grad():
        model.head.bias -= model(x).mean(0)
        assert len(set(model(x).argmax(1).tolist())) > 1
    tool, own = explainer(method, model, case.layer), [2, 0, None, 1, 1, 2, 0, None]
    for target in (None, 1, own):
        wanted = own if target is own else [target] * 8
        alone = torch.cat([tool.attribute(x[n : n + 1], wanted[n]) for n in range(8)])
        for count in (1, 2, 3, 7, 8):
            found = tool.attribute(x[:count], own[:count] if target is own else target)
            for one, expected in zip(found, alone, strict=False):
                assert (one - expected).abs().max() <= 1e-5 * expected.abs().max()


class Sums(nn.Module):
    """The sum over a part of the input, and its negative: each gradient is that part, whatever the pixels are."""

    def __init__(self, *part):
        super().__init__()
        self.part, self.scale, self.whole = part, nn.Parameter(torch.ones(1)), nn.Identity()

    def forward(self, x):
        inside = self.whole(x)[(..., *(slice(start, stop) for start, stop in self.part))]
        total = inside.flatten(1).sum(1, keepdim=True) * self.scale
        return torch.cat([total, -total], 1)


def flat():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 3, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 3)
    ).eval()


@pytest.fixture(scope="module")
def eight(tmp_path_factory):
    """Eight different slices in files, one of them twice, with targets of their own for some."""
    place, rng = tmp_path_factory.mktemp("eight"), np.random.default_rng(0)
    for n in range(8):
        pixels = (rng.random((20 + n % 2, 24)) * 900).astype(np.uint16)
        (place / f"{n}.dcm").write_bytes(written(dicom(pixels, Modality="CT")))
    (place / "8.dcm").write_bytes((place / "2.dcm").read_bytes())
    return place


def rows_of(place, tool, out, order, batch_size):
    """The rows of a run over the files, by file."""
    with (place / f"{out.name}.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["path", "id", "target"])
        for n in order:
            table.writerow([f"{n}.dcm", f"case {n}", {2: 1, 3: 0, 5: 2, 8: 1}.get(n, "")])
    run_batch(tool, place / f"{out.name}.csv", out, batch_size=batch_size)
    return {int(row["id"].removeprefix("case ")): row for row in BatchRun(out).table().to_pylist()}


@pytest.mark.slow
def test_rows_of_a_run_are_single_maps_in_any_order_and_the_model_stays_as_it_was(eight, tmp_path):
    model = flat().train()
    tool = GradCAM(model, "1", preprocess=ScanPreprocess(resize=(20, 24), normalize="range"))
    model(torch.rand(2, 1, 20, 24)).sum().backward()
    with untouched(model):
        runs = {
            count: rows_of(eight, tool, tmp_path / f"{count}", np.random.default_rng(count).permutation(9), count)
            for count in (1, 2, 3, 7, 8)
        }
    alone = [tool.explain(eight / f"{n}.dcm", {2: 1, 3: 0, 5: 2, 8: 1}.get(n)) for n in range(9)]
    for rows in runs.values():
        for n, one in enumerate(alone):
            assert rows[n]["label"] == one.label
            heat = np.reshape(rows[n]["attribution"], one.grid)
            assert abs(heat - one.attribution).max() <= 1e-5 * one.attribution.max()
        np.testing.assert_allclose(rows[2]["attribution"], rows[8]["attribution"], rtol=1e-5)
        assert rows[2]["sha256"] == rows[8]["sha256"]


def test_a_twin_in_monochrome1_has_the_same_map(tmp_path):
    pixels = (np.random.default_rng(1).random((24, 24)) * 4095).astype(np.uint16)
    (tmp_path / "a.dcm").write_bytes(written(dicom(pixels, bits=12)))
    (tmp_path / "b.dcm").write_bytes(written(dicom(4095 - pixels, "MONOCHROME1", bits=12)))
    tool = GradCAM(flat(), "1", preprocess=ScanPreprocess(resize=20, normalize="range"))
    one, twin = (tool.explain(tmp_path / name, 1).attribution for name in ("a.dcm", "b.dcm"))
    np.testing.assert_array_equal(one, twin)


def test_names_and_numbers_of_slices_change_no_bit_of_the_map(tmp_path):
    volume = (np.random.default_rng(2).random((6, 10, 10)) * 900).astype(np.int16)
    made = slices(volume, [(0, 0, 2.0 * z) for z in range(6)])
    folder(tmp_path / "a", made)
    for one, number in zip(made, (5, 2, 9, 1, 1, 7), strict=True):
        one.InstanceNumber = number
    folder(tmp_path / "b", made[::-1], [f"{name}.dcm" for name in "qdzkab"])
    tool = Saliency(Sums((1, 4), (2, 7), (3, 9)), preprocess=ScanPreprocess(normalize="range"))
    one, other = (tool.explain(tmp_path / name, 0) for name in "ab")
    assert one.attribution.tobytes() == other.attribution.tobytes()
    assert one.peak_mm == other.peak_mm


# --- places


def edges(start, stop, *, size, resized, crop=None, flipped=False):
    """Where a stretch of the model's input begins and ends on an axis of the image, by arithmetic."""
    crop = resized if crop is None else crop
    margin = (resized - crop) // 2
    ends = [(one + margin) * size / resized for one in (start, stop)]
    return sorted(size - one for one in ends) if flipped else ends


def check(one, where, pixel):
    """The map on the image is the box: its center within half a pixel of the model, IoU at half its height 0.9 and more."""
    values, covered = one.heatmap("image", scale=None), one.coverage_mask()
    centers = np.stack(np.meshgrid(*(np.arange(n) + 0.5 for n in values.shape), indexing="ij"), -1)
    inside = np.all([(centers[..., i] > low) & (centers[..., i] < high) for i, (low, high) in enumerate(where)], 0)
    centroid = (centers * values[..., None]).reshape(-1, values.ndim).sum(0) / values.sum()
    assert (abs(centroid - np.mean(where, 1)) <= 0.5 * np.array(pixel) + 1e-9).all()
    found = values >= values.max() / 2
    assert (found & inside).sum() / (found | inside).sum() >= 0.9
    assert not values[~covered].any()
    return covered


def test_a_box_is_where_it_was_after_resize_crop_pad_and_flip_of_a_volume():
    """Of every axis another thing: cut and flipped; padded; stretched and flipped. What was cut away is not covered."""
    world = np.diag([-0.7, 0.7, -5.0, 1.0])
    world[:3, 3] = 30, -20, 50
    scan = Scan(np.random.default_rng(0).random((60, 30, 25), np.float32), "scan-0", world)
    way = ScanPreprocess(orientation="RAS", resize=(48, 30, 40), crop=(32, 40, 40), normalize="range")
    part = (6, 26), (9, 31), (8, 32)
    tools = (Saliency(Sums(*part), preprocess=way), HiResCAM(Sums(*part), "whole", preprocess=way))
    for tool in tools:
        one = tool.explain(replace_values(scan, tool), 0)
        assert one.input_size == (32, 40, 40)
        where = [
            edges(6, 26, size=60, resized=48, crop=32, flipped=True),
            edges(9, 31, size=30, resized=30, crop=40),
            edges(8, 32, size=25, resized=40, flipped=True),
        ]
        covered = check(one, where, (60 / 48, 1, 25 / 40))
        assert covered.sum(axis=(1, 2)).astype(bool).tolist() == [
            8 / 48 * 60 < n + 0.5 < 40 / 48 * 60 for n in range(60)
        ]
        np.testing.assert_allclose(one.affine, world)
        voxel = np.linalg.inv(one.affine)[:3] @ [*one.peak_mm, 1] + 0.5
        assert all(low <= at <= high for at, (low, high) in zip(voxel, where, strict=True))


def replace_values(scan, tool):
    """HiResCAM's map is gradient times activation: the gradient alone where all activations are 1."""
    if isinstance(tool, Saliency):
        return scan
    values = np.ones_like(scan.values)
    values[0, 0, 0] = 0  # "range" needs one
    return Scan(values, scan.name, scan.affine)


@pytest.mark.parametrize("size", [(90, 45), (45, 90), (64, 64)])
def test_a_box_is_where_it_was_after_resize_crop_pad_and_flip_of_a_picture(size):
    height, width = size
    scan = Scan(np.random.default_rng(0).random(size, np.float32), "scan-0")
    photo = (np.random.default_rng(0).random((*size, 3)) * 255).astype(np.uint8)
    part = (7, 31), (5, 30)
    ways = {
        "cut and padded": (ScanPreprocess(resize=(60, 28), crop=(40, 36), normalize="range"), scan, (60, 28), (40, 36)),
        "cut and padded, of pixels": (
            Preprocess(mean=(0.5,) * 3, std=(0.5,) * 3, resize=(60, 28), crop=(40, 36)), photo, (60, 28), (40, 36)
        ),
        "flipped": (CallablePreprocess(mirrored), photo, (40, 36), (40, 36)),
    }  # fmt: skip
    for name, (way, image, resized, crop) in ways.items():
        one = Saliency(Sums(*part), preprocess=way).explain(image, 0)
        where = [
            edges(*part[0], size=height, resized=resized[0], crop=crop[0]),
            edges(*part[1], size=width, resized=resized[1], crop=crop[1], flipped=name == "flipped"),
        ]
        covered = check(one, where, (height / resized[0], width / resized[1]))
        assert covered.all() == (name == "flipped")
        shown = [10 / 60 * height <= n + 0.5 <= 50 / 60 * height or name == "flipped" for n in range(height)]
        assert covered.any(1).tolist() == shown


def mirrored(image):
    """A preprocessing of one's own: resized and mirrored."""
    pixels = np.asarray(image.resize((36, 40), Image.Resampling.BILINEAR), np.float32)[:, ::-1] / 255
    return torch.from_numpy(pixels.copy()).permute(2, 0, 1)


# --- formats


def test_a_slice_enters_the_model_as_the_same_numbers_from_every_format(tmp_path):
    """NIfTI's axes are i, j, k: `n_rows` is written with its rows along i, `columns`, as converters do, with its columns."""
    stored = (np.random.default_rng(3).random((31, 40)) * 4000).astype(np.uint16)
    (tmp_path / "a.dcm").write_bytes(written(dicom(stored, bits=16)))
    Image.fromarray(stored).save(tmp_path / "a.png")
    Image.fromarray(stored).save(tmp_path / "a.tif")
    nibabel.save(nibabel.Nifti1Image(stored, np.eye(4)), tmp_path / "rows.nii.gz")
    nibabel.save(nibabel.Nifti1Image(stored.T, np.eye(4)), tmp_path / "columns.nii")
    way = ScanPreprocess(window=(1800, 3000), resize=24, crop=(20, 26), normalize="zscore")
    turned = ScanPreprocess(window=(1800, 3000), resize=24, crop=(26, 20), normalize="zscore")
    names = ("a.dcm", "a.png", "a.tif", "rows.nii.gz")
    inputs = [GradCAM(flat(), "1", preprocess=way).prepare_input(tmp_path / name).x for name in names]
    assert len({x.numpy().tobytes() for x in inputs}) == 1
    columns = GradCAM(flat(), "1", preprocess=turned).prepare_input(tmp_path / "columns.nii").x
    torch.testing.assert_close(columns.transpose(1, 2), inputs[0])


def test_a_volume_enters_the_model_as_the_same_numbers_from_dicom_and_nifti(tmp_path):
    """As a converter writes it: columns along i, rows along j, slices along k, and left and back turned round."""
    volume = (np.random.default_rng(4).random((5, 8, 10)) * 900).astype(np.int16)
    series = folder(tmp_path / "series", slices(volume, [(-20, 30, 7 + 2.5 * z) for z in range(5)]))
    world = np.diag([-0.5, -0.8, 2.5, 1.0])
    world[:3, 3] = 20, -30, 7
    nibabel.save(nibabel.Nifti1Image(volume.transpose(2, 1, 0), world), tmp_path / "a.nii.gz")
    tool = Saliency(Sums((1, 3), (1, 3), (1, 3)), preprocess=ScanPreprocess(orientation="RAS", normalize="range"))
    one, other = tool.prepare_input(series), tool.prepare_input(tmp_path / "a.nii.gz")
    assert one.x.numpy().tobytes() == other.x.numpy().tobytes()
    np.testing.assert_allclose(tool.explain(series, 0).peak_mm, tool.explain(tmp_path / "a.nii.gz", 0).peak_mm)


# --- pictures with text in them

HIDDEN = {
    "YES": {"BurnedInAnnotation": "YES", "Modality": "CT"},
    "ultrasound": {"Modality": "US"},
    "capture": {"Modality": "OT", "SOPClassUID": "1.2.840.10008.5.1.4.1.1.7"},
    "screen save": {"ImageType": ["DERIVED", "SECONDARY", "SCREEN SAVE"], "Modality": "CT"},
}
SUMS = """
import torch
from torch import nn
from camscope.images.scans.scan_preprocess import ScanPreprocess

class Sums(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x):
        total = x[..., 4:12, 4:12].flatten(1).sum(1, keepdim=True) * self.scale
        return torch.cat([total, -total], 1)

def sums():
    return Sums().eval()

PREPROCESSING = {"sums": ScanPreprocess()}
"""


def pictures_of(place, allowed):
    """What `explain_images`, a run's overlays and its page show of a scan: the pixels of each."""
    words = ["--allow-pixels"] if allowed else []
    scan, net = place / "a.dcm", f"{place.parent / 'model.py'}:sums"
    asked = [scan, "-m", net, "--methods", "saliency", "--target", 0, *words]
    for command in (
        ["explain", *asked, "-o", place / "why.png"],
        ["batch", *asked, "--overlays", "png", "-o", place / "out"],
    ):
        result = CliRunner().invoke(app, [str(word) for word in command])
        assert result.exit_code == 0, result.output
    page = BatchRun(place / "out", scan).save_html(place / "page.html").read_text()
    drawn = [place / "why.png", *place.glob("out/overlays/*/*.png")]
    assert len(drawn) == 2
    shown = [base64.b64decode(data) for data in re.findall(r"data:image/webp;base64,([A-Za-z0-9+/=]+)", page)]
    return [np.asarray(Image.open(path)).tobytes() for path in drawn], shown


@pytest.mark.slow
@pytest.mark.parametrize("kind", HIDDEN)
@pytest.mark.one_in(2)
def test_what_may_have_text_in_it_is_under_no_map(kind, tmp_path):
    """Two scans differ where the model does not look: their pictures do not, unless they may be shown."""
    (tmp_path / "model.py").write_text(SUMS)
    rng = np.random.default_rng(5)
    pixels = (rng.random((16, 16)) * 800).astype(np.uint16)
    other = np.where(np.pad(np.ones((8, 8), bool), 4), pixels, (rng.random((16, 16)) * 800).astype(np.uint16))
    for allowed in (False, True):
        made = []
        for name, values in (("one", pixels), ("other", other)):
            place = tmp_path / f"{name} {allowed}"
            place.mkdir()
            (place / "a.dcm").write_bytes(written(dicom(values, **HIDDEN[kind])))
            made.append(pictures_of(place, allowed))
        (drawn, page), (others, other_page) = made
        assert all((one == another) is not allowed for one, another in zip(drawn, others, strict=True))
        assert page == other_page  # a page has no leave to ask for
        assert len(page) > 0


# --- damaged files


class Squares(nn.Module):
    """Of an input of any number of axes: the mean square of it, and its negative."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x):
        total = (x * x).flatten(1).mean(1, keepdim=True) * self.scale
        return torch.cat([total, -total], 1)


@pytest.mark.slow
def test_damaged_files_have_an_explanation_or_one_error(tmp_path):
    """60 files give the same numbers alone and in a run."""
    tool = Saliency(Squares(), preprocess=ScanPreprocess(resize=8, normalize="range", non_finite_fill=0))
    alone, said = {}, {}
    for number, (name, _, data) in enumerate(fuzz.mutated(60, seed=8)):
        file = (
            tmp_path / f"{number:02}{'.dcm' if '.nii' not in name else '.nii.gz' if name.endswith('.gz') else '.nii'}"
        )
        file.write_bytes(data)
        try:
            source = f"{file}#0" if "functional" in name else str(file)  # it has four axes
            alone[Path(source).name] = tool.explain(source, 0)
        except CamscopeError as error:
            said[Path(source).name] = str(error)
    assert len(alone) + len(said) == 60
    assert 15 < len(alone) < 55
    assert all(re.match(r"scan-[0-9a-f]{8}: .+|.*scan-[0-9a-f]{8} .+", words) for words in said.values())
    (tmp_path / "list.csv").write_text("\n".join(["path,id", *(f"{name},of {name}" for name in [*alone, *said])]))
    made = run_batch(tool, tmp_path / "list.csv", tmp_path / "out", (0,), batch_size=8)
    assert made.n_processed == 60
    for row in BatchRun(tmp_path / "out").table().to_pylist():
        name = row["id"].removeprefix("of ")
        if name in said:
            assert (row["status"], row["error"]) == ("failed", said[name])
        else:
            heat = alone[name].attribution
            np.testing.assert_allclose(np.reshape(row["attribution"], heat.shape), heat, rtol=1e-5, atol=1e-7)
