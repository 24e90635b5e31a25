"""The first screen of a report: what it says of results that are empty, open, contradictory, of one class, of one patient."""

import ast
import html
import importlib
import inspect
import re
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

pytest.importorskip("pydantic")
pytest.importorskip("jinja2")
pytest.importorskip("pyarrow")
pytest.importorskip("matplotlib")

from markupsafe import Markup

from camscope.audit.core.stage_result_schema import (
    RANDOM_SAMPLE_REASON,
    DataCheckResult,
    EstimateSummary,
    FlowStep,
    MetricsResult,
    SanityImages,
    SanityResult,
    StablePredictionShare,
    StageResult,
    StoppingLook,
)
from camscope.audit.core.summary_schema import RegionOverlap, Summary, Verdict
from camscope.audit.report.concerns import iter_concerns
from camscope.audit.report.data_and_method_sentences import (
    describe_clusters,
    describe_config_declarations,
    describe_explained_output,
    describe_image_count,
    describe_localization_images,
    describe_masked_aurocs,
    describe_patient_grouping,
    describe_sanity_images,
    describe_stable_predictions,
    describe_statistical_unit,
    explain_missing_contradictions,
    join_texts,
    list_interval_methods,
)
from camscope.audit.report.number_format import format_estimate
from camscope.audit.report.open_questions import OPEN_QUESTIONS, SHORT_NAMES, iter_open_questions
from camscope.audit.report.overview import build_overview, describe_model, iter_unproven_conclusions, write_plain_text
from camscope.audit.report.render_html_page import render_one_page_overview, render_page
from camscope.audit.report.verdict_and_auroc_sentences import build_result_sentence, describe_effect, explain_conclusion
from camscope.audit.report.verdict_labels_and_groups import describe_sample, format_sentence, group_verdicts_by_topic
from camscope.audit.shortcuts.intervention_effects_and_reliance import judge_reliance
from camscope.audit.verdicts import NO_PERFORMANCE_REASON, derive_verdicts
from camscope.audit.verdicts.limitations_and_warnings import list_warnings
from camscope.audit.verdicts.model_and_data_verdicts import INVERTED_REASON
from camscope.audit.verdicts.patients_needed import estimate_patients_needed
from camscope.audit.verdicts.verdict_rules import QUESTIONS, build_verdict
from tests.audit.audits import figures_left_out
from tests.audit_summary import full, nothing, num, verdict
from tests.report_consistency import find_unsupported_claims

FINDING = "nodule"
CONCLUSIONS = ("supported", "not supported", "not decided")
CLAIM_FIELDS = {
    "column": "site",
    "region": "the border",
    "maps": "The maps of Grad-CAM",
    "condition": "under small shifts",
}


def with_auroc(value, spread, n=40, finding=FINDING, **changed) -> Summary:
    """An audit of one finding with this AUROC, and the verdicts that follow from it."""
    whole = full(findings=(finding,))
    auroc = num(value, spread, n, n, baseline=0.5, name="chance")
    if spread is None:
        auroc = auroc.model_copy(update={"reason": "too few patients for an interval: 1, and 6 are needed"})
    performance = whole.predict.performance[0].model_copy(update={"auroc": auroc, **changed})
    return derived(
        whole.model_copy(update={"predict": whole.predict.model_copy(update={"performance": (performance,)})})
    )


def derived(summary: Summary) -> Summary:
    return summary.model_copy(update={"verdicts": tuple(derive_verdicts(summary))})


def fewer(node, patients):
    """Each estimate from so many patients at most, without an interval where there are fewer than six."""
    if isinstance(node, list):
        return [fewer(item, patients) for item in node]
    if not isinstance(node, dict):
        return node
    capped = {
        name: min(node[name], patients)
        for name in ("n_groups", "n_patients", "n_values")
        if isinstance(node.get(name), int)
    }
    if "interval_method" in node and patients < 6:
        capped |= {"low": None, "high": None, "p_value": None}
    return {name: fewer(item, patients) for name, item in node.items()} | capped


def one_class() -> Summary:
    empty = EstimateSummary(reason="every image has the finding", baseline=0.5, baseline_name="chance")
    return with_auroc(0.5, 0.1, n_negatives=0, auroc=empty, subgroups=(), subgroup_differences=(), bins=())


def contradictory() -> Summary:
    """Every question is answered against the model or the maps."""
    whole, verdicts = full(findings=(FINDING,)), []
    for name, question in QUESTIONS.items():
        conclusion = "not supported" if question.is_good_if_supported else "supported"
        value = num(-0.5, 0.1, baseline=0.0, name="no effect")
        verdicts.append(
            build_verdict(name, FINDING, (conclusion, "so it was found"), value, 0.1, "border", **CLAIM_FIELDS)
        )
    return whole.model_copy(update={"verdicts": tuple(verdicts)})


def determined(n_images=113) -> Summary:
    """A column determines the label in all images, or in those that have a value."""
    whole = with_auroc(0.95, 0.03)
    flow = (FlowStep(name="rows audited", n_rows=113),)
    check = whole.check.model_copy(update={"determining_columns": {FINDING: {"cell_type": n_images}}, "flow": flow})
    return whole.model_copy(update={"check": check, "verdicts": ()})


def sampled() -> Summary:
    """40 of 113 images are audited."""
    flow = (
        FlowStep(name="rows of the manifest", n_rows=113),
        FlowStep(name="rows audited", n_rows=40, reason=RANDOM_SAMPLE_REASON),
    )
    whole = with_auroc(0.7, 0.1)
    return whole.model_copy(update={"check": whole.check.model_copy(update={"flow": flow})})


def sound() -> Summary:
    """One verdict, in favor of the model, of a model with many classes that returns probabilities."""
    whole = with_auroc(0.9, 0.05)
    names = tuple(f"class {n}" for n in range(9))
    return whole.model_copy(
        update={
            "check": whole.check.model_copy(update={"has_patient_column": True}),
            "verdicts": (build_verdict("performance", FINDING, ("supported", "so it is"), num(0.9, 0.05), 0.7),),
            "resolve": whole.resolve.model_copy(update={"class_names": names, "n_classes": len(names)}),
            "predict": whole.predict.model_copy(update={"outputs_are_probabilities": True}),
            "robustness": MetricsResult(n_images=12),
        }
    )


def without_reasons() -> Summary:
    """Nothing says why it is missing."""
    whole = with_auroc(0.9, 0.05)
    first = whole.predict.performance[0]
    performance = [first.model_copy(update={"auroc": auroc}) for auroc in (EstimateSummary(), num(0.9))]
    bare = verdict(
        "shortcut", "It relies on it.", FINDING, "supported", "contradicts", EstimateSummary(), 0.1, "shortcut"
    )
    (asked,) = (one for one in whole.verdicts if one.question == "performance")
    return whole.model_copy(
        update={
            "predict": whole.predict.model_copy(update={"performance": tuple(performance)}),
            "verdicts": (
                bare,
                asked.model_copy(update={"conclusion": "not decided", "finding": "other", "reason": ""}),
            ),
            "localization": MetricsResult(tested=False),
        }
    )


def images_of_several_sizes() -> Summary:
    """One image, clusters of which none is clear, and predictions that changed."""
    whole = full(findings=(FINDING,))
    line = whole.localization.metric_summaries[0].model_copy(
        update={"metric": "stability", "control": False, "value": num(0.5, 0.1)}
    )
    shares = [
        StablePredictionShare(metric=metric, finding=FINDING, share=share)
        for metric, share in (("stability", num(0.9, 0.1)), ("other", EstimateSummary()))
    ]
    sizes = [
        SanityImages(finding=FINDING, n_images=n, size=(224, 224), n_other_sizes=n_other)
        for n, n_other in ((1, 1), (8, 2))
    ]
    analysis = whole.shortcut.cluster_analyses[0].model_copy(update={"n_clusters": 1, "n_excluded": 1})
    return derived(
        whole.model_copy(
            update={
                "robustness": MetricsResult(n_images=1, metric_summaries=(line,), stable_predictions=tuple(shares)),
                "sanity": whole.sanity.model_copy(update={"images_by_finding": tuple(sizes)}),
                "shortcut": whole.shortcut.model_copy(update={"cluster_analyses": (analysis,)}),
            }
        )
    )


def stopped_early() -> Summary:
    """Tests with other numbers of images, of which one stopped."""
    look = StoppingLook(
        method="gradcam",
        finding=FINDING,
        look=1,
        n_looks=3,
        n_images=10,
        max_images=24,
        confidence_level=0.98,
        reason="decided",
    )
    made = [
        build_verdict(question, FINDING, ("supported", ""), num(0.9, 0.05, n, n), 0.5, "gradcam", **CLAIM_FIELDS)
        for question, n in (("robustness", 10), ("sanity", 12))
    ]
    whole = sound()
    update = {"robustness": MetricsResult(n_images=10, stopping_looks=(look,)), "verdicts": tuple(made)}
    return whole.model_copy(update=update)


def test_other_numbers_of_images_are_explained():
    note = write_plain_text(build_overview(stopped_early()).notes[-1])
    assert note.startswith("The numbers of images differ: ")
    assert "some tests stop" in note
    unstopped = stopped_early().model_copy(update={"robustness": MetricsResult()})
    assert "stop" not in build_overview(unstopped).notes[-1]
    assert not any("numbers of images" in note for note in build_overview(sound()).notes)


def one_open_question() -> Summary:
    open_verdict = build_verdict("performance", FINDING, ("not decided", ""), EstimateSummary(), 0.7)
    return full(findings=(FINDING,), verdicts=(open_verdict,))


def inverted() -> Summary:
    """Images without the finding score higher, also where the organ is masked."""
    whole = with_auroc(0.3, 0.1)
    masked = build_verdict("masked organ", FINDING, ("supported", INVERTED_REASON), num(0.8, 0.05), 0.7, "organ")
    return whole.model_copy(update={"verdicts": (*whole.verdicts, masked)})


def with_donors() -> Summary:
    """A region was pasted from donors into receivers, and one such verdict is open."""
    roles = {"n_groups_by_role": (("receivers", 49), ("donors", 20), ("controls", 20))}
    sizes = EstimateSummary(value=0.02, low=-0.2, high=0.3, n_values=49, n_groups=20, **roles)
    decided = build_verdict(
        "shortcut",
        FINDING,
        ("not supported", ""),
        num(0.0, 0.05).model_copy(update=roles),
        0.1,
        "border",
        region="the border",
    )
    undecided = build_verdict("shortcut", FINDING, ("not decided", ""), sizes, 0.1, "corners", region="the corners")
    return full(findings=(FINDING,), verdicts=(decided, undecided.model_copy(update={"patients_needed": 360})))


def constant() -> Summary:
    """A model whose output hardly depends on the image."""
    summary = with_auroc(0.53, 0.19)
    (performance,) = summary.predict.performance
    update = {"performance": (performance.model_copy(update={"log_odds_std": 0.003}),)}
    return summary.model_copy(update={"predict": summary.predict.model_copy(update=update)})


def without_patients() -> Summary:
    """Nothing says which images show the same patient, and the donors are few."""
    summary = with_donors()
    return summary.model_copy(update={"check": summary.check.model_copy(update={"has_patient_column": False})})


TABLES_OF_TEMPLATES = ("STAGE_DESCRIPTIONS", "OPEN_QUESTIONS")
DECLARATIONS = (
    {},
    {"declarations": 1},
    *({"declarations": 2, "declared_before_results": was} for was in (True, False)),
)
SUMMARIES = {
    "full": full,
    "empty": nothing,
    "empty data": lambda: nothing().model_copy(update={"check": DataCheckResult()}),
    "untestable": lambda: derived(Summary.model_validate(fewer(full().model_dump(mode="json"), 8))),
    "one patient": lambda: derived(Summary.model_validate(fewer(full().model_dump(mode="json"), 1))),
    "one class": one_class,
    "contradictory": contradictory,
    "no value": lambda: with_auroc(None, None),
    "inverted": inverted,
    "chance": lambda: with_auroc(0.53, 0.19),
    "chance, open": lambda: with_auroc(0.55, 0.1),
    "between chance and margin": lambda: with_auroc(0.7, 0.1),
    "no verdict": lambda: with_auroc(0.9, 0.05).model_copy(update={"verdicts": ()}),
    "a column determines the label": determined,
    "a column determines the label where it has a value": lambda: determined(103),
    "sound": sound,
    "without reasons": without_reasons,
    "images of several sizes": images_of_several_sizes,
    "one open question": one_open_question,
    "stopped early": stopped_early,
    "donors and receivers": with_donors,
    "constant": constant,
    "no patient column": without_patients,
    "a sample of the images": sampled,
}  # fmt: skip


def sentences_of(summary: Summary) -> list[str]:
    overview = build_overview(summary)
    concerns = [overview.concern, *overview.other_concerns, *overview.results, *iter_concerns(summary)]
    parts = [overview.model, overview.data, overview.patients, overview.chance, *overview.unproven]
    parts += [overview.more_concerns, overview.all_verdicts, overview.all_open_questions]
    parts += [overview.further_questions, *overview.notes]
    parts += [part for concern in concerns for part in (concern.sentence, concern.details)]
    parts += [part for answer in overview.answers for part in (answer.estimate, answer.sample, answer.sentence)]
    parts += [part for item in iter_open_questions(summary) for part in (item.question, item.reason)]
    parts += [explain_conclusion(verdict) for verdict in summary.verdicts]
    parts += sentences_of_the_sections(summary)
    texts = [format_sentence(verdict.reason) for verdict in summary.verdicts]
    return [write_plain_text(part) for part in parts] + texts + list(list_warnings(summary))


def sentences_of_the_sections(summary: Summary) -> list[Markup]:
    parts = [describe_patient_grouping(summary.check), describe_statistical_unit(summary.check)]
    parts += [describe_masked_aurocs(summary), describe_explained_output(summary)]
    parts += [describe_config_declarations(declared) for declared in DECLARATIONS]
    for group in group_verdicts_by_topic(summary):
        parts.append(explain_missing_contradictions(summary, f"the {group.topic}", group.questions))
    parts += describe_localization_images(summary.localization)
    parts += describe_sanity_images(summary.sanity)
    for stage in (summary.faithfulness, summary.robustness):
        parts += [*describe_image_count(stage), *map(describe_stable_predictions, stage.stable_predictions)]
    parts += map(describe_clusters, summary.shortcut.cluster_analyses)
    for method in list_interval_methods(summary):
        parts += [method.description, *method.estimate_labels]
    return list(map(Markup, parts))


@pytest.mark.slow
@pytest.mark.parametrize("name", list(SUMMARIES))
def test_every_sentence_is_whole_whatever_the_results_are(name, pytestconfig):
    summary = SUMMARIES[name]()
    for text in sentences_of(summary):
        assert not re.search(r"[{}]|\bNone\b(?! of the)|nan|\.\.|\s[.,;:]|: \.|  |;$|,$", text), text
        assert text == html.unescape(text)
        assert len(re.split(r"[.;:] ", text)[0].split()) <= 35, text
    sources = summary.model_dump(mode="json")
    has_charts = name == "full" or pytestconfig.getoption("--thorough")
    with nullcontext() if has_charts else figures_left_out():
        page = render_page(summary)
    assert find_unsupported_claims(page, sources) == []
    assert find_unsupported_claims(render_one_page_overview(summary), sources) == []


def templates_of(module) -> list[str]:
    """Each sentence template of a module, as a pattern: the strings of three words or more in its functions and tables."""
    tree = ast.parse(inspect.getsource(module))
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    tables = [node for node in tree.body if isinstance(node, ast.AnnAssign) and node.target.id in TABLES_OF_TEMPLATES]
    skipped = {ast.get_docstring(node, clean=False) for node in functions} | set(QUESTIONS)
    within = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    patterns = {}
    for node in (child for root in (*functions, *tables) for child in ast.walk(root)):
        if isinstance(node, ast.JoinedStr):
            parts = [part.value if isinstance(part, ast.Constant) else "{}" for part in node.values]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in within:
            if node.value in skipped:
                continue
            parts = [node.value]
        else:
            continue
        template = re.sub(r"{+\w*}+", "{}", "".join(parts))
        if " " in template and len(re.findall(r"[A-Za-z]+", template)) > 2:
            patterns[template] = r".*?".join(map(re.escape, template.split("{}")))
    return list(patterns.values())


@pytest.mark.slow
def test_every_template_is_filled_by_one_of_these_results():
    summaries = [made() for made in SUMMARIES.values()]
    texts = "\n".join(text for summary in summaries for text in sentences_of(summary))
    names = ("overview", "concerns", "verdict_and_auroc_sentences", "open_questions", "data_and_method_sentences")
    missing = [
        pattern
        for name in names
        for pattern in templates_of(importlib.import_module(f"camscope.audit.report.{name}"))
        if not re.search(pattern, texts)
    ]
    assert missing == [], chr(10).join(missing)


@pytest.mark.parametrize("name", list(SUMMARIES))
def test_only_a_decided_verdict_is_a_result_and_each_open_one_is_listed(name):
    summary = SUMMARIES[name]()
    overview = build_overview(summary)
    open_claims = {verdict.answer for verdict in summary.verdicts if verdict.conclusion == "not decided"}
    told = {
        write_plain_text(result.sentence) for result in (*overview.results, *overview.other_concerns, overview.concern)
    }
    assert not told & open_claims
    untested = {name for name, stage in summary if isinstance(stage, StageResult) and not stage.tested}
    open_questions = list(iter_open_questions(summary))
    assert overview.open_questions == open_questions[: len(overview.open_questions)]
    sections = {item.section for item in open_questions}
    for one in summary.verdicts:
        if one.conclusion == "not decided" and one.section not in untested:
            assert one.section in sections
    assert len([item for item in open_questions if item.section == "missing"]) >= len(untested)


@pytest.mark.parametrize("question", list(QUESTIONS))
@pytest.mark.parametrize("conclusion", CONCLUSIONS)
def test_an_answer_says_what_the_conclusion_is(question, conclusion):
    effect = num(0.5, 0.1)
    made = build_verdict(question, FINDING, (conclusion, ""), effect, 0.1, "border", **CLAIM_FIELDS)
    if conclusion == "supported":
        assert made.answer == made.claim
    elif conclusion == "not supported":
        assert made.answer != made.claim
        assert re.search(r"\b(not|no longer|cannot|differs|form one cluster)\b", made.answer)
    else:
        assert made.answer == f"It is not decided whether {made.claim[0].lower()}{made.claim[1:]}"
    assert re.fullmatch(r"[A-Z][^{}]*\.", made.answer)
    assert question in OPEN_QUESTIONS
    assert question in SHORT_NAMES


def test_the_words_of_an_insertion_are_explained_and_receivers_are_counted():
    overview = build_overview(with_donors())
    assert "(of the donor) is pasted into another (of the receiver)" in overview.notes[0]
    assert (
        write_plain_text(overview.open_questions[0].reason)
        == "needs about 360 patients in each role; there are 20 donors"
    )
    assert not any("donor" in note for note in build_overview(sound()).notes)
    reason = build_overview(without_patients()).open_questions[0].reason
    assert write_plain_text(reason) == "needs about 360 images in each role; there are 20 donors"


def test_a_model_that_answers_the_same_for_all_images_is_a_concern():
    sentences = [write_plain_text(concern.sentence) for concern in iter_concerns(constant())]
    assert "The model answers nearly the same for all images, with “nodule” or without." in sentences
    assert not any("nearly the same" in write_plain_text(concern.sentence) for concern in iter_concerns(full()))


def test_reasons_speak_of_images_where_patients_are_unknown():
    summary = with_auroc(0.7, 0.1)
    assert any("patient" in verdict.reason for verdict in derive_verdicts(summary))
    unknown = summary.model_copy(update={"check": summary.check.model_copy(update={"has_patient_column": False})})
    assert not any("patient" in verdict.reason for verdict in derive_verdicts(unknown))


@pytest.mark.parametrize("name", ["full", "untestable"])
def test_open_questions_that_are_not_listed_are_named(name):
    summary = SUMMARIES[name]()
    overview, questions = build_overview(summary), list(iter_open_questions(summary))
    names = {question.short_name for question in questions[len(overview.open_questions) :]}
    assert names
    assert all(short_name in write_plain_text(overview.further_questions) for short_name in names)
    n_open = sum(verdict.conclusion == "not decided" for verdict in summary.verdicts)
    assert write_plain_text(overview.all_open_questions) == f"All {n_open} verdicts that are not decided"


@pytest.mark.parametrize(
    ("source", "architecture", "said"),
    [
        ("chest, with weights", "ResNet", "chest (class ResNet), 11,000 parameters"),
        ("resnet", "ResNet", "resnet, 11,000 parameters"),
        ("chest", "", "chest, 11,000 parameters"),
    ],
)
def test_a_model_is_described_by_its_class_and_size(source, architecture, said):
    summary = full()
    update = {"model": source, "architecture": architecture, "n_parameters": 11_000}
    changed = summary.model_copy(update={"resolve": summary.resolve.model_copy(update=update)})
    assert write_plain_text(describe_model(changed)).startswith(f"{said}; classes: ")


# Performance


@pytest.mark.parametrize(
    ("value", "spread", "said", "tone"),
    [
        (
            0.53,
            0.19,
            "It is not shown that the model detects “nodule”: the interval includes chance (0.5) and the required 0.7.",
            "untested",
        ),
        (
            0.55,
            0.10,
            "It is not shown that the model detects “nodule”: the interval includes chance (0.5) and lies below the required "
            "0.7.",
            "contradicts",
        ),
        (0.3, 0.1, "The ranking is inverted: images without “nodule” score higher than images with it.", "contradicts"),
        (0.6, 0.05, "The whole interval lies below 0.7, the minimum that was set before the audit.", "contradicts"),
        (
            0.7,
            0.1,
            "It is better than chance. The interval includes 0.7, the minimum that was set before the audit.",
            "untested",
        ),
        (0.9, 0.05, "The whole interval lies above 0.7, the minimum that was set before the audit.", "supports"),
    ],
)
def test_an_auroc_counts_for_the_model_only_above_its_margin(value, spread, said, tone):
    summary = with_auroc(value, spread)
    (answer,) = build_overview(summary).answers
    assert (write_plain_text(answer.sentence), answer.tone) == (said, tone)
    supporting = [
        one for one in summary.verdicts if one.direction == "supports" and QUESTIONS[one.question].topic == "model"
    ]
    unproven = [write_plain_text(clause) for clause in iter_unproven_conclusions(summary)]
    assert ("that the model detects “nodule”" in unproven) == (tone != "supports")
    assert bool(supporting) == (tone == "supports")
    if tone != "supports":
        held_back = [one for one in summary.verdicts if NO_PERFORMANCE_REASON in one.reason]
        assert held_back
        assert all(one.direction == "neither" and one.conclusion != "not decided" for one in held_back)


@pytest.mark.parametrize(
    ("value", "side"), [(0.53, "includes chance (0.5) and the required 0.7"), (0.2, "lies below chance (0.5)")]
)
def test_an_auroc_that_reaches_chance_is_a_concern(value, side):
    whole = with_auroc(value, 0.19)
    few = whole.model_copy(update={"verdicts": tuple(one for one in whole.verdicts if one.question == "performance")})
    first = next(iter_concerns(few))
    assert write_plain_text(first.sentence) == "This audit does not show that the model detects “nodule”."
    assert write_plain_text(first.details) == f"The interval of the AUROC {side}."
    assert sum("detect" in item.sentence or "distinguish" in item.sentence for item in iter_concerns(few)) == 1


def test_few_patients_decide_nothing_about_the_auroc():
    (answer,) = build_overview(with_auroc(0.9, None, n=1)).answers
    said = write_plain_text(answer.sentence)
    assert said.startswith("It decides nothing: ")
    assert answer.tone == "untested"


# The biggest concern


@pytest.mark.parametrize(
    ("summary", "said"),
    [
        (determined(), "The column cell_type alone determines the label “nodule” in all 113 images."),
        (determined(103), "The column cell_type alone determines the label “nodule” wherever it has a value."),
        (with_auroc(0.95, 0.03), ""),
    ],
)
def test_a_column_that_determines_the_label_is_named(summary, said):
    sentences = [
        write_plain_text(item.sentence)
        for item in iter_concerns(summary)
        if "column cell_type" in item.sentence.striptags()
    ]
    assert sentences == ([said] if said else [])
    clauses = [write_plain_text(clause) for clause in iter_unproven_conclusions(summary)]
    assert ("that the model detects “nodule” and not the column cell_type" in clauses) == bool(said)


def test_the_region_with_the_largest_effect_is_the_biggest_concern():
    values = {"border": 0.4, "marker": 1.2, "corners": -0.8}
    made = tuple(
        build_verdict("shortcut", FINDING, ("supported", ""), num(value, 0.1), 0.1, region, region=f"the {region}")
        for region, value in values.items()
    )
    summary = with_auroc(0.95, 0.03).model_copy(update={"verdicts": made})
    concerns = [write_plain_text(item.sentence) for item in iter_concerns(summary)][:3]
    assert [text.rpartition("the ")[2] for text in concerns] == ["marker.", "corners.", "border."]
    assert "that the performance holds where the region “marker” is not related to “nodule”" in [
        write_plain_text(clause) for clause in iter_unproven_conclusions(summary)
    ]


def test_no_concern_is_no_praise():
    assert "not evidence in favor" in build_overview(nothing()).concern.details
    concern = build_overview(sound()).concern
    assert concern.sentence == "None of the decided questions counts against the model."
    assert "remain possible" in concern.details


def reliance_on(*regions: tuple[str, float]) -> list[Verdict]:
    return [
        build_verdict("shortcut", FINDING, ("supported", ""), num(value, 0.1), 0.1, name, region=f"the {name}")
        for name, value in regions
    ]


def test_regions_that_overlap_are_one_concern_and_the_masked_organ_comes_before_another_region():
    masked = build_verdict("masked organ", FINDING, ("supported", ""), num(0.9, 0.05), 0.7)
    made = (*reliance_on(("border", 0.4), ("corners", 0.8), ("marker", 1.2)), masked)
    whole = sound()
    overlap = RegionOverlap(finding=FINDING, region="marker", other_region="corners", share=0.9, n_images=40)
    shortcut = whole.shortcut.model_copy(update={"overlaps": (overlap,)})
    summary = whole.model_copy(update={"shortcut": shortcut, "verdicts": made})
    concerns = list(iter_concerns(summary))
    assert [write_plain_text(item.sentence).split()[-1] for item in concerns] == ["marker.", "masked.", "border."]
    assert [len(item.verdicts) for item in concerns] == [2, 1, 1]
    details = write_plain_text(concerns[0].details)
    assert details.endswith(
        "Regions that overlap it have an effect too, perhaps from the same cause: the image corners."
    )
    assert not any("relies" in result.sentence for result in build_overview(summary).results)


def test_concerns_beyond_three_are_counted():
    assert "more" not in build_overview(sound()).more_concerns
    made = tuple(reliance_on(*((name, 1.0) for name in ("a", "b", "c", "d", "e"))))
    overview = build_overview(sound().model_copy(update={"verdicts": made}))
    assert overview.more_concerns == "and two more concerns"
    assert write_plain_text(overview.all_verdicts) == "All 5 verdicts"  # none against the model but those


def test_contradictions_that_the_first_screen_leaves_out_are_counted():
    answers = [
        build_verdict(
            "robustness", FINDING, ("not supported", ""), num(0.1, 0.05), 0.5, maps="The maps", condition=name
        )
        for name in "abcdef"
    ]
    overview = build_overview(sound().model_copy(update={"verdicts": tuple(answers)}))
    assert len(overview.results) == 4
    assert write_plain_text(overview.all_verdicts) == "All 6 verdicts, two more against the maps"
    assert build_overview(nothing()).all_verdicts == ""


def test_stages_without_a_result_are_a_concern():
    left_out = MetricsResult(tested=False, reason="it does not fit the budget of 4 minutes")
    two = sound().model_copy(update={"faithfulness": left_out, "robustness": left_out})
    concern = build_overview(two).concern
    assert write_plain_text(concern.sentence) == "These stages were not tested: faithfulness and robustness."
    assert write_plain_text(concern.details) == "It does not fit the budget of 4 minutes."
    assert (concern.section, concern.tone) == ("missing", "untested")
    other = two.model_copy(update={"robustness": MetricsResult(tested=False)})
    assert build_overview(other).concern.details == "The reasons differ."
    assert not any("stage" in item.sentence for item in iter_concerns(nothing()))


def test_an_unknown_number_of_patients_is_none():
    whole = full()
    for has_column, said in ((True, f"{whole.check.n_patients}"), (False, "unknown")):
        check = whole.check.model_copy(update={"has_patient_column": has_column})
        assert write_plain_text(build_overview(whole.model_copy(update={"check": check})).patients) == said
    assert build_overview(nothing()).patients == "unknown"


@pytest.mark.parametrize(("n", "said"), [(49, True), (28, False)])
def test_what_is_no_reliance_says_which_share_of_patients_it_could_have_missed(n, said):
    effect = SimpleNamespace(imputation=None, effect=num(0.01, 0.02, n, n))
    decision = judge_reliance([effect], [], 0.1, 0.1)
    assert (decision[0] == "not supported") == said  # 29 patients for 10 %
    made = build_verdict("shortcut", FINDING, decision, num(0.01, 0.02, n, n), 0.1, "border", region="the border")
    clause = "a reliance in fewer than 5.9 % of patients could have been missed, and the config allows up to 10 %"
    assert write_plain_text(explain_conclusion(made)).endswith(clause) == said


# Why a verdict follows, and what it counts


@pytest.mark.parametrize(
    ("question", "value", "spread", "conclusion", "said"),
    [
        ("shortcut", 1.0, 0.2, "supported", "the whole interval lies above the margin of 0.1"),
        ("shortcut", -1.0, 0.2, "supported", "the whole interval lies below the margin of −0.1"),
        ("shortcut", 0.01, 0.02, "not supported", "the whole interval lies within the margin of ±0.1"),
        ("shortcut", 0.1, 0.2, "not decided", "the interval includes the margin of 0.1"),
        ("robustness", 0.05, 0.02, "not supported", "the whole interval lies below the margin of 0.1"),
        ("localization", 0.5, 0.02, "not supported", "center scores as well"),
        ("robustness", 0.5, None, "not decided", "the margin is 0.1"),
        ("sanity", 0.5, None, "supported", "center scores as well"),
        ("leakage", 0.9, 0.05, "supported", "center scores as well"),
        ("leakage", 0.05, 0.02, "not supported", "the whole interval lies below the margin of 0.1"),
    ],
)
def test_a_conclusion_is_explained_by_its_interval(question, value, spread, conclusion, said):
    made = build_verdict(
        question, FINDING, (conclusion, "center scores as well"), num(value, spread), 0.1, "border", **CLAIM_FIELDS
    )
    assert write_plain_text(explain_conclusion(made)) == said


def test_an_estimate_says_what_it_counts():
    roles = (("receivers", 92), ("donors", 1))
    pairs = EstimateSummary(value=1.0, n_values=92, n_groups=1, unit="insertions", n_groups_by_role=roles)
    assert write_plain_text(describe_sample(pairs)) == "92 insertions: 92 receivers, 1 donor"
    assert write_plain_text(describe_sample(num(1.0, n=164, groups=99))) == "164 images of 99 patients"
    assert write_plain_text(describe_sample(num(1.0, n=1, groups=1))) == "1 image of 1 patient"
    assert write_plain_text(describe_sample(num(1.0, n=164, groups=164), has_patients=False)) == "164 images"
    made = build_verdict(
        "shortcut",
        FINDING,
        ("supported", ""),
        num(1.0, 0.1).model_copy(update=pairs.model_dump(include={"n_groups_by_role"})),
        0.1,
        region="the border",
    )
    assert "92 receivers, 1 donor; the whole" in write_plain_text(build_result_sentence(made, full()).details)


# How many patients it takes


@pytest.mark.parametrize(
    ("question", "value", "spread", "n", "margin", "needed"),
    [
        ("performance", 0.6, 0.2, 40, 0.7, 330),  # 40 * (1.96 + 0.84)² / 1.96² * (0.2 / 0.1)² = 327
        ("performance", 0.69, 0.2, 40, 0.7, None),  # more than anybody has
        ("performance", 0.9, 0.3, 8, 0.7, 37),  # 36.8
        ("performance", 0.9, 0.01, 8, 0.7, 10),  # the number for a verdict
        ("shortcut", 0.01, 0.02, 20, 0.1, 59),  # the rule of three for 5 %
        ("shortcut", -0.4, 0.6, 100, 0.1, 820),  # mirrored: 100 * 2.043 * (0.6 / 0.3)² = 817
        ("clusters", 0.5, None, 22, None, 100),
    ],
)
def test_the_patients_that_would_decide_follow_from_the_interval(question, value, spread, n, margin, needed):
    made = build_verdict(
        question,
        FINDING,
        ("not decided", "more images are needed"),
        num(value, spread, n, n),
        margin,
        "border",
        **CLAIM_FIELDS,
    )
    assert estimate_patients_needed(made, full()) == needed
    decided = made.model_copy(update={"conclusion": "supported"})
    assert estimate_patients_needed(decided, full()) is None
    other = made.model_copy(update={"reason": "below the resolution of the maps"})
    assert estimate_patients_needed(other, full()) is None


def test_the_patients_that_would_decide_do_so_in_four_of_five_audits():
    import numpy as np

    random, mean, margin, n = np.random.default_rng(0), 0.5, 0.2, 20
    half = 1.959964 / np.sqrt(n)  # of a mean of values with variance 1
    made = build_verdict(
        "robustness", FINDING, ("not decided", "needed"), num(mean, round(half, 6), n, n), margin, **CLAIM_FIELDS
    )
    needed = estimate_patients_needed(made, full())
    assert needed is not None
    means = random.normal(mean, 1 / np.sqrt(needed), 20_000)
    assert np.mean(means - 1.959964 / np.sqrt(needed) > margin) == pytest.approx(0.8, abs=0.02)


def test_open_questions_with_one_reason_stand_together():
    regions = ("border", "corners", "marker")
    made = tuple(
        build_verdict(
            "shortcut", FINDING, ("not decided", "more are needed"), num(0.01, 0.02, 20, 20), 0.1, name, region=name
        )
        for name in regions
    )
    summary = full(findings=(FINDING,), verdicts=tuple(one.model_copy(update={"patients_needed": 59}) for one in made))
    (item,) = (item for item in iter_open_questions(summary) if item.section == "shortcut")
    assert (
        write_plain_text(item.question)
        == "Whether the prediction for “nodule” relies on the image border, the image corners and the region “marker”"
    )
    assert write_plain_text(item.reason) == "needs about 59 patients; there are 20"


def test_another_number_or_another_reason_is_told():
    numbers, reason = (
        {"border": 59, "corners": 590, "saturated": 4000},
        "10 patients in each role are needed, and there is 1 donor",
    )
    made = [
        build_verdict("shortcut", FINDING, ("not decided", "more are needed"), num(0.0, 0.2, 20, 20), 0.1, name, region=name)
        .model_copy(update={"patients_needed": n})
        for name, n in numbers.items()
    ]  # fmt: skip
    few = made[0].model_copy(update={"qualifier": "padding", "reason": reason})
    summary = full(findings=(FINDING,), verdicts=(*made, few))
    items = [item for item in iter_open_questions(summary) if item.section == "shortcut"]
    assert [write_plain_text(item.reason) for item in items] == [
        "needs about 59 patients (the image border) to 4,000 (burned-in text or markers); there are 20", reason,
    ]  # fmt: skip
    assert "blank edges" in items[1].question
    assert "blank edges" not in items[0].question


def test_open_questions_on_maps_name_the_method():
    made = [
        build_verdict(question, FINDING, ("not decided", "why"), num(1.0, 0.1), 0.1, qualifier, **CLAIM_FIELDS)
        for question, qualifier in (
            ("faithfulness", "gradcam"), ("faithfulness", "integratedgradients"), ("localization", "gradcam"),
            ("localization by subgroup", "site"), ("attribution mass", "border · gradcam"), ("sanity", ""),
        )
    ]  # fmt: skip
    told = [
        write_plain_text(item.question) for item in iter_open_questions(full(findings=(FINDING,), verdicts=tuple(made)))
    ]
    assert told[-5:] == [
        "Whether the maps of Grad-CAM and Integrated Gradients show what the prediction for “nodule” depends on",
        "Whether the maps of Grad-CAM highlight “nodule” more than chance and better than control maps",
        "Whether the maps for “nodule” depend on the trained weights",
        "Whether the maps of Grad-CAM highlight “nodule” equally well regardless of site",
        "Whether the maps of Grad-CAM for “nodule” highlight the image border",
    ]


def test_names_are_joined_as_in_a_sentence():
    assert [write_plain_text(join_texts(list("abcde")[:n], 3, "or")) for n in range(6)] == [
        "", "a", "a or b", "a, b or c", "a, b, c or one more", "a, b, c or two more",
    ]  # fmt: skip


# Sanity


def test_the_sanity_check_counts_its_images_and_those_of_other_sizes():
    stage = SanityResult(
        n_images=13,
        images_by_finding=(
            SanityImages(finding="nodule", n_images=12, size=(224, 224), n_other_sizes=0),
            SanityImages(finding="effusion", n_images=1, size=(16, 24, 24), n_other_sizes=3),
        ),
    )
    assert [write_plain_text(text) for text in describe_sanity_images(stage)] == [
        "nodule: 12 images whose input measures 224 × 224, drawn at random.",
        "effusion: 1 image whose input measures 16 × 24 × 24, drawn at random. 3 images of other sizes were left out, "
        "because the test needs inputs of one size.",
    ]
    old = [write_plain_text(text) for text in describe_sanity_images(SanityResult(n_images=13))]
    assert old == ["13 images with a finding were used, drawn at random."]


def test_an_inverted_auroc_of_masked_images_is_said_to_be_turned_around():
    decisions = ("not supported", "the interval is below the margin"), ("not supported", INVERTED_REASON)
    upright, inverted = (
        write_plain_text(
            describe_effect(
                build_verdict("masked organ", FINDING, decision, num(0.57, 0.1), 0.7, "organ"), has_patients=True
            )
        )
        for decision in decisions
    )
    assert upright.startswith("AUROC of masked images: 0.57")
    assert inverted.startswith("One minus AUROC of masked images: 0.57")


def test_a_limit_that_only_looks_like_the_baseline_gets_another_digit():
    near = EstimateSummary(value=0.71, low=0.5017, high=0.85, n_values=40, n_groups=40, baseline=0.5)
    assert format_estimate(near).striptags() == "0.710 [0.502, 0.850]"
    assert format_estimate(near.model_copy(update={"low": 0.5})).striptags() == "0.71 [0.50, 0.85]"


def test_a_sample_of_the_images_is_named_with_the_data():
    assert "40 of 113 images, drawn at random" in write_plain_text(build_overview(sampled()).data)
