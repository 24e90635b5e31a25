"""Deep Feature Factorization: the few concepts that a layer's activation is made of, and what each does to the score."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from camscope.errors import InputError
from camscope.explainers.base import register
from camscope.explainers.chunks import InPasses
from camscope.explainers.concepts import ClassGain, Concepts
from camscope.explainers.factorisation import Factors, factorised
from camscope.explainers.features import Features
from camscope.explainers.inputs import Item
from camscope.explainers.layer import LayerExplainer
from camscope.explainers.passes import Pass
from camscope.explainers.scope import asking, expect_count, expect_number, survey
from camscope.explanation import Floats, Pixels
from camscope.geometry import Placement
from camscope.targets import EveryClass, Score
from camscope.wording import plural

AT_ONCE = 16  # images in one pass
NAMED = 3  # classes that name a concept


@register
class DeepFeatureFactorization(LayerExplainer, InPasses):
    """Concepts h_c (cells) and w_c (channels), none negative, with relu(A) ≈ Σ_c h_c w_c (Collins et al. 2018).

    `factorise` finds the concepts that several images share. The paper asks for no class; the map of one spreads what each
    concept alone does for the score over its cells, Σ_c (y_c - y_0) h_c / Σ h_c: y_c is the score with h_c w_c at the layer
    and nothing else, y_0 with nothing. Where a linear head reads the layer, the map's sum is the score of the whole
    factorisation less the bias. Each sample is factorised by itself, what is negative at the layer is left out.
    `concepts`: at most so many; no more than channels or cells. `sweeps`, `tolerance`: see `factorised`.
    """

    name, paper = "dff", "arXiv:1806.10206"
    forwards: ClassVar[str] = "1 + concepts rests"
    runs_model: ClassVar[bool] = True
    runs_rest: ClassVar[bool] = True
    concepts: int = 5
    sweeps: int = 200
    tolerance: float = 1e-6

    def __post_init__(self) -> None:
        super().__post_init__()
        expect_count(concepts=self.concepts, sweeps=self.sweeps)
        expect_number(tolerance=self.tolerance, low=0)

    def combine(self, features: Features) -> Tensor:
        """(N,*s), signed"""
        activation = features.activation.flatten(2)
        finite = activation.isfinite().flatten(1).all(1)[:, None]
        factors = self._factorised(torch.where(finite[..., None], activation, 0).mT)
        gains = gains_of(features, factors.maps, factors.vectors)
        total = factors.maps.sum(1)
        each = torch.where(total > 0, gains / torch.where(total > 0, total, 1), 0)
        heat = torch.where(finite, (factors.maps @ each[..., None])[..., 0], torch.nan)
        return heat.to(activation.dtype).view(len(heat), *features.activation.shape[2:])

    def factorise(self, images: Any) -> Concepts:
        """One image, or a list of images of one input size -> the concepts that they share, the largest share first."""
        items = [self.read(image) for image in (images if isinstance(images, list | tuple) else [images])]
        if not items:
            raise InputError("no images: factorise takes one at least")
        sizes = sorted({tuple(item.x.shape) for item in items})
        if len(sizes) != 1:
            raise InputError(
                f"{plural(len(items), 'image')} of the input sizes {sizes}; factorise takes images of one size"
            )
        return self._together(items)

    def _together(self, items: Sequence[Item]) -> Concepts:
        """One pass for every few images, one factorisation of them all."""
        with asking(survey(self.model), self, torch.stack([item.x for item in items])) as asked:
            x = asked.x
            at_once = 1 if asked.one_by_one else AT_ONCE
            pages = [self._page(asked.score(kind=EveryClass), part) for part in x.split(at_once)]
            matrix = torch.cat([page.activation.flatten(2).mT for page in pages])
            joint = self._factorised(matrix.flatten(0, 1)[None])
            maps, vectors = joint.maps[0].unflatten(0, matrix.shape[:2]), joint.vectors.expand(len(x), -1, -1)
            parts = [slice(start, start + at_once) for start in range(0, len(x), at_once)]
            if len(pages) > 1:  # what each has for its next passes must not be held for all
                pages = [replace(page, replay=None) for page in pages]
            gains = [gains_of(page, maps[part], vectors[part]) for page, part in zip(pages, parts, strict=True)]
        return _concepts(items, pages[0], replace(joint, maps=maps), torch.cat(gains))

    def _factorised(self, matrix: Tensor) -> Factors:
        return factorised(matrix.relu(), self.concepts, sweeps=self.sweeps, tolerance=self.tolerance)

    def _page(self, score: Score, x: Tensor) -> Features:
        layer = self.choose(x, score) if self.layer is None else str(self.layer)
        with Pass([self], [layer], x, [score]) as one:
            return next(features for _, features in one.features(0))


def gains_of(features: Features, maps: Tensor, vectors: Tensor) -> Tensor:
    """(N,cells,C), (N,C,K) -> (N,C): the score with one concept alone at the layer, less that of an empty layer.

    (N,C,classes) where the question is every class.
    """
    samples, concepts = vectors.shape[:2]
    if features.values.numel() == 0:
        return features.values.new_zeros(samples, concepts, 0)
    maps, vectors = F.pad(maps.mT, (0, 0, 0, 1)), F.pad(vectors, (0, 0, 0, 1))  # the last one is the empty layer

    def alone(part: slice) -> tuple[Callable[[Tensor], object], Tensor]:
        rows = torch.arange(samples * (concepts + 1), device=maps.device)[part]
        owners, which = rows // (concepts + 1), rows % (concepts + 1)

        def change(activation: Tensor) -> object:
            made = vectors[owners, which][..., None] * maps[owners, which][:, None]
            return activation.copy_(made.view(activation.shape))

        return change, owners

    scores: Tensor = features.scores_with(samples * (concepts + 1), alone).unflatten(0, (samples, concepts + 1))
    return (scores[:, :-1] - scores[:, -1:]).to(maps.dtype)


def _concepts(items: Sequence[Item], features: Features, joint: Factors, gains: Tensor) -> Concepts:
    """Maps (N,cells,C), vectors (1,C,K), gains (N,C,classes) -> what is known of the concepts, on the CPU."""
    amounts = joint.maps.sum(1)
    mean = (_portions(amounts)[..., None] * gains).sum(0)
    shares = _portions(amounts.sum(0) * joint.vectors[0].sum(1))
    maps = joint.maps.mT.unflatten(2, features.activation.shape[2:])

    def array(values: Tensor) -> Floats:
        return values.to("cpu", features.activation.dtype).numpy()

    drawn = [_drawn(item) for item in items]
    return Concepts(
        maps=array(maps),
        vectors=array(joint.vectors[0]),
        shares=array(shares),
        gains=array(mean),
        top=tuple(_gainers(row, features.score.name_of) for row in mean),
        error=float(joint.error[0]),
        layer=features.layer,
        names=tuple(item.name for item in items),
        placements=tuple(placement for placement, _ in drawn),
        pictures=tuple(picture for _, picture in drawn),
        notes=features.notes,
    )


def _gainers(gains: Tensor, name: Callable[[int], str]) -> tuple[ClassGain, ...]:
    best = gains.topk(min(NAMED, len(gains)))
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return tuple(ClassGain(k, name(k), gain) for k, gain in pairs if gain > 0)


def _drawn(item: Item) -> tuple[Placement, Pixels | None]:
    """What to draw on, and where the maps lie there: the original, or the model's input where the place is unknown."""
    if item.placement is not None and item.image is not None:
        return item.placement, item.image
    return Placement.identity(tuple(item.x.shape[1:])), item.seen


def _portions(amounts: Tensor) -> Tensor:
    """Each over the sum along the first axis; zeros where that is 0."""
    total = amounts.sum(0)
    return torch.where(total > 0, amounts / total, 0)
