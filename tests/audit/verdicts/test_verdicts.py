"""The rules of verdicts, by numbers worked out by hand, and masses of maps in regions, by maps of few pixels."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("pydantic")
pytest.importorskip("pyarrow")

import pyarrow

from camscope.audit.core.convert_to_summary_entries import PATIENT_COLUMN, summarize_metrics
from camscope.audit.core.stage_result_schema import EstimateSummary, RandomizationSimilarity, RandomizationTest
from camscope.audit.core.summary_schema import InterventionEffect, MaskedAuroc, Summary
from camscope.audit.shortcuts.region_attribution import (
    _summarize_values,
    compute_confounder_sensitivity,
    compute_mass_share,
)
from camscope.audit.verdicts import derive_verdicts
from camscope.audit.verdicts.verdict_rules import decide_above_margin
from tests.audit_summary import full, levels, num


@pytest.mark.parametrize(
    ("low", "high", "word"),
    [(0.71, 0.9, "supported"), (0.5, 0.69, "not supported"), (0.6, 0.8, "not decided"), (None, None, "not decided")],
)
def test_an_interval_has_to_lie_wholly_on_one_side_of_the_margin(low, high, word):
    assert decide_above_margin(EstimateSummary(value=0.7, low=low, high=high, n_values=10, n_groups=10), 0.7)[0] == word


def test_what_is_the_margin_throughout_is_not_for_more_images_to_tell():
    flat = EstimateSummary(value=0.0, low=0.0, high=0.0, n_values=10, n_groups=10)
    assert decide_above_margin(flat, 0.0) == ("not decided", "every image has the same value, equal to the margin")
    assert "more images" in decide_above_margin(flat.model_copy(update={"high": 0.1}), 0.0)[1]


def told(summary: Summary, question: str, **which: str):
    found = [one for one in derive_verdicts(summary) if one.question == question]
    return [one for one in found if all(getattr(one, name) == value for name, value in which.items())]


def with_shortcut(**parts: object) -> Summary:
    made = full(findings=("nodule",))
    return made.model_copy(update={"shortcut": made.shortcut.model_copy(update=parts)})


def pushed(region: str, kind: str, value: float, spread: float, fill: str | None = None) -> InterventionEffect:
    return InterventionEffect(
        region=region, finding="nodule", kind=kind, imputation=fill, effect=num(value, spread, 80, 60)
    )


def test_a_region_that_every_image_has_is_judged_by_insertion_whatever_a_fill_does():
    filled = [pushed("border", "remove", 5.0, 0.1, fill) for fill in ("mean", "blur")]
    calm = with_shortcut(region_counts={"border": 80}, interventions=(*filled, pushed("border", "insert", 0.0, 0.05)))
    assert [one.conclusion for one in told(calm, "shortcut", qualifier="border")] == ["not supported"]
    marker = calm.model_copy(
        update={"shortcut": calm.shortcut.model_copy(update={"markers_by_finding": {"nodule": ("border",)}})}
    )
    assert [one.conclusion for one in told(marker, "shortcut", qualifier="border")] == ["supported"]


def test_reliance_is_a_worry_on_a_region_and_a_comfort_on_the_finding():
    made = with_shortcut(
        region_counts={"token": 80, "the finding": 80},
        markers_by_finding={"nodule": ("token", "the finding")},
        interventions=(pushed("token", "insert", 0.5, 0.1), pushed("the finding", "insert", 0.5, 0.1)),
    )
    assert told(made, "shortcut", qualifier="token")[0].direction == "contradicts"
    assert told(made, "ground truth")[0].direction == "supports"


def test_a_region_that_nobody_could_try_is_not_testable_and_says_why():
    effect = EstimateSummary(reason="no image to change")
    one = InterventionEffect(region="token", finding="nodule", kind="insert", imputation=None, effect=effect)
    made = told(
        with_shortcut(region_counts={"token": 1}, markers_by_finding={"nodule": ("token",)}, interventions=(one,)),
        "shortcut",
    )[0]
    assert (made.conclusion, made.direction, made.reason) == ("not decided", "neither", "no image to change")


def test_fills_that_disagree_on_the_blanked_organ_decide_nothing():
    def blank(fill: str, area: float) -> MaskedAuroc:
        return MaskedAuroc(region="the organ", finding="nodule", kind="mask", imputation=fill, auroc=num(area, 0.05))

    both = told(with_shortcut(masked_auroc=(blank("mean", 0.9), blank("blur", 0.9))), "masked organ")[0]
    assert (both.conclusion, both.direction) == ("supported", "contradicts")
    one = told(with_shortcut(masked_auroc=(blank("mean", 0.9), blank("blur", 0.5))), "masked organ")[0]
    assert (one.conclusion, one.reason) == ("not decided", "the imputations disagree")
    none = told(with_shortcut(masked_auroc=(blank("mean", 0.5), blank("blur", 0.55))), "masked organ")[0]
    assert (none.conclusion, none.direction) == ("not supported", "supports")
    assert none.effect.value == 0.55  # the fill under which most is left


@pytest.mark.parametrize(
    ("areas", "spread", "word", "shown"),
    [
        ((0.03, 0.1), 0.02, "supported", (0.97, 0.95, 0.99)),
        ((0.0, 0.0), 0.0, "supported", (1.0, 1.0, 1.0)),
        ((0.03, 0.97), 0.02, "supported", (0.97, 0.95, 0.99)),
        ((0.45, 0.5), 0.05, "not supported", (0.55, 0.5, 0.6)),
        ((0.45, 0.45), 0.2, "not decided", (0.55, 0.35, 0.75)),
        ((0.52, 0.52), 0.25, "not decided", (0.52, 0.27, 0.77)),
    ],
)
def test_answers_that_are_turned_round_are_answers_too(areas, spread, word, shown):
    each = [
        MaskedAuroc(region="the organ", finding="nodule", kind="mask", imputation=fill, auroc=num(area, spread))
        for fill, area in zip(("mean", "blur"), areas, strict=True)
    ]
    found = told(with_shortcut(masked_auroc=tuple(each)), "masked organ")[0]
    assert found.conclusion == word
    assert (found.effect.value, found.effect.low, found.effect.high) == pytest.approx(shown)
    assert ("inverted" in found.reason) == (areas[0] < 0.5)


def test_an_inverted_area_whose_interval_reaches_the_other_margin_clears_nobody():
    area = EstimateSummary(value=0.52, low=0.25, high=0.68, n_values=40, n_groups=40)
    one = MaskedAuroc(region="the organ", finding="nodule", kind="mask", imputation="mean", auroc=area)
    assert told(with_shortcut(masked_auroc=(one,)), "masked organ")[0].conclusion == "not decided"


def test_areas_that_there_are_not_decide_nothing_and_are_shown_last():
    none = MaskedAuroc(
        region="the organ", finding="nodule", kind="mask", imputation="mean", auroc=EstimateSummary(reason="one class")
    )
    found = told(with_shortcut(masked_auroc=(none,)), "masked organ")[0]
    assert (found.conclusion, found.reason, found.effect.value) == ("not decided", "one class", None)
    some = none.model_copy(update={"imputation": "blur", "auroc": num(0.5, 0.1)})
    assert told(with_shortcut(masked_auroc=(none, some)), "masked organ")[0].effect.value == 0.5


# The effect that is shown


FILLS = ("mean", "blur")


def shown(region: str, *effects: InterventionEffect):
    made = with_shortcut(region_counts={region: 80}, markers_by_finding={"nodule": (region,)}, interventions=effects)
    return told(made, "ground truth" if region == "the finding" else "shortcut")[0]


def test_the_effect_is_that_of_the_way_that_decided():
    gone = [pushed("token", "remove", value, 0.1, fill) for fill, value in zip(FILLS, (0.4, 0.6), strict=True)]
    found = shown("token", *gone, pushed("token", "insert", 0.0, 0.05))
    assert (found.conclusion, found.effect.value) == ("supported", 0.6)
    found = shown("token", *gone, pushed("token", "insert", -0.3, 0.05))
    assert (found.conclusion, found.effect.value) == ("supported", -0.3)  # it decides, and the removal is larger
    found = shown("token", *gone, pushed("token", "insert", 0.2, 0.15))
    assert (found.conclusion, found.effect.value) == ("supported", 0.6)


def test_no_effect_beyond_the_margin_is_shown_beside_not_supported_nor_one_within_beside_not_testable():
    calm = [pushed("token", "remove", value, 0.05, fill) for fill, value in zip(FILLS, (0.01, -0.02), strict=True)]
    few = pushed("token", "insert", 3.0, 0.1)
    few = few.model_copy(update={"effect": few.effect.model_copy(update={"n_groups": 9})})
    found = shown("token", *calm, few)
    assert (found.conclusion, found.effect.value) == ("not supported", -0.02)
    found = shown("token", *calm[:1], pushed("token", "remove", 0.5, 0.1, "blur"), pushed("token", "insert", 0.0, 0.05))
    assert (found.conclusion, found.effect.value) == ("not decided", 0.5)
    assert shown("token", few).effect.value == 3.0
    assert shown("token", few).conclusion == "not decided"


def test_the_pixels_of_the_finding_have_to_speak_for_it():
    against = [pushed("the finding", "remove", -0.4, 0.1, fill) for fill in FILLS]
    for effects in (against, [pushed("the finding", "insert", -0.4, 0.1)]):
        found = shown("the finding", *effects)
        assert (found.conclusion, found.direction, found.effect.value) == ("not supported", "contradicts", -0.4)
        assert "these pixels count against the finding" in found.reason
    found = shown("the finding", *against, pushed("the finding", "insert", 0.4, 0.1))
    assert found.conclusion == "not decided"
    assert "contradict" in found.reason
    assert (
        shown("token", pushed("token", "insert", -0.4, 0.1)).conclusion == "supported"
    )  # of a marker either side is reliance


def test_a_region_that_all_have_says_why_nothing_was_inserted():
    none = InterventionEffect(
        region="border", finding="nodule", kind="insert", imputation=None, effect=EstimateSummary(reason="nobody gives")
    )
    filled = [pushed("border", "remove", 5.0, 0.1, fill) for fill in FILLS]
    made = with_shortcut(region_counts={"border": 80}, interventions=(*filled, none))
    found = told(made, "shortcut", qualifier="border")[0]
    assert (found.conclusion, found.effect.value) == ("not decided", 5.0)
    assert found.reason == (
        "nobody gives; removal was measured but does not count, because every image of this test has such a region"
    )


# Maps


@pytest.mark.parametrize(
    ("over", "word", "reason"),
    [
        (num(1.0, 0.5), "supported", ""),
        (num(0.2, 0.5), "not decided", "it does not differ clearly from a map that only marks the image center"),
        (num(0.5), "not decided", "its difference from a map that only marks the image center has no interval"),
        (None, "not decided", "it was not compared with a map that only marks the image center"),
        (num(-0.5, 0.5), "not supported", "a map that only marks the image center gets as high a score"),
        (num(-2.0, 0.5), "not supported", "a map that only marks the image center gets a higher score"),
    ],
)
def test_a_map_has_to_beat_a_map_that_knows_nothing_and_is_accused_only_where_it_does_not(over, word, reason):
    made = full(findings=("nodule",))
    lines = [one for one in made.localization.metric_summaries if one.metric == "enrichment" and not one.control][:1]
    strong = lines[0].model_copy(update={"value": num(4.0, 0.5, name="center"), "difference_to_control": over})
    summary = made.model_copy(
        update={"localization": made.localization.model_copy(update={"metric_summaries": (strong,)})}
    )
    found = told(summary, "localization")[0]
    assert found.conclusion == word
    assert reason in found.reason
    weak = strong.model_copy(update={"value": num(1.0, 0.2, name="center"), "difference_to_control": num(0.2, 0.5)})
    summary = made.model_copy(
        update={"localization": made.localization.model_copy(update={"metric_summaries": (weak,)})}
    )
    assert told(summary, "localization")[0].conclusion == "not supported"


def test_randomization_says_nothing_where_the_edge_detector_passes_too():
    def test(method: str, passes: bool, control: bool) -> RandomizationTest:
        similar = RandomizationSimilarity(
            name="ssim",
            curve=(1.0, 0.1),
            null_low=0.1,
            null_mean=0.2,
            null_high=0.3,
            passes=passes,
            reason="",
            final_similarity=num(0.1, 0.05),
        )
        return RandomizationTest(
            method=method, finding="nodule", part_names=("fc",), seeds=(0,), similarities=(similar,), passes=passes, reason="",
            control=control,
        )  # fmt: skip

    def word(edges: bool) -> str:
        made = full(findings=("nodule",))
        tests = (test("gradcam", True, False), test("edges", edges, True))
        return told(made.model_copy(update={"sanity": made.sanity.model_copy(update={"tests": tests})}), "sanity")[
            0
        ].conclusion

    assert word(edges=False) == "supported"
    assert word(edges=True) == "not decided"


def test_where_a_map_lies_accuses_nobody():
    assert {one.direction for one in told(full(), "attribution mass")} == {"neither"}


def test_a_share_is_of_what_is_positive_and_of_nothing_there_is_none():
    heat, mask = np.array([[1.0, 3.0], [-8.0, 0.0]]), np.array([[True, False], [True, False]])
    assert compute_mass_share(heat, mask) == 0.25
    assert np.isnan(compute_mass_share(-np.abs(heat), mask))


def test_of_maps_that_show_nothing_it_is_said_that_they_do_not():
    subject = SimpleNamespace(how={})
    assert (
        "no map shows anything" in _summarize_values(np.array([np.nan, np.nan]), [1, 2], 0.1, "chance", subject).reason
    )
    assert "no image has it" in _summarize_values(np.array([]), [], 0.1, "chance", subject).reason
    dark = {"method": "gradcam", "layer": "a", "metric": "enrichment", "value": None, "control": False, "row": 0}
    nothing = {"imputation": None, "parameters_digest": None, "target": None, PATIENT_COLUMN: 0}
    rows = [{**dark, **nothing, "row": n, "reason": why} for n, why in enumerate(("dark", "dark", "gone"))]
    (line,) = summarize_metrics(pyarrow.Table.from_pylist(rows), "nodule", n_resamples=200, seed=0)
    assert line.value.reason == "no map has a value: dark"


def test_the_hottest_tenth_is_counted_and_ties_in_expectation():
    heat, mask = np.zeros((10, 10)), np.zeros((10, 10), bool)
    heat[0] = 1.0
    mask[0, :4] = mask[5, :4] = True
    assert (
        compute_confounder_sensitivity(heat, mask) == 0.5
    )  # the row is the tenth; four of the region's eight pixels lie in it
    heat[0, 5:] = 0
    assert compute_confounder_sensitivity(heat, mask) == pytest.approx(
        (4 + 4 * 5 / 95) / 8
    )  # five of the tenth are any of 95 equal ones
    assert np.isnan(compute_confounder_sensitivity(np.ones((10, 10)), mask))


def test_the_published_schema_is_that_of_the_summary():
    file = Path(__file__).resolve().parents[3] / "docs" / "explanation" / "audit" / "summary.schema.json"
    assert json.loads(file.read_text(encoding="utf-8")) == Summary.model_json_schema()


@pytest.mark.parametrize(("patients", "word"), [(58, "not decided"), (59, "supported")])
def test_what_a_region_adds_is_called_the_same_only_of_as_many_patients_as_would_show_what_is_rare(patients, word):
    made = full(findings=("nodule",))
    (level,) = levels("nodule", {("site", "A against B"): (0.9, 0.0, "equivalent")}, 0.1, "token")
    level = level.model_copy(
        update={"value": num(0.9, 0.1, groups=patients), "difference": num(0.0, 0.05, groups=patients + 80)}
    )
    summary = made.model_copy(update={"shortcut": made.shortcut.model_copy(update={"subgroup_differences": (level,)})})
    (found,) = told(summary, "shortcut by subgroup")
    assert found.conclusion == word
    assert ("59 patients are needed to detect 5 %, as the config asks" in found.reason) == (word == "not decided")


def test_how_rare_a_reliance_may_be_is_declared():
    calm = [pushed("token", "remove", 0.0, 0.05, fill) for fill in FILLS]
    few = tuple(one.model_copy(update={"effect": one.effect.model_copy(update={"n_groups": 29})}) for one in calm)
    made = with_shortcut(region_counts={"token": 80}, markers_by_finding={"nodule": ("token",)}, interventions=few)
    assert told(made, "shortcut")[0].conclusion == "not decided"
    declared = made.model_copy(update={"margins": {**made.margins, "reliance_prevalence": 0.1}})
    assert told(declared, "shortcut")[0].conclusion == "not supported"
    finding = tuple(one.model_copy(update={"region": "the finding"}) for one in few)
    own = with_shortcut(
        region_counts={"the finding": 80}, markers_by_finding={"nodule": ("the finding",)}, interventions=finding
    )
    assert told(own, "ground truth")[0].conclusion == "not decided"  # nor is the model accused by so few


def test_subgroups_are_judged_finding_by_finding():
    made = full()
    both = made.resolve.findings
    apart, alike = (
        {("site", "A against B"): (0.9, 0.8, "different")},
        {("site", "A against B"): (0.9, 0.0, "equivalent")},
    )
    effects = [
        level.model_copy(update={"region": region})
        for finding, region, values in [
            (both[0], "marker", alike),
            (both[0], "border", apart),
            (both[1], "marker", apart),
        ]
        for level in levels(finding, values, 0.1)
    ]
    summary = made.model_copy(
        update={"shortcut": made.shortcut.model_copy(update={"subgroup_differences": tuple(effects)})}
    )
    found = [(one.finding, one.qualifier, one.conclusion) for one in told(summary, "shortcut by subgroup")]
    assert found == [
        (both[0], "site, effect of marker", "supported"),
        (both[0], "site, effect of border", "not supported"),
        (both[1], "site, effect of marker", "not supported"),
    ]
    assert {one.finding for one in told(summary, "localization by subgroup")} == set(both)
