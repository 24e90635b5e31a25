"""Deep Feature Factorization: the few concepts that a layer's activation is made of, and what each does to the score.

Concepts: what a layer's activation of some images is made of, and how to see it.
"""

import html
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from camscope import render
from camscope.errors import InputError
from camscope.explainers.cam.base import LayerExplainer
from camscope.explainers.cam.layer_features import Features
from camscope.explainers.cam.layer_pass import Pass
from camscope.explainers.core.base import register
from camscope.explainers.core.batching import InPasses
from camscope.explainers.core.evaluation_context import asking, expect_count, expect_number, survey
from camscope.explainers.core.inputs import Item
from camscope.explainers.core.linalg import Factors, factorised
from camscope.explanation import Floats, Pixels
from camscope.geometry import Placement
from camscope.plurals import plural
from camscope.targets import EveryClass, Score


@dataclass(frozen=True)
class ClassGain:
    """A class whose score a concept raises, by how much."""

    index: int
    label: str
    gain: float


@dataclass(frozen=True, eq=False)
class Concepts:
    """C concepts that N images share at a layer, the one with the largest share first.

    `maps` (N,C,h,w): how much of each concept is in each cell, not negative, in the activation's units; `vectors` (C,K):
    its channels, of length 1. Σ_c map x vector is the layer's positive activation, but for `error`: length of what is
    missing over length of the whole. `shares` (C,): each concept's part of all that the concepts hold, in sum 1.
    `gains` (C,classes): what a concept alone does to each class score, less what an empty layer gives; the mean over the
    images, each weighing as much as the concept is in it; no classes for a model without class scores. `top`: the
    classes that gain most. `pictures` (H,W,3) or None and `placements`: what to draw on, and where the maps lie on it.
    """

    maps: Floats
    vectors: Floats
    shares: Floats
    gains: Floats
    top: tuple[tuple[ClassGain, ...], ...]
    error: float
    layer: str
    names: tuple[str, ...]
    placements: tuple[Placement, ...]
    pictures: tuple[render.Picture | None, ...] = field(repr=False)
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.vectors)

    @property
    def legend(self) -> tuple[render.Entry, ...]:
        """What the colour of each concept stands for: its number from 0, its share, and the classes that it raises."""
        return tuple(
            render.Entry(colour, f"concept {c} · {_percent(float(self.shares[c]))}", _lines(self.top[c]))
            for c, colour in enumerate(render.swatches(len(self)))
        )

    def picture(self, image: int = 0, *, alpha: float = 0.8) -> render.Picture:
        """(H,W,3): one image, each pixel in the colour of its strongest concept, as opaque as that is strong.

        The strongest cell of all images has the opacity `alpha`. What the preprocessing cropped away is hatched.
        """
        if self.maps.ndim != 4:
            raise InputError(f"of maps of {plural(self.maps.ndim - 2, 'axis')} there is no picture yet; use .maps")
        placement, picture = self.placements[image], self.pictures[image]
        strength, covered = placement.project(self.maps[image, 0])
        numbers = np.zeros(strength.shape, dtype=np.intp)
        for c in range(1, len(self)):
            other = placement.project(self.maps[image, c])[0]
            numbers[other > strength] = c
            strength = np.maximum(strength, other)
        largest = float(self.maps.max())
        if picture is None:
            picture = np.full((*strength.shape, 3), 128, dtype=np.uint8)
        colours = [entry.colour for entry in self.legend]
        opacity = strength / largest if largest > 0 else strength
        return render.regions(picture, numbers, opacity, colours, alpha=alpha, covered=covered)

    def figure(self, *, alpha: float = 0.8, columns: int | None = None, height: int = 320) -> render.Picture:
        """(H,W,3): every image as `picture` has it, beside the legend. `height`: rows of an image."""
        pictures = [self.picture(i, alpha=alpha) for i in range(len(self.maps))]
        grid = render.panel(pictures, self.names, columns=columns, height=height)
        heading = "share; score it gains alone" if any(self.top) else "share"
        return render.beside(*render.levelled(grid, render.legend(self.legend, max(12, height // 20), heading=heading)))

    def __repr__(self) -> str:
        shares = ", ".join(_percent(float(share)) for share in self.shares)
        counts = f"{plural(len(self), 'concept')} of {plural(len(self.maps), 'image')}"
        return f"<{counts} at {self.layer}: {shares}; error {self.error:.2f}>"

    def _repr_html_(self) -> str:
        words = html.escape(repr(self))
        return render.notebook_figure(self.figure(), words, words) if self.maps.ndim == 4 else f"<p>{words}</p>"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _lines(top: tuple[ClassGain, ...]) -> tuple[str, ...]:
    return tuple(f"{one.label.split(',')[0]}  {one.gain:+.1f}" for one in top)


AT_ONCE = 16  # images in one pass
NAMED = 3  # classes that name a concept


@register
class DeepFeatureFactorization(LayerExplainer, InPasses):
    """Concepts h_c (cells) and w_c (channels), none negative, with relu(A) ≈ Σ_c h_c w_c (Collins et al. 2018).

    `factorise` finds the concepts that several images share. The paper asks for no class; the map of one spreads what each
    concept alone does for the score over its cells, Σ_c (y_c - y_0) h_c / Σ h_c: y_c is the score with h_c w_c at the layer
    and nothing else, y_0 with nothing. Where a linear head reads the layer, the map's sum is the score of the whole
    factorisation less the bias. Each sample is factorised by itself, what is negative at the layer is left out.
    `concepts`: at most so many; no more than channels or cells. `sweeps`, `tolerance`: see `factorised`.
    """

    name, paper = "dff", "arXiv:1806.10206"
    forwards: ClassVar[str] = "1 + concepts rests"
    runs_model: ClassVar[bool] = True
    runs_rest: ClassVar[bool] = True
    concepts: int = 5
    sweeps: int = 200
    tolerance: float = 1e-6

    def __post_init__(self) -> None:
        super().__post_init__()
        expect_count(concepts=self.concepts, sweeps=self.sweeps)
        expect_number(tolerance=self.tolerance, low=0)

    def combine(self, features: Features) -> Tensor:
        """(N,*s), signed"""
        activation = features.activation.flatten(2)
        finite = activation.isfinite().flatten(1).all(1)[:, None]
        factors = self._factorised(torch.where(finite[..., None], activation, 0).mT)
        gains = gains_of(features, factors.maps, factors.vectors)
        total = factors.maps.sum(1)
        each = torch.where(total > 0, gains / torch.where(total > 0, total, 1), 0)
        heat = torch.where(finite, (factors.maps @ each[..., None])[..., 0], torch.nan)
        return heat.to(activation.dtype).view(len(heat), *features.activation.shape[2:])

    def factorise(self, images: Any) -> Concepts:
        """One image, or a list of images of one input size -> the concepts that they share, the largest share first."""
        items = [self.read(image) for image in (images if isinstance(images, list | tuple) else [images])]
        if not items:
            raise InputError("no images: factorise takes one at least")
        sizes = sorted({tuple(item.x.shape) for item in items})
        if len(sizes) != 1:
            raise InputError(
                f"{plural(len(items), 'image')} of the input sizes {sizes}; factorise takes images of one size"
            )
        return self._together(items)

    def _together(self, items: Sequence[Item]) -> Concepts:
        """One pass for every few images, one factorisation of them all."""
        with asking(survey(self.model), self, torch.stack([item.x for item in items])) as asked:
            x = asked.x
            at_once = 1 if asked.one_by_one else AT_ONCE
            pages = [self._page(asked.score(kind=EveryClass), part) for part in x.split(at_once)]
            matrix = torch.cat([page.activation.flatten(2).mT for page in pages])
            joint = self._factorised(matrix.flatten(0, 1)[None])
            maps, vectors = joint.maps[0].unflatten(0, matrix.shape[:2]), joint.vectors.expand(len(x), -1, -1)
            parts = [slice(start, start + at_once) for start in range(0, len(x), at_once)]
            if len(pages) > 1:  # what each has for its next passes must not be held for all
                pages = [replace(page, replay=None) for page in pages]
            gains = [gains_of(page, maps[part], vectors[part]) for page, part in zip(pages, parts, strict=True)]
        return _concepts(items, pages[0], replace(joint, maps=maps), torch.cat(gains))

    def _factorised(self, matrix: Tensor) -> Factors:
        return factorised(matrix.relu(), self.concepts, sweeps=self.sweeps, tolerance=self.tolerance)

    def _page(self, score: Score, x: Tensor) -> Features:
        layer = self.choose(x, score) if self.layer is None else str(self.layer)
        with Pass([self], [layer], x, [score]) as one:
            return next(features for _, features in one.features(0))


def gains_of(features: Features, maps: Tensor, vectors: Tensor) -> Tensor:
    """(N,cells,C), (N,C,K) -> (N,C): the score with one concept alone at the layer, less that of an empty layer.

    (N,C,classes) where the question is every class.
    """
    samples, concepts = vectors.shape[:2]
    if features.values.numel() == 0:
        return features.values.new_zeros(samples, concepts, 0)
    maps, vectors = F.pad(maps.mT, (0, 0, 0, 1)), F.pad(vectors, (0, 0, 0, 1))  # the last one is the empty layer

    def alone(part: slice) -> tuple[Callable[[Tensor], object], Tensor]:
        rows = torch.arange(samples * (concepts + 1), device=maps.device)[part]
        owners, which = rows // (concepts + 1), rows % (concepts + 1)

        def change(activation: Tensor) -> object:
            made = vectors[owners, which][..., None] * maps[owners, which][:, None]
            return activation.copy_(made.view(activation.shape))

        return change, owners

    scores: Tensor = features.scores_with(samples * (concepts + 1), alone).unflatten(0, (samples, concepts + 1))
    return (scores[:, :-1] - scores[:, -1:]).to(maps.dtype)


def _concepts(items: Sequence[Item], features: Features, joint: Factors, gains: Tensor) -> Concepts:
    """Maps (N,cells,C), vectors (1,C,K), gains (N,C,classes) -> what is known of the concepts, on the CPU."""
    amounts = joint.maps.sum(1)
    mean = (_portions(amounts)[..., None] * gains).sum(0)
    shares = _portions(amounts.sum(0) * joint.vectors[0].sum(1))
    maps = joint.maps.mT.unflatten(2, features.activation.shape[2:])

    def array(values: Tensor) -> Floats:
        return values.to("cpu", features.activation.dtype).numpy()

    drawn = [_drawn(item) for item in items]
    return Concepts(
        maps=array(maps),
        vectors=array(joint.vectors[0]),
        shares=array(shares),
        gains=array(mean),
        top=tuple(_gainers(row, features.score.name_of) for row in mean),
        error=float(joint.error[0]),
        layer=features.layer,
        names=tuple(item.name for item in items),
        placements=tuple(placement for placement, _ in drawn),
        pictures=tuple(picture for _, picture in drawn),
        notes=features.notes,
    )


def _gainers(gains: Tensor, name: Callable[[int], str]) -> tuple[ClassGain, ...]:
    best = gains.topk(min(NAMED, len(gains)))
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return tuple(ClassGain(k, name(k), gain) for k, gain in pairs if gain > 0)


def _drawn(item: Item) -> tuple[Placement, Pixels | None]:
    """What to draw on, and where the maps lie there: the original, or the model's input where the place is unknown."""
    if item.placement is not None and item.image is not None:
        return item.placement, item.image
    return Placement.identity(tuple(item.x.shape[1:])), item.seen


def _portions(amounts: Tensor) -> Tensor:
    """Each over the sum along the first axis; zeros where that is 0."""
    total = amounts.sum(0)
    return torch.where(total > 0, amounts / total, 0)
