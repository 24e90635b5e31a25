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

from camscope.explainers.bias_capture import Bias, Layouts, Watch
from camscope.explainers.core.base import Explainer, register
from camscope.explainers.core.dispatch import question_at
from camscope.explainers.core.evaluation_context import (
    OnNonFinite,
    asking,
    checked_finite,
    expect_differentiable,
    interacting,
    survey,
)
from camscope.explainers.core.maps import Maps, is_faint
from camscope.explainers.core.resampling import on_grid
from camscope.hooks.gradients import Staying, with_gradients
from camscope.layers.selection import noting
from camscope.targets import Question, Score, full_precision


class Parting(Protocol):
    """What must be known of a method that takes scores apart."""

    on_nonfinite: OnNonFinite
    limits: ClassVar[bool]

    def term(self, gradient: Tensor, bias: Bias) -> Tensor:
        """What is mapped of the gradient at the output to which a bias was added."""


@dataclass(frozen=True)
class Completeness:
    """(N,) each, in units of the score: what a score is the sum of.

    `input`: Σ x ∂f/∂x; `placed`, `unplaced`: Σ b ∂f/∂z of the biases that have a place on the input, and of the others.
    """

    score: Tensor
    input: Tensor
    placed: Tensor
    unplaced: Tensor

    @property
    def gap(self) -> Tensor:
        """(N,): what neither accounts for: rounding in a piecewise linear model; smooth functions and bare constants."""
        return self.score - self.input - self.placed - self.unplaced


@dataclass
class Shares:
    """What one score's backward pass has brought so far: sums over channels, by grid, and over everything."""

    x: Tensor
    score: Tensor
    method: Parting
    precision: float
    layouts: Layouts
    grids: dict[tuple[int, ...], Tensor] = field(default_factory=dict)
    without_place: dict[str, None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.faint, self.reached = (torch.zeros_like(self.score, dtype=torch.bool) for _ in range(2))
        self.input, self.placed, self.unplaced = (torch.zeros_like(self.score) for _ in range(3))

    def add_input(self, gradient: Tensor) -> None:
        """Take in the gradient (N,C,*S) at the input."""
        checked_finite("the gradient at the input", gradient, self.method.on_nonfinite)
        values = full_precision(gradient) * self.x
        self.faint = is_faint(self.precision, self.score, full_precision(gradient), self.x)
        self.input += values.flatten(1).sum(1)
        self._draw(values, gradient)

    def add(self, bias: Bias, gradient: Tensor) -> None:
        """Take in the gradient at the output to which a bias was added."""
        checked_finite(f"the gradient at {bias.layer}", gradient, self.method.on_nonfinite)
        gradient = full_precision(gradient).movedim(bias.samples, 0)
        values = self.method.term(gradient, bias)
        maps = bias.maps(values, self.x, self.layouts)
        placed = 0 if maps is None else maps.flatten(1).sum(1)
        self.placed += placed
        if maps is None or maps.numel() < values.numel():
            self.unplaced += self._by_sample(values) - placed
            self.without_place[bias.layer if maps is None else "tokens without a cell"] = None
        if maps is not None:
            self._draw(maps, gradient)

    def completeness(self) -> Completeness:
        """The sums over everything."""
        return Completeness(self.score, self.input, self.placed, self.unplaced)

    def map(self) -> Tensor:
        """(N,*S)"""
        size = self.x.shape[2:]
        return torch.stack([on_grid(maps, size) for maps in self.grids.values()]).sum(0)

    def _draw(self, values: Tensor, gradient: Tensor) -> None:
        drawn, some = sum_of_stretched(values)
        if not bool(some.all()):  # a share may be zero where the gradient is not
            some = gradient.flatten(1).any(1)
        self.reached |= some
        grid = tuple(drawn.shape[1:])
        self.grids[grid] = self.grids[grid] + drawn if grid in self.grids else drawn

    def _by_sample(self, values: Tensor) -> Tensor:
        """(N,): rows that are not one a sample are taken to be several of each in turn, as windows and tiles are."""
        samples = len(self.x)
        if len(values) % samples:
            return self.score.new_zeros(samples)
        return values.reshape(samples, -1).sum(1)


def taken_apart(x: Tensor, scores: Sequence[Score], method: Parting) -> list[Shares]:
    """The shares of each score, from one forward pass; from a second one where the model cuts its input off.

    The second one lets the model turn gradients off nowhere.
    """
    return with_gradients(lambda staying: _one_pass(x, scores, method, staying))


def _one_pass(x: Tensor, scores: Sequence[Score], method: Parting, staying: Staying) -> list[Shares] | None:
    now: list[Shares] = []  # the score whose backward pass runs is the last one

    def arrived(bias: Bias, gradient: Tensor) -> None:
        now[-1].add(bias, gradient)

    leaf = x.detach().requires_grad_()
    watch = Watch(scores[0].model, arrived, limits=method.limits)
    with staying, ExitStack() as scope:
        seen = noting(scores[0].model, scope)
        scope.enter_context(watch)
        # a clone, since a model that changes its input has an error of its own, and autograd's of a leaf comes before it
        output = scores[0].forward(leaf.clone())
    layouts = Layouts(scores[0], leaf.detach(), seen, watch.shapes)
    torch.set_grad_enabled(True)  # for the scores, even where the model switches it off and never back on
    every = [score.read(output, len(x)) for score in scores]  # all questions are checked before any backward
    checked_finite("the score", torch.cat(every), method.on_nonfinite)
    for i, values in enumerate(every):
        now.append(Shares(leaf.detach(), full_precision(values.detach()), method, scores[i].precision, layouts))
        if not values.requires_grad:
            return None
        more = i + 1 < len(every)
        found: Sequence[Tensor | None] = torch.autograd.grad(values.sum(), leaf, retain_graph=more, allow_unused=True)
        if found[0] is None:
            return None
        now[-1].add_input(found[0])
    return now


def sum_of_stretched(values: Tensor) -> tuple[Tensor, Tensor]:
    """(N,K,*s) -> (N,*s): Σ_k of |values| from 0 to 1, all channels together; (N,) bool: whether any is not zero.

    Constant ones are 0. The channels are summed first, which leaves less to stretch.
    """
    sizes = values.abs()
    flat, rows = sizes.flatten(1), (-1, *[1] * (values.ndim - 2))
    low, high = flat.amin(1).view(rows), flat.amax(1).view(rows)  # aminmax is slower than both
    sums = sizes.sum(1) - values.shape[1] * low
    return torch.where(high > low, sums / torch.where(high > low, high - low, 1), 0), high.flatten() > 0


class WholeNetwork(Explainer):
    """|x ∘ gradient| and |a term of every layer with a bias|, each stretched, enlarged and summed. A method writes `term`.

    Map = ψ(x ∘ ∂f/∂x) + Σ_layers ψ(term), over the channels of each; ψ: the absolute value, brought to 0..1, linearly
    enlarged to the input. Minimum and maximum are those of all channels of a layer together, as in the authors' code:
    channel by channel, as the paper's sum over channels may be read, a channel that adds nothing would count as much as
    one that adds all. Enlarged between cell centres (the authors: between corners), where a map's cells lie here. A
    layer without cells, such as a head, has no place in the map.
    """

    backwards: ClassVar[str] = "1"
    limits: ClassVar[bool] = False  # whether what an activation is clipped to counts as a bias

    @abstractmethod
    def term(self, gradient: Tensor, bias: Bias) -> Tensor:
        """The gradient at a layer's output, and the bias that was added there -> what is mapped of them."""

    def heat(self, x: Tensor, score: Score) -> Tensor:
        """(N,C,*S) -> (N,*S): see `maps`."""
        return self.maps(x, [score])[0].heat

    def maps(self, x: Tensor, scores: Sequence[Score]) -> list[Maps]:
        """The maps of several scores from one forward pass, one backward pass each; no layer's gradient is kept."""
        every = taken_apart(x, scores, self)
        return [
            Maps(
                share.map(),
                zero_gradient=~share.reached,
                constant_score=share.faint,
                own=self.said(share),
                unverified=share.layouts.unverified,
            )
            for share in every
        ]

    def said(self, shares: Shares) -> tuple[tuple[str, ...], ...]:
        """What each sample's result says of itself."""
        return ()


@register
class FullGrad(WholeNetwork):
    """The input's and every bias's share of the score: ψ(x ∘ ∂f/∂x) + Σ ψ(b ∘ ∂f/∂z) (Srinivas & Fleuret 2019).

    z: the output to which bias b is added. Unstretched, with their signs, and with the biases that have no place, the
    shares add up to the score of a piecewise linear model: see `completeness`; the result says how far they do. A batch
    norm with fixed statistics counts with the bias that it has as a linear layer, and a ReLU6 that is at its limit with
    that limit (the authors' code leaves the latter out, and refuses such a model).
    """

    name, paper = "fullgrad", "arXiv:1905.00780"
    limits: ClassVar[bool] = True

    def term(self, gradient: Tensor, bias: Bias) -> Tensor:
        """(N,K,*s): b ∘ ∂f/∂z"""
        return gradient * bias.values()

    def said(self, shares: Shares) -> tuple[tuple[str, ...], ...]:
        """The score as the sum of its parts."""
        parts, names = shares.completeness(), list(shares.without_place)
        rows = torch.stack([parts.score, parts.input, parts.placed, parts.unplaced, parts.gap], 1)
        where = ", ".join(names[:2] + ["…"] * (len(names) > 2)) or "none"
        return tuple(
            (
                f"the score, {score:.4g}, is {x:+.4g} of the input, {placed:+.4g} of biases in the map, {unplaced:+.4g} of "
                f"biases without a place ({where}), and {gap:+.2g} of neither",
            )
            for score, x, placed, unplaced, gap in rows.tolist()
        )


@register
class SimpleFullGrad(WholeNetwork):
    """FullGrad with bare gradients in place of the biases' shares: ψ(x ∘ ∂f/∂x) + Σ ψ(∂f/∂z) (Srinivas & Fleuret 2019).

    From the paper's code, not its text; nothing adds up. The layers are FullGrad's: those with a bias.
    """

    name, paper = "simplefullgrad", "arXiv:1905.00780"

    def term(self, gradient: Tensor, bias: Bias) -> Tensor:
        """(N,K,*s): ∂f/∂z"""
        return gradient


def completeness(model: nn.Module, x: Tensor, target: Question = None) -> Completeness:
    """(N,C,*S) -> the parts (N,) of each sample's score, by FullGrad's full-gradient decomposition; `target`: see Score.

    Exact for models of convolutions, linear layers, batch norms in eval mode, ReLU-like activations and pooling.
    """
    tool, known = FullGrad(model), survey(model)
    expect_differentiable(known)
    if interacting(known, tool, x):
        each = [completeness(model, x[i : i + 1], question_at(target, i, len(x))) for i in range(len(x))]
        return Completeness(*(torch.cat(parts) for parts in zip(*(vars(one).values() for one in each), strict=True)))
    with asking(known, tool, x) as asked:
        return taken_apart(asked.x, [asked.score(target)], tool)[0].completeness()
