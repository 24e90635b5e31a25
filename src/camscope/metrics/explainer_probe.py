"""Probe: an explainer and one question, fixed on the clean input, so that altered inputs and models are asked the same."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from camscope.errors import InputError, TargetError
from camscope.explainers.core.base import Explainer
from camscope.explainers.core.dispatch import run
from camscope.explainers.core.evaluation_context import asking, survey
from camscope.metrics.base import Floats
from camscope.targets import Question, Score

AT_ONCE = 16  # inputs of one pass


@dataclass(frozen=True)
class Probe:
    """What is asked of each sample of x (N,C,*S), and the model's clean answer: `chances` (N,).

    What the explainer chooses for itself, such as its layer, is chosen on the clean input, too. A chance is the softmax of
    the class; of a question that is not one class's, the score. `classes`: how many the model tells apart; None where its
    output is none of classes.
    """

    tool: Explainer
    x: Tensor
    score: Score
    chances: Floats
    classes: int | None

    @classmethod
    def of(cls, tool: Explainer, x: Tensor, target: Question = None) -> "Probe":
        """One forward pass settles the question; `target`: see Score."""
        with asking(survey(tool.model), tool, x) as asked:
            score = asked.score(tool.asked(target))
            output = score.forward(asked.x)
            chances = score.chance(output, len(asked.x))
            tool = tool.settled(asked.x, score)
        logits = score.logits
        return cls(tool, x, score, _array(chances), None if logits is None else logits.shape[1])

    def questions(self, owners: Sequence[int]) -> Any:
        """The question of each sample that is named, as `attribute` takes them."""
        pairs, target = self.score.pairs, self.score.target
        if pairs is not None and self.score.classes is not None:
            return pairs[list(owners), 0].tolist()
        if isinstance(target, list):
            return [target[owner] for owner in owners]
        if callable(target) and len(self.x) > 1 and list(owners) != list(range(len(self.x))):
            raise TargetError("a callable target is asked of one image at a time here: pass x of one sample")
        return target

    def maps(self, x: Tensor, owners: Sequence[int], at_once: int = AT_ONCE) -> Floats:
        """(R,C,*S) -> (R,*s): maps of versions of the samples `owners` (R,), each asked its own sample's question."""
        made = []
        for start in range(0, len(x), at_once):
            part = slice(start, start + at_once)
            made.append(run([self.tool], x[part], [self.questions(owners[part])], warn=False)[0].maps[0].heat)
        return _array(torch.cat(made))

    def chances_of(self, x: Tensor, owners: Sequence[int]) -> Floats:
        """(R,C,*S) -> (R,): the chance of each version's own question."""
        found = []
        with asking(survey(self.tool.model), self.tool, x) as asked:
            for start in range(0, len(asked.x), AT_ONCE):
                part = asked.x[start : start + AT_ONCE]
                rows = torch.tensor(owners[start : start + AT_ONCE], device=part.device)
                found.append(self.score.chance(self.score.forward(part, rows), len(part), rows))
        return _array(torch.cat(found))

    def alone(self, sample: int) -> "Probe":
        """The question about one sample, by itself."""
        return Probe.of(self.tool, self.x[sample : sample + 1], self.questions([sample]))

    def with_tool(self, tool: Explainer) -> "Probe":
        """The same questions, put to another explainer."""
        return replace(self, tool=tool)


def single(x: Tensor) -> Tensor:
    """(1,C,*S): one sample, or an InputError that says so."""
    if x.ndim < 3 or len(x) != 1:
        raise InputError(f"x is {tuple(x.shape)}: expected one sample (1,C,*S); for a batch, call it for each")
    return x


def _array(values: Tensor) -> Floats:
    return np.asarray(values.detach().to("cpu", torch.float64).numpy())
