"""Score: the one number per sample that is explained."""

import copy
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from camscope.errors import InputError, TargetError
from camscope.forward_signature import InputKey, call_model, input_key_of
from camscope.plurals import plural
from camscope.pytree import concatenated, leaves, mapped
from camscope.targets.base import Names, Target
from camscope.targets.classes import Question, pair_of, plain
from camscope.targets.outputs import (
    checked_scores,
    class_scores,
    full_precision,
    one_each,
    rows_of,
    warn_of_probabilities,
)
from camscope.targets.score_range import ScoreRange

UNREAD = InputKey("")  # the signature of the model has not been read yet
INTEGERS = {  # as torch spells them in errors
    torch.uint8: ("byte", "unsigned char"),
    torch.int8: ("char",),
    torch.int16: ("short",),
    torch.int32: ("int",),
    torch.int64: ("long",),
}
SPOKEN = {torch.float64: "double", torch.float32: "float", torch.float16: "half", torch.bfloat16: "bfloat16"}  # torch's


class Score:
    """The number explained, one per sample (N,).

    The first, clean call fixes the classes, so a perturbed input never changes the question.

    `target`: a class index; a class name, one of `categories`; a Difference of two; None, each sample's top class; a
    sequence or tensor (N,) with one of these per sample; a Target, such as Region, Box or Similarity; or any callable
    output -> (N,). `args`, `kwargs`: handed to the model with x. `input_key`: see `signatures.input_key_of`.
    `frames_first`: the model takes (N,T,C,H,W) where x is (N,C,T,H,W). `classes` (N,): known after the first call, None
    where the score is not one class's.
    Raises TargetError: on a bad kind of target at once, on a class that the output does not have at the first call.

    >>> score = Score(nn.Identity(), ["dog", None], categories=["cat", "dog"])
    >>> score(torch.tensor([[3.0, 1.0], [5.0, 2.0]])).tolist()
    [1.0, 5.0]
    >>> score.label_of(0), score.label_of(1)
    ('dog', 'cat')
    """

    def __init__(
        self,
        model: nn.Module,
        target: Question = None,
        *,
        categories: Sequence[str] | None = None,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        around: Callable[[], AbstractContextManager[None]] = nullcontext,
        size: Sequence[int] = (),
        input_key: str | None = None,
        frames_first: bool | None = None,
        one_by_one: bool = False,
    ) -> None:
        if isinstance(target, type):
            raise TargetError(
                f"the target is the class {target.__name__} itself: pass one of it, e.g. {target.__name__}(…)"
            )
        self.model, self._args, self._kwargs, self.around = model, args, dict(kwargs or {}), around
        self.target = target if callable(target) else _each(target) or plain(target)
        if isinstance(self.target, Target):
            self.target = self.target.for_model(model)
        self.categories = categories
        self._input_key, self._frames_first = input_key, frames_first
        self._key: InputKey | None = UNREAD
        self.one_by_one = one_by_one  # the model's samples see one another: each row has a pass of its own
        self._size = tuple(size)  # of the model's input; that of the score's own first pass where it is not given
        self.classes: Tensor | None = None
        self._pairs: Tensor | None = None
        self.logits: Tensor | None = None
        self.values: Tensor | None = None
        self._range: ScoreRange | None = None
        self.dtype = torch.float32  # what the model gave the score in; read() makes at least float32 of it

    def __call__(self, x: Tensor, owners: Tensor | None = None) -> Tensor:
        """(N,): run the model on x (N,C,*S) and read the score off its output.

        `owners` (R,): x holds R versions of the samples first asked about, row i one of sample owners[i]: each is asked
        its own sample's question, and what else the model takes for each sample goes with it.
        """
        return self.read(self.forward(x, owners), len(x), owners)

    def forward(self, x: Tensor, owners: Tensor | None = None) -> Any:
        """The model's whole output, off which several scores can be read; InputError if it changed x on the way."""
        if self.one_by_one and len(x) > 1:
            self._size = tuple(x.shape[2:])
            return concatenated([self._forward_row(x, row, owners) for row in range(len(x))])
        version, self._size = x._version, tuple(x.shape[2:])
        args, kwargs = (self._args, self._kwargs) if owners is None else self._companions(owners)
        with _types_named(self.model, x), self.around():
            if self._key is UNREAD:
                self._key = input_key_of(self.model, self._input_key)
            output = call_model(self.model, x, args, kwargs, self._key, frames_first=bool(self._frames_first))
        if x._version != version:
            raise InputError(
                "the model changes its input in place (a tensor that you passed is changed now), so a second pass would see "
                "another image; let its forward begin with x = x.clone()"
            )
        return output

    def _forward_row(self, x: Tensor, row: int, owners: Tensor | None) -> Any:
        if owners is None and self.values is None:  # the first pass: each has its own extra inputs
            owners = torch.tensor([row], device=x.device)
            alone = copy.copy(self)
            alone._args, alone._kwargs = self._companions(owners, len(x))
            return alone.forward(x[row : row + 1])
        owners = torch.arange(len(x), device=x.device) if owners is None else owners
        return self.forward(x[row : row + 1], owners[row : row + 1])

    def viewed(self, flips: Sequence[int], size: Sequence[int]) -> "Score":
        """The same number, once it is settled, of the input with these spatial axes flipped, then brought to `size`."""
        if not isinstance(self.target, Target):
            return self
        other = copy.copy(self)
        other.target = self.target.viewed(flips, size)
        return other

    def overall(self, x: Tensor) -> Tensor:
        """(N,): all classes at once, in fixed proportions, or what a callable target reads: for choosing a layer."""
        if callable(self.target):
            return self(x)
        logits = class_scores(self.forward(x))
        return logits @ torch.arange(1, logits.shape[1] + 1, dtype=logits.dtype, device=logits.device).cos()

    @contextmanager
    def observed(self) -> Iterator[ScoreRange]:
        """How far the scores go that are read inside the `with`, and the clean ones that are known before."""
        outer, self._range = self._range, ScoreRange()
        if self.values is not None:
            self._range.add("score", self.values, None, len(self.values))
        try:
            yield self._range
        finally:
            self._range = outer

    @property
    def precision(self) -> float:
        """Of the type in which the model gave the score: the least step from 1."""
        return torch.finfo(self.dtype).eps

    def read(self, output: object, samples: int, owners: Tensor | None = None) -> Tensor:
        """(N,): the score in an output of the model for so many rows; `owners`: see `__call__`."""
        values = self._values(output, samples, owners)
        self._observe("score", values, owners)
        return values

    def _values(self, output: object, samples: int, owners: Tensor | None) -> Tensor:
        raw = self._read(output, samples, owners)
        values, self.dtype = full_precision(raw), raw.dtype
        if self.values is None:
            self.values = values.detach()
        return values

    def _observe(self, kind: str, values: Tensor, owners: Tensor | None) -> None:
        if self._range is not None and self.values is not None:
            self._range.add(kind, values, owners, len(self.values))

    def chance(self, output: object, samples: int, owners: Tensor | None = None) -> Tensor:
        """(N,): the class's probability, the softmax of all; of a difference, that of the one against the other.

        Without rivals, of a callable or of one output, the score itself.
        """
        values = self._values(output, samples, owners)
        if callable(self.target) or self._pairs is None or (logits := class_scores(output)).shape[1] == 1:
            self._observe("score", values, owners)
            return values
        pairs = self._pairs if owners is None else self._pairs[owners]
        chances = torch.where(pairs[:, 1] >= 0, values.sigmoid(), (values - full_precision(logits).logsumexp(1)).exp())
        self._observe("probability", chances, owners)
        return chances

    def expect_companions(self, x: Tensor) -> None:
        """An InputError where an argument (N,) of the model is not one number a sample of x (N,C,*S), after all.

        The samples in the opposite order must keep their scores.
        """
        rows = [leaf for _, leaf in leaves((self._args, self._kwargs)) if leaf.ndim == 1 and len(leaf) == len(x)]
        if len(x) == 1 or not rows or self.values is None:
            return
        back = torch.arange(len(x), device=x.device).flip(0)
        off = (self(x[back], back) - self.values[back]).abs().max()
        if bool(off > 0.01 * self.values.abs().max()):
            raise InputError(
                f"an argument of the model has {plural(len(x), 'entry')}, as the batch has samples, and yet is not one a sample: "
                f"explain one image at a time"
            )

    def _companions(self, owners: Tensor, samples: int | None = None) -> tuple[Any, dict[str, Any]]:
        """What the model takes beside x, for such rows: a tensor with one entry a sample gets one a row."""
        if samples is None:
            samples = 0 if self.values is None else len(self.values)

        def of_its_owner(value: Tensor) -> Tensor:
            return value[owners.to(value.device)] if value.ndim > 0 and len(value) == samples else value

        return mapped(self._args, of_its_owner), mapped(self._kwargs, of_its_owner)

    def _read(self, output: object, samples: int, owners: Tensor | None) -> Tensor:
        if isinstance(self.target, Each) and len(self.target.questions) != samples:
            raise TargetError(
                f"{plural(len(self.target.questions), 'target')} for a batch of {samples}: give one, or one per sample"
            )
        if isinstance(self.target, Target) and self.values is None:
            self.target = self.target.settled(output, self._size, self.categories)
        if callable(self.target) and owners is not None:
            return self._asked_in_turn(self.target, output, owners)
        if callable(self.target):
            return one_each(checked_scores(self.target(output), self.target), samples)
        logits = one_each(class_scores(output), samples)
        if self._pairs is None:
            self._pairs = self._fixed(logits.detach())
            self.classes = None if bool((self._pairs[:, 1] >= 0).any()) else self._pairs[:, 0]
            self.logits = logits.detach()
            warn_of_probabilities(self.logits)
        pairs = self._pairs if owners is None else self._pairs[owners]
        if len(pairs) != len(logits):
            raise TargetError(f"the output has {plural(len(logits), 'sample')}; the question was asked of {len(pairs)}")
        values = logits.gather(1, pairs[:, :1])[:, 0]
        if self.classes is not None:
            return values
        others = logits.gather(1, pairs[:, 1:].clamp(min=0))[:, 0]
        return torch.where(pairs[:, 1] >= 0, values - others, values)

    @classmethod
    def joined(cls, scores: "Sequence[Score]") -> "Score":
        """The scores of several calls of one sample each as those of one call."""
        first = copy.copy(scores[0])
        for name in ("values", "logits", "classes", "_pairs"):
            parts = [getattr(one, name) for one in scores]
            setattr(first, name, torch.cat(parts) if all(part is not None for part in parts) else None)
        if callable(first.target):
            first.target = Each.of_scores(scores)
        return first

    @property
    def pairs(self) -> Tensor | None:
        """(N,2): each sample's class, and the class it is held against or -1; None for a callable target."""
        return self._pairs

    def _asked_in_turn(self, target: Callable[[Any], Tensor], output: object, owners: Tensor) -> Tensor:
        """(R,): what a callable says of each row in its own sample's place: it may hold something of each sample."""
        samples = len(owners) if self.values is None else len(self.values)
        found: list[Tensor] = []
        for rows, chosen in _turns(owners, samples):
            asked = rows_of(output, chosen, len(owners))
            found.append(one_each(checked_scores(target(asked), target), samples)[owners[rows]])
        order = torch.cat([rows for rows, _ in _turns(owners, samples)])
        return torch.cat(found)[order.argsort()]

    def on_cpu(self) -> "Score":
        """The same questions and answers, where they are read one by one without waiting for a GPU."""
        one = copy.copy(self)
        one.values, one.logits, one._pairs, one.classes = (
            value if value is None else value.detach().cpu()
            for value in (self.values, self.logits, self._pairs, self.classes)
        )
        return one

    def class_of(self, sample: int) -> int | None:
        """Class index explained in one sample; None for a difference, a callable target, or before the first call."""
        first, second = self._pair(sample)
        return first if second is None else None

    def label_of(self, sample: int) -> str:
        """The question of one sample in words: its class name, `class 3`, `log-odds of a over b`, or what a callable says."""
        first, second = self._pair(sample)
        if isinstance(self.target, Target):
            return self.target.words(sample, self.name_of)
        if first is None:
            name = str(getattr(self.target, "__name__", type(self.target).__name__))
            return "the output of a function" if name == "<lambda>" else name
        return (
            self.name_of(first) if second is None else f"log-odds of {self.name_of(first)} over {self.name_of(second)}"
        )

    def _pair(self, sample: int) -> tuple[int | None, int | None]:
        """Class of one sample, and the class it is held against; None for neither."""
        if self._pairs is None:
            return None, None
        first, second = self._pairs[sample].tolist()
        return first, second if second >= 0 else None

    def chances(self) -> Tensor | None:
        """(N,K): probability of each class: the softmax of logits, an output of probabilities as it is, else NaN.

        None of a callable target and where there is one output.
        """
        if self.logits is None or self.logits.shape[1] == 1:
            return None
        rows = self.logits.double()
        scores, whole = ((rows < 0) | (rows > 1)).any(1, keepdim=True), (rows.sum(1, keepdim=True) - 1).abs() < 1e-3
        return torch.where(scores, rows.softmax(1), torch.where(whole, rows, torch.nan))

    def name_of(self, index: int) -> str:
        """Category of a class, or `class 3` where categories are not known."""
        named = self.categories is not None and (self.logits is None or len(self.categories) == self.logits.shape[1])
        return self.categories[index] if self.categories and named else f"class {index}"

    def _fixed(self, logits: Tensor) -> Tensor:
        """(N,2) int64: the class of each sample, and the class it is held against or -1."""
        target: Any = self.target
        wanted = list(target) if isinstance(target, list) else [target] * len(logits)
        if len(wanted) != len(logits):
            raise TargetError(
                f"{plural(len(wanted), 'target')} for a batch of {len(logits)}: give one, or one per sample"
            )
        top = logits.argmax(1).tolist()
        pairs = [pair_of(one, best, logits.shape[1], self.categories) for one, best in zip(wanted, top, strict=True)]
        return torch.tensor(pairs, device=logits.device)


@contextmanager
def _types_named(model: nn.Module, x: Tensor) -> Iterator[None]:
    """An InputError for torch's complaint of two types that meet, where no parameter is of the input's type.

    Only when it fails: a model may bring its input to its own type itself.
    """
    try:
        yield
    except RuntimeError as error:
        own = list(dict.fromkeys(value.dtype for value in model.parameters() if value.is_floating_point()))
        said = set(re.findall("bfloat16|double|float|half", str(error).lower()))
        named = any(name in str(error).lower() for name in INTEGERS.get(x.dtype, ()))
        if named and not said.isdisjoint(SPOKEN.get(dtype, "") for dtype in own):
            raise InputError(
                f"the input is {_spelled(x.dtype)}, and the model does not convert it: pass x.float(), or the floats that the "
                f"model's preprocessing makes of it"
            ) from error
        if x.dtype in own or SPOKEN.get(x.dtype) not in said or said.isdisjoint(SPOKEN.get(dtype, "") for dtype in own):
            raise
        raise InputError(
            f"the input is {_spelled(x.dtype)}, the model's parameters are {' and '.join(map(_spelled, own))}: pass "
            f"x.to(torch.{_spelled(own[0])}), or the model as model.to(torch.{_spelled(x.dtype)})"
        ) from error


def _spelled(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class Each(Target):
    """Another question of each sample: a list in which one at least is a callable."""

    def __init__(self, questions: Sequence[Question]) -> None:
        self.questions = list(questions)
        self._scores: list[Score] = []

    def for_model(self, model: nn.Module) -> "Each":
        """Each question, for that model."""
        return Each([one.for_model(model) if isinstance(one, Target) else one for one in self.questions])

    @classmethod
    def of_scores(cls, scores: Sequence[Score]) -> "Each":
        """The questions of scores that are settled, one a sample."""
        known = cls([score.target for score in scores])
        known._scores = list(scores)
        return known

    @property
    def dense(self) -> bool:
        """Whether one of them is."""
        return any(isinstance(one, Target) and one.dense for one in self.questions)

    def viewed(self, flips: Sequence[int], size: Sequence[int]) -> "Each":
        """Each question there."""
        other = Each(self.questions)
        other._scores = [score.viewed(flips, size) for score in self._scores]
        return other

    def settled(self, output: Any, size: Sequence[int], categories: Sequence[str] | None) -> "Each":
        """Each question, settled on its own sample."""
        known = Each(self.questions)
        known._scores = [Score(nn.Identity(), one, categories=categories, size=size) for one in self.questions]
        known(output)
        return known

    def __call__(self, output: Any) -> Tensor:
        """(N,)"""
        count = len(self.questions)
        parts = (rows_of(output, torch.tensor([i], device="cpu"), count) for i in range(count))
        return torch.cat([score.read(part, 1) for score, part in zip(self._scores, parts, strict=True)])

    def words(self, sample: int, name: Names) -> str:
        """Those of its question."""
        return self._scores[sample].label_of(0)


class EveryClass(Score):
    """All class scores at once, (N,classes), where a `Score` has one number a sample; (N,0) of a model that has none."""

    def read(self, output: object, samples: int, owners: Tensor | None = None) -> Tensor:
        """(N,classes): the class scores in an output of the model for so many rows."""
        try:
            logits = class_scores(output)
        except TargetError:
            logits = torch.zeros(samples, 0, dtype=torch.float32, device="cpu")
        logits = one_each(logits, samples)
        if self.values is None:
            self.values = self.logits = logits.detach()
        return logits


def _turns(owners: Tensor, samples: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Rows that are the first versions of their samples, then the second ones …, and for each turn a row of every sample."""
    order = owners.argsort(stable=True)
    counts = owners.bincount(minlength=samples)
    place = torch.empty_like(owners)
    place[order] = torch.arange(len(owners), device=owners.device) - (counts.cumsum(0) - counts)[owners[order]]
    for turn in range(int(counts.max())):
        rows = (place == turn).nonzero()[:, 0]
        yield rows, torch.zeros(samples, dtype=torch.long, device=owners.device).scatter_(0, owners[rows], rows)


def _each(target: object) -> Each | None:
    """Of a list in which a question is a callable."""
    several = isinstance(target, list | tuple) and any(callable(one) for one in target)
    return Each(target) if several and isinstance(target, list | tuple) else None
