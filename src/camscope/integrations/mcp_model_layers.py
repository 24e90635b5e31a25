"""Find the layers of a model where maps can be computed, by one forward pass of noise."""

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from camscope.errors import CamscopeError
from camscope.explainers.core.evaluation_context import get_device_and_dtype, inference_scope, inspect_model
from camscope.explainers.core.model_input import infer_spatial_rank
from camscope.hooks import LayerRow, inspect_layers
from camscope.layers.choose_layer import choose_layer
from camscope.layers.spatial_layers import find_spatial_layers
from camscope.loaded_model_metadata_and_weight_digest import get_loaded_model_metadata
from camscope.targets import Score

SIDE_BY_RANK = {1: 1024, 2: 224, 3: 64}  # of an input, if the model names no preprocessing


def find_layers_with_grid(model: nn.Module) -> tuple[list[LayerRow], str | None, list[str]]:
    """Return the layers with a spatial grid, the name of the default layer or None, and notes.

    Args:
        model: The model.

    Returns:
        The rows of these layers, the name of the default layer, and sentences about what could not be determined.

    >>> from camscope import load_model
    >>> find_layers_with_grid(load_model("phantom"))[1] is not None
    True

    """
    x = build_noise_input(model)
    model_info, metadata = inspect_model(model), get_loaded_model_metadata(model)
    inner = model_info.model
    default, notes = None, list[str]()
    with inference_scope(model_info, "eval"):
        names = {layer.name for layer in find_spatial_layers(inner, lambda: Score(inner).forward(x), x)}
        try:
            has_layer = metadata is not None and metadata.layer
            default = (
                metadata.layer
                if metadata is not None and has_layer
                else choose_layer(inner, Score(inner).compute_fixed_mix_of_class_scores, x).name
            )
        except CamscopeError as error:  # a model without class scores has no default layer
            notes.append(f"no default layer: {error}")
    return [row for row in inspect_layers(model, x) if row.name in names], default, notes


def build_noise_input(model: nn.Module) -> Tensor:
    """Return noise (1,C,*S) of the size that the model's preprocessing returns, or of a common size."""
    inner, metadata = inspect_model(model).model, get_loaded_model_metadata(model)
    if metadata is not None and metadata.preprocess is not None:
        shape = tuple(metadata.preprocess(np.full((256, 256, 3), 128, np.uint8))[0].shape)
    else:
        rank = infer_spatial_rank(inner)
        convolutions = (m for m in inner.modules() if isinstance(m, _ConvNd) and len(m.kernel_size) == rank)
        n_channels = next((convolution.in_channels for convolution in convolutions), 3)
        shape = (n_channels, *[SIDE_BY_RANK[rank]] * rank)
    generator = torch.Generator(device="cpu").manual_seed(0)
    noise = torch.randn((1, *shape), generator=generator, dtype=torch.float32, device="cpu")
    return noise.to(*get_device_and_dtype(inner))
