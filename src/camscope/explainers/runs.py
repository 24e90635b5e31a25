"""Runs: a model on many versions of one input, in passes that fit into memory."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from camscope.explainers.chunks import BUDGET, Widths, copies_within_memory, measured
from camscope.explainers.scope import OnNonFinite, checked_finite
from camscope.hooks.input_gradient import input_gradients
from camscope.targets import Score

KEPT = 2  # tensors that a backward pass keeps for each that a module hands on: its output, and what it was made of


class Asker(Protocol):
    """What a method says of how it wants to run."""

    batch_size: int | None
    progress: bool
    on_nonfinite: OnNonFinite

    @property
    def title(self) -> str:
        """The method as a result names it."""


@dataclass
class Runs:
    """The model on versions of single samples of x (N,C,*S), for one score whose question a first, clean pass fixed.

    A sample's passes are its own: what its map is made of does not depend on the batch that it came in.
    """

    tool: Asker
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

        As many at a time as memory allows, or `batch_size`, or `at_once` where a method must; half as many where memory
        ends, so `work` must add what it found only when it has all of it. An error that ends it says how far it came.
        """
        size, done = at_once or self.tool.batch_size or self._at_once(gradients), 0
        with counted(f"{self.tool.title}, image {sample + 1} of {len(self.x)}", turns, self.tool.progress) as advance:
            while done < turns:
                part = slice(done, min(done + size, turns))
                try:
                    enough = work(part)
                except torch.OutOfMemoryError:
                    if size == 1:
                        raise
                    torch.cuda.empty_cache()
                    size //= 2
                    continue
                done = part.stop
                advance(part.stop - part.start)
                if enough:
                    break
        return done

    def _at_once(self, gradients: bool) -> int:
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
        error.add_note(f"{what}: stopped after {done} of {total} passes")
        raise
    finally:
        if bar is not None:
            bar.stop()
