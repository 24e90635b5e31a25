"""Rest: what the part of a model behind a layer makes of other activations there."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

from camscope.errors import LayerError
from camscope.explainers.chunks import Widths, copies_within_memory, in_chunks
from camscope.hooks.branch import branched
from camscope.hooks.replay import Replay
from camscope.targets import Score

SAME = {torch.float16: 2e-2, torch.bfloat16: 5e-2, torch.float32: 1e-4, torch.float64: 1e-9}

Change = Callable[[Tensor], object]
# asked of all rows at once too, for their owners: what is large is made in the change
Versions = Callable[[slice], tuple[Change, Tensor]]


class Read(Protocol):
    """The number of each row in an output of the model: `Score.read`, or another reading of it."""

    def __call__(self, output: object, samples: int, owners: Tensor | None = None) -> Tensor:
        """(R,)"""


@dataclass(frozen=True)
class Rest:
    """The model behind call number `call` of a layer, for inputs x (N,C,*S) whose scores are `values` (N,).

    Of four ways to put altered activations through it, the first that keeps samples apart is taken:

    - together: all rows grow out of one pass of x;
    - apart: each sample's rows grow out of a pass of its own, since something of N rows goes round the layer;
    - whole: every row is a pass of the whole model, since it counts its rows before the layer;
    - batch: one altered sample at a time among the others as they are, since the model mixes its samples.
    """

    layer: str
    x: Tensor
    score: Score
    values: Tensor
    to_maps: Callable[[Tensor], Tensor]
    output: str | int | None
    call: int
    widths: Widths
    batch_size: int | None
    replay: Replay

    def scores(self, count: int, versions: Versions, read: Read) -> Tensor:
        """(count,): what is read of so many versions; see `Features.scores_with`."""
        return self._in_pieces(self._way, count, versions, partial(self._pass, self._way, read))

    def at_once(self, change: Change) -> Any:
        """The output of one pass in which all samples' activations are changed."""
        with self.replay if self._replays else nullcontext():
            return self._output(self.x, None, self._samples, change)

    @cached_property
    def _samples(self) -> Tensor:
        return torch.arange(len(self.x), device=self.x.device)

    @cached_property
    def _replays(self) -> bool:
        """Whether a pass that is handed what an earlier one left gives the scores: modules may hand on more than outputs."""
        if not self.replay.remembers:
            return True
        try:
            with self.replay:
                scores = self._forward(self.x, None, self._samples, _as_they_are, self.score.read, None)
        except Exception:  # the model's own will be raised again without a replay
            return False
        return self._are_clean(scores)

    def losses(self, count: int, versions: Versions) -> Tensor:
        """(count,): clean score minus altered one, both of one pass, so that what rounding does to all rows cancels."""

        def beside_clean(change: Change, owners: Tensor) -> Tensor:
            if self._way == "batch":
                return self.values[owners] - self._pass("batch", self.score.read, change, owners)
            present, place = owners.unique(return_inverse=True)
            rows = torch.cat([owners, present])
            scores = self._pass(self._way, self.score.read, lambda maps: change(maps[: len(owners)]), rows)
            return scores[len(owners) :][place] - scores[: len(owners)]

        return self._in_pieces(self._way, count, versions, beside_clean)

    @cached_property
    def _way(self) -> str:
        return next((way for way in ("together", "apart", "whole") if self._works(way)), "batch")

    def _works(self, way: str) -> bool:
        """A way that keeps samples apart; where its later passes are replayed, one of those must do so too."""
        known = self.replay.remembers
        seen_all = known or way != "together"
        return self._keeps_apart(way) and (seen_all or not self.replay.remembers or self._keeps_apart(way))

    def _keeps_apart(self, way: str) -> bool:
        """Whether each sample keeps its score between rows whose activation is zero; they are of an odd number.

        Whatever the model raises, it is not the way: if the error is the model's own, the last way will raise it again.
        """
        samples = len(self.x)
        places = torch.arange(2 * samples + 1, device=self.x.device)
        every = (places // 2).clamp(max=samples - 1)

        def every_other_blank(part: slice) -> tuple[Change, Tensor]:
            blank = (places[part] % 2 == 0).nonzero()[:, 0]
            return lambda maps: maps.index_fill_(0, blank, 0), every[part]

        try:
            scores = self._in_pieces(way, len(places), every_other_blank, partial(self._pass, way, self.score.read))
        except Exception:
            return False
        return self._are_clean(scores[1::2])

    def _are_clean(self, scores: Tensor) -> bool:
        """Whether the scores (N,) are those of the clean pass, but for rounding."""
        allowed = SAME.get(self.score.dtype, 1e-4) * (1 + float(self.values.abs().max()))
        return bool(((scores.to(self.values) - self.values).abs() <= allowed).all())

    def _in_pieces(self, way: str, count: int, versions: Versions, run: Callable[[Change, Tensor], Tensor]) -> Tensor:
        """(count,): run(change, owners) of pieces as large as memory allows, and as the way can take."""
        if count == 0:  # of a layer without a live channel
            return self.values.new_zeros(0)
        width = self.widths.whole if way == "whole" else self.widths.rest
        size = self.batch_size or copies_within_memory(max(1, width // len(self.x)), self.x.device)
        owners = versions(slice(0, count))[1]
        last = {"apart": owners.diff().nonzero()[:, 0], "batch": torch.arange(count - 1, device="cpu")}.get(
            way, owners[:0]
        ).tolist()

        def piece(start: int, part: slice) -> Tensor:
            return run(*versions(slice(part.start + start, part.stop + start)))

        bounds = pairwise([0, *(place + 1 for place in last), count])
        return torch.cat([in_chunks(stop - start, size, partial(piece, start)) for start, stop in bounds]).to(
            self.values
        )

    def _pass(self, way: str, read: Read, change: Change, owners: Tensor) -> Tensor:
        """(R,): what is read of the rows after one forward pass."""
        rows = torch.arange(len(owners), device=owners.device)
        if way == "together":
            with self.replay:
                return self._forward(self.x, None, owners, change, read, owners)
        if way == "apart":
            return self._forward(self.x.index_select(0, owners[:1]), owners[:1], rows * 0, change, read, owners)
        if way == "whole":
            return self._forward(self.x.index_select(0, owners), owners, rows, change, read, owners)
        own = int(owners)
        return self._forward(self.x, None, self._samples, lambda maps: change(maps[own : own + 1]), read, None)[
            own, None
        ]

    def _forward(
        self, x: Tensor, asked: Tensor | None, rows: Tensor, change: Change, read: Read, owners: Tensor | None
    ) -> Tensor:
        """One pass of x, versions of the samples `asked`, whose layer hands on `rows` of its own, changed."""
        return read(self._output(x, asked, rows, change), len(rows), owners).detach()

    def _output(self, x: Tensor, asked: Tensor | None, rows: Tensor, change: Change) -> Any:
        with branched(
            self.score.model, self.layer, rows, partial(self._changed, change), output=self.output, call=self.call
        ):
            return self.score.forward(x, asked)

    def _changed(self, change: Change, rows: Tensor) -> Tensor:
        maps = self.to_maps(rows)
        if maps.untyped_storage().data_ptr() != rows.untyped_storage().data_ptr():
            raise LayerError(
                f"reshape= copies the output of layer {self.layer!r}, so what is changed there would not reach the model; "
                f"return a view of it (permute, unflatten, slices), or pass layout="
            )
        change(maps)
        return rows


def _as_they_are(maps: Tensor) -> None:
    """Change nothing."""
