"""DeepLIFT and DeepLIFT-SHAP, by captum: a gradient in which non-linear modules pass on Δout/Δin from a baseline."""

import copy
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from camscope.errors import InputError
from camscope.explainers.adapters.base import AdapterExplainer, expect_the_same_score, with_gradients
from camscope.explainers.adapters.stand_ins import ruled
from camscope.explainers.adapters.twin import Seen, observed, rewind, twin_of
from camscope.explainers.adapters.unruled import Unruled
from camscope.explainers.adapters.windows import laid_out
from camscope.explainers.base import register_with
from camscope.explainers.baselines import Baseline, filled, several
from camscope.explainers.gaps import gap_in_words
from camscope.explainers.maps import Maps
from camscope.explainers.runs import Runs, counted
from camscope.explainers.scope import checked_finite, expect_whole
from camscope.targets import Score, full_precision


class Against(NamedTuple):
    """What each pixel and channel (C,*S) adds to the score against a baseline, and the score's change ().

    `flat`: whether all multipliers are 0.
    """

    values: Tensor
    change: Tensor
    flat: bool
    said: tuple[str, ...]


@register_with("captum", "captum")
class DeepLIFT(AdapterExplainer):
    """Σ_c m_c (x_c - x'_c): what each pixel adds to the score against a baseline x' (Shrikumar et al. 2017, Rescale rule).

    m: the gradient in which ReLU, ReLU6, Hardtanh, ELU, LeakyReLU, Sigmoid, Tanh, Softplus, Softmax and max pooling pass
    on Δout/Δin, by captum, as modules. What has no rule there (functions, GELU, norms, attention) keeps its gradient: a
    note names it, and how far the map is from adding up to f(x) - f(x'); so do `measures`, `completeness_gap` and
    `score_change`. captum works on a copy of the modules, one image and one baseline at a time; there a module that runs
    several times is several, what a rule is for is a tensor of its own, what clips is a ReLU by name, and windows of a
    pooling do not overlap, all of which captum needs.
    `baseline`: see `baselines.filled`; of several the map is the mean. `seed`: of what is drawn.
    """

    name, paper = "deeplift", "arXiv:1704.02685"
    forwards: ClassVar[str] = "3"
    backwards: ClassVar[str] = "2"
    package: ClassVar[str] = "captum"
    extra: ClassVar[str] = "captum"
    baseline: Baseline | Sequence[Baseline] = "zero"
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        several(self.baseline)
        expect_whole(seed=self.seed)

    def attributed(self, x: Tensor, score: Score) -> Maps:
        """The mean over the baselines, and how far it is from being complete."""
        with observed(score.model) as seen:
            runs = Runs(self, x, score)
        starts = [filled(one, x, self, self.seed) for one in several(self.baseline)]
        every = [self._mean(runs, seen, sample, [start[sample] for start in starts]) for sample in range(len(x))]
        values, changes = torch.stack([one.values for one in every]), torch.stack([one.change for one in every])
        return Maps(
            self.over_channels(values),
            zero_gradient=torch.tensor([one.flat for one in every], device=x.device),
            own=tuple(one.said for one in every),
            measures={"completeness_gap": values.double().flatten(1).sum(1) - changes, "score_change": changes},
        )

    def _mean(self, runs: Runs, seen: Seen, sample: int, starts: Sequence[Tensor]) -> Against:
        """Of one sample over the baselines (C,*S)."""
        what, each = f"{self.title}, image {sample + 1} of {len(runs.x)}", list[Against]()
        with counted(what, len(starts), self.progress) as advance:
            for start in starts:
                each.append(self._against(runs, seen, sample, start))
                advance(1)
        return Against(
            torch.stack([one.values for one in each]).mean(0),
            torch.stack([one.change for one in each]).mean(),
            all(one.flat for one in each),
            tuple(said for one in each for said in one.said),
        )

    def _against(self, runs: Runs, seen: Seen, sample: int, start: Tensor) -> Against:
        """One sample against one baseline (C,*S)."""
        asked, rest = _Asked(runs.score, seen, sample), Unruled()
        rest.watch(asked)
        multipliers = full_precision(
            with_gradients(runs.score, lambda: _multipliers(asked, runs.x[sample], start, rest))
        )
        checked_finite("the multipliers at the input", multipliers, self.on_nonfinite)
        value, reference = asked.values
        if self.mode == "eval":
            expect_the_same_score(runs.score, sample, value, runs.values[sample])
        found = multipliers * (full_precision(runs.x[sample]) - full_precision(start))
        change = value.double() - reference.double()
        words = gap_in_words(
            "the pixels' values", float(found.double().sum()), "the score less the baseline's is", float(change)
        )
        return Against(found, change, not bool(multipliers.any()), (f"completeness: {words}{rest.in_words()}",))


@register_with("captum", "captum")
class DeepLIFTSHAP(DeepLIFT):
    """The mean of DeepLIFT over a background of baselines: an estimate of Shapley values (Lundberg & Lee 2017, section 4.2).

    `baseline`: the background, two at least: images, tensors, or kinds of nothing.
    """

    name, paper = "deepliftshap", "arXiv:1705.07874"
    forwards: ClassVar[str] = "1 + 2 x len(baseline)"
    backwards: ClassVar[str] = "2 x len(baseline)"
    baseline: Baseline | Sequence[Baseline] = ("zero", "mean", "blur", "noise")

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(several(self.baseline)) < 2:
            raise InputError(
                f"baseline={self.baseline!r}: deepliftshap is a mean over a background; pass a list of two at least, or "
                f"one to deeplift"
            )


class _CutError(Exception):
    """The pass left no way for a gradient to the input."""


class _Asked(nn.Module):
    """The score of rows that are versions of one sample, by a twin of its model."""

    def __init__(self, score: Score, seen: Seen, sample: int) -> None:
        super().__init__()
        self.twin = twin_of(score.model, seen)
        laid_out(self.twin)
        ruled(self.twin)
        self._score = copy.copy(score)
        self._score.model = self.twin
        self._sample = sample
        self.values = torch.zeros(2)

    def forward(self, rows: Tensor) -> Tensor:
        """(R,C,*S) -> (R,)"""
        rewind(self.twin)
        owners = torch.full((len(rows),), self._sample, dtype=torch.long, device=rows.device)
        values = self._score(rows, owners)
        self.values = values.detach()
        if not values.requires_grad:
            raise _CutError
        return values


def _multipliers(asked: _Asked, x: Tensor, start: Tensor, rest: Unruled) -> Tensor | None:
    """(C,*S): captum's, of one input against one baseline; None where gradients are off on the way."""
    from captum.attr import DeepLift

    rest.begin()
    # captum takes two inputs for the same that are closer than `eps`; the map of a faint input is that of a bright one
    tool = DeepLift(asked, eps=torch.finfo(x.dtype).tiny)
    try:
        with _quiet(), rest:
            found: Tensor = tool.attribute(
                x.detach().clone()[None].requires_grad_(), start[None], custom_attribution_func=lambda one: one
            )
    except _CutError:
        return None
    return found.detach()[0]


_filters = threading.Lock()


@contextmanager
def _quiet() -> Iterator[None]:
    """Without captum's word that it sets hooks. The filters are the process's: one thread at a time."""
    with _filters, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Setting forward, backward hooks")
        yield
