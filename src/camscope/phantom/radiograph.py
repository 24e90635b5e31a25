"""Radiograph-like images from a seed, each with the exact mask of its evidence.

One radiograph with several findings, each with a mask of its own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal, get_args

import numpy as np
from numpy.random import Generator, Philox, SeedSequence
from numpy.typing import NDArray

from camscope.errors import InputError, TargetError
from camscope.phantom.chest_anatomy import Chest, FloatImage, draw_chest, soft_band, soft_step

Box = tuple[int, int, int, int]
Corner = Literal["top left", "top right", "bottom left", "bottom right"]

CATEGORIES: Final = ("no finding", "nodule", "effusion", "pneumothorax")
DEFAULT_SIDE_PIXELS: Final = 128
MIN_ATTENUATION_CHANGE: Final = (
    0.035  # attenuation: no pixel of a finding changes by less, so that the mask has a clean edge
)


@dataclass(frozen=True, eq=False)
class Phantom:
    """One drawn radiograph and what is true of it.

    `image` (H,W) uint8; `mask` (H,W) bool, exactly the pixels that the finding changes, none for "no finding";
    `label`, the index of `name` in CATEGORIES; `marker_mask` (H,W) bool, the pixels that the hospital's marker changes.
    """

    image: NDArray[np.uint8]
    mask: NDArray[np.bool_]
    label: int
    name: str
    marker_mask: NDArray[np.bool_]

    @property
    def boxes(self) -> tuple[Box, ...]:
        """The smallest box around the evidence as (left, top, right, bottom), right and bottom exclusive; or none."""
        rows, columns = np.flatnonzero(self.mask.any(axis=1)), np.flatnonzero(self.mask.any(axis=0))
        if not len(rows):
            return ()
        return ((int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1),)


@dataclass(frozen=True, eq=False)
class PhantomDataset:
    """N drawn radiographs: `images` (N,H,W) uint8, `masks` and `marker_masks` (N,H,W) bool, `labels` (N,) int64."""

    images: NDArray[np.uint8]
    masks: NDArray[np.bool_]
    labels: NDArray[np.int64]
    marker_masks: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.labels)


def draw_radiograph(
    seed: int, finding: str | int | None = None, *, marker_corner: Corner | None = None, size: int = DEFAULT_SIDE_PIXELS
) -> Phantom:
    """One phantom (size,size) from a seed: the same arguments give the same bytes.

    `finding`: a name or index of CATEGORIES, None lets the seed choose; `marker_corner`: the corner that carries the
    hospital's marker. With the same seed, chest, exposure and noise are the same whatever the finding and the marker
    are, so `draw_radiograph(7, "nodule")` and `draw_radiograph(7, "no finding")` differ in the nodule alone.
    Raises TargetError for an unknown finding and InputError for a bad seed, corner or size.
    """
    _check_draw_arguments(seed, marker_corner, size)
    body, evidence, film = (Generator(Philox(stream)) for stream in SeedSequence(seed).spawn(3))
    chosen = int(evidence.integers(len(CATEGORIES)))
    label = chosen if finding is None else _resolve_label(finding)
    scene, expose = draw_chest(body, size), _create_exposure(film, size)
    change, stamp = _FINDING_DRAWERS[label](evidence, scene), _draw_marker(film, marker_corner, size)
    image = expose(scene.attenuation + change + stamp)
    mask = image != expose(scene.attenuation + stamp) if label else np.zeros_like(image, dtype=np.bool_)
    marker_mask = image != expose(scene.attenuation + change) if marker_corner else np.zeros_like(mask)
    return Phantom(image, mask, label, CATEGORIES[label], marker_mask)


def draw_dataset(
    n_images: int,
    seed: int,
    *,
    marker_class: str | int | None = None,
    marker_correlation: float = 0.0,
    size: int = DEFAULT_SIDE_PIXELS,
) -> PhantomDataset:
    """N phantoms (N,size,size), the classes as even as N allows, in random order.

    With `marker_class` given, the marker in the top left corner is correlated with that class: with K classes and
    r = `marker_correlation` (0..1), P(marker | class) = 1/K + r (1 - 1/K) and P(marker | another class) = (1 - r)/K.
    One image in K then has the marker whatever r is, and r is the correlation (phi) of marker and class: at 0
    the marker is uninformative, at 1 it is the class. Image i is `draw_radiograph(seed * 2**32 + i, ...)`.
    Raises TargetError for an unknown class and InputError for a bad number.
    """
    if n_images < 1:
        raise InputError(f"n is {n_images}; expected at least one image")
    if not 0 <= marker_correlation <= 1 or (marker_correlation and marker_class is None):
        raise InputError(
            f"marker_correlation is {marker_correlation} (marker_class={marker_class!r}); give 0..1 and a class"
        )
    _check_draw_arguments(seed, None, size)
    random, kinds = Generator(Philox(SeedSequence(seed, spawn_key=(1,)))), len(CATEGORIES)
    labels = random.permutation(np.arange(n_images) % kinds)
    probability = np.zeros(n_images)
    if marker_class is not None:
        probability = (1 - marker_correlation) / kinds + marker_correlation * (labels == _resolve_label(marker_class))
    marker_corners: list[Corner | None] = [
        "top left" if marked else None for marked in random.random(n_images) < probability
    ]
    phantoms = [
        draw_radiograph((seed << 32) + i, int(labels[i]), marker_corner=marker_corners[i], size=size)
        for i in range(n_images)
    ]
    images, masks = np.stack([phantom.image for phantom in phantoms]), np.stack([phantom.mask for phantom in phantoms])
    return PhantomDataset(
        images, masks, labels.astype(np.int64), np.stack([phantom.marker_mask for phantom in phantoms])
    )


def _check_draw_arguments(seed: int, marker_corner: str | None, size: int) -> None:
    if seed < 0:
        raise InputError(f"seed is {seed}; expected a whole number from 0 up")
    if marker_corner is not None and marker_corner not in get_args(Corner):
        raise InputError(f"no corner {marker_corner!r}; expected one of {', '.join(get_args(Corner))}")
    if not 64 <= size <= 1024:
        raise InputError(f"size is {size}; expected 64 to 1024 pixels a side")


def _resolve_label(finding: str | int) -> int:
    if isinstance(finding, str) and finding in CATEGORIES:
        return CATEGORIES.index(finding)
    if isinstance(finding, int) and not isinstance(finding, bool) and 0 <= finding < len(CATEGORIES):
        return finding
    raise TargetError(f"no finding {finding!r}; expected one of {', '.join(CATEGORIES)}, or 0..{len(CATEGORIES) - 1}")


def _create_exposure(random: Generator, size: int) -> Callable[[FloatImage], NDArray[np.uint8]]:
    """From attenuation (H,W) to gray values: one exposure, one tone curve and one grain for every use."""
    gain, dark, span = random.uniform(1.1, 1.6), random.uniform(8, 24), random.uniform(205, 240)
    grain = random.standard_normal((size, size), dtype=np.float32) * random.uniform(2.0, 4.5)

    def expose(attenuation: FloatImage) -> NDArray[np.uint8]:
        light = np.exp(np.maximum(attenuation, -0.2) * -gain)
        return np.clip(dark + span * (1 - light) + grain + 0.5, 0, 255).astype(np.uint8)

    return expose


def _draw_no_finding(random: Generator, chest: Chest) -> FloatImage:
    return np.zeros_like(chest.attenuation)


def _draw_nodule(random: Generator, chest: Chest) -> FloatImage:
    """A small dense ball somewhere in a lung: as thick as its chord."""
    lung = chest.lungs[int(random.integers(2))]
    radius, squeeze, strength = random.uniform(0.070, 0.130), random.uniform(0.85, 1.18), random.uniform(0.32, 0.50)
    places = np.flatnonzero((lung.depth > 0.5 * radius + 0.02) & (chest.heart < 0.3))
    row, column = np.divmod(places[int(random.random() * len(places))], chest.plane.size)
    right, down = chest.plane.x - chest.plane.x[row, column], chest.plane.y - chest.plane.y[row, column]
    chord = np.maximum(1 - (right * squeeze / radius) ** 2 - (down / squeeze / radius) ** 2, 0)
    return np.where(chord > 0, np.maximum(strength * np.sqrt(chord), MIN_ATTENUATION_CHANGE), 0).astype(np.float32)


def _draw_effusion(random: Generator, chest: Chest) -> FloatImage:
    """Fluid at the base of a lung: a broad wedge whose surface climbs towards the chest wall."""
    lung = chest.lungs[int(random.integers(2))]
    level, climb = random.uniform(0.08, 0.40), random.uniform(0.10, 0.28)
    surface = np.max(np.where(lung.depth > 0, chest.plane.y, -1)) - level - climb * (0.5 + 0.5 * lung.lateral) ** 2
    space = lung.air_share * (1 - chest.heart) * soft_step(lung.lateral + 0.6, 0.6)
    fluid = space * soft_step(chest.plane.y - surface, 0.05) * random.uniform(0.34, 0.48)
    return np.where(fluid > MIN_ATTENUATION_CHANGE, fluid, 0).astype(np.float32)


def _draw_pneumothorax(random: Generator, chest: Chest) -> FloatImage:
    """Air between chest wall and lung: a dark crescent without vessels, the thin line of the pleura, and beside it a
    rim of lung that is denser because it is pressed together.
    """
    lung = chest.lungs[int(random.integers(2))]
    width = random.uniform(0.10, 0.20) * np.clip(lung.vertical + 0.7 * lung.lateral + random.uniform(-0.35, 0.15), 0, 1)
    gap, rim, line = width - lung.wall_depth, random.uniform(0.09, 0.12), random.uniform(0.025, 0.035)
    inside = (lung.depth > 0.01) & (gap > -rim) & (width > line)
    dark = (random.uniform(0.11, 0.18) + 0.8 * chest.vessels) * soft_step(gap, 0.02)
    dense = random.uniform(0.10, 0.17) * soft_band(gap + line / 2, line / 2, line / 2) + 0.08 * (1 + gap / rim)
    return np.where(
        inside,
        np.where(gap > 0, np.minimum(-dark, -MIN_ATTENUATION_CHANGE), np.maximum(dense, MIN_ATTENUATION_CHANGE)),
        0,
    )


def _draw_marker(random: Generator, corner: Corner | None, size: int) -> FloatImage:
    """A lead marker: the letters of a hospital, always the same, moved by a pixel or two."""
    stamp = np.zeros((size, size), dtype=np.float32)
    moved = random.integers(0, 4, 2)
    if corner is not None:
        scale = max(1, size // 96)
        glyphs = np.kron(_MARKER_GLYPHS, np.ones((scale, scale), dtype=np.float32)) * 1.6
        (high, wide), edge = glyphs.shape, 3 * scale
        top = edge + moved[0] if "top" in corner else size - edge - high - moved[0]
        left = edge + moved[1] if "left" in corner else size - edge - wide - moved[1]
        stamp[top : top + high, left : left + wide] = glyphs
    return stamp


_MARKER_GLYPHS: Final = np.array(
    [
        [pixel == "#" for pixel in row]
        for row in (
            "#...#.####.",
            "#...#.#...#",
            "#...#.#...#",
            "#####.####.",
            "#...#.#...#",
            "#...#.#...#",
            "#...#.####.",
        )
    ],
    dtype=np.float32,
)

_FINDING_DRAWERS: Final[tuple[Callable[[Generator, Chest], FloatImage], ...]] = (
    _draw_no_finding,
    _draw_nodule,
    _draw_effusion,
    _draw_pneumothorax,
)


def draw_findings(seed: int, findings: Sequence[str | int]) -> tuple[NDArray[np.uint8], dict[str, NDArray[np.bool_]]]:
    """(128,128) uint8, and the mask of each finding by name: a seed draws one anatomy, whatever is found in it.

    Raises InputError for a finding that is named twice, TargetError for one that does not exist.

    >>> image, masks = draw_findings(4, ["nodule", "effusion"])
    >>> image.shape, sorted(masks)
    ((128, 128), ['effusion', 'nodule'])
    """
    clear = draw_radiograph(seed, CATEGORIES[0]).image.astype(np.int64)
    phantoms = [draw_radiograph(seed, finding) for finding in findings]
    masks = {phantom.name: phantom.mask for phantom in phantoms}
    if len(masks) != len(phantoms):
        raise InputError(f"findings {list(findings)!r}: each one once")
    image = clear + sum((phantom.image.astype(np.int64) - clear for phantom in phantoms), np.zeros_like(clear))
    return image.clip(0, 255).astype(np.uint8), masks
