"""Reader studies on the command line: export, forms, evaluation, and what does not belong together."""

import json

import pytest
from typer.testing import CliRunner

from camscope.cli import app, json_output

pytest.importorskip("pyarrow")
pytest.importorskip("duckdb")
pytest.importorskip("scipy")
pytest.importorskip("matplotlib")

from tests.reader_studies import CANARY, fill_forms, random_readers, read_table, run_of_canaries, write_table


def call(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cli")
    run_of_canaries(folder, images_per_patient=1)
    words = ["export", folder / "run", "--reader-study", folder / "study", "--readers", "2", "--size", "128", "--json"]
    outcome = call(*words, "--seed", "3")
    assert outcome.exit_code == 0, outcome.output
    answer = random_readers({"none": 0.5, "map": 0.9, "control": 0.5})

    def translated(entry):
        names = {"no finding": "no", "nodule": "yes"}
        back = {short: name for name, short in names.items()}
        text, *numbers = answer({**entry, "truth": names[entry["truth"]]})
        return back[text], *numbers

    fill_forms(folder / "study", translated)
    return folder, json.loads(outcome.stdout)


def described(result):
    """The paths of a JSON object in the notation of the reference."""
    if isinstance(result, dict):
        return {f".{key}{rest}" for key, value in result.items() for rest in described(value)}
    if isinstance(result, list):
        return {f"[]{rest}" for value in result for rest in described(value)} or {"[]"}
    return {""}


def test_the_export_prints_its_numbers(study):
    _, result = study
    assert (result["n_cases"], result["n_readers"], result["n_sessions"], result["n_readings"]) == (6, 2, 3, 36)
    documented = json_output.RESULT_FIELDS["export-reader-study"]
    assert {path.lstrip(".") for path in described(result)} == {*documented, "schema"}


def test_the_evaluation_prints_tables_and_writes_a_report(study, tmp_path):
    folder, _ = study
    outcome = call(
        "evaluate", "--reader-study", folder / "study", "-o", tmp_path / "out", "--figure", tmp_path / "a.png"
    )
    assert outcome.exit_code == 0, outcome.output
    assert "2 readers answered" in outcome.stdout
    assert "Sensitivity" in outcome.stdout
    assert (tmp_path / "out" / "report.md").exists()
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"
    assert CANARY not in outcome.output + (tmp_path / "out" / "readings.csv").read_text()
    result = json.loads(call("evaluate", "--reader-study", folder / "study", "--json").stdout)
    documented = json_output.RESULT_FIELDS["evaluate-reader-study"]
    paths = {path.lstrip(".") for path in described(result)} - {"schema"}
    for path in paths:
        assert path in documented or path.startswith(("study.", "median_seconds.")), path
    assert {path for path in documented if path.startswith("measures")} <= paths


def test_faults_of_forms_are_printed_one_a_line(study, tmp_path):
    folder, _ = study
    form = folder / "study" / "reader-1" / "session-1" / "form.csv"
    before = form.read_bytes()
    lines = read_table(form)
    lines[0]["answer"], lines[1]["confidence"] = "perhaps", "sure"
    write_table(form, lines)
    try:
        outcome = call("evaluate", "--reader-study", folder / "study")
    finally:
        form.write_bytes(before)
    assert outcome.exit_code == 2
    assert "2 faults in the forms" in outcome.stderr
    assert "\n  reader-1/session-1/form.csv, line 2: answer 'perhaps' is not allowed" in outcome.stderr
    assert "\n  reader-1/session-1/form.csv, line 3: confidence 'sure'" in outcome.stderr


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["export", "RUN", "--reader-study", "x", "--format", "csv"], "does not belong to --reader-study"),
        (["export", "RUN", "--readers", "3"], "it belongs to --reader-study"),
        (["evaluate"], "expected a run, images, or --reader-study FOLDER"),
        (["evaluate", "--reader-study", "STUDY", "--masks", "m"], "does not belong to --reader-study"),
        (["evaluate", "RUN", "--key", "k"], "it belongs to --reader-study"),
        (["evaluate", "--reader-study", "nothing"], "holds no study.json"),
    ],
)
def test_what_does_not_belong_together_is_an_error(study, words, text):
    folder, _ = study
    places = {"RUN": folder / "run", "STUDY": folder / "study"}
    outcome = call(*(places.get(word, word) for word in words))
    assert outcome.exit_code == 2
    assert text in " ".join(outcome.stderr.split())
