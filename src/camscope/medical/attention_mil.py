"""Explain models of whole slides that weigh tiles by attention (multiple-instance learning, MIL)."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from camscope.errors import InputError, ModelError
from camscope.explainers import Explainer
from camscope.explainers.core.evaluation_context import get_device_and_dtype
from camscope.explainers.core.model_input import read_model_input
from camscope.explainers.core.perturbed_evaluator import track_steps
from camscope.explainers.core.setting_checks import check_positive_integer
from camscope.images.preprocess import as_preprocess
from camscope.medical.slide_explanation import SlideExplanation
from camscope.medical.slide_tiles import SlideTiles
from camscope.plurals import plural
from camscope.registry import METHODS
from camscope.targets.class_targets import normalize_target, resolve_class_index


class GatedAttention(nn.Module):
    """Gated attention over the tiles of a slide (Ilse et al. 2018, arXiv:1802.04712, equation 9), and a linear classifier.

    The attention of tile t is softmax_t wᵀ(tanh(V h_t) ⊙ sigmoid(U h_t)). The slide is the mean of the features h_t, weighed by
    the attention.

    Args:
        n_features: The number of features of a tile.
        n_classes: The number of classes.
        n_hidden: The number of rows of V and U.

    >>> logits, attention = GatedAttention(8, 2)(torch.rand(5, 8))
    >>> logits.shape, attention.shape
    (torch.Size([2]), torch.Size([5]))

    """

    def __init__(self, n_features: int, n_classes: int, n_hidden: int = 128) -> None:
        super().__init__()
        self.tanh_layer, self.gate_layer = nn.Linear(n_features, n_hidden), nn.Linear(n_features, n_hidden)
        self.weight_layer, self.classifier = nn.Linear(n_hidden, 1), nn.Linear(n_features, n_classes)

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the logits (K,) of a slide and the attention (T,) of its tiles from their features (T,D)."""
        gated = self.tanh_layer(features).tanh() * self.gate_layer(features).sigmoid()
        attention = self.weight_layer(gated)[:, 0].softmax(0)
        return self.classifier(attention @ features), attention


class SlideOutput(NamedTuple):
    """The logits (K,) of a slide, and the attention of its tiles: (T,), or (K,T) with one row per class."""

    logits: Tensor
    attention: Tensor


class TileInSlide(nn.Module):
    """The scores of a slide as a function of one tile. The features of all other tiles are fixed."""

    def __init__(self, encoder: nn.Module, head: nn.Module, features: Tensor, index: int) -> None:
        super().__init__()
        self.encoder, self.head = encoder, head
        self._features, self._index = features, index

    def forward(self, images: Tensor) -> Tensor:
        """Compute the logits (N,K) of the slide for N versions (N,C,H,W) of the tile."""
        before, after = self._features[: self._index], self._features[self._index + 1 :]
        rows = [torch.cat([before, row[None], after]) for row in _encode(self.encoder, images)]
        return torch.stack([_read_output(self.head(row), len(row)).logits for row in rows])


def explain_slide(
    encoder: nn.Module,
    head: nn.Module,
    tiles: SlideTiles,
    target: int | str | None = None,
    *,
    preprocess: Any,
    method: str = "gradcam",
    layer: str | None = None,
    n_explained_tiles: int = 8,
    class_names: Sequence[str] | None = None,
    batch_size: int = 32,
    progress: bool = False,
) -> SlideExplanation:
    """Explain the score of a slide by the attention of its tiles, and by maps inside those with the highest attention.

    A map inside a tile explains the score of the whole slide: the gradient passes through the attention and the classifier to the
    tile, while the other tiles are fixed. Attention says which tiles the model reads, not whether they count for or against
    the class.

    Args:
        encoder: The model of a tile, from images (N,C,H,W) to features (N,D).
        head: The model of a slide, from features (T,D) to a pair or dict of logits and attention, as `GatedAttention`.
        tiles: The tiles, from `read_slide_tiles`.
        target: Index or name of the class. Default: the class with the highest score.
        preprocess: How the pixels of a tile become the encoder's input.
        method: The name of the method for the maps inside tiles.
        layer: The layer of the encoder. Default: the last with a grid.
        n_explained_tiles: For how many tiles a map is computed.
        class_names: The names of the classes.
        batch_size: Tiles per batch.
        progress: Whether to show a progress bar.

    Returns:
        The explanation of the slide.

    Raises:
        InputError: If the target is not one class, or a number is out of range.
        ModelError: If the encoder or the head returns something else.
        TargetError: If the class does not exist.

    >>> import tempfile
    >>> import numpy as np
    >>> import tifffile
    >>> from camscope.medical import read_slide_tiles
    >>> path = f"{tempfile.mkdtemp()}/slide.tif"
    >>> pixels = np.random.default_rng(0).integers(0, 255, (256, 256, 3), np.uint8)
    >>> tifffile.imwrite(path, pixels, tile=(128, 128), photometric="rgb")
    >>> tiles = read_slide_tiles(path, tile_size=128, min_tissue=0)
    >>> encoder = nn.Sequential(nn.Conv2d(3, 4, 8), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    >>> explain_slide(encoder, GatedAttention(4, 2), tiles, 1, preprocess="imagenet", n_explained_tiles=0).attention.shape
    (4,)

    """
    check_positive_integer(batch_size=batch_size)
    if n_explained_tiles < 0:
        raise InputError(f"n_explained_tiles={n_explained_tiles}; expected 0 or more")
    explainer_class: type[Explainer] = METHODS[method]
    with _evaluation_mode(encoder, head):
        features = _encode_tiles(encoder, tiles, preprocess, batch_size, progress)
        with torch.no_grad():
            output = _read_output(head(features), len(tiles))
        index = int(output.logits.argmax())
        if target is not None:
            label = normalize_target(target)
            if not isinstance(label, int | str):
                raise InputError(f"target={target!r}; expected one class index or name")
            index = resolve_class_index(label, len(output.logits), class_names)
        attention = output.attention if output.attention.ndim == 1 else output.attention[index]
        top = attention.argsort(descending=True)[:n_explained_tiles].tolist()
        explanations = {}
        with track_steps(f"{explainer_class.title}, {plural(len(top), 'tile')}", len(top), progress) as advance:
            for number, pixels in zip(top, tiles.iter_tiles(top), strict=True):
                model = TileInSlide(encoder, head, features, number).eval()
                full_layer = f"encoder.{layer}" if layer else None
                explainer = _create(explainer_class, model, full_layer, preprocess, class_names)
                explanations[number] = explainer.explain(pixels, index)
                advance(1)
    probability = float(output.logits.softmax(0)[index]) if len(output.logits) > 1 else None
    name = class_names[index] if class_names is not None else f"class {index}"
    values = attention.double().cpu().numpy()
    return SlideExplanation(tiles, values, name, index, float(output.logits[index]), probability, explanations)


def _create(
    explainer_class: Any, model: nn.Module, layer: str | None, preprocess: Any, class_names: Sequence[str] | None = None
) -> Explainer:
    settings = {} if layer is None else {"layer": layer}
    explainer: Explainer = explainer_class(model, preprocess=preprocess, class_names=class_names, **settings)
    return explainer


@contextmanager
def _evaluation_mode(*models: nn.Module) -> Iterator[None]:
    """Set models to eval mode inside the `with`. Restore the mode of each module at its end."""
    modes = {module: module.training for model in models for module in model.modules()}
    for model in models:
        model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


def _encode_tiles(encoder: nn.Module, tiles: SlideTiles, preprocess: Any, batch_size: int, progress: bool) -> Tensor:
    """Compute the features (T,D) of all tiles."""
    device, dtype = get_device_and_dtype(encoder)
    prepare = as_preprocess(preprocess)
    features, batch = list[Tensor](), list[Tensor]()
    with track_steps(f"features of {plural(len(tiles), 'tile')}", len(tiles), progress) as advance, torch.no_grad():
        for number, pixels in enumerate(tiles.iter_tiles(), 1):
            batch.append(read_model_input(pixels, prepare, encoder, (device, dtype)).x)
            if len(batch) == batch_size or number == len(tiles):
                features.append(_encode(encoder, torch.stack(batch)))
                advance(len(batch))
                batch = []
    return torch.cat(features)


def _encode(encoder: nn.Module, images: Tensor) -> Tensor:
    features = encoder(images)
    if not isinstance(features, Tensor) or features.ndim != 2 or len(features) != len(images):
        shape = tuple(features.shape) if isinstance(features, Tensor) else type(features).__name__
        raise ModelError(f"the encoder returned {shape} for {plural(len(images), 'tile')}; expected features (N,D)")
    return features


def _read_output(output: Any, n_tiles: int) -> SlideOutput:
    """Return the logits (K,) and the attention (T,) or (K,T) from the output of a head."""
    parts = (output.get("logits"), output.get("attention")) if isinstance(output, dict) else output
    expected = "expected a pair (logits (K,), attention (T,) or (K,T)), or a dict with these keys"
    if not isinstance(parts, tuple | list) or len(parts) < 2 or not all(isinstance(part, Tensor) for part in parts[:2]):
        raise ModelError(f"the head returned a {type(output).__name__}; {expected}")
    logits, attention = parts[0].squeeze(), parts[1].squeeze()
    logits, attention = logits.reshape(-1), attention.reshape(1) if not attention.ndim else attention
    if attention.ndim == 2 and attention.shape == (n_tiles, len(logits)) != (len(logits), n_tiles):
        attention = attention.T
    if tuple(attention.shape) not in ((n_tiles,), (len(logits), n_tiles)):
        raise ModelError(
            f"the head returned attention {tuple(attention.shape)} for {plural(n_tiles, 'tile')}; {expected}"
        )
    return SlideOutput(logits, attention)
