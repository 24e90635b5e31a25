"""`LayerFeatures`: the activation and gradient of a layer, and scores of changed inputs or changed activations."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from camscope.errors import LayerError
from camscope.explainers.core.chunk_perturbed_copies_by_memory import (
    ActivationBytes,
    count_copies_that_fit_in_memory,
    map_chunks,
)
from camscope.hooks.cache_prefix_and_vary_output import PrefixCache, replace_output_by_variants
from camscope.hooks.thread_local_hooks import Hooks, thread_local_hook
from camscope.layers.layout import Layout
from camscope.targets import Score

InputShares = tuple[float, ...]
SCORE_TOLERANCE_BY_DTYPE = {torch.float16: 2e-2, torch.bfloat16: 5e-2, torch.float32: 1e-4, torch.float64: 1e-9}
MIN_ROUNDING_STEPS = 20  # a change of fewer steps of rounding gets a note


class InputVariants(NamedTuple):
    """Variants of samples as inputs (R,C,*S). An index (R,) tells from which sample each variant is made."""

    inputs: Tensor
    sample_index: Tensor


ActivationEdit = Callable[[Tensor], object]  # edits activations (R,K,*s) in place


class ActivationVariants(NamedTuple):
    """A function that edits R copies of activations in place. An index (R,) tells from which sample each copy is made."""

    edit: ActivationEdit
    sample_index: Tensor


# functions that build a slice of all variants; a plain tuple is accepted, too. That of activations may be called for
# all rows at once to learn the samples, so large tensors are made in the edit
InputVariantsBuilder = Callable[[slice], tuple[Tensor, Tensor]]
ActivationVariantsBuilder = Callable[[slice], tuple[ActivationEdit, Tensor]]
ScoreReader = Callable[[object, int, Tensor | None], Tensor]  # output, number of rows, sample of each row -> (R,)


@contextmanager
def record_image_share_of_padded_input(model: nn.Module) -> Iterator[list[InputShares]]:
    """If a torchvision detector pads its input, record the share of each input axis that the image covers."""
    recorded: list[InputShares] = []

    def record_shares(module: nn.Module, args: object, output: Any) -> None:
        images = output[0]
        sizes = zip(images.image_sizes[0], images.tensors.shape[2:], strict=True)
        shares = tuple(unpadded / padded for unpadded, padded in sizes)
        if min(shares) < 1:
            recorded.append(shares)

    with Hooks() as hooks:
        for module in model.modules():
            if type(module).__name__ == "GeneralizedRCNNTransform":
                hooks.add_handle(module.register_forward_hook(thread_local_hook(record_shares)))
        yield recorded


@dataclass(frozen=True)
class LayerFeatures:
    """The activation (N,K,*s) of a layer in one pass of an input x (N,C,*S), and the gradient of the score at this activation.

    `values` (N,): the score. `recompute(x)`: the features of another input at the same layer, for the same target.
    `compute_curvature()` (N,K,*s): the score's Hessian there times the activation, for a method that is `second_order`.

    There are four strategies to run the model with changed activations. Of these, the first one is used in which the
    samples do not affect one another:

    - together: one pass of x, in which the rows of the layer are replaced by changed copies of any number.
    - apart: a separate pass of x[i] for the changed copies of sample i, because a tensor with N rows bypasses the
      layer.
    - whole: a pass of the whole model with one input per copy, because the model counts its rows before the layer.
    - batch: a pass of x with one changed sample, because the model mixes its samples.

    Attributes:
        layer: Name of the layer.
        activation: (N,K,*s) output of the layer, channels first.
        x: (N,C,*S) input of the pass.
        score: The score that is explained.
        values: (N,) the score of each sample.
        layout: How the layer's output holds its grid, or None with a custom `reshape`.
        to_maps: Function that converts an output of the layer to (N,K,*s).
        optional_gradient: (N,K,*s) gradient of the score at the layer, or None for a method that needs none.
        recompute: Function x -> features of another input at the same layer, for the same target.
        compute_curvature: Function without arguments that returns the score's Hessian times the activation (N,K,*s).
        output_index: Key of the tensor in a layer that returns several.
        call_index: Which call of the layer the features belong to.
        batch_size: Variants per pass. None: as many as fit into memory.
        activation_bytes: Bytes of the activations, from which the number of variants is chosen.
        replay: Cache of the pass up to the layer, or None.
        input_shares: Which part of the layer shows the input, for a detector that pads its input.
        notes: Notes about all samples.
        layout_unverified: Whether the layout could be neither verified nor contradicted.
        sample_notes: Notes about each sample.

    >>> from camscope import LayerExplainer, load_model
    >>> class FeatureShape(LayerExplainer):
    ...     name = "feature shape"
    ...     def compute_layer_map(self, features: LayerFeatures):
    ...         print(features.layer, tuple(features.activation.shape), tuple(features.values.shape))
    ...         return features.activation.sum(1)
    >>> FeatureShape(load_model("phantom"), "layer4").attribute(torch.ones(2, 1, 128, 128), 1).shape
    layer4 (2, 96, 16, 16) (2,)
    torch.Size([2, 16, 16])

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
        """The gradient of the score at the layer (N,K,*s)."""
        if self.optional_gradient is None:
            raise LayerError(
                f"no gradient was computed at layer {self.layer!r}: set needs_gradient = True in the class of the method"
            )
        return self.optional_gradient

    def score_inputs(
        self, n_variants: int, build_variants: InputVariantsBuilder, *, as_probability: bool = False
    ) -> Tensor:
        """Compute the scores (n_variants,) of perturbed copies of the input.

        `as_probability`: return the probability of the class, if the model has several classes.
        """
        self.score.check_extra_inputs(self.x)
        read_output = self._get_score_reader(as_probability)

        def score_variants_of_chunk(part: slice) -> Tensor:
            inputs, sample_index = build_variants(part)
            return read_output(self.score.forward(inputs, sample_index), len(inputs), sample_index).detach()

        chunk_size = self.choose_n_variants_per_pass(self.activation_bytes.largest_in_model)
        return map_chunks(n_variants, chunk_size, score_variants_of_chunk).to(self.values)

    def score_activations(
        self, n_variants: int, build_variants: ActivationVariantsBuilder, *, as_probability: bool = False
    ) -> Tensor:
        """Compute the scores (n_variants,) of the model for changed activations of the layer.

        `as_probability`: as in `score_inputs`. The part of the model before the layer runs once if possible.
        """
        run_chunk = partial(self._score_rows, self._batching_strategy, self._get_score_reader(as_probability))
        return self._run_in_chunks(self._batching_strategy, n_variants, build_variants, run_chunk)

    def compute_score_losses(self, n_variants: int, build_variants: ActivationVariantsBuilder) -> Tensor:
        """Compute how much the score drops (n_variants,) for each changed activation of the layer.

        Clean and changed activations share a pass, so that equal rounding errors cancel.
        """
        strategy, read_score = self._batching_strategy, self.score.read_score

        def compute_losses_of_chunk(edit: ActivationEdit, sample_index: Tensor) -> Tensor:
            if strategy == "batch":
                return self.values[sample_index] - self._score_rows(strategy, read_score, edit, sample_index)
            present, position = sample_index.unique(return_inverse=True)
            n_rows, rows = len(sample_index), torch.cat([sample_index, present])
            scores = self._score_rows(strategy, read_score, lambda maps: edit(maps[:n_rows]), rows)
            return scores[n_rows:][position] - scores[:n_rows]

        return self._run_in_chunks(strategy, n_variants, build_variants, compute_losses_of_chunk)

    def run_with_edit(self, edit: ActivationEdit) -> Any:
        """Run the model and return its output. `edit` changes the layer's activation (N,K,*s) in place."""
        with self._prefix_cache if self._can_use_cached_outputs else nullcontext():
            return self._run_edited_model(self.x, None, self._sample_indices, edit)

    def add_note(self, sample: int, text: str) -> None:
        """Add a note to the result of one sample."""
        self.sample_notes[sample].append(text)

    def add_rounding_notes(self, statement: str, changes: Tensor, scores: Tensor) -> None:
        """Add a note to each sample whose score hardly changes: `changes` (N,M) are near the rounding of `scores` (N,R)."""
        rounding = self.score.machine_epsilon * scores.abs().amax(1)
        for sample in (changes.abs().amax(1) < MIN_ROUNDING_STEPS * rounding).nonzero()[:, 0].tolist():
            self.add_note(sample, f"{statement} by much more than its rounding in {self.score.dtype}")

    def choose_n_variants_per_pass(self, bytes_of_pass: int) -> int:
        """Return how many perturbed copies run in one pass: `batch_size`, or as many as fit into memory.

        `bytes_of_pass` are those of the largest tensor in a pass of x.
        """
        return self.batch_size or count_copies_that_fit_in_memory(max(1, bytes_of_pass // len(self.x)), self.x.device)

    def _get_score_reader(self, as_probability: bool) -> ScoreReader:
        return self.score.probability if as_probability else self.score.read_score

    @cached_property
    def _prefix_cache(self) -> PrefixCache:
        return self.replay or PrefixCache(self.score.model, self.layer, self.call_index)

    @cached_property
    def _sample_indices(self) -> Tensor:
        return torch.arange(len(self.x), device=self.x.device)

    @cached_property
    def _can_use_cached_outputs(self) -> bool:
        """Whether the scores stay the same if the cache supplies the outputs of earlier layers."""
        if not self._prefix_cache.has_cached_outputs:
            return True
        try:
            with self._prefix_cache:
                output = self._run_edited_model(self.x, None, self._sample_indices, lambda maps: None)
                scores = self.score.read_score(output, len(self.x)).detach()
        except Exception:  # the model's own will be raised again without a replay
            return False
        return self._matches_clean_scores(scores)

    @cached_property
    def _batching_strategy(self) -> str:
        """The first batching strategy in which samples do not affect one another. The class docstring lists the strategies."""
        return next(filter(self._computes_samples_independently, ("together", "apart", "whole")), "batch")

    def _computes_samples_independently(self, strategy: str) -> bool:
        """Whether a batching strategy computes each sample independently.
        The strategy is tested with and without cached outputs.
        """
        was_cached = self._prefix_cache.has_cached_outputs
        return self._scores_stay_if_other_samples_are_zeroed(strategy) and (
            was_cached
            or not self._prefix_cache.has_cached_outputs
            or self._scores_stay_if_other_samples_are_zeroed(strategy)
        )

    def _scores_stay_if_other_samples_are_zeroed(self, strategy: str) -> bool:
        """Whether a sample keeps its score if the activations of other samples in the same pass are set to zero."""
        n_samples = len(self.x)
        rows = torch.arange(2 * n_samples + 1, device=self.x.device)
        sample_index = (rows // 2).clamp(max=n_samples - 1)

        def blank_every_other(part: slice) -> ActivationVariants:
            blank = (rows[part] % 2 == 0).nonzero()[:, 0]
            return ActivationVariants(lambda maps: maps.index_fill_(0, blank, 0), sample_index[part])

        run_chunk = partial(self._score_rows, strategy, self.score.read_score)
        try:
            scores = self._run_in_chunks(strategy, len(rows), blank_every_other, run_chunk)
        except Exception:
            return False
        return self._matches_clean_scores(scores[1::2])

    def _matches_clean_scores(self, scores: Tensor) -> bool:
        clean = self.values
        allowed = SCORE_TOLERANCE_BY_DTYPE.get(self.score.dtype, 1e-4) * (1 + float(clean.abs().max()))
        return bool(((scores.to(clean) - clean).abs() <= allowed).all())

    def _run_in_chunks(
        self,
        strategy: str,
        n_variants: int,
        build_variants: ActivationVariantsBuilder,
        run_chunk: Callable[[ActivationEdit, Tensor], Tensor],
    ) -> Tensor:
        """Run all perturbed copies in chunks that fit into memory. Return the concatenated results (n_variants,)."""
        if n_variants == 0:  # a layer without a nonzero channel
            return self.values.new_zeros(0)
        sizes = self.activation_bytes
        largest = sizes.largest_in_model if strategy == "whole" else sizes.largest_behind_layer
        chunk_size = self.choose_n_variants_per_pass(largest)
        sample_index = build_variants(slice(0, n_variants))[1]
        ends = list(range(n_variants - 1)) if strategy == "batch" else []
        if strategy == "apart":
            ends = sample_index.diff().nonzero()[:, 0].tolist()

        def run_variants_of_part(start: int, part: slice) -> Tensor:
            return run_chunk(*build_variants(slice(part.start + start, part.stop + start)))

        bounds = pairwise([0, *(end + 1 for end in ends), n_variants])
        chunks = [map_chunks(stop - start, chunk_size, partial(run_variants_of_part, start)) for start, stop in bounds]
        return torch.cat(chunks).to(self.values)

    def _score_rows(
        self, strategy: str, read_output: ScoreReader, edit: ActivationEdit, sample_index: Tensor
    ) -> Tensor:
        """Run one forward pass with R changed activations. Return their scores (R,)."""
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
        """Run the model on x. Replace the layer's output by copies of the output `rows`, which `edit` changes.

        `input_sample_index` says of which sample each row of x is a variant.
        """
        edit_rows, output_index, call_index = (
            partial(self._edit_rows_in_place, edit),
            self.output_index,
            self.call_index,
        )
        with replace_output_by_variants(
            self.score.model, self.layer, rows, edit_rows, output_index=output_index, call_index=call_index
        ):
            return self.score.forward(x, input_sample_index)

    def _edit_rows_in_place(self, edit: ActivationEdit, rows: Tensor) -> Tensor:
        """Edit rows of the layer's output in place, as maps. Return the rows. Raise LayerError if the maps are a copy."""
        maps = self.to_maps(rows)
        if maps.untyped_storage().data_ptr() != rows.untyped_storage().data_ptr():
            raise LayerError(
                f"reshape= copies the output of layer {self.layer!r}, so a change of the copy would not reach the model: return "
                f"a view of the output (permute, unflatten, slices), or pass layout="
            )
        edit(maps)
        return rows
