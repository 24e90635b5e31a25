"""Interventions: on nets whose answer is known by hand, and on nets that were taught a shortcut or none."""

import copy
import importlib
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from camscope.audit import demo_dataset_and_model
from camscope.audit.core.stage_result_schema import EstimateSummary
from camscope.audit.core.summary_schema import InterventionEffect
from camscope.audit.performance.compute_log_odds_and_features import compute_softmax_log_odds
from camscope.audit.shortcuts import intervention_effects_and_reliance
from camscope.audit.shortcuts.intervention_effects_and_reliance import judge_reliance
from camscope.audit.shortcuts.region_removal_and_insertion import (
    insert_region,
    match_receivers_donors_and_controls,
    remove_region,
)
from camscope.errors import InputError, UndefinedError
from camscope.metrics.multiway_clustered_mean import estimate_clustered_mean
from camscope.phantom.shortcut_study import draw_study

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # benchmarks/ is not installed
power = importlib.import_module("benchmarks.audit_power")


class Sum(nn.Module):
    """(N,1,H,W) -> (N,2): 0, and the weighted sum of all pixels."""

    def __init__(self, weights):
        super().__init__()
        self.weights = nn.Parameter(weights)

    def forward(self, x):
        total = (x[:, 0] * self.weights).flatten(1).sum(1)
        return torch.stack([torch.zeros_like(total), total], 1)


def compute_log_odds(net, x):
    with torch.no_grad():
        return compute_softmax_log_odds(net(x), 1).numpy().astype(np.float64)


def removed(region, imputation, *args, **options):
    effect = intervention_effects_and_reliance.estimate_removal_effect(*args, **options)
    return InterventionEffect(region=region, finding="lesion", kind="remove", imputation=imputation, effect=effect)


def inserted(region, *args, **options):
    effect = intervention_effects_and_reliance.estimate_insertion_effect(*args, **options)
    return InterventionEffect(region=region, finding="lesion", kind="insert", imputation=None, effect=effect)


# Log odds


def test_log_odds_are_those_of_one_class_against_all_others():
    logits = torch.tensor([[1.0, 2.0, 3.0]], dtype=torch.float64)
    expected = 2 - np.log(np.exp(1) + np.exp(3))
    assert compute_softmax_log_odds(logits, 1).item() == pytest.approx(expected)
    assert compute_softmax_log_odds(logits + 7, 1).item() == pytest.approx(expected)
    chance = logits.softmax(1)[0, 1].item()
    assert expected == pytest.approx(np.log(chance / (1 - chance)))
    assert compute_softmax_log_odds(logits.softmax(1), 1, is_probability=True).item() == pytest.approx(expected)


def test_log_odds_do_not_saturate():
    far = torch.tensor([[0.0, 200.0, -1.0], [0.0, 300.0, -1.0]])  # the softmax of both is 1
    assert compute_softmax_log_odds(far, 1).diff().item() == 100
    probabilities = torch.tensor([[0.0, -400.0]]).softmax(1)  # e^-400 is 0 in float32
    assert compute_softmax_log_odds(probabilities, 1, is_probability=True).isfinite().all()


# Changing images


def test_removing_keeping_and_inserting_change_the_region_and_nothing_else():
    x = torch.rand(3, 2, 6, 6, dtype=torch.float64)
    masks = torch.zeros(3, 6, 6, dtype=torch.bool)
    masks[0, :2, :3], masks[1, 5, 5] = True, True
    before = x.clone()
    for fill in ("mean", "blur", "noise", "zero", "inpainting"):
        without, alone = remove_region(x, masks, fill), remove_region(x, ~masks, fill)
        assert torch.equal(without[~masks[:, None].expand_as(x)], x[~masks[:, None].expand_as(x)])
        assert torch.equal(alone[masks[:, None].expand_as(x)], x[masks[:, None].expand_as(x)])
        assert not torch.equal(without[0], x[0])
        assert torch.equal(without[2], x[2])
    assert torch.allclose(remove_region(x, masks)[1, :, 5, 5], x[1].mean((1, 2)))
    assert (remove_region(x, masks, "zero")[0, :, :2, :3] == 0).all()
    donors = torch.rand_like(x)
    pasted = insert_region(x, masks, donors)
    assert torch.equal(pasted, torch.where(masks[:, None], donors, x))
    assert torch.equal(x, before)


def test_the_exchange_takes_negatives_without_the_region_and_positives_with_it():
    random = np.random.default_rng(0)
    truth, carried = random.random(80) < 0.5, random.random(80) < 0.5
    people = (np.arange(80) // 2).tolist()
    rows, donors, others = match_receivers_donors_and_controls(truth, carried, people, seed=3)
    assert (~truth[rows] & ~carried[rows]).all()
    assert (truth[donors] & carried[donors]).all()
    assert (~truth[others] & ~carried[others]).all()
    assert all(len({people[i] for i in three}) == 3 for three in zip(rows, donors, others, strict=True))
    assert rows.tolist() == np.flatnonzero(~truth & ~carried).tolist()
    counts = np.bincount(donors)[np.flatnonzero(truth & carried)]
    assert counts.max() <= counts.min() + 2
    assert all(
        (a == b).all()
        for a, b in zip(
            match_receivers_donors_and_controls(truth, carried, people, seed=3), (rows, donors, others), strict=True
        )
    )
    assert (match_receivers_donors_and_controls(truth, carried, people, seed=4).donors != donors).any()


def test_the_exchange_makes_do_with_what_there_is_or_says_why_not():
    truth = np.arange(20) % 2 == 0
    everywhere = match_receivers_donors_and_controls(truth, np.ones(20, bool))  # a border: of positives, into negatives
    assert not truth[everywhere.receivers].any()
    assert truth[everywhere.donors].all()
    negative_only = match_receivers_donors_and_controls(
        truth, ~truth
    )  # its donors are negatives, and only positives lack it
    assert truth[negative_only.receivers].all()
    assert not truth[negative_only.donors].any()
    for carried, positive, reason in (
        (np.zeros(20, bool), truth, "no image has the region"),
        (np.ones(20, bool), np.ones(20, bool), "no image can receive the region"),
    ):
        with pytest.raises(UndefinedError, match=reason):
            match_receivers_donors_and_controls(positive, carried)
    with pytest.raises(UndefinedError, match="three patients"):
        match_receivers_donors_and_controls(truth, ~truth, ["one"] * 20)


# Effects


def test_effects_of_a_linear_net_are_its_weights_in_units_of_the_spread():
    weights = torch.zeros(8, 8)
    weights[0, 0], weights[4, 4] = 3.0, 1.0
    net, random = Sum(weights), np.random.default_rng(0)
    x = torch.zeros(40, 1, 8, 8)
    x[:, 0, 4, 4] = torch.from_numpy(random.normal(0, 2, 40)).float()
    x[:20, 0, 0, 0] = 1.0
    masks = torch.zeros(40, 8, 8, dtype=torch.bool)
    masks[:20, 0, 0] = True
    clean = compute_log_odds(net, x)
    unit = clean.std()
    gone = removed(
        "marker",
        "zero",
        clean[:20],
        compute_log_odds(net, remove_region(x[:20], masks[:20], "zero")),
        unit,
    )
    assert (gone.effect.value, gone.effect.n_values) == (pytest.approx(3 / unit), 20)
    given = insert_region(x[20:], masks[:20], x[:20])
    added = inserted("marker", clean[20:], compute_log_odds(net, given), unit, [*"abcdefghij"] * 2)
    assert (added.effect.value, added.effect.n_groups) == (pytest.approx(3 / unit), 10)
    assert (added.effect.low, added.effect.high) == pytest.approx(
        [added.effect.value] * 2, rel=1e-6
    )  # the same for all


def test_effects_that_are_not_there_say_why():
    assert removed("marker", "mean", [], [], 1.0).effect.reason == "no image has the region, or every image has it"
    few = removed("marker", "mean", np.arange(5.0), np.zeros(5), 1.0)
    assert (few.effect.value, few.effect.low, few.effect.n_groups) == (2.0, None, 5)
    assert removed("marker", "mean", [1.0], [0.0], 0.0).effect.reason == "the model gives every image the same score"


# The verdict


def effect(low, high, fill="mean", groups=60):
    summary = EstimateSummary(value=(low + high) / 2, low=low, high=high, n_values=groups, n_groups=groups)
    return InterventionEffect(region="marker", finding="lesion", kind="remove", imputation=fill, effect=summary)


FOR, AGAINST, NOTHING, WIDE = (0.3, 0.5), (-0.5, -0.3), (-0.05, 0.05), (-0.02, 0.3)

RULE = {
    "both": (
        [FOR],
        [FOR, FOR],
        "supported",
        "inserting the region raises the score of the finding by more than the margin; removing it lowers the score",
    ),
    "insertion alone": (
        [FOR],
        [],
        "supported",
        "raises the score of the finding by more than the margin; removal was not tested",
    ),
    "only where it is added": ([FOR], [NOTHING, NOTHING], "supported", "the effect of removal lies within the margin"),
    "only where it is": (
        [NOTHING],
        [FOR, FOR],
        "supported",
        "removing the region lowers the score of the finding by more than the margin; the effect of ins",
    ),
    "a marker of healthy patients": (
        [AGAINST],
        [AGAINST, AGAINST],
        "supported",
        "inserting the region lowers the score of the finding",
    ),
    "insertion open": ([WIDE], [FOR, FOR], "supported", "insertion alone decides nothing"),
    "nothing": (
        [NOTHING],
        [NOTHING, NOTHING],
        "not supported",
        "every effect that counts lies within the margin; with 60 patients, a reliance in fewer than",
    ),
    "nothing, one way": ([], [NOTHING, NOTHING], "not supported", "insertion was not tested"),
    "one fill": ([NOTHING], [FOR], "not decided", "one imputation"),
    "fills disagree": ([NOTHING], [FOR, NOTHING], "not decided", "the imputations disagree"),
    "fills contradict": ([], [FOR, AGAINST], "not decided", "the imputations disagree"),
    "wide": ([WIDE], [NOTHING, NOTHING], "not decided", "more images are needed"),
    "none": ([], [], "not decided", "there is no insertion or removal that counts"),
}


@pytest.mark.parametrize("case", RULE)
def test_the_rule_of_reliance(case):
    insert, remove, word, reason = RULE[case]
    fills = ("mean", "blur")
    found = judge_reliance(
        [effect(*one, None) for one in insert], [effect(*one, fills[i]) for i, one in enumerate(remove)]
    )
    assert found[0] == word
    assert reason in found[1]


def test_reliance_needs_patients_and_a_margin():
    few = [effect(*FOR, None, groups=9)]
    why = "fewer than 10 patients are given the region, have it, or lack it: 9"
    assert judge_reliance(few, []) == ("not decided", why)
    why = "there are fewer than 10 patients with the region: 9"
    assert judge_reliance([], [effect(*FOR, groups=9), effect(*FOR, "blur", groups=9)]) == ("not decided", why)
    assert judge_reliance(few, [effect(*NOTHING), effect(*NOTHING, "blur")])[0] == "not supported"
    assert judge_reliance([], [removed("marker", "mean", [], [], 1.0)]) == (
        "not decided",
        "no image has the region, or every image has it",
    )
    assert judge_reliance([effect(*FOR, None)], [], margin=0.3)[0] == "not decided"
    assert judge_reliance([effect(*FOR, None)], [], margin=0.6)[0] == "not supported"


def test_an_absence_needs_as_many_patients_as_would_have_shown_what_was_declared():
    def found(groups, prevalence=0.05, insert=()):
        return judge_reliance(
            insert, [effect(*NOTHING, fill, groups) for fill in ("mean", "blur")], prevalence=prevalence
        )

    assert 0.95**58 > 0.05 > 0.95**59  # with 58 patients one in twenty is met with less than 95 % certainty
    word, reason = found(58)
    assert word == "not decided"
    assert (
        "fewer than 5.0 % of patients could have been missed: 59 patients are needed to detect 5 %, as the config asks"
        in reason
    )
    word, reason = found(100)
    assert (word, "fewer than 3.0 % of patients could have been missed" in reason) == ("not supported", True)  # 3 / 100
    assert found(59)[0] == found(29, 0.1)[0] == "not supported"
    assert found(28, 0.1)[0] == "not decided"
    assert found(20, insert=[effect(*NOTHING, None, 59)])[0] == "not supported"  # the same question, by another way
    assert (
        judge_reliance([], [effect(*NOTHING, fill, 20) for fill in ("mean", "blur")], must_support=True)[0]
        == "not decided"
    )


@pytest.mark.parametrize(
    ("patients", "share", "size", "most"),
    [(10, 0.05, 3.0, 0), (20, 0.05, 3.0, 0), (40, 0.03, 5.0, 0), (100, 0.05, 3.0, 0.1)],
)
def test_a_rare_large_reliance_is_not_called_absent(patients, share, size, most):
    random, absent = np.random.default_rng(9), 0
    for seed in range(60):
        met, clean = random.random(patients) < share, random.normal(size=patients)
        gone = [clean - size * met - 0.02 * random.normal(size=patients) for _ in range(2)]
        shown = [
            removed("marker", fill, clean, each, 1.0, list(range(patients)), n_resamples=200, seed=seed)
            for fill, each in zip(("mean", "blur"), gone, strict=True)
        ]
        absent += judge_reliance([], shown)[0] == "not supported"
    assert absent <= most * 60


@pytest.mark.parametrize(
    ("receivers", "donors", "others", "lacking"),
    [(12, 16, 9, "9 controls"), (12, 7, 12, "7 donors"), (8, 16, 9, "8 receivers and 9 controls")],
)
def test_where_patients_are_lacking_for_an_insertion_it_says_of_which_kind(receivers, donors, others, lacking):
    n = np.arange(16)
    kinds = {"donors": (n % donors).tolist(), "controls": (n % others).tolist()}
    made = inserted("border", np.zeros(16), 3 + n / 100, 1.0, (n % receivers).tolist(), **kinds)
    why = f"10 patients in each role are needed, and there are {lacking}"
    assert judge_reliance([made], []) == ("not decided", why)
    assert (
        inserted("border", np.zeros(16), 3 + n / 100, 1.0, n.tolist(), **dict.fromkeys(kinds, n.tolist())).effect.reason
        == ""
    )


def test_where_few_patients_lack_a_region_each_is_the_third_before_any_is_so_again():
    for seed in range(100):
        rows, _, others = match_receivers_donors_and_controls(np.arange(27) < 16, np.ones(27, bool), seed=seed)
        assert len(rows) == 11
        assert len(set(others.tolist())) >= 10
        assert (rows != others).all()


@pytest.mark.parametrize(("donors", "word"), [(2, "not decided"), (9, "not decided"), (10, "supported")])
def test_a_region_of_few_donors_says_nothing_of_the_region_however_many_are_given_it(donors, word):
    truth, carried = np.arange(70) < 30, np.arange(70) < donors
    rows, givers, _ = match_receivers_donors_and_controls(truth, carried)
    gain = np.full(len(rows), 3.0) + np.arange(len(rows)) / 100
    made = inserted("marker", np.zeros(len(rows)), gain, 1.0, rows.tolist(), donors=givers.tolist())
    assert (made.effect.n_values, made.effect.n_groups) == (len(rows), donors)
    assert made.effect.low is None if donors < 6 else made.effect.low > 2
    assert judge_reliance([made], [])[0] == word


@pytest.mark.slow
def test_the_interval_of_an_insertion_is_of_other_donors_too():
    def held(draw: int) -> tuple[bool, bool]:
        random = np.random.default_rng(draw)
        rows, givers, others = match_receivers_donors_and_controls(np.arange(110) < 10, np.arange(110) < 10, seed=draw)
        patients = random.normal(0, 0.2, 110) + np.where(np.arange(110) < 10, random.normal(0, 0.4, 110), 0)
        gain = patients[givers] + patients[rows] - patients[others]
        plain = inserted("marker", np.zeros(len(rows)), gain, 1.0, rows.tolist())
        whole = inserted(
            "marker", np.zeros(len(rows)), gain, 1.0, rows.tolist(), donors=givers.tolist(), controls=others.tolist()
        )
        return whole.effect.low <= 0 <= whole.effect.high, plain.effect.low <= 0 <= plain.effect.high

    both, receivers = np.mean([held(draw) for draw in range(200)], axis=0)
    assert both >= 0.9
    assert receivers < 0.7, "ten donors are what makes it uncertain, not a hundred receivers"


def test_a_mean_over_crossed_groups_has_the_variance_of_its_parts():
    rows, columns = np.divmod(np.arange(42), 7)  # 6 x 7, each pair once
    values = np.array([0.0, 1, 2, 9, 4, 5, 6])[columns] + np.array([0.0, 3, 9, 1, 2, 5])[rows]
    made = estimate_clustered_mean(values, rows.tolist(), columns.tolist())
    off = values - values.mean()
    by_row, by_column = (
        sum(off[kind == one].sum() ** 2 for one in range(n)) / 42**2 * n / (n - 1)
        for kind, n in ((rows, 6), (columns, 7))
    )
    variance = by_row + by_column - (off**2).sum() / 42**2 * 42 / 41
    assert made.mean == values.mean()
    assert (made.n_values, made.n_groups) == (42, 6)
    assert made.high - made.mean == pytest.approx(2.5705818366147395 * variance**0.5)  # Student's t of 5 degrees
    assert estimate_clustered_mean(values, columns.tolist()).high == pytest.approx(
        values.mean() + 2.4469118511449692 * by_column**0.5
    )
    assert np.isnan(estimate_clustered_mean(values, ["one"] * 42, columns.tolist()).low)
    assert np.isnan(estimate_clustered_mean(values[:35], rows[:35].tolist()).low)  # five rows
    with pytest.raises(InputError, match="finite"):
        estimate_clustered_mean([1.0, np.nan])


def test_one_patient_with_most_of_the_images_gives_no_interval_and_no_verdict():
    random, patients = np.random.default_rng(2), np.r_[np.zeros(160, np.int64), 1 + np.arange(40) % 19]
    clean = random.normal(size=200)
    gone = [
        removed("marker", fill, clean, clean - 3, 1.0, patients.tolist(), n_resamples=200) for fill in ("mean", "blur")
    ]
    for one in gone:  # 3 in every image: without most of one patient that has an interval, which is a point
        assert (one.effect.value, one.effect.low, one.effect.high) == (pytest.approx(3.0), None, None)
        assert "one patient has 80 % of the images: they weigh as 1.6 patients" in one.effect.reason
    assert judge_reliance([], gone)[0] == "not decided"
    pasted = inserted("marker", clean, clean + random.normal(3, 1, 200), 1.0, donors=patients.tolist())
    assert (pasted.effect.low, pasted.effect.high) == (None, None)
    assert "one of the donors has 80 % of the insertions" in pasted.effect.reason
    assert judge_reliance([pasted], []) == ("not decided", pasted.effect.reason)
    assert pasted.effect.interval_method == ""
    even = inserted("marker", clean, clean + random.normal(3, 1, 200), 1.0, donors=(np.arange(200) % 20).tolist())
    assert judge_reliance([even], [])[0] == "supported"


def test_donors_that_are_not_one_each_or_have_no_effect_to_be_of_are_handled():
    assert (
        inserted("marker", [], [], 1.0, [], donors=[]).effect.reason == "no image has the region, or every image has it"
    )
    for receivers, donors in ((["a", "a"], ["b", "c"]), (["a", "b"], ["c", "c"])):
        made = inserted("marker", [0.0, 1.0], [1.0, 2.0], 1.0, receivers, donors=donors)
        assert (made.effect.value, made.effect.low, made.effect.n_groups) == (1.0, None, 1)
    with pytest.raises(InputError, match="2 rows and 1 group"):
        inserted("marker", [0.0, 1.0], [1.0, 2.0], 1.0, ["a", "b"], donors=["c"])


# What it finds


@dataclass(frozen=True)
class Case:
    p: float
    net: nn.Module
    study: object


@pytest.fixture(scope="module")
def cases():
    made = {}
    for p in (0.5, 0.8, 0.95):
        made[p] = Case(
            p, demo_dataset_and_model._train_demo_model(p, 0), draw_study(200, 32, p)
        )  # two of them are trained once for all tests
    return made


def test_clean_and_confounded_nets_are_told_apart_and_the_effect_grows_with_the_dose(cases):
    found = {p: power.judged(case.net, case.study) for p, case in cases.items()}
    assert [one.word for one in found.values()] == ["not supported", "supported", "supported"]
    dose = [one.insert[0].effect.value for one in found.values()]
    assert abs(dose[0]) < 0.1 < dose[1] < dose[2]
    assert all(one.effect.value > 0.15 for p in (0.8, 0.95) for one in found[p].remove)


@pytest.mark.slow
def test_saturated_probabilities_change_no_verdict_and_no_effect(cases):
    class Louder(nn.Module):
        def __init__(self, net, scale, bias):
            super().__init__()
            self.net, self.scale, self.bias = copy.deepcopy(net).double(), scale, torch.tensor([0.0, bias])

        def forward(self, x):
            return self.net(x.double()) * self.scale + self.bias

    for case in (cases[0.5], cases[0.8]):
        plain = power.judged(Louder(case.net, 1.0, 0.0), case.study)
        for scale, bias in ((1.0, 8.0), (12.0, 0.0), (0.1, 2.0)):
            net = Louder(case.net, scale, bias)
            found = power.judged(net, case.study)
            assert (found.word, found.reason) == (plain.word, plain.reason)
            for one, other in zip((*found.insert, *found.remove), (*plain.insert, *plain.remove), strict=True):
                assert one.effect.value == pytest.approx(other.effect.value, rel=1e-9, abs=1e-12)
                assert one.effect.low == pytest.approx(other.effect.low, rel=1e-9, abs=1e-12)


def test_too_few_images_accuse_nobody_and_clear_nobody(cases):
    case = cases[0.95]
    assert power.judged(case.net, case.study.select(np.arange(14))).word == "not decided"
