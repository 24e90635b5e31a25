"""LIME and KernelSHAP, by captum: a linear model of what the score does when cells of the input are hidden.

The linear model of LIME and KernelSHAP, fitted in float64 to what captum drew.
"""

import threading
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, ClassVar

import torch
from torch import Tensor

from camscope.errors import InputError
from camscope.explainers.adapters.base import AdapterExplainer
from camscope.explainers.core.base import register_with
from camscope.explainers.core.baselines import WithBaseline
from camscope.explainers.core.evaluation_context import expect_count, expect_number, expect_positive
from camscope.explainers.core.maps import Maps
from camscope.explainers.core.pixel_base import Runs, gap_in_words
from camscope.explainers.core.segmentation import Segments, expect_segments, labels_of, parts_of_grid
from camscope.hooks.function_mode import Calls
from camscope.plurals import plural
from camscope.targets import Score


@dataclass
class Fitted:
    """What each cell counts, (M,) in float64, and what is to be said of the fit, in words and in numbers."""

    cells: Tensor
    note: str
    measures: dict[str, float] = field(default_factory=dict)


class Fit:
    """The interpretable model that captum fits: it hands over what was drawn, and how it weighs; the fit is in float64."""

    scores: Tensor
    fitted: Fitted

    def __init__(self, fit: Callable[[Tensor, Tensor, Tensor], Fitted]) -> None:
        self._fit = fit

    def fit(self, train_data: Any) -> None:
        """Of captum's DataLoader the tensors: to go through it would draw a random number."""
        masks, _, weights = train_data.dataset.tensors
        self.fitted = self._fit(masks.cpu().double(), self.scores, weights.cpu().double())

    def representation(self) -> Tensor:
        """(M,)"""
        return self.fitted.cells


def least_squares(rows: Tensor, y: Tensor, weights: Tensor, alpha: float) -> tuple[Tensor, int]:
    """(S,M), (S,), (S,) -> argmin Σ w (y - rows·φ)² + α |φ|², the least of several, and the rank of the rows."""
    count = rows.shape[1]
    if not len(rows):
        return rows.new_zeros(count), 0
    left, right = rows * weights.sqrt()[:, None], y * weights.sqrt()
    rank = int(torch.linalg.matrix_rank(left))
    if alpha:
        left = torch.cat([left, alpha**0.5 * torch.eye(count, dtype=rows.dtype, device="cpu")])
        right = torch.cat([right, right.new_zeros(count)])
    return torch.linalg.lstsq(left, right[:, None], driver="gelsd").solution[:, 0], rank


def explained(samples: int, cells: int, left: Tensor, y: Tensor, shares: Tensor, *, determined: bool) -> str:
    """How much of the score's variance over the versions the linear model has."""
    variance, missed = float(shares @ y.square()), float(shares @ left.square())
    share = f"{1 - missed / variance:.1%} of its variance" if variance else "a score that does not vary"
    few = "" if determined else "; they do not determine the cells: raise samples, or lower cells"
    return f"a linear model of {plural(cells, 'cell')} explains {share} over {plural(samples, 'version')}{few}"


Scores = Callable[[Tensor], Tensor]  # (S,M) of ones, and zeros for hidden cells -> (S,)


@dataclass(kw_only=True, eq=False, repr=False)
class SurrogateExplainer(WithBaseline, AdapterExplainer):
    """What each cell counts for in a linear model of the score, at each of the cell's pixels. A method writes `captums`.

    `cells`: of a grid, so many along each axis, or fewer where an axis is shorter. `segments`: in their place so many
    superpixels, a label map, or what makes one: see `segments.labels_of`. `samples`: versions of the image with cells
    shown at random, all others filled by `baseline`. captum draws which, from `seed`, and weighs them; they run as many
    at a time as fit into memory, and the model is fitted in float64. A cell is hidden in all channels and has one number.
    """

    cells: int = 7
    segments: Segments | None = None
    samples: int = 500

    package: ClassVar[str] = "captum"
    extra: ClassVar[str] = "captum"

    def __post_init__(self) -> None:
        super().__post_init__()
        expect_count(cells=self.cells, samples=self.samples)
        expect_segments(None, segments=self.segments)

    @abstractmethod
    def captums(self, scores: Scores, fit: Fit) -> Any:
        """Captum's explainer of a function of which cells are shown, with a fit of ours."""

    @abstractmethod
    def fit(self, masks: Tensor, scores: Tensor, weights: Tensor) -> Fitted:
        """(S,M) of 0 and 1, (S,), (S,) -> what each cell counts, in float64."""

    def attributed(self, x: Tensor, score: Score) -> Maps:
        """The mean over the baselines; how well the linear model fits is in each sample's notes."""
        runs = Runs(self, x, score)
        starts = self.starts(x)
        made, every = [], []
        for sample in range(len(x)):
            places, count = self._places(x[sample])
            fitted = [self._fitted(runs, sample, start[sample], places, count) for start in starts]
            cells = torch.stack([one.cells for one in fitted]).mean(0).to(x.device)
            made.append(cells.to(torch.promote_types(x.dtype, torch.float32))[places])
            every.append(fitted)
        return Maps(
            torch.stack(made),
            own=tuple(tuple(one.note for one in fitted) for fitted in every),
            measures={
                name: torch.tensor(
                    [fmean(one.measures[name] for one in fitted) for fitted in every], dtype=torch.float64, device="cpu"
                )
                for name in every[0][0].measures
            },
        )

    def _fitted(self, runs: Runs, sample: int, start: Tensor, places: Tensor, count: int) -> Fitted:
        """What captum's method makes of one sample and one baseline."""
        x, origin, fit = runs.x[sample], runs.values[sample].double(), Fit(self.fit)
        with ExitStack() as drawing:
            drawing.enter_context(drawn_from(self.seed))

            def scores(masks: Tensor) -> Tensor:
                drawing.close()  # all is drawn: the model's own passes have the caller's random numbers
                found = torch.zeros(len(masks), dtype=torch.float64, device=x.device)

                def work(part: slice) -> None:
                    shown = masks[part].to(x.device).bool()[:, places][:, None]
                    values = runs.scores(sample, torch.where(shown, x, start))
                    found[part] = values.double() - origin  # what all logits have in common cancels in full precision

                runs.in_turns(sample, len(masks), work)
                fit.scores = found.cpu()
                return fit.scores

            tool = self.captums(scores, fit)
            # captum hands over its masks in one piece where it may: rows of switches, small however large the image is
            try:
                tool.attribute(
                    torch.ones(1, count, dtype=torch.float32, device="cpu"),
                    n_samples=self.samples,
                    perturbations_per_eval=self.samples,
                    return_input_shape=False,
                )
            finally:
                vars(tool).clear()  # it holds itself by its own methods, and would wait for the garbage collector
        return fit.fitted

    def _places(self, x: Tensor) -> tuple[Tensor, int]:
        """(C,*S) -> (*S): the number of each pixel's cell, from 0 on, and how many there are."""
        if self.segments is None:
            labels = parts_of_grid(x.shape[1:], [min(self.cells, length) for length in x.shape[1:]], x.device)
        else:
            labels = labels_of(self.segments, x)
        numbers, places = labels.unique(return_inverse=True)
        if len(numbers) < 2:
            raise InputError(f"{self.name} compares cells, and there is one only: pass more cells, or segments")
        return places, len(numbers)


@register_with("captum", "captum")
class LIME(SurrogateExplainer):
    """φ of argmin Σ_z π(z) (f(z) - b - φ·z)² + α |φ|², z drawn evenly: which cells are shown (Ribeiro et al. 2016).

    π(z) = exp(-D²/2σ²), D: the cosine distance of z to all ones. `width`: σ; `alpha`: α. Both as in the authors' code for
    images, which compares z and not pixels; captum's own default, a lasso with α = 0.01, finds nothing where the score
    moves by less.
    """

    name, paper = "lime", "arXiv:1602.04938"
    forwards: ClassVar[str] = "1 + samples"
    width: float = 0.25
    alpha: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        expect_positive(width=self.width, high=1e6)
        expect_number(low=0, alpha=self.alpha)

    def captums(self, scores: Scores, fit: Fit) -> Any:
        """See `SurrogateExplainer`."""
        from captum.attr._core.lime import Lime, get_exp_kernel_similarity_function

        kernel = get_exp_kernel_similarity_function("cosine", kernel_width=self.width)
        return Lime(scores, interpretable_model=fit, similarity_func=kernel)

    def fit(self, masks: Tensor, scores: Tensor, weights: Tensor) -> Fitted:
        """Weighted ridge regression with an intercept."""
        if not bool(weights.any()):
            raise InputError(
                f"width={self.width!r}: no version is near enough to the image to count; pass a larger one"
            )
        shares = weights / weights.sum()
        rows, y = masks - shares @ masks, scores - shares @ scores
        cells, rank = least_squares(rows, y, weights, self.alpha)
        words = explained(len(scores), len(cells), y - rows @ cells, y, shares, determined=rank == len(cells))
        return Fitted(cells, words)


@register_with("captum", "captum")
class KernelSHAP(SurrogateExplainer):
    """φ of argmin Σ_z k(z) (f(z) - f(0) - φ·z)² where Σφ = f(1) - f(0): Shapley values (Lundberg & Lee 2017, theorem 2).

    z: which cells are shown, all or none among them; k: the Shapley kernel, by which the others are drawn. The sum holds
    but for rounding, `completeness_gap` in the result's `measures`; captum's own fit has it by weights of a million. Where
    the samples do not determine the cells, the least φ.
    """

    name, paper = "kernelshap", "arXiv:1705.07874"
    forwards: ClassVar[str] = "1 + samples"

    def captums(self, scores: Scores, fit: Fit) -> Any:
        """See `SurrogateExplainer`."""
        from captum.attr import KernelShap

        tool = KernelShap(scores)
        tool.interpretable_model = fit
        return tool

    def fit(self, masks: Tensor, scores: Tensor, weights: Tensor) -> Fitted:
        """Least squares among the φ with the right sum: the rest of φ has a sum of zero."""
        count = masks.shape[1]
        shown, ends = masks.sum(1), [float(count), 0.0]
        if len(scores) < 2 or shown[:2].tolist() != ends:
            raise InputError(f"samples={self.samples!r}: the first two show all cells and none; expected 3 or more")
        change = scores[0] - scores[1]
        rows = masks[2:] - masks[2:].mean(1, keepdim=True)
        y = scores[2:] - scores[1] - shown[2:] * change / count
        rest, rank = least_squares(rows, y, torch.ones_like(y), 0.0)
        cells = change / count + rest - rest.mean()
        even = torch.full_like(y, 1 / max(1, len(y)))
        target = scores[2:] - even @ scores[2:]
        words = explained(len(scores), count, y - rows @ rest, target, even, determined=rank == count - 1)
        total, expected = float(cells.sum()), float(change)
        gap = gap_in_words("the cells", total, "the score less the baseline's is", expected)
        measures = {"completeness_gap": total - expected, "score_change": expected}
        return Fitted(cells, f"{words}; completeness: {gap}", measures)


_drawing = threading.Lock()


FLOAT_FACTORIES = {torch.ones, torch.zeros, torch.empty, torch.rand, torch.randn, torch.linspace, torch.eye}
FACTORIES = FLOAT_FACTORIES | {torch.tensor, torch.full, torch.arange, torch.randint, torch.randperm}


class OrdinaryTensors(Calls):
    """Inside the `with`, in this thread, tensors are made on the CPU, in float32, whatever the user's defaults are."""

    def called(self, func: Callable[..., Any], args: Sequence[Any], named: dict[str, Any]) -> Any:
        """The result of the function, with the usual defaults."""
        if func in FACTORIES:
            named.setdefault("device", torch.device("cpu"))
        if func in FLOAT_FACTORIES and named.get("dtype") is None:
            named["dtype"] = torch.float32
        return func(*args, **named)


@contextmanager
def drawn_from(seed: int) -> Iterator[None]:
    """The process's own random numbers on the CPU begin at a seed, and go on where they were afterwards.

    captum takes no generator. One thread at a time; what others draw meanwhile is drawn from the same numbers.
    """
    with _drawing, torch.random.fork_rng(devices=[]), OrdinaryTensors():
        torch.default_generator.manual_seed(seed)
        yield
