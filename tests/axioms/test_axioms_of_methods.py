"""What holds for every method, asked on the network that is hardest for it."""

import inspect
import math
from dataclasses import fields
from typing import get_args

import numpy as np
import pytest
import torch
from torch import nn

from camscope.errors import InputError, LayerError, ModelError
from camscope.explainers import METHODS, LayerExplainer
from camscope.explainers.path.additive_explainer import BaselinePathExplainer
from tests.nets import CASES, Plain, linear, plain
from tests.refusals import CALLABLE, LINEAR, PLAIN, REFUSED, answers, first_answered, residual_or_plainer
from tests.tools import Counting, Tally, by_family_with, explainer, seen_before
from tests.untouched import untouched

# Tiny random networks have maps without positive evidence; that it is said is tested elsewhere.
pytestmark = [
    pytest.mark.filterwarnings("ignore::camscope.errors.CamscopeWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have a deterministic implementation"),  # on a card
]


EVERY_METHOD = pytest.mark.parametrize("method", METHODS)


@EVERY_METHOD
def test_facts_are_class_constants(method):
    cls = METHODS[method]
    assert cls.name == method
    assert cls.paper.startswith(("arXiv:", "doi:"))
    assert cls.__doc__
    assert not inspect.isabstract(cls)


@EVERY_METHOD
def test_a_method_is_class_specific_exactly_where_two_classes_have_two_maps(method):
    case = first_answered(method, "flat", "pooled", "tokens")
    model, x = case.make()
    tool = explainer(method, model, case.layer)
    assert METHODS[method].class_specific is not torch.equal(tool.attribute(x, 0), tool.attribute(x, 1))


UNSEEN_BY = {"not seen": 0.0, "seen below the precision": 1e-12}  # the factor of the input


class Constant(nn.Module):
    """Answers the same whatever it sees.

    With a gradient of zero, with none, with one that its precision swallows, or with one at every layer: of what it sees
    nothing enters, or next to nothing.
    """

    def __init__(self, model, kind):
        super().__init__()
        self.model, self.kind = model, kind

    def forward(self, x):
        if self.kind in UNSEEN_BY:
            return self.model(
                torch.linspace(0, 1, x[0].numel(), device=x.device).view_as(x[:1]) + UNSEEN_BY[self.kind] * x
            )
        output, constant = self.model(x), torch.tensor([1.0, 2.0, 3.0], device=x.device)
        if self.kind == "no graph":
            return constant.expand(len(x), 3).clone()
        return 0 * output + constant if self.kind == "zero gradient" else 1e-9 * output + 1000 * constant


# by method: why its map of a constant score is no false one, and a note is enough
UNFLAGGED = {
    "center": "the same map for every model and image: a baseline of localization",
    "edges": "a map of the image alone, which no model makes: a baseline of localization",
    "randomcam": "a map of random weights, which claims to explain no score: a baseline of other CAMs",
}


def test_only_controls_leave_a_constant_score_to_a_note():
    assert set(UNFLAGGED) == {name for name, method in METHODS.items() if method.control}


def answer(tool, image):
    """The explanation of class 1, or the error in words."""
    try:
        return tool.explain(image, 1)
    except (LayerError, ModelError) as error:
        return str(error)


@pytest.mark.parametrize(
    ("method", "kind"),
    [
        *((method, "zero gradient") for method in METHODS),
        *by_family_with(METHODS, "no graph", "below the precision", *UNSEEN_BY),
    ],
)
def test_a_constant_model_is_flagged(method, kind):
    case = first_answered(method, "pooled", "flat", "tokens")
    model, x = case.make(1)
    tool = explainer(method, Constant(model, kind), f"model.{case.layer}")
    found = answer(tool, x[0])
    if isinstance(found, str):
        assert any(words in found for words in ("does not depend on", "not 'model.head'", "no Linear")), found
        return
    if method in UNFLAGGED:
        assert found.status == "ok", UNFLAGGED[method]
    else:
        assert found.status in ("constant_score", "zero_gradient", "flat", "no_positive_evidence")
    assert METHODS[method].class_specific is not ("the map does not depend on the score" in found.notes)


@pytest.fixture(params=[torch.device("meta"), torch.float64], ids=str)
def default(request):
    """A default of PyTorch that its user has changed."""
    of_dtype = torch.set_default_dtype if isinstance(request.param, torch.dtype) else torch.set_default_device

    def change():
        of_dtype(request.param)

    yield change
    torch.set_default_device(None)
    torch.set_default_dtype(torch.float32)


@EVERY_METHOD
@pytest.mark.by_family
def test_the_users_default_device_and_type_change_nothing(method, default):
    case = residual_or_plainer(method)
    model, x = case.make()
    tool = explainer(method, model, case.layer)
    expected, one = tool.attribute(x, 1), tool.explain(x[0], 1)
    default()
    again = explainer(method, model, case.layer)
    found, other = again.attribute(x, 1), again.explain(x[0], 1)
    assert (found.dtype, found.device) == (expected.dtype, expected.device)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert (one.status, one.probability, one.label) == (other.status, other.probability, other.label)


class Rewriting(Plain):
    """The same network, that rewrites the middle layer's output in place as soon as it has it."""

    def forward(self, x):
        y = self.before(x)
        nn.functional.elu_(y)
        return self.head(self.last(y).sigmoid_().mean((2, 3)))


@pytest.mark.parametrize("method", [method for method in METHODS if answers(method, PLAIN)])
@pytest.mark.by_family
def test_an_operation_in_place_after_the_layer_changes_nothing(method):
    model, x = plain()
    rewriting, _ = plain(Rewriting)
    expected = explainer(method, model, "middle").attribute(x, 1)
    found, rounding = explainer(method, rewriting, "middle").attribute(x, 1), 1e-14 * float(expected.abs().max())
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=rounding)  # a value may be what is left of large terms


class Rows(nn.Sequential):
    """Counts the rows that it really computes: a hook would count those that it is handed, too."""

    def __init__(self, *parts):
        super().__init__(*parts)
        self.tally = Tally(rows=0)

    rows = property(lambda self: self.tally.rows)

    def forward(self, x):
        self.tally.rows += len(x)
        return super().forward(x)


def amount(words, tool, channels, size):
    """The number that `1 + samples x K` means: K channels, all alive, 24 cells, L block, and the method's settings.

    `windows` slide over an input of so many pixels until they reach its end; its quarters are four parts.
    """
    window = getattr(tool, "window", None) or 1
    counts = [math.ceil((length - min(window, length)) / math.ceil(window / 2)) + 1 for length in size]
    known = {"K": channels, "cells": 24, "L": 1, "windows": math.prod(counts), "parts": 4, "len": len}
    return eval(words.replace(" x ", " * "), {**known, **vars(tool)})


PARTIAL_FORWARDS = " partial forwards"


FEW_OR_ALL = {"groupcam": {"n_groups": 4}, "vitcx": {"distance": 0}}  # seven channels, of which none are alike


@EVERY_METHOD
def test_the_declared_cost_is_the_counted_cost(method):
    cls, case = METHODS[method], first_answered(method, "channels last", "tokens", "residual")
    model, x = case.make()
    counting, stem = Counting(model), Rows(next(model.children()))
    setattr(model, next(name for name, _ in model.named_children()), stem)
    seen_before(counting, x)
    tool = explainer(method, counting, f"model.{case.layer}", **FEW_OR_ALL.get(method, {}))
    whole, _, partial = (
        cls.forward_passes.removesuffix(PARTIAL_FORWARDS).rpartition(" + ")
        if cls.forward_passes.endswith(PARTIAL_FORWARDS)
        else (cls.forward_passes, "", "0")
    )
    tool.attribute(x, 1)  # the layout of tokens is proved once, by three passes of one sample
    stem.tally.rows = counting.tally.backward_rows = 0
    tool.attribute(x, 1)
    shares_baseline = issubclass(cls, BaselinePathExplainer) and tool.baseline == "zero"
    n_shared = len(x) - 1 if shares_baseline else 0  # images of one class share the score of their equal baselines
    assert stem.rows == len(x) * amount(whole, tool, 7, x.shape[2:]) - n_shared
    if not getattr(cls, "second_order", False):  # where the rest is linear, nothing is left to differentiate twice
        assert counting.backward_rows == len(x) * amount(cls.backward_passes, tool, 7, x.shape[2:])
    if partial != "0":
        head = []
        model.head.register_forward_hook(lambda module, args, output: head.append(len(output)))
        tool.attribute(x, 1)
        declared = len(x) * amount(partial, tool, 7, x.shape[2:])
        assert declared <= sum(head) <= declared + 6 * len(x) + 1, "beside it: the first pass, an empty layer, a check"


@EVERY_METHOD
def test_settings_of_another_kind_are_refused_at_once_and_by_name(method):
    case = residual_or_plainer(method)
    model, _ = case.make()
    for field in fields(METHODS[method]):
        kinds = set(get_args(field.type)) or {field.type}
        if not kinds <= {bool, int, float, type(None)}:
            continue
        wrong = ["no", [1], 1j] + [1.5] * (float not in kinds) + [None] * (type(None) not in kinds)
        wrong += [math.nan, math.inf, 10**400, True] * (float in kinds) + [True, 2**64] * (field.name == "seed")
        for value in wrong:
            with pytest.raises(InputError, match=rf"^{field.name}=.*: expected "):
                explainer(method, model, case.layer, **{field.name: value})


def by_numpy(value):
    """The same numbers, as NumPy has them."""
    if isinstance(value, list | tuple):
        return type(value)(map(by_numpy, value))
    kinds = {int: np.int64, float: np.float64}
    return kinds[type(value)](value) if type(value) in kinds else value


@EVERY_METHOD
@pytest.mark.by_family
def test_numbers_of_numpy_are_numbers(method):
    case = residual_or_plainer(method)
    model, x = case.make()
    known = explainer(method, model, case.layer)
    settings = {field.name: getattr(known, field.name) for field in fields(known) if field.name != "layers"}
    numbers = {name: given for name, value in settings.items() if repr(given := by_numpy(value)) != repr(value)}
    tool = explainer(method, model, case.layer, **numbers)
    assert all(repr(getattr(tool, name)) == repr(getattr(known, name)) for name in numbers)
    if numbers:
        assert torch.equal(tool.attribute(x, 1), known.attribute(x, 1))


@EVERY_METHOD
@pytest.mark.by_family
def test_several_classes_are_several_calls_at_the_price_of_one_forward(method):
    case = residual_or_plainer(method)
    cls, (model, x) = METHODS[method], case.make()
    counting, targets = seen_before(Counting(model), x[:1]), [2, None, 0, lambda output: output[:, 1]]
    targets = targets if answers(method, CALLABLE) else targets[:-1]
    tool = explainer(method, counting, f"model.{case.layer}")
    together = tool.explain_classes(x[0], targets)
    if issubclass(cls, LayerExplainer) and cls.forward_passes.isdigit() and not (cls.second_order or cls.runs_model):
        assert (counting.forwards, counting.backwards) == (
            int(cls.forward_passes),
            len(targets) * int(cls.backward_passes),
        )
    for one, target in zip(together, targets, strict=True):
        alone = tool.explain(x[0], target)
        assert one.attribution.tobytes() == alone.attribution.tobytes()
        assert (one.target, one.label, one.score, one.status) == (alone.target, alone.label, alone.score, alone.status)


@pytest.mark.parametrize(("method", "where"), REFUSED)
def test_where_a_method_has_no_map_it_says_why_and_changes_nothing(method, where):
    error, message = REFUSED[method, where]
    if where in (PLAIN, LINEAR):
        (model, x), layer = (plain(), "middle") if where == PLAIN else (linear(), "features")
    else:
        case = CASES["pooled" if where == CALLABLE else where]
        (model, x), layer = case.make(), case.layer
    tool, target = explainer(method, model, layer), (lambda output: output[:, 1]) if where == CALLABLE else 1
    for call, asked in ((tool.attribute, x), (tool.explain, x[0])):
        with untouched(model, x), pytest.raises(error, match=message):
            call(asked, target)
