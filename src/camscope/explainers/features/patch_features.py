"""Patch features of encoders: the features of each cell of a layer, their similarity to a place, and their PCA."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from camscope.errors import InputError, warn_caller
from camscope.explainers.cam.layer_explainer import LayerExplainer
from camscope.explainers.cam.layer_features_and_perturbed_scores import LayerFeatures
from camscope.explainers.cam.shared_layer_pass import SharedLayerPass
from camscope.explainers.core.evaluation_context import evaluation_context, inspect_model
from camscope.explainers.core.model_input import ExtraInputs, ModelInput
from camscope.explainers.core.run_methods_in_shared_passes import get_library_versions
from camscope.explainers.core.split_keywords_for_model_and_method import build_extra_inputs
from camscope.explainers.features.patch_pca import PatchPCA, compute_patch_pca
from camscope.explanation import Explanation, FloatArray
from camscope.hooks.find_layers import unwrap
from camscope.layers.choose_layer import choose_last_feature_layer
from camscope.layers.layout import Layout
from camscope.loaded_model_metadata_and_weight_digest import compute_model_digest, get_loaded_model_metadata
from camscope.plurals import plural
from camscope.targets import Score
from camscope.targets.base import parse_finite_numbers
from camscope.targets.no_target import NoTarget

IMAGES_PER_PASS = 16
SIMILARITY_NAME = "patch similarity"


@dataclass(frozen=True, eq=False)
class PatchFeatures:
    """The features of each cell of a layer for N images. Class tokens, registers and other tokens off the grid are left out.

    Attributes:
        maps: (N,K,h,w) the K features of each cell.
        layer: Name of the layer.
        layout: How the output of the layer holds its grid.
        inputs: The inputs of the model, with the placement on the images.
        layout_unverified: Whether noise tests could neither confirm nor contradict the layout.
        notes: Notes about the layer.
        model: Digest of the model's weights.

    >>> from camscope import extract_patch_features, load_model
    >>> from camscope.phantom import draw_radiograph
    >>> features = extract_patch_features(load_model("phantom"), draw_radiograph(0).image, "layer4")
    >>> features.maps.shape, features.layer
    ((1, 96, 16, 16), 'layer4')

    """

    maps: FloatArray
    layer: str
    layout: str | None
    inputs: tuple[ModelInput, ...] = field(repr=False)
    layout_unverified: bool = False
    notes: tuple[str, ...] = ()
    model: str = ""

    def __len__(self) -> int:
        return len(self.maps)

    def __repr__(self) -> str:
        grid = "x".join(map(str, self.maps.shape[2:]))
        return f"<{self.maps.shape[1]} features on {grid} cells of {plural(len(self), 'image')} at {self.layer}>"

    def similarity_to_point(self, point: Sequence[float], image_index: int = 0) -> tuple[Explanation, ...]:
        """Compute where else is what is here: the cosine similarity of every cell to the cell at a point.

        Args:
            point: (x, y) in pixels of the image, columns first; for a volume (x, y, z).
            image_index: Index of the image in which the point lies.

        Returns:
            One explanation per image, with a map (h,w) from -1 to 1. At the point the similarity is 1. To compare images, draw
            them on one scale: `overlay(scale=(-1, 1), colormap="diverging")`.

        Raises:
            InputError: The point is no list of finite numbers, has too many or too few of them, or lies outside of the part of
                the image that the model receives. There is no such image.

        >>> from camscope import extract_patch_features, load_model
        >>> from camscope.phantom import draw_radiograph
        >>> images = [draw_radiograph(seed, "nodule").image for seed in (0, 1)]
        >>> features = extract_patch_features(load_model("phantom"), images, "layer4")
        >>> here, other = features.similarity_to_point((40, 60))
        >>> round(float(here.attribution[7, 5]), 4), other.label
        (1.0, 'similarity to (40, 60) of image 0')

        """
        if not 0 <= image_index < len(self):
            raise InputError(f"image_index={image_index}; expected 0..{len(self) - 1}, because there are {len(self)}")
        cell = find_cell_at_point(self.inputs[image_index], point, self.maps.shape[2:])
        vectors = self.maps.astype(np.float64)
        query = np.moveaxis(vectors[image_index], 0, -1)[cell]
        lengths = np.sqrt((vectors**2).sum(1)) * np.sqrt((query**2).sum())
        products = np.einsum("nk...,k->n...", vectors, query)
        cosines = np.divide(products, lengths, out=np.zeros_like(products), where=lengths > 0)
        place = ", ".join(f"{float(value):g}" for value in point)
        label = f"similarity to ({place})" + (f" of image {image_index}" if len(self) > 1 else "")
        return tuple(
            build_feature_explanation(
                item, cosine.astype(self.maps.dtype), SIMILARITY_NAME, label, self, {"point": tuple(map(float, point))}
            )
            for item, cosine in zip(self.inputs, cosines, strict=True)
        )

    def pca(self, n_components: int = 3, *, joint: bool = True) -> PatchPCA:
        """Compute the principal components of the features. Three components are drawn as red, green and blue.

        The features are centered, and no patch is left out as background. The sign of each component is fixed: its
        largest weight is positive.

        Args:
            n_components: Number of components.
            joint: Compute the same components for all images, so that a color means the same in each. If False, each
                image has its own.

        Returns:
            The components of each patch, with pictures.

        Raises:
            InputError: `n_components` is below 1, or above the number of features or of patches.

        >>> from camscope import extract_patch_features, load_model
        >>> from camscope.phantom import draw_radiograph
        >>> features = extract_patch_features(load_model("phantom"), draw_radiograph(0).image, "layer4")
        >>> pca = features.pca()
        >>> pca.maps.shape, pca.color_image().shape
        ((1, 3, 16, 16), (128, 128, 3))

        """
        return compute_patch_pca(self.maps, self.inputs, self.layer, n_components, joint=joint)


def extract_patch_features(
    model: nn.Module,
    images: Any,
    layer: str | nn.Module | None = None,
    *,
    preprocess: Any = None,
    layout: str | Layout | None = None,
    output_index: str | int | None = None,
    additional_forward_args: Any = None,
) -> PatchFeatures:
    """Extract the features of each patch of one or several images from a layer. The output of the model may be anything.

    The model runs in eval mode without gradients, and is restored afterwards.

    Args:
        model: The model, such as an encoder without a head.
        images: One image as `explain` takes it, or a list. All must have the same input size.
        layer: A name or a module. None: the last layer with a grid of features, which for most transformers is the last
            norm.
        preprocess: How an image becomes the model's input. Default: that of a model loaded by `load_model`.
        layout: "channels_first", "channels_last" or a `Layout`, if the grid of the layer is ambiguous.
        output_index: Key of the tensor in a layer that returns several.
        additional_forward_args: Extra inputs of the model: a tuple of positional arguments, a dict of keywords, or one
            argument.

    Returns:
        The features of all cells (N,K,h,w). Tokens off the grid, such as class tokens and registers, are left out.

    Raises:
        InputError: There is no image, or the inputs of the images differ in size.
        LayerError: No layer has a grid, or the layout is contradicted.

    >>> from camscope import load_model
    >>> from camscope.phantom import draw_radiograph
    >>> extract_patch_features(load_model("phantom"), [draw_radiograph(0).image])
    <96 features on 16x16 cells of 1 image at layer4>

    """
    extractor = _PatchFeatureExtractor(model, layer, preprocess=preprocess, layout=layout, output_index=output_index)
    return extractor.extract(images, build_extra_inputs((), {}, additional_forward_args))


@dataclass(eq=False, repr=False)
class _PatchFeatureExtractor(LayerExplainer):
    """Reads the activation of a layer without a score."""

    name, title, paper = "patchfeatures", "Patch features", ""

    def compute_layer_map(self, features: LayerFeatures) -> Tensor:
        """Return the length of the features of each cell."""
        lengths: Tensor = features.activation.norm(dim=1)
        return lengths

    def with_layer(self, x: Tensor, score: Score) -> Self:
        """Return this extractor with a layer: the layer of the user, or the last one with a grid of features."""
        if self.layer is not None:
            return self
        metadata = get_loaded_model_metadata(score.model)
        return replace(
            self, layer=metadata.layer if metadata and metadata.layer else choose_last_feature_layer(score, x).name
        )

    def extract(self, images: Any, extra_inputs: ExtraInputs) -> PatchFeatures:
        """Return the features of one image or of a list of images."""
        items = prepare_inputs_of_one_size(self, images, "extract_patch_features")
        model_info = inspect_model(self.model)
        notes: tuple[str, ...] = ()
        pages: list[LayerFeatures] = []
        stacked = torch.stack([item.x for item in items])
        with evaluation_context(model_info, self, stacked, extra_inputs) as context:
            at_once = 1 if context.one_sample_per_pass else IMAGES_PER_PASS
            if extra_inputs.args or extra_inputs.kwargs:  # whose rows may belong to the images
                at_once = len(items)
            chosen = self.with_layer(context.x[:at_once], context.create_score(NoTarget()))
            for part in context.x.split(at_once):
                score = context.create_score(NoTarget())
                with SharedLayerPass([chosen], [str(chosen.layer)], part, [score]) as shared_pass:
                    pages += [features for _, features in shared_pass.iter_method_indices_and_features(0)]
            maps = torch.cat([page.activation.detach() for page in pages])
        if self.layer is None:
            notes = (f"layer {chosen.layer!r} was chosen",)
        first = pages[0]
        unverified = any(page.layout_unverified for page in pages)
        if unverified:
            warn_caller(f"the layout of layer {first.layer!r} could not be verified: the cells may lie elsewhere")
        return PatchFeatures(
            maps=maps.cpu().numpy(),
            layer=first.layer,
            layout=str(first.layout) if first.layout else None,
            inputs=tuple(items),
            layout_unverified=unverified,
            notes=(*notes, *first.notes),
            model=compute_model_digest(unwrap(self.model)),
        )


def prepare_inputs_of_one_size(explainer: LayerExplainer, images: Any, function_name: str) -> list[ModelInput]:
    """Convert one image or a list of images to inputs of the model. Raise InputError if the inputs differ in size."""
    items = [explainer.prepare_input(image) for image in (images if isinstance(images, list | tuple) else [images])]
    if not items:
        raise InputError(f"{function_name} got no images: pass at least one")
    sizes = sorted({tuple(item.x.shape) for item in items})
    if len(sizes) != 1:
        raise InputError(
            f"{function_name} got {plural(len(items), 'image')} of different input sizes {sizes}: pass images of one size"
        )
    return items


def find_cell_at_point(model_input: ModelInput, point: Sequence[float], grid: Sequence[int]) -> tuple[int, ...]:
    """Return the index of the cell of a grid that lies at a point (x, y) of the image. Raise InputError if there is none."""
    numbers, size = parse_finite_numbers(point), tuple(model_input.x.shape[1:])
    if numbers is None or len(numbers) != len(grid):
        raise InputError(f"the point is {point!r}; expected {plural(len(grid), 'finite number')}, such as (x, y)")
    place = np.asarray(numbers[::-1], dtype=np.float64)
    if model_input.placement is not None:
        place = model_input.placement.to_input(place[None])[0]
    if not all(0 <= position < pixels for position, pixels in zip(place, size, strict=True)):
        raise InputError(f"the point {tuple(numbers)} lies outside of the model's input")
    cells = zip(place, size, grid, strict=True)
    return tuple(min(int(position * count / pixels), count - 1) for position, pixels, count in cells)


def build_feature_explanation(
    model_input: ModelInput,
    attribution: FloatArray,
    method: str,
    label: str,
    source: Any,
    parameters: dict[str, Any],
    diagnostics: dict[str, float] | None = None,
) -> Explanation:
    """Build the explanation of one image from a map that needs no target. `source` holds the layer, the layout and notes."""
    return Explanation(
        attribution=attribution,
        method=method,
        target=None,
        label=label,
        score=float("nan"),
        layer=source.layer,
        layout=source.layout,
        input_size=tuple(model_input.x.shape[1:]),
        placement=model_input.placement,
        status="layout_unverified" if source.layout_unverified else "ok",
        notes=(*source.notes, *model_input.flags),
        name=model_input.name,
        diagnostics=diagnostics or {},
        parameters=parameters,
        versions=get_library_versions(),
        model=source.model,
        image=model_input.image,
        model_input_image=model_input.model_input_image,
        affine=model_input.affine,
        scan_steps=model_input.scan_steps,
    )
