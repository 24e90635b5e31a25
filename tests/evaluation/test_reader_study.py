"""Simulated reader studies with known answers: every figure equals one computed in another way, and faults are all listed."""

import itertools
import json
import math

import numpy as np
import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("scipy")
pytest.importorskip("matplotlib")
pytest.importorskip("sklearn")

from scipy import stats
from sklearn.metrics import cohen_kappa_score, roc_auc_score

from camscope.errors import FormError, InputError, OutputError
from camscope.evaluation import evaluate_reader_study
from tests.reader_studies import fill_forms, random_readers, read_table, study_without_images, write_table

ACCURACY = {"none": 0.65, "map": 0.8, "control": 0.68}
N_PATIENTS, N_READERS = 30, 4


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    """A study of 45 images of 30 patients: its folder, its readings as plain lines, and its result."""
    random = np.random.default_rng(3)
    patients = sorted([*range(N_PATIENTS), *range(0, N_PATIENTS, 2)])
    truths = [("no", "yes")[int(n)] for n in random.integers(0, 2, len(patients))]
    model = [truth if random.random() < 0.7 else {"no": "yes", "yes": "no"}[truth] for truth in truths]
    folder = study_without_images(
        tmp_path_factory.mktemp("study") / "study", truths, patients, N_READERS, model_answers=model
    )
    lines = fill_forms(folder, random_readers(ACCURACY, 1))
    return folder, lines, evaluate_reader_study(folder)


def select(lines, **values):
    return [line for line in lines if all(line[name] == str(value) for name, value in values.items())]


MEASURES = {
    "accuracy": lambda lines: np.mean([line["answer"] == line["truth"] for line in lines]),
    "sensitivity": lambda lines: np.mean([line["answer"] == "yes" for line in lines if line["truth"] == "yes"]),
    "specificity": lambda lines: np.mean([line["answer"] == "no" for line in lines if line["truth"] == "no"]),
    "auroc": lambda lines: roc_auc_score(
        [line["truth"] == "yes" for line in lines],
        [(1 if line["answer"] == "yes" else -1) * float(line["confidence"]) for line in lines],
    ),
    "seconds": lambda lines: np.mean([math.log(float(line["seconds"])) for line in lines]),
    "follows-wrong-model": lambda lines: np.mean(
        [line["answer"] == line["model_answer"] for line in lines if line["model_answer"] != line["truth"]]
    ),
    "follows-correct-model": lambda lines: np.mean(
        [line["answer"] == line["truth"] for line in lines if line["model_answer"] == line["truth"]]
    ),
}
COUNTS = {
    "sensitivity": lambda line: line["truth"] == "yes",
    "specificity": lambda line: line["truth"] == "no",
    "follows-wrong-model": lambda line: line["model_answer"] != line["truth"],
    "follows-correct-model": lambda line: line["model_answer"] == line["truth"],
}


def without_each_patient(lines, measure):
    """The measure of every reader without each patient, as lists."""
    counted = [line for line in lines if COUNTS.get(measure, lambda _: True)(line)]
    patients = sorted({line["patient"] for line in counted}, key=int)
    return [
        [
            MEASURES[measure]([x for x in select(lines, reader=reader) if x["patient"] != patient])
            for patient in patients
        ]
        for reader in range(1, N_READERS + 1)
    ]


def obuchowski_rockette(values, without, n_limiting):
    """Low, high and p of the mean of values, with loops: Obuchowski and Rockette with the degrees of freedom of Hillis."""
    n, n_patients, mean = len(values), len(without[0]), sum(values) / len(values)
    mean_square = sum((value - mean) ** 2 for value in values) / (n - 1)
    covariances = {}
    for r, s in itertools.product(range(n), repeat=2):
        first, second = sum(without[r]) / n_patients, sum(without[s]) / n_patients
        products = [(x - first) * (y - second) for x, y in zip(without[r], without[s], strict=True)]
        covariances[r, s] = (n_patients - 1) / n_patients * sum(products)
    between = [value for (r, s), value in covariances.items() if r != s]
    total = mean_square + n * max(sum(between) / len(between), 0)
    fixed = sum(covariances.values()) / n**2
    dof = n_limiting - 1
    if total / n >= fixed:
        dof = min(dof, (n - 1) * total**2 / mean_square**2)
    error = math.sqrt(max(total / n, fixed))
    half = stats.t.ppf(0.975, dof) * error
    return mean - half, mean + half, max(2 * stats.t.sf(abs(mean) / error, dof), 2.0 ** (1 - n_limiting))


@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize(("condition", "reference"), [("map", None), ("map", "none"), ("map", "control")])
def test_every_figure_equals_an_independent_computation(filled, measure, condition, reference):
    _, lines, result = filled
    line = result.find(measure, condition, reference)
    compute, ratio = MEASURES[measure], math.exp if measure == "seconds" else float
    by_reader = [compute(select(lines, reader=reader, condition=condition)) for reader in line.readers]
    without = without_each_patient(select(lines, condition=condition), measure)
    if reference:
        subtracted = [compute(select(lines, reader=reader, condition=reference)) for reader in line.readers]
        by_reader = [first - second for first, second in zip(by_reader, subtracted, strict=True)]
        without = np.subtract(without, without_each_patient(select(lines, condition=reference), measure)).tolist()
    for estimate, expected in zip(line.estimates.by_reader, by_reader, strict=True):
        assert estimate.mean == pytest.approx(ratio(expected))
    assert line.estimates.pooled.mean == pytest.approx(ratio(np.mean(by_reader)))

    n_limiting = len(without[0])
    if measure == "auroc":  # its degrees of freedom are limited by the rarer class
        n_limiting = min(len({x["patient"] for x in select(lines, truth=truth)}) for truth in ("yes", "no"))
    low, high, p = obuchowski_rockette(by_reader, without, n_limiting)
    ends = [ratio(low), ratio(high)] if measure == "seconds" else np.clip([low, high], -1.0 if reference else 0.0, 1.0)
    pooled = line.estimates.pooled
    assert [pooled.low, pooled.high] == pytest.approx(list(ends), abs=1e-9)
    assert pooled.p_value == (pytest.approx(p) if reference else None)


def test_the_interval_of_each_reader_is_a_paired_comparison_by_patient(tmp_path):
    """One image per patient: the jackknife is then Student's t of the differences."""
    truths = ["no", "yes"] * 12
    lines = fill_forms(
        study_without_images(tmp_path / "s", truths, [*range(24)], 3, ("none", "map")), random_readers(ACCURACY, 4)
    )
    line = evaluate_reader_study(tmp_path / "s").find("accuracy", "map", "none")
    for reader, estimate in zip(line.readers, line.estimates.by_reader, strict=True):
        right = {
            condition: {x["row"]: x["answer"] == x["truth"] for x in select(lines, reader=reader, condition=condition)}
            for condition in ("none", "map")
        }
        test = stats.ttest_1samp([right["map"][row] * 1.0 - right["none"][row] for row in right["map"]], 0)
        assert estimate.p_value == pytest.approx(test.pvalue)
        assert (estimate.low, estimate.high) == pytest.approx(test.confidence_interval())


def krippendorff(units):
    """Alpha from the matrix of coincidences, with loops."""
    coincidences = {}
    for answers in units:
        for first, second in itertools.permutations(answers, 2):
            pair = first, second
            coincidences[pair] = coincidences.get(pair, 0) + 1 / (len(answers) - 1)
    totals = {}
    for (first, _), count in coincidences.items():
        totals[first] = totals.get(first, 0) + count
    n = sum(totals.values())
    observed = sum(count for (first, second), count in coincidences.items() if first != second)
    expected = sum(totals[a] * totals[b] for a in totals for b in totals if a != b) / (n - 1)
    return 1 - observed / expected


def test_agreement_equals_other_computations(filled):
    _, lines, result = filled
    rows = sorted({line["row"] for line in lines}, key=int)
    for condition, estimate in result.agreement_between_readers.items():
        units = [[line["answer"] for line in select(lines, condition=condition, row=row)] for row in rows]
        assert estimate.mean == pytest.approx(krippendorff(units))
        assert estimate.low < estimate.mean < estimate.high
    by_place = {(x["reader"], x["condition"], x["row"]): x["answer"] for x in lines}
    for (first, second), estimate in result.agreement_within_readers.items():
        kappas = [
            cohen_kappa_score(
                [by_place[str(reader), first, row] for row in rows],
                [by_place[str(reader), second, row] for row in rows],
            )
            for reader in result.readers
        ]
        assert estimate.mean == pytest.approx(np.mean(kappas))


def test_krippendorff_alpha_with_missing_answers():
    from camscope.evaluation.reader_study.reader_agreement import compute_krippendorff_alpha

    rows = ["123321412...", "12332241253.", ".3332342251.", "123324412511"]
    table = np.array([[-1 if char == "." else int(char) for char in row] for row in rows])
    units = [[char for char in column if char != "."] for column in zip(*rows, strict=True)]
    assert compute_krippendorff_alpha(table) == pytest.approx(krippendorff([x for x in units if len(x) > 1]))
    assert math.isnan(compute_krippendorff_alpha(np.ones((2, 4), int)))


def test_changed_answers_are_counted_by_hand(filled):
    _, lines, result = filled
    by_place = {(x["reader"], x["condition"], x["row"]): x for x in lines}
    change = next(change for change in result.changes if (change.before, change.after) == ("none", "map"))
    counts = dict.fromkeys(("pairs", "changed", "to_correct", "to_wrong", "to_wrong_model", "wrong_model"), 0)
    for (reader, condition, row), old in by_place.items():
        if condition == "none":
            new = by_place[reader, "map", row]
            truth, model = new["truth"], new["model_answer"]
            counts["pairs"] += 1
            counts["changed"] += old["answer"] != new["answer"]
            counts["to_correct"] += old["answer"] != truth == new["answer"]
            counts["to_wrong"] += old["answer"] == truth != new["answer"]
            counts["to_wrong_model"] += old["answer"] == truth and new["answer"] == model != truth
            counts["wrong_model"] += model != truth
    assert {name: getattr(change, f"n_{name}") for name in counts} == counts
    assert 0 < counts["to_wrong_model"] < counts["wrong_model"]


def test_medians_counts_and_what_is_written(filled, tmp_path):
    folder, lines, result = filled
    for condition in ACCURACY:
        seconds = sorted(float(line["seconds"]) for line in select(lines, condition=condition))
        assert result.median_seconds[condition] == pytest.approx((seconds[89] + seconds[90]) / 2)
    out = result.save(tmp_path / "out")
    assert {path.name for path in out.iterdir()} == {"report.md", "results.json", "readings.csv", "figure.svg"}
    described = json.loads((out / "results.json").read_text())
    assert described["n_readings"] == len(lines) == 45 * 3 * N_READERS
    written = read_table(out / "readings.csv")
    assert sorted((x["reader"], x["session"], x["row"], x["answer"]) for x in written) == sorted(
        (x["reader"], x["session"], x["row"], x["answer"]) for x in lines
    )
    report = (out / "report.md").read_text()
    accuracy = result.find("accuracy", "map").estimates.pooled
    assert f"{100 * accuracy.mean:.1f} % [{100 * accuracy.low:.1f}, {100 * accuracy.high:.1f}]" in report
    assert "What this study cannot show" in report
    with pytest.raises(OutputError, match="exists"):
        result.save(out)
    assert result.statements()[0] in result._repr_html_().replace("&#x27;", "'")
    assert str(folder) not in report


def test_sentences_follow_the_intervals(tmp_path):
    truths = ["no", "yes"] * 15
    for name, accuracy, expected in (
        ("gain", {"none": 0.5, "map": 0.95, "control": 0.5}, "with maps, readers are more accurate"),
        ("none", {"none": 0.7, "map": 0.7, "control": 0.7}, "does not show whether maps change the accuracy"),
        ("overlay", {"none": 0.5, "map": 0.95, "control": 0.95}, "rather than from any overlay"),
    ):
        folder = study_without_images(tmp_path / name, truths, [*range(30)], 4)
        fill_forms(folder, random_readers(accuracy, 2))
        assert expected in " ".join(evaluate_reader_study(folder).statements())


def test_a_split_design_reads_each_case_once(tmp_path):
    truths = ["no", "yes"] * 15
    folder = study_without_images(tmp_path / "split", truths, [*range(30)], 3, ("none", "map"), design="split")
    lines = fill_forms(folder, random_readers(ACCURACY, 6))
    result = evaluate_reader_study(folder)
    line = result.find("accuracy", "map", "none")
    expected = [
        MEASURES["accuracy"](select(lines, reader=reader, condition="map"))
        - MEASURES["accuracy"](select(lines, reader=reader, condition="none"))
        for reader in (1, 2, 3)
    ]
    assert [estimate.mean for estimate in line.estimates.by_reader] == pytest.approx(expected)
    assert math.isfinite(line.estimates.pooled.low)
    assert result.changes == ()
    assert len(lines) == 90


def test_more_than_two_classes_have_no_sensitivity(tmp_path):
    truths = ["a", "b", "c"] * 8
    folder = study_without_images(tmp_path / "three", truths, [*range(24)], 2)
    fill_forms(folder, random_readers(ACCURACY, 2, wrong="a"))
    result = evaluate_reader_study(folder)
    assert result.find("sensitivity", "map") is None
    assert result.find("auroc", "map") is None
    assert result.find("follows-wrong-model", "map") is None
    assert result.find("accuracy", "map") is not None


def test_all_faults_are_listed_with_file_and_line(tmp_path):
    truths = ["no", "yes"] * 6
    folder = study_without_images(tmp_path / "faults", truths, [*range(12)], 2, ("none", "map"))
    fill_forms(folder, random_readers(ACCURACY, 1))
    first, second = folder / "reader-1" / "session-1" / "form.csv", folder / "reader-2" / "session-1" / "form.csv"
    lines = read_table(first)
    lines[0]["answer"] = "perhaps"
    lines[1]["confidence"] = "101"
    lines[2]["seconds"] = "-3"
    lines[3]["answer"] = ""
    lines[5] = dict(lines[4])
    lines[6]["case"] = "999"
    write_table(first, lines)
    (folder / "reader-1" / "session-2" / "form.csv").write_bytes(second.read_bytes())
    (folder / "reader-2" / "session-2" / "form.csv").unlink()
    with pytest.raises(FormError) as failure:
        evaluate_reader_study(folder)
    text = str(failure.value)
    for part in (
        "reader-1/session-1/form.csv, line 2: answer 'perhaps' is not allowed; expected no, yes",
        "line 3: confidence '101'; expected a number from 0 to 100",
        "line 4: seconds '-3'; expected a number above 0",
        "line 5: case 004 has no answer",
        "line 7: case 005 occurs a second time",
        "line 8: case '999' is not in this session",
        "reader-1/session-1/form.csv: case 006 has no line",
        "reader-1/session-1/form.csv: case 007 has no line",
        "reader-1/session-2/form.csv, line 2: form",
        "reader-2/session-2/form.csv: there is no such file",
    ):
        assert part in text, part
    assert "belongs to another session or study" in text


def test_missing_answers_can_be_allowed(tmp_path):
    truths = ["no", "yes"] * 8
    folder = study_without_images(tmp_path / "missing", truths, [*range(16)], 3, ("none", "map"))
    fill_forms(folder, random_readers(ACCURACY, 1))
    form = folder / "reader-1" / "session-1" / "form.csv"
    lines = read_table(form)
    lines[0]["answer"] = ""
    write_table(form, lines)
    (folder / "reader-3" / "session-2" / "form.csv").unlink()
    with pytest.raises(FormError, match="2 faults"):
        evaluate_reader_study(folder)
    result = evaluate_reader_study(folder, allow_missing=True)
    assert result.readings.n_missing == 17
    assert len(result.readings) == 3 * 2 * 16 - 17


def test_forms_of_spreadsheets_are_read(tmp_path):
    """Semicolons, a byte order mark, case numbers without zeros, a comma in numbers and other capitals."""
    truths = ["no", "yes"] * 6
    folder = study_without_images(tmp_path / "sheets", truths, [*range(12)], 2, ("none", "map"))
    fill_forms(folder, random_readers(ACCURACY, 1))
    before = evaluate_reader_study(folder).to_dict()
    for form in folder.rglob("form.csv"):
        lines = read_table(form)
        text = ";".join(lines[0]) + "\r\n"
        for line in lines:
            line |= {"case": str(int(line["case"])), "seconds": line["seconds"].replace(".", ",")}
            text += ";".join({**line, "answer": line["answer"].upper()}.values()) + "\r\n"
        form.write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert evaluate_reader_study(folder).to_dict() == before


def test_the_key_may_lie_elsewhere_and_must_fit(tmp_path):
    truths = ["no", "yes"] * 6
    folder = study_without_images(tmp_path / "a", truths, [*range(12)], 2, ("none", "map"))
    fill_forms(folder, random_readers(ACCURACY, 1))
    (folder / "key").rename(tmp_path / "safe")
    with pytest.raises(InputError, match="expected the key of the reader study"):
        evaluate_reader_study(folder)
    assert evaluate_reader_study(folder, tmp_path / "safe").readers == (1, 2)
    write_table(tmp_path / "safe" / "key.csv", read_table(tmp_path / "safe" / "key.csv")[:-24])
    with pytest.raises(InputError, match="does not belong to"):
        evaluate_reader_study(folder, tmp_path / "safe")
    (tmp_path / "safe" / "study.json").write_text("{")
    with pytest.raises(InputError, match="it is damaged"):
        evaluate_reader_study(folder, tmp_path / "safe")
