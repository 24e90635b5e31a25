"""Deep Feature Factorization: the few concepts that a layer's activation is made of, and what each does to the score.

Concepts: what a layer's activation of some images is made of, and how to see it.
"""

import html
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from camscope import render
from camscope.errors import InputError
from camscope.explainers.cam.base import LayerExplainer
from camscope.explainers.cam.layer_features import LayerFeatures
from camscope.explainers.cam.layer_pass import SharedPass
from camscope.explainers.core.base import register
from camscope.explainers.core.batching import BatchedMixin
from camscope.explainers.core.evaluation_context import (
    check_number,
    check_positive_integer,
    evaluation_context,
    inspect_model,
)
from camscope.explainers.core.inputs import ModelInput
from camscope.explainers.core.linalg import MatrixFactors, factorize_nonnegative
from camscope.explanation import FloatArray, PixelArray
from camscope.geometry import Placement
from camscope.plurals import plural
from camscope.targets import AllClassScores, Score


@dataclass(frozen=True)
class ClassGain:
    """A class whose score a concept raises, by how much."""

    class_index: int
    label: str
    gain: float


@dataclass(frozen=True, eq=False)
class Concepts:
    """C concepts that N images share at a layer, the one with the largest share first.

    `maps` (N,C,h,w): how much of each concept is in each cell, not negative, in the activation's units; `vectors` (C,K):
    its channels, of length 1. Σ_c map x vector is the layer's positive activation, but for `relative_error`: length of what is
    missing over length of the whole. `shares` (C,): each concept's part of all that the concepts hold, in sum 1.
    `gains` (C,classes): what a concept alone does to each class score, less what an empty layer gives; the mean over the
    images, each weighing as much as the concept is in it; no classes for a model without class scores. `top_classes`: the
    classes that gain most. `images` (H,W,3) or None and `placements`: what to draw on, and where the maps lie on it.
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
        """What the color of each concept stands for: its number from 0, its share, and the classes that it raises."""
        return tuple(
            render.LegendEntry(
                color,
                f"concept {c} · {_format_percent(float(self.shares[c]))}",
                _format_class_gains(self.top_classes[c]),
            )
            for c, color in enumerate(render.choose_region_colors(len(self)))
        )

    def concept_image(self, image_index: int = 0, *, alpha: float = 0.8) -> render.RGBImage:
        """(H,W,3): one image, each pixel in the color of its strongest concept, as opaque as that is strong.

        The strongest cell of all images has the opacity `alpha`. What the preprocessing cropped away is hatched.
        """
        if self.maps.ndim != 4:
            raise InputError(f"of maps of {plural(self.maps.ndim - 2, 'axis')} there is no picture yet; use .maps")
        placement, picture = self.placements[image_index], self.images[image_index]
        strength, covered = placement.project(self.maps[image_index, 0])
        numbers = np.zeros(strength.shape, dtype=np.intp)
        for c in range(1, len(self)):
            other = placement.project(self.maps[image_index, c])[0]
            numbers[other > strength] = c
            strength = np.maximum(strength, other)
        largest = float(self.maps.max())
        if picture is None:
            picture = np.full((*strength.shape, 3), 128, dtype=np.uint8)
        colors = [entry.color for entry in self.legend]
        opacity = strength / largest if largest > 0 else strength
        return render.draw_regions(picture, numbers, opacity, colors, alpha=alpha, covered=covered)

    def figure(self, *, alpha: float = 0.8, columns: int | None = None, height: int = 320) -> render.RGBImage:
        """(H,W,3): every image as `concept_image` has it, beside the legend. `height`: rows of an image."""
        pictures = [self.concept_image(i, alpha=alpha) for i in range(len(self.maps))]
        grid = render.draw_image_grid(pictures, self.image_names, columns=columns, height=height)
        heading = "share; score it gains alone" if any(self.top_classes) else "share"
        return render.join_horizontally(
            *render.pad_to_height(grid, render.draw_region_legend(self.legend, max(12, height // 20), heading=heading))
        )

    def __repr__(self) -> str:
        shares = ", ".join(_format_percent(float(share)) for share in self.shares)
        counts = f"{plural(len(self), 'concept')} of {plural(len(self.maps), 'image')}"
        return f"<{counts} at {self.layer}: {shares}; error {self.relative_error:.2f}>"

    def _repr_html_(self) -> str:
        words = html.escape(repr(self))
        return render.build_figure_html(self.figure(), words, words) if self.maps.ndim == 4 else f"<p>{words}</p>"


def _format_percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _format_class_gains(class_gains: tuple[ClassGain, ...]) -> tuple[str, ...]:
    return tuple(f"{class_gain.label.split(',')[0]}  {class_gain.gain:+.1f}" for class_gain in class_gains)


IMAGES_PER_PASS = 16  # images in one pass
MAX_CLASSES_PER_CONCEPT = 3  # classes that name a concept


@register
class DeepFeatureFactorization(LayerExplainer, BatchedMixin):
    """Concepts h_c (cells) and w_c (channels), none negative, with relu(A) ≈ Σ_c h_c w_c (Collins et al. 2018).

    `factorize` finds the concepts that several images share. The paper asks for no class; the map of one spreads what each
    concept alone does for the score over its cells, Σ_c (y_c - y_0) h_c / Σ h_c: y_c is the score with h_c w_c at the layer
    and nothing else, y_0 with nothing. Where a linear head reads the layer, the map's sum is the score of the whole
    factorisation less the bias. Each sample is factorised by itself, what is negative at the layer is left out.
    `n_concepts`: at most so many; no more than channels or cells. `n_iterations`, `tolerance`: see `factorize_nonnegative`.
    """

    name, title, paper = "dff", "Deep Feature Factorization", "arXiv:1806.10206"
    forward_passes: ClassVar[str] = "1 + n_concepts partial forwards"
    runs_model: ClassVar[bool] = True
    runs_partial_forward: ClassVar[bool] = True
    n_concepts: int = 5
    n_iterations: int = 200
    tolerance: float = 1e-6

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive_integer(n_concepts=self.n_concepts, n_iterations=self.n_iterations)
        check_number(tolerance=self.tolerance, low=0)

    def combine(self, features: LayerFeatures) -> Tensor:
        """(N,*s), signed"""
        activation = features.activation.flatten(2)
        finite = activation.isfinite().flatten(1).all(1)[:, None]
        factors = self._factorize_matrix(torch.where(finite[..., None], activation, 0).mT)
        gains = compute_concept_gains(features, factors.maps, factors.vectors)
        total = factors.maps.sum(1)
        each = torch.where(total > 0, gains / torch.where(total > 0, total, 1), 0)
        heat = torch.where(finite, (factors.maps @ each[..., None])[..., 0], torch.nan)
        return heat.to(activation.dtype).view(len(heat), *features.activation.shape[2:])

    def factorize(self, images: Any) -> Concepts:
        """One image, or a list of images of one input size -> the concepts that they share, the largest share first."""
        items = [self.prepare_input(image) for image in (images if isinstance(images, list | tuple) else [images])]
        if not items:
            raise InputError("no images: factorise takes one at least")
        sizes = sorted({tuple(item.x.shape) for item in items})
        if len(sizes) != 1:
            raise InputError(
                f"{plural(len(items), 'image')} of the input sizes {sizes}; factorise takes images of one size"
            )
        return self._factorize_jointly(items)

    def _factorize_jointly(self, inputs: Sequence[ModelInput]) -> Concepts:
        """One pass for every few images, one factorisation of them all."""
        with evaluation_context(inspect_model(self.model), self, torch.stack([item.x for item in inputs])) as context:
            x = context.x
            at_once = 1 if context.one_sample_per_pass else IMAGES_PER_PASS
            pages = [
                self._compute_layer_features(context.create_score(score_cls=AllClassScores), part)
                for part in x.split(at_once)
            ]
            matrix = torch.cat([page.activation.flatten(2).mT for page in pages])
            joint = self._factorize_matrix(matrix.flatten(0, 1)[None])
            maps, vectors = joint.maps[0].unflatten(0, matrix.shape[:2]), joint.vectors.expand(len(x), -1, -1)
            parts = [slice(start, start + at_once) for start in range(0, len(x), at_once)]
            if len(pages) > 1:  # what each has for its next passes must not be held for all
                pages = [replace(page, replay=None) for page in pages]
            gains = [
                compute_concept_gains(page, maps[part], vectors[part]) for page, part in zip(pages, parts, strict=True)
            ]
        return _build_concepts(inputs, pages[0], replace(joint, maps=maps), torch.cat(gains))

    def _factorize_matrix(self, matrix: Tensor) -> MatrixFactors:
        return factorize_nonnegative(
            matrix.relu(), self.n_concepts, n_iterations=self.n_iterations, tolerance=self.tolerance
        )

    def _compute_layer_features(self, score: Score, x: Tensor) -> LayerFeatures:
        layer = self.choose_layer_name(x, score) if self.layer is None else str(self.layer)
        with SharedPass([self], [layer], x, [score]) as shared_pass:
            return next(features for _, features in shared_pass.iter_features(0))


def compute_concept_gains(features: LayerFeatures, concept_maps: Tensor, concept_vectors: Tensor) -> Tensor:
    """(N,cells,C), (N,C,K) -> (N,C): the score with one concept alone at the layer, less that of an empty layer.

    (N,C,classes) where the question is every class.
    """
    samples, concepts = concept_vectors.shape[:2]
    if features.values.numel() == 0:
        return features.values.new_zeros(samples, concepts, 0)
    concept_maps, concept_vectors = (
        F.pad(concept_maps.mT, (0, 0, 0, 1)),
        F.pad(concept_vectors, (0, 0, 0, 1)),
    )  # the last one is the empty layer

    def alone(part: slice) -> tuple[Callable[[Tensor], object], Tensor]:
        rows = torch.arange(samples * (concepts + 1), device=concept_maps.device)[part]
        sample_rows, which = rows // (concepts + 1), rows % (concepts + 1)

        def change(activation: Tensor) -> object:
            replacement = concept_vectors[sample_rows, which][..., None] * concept_maps[sample_rows, which][:, None]
            return activation.copy_(replacement.view(activation.shape))

        return change, sample_rows

    scores: Tensor = features.score_activations(samples * (concepts + 1), alone).unflatten(0, (samples, concepts + 1))
    return (scores[:, :-1] - scores[:, -1:]).to(concept_maps.dtype)


def _build_concepts(
    inputs: Sequence[ModelInput], features: LayerFeatures, factors: MatrixFactors, gains: Tensor
) -> Concepts:
    """Maps (N,cells,C), vectors (1,C,K), gains (N,C,classes) -> what is known of the concepts, on the CPU."""
    amounts = factors.maps.sum(1)
    mean = (_normalize_to_unit_sum(amounts)[..., None] * gains).sum(0)
    shares = _normalize_to_unit_sum(amounts.sum(0) * factors.vectors[0].sum(1))
    maps = factors.maps.mT.unflatten(2, features.activation.shape[2:])

    def array(values: Tensor) -> FloatArray:
        return values.to("cpu", features.activation.dtype).numpy()

    drawn = [_select_display_image(item) for item in inputs]
    return Concepts(
        maps=array(maps),
        vectors=array(factors.vectors[0]),
        shares=array(shares),
        gains=array(mean),
        top_classes=tuple(_select_top_class_gains(row, features.score.class_name) for row in mean),
        relative_error=float(factors.relative_error[0]),
        layer=features.layer,
        image_names=tuple(item.name for item in inputs),
        placements=tuple(placement for placement, _ in drawn),
        images=tuple(picture for _, picture in drawn),
        notes=features.notes,
    )


def _select_top_class_gains(gains: Tensor, get_class_name: Callable[[int], str]) -> tuple[ClassGain, ...]:
    best = gains.topk(min(MAX_CLASSES_PER_CONCEPT, len(gains)))
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return tuple(ClassGain(k, get_class_name(k), gain) for k, gain in pairs if gain > 0)


def _select_display_image(model_input: ModelInput) -> tuple[Placement, PixelArray | None]:
    """What to draw on, and where the maps lie there: the original, or the model's input where the place is unknown."""
    if model_input.placement is not None and model_input.image is not None:
        return model_input.placement, model_input.image
    return Placement.identity(tuple(model_input.x.shape[1:])), model_input.model_input_image


def _normalize_to_unit_sum(values: Tensor) -> Tensor:
    """Each over the sum along the first axis; zeros where that is 0."""
    total = values.sum(0)
    return torch.where(total > 0, values / total, 0)
