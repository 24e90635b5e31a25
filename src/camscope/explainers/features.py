"""Features: what one pass shows of a layer for one score, and the way to ask the same question again."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from camscope.errors import LayerError
from camscope.explainers.chunks import Widths, copies_within_memory, in_chunks
from camscope.hooks.branch import branched
from camscope.layers import Layout
from camscope.targets import Score

SAME = {torch.float16: 2e-2, torch.bfloat16: 5e-2, torch.float32: 1e-4, torch.float64: 1e-9}


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
    notes: tuple[str, ...] = ()

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
        def run(part: slice) -> Tensor:
            inputs, owners = versions(part)
            return read(self.score.forward(inputs, owners), len(inputs), owners).detach()

        return in_chunks(count, self._copies(self.widths.whole), run).to(self.values)

    def scores_with(self, count: int, versions: Callable[[slice], tuple[Callable[[Tensor], object], Tensor]]) -> Tensor:
        """(count,): the scores of so many other activations at the layer; what comes before it sees each piece once.

        `versions`: which of them -> a function that changes activations (R,K,*s) in place, and the owners (R,).
        """

        def run(part: slice) -> Tensor:
            change, owners = versions(part)
            return self._rest(change, owners) if self._grows else self._whole(change, owners)

        return in_chunks(count, self._copies(self.widths.rest if self._grows else self.widths.whole), run).to(
            self.values
        )

    def _copies(self, width: int) -> int:
        if self.batch_size is not None:
            return self.batch_size
        return copies_within_memory(max(1, width // len(self.x)), self.x.device)

    @cached_property
    def _grows(self) -> bool:
        """Whether the rest of the model takes more rows than the part before, and keeps them apart.

        Each sample must keep its score beside a second one whose activation is zero.
        """
        samples = len(self.x)
        twice = torch.arange(samples, device=self.x.device).repeat(2)
        try:
            values = self._rest(lambda rows: rows[samples:].zero_(), twice)[:samples]
        except (RuntimeError, ValueError, IndexError):  # a shape that does not fit is an error of any of these kinds
            return False
        allowed = SAME.get(self.values.dtype, 1e-4) * (1 + float(self.values.abs().max()))
        return bool(((values - self.values).abs() <= allowed).all())

    def _rest(self, change: Callable[[Tensor], object], owners: Tensor) -> Tensor:
        with branched(self.score.model, self.layer, owners, self._changing(change), output=self.output, call=self.call):
            output = self.score.forward(self.x)
        return self.score.read(output, len(owners), owners).detach()

    def _whole(self, change: Callable[[Tensor], object], owners: Tensor) -> Tensor:
        every = torch.arange(len(owners), device=owners.device)
        with branched(self.score.model, self.layer, every, self._changing(change), output=self.output, call=self.call):
            return self.score(self.x.index_select(0, owners), owners).detach()

    def _changing(self, change: Callable[[Tensor], object]) -> Callable[[Tensor], Tensor]:
        def changed(rows: Tensor) -> Tensor:
            maps = self.to_maps(rows)
            if maps.untyped_storage().data_ptr() != rows.untyped_storage().data_ptr():
                raise LayerError(
                    f"reshape= copies the output of layer {self.layer!r}, so what is changed there would not reach the "
                    f"model; return a view of it (permute, unflatten, slices), or pass layout="
                )
            change(maps)
            return rows

        return changed
