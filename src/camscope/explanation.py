"""Explanation: the raw map of one image, with what was asked, what was answered, and where the map lies."""

import html
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from camscope import explanation_io, render
from camscope.data_readers import MAX_ARRAY_BYTES, read_errors_converted
from camscope.errors import GeometryError, InputError, OutputError
from camscope.geometry import Placement
from camscope.plurals import plural
from camscope.safe_files import write_bytes

FloatArray = npt.NDArray[np.floating[Any]]
PixelArray = npt.NDArray[np.uint8]
MapSize = Literal["image", "input", "grid"]
ScaleOption = render.Scale | Literal["auto"] | None
AUTO: Literal["auto"] = "auto"

STATUS_OK = "ok"
STATUS_MEANINGS = {
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

    `attribution` (h,w): the raw map at the layer's resolution, unscaled, signed where the method is. `target`: class index (None for a
    callable question), `label` its words, `score` its value, `probability` its softmax, `top_classes` the leading classes.
    `diagnostics`: what the method found of its own map, by name, such as a path's `completeness_gap`.
    `placement`: where the model's input lies on the image; None if unknown. `status`: "ok" or a key of `STATUS_MEANINGS`.
    `standard_error` (h,w): the standard error of each cell, of a map that is a mean over what was drawn; else None.
    `image` (H,W,3): the original's pixels; `model_input_image` (H,W,3): the picture that the model was given.
    Of a scan, `affine` (4,4): from the index of a voxel (d,row,column) to millimetres to the right, to the front and up, and
    `scan_steps`: what was done to its stored numbers, in order; its `image` may be a volume (D,H,W).
    """

    attribution: FloatArray
    method: str
    target: int | None
    label: str
    score: float
    probability: float | None = None
    top_classes: tuple[ClassScore, ...] = ()
    layer: str | None = None
    layout: str | None = None
    input_size: tuple[int, ...] = ()
    placement: Placement | None = None
    status: str = STATUS_OK
    notes: tuple[str, ...] = ()
    name: str = "tensor"
    diagnostics: Mapping[str, float] = field(default_factory=dict)
    parameters: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    model: str = ""
    standard_error: FloatArray | None = field(default=None, repr=False)
    image: PixelArray | None = field(default=None, repr=False)
    model_input_image: PixelArray | None = field(default=None, repr=False)
    affine: npt.NDArray[np.float64] | None = field(default=None, repr=False)
    scan_steps: tuple[str, ...] = ()

    @property
    def grid(self) -> tuple[int, ...]:
        """(h,w): cells of the map."""
        return self.attribution.shape

    @property
    def stride(self) -> tuple[float, ...]:
        """Input pixels per cell, along each axis of the map."""
        return tuple(pixels / cells for pixels, cells in zip(self.input_size, self.grid, strict=True))

    @property
    def peak(self) -> tuple[int, ...]:
        """The pixel of the original image, or the voxel of the volume, where the map is largest; the first among equals.

        The cross hairs of a signed map in `planes` lie where it is largest in size, for or against.
        """
        values, covered = self._project_map("image")
        return tuple(int(i) for i in np.unravel_index(np.where(covered, values, -np.inf).argmax(), values.shape))

    @property
    def peak_mm(self) -> tuple[float, ...] | None:
        """Millimetres to the right, to the front and up of the peak; None where the image does not say where it lies."""
        if self.affine is None:
            return None
        index = (0,) * (3 - len(self.peak)) + self.peak
        return tuple((self.affine @ [*index, 1])[:3].tolist())

    @property
    def label_and_score(self) -> str:
        """`tabby (marker_share=0.93)`."""
        score_text = f"p={self.probability:.2f}" if self.probability is not None else f"score {self.score:.3g}"
        return f"{self.label} ({score_text})"

    @property
    def caption(self) -> str:
        """`tabby (marker_share=0.93) · gradcam · layer4`."""
        return " · ".join(filter(None, (self.label_and_score, self.method, self.layer)))

    @property
    def warning_text(self) -> str | None:
        """The status as a figure's warning strip says it; None for one without."""
        return None if self.status == STATUS_OK else self.status.replace("_", " ")

    def coverage_mask(self, size: MapSize = "image") -> npt.NDArray[np.bool_]:
        """(H,W): which pixels the model was shown; what the preprocessing cropped away is not covered, not cold."""
        return self._project_map(size)[1]

    @property
    def colormap(self) -> str:
        """The colours that suit the map: diverging, white at zero, where it has negative values; else inferno."""
        return render.DIVERGING if bool((self.attribution < 0).any()) else "inferno"

    def _resolve_scale(self, scale: ScaleOption) -> render.Scale | None:
        """Where it is left open: of a map of single pixels the robust one, else the maximum."""
        if scale != "auto":
            return scale
        return "robust" if self.grid == self.input_size else "max"

    def heatmap(self, size: MapSize = "image", scale: ScaleOption = "max") -> FloatArray:
        """(H,W): the map on the original image's pixels, on the model's input, or as it is (`size="grid"`).

        `scale`: "max" divides by the maximum and clips to 0..1: zero stays zero, a flat positive map is 1 everywhere;
        "robust" divides by what 99.5 % of the pixels do not exceed in size, and "auto" is that for a map of single pixels,
        else "max"; (lo, hi) maps that range to 0..1, shared across images; "symmetric" divides by the largest absolute
        value, -1..1; None leaves score units. Raises GeometryError where the place on the image is unknown.
        """
        values = self._project_map(size)[0]
        resolved_scale = self._resolve_scale(scale)
        return values if resolved_scale is None else render.apply_scale(values, resolved_scale)

    def overlay(
        self,
        size: MapSize | None = None,
        *,
        scale: ScaleOption = AUTO,
        alpha: float = 0.85,
        colormap: str = AUTO,
        contour: float | Sequence[float] | None = None,
        box_threshold: float | None = None,
        mask: render.Masks | None = None,
        colorbar: bool = False,
        height: int | None = None,
    ) -> PixelArray:
        """(H,W,3) uint8: the map over the photograph at its own size; over the model's input where the place is unknown.

        Of a signal a trace, its lines over the map's colours; of a volume the three planes, of a video a strip of its frames.

        `contour`: draw outlines at these levels (0..1) instead of colour; `box_threshold`: draw boxes round what reaches this
        level instead of colour; `colormap`: a name in `render.COLORMAPS`, or "auto": the one that suits the map's signs;
        `mask`: (H,W), or names of several such as `{"lungs": lungs, "opacity": opacity}`: their outlines over the map, and
        below the picture what each name's colour is; `colorbar`: a colour bar with the raw range at the right; `height`: rows of
        the picture, for a figure.
        """
        resolved_scale, colormap = self._resolve_scale(scale), self.colormap if colormap == AUTO else colormap
        if self._is_volume and contour is None and box_threshold is None:
            volume = self.volume(size, scale=scale, alpha=alpha, colormap=colormap, mask=mask)
            return render.draw_planes(
                replace(volume, flag=""), height=height, bar=colorbar
            )  # a figure has a strip for flags
        if self.attribution.ndim != 2:
            image = self._overlay_signal_or_video(resolved_scale, alpha, colormap, contour, box_threshold, mask)
            return image if height is None else render.resize_to_fit(image, height, 8 * height)
        size = size or self._best_size()
        image, (raw, covered) = self._background_image(size), self._project_map(size)
        values, ends = render.to_display_range(raw, resolved_scale, colormap)
        if contour is None and box_threshold is None:
            if colormap == render.DIVERGING and alpha > 0:
                image = render.fade_to_gray(image)
            image = render.overlay(image, values, alpha=alpha, colormap=colormap, covered=covered)
        else:
            image = render.hatch_uncovered(image, covered)
        if contour is not None:
            image = render.draw_contours(image, values, contour, colormap=colormap)
        if box_threshold is not None:
            image = render.draw_boxes(image, render.find_boxes(values, box_threshold))
        outlines = render.prepare_outlines(mask, image.shape[:2])
        if height is not None:
            image = render.resize_to_fit(image, height, 2 * height)
        image = render.draw_outlines(image, outlines)
        if colorbar:
            image = render.join_horizontally(image, render.draw_color_bar(image.shape[0], *ends, colormap))
        return render.add_outline_legend(image, outlines)

    def _overlay_signal_or_video(
        self,
        scale: render.Scale | None,
        alpha: float,
        colormap: str,
        contour: object,
        box_threshold: object,
        mask: object,
    ) -> PixelArray:
        """A map of one axis, or a video's, as a picture."""
        if contour is not None or box_threshold is not None or mask is not None or self.attribution.ndim not in (1, 3):
            self._check_two_axes()
        values, _ = render.to_display_range(self._project_map("input")[0], scale, colormap)
        gray = np.full((1, *values.shape) if values.ndim == 1 else (*values.shape, 3), 128, np.uint8)
        background = gray if self.model_input_image is None else self.model_input_image
        if values.ndim == 1:
            return render.draw_signal_trace(background, values, alpha=alpha, colormap=colormap)
        return render.draw_frames(background, values, alpha=alpha, colormap=colormap, columns=render.MAX_FRAMES)

    @property
    def _is_volume(self) -> bool:
        """Whether three axes are a volume's: it is grey, or has a place in the world; a video has neither."""
        if self.attribution.ndim != 3 or self.affine is not None:
            return self.attribution.ndim == 3
        return (
            self.model_input_image is None
            or self.model_input_image.ndim != 4
            or bool((self.model_input_image[..., 0] == self.model_input_image[..., 1]).all())
        )

    def volume(
        self,
        size: MapSize | None = None,
        *,
        scale: ScaleOption = AUTO,
        alpha: float = 0.85,
        colormap: str = AUTO,
        mask: render.Masks | None = None,
        window: tuple[float, float] | None = None,
    ) -> render.Volume:
        """The map of three axes over its volume, for `render.planes`, `slices`, `projection` and `animate`.

        On the original volume where that is at hand, else on the model's input. `mask`: (D,H,W), or names of several;
        `window`: the numbers of the original that are black and white. The rest is as in `overlay`.
        """
        if self.attribution.ndim != 3:
            raise InputError(
                f"a map {self.grid} of {plural(self.attribution.ndim, 'axis')} is no volume's: it needs 3; overlay() draws it"
            )
        size = size or self._best_size()
        values, covered = self._project_map(size)
        return render.Volume(
            self._background_image(size),
            values,
            affine=self._affine_at_size(size),
            covered=covered,
            masks=mask,
            scale=self._resolve_scale(scale),
            colormap=self.colormap if colormap == AUTO else colormap,
            alpha=alpha,
            window=window,
            flag=self.warning_text,
        )

    def planes(
        self,
        voxel: tuple[int, int, int] | None = None,
        size: MapSize | None = None,
        *,
        mask: render.Masks | None = None,
        scale: ScaleOption = AUTO,
    ) -> PixelArray:
        """(h,w,3) uint8: the slices through voxel `voxel`, by default the peak's, along each axis; keywords as `volume`."""
        return render.draw_planes(self.volume(size, mask=mask, scale=scale), voxel, caption=self.caption)

    def slices(
        self,
        axis: int | str | None = None,
        size: MapSize | None = None,
        *,
        n_slices: int = render.MAX_FRAMES,
        mask: render.Masks | None = None,
        scale: ScaleOption = AUTO,
    ) -> PixelArray:
        """(h,w,3) uint8: slices along an axis, evenly spread, the peak's among them; as `render.slices`, and `volume`."""
        return render.draw_slices(
            self.volume(size, mask=mask, scale=scale), axis, n_slices=n_slices, caption=self.caption
        )

    def projection(
        self,
        axis: int | str | None = None,
        size: MapSize | None = None,
        *,
        mask: render.Masks | None = None,
        scale: ScaleOption = AUTO,
    ) -> PixelArray:
        """(h,w,3) uint8: the strongest value along an axis, or along each; as `render.projection`, and `volume`."""
        return render.draw_projection(self.volume(size, mask=mask, scale=scale), axis, caption=self.caption)

    def animate(
        self,
        path: str | os.PathLike[str],
        axis: int | str | None = None,
        size: MapSize | None = None,
        *,
        seconds: float = render.ANIMATION_SECONDS,
        mask: render.Masks | None = None,
        scale: ScaleOption = AUTO,
        on_progress: render.ProgressCallback | None = None,
        overwrite: bool = True,
    ) -> Path:
        """Write a way through the slices (`.gif`, `.webp`), `seconds` a round; as `render.animate`, and `volume`.

        `on_progress(done, count)`: called after each slice, for a bar.
        """
        suffix = Path(path).suffix.lower()
        if suffix not in render.ANIMATION_FORMATS:
            raise OutputError(
                f"{path}: cannot write {suffix or 'a file without a suffix'} that moves; use .gif or .webp"
            )
        volume = self.volume(size, mask=mask, scale=scale)
        data = render.animate_volume(
            volume, axis, seconds=seconds, suffix=suffix, caption=self.caption, on_progress=on_progress
        )
        return write_bytes(path, data, overwrite=overwrite)

    def _affine_at_size(self, size: MapSize) -> npt.NDArray[np.float64] | None:
        """(4,4) from voxels of the original, of the input or of the grid to millimetres; None where they are unknown."""
        if size == "image" or self.affine is None:
            return self.affine
        if self.placement is None:
            return None
        return render.compute_cell_affine(
            self.affine, self.placement.cell_to_image_matrix(self.input_size if size == "input" else self.grid)
        )

    def _check_two_axes(self) -> None:
        if self.attribution.ndim != 2:
            raise InputError(
                f"a map {self.grid} of {plural(self.attribution.ndim, 'axis')} has neither outlines nor boxes: take "
                "heatmap(), its numbers, or "
                f"of one of 3 axes a slice"
            )

    def contours(self, level: float = 0.5, size: MapSize | None = None) -> list[FloatArray]:
        """Polygons (M,2) in (row, column) pixels round what reaches `level` times the maximum."""
        self._check_two_axes()
        return list(render.find_contours(self.heatmap(size or self._best_size()), level))

    def boxes(self, threshold: float = 0.5, size: MapSize | None = None) -> list[render.Box]:
        """Boxes in pixels round what reaches `threshold` times the maximum, the hottest first."""
        self._check_two_axes()
        return render.find_boxes(self.heatmap(size or self._best_size()), threshold)

    def show(self) -> None:
        """Open the overlay in the system's image viewer (in a notebook, put the explanation last in the cell)."""
        from PIL import Image

        Image.fromarray(self.overlay(colorbar=True)).show(title=self.caption)

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = True) -> Path:
        """Write the overlay (`.png`, `.jpg`, `.webp`), everything (`.npz`), or everything but pixels (`.json`).

        The overlay has the original's own size; under a flagged one there is a strip that says so. Of a map with three axes
        `.gif` and `.webp` are a way through its slices.
        """
        suffix = Path(path).suffix.lower()
        if suffix == ".json":
            data = explanation_io.encode_json(self)
        elif suffix == ".npz":
            data = explanation_io.encode_npz(self)
        elif suffix in render.ANIMATION_FORMATS and self.attribution.ndim == 3:
            return self.animate(path, overwrite=overwrite)
        elif suffix in render.IMAGE_FORMATS:
            data = render.encode_image(self.annotated_image(), suffix)
        else:
            raise OutputError(
                f"{path}: cannot write {suffix or 'a file without a suffix'}; use .png, .jpg, .webp, .npz or .json, or of "
                f"a map with 3 axes .gif"
            )
        return write_bytes(path, data, overwrite=overwrite)

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, max_bytes: int = MAX_ARRAY_BYTES) -> "Explanation":
        """Read what `save` wrote as `.npz` or `.json`; nothing is unpickled.

        `max_bytes`: of the arrays of a `.npz` file; one that declares more is an InputError before any of it is read.
        """
        message = f"{path} is not an explanation that save() wrote as .npz or .json"
        with read_errors_converted(message, wrap_camscope_errors=True):
            fields = explanation_io.read_fields(path, max_bytes)
            fields["top_classes"] = tuple(ClassScore(**row) for row in fields["top_classes"])
            return check_explanation(cls(**fields))

    def annotated_image(self, height: int | None = None) -> PixelArray:
        """(H,W,3): the overlay, `height` rows of it; under a flagged one there is a strip that says so."""
        if self._is_volume and height is None:
            return self.planes()
        image = self.overlay(height=height)
        return image if self.warning_text is None else render.add_caption(image, self.caption, flag=self.warning_text)

    def __repr__(self) -> str:
        return f"<Explanation of {self.name}: {self.caption}, {'x'.join(map(str, self.grid))}, {self.status}>"

    def _repr_html_(self) -> str:
        text = html.escape(
            self.caption
            if self.status == STATUS_OK
            else f"{self.caption} · {self.status}: {STATUS_MEANINGS[self.status]}"
        )
        if not self._is_volume and self.attribution.ndim > 3:
            return f"<p>{text}</p>"
        image = self.planes() if self._is_volume else self.overlay(colorbar=True)
        return render.build_figure_html(image, text, text)

    def _best_size(self) -> MapSize:
        return "image" if self.placement is not None and self.image is not None else "input"

    def _project_map(self, size: MapSize) -> tuple[FloatArray, npt.NDArray[np.bool_]]:
        values = np.nan_to_num(self.attribution, nan=0.0, posinf=0.0, neginf=0.0)
        if size == "grid":
            return values, np.ones(self.grid, dtype=bool)
        if size == "input":
            return Placement.identity(self.input_size).project(values)
        if size != "image":
            raise GeometryError(f"size={size!r}: expected 'image', 'input' or 'grid'")
        if self.placement is None:
            raise GeometryError(
                "where the model's input lies on the image is unknown (the preprocessing is random or not affine); "
                "use size='input'"
            )
        return self.placement.project(values)

    def _background_image(self, size: MapSize) -> PixelArray:
        image = self.image if size == "image" else self.model_input_image
        if image is not None and size != "grid":
            return image
        shape = self.grid if size == "grid" else self.input_size if size == "input" else self._image_size()
        return np.full((*shape, 3), 128, dtype=np.uint8)

    def _image_size(self) -> tuple[int, ...]:
        return self.placement.image_size if self.placement else self.input_size


def figure(
    explanations: Sequence[Explanation],
    *,
    columns: int | None = None,
    scale: ScaleOption = AUTO,
    alpha: float = 0.85,
    colormap: str = AUTO,
    colorbar: bool = True,
    height: int | None = None,
) -> PixelArray:
    """(H,W,3) uint8: several explanations side by side with captions, a flagged one marked; keywords as `overlay`.

    `height`: rows of a picture, 320, and 480 where there are planes of a volume.
    """
    height = height or (480 if any(explanation.attribution.ndim == 3 for explanation in explanations) else 320)
    images = [
        explanation.overlay(scale=scale, alpha=alpha, colormap=colormap, colorbar=colorbar, height=height)
        for explanation in explanations
    ]
    captions, flags = (
        [explanation.caption for explanation in explanations],
        [explanation.warning_text for explanation in explanations],
    )
    return render.draw_image_grid(images, captions, columns=columns, height=height, flags=flags)


def shared_scales(explanations: Sequence[Explanation], colormap: str = AUTO) -> list[ScaleOption]:
    """One scale for the maps of each method and layer, so that classes can be compared: between methods numbers cannot.

    From 0 to the largest value of them all; with the diverging colours from minus to plus the strongest.
    """
    is_signed = colormap == render.DIVERGING or (
        colormap == AUTO and any(explanation.colormap == render.DIVERGING for explanation in explanations)
    )
    largest: dict[object, float] = {}
    keys = [
        (explanation.method, explanation.layer, tuple(sorted(map(str, explanation.parameters.items()))))
        for explanation in explanations
    ]
    for key, explanation in zip(keys, explanations, strict=True):
        values = explanation.heatmap(explanation._best_size(), scale=None)
        strongest = float((abs(values) if is_signed else values).max(initial=0.0))
        largest[key] = max(largest.get(key, 0.0), strongest)
    return [(-most if is_signed else 0.0, most) if (most := largest[key]) > 0 else "max" for key in keys]


def check_explanation(explanation: Explanation) -> Explanation:
    """Return an explanation that was read from a file; InputError where a field does not hold what it should."""
    explanation_io.check_fields(explanation, STATUS_MEANINGS)
    return explanation
