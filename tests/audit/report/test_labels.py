"""The front page's order: verdicts by what they are about, and those that one cause may have given beside one another."""

import re

import pytest

pytest.importorskip("pydantic")
pytest.importorskip("jinja2")
pytest.importorskip("pyarrow")
pytest.importorskip("matplotlib")

from camscope.audit.report.render_html_page import render_page
from camscope.audit.report.verdict_labels_and_groups import TOPIC_DESCRIPTIONS, find_topic, group_overlapping_verdicts
from camscope.audit.verdicts import derive_verdicts
from camscope.audit.verdicts.verdict_rules import QUESTIONS
from tests.audit_summary import full, nothing, num, verdict


def test_what_speaks_against_the_maps_does_not_speak_against_the_model():
    judged = verdict(
        "faithfulness",
        "The maps of gradcam show it.",
        "nodule",
        "not supported",
        "contradicts",
        num(-0.2, 0.1),
        0.0,
        "faithfulness",
        "gradcam",
    )
    html = render_page(nothing().model_copy(update={"verdicts": (judged,)}))
    tally = [
        " ".join(re.sub(r"<[^>]*>", " ", row).split())
        for row in re.findall(r'<tr><th scope="row">The (?:.*?)</tr>', html, re.S)
    ][:3]
    assert tally == ["The model 0 0 0 0", "The maps 1 0 0 0", "The data 0 0 0 0"]
    assert "Contradicts the maps" in html
    assert "Contradicts the model" not in html
    assert "No question about the model was tested. This is not evidence in favor of the model." in html


def test_every_question_is_about_something():
    assert {one.question for one in derive_verdicts(full())} == set(QUESTIONS)
    assert {find_topic(question) for question in QUESTIONS} == set(TOPIC_DESCRIPTIONS)


def test_verdicts_on_one_cause_stand_where_the_first_of_them_does():
    rows = [
        verdict("shortcut", name, "f", word, "contradicts", num(1.0, 0.1), 0.1, "shortcut", name)
        for name, word in (
            ("a", "supported"),
            ("b", "supported"),
            ("c", "supported"),
            ("d", "not supported"),
            ("e", "supported"),
        )
    ]
    made = group_overlapping_verdicts(rows, {"f": [["a", "d"], ["b", "e"]]})
    assert [("".join(row.claim for row in one.verdicts), one.regions_overlap) for one in made] == [
        ("a", True),
        ("be", True),
        ("cd", False),
    ]
    assert [len(one.verdicts) for one in group_overlapping_verdicts(rows, {})] == [5]
