"""Methods that take a layer's activation apart. A: (N,K,cells), a matrix of cells x K for each sample.

A singular vector has no sign of its own. Where no class is asked for, the map is positive towards the cells where the layer
is most active: its inner product with Σ_k A_k² is not negative.
"""

from math import prod
from typing import ClassVar

import torch
from torch import Tensor

from camscope.errors import InputError
from camscope.explainers.cam.base import SPACE, LayerExplainer
from camscope.explainers.cam.layer_features import Features
from camscope.explainers.core.base import register
from camscope.explainers.core.batching import copies_within_memory, in_chunks
from camscope.explainers.core.evaluation_context import expect_number, expect_one_of, expect_positive
from camscope.explainers.core.linalg import component_towards, first_component, nearest, top_axes
from camscope.layers.selection import spatial_layers
from camscope.plurals import plural

KERNELS = ("sigmoid", "rbf", "linear", "cosine")
ROUNDING = 1e-12  # of float64 sums, relative
MOST_CELLS = 2**13  # a grid of 90 x 90: a kernel of them takes half a gigabyte
KERNEL_BYTES = 8  # of each number


@register
class EigenCAM(LayerExplainer):
    """Each cell's projection on the first right singular vector of A, whatever the class (Muhammad & Yeasin 2020).

    Not centred, as in the paper: then no cell of a layer after a ReLU is negative (Perron-Frobenius), while a centred map
    has a mean of 0 and either sign. Signed activations have the sign of the module's rule.
    """

    name, paper = "eigencam", "arXiv:2008.00299"
    class_specific: ClassVar[bool] = False

    def combine(self, features: Features) -> Tensor:
        """(N,*s), signed"""
        activation = features.activation.flatten(2)
        return component_towards(activation, activation.double().square().sum(1)).view(_grid(features))


@register
class EigenGradCAM(LayerExplainer):
    """Eigen-CAM of gradient x activation: the first component of what HiResCAM adds up (Gildenblat et al. 2021).

    Not centred, signed as the sum over the channels is, so that what is positive speaks for the class. It has no paper of
    its own: the idea is that of the `grad-cam` package, the decomposition Eigen-CAM's.
    """

    name, paper, backwards = "eigengradcam", "arXiv:2008.00299", "1"
    needs_gradient = True

    def combine(self, features: Features) -> Tensor:
        """(N,*s), signed"""
        return first_component((features.gradient * features.activation).flatten(2)).view(_grid(features))


@register
class KPCACAM(LayerExplainer):
    """Each cell's score on the first kernel principal component of A's cells (Karmani et al. 2024).

    The cells are centred first, then the kernel: "sigmoid" tanh(γ x·y + 1), "rbf" exp(-γ |x - y|²), "linear" x·y, or
    "cosine". `gamma`: γ; None: 1 / K. The sign is that of the module's rule: a centred map has no other. A layer whose
    cells are all the same has no component: zeros. Each cell is compared with each, of 8192 at most.
    """

    name, paper = "kpcacam", "arXiv:2410.00267"
    class_specific: ClassVar[bool] = False
    kernel: str = "sigmoid"
    gamma: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        expect_one_of("kernel", self.kernel, *KERNELS)
        expect_positive(None, gamma=self.gamma)

    def combine(self, features: Features) -> Tensor:
        """(N,*s), signed"""
        activation = features.activation.flatten(2)
        cells = activation.shape[2]
        if cells > MOST_CELLS:
            raise InputError(
                f"layer {features.layer!r} has {plural(cells, 'cell')}, and kpcacam compares each with each, of "
                f"{MOST_CELLS} at most: "
                f"choose a coarser layer{_coarser(features)}"
            )
        at_once = copies_within_memory(KERNEL_BYTES * cells**2, activation.device)
        heat = in_chunks(len(activation), at_once, lambda part: self._components(activation[part]))
        return heat.view(_grid(features))

    def _components(self, channels: Tensor) -> Tensor:
        """(N,K,cells) -> (N,cells)"""
        activation = channels.double()
        finite = activation.isfinite().flatten(1).all(1)[:, None]
        activation = torch.where(finite[..., None], activation, 0)
        kernel = self._kernel((activation - activation.mean(SPACE, keepdim=True)).mT)
        middle = kernel.mean(1, keepdim=True)
        centred = kernel - middle - middle.mT + middle.mean(2, keepdim=True)
        spread = centred.abs().amax((1, 2), keepdim=True) > ROUNDING * kernel.abs().amax((1, 2), keepdim=True)
        axes = top_axes(torch.where(spread, centred, 0), channels.dtype)
        heat = nearest(axes, activation.square().sum(1), channels.dtype)
        return torch.where(finite, heat, torch.nan).to(channels.dtype)

    def _kernel(self, cells: Tensor) -> Tensor:
        """(N,cells,K) -> (N,cells,cells)"""
        gamma = 1 / cells.shape[2] if self.gamma is None else self.gamma
        if self.kernel == "cosine":
            length = cells.norm(dim=2, keepdim=True)
            cells = torch.where(length > 0, cells / length, 0)
        products = cells @ cells.mT
        if self.kernel == "sigmoid":
            return (gamma * products + 1).tanh()
        if self.kernel == "rbf":
            squares = products.diagonal(dim1=1, dim2=2)
            return (-gamma * (squares[:, :, None] + squares[:, None] - 2 * products).clamp(min=0)).exp()
        return products


@register
class FEM(LayerExplainer):
    """Each channel marks its rare, strong cells: Σ_k μ_k [A_k > μ_k + k σ_k] (Fuad et al. 2020, the k-sigma rule).

    μ, σ: mean and standard deviation over the channel's cells. Strictly beyond, so that a constant channel marks none, and
    with k = 2 nothing is marked among five cells or fewer. Signed where a mean is: made for layers after a ReLU. `k`: how
    many standard deviations.
    """

    name, paper = "fem", "doi:10.1109/IPTA50016.2020.9286629"
    class_specific: ClassVar[bool] = False
    k: float = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        expect_number(k=self.k, low=0)

    def combine(self, features: Features) -> Tensor:
        """(N,*s)"""
        activation = features.activation.flatten(2).double()
        mean = activation.mean(SPACE, keepdim=True)
        least = self.k * activation.std(SPACE, correction=0, keepdim=True)
        beyond = activation - mean - least > ROUNDING * (mean.abs() + least)
        return (mean * beyond).sum(1).to(features.activation.dtype).view(_grid(features))


def _grid(features: Features) -> tuple[int, ...]:
    return (len(features.activation), *features.activation.shape[2:])


def _coarser(features: Features) -> str:
    """The last layer of the finest grid that is not too fine, in words."""
    layers = spatial_layers(features.score.model, lambda: features.score.forward(features.x), features.x.shape)
    fit = [layer for layer in reversed(layers) if prod(layer.layout.grid) <= MOST_CELLS]
    return f", such as {max(fit, key=lambda layer: prod(layer.layout.grid)).name!r}" if fit else ""
