"""Replayed passes are the passes they stand for, bit by bit, on models with every habit; and nothing is left behind."""

import copy
import pickle
import threading
import warnings
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from camscope.explainers import (
    LIFTCAM,
    AblationCAM,
    DeepFeatureFactorization,
    Fused,
    LayerExplainer,
    ReciproCAM,
    ScoreCAM,
    SmoothGradCAMPlusPlus,
)
from camscope.explainers.core.run_methods_in_shared_passes import explain_grid
from camscope.hooks import cache_prefix_and_vary_output
from camscope.hooks.cache_prefix_and_vary_output import PrefixCache, replace_output_by_variants
from tests.nets import CASES, Plain, plain
from tests.untouched import untouched

pytestmark = pytest.mark.filterwarnings("ignore::camscope.errors.CamscopeWarning")


RUNS = Counter()


class Counted(nn.Conv2d):
    """A convolution of which it is known how often it really ran."""

    def forward(self, x):
        RUNS[id(self)] += 1
        return super().forward(x)


class Stem(Plain):
    """The convolutions are counted."""

    def __init__(self):
        super().__init__()
        self.first, self.middle = Counted(3, 4, 3, padding=1), Counted(4, 6, 3, padding=1)
        self.last = Counted(6, 5, 3, padding=1)
        self.relu = nn.ReLU(inplace=True)


def assert_replayed(model, x, layer="middle", call=0, passes=4):
    """Outputs of some passes under one Replay, each with another factor at the layer; and what they should be."""
    found, expected, tool = [], [], PrefixCache(model, layer, call)
    owners = torch.arange(len(x))
    with torch.no_grad():
        for number in range(passes):
            change = lambda rows, number=number: rows.mul_(1 + number)  # noqa: E731 - two uses, one line
            with replace_output_by_variants(model, layer, owners, change, call_index=call):
                expected.append(model(x))
            with tool, replace_output_by_variants(model, layer, owners, change, call_index=call):
                found.append(model(x))
            assert not any("forward" in module.__dict__ for module in model.modules())
    assert len({tuple(one.flatten().tolist()) for one in expected}) == passes
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


def runs(module):
    return RUNS[id(module)]


@pytest.fixture(autouse=True)
def nothing_counted():
    RUNS.clear()


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_same_bits_on_every_kind_of_network(case):
    model, x = case.make(3)
    assert_replayed(model, x, case.layer)


def test_what_comes_before_the_layer_runs_in_the_first_pass_only():
    model, x = plain(Stem)
    assert_replayed(model, x)
    assert (runs(model.first), runs(model.middle), runs(model.last)) == (4 + 1, 4 + 1, 4 + 4)


class Habits(Stem):
    """Ways in which an output is changed after its module has handed it on; and it is read again behind the layer."""

    habit = ""

    def __init__(self):
        super().__init__()
        self.pair = nn.Sequential(nn.Identity(), nn.ReLU(inplace=True))

    def before(self, x):
        y = self.first(x)
        if self.habit == "return value of an in-place module unused":
            self.relu(y)
        elif self.habit == "sequence that changes its input":
            y = self.pair(y)
        elif self.habit == "in-place function":
            F.relu_(y)
        elif self.habit == "in-place addition":
            y += 1
        elif self.habit == "a view is changed":
            y[:, 0].zero_()
        elif self.habit == "random":
            y = F.dropout(y, 0.5, training=True)
        elif self.habit == "same module before and behind":
            y = self.relu(y)
        elif self.habit == "inference mode":
            with torch.inference_mode():
                y = self.first(x)
        self.early = y
        return self.middle(y)

    def after(self, y):
        y = y + self.early.mean((1, 2, 3), keepdim=True)
        if self.habit == "changed behind the layer":
            self.early.mul_(2)
        if self.habit == "same module before and behind":
            y = self.relu(y)
        return super().after(y)


HABITS = [
    "return value of an in-place module unused",
    "sequence that changes its input",
    "in-place function",
    "in-place addition",
    "a view is changed",
    "changed behind the layer",
    "same module before and behind",
    "inference mode",
]


@pytest.mark.parametrize("habit", HABITS)
def test_models_that_write_over_what_they_have(habit):
    model, x = plain(Habits)
    model.habit = habit
    assert_replayed(model, x)
    heat = AblationCAM(model, "middle").attribute(x, 1)
    right, _ = plain(Habits)
    right.habit, right.first.training = habit, True  # what trains is not remembered
    assert torch.equal(heat, AblationCAM(right, "middle", mode="as_is").attribute(x, 1))


def test_where_random_numbers_are_drawn_nothing_is_remembered():
    model, x = plain(Habits)
    model.habit = "random"
    tool = PrefixCache(model, "middle")
    for _ in range(3):
        with torch.no_grad(), tool:
            model(x)
    assert runs(model.first) == 3


class Twice(Stem):
    def forward(self, x):
        y = self.middle(torch.tanh(self.first(x)))
        return self.after(self.middle(torch.tanh(self.first(y[:, :3]))))


@pytest.mark.parametrize(("call", "real"), [(0, 2 + 3), (1, 2)])
def test_a_layer_that_runs_twice_is_remembered_up_to_its_call(call, real):
    model, x = plain(Twice)
    assert_replayed(model, x, call=call)
    assert runs(model.first) == 4 * 2 + real


class Pushing(nn.Module):
    def __init__(self, skips):
        super().__init__()
        self.conv, self.skips = nn.Conv2d(3, 4, 3, padding=1), skips

    def forward(self, x):
        self.skips.append(self.conv(x))
        return self.skips[-1].tanh()


class Popping(Plain):
    """What the first module leaves on a list, the end of the model takes from it."""

    def __init__(self):
        super().__init__()
        skips = []
        self.first, self.skips = Pushing(skips), skips

    def before(self, x):
        return self.middle(self.first(x))

    def after(self, y):
        return super().after(y) + self.skips.pop().mean((1, 2, 3))[:, None]


@pytest.mark.parametrize("samples", [1, 3])
def test_a_module_that_leaves_more_than_its_output_still_has_its_map(samples):
    torch.manual_seed(0)
    model, x = Popping().double().eval(), torch.randn(samples, 3, 8, 8, dtype=torch.float64)
    A = model.before(x).detach()
    model.skips.clear()
    expected = torch.zeros(samples, 8, 8, dtype=torch.float64)
    with torch.no_grad():
        clean = Plain.after(model, A)
    for k in range(6):
        without = A.clone()
        without[:, k] = 0
        with torch.no_grad():
            expected += (clean - Plain.after(model, without))[:, 1, None, None] * A[:, k]
    found = AblationCAM(model, "middle").attribute(x, 1)
    torch.testing.assert_close(found, expected.relu(), rtol=1e-8, atol=1e-14)


def test_hooks_of_others_inside_run_in_every_pass():
    model, x = plain(Stem)
    model.first = nn.Sequential(model.first).eval()
    seen = []
    model.first[0].register_forward_hook(lambda *args: seen.append("inside"))
    model.middle.register_forward_pre_hook(lambda *args: seen.append("before the layer"))
    tool = PrefixCache(model, "middle")
    for _ in range(3):
        with torch.no_grad(), tool:
            model(x)
    assert seen == ["inside", "before the layer"] * 3
    assert (runs(model.first[0]), runs(model.middle)) == (3, 1)


def test_a_forward_of_its_own_on_a_module_is_left_alone():
    model, x = plain(Stem)
    calls, original = [], model.first.forward

    def own(x):
        calls.append(1)
        return original(x)

    model.first.forward = own
    with untouched(model, x):
        replayed_twice(model, x)
    assert model.first.forward is own
    assert len(calls) == 2
    model.middle.forward = model.middle.forward  # the layer's own: nothing can be told of when it is done
    replayed_twice(model, x)
    assert len(calls) == 4


def replayed_twice(model, x):
    tool = PrefixCache(model, "middle")
    for _ in range(2):
        with torch.no_grad(), tool:
            model(x)


def test_scripted_modules_and_train_mode_run_again():
    model, x = plain(Stem)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        model.first = nn.Sequential(torch.jit.script(nn.Conv2d(3, 4, 3, padding=1).double())).eval()
    assert model.first not in PrefixCache(model, "middle")._modules
    model, x = plain(Stem)
    model.first.train()
    replayed_twice(model, x)
    assert (runs(model.first), runs(model.middle)) == (2, 1)


def test_no_more_is_remembered_than_the_limit(monkeypatch):
    model, x = plain(Stem)
    monkeypatch.setattr(
        cache_prefix_and_vary_output, "MAX_CACHED_BYTES", 2 * 6 * 64 * 8
    )  # what the layer itself hands on
    replayed_twice(model, x)
    assert (runs(model.first), runs(model.middle)) == (2, 1)


@pytest.mark.parametrize("where", ["first", "last"])
@pytest.mark.parametrize("error", [ValueError("bad"), KeyboardInterrupt("stop")])
def test_a_pass_that_fails_leaves_nothing_and_is_not_remembered(where, error):
    model, x = plain(Stem)

    def broken(*args):
        raise error

    handle = model.get_submodule(where).register_forward_pre_hook(broken)
    tool = PrefixCache(model, "middle")
    with pytest.raises(type(error)) as caught, torch.no_grad(), tool:
        model(x)
    assert caught.value is error
    assert not any("forward" in module.__dict__ for module in model.modules())
    handle.remove()
    before = runs(model.first)
    with torch.no_grad():
        expected = model(x)
        with tool:
            assert torch.equal(model(x), expected)
    assert runs(model.first) == before + 2


def test_copies_made_meanwhile_are_plain_models():
    model, x = plain(Stem)
    with torch.no_grad():
        expected = model(x)
        with PrefixCache(model, "middle"):
            model(x)
            twins = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
        assert not any("forward" in vars(part) for one in twins for part in one.modules())
        model.first.weight.mul_(2)
        for twin in twins:
            assert torch.equal(twin(x), expected)
            assert torch.equal(AblationCAM(twin, "middle").attribute(x, 1), AblationCAM(twin, "middle").attribute(x, 1))


def test_other_threads_run_for_real_whoever_leaves_first():
    model, x = plain(Stem, samples=1)
    inputs = [x * (i + 1) for i in range(4)]
    with torch.no_grad():
        expected = [model(one) for one in inputs]
    rounds, wrong = threading.Barrier(4), []

    def work(i):
        tool = PrefixCache(model, "middle")
        with torch.no_grad():
            for number in range(30):
                if number % 10 == 0:
                    rounds.wait(timeout=120)
                if i == 3:  # this one has no Replay
                    right = torch.equal(model(inputs[i]), expected[i])
                else:
                    with tool:
                        right = torch.equal(model(inputs[i]), expected[i])
                if not right:
                    wrong.append((i, number))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert not any("forward" in module.__dict__ for module in model.modules())


@pytest.mark.parametrize("method", [AblationCAM, ReciproCAM, LIFTCAM, DeepFeatureFactorization])
@pytest.mark.usefixtures("passes_of_maps_alone")
def test_the_part_before_the_layer_runs_once(method):
    model, x = plain(Stem)
    expected = method(plain()[0], "middle").attribute(x, 1)
    settings = {} if method is LIFTCAM else {"batch_size": 2}
    with untouched(model, x):
        heat = method(model, "middle", **settings).attribute(x, 1)
    torch.testing.assert_close(heat, expected, rtol=1e-10, atol=1e-14)
    assert (runs(model.first), runs(model.middle)) == (1, 1)


class Keeping(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.skip = nn.Conv2d(3, 4, 3, padding=1), None

    def forward(self, x):
        self.skip = self.conv(x).tanh()
        return self.skip


class Kept(Plain):
    """What the first module keeps on itself, the end of the model reads."""

    def __init__(self):
        super().__init__()
        self.first = Keeping()

    def before(self, x):
        return self.middle(self.first(x))

    def after(self, y):
        return super().after(y) * self.first.skip.mean((1, 2, 3))[:, None]


@pytest.mark.parametrize("other", [ScoreCAM, SmoothGradCAMPlusPlus])
@pytest.mark.parametrize("method", [AblationCAM, ReciproCAM, LIFTCAM, DeepFeatureFactorization])
@pytest.mark.one_in(3)
def test_what_other_inputs_leave_behind_reaches_no_map(other, method):
    torch.manual_seed(0)
    model, x = Kept().eval(), torch.randn(1, 3, 8, 8)
    tool, beside = method(model, "middle"), other(model, "middle", **({"sigma": 1e-3} if other is not ScoreCAM else {}))
    alone = [one.attribution.tobytes() for one in tool.explain_classes(x[0], [0, 1])]
    found = explain_grid([beside, tool], x[0], [0, 1])[1]
    assert [one.attribution.tobytes() for one in found] == alone
    heat = Fused([beside, tool]).attribute(x, 0)
    assert torch.equal(heat, Fused([tool, beside]).attribute(x, 0))
    parts = [one.attribute(x, 0).relu() for one in (beside, tool)]
    assert torch.equal(heat, torch.stack([part / part.amax() for part in parts]).amax(0))


def test_a_replay_after_which_the_score_is_another_is_not_used():
    class Astray(LayerExplainer):
        """The score of the clean pass, after one of another input."""

        name, paper = "astray", "this test"
        runs_model = runs_partial_forward = True

        def compute_layer_map(self, features):
            features.score_inputs(1, lambda part: (features.x[:1] + 1, torch.zeros(1, dtype=torch.int64)))
            scores = features.score.read_score(features.run_with_edit(lambda maps: None), len(features.x))
            return scores[:, None, None].expand(-1, 2, 2)

    for kind in (Kept, Popping):
        torch.manual_seed(0)
        model, x = kind().double().eval(), torch.randn(1, 3, 8, 8, dtype=torch.float64)
        with torch.no_grad():
            expected = model(x)[0, 1]
        assert float(Astray(model, "middle").attribute(x, 1)[0, 0, 0]) == pytest.approx(float(expected), rel=1e-12)
