"""The one-page summary of an audit, as Markdown, as a page, and in a model card."""

import re

import pytest

pytest.importorskip("pydantic")
pytest.importorskip("jinja2")
pytest.importorskip("pyarrow")

from camscope.audit.report.huggingface_model_card import END_MARK, START_MARK, update_model_card
from camscope.audit.report.markdown_summary import write_markdown_summary
from camscope.audit.report.render_html_page import render_one_page_overview
from camscope.errors import InputError
from tests.audit_summary import full, nothing
from tests.report_consistency import find_unsupported_claims

CARD = """---
license: mit
tags:
- x-ray
model-index:
- name: my model
  results:
  - task:
      type: image-classification
    dataset:
      name: CheXpert
      type: chexpert
    metrics:
    - type: accuracy
      value: 0.9
---
# My model

It reads chest radiographs.
"""


def metrics_of(text):
    hub = pytest.importorskip("huggingface_hub")
    return {
        (item.dataset_type, item.metric_name or item.metric_type): item
        for item in hub.ModelCard(text).data.eval_results
    }


def test_the_summary_has_what_the_first_screen_has():
    text = write_markdown_summary(full())
    headings = re.findall(r"^## (.*)$", text, re.M)
    assert headings == [
        "How well the model detects the finding", "Biggest concern", "What was found", "What was not tested or not decided",
        "What may not be concluded",
    ]  # fmt: skip
    check = full().check
    counts = f"- **Patients:** {check.n_patients:,}\n- **Images:** {check.flow[-1].n_rows:,}\n"
    assert counts in text.replace(" (each image counts as one patient)", "")
    assert "nodule: AUROC **0.941 \\[0.920, 0.963\\]**" in text
    assert "**The prediction for “nodule” relies on the region “marker”.**" in text
    assert "<" not in text.replace("\\<", "")


def test_an_empty_audit_has_a_summary_too():
    text = write_markdown_summary(nothing())
    assert "Not measured." in text
    assert "- **Images:** unknown" in text
    assert "not evidence in favor of the model" in text
    assert "None" not in text


def test_text_of_users_is_no_markup():
    text = write_markdown_summary(full(title="<b>*a*</b> | [x](y)\n# b", findings=("no_dule", "effusion")))
    assert text.startswith("# \\<b\\>\\*a\\*\\</b\\> \\| \\[x\\](y) \\# b\n")
    assert "no\\_dule" in text


def test_the_page_of_its_own_has_no_links_and_numbers_of_the_summary():
    html = render_one_page_overview(full())
    assert "href=" not in html.replace('<use href="#', "")
    assert "<script" not in html
    assert "Biggest concern" in html
    assert find_unsupported_claims(html, full().model_dump(mode="json")) == []


def test_a_card_gets_the_metrics_and_keeps_what_it_had():
    made = update_model_card(full(), CARD)
    metrics = metrics_of(made)
    assert metrics["chexpert", "accuracy"].metric_value == 0.9
    auroc = metrics["camscope-audit", "AUROC, nodule"]
    assert (auroc.metric_type, auroc.metric_value, auroc.task_type) == ("roc_auc", 0.9412371, "image-classification")
    assert auroc.metric_args == pytest.approx({"low": 0.919872, "high": 0.962602, "confidence": 0.95}, abs=1e-5)
    assert ("camscope-audit", "average precision, effusion") in metrics
    assert made.startswith("---\nlicense: mit\n")
    assert "It reads chest radiographs.\n" in made
    assert made.count(START_MARK) == made.count(END_MARK) == 1


def test_a_second_audit_replaces_the_first():
    other = full(title="Another audit", findings=("nodule",))
    once = update_model_card(other, CARD)
    twice = update_model_card(other, update_model_card(full(), CARD))
    assert twice == once
    assert update_model_card(other, once) == once
    assert "Another audit" in once
    text = once.replace(END_MARK, f"{END_MARK}\n\nMy own words.")
    assert update_model_card(full(), text).rstrip().endswith("My own words.")


def test_a_new_card_is_whole():
    made = update_model_card(full())
    assert metrics_of(made)
    assert made.startswith("---\nmodel-index:\n")
    nothing_measured = update_model_card(nothing())
    assert "model-index" not in nothing_measured
    assert START_MARK in nothing_measured


@pytest.mark.parametrize(
    ("content", "said"),
    [("---\na: [\n---\n", "no valid front matter"), (f"---\nlicense: mit\n---\n{START_MARK}\n", "without")],
)
def test_a_card_that_cannot_be_updated_is_left_alone(content, said):
    pytest.importorskip("huggingface_hub")
    with pytest.raises(InputError, match=said):
        update_model_card(full(), content)
