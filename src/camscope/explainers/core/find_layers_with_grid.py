"""Find the layers of a model where maps can be computed, by a forward pass of noise."""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from camscope.errors import CamscopeError
from camscope.explainers.core.evaluation_context import get_device_and_dtype, inference_scope, inspect_model
from camscope.explainers.core.model_input import infer_spatial_rank
from camscope.layers.choose_layer import choose_layer
from camscope.layers.spatial_layers import find_spatial_layers
from camscope.loaded_model_metadata_and_weight_digest import get_loaded_model_metadata
from camscope.targets import Score

SIDE_BY_RANK = {1: 1024, 2: 224, 3: 64}  # of an input, if the model names no preprocessing


class LayersWithGrid(NamedTuple):
    """The names of all layers with a spatial grid, and of the default layer or None. A note says why there is no default."""

    names: set[str]
    default_name: str | None
    notes: tuple[str, ...] = ()


def find_layers_with_grid(model: nn.Module, x: Tensor) -> LayersWithGrid:
    """Find all layers with a spatial grid. Also find which of them is the default layer.

    Args:
        model: The model.
        x: An input (1,C,*S), such as that of `build_noise_input`.

    Returns:
        The names of these layers, and of the default layer.

    >>> from camscope import load_model
    >>> model = load_model("phantom")
    >>> find_layers_with_grid(model, build_noise_input(model)).default_name
    'layer4'

    """
    model_info, metadata = inspect_model(model), get_loaded_model_metadata(model)
    inner = model_info.model
    with inference_scope(model_info, "eval"):
        names = {layer.name for layer in find_spatial_layers(inner, lambda: Score(inner).forward(x), x)}
        if metadata is not None and metadata.layer:
            return LayersWithGrid(names, metadata.layer)
        try:
            return LayersWithGrid(names, choose_layer(inner, Score(inner).compute_fixed_mix_of_class_scores, x).name)
        except CamscopeError as error:  # a model without class scores has no default layer
            return LayersWithGrid(names, None, (f"no default layer: {error}",))


def infer_input_shape(model: nn.Module) -> tuple[int, ...]:
    """Return the shape (C,*S) that the model's preprocessing returns, or a common size for the model's first convolution."""
    metadata = get_loaded_model_metadata(model)
    if metadata is not None and metadata.preprocess is not None:
        photo = torch.full((256, 256, 3), 128, dtype=torch.uint8, device="cpu").numpy()
        return tuple(metadata.preprocess(photo)[0].shape)
    inner = inspect_model(model).model
    rank = infer_spatial_rank(inner)
    convolutions = (m for m in inner.modules() if isinstance(m, _ConvNd) and len(m.kernel_size) == rank)
    n_channels = next((convolution.in_channels for convolution in convolutions), 3)
    return (n_channels, *[SIDE_BY_RANK[rank]] * rank)


def build_noise_input(model: nn.Module, shape: tuple[int, ...] | None = None) -> Tensor:
    """Return noise (1,C,*S) with the dtype of the model. Default shape: that of `infer_input_shape`."""
    shape = infer_input_shape(model) if shape is None else shape
    generator = torch.Generator(device="cpu").manual_seed(0)
    noise = torch.randn((1, *shape), generator=generator, dtype=torch.float32, device="cpu")
    return noise.to(*get_device_and_dtype(inspect_model(model).model))
