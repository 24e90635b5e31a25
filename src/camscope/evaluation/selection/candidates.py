"""Candidates of a selection: methods at layers."""

import re
from collections.abc import Sequence

from torch import Tensor, nn

from camscope.errors import CamscopeError, InputError
from camscope.explainers import METHODS, Explainer
from camscope.explainers.comparison.grid_layout import accepts_layer_choice, accepts_several_layers, create_at_layers
from camscope.explainers.core.evaluation_context import inference_scope, inspect_model
from camscope.explainers.core.runner import run_methods
from camscope.layers.selection import choose_layer, find_spatial_layers
from camscope.targets import Score

DEFAULT_CANDIDATE_METHODS = (
    "gradcam", "gradcam++", "hirescam", "xgradcam", "layercam",
    "eigencam", "eigengradcam", "fullgrad", "saliency", "inputxgradient",
)  # fmt: skip
N_STAGES = 3  # layers at which a method is tried


def build_candidates(
    model: nn.Module,
    x: Tensor,
    methods: Sequence[str] | None = None,
    layers: Sequence[str] | None = None,
) -> list[Explainer]:
    """Return the explainers that work: every method at every layer, or once for a method without a choice of layer.

    `x` (1,C,*S) is an input, by which layers are found. By default these are ten methods with one forward pass at the last
    layer of each of the last three resolutions. InputError if no method works, or if a name is unknown.
    """
    layer_names = list(layers) if layers is not None else find_stage_layers(model, x)
    candidates = []
    for name in DEFAULT_CANDIDATE_METHODS if methods is None else methods:
        explainer_cls = METHODS.find(name)
        takes_one_layer = accepts_layer_choice(explainer_cls) and not accepts_several_layers(explainer_cls)
        chosen = layer_names if takes_one_layer else None
        for explainer in create_at_layers(explainer_cls, model, chosen, {}):
            try:
                run_methods([explainer], x, [None])
            except CamscopeError:
                if methods is not None and layers is not None:
                    raise
            else:
                candidates.append(explainer)
    if not candidates:
        raise InputError("none of the methods works for this model at these layers")
    return candidates


def find_stage_layers(model: nn.Module, x: Tensor) -> list[str]:
    """Return the last layer at each of the last resolutions; for a transformer, blocks a third of its depth apart."""
    model_info = inspect_model(model)
    with inference_scope(model_info, "eval"):
        inner = model_info.model
        spatial_layers = find_spatial_layers(inner, lambda: Score(inner).forward(x), x.shape)
        default = choose_layer(inner, Score(inner).combined_class_score, x).name
    ends: dict[tuple[int, ...], str] = {}
    for layer in spatial_layers[: 1 + max(i for i, layer in enumerate(spatial_layers) if layer.name == default)]:
        ends.pop(layer.layout.grid, None)
        ends[layer.layout.grid] = layer.name
    stage_layers = list(ends.values())[-N_STAGES:]
    if len(ends) > 1 and "." not in default:
        stages = {layer.name for layer in spatial_layers if "." not in layer.name}  # instead of their last parts
        stage_layers = [name.partition(".")[0] if name.partition(".")[0] in stages else name for name in stage_layers]
    before, *after = re.split(r"\d+", default, maxsplit=1)  # the names of a transformer's blocks differ in a number
    pattern = rf"{re.escape(before)}\d+{re.escape(after[0])}" if after else "(?!)"  # (?!): no name
    blocks = [layer.name for layer in spatial_layers if re.fullmatch(pattern, layer.name)]
    if len(ends) == 1 and len(blocks) > N_STAGES:
        stage_layers = [blocks[len(blocks) * (n + 1) // N_STAGES - 1] for n in range(N_STAGES)]
    return list(dict.fromkeys([*stage_layers[:-1], default]))
