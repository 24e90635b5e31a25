"""`--json`: every command prints one object with documented fields, and errors are objects too."""

import dataclasses
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import typer
from PIL import Image
from typer.testing import CliRunner

from camscope import GradCAM, LayerCAM, load_model, run_batch
from camscope.cli import app, commands_and_error_reports, demo, json_output
from camscope.cli.json_output import RESULT_FIELDS, describe_json_output
from camscope.errors import CamscopeError, Remedy
from camscope.json_values import to_json_value
from camscope.phantom import draw_radiograph

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """A folder with images, masks, a run, and what the commands write one after the other."""
    folder = tmp_path_factory.mktemp("json")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name in ("images", "masks"):
            Path(name).mkdir()
        lines = ["path,mask,target"]
        for n in range(8):
            scan = draw_radiograph(n, 1 + n % 3)
            Image.fromarray(scan.image).save(f"images/{n}.png")
            Image.fromarray(scan.mask).save(f"masks/{n}.png")
            lines.append(f"images/{n}.png,masks/{n}.png,{scan.name}")
        Path("list.csv").write_text("\n".join(lines))
        Path("bad").mkdir()
        Path("bad/broken.png").write_bytes(b"no image")
        Image.fromarray(draw_radiograph(3, "effusion").image).save("bad/good.png")
        yield folder


def ask(*words, code=0):
    """The object that a command prints. Nothing else is on stdout."""
    result = CliRunner().invoke(app, [*map(str, words), "--json"])
    assert result.exit_code == code, (result.output, result.exception)
    return json.loads(result.stdout, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def leaves(value, path=""):
    """The paths of all values. Of an empty list or object, the path with its brackets or its star, and None."""
    if isinstance(value, dict):
        if not value:
            yield f"{path}.*", None
        for key, item in value.items():
            yield from leaves(item, f"{path}.{key}" if path else key)
    elif isinstance(value, list):
        if not value:
            yield f"{path}[]", None
        for item in value:
            yield from leaves(item, f"{path}[]")
    else:
        yield path, value


def matches(path, documented):
    pattern = re.escape(documented).replace(r"\.\*", r"\.[^\[\]]+?")
    return re.fullmatch(pattern, path) is not None


def assert_documented(*results):
    """Every printed field is documented, and every documented field is printed, if what it belongs to is not empty."""
    schemas = {result["schema"] for result in results}
    assert len(schemas) == 1
    (command,) = [match[1] for match in [re.fullmatch(r"camscope/([a-z-]+)/\d+", schemas.pop())]]
    fields = {**RESULT_FIELDS[command], "schema": ""}
    printed = {path for result in results for path, value in leaves(result) if value is not None}
    empty = {path for result in results for path, value in leaves(result) if value is None}
    for path in printed:
        assert any(matches(path, field) for field in fields), f"{path} is not documented"
    for path in empty:
        parts = [field for field in fields if matches(path, field) or is_part(field, path)]
        assert parts, f"{path} is not documented"
    for field in fields:
        is_printed = any(matches(path, field) for path in [*printed, *empty])
        assert is_printed or any(is_part(field, path) for path in empty), f"{field} is never printed"


def is_part(field, path):
    """Whether a documented field lies inside a value, which is empty, at this path."""
    return any(
        matches(path, field[:end]) or matches(path, f"{field[:end]}[]")
        for end in range(len(field) + 1)
        if field[end : end + 1] in ("", ".", "[")
    )


@pytest.mark.slow
def test_explain(here):
    plain = ask("explain", "images/0.png", "-o", "explained", "--format", "png,json")
    partly = ask("explain", "bad", "--expected", "nodule", "-o", "partly", code=1)
    assert_documented(plain, partly)
    (image,) = plain["images"]
    explanation = GradCAM(load_model("phantom")).explain("images/0.png")
    assert image["explanations"][0]["score"] == pytest.approx(explanation.score, rel=1e-5)
    assert image["top_classes"][0]["label"] == explanation.label
    assert all(Path(file).is_file() for file in image["files"])
    assert [failure["image"] for failure in partly["failures"]] == ["bad/broken.png"]
    assert "images[].expected" not in str(plain)


@pytest.mark.slow
def test_explain_expected_compares_the_predicted_with_the_expected_class(here):
    result = ask("explain", "images/0.png", "--expected", "effusion", "-o", "expected", "--layers", "layer4")
    (image,) = result["images"]
    expected, (difference,) = image["expected"], image["expected"]["differences"]
    cam = GradCAM(load_model("phantom"), "layer4")
    first, second = cam.explain_classes("images/0.png", [None, "effusion"])
    subtracted = first.attribution - second.attribution
    assert (expected["predicted_label"], expected["label"], expected["is_predicted"]) == ("nodule", "effusion", False)
    np.testing.assert_allclose(difference["value_range"], [subtracted.min(), subtracted.max()], rtol=1e-5)
    assert [each["layer"] for each in image["explanations"]] == ["layer4", "layer4"]
    assert result["versions"]["torch"] == torch.__version__
    suffixes = sorted(Path(file).suffix for file in image["files"])
    assert suffixes == [".json", ".json", ".png"]
    figure = next(Path(file) for file in image["files"] if file.endswith(".png"))
    with Image.open(figure) as drawn:
        assert drawn.width > 3.5 * drawn.height  # the image, two maps and the difference, side by side
    same = ask("explain", "images/0.png", "--expected", "nodule", "-o", "same.png")["images"][0]
    assert same["expected"]["is_predicted"]
    assert same["expected"]["differences"][0]["value_range"] == [0, 0]
    assert any("predicts the expected class" in note for note in same["notes"])


def test_the_difference_has_the_scale_of_both_maps(here, monkeypatch):
    from camscope.explanation import Explanation

    scales, overlay = [], Explanation.overlay
    monkeypatch.setattr(Explanation, "overlay", lambda self, **o: scales.append(o["scale"]) or overlay(self, **o))
    ask("explain", "images/0.png", "--expected", "effusion", "--methods", "saliency", "-o", "one-scale.png")
    first, second, difference = scales
    assert first == second == (0.0, difference[1])
    assert difference[0] == -difference[1]


@pytest.mark.parametrize("other", [["--target", "nodule"], ["--targets", "0,1"]])
def test_expected_stands_for_the_classes(here, other):
    error = ask("explain", "images/0.png", "--expected", "effusion", *other, code=2)["error"]
    assert "omit --target and --targets" in error["message"]
    assert error["kind"] == "UsageError"


def test_an_expected_class_that_is_unknown_is_an_error(here):
    error = ask("explain", "images/0.png", "--expected", "pneumonia", code=2)["error"]
    assert error["kind"] == "TargetError"


def test_maps_of_different_layers_have_no_difference():
    from dataclasses import replace

    from camscope.cli.explanation_writer import build_class_differences

    one = GradCAM(load_model("phantom"), "layer4").explain(np.zeros((64, 64, 3), np.uint8), 1)
    with pytest.raises(CamscopeError, match="layer4 and layer3") as error:
        build_class_differences([one, replace(one, layer="layer3")])
    assert error.value.remedy is Remedy.SET_LAYER


@pytest.mark.slow
def test_compare(here):
    one = ask("compare", "images/0.png", "--methods", "gradcam,layercam,hirescam", "-o", "compared.png")
    assert_documented(one)
    words = ("--methods", "gradcam,eigencam", "-o", "compared", "--masks", "mask", "--metrics", "enrichment,sparseness")
    many = ask("compare", "list.csv", *words)
    assert_documented(many)
    assert many["evidence"] == "the column 'mask'"
    assert Path("compared/figure.png").read_bytes().startswith(b"\x89PNG")
    assert {each["metric"] for each in many["metrics"]} == {"enrichment", "sparseness"}


@pytest.mark.slow
def test_batch_show_export_and_evaluate(here):
    words = ("--methods", "gradcam", "-o", "run")
    run = ask("batch", "list.csv", *words)
    failed = ask("batch", "bad", "-o", "failed", code=1)
    assert_documented(run, failed)
    assert (run["n_images"], run["n_processed"], failed["n_failures"]) == (8, 8, 1)
    assert ask("batch", "list.csv", *words)["n_done_before"] == 8
    assert_documented(ask("show", "run", "-o", "page.html"))
    exported = ask("export", "run", "--format", "csv", "-o", "rows.csv")
    assert_documented(exported)
    evaluated = ask("evaluate", "run", "--masks", "mask", "--metrics", "enrichment", "-o", "values")
    assert_documented(evaluated)
    assert evaluated["metrics"][0]["methods"][0]["estimate"]["mean"] > 1
    nothing = ask("export", "run", "--where", "score > 1e9", "-o", "none", code=1)
    assert nothing["error"]["message"] == "none of 8 rows matches the condition: score > 1e9"


@pytest.mark.slow
def test_choose_benchmark_features_and_demo(here):
    chosen = ask(
        "choose", "images/[0-3].png", "--methods", "gradcam,eigencam", "--layers", "layer4", "--save", "c.toml"
    )
    assert_documented(chosen)
    ranked = ask("benchmark", "phantom", "--count", "2", "--methods", "gradcam,center", "-o", "benchmark")
    assert_documented(ranked)
    drawn = ask("features", "images/0.png", "--layer", "layer2", "-o", "features.png")
    assert_documented(drawn)
    assert drawn["shape"][0] == drawn["n_drawn"] == 32
    shown = ask("demo", "-o", "demo", "--methods", "gradcam")
    assert_documented(shown)
    assert [image["finding"] for image in shown["images"]][-1] == "no finding"
    assert shown["images"][-1]["maps"][0]["hit"] is None


@pytest.mark.slow
def test_look_ups(here):
    for words in (["info"], ["methods"], ["methods", "Grad-CAM"]):
        assert_documented(ask(*words))
    assert_documented(ask("layers"))
    assert ask("inspect-images", "images", "-o", "check.json") == json.loads(Path("check.json").read_text())


@pytest.mark.slow
def test_audits(here, one_thread):
    pytest.importorskip("pydantic")
    from camscope.audit.demo_dataset_and_model import write_demo_study
    from tests.audit.audits import figures_left_out

    config = write_demo_study(here / "study", 0.95, n_images=24)
    words = ("--model", config.model.source, "--weights", config.model.weights, "--modality", "xray")
    started = ask("audit", "init", "study/manifest.csv", *words, "-o", "study/audit.toml")
    assert_documented(started)
    text = Path("study/audit.toml").read_text().replace('["gradcam", "integratedgradients"]', '["gradcam"]')
    skip = '["localization", "faithfulness", "sanity", "robustness", "shortcut"]'
    Path("study/audit.toml").write_text(f"skip = {skip}\n{text}")
    with figures_left_out():
        audited = ask("audit", "run", "study/audit.toml", "-o", "audit")
    assert_documented(audited)
    assert Path(audited["report"]).is_file()
    verified = ask("audit", "verify", "audit")
    assert_documented(verified)
    compared = ask("audit", "compare", "audit", "audit", "-o", "comparison.json")
    assert compared == json.loads(Path("comparison.json").read_text())
    assert compared["schema_version"].startswith("camscope/audit-comparison/")
    Path("audit/summary.json").write_text("{}")
    assert not ask("audit", "verify", "audit", code=1)["is_intact"]
    Path("audit/provenance.json").unlink()
    assert ask("audit", "verify", "audit", code=1)["error"]["exit_code"] == 1


def test_two_audited_models(here, monkeypatch, capsys):
    pytest.importorskip("pydantic")
    from types import SimpleNamespace as Facts

    def audit(area, conclusion):
        performance = [Facts(auroc=Facts(value=area))]
        verdict = Facts(
            question="q", claim="It relies on the marker.", finding="f", qualifier="", metric="", conclusion=conclusion
        )
        return Facts(summary=Facts(predict=Facts(performance=performance)), verdicts=[verdict], report_path="r.html")

    with json_output.json_output_scope(True):
        demo._print_differing_verdicts(audit(0.9, "not supported"), audit(0.91, "supported"))
    assert_documented(json.loads(capsys.readouterr().out))


# Errors


@pytest.mark.parametrize(
    ("words", "kind", "code", "remedy"),
    [
        (["explain"], "UsageError", 2, None),
        (["no-such-command"], "UsageError", 2, None),
        (["explain", "images/0.png", "--bogus"], "UsageError", 2, None),
        (["explain", "images/0.png", "--alpha", "7"], "UsageError", 2, None),
        (["explain", "images/0.png", "--methods", "gradcan"], "UsageError", 2, None),
        (["explain", "images/0.png", "--layers", "nowhere"], "LayerError", 2, None),
        (["explain", "images/0.png", "--target", "99"], "TargetError", 2, None),
        (["explain", "images/0.png", "--model", "resnet18", "--weights", "none.pt"], "WeightsError", 2, None),
        (["features", "none.png", "--layer", "layer4"], "ImageError", 1, None),
        (["layers", "none.py:model"], "ModelError", 2, None),
        (["audit", "run", "none.toml"], "InputError", 2, None),
    ],
    ids=lambda value: "-".join(value[:3]) if isinstance(value, list) else None,
)
def test_an_error_is_one_object_with_the_exit_code(here, words, kind, code, remedy):
    result = CliRunner().invoke(app, [*words, "--json"])
    assert result.exit_code == code
    document = json.loads(result.stdout)
    assert_documented(document)
    assert (document["error"]["kind"], document["error"]["exit_code"]) == (kind, code)
    assert "error: " not in result.stderr
    plain = CliRunner().invoke(app, words)
    assert plain.exit_code == code
    assert document["error"]["message"] in " ".join(plain.stderr.split())


def test_a_remedy_is_machine_readable(here, monkeypatch):
    Path("net.py").write_text(
        "from torch import nn\ndef net():\n    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.LazyLinear(2))\n"
    )
    error = ask("explain", "images/0.png", "--model", "net.py:net", code=2)["error"]
    assert error["kind"] in ("PreprocessError", "ModelError")
    ask("batch", "list.csv", "-o", "another")
    error = ask("batch", "list.csv", "-o", "another", "--methods", "layercam", code=1)["error"]
    assert (error["kind"], error["remedy"]) == ("OutputError", "allow_overwrite")
    assert "pass --overwrite" in error["message"]


@pytest.mark.parametrize(
    ("raised", "kind", "code"),
    [
        (KeyboardInterrupt(), "Interrupted", 130),
        (MemoryError(), "OutOfMemory", 1),
        (ZeroDivisionError("division"), "ZeroDivisionError", 1),
    ],
)
def test_errors_of_any_kind(here, monkeypatch, raised, kind, code):
    def fail(*args, **kwargs):
        raise raised

    monkeypatch.setattr("camscope.cli.version_and_device_info.collect_environment", fail)
    error = ask("info", code=code)["error"]
    assert (error["kind"], error["exit_code"]) == (kind, code)


def test_the_mode_ends_with_the_command(here):
    ask("info")
    ask("no-such-command", code=2)
    assert not json_output.is_json_output()
    assert "versions" in CliRunner().invoke(app, ["info"]).stdout
    assert CliRunner().invoke(app, ["explain", "--", "--json"]).stdout.startswith("{") is False


def test_diff(here, tmp_path):
    model = load_model("phantom")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight += 0.6 * weight.std() * torch.randn(weight.shape, generator=generator)
    manifest = here / "list-without-targets.csv"
    manifest.write_text("path,mask\n" + "".join(f"images/{n}.png,masks/{n}.png\n" for n in range(4)))
    run_batch(GradCAM(load_model("phantom")), manifest, tmp_path / "old")
    run_batch(GradCAM(model), manifest, tmp_path / "new")
    run_batch(LayerCAM(model), manifest, tmp_path / "layercam")
    gate = ("--fail-on", "top-class changed", "--fail-on", "status changed > 3 images")
    result = ask("diff", tmp_path / "old", tmp_path / "new", *gate, code=1)
    assert (result["failed"], result["exit_code"], result["n_compared"]) == (True, 1, 4)
    assert result["maps"][0]["n_shares"] == 4
    assert_documented(result, ask("diff", tmp_path / "old", tmp_path / "layercam"))
    assert ask("diff", tmp_path / "old", "nowhere", code=2)["error"]["exit_code"] == 2


# All commands


def commands(group=None, path=()):
    group = typer.main.get_command(app) if group is None else group
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, (*path, name))
        else:
            yield (*path, name), command


def test_every_command_has_json_and_a_documented_schema():
    for path, command in commands():
        assert "--json" in [name for parameter in command.params for name in parameter.opts], path
        assert isinstance(command, commands_and_error_reports.Command)
        assert "-".join(path) in RESULT_FIELDS or " ".join(path) in json_output.OTHER_SCHEMAS, path
    names = {"-".join(path) for path, _ in commands()}
    modes = {"demo-audit", "compare-dataset", "export-reader-study", "evaluate-reader-study"}
    assert set(RESULT_FIELDS) - names == {"error", *modes}


def test_the_reference_page_lists_all_fields():
    page = describe_json_output()
    for command, fields in RESULT_FIELDS.items():
        assert f"## `camscope/{command}/1`" in page
        assert all(f"| `{path}` | {text} |" in page for path, text in fields.items())
    example = re.search(r"```json\n(.*?)```", (ROOT / "docs/reference/json.md").read_text(), re.DOTALL)
    assert_documented(json.loads(example[1]))


def test_values_that_json_does_not_have():
    values = {"a": math.nan, "b": -math.inf, "c": Path("x"), "d": (np.float32(1.5), np.int64(2)), 3: {True}, "e": None}
    assert to_json_value(values) == {"a": None, "b": None, "c": "x", "d": [1.5, 2], "3": [True], "e": None}
    assert to_json_value(np.float64("nan")) is None


def test_the_peak_is_on_the_input_and_on_the_image(here):
    Image.open("images/0.png").resize((300, 200)).save("wide.png")  # the model receives 128 x 128 pixels
    (one,) = ask("explain", "wide.png", "--target", "nodule", "-o", "wide-map.png")["images"][0]["explanations"]
    explanation = GradCAM(load_model("phantom")).explain("wide.png", "nodule")
    values = explanation.heatmap("input", scale=None)
    row, column = one["peak"]["input"]
    assert (row, column) == np.unravel_index(values.argmax(), values.shape)
    assert one["peak"]["image"] == list(explanation.peak)
    np.testing.assert_allclose(one["peak"]["image"], [(row + 0.5) * 200 / 128, (column + 0.5) * 300 / 128], atol=2)
    assert one["peak"]["value"] == one["value_range"][1] == pytest.approx(explanation.attribution.max())


def test_a_map_of_equal_values_has_no_peak():
    explanation = GradCAM(load_model("phantom")).explain(np.zeros((64, 64, 3), np.uint8), 1)
    flat = dataclasses.replace(explanation, attribution=np.zeros_like(explanation.attribution))
    assert json_output.describe_explanation(flat)["peak"] is None
    lost = dataclasses.replace(explanation, placement=None)
    assert json_output.describe_explanation(lost)["peak"]["image"] is None


@pytest.mark.slow
def test_no_matching_row_is_an_answer_of_show(here):
    ask("batch", "list.csv", "-o", "matched")
    shown = ask("show", "matched", "--where", "score > 1e9", "-o", "none.html")
    assert_documented(shown)
    assert (shown["file"], shown["n_matching"], shown["n_rows"]) == (None, 0, 8)
    assert not Path("none.html").exists()
    printed = CliRunner().invoke(app, ["show", "matched", "--where", "score > 1e9", "-o", "none.html"])
    assert (printed.exit_code, printed.stdout) == (0, "page    no map of 8 matches score > 1e9; no page is written\n")
