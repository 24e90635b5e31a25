"""Score: the one number per sample that is explained."""

import difflib
import numbers
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from camscope.errors import CamscopeWarning, InputError, TargetError
from camscope.structure import leaves, mapped

Question = int | str | Tensor | Sequence[int | str | None] | Callable[[Any], Tensor] | None


class Score:
    """The number explained, one per sample (N,).

    The first, clean call fixes the classes, so a perturbed input never changes the question.

    `target`: a class index; a class name, one of `categories`; None, each sample's top class; a sequence or tensor (N,)
    with one of these per sample; or any callable output -> (N,). `args`, `kwargs`: handed to the model after x.
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
    ) -> None:
        self.model, self._args, self._kwargs = model, args, dict(kwargs or {})
        self.target = target if callable(target) else _plain(target)
        self.categories = categories
        self.classes: Tensor | None = None
        self.logits: Tensor | None = None
        self.values: Tensor | None = None

    def __call__(self, x: Tensor, owners: Tensor | None = None) -> Tensor:
        """(N,): run the model on x (N,C,*S) and read the score off its output.

        `owners` (R,): x holds R versions of the samples first asked about, row i one of sample owners[i]: each is asked
        its own sample's question, and what else the model takes for each sample goes with it.
        """
        return self.read(self.forward(x, owners), len(x), owners)

    def forward(self, x: Tensor, owners: Tensor | None = None) -> Any:
        """The model's whole output, off which several scores can be read; InputError if it changed x on the way."""
        version = x._version
        args, kwargs = (self._args, self._kwargs) if owners is None else self._companions(owners)
        output = self.model(x, *args, **kwargs)
        if x._version != version:
            raise InputError(
                "the model changes its input in place (a tensor that you passed is changed now), so a second pass would see "
                "another image; let its forward begin with x = x.clone()"
            )
        return output

    def overall(self, x: Tensor) -> Tensor:
        """(N,): all classes at once, in fixed proportions, or what a callable target reads: for choosing a layer."""
        if callable(self.target):
            return self(x)
        logits = class_scores(self.forward(x))
        return logits @ torch.arange(1, logits.shape[1] + 1, dtype=logits.dtype, device=logits.device).cos()

    def read(self, output: object, samples: int, owners: Tensor | None = None) -> Tensor:
        """(N,): the score in an output of the model for so many rows; `owners`: see `__call__`."""
        values = self._read(output, samples, owners)
        if self.values is None:
            self.values = values.detach()
        return values

    def chance(self, output: object, samples: int, owners: Tensor | None = None) -> Tensor:
        """(N,): the class's probability, the softmax of all; the score itself without rivals: a callable, one output."""
        values = self.read(output, samples, owners)
        if callable(self.target) or (logits := class_scores(output)).shape[1] == 1:
            return values
        wide = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
        return (values - wide.logsumexp(1)).exp()

    def _companions(self, owners: Tensor) -> tuple[Any, dict[str, Any]]:
        """What the model takes beside x, for such rows: a tensor with one entry a sample gets one a row."""
        samples = 0 if self.values is None else len(self.values)

        def of_its_owner(value: Tensor) -> Tensor:
            return value[owners.to(value.device)] if value.ndim > 0 and len(value) == samples else value

        return mapped(self._args, of_its_owner), mapped(self._kwargs, of_its_owner)

    def _read(self, output: object, samples: int, owners: Tensor | None) -> Tensor:
        if callable(self.target):
            return _one_each(_checked_scores(self.target(output), self.target), samples)
        logits = _one_each(class_scores(output), samples)
        if self.classes is None:
            self.classes = self._fixed(logits.detach())
            self.logits = logits.detach()
            _warn_of_probabilities(self.logits)
        classes = self.classes if owners is None else self.classes[owners]
        if len(classes) != len(logits):
            raise TargetError(f"the output has {len(logits)} samples; the question was asked of {len(classes)}")
        return logits.gather(1, classes[:, None])[:, 0]

    def class_of(self, sample: int) -> int | None:
        """Class index explained in one sample; None for a callable target or before the first call."""
        return None if self.classes is None else int(self.classes[sample])

    def label_of(self, sample: int) -> str:
        """The question of one sample in words: its class name, `class 3`, or the callable's name."""
        index = self.class_of(sample)
        if index is None:
            return getattr(self.target, "__name__", type(self.target).__name__)
        return self.name_of(index)

    def chances(self, sample: int) -> list[float | None]:
        """(K,): probability of each class: the softmax of logits, an output of probabilities as it is, else None."""
        if self.logits is None or self.logits.shape[1] == 1:
            return [None] * (0 if self.logits is None else 1)
        row = self.logits[sample].double()
        if bool((row < 0).any() | (row > 1).any()):
            return list(row.softmax(0).tolist())
        return list(row.tolist()) if abs(float(row.sum()) - 1) < 1e-3 else [None] * len(row)

    def name_of(self, index: int) -> str:
        """Category of a class, or `class 3` where categories are not known."""
        named = self.categories is not None and (self.logits is None or len(self.categories) == self.logits.shape[1])
        return self.categories[index] if self.categories and named else f"class {index}"

    def _fixed(self, logits: Tensor) -> Tensor:
        """(N,) int64: the class of each sample."""
        target: Any = self.target
        wanted = list(target) if isinstance(target, list) else [target] * len(logits)
        if len(wanted) != len(logits):
            raise TargetError(f"{len(wanted)} targets for a batch of {len(logits)}: give one, or one per sample")
        top = logits.argmax(1).tolist()
        return torch.tensor(
            [best if one is None else self._index(one, logits.shape[1]) for one, best in zip(wanted, top, strict=True)],
            device=logits.device,
        )

    def _index(self, wanted: int | str, classes: int) -> int:
        index = wanted if isinstance(wanted, int) else self._named(wanted, classes)
        if 0 <= index < classes:
            return index
        if classes == 1:
            raise TargetError(
                f"class {index} of a model with one output: its only class is 0 (or None); for the evidence against it "
                f"pass target=lambda output: -output.flatten()"
            )
        raise TargetError(f"class {index} is out of range: the model has {classes} classes (0..{classes - 1})")

    def _named(self, name: str, classes: int) -> int:
        if not self.categories:
            raise TargetError(
                f"class {name!r} by name: the model's categories are not known; pass categories= or an index"
            )
        if len(self.categories) != classes:
            raise TargetError(
                f"class {name!r} by name: {len(self.categories)} categories for a model with {classes} classes; "
                f"pass the index, or the right categories="
            )
        folded = name.casefold()
        exact = [i for i, category in enumerate(self.categories) if category.casefold() == folded]
        found = exact or [i for i, c in enumerate(self.categories) if folded in map(str.strip, c.casefold().split(","))]
        if len(found) == 1:
            return found[0]
        if found:
            choice = ", ".join(f"{i} {self.categories[i]!r}" for i in found)
            raise TargetError(f"class {name!r} is ambiguous: {choice}; pass the index")
        near = difflib.get_close_matches(name, self.categories, n=3, cutoff=0.0)
        raise TargetError(f"no class {name!r}; nearest names: {', '.join(map(repr, near))}")


def class_scores(output: object) -> Tensor:
    """(N,K) class scores in a model's output: a tensor, `.logits`, `["logits"]`, or the only (N,K) float tensor."""
    found = output if isinstance(output, Tensor) else _logits_in(output)
    if not found.is_floating_point():
        raise TargetError(
            f"the model's output is {found.dtype}: there is no gradient of integers; explain a float output"
        )
    if found.ndim < 2:
        return found.reshape(-1, 1)
    if found.ndim > 2 and any(extent > 1 for extent in found.shape[2:]):
        raise TargetError(
            f"the output {tuple(found.shape)} has a class score at every place; pass a target that reduces it, e.g. "
            f"target=lambda output: output[:, 3].mean((1, 2)), or with a mask: (output[:, 3] * mask).sum((1, 2))"
        )
    return found.flatten(1)


def _logits_in(output: object) -> Tensor:
    named = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    if isinstance(named, Tensor):
        return named
    found = [(path, leaf) for path, leaf in leaves(output) if leaf.is_floating_point()]
    flat = [leaf for _, leaf in found if leaf.ndim == 2]
    if len(flat) == 1:
        return flat[0]
    if len(found) == 1:
        return found[0][1]
    listing = ", ".join(f"{'.'.join(map(str, path))} {tuple(leaf.shape)}" for path, leaf in found) or "no float tensor"
    raise TargetError(
        f"which number of a {type(output).__name__} is explained? it holds {listing}; pass target= a callable output -> (N,)"
    )


def _plain(target: object) -> int | str | list[int | str | None] | None:
    """A target as plain ints and names; a bool, a float or anything else is refused by name."""
    if isinstance(target, Tensor) or hasattr(target, "tolist"):
        target = target.tolist()  # numpy and torch alike: scalars become Python numbers, arrays lists
    if isinstance(target, list | tuple):
        plain = [_plain(one) for one in target]
        if any(isinstance(one, list) for one in plain):
            raise TargetError(f"target {target!r} is nested: give one class, or one per sample")
        return plain  # type: ignore[return-value]  # the line above leaves no list inside
    if target is None or isinstance(target, str):
        return target
    if isinstance(target, bool) or not isinstance(target, numbers.Integral):
        raise TargetError(
            f"target {target!r} is a {type(target).__name__}: expected a class index, a class name, None, one of these per "
            f"sample, or a callable output -> (N,)"
        )
    if int(target) < 0:
        raise TargetError(f"class {target} is negative: classes count from 0")
    return int(target)


def _checked_scores(scores: object, target: object) -> Tensor:
    name = getattr(target, "__name__", type(target).__name__)
    if not isinstance(scores, Tensor) or not scores.is_floating_point() or scores.ndim > 1:
        came = f"{scores.dtype} {tuple(scores.shape)}" if isinstance(scores, Tensor) else type(scores).__name__
        raise TargetError(f"the target {name!r} returned {came}; expected one float per sample, shape (N,)")
    return scores.reshape(-1)


def _one_each(scores: Tensor, samples: int) -> Tensor:
    if len(scores) != samples:
        raise TargetError(
            f"{len(scores)} scores for a batch of {samples}: expected one row per sample, from the model (is a batch "
            f"of one squeezed?) or from the target (is the batch summed?)"
        )
    return scores


def _warn_of_probabilities(logits: Tensor) -> None:
    if logits.shape[1] > 1 and bool((logits >= 0).all()):
        sums = logits.double().sum(1)
        if bool(((sums - 1).abs() < 1e-3).all()):
            message = (
                "the model's output looks like probabilities (rows sum to 1): explain the logits before the softmax; "
                "where a probability is near 1 its gradient is rounding noise"
            )
            warnings.warn(message, CamscopeWarning, stacklevel=2)
