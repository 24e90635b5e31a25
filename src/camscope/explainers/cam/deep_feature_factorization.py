"""Deep Feature Factorization: concepts in the activation of a layer, their effects on class scores, and figures."""

import html
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from camscope import render
from camscope.errors import InputError
from camscope.explainers.cam.layer_explainer import LayerExplainer
from camscope.explainers.cam.layer_features_and_perturbed_scores import ActivationVariants, LayerFeatures
from camscope.explainers.cam.shared_layer_pass import SharedLayerPass
from camscope.explainers.core.base_explainer import register
from camscope.explainers.core.chunk_perturbed_copies_by_memory import BatchedMixin
from camscope.explainers.core.evaluation_context import evaluation_context, inspect_model
from camscope.explainers.core.model_input import ModelInput
from camscope.explainers.core.nonnegative_factorization import MatrixFactors, factorize_nonnegative
from camscope.explainers.core.validated_setting_types import NonNegativeNumber, PositiveInteger
from camscope.explanation import FloatArray
from camscope.geometry import Placement
from camscope.plurals import plural
from camscope.targets import AllClassScores, Score


@dataclass(frozen=True)
class ClassGain:
    """A class whose score a concept raises, and the size of the increase.

    Attributes:
        class_index: Index of the class.
        label: Name of the class, or its index as text.
        gain: Increase of the class score, in units of the score.

    >>> ClassGain(class_index=1, label="nodule", gain=2.5).label
    'nodule'

    """

    class_index: int
    label: str
    gain: float


@dataclass(frozen=True, eq=False)
class Concepts:
    """C concepts found in a layer's activation of N images, sorted by their share.

    Attributes:
        maps: (N,C,h,w), the amount of each concept in each cell, at least 0, in units of the activation.
        vectors: (C,K), the channels of each concept, of length 1. Σ_c map x vector is the layer's positive activation.
        shares: (C,), the share of each concept in the sum of all concepts. They sum to 1.
        gains: (C,classes), the class scores with only this concept at the layer, minus those with an empty layer. Mean
            over the images, weighted by the amount of the concept. A model without class scores has 0 classes.
        top_classes: The classes with the largest gains.
        relative_error: Norm of the difference between activation and concepts, divided by the norm of the activation.
        layer: Name of the layer.
        image_names: Names of the images.
        placements: Where the maps lie on the images.
        images: The images (H,W,3) under the maps, or None.
        notes: Notes about the layer.

    >>> from camscope import DeepFeatureFactorization, load_model
    >>> from camscope.phantom import draw_radiograph
    >>> model, image = load_model("phantom"), draw_radiograph(0, "nodule").image
    >>> concepts = DeepFeatureFactorization(model, "layer4", n_concepts=2).factorize([image])
    >>> concepts.layer, concepts.gains.shape, 0 <= concepts.relative_error <= 1
    ('layer4', (2, 4), True)

    """

    maps: FloatArray
    vectors: FloatArray
    shares: FloatArray
    gains: FloatArray
    top_classes: tuple[tuple[ClassGain, ...], ...]
    relative_error: float
    layer: str
    image_names: tuple[str, ...]
    placements: tuple[Placement, ...]
    images: tuple[render.RGBImage | None, ...] = field(repr=False)
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.vectors)

    @property
    def legend(self) -> tuple[render.LegendEntry, ...]:
        """The legend of the concepts. An entry has the color, the share, and the classes whose scores the concept raises."""
        return tuple(
            render.LegendEntry(
                color,
                f"concept {c} · {100 * float(self.shares[c]):.0f} %",
                tuple(f"{gain.label.split(',')[0]}  {gain.gain:+.1f}" for gain in self.top_classes[c]),
            )
            for c, color in enumerate(render.choose_region_colors(len(self)))
        )

    def concept_image(self, image_index: int = 0, *, alpha: float = 0.8) -> render.RGBImage:
        """Draw one image (H,W,3) on which each pixel has the color of its strongest concept.

        The opacity is proportional to the strength, with `alpha` at the strongest cell of all images. Pixels that the
        preprocessing cropped away are hatched.

        Args:
            image_index: Index of the image.
            alpha: Opacity of the strongest cell.

        Returns:
            (H,W,3) uint8, at the size of the image.

        Raises:
            InputError: The maps do not have two axes.

        >>> from camscope import DeepFeatureFactorization, load_model
        >>> from camscope.phantom import draw_radiograph
        >>> model, image = load_model("phantom"), draw_radiograph(0, "nodule").image
        >>> DeepFeatureFactorization(model, "layer4", n_concepts=2).factorize([image]).concept_image().shape
        (128, 128, 3)

        """
        if self.maps.ndim != 4:
            raise InputError(
                f"only 2-D maps can be drawn, and these maps have {plural(self.maps.ndim - 2, 'axis')}: use .maps"
            )
        placement, picture = self.placements[image_index], self.images[image_index]
        strength, covered = placement.project(self.maps[image_index, 0])
        numbers = np.zeros(strength.shape, dtype=np.intp)
        for c in range(1, len(self)):
            other = placement.project(self.maps[image_index, c])[0]
            numbers[other > strength] = c
            strength = np.maximum(strength, other)
        if picture is None:
            picture = np.full((*strength.shape, 3), 128, dtype=np.uint8)
        largest = float(self.maps.max())
        opacity = strength / largest if largest > 0 else strength
        colors = [entry.color for entry in self.legend]
        return render.draw_regions(picture, numbers, opacity, colors, alpha=alpha, covered=covered)

    def figure(self, *, alpha: float = 0.8, columns: int | None = None, height: int = 320) -> render.RGBImage:
        """Draw each image next to the legend. Each pixel has the color of its strongest concept.

        Args:
            alpha: Opacity of the strongest cell.
            columns: Images in a row. None: as many as leave few cells empty.
            height: Rows of each image.

        Returns:
            (H,W,3) uint8.

        >>> from camscope import DeepFeatureFactorization, load_model
        >>> from camscope.phantom import draw_radiograph
        >>> model, image = load_model("phantom"), draw_radiograph(0, "nodule").image
        >>> DeepFeatureFactorization(model, "layer4", n_concepts=2).factorize([image]).figure(height=64).shape[2]
        3

        """
        pictures = [self.concept_image(i, alpha=alpha) for i in range(len(self.maps))]
        grid = render.draw_image_grid(pictures, self.image_names, columns=columns, height=height)
        heading = "share; score it gains alone" if any(self.top_classes) else "share"
        legend = render.draw_region_legend(self.legend, max(12, height // 20), heading=heading)
        return render.join_horizontally(*render.pad_to_height(grid, legend))

    def __repr__(self) -> str:
        shares = ", ".join(f"{100 * float(share):.0f} %" for share in self.shares)
        counts = f"{plural(len(self), 'concept')} of {plural(len(self.maps), 'image')}"
        return f"<{counts} at {self.layer}: {shares}; error {self.relative_error:.2f}>"

    def _repr_html_(self) -> str:
        text = html.escape(repr(self))
        return render.build_figure_html(self.figure(), text, text) if self.maps.ndim == 4 else f"<p>{text}</p>"


IMAGES_PER_PASS = 16
MAX_CLASSES_PER_CONCEPT = 3


@register
class DeepFeatureFactorization(LayerExplainer, BatchedMixin):
    """Non-negative matrix factorization of a layer into concepts: relu(A) ≈ Σ_c h_c w_c (Collins et al. 2018).

    h_c holds the amount of concept c in each cell, w_c its channels. `factorize` finds the concepts of several images.
    The map of a class, which the paper does not have, spreads the effect of each concept over its cells: Σ_c (y_c -
    y_0) h_c / Σ h_c. y_c is the score with only h_c w_c at the layer, y_0 that with an empty layer. If a linear head
    reads the layer, the map sums to the score of the factorization minus the bias. Each sample is factorized
    separately, without the negative part of the layer. Use it to see which parts the layer tells apart, before asking
    for a class.

    Args:
        n_concepts: Number of concepts, limited by the number of channels and of cells.
        n_iterations: Largest number of updates of the factorization.
        tolerance: The updates end if ten of them lower the relative error by less than this.

    >>> concepts = DeepFeatureFactorization(model, "layer4", n_concepts=3).factorize([image])
    >>> concepts.maps.shape, concepts.vectors.shape
    ((1, 3, 16, 16), (3, 96))
    >>> round(float(concepts.shares.sum()), 6)
    1.0

    """

    name, title, paper = "dff", "Deep Feature Factorization", "arXiv:1806.10206"
    forward_passes: ClassVar[str] = "1 + n_concepts partial forwards"
    runs_model = runs_partial_forward = True
    n_concepts: PositiveInteger = 5
    n_iterations: PositiveInteger = 200
    tolerance: NonNegativeNumber = 1e-6

    def compute_layer_map(self, features: LayerFeatures) -> Tensor:
        """Compute the map: the effect of each concept on the score, distributed over the cells of the concept."""
        activation = features.activation.flatten(2)
        finite = activation.isfinite().flatten(1).all(1)[:, None]
        factors = self._factorize_matrix(torch.where(finite[..., None], activation, 0).mT)
        gains = compute_score_gains_of_single_concepts(features, factors.maps, factors.vectors)
        total = factors.maps.sum(1)
        each = torch.where(total > 0, gains / torch.where(total > 0, total, 1), 0)
        return torch.where(finite, (factors.maps @ each[..., None])[..., 0], torch.nan).to(activation.dtype)

    def factorize(self, images: Any) -> Concepts:
        """Find the common concepts of one image or a list of images. All images must have the same input size.

        Args:
            images: Images as `explain` takes them.

        Returns:
            The concepts of all images together.

        Raises:
            InputError: There is no image, or the inputs of the images differ in size.

        >>> from camscope import load_model
        >>> from camscope.phantom import draw_radiograph
        >>> images = [draw_radiograph(seed, "nodule").image for seed in (0, 1)]
        >>> DeepFeatureFactorization(load_model("phantom"), "layer4", n_concepts=2).factorize(images).maps.shape
        (2, 2, 16, 16)

        """
        items = [self.prepare_input(image) for image in (images if isinstance(images, list | tuple) else [images])]
        if not items:
            raise InputError("factorize got no images: pass at least one")
        sizes = sorted({tuple(item.x.shape) for item in items})
        if len(sizes) != 1:
            raise InputError(
                f"factorize got {plural(len(items), 'image')} of different input sizes {sizes}: pass images of one size"
            )
        with evaluation_context(inspect_model(self.model), self, torch.stack([item.x for item in items])) as context:
            x = context.x
            at_once = 1 if context.one_sample_per_pass else IMAGES_PER_PASS
            pages = [
                self._compute_layer_features(context.create_score(score_cls=AllClassScores, optional_target=True), part)
                for part in x.split(at_once)
            ]
            matrix = torch.cat([page.activation.flatten(2).mT for page in pages])
            joint = self._factorize_matrix(matrix.flatten(0, 1)[None])
            maps, vectors = joint.maps[0].unflatten(0, matrix.shape[:2]), joint.vectors.expand(len(x), -1, -1)
            if len(pages) > 1:  # the cached outputs of all pages would not fit into memory
                pages = [replace(page, replay=None) for page in pages]
            chunks = zip(pages, maps.split(at_once), vectors.split(at_once), strict=True)
            gains = torch.cat([compute_score_gains_of_single_concepts(page, *chunk) for page, *chunk in chunks])
        return _build_concepts(items, pages[0], replace(joint, maps=maps), gains)

    def _factorize_matrix(self, matrix: Tensor) -> MatrixFactors:
        return factorize_nonnegative(
            matrix.relu(), self.n_concepts, n_iterations=self.n_iterations, tolerance=self.tolerance
        )

    def _compute_layer_features(self, score: Score, x: Tensor) -> LayerFeatures:
        """Run one forward pass of x and return the features of the layer."""
        layer = self.choose_layer_name(x, score) if self.layer is None else str(self.layer)
        with SharedLayerPass([self], [layer], x, [score]) as shared_pass:
            return next(features for _, features in shared_pass.iter_method_indices_and_features(0))


def compute_score_gains_of_single_concepts(features: LayerFeatures, maps: Tensor, vectors: Tensor) -> Tensor:
    """Compute how much each of C concepts alone raises the score, compared with a layer of zeros. Return the gains (N,C).

    The concepts are `maps` (N,cells,C) and `vectors` (N,C,K). For scores of all classes the result is (N,C,classes).
    """
    n_samples, n_concepts = vectors.shape[:2]
    if features.values.numel() == 0:
        return features.values.new_zeros(n_samples, n_concepts, 0)
    maps, vectors = (F.pad(factor, (0, 0, 0, 1)) for factor in (maps.mT, vectors))  # the last one is the empty layer

    def build_single_concepts(part: slice) -> ActivationVariants:
        rows = torch.arange(part.start, part.stop, device=maps.device)
        samples, which = rows // (n_concepts + 1), rows % (n_concepts + 1)

        def write_concept(activation: Tensor) -> object:
            replacement = vectors[samples, which][..., None] * maps[samples, which][:, None]
            return activation.copy_(replacement.view(activation.shape))

        return ActivationVariants(write_concept, samples)

    scores: Tensor = features.score_activations(n_samples * (n_concepts + 1), build_single_concepts)
    scores = scores.unflatten(0, (n_samples, n_concepts + 1))
    return (scores[:, :-1] - scores[:, -1:]).to(maps.dtype)


def _build_concepts(
    inputs: Sequence[ModelInput], features: LayerFeatures, factors: MatrixFactors, gains: Tensor
) -> Concepts:
    """Build the concepts of several images from the factors, and from how much each concept raises the class scores."""
    amounts, score = factors.maps.sum(1), features.score
    mean_gains = (_normalize_to_unit_sum(amounts)[..., None] * gains).sum(0)
    shares = _normalize_to_unit_sum(amounts.sum(0) * factors.vectors[0].sum(1))
    maps = factors.maps.mT.unflatten(2, features.activation.shape[2:])
    top_classes = []
    for row in mean_gains:
        best = row.topk(min(MAX_CLASSES_PER_CONCEPT, len(row)))
        pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        top_classes.append(tuple(ClassGain(k, score.class_name(k), gain) for k, gain in pairs if gain > 0))

    def to_array(values: Tensor) -> FloatArray:
        return values.to("cpu", features.activation.dtype).numpy()

    drawn = [  # on the original image, or on the model's input if the place of the map is unknown
        (item.placement, item.image)
        if item.placement is not None and item.image is not None
        else (Placement.identity(tuple(item.x.shape[1:])), item.model_input_image)
        for item in inputs
    ]
    return Concepts(
        maps=to_array(maps),
        vectors=to_array(factors.vectors[0]),
        shares=to_array(shares),
        gains=to_array(mean_gains),
        top_classes=tuple(top_classes),
        relative_error=float(factors.relative_error[0]),
        layer=features.layer,
        image_names=tuple(item.name for item in inputs),
        placements=tuple(placement for placement, _ in drawn),
        images=tuple(picture for _, picture in drawn),
        notes=features.notes,
    )


def _normalize_to_unit_sum(values: Tensor) -> Tensor:
    """Divide values by their sum along the first axis. If the sum is 0, the result is 0."""
    total = values.sum(0)
    return torch.where(total > 0, values / total, 0)
