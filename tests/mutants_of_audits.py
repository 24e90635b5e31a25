"""Plausible slips in the rules of an audit; see `mutants`."""

import numpy as np

import test_audit_verdicts as rules
from camscope.audit import verdicts
from camscope.audit.schema import Number
from camscope.audit.shortcuts import masses
from mutants import Mutant


def the_whole_interval_counts() -> None:
    one = Number(value=0.8, low=0.6, high=0.9, n=10)
    assert verdicts.beyond(one, 0.7)[0] == "not testable"


def a_share_is_of_what_is_positive() -> None:
    heat, mask = np.array([1.0, 3.0, -8.0]), np.array([True, False, True])
    assert masses.share(heat, mask) == 0.25


OF_AUDITS = [
    Mutant(
        "the value for the interval", verdicts, "beyond", "number.low > margin", "number.value > margin",
        the_whole_interval_counts,
    ),
    Mutant(
        "a fill decides where every image has something", verdicts, "_reliance", "remove if marker else []", "remove",
        rules.test_a_region_that_every_image_has_is_judged_by_insertion_whatever_a_fill_does,
    ),
    Mutant(
        "one fill is enough", verdicts, "_under_all", "if len(words) == 1:", "if words:",
        rules.test_fills_that_disagree_on_the_blanked_organ_decide_nothing,
    ),
    Mutant(
        "a control is not asked", verdicts, "_sane", "control.passes is not False", "False",
        rules.test_randomisation_says_nothing_where_the_edge_detector_passes_too,
    ),
    Mutant("negative heat counts", masses, "share", "np.maximum(heat, 0)", "np.abs(heat)", a_share_is_of_what_is_positive),
]  # fmt: skip
