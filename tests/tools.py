"""An explainer of any method by name."""

import inspect

from camscope.explainers import METHODS


def looks_at_layers(method):
    """Whether a method looks at layers: those that do are told which."""
    return bool({"layer", "layers"} & set(inspect.signature(METHODS[method]).parameters))


def explainer(method, model, layer, **keywords):
    """The method for a model, at a layer if it looks at one."""
    return METHODS[method](model, *([layer] if looks_at_layers(method) else []), **keywords)
