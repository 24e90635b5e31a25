"""Methods that take apart a score into what the whole network makes of it: the input, and every bias."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from camscope.explainers.base import Explainer, register
from camscope.explainers.biases import Bias
from camscope.explainers.maps import Maps
from camscope.explainers.run import question_at
from camscope.explainers.scope import asking, expect_differentiable, interacting, survey
from camscope.explainers.shares import Completeness, Shares, taken_apart
from camscope.targets import Question, Score


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
