"""Options of the command line: panels, singular and plural names, JSON, method pages, completion, remedies."""

import json
import re
from collections import Counter
from pathlib import Path

import pytest
import typer
from PIL import Image
from typer.testing import CliRunner

from camscope.batch import BatchRun
from camscope.cli import app, commands_and_error_reports, shared_options
from camscope.errors import PreprocessError, Remedy
from camscope.explainers import METHODS
from camscope.phantom import draw_radiograph

RUNNER = CliRunner()


def commands():
    root = typer.main.get_command(app)
    for name, command in root.commands.items():
        yield from command.commands.items() if hasattr(command, "commands") else [(name, command)]


def options(command):
    return [parameter for parameter in command.params if parameter.opts[0].startswith("--")]


def test_every_option_has_a_panel_and_a_help_text_and_every_row_of_panels_is_used():
    names = set()
    for name, command in commands():
        assert isinstance(command, commands_and_error_reports.Command), name
        for option in options(command):
            names.add(option.opts[0])
            assert option.help, f"{name} {option.opts[0]}"
            assert option.rich_help_panel == shared_options.find_help_panel(option.opts[0])
    listed = [f"--{option}" for options in shared_options.PANELS.values() for option in options]
    assert len(listed) == len(set(listed))
    assert set(listed) <= names, set(listed) - names


def test_an_option_with_one_help_text_is_declared_once():
    declared = []
    for file in sorted(Path(shared_options.__file__).parent.glob("*.py")):
        text = " ".join(file.read_text("utf-8").split())
        declared += re.findall(r'\boption\( ?"(--[\w-]+)[^"]*", [^,]+, "([^"]*)"', text)
    assert len(declared) > 50
    repeated = [pair for pair, count in Counter(declared).items() if count > 1]
    assert repeated == []


def test_every_command_ends_its_help_with_an_example():
    for name, command in commands():
        assert (command.epilog or "").startswith("Example: camscope "), name


@pytest.mark.parametrize("spelled", ["--method", "--methods"])
def test_an_option_is_known_in_both_numbers(spelled, tmp_path):
    result = RUNNER.invoke(app, ["explain", str(tmp_path / "none.png"), spelled, "no-such-method"])
    assert result.exit_code == 2
    assert "no method 'no-such-method'" in result.output


def test_a_name_that_exists_wins_and_what_follows_two_hyphens_is_untouched():
    names = {"--target", "--targets", "--methods"}
    assert commands_and_error_reports._correct_singular_or_plural("--target=3", names) == "--target=3"
    assert commands_and_error_reports._correct_singular_or_plural("--method=a,b", names) == "--methods=a,b"
    assert commands_and_error_reports._correct_singular_or_plural("--methods", names) == "--methods"
    assert commands_and_error_reports._correct_singular_or_plural("--other", names) == "--other"
    assert commands_and_error_reports._correct_singular_or_plural("-t", names) == "-t"
    result = RUNNER.invoke(app, ["explain", "--methods", "gradcam", "--", "--method"])
    assert "--method: there is no such file" in result.output


@pytest.mark.slow
def test_json_is_all_that_is_printed(tmp_path):
    methods = json.loads(RUNNER.invoke(app, ["methods", "--json"]).stdout)["methods"]
    assert {method["name"] for method in methods} == set(METHODS)
    layers = json.loads(RUNNER.invoke(app, ["layers", "phantom", "--json"]).stdout)["layers"]
    assert [layer["name"] for layer in layers if layer["is_default"]] == ["layer4"]
    facts = json.loads(RUNNER.invoke(app, ["info", "--json"]).stdout)
    assert facts["versions"]["camscope"]
    assert facts["extras"]["batch"] == []


def test_json_of_a_data_set_is_what_its_file_holds(tmp_path):
    pytest.importorskip("pyarrow")
    from PIL import Image

    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    printed = RUNNER.invoke(app, ["inspect-images", str(tmp_path), "--json", "-o", str(tmp_path / "check.json")]).stdout
    assert json.loads(printed) == json.loads((tmp_path / "check.json").read_text())


@pytest.mark.parametrize("spelled", ["gradcam++", "Grad-CAM++", "grad_cam_plusplus"])
def test_the_page_of_a_method_in_any_spelling(spelled):
    printed = RUNNER.invoke(app, ["methods", spelled]).stdout
    assert printed.startswith("Grad-CAM++")
    assert "arXiv:1710.11063" in printed
    assert "on_nonfinite" in printed
    assert "null" not in printed
    assert "settings that are passed in Python only: reshape" in printed


def test_the_page_of_an_unknown_method_names_the_nearest():
    result = RUNNER.invoke(app, ["methods", "gradcm"])
    assert result.exit_code == 2
    assert "gradcam" in result.output


def test_completion_finishes_the_last_name_of_a_list():
    assert "gradcam,layercam" in shared_options.complete_method("gradcam,lay")
    assert shared_options.complete_metric("pointing") == ["pointing-game"]
    assert shared_options.complete_colormap("vir") == ["viridis"]


def test_a_remedy_is_worded_in_options_and_another_error_stays():
    error = PreprocessError("no preprocessing is known", fix="pass preprocess=f", remedy=Remedy.SET_PREPROCESS)
    assert commands_and_error_reports.format_error(error).startswith(
        "no preprocessing is known; pass --preprocess imagenet"
    )
    assert (
        commands_and_error_reports.format_error(PreprocessError("broken", fix="pass preprocess=f"))
        == "broken; pass preprocess=f"
    )


def test_an_item_with_a_comma_stands_in_quotes():
    from camscope.cli.shared_options import split_list

    assert split_list('"goldfish, Carassius auratus", tench,') == ["goldfish, Carassius auratus", "tench"]
    assert split_list(" a ,b,, c") == ["a", "b", "c"]
    assert split_list("") == []
    assert split_list("a\nb,c") == ["a\nb", "c"]


CLASS_NAMES = ["healthy", "lesion, solid", "fluid", "air"]


@pytest.fixture
def radiograph(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Image.fromarray(draw_radiograph(3, "nodule").image).save("scan.png")


@pytest.mark.slow
@pytest.mark.parametrize("given", ['healthy,"lesion, solid",fluid,air', "names.txt", "list.json", "table.json"])
def test_class_names_replace_those_of_the_model(radiograph, given):
    Path("names.txt").write_text("\n".join(CLASS_NAMES) + "\n", encoding="utf-8")
    Path("list.json").write_text(json.dumps(CLASS_NAMES), encoding="utf-8")
    backwards = reversed([(str(index), {"id": f"n{index}", "name": name}) for index, name in enumerate(CLASS_NAMES)])
    Path("table.json").write_text(json.dumps(dict(backwards)), encoding="utf-8")
    words = ["--class-names", given, "--target", "lesion, solid"]
    explained = RUNNER.invoke(app, ["explain", "scan.png", *words, "--json"])
    (one,) = json.loads(explained.stdout)["images"][0]["explanations"]
    assert (one["target"], one["label"]) == (1, "lesion, solid")
    for command in (["batch", "scan.png"], ["evaluate", "scan.png", "--metrics", "sparseness"]):
        result = RUNNER.invoke(app, [*command, *words, "-o", command[0]])
        assert result.exit_code == 0, result.output
    assert BatchRun("batch").query()["label"].to_pylist() == ["lesion, solid"]
    compared = RUNNER.invoke(app, ["compare", "scan.png", *words[:2], "--targets", "fluid", "-o", "c.png", "--json"])
    assert {row["label"] for row in json.loads(compared.stdout)["maps"]} == {"fluid"}


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("missing.txt", "missing.txt: No such file or directory"),
        ("gap.txt", "gap.txt: line 2 is empty; expected a name in each line"),
        ("binary.txt", "binary.txt is not a text file in UTF-8"),
        ("text.json", "text.json is not JSON"),
        ("number.json", "number.json: expected a list of names, or an object with a name for each index from 0 on"),
        ("holes.json", "holes.json: expected a list of names, or an object with a name for each index from 0 on"),
        (",", "',' names no class; expected names such as cat,dog, or a text file"),
    ],
)
def test_wrong_class_names_are_an_error(radiograph, value, reason):
    Path("gap.txt").write_text("a\n\nb\n", encoding="utf-8")
    Path("binary.txt").write_bytes(b"\xff\xfe\x00")
    Path("text.json").write_text("a\nb\n", encoding="utf-8")
    Path("number.json").write_text("3", encoding="utf-8")
    Path("holes.json").write_text('{"0": "a", "2": "b"}', encoding="utf-8")
    refused = RUNNER.invoke(app, ["explain", "scan.png", "--class-names", value, "--json"])
    assert refused.exit_code == 2
    assert reason in json.loads(refused.stdout)["error"]["message"]


def test_a_wrong_number_of_class_names_is_an_error(radiograph):
    refused = RUNNER.invoke(app, ["explain", "scan.png", "--class-names", "a,b", "--target", "a", "--json"])
    assert "2 class names for a model with 4 classes" in json.loads(refused.stdout)["error"]["message"]
