"""`PerturbedEvaluator`: scores and gradients of many variants of one input, with progress."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from camscope.explainers.core.chunk_perturbed_copies_by_memory import (
    DEFAULT_MEMORY_BUDGET_BYTES,
    ActivationBytes,
    compute_memory_budget_of_pass,
    count_copies_that_fit_in_memory,
    measure_activation_bytes,
    process_chunks,
)
from camscope.explainers.core.evaluation_context import check_finite
from camscope.explainers.core.pixel_explainers import MultiPassExplainer
from camscope.hooks.input_gradients import compute_scores_and_input_gradients
from camscope.plurals import plural
from camscope.targets import Score

SAVED_TENSORS_PER_OUTPUT = 2  # a backward pass keeps the output and the input of each module


@dataclass
class PerturbedEvaluator:
    """Evaluates one score on many variants of single samples of x (N,C,*S).

    Different samples never share a pass, but `score_input` scores an input once for all samples with the same class.
    """

    explainer: MultiPassExplainer
    x: Tensor
    score: Score
    clean_scores: Tensor = field(init=False)  # (N,): the score of x itself

    def __post_init__(self) -> None:
        with measure_activation_bytes(self.score.model, {"": self.score.model}, self.x) as widths:
            self.clean_scores = self.score(self.x).detach()
        check_finite("the score", self.clean_scores, self.explainer.on_nonfinite)
        self.score.check_extra_inputs(self.x)
        self._activation_bytes: ActivationBytes = widths[""]
        self._scored_inputs: list[tuple[int, Tensor, Tensor]] = []  # sample, input and score of `score_input`

    def score_variants(self, sample: int, variants: Tensor, *, as_probability: bool = False) -> Tensor:
        """Compute the scores (R,) or class probabilities of R perturbed copies (R,C,*S) of one sample."""
        values = self._compute_scores_of_variants(sample, variants, as_probability).detach()
        check_finite("the score of a changed input", values, self.explainer.on_nonfinite)
        return values

    def score_input(self, sample: int, x: Tensor) -> Tensor:
        """Return the score of an input (C,*S) for the target of a sample. A known score is not computed again."""
        for scored_sample, scored_input, score in self._scored_inputs:
            if self._have_equal_targets(sample, scored_sample) and torch.equal(x, scored_input):
                return score
        score = self.score_variants(sample, x[None])[0]
        self._scored_inputs.append((sample, x, score))
        return score

    def _have_equal_targets(self, first: int, second: int) -> bool:
        """Return whether two samples have the same target. An input then has the same score for both samples.

        Their targets must be classes.
        """
        score, classes = self.score, self.score.classes
        if first == second:
            return True
        targets = score.target if isinstance(score.target, list) else [score.target]
        are_classes = all(target is None or isinstance(target, int | str) for target in targets)
        if self.explainer.mode != "eval" or classes is None or not are_classes or score.extra_model_inputs:
            return False
        return bool(classes[first] == classes[second])

    def compute_scores_and_gradients(
        self, sample: int, variants: Tensor, *, as_probability: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Compute scores or probabilities (R,) of R perturbed copies of a sample, and their gradients (R,C,*S)."""
        (values,), (gradients,) = compute_scores_and_input_gradients(
            variants, lambda x: [self._compute_scores_of_variants(sample, x, as_probability)]
        )
        check_finite("the gradient at the input", gradients, self.explainer.on_nonfinite)
        return values, gradients

    def process_chunks(
        self,
        sample: int,
        count: int,
        process_chunk: Callable[[slice], bool | None],
        *,
        with_gradients: bool = False,
        chunk_size: int | None = None,
    ) -> int:
        """Process `count` steps of one sample chunk by chunk, and report progress. Return how many steps were processed.

        `process_chunk` is called with one slice after another. If it returns True, the loop ends.
        """
        with self.track_sample_steps(sample, count) as advance:

            def process_and_advance(part: slice) -> bool | None:
                enough = process_chunk(part)
                advance(part.stop - part.start)
                return enough

            return process_chunks(
                count, chunk_size or self.choose_chunk_size(with_gradients=with_gradients), process_and_advance
            )

    def track_sample_steps(self, sample: int, n_steps: int) -> AbstractContextManager[Callable[[int], None]]:
        """Return a context manager that counts the finished steps of one sample, for the progress bar and errors."""
        what = f"{self.explainer.composed_name}, image {sample + 1} of {len(self.x)}"
        return track_steps(what, n_steps, self.explainer.progress)

    def choose_chunk_size(self, *, with_gradients: bool = False) -> int:
        """Return how many perturbed copies of a sample run in one pass: `batch_size`, or as many as fit into memory."""
        if self.explainer.batch_size is not None:
            return self.explainer.batch_size
        n_samples, device = len(self.x), self.x.device
        if not with_gradients:
            return count_copies_that_fit_in_memory(max(1, self._activation_bytes.largest_in_model // n_samples), device)
        saved_bytes = max(1, SAVED_TENSORS_PER_OUTPUT * self._activation_bytes.sum_of_outputs // n_samples)
        return max(1, compute_memory_budget_of_pass(device, 2 * DEFAULT_MEMORY_BUDGET_BYTES) // saved_bytes)

    def _compute_scores_of_variants(self, sample: int, variants: Tensor, as_probability: bool) -> Tensor:
        sample_index = torch.full((len(variants),), sample, dtype=torch.long, device=self.x.device)
        read = self.score.probability if as_probability else self.score.read_score
        return read(self.score.forward(variants, sample_index), len(variants), sample_index)


@contextmanager
def track_steps(description: str, n_steps: int, show_progress: bool) -> Iterator[Callable[[int], None]]:
    """Count finished steps for the progress bar and error messages. Yield a function that adds to the count."""
    done = 0

    def add_finished_steps(steps: int) -> None:
        """Add to the count of finished steps, and move the progress bar."""
        nonlocal done
        done += steps
        if progress_bar is not None:
            progress_bar.update(task, advance=steps)

    progress_bar = None
    if show_progress:
        from rich.progress import Progress

        progress_bar = Progress(transient=True)
        task = progress_bar.add_task(description, total=n_steps)
        progress_bar.start()
    try:
        yield add_finished_steps
    except BaseException as error:
        error.add_note(f"{description}: stopped after {done} of {plural(n_steps, 'step')}")
        raise
    finally:
        if progress_bar is not None:
            progress_bar.stop()
