"""An explainer of any method by name, and a model that counts its passes."""

import inspect

from torch import nn

from camscope.explainers import METHODS


def looks_at_layers(method):
    """Whether a method looks at layers: those that do are told which."""
    return bool({"layer", "layers"} & set(inspect.signature(METHODS[method]).parameters))


def explainer(method, model, layer, **keywords):
    """The method for a model, at a layer if it looks at one."""
    return METHODS[method](model, *([layer] if looks_at_layers(method) else []), **keywords)


class Counting(nn.Module):
    """Counts the forward passes through a model, their rows, and the backward passes through its output."""

    def __init__(self, model):
        super().__init__()
        self.model, self.forwards, self.rows, self.backwards = model, 0, 0, 0

    def forward(self, x):
        self.forwards, self.rows = self.forwards + 1, self.rows + len(x)
        output = self.model(x)
        if output.requires_grad:
            output.register_hook(self.note)
        return output

    def note(self, gradient):
        self.backwards += 1
