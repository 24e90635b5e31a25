"""Plausible slips in the metrics that ask the model; see `mutants`."""

from functools import partial

from camscope.metrics import average_drop_and_gain, deletion_insertion, imputation, perturbation_test
from camscope.metrics.model_scorer import ModelScorer
from camscope.metrics.perturbation_test import PerturbationTest
from tests.metrics import test_deletion_insertion as faithful
from tests.mutants import Mutant

BY_HAND = faithful.test_a_linear_model_by_hand
deletion_by_hand = partial(BY_HAND, "deletion", {}, 3.75)
insertion_by_hand = partial(BY_HAND, "insertion", {}, 6.25)
probability_by_hand = partial(
    BY_HAND, "necessity", {"share": 0.25, "output_kind": "probability"}, faithful.sigmoid(10) - faithful.sigmoid(6)
)
neighbors = partial(faithful.test_imputed_pixels_are_the_weighted_means_of_their_neighbors, (6, 7))

OF_FAITHFULNESS = [
    Mutant(
        "the weakest first", perturbation_test, "rank_regions", "descending=True", "descending=False", deletion_by_hand
    ),
    Mutant(
        "ties from the top left",
        perturbation_test,
        "rank_regions",
        'torch.randperm(n_regions, generator=torch.Generator(device="cpu").manual_seed(seed), device="cpu")',
        "torch.arange(n_regions)",
        faithful.test_ties_are_a_seeded_random_order_and_a_constant_map_starts_nowhere,
    ),
    Mutant(
        "a sum of steps", deletion_insertion, "_compute_area_under_curve", " / test.n_regions", "", deletion_by_hand
    ),
    Mutant(
        "one too many kept",
        PerturbationTest,
        "_score_removal_points",
        "ranks >= self.n_regions - count",
        "ranks > self.n_regions - count",
        insertion_by_hand,
    ),
    Mutant(
        "the score for its chance",
        ModelScorer,
        "_compute_score_and_probability",
        "score if self._gives_probabilities else",
        "score if True else",
        probability_by_hand,
    ),
    Mutant("diagonals count in full", imputation, "_sum_neighbors", "2 * last", "1 * last", neighbors),
    Mutant(
        "MoRF less LeRF",
        deletion_insertion,
        "compute_road_gap_per_share",
        "weakest - strongest",
        "strongest - weakest",
        faithful.test_road_by_hand,
    ),
    Mutant(
        "a drop may be negative",
        average_drop_and_gain,
        "_compute_relative_drop",
        ".clamp(min=0)",
        "",
        faithful.test_what_speaks_against_is_masked_away_and_raises_the_score,
    ),
    Mutant(
        "what is left for what is lost",
        PerturbationTest,
        "_compute_drops",
        "self.scorer.clean_scores[..., None] - scores",
        "scores",
        faithful.test_infidelity_by_hand,
    ),
]
