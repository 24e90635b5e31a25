"""Features: what one pass shows of a layer for one score, and the way to ask the same question again."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from camscope.errors import LayerError
from camscope.explainers.chunks import Widths, copies_within_memory, in_chunks
from camscope.explainers.padding import Shares
from camscope.explainers.rest import Rest, Versions
from camscope.hooks.replay import Replay
from camscope.layers import Layout
from camscope.targets import Score

COARSE = 20  # steps of rounding


@dataclass(frozen=True)
class Features:
    """A layer's activation (N,K,*s), and the score's gradient there, of one pass of x (N,C,*S).

    `values` (N,): the score. `again(x)`: the features of another input at the same layer, for the same question.
    `curvature()` (N,K,*s): the score's Hessian there times the activation, for a method that is `second_order`.
    """

    layer: str
    activation: Tensor
    x: Tensor
    score: Score
    values: Tensor
    layout: Layout | None
    to_maps: Callable[[Tensor], Tensor]
    found: Tensor | None = None
    again: Callable[[Tensor], "Features"] = field(repr=False, kw_only=True)
    curvature: Callable[[], Tensor] = field(repr=False, kw_only=True)
    output: str | int | None = None
    call: int = 0
    batch_size: int | None = None
    widths: Widths = field(default_factory=Widths)
    replay: Replay | None = None
    shares: Shares | None = None
    notes: tuple[str, ...] = ()
    unverified: bool = False  # whether the layout could be neither verified nor contradicted
    remarks: list[list[str]] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "remarks", [[] for _ in self.x])

    @property
    def gradient(self) -> Tensor:
        """(N,K,*s): the score's gradient at the layer."""
        if self.found is None:
            raise LayerError(
                f"no gradient was taken at layer {self.layer!r}: the method must say needs_gradient = True"
            )
        return self.found

    def scores_of(self, count: int, versions: Callable[[slice], tuple[Tensor, Tensor]]) -> Tensor:
        """(count,): the scores of so many other inputs. `versions`: which of them -> inputs (R,C,*S), owners (R,).

        They are made and scored in pieces that fit into memory; row i is a version of sample owners[i].
        """
        return self._read_of(count, versions, self.score.read)

    def chances_of(self, count: int, versions: Callable[[slice], tuple[Tensor, Tensor]]) -> Tensor:
        """(count,): as `scores_of`, but the class's probability where there are several classes."""
        return self._read_of(count, versions, self.score.chance)

    def _read_of(
        self,
        count: int,
        versions: Callable[[slice], tuple[Tensor, Tensor]],
        read: Callable[[object, int, Tensor], Tensor],
    ) -> Tensor:
        self.score.expect_companions(self.x)

        def run(part: slice) -> Tensor:
            inputs, owners = versions(part)
            return read(self.score.forward(inputs, owners), len(inputs), owners).detach()

        return in_chunks(count, self._copies(self.widths.whole), run).to(self.values)

    def scores_with(self, count: int, versions: Versions) -> Tensor:
        """(count,): the scores of so many other activations at the layer; what comes before it runs once where it can.

        `versions`: which of them -> a function that changes activations (R,K,*s) in place, and the owners (R,). What is
        large is made in that function.
        """
        return self._rest.scores(count, versions, self.score.read)

    def chances_with(self, count: int, versions: Versions) -> Tensor:
        """(count,): as `scores_with`, but the class's probability where there are several classes."""
        return self._rest.scores(count, versions, self.score.chance)

    def losses_with(self, count: int, versions: Versions) -> Tensor:
        """(count,): how much of the score each of so many other activations loses, see `scores_with`."""
        return self._rest.losses(count, versions)

    def passed(self, change: Callable[[Tensor], object]) -> Any:
        """The model's output when `change` has worked on all samples' activations (N,K,*s) in place, in one pass."""
        return self._rest.at_once(change)

    def note(self, sample: int, text: str) -> None:
        """Add to what one sample's result says of how it came about."""
        self.remarks[sample].append(text)

    def note_rounding(self, what: str, changes: Tensor, scores: Tensor) -> None:
        """A note on each sample whose changes (N,M) are hardly more than the rounding of the scores (N,R) behind them."""
        rounding = torch.finfo(self.score.dtype).eps * scores.abs().amax(1)
        for sample in (changes.abs().amax(1) < COARSE * rounding).nonzero()[:, 0].tolist():
            self.note(sample, f"{what} by much more than its rounding in {self.score.dtype}")

    def _copies(self, width: int) -> int:
        if self.batch_size is not None:
            return self.batch_size
        return copies_within_memory(max(1, width // len(self.x)), self.x.device)

    @cached_property
    def _rest(self) -> Rest:
        return Rest(
            self.layer,
            self.x,
            self.score,
            self.values,
            self.to_maps,
            output=self.output,
            call=self.call,
            widths=self.widths,
            batch_size=self.batch_size,
            replay=self.replay or Replay(self.score.model, self.layer, self.call),
        )
