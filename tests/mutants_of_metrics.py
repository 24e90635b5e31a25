"""Plausible slips in what measures maps; see `mutants`."""

import numpy as np
import torch
from torch import nn

from camscope.evaluation import method_summaries
from camscope.explainers import InputXGradient, Saliency
from camscope.metrics import (
    Estimate,
    average_precision,
    centroid_distance,
    estimate_mean,
    iou_otsu,
    jaccard,
    jackknife_variance,
    localization,
    map_similarity,
    mean_estimates,
    randomization_result,
    sensitivity_to_noise,
    spearman,
    stability_under_transforms,
    weight_randomization,
)
from camscope.metrics.explain_changed_inputs import ExplainerProbe
from camscope.metrics.input_transforms import Rotation, Shift
from camscope.metrics.sensitivity_to_noise import max_sensitivity
from camscope.metrics.stability_under_transforms import compare_under_transforms
from tests.mutants import Mutant
from tests.nets import Flat

HEAT = np.array([[10.0, 6.0, 8.0, 0.0], [0.0, 0.0, 4.0, -3.0], [0.0, 0.0, 0.0, 0.0]])
MASK = np.zeros((3, 4), bool)
MASK[:2, :2] = True
SMOOTH = sum(torch.sin(torch.arange(40.0, dtype=torch.float64) / 4).view(shape) for shape in ((-1, 1), (1, -1)))[
    None, None
]


def flat_head(rows: list[list[float]]) -> Flat:
    model = Flat(nn.Identity(), len(rows[0]), len(rows)).double()
    model.head.weight.data[:] = torch.tensor(rows)
    model.head.bias.data[:] = 0
    return model


def otsu_is_by_hand() -> None:
    assert abs(iou_otsu(HEAT, MASK) - 2 / 6) < 1e-9


def a_center_of_mass_is_by_hand() -> None:
    found = centroid_distance(HEAT, MASK, spacing=(2.0, 10.0))
    assert abs(found - np.hypot(2 * (4 / 28 - 0.5), 10 * (30 / 28 - 0.5))) < 1e-9


def what_is_negative_is_not_counted() -> None:
    assert average_precision(-HEAT, MASK) < 0.5
    assert centroid_distance(HEAT - 100 * (HEAT < 0), MASK) == centroid_distance(HEAT, MASK)


def tied_ranks_are_means() -> None:
    assert abs(spearman([0.0, 0.0, 5.0, 7.0], [1.0, 2.0, 3.0, 4.0]) - 4.5 / 22.5**0.5) < 1e-9


def ties_share_the_room() -> None:
    one, other = np.zeros(20), np.zeros(20)
    one[:3], other[1:3] = 3.0, [5.0, 6.0]
    assert abs(jaccard(one, other) - 0.5) < 1e-9


def groups_are_drawn_whole() -> None:
    found = estimate_mean(np.repeat(np.arange(8.0), 9), np.repeat(np.arange(8), 9).tolist())
    assert found.n_groups == 8
    assert found.high - found.low > 3  # 1.5 with 72


def few_groups_have_a_wide_interval() -> None:
    values = np.arange(6.0)
    found = estimate_mean(values, n_resamples=20_000)
    plain = values[np.random.default_rng(1).integers(0, 6, (20_000, 6))].mean(1)
    assert found.high - found.low > 1.15 * np.diff(np.quantile(plain, [0.025, 0.975]))[0]


def shares_of_patients_are_wider() -> None:
    values, patients = np.repeat([1.0] * 15 + [0.0] * 5, 3), np.repeat(np.arange(20), 3).tolist()
    whole, each = (estimate_mean(values, groups, bounds=(0.0, 1.0)) for groups in (patients, None))
    assert whole.high - whole.low > 1.5 * (each.high - each.low)


def rounding_is_no_difference() -> None:
    values = 1 + np.random.default_rng(0).random(20)
    assert mean_estimates.estimate_difference(values * (1 + 1e-12), values).p_value == 1


def every_pair_of_methods_is_corrected_for() -> None:
    made = [
        method_summaries.MethodSummary("enrichment", name, None, False, Estimate(1.0, 0.0, 2.0, 9, 9))
        for name in "abcde"
    ]
    assert (
        method_summaries._correct_multiple_comparisons({"enrichment": made}, (), None, None)["enrichment"][
            0
        ].n_comparisons
        == 10
    )


def a_map_moves_with_its_picture() -> None:
    model = flat_head([[1.0] * 1600, [0.0] * 1600])
    for change in (Shift(3), Rotation(10)):
        (found,) = compare_under_transforms(
            InputXGradient(model), SMOOTH, 0, transforms=[change], similarity="pearson", max_probability_change=2.0
        )
        assert found.similarity is not None
        assert found.similarity > 0.999


def only_what_both_show_is_compared() -> None:
    a_map_moves_with_its_picture()


def the_class_is_that_of_the_clean_input() -> None:
    model = flat_head([[1.0, 0.0, 3.0, 0.0], [0.0, 2.0, 0.0, 5.0]])
    x = torch.tensor([[[[1.0, 0.0], [1.0, 0.0]]]], dtype=torch.float64)
    maps = ExplainerProbe.from_explainer(Saliency(model), x).compute_maps(1 - x, [0])
    np.testing.assert_allclose(maps[0], [[1.0, 0.0], [3.0, 0.0]])


def noise_is_in_shares_of_the_range() -> None:
    model = flat_head([[1.0] * 1600, [0.0] * 1600])
    one, other = (max_sensitivity(InputXGradient(model), x, 0) for x in (SMOOTH, 9 * SMOOTH))
    assert abs(one - other) < 1e-6


def batch_norm_forgets() -> None:
    model = nn.Sequential(nn.BatchNorm2d(2))
    model[0].running_mean += 3
    weight_randomization.randomize_modules(model, ["0"], 0)
    assert not model[0].running_mean.any()


def a_reset_leaves_the_random_numbers() -> None:
    torch.manual_seed(1)  # another than that of the reset
    model, state = nn.Linear(2, 2), torch.get_rng_state()
    weight_randomization.randomize_modules(model, [""], 0)
    assert torch.equal(torch.get_rng_state(), state)


def the_same_map_fails_whatever_the_null() -> None:
    assert not randomization_result.judge_final_similarity(np.ones(3), (1.0, 1.0, 1.0)).passes
    assert not randomization_result.judge_final_similarity(np.array([0.1, np.nan, np.nan]), (0.2, 0.3, 0.4)).passes
    assert randomization_result.judge_final_similarity(np.array([0.1, 0.1]), (0.2, 0.3, 0.4)).passes


def the_null_is_as_wide_as_so_many_images_make_it() -> None:
    pairs = np.random.default_rng(0).random((25, 25))
    np.fill_diagonal(pairs, np.nan)
    low, _, high = randomization_result.compute_null_interval(pairs)
    assert 0.18 < high - low < 0.28


def one_patient_with_a_third_of_the_images_is_uncertain() -> None:
    values, patients = np.r_[np.zeros(66), np.tile([0.9, 1.1], 67)], [*["first"] * 66, *range(134)]
    found = mean_estimates.estimate_difference(values, np.zeros(200), patients)
    assert found.low < 0 < found.high


def one_patient_with_most_of_the_images_has_no_interval() -> None:
    found = mean_estimates.estimate_difference(
        np.random.default_rng(0).random(100), np.zeros(100), [*["first"] * 80, *range(20)]
    )
    assert found.p_value is None


OF_METRICS = [
    Mutant(
        "what groups differ by, and not without each",
        jackknife_variance,
        "compute_jackknife_deviations",
        " / (1 - shares)",
        "",
        one_patient_with_a_third_of_the_images_is_uncertain,
    ),
    Mutant(
        "groups are counted, not weighed",
        jackknife_variance,
        "count_effective_groups",
        "counts.sum() ** 2 / (counts**2).sum()",
        "len(counts)",
        one_patient_with_most_of_the_images_has_no_interval,
    ),
    Mutant(
        "within, not between",
        localization,
        "compute_otsu_threshold",
        "between.argmax()",
        "between.argmin()",
        otsu_is_by_hand,
    ),
    Mutant(
        "axes mixed",
        localization,
        "_compute_center_of_mass",
        "for profile in sums",
        "for profile in sums[::-1]",
        a_center_of_mass_is_by_hand,
    ),
    Mutant(
        "both signs",
        localization,
        "_clip_negatives_and_check_mask",
        "positive_part(attribution)",
        "abs(np.asarray(attribution))",
        what_is_negative_is_not_counted,
    ),
    Mutant("first of equals", map_similarity, "rank_values", "(counts - 1) / 2", "(counts - 1)", tied_ranks_are_means),
    Mutant(
        "every tie a member",
        map_similarity,
        "_compute_top_membership",
        "(n_top - above.sum()) / tied.sum()",
        "1.0",
        ties_share_the_room,
    ),
    Mutant(
        "images drawn",
        mean_estimates,
        "index_groups",
        "[numbers[all_groups[i]] for i in row_indices.tolist()]",
        "np.arange(len(row_indices))",
        groups_are_drawn_whole,
    ),
    Mutant(
        "plain percentiles",
        mean_estimates,
        "compute_bootstrap_interval",
        "NormalDist().cdf(-compute_interval_multiplier(size, confidence_level))",
        "(1 - confidence_level) / 2",
        few_groups_have_a_wide_interval,
    ),
    Mutant(
        "a share of images, not of patients",
        mean_estimates._GroupedValues,
        "_compute_effective_sample_size",
        "max(by_group, by_image)",
        "by_image",
        shares_of_patients_are_wider,
    ),
    Mutant(
        "rounding is a difference",
        mean_estimates,
        "estimate_difference",
        "] = 0.0",
        "] += 0.0",
        rounding_is_no_difference,
    ),
    Mutant(
        "only pairs with the first",
        method_summaries,
        "_correct_multiple_comparisons",
        "comb(len(methods), 2)",
        "(len(methods) - 1)",
        every_pair_of_methods_is_corrected_for,
    ),
    Mutant("shifted twice", Shift, "compute_placement", "-np.array", "np.array", a_map_moves_with_its_picture),
    Mutant(
        "turned twice",
        Rotation,
        "apply",
        "self.compute_placement",
        "Rotation(-self.degrees).compute_placement",
        a_map_moves_with_its_picture,
    ),
    Mutant(
        "the uncovered is zero",
        stability_under_transforms,
        "_compute_similarity_on_covered_pixels",
        "(clean_map[covered_mask], transformed_map[covered_mask])",
        "(clean_map, transformed_map)",
        only_what_both_show_is_compared,
    ),
    Mutant(
        "asked anew",
        ExplainerProbe,
        "explain",
        "self.select_targets(sample_index[part])",
        "None",
        the_class_is_that_of_the_clean_input,
    ),
    Mutant(
        "noise of one level",
        sensitivity_to_noise,
        "_compute_sensitivities",
        "float(x.max() - x.min())",
        "1.0",
        noise_is_in_shares_of_the_range,
    ),
    Mutant(
        "random numbers moved on",
        weight_randomization,
        "randomize_modules",
        "torch.set_rng_state(random_state)",
        "pass",
        a_reset_leaves_the_random_numbers,
    ),
    Mutant(
        "permuted, not reset", weight_randomization, "_randomize_module", "callable(reset)", "False", batch_norm_forgets
    ),
    Mutant(
        "a null of one forgives",
        randomization_result,
        "judge_final_similarity",
        "last >= SAME_MAP_SIMILARITY",
        "last > SAME_MAP_SIMILARITY + 1",
        the_same_map_fails_whatever_the_null,
    ),
    Mutant(
        "most have no number",
        randomization_result,
        "judge_final_similarity",
        "np.isnan(final_similarities).mean() > 0.5",
        "np.isnan(final_similarities).mean() > 0.9",
        the_same_map_fails_whatever_the_null,
    ),
    Mutant(
        "quantiles of pairs",
        randomization_result,
        "compute_null_interval",
        "np.mean([random.choice(row, N_NULL_RESAMPLES) for row in rows], axis=0)",
        "np.concatenate(rows)",
        the_null_is_as_wide_as_so_many_images_make_it,
    ),
]
