"""Choosing a method: a race on one's own images, its verdict in words, and a file that other commands take."""

import csv
import importlib
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from camscope import Explainer, GradCAM, Saliency, load_model
from camscope.cli import app, base
from camscope.errors import InputError
from camscope.explainers import EdgeDetector
from camscope.geometry import Placement
from camscope.phantom import CATEGORIES, draw

pytest.importorskip("pyarrow")
pytest.importorskip("scipy")

from scipy import stats

from camscope.batch import manifest_of
from camscope.cli.benchmark import phantoms
from camscope.evaluation.map_metrics import side_of
from camscope.evaluation.selection import candidate_scores
from camscope.evaluation.selection import select as file
from camscope.evaluation.selection.candidates import candidates, stages
from camscope.evaluation.selection.racing import (
    FAITHFULNESS,
    LOCALISATION,
    SURE,
    Sample,
    Standing,
    losing,
    order,
    quality,
    reference,
    without_losers,
)
from camscope.evaluation.selection.samples import mask_on_input, samples_of, told_of
from camscope.evaluation.selection.select import Choice, _chosen, _drop, _in_turn, choose, same
from camscope.metrics.perturbation_test import Trial
from camscope.metrics.statistics import holm

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # benchmarks/ is not installed
choosing = importlib.import_module("benchmarks.choosing")
pytestmark = pytest.mark.filterwarnings("ignore::camscope.errors.CamscopeWarning")


@pytest.fixture(scope="module")
def model():
    return load_model("phantom")


def samples(model, count):
    made = [draw(500 + n, CATEGORIES[1 + n % 3]) for n in range(count)]
    return [Sample(GradCAM(model).read(one.image), one.name, one.mask) for one in made]


class Named:
    layer = None

    def __init__(self, title):
        self.title = self.name = title


def standing(title, values, **others):
    own = {FAITHFULNESS: list(values), **others}
    return Standing(Named(title), own, 1.0, len(values), first=[np.array([float(ord(title[0])), 100.0])])


def test_quality_is_the_share_of_what_all_made_at_first_and_does_not_depend_on_who_is_left():
    racing = [standing("a", [3.0, 1.0]), standing("b", [3.0, 2.0]), standing("c", [1.0, np.nan])]
    known = reference(racing)
    np.testing.assert_array_equal(known[FAITHFULNESS], [1, 1, 2, 3, 3])
    np.testing.assert_allclose(quality(racing, known), [[0.8, 0.2], [0.8, 0.5], [0.2, 0.0]])
    np.testing.assert_allclose(quality(racing[1:], known), [[0.8, 0.5], [0.2, 0.0]])
    for n, one in enumerate(racing, start=1):
        one.values |= {"enrichment": [float(n), np.nan], "stability": [0.1 * n] * 2}
    np.testing.assert_allclose(quality(racing, reference(racing))[:, 0], [(0.8 + 1 / 6) / 2, 0.65, (0.2 + 5 / 6) / 2])
    np.testing.assert_allclose(
        quality(racing, reference(racing))[:, 1], [0.2, 0.5, 0.0]
    )  # no evidence in any: left out


def test_at_the_end_a_loser_is_out_by_students_t_and_holm():
    drawn = np.random.default_rng(0)
    good = drawn.normal(1.0, 0.3, 24)
    racing = [standing("good", good), standing("alike", good + drawn.normal(0, 0.3, 24)), standing("bad", good - 0.3)]
    known = reference(racing)
    leader, *rest = order(racing, known)
    q = quality([leader, *rest], known)
    p = holm([float(stats.ttest_rel(q[0], other).pvalue) for other in q[1:]])
    assert losing(leader, rest, known, 24) == [float(one < 0.05) for one in p]
    without_losers(racing, known, 24)
    assert [bool(one.out) for one in racing] == [False, False, True]
    assert "after 24 images" in racing[2].out


def test_values_that_differ_by_rounding_are_equal():
    values = np.random.default_rng(0).random(24)
    racing = [standing("a", values), standing("b", values - 1e-12)]
    one, two = quality(racing, reference(racing))
    np.testing.assert_array_equal(one, two)
    without_losers(racing, reference(racing), 24)
    assert not any(one.out for one in racing)


@pytest.mark.parametrize(("images", "lost"), [(8, 0), (16, 1)])
def test_so_many_images_are_no_surer_than_they_can_be(images, lost):
    best = np.linspace(10, 11, images)
    racing = [standing("best", best)] + [standing(str(n), best - 5 - n) for n in range(5)]
    known = reference(racing)
    leader, *rest = order(racing, known)
    assert losing(leader, rest, known, images) == [lost] * 5  # 2^(1 - images) beside 0.05 / 15


def known_to_the_end():
    """Qualities are nearly a straight line of the values."""
    return {FAITHFULNESS: np.linspace(-30, 30, 6001)}


@pytest.mark.parametrize(("candidates", "spread"), [(6, 2.0), (24, 0.7)])
def test_before_the_end_those_who_are_foreseen_to_lose_do_lose(candidates, spread):
    """Of races of which 24 of 96 images are known: nine of ten at least, and most of those that will."""
    drawn, told, ended = np.random.default_rng(1), [], []
    for _ in range(60):
        every = drawn.normal(drawn.normal(0, spread, (candidates, 1)), 1, (candidates, 96))
        now = [standing(str(n), own[:24]) for n, own in enumerate(every)]
        leader, *rest = order(now, known_to_the_end())
        told += losing(leader, rest, known_to_the_end(), 96)
        whole = [standing(str(n), own) for n, own in enumerate(every)]
        first, *others = order(whole, known_to_the_end())
        lost = dict(zip([one.title for one in others], losing(first, others, known_to_the_end(), 96), strict=True))
        ended += [lost.get(one.title, 0.0) for one in rest]
    told, ended = np.array(told) >= SURE, np.array(ended) == 1
    assert ended[told].mean() > 0.95
    assert told[ended].mean() > 0.7


def test_few_images_foresee_nothing_and_equal_values_never_lose():
    one, other = standing("a", [1.0] * 7), standing("b", [0.0] * 7)
    known = reference([one, other])
    assert losing(one, [other], known, 10) == [0.5]
    same = [standing("a", [1.0, 2.0, 1.5] * 3), standing("b", [1.0, 2.0, 1.5] * 3)]
    without_losers(same, reference(same), 12)
    without_losers(same, reference(same), 9)
    assert not any(each.out for each in same)


@pytest.mark.parametrize(("candidates", "images"), [(2, 8), (6, 8), (24, 16)])
def test_of_candidates_that_are_alike_somebody_is_out_in_one_race_of_twenty(candidates, images):
    wrong = 0
    for seed in range(200):
        drawn = np.random.default_rng(seed)
        racing = [standing(str(n), drawn.normal(size=images)) for n in range(candidates)]
        without_losers(racing, reference(racing), images)
        wrong += any(one.out for one in racing)
    assert wrong / 200 < 0.1


@pytest.mark.parametrize(("candidates", "spread"), [(3, 0), (24, 0), (24, 0.7)])
def test_a_race_says_what_all_images_say_and_takes_less_of_them(candidates, spread):
    """Of candidates that are alike, and of such that are not, with looks after each eight of 96 images."""
    whole, races = zip(*choosing.drawn(candidates, spread, 96, 40), strict=True)
    best = [[{one.title for one in each.best} for each in every] for every in (whole, races)]
    if not spread:
        assert sum(map(bool, best[1])) / 40 < 0.15, "one or two win though all are alike"
        assert sum(len(each.alike) < candidates for each in races) / 40 < 0.3, "somebody is out"
    assert sum(one == other for one, other in zip(*best, strict=True)) / 40 > 0.8
    assert np.mean([each.explained / each.exhaustive for each in races]) < 0.35


def test_few_images_tell_nobody_from_anybody(model):
    one, other = standing("a", [0.5, 0.3] * 3), standing("b", [0.4, 0.2] * 3)
    without_losers([one, other], reference([one, other]), 6)
    assert not other.out
    found = choose([GradCAM(model, "layer4"), GradCAM(model, "layer3")], samples(model, 4))
    assert found.best == []
    assert found.sentence.startswith("4 images or groups cannot tell candidates apart: 8 are needed (")
    restless = Standing(Named("c"), {FAITHFULNESS: [], "stability": []}, out="restless")
    assert _chosen([one, restless], reference([one]), 6).best == [one], "nobody else is left"


def test_images_of_one_patient_are_one_witness():
    """Eight images of three patients, all better by nearly the same: eight would be proof, three are less."""
    gaps = np.array([0.3, 0.3, 0.31, 0.02, 0.01, 0.03, 0.16, 0.17])
    groups = ["a", "a", "a", "b", "b", "b", "c", "c"]
    known = {FAITHFULNESS: np.linspace(-1, 1, 2001)}
    for own, out in ((None, True), (groups, False)):
        racing = [standing("good", gaps), standing("bad", np.zeros(8))]
        for one in racing:
            one.groups = own
        without_losers(racing, known, 8)
        assert bool(racing[1].out) is out
    means = [quality(racing, known)[0][[g == name for g in groups]].mean() - 0.5 for name in "abc"]
    p = stats.ttest_1samp(means, 0).pvalue
    assert p > 0.05
    assert racing[0].estimate(FAITHFULNESS).groups == 3


def test_patients_come_whole_and_all_have_one(model):
    some = [replace(one, group=n % 3) for n, one in enumerate(samples(model, 9))]
    drawn = [one.group for one in _in_turn(some, 1)]
    assert len([1 for a, b in pairwise(drawn) if a != b]) == 2
    assert [one.group for one in _in_turn(some, 1)] == drawn
    with pytest.raises(InputError, match="1 image has no group"):
        _in_turn([*some, samples(model, 1)[0]], 0)


def test_words_of_maps_that_are_the_same_or_do_not_hold_still():
    a, b, c = (standing(name, [1.0, 2.0], stability=[0.9, 0.8]) for name in "abc")
    b.first = [3 * heat for heat in a.first]
    c.values["stability"] = [0.3, 0.4]
    _drop([a, b, c])
    assert not a.out
    assert b.out == "its maps are those of a"
    assert c.out == "its maps do not hold still when the image hardly changes (correlation 0.35)"
    b.first, zero = [a.first[0] + [0, 10]], standing("z", [1.0])
    assert not same(a, b)
    zero.first = [np.zeros(2)]
    assert same(zero, zero)
    assert not same(zero, a)


def test_words_for_a_winner_for_none_and_for_nothing():
    one, two, three = (standing(name, [0.5, 0.7, 0.6] * 3) for name in "abc")
    said = Choice([one], [one], 9, 9, 9, 9).sentence
    assert said.startswith("a (faithfulness 0.600 [")
    assert said.endswith("], 0.111 s an image)")
    few = standing("a", [0.5, 0.7, 0.6, 0.5, 0.7])
    assert (
        Choice([few], [few], 5, 5, 5, 5).sentence == "a (faithfulness 0.600, 0.200 s an image)"
    )  # of five no interval
    assert Choice([], [one, two, three], 9, 27, 27, 9).sentence.startswith(
        "no clear winner after 9 images: 3 candidates are alike (a, b, c); the cheapest of them is a"
    )
    one.out = two.out = three.out = "they say nothing"
    assert Choice([], [one, two, three], 9, 27, 27, 9).sentence.startswith("none: the maps of no candidate depend")


def test_a_race_leaves_out_what_does_not_see_the_model_and_drops_the_worst(model):
    x = samples(model, 1)[0].item.x[None]
    tools = [*candidates(model, x, ["gradcam"], ["layer4", "relu"]), EdgeDetector(model)]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    seen = []
    made = choose(tools, samples(model, 24), region=16, steps=4, told=lambda *at: seen.append(at))
    assert [one.title for one in made.best] == ["gradcam · layer4"]
    assert {one.title: one.images for one in made.standings}["edges"] == 0
    assert "a control" in made.standings[-1].out
    assert made.explained < made.exhaustive == 48
    assert seen[-1][2] == 1
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with pytest.raises(InputError, match="a race needs two of each"):
        choose(tools[:1], samples(model, 4))


def test_candidates_are_tried_at_the_ends_of_stages(model):
    x = samples(model, 1)[0].item.x[None]
    assert stages(model, x)[-1] == "layer4"
    assert len(stages(model, x)) == 3
    found = candidates(model, x, ["gradcam", "saliency", "guidedbackprop"])
    assert [type(one) for one in found if isinstance(one, Saliency)] == [Saliency]
    assert sum(isinstance(one, GradCAM) for one in found) == 3
    with pytest.raises(InputError, match="no method 'gradcan'"):
        candidates(model, x, ["gradcan"])


def test_a_mask_is_brought_to_the_models_input():
    mask = np.zeros((4, 8), bool)
    mask[:2, 2:4] = True
    place = Placement.identity((4, 8)).resized((2, 4)).cropped((0, 1), (2, 4))
    assert np.argwhere(mask_on_input(mask, place)).tolist() == [[0, 0]]


def test_the_command_saves_what_explain_and_batch_take(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    phantoms(tmp_path / "set", 16, 700)
    words = ["choose", "set/list.csv", "--masks", "mask", "--method", "gradcam,saliency", "--layer", "layer4"]
    result = CliRunner().invoke(app, [*words, "--images", "16", "--save", "choice.toml"])
    assert result.exit_code == 0, result.output
    assert "choice  " in result.stdout
    known = file.read("choice.toml")
    assert known.method in ("gradcam", "saliency")
    assert CliRunner().invoke(app, [*words, "--save", "choice.toml"]).exit_code == 1
    explained = CliRunner().invoke(app, ["explain", "set/images/000700.png", "--choice", "choice.toml", "-o", "e"])
    assert explained.exit_code == 0, explained.output
    assert known.method in explained.stdout
    batch = CliRunner().invoke(app, ["batch", "set/list.csv", "--choice", "choice.toml", "-o", "b"])
    assert batch.exit_code == 0, batch.output
    for command, *named in (
        ["explain", "--method", "layercam"],
        ["explain", "--method", "gradcam"],
        ["explain", "--layer", "layer4"],
        ["batch", "--method", "gradcam"],
    ):
        both = CliRunner().invoke(app, [command, "set/images/000700.png", "--choice", "choice.toml", *named])
        assert (both.exit_code, "leave --method and --layer out" in both.stderr) == (2, True), named
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
        assert "is not a choice that camscope choose --save wrote" in refused.stderr
    with (tmp_path / "set" / "list.csv").open() as table:
        assert next(csv.reader(table)) == ["path", "mask", "target"]


def test_evidence_that_the_first_images_lack_counts_from_where_it_is_known(model):
    """The maps are alike but for where they lie, which only the masks of the last images tell."""
    drawn = np.random.default_rng(0).permutation(24)
    pool = samples(model, 24)
    known = [
        replace(one, mask=one.mask if place >= 8 else None) for one, place in zip(pool, np.argsort(drawn), strict=True)
    ]

    def judge(racing, some):
        for worth, one in enumerate(racing):
            one.values[FAITHFULNESS] += [0.5] * len(some)
            one.values[LOCALISATION] += [np.nan if each.mask is None else 1.0 + worth for each in some]
            one.images += len(some)

    tools = candidates(model, pool[0].item.x[None], ["gradcam", "layercam"], ["layer4"])
    made = choose(tools, known, judge=judge)
    assert [one.title for one in made.best] == ["layercam · layer4"]


@pytest.mark.parametrize("shape", [(3, 28, 140), (1, 28, 56, 140), (1, 29)])
def test_what_is_removed_is_a_fourteenth_of_the_shortest_side(shape):
    assert side_of(torch.zeros(shape)) == 2


@pytest.mark.parametrize(
    ("words", "saying"),
    [
        (["--masks", "empty"], "no image has evidence: there is no mask of its name (8 x)"),
        (["--save", "choice.json"], "choice.json; expected a file of .toml"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_use_is_noticed_before_the_model_is_loaded(tmp_path, monkeypatch, words, saying):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(base, "loaded", lambda *_: pytest.fail("the model is loaded"))
    phantoms(tmp_path / "set", 8, 700)
    (tmp_path / "empty").mkdir()
    result = CliRunner().invoke(app, ["choose", "set/list.csv", *words])
    assert result.exit_code == 2
    assert saying in " ".join(result.stderr.split())


def test_what_is_left_out_is_counted_in_english():
    assert list(told_of({"a": 1, "b": 2})) == ["1 image left out: a", "2 images left out: b"]


def test_an_image_that_is_asked_for_no_class_is_left_out(tmp_path, model):
    phantoms(tmp_path, 8, 700)
    lines = (tmp_path / "list.csv").read_text().splitlines()
    (tmp_path / "list.csv").write_text("\n".join([*lines[:-1], lines[-1].rpartition(",")[0] + ",tulip"]))
    found, left_out = samples_of(manifest_of(tmp_path / "list.csv"), GradCAM(model))
    assert len(found) == 7
    (reason,) = left_out
    assert reason.startswith("no class 'tulip'")


@pytest.mark.filterwarnings("ignore::camscope.errors.CamscopeWarning")
def test_maps_that_say_nothing_tie_in_another_order_in_each_image(model):
    """Else the luck of one order would be in the mean over images, and every flat map at once would have it."""
    pool = samples(model, 2)

    class Flat(Explainer):
        name, paper = "flat", ""

        def heat(self, x, score):
            return torch.ones(len(x), *x.shape[2:])

    twice = [pool[0], replace(pool[0]), pool[1]]
    one = standing("flat", [])
    one.tool = Flat(model, categories=CATEGORIES)
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(candidate_scores, "Trial", lambda *given: seen.append(given[-1]) or Trial(*given))
        candidate_scores.judged([one], twice, 2, 32, 0)
        candidate_scores.judged([one], twice, 2, 32, 1)
    first, other = seen[0], seen[2]
    assert first[0] == first[1] != first[2]
    assert set(first).isdisjoint(other)
