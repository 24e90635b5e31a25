"""Targets for embedding models: similarity of an image to other images or to a text."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from camscope.errors import TargetError
from camscope.plurals import plural
from camscope.pytree import iter_leaves
from camscope.targets.base import ClassNameLookup, ImageContext, Target
from camscope.targets.find_class_scores import check_scores_are_ordinary_tensor, full_precision, get_output_tensor
from camscope.unusual_tensors import check_ordinary_tensor

SimilarityKind = Literal["cosine", "dot"]
IMAGE_EMBEDDING_FIELDS = ("image_embeds", "embeddings", "pooler_output")


class MeanReference(NamedTuple):
    """The mean (D,) of reference embeddings, and the number of references."""

    embedding: Tensor
    n_references: int


@dataclass(frozen=True, eq=False)
class Similarity(Target):
    """The similarity of the image embedding to a reference embedding: cosine similarity or dot product.

    Args:
        reference: An embedding (D,), several (P,D), whose mean is the prototype, or images that the model embeds: one
            of any kind that `explain` accepts, or a list of them. Embeddings (D,) may be in a list too, also among
            images. For a model of signals (C,L), a tensor with rows of L numbers is a signal.
        kind: "cosine" or "dot".
        n_references: Number of references, which `prepare_for_image` and `resolve_choices` set.

    Raises:
        TargetError: `kind` is unknown.

    >>> float(Similarity(torch.tensor([3.0, 4.0]))(torch.tensor([[3.0, 4.0]])))
    1.0

    """

    reference: Any
    kind: SimilarityKind = "cosine"
    n_references: int = field(default=1, kw_only=True, repr=False)

    def __post_init__(self) -> None:
        if self.kind not in ("cosine", "dot"):
            raise TargetError(f"kind={self.kind!r}: expected 'cosine' or 'dot'")
        for _, tensor in iter_leaves(self.reference):
            check_ordinary_tensor(tensor, "the reference", "reference", TargetError)

    def prepare_for_image(self, image_context: ImageContext) -> Target:
        """Return the target with its reference images replaced by their embeddings."""
        size = getattr(self.reference, "shape", ())
        is_signal = len(size) == 2 and tuple(size[1:]) == image_context.input_size
        if _is_embedding(self.reference) and not is_signal:
            return self
        images = list(self.reference) if isinstance(self.reference, list | tuple) else [self.reference]
        if not images:
            raise TargetError("Similarity to an empty list: expected an embedding, an image, or a list of images")
        vectors = [
            image if _is_embedding(image) and image.ndim == 1 else image_context.embed_image(image) for image in images
        ]
        if len({vector.shape for vector in vectors}) > 1:
            shapes = ", ".join(str(tuple(vector.shape)) for vector in vectors)
            raise TargetError(f"the references have different shapes {shapes}: expected embeddings of the same length")
        stacked = torch.stack([vector.to(vectors[0].device) for vector in vectors])
        return replace(self, reference=stacked, n_references=len(images))

    def resolve_choices(
        self, output: Any, input_size: Sequence[int], class_names: Sequence[str] | None
    ) -> "Similarity":
        """Return the target with a single reference (D,): the mean of all references."""
        if not _is_embedding(self.reference):
            raise TargetError(
                "Similarity to an image: only explain() can compute the embedding of the image",
                fix="pass its embedding (D,), or several (P,D)",
            )
        mean = self._average_references(image_embedding(output))
        return replace(self, reference=mean.embedding, n_references=max(self.n_references, mean.n_references))

    def _average_references(self, embedding: Tensor) -> MeanReference:
        """Check that the reference embeddings fit the embedding (N,D) of the image. Return their mean."""
        reference = self.reference
        if reference.shape[-1] != embedding.shape[1] or reference.numel() == 0:
            size = plural(embedding.shape[1], "number")
            raise TargetError(
                f"the reference has shape {tuple(reference.shape)}, but the embedding of the model has {size}"
            )
        vectors = reference.reshape(-1, reference.shape[-1]).to(embedding.device, full_precision(embedding).dtype)
        vectors = F.normalize(vectors, dim=1, eps=0) if self.kind == "cosine" and len(vectors) > 1 else vectors
        if not bool(vectors.isfinite().all()) or not bool(vectors.mean(0).any()):
            raise TargetError("the reference is zero or not finite: expected a finite vector other than zero")
        return MeanReference(vectors.mean(0), len(vectors))

    def __call__(self, output: Any) -> Tensor:
        """Compute the similarity of each sample (N,)."""
        embedding = full_precision(image_embedding(output))
        reference: Tensor = self.reference.to(embedding)
        if self.kind == "dot":
            return embedding @ reference
        length = embedding.norm(dim=1) * reference.norm()
        return (embedding @ reference) / torch.where(length > 0, length, 1)

    def describe(self, sample: int, class_name: ClassNameLookup) -> str:
        """Return a description of the target, such as `similarity to a prototype of 3`."""
        reference = "the reference" if self.n_references == 1 else f"a prototype of {self.n_references}"
        return f"{'similarity' if self.kind == 'cosine' else 'dot product'} to {reference}"


@dataclass(frozen=True, eq=False)
class TextSimilarity(Target):
    """The cosine similarity between the embeddings of an image and a text, for models such as CLIP and SigLIP.

    Args:
        prompt: A sentence such as "a photo of a tabby".
        contrast_prompt: Another sentence, whose similarity is subtracted.
        encode: A function text -> embedding (D,). The default is that of a model loaded by `load_model("clip:…")`.
        similarities: Similarities to the encoded texts, which `prepare_for_image` sets.

    Raises:
        TargetError: A prompt is no sentence, or `encode` is no function.

    >>> target = TextSimilarity("a tabby", encode=lambda text: torch.tensor([3.0, 4.0]))
    >>> target.describe(0, str)
    'similarity to "a tabby"'

    """

    prompt: str
    contrast_prompt: str | None = None
    encode: Callable[[str], Tensor] | None = field(default=None, repr=False)
    similarities: tuple[Similarity, ...] = field(default=(), kw_only=True, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.prompt, str) or not isinstance(self.contrast_prompt, str | None):
            raise TargetError(
                f"TextSimilarity({self.prompt!r}, {self.contrast_prompt!r}): expected a sentence, and a second sentence or None"
            )
        if self.encode is not None and not callable(self.encode):
            raise TargetError(f"encode={self.encode!r} of a TextSimilarity: expected a function text -> embedding (D,)")
        if self.encode is None or self.similarities:
            return
        texts = [self.prompt, *([] if self.contrast_prompt is None else [self.contrast_prompt])]
        encoded = list(map(self.encode, texts))  # not later: in a forward pass hooks would record the text tower
        vectors = [vector if isinstance(vector, Tensor) else torch.tensor(vector, device="cpu") for vector in encoded]
        object.__setattr__(self, "similarities", tuple(Similarity(vector.detach().reshape(-1)) for vector in vectors))

    def prepare_for_image(self, image_context: ImageContext) -> "TextSimilarity":
        """Return the target with a text encoder: the user's encoder, or else the model's encoder."""
        return self if self.encode is not None else replace(self, encode=image_context.embed_text)

    def resolve_choices(
        self, output: Any, input_size: Sequence[int], class_names: Sequence[str] | None
    ) -> "TextSimilarity":
        """Return the target with the embeddings of its texts. Check that they fit the model's output."""
        if not self.similarities:
            raise TargetError(
                f"TextSimilarity({self.prompt!r}): the model has no text encoder",
                fix='pass encode=, a function text -> embedding (D,), or load the model by load_model("clip:…")',
            )
        resolved = tuple(
            similarity.resolve_choices(output, input_size, class_names) for similarity in self.similarities
        )
        return replace(self, similarities=resolved)

    def __call__(self, output: Any) -> Tensor:
        """Compute the similarity of each sample (N,)."""
        if not self.similarities:
            raise TargetError(
                f"TextSimilarity({self.prompt!r}) must be resolved in a first forward pass: use it through a method, or a Score"
            )
        first, *contrast = (similarity(output) for similarity in self.similarities)
        return first - contrast[0] if contrast else first

    def describe(self, sample: int, class_name: ClassNameLookup) -> str:
        """Return a description of the target, such as `similarity to "a tabby" rather than "a dog"`."""
        other = "" if self.contrast_prompt is None else f' rather than "{self.contrast_prompt}"'
        return f'similarity to "{self.prompt}"{other}'


def image_embedding(output: Any) -> Tensor:
    """Find the image embeddings (N,D) in the output of a model.

    Args:
        output: The output of the model: a tensor (N,D), or a structure with one, such as that of CLIP.

    Returns:
        The embeddings (N,D).

    Raises:
        TargetError: The output has no embeddings.

    >>> image_embedding(torch.rand(2, 8)).shape
    torch.Size([2, 8])

    """
    named = [value for n in IMAGE_EMBEDDING_FIELDS if (value := get_output_tensor(output, n)) is not None]
    candidates = [output] if isinstance(output, Tensor) else named[:1]
    candidates = candidates or [leaf for _, leaf in iter_leaves(output) if leaf.is_floating_point() and leaf.ndim == 2]
    if len(candidates) != 1 or candidates[0].ndim < 2 or candidates[0].flatten(1).shape[1] != candidates[0].shape[1]:
        shapes = ", ".join(str(tuple(leaf.shape)) for _, leaf in iter_leaves(output)) or type(output).__name__
        raise TargetError(f"a similarity target needs an output with embeddings (N,D), but the output is {shapes}")
    check_scores_are_ordinary_tensor(candidates[0])
    return candidates[0].flatten(1)


def _is_embedding(reference: object) -> bool:
    return isinstance(reference, Tensor) and reference.is_floating_point() and reference.ndim <= 2
