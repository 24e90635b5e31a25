"""Score: the number per sample that a method explains, read from the model's output."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from camscope.errors import InputError, TargetError, warn_caller
from camscope.forward_signature import InputKey, call_model, find_input_key
from camscope.loaded_model_metadata_and_weight_digest import get_loaded_model_metadata
from camscope.plurals import plural
from camscope.pytree import concatenate_structures, iter_leaves, map_leaves, select_argument_rows
from camscope.targets.base import ClassNameLookup, Target
from camscope.targets.class_targets import (
    Difference,
    TargetLike,
    convert_tensor_target_to_list,
    normalize_target,
    resolve_class_pair,
)
from camscope.targets.find_class_scores import (
    ScoreRange,
    are_probabilities,
    class_scores,
    full_precision,
    require_one_row_per_sample,
    require_scores_of_callable_target,
    select_rows,
)
from camscope.targets.forward_errors import forward_errors_explained
from camscope.targets.no_target import NoTarget

INPUT_KEY_NOT_READ = InputKey("")  # the signature of the model has not been read yet
TENSOR_ATTRIBUTES = ("values", "logits", "classes", "class_pairs")  # of a Score, after the first call


class Score:
    """The number that a method explains, one per sample (N,).

    The first call gets the unchanged input and fixes the classes. So a perturbed input never changes the target.

    After the first call, `classes` (N,) holds the class indices. It stays None if the target is not a single class.

    Args:
        model: The model whose output is read.
        target: A class index. A class name of `class_names`. A Difference of two, or None for each sample's top class. A sequence
            or tensor (N,) with one of these per sample. A Target such as Region, Box or Similarity. Or a callable output -> (N,).
        class_names: The name of each class.
        args: Positional arguments of the model after x.
        kwargs: Keyword arguments of the model.
        forward_context: A context manager in which the model runs.
        input_size: Size of the model's input. By default that of the first call.
        input_key: Name of the keyword that takes x. See `forward_signature.find_input_key`.
        frames_first: The model takes (N,T,C,H,W) where x is (N,C,T,H,W).
        one_sample_per_pass: Run every row in a separate forward pass, for a model whose samples influence one another.
        optional_target: For the target None, accept an output without class scores. Then `values` are NaN.

    Raises:
        TargetError: At once for a bad kind of target, at the first call for a class that the output does not have.

    >>> score = Score(nn.Identity(), ["dog", None], class_names=["cat", "dog"])
    >>> score(torch.tensor([[3.0, 1.0], [5.0, 2.0]])).tolist()
    [1.0, 5.0]
    >>> score.describe(0), score.describe(1)
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
        optional_target: bool = False,
    ) -> None:
        if isinstance(target, type):
            name = target.__name__
            raise TargetError(f"the target is the class {name} itself: pass an instance, e.g. {name}(…)")
        target = replace_class_targets(model, target)
        if isinstance(target, list | tuple) and any(map(callable, target)):
            target = PerSampleTarget(target)
        self.model, self._args, self._kwargs, self.forward_context = model, args, dict(kwargs or {}), forward_context
        self.target = target if callable(target) else normalize_target(target)
        if isinstance(self.target, Target):
            self.target = self.target.prepare_for_model(model)
        self.class_names, self.one_sample_per_pass = class_names, one_sample_per_pass
        targets = self.target if isinstance(self.target, list) else [self.target]
        self.optional_target = optional_target and all(item is None for item in targets)
        self._input_key, self._frames_first, self._input_size = input_key, bool(frames_first), tuple(input_size)
        self._resolved_input_key: InputKey | None = INPUT_KEY_NOT_READ
        self.values: Tensor | None = None  # the scores (N,) and class scores (N,K) of the first call
        self.logits: Tensor | None = None
        self.classes: Tensor | None = None
        self.class_pairs: Tensor | None = None  # (N,2): each sample's class, and the one it is compared with or -1
        self._score_range: ScoreRange | None = None
        self.dtype = torch.float32  # of the model's score; read_score() converts it to at least float32

    def __call__(self, x: Tensor, sample_index: Tensor | None = None) -> Tensor:
        """Run the model on x (N,C,*S), and read the score of each sample (N,) from the output.

        Pass `sample_index` (R,) if the R rows of x are variants of the samples of the first call. Row i then gets the target and
        the extra inputs of sample `sample_index[i]`.
        """
        return self.read_score(self.forward(x, sample_index), len(x), sample_index)

    @property
    def extra_model_inputs(self) -> list[Tensor]:
        """The tensors that the model gets as inputs in addition to x."""
        return [leaf for _, leaf in iter_leaves([self._args, self._kwargs]) if isinstance(leaf, Tensor)]

    def forward(self, x: Tensor, sample_index: Tensor | None = None) -> Any:
        """Run the model and return its output. Raise InputError if the model changed x in place."""
        if self.one_sample_per_pass and len(x) > 1:
            self._input_size = tuple(x.shape[2:])
            return concatenate_structures([self._forward_row(x, row, sample_index) for row in range(len(x))])
        version, self._input_size = x._version, tuple(x.shape[2:])
        args, kwargs = (
            (self._args, self._kwargs) if sample_index is None else self._select_extra_args_and_kwargs(sample_index)
        )
        args, kwargs = map_leaves((args, kwargs), self._copy_caller_tensor)  # the model may change them in place
        with torch._C.DisableTorchFunction():  # the copy is no call of the model
            before = x.detach().clone() if self.values is None else None
        with forward_errors_explained(self.model, x, args, kwargs), self.forward_context():
            if self._resolved_input_key is INPUT_KEY_NOT_READ:
                self._resolved_input_key = find_input_key(self.model, self._input_key)
            output = call_model(self.model, x, args, kwargs, self._resolved_input_key, frames_first=self._frames_first)
        if x._version != version or (before is not None and not _has_same_values(x, before)):
            if before is not None:
                x.data.copy_(before)
            raise InputError(
                "the model changed its input in place, so a second forward pass would get another image: start the forward "
                "method of the model with x = x.clone()"
            )
        return output

    def _copy_caller_tensor(self, value: Tensor) -> Tensor:
        """Copy a tensor of the caller. A tensor that was selected by rows is a copy already, so return it unchanged."""
        is_own = all(value is not leaf for _, leaf in iter_leaves((self._args, self._kwargs)))
        return value if is_own else value.clone()

    def _forward_row(self, x: Tensor, row: int, sample_index: Tensor | None) -> Any:
        """Run the model on one row of x, with the extra inputs of its sample."""
        index = (torch.arange(len(x), device=x.device) if sample_index is None else sample_index)[row : row + 1]
        if sample_index is not None or self.values is not None:
            return self.forward(x[row : row + 1], index)
        single = copy.copy(self)  # in the first forward pass each row has its own extra inputs
        single._args, single._kwargs = self._select_extra_args_and_kwargs(index, len(x))
        return single.forward(x[row : row + 1])

    def flipped(self, flips: Sequence[int], size: Sequence[int]) -> "Score":
        """Return the score, with choices made, for an input that is flipped along the axes `flips` and resized to `size`."""
        if not isinstance(self.target, Target):
            return self
        flipped = copy.copy(self)
        flipped.target = self.target.flipped(flips, size)
        return flipped

    def compute_fixed_mix_of_class_scores(self, x: Tensor) -> Tensor:
        """Compute a sum (N,) of all class scores with fixed weights. The sum serves to choose a layer without choosing a class.

        For a callable target, compute its score.
        """
        if callable(self.target):
            return self(x)
        logits = class_scores(self.forward(x))
        return logits @ torch.arange(1, logits.shape[1] + 1, dtype=logits.dtype, device=logits.device).cos()

    @contextmanager
    def score_range_tracked(self) -> Iterator[ScoreRange]:
        """Record the smallest and largest score of each sample inside the `with`."""
        outer, self._score_range = self._score_range, ScoreRange()
        self._add_to_tracked_range("score", self.values, None)
        try:
            yield self._score_range
        finally:
            self._score_range = outer

    @property
    def machine_epsilon(self) -> float:
        """The machine epsilon of the dtype in which the model computed the score."""
        return torch.finfo(self.dtype).eps

    def read_score(self, output: object, n_rows: int, sample_index: Tensor | None = None) -> Tensor:
        """Read the score of each sample (N,) from a model output with `n_rows` rows. `sample_index` is as in `__call__`."""
        values = self._read_full_precision(output, n_rows, sample_index)
        self._add_to_tracked_range("score", values, sample_index)
        return values

    def _read_full_precision(self, output: object, n_rows: int, sample_index: Tensor | None) -> Tensor:
        """Read the score of each row in at least float32. Store the values of the first call."""
        raw = self._read_unconverted_score(output, n_rows, sample_index)
        values, self.dtype = full_precision(raw), raw.dtype
        if self.values is None:
            has_values = not isinstance(self.target, NoTarget)
            self.values = values.detach() if has_values else torch.full_like(values.detach(), torch.nan)
        return values

    def drop_target(self) -> None:
        """Explain without a target if the output has no class scores. The target must be optional."""
        self.target = NoTarget()

    def has_target(self, sample: int) -> bool:
        """Return whether there is a target for a sample. The class with the highest score counts as a target."""
        if isinstance(self.target, PerSampleTarget):
            return self.target.has_target(sample)
        return not isinstance(self.target, NoTarget)

    def _add_to_tracked_range(self, kind: str, values: Tensor | None, sample_index: Tensor | None) -> None:
        if self._score_range is not None and self.values is not None and values is not None:
            self._score_range.include_scores(kind, values, sample_index, len(self.values))

    def probability(self, output: object, n_rows: int, sample_index: Tensor | None = None) -> Tensor:
        """Compute the softmax probability (N,) of the class of each sample.

        For a difference, compute the probability of its first class against its second. For a callable target, or a model
        with one output, return the score itself.
        """
        kind, values = "score", self._read_full_precision(output, n_rows, sample_index)
        if not callable(self.target) and self.class_pairs is not None and (logits := class_scores(output)).shape[1] > 1:
            pairs = self.class_pairs if sample_index is None else self.class_pairs[sample_index]
            log_odds, log_sum = values, full_precision(logits).logsumexp(1)
            kind, values = "probability", torch.where(pairs[:, 1] >= 0, log_odds.sigmoid(), (values - log_sum).exp())
        self._add_to_tracked_range(kind, values, sample_index)
        return values

    def check_extra_inputs(self, x: Tensor) -> None:
        """Raise InputError if an extra argument has one entry per sample of x (N,C,*S), but belongs to other samples.

        To test this, the model is run on the samples in reversed order, which must not change their scores.
        """
        leaves = (leaf for _, leaf in iter_leaves((self._args, self._kwargs)))
        if len(x) == 1 or self.values is None or not any(leaf.ndim == 1 and len(leaf) == len(x) for leaf in leaves):
            return
        reversed_index = torch.arange(len(x), device=x.device).flip(0)
        deviation = (self(x[reversed_index], reversed_index) - self.values[reversed_index]).abs().max()
        if bool(deviation > 0.01 * self.values.abs().max()):
            raise InputError(
                f"an extra argument of the model has {plural(len(x), 'entry')}, as many as the batch has samples, but the "
                "entries do not belong to the samples: explain one image at a time"
            )

    def _select_extra_args_and_kwargs(
        self, sample_index: Tensor, n_samples: int | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Return the extra positional and keyword arguments of the model for R samples. `sample_index` (R,) selects them."""
        if n_samples is None:
            n_samples = 0 if self.values is None else len(self.values)
        return select_argument_rows(self._args, self._kwargs, sample_index, n_samples)

    def _read_unconverted_score(self, output: object, n_rows: int, sample_index: Tensor | None) -> Tensor:
        """Read the score of each row in the dtype of the model. The first call resolves the targets."""
        targets = self.target.targets if isinstance(self.target, PerSampleTarget) else self.target
        if self.values is None and isinstance(targets, list) and len(targets) != n_rows:
            raise TargetError(
                f"{plural(len(targets), 'target')} for a batch of {n_rows}: pass one target, or one per sample"
            )
        if self.optional_target and self.values is None and not _has_class_scores(output, n_rows):
            self.drop_target()
        if isinstance(self.target, NoTarget):
            return self.target.mix_output(output, n_rows)
        if isinstance(self.target, Target) and self.values is None:
            self.target = self.target.resolve_choices(output, self._input_size, self.class_names)
        if callable(self.target) and sample_index is not None:
            return self._score_variants_by_callable(self.target, output, sample_index)
        if callable(self.target):
            return require_one_row_per_sample(
                require_scores_of_callable_target(self.target(output), self.target), n_rows
            )
        logits = require_one_row_per_sample(class_scores(output, self._get_first_label()), n_rows)
        if self.class_pairs is None:
            self.class_pairs = self._resolve_class_pairs(logits.detach())
            self.classes = None if bool((self.class_pairs[:, 1] >= 0).any()) else self.class_pairs[:, 0]
            self.logits = logits.detach()
            if are_probabilities(self.logits):
                warn_caller(
                    "the model's output looks like probabilities (rows sum to 1): explain the logits before the softmax; "
                    "where a probability is near 1 its gradient is rounding noise"
                )
        pairs = self.class_pairs if sample_index is None else self.class_pairs[sample_index]
        if len(pairs) != len(logits):
            raise TargetError(
                f"the output has {plural(len(logits), 'sample')}, but the first call had {len(pairs)}: pass as many samples"
            )
        values = logits.gather(1, pairs[:, :1])[:, 0]
        if self.classes is not None:
            return values
        contrast_scores = logits.gather(1, pairs[:, 1:].clamp(min=0))[:, 0]
        return torch.where(pairs[:, 1] >= 0, values - contrast_scores, values)

    def _get_first_label(self) -> int | str | None:
        """Return the class that the caller named, or the first of several classes. Return None if no class was named."""
        target: Any = self.target[0] if isinstance(self.target, list) and self.target else self.target
        label = target.a if isinstance(target, Difference) else target
        return label if isinstance(label, int | str) else None

    @classmethod
    def concatenate(cls, scores: "Sequence[Score]") -> "Score":
        """Join scores of single samples into the score of a batch."""
        first = copy.copy(scores[0])
        for name in TENSOR_ATTRIBUTES:
            parts = [getattr(score, name) for score in scores]
            setattr(first, name, torch.cat(parts) if all(part is not None for part in parts) else None)
        if callable(first.target):
            first.target = PerSampleTarget([score.target for score in scores], scores)
        return first

    def _score_variants_by_callable(
        self, target: Callable[[Any], Tensor], output: object, sample_index: Tensor
    ) -> Tensor:
        """Compute the scores (R,) of R perturbed copies by a callable target. A call of the target gets one row per sample."""
        n_samples = len(sample_index) if self.values is None else len(self.values)
        rounds = list(_iter_one_variant_per_sample(sample_index, n_samples))
        round_scores: list[Tensor] = []
        for rows, row_per_sample in rounds:
            scores = require_scores_of_callable_target(
                target(select_rows(output, row_per_sample, len(sample_index))), target
            )
            round_scores.append(require_one_row_per_sample(scores, n_samples)[sample_index[rows]])
        return torch.cat(round_scores)[torch.cat([rows for rows, _ in rounds]).argsort()]

    def to_cpu(self) -> "Score":
        """Return a copy of the score with all tensors on the CPU."""
        score = copy.copy(self)
        for name in TENSOR_ATTRIBUTES:
            value: Tensor | None = getattr(self, name)
            setattr(score, name, value if value is None else value.detach().cpu())
        return score

    def class_index(self, sample: int) -> int | None:
        """Return the class index of one sample. Return None before the first call, and for a target that is not a
        single class.
        """
        if isinstance(self.target, Target):
            return self.target.get_class_index(sample)
        first, second = self._get_class_pair(sample)
        return first if second is None else None

    def describe(self, sample: int) -> str:
        """Return a text that describes the target of one sample, such as a class name or `log-odds of a over b`."""
        first, second = self._get_class_pair(sample)
        if isinstance(self.target, Target):
            return self.target.describe(sample, self.class_name)
        if first is None:
            name = str(getattr(self.target, "__name__", type(self.target).__name__))
            return "the output of a function" if name == "<lambda>" else name
        name = self.class_name(first)
        return name if second is None else f"log-odds of {name} over {self.class_name(second)}"

    def _get_class_pair(self, sample: int) -> tuple[int | None, int | None]:
        """Return two class indices for a sample: its class, and the class it is compared with. Either may be None."""
        if self.class_pairs is None:
            return None, None
        first, second = self.class_pairs[sample].tolist()
        return first, second if second >= 0 else None

    def probabilities(self) -> Tensor | None:
        """Compute the softmax probabilities (N,K) of all classes. Return None if there are no logits of several classes.

        Rows that are probabilities already stay unchanged. A row that is neither logits nor probabilities becomes NaN.
        """
        if self.logits is None or self.logits.shape[1] == 1:
            return None
        rows = self.logits.double()
        is_logits = ((rows < 0) | (rows > 1)).any(1, keepdim=True)
        sums_to_one = (rows.sum(1, keepdim=True) - 1).abs() < 1e-3
        return torch.where(is_logits, rows.softmax(1), torch.where(sums_to_one, rows, torch.nan))

    def class_name(self, index: int) -> str:
        """Return the name of a class. If the names are unknown, return a text such as `class 3`."""
        if self.class_names and (self.logits is None or len(self.class_names) == self.logits.shape[1]):
            return self.class_names[index]
        return f"class {index}"

    def _resolve_class_pairs(self, logits: Tensor) -> Tensor:
        """Return two class indices for each sample (N,2): the explained class, and the class it is compared with.

        The second index is -1 if there is no such class.
        """
        target: Any = self.target
        targets = list(target) if isinstance(target, list) else [target] * len(logits)
        top = logits.argmax(1).tolist()
        items = zip(targets, top, strict=True)
        pairs = [resolve_class_pair(item, best, logits.shape[1], self.class_names) for item, best in items]
        return torch.tensor(pairs, device=logits.device)


def replace_class_targets(model: nn.Module, target: TargetLike) -> TargetLike:
    """Replace each class in a target by the target that the model's metadata builds for it, if it builds targets."""
    model_metadata = get_loaded_model_metadata(model)
    if model_metadata is None or model_metadata.build_class_target is None or callable(target):
        return target
    target = convert_tensor_target_to_list(target) if hasattr(target, "tolist") else target
    if isinstance(target, list | tuple):
        return [cast(Any, replace_class_targets(model, item)) for item in target]  # one per sample
    result: TargetLike = model_metadata.build_class_target(normalize_target(target))
    return result


class PerSampleTarget(Target):
    """A different target for each sample. At least one of them is a callable."""

    def __init__(self, targets: Sequence[TargetLike], scores: Sequence[Score] = ()) -> None:
        self.targets, self._scores = list(targets), list(scores)

    def prepare_for_model(self, model: nn.Module) -> "PerSampleTarget":
        """Return targets that are prepared for the model."""
        return PerSampleTarget(
            [item.prepare_for_model(model) if isinstance(item, Target) else item for item in self.targets]
        )

    @property
    def selects_positions(self) -> bool:
        """Whether any of the targets selects some of many positions of the output."""
        return any(isinstance(target, Target) and target.selects_positions for target in self.targets)

    def flipped(self, flips: Sequence[int], size: Sequence[int]) -> "PerSampleTarget":
        """Return the targets for an input that is flipped along the axes `flips`."""
        return PerSampleTarget(self.targets, [score.flipped(flips, size) for score in self._scores])

    def resolve_choices(
        self, output: Any, input_size: Sequence[int], class_names: Sequence[str] | None
    ) -> "PerSampleTarget":
        """Return targets with all choices made. The output of a sample decides for its target."""
        scores = [Score(nn.Identity(), item, class_names=class_names, input_size=input_size) for item in self.targets]
        resolved = PerSampleTarget(self.targets, scores)
        resolved(output)
        return resolved

    def __call__(self, output: Any) -> Tensor:
        """Compute the score of each sample (N,)."""
        n_samples = len(self.targets)
        parts = (select_rows(output, torch.tensor([i], device="cpu"), n_samples) for i in range(n_samples))
        return torch.cat([score.read_score(part, 1) for score, part in zip(self._scores, parts, strict=True)])

    def get_class_index(self, sample: int) -> int | None:
        """Return the class of one sample if this class alone would give the same target. Otherwise return None."""
        return self._scores[sample].class_index(0) if self._scores else None

    def describe(self, sample: int, class_name: ClassNameLookup) -> str:
        """Describe the target of one sample."""
        return self._scores[sample].describe(0)

    def has_target(self, sample: int) -> bool:
        """Return whether there is a target for a sample. The class with the highest score counts as a target."""
        return not self._scores or self._scores[sample].has_target(0)


class AllClassScores(Score):
    """The scores of all classes (N,K), instead of one score per sample. For a model without class scores the result is (N,0).

    Args:
        model: See `Score`.
        target: Not used.
        class_names: See `Score`.
        args: See `Score`.
        kwargs: See `Score`.
        forward_context: See `Score`.
        input_size: See `Score`.
        input_key: See `Score`.
        frames_first: See `Score`.
        one_sample_per_pass: See `Score`.
        optional_target: See `Score`.

    >>> model = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
    >>> AllClassScores(model)(torch.rand(2, 1, 8, 8)).shape
    torch.Size([2, 3])

    """

    def read_score(self, output: object, n_rows: int, sample_index: Tensor | None = None) -> Tensor:
        """Read the class scores (N,K) from a model output with `n_rows` rows."""
        try:
            logits = class_scores(output)
        except TargetError:
            logits = torch.zeros(n_rows, 0, dtype=torch.float32, device="cpu")
        logits = require_one_row_per_sample(logits, n_rows)
        if self.values is None:
            self.values = self.logits = logits.detach()
        return logits


def _has_class_scores(output: object, n_rows: int) -> bool:
    """Return whether an output holds class scores (N,K), one row for each sample."""
    try:
        return len(class_scores(output)) == n_rows
    except TargetError:
        return False


def _has_same_values(x: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same values. NaN counts as equal to NaN."""
    with torch._C.DisableTorchFunction():
        return torch.equal(x, other) or bool(((x == other) | (x.isnan() & other.isnan())).all())


class VariantRound(NamedTuple):
    """The rows of at most one variant of each sample.

    `row_per_sample` (N,) holds one row of each of the N samples, or 0 for a sample without a further variant.
    """

    rows: Tensor
    row_per_sample: Tensor


def _iter_one_variant_per_sample(sample_index: Tensor, n_samples: int) -> Iterator[VariantRound]:
    """Yield rounds of perturbed copies: first the first copy of each sample, then the second copy of each, and so on."""
    order = sample_index.argsort(stable=True)
    counts = sample_index.bincount(minlength=n_samples)
    first_places = (counts.cumsum(0) - counts)[sample_index[order]]
    occurrence = torch.empty_like(sample_index)
    occurrence[order] = torch.arange(len(sample_index), device=sample_index.device) - first_places
    for round_number in range(int(counts.max())):
        rows = (occurrence == round_number).nonzero()[:, 0]
        no_rows = torch.zeros(n_samples, dtype=torch.long, device=sample_index.device)
        yield VariantRound(rows, no_rows.scatter_(0, sample_index[rows], rows))
