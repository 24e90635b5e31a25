"""Draw synthetic chest radiographs from a seed, with an exact mask of each finding."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal, get_args

import numpy as np
from numpy.random import Generator, Philox, SeedSequence
from numpy.typing import NDArray

from camscope.errors import InputError, TargetError
from camscope.phantom.draw_chest_attenuation import Chest, FloatImage, draw_chest, smooth_band, smooth_step

Box = tuple[int, int, int, int]
Corner = Literal["top left", "top right", "bottom left", "bottom right"]

CATEGORIES: Final = ("no finding", "nodule", "effusion", "pneumothorax")
DEFAULT_SIDE_PIXELS: Final = 128
MIN_ATTENUATION_CHANGE: Final = 0.035  # no pixel of a finding changes by less, so that the mask has a clean edge


@dataclass(frozen=True, eq=False)
class Phantom:
    """A synthetic radiograph with its label and masks.

    Attributes:
        image: (H,W) uint8 pixels.
        mask: (H,W) bool, True for exactly the pixels that the finding changes. Empty for "no finding".
        label: Index of `name` in CATEGORIES.
        name: Name of the finding.
        marker_mask: (H,W) bool, True for the pixels that the hospital's marker changes.

    >>> phantom = draw_radiograph(0, "nodule")
    >>> phantom.name, phantom.label, phantom.image.shape, bool(phantom.mask.any())
    ('nodule', 1, (128, 128), True)

    """

    image: NDArray[np.uint8]
    mask: NDArray[np.bool_]
    label: int
    name: str
    marker_mask: NDArray[np.bool_]

    @property
    def boxes(self) -> tuple[Box, ...]:
        """The bounding box (left, top, right, bottom) of the finding. The right and bottom edges are exclusive.

        The tuple is empty for an image without a finding.
        """
        rows, columns = np.flatnonzero(self.mask.any(axis=1)), np.flatnonzero(self.mask.any(axis=0))
        if not len(rows):
            return ()
        return ((int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1),)


def draw_radiograph(
    seed: int, finding: str | int | None = None, *, marker_corner: Corner | None = None, size: int = DEFAULT_SIDE_PIXELS
) -> Phantom:
    """Draw a synthetic radiograph (size,size) from a seed. Equal arguments give equal pixels.

    The seed alone sets chest, exposure and noise. The images of `draw_radiograph(7, "nodule")` and
    `draw_radiograph(7, "no finding")` therefore differ only in the nodule.

    Args:
        seed: An integer of 0 or more.
        finding: A name or index of CATEGORIES. By default the seed chooses one.
        marker_corner: The corner with the hospital's marker, such as "top left". By default there is no marker.
        size: Rows and columns in pixels.

    Returns:
        The image with its masks.

    Raises:
        TargetError: The finding is unknown.
        InputError: The seed, the corner or the size is invalid.

    >>> first, second = draw_radiograph(7, "nodule"), draw_radiograph(7, "no finding")
    >>> bool(((first.image != second.image) == first.mask).all())
    True

    """
    check_draw_arguments(seed, marker_corner, size)
    body, evidence, film = (Generator(Philox(stream)) for stream in SeedSequence(seed).spawn(3))
    chosen = int(evidence.integers(len(CATEGORIES)))
    label = chosen if finding is None else find_class_index_of_finding(finding)
    scene, convert_attenuation_to_gray = draw_chest(body, size), _create_exposure(film, size)
    change, stamp = _FINDING_DRAWERS[label](evidence, scene), _draw_marker(film, marker_corner, size)
    image = convert_attenuation_to_gray(scene.attenuation + change + stamp)
    mask = (
        image != convert_attenuation_to_gray(scene.attenuation + stamp)
        if label
        else np.zeros_like(image, dtype=np.bool_)
    )
    marker_mask = (
        image != convert_attenuation_to_gray(scene.attenuation + change) if marker_corner else np.zeros_like(mask)
    )
    return Phantom(image, mask, label, CATEGORIES[label], marker_mask)


def check_draw_arguments(seed: int, marker_corner: str | None, size: int) -> None:
    """Raise an InputError for an invalid seed, marker corner or size."""
    if seed < 0:
        raise InputError(f"seed is {seed}; expected an integer of 0 or more")
    if marker_corner is not None and marker_corner not in get_args(Corner):
        raise InputError(f"unknown marker_corner {marker_corner!r}; expected one of {', '.join(get_args(Corner))}")
    if not 64 <= size <= 1024:
        raise InputError(f"size is {size}; expected 64 to 1024 pixels")


def find_class_index_of_finding(finding: str | int) -> int:
    """Return the class index of a finding. Raise a TargetError for an unknown finding."""
    if isinstance(finding, str) and finding in CATEGORIES:
        return CATEGORIES.index(finding)
    if isinstance(finding, int) and not isinstance(finding, bool) and 0 <= finding < len(CATEGORIES):
        return finding
    raise TargetError(
        f"unknown finding {finding!r}; expected one of {', '.join(CATEGORIES)}, or 0..{len(CATEGORIES) - 1}"
    )


def _create_exposure(random: Generator, size: int) -> Callable[[FloatImage], NDArray[np.uint8]]:
    """Return a function that converts attenuation (H,W) to uint8 gray values (H,W).

    All calls of the function have the same exposure, tone curve and film grain.
    """
    gain, dark, span = random.uniform(1.1, 1.6), random.uniform(8, 24), random.uniform(205, 240)
    grain = random.standard_normal((size, size), dtype=np.float32) * random.uniform(2.0, 4.5)

    def convert_attenuation_to_gray(attenuation: FloatImage) -> NDArray[np.uint8]:
        light = np.exp(np.maximum(attenuation, -0.2) * -gain)
        return np.clip(dark + span * (1 - light) + grain + 0.5, 0, 255).astype(np.uint8)

    return convert_attenuation_to_gray


def _draw_nodule(random: Generator, chest: Chest) -> FloatImage:
    """Draw a nodule. It is a small dense ball in a lung."""
    lung = chest.lungs[int(random.integers(2))]
    radius, squeeze, strength = random.uniform(0.070, 0.130), random.uniform(0.85, 1.18), random.uniform(0.32, 0.50)
    places = np.flatnonzero((lung.distance_from_edge > 0.5 * radius + 0.02) & (chest.heart < 0.3))
    row, column = np.divmod(places[int(random.random() * len(places))], chest.body.size)
    right, down = chest.body.x - chest.body.x[row, column], chest.body.y - chest.body.y[row, column]
    chord = np.maximum(1 - (right * squeeze / radius) ** 2 - (down / squeeze / radius) ** 2, 0)
    return np.where(chord > 0, np.maximum(strength * np.sqrt(chord), MIN_ATTENUATION_CHANGE), 0).astype(np.float32)


def _draw_effusion(random: Generator, chest: Chest) -> FloatImage:
    """Draw a pleural effusion. It is fluid at the base of a lung that rises towards the chest wall."""
    lung = chest.lungs[int(random.integers(2))]
    level, climb = random.uniform(0.08, 0.40), random.uniform(0.10, 0.28)
    surface = (
        np.max(np.where(lung.distance_from_edge > 0, chest.body.y, -1))
        - level
        - climb * (0.5 + 0.5 * lung.lateral) ** 2
    )
    space = lung.air_share * (1 - chest.heart) * smooth_step(lung.lateral + 0.6, 0.6)
    fluid = space * smooth_step(chest.body.y - surface, 0.05) * random.uniform(0.34, 0.48)
    return np.where(fluid > MIN_ATTENUATION_CHANGE, fluid, 0).astype(np.float32)


def _draw_pneumothorax(random: Generator, chest: Chest) -> FloatImage:
    """Draw a pneumothorax. It is a dark crescent of air between chest wall and lung.

    The crescent shows no vessels. At its inner edge are a thin pleural line and a rim of denser lung.
    """
    lung = chest.lungs[int(random.integers(2))]
    width = random.uniform(0.10, 0.20) * np.clip(lung.vertical + 0.7 * lung.lateral + random.uniform(-0.35, 0.15), 0, 1)
    gap, rim, line = width - lung.distance_from_wall, random.uniform(0.09, 0.12), random.uniform(0.025, 0.035)
    inside = (lung.distance_from_edge > 0.01) & (gap > -rim) & (width > line)
    dark = (random.uniform(0.11, 0.18) + 0.8 * chest.vessels) * smooth_step(gap, 0.02)
    dense = random.uniform(0.10, 0.17) * smooth_band(gap + line / 2, line / 2, line / 2) + 0.08 * (1 + gap / rim)
    return np.where(
        inside,
        np.where(gap > 0, np.minimum(-dark, -MIN_ATTENUATION_CHANGE), np.maximum(dense, MIN_ATTENUATION_CHANGE)),
        0,
    )


def _draw_marker(random: Generator, corner: Corner | None, size: int) -> FloatImage:
    """Draw a lead marker in a corner. Its letters are fixed, and its position varies slightly at random."""
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


_MARKER_ROWS: Final = (
    "#...#.####.",
    "#...#.#...#",
    "#...#.#...#",
    "#####.####.",
    "#...#.#...#",
    "#...#.#...#",
    "#...#.####.",
)
_MARKER_GLYPHS: Final = np.array([[pixel == "#" for pixel in row] for row in _MARKER_ROWS], dtype=np.float32)
_FINDING_DRAWERS: Final[tuple[Callable[[Generator, Chest], FloatImage], ...]] = (
    lambda random, chest: np.zeros_like(chest.attenuation),
    _draw_nodule,
    _draw_effusion,
    _draw_pneumothorax,
)


def draw_findings(seed: int, findings: Sequence[str | int]) -> tuple[NDArray[np.uint8], dict[str, NDArray[np.bool_]]]:
    """Draw one radiograph (128,128) with several findings. Equal seeds give the same anatomy.

    Args:
        seed: An integer of 0 or more.
        findings: Names or indices of CATEGORIES, each once.

    Returns:
        The image (128,128) uint8, and a dict from the name of each finding to its mask (128,128) bool.

    Raises:
        InputError: A finding is named twice.
        TargetError: A finding is unknown.

    >>> image, masks = draw_findings(4, ["nodule", "effusion"])
    >>> image.shape, sorted(masks)
    ((128, 128), ['effusion', 'nodule'])

    """
    clear = draw_radiograph(seed, CATEGORIES[0]).image.astype(np.int64)
    phantoms = [draw_radiograph(seed, finding) for finding in findings]
    masks = {phantom.name: phantom.mask for phantom in phantoms}
    if len(masks) != len(phantoms):
        raise InputError(f"findings {list(findings)!r} has duplicates; list each finding once")
    image = clear + sum((phantom.image.astype(np.int64) - clear for phantom in phantoms), np.zeros_like(clear))
    return image.clip(0, 255).astype(np.uint8), masks
