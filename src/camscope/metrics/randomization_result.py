"""The result of a model randomization test: similarity curves, verdicts and a figure."""

import html
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

from camscope import render
from camscope.atomic_writes_and_folder_locks import write_bytes
from camscope.errors import OutputError, UndefinedError
from camscope.metrics.metric_registry import FloatArray
from camscope.plurals import plural
from camscope.registry import METHODS
from camscope.render import RGBImage
from camscope.render.randomization_figure import SimilarityCurve, draw_randomization_figure

SAME_MAP_SIMILARITY = 0.95  # at or above it two maps count as the same, whatever the null distribution is
N_NULL_RESAMPLES = 2000
NullInterval = tuple[float, float, float]  # low end, mean, high end


class RandomizationVerdict(NamedTuple):
    """The verdict of a randomization test by one similarity, after the last step.

    Attributes:
        passes: Whether the test passes, or None if there is nothing to compare.
        final_similarity: The mean similarity after the last step.
        null_low: Low end of the interval for maps of different images.
        null_high: High end of that interval.
        reason: The verdict as text.

    >>> verdict = RandomizationVerdict(True, 0.1, -0.2, 0.3, "the maps change as much as those of different images")
    >>> verdict.passes
    True

    """

    passes: bool | None
    final_similarity: float
    null_low: float
    null_high: float
    reason: str

    def describe(self) -> str:
        """Describe the verdict as text, with its numbers and its reason.

        Returns:
            One or two sentences.

        >>> verdict = RandomizationVerdict(True, 0.1, -0.2, 0.3, "the maps change")
        >>> "the maps change" in verdict.describe()
        True

        """
        outcome = "no verdict" if self.passes is None else "passes" if self.passes else "fails"
        return f"{outcome}: {self.final_similarity:.2f} (null {self.null_low:.2f}..{self.null_high:.2f}), {self.reason}"


def judge_final_similarity(final_similarities: FloatArray, null_interval: NullInterval) -> RandomizationVerdict:
    """Judge the similarities (N,) after the last step against the null interval. At least half of them must be defined."""
    low, _, high = null_interval
    last = compute_mean_without_nan(final_similarities)
    if np.isnan(final_similarities).mean() > 0.5 or np.isnan(high):
        return RandomizationVerdict(None, last, low, high, "most maps are undefined: nothing to compare")
    if last >= SAME_MAP_SIMILARITY:
        return RandomizationVerdict(False, last, low, high, "the map is still the same")
    relation = "less similar than" if last < low else "as similar as" if last <= high else "more similar than"
    return RandomizationVerdict(bool(last <= high), last, low, high, f"{relation} maps of different images")


def compute_null_interval(pair_similarities: FloatArray) -> NullInterval:
    """Resample the similarities between different images. Return the 2.5 % quantile, the mean and the 97.5 % quantile."""
    rows = [row[~np.isnan(row)] for row in pair_similarities]
    rows = [row for row in rows if row.size]
    if not rows:
        return float("nan"), float("nan"), float("nan")
    random = np.random.default_rng(0)
    means = np.mean([random.choice(row, N_NULL_RESAMPLES) for row in rows], axis=0)
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(np.mean(np.concatenate(rows))), float(high)


def compute_mean_without_nan(values: FloatArray) -> float:
    """Return the mean of the values that are not NaN. If all values are NaN, return NaN."""
    defined = values[~np.isnan(values)]
    return float(defined.mean()) if defined.size else float("nan")


MIN_IMAGES_FOR_VERDICT = 5  # five images give 10 pairs of maps


@dataclass(frozen=True, eq=False)
class RandomizationResult:
    """The result of a randomization test: how similar maps stay to the trained model's maps at each step.

    Attributes:
        method: The display name of the method.
        order: "cascading" or "independent".
        part_names: The parts in the order in which they were randomized, of the steps that were compared.
        seeds: The seeds of the runs.
        similarities: (seeds,steps,N) for each similarity. NaN stands for an undefined map (zeros, constant or NaN).
        null_similarities: (N,N) for each similarity, between the trained model's maps of two images. The diagonal is NaN.
        is_signed: Whether maps were compared as signed maps, with zero at 1/2 for SSIM (see `ssim`).
        first_image_maps: (1+steps,*S) the first image's maps: of the trained model, then of the first seed.
        covers_whole_model: Whether the steps together randomize the whole model.

    >>> import torch
    >>> from camscope import GradCAM, load_model
    >>> from camscope.metrics import run_randomization_test
    >>> explainer, x = GradCAM(load_model("phantom"), "layer4"), torch.rand(2, 1, 64, 64)
    >>> result = run_randomization_test(explainer, x, 1, layers=["fc"], seeds=[0], similarities=["pearson"])
    >>> result.part_names, result.similarities["pearson"].shape
    (('fc',), (1, 1, 2))

    """

    method: str
    order: str
    part_names: tuple[str, ...]
    seeds: tuple[int, ...]
    similarities: Mapping[str, FloatArray]
    null_similarities: Mapping[str, FloatArray]
    is_signed: bool
    first_image_maps: FloatArray
    covers_whole_model: bool = True

    @property
    def n_images(self) -> int:
        """The number of images."""
        return len(next(iter(self.null_similarities.values())))

    @property
    def n_undefined(self) -> int:
        """The largest number of undefined comparisons in any of the similarity measures."""
        return int(max(np.isnan(values).sum() for values in self.similarities.values()))

    def compute_mean_curve(self, similarity: str) -> FloatArray:
        """Return the mean similarity after each step. The first value is 1, before any step. Undefined means are NaN.

        Args:
            similarity: Name of a similarity of the test.

        Returns:
            (1+steps,) similarities in -1..1.

        >>> import torch
        >>> from camscope import GradCAM, load_model
        >>> from camscope.metrics import run_randomization_test
        >>> explainer, x = GradCAM(load_model("phantom"), "layer4"), torch.rand(2, 1, 64, 64)
        >>> result = run_randomization_test(explainer, x, 1, layers=["fc"], seeds=[0], similarities=["pearson"])
        >>> result.compute_mean_curve("pearson").shape
        (2,)

        """
        return np.append(
            1.0, [compute_mean_without_nan(step) for step in np.moveaxis(self.similarities[similarity], 1, 0)]
        )

    def compute_seed_range(self, similarity: str) -> tuple[FloatArray, FloatArray]:
        """Average the similarity over the images for each seed. Return the lowest and the highest mean at each step (1+steps,).

        Args:
            similarity: Name of a similarity of the test.

        Returns:
            The lowest and the highest means, (1+steps,) each.

        >>> import torch
        >>> from camscope import GradCAM, load_model
        >>> from camscope.metrics import run_randomization_test
        >>> explainer, x = GradCAM(load_model("phantom"), "layer4"), torch.rand(2, 1, 64, 64)
        >>> result = run_randomization_test(explainer, x, 1, layers=["fc"], seeds=[0, 1], similarities=["pearson"])
        >>> lowest, highest = result.compute_seed_range("pearson")
        >>> lowest.shape, highest.shape
        ((2,), (2,))

        """
        means = np.array([[compute_mean_without_nan(step) for step in run] for run in self.similarities[similarity]])
        return np.append(1.0, means.min(0)), np.append(1.0, means.max(0))

    @cached_property
    def null_intervals(self) -> dict[str, NullInterval]:
        """The null interval of each similarity measure: lower limit, mean and upper limit (see `compute_null_interval`)."""
        return {name: compute_null_interval(pairs) for name, pairs in self.null_similarities.items()}

    @cached_property
    def verdicts(self) -> dict[str, RandomizationVerdict]:
        """The verdict of each similarity measure. Raises an UndefinedError if the test cannot give a verdict."""
        if self.no_verdict_reason:
            raise UndefinedError(self.no_verdict_reason)
        nulls = self.null_intervals
        return {name: judge_final_similarity(values[:, -1], nulls[name]) for name, values in self.similarities.items()}

    @property
    def no_verdict_reason(self) -> str:
        """The reason why the test gives no verdict. The text is empty if there is a verdict."""
        if self.order != "cascading":
            return "only the cascading order ends with an untrained model: use order='cascading' for a verdict"
        if not self.covers_whole_model:
            return "some trained weights are left after the last step: pass all parts of the model as layers"
        images = plural(self.n_images, "image is", "images are")
        few = f"{images} too few for the similarity of maps of different images: pass {MIN_IMAGES_FOR_VERDICT} or more"
        return few if self.n_images < MIN_IMAGES_FOR_VERDICT else ""

    @property
    def passes(self) -> bool | None:
        """Whether the test passes by every similarity measure. The value is `None` if the test cannot decide."""
        outcomes = {verdict.passes for verdict in self.verdicts.values()}
        return False if False in outcomes else None if None in outcomes else True

    @property
    def summary(self) -> str:
        """One line with the method, the order of randomization and the outcome of the test."""
        passes = None if self.no_verdict_reason else self.passes
        outcome = ", no verdict" if passes is None else ": passes" if passes else ": fails"
        images, seeds = plural(self.n_images, "image"), ", ".join(map(str, self.seeds))
        text = f"{METHODS.replace_names_by_titles(self.method)}, {self.order} randomization{outcome} ({images}, seeds {seeds}"
        return f"{text}; {plural(self.n_undefined, 'comparison')} undefined)" if self.n_undefined else f"{text})"

    def figure(self) -> RGBImage:
        """Draw a figure (H,W,3). For each step, it shows the first image's map and the mean similarity.

        Returns:
            (H,W,3) uint8.

        >>> import torch
        >>> from camscope import GradCAM, load_model
        >>> from camscope.metrics import run_randomization_test
        >>> explainer, x = GradCAM(load_model("phantom"), "layer4"), torch.rand(2, 1, 64, 64)
        >>> result = run_randomization_test(explainer, x, 1, layers=["fc"], seeds=[0], similarities=["pearson"])
        >>> result.figure().dtype
        dtype('uint8')

        """
        curves = []
        for name in self.similarities:
            verdict = None if self.no_verdict_reason else self.verdicts[name]
            outcome = "" if verdict is None else verdict.describe()
            low, high = self.compute_seed_range(name)
            mean, null = self.compute_mean_curve(name), self.null_intervals[name]
            curves.append(SimilarityCurve(name, mean, low, high, null, verdict and verdict.passes, outcome))
        return draw_randomization_figure(self.summary, self.part_names, self.first_image_maps, curves)

    def save_figure(self, path: str | os.PathLike[str], *, overwrite: bool = True) -> Path:
        """Write the figure to a `.png`, `.jpg` or `.webp` file.

        Args:
            path: File to write.
            overwrite: Whether an existing file is replaced.

        Returns:
            The path of the file.

        Raises:
            OutputError: The suffix is unknown, or the file cannot be written.

        >>> import tempfile
        >>> import torch
        >>> from camscope import GradCAM, load_model
        >>> from camscope.metrics import run_randomization_test
        >>> explainer, x = GradCAM(load_model("phantom"), "layer4"), torch.rand(2, 1, 64, 64)
        >>> result = run_randomization_test(explainer, x, 1, layers=["fc"], seeds=[0], similarities=["pearson"])
        >>> result.save_figure(f"{tempfile.mkdtemp()}/randomization.png").name
        'randomization.png'

        """
        suffix = Path(path).suffix.lower()
        if suffix not in render.IMAGE_FORMATS:
            raise OutputError(f"{path}: cannot write {suffix or 'a file without a suffix'}; use .png, .jpg or .webp")
        return write_bytes(path, render.encode_image(self.figure(), suffix), overwrite=overwrite)

    def __repr__(self) -> str:
        lines = [f"<{self.summary}>"]
        for name, (low, _, high) in self.null_intervals.items():
            steps = zip(self.part_names, self.compute_mean_curve(name)[1:], strict=True)
            curve = "  ".join(f"{step} {value:.2f}" for step, value in steps)
            lines.append(f"{name:>9}: {curve}  | different images {low:.2f}..{high:.2f}")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        summary = html.escape(self.summary)
        return render.build_figure_html(self.figure(), summary, f"<pre>{html.escape(repr(self))}</pre>")
