"""Features: what one pass shows of a layer for one score, and the way to ask the same question again.

Detectors that pad what they are given: which part of their own plane the input is.
Rest: what the part of a model behind a layer makes of other activations there.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from camscope.errors import LayerError
from camscope.explainers.core.batching import Widths, copies_within_memory, in_chunks
from camscope.hooks.base import Hooks, here_only
from camscope.hooks.partial_forward import Replay, branched
from camscope.layers.layout import Layout
from camscope.targets import Score

Shares = tuple[float, ...]


@contextmanager
def padding_seen(model: nn.Module) -> Iterator[list[Shares]]:
    """Of the pass inside the `with`: the share of each axis that the input takes, where torchvision's detectors pad.

    They bring an image to a size of their own, and that to a multiple of 32, at the end of each axis.
    """
    found: list[Shares] = []

    def note(module: nn.Module, args: object, output: Any) -> None:
        images = output[0]
        sizes = zip(images.image_sizes[0], images.tensors.shape[2:], strict=True)
        shares = tuple(own / padded for own, padded in sizes)
        if min(shares) < 1:
            found.append(shares)

    with Hooks() as hooks:
        for module in model.modules():
            if type(module).__name__ == "GeneralizedRCNNTransform":
                hooks.hold(module.register_forward_hook(here_only(note)))
        yield found


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
