"""State: what a call must leave as it was, whatever happens in it, and what it must not keep."""

import copy
import copyreg
import gc
import io
import pickle
import sys
import threading
import warnings
import weakref
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

from camscope.errors import CamscopeWarning, InputError, LayerError, ModelError, TargetError
from camscope.explainers import METHODS, GradCAM, HiResCAM, LayerCAM
from camscope.hooks.thread_local_evaluation_mode import evaluation_mode
from tests.nets import CASES, Plain, Residual, Tokens, plain, truth
from tests.refusals import answers, first_answered, residual_or_plainer
from tests.tools import REPRESENTATIVES, explainer, looks_at_layers
from tests.untouched import untouched

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore::camscope.errors.CamscopeWarning"),
]


def mixed_modes():
    """A network with live gradients, running statistics, and a different mode in every submodule."""
    torch.manual_seed(1)
    model, x = Residual(), torch.randn(2, 3, 12, 12)
    model.train()
    model(x).sum().backward()
    model.norm.eval()
    model.block.eval()
    return model, x


def test_train_mode_is_explained_in_eval_mode_and_every_flag_comes_back():
    model, x = mixed_modes()
    expected = GradCAM(copy.deepcopy(model).eval(), "block").attribute(x, 1)
    with untouched(model, x):
        assert torch.equal(GradCAM(model, "block").attribute(x, 1), expected)
    assert [name for name, module in model.named_modules() if not module.training] == ["norm", "block"]


class Interrupting(nn.Module):
    """Raises what it is told to, once."""

    def __init__(self, error):
        super().__init__()
        self.error = error

    def forward(self, x):
        error, self.error = self.error, None
        if error is not None:
            raise error
        return x


@pytest.mark.parametrize("error", [KeyboardInterrupt("stop"), SystemExit(3), ValueError("bad"), MemoryError()])
@pytest.mark.parametrize("place", ["stem", "block", "head"])
@pytest.mark.one_in(5)
def test_whatever_the_model_raises_passes_unchanged_and_the_next_call_is_right(place, error):
    model, x = mixed_modes()
    expected = GradCAM(model, "block").attribute(x, 1)
    setattr(model, place, nn.Sequential(getattr(model, place), Interrupting(None)))
    tool = GradCAM(model, "block.0" if place == "block" else "block")
    tool.attribute(x, 1)  # what is seen of a model once is seen
    model.get_submodule(place)[1].error = error
    facts = (model.norm.training, model.dropout.training, torch.is_grad_enabled())
    with pytest.raises(type(error)) as caught:
        tool.attribute(x, 1)
    assert caught.value is error
    assert caught.value.__cause__ is None
    assert facts == (model.norm.training, model.dropout.training, torch.is_grad_enabled())
    assert not any(module._forward_hooks for module in model.modules())
    assert torch.equal(tool.attribute(x, 1), expected)


def test_an_exception_in_a_users_hook_or_in_the_target_leaves_nothing():
    model, x = mixed_modes()

    def broken(*args):
        raise RuntimeError("mine")

    with untouched(model, x), pytest.raises(RuntimeError, match=r"^mine$"):
        GradCAM(model, "block").attribute(x, broken)
    handle = model.block.register_forward_hook(broken)
    with untouched(model, x), pytest.raises(RuntimeError, match=r"^mine$"):
        GradCAM(model, "block").attribute(x, 1)
    handle.remove()


def test_as_is_explains_the_model_in_train_mode():
    model, x = mixed_modes()
    model.norm.train()
    model.dropout.p = 0.0
    model.norm.momentum = 0.0
    activation = model.stem(x)
    pooled = model.relu(F.batch_norm(activation, None, None, model.norm.weight, model.norm.bias, training=True))
    A = model.block(pooled).detach().requires_grad_()
    score = model.head(F.relu(A + pooled).mean((2, 3)))[:, 1].sum()
    expected = (A * torch.autograd.grad(score, A)[0]).sum(1).detach()
    with untouched(model.relu, x):
        heat = HiResCAM(model, "block", mode="as_is").attribute(x, 1)
    torch.testing.assert_close(heat, expected, rtol=1e-4, atol=1e-6)
    assert not torch.allclose(heat, HiResCAM(model, "block").attribute(x, 1), rtol=1e-2)
    assert model.training
    assert not model.block.training


def test_the_callers_graph_behind_the_input_stays_usable():
    model, _ = plain()
    source = torch.randn(2, 3, 8, 8, dtype=torch.float64, requires_grad=True)
    x = source.sin()  # saves `source`: its backward works once only, unless somebody freed it before
    loss = x.square().sum()
    with untouched(model, source, x):
        heat = HiResCAM(model, "middle").attribute(x, 1)
        HiResCAM(model, "middle").explain(x[:1], 1)
    assert torch.equal(heat, HiResCAM(model, "middle").attribute(x.detach(), 1))
    loss.backward()
    torch.testing.assert_close(source.grad, 2 * source.detach().sin() * source.detach().cos())


def test_the_callers_graph_behind_a_second_input_stays_usable():
    class Gated(Plain):
        def forward(self, x, gate, *, bias):
            return self.after(self.before(x) * gate) + bias

    model, x = plain(Gated)
    source = torch.randn(2, 6, 8, 8, dtype=torch.float64, requires_grad=True)
    gate, bias = source.sin(), source.mean((1, 2, 3))[:, None].exp()
    with untouched(model, x, source, gate, bias):
        heat = HiResCAM(model, "middle").attribute(x, 1, gate, bias=bias)
    (gate.sum() + bias.sum()).backward()
    assert source.grad.isfinite().all()
    with torch.inference_mode():
        made_there = gate.clone(), bias.clone()
    again = HiResCAM(model, "middle").attribute(x, 1, made_there[0], bias=made_there[1])
    assert torch.equal(heat, again)


def test_a_training_step_is_the_same_with_explanations_in_its_middle():
    def trained(explain):
        model, x = mixed_modes()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model.train()
        for _ in range(3):
            loss = model(x).square().mean()
            if explain:
                GradCAM(model, "block").attribute(x, 1)
            optimizer.zero_grad()
            loss.backward()
            if explain:
                LayerCAM(model, "block").explain(x[0], 0)
            optimizer.step()
        return torch.cat([value.flatten().double() for value in model.state_dict().values()])

    assert torch.equal(trained(explain=False), trained(explain=True))


class Switching(Plain):
    """Turns gradients off and on by itself; `kind` says how."""

    kind = "whole"

    def forward(self, x):
        if self.kind == "whole":
            with torch.no_grad():
                return super().forward(x)
        if self.kind == "up to the layer":
            with torch.no_grad():
                y = self.before(x)
            return self.after(y)
        if self.kind == "left off":
            torch.set_grad_enabled(False)
            return super().forward(x)
        with torch.no_grad():  # "half": one path of the score is recorded, the other is not
            y = self.before(x)
        other = torch.sigmoid(self.last(F.elu(y)))
        with torch.enable_grad():
            return self.head(other.mean((2, 3))) + y.mean((2, 3))[:, :3]


@pytest.mark.parametrize("kind", ["whole", "up to the layer", "left off", "half"])
def test_a_model_that_switches_gradients_off_itself(kind):
    model, x = plain(Switching)
    model.kind = kind
    reference, _ = plain()
    expected = truth(reference, x, 1)
    if kind == "half":
        y = reference.before(x).detach()
        expected = expected + y[:, 1] / 64
    with untouched(model, x):
        heat = HiResCAM(model, "middle").attribute(x, 1)
    torch.testing.assert_close(heat, expected, rtol=1e-10, atol=1e-16)


def test_a_model_that_returns_an_object_and_switches_gradients_off():
    class Answer:
        def __init__(self, logits):
            self.logits = logits

    class Wrapped(Switching):
        def forward(self, x):
            return Answer(super().forward(x))

    model, x = plain(Wrapped)
    model.kind = "up to the layer"
    torch.testing.assert_close(HiResCAM(model, "middle").attribute(x, 1), truth(model, x, 1), rtol=1e-10, atol=1e-16)


def test_a_model_that_changes_its_input_is_an_error_and_never_explained_twice_changed():
    class Normalizing(Plain):
        def forward(self, x):
            return super().forward(x.sub_(1.0))

    model, x = plain(Normalizing)
    for layer in (None, "middle"):
        with pytest.raises(InputError, match=r"the model changed its input in place.*x\.clone\(\)"):
            HiResCAM(model, layer).attribute(x.clone(), 1)
    net = nn.Sequential(nn.ReLU(inplace=True), plain()[0])
    with pytest.raises(InputError, match="the model changed its input in place"):
        HiResCAM(net, "1.middle").explain(x[0].clone(), 1)


def test_a_model_without_parameters():
    class Bare(nn.Module):
        def __init__(self):
            super().__init__()
            self.pool = nn.AvgPool2d(2)

        def forward(self, x):
            return self.pool(x).square().sum((2, 3))

    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    pooled = F.avg_pool2d(x, 2)
    torch.testing.assert_close(HiResCAM(Bare(), "pool").attribute(x, 2), 2 * pooled[:, 2].square())


def test_a_users_hooks_still_run_and_their_output_is_what_is_explained():
    model, x = plain()
    calls = []
    model.middle.register_forward_pre_hook(lambda module, args: calls.append("pre"))
    model.middle.register_forward_hook(lambda module, args, output: output * 3)
    model.middle.register_forward_hook(lambda module, args, output: calls.append("post"))
    model.last.register_forward_hook(lambda module, args, output: calls.append("later"))
    reference, _ = plain()
    reference.middle.weight.data *= 3
    reference.middle.bias.data *= 3
    with untouched(model, x):
        heat = HiResCAM(model, "middle").attribute(x, 1)
    torch.testing.assert_close(heat, truth(reference, x, 1), rtol=1e-10, atol=1e-16)
    assert calls == ["pre", "post", "later"]
    assert len(model.middle._forward_hooks) == 2


def test_a_users_backward_hook_behind_the_layer_runs_and_may_change_the_gradient():
    model, x = plain()
    model.head.register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 2,))
    with untouched(model, x):
        heat = HiResCAM(model, "middle").attribute(x, 1)
    torch.testing.assert_close(heat, 2 * truth(plain()[0], x, 1), rtol=1e-10, atol=1e-16)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.by_family
def test_model_and_explainer_can_be_copied_pickled_and_saved_after_a_call(method):
    case = residual_or_plainer(method)
    model, x = case.make()
    for layer in (case.layer, None) if method in REPRESENTATIVES[:2] else (case.layer,):
        tool = explainer(method, model, layer)
        expected = tool.attribute(x, 1)
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        if method in REPRESENTATIVES:
            for twin in (
                copy.deepcopy(model),
                pickle.loads(pickle.dumps(model)),
                torch.load(buffer, weights_only=False),
            ):
                assert torch.equal(explainer(method, twin, layer).attribute(x, 1), expected)
        for twin in (copy.deepcopy(tool), pickle.loads(pickle.dumps(tool)), copy.copy(tool)):
            assert torch.equal(twin.attribute(x, 1), expected)


def test_a_layer_that_was_replaced_is_the_new_one_in_the_next_call():
    model, x = plain()
    tool = HiResCAM(model, model.middle)
    tool.attribute(x, 1)
    torch.manual_seed(9)
    model.middle = nn.Conv2d(4, 6, 3, stride=2, padding=1).double()
    torch.testing.assert_close(tool.attribute(x, 1), truth(model, x, 1), rtol=1e-10, atol=1e-16)
    assert tool.layer == "middle"


def test_the_chosen_layer_does_not_depend_on_what_was_asked_before():
    model, x = CASES["pooled"].make(1)
    tool = GradCAM(model)
    assert tool.explain(x).layer == "features"
    model.features = nn.Sequential(nn.Conv2d(3, 6, 3), nn.Flatten(2))
    assert tool.explain(x).layer == "features.0"


class TwoAnswers(Tokens):
    """The first answer reads the last tokens, the second one those of the block before."""

    def __init__(self):
        super().__init__()
        self.late = nn.Sequential(nn.Linear(8, 8), nn.Tanh())

    def forward(self, x):
        early = self.block(self.embed(x).flatten(2).transpose(1, 2))
        return torch.stack([self.late(early).square().mean((1, 2)), early.square().mean((1, 2))], 1)


def test_the_layer_chosen_among_tokens_is_the_last_that_any_class_reads():
    torch.manual_seed(0)
    model, image = TwoAnswers(), torch.randn(3, 24, 16)
    for order in ((0, 1, 0), (1, 0, 1)):
        tool = GradCAM(model)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CamscopeWarning)
            answers = [tool.explain(image, target) for target in order]
        assert [answer.layer for answer in answers] == ["late"] * 3
        assert {answer.target: answer.status for answer in answers if answer.target == 1} == {1: "zero_gradient"}


def test_the_layer_chosen_among_tokens_is_the_last_that_a_callable_reads():
    torch.manual_seed(0)
    tool, image = GradCAM(TwoAnswers()), torch.randn(3, 24, 16)
    targets = [lambda output: output[:, 0], lambda output: output[:, 1], 0]
    assert [tool.explain(image, target).layer for target in targets] == ["late", "block", "late"]


@pytest.fixture(scope="module")
def only_what_is_new():
    """Objects that are here already are neither counted nor looked through: of those that others imported there are millions."""
    gc.freeze()


def live_tensors():
    return sum(type(one) in (torch.Tensor, nn.Parameter) for one in gc.get_objects())


@pytest.mark.parametrize(("method", "calls"), [(method, 20 if method == "gradcam" else 6) for method in METHODS])
@pytest.mark.by_family
def test_many_calls_grow_nothing_even_without_the_garbage_collector(method, calls, only_what_is_new):
    case = first_answered(method, "pooled", "tokens")
    model, x = case.make(1)
    tool = explainer(method, model, case.layer)
    for _ in range(
        2
    ):  # what is computed once is computed now, and Python's caches that an import empties are full again
        tool.attribute(x, 1)
        tool.explain(x, 1)
    gc.collect()
    gc.disable()
    try:
        before, objects = live_tensors(), len(gc.get_objects())
        for _ in range(calls):
            tool.attribute(x, 1)
            tool.explain(x, 1)
        after, grown = live_tensors(), len(gc.get_objects()) - objects
    finally:
        gc.enable()
    assert after <= before
    assert grown < calls, "something is kept, call by call"


@pytest.mark.thorough  # many calls are asked above
def test_five_hundred_calls_three_hundred_explainers_and_two_hundred_failures_grow_nothing(only_what_is_new):
    model, x = plain(samples=1)
    steady = GradCAM(model, "middle")

    def failing():
        with pytest.raises(TargetError):
            GradCAM(model, "middle").attribute(x, 99)

    for times, act in (
        (500, lambda: steady.attribute(x, 1)),
        (300, lambda: LayerCAM(model, "middle").attribute(x, 1)),
        (200, failing),
    ):
        act()
        gc.collect()
        before, objects = live_tensors(), len(gc.get_objects())
        for _ in range(times):
            act()
        gc.collect()
        assert live_tensors() <= before
        assert len(gc.get_objects()) - objects < 50, "something is kept"


def test_nothing_of_a_call_outlives_its_result():
    model, x = plain()
    kept = []
    model.middle.register_forward_hook(lambda module, args, output: kept.append(weakref.ref(output)))
    model.last.register_forward_hook(lambda module, args, output: kept.append(weakref.ref(output)))
    gc.disable()
    try:
        heat = HiResCAM(model, "middle").attribute(x, 1)
        assert len(kept) == 2
        assert [one() for one in kept] == [None, None]
    finally:
        gc.enable()
    tool = weakref.ref(HiResCAM(model, "middle"))
    assert tool() is None
    model_gone = weakref.ref(model)
    del model
    gc.collect()
    assert model_gone() is None
    assert heat.isfinite().all()


def test_results_own_their_memory():
    model, x = CASES["pooled"].make(1)
    tool = GradCAM(model, "features")
    heat, explanation = tool.attribute(x, 1), tool.explain(x, 1)
    pictures = explanation.attribution.copy(), explanation.model_input_image.copy(), explanation.overlay()
    before = heat.clone()
    with torch.no_grad():
        x.fill_(7.0)
        for value in model.state_dict().values():
            value.fill_(3)
    tool.attribute(x, 1)
    assert torch.equal(heat, before)
    for was, now in zip(
        pictures, (explanation.attribution, explanation.model_input_image, explanation.overlay()), strict=True
    ):
        np.testing.assert_array_equal(was, now)
    assert explanation.attribution.flags.owndata


def test_an_image_that_the_caller_changes_afterwards_changes_no_explanation():
    model, _ = CASES["pooled"].make(1)

    def preprocess(image):
        return torch.from_numpy(np.asarray(image, dtype=np.float32)).permute(2, 0, 1) / 255

    pixels = np.random.default_rng(0).integers(0, 256, (16, 12, 3), dtype=np.uint8)
    explanation = GradCAM(model, "features", preprocess=preprocess).explain(pixels, 1)
    image = explanation.image.copy()
    pixels[:] = 0
    np.testing.assert_array_equal(explanation.image, image)


@pytest.mark.parametrize(
    ("training", "names"),
    [(False, REPRESENTATIVES), (True, REPRESENTATIVES), pytest.param(True, METHODS, marks=pytest.mark.thorough)],
    ids=["eval", "training", "training-all"],
)
@pytest.mark.one_in(2)
def test_eight_threads_on_one_model_each_have_their_own_answer(training, names):
    model, x = mixed_modes()
    model.eval()
    methods = [method for method in names if answers(method, "residual")]
    layers = {method: ("stem", "block") if looks_at_layers(method) else ("block",) for method in methods}
    # those that are asked of one explainer stand side by side: it works in several threads at once
    targets = range(2 if training else 3)
    questions = [(method, layer, target) for method in methods for layer in layers[method] for target in targets]
    expected = [explainer(method, model, layer).attribute(x, target) for method, layer, target in questions]
    model.train(training)
    shared = {(method, layer): explainer(method, model, layer) for method, layer, _ in questions}
    switch = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with untouched(model, x), ThreadPoolExecutor(8) as pool:
            found = list(pool.map(lambda one: shared[one[:2]].attribute(x, one[2]), questions))
            assert all(map(torch.equal, found, expected))
    finally:
        sys.setswitchinterval(switch)


def test_a_thread_that_raises_does_not_disturb_the_others():
    model, x = mixed_modes()
    expected = GradCAM(model, "block").attribute(x, 1)
    inside, leave = threading.Event(), threading.Event()

    def failing_target(output):
        inside.set()
        leave.wait(10)
        raise ArithmeticError("mine")

    with untouched(model, x), ThreadPoolExecutor(1) as pool:
        future = pool.submit(GradCAM(model, "block").attribute, x, failing_target)
        assert inside.wait(10)
        assert torch.equal(GradCAM(model, "block").attribute(x, 1), expected)
        assert model.training, "a thread that explains changes no flag"
        leave.set()
        with pytest.raises(ArithmeticError, match="mine"):
            future.result(10)
    assert model.training


def test_a_thread_of_the_user_runs_the_model_without_being_seen():
    model, x = plain()
    inside, leave, heats = threading.Event(), threading.Event(), []

    def slow_target(output):
        inside.set()
        leave.wait(10)
        return output[:, 1]

    other = torch.randn(1, 3, 8, 8, dtype=torch.float64)
    with torch.no_grad():
        expected = model(other)
    thread = threading.Thread(target=lambda: heats.append(HiResCAM(model, "middle").attribute(x, slow_target)))
    thread.start()
    assert inside.wait(10)
    with torch.no_grad():
        found = model(other)
    leave.set()
    thread.join(10)
    assert torch.equal(found, expected)
    assert not found.requires_grad
    torch.testing.assert_close(heats[0], truth(model, x, 1), rtol=1e-10, atol=1e-16)


def test_a_model_and_a_part_of_it_are_explained_at_once():
    """Threads that explain a model and its backbone share the backbone's modes."""
    model, _ = mixed_modes()
    whole = nn.Sequential(model)
    with evaluation_mode(whole):
        entered = evaluation_mode(model)
        entered.__enter__()
    still_inside = [module.training for module in model.modules()]
    entered.__exit__(None, None, None)
    assert not any(still_inside)
    assert model.training
    assert not model.norm.training
    with evaluation_mode(model):
        entered = evaluation_mode(whole)
        entered.__enter__()
    still_inside = [module.training for module in whole.modules()]
    entered.__exit__(None, None, None)
    assert not any(still_inside)
    assert whole.training
    assert model.training
    assert not model.norm.training


class Explained(Dataset):
    """Maps, made in the worker that is asked for them."""

    def __init__(self, tool, x):
        self.tool, self.x = tool, x

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.tool.attribute(self.x[i : i + 1], 1)[0]


@pytest.mark.skipif(sys.platform != "linux", reason="forking is Linux's way")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_forked_workers_of_a_data_loader_explain():
    model, x = plain()
    tool = HiResCAM(model.train(), "middle")
    expected = torch.stack([tool.attribute(x[i : i + 1], 1)[0] for i in range(2)])
    loader = DataLoader(Explained(tool, x), batch_size=2, num_workers=1, multiprocessing_context="fork", timeout=300)
    (found,) = list(loader)
    assert torch.equal(found, expected)


def test_two_explainers_interleaved():
    model, x = plain()
    first, second = HiResCAM(model, "first"), HiResCAM(model, "middle")
    alone = first.attribute(x, 0), second.attribute(x, 1)

    def asks_the_other(output):
        nested.append(second.attribute(x, 1))
        return output[:, 0]

    nested = []
    with untouched(model, x):
        outer = first.attribute(x, asks_the_other)
    assert torch.equal(outer, alone[0])
    assert torch.equal(nested[0], alone[1])
    nested.clear()
    same = second.attribute(x, lambda output: (nested.append(second.attribute(x, 2)), output[:, 1])[1])
    assert torch.equal(same, alone[1])
    assert torch.equal(nested[0], second.attribute(x, 2))


class Copying(nn.Module):
    """Hands its input on; meanwhile, in its own thread and in another, copies are made of the whole model."""

    model, copies, errors = None, (), ()

    def forward(self, x):
        if type(self).model is not None:
            for make in (lambda act: act(), in_another_thread):
                make(self.copied)
        return x

    def copied(self):
        model = type(self).model
        for make in (copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one)), saved_and_loaded):
            try:
                type(self).copies.append(make(model))
            except Exception as error:
                type(self).errors.append(error)


def in_another_thread(act):
    thread = threading.Thread(target=act)
    thread.start()
    thread.join()


def saved_and_loaded(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def shape_of(module, args, kwargs, output):
    """A hook of the user's own."""


def kept_on(module):
    """What hangs on a module besides its parts and numbers."""
    names = [name for name in vars(module) if name.endswith(("_hooks", "_with_kwargs", "_always_called"))]
    return {name: list(vars(module)[name].values()) for name in names}, module.training, "forward" in vars(module)


@pytest.mark.parametrize(
    ("method", "mode"), [*((method, "eval") for method in METHODS), ("gradcam", "as_is"), ("lrp", "as_is")]
)
@pytest.mark.by_family
def test_copies_made_during_a_call_have_the_users_hooks_and_flags_and_none_of_ours(method, mode, monkeypatch):
    case = residual_or_plainer(method)
    model, x = case.make(1)
    model.head = nn.Sequential(Copying(), model.head)
    model.train()
    model.head.eval()
    model.head.register_forward_hook(shape_of, with_kwargs=True, always_call=True)
    expected = [kept_on(module) for module in model.modules()]
    tool = explainer(method, model, case.layer, mode=mode)
    monkeypatch.setattr(Copying, "copies", [])
    monkeypatch.setattr(Copying, "errors", [])
    monkeypatch.setattr(Copying, "model", model)
    try:
        tool.attribute(x, 1)
    except (LayerError, ModelError):
        pass  # of a method that does not explain such a head
    finally:
        Copying.model = None
    assert Copying.errors == []
    assert Copying.copies
    for twin in Copying.copies:
        assert [kept_on(module) for module in twin.modules()] == expected
    assert [kept_on(module) for module in model.modules()] == expected
    assert OrderedDict not in copyreg.dispatch_table
    assert "__reduce_ex__" not in vars(nn.Module)


class Writing(nn.Module):
    """Writes a buffer in every forward, in whatever mode; `kind` says how."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.first, self.norm, self.head = kind, nn.Conv2d(3, 6, 3, 2, 1), nn.BatchNorm2d(6), nn.Linear(6, 3)
        if kind == "by the parent":
            return
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("statistics", torch.zeros(4))
        self.other_name, self.part = self.count, self.statistics[1:3]
        self.observer = torch.ao.quantization.MinMaxObserver() if kind == "observer" else nn.Identity()
        if kind == "scripted":
            self.norm = torch.jit.script(self.norm)

    def forward(self, x):
        y = self.norm(self.first(x)).relu()
        if self.kind == "observer":
            y = self.observer(y)
        with torch.no_grad():
            self.write(y)
        if self.kind == "random numbers":
            y = F.dropout(y, 0.3, training=True)
        return self.head(y.mean((2, 3)))

    def write(self, y):
        if self.kind == "in place":
            self.count.add_(1)
        if self.kind == "assigned":
            self.count = self.count + 1
        if self.kind == "another name":
            self.other_name.add_(1)
        if self.kind == "a view":
            self.part.add_(1)
        if self.kind == "data":
            self.statistics.data.add_(1)
        if self.kind == "an item":
            self.statistics[0] = self.statistics[0] + 7
        if self.kind == "numpy":
            self.statistics.numpy()[0] += 1
        if self.kind == "other data":
            self.statistics.data = torch.ones(4) * self.statistics.sum() + 1
        if self.kind == "by the parent":
            self.norm.num_batches_tracked.add_(1)


WRITES = ["in place", "assigned", "another name", "a view", "data", "an item", "numpy", "other data", "by the parent"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("kind", [*WRITES, "observer", "scripted", "random numbers"])
@pytest.mark.parametrize(("mode", "train"), [("eval", True), ("eval", False), ("as_is", True), ("as_is", False)])
@pytest.mark.parametrize("method", ["gradcam", "scorecam", "saliency"])
@pytest.mark.one_in(5)
def test_what_a_forward_writes_is_not_written_by_a_call(method, mode, train, kind):
    torch.manual_seed(0)
    model, x = Writing(kind).train(train), torch.randn(2, 3, 12, 12)
    if threading.active_count() > 1 and (kind, mode) in [("random numbers", "eval"), ("by the parent", "eval")]:
        pytest.skip("another thread is at work in this process")
    before, buffers = copy.deepcopy(model.state_dict()), dict(model.named_buffers())
    for _ in range(2):
        with untouched(nn.Identity(), x):
            explainer(method, model, "first", mode=mode).attribute(x, 1)
    assert list(model.state_dict()) == list(before)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    if kind != "scripted":
        assert all(buffer is buffers[name] for name, buffer in model.named_buffers())
    model(x)  # and its own calls still write
    assert (
        kind == "random numbers"
        or (kind == "scripted" and not train)
        or any(not torch.equal(value, before[name]) for name, value in model.state_dict().items())
    )


def test_a_buffer_written_while_other_threads_run_is_reported_once_and_then_left_alone():
    model, x = Writing("by the parent").eval(), torch.randn(1, 3, 12, 12)
    stop = threading.Event()
    other = threading.Thread(target=stop.wait)
    other.start()
    try:
        with pytest.warns(CamscopeWarning, match="wrote buffers in eval mode while other threads ran"):
            GradCAM(model, "first").attribute(x, 1)
        written = int(model.norm.num_batches_tracked)
        GradCAM(model, "first").attribute(x, 1)
    finally:
        stop.set()
        other.join()
    assert int(model.norm.num_batches_tracked) == written


def test_a_table_that_a_model_makes_for_another_size_stays_with_what_it_notes_of_it():
    class Tabled(Plain):
        size = None

        def forward(self, x):
            if x.shape[-1] != self.size:
                self.register_buffer("table", torch.linspace(0, 1, x.shape[-1], dtype=x.dtype), persistent=False)
                self.size = x.shape[-1]
            return super().forward(x * self.table)

    model, x = plain(Tabled)
    model(x[..., :6])
    first = HiResCAM(model, "middle").attribute(x, 1)
    assert torch.equal(HiResCAM(model, "middle").attribute(x, 1), first)
    model(x)
