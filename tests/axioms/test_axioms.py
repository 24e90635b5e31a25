"""What holds for every method on every kind of network: METHODS drives these tests."""

import itertools

import numpy as np
import pytest
import torch
from torch import nn

from camscope.errors import TargetError
from camscope.explainers import METHODS
from camscope.explainers.core.pixel_explainers import PixelExplainer
from tests.nets import CASES
from tests.refusals import ATTENTION, answers, residual_or_plainer
from tests.tools import REPRESENTATIVES, explainer, looks_at_layers
from tests.untouched import untouched

# Tiny random networks have maps without positive evidence; that it is said is tested elsewhere.
pytestmark = [
    pytest.mark.filterwarnings("ignore::camscope.errors.CamscopeWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have a deterministic implementation"),  # on a card
]


EVERY_METHOD_AND_CASE = pytest.mark.parametrize(
    ("method", "case"),
    [
        pytest.param(method, CASES[name], id=f"{method}-{name}")
        for method in METHODS
        for name in CASES
        if answers(method, name)
    ],
)


def methods_or_cases():
    """Each method on the network that is hardest for it, and the representatives on the others: each third pair always."""
    for method, name in itertools.product(METHODS, CASES):
        hardest = CASES[name] is residual_or_plainer(method)
        if answers(method, name) and (hardest or method in REPRESENTATIVES):
            place = list(CASES).index(name) + (REPRESENTATIVES.index(method) if method in REPRESENTATIVES else 0)
            marks = () if hardest or place % 3 == 0 else pytest.mark.thorough
            yield pytest.param(method, CASES[name], id=f"{method}-{name}", marks=marks)


EVERY_METHOD_OR_CASE = pytest.mark.parametrize(("method", "case"), list(methods_or_cases()))


def grid(method, case):
    """Cells of the map: those of the layer or of the tokens, or the input's pixels where it is of those."""
    of_pixels = issubclass(METHODS[method], PixelExplainer)
    of_cells = looks_at_layers(method) or method in ATTENTION
    return case.grid if of_cells and not of_pixels else case.input_shape[1:]


class Exploding(nn.Module):
    def forward(self, x):
        raise ArithmeticError("the head exploded")


def last_linear(model):
    return [module for module in model.modules() if isinstance(module, nn.Linear)][-1]


@EVERY_METHOD_AND_CASE
@pytest.mark.one_in(3)
def test_shape_type_and_finite_numbers_of_its_own(method, case):
    model, x = case.make()
    heat = explainer(method, model, case.layer).attribute(x, 1)
    assert (heat.shape, heat.dtype, heat.device) == ((2, *grid(method, case)), x.dtype, x.device)
    assert heat.isfinite().all()
    assert not heat.requires_grad
    assert heat.untyped_storage().nbytes() == heat.nbytes


@EVERY_METHOD_OR_CASE
def test_the_same_question_has_the_same_bytes_and_changes_nothing(method, case):
    model, x = case.make()
    model.train()
    model.get_submodule(case.layer).eval()
    model(x).sum().backward()  # live .grad, running statistics, and a random state somewhere in its course
    tool = explainer(method, model, case.layer)
    with untouched(model, x):
        first, again = tool.attribute(x, 2), tool.attribute(x, 2)
        tool.explain(x[0], 1)
    assert first.cpu().numpy().tobytes() == again.cpu().numpy().tobytes()
    model.eval()
    assert torch.equal(tool.attribute(x, 2), first)


@EVERY_METHOD_OR_CASE
@pytest.mark.by_family
def test_a_failed_call_changes_nothing_and_the_next_one_is_right(method, case):
    model, x = case.make()
    model.train()
    tool = explainer(method, model, case.layer)
    right = tool.attribute(x, 1)
    for target in (3, -1, "cat", [0], [0, 3], 1.0, True):
        with untouched(model, x), pytest.raises(TargetError):
            tool.attribute(x, target)
    handle = last_linear(model).register_forward_pre_hook(lambda module, args: Exploding()(*args))
    with untouched(model, x), pytest.raises(ArithmeticError, match=r"^the head exploded$"):
        tool.attribute(x, 1)
    handle.remove()
    assert torch.equal(tool.attribute(x, 1), right)


@EVERY_METHOD_OR_CASE
@pytest.mark.by_family
def test_frozen_models_and_callers_without_gradients_get_the_same_map(method, case):
    model, x = case.make()
    tool = explainer(method, model, case.layer)
    right = tool.attribute(x, 1)
    with torch.no_grad():
        assert torch.equal(tool.attribute(x, 1), right)
    with torch.inference_mode():
        made_here = x.clone()
        maps = tool.attribute(x, 1), tool.attribute(made_here, 1)
    assert all(torch.equal(one, right) and not one.is_inference() for one in maps)
    assert torch.equal(tool.attribute(made_here, 1), right)
    assert torch.equal(tool.attribute(x.clone().requires_grad_(), 1), right)
    model.requires_grad_(False)  # other kernels may be chosen, so the last bits may differ
    torch.testing.assert_close(tool.attribute(x, 1), right, rtol=1e-5, atol=1e-7)


@EVERY_METHOD_OR_CASE
def test_each_sample_alone_has_its_map_in_the_batch(method, case):
    model, x = case.make(3, torch.float64)
    tool, targets = explainer(method, model, case.layer), [2, None, 0]
    batch = tool.attribute(x, targets)
    for i, target in enumerate(targets):
        torch.testing.assert_close(tool.attribute(x[i : i + 1], target)[0], batch[i], rtol=1e-10, atol=1e-14)
    one_by_one = [tool.explain(image, target).attribution for image, target in zip(x, targets, strict=True)]
    together = [one.attribution for one in tool.explain_batch(list(x), targets)]
    np.testing.assert_allclose(np.stack(one_by_one), batch.cpu().numpy(), rtol=1e-10, atol=1e-14)
    np.testing.assert_allclose(np.stack(together), batch.cpu().numpy(), rtol=1e-10, atol=1e-14)


@EVERY_METHOD_OR_CASE
@pytest.mark.by_family
def test_none_is_each_samples_top_class(method, case):
    model, x = case.make(4)
    with torch.no_grad():
        model.get_submodule("head").bias -= (
            model(x).mean(0) + 5
        )  # so that no class wins every time, and no output looks like a probability
        logits = model(x)
    top = logits.argmax(1).tolist()
    assert len(set(top)) > 1, "a test of each sample's own class needs several"
    tool = explainer(method, model, case.layer)
    assert torch.equal(tool.attribute(x), tool.attribute(x, top))
    explanations = tool.explain_batch(list(x))
    assert [one.target for one in explanations] == top
    scores = torch.tensor([one.score for one in explanations])
    torch.testing.assert_close(scores, logits.max(1).values.cpu(), rtol=1e-5, atol=1e-6)
    chances = torch.tensor([one.probability for one in explanations])
    torch.testing.assert_close(chances, logits.softmax(1).max(1).values.cpu(), rtol=1e-4, atol=1e-6)


class Shifted(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model(x) + 1000.0


@EVERY_METHOD_OR_CASE
@pytest.mark.by_family
def test_a_constant_added_to_the_logits_changes_nothing(method, case):
    model, x = case.make(dtype=torch.float64)
    right = explainer(method, model, case.layer).attribute(x, 1)
    shifted = explainer(method, Shifted(model), f"model.{case.layer}").attribute(x, 1)
    torch.testing.assert_close(shifted, right, rtol=1e-9, atol=1e-12)
