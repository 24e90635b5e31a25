"""Methods that take apart a score into what the whole network makes of it: the input, and every bias.

Shares: what a score is the sum of, the input's part and every bias's, as one forward and one backward pass show it.
"""

from abc import abstractmethod
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import torch
from torch import Tensor, nn

from camscope.explainers.bias_capture import Bias, BiasCapture, OutputLayouts
from camscope.explainers.core.base import Explainer, register
from camscope.explainers.core.base_method import AttributionMaps, is_below_precision
from camscope.explainers.core.evaluation_context import (
    OnNonFinite,
    check_differentiable,
    check_finite,
    evaluation_context,
    has_interacting_samples,
    inspect_model,
)
from camscope.explainers.core.resampling import resize_maps
from camscope.explainers.core.runner import select_sample_target
from camscope.hooks.gradients import GradientScope, run_with_gradients
from camscope.layers.selection import record_layout_hints
from camscope.targets import Score, TargetLike, full_precision


class DecompositionMethod(Protocol):
    """What must be known of a method that takes scores apart."""

    on_nonfinite: OnNonFinite
    includes_clipping: ClassVar[bool]

    def layer_term(self, gradient: Tensor, bias: Bias) -> Tensor:
        """What is mapped of the gradient at the output to which a bias was added."""


@dataclass(frozen=True)
class Completeness:
    """The parts that a score is the sum of, (N,) each, in units of the score.

    `input_part`: Σ x ∂f/∂x; `mapped_bias_part`: Σ b ∂f/∂z of the biases that have a place on the input;
    `unmapped_bias_part`: the same of the other biases.
    """

    score: Tensor
    input_part: Tensor
    mapped_bias_part: Tensor
    unmapped_bias_part: Tensor

    @property
    def gap(self) -> Tensor:
        """(N,): what neither accounts for: rounding in a piecewise linear model; smooth functions and bare constants."""
        return self.score - self.input_part - self.mapped_bias_part - self.unmapped_bias_part


@dataclass
class ScoreDecomposition:
    """What one score's backward pass has brought so far: sums over channels, by grid, and over everything."""

    x: Tensor
    score: Tensor
    explainer: DecompositionMethod
    precision: float
    layouts: OutputLayouts
    map_by_grid: dict[tuple[int, ...], Tensor] = field(default_factory=dict)
    unmapped_layers: dict[str, None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.is_below_precision, self.has_gradient = (torch.zeros_like(self.score, dtype=torch.bool) for _ in range(2))
        self.input_part, self.mapped_bias_part, self.unmapped_bias_part = (
            torch.zeros_like(self.score) for _ in range(3)
        )

    def add_input_gradient(self, gradient: Tensor) -> None:
        """Take in the gradient (N,C,*S) at the input."""
        check_finite("the gradient at the input", gradient, self.explainer.on_nonfinite)
        values = full_precision(gradient) * self.x
        self.is_below_precision = is_below_precision(self.precision, self.score, full_precision(gradient), self.x)
        self.input_part += values.flatten(1).sum(1)
        self._add_to_map(values, gradient)

    def add_bias_gradient(self, bias: Bias, gradient: Tensor) -> None:
        """Take in the gradient at the output to which a bias was added."""
        check_finite(f"the gradient at {bias.layer}", gradient, self.explainer.on_nonfinite)
        gradient = full_precision(gradient).movedim(bias.sample_axis, 0)
        values = self.explainer.layer_term(gradient, bias)
        maps = bias.to_maps(values, self.x, self.layouts)
        placed = 0 if maps is None else maps.flatten(1).sum(1)
        self.mapped_bias_part += placed
        if maps is None or maps.numel() < values.numel():
            self.unmapped_bias_part += self._sum_by_sample(values) - placed
            self.unmapped_layers[bias.layer if maps is None else "tokens without a cell"] = None
        if maps is not None:
            self._add_to_map(maps, gradient)

    def to_completeness(self) -> Completeness:
        """The sums over everything."""
        return Completeness(self.score, self.input_part, self.mapped_bias_part, self.unmapped_bias_part)

    def sum_maps(self) -> Tensor:
        """(N,*S)"""
        size = self.x.shape[2:]
        return torch.stack([resize_maps(maps, size) for maps in self.map_by_grid.values()]).sum(0)

    def _add_to_map(self, values: Tensor, gradient: Tensor) -> None:
        drawn, some = sum_scaled_magnitudes(values)
        if not bool(some.all()):  # a share may be zero where the gradient is not
            some = gradient.flatten(1).any(1)
        self.has_gradient |= some
        grid = tuple(drawn.shape[1:])
        self.map_by_grid[grid] = self.map_by_grid[grid] + drawn if grid in self.map_by_grid else drawn

    def _sum_by_sample(self, values: Tensor) -> Tensor:
        """(N,): rows that are not one a sample are taken to be several of each in turn, as windows and tiles are."""
        samples = len(self.x)
        if len(values) % samples:
            return self.score.new_zeros(samples)
        return values.reshape(samples, -1).sum(1)


def decompose_scores(x: Tensor, scores: Sequence[Score], explainer: DecompositionMethod) -> list[ScoreDecomposition]:
    """The shares of each score, from one forward pass; from a second one where the model cuts its input off.

    The second one lets the model turn gradients off nowhere.
    """
    return run_with_gradients(lambda staying: _decompose_in_one_pass(x, scores, explainer, staying))


def _decompose_in_one_pass(
    x: Tensor, scores: Sequence[Score], explainer: DecompositionMethod, staying: GradientScope
) -> list[ScoreDecomposition] | None:
    now: list[ScoreDecomposition] = []  # the score whose backward pass runs is the last one

    def arrived(bias: Bias, gradient: Tensor) -> None:
        now[-1].add_bias_gradient(bias, gradient)

    leaf = x.detach().requires_grad_()
    watch = BiasCapture(scores[0].model, arrived, include_clipping=explainer.includes_clipping)
    with staying, ExitStack() as scope:
        layout_hints = record_layout_hints(scores[0].model, scope)
        scope.enter_context(watch)
        # a clone, since a model that changes its input has an error of its own, and autograd's of a leaf comes before it
        output = scores[0].forward(leaf.clone())
    layouts = OutputLayouts(scores[0], leaf.detach(), layout_hints, watch.sample_axis_by_shape)
    torch.set_grad_enabled(True)  # for the scores, even where the model switches it off and never back on
    every = [score.read_score(output, len(x)) for score in scores]  # all questions are checked before any backward
    check_finite("the score", torch.cat(every), explainer.on_nonfinite)
    for i, values in enumerate(every):
        now.append(
            ScoreDecomposition(
                leaf.detach(), full_precision(values.detach()), explainer, scores[i].machine_epsilon, layouts
            )
        )
        if not values.requires_grad:
            return None
        more = i + 1 < len(every)
        gradients: Sequence[Tensor | None] = torch.autograd.grad(
            values.sum(), leaf, retain_graph=more, allow_unused=True
        )
        if gradients[0] is None:
            return None
        now[-1].add_input_gradient(gradients[0])
    return now


def sum_scaled_magnitudes(values: Tensor) -> tuple[Tensor, Tensor]:
    """(N,K,*s) -> (N,*s): Σ_k of |values| from 0 to 1, all channels together; (N,) bool: whether any is not zero.

    Constant ones are 0. The channels are summed first, which leaves less to stretch.
    """
    sizes = values.abs()
    flat, rows = sizes.flatten(1), (-1, *[1] * (values.ndim - 2))
    low, high = flat.amin(1).view(rows), flat.amax(1).view(rows)  # aminmax is slower than both
    sums = sizes.sum(1) - values.shape[1] * low
    return torch.where(high > low, sums / torch.where(high > low, high - low, 1), 0), high.flatten() > 0


class BaseFullGrad(Explainer):
    """|x ∘ gradient| and |a term of every layer with a bias|, each stretched, enlarged and summed. A method writes `layer_term`.

    Map = ψ(x ∘ ∂f/∂x) + Σ_layers ψ(term), over the channels of each; ψ: the absolute value, brought to 0..1, linearly
    enlarged to the input. Minimum and maximum are those of all channels of a layer together, as in the authors' code:
    channel by channel, as the paper's sum over channels may be read, a channel that adds nothing would count as much as
    one that adds all. Enlarged between cell centers (the authors: between corners), where a map's cells lie here. A
    layer without cells, such as a head, has no place in the map.
    """

    backward_passes: ClassVar[str] = "1"
    includes_clipping: ClassVar[bool] = False  # whether what an activation is clipped to counts as a bias

    @abstractmethod
    def layer_term(self, gradient: Tensor, bias: Bias) -> Tensor:
        """The gradient at a layer's output, and the bias that was added there -> what is mapped of them."""

    def attribution(self, x: Tensor, score: Score) -> Tensor:
        """(N,C,*S) -> (N,*S): see `compute_maps`."""
        return self.compute_maps(x, [score])[0].attribution

    def compute_maps(self, x: Tensor, scores: Sequence[Score]) -> list[AttributionMaps]:
        """The maps of several scores from one forward pass, one backward pass each; no layer's gradient is kept."""
        every = decompose_scores(x, scores, self)
        return [
            AttributionMaps(
                share.sum_maps(),
                zero_gradient=~share.has_gradient,
                constant_score=share.is_below_precision,
                sample_notes=self.describe_decomposition(share),
                layout_unverified=share.layouts.any_unverified,
            )
            for share in every
        ]

    def describe_decomposition(self, decomposition: ScoreDecomposition) -> tuple[tuple[str, ...], ...]:
        """What each sample's result says of itself."""
        return ()


@register
class FullGrad(BaseFullGrad):
    """The input's and every bias's share of the score: ψ(x ∘ ∂f/∂x) + Σ ψ(b ∘ ∂f/∂z) (Srinivas & Fleuret 2019).

    z: the output to which bias b is added. Unstretched, with their signs, and with the biases that have no place, the
    shares add up to the score of a piecewise linear model: see `completeness`; the result says how far they do. A batch
    norm with fixed statistics counts with the bias that it has as a linear layer, and a ReLU6 that is at its limit with
    that limit (the authors' code leaves the latter out, and refuses such a model).
    """

    name, title, paper = "fullgrad", "FullGrad", "arXiv:1905.00780"
    includes_clipping: ClassVar[bool] = True

    def layer_term(self, gradient: Tensor, bias: Bias) -> Tensor:
        """(N,K,*s): b ∘ ∂f/∂z"""
        return gradient * bias.values()

    def describe_decomposition(self, decomposition: ScoreDecomposition) -> tuple[tuple[str, ...], ...]:
        """The score as the sum of its parts."""
        parts, names = decomposition.to_completeness(), list(decomposition.unmapped_layers)
        rows = torch.stack(
            [parts.score, parts.input_part, parts.mapped_bias_part, parts.unmapped_bias_part, parts.gap], 1
        )
        where = ", ".join(names[:2] + ["…"] * (len(names) > 2)) or "none"
        return tuple(
            (
                f"the score, {score:.4g}, is {x:+.4g} of the input, {placed:+.4g} of biases in the map, {unplaced:+.4g} of "
                f"biases without a place ({where}), and {gap:+.2g} of neither",
            )
            for score, x, placed, unplaced, gap in rows.tolist()
        )


@register
class SimpleFullGrad(BaseFullGrad):
    """FullGrad with bare gradients in place of the biases' shares: ψ(x ∘ ∂f/∂x) + Σ ψ(∂f/∂z) (Srinivas & Fleuret 2019).

    From the paper's code, not its text; nothing adds up. The layers are FullGrad's: those with a bias.
    """

    name, title, paper = "simplefullgrad", "Simple FullGrad", "arXiv:1905.00780"

    def layer_term(self, gradient: Tensor, bias: Bias) -> Tensor:
        """(N,K,*s): ∂f/∂z"""
        return gradient


def completeness(model: nn.Module, x: Tensor, target: TargetLike = None) -> Completeness:
    """(N,C,*S) -> the parts (N,) of each sample's score, by FullGrad's full-gradient decomposition; `target`: see Score.

    Exact for models of convolutions, linear layers, batch norms in eval mode, ReLU-like activations and pooling.
    """
    explainer, model_info = FullGrad(model), inspect_model(model)
    check_differentiable(model_info)
    if has_interacting_samples(model_info, explainer, x):
        each = [completeness(model, x[i : i + 1], select_sample_target(target, i, len(x))) for i in range(len(x))]
        return Completeness(*(torch.cat(parts) for parts in zip(*(vars(part).values() for part in each), strict=True)))
    with evaluation_context(model_info, explainer, x) as context:
        return decompose_scores(context.x, [context.create_score(target)], explainer)[0].to_completeness()
