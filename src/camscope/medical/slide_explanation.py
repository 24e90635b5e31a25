"""`SlideExplanation`: the attention of the tiles of a slide and the maps inside some of them, drawn and exported as GeoJSON."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from camscope import render
from camscope.atomic_writes_and_folder_locks import write_bytes
from camscope.errors import InputError
from camscope.explanation import Explanation
from camscope.medical.slide_tiles import Pixels, SlideTiles, locate_on_grid

MapKind = Literal["attention", "detail"]
TILE_COLOR, OUTLINE_COLOR = (255, 200, 0), (230, 0, 120)  # RGB, of the two kinds of objects in QuPath
Ring = list[list[float]]


@dataclass(frozen=True, eq=False)
class SlideExplanation:
    """The explanation of a slide by an attention-based model.

    Attributes:
        tiles: The tiles and the thumbnail of the slide.
        attention: (T,) the attention of each tile. They sum to 1.
        label: The class that is explained, as text.
        target: The index of that class.
        score: The score of the slide for the class.
        probability: The softmax probability of the class, or None for a model with one output.
        tile_explanations: The maps of the tiles with the highest attention, by the index of the tile. They explain the score of
            the whole slide.

    >>> tiles = SlideTiles(Path("a.tif"), "slide", (8, 4), 4, 0, 1.0, np.array([[0, 0], [4, 0]]), np.zeros((4, 8, 3), np.uint8))
    >>> explanation = SlideExplanation(tiles, np.array([0.25, 0.75]), "tumor", 1, 2.5)
    >>> explanation.compute_map().tolist()[0]
    [0.25, 0.25, 0.25, 0.25, 0.75, 0.75, 0.75, 0.75]

    """

    tiles: SlideTiles
    attention: NDArray[np.float64]
    label: str
    target: int
    score: float
    probability: float | None = None
    tile_explanations: Mapping[int, Explanation] = field(default_factory=dict)

    def compute_map(self, kind: MapKind = "attention") -> NDArray[np.float64]:
        """Return a map (h,w) on the thumbnail. Overlapping tiles are averaged.

        Args:
            kind: "attention", or "detail" for the maps inside the explained tiles, in units of the score.

        Returns:
            The map, 0 where no tile lies.

        Raises:
            InputError: If `kind` is unknown.

        """
        if kind not in ("attention", "detail"):
            raise InputError(f'kind={kind!r}; expected "attention" or "detail"')
        grid = (self.tiles.thumbnail.shape[0], self.tiles.thumbnail.shape[1])
        total, count = np.zeros(grid), np.zeros(grid)
        for index in range(len(self.tiles)) if kind == "attention" else self.tile_explanations:
            rows, columns = locate_on_grid(self.tiles.corners[index], self.tiles.extent, self.tiles.size, grid)
            size = (rows.stop - rows.start, columns.stop - columns.start)
            if kind == "attention":
                total[rows, columns] += self.attention[index]
            else:
                total[rows, columns] += _resize(_read_tile_map(self.tile_explanations[index]), size)
            count[rows, columns] += 1
        return total / np.maximum(count, 1)

    def overlay(self, kind: MapKind = "attention") -> Pixels:
        """Draw a map over the thumbnail of the slide.

        Args:
            kind: As in `compute_map`.

        Returns:
            RGB pixels (h,w,3). Values are divided by the maximum of the map.

        """
        values = self.compute_map(kind)
        return np.asarray(render.overlay(self.tiles.thumbnail, np.clip(values / (values.max() or 1.0), 0, 1)))

    def save(self, path: str | os.PathLike[str], kind: MapKind = "attention", *, overwrite: bool = True) -> Path:
        """Write the overlay as a PNG file.

        Args:
            path: The file to write.
            kind: As in `compute_map`.
            overwrite: Whether an existing file is replaced.

        Returns:
            The path that was written.

        Raises:
            OutputError: If the file exists and `overwrite` is False.

        """
        import cv2

        encoded = cv2.imencode(".png", self.overlay(kind)[..., ::-1])[1]
        return write_bytes(path, encoded.tobytes(), overwrite=overwrite)

    def to_geojson(self, path: str | os.PathLike[str], *, threshold: float = 0.5, overwrite: bool = False) -> Path:
        """Write the tiles and the outlines inside the explained tiles as GeoJSON (RFC 7946), as QuPath reads it.

        Each tile is a detection with the measurements `attention` and `attention / maximum`. Each region of a tile where its map
        exceeds a share of its maximum is an annotation. Coordinates are pixels of level 0, as QuPath expects, and not
        longitudes and latitudes.

        Args:
            path: The file to write.
            threshold: The share of the maximum of a tile's map that a region exceeds, above 0 and at most 1.
            overwrite: Whether an existing file is replaced.

        Returns:
            The path that was written.

        Raises:
            InputError: If the threshold is out of range.
            OutputError: If the file exists.

        """
        if not 0 < threshold <= 1:
            raise InputError(f"threshold={threshold}; expected a share above 0 and at most 1")
        features = [self._build_tile_feature(index) for index in range(len(self.tiles))]
        for index, explanation in self.tile_explanations.items():
            features += self._build_outline_features(index, _read_tile_map(explanation), threshold)
        collection = {"type": "FeatureCollection", "features": features}
        return write_bytes(path, json.dumps(collection, allow_nan=False).encode(), overwrite=overwrite)

    def _build_tile_feature(self, index: int) -> dict[str, Any]:
        (x, y), side, attention = self.tiles.corners[index].tolist(), self.tiles.extent, float(self.attention[index])
        ring: Ring = [[x, y], [x + side, y], [x + side, y + side], [x, y + side], [x, y]]
        measurements = {"attention": attention, "attention / maximum": attention / (float(self.attention.max()) or 1.0)}
        return _build_feature([ring], "detection", f"attention: {self.label}", TILE_COLOR, measurements)

    def _build_outline_features(
        self, index: int, values: NDArray[np.floating[Any]], threshold: float
    ) -> list[dict[str, Any]]:
        """Return one annotation per region of a tile's map, with the holes of the region."""
        peak = float(values.max())
        if peak <= 0:
            return []
        corner, scale = self.tiles.corners[index], self.tiles.extent / np.array(values.shape[::-1])
        features = []
        for rings in _trace_regions(values >= threshold * peak):
            placed = [(corner + ring * scale).tolist() for ring in rings]
            measurements = {"peak": peak, "attention": float(self.attention[index])}
            name = f"evidence: {self.label}"
            features.append(_build_feature(placed, "annotation", name, OUTLINE_COLOR, measurements))
        return features


def _build_feature(
    rings: list[Ring], object_type: str, name: str, color: tuple[int, int, int], measurements: Mapping[str, float]
) -> dict[str, Any]:
    return {
        "type": "Feature",
        "geometry": {"type": "Polygon", "coordinates": rings},
        "properties": {
            "objectType": object_type,
            "classification": {"name": name, "color": list(color)},
            "measurements": dict(measurements),
        },
    }


def _trace_regions(mask: NDArray[np.bool_]) -> list[list[NDArray[np.float64]]]:
    """Trace the regions of a mask. Return the closed rings of each, as points (x, y) at the edges of pixels.

    The outer ring is first and runs counterclockwise by RFC 7946 (x to the right, y upwards); holes run clockwise.
    """
    import cv2

    # on a mask of twice the size the traced pixel centers 2i and 2i+1 stand for the edges i and i+1 of pixel i
    doubled = mask.astype(np.uint8).repeat(2, axis=0).repeat(2, axis=1)
    contours, hierarchy = cv2.findContours(doubled, cv2.RETR_CCOMP, cv2.CHAIN_APPROX_SIMPLE)
    regions: dict[int, list[NDArray[np.float64]]] = {}
    for number, contour in enumerate(contours):
        points = (contour[:, 0].astype(np.float64) + 1) // 2
        points = points[(points != np.roll(points, 1, axis=0)).any(axis=1)]
        parent = int(hierarchy[0][number][3])
        area = float(points[:, 0] @ np.roll(points[:, 1], -1) - points[:, 1] @ np.roll(points[:, 0], -1))
        if (area > 0) != (parent < 0):
            points = points[::-1]
        if area:
            regions.setdefault(number if parent < 0 else parent, []).append(np.vstack([points, points[:1]]))
    return [sorted(rings, key=lambda ring: -float(np.ptp(ring[:, 0]))) for rings in regions.values()]


def _read_tile_map(explanation: Explanation) -> NDArray[np.float64]:
    """Return the map (H,W) of a tile on its pixels, without negative values."""
    return np.maximum(explanation.heatmap("image", scale=None).astype(np.float64), 0)


def _resize(values: NDArray[np.float64], size: tuple[int, int]) -> NDArray[np.float64]:
    import cv2

    return np.asarray(cv2.resize(values, size[::-1], interpolation=cv2.INTER_AREA), np.float64)
