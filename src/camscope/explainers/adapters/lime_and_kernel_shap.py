"""LIME and KernelSHAP by captum: fit a linear model that predicts the score from the visible cells of the input."""

import threading
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor

from camscope.errors import InputError
from camscope.explainers.adapters.adapter_explainer import AdapterExplainer
from camscope.explainers.core.base_explainer import register_optional
from camscope.explainers.core.baselines import BaselineMixin
from camscope.explainers.core.input_segments import (
    SegmentsLike,
    check_segments_setting,
    label_grid_cells,
    resolve_segment_labels,
)
from camscope.explainers.core.maps_with_flags import AttributionMaps
from camscope.explainers.core.perturbed_evaluator import PerturbedEvaluator
from camscope.explainers.core.pixel_explainers import format_completeness_gap
from camscope.explainers.core.setting_checks import check_number, check_positive_integer, check_positive_number
from camscope.hooks.intercept_torch_functions import BaseFunctionMode
from camscope.plurals import plural
from camscope.targets import Score


@dataclass
class LinearFit:
    """A fitted linear model: the coefficient (M,) of each cell in float64, a note, and numbers about the fit."""

    coefficients: Tensor
    note: str
    diagnostics: dict[str, float] = field(default_factory=dict)


class InterpretableModel:
    """The model that captum fits to its samples. It passes captum's masks and weights on to a fit in float64."""

    scores: Tensor
    linear_fit: LinearFit

    def __init__(self, fit_function: Callable[[Tensor, Tensor, Tensor], LinearFit]) -> None:
        self._fit_function = fit_function

    def fit(self, train_data: Any) -> None:
        """Fit the linear model to the masks and weights in captum's DataLoader."""
        masks, _, weights = train_data.dataset.tensors
        self.linear_fit = self._fit_function(masks.cpu().double(), self.scores, weights.cpu().double())

    def representation(self) -> Tensor:
        """Return the coefficients (M,) of the linear model, one for each cell."""
        return self.linear_fit.coefficients


class LeastSquaresSolution(NamedTuple):
    """The solution φ (M,) of a least squares problem, and the rank of its rows."""

    solution: Tensor
    rank: int


def solve_least_squares(rows: Tensor, y: Tensor, weights: Tensor, alpha: float) -> LeastSquaresSolution:
    """Minimize Σ w (y - rows·φ)² + α |φ|² over φ (M,), for rows (S,M). If several φ are minimal, return the shortest."""
    count = rows.shape[1]
    if not len(rows):
        return LeastSquaresSolution(rows.new_zeros(count), 0)
    left, right = rows * weights.sqrt()[:, None], y * weights.sqrt()
    rank = int(torch.linalg.matrix_rank(left))
    if alpha:
        left = torch.cat([left, alpha**0.5 * torch.eye(count, dtype=rows.dtype, device="cpu")])
        right = torch.cat([right, right.new_zeros(count)])
    solution = torch.linalg.lstsq(left, right[:, None], driver="gelsd").solution[:, 0]
    return LeastSquaresSolution(solution, rank)


def format_explained_variance(
    n_samples: int, n_cells: int, residuals: Tensor, y: Tensor, sample_weights: Tensor, *, is_determined: bool
) -> str:
    """Return a sentence about the share of the score's variance that the linear model explains."""
    variance, missed = float(sample_weights @ y.square()), float(sample_weights @ residuals.square())
    share = f"{1 - missed / variance:.1%} of its variance" if variance else "a score that does not vary"
    few = "" if is_determined else "; they do not determine the cells: raise n_samples, or lower grid_size"
    return f"a linear model of {plural(n_cells, 'cell')} explains {share} over {plural(n_samples, 'sample')}{few}"


class CellLabels(NamedTuple):
    """For each pixel (*S) the index of its cell, and the count of all cells."""

    labels: Tensor
    n_cells: int


MaskScorer = Callable[[Tensor], Tensor]  # (S,M) of ones, and zeros for hidden cells -> (S,)


@dataclass(kw_only=True, eq=False, repr=False)
class SurrogateExplainer(BaselineMixin, AdapterExplainer):
    """Base class of maps from a linear model of the score. Each pixel has the coefficient of its cell.

    A subclass implements `create_captum_explainer` and `fit_linear_model`. captum draws the samples and weighs them; as many run
    at a time as fit into memory. A cell is hidden in all channels.

    Args:
        grid_size: Cells along each axis of a grid, or fewer if the axis is shorter.
        segments: Instead of the grid, a number of superpixels, a label map (*S) of integers, or a function of the input
            that returns one.
        n_samples: Number of images with random cells shown and the others filled by `baseline`.

    """

    package, extra, forward_passes = "captum", "captum", "1 + n_samples"
    grid_size: int = 7
    segments: SegmentsLike | None = None
    n_samples: int = 500

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive_integer(grid_size=self.grid_size, n_samples=self.n_samples)
        check_segments_setting(None, segments=self.segments)

    @property
    def needs_only_scores(self) -> bool:
        """Whether the method needs only the scores of the model. Always True."""
        return True

    @abstractmethod
    def create_captum_explainer(self, scorer: MaskScorer, interpretable_model: InterpretableModel) -> Any:
        """Create captum's explainer. The explainer calls `scorer` to get the scores of masks of visible cells."""

    @abstractmethod
    def fit_linear_model(self, masks: Tensor, scores: Tensor, weights: Tensor) -> LinearFit:
        """Fit a linear model in float64 that predicts the scores (S,) from masks (S,M) of 0 and 1, with sample weights (S,)."""

    def compute_score_maps(self, x: Tensor, score: Score) -> AttributionMaps:
        """Compute the map of each sample as the mean over its baselines. Notes state the share of variance explained."""
        evaluator, baselines = PerturbedEvaluator(self, x, score), self.build_baselines(x)
        maps, fits_by_sample = [], []
        for sample in range(len(x)):
            labels, count = self._label_cells(x[sample])
            fits = [self._fit_sample(evaluator, sample, start[sample], labels, count) for start in baselines]
            cells = torch.stack([fit.coefficients for fit in fits]).mean(0).to(x.device)
            maps.append(cells.to(torch.promote_types(x.dtype, torch.float32))[labels])
            fits_by_sample.append(fits)
        diagnostics = {}
        for name in fits_by_sample[0][0].diagnostics:
            values = [fmean(fit.diagnostics[name] for fit in fits) for fits in fits_by_sample]
            diagnostics[name] = torch.tensor(values, dtype=torch.float64, device="cpu")
        notes = tuple(tuple(fit.note for fit in fits) for fits in fits_by_sample)
        return AttributionMaps(torch.stack(maps), sample_notes=notes, diagnostics=diagnostics)

    def _fit_sample(
        self, evaluator: PerturbedEvaluator, sample: int, baseline: Tensor, cell_labels: Tensor, n_cells: int
    ) -> LinearFit:
        """Fit the linear model for one sample and one baseline."""
        x, clean_score = evaluator.x[sample], evaluator.clean_scores[sample].double()
        fit = InterpretableModel(self.fit_linear_model)
        with ExitStack() as seeded:
            seeded.enter_context(cpu_rng_seeded(self.seed))

            def score_masks(masks: Tensor) -> Tensor:
                seeded.close()  # all masks are drawn: the model's passes use the caller's random numbers
                differences = torch.zeros(len(masks), dtype=torch.float64, device=x.device)

                def compute_score_differences(part: slice) -> None:
                    is_shown = masks[part].to(x.device).bool()[:, cell_labels][:, None]
                    values = evaluator.score_variants(sample, torch.where(is_shown, x, baseline)).double()
                    differences[part] = values - clean_score  # an offset of all logits cancels in full precision

                evaluator.process_chunks(sample, len(masks), compute_score_differences)
                fit.scores = differences.cpu()
                return fit.scores

            method = self.create_captum_explainer(score_masks, fit)
            all_shown = torch.ones(1, n_cells, dtype=torch.float32, device="cpu")
            n = self.n_samples  # captum passes all masks in one call: they are small, however large the image is
            try:
                method.attribute(all_shown, n_samples=n, perturbations_per_eval=n, return_input_shape=False)
            finally:
                vars(method).clear()  # it refers to itself, and would wait for the garbage collector
        return fit.linear_fit

    def _label_cells(self, x: Tensor) -> CellLabels:
        """Return the cell number of each pixel of a sample (C,*S). The cells form a grid, or are the segments."""
        if self.segments is None:
            size = x.shape[1:]
            labels = label_grid_cells(size, [min(self.grid_size, length) for length in size], x.device)
        else:
            labels = resolve_segment_labels(self.segments, x)
        numbers, labels = labels.unique(return_inverse=True)
        if len(numbers) < 2:
            raise InputError(
                f"{self.name} requires at least two cells, but there is only one: raise grid_size, or pass segments"
            )
        return CellLabels(labels, len(numbers))


@register_optional("captum", "captum")
class LIME(SurrogateExplainer):
    """φ of argmin Σ_z π(z) (f(z) - b - φ·z)² + α |φ|², z uniform masks of which cells are shown (Ribeiro et al. 2016).

    π(z) = exp(-D²/2σ²), D the cosine distance of z to all ones. captum's default, a lasso with α = 0.01, gives zeros if
    the score changes by less. Use it for a model of which only the scores are available. It needs the package captum.

    Args:
        kernel_width: Width σ of the kernel π. The default is that of the authors' code for images, which compares masks
            and not pixels.
        alpha: Weight α of the penalty on the coefficients. The default is that of the authors' code.

    >>> explanation = LIME(model, grid_size=3, n_samples=20).explain(image, "nodule")
    >>> len(set(explanation.attribution.ravel().tolist())) <= 9  # one value per cell
    True

    """

    name, title, paper = "lime", "LIME", "arXiv:1602.04938"
    kernel_width: float = 0.25
    alpha: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive_number(kernel_width=self.kernel_width, high=1e6)
        check_number(low=0, alpha=self.alpha)

    def create_captum_explainer(self, scorer: MaskScorer, interpretable_model: InterpretableModel) -> Any:
        """Create captum's LIME explainer, which calls `scorer` for the scores of masks."""
        from captum.attr._core.lime import Lime, get_exp_kernel_similarity_function

        kernel = get_exp_kernel_similarity_function("cosine", kernel_width=self.kernel_width)
        return Lime(scorer, interpretable_model=interpretable_model, similarity_func=kernel)

    def fit_linear_model(self, masks: Tensor, scores: Tensor, weights: Tensor) -> LinearFit:
        """Fit a weighted ridge regression with an intercept."""
        if not bool(weights.any()):
            raise InputError(
                f"kernel_width={self.kernel_width!r}: all samples have the weight 0; pass a larger kernel_width"
            )
        shares = weights / weights.sum()
        rows, y = masks - shares @ masks, scores - shares @ scores
        cells, rank = solve_least_squares(rows, y, weights, self.alpha)
        note = format_explained_variance(
            len(scores), len(cells), y - rows @ cells, y, shares, is_determined=rank == len(cells)
        )
        return LinearFit(cells, note)


@register_optional("captum", "captum")
class KernelSHAP(SurrogateExplainer):
    """φ of argmin Σ_z k(z) (f(z) - f(0) - φ·z)² with Σφ = f(1) - f(0): Shapley values (Lundberg & Lee 2017, theorem 2).

    z: which cells are shown, including all and none; k: the Shapley kernel, from which the other masks are drawn. The sum holds
    up to rounding, see `completeness_gap` in `diagnostics`; captum enforces it by weights of a million. If the samples do not
    determine the cells, the shortest φ is returned.

    Use it for Shapley values of regions if only the scores of the model are available. It needs the package captum.

    >>> explanation = KernelSHAP(model, grid_size=3, n_samples=20).explain(image, "nodule")
    >>> abs(explanation.diagnostics["completeness_gap"]) < 0.01  # in units of the score
    True
    """

    name, title, paper = "kernelshap", "KernelSHAP", "arXiv:1705.07874"

    def create_captum_explainer(self, scorer: MaskScorer, interpretable_model: InterpretableModel) -> Any:
        """Create captum's Kernel SHAP explainer, which calls `scorer` for the scores of masks."""
        from captum.attr import KernelShap

        method = KernelShap(scorer)
        method.interpretable_model = interpretable_model
        return method

    def fit_linear_model(self, masks: Tensor, scores: Tensor, weights: Tensor) -> LinearFit:
        """Fit a linear model by least squares. Its coefficients add up to the change of the score."""
        count = masks.shape[1]
        shown_counts, ends = masks.sum(1), [float(count), 0.0]
        if len(scores) < 2 or shown_counts[:2].tolist() != ends:
            raise InputError(
                f"n_samples={self.n_samples!r}: expected 3 or more, because the first two samples show all cells and no cell"
            )
        change = scores[0] - scores[1]
        rows = masks[2:] - masks[2:].mean(1, keepdim=True)
        y = scores[2:] - scores[1] - shown_counts[2:] * change / count
        remainder, rank = solve_least_squares(rows, y, torch.ones_like(y), 0.0)
        cells = change / count + remainder - remainder.mean()
        even = torch.full_like(y, 1 / max(1, len(y)))
        target = scores[2:] - even @ scores[2:]
        note = format_explained_variance(
            len(scores), count, y - rows @ remainder, target, even, is_determined=rank == count - 1
        )
        total, expected = float(cells.sum()), float(change)
        gap = format_completeness_gap("the cells", total, "the score less the baseline's is", expected)
        diagnostics = {"completeness_gap": total - expected, "score_change": expected}
        return LinearFit(cells, f"{note}; completeness: {gap}", diagnostics)


_rng_lock = threading.Lock()
FLOAT_TENSOR_FACTORIES = {torch.ones, torch.zeros, torch.empty, torch.rand, torch.randn, torch.linspace, torch.eye}
TENSOR_FACTORIES = FLOAT_TENSOR_FACTORIES | {torch.tensor, torch.full, torch.arange, torch.randint, torch.randperm}


class CPUFloat32Mode(BaseFunctionMode):
    """A function mode in which this thread creates tensors on the CPU in float32, independent of the user's defaults."""

    def run_intercepted_function(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Call a function and return its result. New tensors are on the CPU and of dtype float32 by default."""
        if func in TENSOR_FACTORIES:
            kwargs.setdefault("device", torch.device("cpu"))
        if func in FLOAT_TENSOR_FACTORIES and kwargs.get("dtype") is None:
            kwargs["dtype"] = torch.float32
        return func(*args, **kwargs)


@contextmanager
def cpu_rng_seeded(seed: int) -> Iterator[None]:
    """Seed PyTorch's CPU random generator inside the `with`, and restore it at the end. Only one thread can be inside."""
    with _rng_lock, torch.random.fork_rng(devices=[]), CPUFloat32Mode():
        torch.default_generator.manual_seed(seed)
        yield
