"""Words that verdicts may not say: of few patients, of no value, against what no number could show; and every reason."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pydantic")

from camscope.audit.config_generation import MARGIN_COMMENTS
from camscope.audit.core.convert_to_summary_entries import summarize_estimate
from camscope.audit.core.stage_result_schema import (
    EstimateSummary,
    MetricSummary,
    RandomizationSimilarity,
    RandomizationTest,
)
from camscope.audit.core.stored_predictions import Predictions
from camscope.audit.core.subgroup_levels import (
    MIN_PATIENTS_FOR_INTERVAL,
    MIN_PATIENTS_FOR_SINGLE_CLUSTER,
    MIN_PATIENTS_FOR_VERDICT,
)
from camscope.audit.core.summary_schema import ColumnLeakage, Summary, Verdict
from camscope.audit.shortcuts.intervention_effects_and_reliance import (
    MIN_IMPUTATIONS,
    compute_min_patients_to_detect,
    judge_reliance,
)
from camscope.audit.shortcuts.region_removal_and_insertion import InterventionRunner
from camscope.audit.verdicts import derive_verdicts
from camscope.audit.verdicts.limitations_and_warnings import list_warnings
from camscope.audit.verdicts.map_verdicts import FAITHFULNESS_VERDICT_METRICS
from camscope.audit.verdicts.patients_needed import HARDLY_DECIDABLE
from camscope.audit.verdicts.verdict_rules import build_verdict, decide_above_margin
from camscope.metrics import estimate_mean
from camscope.metrics.intervals_and_p_values import compute_min_detectable_prevalence
from camscope.metrics.randomization_result import SAME_MAP_SIMILARITY
from tests.audit_summary import full, levels, nothing, num


def told(summary: Summary, question: str, **which: str) -> list[Verdict]:
    found = [one for one in derive_verdicts(summary) if one.question == question]
    return [one for one in found if all(getattr(one, name) == value for name, value in which.items())]


def one_of(summary: Summary, question: str, **which: str) -> Verdict:
    (found,) = told(summary, question, **which)
    return found


def with_part(stage: str, **parts: object) -> Summary:
    whole = full(findings=("nodule",))
    return whole.model_copy(update={stage: getattr(whole, stage).model_copy(update=parts)})


# Few patients


def test_few_patients_bear_no_interval_and_fewer_than_ten_no_word():
    values = [0.8, 0.9, 0.85, 0.95, 0.9, 0.8]
    five, six = (
        summarize_estimate(estimate_mean(values[:n]))
        for n in (MIN_PATIENTS_FOR_INTERVAL - 1, MIN_PATIENTS_FOR_INTERVAL)
    )
    assert (five.low, five.high, five.value) == (None, None, pytest.approx(0.88))
    assert five.reason == "too few patients for an interval: 5, and 6 are needed"
    assert six.low is not None
    assert six.reason == ""
    assert decide_above_margin(six, 0.5) == ("not decided", "too few patients: 6, and 10 are needed")
    assert decide_above_margin(six.model_copy(update={"n_groups": MIN_PATIENTS_FOR_VERDICT}), 0.5) == (
        "supported",
        "the whole interval lies above the margin",
    )


def test_no_p_is_told_of_few_patients():
    gap = estimate_mean([1.0, 2.0, 3.0])
    assert summarize_estimate(gap.__class__(gap.mean, gap.low, gap.high, 3, 3, p_value=0.01)).p_value is None


def fewer(node: Any, patients: int) -> Any:
    """Every number of so many patients at most."""
    if isinstance(node, list):
        return [fewer(one, patients) for one in node]
    if not isinstance(node, dict):
        return node
    capped = {name: min(node[name], patients) for name in ("n_groups", "n_patients") if isinstance(node.get(name), int)}
    return {name: fewer(one, patients) for name, one in node.items()} | capped


def test_of_eight_patients_nothing_is_said_but_why():
    whole = full().model_dump(mode="json")
    for level in [
        *whole["localization"]["subgroup_differences"],
        *(one for part in whole["predict"]["performance"] for one in part["subgroup_differences"]),
    ]:
        level["conclusion"] = "different"
    found = derive_verdicts(Summary.model_validate(fewer(whole, 8)))
    assert {one.conclusion for one in derive_verdicts(full())} == {"supported", "not supported", "not decided"}
    assert {one.conclusion for one in found} == {"not decided"}
    assert all(one.reason for one in found)


# No value


def test_no_word_stands_beside_no_value():
    missing = EstimateSummary(reason="no map")
    found = build_verdict("leakage", "nodule", ("not supported", ""), missing, column="site")
    assert (found.conclusion, found.direction, found.reason) == ("not decided", "neither", "no map")
    assert build_verdict("leakage", "nodule", ("not decided", ""), EstimateSummary(), column="site").reason


def test_every_open_verdict_says_why():
    silent = full(
        localization=full().localization.model_copy(update={"metric_summaries": (), "subgroup_differences": ()}),
        faithfulness=full().faithfulness.model_copy(update={"metric_summaries": ()}),
        sanity=full().sanity.model_copy(update={"tests": ()}),
    )
    for summary in (full(), nothing(), silent):
        for one in derive_verdicts(summary):
            assert one.reason, one
            assert one.effect.value is not None or one.conclusion == "not decided", one
    assert one_of(silent, "localization", finding="nodule").reason == "no masks, boxes or points mark “nodule”"


# Sanity


def randomized(method: str, passes: bool | None, finding: str = "nodule", patients: int = 12) -> RandomizationTest:
    end = (
        EstimateSummary(reason="no map has a number")
        if passes is None
        else num(0.1 if passes else 1.0, 0.05, patients, patients)
    )
    similar = RandomizationSimilarity(
        name="ssim",
        curve=(1.0, end.value),
        null_low=0.1,
        null_mean=0.2,
        null_high=0.3,
        passes=passes,
        reason="",
        final_similarity=end,
    )
    return RandomizationTest(
        method=method,
        finding=finding,
        part_names=("fc",),
        seeds=(0,),
        similarities=(similar,),
        passes=passes,
        reason="nothing to compare" if passes is None else "",
        control=method == "edges",
    )


def test_maps_of_zeros_are_not_accused_of_ignoring_the_training():
    tests = (randomized("gradcam", None), randomized("edges", False))
    found = one_of(with_part("sanity", tests=tests), "sanity")
    assert (found.conclusion, found.direction, found.reason) == ("not decided", "neither", "nothing to compare")


def test_each_finding_has_its_own_edge_detector_and_its_own_images():
    tests = tuple(
        randomized(method, passes, finding, patients)
        for finding, patients, fails in (("nodule", 12, False), ("effusion", 11, True))
        for method, passes in (("gradcam", True), ("edges", fails))
    )
    whole = full()
    both = whole.model_copy(update={"sanity": whole.sanity.model_copy(update={"tests": tests})})
    assert [(one.finding, one.conclusion, one.effect.n_values) for one in told(both, "sanity")] == [
        ("nodule", "supported", 12),
        ("effusion", "not decided", 11),
    ]
    alone = whole.model_copy(update={"sanity": whole.sanity.model_copy(update={"tests": tests[:2]})})
    assert one_of(alone, "sanity", finding="effusion").reason == "too few images with “effusion” share a size"


def test_the_similarity_that_failed_is_the_one_that_is_shown():
    one = randomized("gradcam", False)
    fine = one.similarities[0].model_copy(update={"name": "hog", "passes": True, "final_similarity": num(0.05, 0.01)})
    tests = (one.model_copy(update={"similarities": (fine, *one.similarities)}), randomized("edges", False))
    found = one_of(with_part("sanity", tests=tests), "sanity")
    assert (found.conclusion, found.effect.value, found.effect.low) == ("not supported", 1.0, 0.95)
    assert "ssim" in found.effect.reason


def test_what_is_left_when_all_training_is_lost_has_an_interval_by_patient():
    from camscope.audit.stages.map_quality import _summarize_final_similarity

    last = np.array([[0.1, 0.3, 0.2, 0.4, np.nan, 0.6, 0.5], [0.3, 0.1, 0.2, 0.4, np.nan, np.nan, 0.5]])
    found = _summarize_final_similarity(last, [1, 2, 3, 4, 5, 6, 7], {})
    assert (found.n_values, found.n_groups, found.n_undefined) == (6, 6, 1)
    assert found.value == pytest.approx(np.nanmean(last))
    assert found.low is not None
    assert found.low < found.value < found.high
    assert _summarize_final_similarity(last, [1, 1, 1, 1, 1, 2, 2], {}).low is None
    empty = _summarize_final_similarity(np.full_like(last, np.nan), [1] * 7, {})
    assert (empty.value, empty.reason[:6]) == (None, "no map")


# Leaks


@pytest.mark.parametrize(
    ("value", "spread", "readable", "word"),
    [
        (0.8, 0.1, True, "supported"),
        (0.55, 0.04, True, "supported"),
        (0.5, 0.08, False, "not supported"),
        (0.62, 0.15, False, "not decided"),
        (0.8, 0.1, False, "not decided"),
    ],
)
def test_a_small_study_clears_no_leak(value, spread, readable, word):
    one = ColumnLeakage(column="site", auroc=num(value, spread, 24, 24), null_max=0.9, is_decodable=readable)
    found = one_of(with_part("shortcut", leakage=(one,)), "leakage")
    assert (found.conclusion, found.margin) == (word, 0.6)


# Enrichment


def enrichment(value: EstimateSummary, over: EstimateSummary | None, most: float | None = None) -> Summary:
    whole = full(findings=("nodule",)).localization
    (line,) = [one for one in whole.metric_summaries if (one.metric, one.method) == ("enrichment", "gradcam")]
    inside = [one for one in whole.metric_summaries if (one.metric, one.method) == ("energy-inside", "gradcam")]
    one = line.model_copy(update={"value": value, "difference_to_control": over, "max_value": most})
    return with_part("localization", metric_summaries=(one, *inside))


def test_maps_below_a_map_that_knows_nothing_do_not_lie_on_the_finding_whatever_the_margin():
    # the rule: not supported where the interval is nowhere above that map, also where it holds the margin
    found = one_of(enrichment(num(1.6, 0.2, name="center"), num(-1.0, 0.2)), "localization")
    assert (found.conclusion, found.reason) == (
        "not supported",
        "a map that only marks the image center gets a higher score; 0.41 of their attribution lies inside",
    )
    assert one_of(enrichment(num(1.6, 0.2), num(0.1, 0.2)), "localization").conclusion == "not decided"


def test_a_claim_says_what_is_judged_and_the_share_inside_stands_beside():
    found = one_of(enrichment(num(4.0, 0.5), num(1.0, 0.5)), "localization")
    assert found.claim == "The maps of Grad-CAM highlight “nodule” more than expected by chance."
    assert (found.conclusion, found.reason) == (
        "supported",
        "the whole interval lies above the margin; the maps score higher than the best control map; "
        "0.41 of their attribution lies inside",
    )


def test_a_margin_out_of_reach_accuses_nobody():
    weak = num(1.2, 0.05)
    assert one_of(enrichment(weak, num(0.1, 0.05), most=3.0), "localization").conclusion == "not supported"
    found = one_of(enrichment(weak, num(0.1, 0.05), most=1.3), "localization")
    assert found.conclusion == "not decided"
    assert "an enrichment of only 1.30, and the margin is 1.5" in found.reason
    masses = [
        one for one in full().shortcut.attribution_mass if one.region == "outside the organ" and one.method == "gradcam"
    ][:1]
    weak_mass = masses[0].model_copy(update={"finding": "nodule", "enrichment": weak})
    assert (
        one_of(with_part("shortcut", attribution_mass=(weak_mass,)), "attribution mass").conclusion == "not supported"
    )
    large = weak_mass.model_copy(update={"max_enrichment": 1.5})
    assert one_of(with_part("shortcut", attribution_mass=(large,)), "attribution mass").conclusion == "not decided"


# Subgroups


def test_what_is_open_by_subgroup_says_which_level_and_why():
    alike = levels("nodule", {("site", "A"): (0.9, 0.0, "equivalent")}, 0.05)[0]
    few = EstimateSummary(reason="C: 3 groups; expected at least 10")
    small = alike.model_copy(update={"level": "C", "conclusion": "not tested", "value": few, "difference": few})
    assert (
        one_of(with_part("localization", subgroup_differences=(alike, small)), "localization by subgroup").reason
        == few.reason
    )
    apart = alike.model_copy(update={"level": "B", "conclusion": "different", "difference": num(0.05, 0.04)})
    found = one_of(with_part("localization", subgroup_differences=(apart, alike)), "localization by subgroup")
    assert found.conclusion == "not decided"
    assert found.reason == f"B differs, but perhaps by less than the margin: {HARDLY_DECIDABLE}"
    wide = alike.model_copy(update={"level": "B", "conclusion": "undecided", "difference": num(0.0, 0.2)})
    reason = one_of(with_part("localization", subgroup_differences=(wide, small)), "localization by subgroup").reason
    assert reason == f"the interval includes the margin: more images are needed; {few.reason}"


# Faithfulness


def ranking(**over: tuple[float, ...]) -> Summary:
    """Of each metric, fill by fill, by how much it is better than the best map that knows nothing, ± 0.1."""
    lines = [
        MetricSummary(
            metric=metric.replace("_", "-"),
            method="gradcam",
            layer=None,
            finding="nodule",
            control=False,
            better_direction="more",
            imputation=fill,
            value=num(0.5, 0.1),
            difference_to_control=num(gap, 0.1),
        )
        for metric, gaps in over.items()
        for gap, fill in zip(gaps, ("mean", "blur") if len(gaps) > 1 else (None,), strict=False)
    ]
    return with_part("faithfulness", metric_summaries=tuple(lines))


@pytest.mark.parametrize(
    ("over", "word", "shown", "reason"),
    [
        (
            {"deletion": (0.4, 0.3), "insertion": (0.5, 0.2), "road": (0.6,), "lerf_morf_gap": (0.3, 0.9)},
            "supported",
            0.2,
            "shown is the weakest metric, Insertion with the imputation blur",
        ),
        (
            {"deletion": (-0.4, -0.3), "insertion": (0.05, 0.0), "road": (-0.2,), "lerf_morf_gap": (0.0, 0.0)},
            "not supported",
            -0.4,
            "the maps are worse than the best control map by Deletion and ROAD, not clearly different",
        ),
        (
            {"deletion": (0.4, 0.3), "insertion": (-0.4, -0.3)},
            "not decided",
            -0.4,
            "the metrics do not all agree: better than the best control map by Deletion, worse than",
        ),
        (
            {"deletion": (-0.4, -0.3), "insertion": (0.4, 0.0)},
            "not decided",
            0.0,
            "worse than the best control map by Deletion",
        ),
        (
            {"deletion": (0.4, -0.3), "road": (0.5,)},
            "not decided",
            -0.3,
            "better than the best control map by ROAD, not clearly different by Deletion",
        ),
        ({"deletion": (0.05, 0.05), "road": (0.05,)}, "not decided", 0.05, "the interval includes the margin"),
        ({"lerf_morf_gap": (-0.4, 0.0)}, "not decided", -0.4, "no metric is better or worse than the best control map"),
    ],
)
def test_maps_are_faithful_by_every_metric_that_goes_by_their_order(over, word, shown, reason):
    found = one_of(ranking(**over), "faithfulness")
    assert (found.conclusion, found.effect.value) == (word, shown)
    assert reason in found.reason


# Ways of looking


@pytest.mark.parametrize(
    ("claimed", "patients", "word", "reason"),
    [
        (2, 24, "supported", "the clusters reappear in subsamples more often than expected for a single cluster"),
        (
            1,
            24,
            "not decided",
            "one cluster was found, but among 24 patients two clusters are often missed: 100 are needed",
        ),
        (
            1,
            99,
            "not decided",
            "one cluster was found, but among 99 patients two clusters are often missed: 100 are needed",
        ),
        (
            1,
            100,
            "not supported",
            "no number of clusters reappears in subsamples more often than expected for a single cluster; a cluster of fewer "
            "than 30 % of the maps is often missed",
        ),
    ],
)
def test_few_maps_do_not_say_that_there_is_one_way_of_looking(claimed, patients, word, reason):
    ways = full().shortcut.cluster_analyses[0].model_copy(update={"n_clusters": claimed, "n_patients": patients})
    found = one_of(with_part("shortcut", cluster_analyses=(ways,)), "clusters")
    assert (found.conclusion, found.reason, found.effect.n_groups) == (word, reason, patients)
    assert "no interval" in found.effect.reason


# The page


@pytest.mark.slow
def test_the_page_says_why_there_is_no_interval_and_that_a_difference_may_not_matter():
    pytest.importorskip("jinja2")
    from camscope.audit.report.render_html_page import render_page
    from tests.report_consistency import find_unsupported_claims

    whole = full(findings=("nodule",))
    few = summarize_estimate(estimate_mean([0.1, 0.2, 0.3]))
    found = whole.predict.performance[0].model_copy(update={"brier": few})
    summary = whole.model_copy(update={"predict": whole.predict.model_copy(update={"performance": (found,)})})
    html = render_page(summary)
    assert "too few patients for an interval: 3, and 6 are needed" in html
    assert "different <small>but perhaps by less than the margin</small>" in html
    assert find_unsupported_claims(html, summary.model_dump(mode="json")) == []


def test_rules_and_comments_state_the_numbers_that_the_code_goes_by():
    rules = {one.question: one.rule for one in derive_verdicts(full())}
    assert all(f"not decided with fewer than {MIN_PATIENTS_FOR_VERDICT} patients" in rule for rule in rules.values())
    assert f"less than {SAME_MAP_SIMILARITY}" in rules["sanity"]
    assert all(f"under at least {MIN_IMPUTATIONS} imputations" in rules[name] for name in ("shortcut", "ground truth"))
    assert f"among at least {MIN_PATIENTS_FOR_SINGLE_CLUSTER} patients" in rules["clusters"]
    assert all(name in rules["faithfulness"] for name in FAITHFULNESS_VERDICT_METRICS)
    assert all("rule of three" in rules[name] for name in ("shortcut", "ground truth", "shortcut by subgroup"))
    assert "rule of three" not in rules["performance by subgroup"]
    for share in (0.05, 0.1):
        assert (
            compute_min_detectable_prevalence(compute_min_patients_to_detect(share))
            <= share
            < compute_min_detectable_prevalence(compute_min_patients_to_detect(share) - 1)
        )
        assert (
            f"{share} takes {compute_min_patients_to_detect(share)} patients" in MARGIN_COMMENTS["reliance_prevalence"]
        )


@pytest.mark.parametrize(
    ("low", "high", "word"),
    [(0.2, 0.4, "supported"), (0.11, 0.2, "supported"), (0.05, 0.2, "not decided"), (-0.05, 0.09, "not supported")],
)
def test_a_reliance_is_judged_as_its_rule_says(low, high, word):
    # "the interval of an insertion lies wholly beyond the margin"; "every interval that counts lies within the margin"
    effect = EstimateSummary(value=(low + high) / 2, low=low, high=high, n_values=80, n_groups=80)
    shown = SimpleNamespace(imputation=None, effect=effect)
    assert judge_reliance([shown], [], 0.1)[0] == word


def test_an_insertion_that_could_not_be_tried_says_what_is_lacking():
    # two images of one patient, both with the region: nothing of it is missing but other patients
    truths = {0: True, 1: False}
    cohort = SimpleNamespace(get_truth_by_row=lambda finding: truths, patients={0: "a", 1: "a"})
    context = SimpleNamespace(cohort=cohort, config=SimpleNamespace(seed=0))
    mask = np.ones((2, 2), np.bool_)
    scenes = [SimpleNamespace(row=row, regions={"border": mask}) for row in truths]

    def run_insertion(log_odds):
        predictions = Predictions([0, 1], ("f",), np.array(log_odds)[:, None], np.empty((2, 0), np.float32), {})
        runner = InterventionRunner(context, SimpleNamespace(samples=scenes), SimpleNamespace(name="f"), predictions)
        return runner._run_insertion("border").effect

    effect = run_insertion([1.0, -1.0])
    assert effect.value is None
    assert (
        effect.reason
        == "an insertion needs three patients: a receiver, a donor with the region and a control without it"
    )
    assert run_insertion([1.0, 1.0]).reason == "the model gives every image the same score"


@pytest.mark.parametrize(
    ("patients", "text"),
    [
        (1, "There is only 1 patient: there are no intervals, and no verdict is given."),
        (7, "There are only 7 patients: intervals are wide, and no verdict is given."),
        (12, "There are only 12 patients: intervals are wide, and some questions may not be decided."),
    ],
)
def test_a_warning_of_few_patients_says_what_follows_from_so_few(patients, text):
    whole = full()
    few = whole.model_copy(
        update={"check": whole.check.model_copy(update={"n_patients": patients, "has_patient_column": True})}
    )
    assert text in list(list_warnings(few))
