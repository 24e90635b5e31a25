"""`ModelScorer`: scores and probabilities of a model for perturbed variants of an input, for one fixed target."""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from camscope.errors import InputError
from camscope.explainers.core.chunk_perturbed_copies_by_memory import (
    count_copies_that_fit_in_memory,
    measure_activation_bytes,
    process_chunks,
)
from camscope.explainers.core.evaluation_context import (
    EvaluationContext,
    Mode,
    Precision,
    evaluation_context,
    inspect_model,
)
from camscope.explainers.core.model_input import NO_EXTRA_INPUTS, ExtraInputs
from camscope.explainers.core.setting_checks import check_one_of, check_positive_integer
from camscope.targets import TargetLike
from camscope.targets.find_class_scores import are_probabilities

OutputKind = Literal["probability", "score"]
# rows -> variants (R,C,*S), and the sample (R,) that each is a variant of
VariantBuilder = Callable[[slice], tuple[Tensor, Tensor]]


@dataclass
class ScoringSettings:
    """Settings for calling the model (see `BaseMethod`)."""

    mode: Mode
    precision: Precision | None
    class_names: Sequence[str] | None
    forward_options: Mapping[str, Any] = field(default_factory=dict)
    accepts_integer_input: bool = False


class ModelScorer:
    """Scores and probabilities of perturbed variants of x (N,C,*S). `scoring_scope` creates the scorer.

    The probability is `Score.probability`. If the model's output is a probability, both numbers are equal. The target is
    chosen on the clean input and stays the same for all variants. The model runs without gradients.

    Args:
        context: The input and the settings of one evaluation.
        target: What is scored, as `Score` accepts it.
        batch_size: Variants in one forward pass. The default is as many as fit into memory.

    Attributes:
        x: The clean input.
        clean_scores: (2,N) float64, score and probability of x.

    >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 3))
    >>> with scoring_scope(model, torch.rand(2, 1, 4, 4), 0) as scorer:
    ...     scorer.clean_scores.shape  # score and probability of two images
    torch.Size([2, 2])

    """

    def __init__(self, context: EvaluationContext, target: TargetLike, batch_size: int | None) -> None:
        self.x, self._target_score, self.is_open = context.x, context.create_score(target), True
        self.shared_scores: dict[
            Hashable, Tensor
        ] = {}  # scores that do not depend on a map, for all maps of the images
        self._gives_probabilities: bool | None = None  # whether the output is a probability, as the clean output shows
        with measure_activation_bytes(context.model, {"": context.model}, self.x) as activation_bytes:
            self.clean_scores = self._compute_score_and_probability(self.x, None)
        self._target_score.check_extra_inputs(self.x)
        bytes_per_sample = max(activation_bytes[""].largest_in_model, self.x.nbytes) // len(self.x)
        self.batch_size = batch_size or count_copies_that_fit_in_memory(max(1, bytes_per_sample), self.x.device)

    @property
    def machine_epsilon_of_scores(self) -> float:
        """The machine epsilon of the model's output dtype."""
        return torch.finfo(self._target_score.dtype).eps

    def __call__(self, variants: Tensor, sample_index: Tensor | None = None) -> Tensor:
        """Return two rows (2,R) for changed inputs (R,C,*S): the scores and the probabilities.

        `sample_index` (R,) tells of which sample each is a variant. By default there is one variant of each sample, in order.
        """
        if sample_index is None:
            sample_index = torch.arange(len(variants), device=variants.device)
        return self._compute_score_and_probability(variants, sample_index)

    def score_variants(self, n_variants: int, build_variants: VariantBuilder) -> Tensor:
        """Build and score changed inputs batch by batch. Return two rows (2, n_variants): the scores and the probabilities."""
        scores = torch.empty(2, n_variants, dtype=torch.float64, device=self.x.device)

        def score_part(part: slice) -> None:
            scores[:, part] = self(*build_variants(part))

        process_chunks(n_variants, self.batch_size, score_part)
        return scores

    def _compute_score_and_probability(self, x: Tensor, sample_index: Tensor | None) -> Tensor:
        """Run the model once. Return scores and probabilities (2,R). Raise an InputError if the scorer is already closed."""
        if not self.is_open:
            raise InputError("the scorer is closed: compute scores inside the `with scoring_scope(…)` block")
        output = self._target_score.forward(x, sample_index)
        score = self._target_score.read_score(output, len(x), sample_index)
        if self._gives_probabilities is None:
            logits = self._target_score.logits
            self._gives_probabilities = logits is not None and are_probabilities(logits)
        probability = (
            score if self._gives_probabilities else self._target_score.probability(output, len(x), sample_index)
        )
        return torch.stack([score, probability]).detach().double()


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
    forward_options: Mapping[str, Any] | None = None,
) -> Iterator[ModelScorer]:
    """Provide a `ModelScorer` for the images x (N,C,*S) inside the `with` block. The model is restored afterwards.

    Args:
        model: The model, or a function from a batch to scores.
        x: (N,C,*S) the clean input.
        target: What `Score` accepts.
        extra_inputs: Further inputs of the model.
        class_names: Names of the classes, for a target by name.
        mode: "eval" or "as_is".
        precision: None or "bf16".
        batch_size: Variants in one forward pass. The default is as many as fit into memory.
        forward_options: See `BaseMethod.forward_options`.

    Yields:
        The scorer.

    >>> import torch
    >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 3))
    >>> x = torch.zeros(1, 1, 2, 2)
    >>> with scoring_scope(model, x, 2) as scorer:
    ...     tuple(scorer(x + 1).shape)
    (2, 1)

    """
    check_one_of("mode", mode, "eval", "as_is")
    check_one_of("precision", precision, None, "bf16")
    check_positive_integer(None, batch_size=batch_size)
    settings = ScoringSettings(mode, precision, class_names, forward_options or {})
    with evaluation_context(
        inspect_model(model, scores_suffice=True), settings, x, extra_inputs, runs_copies=True
    ) as context:
        scorer = ModelScorer(context, target, batch_size)
        try:
            yield scorer
        finally:
            scorer.is_open = False
