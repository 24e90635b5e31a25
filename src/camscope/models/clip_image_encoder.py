"""`CLIPImageEncoder`: load the image encoder of a CLIP or SigLIP model, and its text encoder for `TextSimilarity`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from camscope.errors import ModelError
from camscope.loaded_model_metadata_and_weight_digest import LoadedModelMetadata
from camscope.models.checkpoint import (
    RANDOM_WEIGHTS,
    WeightsSource,
    fixed_seed_scope,
    format_model_source,
    load_state_dict_strictly,
    read_state_dict,
)
from camscope.models.huggingface import load_preprocessing, transformers_errors_converted
from camscope.models.huggingface_file_damage import check_settings_file, check_tokenizer_files, check_weight_files
from camscope.optional_packages import require


class CLIPImageEncoder(nn.Module):
    """The image encoder of a CLIP or SigLIP model: images (N,C,H,W) to embeddings (N,D)."""

    def __init__(self, full_model: Any) -> None:
        super().__init__()
        self.full_model: Any = full_model

    def forward(self, pixel_values: Tensor) -> Tensor:
        """Compute the CLIP embeddings (N,D) of preprocessed images (N,C,H,W)."""
        return _extract_embedding(self.full_model.get_image_features(pixel_values=pixel_values))


def load_clip_image_encoder_and_metadata(name: str, weights: WeightsSource) -> tuple[nn.Module, LoadedModelMetadata]:
    """Load the image encoder of a CLIP or SigLIP model. The source is a repository ("org/name") or a folder.

    The model model_metadata holds the text encoder of the same model, which `TextSimilarity` uses.
    """
    transformers, folder = require("transformers", extra="hub"), Path(name).expanduser()
    source = str(folder) if folder.is_dir() else name
    check_settings_file(source, "config.json")
    check_tokenizer_files(source)
    if weights is None:
        check_weight_files(source)
    with transformers_errors_converted(f"clip:{name}", f"the files of {name!r}", "model of images and texts"):
        with fixed_seed_scope():
            full_model = _load_image_and_text_model(transformers, source, weights)
        tokens = transformers.AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    image_encoder = CLIPImageEncoder(full_model.float())
    preprocess = load_preprocessing(transformers, source)
    return image_encoder, LoadedModelMetadata(
        format_model_source(f"clip:{name}", weights), preprocess, embed_text=_create_text_encoder(full_model, tokens)
    )


def _load_image_and_text_model(transformers: Any, source: str, weights: WeightsSource) -> Any:
    """Load a model of Hugging Face with an image and a text encoder. No remote code runs."""
    if weights is None:
        model = transformers.AutoModel.from_pretrained(source, trust_remote_code=False, use_safetensors=True)
    else:
        config = transformers.AutoConfig.from_pretrained(source, trust_remote_code=False)
        model = transformers.AutoModel.from_config(config, trust_remote_code=False)
        if weights != RANDOM_WEIGHTS:
            load_state_dict_strictly(model, read_state_dict(weights), weights)
    if not all(hasattr(model, f"get_{what}_features") for what in ("image", "text")):
        raise ModelError(
            f"{type(model).__name__} has no image and text encoders; load a classifier with load_model('hf:{source}')"
        )
    return model


def _create_text_encoder(full_model: Any, tokenizer: Any) -> Callable[[str], Tensor]:
    """Return a function from a text to its embedding."""
    # SigLIP was trained on texts padded to one length
    has_fixed_length = "siglip" in str(getattr(full_model.config, "model_type", ""))

    def encode(text: str) -> Tensor:
        """Compute the embedding (D,) of a text."""
        padding = "max_length" if has_fixed_length else True
        inputs = tokenizer([text], return_tensors="pt", padding=padding, truncation=True)
        device = next(full_model.parameters()).device
        with torch.no_grad():
            output = full_model.get_text_features(**{key: value.to(device) for key, value in inputs.items()})
        return _extract_embedding(output)[0]

    return encode


def _extract_embedding(output: Any) -> Tensor:
    """Return the embeddings from the output of a transformers model, which is a tensor or a structure."""
    embedding: Tensor = output if isinstance(output, Tensor) else output.pooler_output
    return embedding
