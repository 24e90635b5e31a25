"""Regions that overlap, and the words of warnings, reasons and refusals that a reader meets first."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("pydantic")
pytest.importorskip("pyarrow")

from camscope.audit.core.context import Finding
from camscope.audit.core.schema import Explain, Maps, Overlap, Step
from camscope.audit.performance.model_outputs import odds_of
from camscope.audit.shortcuts.region_attribution import overlaps, together
from camscope.audit.shortcuts.region_samples import FINDING, ORGAN, Scene, Scenes
from camscope.audit.verdicts import verdicts
from camscope.audit.verdicts.limitations import warnings
from camscope.errors import InputError
from tests.audit_summary import full


def scene(row, **boxes):
    """Of 8 x 8, with regions of so many columns from a column on."""
    regions = {}
    for name, (start, wide) in boxes.items():
        regions[name] = np.zeros((8, 8), np.bool_)
        regions[name][:, start : start + wide] = True
    return Scene(row, torch.zeros(1, 8, 8), None, regions)


def test_an_overlap_is_the_mean_share_of_a_regions_pixels():
    seen = Scenes(
        [scene(0, frame=(0, 4), token=(0, 1), far=(7, 1)), scene(1, frame=(0, 4)), scene(2, token=(3, 2), frame=(0, 4))]
    )
    found = {(one.region, one.within): (one.share, one.images) for one in overlaps(seen, "nodule")}
    assert found == {
        ("token", "frame"): ((1 + 0.5) / 2, 2),
        ("frame", "token"): (pytest.approx((0.25 + 0 + 0.25) / 3), 3),
    }
    assert {one.finding for one in overlaps(seen, "nodule")} == {"nodule"}


def test_the_finding_and_the_organ_are_no_shortcuts_that_could_overlap():
    one = scene(0, a=(0, 4), b=(0, 4))
    one.regions[FINDING] = one.regions[ORGAN] = one.regions["a"]
    assert {(each.region, each.within) for each in overlaps(Scenes([one]), "f")} == {("a", "b"), ("b", "a")}


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
    known = [Overlap(finding="f", region=one, within=other, share=share, images=9) for one, other, share in pairs]
    assert together(["a", "b", "c", "d"], known) == groups


@pytest.mark.parametrize(("many", "words"), [(1, "There is only 1 patient: "), (2, "There are only 2 patients: ")])
def test_one_patient_is_one(many, words):
    summary = full(
        check=full().check.model_copy(update={"patients": many}),
        explain=Explain(
            maps=(Maps(method="gradcam", finding="nodule", maps=9, failures=0, statuses={"ok": 9}),),
            failures=(Step(name="no map", rows=many, reason="of another method"),),
        ),
    )
    told = list(warnings(summary))
    assert any(one.startswith(words) for one in told)
    assert any(one.startswith("1 image lacks a map" if many == 1 else "2 images lack a map") for one in told)


def test_a_region_too_fine_for_the_maps_is_told_in_words_that_hold_for_one_and_for_many():
    mass = next(one for one in full().shortcut.masses if not one.resolved)
    shortcut = full().shortcut.model_copy(update={"masses": (mass.model_copy(update={"region": "saturated"}),)})
    found = next(one for one in verdicts(full(shortcut=shortcut)) if one.question == "where the maps lie")
    assert "lie on small saturated parts" in found.claim
    assert found.reason == "below the resolution of the maps: what a map does not show says nothing of the region"


def test_a_model_with_one_output_is_told_what_to_write_into_the_config():
    subject = SimpleNamespace(config=SimpleNamespace(model=SimpleNamespace(outputs="softmax")))
    with pytest.raises(InputError, match=r'set outputs = "sigmoid" under \[model\]'):
        odds_of(subject, torch.zeros(3, 1), [Finding(0, "lesion")], probabilities=False)
