"""Image towers of models that know images and texts, CLIP and SigLIP, with the text tower beside them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from camscope.cards import ModelCard
from camscope.errors import CamscopeError, ModelError
from camscope.models.checkpoint import RANDOM, Weights, described, load_strictly, read_state, same_numbers
from camscope.models.fetch import package, unavailable
from camscope.models.huggingface import preprocessing_of


class ImageTower(nn.Module):
    """Images (N,C,H,W) -> embeddings (N,D), as `whole` compares them with its texts'."""

    def __init__(self, whole: Any) -> None:
        super().__init__()
        self.whole: Any = whole

    def forward(self, pixel_values: Tensor) -> Tensor:
        """(N,D)"""
        return _embedding(self.whole.get_image_features(pixel_values=pixel_values))


def clip_model(name: str, weights: Weights) -> tuple[nn.Module, ModelCard]:
    """The image tower of "org/name" or of a folder; `Text` questions are asked through the text tower beside it."""
    transformers = package("transformers")
    folder = Path(name).expanduser()
    source = str(folder) if folder.is_dir() else name
    try:
        with same_numbers():
            whole = _whole(transformers, source, weights)
        tokens = transformers.AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except CamscopeError:
        raise
    except (OSError, SafetensorError) as error:
        advice = f"fetch the files of {name!r} and name the folder that holds them: clip:FOLDER"
        raise unavailable(f"clip:{name}", error, advice) from error
    except (ValueError, RuntimeError, KeyError) as error:
        raise ModelError(f"clip:{name} is no model of images and texts that transformers can build: {error}") from error
    tower = ImageTower(whole.float())
    way = preprocessing_of(transformers, source)
    return tower, ModelCard(described(f"clip:{name}", weights), way, embed_text=_encoder(whole, tokens))


def _whole(transformers: Any, source: str, weights: Weights) -> Any:
    if weights is None:
        model = transformers.AutoModel.from_pretrained(source, trust_remote_code=False, use_safetensors=True)
    else:
        config = transformers.AutoConfig.from_pretrained(source, trust_remote_code=False)
        model = transformers.AutoModel.from_config(config, trust_remote_code=False)
        if weights != RANDOM:
            load_strictly(model, read_state(weights), weights)
    if not all(hasattr(model, f"get_{what}_features") for what in ("image", "text")):
        raise ModelError(
            f"{type(model).__name__} has no towers of images and texts; for a classifier, load_model('hf:{source}')"
        )
    return model


def _encoder(whole: Any, tokens: Any) -> Callable[[str], Tensor]:
    # SigLIP was trained on texts filled up to one length
    fixed = "siglip" in str(getattr(whole.config, "model_type", ""))

    def encode(text: str) -> Tensor:
        """(D,)"""
        given = tokens([text], return_tensors="pt", padding="max_length" if fixed else True, truncation=True)
        here = next(whole.parameters()).device
        with torch.no_grad():
            return _embedding(whole.get_text_features(**{key: value.to(here) for key, value in given.items()}))[0]

    return encode


def _embedding(found: Any) -> Tensor:
    """A tensor, or the pooled one of a structure, as versions of transformers return it."""
    embedding: Tensor = found if isinstance(found, Tensor) else found.pooler_output
    return embedding
