"""Plausible slips in the rules of an audit; see `mutants`."""

import numpy as np

from camscope import mask_labels
from camscope.audit.core import convert_to_summary_entries
from camscope.audit.core.stage_result_schema import EstimateSummary, MetricSummary
from camscope.audit.core.summary_schema import InterventionEffect
from camscope.audit.report import data_and_method_sentences
from camscope.audit.shortcuts import intervention_effects_and_reliance, region_attribution
from camscope.audit.verdicts import map_verdicts, model_and_data_verdicts
from camscope.audit.verdicts import verdict_rules as judged
from camscope.errors import CategoryError
from tests.audit.report import test_sentences as said
from tests.audit.verdicts import test_verdicts as rules
from tests.mutants import Mutant


def the_whole_interval_counts() -> None:
    one = EstimateSummary(value=0.8, low=0.6, high=0.9, n_values=10, n_groups=10)
    assert judged.decide_above_margin(one, 0.7)[0] == "not decided"


def a_share_is_of_what_is_positive() -> None:
    heat, mask = np.array([1.0, 3.0, -8.0]), np.array([True, False, True])
    assert region_attribution.compute_mass_share(heat, mask) == 0.25


def turned_round() -> None:
    rules.test_answers_that_are_turned_round_are_answers_too((0.03, 0.1), 0.02, "supported", (0.97, 0.95, 0.99))


def open_against_a_control() -> None:
    one = MetricSummary(
        metric="enrichment",
        method="gradcam",
        layer=None,
        finding="nodule",
        control=False,
        better_direction="more",
        imputation=None,
        value=EstimateSummary(value=4.0, low=3.0, high=5.0),
        difference_to_control=EstimateSummary(value=0.2, low=-0.3, high=0.7, n_groups=10),
    )
    assert map_verdicts._decide_above_control(one)[0] == "not decided"


def one_donor() -> None:
    assert (
        intervention_effects_and_reliance.estimate_insertion_effect(
            np.zeros(20), np.arange(20.0), 1.0, donors=["one"] * 20
        ).low
        is None
    )


def few_patients_show_no_absence() -> None:
    clean = np.random.default_rng(0).normal(size=20)
    effect = intervention_effects_and_reliance.estimate_removal_effect(clean, clean, 1.0)
    gone = [
        InterventionEffect(region="marker", finding="nodule", kind="remove", imputation=fill, effect=effect)
        for fill in ("mean", "blur")
    ]
    assert intervention_effects_and_reliance.judge_reliance([], gone)[0] == "not decided"
    assert intervention_effects_and_reliance.judge_reliance([], gone, prevalence=0.2)[0] == "not supported"


def several_categories() -> None:
    assert mask_labels.choose_categories(["WBC"], [], "cells.json") == ("WBC",)
    try:
        merged = mask_labels.choose_categories(["WBC", "RBC"], [], "cells.json")
    except CategoryError:
        merged = ()
    assert merged == ()


def one_patient_has_most_of_the_images() -> None:
    patients = [*["one"] * 80, *range(20)]
    assert (
        intervention_effects_and_reliance.estimate_removal_effect(np.ones(100), np.zeros(100), 1.0, patients).low
        is None
    )


OF_AUDITS = [
    Mutant(
        "an interval without width of one patient",
        convert_to_summary_entries,
        "summarize_estimate",
        "not (has_few_patients or estimate.is_dominated_by_few_groups)",
        "not has_few_patients",
        one_patient_has_most_of_the_images,
    ),
    Mutant(
        "the value for the interval",
        judged,
        "decide_above_margin",
        "estimate.low > margin",
        "estimate.value > margin",
        the_whole_interval_counts,
    ),
    Mutant(
        "a fill decides where every image has something",
        model_and_data_verdicts,
        "_judge_reliance",
        "removals if is_marker else []",
        "removals",
        rules.test_a_region_that_every_image_has_is_judged_by_insertion_whatever_a_fill_does,
    ),
    Mutant(
        "one fill is enough",
        judged,
        "require_agreement",
        "if len(conclusions) == 1:",
        "if conclusions:",
        rules.test_fills_that_disagree_on_the_blanked_organ_decide_nothing,
    ),
    Mutant(
        "an inverted answer is none",
        model_and_data_verdicts,
        "_is_inverted",
        "auroc.value < 0.5",
        "auroc.value < 0",
        turned_round,
    ),
    Mutant(
        "what is open counts as an accusation",
        map_verdicts,
        "_decide_above_control",
        "difference.high <= 0",
        "difference.low <= 0",
        open_against_a_control,
    ),
    Mutant(
        "the largest effect is shown, whatever decided",
        intervention_effects_and_reliance,
        "select_reported_effect",
        "effects_by_kind.get(deciding_kind, [])",
        "counted",
        rules.test_the_effect_is_that_of_the_way_that_decided,
    ),
    Mutant(
        "any patients show an absence",
        intervention_effects_and_reliance,
        "explain_too_few_patients",
        "compute_min_detectable_prevalence(n_patients) <= prevalence",
        "n_patients > 0",
        few_patients_show_no_absence,
    ),
    Mutant(
        "donors are not counted",
        intervention_effects_and_reliance,
        "estimate_insertion_effect",
        "estimate_clustered_mean(values, *roles.values())",
        'estimate_clustered_mean(values, roles["receivers"])',
        one_donor,
    ),
    Mutant(
        "a control is not asked",
        map_verdicts,
        "_decide_sanity",
        "if control.passes:",
        "if False:",
        rules.test_randomization_says_nothing_where_the_edge_detector_passes_too,
    ),
    Mutant(
        "what could not be tested clears a model",
        data_and_method_sentences,
        "explain_missing_contradictions",
        "if not set(conclusions) & set(DECIDED_CONCLUSIONS)",
        "if False",
        said.test_ten_questions_that_could_not_be_tested_clear_nobody,
    ),
    Mutant(
        "what was set aside was not tested",
        intervention_effects_and_reliance,
        "_explain_uncounted_effects",
        "if _select_effects_with_value(uncounted_removals)",
        "if False",
        said.test_a_removal_that_is_shown_was_tested,
    ),
    Mutant(
        "categories are merged",
        mask_labels,
        "choose_categories",
        "not chosen and len(names) > 1",
        "False",
        several_categories,
    ),
    Mutant(
        "negative heat counts",
        region_attribution,
        "compute_mass_share",
        "np.maximum(attribution, 0)",
        "np.abs(attribution)",
        a_share_is_of_what_is_positive,
    ),
]
