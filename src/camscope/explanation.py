"""Explanation: the raw map of one image, with what was asked, what was answered, and where the map lies."""

import html
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from camscope import render
from camscope.data_readers import MAX_ARRAYS, one_error, read_json, read_npz
from camscope.errors import GeometryError, InputError, OutputError
from camscope.geometry import Placement
from camscope.plurals import plural
from camscope.safe_files import write_bytes

Floats = npt.NDArray[np.floating[Any]]
Pixels = npt.NDArray[np.uint8]
Size = Literal["image", "input", "grid"]
Scale = render.Scale | Literal["auto"] | None
AUTO: Literal["auto"] = "auto"

ARRAYS = ("heat", "error", "image", "seen")  # of an explanation; all else of it is words and numbers
MAX_CELLS, MAX_AXES = 2**28, 4  # of a map, its input or its image, when it is read from a file
OK = "ok"
MEANING = {
    "no_positive_evidence": "nothing in the map is positive: no evidence for this target at this layer",
    "zero_gradient": "the score's gradient is zero at this layer: the map says nothing",
    "constant_score": "the score does not change with what the map shows, but for rounding: the map says nothing",
    "flat": "the map has one value everywhere",
    "nonfinite": "the map holds NaN or infinity, shown as zero",
    "no_spatial_resolution": "the layer has a single cell: the map cannot say where",
    "layout_unverified": "whether the layer's cells lie over the parts of the image that they react to could not be verified",
}


@dataclass(frozen=True)
class ClassScore:
    """One of the model's top classes; `probability` is None for a model with one output."""

    index: int
    label: str
    score: float
    probability: float | None


@dataclass(frozen=True, eq=False)
class Explanation:
    """Where a model looked for one answer on one image.

    `heat` (h,w): the raw map at the layer's resolution, unscaled, signed where the method is. `target`: class index (None for a
    callable question), `label` its words, `score` its value, `probability` its softmax, `top` the leading classes.
    `measures`: what the method found of its own map, by name, such as a path's `completeness_gap`.
    `placement`: where the model's input lies on the image; None if unknown. `status`: "ok" or a key of `MEANING`.
    `error` (h,w): the standard error of each cell, of a map that is a mean over what was drawn; else None.
    `image` (H,W,3): the original's pixels; `seen` (H,W,3): the picture that the model was given.
    Of a scan, `world` (4,4): from the index of a voxel (d,row,column) to millimetres to the right, to the front and up, and
    `steps`: what was done to its stored numbers, in order; its `image` may be a volume (D,H,W).
    """

    heat: Floats
    method: str
    target: int | None
    label: str
    score: float
    probability: float | None = None
    top: tuple[ClassScore, ...] = ()
    layer: str | None = None
    layout: str | None = None
    input_size: tuple[int, ...] = ()
    placement: Placement | None = None
    status: str = OK
    notes: tuple[str, ...] = ()
    name: str = "tensor"
    measures: Mapping[str, float] = field(default_factory=dict)
    parameters: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    model: str = ""
    error: Floats | None = field(default=None, repr=False)
    image: Pixels | None = field(default=None, repr=False)
    seen: Pixels | None = field(default=None, repr=False)
    world: npt.NDArray[np.float64] | None = field(default=None, repr=False)
    steps: tuple[str, ...] = ()

    @property
    def grid(self) -> tuple[int, ...]:
        """(h,w): cells of the map."""
        return self.heat.shape

    @property
    def stride(self) -> tuple[float, ...]:
        """Input pixels per cell, along each axis of the map."""
        return tuple(pixels / cells for pixels, cells in zip(self.input_size, self.grid, strict=True))

    @property
    def peak(self) -> tuple[int, ...]:
        """The pixel of the original image, or the voxel of the volume, where the map is largest; the first among equals.

        The cross hairs of a signed map in `planes` lie where it is largest in size, for or against.
        """
        values, covered = self._placed("image")
        return tuple(int(i) for i in np.unravel_index(np.where(covered, values, -np.inf).argmax(), values.shape))

    @property
    def peak_world(self) -> tuple[float, ...] | None:
        """Millimetres to the right, to the front and up of the peak; None where the image does not say where it lies."""
        if self.world is None:
            return None
        index = (0,) * (3 - len(self.peak)) + self.peak
        return tuple((self.world @ [*index, 1])[:3].tolist())

    @property
    def answer(self) -> str:
        """`tabby (p=0.93)`."""
        chance = f"p={self.probability:.2f}" if self.probability is not None else f"score {self.score:.3g}"
        return f"{self.label} ({chance})"

    @property
    def caption(self) -> str:
        """`tabby (p=0.93) · gradcam · layer4`."""
        return " · ".join(filter(None, (self.answer, self.method, self.layer)))

    @property
    def flag(self) -> str | None:
        """The status as a figure's warning strip says it; None for one without."""
        return None if self.status == OK else self.status.replace("_", " ")

    def covered(self, size: Size = "image") -> npt.NDArray[np.bool_]:
        """(H,W): which pixels the model was shown; what the preprocessing cropped away is not covered, not cold."""
        return self._placed(size)[1]

    @property
    def colormap(self) -> str:
        """The colours that suit the map: diverging, white at zero, where it has negative values; else inferno."""
        return render.DIVERGING if bool((self.heat < 0).any()) else "inferno"

    def _scale(self, scale: Scale) -> render.Scale | None:
        """Where it is left open: of a map of single pixels the robust one, else the maximum."""
        if scale != "auto":
            return scale
        return "robust" if self.grid == self.input_size else "max"

    def heatmap(self, size: Size = "image", scale: Scale = "max") -> Floats:
        """(H,W): the map on the original image's pixels, on the model's input, or as it is (`size="grid"`).

        `scale`: "max" divides by the maximum and clips to 0..1: zero stays zero, a flat positive map is 1 everywhere;
        "robust" divides by what 99.5 % of the pixels do not exceed in size, and "auto" is that for a map of single pixels,
        else "max"; (lo, hi) maps that range to 0..1, shared across images; "symmetric" divides by the largest absolute
        value, -1..1; None leaves score units. Raises GeometryError where the place on the image is unknown.
        """
        values = self._placed(size)[0]
        known = self._scale(scale)
        return values if known is None else render.scaled(values, known)

    def overlay(
        self,
        size: Size | None = None,
        *,
        scale: Scale = AUTO,
        alpha: float = 0.85,
        colormap: str = AUTO,
        contour: float | Sequence[float] | None = None,
        boxes: float | None = None,
        mask: render.Masks | None = None,
        bar: bool = False,
        height: int | None = None,
    ) -> Pixels:
        """(H,W,3) uint8: the map over the photograph at its own size; over the model's input where the place is unknown.

        Of a signal a trace, its lines over the map's colours; of a volume the three planes, of a video a strip of its frames.

        `contour`: draw outlines at these levels (0..1) instead of colour; `boxes`: draw boxes round what reaches this
        level instead of colour; `colormap`: a name in `render.COLORMAPS`, or "auto": the one that suits the map's signs;
        `mask`: (H,W), or names of several such as `{"lungs": lungs, "opacity": opacity}`: their outlines over the map, and
        below the picture what each name's colour is; `bar`: a colour bar with the raw range at the right; `height`: rows of
        the picture, for a figure.
        """
        known, colormap = self._scale(scale), self.colormap if colormap == AUTO else colormap
        if self._is_volume and contour is None and boxes is None:
            volume = self.volume(size, scale=scale, alpha=alpha, colormap=colormap, mask=mask)
            return render.planes(replace(volume, flag=""), height=height, bar=bar)  # a figure has a strip for flags
        if self.heat.ndim != 2:
            picture = self._unflat(known, alpha, colormap, contour, boxes, mask)
            return picture if height is None else render.fitted(picture, height, 8 * height)
        size = size or self._best_size()
        picture, (raw, covered) = self._background(size), self._placed(size)
        values, ends = render.shown(raw, known, colormap)
        if contour is None and boxes is None:
            if colormap == render.DIVERGING and alpha > 0:
                picture = render.pale(picture)
            picture = render.overlay(picture, values, alpha=alpha, colormap=colormap, covered=covered)
        else:
            picture = render.not_covered(picture, covered)
        if contour is not None:
            picture = render.draw_contours(picture, values, contour, colormap=colormap)
        if boxes is not None:
            picture = render.draw_boxes(picture, render.boxes(values, boxes))
        outlines = render.outlines(mask, picture.shape[:2])
        if height is not None:
            picture = render.fitted(picture, height, 2 * height)
        picture = render.draw_outlines(picture, outlines)
        if bar:
            picture = render.beside(picture, render.colour_bar(picture.shape[0], *ends, colormap))
        return render.key_below(picture, outlines)

    def _unflat(
        self, scale: render.Scale | None, alpha: float, colormap: str, contour: object, boxes: object, mask: object
    ) -> Pixels:
        """A map of one axis, or a video's, as a picture."""
        if contour is not None or boxes is not None or mask is not None or self.heat.ndim not in (1, 3):
            self._expect_flat()
        values, _ = render.shown(self._placed("input")[0], scale, colormap)
        grey = np.full((1, *values.shape) if values.ndim == 1 else (*values.shape, 3), 128, np.uint8)
        seen = grey if self.seen is None else self.seen
        if values.ndim == 1:
            return render.trace(seen, values, alpha=alpha, colormap=colormap)
        return render.frames(seen, values, alpha=alpha, colormap=colormap, columns=render.MOST)

    @property
    def _is_volume(self) -> bool:
        """Whether three axes are a volume's: it is grey, or has a place in the world; a video has neither."""
        if self.heat.ndim != 3 or self.world is not None:
            return self.heat.ndim == 3
        return self.seen is None or self.seen.ndim != 4 or bool((self.seen[..., 0] == self.seen[..., 1]).all())

    def volume(
        self,
        size: Size | None = None,
        *,
        scale: Scale = AUTO,
        alpha: float = 0.85,
        colormap: str = AUTO,
        mask: render.Masks | None = None,
        window: tuple[float, float] | None = None,
    ) -> render.Volume:
        """The map of three axes over its volume, for `render.planes`, `slices`, `projection` and `animate`.

        On the original volume where that is at hand, else on the model's input. `mask`: (D,H,W), or names of several;
        `window`: the numbers of the original that are black and white. The rest is as in `overlay`.
        """
        if self.heat.ndim != 3:
            raise InputError(
                f"a map {self.grid} of {plural(self.heat.ndim, 'axis')} is no volume's: it needs 3; overlay() draws it"
            )
        size = size or self._best_size()
        values, covered = self._placed(size)
        return render.Volume(
            self._background(size),
            values,
            world=self._in_world(size),
            covered=covered,
            masks=mask,
            scale=self._scale(scale),
            colormap=self.colormap if colormap == AUTO else colormap,
            alpha=alpha,
            window=window,
            flag=self.flag,
        )

    def planes(
        self,
        at: tuple[int, int, int] | None = None,
        size: Size | None = None,
        *,
        mask: render.Masks | None = None,
        scale: Scale = AUTO,
    ) -> Pixels:
        """(h,w,3) uint8: the slices through voxel `at`, by default the peak's, along each axis; keywords as `volume`."""
        return render.planes(self.volume(size, mask=mask, scale=scale), at, caption=self.caption)

    def slices(
        self,
        axis: int | str | None = None,
        size: Size | None = None,
        *,
        count: int = render.MOST,
        mask: render.Masks | None = None,
        scale: Scale = AUTO,
    ) -> Pixels:
        """(h,w,3) uint8: slices along an axis, evenly spread, the peak's among them; as `render.slices`, and `volume`."""
        return render.slices(self.volume(size, mask=mask, scale=scale), axis, count=count, caption=self.caption)

    def projection(
        self,
        axis: int | str | None = None,
        size: Size | None = None,
        *,
        mask: render.Masks | None = None,
        scale: Scale = AUTO,
    ) -> Pixels:
        """(h,w,3) uint8: the strongest value along an axis, or along each; as `render.projection`, and `volume`."""
        return render.projection(self.volume(size, mask=mask, scale=scale), axis, caption=self.caption)

    def animate(
        self,
        path: str | os.PathLike[str],
        axis: int | str | None = None,
        size: Size | None = None,
        *,
        seconds: float = render.SECONDS,
        mask: render.Masks | None = None,
        scale: Scale = AUTO,
        watch: render.Watch | None = None,
        overwrite: bool = True,
    ) -> Path:
        """Write a way through the slices (`.gif`, `.webp`), `seconds` a round; as `render.animate`, and `volume`.

        `watch(done, count)`: called after each slice, for a bar.
        """
        suffix = Path(path).suffix.lower()
        if suffix not in render.ANIMATED:
            raise OutputError(
                f"{path}: cannot write {suffix or 'a file without a suffix'} that moves; use .gif or .webp"
            )
        volume = self.volume(size, mask=mask, scale=scale)
        data = render.animate(volume, axis, seconds=seconds, suffix=suffix, caption=self.caption, watch=watch)
        return write_bytes(path, data, overwrite=overwrite)

    def _in_world(self, size: Size) -> npt.NDArray[np.float64] | None:
        """(4,4) from voxels of the original, of the input or of the grid to millimetres; None where they are unknown."""
        if size == "image" or self.world is None:
            return self.world
        if self.placement is None:
            return None
        return render.world_of_cells(
            self.world, self.placement.cells(self.input_size if size == "input" else self.grid)
        )

    def _expect_flat(self) -> None:
        if self.heat.ndim != 2:
            raise InputError(
                f"a map {self.grid} of {plural(self.heat.ndim, 'axis')} has neither outlines nor boxes: take "
                "heatmap(), its numbers, or "
                f"of one of 3 axes a slice"
            )

    def contours(self, level: float = 0.5, size: Size | None = None) -> list[Floats]:
        """Polygons (M,2) in (row, column) pixels round what reaches `level` times the maximum."""
        self._expect_flat()
        return list(render.contours(self.heatmap(size or self._best_size()), level))

    def boxes(self, threshold: float = 0.5, size: Size | None = None) -> list[render.Box]:
        """Boxes in pixels round what reaches `threshold` times the maximum, the hottest first."""
        self._expect_flat()
        return render.boxes(self.heatmap(size or self._best_size()), threshold)

    def show(self) -> None:
        """Open the overlay in the system's image viewer (in a notebook, put the explanation last in the cell)."""
        from PIL import Image

        Image.fromarray(self.overlay(bar=True)).show(title=self.caption)

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = True) -> Path:
        """Write the overlay (`.png`, `.jpg`, `.webp`), everything (`.npz`), or everything but pixels (`.json`).

        The overlay has the original's own size; under a flagged one there is a strip that says so. Of a map with three axes
        `.gif` and `.webp` are a way through its slices.
        """
        suffix = Path(path).suffix.lower()
        if suffix == ".json":
            error = {} if self.error is None else {"error": self.error.tolist()}
            data = json.dumps({**self._facts(), **error, "heat": self.heat.tolist()}, indent=1).encode()
        elif suffix == ".npz":
            data = self._npz()
        elif suffix in render.ANIMATED and self.heat.ndim == 3:
            return self.animate(path, overwrite=overwrite)
        elif suffix in render.FORMATS:
            data = render.encode(self.marked(), suffix)
        else:
            raise OutputError(
                f"{path}: cannot write {suffix or 'a file without a suffix'}; use .png, .jpg, .webp, .npz or .json, or of "
                f"a map with 3 axes .gif"
            )
        return write_bytes(path, data, overwrite=overwrite)

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, max_bytes: int = MAX_ARRAYS) -> "Explanation":
        """Read what `save` wrote as `.npz` or `.json`; nothing is unpickled.

        `max_bytes`: of the arrays of a `.npz` file; one that declares more is an InputError before any of it is read.
        """
        with one_error(f"{path} is not an explanation that save() wrote as .npz or .json", own=True):
            if Path(path).suffix.lower() == ".json":
                facts = read_json(path)
                kind = np.dtype(facts["dtype"])
                arrays = {key: _numbers(facts.pop(key), kind) for key in ("heat", "error") if key in facts}
            else:
                arrays = read_npz(path, (*ARRAYS, "facts"), max_bytes)
                facts = json.loads(str(arrays.pop("facts")))
            return _from_facts(facts, **arrays)

    def marked(self, height: int | None = None) -> Pixels:
        """(H,W,3): the overlay, `height` rows of it; under a flagged one there is a strip that says so."""
        if self._is_volume and height is None:
            return self.planes()
        picture = self.overlay(height=height)
        return picture if self.flag is None else render.captioned(picture, self.caption, flag=self.flag)

    def _npz(self) -> bytes:
        import io

        buffer = io.BytesIO()
        present = {key: value for key in ARRAYS if (value := getattr(self, key)) is not None}
        np.savez_compressed(buffer, facts=np.array(json.dumps(self._facts())), **present)
        return buffer.getvalue()

    def _facts(self) -> dict[str, Any]:
        """Everything but the arrays, as JSON takes it."""
        plain = {key: getattr(self, key) for key in self.__dataclass_fields__ if key not in ARRAYS}
        plain["top"] = [vars(one) for one in self.top]
        plain["placement"] = self.placement.to_dict() if self.placement else None
        plain["world"] = None if self.world is None else self.world.tolist()
        return {
            **plain,
            "measures": dict(self.measures),
            "parameters": dict(self.parameters),
            "versions": dict(self.versions),
            "dtype": str(self.heat.dtype),
        }

    def __repr__(self) -> str:
        return f"<Explanation of {self.name}: {self.caption}, {'x'.join(map(str, self.grid))}, {self.status}>"

    def _repr_html_(self) -> str:
        words = html.escape(
            self.caption if self.status == OK else f"{self.caption} · {self.status}: {MEANING[self.status]}"
        )
        if not self._is_volume and self.heat.ndim > 3:
            return f"<p>{words}</p>"
        picture = self.planes() if self._is_volume else self.overlay(bar=True)
        return render.notebook_figure(picture, words, words)

    def _best_size(self) -> Size:
        return "image" if self.placement is not None and self.image is not None else "input"

    def _placed(self, size: Size) -> tuple[Floats, npt.NDArray[np.bool_]]:
        heat = np.nan_to_num(self.heat, nan=0.0, posinf=0.0, neginf=0.0)
        if size == "grid":
            return heat, np.ones(self.grid, dtype=bool)
        if size == "input":
            return Placement.identity(self.input_size).project(heat)
        if size != "image":
            raise GeometryError(f"size={size!r}: expected 'image', 'input' or 'grid'")
        if self.placement is None:
            raise GeometryError(
                "where the model's input lies on the image is unknown (the preprocessing is random or not affine); "
                "use size='input'"
            )
        return self.placement.project(heat)

    def _background(self, size: Size) -> Pixels:
        picture = self.image if size == "image" else self.seen
        if picture is not None and size != "grid":
            return picture
        shape = self.grid if size == "grid" else self.input_size if size == "input" else self._image_size()
        return np.full((*shape, 3), 128, dtype=np.uint8)

    def _image_size(self) -> tuple[int, ...]:
        return self.placement.image_size if self.placement else self.input_size


def figure(
    explanations: Sequence[Explanation],
    *,
    columns: int | None = None,
    scale: Scale = AUTO,
    alpha: float = 0.85,
    colormap: str = AUTO,
    bar: bool = True,
    height: int | None = None,
) -> Pixels:
    """(H,W,3) uint8: several explanations side by side with captions, a flagged one marked; keywords as `overlay`.

    `height`: rows of a picture, 320, and 480 where there are planes of a volume.
    """
    height = height or (480 if any(one.heat.ndim == 3 for one in explanations) else 320)
    pictures = [
        one.overlay(scale=scale, alpha=alpha, colormap=colormap, bar=bar, height=height) for one in explanations
    ]
    captions, flags = [one.caption for one in explanations], [one.flag for one in explanations]
    return render.panel(pictures, captions, columns=columns, height=height, flags=flags)


def shared_scales(explanations: Sequence[Explanation], colormap: str = AUTO) -> list[Scale]:
    """One scale for the maps of each method and layer, so that classes can be compared: between methods numbers cannot.

    From 0 to the largest value of them all; with the diverging colours from minus to plus the strongest.
    """
    signed = colormap == render.DIVERGING or (
        colormap == AUTO and any(one.colormap == render.DIVERGING for one in explanations)
    )
    largest: dict[object, float] = {}
    keys = [(one.method, one.layer, tuple(sorted(map(str, one.parameters.items())))) for one in explanations]
    for key, one in zip(keys, explanations, strict=True):
        values = one.heatmap(one._best_size(), scale=None)
        own = float((abs(values) if signed else values).max(initial=0.0))
        largest[key] = max(largest.get(key, 0.0), own)
    return [(-most if signed else 0.0, most) if (most := largest[key]) > 0 else "max" for key in keys]


def _numbers(values: Any, kind: np.dtype[Any]) -> npt.NDArray[Any]:
    if kind.kind != "f":  # a word of 2 GB, for one
        raise TypeError(f"a map of {kind}; expected floats")
    return np.asarray(values, kind)


def _from_facts(facts: dict[str, Any], heat: Floats, error: Floats | None = None, **pictures: Pixels) -> Explanation:
    facts.pop("dtype", None)
    facts["top"] = tuple(ClassScore(**one) for one in facts["top"])
    facts["placement"] = Placement.from_dict(facts["placement"]) if facts["placement"] else None
    facts["input_size"], facts["notes"] = tuple(facts["input_size"]), tuple(facts["notes"])
    facts["steps"] = tuple(facts.get("steps", ()))
    facts["world"] = None if facts.get("world") is None else np.asarray(facts["world"], np.float64).reshape(4, 4)
    return checked(Explanation(heat=heat, error=error, **{**facts, **pictures}))


def checked(one: Explanation) -> Explanation:
    """The explanation, read from a file; InputError where a field is not what it should be.

    Sizes have a limit, for arrays of these sizes are made when the map is drawn.
    """
    axes, place = one.heat.ndim, one.placement
    sizes = [one.input_size] if place is None else [one.input_size, place.input_size, place.image_size]
    cells = max(math.prod(size) for size in sizes) if all(map(_is_size, sizes)) else 0
    rules = {
        "heat": one.heat.dtype.kind == "f" and axes > 0 and one.heat.size > 0,
        "error": one.error is None or (one.error.dtype.kind == "f" and one.error.shape == one.heat.shape),
        "input_size": 0 < cells <= MAX_CELLS and len(one.input_size) == axes,
        "placement": place is None or place.input_size == one.input_size,
        "image": one.image is None
        or _is_picture(one.image, one.image.shape[:axes] if place is None else place.image_size),
        "seen": one.seen is None or _is_picture(one.seen, one.input_size),
        "world": one.world is None or (one.world.shape == (4, 4) and bool(np.isfinite(one.world).all())),
        "target": _is_int(one.target) or one.target is None,
        "score": _is_number(one.score),
        "probability": _is_number(one.probability) or one.probability is None,
        "status": one.status == OK or one.status in MEANING,
        "layer": isinstance(one.layer, str | None),
        "layout": isinstance(one.layout, str | None),
        **{name: isinstance(getattr(one, name), str) for name in ("method", "label", "name", "model")},
        **{name: all(isinstance(word, str) for word in getattr(one, name)) for name in ("notes", "steps")},
        "top": all(_is_int(each.index) and isinstance(each.label, str) and _is_number(each.score) for each in one.top),
        "measures": isinstance(one.measures, Mapping) and all(map(_is_number, one.measures.values())),
        "parameters": isinstance(one.parameters, Mapping),
        "versions": isinstance(one.versions, Mapping),
    }
    if wrong := [name for name, holds in rules.items() if not holds]:
        raise InputError(f"{', '.join(wrong)}: not what an explanation has there")
    return one


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_size(size: object) -> bool:
    return isinstance(size, tuple) and 0 < len(size) <= MAX_AXES and all(_is_int(side) and side > 0 for side in size)


def _is_picture(pixels: npt.NDArray[Any], size: tuple[int, ...]) -> bool:
    """Whether it is (*size,3), or what a signal or a grey volume has instead."""
    known = pixels.shape in ((*size, 3), size) or (pixels.ndim == 2 and pixels.shape[1:] == size)
    return pixels.dtype == np.uint8 and pixels.size > 0 and known
