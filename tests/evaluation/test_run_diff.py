"""`diff_runs`: two runs of the same images. Counts, correlations and shares are computed again here in other ways."""

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import stats
from typer.testing import CliRunner

from camscope import BatchRun, GradCAM, LayerCAM, load_model, run_batch
from camscope.cli import app
from camscope.errors import InputError
from camscope.evaluation.diff import FailCondition, diff_runs
from camscope.evaluation.diff.diff_files import save_diff
from camscope.evaluation.diff.match_images import RunImage, match_images
from camscope.metrics.intervals_and_p_values import compute_exact_interval
from camscope.phantom import draw_radiograph

N_IMAGES = 6


def damage(model):
    """Noise on the weights of all layers with more than one axis."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight += 0.6 * weight.std() * torch.randn(weight.shape, generator=generator)
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Images with masks, and the runs `old`, `same` (both of the bundled model) and `damaged`."""
    folder = tmp_path_factory.mktemp("diff")
    lines = ["path,mask"]
    for n in range(N_IMAGES):
        scan = draw_radiograph(n, 1 + n % 3)
        Image.fromarray(scan.image).save(folder / f"{n}.png")
        Image.fromarray(scan.mask).save(folder / f"mask-{n}.png")
        lines.append(f"{n}.png,mask-{n}.png")
    (folder / "list.csv").write_text("\n".join(lines))
    model = load_model("phantom")
    for name in ("old", "same"):
        run_batch([GradCAM(model), LayerCAM(model)], folder / "list.csv", folder / name)
    run_batch([GradCAM(damage(load_model("phantom")))], folder / "list.csv", folder / "damaged")
    return folder


def maps_of(run, method="gradcam"):
    return {row["id"]: row for row in BatchRun(run).table().to_pylist() if row["method"] == method}


def test_a_damaged_checkpoint_fails_and_the_images_are_named(folder):
    diff = diff_runs(
        folder / "old",
        folder / "damaged",
        ["top-class changed on the same image > 2 %", "map correlation < 0.8 on > 5 %"],
    )
    before, after = maps_of(folder / "old"), maps_of(folder / "damaged")
    changed = {name for name in before if before[name]["label"] != after[name]["label"]}
    assert 0 < len(changed) < N_IMAGES
    answer, correlation = diff.conditions
    assert answer.holds
    assert (set(answer.ids), answer.n_met, answer.n_compared) == (changed, len(changed), N_IMAGES)
    by_scipy = {
        name: stats.spearmanr(before[name]["attribution"], after[name]["attribution"])[0]
        for name in before
        if name not in changed
    }
    assert set(correlation.ids) == {name for name, value in by_scipy.items() if value < 0.8}
    assert correlation.n_compared == len(by_scipy)
    for image in diff.images:
        if image.id in by_scipy:
            (change,) = image.maps
            assert change.spearman == pytest.approx(by_scipy[image.id], abs=1e-6)
            expected = np.corrcoef(before[image.id]["attribution"], after[image.id]["attribution"])[0, 1]
            assert change.pearson == pytest.approx(expected, abs=1e-6)
        else:
            assert image.maps[0].reason == "the maps explain different classes"
        assert image.probability_before == before[image.id]["probability"]
        assert image.label_after == after[image.id]["label"]
    assert diff.failed
    assert diff.exit_code == 1
    assert any("layercam at layer4" in text and "only the first" in text for text in diff.not_compared)
    assert [image.answer_changed for image in diff.images[: len(changed)]] == [True] * len(changed)


def test_two_runs_of_the_same_model_pass(folder):
    texts = [
        "top-class changed",
        "status changed",
        "images missing",
        "map correlation < 0.999",
        "share inside mask fell by > 0",
    ]
    diff = diff_runs(folder / "old", folder / "same", texts)
    assert [result.holds for result in diff.conditions] == [False] * 5
    assert (diff.exit_code, diff.changed_images, diff.not_compared) == (0, [], [])
    assert diff.table().num_rows == 2 * N_IMAGES


def test_shares_inside_the_mask_are_those_of_the_projected_maps(folder):
    diff = diff_runs(folder / "old", folder / "damaged", "share inside mask of gradcam fell by > 0.1 on > 5 %")
    run, rows = BatchRun(folder / "old"), maps_of(folder / "old")
    for image in diff.images:
        heat = np.clip(run.explanation(rows[image.id]).heatmap("image"), 0, None)
        mask = np.asarray(Image.open(folder / f"mask-{image.id}")) > 0
        assert image.maps[0].share_before == pytest.approx(heat[mask].sum() / heat.sum(), abs=2e-3)
    drops = [image.maps[0].share_before - image.maps[0].share_after for image in diff.images]
    assert diff.conditions[0].n_met == sum(drop > 0.1 for drop in drops)
    assert diff.conditions[0].n_compared == N_IMAGES


def test_files_of_a_diff_agree_with_it(folder, tmp_path):
    diff = diff_runs(folder / "old", folder / "damaged", "top-class changed > 2 %")
    files = save_diff(diff, tmp_path / "out")
    document = json.loads(files.report.read_text("utf-8"))
    assert document["schema"] == "camscope/diff/1"
    assert document["n_answers_changed"] == diff.conditions[0].n_met
    assert [image["id"] for image in document["images"]] == [image.id for image in diff.changed_images]
    page = files.page.read_text("utf-8")
    assert page.count('<li class="card">') == len(diff.changed_images)
    assert all(image.id in page for image in diff.changed_images)
    assert "Show the originals" not in page
    pixels = np.asarray(Image.open(files.sheet))
    assert pixels.shape[0] > 192 * len(diff.changed_images)
    assert pixels.std(axis=(0, 1)).min() > 20  # no empty sheet
    with pytest.raises(Exception, match="exists"):
        save_diff(diff, tmp_path / "out")
    again = save_diff(diff_runs(folder / "old", folder / "same"), tmp_path / "out", overwrite=True)
    assert again.page is None
    assert not (tmp_path / "out" / "contact-sheet.png").exists()


def ask(*words):
    result = CliRunner().invoke(app, ["diff", *map(str, words)])
    return result.exit_code, result.stdout, result.stderr


def test_exit_codes_and_printed_images(folder, tmp_path):
    code, printed, _ = ask(folder / "old", folder / "damaged", "--fail-on", "top-class changed > 2 %")
    assert code == 1
    for name, row in maps_of(folder / "old").items():
        if row["label"] != maps_of(folder / "damaged")[name]["label"]:
            assert name in printed
    assert ask(folder / "old", folder / "same", "--fail-on", "top-class changed > 2 %")[0] == 0
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "run.json").write_text('{"name": "another program"}')
    for words in (
        [folder / "old", tmp_path / "nowhere"],
        [folder / "old", tmp_path / "foreign"],
        [folder / "old", folder],
        [folder / "old", folder / "same", "--fail-on", "top-class chnged > 2 %"],
    ):
        code, printed, errors = ask(*words)
        assert (code, printed) == (2, ""), words
        assert errors.count("error:") == 1
        assert "Traceback" not in errors
    condition = "share inside mask fell by > 0.1"
    shutil.copytree(folder / "old", tmp_path / "old")
    code, printed, _ = ask(tmp_path / "old", folder / "same", "--fail-on", condition, "--masks", tmp_path / "foreign")
    assert (code, "unchecked" in printed) == (2, True)  # no mask has the name of an image


def test_runs_without_an_image_in_common_are_one_error(folder, tmp_path):
    rng = np.random.default_rng(0)
    images = [rng.integers(0, 255, (32, 32, 3), dtype=np.uint8)]
    run_batch(GradCAM(load_model("phantom")), images, tmp_path / "other")
    with pytest.raises(InputError, match="no image in common"):
        diff_runs(folder / "old", tmp_path / "other")


def test_given_targets_are_no_answers(folder, tmp_path):
    lines = ["path,target", *(f"{folder / f'{n}.png'},nodule" for n in range(2))]
    (tmp_path / "list.csv").write_text("\n".join(lines))
    for name in ("first", "second"):
        run_batch(GradCAM(load_model("phantom")), tmp_path / "list.csv", tmp_path / name, root=folder)
    diff = diff_runs(tmp_path / "first", tmp_path / "second", ["top-class changed", "map correlation < 0.9"])
    assert [result.holds for result in diff.conditions] == [None, False]
    assert diff.exit_code == 2
    assert any("chosen targets" in text for text in diff.not_compared)


def test_an_image_that_fails_changes_answer_and_status(folder, tmp_path):
    for name in ("first", "second"):
        images = tmp_path / name / "images"
        images.mkdir(parents=True)
        for n in range(2):
            shutil.copy(folder / f"{n}.png", images)
    (tmp_path / "second" / "images" / "1.png").unlink()
    (tmp_path / "list.csv").write_text("path\n0.png\n1.png")
    for name in ("first", "second"):
        run_batch(
            GradCAM(load_model("phantom")),
            tmp_path / "list.csv",
            tmp_path / name / "run",
            root=tmp_path / name / "images",
        )
    diff = diff_runs(
        tmp_path / "first" / "run", tmp_path / "second" / "run", ["answer changed", "status changed > 1 images"]
    )
    assert [image.id for image in diff.changed_images] == ["1.png"]
    assert diff.changed_images[0].status_after == "failed"
    assert [(result.n_met, result.holds) for result in diff.conditions] == [(1, True), (1, False)]
    assert save_diff(diff, tmp_path / "out").sheet is not None


def test_images_are_matched_by_id_and_moved_ones_by_digest():
    def images(*pairs):
        return [RunImage(name, digest) for name, digest in pairs]

    first = images(("a", "1"), ("b", "2"), ("c", "3"), ("old/d", "4"), ("e", "4"), ("f", None))
    second = images(("a", "1"), ("b", "9"), ("new/d", "4"), ("f", "7"), ("g", "2"))
    matched = match_images(first, second)
    assert [(x.id, y.id) for x, y in matched.pairs] == [("a", "a"), ("f", "f"), ("old/d", "new/d")]
    assert matched.changed_files == ["b"]
    assert matched.only_first == ["c", "e"]
    assert matched.only_second == ["g"]


@pytest.mark.parametrize(
    ("text", "quantity", "threshold", "limit", "is_count", "method"),
    [
        ("top-class changed on the same image > 2 %", "answer", None, 0.02, False, None),
        ("Top-class changed>2%", "answer", None, 0.02, False, None),
        ("answer changed", "answer", None, 0.0, False, None),
        ("status changed on more than 3 images", "status", None, 3, True, None),
        ("map correlation < 0.8 on > 5 %", "spearman", 0.8, 0.05, False, None),
        ("map correlation below -0.2", "spearman", -0.2, 0.0, False, None),
        ("pearson correlation of gradcam < .8 on > 1 image", "pearson", 0.8, 1, True, "gradcam"),
        ("share inside the mask fell by > 0.1 on > 5 %", "share", 0.1, 0.05, False, None),
        ("share inside mask fell by more than 0.1", "share", 0.1, 0.0, False, None),
        ("images missing > 0 %", "missing", None, 0.0, False, None),
    ],
)
def test_conditions_are_parsed(text, quantity, threshold, limit, is_count, method):
    condition = FailCondition.parse(text)
    facts = condition.quantity, condition.threshold, condition.limit, condition.is_count, condition.method
    assert facts == (quantity, threshold, limit, is_count, method)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("map corelation < 0.8 on > 5 %", "nearest: 'map correlation < 0.8 on > 5 %'"),
        ("top-class changed > 100 %", "can never be exceeded"),
        ("map correlation > 0.8 on > 5 %", "not a condition"),
        ("map correlation < 80", "at most 1"),
        ("", "not a condition"),
    ],
)
def test_other_texts_are_errors(text, expected):
    with pytest.raises(InputError, match=expected):
        FailCondition.parse(text)


def test_the_interval_of_a_share_is_that_of_clopper_and_pearson():
    def upper_tail(share, hits, n):
        return sum(math.comb(n, k) * share**k * (1 - share) ** (n - k) for k in range(hits, n + 1))

    for hits, n in ((0, 7), (1, 20), (3, 9), (12, 12)):
        low, high = compute_exact_interval(hits, n)
        assert low == 0 if hits == 0 else upper_tail(low, hits, n) == pytest.approx(0.025)
        assert high == 1 if hits == n else 1 - upper_tail(high, hits + 1, n) == pytest.approx(0.025)
    assert FailCondition.parse("status changed > 4 %").check(1, 20).holds
    assert not FailCondition.parse("status changed > 5 %").check(1, 20).holds
    assert (
        "1 of 20 images (5.0 %, 95 % interval 0.1 to 24.9 %)"
        in FailCondition.parse("status changed").check(1, 20).description
    )


def test_every_sentence_of_a_diff_is_a_path_of_the_run_that_was_named(folder):
    assert str(Path(folder / "old")) in repr(diff_runs(folder / "old", folder / "same"))
    assert "map correlation" in diff_runs(folder / "old", folder / "same", "map correlation < 0.5")._repr_html_()
