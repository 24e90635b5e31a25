"""Methods compared over many images: numbers by hand, what is said of them, the figure, and the commands that make the maps."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from camscope import GradCAM, HiResCAM, LayerCAM, Saliency, load_model, registry
from camscope.cli import app, commands_and_error_reports, load_model_and_methods
from camscope.cli import evaluate_maps as cli_lines
from camscope.errors import InputError, OutputError, RunError
from camscope.phantom import draw_radiograph

pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
pytest.importorskip("matplotlib")
stats = pytest.importorskip("scipy.stats")

from camscope.batch import BatchRun, build_manifest, run_batch  # noqa: E402 - it needs pyarrow
from camscope.evaluation import EvaluationResult, compare_methods, generate_maps  # noqa: E402
from camscope.evaluation import map_agreement as agreements  # noqa: E402
from camscope.evaluation.comparison_result import ComparisonResult  # noqa: E402
from camscope.evaluation.comparison_statements import iter_statements, join_names  # noqa: E402
from camscope.evaluation.map_agreement import MapAgreement, summarize_agreement  # noqa: E402
from camscope.evaluation.map_generation import load_and_check_ground_truth, sample_manifest  # noqa: E402
from camscope.evaluation.method_summaries import MethodSummary, summarize_values  # noqa: E402
from camscope.geometry import Placement  # noqa: E402
from camscope.metrics import METRICS, Estimate  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::camscope.errors.CamscopeWarning")
COUNT, BROKEN = 8, 5
METHODS = (GradCAM, HiResCAM, LayerCAM, Saliency)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Eight phantoms of two sizes, one of them broken, with masks; two of a patient."""
    root = tmp_path_factory.mktemp("compare")
    rows = {"path": [], "target": [], "patient": [], "mask": []}
    (root / "masks").mkdir()
    (root / "images").mkdir()
    for n in range(COUNT):
        scan = draw_radiograph(seed=n, finding="nodule")
        image, mask = Image.fromarray(scan.image), Image.fromarray((scan.mask * 255).astype(np.uint8))
        if n % 2:
            image, mask = (one.resize((160, 192), Image.Resampling.NEAREST) for one in (image, mask))
        name = f"{n:02d}.png"
        image.save(root / "images" / name)
        mask.save(root / "masks" / name)
        for key, value in zip(rows, [f"images/{name}", "nodule", n // 2, f"masks/{name}"], strict=True):
            rows[key].append(value)
    (root / "images" / f"{BROKEN:02d}.png").write_bytes(b"no image")
    parquet.write_table(pa.table(rows), root / "list.parquet")
    return root


@pytest.fixture(scope="module")
def found(place):
    model = load_model("phantom")
    outcome = generate_maps(
        [kind(model) for kind in METHODS], place / "list.parquet", place / "out" / "run", masks="mask"
    )
    assert (outcome.n_processed, outcome.n_failures) == (COUNT, 1)
    return compare_methods(place / "out" / "run", place / "out", "mask")


def by_hand(place, metric, method):
    """[row]: the value of a map, from the run's own explanations."""
    run, values = BatchRun(place / "out" / "run"), {}
    for row in run.table().to_pylist():
        if row["attribution"] is not None and row["method"] == method:
            one = run.explanation(row)
            mask = np.asarray(Image.open(place / "masks" / Path(row["path"]).name)) > 0
            values[row["row"]] = METRICS[metric](one.heatmap(scale=None), mask)
    return np.array([values[n] for n in sorted(values)])


# --- numbers


def test_the_table_is_means_and_paired_differences_by_hand(place, found):
    rows = {(row["metric"], row["name"]): row for row in found.to_records()}
    values = {kind.name: by_hand(place, "enrichment", kind.name) for kind in METHODS}
    best = max(values, key=lambda name: values[name].mean())
    metrics = sum(METRICS[one].higher_is_better is not None for one in found.summaries)
    pairs = metrics * 3  # of three methods, for gradcam and hirescam have the same maps
    for name, own in values.items():
        row = rows["enrichment", registry.METHODS.replace_names_by_titles(name)]
        assert row["mean"] == pytest.approx(own.mean(), rel=1e-5)
        assert (row["n_values"], row["n_undefined"], row["is_control"]) == (COUNT - 1, 1, False)
        assert row["seconds_per_image"] > 0
        if name == best or {name, best} == {"gradcam", "hirescam"}:
            assert row["difference_to_best"] is None
        else:
            gap, known = own - values[best], stats.ttest_rel(own, values[best])
            assert row["difference_to_best"] == pytest.approx(gap.mean(), rel=1e-4, abs=1e-6)
            assert row["difference_to_best_p_value"] == pytest.approx(
                min(1, pairs * max(known.pvalue, 2**-6)), rel=1e-2
            )
            assert np.isnan(
                row["difference_to_best_low"]
            )  # seven images cannot be as certain as so many comparisons ask
    assert rows["enrichment", "uniform"]["mean"] == 1
    assert rows["enrichment", "uniform"]["seconds_per_image"] is None
    assert [metric for metric, _ in pairwise(dict.fromkeys(row["metric"] for row in found.to_records()))][:2] == [
        "enrichment",
        "pointing-game",
    ]


def test_agreement_is_spearmans_correlation_on_the_finer_grid(found):
    run = found.run
    maps = {
        (row["row"], row["method"]): run.explanation(row).heatmap("grid")
        for row in run.table().to_pylist()
        if row["attribution"] is not None
    }
    pair = found.method_names.index("LayerCAM"), found.method_names.index("Saliency")
    each = []
    for n in range(COUNT):
        if n == BROKEN:
            continue
        coarse, fine = maps[n, "layercam"], maps[n, "saliency"]
        assert coarse.shape < fine.shape
        placed = Placement.identity(fine.shape).project(coarse.astype(np.float64))[0]
        one, other = (np.rint(255 * shown).ravel() for shown in (placed, fine.astype(np.float64)))
        each.append(stats.spearmanr(one, other).statistic)
    assert found.compute_correlation_matrix()[pair] == pytest.approx(np.mean(each), abs=1e-9)
    np.testing.assert_array_equal(found.compute_correlation_matrix(), found.compute_correlation_matrix().T)
    one = found.agreement.get_correlation(*(found.agreement.keys[n] for n in reversed(pair)))
    assert one.low < one.mean < one.high
    assert one.n_values == COUNT - 1


def test_maps_that_are_one_throughout_are_said_to_be(found):
    names = [[found.names[key, False] for key in group] for group in found.agreement.equivalent_groups]
    assert names == [["Grad-CAM", "HiResCAM"]]
    assert found.compute_correlation_matrix()[0, 1] > 0.999
    assert found.statements[0] == "Grad-CAM and HiResCAM: the same maps here, as they are displayed"


def test_one_image_of_difference_parts_two_methods():
    a, b = ("a", "l", "0"), ("b", "l", "0")

    def pairs(same):
        rows = [
            dict(zip((*agreements.METHOD_KEY_COLUMNS, *agreements.OTHER_METHOD_KEY_COLUMNS), (*a, *b), strict=True))
            | {"row": n, "id": str(n), "target": "0", "spearman": 0.5, "reason": None, "same": each}
            for n, each in enumerate(same)
        ]
        return pa.Table.from_pylist(rows)

    assert summarize_agreement(pairs([True, None, True]), [a, b]).equivalent_groups == [[a, b]]
    assert summarize_agreement(pairs([True, False, True]), [a, b]).equivalent_groups == []
    assert summarize_agreement(pairs([None, None]), [a, b]).equivalent_groups == []
    assert summarize_agreement(pairs([True]), [a, b], {0: "x"}).get_correlation(b, a).mean == 0.5


@pytest.mark.slow
def test_layers_and_settings_are_named_where_they_tell_methods_apart(place, tmp_path):
    model = load_model("phantom")
    tools = [GradCAM(model, "layer4"), GradCAM(model, "layer3"), LayerCAM(model, "layer4")]
    run_batch(tools, place / "images" / "00.png", tmp_path / "run")
    made = compare_methods(tmp_path / "run", tmp_path / "out")
    assert made.method_names == ["Grad-CAM · layer4", "Grad-CAM · layer3", "LayerCAM"]
    assert made.title == "phantom · 1 image"
    assert list(made.summaries) == ["sparseness", "effective-area"]
    assert made.summaries["sparseness"][0].estimate.n_values == 1
    # 2^(1 - n) times three pairs in each of two metrics has to be below 0.05
    assert made.statements == (
        "1 image cannot tell 3 methods apart in 2 metrics, whatever they show: at least 8 are needed",
    )
    make_it_legible(made)


# --- sentences


def line(method, mean, p=None, over=None, metric="enrichment", groups=30, control=False):
    gap = None if p is None else Estimate(-1.0, -2.0, -0.5, groups, groups, 0, p)
    pairs = 3
    beats = None if over is None else Estimate(over[0], 0.0, 1.0, groups, groups, 0, over[1])
    return MethodSummary(
        metric, method, None, control, Estimate(mean, mean, mean, groups, groups), beats, gap, n_comparisons=pairs
    )


def said(lines):
    every = [one for own in lines.values() for one in own]
    names = {((one.method, one.layer, one.parameters), one.is_control): one.method for one in every}
    return list(iter_statements(lines, MapAgreement([], {}, []), names))


def test_it_says_who_is_first_who_cannot_be_told_from_it_and_who_beats_no_control():
    good, none = (0.5, 0.01), (0.1, 0.4)
    center = line("center", 1.0, control=True)
    assert said({"m": [line("a", 3, over=good), line("b", 2, 0.2, good), line("c", 1, 0.01, none), center]}) == [
        "m: a is first; no significant difference from b",
        "only a and b are better than the control Center Gaussian in m",
    ]
    assert said({"m": [line("a", 3, over=none), line("b", 2, 0.2, none), center]}) == [
        "no method differs significantly from the first in m",
        "no method is better than the control Center Gaussian in m",
    ]
    assert said({"m": [line("a", 3, over=good), line("b", 2, 0.01, good), center]}) == [
        "m: a is first, and better than the other",
    ]
    few = said({"m": [line("a", 3), line("b", 2, 0.2, groups=3), line("c", 2, 0.2, groups=3)]})
    assert len(few) == 1
    assert few == ["3 images cannot tell 3 methods apart in 1 metric, whatever they show: at least 7 are needed"]
    for name in ("sparseness", "stability", "max-sensitivity"):  # in which a map wins that does not look
        assert said({name: [line("a", 3, over=none, metric=name), center]}) == []
    assert join_names(list("abcdefgh")) == "a, b, c, d, e, f and 2 more"
    assert join_names(["a"]) == "a"


def values_of(**metrics):
    """A table as `evaluate` has it; methods whose names are in capitals are controls."""
    rows = [
        {"row": n, "method": name.lower(), "layer": None, "parameters_digest": None, "target": "0", "control": name.isupper(),
         "metric": metric.replace("_", "-"), "value": float(value)}
        for metric, own in metrics.items() for name, some in own.items() for n, value in enumerate(some)
    ]  # fmt: skip
    return pa.Table.from_pylist(rows)


def test_differences_are_corrected_for_all_pairs_and_all_metrics():
    random = np.random.default_rng(0)
    images = random.normal(size=20)
    own = {
        name: 2 + images + gain + 0.5 * random.normal(size=20) for name, gain in zip("abc", (0.6, 0.1, 0), strict=True)
    }
    own["CENTRE"] = 2 + images
    one = {line.method: line for line in summarize_values(values_of(enrichment=own))["enrichment"]}
    two = summarize_values(values_of(enrichment=own, peak_distance={name: -some for name, some in own.items()}))
    for lines, metrics in ((one, 1), ({line.method: line for line in two["enrichment"]}, 2)):
        for name in "bc":
            gap, known = lines[name].difference_to_best, stats.ttest_rel(own[name], own["a"])
            assert gap.p_value == pytest.approx(min(1, 3 * metrics * known.pvalue))  # a and b, a and c, b and c
            assert gap.low == pytest.approx(known.confidence_interval(1 - 0.05 / (3 * metrics)).low)
        gap, known = lines["b"].difference_to_control, stats.ttest_rel(own["b"], own["CENTRE"])
        assert gap.p_value == pytest.approx(min(1, 3 * metrics * known.pvalue))  # a, b and c
        assert (gap.p_value < 0.05) == (gap.low > 0 or gap.high < 0)
    assert one["a"].n_comparisons == 3
    assert two["peak-distance"][0].n_comparisons == 6
    assert list(summarize_values(values_of(enrichment=own, peak_distance=own), metrics=["enrichment"])) == [
        "enrichment"
    ]


@pytest.mark.slow
def test_methods_that_are_alike_are_seldom_told_from_the_first():
    random, wrong = np.random.default_rng(5), 0
    for _ in range(40):
        metrics = {}
        for name in ("enrichment", "pointing_game", "average_precision", "sparseness"):
            images = random.normal(size=20)
            metrics[name] = {f"m{k}": 2 + images + random.normal(size=20) for k in range(5)}
        found = summarize_values(values_of(**metrics), n_resamples=20)
        wrong += any(line.is_worse_than_best for own in found.values() for line in own)
    assert wrong <= 5  # one in twenty; uncorrected for pairs and metrics it is one in three


def test_methods_with_the_same_maps_are_one_and_never_told_apart():
    a = 1 + np.random.default_rng(0).random(20)
    table = values_of(enrichment={"a": a, "b": a - 1e-3, "c": a - 0.5})
    told = {line.method: line for line in summarize_values(table)["enrichment"]}
    assert told["b"].is_worse_than_best
    alike = [[("a", None, None), ("b", None, None)]]
    told = {line.method: line for line in summarize_values(table, equivalent_groups=alike)["enrichment"]}
    assert told["b"].difference_to_best is None
    assert told["c"].is_worse_than_best
    assert told["c"].n_comparisons == 1
    rounding = {
        line.method: line for line in summarize_values(values_of(enrichment={"a": a, "b": a - 1e-12}))["enrichment"]
    }
    assert (rounding["b"].difference_to_best.mean, rounding["b"].is_worse_than_best) == (0.0, False)


def test_a_group_with_most_of_the_images_is_the_reason_for_no_interval():
    random = np.random.default_rng(0)
    a = random.random(60)
    table = values_of(enrichment={"a": a, "b": a - 1 + 0.1 * random.random(60), "CENTRE": a - 2})
    for share, words in ((54, "one group has 90 % of the images"), (4, "")):
        column = pa.array([0 if row < share else row for row in table["row"].to_pylist()])
        lines = summarize_values(table.append_column("patient", column), "patient")
        names = {(line.key, line.is_control): line.method for line in lines["enrichment"]}
        said = list(iter_statements(lines, MapAgreement([], {}, []), names))
        assert any(words and words in one for one in said) is bool(words)
        assert any(" is first" in one for one in said) is not bool(words)
        printed = cli_lines.explain_missing_interval(lines["enrichment"])
        assert ["no interval" in one and words in one for one in printed] == [True] * bool(words)
    known = {line.method: line for line in lines["enrichment"]}
    assert known["b"].is_worse_than_best


def test_a_share_of_few_images_is_printed_without_an_interval_and_of_many_with_one_that_has_a_width():
    few, many = (
        summarize_values(values_of(pointing_game={"a": [1.0] * n}))["pointing-game"][0].estimate for n in (3, 20)
    )
    assert str(few) == "1.000"
    assert str(many) == f"1.000 [{0.025 ** (1 / 20):.3f}, 1.000]"
    score = summarize_values(values_of(deletion={"a": np.arange(20.0)}))["deletion"][
        0
    ].estimate  # of a score, not a probability
    assert score.low < 9.5 < score.high


def test_an_image_that_failed_is_an_undefined_row_of_its_methods_layer(found):
    for own in found.summaries.values():
        assert not [one for one in own if one.estimate is None]
        assert {one.estimate.n_undefined for one in own if not one.is_control} == {1}


# --- the figure


def make_it_legible(made):
    """Every letter lies inside the figure, and no two names of an axis lie on one another."""
    figure = made.figure()
    figure.draw_without_rendering()
    whole, texts = figure.bbox, []
    for axes in figure.axes:
        texts += [axes.title, axes._left_title]
        if not axes.axison:
            continue
        labels = [one for one in axes.get_yticklabels() if one.get_text() and one.get_visible()]
        boxes = sorted((one.get_window_extent() for one in labels), key=lambda box: box.y0)
        assert all(below.y1 <= above.y0 + 1 for below, above in pairwise(boxes))
        low, high = sorted(axes.get_xlim())
        ticks = [one for one in axes.get_xticklabels() if low <= one.get_position()[0] <= high]
        texts += [*labels, *axes.texts, *ticks]
    for one in texts:
        box = one.get_window_extent()
        if one.get_text() and one.get_visible():
            inside = box.x0 >= -1 and box.y0 >= -1 and box.x1 <= whole.x1 + 1 and box.y1 <= whole.y1 + 1
            assert inside, one.get_text()
    return {one.get_text() for one in texts}


@pytest.mark.parametrize(
    ("suffix", "head"),
    [
        pytest.param(".png", b"\x89PNG", marks=pytest.mark.thorough),  # tests/cli/test_json_output.py saves one
        pytest.param(".pdf", b"%PDF", marks=pytest.mark.thorough),  # the code of docs/how-to/evaluate.md saves one
        pytest.param(".svg", b"<?xml", marks=pytest.mark.thorough),  # audits have their charts so
    ],
)
def test_the_figure_is_saved_as_its_suffix_says(found, tmp_path, suffix, head):
    assert found.save(tmp_path / f"f{suffix}").read_bytes().startswith(head)


@pytest.mark.slow
def test_the_figure_names_all_and_cuts_nothing(found, tmp_path):
    words = make_it_legible(found)
    assert {
        "Grad-CAM",
        "LayerCAM",
        "Saliency",
        "Center Gaussian",
        "Enrichment",
        "higher is better →",
        "nodule",
    } <= words
    with pytest.raises(OutputError, match=r"cannot write .gif"):
        found.save(tmp_path / "f.gif")
    shown = found._repr_html_()
    assert "data:image/" in shown
    assert "the same maps here" in shown


@pytest.mark.slow
def test_no_text_of_the_figure_is_read_as_a_formula(found):
    matplotlib = pytest.importorskip("matplotlib")
    text = pytest.importorskip("matplotlib.text").Text
    with matplotlib.rc_context({"text.usetex": True}):  # as somebody may have set it
        figure = found.figure()
    texts = [one for one in figure.findobj(text) if one.get_text()]
    assert len(texts) > 10
    assert not any(one.get_parse_math() or one.get_usetex() for one in texts)


@pytest.fixture
def undrawn(monkeypatch):
    """The names of the figures that would have been drawn: test_the_figure_is_saved_as_its_suffix_says draws one."""
    names = []
    monkeypatch.setattr(ComparisonResult, "save", lambda self, path, **options: names.append(Path(path).name))
    return names


# --- images first


def test_images_are_drawn_by_seed_and_keep_their_numbers(place):
    manifest = build_manifest(place / "list.parquet")
    rows = [sample_manifest(manifest, 3, seed).table["row"].to_pylist() for seed in (0, 0, 1, 2)]
    assert rows[0] == rows[1] == sorted(rows[0])
    assert len({tuple(own) for own in rows}) > 1
    assert sample_manifest(manifest, 99) is sample_manifest(manifest, None) is manifest
    with pytest.raises(InputError, match="images=0"):
        sample_manifest(manifest, 0)


def test_evidence_of_nothing_is_told_before_any_map_is_made(place, tmp_path):
    model, source = load_model("phantom"), place / "list.parquet"
    (tmp_path / "other").mkdir()
    Image.new("L", (8, 8), 255).save(tmp_path / "other" / "cat.png")
    with pytest.raises(InputError, match=r"no image has ground truth: no mask has the name of the image \(8 x\)"):
        generate_maps(GradCAM(model), source, tmp_path / "run", masks=tmp_path / "other")
    Image.new("L", (8, 8), 255).save(tmp_path / "other" / "00.png")
    with pytest.raises(InputError, match="expected the same size"):
        generate_maps(GradCAM(model), source, tmp_path / "run", masks=tmp_path / "other")
    assert not (tmp_path / "run").exists()
    load_and_check_ground_truth("mask", build_manifest(source))
    (tmp_path / "bad.png").write_bytes(b"no image")
    with pytest.raises(RunError, match=r"no image has a map: .*not an image"):
        generate_maps(GradCAM(model), tmp_path / "bad.png", tmp_path / "run")


# --- commands


def run(*words, code=0):
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    return result


def error(result):
    (found,) = [text for text in result.stderr.splitlines() if text.startswith("error: ")]
    return found


@pytest.mark.slow
def test_compare_of_a_manifest_prints_what_python_has_and_goes_on(place, found, tmp_path, monkeypatch, undrawn):
    monkeypatch.chdir(tmp_path)
    words = "compare", place / "list.parquet", "--methods", "gradcam,hirescam,layercam,saliency", "--masks", "mask"
    first = run(*words, "-o", "out", code=1)  # one image is broken
    assert "1 image without a map: this is not an image" in first.stderr
    said = [text[8:] for text in first.stdout.splitlines() if text.startswith("result")]
    assert said == list(found.statements)
    assert "difference to first" in first.stdout
    assert "difference to best control" in first.stdout
    best = found.summaries["enrichment"][0]
    assert any(str(best.estimate) in text and "first" in text for text in first.stdout.splitlines())
    parts = {path: path.stat().st_mtime_ns for path in Path("out").rglob("part-*")}
    assert len(parts) == 3
    run(*words, "-o", "out", code=1)
    assert {path: path.stat().st_mtime_ns for path in Path("out").rglob("part-*")} == parts
    assert "holds another run" in error(run(*words, "-o", "out", "--images", "4", code=1))
    few = run(*words, "-o", "few", "--images", "4", "--seed", "1", "--group", "patient", "--metrics", "deletion,enrichment",
              "--figure", "f.svg", code=1)  # fmt: skip
    assert "Deletion, blur, lower is better" in few.stdout
    assert "4 images" in few.stdout
    assert undrawn == ["figure.png", "figure.png", "f.svg"]
    of_run = run("compare", "out/run", "-o", "again", "--masks", "mask")
    assert [text[8:] for text in of_run.stdout.splitlines() if text.startswith("result")] == said


@pytest.mark.slow
def test_measure_of_images_makes_the_maps_first(place, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("00.png", "02.png"):
        Path("some").mkdir(exist_ok=True)
        Path("some", name).write_bytes((place / "images" / name).read_bytes())
    words = (
        "evaluate",
        "some",
        "--masks",
        place / "masks",
        "--methods",
        "gradcam,layercam",
        "--target",
        "nodule",
        "-o",
        "out",
    )
    result = run(*words)
    assert "LayerCAM" in result.stdout
    values = EvaluationResult("out").table("metric = 'enrichment' and method = 'gradcam'")["value"].to_pylist()
    every = by_hand_of(place, BatchRun("out/run"))
    np.testing.assert_allclose(values, every, rtol=1e-6)
    parts = {path: path.stat().st_mtime_ns for path in Path("out").rglob("part-*")}
    run(*words)
    assert {path: path.stat().st_mtime_ns for path in Path("out").rglob("part-*")} == parts
    run("evaluate", "out/run", "--masks", place / "masks", "-o", "of-run")
    assert EvaluationResult("of-run").table().num_rows == EvaluationResult("out").table().num_rows


def by_hand_of(place, made):
    rows = [row for row in made.table().to_pylist() if row["method"] == "gradcam"]
    masks = [np.asarray(Image.open(place / "masks" / Path(row["path"]).name)) > 0 for row in rows]
    return [
        METRICS["enrichment"](made.explanation(row).heatmap(scale=None), mask)
        for row, mask in zip(rows, masks, strict=True)
    ]


@pytest.mark.parametrize(
    ("words", "code", "saying"),
    [
        (["compare", "empty"], 2, "empty: there is no image"),
        (["evaluate", "empty"], 2, "empty: there is no image"),
        (["compare", "{images}", "--metrics", "hit"], 2, "no metric 'hit'; nearest names"),
        (["evaluate", "{images}", "--metrics", "hit"], 2, "no metric 'hit'; nearest names"),
        (["compare", "{images}", "--metrics", "enrichment"], 2, "needs ground truth"),
        (["compare", "{images}", "--metrics", "spearman"], 2, "compares two maps"),
        (["compare", "{images}", "--masks", "nowhere"], 2, "nowhere is not a COCO file"),
        (["compare", "{images}", "--group", "ward"], 2, "no column 'ward'"),
        (["compare", "{images}", "--methods", "gradcma"], 2, "nearest names"),
        (["compare", "{images}", "--columns", "2"], 2, "'--columns': this option applies only to one image"),
        (
            ["compare", "{images}", "-o", "f.png"],
            2,
            "for many images --output must be a folder; name a file with --figure",
        ),
        (["compare", "{images}", "--figure", "f.gif"], 2, "expected a file ending in .png"),
        (["compare", "{images}/00.png", "--masks", "{masks}"], 2, "applies only to many images"),
        (
            ["compare", "{out}/run", "--methods", "gradcam"],
            2,
            "is a run with computed maps; to explain images, name them",
        ),
        (
            ["evaluate", "{out}/run", "--methods", "gradcam"],
            2,
            "is a run with computed maps; to explain images, name them",
        ),
        (
            ["evaluate", "{out}/run", "--target", "nodule"],
            2,
            "is a run with computed maps; to explain images, name them",
        ),
        (
            ["evaluate", "{out}/run", "--root", "{images}"],
            2,
            "is a run, which has the paths of its images; leave --root out",
        ),
        (["evaluate", "{out}/run", "--figure", "f.gif"], 2, "expected a file ending in .png"),
        (["evaluate", "{out}/run", "--group", "ward"], 2, "no column 'ward'; choose from row, id, method"),
        (["benchmark", "phantom", "--figure", "f.gif"], 2, "expected a file ending in .png"),
        (["evaluate", "nowhere"], 2, "nowhere is not the folder of a run, since it holds no run.json; expected"),
        (["evaluate", "{here}"], 2, "is a file, but not an image; expected the folder of a run, an image"),
        (["show", "{here}"], 2, "is a file; expected the folder of a run"),
        (["compare", "nowhere.csv"], 2, "there is no such manifest"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_use_is_one_line_before_the_model_is_loaded(place, found, tmp_path, monkeypatch, words, code, saying):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(load_model_and_methods, "load_model_on_device", lambda *_: pytest.fail("the model is loaded"))
    Path("empty").mkdir()
    named = [
        word.format(images=place / "images", masks=place / "masks", out=place / "out", here=__file__) for word in words
    ]
    assert saying in error(run(*named, code=code))
    assert [path.name for path in Path().iterdir()] == ["empty"]


@pytest.mark.slow
def test_an_interrupted_comparison_keeps_what_is_there_and_says_how_to_go_on(place, tmp_path, monkeypatch, undrawn):
    monkeypatch.chdir(tmp_path)
    words = "compare", place / "images" / "0[0-3].png", "--methods", "gradcam,layercam", "-o", "out"
    pairs, seen = agreements.iter_pair_agreements, []

    def interrupted(*args):
        seen.append(args)
        if len(seen) > 1:
            raise KeyboardInterrupt
        return pairs(*args)

    monkeypatch.setattr(agreements, "iter_pair_agreements", interrupted)
    told = error(run(*words, code=commands_and_error_reports.EXIT_INTERRUPTED))
    assert told == "error: interrupted; finished work is in out: run the same command again to resume"
    parts = {path: path.stat().st_mtime_ns for path in Path("out").rglob("part-*")}
    assert len(parts) == 2  # the maps, and the metrics
    monkeypatch.setattr(agreements, "iter_pair_agreements", pairs)
    run(*words)
    now = {path: path.stat().st_mtime_ns for path in Path("out").rglob("part-*")}
    assert len(now) == 3
    assert {path: now[path] for path in parts} == parts


@pytest.mark.slow
def test_all_methods_are_those_that_have_an_answer(place, tmp_path, monkeypatch, undrawn):
    from camscope.explainers import METHODS as EVERY

    monkeypatch.chdir(tmp_path)
    names = ("gradcam", "rollout", "layercam")
    monkeypatch.setattr(load_model_and_methods, "parse_methods", lambda words: {name: EVERY[name] for name in names})
    result = run("compare", place / "images" / "0[0-1].png", "--methods", "all", "-o", "out")
    assert "LayerCAM" in result.stdout
    assert "rollout" not in result.stdout


def test_the_summary_of_a_method_without_any_map_stays():
    table = pa.Table.from_pylist([
        {"row": 0, "method": "a", "layer": None, "parameters_digest": None, "target": "0", "control": False,
         "metric": "sparseness", "value": None},
    ])  # fmt: skip
    (lines,) = summarize_values(table).values()
    assert [one.title for one in lines] == ["a"]
