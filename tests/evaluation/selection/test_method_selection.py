"""Choosing a method: a race on one's own images, its verdict in words, and a file that other commands take."""

import csv
import importlib
import json
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from camscope import Explainer, GradCAM, HiResCAM, LayerCAM, Saliency, load_model
from camscope.cli import app, load_model_and_methods
from camscope.errors import InputError
from camscope.explainers import EdgeDetector
from camscope.geometry import Placement, project_mask_to_input
from camscope.phantom import CATEGORIES, draw_radiograph
from camscope.registry import METHODS

pytest.importorskip("pyarrow")
pytest.importorskip("scipy")

from scipy import stats

from camscope.batch import build_manifest
from camscope.cli.benchmark_methods_on_synthetic_radiographs import write_phantom_dataset
from camscope.evaluation.evaluate_model_free_metrics import get_default_region_size
from camscope.evaluation.selection import candidate_explainers as candidate_scores
from camscope.evaluation.selection import method_selection as file
from camscope.evaluation.selection.candidate_explainers import build_candidates, find_stage_layers
from camscope.evaluation.selection.load_samples import format_exclusions, load_samples
from camscope.evaluation.selection.method_selection import (
    MethodSelection,
    _build_selection,
    _drop_duplicate_and_unstable_candidates,
    _shuffle_by_group,
    have_same_maps,
    select_method,
)
from camscope.evaluation.selection.rank_and_drop_candidates import (
    FAITHFULNESS_METRIC,
    LOCALIZATION_METRIC,
    CandidateState,
    SelectionSample,
    compute_quality,
    drop_worse_candidates,
    pool_and_sort_metric_values,
    rank_candidates,
)
from camscope.metrics.intervals_and_p_values import adjust_holm
from camscope.metrics.perturbation_test import PerturbationTest

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # benchmarks/ is not installed
choosing = importlib.import_module("benchmarks.choosing")
pytestmark = pytest.mark.filterwarnings("ignore::camscope.errors.CamscopeWarning")


@pytest.fixture(scope="module")
def model():
    return load_model("phantom")


def samples(model, count):
    made = [draw_radiograph(500 + n, CATEGORIES[1 + n % 3]) for n in range(count)]
    return [SelectionSample(GradCAM(model).prepare_input(one.image), one.name, one.mask) for one in made]


class Named:
    layer = None
    class_specific = True

    def __init__(self, title):
        self.composed_name = self.name = title


def standing(title, values, **others):
    own = {FAITHFULNESS_METRIC: list(values), **others}
    return CandidateState(Named(title), own, 1.0, len(values), first_maps=[np.array([float(ord(title[0])), 100.0])])


def test_quality_is_the_share_of_what_all_made_at_first_and_does_not_depend_on_who_is_left():
    racing = [standing("a", [3.0, 1.0]), standing("b", [3.0, 2.0]), standing("c", [1.0, np.nan])]
    known = pool_and_sort_metric_values(racing)
    np.testing.assert_array_equal(known[FAITHFULNESS_METRIC], [1, 1, 2, 3, 3])
    np.testing.assert_allclose(compute_quality(racing, known), [[0.8, 0.2], [0.8, 0.5], [0.2, 0.0]])
    np.testing.assert_allclose(compute_quality(racing[1:], known), [[0.8, 0.5], [0.2, 0.0]])
    for n, one in enumerate(racing, start=1):
        one.metric_values |= {"enrichment": [float(n), np.nan], "stability": [0.1 * n] * 2}
    np.testing.assert_allclose(
        compute_quality(racing, pool_and_sort_metric_values(racing))[:, 0], [(0.8 + 1 / 6) / 2, 0.65, (0.2 + 5 / 6) / 2]
    )
    np.testing.assert_allclose(
        compute_quality(racing, pool_and_sort_metric_values(racing))[:, 1], [0.2, 0.5, 0.0]
    )  # no evidence in any: left out


def test_at_the_end_a_loser_is_out_by_students_t_and_holm():
    drawn = np.random.default_rng(0)
    good = drawn.normal(1.0, 0.3, 24)
    racing = [standing("good", good), standing("alike", good + drawn.normal(0, 0.3, 24)), standing("bad", good - 0.3)]
    known = pool_and_sort_metric_values(racing)
    leader, *rest = rank_candidates(racing, known)
    q = compute_quality([leader, *rest], known)
    p = adjust_holm([float(stats.ttest_rel(q[0], other).pvalue) for other in q[1:]])
    drop_worse_candidates(racing, known, 24)
    assert [bool(one.drop_reason) for one in rest] == [one < 0.05 for one in p]
    assert [bool(one.drop_reason) for one in racing] == [False, False, True]
    assert "after 24 images" in racing[2].drop_reason


def test_values_that_differ_by_rounding_are_equal():
    values = np.random.default_rng(0).random(24)
    racing = [standing("a", values), standing("b", values - 1e-12)]
    one, two = compute_quality(racing, pool_and_sort_metric_values(racing))
    np.testing.assert_array_equal(one, two)
    drop_worse_candidates(racing, pool_and_sort_metric_values(racing), 24)
    assert not any(one.drop_reason for one in racing)


@pytest.mark.parametrize(("images", "lost"), [(8, 0), (16, 1)])
def test_so_many_images_are_no_surer_than_they_can_be(images, lost):
    best = np.linspace(10, 11, images)
    racing = [standing("best", best)] + [standing(str(n), best - 5 - n) for n in range(5)]
    known = pool_and_sort_metric_values(racing)
    drop_worse_candidates(racing, known, images)
    assert [bool(one.drop_reason) for one in racing] == [False] + [bool(lost)] * 5  # 2^(1 - images) beside 0.05 / 15


def known_to_the_end():
    """Qualities are nearly a straight line of the values."""
    return {FAITHFULNESS_METRIC: np.linspace(-30, 30, 6001)}


@pytest.mark.slow
@pytest.mark.parametrize(("candidates", "spread"), [(6, 2.0), (24, 0.7)])
def test_before_the_end_those_who_drop_out_do_lose(candidates, spread):
    """Of races of which 24 of 96 images are known: nearly all of those that are out, and many of those that will be."""
    drawn, early, ended = np.random.default_rng(1), [], []
    for _ in range(60):
        every = drawn.normal(drawn.normal(0, spread, (candidates, 1)), 1, (candidates, 96))
        now, whole = ([standing(str(n), own[:seen]) for n, own in enumerate(every)] for seen in (24, 96))
        drop_worse_candidates(now, known_to_the_end(), 96)
        drop_worse_candidates(whole, known_to_the_end(), 96)
        early += [bool(one.drop_reason) for one in now]
        ended += [bool(one.drop_reason) for one in whole]
    early, ended = np.array(early), np.array(ended)
    assert ended[early].mean() > 0.95
    assert early[ended].mean() > 0.4


def test_before_the_end_a_candidate_must_be_surely_worse():
    """The same values at p = 0.03: after all images they are proof, before they are not."""
    better = np.resize([0.3, 0.3, -0.2, 0.1], 16)
    for images, out in ((16, True), (32, False)):
        racing = [standing("good", better), standing("bad", np.zeros(16))]
        drop_worse_candidates(racing, {FAITHFULNESS_METRIC: np.linspace(-1, 1, 2001)}, images)
        assert bool(racing[1].drop_reason) is out


def test_few_images_tell_nothing_and_equal_values_never_lose():
    one, other = standing("a", [1.0] * 7), standing("b", [0.0] * 7)
    drop_worse_candidates([one, other], pool_and_sort_metric_values([one, other]), 7)
    assert not other.drop_reason
    same = [standing("a", [1.0, 2.0, 1.5] * 3), standing("b", [1.0, 2.0, 1.5] * 3)]
    drop_worse_candidates(same, pool_and_sort_metric_values(same), 12)
    drop_worse_candidates(same, pool_and_sort_metric_values(same), 9)
    assert not any(each.drop_reason for each in same)


@pytest.mark.parametrize(("candidates", "images"), [(2, 8), (6, 8), (24, 16)])
@pytest.mark.one_in(3)
def test_of_candidates_that_are_alike_somebody_is_out_in_one_race_of_twenty(candidates, images):
    wrong = 0
    for seed in range(200):
        drawn = np.random.default_rng(seed)
        racing = [standing(str(n), drawn.normal(size=images)) for n in range(candidates)]
        drop_worse_candidates(racing, pool_and_sort_metric_values(racing), images)
        wrong += any(one.drop_reason for one in racing)
    assert wrong / 200 < 0.1


@pytest.mark.slow
@pytest.mark.parametrize(("candidates", "spread"), [(3, 0), (24, 0), (24, 0.7)])
@pytest.mark.one_in(3)
def test_a_race_says_what_all_images_say_and_takes_less_of_them(candidates, spread):
    """Of candidates that are alike, and of such that are not, with looks after each eight of 96 images."""
    whole, races = zip(*choosing.drawn(candidates, spread, 96, 40), strict=True)
    best = [[{one.title for one in each.best} for each in every] for every in (whole, races)]
    if not spread:
        assert sum(map(bool, best[1])) / 40 < 0.15, "one or two win though all are alike"
        assert sum(len(each.survivors) < candidates for each in races) / 40 < 0.3, "somebody is out"
    assert sum(one == other for one, other in zip(*best, strict=True)) / 40 > 0.8
    assert not spread or np.mean([choosing.share_of_maps(each, 96) for each in races]) < 0.5


@pytest.mark.slow
def test_few_images_tell_nobody_from_anybody(model):
    one, other = standing("a", [0.5, 0.3] * 3), standing("b", [0.4, 0.2] * 3)
    drop_worse_candidates([one, other], pool_and_sort_metric_values([one, other]), 6)
    assert not other.drop_reason
    found = select_method([GradCAM(model, "layer4"), GradCAM(model, "layer3")], samples(model, 4))
    assert found.best == []
    assert found.recommendation.startswith("4 images or groups cannot tell candidates apart: 8 are needed (")
    restless = CandidateState(Named("c"), {FAITHFULNESS_METRIC: [], "stability": []}, drop_reason="restless")
    assert _build_selection([one, restless], pool_and_sort_metric_values([one]), 6).best == [one], "nobody else is left"


def test_images_of_one_patient_are_one_witness():
    """Eight images of three patients, all better by nearly the same: eight would be proof, three are less."""
    gaps = np.array([0.3, 0.3, 0.31, 0.02, 0.01, 0.03, 0.16, 0.17])
    groups = ["a", "a", "a", "b", "b", "b", "c", "c"]
    known = {FAITHFULNESS_METRIC: np.linspace(-1, 1, 2001)}
    for own, out in ((None, True), (groups, False)):
        racing = [standing("good", gaps), standing("bad", np.zeros(8))]
        for one in racing:
            one.groups = own
        drop_worse_candidates(racing, known, 8)
        assert bool(racing[1].drop_reason) is out
    means = [compute_quality(racing, known)[0][[g == name for g in groups]].mean() - 0.5 for name in "abc"]
    p = stats.ttest_1samp(means, 0).pvalue
    assert p > 0.05
    assert racing[0].estimate_metric(FAITHFULNESS_METRIC).n_groups == 3


def test_patients_come_whole_and_all_have_one(model):
    some = [replace(one, group=n % 3) for n, one in enumerate(samples(model, 9))]
    drawn = [one.group for one in _shuffle_by_group(some, 1)]
    assert len([1 for a, b in pairwise(drawn) if a != b]) == 2
    assert [one.group for one in _shuffle_by_group(some, 1)] == drawn
    with pytest.raises(InputError, match="1 image has no group"):
        _shuffle_by_group([*some, samples(model, 1)[0]], 0)


def test_words_of_maps_that_are_the_same_or_do_not_hold_still():
    a, b, c = (standing(name, [1.0, 2.0], stability=[0.9, 0.8]) for name in "abc")
    b.first_maps = [3 * heat for heat in a.first_maps]
    c.metric_values["stability"] = [0.3, 0.4]
    _drop_duplicate_and_unstable_candidates([a, b, c])
    assert not a.drop_reason
    assert b.drop_reason == "its maps are those of a"
    assert c.drop_reason == "its maps change under small changes of the image (correlation 0.35)"
    b.first_maps, zero = [a.first_maps[0] + [0, 10]], standing("z", [1.0])
    assert not have_same_maps(a, b)
    zero.first_maps = [np.zeros(2)]
    assert have_same_maps(zero, zero)
    assert not have_same_maps(zero, a)


def test_words_for_a_winner_for_none_and_for_nothing():
    one, two, three = (standing(name, [0.5, 0.7, 0.6] * 3) for name in "abc")
    said = MethodSelection([one], [one], 9, 9).recommendation
    assert said.startswith("a (faithfulness 0.600 [")
    assert said.endswith("], 0.111 s an image)")
    few = standing("a", [0.5, 0.7, 0.6, 0.5, 0.7])
    assert (
        MethodSelection([few], [few], 5, 5).recommendation == "a (faithfulness 0.600, 0.200 s an image)"
    )  # of five no interval
    assert MethodSelection([], [one, two, three], 9, 9).recommendation.startswith(
        "no clear winner after 9 images: 3 candidates do not differ significantly (a, b, c); one of the cheapest of them is a"
    )
    one.drop_reason = two.drop_reason = three.drop_reason = "they say nothing"
    assert MethodSelection([], [one, two, three], 9, 9).recommendation.startswith(
        "none: no candidate has maps that are robust"
    )


@pytest.mark.slow
def test_a_race_leaves_out_what_does_not_see_the_model_and_drops_the_worst(model):
    x = samples(model, 1)[0].item.x[None]
    tools = [*build_candidates(model, x, ["gradcam"], ["layer4", "relu"]), EdgeDetector(model)]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    seen = []
    made = select_method(tools, samples(model, 24), region_size=16, n_steps=4, on_progress=lambda *at: seen.append(at))
    assert [one.title for one in made.best] == ["Grad-CAM · layer4"]
    assert {one.title: one.n_images for one in made.candidates}["Edge detector"] == 0
    assert "a control" in made.candidates[-1].drop_reason
    assert sum(one.n_images for one in made.candidates) < 48
    assert seen[-1][2] == 1
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with pytest.raises(InputError, match="expected at least two of each"):
        select_method(tools[:1], samples(model, 4))


@pytest.mark.slow
def test_candidates_are_tried_at_the_ends_of_stages(model):
    x = samples(model, 1)[0].item.x[None]
    assert find_stage_layers(model, x)[-1] == "layer4"
    assert len(find_stage_layers(model, x)) == 3
    found = build_candidates(model, x, ["gradcam", "saliency", "guidedbackprop"])
    assert [type(one) for one in found if isinstance(one, Saliency)] == [Saliency]
    assert sum(isinstance(one, GradCAM) for one in found) == 3
    with pytest.raises(InputError, match="no method 'gradcan'"):
        build_candidates(model, x, ["gradcan"])


def test_equal_costs_are_decided_by_class_dependence_and_the_default_order():
    eigen, layer, grad, slow = (standing(name, [0.5] * 9) for name in ("eigencam", "layercam", "gradcam", "a"))
    eigen.explainer.class_specific = False
    for candidate, seconds in ((eigen, 0.071), (layer, 0.074), (grad, 0.076), (slow, 0.09)):
        candidate.total_seconds = seconds * candidate.n_images
    selection = MethodSelection([], [eigen, layer, grad, slow], 9, 9)
    assert selection.chosen is grad
    grad.drop_reason = "its maps are not stable"
    assert selection.chosen is layer
    layer.total_seconds *= 2  # a real difference decides
    assert selection.chosen is eigen


def test_a_mask_is_brought_to_the_models_input():
    mask = np.zeros((4, 8), bool)
    mask[:2, 2:4] = True
    place = Placement.identity((4, 8)).resized((2, 4)).cropped((0, 1), (2, 4))
    assert np.argwhere(project_mask_to_input(mask, place.input_size, place.to_image)).tolist() == [[0, 0]]


@pytest.mark.slow
def test_the_cheapest_is_saved_where_no_winner_is_clear(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_phantom_dataset(tmp_path / "set", 4, 700)
    words = ["choose", "set/list.csv", "--methods", "gradcam,layercam", "--layers", "layer4", "--save", "choice.toml"]
    result = CliRunner().invoke(app, words)  # too few images
    (saved,) = [line for line in result.stdout.splitlines() if line.startswith("saved   ")]
    known = file.read_selection("choice.toml")
    title = f"{METHODS.replace_names_by_titles(known.method)} · layer4"
    assert saved == f"saved   choice.toml: {title}, one of the cheapest candidates, because no winner is clear"
    printed = json.loads(CliRunner().invoke(app, [*words, "--overwrite", "--json"]).stdout)
    assert not printed["is_clear"]
    assert printed["chosen"] in (candidate["title"] for candidate in printed["candidates"])


@pytest.mark.slow
def test_the_command_saves_what_explain_and_batch_take(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_phantom_dataset(tmp_path / "set", 8, 700)
    words = ["choose", "set/list.csv", "--masks", "mask", "--methods", "gradcam,saliency", "--layers", "layer4"]
    result = CliRunner().invoke(app, [*words, "--images", "8", "--save", "choice.toml"])
    assert result.exit_code == 0, result.output
    assert "choice  " in result.stdout
    is_clear = "clear = true" in (tmp_path / "choice.toml").read_text()
    (saved,) = [line for line in result.stdout.splitlines() if line.startswith("saved   choice.toml: ")]
    assert saved.endswith(", one of the cheapest candidates, because no winner is clear") != is_clear
    known = file.read_selection("choice.toml")
    assert known.method in ("gradcam", "saliency")
    assert CliRunner().invoke(app, [*words, "--save", "choice.toml"]).exit_code == 1
    explained = CliRunner().invoke(app, ["explain", "set/images/000700.png", "--choice", "choice.toml", "-o", "e"])
    assert explained.exit_code == 0, explained.output
    assert METHODS.replace_names_by_titles(known.method) in explained.stdout
    batch = CliRunner().invoke(app, ["batch", "set/list.csv", "--choice", "choice.toml", "-o", "b"])
    assert batch.exit_code == 0, batch.output
    for command, *named in (
        ["explain", "--methods", "layercam"],
        ["explain", "--methods", "gradcam"],
        ["explain", "--layers", "layer4"],
        ["batch", "--methods", "gradcam"],
    ):
        both = CliRunner().invoke(app, [command, "set/images/000700.png", "--choice", "choice.toml", *named])
        assert (
            both.exit_code,
            "names method and layer already; omit --methods and --layers" in " ".join(both.stderr.split()),
        ) == (2, True), named
    plain = 'method = "gradcam"\nmodel = "f"\n'
    for text in (
        "layer = 3",
        plain + "layer = 3",
        plain.replace("gradcam", "all"),
        plain.replace('"gradcam"', '["gradcam"]'),
        plain.replace('"f"', "5"),
        "\xff = [",
    ):
        (tmp_path / "other.toml").write_text(text, encoding="latin-1")
        refused = CliRunner().invoke(app, ["batch", "set/list.csv", "--choice", "other.toml", "-o", "c"])
        assert (refused.exit_code, refused.stderr.count("\n")) == (2, 1), text
        assert "was not written by camscope choose --save" in refused.stderr
    with (tmp_path / "set" / "list.csv").open() as table:
        assert next(csv.reader(table)) == ["path", "mask", "target"]


@pytest.mark.slow
def test_evidence_that_the_first_images_lack_counts_from_where_it_is_known(model):
    """The maps are alike but for where they lie, which only the masks of the last images tell."""
    drawn = np.random.default_rng(0).permutation(24)
    pool = samples(model, 24)
    known = [
        replace(one, mask=one.mask if place >= 8 else None) for one, place in zip(pool, np.argsort(drawn), strict=True)
    ]

    def judge(racing, some):
        for worth, one in enumerate(racing):
            one.metric_values[FAITHFULNESS_METRIC] += [0.5] * len(some)
            one.metric_values[LOCALIZATION_METRIC] += [np.nan if each.mask is None else 1.0 + worth for each in some]
            one.n_images += len(some)

    tools = build_candidates(model, pool[0].item.x[None], ["gradcam", "layercam"], ["layer4"])
    made = select_method(tools, known, evaluate_block=judge)
    assert [one.title for one in made.best] == ["LayerCAM · layer4"]


@pytest.mark.parametrize("shape", [(3, 28, 140), (1, 28, 56, 140), (1, 29)])
def test_what_is_removed_is_a_fourteenth_of_the_shortest_side(shape):
    assert get_default_region_size(torch.zeros(shape)) == 2


@pytest.mark.parametrize(
    ("words", "saying"),
    [
        (["--masks", "empty"], "no image has ground truth: no mask has the name of the image (8 x)"),
        (["--save", "choice.json"], "choice.json; expected a .toml file"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_use_is_noticed_before_the_model_is_loaded(tmp_path, monkeypatch, words, saying):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(load_model_and_methods, "load_model_on_device", lambda *_: pytest.fail("the model is loaded"))
    write_phantom_dataset(tmp_path / "set", 8, 700)
    (tmp_path / "empty").mkdir()
    result = CliRunner().invoke(app, ["choose", "set/list.csv", *words])
    assert result.exit_code == 2
    assert saying in " ".join(result.stderr.split())


def test_what_is_left_out_is_counted_in_english():
    assert list(format_exclusions({"a": 1, "b": 2})) == ["1 image left out: a", "2 images left out: b"]


def test_an_image_that_is_asked_for_no_class_is_left_out(tmp_path, model):
    write_phantom_dataset(tmp_path, 8, 700)
    lines = (tmp_path / "list.csv").read_text().splitlines()
    (tmp_path / "list.csv").write_text("\n".join([*lines[:-1], lines[-1].rpartition(",")[0] + ",tulip"]))
    found, left_out = load_samples(build_manifest(tmp_path / "list.csv"), GradCAM(model))
    assert len(found) == 7
    (reason,) = left_out
    assert reason.startswith("no class 'tulip'")


@pytest.mark.filterwarnings("ignore::camscope.errors.CamscopeWarning")
def test_maps_that_say_nothing_tie_in_another_order_in_each_image(model):
    """Else the luck of one order would be in the mean over images, and every flat map at once would have it."""
    pool = samples(model, 2)

    class Flat(Explainer):
        name, paper = "flat", ""

        def attribution(self, x, score):
            return torch.ones(len(x), *x.shape[2:])

    twice = [pool[0], replace(pool[0]), pool[1]]
    one = standing("flat", [])
    one.explainer = Flat(model, class_names=CATEGORIES)
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            candidate_scores, "PerturbationTest", lambda *given: seen.append(given[-1]) or PerturbationTest(*given)
        )
        candidate_scores.evaluate_candidates([one], twice, 2, 32, 0)
        candidate_scores.evaluate_candidates([one], twice, 2, 32, 1)
    first, other = seen[0], seen[2]
    assert first[0] == first[1] != first[2]
    assert set(first).isdisjoint(other)


@pytest.mark.slow
def test_candidates_take_turns_at_paying_for_what_all_share(model, monkeypatch):
    """The first one of a batch pays for the checks of new classes; so the cheapest one does not depend on the order."""
    candidates = []
    for method in (GradCAM, LayerCAM, HiResCAM):
        candidate = standing(method.name, [])
        candidate.explainer = method(model, "layer4", class_names=CATEGORIES)
        candidates.append(candidate)
    called, run_methods = [], candidate_scores.run_methods

    def record(running, *arguments):
        called.append(running[0].name)
        return run_methods(running, *arguments)

    monkeypatch.setattr(candidate_scores, "run_methods", record)
    for sample in samples(model, 3):
        candidate_scores.evaluate_candidates(candidates, [sample], 2, 32, 0)
    assert [called[0], called[3], called[6]] == ["gradcam", "layercam", "hirescam"]
    assert sorted(called) == sorted(3 * ["gradcam", "layercam", "hirescam"])
