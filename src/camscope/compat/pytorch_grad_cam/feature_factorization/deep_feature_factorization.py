"""Deep Feature Factorization, with the random start of pytorch-grad-cam's factorization."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from camscope.compat.pytorch_grad_cam.base_cam import warn_once
from camscope.compat.pytorch_grad_cam.utils.image import (
    create_labels_legend,
    scale_accross_batch_and_channels,
    show_factorization_on_image,
)
from camscope.hooks import Tap
from camscope.optional_packages import require

Array = npt.NDArray[Any]
Reshape = Callable[[Any], Tensor]


class ConceptsAndMaps(NamedTuple):
    """Concepts (K,C), and their maps (N,C,h,w)."""

    concepts: Array
    maps: Array


def dff(activations: Array, n_components: int = 5) -> ConceptsAndMaps:
    """Factorize activations (N,K,h,w) into concepts and maps. The product of concepts and maps approximates the activations."""
    n_samples, n_channels, *grid = activations.shape
    values = np.where(np.isnan(activations), 0, activations).transpose(1, 0, 2, 3).reshape(n_channels, -1)
    offset = values.min(axis=-1, keepdims=True)
    factorization = require("sklearn.decomposition", extra="audit").NMF(n_components, init="random", random_state=0)
    concepts = factorization.fit_transform(values - offset) + offset
    maps = factorization.components_.reshape(n_components, n_samples, *grid).transpose(1, 0, 2, 3)
    return ConceptsAndMaps(concepts, maps)


class DeepFeatureFactorization:
    """Deep Feature Factorization of a layer. A computation, such as a classifier, may be applied to the concepts."""

    def __init__(
        self,
        model: nn.Module,
        target_layer: nn.Module,
        reshape_transform: Reshape | None = None,
        computation_on_concepts: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.model, self.target_layer, self.reshape_transform = model, target_layer, reshape_transform
        self.computation_on_concepts = computation_on_concepts

    def __call__(self, input_tensor: Tensor, n_components: int = 16) -> tuple[Any, ...]:
        """Return the concepts (K,C), and for each input its maps (C,H,W).

        With `computation_on_concepts`, return its result (C,...) as a third value.
        """
        warn_once(
            "dff",
            "as in pytorch-grad-cam, the smallest value of each channel is subtracted before the factorization, and each map is "
            "stretched; camscope.DeepFeatureFactorization(model, layer).factorize(images) keeps the amounts and the shares",
        )
        with Tap(self.model, self.target_layer, gradients=False) as tap:
            tap.run(lambda: self.model(input_tensor))
        output = tap.activation
        activation = output if self.reshape_transform is None else self.reshape_transform(output)
        concepts, maps = dff(activation.cpu().numpy(), n_components)
        explanations = list(scale_accross_batch_and_channels(maps, tuple(reversed(input_tensor.shape[2:]))))
        if self.computation_on_concepts is None:
            return concepts, explanations
        with torch.no_grad():
            vectors = torch.from_numpy(np.asarray(concepts.T, np.float32)).to(output.device)
            return concepts, explanations, self.computation_on_concepts(vectors).cpu().numpy()

    def __enter__(self) -> "DeepFeatureFactorization":
        return self

    def __exit__(self, *details: object) -> bool:
        """Return True for an IndexError, so that Python suppresses it. pytorch-grad-cam does the same."""
        return isinstance(details[1], IndexError)


def run_dff_on_image(
    model: nn.Module,
    target_layer: nn.Module,
    classifier: nn.Module,
    img_pil: Any,
    img_tensor: Tensor,
    reshape_transform: Reshape | None = None,
    n_components: int = 5,
    top_k: int = 2,
) -> Array:
    """Draw an image next to its concepts. The labels of a concept are the classifier's predictions for the concept.

    The label names are `model.config.id2label`, as in models of Hugging Face.
    """
    image = np.array(img_pil, dtype=np.float32) / 255
    factorization = DeepFeatureFactorization(model, target_layer, reshape_transform, classifier)
    _, explanations, scores = factorization(img_tensor[None], n_components)
    probabilities = torch.from_numpy(scores).softmax(-1).numpy()
    config: Any = model.config
    labels = create_labels_legend(probabilities, config.id2label, top_k)
    drawn = show_factorization_on_image(image, explanations[0], image_weight=0.3, concept_labels=labels)
    return np.hstack((np.array(img_pil), drawn))
