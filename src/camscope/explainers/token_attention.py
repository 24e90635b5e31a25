"""TokenAttention: what every method shares that follows a transformer's attention from token to token."""

from abc import abstractmethod
from collections.abc import Hashable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import KW_ONLY, dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from camscope.explainers.base import Explainer
from camscope.explainers.maps import Later, Maps, is_faint
from camscope.explainers.method import Method
from camscope.explainers.scope import checked_finite
from camscope.explainers.tokens import Tokens, between_tokens, is_unverified, lengths_seen, reached
from camscope.hooks.attention import Attentions
from camscope.hooks.blocks import Blocks
from camscope.layers import Layout, noting
from camscope.targets import Score
from camscope.wording import plural


@dataclass(eq=False, repr=False)
class TokenAttention(Explainer):
    """What the tokens that the score reads have taken from the patches, by attention. A method writes `relevance`.

    The tokens read are those at whose rows of the last attention the score's gradient is not zero: the class token, the
    class and the distillation token, or all of them where they are pooled. They count equally. `layout`: a Layout of
    tokens, where the grid is ambiguous.
    """

    _: KW_ONLY
    layout: str | Layout | None = None

    backwards: ClassVar[str] = "1"
    whole: ClassVar[bool] = False  # whether it needs the gradient at every block, and not at the last one only
    by_block: ClassVar[bool] = False  # whether it asks each block what it would answer by itself

    @property
    def takes_integers(self) -> bool:
        """What it follows begins behind the input."""
        return True

    @abstractmethod
    def relevance(self, tokens: Tokens) -> Tensor:
        """(N,T): of each token, as the method's formula has it."""

    def heat(self, x: Tensor, score: Score) -> Tensor:
        """(N,C,*S) -> (N,*grid): see `maps_of`."""
        return self.maps(x, [score])[0].heat

    def maps(self, x: Tensor, scores: Sequence[Score]) -> list[Maps]:
        """The maps of several scores from one forward pass."""
        return [one() if callable(one) else one for one in TokenAttention.maps_of([self], x, scores)[0]]

    @property
    def company(self) -> Hashable:
        """Methods share the forward pass."""
        return (TokenAttention, self.precision, str(self.layout), self.on_nonfinite)

    @staticmethod
    def maps_of(tools: Sequence[Method], x: Tensor, scores: Sequence[Score]) -> list[list[Maps | Later]]:
        """[method][score]: one forward pass, and of each score one backward pass for all methods that need the whole."""
        own = [tool for tool in tools if isinstance(tool, TokenAttention)]
        first, samples = own[0], len(x)
        with Attentions() as seen:
            blocks = Blocks(scores[0].model, seen.all)
            with ExitStack() as around:
                around.enter_context(blocks if any(tool.by_block for tool in own) else nullcontext())
                shown = noting(scores[0].model, around)
                lengths = lengths_seen(scores[0].model, around)
                output = seen.run(lambda: scores[0].forward(x))
            values = [score.read(output, samples) for score in scores]  # all are checked before any backward
            checked_finite("the score", torch.cat(values), first.on_nonfinite)
            every, layout, others = between_tokens(first.name, x, seen.all, shown, lengths, first.layout)
            plain: list[list[Maps]] = [[] for _ in own]
            for score, value in zip(scores, values, strict=True):
                found = reached(value, every, whole=any(tool.whole for tool in own))
                tokens = Tokens(x, score, layout, *found, blocks)
                for gradient in tokens.gradients:
                    checked_finite("the gradient at an attention", gradient, first.on_nonfinite)
                for t, tool in enumerate(own):
                    plain[t].append(tool._map(tokens, value, others))
        count = every[0].probabilities.shape[-1]
        if first.layout is None and is_unverified(first.name, scores[0], x, layout, count):
            plain = [[replace(one, unverified=True) for one in maps] for maps in plain]
        return [list(maps) for maps in plain]

    def _map(self, tokens: Tokens, values: Tensor, others: Sequence[str]) -> Maps:
        heat = tokens.layout.to_maps(self.relevance(tokens).detach()[..., None])[:, 0].clone()
        counts = (tokens.read > 0).sum(1).tolist()
        notes = (
            f"{plural(len(tokens.attentions), 'self-attention')} between {plural(tokens.read.shape[1], 'token')}",
            *others,
        )
        own = tuple((f"the score reads {count} of them",) for count in counts)
        faint = is_faint(tokens.score.precision, values, tokens.gradients[-1], tokens.probabilities[-1])
        return Maps(heat, None, tokens.layout, ~tokens.read.any(1), faint, notes, own)
