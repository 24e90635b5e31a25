"""Regions that overlap, and the words of warnings, reasons and refusals that a reader meets first."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("pydantic")
pytest.importorskip("pyarrow")

from camscope.audit.core.cohort import Finding
from camscope.audit.core.stage_result_schema import ExplainResult, FlowStep, MapCounts
from camscope.audit.core.summary_schema import RegionOverlap
from camscope.audit.performance.compute_log_odds_and_features import compute_log_odds
from camscope.audit.shortcuts.load_images_and_region_masks import (
    FINDING_REGION,
    ORGAN_REGION,
    RegionSample,
    RegionSamples,
)
from camscope.audit.shortcuts.region_attribution import group_overlapping_regions, measure_overlap_between_regions
from camscope.audit.verdicts import derive_verdicts
from camscope.audit.verdicts.limitations_and_warnings import list_warnings
from camscope.errors import InputError
from tests.audit_summary import full


def scene(row, **boxes):
    """Of 8 x 8, with regions of so many columns from a column on."""
    regions = {}
    for name, (start, wide) in boxes.items():
        regions[name] = np.zeros((8, 8), np.bool_)
        regions[name][:, start : start + wide] = True
    return RegionSample(row, torch.zeros(1, 8, 8), None, regions)


def test_an_overlap_is_the_mean_share_of_a_regions_pixels():
    seen = RegionSamples(
        [
            scene(0, frame=(0, 4), marker=(0, 1), far=(7, 1)),
            scene(1, frame=(0, 4)),
            scene(2, marker=(3, 2), frame=(0, 4)),
        ]
    )
    found = {
        (one.region, one.other_region): (one.share, one.n_images)
        for one in measure_overlap_between_regions(seen, "nodule")
    }
    assert found == {
        ("marker", "frame"): ((1 + 0.5) / 2, 2),
        ("frame", "marker"): (pytest.approx((0.25 + 0 + 0.25) / 3), 3),
    }
    assert {one.finding for one in measure_overlap_between_regions(seen, "nodule")} == {"nodule"}


def test_the_finding_and_the_organ_are_no_shortcuts_that_could_overlap():
    one = scene(0, a=(0, 4), b=(0, 4))
    one.regions[FINDING_REGION] = one.regions[ORGAN_REGION] = one.regions["a"]
    assert {
        (each.region, each.other_region) for each in measure_overlap_between_regions(RegionSamples([one]), "f")
    } == {
        ("a", "b"),
        ("b", "a"),
    }


@pytest.mark.parametrize(
    ("pairs", "groups"),
    [
        ([], []),
        ([("a", "b", 0.5)], []),
        ([("b", "a", 0.51)], [["a", "b"]]),
        ([("d", "b", 0.9), ("b", "a", 0.9)], [["a", "b", "d"]]),
        ([("d", "c", 1.0), ("a", "b", 1.0)], [["a", "b"], ["c", "d"]]),
        ([("a", "elsewhere", 1.0), ("b", "elsewhere", 1.0)], []),
    ],
)
def test_regions_hang_together_where_most_of_one_lies_in_another(pairs, groups):
    known = [
        RegionOverlap(finding="f", region=one, other_region=other, share=share, n_images=9)
        for one, other, share in pairs
    ]
    assert group_overlapping_regions(["a", "b", "c", "d"], known) == groups


@pytest.mark.parametrize(("many", "words"), [(1, "There is only 1 patient: "), (2, "There are only 2 patients: ")])
def test_one_patient_is_one(many, words):
    summary = full(
        check=full().check.model_copy(update={"n_patients": many}),
        explain=ExplainResult(
            map_counts=(
                MapCounts(method="gradcam", finding="nodule", n_maps=9, n_failures=0, status_counts={"ok": 9}),
            ),
            failures=(FlowStep(name="no map", n_rows=many, reason="of another method"),),
        ),
    )
    told = list(list_warnings(summary))
    assert any(one.startswith(words) for one in told)
    assert any(one.startswith("1 image lacks the map" if many == 1 else "2 images lack the map") for one in told)


def test_a_region_too_fine_for_the_maps_is_told_in_words_that_hold_for_one_and_for_many():
    mass = next(one for one in full().shortcut.attribution_mass if not one.is_resolvable)
    shortcut = full().shortcut.model_copy(
        update={"attribution_mass": (mass.model_copy(update={"region": "saturated"}),)}
    )
    found = next(one for one in derive_verdicts(full(shortcut=shortcut)) if one.question == "attribution mass")
    assert "highlight burned-in text or markers." in found.claim
    assert found.reason == "below the resolution of the maps: the map can neither show nor exclude it"


def test_a_model_with_one_output_is_told_what_to_write_into_the_config():
    subject = SimpleNamespace(config=SimpleNamespace(model=SimpleNamespace(outputs="softmax")))
    with pytest.raises(InputError, match=r'set outputs = "sigmoid" under \[model\]'):
        compute_log_odds(subject, torch.zeros(3, 1), [Finding(0, "lesion")], outputs_are_probabilities=False)
