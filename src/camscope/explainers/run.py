"""One call: several methods asked several questions of one input, from as few passes as possible."""

from collections.abc import Callable, Hashable, Sequence, Sized
from dataclasses import dataclass
from typing import cast

from torch import Tensor

from camscope.errors import ModelError, TargetError, warn_caller
from camscope.explainers.constancy import flag_constant_scores
from camscope.explainers.inputs import ALONE, Companions
from camscope.explainers.maps import Maps, stacked, statuses
from camscope.explainers.method import Method
from camscope.explainers.scope import (
    Survey,
    asking,
    checked_finite,
    expect_differentiable,
    interacting,
    survey,
    weight_versions,
    weights_key,
)
from camscope.explanation import MEANING, OK
from camscope.targets import Question, Score
from camscope.wording import plural

CHANGED = "the model's weights changed during the call, as where another thread trains it: the map mixes both models"
ONE_BY_ONE = "the samples of a batch see one another in this model: each was explained by itself"

Watch = Callable[[Sequence[Method]], None]  # told which methods work next: those that share a pass, or one alone


@dataclass(frozen=True)
class Run:
    """What a call gives of one method: the model as it was found, and each question with its maps."""

    known: Survey
    scores: list[Score]
    maps: list[Maps]


def run(
    tools: Sequence[Method],
    x: Tensor,
    targets: Sequence[Question],
    companions: Companions = ALONE,
    watch: Watch | None = None,
    *,
    warn: bool = True,
) -> list[Run]:
    """[method]: the maps of every question about one input x (N,C,*S). `warn`: of maps that are flagged.

    Where the samples of a batch see one another in the model, each is explained by itself.
    """
    known = survey(tools[0].model)
    if any(tool.takes_gradients for tool in tools):
        expect_differentiable(known)
    weights, runs = weight_versions(known.model), dict[int, Run]()
    for numbers in companies(tools):
        company = [tools[t] for t in numbers]
        try:
            each = _answers(company, known, x, targets, companions, watch)
        except RuntimeError as error:  # autograd notices some of it
            if weight_versions(known.model) != weights:
                raise ModelError(f"{CHANGED}; explain copy.deepcopy(model), or wait for the other thread") from error
            raise
        runs.update({t: Run(known, *answer) for t, answer in zip(numbers, each, strict=True)})
    changed = weight_versions(known.model) != weights
    if changed:
        warn_caller(CHANGED)
        for one in (one for each in runs.values() for one in each.maps):
            one.notes = (*one.notes, CHANGED)
    for t, tool in enumerate(tools):
        for one in runs[t].maps:
            checked_finite(f"the map of {tool.title}", one.heat, tool.on_nonfinite)
            for status in sorted({status for status in statuses(one) if status != OK} if warn else ()):
                warn_caller(f"{tool.title}: {MEANING[status]}")
    return [runs[t] for t in range(len(tools))]


def _answers(
    tools: Sequence[Method],
    known: Survey,
    x: Tensor,
    targets: Sequence[Question],
    companions: Companions,
    watch: Watch | None,
) -> list[tuple[list[Score], list[Maps]]]:
    """[method]: scores and maps of the methods of one company."""
    first, copies = tools[0], any(hasattr(tool, "batch_size") for tool in tools)
    if interacting(known, first, x, companions):
        rows = range(len(x))
        questions = [[question_at(target, row, len(x)) for target in targets] for row in rows]
        parts = [
            _answers(tools, known, x[row : row + 1], questions[row], companions.of([row], len(x)), watch)
            for row in rows
        ]
        return [_joined([part[t] for part in parts]) for t in range(len(tools))]
    with asking(known, first, x, companions, copies=copies) as asked:
        scores = [asked.score(first.asked(target)) for target in targets]
        several = made(tools, asked.x, scores, watch)
        weights = weights_key(known.model)
        for tool, each in zip(tools, several, strict=True):
            for score, maps in zip(scores, each, strict=True):
                flag_constant_scores(tool, asked.x, score, maps, weights)
        return [(scores, maps) for maps in several]


def question_at(target: Question, row: int, samples: int) -> Question:
    """One sample's question, of those of a batch."""
    single = isinstance(target, str) or getattr(target, "ndim", 1) == 0  # a number in an array has an axis less
    if callable(target) or not isinstance(target, Sized) or single:
        return target
    if len(target) != samples:
        raise TargetError(f"{plural(len(target), 'target')} for a batch of {samples}: give one, or one per sample")
    return cast(Question, target[row : row + 1])


def _joined(parts: Sequence[tuple[list[Score], list[Maps]]]) -> tuple[list[Score], list[Maps]]:
    """Scores and maps of samples that were explained one by one, as those of their batch."""
    scores = [Score.joined(each) for each in zip(*(part[0] for part in parts), strict=True)]
    return scores, [stacked(each, ONE_BY_ONE) for each in zip(*(part[1] for part in parts), strict=True)]


def companies(tools: Sequence[Method]) -> list[list[int]]:
    """The numbers of the methods of each company: of those that can share passes."""
    found: dict[Hashable, list[int]] = {}
    for t, tool in enumerate(tools):
        found.setdefault((tool.mode, *tool.call_settings.values(), tool.company), []).append(t)
    return list(found.values())


def made(tools: Sequence[Method], x: Tensor, scores: Sequence[Score], watch: Watch | None = None) -> list[list[Maps]]:
    """[method][score] of one company: what its shared passes give, then what takes passes of its own.

    What a module keeps on itself is of the last input that it saw: methods that run only the rest of the model, behind a
    layer, come before those that show the model other inputs.
    """
    if watch is not None:
        watch(tools)
    rows, done = tools[0].maps_of(tools, x, scores), dict[int, list[Maps]]()
    for t in sorted(range(len(tools)), key=lambda t: not tools[t].runs_rest):
        done[t] = []
        for one in rows[t]:
            if callable(one) and watch is not None:
                watch([tools[t]])
            done[t].append(one() if callable(one) else one)
    return [done[t] for t in range(len(tools))]
