"""Concepts: what a layer's activation of some images is made of, and how to see it."""

import html
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from camscope import render
from camscope.errors import InputError
from camscope.geometry import Placement
from camscope.wording import plural

Floats = NDArray[np.floating[Any]]


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
