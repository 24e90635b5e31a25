"""The report of an audit: every number is one of the summary, nothing can be switched off, nothing steers or reaches out."""

import base64
import csv
import functools
import hashlib
import importlib
import io
import re
from html.parser import HTMLParser

import numpy as np
import pytest
from markupsafe import escape

pytest.importorskip("pydantic")
pytest.importorskip("jinja2")
pytest.importorskip("pyarrow")
pytest.importorskip("duckdb")
pytest.importorskip("matplotlib")

from PIL import Image

from camscope import GradCAM, load_model
from camscope.audit.core.stage_result_schema import EstimateSummary, PredictResult, StageResult, SubgroupPerformance
from camscope.audit.core.summary_schema import ClusterAnalysis, MapCluster, ReviewCase, ShortcutResult
from camscope.audit.report.gallery import (
    MAX_IMAGE_BYTES,
    MAX_MAP_OPACITY,
    OUTLINE_COLOR,
    UNCOVERED_OPACITY,
    VOLUME_HEIGHT,
    PredictedImage,
    build_gallery,
    render_map_rgba,
    render_outline_rgba,
    select_extreme_images,
)
from camscope.audit.report.number_format import (
    format_estimate,
    format_interval,
    format_number,
    format_number_like,
    format_p_value,
    number_to_text,
)
from camscope.audit.report.render_html_page import PAGE_SECTIONS, read_reporting_guidelines_csv, render_page
from camscope.audit.report.section_figures import draw_figures
from camscope.audit.report.svg_charts import (
    CHART_WIDTH,
    ForestRow,
    default_style_scope,
    draw_cluster_stability,
    draw_forest_plot,
    format_estimate_and_list_numbers,
    to_inline_svg,
)
from camscope.audit.report.verdict_labels_and_groups import CONCLUSION_MEANINGS, VERDICT_KIND_LABELS
from camscope.audit.verdicts.limitations_and_warnings import GENERAL_LIMITATIONS, list_warnings
from camscope.audit.verdicts.verdict_rules import build_verdict
from camscope.batch import BatchRun, run_batch
from camscope.errors import InputError
from camscope.explainers import METHODS
from camscope.explanation import Explanation
from camscope.geometry import Placement
from camscope.phantom import draw_radiograph
from camscope.render import encode_data_uri
from camscope.render.draw_volume import MIN_HEIGHT_WITH_TEXT
from tests.audit_summary import FINDINGS, IDS, MARGINS, PROVENANCE, SKIPPED, full, nothing, num, verdict
from tests.report_consistency import extract_numbers, find_unsupported_claims

EVIL = "<script>alert(1)</script>"
VOID = {"meta", "img", "input", "br", "link", "hr"}
COUNT = 8
page_module = importlib.import_module(
    "camscope.audit.report.render_html_page"
)  # the package's own `page` is the function


class Reader(HTMLParser):
    """The elements of a page with their attributes, and its text; every element is closed where it should be."""

    def __init__(self, html):
        super().__init__()
        self.elements, self.open, self.words = [], [], []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        assert len({name for name, _ in attrs}) == len(attrs)
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("style", "script"):
            self.words.append(data)

    def all(self, tag, kind=None):
        return [own for name, own in self.elements if name == tag and kind in (None, *(own.get("class") or "").split())]

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Eight phantoms, two methods; the image of the first is gone."""
    folder = tmp_path_factory.mktemp("report")
    lines = ["path,id"]
    for n in range(COUNT):
        Image.fromarray(draw_radiograph(n, ("nodule", "no finding")[n % 2]).image).save(folder / f"{n}.png")
        lines.append(f"{n}.png,{IDS[n]}")
    (folder / "list.csv").write_text("\n".join(lines), encoding="utf-8")
    model = load_model("phantom")
    tools = [GradCAM(model), METHODS["inputxgradient"](model)]
    run_batch(tools, folder / "list.csv", folder / "run", ["nodule"])
    (folder / "0.png").unlink()
    return BatchRun(folder / "run")


def known(odds=(-3.0, 1.5, 2.0, -0.1, -0.5, 0.2, 4.0, -5.0)):
    """Rows 0, 2, 4, 6 have a nodule; 0 and 4 are missed, 1 and 5 are false alarms."""
    return [PredictedImage(n, IDS[n], {"nodule": one}, {"nodule": n % 2 == 0}) for n, one in enumerate(odds)]


@pytest.fixture(scope="module")
def pictures(run):
    return build_gallery(run, full(findings=FINDINGS[:1]), known(), {"nodule": "nodule"}, n_random_images=8, height=96)


@pytest.fixture(scope="module")
def whole(pictures):
    """The page of an audit of two findings, with pictures."""
    return render_page(full(), pictures, PROVENANCE)


@pytest.fixture(scope="module")
def bare():
    """The page of an audit in which everything was skipped."""
    return render_page(nothing())


def files(pictures):
    return full().model_dump(mode="json"), PROVENANCE, pictures.as_dict


@pytest.mark.slow
def test_every_number_comes_from_the_files(whole, bare, pictures):
    assert find_unsupported_claims(whole, *files(pictures)) == []
    assert find_unsupported_claims(bare, nothing().model_dump(mode="json")) == []
    shown = extract_numbers(whole)
    assert len(shown) > 800
    assert {0.9412371, 0.962602, 1214, 187, 11176512, 0.5613, 12.4} <= set(shown)
    values = {image.log_odds for section in pictures.sections for image in section.images}
    assert values <= set(shown)


@pytest.mark.parametrize(
    ("planted", "found"),
    [
        ("<p>The AUROC is 0.93.</p>", "the text 'The AUROC is 0.93.'"),
        ('<p><data value="0.123456">0.12</data></p>', "the number 0.12 (0.123456)"),
        ('<p><data value="0.9412371">0.97</data></p>', "the number 0.97 (0.9412371)"),
        ('<img alt="a map of 77 cells">', "the label 'a map of 77 cells'"),
        ("<svg><text>0.77</text></svg>", "the label '0.77'"),
        ('<data value="3" data-counts=\'["verdicts", {"direction": "contradicts"}]\'>3</data>', "the number 3 (3)"),
    ],
)
def test_a_number_of_the_pages_own_is_found(bare, planted, found):
    html = bare.replace("<h3>Declared", f"{planted}<h3>Declared")
    assert find_unsupported_claims(html, nothing().model_dump(mode="json"), {"known": 0.9412371}) == [found]


def test_what_a_metric_is_stands_beside_its_numbers(whole):
    for stage in (full().localization, full().faithfulness):
        assert set(stage.formulas) == {one.metric for one in stage.metric_summaries}
        for words in stage.formulas.values():
            assert f'<small class="formula"><bdi>{escape(words)}</bdi></small>' in whole


def test_a_summary_that_does_not_say_what_its_metrics_are_has_a_page_too():
    silent = {
        name: getattr(full(), name).model_copy(update={"formulas": {}}) for name in ("localization", "faithfulness")
    }
    html = render_page(full().model_copy(update=silent))
    from camscope.metrics import METRICS

    assert METRICS.replace_names_by_titles(full().localization.metric_summaries[0].metric) in html
    assert 'class="formula"' not in html


def test_a_template_cannot_write_a_number_by_itself(monkeypatch):
    own = page_module._read_template
    planted = {"sections/robustness.html": "<p>{{ summary.seed }}</p>"}
    monkeypatch.setattr(page_module, "_read_template", lambda name: planted.get(name) or own(name))
    with pytest.raises(InputError, match="without a filter"):
        render_page(nothing())
    planted["sections/robustness.html"] = "<p>It fell by 12 of 40.</p>"
    assert find_unsupported_claims(render_page(nothing()), nothing().model_dump(mode="json")) == [
        "the text 'It fell by 12 of 40.'"
    ]


@pytest.mark.parametrize(
    ("value", "decimals", "text"),
    [
        (312, None, "312"), (1214, None, "1,214"), (0, None, "0"), (-4, None, "−4"), (0.9412371, None, "0.941"),
        (13.4567, None, "13.5"), (1234.5, None, "1,234"), (0.5, None, "0.5"), (1.0, None, "1"), (0.0, None, "0"),
        (-0.0847, 2, "−0.08"), (0.00034, None, "0.00034"), (2.1e-06, None, "0.0000021"),
        (2.1e-08, None, "2.1e-08"), (-1.2e-05, None, "−0.000012"),
        (5.0, 2, "5.00"),
        (-0.0004, 2, "0.00"),
    ],
)  # fmt: skip
def test_numbers_are_written_with_sensible_digits(value, decimals, text):
    assert number_to_text(value, decimals) == text


def test_an_estimate_shows_two_digits_of_its_interval():
    assert re.sub("<[^>]*>", "", format_estimate(num(0.9412371, 0.0213649))) == "0.941 [0.920, 0.963]"
    assert re.sub("<[^>]*>", "", format_estimate(num(5.8213, 0.9))) == "5.8 [4.9, 6.7]"
    assert re.sub("<[^>]*>", "", format_estimate(num(48.213, 12.9))) == "48 [35, 61]"
    assert re.sub("<[^>]*>", "", format_estimate(num(0.25))) == "0.25"
    assert re.sub("<[^>]*>", "", format_estimate(num(1.0))) == "1.0"
    assert re.sub("<[^>]*>", "", format_estimate(num(0.5, 2.0))) == "0.50 [−1.50, 2.50]"
    assert re.sub("<[^>]*>", "", format_estimate(num(1.0, 0.0))) == "1.0 [no width]"
    assert re.sub("<[^>]*>", "", format_estimate(num(0.0, 0.0))) == "0.0 [no width]"
    assert re.sub("<[^>]*>", "", format_estimate(num(0.81234, 0.000002))) == "0.812 [hardly any width]"
    assert re.sub("<[^>]*>", "", format_interval(0.4, 0.046, 0.5542)) == "0.40 [0.05, 0.55]"
    assert re.sub("<[^>]*>", "", format_interval(1.0)) == "1.0"
    assert re.sub("<[^>]*>", "", format_number_like(1.0, num(0.9412371, 0.0213649))) == "1.000"
    assert format_estimate_and_list_numbers(num(1.0, 0.0)) == ("1.0 [no width]", [1.0])
    assert "–" in format_estimate(EstimateSummary(reason="why"))
    assert format_number(0.9412371) == '<data value="0.9412371">0.941</data>'
    assert format_p_value(0.0004) == '<data value="0.0004">&lt; 0.001</data>'
    assert format_p_value(0.0312) == '<data value="0.0312">0.031</data>'
    for wrong in (True, float("nan")):
        with pytest.raises(InputError):
            number_to_text(wrong)


def test_each_verdict_has_its_interval_its_images_its_baseline_and_its_rule(whole):
    board = whole.partition('class="board"')[2].partition("</section>")[0]
    parts = board.split('<h2 class="side">')[1:]
    assert [part.partition(" <small>")[0] for part in parts] == ["The model", "The maps", "The data"]
    rows = [re.findall(r"<tr class=\"is-(\w+)\">(.*?)</tr>", part, re.S) for part in parts]
    for own in rows:
        kinds = [kind for kind, _ in own]
        assert kinds == sorted(kinds, key=["contradicts", "supports", "neither", "untested"].index)
    assert sum(map(len, rows)) == len(full().verdicts)
    line = words_of(next(row for _, row in rows[0] if "relies on the region “marker”" in row))
    assert line.startswith("contradicts the model")
    assert "1.08 [ 0.96 , 1.21 ]" in line
    assert "164 images of 99 patients" in line
    assert "0 no effect 0.1" in line
    sections = whole.partition('id="shortcut"')[2]
    assert "The rules that gave these verdicts" in sections
    assert "trust score" not in whole


def words_of(html):
    return " ".join(re.sub(r"<[^>]*>", " ", html).split())


def test_each_verdict_has_one_sign_and_says_what_holds(whole):
    seen = re.findall(r'<span class="toward is-(\w+)"><svg[^>]*><use href="#shape-(\w+)"/></svg>([^<]*)</span>', whole)
    assert all(kind == shape and text.startswith(VERDICT_KIND_LABELS[kind]) for kind, shape, text in seen)
    assert {text for _, _, text in seen} >= {
        "contradicts the model",
        "supports the model",
        "supports the maps",
        "not decided",
    }
    judged = build_verdict(
        "shortcut", "nodule", ("not supported", ""), num(0.0, 0.05), 0.1, "border", region="the border"
    )
    row = re.search(
        r"<tr class=.is-supports.*?</tr>", render_page(nothing().model_copy(update={"verdicts": (judged,)})), re.S
    )
    assert "The prediction for “nodule” does not rely on the border." in words_of(row[0])
    assert judged.claim not in words_of(row[0])
    assert not set(words_of(row[0]).split()) & {"supported"}
    rules = words_of(whole.partition('class="rules"')[2].partition("</details>")[0])
    assert all(f"“{word}”: {meaning}" in rules for word, meaning in CONCLUSION_MEANINGS.items())


def test_regions_that_overlap_are_told_to_be_one_cause(whole, bare):
    board = whole.partition('class="board"')[2].partition("</section>")[0]
    together = re.findall(r'<tbody class="overlap">(.*?)</tbody>', board, re.S)
    assert len(together) == len(FINDINGS)
    for finding, block in zip(FINDINGS, together, strict=True):
        assert "These regions overlap: one cause may be counted several times." in block
        claims = re.findall(r"<bdi>(The prediction[^<]*relies[^<]*)</bdi>", block)
        assert claims == [
            f"The prediction for “{finding}” relies on the region {name}." for name in ("“marker”", "the frame")
        ]
    assert 'href="#overlaps"' in board
    assert 'href="#overlaps"' not in bare
    assert 'class="overlap"' not in render_page(nothing().model_copy(update={"verdicts": full().verdicts}))
    warned = [one for one in list_warnings(full()) if "overlap" in one]
    assert warned == [
        f"Regions that the prediction for “{finding}” relies on overlap (marker, the frame): one cause may be counted "
        "several times."
        for finding in FINDINGS
    ]


@pytest.mark.slow
def test_limits_and_missing_tests_are_in_every_report(whole, bare):
    stripped = nothing().model_copy(update={"localization": full().robustness, "config": "limits = false"})
    made = [whole, bare, render_page(stripped)]
    for html in made:
        text = Reader(html).text
        assert all(one in text for one in GENERAL_LIMITATIONS)
        assert "Deviations and missing tests" in text
        assert "does not confer compliance" in text
        assert f"robustness : {SKIPPED}" in text
    assert full().limitations[0] in Reader(whole).text
    text = Reader(bare).text
    stages = [name for name, part in nothing() if isinstance(part, StageResult)]
    assert len(stages) == 9
    assert all(f"{name} : {SKIPPED}" in text for name in stages)
    assert "Nothing odd" not in text
    assert "No verdict contradicts" not in text
    assert "Stages not tested: check , resolve" in text
    assert "No question was tested." in text
    untested = [one for one in full().verdicts if one.conclusion == "not decided"]
    missing = " ".join(whole.partition('<section id="missing"')[2].partition("</section>")[0].split())
    assert untested
    assert all(one.claim in missing and one.reason in missing for one in untested)


@pytest.mark.slow
def test_nothing_from_outside_is_code_or_steers():
    words = f"{EVIL} {{{{ 7 * 7 }}}} $\\frac{{$ x\u202ey \x00 \"'&"
    judged = verdict(words, words, words, "supported", "contradicts", num(1.0, 0.1), 0.1, words, words, words)
    found = full(
        title=words, findings=(words,), ids=tuple(f"{words}{n}" for n in range(12)), question=words, warnings=(words,),
        limits=(words,), verdicts=(judged,),
        margins={**MARGINS, words: 0.5}, config=words, data=words,
    )  # fmt: skip
    few = found.shortcut.model_copy(update={"blanked": (), "leaks": (), "masses": found.shortcut.attribution_mass[:2]})
    lines = found.localization.model_copy(update={"lines": found.localization.metric_summaries[:2], "levels": ()})
    tests = found.sanity.model_copy(update={"tests": ()})
    small = {"localization": lines, "faithfulness": found.robustness, "sanity": tests, "shortcut": few}
    html = render_page(found.model_copy(update=small), None, {words: [words, {words: 3}]})
    read = Reader(html)
    assert len(read.all("script")) == 1
    assert EVIL not in html
    assert "\u202e" not in html
    assert "\x00" not in html
    assert "{{ 7 * 7 }}" in read.text
    assert find_unsupported_claims(html, found.model_dump(mode="json"), {words: [words, {words: 3}]}) == []


def test_the_page_needs_nothing_else_and_runs_nothing_else(whole):
    read = Reader(whole)
    policy = next(own["content"] for own in read.all("meta") if own.get("http-equiv"))
    assert "default-src 'none'" in policy
    for tag, name in (("style", "style-src"), ("script", "script-src")):
        text = re.search(f"<{tag}>(.*?)</{tag}>", whole, re.S).group(1)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{name} 'sha256-{digest}'" in policy
        assert not re.search(r"url\(|@import|https?:|fetch|eval", text)
    for _, own in read.elements:
        assert not [name for name in own if name.startswith("on") or name in ("style", "srcset", "action")]
        assert own.get("src", "data:").startswith("data:image/webp;base64,") or "src" not in own
        assert own.get("href", "#").startswith("#")
    assert len(whole) < 25e6


@pytest.mark.parametrize("name", ["whole", "bare"])
def test_links_lead_somewhere_and_everything_has_words(request, name):
    read = Reader(request.getfixturevalue(name))
    ids = [own["id"] for _, own in read.elements if "id" in own]
    assert len(ids) == len(set(ids))
    assert {own["href"][1:] for _, own in read.elements if "href" in own} <= set(ids)
    assert {own["for"] for own in read.all("label")} <= set(ids)
    assert all(own.get("alt") for own in read.all("img"))
    assert all(own.get("aria-label") for own in read.all("svg", "plot"))
    assert all(own.get("scope") for own in read.all("th"))
    assert [own["id"] for own in read.all("section", "section")] == list(PAGE_SECTIONS)
    assert [own.get("lang") for own in read.all("html")] == ["en"]


def test_without_scripts_only_the_slider_is_away(whole):
    read = Reader(whole)
    assert [own for own in read.all("p", "slide") if "hidden" in own]
    assert len([own for _, own in read.elements if "hidden" in own]) == 1
    assert [own for own in read.all("input") if own.get("id") == "bare" and own["type"] == "checkbox"]


def luminance(color):
    parts = [int(color[n : n + 2], 16) / 255 for n in (1, 3, 5)]
    linear = [one / 12.92 if one <= 0.03928 else ((one + 0.055) / 1.055) ** 2.4 for one in parts]
    return float(np.dot(linear, [0.2126, 0.7152, 0.0722]))


@pytest.mark.parametrize("theme", [0, 1])
def test_words_stand_out_in_the_light_and_in_the_dark(theme):
    roots = re.findall(r":root \{(.*?)\}", page_module._read_template("page.css"), re.S)
    colors = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", roots[theme]))
    for words in ("ink", "dim", "faint", "accent", "supports", "contradicts", "neither", "untested"):
        for below in {
            "paper",
            "card",
            f"{words}-wash",
            "against-wash" if words in ("ink", "dim", "accent") else "card",
        }:
            if below in colors:
                light, dark = sorted((luminance(colors[words]), luminance(colors[below])), reverse=True)
                assert (light + 0.05) / (dark + 0.05) >= 4.5, (words, below)
    for tone in ("supports", "contradicts", "neither", "ink"):
        light, dark = sorted((luminance(colors["on"]), luminance(colors[tone])), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 4.5, tone


def test_a_figure_is_the_same_every_time_and_has_texts_of_the_pages_colors():
    rows = [
        ForestRow("gradcam", num(0.8312, 0.02)),
        ForestRow("edges", num(0.5, 0.03, baseline=0.4), "control"),
        ForestRow("none", EstimateSummary()),
    ]
    with default_style_scope():
        one, other = (
            to_inline_svg(
                draw_forest_plot(rows, "AUROC", shaded_range=(0.4, 0.6), margin=0.7, show_baselines=True),
                "f",
                "AUROC & more",
            )
            for _ in range(2)
        )
    assert one == other
    assert 'aria-label="AUROC &amp; more"' in one
    assert re.search(r'<g data-values="0\.8312 0\.8112 0\.8512\d*">\s*<text[^>]*>0\.831 \[0\.811, 0\.851\]</text>', one)
    assert not re.search(r"style=|#0000|<metadata|font-family|xmlns|\$", one)
    assert {"f-supports", "s-text", "f-band", "s-contradicts", "f-background"} <= set(re.findall(r"[fs]-\w+", one))


def test_the_longest_value_stays_in_its_figure():
    longest = EstimateSummary(value=-0.9935, low=-0.9947, high=-0.9923)
    rows = [ForestRow("gradcam", longest), ForestRow("other", num(0.8, 0.1))]
    with default_style_scope():
        svg = to_inline_svg(draw_forest_plot(rows, "rank correlation"), "f", "x")
    assert len(format_estimate_and_list_numbers(longest)[0]) == 26
    texts = re.findall(r"<g data-values[^>]*>\s*(<text[^>]*>)", svg)
    starts = [float(re.search(r'(?: x="|translate\()(\d+(?:\.\d+)?)', text).group(1)) for text in texts]
    assert len(starts) == 2
    assert max(starts) + 26 * 6 <= CHART_WIDTH


@pytest.mark.slow
def test_both_sides_of_a_contrast_are_drawn():
    one = full().predict.performance[0]
    value = num(0.87, 0.04, baseline=0.95, name="B")
    alone = one.subgroup_differences[0].model_copy(update={"level": "A against B", "value": value})
    assert drawn_of(one, alone) == (["site: A", "site: B"], [0.87, 0.83, 0.91, 0.95])
    group = SubgroupPerformance(column="site", level="B", n_positives=9, n_negatives=9, auroc=num(0.95, 0.02))
    assert drawn_of(one, alone, group)[1][3:] == [0.95, 0.93, 0.97]


def drawn_of(one, level, *groups):
    """The sites in the figure of AUROCs, and their numbers."""
    answers = one.model_copy(update={"subgroup_differences": (level,), "subgroups": groups})
    drawn = draw_figures(nothing().model_copy(update={"predict": PredictResult(performance=(answers,))}))
    svg = next(each.svg for each in drawn["performance"] if each.title_parts[0] == "AUROC by subgroup")
    return re.findall(r">(site: [^<]*)<", svg), [
        float(value) for value in " ".join(re.findall(r'data-values="([^"]*)"', svg)).split()
    ][3:]


def test_subgroups_of_each_finding_have_a_table_of_their_own(whole):
    text = Reader(whole).text
    for finding in FINDINGS:
        assert f"AUROC by subgroup: {finding}" in text
        assert f"Share of the attribution of Grad-CAM inside the finding, by subgroup: {finding}" in text
        assert f"Effect of marker by subgroup: {finding}" in text


def test_figures_are_of_what_was_tested():
    no = nothing()
    few = full().sanity.model_copy(update={"tests": full().sanity.tests[-1:]})
    drawn = draw_figures(
        full(
            findings=FINDINGS[:1],
            predict=no.predict,
            localization=no.localization,
            faithfulness=no.localization,
            sanity=few,
        )
    )
    assert drawn["performance"] == drawn["localization"] == drawn["robustness"] == drawn["masked_auroc"] == []
    assert [one.title_parts for one in drawn["leakage"]] == [("Columns predicted from the features",)]
    assert {one.title_parts[1] for one in drawn["interventions"]} == {FINDINGS[0]}
    assert [one.title_parts[2] for one in drawn["sanity"]] == ["control"] * 2
    assert "no value" not in drawn["interventions"][0].svg
    with default_style_scope():
        trials = (
            full()
            .shortcut.cluster_analyses[0]
            .model_copy(update={"trials": full().shortcut.cluster_analyses[0].stability_by_n_clusters[:1]})
        )
        assert "<svg" in to_inline_svg(draw_cluster_stability(trials), "s", "one")


def test_the_gallery_begins_with_what_the_seed_draws(run, pictures):
    first = pictures.sections[0]
    assert first.kind == "random"
    assert sorted(image.id for image in first.images) == sorted(IDS[:COUNT])
    drawn = {}
    for seed in (7, 8):
        summary = full(findings=FINDINGS[:1], seed=seed, shortcut=ShortcutResult())
        made = build_gallery(run, summary, known(), {"nodule": "nodule"}, n_random_images=4, height=32)
        drawn[seed] = [image.id for image in made.sections[0].images]
    assert drawn[7] == [image.id for image in first.images][:4]
    assert drawn[7] != drawn[8]


def test_the_worst_come_first(pictures):
    chosen = {
        kind: [one.row for one in select_extreme_images(kind, "nodule", known(), 2)]
        for kind in ("missed", "false_alarms", "borderline", "most_confident")
    }
    assert chosen == {"missed": [0, 4], "false_alarms": [1, 5], "borderline": [3, 5], "most_confident": [6, 2]}
    unlabeled = [PredictedImage(9, "nobody knows", {"nodule": -9.0}, {"nodule": None})]
    assert (
        select_extreme_images("missed", "nodule", unlabeled, 2)
        == select_extreme_images("false_alarms", "nodule", unlabeled, 2)
        == []
    )
    kinds = [section.kind for section in pictures.sections]
    assert kinds == ["random", "missed", "false_alarms", "borderline", "most_confident", "review", "prototypes"]
    by_kind = {section.kind: section.images for section in pictures.sections}
    assert [image.reason for image in by_kind["review"]] == [one.reason for one in full().shortcut.review_cases]
    assert [(image.id, image.cluster) for image in by_kind["prototypes"]] == [(IDS[n], 1 + n // 3) for n in range(6)]
    assert [image.truth for image in by_kind["missed"]] == ["present"] * 2
    assert [image.log_odds for image in by_kind["missed"]] == [-3.0, -0.5]


def test_what_is_read_or_typical_but_has_no_answer_is_left_out(run):
    shortcut = ShortcutResult(
        review_cases=(ReviewCase(id="not there", finding="nodule", reason="so"),),
        cluster_analyses=(
            ClusterAnalysis(finding="nodule", method="gradcam", n_clusters=1, n_maps=1, n_excluded=0,
                       clusters=(MapCluster(number=1, n_images=1, prototypes=("not there",)),)),
        ),
    )  # fmt: skip
    made = build_gallery(
        run, full(findings=FINDINGS[:1], shortcut=shortcut), known(), {"nodule": "nodule"}, n_random_images=4, height=32
    )
    assert [section.kind for section in made.sections] == [
        "random",
        "missed",
        "false_alarms",
        "borderline",
        "most_confident",
    ]


def image_of(uri, most=MAX_IMAGE_BYTES):
    head, data = uri.split(",", 1)
    assert head == "data:image/webp;base64"
    raw = base64.b64decode(data)
    assert len(raw) <= most
    return np.asarray(Image.open(io.BytesIO(raw)).convert("RGBA"))


def test_an_image_and_its_map_lie_apart_and_one_without_image_says_so(pictures, whole):
    shots = {image.id: image for image in pictures.sections[0].images}
    there, gone = shots[IDS[2]], shots[IDS[0]]
    assert [map.method for map in there.maps] == ["gradcam", "inputxgradient"]
    assert [map.is_signed for map in there.maps] == [False, True]
    photo, heat = image_of(there.image_data_uri), image_of(there.maps[0].data_uri)
    assert photo.shape == heat.shape == (96, 96, 4)
    original = np.asarray(Image.fromarray(draw_radiograph(2, "nodule").image).resize((96, 96)), float)
    assert abs(photo[..., 0] - original).mean() < 6
    assert heat[..., 3].min() == 0
    assert heat[..., 3].max() > 200
    assert (gone.image_data_uri, gone.missing_reason) == (None, "there is no such file")
    assert all(map.includes_image and "without its image" in map.alt_text for map in gone.maps)
    assert "The image is not shown:" in Reader(whole).text
    assert "the map on gray" in whole.lower()


def test_the_map_alone_is_clear_where_it_is_zero_and_veils_what_was_not_shown():
    heat = np.zeros((4, 4), np.float32)
    heat[0, 0] = 2.0
    shown = Placement.identity((64, 64))
    part = Placement(np.array([[1.0, 0.0, 16.0], [0.0, 1.0, 0.0]]), (64, 64), (80, 64))
    facts = {
        "layer": None,
        "layout": None,
        "notes": (),
        "diagnostics": {},
        "parameters": {},
        "versions": {},
        "image": None,
    }
    facts |= {"method": "m", "target": 0, "label": "l", "score": 0.0, "probability": None, "name": "n", "model": "d"}
    facts |= {"input_size": (64, 64), "status": "ok", "model_input_image": None, "affine": None, "scan_steps": ()}
    made = functools.partial(Explanation, **facts)
    alone = render_map_rgba(made(attribution=heat, placement=shown), 64)
    assert alone.shape == (64, 64, 4)
    assert alone[4, 4, 3] == round(255 * MAX_MAP_OPACITY)
    assert alone[40, 40, 3] == 0
    signed = render_map_rgba(made(attribution=heat - 1.0 * (heat == 0), placement=shown), 64)
    assert signed[40, 40, 2] > signed[40, 40, 0]
    assert signed[4, 4, 0] > signed[4, 4, 2]
    outside = render_map_rgba(made(attribution=heat, placement=part), 80)
    assert (outside[:16, :, 3] == round(255 * UNCOVERED_OPACITY)).all()
    assert np.ptp(outside[:15, :, :3].astype(int), axis=2).max() == 0
    assert outside[20, 4, 3] == round(255 * MAX_MAP_OPACITY)
    assert (outside[40:, :, 3] == 0).all()


def test_the_outline_of_the_finding_lies_around_its_mask():
    mask = np.zeros((100, 200), bool)
    mask[40:60, 80:120] = True
    outline = render_outline_rgba(mask, 50)
    assert outline.shape == (50, 100, 4)
    line = (outline[..., :3] == OUTLINE_COLOR).all(2) & (outline[..., 3] == 255)
    assert not line[20:30, 40:60].any()  # what is inside stays visible
    assert line[18:20, 40:60].all()
    assert line[30:32, 40:60].all()
    assert line[20:30, 38:40].all()
    assert not outline[:16].any()
    assert not outline[:, :36].any()
    assert render_outline_rgba(np.zeros((8, 8), bool), 50) is None
    dot = np.zeros((900, 900), bool)
    dot[450, 450] = True
    assert render_outline_rgba(dot, 50)[..., 3].any()  # smaller than a pixel of the picture


@pytest.mark.slow
def test_the_gallery_draws_where_the_finding_was_marked(run):
    asked = []

    def load_mask(row, finding, size):
        asked.append((row, finding, size))
        mask = np.zeros(size, bool)
        mask[10:20, 10:20] = row % 2 == 0
        return None if row == 2 else mask

    made = build_gallery(
        run,
        full(findings=FINDINGS[:1]),
        known(),
        {"nodule": "nodule"},
        n_random_images=COUNT,
        height=96,
        load_mask=load_mask,
    )
    assert {size for _, _, size in asked} == {draw_radiograph(0, "nodule").image.shape}
    outlined = {image.id for image in made.sections[0].images if image.outline_data_uri}
    assert outlined == {IDS[n] for n in (0, 4, 6)}
    html = render_page(full(findings=FINDINGS[:1]), made)
    assert html.count('class="outline"') == html.count('alt="The outline of the annotated finding"') > 0
    assert "marked area outlined" in html
    assert find_unsupported_claims(html, full(findings=FINDINGS[:1]).model_dump(mode="json"), made.as_dict) == []


def test_planes_of_a_volume_have_room_for_names_and_sides():
    assert VOLUME_HEIGHT >= 2 * MIN_HEIGHT_WITH_TEXT
    printed = page_module._read_template("page.css").partition("@media print")[2]
    assert ".shots:has(.volumes) { grid-template-columns: 1fr 1fr; }" in printed
    assert re.search(
        r"\.sights \{ grid-template-columns: repeat\(auto-fit, minmax\(\d+mm, 1fr\)\); \}", printed
    )  # no empty half


def test_a_volume_in_the_gallery_is_drawn_with_its_outline(tmp_path):
    nibabel = pytest.importorskip("nibabel")
    from torch import nn

    from camscope.images.scans.scan_preprocess import ScanPreprocess

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Sequential(nn.Conv3d(1, 4, 3), nn.ReLU())
            self.fc = nn.Linear(4, 2)

        def forward(self, x):
            return self.fc(self.layer(x).mean((2, 3, 4)))

    values = np.random.default_rng(0).random((12, 14, 16)).astype(np.float32)
    nibabel.save(nibabel.Nifti1Image(values, np.diag([-1.0, -1, 1, 1])), tmp_path / "a.nii")
    (tmp_path / "list.csv").write_text("path,id\na.nii,case 000", encoding="utf-8")
    explainer = GradCAM(Net().eval(), "layer", preprocess=ScanPreprocess())
    run_batch([explainer], tmp_path / "list.csv", tmp_path / "run", [0])
    found, image = (
        BatchRun(tmp_path / "run", tmp_path / "list.csv"),
        PredictedImage(0, "case 000", {"nodule": 1.0}, {"nodule": True}),
    )
    shapes = []

    def load_mask(row, finding, size):
        shapes.append(size)
        mask = np.zeros(size, bool)
        mask[:, :, :8] = True  # each axial and each coronal plane cuts it
        return mask

    summary = full(findings=FINDINGS[:1], shortcut=ShortcutResult())
    marked, plain = (
        build_gallery(found, summary, [image], {"nodule": "0"}, load_mask=loader).sections[0].images[0]
        for loader in (load_mask, lambda *_: None)
    )
    assert len(shapes[0]) == 3
    assert marked.maps[0].is_volume
    pixels, bare = (image_of(one.maps[0].data_uri, 3 * MAX_IMAGE_BYTES)[..., :3].astype(int) for one in (marked, plain))
    assert pixels.shape[0] == VOLUME_HEIGHT
    assert (abs(pixels - bare).max(2) > 100).sum() > 200  # a line around the mask


def test_a_picture_is_never_too_large():
    noise = np.random.default_rng(0).integers(0, 256, (300, 300, 3), dtype=np.uint8)
    assert image_of(encode_data_uri(noise)).shape[0] < 300
    assert len(base64.b64decode(encode_data_uri(noise, 3000).partition(",")[2])) <= 3000


@pytest.mark.slow
def test_text_in_a_picture_is_not_shown_unless_it_is_allowed(tmp_path):
    pytest.importorskip("pydicom")
    from tests.scan_files import dicom
    from tests.scan_files import written as as_file

    scan = dicom(draw_radiograph(1, "nodule").image.astype(np.uint16), BurnedInAnnotation="YES", Modality="DX")
    (tmp_path / "a.dcm").write_bytes(as_file(scan))
    (tmp_path / "list.csv").write_text("path,id\na.dcm,case 000", encoding="utf-8")
    run_batch([GradCAM(load_model("phantom"))], tmp_path / "list.csv", tmp_path / "run", ["nodule"])
    summary, own = full(findings=FINDINGS[:1], shortcut=ShortcutResult()), known()[:1]
    for allowed in (False, True):
        found = BatchRun(tmp_path / "run", tmp_path / "list.csv")
        image = (
            build_gallery(found, summary, own, {"nodule": "nodule"}, allow_burned_in_text=allowed).sections[0].images[0]
        )
        assert (image.image_data_uri is not None) is allowed
        assert ("text may be burned into it" in image.missing_reason) is not allowed


def test_norms_are_mapped_to_sections_that_there_are():
    rows = list(csv.DictReader(io.StringIO(read_reporting_guidelines_csv())))
    assert {"norm", "item", "requirement", "section", "summary_part", "checked_against"} == set(rows[0])
    claim = {row["item"] for row in rows if row["norm"] == "CLAIM 2024"}
    assert claim == {str(n) for n in (23, *range(28, 34), *range(35, 41))}
    assert {id_ for row in rows for id_ in row["section"].split()} <= {*PAGE_SECTIONS, "front"}
    assert {"TRIPOD+AI", "EU AI Act", "IHE AIR"} <= {row["norm"] for row in rows}
    assert all(
        all(row[name] for name in ("norm", "item", "requirement", "summary_part", "checked_against")) for row in rows
    )


def test_the_page_says_which_items_nobody_has_checked(whole):
    rows = list(csv.DictReader(io.StringIO(read_reporting_guidelines_csv())))
    own = whole.partition('<section id="norms"')[2].partition("</section>")[0]
    assert own.count("<strong>not checked</strong>") == sum(row["checked_against"] == "not checked" for row in rows) > 0
    assert "has not yet been checked against its source" in own


def test_paper_gets_no_slider_and_nothing_that_sticks():
    printed = page_module._read_template("page.css").partition("@media print")[2]
    assert re.search(r"\.contents,[^{]*\.slide[^{]*\{ display: none", printed)
    assert "break-inside: avoid" in printed
    assert "::details-content" in printed
    assert "sticky" not in printed
    kept = re.search(r"([^{}]*)\{ break-after: avoid; \}", printed).group(1)
    assert {"h2", "h3", "h3 + p", "summary", "thead", ".wall > p"} <= {one.strip() for one in kept.split(",")}


def test_a_reason_can_be_broken_and_only_a_screen_is_a_phone():
    style = page_module._read_template("page.css")
    for rule in re.findall(r"([^{}]+)\{([^{}]*nowrap[^{}]*)\}", style):
        assert not re.search(r"\bsmall\b|\.figure\s*$|thead", rule[0].replace(".tally thead th", "")), rule
    assert "@media (max-width: 52rem)" not in style
    assert "@media screen and (max-width: 52rem)" in style
    assert re.search(r"\.tree > div \{ display: flex; flex-wrap: wrap", style)


def test_a_number_that_decides_nothing_says_so_beside_it():
    whole = full(findings=FINDINGS[:1])
    kept = tuple(one for one in whole.shortcut.masked_auroc if one.kind == "keep only")
    note = "These numbers decide nothing, because the config names no masks of the organ."
    for masked in (whole.shortcut.masked_auroc, kept):
        html = render_page(
            full(findings=FINDINGS[:1], shortcut=whole.shortcut.model_copy(update={"masked_auroc": masked}))
        )
        rows = re.findall(r"<tr[^>]*>(?:(?!</tr>).)*keep only(?:(?!</tr>).)*</tr>", html, re.DOTALL)
        assert len(rows) == len(kept) > 0
        assert all("<small>decides nothing</small>" in row and 'class="idle"' in row for row in rows)
        assert (note in html) == (masked == kept)
        assert ("<strong><bdi>AUROC of masked images</bdi>" in html) == (masked != kept)  # a chart of what decides
    html = render_page(whole)  # no region is a marker here, so that no removal counts
    removals = [one for one in whole.shortcut.interventions if one.kind == "remove"]
    assert html.count("decides nothing: every image has it") == len(removals)


def test_paper_repeats_no_table_and_bounds_the_galleries():
    printed = page_module._read_template("page.css").partition("@media print")[2]
    hidden = re.search(r"\.again, ([^{]*)\{ display: none", printed).group(1)
    assert {".metrics", "tr.idle", "details.group.is-untested"} <= {one.strip() for one in hidden.split(",")}
    assert re.search(r"\.shot:nth-child\(n\+5\)[^{]*\{ display: none", printed)
    html = render_page(full())
    assert "Tables of every metric" in html
    assert html.count('class="wide again"') > 0
