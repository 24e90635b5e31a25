"""Candidates: methods at layers, of which one is to be chosen."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from camscope.errors import CamscopeError, InputError
from camscope.explainers import METHODS, Explainer
from camscope.explainers.comparison.grid_layout import accepts_layer_choice, accepts_several_layers, create_at_layers
from camscope.explainers.core.dispatch import run_methods
from camscope.explainers.core.evaluation_context import inference_scope, inspect_model
from camscope.layers.selection import choose_layer, find_spatial_layers
from camscope.targets import Score

DEFAULT_CANDIDATE_METHODS = ("gradcam", "gradcam++", "hirescam", "xgradcam", "layercam", "eigencam", "eigengradcam", "fullgrad", "saliency",
         "inputxgradient")  # fmt: skip
DEFAULT_N_STAGES = 3  # layers that a method is tried at


def build_candidates(
    model: nn.Module,
    x: Tensor,
    methods: Sequence[str] | None = None,
    layers: Sequence[str] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> list[Explainer]:
    """Every method at every layer; once where it has none to choose. `x` (1,C,*S): an input, by which layers are found.

    `methods`: default: ten of one pass. `layers`: default: the last of each of the last three sizes of grid. What has
    no answer for this model is left out; InputError where nothing is left.
    """
    places = list(layers) if layers is not None else find_stage_layers(model, x)
    made = []
    for name in DEFAULT_CANDIDATE_METHODS if methods is None else methods:
        kind = METHODS.find(name)
        chosen = places if accepts_layer_choice(kind) and not accepts_several_layers(kind) else None
        for tool in create_at_layers(kind, model, chosen, dict(settings or {})):
            try:
                run_methods([tool], x, [None])
            except CamscopeError:
                if methods is not None and layers is not None:
                    raise
            else:
                made.append(tool)
    if not made:
        raise InputError("none of the methods has an answer for this model at these layers")
    return made


def find_stage_layers(model: nn.Module, x: Tensor, n_stages: int = DEFAULT_N_STAGES) -> list[str]:
    """The last layer of each of the last sizes of grid; of a net of one size, as a transformer, blocks a third apart."""
    known = inspect_model(model)
    with inference_scope(known, "eval"):
        inner = known.model
        every = find_spatial_layers(inner, lambda: Score(inner).forward(x), x.shape)
        usual = choose_layer(inner, Score(inner).combined_class_score, x).name
    ends: dict[tuple[int, ...], str] = {}
    for layer in every[: 1 + max(i for i, layer in enumerate(every) if layer.name == usual)]:
        ends.pop(layer.layout.grid, None)
        ends[layer.layout.grid] = layer.name
    found = list(ends.values())[-n_stages:]
    if len(ends) > 1 and "." not in usual:
        names = [name.partition(".")[0] for name in found]  # the stage itself, where it is one, not its last part
        spatial = {layer.name for layer in every}
        found = [short if short in spatial else name for short, name in zip(names, found, strict=True)]
    before, *number = re.split(r"\d+", usual, maxsplit=1)  # blocks of a transformer differ in a number
    alike = [
        layer.name
        for layer in every
        if number and re.fullmatch(rf"{re.escape(before)}\d+{re.escape(number[0])}", layer.name)
    ]
    if len(ends) == 1 and len(alike) > n_stages:
        found = [alike[len(alike) * (n + 1) // n_stages - 1] for n in range(n_stages)]
    return list(dict.fromkeys([*found[:-1], usual]))
