"""Score: the one number per sample that is explained."""

import copy
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from camscope.errors import InputError, TargetError
from camscope.forward_signature import InputKey, call_model, find_input_key
from camscope.plurals import plural
from camscope.pytree import concatenate_structures, iter_leaves, map_leaves
from camscope.targets.base import ClassNameLookup, Target
from camscope.targets.classes import TargetLike, normalize_target, resolve_class_pair
from camscope.targets.outputs import (
    check_one_per_sample,
    check_target_scores,
    class_scores,
    full_precision,
    select_rows,
    warn_if_probabilities,
)
from camscope.targets.score_range import ScoreRange

INPUT_KEY_NOT_READ = InputKey("")  # the signature of the model has not been read yet
INTEGER_TYPE_NAMES = {  # as torch spells them in errors
    torch.uint8: ("byte", "unsigned char"),
    torch.int8: ("char",),
    torch.int16: ("short",),
    torch.int32: ("int",),
    torch.int64: ("long",),
}
FLOAT_TYPE_NAMES = {
    torch.float64: "double",
    torch.float32: "float",
    torch.float16: "half",
    torch.bfloat16: "bfloat16",
}  # torch's


class Score:
    """The number explained, one per sample (N,).

    The first, clean call fixes the classes, so a perturbed input never changes the question.

    `target`: a class index; a class name, one of `class_names`; a Difference of two; None, each sample's top class; a
    sequence or tensor (N,) with one of these per sample; a Target, such as Region, Box or Similarity; or any callable
    output -> (N,). `args`, `kwargs`: handed to the model with x. `input_key`: see `signatures.input_key_of`.
    `frames_first`: the model takes (N,T,C,H,W) where x is (N,C,T,H,W). `classes` (N,): known after the first call, None
    where the score is not one class's.
    Raises TargetError: on a bad kind of target at once, on a class that the output does not have at the first call.

    >>> score = Score(nn.Identity(), ["dog", None], class_names=["cat", "dog"])
    >>> score(torch.tensor([[3.0, 1.0], [5.0, 2.0]])).tolist()
    [1.0, 5.0]
    >>> score.label_of(0), score.label_of(1)
    ('dog', 'cat')
    """

    def __init__(
        self,
        model: nn.Module,
        target: TargetLike = None,
        *,
        class_names: Sequence[str] | None = None,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        forward_context: Callable[[], AbstractContextManager[None]] = nullcontext,
        input_size: Sequence[int] = (),
        input_key: str | None = None,
        frames_first: bool | None = None,
        one_sample_per_pass: bool = False,
    ) -> None:
        if isinstance(target, type):
            raise TargetError(
                f"the target is the class {target.__name__} itself: pass one of it, e.g. {target.__name__}(…)"
            )
        self.model, self._args, self._kwargs, self.forward_context = model, args, dict(kwargs or {}), forward_context
        self.target = target if callable(target) else _make_per_sample_target(target) or normalize_target(target)
        if isinstance(self.target, Target):
            self.target = self.target.bind_model(model)
        self.class_names = class_names
        self._input_key, self._frames_first = input_key, frames_first
        self._resolved_input_key: InputKey | None = INPUT_KEY_NOT_READ
        self.one_sample_per_pass = (
            one_sample_per_pass  # the model's samples affect one another: each row has a pass of its own
        )
        self._input_size = tuple(
            input_size
        )  # of the model's input; that of the score's own first pass where it is not given
        self.classes: Tensor | None = None
        self._class_pairs: Tensor | None = None
        self.logits: Tensor | None = None
        self.values: Tensor | None = None
        self._score_range: ScoreRange | None = None
        self.dtype = torch.float32  # what the model gave the score in; read() makes at least float32 of it

    def __call__(self, x: Tensor, sample_index: Tensor | None = None) -> Tensor:
        """(N,): run the model on x (N,C,*S) and read the score off its output.

        `sample_index` (R,): x holds R versions of the samples first asked about, row i one of sample owners[i]: each is asked
        its own sample's question, and what else the model takes for each sample goes with it.
        """
        return self.read_score(self.forward(x, sample_index), len(x), sample_index)

    def forward(self, x: Tensor, sample_index: Tensor | None = None) -> Any:
        """The model's whole output, off which several scores can be read; InputError if it changed x on the way."""
        if self.one_sample_per_pass and len(x) > 1:
            self._input_size = tuple(x.shape[2:])
            return concatenate_structures([self._forward_row(x, row, sample_index) for row in range(len(x))])
        version, self._input_size = x._version, tuple(x.shape[2:])
        args, kwargs = (self._args, self._kwargs) if sample_index is None else self._select_extra_inputs(sample_index)
        with _dtype_errors_converted(self.model, x), self.forward_context():
            if self._resolved_input_key is INPUT_KEY_NOT_READ:
                self._resolved_input_key = find_input_key(self.model, self._input_key)
            output = call_model(
                self.model, x, args, kwargs, self._resolved_input_key, frames_first=bool(self._frames_first)
            )
        if x._version != version:
            raise InputError(
                "the model changes its input in place (a tensor that you passed is changed now), so a second pass would see "
                "another image; let its forward begin with x = x.clone()"
            )
        return output

    def _forward_row(self, x: Tensor, row: int, sample_index: Tensor | None) -> Any:
        if sample_index is None and self.values is None:  # the first pass: each has its own extra inputs
            sample_index = torch.tensor([row], device=x.device)
            alone = copy.copy(self)
            alone._args, alone._kwargs = self._select_extra_inputs(sample_index, len(x))
            return alone.forward(x[row : row + 1])
        sample_index = torch.arange(len(x), device=x.device) if sample_index is None else sample_index
        return self.forward(x[row : row + 1], sample_index[row : row + 1])

    def flipped(self, flips: Sequence[int], size: Sequence[int]) -> "Score":
        """The same number, once it is settled, of the input with these spatial axes flipped, then brought to `size`."""
        if not isinstance(self.target, Target):
            return self
        other = copy.copy(self)
        other.target = self.target.flipped(flips, size)
        return other

    def combined_class_score(self, x: Tensor) -> Tensor:
        """(N,): all classes at once, in fixed proportions, or what a callable target reads: for choosing a layer."""
        if callable(self.target):
            return self(x)
        logits = class_scores(self.forward(x))
        return logits @ torch.arange(1, logits.shape[1] + 1, dtype=logits.dtype, device=logits.device).cos()

    @contextmanager
    def score_range_tracked(self) -> Iterator[ScoreRange]:
        """How far the scores go that are read inside the `with`, and the clean ones that are known before."""
        outer, self._score_range = self._score_range, ScoreRange()
        if self.values is not None:
            self._score_range.add("score", self.values, None, len(self.values))
        try:
            yield self._score_range
        finally:
            self._score_range = outer

    @property
    def machine_epsilon(self) -> float:
        """Of the type in which the model gave the score: the least step from 1."""
        return torch.finfo(self.dtype).eps

    def read_score(self, output: object, n_rows: int, sample_index: Tensor | None = None) -> Tensor:
        """(N,): the score in an output of the model for so many rows; `sample_index`: see `__call__`."""
        values = self._read_full_precision(output, n_rows, sample_index)
        self._update_score_range("score", values, sample_index)
        return values

    def _read_full_precision(self, output: object, n_rows: int, sample_index: Tensor | None) -> Tensor:
        raw = self._read_raw(output, n_rows, sample_index)
        values, self.dtype = full_precision(raw), raw.dtype
        if self.values is None:
            self.values = values.detach()
        return values

    def _update_score_range(self, kind: str, values: Tensor, sample_index: Tensor | None) -> None:
        if self._score_range is not None and self.values is not None:
            self._score_range.add(kind, values, sample_index, len(self.values))

    def probability(self, output: object, n_rows: int, sample_index: Tensor | None = None) -> Tensor:
        """(N,): the class's probability, the softmax of all; of a difference, that of the one against the other.

        Without rivals, of a callable or of one output, the score itself.
        """
        values = self._read_full_precision(output, n_rows, sample_index)
        if callable(self.target) or self._class_pairs is None or (logits := class_scores(output)).shape[1] == 1:
            self._update_score_range("score", values, sample_index)
            return values
        pairs = self._class_pairs if sample_index is None else self._class_pairs[sample_index]
        chances = torch.where(pairs[:, 1] >= 0, values.sigmoid(), (values - full_precision(logits).logsumexp(1)).exp())
        self._update_score_range("probability", chances, sample_index)
        return chances

    def check_extra_inputs(self, x: Tensor) -> None:
        """An InputError where an argument (N,) of the model is not one number a sample of x (N,C,*S), after all.

        The samples in the opposite order must keep their scores.
        """
        rows = [leaf for _, leaf in iter_leaves((self._args, self._kwargs)) if leaf.ndim == 1 and len(leaf) == len(x)]
        if len(x) == 1 or not rows or self.values is None:
            return
        back = torch.arange(len(x), device=x.device).flip(0)
        off = (self(x[back], back) - self.values[back]).abs().max()
        if bool(off > 0.01 * self.values.abs().max()):
            raise InputError(
                f"an argument of the model has {plural(len(x), 'entry')}, as the batch has samples, and yet is not one a sample: "
                f"explain one image at a time"
            )

    def _select_extra_inputs(self, sample_index: Tensor, n_samples: int | None = None) -> tuple[Any, dict[str, Any]]:
        """What the model takes beside x, for such rows: a tensor with one entry a sample gets one a row."""
        if n_samples is None:
            n_samples = 0 if self.values is None else len(self.values)

        def of_its_owner(value: Tensor) -> Tensor:
            return value[sample_index.to(value.device)] if value.ndim > 0 and len(value) == n_samples else value

        return map_leaves(self._args, of_its_owner), map_leaves(self._kwargs, of_its_owner)

    def _read_raw(self, output: object, n_rows: int, sample_index: Tensor | None) -> Tensor:
        if isinstance(self.target, PerSampleTarget) and len(self.target.targets) != n_rows:
            raise TargetError(
                f"{plural(len(self.target.targets), 'target')} for a batch of {n_rows}: give one, or one per sample"
            )
        if isinstance(self.target, Target) and self.values is None:
            self.target = self.target.resolve(output, self._input_size, self.class_names)
        if callable(self.target) and sample_index is not None:
            return self._score_in_rounds(self.target, output, sample_index)
        if callable(self.target):
            return check_one_per_sample(check_target_scores(self.target(output), self.target), n_rows)
        logits = check_one_per_sample(class_scores(output), n_rows)
        if self._class_pairs is None:
            self._class_pairs = self._resolve_class_pairs(logits.detach())
            self.classes = None if bool((self._class_pairs[:, 1] >= 0).any()) else self._class_pairs[:, 0]
            self.logits = logits.detach()
            warn_if_probabilities(self.logits)
        pairs = self._class_pairs if sample_index is None else self._class_pairs[sample_index]
        if len(pairs) != len(logits):
            raise TargetError(f"the output has {plural(len(logits), 'sample')}; the question was asked of {len(pairs)}")
        values = logits.gather(1, pairs[:, :1])[:, 0]
        if self.classes is not None:
            return values
        others = logits.gather(1, pairs[:, 1:].clamp(min=0))[:, 0]
        return torch.where(pairs[:, 1] >= 0, values - others, values)

    @classmethod
    def concatenate(cls, scores: "Sequence[Score]") -> "Score":
        """The scores of several calls of one sample each as those of one call."""
        first = copy.copy(scores[0])
        for name in ("values", "logits", "classes", "_class_pairs"):
            parts = [getattr(one, name) for one in scores]
            setattr(first, name, torch.cat(parts) if all(part is not None for part in parts) else None)
        if callable(first.target):
            first.target = PerSampleTarget.from_scores(scores)
        return first

    @property
    def class_pairs(self) -> Tensor | None:
        """(N,2): each sample's class, and the class it is held against or -1; None for a callable target."""
        return self._class_pairs

    def _score_in_rounds(self, target: Callable[[Any], Tensor], output: object, sample_index: Tensor) -> Tensor:
        """(R,): what a callable says of each row in its own sample's place: it may hold something of each sample."""
        samples = len(sample_index) if self.values is None else len(self.values)
        found: list[Tensor] = []
        for rows, chosen in _iter_rounds(sample_index, samples):
            asked = select_rows(output, chosen, len(sample_index))
            found.append(check_one_per_sample(check_target_scores(target(asked), target), samples)[sample_index[rows]])
        order = torch.cat([rows for rows, _ in _iter_rounds(sample_index, samples)])
        return torch.cat(found)[order.argsort()]

    def to_cpu(self) -> "Score":
        """The same questions and answers, where they are read one by one without waiting for a GPU."""
        one = copy.copy(self)
        one.values, one.logits, one._class_pairs, one.classes = (
            value if value is None else value.detach().cpu()
            for value in (self.values, self.logits, self._class_pairs, self.classes)
        )
        return one

    def class_index(self, sample: int) -> int | None:
        """Class index explained in one sample; None for a difference, a callable target, or before the first call."""
        first, second = self._class_pair(sample)
        return first if second is None else None

    def describe(self, sample: int) -> str:
        """The question of one sample in words: its class name, `class 3`, `log-odds of a over b`, or what a callable says."""
        first, second = self._class_pair(sample)
        if isinstance(self.target, Target):
            return self.target.describe(sample, self.class_name)
        if first is None:
            name = str(getattr(self.target, "__name__", type(self.target).__name__))
            return "the output of a function" if name == "<lambda>" else name
        return (
            self.class_name(first)
            if second is None
            else f"log-odds of {self.class_name(first)} over {self.class_name(second)}"
        )

    def _class_pair(self, sample: int) -> tuple[int | None, int | None]:
        """Class of one sample, and the class it is held against; None for neither."""
        if self._class_pairs is None:
            return None, None
        first, second = self._class_pairs[sample].tolist()
        return first, second if second >= 0 else None

    def probabilities(self) -> Tensor | None:
        """(N,K): probability of each class: the softmax of logits, an output of probabilities as it is, else NaN.

        None of a callable target and where there is one output.
        """
        if self.logits is None or self.logits.shape[1] == 1:
            return None
        rows = self.logits.double()
        scores, whole = ((rows < 0) | (rows > 1)).any(1, keepdim=True), (rows.sum(1, keepdim=True) - 1).abs() < 1e-3
        return torch.where(scores, rows.softmax(1), torch.where(whole, rows, torch.nan))

    def class_name(self, index: int) -> str:
        """Category of a class, or `class 3` where categories are not known."""
        named = self.class_names is not None and (self.logits is None or len(self.class_names) == self.logits.shape[1])
        return self.class_names[index] if self.class_names and named else f"class {index}"

    def _resolve_class_pairs(self, logits: Tensor) -> Tensor:
        """(N,2) int64: the class of each sample, and the class it is held against or -1."""
        target: Any = self.target
        wanted = list(target) if isinstance(target, list) else [target] * len(logits)
        if len(wanted) != len(logits):
            raise TargetError(
                f"{plural(len(wanted), 'target')} for a batch of {len(logits)}: give one, or one per sample"
            )
        top = logits.argmax(1).tolist()
        pairs = [
            resolve_class_pair(one, best, logits.shape[1], self.class_names)
            for one, best in zip(wanted, top, strict=True)
        ]
        return torch.tensor(pairs, device=logits.device)


@contextmanager
def _dtype_errors_converted(model: nn.Module, x: Tensor) -> Iterator[None]:
    """An InputError for torch's complaint of two types that meet, where no parameter is of the input's type.

    Only when it fails: a model may bring its input to its own type itself.
    """
    try:
        yield
    except RuntimeError as error:
        own = list(dict.fromkeys(value.dtype for value in model.parameters() if value.is_floating_point()))
        said = set(re.findall("bfloat16|double|float|half", str(error).lower()))
        named = any(name in str(error).lower() for name in INTEGER_TYPE_NAMES.get(x.dtype, ()))
        if named and not said.isdisjoint(FLOAT_TYPE_NAMES.get(dtype, "") for dtype in own):
            raise InputError(
                f"the input is {_dtype_name(x.dtype)}, and the model does not convert it: pass x.float(), or the floats that the "
                f"model's preprocessing makes of it"
            ) from error
        if (
            x.dtype in own
            or FLOAT_TYPE_NAMES.get(x.dtype) not in said
            or said.isdisjoint(FLOAT_TYPE_NAMES.get(dtype, "") for dtype in own)
        ):
            raise
        raise InputError(
            f"the input is {_dtype_name(x.dtype)}, the model's parameters are {' and '.join(map(_dtype_name, own))}: pass "
            f"x.to(torch.{_dtype_name(own[0])}), or the model as model.to(torch.{_dtype_name(x.dtype)})"
        ) from error


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class PerSampleTarget(Target):
    """Another question of each sample: a list in which one at least is a callable."""

    def __init__(self, targets: Sequence[TargetLike]) -> None:
        self.targets = list(targets)
        self._scores: list[Score] = []

    def bind_model(self, model: nn.Module) -> "PerSampleTarget":
        """Each question, for that model."""
        return PerSampleTarget([one.bind_model(model) if isinstance(one, Target) else one for one in self.targets])

    @classmethod
    def from_scores(cls, scores: Sequence[Score]) -> "PerSampleTarget":
        """The questions of scores that are settled, one a sample."""
        known = cls([score.target for score in scores])
        known._scores = list(scores)
        return known

    @property
    def dense(self) -> bool:
        """Whether one of them is."""
        return any(isinstance(one, Target) and one.dense for one in self.targets)

    def flipped(self, flips: Sequence[int], size: Sequence[int]) -> "PerSampleTarget":
        """Each question there."""
        other = PerSampleTarget(self.targets)
        other._scores = [score.flipped(flips, size) for score in self._scores]
        return other

    def resolve(self, output: Any, input_size: Sequence[int], class_names: Sequence[str] | None) -> "PerSampleTarget":
        """Each question, settled on its own sample."""
        known = PerSampleTarget(self.targets)
        known._scores = [
            Score(nn.Identity(), one, class_names=class_names, input_size=input_size) for one in self.targets
        ]
        known(output)
        return known

    def __call__(self, output: Any) -> Tensor:
        """(N,)"""
        count = len(self.targets)
        parts = (select_rows(output, torch.tensor([i], device="cpu"), count) for i in range(count))
        return torch.cat([score.read_score(part, 1) for score, part in zip(self._scores, parts, strict=True)])

    def describe(self, sample: int, class_name: ClassNameLookup) -> str:
        """Those of its question."""
        return self._scores[sample].describe(0)


class AllClassScores(Score):
    """All class scores at once, (N,classes), where a `Score` has one number a sample; (N,0) of a model that has none."""

    def read_score(self, output: object, n_rows: int, sample_index: Tensor | None = None) -> Tensor:
        """(N,classes): the class scores in an output of the model for so many rows."""
        try:
            logits = class_scores(output)
        except TargetError:
            logits = torch.zeros(n_rows, 0, dtype=torch.float32, device="cpu")
        logits = check_one_per_sample(logits, n_rows)
        if self.values is None:
            self.values = self.logits = logits.detach()
        return logits


def _iter_rounds(sample_index: Tensor, n_samples: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Rows that are the first versions of their samples, then the second ones …, and for each turn a row of every sample."""
    order = sample_index.argsort(stable=True)
    counts = sample_index.bincount(minlength=n_samples)
    place = torch.empty_like(sample_index)
    place[order] = (
        torch.arange(len(sample_index), device=sample_index.device) - (counts.cumsum(0) - counts)[sample_index[order]]
    )
    for turn in range(int(counts.max())):
        rows = (place == turn).nonzero()[:, 0]
        yield (
            rows,
            torch.zeros(n_samples, dtype=torch.long, device=sample_index.device).scatter_(0, sample_index[rows], rows),
        )


def _make_per_sample_target(target: object) -> PerSampleTarget | None:
    """Of a list in which a question is a callable."""
    several = isinstance(target, list | tuple) and any(callable(one) for one in target)
    return PerSampleTarget(target) if several and isinstance(target, list | tuple) else None
