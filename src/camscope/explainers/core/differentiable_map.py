"""Compute a map with its graph, for a loss of the map. The model stays in its mode, and nothing is detached."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from camscope.errors import InputError
from camscope.explainers.core.base_method import BaseMethod
from camscope.explainers.core.evaluation_context import (
    ModelInfo,
    Precision,
    check_finite,
    check_input,
    check_no_inference_mode_weights,
    clone_inference_tensor,
    compiled_code_run_eagerly,
    evaluation_context,
    inspect_model,
)
from camscope.explainers.core.model_input import NO_EXTRA_INPUTS, ExtraInputs
from camscope.hooks.thread_local_hooks import reentrant_checkpoints_disabled
from camscope.pytree import map_leaves
from camscope.registry import METHODS
from camscope.targets import Score, TargetLike


def compute_map_with_graph(
    explainer: BaseMethod, x: Tensor, target: TargetLike, extra_inputs: ExtraInputs = NO_EXTRA_INPUTS
) -> Tensor:
    """Compute the map (N,*s) of an input (N,C,*S) with its graph, back to the input and all parameters.

    The forward pass is one of the caller's own: in train mode it updates the statistics of batch norm and draws the random
    numbers of dropout. Raise InputError, which names the method, if its map is not differentiable.
    """
    if not explainer.differentiable:
        names = ", ".join(sorted(name for name, method in METHODS.items() if method.differentiable))
        raise InputError(
            f"{explainer.composed_name} has no differentiable map",
            fix=f"use one of the methods with `differentiable = True`: {names}",
        )
    model_info = inspect_model(explainer.model)
    check_no_inference_mode_weights(model_info)
    inputs = check_input(x, model_info, explainer)
    target = explainer.resolve_target(target)
    with evaluation_context(model_info, explainer, inputs, extra_inputs) as context:
        prepared = explainer.with_layer_and_layout(context.x, partial(context.create_score, target))
    score = Score(
        model_info.model,
        target,
        args=map_leaves(extra_inputs.args, clone_inference_tensor),
        kwargs=map_leaves(dict(extra_inputs.kwargs), clone_inference_tensor),
        class_names=explainer.class_names,
        input_size=inputs.shape[2:],
        **explainer.forward_options,
    )
    with differentiable_scope(model_info, explainer.precision):
        attribution = prepared.compute_differentiable_map(inputs, score)
    check_finite(f"the map of {explainer.composed_name}", attribution, explainer.on_nonfinite)
    return attribution


@contextmanager
def differentiable_scope(model_info: ModelInfo, precision: Precision | None) -> Iterator[None]:
    """Switch gradients on inside the `with`, and use only operations that have a second derivative."""
    with ExitStack() as scope:
        scope.enter_context(torch.inference_mode(False))
        scope.enter_context(torch.enable_grad())
        scope.enter_context(reentrant_checkpoints_disabled())
        scope.enter_context(sdpa_kernel(SDPBackend.MATH))  # fused attention has no second derivative
        if precision == "bf16":
            for kind in {device.type for device in model_info.devices} or {"cpu"}:
                scope.enter_context(torch.autocast(kind, torch.bfloat16))
        if model_info.is_compiled:
            scope.enter_context(compiled_code_run_eagerly())
        yield
