"""DeepLIFT and DeepLIFT-SHAP, by captum: a gradient in which non-linear modules pass on Δout/Δin from a baseline."""

import copy
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from camscope.errors import InputError, ModelError
from camscope.explainers.adapters.base import AdapterExplainer, expect_the_same_score, kept_on
from camscope.explainers.adapters.stand_ins import ruled
from camscope.explainers.adapters.twin import Seen, observed, rewind, twin_of
from camscope.explainers.adapters.unruled import Unruled
from camscope.explainers.adapters.windows import laid_out
from camscope.explainers.base import register_with
from camscope.explainers.baselines import WithBackground, WithBaseline, starts
from camscope.explainers.gaps import gap_in_words
from camscope.explainers.maps import Maps
from camscope.explainers.pixels import PixelExplainer
from camscope.explainers.runs import Runs
from camscope.explainers.scope import checked_finite
from camscope.images.silence import ignoring
from camscope.targets import Score, full_precision
from camscope.wording import plural


class Against(NamedTuple):
    """What each pixel and channel (C,*S) adds to the score against a baseline, and the score's change ().

    `flat`: whether all multipliers are 0. `unruled`: what kept its gradient, in words.
    """

    values: Tensor
    change: Tensor
    flat: bool
    unruled: str

    @property
    def total(self) -> float:
        """What the values add up to."""
        return float(self.values.double().sum())


@dataclass(kw_only=True, eq=False, repr=False)
class Lifted(AdapterExplainer, PixelExplainer):
    """The mean, over inputs x' that stand for nothing, of Σ_c m_c (x_c - x'_c). A method says which by `starts`.

    m: the gradient in which ReLU, ReLU6, Hardtanh, ELU, LeakyReLU, Sigmoid, Tanh, Softplus, Softmax and max pooling pass
    on Δout/Δin, by captum, as modules. What has no rule there (functions, GELU, norms, attention) keeps its gradient: a
    note names it, and how far the map is from adding up to f(x) - f(x'); so do `measures`, `completeness_gap` and
    `score_change`. captum works on a copy of the modules, one image and one x' at a time; there a module that runs several
    times is several, what a rule is for is a tensor of its own, what clips is a ReLU by name, and windows of a pooling do
    not overlap, all of which captum needs.
    """

    package: ClassVar[str] = "captum"
    extra: ClassVar[str] = "captum"

    @abstractmethod
    def starts(self, x: Tensor) -> list[Tensor]:
        """(N,C,*S) -> one such tensor for each x'."""

    @property
    def said(self) -> tuple[str, ...]:
        """What a result says of them."""
        return ()

    def attributed(self, x: Tensor, score: Score) -> Maps:
        """The mean over the baselines, and how far it is from being complete."""
        with observed(score.model) as seen:
            runs = Runs(self, x, score)
        if score.one_by_one:
            raise ModelError(
                f"{self.title} runs the input and its baseline in one batch, and in this model the "
                "samples of a batch see one "
                f"another, as in a batch norm without running statistics; pass integratedgradients"
            )
        starts = self.starts(x)
        each = [self._each(runs, seen, sample, [start[sample] for start in starts]) for sample in range(len(x))]
        every = [_mean(one) for one in each]
        values, changes = torch.stack([one.values for one in every]), torch.stack([one.change for one in every])
        return Maps(
            self.over_channels(values),
            zero_gradient=torch.tensor([one.flat for one in every], device=x.device),
            own=tuple((*self.said, self._completeness(mean, parts)) for mean, parts in zip(every, each, strict=True)),
            measures={"completeness_gap": values.double().flatten(1).sum(1) - changes, "score_change": changes},
        )

    def _each(self, runs: Runs, seen: Seen, sample: int, starts: Sequence[Tensor]) -> list[Against]:
        """One sample against each of the baselines (C,*S)."""
        each = list[Against]()
        with runs.counted(sample, len(starts)) as advance:
            for start in starts:
                each.append(self._against(runs, seen, sample, start))
                advance(1)
        return each

    def _completeness(self, mean: Against, each: Sequence[Against]) -> str:
        """How far the mean is from adding up, and of several the one that is farthest."""
        change = float(mean.change)
        if len(each) == 1:
            words = gap_in_words(self.parts(), mean.total, "the score less the baseline's is", change)
        else:
            words = gap_in_words(self.parts(), mean.total, "the score less the baselines' mean is", change)
            gaps = [one.total - float(one.change) for one in each]
            worst = max(range(len(each)), key=lambda which: abs(gaps[which]))
            words += f"; the worst of {plural(len(each), 'baseline')} has {gaps[worst]:+.2g} of {float(each[worst].change):.4g}"
        return f"completeness: {words}{mean.unruled}"

    def _against(self, runs: Runs, seen: Seen, sample: int, start: Tensor) -> Against:
        """One sample against one baseline (C,*S)."""
        asked, rest = _Asked(runs.score, seen, sample), Unruled()
        rest.watch(asked)
        multipliers = full_precision(kept_on(lambda: _multipliers(asked, runs.x[sample], start, rest)))
        checked_finite("the multipliers at the input", multipliers, self.on_nonfinite)
        value, reference = asked.values
        if self.mode == "eval":
            expect_the_same_score(runs.score, sample, value, runs.values[sample])
        found = multipliers * (full_precision(runs.x[sample]) - full_precision(start))
        change = value.double() - reference.double()
        return Against(found, change, not bool(multipliers.any()), rest.in_words())


def _mean(each: Sequence[Against]) -> Against:
    """Over the baselines."""
    return Against(
        torch.stack([one.values for one in each]).mean(0),
        torch.stack([one.change for one in each]).mean(),
        all(one.flat for one in each),
        "".join(dict.fromkeys(one.unruled for one in each)),
    )


@register_with("captum", "captum")
class DeepLIFT(WithBaseline, Lifted):
    """Σ_c m_c (x_c - x'_c): what each pixel adds to the score against a baseline x' (Shrikumar et al. 2017, Rescale rule).

    See `Lifted`.
    """

    name, paper = "deeplift", "arXiv:1704.02685"
    forwards: ClassVar[str] = "3"
    backwards: ClassVar[str] = "2"


@register_with("captum", "captum")
class DeepLIFTSHAP(WithBackground, Lifted):
    """The mean of DeepLIFT over a background of baselines: an estimate of Shapley values (Lundberg & Lee 2017, section 4.2).

    The background holds two at least; see `Lifted`.
    """

    name, paper = "deepliftshap", "arXiv:1705.07874"
    forwards: ClassVar[str] = "1 + 2 x len(background)"
    backwards: ClassVar[str] = "2 x len(background)"

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.baselines()) < 2:
            raise InputError("background holds one input: deepliftshap is a mean over several; pass one to deeplift")

    def starts(self, x: Tensor) -> list[Tensor]:
        """(N,C,*S) for each of the background."""
        return starts(self.baselines(), x, self)


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
        self.values = torch.zeros(2, dtype=torch.float32, device="cpu")

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
        with ignoring(message="Setting forward, backward hooks"), rest:
            found: Tensor = tool.attribute(
                x.detach().clone()[None].requires_grad_(), start[None], custom_attribution_func=lambda one: one
            )
    except _CutError:
        return None
    return found.detach()[0]
