"""`Explanation`: the attribution map of one image, with methods that draw, save and load the map."""

import html
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from camscope import explanation_io, render
from camscope.atomic_writes_and_folder_locks import write_bytes
from camscope.errors import GeometryError, InputError, OutputError
from camscope.figure_caption import build_figure_caption, describe_map
from camscope.geometry import Placement
from camscope.log_explanation import log_picture_and_numbers
from camscope.map_interpolation import INTERPOLATIONS, Interpolation
from camscope.plurals import plural
from camscope.read_untrusted_files import MAX_ARRAY_BYTES, read_errors_converted
from camscope.registry import METHODS

FloatArray = npt.NDArray[np.floating[Any]]
PixelArray = npt.NDArray[np.uint8]
MapSize = Literal["image", "input", "grid"]
ScaleOption = render.Scale | Literal["auto"] | None
InterpolationOption = Interpolation | Literal["auto"]
AUTO: Literal["auto"] = "auto"
DRAWN_INTERPOLATION: Interpolation = "smooth"  # of colors; numbers, outlines and boxes are bilinear

STATUS_OK = "ok"
STATUS_MEANINGS = {
    "no_positive_evidence": "nothing in the map is positive: no evidence for this target at this layer",
    "zero_gradient": "the score's gradient is zero at this layer: the map holds no information",
    "constant_score": "the score changes only by rounding with what the map shows: the map holds no information",
    "flat": "the map has one value everywhere",
    "nonfinite": "the map holds NaN or infinity, shown as zero",
    "no_spatial_resolution": "the layer has a single cell, so the map shows no position",
    "layout_unverified": "whether the layer's cells lie over the parts of the image that they react to could not be verified",
}
UNINFORMATIVE_STATUSES = ("zero_gradient", "constant_score")  # drawn without colors, for the values are only rounding


@dataclass(frozen=True)
class ClassScore:
    """One of the model's top classes. `probability` is None for a model with one output."""

    index: int
    label: str
    score: float
    probability: float | None


@dataclass(frozen=True, eq=False)
class Explanation:
    """The attribution map of one target on one image, with all that is needed to draw the map and to check it.

    Attributes:
        attribution: (h,w) raw map at the layer's resolution, in units of the score. A signed method gives negative values too.
        method: Name of the method.
        target: Class index, or None for a target that is not a single class.
        label: The target as text.
        score: Value of the target. NaN without a target, which the `label` "no target" says.
        probability: Softmax probability of the class, or None if it is unknown.
        top_classes: The classes with the highest scores.
        layer: Name of the explained layer, or None for methods without one.
        layout: How the layer's output holds its grid.
        input_size: Size of the model's input.
        placement: Where the model's input lies on the original image, or None if unknown.
        status: "ok", or a key of `STATUS_MEANINGS`.
        notes: Remarks of the method, such as the name of the layer that it chose.
        name: Name of the image.
        diagnostics: Numbers by which the method checks its map, such as `completeness_gap`.
        parameters: Settings of the method.
        versions: Versions of the libraries.
        model: Digest of the model's weights, 16 hex digits, wherever they were loaded from.
        standard_error: (h,w) standard error of each cell, for a map that is a mean over random samples; else None.
        image: (H,W,3) pixels of the original image; for a scan it may be a volume (D,H,W).
        model_input_image: (H,W,3) the image as the model received it.
        affine: For a scan: the matrix (4,4) from voxel index (d,row,column) to millimeters in RAS+.
        scan_steps: For a scan: what was done to its stored values, in order.

    >>> explanation = Explanation(np.array([[0.0, 1.0]]), "gradcam", 3, "tabby", 7.5, input_size=(8, 16))
    >>> explanation.grid, explanation.stride, explanation.caption
    ((1, 2), (8.0, 8.0), 'tabby (score 7.5) · Grad-CAM')

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
        """The number of cells of the map along each axis, (h,w) for an image."""
        return self.attribution.shape

    @property
    def stride(self) -> tuple[float, ...]:
        """How many input pixels one cell of the map covers along each axis."""
        return tuple(pixels / cells for pixels, cells in zip(self.input_size, self.grid, strict=True))

    @property
    def peak(self) -> tuple[int, ...]:
        """The pixel of the original image, or the voxel of the volume, with the largest value.

        For a signed map, `planes` draws its cross hairs at the largest absolute value instead.
        """
        return self.peak_at("image")

    def peak_at(self, size: MapSize) -> tuple[int, ...]:
        """Return the row and column of the pixel or voxel with the largest value. `size` is a grid of `heatmap`.

        Args:
            size: "image", "input" or "grid".

        Returns:
            One index for each axis of the map.

        Raises:
            GeometryError: The place of the model's input on the image is unknown.

        >>> Explanation(np.array([[1.0, 4.0]]), "gradcam", 3, "tabby", 7.5, input_size=(8, 16)).peak_at("grid")
        (0, 1)

        """
        values, covered = self._project_map_and_coverage(size)
        return tuple(int(i) for i in np.unravel_index(np.where(covered, values, -np.inf).argmax(), values.shape))

    @property
    def peak_mm(self) -> tuple[float, ...] | None:
        """The peak in millimeters (RAS+: right, anterior, superior). The value is `None` if the image has no affine."""
        if self.affine is None:
            return None
        index = (0,) * (3 - len(self.peak)) + self.peak
        return tuple((self.affine @ [*index, 1])[:3].tolist())

    @property
    def label_and_score(self) -> str:
        """The label with its probability or score, such as `tabby (p=0.93)`. Without a target, only the label."""
        if math.isnan(self.score):
            return self.label
        score_text = f"p={self.probability:.2f}" if self.probability is not None else f"score {self.score:.3g}"
        return f"{self.label} ({score_text})"

    @property
    def method_title(self) -> str:
        """The name of the method in its paper, such as `Grad-CAM` for the method "gradcam"."""
        return METHODS.replace_names_by_titles(self.method)

    @property
    def caption(self) -> str:
        """The label, method and layer as one text, such as `tabby (p=0.93) · Grad-CAM · layer4`."""
        return " · ".join(filter(None, (self.label_and_score, self.method_title, self.layer)))

    @property
    def warning_text(self) -> str | None:
        """The status as text for a figure. The value is `None` if the status is "ok"."""
        return None if self.status == STATUS_OK else self.status.replace("_", " ")

    def coverage_mask(self, size: MapSize = "image") -> npt.NDArray[np.bool_]:
        """Return a mask of the image pixels that the model received.

        Args:
            size: "image", "input" or "grid", as for `heatmap`.

        Returns:
            (H,W) bool, False where the preprocessing cropped the image.

        Raises:
            GeometryError: The place of the model's input on the image is unknown.

        >>> bool(Explanation(np.ones((1, 2)), "gradcam", 3, "tabby", 7.5, input_size=(8, 16)).coverage_mask("grid").all())
        True

        """
        return self._project_map_and_coverage(size)[1]

    @property
    def colormap(self) -> str:
        """The default colormap. It is "diverging" if the map has negative values, otherwise "inferno"."""
        return render.DIVERGING if bool((self.attribution < 0).any()) else "inferno"

    def _resolve_auto_scale(self, scale: ScaleOption) -> render.Scale | None:
        """Return the scale. Replace "auto" by "robust" if the map has the resolution of the input, otherwise by "max"."""
        if scale != "auto":
            return scale
        return "robust" if self.grid == self.input_size else "max"

    def heatmap(
        self, size: MapSize = "image", scale: ScaleOption = "max", *, interpolation: Interpolation = "bilinear"
    ) -> FloatArray:
        """Return the map at the size of the original image, of the model's input, or of the layer's grid.

        Args:
            size: "image", "input" or "grid".
            scale: "max" divides by the maximum and clips to 0..1. So zero stays zero, and a flat positive map is 1 everywhere.
                "robust" divides by the 99.5th percentile of the absolute values. "auto" is "robust" for a map of single pixels,
                otherwise "max". (lo, hi) maps that range to 0..1, for several images on one scale. "symmetric" divides by the
                largest absolute value, -1..1. None keeps score units.
            interpolation: Values between the centers of cells: "bilinear", "smooth" or "cells", as for `Placement.project`.
                Metrics use "bilinear". Drawings use "smooth".

        Returns:
            (H,W) floats.

        Raises:
            GeometryError: The place of the model's input on the image is unknown.
            InputError: The interpolation is unknown.

        >>> Explanation(np.array([[1.0, 4.0]]), "gradcam", 3, "tabby", 7.5).heatmap("grid").tolist()
        [[0.25, 1.0]]

        """
        values = self._project_map_and_coverage(size, interpolation)[0]
        resolved_scale = self._resolve_auto_scale(scale)
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
        interpolation: InterpolationOption = AUTO,
    ) -> PixelArray:
        """Draw the map over the original image. If the position of the map is unknown, draw it over the model's input.

        A signal is drawn as a trace over the map's colors, a volume as its three planes, a video as a strip of frames. A map
        with the status "zero_gradient" or "constant_score" holds no information and gets no colors, outlines or boxes.

        Args:
            size: "image", "input" or "grid"; by default the image if the place of the map on it is known.
            scale: As for `heatmap`.
            alpha: Opacity of the strongest value.
            colormap: A name in `render.COLORMAPS`, or "auto" for the one that suits the map's signs.
            contour: Draw outlines at these levels (0..1) instead of colors.
            box_threshold: Draw boxes around the regions that reach this level (0..1) instead of colors.
            mask: (H,W), or several masks by name, such as `{"lungs": lungs, "opacity": opacity}`. Masks are drawn as outlines
                with a legend.
            colorbar: Add a color bar with the range of the drawn map. That is interpolated, so its maximum may be slightly
                below the maximum of `attribution`.
            height: Rows of the result; by default those of the image.
            interpolation: "cells" shows the cells that were computed. "bilinear" is linear between their centers. "smooth" is
                a cubic without kinks and overshoot. "auto" is "smooth", but "bilinear" for outlines and boxes, as in
                `contours` and `boxes`.

        Returns:
            (H,W,3) uint8.

        Raises:
            GeometryError: The place of the model's input on the image is unknown.
            InputError: The map's axes do not allow outlines or boxes, or the interpolation is unknown.

        >>> explanation = Explanation(np.ones((2, 2)), "gradcam", 3, "tabby", 7.5, input_size=(8, 8))
        >>> explanation.overlay().shape
        (8, 8, 3)

        """
        resolved_scale, colormap = self._resolve_auto_scale(scale), self.colormap if colormap == AUTO else colormap
        if self._is_volume and contour is None and box_threshold is None:
            volume = self.volume(
                size, scale=scale, alpha=alpha, colormap=colormap, mask=mask, interpolation=interpolation
            )
            volume = replace(volume, flag="")  # a figure has a strip for flags
            return render.draw_planes(volume, height=height, bar=colorbar)
        if self.attribution.ndim != 2:
            if self.attribution.ndim not in (1, 3) or any(item is not None for item in (contour, box_threshold, mask)):
                self._check_two_axes()
            image = self._overlay_signal_or_video(
                resolved_scale, alpha, colormap, _resolve_interpolation(interpolation)
            )
            return image if height is None else render.resize_to_fit(image, height, 8 * height)
        size = size or self._choose_image_or_input_size()
        has_regions = contour is not None or box_threshold is not None
        drawn = _resolve_interpolation(interpolation, "bilinear" if has_regions else DRAWN_INTERPOLATION)
        image, (raw, covered) = self._background_image(size), self._project_map_and_coverage(size, drawn)
        values, ends = render.to_display_range(raw, resolved_scale, colormap)
        if self._is_uninformative:
            values = np.zeros_like(values)
        if not has_regions:
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
        self, scale: render.Scale | None, alpha: float, colormap: str, interpolation: Interpolation
    ) -> PixelArray:
        """Draw the map over a signal as a trace, or over the frames of a video."""
        raw = self._project_map_and_coverage("input", interpolation)[0]
        values, _ = render.to_display_range(raw, scale, colormap)
        if self._is_uninformative:
            values = np.zeros_like(values)
        gray = np.full((1, *values.shape) if values.ndim == 1 else (*values.shape, 3), 128, np.uint8)
        background = gray if self.model_input_image is None else self.model_input_image
        if values.ndim == 1:
            return render.draw_signal_trace(background, values, alpha=alpha, colormap=colormap)
        return render.draw_frames(background, values, alpha=alpha, colormap=colormap, columns=render.MAX_FRAMES)

    @property
    def _is_uninformative(self) -> bool:
        """Whether the status marks a map without information. Figures show such a map without colors."""
        return self.status in UNINFORMATIVE_STATUSES

    @property
    def _is_volume(self) -> bool:
        """Whether the map has three axes and belongs to a volume. The map of a video also has three axes."""
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
        interpolation: InterpolationOption = AUTO,
    ) -> render.Volume:
        """Return the map and its volume as a `render.Volume`. The functions of `camscope.render` can draw it.

        The background is the original volume where it is available, otherwise the model's input. A map with the status
        "zero_gradient" or "constant_score" holds no information and is 0 everywhere in the result.

        Args:
            size: As for `overlay`.
            scale: As for `heatmap`.
            alpha: As for `overlay`.
            colormap: As for `overlay`.
            mask: (D,H,W), or several by name.
            window: (low, high), the values of the original image that are drawn black and white.
            interpolation: As for `overlay`. The numbers in the drawing are bilinear.

        Returns:
            One object that holds the volume, the map, the masks and the affine.

        Raises:
            InputError: The map does not have three axes.

        >>> explanation = Explanation(np.random.rand(2, 3, 3), "gradcam", 1, "nodule", 7.5, input_size=(8, 12, 12))
        >>> explanation.volume("input").shape
        (8, 12, 12)

        """
        if self.attribution.ndim != 3:
            raise InputError(
                f"the map {self.grid} has {plural(self.attribution.ndim, 'axis')} and is not a volume: expected 3 axes",
                fix="draw it by overlay()",
            )
        size = size or self._choose_image_or_input_size()
        values, covered = self._project_map_and_coverage(size)
        if self._is_uninformative:
            values = np.zeros_like(values)
        drawn = _resolve_interpolation(interpolation)
        is_drawn_otherwise = drawn != "bilinear" and not self._is_uninformative
        return render.Volume(
            self._background_image(size),
            values,
            drawn_values=self._project_map_and_coverage(size, drawn)[0] if is_drawn_otherwise else None,
            has_cells=drawn == "cells",
            affine=self._affine_at_size(size),
            covered=covered,
            masks=mask,
            scale=self._resolve_auto_scale(scale),
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
        interpolation: InterpolationOption = AUTO,
    ) -> PixelArray:
        """Draw three slices that meet in one voxel, one along each axis.

        Args:
            voxel: Index of the voxel; by default that of the peak.
            size: As for `overlay`.
            mask: As for `volume`.
            scale: As for `heatmap`.
            interpolation: As for `overlay`.

        Returns:
            (h,w,3) uint8.

        Raises:
            InputError: The map does not have three axes.

        >>> explanation = Explanation(np.random.rand(2, 3, 3), "gradcam", 1, "nodule", 7.5, input_size=(8, 12, 12))
        >>> image = explanation.planes(voxel=(1, 2, 2), size="input")
        >>> image.ndim, image.dtype
        (3, dtype('uint8'))

        """
        return render.draw_planes(
            self.volume(size, mask=mask, scale=scale, interpolation=interpolation), voxel, caption=self.caption
        )

    def slices(
        self,
        axis: int | str | None = None,
        size: MapSize | None = None,
        *,
        n_slices: int = render.MAX_FRAMES,
        mask: render.Masks | None = None,
        scale: ScaleOption = AUTO,
        interpolation: InterpolationOption = AUTO,
    ) -> PixelArray:
        """Draw evenly spaced slices along an axis. One slice contains the peak.

        Args:
            axis: Index or name of the axis, as for `render.draw_slices`.
            size: As for `overlay`.
            n_slices: Number of slices.
            mask: As for `volume`.
            scale: As for `heatmap`.
            interpolation: As for `overlay`.

        Returns:
            (h,w,3) uint8.

        Raises:
            InputError: The map does not have three axes.

        >>> explanation = Explanation(np.random.rand(2, 3, 3), "gradcam", 1, "nodule", 7.5, input_size=(8, 12, 12))
        >>> explanation.slices(axis=0, size="input", n_slices=2).shape[2]
        3

        """
        return render.draw_slices(
            self.volume(size, mask=mask, scale=scale, interpolation=interpolation),
            axis,
            n_slices=n_slices,
            caption=self.caption,
        )

    def projection(
        self,
        axis: int | str | None = None,
        size: MapSize | None = None,
        *,
        mask: render.Masks | None = None,
        scale: ScaleOption = AUTO,
        interpolation: InterpolationOption = AUTO,
    ) -> PixelArray:
        """Project the map along an axis and draw it. Each pixel shows the strongest value on its line of voxels.

        Args:
            axis: Index or name of the axis, as for `render.draw_projection`; by default every axis.
            size: As for `overlay`.
            mask: As for `volume`.
            scale: As for `heatmap`.
            interpolation: As for `overlay`.

        Returns:
            (h,w,3) uint8.

        Raises:
            InputError: The map does not have three axes.

        >>> explanation = Explanation(np.random.rand(2, 3, 3), "gradcam", 1, "nodule", 7.5, input_size=(8, 12, 12))
        >>> explanation.projection(axis=0, size="input").shape[2]
        3

        """
        return render.draw_projection(
            self.volume(size, mask=mask, scale=scale, interpolation=interpolation), axis, caption=self.caption
        )

    def animate(
        self,
        path: str | os.PathLike[str],
        axis: int | str | None = None,
        size: MapSize | None = None,
        *,
        seconds: float = render.ANIMATION_SECONDS,
        mask: render.Masks | None = None,
        scale: ScaleOption = AUTO,
        interpolation: InterpolationOption = AUTO,
        on_progress: render.ProgressCallback | None = None,
        overwrite: bool = True,
    ) -> Path:
        """Write an animation that moves through the slices of a volume.

        Args:
            path: File to write, `.gif` or `.webp`.
            axis: Index or name of the axis, as for `render.animate_volume`.
            size: As for `overlay`.
            seconds: Duration of one round.
            mask: As for `volume`.
            scale: As for `heatmap`.
            interpolation: As for `overlay`.
            on_progress: Called as `on_progress(done, count)` after each slice.
            overwrite: Whether an existing file is replaced.

        Returns:
            The path of the file.

        Raises:
            OutputError: The suffix is unknown, or the file cannot be written.
            InputError: The map does not have three axes.

        >>> import tempfile
        >>> explanation = Explanation(np.random.rand(2, 3, 3), "gradcam", 1, "nodule", 7.5, input_size=(4, 12, 12))
        >>> explanation.animate(f"{tempfile.mkdtemp()}/map.gif", size="input", seconds=1).suffix
        '.gif'

        """
        suffix = Path(path).suffix.lower()
        if suffix not in render.ANIMATION_FORMATS:
            raise OutputError(
                f"{path}: cannot write {suffix or 'a file without a suffix'} as an animation; use .gif or .webp"
            )
        volume = self.volume(size, mask=mask, scale=scale, interpolation=interpolation)
        data = render.animate_volume(
            volume, axis, seconds=seconds, suffix=suffix, caption=self.caption, on_progress=on_progress
        )
        return write_bytes(path, data, overwrite=overwrite)

    def _affine_at_size(self, size: MapSize) -> npt.NDArray[np.float64] | None:
        """Return the affine (4,4) from voxels to millimeters, for a volume of the given size.
        Return None for an unknown affine.
        """
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
                f"the map {self.grid} has {plural(self.attribution.ndim, 'axis')}; outlines and boxes need 2 axes",
                fix="use the values of heatmap(), or a slice of a volume",
            )

    def contours(self, level: float = 0.5, size: MapSize | None = None) -> list[FloatArray]:
        """Return the outlines of the regions where the map reaches a given share of its maximum.

        Args:
            level: Share of the maximum, 0..1.
            size: As for `overlay`.

        Returns:
            Polygons (M,2) in (row, column) pixels.

        Raises:
            InputError: The map does not have two axes.

        >>> explanation = Explanation(np.eye(2), "gradcam", 3, "tabby", 7.5, input_size=(2, 2))
        >>> [polygon.shape for polygon in explanation.contours(size="grid")]
        [(8, 2)]

        """
        self._check_two_axes()
        return list(render.find_contours(self.heatmap(size or self._choose_image_or_input_size()), level))

    def boxes(self, threshold: float = 0.5, size: MapSize | None = None) -> list[render.Box]:
        """Return boxes around the regions where the map reaches a given share of its maximum. The strongest box is first.

        Args:
            threshold: Share of the maximum, 0..1.
            size: As for `overlay`.

        Returns:
            Boxes in pixels.

        Raises:
            InputError: The map does not have two axes.

        >>> explanation = Explanation(np.eye(4)[:2], "gradcam", 3, "tabby", 7.5, input_size=(2, 4))
        >>> len(explanation.boxes(size="input"))
        1

        """
        self._check_two_axes()
        return render.find_boxes(self.heatmap(size or self._choose_image_or_input_size()), threshold)

    def print_figure(
        self,
        *,
        width_mm: float = render.ONE_COLUMN_MM,
        scale: ScaleOption = AUTO,
        alpha: float = 0.85,
        colormap: str = AUTO,
        caption: bool = True,
        interpolation: InterpolationOption = AUTO,
    ) -> Any:
        """Draw the overlay as a matplotlib figure for print, with a color bar and a caption. `save` writes it as .pdf or .svg.

        Text stays text. The photo keeps its pixels, and the map is a second image with its opacity.

        Args:
            width_mm: Width in millimeters: 85 for one column of a journal, 174 for two.
            scale: As for `heatmap`.
            alpha: As for `overlay`.
            colormap: As for `overlay`.
            caption: Whether the caption stands below the image.
            interpolation: As for `overlay`.

        Returns:
            A `matplotlib.figure.Figure`.

        Raises:
            MissingExtraError: matplotlib is not installed.
            InputError: The width is out of range.

        >>> explanation = Explanation(np.ones((2, 2)), "gradcam", 3, "tabby", 7.5, input_size=(8, 8))
        >>> round(explanation.print_figure(width_mm=60).get_figwidth() * 25.4)
        60

        """
        return PrintFigure([self], scale=scale, alpha=alpha, colormap=colormap, interpolation=interpolation).draw(
            width_mm=width_mm, caption=caption
        )

    def figure_caption(
        self, *, scale: ScaleOption = AUTO, colormap: str = AUTO, interpolation: InterpolationOption = AUTO
    ) -> str:
        """Return a caption for an article: method, layer, target, scale, interpolation, digest of the weights and versions.

        Args:
            scale: As for `heatmap`.
            colormap: As for `overlay`.
            interpolation: As for `overlay`.

        Returns:
            One paragraph.

        >>> explanation = Explanation(np.ones((2, 2)), "gradcam", 3, "tabby", 7.5, layer="layer4", input_size=(8, 8))
        >>> explanation.figure_caption().partition(". ")[0]
        'Grad-CAM at layer4 for tabby (score 7.5)'

        """
        return PrintFigure([self], scale=scale, colormap=colormap, interpolation=interpolation).caption

    def show(self) -> None:
        """Open the overlay in the image viewer of the system. A notebook displays an explanation without this call.

        >>> Explanation(np.ones((2, 2)), "gradcam", 3, "tabby", 7.5, input_size=(8, 8)).show()  # doctest: +SKIP
        """
        from PIL import Image

        Image.fromarray(self.overlay(colorbar=True)).show(title=self.caption)

    def save(
        self,
        path: str | os.PathLike[str],
        *,
        caption: bool | None = None,
        width_mm: float = render.ONE_COLUMN_MM,
        interpolation: InterpolationOption = AUTO,
        overwrite: bool = True,
    ) -> Path:
        """Save the overlay as an image or a figure for print, or the explanation as a `.npz` or `.json` file.

        An overlay has the size of the original image, with a warning strip if the status is not "ok".

        Args:
            path: `.png`, `.jpg` or `.webp` for the overlay. `.pdf` or `.svg` for `print_figure`. `.npz` for the explanation,
                `.json` for the explanation without pixels. For a map with three axes, `.gif` or `.webp` for an animation.
            caption: Whether an overlay names the class, its score and the method below the image. Flagged maps always do.
                Default: only a `.pdf` or `.svg` does, with the text of `figure_caption`.
            width_mm: Width of a `.pdf` or `.svg` figure in millimeters.
            interpolation: As for `overlay`.
            overwrite: Whether an existing file is replaced.

        Returns:
            The path of the file.

        Raises:
            OutputError: The suffix is unknown, or the file cannot be written.

        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> path = Explanation(np.array([[1.0, 4.0]]), "gradcam", 3, "tabby", 7.5, input_size=(8, 16)).save(f"{folder}/map.npz")
        >>> Explanation.load(path).attribution.tolist()
        [[1.0, 4.0]]

        """
        suffix = Path(path).suffix.lower()
        if suffix == ".json":
            data = explanation_io.encode_json(self)
        elif suffix == ".npz":
            data = explanation_io.encode_npz(self)
        elif suffix in render.ANIMATION_FORMATS and self.attribution.ndim == 3:
            return self.animate(path, interpolation=interpolation, overwrite=overwrite)
        elif suffix in render.VECTOR_FORMATS:
            figure = PrintFigure([self], interpolation=interpolation)
            data = figure.encode(suffix, width_mm=width_mm, caption=caption is not False)
        elif suffix in render.IMAGE_FORMATS:
            data = render.encode_image(self.annotated_image(caption=bool(caption), interpolation=interpolation), suffix)
        else:
            raise OutputError(
                f"{path}: cannot write {suffix or 'a file without a suffix'}; use .png, .jpg, .webp, .pdf, .svg, .npz or "
                ".json, or .gif for a map with 3 axes"
            )
        return write_bytes(path, data, overwrite=overwrite)

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, max_bytes: int = MAX_ARRAY_BYTES) -> "Explanation":
        """Read an explanation from a `.npz` or `.json` file that `save` wrote. Nothing is unpickled.

        Args:
            path: The file.
            max_bytes: The largest size of a `.json` file, or of the arrays in a `.npz` file, checked before the file is read.

        Returns:
            The explanation.

        Raises:
            InputError: The file is not an explanation, is damaged, or exceeds `max_bytes`.

        >>> import tempfile
        >>> explanation = Explanation(np.ones((1, 2)), "gradcam", 3, "tabby", 7.5, input_size=(8, 16))
        >>> path = explanation.save(f"{tempfile.mkdtemp()}/map.json")
        >>> Explanation.load(path).label
        'tabby'

        """
        message = f"{path} is not an explanation that save() wrote as .npz or .json"
        with read_errors_converted(message, wrap_camscope_errors=True):
            fields = explanation_io.read_fields(path, max_bytes)
            fields["top_classes"] = tuple(ClassScore(**row) for row in fields["top_classes"])
            return require_valid_explanation(cls(**fields))

    def log(self, writer: Any, tag: str, step: int | None = None, *, height: int | None = None) -> None:
        """Write the overlay, its numbers and its status to the logger of a training.

        The numbers are `tag/score`, `tag/probability` and `tag/ok`, which is 1 for the status "ok" and else 0.

        Args:
            writer: A SummaryWriter of TensorBoard, a run of W&B or the module wandb, the module mlflow, or a logger of
                Lightning for one of them. Its methods decide: nothing is imported.
            tag: Name of the picture, such as `maps/nodule`.
            step: Number of the step or epoch.
            height: Rows of the overlay, as for `annotated_image`.

        Raises:
            OutputError: The writer has no methods that take a picture.

        >>> from types import SimpleNamespace
        >>> writer = SimpleNamespace(add_image=lambda tag, image, step, dataformats: print(tag, image.shape, step))
        >>> Explanation(np.eye(2), "gradcam", 3, "tabby", 7.5, input_size=(8, 8)).log(writer, "maps/tabby", 2)
        maps/tabby (8, 8, 3) 2

        """
        numbers = {"score": self.score, "ok": float(self.status == STATUS_OK)}
        if self.probability is not None:
            numbers["probability"] = self.probability
        text = self.caption if self.warning_text is None else f"{self.caption} · {self.warning_text}"
        log_picture_and_numbers(writer, tag, self.annotated_image(height), numbers, text, step)

    def annotated_image(
        self, height: int | None = None, *, caption: bool = False, interpolation: InterpolationOption = AUTO
    ) -> PixelArray:
        """Draw the overlay (H,W,3) at a height of `height` pixels. If the status is not "ok", add a warning.

        Args:
            height: Rows of the overlay. Default: as many as the image has.
            caption: Whether a line below names the class, its score and the method. A map with a warning always has this line.
            interpolation: As for `overlay`.

        Returns:
            (H,W,3) uint8, for a volume its three planes.

        >>> explanation = Explanation(np.ones((2, 2)), "gradcam", 3, "tabby", 7.5, input_size=(8, 8), status="flat")
        >>> explanation.annotated_image(height=64).shape[0] > 64  # with a warning
        True

        """
        if self._is_volume and height is None:
            return self.planes(interpolation=interpolation)
        image = self.overlay(height=height, interpolation=interpolation)
        if not caption and self.warning_text is None:
            return image
        return render.add_caption(image, self.caption, flag=self.warning_text)

    def __repr__(self) -> str:
        return f"<Explanation of {self.name}: {self.caption}, {'x'.join(map(str, self.grid))}, {self.status}>"

    def _repr_html_(self) -> str:
        """Show the overlay and the caption in a notebook."""
        text = html.escape(
            self.caption
            if self.status == STATUS_OK
            else f"{self.caption} · {self.status}: {STATUS_MEANINGS[self.status]}"
        )
        if not self._is_volume and self.attribution.ndim > 3:
            return f"<p>{text}</p>"
        image = self.planes() if self._is_volume else self.overlay(colorbar=True)
        return render.build_figure_html(image, text, text)

    def _choose_image_or_input_size(self) -> MapSize:
        return "image" if self.placement is not None and self.image is not None else "input"

    def _project_map_and_coverage(
        self, size: MapSize, interpolation: Interpolation = "bilinear"
    ) -> tuple[FloatArray, npt.NDArray[np.bool_]]:
        """Project the map to the grid, the input or the image. Return the values and the mask of covered cells."""
        values = np.nan_to_num(self.attribution, nan=0.0, posinf=0.0, neginf=0.0)
        if size == "grid":
            return values, np.ones(self.grid, dtype=bool)
        if size == "input":
            return Placement.identity(self.input_size).project(values, interpolation)
        if size != "image":
            raise GeometryError(f"size={size!r}: expected 'image', 'input' or 'grid'")
        if self.placement is None:
            raise GeometryError(
                "the position of the model's input on the image is unknown, since the preprocessing is random or not affine; "
                "use size='input'"
            )
        return self.placement.project(values, interpolation)

    def _background_image(self, size: MapSize) -> PixelArray:
        """Return the image to draw on. Without an image it is gray."""
        image = self.image if size == "image" else self.model_input_image
        if image is not None and size != "grid":
            return image
        image_size = self.placement.image_size if self.placement else self.input_size
        shape = {"grid": self.grid, "input": self.input_size, "image": image_size}[size]
        return np.full((*shape, 3), 128, dtype=np.uint8)


class PrintFigure:
    """A figure for print of one or several explanations of one image: its panels, its caption and its file.

    Args:
        explanations: The explanations, row by row.
        titles: Text above each map. Default: method and target.
        scales: A scale for each map instead of `scale`.
        colormaps: A color map for each map instead of `colormap`.
        photo: (H,W,3), drawn before the first map. Default: no photo.
        scale: As for `Explanation.heatmap`.
        columns: Images in a row. Default: as many as the width allows.
        options: Further options of `Explanation.overlay`: `alpha`, `colormap`, `contour`, `box_threshold`, `mask`,
            `interpolation`.

    >>> explanation = Explanation(np.ones((2, 2)), "gradcam", 3, "tabby", 7.5, input_size=(8, 8))
    >>> len(PrintFigure([explanation, explanation]).panels)
    2

    """

    def __init__(
        self,
        explanations: Sequence[Explanation],
        *,
        titles: Sequence[str] | None = None,
        scales: Sequence[ScaleOption] | None = None,
        colormaps: Sequence[str] | None = None,
        photo: PixelArray | None = None,
        scale: ScaleOption = AUTO,
        columns: int | None = None,
        **options: Any,
    ) -> None:
        if not explanations:
            raise InputError("there is no explanation to draw; expected at least one")
        self.explanations, self.columns = explanations, columns
        titles = [f"{item.method_title}: {item.label}" for item in explanations] if titles is None else titles
        scales = [scale] * len(explanations) if scales is None else scales
        colormap = options.pop("colormap", AUTO)
        colormaps = [colormap] * len(explanations) if colormaps is None else colormaps
        self.maps = [
            _build_print_panel(*arguments, **options)
            for arguments in zip(explanations, titles, scales, colormaps, strict=True)
        ]
        photos = [] if photo is None else [render.PrintPanel(photo, "image")]
        self.panels: list[render.PrintPanel] = [*photos, *self.maps]
        resolved = [item._resolve_auto_scale(item_scale) for item, item_scale in zip(explanations, scales, strict=True)]
        has_regions = options.get("contour") is not None or options.get("box_threshold") is not None
        default: Interpolation = "bilinear" if has_regions else DRAWN_INTERPOLATION
        self.caption = build_figure_caption(
            explanations,
            resolved,
            [panel.value_range or (0.0, 0.0) for panel in self.maps],
            colormap=", ".join(dict.fromkeys(panel.colormap for panel in self.maps)),
            interpolation=_resolve_interpolation(options.get("interpolation", AUTO), default),
            first_letter="" if len(self.panels) == 1 else "ab"[len(photos)],
        )

    def draw(self, *, width_mm: float = render.ONE_COLUMN_MM, caption: bool = True) -> Any:
        """Return the matplotlib figure, `width_mm` millimeters wide.

        Args:
            width_mm: Width in millimeters.
            caption: Whether the caption stands below the images.

        Returns:
            A `matplotlib.figure.Figure`.

        >>> explanation = Explanation(np.ones((2, 2)), "gradcam", 3, "tabby", 7.5, input_size=(8, 8))
        >>> type(PrintFigure([explanation]).draw()).__name__
        'Figure'

        """
        text = self.caption if caption else ""
        return render.draw_print_figure(self.panels, caption=text, width_mm=width_mm, columns=self.columns)

    def encode(self, suffix: str, *, width_mm: float = render.ONE_COLUMN_MM, caption: bool = True) -> bytes:
        """Return the bytes of a .pdf, .svg or .png file. The caption is in its metadata, too.

        Args:
            suffix: ".pdf", ".svg" or ".png".
            width_mm: Width in millimeters.
            caption: Whether the caption stands below the images.

        Returns:
            The bytes of the file.

        >>> explanation = Explanation(np.ones((2, 2)), "gradcam", 3, "tabby", 7.5, input_size=(8, 8))
        >>> PrintFigure([explanation]).encode(".pdf")[:5]
        b'%PDF-'

        """
        figure = self.draw(width_mm=width_mm, caption=caption)
        title = "; ".join(dict.fromkeys(describe_map(explanation) for explanation in self.explanations))
        return render.encode_figure(figure, suffix, title=title, caption=self.caption)


def _build_print_panel(
    explanation: Explanation,
    title: str,
    scale: ScaleOption,
    colormap: str,
    *,
    alpha: float = 0.85,
    interpolation: InterpolationOption = AUTO,
    **regions: Any,
) -> render.PrintPanel:
    """Build the panel of a map. A map over an image is two images. Volumes, signals and outlines are one image."""
    resolved_scale = explanation._resolve_auto_scale(scale)
    colormap = explanation.colormap if colormap == AUTO else colormap
    size = explanation._choose_image_or_input_size()
    has_regions = any(value is not None for value in regions.values())
    is_layered = explanation.attribution.ndim == 2 and not has_regions
    drawn = _resolve_interpolation(interpolation)
    raw, covered = explanation._project_map_and_coverage(size if is_layered else "input", drawn)
    values, ends = render.to_display_range(raw, resolved_scale, colormap)
    layer = None
    if not is_layered:
        image = explanation.overlay(scale=scale, alpha=alpha, colormap=colormap, interpolation=interpolation, **regions)
    else:
        if explanation._is_uninformative:
            values = np.zeros_like(values)
        image = explanation._background_image(size)
        if colormap == render.DIVERGING and alpha > 0:
            image = render.fade_to_gray(image)
        image = render.hatch_uncovered(image, covered)
        layer = render.draw_map_layer(values, alpha=alpha, colormap=colormap, covered=covered)
    return render.PrintPanel(image, title, layer, ends, colormap, explanation.warning_text)


def figure(
    explanations: Sequence[Explanation],
    *,
    columns: int | None = None,
    scale: ScaleOption = AUTO,
    alpha: float = 0.85,
    colormap: str = AUTO,
    colorbar: bool = True,
    height: int | None = None,
    interpolation: InterpolationOption = AUTO,
) -> PixelArray:
    """Draw several explanations side by side with captions. If the status of a map is not "ok", a warning marks it.

    On a scale (lo, hi) each caption ends with the map's own maximum, since a weak map looks empty there.

    Args:
        explanations: The explanations.
        columns: Number of columns; by default chosen by their count.
        scale: As for `Explanation.heatmap`.
        alpha: As for `Explanation.overlay`.
        colormap: As for `Explanation.overlay`.
        colorbar: As for `Explanation.overlay`.
        height: Rows of each image; by default 320, or 480 if a map has three axes.
        interpolation: As for `Explanation.overlay`.

    Returns:
        (H,W,3) uint8.

    >>> explanation = Explanation(np.ones((2, 2)), "gradcam", 3, "tabby", 7.5, input_size=(8, 8))
    >>> figure([explanation, explanation]).dtype
    dtype('uint8')

    """
    height = height or (480 if any(explanation.attribution.ndim == 3 for explanation in explanations) else 320)
    images = [
        explanation.overlay(
            scale=scale,
            alpha=alpha,
            colormap=colormap,
            colorbar=colorbar,
            height=height,
            interpolation=interpolation,
        )
        for explanation in explanations
    ]
    captions = [add_own_maximum(explanation.caption, explanation, scale) for explanation in explanations]
    flags = [explanation.warning_text for explanation in explanations]
    bar_widths = None
    if colorbar:
        pairs = zip(explanations, images, strict=True)
        bar_widths = [compute_color_bar_width(explanation, image, height) for explanation, image in pairs]
    return render.draw_image_grid(images, captions, columns=columns, height=height, flags=flags, bar_widths=bar_widths)


def require_interpolation_option(interpolation: str) -> None:
    """Raise an InputError if an interpolation is neither "auto" nor one of INTERPOLATIONS."""
    if interpolation not in (AUTO, *INTERPOLATIONS):
        raise InputError(f"interpolation={interpolation!r}; choose from auto, {', '.join(INTERPOLATIONS)}")


def _resolve_interpolation(
    interpolation: InterpolationOption, default: Interpolation = DRAWN_INTERPOLATION
) -> Interpolation:
    """Return the interpolation. Replace "auto" by a default."""
    require_interpolation_option(interpolation)
    return default if interpolation == AUTO else interpolation


def compute_color_bar_width(explanation: Explanation, overlay: PixelArray, height: int) -> int:
    """Return the width of the color bar at the right of an overlay, in pixels. The overlay has a height of `height`."""
    if explanation.attribution.ndim != 2:
        return 0
    background = explanation._background_image(explanation._choose_image_or_input_size())
    return int(overlay.shape[1] - render.resize_to_fit(background, height, 2 * height).shape[1])


def add_own_maximum(caption: str, explanation: Explanation, scale: ScaleOption) -> str:
    """Append the maximum of the map to its caption if the scale is (lo, hi). On such a scale, a map may look empty."""
    return f"{caption} · max {explanation.attribution.max(initial=0.0):.2g}" if isinstance(scale, tuple) else caption


def shared_scales(
    explanations: Sequence[Explanation], colormap: str = AUTO, interpolation: InterpolationOption = AUTO
) -> list[ScaleOption]:
    """Return the color scale of each explanation. Maps of the same method and layer share a scale, so they can be compared."""
    colormaps = [explanation.colormap for explanation in explanations] if colormap == AUTO else [colormap]
    is_signed = render.DIVERGING in colormaps
    largest: dict[object, float] = {}
    keys = [
        (explanation.method, explanation.layer, tuple(sorted(map(str, explanation.parameters.items()))))
        for explanation in explanations
    ]
    for key, explanation in zip(keys, explanations, strict=True):
        size = explanation._choose_image_or_input_size()
        values = explanation.heatmap(size, scale=None, interpolation=_resolve_interpolation(interpolation))
        strongest = float((abs(values) if is_signed else values).max(initial=0.0))
        largest[key] = max(largest.get(key, 0.0), strongest)
    return [(-largest[key] if is_signed else 0.0, largest[key]) if largest[key] > 0 else "max" for key in keys]


def require_valid_explanation(explanation: Explanation) -> Explanation:
    """Return the explanation unchanged. Raise an InputError if a field has an invalid type, shape or size."""
    explanation_io.check_fields(explanation, STATUS_MEANINGS)
    return explanation
