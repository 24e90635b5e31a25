"""Sentences of the report, compared with the numbers they speak of, for empty, partial and contradicting results."""

import html as html_entities
import importlib
import re

import numpy as np
import pytest

pytest.importorskip("pydantic")
pytest.importorskip("jinja2")
pytest.importorskip("pyarrow")
pytest.importorskip("scipy")
pytest.importorskip("matplotlib")

from camscope.audit.core.convert_to_summary_entries import summarize_estimate
from camscope.audit.core.stage_result_schema import DataCheckResult, EstimateSummary, StablePredictionShare
from camscope.audit.core.summary_schema import ClusterAnalysis, ColumnLeakage, InterventionEffect, Summary
from camscope.audit.performance.auc import auroc, average_precision
from camscope.audit.performance.feature_probes import probe_leakage
from camscope.audit.performance.subgroup_differences import compare_level_aurocs, compare_level_means
from camscope.audit.report.data_and_method_sentences import (
    describe_clusters,
    describe_config_declarations,
    describe_explained_output,
    describe_image_count,
    describe_localization_images,
    describe_patient_grouping,
    describe_stable_predictions,
    explain_missing_contradictions,
    iter_estimates,
    list_interval_methods,
)
from camscope.audit.report.render_html_page import render_page
from camscope.audit.report.verdict_labels_and_groups import TOPIC_DESCRIPTIONS, find_topic
from camscope.audit.shortcuts.intervention_effects_and_reliance import estimate_insertion_effect
from camscope.audit.verdicts import derive_verdicts
from camscope.audit.verdicts.limitations_and_warnings import list_warnings
from camscope.audit.verdicts.verdict_rules import QUESTIONS
from camscope.metrics.mean_estimates import estimate_difference, estimate_mean
from camscope.metrics.multiway_clustered_mean import estimate_clustered_mean
from tests.audit_summary import FINDINGS, full, nothing, num, verdict
from tests.report_consistency import find_unsupported_claims

ROUNDS = 80
WORDS = ("supported", "not supported", "not decided")
REGION, FINDING = "token", "nodule"


@pytest.fixture(autouse=True)
def without_figures(monkeypatch):
    """Figures take seconds, and say nothing here."""
    module = importlib.import_module(
        "camscope.audit.report.render_html_page"
    )  # the package's own `page` is the function
    names = (
        "performance",
        "localization",
        "faithfulness",
        "sanity",
        "robustness",
        "attribution_mass",
        "interventions",
        "masked_auroc",
        "leakage",
        "clusters",
    )
    monkeypatch.setattr(module, "draw_figures", lambda summary: dict.fromkeys(names, ()))


def text(sentence):
    """As a reader sees it."""
    return html_entities.unescape(re.sub(r"<[^>]*>", "", sentence))


def on_page(html):
    return " ".join(re.sub(r"<[^>]*>", " ", html.partition("<body>")[2]).split())


# --- what nothing speaks against


def some_verdicts(random):
    """Any number of verdicts, also none: of one word alone, or of any."""
    questions = list(QUESTIONS)
    only = random.choice([*WORDS, "any"])
    made = []
    for n in range(random.choice([0, 1, 3, 16])):
        question = questions[random.integers(len(questions))]
        word = only if only != "any" else str(random.choice(WORDS))
        speaks = "neither" if word == "not decided" else str(random.choice(["supports", "contradicts", "neither"]))
        made.append(
            verdict(question, f"claim {n}", FINDING, word, speaks, num(1.0, 0.1), 0.1, "shortcut", str(n), "why")
        )
    return tuple(made)


@pytest.mark.parametrize("seed", range(ROUNDS))
@pytest.mark.one_in(3)
def test_nothing_speaks_against_only_what_could_be_tested(seed):
    made = nothing().model_copy(update={"verdicts": some_verdicts(np.random.default_rng(seed))})
    for name in TOPIC_DESCRIPTIONS:
        of_topic = [question for question in QUESTIONS if find_topic(question) == name]
        said = text(explain_missing_contradictions(made, f"the {name}", of_topic))
        about = [one for one in made.verdicts if find_topic(one.question) == name]
        tested = [one for one in about if one.conclusion != "not decided"]
        if found := re.match(r"No verdict contradicts .*: (\d+) of (\d+) (questions?) could be decided", said):
            assert (int(found[1]), int(found[2])) == (len(tested), len(about))
            assert found[3] == ("question" if len(about) == 1 else "questions")
            assert tested
        elif found := re.match(
            r"None of the (\d+) questions about .* was decided. This is not evidence in favor of", said
        ):
            assert int(found[1]) == len(about) > 0
            assert not tested
        elif said.startswith("The only question"):
            assert len(about) == 1
            assert bool(tested) == said.endswith("counts neither for nor against it.")
        elif found := re.match(r"None of the (\d+) questions counts for or against", said):
            assert int(found[1]) == len(about) > 1
            assert {one.direction for one in tested} == {"neither"}
        else:
            assert said.startswith("No question")
            assert not about


def test_ten_questions_that_could_not_be_tested_clear_nobody():
    open_ones = tuple(
        verdict("shortcut", f"claim {n}", FINDING, "not decided", "neither", num(1.0), 0.1, "shortcut", str(n), "few")
        for n in range(10)
    )
    html = render_page(nothing().model_copy(update={"verdicts": open_ones}))
    said = on_page(html)
    assert "None of the 10 questions about the model was decided. This is not evidence in favor of the model." in said
    assert "No question about the maps was tested" in said
    assert "speaks against the model" not in said.partition("Scope and intended use What was asked")[0].replace(
        "What speaks", ""
    )
    assert (
        find_unsupported_claims(html, nothing().model_copy(update={"verdicts": open_ones}).model_dump(mode="json"))
        == []
    )


# --- removal and insertion


def effect(random, kind, fill=None):
    """An effect of any kind of evidence: none at all, of few patients, or with an interval anywhere."""
    size = int(random.choice([0, 3, 7, 12, 60]))
    value = round(float(random.choice([-0.6, -0.3, 0.0, 0.3, 0.6])), 3)
    spread = float(random.choice([0.05, 0.25, 0.5]))
    if not size:
        return InterventionEffect(
            region=REGION, finding=FINDING, kind=kind, imputation=fill, effect=EstimateSummary(reason="no image has it")
        )
    made = num(value, spread if size >= 6 else None, n=size, groups=size)
    if kind == "insert":
        made = made.model_copy(
            update={
                "n_values": 3 * size,
                "unit": "insertions",
                "n_groups_by_role": (("receivers", 3 * size), ("donors", size)),
            }
        )
    return InterventionEffect(region=REGION, finding=FINDING, kind=kind, imputation=fill, effect=made)


def counts(one):
    return one.effect.low is not None and one.effect.n_groups >= 10


@pytest.mark.parametrize("seed", range(ROUNDS))
@pytest.mark.one_in(5)
def test_what_is_said_of_insertion_and_removal_is_so(seed):
    random = np.random.default_rng(seed)
    removals = [effect(random, "remove", fill) for fill in ("mean", "blur")][: random.integers(3)]
    every = (*[effect(random, "insert")][: random.integers(2)], *removals)
    marker = bool(random.integers(2))
    shortcut = full().shortcut.model_copy(
        update={
            "region_counts": {REGION: 80},
            "markers_by_finding": {FINDING: (REGION,) if marker else ()},
            "interventions": every,
            "subgroup_differences": (),
        }
    )
    (one,) = [v for v in derive_verdicts(full(shortcut=shortcut)) if v.question == "shortcut" and v.finding == FINDING]
    ways = {
        "insertion": [each for each in every if each.kind == "insert"],
        "removal": [each for each in every if each.kind == "remove"],
    }
    for way, own in ways.items():
        with_value = [each for each in own if each.effect.value is not None]
        if f"{way} was not tested" in one.reason:
            assert not with_value
        if f"{way} was measured in too few patients" in one.reason:
            assert with_value
            assert not any(counts(each) for each in with_value)
        if f"{way} was measured but does not count" in one.reason:
            assert with_value
            assert way == "removal"
            assert not marker
        verb = {"insertion": "inserting", "removal": "removing"}[way]
        for side, sign in (("raises", 1), ("lowers", -1)):
            if re.search(rf"{verb} (the region|it) {side} the score", one.reason):
                assert with_value
                sign = sign if way == "insertion" else -sign
                assert all(sign * each.effect.value > 0.1 for each in with_value if counts(each))
    if "every effect" in one.reason:
        counted = [each for way, own in ways.items() for each in own if counts(each) and (way == "insertion" or marker)]
        assert counted
        assert all(each.effect.low > -0.1 and each.effect.high < 0.1 for each in counted)
    if "no image has it" in one.reason:
        assert any(each.effect.value is None for each in every)
    if one.conclusion != "not decided":
        assert one.effect.n_groups >= 10
    assert one.reason


def test_a_removal_that_is_shown_was_tested():
    # every image has the region: its removal is measured, stands in the table, and decides nothing
    shown = [
        InterventionEffect(
            region="border", finding=FINDING, kind="remove", imputation=fill, effect=num(0.5, 0.1, n=80, groups=80)
        )
        for fill in ("mean", "blur")
    ]
    given = InterventionEffect(
        region="border", finding=FINDING, kind="insert", imputation=None, effect=num(0.0, 0.05, n=80, groups=80)
    )
    shortcut = full().shortcut.model_copy(
        update={
            "region_counts": {"border": 80},
            "markers_by_finding": {},
            "interventions": (*shown, given),
            "subgroup_differences": (),
        }
    )
    summary = full(shortcut=shortcut)
    (one,) = [v for v in derive_verdicts(summary) if v.question == "shortcut" and v.finding == FINDING]
    assert one.reason == (
        "every effect that counts lies within the margin; removal was measured but does not count, because every image of "
        "this test has such a region; with 80 patients, a reliance in fewer than 3.7 % of patients could have been missed, and "
        "the config allows up to 5 %"
    )


# --- maps

NOTHING_KNOWN = "a control map"


def any_number(random, low, high):
    """None at all, of few patients, or with an interval."""
    size = int(random.choice([0, 4, 8, 40]))
    if not size:
        return EstimateSummary(reason="no map has a value")
    spread = float(random.choice([0.02, 0.4])) if size >= 6 else None
    return num(round(float(random.uniform(low, high)), 3), spread, n=size, groups=size, baseline=1.2, name="center")


@pytest.mark.parametrize("seed", range(60))
@pytest.mark.one_in(3)
def test_what_is_said_of_maps_is_so(seed):
    random = np.random.default_rng(seed)
    whole = full(findings=(FINDING,))
    line = next(
        one for one in whole.localization.metric_summaries if (one.metric, one.control) == ("enrichment", False)
    )
    over = any_number(random, -1, 1) if random.integers(4) else None
    line = line.model_copy(update={"value": any_number(random, 1.0, 3.0), "difference_to_control": over})
    mass = next(
        one
        for one in whole.shortcut.attribution_mass
        if one.is_resolvable and one.region not in ("the finding", "the organ")
    )
    mass = mass.model_copy(update={"enrichment": any_number(random, 1.0, 3.0), "max_enrichment": None})
    summary = full(
        findings=(FINDING,),
        localization=whole.localization.model_copy(update={"metric_summaries": (line,), "subgroup_differences": ()}),
        shortcut=whole.shortcut.model_copy(update={"attribution_mass": (mass,)}),
    )
    made = derive_verdicts(summary)
    (on_finding,) = [one for one in made if one.question == "localization"]
    (on_region,) = [one for one in made if one.question == "attribution mass"]
    assert_the_interval_is_as_told(on_finding, line.value)
    assert_the_interval_is_as_told(on_region, mass.enrichment)
    if f"{NOTHING_KNOWN}, does as well" in on_finding.reason:
        assert over.high <= 0
    if "it does not differ clearly from center" in on_finding.reason:
        assert over.low <= 0 < over.high
    if "it was not compared with" in on_finding.reason:
        assert over is None or over.value is None
    if "what maps of other patients have" in on_region.reason:
        assert mass.enrichment.low <= mass.enrichment.baseline
    for one in (on_finding, on_region):
        assert one.reason or one.conclusion != "not decided"


def assert_the_interval_is_as_told(one, value):
    if one.conclusion == "supported":
        assert value.low > one.margin
    if "the interval holds the margin" in one.reason:
        assert value.low <= one.margin <= value.high
    if found := re.search(r"too few patients to tell: (\d+)", one.reason):
        assert int(found[1]) < 10


# --- what is counted


@pytest.mark.slow
def test_the_smallest_of_three_counts_is_no_number_of_patients():
    # 92 pairs of 92 receivers, with the regions of 20 patients, and the pixels of 31 others
    random = np.random.default_rng(0)
    pairs = np.arange(92)
    found = estimate_insertion_effect(
        np.zeros(92),
        random.normal(1, 0.1, 92),
        1.0,
        list(pairs),
        donors=list(pairs % 20),
        controls=list(pairs % 31),
    )
    assert (found.n_values, found.unit, found.n_groups) == (92, "insertions", 20)
    assert found.n_groups_by_role == (("receivers", 92), ("donors", 20), ("controls", 31))
    one = InterventionEffect(region="marker", finding=FINDING, kind="insert", imputation=None, effect=found)
    shortcut = full().shortcut.model_copy(update={"interventions": (one,)})
    summary = full(shortcut=shortcut)
    html = render_page(summary)
    assert "92 insertions: 92 receivers, 20 donors, 31 controls" in on_page(html)
    assert "92 of 20 patients" not in on_page(html)
    assert find_unsupported_claims(html, summary.model_dump(mode="json")) == []
    few = estimate_insertion_effect(np.zeros(9), np.ones(9), 1.0, range(9), donors=[0, 1] * 4 + [0], controls=range(9))
    assert "9 receivers, 2 donors, 9 controls, and 6 are needed" in few.reason


def test_no_count_of_patients_exceeds_that_of_images():
    said = on_page(render_page(full()))
    known = re.findall(r"(\d[\d,]*) images? of (\d[\d,]*) patients?", said)
    assert known
    assert all(int(people.replace(",", "")) <= int(images.replace(",", "")) for images, people in known)


@pytest.mark.parametrize("grouped", [True, False])
def test_patients_are_told_of_only_where_a_column_says_whose_an_image_is(grouped):
    check = full().check.model_copy(update={"has_patient_column": grouped, "n_patients": 12})
    said = text(describe_patient_grouping(check))
    assert said.startswith("The images come from 12 patients." if grouped else "The data do not say which images show")
    (few,) = [one for one in list_warnings(full(check=check)) if "are only" in one]
    assert few.startswith(f"There are only 12 {'patients' if grouped else 'images'}:")
    assert not any(
        "only 0" in one for one in list_warnings(full(check=DataCheckResult(tested=False, reason="skipped")))
    )


@pytest.mark.parametrize("seed", range(20))
def test_warnings_count_what_they_say(seed):
    random = np.random.default_rng(seed)
    whole = full()
    statuses = {
        "ok": int(random.integers(5)),
        "flat": int(random.integers(5)),
        "no_spatial_resolution": int(random.integers(5)),
    }
    maps = whole.explain.map_counts[0].model_copy(update={"status_counts": statuses, "n_maps": sum(statuses.values())})
    steps = tuple(whole.explain.failures[0].model_copy(update={"n_rows": int(n)}) for n in random.integers(0, 3, 2))
    told = list(
        list_warnings(full(explain=whole.explain.model_copy(update={"map_counts": (maps,), "failures": steps})))
    )
    flagged = [one for one in told if "with a flag" in one]
    odd = statuses["flat"] + statuses["no_spatial_resolution"]
    assert bool(flagged) == (odd > 0.1 * sum(statuses.values()))
    for one in flagged:
        maps = "map" if sum(statuses.values()) == 1 else "maps"
        assert f": {odd} of {sum(statuses.values())} {maps} (" in one
        assert f"flat: {statuses['flat']}" in one
        assert f"no spatial resolution: {statuses['no_spatial_resolution']}" in one
    lost = sum(one.n_rows for one in steps)
    assert any(re.match(rf"{lost} images? lacks? the map", one) for one in told) == (lost > 0)


# --- intervals


def test_an_estimate_says_how_its_interval_was_made():
    random = np.random.default_rng(0)
    truth = np.arange(60) % 2 == 0
    answer = truth + random.normal(0, 1, 60)
    level = np.arange(60) % 4 < 2
    made = {
        "bootstrap": [
            estimate_mean(answer),
            average_precision(truth, answer),
        ],
        "korn-graubard": [estimate_mean(truth, bounds=(0, 1))],
        "student": [
            compare_level_means(answer, level, margin=0.1)[0].difference,
            estimate_difference(answer, answer[::-1]),
        ],
        "newcombe": [
            auroc(truth, answer),
            probe_leakage(random.normal(0, 1, (60, 3)), level.tolist(), n_permutations=2).auroc,
        ],
        "square-and-add": [compare_level_aurocs(truth, answer, level, margin=0.1)[0].difference],
        "clustered": [
            estimate_clustered_mean(answer, range(60), list(range(30)) * 2),
        ],
    }
    for method, own in made.items():
        for one in own:
            assert one.interval_method == method
            assert summarize_estimate(one).interval_method == method
    assert summarize_estimate(estimate_mean([0.1, 0.2, 0.3])).interval_method == "", (
        "of three patients there is no interval"
    )


@pytest.mark.parametrize("seed", range(6))
def test_the_methods_that_are_named_are_those_of_the_numbers(seed):
    random = np.random.default_rng(seed)
    methods = ("", "bootstrap", "newcombe", "clustered", "square-and-add", "a new one")
    summary = Summary.model_validate(marked_at_random(full().model_dump(mode="json"), methods, random))
    found = list_interval_methods(summary)
    by_name: dict[str, set[str]] = {}
    for label, one in iter_estimates(summary):
        by_name.setdefault(label, set()).update({one.interval_method} - {""})
    for label, kinds in by_name.items():
        assert sum(label in one.estimate_labels for one in found) == len(kinds)
    assert any("Newcombe" in text(one.description) for one in found) == any(
        "newcombe" in kinds for kinds in by_name.values()
    )
    assert any("bootstrap over patients" in text(one.description) for one in found) == any(
        "bootstrap" in k for k in by_name.values()
    )
    if seed == 0:
        html = render_page(summary)
        assert find_unsupported_claims(html, summary.model_dump(mode="json")) == []
        assert "draws of patients" not in on_page(html)


def marked_at_random(node, methods, random):
    """A plain summary whose intervals are of any method."""
    if isinstance(node, list):
        return [marked_at_random(one, methods, random) for one in node]
    if not isinstance(node, dict):
        return node
    made = {name: marked_at_random(one, methods, random) for name, one in node.items()}
    return made | ({"interval": str(random.choice(methods))} if "interval" in made else {})


# --- leaks, declarations, groups, shares


@pytest.mark.parametrize("seed", range(30))
def test_why_a_column_cannot_be_told_is_so(seed):
    random = np.random.default_rng(seed)
    value, spread = round(float(random.uniform(0.4, 0.9)), 3), float(random.choice([0.02, 0.1, 0.2]))
    one = ColumnLeakage(
        column="site", auroc=num(value, spread, 60, 60), null_max=float(random.uniform(0.5, 0.9)), is_decodable=False
    )
    shortcut = full().shortcut.model_copy(update={"leakage": (one,)})
    (found,) = [v for v in derive_verdicts(full(shortcut=shortcut)) if v.question == "leakage"]
    if "includes 0.5" in found.reason:
        assert one.auroc.low <= 0.5
    if "gave as much" in found.reason:
        assert value <= one.null_max
    if "not wholly below the margin" in found.reason:
        assert one.auroc.high >= 0.6
    assert "holds the margin" not in found.reason or one.auroc.low <= 0.6 <= one.auroc.high


@pytest.mark.parametrize(
    ("provenance", "said"),
    [
        ({}, "It is not recorded whether other margins were declared"),
        (
            {"declarations": 1, "declared_before_results": True},
            "The config was declared before the first prediction",
        ),
        (
            {"declarations": 3, "declared_before_results": True},
            "3 different configs were declared in this folder: this is the first",
        ),
        (
            {"declarations": 3, "declared_before_results": False},
            "declared when results of another config were available",
        ),
    ],
)
def test_margins_are_said_to_be_declared_first_only_where_they_were(provenance, said):
    assert said in text(describe_config_declarations(provenance))
    assert ("declared before the first prediction" in text(describe_config_declarations(provenance))) == bool(
        provenance.get("declared_before_results")
    )


def test_a_page_of_a_second_config_does_not_call_it_declared_first():
    said = on_page(render_page(nothing(), None, {"declarations": 2, "declared_before_results": False}))
    assert said.count("declared when results of another config were available") == 2
    assert "declared before" not in said.lower()


@pytest.mark.parametrize(("claimed", "reason"), [(1, ""), (2, ""), (1, "fewer than 20 maps")])
@pytest.mark.parametrize("left_out", [0, 3])
def test_groups_of_maps(claimed, reason, left_out):
    one = ClusterAnalysis(
        finding=FINDING,
        method="gradcam",
        n_clusters=claimed,
        n_maps=18,
        n_excluded=left_out,
        n_patients=17,
        reason=reason,
    )
    said = text(describe_clusters(one))
    assert said.startswith(
        "Not tested" if reason else "2 clusters were found" if claimed == 2 else "No clusters were found"
    )
    if not reason:
        assert "18 maps of 17 patients" in said
        assert ("3 more have no positive values" in said) == bool(left_out)


def test_a_share_that_there_is_none_of_is_not_written_as_one():
    said = text(
        describe_stable_predictions(
            StablePredictionShare(metric="stability", finding=FINDING, share=EstimateSummary(reason="no image"))
        )
    )
    assert (
        said == "It is not known how often the prediction for “nodule” stayed the same "
        "under small shifts, rotations and noise: no image."
    )
    assert "0.9" in text(
        describe_stable_predictions(StablePredictionShare(metric="stability", finding=FINDING, share=num(0.9, 0.1)))
    )


def test_what_images_were_used_is_told_finding_by_finding():
    first, second = FINDINGS
    lines = tuple(
        line.model_copy(
            update={"value": line.value.model_copy(update={"n_values": 148 if line.finding == first else 7})}
        )
        for line in full().localization.metric_summaries
    )
    said = [
        text(one)
        for one in describe_localization_images(full().localization.model_copy(update={"metric_summaries": lines}))
    ]
    assert said == [
        f"Images with “{name}” that are annotated and whose maps have a value: {count}."
        for name, count in ((first, 148), (second, 7))
    ]
    assert list(describe_image_count(full().robustness)) == []


def test_log_odds_made_from_probabilities_do_end():
    plain_ones = full()
    ended = full(predict=plain_ones.predict.model_copy(update={"outputs_are_probabilities": True}))
    assert "before a softmax or sigmoid" in describe_explained_output(plain_ones)
    assert "limited where these round to zero or one" in describe_explained_output(ended)


@pytest.mark.slow
def test_the_share_of_missed_images_is_no_share_of_a_map():
    from camscope.audit.core.summary_schema import MapCluster

    cluster = MapCluster(number=1, n_images=9, prototypes=(), attribution_mass={"marker": 0.2}, missed_share=0.4375)
    one = full().shortcut.cluster_analyses[0].model_copy(update={"clusters": (cluster,)})
    summary = full(shortcut=full().shortcut.model_copy(update={"cluster_analyses": (one,)}))
    html = render_page(summary)
    assert "Missed (probability below one half)" in on_page(html)
    assert find_unsupported_claims(html, summary.model_dump(mode="json")) == []


def test_the_report_says_which_category_counted():
    from camscope.audit.core.stage_result_schema import AnnotationSource

    marks = AnnotationSource(
        name=FINDING, source="a COCO file", categories=("WBC",), excluded_categories=("RBC", "Platelets")
    )
    html = render_page(full(check=full().check.model_copy(update={"annotation_sources": (marks,)})))
    said = on_page(html)
    assert said.count("Annotations of nodule : WBC of a COCO file . Excluded: RBC , Platelets .") == 2


def test_the_console_says_which_category_counted(capsys):
    from types import SimpleNamespace

    from camscope.audit.core.stage_result_schema import AnnotationSource
    from camscope.cli.audit import print_audit_result

    marks = (
        AnnotationSource(
            name=FINDING, source="a COCO file", categories=("WBC",), excluded_categories=("RBC", "Platelets")
        ),
        AnnotationSource(name="the organ", source="the column 'lungs'"),
    )
    summary = full(check=full().check.model_copy(update={"annotation_sources": marks}))
    print_audit_result(SimpleNamespace(summary=summary, verdicts=summary.verdicts, report_path="report.html"))
    said = capsys.readouterr().out
    assert f"marked  {FINDING}: WBC of a COCO file; not counted: RBC, Platelets" in said
    assert "marked  the organ: the column 'lungs'" in said
