"""Questions of embeddings: how alike an image is to others, or to a text."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from camscope.errors import TargetError
from camscope.plurals import plural
from camscope.pytree import iter_leaves
from camscope.targets.base import ClassNameLookup, ImageContext, Target
from camscope.targets.outputs import full_precision

SimilarityKind = Literal["cosine", "dot"]
IMAGE_EMBEDDING_FIELDS = ("image_embeds", "embeddings", "pooler_output")


@dataclass(frozen=True, eq=False)
class Similarity(Target):
    """How alike the embedding (N,D) of the image is to a reference: the cosine of their angle, or their dot product.

    `reference`: an embedding (D,), several (P,D), whose mean is the prototype, or images: one of any kind that `explain_images`
    takes, or a list of them; the model embeds them. Of a model of signals (C,L), a tensor whose rows have L numbers is a
    signal; several embeddings (D,) may come as a list, among images too.

    >>> float(Similarity(torch.tensor([3.0, 4.0]))(torch.tensor([[3.0, 4.0]])))
    1.0
    """

    reference: Any
    kind: SimilarityKind = "cosine"
    n_references: int = field(default=1, kw_only=True, repr=False)

    def __post_init__(self) -> None:
        if self.kind not in ("cosine", "dot"):
            raise TargetError(f"kind={self.kind!r}: expected 'cosine' or 'dot'")

    def bind(self, image_context: ImageContext) -> Target:
        """With embeddings in place of images."""
        size = getattr(self.reference, "shape", ())
        signal = len(size) == 2 and tuple(size[1:]) == image_context.input_size
        if _is_embedding(self.reference) and not signal:
            return self
        images = list(self.reference) if isinstance(self.reference, list | tuple) else [self.reference]
        if not images:
            raise TargetError("Similarity to nothing: pass an embedding, an image, or a list of images")
        each = [
            image if _is_embedding(image) and image.ndim == 1 else image_context.embed_image(image) for image in images
        ]
        if len({one.shape for one in each}) > 1:
            raise TargetError(
                f"the references are {', '.join(str(tuple(one.shape)) for one in each)}: expected one length"
            )
        return replace(self, reference=torch.stack([one.to(each[0].device) for one in each]), n_references=len(images))

    def resolve(self, output: Any, input_size: Sequence[int], class_names: Sequence[str] | None) -> "Similarity":
        """The one prototype (D,)."""
        if not _is_embedding(self.reference):
            raise TargetError(
                "Similarity to an image: only explain can embed it; pass its embedding (D,), or several (P,D)"
            )
        own, given = image_embedding(output), self.reference
        if given.shape[-1] != own.shape[1] or given.numel() == 0:
            raise TargetError(
                f"the reference is {tuple(given.shape)}; the model's embedding has {plural(own.shape[1], 'number')}"
            )
        each = given.reshape(-1, given.shape[-1]).to(own.device, full_precision(own).dtype)
        each = F.normalize(each, dim=1, eps=0) if self.kind == "cosine" and len(each) > 1 else each
        if not bool(each.isfinite().all()) or not bool(each.mean(0).any()):
            raise TargetError("the reference is zero or not finite: nothing is alike to it")
        return replace(self, reference=each.mean(0), n_references=max(self.n_references, len(each)))

    def __call__(self, output: Any) -> Tensor:
        """(N,)"""
        own = full_precision(image_embedding(output))
        reference: Tensor = self.reference.to(own)
        if self.kind == "dot":
            return own @ reference
        length = own.norm(dim=1) * reference.norm()
        return (own @ reference) / torch.where(length > 0, length, 1)

    def describe(self, sample: int, class_name: ClassNameLookup) -> str:
        """`similarity to the reference`, `similarity to a prototype of 3`"""
        what = "the reference" if self.n_references == 1 else f"a prototype of {self.n_references}"
        return f"{'similarity' if self.kind == 'cosine' else 'dot product'} to {what}"


@dataclass(frozen=True, eq=False)
class TextSimilarity(Target):
    """How alike the image's embedding is to a text's: the cosine of their angle, as CLIP and SigLIP are trained for it.

    `prompt`: a sentence, "a photo of a tabby"; `contrast_prompt`: another one, whose similarity is taken off. `encode`: text
    -> embedding (D,); default: that of a model which `load_model("clip:…")` loaded.
    """

    prompt: str
    contrast_prompt: str | None = None
    encode: Callable[[str], Tensor] | None = field(default=None, repr=False)
    similarities: tuple[Similarity, ...] = field(default=(), kw_only=True, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.prompt, str) or not isinstance(self.contrast_prompt, str | None):
            raise TargetError(
                f"Text({self.prompt!r}, {self.contrast_prompt!r}): expected a sentence, and another or None"
            )
        if self.encode is not None and not callable(self.encode):
            raise TargetError(f"encode={self.encode!r} of a Text: expected a function text -> embedding (D,)")
        if (
            self.encode is not None and not self.similarities
        ):  # now: inside a pass, the hooks would see the text tower run
            texts = [self.prompt, *([] if self.contrast_prompt is None else [self.contrast_prompt])]
            encoded = [self.encode(text) for text in texts]
            vectors = [one if isinstance(one, Tensor) else torch.tensor(one, device="cpu") for one in encoded]
            every = [Similarity(vector.detach().reshape(-1)) for vector in vectors]
            object.__setattr__(self, "similarities", tuple(every))

    def bind(self, image_context: ImageContext) -> "TextSimilarity":
        """With the encoder of the scene, if it has one and none is given."""
        return self if self.encode is not None else replace(self, encode=image_context.embed_text)

    def resolve(self, output: Any, input_size: Sequence[int], class_names: Sequence[str] | None) -> "TextSimilarity":
        """The texts' embeddings, held against the image's."""
        if not self.similarities:
            raise TargetError(
                f"Text({self.prompt!r}): no text encoder is known; pass encode=, a function text -> embedding (D,), or load "
                f'the model as load_model("clip:…")'
            )
        return replace(
            self, similarities=tuple(one.resolve(output, input_size, class_names) for one in self.similarities)
        )

    def __call__(self, output: Any) -> Tensor:
        """(N,)"""
        if not self.similarities:
            raise TargetError(f"Text({self.prompt!r}) must be settled by a first pass")
        first, *others = (one(output) for one in self.similarities)
        return first - others[0] if others else first

    def describe(self, sample: int, class_name: ClassNameLookup) -> str:
        """`similarity to "a tabby" rather than "a dog"`"""
        other = "" if self.contrast_prompt is None else f' rather than "{self.contrast_prompt}"'
        return f'similarity to "{self.prompt}"{other}'


def image_embedding(output: Any) -> Tensor:
    """(N,D): a tensor, `image_embeds`, `embeddings`, `pooler_output`, or the only (N,D) float tensor of an output."""
    if isinstance(output, Tensor):
        found = [output]
    else:
        named = [
            output.get(n) if isinstance(output, Mapping) else getattr(output, n, None) for n in IMAGE_EMBEDDING_FIELDS
        ]
        found = [one for one in named if isinstance(one, Tensor)][:1]
        found = found or [leaf for _, leaf in iter_leaves(output) if leaf.is_floating_point() and leaf.ndim == 2]
    if len(found) != 1 or found[0].ndim < 2 or found[0].flatten(1).shape[1] != found[0].shape[1]:
        shapes = ", ".join(str(tuple(leaf.shape)) for _, leaf in iter_leaves(output)) or type(output).__name__
        raise TargetError(f"a similarity is of embeddings (N,D); the output is {shapes}")
    return found[0].flatten(1)


def _is_embedding(reference: object) -> bool:
    return isinstance(reference, Tensor) and reference.is_floating_point() and reference.ndim <= 2
