"""Scores: one question, fixed on the clean input, and the model's answers to it for changed versions of that input."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from camscope.errors import InputError
from camscope.explainers.core.batching import copies_within_memory, in_turns, measured
from camscope.explainers.core.evaluation_context import (
    Asked,
    Mode,
    Precision,
    asking,
    expect_count,
    expect_one_of,
    survey,
)
from camscope.explainers.core.inputs import ALONE, Companions
from camscope.targets import Question
from camscope.targets.outputs import are_probabilities

Of = Literal["probability", "score"]
Versions = Callable[[slice], tuple[Tensor, Tensor]]  # some rows: (R,C,*S), and the image (R,) that each is a version of


@dataclass
class Asking:
    """How the model is asked; see `Method`."""

    mode: Mode
    precision: Precision | None
    categories: Sequence[str] | None
    call_settings: Mapping[str, Any] = field(default_factory=dict)
    takes_integers: bool = False


class Scores:
    """The score of any version of x (N,C,*S), and the probability that it means: see `targets.Score.chance`.

    Of a model that gives probabilities the two are one.

    `clean` (2,N), float64: those of x itself. The class was settled there, so that no change of the input changes the
    question. Calls are without gradients, in passes that fit into memory, or of `batch_size`. Made by `scoring`.
    """

    def __init__(self, asked: Asked, target: Question, batch_size: int | None) -> None:
        self.x, self._score, self.open = asked.x, asked.score(target), True
        self._plain: bool | None = None  # whether the model gives probabilities, as its clean output shows
        with measured(asked.model, {"": asked.model}) as widths:
            self.clean = self._answered(self.x, None)
        self._score.expect_companions(self.x)
        width = max(widths[""].whole, self.x.nbytes) // len(self.x)
        self.at_once = batch_size or copies_within_memory(max(1, width), self.x.device)

    @property
    def precision(self) -> float:
        """The least step from 1 of the type that the model answers in."""
        return torch.finfo(self._score.dtype).eps

    def __call__(self, versions: Tensor, owners: Tensor | None = None) -> Tensor:
        """(R,C,*S) -> (2,R): score and probability. `owners` (R,): whose version each is; None: of each image, in order."""
        if owners is None:
            owners = torch.arange(len(versions), device=versions.device)
        return self._answered(versions, owners)

    def of(self, rows: int, versions: Versions) -> Tensor:
        """(2,rows): of so many versions, a pass of them at a time."""
        found = torch.empty(2, rows, dtype=torch.float64, device=self.x.device)

        def work(part: slice) -> None:
            found[:, part] = self(*versions(part))

        in_turns(rows, self.at_once, work)
        return found

    def _answered(self, x: Tensor, owners: Tensor | None) -> Tensor:
        if not self.open:
            raise InputError("the model is its own again: ask for scores inside the `with scoring(…)`")
        output = self._score.forward(x, owners)
        score = self._score.read(output, len(x), owners)
        if self._plain is None:
            self._plain = self._score.logits is not None and are_probabilities(self._score.logits)
        chance = score if self._plain else self._score.chance(output, len(x), owners)
        return torch.stack([score, chance]).detach().double()


@contextmanager
def scoring(
    model: nn.Module,
    x: Tensor,
    target: Question = None,
    companions: Companions = ALONE,
    *,
    categories: Sequence[str] | None = None,
    mode: Mode = "eval",
    precision: Precision | None = None,
    batch_size: int | None = None,
    call_settings: Mapping[str, Any] | None = None,
) -> Iterator[Scores]:
    """Inside the `with` the model is asked about x (N,C,*S) and versions of it; it is left as it was, as by an explainer.

    `target`: see `Score`. `companions`: what the model takes beside x. `batch_size`: versions in one pass; None: as many as
    fit into memory. The rest: see `Method`.
    """
    expect_one_of("mode", mode, "eval", "as_is")
    expect_one_of("precision", precision, None, "bf16")
    expect_count(None, batch_size=batch_size)
    settings = Asking(mode, precision, categories, call_settings or {})
    with asking(survey(model), settings, x, companions, copies=True) as asked:
        scores = Scores(asked, target, batch_size)
        try:
            yield scores
        finally:
            scores.open = False
