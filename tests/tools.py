"""An explainer of any method by name, a model that counts its passes, and the largest tensor that anything makes."""

import functools
import inspect
from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from camscope.explainers import METHODS
from camscope.explainers.core.evaluation_context import inspect_model
from camscope.explainers.core.find_constant_scores_and_interacting_samples import (
    find_samples_with_constant_score,
    samples_interact,
)
from camscope.targets import Score

REPRESENTATIVES = (
    "gradcam",
    "scorecam",
    "rollout",
    "deeplift",
    "integratedgradients",
    "guidedbackprop",
    "rise",
    "refinecam",
    "fullgrad",
)  # of each family of methods, for tests of what a family shares


def by_family(methods):
    """Parameters: the representatives of the families among the methods, and with `--thorough` the other methods."""
    return [one if one in REPRESENTATIVES else pytest.param(one, marks=pytest.mark.thorough) for one in methods]


def by_family_with(methods, *others):
    """Parameters: pairs of a method and each of the others, of the representatives, and with `--thorough` of all methods."""
    marks = {method: () if method in REPRESENTATIVES else (pytest.mark.thorough,) for method in methods}
    return [pytest.param(method, other, marks=marks[method]) for other in others for method in methods]


def quarters(x):
    """(C,*S) -> (*S): each half of the last axis, and of the first of several."""
    device = x.device
    labels = torch.arange(x.shape[-1], device=device) * 2 // x.shape[-1]
    rows = torch.arange(x.shape[1] if x.ndim > 2 else 1, device=device) * 2 // max(x.shape[1], 2)
    return (labels + 2 * rows.view(-1, *[1] * (x.ndim - 2))).expand(x.shape[1:])


# Of a method that runs the model many times as few as tell whether it is right, and what some need beside a model.
FEW = {
    "blurig": {"n_steps": 3},
    "expectedgradients": {"n_samples": 4, "background": ["zero", "mean"]},
    "gradientshap": {"n_samples": 8, "background": ["zero", "mean"]},
    "guidedig": {"n_steps": 3},
    "integratedgradients": {"n_steps": 3},
    "xrai": {"n_steps": 4, "scales": (5.0, 50.0), "min_size": 8, "margin": 1, "min_new_pixels": 2},
    "occlusion": {"window": 5},
    "rise": {"n_samples": 12, "grid_size": 3},
    "drise": {"n_samples": 10, "grid_size": 4},
    "segmentablation": {"segments": quarters},
    "sobol": {"n_samples": 3, "grid_size": 2},
    "hsic": {"n_samples": 10, "grid_size": 3},
    "extremalperturbation": {"n_steps": 2, "grid_size": 4, "areas": (0.2, 0.7)},
    "meaningfulperturbation": {"n_steps": 2, "grid_size": 5},
    "deepliftshap": {"background": ["zero", "mean"]},
    "lime": {"n_samples": 40, "grid_size": 2, "alpha": 0.0},  # as by hand: nothing pulls towards 0
    "kernelshap": {"n_samples": 40, "grid_size": 2},
    "lrp": {"epsilon": 0.0},
    "opticam": {"n_steps": 3},
    "smoothgradcam++": {"n_samples": 3},
}


@functools.cache
def looks_at_layers(method):
    """Whether a method looks at layers: those that do are told which."""
    return bool({"layer", "layers"} & set(inspect.signature(METHODS[method]).parameters))


def explainer(method, model, layer, **keywords):
    """The method for a model, at a layer if it looks at one, with few passes where it has many."""
    return METHODS[method](model, *([layer] if looks_at_layers(method) else []), **{**FEW.get(method, {}), **keywords})


class Tally(SimpleNamespace):
    """What is counted of a model, and of its copies: some methods run a copy, which has the same tally."""

    def __deepcopy__(self, memo):
        return self


class Counting(nn.Module):
    """Counts the forward passes through a model, and the backward passes through its output, and the rows of both."""

    def __init__(self, model):
        super().__init__()
        self.model, self.tally = model, Tally(forwards=0, rows=0, backwards=0, backward_rows=0)

    forwards = property(lambda self: self.tally.forwards)
    rows = property(lambda self: self.tally.rows)
    backwards = property(lambda self: self.tally.backwards)
    backward_rows = property(lambda self: self.tally.backward_rows)

    def forward(self, x):
        self.tally.forwards, self.tally.rows = self.tally.forwards + 1, self.tally.rows + len(x)
        output = self.model(x)
        if output.requires_grad:
            output.register_hook(self.note)
        return output

    def note(self, gradient):
        self.tally.backwards, self.tally.backward_rows = (
            self.tally.backwards + 1,
            self.tally.backward_rows + len(gradient),
        )


def seen_before(model, x):
    """The model, after what is seen of it once for each shape of input, so that a test counts the passes of a call alone."""
    samples_interact(model, x)
    weights = hash(frozenset(inspect_model(model).read_version_counter_by_parameter_id().items()))
    with torch.no_grad(), suppress(Exception):  # a test's model may fail, or have other scores
        for target in (lambda output: output.flatten(1)[:, 0], *range(model(x).shape[1])):
            score = Score(model, target)
            score(x)
            find_samples_with_constant_score(x, score, range(len(x)), weights)
    for part in model.modules():
        if isinstance(tally := getattr(part, "tally", None), Tally):
            vars(tally).update(dict.fromkeys(vars(tally), 0))
    return model


class Largest(TorchDispatchMode):
    """Inside the `with`: how many numbers the largest tensor has that any operation returns; views count as they look."""

    def __init__(self):
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.numbers = max([self.numbers, *(one.numel() for one in tree_leaves(result) if isinstance(one, Tensor))])
        return result
