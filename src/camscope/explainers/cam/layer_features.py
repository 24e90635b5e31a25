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
from camscope.explainers.core.batching import ActivationBytes, count_copies_in_memory, map_chunks
from camscope.hooks.base import Hooks, thread_local_hook
from camscope.hooks.partial_forward import PrefixCache, branch_layer_output
from camscope.layers.layout import Layout
from camscope.targets import Score

InputShares = tuple[float, ...]


@contextmanager
def record_input_shares(model: nn.Module) -> Iterator[list[InputShares]]:
    """Of the pass inside the `with`: the share of each axis that the input takes, where torchvision's detectors pad.

    They bring an image to a size of their own, and that to a multiple of 32, at the end of each axis.
    """
    recorded: list[InputShares] = []

    def note(module: nn.Module, args: object, output: Any) -> None:
        images = output[0]
        sizes = zip(images.image_sizes[0], images.tensors.shape[2:], strict=True)
        shares = tuple(unpadded / padded for unpadded, padded in sizes)
        if min(shares) < 1:
            recorded.append(shares)

    with Hooks() as hooks:
        for module in model.modules():
            if type(module).__name__ == "GeneralizedRCNNTransform":
                hooks.add_handle(module.register_forward_hook(thread_local_hook(note)))
        yield recorded


SCORE_TOLERANCE_BY_DTYPE = {torch.float16: 2e-2, torch.bfloat16: 5e-2, torch.float32: 1e-4, torch.float64: 1e-9}

ActivationEdit = Callable[[Tensor], object]
# asked of all rows at once too, for their owners: what is large is made in the change
ActivationVariants = Callable[[slice], tuple[ActivationEdit, Tensor]]


class ScoreReader(Protocol):
    """The number of each row in an output of the model: `Score.read`, or another reading of it."""

    def __call__(self, output: object, n_rows: int, sample_index: Tensor | None = None) -> Tensor:
        """(R,)"""


@dataclass(frozen=True)
class PartialForward:
    """The model behind call number `call_index` of a layer, for inputs x (N,C,*S) whose scores are `clean_scores` (N,).

    Of four ways to put altered activations through it, the first that keeps samples apart is taken:

    - together: all rows grow out of one pass of x;
    - apart: each sample's rows grow out of a pass of its own, since something of N rows goes round the layer;
    - whole: every row is a pass of the whole model, since it counts its rows before the layer;
    - batch: one altered sample at a time among the others as they are, since the model mixes its samples.
    """

    layer: str
    x: Tensor
    score: Score
    clean_scores: Tensor
    to_maps: Callable[[Tensor], Tensor]
    output_index: str | int | None
    call_index: int
    activation_bytes: ActivationBytes
    batch_size: int | None
    replay: PrefixCache

    def score_variants(self, count: int, variants: ActivationVariants, read_output: ScoreReader) -> Tensor:
        """(count,): what is read of so many versions; see `LayerFeatures.score_inputs`."""
        return self._run_in_chunks(
            self._strategy, count, variants, partial(self._score_rows, self._strategy, read_output)
        )

    def run_with_edit(self, edit: ActivationEdit) -> Any:
        """The output of one pass in which all samples' activations are changed."""
        with self.replay if self._can_replay else nullcontext():
            return self._run_edited_model(self.x, None, self._sample_indices, edit)

    @cached_property
    def _sample_indices(self) -> Tensor:
        return torch.arange(len(self.x), device=self.x.device)

    @cached_property
    def _can_replay(self) -> bool:
        """Whether a pass that is handed what an earlier one left gives the scores: modules may hand on more than outputs."""
        if not self.replay.has_cached_outputs:
            return True
        try:
            with self.replay:
                scores = self._run_and_read(
                    self.x, None, self._sample_indices, _leave_unchanged, self.score.read_score, None
                )
        except Exception:  # the model's own will be raised again without a replay
            return False
        return self._match_clean_scores(scores)

    def compute_score_losses(self, count: int, variants: ActivationVariants) -> Tensor:
        """(count,): clean score minus altered one, both of one pass, so that what rounding does to all rows cancels."""

        def beside_clean(change: ActivationEdit, owners: Tensor) -> Tensor:
            if self._strategy == "batch":
                return self.clean_scores[owners] - self._score_rows("batch", self.score.read_score, change, owners)
            present, place = owners.unique(return_inverse=True)
            rows = torch.cat([owners, present])
            scores = self._score_rows(
                self._strategy, self.score.read_score, lambda maps: change(maps[: len(owners)]), rows
            )
            return scores[len(owners) :][place] - scores[: len(owners)]

        return self._run_in_chunks(self._strategy, count, variants, beside_clean)

    @cached_property
    def _strategy(self) -> str:
        return next(
            (strategy for strategy in ("together", "apart", "whole") if self._is_usable_strategy(strategy)), "batch"
        )

    def _is_usable_strategy(self, strategy: str) -> bool:
        """A way that keeps samples apart; where its later passes are replayed, one of those must do so too."""
        has_cache = self.replay.has_cached_outputs
        seen_all = has_cache or strategy != "together"
        return self._keeps_samples_apart(strategy) and (
            seen_all or not self.replay.has_cached_outputs or self._keeps_samples_apart(strategy)
        )

    def _keeps_samples_apart(self, strategy: str) -> bool:
        """Whether each sample keeps its score between rows whose activation is zero; they are of an odd number.

        Whatever the model raises, it is not the way: if the error is the model's own, the last way will raise it again.
        """
        samples = len(self.x)
        places = torch.arange(2 * samples + 1, device=self.x.device)
        every = (places // 2).clamp(max=samples - 1)

        def every_other_blank(part: slice) -> tuple[ActivationEdit, Tensor]:
            blank = (places[part] % 2 == 0).nonzero()[:, 0]
            return lambda maps: maps.index_fill_(0, blank, 0), every[part]

        try:
            scores = self._run_in_chunks(
                strategy, len(places), every_other_blank, partial(self._score_rows, strategy, self.score.read_score)
            )
        except Exception:
            return False
        return self._match_clean_scores(scores[1::2])

    def _match_clean_scores(self, scores: Tensor) -> bool:
        """Whether the scores (N,) are those of the clean pass, but for rounding."""
        allowed = SCORE_TOLERANCE_BY_DTYPE.get(self.score.dtype, 1e-4) * (1 + float(self.clean_scores.abs().max()))
        return bool(((scores.to(self.clean_scores) - self.clean_scores).abs() <= allowed).all())

    def _run_in_chunks(
        self,
        strategy: str,
        count: int,
        variants: ActivationVariants,
        run_chunk: Callable[[ActivationEdit, Tensor], Tensor],
    ) -> Tensor:
        """(count,): run(change, owners) of pieces as large as memory allows, and as the way can take."""
        if count == 0:  # of a layer without a live channel
            return self.clean_scores.new_zeros(0)
        width = (
            self.activation_bytes.largest_in_model
            if strategy == "whole"
            else self.activation_bytes.largest_behind_layer
        )
        size = self.batch_size or count_copies_in_memory(max(1, width // len(self.x)), self.x.device)
        sample_rows = variants(slice(0, count))[1]
        last = {"apart": sample_rows.diff().nonzero()[:, 0], "batch": torch.arange(count - 1, device="cpu")}.get(
            strategy, sample_rows[:0]
        ).tolist()

        def piece(start: int, part: slice) -> Tensor:
            return run_chunk(*variants(slice(part.start + start, part.stop + start)))

        bounds = pairwise([0, *(place + 1 for place in last), count])
        return torch.cat([map_chunks(stop - start, size, partial(piece, start)) for start, stop in bounds]).to(
            self.clean_scores
        )

    def _score_rows(
        self, strategy: str, read_output: ScoreReader, edit: ActivationEdit, sample_index: Tensor
    ) -> Tensor:
        """(R,): what is read of the rows after one forward pass."""
        rows = torch.arange(len(sample_index), device=sample_index.device)
        if strategy == "together":
            with self.replay:
                return self._run_and_read(self.x, None, sample_index, edit, read_output, sample_index)
        if strategy == "apart":
            return self._run_and_read(
                self.x.index_select(0, sample_index[:1]), sample_index[:1], rows * 0, edit, read_output, sample_index
            )
        if strategy == "whole":
            return self._run_and_read(
                self.x.index_select(0, sample_index), sample_index, rows, edit, read_output, sample_index
            )
        row = int(sample_index)
        return self._run_and_read(
            self.x, None, self._sample_indices, lambda maps: edit(maps[row : row + 1]), read_output, None
        )[row, None]

    def _run_and_read(
        self,
        x: Tensor,
        input_sample_index: Tensor | None,
        rows: Tensor,
        edit: ActivationEdit,
        read_output: ScoreReader,
        sample_index: Tensor | None,
    ) -> Tensor:
        """One pass of x, versions of the samples `input_sample_index`, whose layer hands on `rows` of its own, changed."""
        return read_output(self._run_edited_model(x, input_sample_index, rows, edit), len(rows), sample_index).detach()

    def _run_edited_model(
        self, x: Tensor, input_sample_index: Tensor | None, rows: Tensor, edit: ActivationEdit
    ) -> Any:
        with branch_layer_output(
            self.score.model,
            self.layer,
            rows,
            partial(self._apply_edit, edit),
            output_index=self.output_index,
            call_index=self.call_index,
        ):
            return self.score.forward(x, input_sample_index)

    def _apply_edit(self, edit: ActivationEdit, layer_output: Tensor) -> Tensor:
        maps = self.to_maps(layer_output)
        if maps.untyped_storage().data_ptr() != layer_output.untyped_storage().data_ptr():
            raise LayerError(
                f"reshape= copies the output of layer {self.layer!r}, so what is changed there would not reach the model; "
                f"return a view of it (permute, unflatten, slices), or pass layout="
            )
        edit(maps)
        return layer_output


def _leave_unchanged(maps: Tensor) -> None:
    """Change nothing."""


MIN_ROUNDING_STEPS = 20  # steps of rounding


@dataclass(frozen=True)
class LayerFeatures:
    """A layer's activation (N,K,*s), and the score's gradient there, of one pass of x (N,C,*S).

    `values` (N,): the score. `recompute(x)`: the features of another input at the same layer, for the same question.
    `compute_curvature()` (N,K,*s): the score's Hessian there times the activation, for a method that is `second_order`.
    """

    layer: str
    activation: Tensor
    x: Tensor
    score: Score
    values: Tensor
    layout: Layout | None
    to_maps: Callable[[Tensor], Tensor]
    optional_gradient: Tensor | None = None
    recompute: Callable[[Tensor], "LayerFeatures"] = field(repr=False, kw_only=True)
    compute_curvature: Callable[[], Tensor] = field(repr=False, kw_only=True)
    output_index: str | int | None = None
    call_index: int = 0
    batch_size: int | None = None
    activation_bytes: ActivationBytes = field(default_factory=ActivationBytes)
    replay: PrefixCache | None = None
    input_shares: InputShares | None = None
    notes: tuple[str, ...] = ()
    layout_unverified: bool = False  # whether the layout could be neither verified nor contradicted
    sample_notes: list[list[str]] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "sample_notes", [[] for _ in self.x])

    @property
    def gradient(self) -> Tensor:
        """(N,K,*s): the score's gradient at the layer."""
        if self.optional_gradient is None:
            raise LayerError(
                f"no gradient was taken at layer {self.layer!r}: the method must say needs_gradient = True"
            )
        return self.optional_gradient

    def score_inputs(self, count: int, variants: Callable[[slice], tuple[Tensor, Tensor]]) -> Tensor:
        """(count,): the scores of so many other inputs. `variants`: which of them -> inputs (R,C,*S), owners (R,).

        They are made and scored in pieces that fit into memory; row i is a version of sample owners[i].
        """
        return self._evaluate_inputs(count, variants, self.score.read_score)

    def compute_input_probabilities(self, count: int, variants: Callable[[slice], tuple[Tensor, Tensor]]) -> Tensor:
        """(count,): as `score_inputs`, but the class's probability where there are several classes."""
        return self._evaluate_inputs(count, variants, self.score.probability)

    def _evaluate_inputs(
        self,
        count: int,
        variants: Callable[[slice], tuple[Tensor, Tensor]],
        read_output: Callable[[object, int, Tensor], Tensor],
    ) -> Tensor:
        self.score.check_extra_inputs(self.x)

        def run(part: slice) -> Tensor:
            inputs, sample_rows = variants(part)
            return read_output(self.score.forward(inputs, sample_rows), len(inputs), sample_rows).detach()

        return map_chunks(count, self._count_copies_in_memory(self.activation_bytes.largest_in_model), run).to(
            self.values
        )

    def score_activations(self, count: int, variants: ActivationVariants) -> Tensor:
        """(count,): the scores of so many other activations at the layer; what comes before it runs once where it can.

        `variants`: which of them -> a function that changes activations (R,K,*s) in place, and the owners (R,). What is
        large is made in that function.
        """
        return self._partial_forward.score_variants(count, variants, self.score.read_score)

    def compute_activation_probabilities(self, count: int, variants: ActivationVariants) -> Tensor:
        """(count,): as `score_activations`, but the class's probability where there are several classes."""
        return self._partial_forward.score_variants(count, variants, self.score.probability)

    def compute_score_losses(self, count: int, variants: ActivationVariants) -> Tensor:
        """(count,): how much of the score each of so many other activations loses, see `score_activations`."""
        return self._partial_forward.compute_score_losses(count, variants)

    def run_with_edit(self, edit: Callable[[Tensor], object]) -> Any:
        """The model's output when `edit` has worked on all samples' activations (N,K,*s) in place, in one pass."""
        return self._partial_forward.run_with_edit(edit)

    def add_note(self, sample: int, text: str) -> None:
        """Add to what one sample's result says of how it came about."""
        self.sample_notes[sample].append(text)

    def add_rounding_notes(self, statement: str, changes: Tensor, scores: Tensor) -> None:
        """A note on each sample whose changes (N,M) are hardly more than the rounding of the scores (N,R) behind them."""
        rounding = torch.finfo(self.score.dtype).eps * scores.abs().amax(1)
        for sample in (changes.abs().amax(1) < MIN_ROUNDING_STEPS * rounding).nonzero()[:, 0].tolist():
            self.add_note(sample, f"{statement} by much more than its rounding in {self.score.dtype}")

    def _count_copies_in_memory(self, bytes_per_copy: int) -> int:
        if self.batch_size is not None:
            return self.batch_size
        return count_copies_in_memory(max(1, bytes_per_copy // len(self.x)), self.x.device)

    @cached_property
    def _partial_forward(self) -> PartialForward:
        return PartialForward(
            self.layer,
            self.x,
            self.score,
            self.values,
            self.to_maps,
            output_index=self.output_index,
            call_index=self.call_index,
            activation_bytes=self.activation_bytes,
            batch_size=self.batch_size,
            replay=self.replay or PrefixCache(self.score.model, self.layer, self.call_index),
        )
