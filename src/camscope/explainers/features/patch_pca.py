"""Principal components of patch features, drawn as colors."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from camscope import render
from camscope.errors import InputError, NonFiniteError
from camscope.explainers.core.model_input import ModelInput
from camscope.explanation import FloatArray
from camscope.geometry import Placement
from camscope.plurals import plural

COLOR_RANGE_PERCENTILES = (1.0, 99.0)  # of a component over the patches: a few outliers would take the whole range
RELATIVE_EIGENVALUE_OF_NOISE = 1e-12  # below this share of the largest eigenvalue, a component is rounding


@dataclass(frozen=True, eq=False)
class PatchPCA:
    """Principal components of the patch features of N images.

    Attributes:
        maps: (N,C,h,w) the C components of each patch, in units of the features. Their mean is 0.
        components: (C,K) directions of length 1, or (N,C,K) if each image has its own components.
        mean: (K,) or (N,K), the mean features, which were subtracted.
        explained_variance_ratio: (C,) or (N,C), the share of each component in the variance of the features.
        joint: Whether all images share the components, so that a color means the same in each.
        layer: Name of the layer.
        image_names: Names of the images.
        placements: Where the maps lie on the images.
        images: The images (H,W,3) or None.

    >>> from camscope import extract_patch_features, load_model
    >>> from camscope.phantom import draw_radiograph
    >>> pca = extract_patch_features(load_model("phantom"), draw_radiograph(0).image, "layer4").pca()
    >>> pca.components.shape, bool(pca.explained_variance_ratio.sum() <= 1)
    ((3, 96), True)

    """

    maps: FloatArray
    components: FloatArray
    mean: FloatArray
    explained_variance_ratio: FloatArray
    joint: bool
    layer: str
    image_names: tuple[str, ...]
    placements: tuple[Placement, ...]
    images: tuple[render.RGBImage | None, ...] = field(repr=False)

    def __len__(self) -> int:
        return len(self.maps)

    def __repr__(self) -> str:
        ratios = np.atleast_2d(self.explained_variance_ratio).mean(0)
        shares = ", ".join(f"{100 * share:.0f} %" for share in ratios)
        return f"<{plural(self.maps.shape[1], 'component')} of {plural(len(self), 'image')} at {self.layer}: {shares}>"

    def colors(self, image_index: int = 0) -> NDArray[np.uint8]:
        """Return the color of each patch. The first three components are red, green and blue.

        Each component is scaled linearly: its 1st and 99th percentiles become 0 and 255. If the images share their
        components, they share these percentiles, too.

        Args:
            image_index: Index of the image.

        Returns:
            (h,w,3) uint8.

        Raises:
            InputError: There are fewer than three components, or the maps do not have two axes.

        >>> from camscope import extract_patch_features, load_model
        >>> from camscope.phantom import draw_radiograph
        >>> pca = extract_patch_features(load_model("phantom"), draw_radiograph(0).image, "layer4").pca()
        >>> pca.colors().shape
        (16, 16, 3)

        """
        return np.round(255 * self._scale_components(image_index)).astype(np.uint8).transpose(1, 2, 0)

    def color_image(self, image_index: int = 0) -> render.RGBImage:
        """Draw the colors at the size of the original image. Pixels that the preprocessing cropped away are hatched.

        Args:
            image_index: Index of the image.

        Returns:
            (H,W,3) uint8.

        >>> from camscope import extract_patch_features, load_model
        >>> from camscope.phantom import draw_radiograph
        >>> pca = extract_patch_features(load_model("phantom"), draw_radiograph(0).image, "layer4").pca()
        >>> pca.color_image().shape
        (128, 128, 3)

        """
        projected = [self.placements[image_index].project(channel) for channel in self._scale_components(image_index)]
        values = np.stack([values for values, _ in projected], axis=2)
        picture = np.round(255 * values.clip(0, 1)).astype(np.uint8)
        return render.hatch_uncovered(picture, projected[0].covered)

    def figure(self, *, height: int = 256) -> render.RGBImage:
        """Draw each image next to its colors.

        Args:
            height: Rows of each picture.

        Returns:
            (H,W,3) uint8, with one row of two pictures per image.

        >>> from camscope import extract_patch_features, load_model
        >>> from camscope.phantom import draw_radiograph
        >>> pca = extract_patch_features(load_model("phantom"), draw_radiograph(0).image, "layer4").pca()
        >>> pca.figure(height=64).shape[2]
        3

        """
        tiles, captions = [], []
        meaning = "colors comparable" if self.joint or len(self) == 1 else "own colors"
        for i, (image, name) in enumerate(zip(self.images, self.image_names, strict=True)):
            colors = self.color_image(i)
            ratios = self.explained_variance_ratio if self.joint else self.explained_variance_ratio[i]
            share = f"{100 * float(ratios[:3].sum()):.0f} % of the variance"
            tiles += [np.full_like(colors, 128) if image is None else image, colors]
            captions += [name, f"PCA of {self.layer}, {share}" + (f", {meaning}" if len(self) > 1 else "")]
        return render.draw_image_grid(tiles, captions, columns=2, height=height)

    def _scale_components(self, image_index: int) -> FloatArray:
        """Return the first three components (3,h,w) of an image, scaled to 0..1."""
        if self.maps.ndim != 4 or self.maps.shape[1] < 3:
            counts = f"{plural(self.maps.shape[1], 'component')} on {plural(self.maps.ndim - 2, 'axis')}"
            raise InputError(f"colors need three components on two axes, but there are {counts}: use .maps")
        own_range = self.maps if self.joint else self.maps[image_index : image_index + 1]
        low, high = np.percentile(own_range[:, :3], COLOR_RANGE_PERCENTILES, axis=(0, 2, 3))[:, :, None, None]
        values = self.maps[image_index, :3].astype(np.float64)
        scaled: FloatArray = np.divide(values - low, high - low, out=np.full_like(values, 0.5), where=high > low)
        return scaled.clip(0, 1)


def compute_patch_pca(
    maps: FloatArray, inputs: Sequence[ModelInput], layer: str, n_components: int, *, joint: bool
) -> PatchPCA:
    """Compute the principal components of features (N,K,*s), for all images together or for each image."""
    n_channels, n_patches = maps.shape[1], maps[0, 0].size * (len(maps) if joint else 1)
    if not 1 <= n_components <= min(n_channels, n_patches):
        raise InputError(
            f"n_components={n_components}; expected 1..{min(n_channels, n_patches)}, for {plural(n_channels, 'feature')} of "
            f"{plural(n_patches, 'patch')}"
        )
    if not np.isfinite(maps).all():
        raise NonFiniteError(f"the features of layer {layer!r} have values that are not finite")
    rows = np.moveaxis(maps, 1, -1).reshape(len(maps), -1, n_channels).astype(np.float64)
    groups = [rows.reshape(-1, n_channels)] if joint else list(rows)
    results = [_compute_components(group, n_components) for group in groups]
    projected = np.concatenate([scores for _, _, _, scores in results]).reshape(len(maps), *maps.shape[2:], -1)
    components, mean, ratios = (np.stack([result[i] for result in results]) for i in range(3))
    places = [
        (item.placement, item.image)
        if item.placement is not None and item.image is not None
        else (Placement.identity(tuple(item.x.shape[1:])), item.model_input_image)
        for item in inputs
    ]
    return PatchPCA(
        maps=np.moveaxis(projected, -1, 1).astype(maps.dtype),
        components=components[0] if joint else components,
        mean=mean[0] if joint else mean,
        explained_variance_ratio=ratios[0] if joint else ratios,
        joint=joint,
        layer=layer,
        image_names=tuple(item.name for item in inputs),
        placements=tuple(placement for placement, _ in places),
        images=tuple(image for _, image in places),
    )


def _compute_components(
    rows: NDArray[np.float64], n_components: int
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Return the components (C,K), the mean (K,), the shares of variance (C,) and the projected rows (M,C)."""
    mean = rows.mean(0)
    centered = rows - mean
    values, vectors = np.linalg.eigh(centered.T @ centered)
    values, axes = values[::-1][:n_components].clip(0), vectors.T[::-1][:n_components].copy()
    axes *= np.where(axes[np.arange(n_components), np.abs(axes).argmax(1)] < 0, -1, 1)[:, None]
    projected = centered @ axes.T
    projected[:, values <= RELATIVE_EIGENVALUE_OF_NOISE * values[0]] = 0
    total = float((centered**2).sum())
    return axes, mean, values / total if total > 0 else np.zeros(n_components), projected
