"""A layer's activation and gradient in one pass, and the scores of other inputs and other activations there."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from camscope.errors import LayerError
from camscope.explainers.core.batching import ActivationBytes, count_copies_in_memory, map_chunks
from camscope.hooks.base import Hooks, thread_local_hook
from camscope.hooks.partial_forward import PrefixCache, branch_layer_output
from camscope.layers.layout import Layout
from camscope.targets import Score

InputShares = tuple[float, ...]
SCORE_TOLERANCE_BY_DTYPE = {torch.float16: 2e-2, torch.bfloat16: 5e-2, torch.float32: 1e-4, torch.float64: 1e-9}
MIN_ROUNDING_STEPS = 20  # a change of fewer steps of rounding gets a note

# Some of several variants -> inputs (R,C,*S), and the sample (R,) that each is a variant of
InputVariants = Callable[[slice], tuple[Tensor, Tensor]]
# Some of several variants -> a function that edits activations (R,K,*s) in place, and the sample (R,) of each row.
# It may be called for all rows at once to learn the samples, so large tensors are made in the edit.
ActivationEdit = Callable[[Tensor], object]
ActivationVariants = Callable[[slice], tuple[ActivationEdit, Tensor]]
ScoreReader = Callable[[object, int, Tensor | None], Tensor]  # output, number of rows, sample of each row -> (R,)


@contextmanager
def record_input_shares(model: nn.Module) -> Iterator[list[InputShares]]:
    """Record the share of each axis that the input takes, if a torchvision detector pads it in the pass inside the `with`."""
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


@dataclass(frozen=True)
class LayerFeatures:
    """A layer's activation (N,K,*s), and the score's gradient there, of one pass of x (N,C,*S).

    `values` (N,): the score. `recompute(x)`: the features of another input at the same layer, for the same target.
    `compute_curvature()` (N,K,*s): the score's Hessian there times the activation, for a method that is `second_order`.

    Altered activations are put through the rest of the model by the first of four strategies that keeps samples apart:

    - together: all rows are copies of rows of one pass of x.
    - apart: the rows of each sample have a pass of x[i], because something with N rows bypasses the layer.
    - whole: every row is a row of a pass of the whole model, because the model counts its rows before the layer.
    - batch: one altered sample per pass, among the others unchanged, because the model mixes its samples.
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
        """The score's gradient (N,K,*s) at the layer."""
        if self.optional_gradient is None:
            raise LayerError(
                f"no gradient was taken at layer {self.layer!r}: the method must say needs_gradient = True"
            )
        return self.optional_gradient

    def score_inputs(self, count: int, variants: InputVariants, *, as_probability: bool = False) -> Tensor:
        """Return the scores (count,) of variants of the input.

        With `as_probability`, the class's probability if the model has several classes.
        """
        self.score.check_extra_inputs(self.x)
        read_output = self._get_reader(as_probability)

        def run(part: slice) -> Tensor:
            inputs, sample_index = variants(part)
            return read_output(self.score.forward(inputs, sample_index), len(inputs), sample_index).detach()

        chunk_size = self.count_copies_in_memory(self.activation_bytes.largest_in_model)
        return map_chunks(count, chunk_size, run).to(self.values)

    def score_activations(self, count: int, variants: ActivationVariants, *, as_probability: bool = False) -> Tensor:
        """Return the scores (count,) of other activations at the layer, or probabilities.

        The part of the model before the layer runs once if possible.
        """
        run_chunk = partial(self._score_rows, self._strategy, self._get_reader(as_probability))
        return self._run_in_chunks(self._strategy, count, variants, run_chunk)

    def compute_score_losses(self, count: int, variants: ActivationVariants) -> Tensor:
        """Return how much of the score (count,) is lost with each of other activations; see `score_activations`.

        Clean scores and altered ones are of one pass, so that common rounding cancels.
        """
        strategy, read_score = self._strategy, self.score.read_score

        def subtract_from_clean(edit: ActivationEdit, sample_index: Tensor) -> Tensor:
            if strategy == "batch":
                return self.values[sample_index] - self._score_rows(strategy, read_score, edit, sample_index)
            present, position = sample_index.unique(return_inverse=True)
            n_rows, rows = len(sample_index), torch.cat([sample_index, present])
            scores = self._score_rows(strategy, read_score, lambda maps: edit(maps[:n_rows]), rows)
            return scores[n_rows:][position] - scores[:n_rows]

        return self._run_in_chunks(strategy, count, variants, subtract_from_clean)

    def run_with_edit(self, edit: ActivationEdit) -> Any:
        """Return the model's output of one pass in which `edit` changes all samples' activations (N,K,*s) in place."""
        with self._prefix_cache if self._can_replay else nullcontext():
            return self._run_edited_model(self.x, None, self._sample_indices, edit)

    def add_note(self, sample: int, text: str) -> None:
        """Add a note to the result of one sample."""
        self.sample_notes[sample].append(text)

    def add_rounding_notes(self, statement: str, changes: Tensor, scores: Tensor) -> None:
        """Add a note to each sample whose changes (N,M) are hardly more than the rounding of its scores (N,R)."""
        rounding = self.score.machine_epsilon * scores.abs().amax(1)
        for sample in (changes.abs().amax(1) < MIN_ROUNDING_STEPS * rounding).nonzero()[:, 0].tolist():
            self.add_note(sample, f"{statement} by much more than its rounding in {self.score.dtype}")

    def count_copies_in_memory(self, bytes_of_pass: int) -> int:
        """Return how many variants fit into a pass, from the bytes of the largest tensor in a pass of x."""
        return self.batch_size or count_copies_in_memory(max(1, bytes_of_pass // len(self.x)), self.x.device)

    def _get_reader(self, as_probability: bool) -> ScoreReader:
        return self.score.probability if as_probability else self.score.read_score

    @cached_property
    def _prefix_cache(self) -> PrefixCache:
        return self.replay or PrefixCache(self.score.model, self.layer, self.call_index)

    @cached_property
    def _sample_indices(self) -> Tensor:
        return torch.arange(len(self.x), device=self.x.device)

    @cached_property
    def _can_replay(self) -> bool:
        """Whether a replayed pass gives the clean scores: modules may pass on more than their outputs."""
        if not self._prefix_cache.has_cached_outputs:
            return True
        try:
            with self._prefix_cache:
                output = self._run_edited_model(self.x, None, self._sample_indices, lambda maps: None)
                scores = self.score.read_score(output, len(self.x)).detach()
        except Exception:  # the model's own will be raised again without a replay
            return False
        return self._match_clean_scores(scores)

    @cached_property
    def _strategy(self) -> str:
        return next(filter(self._is_usable_strategy, ("together", "apart", "whole")), "batch")

    def _is_usable_strategy(self, strategy: str) -> bool:
        """Whether a strategy keeps samples apart, also in a replayed pass if its first pass filled the cache."""
        was_cached = self._prefix_cache.has_cached_outputs
        return self._keeps_samples_apart(strategy) and (
            was_cached or not self._prefix_cache.has_cached_outputs or self._keeps_samples_apart(strategy)
        )

    def _keeps_samples_apart(self, strategy: str) -> bool:
        """Whether each sample keeps its score among rows of which every other one has an activation of zero."""
        n_samples = len(self.x)
        rows = torch.arange(2 * n_samples + 1, device=self.x.device)
        sample_index = (rows // 2).clamp(max=n_samples - 1)

        def blank_every_other(part: slice) -> tuple[ActivationEdit, Tensor]:
            blank = (rows[part] % 2 == 0).nonzero()[:, 0]
            return lambda maps: maps.index_fill_(0, blank, 0), sample_index[part]

        run_chunk = partial(self._score_rows, strategy, self.score.read_score)
        try:
            scores = self._run_in_chunks(strategy, len(rows), blank_every_other, run_chunk)
        except Exception:
            return False
        return self._match_clean_scores(scores[1::2])

    def _match_clean_scores(self, scores: Tensor) -> bool:
        clean = self.values
        allowed = SCORE_TOLERANCE_BY_DTYPE.get(self.score.dtype, 1e-4) * (1 + float(clean.abs().max()))
        return bool(((scores.to(clean) - clean).abs() <= allowed).all())

    def _run_in_chunks(
        self,
        strategy: str,
        count: int,
        variants: ActivationVariants,
        run_chunk: Callable[[ActivationEdit, Tensor], Tensor],
    ) -> Tensor:
        """Return the joined results (count,) of chunks as large as memory and the strategy allow."""
        if count == 0:  # a layer without a nonzero channel
            return self.values.new_zeros(0)
        sizes = self.activation_bytes
        largest = sizes.largest_in_model if strategy == "whole" else sizes.largest_behind_layer
        chunk_size = self.count_copies_in_memory(largest)
        sample_index = variants(slice(0, count))[1]
        ends = list(range(count - 1)) if strategy == "batch" else []
        if strategy == "apart":
            ends = sample_index.diff().nonzero()[:, 0].tolist()

        def run_part(start: int, part: slice) -> Tensor:
            return run_chunk(*variants(slice(part.start + start, part.stop + start)))

        bounds = pairwise([0, *(end + 1 for end in ends), count])
        chunks = [map_chunks(stop - start, chunk_size, partial(run_part, start)) for start, stop in bounds]
        return torch.cat(chunks).to(self.values)

    def _score_rows(
        self, strategy: str, read_output: ScoreReader, edit: ActivationEdit, sample_index: Tensor
    ) -> Tensor:
        """Return what is read (R,) of the rows after one forward pass."""
        x, n_rows = self.x, len(sample_index)
        if strategy == "together":
            with self._prefix_cache:
                output = self._run_edited_model(x, None, sample_index, edit)
                return read_output(output, n_rows, sample_index).detach()
        if strategy == "batch":
            row, rows = int(sample_index), self._sample_indices
            output = self._run_edited_model(x, None, rows, lambda maps: edit(maps[row : row + 1]))
            return read_output(output, len(rows), None).detach()[row, None]
        rows = torch.arange(n_rows, device=sample_index.device)
        inputs, rows = (sample_index[:1], rows * 0) if strategy == "apart" else (sample_index, rows)
        output = self._run_edited_model(x.index_select(0, inputs), inputs, rows, edit)
        return read_output(output, n_rows, sample_index).detach()

    def _run_edited_model(
        self, x: Tensor, input_sample_index: Tensor | None, rows: Tensor, edit: ActivationEdit
    ) -> Any:
        """Return the output for x, variants of the samples `input_sample_index`; the layer's rows are copied and edited."""
        edit_rows, output_index, call_index = partial(self._apply_edit, edit), self.output_index, self.call_index
        with branch_layer_output(
            self.score.model, self.layer, rows, edit_rows, output_index=output_index, call_index=call_index
        ):
            return self.score.forward(x, input_sample_index)

    def _apply_edit(self, edit: ActivationEdit, rows: Tensor) -> Tensor:
        maps = self.to_maps(rows)
        if maps.untyped_storage().data_ptr() != rows.untyped_storage().data_ptr():
            raise LayerError(
                f"reshape= copies the output of layer {self.layer!r}, so what is changed there would not reach the "
                f"model; return a view of it (permute, unflatten, slices), or pass layout="
            )
        edit(maps)
        return rows
