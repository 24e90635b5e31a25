"""Scores: one question, fixed on the clean input, and the model's answers to it for changed versions of that input."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from camscope.errors import InputError
from camscope.explainers.core.batching import count_copies_in_memory, measure_activation_bytes, process_chunks
from camscope.explainers.core.evaluation_context import (
    EvaluationContext,
    Mode,
    Precision,
    check_one_of,
    check_positive_integer,
    evaluation_context,
    inspect_model,
)
from camscope.explainers.core.inputs import NO_EXTRA_INPUTS, ExtraInputs
from camscope.targets import TargetLike
from camscope.targets.outputs import are_probabilities

OutputKind = Literal["probability", "score"]
VariantBuilder = Callable[
    [slice], tuple[Tensor, Tensor]
]  # some rows: (R,C,*S), and the image (R,) that each is a version of


@dataclass
class ScoringSettings:
    """How the model is asked; see `BaseMethod`."""

    mode: Mode
    precision: Precision | None
    class_names: Sequence[str] | None
    call_settings: Mapping[str, Any] = field(default_factory=dict)
    accepts_integer_input: bool = False


class ModelScorer:
    """The score of any version of x (N,C,*S), and the probability that it means: see `with_target.Score.chance`.

    Of a model that gives probabilities the two are one.

    `clean_scores` (2,N), float64: those of x itself. The class was settled there, so that no change of the input changes the
    question. Calls are without gradients, in passes that fit into memory, or of `batch_size`. Made by `scoring_scope`.
    """

    def __init__(self, context: EvaluationContext, target: TargetLike, batch_size: int | None) -> None:
        self.x, self._target_score, self.is_open = context.x, context.create_score(target), True
        self._gives_probabilities: bool | None = (
            None  # whether the model gives probabilities, as its clean output shows
        )
        with measure_activation_bytes(context.model, {"": context.model}) as widths:
            self.clean_scores = self._compute_scores(self.x, None)
        self._target_score.check_extra_inputs(self.x)
        width = max(widths[""].largest_in_model, self.x.nbytes) // len(self.x)
        self.batch_size = batch_size or count_copies_in_memory(max(1, width), self.x.device)

    @property
    def score_epsilon(self) -> float:
        """The least step from 1 of the type that the model answers in."""
        return torch.finfo(self._target_score.dtype).eps

    def __call__(self, variants: Tensor, sample_index: Tensor | None = None) -> Tensor:
        """(R,C,*S) -> (2,R): score and probability. `sample_index` (R,): whose version each is; None: of each image, in order."""
        if sample_index is None:
            sample_index = torch.arange(len(variants), device=variants.device)
        return self._compute_scores(variants, sample_index)

    def score_variants(self, n_variants: int, build_variants: VariantBuilder) -> Tensor:
        """(2,rows): of so many versions, a pass of them at a time."""
        found = torch.empty(2, n_variants, dtype=torch.float64, device=self.x.device)

        def work(part: slice) -> None:
            found[:, part] = self(*build_variants(part))

        process_chunks(n_variants, self.batch_size, work)
        return found

    def _compute_scores(self, x: Tensor, sample_index: Tensor | None) -> Tensor:
        if not self.is_open:
            raise InputError("the model is its own again: ask for scores inside the `with scoring_scope(…)`")
        output = self._target_score.forward(x, sample_index)
        score = self._target_score.read_score(output, len(x), sample_index)
        if self._gives_probabilities is None:
            self._gives_probabilities = self._target_score.logits is not None and are_probabilities(
                self._target_score.logits
            )
        chance = score if self._gives_probabilities else self._target_score.probability(output, len(x), sample_index)
        return torch.stack([score, chance]).detach().double()


@contextmanager
def scoring_scope(
    model: nn.Module,
    x: Tensor,
    target: TargetLike = None,
    extra_inputs: ExtraInputs = NO_EXTRA_INPUTS,
    *,
    class_names: Sequence[str] | None = None,
    mode: Mode = "eval",
    precision: Precision | None = None,
    batch_size: int | None = None,
    call_settings: Mapping[str, Any] | None = None,
) -> Iterator[ModelScorer]:
    """Inside the `with` the model is asked about x (N,C,*S) and versions of it; it is left as it was, as by an explainer.

    `target`: see `Score`. `extra_inputs`: what the model takes beside x. `batch_size`: versions in one pass; None: as many as
    fit into memory. The rest: see `BaseMethod`.
    """
    check_one_of("mode", mode, "eval", "as_is")
    check_one_of("precision", precision, None, "bf16")
    check_positive_integer(None, batch_size=batch_size)
    settings = ScoringSettings(mode, precision, class_names, call_settings or {})
    with evaluation_context(inspect_model(model), settings, x, extra_inputs, runs_copies=True) as asked:
        scores = ModelScorer(asked, target, batch_size)
        try:
            yield scores
        finally:
            scores.is_open = False
