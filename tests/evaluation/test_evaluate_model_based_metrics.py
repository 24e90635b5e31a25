"""Measuring a run with its model: what camscope.metrics says of the same maps, for every image, method and fill."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from typer.testing import CliRunner

from camscope import GradCAM, LayerCAM, load_model
from camscope.cli import app
from camscope.errors import ImageError, InputError, OutputError, PreprocessError
from camscope.explainers.control_methods import compute_center_gaussian
from camscope.explainers.ensemble.augmentation_at_test_time import Augmented
from camscope.images.preprocess import Preprocess
from camscope.loaded_model_metadata_and_weight_digest import attach_loaded_model_metadata, get_loaded_model_metadata
from camscope.metrics import METRICS, PerturbationTest, scoring_scope
from camscope.phantom import CATEGORIES, draw_radiograph
from tests.nets import conv
from tests.untouched import untouched

pa = pytest.importorskip("pyarrow")

from camscope.batch import BatchOptions, BatchRun, run_batch  # noqa: E402 - it needs pyarrow
from camscope.evaluation import GroundTruth, evaluate  # noqa: E402
from camscope.evaluation import evaluate_model_based_metrics as module  # noqa: E402
from camscope.evaluation.evaluate_run import DEFAULT_MODEL_METRICS  # noqa: E402
from camscope.evaluation.method_summaries import summarize_values  # noqa: E402
from camscope.evaluation.restore_inputs_and_explainers_of_run import RunReplay  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::camscope.errors.CamscopeWarning"),
    pytest.mark.usefixtures("one_thread"),
]
FLOORS = {"uniform", "center", "edges", "random"}


class Volume(nn.Module):
    """Two convolutions of as many axes as asked, their mean, a head."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.features, self.head = conv(rank, 1), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(x).flatten(2).mean(2))


@pytest.fixture(scope="module")
def net():
    """The bundled model for images of half its side, which cost a quarter."""
    model = load_model("phantom")
    card = get_loaded_model_metadata(model)
    attach_loaded_model_metadata(model, replace(card, preprocess=replace(card.preprocess, resize=(64, 64))))
    return model


@pytest.fixture(scope="module")
def place(tmp_path_factory, net):
    """Two methods asked two questions of four phantoms, one of them broken, in parts of two."""
    root = tmp_path_factory.mktemp("model")
    for n in range(4):
        Image.fromarray(draw_radiograph(seed=3 + n, finding="nodule").image).save(root / f"{n}.png")
    (root / "1.png").write_bytes(b"no image")
    run_batch(
        [GradCAM(net), LayerCAM(net, layer="layer3")],
        root,
        root / "run",
        ["nodule", "effusion"],
        options=BatchOptions(chunk_size=2),
    )
    return root


def parts(folder):
    return {path.name: path.read_bytes() for path in (folder / "parts").iterdir()}


def by_hand(net, x, heat, question, names, fill, **settings):
    with scoring_scope(net, x[None], question, class_names=CATEGORIES) as scores:
        trial = PerturbationTest(heat[None], scores, fill, **settings)
        return [METRICS[name](trial)[0] for name in names]


def test_every_value_is_that_of_the_metric_by_hand(net, place, tmp_path):
    names, settings = (
        ["deletion", "lerf-morf-gap", "average-drop", "completeness-gap"],
        {"n_steps": 3, "region_size": 16},
    )
    seen = []
    with untouched(net):
        made = evaluate(
            place / "run", tmp_path / "out", metrics=names, model=net, imputations=("mean", "zero"), **settings,
            on_progress=lambda *at: seen.append(at),
        )  # fmt: skip
    rows = made.table().to_pylist()
    assert seen[-1] == (4, 4)
    assert [row["row"] for row in rows] == sorted(row["row"] for row in rows)
    assert {row["imputation"] for row in rows if row["metric"] == "average-drop"} == {None}
    lost = [row for row in rows if row["value"] is None]
    assert {row["row"] for row in lost} == {1}
    assert {row["reason"][:8] for row in lost} == {"no map: "}
    said = {
        tuple(row[key] for key in ("row", "method", "target", "metric", "imputation")): row["value"] for row in rows
    }
    assert len(said) == len(rows) == 3 * 2 * 6 * 7 + len(lost)
    for n, tool, target in ((0, GradCAM(net), "nodule"), (3, LayerCAM(net, layer="layer3"), "effusion")):
        x = tool.prepare_input(place / f"{n}.png").x
        heat = tool.explain(place / f"{n}.png", target).heatmap("input", scale=None)
        for fill in ("mean", "zero"):
            for name, value in zip(
                names, by_hand(net, x, heat, target, names, fill, tie_seeds=[n], **settings), strict=True
            ):
                key = (n, tool.name, target, name, fill if METRICS[name].uses_imputation else None)
                assert said[key] == pytest.approx(value, rel=2e-4, abs=1e-6), key
        center = compute_center_gaussian(x[None].double())[0].numpy()
        (value,) = by_hand(net, x, center, target, ["deletion"], "zero", tie_seeds=[n], **settings)
        assert said[n, "center", target, "deletion", "zero"] == pytest.approx(value, rel=2e-4)
    for row in rows:
        assert row["control"] == (row["method"] in FLOORS)


def test_what_it_costs_is_what_the_page_says(net, place, tmp_path):
    """Of an image and a question: itself, and without all its regions for each fill; of each map and control a curve up and
    down without its ends for each fill, and one more, which the uniform control does not need."""
    passes = []
    counting = net.register_forward_pre_hook(lambda _, inputs: passes.append(len(inputs[0])))
    names = [*DEFAULT_MODEL_METRICS, "sparseness"]
    evaluate(place / "run", tmp_path / "out", metrics=names, model=net, n_steps=3, region_size=16)
    counting.remove()
    cases, maps = 3 * 2, 2 + len(FLOORS)
    assert sum(passes) == cases * (1 + 2 + maps * (2 * (2 * 3 - 2) + 2 * 2 + 1) - 1)
    assert all(
        METRICS[name].input_kind in ("perturbation_test", "perturbation_test_and_maps")
        for name in DEFAULT_MODEL_METRICS
    )


def test_it_goes_on_with_the_same_bytes(net, place, tmp_path):
    settings = {"metrics": ["deletion", "sparseness"], "model": net, "n_steps": 2, "region_size": 32}
    whole = evaluate(place / "run", tmp_path / "out", **settings)

    def killed(done, total):
        if done >= 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        evaluate(place / "run", tmp_path / "again", on_progress=killed, **settings)
    assert len(parts(tmp_path / "again")) == 1
    again = evaluate(place / "run", tmp_path / "again", **settings)
    assert again.table().equals(whole.table())
    assert parts(tmp_path / "again") == parts(tmp_path / "out")
    with pytest.raises(OutputError, match="steps: 2 there, 3 here"):
        evaluate(place / "run", tmp_path / "out", **settings | {"n_steps": 3})
    with pytest.raises(OutputError, match=r"imputations: \['mean', 'blur'\] there, None here"):
        evaluate(place / "run", tmp_path / "out", metrics=["sparseness"])


def test_a_batch_that_is_done_is_kept_whatever_the_parts_of_the_run(net, place, tmp_path):
    run_batch([GradCAM(net), LayerCAM(net, layer="layer3")], place, tmp_path / "run", ["nodule", "effusion"])
    settings = {"metrics": ["deletion", "sparseness"], "model": net, "n_steps": 2, "region_size": 32}
    whole = evaluate(tmp_path / "run", tmp_path / "out", batch_size=1, **settings)
    assert sorted(parts(tmp_path / "out")) == [f"part-{n:08d}.parquet" for n in range(4)]
    assert whole.table()["row"].to_pylist() == sorted(whole.table()["row"].to_pylist())
    at_once = evaluate(tmp_path / "run", tmp_path / "at once", batch_size=16, **settings).table()
    order = [(name, "ascending") for name in ("row", "method", "target", "metric", "imputation")]
    one, other = (table.sort_by(order).drop_columns("value") for table in (at_once, whole.table()))
    assert one.equals(other)

    def killed(done, total):
        assert total == 4
        if done >= 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        evaluate(tmp_path / "run", tmp_path / "again", batch_size=1, on_progress=killed, **settings)
    assert len(parts(tmp_path / "again")) == 2
    seen = []
    evaluate(
        tmp_path / "run", tmp_path / "again", batch_size=1, on_progress=lambda done, _: seen.append(done), **settings
    )
    assert seen == [1, 2, 3, 4]
    assert parts(tmp_path / "again") == parts(tmp_path / "out")


def test_a_part_of_the_run_is_read_once_however_small_the_batches_are(net, place, tmp_path):
    run_batch(GradCAM(net), [str(place / f"{n}.png") for n in (0, 2, 3)], tmp_path / "run", ["nodule"])
    settings = {"metrics": ["deletion", "sparseness"], "model": net, "n_steps": 2, "region_size": 32, "batch_size": 1}
    whole = evaluate(tmp_path / "run", tmp_path / "out", **settings).table()

    def gone(done, total):
        (tmp_path / "run" / "parts" / "part-00000000.parquet").unlink(missing_ok=True)

    assert evaluate(tmp_path / "run", tmp_path / "again", on_progress=gone, **settings).table().equals(whole)


def test_what_an_older_version_began_is_not_gone_on_with(net, place, tmp_path):
    settings = {"metrics": ["deletion", "sparseness"], "model": net, "n_steps": 2, "region_size": 32}
    evaluate(place / "run", tmp_path / "out", **settings)
    file = tmp_path / "out" / "run.json"
    facts = json.loads(file.read_bytes())
    facts["run_config"]["fills"] = facts["run_config"].pop("imputations")
    file.write_text(json.dumps(facts))
    with pytest.raises(OutputError, match=r"another run \(fills: .* there, None here; imputations: None there"):
        evaluate(place / "run", tmp_path / "out", **settings)


def test_where_memory_ends_batches_are_halved(net, place, tmp_path, monkeypatch):
    settings = {"metrics": ["deletion"], "model": net, "n_steps": 2, "region_size": 32}
    whole = evaluate(place / "run", tmp_path / "out", **settings).table()

    def small(model, x, *rest, **settings):
        if len(x) > 1:
            raise torch.OutOfMemoryError("no more")
        return scoring_scope(model, x, *rest, **settings)

    monkeypatch.setattr(module, "scoring_scope", small)
    alone = evaluate(place / "run", tmp_path / "alone", **settings).table()
    order = [(name, "ascending") for name in ("row", "method", "target", "imputation")]
    one, other = whole.sort_by(order), alone.sort_by(order)
    assert one.drop_columns("value").equals(other.drop_columns("value"))
    np.testing.assert_allclose(one["value"].to_numpy(), other["value"].to_numpy(), rtol=1e-4)


def test_another_model_preprocess_or_image_is_refused(net, place, tmp_path):
    other = load_model("phantom")
    with torch.no_grad():
        next(other.parameters())[0] += 1
    digits = BatchRun(place / "run").run_info["run_config"]["model"]["digest"]
    with pytest.raises(InputError, match=rf"a model with digest {digits} .*, but this model has digest [0-9a-f]{{16}}"):
        evaluate(place / "run", tmp_path / "out", model=other)
    with pytest.raises(PreprocessError, match=r"made with preprocess Preprocess.*pass the same"):
        evaluate(place / "run", tmp_path / "out", model=net, preprocess=Preprocess(mean=(0,), std=(1,), channels=1))
    with pytest.raises(InputError, match=r"imputations=\('black',\): expected one or several of mean, blur"):
        evaluate(place / "run", tmp_path / "out", model=net, imputations=("black",))
    with pytest.raises(InputError, match=r"deletion needs the model: .*--model"):
        evaluate(place / "run", tmp_path / "out", metrics=["deletion"])
    with pytest.raises(InputError, match="ssim compares two maps"):
        evaluate(place / "run", tmp_path / "out", metrics=["ssim"], model=net)
    with pytest.raises(InputError, match="explainers and preprocess need the model"):
        evaluate(place / "run", tmp_path / "out", preprocess="imagenet")
    assert not (tmp_path / "out").exists()
    few = {"metrics": ["average-drop"], "model": net}
    for n in range(2):
        Image.fromarray(draw_radiograph(seed=n, finding="nodule").image).save(tmp_path / f"{n}.png")
    run_batch(GradCAM(net), tmp_path, tmp_path / "run", options=BatchOptions(chunk_size=2))
    (tmp_path / "0.png").unlink()
    rows = evaluate(tmp_path / "run", tmp_path / "one", **few).table().to_pylist()
    assert [row["reason"] for row in rows][:1] == [f"{tmp_path / '0.png'}: there is no such file"]
    assert [row["method"] for row in rows if row["row"] == 1] == ["gradcam", "uniform", "center", "edges", "random"]
    Image.fromarray(draw_radiograph(seed=7).image).save(tmp_path / "1.png")
    with pytest.raises(ImageError, match=r"1\.png: it has changed since it was explained"):
        evaluate(tmp_path / "run", tmp_path / "two", **few)
    run_batch(GradCAM(net), tmp_path, tmp_path / "asked", [lambda output: output[:, 0]])
    with pytest.raises(InputError, match="is not a class and cannot be restored"):
        evaluate(tmp_path / "asked", tmp_path / "two", **few)


def test_explainers_are_made_again_from_what_the_run_says(net, place, tmp_path):
    x = GradCAM(net).prepare_input(place / "0.png").x
    tool = LayerCAM(net, layer="layer3")
    names = ["random-logit", "adcc"]
    rows = evaluate(place / "run", tmp_path / "out", metrics=names, model=net).table().to_pylist()
    said = {tuple(row[key] for key in ("row", "method", "target", "metric")): row["value"] for row in rows}
    assert said[0, "layercam", "nodule", "random-logit"] == pytest.approx(
        METRICS["random-logit"](tool, x[None], "nodule"), rel=1e-4
    )
    assert {row["method"] for row in rows if row["metric"] == "random-logit" and row["control"]} == {"center", "edges"}
    heat = tool.explain(place / "0.png", "nodule").heatmap("input", scale=None)
    with scoring_scope(net, x[None], "nodule", class_names=CATEGORIES) as scores:

        def again(images):
            return torch.from_numpy(tool.explain(images[0], "nodule").heatmap("input", scale=None))[None]

        value = METRICS["adcc"](PerturbationTest(heat[None], scores), again)[0]
    assert said[0, "layercam", "nodule", "adcc"] == pytest.approx(value, rel=1e-4)
    assert {row["method"] for row in rows if row["metric"] == "adcc" and row["control"]} == FLOORS


def test_settings_come_back_from_their_words_or_are_asked_for(net, place, tmp_path):
    from camscope import METHODS

    tools = [
        METHODS["layercam"](net, layer="layer3"), METHODS["smoothgrad"](net, n_samples=3, batch_size=2),
        METHODS["occlusion"](net, window=(24, 16), baseline=["zero", "blur"]), METHODS["saliency"](net, channel_reduction="max"),
    ]  # fmt: skip
    run_batch(tools, [str(place / "0.png")], tmp_path / "run")
    again = RunReplay.from_run(BatchRun(tmp_path / "run"), net)
    made = list(again.rebuild_explainers().values())
    assert {one.name: one.parameters for one in made} == {one.name: one.parameters for one in tools}
    wrapped = Augmented(GradCAM(net))
    run_batch(wrapped, [str(place / "0.png")], tmp_path / "wrapped")
    few = {"metrics": ["random-logit"], "model": net}
    with pytest.raises(InputError, match=r"cannot be rebuilt .* pass evaluate\(…, explainers=\[…\]\)"):
        evaluate(tmp_path / "wrapped", tmp_path / "out", **few)
    rows = evaluate(tmp_path / "wrapped", tmp_path / "out", explainers=[wrapped], **few).table().to_pylist()
    assert rows[0]["method"] == wrapped.composed_name
    assert rows[0]["value"] is not None
    with pytest.raises(InputError, match="has another model"):
        evaluate(tmp_path / "run", tmp_path / "new", explainers=[GradCAM(load_model("phantom"))], **few)


@pytest.mark.parametrize("size", [(24,), (16, 12, 20)])
def test_signals_and_volumes_are_measured_as_pictures_are(size, tmp_path):
    torch.manual_seed(0)
    net = Volume(len(size)).eval()
    images = [torch.rand(1, *size) for _ in range(3)]

    class Corner(GroundTruth):
        """The first quarter of each axis."""

        def load_mask(self, row, size):
            made = np.zeros(size, bool)
            made[tuple(slice(0, side // 4) for side in size)] = True
            return made

    run_batch(GradCAM(net, layer="features.0"), images, tmp_path / "run")
    run = BatchRun(tmp_path / "run", images)
    made = evaluate(run, tmp_path / "out", Corner(), model=net, n_steps=3)
    rows = made.table().to_pylist()
    both = {row["metric"] for row in rows if row["method"] == "gradcam"}
    assert both == {one.name for one in METRICS.values() if one.input_kind in ("map", "mask")} | set(
        DEFAULT_MODEL_METRICS
    )
    for row in rows:
        assert row["value"] is not None or row["reason"], row
    said = {(row["row"], row["method"], row["metric"], row["imputation"]): row["value"] for row in rows}
    heat = run.explanation(run.table().to_pylist()[0]).heatmap(scale=None)
    mask = Corner().load_mask(None, size)
    assert said[0, "gradcam", "enrichment", None] == pytest.approx(METRICS["enrichment"](heat, mask))
    assert said[0, "uniform", "pointing-game", None] == pytest.approx(mask.mean())
    names = ["stability", "acquisition-stability"]
    asked = evaluate(run, tmp_path / "asked", metrics=names, model=net).table().to_pylist()
    if len(size) == 1:
        assert all(row["value"] is None and "an input of 1 axis" in row["reason"] for row in asked)
    else:
        assert all(row["value"] is not None or row["reason"] for row in asked)
    (value,) = by_hand(net, images[0], heat, int(run.table()["target"][0].as_py()), ["deletion"], "blur", n_steps=3)
    assert said[0, "gradcam", "deletion", "blur"] == pytest.approx(value, rel=1e-4)
    assert {method for _, method, metric, _ in said if metric in ("enrichment", "insertion")} == FLOORS | {"gradcam"}
    with pytest.raises(ImageError, match=r"Run\(folder, dataset\)"):
        evaluate(tmp_path / "run", tmp_path / "other", model=net)


def test_a_summary_has_a_line_for_each_fill(net, place, tmp_path):
    made = evaluate(place / "run", tmp_path / "out", metrics=["deletion", "average-drop"], model=net, n_steps=2)
    lines = summarize_values(made.table())
    assert list(lines) == ["deletion, mean", "deletion, blur", "average-drop"]
    for line in lines["deletion, blur"]:
        assert (line.metric, line.imputation) == ("deletion", "blur")
    (gradcam,) = (line for line in lines["deletion, blur"] if line.title == "Grad-CAM · layer4")
    wanted = made.table("metric = 'deletion' and imputation = 'blur' and method = 'gradcam'")["value"].to_pylist()
    assert gradcam.estimate.mean == pytest.approx(np.mean([one for one in wanted if one is not None]))
    assert gradcam.difference_to_control is not None


def test_the_command_asks_the_model(net, place, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("camscope.models.load_model", lambda spec, **_: net)
    words = ["evaluate", str(place / "run"), "--model", "phantom", "--steps", "2", "-o", "out"]
    result = CliRunner().invoke(app, [*words, "--imputations", "mean,zero", "--figure", "f.svg"])
    assert result.exit_code == 0, result.output
    for said in (
        "Deletion, mean, lower is better: area",
        "Insertion, zero",
        "Average Drop, lower is better",
        "Edge detector (control)",
    ):
        assert said in result.stdout
    assert "necessity" not in result.stdout
    assert b"Deletion, mean" in (tmp_path / "f.svg").read_bytes() or (tmp_path / "f.svg").stat().st_size
    assert json.loads((tmp_path / "out" / "run.json").read_bytes())["run_config"]["imputations"] == ["mean", "zero"]
    without = CliRunner().invoke(app, ["evaluate", str(place / "run"), "--metrics", "deletion", "-o", "new"])
    assert without.exit_code == 2
    assert "--model" in without.stderr
    assert not (tmp_path / "new").exists()
