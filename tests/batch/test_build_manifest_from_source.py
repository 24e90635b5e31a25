"""Datasets as the images of a run, reduced decoding, and overlays that are written while it goes on."""

import io
import pickle

import numpy as np
import pytest
import torch
from PIL import Image

from camscope import GradCAM, load_model
from camscope.errors import ImageError, InputError, MissingExtraError, PreprocessError
from camscope.geometry import Placement
from camscope.images.photo_reader import read_photo, read_reduced_photo

pa = pytest.importorskip("pyarrow")

from camscope.batch import BatchOptions, BatchRun, OverlayOptions, build_manifest, run_batch  # noqa: E402 - it needs pyarrow
from camscope.batch.build_manifest_from_source import load_dataset_by_name  # noqa: E402


@pytest.fixture(scope="module")
def model():
    return load_model("phantom")


def pictures(count=5, size=(32, 32)):
    drawn = np.random.default_rng(0)
    return [Image.fromarray(drawn.integers(0, 256, (*size, 3), dtype=np.uint8)) for _ in range(count)]


def heats(run):
    return [one.attribution for one in run]


# --- datasets


class Pairs:
    """A dataset as torchvision's are: a picture and its label by number, the labels beside."""

    classes = ("ash", "birch")

    def __init__(self):
        self.pictures, self.targets = pictures(), [0, 1, 1, -1, 0]

    def __len__(self):
        return len(self.pictures)

    def __getitem__(self, index):
        return self.pictures[index], self.targets[index]

    def __repr__(self):
        return "Pairs"


def test_a_dataset_of_torchvisions_kind_is_explained_by_number_with_its_labels(model, tmp_path):
    outcome = run_batch(GradCAM(model), Pairs(), tmp_path / "out", batch_size=2)
    assert (outcome.n_processed, outcome.n_failures) == (5, 0)
    rows = BatchRun(tmp_path / "out").table().to_pylist()
    assert [row["path"] for row in rows] == [row["id"] for row in rows] == ["#0", "#1", "#2", "#3", "#4"]
    assert [row["class"] for row in rows] == ["ash", "birch", "birch", None, "ash"]
    for heat, picture in zip(heats(BatchRun(tmp_path / "out")), pictures(), strict=True):
        np.testing.assert_allclose(heat, GradCAM(model).explain(picture).attribution, rtol=1e-4, atol=1e-6)
    assert len({row["sha256"] for row in rows}) == 5


def test_an_image_folder_is_its_files(model, tmp_path):
    from torchvision.datasets import ImageFolder

    for n, picture in enumerate(pictures(4)):
        (tmp_path / "images" / "ab"[n % 2]).mkdir(parents=True, exist_ok=True)
        picture.save(tmp_path / "images" / "ab"[n % 2] / f"{n}.png")
    made = build_manifest(ImageFolder(str(tmp_path / "images")))
    assert made.table["class"].to_pylist() == ["a", "a", "b", "b"]
    assert made.table["path"].to_pylist()[0] == str(tmp_path / "images" / "a" / "0.png")
    run_batch(GradCAM(model), made, tmp_path / "out")
    run = BatchRun(tmp_path / "out")
    np.testing.assert_array_equal(run.read_image(run.table().to_pylist()[2]), np.asarray(pictures(2)[1]))


def test_what_a_dataset_gives_may_be_the_models_input(model, tmp_path):
    read = GradCAM(model).prepare_input(pictures(1)[0])
    run_batch(GradCAM(model), [read.x, read.x * 0.5], tmp_path / "out", overlays="png")
    (one, _) = BatchRun(tmp_path / "out")
    np.testing.assert_allclose(one.attribution, GradCAM(model).explain(read.x).attribution, rtol=1e-4, atol=1e-6)


def test_an_input_of_no_size_is_a_row(model, tmp_path):
    outcome = run_batch(GradCAM(model), [torch.zeros(1, 0, 32), torch.rand(1, 32, 32)], tmp_path / "out")
    (reason,) = outcome.failure_counts.elements()
    assert "expected positive integers" in reason


def test_an_item_that_cannot_be_fetched_is_a_row(model, tmp_path):
    class Torn(Pairs):
        def __getitem__(self, index):
            if index == 1:
                raise OSError("the archive is torn")
            return "no image" if index == 2 else super().__getitem__(index)

    run_batch(GradCAM(model), Torn(), tmp_path / "out")
    errors = [row["error"] for row in BatchRun(tmp_path / "out").table().to_pylist()]
    assert [error is None for error in errors] == [True, False, False, True, True]
    assert errors[1] == "it cannot be read: the archive is torn"


@pytest.mark.slow
def test_a_dataset_of_hugging_face_is_read_undecoded_with_its_columns(model, tmp_path):
    datasets = pytest.importorskip("datasets")
    features = datasets.Features(
        {
            "image": datasets.Image(),
            "label": datasets.ClassLabel(names=["ash", "birch"]),
            "site": datasets.Value("string"),
        }
    )
    columns = {"image": pictures(3), "label": [1, 0, 1], "site": ["x", "y", "z"]}
    dataset = datasets.Dataset.from_dict(columns, features=features)
    made = build_manifest(dataset)
    assert made.table.drop_columns(["id", "row"]).to_pydict() == {
        "path": ["#0", "#1", "#2"],
        "class": ["birch", "ash", "birch"],
        "site": ["x", "y", "z"],
    }
    assert isinstance(made.images[1], bytes)
    assert pickle.loads(pickle.dumps(made.images))[1] == made.images[1]
    outcome = run_batch(GradCAM(model), dataset, tmp_path / "out")
    assert outcome.n_failures == 0
    np.testing.assert_allclose(
        heats(BatchRun(tmp_path / "out"))[1], GradCAM(model).explain(pictures(2)[1]).attribution, rtol=1e-4, atol=1e-6
    )
    dataset.save_to_disk(tmp_path / "disk")
    by_name = run_batch(GradCAM(model), f"hf:{tmp_path / 'disk'}", tmp_path / "named")
    assert (by_name.n_processed, by_name.n_failures) == (3, 0)
    run = BatchRun(tmp_path / "named", fetch=True)
    rows = run.table().to_pylist()
    with pytest.raises(ImageError, match="not downloaded by default; pass --fetch"):
        BatchRun(tmp_path / "named").read_image(rows[2])
    np.testing.assert_array_equal(run.read_image(rows[2]), np.asarray(pictures(3)[2]))
    with pytest.raises(ImageError, match="BatchRun\\(folder, dataset\\)"):
        BatchRun(tmp_path / "out").read_image(rows[0])
    np.testing.assert_array_equal(BatchRun(tmp_path / "out", dataset).read_image(rows[0]), np.asarray(pictures(1)[0]))


def test_a_dataset_of_several_splits_is_asked_for_one(tmp_path):
    datasets = pytest.importorskip("datasets")
    parts = {name: datasets.Dataset.from_dict({"n": [n]}) for n, name in enumerate(("train", "test"))}
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "disk")
    with pytest.raises(InputError, match=r"has the splits train, test; choose one, such as hf:.*:train"):
        load_dataset_by_name(f"hf:{tmp_path / 'disk'}")
    assert load_dataset_by_name(f"hf:{tmp_path / 'disk'}:test")["n"] == [1]
    with pytest.raises(InputError, match="no column of images; its columns are n"):
        build_manifest(f"hf:{tmp_path / 'disk'}:test")


def test_a_dataset_of_torchvision_by_its_name(tmp_path):
    with pytest.raises(InputError, match=r"torchvision has no dataset 'CIFAR11'; its datasets are .*CIFAR10"):
        load_dataset_by_name("torchvision:CIFAR11")
    assert len(load_dataset_by_name("torchvision:FakeData")) == 1000
    with pytest.raises(InputError, match="the dataset torchvision:SBU cannot be loaded"):
        load_dataset_by_name("torchvision:SBU:nothing", tmp_path)


def test_what_is_no_dataset_is_refused():
    with pytest.raises(InputError, match="a generator has no __len__"):
        build_manifest(image for image in pictures(1))


# --- reduced decoding


def photograph(size, orientation=1):
    """A smooth JPEG of (H,W) as it is stored, with an EXIF orientation."""
    rows, columns = np.mgrid[: size[0], : size[1]]
    pixels = np.stack([rows % 256, columns % 256, (rows + columns) // 2 % 256], -1).astype(np.uint8)
    exif = Image.Exif()
    exif[0x0112] = orientation
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "JPEG", quality=95, exif=exif)
    return stream.getvalue()


@pytest.mark.parametrize(("wanted", "factor"), [((100, 130), 4), ((101, 130), 2), ((1, 1), 8), ((400, 520), 1)])
def test_a_photograph_is_decoded_no_smaller_than_is_enough(wanted, factor):
    pixels, size = read_reduced_photo(photograph((400, 520)), lambda size: wanted)
    assert (pixels.shape[:2], size) == ((400 // factor, 520 // factor), (400, 520))


def test_a_photograph_that_lies_on_its_side_is_reduced_upright():
    asked = []
    pixels, size = read_reduced_photo(
        photograph((400, 520), orientation=6), lambda size: asked.append(size) or (130, 100)
    )
    assert (asked, size, pixels.shape) == ([(520, 400)], (520, 400), (130, 100, 3))


@pytest.mark.parametrize("orientation", range(10))
@pytest.mark.parametrize("kind", ["JPEG", "MPO", "TIFF", "PNG", "WEBP"])
@pytest.mark.one_in(3)
def test_reduced_decoding_reports_the_size_that_whole_decoding_has(kind, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    image, stream = Image.open(io.BytesIO(photograph((96, 160)))), io.BytesIO()
    image.save(stream, kind, exif=exif)
    whole = read_photo(stream.getvalue()).pixels
    pixels, size = read_reduced_photo(stream.getvalue(), lambda size: (size[0] // 4, size[1] // 4))
    assert size == whole.shape[:2]
    step = size[0] // pixels.shape[0]  # 4 of a JPEG, 1 of all others
    assert (step, pixels.shape[:2]) == (4 if kind in ("JPEG", "MPO") else 1, (size[0] // step, size[1] // step))
    blocks = whole.reshape(pixels.shape[0], step, pixels.shape[1], step, 3).mean((1, 3))
    assert abs(blocks - pixels).mean() < 4  # the same picture, not turned


@pytest.mark.slow
def test_reduced_decoding_keeps_the_place_and_nearly_the_map(model, tmp_path):
    (tmp_path / "one.jpg").write_bytes(photograph((1600, 2000)))
    tool = GradCAM(model)
    run_batch(
        tool,
        [tmp_path / "one.jpg"],
        tmp_path / "out",
        overlays=OverlayOptions("jpg", height=100),
        options=BatchOptions(reduced_decoding=True),
    )
    (one,), whole = BatchRun(tmp_path / "out"), tool.explain(tmp_path / "one.jpg")
    assert one.placement.image_size == (1600, 2000)
    np.testing.assert_allclose(one.placement.matrix, whole.placement.matrix, rtol=1e-6, atol=1e-6)
    assert not np.array_equal(one.attribution, whole.attribution)
    np.testing.assert_allclose(one.attribution, whole.attribution, atol=0.05 * abs(whole.attribution).max())
    with pytest.raises(PreprocessError, match=r"reduced decoding needs a camscope\.Preprocess"):
        run_batch(
            GradCAM(model, preprocess=lambda image: torch.zeros(3, 8, 8)),
            [tmp_path / "one.jpg"],
            "x",
            options=BatchOptions(reduced_decoding=True),
        )


def test_a_place_on_the_same_image_at_another_size():
    place = Placement.identity((480, 640)).resized((240, 320)).cropped((8, 48), (224, 224))
    half = place.on_resized_image((240, 320))
    np.testing.assert_allclose(half.to_image([[112, 112]]), [[120.0, 160.0]])
    assert half.on_resized_image((480, 640)) == place


# --- overlays


@pytest.mark.filterwarnings("ignore::camscope.errors.CamscopeWarning")
@pytest.mark.parametrize("kind", ["png", "jpg", "webp"])
def test_overlays_are_those_of_single_calls(kind, model, tmp_path):
    for n, picture in enumerate(pictures(3, (40, 30))):
        picture.save(tmp_path / f"Café {n}.png")
    files = [tmp_path / f"Café {n}.png" for n in range(3)]
    run_batch(GradCAM(model), files, tmp_path / "out", ["nodule", "effusion"], overlays=kind)
    rows = BatchRun(tmp_path / "out").table().to_pylist()
    assert len({row["overlay"] for row in rows}) == 6
    for row in rows:
        file = tmp_path / "out" / row["overlay"]
        assert file.name.startswith(f"{row['row']:08d}-{row['sha256'][:8]}-Cafe-{row['row']}-{row['target']}")
        drawn = GradCAM(model).explain(files[row["row"]], row["target"]).annotated_image()
        difference = abs(read_photo(file).pixels.astype(int) - drawn)
        assert difference.max() <= (1 if kind != "jpg" else 60)
        assert difference.mean() < (0.1 if kind != "jpg" else 6)
    assert not list((tmp_path / "out").rglob("*.part"))


@pytest.mark.parametrize(("inside", "pattern"), [("", ""), ("heatmaps", ""), ("heatmaps", "/**/*.png")])
def test_a_run_in_the_folder_of_its_images_goes_on_past_its_own_overlays(inside, pattern, model, tmp_path):
    for n, picture in enumerate(pictures(3)):
        picture.save(tmp_path / f"{n}.png")
    (tmp_path / "overlays").mkdir()
    pictures(1)[0].save(tmp_path / "overlays" / "kept.png")
    for before in (0, 4):
        outcome = run_batch(GradCAM(model), f"{tmp_path}{pattern}", tmp_path / inside, overlays="png")
        assert (outcome.n_done_before, outcome.n_images) == (before, 4)


def test_overlays_of_a_height_and_of_an_image_without_a_place(model, tmp_path):
    pictures(1, (40, 30))[0].save(tmp_path / "one.png")
    tool = GradCAM(model, preprocess=lambda image: torch.rand(1, 64, 64))
    run_batch(tool, [tmp_path / "one.png"], tmp_path / "out", overlays=OverlayOptions("png", height=96))
    (row,) = BatchRun(tmp_path / "out").table().to_pylist()
    assert row["placement"] is None
    assert read_photo(tmp_path / "out" / row["overlay"]).pixels.shape == (96, 96, 3)


def test_an_overlay_that_its_format_cannot_hold_costs_no_row(model, tmp_path):
    (tmp_path / "images").mkdir()
    Image.new("RGB", (16_384, 4)).save(tmp_path / "images" / "0.png")
    pictures(1)[0].save(tmp_path / "images" / "1.png")
    outcome = run_batch(GradCAM(model), tmp_path / "images", tmp_path / "out", overlays="webp")
    wide, usual = BatchRun(tmp_path / "out").table().to_pylist()
    assert (outcome.n_failures, wide["overlay"]) == (0, None)
    assert "no overlay: " in wide["notes"][-1]
    assert "cannot be written in the format WEBP" in wide["notes"][-1]
    assert (tmp_path / "out" / usual["overlay"]).is_file()


def test_a_disk_that_is_full_ends_the_run_before_the_part_is_written(model, tmp_path, monkeypatch):
    from camscope.batch import overlay_writer as module

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "write_bytes", full)
    pictures(1)[0].save(tmp_path / "one.png")
    with pytest.raises(OSError, match="No space left"):
        run_batch(GradCAM(model), [tmp_path / "one.png"], tmp_path / "out", overlays="png")
    assert not list((tmp_path / "out" / "parts").iterdir())
    with pytest.raises(InputError, match="overlays='bmp'; expected jpeg, jpg, png, webp"):
        run_batch(GradCAM(model), [tmp_path / "one.png"], tmp_path / "other", overlays="bmp")


def test_without_the_extra_a_name_of_hugging_face_says_what_to_install(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingExtraError, match=r"camscope\[hub\]"):
        load_dataset_by_name("hf:beans:test")
