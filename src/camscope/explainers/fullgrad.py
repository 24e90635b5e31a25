"""FullGrad and Simple FullGrad: decompose a score into contributions of the input and of every bias."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from camscope.explainers.bias_capture import Bias, BiasCapture, infer_output_layouts, is_any_map_unverified
from camscope.explainers.core.base_explainer import Explainer, register
from camscope.explainers.core.evaluation_context import (
    check_finite,
    check_no_inference_mode_weights,
    evaluation_context,
    has_interacting_samples,
    inspect_model,
)
from camscope.explainers.core.maps_with_flags import AttributionMaps, find_samples_below_precision
from camscope.explainers.core.resize_and_blur import resize_maps
from camscope.explainers.core.run_methods_in_shared_passes import select_sample_target
from camscope.hooks.find_layers import unwrap
from camscope.hooks.input_gradients import GradientScope, run_with_gradients
from camscope.hooks.spatial_map_tracker import SpatialMapTracker
from camscope.layers.layout import Layout
from camscope.layers.spatial_layers import record_layout_hints
from camscope.targets import Score, TargetLike, full_precision


@dataclass(frozen=True)
class Completeness:
    """The parts of a score, each (N,) in units of the score.

    `input_part` is Σ x ∂f/∂x. `mapped_bias_part` is Σ b ∂f/∂z over the biases whose outputs have a grid on the input.
    `unmapped_bias_part` is the sum over all other biases.
    """

    score: Tensor
    input_part: Tensor
    mapped_bias_part: Tensor
    unmapped_bias_part: Tensor

    @property
    def gap(self) -> Tensor:
        """The part (N,) of the score that the decomposition does not explain. For a piecewise linear model it is only rounding.

        In other models, it also contains smooth functions and constants.
        """
        return self.score - self.input_part - self.mapped_bias_part - self.unmapped_bias_part


@dataclass
class ScoreDecomposition:
    """Running sums during the backward pass of one score: a map for each grid, and the parts (N,) of the score."""

    x: Tensor
    score: Tensor
    explainer: "BaseFullGrad"
    precision: float
    layouts: Mapping[tuple[int, ...], Layout]
    layout_unverified: bool
    map_by_grid: dict[tuple[int, ...], Tensor] = field(default_factory=dict)
    unmapped_layers: dict[str, None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.is_below_precision, self.has_gradient = (torch.zeros_like(self.score, dtype=torch.bool) for _ in range(2))
        self.input_part, self.mapped_bias_part, self.unmapped_bias_part = (
            torch.zeros_like(self.score) for _ in range(3)
        )

    def add_input_gradient(self, gradient: Tensor) -> None:
        """Add the contribution of the input: the input times its gradient (N,C,*S)."""
        check_finite("the gradient at the input", gradient, self.explainer.on_nonfinite)
        values = full_precision(gradient) * self.x
        self.is_below_precision = find_samples_below_precision(
            self.precision, self.score, full_precision(gradient), self.x
        )
        self.input_part += values.flatten(1).sum(1)
        self._add_to_map(values, gradient)

    def add_bias_gradient(self, bias: Bias, gradient: Tensor) -> None:
        """Add the contribution of a bias. `gradient` is the gradient at the output to which the bias is added."""
        check_finite(f"the gradient at {bias.layer}", gradient, self.explainer.on_nonfinite)
        gradient = full_precision(gradient).movedim(bias.sample_axis, 0)
        values = self.explainer.compute_bias_term(gradient, bias)
        maps = bias.to_maps(values, self.x, self.layouts)
        placed = 0 if maps is None else maps.flatten(1).sum(1)
        self.mapped_bias_part += placed
        if maps is None or maps.numel() < values.numel():
            self.unmapped_bias_part += self._sum_by_sample(values) - placed
            self.unmapped_layers[bias.layer if maps is None else "tokens without a cell"] = None
        if maps is not None:
            self._add_to_map(maps, gradient)

    def to_completeness(self) -> Completeness:
        """Return the parts of the score as a `Completeness`."""
        return Completeness(self.score, self.input_part, self.mapped_bias_part, self.unmapped_bias_part)

    def sum_maps(self) -> Tensor:
        """Resize the maps of all grids to the input, and return their sum (N,*S)."""
        size = self.x.shape[2:]
        return torch.stack([resize_maps(maps, size) for maps in self.map_by_grid.values()]).sum(0)

    def _add_to_map(self, values: Tensor, gradient: Tensor) -> None:
        """Add the scaled magnitudes of a contribution to the map of its grid."""
        maps, is_nonzero = sum_scaled_magnitudes(values)
        if not bool(is_nonzero.all()):  # a contribution may be zero where the gradient is not
            is_nonzero = gradient.flatten(1).any(1)
        self.has_gradient |= is_nonzero
        grid = tuple(maps.shape[1:])
        self.map_by_grid[grid] = self.map_by_grid[grid] + maps if grid in self.map_by_grid else maps

    def _sum_by_sample(self, values: Tensor) -> Tensor:
        """Sum the values of all rows that belong to one sample (N,). Such rows, like tiles, must be consecutive."""
        n_samples = len(self.x)
        if len(values) % n_samples:
            return self.score.new_zeros(n_samples)
        return values.reshape(n_samples, -1).sum(1)


def decompose_scores(x: Tensor, scores: Sequence[Score], explainer: "BaseFullGrad") -> list[ScoreDecomposition]:
    """Decompose each score into a contribution of the input and contributions of the biases.

    There is one forward pass. If the model turns gradients off, there is a second one.
    """
    return run_with_gradients(lambda gradients_on: _decompose_in_one_pass(x, scores, explainer, gradients_on))


def _decompose_in_one_pass(
    x: Tensor, scores: Sequence[Score], explainer: "BaseFullGrad", gradients_on: GradientScope
) -> list[ScoreDecomposition] | None:
    """Decompose all scores after one common forward pass. Return None if a score has no gradient at the input."""
    decompositions: list[ScoreDecomposition] = []  # the last one is of the score whose backward pass runs
    leaf, model = x.detach().requires_grad_(), scores[0].model
    tracker = SpatialMapTracker(unwrap(model), leaf)
    capture = BiasCapture(
        model,
        lambda bias, gradient: decompositions[-1].add_bias_gradient(bias, gradient),
        include_clipping=explainer.includes_clipping,
        tracker=tracker,
    )
    with gradients_on, ExitStack() as scope:
        layout_hints = record_layout_hints(model, scope)
        scope.enter_context(tracker)
        scope.enter_context(capture)
        # a clone, so that a model that changes its input raises our error instead of autograd's error about a leaf
        output = scores[0].forward(leaf.clone())
    layouts, unverified = infer_output_layouts(scores[0], leaf.detach(), layout_hints, capture.sample_axis_by_shape)
    unverified = unverified or is_any_map_unverified(scores[0], leaf.detach(), capture)
    torch.set_grad_enabled(True)  # for the scores, even if the model switches gradients off and never back on
    all_values = [score.read_score(output, len(x)) for score in scores]  # checks all targets before any backward pass
    check_finite("the score", torch.cat(all_values), explainer.on_nonfinite)
    for i, (score, values) in enumerate(zip(scores, all_values, strict=True)):
        score_values = full_precision(values.detach())
        decomposition = ScoreDecomposition(
            leaf.detach(), score_values, explainer, score.machine_epsilon, layouts, unverified
        )
        decompositions.append(decomposition)
        if not values.requires_grad:
            return None
        is_last = i + 1 == len(scores)
        gradients: Sequence[Tensor | None] = torch.autograd.grad(
            values.sum(), leaf, retain_graph=not is_last, allow_unused=True
        )
        if gradients[0] is None:
            return None
        decomposition.add_input_gradient(gradients[0])
    return decompositions


class ScaledSums(NamedTuple):
    """Sums (N,*s) of scaled absolute values over the channels, and whether any value of a sample is nonzero (N,)."""

    sums: Tensor
    is_nonzero: Tensor


def sum_scaled_magnitudes(values: Tensor) -> ScaledSums:
    """Scale the absolute values (N,K,*s) of each sample to 0..1. Return their sum over the channels."""
    magnitudes = values.abs()
    flat, rows = magnitudes.flatten(1), (-1, *[1] * (values.ndim - 2))
    low, high = flat.amin(1).view(rows), flat.amax(1).view(rows)  # aminmax is slower than both
    sums = magnitudes.sum(1) - values.shape[1] * low  # sums first, so that fewer values are scaled
    scaled = torch.where(high > low, sums / torch.where(high > low, high - low, 1), 0)
    return ScaledSums(scaled, high.flatten() > 0)


class BaseFullGrad(Explainer):
    """Base class of maps ψ(x ∘ ∂f/∂x) + Σ_layers ψ(term), summed over channels. A subclass implements `compute_bias_term`.

    ψ: the absolute value, scaled to 0..1 and linearly enlarged to the input. The scaling is over all channels of a layer
    together, as in the authors' code. The paper may be read as channel by channel, but then a channel without any
    contribution would count as much as the strongest. Maps are enlarged between cell centers (the authors': between
    corners). A layer without cells, such as a head, has no place in the map.
    """

    backward_passes: ClassVar[str] = "1"
    includes_clipping: ClassVar[bool] = False  # whether what an activation is clipped to counts as a bias

    @abstractmethod
    def compute_bias_term(self, gradient: Tensor, bias: Bias) -> Tensor:
        """Compute the term (N,K,*s) of a bias. `gradient` is the gradient at the output to which the bias is added."""

    def attribution(self, x: Tensor, score: Score) -> Tensor:
        """Return the map (N,*S) of an input (N,C,*S)."""
        return self.compute_maps(x, [score])[0].attribution

    def compute_maps(self, x: Tensor, scores: Sequence[Score]) -> list[AttributionMaps]:
        """Return the maps of several scores. There is one forward pass for all, and one backward pass for each score."""
        return [
            AttributionMaps(
                decomposition.sum_maps(),
                zero_gradient=~decomposition.has_gradient,
                constant_score=decomposition.is_below_precision,
                sample_notes=self.describe_decomposition(decomposition),
                layout_unverified=decomposition.layout_unverified,
            )
            for decomposition in decompose_scores(x, scores, self)
        ]

    def describe_decomposition(self, decomposition: ScoreDecomposition) -> tuple[tuple[str, ...], ...]:
        """Return notes about the decomposition, one tuple for each sample. By default there is no note."""
        return ()


@register
class FullGrad(BaseFullGrad):
    """The contributions of the input and of every bias: ψ(x ∘ ∂f/∂x) + Σ ψ(b ∘ ∂f/∂z) (Srinivas & Fleuret 2019).

    z: the output to which bias b is added. Before ψ, and with the biases that have no place, the contributions add up to the
    score of a piecewise linear model; a note states the gap, and `completeness` returns the parts. A batch norm with
    fixed statistics has the bias of the equivalent linear layer, and a ReLU6 at its limit has that limit as its bias
    (the authors' code rejects models with ReLU6).

    Use it for one map of the whole network, without choosing a layer.

    >>> explanation = FullGrad(model).explain(image, "nodule")
    >>> explanation.grid, explanation.layer
    ((128, 128), None)
    """

    name, title, paper = "fullgrad", "FullGrad", "arXiv:1905.00780"
    includes_clipping: ClassVar[bool] = True

    def compute_bias_term(self, gradient: Tensor, bias: Bias) -> Tensor:
        """Return the bias times the gradient: b ∘ ∂f/∂z (N,K,*s)."""
        return gradient * bias.values()

    def describe_decomposition(self, decomposition: ScoreDecomposition) -> tuple[tuple[str, ...], ...]:
        """Return one note per sample that describes the parts of its score."""
        parts, names = decomposition.to_completeness(), list(decomposition.unmapped_layers)
        rows = torch.stack([*vars(parts).values(), parts.gap], 1)
        where = ", ".join(names[:2] + ["…"] * (len(names) > 2)) or "none"
        return tuple(
            (
                f"the score, {score:.4g}, is {x:+.4g} of the input, {placed:+.4g} of biases in the map, {unplaced:+.4g} of "
                f"biases outside the map ({where}), and {gap:+.2g} unexplained",
            )
            for score, x, placed, unplaced, gap in rows.tolist()
        )


@register
class SimpleFullGrad(BaseFullGrad):
    """FullGrad with gradients in place of the biases' contributions: ψ(x ∘ ∂f/∂x) + Σ ψ(∂f/∂z) (Srinivas & Fleuret 2019).

    The method is in the authors' code, not in the paper, and has no completeness. The layers are those with a bias.

    Use it as FullGrad, for models whose biases are small.

    >>> SimpleFullGrad(model).explain(image, "nodule").grid
    (128, 128)
    """

    name, title, paper = "simplefullgrad", "Simple FullGrad", "arXiv:1905.00780"

    def compute_bias_term(self, gradient: Tensor, bias: Bias) -> Tensor:
        """Return the gradient alone: ∂f/∂z (N,K,*s)."""
        return gradient


def completeness(model: nn.Module, x: Tensor, target: TargetLike = None) -> Completeness:
    """Decompose the score of each sample by full gradients, and report how much of the score is explained.

    Exact for models of convolutions, linear layers, batch norms in eval mode, ReLU-like activations and pooling.

    Args:
        model: The model.
        x: Its input (N,C,*S).
        target: See `Score`.

    Returns:
        The parts (N,) of the scores.

    >>> import torch
    >>> model = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(144, 2))
    >>> parts = completeness(model, torch.rand(2, 1, 8, 8), 1)
    >>> total = parts.input_part + parts.mapped_bias_part + parts.unmapped_bias_part
    >>> torch.allclose(total, parts.score, atol=1e-4)
    True

    """
    explainer, model_info = FullGrad(model), inspect_model(model)
    check_no_inference_mode_weights(model_info)
    if has_interacting_samples(model_info, explainer, x):
        each = [completeness(model, x[i : i + 1], select_sample_target(target, i, len(x))) for i in range(len(x))]
        return Completeness(*(torch.cat(parts) for parts in zip(*(vars(part).values() for part in each), strict=True)))
    with evaluation_context(model_info, explainer, x) as context:
        return decompose_scores(context.x, [context.create_score(target)], explainer)[0].to_completeness()
