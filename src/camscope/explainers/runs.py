"""Runs: a model on many versions of one input, in passes that fit into memory."""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from camscope.explainers.base import Explainer
from camscope.explainers.chunks import BUDGET, InPasses, Widths, copies_within_memory, in_turns, measured
from camscope.explainers.maps import Maps
from camscope.explainers.scope import checked_finite, expect_one_of
from camscope.hooks.input_gradient import input_gradients
from camscope.targets import Score
from camscope.wording import plural

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
