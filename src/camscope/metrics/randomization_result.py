"""Randomised: the curve of a randomization test beside its null, and what follows from it.

Verdict: whether maps of a model without training are as little alike the trained one's as maps of different images
are.
The picture of a randomization test: step by step what became of one map, over the curves of how alike all of them
stayed.
"""

import html
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

from camscope import render
from camscope.errors import OutputError, UndefinedError
from camscope.metrics.base import FloatArray
from camscope.plurals import plural
from camscope.render import Curve, RGBImage, draw_text
from camscope.safe_files import write_bytes

SAME_MAP_SIMILARITY = (
    0.95  # a map that stays this alike is the same map, whatever maps of different images have in common
)
N_NULL_RESAMPLES = 2000


class RandomizationVerdict(NamedTuple):
    """What one similarity says of the last step: `final_similarity`, the mean there, beside the null's interval `null_low`..`null_high`.

    `passes` None: there is nothing to compare, and so neither a pass nor a failure.
    """

    passes: bool | None
    final_similarity: float
    null_low: float
    null_high: float
    reason: str


def judge_final_similarity(
    final_similarities: FloatArray, null_interval: tuple[float, float, float]
) -> RandomizationVerdict:
    """Similarities of the last step's maps, NaN where there is none; a word needs a number of half of them at least."""
    low, _, high = null_interval
    last = compute_nan_mean(final_similarities)
    if np.isnan(final_similarities).mean() > 0.5 or np.isnan(high):
        return RandomizationVerdict(None, last, low, high, "most maps have no number: nothing to compare")
    if last >= SAME_MAP_SIMILARITY:
        return RandomizationVerdict(False, last, low, high, "the map is still the same")
    words = "less alike than" if last < low else "as alike as" if last <= high else "more alike than"
    return RandomizationVerdict(bool(last <= high), last, low, high, f"{words} maps of different images")


def compute_null_interval(pair_similarities: FloatArray) -> tuple[float, float, float]:
    """(N,N), NaN for none -> each image beside another one at random, the mean over images: 95 % of such means lie between
    the first and the last number; the middle one is the mean of all pairs.
    """
    known = [row[~np.isnan(row)] for row in pair_similarities]
    known = [row for row in known if row.size]
    if not known:
        return float("nan"), float("nan"), float("nan")
    random = np.random.default_rng(0)
    drawn = np.mean([random.choice(row, N_NULL_RESAMPLES) for row in known], axis=0)
    low, high = np.quantile(drawn, [0.025, 0.975])
    return float(low), float(np.mean(np.concatenate(known))), float(high)


def compute_nan_mean(values: FloatArray) -> float:
    """The mean of those that are numbers; NaN of none."""
    known = values[~np.isnan(values)]
    return float(known.mean()) if known.size else float("nan")


MIN_IMAGES_FOR_VERDICT = 5  # images, whose maps are 10 pairs


@dataclass(frozen=True, eq=False)
class RandomizationResult:
    """How alike the maps of N images stay to the trained model's, as its parts lose their values.

    `part_names`: the parts, in the order in which they went. `similarities` (seeds,steps,N) by similarity: NaN where a map has no
    number (all zeros, constant, NaN). `null_similarities` (N,N): of the trained model's maps of different images, NaN on the diagonal.
    `is_signed`: whether SSIM saw zero as 1/2; its data range is 1, see `ssim`. `first_image_maps` (1+steps,*S): the first image's, of the
    trained model and then of the first seed. `covers_whole_model`: whether the steps together are all of the model.
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
        """N."""
        return len(next(iter(self.null_similarities.values())))

    @property
    def n_undefined(self) -> int:
        """How many maps of randomised models could not be compared, of all."""
        return int(max(np.isnan(one).sum() for one in self.similarities.values()))

    def compute_mean_curve(self, similarity: str) -> FloatArray:
        """(1+steps,): the mean over images and seeds, from the trained model's 1 on; NaN where no map has a number."""
        return np.append(1.0, [compute_nan_mean(step) for step in np.moveaxis(self.similarities[similarity], 1, 0)])

    def compute_seed_range(self, similarity: str) -> tuple[FloatArray, FloatArray]:
        """(1+steps,) twice: the lowest and the highest seed's mean over images."""
        means = np.array([[compute_nan_mean(step) for step in run] for run in self.similarities[similarity]])
        return np.append(1.0, means.min(0)), np.append(1.0, means.max(0))

    def get_null_interval(self, similarity: str) -> tuple[float, float, float]:
        """Where 95 % of means over as many random pairs as there are images lie, and the mean of all pairs in between."""
        return self._null_intervals[similarity]

    @cached_property
    def verdicts(self) -> dict[str, RandomizationVerdict]:
        """Of each similarity; UndefinedError where the test has none."""
        if self.no_verdict_reason:
            raise UndefinedError(self.no_verdict_reason)
        return {
            name: judge_final_similarity(values[:, -1], self._null_intervals[name])
            for name, values in self.similarities.items()
        }

    @property
    def no_verdict_reason(self) -> str:
        """Why there is no verdict; "" where there is one."""
        if self.order != "cascading":
            return "one part at a time never ends with an untrained model: the verdict is the cascade's"
        if not self.covers_whole_model:
            return "something of the training is left after the last step: a map may still show that; name every part"
        images = plural(self.n_images, "image is", "images are")
        few = f"{images} too few to say what maps of different images have in common: pass {MIN_IMAGES_FOR_VERDICT} or more"
        return few if self.n_images < MIN_IMAGES_FOR_VERDICT else ""

    @property
    def passes(self) -> bool | None:
        """Whether every similarity falls to or below its null by the last step; None where one cannot say, and none fails."""
        each = {one.passes for one in self.verdicts.values()}
        return False if False in each else None if None in each else True

    def select_seed(self, seed: int) -> "RandomizationResult":
        """One run by itself; its picture still has the first one's maps."""
        place = self.seeds.index(seed)
        return replace(
            self, seeds=(seed,), similarities={name: one[[place]] for name, one in self.similarities.items()}
        )

    @property
    def title(self) -> str:
        """The test and its outcome in a line."""
        passes = None if self.no_verdict_reason else self.passes
        said = ", no verdict" if passes is None else ": passes" if passes else ": fails"
        images, seeds = plural(self.n_images, "image"), ", ".join(map(str, self.seeds))
        words = f"{self.method}, {self.order} randomization{said} ({images}, seeds {seeds}"
        return (
            f"{words}; {plural(self.n_undefined, 'comparison')} without a number)" if self.n_undefined else f"{words})"
        )

    def figure(self) -> RGBImage:
        """(H,W,3): a column for each step: the first image's map, and how alike all maps are."""
        verdicts = {} if self.no_verdict_reason else self.verdicts
        rows = [
            SimilarityCurve(
                name,
                self.compute_mean_curve(name),
                *self.compute_seed_range(name),
                self.get_null_interval(name),
                verdicts.get(name),
            )
            for name in self.similarities
        ]
        return draw_randomization_figure(self.title, self.part_names, self.first_image_maps, rows)

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = True) -> Path:
        """Write the figure: `.png`, `.jpg` or `.webp`."""
        suffix = Path(path).suffix.lower()
        if suffix not in render.IMAGE_FORMATS:
            raise OutputError(f"{path}: cannot write {suffix or 'a file without a suffix'}; use .png, .jpg or .webp")
        return write_bytes(path, render.encode_image(self.figure(), suffix), overwrite=overwrite)

    def __repr__(self) -> str:
        lines = [f"<{self.title}>"]
        for name in self.similarities:
            low, _, high = self.get_null_interval(name)
            curve = "  ".join(
                f"{step} {value:.2f}"
                for step, value in zip(self.part_names, self.compute_mean_curve(name)[1:], strict=True)
            )
            lines.append(f"{name:>9}: {curve}  | different images {low:.2f}..{high:.2f}")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        words = html.escape(self.title)
        return render.build_figure_html(self.figure(), words, f"<pre>{html.escape(repr(self))}</pre>")

    @cached_property
    def _null_intervals(self) -> dict[str, tuple[float, float, float]]:
        return {name: compute_null_interval(pairs) for name, pairs in self.null_similarities.items()}


FIGURE_WIDTH_PX = 1400  # pixels that the steps share
GREEN, RED, GRAY = (30, 120, 60), (176, 42, 42), (110, 110, 110)
ROW_GAP_PX = 6


class SimilarityCurve(NamedTuple):
    """One similarity: its curve (1+steps,), the seeds' lowest and highest, the null's ends and middle, and its verdict."""

    name: str
    mean_values: FloatArray
    seed_low: FloatArray
    seed_high: FloatArray
    null_interval: tuple[float, float, float]
    verdict: RandomizationVerdict | None


def draw_randomization_figure(
    title: str, part_names: Sequence[str], maps: FloatArray, curves: Sequence[SimilarityCurve]
) -> RGBImage:
    """(H,W,3): a column for each step, the trained model's first; a row of maps of the first image, and one for each curve."""
    names = ["trained", *_shorten_names(part_names)]
    step = int(np.clip(FIGURE_WIDTH_PX // len(names), 64, 128))
    floor = min(float(np.nanmin(one.seed_low, initial=0.0)) for one in curves)
    ends = (-1.0 if floor < -0.5 else -0.5 if floor < -0.1 else -0.1, 1.0)
    body = [_compose_row("first image", np.concatenate([_draw_thumbnail(one, step) for one in maps], axis=1))]
    for one in curves:
        body += [_make_blank_image(ROW_GAP_PX, 1), _draw_curve_row(one, step, ends)]
    body.append(_compose_row("", np.concatenate([_draw_column_label(name, step) for name in names], axis=1)))
    wide = max(part.shape[1] for part in body)
    rows = [render.pad_image(part, right=wide - part.shape[1]) for part in body]
    legend = "pale: seeds' range · orange: maps of different images, 95 % of means over as many random pairs as images"
    head = [
        draw_text(title, 20, width=wide, max_lines=2),
        draw_text(legend, 13, width=wide, max_lines=2, text_color=GRAY),
    ]
    return render.pad_image(np.concatenate([*head, *rows]), 8, 8, 8, 8)


def _draw_curve_row(similarity_curve: SimilarityCurve, column_width: int, y_range: tuple[float, float]) -> RGBImage:
    """One similarity, with what it says of the last step at its right."""
    ticks = [tick for tick in (-1.0, -0.5, 0.0, 0.5, 1.0) if y_range[0] <= tick]
    curve, band = (
        Curve(similarity_curve.mean_values, similarity_curve.seed_low, similarity_curve.seed_high),
        (similarity_curve.null_interval[0], similarity_curve.null_interval[2]),
    )
    picture = render.draw_line_chart(curve, band, step_width=column_width, height=120, value_range=y_range, ticks=ticks)
    return _compose_row(
        similarity_curve.name, picture, similarity_curve.verdict, render.draw_chart_axis(120, y_range, ticks)
    )


def _compose_row(
    title: str, image: RGBImage, verdict: RandomizationVerdict | None = None, axis_image: RGBImage | None = None
) -> RGBImage:
    """A row: its title, the numbers of its axis, the picture, and the words at its right."""
    rows, left, right = image.shape[0], 118, 190
    head = _make_blank_image(rows, left)
    if title:
        tile = draw_text(title, 14, width=left - (0 if axis_image is None else axis_image.shape[1]), max_lines=2)
        head[(rows - tile.shape[0]) // 2 :][: tile.shape[0], : tile.shape[1]] = tile
    if axis_image is not None:
        head[:, left - axis_image.shape[1] :] = axis_image
    return np.concatenate([head, image, _draw_verdict(verdict, rows, right)], axis=1)


def _draw_verdict(verdict: RandomizationVerdict | None, height: int, width: int) -> RGBImage:
    out = _make_blank_image(height, width)
    if verdict is None:
        return out
    numbers = f"{verdict.final_similarity:.2f} beside {verdict.null_low:.2f}..{verdict.null_high:.2f}"
    tiles = [
        _draw_outcome(verdict.passes, width),
        draw_text(numbers, 13, width=width),
        draw_text(verdict.reason, 12, width=width, max_lines=2, text_color=GRAY),
    ]
    column = np.concatenate(tiles)[:height]
    out[(height - column.shape[0]) // 2 :][: column.shape[0]] = column
    return out


def _draw_outcome(passes: bool | None, width: int) -> RGBImage:
    """In a word."""
    if passes is None:
        return draw_text("no verdict", 16, width=width, text_color=GRAY)
    return draw_text("passes" if passes else "fails", 16, width=width, text_color=GREEN if passes else RED)


def _shorten_names(part_names: Sequence[str]) -> list[str]:
    """The ends of the names: their last part, or two where a number is all that it is."""
    parts = [name.split(".") for name in part_names]
    return [".".join(part[-2:] if part[-1].isdigit() else part[-1:]) for part in parts]


def _draw_column_label(name: str, width: int) -> RGBImage:
    tile = draw_text(name, 12, width=width, max_lines=2)
    return render.pad_image(tile, bottom=max(0, 40 - tile.shape[0]))


def _draw_thumbnail(attribution: FloatArray, side: int) -> RGBImage:
    """(*S) -> (side,side,3): in its own colours, divided by its own maximum; of a volume the mean along its depth."""
    flat = np.nan_to_num(attribution, nan=0.0, posinf=0.0, neginf=0.0)
    while flat.ndim > 2:
        flat = flat.mean(0)
    flat = np.repeat(flat[None], max(1, len(flat) // 4), 0) if flat.ndim == 1 else flat
    colours = render.DIVERGING if (flat < 0).any() else "inferno"
    picture = render.resize_to_fit(
        render.colorize(render.to_display_range(flat, "max", colours)[0], colours), side - 4, side - 4
    )
    rows, columns = side - picture.shape[0], side - picture.shape[1]
    return render.pad_image(picture, rows // 2, rows - rows // 2, columns // 2, columns - columns // 2)


def _make_blank_image(height: int, width: int) -> RGBImage:
    return np.full((height, width, 3), 255, np.uint8)
