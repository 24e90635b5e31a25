"""Base classes of methods with one value per input pixel, and the evaluation of many variants of one input."""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from camscope.explainers.core.base import Explainer
from camscope.explainers.core.base_method import AttributionMaps, is_below_precision
from camscope.explainers.core.batching import (
    DEFAULT_MEMORY_BUDGET_BYTES,
    ActivationBytes,
    BatchedMixin,
    count_copies_in_memory,
    measure_activation_bytes,
    process_chunks,
    read_memory_budget,
)
from camscope.explainers.core.evaluation_context import check_finite, check_one_of
from camscope.hooks.gradients import compute_scores_and_input_gradients
from camscope.plurals import plural
from camscope.targets import Score, full_precision

ChannelReduction = Literal["sum", "abs", "max", "l2"]


@dataclass(kw_only=True, eq=False, repr=False)
class PixelExplainer(Explainer):
    """A method that computes a number for each channel of each input pixel.

    Args:
        channel_reduction: How the channels of a pixel become one number. "sum" keeps the signs, "abs" sums the absolute
            values, "max" takes the largest absolute value, "l2" the root of the sum of squares.

    """

    channel_reduction: ChannelReduction = "sum"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_one_of("channel_reduction", self.channel_reduction, "sum", "abs", "max", "l2")

    def describe_summands(self) -> str:
        """Return a description of the summed values: the pixels, or the values before `channel_reduction`."""
        if self.channel_reduction == "sum":
            return "the pixels' values"
        return f"the values, before channel_reduction={self.channel_reduction!r},"

    def reduce_channels(self, values: Tensor) -> Tensor:
        """Reduce values (N,C,*S) to one value per pixel (N,*S)."""
        if self.channel_reduction == "sum":
            return values.sum(1)
        if self.channel_reduction == "l2":
            return values.square().sum(1).sqrt()
        return values.abs().sum(1) if self.channel_reduction == "abs" else values.abs().amax(1)


class InputGradientExplainer(PixelExplainer):
    """A method that uses the gradient at the input: one forward pass, and one backward pass per score.

    A subclass may override `attribution_from_gradient`.
    """

    backward_passes: ClassVar[str] = "1"

    def attribution_from_gradient(self, x: Tensor, gradient: Tensor) -> Tensor:
        """Compute the attribution (N,C,*S) from the input and its gradient. The default is the gradient."""
        return gradient

    def attribution(self, x: Tensor, score: Score) -> Tensor:
        """Return the map (N,*S) of an input (N,C,*S)."""
        return self.compute_maps(x, [score])[0].attribution

    def compute_maps(self, x: Tensor, scores: Sequence[Score]) -> list[AttributionMaps]:
        """Return the maps of several scores from one forward pass."""
        gradients = self.compute_gradients(x, scores)
        return [self.compute_maps_from_gradient(x, *pair) for pair in zip(scores, gradients, strict=True)]

    def compute_gradients(
        self, x: Tensor, scores: Sequence[Score], on_scores: Callable[[Sequence[Tensor]], object] = len
    ) -> list[Tensor]:
        """Return the gradient (N,C,*S) of each score. `on_scores` is called with the scores before the backward passes."""

        def compute_scores(leaf: Tensor) -> list[Tensor]:
            output = scores[0].forward(leaf)
            values = [
                score.read_score(output, len(x)) for score in scores
            ]  # before any backward pass: it checks targets
            for score_values in values:
                check_finite("the score", score_values.detach(), self.on_nonfinite)
            on_scores(values)
            return values

        gradients = compute_scores_and_input_gradients(x, compute_scores)[1]
        for gradient in gradients:
            check_finite("the gradient at the input", gradient, self.on_nonfinite)
        return gradients

    def compute_maps_from_gradient(self, x: Tensor, score: Score, gradient: Tensor, *notes: str) -> AttributionMaps:
        """Return the map (N,*S) of one score from its gradient (N,C,*S)."""
        attribution = self.reduce_channels(self.attribution_from_gradient(full_precision(x), gradient))
        maps = AttributionMaps(attribution, zero_gradient=~gradient.flatten(1).any(1), notes=notes)
        if score.values is not None:
            maps.constant_score = is_below_precision(score.machine_epsilon, score.values, gradient, full_precision(x))
        return maps


def format_completeness_gap(parts_text: str, total: float, expected_text: str, expected: float) -> str:
    """Return a sentence that compares the sum of the contributions, `total`, with the `expected` sum.

    >>> format_completeness_gap("the pixels' values", 0.8, "the score changes by", 1.0)
    "the pixels' values add up to 0.8, the score changes by 1: the gap is -0.2, 20.00% of it"
    """
    gap = total - expected
    share = f", {abs(gap / expected):.2%} of it" if expected else ""
    return f"{parts_text} add up to {total:.4g}, {expected_text} {expected:.4g}: the gap is {gap:+.2g}{share}"


SAVED_TENSORS_PER_OUTPUT = 2  # a backward pass keeps the output and the input of each module


@dataclass(kw_only=True, eq=False, repr=False)
class MultiPassExplainer(Explainer, BatchedMixin):
    """A method whose pixel map takes many passes of the model. A subclass implements `compute_score_maps`.

    The class constant `alters_input` says whether the model sees altered inputs. Only then do equal scores show that
    the model does not depend on the input.

    Args:
        progress: Whether a progress bar is shown.

    """

    alters_input: ClassVar[bool] = True
    progress: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_one_of("progress", self.progress, True, False)

    def attribution(self, x: Tensor, score: Score) -> Tensor:
        """Return the map (N,*S) of an input (N,C,*S)."""
        return self.compute_maps(x, [score])[0].attribution

    def compute_maps(self, x: Tensor, scores: Sequence[Score]) -> list[AttributionMaps]:
        """Return the maps of several scores, one after another."""
        all_maps = []
        for score in scores:
            with score.score_range_tracked() as score_range:
                maps = self.compute_score_maps(x, score)
            if self.alters_input:
                maps = replace(maps, constant_score=score_range.is_constant(score.machine_epsilon))
            all_maps.append(maps)
        return all_maps

    @abstractmethod
    def compute_score_maps(self, x: Tensor, score: Score) -> AttributionMaps:
        """Return the map (N,*S) of one score, with its notes and diagnostics."""


@dataclass
class PerturbedEvaluator:
    """Evaluates one score on variants of single samples of x (N,C,*S), each in its own passes so that no other affects it."""

    explainer: MultiPassExplainer
    x: Tensor
    score: Score
    clean_scores: Tensor = field(init=False)  # (N,): the score of x itself

    def __post_init__(self) -> None:
        with measure_activation_bytes(self.score.model, {"": self.score.model}) as widths:
            self.clean_scores = self.score(self.x).detach()
        check_finite("the score", self.clean_scores, self.explainer.on_nonfinite)
        self.score.check_extra_inputs(self.x)
        self._activation_bytes: ActivationBytes = widths[""]

    def score_variants(self, sample: int, variants: Tensor, *, as_probability: bool = False) -> Tensor:
        """Return the scores (R,) of variants (R,C,*S) of one sample, or their probabilities."""
        values = self._evaluate(sample, variants, as_probability).detach()
        check_finite("the score of a changed input", values, self.explainer.on_nonfinite)
        return values

    def compute_scores_and_gradients(
        self, sample: int, variants: Tensor, *, as_probability: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Return the scores (R,) of variants of one sample, or their probabilities, and the gradients (R,C,*S)."""
        (values,), (gradients,) = compute_scores_and_input_gradients(
            variants, lambda x: [self._evaluate(sample, x, as_probability)]
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
        """Call `process_chunk` with consecutive slices until it returns True. Return how many of `count` steps were
        processed.
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
        """Count the finished steps of one sample. See `track_steps`."""
        what = f"{self.explainer.composed_name}, image {sample + 1} of {len(self.x)}"
        return track_steps(what, n_steps, self.explainer.progress)

    def choose_chunk_size(self, *, with_gradients: bool = False) -> int:
        """Return how many variants of a sample fit into one pass."""
        if self.explainer.batch_size is not None:
            return self.explainer.batch_size
        n_samples, device = len(self.x), self.x.device
        if not with_gradients:
            return count_copies_in_memory(max(1, self._activation_bytes.largest_in_model // n_samples), device)
        saved_bytes = max(1, SAVED_TENSORS_PER_OUTPUT * self._activation_bytes.sum_of_outputs // n_samples)
        return max(1, read_memory_budget(device, 2 * DEFAULT_MEMORY_BUDGET_BYTES) // saved_bytes)

    def _evaluate(self, sample: int, variants: Tensor, as_probability: bool) -> Tensor:
        sample_index = torch.full((len(variants),), sample, dtype=torch.long, device=self.x.device)
        read = self.score.probability if as_probability else self.score.read_score
        return read(self.score.forward(variants, sample_index), len(variants), sample_index)


@contextmanager
def track_steps(description: str, n_steps: int, show_progress: bool) -> Iterator[Callable[[int], None]]:
    """Yield a function `advance(n)` that counts finished steps, for a progress bar and for error messages."""
    done = 0

    def advance(steps: int) -> None:
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
        yield advance
    except BaseException as error:
        error.add_note(f"{description}: stopped after {done} of {plural(n_steps, 'step')}")
        raise
    finally:
        if progress_bar is not None:
            progress_bar.stop()
