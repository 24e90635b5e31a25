"""PixelExplainer: what every method shares whose map has a number for each channel of the input's own pixels.

How far the parts of a map are from adding up to the number that they are parts of.
Runs: a model on many versions of one input, in passes that fit into memory.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from camscope.explainers.core.base import Explainer
from camscope.explainers.core.batching import BUDGET, InPasses, Widths, copies_within_memory, in_turns, measured
from camscope.explainers.core.evaluation_context import checked_finite, expect_one_of
from camscope.explainers.core.maps import Maps, is_faint
from camscope.hooks.gradients import input_gradients
from camscope.plurals import plural
from camscope.targets import Score, full_precision

Channels = Literal["sum", "abs", "max", "l2"]


@dataclass(kw_only=True, eq=False, repr=False)
class PixelExplainer(Explainer):
    """A number for each channel of each of the input's pixels.

    `channels`: how a pixel's channels become one number: "sum" of them, with their signs; "abs", the sum of their sizes;
    "max", the largest size; "l2", the root of the sum of squares.
    """

    channels: Channels = "sum"

    def __post_init__(self) -> None:
        super().__post_init__()
        expect_one_of("channels", self.channels, "sum", "abs", "max", "l2")

    def parts(self, what: str = "values") -> str:
        """What adds up to something, as a sentence begins: the map, or what it was before `channels` made it."""
        return f"the pixels' {what}" if self.channels == "sum" else f"the {what}, before channels={self.channels!r},"

    def over_channels(self, values: Tensor) -> Tensor:
        """(N,C,*S) -> (N,*S): one number a pixel."""
        if self.channels == "sum":
            return values.sum(1)
        if self.channels == "l2":
            return values.square().sum(1).sqrt()
        return values.abs().sum(1) if self.channels == "abs" else values.abs().amax(1)


class OneGradient(PixelExplainer):
    """What the gradient at the input itself says: one forward pass, one backward pass a score. A method writes `of_gradient`."""

    backwards: ClassVar[str] = "1"

    @abstractmethod
    def of_gradient(self, x: Tensor, gradient: Tensor) -> Tensor:
        """(N,C,*S) twice, at least float32 -> (N,C,*S)."""

    def heat(self, x: Tensor, score: Score) -> Tensor:
        """(N,C,*S) -> (N,*S): see `maps`."""
        return self.maps(x, [score])[0].heat

    def maps(self, x: Tensor, scores: Sequence[Score]) -> list[Maps]:
        """The maps of several scores from one forward pass."""
        return [self.map_of(x, *one) for one in zip(scores, self.gradients(x, scores), strict=True)]

    def gradients(
        self, x: Tensor, scores: Sequence[Score], prepare: Callable[[Sequence[Tensor]], object] = len
    ) -> list[Tensor]:
        """(N,C,*S) of each score; `prepare` is given the scores (N,) before their gradients are taken."""

        def run(leaf: Tensor) -> list[Tensor]:
            output = scores[0].forward(leaf)
            values = [score.read(output, len(x)) for score in scores]  # all questions are checked before any backward
            for one in values:
                checked_finite("the score", one.detach(), self.on_nonfinite)
            prepare(values)
            return values

        found = input_gradients(x, run)[1]
        for gradient in found:
            checked_finite("the gradient at the input", gradient, self.on_nonfinite)
        return found

    def map_of(self, x: Tensor, score: Score, gradient: Tensor, *notes: str) -> Maps:
        """The map (N,*S) of one score's gradient (N,C,*S)."""
        heat = self.over_channels(self.of_gradient(full_precision(x), gradient))
        faint = None if score.values is None else is_faint(score.precision, score.values, gradient, full_precision(x))
        return Maps(heat, zero_gradient=~gradient.flatten(1).any(1), constant_score=faint, notes=notes)


def gap_in_words(parts: str, total: float, whole: str, expected: float) -> str:
    """`parts` add up to `total`; `whole`, which says what they should add up to, is the beginning of a sentence.

    >>> gap_in_words("the pixels' values", 0.8, "the score changes by", 1.0)
    "the pixels' values add up to 0.8, the score changes by 1: the gap is -0.2, 20.00% of it"
    """
    gap = total - expected
    share = f", {abs(gap / expected):.2%} of it" if expected else ""
    return f"{parts} add up to {total:.4g}, {whole} {expected:.4g}: the gap is {gap:+.2g}{share}"


KEPT = 2  # tensors that a backward pass keeps for each that a module hands on: its output, and what it was made of


@dataclass(kw_only=True, eq=False, repr=False)
class ManyRuns(Explainer, InPasses):
    """A map of the input's pixels that takes many runs of the model. A method writes `attributed`.

    `progress`: show a bar while it works. `alters_input`: whether the model sees altered versions of the input; only then
    scores that are all equal show that the model does not depend on it.
    """

    alters_input: ClassVar[bool] = True
    progress: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        expect_one_of("progress", self.progress, True, False)

    def heat(self, x: Tensor, score: Score) -> Tensor:
        """(N,C,*S) -> (N,*S): see `maps`."""
        return self.maps(x, [score])[0].heat

    def maps(self, x: Tensor, scores: Sequence[Score]) -> list[Maps]:
        """The maps of several scores, one after the other."""
        return [self._observed(x, score) for score in scores]

    def _observed(self, x: Tensor, score: Score) -> Maps:
        with score.observed() as scores:
            maps = self.attributed(x, score)
        return replace(maps, constant_score=scores.is_constant(score.precision)) if self.alters_input else maps

    @abstractmethod
    def attributed(self, x: Tensor, score: Score) -> Maps:
        """(N,C,*S) -> the map (N,*S) of one score, and what is known of it."""


@dataclass
class Runs:
    """The model on versions of single samples of x (N,C,*S), for one score whose question a first, clean pass fixed.

    A sample's passes are its own: what its map is made of does not depend on the batch that it came in.
    """

    tool: ManyRuns
    x: Tensor
    score: Score
    values: Tensor = field(init=False)  # (N,): the score of x itself

    def __post_init__(self) -> None:
        with measured(self.score.model, {"": self.score.model}) as widths:
            self.values = self.score(self.x).detach()
        checked_finite("the score", self.values, self.tool.on_nonfinite)
        self.score.expect_companions(self.x)
        self._width: Widths = widths[""]

    def scores(self, sample: int, versions: Tensor, *, chance: bool = False) -> Tensor:
        """(R,C,*S) -> (R,): the score of versions of one sample, or the probability that it means (`Score.chance`)."""
        values = self._asked(sample, versions, chance).detach()
        checked_finite("the score of a changed input", values, self.tool.on_nonfinite)
        return values

    def gradients(self, sample: int, versions: Tensor, *, chance: bool = False) -> tuple[Tensor, Tensor]:
        """(R,C,*S) -> (R,), (R,C,*S): the score, or probability, of versions of one sample, and its gradient there."""
        (values,), (gradients,) = input_gradients(versions, lambda x: [self._asked(sample, x, chance)])
        checked_finite("the gradient at the input", gradients, self.tool.on_nonfinite)
        return values, gradients

    def in_turns(
        self,
        sample: int,
        turns: int,
        work: Callable[[slice], bool | None],
        *,
        gradients: bool = False,
        at_once: int | None = None,
    ) -> int:
        """Call `work` with some of so many turns after the other until it returns True -> the turns that were worked off.

        As many at a time as memory allows, or `batch_size`, or `at_once` where a method must; see `chunks.in_turns`. An
        error that ends it says how far it came.
        """
        with self.counted(sample, turns) as advance:

            def counting(part: slice) -> bool | None:
                enough = work(part)
                advance(part.stop - part.start)
                return enough

            return in_turns(turns, at_once or self.at_once(gradients=gradients), counting)

    @contextmanager
    def counted(self, sample: int, steps: int) -> Iterator[Callable[[int], None]]:
        """A function that is told of so many steps of one sample's done; see `counted`."""
        what = f"{self.tool.title}, image {sample + 1} of {len(self.x)}"
        with counted(what, steps, self.tool.progress) as advance:
            yield advance

    def at_once(self, *, gradients: bool = False) -> int:
        """Versions of a sample in one pass."""
        if self.tool.batch_size is not None:
            return self.tool.batch_size
        per_sample = max(1, (KEPT * self._width.total if gradients else self._width.whole) // len(self.x))
        if not gradients:
            return copies_within_memory(per_sample, self.x.device)
        budget = torch.cuda.mem_get_info(self.x.device)[0] // 4 if self.x.device.type == "cuda" else 2 * BUDGET
        return max(1, max(budget, BUDGET) // per_sample)

    def _asked(self, sample: int, versions: Tensor, chance: bool) -> Tensor:
        owners = torch.full((len(versions),), sample, dtype=torch.long, device=self.x.device)
        read = self.score.chance if chance else self.score.read
        return read(self.score.forward(versions, owners), len(versions), owners)


@contextmanager
def counted(what: str, total: int, shown: bool) -> Iterator[Callable[[int], None]]:
    """A function that is told of so many steps done; a bar where that is wanted; errors say how far it came."""
    done = 0

    def advance(steps: int) -> None:
        nonlocal done
        done += steps
        if bar is not None:
            bar.update(task, advance=steps)

    bar = None
    if shown:
        from rich.progress import Progress

        bar = Progress(transient=True)
        task = bar.add_task(what, total=total)
        bar.start()
    try:
        yield advance
    except BaseException as error:
        error.add_note(f"{what}: stopped after {done} of {plural(total, 'step')}")
        raise
    finally:
        if bar is not None:
            bar.stop()
